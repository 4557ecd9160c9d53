"""What a dry run says of experts that are dealt out over ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quern.cli.main import app
from support.train.command_case import said, write_config

EIGHT = "model.moe={num_experts: 8, top_k: 2, ffn_dim: 16}", "precision=bf16", "global_batch=16", "micro_batch=1"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def planned(capfd: pytest.CaptureFixture[str], config: Path, *keys: str) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(
        said(capfd, "train", config, *EIGHT, *keys, "--nproc", 8, "--dry-run", "--json")
    )
    return summary


def test_a_dry_run_tells_how_tokens_travel(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of 28 pairs of experts 6 leave out a node of four, and 15 a rank of two."""
    assert planned(capfd, config)["expert_ranks"] is None
    summary = planned(capfd, config, "parallel={ep: 4, ep_node: 2}")
    found = summary["expert_ranks"]
    assert (found["ranks"], found["experts"]) == (4, 2)
    nodes, within = found["stages"]
    assert (nodes["axis"], nodes["ranks"], within["axis"], within["ranks"]) == ("ep nodes", 2, "ep in a node", 2)
    assert nodes["rows"] == pytest.approx(2 * 22 / 28, rel=0.02)  # of whole rows of 64 tokens
    assert within["rows"] == pytest.approx(4 * 13 / 28, rel=0.02)
    for stage in (nodes, within):
        assert stage["away"] == pytest.approx(stage["rows"] / 2, rel=0.02)
        rows = [row["sent"] for row in summary["communication"][0]["rows"] if row["axis"] == stage["axis"]]
        assert stage["sent"] == sum(rows) > 0
    assert found["kept_bytes"]["most"] == 4 * found["kept_bytes"]["expected"]  # of 2 experts a token, 2 on a rank
    whole = planned(capfd, config, "parallel={ep: 8}")["expert_ranks"]
    assert whole["kept_bytes"] == {"expected": whole["kept_bytes"]["expected"]} | {
        "most": 4 * whole["kept_bytes"]["expected"]  # of 8 ranks with one expert each
    }


def test_what_it_prints_of_them(config: Path) -> None:
    keys = "parallel={ep: 4}", "--nproc", "8", "--dry-run"
    printed = CliRunner().invoke(app, ["train", str(config), *EIGHT, *keys]).output
    assert "ep: 2 experts on each of 4 ranks\nep, 4: a token travels in 1.8" in printed
    assert "if all tokens went to one rank" in printed
    assert "expert_shard  gather weights     all-gather          2 " in printed
    assert "…" not in printed
