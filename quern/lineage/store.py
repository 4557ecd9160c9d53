"""Reads a data run for lineage: finds documents, and where they are in its tokens."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike

from quern.data_pipeline.dedup.schemas import DECISION_SCHEMA
from quern.data_pipeline.page import url as urls
from quern.data_pipeline.page.document import verdict_schema
from quern.errors import InputError, QuernError
from quern.lineage.index.build import discard, open_index
from quern.lineage.index.changes import Purges
from quern.lineage.index.columns import I64, DamagedIndexError
from quern.lineage.index.decided import Redecided
from quern.lineage.index.duplicates import DECISIONS, Duplicates, read_cells, read_row
from quern.lineage.index.records import Opened
from quern.lineage.index.search import find_domain, find_host, find_surt, find_url
from quern.lineage.index.segments import SEGMENT_DOCUMENTS, Segment
from quern.lineage.index.spans import SpanColumns, Spans
from quern.tokenize.encoding import load_encoding
from quern.tokenize.selection.chosen import Chosen
from quern.tokenize.shards import ShardReader

__all__ = ["DocumentIdentities", "IndexedRun", "Spans", "Stream", "parse_hash", "parse_host", "plain"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Stream:
    """One stream of tokens of a run: the shards of a source, or of its held-out documents."""

    name: str
    """``<source>`` or ``<source>.val``."""
    identity: str
    """See :class:`~quern.tokenize.selection.chosen.Identity`."""
    path: str
    """``RUN/tokens/<name>``."""
    total_tokens: int
    num_spans: int
    held_out: bool
    chosen: Chosen | None = None
    """Of a stream that a condition's documents make laid end to end: where its tokens are in the source's."""

    @cached_property
    def reader(self) -> ShardReader:
        """Its tokens; opened at first use."""
        return ShardReader(self.path)

    def text(self, start: int, length: int, chars: int | None) -> tuple[str, bool]:
        """Up to ``chars`` characters (None: all) of ``length`` tokens from ``start`` on, and whether that is all."""
        taken = length if chars is None else min(length, 4 * chars)  # a token is a byte or more, a character 4 at most
        encoding = load_encoding(self.reader.encoding, self.reader.ranks_path)
        text = encoding.decode(self.reader.tokens(start, start + taken))
        return text[:chars], taken == length and (chars is None or len(text) <= chars)


@dataclass(frozen=True)
class DocumentIdentities:
    """Identities of documents: one item each, in the order asked for."""

    numbers: I64
    doc_ids: list[bytes]
    urls: list[str | None]
    """As the crawl gave them."""
    sources: list[str]

    def __len__(self) -> int:
        return len(self.numbers)


def _guarded(method: Callable[Concatenate[IndexedRun, P], R]) -> Callable[Concatenate[IndexedRun, P], R]:
    """A damaged index answers nothing: it is forgotten, and built anew when the run is opened again."""

    @wraps(method)
    def wrapped(self: IndexedRun, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except DamagedIndexError as error:
            try:
                forgotten = discard(self.built)
            except OSError as why:
                raise QuernError(
                    f"{error}; it cannot be built anew: {why.filename} cannot be removed ({why.strerror}); "
                    "make the run writable, or copy it without its folder lineage/"
                ) from None
            if forgotten:
                raise QuernError(f"{error}; the index will be built anew: run the same command again") from None
            raise QuernError(f"{self.run}: its index was built anew meanwhile: run the same command again") from None

    return wrapped


class IndexedRun:
    """A data run, opened for lineage; its index is built first where it does not stand (one line on stderr), below
    ``TMPDIR`` and for this process alone where the run cannot be written to.

    A document is known by its *number*, 0 to ``num_documents - 1``: every verdict row has one, kept or dropped. Numbers
    hold as long as the run's verdict files do.

    Attributes: ``run`` (absolute path), ``run_id``, ``version`` (of the corpus; 0 while there are no tokens),
    ``num_documents``, ``streams`` (in VERSION.json's order, held-out ones too).

    Raises:
        InputError: no local data run, or one with damaged files.
        QuernError: the index cannot be written. Every method: the index is damaged.
    """

    def __init__(self, run: str, *, segment_documents: int = SEGMENT_DOCUMENTS) -> None:
        state, self.built = open_index(run, segment_documents=segment_documents)
        record = self.built.record
        self.run, self.run_id = state.run, state.run_id
        self.version: int = record["version"]
        folder = self.built.folder
        self._segments = Segment.of_index(folder, record["segments"], opened := Opened())
        self.num_documents = sum(segment.documents for segment in self._segments)
        self._bases = np.array([segment.base for segment in self._segments], np.int64)
        names = {stream["name"] for stream in record["streams"]}
        self.streams = tuple(
            Stream(
                name=own["name"],
                identity=f"{self.run_id}/{own['name']}/{own['since']}",
                path=os.path.join(self.run, "tokens", own["name"]),
                total_tokens=own["total_tokens"],
                num_spans=own["num_spans"],
                held_out=own["name"].endswith(".val") and own["name"].removesuffix(".val") in names,
            )
            for own in record["streams"]
        )
        self._spans = SpanColumns(
            os.path.join(folder, record["spans"]), len(self.streams), self._bases.tolist(), opened
        )
        self._duplicates_folder = os.path.join(folder, record["duplicates"])

    @cached_property
    def _duplicates(self) -> Duplicates:
        return Duplicates(self._duplicates_folder)

    @cached_property
    def _redecided(self) -> Redecided:
        return Redecided(os.path.join(self.run, "tokens"), self.version)

    @cached_property
    def _purges(self) -> Purges:
        return Purges(os.path.join(self.run, "tokens"), self.version)

    def stream(self, identity: str) -> Stream | None:
        """The stream of this identity, as a training run has recorded it; None if the run has no such stream."""
        return next((stream for stream in self.streams if stream.identity == identity), None)

    def check(self) -> None:
        """Compare every checksum of the index.

        Raises:
            DamagedIndexError: a file is not what was written.
        """
        for segment in self._segments:
            segment.check()
        self._spans.check()
        self._duplicates.check()

    # ---- finding documents

    @_guarded
    def find(
        self,
        *,
        doc: str | bytes | None = None,
        url: str | None = None,
        surt: str | None = None,
        host: str | None = None,
        domain: str | None = None,
        hash: str | bytes | None = None,
    ) -> I64:
        """The numbers of all matching documents, ascending. Exactly one argument is given.

        ``doc``: a doc_id, 16 bytes or 32 hex digits. ``url``: any spelling that has the same canonical form; where no
        document has that, the same with http for https or the reverse. ``surt``: a prefix. ``host``: that host.
        ``domain``: that host and all below it. ``hash``: a pre- or post-filter hash.

        Raises:
            InputError: an argument is no doc_id, hash or host.
        """
        given = [value for value in (doc, url, surt, host, domain, hash) if value is not None]
        if len(given) != 1:
            raise ValueError(f"expected one of doc, url, surt, host, domain, hash, got {len(given)}")
        if doc is not None:
            wanted = parse_hash(doc, "doc")
            return self._collect(lambda segment: segment.by_doc.find(wanted))
        if hash is not None:
            wanted = parse_hash(hash, "hash")
            return self._collect(lambda own: np.union1d(own.by_pre.find(wanted), own.by_post.find(wanted)))
        if url is not None:
            found = self._collect(lambda segment: find_url(segment.urls, url))
            scheme, _, rest = (urls.canonicalize(url) or "").partition("://")
            other = f"{'http' if scheme == 'https' else 'https'}://{rest}"
            return found if len(found) or not rest else self._collect(lambda own: find_url(own.urls, other))
        if surt is not None:
            return self._collect(lambda segment: find_surt(segment.urls, surt))
        if host is not None:
            name = parse_host(host, "host")
            return self._collect(lambda segment: find_host(segment.urls, name))
        name = parse_host(domain or "", "domain")
        return self._collect(lambda segment: find_domain(segment.urls, name))

    @_guarded
    def find_docs(self, doc_ids: bytes) -> I64:
        """The numbers of the documents with these doc_ids, 16 bytes each, ascending; unknown ids have none."""
        return np.unique(self._collect(lambda segment: segment.by_doc.find_all(doc_ids)))

    def _collect(self, find: Callable[[Segment], I64]) -> I64:
        """What each segment finds, as numbers of the run."""
        return np.concatenate(
            [np.empty(0, np.int64), *(find(segment) + segment.base for segment in self._segments)], dtype=np.int64
        )

    # ---- what is known of them

    def _by_segment(self, numbers: ArrayLike) -> tuple[I64, list[tuple[Segment, I64]]]:
        """Numbers as int64 [n], and for each segment that has some of them where they are in that array."""
        checked = np.atleast_1d(np.asarray(numbers, np.int64))
        if len(checked) and not (checked.min() >= 0 and checked.max() < self.num_documents):
            raise IndexError(f"{self.run}: expected documents 0 to {self.num_documents - 1}, got {numbers!r:.60}")
        index_of = np.searchsorted(self._bases, checked, "right") - 1
        parts = [(self._segments[index], np.flatnonzero(index_of == index)) for index in np.unique(index_of).tolist()]
        return checked, parts

    @_guarded
    def documents(self, numbers: ArrayLike) -> DocumentIdentities:
        """Identities of the given documents."""
        checked, parts = self._by_segment(numbers)
        ids: list[bytes] = [b""] * len(checked)
        texts: list[str | None] = [None] * len(checked)
        sources = [""] * len(checked)
        for segment, where in parts:
            own = checked[where] - segment.base
            data = segment.doc_ids.take(own).tobytes()
            split = [data[first : first + 16] for first in range(0, len(data), 16)]
            columns = where.tolist(), split, segment.urls.texts(own, 1), segment.sources_of(own)
            for place, doc_id, text, source in zip(*columns, strict=True):
                ids[place], texts[place], sources[place] = doc_id, None if text is None else text.decode(), source
        return DocumentIdentities(checked, ids, texts, sources)

    @_guarded
    def names(self, documents: DocumentIdentities) -> list[str | None]:
        """Their URLs; where a document has none, its file and the byte of its record, None if they are not known."""
        found = list(documents.urls)
        bare = np.array([place for place, url in enumerate(found) if url is None], np.int64)
        for segment, where in self._by_segment(documents.numbers[bare])[1]:
            own = documents.numbers[bare[where]] - segment.base
            files, rows = np.array(segment.files_of(own)), segment.rows.take(own).astype(np.int64)
            for file in np.unique(files).tolist():
                mine = files == file
                with suppress(InputError):  # it is damaged: what asks for a verdict says so
                    path = os.path.join(self.run, "verdicts", file)
                    cells = read_cells(path, rows[mine], ("source_file", "record_offset"))
                    for place, cell in zip(bare[where[mine]].tolist(), cells, strict=True):
                        name, offset = cell.get("source_file"), cell.get("record_offset")
                        if isinstance(name, str) and isinstance(offset, int):
                            found[place] = f"{os.path.basename(name)} at byte {offset:,}"
        return found

    @_guarded
    def verdict(self, number: int) -> dict[str, Any]:
        """A document's whole verdict row, and its ``file`` (below ``verdicts/``) and ``row``.

        Raises:
            InputError: the verdict file has changed since the run was opened.
        """
        _, ((segment, _),) = self._by_segment(number)
        own = np.array([number - segment.base])
        (file,) = segment.files_of(own)
        row = int(segment.rows.take(own)[0])
        path = os.path.join(self.run, "verdicts", file)
        return {**self._row(path, row, verdict_schema(()), number), "file": file, "row": row}

    def _row(self, path: str, row: int, schema: pa.Schema, number: int) -> dict[str, Any]:
        """A row of a table that is of document ``number``."""
        found = read_row(path, row, schema)
        if found["doc_id"] != self._doc_id(number):
            raise InputError(f"{path}: row {row}: is of another document than when the index was built; open it again")
        return found

    @_guarded
    def decision(self, number: int) -> dict[str, Any] | None:
        """The decision that removed a document as a duplicate, of the run or of a later corpus version; None if none
        did, or it was restored since."""
        doc_id = self._doc_id(number)
        return self._redecided.decision(doc_id) if doc_id in self._redecided else self._recorded(number)

    def _doc_id(self, number: int) -> bytes:
        _, ((segment, _),) = self._by_segment(number)
        return bytes(segment.doc_ids.take(np.array([number - segment.base])).tobytes())

    def _recorded(self, number: int) -> dict[str, Any] | None:
        """The row of ``duplicates/decisions.parquet`` that removed a document."""
        row = self._duplicates.decision_row(number)
        path = os.path.join(self.run, "duplicates", DECISIONS)
        return None if row is None else self._row(path, row, DECISION_SCHEMA, number)

    @_guarded
    def change(self, number: int) -> dict[str, Any] | None:
        """What a later corpus version than the first did to a document: ``action`` (purged or restored), ``version``,
        and ``decision``, the row of ``duplicates/decisions.parquet`` that it overrides. None: nothing."""
        last = self._purges.last_change(self._doc_id(number))
        return None if last is None else {"action": last[0], "version": last[1], "decision": self._recorded(number)}

    @_guarded
    def removed_for(self, number: int) -> I64:
        """The documents that were removed as duplicates of this one, and not restored since, ascending."""
        found = self._duplicates.removed_for(number)
        if not len(self._redecided):
            return found
        now = [self.find(doc=doc_id) for doc_id in self._redecided.removed_for(self._doc_id(number))]
        still = [own for own in found.tolist() if self._doc_id(own) not in self._redecided]
        return np.unique(np.concatenate([np.array(still, np.int64), *now]))

    @_guarded
    def cluster(self, number: int) -> I64:
        """All documents of its cluster of duplicates, itself included, ascending; empty if it is in none."""
        return self._duplicates.cluster(number)

    # ---- where they stand

    @_guarded
    def spans_of(self, numbers: ArrayLike) -> Spans:
        """The spans of those documents that have one, in the order given."""
        checked, _ = self._by_segment(numbers)
        return self._spans.of(checked)

    @_guarded
    def spans_in(self, stream: Stream, starts: ArrayLike, stops: ArrayLike) -> tuple[Spans, I64]:
        """Every span that overlaps [start, stop) of the stream's tokens, for many ranges at once.

        Returns the spans, range by range and in the stream's order, and the index of the range that each is of.
        """
        number = next(number for number, own in enumerate(self.streams) if own.name == stream.name)
        if stream.chosen is None:
            return self._spans.between(number, starts, stops)
        lows, highs = np.broadcast_arrays(np.asarray(starts, np.int64), np.asarray(stops, np.int64))
        begins, ends, which = stream.chosen.pieces(lows.ravel(), highs.ravel())
        spans, pieces = self._spans.between(number, begins, ends)
        return replace(spans, starts=stream.chosen.place(spans.starts)), which[pieces]


def parse_hash(value: str | bytes, name: str) -> bytes:
    """16 bytes, also from 32 hex digits."""
    if isinstance(value, bytes) and len(value) == 16:
        return value
    try:
        found = bytes.fromhex(value) if isinstance(value, str) and len(value) == 32 else b""
    except ValueError:
        found = b""
    if len(found) != 16:
        raise InputError(f"{name}: expected 32 hex digits, got {value!r:.60}")
    return found


def plain(value: Any) -> Any:
    """A cell of a verdict row as JSON takes it: hashes in hex, times in ISO 8601."""
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if isinstance(value, dt.datetime) else value


def parse_host(value: str, name: str) -> str:
    """The host as canonical URLs have it: lower case, punycode, no dot at its end."""
    canonical = urls.canonicalize(f"http://{value}/") if value and not set(value) & set("/?#@\\ \t\r\n") else None
    if canonical is None:
        raise InputError(f"{name}: expected a host such as example.com, got {value!r:.60}")
    if ":" in canonical.removeprefix("http://").rpartition("]")[2]:
        raise InputError(f"{name}: expected a host without a port, got {value!r:.60}")
    return urls.host(canonical)
