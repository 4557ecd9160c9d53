"""Simulates in which order the ranks of a pipeline process micro-batches, when, and how long they wait.

The order of schedules that nobody plans by the thousand is torch's own list, so torch is imported where it is asked
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from quern.parallel.planning.schedules import SCHEDULES, check_micro_batches

__all__ = ["KINDS", "Action", "bubble", "makespan", "order", "order_of", "timeline"]


class Action(NamedTuple):
    """One unit of work of a rank."""

    stage: int
    kind: Literal["F", "B", "I", "W"]
    """Forward; backward whole, or for the input and for the weights apart."""
    micro_batch: int


KINDS = "FBIW"
"""Of work, in the order in which a stage's times are given: forward, backward whole, for inputs, for weights."""
_UNITS = (1, 2, 1, 1)
"""Of these: a backward takes two products for each one of the forward."""


@lru_cache(maxsize=32)  # every place of a pipeline asks for the same
def order(schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int) -> list[list[Action]]:
    """The actions of each rank in sequence; the lists are cached and must not be changed.

    Raises ValueError for a number of micro-batches that the schedule does not take.
    """
    if complaint := check_micro_batches(schedule, pp, pp * stages_per_rank, num_micro_batches):
        raise ValueError(complaint)
    if schedule in ("gpipe", "1f1b", "interleaved_1f1b"):
        return [order_of(rank, schedule, pp, stages_per_rank, num_micro_batches) for rank in range(pp)]
    return [
        [_action(part) for action in actions if action is not None for part in action.sub_actions or (action,)]
        for _, actions in sorted(_torch_order(schedule, pp, stages_per_rank, num_micro_batches).items())
    ]


@lru_cache(maxsize=128)
def order_of(rank: int, schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int) -> list[Action]:
    """The same of one rank, without those of others where they are known apart."""
    if schedule in ("gpipe", "1f1b"):  # torch's loops, which it writes down as a list for drawings only
        return _warmed_up(rank, num_micro_batches, num_micro_batches if schedule == "gpipe" else pp - rank)
    if schedule == "interleaved_1f1b":
        return _interleaved(rank, pp, stages_per_rank, num_micro_batches)
    return order(schedule, pp, stages_per_rank, num_micro_batches)[rank]


def _warmed_up(stage: int, num_micro_batches: int, ahead: int) -> list[Action]:
    """Backwards begin when ``ahead`` forwards are done, and from then on one follows the other."""
    actions = [Action(stage, "F", number) for number in range(ahead)]
    for number in range(num_micro_batches):
        actions.append(Action(stage, "B", number))
        if number + ahead < num_micro_batches:
            actions.append(Action(stage, "F", number + ahead))
    return actions


def _interleaved(rank: int, pp: int, stages_per_rank: int, num_micro_batches: int) -> list[Action]:
    """Narayanan et al. 2021, section 2.2: micro-batches go through a rank's stages in rounds of about ``pp``; backwards
    begin when those of the last stage can. As torch's ScheduleInterleaved1F1B."""
    each = num_micro_batches // max(1, num_micro_batches // pp)
    total = stages_per_rank * num_micro_batches
    ahead = min((stages_per_rank - 1) * each + 2 * (pp - 1 - rank), total)
    actions: list[Action] = []

    def add(kind: Literal["F", "B"], number: int) -> None:
        rounds, place = divmod(number, each)
        turn, local = divmod(rounds, stages_per_rank)
        stage = (local if kind == "F" else stages_per_rank - 1 - local) * pp + rank
        actions.append(Action(stage, kind, turn * each + place))

    for number in range(ahead):
        add("F", number)
    for number in range(total):
        if number + ahead < total:
            add("F", number + ahead)
        add("B", number)
    return actions


def _torch_order(schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int) -> dict[int, list[Any]]:
    """torch's classes make the order of all ranks in their constructor; these stages are all that it looks at."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    stages: list[Any] = [
        SimpleNamespace(
            stage_index=number * pp, num_stages=pp * stages_per_rank, group_size=pp, group_rank=0, is_last=False,
            submod=None,
        )
        for number in range(stages_per_rank)
    ]  # fmt: skip
    made = get_schedule_class(SCHEDULES[schedule].torch_name)(stages, num_micro_batches)
    found: dict[int, list[Any]] = made.pipeline_order
    return found


def _action(action: Any) -> Action:
    return Action(action.stage_index, action.computation_type.value, action.microbatch_index)


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


def bubble(
    schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int, costs: Sequence[float] | None = None
) -> float:
    """The share of a step in which a rank waits, in [0, 1), simulated, the mean over ranks: a forward takes 1 and a
    backward 2, sending nothing. From the first rank's begin to the last one's end, as a norm over all ranks needs it.

    ``costs`` of the stages, in any unit; None = all the same. Uneven ones add to what ranks wait.
    """
    given = schedule, pp, stages_per_rank, num_micro_batches
    times = [[cost * unit for unit in _UNITS] for cost in costs or [1.0] * (pp * stages_per_rank)]
    busy = sum(times[action.stage][KINDS.index(action.kind)] for actions in order(*given) for action in actions)
    return 1 - busy / (pp * makespan(*given, times, 0.0))
