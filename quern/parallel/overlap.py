"""Computes a forward and a backward of two stages of a rank in turns, where a schedule has them beside each other.

DualPipeV (DeepSeek-V3, 2412.19437, section 3.2.1) pairs them so that tokens of one micro-batch travel to experts while
the other is computed. torch's runtime does one after the other, unless it is given a function for the pair.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining.schedules import _wait_batch_p2p

from quern.parallel.experts.turns import in_turns

__all__ = ["overlap_pairs"]


def overlap_pairs(schedule: Any) -> None:
    """Let torch's schedule of a rank do so; nothing where it has no pairs."""
    from torch.distributed.pipelining.schedules import OVERLAP_F_B

    def both(action: Any, context: Any) -> None:
        forward, backward = action.sub_actions
        in_turns(lambda: _forward(schedule, forward, context), lambda: _backward(schedule, backward))

    schedule.register_custom_function(OVERLAP_F_B, both)


def _forward(schedule: Any, action: Any, context: Any) -> None:
    """As the runtime's own."""
    index, number = action.stage_index, action.microbatch_index
    stages = {stage.stage_index: stage for stage in schedule._stages}
    stage = stages[index]
    schedule._assert_unsharded(stage)
    if not stage.is_first and index - 1 not in stages:
        _wait_batch_p2p(schedule.fwd_recv_ops.pop((index, number)))
    output = stage.forward_one_chunk(
        number, context.arg_mbs[number], context.kwarg_mbs[number], save_forward_output=False
    )  # fmt: skip
    schedule._maybe_compute_loss(stage, output, context.target_mbs, number)
    if index + 1 in stages:
        stages[index + 1].set_local_fwd_input(output, number)


def _backward(schedule: Any, action: Any) -> None:
    """As the runtime's own, of inputs and weights at once."""
    index, number = action.stage_index, action.microbatch_index
    stages = {stage.stage_index: stage for stage in schedule._stages}
    stage = stages[index]
    schedule._assert_unsharded(stage)
    if not stage.is_last and index + 1 not in stages:
        _wait_batch_p2p(schedule.bwd_recv_ops.pop((index, number)))
    loss = schedule._maybe_get_loss(stage, number)
    schedule.backward_counter[index] += 1
    last = schedule.backward_counter[index] == schedule._n_microbatches
    stage.backward_one_chunk(number, loss=loss, full_backward=True, last_backward=last)
    if index - 1 in stages:
        stages[index - 1].set_local_bwd_input(stage.get_local_bwd_output(number), number)
