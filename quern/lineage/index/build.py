"""Builds the index, and checks whether an existing one still matches the files that it was built from.

``RUN/lineage/index.json`` names the folders it consists of; their names are digests of what they were made from, and
none is ever written to again. A build writes folders under temporary names, renames them, replaces ``index.json`` last,
and then removes folders that it no longer names: a killed build leaves the old index or none.
"""

from __future__ import annotations

import atexit
import errno
import os
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from quern import storage
from quern.config import digest
from quern.data_pipeline.execution.run_directory import read_id
from quern.errors import InputError, QuernError
from quern.lineage.index.changes import CHANGE_FILE
from quern.lineage.index.columns import DamagedIndexError
from quern.lineage.index.duplicates import CLUSTERS, DECISIONS, Duplicates, write_duplicates
from quern.lineage.index.records import Opened, read_sealed, write_sealed
from quern.lineage.index.segments import RECORD, SEGMENT_DOCUMENTS, Segment, VerdictSlice, plan_segments, write_segment
from quern.lineage.index.spans import SpanColumns, write_spans
from quern.tokenize.corpus_version import read_streams
from quern.tokenize.shard_format import VERSION_FILE
from quern.tokenize.shards import ShardReader
from quern.train.batches.corpus import exclusive

__all__ = ["FOLDER", "Built", "State", "discard", "open_index", "survey"]

FOLDER = "lineage"
INDEX = "index.json"
#: Raised whenever other files would be written from the same run.
FORMAT = 5
_OURS = re.compile(r"(segment|spans|duplicates)_[0-9a-f]{32}|\.building-.*")
_ATTEMPTS = 3
#: Where a run cannot be written to.
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
#: Run → the folder of its index, where that is for this process alone.
_elsewhere: dict[str, str] = {}


@dataclass(frozen=True)
class State:
    """The state of a run, as far as the index depends on it."""

    run: str
    run_id: str
    files: tuple[tuple[str, int, int], ...]
    """Every verdict file: its name below ``verdicts/``, bytes, modification time (ns)."""
    version_sha256: str | None
    """Of VERSION.json; None while there are no tokens."""
    duplicates: tuple[tuple[str, int, int], ...]
    changes: tuple[tuple[str, int, int], ...] = ()
    """What later corpus versions changed; like ``files``."""

    @cached_property
    def digest(self) -> str:
        """The digest of everything the index is made from."""
        return digest([FORMAT, self.run_id, self.files, self.version_sha256, self.duplicates, self.changes])

    @property
    def verdicts(self) -> str:
        """The folder of verdict files."""
        return os.path.join(self.run, "verdicts")


@dataclass(frozen=True)
class Built:
    """An existing index. ``segments_written``: how many were made for this call; 0 and not ``new``: all stood."""

    record: dict[str, Any]
    new: bool
    segments_written: int
    folder: str
    """Where it stands: ``RUN/lineage``, or a temporary folder of this process where the run cannot be written to."""


def survey(run: str) -> State:
    """The present state of the run at ``run``.

    Raises:
        InputError: it is not on a local file system, or no data run.
    """
    if not storage.is_local(run):
        raise InputError(f"{run}: lineage needs a local copy of the run; copy it here first")
    run = os.path.abspath(storage.split(run)[1])
    version = os.path.join(run, "tokens", VERSION_FILE)
    return State(
        run,
        read_id(run),
        tuple(_stamps(os.path.join(run, "verdicts"))),
        storage.sha256(version) if os.path.exists(version) else None,
        tuple(stamp for stamp in _stamps(run, "duplicates") if os.path.basename(stamp[0]) in (DECISIONS, CLUSTERS)),
        tuple(stamp for stamp in _stamps(run, "tokens") if CHANGE_FILE.fullmatch(os.path.basename(stamp[0]))),
    )


def _stamps(folder: str, only: str | None = None) -> Iterator[tuple[str, int, int]]:
    """Name, bytes and modification time (ns) of every Parquet file of every folder in ``folder``, sorted by name."""
    try:
        below = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and only in (None, entry.name))
    except FileNotFoundError:
        return
    for name in below:
        with os.scandir(os.path.join(folder, name)) as entries:
            found = [entry for entry in entries if entry.name.endswith(".parquet") and not entry.name.startswith(".")]
        for entry in sorted(found, key=lambda entry: entry.name):
            status = entry.stat()
            yield f"{name}/{entry.name}", status.st_size, status.st_mtime_ns


