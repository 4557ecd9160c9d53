"""What is planned for models with experts: weights of ranks and stages, against the network; and refusals."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

from quern.errors import InputError
from quern.model.config import ModelConfig, ModelShape
from quern.model.float8.recipe import Recipe
from quern.model.transformer import Transformer
from quern.parallel.planning.checks import Task, check_layout
from quern.parallel.planning.held import held
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan
from quern.parallel.planning.stages import stage_costs, stage_layers, stage_parameters
from quern.parallel.planning.traffic import Step, elements_held, traffic
from quern.parallel.planning.weights import block_weights

SIZES: dict[str, Any] = {
    "num_layers": 6, "dim": 16, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 32, "vocab_multiple": 1,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "top_k": 2, "ffn_dim": 8, "first_dense": 1, "every": 2, "shared_ffn_dim": 4, "shared_gate": True,
}  # fmt: skip


def shape_of(sizes: dict[str, Any] | None = None, **experts: Any) -> ModelShape:
    return ModelConfig(**SIZES | (sizes or {}), moe=EXPERTS | experts).shape(40)


@pytest.mark.parametrize("qk_norm", [False, True, "whole"])
def test_weights_are_those_of_the_network_in_its_order(qk_norm: Any) -> None:
    shape = shape_of({"qk_norm": qk_norm})
    with torch.device("meta"):
        model = Transformer(shape)
    for number, block in model.blocks.items():
        found = [weight.shape for weight in block_weights(shape, 1, int(number))]
        assert sorted(found) == sorted(tuple(p.shape) for p in block.parameters())
        if not qk_norm:  # where these stand has never mattered
            assert found == [tuple(p.shape) for p in block.parameters()]


def test_ranks_hold_and_send_all_of_it() -> None:
    """Of a model of whose layers two have experts; 8 of anything is dealt out to 2, 4 and 8 ranks without rest."""
    shape = shape_of({"dim": 32, "num_layers": 5}, shared_ffn_dim=8, shared_gate=False)
    total = shape.num_parameters
    for ranks in (2, 4, 8):
        step = Step(shape, Layout(torch.float32, MeshPlan(dp_shard=ranks)), 1, compute_bytes=4, reduce_bytes=4)
        assert [elements_held(step, rank) * ranks for rank in range(ranks)] == [total] * ranks
        ends = 2 * 40 * 32 + 32
        rows = {row.what: row.payload for row in traffic(step)}
        assert rows["sum gradients"] == 4 * total
        assert rows["gather weights"] == 4 * (2 * (total - ends) + ends)
        kept = Step(shape, Layout(torch.float32, MeshPlan(dp_shard=ranks), reshard_after_forward=False), 1, 4, 4)
        assert held(kept, 4).gathered == 4 * total
    ddp = Step(shape, Layout(torch.float32, MeshPlan(dp_replicate=2)), 1, compute_bytes=4, reduce_bytes=4)
    assert [row.payload for row in traffic(ddp)] == [4 * total]


def test_stages_are_cut_by_what_a_token_is_multiplied_by() -> None:
    shape = shape_of({"num_layers": 4}, first_dense=2, every=1, num_experts=64, shared_ffn_dim=0, shared_gate=False)
    layers = [range(2), range(2, 4)]
    with torch.device("meta"):
        model = Transformer(shape)
    sizes = [sum(p.numel() for n in stage for p in model.blocks[str(n)].parameters()) for stage in layers]
    assert stage_parameters(shape, layers) == [sizes[0] + 40 * 16, sizes[1] + 41 * 16]
    matrices = [sum(prod(w.shape) for w in block_weights(shape, 1, n) if len(w.shape) == 2) for n in range(4)]
    active = [matrices[0] + matrices[1], matrices[2] + matrices[3] + 2 * 2 * 3 * 16 * 8]
    attention = 2 * 2 * 16 * 10
    assert stage_costs(shape, layers, 10) == [2 * active[0] + attention, 2 * active[1] + attention + 2 * 40 * 16]
    wide = shape_of({"num_layers": 6}, first_dense=2, every=1, ffn_dim=64, top_k=4)
    assert [len(stage) for stage in stage_layers(wide, 2, 10)] == [4, 2]


@pytest.mark.parametrize(
    ("layout", "experts", "message"),
    [
        (
            {"plan": MeshPlan(tp=4)},
            {"ffn_dim": 6},
            "parallel.tp: does not go with experts (model.moe): expected a divisor of",
        ),
        (
            {"float8": Recipe("tensorwise", delayed=True)},
            {},
            "float8.delayed: does not go with experts (model.moe): their rows are other ones in each step; expected "
            "false, or recipe blockwise",
        ),
        (
            {"float8": Recipe("rowwise", implementation="torchao")},
            {},
            "float8.implementation: does not go with experts (model.moe): torchao computes linear layers; expected "
            "quern, as with recipe blockwise",
        ),
        (
            {"float8": Recipe("blockwise"), "float8_all_gather": True, "plan": MeshPlan(dp_shard=2)},
            {},
            "float8.all_gather: does not go with experts (model.moe): their weights are gathered in the dtype of "
            "activations; expected false, as with recipe blockwise",
        ),
        (
            {"float8": Recipe("blockwise")},
            {},
            "float8.recipe: blockwise takes matrices whose sizes are multiples of 128, and no layer has such on a rank "
            "(attention.wq 16×16, attention.wk 8×16, attention.wv 8×16, attention.wo 16×16, ffn.w1 32×16, "
            "ffn.w2 16×32, ffn.w3 32×16, ffn.experts 8×16, ffn.shared.w1 4×16, ffn.shared.w2 16×4, ffn.shared.w3 4×16)",
        ),
        (
            {"plan": MeshPlan(cp=2)},
            {"capacity": 1.0},
            "model.moe.capacity: does not go with experts (model.moe): with parallel.cp or tp",
        ),
    ],
)
def test_what_training_does_not_do_yet_is_refused(layout: Any, experts: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_layout(shape_of(**experts), Layout(torch.float32, seq_len=32, **{"plan": MeshPlan()} | layout), TASK)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


TASK = Task({"global_batch": 8})


def test_norms_over_all_heads_are_not_split_over_ranks() -> None:
    shape = ModelConfig(**SIZES, qk_norm="whole").shape(40)
    with pytest.raises(InputError, match=r"parallel.tp: expected 1 with model.qk_norm whole, whose norms are over all"):
        check_layout(shape, Layout(torch.float32, seq_len=32, plan=MeshPlan(tp=2)), TASK)


@pytest.mark.parametrize("plan", [MeshPlan(), MeshPlan(2, 2), MeshPlan(cp=2), MeshPlan(pp=2), MeshPlan(dp_shard=4)])
def test_other_layouts_are_taken(plan: MeshPlan) -> None:
    check_layout(shape_of(), Layout(torch.float32, seq_len=32, plan=plan), TASK)
    check_layout(shape_of(capacity=1.5), Layout(torch.float32, seq_len=32, plan=MeshPlan(2, 2)), TASK)


def test_a_number_of_ranks_to_reshard_to_is_of_rows_alone() -> None:
    """Four ranks divide eight experts, and of six not even the number, but the model's width."""
    layout = Layout(torch.float32, seq_len=32, plan=MeshPlan(dp_shard=4), reshard_after_forward=2)
    check_layout(shape_of(), layout, TASK)
    with pytest.raises(InputError, match=r"reshard_after_forward: FSDP2 takes a number for rows alone, and 4 ranks"):
        check_layout(shape_of(num_experts=6), layout, TASK)
    check_layout(shape_of({"dim": 18, "head_dim": 4}, num_experts=6), layout, TASK)
