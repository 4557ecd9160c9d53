"""Times of messages, schedules and kernels against formulas and simulations of the tests' own."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from quern.model.config import ModelConfig
from quern.model.float8.recipe import Recipe
from quern.parallel.planning.bubble import makespan, order
from quern.parallel.planning.context import Context
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan
from quern.parallel.planning.step import Step
from quern.parallel.planning.traffic import traffic
from quern.planner.hardware import Hardware, Link, load_hardware, names
from quern.planner.time.estimate import estimate
from quern.planner.time.messages import collective
from quern.planner.time.products import attention, product

H100 = load_hardware("h100")
GRADIENTS_7B = 14e9
"""[bytes] In BF16."""


def perfect(hardware: Hardware = H100, **changes: Any) -> Hardware:
    """Without latencies and kernel overheads, and with everything at its peak."""
    full = dict.fromkeys(type(hardware.efficiency).model_fields, 1.0)
    free = {
        "inside": Link(bytes_per_s=hardware.inside.bytes_per_s, latency_s=0.0),
        "outside": Link(bytes_per_s=hardware.outside.bytes_per_s, latency_s=0.0),
        "kernel_s": 0.0, "efficiency": hardware.efficiency.model_copy(update=full),
    }  # fmt: skip
    return hardware.model_copy(update=free | changes)


def step(preset: str = "llama3-8b", number: int = 1, model: dict[str, Any] | None = None, **layout: Any) -> Step:
    shape = ModelConfig(preset=preset, **(model or {})).shape(128_256)  # type: ignore[arg-type]
    settings = {"micro_batch": 1, "seq_len": 8192, "compile_backend": "inductor"} | layout
    plan = MeshPlan(**settings.pop("plan", {}))
    return Step(shape, Layout(torch.bfloat16, plan, **settings), number, compute_bytes=2, reduce_bytes=4)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_collectives_in_a_node_take_what_a_ring_takes(ranks: int) -> None:
    share, link = (ranks - 1) / ranks, H100.inside.bytes_per_s
    times = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share}
    for kind, expected in times.items():
        assert collective(perfect(), kind, 1e9, ranks, 1) == pytest.approx(expected * 1e9 / link)


@pytest.mark.parametrize("ranks", [2, 16])
def test_with_one_rank_a_node_a_ring_goes_over_the_network(ranks: int) -> None:
    expected = 2 * (ranks - 1) / ranks * 1e9 / H100.outside.bytes_per_s
    assert collective(perfect(), "all_reduce", 1e9, ranks, 8) == pytest.approx(expected)


def test_over_nodes_each_gpu_brings_its_share_over_the_network() -> None:
    """Counted message by message: 4 nodes of 8, a gather of 32 equal parts. Each GPU gets the parts of its 3 peers from
    the network, and passes 4 parts each on to 7 others, of whom it gets as much, over NVLink."""
    part = 1e9 / 32
    network, inside = 3 * part / H100.outside.bytes_per_s, (32 - 1) * part / H100.inside.bytes_per_s
    assert collective(perfect(), "all_gather", 1e9, 32, 1) == pytest.approx(max(network, inside))
    slow = perfect(outside=Link(bytes_per_s=1e9, latency_s=0.0))
    assert collective(slow, "all_gather", 1e9, 32, 1) == pytest.approx(3 * part / 1e9)
    # an exchange: 24 of 32 parts leave the node
    assert collective(slow, "all_to_all", 1e9, 32, 1) == pytest.approx(24 * part / 1e9)


def test_a_collective_has_the_latency_of_its_hops() -> None:
    hops = 7 * H100.inside.latency_s + 3 * H100.outside.latency_s
    assert collective(H100, "all_gather", 0, 32, 1) == pytest.approx(hops)
    assert collective(H100, "all_reduce", 0, 32, 1, 10) == pytest.approx(2 * 10 * hops)


def test_gradients_of_7b_take_30_ms_on_nvlink_and_250_ms_and_more_across_nodes() -> None:
    """The 30 ms go by 900 GB/s, which an H100 has in both directions together, and a B200 in one; a ring uses one."""
    by_sheet = perfect(inside=Link(bytes_per_s=900e9, latency_s=0.0))
    assert collective(by_sheet, "all_reduce", GRADIENTS_7B, 8, 1) == pytest.approx(0.030, rel=0.1)
    assert collective(perfect(load_hardware("b200")), "all_reduce", GRADIENTS_7B, 8, 1) == pytest.approx(0.030, rel=0.1)
    assert 0.05 < collective(H100, "all_reduce", GRADIENTS_7B, 8, 1) < 0.08
    assert collective(H100, "all_reduce", GRADIENTS_7B, 8, 8) >= 0.25


def spans(schedule: str, pp: int, stages_per_rank: int, number: int) -> float:
    """Of a schedule whose forwards take 1 / stages_per_rank and backwards twice that, the share in which ranks wait."""
    one = 1 / stages_per_rank
    times = [(one, 2 * one, one, one)] * (pp * stages_per_rank)
    return 1 - 3 * number / makespan(schedule, pp, stages_per_rank, number, times, 0.0)


@pytest.mark.parametrize(("pp", "number"), [(4, 12), (8, 8), (16, 48)])
def test_bubble_of_1f1b_and_of_schedules_with_less(pp: int, number: int) -> None:
    plain = spans("1f1b", pp, 1, number)
    assert plain == pytest.approx((pp - 1) / (pp - 1 + number))
    assert spans("gpipe", pp, 1, number) == pytest.approx(plain)
    interleaved = spans("interleaved_1f1b", pp, 2, number)
    assert interleaved == pytest.approx((pp - 1) / (pp - 1 + 2 * number))
    assert spans("interleaved_zero_bubble", pp, 2, number) < interleaved < plain
    assert spans("zbv_zero_bubble", pp, 2, max(number, 2 * pp)) < spans("1f1b", pp, 1, max(number, 2 * pp))


@pytest.mark.parametrize(
    ("schedule", "pp", "per_rank", "number"),
    [("1f1b", 3, 1, 5), ("gpipe", 3, 1, 4), ("interleaved_1f1b", 2, 2, 4), ("interleaved_zero_bubble", 2, 2, 4),
     ("zbv_zero_bubble", 2, 2, 5), ("dualpipe_v", 2, 2, 5)],
)  # fmt: skip
def test_the_schedule_against_a_simulation_in_small_steps(schedule: str, pp: int, per_rank: int, number: int) -> None:
    """A clock ticks; at each tick every idle rank begins its next item if what it needs has arrived."""
    last = pp * per_rank - 1
    times = [(3 + stage % 3, 6 + stage % 2, 4 - stage % 2, 2 + stage % 3) for stage in range(last + 1)]
    ranks, hop, arrived = order(schedule, pp, per_rank, number), 2, {}  # when an item's result is on its own rank
    owner = {action.stage: rank for rank, actions in enumerate(ranks) for action in actions}
    queues = [list(actions) for actions in ranks]
    free = [0] * pp
    for now in itertools.count():
        if not any(queues):
            break
        for rank, queue in enumerate(queues):
            if free[rank] > now or not queue:
                continue
            stage, kind, micro = queue[0]
            other = stage - 1 if kind == "F" else stage + 1
            if kind != "W" and 0 <= other <= last:
                came = arrived.get((other, kind == "F", micro))
                if came is None or came + hop * (owner[other] != rank) > now:
                    continue
            queue.pop(0)
            free[rank] = now + times[stage]["FBIW".index(kind)]
            if kind != "W":
                arrived[stage, kind == "F", micro] = free[rank]
    assert makespan(schedule, pp, per_rank, number, times, hop) == max(free)


def test_a_product_takes_its_flops_or_its_bytes_and_an_overhead() -> None:
    large = product(perfect(), 8192, 8192, 8192)
    assert large == pytest.approx(2 * 8192**3 / H100.flops)
    assert product(perfect(), 8192, 8192, 8192, float8=True) == pytest.approx(2 * 8192**3 / 1979e12)
    # one row: the weight is read
    assert product(perfect(), 1, 8192, 8192) == pytest.approx(2 * (8192**2 + 2 * 8192) / 3.35e12)
    assert product(perfect(), 4097, 8192, 8192) == product(perfect(), 4224, 8192, 8192)  # rows in tiles
    reached = [2 * n**3 / product(H100, n, n, n) / H100.flops for n in (256, 1024, 4096, 16384)]
    assert reached == sorted(reached)
    assert reached[-1] == pytest.approx(H100.efficiency.products, rel=0.01)


def test_attention_is_counted_pair_by_pair() -> None:
    one = step(seq_len=256, plan={"tp": 2})
    pairs = sum(query + 1 for query in range(256))
    flops = 2 * 2 * pairs * one.shape.head_dim * one.shape.num_heads / 2
    assert attention(one, perfect()) == pytest.approx(flops / H100.flops, rel=1 / 256)


def test_compute_of_a_step_is_the_models_flops_at_the_peak() -> None:
    hardware = perfect(memory_bytes_per_s=1e30)
    found = estimate(step(number=4), hardware)
    shape = step().shape
    products = 6 * (shape.num_parameters - shape.vocab_size * shape.dim - (2 * shape.num_layers + 1) * shape.dim)
    assert found.parts["products"] == pytest.approx(4 * 8192 * products / H100.flops, rel=1e-3)
    # forward two products of the causal half, backward five, for which the model counts four
    pairs = 2 * 2 * shape.num_layers * shape.num_heads * shape.head_dim * 8192 / 2
    assert found.parts["attention"] == pytest.approx(4 * 8192 * 3.5 * pairs / H100.flops)
    assert found.tokens == 4 * 8192
    assert found.mfu_causal == pytest.approx(shape.flops_per_token(8192, causal=True) * found.tokens_per_gpu_s / 989e12)


def test_full_checkpointing_repeats_the_forward_and_selective_next_to_nothing() -> None:
    none, full, selective, half = (
        estimate(step(number=2, activation_checkpointing=policy, activation_checkpointing_layers=layers), H100)
        for policy, layers in (("none", None), ("full", None), ("selective", None), ("full", 16))
    )
    assert full.seconds / none.seconds == pytest.approx(1.27, abs=0.06)
    assert selective.seconds / none.seconds < 1.05
    assert half.parts["recomputation"] == pytest.approx(full.parts["recomputation"] / 2)


def test_zero_3_sends_half_as_much_again_as_ddp() -> None:
    """Over a network so slow that nothing but messages counts; gradients and weights of two bytes each."""
    slow = perfect(outside=Link(bytes_per_s=1e6, latency_s=0.0), inside=Link(bytes_per_s=1e6, latency_s=0.0))
    one = step(plan={"dp_replicate": 8}), step(plan={"dp_shard": 8})
    ddp, fsdp = (
        estimate(Step(each.shape, each.layout, 1, compute_bytes=2, reduce_bytes=2), slow).parts["dp messages"]
        for each in one
    )
    tables = 2 * 128_256 * 4096  # embedding and head, which are gathered once
    rest = step().shape.num_parameters - tables
    assert fsdp / ddp == pytest.approx((3 * rest + 2 * tables) / (2 * rest + 2 * tables), rel=0.01)
    assert fsdp / ddp == pytest.approx(1.5, rel=0.05)


SENT: dict[str, dict[str, Any]] = {
    "zero 3": {"plan": {"dp_shard": 8}}, "kept": {"plan": {"dp_shard": 8}, "reshard_after_forward": False},
    "zero 1": {"plan": {"dp_shard": 8}, "reshard_after_forward": False, "zero": 1},
    "ddp": {"plan": {"dp_replicate": 8}}, "hsdp": {"plan": {"dp_replicate": 2, "dp_shard": 4}},
    "tp": {"plan": {"tp": 4, "dp_shard": 2}, "activation_checkpointing": "full"},
    "heads": {"plan": {"cp": 2, "dp_shard": 2}, "context": Context("ulysses", 2, 2)},
    "ring": {"plan": {"cp": 4}, "context": Context("ring", 4, 1), "activation_checkpointing": "selective"},
    "experts": {"plan": {"dp_shard": 8, "ep": 4}},
    "experts in a node": {"plan": {"dp_shard": 8, "ep": 4}, "ep_node": 2},
    "fp8": {"plan": {"dp_shard": 4}, "float8": Recipe("tensorwise"), "float8_all_gather": True},
}  # fmt: skip


@pytest.mark.parametrize("name", SENT)
def test_all_bytes_that_a_rank_sends_take_their_time_once(name: str) -> None:
    """In a node whose links are so slow that nothing hides a message: what a rank sends over a link's bandwidth."""
    slow = perfect(inside=Link(bytes_per_s=1e3, latency_s=0.0))
    preset = "qwen3-30b-a3b" if "experts" in name else "llama3-8b"
    one = step(preset, 2, {"num_layers": 4}, **SENT[name])
    sent: dict[str, float] = {}
    for row in traffic(one):
        weights = row.what in ("gather weights", "sum gradients", "scales of weights")
        axis = "dp" if weights else row.axis.split()[0]
        sent[f"{axis} messages"] = sent.get(f"{axis} messages", 0.0) + row.sent / 1e3
    found = {part: value for part, value in estimate(one, slow).parts.items() if part.endswith("messages")}
    assert found == pytest.approx(sent, rel=1e-5)


