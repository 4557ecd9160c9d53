"""What a rank holds, in closed form: the formulas and figures of ZeRO's paper (Rajbhandari et al. 2020, table 1)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quern.model.config import ModelConfig
from quern.parallel.planning.held import held
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan
from quern.parallel.planning.traffic import Step, traffic

BIG = ModelConfig(preset="llama3-8b").shape(128_000)
"""Its weights are multiples of any number of ranks here: nothing is padded."""
ALL = BIG.num_parameters
ENDS = 2 * BIG.vocab_size * BIG.dim + BIG.dim


def stage(zero: int, ranks: int, micro_batches: int = 8, plan: MeshPlan | None = None, **changes: Any) -> Step:
    plan = MeshPlan(dp_shard=ranks) if plan is None else plan
    layout = Layout(torch.bfloat16, plan, reshard_after_forward=zero == 3, zero=zero, **changes)
    return Step(BIG, layout, micro_batches, compute_bytes=2, reduce_bytes=4)


@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
@pytest.mark.parametrize(("zero", "gigabytes"), [(1, {64: 31.4}), (2, {64: 16.6}), (3, {})])
def test_formulas_of_the_paper(zero: int, gigabytes: dict[int, float], ranks: int) -> None:
    """With gradients in BF16 and moments in FP32, K = 12, between the micro-batches of a step: 4Ψ + KΨ/N, 2Ψ + (2 +
    K)Ψ/N, and (2 + K)Ψ/N without the paper's shards of half-precision weights, which FSDP2 makes when it gathers."""
    told = held(stage(zero, ranks, bf16_gradients=True), 4)
    between = told.weights + told.moments + (told.whole_gradients if zero == 1 else told.gradients)
    between += told.gathered if zero < 3 else 0
    assert between * ranks == {1: 4 * ranks + 12, 2: 2 * ranks + 14, 3: 14}[zero] * ALL
    assert told.gathered == (2 * ENDS if zero == 3 else 2 * ALL)
    if ranks in gigabytes:
        assert between / ALL * 7.5 == pytest.approx(gigabytes[ranks], abs=0.05)


def test_whole_gradients_are_in_the_dtype_in_which_they_are_reduced() -> None:
    assert held(stage(1, 8), 4).whole_gradients == 4 * ALL
    assert held(stage(1, 8, bf16_gradients=True), 4).whole_gradients == 2 * ALL
    assert held(stage(1, 8, micro_batches=1), 4).whole_gradients == 0
    assert held(stage(2, 8), 4).whole_gradients == held(stage(3, 8), 4).whole_gradients == 0
    split = held(stage(1, 8, plan=MeshPlan(dp_shard=8, tp=2)), 4)
    assert split.whole_gradients == 2 * (ALL + (2 * BIG.num_layers + 1) * BIG.dim)  # norms are whole on either rank


def test_without_fsdp_nothing_comes_and_goes() -> None:
    told = held(Step(BIG, Layout(torch.bfloat16, MeshPlan(dp_replicate=8)), 8, 2, 4), 2)
    assert vars(told) == {
        "weights": 4 * ALL, "moments": 4 * ALL, "gradients": 4 * ALL, "gathered": 0, "whole_gradients": 0,
    }  # fmt: skip


@pytest.mark.parametrize("plan", [MeshPlan(dp_shard=8), MeshPlan(2, 4)], ids=str)
def test_1_sends_in_a_step_what_2_sends_with_one_micro_batch(plan: MeshPlan) -> None:
    once, often, single = (traffic(stage(z, 8, n, plan)) for z, n in ((1, 64), (2, 64), (2, 1)))
    assert once == single
    scattered = {name: sum(row.calls for row in rows if row.collective == "reduce_scatter")
                 for name, rows in (("once", once), ("often", often))}  # fmt: skip
    assert scattered["often"] == 64 * scattered["once"]
    assert [row for row in often if row.collective != "reduce_scatter"] == [
        row for row in once if row.collective != "reduce_scatter"
    ]  # fmt: skip
