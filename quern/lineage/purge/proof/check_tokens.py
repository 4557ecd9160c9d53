"""Checks the tokens of a corpus version for purged documents by reading every shard in full."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quern import storage
from quern.data_pipeline.page.keys import contains, keys_of
from quern.errors import InputError, QuernError
from quern.lineage.purge.proof.check_audit import Purged
from quern.lineage.purge.proof.findings import MAX_FINDINGS, Check
from quern.remote.concurrency import in_order
from quern.storage.parquet import open_table
from quern.tokenize.encoding import load_encoding
from quern.tokenize.exchange.texts import Vocabulary
from quern.tokenize.shard_format import SPANS_SCHEMA, ShardInfo

__all__ = ["check_tokens"]

_BLOCK = 4 << 20
#: Tokens whose texts are compared at once.
_STRETCH = 1 << 20
_EMPTY = np.empty(0, np.int64)


@dataclass(frozen=True)
class _Spans:
    """Of a shard, row by row."""

    starts: np.ndarray
    lengths: np.ndarray
    purged: np.ndarray
    ids: np.ndarray


@dataclass(frozen=True)
class _Job:
    run: str
    purged: Purged
    relatives: np.ndarray
    """S16[n], sorted: documents with the text or the URL of a purged one, that are not purged themselves."""
    dtype: np.dtype[Any]
    eot: int
    vocabulary: Vocabulary | None
    """To compare texts with."""


def check_tokens(
    run: str, version: Mapping[str, Any] | None, purged: Purged, relatives: np.ndarray, *, deep: bool, workers: int
) -> tuple[Check, Check]:
    """(no span holds a purged document, every file has the checksum that ``VERSION.json`` names).

    ``relatives``: doc_ids (S16[n], sorted) with a purged document's text or URL. ``deep``: decode every span, and
    compare its text's hash with those of the purged. Memory: the purged spans of a shard and about 30 MB for each
    of ``workers``; with ``deep``, on a store, also the tokens of its longest document.
    """
    tokens = Check(
        "tokens",
        "no span of the corpus version is of a purged document, or has the text of one; purged spans are EOT alone"
        if deep
        else "no span of the corpus version is of a purged document; purged spans are EOT alone",
    )
    sums = Check("checksums", "every file of the corpus version has the SHA-256 that VERSION.json names")
    if version is None:
        return tokens, sums
    try:
        shards = list(_manifests(run, version, sums))
        encoding = version["encoding"]
        job = _Job(
            run, purged, relatives, np.dtype(encoding["dtype"]).newbyteorder("<"), int(encoding["eot_id"]),
            _vocabulary(run, encoding, tokens) if deep else None,
        )  # fmt: skip
        _compare(run, f"tokens/{encoding['ranks']}", encoding["sha256"], sums)
    except (KeyError, TypeError, ValueError) as error:
        sums.found("tokens/VERSION.json", f"is no whole list of a corpus version ({error})")
        return tokens, sums
    for own in in_order(lambda shard, stopped: _check_shard(job, shard), shards, max(1, workers)):
        for total, part in zip((tokens, sums), own, strict=True):
            total.counts.update(part.counts)
            total.num_findings += part.num_findings
            total.findings += part.findings[: MAX_FINDINGS - len(total.findings)]
    return tokens, sums


def _vocabulary(run: str, encoding: Mapping[str, Any], check: Check) -> Vocabulary | None:
    try:
        return Vocabulary(load_encoding(encoding["name"], storage.join(run, "tokens", encoding["ranks"])))
    except QuernError as error:
        check.unknown.append(f"texts cannot be decoded: {error}")
        return None


def _manifests(run: str, version: Mapping[str, Any], check: Check) -> Iterator[ShardInfo]:
    """All shards that are listed, held-out ones too, with paths below the run; manifests are compared on the way."""
    for entry in version["sources"].values():
        name = f"tokens/{entry['manifest']}"
        _compare(run, name, entry["sha256"], check)
        for shard in entry["shards"]:
            yield ShardInfo(
                f"tokens/{shard['bin']}", f"tokens/{shard['spans']}", int(shard["tokens"]), int(shard["documents"]),
                shard["sha256"], shard["spans_sha256"], "", "",
            )  # fmt: skip


def _compare(run: str, name: str, sha256: str, check: Check) -> None:
    check.counts["files"] += 1
    try:
        if storage.sha256(storage.join(run, name), read=True) != sha256:  # whatever a store says of it
            check.found(name, "its SHA-256 is not the one in VERSION.json")
    except FileNotFoundError:
        check.found(name, "is missing")


# ---- one shard


def _check_shard(job: _Job, shard: ShardInfo) -> tuple[Check, Check]:
    tokens, sums = Check("tokens", ""), Check("checksums", "")
    _compare(job.run, shard.spans, shard.spans_sha256, sums)
    sums.counts["files"] += 1
    try:
        spans = _read_spans(job, shard, tokens)
    except FileNotFoundError:  # which is told already
        return tokens, sums
    except InputError as error:
        tokens.found(shard.spans, str(error).removeprefix(f"{storage.join(job.run, shard.spans)}: "))
        return tokens, sums
    try:
        if _scan(job, shard, spans, tokens) != shard.sha256:
            sums.found(shard.bin, "its SHA-256 is not the one in VERSION.json")
        if job.vocabulary is not None:
            _compare_texts(job, job.vocabulary, shard, spans, tokens)
    except FileNotFoundError:
        sums.found(shard.bin, "is missing")
    except InputError as error:
        tokens.found(shard.bin, str(error))
    return tokens, sums


def _read_spans(job: _Job, shard: ShardInfo, check: Check) -> _Spans:
    """The spans, each looked at; they must cover the shard, else tokens could hide between them."""
    parts: list[tuple[np.ndarray, ...]] = []
    row = end = 0
    with open_table(storage.join(job.run, shard.spans), SPANS_SCHEMA.names, missing=None) as table:
        for group in range(table.num_row_groups):
            rows = table.read_row_group(group, SPANS_SCHEMA.names).cast(SPANS_SCHEMA)
            ids = keys_of(rows["doc_id"])
            starts, lengths, gone = (rows[name].to_numpy() for name in ("start", "length", "purged"))
            _judge(job, shard, ids, gone, row, check)
            ends = end + np.cumsum(lengths)
            if len(ids) != len(starts) or (starts != ends - lengths).any() or (lengths < 1).any():
                raise InputError("its spans do not follow one on the other without a gap")
            row, end = row + len(starts), int(ends[-1]) if len(ends) else end
            kept = (starts, lengths, gone, ids) if job.vocabulary is not None else _only(gone, starts, lengths, ids)
            parts.append(kept)
    if row != shard.documents or end != shard.tokens:
        raise InputError(f"has {row} spans over {end} tokens, expected {shard.documents} over {shard.tokens}")
    check.counts["spans"] += row
    check.counts["tokens"] += end
    starts, lengths, gone, ids = (np.concatenate(own) for own in zip(*parts, strict=True)) if parts else (_EMPTY,) * 4
    return _Spans(starts, lengths, gone.astype(bool), ids)


def _only(mask: np.ndarray, *columns: np.ndarray) -> tuple[np.ndarray, ...]:
    starts, lengths, ids = (column[mask] for column in columns)
    return starts, lengths, np.ones(len(starts), bool), ids


def _judge(job: _Job, shard: ShardInfo, ids: np.ndarray, gone: np.ndarray, first: int, check: Check) -> None:
    check.counts["purged spans"] += int(gone.sum())
    for keys, what in (
        (job.purged.ids, "is of a purged document, and not marked as purged"),
        (job.relatives, "is of a document with the text or the URL of a purged one, and not marked as purged"),
    ):
        check.found_each(shard.spans, what, contains(keys, ids) & ~gone, ids, first)


def _scan(job: _Job, shard: ShardInfo, spans: _Spans, check: Check) -> str:
    """Read the tokens once: their SHA-256, and what is no EOT in a purged span."""
    state = hashlib.sha256()
    starts, lengths, ids = (own[spans.purged] for own in (spans.starts, spans.lengths, spans.ids))
    told, first, rest = -1, 0, b""
    with storage.open_read(storage.join(job.run, shard.bin)) as file:
        while block := file.read(_BLOCK):
            state.update(block)
            data = rest + block
            whole = len(data) // job.dtype.itemsize * job.dtype.itemsize
            tokens, rest = np.frombuffer(data[:whole], job.dtype), data[whole:]
            for at in _no_eot(job.eot, tokens, first, starts, lengths).tolist():
                if at != told:  # a span may go on in the next block
                    told = at
                    name, doc_id = f"{shard.bin}", ids[at : at + 1].tobytes()
                    check.found(name, f"tokens from {starts[at]} on: a purged span holds more than EOT", None, doc_id)
            first += len(tokens)
    if first != shard.tokens or rest:
        check.found(shard.bin, f"has {first} tokens, expected {shard.tokens}")
    return state.hexdigest()


def _no_eot(eot: int, tokens: np.ndarray, first: int, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The spans (ascending, by number) that have a token other than EOT among ``tokens``, which begin at ``first``."""
    low = int(np.searchsorted(starts + lengths, first, "right"))
    high = int(np.searchsorted(starts, first + len(tokens), "left"))
    if low >= high:
        return _EMPTY
    other = np.concatenate([[0], np.cumsum(tokens != eot)])
    begins = np.maximum(starts[low:high] - first, 0)
    ends = np.minimum(starts[low:high] + lengths[low:high] - first, len(tokens))
    return np.asarray(low + np.flatnonzero(other[ends] != other[begins]), np.int64)


