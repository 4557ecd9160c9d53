"""Assigns layers to pipeline stages, and stages to ranks. Imports no torch.

A step takes as long as its slowest stage, so layers are cut where the greatest cost of a stage is least. Cost is the
multiplications of a forward pass, of experts those for ``top_k`` of them: all dense blocks weigh the same, and the
output projection weighs as much as several of them where the vocabulary is large, so the last stage has fewer. The
embedding is a look-up and costs nothing, but it
has to be kept: among cuts that are as fast, that one is taken whose greatest stage has the fewest parameters, then the
most even one, then the one with the fewest layers in front, where most micro-batches are under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

from quern.errors import InputError
from quern.model.config import ModelShape
from quern.parallel.planning.schedules import SCHEDULES

__all__ = ["cut", "num_stages", "stage_costs", "stage_layers", "stage_parameters", "stages_of"]

Key = TypeVar("Key", int, tuple[int, tuple[int, ...]])


def num_stages(schedule: str, pp: int, stages_per_rank: int | None = None) -> int:
    """Stages of a pipeline over ``pp`` ranks; ``stages_per_rank``: as configured, None = 2 where it may be chosen."""
    return pp * (SCHEDULES[schedule].stages_per_rank or stages_per_rank or 2)


def stages_of(rank: int, schedule: str, pp: int, stages_per_rank: int | None = None) -> tuple[int, ...]:
    """Numbers of the stages of a pipeline's rank, ascending: round and round, or down and up again."""
    if SCHEDULES[schedule].v_shaped:
        return (rank, 2 * pp - 1 - rank)
    return tuple(range(rank, num_stages(schedule, pp, stages_per_rank), pp))


@lru_cache(maxsize=256)
def stage_layers(shape: ModelShape, stages: int, seq_len: int, given: Sequence[int] | None = None) -> tuple[range, ...]:
    """The layers of every stage in turn: as ``given`` (how many each has), else by cost.

    Raises :class:`InputError` where a stage would have none, or ``given`` does not add up.
    """
    layers = shape.num_layers
    if stages > layers:
        raise InputError(
            f"parallel: expected at most as many stages as layers ({layers}), got {stages} stages; fewer of pp or of "
            f"stages_per_rank would fit"
        )
    if given is not None and (len(given) != stages or sum(given) != layers or min(given) < 1):
        raise InputError(
            f"parallel.stage_layers: expected {stages} numbers ≥ 1 (one a stage) that add up to {layers} layers, got "
            f"{len(given)} that add up to {sum(given)}; by cost it would be "
            f"{list(cut(*_weights(shape, seq_len), stages))}"
        )
    counts = tuple(given) if given is not None else cut(*_weights(shape, seq_len), stages)
    ends = tuple(accumulate(counts))
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def stage_costs(shape: ModelShape, layers: Sequence[range], seq_len: int) -> list[int]:
    """FLOPs a token of every stage's forward pass, with the half of the attention matrix that causality leaves."""
    costs, _ = _weights(shape, seq_len)
    return [sum(costs[stretch.start : stretch.stop]) for stretch in layers]


def stage_parameters(shape: ModelShape, layers: Sequence[range]) -> list[int]:
    """Parameters of every stage, padded vocabulary and the copy of tied embeddings counted."""
    _, sizes = _weights(shape, 1)
    return [sum(sizes[stretch.start : stretch.stop]) for stretch in layers]


def _weights(shape: ModelShape, seq_len: int) -> tuple[list[int], list[int]]:
    """FLOPs a token and parameters of every layer; embedding with the first, last norm and head with the last."""
    vocabulary = shape.padded_vocab_size * shape.dim
    norms, layers = 2 * shape.dim + sum(shape.qk_norm_widths), range(shape.num_layers)
    attention = 2 * shape.num_heads * shape.head_dim * seq_len  # two products, half of each used
    costs = [2 * (shape.layer_parameters(layer, active=True) - norms) + attention for layer in layers]
    sizes = [shape.layer_parameters(layer) for layer in layers]
    costs[-1] += 2 * vocabulary
    sizes[0] += vocabulary
    sizes[-1] += vocabulary + shape.dim
    return costs, sizes


def cut(costs: Sequence[int], sizes: Sequence[int], stages: int) -> tuple[int, ...]:
    """How many layers each of ``stages`` contiguous stages has, at least one, so that of all such cuts

    the greatest sum of ``costs`` is least, then the greatest sum of ``sizes``, then the sum of squared costs, then the
    counts, compared in turn. Exact, by dynamic programming; time grows with the square of the number of layers.
    """
    cost_to, size_to = ([0, *accumulate(values)] for values in (costs, sizes))
    most = -(-len(costs) // stages)
    bound = max(cost_to[min(end + most, len(costs))] - cost_to[end] for end in range(len(costs)))  # an even cut's

    def cost(first: int, last: int) -> int:
        return cost_to[last] - cost_to[first]

    def size(first: int, last: int) -> int:
        return size_to[last] - size_to[first]

    def greatest_cost(before: int, first: int, last: int) -> int | None:
        return None if cost(first, last) > bound else max(before, cost(first, last))

    least_cost = _best(len(costs), stages, 0, greatest_cost)

    def greatest_size(before: int, first: int, last: int) -> int | None:
        return None if cost(first, last) > least_cost else max(before, size(first, last))

    least_size = _best(len(costs), stages, 0, greatest_size)

    def uneven(before: tuple[int, tuple[int, ...]], first: int, last: int) -> tuple[int, tuple[int, ...]] | None:
        if cost(first, last) > least_cost or size(first, last) > least_size:
            return None
        return before[0] + cost(first, last) ** 2, (*before[1], last - first)

    start: tuple[int, tuple[int, ...]] = (0, ())
    return _best(len(costs), stages, start, uneven)[1]


def _best(layers: int, stages: int, start: Key, extend: Callable[[Key, int, int], Key | None]) -> Key:
    """The least key of a cut of all layers; ``extend(key, first, last)`` adds a stage of layers [first, last) to a
    prefix's key, or says None where the stage is too heavy, as then is every longer one that ends there.
    """
    prefixes: dict[int, Key] = {0: start}  # by where they end: the best cut of so many layers
    for stage in range(1, stages + 1):
        longer: dict[int, Key] = {}
        for last in range(stage, layers - (stages - stage) + 1):
            for first in range(last - 1, stage - 2, -1):
                if first not in prefixes:
                    continue
                key = extend(prefixes[first], first, last)
                if key is None:
                    break
                if last not in longer or key < longer[last]:
                    longer[last] = key
        prefixes = longer
    return prefixes[layers]
