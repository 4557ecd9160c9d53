from __future__ import annotations

import json
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from quern.config import canonical_json
from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.dedup.passes.run import run
from quern.errors import QuernError

WORDS = [a + b for a in "bcdfgklmnprst" for b in ("a", "e", "i", "o", "u", "ai", "ou", "ea")]

#: One row a band: a pair with a similarity of 0.3 is proposed with a probability of 1 − 10⁻²⁰, so recall plays no part.
SURE = DuplicatesConfig(bands=128, rows=1, max_band_members=10_000)


def sentence(seed: int, num_words: int = 30) -> list[str]:
    return random.Random(seed).choices(WORDS, k=num_words)


def changed(words: list[str], *places: int) -> str:
    return " ".join("zz" + chr(0x61 + i % 26) if i in places else word for i, word in enumerate(words))


def run_in(folder: Path, plain, partitions, config, **options) -> None:
    run(str(folder), partitions, {}, config, plain.Shuffled(), str(folder / "scratch"), **options)


@st.composite
def corpora(draw, plain):
    """Up to 14 documents cut from few texts, some equal, some changed in a word or two, some very short."""
    docs = []
    for position in range(draw(st.integers(0, 14))):
        words = sentence(draw(st.integers(0, 2)), draw(st.sampled_from([3, 29, 30])))
        text = changed(words, *draw(st.lists(st.sampled_from([0, 1, 15, 28]), max_size=2)))
        docs.append(
            plain.Doc(
                text=text + draw(st.sampled_from(["", "", "."])),
                source=draw(st.sampled_from("ab")),
                partition=draw(st.sampled_from("pq")),
                url=draw(st.sampled_from([None, None, None, "u", "v"])),
                fetched=draw(st.sampled_from([None, -5, 7])),
                position=position,
            )
        )
    return docs


@pytest.mark.slow
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.data(),
    st.sampled_from(["run", "source"]),
    st.sampled_from(["best", "latest"]),
    st.sampled_from([0.5, 0.7, 0.8, 1.0]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([{}, {"a": 1}, {"a": 1, "b": 2}]),
)
def test_a_small_corpus_is_decided_as_by_brute_force(
    plain, data, scope, url_keep, threshold, url_threshold, priorities
):
    docs = data.draw(corpora(plain))
    thresholds = {"threshold": threshold, "url_threshold": url_threshold}
    config = SURE.model_copy(update={"scope": scope, "url_keep": url_keep, **thresholds})
    expected = plain.Oracle(docs, config, priorities)
    result = plain.deduplicate(docs, config, priorities)
    assert result.removed == expected.removed
    assert result.clusters == expected.clusters


def test_switched_off_passes_are_not_made(plain):
    docs = [plain.Doc(changed(sentence(0)), url="u"), plain.Doc(changed(sentence(0)), url="u", position=1)]
    docs.append(plain.Doc(changed(sentence(0), 29), url="u", position=2))
    for off in ({"exact"}, {"url"}, {"near"}, {"exact", "url"}, {"exact", "url", "near"}):
        config = SURE.model_copy(update=dict.fromkeys(off, False))
        assert plain.deduplicate(docs, config).removed == plain.Oracle(docs, config).removed


def jaccard(plain, one: str, other: str) -> float:
    return plain.plain_jaccard(*(plain.plain_shingles(text, 5) for text in (one, other)))


def larger_corpus(plain, num_docs: int = 300):
    rng = random.Random(8)
    docs = []
    for position in range(num_docs):
        words = sentence(rng.randrange(40), 60)
        places = rng.sample(range(60), rng.choice([0, 0, 1, 1, 2, 4]))
        docs.append(
            plain.Doc(
                changed(words, *places),
                rng.choice("abc"),
                rng.choice("pqr"),
                rng.choice([None, f"u{rng.randrange(200)}"]),
                rng.choice([None, 1, 2, 3]),
                position,
            )
        )
    return docs


