"""Lets FSDP2 gather weights in FP8: one byte per value, used in the products without a further cast.

Each rank quantises its rows with scales of the WHOLE weight, so that what arrives has the bits that a weight gathered
in the dtype of activations and then quantised would have. The scales come from the masters, once after each update:
one maximum over the ranks of all weights together.

FSDP2 asks the local tensor of a sharded parameter for ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py). Both are set on the tensor itself: optimizer and checkpoints see
a plain one.

Shapes: R rows and C columns of a weight as a rank of tp has it, r this rank's share of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quern.model.float8.quantise import E4M3, cast, scale_of
from quern.model.float8.recipe import BLOCK, Recipe
from quern.model.float8.weight import Float8Weight
from quern.model.transformer import Linear, Transformer
from quern.parallel.planning.float8 import gathered
from quern.parallel.planning.mesh import Mesh

__all__ = ["Float8Gather"]


@dataclass(frozen=True, eq=False)
class _Rows:
    """This rank's rows of a weight; its methods become attributes of the local tensor, which FSDP2 calls."""

    local_rC: Tensor
    first: int
    padded: int
    """Rows of the first rank, which has the most."""
    total: int
    compute_dtype: torch.dtype
    amax: Tensor
    """[] or [R/128, C/128]: of the whole weight, once the ranks' are put together."""
    scale: Tensor
    """The same size; the values that hold until the next update."""
    cast: Callable[[Tensor, Tensor, torch.dtype], Tensor] = cast
    """:func:`quern.model.float8.quantise.cast`, or compiled, which reads and writes each number once."""

    @property
    def blockwise(self) -> bool:
        return self.scale.ndim == 2

    def measure(self) -> None:
        """Fill ``amax`` with what these rows say; 0 where they say nothing. Of masters: rounding keeps the order, so
        the largest is rounded alone."""
        self.amax.zero_()
        if not self.local_rC.numel():
            return
        if not self.blockwise:
            self.amax.copy_(torch.linalg.vector_norm(self.local_rC, torch.inf).to(self.compute_dtype))
            return
        lead, rows = self.first % BLOCK, self.local_rC.shape[0]
        x_rC = F.pad(self.local_rC, (0, 0, lead, -(lead + rows) % BLOCK))
        amax_mn = x_rC.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).abs().amax((1, 3))
        self.amax.narrow(0, self.first // BLOCK, len(amax_mn)).copy_(amax_mn.to(self.compute_dtype))

    def send(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor], None]:
        """These rows in FP8, padded, as bytes, which every backend can send."""
        x_rC, scale = self.local_rC.to(self.compute_dtype), self.scale
        if self.blockwise:
            lead, rows = self.first % BLOCK, self.local_rC.shape[0]
            scale_mn = scale.narrow(0, self.first // BLOCK, -(-(lead + rows) // BLOCK))
            scale_rn1 = scale_mn[:, None].expand(-1, BLOCK, -1).flatten(0, 1)[lead : lead + rows, :, None]
            data_rC = self.cast(x_rC.unflatten(1, (-1, BLOCK)), scale_rn1, E4M3).flatten(1)
        else:
            data_rC = self.cast(x_rC, scale, E4M3)
        return (F.pad(data_rC.view(torch.uint8), (0, 0, 0, self.padded - len(data_rC))),), None

    def receive(
        self, arrived: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The weight in the memory of what has arrived; None where ``out`` is that weight already."""
        if out is not None:
            return None
        return Float8Weight(arrived[0][: self.total].view(E4M3), self.scale, dtype), ()


class Float8Gather:
    """The weights of a model's parts that FSDP2 gathers in FP8, and their scales."""

    def __init__(
        self,
        parts: Iterable[Transformer],
        recipe: Recipe,
        mesh: Mesh,
        compute_dtype: torch.dtype,
        compiler: str | None = None,
    ) -> None:
        """Of parts that are sharded and have memory. ``compiler``: a backend of torch.compile for quantising."""
        assert mesh.device_mesh is not None
        self._group = mesh.device_mesh.get_group("dp_shard")
        weights = [
            (_local(block.get_submodule(name)), rows, size)
            for part in parts
            for block in part.blocks.values()
            for name, ((rows, _), size) in gathered(part.shape, mesh.plan.tp, recipe).items()
        ]
        counts = [math.prod(size) for _, _, size in weights]
        wide = torch.promote_types(compute_dtype, torch.float32)
        self._amax = torch.zeros(sum(counts), dtype=wide, device=weights[0][0].device)
        self._scale = torch.full_like(self._amax, torch.nan)  # until the first update
        how = cast if compiler is None else torch.compile(cast, backend=compiler, dynamic=False)
        self._rows = []
        for (local_rC, total, size), amax, scale in zip(
            weights, self._amax.split(counts), self._scale.split(counts), strict=True
        ):
            padded = -(-total // mesh.plan.shards)
            first = min(padded * mesh.shard, total)
            rows = _Rows(local_rC, first, padded, total, compute_dtype, amax.view(size), scale.view(size), how)
            local_rC.fsdp_pre_all_gather = rows.send  # type: ignore[attr-defined]
            local_rC.fsdp_post_all_gather = rows.receive  # type: ignore[attr-defined]
            self._rows.append(rows)

    @torch.no_grad()
    def update(self) -> None:
        """Compute the scales of the present weights. After each change of them. Collective."""
        for rows in self._rows:
            rows.measure()
        # as integers: they have the order of the numbers, which are not negative, and NaN is above them all once it
        # has no sign either, which casts may give it
        self._amax.abs_()
        whole = self._amax.view(torch.int64 if self._amax.dtype == torch.float64 else torch.int32)
        dist.all_reduce(whole, dist.ReduceOp.MAX, group=self._group)
        self._scale.copy_(scale_of(self._amax, E4M3))


def _local(linear: nn.Module) -> Tensor:
    """The very tensor that FSDP2 asks; what ``to_local`` gives of a parameter is another one around the same memory."""
    assert isinstance(linear, Linear)
    assert isinstance(linear.weight, DTensor)
    return linear.weight._local_tensor
