"""What is measured collects garbage as a run does: all three by the same, once a step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quern.train import trainer
from quern.train.bench import measure
from quern.train.processes.machine import collecting
from quern.train.processes.ranks import open_ranks
from quern.train.profiling import run as profiling
from quern.train.setup import open_trainer
from quern.train.trainer import Trainer
from support.train import run_case as case


def fit(config: Any, folder: str) -> None:
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as opened:
        opened.fit()


def bench(config: Any, folder: str) -> None:
    measure.measure(config, 1)


def profile(config: Any, folder: str) -> None:
    with open_ranks("cpu") as ranks:
        profiling._trace(config, ranks, folder, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "loop"), [(trainer, fit), (measure, bench), (profiling, profile)])
def test_garbage_is_collected_as_in_a_run(tmp_path, monkeypatch, module, loop):
    seen: list[Any] = []
    step_of = Trainer.train_step

    def train_step(self: Trainer, step: int) -> None:
        seen.append(("step", step, gc.isenabled()))
        step_of(self, step)

    @contextmanager
    def counted(interval: int) -> Iterator[Callable[[int], None]]:
        with collecting(interval):
            yield lambda step: seen.append(("collect", step, interval))

    monkeypatch.setattr(Trainer, "train_step", train_step)
    monkeypatch.setattr(module, "collecting", counted)
    paths = case.write_corpus(tmp_path / "data", {"web": 60, "code": 25})[:2]
    loop(case.settings(tmp_path / "run", paths, steps=6, process={"gc_interval": 7}), str(tmp_path))
    assert seen == [entry for step in range(6) for entry in (("step", step, False), ("collect", step, 7))]
    assert gc.isenabled()
