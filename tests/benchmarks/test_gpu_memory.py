"""The GPU suite's rows of planned memory: configs that a GPU has room for, and a peak that is really counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import plan
import pytest
import torch
from parts import memory
from parts.training import config_of

from quern.train.summary import peak_memory

ROWS = [row for row in plan.rows("cuda", small=False) if row.part == "memory"]


def test_all_configs_train_on_a_gpu_of_80_gib(tmp_path: Path) -> None:
    assert len(ROWS) >= 12
    for row in ROWS:
        spec: dict[str, Any] = dict(row.spec)
        found = memory.told(config_of(spec, str(tmp_path), "tokens"), spec)
        assert found["tensors"] < found["reserved"] < 80e9, row.name


def test_storages_are_counted_while_they_are_alive() -> None:
    with memory.Alive() as alive:
        kept = torch.zeros(1000)
        view = kept[10:]
        for _ in range(3):
            torch.ones(500)
        assert alive.now == 4000
        del kept
        assert alive.now == 4000
        del view
        assert (alive.now, alive.peak) == (0, 6000)
        alive.begin()
        assert alive.seen() == {"tensors": 0}


@pytest.mark.slow
def test_a_peak_that_is_planned_too_low_is_found() -> None:
    row = next(row for row in plan.rows("cpu", small=True) if row.part == "memory")
    spec = {**row.spec, "model": {**row.spec["model"], "dim": 64, "ffn_dim": 128, "num_heads": 2, "num_kv_heads": 1}}
    (right,) = memory.peaks(spec)
    assert right["passes"]
    assert right["planned / seen"] == pytest.approx(1, abs=0.2)

    def less(step: Any, config: Any) -> dict[str, Any]:
        return peak_memory(replace(step, layout=replace(step.layout, seq_len=step.layout.seq_len // 2)), config)

    with patch.object(memory, "peak_memory", less):
        (wrong,) = memory.peaks(spec)
    assert not wrong["passes"]
    assert wrong["GiB"] == pytest.approx(right["GiB"], rel=0.01)
