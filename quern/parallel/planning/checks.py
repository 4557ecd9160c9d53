"""Rejects impossible layouts before anything starts: sizes that do not divide, and keys without effect.

A sequence or a head that ranks do not divide is no exception in a collective but the death of the process (gloo aborts
on unequal sizes), so nothing of this may be left to the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, lcm
from typing import Protocol

from quern.errors import InputError
from quern.model.config import ModelShape
from quern.model.float8.recipe import Recipe
from quern.parallel.planning.float8 import fitting, local_sizes
from quern.parallel.planning.mesh import MeshPlan, choices, divisors
from quern.parallel.planning.schedules import SCHEDULES, check_micro_batches, why_no_split_backward
from quern.parallel.planning.stages import num_stages, stage_layers

__all__ = ["LayoutKeys", "Task", "check_layout"]


class LayoutKeys(Protocol):
    """The part of a training config that says how a model is laid out (its section ``parallel``)."""

    @property
    def tp(self) -> int: ...
    @property
    def async_tp(self) -> bool: ...
    @property
    def nvlink_domain(self) -> int | None: ...
    @property
    def tp_across_domains(self) -> bool: ...
    @property
    def pp(self) -> int: ...
    @property
    def schedule(self) -> str | None: ...
    @property
    def scheduling(self) -> str: ...
    @property
    def stages_per_rank(self) -> int | None: ...
    @property
    def stage_layers(self) -> tuple[int, ...] | None: ...
    @property
    def resharding(self) -> bool | int: ...


@dataclass(frozen=True)
class Task:
    """The model and options to be computed on a layout."""

    seq_len: int
    micro_batch: int
    batches: Mapping[str, int]
    """Every global batch that the run has, by the key that says it."""
    activation_checkpointing: str = "none"
    compiled: bool = False
    cuda: bool = False
    float8: Recipe | None = None
    float8_all_gather: bool = False
    local_ranks: int | None = None
    """Ranks that the launcher starts on each node; None where it has not said."""


def check_layout(shape: ModelShape, plan: MeshPlan, keys: LayoutKeys, task: Task) -> None:
    """Raise :class:`InputError` for the first problem: the key, the size, the axis, what would fit."""
    _in_vain(keys, task)
    if plan.tp > 1:
        _tensors(shape, plan, task.seq_len)
        _domains(plan, keys, task)
        if task.activation_checkpointing == "full" and task.compiled and not task.cuda:
            raise InputError(
                "activation_checkpointing: full in compiled blocks with tp > 1 makes torch's compiler fail on the CPU; "
                "expected none or selective, or compile.enabled=false"
            )
    if task.float8 is not None:
        _float8(shape, plan, keys, task, task.float8)
    if plan.pp > 1:
        _stages(shape, plan, keys, task)
        _micro_batches(plan, keys, task)


def _in_vain(keys: LayoutKeys, task: Task) -> None:
    """A key that changes nothing was meant to change something."""
    if keys.tp == 1:
        for name, value in (
            ("async_tp", keys.async_tp), ("tp_across_domains", keys.tp_across_domains),
            ("nvlink_domain", keys.nvlink_domain),
        ):  # fmt: skip
            if value:
                raise InputError(
                    f"parallel.{name}: changes nothing without tensor parallelism; expected tp > 1 with it"
                )
    if keys.pp == 1:
        for name, given in (
            ("schedule", keys.schedule), ("stages_per_rank", keys.stages_per_rank), ("stage_layers", keys.stage_layers)
        ):  # fmt: skip
            if given is not None:
                raise InputError(
                    f"parallel.{name}: changes nothing without a pipeline; expected pp > 1 with it, or null"
                )
    if keys.async_tp and not task.compiled:
        raise InputError("parallel.async_tp: is a pass of torch.compile; expected compile.enabled=true with it")
    if keys.async_tp and not task.cuda:
        raise InputError(
            "parallel.async_tp: runs on CUDA only; expected false here (or device=cuda, to plan elsewhere)"
        )


def _tensors(shape: ModelShape, plan: MeshPlan, seq_len: int) -> None:
    """Heads, width, vocabulary and sequence are each dealt out whole."""
    tp = plan.tp
    sizes = {
        "model.num_heads": shape.num_heads, "model.ffn_dim": shape.ffn_dim, "the padded vocabulary":
        shape.padded_vocab_size, "seq_len": seq_len,
    }  # fmt: skip
    kv_heads = shape.num_kv_heads

    def shared(size: int) -> bool:
        """Whether ranks get whole key and value heads, or whole groups of ranks one each."""
        return kv_heads % size == 0 or size % kv_heads == 0

    fitting = [
        size for size in divisors(shape.num_heads) if shared(size) and not any(of % size for of in sizes.values())
    ]  # fmt: skip
    would_fit = f"tp {choices(fitting)} would fit"
    for name, size in sizes.items():
        if size % tp == 0:
            continue
        other = f" ({size})"
        if name == "the padded vocabulary":
            multiple = lcm(shape.vocab_multiple, tp)
            other = f" ({size}: {shape.vocab_size} ids, model.vocab_multiple {shape.vocab_multiple})"
            would_fit += f", or model.vocab_multiple {multiple}"
        if name in ("model.ffn_dim", "seq_len"):
            below, above = size // tp * tp, (size // tp + 1) * tp
            would_fit += f", or {name} {above}" if not below else f", or {name} {below} or {above}"
        raise InputError(f"parallel.tp: expected a divisor of {name}{other}, got {tp}; {would_fit}")
    if not shared(tp):
        raise InputError(
            f"parallel.tp: expected a divisor or a multiple of model.num_kv_heads ({kv_heads}), got {tp}; {would_fit}"
        )


def _float8(shape: ModelShape, plan: MeshPlan, keys: LayoutKeys, task: Task, recipe: Recipe) -> None:
    """A recipe that no layer can take, or tokens that no kernel of the weights' gradients can."""
    if not fitting(shape, plan.tp, recipe):
        sizes = ", ".join(f"{name} {rows}×{columns}" for name, (rows, columns) in local_sizes(shape, plan.tp).items())
        raise InputError(
            f"float8.recipe: {recipe.scaling} takes matrices whose sizes are multiples of {recipe.multiple}, and no "
            f"layer has such on a rank ({sizes}); expected other sizes of the model or tp, or null"
        )
    if recipe.implementation == "torchao" and plan.tp > 1:
        raise InputError(
            f"float8.implementation: torchao's layers are not split over ranks; expected quern with parallel.tp "
            f"{plan.tp}, or tp 1"
        )
    if recipe.implementation == "torchao" and plan.pp > 1 and SCHEDULES[keys.scheduling].splits_backward:
        raise InputError(
            f"float8.implementation: schedule {keys.scheduling} computes gradients of inputs and of weights apart, and "
            f"torchao both together, each time; expected quern, or schedule {_whole_backward()}"
        )
    tokens = task.seq_len * task.micro_batch
    if tokens % 16:
        raise InputError(
            f"float8.recipe: expected a multiple of 16 tokens in a micro-batch, got seq_len {task.seq_len} × "
            f"micro_batch {task.micro_batch} = {tokens}; micro_batch {16 // gcd(16, task.seq_len)} would fit, or "
            f"seq_len {-(-task.seq_len // 16) * 16}"
        )
    if task.float8_all_gather and plan.dp_shard == 1:
        raise InputError(
            "float8.all_gather: changes nothing where FSDP2 shards no weights; expected false, or parallel.dp_shard > 1"
        )
    if task.float8_all_gather and not isinstance(keys.resharding, bool):
        raise InputError(
            f"parallel.reshard_after_forward: expected true or false with float8.all_gather, got {keys.resharding}; "
            f"FSDP2 does not reshard to fewer ranks what it gathers in FP8"
        )
    if keys.async_tp:
        raise InputError(
            "parallel.async_tp: overlaps products that are not in FP8; expected false with float8.recipe, or null there"
        )


