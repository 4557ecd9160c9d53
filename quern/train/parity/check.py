"""Runs the parity matrix on this machine: starts ranks, runs every case, and compares it with one process.

On CPU ranks talk through gloo. On CUDA each has a GPU of its own (nccl beside gloo), and cases of more ranks than GPUs
are left out; this has not run on a GPU yet.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quern.closes import Closes
from quern.parallel.local import LocalRanks, RankError
from quern.parallel.planning.schedules import why_no_split_backward
from quern.train.parity.compare import Comparison, compare
from quern.train.parity.corpus import write_corpus
from quern.train.parity.matrix import Case, Computation
from quern.train.parity.run import Outcome, train, train_alone
from quern.words import counted

__all__ = ["Result", "check_cases"]

TIMEOUT_S = 180.0
"""Of one case; a few seconds on an idle machine."""
LAST_LINES = 12


@dataclass(frozen=True)
class Result:
    """The result of one case."""

    case: Case
    seconds: float = 0.0
    """Of its run, without the reference's."""
    comparison: Comparison = field(default_factory=Comparison)
    skipped: str | None = None
    """Why it was not run."""

    @property
    def passed(self) -> bool | None:
        """Whether the case passed; None if it was not run."""
        return None if self.skipped else not self.comparison.problems


class _Crew(Closes):
    """Ranks that are kept from case to case, and started anew where one has failed."""

    def __init__(self) -> None:
        self._kind: tuple[int, str | None] | None = None
        self._ranks: LocalRanks | None = None

    def call(self, world: int, backend: str | None, function: Callable[..., Outcome], *args: Any) -> list[Outcome]:
        """Raises :class:`RankError`."""
        if self._ranks is None or self._kind != (world, backend):
            self.close()
            self._kind = world, backend
            self._ranks = LocalRanks(world, backend=backend, timeout_s=TIMEOUT_S)
        try:
            return self._ranks.call(function, *args)
        except RankError:
            self.close()
            raise

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = None


def check_cases(
    cases: Sequence[Case],
    *,
    device: str = "cpu",
    on_start: Callable[[Case], None] = lambda case: None,
) -> Iterator[Result]:
    """A result for each case, those of few ranks first. ``device``: ``cpu`` or ``cuda``."""
    num_devices = torch.cuda.device_count() if device == "cuda" else None
    backend = "gloo" if num_devices is None else "cpu:gloo,cuda:nccl"
    references: dict[Computation, Outcome | str] = {}
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="quern-selftest-"))
        single, several = (opened.enter_context(_Crew()) for _ in range(2))
        data, run_dir = str(Path(folder, "data")), str(Path(folder, "run"))
        write_corpus(data)

        def call(crew: _Crew, world: int, by: str | None, function: Callable[..., Outcome], what: Any) -> Any:
            try:
                return crew.call(world, by, function, what, data, run_dir, device)
            except RankError as error:
                return _last_lines(error)
            finally:
                shutil.rmtree(run_dir, ignore_errors=True)

        for case in sorted(cases, key=lambda case: (case.on.world, case.on.grouped)):
            world = case.on.world
            if num_devices is not None and world > num_devices:
                yield Result(case, skipped=f"needs {world} GPUs, this machine has {counted(num_devices, 'GPU')}")
                continue
            if case.splits_backward and (why := why_no_split_backward()):
                yield Result(case, skipped=f"splits the backward pass, which {why}")
                continue
            on_start(case)
            wanted = case.computation
            if wanted not in references:
                found = call(single, 1, None, train_alone, wanted)
                references[wanted] = found if isinstance(found, str) else found[0]
            expected = references[wanted]
            began = time.monotonic()
            outcomes = call(several, world, backend if case.on.grouped else None, train, case)
            seconds = time.monotonic() - began
            if isinstance(expected, str):
                yield Result(case, seconds, Comparison(problems=[f"the run of one process failed: {expected}"]))
            elif isinstance(outcomes, str):
                yield Result(case, seconds, Comparison(problems=[outcomes]))
            else:
                yield Result(case, seconds, compare(case, outcomes, expected))


def _last_lines(error: RankError) -> str:
    """What the first rank to fail said last."""
    rank, said = next(iter(error.failed.items()))
    lines = said.rstrip().splitlines()[-LAST_LINES:]
    return f"rank {rank} failed first:\n" + "\n".join(lines)
