"""The most that a rank holds in a step, component by component. Imports no torch.

Four moments of a step can be the one at which a rank holds the most, and all are added up:

``loss``    a micro-batch's forward is done, as many as the schedule lets are under way, and logits are there;
``first``   backward is in the last block of a micro-batch, with all other activations still there;
``last``    backward is in the first block, with all gradients there;
``update``  gradients are whole, and no activation is there.

The figures are those of tensors. What a device takes besides, for its context, its libraries and what an allocator
cannot use, is a matter of hardware profiles (:mod:`quern.planner.hardware`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quern.parallel.planning.bubble import Action, order_of
from quern.parallel.planning.held import Held, held
from quern.parallel.planning.schedules import SCHEDULES
from quern.parallel.planning.step import Step
from quern.parallel.planning.traffic import buffer_elements, elements_held
from quern.parallel.planning.weights import alike, block_weights, end_weights
from quern.planner.memory.activations import block, block_input, last
from quern.planner.memory.kernels import CUDA, Kernels

__all__ = ["State", "in_flight", "moments", "most_in_flight", "peak"]


@dataclass(frozen=True)
class State:
    """What a run keeps of a weight besides the weight."""

    moment_bytes: int = 4
    """Of an element of each of Adam's two moments."""
    reference: bool = False
    """DoReMi's: a second model of the same size, without moments and gradients."""
    documents: bool = False
    """Tokens attend within their documents alone."""
    dense_mask: bool = False
    """Attention is given a value for each pair of tokens of a row (``sdpa`` with documents)."""


def peak(step: Step, state: State, rank: int = 0, kernels: Kernels = CUDA) -> tuple[str, dict[str, int]]:
    """The moment at which that rank of the whole mesh holds the most, and its bytes by component."""
    found = moments(step, state, rank, kernels)
    name = max(found, key=lambda moment: sum(found[moment].values()))
    return name, found[name]


def moments(step: Step, state: State, rank: int = 0, kernels: Kernels = CUDA) -> dict[str, dict[str, int]]:
    """Bytes of a rank by component, at each of the moments."""
    layout, plan = step.layout, step.plan
    own = held(step, 0 if layout.host_state else state.moment_bytes, rank)
    share = elements_held(step, rank)
    always = {
        "weights": own.weights,
        "moments": own.moments,
        "cast weights": _cast(step, share),
        "reference": share * step.reduce_bytes if state.reference else 0,
        "pipeline buffers": buffer_elements(step, rank) * step.compute_bytes,
        "whole gradients": own.whole_gradients,
    }
    stages = layout.stages_of(plan.coordinates(rank)["pp"])
    layers = layout.layers_of_stages(step.shape)
    activations = _activations(step, state, kernels, rank)
    # of one micro-batch alone they come as its activations go
    from_start = plan.pp > 1 or step.num_micro_batches > 1 or not plan.by_fsdp
    before, whole = own.gradients * from_start, own.gradients
    working = max(_working(step, layer, kernels) for stage in stages for layer, _ in alike(step.shape, layers[stage]))
    sharding = max(_sharding(step, layer) for stage in stages for layer, _ in alike(step.shape, layers[stage]))
    ends = [stage for stage in stages if stage == len(layers) - 1]
    lone = _least(step, state, kernels, layers[stages[0]])
    found = {
        "first": {"gradients": before, "gathered weights": own.gathered + sharding, "activations": activations,
                  "block in work": working},
        "last": {"gradients": whole, "gathered weights": own.gathered + sharding, "activations": lone,
                 "block in work": working},
        "update": {"gradients": whole, "gathered weights": own.gathered if layout.zero in (1, 2) else 0},
    }  # fmt: skip
    if ends:
        found["loss"] = {
            "gradients": before, "gathered weights": own.gathered, "activations": activations,
            "logits and loss": _loss(step, kernels, own),
        }  # fmt: skip
    return {name: always | moment for name, moment in found.items()}


