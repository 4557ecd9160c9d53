"""Blocks whose tokens travel to experts on other ranks, compiled up to where they leave: what eager ones compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer
from support.train import run_case as CASE

STEPS, LAYERS = 4, 3
MOE = {"num_experts": 6, "top_k": 2, "ffn_dim": 12, "first_dense": 1, "bias": True, "shared_ffn_dim": 6}


def life(run: str, paths: list[str], mode: str, backend: str | None) -> tuple[list[dict[str, Any]], list[int], int]:
    """Of each step gradients by name, whole, and how many graphs there were by then; calls that no graph has."""
    config = CASE.settings(
        run, paths, precision="fp64", steps=STEPS, micro_batch=2, model={"num_layers": LAYERS, "moe": MOE},
        experts={"bias_rate": 0.05, "balance_loss": 0.1}, parallel={"dp_shard": 2, "ep": 2},
        activation_checkpointing=mode, compile={"enabled": backend is not None, "backend": backend or "none"},
    )  # fmt: skip
    steps: list[dict[str, Any]] = []
    graphs: list[int] = []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    counted = torch._dynamo.utils.counters

    def look(trainer: Any, step: int) -> None:
        steps.append({name: CASE._whole(p.grad) for name, p in trainer.model.named_parameters()})
        graphs.append(counted["stats"]["unique_graphs"])

    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        trainer.on_gradients = look
        trainer.fit()
    return steps, graphs, sum(counted["graph_break"].values())


@pytest.mark.long
def test_gradients_are_those_of_eager_blocks(kept_ranks: Any, tmp_path: Path) -> None:
    """With each way to compute a block again. Other numbers of rows arrive in every step: no graph has them, and none
    is made anew."""
    paths = CASE.write_corpus(tmp_path / "data", {"web": 20})
    eager = kept_ranks(life, 2, str(tmp_path / "eager"), paths, "none", None)
    rows = CASE.rows(tmp_path / "eager")
    assert all(graphs == [0] * STEPS for _, graphs, _ in eager)
    for mode in ("none", "full", "selective"):
        compiled = kept_ranks(life, 2, str(tmp_path / mode), paths, mode, "aot_eager")
        for (expected, _, _), (found, graphs, breaks) in zip(eager, compiled, strict=True):
            assert breaks == 0, mode
            # a dense block; two norms, attention and the shared experts of one that has experts; the loss
            assert graphs == [6] * STEPS, mode
            assert len(found) == len(expected) == STEPS
            assert all(expected)
            worst = max(CASE.worst_ratio(one, other) for one, other in zip(found, expected, strict=True))
            assert worst <= 1e-12, mode
        others = CASE.rows(tmp_path / mode)
        assert rows.keys() == others.keys() == set(range(STEPS))
        for step, row in rows.items():
            assert others[step]["loss"] == pytest.approx(row["loss"], rel=1e-12), mode
