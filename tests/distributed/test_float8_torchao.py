"""Whole runs by torchao's layers: alone, over FSDP2, DDP and a pipeline; and gone on with by quern's own."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from quern.errors import InputError
from quern.train.parity.corpus import write_corpus
from quern.train.parity.matrix import Case
from quern.train.parity.run import case_config
from quern.train.processes.ranks import open_ranks
from quern.train.setup import check, open_trainer

CASE = Case("alone", sizes="blocks", float8="tensorwise")
THEIRS = {"recipe": "tensorwise", "implementation": "torchao"}


def config(data: str, run_dir: str, steps: int, float8: dict[str, Any], **changes: Any) -> Any:
    given = case_config(CASE, data, run_dir)
    given = given.model_dump() | {
        "precision": "bf16", "steps": steps, "schedule": {"kind": "constant", "warmup": 0}, "float8": float8,
    } | changes  # fmt: skip
    return case_config(CASE, data, run_dir).model_validate(given)


def losses(data: str, run_dir: str, runs: list[tuple[int, dict[str, Any]]], changes: dict[str, Any]) -> list[float]:
    """Of all steps; each of ``runs`` goes on to a step with a section ``float8``."""
    for steps, float8 in runs:
        given = config(data, run_dir, steps, float8, **changes)
        with open_ranks("cpu") as ranks, open_trainer(given, ranks) as trainer:
            trainer.fit()
    lines = map(json.loads, Path(run_dir, "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in lines if row["kind"] == "step"]


@pytest.mark.slow
def test_a_run_trains_and_another_implementation_goes_on_with_it(run_ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("torchao.float8")
    data = str(tmp_path / "data")
    write_corpus(data)
    one = {"micro_batch": 1}
    alone = losses(data, str(tmp_path / "alone"), [(4, THEIRS)], one)
    assert len(alone) == 4
    assert all(map(math.isfinite, alone))
    assert alone[-1] < alone[0]
    ours = losses(data, str(tmp_path / "ours"), [(2, THEIRS), (4, {"recipe": "tensorwise"})], one)
    assert ours[:2] == alone[:2]
    assert ours[2:] != alone[2:]
    assert ours[2:] == pytest.approx(alone[2:], rel=0.02)
    layouts = {
        "fsdp": {"dp_shard": 2},
        "ddp": {"dp_replicate": 2, "dp_shard": 1},
        "pp": {"pp": 2, "dp_shard": 1, "schedule": "1f1b"},
    }
    for name, parallel in layouts.items():
        run_dir = str(tmp_path / name)
        for found in run_ranks(losses, 2, data, run_dir, [(4, THEIRS)], {**one, "parallel": parallel}, timeout_s=200):
            assert found[0] == pytest.approx(alone[0], rel=1e-5), name  # the same values; sums in another order
            assert found == pytest.approx(alone, rel=0.02), name


def test_a_run_without_torchao_is_refused_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(str(tmp_path / "data"))
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "torchao.float8", raising=False)
    monkeypatch.delitem(sys.modules, "torchao.float8.float8_linear", raising=False)
    with pytest.raises(InputError, match=r"float8\.implementation: torchao is not installed"):
        check(config(str(tmp_path / "data"), str(tmp_path / "run"), 2, THEIRS), 1)
    assert not (tmp_path / "run").exists()
