"""``--duplicates restore``: decides again about duplicates that were removed in favour of documents to delete.

Decided by duplicate removal itself (:func:`quern.data_pipeline.dedup.passes.run.run`) over the tables of the documents
whose decisions can change (:mod:`quern.lineage.purge.restoration.affected`), without the deletion set: so the outcome
is a fresh run's. It has two sides. Documents that were removed are kept now: they are *restored*. And of a chain C ~ B
~ A with A and C different, of which C and A were kept, B comes back when C goes, and a fresh run removes A, which is
similar to B: such documents are *displaced*. They leave the corpus, but nothing of them is in the deletion set: their
texts stay in ``documents/``, no purge list gets them, and a later purge can restore them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from quern import storage
from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.dedup.passes import run as dedup
from quern.data_pipeline.dedup.schemas import CLUSTERS, DECISION_SCHEMA, DECISIONS
from quern.data_pipeline.dedup.signature import NUM_WORDS
from quern.data_pipeline.execution.tasks import InProcess
from quern.data_pipeline.page.document import HASH
from quern.data_pipeline.page.keys import contains, key_set, keys_of
from quern.errors import InputError
from quern.lineage.index.changes import Purges
from quern.lineage.index.decided import Redecided
from quern.lineage.purge.restoration.affected import affected, check_closed, signatures_of
from quern.lineage.purge.tables.row_groups import tables_in
from quern.lineage.purge.tables.rows import batches, matching, with_value
from quern.tokenize.corpus_version import fields
from quern.tokenize.place import keyed_hashes, validation_limit

__all__ = ["MOVED_SCHEMA", "Restored", "reconsider"]

#: A document that is restored or displaced; sorted by stream, place key and ``doc_id``, as the tokens stand.
MOVED_SCHEMA = pa.schema(
    [
        pa.field("doc_id", HASH, nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("partition", pa.string(), nullable=False),  # its verdicts file below the source, without .parquet
        pa.field("stream", pa.string(), nullable=False),  # <source>, or <source>.val if its cluster is held out
        pa.field("place_key", pa.uint64(), nullable=False),
        pa.field("post_filter_hash", HASH, nullable=False),
        pa.field("kind", pa.string()),  # of the decision that removed it (restored) or removes it (displaced)
        pa.field("duplicate_of", HASH),  # by that decision; null where a later version than the first had removed it
    ]
)

#: What duplicate removal reads of a verdict.
_FACTS = ["doc_id", "canonical_url", "fetched_at", "post_filter_hash", "stage", NUM_WORDS]
_SIGNATURE = ["doc_id", "signature", "shingles"]
#: doc_id, duplicate_of and the first letter of the kind, as bytes that are compared at once.
_REMOVAL = np.dtype("S33")
_ADVICE = "; --duplicates restore needs it, --duplicates purge does not"


@dataclass(frozen=True)
class Restored:
    """The changes of a restore besides the documents to delete."""

    restored: pa.Table
    """:data:`MOVED_SCHEMA`: not in the corpus, and will be. Their tokens: ``restored_tokens.write_tokens``."""
    displaced: pa.Table
    """:data:`MOVED_SCHEMA`: in the corpus, and will not be, as duplicates of restored ones."""
    decisions: pa.Table
    """``DECISION_SCHEMA``, by doc_id: what holds from then on instead of other decisions or none, of documents that are
    removed still, and of the displaced. The new version's ``tokens/decisions.v<V>.parquet``."""
    decided: int
    """Documents whose decisions were made again."""
    whole: bool
    """Those are all of the corpus, since a band of theirs was full."""


def reconsider(run: str, deletion_set: pa.Table) -> Restored:
    """What a fresh run without the ``deletion_set`` (a table with ``doc_id``) would keep that this corpus does not
    hold, and the other way round. Documents that earlier purges have taken stay out, and what they restored counts as
    kept.

    Nothing of the run is written. A temporary folder takes the tables of the documents to decide. Memory: about 100
    bytes a document of the components that have a document to delete, and what a task of duplicate removal takes
    (300 MB).

    Raises:
        InputError: a table of decisions, signatures, texts or verdicts is missing or damaged.
        QuernError: the deletion set is not closed under equal texts and URLs.
    """
    with tempfile.TemporaryDirectory(prefix="quern-restore-") as folder:
        return _Reconsidered(run, key_set([keys_of(deletion_set["doc_id"])]), folder).outcome()


