"""A product of two factors in FP8: by a kernel where there is one, else by the same arithmetic in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from quern.model.float8.quantise import Quantised

__all__ = ["emulated", "multiply"]


def multiply(a_MS: Quantised, b_NS: Quantised, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """``a bᵀ`` [M, N] as ``dtype``. ``fast``: sums may be kept in the tensor cores' own precision (a forward's)."""
    kind = _kernel(a_MS, b_NS, dtype)
    if kind is None:
        return emulated(a_MS, b_NS, dtype)
    scale_b = b_NS.scale if kind is ScalingType.TensorWise else b_NS.scale.T.contiguous()
    return F.scaled_mm(
        a_MS.data_RS, b_NS.data_RS.T, a_MS.scale, kind, scale_b, kind, output_dtype=dtype, use_fast_accum=fast
    )


def emulated(a_MS: Quantised, b_NS: Quantised, dtype: torch.dtype) -> Tensor:
    """The same of the values that the FP8 numbers stand for, summed in at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    return (a_MS.dequantised(wide) @ b_NS.dequantised(wide).T).to(dtype)


def _kernel(a_MS: Quantised, b_NS: Quantised, dtype: torch.dtype) -> ScalingType | None:
    """Of which kind the kernel is; None: there is none for these on their device."""
    if dtype not in (torch.bfloat16, torch.float32) or any(size % 16 for size in a_MS.data_RS.shape):
        return None
    if a_MS.scale.ndim == 0 and b_NS.scale.ndim == 0:
        return ScalingType.TensorWise
    if a_MS.scale.shape[1:] == (1,) and b_NS.scale.shape[1:] == (1,):
        return ScalingType.RowWise
    return None
