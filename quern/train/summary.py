"""Summary of a run before it starts: parameters, layout, memory of its state, traffic, tokens, and the order's hash."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from quern.config import validate
from quern.errors import InputError
from quern.mixtures.order import Order
from quern.mixtures.recipe import OrderPlan
from quern.model.config import ModelShape
from quern.parallel.planning.bubble import bubble
from quern.parallel.planning.checks import Task, check_layout
from quern.parallel.planning.experts import exchange_stages, expected_rows, kept_bytes
from quern.parallel.planning.float8 import fitting, local_sizes
from quern.parallel.planning.host_state import host_state as planned_host_state
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan, plan_mesh
from quern.parallel.planning.stages import stage_costs, stage_parameters
from quern.parallel.planning.traffic import Step, elements_held, traffic
from quern.parallel.planning.weights import alike
from quern.planner.answer import planned
from quern.planner.hardware import load_hardware, profile_of
from quern.planner.memory.kernels import CPU, CUDA
from quern.planner.memory.peak import State, peak
from quern.train.batches.corpus import AssumedCorpus, Corpus
from quern.train.batches.mixture import plan_mixture
from quern.train.batches.sharing import shared_attention
from quern.train.config import ParallelConfig, TrainConfig
from quern.train.init_from import reference_checkpoint, starting_checkpoint
from quern.train.step.schedule import learning_rate
from quern.words import counted, size

__all__ = [
    "check_host_memory", "checkpoint_size", "communication", "expert_ranks", "float8", "host_state", "layout",
    "layout_of", "layout_of_config", "moment_bytes", "peak_memory", "pipeline", "plan_of", "run_state", "sharing",
    "state_memory", "step_of", "summarise",
]  # fmt: skip

#: Bytes a parameter, by compute precision: weights and gradients at use, then FP32 master and two moments. Adam in
#: mixed precision makes 16 (Rajbhandari et al. 2020, section 3.1); FP32 has no second copy of the weights.
_COMPUTE_COPY = {"bf16": 2, "fp16": 2, "fp32": 0, "fp64": 0}
_MASTER = {"bf16": 4, "fp16": 4, "fp32": 4, "fp64": 8}
_COMPUTE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}

#: Ranks up to which every one's place on every axis is told.
_FEW_RANKS = 16


def layout_of(parallel: ParallelConfig, plan: MeshPlan, compute_dtype: Any, **settings: Any) -> Layout:
    """The layout that a config's section ``parallel`` describes; ``settings``: the fields that other sections say."""
    same = {field.name for field in fields(Layout)} & ParallelConfig.model_fields.keys()
    own = {name: getattr(parallel, name) for name in same} | {"reshard_after_forward": parallel.resharding}
    own["context"] = parallel.context
    return Layout(compute_dtype, plan, **own, **settings)


def layout_of_config(config: TrainConfig, plan: MeshPlan, compute_dtype: Any = None) -> Layout:
    """The same with what the other sections say; ``compute_dtype``: None where nothing is built of it."""
    return layout_of(
        config.parallel, plan, compute_dtype, activation_checkpointing=config.activation_checkpointing,
        activation_checkpointing_layers=config.activation_checkpointing_layers,
        activation_memory_budget=config.activation_memory_budget,
        compile_backend=config.compile.backend if config.compile.enabled else None, float8=config.float8.products,
        weights_cast=config.weights_cast, float8_all_gather=config.float8.all_gather,
        bf16_gradients=config.optimizer.gradients == "bf16", host_state=config.optimizer.state == "host",
        balancing=config.experts.balancing, micro_batch=config.micro_batch, seq_len=config.seq_len,
    )  # fmt: skip


def step_of(config: TrainConfig, shape: ModelShape, layout: Layout) -> Step:
    """The run's first step."""
    micro_batches = config.global_batch // (layout.plan.dp_size * config.micro_batch)
    compute, reduce = _COMPUTE[config.precision], _MASTER[config.precision]
    return Step(shape, layout, micro_batches, compute, reduce, config.loss_chunk)


