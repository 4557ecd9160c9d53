"""Checks the implementation of attention before a run begins, and puts FlashAttention 3 or 4 in place of torch's flash
kernels. **Unverified on GPU.**"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from quern.errors import InputError
from quern.model.attention import Documents, attend, attention_mask
from quern.model.config import ModelShape
from quern.parallel.context import kernels
from quern.torch_versions import set_flash_attention
from quern.train.config import TrainConfig
from quern.train.step.precision import Precision

__all__ = ["HALF", "check_attention", "check_flash", "use_flash"]

HALF = (torch.bfloat16, torch.float16)

#: Major compute capabilities that torch/nn/attention/_fa3.py and _fa4.py take, and what they import.
_KERNELS = {
    "fa3": ((9,), "flash_attn_interface (python setup.py install in hopper/ of github.com/Dao-AILab/flash-attention)"),
    "fa4": ((9, 10), "flash_attn.cute (pip install flash-attn-4)"),
}


def check_attention(config: TrainConfig, precision: Precision, device: str) -> None:
    """Check that ``attention`` runs with the rest of the config. ``device``: auto, if it is not known yet.

    Raises:
        InputError: it does not; with what would.
    """
    backend = config.attention
    if backend not in ("auto", "sdpa") and device == "cpu":
        raise InputError(f"attention: {backend} runs on CUDA only; expected auto or sdpa on cpu")
    if config.parallel.context.shards > 1:
        _check_shards(config, precision, device)
        return
    masked = config.document_mask and precision.compute in HALF
    if backend == "sdpa" and device == "cuda" and masked and config.seq_len % 128 == 64:
        raise InputError(  # of cuDNN's backward: pytorch/pytorch#196678
            f"attention: sdpa with document_mask gives gradients of NaN on CUDA where seq_len % 128 is 64, as of "
            f"{config.seq_len}; expected auto, varlen or flex"
        )
    if backend == "varlen" and config.document_mask and precision.compute not in HALF:
        raise InputError(f"attention: varlen computes in bf16 or fp16; expected auto, sdpa or flex in {precision.name}")


def _check_shards(config: TrainConfig, precision: Precision, device: str) -> None:
    """Attention over keys of several ranks has kernels of its own."""
    method, head_dim = config.parallel.cp_method, config.model.shape(1).head_dim
    if config.attention != "auto":
        raise InputError(
            f"attention: {config.attention} attends to keys of one rank alone; expected auto with cp_method {method}, "
            "or cp_method ulysses"
        )
    if device != "cpu" and precision.compute in HALF and (head_dim % 8 or head_dim > 256):
        raise InputError(
            f"model.head_dim: flash kernels, which cp_method {method} runs in {precision.name}, expect 8, 16, … 256, "
            f"got {head_dim}; or cp_method ulysses"
        )


def check_flash(config: TrainConfig, shape: ModelShape, precision: Precision, device: str) -> None:
    """Check what needs no GPU. ``device``: auto, if it is not known yet.

    Raises:
        InputError: naming the field, what it is and what would fit.
    """
    which, head_dim = config.flash_attention, shape.head_dim
    if which == "default":
        return
    if device == "cpu":
        raise InputError(f"flash_attention: {which} runs on CUDA only; expected default on cpu")
    if precision.compute not in HALF:
        raise InputError(f"flash_attention: {which} computes in bf16 or fp16; expected default in {precision.name}")
    if config.attention == "flex" or (config.attention == "sdpa" and config.document_mask):
        why = "has kernels of its own" if config.attention == "flex" else "masks documents, and flash kernels no mask"
        raise InputError(f"attention: {config.attention} {why}; expected auto or varlen with flash_attention {which}")
    if head_dim % 8 or head_dim > 256:
        raise InputError(f"flash_attention: {which} expects a head_dim of 8, 16, … 256, got {head_dim}")
    if which == "fa3" and config.deterministic and head_dim > 192:
        raise InputError(
            f"deterministic: fa3 has no such backward for a head_dim above 192, got {head_dim}; expected false, or "
            "flash_attention default"
        )


def use_flash(config: TrainConfig, shape: ModelShape, precision: Precision, backend: str, device: torch.device) -> None:
    """Let attention run by ``config.flash_attention``, for the process; ``backend``: the model's implementation. What
    is not ``default`` is tried, forward and backward, on the model's heads: a package may lack what this GPU, these
    sizes or this version of torch need.

    Raises:
        InputError: the GPU does not fit, the package is missing, or the trial failed.
    """
    which = config.flash_attention
    if which == "default":
        set_flash_attention(None)
        return
    majors, package = _KERNELS[which]
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.cuda is None or major not in majors:
        raise InputError(
            f"flash_attention: {which} is for GPUs of NVIDIA's compute capability {' and '.join(map(str, majors))}, "
            f"got {major}.{minor} ({torch.cuda.get_device_name(device)}); expected default"
        )
    try:
        set_flash_attention(which.upper())
    except (ImportError, RuntimeError) as error:
        raise InputError(f"flash_attention: {which} needs the package {package}, and here: {error}") from error
    try:
        shared, own = config.parallel.context.shards > 1, backend if config.document_mask else "sdpa"
        _try_out(shape, precision.compute, "stretches" if shared else own, device)
    except Exception as error:  # kernels and their compilers raise anything
        set_flash_attention(None)
        raise InputError(
            f"flash_attention: {which} fails with {shape.num_heads} heads of {shape.head_dim} and {shape.num_kv_heads} "
            f"of keys in {precision.name}: {type(error).__name__}: {error}; expected default, or another version of "
            f"the package {package}"
        ) from error


def _try_out(shape: ModelShape, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """``sdpa`` without documents, ``varlen`` with two of them, or two ``stretches`` of queries that are fewer than
    their keys, as context parallelism has them."""
    q, k, v = (
        torch.zeros(1, 256, heads, shape.head_dim, dtype=dtype, device=device, requires_grad=True)
        for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    ids, starts = torch.zeros(1, 256, dtype=torch.int32), torch.tensor([0, 100, 256], dtype=torch.int32).to(device)
    found: list[torch.Tensor] = []
    for causal in (True, False) if backend == "stretches" else ():
        by = kernels.Stretches(starts // 2, starts, (78, 156), causal)
        with torch.no_grad():
            out, lse = kernels.forward(q[0, :128], k[0], v[0], by)
            found += out, *kernels.backward(torch.zeros_like(out), q[0, :128], k[0], v[0], out, lse, by)
    if not found:
        documents = Documents(ids.to(device), starts, 156) if backend == "varlen" else None
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # else another is taken where this one does not fit
            out = attend(q, k, v, attention_mask(backend, documents, device))
            found += out, *torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    if not all(bool(part.isfinite().all()) for part in found):
        raise RuntimeError("numbers that are not finite")
