"""First weights: the same for every slice and layout, of the stated distribution."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from quern.model.config import ModelConfig
from quern.model.init import ROWS, STD, draw, initialise, local_slice
from quern.model.transformer import Transformer

SHAPE = ModelConfig(num_layers=3, dim=64, num_heads=4, num_kv_heads=2, ffn_dim=96, qk_norm=True).shape(vocab_size=300)


def initialised(seed: int = 0, shape=SHAPE) -> Transformer:
    model = Transformer(shape)
    initialise(model, seed)
    return model


@given(st.integers(0, 70), st.integers(0, 70), st.sampled_from([(70, 5), (70, 1), (70, 3, 4)]))
def test_a_slice_is_the_slice_of_the_whole(a, b, shape):
    start, stop = min(a, b), max(a, b)
    whole = draw("blocks.0.ffn.w1.weight", shape, 3, 0, shape[0])
    assert whole.dtype == torch.float32
    assert torch.equal(draw("blocks.0.ffn.w1.weight", shape, 3, start, stop), whole[start:stop])


def test_rows_beyond_the_tensor_are_refused():
    for start, stop in [(0, 8), (-1, 3), (4, 3)]:
        with pytest.raises(ValueError, match="w: expected 0 ≤ start ≤ stop ≤ 7 rows"):
            draw("w", (7, 2), 0, start, stop)


def test_seed_name_and_chunk_each_change_the_values():
    shape = (4 * ROWS, 8)
    drawn = [draw(name, shape, seed, 0, shape[0]) for name in ("a", "b", "a\0000") for seed in (0, 1, 10, -1)]
    chunks = [chunk for tensor in drawn for chunk in tensor.split(ROWS)]
    assert len({tuple(chunk.flatten().tolist()) for chunk in chunks}) == len(chunks) == 48
    correlation = torch.corrcoef(torch.stack([tensor.flatten() for tensor in drawn])) - torch.eye(len(drawn))
    assert correlation.abs().max() < 5 / math.sqrt(drawn[0].numel())


def test_values_are_standard_normal():
    x = draw("w", (4000, 128), 0, 0, 4000).double().flatten()
    error = 1 / math.sqrt(x.numel())
    assert abs(x.mean()) < 5 * error
    assert abs(x.square().mean() - 1) < 5 * math.sqrt(2) * error
    assert abs(x.pow(3).mean()) < 5 * math.sqrt(15) * error
    assert abs(x.pow(4).mean() - 3) < 5 * math.sqrt(96) * error
    # Kolmogorov–Smirnov at level 1e-6
    gap = (torch.special.ndtr(x.sort().values) - (torch.arange(x.numel()) + 0.5) / x.numel()).abs().max()
    assert gap < 2.7 * error


def test_every_parameter_has_its_distribution():
    # a spread estimated from n values is off by 1 / √(2n); norms are 1, padded rows 0
    model = initialised()
    for name, p in model.named_parameters():
        if "norm" in name:
            assert torch.equal(p, torch.ones_like(p))
            continue
        values = p[:300] if name in ("embed.weight", "head.weight") else p
        std = 0.02 / math.sqrt(6) if name.endswith(("wo.weight", "w2.weight")) else 0.02
        assert values.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * values.numel())), name
        assert abs(values.mean().item()) < 4 * std / math.sqrt(values.numel()), name
    for weight in (model.embed.weight, model.head.weight):
        assert weight.shape[0] == 384
        assert torch.count_nonzero(weight[300:]) == 0
        assert torch.count_nonzero(weight[:300]) == 300 * 64
    assert not torch.equal(model.embed.weight, model.head.weight)
    assert STD == 0.02


def test_dtype_changes_rounding_only():
    for dtype in (torch.float64, torch.bfloat16):
        model = Transformer(SHAPE).to(dtype)
        initialise(model, 0)
        for p, exact in zip(model.parameters(), initialised().parameters(), strict=True):
            assert torch.equal(p, exact.to(dtype))


def test_depth_and_padding_change_no_other_weight():
    padded = ModelConfig(**SHAPE.model_dump(exclude={"vocab_size", "vocab_multiple"}), vocab_multiple=1).shape(300)
    for (name, p), (_, exact) in zip(
        initialised(shape=padded).named_parameters(), initialised().named_parameters(), strict=True
    ):
        assert torch.equal(p, exact[: p.shape[0]]), name


def test_a_parameter_without_a_rule_is_refused():
    model = Transformer(SHAPE)
    model.blocks["1"].ffn.register_parameter("gate", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match=r"blocks\.1\.ffn\.gate: no rule says how to initialise this parameter"):
        initialise(model, 0)


LAYOUTS = [
    ((4,), (Shard(0),)),
    ((3,), (Shard(0),)),
    ((3,), (Shard(1),)),
    ((2, 3), (Replicate(), Shard(0))),
    ((2, 3), (Shard(0), Replicate())),
    ((2, 3), (Shard(0), Shard(1))),
    ((3, 2), (Shard(0), Shard(0))),
    ((2, 2), (Shard(1), Shard(1))),
    ((8,), (Shard(0),)),
    ((5,), (Replicate(),)),
]


@pytest.fixture
def fake_world():
    """One process that is told to be any rank of a large world; nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    started = []

    def start(rank: int, size: int) -> None:
        if started:
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        started.append(rank)

    yield start
    if started:
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("mesh_shape", "placements"), LAYOUTS)
def test_every_rank_of_every_layout_holds_its_part_of_the_same_weights(fake_world, mesh_shape, placements):
    shape = ModelConfig(num_layers=1, dim=20, num_heads=2, ffn_dim=37).shape(vocab_size=101)
    whole = dict(initialised(7, shape).named_parameters())
    covered = {name: torch.zeros(p.shape) for name, p in whole.items()}
    for rank in range(math.prod(mesh_shape)):
        fake_world(rank, math.prod(mesh_shape))
        # axes named by rank: DTensor caches results by mesh, and another rank's mesh would be taken for an equal one
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=(f"a{rank}", f"b{rank}")[: len(mesh_shape)])
        model = Transformer(shape)
        for name, p in list(model.named_parameters()):
            places = placements if p.ndim == 2 else tuple(Replicate() for _ in placements)
            # DTensor itself cuts, without communication
            part = distribute_tensor(torch.full_like(p, torch.nan), mesh, places, src_data_rank=None)
            exact = distribute_tensor(whole[name].detach(), mesh, places, src_data_rank=None)
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(part))
            assert torch.equal(whole[name][local_slice(part)], exact.to_local())
            covered[name][local_slice(part)] += 1
        initialise(model, 7)
        for name, p in model.named_parameters():
            assert isinstance(p, DTensor)
            exact = distribute_tensor(whole[name].detach(), mesh, p.placements, src_data_rank=None)
            assert torch.equal(p.to_local(), exact.to_local()), (rank, name)
    assert all((times > 0).all() for times in covered.values())


