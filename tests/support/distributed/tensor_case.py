"""A small model and a batch for split tensors: what varies, and how the model is made whole and in parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quern.model.attention import Documents
from quern.model.config import ModelConfig, ModelShape
from quern.model.init import initialise
from quern.model.loss import IGNORE
from quern.model.transformer import Transformer
from quern.parallel.apply import parallelize
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan, build_mesh

SEED, LENGTH, VOCAB = 7, 12, 125
TOLERANCE = 1e-12


@dataclass(frozen=True)
class Case:
    tp: int = 2
    shard: int = 1
    replicate: int = 1
    kv_heads: int = 4
    tied: bool = False
    qk_norm: bool = False
    mask: bool = False
    activation: str = "none"
    chunk: int = 4096
    z_loss: float = 0.0
    compile: Any = None
    rows: int = 2
    """Sequences of a rank's micro-batch."""
    accumulate: int = 1
    meta: bool = True
    joined: bool = False
    pieces: int = 1

    @property
    def dp(self) -> int:
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        return self.dp * self.tp

    @property
    def batch(self) -> int:
        return self.dp * self.rows * self.accumulate


def shape_of(case: Case, layers: int = 2) -> ModelShape:
    """The vocabulary is padded from 125 to 136: 68 or 34 rows a rank, so that rows 125 … 135 are the last one's."""
    return ModelConfig(
        num_layers=layers, dim=20, num_heads=8, num_kv_heads=case.kv_heads, head_dim=6, ffn_dim=44, vocab_multiple=8,
        tied_embeddings=case.tied, qk_norm=case.qk_norm,
    ).shape(vocab_size=VOCAB)  # fmt: skip


def batch_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and documents' numbers; few targets in the first rows, in the second of more than one none."""
    generator = torch.Generator().manual_seed(case.batch)
    size = (case.batch, LENGTH)
    tokens_BL, targets_BL = (torch.randint(VOCAB, size, generator=generator) for _ in range(2))
    share_B1 = torch.linspace(0.2, 1.0, case.batch, dtype=torch.float64)[:, None]
    targets_BL[torch.rand(size, dtype=torch.float64, generator=generator) > share_B1] = IGNORE
    if case.batch > 1:
        targets_BL[1] = IGNORE
    ids_BL = (torch.rand(size, generator=generator) < 0.2).cumsum(1)
    return tokens_BL, targets_BL, ids_BL


def documents_of(case: Case, ids_BL: Tensor) -> tuple[Tensor | None, Documents | None]:
    """Positions within documents, and the documents."""
    if not case.mask:
        return None, None
    place_BL = torch.arange(LENGTH).expand_as(ids_BL)
    first_BL = torch.ones_like(ids_BL, dtype=torch.bool)
    first_BL[:, 1:] = ids_BL[:, 1:] != ids_BL[:, :-1]
    starts = first_BL.flatten().nonzero()[:, 0]
    lengths = torch.cat((starts, torch.tensor([ids_BL.numel()]))).int()
    positions_BL = place_BL - place_BL.where(first_BL, 0).cummax(1).values
    return positions_BL, Documents(ids_BL, lengths, LENGTH)


def whole_model(case: Case, layers: int = 2, **options: Any) -> Transformer:
    torch.set_default_dtype(torch.float64)
    try:
        model = Transformer(shape_of(case, layers), **options)
    finally:
        torch.set_default_dtype(torch.float32)
    initialise(model, SEED)
    return model


def build(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Transformer, Any]:
    torch.set_default_dtype(torch.promote_types(dtype, torch.float32))
    with torch.device("meta" if case.meta else "cpu"):
        model = Transformer(shape_of(case), compute_dtype=dtype, loss_chunk=case.chunk, z_loss=case.z_loss)
    torch.set_default_dtype(torch.float32)
    if not case.meta:
        initialise(model, SEED)
    mesh = build_mesh(MeshPlan(dp_replicate=case.replicate, dp_shard=case.shard, tp=case.tp), "cpu")
    layout = Layout(
        compute_dtype=dtype, activation_checkpointing=case.activation, compile_backend=case.compile,
        tp_pieces=case.pieces,
    )  # fmt: skip
    found = parallelize(model, mesh, layout).model
    if case.meta:
        initialise(found, SEED)
    return found, mesh


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def ratio(expected: Tensor, found: Tensor, name: str) -> float:
    assert (expected.dtype, expected.shape) == (found.dtype, found.shape), name
    difference, scale = (expected - found).abs().max().item(), expected.abs().max().item()
    if difference == 0:
        return 0.0
    return difference / scale if scale and difference == difference else math.inf
