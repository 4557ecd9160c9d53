"""Attention of stretches: by blocks, and what the route to CUDA's flash kernels gives them, against a dense mask.

The flash kernels are replaced by float64 products with the meaning that torch documents: a causal mask is aligned to
the last query and the last key, log-sum-exp is [N, T] in float32 over scaled scores. Arguments go by the names of
torch's own schema, so that a wrong order does not pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quern.parallel.context import kernels
from quern.parallel.context.kernels import Stretches

HEADS, KEYS, HEAD_DIM = 6, 2, 8
LENGTHS = [(5, 5), (1, 7), (4, 9), (3, 3)]
"""Queries and keys of each stretch."""


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def stretches(causal: bool) -> Stretches:
    queries, keys = map(list, zip(*LENGTHS, strict=True))
    return Stretches(offsets(queries), offsets(keys), (max(queries), max(keys)), causal)


def drawn(dtype: torch.dtype) -> list[Tensor]:
    """dout, q, k, v."""
    queries, keys = (sum(own) for own in zip(*LENGTHS, strict=True))
    generator = torch.Generator().manual_seed(3)
    sizes = [(queries, HEADS), (queries, HEADS), (keys, KEYS), (keys, KEYS)]
    return [torch.randn(*size, HEAD_DIM, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def mask(cu_queries: Tensor, cu_keys: Tensor, causal: bool) -> Tensor:
    """[T, U]: which pairs there are."""
    seen = torch.zeros(int(cu_queries[-1]), int(cu_keys[-1]), dtype=torch.bool)
    for s in range(len(cu_queries) - 1):
        own = seen[cu_queries[s] : cu_queries[s + 1], cu_keys[s] : cu_keys[s + 1]]
        own |= torch.ones_like(own).tril(own.shape[1] - own.shape[0]) if causal else True
    return seen


def scored(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """[N, T, U]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (torch.einsum("tnh,unh->ntu", q, k) * q.shape[-1] ** -0.5).masked_fill(~seen, float("-inf"))


