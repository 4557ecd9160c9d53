"""Products of a sequence-sharded stream with split weights, with their collectives and explicit gradients.

Between split products the residual stream is sharded along the sequence (Korthikanti et al. 2022, section 4.2.2):
every rank of the group holds ``x_BlD``, its L/ranks tokens of all B rows. A product with a weight split by rows gathers
the sequence first; one with a weight split by columns gives a partial sum, which is scattered along the sequence.

Shapes: B batch, L sequence, l this rank's share of it, D width of the stream, O and I rows and columns of this rank's
share of a weight, T = B·L tokens.

What a backward pass gathers or scatters travels while it multiplies: a collective is started, the product that does
not need it is queued, and only then is it waited for. A gradient that the engine is not going to use is not computed:
a pipeline that splits its backward pass runs each of these twice, once for the input and once for the weights.

The functional collectives are called as operators because that is what torch 2.11 and 2.13 have in common, and what
inductor's fusion of products with collectives looks for in a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from quern.model.float8.linear import products
from quern.model.float8.needed_grads import needed_grads
from quern.model.float8.recipe import Recipe
from quern.torch_versions import SPLIT_GRADIENTS_JOINED as JOINED

__all__ = ["KEEPING", "SUMS_KEPT", "Ranks", "gather", "gather_multiply", "multiply_scatter", "sum_scatter"]

SUMS_KEPT: ContextVar[bool] = ContextVar("SUMS_KEPT", default=False)
"""True while a forward is computed again of which every sum over ranks was kept: what was summed is then not needed."""

KEEPING: ContextVar[bool] = ContextVar("KEEPING", default=False)
"""True in the forward before: what products give through ``out=`` is not kept."""


@dataclass(frozen=True)
class Ranks:
    """The ranks over which tensors are split, and this rank's position among them."""

    group: str
    """The name of their process group, which is what operators in a compiled graph know it by."""
    size: int
    rank: int

    @staticmethod
    def of(mesh: DeviceMesh) -> Ranks:
        """The ranks of a 1-D mesh."""
        return Ranks(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())


def gather_multiply(
    x_BlD: Tensor, weights: Sequence[Tensor], ranks: Ranks, recipes: Sequence[Recipe | None] | None = None
) -> tuple[Tensor, ...]:
    """``x Wᵀ`` [B, L, O] of the whole sequence for each weight [O, D], which is cast to the dtype of ``x_BlD``.

    One gather for all of them. For backward only ``x_BlD`` is kept, and gathered again; the gradient of a weight has
    the weight's dtype, that of ``x_BlD`` is summed over the ranks. ``recipes``: of each weight's products, None = none
    in FP8. Collective, backward too.
    """
    by = (None,) * len(weights) if recipes is None else tuple(recipes)
    found = _GatherMultiply.apply(x_BlD, ranks.group, ranks.size, JOINED, by, *weights)
    return cast(Tensor, found).split([weight.shape[0] for weight in weights], -1) if JOINED else found


def multiply_scatter(x_BLI: Tensor, weight_DI: Tensor, ranks: Ranks, recipe: Recipe | None = None) -> Tensor:
    """``x Wᵀ`` summed over the ranks, this rank's tokens of it: [B, l, D]. L must be a multiple of the ranks.

    Backward gathers the gradient once for both products. ``recipe``: of the products in FP8. Collective, backward too.
    """
    return _MultiplyScatter.apply(x_BLI, ranks.group, ranks.size, recipe, weight_DI)


def sum_scatter(x_BLD: Tensor, ranks: Ranks) -> Tensor:
    """The sum of every rank's ``x_BLD``, this rank's tokens of it: [B, l, D]. Collective, backward too."""
    return _SumScatter.apply(x_BLD, ranks.group, ranks.size)


def gather(x_BlD: Tensor, ranks: Ranks) -> Tensor:
    """The whole sequence, [B, L, D]; its gradient is summed over the ranks. Collective, backward too."""
    return _Gather.apply(x_BlD, ranks.group, ranks.size)


