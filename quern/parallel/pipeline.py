"""Pipeline parallelism: runs one step's micro-batches through stages on several ranks.

torch's schedules drive the stages and move hidden states and their gradients between ranks. They are given the number
of a micro-batch, not its tensors: every stage needs tokens, positions and documents, of which torch would have to cut
up the last, and has them already. Shapes are told beforehand, so no forward is run to find them out.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from quern.model.config import ModelShape
from quern.model.transformer import Transformer
from quern.parallel.context.inputs import Inputs
from quern.parallel.overlap import overlap_pairs
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import Mesh
from quern.parallel.planning.schedules import SCHEDULES

__all__ = ["Pipeline", "Stage", "local_view", "my_stages"]


@dataclass(frozen=True)
class Stage:
    """Consecutive layers that one rank computes at a time."""

    index: int
    """Among all stages of the pipeline."""
    layers: range


def my_stages(shape: ModelShape, mesh: Mesh, layout: Layout) -> list[Stage] | None:
    """This rank's stages, in the order of the model; None without a pipeline.

    Raises :class:`quern.errors.InputError` where layers and stages do not fit together.
    """
    if mesh.pp is None:
        return None
    if layout.plan.pp != mesh.plan.pp:
        raise ValueError(f"the layout has {layout.plan.pp} pipeline ranks and the mesh {mesh.plan.pp}")
    layers = layout.layers_of_stages(shape)
    return [Stage(index, layers[index]) for index in layout.stages_of(mesh.rank("pp"))]


def local_view(model: Transformer, parts: Sequence[Transformer]) -> Transformer:
    """The whole model with only this rank's modules in it, under their global names; ``parts`` in the model's order.

    The copy of tied embeddings that the last stage has is ``embed`` here, or ``tied`` where the first stage's own is
    here as well. For names and parameters; it is not called.
    """
    view = model.slice_layers(range(0))
    view.blocks = nn.ModuleDict({number: block for part in parts for number, block in part.blocks.items()})
    for part in parts:
        view.norm = part.norm or view.norm
        view.head = part.head or view.head
        if part.embed is not None and view.embed is None:
            view.embed = part.embed
        elif part.embed is not None:
            view.tied = part.embed
    return view


class Pipeline:
    """Runs this rank's stages; see :class:`quern.parallel.accumulation.Runner`. Every method is collective.

    ``parts``: the modules of ``stages``, as they train, FSDP2's wrapping included. ``layout`` says the schedule and the
    shape of what goes from stage to stage: [micro_batch, seq_len / (cp · tp), dim] in ``compute_dtype``. So every
    micro-batch has the same shape; their number may change from step to step.

    The sums are those of the last stage's rank, and it ``counts``, once for all ranks of ``tp``.
    """

    def __init__(
        self, parts: Sequence[Transformer], stages: Sequence[Stage], mesh: Mesh, layout: Layout, device: torch.device
    ) -> None:
        assert mesh.pp is not None
        assert len(parts) == len(stages)
        self._group, self._device = mesh.pp, device
        self._num_stages, self._kind = layout.num_stages, SCHEDULES[layout.scheduling]
        self._last = self._num_stages - 1
        self._rows, self._columns = layout.micro_batch, layout.tokens // mesh.plan.tp
        self._dtype = layout.compute_dtype
        self._sums_dtype = torch.promote_types(layout.compute_dtype, torch.float32)
        self._parts = [_Part(part, stage, stage.index == self._last) for part, stage in zip(parts, stages, strict=True)]
        self._rank_of = {index: rank for rank in range(mesh.plan.pp) for index in layout.stages_of(rank)}
        self._rank = mesh.rank("pp")
        self._overlaps = mesh.plan.ep > 1 and self._kind.pairs
        self.counts = self._rank_of[self._last] == self._rank and mesh.rank("tp") == 0
        self._schedule: tuple[int, Any, list[PipelineStage]] | None = None
        self._dim = parts[0].shape.dim
        # NCCL joins a group's ranks at its first call, which all have to make: sends between two of them do not
        dist.all_reduce(torch.zeros((), device=device), group=self._group)

    def forward_backward(
        self, inputs: Sequence[Inputs], weigh: Callable[[Tensor], Tensor], losses: dict[int, Tensor] | None = None
    ) -> Tensor:
        """See :class:`quern.parallel.accumulation.Runner`."""
        schedule, stages = self._schedule_for(len(inputs))
        numbers = torch.arange(len(inputs))  # on the host: looking one up must not wait for the device
        sums: dict[int, Tensor] = {}
        inputs = self._checked(inputs)
        for part in self._parts:
            part.begin(inputs, weigh, sums, losses)
        try:
            is_last = self._rank_of[self._last] == self._rank
            with _without_lists_of_actions():
                schedule.step(number=numbers, target=numbers if is_last else None, return_outputs=False)
        except Exception as error:
            self._schedule = None  # it waits for what will not come
            cause = self._explained(error)
            raise cause from cause.__cause__
        finally:
            for part in self._parts:
                part.end()
        for stage in stages:  # else gradients of what was received stay until the next step where backwards are split
            stage.clear_runtime_states()
        return self._counted(sums.values())

    @torch.no_grad()
    def forward(self, inputs: Sequence[Inputs], losses: dict[int, Tensor] | None = None) -> Tensor:
        """See :class:`quern.parallel.accumulation.Runner`. Any number of micro-batches, whatever the schedule asks.

        Stage by stage in the model's order, all micro-batches through one before the next. Two ranks' messages to each
        other must be in the same order on both, for NCCL takes them one by one, whichever way they go. Only where
        stages go round two ranks do both send to each other by turns: there a stage sends once it is through.
        """
        inputs = self._checked(inputs)
        by_turns = self._num_stages > len(set(self._rank_of.values())) == 2 and not self._kind.v_shaped
        sums: list[Tensor] = []
        sending: list[tuple[dist.Work, Tensor]] = []
        local: list[Tensor] = []
        leaving: list[Tensor] = []
        for part in self._parts:
            index = part.stage.index
            from_here = self._rank_of.get(index - 1) == self._rank
            to_here = self._rank_of.get(index + 1) == self._rank
            received, local, leaving = local, [], []
            for number, micro_batch in enumerate(inputs):
                hidden_BLD = None
                if from_here:
                    hidden_BLD = received[number]
                elif index > 0:
                    hidden_BLD = self._hidden(self._device)
                    dist.recv(hidden_BLD, group=self._group, group_src=self._rank_of[index - 1])
                out = part.module(micro_batch.tokens_BL, **micro_batch.behind, hidden_BLD=hidden_BLD)
                if index == self._last:
                    sums.append(torch.stack((out[0], out[1].sum())))
                    if losses is not None:
                        losses[number] = out[1]
                elif to_here:
                    local.append(out)
                else:
                    leaving.append(out.contiguous())
                if leaving and (number == len(inputs) - 1 or not by_turns):
                    sending += [self._send(out, index + 1) for out in leaving]
                    leaving = []
            part.reshard()
        for work, _ in sending:
            work.wait()
        return self._counted(sums)

    def _send(self, out: Tensor, stage: int) -> tuple[dist.Work, Tensor]:
        work = dist.isend(out, group=self._group, group_dst=self._rank_of[stage])
        assert work is not None
        return work, out  # which has to live until it is sent

    def _counted(self, sums: Iterable[Tensor]) -> Tensor:
        total = torch.zeros(2, dtype=self._sums_dtype, device=self._device)
        for one in sums:
            total += one
        return total if self.counts else torch.zeros_like(total)

    def _checked(self, inputs: Sequence[Inputs]) -> Sequence[Inputs]:
        for micro_batch in inputs:
            assert micro_batch.tokens_BL.shape[0] == self._rows, "a pipeline's micro-batches are all of one shape"
        return inputs

    def _hidden(self, device: torch.device, *, grad: bool = False) -> Tensor:
        size = (self._rows, self._columns, self._dim)
        return torch.empty(size, dtype=self._dtype, device=device, requires_grad=grad)

    def _schedule_for(self, num_micro_batches: int) -> tuple[Any, list[PipelineStage]]:
        """torch's schedule and its stages, made anew where the number has changed: they keep buffers for every
        micro-batch."""
        if self._schedule is None or self._schedule[0] != num_micro_batches:
            self._schedule = None  # its buffers go before others come
            stages = [self._torch_stage(part) for part in self._parts]
            make: Any = get_schedule_class(self._kind.torch_name)
            one = issubclass(make, PipelineScheduleSingle)
            made = make(stages[0] if one else stages, num_micro_batches, loss_fn=_objective, scale_grads=False)
            if self._overlaps:
                overlap_pairs(made)
            self._schedule = (num_micro_batches, made, stages)
        return self._schedule[1:]

    def _torch_stage(self, part: _Part) -> PipelineStage:
        """With shapes of input and output, so that torch runs no forward to find them, and of both with gradients."""
        meta, index = torch.device("meta"), part.stage.index
        given = () if index == 0 else (self._hidden(meta, grad=True),)
        objective = torch.empty((), dtype=self._sums_dtype, device=meta, requires_grad=True)
        gives = objective if index == self._last else self._hidden(meta, grad=True)
        return _Stage(part.module, index, self._num_stages, self._device, given, gives, group=self._group)

    def _explained(self, error: Exception) -> BaseException:
        """What went wrong in a stage, without torch's wrapping, and where."""
        cause: BaseException = error
        while cause.__cause__ is not None and any(wrapping in str(cause) for wrapping in _WRAPPINGS):
            cause = cause.__cause__
        at = next((part.at for part in self._parts if part.at is not None), None)
        if at is not None:
            cause.add_note(at)
        return cause


