"""Reads a run's tables for the report: languages, hosts, lengths, clusters and sample pages.

Everything is streamed, a batch or a row group at a time. A run too large for the budget is surveyed by a keyed choice
of its partitions, and the survey says how much it has read. The same run and seed give the same survey.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quern.data_pipeline.execution.commits import table_path
from quern.data_pipeline.page.document import HASH
from quern.data_pipeline.page.keys import contains, places
from quern.data_pipeline.report.clusters import Clusters, decision_rows, id_keys, mix, read_clusters, removed_keys
from quern.data_pipeline.report.counters import TokenLengths, TopCounter
from quern.errors import QuernError
from quern.storage.parquet import open_table, read_batches

__all__ = [
    "CHAR_EDGES",
    "NO_HOST",
    "OUTCOMES",
    "WORD_EDGES",
    "Budget",
    "Pair",
    "Sample",
    "Survey",
    "survey",
]

OUTCOMES = ("kept", "duplicate", "dropped")
BATCH_ROWS = 1 << 16
TEXT_BATCH_ROWS = 1024
#: Reasons whose samples are kept, and samples of one reason.
MAX_STRATA = 256
PER_REASON = 12
NO_LANGUAGE = "(not identified)"
NO_HOST = "(no host)"
_COLUMNS = ["doc_id", "host", "language", "stage", "reason"]
_GONE = "no such file, though its partition is committed"

#: Lower edges of the length histograms, eight a decade; the first bin begins at 0, the last is open.
CHAR_EDGES = 10.0 ** (1 + np.arange(41) / 8)
WORD_EDGES = 10.0 ** (1 + np.arange(33) / 8)


@dataclass(frozen=True)
class Budget:
    """The limit of what the survey reads; the first partition of the keyed choice is always read entirely."""

    rows: int = 20_000_000
    text_bytes: int = 2 << 30
    max_hosts: int = 200_000


@dataclass(frozen=True)
class Sample:
    """One page as the run stored it. ``outcome`` is one of :data:`OUTCOMES`; ``row`` is its whole verdict row."""

    outcome: str
    row: dict[str, Any]
    text: str | None
    """Null when no text is stored: the page was dropped before the quality gate, or purged."""


@dataclass(frozen=True)
class Pair:
    """A removed document and the one it is a duplicate of; a side is null where its partition was not surveyed."""

    decision: dict[str, Any]
    removed: Sample | None
    kept: Sample | None


@dataclass
class Survey:
    """What was found in ``partitions_read`` of ``partitions`` partitions (``rows_read`` of ``rows`` pages)."""

    partitions: int
    rows: int
    partitions_read: int = 0
    rows_read: int = 0
    languages: dict[str, list[int]] = field(default_factory=dict)
    """Language → pages by outcome."""
    losses: dict[str, Counter[str]] = field(default_factory=dict)
    """Language → ``stage:reason`` → pages that were dropped so, removed duplicates as ``duplicates:removed``."""
    duplicates: dict[tuple[str, str], int] = field(default_factory=dict)
    """(source, partition) → removed duplicates, of the partitions that were read."""
    hosts: TopCounter = field(default_factory=lambda: TopCounter(1, len(OUTCOMES)))
    tokens: dict[str, TopCounter] = field(default_factory=dict)
    """``language`` and ``host`` → name → tokens and documents, where lengths are given."""
    chars: np.ndarray = field(default_factory=lambda: np.zeros((len(OUTCOMES), len(CHAR_EDGES)), np.int64))
    """int64[outcome, bin] documents by number of characters; outcome "dropped" is at the quality gate."""
    words: np.ndarray = field(default_factory=lambda: np.zeros((len(OUTCOMES), len(WORD_EDGES)), np.int64))
    """int64[outcome, bin] documents by number of whitespace-separated words."""
    purged: int = 0
    """Documents whose text was purged: their lengths are not known any more."""
    unique_chars: Counter[str] = field(default_factory=Counter)
    """Source → characters of the documents that are tokenized."""
    clusters: Clusters = field(default_factory=Clusters)
    members: dict[bytes, dict[str, Any]] = field(default_factory=dict)
    """doc_id → verdict row of the members shown of the largest clusters."""
    samples: list[Sample] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every page of the run was read."""
        return self.rows_read == self.rows


