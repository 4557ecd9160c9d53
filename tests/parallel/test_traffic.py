"""The handbook's arithmetic of what a step sends, in closed form for big models; small ones are counted."""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction
from math import ceil
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quern.model.config import ModelConfig, ModelShape
from quern.model.transformer import Transformer
from quern.parallel.planning import bubble
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan
from quern.parallel.planning.schedules import SCHEDULES
from quern.parallel.planning.traffic import Step, Transfer, elements_held, traffic

BIG = ModelConfig(preset="llama3-8b").shape(128_000)
"""Its weights are multiples of any number of ranks here: nothing is padded."""


def step(plan: MeshPlan, shape: ModelShape = BIG, **changes: Any) -> Step:
    given: dict[str, Any] = {"num_micro_batches": 1, "compute_bytes": 2, "reduce_bytes": 4, "seq_len": 8192} | changes
    own = {field.name: given.pop(field.name) for field in fields(Step) if field.name in given}
    return Step(shape, Layout(torch.bfloat16, plan, **given), **own)


def sent(step: Step, rank: int = 0, axis: str = "") -> int:
    return sum(row.sent for row in traffic(step, rank) if row.axis.startswith(axis))


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("all_reduce", lambda n: Fraction(2 * (n - 1), n)), ("all_gather", lambda n: Fraction(n - 1, n)),
        ("reduce_scatter", lambda n: Fraction(n - 1, n)), ("send", lambda n: Fraction(1)),
    ],
)  # fmt: skip
def test_ring_costs(collective: Any, factor: Any) -> None:
    for ranks in (2, 3, 8, 512):
        for payload in (1, 1000, 14 * 10**9):
            assert Transfer("x", "y", collective, ranks, 1, payload).sent == ceil(factor(ranks) * payload)


def test_an_all_reduce_is_a_reduce_scatter_and_a_gather() -> None:
    made = [Transfer("x", "y", how, 8, 1, 8 * 10**6).sent for how in ("all_reduce", "reduce_scatter", "all_gather")]  # type: ignore[arg-type]
    assert made[0] == made[1] + made[2]


def test_seven_billion_gradients_in_bf16() -> None:
    """14 GB, of which 2(N-1)/N go out: at NVLink's 900 GB/s about 30 ms."""
    seconds = Transfer("dp_replicate", "sum gradients", "all_reduce", 8, 1, 2 * 7 * 10**9).sent / 900e9
    assert 0.02 < seconds < 0.035


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_zero(ranks: int) -> None:
    """With one precision throughout, ZeRO-2 sends what DDP does and ZeRO-3 half as much again (ZeRO, section 7). But
    for embedding, head and last norm, which are kept gathered from forward to backward."""
    changes: dict[str, Any] = {"compute_bytes": 2, "reduce_bytes": 2}
    gradients = 2 * BIG.num_parameters
    ddp = sent(step(MeshPlan(dp_replicate=ranks), **changes))
    zero2 = sent(step(MeshPlan(dp_shard=ranks), reshard_after_forward=False, **changes))
    zero3 = sent(step(MeshPlan(dp_shard=ranks), reshard_after_forward=True, **changes))
    assert ddp == 2 * gradients * (ranks - 1) // ranks
    assert zero2 == ddp
    kept = 2 * (2 * BIG.vocab_size * BIG.dim + BIG.dim) * (ranks - 1) // ranks
    assert zero3 == ddp * 3 // 2 - kept
    assert zero3 / ddp == pytest.approx(1.5, abs=0.07)


def test_micro_batches() -> None:
    """DDP and ZeRO-2's gather send once a step; a shard of gradients costs a scatter of every micro-batch."""
    ddp, zero2 = MeshPlan(dp_replicate=8), MeshPlan(dp_shard=8)
    assert sent(step(ddp, num_micro_batches=16)) == sent(step(ddp))
    once, often = (traffic(step(zero2, reshard_after_forward=False, num_micro_batches=n)) for n in (1, 16))
    assert [row.sent for row in often] == [once[0].sent, 16 * once[1].sent]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("layers", "dim", "ffn_dim"), [(5, 640, 1800), (30, 128, 300), (2, 1024, 9000), (2, 1024, 6272)]
)
def test_ddp_closes_its_buckets_as_torch_does(layers: int, dim: int, ffn_dim: int, tied: bool) -> None:
    """In the order in which gradients come: the head's first, the embedding's last. The last size has matrices of 24.5
    MiB, of which one does not fill a bucket."""
    shape = ModelConfig(num_layers=layers, dim=dim, num_heads=2, ffn_dim=ffn_dim, tied_embeddings=tied).shape(71 * 128)
    with torch.device("meta"):
        parameters = list(Transformer(shape).parameters())
    buckets, _ = dist._compute_bucket_assignment_by_size(parameters[::-1], [2**20, 25 * 2**20])
    (row,) = traffic(step(MeshPlan(dp_replicate=2), shape))
    assert (row.calls, row.payload) == (len(buckets), 4 * shape.num_parameters)


