"""Plans the next corpus version of a purge: which shards change, and the new list of shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quern import storage
from quern.data_pipeline.page.document import HASH
from quern.data_pipeline.page.keys import column_of
from quern.errors import InputError
from quern.lineage.index.changes import CHANGE_FILE, CHANGES_SCHEMA, PURGED, RESTORED, Purges, changes_file
from quern.lineage.index.decided import decisions_file
from quern.lineage.purge.apply.shards import ShardChange, read_spans, write_generation
from quern.lineage.purge.apply.superseded import MANIFEST, SHARD
from quern.lineage.purge.restoration.restore import Restored
from quern.lineage.purge.restoration.restored_tokens import Tokens, read_tokens
from quern.remote.concurrency import in_order
from quern.storage.parquet import publish_table
from quern.tokenize.corpus_version import Listed, read_listed, read_version
from quern.tokenize.place import keyed_hashes
from quern.tokenize.shard_format import VERSION_FILE, ShardInfo, write_manifest

__all__ = ["OpenCorpus", "PurgePlan", "make_plan", "open_corpus", "publish", "undo", "write_shards"]


@dataclass(frozen=True)
class OpenCorpus:
    """A corpus version opened for a purge."""

    tokens: str
    """``RUN/tokens``, on any store."""
    record: Mapping[str, Any]
    """``VERSION.json``."""
    streams: tuple[Listed, ...]

    @property
    def version(self) -> int:
        """The version's number."""
        return int(self.record["version"])

    def source_of(self, stream: str) -> str:
        """The source whose documents a stream holds: its own, or for held-out ones that of ``<source>.val``."""
        source = stream.removesuffix(".val")
        return source if source in self.record["sources"] else stream


@dataclass(frozen=True)
class PurgePlan:
    """The changes of a purge to the tokens."""

    changes: tuple[ShardChange, ...]
    purged: pa.Array
    """Documents (16 bytes each, sorted) that have tokens and lose them."""
    restored: pa.Array
    tokens_purged: int
    """EOTs included."""
    bytes_read: int
    """Of the touched shards."""
    already: int
    """Documents to delete whose tokens an earlier version purged, where they stand."""
    touched: Mapping[str, list[int]]
    """Stream → numbers of its touched shards, in the manifest's list."""
    displaced: int = 0
    """Documents that leave as duplicates of restored ones; they are among the purged."""
    decisions: pa.Table | None = None
    """What is decided anew about duplicates (``DECISION_SCHEMA``)."""


def open_corpus(run: str) -> OpenCorpus:
    """The present version of a run's corpus, with every manifest.

    Raises:
        InputError: a file is missing or damaged.
    """
    tokens = storage.join(run, "tokens")
    record = read_version(tokens)
    listed = storage.each(lambda stream: read_listed(tokens, record, stream), sorted(record["sources"]), tokens)
    return OpenCorpus(tokens, record, tuple(listed))