class _Reconsidered:
    def __init__(self, run: str, deletion_set: np.ndarray, folder: str) -> None:
        self.run, self.deletion_set, self.folder = run, deletion_set, folder
        path = storage.join(run, "run.json")
        config = fields(path, storage.read_json(path), {"config": dict})["config"]
        self.duplicates = DuplicatesConfig.model_validate(config.get("duplicates", {}))
        self.priorities = {str(own["name"]): int(own.get("priority", 0)) for own in config["sources"]}
        self.seed = int(config.get("seed", 0))
        tokenize = fields(path, config, {"tokenize": dict}, "config.")["tokenize"]
        self.validation = float(tokenize.get("validation", 0.002))
        tokens = storage.join(run, "tokens")
        self.version = int(storage.read_json(storage.join(tokens, "VERSION.json"))["version"])
        purges = Purges(tokens, self.version)
        self.purged, self.restored_before = purges.purged_ids(), purges.restored_ids()

    def outcome(self) -> Restored:
        for name in (DECISIONS, CLUSTERS):
            if not storage.is_file(storage.join(self.run, name)):
                raise InputError(f"{storage.join(self.run, name)}: is missing{_ADVICE}")
        check_closed(self.run, self.deletion_set)
        purged_before = self.version > 1 or bool(storage.list_files(storage.join(self.run, "audit")))
        doc_ids = affected(self.run, self.deletion_set, self.duplicates, purged_before)

        def wanted(ids: np.ndarray) -> np.ndarray:
            return (np.ones(len(ids), bool) if doc_ids is None else contains(doc_ids, ids)) & ~contains(
                self.deletion_set, ids
            )

        partitions, decided = self._copy(wanted)
        dedup.run(
            self.folder,
            partitions,
            self.priorities,
            self.duplicates,
            InProcess(),
            os.path.join(self.folder, ".work"),
        )
        restored, displaced, decisions = self._compare(partitions, wanted)
        return Restored(restored, displaced, decisions, decided, doc_ids is None)

    # ---- the tables of what is decided again

    def _copy(self, wanted: Any) -> tuple[list[tuple[str, str]], int]:
        """Write the verdicts and signatures of the documents to decide; their partitions and their number."""
        partitions, decided = [], 0
        names = [own[:2] for own in tables_in(self.run, "verdicts")]
        found = storage.each(lambda name: self._undecided(*name, wanted), names, self.run)
        for (source, partition), ids in zip(names, found, strict=True):
            if not len(ids):
                continue
            self._copy_table("verdicts", source, partition, _FACTS, ids)
            if self.duplicates.near:
                path = signatures_of(self.run, source, partition)
                rows = self._copy_table("signatures", source, partition, _SIGNATURE, ids)
                if rows != len(ids):
                    raise InputError(f"{path}: has {rows} of the {len(ids)} documents to decide again{_ADVICE}")
            partitions.append((source, partition))
            decided += len(ids)
        return partitions, decided

    def _undecided(self, source: str, partition: str, wanted: Any) -> np.ndarray:
        """S16, sorted: those of a partition that passed every gate and whose texts are there: a purge takes them."""
        path = storage.join(self.run, "verdicts", source, f"{partition}.parquet")
        found = [np.empty(0, "S16")]
        for batch in batches(path, ["doc_id", "stage"]):
            ids = keys_of(batch.filter(pc.is_null(batch.column("stage"))).column("doc_id"))
            found.append(ids[wanted(ids)])
        passed = key_set(found)
        if not len(passed):
            return passed
        texts = with_value(storage.join(self.run, "documents", source, f"{partition}.parquet"), "text")
        return passed[contains(texts, passed)]

    def _copy_table(self, kind: str, source: str, partition: str, columns: Sequence[str], ids: np.ndarray) -> int:
        """Write the rows of these documents to the scratch folder; how many there are."""
        path = os.path.join(self.folder, kind, source, f"{partition}.parquet")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        own = storage.join(self.run, kind, source, f"{partition}.parquet")
        writer: pq.ParquetWriter | None = None
        count = 0
        try:
            for batch in matching(own, columns, lambda found: contains(ids, found)):
                writer = writer or pq.ParquetWriter(path, batch.schema, compression="lz4")
                writer.write_batch(batch)
                count += batch.num_rows
        finally:
            if writer is not None:
                writer.close()
        return count

    # ---- what is different now

    def _compare(self, partitions: Sequence[tuple[str, str]], wanted: Any) -> tuple[pa.Table, pa.Table, pa.Table]:
        """What is restored, what is displaced, and the decisions that hold from now on instead of others."""
        fresh = os.path.join(self.folder, DECISIONS)
        recorded = storage.join(self.run, DECISIONS)
        redecided = Redecided(storage.join(self.run, "tokens"), self.version)
        changed = [keys_of(redecided.table()["doc_id"]), self.purged, self.restored_before]
        for only in _differences(_removals(recorded, wanted), _removals(fresh, wanted)):
            changed.append(only.view("u1").reshape(-1, _REMOVAL.itemsize)[:, :16].copy().view("S16").ravel())
        places = self._places(partitions, key_set(changed))
        ids = key_set([np.array(list(places), "S16")])
        now, first = (_rows_of(path, DECISION_SCHEMA.names, ids) for path in (fresh, recorded))
        then = first | {doc_id: redecided.decision(doc_id) for doc_id in places if doc_id in redecided}
        members = _rows_of(storage.join(self.run, CLUSTERS), ["cluster_id"], ids)
        clusters = {doc_id: row["cluster_id"] for doc_id, row in members.items()}
        restored, displaced, decisions = [], [], []
        for doc_id, place in places.items():
            place["cluster_id"] = clusters.get(doc_id, doc_id)
            before, after = then.get(doc_id), now.get(doc_id)
            out = bool(before is not None or contains(self.purged, np.array([doc_id], "S16"))[0])
            if after is None and out:
                restored.append({**place, **_evidence(before)})
            elif after is not None and not out:
                displaced.append({**place, **_evidence(after)})
            if after is not None and _evidence(after) != _evidence(before):
                decisions.append({**after, "cluster_id": clusters.get(doc_id, after["cluster_id"])})
        decisions.sort(key=lambda row: row["doc_id"])
        return self._table(restored), self._table(displaced), pa.Table.from_pylist(decisions, DECISION_SCHEMA)

    def _places(self, partitions: Sequence[tuple[str, str]], candidates: np.ndarray) -> dict[bytes, dict[str, Any]]:
        """Source, partition and text hash of those candidates that were decided again."""
        found: dict[bytes, dict[str, Any]] = {}
        for source, partition in partitions:
            path = os.path.join(self.folder, "verdicts", source, f"{partition}.parquet")
            for doc_id, row in _rows_of(path, ["post_filter_hash"], candidates).items():
                found[doc_id] = {**row, "source": source, "partition": partition}
        return found

    def _table(self, rows: Sequence[dict[str, Any]]) -> pa.Table:
        """With stream and place, in the order of the tokens."""
        places = keyed_hashes(self.seed, "place", (row["doc_id"] for row in rows))
        held_out = keyed_hashes(self.seed, "validation", (row["cluster_id"] for row in rows))
        limit = validation_limit(self.validation)
        for row, place, hashed in zip(rows, places.tolist(), held_out.tolist(), strict=True):
            row["stream"] = f"{row['source']}.val" if hashed < limit else row["source"]
            row["place_key"] = place
        ordered = sorted(rows, key=lambda row: (row["stream"], row["place_key"], row["doc_id"]))
        return pa.Table.from_pylist(ordered, MOVED_SCHEMA)


