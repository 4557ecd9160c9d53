"""The ways of naming a document: its URL, its id, a token of a shard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quern.data_pipeline.page.url import canonicalize, host
from quern.errors import InputError
from quern.lineage.store import IndexedRun
from quern.lineage.trace import find_at, find_document, find_url, summaries
from support.lineage.runs import Listing, places
from support.named_cases import with_each

ARGUMENTS: dict[str, Any] = {"seed": 11, "documents": 150, "files": 2, "shard_tokens": 3000}


def test_any_spelling_of_a_url_finds_its_documents(lineage: IndexedRun, found: Listing) -> None:
    by_url: dict[str, set[bytes]] = {}
    for row in found.rows:
        if row["canonical_url"] is not None:
            by_url.setdefault(row["canonical_url"], set()).add(row["doc_id"])
    assert max(map(len, by_url.values())) > 1
    for row in found.rows:
        if row["canonical_url"] is not None:
            numbers = find_url(lineage, row["url"])
            assert by_url[row["canonical_url"]] <= set(lineage.documents(numbers).doc_ids)


def test_http_is_looked_up_for_https_and_the_reverse_where_there_is_no_other(
    lineage: IndexedRun, found: Listing
) -> None:
    by_url: dict[str, set[bytes]] = {}
    for row in found.rows:
        if row["canonical_url"] is not None:
            by_url.setdefault(row["canonical_url"], set()).add(row["doc_id"])
    asked = set()
    for url, doc_ids in by_url.items():
        scheme, _, rest = url.partition("://")
        other = f"{'http' if scheme == 'https' else 'https'}://{rest}"
        if other not in by_url and canonicalize(other) == other:
            assert set(lineage.documents(find_url(lineage, other)).doc_ids) == doc_ids
            asked.add(scheme)
    assert asked == {"http", "https"}


@pytest.mark.slow
def test_several_documents_of_a_url_come_newest_first(lineage: IndexedRun, found: Listing) -> None:
    rows = [row for row in found.rows if row["url"] is not None]
    for row in rows[:40]:
        listed = summaries(lineage, find_url(lineage, row["url"]))
        times = [own["fetched_at"] for own in listed]
        assert times == sorted(times, reverse=True)
        assert row["doc_id"].hex() in {own["doc_id"] for own in listed}
    outcomes = {own["outcome"] for own in summaries(lineage, np.arange(lineage.num_documents))}
    assert {"kept", "duplicate: exact", "quality: gopher.too_short"} <= outcomes


def test_a_url_that_is_not_there_is_answered_with_what_is_near(lineage: IndexedRun, found: Listing) -> None:
    wanted = "HTTP://Example.com:80/a/not-there?utm_source=x#top"
    with pytest.raises(InputError) as caught:
        find_url(lineage, wanted)
    message = str(caught.value)
    assert canonicalize(wanted) == "http://example.com/a/not-there"
    assert "http://example.com/a/not-there;" in message
    known = [canonicalize(row["url"] or "") for row in found.rows]
    count = sum(url is not None and host(url) == "example.com" for url in known)
    assert count > 1
    assert f"it has {count} documents of example.com; near: " in message
    near = message.partition("; near: ")[2].split(", ")
    assert 0 < len(near) <= 5
    assert set(near) <= {row["url"] for row in found.rows}
    assert all("example.com" in url.lower() for url in near)


@with_each(
    ("https://nowhere.invalid/x", "it has 0 documents of nowhere.invalid$"),
    ("ftp://nowhere.invalid/x", "no http or https URL"),
    ("\x1b[31m", "no http or https URL"),
    ("http://example.com/" + "y" * 100_000, "document"),
    ("http://example.com/?a=" + "&a=".join("bcd") + ")/)(,", "document"),
)
def test_what_cannot_be_found_is_said_shortly(url: str, message: str, *, lineage: IndexedRun) -> None:
    with pytest.raises(InputError, match=message) as caught:
        find_url(lineage, url)
    assert len(str(caught.value)) < 3000


@with_each("0" * 32, "xyz", "0" * 31, "", "g" * 32)
def test_a_doc_id_that_is_none_or_of_nobody_is_refused(doc: str, *, lineage: IndexedRun) -> None:
    with pytest.raises(InputError):
        find_document(lineage, doc)


def test_a_doc_id_in_capitals_is_the_same(lineage: IndexedRun, found: Listing) -> None:
    doc_id = found.rows[5]["doc_id"]
    assert find_document(lineage, doc_id.hex().upper()) == find_document(lineage, doc_id.hex())


@pytest.mark.slow
def test_every_token_of_a_shard_is_of_the_document_that_holds_it(lineage: IndexedRun, found: Listing) -> None:
    spans = places(found)
    checked = 0
    for doc_id, span in spans.items():
        start = span["start"] - span["origin"]
        for place in (0, span["length"] // 2, span["length"] - 1):
            for shard, source in (
                (f"{lineage.run}/tokens/{span['stream']}/shard_{span['shard']:05d}.bin", None),
                (f"{span['stream']}/shard_{span['shard']:05d}", None),
                (str(span["shard"]), span["stream"]),
                (f"shard_{span['shard']:05d}.bin", span["stream"]),
            ):
                number, position = find_at(lineage, shard, start + place, source)
                assert (lineage.documents([number]).doc_ids, position) == ([doc_id], place)
                checked += 1
    assert checked > 500


@with_each(
    ("web/shard_00000", 10**9, None, "expected a token from 0 to"),
    ("web/shard_99999", 0, None, "has no shard 'web/shard_99999'"),
    ("99", 0, "web", "has no shard '99'"),
    ("nosuch/shard_00000", 0, None, "has no source 'nosuch' .it has web, web.val, text, text.val"),
    ("0", 0, None, "or a number with --source"),
    ("shard_00000", 0, None, "or a number with --source"),
    ("web/shard_00000", 0, "text", "is not of source text"),
    ("/elsewhere/tokens/web/shard_00000.bin", 0, None, "is not in"),
    ("web/", 0, None, "has no shard"),
    ("web/shard_0000", 0, None, "has no shard"),
    ("-1", 0, "web", "has no shard"),
    ("²", 0, "web", "has no shard"),
    ("", 0, None, "expected <source>/shard_00000"),
)
def test_a_place_that_is_not_there_is_refused(
    shard: str, token: int, source: str | None, message: str, *, lineage: IndexedRun
) -> None:
    with pytest.raises(InputError, match=message):
        find_at(lineage, shard, token, source)
