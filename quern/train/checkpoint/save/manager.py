"""Opens a run's folder of checkpoints, and finds, loads and prunes them, on all ranks together.

:mod:`.scheduler` says what happens in a save.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import Metadata

from quern import storage
from quern.closes import Closes
from quern.errors import InputError, QuernError
from quern.train.checkpoint.format.dcp import load_tensors, needed_files
from quern.train.checkpoint.format.folder import FolderLock, make_staging_folder, recover, staging_path
from quern.train.checkpoint.format.manifest import (
    MANIFEST_FILE,
    METADATA_FILE,
    Checkpoint,
    Manifest,
    Problem,
    checkpoint_name,
    checkpoints_folder,
    list_checkpoints,
    read_manifest,
)
from quern.train.checkpoint.format.metadata import read_metadata
from quern.train.checkpoint.format.state import (
    TensorView,
    TrainState,
    check_encoding,
    check_shape,
    check_tensors,
    conversion,
    view_tensors,
)
from quern.train.checkpoint.retention.prune import Keep
from quern.train.checkpoint.save.async_save import AsyncSave
from quern.train.checkpoint.save.background import BACKGROUNDS
from quern.train.checkpoint.tiers.tiers import Tiers
from quern.train.config import CheckpointConfig
from quern.train.processes.agree import Agreement

__all__ = ["CheckpointManager", "Loaded", "Refusal", "list_checkpoints", "no_checkpoint"]

log = logging.getLogger(__name__)

#: Why a sound checkpoint is not to be used (it lies on an abandoned branch), or None.
Refusal = Callable[[Manifest], str | None]


def _plan_load(path: str, state: TrainState) -> _LoadPlan:
    manifest = read_manifest(path)
    metadata = read_metadata(path, manifest.files)
    check_shape(os.path.join(path, MANIFEST_FILE), manifest.model, state.facts.shape)
    check_encoding(os.path.join(path, MANIFEST_FILE), manifest.encoding, state.facts.encoding)
    parts = ("model.", "optimizer.") if manifest.optimizer and state.optimizer is not None else ("model.",)
    view = view_tensors(state).part(parts)
    check_tensors(os.path.join(path, METADATA_FILE), metadata, state.facts.shape, parts, view)
    return _LoadPlan(manifest, metadata, *view.with_extra(metadata))


def no_checkpoint(root: str, step: int, known: Iterable[int]) -> InputError:
    """What is wrong where the folder ``root`` has no checkpoint of ``step``, but ``known``."""
    return InputError(f"{root}: has no checkpoint of step {step} (there are: {', '.join(map(str, known)) or 'none'})")


@dataclass(frozen=True)
class _LoadPlan:
    manifest: Manifest
    metadata: Metadata
    view: TensorView
    extra: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Loaded:
    """The results of a load besides the model and the optimizer."""

    manifest: Manifest
    extra: Mapping[str, torch.Tensor]
    """The ``extra`` tensors of the checkpoint, on the CPU, the same on every rank."""


class CheckpointManager(Closes):
    """The checkpoints of one run. Methods are collective but for those that say so, :meth:`prune` and :meth:`close`.

    Opening takes the run's lock (rank 0) and tidies what a killed writer left.

    Raises:
        QuernError: another trainer has the run directory open.
        InputError: the ranks do not share the run directory.
    """

    def __init__(
        self,
        run_dir: str,
        config: CheckpointConfig,
        rank: int = 0,
        world: int = 1,
        device: torch.device | None = None,
        from_store: bool = False,
    ) -> None:
        if not storage.is_local(run_dir):
            raise InputError(f"run_dir: expected a folder on a file system, got {run_dir!r}")
        self.run_dir, self.config = os.fspath(run_dir), config
        self.root = checkpoints_folder(self.run_dir)
        self.rejected: list[Problem] = []
        """What :meth:`latest_valid` found wrong, newest checkpoint first."""
        self.agreement = Agreement(rank, world)
        self._parts = ExitStack()
        """What is closed in the reverse order, each whatever the others do; the lock last."""
        try:
            probe = self.agreement.broadcast_from_rank0(self._open)
            self.agreement.all_or_raise(lambda: self._check_shared(probe))
            self.agreement.broadcast_from_rank0(lambda: os.rmdir(probe))
            self.tiers = self._parts.enter_context(closing(Tiers(self.run_dir, config, self.agreement, from_store)))
            background = self._parts.enter_context(closing(self.agreement.all_or_raise(BACKGROUNDS[config.mode])))
            save = AsyncSave(self.root, self.agreement, background, device or torch.device("cpu"), self.tiers)
            self.async_save = self._parts.enter_context(closing(save))
        except BaseException:
            self.close()
            raise

    def _open(self) -> str:
        """Returns a folder that every rank must see. It bears a staging folder's name: whatever happens, it goes."""
        os.makedirs(self.root, exist_ok=True)
        self._parts.enter_context(closing(FolderLock(self.root)))
        for name in recover(self.root, uuid.uuid4().hex):
            log.warning("%s: left by a writer that was killed; removed or put back", os.path.join(self.root, name))
        probe = os.path.join(self.root, checkpoint_name(0))
        return staging_path(probe, make_staging_folder(probe))

    def _check_shared(self, probe: str) -> None:
        if not os.path.isdir(os.path.join(self.root, os.path.basename(probe))):
            raise InputError(
                f"run_dir: {self.run_dir} on {socket.gethostname()} (rank {self.agreement.rank}) is not rank 0's; "
                f"expected a folder on a file system that all machines share"
            )

    def close(self) -> None:
        """End the background, and let the run's lock go. A save in flight is lost; the next trainer tidies it away."""
        self._parts.close()

    def steps(self) -> list[int]:
        """Steps of the checkpoints in the run's folder and in its store, ascending; nothing of them is verified."""
        here = self.agreement.broadcast_from_rank0(lambda: {found.step for found in list_checkpoints(self.run_dir)})
        return sorted(here | self.tiers.steps())

    def latest_valid(self, refuse: Refusal | None = None) -> Checkpoint | None:
        """The newest checkpoint that is whole: manifest, presence and size of every file and, with ``config.verify``,
        their SHA-256, of which each rank computes its share. A file that no disk has whole is taken from the store.

        What is wrong with newer ones is logged and kept in :attr:`rejected`. ``refuse`` names a reason not to use a
        sound one. None: there is no checkpoint, or all are refused; the run starts fresh.

        Raises:
            QuernError: there are checkpoints and every usable one is damaged. Starting over is then a person's choice.
        """
        self.rejected = []
        damaged = 0
        for step in reversed(self.steps()):
            checkpoint, problems, refused = self._look(step, refuse)
            if not problems:
                return checkpoint
            damaged += not refused
            self._reject(problems)
        if damaged:
            raise QuernError(
                f"{self.root}: no checkpoint is whole; {self.rejected[0]}. Repair it from a copy, "
                f"or move the folder away to start over"
            )
        return None

    def at(self, step: int, refuse: Refusal | None = None) -> Checkpoint:
        """The checkpoint after ``step`` steps, checked as by :meth:`latest_valid`.

        Raises:
            InputError: there is none, or it cannot be used; the steps that stand are named.
        """
        known = self.steps()
        if step not in known:
            raise no_checkpoint(self.root, step, known)
        checkpoint, problems, _ = self._look(step, refuse)
        if problems:
            raise InputError(str(problems[0]))
        return checkpoint

    def _reject(self, problems: list[Problem]) -> None:
        self.rejected += problems
        if self.agreement.rank == 0:
            for problem in problems:
                log.warning("%s; an older checkpoint is tried", problem)

    def problems(self, checkpoint: Checkpoint) -> list[Problem]:
        """What is wrong with a checkpoint, of this run or another; the same list on every rank."""
        return self._look_at(checkpoint, None)[0]

    def _look(self, step: int, refuse: Refusal | None) -> tuple[Checkpoint, list[Problem], bool]:
        """The checkpoint of a step, why it cannot be used, and whether ``refuse`` says so."""
        checkpoint = Checkpoint(step, os.path.join(self.root, checkpoint_name(step)))
        if self.agreement.broadcast_from_rank0(lambda: os.path.isdir(checkpoint.path)):
            return checkpoint, *self._look_at(checkpoint, refuse)
        try:
            manifest = self.tiers.stored_manifest(step)
            reason = None if refuse is None else self.agreement.broadcast_from_rank0(lambda: refuse(manifest))
        except QuernError as error:  # the same on every rank
            return checkpoint, [Problem(checkpoint.path, str(error))], False
        if reason is not None:
            return checkpoint, [Problem(checkpoint.path, reason)], True
        return checkpoint, self.tiers.restore(manifest), False

    def _look_at(self, checkpoint: Checkpoint, refuse: Refusal | None) -> tuple[list[Problem], bool]:
        """No file of a refused one is hashed."""

        def structure() -> tuple[Manifest | None, list[Problem], bool]:
            try:
                manifest = read_manifest(checkpoint.path)
                reason = None if refuse is None else refuse(manifest)
            except InputError as error:
                return None, [Problem(checkpoint.path, str(error))], False
            return (manifest, [], False) if reason is None else (None, [Problem(checkpoint.path, reason)], True)

        manifest, problems, refused = self.agreement.broadcast_from_rank0(structure)
        if manifest is None:
            return problems, refused
        try:
            return self.tiers.find(checkpoint.path, manifest, hashes=self.config.verify), False
        except InputError as error:  # the same on every rank
            return [Problem(checkpoint.path, str(error))], False

    def load(self, path: str, state: TrainState) -> Loaded:
        """Read the checkpoint at ``path`` into the model and the optimizer of ``state``, from any layout into any.

        A weights-only checkpoint fills the model and leaves moments and counters as they are. Hyperparameters are never
        read: the optimizer keeps those of the config.

        Raises:
            InputError: the checkpoint is another model's, or its metadata cannot be trusted.
            QuernError: a file could not be read; the state is then undefined.
        """
        plan = self.agreement.all_or_raise(lambda: _plan_load(path, state))
        needed = self.agreement.all_or_raise(lambda: needed_files(plan.metadata, plan.view.tensors, plan.view.rows))
        if self.agreement.rank == 0 and (change := conversion(plan.metadata, plan.view)) is not None:
            log.info("%s: its moments are converted, %s (optimizer.moments)", path, change)
        folder = self.tiers.bring(path, plan.manifest, needed)
        plan.view.clear_padding()
        load_tensors(folder, plan.metadata, plan.view.tensors, plan.view.rows, self.agreement)
        plan.view.finish_load()
        return Loaded(plan.manifest, plan.extra)

    def keep(self, steps: Iterable[int] = ()) -> Keep:
        """What the config says is kept, ``steps``, and what is yet to be uploaded."""
        stay = tuple(sorted({*steps, *self.tiers.storing()}))
        return Keep(self.run_dir, self.config.keep_last, self.config.keep_every, self.async_save.published, stay)