def dense(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> list[Tensor]:
    """out, lse, dq, dk, dv in float64, by autograd."""
    by = stretches(causal)
    q, k, v = (own.double().requires_grad_() for own in (q, k, v))
    scores = scored(q, k, mask(by.cu_queries, by.cu_keys, causal))
    out = torch.einsum("ntu,unh->tnh", scores.softmax(-1), v.repeat_interleave(HEADS // KEYS, 1))
    return [out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, (q, k, v), dout.double())]


def computed(dtype: torch.dtype, causal: bool) -> tuple[list[Tensor], list[Tensor]]:
    """What :mod:`kernels` gives, and what is expected."""
    dout, q, k, v = drawn(dtype)
    by = stretches(causal)
    out, lse = kernels.forward(q, k, v, by)
    found = [out, lse, *kernels.backward(dout, q, k, v, out, lse, by)]
    wide = torch.promote_types(dtype, torch.float32)
    assert [own.dtype for own in found] == [dtype, wide, dtype, dtype, dtype]
    return found, dense(dout, q, k, v, causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block", [1, 2, 3, 1024])
def test_blocks_are_dense_attention(monkeypatch: pytest.MonkeyPatch, block: int, causal: bool) -> None:
    monkeypatch.setattr(kernels, "BLOCK", block)
    for found, expected in zip(*computed(torch.float64, causal), strict=True):
        assert torch.allclose(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_a_part_of_the_keys_go_by_the_whole_sum(causal: bool) -> None:
    """As of a ring's step: out and lse are over more keys than those that are given."""
    dout, q, k, v = drawn(torch.float64)
    by = stretches(causal=False)
    more = torch.randn(2, len(k), KEYS, HEAD_DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    whole = [torch.cat((own, other)).requires_grad_() for own, other in zip((k, v), more, strict=True)]
    here = mask(by.cu_queries, by.cu_keys, causal)
    scores = scored(q, whole[0], torch.cat((here, mask(by.cu_queries, by.cu_keys, False)), 1))
    out = torch.einsum("ntu,unh->tnh", scores.softmax(-1), whole[1].repeat_interleave(HEADS // KEYS, 1))
    expected = [own[: len(k)] for own in torch.autograd.grad(out, whole, dout)]
    _, *found = kernels.backward(dout, q, k, v, out.detach(), scores.logsumexp(-1).detach(), stretches(causal))
    for own, other in zip(found, expected, strict=True):
        assert torch.allclose(own, other, rtol=1e-12, atol=1e-12)


def by_schema(name: str, stand_in: Callable[[dict[str, Any]], tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Calls a stand-in with arguments by the names that torch's schema has, each of the type that it has there."""
    wanted = getattr(torch.ops.aten, name).default._schema.arguments

    def call(*args: Any, **named: Any) -> tuple[Any, ...]:
        given = {own.name: value for own, value in zip(wanted, args, strict=False)} | named
        assert given.keys() >= {own.name for own in wanted if not own.has_default_value()}
        kinds = {"Tensor": Tensor, "Optional[Tensor]": Tensor, "SymInt": int, "int": int, "float": float, "bool": bool}
        for own in wanted:
            if own.name in given:
                assert type(given[own.name]) is kinds[str(own.type)], (own.name, own.type, given[own.name])
        return stand_in(given)

    return call


def checked(given: dict[str, Any]) -> Tensor:
    """What the kernels ask of their inputs; the mask."""
    q, k, v = (given[name] for name in ("query", "key", "value"))
    assert {q.dtype, k.dtype, v.dtype} <= {torch.bfloat16, torch.float16}
    assert len({q.dtype, k.dtype, v.dtype}) == 1
    assert all(own.ndim == 3 and own.stride(-1) == 1 for own in (q, k, v))
    assert given["cum_seq_q"].dtype == given["cum_seq_k"].dtype == torch.int32
    lengths = [given[name].diff().max() for name in ("cum_seq_q", "cum_seq_k")]
    assert [given["max_q"], given["max_k"]] == lengths
    assert given["dropout_p"] == 0
    return mask(given["cum_seq_q"], given["cum_seq_k"], given["is_causal"])


def flash_forward(given: dict[str, Any]) -> tuple[Any, ...]:
    seen = checked(given)
    q, k, v = (given[name].double() for name in ("query", "key", "value"))
    scores = scored(q, k, seen)
    out = torch.einsum("ntu,unh->tnh", scores.softmax(-1), v.repeat_interleave(q.shape[1] // v.shape[1], 1))
    state, unused = torch.zeros(2, dtype=torch.uint64), torch.zeros(0)
    return out.to(given["query"].dtype), scores.logsumexp(-1).float(), state, unused, unused


def flash_backward(given: dict[str, Any]) -> tuple[Any, ...]:
    """By the log-sum-exp and the out that are given."""
    seen, dtype = checked(given), given["query"].dtype
    assert given["grad_out"].dtype == given["out"].dtype == dtype
    assert given["grad_out"].is_contiguous()
    assert given["logsumexp"].dtype == torch.float32
    assert given["logsumexp"].shape == given["query"].shape[1::-1]
    assert given["logsumexp"].is_contiguous()
    assert given["rng_state"].dtype == torch.uint64
    names = ("grad_out", "query", "key", "value", "out")
    dout, q, k, v, out = (given[name].double() for name in names)
    group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
    p = (scored(q, k, seen) - given["logsumexp"].double()[..., None]).exp()
    dp = torch.einsum("tnh,unh->ntu", dout, v.repeat_interleave(group, 1))
    ds = p * (dp - (dout * out).sum(-1).T[..., None]) * scale
    dq = torch.einsum("ntu,unh->tnh", ds, k.repeat_interleave(group, 1))
    dk, dv = (
        torch.einsum("ntu,tnh->unh", own, other).unflatten(1, (-1, group)).sum(2) for own, other in ((ds, q), (p, dout))
    )
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been called of the flash kernels, which a CPU stands in for."""
    calls: list[str] = []

    def noted(name: str, stand_in: Callable[[dict[str, Any]], tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        def run(given: dict[str, Any]) -> tuple[Any, ...]:
            calls.append(name)
            return stand_in(given)

        return by_schema(name, run)

    for name, stand_in in (("_flash_attention_forward", flash_forward), ("_flash_attention_backward", flash_backward)):
        monkeypatch.setattr(torch.ops.aten, name, noted(name, stand_in))
    monkeypatch.setattr(kernels, "_flash", lambda q: q.dtype in (torch.bfloat16, torch.float16))
    return calls


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_kernels_are_called_as_torch_declares_them(flash: list[str], dtype: torch.dtype, causal: bool) -> None:
    found, expected = computed(dtype, causal)
    assert flash == ["_flash_attention_forward", "_flash_attention_backward"]
    for own, other in zip(found, expected, strict=True):
        assert torch.allclose(own.double(), other, rtol=2e-2, atol=2e-2), (own.double() - other).abs().max()


def test_flash_kernels_are_for_half_precision_on_cuda_alone(flash: list[str]) -> None:
    computed(torch.float32, True)
    assert flash == []


def test_the_route_goes_by_device_and_dtype() -> None:
    class Told:
        def __init__(self, device: str, dtype: torch.dtype) -> None:
            self.device, self.dtype = torch.device(device), dtype

    taken = {
        (device, dtype)
        for device in ("cpu", "cuda")
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
        if kernels._flash(Told(device, dtype))  # type: ignore[arg-type]
    }
    assert taken == {("cuda", torch.bfloat16), ("cuda", torch.float16)}
