"""Saves, finds, loads and prunes the checkpoints of a run.

A save is a sequence of steps that all ranks take together (:mod:`quern.train.agree`): rank 0 makes a staging folder
under a random name; each rank writes, syncs and hashes its file; rank 0 adds config, ranks file and, last, the manifest
with every checksum; the folder is renamed. Until the rename there is no checkpoint, after it there is a whole one. The
steps are separate so that a later writer can do the middle ones in the background.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from quern import storage
from quern.config import digest, dump_yaml
from quern.errors import InputError, QuernError
from quern.train.agree import Agreement, describe
from quern.train.checkpoint.dcp import load_tensors, save_tensors
from quern.train.checkpoint.folder import (
    FolderLock,
    publish_folder,
    recover,
    remove_folder,
    staging_path,
)
from quern.train.checkpoint.manifest import (
    CONFIG_FILE,
    ENCODING_FILE,
    MANIFEST_FILE,
    METADATA_FILE,
    Checkpoint,
    FileRecord,
    Manifest,
    Position,
    Problem,
    check_files,
    checkpoint_name,
    checkpoints_folder,
    list_checkpoints,
    read_manifest,
)
from quern.train.checkpoint.metadata import read_metadata
from quern.train.checkpoint.publish import complete_folder, read_ranks, written_by
from quern.train.checkpoint.state import (
    TensorView,
    TrainState,
    check_encoding,
    check_shape,
    check_tensors,
    view_tensors,
)
from quern.train.config import CheckpointConfig

__all__ = ["CheckpointManager", "Loaded", "Refusal", "list_checkpoints"]

log = logging.getLogger(__name__)

#: Why a sound checkpoint is not to be used (it lies on an abandoned branch), or None.
Refusal = Callable[[Manifest], str | None]


def _plan_load(path: str, state: TrainState) -> _LoadPlan:
    manifest = read_manifest(path)
    metadata = read_metadata(path, manifest.files)
    check_shape(os.path.join(path, MANIFEST_FILE), manifest.model, state.facts.shape)
    check_encoding(os.path.join(path, MANIFEST_FILE), manifest.encoding, state.facts.encoding)
    parts = ("model.", "optimizer.") if manifest.optimizer else ("model.",)
    view = view_tensors(state).part(parts)
    check_tensors(os.path.join(path, METADATA_FILE), metadata, state.facts.shape, parts, view)
    return _LoadPlan(manifest, metadata, *view.with_extra(metadata))


def _check_steps(counts: list[int]) -> None:
    """One count is stored, for the parameters of all stages."""
    for rank, count in enumerate(counts):
        if count != counts[0]:
            raise QuernError(f"optimizer: rank {rank} has made {count} updates, rank 0 {counts[0]}")


@dataclass(frozen=True)
class _LoadPlan:
    manifest: Manifest
    metadata: Metadata
    view: TensorView
    extra: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Loaded:
    """What a load brought besides the model and the optimizer."""

    manifest: Manifest
    extra: Mapping[str, torch.Tensor]
    """The ``extra`` tensors of the checkpoint, on the CPU, the same on every rank."""


class CheckpointManager:
    """The checkpoints of one run. Every method but :meth:`prune` and :meth:`close` is collective.

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
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not storage.is_local(run_dir):
            raise InputError(f"run_dir: expected a folder on a file system, got {run_dir!r}")
        self.run_dir, self.config = os.fspath(run_dir), config
        self.root = checkpoints_folder(self.run_dir)
        self.rejected: list[Problem] = []
        """What :meth:`latest_valid` found wrong, newest checkpoint first."""
        self._agreement = Agreement(rank, world, process_group)
        self._group = process_group
        self._lock: FolderLock | None = None
        self._published: str | None = None
        try:
            probe = self._agreement.first(self._open)
            self._agreement.own(lambda: self._check_shared(probe))
            self._agreement.first(lambda: os.rmdir(probe))
        except BaseException:
            self.close()
            raise

    def _open(self) -> str:
        """Returns a folder that every rank must see. It bears a staging folder's name: whatever happens, it goes."""
        os.makedirs(self.root, exist_ok=True)
        self._lock = FolderLock(self.root)
        for name in recover(self.root, uuid.uuid4().hex):
            log.warning("%s: left by a writer that was killed; removed or put back", os.path.join(self.root, name))
        probe = os.path.join(self.root, checkpoint_name(0))
        return staging_path(probe, self._stage(probe))

    def _check_shared(self, probe: str) -> None:
        if not os.path.isdir(os.path.join(self.root, os.path.basename(probe))):
            raise InputError(
                f"run_dir: {self.run_dir} on {socket.gethostname()} (rank {self._agreement.rank}) is not rank 0's; "
                f"expected a folder on a file system that all machines share"
            )

    def close(self) -> None:
        """Let the run's lock go."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def save(self, step: int, state: TrainState, position: Position) -> Checkpoint:
        """Publish the state after ``step`` optimizer steps, and return the checkpoint once it is durable.

        A checkpoint of the same step that stands already belongs to a branch the run has left; it is replaced.

        Raises:
            QuernError: on every rank; nothing is published, and what was published before stands.
        """
        final = os.path.join(self.root, checkpoint_name(step))
        token = self._agreement.first(lambda: self._stage(final))
        staged = staging_path(final, token)
        try:
            view = self._agreement.own(lambda: view_tensors(state))
            _check_steps(self._agreement.gather(view.step))
            files = save_tensors(staged, view.tensors, view.rows, group=self._group, alone=self._agreement.world == 1)
            self._agreement.own(lambda: storage.sync(staged))
            merged = {name: record for share in self._agreement.gather(files) for name, record in share.items()}
            self._agreement.first(lambda: self._publish(step, state, position, merged, staged, final, token))
        except Exception:
            if self._agreement.rank == 0:
                with suppress(OSError):
                    shutil.rmtree(staged)
            raise
        self._published = final
        return Checkpoint(step, final)

    def _stage(self, final: str) -> str:
        token = uuid.uuid4().hex
        os.mkdir(staging_path(final, token))
        return token

    def _publish(
        self,
        step: int,
        state: TrainState,
        position: Position,
        files: Mapping[str, FileRecord],
        staged: str,
        final: str,
        token: str,
    ) -> None:
        facts = state.facts
        stored = read_metadata(staged, files)
        check_tensors(os.path.join(staged, METADATA_FILE), stored, facts.shape, ("model.", "optimizer."))
        manifest = Manifest(
            step=step,
            data_step=position.data_step,
            tokens=position.tokens,
            model=facts.shape,
            layout=facts.layout,
            precision=facts.precision,
            order=position.order,
            ledger_offset=position.ledger_offset,
            corpus_versions=facts.corpus_versions,
            corpus_fingerprint=facts.corpus_fingerprint,
            encoding=facts.encoding,
            config_digest=digest(dict(facts.config)),
            optimizer=True,
            scalars=position.scalars,
            written_by=written_by(),
            files=files,
        )
        documents = {
            CONFIG_FILE: dump_yaml(facts.config).encode(),
            ENCODING_FILE: read_ranks(facts.ranks_path, facts.encoding),
        }
        complete_folder(staged, manifest, documents)
        publish_folder(staged, final, token, replace=True)

    def latest_valid(self, refuse: Refusal | None = None) -> Checkpoint | None:
        """The newest checkpoint that is whole: manifest, presence and size of every file and, with ``config.verify``,
        their SHA-256, of which each rank computes its share.

        What is wrong with newer ones is logged and kept in :attr:`rejected`. ``refuse`` names a reason not to use a
        sound one. None: there is no checkpoint, or all are refused; the run starts fresh.

        Raises:
            QuernError: there are checkpoints and every usable one is damaged. Starting over is then a person's choice.
        """
        self.rejected = []
        damaged = 0
        for checkpoint in reversed(self._agreement.first(lambda: list_checkpoints(self.run_dir))):
            problems, refused = self._look(checkpoint, refuse)
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
        checkpoints = self._agreement.first(lambda: list_checkpoints(self.run_dir))
        found = next((checkpoint for checkpoint in checkpoints if checkpoint.step == step), None)
        if found is None:
            steps = ", ".join(str(checkpoint.step) for checkpoint in checkpoints) or "none"
            raise InputError(f"{self.root}: has no checkpoint of step {step} (there are: {steps})")
        problems, _ = self._look(found, refuse)
        if problems:
            raise InputError(str(problems[0]))
        return found

    def _reject(self, problems: list[Problem]) -> None:
        self.rejected += problems
        if self._agreement.rank == 0:
            for problem in problems:
                log.warning("%s; an older checkpoint is tried", problem)

    def problems(self, checkpoint: Checkpoint) -> list[Problem]:
        """What is wrong with a checkpoint, as :meth:`latest_valid` looks at it; the same list on every rank."""
        return self._look(checkpoint, None)[0]

    def _look(self, checkpoint: Checkpoint, refuse: Refusal | None) -> tuple[list[Problem], bool]:
        """Why a checkpoint cannot be used, and whether ``refuse`` says so; no file of a refused one is hashed."""

        def structure() -> tuple[Manifest | None, list[Problem], bool]:
            try:
                manifest = read_manifest(checkpoint.path)
            except InputError as error:
                return None, [Problem(checkpoint.path, str(error))], False
            problems = check_files(checkpoint.path, manifest, hashes=False)
            reason = None if problems or refuse is None else refuse(manifest)
            return (manifest, problems, False) if reason is None else (None, [Problem(checkpoint.path, reason)], True)

        manifest, problems, refused = self._agreement.first(structure)
        if manifest is None or problems or not self.config.verify:
            return problems, refused
        largest_first = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
        mine = set(largest_first[self._agreement.rank :: self._agreement.world])
        shares = self._agreement.every(
            lambda: check_files(checkpoint.path, manifest, hashes=True, mine=mine.__contains__)
        )
        return [problem for share in shares for problem in share], False

    def load(self, path: str, state: TrainState) -> Loaded:
        """Read the checkpoint at ``path`` into the model and the optimizer of ``state``, from any layout into any.

        A weights-only checkpoint fills the model and leaves moments and counters as they are. Hyperparameters are never
        read: the optimizer keeps those of the config.

        Raises:
            InputError: the checkpoint is another model's, or its metadata cannot be trusted.
            QuernError: a file could not be read; the state is then undefined.
        """
        plan = self._agreement.own(lambda: _plan_load(path, state))
        plan.view.clear_padding()
        load_tensors(
            path,
            plan.metadata,
            plan.view.tensors,
            plan.view.rows,
            group=self._group,
            alone=self._agreement.world == 1,
        )
        plan.view.finish_load()
        return Loaded(plan.manifest, plan.extra)

    def prune(self, refuse: Refusal | None = None) -> list[str]:
        """Remove old checkpoints (rank 0; elsewhere nothing happens) and return their names.

        Kept are the newest ``keep_last``, multiples of ``keep_every``, and always the newest that is whole. Checkpoints
        newer than the one this manager saved last belong to a branch the run has left: they wait until it passes them.
        ``refuse`` names checkpoints that do not count as the newest.
        """
        if self._agreement.rank != 0:
            return []
        newest_first = list_checkpoints(self.run_dir)[::-1]
        if self._published is not None:
            saved = next((found.step for found in newest_first if found.path == self._published), 0)
            newest_first = [checkpoint for checkpoint in newest_first if checkpoint.step <= saved]
        counted = [checkpoint for checkpoint in newest_first if not self._refused(checkpoint, refuse)]
        kept = {checkpoint.path for checkpoint in counted[: self.config.keep_last]}
        whole = next((checkpoint.path for checkpoint in counted if self._is_whole(checkpoint)), None)
        removed = []
        for checkpoint in reversed(newest_first):
            for_ever = self.config.keep_every is not None and checkpoint.step % self.config.keep_every == 0
            if checkpoint.path in kept or checkpoint.path == whole or for_ever or whole is None:
                continue
            try:
                remove_folder(checkpoint.path, uuid.uuid4().hex)
            except OSError as error:  # no reason to stop a run
                log.warning("%s: not removed (%s)", checkpoint.path, describe(error))
            else:
                removed.append(checkpoint.name)
        return removed

    def _refused(self, checkpoint: Checkpoint, refuse: Refusal | None) -> bool:
        if refuse is None:
            return False
        try:
            return refuse(read_manifest(checkpoint.path)) is not None
        except QuernError as error:  # one rank alone prunes: it may not leave the others waiting
            log.warning("%s: counts as one of the run's (%s)", checkpoint.path, error)
            return False

    def _is_whole(self, checkpoint: Checkpoint) -> bool:
        if checkpoint.path == self._published:
            return True  # its checksums were taken from the bytes this process wrote
        try:
            return not check_files(checkpoint.path, read_manifest(checkpoint.path), hashes=True)
        except InputError:
            return False
