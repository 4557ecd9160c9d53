"""What was purged does not come back."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.dedup.signature import Signature
from quern.data_pipeline.page.document import SIGNATURE_SCHEMA, Page, make_doc_id
from quern.data_pipeline.stages import tombstones
from quern.data_pipeline.stages.tombstones import (
    MADE_WITH,
    PURGE_SCHEMA,
    Tombstones,
    TombstonesBySimilarity,
    TombstonesByText,
    read_purge_list,
)
from quern.errors import InputError
from quern.storage.parquet import open_table


def page(url: str | None = "https://example.com/a", text: str | None = None, position: int = 0) -> Page:
    return Page("web", "in/f.warc.gz", "f.warc.gz", position, url=url, text=text)


def purge_list(path: Path, rows: list[dict[str, Any]], schema: pa.Schema = PURGE_SCHEMA) -> str:
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    return str(path)


def row(doc_id: bytes | None = None, url: str | None = None, text: str | None = None) -> dict[str, Any]:
    digest = None if text is None else hashlib.blake2b(text.encode(), digest_size=16).digest()
    return {"doc_id": doc_id, "canonical_url": url, "post_filter_hash": digest}


def test_without_a_list_nothing_fails_and_the_url_is_made_canonical() -> None:
    result = Tombstones(None)(page("HTTP://Example.com:80/a#x"))
    assert result.canonical_url == "http://example.com/a"
    assert result.failures == []
    assert TombstonesByText(None)(page(text="x")).failures == []


def test_a_place_counts_only_where_urls_do_not_tell_that_it_is_another_page(tmp_path: Path) -> None:
    """The same line of another crawl's file of that name has the same doc_id."""
    own = make_doc_id("web", "f.warc.gz", 7)
    twice, bare = make_doc_id("web", "f.warc.gz", 9), make_doc_id("web", "f.warc.gz", 11)
    rows = [row(own, "https://example.com/a"), row(twice, "https://example.com/b"), row(twice, "https://example.com/c")]
    rows.append(row(bare))
    stage = Tombstones(purge_list(tmp_path / "p.parquet", [*rows, row(url="https://example.com/d")]))
    by_id = ("purged", "purged.doc_id")
    for url, position, failures in (
        ("https://other.example/", 7, []),
        ("http://EXAMPLE.com/a#x", 7, [by_id, ("purged", "purged.canonical_url")]),
        (None, 7, [by_id]),
        ("https://other.example/", 9, []),
        (None, 9, [by_id]),
        ("https://other.example/", 11, [by_id]),
        ("https://example.com/d", 8, [("purged", "purged.canonical_url")]),
    ):
        assert stage(page(url, position=position)).failures == failures, (url, position)


@pytest.mark.parametrize(
    ("url", "fails"),
    [
        ("https://example.com/a", True),
        ("http://EXAMPLE.com:80/./a?utm_source=x#y", True),
        ("https://example.com/A", False),
        ("https://example.com/a/", False),
        ("https://www.example.com/a", False),
        ("https://example.com:8443/a", False),
        ("urn:x", False),
        (None, False),
    ],
)
def test_purged_url_fails_in_every_spelling(tmp_path: Path, url: str | None, fails: bool) -> None:
    rows = [row(url="https://example.com/a"), row(url="https://b.org/")]
    stage = Tombstones(purge_list(tmp_path / "p.parquet", rows))
    assert stage(page(url)).failures == ([("purged", "purged.canonical_url")] if fails else [])


def test_urls_written_by_older_rules_still_hold(tmp_path: Path) -> None:
    stage = Tombstones(purge_list(tmp_path / "p.parquet", [row(url="https://example.com/a?gclid=1")]))
    assert stage(page("https://example.com/a?gclid=2")).failures == [("purged", "purged.canonical_url")]


def test_canonical_url_already_there_is_not_made_again(tmp_path: Path) -> None:
    stage = Tombstones(purge_list(tmp_path / "p.parquet", [row(url="https://example.com/a")]))
    given = page("https://other.org/")
    given.canonical_url = "https://example.com/a"
    assert stage(given).failures == [("purged", "purged.canonical_url")]


def test_purged_text_fails_at_the_last_gate(tmp_path: Path) -> None:
    path = purge_list(tmp_path / "p.parquet", [row(text="grüße\nzwei"), row(text="other")])
    by_text = TombstonesByText(path)
    assert by_text(page(text="grüße\nzwei")).failures == [("purged", "purged.text")]
    assert by_text(page(text="grüße\nzwei ")).failures == []
    assert by_text(page(text=None)).failures == []
    assert Tombstones(path)(page(text="other")).failures == []


def test_ids_that_end_in_zero_bytes_are_found(tmp_path: Path) -> None:
    ids = [bytes(16), b"\1" + bytes(15), b"\1\2" * 8, b"\1" * 15 + b"\0"]
    stage = Tombstones(purge_list(tmp_path / "p.parquet", [row(doc_id=i) for i in ids]))
    for i in ids:
        given = page()
        given.doc_id = i
        assert stage(given).failures == [("purged", "purged.doc_id")], i
    given.doc_id = b"\1\2" + bytes(14)
    given.failures = []
    assert stage(given).failures == []


