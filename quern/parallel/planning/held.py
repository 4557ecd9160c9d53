"""Counts the bytes of model state that a rank holds in a step, shards and whole tensors. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from quern.parallel.planning.host_state import host_state
from quern.parallel.planning.traffic import Step, elements_held, float8_gathers
from quern.parallel.planning.weights import alike, block_weights, end_weights

__all__ = ["Held", "held"]

_MOST_STAGES = 3
"""Of a rank's, whose weights torch's pipeline keeps gathered at one time."""


@dataclass(frozen=True)
class Held:
    """Bytes of one rank. The first three are its shares; the others are FSDP2's, 0 without it, and at most so many
    where a pipeline's rank has several stages."""

    weights: int
    """Masters, or where these are on the host weights as they are used; always there."""
    moments: int
    """Always there."""
    gradients: int
    """From the first scatter of a step until the update."""
    gathered: int
    """Weights as they are used, kept from forward to backward: of all layers between micro-batches too where blocks
    are not resharded after forward. The block in work comes on top where they are."""
    whole_gradients: int
    """Between the first micro-batch's backward and the scatter, where that is done once a step."""


def held(step: Step, moment_bytes: int, rank: int = 0) -> Held:
    """What that rank of the whole mesh holds; ``moment_bytes``: of an element of one moment."""
    layout, shape, plan = step.layout, step.shape, step.plan
    share, layers = elements_held(step, rank), layout.layers_of_stages(shape)
    gathered, whole, (smaller, _) = [0], 0, float8_gathers(step)
    for stage in layout.stages_of(plan.coordinates(rank)["pp"]) if plan.by_fsdp else ():
        ends = end_weights(shape, plan.tp, first=stage == 0, last=stage == len(layers) - 1)
        dealt = layout.reshard_after_forward  # over how many ranks after a forward; False = over none
        gathered.append(sum(one.padded(plan) for one in ends) * step.compute_bytes)
        whole += sum(weight.size for weight in ends)
        for layer, number in alike(shape, layers[stage]):
            block = block_weights(shape, plan.tp, layer, plan.ep)
            of_block = sum(one.padded(plan) for one in block) * step.compute_bytes
            gathered[-1] += 0 if dealt is True else number * ((of_block - smaller) // (dealt or 1))
            whole += number * sum(weight.size for weight in block)
    once = plan.pp > 1 or (layout.zero == 1 and step.num_micro_batches > 1)
    weights = host_state(step, rank, moment_bytes)["up"] if layout.host_state else share * step.reduce_bytes
    return Held(
        weights, 2 * share * moment_bytes, share * step.gradient_bytes, sum(sorted(gathered)[-_MOST_STAGES:]),
        whole * step.gradient_bytes * once,
    )  # fmt: skip
