"""One asynchronous save from start to publication, in steps that all ranks take together during training.

1. :meth:`AsyncSave.begin`: rank 0 makes a staging folder under a random name; the ranks agree on the plan; each begins
   to copy its pieces into memory.
2. :meth:`AsyncSave.wait_staged`, before the next update of the weights: returns when the copy is complete.
3. Each rank's background writes, syncs and hashes its files, and joins no collective. :meth:`AsyncSave.progress` is
   reduced with the step's loss, so that all ranks learn at the same step that the last one is done.
4. :meth:`AsyncSave.advance`: the checksums are gathered, and rank 0's background writes the manifest and renames the
   folder. Until then there is no checkpoint; afterwards there is a complete one.

At most one save is in flight. A failure on one rank fails the save on all, and leaves no files.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch

from quern import storage
from quern.config import digest, dump_yaml
from quern.errors import QuernError
from quern.train.checkpoint.format.file_locations import Place, places_to_bytes
from quern.train.checkpoint.format.files import Written
from quern.train.checkpoint.format.folder import make_staging_folder, remove_folder, staging_path
from quern.train.checkpoint.format.manifest import (
    METADATA_FILE,
    Checkpoint,
    FileRecord,
    Manifest,
    Position,
    checkpoint_name,
    sha256_of,
)
from quern.train.checkpoint.format.plan import Places, Plan, Planner
from quern.train.checkpoint.format.publish import written_by
from quern.train.checkpoint.format.state import TensorView, TrainState, view_tensors
from quern.train.checkpoint.mirror.disk import Disk
from quern.train.checkpoint.retention.prune import Keep
from quern.train.checkpoint.save.background import Background
from quern.train.checkpoint.save.snapshot import Snapshot
from quern.train.checkpoint.save.work import Publication
from quern.train.checkpoint.tiers.tiers import Tiers
from quern.train.history.branch import LEDGER_FILE
from quern.train.processes.agree import Agreement

__all__ = ["AsyncSave", "Outcome", "Progress"]

#: A rank's files, where its pieces lie in them if that has changed, and where the files are if not in the run's folder.
_Share = tuple[dict[str, FileRecord], Places | None, Place | None]


@dataclass(frozen=True)
class Outcome:
    """How a save ended; the same on every rank."""

    checkpoint: Checkpoint
    error: QuernError | None
    """None: it is published."""
    removed: tuple[str, ...] = ()
    """Names of the checkpoints that were removed then."""
    stored: bool = False
    """Whether it is to be uploaded."""


@dataclass(frozen=True)
class Progress:
    """A rank's progress of the save in flight, in numbers that can be summed over ranks."""

    ended: int = 0
    """Its part is written, or has failed."""
    published: int = 0
    """Rank 0's: so is the publication."""


class _Stage(Enum):
    WRITING = auto()
    PUBLISHING = auto()


@dataclass
class _InFlight:
    step: int
    final: str
    token: str
    staged: str
    state: TrainState
    position: Position
    keep: Keep | None
    """What is removed when it stands."""
    last: bool
    """Whether no other of the run follows."""
    stage: _Stage = _Stage.WRITING
    copying: bool = False
    """Whether the background has been, or will be, asked to write."""
    copy_error: Exception | None = None


