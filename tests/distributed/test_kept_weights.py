"""Weights that are cast once after an update, and gradients that are added as they are formed: no bit changes, no
change of a weight is missed, and so much less is read and written."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quern.model.config import ModelConfig, ModelShape
from quern.model.float8.recipe import Recipe
from quern.model.init import initialise
from quern.model.transformer import Linear, Transformer
from quern.parallel.apply import Parallel, parallelize
from quern.parallel.context.inputs import Inputs
from quern.parallel.kept_weights import KeptWeights
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan, build_mesh

MICRO_BATCHES, STEPS, VOCABULARY = 3, 3, 100
KEPT = Layout(torch.bfloat16)
PER_USE = Layout(torch.bfloat16, weights_cast="per_use")
RECIPES = {
    "bf16": None, "tensorwise": Recipe("tensorwise"), "rowwise": Recipe("rowwise"), "blockwise": Recipe("blockwise"),
    "delayed": Recipe("tensorwise", delayed=True),
}  # fmt: skip


def shape_of(tied: bool = False, dim: int = 32, layers: int = 2) -> ModelShape:
    config = ModelConfig(
        num_layers=layers, dim=dim, num_heads=4, num_kv_heads=4, ffn_dim=2 * dim, vocab_multiple=64,
        tied_embeddings=tied,
    )  # fmt: skip
    return config.shape(vocab_size=VOCABULARY)


def built(layout: Layout, shape: ModelShape | None = None) -> Parallel:
    model = Transformer(shape or shape_of(), compute_dtype=layout.compute_dtype, loss_chunk=16)
    parallel = parallelize(model, build_mesh(layout.plan, "cpu"), layout, torch.device("cpu"))
    initialise(parallel.model, seed=2)
    return parallel


def inputs_of(number: int) -> Inputs:
    tokens_BL = torch.randint(VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(number))
    return Inputs(tokens_BL[:, :-1], tokens_BL[:, 1:], None, None)


def step_of(parallel: Parallel, first: int, micro_batches: int = MICRO_BATCHES) -> torch.Tensor:
    """Divided by a power of two: the head's gradient is multiplied and added in one, with one rounding less."""
    return parallel.run.forward_backward([inputs_of(first + n) for n in range(micro_batches)], lambda loss: loss / 128)


def gradients_of(parallel: Parallel) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parallel.model.parameters() if parameter.grad is not None]


def trained(layout: Layout, shape: ModelShape, steps: int = STEPS) -> list[torch.Tensor]:
    """Losses, held-out losses between the steps, gradients and weights."""
    torch.manual_seed(0)
    parallel = built(layout, shape)
    optimizer = torch.optim.AdamW(parallel.model.parameters(), lr=1e-2, fused=True)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        found.append(step_of(parallel, 10 * step))
        found += [gradient.clone() for gradient in gradients_of(parallel)]
        optimizer.step()
        if parallel.amaxes is not None:
            parallel.amaxes.roll()
        with parallel.evaluating():
            found.append(parallel.run.forward([inputs_of(99)]))
    return [*found, *(parameter.detach() for parameter in parallel.model.parameters())]


@pytest.mark.parametrize(
    "recipe", ["bf16", "tensorwise", *(pytest.param(own, marks=pytest.mark.long) for own in [*RECIPES][2:])]
)
def test_no_bit_changes(recipe: str) -> None:
    shape = shape_of(dim=128 if recipe == "blockwise" else 32)
    kept, per_use = (trained(replace(layout, float8=RECIPES[recipe]), shape) for layout in (KEPT, PER_USE))
    assert len(kept) == len(per_use) > STEPS * 20
    assert all(torch.equal(a, b) for a, b in zip(kept, per_use, strict=True))


