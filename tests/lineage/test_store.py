"""Every answer of an indexed run against brute force over the rows that were written."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quern.data_pipeline.page.url import canonicalize, host, surt
from quern.errors import InputError
from quern.lineage.store import IndexedRun, Stream
from support.lineage import runs
from support.named_cases import each

pytestmark = pytest.mark.slow

Row = dict[str, Any]


class Oracle:
    """The rows of a run in the order of their numbers, by Python's own sort."""

    def __init__(self, found: runs.Listing) -> None:
        self.found = found
        rows = found.rows
        for row in rows:
            canonical = None if row["url"] is None else canonicalize(row["url"])
            row["canonical"] = canonical
            row["key"] = None if canonical is None else surt(canonical)
            row["name"] = None if canonical is None else host(canonical)
        self.rows = sorted(rows, key=self._place)
        self.number = {row["doc_id"]: number for number, row in enumerate(self.rows)}
        self.spans = {
            span["doc_id"]: (stream, span) for stream, spans in found.spans.items() for span in spans
        }  # fmt: skip

    @staticmethod
    def _place(row: Row) -> tuple:
        if row["key"] is not None:
            return (0, row["key"].encode(), row["doc_id"])
        if row["url"] is not None:
            return (1, row["url"].encode(), row["doc_id"])
        return (2, b"", row["doc_id"])

    def where(self, fits: Callable[[Row], bool]) -> list[int]:
        return [number for number, row in enumerate(self.rows) if fits(row)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.write_run(tmp_path_factory.mktemp("store") / "run", seed=3, documents=500)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(runs.listing(seed=3, documents=500))


@pytest.fixture(scope="module")
def lineage(run: Path) -> IndexedRun:
    return IndexedRun(str(run))


def test_documents_are_numbered_by_surt_then_by_url_then_by_doc_id(lineage: IndexedRun, oracle: Oracle) -> None:
    found = lineage.documents(np.arange(lineage.num_documents))
    assert found.doc_ids == [row["doc_id"] for row in oracle.rows]
    assert found.urls == [row["url"] for row in oracle.rows]
    assert found.sources == [row["source"] for row in oracle.rows]


def test_documents_come_in_the_order_asked_for_and_as_often(lineage: IndexedRun, oracle: Oracle) -> None:
    numbers = [5, 440, 5, 0, 499]
    assert lineage.documents(numbers).doc_ids == [oracle.rows[number]["doc_id"] for number in numbers]
    assert lineage.documents([]).doc_ids == []


@pytest.mark.parametrize("number", [-1, 500])
def test_a_number_that_no_document_has_is_refused(lineage: IndexedRun, number: int) -> None:
    for call in (lineage.documents, lineage.verdict, lineage.decision, lineage.spans_of):
        with pytest.raises(IndexError, match="expected documents 0 to 499"):
            call(number)


def test_every_document_is_found_by_its_doc_id(lineage: IndexedRun, oracle: Oracle) -> None:
    for number, row in enumerate(oracle.rows):
        assert lineage.find(doc=row["doc_id"]).tolist() == [number]
        assert lineage.find(doc=row["doc_id"].hex().upper()).tolist() == [number]
        other = row["doc_id"][:15] + bytes([row["doc_id"][15] ^ 1])  # the first eight bytes are the same
        assert lineage.find(doc=other).tolist() == []


def test_many_doc_ids_are_found_at_once(lineage: IndexedRun, oracle: Oracle) -> None:
    draw = random.Random(2)
    known = list(oracle.number)
    near = [doc_id[:8] + draw.randbytes(8) for doc_id in draw.sample(known, 50)]  # its first half is a document's
    for count in (0, 1, 40, len(known)):
        chosen = draw.sample(known, count)
        asked = [*chosen, *chosen[:7], *near, b"\0" * 16, b"\xff" * 16]
        draw.shuffle(asked)
        assert lineage.find_docs(b"".join(asked)).tolist() == sorted(oracle.number[doc_id] for doc_id in chosen)
    assert lineage.find_docs(b"").tolist() == []


def test_every_url_finds_all_that_canonicalise_alike(lineage: IndexedRun, oracle: Oracle) -> None:
    for url in sorted({row["url"] for row in oracle.rows} - {None}):
        canonical = canonicalize(url)
        key, value = ("url", url) if canonical is None else ("canonical", canonical)
        expected = oracle.where(lambda row, key=key, value=value: row[key] == value)
        assert lineage.find(url=url).tolist() == expected, url


def test_other_spellings_of_a_url_find_it_and_near_ones_do_not(lineage: IndexedRun, oracle: Oracle) -> None:
    row = next(row for row in oracle.rows if row["canonical"] and row["canonical"].startswith("http://example.com/a/"))
    url = row["canonical"]
    expected = oracle.where(lambda row: row["canonical"] == url)
    path = url.removeprefix("http://example.com")
    question = "&" if "?" in path else "?"
    for other in (
        f"HTTP://EXAMPLE.com:80{path}", f"http://u:p@example.com/x/..{path}", f" {url}{question}utm_source=feed#top",
    ):  # fmt: skip
        assert lineage.find(url=other).tolist() == expected
    secure = f"https://example.com{path}"
    assert lineage.find(url=secure).tolist() == oracle.where(lambda row: row["canonical"] == secure) or expected
    for other in (f"http://www.example.com{path}", f"{url}{question}b=1"):
        assert lineage.find(url=other).tolist() == oracle.where(lambda row, o=other: row["canonical"] == o)


def test_hashes_find_all_pages_of_a_text_before_or_after_the_filters(lineage: IndexedRun, oracle: Oracle) -> None:
    hashes = {row[name] for row in oracle.rows for name in ("pre_filter_hash", "post_filter_hash")} - {None}
    for value in hashes:
        expected = oracle.where(lambda row, v=value: v in (row["pre_filter_hash"], row["post_filter_hash"]))
        assert lineage.find(hash=value).tolist() == expected
        assert lineage.find(hash=value[:8] + bytes(8)).tolist() == []
    assert max(len(lineage.find(hash=value)) for value in hashes) > 2


def test_surt_prefixes(lineage: IndexedRun, oracle: Oracle) -> None:
    draw = random.Random(1)
    keys = sorted({row["key"] for row in oracle.rows} - {None})
    prefixes = ["", "com", "com,example", "com,example)", "com,example)/a/1", "zz", "com,example)/caf%c3"]
    prefixes += [key[: draw.randint(1, len(key))] for key in draw.sample(keys, 50)] + keys[:5] + keys[-5:]
    for prefix in prefixes:
        expected = oracle.where(lambda row, p=prefix: row["key"] is not None and row["key"].startswith(p))
        assert lineage.find(surt=prefix).tolist() == expected, prefix


HOSTS = [
    "example.com", "EXAMPLE.COM", "example.com.", "www.example.com", "www2.example.com", "blog.example.com", "www.com",
    "example.org", "com", "org", "bücher.example", "xn--bcher-kva.example", "example", "192.0.2.7", "0xC0000207",
    "2.7", "[2001:db8::1]", "[2001:DB8:0::1]", "2001", "uk", "co.uk", "пример.рф", "localhost", "e", "a.b.example.com",
    "b.example.com", "example.com.evil.org", "no.such.host", "a.com", "a,b.com", "db8", "example-site.com",
]  # fmt: skip


def check_host(lineage: IndexedRun, oracle: Oracle, name: str) -> None:
    own = host(canonicalize(f"http://{name}/") or "")
    assert lineage.find(host=name).tolist() == oracle.where(lambda row: row["name"] == own)
    below = oracle.where(lambda row: row["name"] is not None and f".{row['name']}".endswith(f".{own}"))
    assert lineage.find(domain=name).tolist() == below, name


def test_a_host_and_a_domain_are_what_the_rows_hosts_say(lineage: IndexedRun, oracle: Oracle) -> None:
    each(HOSTS, lambda name: check_host(lineage, oracle, name))


def test_hosts_with_the_marks_of_a_surt_are_no_false_hits(tmp_path: Path) -> None:
    found = runs.listing(documents=60, files=1, sources=("web",))
    (rows,) = found.verdicts.values()
    names = [
        "a,b.com",
        "b.a.com",
        "a.com",
        "a)x.com",
        "x.a).com",
        "[abcd::1]",
        "abcd",
        "x.abcd",
        "a.com:81",
        "www.a.com",
    ]
    for row, name in zip(rows, names * 6, strict=True):
        row["url"] = f"http://{name}/"
        row["canonical_url"] = canonical = canonicalize(row["url"])
        row["surt"] = surt(canonical or "")
        row["host"] = host(canonical or "")
    runs.write_listing(tmp_path / "run", found, identity="odd")
    lineage, oracle = IndexedRun(str(tmp_path / "run")), Oracle(found)
    for name in ("a.com", "b.com", "com", "abcd", "www.a.com", "a,b.com", "[abcd::1]"):
        check_host(lineage, oracle, name)


@pytest.mark.parametrize("name", ["", "example.com/x", "example.com:8080", "a b", "http://example.com", "a@b", "%zz"])
def test_what_is_no_host_is_refused(lineage: IndexedRun, name: str) -> None:
    for asked in ({"host": name}, {"domain": name}):
        with pytest.raises(InputError, match="expected a host"):
            lineage.find(**asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["", "00", "g" * 32, b"x", "0" * 33, " " * 32, "é" * 32])
def test_what_is_no_hash_is_refused(lineage: IndexedRun, value: str | bytes) -> None:
    for asked in ({"doc": value}, {"hash": value}):
        with pytest.raises(InputError, match="expected 32 hex digits"):
            lineage.find(**asked)  # type: ignore[arg-type]


def test_exactly_one_thing_is_asked_for(lineage: IndexedRun) -> None:
    with pytest.raises(ValueError, match="expected one of"):
        lineage.find()
    with pytest.raises(ValueError, match="expected one of"):
        lineage.find(url="http://example.com/", surt="com")


def test_the_verdict_is_the_whole_row(lineage: IndexedRun, oracle: Oracle) -> None:
    last = len(oracle.rows) - 1
    for number in {*range(0, last, 5), last}:
        found, row = lineage.verdict(number), oracle.rows[number]
        assert found == {key: row[key] for key in found}
        assert set(found) == set(row) - {"canonical", "key", "name"}


def test_decisions_survivors_and_clusters(lineage: IndexedRun, oracle: Oracle) -> None:
    decisions = {row["doc_id"]: row for row in oracle.found.decisions}
    cluster = {row["doc_id"]: row["cluster_id"] for row in oracle.found.clusters}
    assert len({decision["kind"] for decision in decisions.values()}) == 3
    for number, row in enumerate(oracle.rows):
        assert lineage.decision(number) == decisions.get(row["doc_id"])
        removed = sorted(
            oracle.number[doc_id] for doc_id, own in decisions.items() if own["duplicate_of"] == row["doc_id"]
        )
        assert lineage.removed_for(number).tolist() == removed
        own = cluster.get(row["doc_id"])
        members = sorted(oracle.number[doc_id] for doc_id, name in cluster.items() if own is not None and name == own)
        assert lineage.cluster(number).tolist() == members


def test_the_streams_are_those_of_the_corpus_version(lineage: IndexedRun, oracle: Oracle, run: Path) -> None:
    assert [stream.name for stream in lineage.streams] == ["web", "web.val", "text", "text.val"]
    for stream in lineage.streams:
        spans = oracle.found.spans[stream.name]
        assert stream.num_spans == len(spans)
        assert stream.total_tokens == stream.reader.total_tokens == sum(span["length"] for span in spans)
        assert stream.held_out == stream.name.endswith(".val")
        assert stream.identity == f"run00003/{stream.name}/1"
        assert Path(stream.path) == run / "tokens" / stream.name
        assert lineage.stream(stream.identity) == stream
    assert lineage.stream("run00003/web/2") is None
    assert (lineage.run, lineage.run_id, lineage.version) == (str(run), "run00003", 1)


def as_rows(lineage: IndexedRun, spans: Any) -> list[tuple]:
    return [
        (number, lineage.streams[stream].name, start, length, purged)
        for number, stream, start, length, purged in zip(
            *(getattr(spans, name).tolist() for name in ("numbers", "streams", "starts", "lengths", "purged")),
            strict=True,
        )
    ]


def test_every_document_has_its_span_or_none(lineage: IndexedRun, oracle: Oracle) -> None:
    numbers = list(range(lineage.num_documents))
    random.Random(5).shuffle(numbers)
    numbers += numbers[:10]
    expected = []
    for number in numbers:
        stream, span = oracle.spans.get(oracle.rows[number]["doc_id"], (None, None))
        if span is not None:
            expected.append((number, stream, span["start"], span["length"], span["purged"]))
    assert as_rows(lineage, lineage.spans_of(numbers)) == expected
    assert {row[4] for row in expected} == {True, False}
    assert len(lineage.spans_of([])) == 0


def overlapping(oracle: Oracle, stream: Stream, start: int, stop: int) -> list[tuple]:
    return [
        (oracle.number[span["doc_id"]], stream.name, span["start"], span["length"], span["purged"])
        for span in oracle.found.spans[stream.name]
        if start < stop and span["start"] < stop and start < span["start"] + span["length"]
    ]


@settings(max_examples=60)
@given(data=st.data())
def test_spans_in_ranges_are_those_that_overlap(lineage: IndexedRun, oracle: Oracle, data: st.DataObject) -> None:
    stream = data.draw(st.sampled_from(lineage.streams))
    edges = [span["start"] for span in oracle.found.spans[stream.name]] + [stream.total_tokens]
    place = st.integers(-2, stream.total_tokens + 2) | st.sampled_from(edges)
    ranges = data.draw(st.lists(st.tuples(place, place), max_size=12))
    spans, of = lineage.spans_in(stream, [a for a, _ in ranges], [b for _, b in ranges])
    expected = [(index, row) for index, (a, b) in enumerate(ranges) for row in overlapping(oracle, stream, a, b)]
    assert list(zip(of.tolist(), as_rows(lineage, spans), strict=True)) == expected
    assert of.dtype == np.int64


def test_the_tokens_of_a_span_are_the_documents_text(lineage: IndexedRun, oracle: Oracle) -> None:
    spans = lineage.spans_of(np.arange(lineage.num_documents))
    for number, stream, start, length in zip(spans.numbers, spans.streams, spans.starts, spans.lengths, strict=True):
        tokens = lineage.streams[stream].reader.tokens(int(start), int(start + length))
        assert bytes(tokens[:-1].tolist()).decode() == oracle.found.texts[oracle.rows[number]["doc_id"]]


@pytest.mark.parametrize("documents", [1, 100])
def test_segments_change_no_answer_but_the_numbers(tmp_path: Path, documents: int) -> None:
    run, oracle = runs.write_run(tmp_path / "run", documents=200), Oracle(runs.listing(documents=200))
    lineage = IndexedRun(str(run), segment_documents=documents)
    sizes = [record["documents"] for record in lineage.built.record["segments"]]
    assert len(sizes) > 1
    assert max(sizes) <= max(documents, runs.ROW_GROUP)
    assert lineage.num_documents == sum(sizes) == len(oracle.rows)
    ids = lineage.documents(np.arange(lineage.num_documents)).doc_ids
    number = {doc_id: number for number, doc_id in enumerate(ids)}
    assert set(number) == set(oracle.number)

    def expected(fits: Callable[[Row], bool]) -> list[int]:
        return sorted(number[row["doc_id"]] for row in oracle.rows if fits(row))

    for domain in ("example.com", "www.example.com"):
        found = lineage.find(domain=domain).tolist()
        assert found == expected(lambda row, d=domain: row["name"] is not None and f".{row['name']}".endswith(f".{d}"))
    for row in oracle.rows[::7]:
        assert lineage.find(doc=row["doc_id"]).tolist() == [number[row["doc_id"]]]
        found = lineage.verdict(number[row["doc_id"]])
        assert found == {key: row[key] for key in found}
        if row["canonical"] is not None:
            url = row["canonical"]
            assert lineage.find(url=url).tolist() == expected(lambda row, url=url: row["canonical"] == url)
        if row["post_filter_hash"] is not None:
            value = row["post_filter_hash"]
            own = lineage.find(hash=value).tolist()
            assert own == expected(lambda row, v=value: v in (row["pre_filter_hash"], row["post_filter_hash"]))
    spans = lineage.spans_of(np.arange(lineage.num_documents))
    assert {(ids[n], start) for n, start in zip(spans.numbers.tolist(), spans.starts.tolist(), strict=True)} == {
        (doc_id, span["start"]) for doc_id, (_, span) in oracle.spans.items()
    }
    for decision in oracle.found.decisions:
        assert lineage.decision(number[decision["doc_id"]]) == decision
        assert number[decision["doc_id"]] in lineage.removed_for(number[decision["duplicate_of"]])
    for stream in lineage.streams:
        spans, _ = lineage.spans_in(stream, [0], [stream.total_tokens])
        assert [ids[n] for n in spans.numbers.tolist()] == [s["doc_id"] for s in oracle.found.spans[stream.name]]


def test_a_run_without_tokens_or_duplicates_has_none(tmp_path: Path) -> None:
    run = runs.write_run(tmp_path / "run", documents=80)
    shutil.rmtree(run / "tokens")
    shutil.rmtree(run / "duplicates")
    lineage = IndexedRun(str(run))
    assert (lineage.num_documents, lineage.version, lineage.streams) == (80, 0, ())
    assert len(lineage.spans_of(range(80))) == 0
    assert lineage.decision(3) is None
    assert not len(lineage.cluster(3)) + len(lineage.removed_for(3))


def test_a_run_of_no_documents(tmp_path: Path) -> None:
    found = runs.Listing(verdicts={"web/a": [], "web/b": []}, spans={"web": [], "web.val": []})
    runs.write_listing(tmp_path / "empty", found, identity="empty")
    runs.write_listing(tmp_path / "bare", runs.Listing(), identity="bare")
    for name in ("empty", "bare"):
        lineage = IndexedRun(str(tmp_path / name))
        assert lineage.num_documents == 0
        for asked in ({"url": "http://a/"}, {"doc": bytes(16)}, {"domain": "com"}, {"hash": bytes(16)}, {"surt": ""}):
            assert lineage.find(**asked).tolist() == []
        for stream in lineage.streams:
            assert len(lineage.spans_in(stream, [0], [5])[0]) == 0


def test_a_look_up_imports_neither_the_stages_of_the_chain_nor_what_a_purge_writes_with(run: Path) -> None:
    """They are half of a second of a command that only reads."""
    program = """
import sys
from quern.lineage.sql.query import query
from quern.lineage.trace import trace, IndexedRun
trace(IndexedRun(sys.argv[1]), 0)
query(sys.argv[1], "select count(*) from verdicts")
late = {"quern.data_pipeline.chain", "quern.data_pipeline.sources", "quern.lineage.purge.apply.transaction"}
loaded = late & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", program, str(run)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