@pytest.mark.slow
def test_tables_are_the_same_bytes_however_the_work_is_divided(plain):
    docs = larger_corpus(plain)
    config = DuplicatesConfig()
    expected = plain.deduplicate(docs, config, {"b": 1})
    kinds = {row["kind"] for row in expected.decisions}
    assert kinds == {"exact", "url", "near"}
    assert expected.report.verified_pairs > 50
    for seed, records in enumerate((200, 999, 10**6)):
        order = random.Random(seed).sample(docs, len(docs))
        moved = [replace(doc, partition=f"{doc.position % (seed + 1)}") for doc in order]
        result = plain.deduplicate(moved, config, {"b": 1}, records_per_task=records, engine=plain.Shuffled(seed))
        assert result.files == expected.files
        assert asdict(result.report) == asdict(expected.report)
        tasks = dict(result.calls)
        for label in ("exact", "url pairs", "candidates", "verify"):
            several = records < (1000 if label in ("candidates", "verify") else 300)
            assert (tasks[f"duplicates: {label}"] > 1) == several


class Processes:
    """An engine whose tasks run in other processes."""

    num_workers = 2

    def __init__(self, pool):
        self.pool = pool

    def map(self, function, tasks, *, label, on_death=None):
        yield from enumerate(self.pool.map(function, *zip(*tasks, strict=True)))


@pytest.mark.slow
def test_tasks_run_in_other_processes(plain):
    docs = larger_corpus(plain, 60)
    here = plain.deduplicate(docs, DuplicatesConfig())
    with ProcessPoolExecutor(2) as pool:
        there = plain.deduplicate(docs, DuplicatesConfig(), engine=Processes(pool))
    assert there.files == here.files
    assert there.report == here.report


@pytest.mark.slow
def test_the_bands_of_partitions_read_together_fit_a_file(plain, tmp_path):
    docs = [plain.Doc(changed(sentence(place)), partition=f"p{place:03d}", position=place) for place in range(64)]
    partitions = plain.write_run(tmp_path, docs, DuplicatesConfig())
    run_in(tmp_path, plain, partitions, DuplicatesConfig(), inputs="x", records_per_task=512)
    bands = next(json.loads(path.read_text()) for path in (tmp_path / "scratch" / "stages").glob("*-bands.json"))
    assert set(bands["exchanges"]["bands"]["files"]) == {1}


def test_every_row_carries_its_evidence(plain):
    docs = larger_corpus(plain)
    texts = {doc.doc_id: doc.text for doc in docs}
    urls = {doc.doc_id: doc.url for doc in docs}
    result = plain.deduplicate(docs, DuplicatesConfig())
    assert [row["doc_id"] for row in result.decisions] == sorted(row["doc_id"] for row in result.decisions)
    assert list(result.clusters) == sorted(result.clusters)
    for row in result.decisions:
        one, other = row["doc_id"], row["duplicate_of"]
        assert result.clusters[one] == result.clusters[other] == row["cluster_id"]
        similarity = jaccard(plain, texts[one], texts[other])
        if row["kind"] == "exact":
            assert (texts[one], row["similarity"], row["band"]) == (texts[other], 1.0, None)
        elif row["kind"] == "url":
            assert (urls[one], row["similarity"], row["band"]) == (urls[other], similarity, None)
        else:
            assert row["similarity"] == similarity >= 0.8
            assert 0 <= row["band"] < 16
            assert other not in result.removed


def test_counts_add_up(plain):
    docs = larger_corpus(plain)
    result = plain.deduplicate(docs, DuplicatesConfig())
    report = result.report
    for source in "abc":
        assert report.documents[source] == sum(doc.source == source for doc in docs)
        ids = {doc.doc_id for doc in docs if doc.source == source}
        for kind in ("exact", "url", "near"):
            expected = sum(row["kind"] == kind and row["doc_id"] in ids for row in result.decisions)
            assert report.removed[source].get(kind, 0) == expected
    sizes = [list(result.clusters.values()).count(name) for name in set(result.clusters.values())]
    assert (report.clusters, report.largest_cluster) == (len(sizes), max(sizes))
    assert min(sizes) >= 2
    assert report.candidate_pairs >= report.verified_pairs
    assert report.recall[6] == (0.8, pytest.approx(0.9471, abs=1e-4))
    canonical_json(asdict(report))


