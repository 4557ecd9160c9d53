"""Quantises matrices to FP8 and back. Values are clamped before each cast: a CPU saturates, CUDA may give NaN.

A factor of a product is always held as [rows, sum]: what is summed over comes last. A scale is what an FP8 value is
multiplied with to give the original one. Shapes: R rows, S what is summed over.

What is not finite stays so: the largest magnitude of an infinity or NaN gives a scale that is neither, and with it NaN
for every value that shares it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from quern.model.float8.recipe import BLOCK

__all__ = [
    "E4M3", "E5M2", "Granularity", "Quantised", "blocks_1x128", "blocks_128x128", "cast", "largest", "rowwise",
    "scale_of", "tensorwise",
]  # fmt: skip

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Granularity = Literal["tensor", "row", "1x128", "128x128"]

#: Below this a matrix of zeros, or of next to nothing, would have a scale that is no normal number.
_TINY = 1e-30


@dataclass(frozen=True)
class Quantised:
    """A factor [R, S] in FP8, contiguous. ``scale`` [] of the whole, [R, 1] of rows, [R, S/128] or [R/128, S/128] of
    blocks; in at least float32."""

    data_RS: Tensor
    scale: Tensor

    @property
    def granularity(self) -> Granularity:
        """Which values share a scale. 1×128 with one block a row is ``row``."""
        if self.scale.ndim == 0:
            return "tensor"
        if self.scale.shape[0] != self.data_RS.shape[0]:
            return "128x128"
        return "row" if self.scale.shape[1] == 1 else "1x128"

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The values, [R, S]."""
        values_RS, scale = self.data_RS.to(dtype), self.scale.to(dtype)
        match self.granularity:
            case "tensor" | "row":
                return values_RS * scale
            case "1x128":
                return (values_RS.unflatten(1, (-1, BLOCK)) * scale[:, :, None]).flatten(1)
            case "128x128":
                values_mBnB = values_RS.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
                return (values_mBnB * scale[:, None, :, None]).view(values_RS.shape)

    @property
    def transposed(self) -> Quantised:
        """The same values [S, R], of a matrix with one scale or with square blocks."""
        assert self.granularity in ("tensor", "128x128"), "a scale along a row is of no use to a column"
        return Quantised(self.data_RS.T.contiguous(), self.scale.T.contiguous() if self.scale.ndim else self.scale)


def tensorwise(x_RS: Tensor, dtype: torch.dtype = E4M3) -> Quantised:
    """One scale for all."""
    scale = scale_of(largest(x_RS, (0, 1)).squeeze(), dtype)
    return Quantised(cast(x_RS, scale, dtype).contiguous(), scale)


def rowwise(x_RS: Tensor, dtype: torch.dtype = E4M3) -> Quantised:
    """A scale a row."""
    scale = scale_of(largest(x_RS, (1,)), dtype)
    return Quantised(cast(x_RS, scale, dtype).contiguous(), scale.contiguous())


def blocks_1x128(x_RS: Tensor, dtype: torch.dtype = E4M3) -> Quantised:
    """A scale for every 128 values of a row; S is padded with zeros up to a multiple."""
    x_RnB = F.pad(x_RS, (0, -x_RS.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    scale = scale_of(largest(x_RnB, (2,)), dtype)
    return Quantised(cast(x_RnB, scale, dtype).flatten(1).contiguous(), scale.squeeze(2).contiguous())


def blocks_128x128(x_RS: Tensor, dtype: torch.dtype = E4M3) -> Quantised:
    """A scale for every square of 128×128; R and S are multiples."""
    x_mBnB = x_RS.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = scale_of(largest(x_mBnB, (1, 3)), dtype)
    data_RS = cast(x_mBnB, scale, dtype).contiguous().view(x_RS.shape)
    return Quantised(data_RS, scale[:, 0, :, 0].contiguous())


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """What the largest magnitude, in at least float32, is divided by to become the format's largest number."""
    return amax.clamp(min=_TINY) / torch.finfo(dtype).max


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x / scale`` in FP8, rounded once, clamped to the format's finite numbers; NaN stays NaN."""
    most = torch.finfo(dtype).max
    return (_wide(x) / scale).clamp(-most, most).to(dtype)


def largest(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The largest magnitudes along ``dims``, which stay with size 1; 0 of nothing."""
    if x.numel() == 0:
        return _wide(x.new_zeros([1 if dim in dims else size for dim, size in enumerate(x.shape)]))
    return _wide(x.abs().amax(dims, keepdim=True))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
