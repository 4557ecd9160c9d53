"""A small complete data run with everything that can hold a text, and a purge of it made by hand.

What the purge leaves in tokens, the purge list and the closure of what is condemned are made here in plain Python; only
what a test is about comes from the code under test.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from quern.data_pipeline import report
from quern.data_pipeline.execution.commits import publish_commit
from quern.data_pipeline.page.document import SIGNATURE_SCHEMA
from quern.data_pipeline.stages.tombstones import PURGE_SCHEMA
from quern.lineage.purge.apply.clean import clean
from quern.lineage.purge.record import audit, journal
from quern.lineage.purge.selection.deletion_set import DELETION_SET_SCHEMA
from quern.lineage.purge.tables.files import FileChange, version_changes
from support.lineage import runs, versions

SEED, DOCUMENTS = 5, 240
ROW_GROUP = 10
PURGE = "0123456789abcdef"


@dataclass(frozen=True)
class Case:
    """A run, what stands in it, and who is condemned."""

    run: Path
    listing: runs.Listing
    deletion_set: tuple[bytes, ...]

    @property
    def purge_list(self) -> Path:
        return self.run.with_name("purged")

    @property
    def placed(self) -> list[bytes]:
        """The condemned that have tokens."""
        there = {row["doc_id"] for rows in self.listing.spans.values() for row in rows}
        return [doc_id for doc_id in self.deletion_set if doc_id in there]

    @property
    def row_of(self) -> dict[bytes, dict[str, Any]]:
        return {row["doc_id"]: row for row in self.listing.rows}

    def at(self, folder: Path) -> Case:
        """A copy of it all below ``folder``."""
        shutil.copytree(self.run.parent, folder, dirs_exist_ok=True)
        return Case(folder / self.run.name, self.listing, self.deletion_set)

    def table(self, doc_ids: Iterable[bytes] | None = None) -> pa.Table:
        """Of :data:`DELETION_SET_SCHEMA`."""
        kinds = {row["doc_id"]: row["kind"] for row in self.listing.decisions}
        rows = []
        for doc_id in sorted(self.deletion_set if doc_ids is None else doc_ids):
            own = self.row_of[doc_id]
            source, name = own["file"].removesuffix(".parquet").split("/")
            told = {key: own[key] for key in ("doc_id", "source", "canonical_url", "post_filter_hash", "stage")}
            rows.append(
                {**told, "partition": name, "why": "selected", "through": None, "removed_as": kinds.get(doc_id)}
            )
            assert source == own["source"]
        return pa.Table.from_pylist(rows, DELETION_SET_SCHEMA)


def make(folder: Path, *, share: int = 9, documents: int = DOCUMENTS, files: int = 2, shard_tokens: int = 2500) -> Case:
    """A run in ``folder/run``; every so-manieth document that has a text is selected, and what hangs on it."""
    found = runs.listing(seed=SEED, documents=documents, files=files, shard_tokens=shard_tokens)
    for rows in found.spans.values():
        for row in rows:
            row["purged"] = False
    run = folder / "run"
    runs.write_listing(run, found, identity="run00005")
    draw = random.Random(SEED)
    removed: dict[str, Counter[str]] = {}
    kept: Counter[str] = Counter()
    source_of = {row["doc_id"]: row["source"] for row in found.rows}
    for name in found.verdicts:
        _commit(run, name, found, draw)
    for row in found.rows:
        kept[row["source"]] += row["stage"] is None
    for row in found.decisions:
        removed.setdefault(source_of[row["doc_id"]], Counter())[row["kind"]] += 1
    stats = report.build_stats(str(run), {"documents": kept, "removed": removed}, _tokens(found))
    report.write_stats(str(run), stats)
    report.write_report(str(run), stats)
    with_text = sorted(found.texts)
    chosen = set(with_text[::share])
    return Case(run, found, tuple(sorted(closure(found, chosen))))


def _commit(run: Path, name: str, found: runs.Listing, draw: random.Random) -> None:
    """Signatures and commit of a partition, whose documents are set down in several row groups."""
    rows, texts = found.verdicts[name], found.documents[name]
    documents = run / "documents" / f"{name}.parquet"
    pq.write_table(pq.read_table(documents), documents, row_group_size=ROW_GROUP, compression="zstd")
    signed = [
        {
            "doc_id": row["doc_id"],
            "signature": [draw.getrandbits(32) for _ in range(8)],
            "shingles": [draw.getrandbits(63)],
        }
        for row in texts
        if row["kept"]
    ]
    path = run / "signatures" / f"{name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(signed, SIGNATURE_SCHEMA), path, row_group_size=ROW_GROUP, compression="zstd")
    dropped = [(row["stage"], row["reason"]) for row in rows if row["stage"]]
    counts = {
        "pages": len(rows), "kept": len(rows) - len(dropped),
        "by_stage": dict(Counter(stage for stage, _ in dropped)),
        "by_reason": dict(Counter(f"{stage}:{reason}" for stage, reason in dropped)),
    }  # fmt: skip
    source, partition = name.split("/")
    outputs = {f"{kind}/{name}.parquet" for kind in ("verdicts", "documents", "signatures")}
    publish_commit(
        str(run), "pages", source, partition, inputs={"file": "1:1"}, config="c",
        outputs={own: versions.sha256(run / own) for own in outputs}, counts=counts,
    )  # fmt: skip


def _tokens(found: runs.Listing) -> dict[str, Any]:
    counts: dict[str, Any] = {}
    for stream, rows in found.spans.items():
        split = "val" if stream.endswith(".val") else "train"
        counts.setdefault(stream.removesuffix(".val"), {})[split] = {
            "documents": len(rows), "tokens": sum(row["length"] for row in rows),
            "shards": len({row["shard"] for row in rows}),
        }  # fmt: skip
    return counts


def closure(found: runs.Listing, chosen: set[bytes]) -> set[bytes]:
    """All that has a chosen document's text or URL, or was removed in favour of one, and so on."""

    def bare(row: dict[str, Any]) -> str | None:
        return row["canonical_url"] and row["canonical_url"].partition("://")[2]

    gone: set[bytes] = set()
    while gone != chosen:
        gone = set(chosen)
        rows = [row for row in found.rows if row["doc_id"] in gone]
        texts, urls = {row["post_filter_hash"] for row in rows} - {None}, {bare(row) for row in rows} - {None}
        chosen |= {row["doc_id"] for row in found.rows if row["post_filter_hash"] in texts or bare(row) in urls}
        chosen |= {row["doc_id"] for row in found.decisions if row["duplicate_of"] in gone}
    return gone