def state_memory(step: Step, config: TrainConfig) -> dict[str, float]:
    """GiB of model state: of the whole model by the usual 16-byte count, and what one rank holds between steps.

    ``sixteen_bytes_per_rank`` is an even share of ``dp_shard`` · ``cp`` · ``tp`` · ``pp``. ``rank`` is what the rank
    that holds the most really keeps: masters, both moments and the gradients as they stand between backward and update
    (in the master's type, or in BF16 where ``optimizer`` says so), of the heaviest stages, the padded vocabulary and
    weights that ``tp`` does not split counted. Where weights are kept cast, 2 bytes for each are in it, the embedding's
    too, which is not kept. With ``optimizer.state: host`` it is what the device keeps of them. DoReMi's reference has
    masters alone. Gathered weights
    and activations come on top (:func:`peak_memory`).
    """
    parameters, plan = step.shape.num_parameters, step.plan
    master, copy = _MASTER[config.precision], _COMPUTE_COPY[config.precision]
    moment, kept = moment_bytes(config), copy if step.layout.keeps_weights(plan) else 0
    gib = 2**30
    most = max(elements_held(step, rank) for rank in _first_of_each_pipeline_rank(plan))
    found = host_state(step, config)
    held = found["device"] if found else (master + 2 * moment + step.gradient_bytes + kept) * most
    return {
        "sixteen_bytes": 16 * parameters / gib,
        "sixteen_bytes_per_rank": 16 * parameters / (plan.shards * plan.tp * plan.pp) / gib,
        "masters": master * parameters / gib,
        "moments": 2 * moment * parameters / gib,
        "gradients": step.gradient_bytes * parameters / gib,
        "compute_copy": copy * parameters / gib,
        "rank": (held + (master * most if config.doremi.reference else 0)) / gib,
    }


def run_state(config: TrainConfig) -> State:
    """What the run keeps beside weights. Attention has a dense mask where it has one on the device that the config
    names, CUDA for ``auto``."""
    half = config.device != "cpu" and config.precision in ("bf16", "fp16")
    dense = config.attention == "sdpa" or (config.attention == "auto" and not half)
    return State(
        moment_bytes(config), config.doremi.reference is not None, documents=config.document_mask,
        dense_mask=dense and config.document_mask,
    )  # fmt: skip


def peak_memory(step: Step, config: TrainConfig) -> dict[str, Any]:
    """The most that a rank holds in a step: at which place of the pipeline and moment, see
    :mod:`quern.planner.memory.peak`, and bytes by component. Of tensors: what a device takes besides is not in it."""
    cpu, state = config.device == "cpu", run_state(config)
    ranks = enumerate(_first_of_each_pipeline_rank(step.plan))
    found = [(place, *peak(step, state, rank, CPU if cpu else CUDA)) for place, rank in ranks]
    place, moment, components = max(found, key=lambda one: sum(one[2].values()))
    return {"pp": place, "moment": moment, "components": {name: size for name, size in components.items() if size}}