def most_in_flight(
    actions: Sequence[Action], sizes: Mapping[int, int], split: Mapping[int, int], hidden: int, last_stage: int
) -> int:
    """The most bytes that a pipeline's rank has under way at a time, of micro-batches whose forward is done and whose
    weights' gradients are not.

    ``sizes``: what a micro-batch keeps in each stage; ``split``: what it keeps between the two halves of a backward;
    ``hidden``: a message. What is sent is kept: in schedules with several stages a rank until the step ends, for torch
    waits for it then (``_PipelineScheduleRuntime``), in others until the stage's backward.
    """
    until_end = len(sizes) > 1
    # 1f1b: what has been sent is there until the next message
    now = most = 0 if until_end else hidden * (1 if last_stage in sizes else 2)
    for stage, kind, _ in actions:
        sent = hidden * (stage < last_stage if kind == "F" else stage > 0)
        if kind == "F":
            now += sizes[stage] + sent
        elif kind in "BI":
            most = max(most, now + split[stage] * (kind == "I") + sent)
            now += sent * until_end + (split[stage] if kind == "I" else 0)
        if kind in "BW":
            now -= sizes[stage] + (split[stage] if kind == "W" else 0)
            now -= hidden * (stage < last_stage and not until_end)
        most = max(most, now)
    return most


def _activations(step: Step, state: State, kernels: Kernels, rank: int) -> int:
    """Of all micro-batches that are under way, embedding, last norm and mask among them."""
    if step.plan.pp == 1:
        return _micro_batch(step, state, kernels, range(step.shape.num_layers))
    return most_in_flight(*in_flight(step, state, rank, kernels))


def in_flight(
    step: Step, state: State, rank: int, kernels: Kernels = CUDA
) -> tuple[Sequence[Action], Mapping[int, int], Mapping[int, int], int, int]:
    """What :func:`most_in_flight` takes, of a pipeline's rank."""
    plan, layout = step.plan, step.layout
    layers = layout.layers_of_stages(step.shape)
    place = plan.coordinates(rank)["pp"]
    mine = layout.stages_of(place)
    actions = order_of(place, layout.scheduling, plan.pp, len(mine), step.num_micro_batches)
    sizes = {stage: _micro_batch(step, state, kernels, layers[stage]) for stage in mine}
    if layout.activation_checkpointing != "none" or step.compute_bytes >= 4:  # the first block keeps what came
        sizes = {stage: size - block_input(step) * (stage > 0) for stage, size in sizes.items()}
    splits = SCHEDULES[layout.scheduling].splits_backward
    split = {
        stage: splits
        and sum(count * _between(step, layer, kernels) for layer, count in alike(step.shape, layers[stage]))
        for stage in mine
    }
    return actions, sizes, split, block_input(step), len(layers) - 1


def _micro_batch(step: Step, state: State, kernels: Kernels, layers: range) -> int:
    """Of one, in a stretch of layers."""
    again = step.layout.recomputed(len(layers))
    parts = [(layers[:again], None), (layers[again:], "none")]
    total = sum(
        count * sum(kept.size for kept in block(step, layer, kernels, policy))
        for part, policy in parts for layer, count in alike(step.shape, part)
    )  # fmt: skip
    if layers.stop == step.shape.num_layers:
        total += sum(kept.size for kept in last(step, kernels))
    return total + _shared(step, state)


def _between(step: Step, layer: int, kernels: Kernels) -> int:
    """What a block keeps from the backward for its input to that for its weights: gradients of what products gave."""
    kept = block(step, layer, kernels, "none")
    products = block(step, layer, kernels, "selective")
    return sum(one.size for one in products if one.product) - sum(
        one.size for one in kept if one.product and one.what.startswith("attention")
    )


def _least(step: Step, state: State, kernels: Kernels, layers: range) -> int:
    """When one block alone has activations left."""
    policy = None if step.layout.recomputed(len(layers)) else "none"
    return sum(kept.size for kept in block(step, layers[0], kernels, policy)) + _shared(step, state)


def _shared(step: Step, state: State) -> int:
    """All blocks' of a micro-batch: angles, ids and places of tokens, a mask."""
    tokens, wide, context = step.tokens, max(step.compute_bytes, 4), step.layout.context
    mask = tokens * context.heads * step.layout.seq_len * step.compute_bytes * state.dense_mask
    of_rows = state.documents or context.ranks > 1  # else all rows have the same angles
    angles = (tokens if of_rows else step.layout.tokens) * step.shape.head_dim * wide
    stretches = 16 * tokens * (context.shards + 1) * (context.shards > 1)
    return angles + stretches + tokens * 5 * 8 + mask