def mask(case: Case) -> list[FileChange]:
    """A new version without their tokens, by hand; the old files are removed. What changed."""
    root = case.run / "tokens"
    before = json.loads((root / "VERSION.json").read_text())
    version = versions.mask(case.run, case.placed)
    after = json.loads((root / "VERSION.json").read_text())
    changes = version_changes(before, after)
    for change in changes:
        if change.after is None:
            (case.run / change.path).unlink()
    name = f"tokens/changes.v{version}.parquet"
    return [*changes, FileChange(name, None, versions.sha256(case.run / name))]


def write_purge_list(case: Case) -> dict[str, str]:
    """As the audit names it."""
    rows = case.table().select(PURGE_SCHEMA.names)
    case.purge_list.mkdir(exist_ok=True)
    path = case.purge_list / "run00005.v2.parquet"
    pq.write_table(rows, path)
    return {"list": str(case.purge_list), "file": path.name, "sha256": versions.sha256(path)}


def purge(case: Case, *, train_runs: tuple[str, ...] = ()) -> Case:
    """All of a mask: tokens and list by hand, texts and audit by the code."""
    changes = mask(case)
    purge_list = write_purge_list(case)
    changes += clean(str(case.run), case.table(), PURGE).changes
    shutil.rmtree(case.run / ".purge")
    append(
        str(case.run),
        told(version_before=1, version_after=2, purge_list=purge_list, train_runs=train_runs),
        case.table(),
        changes,
    )
    return case


#: Names in an entry → in an intent, where they differ.
INTENT = {"time": "at", "version_before": "before", "version_after": "after"}


def append(run: str, told: dict[str, Any], deletion_set: pa.Table, changes: Iterable[FileChange]) -> audit.Entry:
    """Add the entry of a purge of which :func:`told` says this."""
    return audit.append(run, deletion_set=deletion_set, changes=changes, **told)


def told(**more: Any) -> dict[str, Any]:
    """What is said of a purge."""
    given = {
        "id": PURGE, "time": "2025-01-02T03:04:05+00:00", "reason": "asked for", "selection": {"doc": ["…"]},
        "mode": "mask", "duplicates": "purge", "version_before": 1, "version_after": 1, "purge_list": None, **more,
    }  # fmt: skip
    beside = {name: given.pop(name) for name in ("purge_list", "training_impact", "notes") if name in given}
    own = {INTENT.get(name, name): value for name, value in given.items()}
    own["counts"] = {"documents_restored": own.pop("restored", 0)}
    return {"intent": journal.Intent(**own, purge_list="", purge_list_name=""), **beside}