class _Stage(PipelineStage):
    """Without the messages with which torch 2.11 makes neighbours known to each other: the group has been joined
    already, and where both stages are of one rank, gloo has no way to it."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []


@contextmanager
def _without_lists_of_actions() -> Iterator[None]:
    """torch logs every rank's whole list of actions after an error, which is raised anyway; TORCH_LOGS asks for it."""
    log = logging.getLogger("torch.distributed.pipelining")
    before = log.level
    if "TORCH_LOGS" not in os.environ:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


_WRAPPINGS = ("failed to run forward", "Failed to run stage backward")
"""How torch begins the message in which it wraps an error of a stage; the rest is shapes."""


def _objective(output: Tensor, number: Tensor) -> Tensor:
    """torch's loss function: the last stage gives the weighed objective already."""
    return output


class _Part:
    """A stage's module, which finds its micro-batch by number while a schedule runs it.

    By hooks, because torch must be given the module that FSDP2 has made its own.
    """

    def __init__(self, module: nn.Module, stage: Stage, last: bool) -> None:
        self.module, self.stage, self._is_last = module, stage, last
        self.at: str | None = None
        """Where it is, while it computes a forward."""
        self._inputs: Sequence[Inputs] = ()
        self._weigh: Callable[[Tensor], Tensor] | None = None
        self._sums: dict[int, Tensor] = {}
        self._losses: dict[int, Tensor] | None = None
        self._number = -1
        # before FSDP2's own, which would carry the number to the device
        module.register_forward_pre_hook(self._look_up, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._weighed)  # after FSDP2's, which marks where backward begins

    def begin(
        self,
        inputs: Sequence[Inputs],
        weigh: Callable[[Tensor], Tensor],
        sums: dict[int, Tensor],
        losses: dict[int, Tensor] | None,
    ) -> None:
        self._inputs, self._weigh, self._sums, self._losses, self.at = inputs, weigh, sums, losses, None

    def end(self) -> None:
        self._inputs, self._weigh, self._sums, self._losses = (), None, {}, None

    def reshard(self) -> None:
        """Free gathered weights after a forward without a backward, since nothing else does."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _look_up(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._weigh is None:
            return None
        self._number = int(kwargs["number"])
        layers = self.stage.layers
        self.at = (
            f"in pipeline stage {self.stage.index} (layers {layers.start} to {layers.stop - 1}), micro-batch "
            f"{self._number}"
        )
        inputs = self._inputs[self._number]
        return (inputs.tokens_BL,), {**inputs.behind, "hidden_BLD": args[0] if args else None}

    def _weighed(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.at = None
        if self._weigh is None or not self._is_last:
            return None
        loss_sum, nll_BL = output
        self._sums[self._number] = torch.stack((loss_sum.detach(), nll_BL.sum()))
        if self._losses is not None:
            self._losses[self._number] = nll_BL
        return self._weigh(loss_sum)
