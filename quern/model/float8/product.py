"""The product of two FP8 factors, by a kernel where there is one, else by the same arithmetic in float32.

Which kernel takes what, and how it wants its scales, stands here and nowhere else. Of CUDA's it is written by torch's
own checks (``torch/_meta_registrations.py``, ``_check_scaled_mm_sizes_v2``) and has not been run on a GPU.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from quern.model.float8.quantise import Granularity, Quantised
from quern.model.float8.recipe import Recipe, Scaling
from quern.torch_versions import FLOAT8_ON_CPU

__all__ = ["ALIGNMENT", "available", "emulated", "multiply"]

ALIGNMENT = 16
"""Every size of a kernel's factors is a multiple of this; what is not is padded with zeros."""

_OUTPUTS: dict[Scaling, tuple[torch.dtype, ...]] = {
    "tensorwise": (torch.bfloat16, torch.float16, torch.float32),
    "rowwise": (torch.bfloat16,),
    "blockwise": (torch.bfloat16, torch.float32),
}
"""Of CUDA's kernels."""

_KERNELS: dict[tuple[Granularity, Granularity], tuple[Scaling, ScalingType, ScalingType]] = {
    ("tensor", "tensor"): ("tensorwise", ScalingType.TensorWise, ScalingType.TensorWise),
    ("row", "row"): ("rowwise", ScalingType.RowWise, ScalingType.RowWise),
    ("1x128", "1x128"): ("blockwise", ScalingType.BlockWise1x128, ScalingType.BlockWise1x128),
    ("1x128", "128x128"): ("blockwise", ScalingType.BlockWise1x128, ScalingType.BlockWise128x128),
    ("row", "128x128"): ("blockwise", ScalingType.BlockWise1x128, ScalingType.BlockWise128x128),
}


def available(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products by a recipe, with results of a dtype, run by a kernel of the device; else they are emulated.

    NVIDIA GPUs from Ada Lovelace (8.9) on have one for ``tensorwise`` and, with bfloat16, ``rowwise``; Hopper (9.0) for
    ``blockwise`` with CUDA 12.9 or newer.
    """
    return _available(recipe.scaling, device, dtype)


def multiply(a_MS: Quantised, b_NS: Quantised, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """``a bᵀ`` [M, N] as ``dtype``. ``fast``: sums may be kept in the tensor cores' own precision (a forward's)."""
    kernel = _KERNELS.get((a_MS.granularity, b_NS.granularity))
    empty = a_MS.data_RS.numel() == 0 or b_NS.data_RS.numel() == 0
    device = a_MS.data_RS.device
    with nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False):
        if kernel is None or empty or not _available(kernel[0], device, dtype):
            return emulated(a_MS, b_NS, dtype)
        return _by_kernel(a_MS, b_NS, kernel, dtype, fast)


def emulated(a_MS: Quantised, b_NS: Quantised, dtype: torch.dtype) -> Tensor:
    """The same of the values that the FP8 numbers stand for, summed in at least float32."""
    wide = torch.promote_types(dtype, torch.float32)
    return (a_MS.dequantised(wide) @ b_NS.dequantised(wide).T).to(dtype)


def _available(scaling: Scaling, device: torch.device, dtype: torch.dtype) -> bool:
    if device.type == "cpu":
        return FLOAT8_ON_CPU and scaling != "blockwise" and dtype in _OUTPUTS["tensorwise"]
    if device.type != "cuda" or torch.version.cuda is None or dtype not in _OUTPUTS[scaling]:
        return False
    gpu = torch.cuda.get_device_properties(device)
    if scaling == "blockwise":
        return (gpu.major, gpu.minor) == (9, 0) and _version(torch.version.cuda) >= (12, 9)
    return (gpu.major, gpu.minor) >= (8, 9)


def _by_kernel(
    a_MS: Quantised, b_NS: Quantised, kernel: tuple[Scaling, ScalingType, ScalingType], dtype: torch.dtype, fast: bool
) -> Tensor:
    scaling, kind_a, kind_b = kernel
    num_rows, num_columns = a_MS.data_RS.shape[0], b_NS.data_RS.shape[0]
    a_MS, b_NS = _aligned(a_MS), _aligned(b_NS)
    data, scales = (a_MS.data_RS, b_NS.data_RS), (a_MS.scale, b_NS.scale)
    if scaling == "blockwise" and torch.compiler.is_compiling():
        out_MN: Tensor = _blockwise(*data, *scales, kind_b is ScalingType.BlockWise128x128, dtype)
    else:
        out_MN = _scaled_mm(*data, *scales, kind_a, kind_b, dtype, fast and scaling != "blockwise")
    return out_MN[:num_rows, :num_columns]


def _scaled_mm(
    a_MK: Tensor, b_NK: Tensor, scale_a: Tensor, scale_b: Tensor, kind_a: ScalingType, kind_b: ScalingType,
    dtype: torch.dtype, fast: bool,
) -> Tensor:  # fmt: skip
    scale_b = _laid_out(scale_b, kind_b)
    scale_b = scale_b.T if kind_b is ScalingType.RowWise else scale_b
    return F.scaled_mm(
        a_MK, b_NK.T, _laid_out(scale_a, kind_a), kind_a, scale_b, kind_b, output_dtype=dtype, use_fast_accum=fast
    )


@torch.library.custom_op("quern::blockwise_scaled_mm", mutates_args=())
def _blockwise(
    a_MK: Tensor, b_NK: Tensor, scale_a: Tensor, scale_b: Tensor, square: bool, dtype: torch.dtype
) -> Tensor:
    """An operation that inductor does not look into: torch 2.13's makes of this product an older one, which reads the
    scales of 1×128 blocks transposed, and refuses them (pytorch/pytorch#188996)."""
    kind_b = ScalingType.BlockWise128x128 if square else ScalingType.BlockWise1x128
    return _scaled_mm(a_MK, b_NK, scale_a, scale_b, ScalingType.BlockWise1x128, kind_b, dtype, fast=False)


@_blockwise.register_fake
def _(a_MK: Tensor, b_NK: Tensor, scale_a: Tensor, scale_b: Tensor, square: bool, dtype: torch.dtype) -> Tensor:
    return a_MK.new_empty(a_MK.shape[0], b_NK.shape[0], dtype=dtype)


def _aligned(factor_RS: Quantised) -> Quantised:
    rows, columns = (-size % ALIGNMENT for size in factor_RS.data_RS.shape)
    if not rows and not columns:
        return factor_RS
    data_RS, scale = factor_RS.data_RS, factor_RS.scale
    padded = F.pad(data_RS.view(torch.uint8), (0, columns, 0, rows)).view(data_RS.dtype)  # not every device pads FP8
    return Quantised(padded, scale if factor_RS.granularity == "tensor" else F.pad(scale, (0, 0, 0, rows), value=1.0))


def _laid_out(scale: Tensor, kind: ScalingType) -> Tensor:
    """As the kernel reads it: of 1×128 blocks [rows, blocks] with rows side by side in memory, of 128×128 blocks
    [blocks along the sum, blocks of rows] with the former side by side, their number a multiple of 4."""
    if kind is ScalingType.BlockWise1x128:
        return scale.T.contiguous().T
    if kind is ScalingType.BlockWise128x128:
        return F.pad(scale, (0, -scale.shape[1] % 4), value=1.0).contiguous().T
    return scale


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