def _compare_texts(job: _Job, vocabulary: Vocabulary, shard: ShardInfo, spans: _Spans, check: Check) -> None:
    """Decode every span that is not purged."""
    path = storage.join(job.run, shard.bin)
    rows = np.flatnonzero(~spans.purged)
    before = np.cumsum(spans.lengths)
    first = 0
    while first < len(rows):
        start = int(spans.starts[rows[first]])
        last = max(first + 1, int(np.searchsorted(before[rows], start + _STRETCH, "right")))
        own = rows[first:last]
        stop = int(before[own[-1]])
        taken = _tokens(job, path, start, stop)
        mask = np.repeat(~spans.purged[own[0] : own[-1] + 1], spans.lengths[own[0] : own[-1] + 1])
        known = taken if mask.all() else taken[mask]
        if len(known) and int(known.max()) >= len(vocabulary.known):
            check.found(shard.bin, f"tokens from {start} on: an id that the encoding does not have")
        else:
            hashes = np.array(vocabulary.text_hashes(known, spans.lengths[own]), job.purged.texts.dtype)
            for at in np.flatnonzero(contains(job.purged.texts, hashes)).tolist():
                row = int(own[at])
                doc_id = spans.ids[row : row + 1].tobytes()
                check.found(shard.spans, "has the very text of a purged document", row, doc_id)
        check.counts["texts compared"] += len(own)
        first = last


def _tokens(job: _Job, path: str, start: int, stop: int) -> np.ndarray:
    size = job.dtype.itemsize
    if storage.is_local(path):
        inner = storage.split(path)[1]
        if os.path.getsize(inner) < stop * size:
            raise InputError(f"{path}: ends before token {stop}")
        return np.memmap(inner, job.dtype, "r", start * size, (stop - start,))
    return np.frombuffer(storage.read_range(path, start * size, stop * size), job.dtype)
