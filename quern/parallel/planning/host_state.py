"""Counts what a rank holds and moves where masters and moments are in host memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from quern.parallel.planning.traffic import Step
from quern.parallel.planning.weights import Weight, alike, block_weights, end_weights

__all__ = ["host_state"]


def host_state(step: Step, rank: int, moment: int) -> dict[str, int]:
    """Bytes of a rank, by shapes; ``moment``: of an element of one.

    ``device``: weights and gradients, and of FP8 2 bytes for each weight that is kept quantised; ``host``: masters
    and moments; ``staging``: two buffers each for the largest unit's gradients and weights, each of a power of two
    bytes as torch pins them for CUDA (CachingHostAllocator.h; unverified on GPU), but for what rounds a weight's
    part to 64; a step moves gradients ``down`` to the host and weights ``up``.
    """
    layout, shape, tp = step.layout, step.shape, step.plan.tp
    places, stages = step.plan.coordinates(rank), layout.layers_of_stages(shape)
    master, compute, adds = step.reduce_bytes, step.compute_bytes, layout.adds_gradients(step.plan)
    sizes: list[tuple[int, int]] = []
    copied = experts = 0

    def unit(weights: Sequence[Weight], cast: bool, number: int = 1) -> None:
        """Elements, and bytes on the device, of so many."""
        shares = [(w, w.share(step.plan, step.plan.shard_of(places))) for w in weights]
        matrices = {w for w in weights if len(w.shape) > 1 and not w.router}
        bytes_of = {w: compute if step.plan.by_fsdp or (cast and w in matrices) else master for w in weights}
        sizes.extend([(sum(own for _, own in shares), sum(own * bytes_of[w] for w, own in shares))] * number)

    for stage in layout.stages_of(places["pp"]):
        last = stage == len(stages) - 1
        ends = end_weights(shape, tp, first=stage == 0, last=last)
        apart = 2 * (last and not shape.tied_embeddings)  # the head and the last norm
        unit(ends[: len(ends) - apart], False)
        for layer, number in alike(shape, stages[stage]):
            block = block_weights(shape, tp, layer, step.plan.ep)
            unit(block, True, number)
            experts += number * sum(
                weight.size for weight in block if len(weight.shape) == 3
            )  # which are quantised at each use
        unit(ends[len(ends) - apart :], adds)
        copied += ends[0].size if last and not (apart and adds) else 0  # stages in the middle have no ends
    total, sent = map(sum, zip(*sizes, strict=True))
    if layout.float8 is not None:
        copied = total - experts
    kept = compute * copied if layout.keeps_weights(step.plan) and compute < master else 0
    down = step.gradient_bytes * total
    buffers = (max(of) for of in zip(*((master * count, size) for count, size in sizes), strict=True))
    staging = sum(2 * (1 << (size - 1).bit_length()) for size in buffers)
    return {
        "device": sent + kept + down, "host": (master + 2 * moment) * total, "staging": staging, "down": down,
        "up": sent,
    }  # fmt: skip
