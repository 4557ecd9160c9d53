"""What lineage says of documents that a later version restored, displaced, or judged by another survivor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from quern.cli.main import app
from quern.data_pipeline.dedup.schemas import DECISION_SCHEMA
from quern.errors import InputError
from quern.lineage.index.changes import CHANGE_FILE
from quern.lineage.index.decided import Redecided, decisions_file
from quern.lineage.sql.query import query
from quern.lineage.store import IndexedRun
from quern.lineage.trace import summaries, trace
from support.lineage import runs
from support.lineage.versions import write_changes

IDENTITY = "restored"


@dataclass
class Case:
    """Version 2 purged ``gone``, restored what was removed for it, and removed ``displaced`` for that."""

    run: Path
    listing: runs.Listing
    gone: bytes
    restored: bytes
    displaced: bytes
    still: bytes
    """Removed before and after, now for ``restored``."""
    before: dict[bytes, dict[str, Any]]

    def write(self, version: int, changes: dict[bytes, str], decisions: list[dict[str, Any]]) -> None:
        """A version that holds what is kept then."""
        write_changes(self.run, version, changes)
        rows = sorted(decisions, key=lambda row: row["doc_id"])
        if rows:
            path = self.run / "tokens" / decisions_file(version)
            pq.write_table(pa.Table.from_pylist(rows, DECISION_SCHEMA), path)
        for doc_id, action in changes.items():
            (self.kept.discard if action == "purged" else self.kept.add)(doc_id)
        kept = [row for row in self.listing.rows if row["doc_id"] in self.kept]
        self.listing.spans.clear()
        runs._place(replace(self.listing, decisions=[]), kept, ("web", "text"), 4096)
        runs.write_tokens(self.run, self.listing, version=version)

    def __post_init__(self) -> None:
        rows = self.listing.rows
        self.kept = {row["doc_id"] for row in rows if row["stage"] is None} - set(self.before)

    def decision(self, doc_id: bytes, survivor: bytes) -> dict[str, Any]:
        return {
            "doc_id": doc_id, "kind": "near", "duplicate_of": survivor, "cluster_id": self.gone,
            "similarity": 0.875, "band": 3,
        }  # fmt: skip

    def number(self, lineage: IndexedRun, doc_id: bytes) -> int:
        return int(lineage.find(doc=doc_id)[0])


@pytest.fixture
def case(tmp_path: Path) -> Case:
    listing = runs.listing(seed=3, documents=240)
    run = tmp_path / "run"
    runs.write_listing(run, listing, identity=IDENTITY)
    before = {row["doc_id"]: row for row in listing.decisions}
    removed_for: dict[bytes, list[bytes]] = {}
    for row in listing.decisions:
        removed_for.setdefault(row["duplicate_of"], []).append(row["doc_id"])
    gone = next(doc_id for doc_id, removed in removed_for.items() if len(removed) > 1 and doc_id not in before)
    restored, still = sorted(removed_for[gone], key=lambda doc_id: doc_id[1] < 10)[:2]
    others = {row["doc_id"] for row in listing.rows if row["stage"] is None} - set(before) - {gone}
    displaced = min(doc_id for doc_id in others - set(removed_for) if doc_id[1] > 9)
    found = Case(run, listing, gone, restored, displaced, still, before)
    decisions = [found.decision(displaced, restored), found.decision(still, restored)]
    found.write(2, {gone: "purged", displaced: "purged", restored: "restored"}, decisions)
    return found


@pytest.mark.slow
def test_a_restored_document_is_kept_and_a_displaced_one_a_duplicate(case: Case) -> None:
    lineage = IndexedRun(str(case.run))
    numbers = {name: case.number(lineage, getattr(case, name)) for name in ("gone", "restored", "displaced", "still")}
    lives = {name: trace(lineage, number) for name, number in numbers.items()}
    assert {name: life["outcome"] for name, life in lives.items()} == {
        "gone": "purged: version 2", "restored": "kept", "displaced": "duplicate: near", "still": "duplicate: near",
    }  # fmt: skip
    assert {name: life["span"] is not None for name, life in lives.items()} == {
        "gone": False, "restored": True, "displaced": False, "still": False,
    }  # fmt: skip
    assert lives["restored"]["duplicates"]["decision"] is None
    assert lives["restored"]["text"]["from"] == "tokens"
    assert lives["restored"]["text"]["same"]
    was = case.before[case.restored]
    assert lives["restored"]["change"] == {
        "action": "restored", "version": 2,
        "was_removed": {
            "kind": was["kind"], "similarity": was["similarity"], "band": was["band"], "duplicate_of": case.gone.hex(),
        },
    }  # fmt: skip
    assert lives["gone"]["change"] == {"action": "purged", "version": 2, "was_removed": None}
    assert lives["still"]["change"] is None
    for name in ("displaced", "still"):
        evidence = lives[name]["duplicates"]["decision"]
        assert (evidence["survivor"]["doc_id"], evidence["similarity"]) == (case.restored.hex(), 0.875)
    mine = sorted([numbers["displaced"], numbers["still"]])
    assert lineage.removed_for(numbers["restored"]).tolist() == mine
    recorded = {row["doc_id"] for row in case.listing.decisions if row["duplicate_of"] == case.gone}
    left = [case.number(lineage, doc_id) for doc_id in recorded - {case.restored, case.still}]
    assert lineage.removed_for(numbers["gone"]).tolist() == sorted(left)
    (listed,) = summaries(lineage, np.array([numbers["restored"]]))
    assert listed["outcome"] == "kept"


@pytest.mark.slow
def test_the_views_say_so_too(case: Case) -> None:
    def rows(sql: str) -> list[tuple[Any, ...]]:
        return query(str(case.run), sql).rows

    stages = {doc_id: (stage, reason) for doc_id, stage, reason in rows("SELECT doc_id, stage, reason FROM verdicts")}
    assert stages[case.restored.hex()] == (None, None)
    assert stages[case.displaced.hex()] == ("duplicate", "near")
    assert stages[case.still.hex()] == ("duplicate", "near")
    for row in case.listing.decisions:
        if row["doc_id"] not in (case.restored, case.still):
            assert stages[row["doc_id"].hex()] == ("duplicate", row["kind"])
    assert stages[case.gone.hex()] == ("purged", "version 2")
    kept = {doc_id for (doc_id,) in rows("SELECT doc_id FROM documents WHERE kept")}
    spans = {doc_id for (doc_id,) in rows("SELECT doc_id FROM spans")}
    assert kept == spans != set()
    own = {row[0]: row[1:] for row in rows("SELECT doc_id, kind, duplicate_of FROM duplicates")}
    assert own[case.restored.hex()] == (None, None)
    assert own[case.still.hex()] == own[case.displaced.hex()] == ("near", case.restored.hex())
    assert rows("SELECT count(*) - count(DISTINCT doc_id) FROM duplicates") == [(0,)]


@pytest.mark.slow
def test_a_restored_document_is_purged_and_a_displaced_one_restored(case: Case) -> None:
    case.write(3, {case.restored: "purged", case.displaced: "restored"}, [])
    lineage = IndexedRun(str(case.run))
    lives = {name: trace(lineage, case.number(lineage, getattr(case, name))) for name in ("restored", "displaced")}
    assert lives["restored"]["outcome"] == "purged: version 3"
    assert lives["displaced"]["outcome"] == "kept"
    assert lives["displaced"]["span"] is not None
    assert lives["displaced"]["change"]["was_removed"] is None  # the run itself had kept it
    case.write(4, {case.displaced: "purged"}, [case.decision(case.displaced, case.still)])
    lineage = IndexedRun(str(case.run))
    assert trace(lineage, case.number(lineage, case.displaced))["outcome"] == "duplicate: near"
    redecided = Redecided(str(case.run / "tokens"), 3)  # as version 3 had it
    assert redecided.decision(case.displaced) is None
    assert Redecided(str(case.run / "tokens"), 1).table().num_rows == 0


def test_a_version_that_is_being_written_changes_nothing(case: Case) -> None:
    write_changes(case.run, 3, {case.displaced: "restored", case.restored: "purged"})
    lineage = IndexedRun(str(case.run))
    assert trace(lineage, case.number(lineage, case.restored))["outcome"] == "kept"
    assert trace(lineage, case.number(lineage, case.displaced))["outcome"] == "duplicate: near"


@pytest.mark.slow
def test_it_is_shown(case: Case) -> None:
    shown = CliRunner().invoke(app, ["lineage", "show", str(case.run), "--doc", case.restored.hex()])
    assert shown.exit_code == 0
    kind = case.before[case.restored]["kind"]
    assert f"restored by corpus version 2, removed before: {kind}" in shown.output
    assert case.gone.hex() in shown.output


def test_a_damaged_table_of_decisions_is_named(case: Case) -> None:
    path = case.run / "tokens" / decisions_file(2)
    assert CHANGE_FILE.fullmatch(path.name)
    path.write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"decisions\.v2\.parquet: cannot be read"):
        Redecided(str(case.run / "tokens"), 2)
    pq.write_table(pa.table({"doc_id": [b"x" * 16]}), path)
    with pytest.raises(InputError, match=r"decisions\.v2\.parquet: has no column 'kind'"):
        Redecided(str(case.run / "tokens"), 2)
