"""Validation hands a runner many micro-batches at a time, and counts every window once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.parallel.context.inputs import Inputs
from quern.train.batches.held_out import open_held_out
from quern.train.batches.loader import IGNORE
from quern.train.processes.ranks import Ranks
from quern.train.step.validation import TOGETHER, Validator
from support.train import run_case as case


class Counting:
    """A nat a target; remembers how many micro-batches came at a time."""

    def __init__(self, counts: bool) -> None:
        self.counts = counts
        self.given: list[int] = []

    def forward(self, inputs: Sequence[Inputs]) -> torch.Tensor:
        self.given.append(len(inputs))
        targets = sum(int((one.targets_BL != IGNORE).sum()) for one in inputs)
        return torch.tensor([0.0, targets * self.counts])


@pytest.mark.parametrize("counts", [True, False])
def test_micro_batches_are_forwarded_together(tmp_path: Path, counts: bool) -> None:
    """A pipeline with one micro-batch under way is idle but for one rank, and gathers its weights for each."""
    paths = case.write_corpus(tmp_path / "data", {"web": 20, "web.val": 20})
    config = case.settings(tmp_path / "run", paths[:1], validation={"windows": 17}, micro_batch=1)
    (held_out,) = open_held_out(config)
    assert held_out.corpus.windows[0] >= 17
    ranks = Ranks(0, 1, torch.device("cpu"))
    found, runner = Validator(config, [held_out], ranks, 0, 1, str(tmp_path)), Counting(counts)
    losses = found.run(runner)
    assert runner.given == [TOGETHER] * (17 // TOGETHER) + [17 % TOGETHER]
    loader = found._sources[0].loader
    targets = [batch.targets_BL for number in range(17) for batch in loader.take(number).micro_batches]
    expected = sum(int((one != IGNORE).sum()) for one in targets)
    assert losses["tokens"] == (expected if counts else 0)
    assert losses["loss"] == (1.0 if counts else 0.0)


def test_two_data_runs_with_one_source_name_are_both_in_the_loss(tmp_path: Path) -> None:
    """Each alone is the oracle; they are told apart by their paths, as `quern mix show` does."""

    class Summing(Counting):
        def forward(self, inputs: Sequence[Inputs]) -> torch.Tensor:
            kept = [one.targets_BL[one.targets_BL != IGNORE].double() for one in inputs]
            return torch.tensor([0.0, sum(float(one.sum()) for one in kept)], dtype=torch.float64)

    paths = [
        case.write_corpus(tmp_path / name, {"web": 20, "web.val": size}, seed=number, run_id=name)[0]
        for number, (name, size) in enumerate({"a": 20, "b": 40}.items())
    ]

    def run(paths: list[str]) -> dict[str, Any]:
        config = case.settings(tmp_path / "run", paths, validation={"windows": None}, document_mask=False)
        ranks = Ranks(0, 1, torch.device("cpu"))
        return Validator(config, open_held_out(config), ranks, 0, 1, str(tmp_path)).run(Summing(True))

    one, other, both = run(paths[:1]), run(paths[1:]), run(paths)
    assert one["sources"].keys() == other["sources"].keys() == {"web"}
    assert both["sources"] == {paths[0]: one["sources"]["web"], paths[1]: other["sources"]["web"]}
    assert both["tokens"] == one["tokens"] + other["tokens"]
    summed = one["loss"] * one["tokens"] + other["loss"] * other["tokens"]
    assert both["loss"] == pytest.approx(summed / both["tokens"], rel=1e-12)
    assert one["loss"] != pytest.approx(other["loss"], rel=1e-3)
