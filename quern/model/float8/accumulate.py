"""Adds a matrix product of half precision to a sum in float32, on CUDA in one kernel.

Shapes: R and S the sum's, T what is summed over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from quern.torch_versions import addmm_in_float32

__all__ = ["add_product"]


def add_product(total_RS: Tensor, a_TR: Tensor, b_TS: Tensor) -> None:
    """``total += aᵀ b``, in place; ``total`` in at least the dtype of the factors.

    On CUDA a product of BF16 or FP16 is added in float32 as it leaves the multiplier. Elsewhere it
    is rounded to the factors' dtype, written and read again.
    """
    if total_RS.dtype == a_TR.dtype:
        torch.addmm(total_RS, a_TR.T, b_TS, out=total_RS)  # not addmm_, which torch's FLOP counter overlooks
    elif torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():  # a graph, or a counter, looks on
        _add_product(total_RS, a_TR, b_TS)
    else:  # an operation of one's own costs the host 50 µs
        _add(total_RS, a_TR, b_TS)


@torch.library.custom_op("quern::add_product", mutates_args=("total_RS",))
def _add_product(total_RS: Tensor, a_TR: Tensor, b_TS: Tensor) -> None:
    _add(total_RS, a_TR, b_TS)


def _add(total_RS: Tensor, a_TR: Tensor, b_TS: Tensor) -> None:
    kernel = addmm_in_float32()
    if total_RS.is_cuda and total_RS.dtype == torch.float32 and kernel is not None:
        kernel(total_RS, a_TR.T, b_TS, torch.float32, out=total_RS)
    else:
        total_RS += a_TR.T @ b_TS


@register_flop_formula(torch.ops.quern.add_product)  # of addmm.dtype_out torch's counter fails
def _flops(total: Any, a: Any, b: Any, *_args: Any, **_kwargs: Any) -> int:
    return int(2 * a[0] * a[1] * b[1])
