"""Rejects impossible layouts before anything starts: sizes that do not divide, and keys without effect.

A sequence or a head that ranks do not divide is no exception in a collective but the death of the process (gloo aborts
on unequal sizes), so nothing of this may be left to the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import gcd, lcm

from quern.errors import InputError
from quern.model.config import ModelShape
from quern.model.float8.recipe import Recipe
from quern.parallel.planning.context_checks import check_context
from quern.parallel.planning.float8 import fitting, local_sizes
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan, choices, divisors
from quern.parallel.planning.schedules import SCHEDULES, check_micro_batches, why_no_split_backward
from quern.parallel.planning.weights import alike, dealt_along

__all__ = ["Task", "check_layout"]


@dataclass(frozen=True)
class Task:
    """What a layout is to be used for, and where."""

    batches: Mapping[str, int]
    """Every global batch that the run has, by the key that says it."""
    cuda: bool = False
    local_ranks: int | None = None
    """Ranks that the launcher starts on each node; None where it has not said."""


def check_layout(shape: ModelShape, layout: Layout, task: Task) -> None:
    """Raise :class:`InputError` for the first problem: the key, the size, the axis, what would fit."""
    plan = layout.plan
    _in_vain(layout, task)
    _experts(shape, layout, task)
    check_context(shape, layout)
    if plan.tp > 1:
        _tensors(shape, plan, layout.tokens)
        _pieces(layout)
        _domains(layout, task)
        if layout.activation_checkpointing == "full" and layout.compile_backend is not None and not task.cuda:
            raise InputError(
                "activation_checkpointing: full in compiled blocks with tp > 1 makes torch's compiler fail on the CPU; "
                "expected none or selective, or compile.enabled=false"
            )
    if layout.bf16_gradients and (plan.pp > 1 or (plan.dp_replicate > 1 and not plan.by_fsdp)):
        why = "a pipeline adds tied embeddings and stages" if plan.pp > 1 else "DDP sums buckets"
        other = "parallel.pp 1" if plan.pp > 1 else "parallel.dp_shard > 1, which is FSDP2"
        raise InputError(
            f"optimizer.gradients: bf16 is not available here, as {why} in the dtype of the weights; expected fp32, or "
            f"{other}"
        )
    if layout.host_state:
        _host_state(layout)
    if layout.float8 is not None:
        _float8(shape, layout, layout.float8)
    if plan.pp > 1:
        _stages(shape, layout)
        _micro_batches(layout, task)


def _in_vain(layout: Layout, task: Task) -> None:
    """A key that changes nothing was meant to change something."""
    if layout.plan.tp == 1:
        for name, value in (
            ("async_tp", layout.async_tp), ("tp_pieces", layout.tp_pieces > 1),
            ("tp_across_domains", layout.tp_across_domains), ("nvlink_domain", layout.nvlink_domain),
        ):  # fmt: skip
            if value:
                raise InputError(
                    f"parallel.{name}: changes nothing without tensor parallelism; expected tp > 1 with it"
                )
    if layout.plan.pp == 1:
        for name, given in (
            ("schedule", layout.schedule), ("stages_per_rank", layout.stages_per_rank),
            ("stage_layers", layout.stage_layers),
        ):  # fmt: skip
            if given is not None:
                raise InputError(
                    f"parallel.{name}: changes nothing without a pipeline; expected pp > 1 with it, or null"
                )
    if layout.zero is not None and layout.plan.shards == 1:
        raise InputError(
            "parallel.zero: changes nothing where FSDP2 shards no weights; expected dp_shard or cp > 1 with it, or null"
        )
    if layout.async_tp and layout.compile_backend is None:
        raise InputError("parallel.async_tp: is a pass of torch.compile; expected compile.enabled=true with it")
    if layout.async_tp and not task.cuda:
        raise InputError(
            "parallel.async_tp: runs on CUDA only; expected false here (or device=cuda, to plan elsewhere)"
        )


def _experts(shape: ModelShape, layout: Layout, task: Task) -> None:
    """What is not done yet with experts, or with norms over all heads."""
    plan = layout.plan
    if shape.qk_norm == "whole" and plan.tp > 1:
        raise InputError(
            f"parallel.tp: expected 1 with model.qk_norm whole, whose norms are over all heads, got {plan.tp}"
        )
    if shape.moe is None:
        if plan.ep > 1:
            raise InputError(f"parallel.ep: changes nothing without experts (model.moe); expected 1, got {plan.ep}")
        return
    if shape.moe.num_experts % plan.ep:
        fitting = [size for size in divisors(plan.shards) if shape.moe.num_experts % size == 0]
        raise InputError(
            f"parallel.ep: expected a divisor of model.moe.num_experts ({shape.moe.num_experts}), got {plan.ep}; "
            f"{choices(fitting)} would fit"
        )
    if plan.ep > 1 and not isinstance(layout.reshard_after_forward, bool):
        raise InputError(
            f"parallel.reshard_after_forward: expected true or false with ep {plan.ep}, whose ranks hold other experts "
            f"each, got {layout.reshard_after_forward}"
        )
    number, by_width = shape.moe.num_experts, dealt_along((shape.moe.num_experts, 1, shape.dim), 2, plan.shards)
    if by_width and not isinstance(layout.reshard_after_forward, bool):
        raise InputError(
            f"parallel.reshard_after_forward: FSDP2 takes a number for rows alone, and {plan.shards} ranks, which do "
            f"not divide {number} experts, have a part of each one's width; expected true or false, got "
            f"{layout.reshard_after_forward}"
        )
    for key, wrong in (("parallel.ep", plan.ep == 1), ("optimizer.state device", layout.host_state)):
        if layout.balancing.place_interval is not None and wrong:
            raise InputError(
                f"experts.place_interval: evens the loads of ranks, on the device; expected {key} "
                f"{'above 1 ' * (plan.ep == 1)}with it, or null"
            )
    if layout.ep_backend == "deepep":
        _deepep(shape, layout, task)
    if layout.ep_node is not None and shape.moe.capacity is not None:
        raise InputError("parallel.ep_node: expected null with model.moe.capacity, whose places travel in one stage")
    for key, given, why in (
        ("parallel.tp", any(width % plan.tp for width in (shape.moe.ffn_dim, shape.moe.shared_ffn_dim)),
         f"expected a divisor of ffn_dim ({shape.moe.ffn_dim}) and shared_ffn_dim ({shape.moe.shared_ffn_dim})"),
        ("float8.delayed", layout.float8 is not None and layout.float8.delayed,
         "their rows are other ones in each step; expected false, or recipe blockwise"),
        ("float8.implementation", layout.float8 is not None and layout.float8.implementation == "torchao",
         "torchao computes linear layers; expected quern, as with recipe blockwise"),
        ("float8.all_gather", layout.float8_all_gather,
         "their weights are gathered in the dtype of activations; expected false, as with recipe blockwise"),
        ("model.moe.capacity", shape.moe.capacity is not None and plan.cp * plan.tp > 1,
         "with parallel.cp or tp a rank's routers see a part of the sequence; expected null"),
    ):  # fmt: skip
        if given:
            raise InputError(f"{key}: does not go with experts (model.moe): {why}")


def _deepep(shape: ModelShape, layout: Layout, task: Task) -> None:
    """What DeepEP's kernels do not do, or quern not with them."""
    assert shape.moe is not None
    for missing, expected in (
        (not task.cuda, "torch, as they run on CUDA"),
        (find_spec("deep_ep") is None, "the package deep_ep to be installed"),
        (str(layout.compute_dtype) != "torch.bfloat16", "precision bf16 with it"),
        (layout.ep_node is not None, "ep_node=null with it, as they know the nodes"),
        (layout.ep_float8, "ep_float8=false with it"),
        (shape.moe.capacity is not None, "model.moe.capacity=null with it"),
    ):
        if missing:
            raise InputError(f"parallel.ep_backend: DeepEP's kernels are not to be had so; expected {expected}")


