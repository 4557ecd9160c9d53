"""Inputs and results of every task of duplicate removal."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quern import storage
from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.dedup.exchange import Writer, WrittenFiles
from quern.data_pipeline.execution.commits import table_path

__all__ = ["RECORD_BYTES", "DedupInputs", "Done", "PartitionGroup", "PartitionPlace"]

#: What a record takes, about, where a number of records stands for memory.
RECORD_BYTES = 16


@dataclass(frozen=True)
class PartitionPlace:
    """A partition; ``index`` is its place among the run's partitions, sorted by source and name."""

    index: int
    source: int
    """Its source's place in :attr:`DedupInputs.sources`."""
    name: str


@dataclass(frozen=True)
class PartitionGroup:
    """Partitions that one task reads: as many as have few enough documents, or a single larger one."""

    index: int
    places: tuple[PartitionPlace, ...]
    documents: tuple[int, ...]
    """Of each partition."""


@dataclass(frozen=True)
class DedupInputs:
    """The inputs that every task is given."""

    run_dir: str
    scratch: str
    config: DuplicatesConfig
    sources: tuple[str, ...]
    priorities: tuple[int, ...]
    """Of the sources."""
    max_records: int
    """How many records a task sorts at once, and a quarter of the shingles it holds."""
    first_ranks: tuple[int, ...] = (0,)
    """Documents are kept in order in ranges; the first rank of each, and the number of all."""

    def table(self, kind: str, place: PartitionPlace) -> str:
        """The committed table of a partition."""
        return table_path(self.run_dir, kind, self.sources[place.source], place.name)

    def folder(self, exchange: str) -> str:
        """Where the files of an exchange are."""
        return storage.join(self.scratch, exchange)

    def file(self, kind: str, index: int) -> str:
        """A scratch file."""
        return storage.join(self.scratch, kind, f"{index:06d}")

    def writer(self, exchange: str, index: int, buckets: int, dtype: np.dtype) -> Writer:
        """A writer of an exchange, one of those of all tasks; its files are about equally large for any dtype."""
        return Writer(self.folder(exchange), index, buckets, dtype, self.max_records * RECORD_BYTES // dtype.itemsize)

    @property
    def ranges(self) -> int:
        """Ranges of ranks."""
        return len(self.first_ranks) - 1

    def range_of(self, ranks: np.ndarray) -> np.ndarray:
        """int64: the range that each rank is in."""
        return np.searchsorted(np.array(self.first_ranks[1:]), ranks, side="right")


@dataclass(frozen=True)
class Done:
    """The result of a task: counts, and the files that it wrote to each exchange."""

    numbers: tuple[int, ...] = ()
    written: dict[str, WrittenFiles] = field(default_factory=dict)
