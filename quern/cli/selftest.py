"""``quern selftest``: compares training on every layout with one process, and names any tensor that differs."""

from __future__ import annotations

import fnmatch
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from quern.cli.output import JSON, json_stdout, out_console, plain, reports_errors, say
from quern.errors import InputError, QuernError
from quern.train.parity.matrix import Case, everything, product, quick
from quern.train.parity.published import PUBLISHED

if TYPE_CHECKING:
    from quern.train.parity.check import Result

__all__ = ["selftest"]


class Layouts(StrEnum):
    """How much of the matrix."""

    published = "published"
    quick = "quick"
    all = "all"


class Device(StrEnum):
    """Where ranks compute."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@reports_errors
def selftest(
    layouts: Annotated[
        Layouts, typer.Option(help="quick: all layouts, minutes; published: known faults of others; all: 1,700 cases.")
    ] = Layouts.quick,
    case: Annotated[
        list[str] | None, typer.Option(help="Only cases of this name, as the table shows it; * stands for anything.")
    ] = None,
    device: Annotated[Device, typer.Option(help="auto: CUDA where there is one.")] = Device.auto,
    json: bool = JSON,
) -> None:
    """Train on every layout and compare losses, gradients, moments and weights with those of one process, in float64.

    Each case is a whole run of three steps over a small corpus of its own, on 1 to 8 processes of this machine. Passed
    means max|a - b| / max|b| of at most 1e-10 for every tensor (1e-12 for the first gradients), and the same bits on
    replicas. On CUDA each process needs a GPU of its own; cases for which there are too few are skipped (unverified on
    GPU). Exit code 1: a case differs.
    """
    cases = _chosen(layouts, case or [])
    with json_stdout(json) as emit:
        from quern.train.parity.check import check_cases  # torch takes seconds that a wrong name need not wait for
        from quern.train.processes.ranks import choose_device

        kind, began = choose_device(device.value).type, time.monotonic()
        console = out_console()
        view = nullcontext(_Quiet()) if json else _table(console, cases)
        results = []
        with view as table:
            for result in check_cases(cases, device=kind, on_start=table.started):
                results.append(result)
                table.finished(result)
        emit({"cases": [_entry(result) for result in results]})
        failed = [result for result in results if result.passed is False]
        if not json:
            _summarise(kind, results, time.monotonic() - began)
    if failed:
        first = failed[0]
        raise QuernError(
            f"{len(failed)} of {len(results)} cases differ from one process; the first: {first.case}: {_reason(first)}"
        )


def _chosen(layouts: Layouts, patterns: list[str]) -> list[Case]:
    if not patterns:
        cases = everything() if layouts is Layouts.all else quick()
        return [case for case in cases if layouts is not Layouts.published or str(case) in PUBLISHED]
    known = {str(case): case for case in [*everything(), *quick(), *product()]}
    found: dict[str, Case] = {}
    for pattern in patterns:
        names = [name for name in known if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise InputError(
                f"--case: expected the name of a case, as pp2-1f1b-none-x2-mask-untied-six, got {pattern!r}"
            )
        found |= {name: known[name] for name in names}
    return list(found.values())


class _Quiet:
    def started(self, case: Case) -> None: ...
    def finished(self, result: Result) -> None: ...


class _Rows:
    """A line for each case as it ends; on a terminal, below them, what is running."""

    def __init__(self, console: Console, cases: list[Case], status: Any) -> None:
        self._console, self._status = console, status
        self._width = max(len(str(case)) for case in cases)
        self._total, self._done = len(cases), 0
        self._line("case", "ranks", "worst", "seconds", Text(""), "bold")

    def started(self, case: Case) -> None:
        self._status.update(f"{self._done} of {self._total} done; running {case} on {_ranks(case.on.world)}")

    def finished(self, result: Result) -> None:
        self._done += 1
        worst, seconds = f"{result.comparison.ratio:.1e}" if result.comparison.worst else "–", f"{result.seconds:.1f}"
        if result.skipped:
            worst, seconds, mark = "–", "–", Text(f"skipped: {result.skipped}", "yellow")
        else:
            mark = Text("passed", "green") if result.passed else Text("FAILED", "bold red")
        self._line(str(result.case), str(result.case.on.world), worst, seconds, mark)
        for problem in result.comparison.problems[:3]:
            self._console.print(Text(plain(problem), "red"), soft_wrap=True)
        for source, fault in PUBLISHED.get(str(result.case), {}).items() if result.passed else ():
            self._console.print(Text(f"  excludes {source}: {fault}", "dim"), soft_wrap=True)

    def _line(self, name: str, ranks: str, worst: str, seconds: str, mark: Text, style: str = "") -> None:
        row = f"{name:<{self._width}}  {ranks:>5}  {worst:>8}  {seconds:>7}  "
        self._console.print(Text(row, style) + mark, soft_wrap=True)


@contextmanager
def _table(console: Console, cases: list[Case]) -> Iterator[_Rows]:
    with console.status("") as status:
        yield _Rows(console, cases, status)


def _summarise(kind: str, results: list[Result], seconds: float) -> None:
    ran = [result for result in results if result.passed is not None]
    worst = max(ran, key=lambda result: result.comparison.ratio, default=None)
    text = f"{sum(bool(result.passed) for result in ran)} of {len(ran)} cases passed on {kind} in {seconds:.0f} s"
    if len(ran) < len(results):
        text += f"; {len(results) - len(ran)} skipped"
    if worst is not None and worst.comparison.worst:
        ratio, where = max(worst.comparison.worst.values())
        text += f"; worst ratio {ratio:.1e} ({where}, {worst.case})"
    say(text)


def _reason(result: Result) -> str:
    """The worst tensor, or what else was wrong."""
    problems = result.comparison.problems
    beyond = [(ratio, f"{kind} of {where}") for kind, (ratio, where) in result.comparison.worst.items()]
    named = [problem for _, what in sorted(beyond, reverse=True) for problem in problems if problem.startswith(what)]
    return plain((named or problems)[0].splitlines()[-1])


def _entry(result: Result) -> dict[str, Any]:
    layout, comparison = result.case.on, result.comparison
    ratio = comparison.ratio if comparison.worst else None
    return {
        "layout": result.case.place,
        "world_size": layout.world,
        "worst_ratio": _finite(ratio),
        "passed": result.passed,
        "case": str(result.case),
        "seconds": round(result.seconds, 3),
        "worst": {
            kind: {"ratio": _finite(ratio), "tensor": where} for kind, (ratio, where) in comparison.worst.items()
        },
        "problems": comparison.problems,
        "published": PUBLISHED.get(str(result.case), {}),
        "skipped": result.skipped,
    }


def _finite(ratio: float | None) -> float | None:
    """JSON has no infinity."""
    return ratio if ratio is not None and math.isfinite(ratio) else None


def _ranks(world: int) -> str:
    return "1 rank" if world == 1 else f"{world} ranks"
