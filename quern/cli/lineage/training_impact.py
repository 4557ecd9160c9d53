"""Formats the report of :func:`quern.lineage.purge.impact.training_impact.training_impact`: which training runs read
purged documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from quern.words import counted

__all__ = ["training_impact_lines"]

_SHOWN = 8
"""Checkpoints of a training run that are listed."""

Row = Mapping[str, Any]


def training_impact_lines(report: Row) -> Iterator[str]:
    """The report for a person: a part for each training run, then what is not known."""
    for row in report["train_runs"]:
        yield f"training    {row['path']}: {counted(row['steps_complete'], 'step')} complete"
        for name, text in _rows(row):
            yield f"  {name:<11}{text}"
    for row in report["not_judged"]:
        yield f"training    {row['path']}: not judged: {row['why']}"
    if not report["train_runs"] and not report["not_judged"]:
        yield "training    no training run is registered or given"
    if report["unregistered"] is not None:
        yield f"not known   {report['unregistered']}"
    yield f"not known   {report['others']}"


def _rows(row: Row) -> Iterator[tuple[str, str]]:
    if not row["sources"]:
        yield "read", "nothing of this data run"
        return
    yield "read", _read(row)
    for open_end in row["not_proven"]:
        if open_end["next_step"] is not None:
            step, at = open_end["from_step"], open_end["next_step"]
            yield (
                "unproven",
                f"attempt {open_end['attempt']} from step {step:,} on: it would read some at step {at:,}",
            )
    tainted, last = row["tainted"], row["last_clean"]
    total, unknown = len(tainted) + len(row["clean"]) + len(row["unknown"]), row["unknown"]
    if tainted or not unknown:
        yield "tainted", f"{len(tainted):,} of {counted(total, 'checkpoint')}{_which(tainted)}"
    if unknown:
        yield "not known", f"whether {len(unknown):,} of {counted(total, 'checkpoint')} took it in{_which(unknown)}"
    if tainted or unknown or row["applied"]:
        none = "not known" if unknown else "none"
        yield "last clean", none if last is None else f"step {last['step']:,}  {last['path']}"
    for warning in row["warnings"]:
        yield "warning", warning
    yield from _resume(row["resume"])


def _read(row: Row) -> str:
    if not row["exposures"]:
        return ("not known" if row["unknown_sources"] else "none of it") + (
            f"; {row['abandoned']:,} times in steps that it went back behind" * bool(row["abandoned"])
        )
    notes = [
        f"{row[name]:,} {text}"
        for name, text in (
            ("skipped", "in steps whose update was skipped"),
            ("purged", "when nothing was left of it"),
            ("abandoned", "more in steps that it went back behind"),
        )
        if row[name]
    ]
    told = f" ({'; '.join(notes)})" if notes else ""
    if not row["applied"]:
        return f"{row['exposures']:,} times, and no weight took anything in{told}"
    steps = f"{counted(row['steps'], 'step')}, {row['first_step']:,} to {row['last_step']:,}"
    return f"{counted(row['documents_read'], 'document')} in {steps}: {row['exposures']:,} times{told}"


def _which(checkpoints: list[Row]) -> str:
    shown = [f"{row['step']:,}" + (" (abandoned)" if row["abandoned"] else "") for row in checkpoints]
    more = len(shown) - _SHOWN
    if more > 0:
        shown = [*shown[: _SHOWN - 1], f"… {more} more …", shown[-1]]
    return f": step {', '.join(shown)}" if shown else ""


def _resume(resume: Row) -> Iterator[tuple[str, str]]:
    if resume["command"] is None:
        yield "go on", f"no command can be given: {resume['why_not']}"
        return
    for note in resume["notes"]:
        yield "note", note
    where = f"   (in {resume['run_in']})" if resume["run_in"] else ""
    yield "go on", f"{resume['command']}{where}"