def test_many_ids_are_all_found_and_no_other(tmp_path: Path) -> None:
    listed = [make_doc_id("web", "f.warc.gz", i) for i in range(0, 4000, 2)]
    stage = Tombstones(purge_list(tmp_path / "p.parquet", [row(doc_id=i) for i in listed]))
    for i in range(4000):
        assert stage(page(position=i)).failures == ([] if i % 2 else [("purged", "purged.doc_id")]), i


def test_folder_of_lists_is_one_list(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    purge_list(tmp_path / "1.parquet", [row(url="https://a.org/")])
    purge_list(tmp_path / "sub" / "2.parquet", [row(url="https://b.org/"), row(url="https://a.org/")])
    (tmp_path / "README").write_text("not a list")
    assert len(read_purge_list(str(tmp_path)).urls) == 2


def test_columns_may_be_empty_variable_or_beside_others(tmp_path: Path) -> None:
    schema = pa.schema([("reason", pa.string()), ("post_filter_hash", pa.null()), ("doc_id", pa.binary())]).append(
        pa.field("canonical_url", pa.large_string())
    )
    path = purge_list(tmp_path / "p.parquet", [{**row(doc_id=b"x" * 16, url="https://a.org/"), "reason": "r"}], schema)
    found = read_purge_list(path)
    assert (len(found.doc_ids), len(found.urls), len(found.texts)) == (1, 1, 0)


def test_both_stages_hold_one_list_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = purge_list(tmp_path / "p.parquet", [row(text="a", url="https://a.org/")])
    opened: list[str] = []
    monkeypatch.setattr(tombstones, "open_table", lambda file, **told: opened.append(file) or open_table(file, **told))
    by_place, by_text = Tombstones(path), TombstonesByText(path)
    assert by_place(page("https://a.org/")).failures != []
    assert by_text(page(text="a")).failures != []
    assert opened == [path]
    purge_list(tmp_path / "p.parquet", [row(text="b"), row(text="c")])
    assert TombstonesByText(path)(page(text="b")).failures != []
    assert by_text(page(text="b")).failures == []


def test_what_is_no_list_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.parquet: no such purge list"):
        Tombstones(str(tmp_path / "gone.parquet"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty: expected \*\.parquet files"):
        Tombstones(str(tmp_path / "empty"))
    (tmp_path / "x.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(InputError, match=r"x\.parquet: cannot be read"):
        TombstonesByText(str(tmp_path / "x.parquet"))


@pytest.mark.parametrize("column", PURGE_SCHEMA.names)
def test_wrong_columns_are_named(tmp_path: Path, column: str) -> None:
    index = PURGE_SCHEMA.get_field_index(column)
    without = purge_list(tmp_path / "without.parquet", [], PURGE_SCHEMA.remove(index))
    with pytest.raises(InputError, match=rf"without\.parquet: .*'{column}'"):
        read_purge_list(without)
    wrong = purge_list(tmp_path / "wrong.parquet", [], PURGE_SCHEMA.set(index, pa.field(column, pa.int64())))
    with pytest.raises(InputError, match=rf"wrong\.parquet: column '{column}': expected .*, got int64"):
        read_purge_list(wrong)


def test_hashes_of_another_length_are_refused(tmp_path: Path) -> None:
    schema = PURGE_SCHEMA.set(0, pa.field("doc_id", pa.binary()))
    path = purge_list(tmp_path / "p.parquet", [row(doc_id=b"short")], schema)
    with pytest.raises(InputError, match="'doc_id': expected values of 16 bytes"):
        read_purge_list(path)


# ---- what is similar

#: Of letters alone: all numbers are the same word.
WORDS = ["".join(letters) for letters in itertools.islice(itertools.product("abcdefgh", repeat=3), 400)]


def text_of(words: list[str]) -> str:
    return " ".join(words)


def shared(a: str, b: str, ngram: int = 5) -> float:
    """Jaccard similarity of the sets of ``ngram`` words in a row."""
    sets = [set(zip(*(words[i:] for i in range(ngram)), strict=False)) for words in (a.split(), b.split())]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def similar_list(path: Path, texts: list[str], config: DuplicatesConfig) -> str:
    """A list with the signatures of ``texts``, and a row without one."""
    signed = []
    for text in texts:
        made = Signature(config)(page(text=text))
        signed.append({**row(text=text), "signature": made.signature, "shingles": made.shingles})
    known = {"ngram": config.ngram, "num_perm": config.num_perm, "seed": config.seed}
    fields = [*PURGE_SCHEMA, SIGNATURE_SCHEMA.field("signature"), SIGNATURE_SCHEMA.field("shingles")]
    schema = pa.schema(fields, {MADE_WITH: json.dumps(known).encode()})
    return purge_list(path, [row(url="https://a.org/"), *signed], schema)


def fails(stage: TombstonesBySimilarity, text: str, config: DuplicatesConfig) -> bool:
    """As the last gate decides: signed, then compared."""
    judged = stage(Signature(config)(page(text=text)))
    assert judged.failures in ([], [("purged", "purged.similar")])
    return bool(judged.failures)


def test_a_list_without_signatures_fails_nothing_and_looks_at_nothing(tmp_path: Path) -> None:
    path = purge_list(tmp_path / "p.parquet", [row(text="a b c d e f")])
    for given in (None, path):
        stage = TombstonesBySimilarity(given, DuplicatesConfig())
        untouched = page(text="a b c d e f")
        assert stage(untouched).failures == []
        assert untouched.shingles is None


@pytest.mark.parametrize(
    "made", [{}, {"seed": 7}, {"num_perm": 64, "bands": 8}, {"ngram": 3}, {"seed": 3, "ngram": 2, "num_perm": 256}]
)
def test_what_is_as_similar_as_a_near_duplicate_fails_whatever_the_list_was_made_with(
    tmp_path: Path, made: dict[str, Any]
) -> None:
    """Of many pages none below the threshold fails, and of those above as many as the bands promise."""
    draw = random.Random(5)
    made_with, config = DuplicatesConfig(**made), DuplicatesConfig()
    purged = [draw.sample(WORDS, 300) for _ in range(8)]
    path = similar_list(tmp_path / "p.parquet", [*map(text_of, purged), "too short", text_of(purged[0])], made_with)
    stage = TombstonesBySimilarity(path, config)
    above = found = 0
    for number in range(120):
        words = [*purged[number % 8]]
        for place in draw.sample(range(300), draw.choice([0, 1, 3, 5, 6, 7, 8, 12, 30, 200])):
            words[place] = "".join(draw.choices("xyz", k=12))
        similarity = shared(text_of(words), text_of(purged[number % 8]), made_with.ngram)
        failed = fails(stage, text_of(words), config)
        assert not failed or similarity >= config.threshold
        above += similarity >= config.threshold
        found += failed
    assert above > 40
    assert found >= 0.9 * above


def test_exactly_the_threshold_is_similar(tmp_path: Path) -> None:
    """Nine shingles, eight of them shared, of ten: 0.8; a band of one row proposes whatever shares its least hash."""
    config = DuplicatesConfig(ngram=1, bands=128, rows=1)
    stage = TombstonesBySimilarity(similar_list(tmp_path / "p.parquet", ["a b c d e f g h i"], config), config)
    assert shared("a b c d e f g h i", "a b c d e f g h j", 1) == 0.8
    assert fails(stage, "a b c d e f g h j", config)
    assert not fails(stage, "a b c d e f g j k", config)


def test_without_near_duplicates_the_page_is_signed_for_the_list_alone(tmp_path: Path) -> None:
    path = similar_list(tmp_path / "p.parquet", [text_of(WORDS)], DuplicatesConfig())
    config = DuplicatesConfig(near=False)
    judged = TombstonesBySimilarity(path, config)(Signature(config)(page(text=text_of(WORDS[1:]))))
    assert judged.failures == [("purged", "purged.similar")]
    assert judged.shingles is None


def test_signatures_of_several_files_and_settings_are_one_list(tmp_path: Path) -> None:
    config = DuplicatesConfig()
    similar_list(tmp_path / "1.parquet", [text_of(WORDS[:200])], config)
    similar_list(tmp_path / "2.parquet", [text_of(WORDS[200:]), text_of(WORDS[:200])], config)
    similar_list(tmp_path / "3.parquet", [text_of(WORDS[::-1])], DuplicatesConfig(ngram=4))
    purge_list(tmp_path / "4.parquet", [row(text="x")])
    found = read_purge_list(str(tmp_path))
    assert [(own.ngram, len(own.signatures)) for own in found.sketches] == [(4, 1), (5, 2)]
    stage = TombstonesBySimilarity(str(tmp_path), config)
    for words in (WORDS[:199], WORDS[201:], WORDS[:0:-1]):
        assert fails(stage, text_of(words), config)
    assert not fails(stage, text_of(WORDS[100:300]), config)


@pytest.mark.parametrize("metadata", [None, {}, {"ngram": 5}, {"ngram": 5, "num_perm": 64, "seed": 1}, [5]])
def test_signatures_that_nobody_knows_the_settings_of_are_refused(tmp_path: Path, metadata: Any) -> None:
    path = similar_list(tmp_path / "p.parquet", [text_of(WORDS)], DuplicatesConfig())
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata(metadata and {MADE_WITH: json.dumps(metadata).encode()}), path)
    with pytest.raises(InputError, match=r"p\.parquet: (its metadata|column 'signature')"):
        read_purge_list(path)


def test_signatures_without_shingles_are_refused(tmp_path: Path) -> None:
    path = similar_list(tmp_path / "p.parquet", [text_of(WORDS)], DuplicatesConfig())
    table = pq.read_table(path)
    pq.write_table(table.set_column(4, "shingles", pa.array([None, ["a"]])), path)
    with pytest.raises(InputError, match=r"p\.parquet: column 'shingles': expected list"):
        read_purge_list(path)