def test_a_pipelines_messages_take_their_time_between_stages() -> None:
    slow = perfect(inside=Link(bytes_per_s=1e3, latency_s=0.0))
    one = step(number=2, model={"num_layers": 4}, plan={"pp": 2})
    sent = sum(row.sent for rank in range(2) for row in traffic(one, rank))
    assert estimate(one, slow).seconds == pytest.approx(sent / 2 / 1e3, rel=1e-5)  # two micro-batches at a time


def test_messages_that_compute_hides_add_only_what_they_take_from_it() -> None:
    alone, sharded = (estimate(step(number=4, micro_batch=4, plan={"dp_shard": n}), H100) for n in (1, 8))
    assert sharded.parts["dp messages"] < 0.05 * sharded.seconds
    over = estimate(step(number=4, plan={"dp_shard": 8}, seq_len=128), H100)
    assert over.parts["dp messages"] > 0.3 * over.seconds  # too few tokens to hide anything
    assert alone.parts.get("dp messages", 0) == 0


def test_weights_that_are_kept_are_gathered_less() -> None:
    settings = {"plan": {"pp": 8, "tp": 8, "dp_shard": 8}, "schedule": "1f1b"}
    again, kept = (
        estimate(step("llama3-70b", 16, reshard_after_forward=reshard, **settings), H100).parts["dp messages"]
        for reshard in (True, False)
    )
    # per step a gather and a scatter for each weight in place of 2 · 16 gathers and a scatter, in bytes of 1 : 2
    assert 0 < kept < again / 2