def make_plan(
    corpus: OpenCorpus, deletion_set: pa.Table, moved: Restored | None = None, *, workers: int = 4
) -> PurgePlan:
    """Which shards a purge touches. Reads the spans of those only whose range of place keys holds a document that may
    have tokens.

    Args:
        deletion_set: doc_id, source, stage and removed_as (as in ``DELETION_SET_SCHEMA``).
        moved: what comes back, and what goes for its sake.

    Raises:
        InputError: a file is damaged; or a restored document goes to a stream that is not there.
    """
    going = _with_tokens(corpus, deletion_set)
    restored = None
    if moved is not None:
        going = pa.concat_tables([going, moved.displaced.select(["doc_id", "source"])])
        restored = moved.restored
        for stream in set(restored["stream"].to_pylist()) - {listed.source for listed in corpus.streams}:
            raise InputError(f"{corpus.tokens}: has no stream {stream!r} to restore a document to")
    changes: list[ShardChange] = []
    gone = [b""]
    tokens_purged = already = 0
    for listed in corpus.streams:
        ids = going.filter(pc.equal(going["source"], corpus.source_of(listed.source)))["doc_id"].to_pylist()
        arriving = _arriving(listed, restored)
        for position, found in _look(corpus, listed, ids, arriving, workers):
            already += found.already
            if len(found.rows) or position in arriving:
                info = listed.shards[position]
                changes.append(ShardChange(listed.source, position, info, found.rows, arriving.get(position)))
                gone.append(found.doc_ids)
                tokens_purged += found.tokens
        if not listed.shards and arriving:
            changes.append(ShardChange(listed.source, 0, None, np.empty(0, np.int64), arriving[0]))
    touched: dict[str, list[int]] = {}
    for change in changes:
        touched.setdefault(change.stream, []).append(change.position)
    width = {listed.source: np.dtype(listed.manifest["dtype"]).itemsize for listed in corpus.streams}
    back = restored["doc_id"].combine_chunks().sort() if restored is not None else pa.array([], HASH)
    return PurgePlan(
        changes=tuple(changes),
        purged=column_of(np.sort(np.frombuffer(b"".join(gone), "S16")).tobytes()),
        restored=back,
        tokens_purged=tokens_purged,
        bytes_read=sum(change.info.tokens * width[change.stream] for change in changes if change.info is not None),
        already=already,
        touched=touched,
        displaced=len(moved.displaced) if moved is not None else 0,
        decisions=moved.decisions if moved is not None and len(moved.decisions) else None,
    )


def _with_tokens(corpus: OpenCorpus, deletion_set: pa.Table) -> pa.Table:
    """doc_id and source of the deletion set that may have tokens: neither dropped, nor removed and not restored
    since."""
    restored = column_of(Purges(corpus.tokens, corpus.version).restored_ids().tobytes())
    removed = pc.and_(
        pc.is_valid(deletion_set["removed_as"]), pc.invert(pc.is_in(deletion_set["doc_id"], value_set=restored))
    )
    out = pc.or_(pc.is_valid(deletion_set["stage"]), removed)
    return deletion_set.filter(pc.invert(out)).select(["doc_id", "source"])


@dataclass(frozen=True)
class _Found:
    """What stands in a shard of those that go."""

    rows: np.ndarray
    doc_ids: bytes
    tokens: int
    already: int


def _look(
    corpus: OpenCorpus, listed: Listed, ids: Sequence[bytes], arriving: Iterable[int], workers: int
) -> Iterator[tuple[int, _Found]]:
    """Position of each shard that may be touched, and what stands there."""
    folder = storage.join(corpus.tokens, listed.source)
    wanted = _candidates(listed, ids)
    nobody = np.empty(0, "S16")

    def look(position: int) -> _Found:
        spans = read_spans(folder, listed.shards[position])
        mine = np.isin(spans.doc_ids, wanted.get(position, nobody))
        rows = np.flatnonzero(mine & ~spans.purged)
        already = int((mine & spans.purged).sum())
        return _Found(rows, spans.doc_ids[rows].tobytes(), int(spans.lengths[rows].sum()), already)

    positions = sorted({*wanted, *(at for at in arriving if at < len(listed.shards))})
    yield from zip(positions, in_order(lambda own, stopped: look(own), positions, max(1, workers)), strict=True)


def _candidates(listed: Listed, ids: Sequence[bytes]) -> dict[int, np.ndarray]:
    """Position of a shard → the documents (S16) whose place keys fall in its range, where there are any."""
    keys = keyed_hashes(listed.manifest["seed"], "place", ids)
    order = np.argsort(keys)
    keys, ordered = keys[order], np.array(ids, "S16")[order]
    found = {}
    for position, shard in enumerate(listed.shards):
        first, last = (np.uint64(int(key, 16)) for key in (shard.first_key, shard.last_key))
        start, end = np.searchsorted(keys, first, "left"), np.searchsorted(keys, last, "right")
        if start < end:
            found[position] = ordered[start:end]
    return found


