"""Attention over tokens that are dealt out: every method against a dense mask in one process, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from quern.model.attention import Documents, attention_mask
from quern.model.config import ModelConfig
from quern.model.transformer import Transformer
from quern.parallel.context import attention, kernels
from quern.parallel.context.inputs import Sharing
from quern.parallel.planning.context import Context, Method
from quern.parallel.planning.mesh import Mesh, MeshPlan, build_mesh
from support.distributed.ranks import KeptRanks


def case(seed: int, rows: int, length: int, heads: int, keys: int, head_dim: int) -> tuple[np.ndarray, list[Tensor]]:
    """Where documents start in the rows laid end to end; then q, k, v and the gradient of out, of whole rows."""
    rng = np.random.default_rng(seed)
    starts = [
        row * length + place
        for row in range(rows)
        for place in [0, *sorted(rng.choice(np.arange(1, length), int(rng.integers(0, min(length, 9))), replace=False))]
    ]
    torch.manual_seed(seed)
    sizes = [(rows, length, number, head_dim) for number in (heads, keys, keys, heads)]
    return np.array([*starts, rows * length], np.int32), [torch.randn(size, dtype=torch.float64) for size in sizes]


def dense(cu_seqlens: np.ndarray, tensors: Sequence[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv of softmax over the whole mask."""
    q, k, v, dout = tensors
    q, k, v = (own.clone().requires_grad_() for own in (q, k, v))
    rows, length = q.shape[:2]
    document = torch.bucketize(torch.arange(rows * length), torch.from_numpy(cu_seqlens[1:-1].copy()), right=True)
    document = document.view(rows, length)
    seen = (document[:, :, None] == document[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("blnh,bmnh->bnlm", q, k.repeat_interleave(group, 2)) * q.shape[-1] ** -0.5
    p = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    out = torch.einsum("bnlm,bmnh->blnh", p, v.repeat_interleave(group, 2))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def shared_attention(
    method: Method, ranks: int, heads: int, seed: int, sizes: tuple[int, ...], block: int | None = None
) -> list[Any]:
    """This rank's positions, and out, dq, dk, dv of its tokens."""
    if block:
        kernels.BLOCK = block
    cu_seqlens, tensors = case(seed, *sizes)
    length, num_heads, num_keys, head_dim = sizes[1:]
    context = Context(method, ranks, heads)
    mesh = kept_mesh(ranks, heads)
    widths = {"num_heads": num_heads, "num_kv_heads": num_keys, "head_dim": head_dim, "dim": 8, "ffn_dim": 8}
    shape = ModelConfig(num_layers=1, **widths).shape(8)
    with torch.device("meta"):
        model = Transformer(shape)
    attention.share_sequence(model, length, mesh.context("heads"), mesh.context("shards"), context.ring)
    rows = sizes[0]
    ids = np.concatenate(
        [
            np.arange(len(row)).repeat(np.diff([*row, (number + 1) * length]))
            for number, row in enumerate(cu_seqlens[:-1][cu_seqlens[:-1] // length == n] for n in range(rows))
        ]
    ).reshape(rows, length)
    whole = Documents(torch.from_numpy(ids), torch.from_numpy(cu_seqlens), length)
    shared = Sharing(context, mesh.rank("cp"), length).of(cu_seqlens, whole, torch.device("cpu"))
    index = shared.positions_BR[:, :, None, None]
    q, k, v, dout = (torch.take_along_dim(own, index, 1) for own in tensors)
    q, k, v = (own.requires_grad_() for own in (q, k, v))
    mask = shared.told or attention_mask("sdpa", whole, torch.device("cpu"))
    block_of = model.blocks["0"]
    out = block_of.attention.attend(q, k, v, mask)  # type: ignore[operator, union-attr]
    return [shared.positions_BR, out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


_MESHES: dict[tuple[int, int], Mesh] = {}


def kept_mesh(ranks: int, heads: int) -> Mesh:
    """Groups are made once a process."""
    if (ranks, heads) not in _MESHES:
        assert dist.get_world_size() == ranks
        _MESHES[ranks, heads] = build_mesh(MeshPlan(cp=ranks), "cpu", heads)
    return _MESHES[ranks, heads]


@pytest.fixture(scope="module")
def ranks() -> Iterator[KeptRanks]:
    with KeptRanks() as kept:
        yield kept


METHODS: list[tuple[Method, int, int]] = [
    ("ulysses", 2, 2), ("ulysses", 3, 3), ("ulysses", 4, 4), ("allgather", 2, 1), ("allgather", 3, 1),
    ("allgather", 4, 1), ("ring", 2, 1), ("ring", 3, 1), ("ring", 4, 1), ("usp", 4, 2),
]  # fmt: skip


def check(ranks: KeptRanks, method: Method, cp: int, heads: int, seed: int, *sizes: int, block: int = 0) -> None:
    expected = dense(*case(seed, *sizes))
    parts = ranks(shared_attention, cp, method, cp, heads, seed, sizes, block or None)
    for number, whole in enumerate(expected):
        found = torch.full_like(whole, float("nan"))
        for positions_BR, *own in parts:
            found.scatter_(1, positions_BR[:, :, None, None].expand(own[number].shape), own[number])
        off = (found - whole).abs().max() / whole.abs().max()
        assert off <= 1e-12, (("out", "dq", "dk", "dv")[number], float(off))


@pytest.mark.parametrize(("method", "cp", "heads"), METHODS)
def test_every_method_is_dense_attention(ranks: KeptRanks, method: Method, cp: int, heads: int) -> None:
    check(ranks, method, cp, heads, 1, 2, 24, 12, 4 if cp != 3 else 6, 6)
