from __future__ import annotations

import gzip
import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import lxml.html
import pytest
import trafilatura
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from quern.data_pipeline.extraction import trafilatura_fast as extract_trafilatura
from quern.data_pipeline.extraction.extract import Extract, ExtractConfig
from quern.data_pipeline.extraction.page_bounds import inline_run, num_elements, table_cells
from quern.data_pipeline.page.document import Page
from support.growth import assert_grows_tamely
from support.named_cases import each, with_each

WORDS = "The wheel turns, the grain falls, and the flour, fine and white, fills the sack. " * 4


def page(raw: str, **fields: Any) -> Page:
    return Page(source="s", source_file="f", relative_path="f", position=0, raw=raw, **fields)


@pytest.fixture(scope="module")
def extract() -> Extract:
    return Extract(ExtractConfig())


def test_article_text_is_kept_and_chrome_is_not(extract: Extract) -> None:
    html = f"<html><body><div class='navbar'>Home</div><article><p>{WORDS}</p><p>{WORDS}</p></article></body></html>"
    done = extract(page(html))
    assert done.failures == []
    assert (
        done.text
        == done.extracted
        == trafilatura.extract(html, favor_precision=True, include_comments=False, deduplicate=False)
    )
    assert "wheel turns" in str(done.text)
    assert "Home" not in str(done.text)


def test_text_does_not_depend_on_pages_before_it(extract: Extract) -> None:
    html = f"<html><body><article><p>{WORDS}</p><p>{WORDS}</p></article></body></html>"
    texts = {extract(page(html)).text for _ in range(6)}
    assert len(texts) == 1
    assert None not in texts


@pytest.mark.slow
def test_favor_and_tables_reach_the_extractor() -> None:
    html = (
        f"<html><body><article><header>By the miller</header><p>{WORDS}</p><table><tr><td>sacks</td>"
        f"<td>twelve</td></tr><tr><td>days</td><td>three</td></tr></table></article></body></html>"
    )
    for favor in ("precision", "balanced", "recall"):
        done = Extract(ExtractConfig(favor=favor))(page(html))
        assert done.text == trafilatura.extract(
            html,
            favor_precision=favor == "precision",
            favor_recall=favor == "recall",
            include_comments=False,
        )
    assert "twelve" in str(Extract(ExtractConfig())(page(html)).text)
    assert "twelve" not in str(Extract(ExtractConfig(include_tables=False))(page(html)).text)


def test_resiliparse_extracts_main_content() -> None:
    html = f"<html><body><nav>Home</nav><main><p>{WORDS}</p></main></body></html>"
    done = Extract(ExtractConfig(engine="resiliparse"))(page(html))
    assert done.failures == []
    assert "wheel turns" in str(done.text)


def test_plain_text_only_has_its_newlines_normalised(extract: Extract) -> None:
    done = extract(page("<p>one\r\ntwo\rthree  \n", media="text"))
    assert done.text == done.extracted == "<p>one\ntwo\nthree  \n"


@with_each(
    *product(
        ["trafilatura", "resiliparse"], ["", " \n", "<", "<html>", "<html><body></body></html>", "\0\0", "<p></p>"]
    )
)
def test_nothing_to_extract_is_a_verdict(engine: str, raw: str) -> None:
    done = Extract(ExtractConfig(engine=engine))(page(raw))
    assert done.text is None or done.text.strip()
    assert done.failures in ([("extract", "extract.empty")], [])


def test_empty_plain_text_is_a_verdict(extract: Extract) -> None:
    assert extract(page(" \r\n", media="text")).failures == [("extract", "extract.empty")]