def _arriving(listed: Listed, restored: pa.Table | None) -> dict[int, tuple[int, int]]:
    """Position of a shard → the place keys of what goes into it: those in its range, or between it and the one
    before."""
    if restored is None:
        return {}
    last_keys = np.array([int(shard.last_key, 16) for shard in listed.shards], np.uint64)
    keys = restored.filter(pc.equal(restored["stream"], listed.source))["place_key"].to_numpy()
    end = max(0, len(last_keys) - 1)
    found = {}
    for position in np.unique(np.minimum(np.searchsorted(last_keys, keys, "left"), end)).tolist():
        first = int(last_keys[position - 1]) + 1 if position else 0
        found[position] = first, int(last_keys[position]) if position < end else 2**64 - 1
    return found


def write_shards(
    corpus: OpenCorpus, plan: PurgePlan, mode: str, restored_tokens: str | None = None, *, workers: int = 4
) -> dict[str, dict[int, ShardInfo]]:
    """Write every touched shard's new generation; stream → position → the new manifest entry. Nothing is listed yet.

    ``restored_tokens``: the file of ``restored_tokens.write_tokens``.
    """
    manifests = {listed.source: listed.manifest for listed in corpus.streams}

    def write(change: ShardChange) -> ShardInfo:
        manifest = manifests[change.stream]
        arrivals: list[Tokens] = []
        if change.arriving is not None and restored_tokens is not None:
            arrivals += read_tokens(restored_tokens, change.stream, manifest["dtype"], *change.arriving)
        return write_generation(
            storage.join(corpus.tokens, change.stream), change, arrivals, mode=mode, version=corpus.version + 1,
            dtype=manifest["dtype"], eot_id=manifest["eot_id"], seed=manifest["seed"],
        )  # fmt: skip

    written: dict[str, dict[int, ShardInfo]] = {}
    infos = in_order(lambda change, stopped: write(change), plan.changes, max(1, workers))
    for change, info in zip(plan.changes, infos, strict=True):
        written.setdefault(change.stream, {})[change.position] = info
    return written


def publish(corpus: OpenCorpus, plan: PurgePlan, mode: str, written: Mapping[str, Mapping[int, ShardInfo]]) -> None:
    """Write the changes and the new manifests, and last ``VERSION.json``: from that moment on the version holds."""
    version = corpus.version + 1
    _write_changes(corpus, plan, version)
    sources = dict(corpus.record["sources"])
    for listed in corpus.streams:
        own = written.get(listed.source)
        if own is None:
            continue
        count = max(len(listed.shards), *(position + 1 for position in own))
        shards = [own[position] if position in own else listed.shards[position] for position in range(count)]
        entry = write_manifest(corpus.tokens, listed.source, f"manifest.v{version}.json", shards, listed.manifest)
        since = {"since": version} if mode == "rewrite" else {}
        sources[listed.source] = {**sources[listed.source], **entry, **since}
    record = {**corpus.record, "version": version, "parent": corpus.version, "kind": mode, "sources": sources}
    storage.write_json(storage.join(corpus.tokens, VERSION_FILE), record)


def _write_changes(corpus: OpenCorpus, plan: PurgePlan, version: int) -> None:
    actions = [PURGED] * len(plan.purged) + [RESTORED] * len(plan.restored)
    table = pa.table([pa.concat_arrays([plan.purged, plan.restored]), actions], schema=CHANGES_SCHEMA)
    publish_table(storage.join(corpus.tokens, changes_file(version)), table.sort_by("doc_id"))
    if plan.decisions is not None:
        publish_table(storage.join(corpus.tokens, decisions_file(version)), plan.decisions)


def undo(tokens: str, version: int) -> int:
    """Remove every file of a version that was never published; return their number."""
    removed = 0
    for path in storage.list_files(tokens):
        name = path.rpartition("/")[2]
        match = SHARD.fullmatch(name) or MANIFEST.fullmatch(name) or CHANGE_FILE.fullmatch(name)
        if match is not None and match[1] == str(version):
            storage.remove(path)
            removed += 1
    return removed