def test_tensor_parallel_over_the_network_is_slower_and_pieces_hide_a_part() -> None:
    one = step("llama3-70b", 1, micro_batch=2, plan={"tp": 8, "dp_shard": 8})
    near, far = (estimate(one, H100.model_copy(update={"node": node})) for node in (8, 1))
    assert far.parts["tp messages"] == pytest.approx(9 * near.parts["tp messages"], rel=0.05)
    pieces = estimate(step("llama3-70b", 1, micro_batch=2, tp_pieces=4, plan={"tp": 8, "dp_shard": 8}), H100)
    assert 0.5 * near.parts["tp messages"] < pieces.parts["tp messages"] < near.parts["tp messages"]


def test_float8_is_faster_for_large_products_and_never_for_small_ones() -> None:
    recipe = Recipe("tensorwise")
    fast = load_hardware("b200")
    large, large8 = (estimate(step("llama3-70b", float8=r, plan={"dp_shard": 64}), fast) for r in (None, recipe))
    assert large8.seconds < large.seconds
    small, small8 = (estimate(step("debug", float8=r, seq_len=512), fast) for r in (None, recipe))
    assert small8.seconds > small.seconds


def test_host_state_adds_the_transfers() -> None:
    plain, hosted = (estimate(step(host_state=host, plan={"dp_shard": 8}), H100) for host in (False, True))
    weights = step().shape.num_parameters / 8
    assert hosted.parts["update"] == pytest.approx((2 + 4) * weights / H100.host_bytes_per_s, rel=0.02)
    assert hosted.parts["update"] > plain.parts["update"]


def test_a_pipeline_waits_as_its_schedule_does() -> None:
    one = step("llama3-405b", 32, plan={"pp": 16, "tp": 8}, seq_len=4096)
    found = estimate(one, perfect())
    assert found.parts["bubble"] / found.seconds == pytest.approx(15 / 47, abs=0.03)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv_zero_bubble"])
def test_16384_gpus_are_estimated_in_milliseconds(schedule: str) -> None:
    one = step("llama3-405b", 128, plan={"pp": 16, "tp": 8, "dp_shard": 128}, schedule=schedule)
    estimate(one, H100)
    took = []
    for _ in range(5):
        begin = time.perf_counter()
        estimate(one, H100)
        took.append(time.perf_counter() - begin)
    assert min(took) < 0.025  # 2 to 6 ms where nothing else runs


def test_every_figure_of_a_profile_has_a_source() -> None:
    for name in names():
        hardware = load_hardware(name)
        figures = set(type(hardware).model_fields) - {"title", "devices", "sources"}
        assert set(hardware.sources) == figures, name


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; import quern.planner.time, quern.planner.hardware as h; [h.load_hardware(n) for n in h.names()];"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
