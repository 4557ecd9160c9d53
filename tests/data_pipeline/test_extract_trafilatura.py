from __future__ import annotations

import importlib.metadata
import logging
import random
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any, get_args

import justext.core
import lxml.html
import pytest
import trafilatura
import trafilatura.core
import trafilatura.external
import trafilatura.htmlprocessing
import trafilatura.main_extractor
import trafilatura.readability_lxml
import trafilatura.settings
import trafilatura.utils
import trafilatura.xpaths
from lxml.etree import XPath

from quern.data_pipeline.extraction import trafilatura_fast as fast
from quern.data_pipeline.extraction.fallbacks import Neighbours, Paragraph, StopWords
from quern.data_pipeline.extraction.readability import ReadabilityComparison
from quern.data_pipeline.extraction.xpath_walk import Walk
from support.named_cases import with_each

READABILITY = ("score_paragraphs", "get_link_density", "class_weight", "remove_unlikely_candidates", "sanitize")
RE = {"re": "http://exslt.org/regular-expressions"}


@pytest.fixture
def fresh() -> Any:
    """Preparation happens once a process; tests that change what it sees start it anew, before and after."""
    fast._prepare.cache_clear()
    yield
    fast._prepare.cache_clear()


def stock_comparison() -> ReadabilityComparison:
    external = trafilatura.external
    return ReadabilityComparison(
        trafilatura.core.compare_extraction, external.try_readability, external.prune_unwanted_nodes
    )


def never(*args: object) -> Any:
    raise AssertionError("not to be called")


def expressions() -> list[XPath]:
    return [xpath for name in fast.EXPRESSION_LISTS for xpath in getattr(trafilatura.xpaths, name)]


def state() -> list[Any]:
    return [
        *(list(getattr(trafilatura.xpaths, name)) for name in fast.EXPRESSION_LISTS),
        trafilatura.utils.HTML_PARSER,
        trafilatura.utils.INVALID_XML_CHARS,
        trafilatura.core.compare_extraction,
        trafilatura.core._extract_and_compare,
        trafilatura.core._prepare_tree,
        trafilatura.core.tree_cleaning,
        trafilatura.core.convert_tags,
        trafilatura.core.extract_content,
        trafilatura.main_extractor.deepcopy,
        trafilatura.htmlprocessing.CONVERSIONS,
        trafilatura.external.SANITIZED_XPATH,
        trafilatura.external.tree_cleaning,
        trafilatura.main_extractor.prune_unwanted_sections,
        trafilatura.main_extractor.delete_by_link_density,
        trafilatura.main_extractor.link_density_test_tables,
        trafilatura.main_extractor._elem_text,
        trafilatura.main_extractor.is_text_element,
        trafilatura.readability_lxml.text_length,
        *(vars(trafilatura.readability_lxml.Document)[name] for name in READABILITY),
        vars(justext.core.ParagraphMaker)["make_paragraphs"],
        trafilatura.external.basic_cleaning,
        trafilatura.external.try_readability,
        trafilatura.external.prune_unwanted_nodes,
        trafilatura.external.classify_paragraphs,
        justext.core.Paragraph,
        justext.core._get_neighbour,
    ]


def test_installed_version_runs_on_walks() -> None:
    assert importlib.metadata.version("trafilatura") in fast.VERIFIED_VERSIONS
    assert importlib.metadata.version("justext") in fast.VERIFIED_JUSTEXT
    assert fast.backend() == "walks"


def test_every_regex_expression_is_a_walk_that_agrees_with_its_xpath_on_its_own_words() -> None:
    for xpath in expressions():
        tree = fast.probe_tree(xpath.path)
        expected = xpath(tree)
        assert 0 < len(expected) < len(list(tree.iter())), f"the probe must tell apart: {xpath.path}"
        if "re:test" in xpath.path:
            walk = Walk(xpath.path)
            assert walk(tree) == (expected[:1] if walk.first else expected)