class _GatherMultiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BlD: Tensor, group: str, size: int, joined: bool, recipes: Sequence[Recipe | None], *weights: Tensor
    ) -> Any:
        ctx.save_for_backward(x_BlD, *weights)
        ctx.group, ctx.size, ctx.joined, ctx.recipes = group, size, joined, recipes
        batch = x_BlD.shape[0]
        x_TD = _gathered(_start_gather(x_BlD, group, size), batch, size)
        if joined and not any(recipes):
            return _rows(x_TD @ torch.cat([weight.to(x_TD.dtype) for weight in weights]).T, batch)
        parts = [products(by).forward(x_TD, weight) for by, weight in zip(recipes, weights, strict=True)]
        return _rows(torch.cat(parts, -1), batch) if joined else tuple(_rows(part_TO, batch) for part_TO in parts)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        x_wanted, *weights_wanted = needed_grads(ctx, first_weight=5)
        x_BlD, *weights = ctx.saved_tensors
        if ctx.joined:
            dy = dy[0].split([weight.shape[0] for weight in weights], -1)
        dy_TO = [part_BLO.flatten(0, 1) for part_BLO in dy]
        batch, group, size = x_BlD.shape[0], ctx.group, ctx.size
        gathering = _start_gather(x_BlD, group, size) if any(weights_wanted) else None
        scattering = None
        if x_wanted:
            scattering = _start_scatter(_grad_input(dy_TO, weights, ctx.recipes), batch, group, size)
        dw: list[Tensor | None] = [None] * len(weights)
        if gathering is not None:
            x_TD = _gathered(gathering, batch, size)
            for number, weight_OD in enumerate(weights):
                if weights_wanted[number]:
                    dw[number] = products(ctx.recipes[number]).grad_weight(dy_TO[number], x_TD).to(weight_OD.dtype)
        return None if scattering is None else _scattered(scattering, batch), None, None, None, None, *dw


def _grad_input(dy_TO: Sequence[Tensor], weights: Sequence[Tensor], recipes: Sequence[Recipe | None]) -> Tensor:
    """Of the gathered input of several products [T, D]."""
    dx_TD = products(recipes[0]).grad_input(dy_TO[0], weights[0])
    for part_TO, weight_OD, recipe in zip(dy_TO[1:], weights[1:], recipes[1:], strict=True):
        if recipe is None:
            dx_TD = torch.addmm(dx_TD, part_TO, weight_OD.to(dx_TD.dtype))
        else:
            dx_TD = dx_TD + products(recipe).grad_input(part_TO, weight_OD)
    return dx_TD


class _MultiplyScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLI: Tensor, group: str, size: int, recipe: Recipe | None, weight_DI: Tensor) -> Tensor:
        ctx.save_for_backward(x_BLI, weight_DI)
        ctx.group, ctx.size, ctx.recipe = group, size, recipe
        batch = x_BLI.shape[0]
        y_TD = _to_be_summed(x_BLI.flatten(0, 1), weight_DI, recipe)
        return _scattered(_start_scatter(y_TD, batch, group, size), batch)

    @staticmethod
    def backward(ctx: Any, dy_BlD: Tensor) -> tuple[Tensor | None, ...]:
        x_wanted, weight_wanted = needed_grads(ctx, first_weight=4)
        x_BLI, weight_DI = ctx.saved_tensors
        batch = dy_BlD.shape[0]
        dy_TD = _gathered(_start_gather(dy_BlD, ctx.group, ctx.size), batch, ctx.size)
        by = products(ctx.recipe)
        dx_BLI = _rows(by.grad_input(dy_TD, weight_DI), batch) if x_wanted else None
        dw_DI = by.grad_weight(dy_TD, x_BLI.flatten(0, 1)).to(weight_DI.dtype) if weight_wanted else None
        return dx_BLI, None, None, None, dw_DI