def test_hybrid_shards_talk_in_their_group() -> None:
    """Of what the inner group has scattered each rank sums its eighth with the other groups: 1/8 of the gradients."""
    rows = traffic(step(MeshPlan(dp_replicate=4, dp_shard=8)))
    across = next(row for row in rows if row.axis == "dp_replicate")
    assert across.payload == 4 * BIG.num_parameters // 8
    assert across.sent == 2 * 3 * across.payload // 4
    assert {row.ranks for row in rows if row.axis == "dp_shard"} == {8}


def test_resharding_to_a_node_gathers_there_in_backward() -> None:
    rows = {
        row.ranks: row
        for row in traffic(step(MeshPlan(dp_shard=64), reshard_after_forward=8))
        if row.what == "gather weights"
    }
    blocks = 2 * BIG.num_block_parameters
    rest = 2 * (BIG.num_parameters - BIG.num_block_parameters)
    assert {ranks: row.payload for ranks, row in rows.items()} == {64: blocks + rest, 8: blocks}


def test_uneven_rows_are_sent_as_if_they_were_even() -> None:
    """61 rows over 4 ranks: every one sends 16."""
    odd = ModelConfig(num_layers=1, dim=60, num_heads=1, ffn_dim=61, vocab_multiple=1).shape(127)
    rows = traffic(step(MeshPlan(dp_shard=4), odd, compute_bytes=1, reduce_bytes=1))
    block = 4 * 60 * 60 + 2 * 64 * 60 + 60 * 61 + 2 * 60
    assert [row.payload for row in rows] == [2 * block + (2 * 128 * 60 + 60), block + (2 * 128 * 60 + 60)]
    assert elements_held(step(MeshPlan(dp_shard=4), odd), 0) > elements_held(step(MeshPlan(dp_shard=4), odd), 3)


@pytest.mark.parametrize(("checkpointing", "passes"), [("none", 4), ("full", 6), ("selective", 5)])
def test_tensor_parallel_activations(checkpointing: str, passes: int) -> None:
    """Megatron: two all-reduces a layer forward and two backward, each of all activations. With the sequence sharded
    they are reduce-scatters and gathers, and cost the same (Korthikanti et al. 2022, section 4.2.2); but that what was
    gathered is not kept, and gathered again in backward, half an all-reduce for each of the two. Recomputation repeats
    the forward's two; ``selective`` their gathering halves.
    """
    tokens, tp = 8192, 8
    rows = traffic(step(MeshPlan(tp=tp), activation_checkpointing=checkpointing))
    found = sum(row.sent for row in rows if row.what in ("gather hidden", "scatter hidden"))
    all_reduce = 2 * (tp - 1) * (tokens * BIG.dim * 2) // tp
    ends = 2 * all_reduce  # the embedding's sum and the loss's gather, each with its reverse
    assert found == BIG.num_layers * (passes + 1) * all_reduce + ends
    softmax = next(row for row in rows if row.what == "softmax")
    assert (softmax.payload, softmax.calls) == (3 * 4 * tokens, 2 * 2)


@pytest.mark.parametrize(
    ("checkpointing", "gathers", "scatters"), [("none", 4, 2), ("full", 6, 4), ("selective", 6, 2)]
)
def test_pieces_are_more_messages_of_the_same_bytes(checkpointing: str, gathers: int, scatters: int) -> None:
    """Of a layer: two products that gather their input in forward and two whose gradient is gathered, two that scatter;
    and what recomputation repeats."""
    changes: dict[str, Any] = {"activation_checkpointing": checkpointing}
    whole, cut = (
        {row.what: row for row in traffic(step(MeshPlan(tp=8), tp_pieces=pieces, **changes))} for pieces in (1, 4)
    )
    assert {name: row.payload for name, row in whole.items()} == {name: row.payload for name, row in cut.items()}
    more = {name: row.calls - whole[name].calls for name, row in cut.items()}
    expected = {"gather hidden": 3 * gathers * BIG.num_layers, "scatter hidden": 3 * scatters * BIG.num_layers}
    assert more == dict.fromkeys(whole, 0) | expected


