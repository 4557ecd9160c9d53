"""From matrices to FP8 and back. Every cast is clamped first: the CPU's casts saturate, CUDA's may give NaN.

A factor of a product is always held as [rows, sum]: what is summed over comes last. A scale is what an FP8 value is
multiplied with to give the original one. Shapes: R rows, S what is summed over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quern.model.float8.recipe import BLOCK

__all__ = ["E4M3", "E5M2", "Quantised", "blocks_1x128", "blocks_128x128", "rowwise", "tensorwise"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

#: Below this a matrix of zeros, or of next to nothing, would have a scale that is no normal number.
_TINY = 1e-30


@dataclass(frozen=True)
class Quantised:
    """A factor [R, S] in FP8. ``scale`` [] of the whole, [R, 1] of rows, [R, S/128] or [R/128, S/128] of blocks; in at
    least float32."""

    data_RS: Tensor
    scale: Tensor

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The values, [R, S]."""
        scale = self.scale.to(dtype)
        if (scale.ndim == 2 and scale.shape[1] != 1) or scale.shape[:1] not in ((), self.data_RS.shape[:1]):
            rows = self.data_RS.shape[0] // scale.shape[0]
            columns = self.data_RS.shape[1] // scale.shape[1]
            scale = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return self.data_RS.to(dtype) * scale

    @property
    def transposed(self) -> Quantised:
        """The same values [S, R], of a matrix with one scale or with square blocks."""
        return Quantised(self.data_RS.T.contiguous(), self.scale.T.contiguous() if self.scale.ndim else self.scale)


def tensorwise(x_RS: Tensor, dtype: torch.dtype = E4M3) -> Quantised:
    """One scale for all."""
    scale = _scale(_wide(x_RS).abs().amax(), dtype)
    return Quantised(_cast(x_RS, scale, dtype), scale)


def rowwise(x_RS: Tensor, dtype: torch.dtype = E4M3) -> Quantised:
    """A scale a row."""
    scale = _scale(_wide(x_RS).abs().amax(1, keepdim=True), dtype)
    return Quantised(_cast(x_RS, scale, dtype), scale)


def blocks_1x128(x_RS: Tensor, dtype: torch.dtype = E4M3) -> Quantised:
    """A scale for every 128 values of a row; S is padded with zeros up to a multiple."""
    x_RS = F.pad(x_RS, (0, -x_RS.shape[1] % BLOCK))
    x_RnB = x_RS.unflatten(1, (-1, BLOCK))
    scale = _scale(_wide(x_RnB).abs().amax(2, keepdim=True), dtype)
    return Quantised(_cast(x_RnB, scale, dtype).flatten(1), scale.squeeze(2))


def blocks_128x128(x_RS: Tensor, dtype: torch.dtype = E4M3) -> Quantised:
    """A scale for every square of 128×128; R and S are multiples."""
    x_mBnB = x_RS.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = _scale(_wide(x_mBnB).abs().amax((1, 3), keepdim=True), dtype)
    return Quantised(_cast(x_mBnB, scale, dtype).view(x_RS.shape), scale[:, 0, :, 0].contiguous())


def _scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    return amax.clamp(min=_TINY) / torch.finfo(dtype).max


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return (_wide(x) / scale).clamp(-most, most).to(dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