def test_a_copy_removed_by_an_earlier_pass_is_not_looked_at_by_a_later_one(plain):
    """B equals A and shares a URL with C: B goes as an exact copy, so nothing says that C is a copy of anything."""
    a = plain.Doc(changed(sentence(1)), fetched=1, position=1)
    b = plain.Doc(changed(sentence(1)), fetched=2, position=2, url="u")
    c = plain.Doc(changed(sentence(2)), fetched=3, position=3, url="u")
    result = plain.deduplicate([a, b, c], SURE)
    assert result.removed == {b.doc_id: ("exact", a.doc_id)}
    # alone, the URL pass does see it
    without = plain.deduplicate([a, b, c], SURE.model_copy(update={"exact": False, "near": False}))
    assert without.removed == {c.doc_id: ("url", b.doc_id)}


def test_of_a_chain_the_end_stays_unless_it_is_similar_to_a_kept_document(plain):
    words = sentence(3, 60)
    a, b, c = (
        plain.Doc(changed(words, *places), fetched=fetched, position=fetched)
        for fetched, places in ((1, ()), (2, (30,)), (3, (10, 30)))
    )
    config = SURE.model_copy(update={"threshold": 0.75})
    assert jaccard(plain, a.text, b.text) > 0.75 < jaccard(plain, b.text, c.text)
    assert jaccard(plain, a.text, c.text) < 0.75
    result = plain.deduplicate([a, b, c], config)
    assert result.removed == {b.doc_id: ("near", a.doc_id)}
    assert set(result.clusters) == {a.doc_id, b.doc_id, c.doc_id}
    assert set(result.clusters.values()) == {min(result.clusters)}
    # with B before A, both A and C go
    b = replace(b, fetched=0)
    assert set(plain.deduplicate([a, b, c], config).removed) == {a.doc_id, c.doc_id}


def test_priority_then_length_then_time_then_id_decide_who_stays(plain):
    words = sentence(4, 60)
    longer = plain.Doc(" ".join(words), "a", fetched=9, position=1)
    shorter = plain.Doc(" ".join(words[:-1]), "b", fetched=1, position=2)
    assert set(plain.deduplicate([longer, shorter], SURE).removed) == {shorter.doc_id}
    assert set(plain.deduplicate([longer, shorter], SURE, {"b": 1}).removed) == {longer.doc_id}
    early, late, never = (replace(longer, fetched=when, position=3 + i) for i, when in enumerate((1, 2, None)))
    result = plain.deduplicate([never, late, early], SURE)
    assert result.removed == {late.doc_id: ("exact", early.doc_id), never.doc_id: ("exact", early.doc_id)}
    twins = [replace(longer, position=position) for position in range(6, 12)]
    assert min(doc.doc_id for doc in twins) not in plain.deduplicate(twins, SURE).removed


def test_the_latest_copy_of_a_url_can_be_kept(plain):
    old, new, undated = (
        plain.Doc(changed(sentence(seed)), url="u", fetched=when, position=seed)
        for seed, when in ((1, 5), (2, 9), (3, None))
    )
    latest = SURE.model_copy(update={"url_keep": "latest"})
    assert plain.deduplicate([old, new, undated], latest).removed == {
        old.doc_id: ("url", new.doc_id),
        undated.doc_id: ("url", new.doc_id),
    }
    assert new.doc_id in plain.deduplicate([old, new], SURE).removed


