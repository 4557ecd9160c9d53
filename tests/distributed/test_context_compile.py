"""Compiled blocks whose ranks share a sequence compute what eager ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer
from support.train import run_case as CASE

pytestmark = pytest.mark.slow
STEPS = 3
"""The first at other numbers of documents and stretches than those after it."""


def life(run: str, paths: list[str], method: str, backend: str | None) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Of each step, gradients by name, whole; and how many graphs were made, and calls that no graph has."""
    config = CASE.settings(
        run, paths, precision="fp64", steps=STEPS, micro_batch=2, model={"num_layers": 2},
        parallel={"cp": 2, "cp_method": method}, compile={"enabled": backend is not None, "backend": backend or "none"},
    )  # fmt: skip
    steps: list[dict[str, Any]] = []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        trainer.on_gradients = lambda own, _: steps.append(
            {n: CASE._whole(p.grad) for n, p in own.model.named_parameters()}
        )
        trainer.fit()
    counted = torch._dynamo.utils.counters
    return steps, {"graphs": counted["stats"]["unique_graphs"], "breaks": sum(counted["graph_break"].values())}


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: CASE._whole(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(
    ("method", "backend"),
    [
        pytest.param("allgather", "aot_eager", marks=pytest.mark.long),
        pytest.param("ulysses", "aot_eager", marks=pytest.mark.long),
        *(pytest.param(*own, marks=pytest.mark.exhaustive) for own in (
            ("ring", "aot_eager"), ("allgather", "inductor"), ("ulysses", "inductor"),
        )),
    ],
)  # fmt: skip
def test_losses_and_gradients_are_those_of_eager_blocks(
    kept_ranks: Any, tmp_path: Path, method: str, backend: str
) -> None:
    paths = CASE.write_corpus(tmp_path / "data", {"web": 20})
    eager = kept_ranks(life, 2, str(tmp_path / "eager"), paths, method, None)
    compiled = kept_ranks(life, 2, str(tmp_path / "compiled"), paths, method, backend)
    for (expected, none), (found, made) in zip(eager, compiled, strict=True):
        assert none["graphs"] == 0
        assert made["graphs"] > 0
        assert made["breaks"] == 0
        assert len(found) == len(expected) == STEPS
        assert all(expected)
        assert all(CASE.worst_ratio(one, other) <= 1e-12 for one, other in zip(found, expected, strict=True))
    losses, others = (CASE.rows(tmp_path / run) for run in ("eager", "compiled"))
    assert losses.keys() == others.keys() == set(range(STEPS))
    for step, row in losses.items():
        assert others[step]["loss"] == pytest.approx(row["loss"], rel=1e-12)
