"""What torch has in some of its versions (2.11 to 2.15) and not in others, and what quern then does.

Every difference that the model or a layout has to know stands here; the rest of the code asks by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.attention.varlen import varlen_attn
from torch.torch_version import TorchVersion

__all__ = [
    "FLOAT8_ON_CPU", "SPLIT_GRADIENTS_JOINED", "VARLEN_TAKES_GQA", "addmm_in_float32", "divide_exactly",
    "fsdp_groups", "keep_order", "set_flash_attention", "set_memory_budget",
]  # fmt: skip

FLOAT8_ON_CPU: bool = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")
"""The CPU has a kernel for products in FP8: not in 2.11, where they are emulated."""

SPLIT_GRADIENTS_JOINED: bool = TorchVersion(torch.__version__) < "2.13"
"""A split backward pass hands the gradients of a function's several outputs to the first of them, summed
(torch/distributed/pipelining/_backward.py): there several products leave as one output."""

VARLEN_TAKES_GQA: bool = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""2.11 has no ``enable_gqa``, and keys are repeated; 2.13 refuses fewer key heads without it."""


def addmm_in_float32() -> Callable[..., Tensor] | None:
    """``addmm.dtype_out``, which adds a product of half precision to float32; it has a kernel on CUDA alone, and not in
    ROCm's torch, which calls its devices ``cuda`` too."""
    found: Callable[..., Tensor] | None = getattr(torch.ops.aten.addmm, "dtype_out", None)
    return found if torch.version.cuda is not None else None


def divide_exactly() -> None:
    """Make inductor divide as eager mode does, for the process: by itself its ``x / y`` is an approximation on CUDA,
    and an FP8 value would depend on whether it was rounded in a compiled block. Without effect before 2.12."""
    import torch._inductor.config as inductor

    numerics: Any = getattr(inductor, "eager_numerics", None)
    if hasattr(numerics, "division_rounding"):
        numerics.division_rounding = True


def fsdp_groups(module: Any) -> list[Any]:
    """The groups of parameters that an FSDP2 module gathers, each by itself: one until 2.14."""
    state = module._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)
    return [group for group in (found or [state._fsdp_param_group]) if group is not None]


def keep_order() -> None:
    """Make inductor leave operations in a graph's order, for the process: by itself it puts a wait before the product
    that is to run meanwhile, where that frees memory earlier."""
    import torch._inductor.config as inductor

    inductor.reorder_for_peak_memory = False


def set_memory_budget(share: float | None) -> None:
    """Of what a compiled graph would keep for backward, how much it may keep, None = all: for the process."""
    import torch._functorch.config as functorch

    functorch.activation_memory_budget = 1.0 if share is None else share


def set_flash_attention(name: str | None) -> None:
    """For the process: whose kernels SDPA's flash backend and ``varlen_attn`` run, FA3 or FA4 of packages of their own;
    None = torch's. cuDNN's backend is off beside them: SDPA prefers it on Hopper and Blackwell, ``varlen_attn`` from
    2.15 on.

    Raises ImportError where the package is missing, RuntimeError where it lacks what torch calls.
    """
    current = attention.current_flash_attention_impl()
    if current == name:
        return
    if name is None:
        attention.restore_flash_attention_impl()
    else:
        attention.activate_flash_attention_impl(name)
    torch.backends.cuda.enable_cudnn_sdp(name is None)
