"""Starts a new run from a checkpoint of another, with its weights, moments, data order and ledger."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from quern import storage
from quern.config import dump_yaml, load_config
from quern.errors import InputError, QuernError
from quern.tokenize.selection.chosen import CHOSEN
from quern.train.batches.assignment import check_divides
from quern.train.batches.held_out import open_held_out
from quern.train.batches.mixture import open_corpus, plan_mixture
from quern.train.checkpoint.format.folder import new_folder, write_file
from quern.train.checkpoint.format.manifest import (
    CONFIG_FILE,
    MANIFEST_FILE,
    Checkpoint,
    Manifest,
    checkpoint_name,
    checkpoints_folder,
    list_checkpoints,
    read_manifest,
)
from quern.train.checkpoint.store.collect import collect
from quern.train.checkpoint.store.owner import RUN_ID_FILE
from quern.train.checkpoint.store.stored import configured_store
from quern.train.config import TrainConfig
from quern.train.history.branch import LEDGER_FILE
from quern.train.history.consumers import announce
from quern.train.history.ledger import latest_order, opening, read_ledger
from quern.train.step.schedule import check_schedule

__all__ = ["Forked", "fork"]

#: Overrides that take back what was asked of one start of a run alone.
_ONCE = ("resume={}", "data_skip=0")


@dataclass(frozen=True)
class Forked:
    """The result of a fork."""

    folder: str
    run: str
    """Its id."""
    step: int
    trunk: str
    """Folder of the run it comes from."""
    trunk_run: str
    """That run's id; empty in a checkpoint that does not know."""
    config: tuple[str, ...]
    """``config: key: before → after`` of each key in which its config differs from that of the trunk's last start."""


def fork(run_dir: str, step: int, to: str, overrides: Sequence[str] = ()) -> Forked:
    """Make the folder ``to`` a training run that continues from the checkpoint of ``run_dir`` after ``step`` steps.

    It gets a copy of the checkpoint, brought together as :func:`quern.train.checkpoint.store.collect.collect` does, the
    ledger up to it and a line ``fork``, the config under which the checkpoint was saved with ``overrides`` (and without
    what asked that run to go back), and an id of its own. ``to`` appears whole or not at all, and ``run_dir`` stays as
    it is. A checkpoint of a branch that the run has left may be taken.

    Raises:
        InputError: there is no such run or checkpoint, ``to`` is taken, or a start of the fork would refuse its config.
        QuernError: the checkpoint or the ledger is damaged, or a file cannot be copied.
    """
    trunk, to = os.path.abspath(run_dir), os.path.abspath(to)
    manifest, source = _checkpoint(run_dir, step)
    config, changed = _config(run_dir, source, to, manifest, overrides)
    if os.path.lexists(to) and not (os.path.isdir(to) and not os.listdir(to)):
        raise InputError(f"{to}: is already there; expected a path that is free, or an empty folder")
    history = _history(run_dir, manifest)
    _check(config, run_dir, Checkpoint(step, source), manifest)
    run = uuid.uuid4().hex
    try:
        with new_folder(to) as staged:
            folder = os.path.join(checkpoints_folder(staged), checkpoint_name(step))
            collect(run_dir, folder, step=step)
            write_file(os.path.join(folder, MANIFEST_FILE), replace(manifest, run=run).to_bytes())
            line = {
                "kind": "fork", "time": datetime.now(UTC).isoformat(timespec="milliseconds"), "step": step,
                "data_step": manifest.data_step, "run": manifest.run, "path": trunk,
            }  # fmt: skip
            write_file(os.path.join(staged, LEDGER_FILE), history + json.dumps(line).encode() + b"\n")
            write_file(os.path.join(staged, CONFIG_FILE), dump_yaml(config).encode())
            write_file(os.path.join(staged, RUN_ID_FILE), f"{run}\n".encode())
            if os.path.isdir(chosen := os.path.join(run_dir, CHOSEN)):
                shutil.copytree(chosen, os.path.join(staged, CHOSEN))
            for path in (folder, checkpoints_folder(staged), staged):
                storage.sync(path)
            if os.path.isdir(to):  # empty, as was seen
                os.rmdir(to)
    except OSError as error:
        raise QuernError(f"{to}: not made: {error.filename or ''}: {error.strerror or error}") from None
    _announce(to)
    return Forked(to, run, step, trunk, manifest.run, tuple(changed))