def test_a_url_that_serves_different_texts_is_measured_named_and_can_be_kept(plain):
    """Twelve unlike texts and two that share some or most of their shingles under one URL of a host, two unlike ones of
    another, and two without a shingle of a third."""
    first = sentence(0, 42)
    texts = [
        " ".join(first),
        changed(first[:40], 20),
        changed(first[:40], 8, 16, 24, 32),
        *(" ".join(sentence(1 + i)) for i in range(12)),
    ]
    docs = [plain.Doc(text, url="https://many.example/x", position=i) for i, text in enumerate(texts)]
    docs += [plain.Doc(" ".join(sentence(50 + i)), url="https://few.example/", position=50 + i) for i in range(2)]
    docs += [
        plain.Doc(text, url="https://short.example/", position=60 + i)
        for i, text in enumerate(["to be or", "not to be"])
    ]
    result = plain.deduplicate(docs, SURE)
    found = [row["similarity"] for row in result.decisions if row["kind"] == "url"]
    assert sorted(value for value in found if value) == sorted(jaccard(plain, texts[0], text) for text in texts[1:3])
    assert (found.count(0.0), found.count(None)) == (13, 1)
    urls = result.report.urls
    assert (urls.compared, sum(urls.similar), urls.similar[0], urls.unknown) == (16, 15, 13, 1)
    assert urls.hosts == {"many.example": 12, "few.example": 1}
    (found_alarm,) = (alarm for alarm in result.report.alarms if alarm["what"] == "host")
    assert (found_alarm["name"], found_alarm["lost"], found_alarm["reason"]) == ("many.example", 12, "url")
    alarm = found_alarm["text"]
    assert "host many.example serves different texts under one URL: 12 of its documents" in alarm
    assert "with duplicates.url_threshold=0.2 none of them goes for its URL" in alarm
    assert "few" not in alarm
    kept = plain.deduplicate(docs, SURE.model_copy(update={"url_threshold": 0.2}))
    assert set(kept.removed) == {doc.doc_id for doc, text in zip(docs[1:3], texts[1:3], strict=True)}
    assert not any(alarm["what"] == "host" for alarm in kept.report.alarms)
    with pytest.raises(ValidationError, match="url_threshold: expected only with url and near"):
        DuplicatesConfig(url_threshold=0.2, near=False)


def test_a_key_that_earlier_runs_do_not_have_changes_no_digest_at_its_default():
    assert "url_threshold" not in DuplicatesConfig().model_dump(mode="json")
    assert DuplicatesConfig(url_threshold=0.5).model_dump(mode="json")["url_threshold"] == 0.5


def test_short_texts_are_compared_as_a_whole_only(plain):
    docs = [plain.Doc(text, position=i) for i, text in enumerate(["to be or", "to be or", "to be or!", "not to be"])]
    result = plain.deduplicate(docs, SURE)
    assert {kind for kind, _ in result.removed.values()} == {"exact"}
    assert len(result.removed) == 1
    # two texts without a single word are not copies of each other either
    assert not plain.deduplicate([plain.Doc("* * *"), plain.Doc("- - -", position=1)], SURE).removed


def test_different_chinese_pages_stay_and_near_copies_go(plain):
    rng = random.Random(5)
    first, second = ("".join(chr(rng.randrange(0x4E00, 0x4F00)) for _ in range(400)) for _ in range(2))
    copy = first[:200] + "\u9f8d" + first[201:]
    docs = [plain.Doc(text, position=i) for i, text in enumerate((first, second, copy))]
    result = plain.deduplicate(docs, DuplicatesConfig())
    assert len(result.removed) == 1
    assert set(result.clusters) == {docs[0].doc_id, docs[2].doc_id}


