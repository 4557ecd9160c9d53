"""Says of a failed run's dumps which collective some ranks did not reach, and where every rank was.

Imports no torch.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quern.errors import InputError
from quern.train.debug.dumps import BEFORE, Call, Dump, debug_folder, rank_of, read_dump, tracebacks_folder

__all__ = ["report"]

#: Parts of paths of frames that lie between a call and torch's recorder.
_INNER = ("/torch/distributed/", "/typing_extensions.py")


def report(run_dir: str) -> dict[str, Any]:
    """What the files of the run's newest failure say, JSON-able: ``groups`` (one a process group and backend),
    ``waiting`` (sends and receives that have not ended), ``ranks``, ``tracebacks``, ``memory``, ``damaged``.

    Raises:
        InputError: the run has no file of a failure.
    """
    folder = debug_folder(run_dir)
    files = _files(folder)
    if not files:
        folder = os.path.join(folder, BEFORE)
        files = _files(folder)
    stacks = _listed(tracebacks_folder(run_dir))
    if not files and not stacks:
        raise InputError(f"{run_dir}: expected the folder of a run that failed, and nothing is in {folder}")
    memory = [file for file in files if os.path.basename(file).startswith("memory_")]
    dumps, damaged = [], []
    for file in files:
        if file in memory:
            continue
        try:
            dumps.append(read_dump(file))
        except InputError as error:
            damaged.append({"file": file, "error": str(error)})
    groups, waiting = _groups(_judged(dumps))
    ranks = {
        dump.rank: {"rank": dump.rank, "error": dump.error, "file": dump.file}
        for dump in sorted(dumps, key=lambda dump: (dump.rank, dump.error is not None))
    }
    return {
        "folder": folder, "ranks": [*ranks.values()], "groups": groups, "waiting": waiting, "tracebacks": stacks,
        "memory": memory, "damaged": damaged,
    }  # fmt: skip


def _listed(folder: str) -> list[str]:
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [path for name in names if os.path.getsize(path := os.path.join(folder, name))]


def _files(folder: str) -> list[str]:
    return [file for file in _listed(folder) if os.path.isfile(file) and rank_of(os.path.basename(file)) is not None]


def _judged(dumps: Sequence[Dump]) -> list[Dump]:
    """With ``failed`` or ``completed`` in place of ``retired``. Those have failed that another member's record shows
    as not reached or not ended; if there is none, the newest of which a member has left no record, or else the rank's
    newest call."""
    records: dict[int, dict[tuple[str, int], Call]] = defaultdict(dict)
    for dump in dumps:
        records[dump.rank] |= {(c.group, c.number): c for c in dump.calls if c.backend == "gloo" and not c.pairwise}

    def lacks(rank: int, call: Call) -> bool:
        theirs = records[rank]
        if (held := theirs.get((call.group, call.number))) is not None:
            return held.state == "scheduled"
        known = [number for group, number in theirs if group == call.group]
        return max(known) < call.number if known else min(each.order for each in theirs.values()) == 0

    def failed(dump: Dump) -> list[Call]:
        unsure = [call for call in dump.calls if call.state == "retired"]
        members = {call.group: dump.groups.get(call.group, ("", ()))[1] for call in unsure}
        if found := [c for c in unsure if any(lacks(rank, c) for rank in members[c.group] if records.get(rank))]:
            return found
        silent = [c for c in unsure if not all(records.get(rank) for rank in members[c.group])]
        return silent[-1:] or [c for c in unsure if c is dump.calls[-1]]

    judged = []
    for dump in dumps:
        state = dict.fromkeys((call.order for call in failed(dump)), "failed")
        calls = (replace(c, state=state.get(c.order, "completed")) if c.state == "retired" else c for c in dump.calls)
        judged.append(replace(dump, calls=tuple(calls)))
    return judged


def _groups(dumps: Sequence[Dump]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Names of groups are not unique: those of one name and other members are others."""
    found: dict[tuple[str, str, tuple[int, ...]], dict[int, dict[int, Call]]] = defaultdict(lambda: defaultdict(dict))
    described: dict[tuple[str, tuple[int, ...]], str] = {}
    written: dict[str, set[int]] = defaultdict(set)
    lost: dict[str, set[int]] = defaultdict(set)  # ranks whose oldest calls have left the recorder's buffer
    waiting = []
    for dump in dumps:
        for backend in {call.backend for call in dump.calls}:
            written[backend].add(dump.rank)
            if min(call.order for call in dump.calls if call.backend == backend) > 0:
                lost[backend].add(dump.rank)
        for call in dump.calls:
            description, members = dump.groups.get(call.group, ("", ()))
            described[call.group, members] = description
            if call.pairwise:
                if call.state != "completed":
                    waiting.append({"rank": dump.rank, **_told(call)})
                continue
            calls = found[call.backend, call.group, members][dump.rank]
            held = calls.get(call.number)
            if held is None or held.state != "completed":  # one rank may have two dumps, of which one is older
                calls[call.number] = call
    last = _last(found.values())
    groups = []
    for (backend, name, members), by_rank in sorted(found.items()):
        known = written[backend] - (lost[backend] - by_rank.keys())
        groups.append(
            {"group": name, "description": described[name, members], "backend": backend}
            | _of_group(by_rank, members or tuple(sorted(by_rank)), known, last)
        )
    return groups, waiting


