"""What a purge does to the list of shards: which are touched, and the version that comes after."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from quern import storage
from quern.errors import InputError
from quern.lineage.index.changes import CHANGES_SCHEMA, PURGED, RESTORED, changes_file
from quern.lineage.purge.shards import Arrival, Change, read_spans, write_generation
from quern.tokenize.corpus_version import Listed, read_listed, read_version
from quern.tokenize.place import keyed_hashes, place_key
from quern.tokenize.shard_format import VERSION_FILE, ShardInfo, version_entry

__all__ = ["Corpus", "Plan", "Restoration", "make_plan", "open_corpus", "publish", "undo", "write_shards"]

T = TypeVar("T")
R = TypeVar("R")

_VERSIONED = re.compile(r"(?:shard_[0-9]{5,9}\.v([0-9]+)\.(?:bin|spans\.parquet)|manifest\.v([0-9]+)\.json)")
_CHANGES = re.compile(r"changes\.v([0-9]+)\.parquet")


@dataclass(frozen=True)
class Corpus:
    """A corpus version, opened for a purge."""

    tokens: str
    """``RUN/tokens``, on any store."""
    record: Mapping[str, Any]
    """``VERSION.json``."""
    streams: tuple[Listed, ...]

    @property
    def version(self) -> int:
        """Its number."""
        return int(self.record["version"])

    def source_of(self, stream: str) -> str:
        """The source whose documents a stream holds: its own, or for held-out ones that of ``<source>.val``."""
        source = stream.removesuffix(".val")
        return source if source in self.record["sources"] else stream


@dataclass(frozen=True)
class Restoration:
    """A document that takes the place of one that goes."""

    stream: str
    doc_id: bytes
    tokens: np.ndarray
    """EOT included."""


@dataclass(frozen=True)
class Plan:
    """What a purge will do to the tokens."""

    changes: tuple[Change, ...]
    purged: pa.Array
    """Documents (16 bytes each, sorted) that have tokens and lose them."""
    restored: pa.Array
    tokens_purged: int
    """EOTs included."""
    tokens_restored: int
    bytes_read: int
    """Of the touched shards."""
    already: int = 0
    """Condemned documents whose tokens an earlier version purged, where they stand."""
    touched: Mapping[str, list[int]] = field(default_factory=dict)
    """Stream → numbers of its touched shards, in the manifest's list."""


def open_corpus(run: str) -> Corpus:
    """The present version of a run's corpus, with every manifest.

    Raises:
        InputError: a file is missing or damaged.
    """
    tokens = storage.join(run, "tokens")
    record = read_version(tokens)
    listed = storage.each(lambda stream: read_listed(tokens, record, stream), sorted(record["sources"]), tokens)
    return Corpus(tokens, record, tuple(listed))