def test_norms_are_summed_over_tp_once_a_step() -> None:
    for plan in (MeshPlan(tp=8), MeshPlan(tp=8, dp_shard=4)):
        (row,) = (row for row in traffic(step(plan, num_micro_batches=4)) if row.what == "partial gradients")
        assert (row.calls, row.payload) == (1, 4 * (2 * BIG.num_layers + 1) * BIG.dim // plan.dp_shard)


def test_shared_key_heads_are_summed_too() -> None:
    (row,) = (row for row in traffic(step(MeshPlan(tp=16))) if row.what == "partial gradients")
    norms = (2 * BIG.num_layers + 1) * BIG.dim
    assert row.payload == 4 * (norms + BIG.num_layers * 2 * BIG.num_kv_heads * BIG.head_dim * BIG.dim)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_pipeline_activations(schedule: str) -> None:
    """Hidden states go once over every border between stages that are on two ranks, and their gradients back."""
    pp, micro_batches = 4, 8
    kind = SCHEDULES[schedule]
    stages = pp * (kind.stages_per_rank or 2)
    changes: dict[str, Any] = {"num_micro_batches": micro_batches, "schedule": schedule}
    one = 8192 * BIG.dim * 2
    borders = stages - 1 - (1 if kind.v_shaped else 0)
    everywhere = sum(sent(step(MeshPlan(pp=pp), **changes), rank) for rank in range(pp))
    assert everywhere == 2 * borders * micro_batches * one
    split = step(MeshPlan(pp=pp, tp=2), **changes)
    assert sum(sent(split, 2 * rank, "pp") for rank in range(pp)) == everywhere // 2  # the sequence is sharded


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_pipeline_gathers_and_sums_once_a_step(schedule: str) -> None:
    """Weights stay gathered; the ranks of a pipeline share out what ZeRO-2 would send of one micro-batch."""
    changes: dict[str, Any] = {"num_micro_batches": 8, "schedule": schedule, "reshard_after_forward": False}
    ranks = [sent(step(MeshPlan(pp=4, dp_shard=8), **changes), 8 * rank, "dp") for rank in range(4)]
    assert sum(ranks) == sent(step(MeshPlan(dp_shard=8), reshard_after_forward=False), 0, "dp")


def test_tied_embeddings_are_summed_between_the_ends_of_a_pipeline() -> None:
    tied = ModelConfig(preset="1B").shape(128_000)
    for schedule, expected in (("1f1b", [1, 0, 0, 1]), ("interleaved_1f1b", [1, 0, 0, 1]), ("dualpipe_v", [0] * 4)):
        made = step(MeshPlan(pp=4, dp_shard=2), tied, num_micro_batches=8, schedule=schedule)
        found = [[row for row in traffic(made, 2 * rank) if row.what == "tied gradients"] for rank in range(4)]
        assert [len(rows) for rows in found] == expected
        for row in (row for rows in found for row in rows):
            assert (row.collective, row.sent) == ("send", 4 * tied.vocab_size * tied.dim // 2)


def test_what_is_held_adds_up() -> None:
    """Over all ranks each weight once; but norms, which every rank of tp holds, and the copy of a tied embedding."""
    assert elements_held(step(MeshPlan())) == BIG.num_parameters
    first = step(MeshPlan(pp=4), num_micro_batches=8)
    assert elements_held(first) == elements_held(first, 0) != elements_held(first, 3)
    plan = MeshPlan(pp=4, dp_shard=2, tp=2)
    norms = (2 * BIG.num_layers + 1) * BIG.dim
    assert sum(elements_held(step(plan, num_micro_batches=8), rank) for rank in range(16)) == BIG.num_parameters + norms
    tied = ModelConfig(preset="1B").shape(128_000)
    held = sum(elements_held(step(MeshPlan(pp=4), tied, num_micro_batches=8), rank) for rank in range(4))
    assert held == tied.num_parameters + tied.vocab_size * tied.dim


def test_the_order_of_a_pipeline_is_made_once_for_all_its_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes that of all ranks at once, in a third of a second for sixteen of them."""
    made = []
    torch_order = bubble._torch_order

    def counted(*args: Any) -> Any:
        made.append(args)
        return torch_order(*args)

    monkeypatch.setattr(bubble, "_torch_order", counted)
    bubble.order.cache_clear()
    plan = step(MeshPlan(pp=4), schedule="looped_bfs", num_micro_batches=12)
    for rank in range(4):
        assert traffic(plan, rank)
        assert elements_held(plan, rank)
    bubble.bubble("looped_bfs", 4, 2, 12)
    assert len(made) == 1
