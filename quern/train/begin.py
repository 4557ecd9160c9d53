"""Determines where a run starts or resumes (checkpoint, step, data step, order), and records it before any read."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from quern.errors import InputError, QuernError
from quern.mixtures.order import Order
from quern.parallel.planning.mesh import plan_mesh
from quern.train.batches.corpus import Corpus
from quern.train.batches.mixture import Mixture, carry_on
from quern.train.checkpoint.format.manifest import (
    MANIFEST_FILE,
    Checkpoint,
    Manifest,
    checkpoints_folder,
    list_checkpoints,
    read_manifest,
)
from quern.train.checkpoint.format.state import check_shape
from quern.train.checkpoint.save.manager import CheckpointManager, Refusal, no_checkpoint
from quern.train.config import TrainConfig
from quern.train.history.back import asked_back, backs, left_out, spikes
from quern.train.history.branch import LEDGER_FILE, abandoned
from quern.train.history.consumers import announce
from quern.train.history.health import last_good, why_none
from quern.train.history.ledger import Ledger, check_append, latest_order, opening, read_ledger, skips_before, surviving
from quern.train.history.ledger import data_step as data_step_of
from quern.train.processes.agree import Agreement
from quern.train.processes.ranks import Ranks

__all__ = ["LEDGER_FILE", "Start", "abandoned", "ahead", "begin", "continuation"]

log = logging.getLogger(__name__)

_BACK = "back"
"""A rollback that the trainer has asked for, and not the config; ``rollback`` in the ledger."""


@dataclass(frozen=True)
class Start:
    """The step, data step and checkpoint at which the loop starts. The same on every rank."""

    kind: str
    """``start``, ``resume`` or ``rollback``."""
    step: int
    """Optimizer steps that are complete."""
    data_step: int
    tokens: int
    skips: int
    """How many steps right before ``step`` were skipped."""
    backs: tuple[int, ...]
    """The steps in which the run has gone back by itself."""
    left_out: frozenset[int]
    """Data steps that are read and not applied."""
    spikes: tuple[int, ...]
    """The steps before ``step`` that were spikes."""
    attempt: int
    """How many times the run has been started before."""
    mixture: Mixture
    checkpoint: Checkpoint | None
    """What to load; None for a fresh run."""


def begin(
    config: TrainConfig, corpus: Corpus, manager: CheckpointManager, ledger: Ledger | None, ranks: Ranks
) -> Start:
    """Decide where to start or resume, and append it to the ledger (rank 0's; None on the others). Collective.

    Raises:
        InputError: ``resume.step`` has no usable checkpoint, or is ``good`` and none is; or the config does not
            continue what the ledger says.
        QuernError: no checkpoint is whole, or the ledger's rules forbid the move.
    """
    together = Agreement(ranks.rank, ranks.world)
    # a copy, since rank 0's own gets this start's line below
    entries: list[dict[str, Any]] = together.broadcast_from_rank0(lambda: [*_ledger(ledger).entries])
    moves = opening(entries)  # before this one's, which is appended to the same list
    kind, checkpoint, asked = _choose(config, manager, entries, together)
    dp = plan_mesh(config.parallel, ranks.world).dp_size
    spec, source_map, step, data_step, tokens = together.broadcast_from_rank0(
        lambda: _append(config, corpus, _ledger(ledger), kind, checkpoint, asked, dp)
    )
    mixture = Mixture(Order.from_dict(spec), source_map)
    kind = "rollback" if kind == _BACK else kind
    if ranks.first:
        _say_versions(config, corpus, moves)
        announce(config.run_dir, mixture.order.hash, corpus.facts["paths"])
        log.info(
            "%s at step %d, data step %d%s", kind, step, data_step, f", from {checkpoint.path}" if checkpoint else ""
        )
        if step == config.steps:
            log.info("complete at step %d, nothing to do", step)
    moved = [*entries, {"kind": kind, "step": step, "data_step": data_step, "order": mixture.order.hash}]
    return Start(
        kind, step, data_step, tokens, skips_before(entries, step), backs(entries), left_out(moved), spikes(moved),
        len(moves), mixture, checkpoint,
    )  # fmt: skip


def ahead(config: TrainConfig, corpus: Corpus) -> dict[str, Any] | None:
    """Predict where a start would resume: ``kind``, ``step``, ``data_step`` and ``checkpoint`` (its path). Nothing is
    written, and of checkpoints the manifests alone are read. None: a fresh run, or a store has to be asked.

    Raises:
        InputError: as :func:`begin`.
        QuernError: so too.
    """
    folder, path = _Folder(config.run_dir), os.path.join(config.run_dir, LEDGER_FILE)
    entries = read_ledger(path) if os.path.isfile(path) else []
    alone = config.checkpoint.store is None or (config.resume.step is None and folder.steps())
    if config.resume.from_store or not alone:
        return None
    kind, checkpoint, _ = _choose(config, folder, entries, Agreement(0, 1))
    step, data_step, _, mixture = continuation(config, corpus, entries, kind, checkpoint)
    check_append(entries, step, data_step, mixture.order)
    found = {"kind": "rollback" if kind == _BACK else kind, "step": step, "data_step": data_step}
    return None if checkpoint is None else {**found, "checkpoint": checkpoint.path}


class _Folder:
    """The checkpoints in a run's folder, all taken to be whole: what :func:`_choose` asks of a manager."""

    def __init__(self, run_dir: str) -> None:
        self._root, self._found = checkpoints_folder(run_dir), {own.step: own for own in list_checkpoints(run_dir)}

    def steps(self) -> list[int]:
        return list(self._found)

    def latest_valid(self, refuse: Refusal) -> Checkpoint | None:
        for step in reversed(self._found):
            with suppress(InputError):
                return self.at(step, refuse)
        return None

    def at(self, step: int, refuse: Refusal) -> Checkpoint:
        if step not in self._found:
            raise no_checkpoint(self._root, step, self._found)
        checkpoint = self._found[step]
        if (problem := refuse(read_manifest(checkpoint.path))) is not None:
            raise InputError(f"{checkpoint.path}: {problem}")
        return checkpoint


def _choose(
    config: TrainConfig, manager: CheckpointManager | _Folder, entries: Sequence[Mapping[str, Any]], together: Agreement
) -> tuple[str, Checkpoint | None, dict[str, Any] | None]:
    """The kind of the start, its checkpoint, and what its line says was asked. Collective."""

    def refuse(manifest: Manifest) -> str | None:
        return abandoned(manifest, os.path.join(config.run_dir, LEDGER_FILE), entries)

    moves, wanted, asked = opening(entries), config.resume.step, None
    if wanted is not None:
        asked = {"step": wanted, "data_skip": config.data_skip}
        if config.resume.again is not None:
            asked["again"] = config.resume.again
    if wanted is None or (moves and moves[-1].get("asked") == asked):
        # the rollback asked for was done by the start before this one
        if (back := asked_back(entries)) is not None:
            return _BACK, _before(config, manager, entries, refuse, back), asked
        return "resume" if moves else "start", manager.latest_valid(refuse), asked
    if wanted == "good":
        return "rollback", _last_good(config, manager, entries, refuse, together), asked
    return "rollback", manager.at(wanted, refuse), asked


def _say_versions(config: TrainConfig, corpus: Corpus, moves: Sequence[Mapping[str, Any]]) -> None:
    """Log which sources are at another corpus version than the start before read them at."""
    before = moves[-1].get("versions") if moves else None
    if not isinstance(before, Mapping):
        return
    for ident, version in zip(corpus.ids, corpus.versions, strict=True):
        if type(before.get(ident)) is int and before[ident] != version:
            log.info("%s: corpus version %d, before %d", ident, version, before[ident])
            if not config.document_mask:
                log.warning(
                    "%s: what was purged in between is no target any more, but document_mask is off: documents beside "
                    "it attend to what stands there now", ident,
                )  # fmt: skip


def _last_good(
    config: TrainConfig,
    manager: CheckpointManager | _Folder,
    entries: Sequence[Mapping[str, Any]],
    refuse: Refusal,
    together: Agreement,
) -> Checkpoint:
    """The newest good checkpoint that is whole; what is wrong with newer ones is logged. Collective.

    Raises:
        InputError: there is none; what the newest checkpoint lacks is named.
    """
    window = config.guard.health_window
    steps = set(manager.steps())
    damage = None
    while (step := last_good(entries, steps, window)) is not None:
        try:
            return manager.at(step, refuse)
        except InputError as error:  # the same on every rank
            damage = damage or error
            steps.remove(step)
            if together.rank == 0:
                log.warning("%s; an older good checkpoint is tried", error)
    if damage is not None:
        raise InputError(f"{config.run_dir}: resume.step: no good checkpoint is whole; {damage}")
    raise InputError(
        f"{config.run_dir}: resume.step: no checkpoint is good yet; {why_none(entries, steps, window)} "
        f"(guard.health_window). Give a number, or a shorter window"
    )


def _before(
    config: TrainConfig, manager: CheckpointManager | _Folder, entries: Sequence[Mapping[str, Any]], refuse: Refusal,
    back: Mapping[str, Any],
) -> Checkpoint | None:  # fmt: skip
    """The last good checkpoint that the line ``back`` allows; where none is good, or need be, the newest; None: there
    is none, and the run starts over. Collective."""
    left = {step for step in manager.steps() if step <= back["before"]}
    gaps = [b.step for a, b in pairwise(surviving(entries, None)) if b.data_step > (a.data_stop or 0)]
    after = {step for step in left if step >= max(gaps, default=0)}  # before it, data would be read that was left out
    left = after or left
    while left:
        good = last_good(entries, left, config.guard.health_window) if back["good"] else None
        step = max(left) if good is None else good
        with suppress(InputError):  # it is damaged, or of a branch that was left; the same on every rank
            return manager.at(step, refuse)
        left.remove(step)
    return None


def _ledger(ledger: Ledger | None) -> Ledger:
    assert ledger is not None, "rank 0 has the ledger"
    return ledger


def _append(
    config: TrainConfig, corpus: Corpus, ledger: Ledger, kind: str, checkpoint: Checkpoint | None, asked: Any, dp: int
) -> Any:
    step, data_step, tokens, mixture = continuation(config, corpus, ledger.entries, kind, checkpoint)
    ledger.move(
        "rollback" if kind == _BACK else kind, step, data_step, mixture.order,
        asked=asked,
        checkpoint=checkpoint.name if checkpoint else None,
        document_mask=config.document_mask,
        **corpus.facts,
        dp=dp,
        micro_batch=config.micro_batch,
        **({"cp": config.parallel.context.to_dict()} if config.parallel.cp > 1 else {}),
    )  # fmt: skip
    return mixture.order.to_dict(), mixture.source_map, step, data_step, tokens


def continuation(
    config: TrainConfig, corpus: Corpus, entries: Sequence[Mapping[str, Any]], kind: str, checkpoint: Checkpoint | None
) -> tuple[int, int, int, Mixture]:
    """The step, data step, tokens and mixture from which a run resumes at ``checkpoint``; ``entries``: its ledger's.

    Raises:
        InputError: the config does not continue what the checkpoint and the ledger say.
        QuernError: the checkpoint that the ledger tells of is gone.
    """
    step, data_step, tokens = _position(config, corpus, entries, kind, checkpoint)
    previous = latest_order(entries)
    if previous is None and checkpoint is not None:
        raise InputError(f"{checkpoint.path}: stands in a run whose ledger names no order; give another run_dir")
    return step, data_step, tokens, carry_on(config, corpus, previous, data_step)


def _position(
    config: TrainConfig, corpus: Corpus, entries: Sequence[Mapping[str, Any]], kind: str, checkpoint: Checkpoint | None
) -> tuple[int, int, int]:
    """Step, data step and tokens at which the run goes on. What can be refused is, before the ledger changes."""
    moves = opening(entries)
    if checkpoint is None:
        if moves and moves[-1]["step"]:
            raise QuernError(
                f"{config.run_dir}: the run went on from step {moves[-1]['step']} before, and no checkpoint of that "
                f"branch is left; put it back from a copy, or give another run_dir to start over"
            )
        return 0, 0, 0
    manifest = read_manifest(checkpoint.path)
    file = os.path.join(checkpoint.path, MANIFEST_FILE)
    check_shape(file, manifest.model, config.model.shape(corpus.vocab_size))
    if manifest.precision == "fp64" != config.precision:
        raise InputError(
            f"{file}: precision: expected {config.precision}, as in the config, got fp64; nothing rounds it"
        )
    if config.steps < manifest.step:
        back = "an earlier resume.step" if kind == "rollback" else "resume.step to go back"
        raise InputError(
            f"{config.run_dir}: steps: expected at least {manifest.step}, the step of {checkpoint.path}, got "
            f"{config.steps}; give more, or {back}"
        )
    if kind == "rollback":
        return manifest.step, manifest.data_step + config.data_skip, manifest.tokens
    if not moves:
        return manifest.step, manifest.data_step, manifest.tokens
    _check_skips(entries, checkpoint, manifest.data_step)
    # the ledger's, not the checkpoint's: the run may have returned to this step with data skipped
    return manifest.step, data_step_of(entries, manifest.step), manifest.tokens


def _check_skips(entries: Sequence[Mapping[str, Any]], checkpoint: Checkpoint, own: int) -> None:
    """Whether the run would read again what a rollback behind ``checkpoint`` has skipped: its own checkpoints are gone.

    ``own``: the checkpoint's data step, from which a ``data_skip`` counts.

    Raises:
        InputError: which range, and what to give.
    """
    for before, after in pairwise(surviving(entries, None)):
        if after.step > checkpoint.step and after.data_step > (before.data_stop or 0):
            raise InputError(
                f"{checkpoint.path}: is the newest whole checkpoint and lies before step {after.step}, where the run "
                f"skipped data steps {before.data_stop} to {after.data_step - 1}; give resume.step={checkpoint.step} "
                f"with a data_skip: {after.data_step - own} goes beyond them, "
                f"{data_step_of(entries, checkpoint.step) - own} reads them"
            )
