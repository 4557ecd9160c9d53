"""What the report page shows beyond counters: languages, hosts, lengths, clusters and samples of a run's tables.

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
import pyarrow.parquet as pq

from quern import storage
from quern.data_pipeline.report_clusters import Clusters, decision_rows, id_keys, mix, read_clusters, removed_keys
from quern.errors import QuernError

__all__ = ["CHAR_EDGES", "OUTCOMES", "WORD_EDGES", "Budget", "Pair", "Sample", "Survey", "TopCounter", "survey"]

OUTCOMES = ("kept", "duplicate", "dropped")
BATCH_ROWS = 1 << 16
TEXT_BATCH_ROWS = 1024
MAX_STRATA = 256
_COLUMNS = ["doc_id", "host", "language", "stage", "reason"]

#: Lower edges of the length histograms, two an octave; the last bin is open.
CHAR_EDGES = np.unique(np.round(2.0 ** np.arange(4, 20.5, 0.5)).astype(np.int64))
WORD_EDGES = np.unique(np.round(2.0 ** np.arange(1, 17.5, 0.5)).astype(np.int64))


@dataclass(frozen=True)
class Budget:
    """How much of a run the survey may read; the first partition of the keyed choice is always read whole."""

    rows: int = 20_000_000
    text_bytes: int = 2 << 30
    max_hosts: int = 200_000


class TopCounter:
    """Counts a stream of keys in bounded memory (lossy counting: the rarest half goes when it is full).

    A key's counts are exact as long as ``lost`` is 0; otherwise each may be short by at most ``lost``.
    """

    def __init__(self, capacity: int, width: int) -> None:
        self.capacity, self.width, self.lost = capacity, width, 0
        self.counts: dict[str, list[int]] = {}

    def add(self, key: str, index: int, count: int) -> None:
        """Add ``count`` to column ``index`` of ``key``."""
        row = self.counts.get(key)
        if row is None:
            if len(self.counts) >= self.capacity:
                self._shrink()
            row = self.counts[key] = [0] * self.width
        row[index] += count

    def _shrink(self) -> None:
        ranked = sorted(self.counts.items(), key=lambda item: (-sum(item[1]), item[0]))
        keep = max(1, self.capacity // 2)
        self.lost += sum(ranked[keep][1]) if len(ranked) > keep else 0
        self.counts = dict(ranked[:keep])

    def top(self, num: int) -> list[tuple[str, list[int]]]:
        """The ``num`` keys of the largest sums, largest first, ties by key."""
        return sorted(self.counts.items(), key=lambda item: (-sum(item[1]), item[0]))[:num]


@dataclass(frozen=True)
class Sample:
    """One page as the run stored it. ``outcome`` is one of :data:`OUTCOMES`; ``row`` is its whole verdict row."""

    outcome: str
    row: dict[str, Any]
    text: str | None
    """Null when no text is stored: the page was dropped before the quality gate, or purged."""
    num_chars: int


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
    hosts: TopCounter = field(default_factory=lambda: TopCounter(1, len(OUTCOMES)))
    chars: np.ndarray = field(default_factory=lambda: np.zeros((len(OUTCOMES), len(CHAR_EDGES)), np.int64))
    """int64[outcome, bin] documents by number of characters; outcome "dropped" is at the quality gate."""
    words: np.ndarray = field(default_factory=lambda: np.zeros((len(OUTCOMES), len(WORD_EDGES)), np.int64))
    """int64[outcome, bin] documents by number of whitespace-separated words."""
    unique_chars: Counter[str] = field(default_factory=Counter)
    """Source → characters of the documents that are tokenized."""
    clusters: Clusters = field(default_factory=Clusters)
    members: dict[bytes, str | None] = field(default_factory=dict)
    """doc_id → URL of the members shown of the largest clusters."""
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
) -> Survey:
    """Read the tables of a run.

    Memory: 8 bytes a removed duplicate, one row group, and constant-size tables.

    Args:
        run_dir: the run.
        pages: (source, partition) → pages its commit counts.
        max_samples: samples in the result, at most; a third are kept pages, the others spread over the reasons.
            As many pairs of duplicates again come to at most a third of it.
        seed: keys the choice of samples, and of partitions in a run beyond the budget.
        budget: how much may be read.

    Raises:
        QuernError: a verdict table is missing, or has another number of rows than its commit counts.
    """
    budget = budget or Budget()
    found = Survey(len(pages), sum(pages.values()))
    found.hosts = TopCounter(budget.max_hosts, len(OUTCOMES))
    found.clusters = read_clusters(run_dir, seed)
    removed = removed_keys(run_dir)
    decisions = decision_rows(run_dir, max_samples // 3, seed)
    ids = {row[name] for row in decisions for name in ("doc_id", "duplicate_of")}
    shown = {member for cluster in found.clusters.largest for member in cluster.members}
    wanted = np.sort(id_keys(pa.array(sorted(ids | shown), pa.binary(16))))
    places: dict[bytes, _Place] = {}
    strata: dict[str, list[tuple[int, _Place]]] = {}
    text_bytes = 0
    for source, name in _keyed_order(pages, seed):
        if found.partitions_read and (found.rows_read >= budget.rows or text_bytes >= budget.text_bytes):
            break
        _survey_verdicts(run_dir, source, name, pages[source, name], removed, wanted, found, strata, places, seed)
        text_bytes += _survey_texts(run_dir, source, name, removed, found)
        found.partitions_read += 1
        found.rows_read += pages[source, name]
    chosen = _choose(strata, max_samples)
    loaded = _load(run_dir, sorted({*chosen, *places.values()}))
    for place in chosen:
        row, text = loaded[place]
        found.samples.append(_sample("dropped" if row["stage"] else "kept", row, text))
    for decision in decisions:
        sides = []
        for key, outcome in (("doc_id", "duplicate"), ("duplicate_of", "kept")):
            at = places.get(decision[key])
            sides.append(_sample(outcome, *loaded[at]) if at is not None else None)
        found.pairs.append(Pair(decision, sides[0], sides[1]))
    for member in sorted(shown & places.keys()):
        found.members[member] = loaded[places[member]][0]["url"]
    return found


def _sample(outcome: str, row: dict[str, Any], text: str | None) -> Sample:
    return Sample(outcome, row, text, len(text or ""))


def _keyed_order(pages: Mapping[tuple[str, str], int], seed: int) -> list[tuple[str, str]]:
    def key(item: tuple[str, str]) -> bytes:
        return hashlib.blake2b(f"{seed}\0report\0{item[0]}\0{item[1]}".encode(), digest_size=16).digest()

    return sorted(pages, key=key)


def _open(path: str) -> Any:
    if not storage.exists(path):
        raise QuernError(f"{path}: no such file, though its partition is committed")
    return storage.open_read(path)


def _survey_verdicts(
    run_dir: str,
    source: str,
    name: str,
    num_pages: int,
    removed: np.ndarray,
    wanted: np.ndarray,
    found: Survey,
    strata: dict[str, list[tuple[int, _Place]]],
    places: dict[bytes, _Place],
    seed: int,
) -> None:
    path = _verdicts(run_dir, source, name)
    with _open(path) as file:
        table = pq.ParquetFile(file)
        if table.metadata.num_rows != num_pages:
            raise QuernError(f"{path}: holds {table.metadata.num_rows} verdicts, its commit counts {num_pages} pages")
        first = 0
        for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=_COLUMNS):
            keys = id_keys(batch.column("doc_id"))
            dropped = np.asarray(pc.is_valid(batch.column("stage")))
            outcome = np.where(dropped, 2, _in(keys, removed).astype(np.int64))
            _count(batch.column("language"), outcome, "(not identified)", found.languages)
            for host, index, count in _groups(batch.column("host"), outcome):
                found.hosts.add(host if host is not None else "(none)", index, count)
            for row in np.flatnonzero(_in(keys, wanted)):
                places[batch.column("doc_id")[int(row)].as_py()] = (source, name, first + int(row))
            for stratum, rows in _strata(batch, outcome):
                if stratum not in strata and len(strata) >= MAX_STRATA:
                    continue
                order = mix(keys[rows], seed)
                size = _PER_REASON if stratum != "kept" else _PER_OUTCOME
                best = np.argsort(order, kind="stable")[:size]
                new = [(int(order[i]), (source, name, first + int(rows[i]))) for i in best]
                strata[stratum] = sorted(strata.get(stratum, []) + new)[:size]
            first += batch.num_rows


_PER_REASON = 12
_PER_OUTCOME = 400


def _in(keys: np.ndarray, table: np.ndarray) -> np.ndarray:
    """bool[n]: which keys stand in the sorted table."""
    if not len(table):
        return np.zeros(len(keys), bool)
    at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return np.asarray(table[at] == keys)


def _groups(column: pa.Array, outcome: np.ndarray) -> Iterator[tuple[str | None, int, int]]:
    grouped = pa.table({"key": column, "outcome": outcome}).group_by(["key", "outcome"], use_threads=False)
    counts = grouped.aggregate([([], "count_all")])
    yield from zip(*(counts.column(name).to_pylist() for name in ("key", "outcome", "count_all")), strict=True)


def _count(column: pa.Array, outcome: np.ndarray, missing: str, table: dict[str, list[int]]) -> None:
    for key, index, count in _groups(column, outcome):
        table.setdefault(missing if key is None else key, [0] * len(OUTCOMES))[index] += count


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


def _choose(strata: Mapping[str, Sequence[tuple[int, _Place]]], max_samples: int) -> list[_Place]:
    """A third kept; of the dropped, one of every reason in turn, so that rare reasons are seen too."""
    kept = [place for _, place in strata.get("kept", ())][: (max_samples + 2) // 3]
    queues = [list(strata[name]) for name in sorted(strata) if name != "kept"]
    chosen: list[_Place] = []
    for turn in range(_PER_REASON):
        for queue in queues:
            if turn < len(queue) and len(kept) + len(chosen) < max_samples:
                chosen.append(queue[turn][1])
    return kept + chosen


def _survey_texts(run_dir: str, source: str, name: str, removed: np.ndarray, found: Survey) -> int:
    """Lengths of a partition's stored texts; returns how many bytes of text were read."""
    path = _documents(run_dir, source, name)
    num_bytes = 0
    with _open(path) as file:
        for batch in pq.ParquetFile(file).iter_batches(TEXT_BATCH_ROWS, columns=["doc_id", "text", "kept"]):
            text = batch.column("text")
            num_bytes += text.nbytes
            kept = np.asarray(pc.fill_null(batch.column("kept"), False))
            outcome = np.where(kept, _in(id_keys(batch.column("doc_id")), removed).astype(np.int64), 2)
            chars = np.asarray(pc.fill_null(pc.utf8_length(text), 0), np.int64)
            words = np.asarray(pc.fill_null(pc.count_substring_regex(text, r"\S+"), 0), np.int64)
            for table, edges, values in ((found.chars, CHAR_EDGES, chars), (found.words, WORD_EDGES, words)):
                bins = np.maximum(np.searchsorted(edges, values, side="right") - 1, 0)
                np.add.at(table, (outcome, bins), 1)
            found.unique_chars[source] += int(chars[outcome == 0].sum())
    return num_bytes


