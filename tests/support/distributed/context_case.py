"""Attention of tokens that are dealt out over ranks, and of all of them over a dense mask; no oracle is of quern."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from quern.model.attention import Documents, attention_mask
from quern.model.config import ModelConfig
from quern.model.transformer import Transformer
from quern.parallel.context import attention, inputs, kernels
from quern.parallel.context.inputs import Sharing
from quern.parallel.planning.context import Context, Method
from quern.parallel.planning.mesh import Mesh, MeshPlan, build_mesh
from quern.parallel.planning.segments import SMALLEST, deal


@dataclass(frozen=True)
class Example:
    """Rows of documents, and how ranks share them."""

    method: Method
    ranks: int
    exchange: int
    """Ranks that exchange heads."""
    length: int
    documents: tuple[tuple[int, ...], ...]
    """Of each row, where documents after the first begin."""
    heads: int
    keys: int
    """Heads of keys."""
    head_dim: int = 6
    block: int = 1024
    """Queries and keys of a block."""
    smallest: int = SMALLEST
    """Tokens of a chunk, at least, where documents ask for many."""
    seed: int = 0

    @property
    def cu_seqlens(self) -> np.ndarray:
        """Where documents start in the rows laid end to end, and the end of all."""
        rows = [row * self.length + place for row, cuts in enumerate(self.documents) for place in (0, *sorted(cuts))]
        return np.array([*rows, len(self.documents) * self.length], np.int32)

    @property
    def ids(self) -> np.ndarray:
        """[B, L]: the number of each token's document."""
        lengths = np.diff(self.cu_seqlens)
        return np.arange(len(lengths)).repeat(lengths).reshape(-1, self.length)

    @property
    def tensors(self) -> list[Tensor]:
        """q, k, v and the gradient of out, of whole rows."""
        drawn = torch.Generator().manual_seed(self.seed)
        sizes = [(len(self.documents), self.length, own, self.head_dim) for own in (self.heads, self.keys, self.keys)]
        return [torch.randn(size, generator=drawn, dtype=torch.float64) for size in (*sizes, sizes[0])]


def dense(example: Example) -> list[Tensor]:
    """out, dq, dk, dv of softmax over the whole mask."""
    q, k, v, dout = example.tensors
    q, k, v = (own.requires_grad_() for own in (q, k, v))
    document, length = torch.from_numpy(example.ids), example.length
    seen = (document[:, :, None] == document[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril()
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("blnh,bmnh->bnlm", q, k.repeat_interleave(group, 2)) * q.shape[-1] ** -0.5
    p = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    out = torch.einsum("bnlm,bmnh->blnh", p, v.repeat_interleave(group, 2))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def shared_attention(example: Example) -> list[Any]:
    """This rank's positions, and out, dq, dk, dv of its tokens. Collective."""
    context = Context(example.method, example.ranks, example.exchange)
    mesh = kept_mesh(example.ranks, example.exchange)
    widths = {"num_heads": example.heads, "num_kv_heads": example.keys, "head_dim": example.head_dim}
    with torch.device("meta"):
        model = Transformer(ModelConfig(num_layers=1, dim=8, ffn_dim=8, **widths).shape(8))
    attention.share_sequence(model, example.length, mesh.context("heads"), mesh.context("shards"), context.ring)
    cu_seqlens = example.cu_seqlens
    whole = Documents(torch.from_numpy(example.ids), torch.from_numpy(cu_seqlens), example.length)
    with _sizes(example):
        shared = Sharing(context, mesh.rank("cp"), example.length).of(cu_seqlens, whole, torch.device("cpu"))
        index = shared.positions_BR[:, :, None, None]
        q, k, v, dout = (torch.take_along_dim(own, index, 1) for own in example.tensors)
        q, k, v = (own.requires_grad_() for own in (q, k, v))
        mask = shared.told or attention_mask("sdpa", whole, torch.device("cpu"))
        out = model.blocks["0"].attention.attend(q, k, v, mask)  # type: ignore[operator, union-attr]
        return [shared.positions_BR, out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


@contextmanager
def _sizes(example: Example) -> Iterator[None]:
    """The example's sizes in place of the modules'."""
    dealing = partial(deal, smallest=example.smallest)
    with patch.object(kernels, "BLOCK", example.block), patch.object(inputs, "deal", dealing):
        yield


def worst(example: Example, by_rank: Sequence[Sequence[Tensor]]) -> dict[str, float]:
    """How far out, dq, dk, dv are from those of the dense mask, relative to the largest or 1; NaN where a token is
    missing or has come from two ranks."""
    found = {}
    times = torch.zeros(len(example.documents), example.length)
    for positions_BR, *_ in by_rank:
        times.scatter_add_(1, positions_BR, torch.ones(positions_BR.shape))
    for number, (name, whole) in enumerate(zip(("out", "dq", "dk", "dv"), dense(example), strict=True)):
        put = torch.full_like(whole, float("nan"))
        for positions_BR, *own in by_rank:
            put.scatter_(1, positions_BR[:, :, None, None].expand(own[number].shape), own[number])
        off = ((put - whole).abs().max() / max(whole.abs().max().item(), 1.0)).item()
        found[name] = off if (times == 1).all() else float("nan")
    return found


_MESHES: dict[tuple[int, int], Mesh] = {}


def kept_mesh(ranks: int, heads: int) -> Mesh:
    """Groups are made once a process."""
    if (ranks, heads) not in _MESHES:
        assert dist.get_world_size() == ranks
        _MESHES[ranks, heads] = build_mesh(MeshPlan(cp=ranks), "cpu", heads)
    return _MESHES[ranks, heads]