def _removals(path: str, wanted: Any) -> Iterator[np.ndarray]:
    """The removals in a table of decisions, as :data:`_REMOVAL`, in its order."""
    for batch in batches(path, ["doc_id", "duplicate_of", "kind"]):
        ids = keys_of(batch.column("doc_id"))
        rows = np.zeros(len(ids), [("doc_id", "S16"), ("duplicate_of", "S16"), ("kind", "S1")])
        rows["doc_id"], rows["duplicate_of"] = ids, keys_of(batch.column("duplicate_of"))
        rows["kind"] = [kind[:1].encode() for kind in batch.column("kind").to_pylist()]
        yield rows[wanted(ids)].view(_REMOVAL)


def _rows_of(path: str, columns: Sequence[str], doc_ids: np.ndarray) -> dict[bytes, dict[str, Any]]:
    """By doc_id, the rows that a table has of documents (S16, sorted)."""
    rows = matching(path, columns, lambda own: contains(doc_ids, own), 1 << 14)
    return {row["doc_id"]: row for batch in rows for row in batch.to_pylist()}


def _evidence(decision: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: decision[name] if decision else None for name in ("kind", "duplicate_of")}


def _differences(one: Iterator[np.ndarray], other: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """What only one of two ascending sequences has, each in pieces (:data:`_REMOVAL`)."""
    sides = [np.empty(0, _REMOVAL), np.empty(0, _REMOVAL)]
    open_ = [True, True]
    while True:
        for side, pieces in enumerate((one, other)):
            while open_[side] and not len(sides[side]):
                piece = next(pieces, None)
                open_[side] = piece is not None
                sides[side] = sides[side] if piece is None else piece
        if not any(open_):
            return
        last = min(piece[-1] for piece, more in zip(sides, open_, strict=True) if more)
        cuts = [int(np.searchsorted(piece, last, "right")) for piece in sides]
        yield np.setxor1d(sides[0][: cuts[0]], sides[1][: cuts[1]], assume_unique=True)
        sides = [piece[cut:] for piece, cut in zip(sides, cuts, strict=True)]
