"""What is written down of a step on any layout is what one process writes: every sequence once, every gradient once."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.train import run_case as CASE

pytestmark = pytest.mark.slow


STEP = 3
DEEP = {"model": {"num_layers": 4}, "micro_batch": 1}
UNTIED = {"model": {"num_layers": 4, "tied_embeddings": False}, "micro_batch": 1}

Given = tuple[dict[str, Any], dict[str, Any]]
QUICK: dict[str, Given] = {
    "DDP": ({"dp_replicate": 2, "dp_shard": 1}, {}),
    "FSDP2": ({"dp_shard": 2}, {}),
    "TP": ({"tp": 2}, {}),
    "1F1B": ({"pp": 2}, DEEP),
    "CP": ({"cp": 2, "cp_method": "allgather"}, {}),
}
MORE: dict[str, Given] = {
    "HSDP": ({"dp_replicate": 2, "dp_shard": 2}, {}),
    "FSDP2 + TP": ({"dp_shard": 2, "tp": 2}, {}),
    "key heads shared": ({"tp": 4}, {}),
    "DDP + TP": ({"dp_replicate": 2, "dp_shard": 1, "tp": 2}, {}),
    "ZBV": ({"pp": 2, "schedule": "zbv_zero_bubble"}, DEEP),
    "interleaved, zero bubble": ({"pp": 2, "schedule": "interleaved_zero_bubble"}, UNTIED),
    "PP + FSDP2": ({"pp": 2, "dp_shard": 2}, DEEP),
    "DualPipeV + TP": ({"pp": 2, "tp": 2, "schedule": "dualpipe_v"}, DEEP),
    "USP + FSDP2": ({"cp": 4, "cp_method": "usp", "ulysses": 2, "dp_shard": 2}, {}),
    "ring, no documents": ({"cp": 2, "cp_method": "ring"}, {"document_mask": False}),
    "FSDP2, no documents": ({"dp_shard": 2}, {"document_mask": False}),
}


def life(run: str, paths: list[str], parallel: dict[str, Any], changes: dict[str, Any]) -> None:
    config = CASE.settings(
        run, paths,
        precision="fp64", steps=6, parallel=parallel, forensics={"steps": [STEP], "window": 2},
        guard={"loss_z": 1e9, "grad_norm_z": 1e9}, **({"micro_batch": 2} | changes),
    )  # fmt: skip
    CASE.live(config)


def content(run: Path) -> dict[str, Any]:
    (path,) = (run / "forensics").iterdir()
    assert path.name == f"step_{STEP:08d}.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def close(values: dict[str, float], others: dict[str, float]) -> bool:
    return values.keys() == others.keys() and all(math.isclose(values[n], others[n], rel_tol=1e-6) for n in values)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return CASE.write_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def one_process(paths: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Any]:
    """What one process writes, by the changes of its config."""
    known: dict[str, dict[str, Any]] = {}

    def find(changes: dict[str, Any]) -> dict[str, Any]:
        key = json.dumps(changes)
        if key not in known:
            run = tmp_path_factory.mktemp("one")
            life(str(run), paths, {}, changes)
            known[key] = content(run)
        return known[key]

    return find


def same(kept_ranks: Any, paths: list[str], one_process: Any, given: Given, folder: Path) -> None:
    parallel, changes = given
    world = math.prod(parallel.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp"))
    kept_ranks(life, world, str(folder / "many"), paths, {"dp_shard": 1, **parallel}, changes)
    one, many = one_process(changes), content(folder / "many")
    dp = parallel.get("dp_replicate", 1) * parallel.get("dp_shard", 1)
    assert many["layout"]["tp"] == parallel.get("tp", 1)
    assert [step["step"] for step in many["steps"]] == [STEP - 1, STEP]
    for step, other in zip(many["steps"], one["steps"], strict=True):
        columns, others = step["sequences"], other["sequences"]
        for name in ("place", "source", "epoch", "window", "targets", "finite"):
            assert columns[name] == others[name], name
        expected = [value if value is None else pytest.approx(value, rel=1e-6) for value in others["loss"]]
        assert columns["loss"] == expected
        assert set(columns["dp_rank"]) == set(range(dp))
        seats = zip(columns["dp_rank"], columns["micro_batch"], columns["row"], strict=True)
        assert len(set(seats)) == len(columns["place"])
        assert sorted(step["within"]["place"]) == sorted(other["within"]["place"])
        assert close(step["layers"], other["layers"])
        assert step["grad_norm"] == pytest.approx(math.hypot(*step["layers"].values()), rel=1e-6)
    assert close(many["parameters"], one["parameters"])
    check_losses_by_source(folder / "many", many["steps"][-1]["sequences"])


def check_losses_by_source(run: Path, columns: dict[str, Any]) -> None:
    """The line of metrics against a sum over the step's sequences, each of which was compared with one process."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (found,) = [row["losses_by_source"] for row in rows if row.get("data_step") == STEP and row["kind"] == "step"]
    sequences = [*zip(columns["source"], columns["loss"], columns["targets"], strict=True)]
    assert found.keys() == {("web", "code")[source] for source, _, targets in sequences if targets}
    for name, loss in found.items():
        own = [row for row in sequences if row[0] == ("web", "code").index(name) and row[2]]
        mean = math.fsum(nats * targets for _, nats, targets in own) / sum(targets for _, _, targets in own)
        assert loss == pytest.approx(mean, rel=1e-7)  # the file has eight digits


@pytest.mark.parametrize(
    "name", [name if name != "DDP" else pytest.param(name, marks=pytest.mark.long) for name in QUICK]
)
def test_layouts_write_what_one_process_writes(
    kept_ranks: Any, paths: list[str], one_process: Any, tmp_path: Path, name: str
) -> None:
    same(kept_ranks, paths, one_process, QUICK[name], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name if place % 2 else pytest.param(name, marks=pytest.mark.exhaustive) for place, name in enumerate(MORE)]
)
def test_more_layouts_write_what_one_process_writes(
    kept_ranks: Any, paths: list[str], one_process: Any, tmp_path: Path, name: str
) -> None:
    same(kept_ranks, paths, one_process, MORE[name], tmp_path)


def asked(run: str, paths: list[str]) -> bool:
    """Rank 1 alone hears a signal."""
    import torch.distributed as dist

    from quern.train.processes.ranks import open_ranks
    from quern.train.setup import open_trainer

    config = CASE.settings(run, paths, guard={"loss_z": 1e9, "grad_norm_z": 1e9}, parallel={"dp_shard": 2})

    def look(trainer: Any, step: int) -> None:
        if step == STEP and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        trainer.on_gradients = look
        trainer.fit()
        return bool(trainer.complete)


def test_a_signal_to_one_rank_is_heard_by_all(kept_ranks: Any, paths: list[str], tmp_path: Path) -> None:
    assert all(kept_ranks(asked, 2, str(tmp_path / "run"), paths))
    (path,) = (tmp_path / "run" / "forensics").iterdir()
    found = json.loads(path.read_text())
    assert (found["reasons"], found["step"]) == (["requested"], STEP + 1)
    assert set(found["steps"][-1]["sequences"]["dp_rank"]) == {0, 1}


def test_a_disk_that_refuses_stops_no_rank(kept_ranks: Any, paths: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "forensics").write_text("")
    kept_ranks(life, 2, str(tmp_path / "run"), paths, {"dp_shard": 2}, {})
    assert json.loads((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[-1])["kind"] == "end"
