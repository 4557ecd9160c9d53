"""Simulates a pipeline's order of work with the times of its stages. Imports no torch, but as :mod:`.bubble` does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from quern.parallel.planning.bubble import order

__all__ = ["KINDS", "makespan", "timeline"]

KINDS = "FBIW"
"""Of work, in the order in which a stage's times are given: forward, backward whole, for inputs, for weights."""


@lru_cache(maxsize=32)
def _line(schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int) -> list[tuple[int, int, int]]:
    """All work, each item after what it waits for: the rank, 4 · stage + place of the kind in :data:`KINDS`, and which
    item on another rank comes before, -1 = none."""
    ranks = order(schedule, pp, stages_per_rank, num_micro_batches)
    last_stage = pp * stages_per_rank - 1
    owner = {action.stage: rank for rank, actions in enumerate(ranks) for action in actions}
    done: dict[tuple[int, bool, int], int] = {}  # by stage, whether forward, and micro-batch
    line: list[tuple[int, int, int]] = []
    places = [0] * pp
    while any(place < len(actions) for place, actions in zip(places, ranks, strict=True)):
        before = len(line)
        for rank, actions in enumerate(ranks):
            while places[rank] < len(actions):
                stage, kind, number = actions[places[rank]]
                need = -1
                other = stage - 1 if kind == "F" else stage + 1
                if kind != "W" and 0 <= other <= last_stage:
                    if (other, kind == "F", number) not in done:
                        break
                    need = done[other, kind == "F", number] if owner[other] != rank else -1
                if kind != "W":
                    done[stage, kind == "F", number] = len(line)
                line.append((rank, 4 * stage + KINDS.index(kind), need))
                places[rank] += 1
        assert len(line) > before, "the order waits for itself"
    return line


class Item(NamedTuple):
    """A rank's work on one micro-batch in one stage."""

    rank: int
    stage: int
    kind: str
    start: float
    end: float


def timeline(
    schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int, times: Sequence[Sequence[float]], hop: float
) -> list[Item]:
    """When each rank does what, in seconds; see :func:`makespan`."""
    clocks, ends, found = [0.0] * pp, list[float](), list[Item]()
    for rank, slot, need in _line(schedule, pp, stages_per_rank, num_micro_batches):
        stage, kind = divmod(slot, 4)
        start = max(clocks[rank], ends[need] + hop if need >= 0 else 0.0)
        clocks[rank] = start + times[stage][kind]
        ends.append(clocks[rank])
        found.append(Item(rank, stage, KINDS[kind], start, clocks[rank]))
    return found


def makespan(
    schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int, times: Sequence[Sequence[float]], hop: float
) -> float:
    """Seconds from the first rank's begin to the last one's end; ``times``: of each stage, by :data:`KINDS`; ``hop``:
    between the end of an item and when what it gave is on another rank, in which both go on with other work."""
    takes = [seconds for stage in times for seconds in stage]
    clocks = [0.0] * pp
    ends: list[float] = []
    append = ends.append
    for rank, slot, need in _line(schedule, pp, stages_per_rank, num_micro_batches):
        now = clocks[rank]
        if need >= 0 and ends[need] + hop > now:
            now = ends[need] + hop
        now += takes[slot]
        clocks[rank] = now
        append(now)
    return max(clocks)
