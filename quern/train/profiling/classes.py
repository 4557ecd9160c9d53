"""Classifies an operation or kernel by its name and its callers. Imports no torch.

Names are those of ATen's operators, of cuBLAS, CUTLASS, cuDNN, FlashAttention and NCCL kernels, and of inductor's
``triton_*``. What an operation was called from decides before its own name: a copy inside a product is the product's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

__all__ = [
    "ATTENTION", "CLASSES", "COMMUNICATION", "COMPUTE", "DATA", "ELEMENTWISE", "GEMM", "HOST", "IDLE", "LOSS",
    "MARK_DATA", "MARK_UPDATE", "OPTIMIZER", "WAITING", "collective", "is_product", "kernel_class", "operation_class",
    "waits_for_device",
]  # fmt: skip

GEMM, ATTENTION, LOSS, OPTIMIZER, ELEMENTWISE = "gemm", "attention", "loss", "optimizer", "elementwise"
COMMUNICATION, DATA, HOST, IDLE = "communication", "data", "host", "idle"

COMPUTE = (GEMM, ATTENTION, LOSS, OPTIMIZER, ELEMENTWISE)
CLASSES = (*COMPUTE, COMMUNICATION, DATA, HOST, IDLE)
"""Every instant of a step belongs to one of them: the first of those that are under way."""

MARK_DATA, MARK_UPDATE = "quern::data", "quern::update"
"""Annotations of a traced step: the loop takes its batch; gradients are clipped and weights updated."""

WAITING = "waiting"
"""A call in which the host stands still for a collective that the trace shows nowhere."""

_PRODUCTS = re.compile(
    r"aten::(mm|addmm|bmm|baddbmm|mv|addmv|_scaled_mm|_scaled_mm_v2|_grouped_mm|_scaled_grouped_mm(_v2)?|_int_mm)$"
    r"|mkldnn::_linear_pointwise"
)
_ATTENTION = re.compile(
    r"scaled_dot_product|flash_attn|flash_attention|efficient_attention|cudnn_attention|flex_attention|varlen_attn"
)
_LOSS = re.compile(r"cross_?entropy|nll_loss|log_softmax|NllLoss|LogSoftmax", re.IGNORECASE)
_UPDATE = re.compile(rf"Optimizer\.step|_fused_adam|{MARK_UPDATE}")
_COLLECTIVE_CALL = re.compile(r"c10d::|_c10d_functional(_autograd)?::|symm_mem::|record_param_comms|nccl:")
_COMPILED = re.compile(r"triton_|cpp_fused|## Call CompiledFxGraph")

#: Operators that move no data: the host's work, wherever the data lie.
_SHAPES_ONLY = frozenset(
    "aten::" + name
    for name in (
        "alias", "as_strided", "as_strided_", "broadcast_to", "chunk", "contiguous", "detach", "detach_", "empty",
        "empty_like", "empty_strided", "expand", "expand_as", "flatten", "is_nonzero", "item", "lift_fresh", "linear",
        "_local_scalar_dense", "matmul", "narrow", "new_empty", "new_empty_strided", "numpy_T", "permute", "pin_memory",
        "is_pinned", "requires_grad_", "reshape", "_reshape_alias", "resize_", "resolve_conj", "resolve_neg",
        "result_type", "select", "set_", "slice", "split", "split_with_sizes", "squeeze", "swapdims", "swapaxes", "t",
        "to", "transpose", "type_as", "unbind", "unflatten", "unsafe_split", "unsqueeze", "_unsafe_view", "view",
        "view_as",
    )
)  # fmt: skip

_GEMM_KERNEL = re.compile(
    r"gemm|nvjet|cublas|xmma|wgmma|s16816|splitK|split_k|triton_tem_fused_(?!.*(flex|attention))|triton_mm|triton_bmm"
    r"|cutlass(?!.*(fmha|attention|Attention))",
    re.IGNORECASE,
)
_ATTENTION_KERNEL = re.compile(r"flash|fmha|sdpa|flex_attention|fused_attention|varlen_attn", re.IGNORECASE)
_OPTIMIZER_KERNEL = re.compile(r"fused_?adam|AdamFunctor|FusedAdam|FusedOptimizer", re.IGNORECASE)
_LOSS_KERNEL = re.compile(r"nll_loss|log_?softmax|cross_?entropy", re.IGNORECASE)
_COMMUNICATION_KERNEL = re.compile(r"nccl|rccl|Memcpy PtoP|multimem_|(one|two)_shot_all_reduce|^gloo:", re.IGNORECASE)

_COLLECTIVES = (
    ("all-gather", re.compile("all_?gather", re.IGNORECASE)),
    ("reduce-scatter", re.compile("reduce_?scatter", re.IGNORECASE)),
    ("all-reduce", re.compile("all_?reduce", re.IGNORECASE)),
    ("all-to-all", re.compile("all_?to_?all", re.IGNORECASE)),
    ("send and receive", re.compile("send|recv", re.IGNORECASE)),
    ("broadcast", re.compile("broadcast", re.IGNORECASE)),
    ("copies between devices", re.compile("PtoP")),
)
_OF_SENDS = (("all-to-all", re.compile("all_?to_?all")), ("ring of cp", re.compile("quern::context_attention")))
"""NCCL makes an all-to-all of sends, and keys go round by them: what called them tells."""

#: Calls of the runtime in which the host waits for the device.
_WAITS = re.compile("(cuda|hip|cu)(Device|Stream|Event|Ctx)Synchronize")


def is_product(name: str) -> bool:
    """Whether an operator is a product of matrices."""
    return _PRODUCTS.match(name) is not None


@lru_cache(maxsize=1 << 16)
def operation_class(chain: tuple[str, ...]) -> str:
    """The class of a host operation, by its name and its callers, the outermost last."""
    name = chain[0]
    if any(_COLLECTIVE_CALL.match(each) for each in chain):
        return COMMUNICATION
    if any(_ATTENTION.search(each) and _operator(each) for each in chain):
        return ATTENTION
    if any(is_product(each) for each in chain):
        return GEMM
    if not _computes(name):
        return HOST
    if any(_LOSS.search(each) for each in chain):
        return LOSS
    if any(_UPDATE.match(each) for each in chain):
        return OPTIMIZER
    return ELEMENTWISE


@lru_cache(maxsize=1 << 16)
def kernel_class(name: str, chain: tuple[str, ...]) -> str:
    """The class of a kernel, by the operations that launched it, the innermost first (none: not in the trace)."""
    if _COMMUNICATION_KERNEL.search(name):
        return COMMUNICATION
    if _ATTENTION_KERNEL.search(name):
        return ATTENTION
    called = operation_class(("aten::kernel", *chain))
    if called in (ATTENTION, GEMM, LOSS, OPTIMIZER):
        return called
    for pattern, kind in ((_GEMM_KERNEL, GEMM), (_OPTIMIZER_KERNEL, OPTIMIZER), (_LOSS_KERNEL, LOSS)):
        if pattern.search(name):
            return kind
    return ELEMENTWISE


def collective(name: str, chain: Sequence[str] = ()) -> str:
    """Which collective an NCCL kernel or a gloo span is, by its name and the operations that it was called from."""
    found = next((kind for kind, pattern in _COLLECTIVES if pattern.search(name)), WAITING)
    if found != "send and receive":
        return found
    return next((kind for kind, pattern in _OF_SENDS if any(map(pattern.search, chain))), found)


def waits_for_device(name: str) -> bool:
    """Whether this runtime call blocks the host until the device has reached some point."""
    return _WAITS.match(name) is not None


def _computes(name: str) -> bool:
    """Whether it touches data: an operator, or what inductor made of several; no node, view or annotation."""
    return (_operator(name) and name not in _SHAPES_ONLY) or _COMPILED.match(name) is not None


def _operator(name: str) -> bool:
    """Whether it is an operator's name; annotations, autograd's nodes and calls of the runtime are not."""
    return re.match(r"(?!autograd::|torch::autograd::|quern::)[a-z]\w*::", name) is not None
