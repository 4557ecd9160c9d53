"""``quern train debug``: says what a failed run's ranks were at."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from quern.cli.output import JSON, json_stdout, plain_line, reports_errors

__all__ = ["debug"]

#: Of a call's Python frames, how many are printed; ``--json`` has all.
_FRAMES = 3


@reports_errors
def debug(
    run: Annotated[str, typer.Argument(help="The folder of a training run that failed.", metavar="RUN")],
    json: bool = JSON,
) -> None:
    """Say which collective some ranks of RUN did not reach, which ranks, and where they were, from the dumps in
    RUN/debug; and list tracebacks and memory snapshots. Exit code 1: a dump is damaged; the others are told.
    """
    from quern.train.debug.report import report

    found = report(run)
    with json_stdout(json) as emit:
        emit(found)
        if not json:
            for line in _lines(found):
                print(plain_line(line))
    for broken in found["damaged"]:
        typer.echo(f"error: {plain_line(broken['error'])}", err=True)
    if found["damaged"]:
        raise typer.Exit(1)


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [f"dumps in {found['folder']}: {_ranks(rank['rank'] for rank in found['ranks']) or 'none'}"]
    lines += [f"  rank {rank['rank']} failed: {rank['error']}" for rank in found["ranks"] if rank["error"]]
    for group in found["groups"]:
        lines += _group(group)
    for call in found["waiting"]:
        lines.append(f"rank {call['rank']} waits in {_named(call)} of group {call['group']}")
        lines += _frames(call)
    for title, files in (("tracebacks and stacks", found["tracebacks"]), ("memory snapshots", found["memory"])):
        if files:
            lines += [f"{title}:", *(f"  {file}" for file in files)]
    return lines


def _group(group: dict[str, Any]) -> list[str]:
    name = f"{group['group']} ({group['description']})" if group["description"] else group["group"]
    lines = [f"group {name}, {group['backend']}, ranks {_ranks(group['ranks'])}"]
    if group["without_dump"]:
        lines.append(f"  without a dump: ranks {_ranks(group['without_dump'])}; see their stacks, if there are any")
    done = group["last_completed"]
    lines.append("  ended on all: " + (_named(done) if done else "none that is in the record"))
    if (different := group["different"]) is not None:
        kinds = ", ".join(f"rank {rank} {kind}" for rank, kind in different["kinds"].items())
        lines.append(f"  number {different['number']} is not the same on all ranks: {kinds}")
    if (call := group["not_ended"]) is not None:
        lines += [f"  reached and not ended: {_named(call)}", *_frames(call)]
    if (call := group["first_missing"]) is not None:
        lines.append(f"  not reached by ranks {_ranks(call['missing'])}: {_named(call)}")
        lines += [f"  there: ranks {_ranks(call['arrived'])}", *_frames(call)]
        for rank, last in call["last_of_missing"].items():
            lines += [f"  last call of rank {rank}: {_named(last)} of group {last['group']}", *_frames(last)]
    return lines


def _named(call: dict[str, Any]) -> str:
    sizes = f", {call['input_sizes']} → {call['output_sizes']} {' '.join(map(str, call['dtypes']))}".rstrip()
    return f"{call['kind']} number {call['number']} ({call['state']}{sizes})"


def _frames(call: dict[str, Any]) -> list[str]:
    return [f"    {frame}" for frame in call["frames"][:_FRAMES]]


def _ranks(ranks: Any) -> str:
    """``0–3, 5``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}–{high}" for low, high in spans)
