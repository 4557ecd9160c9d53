"""Counts the bytes that a rank sends in an optimizer step, by purpose and mesh axis. Imports no torch.

Every row is one kind of collective: how often it is called in a step, and how large its tensor is, summed over the
calls. That tensor, whole, as a gather gives it and a scatter takes it, is M of the ring's costs over N ranks (Patarasuk
& Yuan 2009): an all-reduce sends 2(N-1)/N · M a rank, an all-gather and a reduce-scatter (N-1)/N · M, a send M. Of an
all-to-all M is what the rank has before, and it sends (N-1)/N · M; of tokens on the way to experts, which ranks get
unequal parts of, what is not for itself.

Counted is what torch really sends, padding included: FSDP2 sends the same number of rows from every rank, so a weight
whose rows the ranks do not divide is sent with rows of nothing. Left out are scalars: losses, norms, flags, the three
largest values of a layer whose history delayed FP8 scaling keeps, and the counts of a layer's experts: all ranks add
them up once a step, and those that share rows once a micro-batch for a balance loss by sequence or micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from quern.model.config import ModelShape
from quern.parallel.planning.bubble import Action, order_of
from quern.parallel.planning.experts import Rows, exchange
from quern.parallel.planning.float8 import gathered as gathered_in_float8
from quern.parallel.planning.step import Step, Transfer
from quern.parallel.planning.weights import Weight, alike, block_units, block_weights, end_weights

__all__ = ["Step", "Transfer", "buffer_elements", "elements_held", "float8_gathers", "traffic"]

DDP_FIRST_BUCKET, DDP_BUCKET = 2**20, 25 * 2**20
"""Bytes at which DDP closes its first bucket and each later one."""


def traffic(step: Step, rank: int = 0, rows: Mapping[int, Sequence[Rows]] | None = None) -> list[Transfer]:
    """Every kind of collective of that rank of the whole mesh that sends anything; ``rows``: see :func:`.exchange`."""
    places = step.plan.coordinates(rank)
    stages, shard = _stages(step, places["pp"]), step.plan.shard_of(places)
    found = [
        *_tensor_parallel(step, stages, shard), *_context_parallel(step, stages),
        *exchange(step, [stage.numbers for stage in stages], rows), *_data_parallel(step, stages),
        *_pipeline(step, stages, shard),
    ]  # fmt: skip
    return [row for row in found if row.ranks > 1 and row.payload]


@lru_cache(maxsize=64)
def elements_held(step: Step, rank: int = 0) -> int:
    """Parameters that the rank holds between steps, padded vocabulary counted."""
    places = step.plan.coordinates(rank)
    layers = _layers(step)
    shard, total = step.plan.shard_of(places), 0
    for stage in step.layout.stages_of(places["pp"]):
        ends = end_weights(step.shape, step.plan.tp, first=stage == 0, last=stage == len(layers) - 1)
        blocks = [(block_weights(step.shape, step.plan.tp, layer, step.plan.ep), count)
                  for layer, count in alike(step.shape, layers[stage])]  # fmt: skip
        for weights, count in [*blocks, (ends, 1)]:
            total += count * sum(weight.share(step.plan, shard) for weight in weights)
    return total


def buffer_elements(step: Step, rank: int = 0) -> int:
    """Elements of the buffers in which the rank's stages receive: torch's pipeline keeps one for each micro-batch, of
    hidden states for every stage but the first, and of gradients for every one but the last."""
    if step.plan.pp == 1:
        return 0
    last = len(_layers(step)) - 1
    number = sum((stage > 0) + (stage < last) for stage in step.layout.stages_of(step.plan.coordinates(rank)["pp"]))
    return number * step.num_micro_batches * _hidden(step)


def _hidden(step: Step) -> int:
    """Elements of what goes from stage to stage."""
    return step.tokens // step.plan.tp * step.shape.dim


@lru_cache(maxsize=8)  # every place of a pipeline asks for the same
def _layers(step: Step) -> tuple[range, ...]:
    """Of every stage of the pipeline; the whole model is one where there is none."""
    return step.layout.layers_of_stages(step.shape)


@dataclass(frozen=True)
class _Stage:
    """What one rank does with a stretch of layers in a step."""

    numbers: range
    """Of its layers."""
    first: bool
    last: bool
    work: str
    """In turn, a letter for each micro-batch and part: forward ``F``, backward ``B``, or ``I`` and ``W`` where it is
    split; where weights are dealt out, ``U`` gathers them ahead and ``R`` drops them."""
    sends: tuple[bool, bool]
    """Whether hidden states and their gradients leave this rank."""

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.numbers)


def _stages(step: Step, rank: int) -> list[_Stage]:
    """This rank's of the pipeline; the whole model is one where there is none."""
    if step.plan.pp == 1:
        keeps = step.layout.reshard_after_forward is False
        work = "FB" * step.num_micro_batches + "R" if keeps else "FBR" * step.num_micro_batches
        return [_Stage(range(step.shape.num_layers), True, True, work, (False, False))]
    pp, schedule = step.plan.pp, step.layout.scheduling
    layers, mine = _layers(step), step.layout.stages_of(rank)
    letters_of = _letters(schedule, pp, len(mine), step.num_micro_batches, rank)
    found = []
    for stage in mine:
        last = stage == len(layers) - 1
        sends = (not last and stage + 1 not in mine, stage > 0 and stage - 1 not in mine)
        found.append(_Stage(layers[stage], stage == 0, last, letters_of[stage] + "R", sends))
    return found


