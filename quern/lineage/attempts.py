"""The parts of a training run's history: attempts, stretches of them, and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quern.lineage.index.columns import I64
from quern.parallel.planning.context import Context
from quern.tokenize.selection.chosen import Identity

__all__ = ["Attempt", "SeenCheckpoint", "Stretch"]


@dataclass(frozen=True)
class Attempt:
    """One start, resume or rollback. Step t of it read data step ``data_step + (t - step)`` of ``order``."""

    number: int
    """From 0, as in metrics.jsonl."""
    kind: str
    """``start``, ``resume`` or ``rollback``."""
    step: int
    data_step: int
    order: str
    """A hash."""
    stop: int
    """Steps below it are complete for certain."""
    ended: bool
    """Whether the trainer said where it ended; if not, it may have read on beyond ``stop``."""
    line: int
    """Its place among the ledger's lines."""
    skipped: I64 = field(repr=False)
    """Ascending steps whose update was not applied."""
    paths: Mapping[str, str] = field(repr=False)
    """Identity of a source → folder of its tokens; empty in a ledger that does not tell."""
    versions: Mapping[str, int] = field(repr=False)
    """Identity of a source → the corpus version it was read at."""
    dp: int | None
    """Data-parallel ranks; None in a ledger that does not tell, likewise ``micro_batch``."""
    micro_batch: int | None
    document_mask: bool
    wheres: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Identity of a source → the condition that its documents fulfil; of all others it reads all documents."""
    context: Context | None = None
    """How ranks shared a sequence; None: each had its own, or it is not known how."""

    def version_of(self, identity: str) -> int:
        """The corpus version it read a source at: as the ledger tells, else the one since which the source's tokens
        stand where they do, the oldest that it can have been."""
        since = Identity(identity).stream.rpartition("/")[2]
        return self.versions.get(identity, int(since) if since.isdecimal() else 1)

    def tells_version(self, identity: str) -> bool:
        """Whether the ledger records the corpus version at which it read a source."""
        return identity in self.versions

    @property
    def data_stop(self) -> int:
        """One beyond the last data step that was certainly read."""
        return self.data_step + self.stop - self.step


@dataclass(frozen=True)
class Stretch:
    """The model steps [step, stop) of one attempt."""

    attempt: Attempt
    step: int
    stop: int

    @property
    def data_step(self) -> int:
        """The data step of its first step."""
        return self.attempt.data_step + self.step - self.attempt.step

    @property
    def data_stop(self) -> int:
        """One beyond the data step of its last step."""
        return self.data_step + self.stop - self.step


@dataclass(frozen=True)
class SeenCheckpoint:
    """A checkpoint: weights after ``step`` steps of the branch that the ledger's first ``offset`` bytes tell of."""

    step: int
    name: str
    path: str
    """A folder, or an address in the run's store."""
    abandoned: str | None
    """Why it is not of the branch the run is on; None if it is."""
    offset: int