def _domains(plan: MeshPlan, keys: LayoutKeys, task: Task) -> None:
    """Tensor parallelism talks several times in every layer, and waits each time: that is for NVLink."""
    domain = keys.nvlink_domain or (task.local_ranks if task.cuda else None)
    if domain is None or keys.tp_across_domains:
        return
    ends = [(first // domain, (first + plan.tp - 1) // domain) for first in range(0, plan.world_size, plan.tp)]
    if all(first == last for first, last in ends):
        return
    said = f"parallel.nvlink_domain {domain}" if keys.nvlink_domain else f"{domain} ranks a node"
    why = "reaches beyond" if plan.tp > domain else "would lie across two of"
    raise InputError(
        f"parallel.tp: a group of {plan.tp} ranks {why} the NVLink domains ({said}); expected tp "
        f"{choices(divisors(domain))}, or tp_across_domains=true"
    )


def _stages(shape: ModelShape, plan: MeshPlan, keys: LayoutKeys, task: Task) -> None:
    schedule, per_rank = keys.scheduling, keys.stages_per_rank
    kind = SCHEDULES[schedule]
    takes = ", ".join(name for name, other in SCHEDULES.items() if other.stages_per_rank is None)
    if kind.stages_per_rank is not None and per_rank is not None:
        raise InputError(
            f"parallel.stages_per_rank: schedule {schedule} has {kind.stages_per_rank} a rank; expected null, or one "
            f"of the schedules that take it: {takes}"
        )
    if per_rank == 1:
        raise InputError(
            f"parallel.stages_per_rank: schedule {schedule} takes 2 or more, got 1; expected that, or 1f1b"
        )
    stages = num_stages(schedule, plan.pp, per_rank)
    if stages > shape.num_layers:
        raise InputError(
            f"parallel.pp: {plan.pp} ranks × {stages // plan.pp} stages a rank ({schedule}) need {stages} layers or "
            f"more, model.num_layers is {shape.num_layers}; {_fewer(shape, plan, schedule, stages)}"
        )
    stage_layers(shape, stages, task.seq_len, keys.stage_layers)
    if kind.splits_backward and (why := why_no_split_backward()):
        raise InputError(
            f"parallel.schedule: {schedule} computes gradients of inputs and of weights apart, which {why}; expected a "
            f"newer torch, or schedule {_whole_backward()}"
        )
    if kind.splits_backward and task.activation_checkpointing != "none":
        raise InputError(
            f"activation_checkpointing: schedule {schedule} computes gradients of inputs and of weights apart, and "
            f"with {task.activation_checkpointing} torch would compute every block three times; expected none, or "
            f"schedule {_whole_backward()}"
        )
    if kind.splits_backward and task.compiled:
        raise InputError(
            f"compile.enabled: schedule {schedule} computes gradients of inputs and of weights apart, and a compiled "
            f"block's backward is one piece, which torch refuses to run in two; expected false, or "
            f"schedule {_whole_backward()}"
        )
    if kind.splits_backward and plan.by_fsdp and keys.resharding is not False:  # torch reports nothing
        raise InputError(
            f"parallel.reshard_after_forward: schedule {schedule} computes gradients of inputs and of weights apart, "
            f"and FSDP2 loses gradients of weights that are dropped in between; expected false or null, or schedule "
            f"{_whole_backward()}"
        )


def _fewer(shape: ModelShape, plan: MeshPlan, schedule: str, stages: int) -> str:
    most = shape.num_layers * plan.pp // stages
    said = [f"pp up to {most}"] if most > 1 else []
    said += [f"stages_per_rank up to {shape.num_layers // plan.pp}"] * (
        SCHEDULES[schedule].stages_per_rank is None and shape.num_layers // plan.pp > 1
    )
    said += ["schedule 1f1b"] * (stages > plan.pp and shape.num_layers >= plan.pp)
    return f"{' or '.join(said)} would fit" if said else "expected more layers or no pipeline"


def _whole_backward() -> str:
    names = [name for name, kind in SCHEDULES.items() if not kind.splits_backward]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _micro_batches(plan: MeshPlan, keys: LayoutKeys, task: Task) -> None:
    """Every batch of the run in as many micro-batches as the schedule takes."""
    schedule = keys.scheduling
    stages = num_stages(schedule, plan.pp, keys.stages_per_rank)
    for name, batch in task.batches.items():
        share = batch // plan.dp_size  # of a data-parallel rank
        number = share // task.micro_batch
        complaint = check_micro_batches(schedule, plan.pp, stages, number)
        if complaint is None:
            continue
        fit = [count for count in range(1, number + 2 * stages + 2) if _takes(plan, schedule, stages, count)]
        below, above = [count for count in fit if count < number][-1:], [count for count in fit if count > number][:1]
        batches = [count * task.micro_batch * plan.dp_size for count in (*below, *above)]
        micro = [size for size in divisors(share) if _takes(plan, schedule, stages, share // size)]
        options = [f"{key} {choices(sizes)}" for key, sizes in ((name, batches), ("micro_batch", micro)) if sizes]
        sequences = f"{batch} sequences are" if batch > 1 else "1 sequence is"
        micro_batches = f"{number} micro-batches" if number > 1 else "1 micro-batch"
        raise InputError(
            f"{name}: {sequences} {micro_batches} a rank ({plan.dp_size} data-parallel × micro_batch "
            f"{task.micro_batch}); {complaint.split('; ')[0]}; {' or '.join(options)} would fit"
        )


def _takes(plan: MeshPlan, schedule: str, stages: int, number: int) -> bool:
    return check_micro_batches(schedule, plan.pp, stages, number) is None
