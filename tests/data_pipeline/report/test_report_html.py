"""report.html: self-contained, bounded, the same every time, and nothing that a page says can act in it."""

from __future__ import annotations

import base64
import hashlib
import html
import html.parser
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern.data_pipeline.page.document import HASH, make_doc_id
from quern.data_pipeline.report import clusters as report_clusters
from quern.data_pipeline.report import languages
from quern.data_pipeline.report import page as report_html
from quern.data_pipeline.report import survey as report_survey
from quern.data_pipeline.report.counters import TopCounter
from quern.data_pipeline.report.page import survey_run, write_report
from quern.data_pipeline.report.survey import Budget, survey
from quern.errors import QuernError
from quern.html.pieces import link, percent, show
from support.named_cases import with_each

pytestmark = pytest.mark.slow

EVIL = "\u202e<script>1</script></style><img src=x onerror=alert(2)>\" onmouseover='x' &amp;\x00\x1b[31m\u202e"
VOID = {"meta", "br", "input", "img"}


class Page(html.parser.HTMLParser):
    """Tags, attributes and text of a page; fails on tags that do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text += data


def written(made: Any, **options: Any) -> str:
    found = survey_run(str(made.path), **options)
    return Path(write_report(str(made.path), made.stats(), found=found)).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def plain_attributes(make: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Of the page of a run that nobody means harm with."""
    made = make(tmp_path_factory.mktemp("plain") / "run", pages=30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(languages, "NUM_HOSTS", 1000)
        return {attribute for _, attribute, _ in Page(written(made, max_samples=500)).attributes}


def rows_of(made: Any) -> dict[bytes, dict[str, Any]]:
    return {row["doc_id"]: row for row in made.rows}


def test_page_is_well_formed_and_loads_nothing(made: Any) -> None:
    text = written(made)
    page = Page(text)
    assert page.tags["html"] == page.tags["style"] == page.tags["script"] == 1
    assert not set(page.tags) & {"link", "img", "iframe", "object", "embed", "base"}
    assert not [name for _, name, _ in page.attributes if name in ("src", "srcset", "xlink:href")]
    assert "@import" not in text
    assert "url(" not in text


def test_only_the_pages_own_script_may_run(made: Any) -> None:
    text = written(made)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1]
    assert "default-src 'none'" in policy[1]


def test_page_says_what_the_stats_say(made: Any) -> None:
    stats = made.stats()
    text = Page(written(made)).text
    assert f"240 pages became {stats['unique']} documents" in text
    for reason, count in stats["by_reason"].items():
        assert reason.partition(":")[2] in text
        assert re.search(rf"\b{count}\b", text)
    assert "the threshold 0.8; 94.7% of pairs there are proposed" in text
    assert "gzip member is damaged" in text
    assert "threshold: 0.8" in text  # the config


