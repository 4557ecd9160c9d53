"""What the options select, and what is said where they select nothing."""

from __future__ import annotations

import io
import json
import shutil
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quern import storage
from quern.data_pipeline.page import url as urls
from quern.errors import InputError
from quern.lineage.match import match
from quern.lineage.purge.selection.deletion_set import find_deletion_set
from quern.lineage.purge.selection.select import Wanted, select
from quern.lineage.store import IndexedRun
from support.lineage import runs


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> str:
    return str(shutil.copytree(pristine, tmp_path / "run"))


@pytest.fixture(scope="module")
def found() -> runs.Listing:
    return runs.listing(seed=4, documents=240, files=6)


def selected(run: str, wanted: Wanted, **options: Any) -> set[bytes]:
    """Those that are condemned for their own sake."""
    rows = find_deletion_set(run, wanted, **options).to_pylist()
    return {row["doc_id"] for row in rows if row["why"] == "selected"}


def of_url(found: runs.Listing, url: str) -> set[bytes]:
    """The records whose URL has the same canonical form, whatever its scheme."""
    rest = str(urls.canonicalize(url)).partition("://")[2]
    made = ((row["doc_id"], urls.canonicalize(row["url"] or "")) for row in found.rows)
    return {doc_id for doc_id, canonical in made if canonical and canonical.partition("://")[2] == rest}


def test_a_url_is_selected_in_every_spelling(run: str, found: runs.Listing) -> None:
    url = next(row["canonical_url"] for row in found.rows if (row["canonical_url"] or "").startswith("http://example."))
    rest = url.removeprefix("http://")
    for given in (url, f"https://{rest}", f"HTTP://EXAMPLE{rest.removeprefix('example')}#part", f"http://a:b@{rest}"):
        assert selected(run, select(run, {"url": [given]})) == of_url(found, url) != set()


def test_both_schemes_of_a_url_are_one(run: str, found: runs.Listing) -> None:
    url = next(row["canonical_url"] for row in found.rows if (row["canonical_url"] or "").startswith("http://example."))
    wanted = select(run, {"url": [url, url.replace("http:", "https:")]})
    assert selected(run, wanted) == of_url(found, url)


def test_what_has_no_canonical_form_is_selected_as_it_is_spelled(run: str, found: runs.Listing) -> None:
    spelled = {row["url"] for row in found.rows if row["url"] and urls.canonicalize(row["url"]) is None}
    assert len(spelled) > 3
    for url in spelled:
        assert selected(run, select(run, {"url": [url]})) == {r["doc_id"] for r in found.rows if r["url"] == url}


def test_a_page_that_was_quarantined_is_selected_by_its_url(run: str, found: runs.Listing) -> None:
    row = next(row for row in found.rows if row["stage"] == "quarantine" and urls.canonicalize(row["url"] or ""))
    assert row["canonical_url"] is None
    assert row["doc_id"] in selected(run, select(run, {"url": [row["url"]]}))


def test_options_of_a_kind_repeat_and_held_out_documents_count(run: str, found: runs.Listing) -> None:
    held_out = {span["doc_id"] for stream, spans in found.spans.items() for span in spans if stream.endswith(".val")}
    ids = [found.rows[3]["doc_id"], *sorted(held_out)[:2]]
    given = [ids[0].hex(), ids[1].hex().upper(), ids[2].hex(), ids[0].hex()]
    assert selected(run, select(run, {"doc": given})) == set(ids)
    domains = ["EXAMPLE.org", "xn--bcher-kva.example", "bücher.example"]
    hosts = {"example.org", "xn--bcher-kva.example"}
    made = ((row["doc_id"], urls.canonicalize(row["url"] or "")) for row in found.rows)
    expected = {doc_id for doc_id, url in made if url and urls.host(url) in hosts}
    assert selected(run, select(run, {"domain": domains})) == expected != set()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"url": ["https://gone.example/"]}, r"has no document of URL: https://gone\.example/"),
        ({"url": ["gone.example/"]}, r"has no document of URL: gone\.example/ \(it is no http or https URL\)"),
        ({"domain": ["gone.example"]}, r"has no document of host: gone\.example"),
        ({"doc": ["0" * 32]}, r"has no document of doc_id: 0{32}"),
        ({"url": [f"https://gone.example/{n}" for n in range(7)]}, r"of 7 URLs: .*/0, .*/4 and 2 more"),
        ({"url": ["gone\x1b\nurl"]}, r"of URL: gone"),
    ],
)
def test_what_is_not_there_is_named(run: str, given: dict[str, list[str]], says: str) -> None:
    with pytest.raises(InputError, match=says) as raised:
        find_deletion_set(run, select(run, given))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "expected one of --url, .* and --sql, got none"),
        ({"url": [], "sql": []}, "got none"),
        ({"url": ["https://a.example/"], "doc": ["0" * 32]}, "got --url and --doc"),
        ({"doc": ["abc"]}, "--doc: expected 32 hex digits, got 'abc'"),
        ({"domain": ["https://a.example/"]}, "--domain: expected a host"),
        ({"domain": ["a.example:8080"]}, "--domain: expected a host"),
        ({"urls-file": ["/nowhere/urls"]}, "/nowhere/urls: no such file"),
        ({"urls-file": ["/"]}, "/: cannot be read"),
        ({"match": ["/nowhere/b.jsonl"]}, r"/nowhere/b\.jsonl: no such file"),
        ({"sql": ["SELECT 1 AS x"]}, "--sql: expected a query with a column doc_id, got x"),
        ({"sql": ["SELECT doc_id FROM verdicts WHERE false"]}, "--sql: .*: it gives no document"),
        ({"sql": ["SELECT 'a' AS doc_id"]}, "--sql: row 0: doc_id: expected 32 hex digits, got 'a'"),
        ({"sql": ["SELECT NULL AS doc_id"]}, "--sql: row 0: doc_id: expected 32 hex digits, got None"),
        ({"sql": ["COPY (SELECT 1) TO '/tmp/x'"]}, "sql: expected SELECT"),
    ],
)
def test_what_is_no_selection_is_refused(run: str, given: dict[str, list[str]], says: str) -> None:
    with pytest.raises(InputError, match=says):
        select(run, given)


