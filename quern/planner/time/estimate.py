"""Adds up a training step: stages of a pipeline, their messages, the schedule, the update. Imports no torch.

What of a message is exposed, that is, adds to the step:

* ``tp``: all. With pieces that travel beside products, of each half but the first piece; with ``async_tp`` half.
* ``cp``: gathers and exchanges of heads all; of keys that go round what attention does not hide.
* ``ep``: all; half with ``dualpipe_v``, which has another micro-batch to compute meanwhile.
* FSDP2: what gathers of the next block take longer than the compute of this one, and the first gather of a pass; in a
  backward, gathers and scatters together, and the last scatter. Gradients that are summed once a step travel beside
  the last micro-batch's backward, and so do the all-reduces of DDP and HSDP.
* Sends of a pipeline: as the time between two stages' work; a rank does not wait for its own.

A collective beside compute slows it by :data:`BESIDE` of its own time.

The slowest rank's parts are shown; ``bubble`` is where it waits for others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from quern.parallel.planning.bubble import makespan
from quern.parallel.planning.host_state import host_state
from quern.parallel.planning.schedules import SCHEDULES
from quern.parallel.planning.step import Step
from quern.parallel.planning.traffic import elements_held, traffic
from quern.parallel.planning.weights import alike
from quern.planner.hardware import Hardware
from quern.planner.time.messages import OF_WEIGHTS, hop, seconds
from quern.planner.time.products import Phases, block, embedding, loss, moved, total

__all__ = ["BESIDE", "AtLeast", "StepTime", "estimate"]

BESIDE = 0.15
"""Share of its multiprocessors that a GPU spends on a collective (calculon's ``processor_usage`` of NVLink)."""


@dataclass(frozen=True)
class StepTime:
    """Of an optimizer step."""

    seconds: float
    parts: Mapping[str, float]
    """[s] Of the slowest rank; they add up to ``seconds``."""
    tokens: int
    """Of the global batch."""
    tokens_per_gpu_s: float
    mfu_full: float
    """Share of the BF16 peak, in FP8 too, that the model's FLOPs are, recomputation not counted."""
    mfu_causal: float
    """The same with the half of the attention matrix that is used."""
    stages: Sequence[tuple[float, float, float, float]] = ()
    """[s] Of a micro-batch in each stage of a pipeline: forward, backward whole, for inputs, for weights."""


@dataclass
class _Rank:
    """A rank of the pipeline, or the only one: seconds by part of all micro-batches, and after them."""

    busy: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    times: dict[int, tuple[float, float, float, float]] = field(default_factory=dict)
    """Of each of its stages, for one micro-batch: forward, backward whole, for inputs, for weights."""


def estimate(step: Step, hardware: Hardware, moment_bytes: int = 4) -> StepTime:
    """How long a step takes; ``moment_bytes``: of an element of one of Adam's moments."""
    plan, layout, number = step.plan, step.layout, step.num_micro_batches
    layers = layout.layers_of_stages(step.shape)
    blocks = {sparse: block(step, hardware, layer) for layer, sparse in _kinds(step)}
    found: dict[tuple[object, ...], _Rank] = {}
    ranks = []
    for place in range(plan.pp):
        stages = layout.stages_of(place) if plan.pp > 1 else (0,)
        # ranks alike are counted once
        kind = tuple((stage == 0, stage == len(layers) - 1, *_numbers(step, layers[stage])) for stage in stages)
        if kind not in found:
            found[kind] = _rank(step, hardware, place, stages, blocks, moment_bytes)
        ranks.append((stages, found[kind]))
    slowest = max((rank for _, rank in ranks), key=lambda rank: total(rank.busy) + total(rank.after))
    times: list[tuple[float, float, float, float]] = []
    if plan.pp == 1:
        working = total(slowest.busy)
    else:
        times = [(0.0, 0.0, 0.0, 0.0)] * len(layers)
        for stages, rank in ranks:
            for stage, own in zip(stages, rank.times.values(), strict=True):
                times[stage] = own
        working = makespan(layout.scheduling, plan.pp, len(ranks[0][0]), number, times, hop(step, hardware))
    end = max(total(rank.after) for _, rank in ranks)
    whole = working + end
    parts = dict(slowest.busy)
    for part, value in slowest.after.items():
        parts[part] = parts.get(part, 0.0) + value
    parts["bubble"] = max(0.0, whole - total(parts))  # or the last bit of a sum
    tokens = plan.dp_size * layout.micro_batch * layout.seq_len * number
    speed = tokens / whole / plan.world_size
    full, causal = (
        step.shape.flops_per_token(layout.seq_len, causal=causal) * speed / hardware.flops for causal in (False, True)
    )
    return StepTime(whole, parts, tokens, speed, full, causal, tuple(times))


class AtLeast:
    """Seconds that steps take at least, which are quick to find: messages of FSDP2 and the update are not in them, and
    what layouts share that differ in those alone is counted once."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._known: dict[Step, tuple[float, float, float, float]] = {}

    def __call__(self, step: Step) -> float:
        """A pipeline's slowest rank computes a share of all at the least; its last rank begins when a micro-batch has
        come through the other stages, and then its gradient goes back through them."""
        plan, layout = step.plan, step.layout
        # by_fsdp as in the whole, for weights are cast in other places there
        alone = replace(plan, pp=1, dp_replicate=1, dp_shard=plan.ep * (2 if plan.by_fsdp else 1))
        one = replace(layout, plan=alone, schedule=None, stages_per_rank=None, zero=None, reshard_after_forward=True)
        whole, of_block, before, after = self._micro_batch(replace(step, layout=one, num_micro_batches=1))
        busy = step.num_micro_batches * whole / plan.pp
        if plan.pp == 1 or step.shape.moe is not None or SCHEDULES[layout.scheduling].v_shaped:
            return busy
        layers = [len(stage) for stage in layout.layers_of_stages(step.shape)]
        last = sum(layers[stage] for stage in layout.stages_of(plan.pp - 1)) * of_block + after
        return max(busy, step.num_micro_batches * last + sum(layers[: plan.pp - 1]) * of_block + before)

    def _micro_batch(self, step: Step) -> tuple[float, float, float, float]:
        """Seconds forward and backward: of all, of a block, and of what is before and after blocks."""
        if step not in self._known:
            fewer = step.shape.model_copy(update={"num_layers": max(1, step.shape.num_layers - 1)})
            whole, less = (_without_weights(one, self._hardware) for one in (step, replace(step, shape=fewer)))
            before, after = (
                sum(map(total, vars(phases).values()))
                for phases in (embedding(step, self._hardware), loss(step, self._hardware))
            )
            self._known[step] = whole, whole - less, before, after
        return self._known[step]


def _without_weights(step: Step, hardware: Hardware) -> float:
    blocks = {sparse: block(step, hardware, layer) for layer, sparse in _kinds(step)}
    busy = _rank(step, hardware, 0, (0,), blocks, 4).busy
    return sum(value for part, value in busy.items() if part not in ("dp messages", "copies"))


def _numbers(step: Step, layers: range) -> tuple[int, int]:
    """How many layers there are, and how many have experts."""
    return len(layers), sum(map(step.shape.is_sparse, layers))


def _kinds(step: Step) -> list[tuple[int, bool]]:
    """A layer of each kind, and whether it has experts."""
    return [(layer, step.shape.is_sparse(layer)) for layer, _ in alike(step.shape, range(step.shape.num_layers))]


def _rank(
    step: Step, hardware: Hardware, place: int, stages: Sequence[int], blocks: Mapping[bool, Phases], moment_bytes: int
) -> _Rank:
    """What the ranks at that place of the pipeline do, with these stages; ``blocks``: of layers with experts, and
    without."""
    layout, number = step.layout, step.num_micro_batches
    layers = layout.layers_of_stages(step.shape)
    rank, own = place * (step.plan.world_size // step.plan.pp), _Rank()
    compute: dict[int, Phases] = {}
    for stage in stages:
        phases, recomputed = Phases(), layout.recomputed(len(layers[stage]))
        for layer, count in alike(step.shape, layers[stage]):
            kind = blocks[step.shape.is_sparse(layer)]
            again = sum(step.shape.is_sparse(n) == step.shape.is_sparse(layer) for n in layers[stage][:recomputed])
            phases.add(Phases(kind.forward, kind.inputs, kind.weights), count)
            phases.add(Phases(again=kind.again), again)
        if stage == 0:
            phases.add(embedding(step, hardware))
        if stage == len(layers) - 1:
            phases.add(loss(step, hardware))
        compute[stage] = phases
    forward = sum(total(phases.forward) for phases in compute.values())
    backward = sum(total(p.inputs) + total(p.weights) + total(p.again) for p in compute.values())
    count = sum(len(layers[stage]) for stage in stages)
    sent = _messages(step, hardware, rank, count, forward, backward, compute)
    for stage, phases in compute.items():
        share = len(layers[stage]) / count
        more = [share * total(by_part) for by_part in (sent.forward, sent.inputs, sent.weights)]
        one, inputs, weights = total(phases.forward), total(phases.inputs) + total(phases.again), total(phases.weights)
        times = one + more[0], inputs + weights + more[1] + more[2], inputs + more[1], weights + more[2]
        own.times[stage] = times
        for by_part in vars(phases).values():
            for part, value in by_part.items():
                own.busy[part] = own.busy.get(part, 0.0) + number * value
    own.after = sent.again
    for by_part in (sent.forward, sent.inputs, sent.weights):
        for part, value in by_part.items():
            own.busy[part] = own.busy.get(part, 0.0) + number * value
    own.after["update"] = _update(step, hardware, rank, moment_bytes)
    return own


def _messages(
    step: Step,
    hardware: Hardware,
    rank: int,
    blocks: int,
    forward: float,
    backward: float,
    compute: Mapping[int, Phases],
) -> Phases:
    """What a rank's messages add to a micro-batch's forward and backward, and, as ``again``, after the last one;
    ``forward`` and ``backward``: its compute meanwhile."""
    layout, number, sent = step.layout, step.num_micro_batches, Phases()
    full, selective = (layout.activation_checkpointing == policy for policy in ("full", "selective"))
    again = full or selective
    attention = sum(phases.forward.get("attention", 0.0) for phases in compute.values())
    gathers, scatters, reduces, copies = _Flow(), _Flow(), _Flow(), 0.0
    for row in traffic(step, rank):
        took = seconds(step, hardware, row)
        if row.axis == "pp":
            if row.what == "tied gradients":
                sent.again["pp messages"] = took
        elif row.what == "partial gradients":
            sent.again["tp messages"] = took
        elif row.axis == "tp":
            # in a forward 2 gathers and 2 scatters of 10, and of those that are computed again
            share = 1.0 if row.what == "softmax" else 4 / (10 + 2 * again + 2 * full)
            _spread(sent, "tp messages", took / number * _exposed_tp(step), share)
        elif row.axis == "cp" and row.what not in OF_WEIGHTS:
            if row.collective == "send":
                took = max(0.0, took - 3.5 * attention * number)
            _spread(sent, "cp messages", took / number, 1 / (2 + again))
        elif row.axis in ("ep", "ep nodes", "ep in a node"):
            took *= 0.5 if layout.scheduling == "dualpipe_v" and step.plan.pp > 1 else 1
            _spread(sent, "ep messages", took / number, 1 / (2 + again))
        elif row.what == "gather weights":
            gathers.add(took, row.calls)
            copies += moved(hardware, 2 * row.payload, 0)  # out of the message
        elif row.collective == "reduce_scatter":
            scatters.add(took, row.calls)
            copies += moved(hardware, row.payload * (1 + step.compute_bytes / step.gradient_bytes), 0)  # and into it
        else:
            reduces.add(took, row.calls)
    if copies:
        _spread(sent, "copies", copies / number, 0.3)
    elif not layout.adds_gradients(step.plan):  # one process, or DDP
        size = elements_held(step, rank) * (step.compute_bytes + 2 * step.gradient_bytes)
        _spread(sent, "copies", moved(hardware, size), 0)
    _expose(step, sent, blocks, gathers, scatters, reduces, forward, backward)
    return sent


@dataclass
class _Flow:
    """Messages of one kind in a step."""

    seconds: float = 0.0
    calls: int = 0

    def add(self, took: float, calls: int) -> None:
        self.seconds += took
        self.calls += calls

    @property
    def one(self) -> float:
        return self.seconds / self.calls if self.calls else 0.0


def _expose(
    step: Step,
    sent: Phases,
    blocks: int,
    gathers: _Flow,
    scatters: _Flow,
    reduces: _Flow,
    forward: float,
    backward: float,
) -> None:
    """Data-parallel messages beside compute: per pass the sum over a rank's ``blocks``, which are alike."""
    layout, number = step.layout, step.num_micro_batches
    kept = layout.reshard_after_forward is False
    # forwards of a step that gather: where weights are kept, as often as one block is gathered
    passes = max(1, min(number, gathers.calls // blocks)) if kept else number
    in_forward = gathers.seconds * (1.0 if kept else 0.5)
    in_backward = gathers.seconds - in_forward
    by_micro_batch = step.plan.pp == 1 and layout.zero != 1
    last = reduces.seconds
    if by_micro_batch:
        in_backward += scatters.seconds
    else:
        last += scatters.seconds
    name, first, final = "dp messages", min(in_forward, gathers.one * passes), scatters.one * number * by_micro_batch
    _spread(sent, name, (_beside(in_forward - first, forward * passes) + first) / number, 1)
    _spread(sent, name, (_beside(in_backward - final, backward * number) + final) / number, 0)
    if last:
        ends = max(reduces.one, 0.0 if by_micro_batch else scatters.one)
        sent.again[name] = sent.again.get(name, 0.0) + _beside(last - ends, backward) + ends


def _beside(messages: float, compute: float) -> float:
    """What messages add to compute that goes on meanwhile."""
    return max(0.0, messages - compute) + BESIDE * min(messages, compute)


def _exposed_tp(step: Step) -> float:
    """The part of ``tp``'s messages that no product hides."""
    if step.layout.async_tp:
        return 0.5
    return (1 + 1 / step.layout.tp_pieces) / 2


def _spread(sent: Phases, part: str, value: float, in_forward: float) -> None:
    """Over a micro-batch's forward and its backward, of which two thirds are for inputs."""
    shares = in_forward, (1 - in_forward) * 2 / 3, (1 - in_forward) / 3
    for by_part, share in zip((sent.forward, sent.inputs, sent.weights), shares, strict=True):
        by_part[part] = by_part.get(part, 0.0) + share * value


def _update(step: Step, hardware: Hardware, rank: int, moment_bytes: int) -> float:
    """The norm of gradients, and AdamW: gradients are read twice, masters and moments read and written, weights cast.

    With the state on the host gradients go there and weights come back, one after the other; the host is taken to
    compute as fast as they travel."""
    if step.layout.host_state:
        bytes_of = host_state(step, rank, moment_bytes)
        return (bytes_of["down"] + bytes_of["up"]) / hardware.host_bytes_per_s
    of_one = 2 * step.gradient_bytes + 2 * step.reduce_bytes + 4 * moment_bytes
    if step.layout.keeps_weights(step.plan):
        of_one += step.compute_bytes
    return moved(hardware, elements_held(step, rank) * of_one)
