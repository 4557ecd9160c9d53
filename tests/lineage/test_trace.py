"""What ``trace`` says of each document against the rows that were written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from quern.data_pipeline.page.document import DOCUMENT_SCHEMA
from quern.data_pipeline.stages.quality import QualityConfig
from quern.lineage import trace as module
from quern.lineage.store import IndexedRun
from quern.lineage.trace import find_document, trace
from support.lineage.runs import MEASURES, Listing, listing, places, write_listing

ARGUMENTS: dict[str, Any] = {"seed": 11, "documents": 150, "files": 2, "shard_tokens": 3000}

Lives = dict[bytes, dict[str, Any]]


@pytest.fixture(scope="module")
def lives(lineage: IndexedRun, found: Listing) -> Lives:
    """Of every document."""
    return {row["doc_id"]: life_of(lineage, row["doc_id"]) for row in found.rows}


def life_of(lineage: IndexedRun, doc_id: bytes, chars: int | None = None) -> dict[str, Any]:
    return trace(lineage, find_document(lineage, doc_id.hex()), chars)


@pytest.mark.slow
def test_every_document_s_record_and_measures_are_those_of_its_row(lives: Lives, found: Listing) -> None:
    for row in found.rows:
        life = lives[row["doc_id"]]
        for name in ("url", "canonical_url", "surt", "host", "source", "stage", "reason"):
            assert life[name] == row[name]
        assert life["doc_id"] == row["doc_id"].hex()
        assert life["failed_rules"] == row["failed_rules"]
        assert life["record"] == {
            "file": row["source_file"], "offset": row["record_offset"], "length": row["record_length"],
            "id": row["record_id"], "fetched_at": row["fetched_at"].isoformat(), "payload_digest": None,
            "charset": "utf-8",
        }  # fmt: skip
        assert life["language"] == {"code": row["language"], "score": row["language_score"]}
        for name in ("pre_filter_hash", "post_filter_hash"):
            assert life[name] == (row[name].hex() if row[name] is not None else None)
        assert life["verdict_file"] == {"file": row["file"], "row": row["row"]}
        assert {m["name"]: m["value"] for m in life["measures"]} == {
            name: row[name] for name in MEASURES if row[name] is not None
        }


def test_the_text_is_what_was_judged_wherever_it_comes_from(lives: Lives, found: Listing) -> None:
    spans, seen = places(found), set()
    for row in found.rows:
        text = lives[row["doc_id"]]["text"]
        span = spans.get(row["doc_id"])
        seen.add(origin := text["from"])
        if row["doc_id"] not in found.texts:
            assert (origin, text["text"], text["complete"], text["same"]) == (None, None, False, None)
            assert "dropped before the quality gate" in text["why_none"]
        elif span is not None and span["purged"]:
            assert (origin, text["text"], text["why_none"]) == (None, None, "its tokens were purged")
        else:
            assert origin == ("documents" if span is None else "tokens")
            assert text["text"] == found.texts[row["doc_id"]]
            assert (text["complete"], text["same"], text["why_none"]) == (True, True, None)
    assert seen == {"documents", "tokens", None}


def test_a_stored_text_is_found_wherever_it_is_in_its_row_group(
    lineage: IndexedRun, lives: Lives, found: Listing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ROWS", 7)
    stored = [doc_id for doc_id, life in lives.items() if life["text"]["from"] == "documents"]
    assert len(stored) > 20
    for doc_id in stored[:20]:
        assert life_of(lineage, doc_id)["text"]["text"] == found.texts[doc_id]


@pytest.mark.slow
def test_a_long_text_is_cut_and_said_and_asked_for_whole(lineage: IndexedRun, found: Listing) -> None:
    spans = places(found)
    longest = sorted(found.texts, key=lambda doc_id: len(found.texts[doc_id]))[-12:]
    assert any(doc_id in spans for doc_id in longest)
    assert any(doc_id not in spans for doc_id in longest)
    for doc_id in longest:
        whole = found.texts[doc_id]
        if doc_id in spans and spans[doc_id]["purged"]:
            continue
        for chars in (1, 7, len(whole) - 1, len(whole), len(whole) + 1):
            text = life_of(lineage, doc_id, chars)["text"]
            assert text["text"] == whole[:chars]
            assert text["complete"] is (chars >= len(whole))
            assert text["same"] is (True if chars >= len(whole) else None)


def test_tokens_of_another_text_are_noticed(tmp_path: Path, found: Listing) -> None:
    changed = listing(**ARGUMENTS)
    span = next(span for span in changed.spans["web"] if not span["purged"] and span["length"] > 10)
    changed.texts[span["doc_id"]] = "X" + changed.texts[span["doc_id"]][1:]
    write_listing(tmp_path, changed, identity="x")
    life = life_of(IndexedRun(str(tmp_path)), span["doc_id"])
    assert life["text"]["same"] is False


def test_spans_say_stream_shard_and_place(lineage: IndexedRun, lives: Lives, found: Listing) -> None:
    spans = places(found)
    shards = set()
    for row in found.rows:
        got, span = lives[row["doc_id"]]["span"], spans.get(row["doc_id"])
        assert (got is None) is (span is None)
        if got is None or span is None:
            continue
        shards.add(span["shard"])
        assert got == {
            "stream": span["stream"], "identity": f"run00011/{span['stream']}/1", "shard": span["shard"],
            "file": f"{lineage.run}/tokens/{span['stream']}/shard_{span['shard']:05d}.bin",
            "start": span["start"] - span["origin"], "stream_start": span["start"], "length": span["length"],
            "purged": span["purged"], "purged_since": 1 if span["purged"] else None,
            "held_out": span["stream"].endswith(".val"),
        }  # fmt: skip
    assert len(shards) > 2


def test_duplicates_are_the_decisions_both_ways(lives: Lives, found: Listing) -> None:
    rows = {row["doc_id"]: row for row in found.rows}
    cluster_of = {member["doc_id"]: member["cluster_id"] for member in found.clusters}
    decisions = {decision["doc_id"]: decision for decision in found.decisions}
    for doc_id in rows:
        life = lives[doc_id]
        duplicates, decision = life["duplicates"], decisions.get(doc_id)
        if decision is None:
            assert duplicates["decision"] is None
            assert "duplicate" not in life["outcome"]
        else:
            assert life["outcome"] == f"duplicate: {decision['kind']}"
            got = duplicates["decision"]
            assert {name: got[name] for name in ("kind", "similarity", "band")} == {
                name: decision[name] for name in ("kind", "similarity", "band")
            }
            survivor = rows[decision["duplicate_of"]]
            assert got["survivor"] == {
                "doc_id": survivor["doc_id"].hex(), "url": survivor["url"], "source": survivor["source"],
            }  # fmt: skip
            assert got["difference"]["equal"] is (found.texts[doc_id] == found.texts[survivor["doc_id"]])
            assert got["difference"]["removed_words"] == len(found.texts[doc_id].split())
        removed = [other for other in decisions.values() if other["duplicate_of"] == doc_id]
        assert duplicates["removed_count"] == len(removed)
        assert {other["doc_id"] for other in duplicates["removed"]} <= {other["doc_id"].hex() for other in removed}
        assert len(duplicates["removed"]) == min(len(removed), module.NUM_REMOVED)
        if doc_id in cluster_of:
            size = sum(cluster == cluster_of[doc_id] for cluster in cluster_of.values())
            assert duplicates["cluster"] == {"id": cluster_of[doc_id].hex(), "documents": size}
        else:
            assert duplicates["cluster"] is None


@pytest.mark.slow
def test_of_many_removed_documents_a_few_are_shown(tmp_path: Path) -> None:
    many = listing(seed=2, documents=120, files=1, sources=("web",))
    kept = [row for row in many.rows if row["stage"] is None]
    many.decisions = [
        {
            "doc_id": row["doc_id"], "kind": "url", "duplicate_of": kept[0]["doc_id"], "similarity": None,
            "band": None, "cluster_id": min(row["doc_id"] for row in kept),
        }
        for row in sorted(kept[1:], key=lambda row: row["doc_id"])
    ]  # fmt: skip
    many.clusters = [
        {"doc_id": row["doc_id"], "cluster_id": many.decisions[0]["cluster_id"]}
        for row in sorted(kept, key=lambda row: row["doc_id"])
    ]
    many.spans = {"web": [span for span in many.spans["web"] if span["doc_id"] == kept[0]["doc_id"]], "web.val": []}
    for span in many.spans["web"]:
        span |= {"start": 0, "shard": 0}
    write_listing(tmp_path, many, identity="x")
    duplicates = life_of(IndexedRun(str(tmp_path)), kept[0]["doc_id"])["duplicates"]
    assert len(kept) > module.NUM_REMOVED + 5
    assert duplicates["removed_count"] == len(kept) - 1
    assert len(duplicates["removed"]) == module.NUM_REMOVED
    assert {other["kind"] for other in duplicates["removed"]} == {"url"}
    assert duplicates["cluster"]["documents"] == len(kept)
    for other in duplicates["removed"]:
        assert other["difference"]["kept_words"] == len(many.texts[kept[0]["doc_id"]].split())
        assert other["difference"]["removed_words"] == len(many.texts[bytes.fromhex(other["doc_id"])].split())


def test_a_text_that_is_not_stored_any_more_has_no_difference(tmp_path: Path, found: Listing) -> None:
    write_listing(tmp_path, found, identity="x")
    gone = next(decision for decision in found.decisions if decision["kind"] == "near")
    for path in sorted((tmp_path / "documents").rglob("*.parquet")):
        rows = [row for row in pq.read_table(path).to_pylist() if row["doc_id"] != gone["doc_id"]]
        pq.write_table(pq.read_table(path).from_pylist(rows, DOCUMENT_SCHEMA), path)
    lineage = IndexedRun(str(tmp_path))
    life = life_of(lineage, gone["doc_id"])
    assert life["duplicates"]["decision"]["difference"] is None
    assert life["text"]["why_none"] == "its text is not stored any more"
    survivor = life_of(lineage, gone["duplicate_of"])
    assert [
        other["difference"] is None for other in survivor["duplicates"]["removed"]
        if other["doc_id"] == gone["doc_id"].hex()
    ] == [True]  # fmt: skip
    shutil.rmtree(tmp_path / "documents")
    assert life_of(lineage, gone["doc_id"])["text"]["from"] is None


def test_a_run_without_duplicates_or_tokens_still_tells(tmp_path: Path, found: Listing) -> None:
    write_listing(tmp_path, found, identity="x")
    shutil.rmtree(tmp_path / "duplicates")
    shutil.rmtree(tmp_path / "tokens")
    lineage = IndexedRun(str(tmp_path))
    kept = next(row for row in found.rows if row["stage"] is None)
    life = life_of(lineage, kept["doc_id"])
    assert life["outcome"] == "kept"
    assert life["duplicates"] == {"decision": None, "removed_count": 0, "removed": [], "cluster": None}
    assert (life["span"], life["text"]["from"]) == (None, "documents")
    assert life["text"]["text"] == found.texts[kept["doc_id"]]


def test_registered_training_runs_are_named_once(tmp_path: Path, found: Listing) -> None:
    write_listing(tmp_path, found, identity="x")
    lineage = IndexedRun(str(tmp_path))
    doc_id = found.rows[0]["doc_id"]
    assert life_of(lineage, doc_id)["training_runs"] == []
    lines = [
        json.dumps({"time": "t", "train_run": run, "order": "o", "identities": []}) for run in ("/b", "/a", "/b", "/c")
    ]
    (tmp_path / "consumers.jsonl").write_text("\n".join(lines) + '\n{"time": "torn')
    assert life_of(lineage, doc_id)["training_runs"] == ["/b", "/a", "/c"]


def test_measures_show_their_limit_and_whether_they_failed(tmp_path: Path, found: Listing) -> None:
    changed = listing(**ARGUMENTS)
    row = changed.verdicts["web/part-000.warc.gz"][0]
    row |= {"stage": "quality", "reason": "gopher.mean_word_length", "gopher.mean_word_length": 2.5}
    row["failed_rules"] = ["gopher.mean_word_length", "repetition.dup_line_fraction"]
    row["repetition.dup_line_fraction"] = None
    write_listing(tmp_path, changed, identity="x")
    record = json.loads((tmp_path / "run.json").read_text())
    record["config"]["quality"] = QualityConfig().model_dump(mode="json")
    (tmp_path / "run.json").write_text(json.dumps(record))
    measures = {own["name"]: own for own in life_of(IndexedRun(str(tmp_path)), row["doc_id"])["measures"]}
    assert measures["gopher.mean_word_length"] == {
        "name": "gopher.mean_word_length", "value": 2.5, "failed": True, "limit": {"least": 3.0, "most": 10.0},
    }  # fmt: skip
    assert measures["repetition.dup_line_fraction"]["value"] is None
    assert measures["repetition.dup_line_fraction"]["failed"]