def _host_state(layout: Layout) -> None:
    """What goes by masters on the device, or by the dtype of weights there."""
    plan = layout.plan
    for key, value, why in (
        ("float8.all_gather", layout.float8_all_gather, "its scales are those of masters"),
        ("float8.implementation", layout.float8 is not None and layout.float8.implementation == "torchao",
         "torchao quantises masters"),
        ("parallel.dp_replicate", plan.dp_replicate > 1 and not plan.by_fsdp and layout.compute_dtype.itemsize < 4,
         "DDP sums gradients in the dtype of the weights; dp_shard above 1, which is FSDP2, would fit"),
    ):  # fmt: skip
        if value:
            raise InputError(
                f"{key}: does not go with optimizer.state host, which keeps masters from the device: {why}"
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


def _pieces(layout: Layout) -> None:
    """Of a rank's tokens, as many in each."""
    seq_len, tp, pieces = layout.tokens, layout.plan.tp, layout.tp_pieces
    if layout.async_tp and pieces > 1:
        raise InputError(
            f"parallel.tp_pieces: expected 1 with async_tp, got {pieces}; either overlaps the same collectives"
        )
    if seq_len // tp % pieces:
        raise InputError(
            f"parallel.tp_pieces: expected a divisor of a rank's tokens ({_tokens(layout)} {seq_len} / tp {tp} = "
            f"{seq_len // tp}), got {pieces}; {choices(divisors(seq_len // tp))} would fit"
        )


def _tokens(layout: Layout) -> str:
    return "seq_len" if layout.plan.cp == 1 else "seq_len / cp"


def _float8(shape: ModelShape, layout: Layout, recipe: Recipe) -> None:
    """A recipe that no layer can take, or tokens that no kernel of the weights' gradients can."""
    plan = layout.plan
    kinds = [layer for layer, _ in alike(shape, range(shape.num_layers))]
    if not any(fitting(shape, plan.tp, recipe, layer) for layer in kinds):
        known = {name: size for layer in kinds for name, size in local_sizes(shape, plan.tp, layer).items()}
        sizes = ", ".join(f"{name} {rows}×{columns}" for name, (rows, columns) in known.items())
        raise InputError(
            f"float8.recipe: {recipe.scaling} takes matrices whose sizes are multiples of {recipe.multiple}, and no "
            f"layer has such on a rank ({sizes}); expected other sizes of the model or tp, or null"
        )
    if recipe.implementation == "torchao" and plan.tp > 1:
        raise InputError(
            f"float8.implementation: torchao's layers are not split over ranks; expected quern with parallel.tp "
            f"{plan.tp}, or tp 1"
        )
    if recipe.implementation == "torchao" and plan.pp > 1 and SCHEDULES[layout.scheduling].splits_backward:
        raise InputError(
            f"float8.implementation: schedule {layout.scheduling} computes gradients of inputs and of weights apart, "
            f"and torchao both together, each time; expected quern, or schedule {_whole_backward()}"
        )
    tokens = layout.tokens * layout.micro_batch
    if tokens % 16:
        raise InputError(
            f"float8.recipe: expected a multiple of 16 tokens in a micro-batch, got {_tokens(layout)} {layout.tokens} "
            f"× micro_batch {layout.micro_batch} = {tokens}; micro_batch {16 // gcd(16, layout.tokens)} would fit, or "
            f"seq_len {-(-layout.tokens // 16) * 16 * plan.cp}"
        )
    if layout.float8_all_gather and plan.shards == 1:
        raise InputError(
            "float8.all_gather: changes nothing where FSDP2 shards no weights; expected false, or parallel.dp_shard > 1"
        )
    if layout.float8_all_gather and not isinstance(layout.reshard_after_forward, bool):
        raise InputError(
            f"parallel.reshard_after_forward: expected true or false with float8.all_gather, got "
            f"{layout.reshard_after_forward}; FSDP2 does not reshard to fewer ranks what it gathers in FP8"
        )
    if layout.async_tp:
        raise InputError(
            "parallel.async_tp: overlaps products that are not in FP8; expected false with float8.recipe, or null "
            "there; parallel.tp_pieces overlaps those in FP8 too"
        )


def _domains(layout: Layout, task: Task) -> None:
    """Tensor parallelism talks several times in every layer, and waits each time: that is for NVLink."""
    plan = layout.plan
    domain = layout.nvlink_domain or (task.local_ranks if task.cuda else None)
    if domain is None or layout.tp_across_domains:
        return
    until = min(plan.world_size, lcm(plan.tp, domain))  # from there on groups lie as from the first rank on
    ends = [(first // domain, (first + plan.tp - 1) // domain) for first in range(0, until, plan.tp)]
    if all(first == last for first, last in ends):
        return
    said = f"parallel.nvlink_domain {domain}" if layout.nvlink_domain else f"{domain} ranks a node"
    why = "reaches beyond" if plan.tp > domain else "would lie across two of"
    raise InputError(
        f"parallel.tp: a group of {plan.tp} ranks {why} the NVLink domains ({said}); expected tp "
        f"{choices(divisors(domain))}, or tp_across_domains=true"
    )


def _stages(shape: ModelShape, layout: Layout) -> None:
    plan, schedule, per_rank = layout.plan, layout.scheduling, layout.stages_per_rank
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
    stages = layout.num_stages
    if stages > shape.num_layers:
        raise InputError(
            f"parallel.pp: {plan.pp} ranks × {stages // plan.pp} stages a rank ({schedule}) need {stages} layers or "
            f"more, model.num_layers is {shape.num_layers}; {_fewer(shape, plan, schedule, stages)}"
        )
    layout.layers_of_stages(shape)
    if kind.splits_backward and (why := why_no_split_backward()):
        raise InputError(
            f"parallel.schedule: {schedule} computes gradients of inputs and of weights apart, which {why}; expected a "
            f"newer torch, or schedule {_whole_backward()}"
        )
    if kind.splits_backward and layout.activation_checkpointing != "none":
        raise InputError(
            f"activation_checkpointing: schedule {schedule} computes gradients of inputs and of weights apart, and "
            f"with {layout.activation_checkpointing} torch would compute every block three times; expected none, or "
            f"schedule {_whole_backward()}"
        )
    if kind.splits_backward and layout.compile_backend is not None:
        raise InputError(
            f"compile.enabled: schedule {schedule} computes gradients of inputs and of weights apart, and a compiled "
            f"block's backward is one piece, which torch refuses to run in two; expected false, or "
            f"schedule {_whole_backward()}"
        )
    if kind.splits_backward and plan.by_fsdp and layout.reshard_after_forward is not False:  # torch reports nothing
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


def _micro_batches(layout: Layout, task: Task) -> None:
    """Every batch of the run in as many micro-batches as the schedule takes."""
    plan, schedule, stages = layout.plan, layout.scheduling, layout.num_stages
    for name, batch in task.batches.items():
        share = batch // plan.dp_size  # of a data-parallel rank
        number = share // layout.micro_batch
        complaint = check_micro_batches(schedule, plan.pp, stages, number)
        if complaint is None:
            continue
        fit = [count for count in range(1, number + 2 * stages + 2) if _takes(plan, schedule, stages, count)]
        below, above = [count for count in fit if count < number][-1:], [count for count in fit if count > number][:1]
        batches = [count * layout.micro_batch * plan.dp_size for count in (*below, *above)]
        micro = [size for size in divisors(share) if _takes(plan, schedule, stages, share // size)]
        options = [f"{key} {choices(sizes)}" for key, sizes in ((name, batches), ("micro_batch", micro)) if sizes]
        sequences = f"{batch} sequences are" if batch > 1 else "1 sequence is"
        micro_batches = f"{number} micro-batches" if number > 1 else "1 micro-batch"
        raise InputError(
            f"{name}: {sequences} {micro_batches} a rank ({plan.dp_size} data-parallel × micro_batch "
            f"{layout.micro_batch}); {complaint.split('; ')[0]}; {' or '.join(options)} would fit"
        )


def _takes(plan: MeshPlan, schedule: str, stages: int, number: int) -> bool:
    return check_micro_batches(schedule, plan.pp, stages, number) is None