def _cast(step: Step, share: int) -> int:
    """What :class:`quern.parallel.kept_weights.KeptWeights` keeps: in FP8 a byte for either factor."""
    keeps = step.layout.keeps_weights(step.plan) and step.compute_bytes < step.reduce_bytes
    return share * step.compute_bytes if keeps and not step.layout.host_state else 0


def _sharding(step: Step, layer: int) -> int:
    """FSDP2's, beside what stays gathered: the block in work, the next one, and the message that brings it; its
    gradients as they come, and those that travel, of which one block's before are still there."""
    if not step.plan.by_fsdp:
        return 0
    weights = block_weights(step.shape, step.plan.tp, layer, step.plan.ep)
    size = sum(weight.padded(step.plan) for weight in weights)
    gathered = 3 * size * step.compute_bytes * (step.layout.reshard_after_forward is not False)
    return gathered + size * (step.compute_bytes + 2 * step.gradient_bytes)


def _working(step: Step, layer: int, kernels: Kernels) -> int:
    """Beside what blocks keep: a block computed again, and what its backward holds at a time."""
    shape, size, wide = step.shape, step.compute_bytes, max(step.compute_bytes, 4)
    tokens, tp = step.tokens, step.plan.tp
    again = 0
    if step.layout.activation_checkpointing != "none":
        again = sum(kept.size for kept in block(step, layer, kernels, "none"))
    stream = tokens * shape.dim * (size + wide)
    if tp > 1:
        stream += 2 * tokens * shape.dim * size  # gathered, and a sum on its way
    keys = max(shape.num_kv_heads // tp, 1) * shape.head_dim * tokens
    queries = shape.num_heads // tp * shape.head_dim * tokens
    attention = (queries + 2 * keys) * size * 2 + queries * wide * (1 + kernels.accumulates_queries)
    context = step.layout.context
    if context.shards > 1:
        attention += 2 * keys * (2 if context.ring else context.shards) * (size + wide)
    width = shape.ffn_dim // tp * tokens
    if shape.is_sparse(layer):
        kept = [one for one in block(step, layer, kernels, "none") if one.what.startswith("experts")]
        rows = sum(one.size for one in kept)
        return again + stream + max(attention, rows)
    return again + stream + max(attention, 4 * width * size)


def _loss(step: Step, kernels: Kernels, own: Held) -> int:
    """Beside the gradients that it keeps: logits of a chunk and their gradient, and what its backward scales."""
    shape, size, wide = step.shape, step.compute_bytes, max(step.compute_bytes, 4)
    rows = shape.padded_vocab_size // step.plan.tp
    logits = min(step.loss_chunk, step.tokens) * rows * (size + wide)
    table = rows * shape.dim
    forward = logits + table * size * (not kernels.adds_products)
    if step.plan.tp > 1:
        forward += step.tokens * shape.dim * size
    if not step.plan.by_fsdp:
        return max(forward, table * wide)
    message, ahead, before = _travelling(step, own)
    return max(forward + message, table * (wide + size) + ahead) + before


def _travelling(step: Step, own: Held) -> tuple[int, int, int]:
    """FSDP2's, when a loss is there: the message of the last gather, which is kept until another comes; the block that
    backward gathers ahead; and the gradients that the micro-batch before has scattered last, as they were sent."""
    plan, shape, again = step.plan, step.shape, step.layout.reshard_after_forward is not False
    tied, scattered = shape.tied_embeddings, step.num_micro_batches > 1 and not own.whole_gradients
    units = (
        block_weights(shape, plan.tp, shape.num_layers - 1, plan.ep),
        end_weights(shape, plan.tp, first=False, last=True),
        end_weights(shape, plan.tp, first=True, last=tied),
    )
    block, head, root = (sum(weight.padded(plan) for weight in unit) for unit in units)
    message = (block if tied else head) * (again or step.num_micro_batches == 1)
    return message * step.compute_bytes, block * again * step.compute_bytes, root * scattered * step.gradient_bytes