class AsyncSave:
    """The save in flight. Collective but for :meth:`wait_staged`, :meth:`progress` and :meth:`close`."""

    def __init__(
        self,
        root: str,
        agreement: Agreement,
        background: Background,
        device: torch.device,
        tiers: Tiers,
    ) -> None:
        self._root, self._agreement, self._background, self._tiers = root, agreement, background, tiers
        self._disk = tiers.disk
        self.published: str | None = None
        """The folder of the last checkpoint that was published."""
        self._planner = Planner(agreement)
        self._plan: Plan | None = None
        memory = background.memory
        self._snapshot = None if memory is None else Snapshot(memory, device)
        self._metadata_record: FileRecord | None = None
        self._now: _InFlight | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a save has begun and neither been published nor failed."""
        return self._now is not None

    def prepare(self, state: TrainState) -> None:
        """Plan, and let the background allocate memory, before the first save is due."""
        self._plan_for(self._agreement.all_or_raise(lambda: view_tensors(state)))

    def _plan_for(self, view: TensorView) -> Plan:
        plan = self._planner.plan(view.tensors, view.rows)
        if plan is not self._plan:
            self._agreement.all_or_raise(lambda: self._lay_out(plan))
            self._plan = plan
        return plan

    def _lay_out(self, plan: Plan) -> None:
        self._background.lay_out(plan.files)
        if self._snapshot is not None:
            self._snapshot.prepare([tensor for file in plan.files for tensor in file.tensors])

    def begin(
        self, step: int, state: TrainState, position: Position, keep: Keep | None = None, last: bool = False
    ) -> None:
        """Begin to save the state after ``step`` optimizer steps; nothing of it may change before :meth:`wait_staged`.

        A checkpoint of the same step that stands already belongs to a branch the run has left; it is replaced.
        ``keep``: what is removed once this one stands. ``last``: the run saves no other.

        Raises:
            QuernError: on every rank; nothing is in flight, and what was published before stands.
        """
        assert self._now is None, "one save at a time"
        final = os.path.join(self._root, checkpoint_name(step))
        token = self._agreement.broadcast_from_rank0(lambda: self._make_staging_folder(final))
        staged = staging_path(final, token)
        try:
            view = self._agreement.all_or_raise(lambda: view_tensors(state))
            _check_steps(self._agreement.gather(view.step))
            plan = self._plan_for(view)
            self._now = _InFlight(step, final, token, staged, state, position, keep, last)
            self._agreement.all_or_raise(lambda: self._copy(plan, self._folder(step, token, staged)))
        except Exception:
            if self._now is not None and self._now.copying:  # here it went well
                with suppress(Exception):
                    self._written()
            self._now = None
            self._discard(step, token, staged)
            raise

    def _make_staging_folder(self, final: str) -> str:
        with storage.needs_room(self._root):
            return make_staging_folder(final)

    def _folder(self, step: int, token: str, staged: str) -> str:
        """Where this rank writes."""
        return staged if self._disk is None else self._disk.stage(step, token)

    def _discard(self, step: int, token: str, staged: str) -> None:
        if self._agreement.rank == 0:
            shutil.rmtree(staged, ignore_errors=True)
        if self._disk is not None:
            self._disk.discard(step, token)

    def _copy(self, plan: Plan, staged: str) -> None:
        assert self._now is not None
        if self._snapshot is None:
            self._write(staged)
        else:
            stored = [tensor for file in plan.files for tensor in file.tensors]
            self._snapshot.start(self._planner.pieces(), stored, lambda: self._write(staged))
        self._now.copying = True

    def _write(self, staged: str) -> None:
        """Possibly in the thread that has copied, where an error is told to nobody else."""
        now = self._now
        assert now is not None
        try:
            self._background.write(staged, lambda number: self._planner.fetch(number).cpu())
        except Exception as error:
            now.copy_error = error

    def wait_staged(self) -> None:
        """Wait until the state may change. A copy that failed is a save that fails."""
        if self._snapshot is None or self._now is None:
            return
        try:
            self._snapshot.wait()
        except Exception as error:
            self._now.copy_error = error

    def progress(self) -> Progress:
        """This rank's present progress."""
        now = self._now
        if now is None or not (now.copy_error is not None or self._background.idle):
            return Progress()
        if now.stage is _Stage.WRITING:
            return Progress(ended=1)
        return Progress(published=int(self._agreement.rank == 0))

    def advance(self, total: Progress) -> Outcome | None:
        """Advance the save by the sum of all ranks' progress in one step: the same on every rank.

        Returns how it ended, if it has.
        """
        now = self._now
        if now is None:
            return None
        if now.stage is _Stage.WRITING and total.ended == self._agreement.world:
            return self._try(self._publish)
        if now.stage is _Stage.PUBLISHING and total.published:
            return self._try(self._end)
        return None

    def finish(self) -> Outcome | None:
        """Wait for the save in flight, if there is one, and return how it ended."""
        if self._now is None:
            return None
        if self._now.stage is _Stage.WRITING and (outcome := self._try(self._publish)) is not None:
            return outcome
        return self._try(self._end)

    def _try(self, action: Callable[[], Outcome | None]) -> Outcome | None:
        now = self._now
        assert now is not None
        try:
            return action()
        except QuernError as error:
            self._now = None
            self._discard(now.step, now.token, now.staged)
            if self._disk is not None and not self._agreement.broadcast_from_rank0(lambda: os.path.lexists(now.final)):
                with suppress(OSError):  # in place already, of a checkpoint that does not stand
                    self._disk.remove([now.step])
            return Outcome(Checkpoint(now.step, now.final), error)

    def _publish(self) -> None:
        """All ranks have written: gather what, and begin to publish."""
        now = self._now
        assert now is not None
        written = self._agreement.all_or_raise_with_keepalive(self._written)
        records = {name: file.record for name, file in written.items()}
        if self._disk is not None:
            self._settle(now, self._disk, written)
        place = self._tiers.place(now.step, written)
        shares = self._agreement.gather_on_rank0((records, self._planner.report(written), place))
        self._agreement.broadcast_from_rank0(lambda: self._background.publish(self._publication(now, shares)))
        now.stage = _Stage.PUBLISHING

    def _settle(self, now: _InFlight, disk: Disk, written: Mapping[str, Written]) -> None:
        """Put the nodes' files in place. What bore their names belongs to a branch that was left, and goes first."""

        def clear() -> None:
            if os.path.lexists(now.final):
                remove_folder(now.final, uuid.uuid4().hex)

        leads = self._tiers.nodes.leads
        self._agreement.broadcast_from_rank0(clear)
        self._agreement.all_or_raise(lambda: disk.remove([now.step]) if leads else None)  # also what was mirrored here
        self._agreement.all_or_raise(lambda: disk.settle(now.step, now.token, written))

    def _written(self) -> dict[str, Written]:
        assert self._now is not None
        if self._snapshot is not None:
            try:
                self._snapshot.join()  # also after an error: the next save begins another copy
            except Exception as error:
                self._now.copy_error = self._now.copy_error or error
        if self._now.copy_error is not None:
            raise self._now.copy_error
        found: dict[str, Written] = self._background.result()
        storage.sync(self._now.staged if self._disk is None else self._disk.staging(self._now.step, self._now.token))
        return found

    def _publication(self, now: _InFlight, shares: Sequence[_Share]) -> Publication:
        facts, position = now.state.facts, now.position
        metadata = self._planner.metadata([report for _, report, _ in shares])
        if metadata is not None:
            self._metadata_record = FileRecord(sha256_of(metadata), len(metadata))
        assert self._metadata_record is not None
        files = {name: record for records, _, _ in shares for name, record in records.items()}
        places = [place for _, _, place in shares if place is not None]
        manifest = Manifest(
            step=now.step,
            **vars(position),
            model=facts.shape,
            layout=facts.layout,
            precision=facts.precision,
            corpus_versions=facts.corpus_versions,
            corpus_fingerprint=facts.corpus_fingerprint,
            encoding=facts.encoding,
            config_digest=digest(dict(facts.config)),
            optimizer=True,
            written_by=written_by(),
            files={**files, METADATA_FILE: self._metadata_record},
            run=self._tiers.run,
        )
        keep = None if now.keep is None else replace(now.keep, published=now.final)
        return Publication(
            staged=now.staged,
            final=now.final,
            token=now.token,
            manifest=manifest,
            config=dump_yaml(facts.config),
            ranks_path=facts.ranks_path,
            metadata=metadata,
            places=places_to_bytes(places).decode() if places else None,
            ledger=os.path.join(os.path.dirname(self._root), LEDGER_FILE),
            keep=keep,
        )

    def _end(self) -> Outcome:
        now = self._now
        assert now is not None
        mine = self._agreement.all_or_raise_with_keepalive(
            self._background.result if self._agreement.rank == 0 else list
        )
        removed, stored = self._agreement.broadcast_from_rank0(lambda: (mine, self._tiers.stores(now.step, now.last)))
        self._now, self.published = None, now.final
        outcome = Outcome(Checkpoint(now.step, now.final), None, tuple(removed), stored)
        self._tiers.published(outcome.checkpoint, outcome.removed, outcome.stored)
        return outcome

    def close(self) -> None:
        """Wait for the copy under way; a save in flight is lost, and cleaned up by the next trainer."""
        if self._snapshot is not None:
            with suppress(Exception):
                self._snapshot.join()


def _check_steps(counts: Sequence[int]) -> None:
    """One count is stored, for the parameters of all stages."""
    for rank, count in enumerate(counts):
        if count != counts[0]:
            raise QuernError(f"optimizer: rank {rank} has made {count} updates, rank 0 {counts[0]}")