def open_index(run: str, *, segment_documents: int = SEGMENT_DOCUMENTS) -> tuple[State, Built]:
    """Open the index of a run, built first if necessary.

    Raises:
        InputError: no data run, or one whose files are damaged.
        QuernError: the index cannot be written, or the run is being written to.
    """
    for _ in range(_ATTEMPTS):
        state = survey(run)
        folder = _elsewhere.get(state.run) or os.path.join(state.run, FOLDER)
        record = _read(state, folder)
        if record is not None:
            return state, Built(record, False, 0, folder)
        try:
            try:
                built = _build(state, folder, segment_documents)
            except OSError as error:
                if error.errno not in _READ_ONLY:
                    raise
                print(f"{folder}: cannot be written ({error.strerror}), so the index is not kept", file=sys.stderr)
                folder = _elsewhere[state.run] = tempfile.mkdtemp(prefix="quern-lineage-")
                atexit.register(shutil.rmtree, folder, ignore_errors=True)
                built = _build(state, folder, segment_documents)
        except OSError as error:
            raise QuernError(f"{folder}: the index cannot be written ({error.strerror or error})") from None
        if survey(run) == state:
            return state, built
    raise QuernError(f"{run}: is being written to; ask again when the run is complete")


def discard(built: Built) -> bool:
    """Drop an index that was found damaged: the next to open it rebuilds the damaged parts.

    False if another stands there by now.

    Raises:
        OSError: it cannot be removed.
    """
    path = os.path.join(built.folder, INDEX)
    if read_sealed(path) not in (None, built.record):
        return False
    with suppress(FileNotFoundError):
        os.unlink(path)
    return True


def _read(state: State, folder: str) -> dict[str, Any] | None:
    """What ``index.json`` says, if it is of this state and all its folders are there."""
    record = read_sealed(os.path.join(folder, INDEX))
    if record is None or record["state"] != state.digest:
        return None
    return record if all(os.path.isdir(os.path.join(folder, name)) for name in _parts(record)) else None


def _parts(record: dict[str, Any]) -> set[str]:
    """The folders that an index consists of."""
    return {record["spans"], record["duplicates"], *(segment["name"] for segment in record["segments"])}


def _build(state: State, folder: str, segment_documents: int) -> Built:
    os.makedirs(folder, exist_ok=True)
    with exclusive(os.path.join(folder, ".lock")):
        record = _read(state, folder)
        if record is not None:  # another process has just built it
            return Built(record, False, 0, folder)
        for name in os.listdir(folder):
            if name.startswith(".building-"):
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
        builder = _Builder(state, folder)
        try:
            record = builder.run(segment_documents)
            write_sealed(os.path.join(folder, INDEX), record)
        finally:
            builder.clean()
        for name in os.listdir(folder):
            if _OURS.fullmatch(name) and name not in _parts(record):
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
    return Built(record, True, builder.segments_written, folder)