def _load(run_dir: str, places: Sequence[_Place]) -> dict[_Place, tuple[dict[str, Any], str | None]]:
    """Whole verdict rows and stored texts of the chosen pages, partition by partition, row group by row group."""
    loaded: dict[_Place, tuple[dict[str, Any], str | None]] = {}
    for source, name in sorted({place[:2] for place in places}):
        rows = [place[2] for place in places if place[:2] == (source, name)]
        verdicts = _take(_verdicts(run_dir, source, name), rows, None)
        by_id = {verdict["doc_id"]: place for verdict, place in zip(verdicts, rows, strict=True)}
        texts: dict[bytes, str | None] = {}
        path = _documents(run_dir, source, name)
        with _open(path) as file:
            at = []
            first = 0
            keys = np.sort(id_keys(pa.array(sorted(by_id), pa.binary(16))))
            for batch in pq.ParquetFile(file).iter_batches(BATCH_ROWS, columns=["doc_id"]):
                at += [first + int(i) for i in np.flatnonzero(_in(id_keys(batch.column(0)), keys))]
                first += batch.num_rows
        for document in _take(path, at, ["doc_id", "text"]):
            texts[document["doc_id"]] = document["text"]
        for verdict, row in zip(verdicts, rows, strict=True):
            loaded[source, name, row] = (verdict, texts.get(verdict["doc_id"]))
    return loaded


def _take(path: str, rows: Sequence[int], columns: list[str] | None) -> list[dict[str, Any]]:
    """The given rows (ascending) of a Parquet file; only the row groups that hold them are read."""
    taken: list[dict[str, Any]] = []
    with _open(path) as file:
        table = pq.ParquetFile(file)
        first = 0
        for group in range(table.metadata.num_row_groups):
            size = table.metadata.row_group(group).num_rows
            inside = [row - first for row in rows if first <= row < first + size]
            if inside:
                taken += table.read_row_group(group, columns=columns).take(inside).to_pylist()
            first += size
    return taken


def _verdicts(run_dir: str, source: str, name: str) -> str:
    return storage.join(run_dir, "verdicts", source, f"{name}.parquet")


def _documents(run_dir: str, source: str, name: str) -> str:
    return storage.join(run_dir, "documents", source, f"{name}.parquet")