@lru_cache(maxsize=64)  # whatever the layout is otherwise
def _letters(schedule: str, pp: int, stages: int, num_micro_batches: int, rank: int) -> Mapping[int, str]:
    """The work of each of a rank's stages, as :attr:`_Stage.work` tells it, but for its end."""
    actions = order_of(rank, schedule, pp, stages, num_micro_batches)
    found: dict[int, str] = {}
    for stage, letter in _gathered_ahead(actions) if stages > 1 else ((one.stage, one.kind) for one in actions):
        found[stage] = found.get(stage, "") + letter
    return found


def _gathered_ahead(actions: Sequence[Action], most: int = 3) -> list[tuple[int, str]]:
    """(stage, letter) of a rank that has several stages: torch's runtime keeps the weights of the next ``most`` that it
    will work on, and of no other (``_add_unshard_reshard`` in torch.distributed.pipelining.schedules).
    """
    coming: list[list[int]] = []  # from each action on, the stages in the order of their next use
    for action in reversed(actions):
        later = coming[-1] if coming else []
        coming.append([action.stage, *(stage for stage in later if stage != action.stage)])
    found: list[tuple[int, str]] = []
    held: list[int] = []
    for action, stages in zip(actions, reversed(coming), strict=True):
        found += [(stage, "R") for stage in held if stage not in stages[:most]]
        found += [(stage, "U") for stage in stages[:most] if stage not in held]
        held = stages[:most]
        found.append((action.stage, action.kind))
    return found


def _pipeline(step: Step, stages: Sequence[_Stage], shard: int) -> Iterator[Transfer]:
    """Hidden states to the next stage, their gradients to the one before; gradients of tied embeddings to the end."""
    plan, shape = step.plan, step.shape
    hidden = _hidden(step) * step.compute_bytes
    for what, way in (("send hidden", 0), ("send gradients", 1)):
        calls = step.num_micro_batches * sum(stage.sends[way] for stage in stages)
        yield Transfer("pp", what, "send", plan.pp, calls, calls * hidden)
    ends = {stage.first for stage in stages} | {stage.last for stage in stages}
    apart = not all(any(getattr(stage, end) for stage in stages) for end in ("first", "last"))
    if shape.tied_embeddings and True in ends and apart:
        (embedding,) = end_weights(shape, plan.tp, first=True, last=False)
        payload = step.reduce_bytes * embedding.share(plan, shard)
        yield Transfer("pp", "tied gradients", "send", plan.pp, 1, payload)


