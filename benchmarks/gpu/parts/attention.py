"""Attention by each implementation: beside a dense softmax in float64, and its speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from parts import SkipError
from parts.common import distance, gpu, greatest, seconds_of, shape_of, sized
from quern.model.attention import Documents, attend, attention_mask
from quern.model.config import ModelShape
from quern.torch_versions import set_flash_attention

#: Norm of the difference over the norm of the result, at most. Half precision rounds the softmax's weights before they
#: are multiplied: 2⁻⁹ and 2⁻¹² of each number. Products in TF32 would be beyond float32's.
BOUNDS = {"float64": 1e-12, "float32": 1e-4, "float16": 4e-3, "bfloat16": 2e-2}
NAMES = ("out", "grad q", "grad k", "grad v")


def agreement(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Result and gradients of ``backend`` in ``dtype``, causal and within documents, beside float64; with ``flash`` by
    these kernels."""
    try:
        with flash(spec.get("flash")):
            return list(_agreement(spec))
    except ImportError as error:
        raise SkipError(f"not installed: {error}") from error
    except RuntimeError as error:
        if "compute capability" in str(error):  # the kernels are not for this GPU
            raise SkipError(str(error)) from error
        raise


def _agreement(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    shape, device, dtype = shape_of(spec), gpu(spec), getattr(torch, spec["dtype"])
    inputs = heads(shape, spec["batch"], spec["length"], dtype, device)
    for masked in (True, False):
        rows = cut(spec["batch"], spec["length"]) if masked else [[spec["length"]]] * spec["batch"]
        documents = documents_of(rows, device) if masked else None
        mask = attention_mask(spec["backend"], documents, device)
        ours = gradients(lambda q, k, v, mask=mask: attend(q, k, v, mask), *inputs)
        allowed = allowed_of(rows, device)
        exact = gradients(lambda q, k, v, allowed=allowed: dense(q, k, v, allowed), *(x.double() for x in inputs))
        for name, value, expected in zip(NAMES, ours, exact, strict=True):
            error, bound = distance(value, expected), BOUNDS[spec["dtype"]]
            yield {
                "backend": spec.get("flash") or spec["backend"], "dtype": spec["dtype"], "documents": masked,
                "of": name,
                "greatest difference": greatest(value, expected), "relative": error, "bound": bound,
                "passes": error <= bound,
            }  # fmt: skip


@contextmanager
def flash(name: str | None) -> Iterator[None]:
    """FA3 or FA4 in place of torch's flash kernels and cuDNN's, and these again at the end; None: as they are."""
    if name is not None:
        set_flash_attention(name)
    try:
        yield
    finally:
        set_flash_attention(None)


def dense(q_BLNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, allowed_BLL: Tensor) -> Tensor:
    """softmax(q kᵀ / √H) v, written out."""
    group = q_BLNH.shape[2] // k_BLKH.shape[2]
    k_BLNH, v_BLNH = (x.repeat_interleave(group, dim=2) for x in (k_BLKH, v_BLKH))
    scores = torch.einsum("bqnh,bknh->bnqk", q_BLNH, k_BLNH) / q_BLNH.shape[3] ** 0.5
    weights = scores.masked_fill(~allowed_BLL[:, None], -torch.inf).softmax(dim=3)
    return torch.einsum("bnqk,bknh->bqnh", weights, v_BLNH)


def gradients(by: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The result, and the gradients of one fixed weighting of it."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = by(*leaves)
    generator = torch.Generator("cpu").manual_seed(2)
    dy = torch.randn(out.shape, generator=generator).to(inputs[0].device, torch.bfloat16).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, dy)]


def heads(
    shape: ModelShape, batch: int, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; numbers that BF16 holds, the same in every dtype."""
    generator = torch.Generator(device).manual_seed(1)

    def normal(count: int) -> Tensor:
        x = torch.randn(batch, length, count, shape.head_dim, device=device, generator=generator)
        return x.bfloat16().to(dtype)

    return normal(shape.num_heads), normal(shape.num_kv_heads), normal(shape.num_kv_heads)


def cut(batch: int, length: int) -> list[list[int]]:
    """Lengths of documents: one token, a few, and what is left, in another order in every row."""
    lengths = [1, length // 3, 7, length // 4]
    lengths.append(length - sum(lengths))
    return [lengths[row % 5 :] + lengths[: row % 5] for row in range(batch)]


def allowed_of(rows: list[list[int]], device: torch.device) -> Tensor:
    """bool [B, L, L]: what a query (row) may look at, filled in document by document."""
    length = sum(rows[0])
    allowed = torch.zeros(len(rows), length, length, dtype=torch.bool)
    for number, lengths in enumerate(rows):
        start = 0
        for size in lengths:
            for query in range(start, start + size):
                allowed[number, query, start : query + 1] = True
            start += size
    return allowed.to(device)


def documents_of(rows: list[list[int]], device: torch.device) -> Documents:
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows])
    flat = [size for row in rows for size in row]
    starts = torch.tensor([0, *flat]).cumsum(0).to(torch.int32)
    return Documents(ids.to(device), starts.to(device), max(flat))


def speed(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Forward and backward in BF16, causal and within documents; a product's backward is two, and QKᵀ again."""
    shape, device, length = shape_of(spec), gpu(spec), spec["length"]
    q, k, v = (x.requires_grad_() for x in heads(shape, spec["batch"], length, torch.bfloat16, device))
    dy = torch.randn_like(q)
    found = []
    for name, masked, mask, kernels in ways(spec, device):
        try:
            with kernels:
                seconds = seconds_of(
                    lambda mask=mask: torch.autograd.grad(attend(q, k, v, mask), (q, k, v), dy), device
                )
        except ImportError as error:
            found.append({"what": name, "documents": masked, "says": f"not installed: {error}"})
            continue
        except RuntimeError as error:  # not every version of torch has every kernel for these sizes
            found.append({"what": name, "documents": masked, "says": str(error).splitlines()[0]})
            continue
        squares = sum(size**2 for size in (documents_in(spec) if masked else [length]))
        flops = 3.5 * 4 * spec["batch"] * shape.num_heads * shape.head_dim * squares / 2
        found.append({"what": name, "documents": masked, **sized(seconds, flops=flops)})
    return found


def documents_in(spec: dict[str, Any]) -> list[int]:
    """Of a row."""
    size, length = spec["document"], spec["length"]
    return [size] * (length // size) + [length % size] * (length % size > 0)


def ways(spec: dict[str, Any], device: torch.device) -> Iterator[tuple[str, bool, Any, Any]]:
    """Name, whether within documents, mask, and the kernels that SDPA may choose from."""
    yield "sdpa, its own choice", False, None, nullcontext()
    if device.type == "cuda":
        yield "sdpa, flash", False, None, sdpa_kernel(SDPBackend.FLASH_ATTENTION)
        yield "sdpa, cuDNN", False, None, sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
    documents = documents_of([documents_in(spec)] * spec["batch"], device)
    for backend in ("varlen", "flex") if device.type == "cuda" else ("sdpa",):
        yield backend, True, attention_mask(backend, documents, device), nullcontext()
    for name in ("FA3", "FA4") if device.type == "cuda" else ():
        yield f"sdpa, {name}", False, None, flash(name)
        yield f"varlen, {name}", True, attention_mask("varlen", documents, device), flash(name)
