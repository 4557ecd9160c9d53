"""A run of four ranks meets faults of every kind, and ends with the weights of one that met none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quern.train.checkpoint.format.manifest import list_checkpoints
from support.remote.s3_server import Server
from support.train import chaos
from support.train import run_case as case

STEPS = 40
KINDS = ("kill", "stop", "raise", "lose", "damage", "full", "flip", "no memory")


@pytest.mark.long
def test_a_run_that_meets_eight_faults_ends_as_one_without(tmp_path: Path, server: Server) -> None:
    """And uploads that are cut off. All windows are told as they were taken, and all of the time is accounted for."""
    paths = case.write_corpus(tmp_path / "data", {"web": 200, "code": 90})
    spoilt = [17]
    skips = {"guard": {"non_finite": "skip"}}
    plain = chaos.meet(tmp_path / "one", chaos.settings(tmp_path / "plain", paths, STEPS, **skips), [], spoilt)
    assert (plain.code, plain.starts) == (0, 1), plain.said
    events = chaos.drawn(44, KINDS, STEPS)
    config = chaos.settings(tmp_path / "run", paths, STEPS, server.url)
    chaos.cut_uploads(41, 3, server)
    met = chaos.meet(tmp_path / "two", config, events, spoilt, server)
    assert met.code == 0, met.said
    assert len(list((tmp_path / "two" / "marks").iterdir())) == len(KINDS), met.said
    assert list_checkpoints(str(tmp_path / "run"))[-1].step == STEPS
    expected, found = chaos.weights(tmp_path / "plain"), chaos.weights(tmp_path / "run")
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    assert case.told(tmp_path / "run", "checkpoint_failed"), "of the full disk"
    assert chaos.wrong_exposures(met, config, STEPS, spoilt) == []
    assert chaos.account_gap(met.run) < 0.01
    assert server.proxy.struck("cut request") == 3
    told = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert {row["event"] for row in told} == {"failed", "goes_back"}
    assert spoilt in [entry["leave_out"] for entry in case.ledger(tmp_path / "run") if entry["kind"] == "back"]


@pytest.mark.long
def test_three_ranks_go_on_where_four_were(tmp_path: Path) -> None:
    """The third cannot train any more after two failures in a row; the others take over its part of all, also of the
    weights and moments of the checkpoint, and of each global batch."""
    paths = case.write_corpus(tmp_path / "data")
    changes = {
        "precision": "fp64", "global_batch": 12, "micro_batch": 1, "steps": 12, "checkpoint": {"interval": 4},
        "parallel": {"dp_shard": None},
    }  # fmt: skip
    plain = chaos.meet(tmp_path / "one", case.settings(tmp_path / "plain", paths, **changes), [], [])
    events = [{"kind": "broken", "step": 7, "rank": 2, "place": "clip"}]
    config = case.settings(tmp_path / "run", paths, **changes)
    met = chaos.meet(tmp_path / "two", config, events, [], least=3)
    assert (plain.code, met.code) == (0, 0), met.said
    assert "goes on without" in met.said
    started = [entry for entry in case.ledger(met.run) if entry["kind"] in ("start", "resume")]
    assert [entry["step"] for entry in started] == [0, 4, 4]
    expected, found = chaos.weights(plain.run), chaos.weights(met.run)
    assert expected.keys() == found.keys()
    apart = {name: float((found[name] - value).abs().max()) for name, value in expected.items()}
    assert 0 < max(apart.values()) < 1e-10, apart