def plan_of(run: Any, tokens: int, gpu: str | None = None) -> dict[str, Any] | None:
    """As :func:`quern.planner.answer.planned`, of steps of ``tokens`` of a run's last start, on the profile ``gpu`` or
    that of the device in its record; without either ``time`` is null. ``tensors``: bytes of :func:`peak_memory`;
    ``waits``, ``cuda``: whether the run measures dp messages, a GPU's memory. None: its files do not tell enough.

    Raises:
        InputError: ``gpu`` is given, and is no profile, or the run cannot be planned on it.
    """
    device, sizes, mfu = (run.record.get(name) for name in ("device", "layout", "mfu"))
    try:
        hardware = None if (name := gpu or profile_of(device)) is None else load_hardware(name)
        config = validate(run.config, TrainConfig, run.path)
        shape = validate(run.record.get("model") or {}, ModelShape, f"{run.path}: run.json: model")
        if not isinstance(sizes, dict) or {*map(type, sizes.values())} != {int}:
            raise InputError(f"{run.path}: run.json: layout: expected sizes of axes, got {sizes!r}")
        plan, batch = plan_mesh(config.parallel, math.prod(sizes.values())), tokens // config.seq_len
        if batch not in {config.global_batch, *(phase.global_batch for phase in config.phases)}:
            raise InputError(f"{run.path}: expected steps of a batch that its config has, got {batch} sequences")
        if batch % (plan.dp_size * config.micro_batch):
            raise InputError(f"{run.path}: expected whole micro-batches on {plan}, got {batch} sequences a step")
        given = config.model_copy(update={"device": "cuda", "global_batch": batch})  # phases have others than the first
        step = step_of(given, shape, layout_of_config(given, plan))
        check_layout(shape, step.layout, Task({"global_batch": batch}, cuda=True))
        told = {} if hardware is None else planned(step, run_state(given), hardware)
        tensors = sum(peak_memory(step, given)["components"].values())
    except InputError:
        if gpu is not None:
            raise
        return None
    peak = config.metrics.peak_tflops is None and isinstance(mfu, dict) and mfu.get("peak_flops_per_device")
    cuda = config.device == "cuda" or (config.device == "auto" and bool(device or peak))
    known = {"gpus": plan.world_size, "tensors": tensors, "waits": plan.by_fsdp and plan.pp == 1, "cuda": cuda}
    return {"hardware": None, "time": None, **told, **known}


def host_state(step: Step, config: TrainConfig) -> dict[str, int] | None:
    """As :func:`.planning.host_state.host_state`, of the rank whose device holds the most; null without it."""
    ranks = _first_of_each_pipeline_rank(step.plan) if step.layout.host_state else ()
    found = (planned_host_state(step, rank, moment_bytes(config)) for rank in ranks)
    return max(found, key=lambda own: own["device"], default=None)


def check_host_memory(config: TrainConfig, step: Step, here: Sequence[int], device: str) -> None:
    """Refuse ``optimizer.state: host``, and pinned copies of checkpoints, that this machine has no memory for: the
    kernel would end a rank, minutes later. Before any rank allocates. ``here``: those of this machine; on the
    ``device`` cpu weights and gradients come on top.

    Raises:
        InputError: how much is needed, and how much there is.
    """
    from quern.train.processes.machine import available_memory  # which imports torch

    free, hosted = available_memory(), step.layout.host_state
    found = [planned_host_state(step, rank, moment_bytes(config)) for rank in here if hosted]
    state = sum(own["host"] + own["staging"] + own["device"] * (device == "cpu") for own in found)
    copies = int(checkpoint_size(step, config)["copy_gib_per_rank"] * 2**30) * len(here)
    if free is not None and (hosted or device == "cuda") and state + copies > free:
        who = "optimizer.state: host needs" if hosted else "checkpoint.mode: thread and process need"
        raise InputError(
            f"{who} {size(state + copies)} of the host's memory for {counted(len(here), 'rank')} of this machine, "
            f"{size(copies)} of it to copy checkpoints, and {size(free)} are available; give "
            f"{'checkpoint.mode=sync, which copies nothing, or ' if copies else ''}more machines to split it over"
        )


def moment_bytes(config: TrainConfig) -> int:
    return 2 if config.optimizer.moments == "bf16" else _MASTER[config.precision]


def checkpoint_size(step: Step, config: TrainConfig) -> dict[str, float]:
    """Bytes of the weights and moments that a save writes, and the GiB of the host's memory that a rank's part, copied,
    takes from save to save: on the average of all ranks, and none where the loop writes itself."""
    written = (_MASTER[config.precision] + 2 * moment_bytes(config)) * step.shape.num_parameters
    copied = 0 if config.checkpoint.mode == "sync" else written
    return {"bytes": written, "copy_gib_per_rank": copied / step.plan.world_size / 2**30}


