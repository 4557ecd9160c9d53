"""Attention against a loop over queries in float64; documents against each document alone."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from quern.model.attention import Documents, attend, attention_mask
from quern.model.config import ModelConfig
from quern.model.init import initialise
from quern.model.transformer import Transformer

CPU = torch.device("cpu")
LENGTHS = [[5, 1, 6], [12], [2, 3, 4, 3]]
"""Tokens of the documents of each row."""


def documents(lengths: list[list[int]] = LENGTHS) -> Documents:
    ids = [[number for number, length in enumerate(row) for _ in range(length)] for row in lengths]
    bounds = list(itertools.accumulate(itertools.chain.from_iterable(lengths), initial=0))
    return Documents(torch.tensor(ids, dtype=torch.int32), torch.tensor(bounds, dtype=torch.int32), 12)


def by_loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    out = torch.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for b, i, n in itertools.product(*(range(size) for size in q.shape[:3])):
        seen = [j for j in range(i + 1) if ids is None or ids[b, j] == ids[b, i]]
        scores = torch.stack([q[b, i, n] @ k[b, j, n // group] / math.sqrt(q.shape[3]) for j in seen])
        out[b, i, n] = sum(p * v[b, j, n // group] for p, j in zip(scores.softmax(0), seen, strict=True))
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("with_documents", [False, True])
def test_equals_a_loop_over_queries(kv_heads, with_documents):
    generator = torch.Generator().manual_seed(kv_heads)
    q, k, v = (
        torch.randn(3, 12, heads, 8, dtype=torch.float64, generator=generator) for heads in (4, kv_heads, kv_heads)
    )
    given = documents() if with_documents else None
    out = attend(q, k, v, attention_mask("sdpa", given, CPU))
    torch.testing.assert_close(out, by_loop(q, k, v, given and given.ids_BL), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_computes_in_the_dtype_given(dtype):
    q, k, v = (torch.randn(3, 12, heads, 8, generator=torch.Generator().manual_seed(3)) for heads in (4, 2, 2))
    exact = attend(q.double(), k.double(), v.double(), attention_mask("sdpa", documents(), CPU))
    out = attend(q.to(dtype), k.to(dtype), v.to(dtype), attention_mask("sdpa", documents(), CPU))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=40 * torch.finfo(dtype).eps)


def test_no_documents_needs_no_mask():
    assert attention_mask("sdpa", None, CPU) is None


@pytest.mark.parametrize("backend", ["varlen", "flex"])
@pytest.mark.parametrize("given", [None, documents()])
def test_cuda_backends_are_refused_on_the_cpu_with_the_reason(backend, given):
    with pytest.raises(ValueError, match=rf"attention: {backend} needs CUDA \(.+\), got cpu; expected sdpa"):
        attention_mask(backend, given, CPU)


def test_an_unknown_backend_is_refused_when_the_model_is_built():
    shape = ModelConfig(num_layers=1, dim=8, num_heads=1).shape(5)
    with pytest.raises(ValueError, match="attention: expected one of sdpa, varlen, flex, got 'flash'"):
        Transformer(shape, attention="flash")
    with pytest.raises(ValueError, match="varlen needs CUDA"):
        Transformer(shape, attention="varlen")(torch.zeros(1, 2, dtype=torch.int64))


def test_documents_in_one_row_are_as_if_each_ran_alone():
    shape = ModelConfig(num_layers=2, dim=32, num_heads=4, num_kv_heads=2, tied_embeddings=True).shape(61)
    model = Transformer(shape).double()
    initialise(model, 3)
    tokens = torch.randint(61, (3, 12), generator=torch.Generator().manual_seed(0))
    targets = torch.randint(61, (3, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[i for n in row for i in range(n)] for row in LENGTHS], dtype=torch.int32)
    loss, nll = model(tokens, targets, positions, documents())
    loss.backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    alone = []
    for row, lengths in enumerate(LENGTHS):
        for stop, length in zip(itertools.accumulate(lengths), lengths, strict=True):
            part = (slice(row, row + 1), slice(stop - length, stop))
            loss_alone, nll_alone = model(tokens[part], targets[part])
            loss_alone.backward()
            alone.append(nll_alone[0])
    torch.testing.assert_close(nll.flatten(), torch.cat(alone), rtol=0, atol=1e-13)
    for name, p in model.named_parameters():
        torch.testing.assert_close(together[name], p.grad, rtol=0, atol=1e-13)


def test_the_mask_is_built_once_a_forward_pass(monkeypatch):
    from quern.model import attention

    built = []
    monkeypatch.setattr(attention, "_dense_mask", lambda ids, make=attention._dense_mask: built.append(1) or make(ids))
    model = Transformer(ModelConfig(num_layers=3, dim=8, num_heads=1).shape(5))
    initialise(model, 0)
    model(torch.zeros(3, 12, dtype=torch.int64), documents=documents())
    assert built == [1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_cuda_backends_equal_the_dense_mask(backend):
    generator = torch.Generator().manual_seed(0)
    lengths = [[100, 1, 155], [256], [30, 40, 50, 136]]
    given = documents(lengths)
    given = Documents(given.ids_BL.cuda(), given.cu_seqlens.cuda(), 256)
    inputs = [torch.randn(3, 256, heads, 64, generator=generator).cuda() for heads in (4, 2, 2)]
    upstream = torch.randn(3, 256, 4, 64, generator=generator).cuda()

    def run(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
        qkv = [x.bfloat16().to(dtype).requires_grad_() for x in inputs]
        out = attend(*qkv, attention_mask(backend, given, torch.device("cuda")))
        return [out, *torch.autograd.grad(out, qkv, upstream.to(dtype))]

    for ours, exact in zip(run(backend, torch.bfloat16), run("sdpa", torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0.02, atol=0.03)
