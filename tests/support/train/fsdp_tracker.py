"""A step of a layout on ranks that do not exist, as torch's own trackers of memory see it.

The process group is torch's fake one, whose collectives move nothing, and tensors are fake ones, which have sizes and
no values: so one process is a rank of 64, with a model of any width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from quern.model.transformer import Transformer
from quern.parallel.apply import Parallel, parallelize
from quern.parallel.context.inputs import Inputs
from quern.parallel.data import materialise
from quern.parallel.planning.mesh import build_mesh
from quern.parallel.planning.step import Step
from quern.train.config import OptimizerConfig
from quern.train.step.optimizer import Optimizer, build_optimizer

__all__ = ["Tracked", "track"]

CPU = torch.device("cpu")
Snapshot = dict[str, int]
#: What FSDP2 holds whole, and its messages.
WHOLE = ("Unsharded Param", "Unsharded Grad", "All Gather", "Reduce Scatter")


@dataclass(frozen=True)
class Tracked:
    """Bytes of one rank in one step that is not its first."""

    after_forward: list[Snapshot]
    """Of each micro-batch, when the loss is there: by kind of tensor, as torch names it."""
    after_backward: Snapshot
    """Of all micro-batches."""
    after_update: Snapshot
    whole: int
    """The most of :data:`WHOLE` together, after any operator."""
    peak: int
    """The most of all, after any operator, with FSDP2's hooks as they are."""
    steps_of_moments: int
    """Of the optimizer's state, what counts steps: one number a parameter."""


def track(step: Step) -> Tracked:
    """Of the first rank: once with the tracker of all memory, and once with that of FSDP2, which knows kinds of tensors
    and puts hooks of its own in the place of FSDP2's."""
    dist.init_process_group("fake", rank=0, world_size=step.plan.world_size, store=FakeStore())
    try:
        with _built(step) as (parallel, optimizer):
            tracker: Any = MemTracker()
            tracker.track_external(parallel.model, optimizer)
            with tracker:
                _take(parallel, optimizer, step, tracker)
            peak = _of(tracker, "peak")["Total"]
            tracker, forwards = FSDPMemTracker(parallel.model, optimizer), []
            with tracker, _Most(tracker) as most:
                after_backward = _take(parallel, optimizer, step, tracker, forwards)
            counts = sum(slots["step"].nbytes for slots in optimizer.state.values())
            return Tracked(forwards, after_backward, _of(tracker), most.whole, peak, counts)
    finally:
        dist.destroy_process_group()


class _Most(TorchDispatchMode):
    """Looks at a tracker after every operator."""

    def __init__(self, tracker: FSDPMemTracker) -> None:
        super().__init__()
        self._tracker = tracker
        self.whole = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        now = _of(self._tracker)
        self.whole = max(self.whole, sum(now.get(kind, 0) for kind in WHOLE))
        return out


class _Anew(list[Inputs]):
    """Micro-batches before each of which the tracker begins anew with its modules, which it expects to be called
    once."""

    def __init__(self, inputs: list[Inputs], tracker: Any) -> None:
        super().__init__(inputs)
        self._tracker = tracker

    def __iter__(self) -> Iterator[Inputs]:
        for one in super().__iter__():
            self._tracker.reset_mod_stats()
            yield one


@contextmanager
def _built(step: Step) -> Iterator[tuple[Parallel, Optimizer]]:
    """A model with its layout, fake tensors in it, and an optimizer that has its moments."""
    meta, layout = torch.device("meta"), step.layout
    with meta:
        model = Transformer(step.shape, compute_dtype=layout.compute_dtype, loss_chunk=step.loss_chunk)
    parallel = parallelize(model, build_mesh(step.plan, "cpu"), layout, meta)
    with FakeTensorMode(allow_non_fake_inputs=True):
        materialise(parallel.model, CPU)
        optimizer = build_optimizer(parallel.model, OptimizerConfig())
        for parameter in parallel.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield parallel, optimizer


def _take(
    parallel: Parallel, optimizer: Optimizer, step: Step, tracker: Any, forwards: list[Snapshot] | None = None
) -> Snapshot:
    """One step; ``forwards`` is given what is there after each forward. Returns what is there before the update."""
    size = step.layout.micro_batch, step.layout.seq_len

    def weigh(loss_sum: Tensor) -> Tensor:
        if forwards is not None:
            forwards.append(_of(tracker))
        return loss_sum / 512

    tokens = [torch.randint(step.shape.vocab_size, size) for _ in range(step.num_micro_batches)]
    inputs = _Anew([Inputs(tokens_BL, tokens_BL, None, None) for tokens_BL in tokens], tracker)
    parallel.run.forward_backward(inputs, weigh)
    parallel.gradients.finish()
    found = _of(tracker)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return found


def _of(tracker: Any, when: str = "current") -> Snapshot:
    found = tracker.get_tracker_snapshot(when).get(CPU, {})
    return {getattr(kind, "value", kind): size for kind, size in found.items()}
