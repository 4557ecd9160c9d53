"""Walks through the arithmetic of a layout, with every number in it, so that a reader can do it again by hand."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from math import prod

from quern.model.config import ModelShape
from quern.parallel.planning.bubble import bubble
from quern.parallel.planning.held import held
from quern.parallel.planning.step import Step
from quern.parallel.planning.traffic import buffer_elements, elements_held, traffic
from quern.parallel.planning.weights import alike, block_weights
from quern.planner.answer import MOMENTS
from quern.planner.hardware import Hardware
from quern.planner.memory.activations import block, last
from quern.planner.memory.kernels import CUDA
from quern.planner.memory.peak import State, in_flight, most_in_flight
from quern.planner.search import COMES_AND_GOES, GIB, Room
from quern.planner.time.estimate import BESIDE, StepTime
from quern.planner.time.messages import seconds
from quern.words import counted

__all__ = ["explain"]


def explain(step: Step, state: State, hardware: Hardware, room: Room, time: StepTime | None) -> list[str]:
    """Lines of text; a title begins with ``# ``. ``time``: None where the layout does not fit."""
    rank = room.place * (step.plan.world_size // step.plan.pp)
    parts = [
        _model(step.shape), _state(step, rank, state.moment_bytes), _activations(step, state, room, rank),
        _memory(step, state, hardware, room, rank), _traffic(step, hardware, rank),
    ]  # fmt: skip
    if step.plan.pp > 1:
        parts.append(_bubble(step))
    if time is not None:
        parts.append(_time(step, hardware, time))
    return [line for part in parts for line in part]


def _model(shape: ModelShape) -> Iterator[str]:
    yield "# Parameters"
    dim, heads = shape.dim, shape.num_heads + shape.num_kv_heads
    for layer, number in alike(shape, range(shape.num_layers)):
        sizes = {"attention": (2, heads, shape.head_dim, dim), "its feed-forward": (3, dim, shape.ffn_dim)}
        if (moe := shape.moe) is not None and shape.is_sparse(layer):
            sizes["its feed-forward"] = (3, dim, moe.shared_ffn_dim)
            sizes |= {"experts": (moe.num_experts, 3, dim, moe.ffn_dim), "routing": (moe.num_experts, dim)}
        whole, told = shape.layer_parameters(layer), {name: size for name, size in sizes.items() if prod(size)}
        rest = whole - sum(map(prod, told.values()))
        sums = [f"{' · '.join(f'{n:,}' for n in size)} of {name}" for name, size in told.items()]
        yield f"{counted(number, 'layer')} with {' + '.join(sums)} + {rest:,} of norms = {whole:,} parameters each"
    tables = 1 if shape.tied_embeddings else 2
    yield (
        f"+ {tables} · {shape.vocab_size:,} · {dim:,} of ids + {dim:,} of the last norm = {shape.num_parameters:,}. "
        f"Attention has {shape.num_heads} heads of queries and {shape.num_kv_heads} of keys, of {shape.head_dim} each."
    )


def _state(step: Step, rank: int, moment_bytes: int) -> Iterator[str]:
    shape, plan, gradient = step.shape, step.plan, step.gradient_bytes
    number, each = shape.num_parameters, step.reduce_bytes + 2 * moment_bytes + step.gradient_bytes
    yield "# Model state"
    yield (
        f"A parameter takes {step.reduce_bytes} bytes for its master, {moment_bytes} for each of Adam's two moments "
        f"and {gradient} for its gradient: {each}."
        + " (With weights and gradients in BF16 and FP32 copies it is 16 too: Rajbhandari et al. 2020, section 3.1.)"
        * (each == 16)
    )
    yield f"{number:,} parameters × {each} = {number * each / 1e9:,.1f} GB for the whole model."
    ways = " × ".join(
        f"{name} {getattr(plan, name)}" for name in ("dp_shard", "cp", "tp", "pp") if getattr(plan, name) > 1
    )
    own = elements_held(step, rank)
    split = f"Split over {ways}, the" if ways else "The"
    yield f"{split} rank that needs most holds {own:,} parameters: {own:,} × {each} = {own * each / GIB:,.2f} GiB."
    if step.layout.host_state:
        yield "Masters and moments of these are in the host's memory, and weights as they are used on the GPU."


def _activations(step: Step, state: State, room: Room, rank: int) -> Iterator[str]:
    shape, plan, layout = step.shape, step.plan, step.layout
    layer = shape.num_layers - 1
    yield "# Activations"
    yield (
        f"A step has {step.num_micro_batches:,} micro-batches of {layout.micro_batch} × {layout.seq_len:,} tokens"
        + (f" / cp {plan.cp}" if plan.cp > 1 else "")
        + f" = {step.tokens:,}. With checkpointing {layout.activation_checkpointing} a "
        + f"{'compiled ' if layout.compile_backend else ''}block keeps for its backward:"
    )
    kept = [one for one in block(step, layer, CUDA) if one.size]
    for one in kept:
        yield f"  {one.what}: {one.size / step.tokens:,.0f} bytes a token, {one.size / 2**20:,.1f} MiB"
    total = sum(one.size for one in kept)
    layers = [len(stage) for stage in layout.layers_of_stages(shape)]
    mine = sum(layers[stage] for stage in layout.stages_of(room.place)) if plan.pp > 1 else shape.num_layers
    yield f"Together {total / 2**20:,.1f} MiB; a rank has {mine} blocks: {mine * total / GIB:,.2f} GiB a micro-batch."
    if plan.pp > 1:
        chunks = len(layout.stages_of(room.place))
        most = f"pp − place = {plan.pp - room.place} with 1f1b"
        if chunks > 1:
            turns = (chunks - 1) * plan.pp + 2 * (plan.pp - room.place - 1) + 1
            most = f"(stages − 1) · pp + 2 · (pp − place − 1) + 1 = {turns} stages' parts with interleaved_1f1b"
        yield (
            f"At place {room.place} of the pipeline several micro-batches are under way at a time, at most {most}; "
            "each keeps blocks, and angles and ids. What was sent is kept until "
            + ("the step ends, as torch does where a rank has several stages:" if chunks > 1 else "the next message:")
        )
        yield "  " + _under_way(step, state, rank)
    else:
        ends = [one for one in last(step, CUDA) if one.size]
        told = " + ".join(f"{one.what} {one.size / 2**20:,.1f} MiB" for one in ends)
        whole = room.components.get("activations", 0)
        shared = whole - mine * total - sum(one.size for one in ends)
        if shared >= 0:  # else the moment is one at which other blocks' are gone
            yield f"With {told} + angles and ids for all blocks {shared / 2**20:,.1f} MiB: {_gib(whole)}."


def _under_way(step: Step, state: State, rank: int) -> str:
    """When a pipeline's rank has the most: how often what a micro-batch keeps in each stage, and messages."""
    actions, sizes, split, hidden, last_stage = in_flight(step, state, rank)
    most = most_in_flight(actions, sizes, split, hidden, last_stage)
    ends = range(1, len(actions) + 1)
    until = bisect_left(ends, most, key=lambda end: most_in_flight(actions[:end], sizes, split, hidden, last_stage))
    done, number = actions[: until + 1], dict.fromkeys(sizes, 0)
    for stage, kind, _ in done[:-1]:
        number[stage] += (kind == "F") - (kind in "BW")
    number[done[-1].stage] += done[-1].kind == "F"
    between = most - sum(number[stage] * size for stage, size in sizes.items())
    parts = [f"stage {stage}: {number[stage]} × {sizes[stage] / GIB:,.3f} GiB" for stage in sizes if number[stage]]
    return " + ".join(parts) + f" + messages, sent and kept: {between / GIB:,.3f} GiB = {_gib(most)}"


def _memory(step: Step, state: State, hardware: Hardware, room: Room, rank: int) -> Iterator[str]:
    yield "# The most that a rank holds"
    yield f"{MOMENTS[room.moment].capitalize()}:"
    own, kept, gradient = elements_held(step, rank), held(step, state.moment_bytes, rank), step.gradient_bytes
    hidden = step.tokens // step.plan.tp * step.shape.dim
    largest = max(
        sum(weight.padded(step.plan) for weight in block_weights(step.shape, step.plan.tp, layer, step.plan.ep))
        for layer, _ in alike(step.shape, range(step.shape.num_layers))
    )
    rows, wide = step.shape.padded_vocab_size // step.plan.tp, step.compute_bytes + max(step.compute_bytes, 4)
    going = sum(room.components.get(part, 0) for part in COMES_AND_GOES)
    sums = {
        "weights": f"{own:,} × {step.reduce_bytes}", "moments": f"{own:,} × 2 × {state.moment_bytes}",
        "cast weights": f"{own:,} × {step.compute_bytes}", "gradients": f"{own:,} × {gradient}",
        "whole gradients": f"{kept.whole_gradients // gradient:,} parameters of all its stages × {gradient}",
        "pipeline buffers": f"{buffer_elements(step, rank) // hidden:,} of {hidden:,} elements × {step.compute_bytes}",
        "logits and loss": f"a chunk's logits of {min(step.loss_chunk, step.tokens):,} tokens × {rows:,} ids × {wide} "
        "bytes and FSDP2's messages, or the head's gradient as it is scaled",
        "block in work": "what the backward of one block holds at a time"
        + ", and its activations computed again" * (step.layout.activation_checkpointing != "none"),
        "allocator": f"of {_gib(going)} of {', '.join(COMES_AND_GOES)} {hardware.fragmentation:.0%}",
        "context and libraries": "by the profile",
    }  # fmt: skip
    if step.layout.host_state:
        sums = {name: text for name, text in sums.items() if name not in ("weights", "moments", "cast weights")}
    stay, rest = kept.gathered // step.compute_bytes, room.components.get("gathered weights", 0) - kept.gathered
    sums["gathered weights"] = f"{stay:,} parameters that stay gathered × {step.compute_bytes}"
    if rest > 0:
        sums["gathered weights"] += f" + of blocks in work and on the way {largest:,} × {rest / largest:g}"
    for name, size in room.components.items():
        yield f"  {name}{f': {sums[name]}' if name in sums else ''} = {_gib(size)}"
    verdict = f"{_gib(room.has - room.needs)} are left" if not room.short else f"{room.lacks} are missing"
    yield f"Together {room.needs / GIB:,.2f} GiB of {room.has / GIB:,.2f} GiB: {verdict}."


def _traffic(step: Step, hardware: Hardware, rank: int) -> Iterator[str]:
    rows = traffic(step, rank)
    if not rows:
        return
    yield "# What a rank sends in a step"
    yield (
        "Over a ring of N ranks a gather or a scatter of M bytes sends (N − 1)/N · M, an all-reduce twice that, a send "
        "M (Patarasuk & Yuan 2009). FSDP2 gathers weights for forward and, with ZeRO 3, again for backward, and "
        "scatters gradients: half more than the all-reduce of DDP where all are of one size."
    )
    for row in rows:
        times = {"all_reduce": f"2 · {row.ranks - 1}/{row.ranks} · ", "send": ""}.get(
            row.collective, f"{row.ranks - 1}/{row.ranks} · "
        )
        if row.away is not None:  # parts that differ
            times = "of it to others, of "
        yield (
            f"  {row.what} ({row.axis}, {row.calls:,} × {row.collective.replace('_', '-')}): {times}"
            f"{row.payload / 1e9:,.3f} GB = {row.sent / 1e9:,.3f} GB in {seconds(step, hardware, row):,.3f} s"
        )
    yield f"Together {sum(row.sent for row in rows) / 1e9:,.3f} GB."
    inside, outside = hardware.inside, hardware.outside
    share, near = hardware.efficiency.links, min(hardware.node, step.plan.world_size)
    yield (
        f"Seconds are GB over {share * inside.bytes_per_s / 1e9:,.0f} GB/s within a node of {near} GPUs, and what "
        f"leaves it, (nodes − 1)/nodes · M, over {share * outside.bytes_per_s / 1e9:,.0f} GB/s of each of the group's "
        f"GPUs in a node, whichever takes longer; and for each call {inside.latency_s * 1e6:g} µs a hop within a "
        f"node and {outside.latency_s * 1e6:g} µs between nodes. Those of tp, cp and ep add to the step. Those of dp "
        f"travel beside compute, but for a first gather and a last scatter: they add what is longer than compute, and "
        f"{BESIDE:.0%} of the rest, as they take multiprocessors. A pipeline's sends delay the next stage."
    )


def _bubble(step: Step) -> Iterator[str]:
    stages, number, layout = step.plan.pp, step.num_micro_batches, step.layout
    yield "# Bubble"
    share = (stages - 1) / (stages - 1 + number)
    yield (
        f"With S = {stages} equal stages and M = {number} micro-batches 1f1b waits (S − 1)/(S − 1 + M) = {share:.2%} "
        "of a step."
    )
    if layout.scheduling != "1f1b":
        found = bubble(layout.scheduling, stages, layout.num_stages // stages, number)
        yield f"{layout.scheduling} with {layout.num_stages // stages} stages a rank, simulated: {found:.2%}."
    yield "The plan simulates the schedule with the times of its own stages, which are not equal."


def _time(step: Step, hardware: Hardware, time: StepTime) -> Iterator[str]:
    shape, length = step.shape, step.layout.seq_len
    attention = 12 * shape.num_layers * shape.num_heads * shape.head_dim * length
    full = shape.flops_per_token(length, causal=False)
    matmul = round((full - attention) / 6)
    tokens, gpus = time.tokens, step.plan.world_size
    yield "# Time"
    yield (
        f"A token costs 6 FLOP for each of {matmul:,} parameters of blocks and head that it uses, and 12 · layers "
        f"{shape.num_layers} · heads {shape.num_heads} · {shape.head_dim} · tokens {length:,} = {attention:.4g} for "
        f"attention: {full:.4g} FLOP. (Of attention's, half are needed: its causal half.)"
    )
    best = full * tokens / gpus / hardware.flops
    yield (
        f"{tokens:,} tokens a step on {gpus:,} GPUs of {hardware.flops / 1e12:,.0f} TFLOP/s, with all of attention as "
        f"MFU usually counts: {full:.4g} · {tokens:,} / {gpus:,} / {hardware.flops:.4g} = {best:.3f} s."
    )
    within = 7 / 12 * attention * tokens / gpus / hardware.flops / hardware.efficiency.attention
    float8 = "" if step.layout.float8 is None else ", if all were in BF16; FP8 ones take their own rate, and casts"
    reached = 6 * matmul * tokens / gpus / hardware.flops / hardware.efficiency.products
    yield (
        f"Large products reach {hardware.efficiency.products:.1%} of that: 6 · {matmul:,} · {tokens:,} / {gpus:,} / "
        f"{hardware.flops:.4g} / {hardware.efficiency.products:g} = {reached:.3f} s; rows and columns in whole tiles, "
        "the slowest rank's share of layers and logits, and a time for each kernel make it what is planned"
        f"{float8}."
    )
    yield (
        f"Attention takes 2 products of half its matrix forward and 5 backward, 7 / 12 · {attention:.4g} · {tokens:,} "
        f"/ {gpus:,} / {hardware.flops:.4g} / {hardware.efficiency.attention:g} = {within:.3f} s. Element-wise "
        "kernels, casts, copies and the update take the bytes that they move over the memory's speed; what is computed "
        "again is apart."
    )
    yield "Planned are " + " + ".join(f"{name} {value:.3f}" for name, value in time.parts.items() if value >= 0.0005)
    yield (
        f"= {time.seconds:.3f} s; MFU = {best:.3f} / {time.seconds:.3f} = {time.mfu_full:.1%}, and with "
        f"attention's causal half {time.mfu_causal:.1%}. The efficiencies and their sources are in the profile."
    )


def _gib(number: int) -> str:
    return f"{number / GIB:,.2f} GiB"