def make_plan(
    corpus: Corpus, condemned: pa.Table, restorations: Sequence[Restoration] = (), *, workers: int = 4
) -> Plan:
    """Which shards a purge touches. Reads the spans of those only whose range of place keys holds a document that may
    have tokens.

    Args:
        condemned: doc_id, source, stage and removed_as (as in ``CONDEMNED_SCHEMA``).

    Raises:
        InputError: a file is damaged; or a restored document goes to a stream that is not there, or stands there.
    """
    restored_before = _restored_before(corpus)
    dropped = pc.is_valid(condemned["stage"])
    removed = pc.is_valid(condemned["removed_as"])
    if len(restored_before):
        removed = pc.and_(removed, pc.invert(pc.is_in(condemned["doc_id"], value_set=restored_before)))
    with_tokens = condemned.filter(pc.invert(pc.or_(dropped, removed)))
    changes: list[Change] = []
    gone: list[bytes] = []
    tokens_purged = already = 0
    known = {listed.source for listed in corpus.streams}
    for restoration in restorations:
        if restoration.stream not in known:
            raise InputError(f"{corpus.tokens}: has no stream {restoration.stream!r} to restore a document to")
    for listed in corpus.streams:
        source = corpus.source_of(listed.source)
        ids = with_tokens.filter(pc.equal(with_tokens["source"], source))["doc_id"].to_pylist()
        arrivals = _arrivals(listed, [own for own in restorations if own.stream == listed.source])
        folder = storage.join(corpus.tokens, listed.source)
        wanted = np.array(ids, "S16")
        candidates = sorted({*_candidates(listed, ids), *(at for at in arrivals if at < len(listed.shards))})

        def look(position: int, listed: Listed = listed, folder: str = folder, wanted: np.ndarray = wanted) -> Any:
            spans = read_spans(folder, listed.shards[position])
            mine = np.isin(spans.keys, wanted)
            rows = np.flatnonzero(mine & ~spans.purged)
            return (
                position,
                rows,
                spans.doc_ids[rows].tobytes(),
                int(spans.lengths[rows].sum()),
                int((mine & spans.purged).sum()),
            )

        for position, rows, found, tokens, before in _in_threads(look, candidates, workers):
            already += before
            if len(rows) or position in arrivals:
                own = tuple(arrivals.get(position, ()))
                changes.append(Change(listed.source, position, listed.shards[position], rows, own))
                gone += [found[at : at + 16] for at in range(0, len(found), 16)]
                tokens_purged += tokens
        if not listed.shards and arrivals:
            changes.append(Change(listed.source, 0, None, np.empty(0, np.int64), tuple(arrivals[0])))
    touched: dict[str, list[int]] = {}
    for change in changes:
        touched.setdefault(change.stream, []).append(change.position)
    width = {listed.source: np.dtype(listed.manifest["dtype"]).itemsize for listed in corpus.streams}
    return Plan(
        changes=tuple(changes),
        purged=pa.array(sorted(gone), pa.binary(16)),
        restored=pa.array(sorted(own.doc_id for own in restorations), pa.binary(16)),
        tokens_purged=tokens_purged,
        tokens_restored=sum(len(own.tokens) for own in restorations),
        bytes_read=sum(change.info.tokens * width[change.stream] for change in changes if change.info is not None),
        already=already,
        touched=touched,
    )


def _restored_before(corpus: Corpus) -> pa.Array:
    """Documents that some version put back."""
    names = [path for path in storage.list_files(corpus.tokens) if _CHANGES.fullmatch(path.rpartition("/")[2])]
    tables = []
    for path in names if corpus.version > 1 else ():
        with storage.open_read(path) as file:
            table = pq.read_table(file, columns=CHANGES_SCHEMA.names)
        tables.append(table.filter(pc.equal(table["action"], RESTORED))["doc_id"].cast(pa.binary(16)).combine_chunks())
    return pa.concat_arrays(tables) if tables else pa.array([], pa.binary(16))


def _candidates(listed: Listed, ids: Sequence[bytes]) -> list[int]:
    """The shards in whose range of place keys one of the documents falls."""
    keys = np.sort(keyed_hashes(listed.manifest["seed"], "place", ids))
    found = []
    for position, shard in enumerate(listed.shards):
        first, last = (np.uint64(int(key, 16)) for key in (shard.first_key, shard.last_key))
        if np.searchsorted(keys, first, "left") < np.searchsorted(keys, last, "right"):
            found.append(position)
    return found


def _arrivals(listed: Listed, restorations: Sequence[Restoration]) -> dict[int, list[Arrival]]:
    """Position of a shard → what goes into it, in order: the shard in whose range its key falls, else the next one."""
    found: dict[int, list[Arrival]] = {}
    last_keys = np.array([int(shard.last_key, 16) for shard in listed.shards], np.uint64)
    eot, dtype = listed.manifest["eot_id"], np.dtype(listed.manifest["dtype"])
    for own in restorations:
        if own.tokens.dtype != dtype or not len(own.tokens) or own.tokens[-1] != eot:
            raise ValueError(f"document {own.doc_id.hex()}: expected tokens of {dtype} that end with EOT")
        key = place_key(listed.manifest["seed"], own.doc_id)
        position = min(int(np.searchsorted(last_keys, np.uint64(key), "left")), max(0, len(listed.shards) - 1))
        found.setdefault(position, []).append(Arrival(own.doc_id, key, own.tokens))
    for arrivals in found.values():
        arrivals.sort(key=lambda arrival: (arrival.key, arrival.doc_id))
    return found


