"""Pipeline schedules: in which order a rank works on the micro-batches of its stages, and what each asks for.

Knows no torch: configs are checked, and a bubble is told, before anything starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["SCHEDULES", "Schedule", "ScheduleKind"]

Schedule = Literal[
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"
]


@dataclass(frozen=True)
class ScheduleKind:
    """What a schedule needs."""

    torch_name: str
    """For ``torch.distributed.pipelining.schedules.get_schedule_class``."""
    stages_per_rank: int | None
    """None: 2 or more, as configured."""
    v_shaped: bool
    """Whether stages go down the ranks and up again (rank r: r and 2·pp-1-r), else round and round (r, r+pp, …)."""
    splits_backward: bool
    """Whether gradients of inputs and of weights are computed apart, which activation checkpointing does not go with:
    torch would compute every block three times."""


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind("GPipe", 1, False, False),
    "1f1b": ScheduleKind("1F1B", 1, False, False),
    "interleaved_1f1b": ScheduleKind("Interleaved1F1B", None, False, False),
    "looped_bfs": ScheduleKind("LoopedBFS", None, False, False),
    "interleaved_zero_bubble": ScheduleKind("InterleavedZeroBubble", None, False, True),
    "zbv_zero_bubble": ScheduleKind("ZBVZeroBubble", 2, True, True),
    "dualpipe_v": ScheduleKind("DualPipeV", 2, True, True),
}
assert tuple(SCHEDULES) == get_args(Schedule)
