"""A small model whose every number is known by name: what checkpoint tests save, and what they must find again.

The numbers come from a keyed NumPy stream, not from anything in quern.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quern.model.config import ModelShape
from quern.model.moe.config import MoEShape
from quern.model.transformer import Transformer
from quern.parallel.apply import parallelize
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import Mesh
from quern.train.checkpoint.format.manifest import EncodingInfo, Position, RunFacts
from quern.train.checkpoint.format.state import TrainState

VOCAB = 127
RANKS = b"YQ== 0\nYg== 1\n"
JUNK = 7.25  # in padded rows: must reach no file, and be zero after a load


def shape(
    multiple: int = 128,
    *,
    vocab: int = VOCAB,
    tied: bool = False,
    dim: int = 6,
    num_layers: int = 2,
    num_heads: int = 3,
    experts: bool = False,
) -> ModelShape:
    """A model in which 3 and 4 ranks divide nothing evenly, and a norm has fewer rows than a large world has ranks.

    With 2 heads 2 ranks of ``tp`` can share it; half a feed-forward's rows is odd. ``experts``: eight in each layer but
    the first, which 3 ranks do not divide but along their rows of 6.
    """
    moe = {"num_experts": 8, "top_k": 2, "ffn_dim": 10, "bias": True, "shared_ffn_dim": 2, "first_dense": 1}
    return ModelShape(
        num_layers=num_layers, dim=dim, num_heads=num_heads, num_kv_heads=1, head_dim=2, ffn_dim=10, vocab_size=vocab,
        vocab_multiple=multiple, rope_theta=10_000.0, rope_scaling=None, norm_eps=1e-5, qk_norm=True,
        tied_embeddings=tied, moe=MoEShape(**moe) if experts else None,
    )  # fmt: skip


def sizes(of: ModelShape) -> dict[str, tuple[int, ...]]:
    """Unpadded sizes, written out by hand."""
    d, h, f = of.dim, of.head_dim, of.ffn_dim
    found: dict[str, tuple[int, ...]] = {"embed.weight": (of.vocab_size, d), "norm.weight": (d,)}
    if not of.tied_embeddings:
        found["head.weight"] = (of.vocab_size, d)
    for i in range(of.num_layers):
        block = f"blocks.{i}."
        found |= {
            f"{block}attention_norm.weight": (d,),
            f"{block}attention.wq.weight": (of.num_heads * h, d),
            f"{block}attention.wk.weight": (of.num_kv_heads * h, d),
            f"{block}attention.wv.weight": (of.num_kv_heads * h, d),
            f"{block}attention.wo.weight": (d, of.num_heads * h),
            f"{block}attention.q_norm.weight": (h,),
            f"{block}attention.k_norm.weight": (h,),
            f"{block}ffn_norm.weight": (d,),
        }
        if of.moe is None or i == 0:
            found |= _swiglu(f"{block}ffn.", d, f)
        else:
            e, f = of.moe.num_experts, of.moe.ffn_dim
            own = {"w1": (e, f, d), "w2": (e, d, f), "w3": (e, f, d)}
            found |= {f"{block}ffn.experts.{name}": size for name, size in own.items()}
            found |= {f"{block}ffn.router.weight": (e, d)} | _swiglu(f"{block}ffn.shared.", d, of.moe.shared_ffn_dim)
    return found


def _swiglu(prefix: str, d: int, f: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}w1.weight": (f, d), f"{prefix}w2.weight": (d, f), f"{prefix}w3.weight": (f, d)}


def numbers(kind: str, name: str, size: tuple[int, ...], key: int) -> torch.Tensor:
    """The float32 tensor that ``name`` holds (``kind``: weight, exp_avg, exp_avg_sq) in the state ``key``."""
    stream = np.random.default_rng([zlib.crc32(f"{kind}/{name}".encode()), key])
    return torch.from_numpy(stream.standard_normal(size).astype(np.float32)).abs() + 0.5


def weights(key: int, **options: Any) -> dict[str, torch.Tensor]:
    """All that :func:`fill` gives a model of this shape."""
    return {name: numbers("weight", name, size, key) for name, size in sizes(shape(**options)).items()}


def padded(values: torch.Tensor, name: str, multiple: int, fill: float) -> torch.Tensor:
    if name not in ("embed.weight", "head.weight"):
        return values
    rows = -(-len(values) // multiple) * multiple
    return torch.cat([values, torch.full((rows - len(values), values.shape[1]), fill)])


def junk_row() -> bytes:
    """The bytes of a padded row in memory."""
    return np.full(6, JUNK, np.float32).tobytes()


def groups(model: torch.nn.Module, lr: float = 1e-3) -> torch.optim.AdamW:
    decay = [p for p in model.parameters() if p.dim() > 1]
    no_decay = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
        lr=lr, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip


def facts(folder: Path, of: ModelShape, **changes: Any) -> RunFacts:
    ranks = Path(folder) / "ranks.tiktoken"
    if not ranks.exists():
        ranks.write_bytes(RANKS)
    fields: dict[str, Any] = {
        "shape": of, "layout": {"dp_replicate": 1, "dp_shard": 1}, "precision": "fp32",
        "corpus_versions": {"run-1/web/1": 2}, "corpus_fingerprint": "f" * 32,
        "encoding": EncodingInfo("tiny", of.vocab_size, 0, hashlib.sha256(RANKS).hexdigest()),
        "ranks_path": str(ranks), "config": {"run_dir": "x", "steps": 10, "model": {"dim": of.dim}},
    }  # fmt: skip
    return RunFacts(**(fields | changes))


def share(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``full``, cut as ``like`` is: axes are dealt out from the innermost, as FSDP2 does with what
    ``tp`` has split already."""
    from torch.distributed.tensor import DTensor

    if isinstance(like, DTensor):
        mesh = like.device_mesh
        for axis in reversed(range(mesh.ndim)):
            if not like.placements[axis].is_replicate():
                dim = like.placements[axis].dim
                width = -(-full.shape[dim] // mesh.size(axis))
                start = min(width * mesh.get_local_rank(axis), full.shape[dim])
                full = full.narrow(dim, start, min(width, full.shape[dim] - start))
    return full


def local(tensor: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def put(target: torch.Tensor, full: torch.Tensor) -> None:
    """``full`` into ``target``, which may be cut into shards."""
    local(target).copy_(share(full, target))


def plain_name(name: str) -> str:
    """Of which parameter this is one."""
    return name.replace("tied.", "embed.")


def fill(state: TrainState, key: int, *, step: float | None = None, pad: float = JUNK) -> None:
    """Give every tensor of ``state`` its numbers; padded rows get ``pad``."""
    of = state.facts.shape
    for name, parameter in state.model.named_parameters():
        name = plain_name(name)
        size = sizes(of)[name]
        put(parameter, padded(numbers("weight", name, size, key), name, of.vocab_multiple, pad))
        slots = {"step": torch.tensor(float(key if step is None else step))}
        for kind in ("exp_avg", "exp_avg_sq"):
            slots[kind] = torch.zeros_like(parameter.detach())
            put(slots[kind], padded(numbers(kind, name, size, key), name, of.vocab_multiple, pad))
        state.optimizer.state[parameter] = slots
    for name, buffer in state.model.named_buffers():  # biases of experts
        buffer.copy_(numbers("bias", name, tuple(buffer.shape), key))


def make(folder: Path, *, multiple: int = 128, tied: bool = False, lr: float = 1e-3, **kwargs: Any) -> TrainState:
    """A state on one rank, weights unset."""
    of = shape(multiple, tied=tied, **kwargs)
    model = Transformer(of)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.5)
    return TrainState(model, groups(model, lr), facts(folder, of), {"losses": torch.zeros(4)})


def filled(folder: Path, key: int, *, step: float | None = None, pad: float = JUNK) -> TrainState:
    """A state on one rank that has its numbers."""
    state = make(folder)
    fill(state, key, step=step, pad=pad)
    return state


def laid_out(of: ModelShape, mesh: Mesh, schedule: str | None = None) -> Transformer:
    """The model on a layout, weights unset."""
    with torch.device("meta"):
        model = Transformer(of)
    layout = Layout(torch.float32, mesh.plan, schedule=schedule, micro_batch=1, seq_len=8)
    return parallelize(model, mesh, layout, torch.device("cpu")).model


def position(key: int, **scalars: Any) -> Position:
    return Position(data_step=key + 3, tokens=key * 100, order="ab" * 16, ledger_offset=0, scalars=scalars)


def differences(state: TrainState, key: int, *, stage: bool = False) -> list[str]:
    """Names of whatever in this rank's part of ``state`` is not, bit for bit, what ``fill(state, key)`` puts there,
    with zeros as padding. ``stage``: the rank has some of the parameters only."""
    of = state.facts.shape
    wrong = []
    seen = set()
    for name, parameter in state.model.named_parameters():
        name = plain_name(name)
        seen.add(name)
        slots = state.optimizer.state[parameter]
        held = {"weight": parameter, "exp_avg": slots["exp_avg"], "exp_avg_sq": slots["exp_avg_sq"]}
        for kind, tensor in held.items():
            expected = padded(numbers(kind, name, sizes(of)[name], key), name, of.vocab_multiple, 0.0)
            if not torch.equal(local(tensor), share(expected, tensor)):
                wrong.append(f"{kind}/{name}")
        if float(slots["step"]) != key:
            wrong.append(f"step/{name}")
    for name, buffer in state.model.named_buffers():
        if not torch.equal(buffer, numbers("bias", name, (8,), key)):
            wrong.append(f"bias/{name}")
    return wrong + sorted(seen - set(sizes(of)) if stage else set(sizes(of)) ^ seen)


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)