@pytest.mark.slow
def test_walks_agree_with_xpaths_on_random_pages_made_of_their_words() -> None:
    words = sorted({word for xpath in expressions() for word in fast._samples(xpath.path) if "\n" not in word})
    words += ["a", "content", "entry", "post", "link", "bottom", "comment", "hidden", "Nav", "teaser"]
    for seed in range(40):
        draw = random.Random(seed)
        root = lxml.html.fromstring("<html><body></body></html>")
        placed = [root[0]]
        for _ in range(60):
            tag = draw.choice(("div", "section", "p", "span", "aside", "ol", "article", "main", "h1", "list", "item"))
            element = lxml.etree.SubElement(draw.choice(placed), tag)
            for name in draw.sample(("id", "class", "style", "role", "aria-hidden", "itemprop"), draw.randint(0, 3)):
                element.set(name, " ".join(draw.choices(words, k=draw.randint(1, 2))))
            placed.append(element)
        for xpath in expressions():
            if "re:test" in xpath.path:
                walk, expected = Walk(xpath.path), xpath(root)
                assert walk(root) == (expected[:1] if walk.first else expected)


@pytest.mark.slow
def test_text_is_that_of_stock_on_built_in_pages_in_every_mode() -> None:
    for page in fast._PAGES:
        for favor in get_args(fast.Favor):
            for tables in (True, False):
                assert fast.extract_text(page, favor, tables) == fast.stock_text(page, favor, tables)


def test_trafilatura_is_left_as_it_was_found() -> None:
    before = state()
    fast.extract_text(fast._PAGES[0])
    assert all(a is b or a == b for a, b in zip(state(), before, strict=True))


def test_trafilatura_is_left_as_it_was_found_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    fast.backend()
    before = state()

    def broken(*args: object, **kwargs: object) -> str:
        assert state() != before, "the walks are in place while extraction runs"
        raise MemoryError

    monkeypatch.setattr(trafilatura, "extract", broken)
    with pytest.raises(MemoryError):
        fast.extract_text(fast._PAGES[0])
    assert all(a is b or a == b for a, b in zip(state(), before, strict=True))


