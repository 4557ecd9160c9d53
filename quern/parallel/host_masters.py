"""Keeps a model's masters in host memory, and its weights on the device in the dtype in which products take them.

ZeRO-Offload (Ren et al. 2021). Cast are all weights where FSDP2 would cast what it gathers. Elsewhere norms, embeddings
and, but in one process, the head are computed with in the masters' dtype, and the device has them in that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from quern.model.moe.experts import Experts
from quern.model.transformer import Linear, Transformer
from quern.parallel.kept_weights import KeptWeights

__all__ = ["HostMasters", "Unit", "cast_weights"]


@dataclass(eq=False)
class Unit:
    """Weights that a forward uses at the same time: an end of a stage, or a block."""

    pairs: Sequence[tuple[nn.Parameter, nn.Parameter]]
    """Each on the device, and its master on the host."""
    wait: Callable[[], None] = lambda: None
    """Called before a forward uses them: returns once they are those of the last update."""


class HostMasters:
    """The masters of a rank's weights, uninitialised, in units in the order in which a forward uses them."""

    def __init__(
        self, view: Transformer, parts: Sequence[Transformer], dtype: torch.dtype, kept: Sequence[KeptWeights]
    ) -> None:
        """``parts``: the stages, with memory; ``view``: all of their parameters by global names. ``dtype``: of
        masters. Sets what the parts call before they use weights."""
        named = dict(view.named_parameters())
        masters = {name: _master(parameter, dtype) for name, parameter in named.items()}
        self.model = cast(Transformer, _shell(view, masters))
        """The masters under the weights' names, with the model's ``shape`` and its own buffers; not to be called."""
        self.totals = {w: own.total_OK for some in kept for w, own in some.weights if own.total_OK is not None}
        """The memory that is a weight's gradient in every step, where there is such."""
        by_weight = {parameter: masters[name] for name, parameter in named.items()}
        made = {weight for some in kept for weight, _ in some.made}
        self.units: list[Unit] = []
        for part in parts:
            rest = list(part.parameters())
            later = [part.norm, part.head] if part.norm is not None and part.head is not None else []
            unit_of: dict[nn.Module, Unit] = {}
            units: list[Unit] = []
            for modules in [*([block] for block in part.blocks.values()), *([later] if later else [])]:
                weights = [weight for module in modules for weight in module.parameters()]
                units.append(Unit([(weight, by_weight[weight]) for weight in weights]))
                unit_of |= dict.fromkeys(modules, units[-1])
                rest = [weight for weight in rest if weight not in {*weights}]
            first = Unit([(weight, by_weight[weight]) for weight in rest])
            self.units += [unit for unit in (first, *units) if unit.pairs]
            # what is kept of weights, as in FP8, is made of all of them when a forward begins
            begin = [first, *(unit for unit in units if made & {weight for weight, _ in unit.pairs})]
            part.register_forward_pre_hook(partial(_wait, begin), prepend=True)  # before FSDP2's, which gathers
            part.before_use = lambda module, unit_of=unit_of: unit_of[module].wait() if module in unit_of else None
            of_experts = {own: unit for module, unit in unit_of.items() for own in module.modules()}
            for module, unit in {part: first, **of_experts}.items():
                if isinstance(module, FSDPModule):  # a pipeline's schedule gathers stages ahead
                    module.unshard = partial(_after, unit, module.unshard)  # type: ignore[method-assign]


def cast_weights(part: Transformer, dtype: torch.dtype, *, sharded: bool, head: bool) -> None:
    """Cast what the device holds in ``dtype``: all weights where they are to be ``sharded`` by FSDP2, else those of the
    blocks' matrices but of routers, and of the ``head``. In place, before FSDP2 has them."""
    modules = part.modules() if sharded else [*part.blocks.modules(), *([part.head] if head and part.head else [])]
    for module in modules:
        for name, weight in module.named_parameters(recurse=False):
            if sharded or isinstance(module, Linear | Experts):
                setattr(module, name, nn.Parameter(weight.detach().to(dtype), requires_grad=weight.requires_grad))


def _wait(units: Sequence[Unit], *_: object) -> None:
    for unit in units:
        unit.wait()


def _after(unit: Unit, gather: Callable[[bool], Any], async_op: bool = False) -> Any:
    unit.wait()
    return gather(async_op)


def _master(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """A DTensor where the weight is one: of the same mesh, whose part lies on the host."""
    empty = torch.empty_like(parameter, dtype=dtype, device="cpu", requires_grad=False)
    master = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    master.grad_dtype = None  # of any
    return master


def _shell(view: Transformer, masters: Mapping[str, nn.Parameter]) -> nn.Module:
    root = nn.Module()
    root.shape = view.shape  # type: ignore[assignment]
    for name, value in {**masters, **dict(view.named_buffers())}.items():
        *path, leaf = name.split(".")
        owner = root
        for step in path:
            if step not in owner._modules:
                owner.add_module(step, nn.Module())
            owner = owner.get_submodule(step)
        if isinstance(value, nn.Parameter):
            owner.register_parameter(leaf, value)
        else:
            owner.register_buffer(leaf, value)
    return root
