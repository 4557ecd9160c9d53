"""No host sync in the steady state of any layout: each is one rank of a process group that sends nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.train import sync_case

SELECTIVE = {"precision": "bf16", "activation_checkpointing": "selective"}
FLOAT8 = {
    "precision": "bf16",
    "global_batch": 8,
    "micro_batch": 4,
    "model": {"dim": 256, "ffn_dim": 256, "num_kv_heads": 4},
}


def _pipeline(schedule: str, **parallel: Any) -> dict[str, Any]:
    """Four micro-batches, one for every stage and more."""
    batch = 4 * parallel.get("dp_shard", 1)
    parallel = {"pp": 2, "schedule": schedule, **parallel}
    layers = 2 if schedule == "1f1b" else 4
    return {"global_batch": batch, "micro_batch": 1, "model": {"num_layers": layers}, "parallel": parallel}


Given = tuple[dict[str, Any], int, int]
"""Changes to the config, ranks, and which of them."""
QUICK: dict[str, Given] = {
    "FSDP2": ({"parallel": {"dp_shard": 2}}, 2, 0),
    "TP": ({"parallel": {"tp": 2}, "replicas": {"interval": 1}}, 2, 0),
    "1F1B, first stage": (_pipeline("1f1b"), 2, 0),
    "1F1B, last stage": (_pipeline("1f1b"), 2, 1),
}
MORE: dict[str, Given] = {
    "ZeRO-2": ({"parallel": {"dp_shard": 2, "reshard_after_forward": False}}, 2, 1),
    "HSDP": (
        {
            "precision": "bf16", "global_batch": 8, "parallel": {"dp_replicate": 2, "dp_shard": 2},
            "replicas": {"interval": 1},
        }, 4, 0,
    ),
    "FSDP2 + TP, recomputed": ({**SELECTIVE, "parallel": {"dp_shard": 2, "tp": 2}}, 4, 3),
    "TP, key heads shared, loss scale": (
        {"model": {"num_kv_heads": 1}, "precision": "fp16", "parallel": {"tp": 2}}, 2, 1,
    ),
    "FSDP2, FP8 gathers": (
        {**FLOAT8, "float8": {"recipe": "tensorwise", "all_gather": True}, "parallel": {"dp_shard": 2}}, 2, 0,
    ),
    "TP, FP8": ({**FLOAT8, "float8": {"recipe": "blockwise"}, "parallel": {"tp": 2}}, 2, 0),
    "interleaved + FSDP2": (_pipeline("interleaved_1f1b", dp_shard=2), 4, 0),
    "ZBV": (_pipeline("zbv_zero_bubble"), 2, 0),
    "DualPipeV + FSDP2 + TP": (_pipeline("dualpipe_v", dp_shard=2, tp=2), 8, 7),
}  # fmt: skip


def _does_not_wait(given: Given, folder: Path) -> None:
    changes, world, rank = given
    done = sync_case.in_a_process(sync_case.steps, str(folder), changes, world, rank)
    assert done == sync_case.FIRST + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if "last" in name else pytest.param(name, marks=pytest.mark.long) for name in QUICK]
)
def test_steady_state_does_not_wait(name: str, tmp_path: Path) -> None:
    _does_not_wait(QUICK[name], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name if place % 2 else pytest.param(name, marks=pytest.mark.exhaustive) for place, name in enumerate(MORE)]
)
def test_steady_state_of_more_layouts_does_not_wait(name: str, tmp_path: Path) -> None:
    _does_not_wait(MORE[name], tmp_path)
