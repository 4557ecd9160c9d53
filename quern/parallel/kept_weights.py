"""Weights that are cast once after each update, and gradients of weights that are added where they are summed.

Where no layout shards them, a layer casts its float32 weight at each use: forward, backward, each micro-batch; FP8
quantises it again as often. Here the weight is kept as products take it until it changes. Where nothing else has to see
a micro-batch's gradient of a weight, in one process, the product is added to the sum of gradients as it is formed
(Megatron-LM's gradient accumulation fusion): no gradient in BF16 is written, cast and added.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from quern.model.float8.linear import PLAIN, Kept, Weighted, weighted
from quern.model.float8.quantise import Quantised, largest
from quern.model.float8.torchao import Torchao
from quern.model.transformer import Linear, Transformer

__all__ = ["KeptWeights"]


class KeptWeights:
    """The matrices of a model's blocks, and its output projection, as their products take them.

    They are made anew by the first forward of the model after a change of a weight: one that its version tells, or a
    step of an optimizer. Changes through ``Parameter.data`` are not seen. A forward with gradients makes the sum of a
    weight's gradients its ``.grad``: zero if there was none, else what there was.
    """

    def __init__(
        self, model: Transformer, dtype: torch.dtype, *, add_gradients: bool, compiler: str | None, cast: bool = False
    ) -> None:
        """Of a model that has memory and whose layers have their recipes. ``dtype``: of activations; weights that have
        it are not kept, or with ``cast``, where they were cast to it for good, as they are, without a copy.
        ``compiler``: a backend of torch.compile for quantising."""
        self._dtype, self._add = dtype, add_gradients
        self._quantise = _quantise if compiler is None else _compiled(compiler)
        self.weights: list[tuple[Tensor, Kept]] = []
        """Each with what is kept of it."""
        for layer in model.blocks.modules():
            if not isinstance(layer, Linear) or isinstance(layer.recipe, Torchao):
                continue
            if cast or layer.weight.dtype != dtype:
                layer.kept = self._keep(layer.weight, weighted(layer.recipe))
        output = model.head or model.embed
        if model.norm is not None and output is not None and (cast or output.weight.dtype != dtype):
            model.output_weight = self._keep(output.weight, PLAIN)
        self._seen: list[int] = []
        if not self.weights:
            return
        model.before_forward = self.refresh
        # a fused optimizer changes weights and leaves their version what it was (torch 2.13)
        hook = register_optimizer_step_post_hook(partial(_forget, weakref.ref(self)))
        weakref.finalize(self, hook.remove)

    @property
    def bytes(self) -> int:
        """That are kept, without sums of gradients."""
        return sum(
            tensor.nbytes for _, kept in self.made for tensor in {*_tensors(kept.factor), *_tensors(kept.turned)}
        )

    @property
    def made(self) -> list[tuple[Tensor, Kept]]:
        """Those weights of which something else than themselves is kept."""
        return [(weight, kept) for weight, kept in self.weights if kept.by is not PLAIN or weight.dtype != self._dtype]

    def refresh(self) -> None:
        """Make anew what is kept of weights that have changed, and set ``.grad`` of those whose gradients are added."""
        seen = [weight._version for weight, _ in self.weights]
        if seen != self._seen:
            self.update()
            self._seen = seen
        if torch.is_grad_enabled():
            self._begin()

    @torch.no_grad()
    def update(self) -> None:
        """Make all anew."""
        plain = [(kept.factor, weight.detach()) for weight, kept in self.made if isinstance(kept.factor, Tensor)]
        if plain:
            torch._foreach_copy_([place for place, _ in plain], [weight for _, weight in plain])
        for weight, kept in self.weights:
            if isinstance(kept.factor, Quantised):
                # cast apart: in a compiled graph it would be left out, and a value rounded once in place of twice
                self._quantise(weight.detach().to(self._dtype), kept)

    def _begin(self) -> None:
        """Sums of gradients that are not ``.grad`` yet become it."""
        new: list[Tensor] = []
        for weight, kept in self.weights:
            if kept.total_OK is None or weight.grad is kept.total_OK:
                continue
            if weight.grad is None:
                new.append(kept.total_OK)
            else:
                kept.total_OK.copy_(weight.grad)
            weight.grad = kept.total_OK
        if new:
            torch._foreach_zero_(new)

    def _keep(self, weight: Tensor, by: Weighted) -> Kept:
        empty_OK = torch.zeros_like(weight, dtype=self._dtype)
        if by is PLAIN and weight.dtype == self._dtype:
            empty_OK = weight.detach()
        factor, turned = by.factor(empty_OK), by.turned(empty_OK)
        dtype = weight.grad_dtype or weight.dtype
        kept = Kept(
            by, factor, turned,
            total_OK=torch.zeros_like(weight, dtype=dtype) if self._add and weight.requires_grad else None,
            amax=torch.zeros_like(factor.scale) if by.delayed else None,
        )  # fmt: skip
        self.weights.append((weight, kept))
        return kept


def _forget(kept: weakref.ref[KeptWeights], *_: Any) -> None:
    weights = kept()
    if weights is not None:
        weights._seen = []


def _quantise(weight_OK: Tensor, kept: Kept) -> None:
    factor, turned = kept.by.factor(weight_OK), kept.by.turned(weight_OK)
    for made, place in ((factor, kept.factor), (turned, kept.turned)):
        place.data_RS.copy_(made.data_RS)
        place.scale.copy_(made.scale)
    if kept.amax is not None:
        kept.amax.copy_(largest(weight_OK, (0, 1)).squeeze())


@cache
def _compiled(backend: str) -> Callable[[Tensor, Kept], None]:
    return torch.compile(_quantise, backend=backend, dynamic=False)


def _tensors(form: Any) -> tuple[Tensor, ...]:
    return (form.data_RS, form.scale) if isinstance(form, Quantised) else (form,)