def _checkpoint(run_dir: str, step: int) -> tuple[Manifest, str]:
    """The manifest of the checkpoint, and its folder; files of tensors may be elsewhere."""
    if not os.path.isfile(os.path.join(run_dir, LEDGER_FILE)):
        raise InputError(f"{run_dir}: expected a training run: it has no {LEDGER_FILE}")
    found = {checkpoint.step: checkpoint.path for checkpoint in list_checkpoints(run_dir)}
    if step not in found:
        there = ", ".join(map(str, found)) or "none"
        into = os.path.join(checkpoints_folder(run_dir), checkpoint_name(step))
        more = (
            ""
            if configured_store(run_dir) is None
            else (f"; if the store has it, quern checkpoint fetch {run_dir} {into} --step {step} brings it")
        )
        raise InputError(f"{run_dir}: has no checkpoint after step {step}; those that are there: {there}{more}")
    manifest = read_manifest(found[step])
    if not manifest.optimizer:
        raise InputError(f"{found[step]}: holds weights alone; a fork goes on with the optimizer's moments")
    return manifest, found[step]


def _config(
    run_dir: str, source: str, to: str, manifest: Manifest, overrides: Sequence[str]
) -> tuple[TrainConfig, list[str]]:
    """The fork's config, and in what it differs from that of the last start of ``run_dir``, a line a key.

    The last start may have been given other keys than the checkpoint in ``source`` was saved under.
    """
    from quern.train.run_record import differences

    last = os.path.join(run_dir, CONFIG_FILE)
    file = os.path.join(source, CONFIG_FILE) if CONFIG_FILE in manifest.files else last
    before, saved = load_config(last, TrainConfig, _ONCE), load_config(file, TrainConfig, _ONCE)
    config = load_config(file, TrainConfig, [*_ONCE, *overrides])
    if config.run_dir != saved.run_dir:
        raise InputError("run_dir: is given by --to")
    config = config.model_copy(update={"run_dir": to})
    store = config.checkpoint.store
    if store is not None and store in (before.checkpoint.store, saved.checkpoint.store):
        raise InputError(
            f"checkpoint.store: {store} belongs to {run_dir}, and a store belongs to one run; give the fork another, "
            f"checkpoint.store=URL, or none, checkpoint.store=null"
        )
    if config.steps < manifest.step:
        raise InputError(f"steps: expected at least {manifest.step}, the checkpoint's, got {config.steps}")
    return config, differences(before, config)


def _check(config: TrainConfig, run_dir: str, checkpoint: Checkpoint, manifest: Manifest) -> None:
    """What every start of the fork would refuse, on whatever ranks and devices.

    Raises:
        InputError: naming the key, and what the fork may be given.
    """
    from quern.train.begin import continuation

    check_schedule(config.steps, config.schedule)
    if problem := check_divides(config.global_batch, 1, config.micro_batch):
        raise InputError(problem)
    wanted = config.resume.step
    if wanted not in (None, checkpoint.step):
        raise InputError(
            f"resume.step: a fork has one checkpoint, that of step {checkpoint.step}, and got {wanted}; leave the key "
            f"out, or give --at the step"
        )
    entries = read_ledger(os.path.join(run_dir, LEDGER_FILE), stop=manifest.ledger_offset)
    order = latest_order(entries)
    for name in ("seed", "seq_len"):
        if order is not None and getattr(order, name) != getattr(config, name):
            raise InputError(
                f"{name}: {run_dir} began with {getattr(order, name)}, and a fork reads on in its order, got "
                f"{getattr(config, name)}; leave the key out, or begin a run with init_from={checkpoint.path}"
            )
    corpus = open_corpus(config, keep=False, known=run_dir)
    plan_mixture(config, corpus)
    open_held_out(config, known=run_dir)
    continuation(config, corpus, entries, "resume" if wanted is None else "rollback", checkpoint)


def _history(run_dir: str, manifest: Manifest) -> bytes:
    """The ledger's bytes up to the checkpoint.

    Raises:
        QuernError: it is shorter, or damaged.
    """
    path = os.path.join(run_dir, LEDGER_FILE)
    read_ledger(path, stop=manifest.ledger_offset)
    with open(path, "rb") as file:
        return file.read(manifest.ledger_offset)


def _announce(to: str) -> None:
    """Tell the data runs whose tokens are in the weights: a purge finds the fork before its first step too."""
    moves = opening(read_ledger(os.path.join(to, LEDGER_FILE)))
    if moves and isinstance(moves[-1].get("paths"), dict):
        announce(to, moves[-1]["order"], moves[-1]["paths"])