def _last(groups: Iterable[Mapping[int, Mapping[int, Call]]]) -> dict[int, Call]:
    """For each rank the call that it stands in: of the last of its groups the oldest that has not ended, or the newest
    if all have."""
    ends: dict[int, list[Call]] = defaultdict(list)
    for by_rank in groups:
        for rank, calls in by_rank.items():
            ends[rank].append(calls[max(calls)])

    def standing(call: Call) -> tuple[bool, int]:
        ended = call.state == "completed"
        return ended, -call.order if ended else call.order

    return {rank: min(calls, key=standing) for rank, calls in ends.items()}


def _of_group(
    by_rank: Mapping[int, Mapping[int, Call]], members: Sequence[int], written: set[int], last: Mapping[int, Call]
) -> dict[str, Any]:
    """``written``: ranks of whose calls in the group there is a record, if they have made any. The numbers are those of
    torch: a rank that has called number n has called all before it."""
    present = [rank for rank in members if rank in written]
    silent = [rank for rank in members if rank not in written]
    reached = {rank: max(by_rank.get(rank, {0: None})) for rank in present}
    low, high = min(reached.values()), max(reached.values())
    done = [number for number in range(low, 0, -1) if _ended(by_rank, present, number)][:1]
    said: dict[str, Any] = {
        "ranks": [*members],
        "without_dump": silent,
        "last_completed": _told(_any(by_rank, done[0])) if done else None,
        "first_missing": None,
        "not_ended": None,
        "different": None,
    }
    for number in range(1, low + 1):
        kinds = {rank: calls[number].kind for rank, calls in by_rank.items() if number in calls}
        if len(set(kinds.values())) > 1:
            said["different"] = {"number": number, "kinds": {str(rank): kind for rank, kind in sorted(kinds.items())}}
            break
    if low < high:
        # the first that is in the record: older ones have left its buffer where a rank has called none for long
        number = next(n for n in range(low + 1, high + 1) if _any(by_rank, n) is not None)
        call = _any(by_rank, number)
        arrived = [rank for rank in present if reached[rank] >= number]
        late = [rank for rank in present if reached[rank] < number]
        said["first_missing"] = _told(call) | {
            "arrived": arrived,
            "missing": late,
            "last_of_missing": {str(rank): _told(last[rank]) for rank in late if rank in last},
        }
    elif not done or done[0] < low:
        number = (done[0] if done else 0) + 1
        while number < low and _any(by_rank, number) is None:  # older ones have left the recorder's buffer
            number += 1
        if (call := _any(by_rank, number)) is not None:
            said["not_ended"] = _told(call) | {"arrived": present}
    return said


def _any(by_rank: Mapping[int, Mapping[int, Call]], number: int) -> Call | None:
    return next((calls[number] for _, calls in sorted(by_rank.items()) if number in calls), None)


def _ended(by_rank: Mapping[int, Mapping[int, Call]], ranks: Iterable[int], number: int) -> bool:
    """Whether the collective has ended on all ``ranks``."""
    return all((call := by_rank[rank].get(number)) is not None and call.state == "completed" for rank in ranks)


def _told(call: Call | None) -> dict[str, Any]:
    assert call is not None
    outer = [frame for frame in call.frames if not any(part in frame for part in _INNER)]
    return {
        "kind": call.kind, "number": call.number, "group": call.group, "backend": call.backend, "state": call.state,
        "input_sizes": call.input_sizes, "output_sizes": call.output_sizes, "dtypes": call.dtypes,
        "frames": outer or [*call.frames],
    }  # fmt: skip
