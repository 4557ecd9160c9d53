"""What recomputation keeps, what it computes twice, and that it changes no number and no name."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch.utils._python_dispatch import TorchDispatchMode

from quern.model.attention import Documents
from quern.model.config import ModelConfig
from quern.model.float8.recipe import Recipe
from quern.model.init import initialise
from quern.model.transformer import Transformer
from quern.parallel.activation import checkpoint_blocks, kept_operations
from quern.parallel.apply import parallelize
from quern.parallel.context.inputs import Inputs
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan, build_mesh
from support.distributed.storages import LiveStorages

LAYERS = 3
MODES = ("none", "full", "selective")


class Count(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def network(layers: int = LAYERS, dtype: torch.dtype | None = None) -> Transformer:
    config = ModelConfig(num_layers=layers, dim=24, num_heads=4, num_kv_heads=2, ffn_dim=35, qk_norm=True)
    return Transformer(config.shape(vocab_size=50), compute_dtype=dtype)


def batch() -> tuple[torch.Tensor, torch.Tensor, None, Documents]:
    tokens_BL = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(1))
    ids_BL = (torch.arange(16) >= 5).long().expand(2, 16)
    return tokens_BL, tokens_BL.roll(1), None, Documents(ids_BL, torch.tensor([0, 5, 16, 21, 32]), 11)


def run(mode: str, dtype: torch.dtype | None = None) -> tuple[dict[str, torch.Tensor], Counter[str], Counter[str]]:
    """Gradients by name, and what ran forward and backward."""
    model = network(dtype=dtype)
    initialise(model, seed=3)
    checkpoint_blocks(model.blocks.children(), mode)
    with Count() as forward:
        loss, _ = model(*batch())
    with Count() as backward:
        loss.backward()
    return {name: value.grad for name, value in model.named_parameters()}, forward.calls, backward.calls


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_and_names_stay_bitwise(mode: str, dtype: torch.dtype | None) -> None:
    expected, found = run("none", dtype)[0], run(mode, dtype)[0]
    assert list(found) == list(expected) == [name for name, _ in network().named_parameters()]
    for name, gradient in expected.items():
        assert torch.equal(gradient, found[name]), name


@pytest.mark.slow
def test_what_is_computed_twice() -> None:
    """Seven products, one attention and one SiLU a block forward; two products each backward."""
    forward, backward = ({mode: run(mode)[number] for mode in MODES} for number in (1, 2))
    attention = next(name for name in forward["none"] if name.startswith("_scaled_dot_product"))
    for mode in MODES:
        assert forward[mode]["mm"] == forward["none"]["mm"]
        assert forward[mode][attention] == LAYERS
        assert forward[mode]["silu"] == LAYERS
    again = {
        mode: {name: backward[mode][name] - backward["none"][name] for name in ("mm", attention, "silu")}
        for mode in MODES
    }
    assert again["none"] == {"mm": 0, attention: 0, "silu": 0}
    # the last product of a block is nobody's input in backward: recomputation stops before it
    assert again["full"] == {"mm": 6 * LAYERS, attention: LAYERS, "silu": LAYERS}
    assert again["selective"] == {"mm": 0, attention: 0, "silu": LAYERS}


def parallelized(dtype: torch.dtype = torch.float32, **settings: Any) -> Transformer:
    model = network()
    parallelize(model, build_mesh(MeshPlan(), "cpu"), Layout(dtype, **settings), torch.device("cpu"))
    initialise(model, seed=3)
    return model


@pytest.mark.parametrize("layers", [1, 2, 9, None])
def test_some_layers_recompute(layers: int | None) -> None:
    model = parallelized(activation_checkpointing="full", activation_checkpointing_layers=layers)
    loss, _ = model(*batch())
    with Count() as backward:
        loss.backward()
    assert backward.calls["silu"] == min(layers or LAYERS, LAYERS)
    expected = run("none")[0]
    assert all(torch.equal(value.grad, expected[name]) for name, value in model.named_parameters())  # type: ignore[arg-type]


@inductor_config.patch({"eager_numerics.division_rounding": False})
def test_compiled_blocks_round_to_float8_as_eager_ones_do() -> None:
    """On CUDA inductor's division is an approximation, unless it is told otherwise."""
    parallelized(compile_backend="aot_eager")
    assert not torch._inductor.config.eager_numerics.division_rounding
    parallelized(torch.bfloat16, compile_backend="aot_eager", float8=Recipe("tensorwise"))
    assert torch._inductor.config.eager_numerics.division_rounding