def test_tied_embeddings_differ_in_the_order_of_sums_alone() -> None:
    kept, per_use = (trained(layout, shape_of(tied=True)) for layout in (KEPT, PER_USE))
    for a, b in zip(kept, per_use, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_are_those_of_the_rounded_weights() -> None:
    """Beside float64's of the weights as BF16 has them: what BF16's activations lose is left."""
    parallel = built(KEPT)
    rounded = copy.deepcopy({name: value.detach() for name, value in parallel.model.named_parameters()})
    exact = Transformer(shape_of(), compute_dtype=torch.float64).double()
    exact.load_state_dict({
        name: (value if "norm" in name else value.bfloat16()).double() for name, value in rounded.items()
    })  # fmt: skip
    for number in range(MICRO_BATCHES):
        batch = inputs_of(number)
        (exact(batch.tokens_BL, batch.targets_BL)[0] / 128).backward()
    step_of(parallel, 0)
    for (name, found), expected in zip(parallel.model.named_parameters(), exact.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        error = (found.grad.double() - expected.grad).norm() / expected.grad.norm()
        assert error < 0.02, f"{name}: {error:.3f}"


CHANGES = {
    "a fused optimizer": lambda model: stepped(model, fused=True),
    "an optimizer that is not": lambda model: stepped(model, fused=False),
    "a checkpoint": lambda model: model.load_state_dict({name: -value for name, value in model.state_dict().items()}),
    "one weight alone": lambda model: model.blocks["1"].ffn.w2.weight.detach().mul_(-1),
    "a row of the head": lambda model: model.head.weight.detach()[3].mul_(5),
}


def stepped(model: Transformer, *, fused: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    optimizer.step()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("recipe", ["bf16", "tensorwise"])
def test_every_change_of_a_weight_is_seen(change: str, recipe: str) -> None:
    found = []
    for layout in (KEPT, PER_USE):
        parallel = built(replace(layout, float8=RECIPES[recipe]))
        before = step_of(parallel, 0)
        CHANGES[change](parallel.model)
        found.append(parallel.run.forward([inputs_of(0)]))
        assert not torch.equal(found[-1], before / MICRO_BATCHES)
    assert torch.equal(*found)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_begin_anew_however_they_were_cleared(set_to_none: bool) -> None:
    parallel = built(KEPT)
    once = step_of(parallel, 0), [gradient.clone() for gradient in gradients_of(parallel)]
    parallel.model.zero_grad(set_to_none=set_to_none)
    assert torch.equal(step_of(parallel, 0), once[0])
    assert all(torch.equal(a, b) for a, b in zip(gradients_of(parallel), once[1], strict=True))


def test_gradients_that_are_not_cleared_are_added_to() -> None:
    found = []
    for layout in (KEPT, PER_USE):
        parallel = built(layout)
        step_of(parallel, 0)
        for parameter in parallel.model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 2  # another tensor than the one that was added to
        step_of(parallel, 10)
        found.append([gradient.clone() for gradient in gradients_of(parallel)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_weight_that_is_not_trained_gets_no_gradient() -> None:
    model = Transformer(shape_of(), compute_dtype=torch.bfloat16)
    model.requires_grad_(False)
    model.blocks["0"].ffn.w1.weight.requires_grad_(True)
    parallelize(model, build_mesh(MeshPlan(), "cpu"), KEPT, torch.device("cpu"))
    initialise(model, seed=2)
    batch = inputs_of(0)
    model(batch.tokens_BL, batch.targets_BL)[0].backward()
    trained = {name for name, value in model.named_parameters() if value.grad is not None}
    assert trained == {"blocks.0.ffn.w1.weight"}


def test_a_forward_without_gradients_begins_none() -> None:
    parallel = built(KEPT)
    parallel.run.forward([inputs_of(0)])
    assert not gradients_of(parallel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_in_the_dtype_of_activations_are_not_kept(dtype: torch.dtype) -> None:
    model = Transformer(shape_of(), compute_dtype=dtype).to(dtype)
    kept = KeptWeights(model, dtype, add_gradients=True, compiler=None)
    assert kept.weights == []
    assert model.output_weight is model.before_forward is None
    assert all(layer.kept is None for layer in model.modules() if isinstance(layer, Linear))


def test_what_is_kept_goes_with_the_model() -> None:
    hooks = _global_optimizer_post_hooks
    before = len(hooks)
    parallel = built(KEPT)
    assert len(hooks) == before + 1
    del parallel
    gc.collect()
    assert len(hooks) == before


def trained_on(plan: MeshPlan) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of a rank, sums of losses and weights after two steps in BF16, kept and cast per use."""
    found = []
    for layout in (KEPT, PER_USE):
        parallel = built(replace(layout, plan=plan, micro_batch=2, seq_len=16))
        optimizer = torch.optim.SGD(parallel.model.parameters(), lr=0.5)
        losses = []
        for step in range(2):
            optimizer.zero_grad()
            losses.append(step_of(parallel, 100 * torch.distributed.get_rank() * (plan.pp == 1) + 10 * step, 2))
            optimizer.step()
        losses.append(parallel.run.forward([inputs_of(7), inputs_of(8)]))
        weights = [getattr(value, "_local_tensor", value).detach() for value in parallel.model.parameters()]
        assert bool(parallel.kept) is layout.keeps_weights(plan)
        found.append([*losses, *weights])
    return found[0], found[1]


@pytest.mark.parametrize(
    "plan",
    [
        MeshPlan(dp_replicate=2), MeshPlan(pp=2), pytest.param(MeshPlan(tp=2), marks=pytest.mark.long),
        pytest.param(MeshPlan(pp=2, dp_replicate=2), marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_ranks_train_the_same(kept_ranks: Any, plan: MeshPlan) -> None:
    for kept, per_use in kept_ranks(trained_on, plan.world_size, plan):
        assert all(torch.equal(a, b) for a, b in zip(kept, per_use, strict=True))


@pytest.mark.parametrize(
    ("plan", "keeps", "adds"),
    [
        (MeshPlan(), True, True), (MeshPlan(dp_replicate=2), True, False), (MeshPlan(pp=2), True, False),
        (MeshPlan(dp_shard=2), False, False), (MeshPlan(tp=2), False, False),
        (MeshPlan(pp=2, dp_replicate=2), False, False), (MeshPlan(dp_replicate=2, dp_shard=2), False, False),
        (MeshPlan(pp=2, tp=2), False, False),
    ],
)  # fmt: skip
def test_which_layouts_keep_weights(plan: MeshPlan, keeps: bool, adds: bool) -> None:
    assert (KEPT.keeps_weights(plan), KEPT.adds_gradients(plan)) == (keeps, adds)
    assert not PER_USE.keeps_weights(plan)
    assert not PER_USE.adds_gradients(plan)


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "backend", "mode"),
    [("bf16", "aot_eager", "none"), ("tensorwise", "aot_eager", "none"), ("delayed", "aot_eager", "none"),
     ("bf16", "aot_eager", "full"), ("bf16", "eager", "full"), ("bf16", "eager", "selective")],
)  # fmt: skip
def test_compiled_blocks_keep_them_too(recipe: str, backend: str, mode: str) -> None:
    how = {"float8": RECIPES[recipe], "compile_backend": backend, "activation_checkpointing": mode}
    layouts = [replace(layout, **how) for layout in (KEPT, PER_USE)]
    kept, per_use = (trained(layout, shape_of(layers=1), steps=2) for layout in layouts)
    assert all(torch.equal(a, b) for a, b in zip(kept, per_use, strict=True))


class Traffic(TorchDispatchMode):
    """Bytes read and written of the blocks' matrices and their gradients by what stands between the products."""

    CASTS = ("_to_copy", "_foreach_copy_")
    IN_PLACE = ("_foreach_copy_", "_foreach_zero_", "add_", "add_product")

    def __init__(self, sizes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.sizes = sizes
        self.weights = self.gradients = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in (*self.CASTS, *self.IN_PLACE):
            read, written = (
                [
                    leaf
                    for leaf in tree_leaves(tree)
                    if isinstance(leaf, torch.Tensor) and tuple(leaf.shape) in self.sizes
                ]
                for tree in (args, out)
            )
            if name == "_foreach_copy_":  # sources and places
                written, read = read[: len(read) // 2], read[len(read) // 2 :]
            elif name == "_foreach_zero_":
                written, read = read, []
            elif name in self.IN_PLACE:
                written = read[:1]
            moved = sum(tensor.nbytes for tensor in [*read, *written])
            if name in self.CASTS and read and read[0].dtype == torch.float32:
                self.weights += moved
            else:
                self.gradients += moved
        return out


def test_how_much_less_is_read_and_written() -> None:
    """Of each number of a matrix, in bytes a step of three micro-batches. What the product itself writes of a gradient
    is on top of the second: 2 for each."""
    found = {}
    for name, layout in (("kept", KEPT), ("per use", PER_USE)):
        parallel = built(layout, shape_of(dim=40))  # no size of which is the number of tokens
        matrices = [value for key, value in parallel.model.named_parameters() if "blocks" in key and value.ndim == 2]
        optimizer = torch.optim.AdamW(parallel.model.parameters(), fused=True)
        step_of(parallel, 0)
        optimizer.step()
        optimizer.zero_grad()
        with Traffic({tuple(matrix.shape) for matrix in matrices}) as traffic:
            step_of(parallel, 10)
        numbers = sum(matrix.numel() for matrix in matrices)
        found[name] = traffic.weights / numbers, traffic.gradients / numbers
    cast, zeroed, added, turned, accumulated = 4 + 2, 4, 4 + 4, 2 + 4, 4 + 4 + 4
    assert found["per use"] == (3 * cast, 3 * turned + 2 * accumulated)  # the first is taken as it is
    assert found["kept"] == (cast, zeroed + 3 * added)