def test_a_source_can_be_compared_with_itself_only(plain):
    words = sentence(6, 60)
    docs = [plain.Doc(changed(words, *([7] * (i % 2))), source="ab"[i // 2], url="u", position=i) for i in range(4)]
    everywhere = plain.deduplicate(docs, SURE)
    assert len(everywhere.removed) == 3
    inside = plain.deduplicate(docs, SURE.model_copy(update={"scope": "source"}))
    assert len(inside.removed) == 2
    source = {doc.doc_id: doc.source for doc in docs}
    assert all(source[one] == source[other] for one, (_, other) in inside.removed.items())
    assert len(set(inside.clusters.values())) == 2


def test_a_band_over_the_cap_is_reported_and_copies_of_its_first_still_go(plain):
    words = sentence(7, 200)
    docs = [plain.Doc(changed(words, 100 + place % 50, 150), fetched=place, position=place) for place in range(40)]
    free = plain.deduplicate(docs, DuplicatesConfig(max_band_members=40))
    assert (free.report.capped_bands, free.report.notes) == (0, ())
    assert free.report.candidate_pairs == 40 * 39 // 2
    capped = plain.deduplicate(docs, DuplicatesConfig(max_band_members=1))
    assert capped.report.capped_bands > 0
    assert capped.report.largest_band == free.report.largest_band > 30
    assert "max_band_members" in capped.report.notes[0]
    assert capped.report.candidate_pairs < free.report.candidate_pairs
    assert capped.removed == free.removed


def test_a_source_that_loses_most_of_its_documents_raises_an_alarm(plain):
    docs = [plain.Doc("to be or not", "a", position=i) for i in range(5)]
    docs += [plain.Doc(changed(sentence(i)), "b", position=10 + i) for i in range(5)]
    report = plain.deduplicate(docs, DuplicatesConfig()).report
    assert report.removed == {"a": {"exact": 4}}
    assert len(report.alarms) == 1
    assert "source a loses 4 of 5 documents (80%)" in report.alarms[0]["text"]
    assert (report.alarms[0]["entered"], report.alarms[0]["lost"], report.alarms[0]["reason"]) == (5, 4, "exact")
    assert not plain.deduplicate(docs, DuplicatesConfig(alarm_share=0.8)).report.alarms


def test_pages_that_were_dropped_before_play_no_part(plain):
    dropped = plain.Doc("to be or not", fetched=1, stage="quality", position=1)
    kept = plain.Doc("to be or not", fetched=2, position=2)
    for docs, documents in (([dropped, kept], {"web": 1}), ([dropped], {"web": 0}), ([], {})):
        result = plain.deduplicate(docs, SURE)
        assert (result.decisions, result.clusters, result.report.documents) == ([], {}, documents)


def test_the_tables_have_the_schema_of_a_run(plain, tmp_path):
    partitions = plain.write_run(tmp_path, larger_corpus(plain, 40), SURE)
    run_in(tmp_path, plain, partitions, SURE)
    decisions = pq.read_schema(tmp_path / "duplicates" / "decisions.parquet")
    assert decisions.names == ["doc_id", "kind", "duplicate_of", "cluster_id", "similarity", "band"]
    assert [decisions.field(name).type for name in ("doc_id", "duplicate_of", "cluster_id")] == [pa.binary(16)] * 3
    clusters = pq.read_schema(tmp_path / "duplicates" / "clusters.parquet")
    assert [(field.name, field.type) for field in clusters] == [
        ("doc_id", pa.binary(16)),
        ("cluster_id", pa.binary(16)),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["duplicates", "scratch", "signatures", "verdicts"]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("signatures", lambda table: table.slice(1), "has no row for 1 of 3 kept documents"),
        ("signatures", lambda table: pa.concat_tables([table, table.slice(2)]), "has two rows for a document"),
        ("signatures", lambda table: table.drop_columns(["shingles"]), "has no column 'shingles'"),
        ("verdicts", lambda table: table.drop_columns(["text.num_words"]), "has no column 'text.num_words'"),
        ("verdicts", lambda table: pa.concat_tables([table, table.slice(0, 1)]), "two documents have the same id"),
        (
            "verdicts",
            lambda table: table.set_column(
                table.schema.get_field_index("post_filter_hash"), "post_filter_hash", pa.nulls(3, pa.binary(16))
            ),
            "post_filter_hash: 3 values are null",
        ),
    ],
)
def test_tables_that_lack_something_are_refused(plain, tmp_path, kind, change, message):
    docs = [plain.Doc(changed(sentence(i)), position=i) for i in range(3)]
    partitions = plain.write_run(tmp_path, docs, SURE)
    path = tmp_path / kind / "web" / "p0.parquet"
    pq.write_table(change(pq.read_table(path)), path)
    with pytest.raises(QuernError, match=message):
        run_in(tmp_path, plain, partitions, SURE)


def test_what_does_not_go_with_the_tables_is_refused(plain, tmp_path):
    partitions = plain.write_run(tmp_path, [plain.Doc(changed(sentence(0)))], DuplicatesConfig())
    with pytest.raises(QuernError, match="has not num_perm = 256 values"):
        run_in(tmp_path, plain, partitions, DuplicatesConfig(num_perm=256))
    with pytest.raises(QuernError, match="web/p0 is given twice"):
        run_in(tmp_path, plain, partitions * 2, SURE)
