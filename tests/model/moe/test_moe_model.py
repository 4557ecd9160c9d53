"""A model with experts as a whole: first weights, slices, sampling, recomputation, compiled blocks."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quern.model.config import ModelConfig, ModelShape
from quern.model.generate import generate
from quern.model.init import STD, initialise
from quern.model.rope import rotation
from quern.model.transformer import Transformer
from quern.parallel.activation import checkpoint_blocks

SIZES: dict[str, Any] = {"num_layers": 3, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48}
EXPERTS: dict[str, Any] = {
    "num_experts": 5, "top_k": 2, "ffn_dim": 24, "first_dense": 1, "shared_ffn_dim": 16, "shared_gate": True,
    "bias": True,
}  # fmt: skip


def shape_of(vocab: int = 60, sizes: dict[str, Any] | None = None, **experts: Any) -> ModelShape:
    return ModelConfig(**SIZES | (sizes or {}), moe=EXPERTS | experts).shape(vocab)


def model_of(shape: ModelShape, dtype: torch.dtype = torch.float32) -> Transformer:
    """Weights large enough that each one matters."""
    model = Transformer(shape).to(dtype)
    initialise(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter *= 8
    return model


def tokens(batch: int = 2, length: int = 16) -> Tensor:
    return torch.randint(60, (batch, length), generator=torch.Generator().manual_seed(2))


def gradients(model: Transformer) -> dict[str, Tensor]:
    model(tokens(), tokens().roll(-1, 1))[0].backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name], parameter.grad = parameter.grad, None
    return found


def test_every_parameter_has_its_distribution() -> None:
    shape = shape_of(sizes={"dim": 64, "head_dim": 8}, num_experts=9, ffn_dim=96, shared_ffn_dim=96)
    model = Transformer(shape)
    for buffer in model.buffers():
        buffer.fill_(3.0)
    initialise(model, 0)
    for name, p in model.named_parameters():
        if "norm" not in name and "embed" not in name and "head" not in name:
            std = STD / math.sqrt(6) if ".w2" in name or "wo" in name else STD
            assert p.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * p.numel())), name
    assert all(torch.count_nonzero(buffer) == 0 for buffer in model.buffers())
    whole = model.blocks["1"].ffn.experts
    drawn = [row for weight in (whole.w1, whole.w3) for row in weight.flatten(1)]
    assert torch.corrcoef(torch.stack(drawn)).fill_diagonal_(0).abs().max() < 5 / math.sqrt(64 * 96)


def test_the_number_of_experts_changes_no_expert() -> None:
    few, many = (model_of(shape_of(num_experts=number)).blocks["1"].ffn.experts for number in (3, 5))
    for name in ("w1", "w2", "w3"):
        assert torch.equal(getattr(few, name), getattr(many, name)[:3])


@pytest.fixture
def fake_ranks():
    """This process as any rank of some; nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(rank: int, size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("split", [(Shard(0), Replicate()), (Shard(1), Shard(0)), (Replicate(), Shard(2))])
def test_every_rank_draws_its_part_of_the_same_experts(fake_ranks, split) -> None:
    whole = Transformer(shape_of())
    initialise(whole, 7)
    for rank in range(6):
        fake_ranks(rank, 6)
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=(f"a{rank}", f"b{rank}"))
        experts = Transformer(shape_of())
        parts = {}
        for name, p in list(experts.named_parameters()):
            places = split if p.ndim == 3 else (Replicate(), Replicate())
            part = distribute_tensor(torch.full_like(p, torch.nan), mesh, places, src_data_rank=None)
            owner, _, leaf = name.rpartition(".")
            parts[name] = torch.nn.Parameter(part)
            setattr(experts.get_submodule(owner), leaf, parts[name])
        initialise(experts, 7)
        for name, p in whole.named_parameters():
            exact = distribute_tensor(p.detach(), mesh, parts[name].placements, src_data_rank=None)
            assert torch.equal(parts[name].to_local(), exact.to_local()), (rank, name)


def test_slices_in_turn_are_the_whole() -> None:
    model = model_of(shape_of(), torch.float64)
    first, last = model.slice_layers(range(2)), model.slice_layers(range(2, 3))
    assert torch.equal(last(tokens(), hidden_BLD=first(tokens())), model(tokens()))


@pytest.mark.parametrize("qk_norm", [False, "whole"])
def test_sampling_with_a_cache_is_sampling_without(qk_norm) -> None:
    model = model_of(shape_of(sizes={"qk_norm": qk_norm}), torch.float64)
    found = generate(model, tokens(), max_new_tokens=6, temperature=0)
    again = tokens()
    for _ in range(6):
        again = torch.cat([again, model(again)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("capacity", [None, 1.0])
def test_recomputation_changes_no_bit(mode: str, dtype: torch.dtype, capacity: float | None) -> None:
    plain = model_of(shape_of(capacity=capacity), dtype)
    saving = copy.deepcopy(plain)
    checkpoint_blocks(saving.blocks.values(), mode)
    exact = gradients(plain)
    for name, found in gradients(saving).items():
        assert torch.equal(found, exact[name]), name


class _Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.quern.multiply_experts.default, torch.ops.quern.expert_gradients.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "again"), [("none", 0), ("full", 3), ("selective", 0)])
def test_selective_recomputation_keeps_the_products_of_experts(mode: str, again: int) -> None:
    """A layer forms three products, and six for their gradients; two layers have experts."""
    model = model_of(shape_of())
    checkpoint_blocks(model.blocks.values(), mode)
    with _Products() as seen:
        gradients(model)
    assert seen.count == 2 * (3 + 6 + again)


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        pytest.param("selective", torch.float32, marks=pytest.mark.long),
        pytest.param("none", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("full", torch.float64, marks=pytest.mark.long),
    ],
)
def test_a_block_compiles_as_one_graph(mode: str, dtype: torch.dtype) -> None:
    """Without a break, and without asking a tensor for a value: the host waits for nothing."""
    groups = {"score": "sigmoid", "num_experts": 6, "groups": 3, "top_groups": 2}
    shape = shape_of(sizes={"num_layers": 2}, capacity=1.0, drop="score", **groups)
    block = model_of(shape, dtype).blocks["1"]
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
    turn = rotation(shape, 16, dtype=dtype, device=torch.device("cpu"))
    weigh = torch.randn(x.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    bound = {torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float64: 1e-13}[dtype]
    names, parameters = zip(*block.named_parameters(), strict=True)
    y = block(x, turn)
    exact = [y, *torch.autograd.grad(y, [x, *parameters], weigh)]
    torch._dynamo.reset()
    checkpoint_blocks([block], mode)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    y = compiled(x, turn)
    for name, found, one in zip(
        ("y", "x", *names), [y, *torch.autograd.grad(y, [x, *parameters], weigh)], exact, strict=True
    ):
        assert (found - one).abs().max() <= bound * one.abs().max(), name