# ---- a file of URLs


def test_a_file_of_urls(run: str, found: runs.Listing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the run does not have is told, and is no error as long as it has one."""
    own = [row["canonical_url"] for row in found.rows if row["canonical_url"]][:3]
    text = f"{own[0]}\r\n\n  {own[1]}  \n{own[2]}\nhttps://gone.example/1\nhttps://gone.example/2".encode()
    (tmp_path / "urls").write_bytes(text)
    expected = set().union(*(of_url(found, url) for url in own))
    notes: list[str] = []
    wanted = select(run, {"urls-file": [str(tmp_path / "urls")]})
    assert selected(run, wanted, note=notes.append) == expected
    assert notes == [f"{run}: has no document of 2 URLs: https://gone.example/1, https://gone.example/2"]
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text)))
    assert select(run, {"urls-file": ["-"]}) == wanted
    (tmp_path / "urls").write_bytes(b"\xef\xbb\xbf" + text)
    assert select(run, {"urls-file": [str(tmp_path / "urls")]}) == wanted
    (tmp_path / "urls").write_text("https://gone.example/1\n")
    with pytest.raises(InputError, match="has no document of URL: https://gone"):
        find_deletion_set(run, select(run, {"urls-file": [str(tmp_path / "urls")]}))


def test_bad_lines_of_a_file_are_numbered(tmp_path: Path) -> None:
    lines = ["https://a.example/", "no url", "", "ftp://a.example/", "https://b.example/" + "x" * 200_000, "\x1b[31m"]
    path = tmp_path / "urls"
    path.write_bytes("\n".join(lines).encode() + b"\nhttps://a.example/\xff\nhttps://a.example/\n" + b"bad\n" * 9)
    says = r"urls: expected .* line 2: 'no url'; line 4: 'ftp.*'; line 5: 'https://b.*'; line 6: '.x1b.*'; line 7: .*"
    with pytest.raises(InputError, match=f"{says}; and 9 more lines") as raised:
        select("run", {"urls-file": [str(path)]})
    assert len(str(raised.value)) < 600
    path.write_text("\n\n")
    with pytest.raises(InputError, match="found none"):
        select("run", {"urls-file": [str(path)]})


# ---- what matches, what a query finds


@pytest.mark.slow
def test_a_query_selects(run: str, found: runs.Listing) -> None:
    sql = "SELECT url, doc_id FROM verdicts WHERE language = 'de' AND source = 'web'"
    expected = {row["doc_id"] for row in found.rows if row["language"] == "de" and row["source"] == "web"}
    assert selected(run, select(run, {"sql": [sql]})) == expected
    one = "SELECT min(doc_id) AS doc_id FROM verdicts"
    assert selected(run, select(run, {"sql": [sql, one]})) == expected | {min(row["doc_id"] for row in found.rows)}


@pytest.mark.slow
def test_a_benchmark_selects_what_holds_text_of_it(
    run: str, found: runs.Listing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a result that was kept, and not one of another run."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # no processes for so little
    placed = [span["doc_id"] for spans in found.spans.values() for span in spans if not span["purged"]]
    target = max(placed, key=lambda doc_id: len(found.texts[doc_id]))
    item = " ".join(found.texts[target].split()[20:60])
    benchmark = tmp_path / "benchmark.jsonl"
    benchmark.write_text(json.dumps({"question": item}) + "\n" + json.dumps({"question": "too short"}) + "\n")
    expected = set(match(IndexedRun(run), str(benchmark)).doc_ids)
    assert target in expected
    notes: list[str] = []
    assert selected(run, select(run, {"match": [str(benchmark)]}, note=notes.append)) == expected
    assert "1 items have too few words" in notes[0]
    kept = str(tmp_path / "kept.parquet")
    match(IndexedRun(run), str(benchmark)).save(kept)
    assert selected(run, select(run, {"match": [kept]})) == expected
    other = runs.write_run(tmp_path / "other", seed=5, documents=60)
    with pytest.raises(InputError, match="of another data run"):
        select(str(other), {"match": [kept]})
    benchmark.write_text(json.dumps({"question": "nobody has ever written these words in this order before now"}))
    with pytest.raises(InputError, match="no document holds text of it"):
        select(run, {"match": [str(benchmark)]})


# ---- a run on a store


def test_on_a_store_the_same_is_condemned_and_what_needs_an_index_is_refused(run: str, found: runs.Listing) -> None:
    away = f"memory:///{uuid.uuid4().hex}/run"
    for path in storage.list_files(run):
        if "/verdicts/" in path or "/duplicates/" in path:
            storage.publish_bytes(storage.join(away, path.removeprefix(f"{run}/")), storage.read_bytes(path))
    given = {"url": [next(row["url"] for row in found.rows if row["canonical_url"])]}
    here = find_deletion_set(run, select(run, given))
    assert (
        find_deletion_set(away, select(away, given), rows_at_once=10)
        .drop(["why", "through"])
        .equals(here.drop(["why", "through"]))
    )
    for kind in ("match", "sql"):
        with pytest.raises(InputError, match=f"memory.*: --{kind} reads the run's index"):
            select(away, {kind: ["x"]})