def test_documents_without_a_url_are_named_by_their_record(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row_of, nothing = make.__globals__["_row"], {"url": None, "host": None}
    monkeypatch.setitem(make.__globals__, "_row", lambda *of: {**row_of(*of), **nothing, "record_id": f"r{of[3]}"})
    made = make(tmp_path / "run")
    removed = {row["doc_id"] for row in pq.read_table(made.path / "duplicates/decisions.parquet").to_pylist()}
    places = {row["doc_id"]: f"/data/{row['part']}.warc.gz, byte {row['record_offset']}, record {row['record_id']}"
              for row in made.rows}  # fmt: skip
    page = Page(written(made))
    assert "0 hosts" in page.text
    section = page.text.partition("The largest clusters")[2].partition("A keyed choice")[0]
    assert "no URL" not in section
    assert sum(places[doc_id] in section for doc_id in removed) >= 10


@pytest.mark.parametrize("name", ["text", "url", "host", "source_file", "language", "record_id"])
def test_hostile_strings_of_a_page_are_shown_and_never_act(
    make: Callable[..., Any], plain_attributes: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(languages, "NUM_HOSTS", 1000)
    made = make(tmp_path / "run", pages=30, **{"url": "http://a.example/", name: EVIL})
    text = written(made, max_samples=500)
    page = Page(text)
    assert (page.tags["script"], page.tags["img"]) == (1, 0)
    assert {attribute for _, attribute, _ in page.attributes} <= plain_attributes
    if name != "record_id":  # not shown
        assert "alert(2)" in page.text
        assert "⟨U+202E⟩" in page.text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


def test_every_alarm_and_note_is_shown_once(made: Any) -> None:
    made.duplicates["alarms"], made.duplicates["notes"] = ["a source loses much"], ["a band is shared by many"]
    text = written(made)
    assert (text.count("a source loses much"), text.count("a band is shared by many")) == (1, 1)
    stats = made.stats()
    stats["alarms"], stats["duplicates"]["alarms"] = [], ["a source loses much"]  # as of an earlier version
    assert Path(write_report(str(made.path), stats)).read_text().count("a source loses much") == 1


def test_hostile_strings_of_reports_and_config_are_shown_and_never_act(made: Any) -> None:
    made.duplicates["alarms"] = made.duplicates["notes"] = [EVIL]
    stats = made.stats()
    stats["by_reason"] = {f"quality:{EVIL}": 1}
    stats["damage"]["first"] = [{"file": EVIL, "offset": EVIL, "why": EVIL}]
    stats["other_records"] = {EVIL: 3}
    stats["timing"]["stage_seconds"] = {EVIL: 1.0}
    run = (made.path / "run.json").read_text().replace("f00d", "<script>alert(3)</script>").replace("0.8", '"</style>"')
    (made.path / "run.json").write_text(run.replace('"threshold": "</style>"', '"threshold": 0.8, "x": "</style>"'))
    page = Page(Path(write_report(str(made.path), stats)).read_text())
    assert (page.tags["script"], page.tags["style"], page.tags["img"]) == (1, 1, 0)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]


@given(st.text(st.characters(codec=None), max_size=60))
def test_shown_text_reads_back_and_has_no_markup_or_unseen_character(text: str) -> None:
    shown = show(text)
    assert not set(shown) & set("<>\"'\x00\u202e\u2028\ufeff")
    assert not any(0xD800 <= ord(char) <= 0xDFFF for char in shown)
    back = re.sub(r"⟨U\+([0-9A-F]{4,6})⟩", lambda found: chr(int(found[1], 16)), html.unescape(shown))
    if not re.search("[\u0300-\u036f\u0483-\u0489\u1ab0-\u20ff\ufe20-\ufe2f]{5}", text):
        assert back == text.replace("\r\n", "\n")


def test_long_texts_are_cut_and_stacked_marks_thinned() -> None:
    assert show("a" * 50, 10) == "a" * 10 + "…"
    assert len(show("e" + "\u0301" * 1000)) <= 5


@with_each(
    "javascript:alert(1)",
    "JavaScript:alert(1)",
    "data:text/html,x",
    "http://a.b/\"onclick='x'",
    "//a.b/c",
    "http://a.b/\u202e",
    " http://a.b",
    "http://a.b\n",
    "vbscript:x",
    "https://a.b/ü",
    "",
)
def test_only_plain_web_addresses_become_links(url: str) -> None:
    assert "href" not in link(url)
    assert link("https://a.b/c?d=1&e=[2]").startswith('<a class="url" href="https://a.b/c?d=1&amp;e=[2]" rel="noopener')


def test_same_run_same_bytes_and_another_seed_other_samples(made: Any) -> None:
    assert written(made, seed=1) == written(made, seed=1)
    assert written(made, seed=1, max_samples=9) != written(made, seed=2, max_samples=9)


def test_survey_counts_every_page_once(made: Any) -> None:
    found = survey(str(made.path), dict.fromkeys(PAGES, 60), max_samples=30)
    removed = set(pq.read_table(made.path / "duplicates/decisions.parquet")["doc_id"].to_pylist())
    hosts: Counter[tuple[str, int]] = Counter()
    languages: Counter[tuple[str, int]] = Counter()
    lengths: Counter[tuple[int, int]] = Counter()
    unique_chars: Counter[str] = Counter()
    for row in made.rows:
        outcome = 2 if row["stage"] else int(row["doc_id"] in removed)
        hosts[row["host"], outcome] += 1
        languages[row["language"] or "(not identified)", outcome] += 1
        if row["text"] is not None:
            lengths[outcome, sum(1 for edge in report_survey.WORD_EDGES[1:] if len(row["text"].split()) >= edge)] += 1
            unique_chars[row["source"]] += len(row["text"]) if outcome == 0 else 0
    for table, counted in ((found.hosts.counts, hosts), (found.languages, languages)):
        assert {(key, i): n for key, by_outcome in table.items() for i, n in enumerate(by_outcome) if n} == counted
    assert {(int(i), int(j)): found.words[i, j] for i, j in zip(*np.nonzero(found.words), strict=True)} == lengths
    assert found.unique_chars == unique_chars
    assert found.complete


PAGES = [(source, name) for source in ("crawl", "wet") for name in ("part-0", "part-1")]


def test_samples_show_the_stored_row_and_text_and_every_reason(made: Any) -> None:
    found = survey(str(made.path), dict.fromkeys(PAGES, 60), max_samples=30)
    rows = rows_of(made)
    assert len(found.samples) == 30
    assert sum(sample.outcome == "kept" for sample in found.samples) == 10
    for sample in found.samples:
        row = rows[sample.row["doc_id"]]
        assert (sample.text, sample.row["url"], sample.row["reason"]) == (row["text"], row["url"], row["reason"])
    assert {sample.row["reason"] for sample in found.samples} == {row["reason"] for row in made.rows}
    assert len({sample.row["doc_id"] for sample in found.samples}) == 30
    for pair in found.pairs:
        assert pair.removed is not None
        assert pair.kept is not None
        assert pair.removed.text == rows[pair.decision["doc_id"]]["text"]
        assert pair.kept.text == rows[pair.decision["duplicate_of"]]["text"]


def test_a_run_beyond_the_budget_is_surveyed_in_part_and_says_so(made: Any) -> None:
    text = Page(written(made, budget=Budget(rows=100))).text
    assert "From 120 of 240 pages (2 of 4 partitions, chosen by key)." in text
    assert "characters / token" not in text
    assert "in a partition that was not surveyed" in text or "is the same text as" in text


def test_missing_and_torn_tables_are_named(made: Any) -> None:
    path = made.path / "verdicts/wet/part-1.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(1), path)
    with pytest.raises(QuernError, match=r"verdicts/wet/part-1\.parquet: holds 59 verdicts, its commit counts 60"):
        written(made)
    path.unlink()
    with pytest.raises(QuernError, match=r"verdicts/wet/part-1\.parquet: no such file"):
        written(made)


def test_purged_texts_leave_a_note(made: Any) -> None:
    path = made.path / "documents/crawl/part-0.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(0, 0), path)
    found = survey(str(made.path), dict.fromkeys(PAGES, 60), max_samples=500)
    gone = [sample for sample in found.samples if sample.outcome == "kept" and sample.text is None]
    assert Page(written(made, max_samples=500)).text.count("Its text was purged.") >= len(gone) > 0


@pytest.mark.parametrize("at", [0, 1, 9, 15, 31, 32])
def test_lengths_in_one_bin_are_a_column_on_a_scale(at: int) -> None:
    counts = np.zeros((3, len(report_survey.WORD_EDGES)), np.int64)
    counts[0, at] = 7
    drawn = report_html._histogram(counts, report_survey.WORD_EDGES, "words")
    (width,) = map(float, re.findall(r'<rect [^>]*width="([\d.]+)"', drawn))
    assert width < 20
    assert len(re.findall(r'<span style="left', drawn)) >= 2


def test_an_empty_run_has_a_page(make: Callable[..., Any], tmp_path: Path) -> None:
    assert "0 pages became 0 documents" in Page(written(make(tmp_path / "run", pages=0))).text


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5))), st.integers(2, 12))
def test_bounded_counter_is_never_too_high_nor_short_by_more_than_it_says(
    stream: list[tuple[int, int]], capacity: int
) -> None:
    counter, exact = TopCounter(capacity, 1), Counter[str]()
    for key, count in stream:
        counter.add(str(key), 0, count)
        exact[str(key)] += count
        assert len(counter.counts) <= capacity
    for key, count in exact.items():
        assert count - counter.lost <= counter.counts.get(key, [0])[0] <= count