@pytest.mark.long
@functorch_config.patch(activation_memory_budget=1.0)  # set back at the end
def test_a_memory_budget_bounds_what_compiled_blocks_keep() -> None:
    """Kept are at least a block's inputs, which the budget does not count."""
    kept: dict[float | None, int] = {}
    for budget in (None, 0.5, 0.0):
        torch._dynamo.reset()
        model = parallelized(compile_backend="aot_eager_decomp_partition", activation_memory_budget=budget)
        model.loss_compiler = None
        sizes: list[int] = []

        def keep(value: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            if not isinstance(value, torch.nn.Parameter):
                sizes.append(value.nbytes)
            return value

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            loss, _ = model(*batch())
        loss.backward()
        kept[budget] = sum(sizes)
        for name, expected in run("none")[0].items():
            torch.testing.assert_close(dict(model.named_parameters())[name].grad, expected, rtol=1e-4, atol=1e-6)
    least = kept[0.0]
    assert least < kept[0.5] < kept[None]
    assert kept[0.5] - least <= 0.6 * (kept[None] - least)


def kept_bytes(mode: str) -> int:
    """What a forward pass leaves behind for its backward pass."""
    model = network()
    initialise(model, seed=3)
    checkpoint_blocks(model.blocks.children(), mode)
    with LiveStorages() as storages:
        loss, _ = model(*batch())
    alive = storages.bytes()
    loss.backward()  # until here the graph lives
    return alive


def test_full_keeps_least_and_none_most() -> None:
    none, full, selective = (kept_bytes(mode) for mode in MODES)
    hidden = 2 * 16 * 24 * 4  # one hidden state of the batch
    assert full < selective < none
    # per block a kept product's output: q 1, k and v 1/2 each, attention 1, wo 1, w1 and w3 35/24 each, w2 1
    products = (1 + 0.5 + 0.5 + 1 + 1 + 1 + 2 * 35 / 24) * hidden * LAYERS
    assert full + 0.8 * products < selective < full + 1.3 * products


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="expected none, full or selective, got 'some'"):
        checkpoint_blocks([], "some")


def test_kept_operations_are_products_attention_and_sums() -> None:
    names = {str(operation) for operation in kept_operations()}
    assert {"aten.mm.default", "aten._scaled_dot_product_flash_attention.default"} <= names
    assert "torch_attn._varlen_attn.default" in names
    assert "flex_attention" in names
    assert "_c10d_functional.reduce_scatter_tensor.default" in names
    assert not any("backward" in name or "bmm" in name for name in names)


def compiled_graphs(replicate: int, shard: int, mode: str) -> tuple[int, dict[str, Any]]:
    """How many graphs three equal blocks make over two micro-batches; gradients by name."""
    from torch._dynamo.testing import CompileCounterWithBackend

    with torch.device("meta"):
        model = network(layers=3)
    counter = CompileCounterWithBackend("aot_eager")
    layout = Layout(torch.float32, activation_checkpointing=mode, compile_backend=counter)  # type: ignore[arg-type]
    parallel = parallelize(model, build_mesh(MeshPlan(replicate, shard), "cpu"), layout, torch.device("cpu"))
    initialise(parallel.model, seed=3)
    parallel.model.loss_compiler = None  # its two graphs are no block's
    parallel.run.forward_backward([Inputs(*batch()) for _ in range(2)], lambda loss_sum: loss_sum)
    return counter.frame_count, dict(torch._dynamo.utils.counters["graph_break"])


@pytest.mark.long
@pytest.mark.parametrize(("replicate", "shard", "mode"), [(1, 2, "selective"), (2, 1, "none")])
def test_equal_blocks_are_compiled_once(run_ranks: Any, replicate: int, shard: int, mode: str) -> None:
    """One graph for all: else a deep model runs into the recompilation limit and silently goes on uncompiled."""
    assert run_ranks(compiled_graphs, 2, replicate, shard, mode, timeout_s=240) == [(1, {})] * 2