_Place = tuple[str, str, int]
"""(source, partition, row) of a verdict."""


def survey(
    run_dir: str,
    pages: Mapping[tuple[str, str], int],
    *,
    max_samples: int,
    seed: int = 0,
    budget: Budget | None = None,
    lengths: TokenLengths | None = None,
) -> Survey:
    """Read the tables of a run.

    Memory: 8 bytes a removed duplicate, one row group, constant-size tables, and ``lengths``.

    Args:
        run_dir: the run.
        pages: (source, partition) → pages its commit counts.
        max_samples: samples in the result, at most; a third are kept pages, the others spread over the reasons.
            Pairs of duplicates come beside them, a fifth as many.
        seed: keys the choice of samples, and of partitions in a run beyond the budget.
        budget: how much may be read.
        lengths: of the run's documents; tokens are counted by language and host then.

    Raises:
        QuernError: a verdict table is missing, or has another number of rows than its commit counts.
    """
    budget = budget or Budget()
    found = Survey(len(pages), sum(pages.values()))
    found.hosts = TopCounter(budget.max_hosts, len(OUTCOMES))
    found.clusters = read_clusters(run_dir, seed)
    decisions = decision_rows(run_dir, max_samples // 5, seed)
    shown = {member for cluster in found.clusters.largest for member in cluster.members}
    sides = {row[name] for row in decisions for name in ("doc_id", "duplicate_of")}
    if lengths is not None:
        found.tokens = {name: TopCounter(budget.max_hosts, 2) for name in ("language", "host")}
    scan = _Scan(run_dir, seed, max_samples, removed_keys(run_dir), shown | sides, found, lengths)
    text_bytes = 0
    for source, name in _keyed_order(pages, seed):
        if found.partitions_read and (found.rows_read >= budget.rows or text_bytes >= budget.text_bytes):
            break
        scan.verdicts(source, name, pages[source, name])
        text_bytes += scan.texts(source, name)
        found.partitions_read += 1
        found.rows_read += pages[source, name]
    chosen = scan.choose()
    loaded = _load(run_dir, sorted({*chosen, *scan.places.values()}))
    for place in chosen:
        row, text = loaded[place]
        found.samples.append(Sample("dropped" if row["stage"] else "kept", row, text))
    for decision in decisions:
        pair: list[Sample | None] = []
        for key, outcome in (("doc_id", "duplicate"), ("duplicate_of", "kept")):
            at = scan.places.get(decision[key])
            pair.append(Sample(outcome, *loaded[at]) if at is not None else None)
        found.pairs.append(Pair(decision, pair[0], pair[1]))
    for member in sorted(shown & scan.places.keys()):
        found.members[member] = loaded[scan.places[member]][0]
    return found


def _keyed_order(pages: Mapping[tuple[str, str], int], seed: int) -> list[tuple[str, str]]:
    def key(item: tuple[str, str]) -> bytes:
        return hashlib.blake2b(f"{seed}\0report\0{item[0]}\0{item[1]}".encode(), digest_size=16).digest()

    return sorted(pages, key=key)


class _Scan:
    """Reads partitions one after the other into a survey; remembers where wanted and sampled pages stand."""

    def __init__(
        self,
        run_dir: str,
        seed: int,
        max_samples: int,
        removed: np.ndarray,
        wanted: set[bytes],
        found: Survey,
        lengths: TokenLengths | None,
    ) -> None:
        self.run_dir, self.seed, self.max_samples, self.lengths = run_dir, seed, max_samples, lengths
        self.removed, self.found = removed, found
        self.wanted = np.sort(id_keys(pa.array(sorted(wanted), HASH)))
        self.places: dict[bytes, _Place] = {}
        self.strata: dict[str, list[tuple[int, _Place]]] = {}

    def verdicts(self, source: str, name: str, num_pages: int) -> None:
        """Count a partition's verdicts, and choose samples by the keyed hash of doc_id: the smallest of a stratum."""
        path = table_path(self.run_dir, "verdicts", source, name)
        with open_table(path, missing=_GONE) as table:
            rows_there = table.metadata.num_rows
            if rows_there != num_pages:
                raise QuernError(f"{path}: holds {rows_there} verdicts, its commit counts {num_pages} pages")
            first = 0
            self.found.duplicates[source, name] = 0
            for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=_COLUMNS):
                keys = id_keys(batch.column("doc_id"))
                dropped = np.asarray(pc.is_valid(batch.column("stage")))
                outcome = np.where(dropped, 2, contains(self.removed, keys).astype(np.int64))
                columns = [batch.column(name) for name in ("language", "stage", "reason")]
                for language, stage, reason, index, count in _groups(*columns, outcome):
                    by_outcome = self.found.languages.setdefault(language or NO_LANGUAGE, [0] * len(OUTCOMES))
                    by_outcome[index] += count
                    if OUTCOMES[index] != "kept" and language:
                        why = "duplicates:removed" if stage is None else f"{stage}:{reason}"
                        self.found.losses.setdefault(language, Counter())[why] += count
                self.found.duplicates[source, name] += int(np.count_nonzero(outcome == 1))
                for host, index, count in _groups(batch.column("host"), outcome):
                    self.found.hosts.add(host or NO_HOST, index, count)
                self._tokens(batch, keys)
                for row in np.flatnonzero(contains(self.wanted, keys)):
                    self.places[batch.column("doc_id")[int(row)].as_py()] = (source, name, first + int(row))
                order = mix(keys, self.seed)
                for stratum, rows in _strata(batch, outcome):
                    best = rows[np.argsort(order[rows], kind="stable")[: self._size(stratum)]]
                    self._offer(stratum, [(int(order[row]), (source, name, first + int(row))) for row in best])
                first += batch.num_rows

    def _tokens(self, batch: pa.RecordBatch, keys: np.ndarray) -> None:
        """Count the tokens of the batch's documents by language and host."""
        if self.lengths is None:
            return
        at = places(self.lengths.keys, keys)
        rows = np.flatnonzero(at >= 0)
        tokens = pa.array(self.lengths.tokens[at[rows]])
        for name, counter in self.found.tokens.items():
            held = pa.table({"name": batch.column(name).take(pa.array(rows)), "tokens": tokens})
            for row in held.group_by("name").aggregate([("tokens", "sum"), ("tokens", "count")]).to_pylist():
                label = row["name"] or (NO_LANGUAGE if name == "language" else NO_HOST)
                counter.add(label, 0, row["tokens_sum"])
                counter.add(label, 1, row["tokens_count"])

    def _size(self, stratum: str) -> int:
        return self.max_samples if stratum == "kept" else min(self.max_samples, PER_REASON)

    def _offer(self, stratum: str, new: list[tuple[int, _Place]]) -> None:
        if stratum in self.strata or len(self.strata) < MAX_STRATA:
            self.strata[stratum] = sorted(self.strata.get(stratum, []) + new)[: self._size(stratum)]

    def choose(self) -> list[_Place]:
        """Choose samples: a third kept pages; of the dropped, one of every reason in turn, also of rare ones."""
        kept = [place for _, place in self.strata.get("kept", ())][: (self.max_samples + 2) // 3]
        queues = [self.strata[name] for name in sorted(self.strata) if name != "kept"]
        chosen: list[_Place] = []
        for turn in range(PER_REASON):
            for queue in queues:
                if turn < len(queue) and len(kept) + len(chosen) < self.max_samples:
                    chosen.append(queue[turn][1])
        return kept + chosen

    def texts(self, source: str, name: str) -> int:
        """Measure the lengths of a partition's stored texts; return how many bytes of text were read."""
        num_bytes = 0
        path = table_path(self.run_dir, "documents", source, name)
        for batch in read_batches(path, ["doc_id", "text", "kept"], TEXT_BATCH_ROWS, missing=_GONE):
            text = batch.column("text")
            num_bytes += text.nbytes
            if text.null_count:
                self.found.purged += text.null_count
                batch = batch.filter(pc.is_valid(text))
                text = batch.column("text")
            kept = np.asarray(pc.fill_null(batch.column("kept"), False))
            outcome = np.where(kept, contains(self.removed, id_keys(batch.column("doc_id"))).astype(np.int64), 2)
            chars = np.asarray(pc.fill_null(pc.utf8_length(text), 0)).astype(np.int64)
            words = np.asarray(pc.fill_null(pc.count_substring_regex(text, r"\S+"), 0)).astype(np.int64)
            for table, edges, lengths in ((self.found.chars, CHAR_EDGES, chars), (self.found.words, WORD_EDGES, words)):
                bins = np.maximum(np.searchsorted(edges, lengths, side="right") - 1, 0)
                np.add.at(table, (outcome, bins), 1)
            self.found.unique_chars[source] += int(chars[outcome == 0].sum())
        return num_bytes


def _groups(*columns: pa.Array | np.ndarray) -> Iterator[tuple[Any, ...]]:
    """Every combination of the columns' values, with its number of rows."""
    names = [str(number) for number in range(len(columns))]
    grouped = pa.table(dict(zip(names, columns, strict=True))).group_by(names, use_threads=False)
    counts = grouped.aggregate([([], "count_all")])
    yield from zip(*(counts.column(name).to_pylist() for name in (*names, "count_all")), strict=True)


def _strata(batch: pa.RecordBatch, outcome: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """("kept" or "stage:reason", rows) of a batch, sorted; duplicates are shown as pairs and left out here."""
    names = pc.binary_join_element_wise(
        batch.column("stage"), pc.fill_null(batch.column("reason"), "?"), ":", null_handling="emit_null"
    ).dictionary_encode()
    codes = np.asarray(pc.fill_null(names.indices, -1))
    groups = {name: np.flatnonzero(codes == code) for code, name in enumerate(names.dictionary.to_pylist())}
    groups["kept"] = np.flatnonzero(outcome == 0)
    for name in sorted(groups):
        if len(groups[name]):
            yield name, groups[name]


def _load(run_dir: str, places: Sequence[_Place]) -> dict[_Place, tuple[dict[str, Any], str | None]]:
    """Whole verdict rows and stored texts of the chosen pages, partition by partition, row group by row group."""
    loaded: dict[_Place, tuple[dict[str, Any], str | None]] = {}
    for source, name in sorted({place[:2] for place in places}):
        rows = [place[2] for place in places if place[:2] == (source, name)]
        verdicts = _take(table_path(run_dir, "verdicts", source, name), rows, None)
        by_id = {verdict["doc_id"]: place for verdict, place in zip(verdicts, rows, strict=True)}
        path = table_path(run_dir, "documents", source, name)
        at = []
        first = 0
        keys = np.sort(id_keys(pa.array(sorted(by_id), HASH)))
        for batch in read_batches(path, ["doc_id"], BATCH_ROWS, missing=_GONE):
            at += [first + int(i) for i in np.flatnonzero(contains(keys, id_keys(batch.column(0))))]
            first += batch.num_rows
        texts = {document["doc_id"]: document["text"] for document in _take(path, at, ["doc_id", "text"])}
        for verdict, row in zip(verdicts, rows, strict=True):
            loaded[source, name, row] = (verdict, texts.get(verdict["doc_id"]))
    return loaded


def _take(path: str, rows: Sequence[int], columns: list[str] | None) -> list[dict[str, Any]]:
    """The given rows (ascending) of a Parquet file; only the row groups that hold them are read."""
    taken: list[dict[str, Any]] = []
    with open_table(path, missing=_GONE) as table:
        first = 0
        for group in range(table.metadata.num_row_groups):
            size = table.metadata.row_group(group).num_rows
            inside = [row - first for row in rows if first <= row < first + size]
            if inside:
                taken += table.read_row_group(group, columns).take(inside).to_pylist()
            first += size
    return taken