@pytest.mark.parametrize("error", [ValueError("bad"), RecursionError(), MemoryError(), AssertionError(), TypeError()])
def test_parser_errors_never_escape(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> str:
        raise error

    monkeypatch.setattr(extract_trafilatura, "extract_text", broken)
    done = Extract(ExtractConfig())(page(f"<p>{WORDS}</p>"))
    assert done.failures == [("extract", "extract.failed")]
    assert done.text is None


@settings(max_examples=60)
@given(st.text(alphabet="<>/ a=\"'&;!-\x00\x0b\ud800é日ptdiv", max_size=200))
def test_any_text_gets_a_text_or_a_verdict(raw: str) -> None:
    done = Extract(ExtractConfig())(page(raw))
    assert (done.text is None) == bool(done.failures)


def test_pages_over_a_bound_are_refused_unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> str:
        raise AssertionError("a refused page reached the parser")

    monkeypatch.setattr(extract_trafilatura, "extract_text", never)
    stage = Extract(ExtractConfig())
    shapes = {
        "extract.too_large": ["<p>" + "x" * (4 << 20) + "</p>", "<p>" + "日" * (3 << 19) + "</p>"],
        "extract.too_many_elements": [
            "<p>" + "<span>a</span> b" * 50_000 + "</p>",
            "<p>" + "<span>a</span> b" * 5_001 + "</p>",
            "<p>" + "<x>a" * 5_001 + "</p>",
            "<p>a</p>" * 16_001,
            "<table>" + "<tr><td colspan=100 rowspan=100>a</td></tr>" * 2_500 + "</table>",
            "<table><tr><td COLSPAN = '100'>a</td></tr>" + "<tr><td>a</td></tr>" * 600 + "</table>",
        ],
    }
    for rule, raws in shapes.items():
        for raw in raws:
            assert stage(page(raw)).failures == [("extract", rule)], raw[:40]


def test_bounds_count_exactly_what_they_say() -> None:
    stage = Extract(ExtractConfig(max_html_bytes=80, max_elements=5, max_inline_elements=3, max_table_cells=9))
    assert "too_large" not in str(stage(page("é" * 40)).failures)
    assert stage(page("é" * 40 + "e")).failures == [("extract", "extract.too_large")]
    assert "too_many" not in str(stage(page("<p>a</p>" * 5)).failures)
    assert stage(page("<p>a</p>" * 6)).failures == [("extract", "extract.too_many_elements")]
    assert "too_many" not in str(stage(page("<p><b>a<i>b<u>c</p>")).failures)
    assert stage(page("<p><b>a<i>b<u>c<s>")).failures == [("extract", "extract.too_many_elements")]
    assert "too_many" not in str(stage(page("<table><td colspan=5>")).failures)
    assert stage(page("<table><tr><td colspan=6>")).failures == [("extract", "extract.too_many_elements")]


def test_table_cells_counts_spanned_and_padded_cells() -> None:
    assert table_cells("<table><tr><td>a</td><td>b</td></tr></table>") == 0
    # one row of three columns, padded over two rows, and two more cells by the span itself
    assert table_cells("<table><tr><td colspan=3>a</td></tr><tr><td>b</td></tr></table>") == 2 + 2 * 3
    assert table_cells("<TABLE><TR><TH ROWSPAN='4'>a</TABLE>") == 3 + 1
    assert table_cells("<p data='colspan=9'>no table</p>") == 0


@settings(max_examples=70)
@given(st.lists(st.sampled_from(("<p>", "</p>", "<b>", "<i>a", "</b>", "text", "<div>", "</div>", "<br>", "<li>"))))
def test_counts_bound_what_the_parser_builds(parts: list[str]) -> None:
    html = "".join(parts)
    root = lxml.html.fromstring(f"<html><body>{html}</body></html>")
    assert num_elements(html) >= len(list(root.body.iterdescendants()))
    assert num_elements(html) >= inline_run(html)
    inline = sum(1 for element in root.body.iterdescendants() if element.tag in ("b", "i", "br"))
    if not {"<p>", "<div>", "<li>"} & set(parts):
        assert inline_run(html) == inline


SHAPES: dict[str, Callable[[int], str]] = {
    "tags": lambda n: "<td <td " * n,
    "attributes": lambda n: "<td colspan " * n,
    "quotes": lambda n: "<td colspan=' " * n,
    "spaces": lambda n: "<td colspan=" + " " * 4 * n + "x>",
    "brackets": lambda n: "<" * 8 * n,
    "names": lambda n: "<a" * 4 * n,
    "no tag": lambda n: "colspan=" * n,
}


@pytest.mark.slow
def test_counting_takes_linear_time() -> None:
    """Sixteen times the text; quadratic would be 256."""

    def count(html: str) -> None:
        num_elements(html), inline_run(html), table_cells(html)

    each(SHAPES, lambda name: assert_grows_tamely(count, SHAPES[name](3_000), SHAPES[name](48_000), 64))


@pytest.mark.slow
def test_worst_known_shapes_within_the_bounds_grow_tamely(extract: Extract) -> None:
    """The shapes that once hung extraction finish when they are as large as the bounds allow."""
    article = f"<article><p>{WORDS}</p><p>"
    for raw in (article + "<span>word</span>word, " * 4_990, f"<body>{'<div class=share>word</div>' * 15_900}</body>"):
        done = extract(page(raw))
        assert ("extract", "extract.too_many_elements") not in done.failures


@with_each(("max_html_bytes", 0), ("max_elements", -1), ("engine", "readability"), ("favor", "speed"), ("max_text", 3))
def test_impossible_settings_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        ExtractConfig.model_validate({field: value})


@pytest.mark.parametrize(("field", "value"), [("favor", "recall"), ("include_tables", False)])
def test_settings_the_engine_does_not_have_are_refused(field: str, value: object) -> None:
    with pytest.raises(
        ValidationError, match=f"{field}: expected only with engine trafilatura, got engine resiliparse"
    ):
        ExtractConfig.model_validate({"engine": "resiliparse", field: value})
    assert ExtractConfig.model_validate(ExtractConfig(engine="resiliparse").model_dump()).engine == "resiliparse"


def test_pages_without_text_are_not_logged_one_by_one(extract: Extract, capfd: pytest.CaptureFixture[str]) -> None:
    assert logging.getLogger("trafilatura").handlers
    extract(page("<html><body></body></html>"))
    assert capfd.readouterr().err == ""


@pytest.mark.shared
@pytest.mark.slow
def test_no_seventh_real_page_breaks_a_bound(
    extract: Extract, real_pages: Callable[..., Iterator[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extract_trafilatura, "extract_text", lambda *args: "text")
    assert [real.record_id for real in real_pages(every=7) if extract(page(real.html)).failures] == []


def token_f1(text: str, truth: str) -> float:
    """F1 of the bags of tokens (words; single characters of scripts without spaces)."""
    tokens = [Counter(re.findall(r"[^\W\d_一-鿿]+|\d+|[一-鿿]", part.lower())) for part in (text, truth)]
    shared = (tokens[0] & tokens[1]).total()
    sizes = [bag.total() for bag in tokens]
    return 2 * shared / sum(sizes) if sum(sizes) else 1.0


@pytest.mark.long
@pytest.mark.shared
def test_text_is_in_every_language_as_near_to_the_truth_as_stock(
    shared: Path, real_pages: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Token F1 against the main texts people (or a reference algorithm) wrote down, beside trafilatura's own call."""
    with gzip.open(shared / "data" / "groundtruth" / "groundtruth.jsonl.gz", "rt", encoding="utf-8") as file:
        truths = {row["record_id"]: row["text"] for row in map(json.loads, file) if row["kind"].startswith("full")}
    stage = Extract(ExtractConfig())
    scores: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for page in real_pages():
        truth = truths.get(page.record_id)
        if truth is None:
            continue
        ours = stage(Page("s", "f", page.record_id, 0, raw=page.html)).text or ""
        stock = trafilatura.extract(page.html, favor_precision=True, include_comments=False, deduplicate=False) or ""
        scores[page.language].append((token_f1(ours, truth), token_f1(stock, truth)))
    assert sum(map(len, scores.values())) > 1000
    for language, pairs in sorted(scores.items(), key=lambda item: -len(item[1])):
        ours, stock = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
        if len(pairs) >= 10:
            with capsys.disabled():
                print(f"\n{language}: {len(pairs)} pages, F1 {ours:.4f}, stock {stock:.4f}", end="")
        assert ours >= stock - 1e-12, language
