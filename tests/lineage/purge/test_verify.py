"""The proof of tokens and tables: a fault is planted by hand, and its check names it with its file and row."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern import storage
from quern.lineage.purge.proof import check_tokens
from quern.lineage.purge.proof.verify import verify
from support.damage import flip
from support.purge import purge_case as P
from support.purge.proof_case import below, failed, kept, prove, put_back, relist, spot

pytestmark = pytest.mark.slow

# ---- a run from which nothing is missing


def test_a_purged_run_holds(case: P.Case) -> None:
    found = prove(case, deep=True)
    assert [(check.name, check.status) for check in found.checks] == [
        (name, "pass")
        for name in (
            "audit", "tokens", "checksums", "documents", "signatures", "verdicts", "files", "left over", "other files",
            "purge list", "pages",
        )
    ]  # fmt: skip
    assert (found.version, found.purges, found.documents, found.holds) == (2, 1, len(case.deletion_set), True)
    tokens, documents = found.checks[1].counts, found.checks[3].counts
    spans = [row for rows in case.listing.spans.values() for row in rows]
    assert tokens["spans"] == len(spans)
    assert tokens["tokens"] == sum(row["length"] for row in spans)
    assert tokens["purged spans"] == len(case.placed) > 10
    assert tokens["texts compared"] == len(spans) - len(case.placed)
    assert documents["purged rows"] == sum(doc_id in case.listing.texts for doc_id in case.deletion_set)


def test_files_are_read_by_threads_of_python_alone(case: P.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of pyarrow's own that lets go of a file's bytes while the process ends aborts it."""
    readers = set()

    class Noted(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            readers.add(type(threading.current_thread()))
            return super().read(-1 if size is None else size)

    class NotedBytes(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            readers.add(type(threading.current_thread()))
            return super().read(size)

    monkeypatch.setattr(storage, "open_read", lambda path, fingerprint=None: Noted(storage.split(path)[1]))
    monkeypatch.setattr(io, "BytesIO", NotedBytes)
    assert prove(case, deep=True).holds
    assert readers == {threading.Thread, type(threading.main_thread())}  # and no thread that Python did not start


def test_a_run_that_was_never_purged_holds(made: P.Case) -> None:
    found = verify(str(made.run))
    assert found.holds
    assert (found.purges, found.documents, found.version) == (0, 0, 1)


def test_what_was_not_done_is_found(made: P.Case, tmp_path: Path) -> None:
    """An audit entry alone purges nothing: every place that can hold a text is named."""
    case = made.at(tmp_path / "copy")
    listed = P.write_purge_list(case)
    P.append(str(case.run), P.told(purge_list=listed), case.table(), ())
    found = verify(str(case.run))
    counts = {check.name: check.num_findings for check in found.checks if check.num_findings}
    rows = [row for own in case.listing.documents.values() for row in own if row["doc_id"] in case.deletion_set]
    assert counts["tokens"] == len(case.placed)
    assert counts["documents"] == len(rows) + sum(row["extracted"] is not None for row in rows)
    assert counts["signatures"] == sum(row["kept"] for row in rows)
    assert counts.keys() == {"tokens", "documents", "signatures", "pages"}


# ---- tokens


def test_a_span_that_is_not_marked(case: P.Case) -> None:
    doc_id = case.placed[3]
    _, spans, number, _ = spot(case, doc_id)
    altered(spans, number, purged=False)
    relist(case)
    found = failed(case)
    assert found["tokens"] == [(below(case, spans), number, doc_id.hex())]
    assert {name for name, _, _ in found["files"]} == {below(case, spans), _manifest(case, spans)}


def altered(path: Path, number: int, **more: Any) -> None:
    """Write other fields into one row of a table."""
    row_group, fields = more.pop("row_group", None), more
    table = pq.read_table(path)
    rows = table.to_pylist()
    rows[number] |= fields
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path, row_group_size=row_group)


def row_of(path: Path, doc_id: bytes) -> int:
    return pq.read_table(path)["doc_id"].to_pylist().index(doc_id)


def _manifest(case: P.Case, spans: Path) -> str:
    return f"tokens/{spans.parent.name}/manifest.v2.json"


def test_one_token_put_back(case: P.Case) -> None:
    for place in ("first", "last"):
        doc_id = max(case.placed, key=lambda own: len(case.listing.texts[own]))
        shard, _, _, row = spot(case, doc_id)
        tokens = np.fromfile(shard, "<u2")
        at = row["start"] if place == "first" else row["start"] + row["length"] - 1
        old, tokens[at] = tokens[at], 65
        tokens.tofile(shard)
        relist(case)
        assert failed(case)["tokens"] == [(below(case, shard), None, doc_id.hex())]
        tokens[at] = old
        tokens.tofile(shard)


def test_tokens_are_found_wherever_blocks_begin(case: P.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    doc_id = max(case.placed, key=lambda own: len(case.listing.texts[own]))
    shard, _, _, row = spot(case, doc_id)
    tokens = np.fromfile(shard, "<u2")
    tokens[row["start"] + row["length"] - 2] = 65  # far behind the block in which the span begins
    tokens.tofile(shard)
    relist(case)
    for size in (7, 1001):
        monkeypatch.setattr(check_tokens, "_BLOCK", size)
        assert failed(case)["tokens"] == [(below(case, shard), None, doc_id.hex())]


@pytest.mark.parametrize("stretch", [1, 100, 1 << 20])
def test_the_text_under_another_name(case: P.Case, monkeypatch: pytest.MonkeyPatch, stretch: int) -> None:
    """The very text of a purged document in the place of another: only --deep can know."""
    monkeypatch.setattr(check_tokens, "_STRETCH", stretch)
    texts = case.listing.texts
    pairs = [
        (gone, own)
        for gone in case.placed
        for own in kept(case)
        if len(texts[gone].encode()) == len(texts[own].encode()) and texts[gone] != texts[own]
    ]
    gone, own = pairs[0]
    shard, spans, number, row = spot(case, own)
    put_back(shard, row, texts[gone])
    relist(case)
    assert "tokens" not in failed(case)
    assert failed(case, deep=True)["tokens"] == [(below(case, spans), number, own.hex())]


def test_a_document_with_a_purged_text_that_was_not_condemned(case: P.Case) -> None:
    """By its verdict, without a look at texts; its tokens and its stored text are named."""
    gone, own = case.deletion_set[0], kept(case)[5]
    assert case.row_of[gone]["post_filter_hash"]
    name = case.row_of[own]["file"]
    path = case.run / "verdicts" / name
    altered(path, row_of(path, own), post_filter_hash=case.row_of[gone]["post_filter_hash"])
    _, spans, number, _ = spot(case, own)
    found = failed(case)
    assert found["tokens"] == [(below(case, spans), number, own.hex())]
    assert (f"documents/{name}", own.hex()) in [(file, who) for file, _, who in found["documents"]]


def test_a_document_under_a_purged_url_that_was_not_condemned(case: P.Case) -> None:
    gone = next(doc_id for doc_id in case.deletion_set if case.row_of[doc_id]["canonical_url"])
    own = kept(case)[7]
    path = case.run / "verdicts" / case.row_of[own]["file"]
    scheme, _, rest = case.row_of[gone]["canonical_url"].partition("://")
    altered(path, row_of(path, own), canonical_url=f"{'https' if scheme == 'http' else 'http'}://{rest}")
    _, spans, number, _ = spot(case, own)
    assert failed(case)["tokens"] == [(below(case, spans), number, own.hex())]


@pytest.mark.parametrize("what", ["shard", "spans", "manifest", "ranks"])
def test_a_file_that_is_not_as_listed(case: P.Case, what: str) -> None:
    shard, spans, _, _ = spot(case, kept(case)[0])
    path = {
        "shard": shard, "spans": spans, "manifest": shard.parent / "manifest.v2.json",
        "ranks": case.run / "tokens/encoding.tiktoken",
    }[what]  # fmt: skip
    if what == "spans":
        table = pq.read_table(path)
        pq.write_table(table.replace_schema_metadata({"a": "b"}), path)
    elif what == "shard":
        flip(path, 0)
    else:
        path.write_bytes(path.read_bytes() + b"\n")
    assert failed(case)["checksums"] == [(below(case, path), None, None)]
    path.unlink()
    assert failed(case)["checksums"] == [(below(case, path), None, None)]


def test_spans_with_a_gap(case: P.Case) -> None:
    """Tokens between two spans are nobody's; something could hide there."""
    _, spans, _, _ = spot(case, kept(case)[0])
    table = pq.read_table(spans)
    pq.write_table(table.slice(1), spans)
    relist(case)
    assert failed(case)["tokens"] == [(below(case, spans), None, None)]


def test_spans_that_cannot_be_read_are_named_once(case: P.Case) -> None:
    _, spans, _, _ = spot(case, kept(case)[0])
    spans.write_bytes(b"no table")
    (finding,) = (own for check in prove(case).checks for own in check.findings if check.name == "tokens")
    assert finding.file == below(case, spans)
    assert str(spans) not in finding.what
    assert "cannot be read" in finding.what


# ---- tables


@pytest.mark.parametrize("column", ["text", "extracted"])
def test_a_text_put_back(case: P.Case, column: str) -> None:
    doc_id = next(own for own in case.deletion_set if own in case.listing.texts)
    name = case.row_of[doc_id]["file"]
    path = case.run / "documents" / name
    number = row_of(path, doc_id)
    altered(path, number, **{column: "some text"}, row_group=P.runs.ROW_GROUP)
    found = failed(case)
    assert found["documents"] == [(f"documents/{name}", number, doc_id.hex())]
    assert found["files"] == [(f"documents/{name}", None, None)]


def test_the_text_in_another_row(case: P.Case) -> None:
    gone = next(own for own in case.deletion_set if own in case.listing.texts)
    own = next(doc_id for doc_id in kept(case))
    name = case.row_of[own]["file"]
    path = case.run / "documents" / name
    number = row_of(path, own)
    altered(path, number, extracted=case.listing.texts[gone])
    assert "documents" not in failed(case)
    assert failed(case, deep=True)["documents"] == [(f"documents/{name}", number, own.hex())]


def test_a_signature_put_back(case: P.Case, made: P.Case) -> None:
    signed = {
        row["doc_id"]: path
        for path in (made.run / "signatures").rglob("*.parquet")
        for row in pq.read_table(path, columns=["doc_id"]).to_pylist()
    }
    doc_id = next(own for own in case.deletion_set if own in signed)
    path = case.run / signed[doc_id].relative_to(made.run)
    old = pq.read_table(signed[doc_id])
    left = pq.read_table(path)
    row = [own["doc_id"] for own in old.to_pylist()].index(doc_id)
    pq.write_table(pa.concat_tables([left, old.slice(row, 1)]), path)
    found = failed(case)["signatures"]
    assert found == [(below(case, path), len(left), doc_id.hex())]


def test_a_damaged_table_is_named(case: P.Case) -> None:
    path = case.run / "documents" / case.row_of[case.placed[0]]["file"]
    path.write_bytes(path.read_bytes()[:50])
    assert failed(case)["documents"] == [(below(case, path), None, None)]
