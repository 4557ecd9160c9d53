"""Simulates the order in which pipeline ranks process micro-batches, and their idle time.

The order of schedules that nobody plans by the thousand is torch's own list, so torch is imported where it is asked
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from quern.parallel.planning.schedules import SCHEDULES, check_micro_batches

__all__ = ["Action", "bubble", "makespan", "order", "order_of"]


class Action(NamedTuple):
    """One unit of work of a rank."""

    stage: int
    kind: Literal["F", "B", "I", "W"]
    """Forward; backward whole, or for the input and for the weights apart."""
    micro_batch: int


UNITS: dict[str, float] = {"F": 1, "B": 2, "I": 1, "W": 1}
"""A backward takes two products for each one of the forward."""


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


def makespan(ranks: list[list[Action]], units: dict[str, float] = UNITS, costs: Sequence[float] | None = None) -> float:
    """The time at which the last rank is done, if every action takes its kind's units and sending takes no time.

    ``costs``: how many times these each stage takes; None = once.
    """
    last_stage = max(action.stage for actions in ranks for action in actions)
    ends: dict[tuple[int, str, int], float] = {}
    clocks, places = [0.0] * len(ranks), [0] * len(ranks)
    while any(place < len(actions) for place, actions in zip(places, ranks, strict=True)):
        before = list(places)
        for rank, actions in enumerate(ranks):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                needs = _needs(action, last_stage)
                if any(need not in ends for need in needs):
                    break
                takes = units[action.kind] * (1 if costs is None else costs[action.stage])
                clocks[rank] = max(clocks[rank], *(ends[need] for need in needs), 0.0) + takes
                done = "F" if action.kind == "F" else "W" if action.kind == "W" else "dx"
                ends[action.stage, done, action.micro_batch] = clocks[rank]
                places[rank] += 1
        assert places != before, "the order waits for itself"
    return max(clocks)


def _needs(action: Action, last_stage: int) -> list[tuple[int, str, int]]:
    """Whose end an action waits for; ``dx`` is a stage's gradient for the stage before, whole backward or not."""
    stage, kind, number = action
    if kind == "F":
        return [(stage - 1, "F", number)] if stage else []
    if kind == "W":
        return [(stage, "dx", number)]
    return [(stage, "F", number)] + ([(stage + 1, "dx", number)] if stage < last_stage else [])


def bubble(
    schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int, costs: Sequence[float] | None = None
) -> float:
    """The share of a step in which a rank waits, in [0, 1), simulated, the mean over ranks: a forward takes 1 and a
    backward 2, sending nothing. From the first rank's begin to the last one's end, as a norm over all ranks needs it.

    ``costs`` of the stages, in any unit; None = all the same. Uneven ones add to what ranks wait.
    """
    ranks = order(schedule, pp, stages_per_rank, num_micro_batches)
    weights = costs or [1.0] * (pp * stages_per_rank)
    busy = sum(UNITS[action.kind] * weights[action.stage] for actions in ranks for action in actions)
    return 1 - busy / (pp * makespan(ranks, costs=weights))
