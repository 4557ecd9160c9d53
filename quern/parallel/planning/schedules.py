"""Pipeline schedules: their names and requirements. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal, get_args

__all__ = ["SCHEDULES", "Schedule", "ScheduleKind", "check_micro_batches", "why_no_split_backward"]

Schedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"
]


@dataclass(frozen=True)
class ScheduleKind:
    """The requirements of a schedule."""

    torch_name: str
    """For ``torch.distributed.pipelining.schedules.get_schedule_class``."""
    stages_per_rank: int | None
    """None: 2 or more, as configured."""
    v_shaped: bool
    """Whether stages go down the ranks and up again (rank r: r and 2·pp-1-r), else round and round (r, r+pp, …)."""
    splits_backward: bool
    """Whether gradients of inputs and of weights are computed apart, which activation checkpointing does not go with:
    torch would compute every block three times."""
    pairs: bool = False
    """Whether it has a forward and a backward of two stages of a rank beside each other."""


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind("GPipe", 1, False, False),
    "1f1b": ScheduleKind("1F1B", 1, False, False),
    "interleaved_1f1b": ScheduleKind("Interleaved1F1B", None, False, False),
    "looped_bfs": ScheduleKind("LoopedBFS", None, False, False),
    "interleaved_zero_bubble": ScheduleKind("InterleavedZeroBubble", None, False, True),
    "zbv_zero_bubble": ScheduleKind("ZBVZeroBubble", 2, True, True),
    "dualpipe_v": ScheduleKind("DualPipeV", 2, True, True, True),
}
assert tuple(SCHEDULES) == get_args(Schedule)


def why_no_split_backward() -> str | None:
    """Why the torch that is installed cannot run schedules that split the backward pass, or None."""
    found = version("torch")
    # torch/distributed/pipelining/_backward.py asks the nodes of such functions for what they have only since then
    return f"torch {found} cannot do of functions written in Python" if found.startswith("2.11.") else None


def check_micro_batches(schedule: str, pp: int, stages: int, num_micro_batches: int) -> str | None:
    """What is wrong with so many micro-batches a step for ``stages`` over ``pp`` ranks, and what would fit, or None."""
    if _fits(schedule, pp, stages, num_micro_batches):
        return None
    fewer = next((n for n in range(num_micro_batches - 1, 0, -1) if _fits(schedule, pp, stages, n)), None)
    more = next(n for n in range(num_micro_batches + 1, num_micro_batches + stages + 2 * pp) if
                _fits(schedule, pp, stages, n))  # fmt: skip
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
        rounds = num_micro_batches // pp
        rule = f"a number that falls into rounds of equal size (⌊micro-batches / pp⌋ = {rounds} rounds here)"
    else:
        rule = f"{stages} micro-batches or more, one for every stage"
    fits = f"{more}" if fewer is None else f"{fewer} or {more}"
    return f"schedule {schedule} with pp {pp}: expected {rule}, got {num_micro_batches}; {fits} would fit"


def _fits(schedule: str, pp: int, stages: int, num_micro_batches: int) -> bool:
    """As torch's classes refuse, each in its constructor."""
    if schedule in ("1f1b", "dualpipe_v"):
        return num_micro_batches >= stages
    if schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
        return num_micro_batches >= 1 and num_micro_batches % max(1, num_micro_batches // pp) == 0
    return num_micro_batches >= 1
