"""Builds a :class:`Trainer` from a config; every config error is raised before the first step."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import torch

from quern import storage
from quern.config import digest
from quern.errors import InputError
from quern.model.config import ModelShape
from quern.model.float8.product import available
from quern.model.float8.recipe import Recipe, Scaling
from quern.model.float8.torchao import Torchao
from quern.model.init import initialise
from quern.model.transformer import Transformer
from quern.parallel.apply import Parallel, parallelize
from quern.parallel.context.inputs import Sharing
from quern.parallel.planning.checks import Task, check_layout
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import Mesh, MeshPlan, build_mesh, plan_mesh
from quern.train import run_record
from quern.train.batches.assignment import check_divides
from quern.train.batches.corpus import Corpus
from quern.train.batches.feed import Feed
from quern.train.batches.held_out import HeldOut, open_held_out
from quern.train.batches.loader import open_loader
from quern.train.batches.mixture import open_corpus, order_names, plan_mixture
from quern.train.begin import LEDGER_FILE, Start, begin
from quern.train.checkpoint.format.manifest import Checkpoint, EncodingInfo, RunFacts
from quern.train.checkpoint.format.state import TrainState
from quern.train.checkpoint.save.manager import CheckpointManager
from quern.train.config import TrainConfig
from quern.train.doremi import DoReMi, load_reference
from quern.train.flash import HALF, check_attention, check_flash, use_flash
from quern.train.history.ledger import Ledger
from quern.train.init_from import check_given_weights, reference_checkpoint, starting_checkpoint
from quern.train.processes import machine
from quern.train.processes.agree import Agreement
from quern.train.processes.ranks import Ranks
from quern.train.step.by_rank import RankFigures
from quern.train.step.by_source import SourceLosses
from quern.train.step.forensics import Facts, Forensics
from quern.train.step.guard import Guard
from quern.train.step.host_optimizer import HostOptimizer
from quern.train.step.metrics import Metrics, Utilisation, peak_flops
from quern.train.step.non_finite import first_non_finite
from quern.train.step.optimizer import build_optimizer, follow_updates
from quern.train.step.precision import LossScale, Precision, precision_of
from quern.train.step.profile import Profiler
from quern.train.step.schedule import check_schedule
from quern.train.step.validation import Validator
from quern.train.summary import check_host_memory, layout_of_config, step_of
from quern.train.supervision import out_of_memory
from quern.train.supervision.link_probe import LinkProbe
from quern.train.supervision.recomputation import check_recomputation
from quern.train.supervision.replicas import check_replicas
from quern.train.supervision.stragglers import Stragglers
from quern.train.trackers.board import branch_folder
from quern.train.trackers.trackers import Trackers, check_installed
from quern.train.trainer import Trainer

__all__ = ["Checked", "check", "check_float8", "check_settings", "open_trainer"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checked:
    """What :func:`check` opened while checking."""

    corpus: Corpus
    layout: Layout
    held_out: tuple[HeldOut, ...]


def check_settings(config: TrainConfig, world: int, vocab_size: int) -> Layout:
    """Check what needs neither a device nor the data; ``vocab_size``: of the encoding.

    Raises:
        InputError: naming the field, what it is and what would fit.
    """
    check_schedule(config.steps, config.schedule)
    check_attention(config, precision_of(config.precision), config.device)
    if world < 1:
        raise InputError(f"--nproc: expected 1 rank or more, got {world}")
    plan = plan_mesh(config.parallel, world)
    check_replicas(config.replicas.interval, plan)
    check_recomputation(config.replicas.recompute_interval, plan)
    batches = {"": config.global_batch} | {f"phases.{n}.": phase.global_batch for n, phase in enumerate(config.phases)}
    for where, batch in batches.items():
        if batch is not None and (problem := check_divides(batch, plan.dp_size, config.micro_batch)):
            raise InputError(where + problem)
    backends = torch.compiler.list_backends(exclude_tags=()) if config.compile.enabled else []
    if config.compile.enabled and config.compile.backend not in backends:
        raise InputError(f"compile.backend: expected one of torch's, as inductor is, got {config.compile.backend!r}")
    if config.float8.products is not None and config.float8.implementation == "torchao":
        Torchao.of(config.float8.products)
    run_record.check_run_dir(config.run_dir)
    by_key = {f"{where}global_batch": batch for where, batch in batches.items() if batch}
    if (after := out_of_memory.less(config)) is not None:
        try:
            _check_layout(after, vocab_size, plan, by_key)
        except InputError as error:
            raise InputError(f"out_of_memory: {config.out_of_memory} would be refused: {error}") from None
    return _check_layout(config, vocab_size, plan, by_key)


def check(config: TrainConfig, world: int, *, keep: bool = False) -> Checked:
    """Check everything in a config that needs no device. ``keep``: what conditions choose from sources is written to
    the run's folder.

    Raises:
        InputError: naming the field, what it is and what would fit.
    """
    if os.environ.get("RANK", "0") == "0":  # the rank that sends
        check_installed(config.metrics.sent_to)
    run_record.check_run_dir(config.run_dir)
    corpus = open_corpus(config, keep=keep)
    layout = check_settings(config, world, corpus.vocab_size)
    check_given_weights(config, _encoding(corpus))
    plan_mixture(config, corpus)
    return Checked(corpus, layout, open_held_out(config, keep=keep))


def _check_layout(config: TrainConfig, vocab_size: int, plan: MeshPlan, batches: dict[str, int]) -> Layout:
    layout = layout_of_config(config, plan, precision_of(config.precision).compute)
    local = os.environ.get("LOCAL_WORLD_SIZE")
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    shape = config.model.shape(vocab_size)
    if problem := config.experts.check(shape.moe) or config.optimizer.check(shape.moe):
        raise InputError(problem)
    check_flash(config, shape, precision_of(config.precision), config.device)
    if layout.weights_cast == "per_use" and not replace(layout, weights_cast="auto").keeps_weights(plan):
        raise InputError(
            "weights_cast: per_use changes nothing where FSDP2 casts what it gathers, or tp splits weights, which are "
            "then cast where they are used; expected auto, or dp_shard 1 and tp 1 with it"
        )
    if layout.weights_cast == "per_use" and config.precision in ("fp32", "fp64"):
        raise InputError(f"weights_cast: per_use changes nothing with precision {config.precision}; expected auto")
    check_layout(shape, layout, Task(batches, cuda, int(local) if local else None))
    return layout


@contextmanager
def open_trainer(
    config: TrainConfig, ranks: Ranks, first_weights: Callable[[Transformer, int], None] = initialise
) -> Iterator[Trainer]:
    """Open the run of ``config``, new or resumed, ready for :meth:`Trainer.fit`. Collective.

    ``first_weights`` fills the parameters of a run that no checkpoint begins, by ``config.seed``.

    Raises:
        InputError: the config, the corpus or what stands in ``run_dir`` does not fit.
        QuernError: another trainer is at work in ``run_dir``, or its ledger or checkpoints are damaged.
    """
    together = Agreement(ranks.rank, ranks.world)
    checked = together.all_or_raise(lambda: check(config, ranks.world, keep=True))
    corpus, layout, held_out = checked.corpus, checked.layout, checked.held_out
    _same_config(config, together)
    # rank 0's, for all: a run that trains while this one begins with its newest has another newest any moment
    init_from = together.broadcast_from_rank0(partial(starting_checkpoint, config))
    reference = together.broadcast_from_rank0(partial(reference_checkpoint, config))
    learned = config.doremi.model_copy(update={"reference": reference})
    config = config.model_copy(update={"init_from": init_from, "doremi": learned})
    precision = precision_of(config.precision)
    shape = config.model.shape(corpus.vocab_size)
    model = _model(config, shape, precision, ranks)
    check_float8(config, precision, ranks.device)
    machine.set_numerics(config.deterministic)
    hosts = together.gather(socket.gethostname())
    here = [rank for rank, host in enumerate(hosts) if host == hosts[ranks.rank]]
    together.all_or_raise(lambda: check_host_memory(config, step_of(config, shape, layout), here, ranks.device.type))
    together.all_or_raise(lambda: use_flash(config, shape, precision, model.attention, ranks.device))
    with ExitStack() as opened:
        checkpoints = opened.enter_context(
            CheckpointManager(
                config.run_dir, config.checkpoint, ranks.rank, ranks.world,
                device=ranks.device if config.optimizer.state == "device" else torch.device("cpu"),
                from_store=config.resume.from_store,
            )
        )  # fmt: skip
        cache = os.path.join(config.run_dir, "index")
        if config.verify_shards:
            verified = os.path.join(cache, f"verified.{ranks.rank}.json")
            for part in (corpus, *(own.corpus for own in held_out)):
                together.all_or_raise(partial(part.verify, ranks.rank, ranks.world, verified))
        ledger = together.all_or_raise(
            lambda: Ledger(os.path.join(config.run_dir, LEDGER_FILE)) if ranks.first else None
        )
        if ledger is not None:
            opened.enter_context(ledger)
        start = begin(config, corpus, checkpoints, ledger, ranks)
        checkpoints.tiers.resume_pending(start.checkpoint)
        mesh = build_mesh(layout.plan, ranks.device.type, layout.context.heads, layout.ep_node)
        sharing = Sharing(layout.context, mesh.rank("cp"), layout.seq_len) if layout.plan.cp > 1 else None
        parallel = parallelize(model, mesh, layout, ranks.device)
        if start.checkpoint is None and config.init_from is None:  # else a checkpoint brings every weight
            first_weights(parallel.weights, config.seed)
        optimizer = build_optimizer(parallel.weights, config.optimizer, parallel.masters)
        if isinstance(optimizer, HostOptimizer):
            opened.enter_context(optimizer)
        guard = Guard(config.guard, ranks.device, precision.master)
        loss_scale = LossScale(ranks.device, enabled=precision.scaled)
        state = TrainState(parallel.weights, optimizer, _facts(config, corpus, shape, layout.plan))
        names, order = order_names(config, start.mixture), start.mixture.order
        by_source, doremi = SourceLosses(names, order), None
        if reference is not None:
            again = _model(config, shape, precision, ranks)
            other = load_reference(reference, again, mesh, layout, checkpoints, state.facts, ranks.device)
            doremi = DoReMi(config.doremi, names, by_source, parallel, other, ranks)
        scalars = _restore(config, start, checkpoints, state, guard, loss_scale, parallel, doremi)
        follow_updates(parallel, optimizer)
        loader = together.all_or_raise(
            lambda: open_loader(config, corpus, order, cache, mesh.dp_rank, mesh.dp_size, start.mixture.source_map)
        )
        validator = together.all_or_raise(
            lambda: Validator(config, held_out, ranks, mesh.dp_rank, mesh.dp_size, cache, sharing) if held_out else None
        )
        utilisation = Utilisation(
            shape, config.seq_len, ranks.world,
            peak_flops(ranks.device, config.precision, config.metrics.peak_tflops),
        )  # fmt: skip

        def written_once() -> tuple[Metrics, Trackers] | tuple[None, None]:
            if ledger is None:
                return None, None
            run_record.tell(config, shape, layout, start.step)
            run_record.describe(config, corpus, shape, layout.plan, utilisation, start)
            board = branch_folder(config.run_dir, ledger.entries)
            metrics = Metrics(config.run_dir, config.metrics, config.steps, board=board, first=start.step)
            return metrics, Trackers(config.run_dir, config.metrics)

        metrics, trackers = together.all_or_raise(written_once)
        forensics = _forensics(config, start, mesh, parallel, optimizer, loss_scale, together)
        trainer = Trainer(
            config=config, ranks=ranks, start=start, parallel=parallel, optimizer=optimizer,
            feed=Feed(loader, ranks.device, document_mask=config.document_mask, sharing=sharing), guard=guard,
            forensics=forensics, by_source=by_source, doremi=doremi,
            by_rank=RankFigures(ranks, parallel.model), stragglers=Stragglers(hosts, ledger),
            link_probe=LinkProbe(hosts, ledger, ranks), loss_scale=loss_scale, checkpoints=checkpoints, state=state,
            profiler=Profiler(config.run_dir, config.profile, ranks.rank, start.step), validator=validator,
            utilisation=utilisation, ledger=ledger, metrics=metrics, trackers=trackers,
        )  # fmt: skip
        with trainer:
            trainer.saves.restore(scalars)
            yield trainer


def _forensics(
    config: TrainConfig, start: Start, mesh: Mesh, parallel: Parallel, optimizer: torch.optim.Optimizer,
    loss_scale: LossScale, together: Agreement,
) -> Forensics:  # fmt: skip
    order = start.mixture.order
    facts = Facts(
        attempt=start.attempt, order=order.hash, sources=order.ids, policy=config.guard.model_dump(mode="json"),
        layout=mesh.plan.sizes() | config.model_dump(include={"micro_batch", "seq_len", "document_mask"}),
        dp_rank=mesh.dp_rank, cp_groups=[*mesh.context_groups.values()], cp_rank=mesh.rank("cp"),
        loss_scaled=loss_scale.enabled, expert_layers=[] if parallel.loads is None else parallel.loads.layers,
    )  # fmt: skip
    eager = not config.compile.enabled and config.attention != "flex"  # else it would need memory that there may not be
    search = partial(first_non_finite, parallel, optimizer, loss_scale.scaled, together, eager)
    return Forensics(config.forensics, config.run_dir, facts, parallel.gradients.squares, search, together)


def check_float8(config: TrainConfig, precision: Precision, device: torch.device) -> None:
    """FP8 that would only be emulated is slower than none; on the CPU that is what it is for.

    Raises:
        InputError: the GPU has no kernel for the recipe; it names those that it has.
    """
    recipe = config.float8.products
    if recipe is None or device.type != "cuda" or available(recipe, device, precision.compute):
        return
    fits = [s for s in get_args(Scaling) if available(Recipe(s), device, precision.compute)]
    raise InputError(
        f"float8.recipe: {recipe.scaling} has no kernel here ({torch.cuda.get_device_name(device)}, CUDA "
        f"{torch.version.cuda}, precision {precision.name}); expected {' or '.join(fits) or 'null'}"
    )


def _model(config: TrainConfig, shape: ModelShape, precision: Precision, ranks: Ranks) -> Transformer:
    """On ``meta``: memory comes with the layout, values from the seed or a checkpoint."""
    backend = config.attention
    if backend == "auto":
        half = precision.compute in HALF
        backend = "varlen" if ranks.device.type == "cuda" and config.document_mask and half else "sdpa"
    check_attention(config, precision, ranks.device.type)
    check_flash(config, shape, precision, ranks.device.type)
    with torch.device("meta"):
        model = Transformer(
            shape,
            compute_dtype=precision.compute,
            attention=backend,
            loss_chunk=config.loss_chunk,
            z_loss=config.z_loss,
        )
    return model.to(precision.master)


def _restore(
    config: TrainConfig, start: Start, checkpoints: CheckpointManager, state: TrainState, guard: Guard,
    loss_scale: LossScale, parallel: Parallel, doremi: DoReMi | None,
) -> Mapping[str, object]:  # fmt: skip
    """Returns the scalars of the checkpoint the run goes on from."""
    scalars: Mapping[str, object] = {}
    if start.checkpoint is not None:
        loaded = checkpoints.load(start.checkpoint.path, state)
        extra, scalars = loaded.extra, loaded.manifest.scalars
        device = next(iter(state.model.parameters())).device
        part = {name: value.to(device) for name, value in extra.items()}
        guard.load_state_dict({n.removeprefix("guard."): v for n, v in part.items() if n.startswith("guard.")})
        loss_scale.load_state_dict(
            {n.removeprefix("loss_scale."): v for n, v in part.items() if n.startswith("loss_scale.")}
        )
        if doremi is not None:
            doremi.load_state_dict({n.removeprefix("doremi."): v for n, v in part.items() if n.startswith("doremi.")})
        history, amaxes = part.get("float8.history"), parallel.amaxes
        if parallel.loads is not None:
            parallel.loads.load_state_dict({"last": part["experts.last"]} if "experts.last" in part else {})
        if amaxes is not None and history is not None and history.shape == amaxes.history.shape:
            amaxes.load_state_dict({"names": amaxes.names, "history": history})
        elif amaxes is not None:
            log.info("float8.delayed: the checkpoint has no history of these layers; scales begin without one")
    elif config.init_from is not None:
        given = Checkpoint(0, config.init_from)
        if problems := checkpoints.problems(given):
            raise InputError(f"init_from: {problems[0]}")
        checkpoints.load(given.path, state)
        if checkpoints.agreement.rank == 0:
            log.info("the weights are those of %s", given.path)
        assert state.optimizer is not None
        for slots in state.optimizer.state.values():  # a full checkpoint brings moments; a fresh run begins without
            for value in slots.values():
                value.zero_()
    return scalars


def _facts(config: TrainConfig, corpus: Corpus, shape: ModelShape, plan: MeshPlan) -> RunFacts:
    return RunFacts(
        shape=shape,
        layout=plan.sizes(),
        precision=config.precision,
        corpus_versions=dict(zip(corpus.ids, corpus.versions, strict=True)),
        corpus_fingerprint=corpus.fingerprint,
        encoding=_encoding(corpus),
        ranks_path=corpus.ranks_path,
        config=config.model_dump(mode="json"),
    )


def _encoding(corpus: Corpus) -> EncodingInfo:
    return EncodingInfo(corpus.encoding, corpus.vocab_size, corpus.eot_id, storage.sha256(corpus.ranks_path))


def _same_config(config: TrainConfig, together: Agreement) -> None:
    """Two ranks with two configs would train two models into one run."""
    digests = together.gather(digest(config))
    if len(set(digests)) > 1:
        odd = next(rank for rank, own in enumerate(digests) if own != digests[0])
        raise InputError(f"rank {odd} was given another config than rank 0; start all ranks with the same")