@pytest.mark.parametrize("changed", ["trafilatura", "justext"])
def test_unverified_version_runs_on_stock_and_says_so_once(
    changed: str, fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9.9" if name == changed else installed(name))
    with caplog.at_level(logging.WARNING, logger=fast.__name__):
        for page in fast._PAGES:
            assert fast.extract_text(page) == fast.stock_text(page)
    assert fast.backend().startswith(f"stock: {changed} 9.9.9")
    assert len([record for record in caplog.records if record.name == fast.__name__]) == 1


def test_changed_meaning_of_an_expression_is_caught_by_the_self_test(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = XPath.__call__
    for name in fast.EXPRESSION_LISTS:
        monkeypatch.setattr(trafilatura.xpaths, name, list(getattr(trafilatura.xpaths, name)))
    target = trafilatura.xpaths.TEASER_DISCARD_XPATH[0]

    class Changed:
        """Reads like the old expression, answers otherwise."""

        path = target.path

        def __call__(self, tree: Any) -> Any:
            return honest(target, tree)[1:]

    trafilatura.xpaths.TEASER_DISCARD_XPATH[0] = Changed()
    assert fast.backend().startswith("stock: the self-test of TEASER_DISCARD_XPATH")


def test_changed_words_of_an_expression_are_followed(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = XPath(".//*[self::div][re:test(@class, 'millstone|flour-(?:bin|sack)')]", namespaces=RE)
    monkeypatch.setattr(trafilatura.xpaths, "TEASER_DISCARD_XPATH", [changed])
    assert fast.backend() == "walks"
    walk = next(r for r in fast._prepare("precision")[0] if r.name == "TEASER_DISCARD_XPATH").fast[0]
    assert len(walk(lxml.html.fromstring("<body><div class='flour-sack'></div><div class='teaser'></div></body>"))) == 1


def test_invalid_characters_are_removed_as_by_the_regex() -> None:
    pattern = trafilatura.utils.INVALID_XML_CHARS
    quick = fast._InvalidCharacters(pattern)
    for code in [*range(0x30), 0x7F, 0x85, 0xFFFD, 0xFFFE, 0xFFFF, 0x10000, 0x1FFFE]:
        text = f"a{chr(code)}b{chr(code)}é"
        assert quick.sub("", text) == pattern.sub("", text)


@pytest.mark.slow
def test_skipped_readability_could_not_have_been_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound itself: readability's text is never longer than what is counted on the tree it is given."""
    pages = [
        *fast._PAGES,
        "<html><head><title>a &lt;b&gt; &amp; c</title></head><body><svg><title/></svg><p>one, two, three, and four "
        "<iframe src='https://www.youtube.com/embed/a'>&lt;b&gt;</iframe><iframe src=x></iframe>&lt;p&gt; &amp;amp;</p>"
        "<textarea/><noscript><img src=a></noscript><p>text after, long enough to count, and on it goes</p>",
        "<body><div>loose, text<br><br>and more of it, on and on, for a while</div><xmp>&lt;&lt;</xmp></body>",
    ]
    for page in pages:
        tree = trafilatura.utils.load_html(page)
        for element in list(tree.iter("script", "style", "fencedframe")):
            element.drop_tree()
        comparison = stock_comparison()
        within = {limit for limit in range(2000) if comparison.is_within(tree, limit)}
        text = trafilatura.external.try_readability(tree).text_content()
        assert all(limit >= len(" ".join(text.split())) for limit in within)


def test_threads_that_extract_at_once_have_stock_text_and_leave_trafilatura_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = [*fast._PAGES, *(f"<html><body><{tag}>x</{tag}>{SENTENCES}</body></html>" for tag in ("aside", "form"))]
    expected = [fast.stock_text(page) for page in pages]
    assert fast.backend() == "walks"
    before, found, inside, most = state(), [], [0], [0]

    def watched(html: str, favor: fast.Favor, include_tables: bool) -> str | None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        try:
            return text(html, favor, include_tables)
        finally:
            inside[0] -= 1

    text = fast._text
    monkeypatch.setattr(fast, "_text", watched)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [
            threading.Thread(target=lambda: found.append([fast.extract_text(page) for page in pages])) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == [expected] * 3
    assert most == [1], "the replacements are the process's, so one at a time"
    assert all(a is b or a == b for a, b in zip(state(), before, strict=True))


SENTENCES = "<p>" + "The miller sets the stone, pours the grain, and waits until noon. " * 4 + "</p>"


@pytest.mark.slow
@with_each(
    *product(
        get_args(fast.Favor),
        ["&#1;", "&#xfffe;", ""],
        [
            # pruned for readability, which is not asked
            "<article>{0}<div class=share>x<p class=sidebar>y</p>{1}</div></article>",
            # found by one expression in what another one deletes
            "<code></code>z<p class=share>{1}<strong class=hidden style='display:none'></strong>{1}"
            "wheat, rye, and oats",
            "{0}<div class=sidebar>a<b class=hidden style='display:none'>b</b>{1}</div>{0}",
        ],
    )
)
def test_a_character_that_lxml_refuses_ends_the_pages_that_it_ends_in_stock(
    favor: fast.Favor, character: str, page: str
) -> None:
    html = page.format(SENTENCES, character)
    assert fast.extract_text(html, favor) == fast.stock_text(html, favor)


def test_a_video_frame_counts_with_the_word_readability_puts_in_its_place() -> None:
    video = "<iframe src='https://www.youtube.com/embed/a'></iframe>"
    apart = lxml.html.fromstring(f"<div><p>wheat {video} rye and a good many words more, of it</p></div>")
    comparison = stock_comparison()
    bound = next(limit for limit in range(1000) if comparison.is_within(apart, limit))
    read = trafilatura.external.try_readability(apart).text_content()
    assert "wheat VIDEO rye" in read
    assert len(read) <= bound
    page = "<body><p>word</p><iframe src='https://www.youtube.com/embed/a'></iframe><iframe src=x></iframe></body>"
    comparison = stock_comparison()
    bound = len("word") + 2 * len(" VIDEO")
    assert comparison.is_within(trafilatura.utils.load_html(page), bound)
    assert not comparison.is_within(trafilatura.utils.load_html(page), bound - 1)
    assert not comparison.is_within(trafilatura.utils.load_html("<body><p>word</p><xmp>&lt;</xmp></body>"), 10**9)


@with_each(
    ("x" * 50, "<body><p>x</p></body>", "precision", False),  # 100 characters are not more than twice 50
    ("x" * 49, "<body><p>x</p></body>", "precision", True),
    ("x" * 50, "<body><p>x</p></body>", "balanced", False),
    ("x" * 50, "<body><p>x</p></body>", "recall", True),  # recall prefers readability for less
    ("", "<body><p>x</p></body>", "precision", True),
    ("x" * 50, "<body><div>x</div></body>", "precision", True),  # no paragraph: structurally deficient
    ("x" * 50, "<body><p>x</p><table></table><table></table></body>", "precision", True),
)
def test_readability_runs_exactly_where_it_could_win(own_text: str, body: str, focus: str, runs: bool) -> None:
    ran = []

    def readability(tree: Any) -> Any:
        ran.append(tree)
        return tree

    raw = lxml.html.fromstring(f"<html><body><p>{'y' * 100}</p><script>{'z' * 999}</script></body></html>")
    comparison = ReadabilityComparison(lambda cleaned, raw, *rest: comparison.readability(raw), readability, never)
    comparison.compare(raw, raw, lxml.html.document_fromstring(body), own_text, SimpleNamespace(focus=focus))
    assert bool(ran) == runs
    comparison.readability(raw)
    assert len(ran) == runs + 1, "outside of a comparison it always runs"


def test_a_page_too_short_to_win_is_neither_copied_nor_pruned() -> None:
    comparison = ReadabilityComparison(trafilatura.core.compare_extraction, never, never)
    options = trafilatura.settings.Extractor(precision=True)
    paragraph = "<p>" + "The miller sets the stone, pours the grain, and waits until noon. " * 12 + "</p>"
    tree = trafilatura.utils.load_html(f"<html><body><div class='nav'>Nav</div><article>{paragraph}</article></body>")
    cleaned, backup = trafilatura.core._prepare_tree(tree, options, None)
    before = lxml.html.tostring(tree)
    fast.extract_text("<p>prepared</p>")
    trafilatura.core.compare_extraction, stock = comparison.compare, trafilatura.core.compare_extraction
    trafilatura.external.prune_unwanted_nodes, prune = comparison.prune, trafilatura.external.prune_unwanted_nodes
    trafilatura.external.try_readability, readability = comparison.readability, trafilatura.external.try_readability
    try:
        _, text = comparison.extract(cleaned, backup, tree, options)
    finally:
        trafilatura.core.compare_extraction = stock
        trafilatura.external.prune_unwanted_nodes = prune
        trafilatura.external.try_readability = readability
    assert text.startswith("The miller sets")
    assert lxml.html.tostring(tree) == before


def test_what_is_counted_on_the_whole_page_bounds_what_is_left_of_it() -> None:
    comparison = stock_comparison()
    for page in [
        *fast._PAGES,
        "<body>a <b>b</b><script>no</script> c<style>no</style>d<iframe></iframe> &nbsp; e</body>",
    ]:
        tree = trafilatura.utils.load_html(page)
        bound = next(limit for limit in range(10_000) if comparison.is_within(tree, limit))
        for element in list(tree.iter("script", "style", "fencedframe")):
            element.drop_tree()
        assert comparison.is_within(tree, bound)
        trafilatura.htmlprocessing.prune_unwanted_nodes(tree, trafilatura.xpaths.OVERALL_DISCARD_XPATH)
        assert comparison.is_within(tree, bound)


def test_fewer_stop_words_and_remembered_texts_make_the_classes_that_justext_makes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["The", "İstanbul", "ΑΣ", "and", "of", "water", "ÇA", "est", "LE", "moulin", "wheat", "©", "straße"]
    stoplist = ("the", "and", "of", "est", "le", "ας", "i̇stanbul", "ça")
    draw = random.Random(3)
    body = "".join(
        f"<{tag}>{' '.join(draw.choices(words, k=draw.randint(0, 60)))}"
        f"<a>{' '.join(draw.choices(words, k=3))}</a>\n</{tag}>"
        for tag in draw.choices(("p", "div", "li", "select"), k=200)
    )
    tree = lxml.html.fromstring(f"<html><body>{body}<br>x<br><br>y</body></html>")

    def classified(classify: Callable[..., None]) -> list[tuple[Any, ...]]:
        paragraphs = justext.core.ParagraphMaker.make_paragraphs(tree)
        classify(paragraphs, stoplist, 50, 150, 0.1, 0.2, 0.25, True)
        return [(p.text, p.dom_path, p.tags_count, p.chars_count_in_links, p.cf_class) for p in paragraphs]

    expected = classified(justext.core.classify_paragraphs)
    assert len({kind for *_, kind in expected}) == 4
    monkeypatch.setattr(justext.core, "Paragraph", Paragraph)
    assert classified(StopWords(justext.core.classify_paragraphs)) == expected


class Classified:
    heading = False
    class_type = ""

    def __init__(self, cf_class: str) -> None:
        self.cf_class, self.text = cf_class, "x" * 40


def revised(kinds: list[str]) -> list[str]:
    paragraphs = [Classified(kind) for kind in kinds]
    justext.core.revise_paragraph_classification(paragraphs, 150)
    return [paragraph.class_type for paragraph in paragraphs]


def test_neighbours_are_those_of_justext(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(7)
    weights = ((1, 1, 1, 1), (8, 1, 1, 1), (8, 4, 1, 0), (1, 8, 1, 1), (5, 5, 0, 1), (9, 0, 0, 0))
    cases = [
        draw.choices(("short", "neargood", "good", "bad"), draw.choice(weights), k=draw.randint(0, 14))
        for _ in range(4000)
    ]
    expected = [revised(kinds) for kinds in cases]
    monkeypatch.setattr(justext.core, "_get_neighbour", Neighbours().find)
    assert [revised(kinds) for kinds in cases] == expected


def test_a_new_round_of_questions_sees_changed_paragraphs() -> None:
    paragraphs = [SimpleNamespace(class_type=kind) for kind in ("short", "short", "short", "bad")]
    neighbours = Neighbours()
    assert [neighbours.find(i, paragraphs, True, 1, 4) for i in (0, 1)] == ["bad", "bad"]
    paragraphs[3].class_type = "good"
    assert neighbours.find(0, paragraphs, True, 1, 4) == "good"


def test_neighbours_take_linear_time() -> None:
    class Counting:
        reads = 0

        def __init__(self) -> None:
            self.kinds = ["short"] * 3000

        def __getitem__(self, index: int) -> SimpleNamespace:
            Counting.reads += 1
            return SimpleNamespace(class_type=self.kinds[index])

    paragraphs, neighbours = Counting(), Neighbours()
    for i in range(3000):
        neighbours.find(i, paragraphs, True, -1, -1)
        neighbours.find(i, paragraphs, True, 1, 3000)
    assert Counting.reads < 10 * 3000


@pytest.mark.shared
@pytest.mark.slow
def test_text_is_that_of_stock_on_a_sample_of_real_pages(real_pages: Callable[..., Iterator[Any]]) -> None:
    for page in real_pages(every=250):
        for favor in get_args(fast.Favor):
            assert fast.extract_text(page.html, favor) == fast.stock_text(page.html, favor), page.record_id


@pytest.mark.shared
@pytest.mark.parametrize(
    "every", [pytest.param(9, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.exhaustive)]
)
def test_text_is_that_of_stock_on_every_real_page(real_pages: Callable[..., Iterator[Any]], every: int) -> None:
    num_pages = 0
    for page in real_pages(every=every):
        num_pages += 1
        assert fast.extract_text(page.html) == fast.stock_text(page.html), page.record_id
    assert num_pages == 1994 // every