@pytest.mark.parametrize("pass_rows", [1 << 30, 7])
def test_cluster_sizes_do_not_depend_on_the_number_of_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pass_rows: int
) -> None:
    sizes = [2, 2, 3, 5, 5, 5, 9, 2, 40, 3, 2, 2, 17, 4]
    ids = [[make_doc_id("s", f"{cluster}", i) for i in range(size)] for cluster, size in enumerate(sizes)]
    rows = sorted((member, min(group)) for group in ids for member in group)
    (tmp_path / "duplicates").mkdir()
    columns = [pa.array(column, HASH) for column in zip(*rows, strict=True)]
    pq.write_table(pa.table(columns, names=["doc_id", "cluster_id"]), tmp_path / "duplicates/clusters.parquet")
    monkeypatch.setattr(report_clusters, "PASS_ROWS", pass_rows)
    found = report_clusters.read_clusters(str(tmp_path))
    assert found.sizes == Counter(sizes)
    assert [cluster.size for cluster in found.largest] == sorted(sizes, reverse=True)[:10]
    for cluster in found.largest:
        group = next(group for group in ids if cluster.cluster_id == min(group))
        assert len(cluster.members) == min(3, cluster.size) == len(set(cluster.members) & set(group))


def test_shares_are_never_rounded_to_nothing_or_to_all() -> None:
    assert percent(0, 10) == "0 %"
    assert percent(1, 100_000) == "<0.1 %"
    assert percent(99_999, 100_000) == ">99.9 %"
    assert percent(1, 0) == "–"