TWO_DIMENSIONAL = [
    ((2, 2), 1),
    ((5, 4), 2),
    ((2, 2, 2), 1),
    *(pytest.param(*both, marks=pytest.mark.long) for both in (((3, 2), 1), ((2, 4), 1), ((1, 3, 4), 4))),
]
"""Sizes of (dp_shard, tp) or (dp_replicate, dp_shard, tp), and key/value heads."""


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "kv_heads"), TWO_DIMENSIONAL)
def test_every_rank_of_fsdp_over_split_tensors_holds_its_part(fake_world, sizes, kv_heads):
    """First weights to the bit, cut here by hand: tp first, and what is left of that by rows over dp_shard. Of many
    ranks every third, which are of every shard and every place in tp."""
    from torch.distributed.fsdp import fully_shard

    from quern.parallel.tensors.split import split_tensors

    shape = ModelConfig(
        num_layers=1, dim=12, num_heads=4, num_kv_heads=kv_heads, head_dim=6, ffn_dim=20, qk_norm=True,
        vocab_multiple=4,
    ).shape(vocab_size=43)  # fmt: skip
    whole, tp, dp = dict(initialised(7, shape).named_parameters()), sizes[-1], sizes[-2]
    for rank in range(0, math.prod(sizes), 3 if math.prod(sizes) > 8 else 1):
        fake_world(rank, math.prod(sizes))
        names = tuple(f"{name}{rank}" for name in ("replicate", "shard", "tp")[-len(sizes) :])
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        with torch.device("meta"):
            model = Transformer(shape)
        split_tensors(model, mesh[names[-1]])
        fsdp = mesh[names[:-1]] if len(names) > 2 else mesh[names[0]]
        for module in (*model.blocks.values(), model):
            fully_shard(module, mesh=fsdp)
        model.to_empty(device="cpu")
        initialise(model, 7)
        for name, p in model.named_parameters():
            kind, expected = name.split(".")[-2], whole[name].detach()
            if kind in ("wo", "w2"):
                expected = expected.chunk(tp, 1)[rank % tp]
            elif "norm" not in kind and not (kind in ("wk", "wv") and kv_heads < tp):
                expected = expected.chunk(tp)[rank % tp]
            width = -(-expected.shape[0] // dp)
            expected = expected[rank // tp % dp * width :][:width]
            assert torch.equal(p.to_local(), expected), (rank, name)


def test_split_tensors_alone_are_cut_without_a_message(fake_world):
    from quern.parallel.tensors.split import split_tensors

    shape = ModelConfig(num_layers=1, dim=16, num_heads=4, num_kv_heads=2, ffn_dim=20, vocab_multiple=4).shape(43)
    for rank in range(4):
        fake_world(rank, 4)
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=(f"tp{rank}",))
        filled, empty = initialised(7, shape), Transformer(shape)
        for model in (filled, empty):
            split_tensors(model, mesh)
        initialise(empty, 7)
        for (name, p), (_, expected) in zip(empty.named_parameters(), filled.named_parameters(), strict=True):
            local = [v.to_local() if isinstance(v, DTensor) else v for v in (p, expected)]
            assert torch.equal(*local), name


def test_a_second_copy_of_the_embedding_has_its_values():
    model = initialised()
    model.tied = torch.nn.Embedding(*model.embed.weight.shape)
    initialise(model, 0)
    assert torch.equal(model.tied.weight, model.embed.weight)


def test_other_placements_are_refused(fake_world):
    fake_world(0, 2)
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match="expected placements Shard and Replicate, or FSDP2's over these, got"):
        local_slice(DTensor.from_local(torch.zeros(4, 4), mesh, [Partial()], run_check=False))


def test_fsdp_over_gloo_from_meta(tmp_path: Path):
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with torch.device("meta"):
            model = Transformer(SHAPE)
        for block in model.blocks.values():
            fully_shard(block)
        fully_shard(model)
        model.to_empty(device="cpu")
        initialise(model, 0)
        for p, exact in zip(model.parameters(), initialised().parameters(), strict=True):
            assert isinstance(p, DTensor)
            assert torch.equal(p.full_tensor(), exact)
    finally:
        dist.destroy_process_group()