class _Builder:
    """One build; what an earlier one has left and still fits is taken over, after its checksums were compared."""

    def __init__(self, state: State, folder: str) -> None:
        self.state, self.folder = state, folder
        self.segments_written = 0
        self._temporary = os.path.join(folder, f".building-{uuid.uuid4().hex}")
        os.makedirs(self._temporary)

    def clean(self) -> None:
        shutil.rmtree(self._temporary, ignore_errors=True)

    def run(self, segment_documents: int) -> dict[str, Any]:
        """Write every part that is missing; return the record of the index."""
        print(f"building the lineage index of {self.state.run}", file=sys.stderr)
        records = self._segments(segment_documents)
        segments = Segment.of_index(self.folder, records, Opened())
        readers, since = self._readers()
        names = [record["name"] for record in records]
        bases = [segment.base for segment in segments]
        tables, num_documents = os.path.join(self.state.run, "duplicates"), sum(own.documents for own in segments)
        spans, _ = self._part(
            "spans",
            [self.state.version_sha256, self.state.changes, names],
            lambda path: write_spans(path, self._scratch("spans"), readers, since, segments),
            lambda path, record: SpanColumns(path, len(readers), bases).check(),
        )
        duplicates, _ = self._part(
            "duplicates",
            [self.state.duplicates, names],
            lambda path: write_duplicates(path, self._scratch("duplicates"), tables, segments, num_documents),
            lambda path, record: Duplicates(path).check(),
        )
        return {
            "state": self.state.digest,
            "version": readers[0].version if readers else 0,
            "segments": records,
            "spans": spans,
            "duplicates": duplicates,
            "streams": [
                {"name": own.source, "since": stands, "total_tokens": own.total_tokens, "num_spans": own.num_documents}
                for own, stands in zip(readers, since, strict=True)
            ],
        }

    def _scratch(self, name: str) -> str:
        path = os.path.join(self._temporary, f"{name}.scratch")
        os.makedirs(path)
        return path

    def _readers(self) -> tuple[list[ShardReader], list[int]]:
        """The tokens of every stream, and the corpus version since which they stand where they do."""
        if self.state.version_sha256 is None:
            return [], []
        tokens = os.path.join(self.state.run, "tokens")
        sources = read_streams(tokens)
        readers = [ShardReader(os.path.join(tokens, source)) for source in sources]
        found = [own.get("since", 1) for own in sources.values()]
        for source, since in zip(sources, found, strict=True):
            if type(since) is not int or since < 1:
                path = os.path.join(tokens, VERSION_FILE)
                raise InputError(f"{path}: sources.{source}.since: expected an integer ≥ 1, got {since!r:.60}")
        return readers, found

    def _part(
        self,
        kind: str,
        made_from: Any,
        write: Callable[[str], dict[str, Any] | None],
        check: Callable[[str, dict[str, Any]], None],
    ) -> tuple[str, dict[str, Any]]:
        """A folder named by what it is made from, and its record: taken over if it is there and whole, else written."""
        name = f"{kind}_{digest([FORMAT, kind, made_from])[:32]}"
        path = os.path.join(self.folder, name)
        record = read_sealed(os.path.join(path, RECORD))
        if record is not None:
            try:
                check(path, record)
                return name, record
            except DamagedIndexError:
                pass
        shutil.rmtree(path, ignore_errors=True)
        temporary = os.path.join(self._temporary, name)
        os.makedirs(temporary)
        record = write(temporary) or {}
        write_sealed(os.path.join(temporary, RECORD), record)
        os.rename(temporary, path)
        self.segments_written += kind == "segment"
        return name, record

    def _segments(self, segment_documents: int) -> list[dict[str, Any]]:
        """The records of all segments, those that stand and new ones, in the order of their first files."""
        standing = self._standing()
        free = self._free(standing)
        if free:
            # what is new is joined with what is small, lest every addition leave a segment of its own
            standing = [found for found in standing if found[1]["documents"] >= segment_documents / 2]
            free = self._free(standing)
        records = [(pieces[0], {**record, "name": name}) for name, record, pieces in standing]
        for pieces in plan_segments(self.state.verdicts, free, segment_documents):
            name, record = self._segment(pieces)
            records.append((pieces[0], {**record, "name": name}))
            pa.default_memory_pool().release_unused()
        records.sort(key=lambda found: (found[0].file, found[0].first_group))
        # which files they are of stays in their folders: a run may have a hundred thousand
        return [{name: value for name, value in record.items() if name != "pieces"} for _, record in records]

    def _segment(self, pieces: Sequence[VerdictSlice]) -> tuple[str, dict[str, Any]]:
        return self._part(
            "segment",
            self._made_from(pieces),
            lambda path: write_segment(path, self.state.verdicts, pieces),
            lambda path, record: Segment(path, 0, record).check(),
        )

    def _made_from(self, pieces: Sequence[VerdictSlice]) -> list[Any] | None:
        """What decides a segment's bytes; None if one of its files is gone."""
        stamps = {name: stamp for name, *stamp in self.state.files}
        if any(piece.file not in stamps for piece in pieces):
            return None
        return [[*astuple(piece), *stamps[piece.file]] for piece in pieces]

    def _standing(self) -> list[tuple[str, dict[str, Any], list[VerdictSlice]]]:
        """Segments of earlier builds whose files are as they were; no document is in two of them."""
        found: list[tuple[str, dict[str, Any], list[VerdictSlice]]] = []
        taken: set[tuple[str, int]] = set()
        for name in sorted(os.listdir(self.folder)):
            path = os.path.join(self.folder, name)
            record = read_sealed(os.path.join(path, RECORD)) if name.startswith("segment_") else None
            if record is None:
                continue
            pieces = [VerdictSlice(*piece) for piece in record["pieces"]]
            made_from = self._made_from(pieces)
            groups = {(piece.file, group) for piece in pieces for group in range(piece.first_group, piece.end_group)}
            if made_from is None or name != f"segment_{digest([FORMAT, 'segment', made_from])[:32]}" or groups & taken:
                continue
            try:
                Segment(path, 0, record).check()
            except DamagedIndexError:
                continue
            taken |= groups
            found.append((name, record, pieces))
        return found

    def _free(
        self, standing: Sequence[tuple[str, dict[str, Any], list[VerdictSlice]]]
    ) -> list[tuple[str, int, int | None]]:
        """The row groups that are in no segment: file, first group, the one to stop at (None: the file's end)."""
        taken: dict[str, list[VerdictSlice]] = {}
        for _, _, pieces in standing:
            for piece in pieces:
                taken.setdefault(piece.file, []).append(piece)
        free: list[tuple[str, int, int | None]] = []
        for file, _, _ in self.state.files:
            first, groups = 0, None
            for piece in sorted(taken.get(file, []), key=lambda piece: piece.first_group):
                if piece.first_group > first:
                    free.append((file, first, piece.first_group))
                first, groups = piece.end_group, piece.num_groups
            if first != groups:
                free.append((file, first, None))
        return free
