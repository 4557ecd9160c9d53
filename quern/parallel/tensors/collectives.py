"""Products of a sequence-sharded stream with split weights, with their collectives and explicit gradients.

Between split products the residual stream is sharded along the sequence (Korthikanti et al. 2022, section 4.2.2):
every rank of the group holds ``x_BlD``, its L/ranks tokens of all B rows. A product with a weight split by rows gathers
the sequence first; one with a weight split by columns gives a partial sum, which is scattered along the sequence.

Shapes: B batch, L sequence, l this rank's share of it, D width of the stream, O and I rows and columns of this rank's
share of a weight, T = B·L tokens.

What a backward pass gathers or scatters travels while it multiplies: a collective is started, the product that does
not need it is queued, and only then is it waited for. A gradient that the engine is not going to use is not computed:
a pipeline that splits its backward pass runs each of these twice, once for the input and once for the weights.

A product that needs what is gathered, or gives what is scattered, overlaps with it in ``pieces``: while one travels,
the one before it, or after it, is multiplied. A piece is the same part of every rank's tokens, s = l/pieces of each, so
that every rank has a share of what is scattered.

The functional collectives are called as operators because that is what torch 2.11 and 2.13 have in common, and what
inductor's fusion of products with collectives looks for in a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
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
    x_BlD: Tensor,
    weights: Sequence[Tensor],
    ranks: Ranks,
    recipes: Sequence[Recipe | None] | None = None,
    pieces: int = 1,
) -> tuple[Tensor, ...]:
    """``x Wᵀ`` [B, L, O] of the whole sequence for each weight [O, D], which is cast to the dtype of ``x_BlD``.

    One gather for all of them, in ``pieces`` that divide l. For backward only ``x_BlD`` is kept, and gathered again, in
    one; the gradient of a weight has the weight's dtype, that of ``x_BlD`` is summed over the ranks. ``recipes``: of
    each weight's products, None = none in FP8. Collective, backward too.
    """
    by = (None,) * len(weights) if recipes is None else tuple(recipes)
    found = _GatherMultiply.apply(x_BlD, ranks.group, ranks.size, pieces, JOINED, by, *weights)
    return cast(Tensor, found).split([weight.shape[0] for weight in weights], -1) if JOINED else found


def multiply_scatter(
    x_BLI: Tensor, weight_DI: Tensor, ranks: Ranks, recipe: Recipe | None = None, pieces: int = 1
) -> Tensor:
    """``x Wᵀ`` summed over the ranks, this rank's tokens of it: [B, l, D]. L must be a multiple of ranks × pieces.

    Backward gathers the gradient once for both products, in pieces too where that of ``x_BLI`` is wanted. ``recipe``:
    of the products in FP8. Collective, backward too.
    """
    return _MultiplyScatter.apply(x_BLI, ranks.group, ranks.size, pieces, recipe, weight_DI)


def sum_scatter(x_BLD: Tensor, ranks: Ranks) -> Tensor:
    """The sum of every rank's ``x_BLD``, this rank's tokens of it: [B, l, D]. Collective, backward too."""
    return _SumScatter.apply(x_BLD, ranks.group, ranks.size)


def gather(x_BlD: Tensor, ranks: Ranks) -> Tensor:
    """The whole sequence, [B, L, D]; its gradient is summed over the ranks. Collective, backward too."""
    return _Gather.apply(x_BlD, ranks.group, ranks.size)


class _GatherMultiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BlD: Tensor, group: str, size: int, pieces: int, joined: bool, recipes: Sequence[Recipe | None],
        *weights: Tensor,
    ) -> Any:  # fmt: skip
        ctx.save_for_backward(x_BlD, *weights)
        ctx.group, ctx.size, ctx.pieces, ctx.joined, ctx.recipes = group, size, pieces, joined, recipes
        batch, dtype = x_BlD.shape[0], x_BlD.dtype
        started = [_start_gather(part_BsD, group, size) for part_BsD in _cut(x_BlD, 1, pieces)]
        if joined and not any(recipes):
            weights, recipes = (torch.cat([weight.to(dtype) for weight in weights]),), (None,)
        multiply = [products(by).forward_by(weight, dtype) for by, weight in zip(recipes, weights, strict=True)]
        whole: list[Tensor | None] = [None] * (1 if joined else len(weights))
        for piece, gathering in enumerate(started):
            x_TD = _gathered(gathering, batch, size)
            parts = [by(x_TD) for by in multiply]
            parts = [torch.cat(parts, -1)] if joined and len(parts) > 1 else parts
            whole = [_put(y, part_TO, piece, batch, size, pieces) for y, part_TO in zip(whole, parts, strict=True)]
        found = tuple(cast(Tensor, y).flatten(1, -2) for y in whole)
        return found[0] if joined else found

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> tuple[Tensor | None, ...]:
        x_wanted, *weights_wanted = needed_grads(ctx, first_weight=6)
        x_BlD, *weights = ctx.saved_tensors
        if ctx.joined:
            dy = dy[0].split([weight.shape[0] for weight in weights], -1)
        dy_TO = [part_BLO.flatten(0, 1) for part_BLO in dy]
        batch, group, size = x_BlD.shape[0], ctx.group, ctx.size
        pieces = ctx.pieces if torch.compiler.is_compiling() else 1  # a graph gathers the same once, in forward
        parts = _cut(x_BlD, 1, pieces) if any(weights_wanted) else ()
        gathering = [_start_gather(part_BsD, group, size) for part_BsD in parts]
        scattering = None
        if x_wanted:
            scattering = _start_scatter(_grad_input(dy_TO, weights, ctx.recipes), batch, group, size)
        dw: list[Tensor | None] = [None] * len(weights)
        x: Tensor | None = None
        for piece, part in enumerate(gathering):
            x = _put(x, _gathered(part, batch, size), piece, batch, size, pieces)
        if x is not None:
            x_TD = x.flatten(0, -2)
            for number, weight_OD in enumerate(weights):
                if weights_wanted[number]:
                    dw[number] = products(ctx.recipes[number]).grad_weight(dy_TO[number], x_TD).to(weight_OD.dtype)
        return None if scattering is None else _scattered(scattering, batch), None, None, None, None, None, *dw


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
    def forward(
        ctx: Any, x_BLI: Tensor, group: str, size: int, pieces: int, recipe: Recipe | None, weight_DI: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x_BLI, weight_DI)
        ctx.group, ctx.size, ctx.pieces, ctx.recipe = group, size, pieces, recipe
        batch = x_BLI.shape[0]
        multiply = _to_be_summed(weight_DI, x_BLI.dtype, recipe)
        started = [_start_scatter(multiply(part_BLI), batch, group, size) for part_BLI in _cut(x_BLI, size, pieces)]
        arrived = [_scattered(scattering, batch) for scattering in started]
        return torch.cat(arrived, 1) if pieces > 1 else arrived[0]

    @staticmethod
    def backward(ctx: Any, dy_BlD: Tensor) -> tuple[Tensor | None, ...]:
        x_wanted, weight_wanted = needed_grads(ctx, first_weight=5)
        x_BLI, weight_DI = ctx.saved_tensors
        batch, size = dy_BlD.shape[0], ctx.size
        pieces = ctx.pieces if x_wanted else 1  # the weight's gradient needs all of them
        started = [_start_gather(part_BsD, ctx.group, size) for part_BsD in _cut(dy_BlD, 1, pieces)]
        by = products(ctx.recipe)
        multiply = by.grad_input_by(weight_DI, dy_BlD.dtype) if x_wanted else None
        dx: Tensor | None = None
        dy: Tensor | None = None
        for piece, gathering in enumerate(started):
            dy_TD = _gathered(gathering, batch, size)
            if multiply is not None:
                dx = _put(dx, multiply(dy_TD), piece, batch, size, pieces)
            if weight_wanted:
                dy = _put(dy, dy_TD, piece, batch, size, pieces)
        dw_DI = None
        if dy is not None:
            dw_DI = by.grad_weight(dy.flatten(0, -2), x_BLI.flatten(0, 1)).to(weight_DI.dtype)
        return None if dx is None else dx.flatten(1, -2), None, None, None, None, dw_DI


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


def _to_be_summed(weight_DI: Tensor, dtype: torch.dtype, recipe: Recipe | None) -> Callable[[Tensor], Tensor]:
    """From ``x_BLI`` to this rank's part of a sum [T, D], as large as that, not needed once it is summed.

    ``out=`` keeps it from what selective recomputation keeps; products in FP8 are led there.
    """
    if torch.compiler.is_compiling():  # a partitioner sees what is needed
        by = products(recipe).forward_by(weight_DI, dtype)
        return lambda x_BLI: by(x_BLI.flatten(0, 1))

    def empty(x_BLI: Tensor) -> Tensor:  # every time: recomputation repeats what was done
        return x_BLI.new_empty(x_BLI.shape[0] * x_BLI.shape[1], weight_DI.shape[0])

    if SUMS_KEPT.get():
        return empty
    if recipe is None:
        weight_ID = weight_DI.to(dtype).T
        return lambda x_BLI: torch.mm(x_BLI.flatten(0, 1), weight_ID, out=empty(x_BLI))
    by = products(recipe).forward_by(weight_DI, dtype)

    def multiply(x_BLI: Tensor) -> Tensor:
        empty(x_BLI)
        with _ThroughOut() if KEEPING.get() else contextlib.nullcontext():
            return by(x_BLI.flatten(0, 1))

    return multiply


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


def _cut(x_BLD: Tensor, ranks: int, pieces: int) -> Sequence[Tensor]:
    """Of ``x_BLD``, which holds the tokens of so many ranks, the pieces [B, ranks·s, D]."""
    if pieces == 1:
        return (x_BLD,)
    return [part.flatten(1, 2) for part in x_BLD.unflatten(1, (ranks, pieces, -1)).unbind(2)]


def _put(whole: Tensor | None, part_TO: Tensor, piece: int, batch: int, ranks: int, pieces: int) -> Tensor:
    """The whole [B, ranks, pieces, s, O] with this piece's rows in place; [B, L, O] where there is one."""
    if pieces == 1:
        return _rows(part_TO, batch)
    part_BRsO = part_TO.unflatten(0, (batch, ranks, -1))
    if whole is None:
        whole = part_TO.new_empty(batch, ranks, pieces, *part_BRsO.shape[2:])
    whole[:, :, piece] = part_BRsO
    return whole


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
