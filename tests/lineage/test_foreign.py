"""Tables of other programs and other versions of quern: one line that names file and column, never a traceback."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.errors import InputError
from quern.lineage.store import IndexedRun
from quern.lineage.trace import find_document, trace
from support.lineage.runs import Listing, listing, write_listing
from support.lineage.versions import sha256

ARGUMENTS: dict[str, Any] = {"seed": 6, "documents": 40, "files": 1, "sources": ("web",)}
PART = "web/part-000.warc.gz.parquet"
DECISIONS = "duplicates/decisions.parquet"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_listing(tmp_path / "run", listing(**ARGUMENTS), identity="r")
    return tmp_path / "run"


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def replaced(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, column)


def not_utf8(count: int) -> pa.Array:
    """Text whose first item is not UTF-8: Parquet takes it."""
    return pa.array([b"http://a.example/\xff", *[b"x"] * (count - 1)], pa.binary()).view(pa.string())


def kept(found: Listing) -> dict[str, Any]:
    return next(row for row in found.rows if row["post_filter_hash"] is not None)


@pytest.mark.parametrize("name", ["doc_id", "post_filter_hash", "surt", "url", "host"])
def test_a_table_of_verdicts_that_lacks_a_column_is_named(run: Path, name: str) -> None:
    rewrite(run / "verdicts" / PART, lambda table: table.drop_columns([name]))
    with pytest.raises(InputError, match=rf"{PART}: has no column '{name}'; expected a verdict table"):
        IndexedRun(str(run))


@pytest.mark.parametrize("name", ["stage", "source_file", "record_offset", "failed_rules", "language_score"])
def test_a_document_whose_verdict_lacks_a_column_is_named(run: Path, name: str) -> None:
    rewrite(run / "verdicts" / PART, lambda table: table.drop_columns([name]))
    with pytest.raises(InputError, match=rf"{PART}: has no column '{name}'"):
        trace(IndexedRun(str(run)), 0)


@pytest.mark.parametrize("name", ["url", "surt", "host"])
def test_text_that_is_not_utf8_is_named(run: Path, name: str) -> None:
    rewrite(run / "verdicts" / PART, lambda table: replaced(table, name, not_utf8(len(table))))
    with pytest.raises(InputError, match=rf"{PART}: {name}: expected large_string, got string \(Invalid UTF8"):
        IndexedRun(str(run))


def test_other_text_that_is_not_utf8_is_named_by_its_row(run: Path) -> None:
    rewrite(run / "verdicts" / PART, lambda table: replaced(table, "charset", not_utf8(len(table))))
    lineage = IndexedRun(str(run))
    (number,) = lineage.find(doc=pq.read_table(run / "verdicts" / PART, columns=["doc_id"])["doc_id"][0].as_py())
    with pytest.raises(InputError, match=rf"{PART}: row 0: charset: expected UTF-8"):
        trace(lineage, int(number))


@pytest.mark.parametrize(("name", "value"), [("url", 3), ("doc_id", b"short"), ("pre_filter_hash", "text")])
def test_columns_of_another_type_are_named(run: Path, name: str, value: object) -> None:
    rewrite(run / "verdicts" / PART, lambda table: replaced(table, name, pa.array([value] * len(table))))
    with pytest.raises(InputError, match=rf"{PART}: {name}: expected "):
        IndexedRun(str(run))


@pytest.mark.parametrize(("name", "value"), [("record_offset", "far"), ("failed_rules", 3), ("fetched_at", "x")])
def test_a_value_of_another_type_is_named_by_its_row(run: Path, name: str, value: object) -> None:
    rewrite(run / "verdicts" / PART, lambda table: replaced(table, name, pa.array([value] * len(table))))
    with pytest.raises(InputError, match=rf"{PART}: row [0-9]+: {name}: expected "):
        trace(IndexedRun(str(run)), 0)


@pytest.mark.parametrize(
    ("table", "name", "asked"),
    [
        (f"verdicts/{PART}", "surt", False),
        (f"verdicts/{PART}", "stage", True),
        (f"verdicts/{PART}", "num_words", True),
        (DECISIONS, "duplicate_of", False),
        (DECISIONS, "band", True),
        ("tokens/web/shard_00000.spans.parquet", "start", False),
    ],
)
def test_a_column_that_stands_twice_is_named(run: Path, table: str, name: str, asked: bool) -> None:
    """``asked``: not by the index, but by who asks for a document."""
    rewrite(run / table, lambda own: pa.table([*own.columns, own[name]], [*own.column_names, name]))
    if table.startswith("tokens"):
        listed_anew(run)
    doc_id = listing(**ARGUMENTS).decisions[0]["doc_id"].hex()
    lineage = IndexedRun(str(run)) if asked else None
    with pytest.raises(InputError, match=rf"{table}: has 2 columns '{name}', expected one"):
        IndexedRun(str(run)) if lineage is None else trace(lineage, find_document(lineage, doc_id))


def listed_anew(run: Path) -> None:
    """The SHA-256 of spans files that were rewritten."""
    tokens = run / "tokens"
    version = json.loads((tokens / "VERSION.json").read_text())
    for source, entry in version["sources"].items():
        manifest = json.loads((tokens / entry["manifest"]).read_text())
        for shard, own in zip(entry["shards"], manifest["shards"], strict=True):
            shard["spans_sha256"] = own["spans_sha256"] = sha256(tokens / source / own["spans"])
        (tokens / entry["manifest"]).write_text(json.dumps(manifest))
        entry["sha256"] = sha256(tokens / entry["manifest"])
    (tokens / "VERSION.json").write_text(json.dumps(version))


@pytest.mark.parametrize(
    "column",
    [
        pa.array([1 << 60]).cast(pa.timestamp("us", tz="UTC")),
        pa.array([1 << 60]).cast(pa.timestamp("us", tz="Nowhere/Never")),
        pa.array([-(1 << 50)]).cast(pa.timestamp("ms", tz="UTC")),
    ],
)
def test_a_time_that_python_has_not_is_named(run: Path, column: pa.Array) -> None:
    rewrite(
        run / "verdicts" / PART, lambda table: replaced(table, "fetched_at", column.take(pa.array([0] * len(table))))
    )
    with pytest.raises(InputError, match=rf"{PART}: row [0-9]+: fetched_at: expected timestamp"):
        trace(IndexedRun(str(run)), 0)


def test_columns_that_nobody_asks_for_are_not_read(run: Path) -> None:
    """A time in nanoseconds, in a zone that nobody knows, text that is not UTF-8."""

    def add(table: pa.Table) -> pa.Table:
        strange = pa.array([1] * len(table))
        table = table.append_column("x", strange.cast(pa.timestamp("ns", tz="Nowhere/Never")))
        return table.append_column("y", not_utf8(len(table))).append_column("measured", strange.cast(pa.float64()))

    rewrite(run / "verdicts" / PART, add)
    found = {measure["name"]: measure["value"] for measure in trace(IndexedRun(str(run)), 0)["measures"]}
    assert found["measured"] == 1.0
    assert not {"x", "y"} & {*found}


def test_tables_of_decisions(run: Path) -> None:
    found = listing(**ARGUMENTS)
    doc_id = found.decisions[0]["doc_id"].hex()
    whole = pq.read_table(run / DECISIONS)
    for name, message in (("band", "has no column 'band'"), ("similarity", "has no column 'similarity'")):
        pq.write_table(whole.drop_columns([name]), run / DECISIONS)
        lineage = IndexedRun(str(run))
        with pytest.raises(InputError, match=rf"{DECISIONS}: {message}"):
            trace(lineage, find_document(lineage, doc_id))
    pq.write_table(replaced(whole, "similarity", pa.array(["near"] * len(whole))), run / DECISIONS)
    lineage = IndexedRun(str(run))
    with pytest.raises(InputError, match=rf"{DECISIONS}: row 0: similarity: expected double, got string"):
        trace(lineage, find_document(lineage, doc_id))
    pq.write_table(whole.drop_columns(["duplicate_of"]), run / DECISIONS)
    with pytest.raises(InputError, match=rf"{DECISIONS}: has no column 'duplicate_of'"):
        IndexedRun(str(run))


def test_tables_of_documents(run: Path) -> None:
    doc_id = kept(listing(**ARGUMENTS))["doc_id"].hex()
    path = run / "documents" / PART
    whole = pq.read_table(path)
    count = len(whole)
    changed = {
        "has no column 'text'": whole.drop_columns(["text"]),
        "has no column 'doc_id'": whole.drop_columns(["doc_id"]),
        "text: expected UTF-8": replaced(whole, "text", pa.array([b"\xff"] * count).view(pa.string())),
        "text: expected string, got int64": replaced(whole, "text", pa.array([1] * count)),
    }
    for message, table in changed.items():
        pq.write_table(table, path)
        lineage = IndexedRun(str(run))
        with pytest.raises(InputError, match=re.escape(f"{path}: {message}")):
            trace(lineage, find_document(lineage, doc_id))
    pq.write_table(replaced(whole, "text", pa.array([None] * count, pa.string())), path)
    lineage = IndexedRun(str(run))
    life = trace(lineage, find_document(lineage, doc_id))
    assert life["text"]["text"] != "None"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop_columns(["purged"]), "has no column 'purged'; expected a table of spans"),
        (lambda table: replaced(table, "start", pa.array(["x"] * len(table))), "start: expected int64, got string"),
        (
            lambda table: replaced(table, "purged", pa.array([None] * len(table), pa.bool_())),
            "purged: expected a value in every row, got null",
        ),
    ],
)
def test_tables_of_spans(run: Path, change: Callable[[pa.Table], pa.Table], message: str) -> None:
    import hashlib

    root = run / "tokens"
    version = json.loads((root / "VERSION.json").read_text())
    path = root / version["sources"]["web"]["shards"][0]["spans"]
    rewrite(path, change)
    text = hashlib.sha256(path.read_bytes()).hexdigest()
    old = version["sources"]["web"]["shards"][0]["spans_sha256"]
    manifest = root / "web" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(old, text))
    listed = version["sources"]["web"] | {"sha256": hashlib.sha256(manifest.read_bytes()).hexdigest()}
    version["sources"]["web"] = listed
    (root / "VERSION.json").write_text(json.dumps(version).replace(old, text))
    with pytest.raises(InputError, match=re.escape(f"{path}: {message}")):
        IndexedRun(str(run))


@pytest.mark.parametrize("name", ["../web", "/etc", "web/../web", "Web", "web.val.val", "", "a b", "web\n"])
def test_a_version_with_a_source_of_another_name_is_refused(run: Path, name: str) -> None:
    path = run / "tokens" / "VERSION.json"
    version = json.loads(path.read_text())
    version["sources"][name] = version["sources"]["web"]
    path.write_text(json.dumps(version))
    with pytest.raises(InputError, match=r"VERSION.json: sources: expected <source> or <source>.val, got "):
        IndexedRun(str(run))