def _tensor_parallel(step: Step, stages: Sequence[_Stage], shard: int) -> Iterator[Transfer]:
    """Around each block's four products the sequence is gathered or scattered (Korthikanti et al. 2022, section 4.2.2).

    A forward gathers twice and scatters twice. A backward does the reverse, and gathers twice more, for of what went
    into a product only this rank's share of the sequence is kept. Checkpointing repeats the forward, of which
    ``selective`` keeps what was scattered. Where the backward is split, the gradients of a block's outputs are gathered
    for either half; the first stage has no gradient to pass on, and takes both halves at once.

    What is gathered for a product, or scattered after it, goes in ``tp_pieces``, each of which is a call: all but what
    a backward gathers for the gradients of weights alone, and the two sums of its gradients of inputs.

    Experts take the place of two products: tokens are gathered for them, with what was chosen for each, and what they
    give is scattered, in one piece each; a backward does the reverse. Shared experts are products as others are. The
    scatter is the last that a block does, and nothing after it is kept: checkpointing does not repeat it.
    """
    shape, tp, pieces = step.shape, step.plan.tp, step.layout.tp_pieces
    tokens = step.tokens
    hidden = tokens * shape.dim * step.compute_bytes
    full = step.layout.activation_checkpointing == "full"
    gathers, scatters, choices = [0, 0], [0, 0], [0, 0]  # whole tensors that go in one, and in pieces
    for stage in stages:
        micro_batches = step.num_micro_batches
        split = 0 if stage.first else stage.work.count("I")
        again = step.layout.recomputed(stage.layers)
        (pairs, sparse), (pairs_again, sparse_again) = (
            _split_products(shape, numbers) for numbers in (stage.numbers, stage.numbers[:again])
        )
        gathers[0] += pairs * (micro_batches + split) + (2 * sparse + sparse_again) * micro_batches
        gathers[1] += (pairs * 2 + pairs_again) * micro_batches
        scatters[0] += (pairs + 2 * sparse) * micro_batches
        scatters[1] += (pairs + pairs_again * full) * micro_batches
        choices[0] += (sparse + sparse_again) * micro_batches
        choices[1] += sparse * micro_batches
        for end in (stage.first, stage.last):  # embedding: scattered, its gradient gathered; the loss the other way
            gathers[0] += micro_batches * end
            scatters[0] += micro_batches * end
    calls = gathers[0] + gathers[1] * pieces
    yield Transfer("tp", "gather hidden", "all_gather", tp, calls, sum(gathers) * hidden)
    calls = scatters[0] + scatters[1] * pieces
    yield Transfer("tp", "scatter hidden", "reduce_scatter", tp, calls, sum(scatters) * hidden)
    if shape.moe is not None:
        told = tokens * 2 * shape.moe.top_k * max(step.compute_bytes, 4)
        yield Transfer("tp", "gather choices", "all_gather", tp, choices[0], choices[0] * told)
        yield Transfer("tp", "scatter gradients of choices", "reduce_scatter", tp, choices[1], choices[1] * told)
    if any(stage.last for stage in stages):  # of every token the maximum, then its two sums
        chunks = step.num_micro_batches * -(-tokens // step.loss_chunk)
        payload = 3 * step.num_micro_batches * tokens * step.reduce_bytes
        yield Transfer("tp", "softmax", "all_reduce", tp, 2 * chunks, payload)
    whole = [weight for stage in stages for weight in _weights(step, stage) if not weight.split]
    shares = sum(weight.share(step.plan, shard) for weight in whole)
    yield Transfer("tp", "partial gradients", "all_reduce", tp, 1, shares * step.gradient_bytes)


def _split_products(shape: ModelShape, layers: range) -> tuple[int, int]:
    """Of these layers the pairs of split products, one into the width and one back: attention's, a feed-forward's; and
    how many layers have experts."""
    sparse = sum(map(shape.is_sparse, layers))
    shared = shape.moe is not None and shape.moe.shared_ffn_dim > 0
    return 2 * len(layers) - sparse * (not shared), sparse


def _context_parallel(step: Step, stages: Sequence[_Stage]) -> Iterator[Transfer]:
    """In each layer queries, keys and values change tokens for heads, and what attention gives changes back; keys and
    values are gathered, or go round. A backward does the reverse, with the gradients of keys and values summed, and
    needs the others' keys once more. Checkpointing repeats the forward, of which ``selective`` keeps what attention
    over several shards gave.
    """
    shape, plan, context = step.shape, step.plan, step.layout.context
    if plan.cp == 1:
        return
    tokens = step.tokens
    selective = step.layout.activation_checkpointing == "selective"
    layers = sum(stage.layers for stage in stages) * step.num_micro_batches
    again = sum(step.layout.recomputed(stage.layers) for stage in stages) * step.num_micro_batches
    query = shape.num_heads // plan.tp
    key = max(shape.num_kv_heads // plan.tp, 1)
    if context.heads > 1:
        key = max(key, context.heads)  # fewer are repeated
        heads = (2 * layers + again) * (query + 2 * key + query)
        payload = heads * tokens * shape.head_dim * step.compute_bytes
        yield Transfer("cp", "tokens for heads", "all_to_all", context.heads, 2 * (2 * layers + again), payload)
    keys = 2 * key // context.heads * shape.head_dim * tokens * context.heads  # of a shard, with a rank's heads
    wide = max(step.compute_bytes, 4)
    forwards = layers + again * (not selective)
    if not context.ring:
        gathers, whole = forwards + layers, keys * context.shards
        yield Transfer("cp", "gather keys", "all_gather", context.shards, gathers, gathers * whole * step.compute_bytes)
        yield Transfer("cp", "sum key gradients", "reduce_scatter", context.shards, layers, layers * whole * wide)
        return
    calls = (forwards + layers) * (context.shards - 1)
    yield Transfer("cp", "send keys", "send", context.shards, calls, calls * keys * step.compute_bytes)
    calls = layers * context.shards
    yield Transfer("cp", "send key gradients", "send", context.shards, calls, calls * keys * wide)


def _weights(step: Step, stage: _Stage) -> list[Weight]:
    ends = end_weights(step.shape, step.plan.tp, first=stage.first, last=stage.last)
    blocks = (block_weights(step.shape, step.plan.tp, layer, step.plan.ep) for layer in stage.numbers)
    return [*(weight for block in blocks for weight in block), *ends]


def _data_parallel(step: Step, stages: Sequence[_Stage]) -> Iterator[Transfer]:
    shape, plan = step.shape, step.plan
    if not plan.by_fsdp:
        embedding, *head, norm = end_weights(shape, plan.tp, first=True, last=True)
        blocks = [
            weight for layer in range(shape.num_layers) for weight in block_weights(shape, plan.tp, layer, plan.ep)
        ]
        weights = [embedding, *blocks, norm, *head]  # as the model has them
        buckets = _buckets([weight.size * step.reduce_bytes for weight in reversed(weights)])
        payload = sum(weight.size for weight in weights) * step.reduce_bytes
        yield Transfer("dp_replicate", "sum gradients", "all_reduce", plan.dp_replicate, buckets, payload)
        return
    gathers: Counter[tuple[str, int]] = Counter()  # by axis and ranks
    gathered_bytes: Counter[tuple[str, int]] = Counter()
    scatters: Counter[tuple[str, int]] = Counter()
    scattered: Counter[tuple[str, int]] = Counter()
    copies = copied = 0
    smaller, scales = float8_gathers(step)
    for stage in stages:
        ends = end_weights(shape, plan.tp, first=stage.first, last=stage.last)
        # each block is a unit of its own, and so are the ends, which are gathered once and kept: the embedding, and
        # the head with the last norm; all in one where the two are tied
        apart = stage.first and stage.last and not shape.tied_embeddings
        for weights, reshard, count, smaller_by in (
            *(
                (unit, step.layout.reshard_after_forward, count, smaller)
                for layer, count in alike(shape, stage.numbers) for unit in block_units(shape, plan, layer)
            ),
            *((unit, False, 1, 0) for unit in ([ends[:1], ends[1:]] if apart else [ends])),
        ):  # fmt: skip
            if not weights:
                continue
            size, ranks = count * sum(weight.padded(plan) for weight in weights), weights[0].shards(plan)
            axis = "expert_shard" if plan.ep > 1 and weights[0].stream is not None else plan.shard_axes
            sent = size * step.compute_bytes - count * smaller_by
            for over, times in _gathers(stage.work, reshard, ranks).items():
                gathers[axis, over] += count * times
                gathered_bytes[axis, over] += sent * times
            # a pipeline keeps whole gradients until its last
            number = step.num_micro_batches if plan.pp == 1 and step.layout.zero != 1 else 1
            scatters[axis, ranks] += count * number
            scattered[axis, ranks] += size * number * step.gradient_bytes
            copies, copied = copies + count, copied + size // ranks * step.gradient_bytes
    for (axis, over), calls in gathers.items():
        yield Transfer(axis, "gather weights", "all_gather", over, calls, gathered_bytes[axis, over])
    payload = scales * sum(stage.layers for stage in stages) * step.reduce_bytes
    yield Transfer(plan.shard_axes, "scales of weights", "all_reduce", plan.shards, 1, payload)
    for (axis, over), calls in scatters.items():
        yield Transfer(axis, "sum gradients", "reduce_scatter", over, calls, scattered[axis, over])
    yield Transfer("dp_replicate", "sum gradients", "all_reduce", plan.dp_replicate, copies, copied)


def float8_gathers(step: Step) -> tuple[int, int]:
    """Of a block: the bytes by which its gather is smaller where weights travel in FP8, and the number of scales."""
    if step.layout.float8 is None or not step.layout.float8_all_gather:
        return 0, 0
    found = gathered_in_float8(step.shape, step.plan.tp, step.layout.float8).values()
    elements = sum(Weight(size, True).padded(step.plan) for size, _ in found)
    return elements * (step.compute_bytes - 1), sum(prod(scales) for _, scales in found)


@lru_cache(maxsize=256, typed=True)  # 1 is not True
def _gathers(work: str, reshard: bool | int, ranks: int) -> Mapping[int, int]:
    """How many gathers of :func:`gathered` go over how many ranks."""
    return Counter(gathered(work, reshard, ranks))


def gathered(work: str, reshard: bool | int, ranks: int) -> list[int]:
    """Over how many ranks each gather of one FSDP2 group goes, as a rank's work needs its weights: they are dropped
    after each forward ``F`` as ``reshard`` says, and with ``R``.
    """
    found: list[int] = []
    held = ranks  # over how many ranks the weights are dealt; 1 = here whole
    for event in work:
        if event in "FBIU" and held > 1:
            found.append(held)
            held = 1
        if event == "R":
            held = ranks
        if event == "F" and reshard is not False:
            held = ranks if reshard is True else reshard
    return found


def _buckets(sizes: Sequence[int]) -> int:
    """How many DDP makes of gradients in the order in which they come, from the second step on."""
    limit, filled, closed = DDP_FIRST_BUCKET, 0, 0
    for size in sizes:
        filled += size
        if filled >= limit:
            limit, filled, closed = DDP_BUCKET, 0, closed + 1
    return closed + bool(filled)
