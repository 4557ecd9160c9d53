"""Finds kept documents whose near duplicate is purged, to warn that a similar text stays."""

from __future__ import annotations

import shlex
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from quern import storage
from quern.data_pipeline.page.document import HASH
from quern.lineage.index.changes import Purges
from quern.lineage.index.decided import redecided
from quern.lineage.purge.selection.deletion_set import standing_decisions
from quern.lineage.purge.tables.verdict_rows import read_verdicts, rows_of

__all__ = ["kept_copies", "told"]

_SHOWN = 5
_NEVER = 1 << 31


def kept_copies(run: str, deletion_set: pa.Table, purges: Purges) -> list[dict[str, Any]]:
    """``doc_id``, ``url`` and ``similarity`` of each document that stays and in whose favour a document to delete was
    removed as a near duplicate, with that one's ``removed_doc_id`` and ``removed_url``; by both ids."""
    removed = deletion_set.filter(pc.equal(deletion_set["removed_as"], "near"))
    if not len(removed):
        return []
    own = dict(zip(removed["doc_id"].to_pylist(), removed["canonical_url"].to_pylist(), strict=True))
    going = set(deletion_set["doc_id"].to_pylist())
    found = []
    for batch in standing_decisions(run, redecided(run), ["doc_id", "duplicate_of", "similarity"]):
        hit = batch.filter(pc.is_in(batch["doc_id"], value_set=pa.array(list(own), HASH)))
        found += [row for row in hit.to_pylist() if row["duplicate_of"] not in going]
    staying = [row for row in found if int(purges.since(row["duplicate_of"], _NEVER)[0]) == _NEVER]
    urls = _urls(run, {row["duplicate_of"] for row in staying}) if staying else {}
    return [
        {
            "doc_id": row["duplicate_of"].hex(), "url": urls.get(row["duplicate_of"]), "similarity": row["similarity"],
            "removed_doc_id": row["doc_id"].hex(), "removed_url": own[row["doc_id"]],
        }
        for row in sorted(staying, key=lambda row: (row["duplicate_of"], row["doc_id"]))
    ]  # fmt: skip


def told(run: str, mode: str, copies: list[dict[str, Any]]) -> list[str]:
    """A warning for each of the first of them, and the command that purges these too."""
    if not copies:
        return []
    lines = [
        f"{row['removed_url'] or row['removed_doc_id']} was removed as a near duplicate of "
        f"{row['url'] or '(no url)'} ({row['doc_id']}), which stays"
        + ("" if row["similarity"] is None else f": {row['similarity']:.0%} of their shingles are the same")
        for row in copies[:_SHOWN]
    ]
    if len(copies) > _SHOWN:
        lines.append(f"… and {len(copies) - _SHOWN:,} more that stay: near_copies_kept of --json has all")
    docs = list(dict.fromkeys(row["doc_id"] for row in copies[:_SHOWN]))
    command = f"quern lineage purge {shlex.quote(run)} --mode {mode} {' '.join(f'--doc {doc}' for doc in docs)}"
    return [*lines, f"to purge {'it' if len(docs) == 1 else 'them'} too: {command}"]


def _urls(run: str, doc_ids: set[bytes]) -> dict[bytes, str | None]:
    wanted, found = pa.array(sorted(doc_ids), HASH), dict[bytes, str | None]()
    for path in storage.list_files(storage.join(run, "verdicts")):
        if path.endswith(".parquet") and len(found) < len(doc_ids):
            for table in read_verdicts(path):
                rows = rows_of(table, 0)
                hit = pc.is_in(rows.doc_ids, value_set=wanted)
                found |= zip(rows.doc_ids.filter(hit).to_pylist(), rows.urls.filter(hit).to_pylist(), strict=True)
    return found