class _SumScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLD: Tensor, group: str, size: int) -> Tensor:
        ctx.group, ctx.size, ctx.batch = group, size, x_BLD.shape[0]
        return _scattered(_start_scatter(x_BLD.flatten(0, 1), ctx.batch, group, size), ctx.batch)

    @staticmethod
    def backward(ctx: Any, dy_BlD: Tensor) -> tuple[Tensor | None, ...]:
        gathered = _gathered(_start_gather(dy_BlD, ctx.group, ctx.size), ctx.batch, ctx.size)
        return _rows(gathered, ctx.batch), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BlD: Tensor, group: str, size: int) -> Tensor:
        ctx.group, ctx.size, ctx.batch = group, size, x_BlD.shape[0]
        return _rows(_gathered(_start_gather(x_BlD, group, size), ctx.batch, size), ctx.batch)

    @staticmethod
    def backward(ctx: Any, dy_BLD: Tensor) -> tuple[Tensor | None, ...]:
        scattering = _start_scatter(dy_BLD.flatten(0, 1), ctx.batch, ctx.group, ctx.size)
        return _scattered(scattering, ctx.batch), None, None


def _to_be_summed(x_TI: Tensor, weight_DI: Tensor, recipe: Recipe | None) -> Tensor:
    """This rank's part of a sum, as large as the whole stream, not needed once it is summed.

    ``out=`` keeps it from what selective recomputation keeps; products in FP8 are led there.
    """
    if torch.compiler.is_compiling():  # a partitioner sees what is needed
        return products(recipe).forward(x_TI, weight_DI)
    y_TD = x_TI.new_empty(x_TI.shape[0], weight_DI.shape[0])  # every time: recomputation repeats what was done
    if SUMS_KEPT.get():
        return y_TD
    if recipe is None:
        return torch.mm(x_TI, weight_DI.to(x_TI.dtype).T, out=y_TD)
    del y_TD
    with _ThroughOut() if KEEPING.get() else contextlib.nullcontext():
        return products(recipe).forward(x_TI, weight_DI)


class _ThroughOut(TorchDispatchMode):
    """Products give their result through ``out=``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm_v2.default):
            return func(*args, **kwargs)
        a_MS, b_SN, *_ = args
        dtype = a_MS.dtype if func is torch.ops.aten.mm.default else args[9]
        out = a_MS.new_empty(a_MS.shape[0], b_SN.shape[1], dtype=dtype)
        return func.overloadpacket.out(*args, **kwargs, out=out)


# Inductor's fusion looks for one row's gather or scatter right beside the product, and for several rows' beside the
# product's reshapes, with the parts of the ranks put in order by a split and a concatenation.


def _start_gather(x_BlD: Tensor, group: str, size: int) -> Tensor:
    """A gather on its way: [ranks·l, D] of one row, [ranks·B, l, D] of several; see :func:`_gathered`."""
    shard = x_BlD[0] if x_BlD.shape[0] == 1 else x_BlD
    started: Tensor = torch.ops._c10d_functional.all_gather_into_tensor(shard.contiguous(), size, group)
    return started


def _gathered(started: Tensor, batch: int, size: int) -> Tensor:
    """The whole sequence [T, D]. Ranks' parts lie end to end: in order if there is one row, else they are copied."""
    arrived: Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return arrived if batch == 1 else torch.cat(arrived.chunk(size), 1).flatten(0, 1)


def _start_scatter(x_TD: Tensor, batch: int, group: str, size: int) -> Tensor:
    """A sum over the ranks on its way, each of which gets its tokens; see :func:`_scattered`."""
    parts = x_TD if batch == 1 else torch.cat(_rows(x_TD, batch).chunk(size, 1))
    started: Tensor = torch.ops._c10d_functional.reduce_scatter_tensor(parts.contiguous(), "sum", size, group)
    return started


def _scattered(started: Tensor, batch: int) -> Tensor:
    """This rank's tokens [B, l, D]."""
    arrived: Tensor = torch.ops._c10d_functional.wait_tensor(started)
    return arrived[None] if batch == 1 else arrived


def _rows(x_TD: Tensor, batch: int) -> Tensor:
    """[B, L, D] again."""
    return x_TD.unflatten(0, (batch, -1))