def float8(config: TrainConfig, shape: ModelShape, plan: MeshPlan) -> dict[str, Any] | None:
    """How the blocks' products are computed, and which of a block's layers stay in ``precision`` because a rank's part
    of them does not fit; null without FP8."""
    recipe = config.float8.products
    if recipe is None:
        return None
    kinds = alike(shape, range(shape.num_layers))
    fits = {layer: fitting(shape, plan.tp, recipe, layer) for layer, _ in kinds}
    left_out = {name: None for layer in fits for name in local_sizes(shape, plan.tp, layer) if name not in fits[layer]}
    return {
        "recipe": recipe.scaling, "gradients": recipe.gradients, "delayed": recipe.delayed,
        "all_gather": config.float8.all_gather, "implementation": recipe.implementation,
        "layers": sum(len(fits[layer]) * count for layer, count in kinds),
        "left_out": list(left_out),
    }  # fmt: skip


def layout(plan: MeshPlan) -> dict[str, Any]:
    """Sizes of all axes, outermost first; for few ranks every one's place on them, else null."""
    places = [plan.coordinates(rank) for rank in range(plan.world_size)] if plan.world_size <= _FEW_RANKS else None
    return {"ranks": plan.world_size, "axes": plan.sizes(), "coordinates": places}


def pipeline(step: Step) -> dict[str, Any] | None:
    """Stages with their layers and their shares of a step's work, and how long ranks wait; null without a pipeline."""
    pp, schedule = step.plan.pp, step.layout.scheduling
    if pp == 1:
        return None
    stages, layers = step.layout.num_stages, step.layout.layers_of_stages(step.shape)
    costs, sizes = stage_costs(step.shape, layers, step.layout.seq_len), stage_parameters(step.shape, layers)
    rank_of = {stage: rank for rank in range(pp) for stage in step.layout.stages_of(rank)}
    return {
        "schedule": schedule,
        "micro_batches": step.num_micro_batches,
        "bubble": bubble(schedule, pp, stages // pp, step.num_micro_batches, costs),
        "bubble_of_equal_stages": bubble(schedule, pp, stages // pp, step.num_micro_batches),
        "stages": [
            {
                "stage": stage, "pp": rank_of[stage], "first_layer": layers[stage].start,
                "num_layers": len(layers[stage]), "cost_share": costs[stage] / sum(costs), "parameters": sizes[stage],
            }
            for stage in range(stages)
        ],
    }  # fmt: skip


def sharing(config: TrainConfig, corpus: Corpus | AssumedCorpus, laid: Layout, order: Order) -> dict[str, Any] | None:
    """How the ranks of ``cp`` share a sequence; the bytes of keys and values that one holds in a layer's forward, with
    their copies for stretches of queries where the data is known; how evenly attention falls on them (``work``; null
    where the data is assumed). Null without ``cp``."""
    context, plan, shape = laid.context, laid.plan, config.model.shape(corpus.vocab_size)
    if plan.cp == 1:
        return None
    keys = max(shape.num_kv_heads // plan.tp, context.heads) / context.heads
    held = 2 if context.ring else context.shards  # a ring's next keys come while these are used
    tokens = config.micro_batch * laid.seq_len // context.shards
    work = shared_attention(config, corpus, order, plan.dp_size, context) if isinstance(corpus, Corpus) else None
    copied = 0 if work is None else work["keys"] * config.micro_batch * laid.seq_len
    elements = 2 * keys * shape.head_dim * (tokens * held + copied)
    return {
        "method": context.method, "ranks": context.ranks, "heads": context.heads, "tokens": laid.tokens,
        "key_bytes": int(elements) * _COMPUTE[config.precision], "work": work,
    }  # fmt: skip


def expert_ranks(step: Step) -> dict[str, Any] | None:
    """How many experts a rank of ``ep`` holds; by stage of the exchange in how many rows a token travels, of a layer's
    tokens in the mean, and the bytes that the rank with the most sends in a step; what a layer's experts keep for
    backward. Of even routing, which trained routers do not quite reach. Null without ``ep``."""
    moe, stages = step.shape.moe, exchange_stages(step)
    if moe is None or not stages:
        return None
    tokens = step.tokens * step.num_micro_batches
    by_place = [traffic(step, rank) for rank in _first_of_each_pipeline_rank(step.plan)]
    return {
        "ranks": step.plan.ep, "experts": moe.num_experts // step.plan.ep,
        "stages": [
            {
                "axis": axis, "ranks": ranks, "rows": rows.leaving / tokens, "away": rows.away / tokens,
                "sent": max(sum(row.sent for row in found if row.axis == axis) for found in by_place),
            }
            for (axis, ranks), rows in zip(stages, expected_rows(step), strict=True)
        ],
        "kept_bytes": kept_bytes(step),
    }  # fmt: skip


def communication(step: Step) -> list[dict[str, Any]]:
    """What a step sends, by place in the pipeline: of the first rank of all that are there, which sends the most."""
    found = []
    for rank in _first_of_each_pipeline_rank(step.plan):
        rows = traffic(step, rank)
        found.append(
            {
                "pp": step.plan.coordinates(rank)["pp"],
                "sent": sum(row.sent for row in rows),
                "rows": [
                    {
                        "axis": row.axis, "what": row.what, "collective": row.collective, "ranks": row.ranks,
                        "calls": row.calls, "payload": row.payload, "sent": row.sent,
                    }
                    for row in rows
                ],
            }
        )  # fmt: skip
    return found


def _first_of_each_pipeline_rank(plan: MeshPlan) -> range:
    """Rows are dealt out from the first rank on, so of all ranks with the same stages it holds the most."""
    return range(0, plan.world_size, plan.world_size // plan.pp)


def summarise(config: TrainConfig, corpus: Corpus | AssumedCorpus, laid: Layout) -> dict[str, Any]:
    """Plain data for ``--dry-run``.

    Raises:
        InputError: the run of the config cannot be taken up as :func:`quern.train.begin.ahead` says.
        QuernError: so too.
    """
    from quern.train.begin import ahead  # which imports torch

    goes_on = ahead(config, corpus) if isinstance(corpus, Corpus) else None
    shape = config.model.shape(corpus.vocab_size)
    step, plan = step_of(config, shape, laid), laid.plan
    mixture: OrderPlan = plan_mixture(config, corpus)
    return {
        "config": config.model_dump(mode="json"),
        "model": shape.model_dump(mode="json") | {"padded_vocab_size": shape.padded_vocab_size},
        "init_from": None if goes_on else starting_checkpoint(config),
        "reference": reference_checkpoint(config),
        "goes_on": goes_on,
        "parameters": {
            "total": shape.num_parameters,
            "blocks": shape.num_block_parameters,
            "embedding": shape.vocab_size * shape.dim,
            **({} if shape.moe is None else {"active": shape.num_active_parameters}),
        },
        "layout": layout(plan),
        "float8": float8(config, shape, plan),
        "pipeline": pipeline(step),
        "sharing": sharing(config, corpus, laid, mixture.order),
        "expert_ranks": expert_ranks(step),
        "communication": communication(step),
        "state_memory_gib": state_memory(step, config),
        "peak_memory": peak_memory(step, config),
        "host_state": host_state(step, config),
        "checkpoint": checkpoint_size(step, config),
        "flops_per_token": {
            "full": shape.flops_per_token(config.seq_len, causal=False),
            "causal": shape.flops_per_token(config.seq_len, causal=True),
        },
        "learning_rate": {
            "peak": config.optimizer.lr,
            "last_step": learning_rate(config.steps - 1, config.steps, config.optimizer.lr, config.schedule),
        },
        "order": mixture.to_dict(),
        "corpus": {"versions": dict(zip(corpus.ids, corpus.versions, strict=True)), "fingerprint": corpus.fingerprint},
    }