def write_shards(corpus: Corpus, plan: Plan, mode: str, *, workers: int = 4) -> dict[str, dict[int, ShardInfo]]:
    """Write every touched shard's new generation; stream → position → the new manifest entry. Nothing is listed yet."""
    manifests = {listed.source: listed.manifest for listed in corpus.streams}

    def write(change: Change) -> ShardInfo:
        manifest = manifests[change.stream]
        return write_generation(
            storage.join(corpus.tokens, change.stream), change, mode=mode, version=corpus.version + 1,
            dtype=manifest["dtype"], eot_id=manifest["eot_id"], seed=manifest["seed"],
        )  # fmt: skip

    written: dict[str, dict[int, ShardInfo]] = {}
    for change, info in zip(plan.changes, _in_threads(write, plan.changes, workers), strict=True):
        written.setdefault(change.stream, {})[change.position] = info
    return written


def publish(corpus: Corpus, plan: Plan, mode: str, written: Mapping[str, Mapping[int, ShardInfo]]) -> None:
    """Write what changed and the new manifests, and last ``VERSION.json``: from that moment on the version holds."""
    version = corpus.version + 1
    _write_changes(corpus, plan, version)
    sources = dict(corpus.record["sources"])
    for listed in corpus.streams:
        own = written.get(listed.source)
        if own is None:
            continue
        count = max(len(listed.shards), *(position + 1 for position in own))
        shards = [own[position] if position in own else listed.shards[position] for position in range(count)]
        manifest = {
            **listed.manifest,
            "tokens": sum(shard.tokens for shard in shards),
            "documents": sum(shard.documents for shard in shards),
            "shards": [shard.to_dict() for shard in shards],
        }
        name = f"manifest.v{version}.json"
        path = storage.join(corpus.tokens, listed.source, name)
        storage.write_json(path, manifest)
        entry = version_entry(listed.source, name, storage.sha256(path), shards)
        since = {"since": version} if mode == "rewrite" else {}
        sources[listed.source] = {**sources[listed.source], **entry, **since}
    record = {**corpus.record, "version": version, "parent": corpus.version, "kind": mode, "sources": sources}
    storage.write_json(storage.join(corpus.tokens, VERSION_FILE), record)


def _write_changes(corpus: Corpus, plan: Plan, version: int) -> None:
    actions = [PURGED] * len(plan.purged) + [RESTORED] * len(plan.restored)
    table = pa.table([pa.concat_arrays([plan.purged, plan.restored]), actions], schema=CHANGES_SCHEMA)
    with storage.publish(storage.join(corpus.tokens, changes_file(version))) as file:
        pq.write_table(table.sort_by("doc_id"), file, compression="zstd")


def undo(tokens: str, version: int) -> int:
    """Remove every file of a version that was never published; how many there were."""
    removed = 0
    for path in storage.list_files(tokens):
        name = path.rpartition("/")[2]
        match = _VERSIONED.fullmatch(name) or _CHANGES.fullmatch(name)
        if match is not None and int(next(filter(None, match.groups()))) == version:
            storage.remove(path)
            removed += 1
    return removed


def _in_threads(function: Callable[[T], R], items: Sequence[T], workers: int) -> Iterator[R]:
    """Results in order; the first error ends what has not begun."""
    with ThreadPoolExecutor(max(1, workers)) as pool:
        futures = [pool.submit(function, item) for item in items]
        try:
            for future in futures:
                yield future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
