"""What readability is spared, and its looks at an element, against readability itself."""

from __future__ import annotations

import copy
import functools
import random
import threading
from types import SimpleNamespace
from typing import Any

import lxml.etree
import lxml.html
import trafilatura.core
import trafilatura.external
import trafilatura.readability_lxml
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml.html import HtmlElement

from quern.data_pipeline.extraction import readability as fast
from support.named_cases import with_each

TAGS = ("div", "p", "p", "a", "a", "ul", "li", "table", "td", "h2", "iframe", "script", "style", "section", "pre")
WORDS = ("water", "the mill,", " ", "\n  ", "a", "of stone. ", "", "wheat, rye, oats and more of it ", "\xa0x")
MARKS = ("sidebar", "content", "Comment-main", "comment", "x", "", "footer", "article body", "menu", "post", "y" * 300)
seeds = st.integers(0, 1 << 32)


def tree_of(seed: int, size: int, tags: tuple[str, ...] = TAGS) -> HtmlElement:
    draw = random.Random(seed)
    root = lxml.html.fromstring("<html><body></body></html>")
    placed = [root[0]]
    for _ in range(size):
        parent = draw.choice(placed[-6:])
        element = lxml.etree.SubElement(parent, draw.choice(tags))
        element.text, element.tail = (" ".join(draw.choices(WORDS, k=draw.randint(0, 4))) or None for _ in range(2))
        for name in draw.sample(("class", "id", "src"), draw.randint(0, 2)):
            element.set(name, draw.choice((*MARKS, "https://www.youtube.com/embed/a")))
        if element.tag not in ("iframe", "script", "style"):
            placed.append(element)
    return root


def document_of(tree: HtmlElement) -> Any:
    return trafilatura.readability_lxml.Document(tree, min_text_length=25)


def comparison() -> fast.ReadabilityComparison:
    """One whose start, a look at every tag, is not made again."""
    made = copy.copy(ready())
    made._state = threading.local()
    return made


@functools.cache
def ready() -> fast.ReadabilityComparison:
    external = trafilatura.external
    return fast.ReadabilityComparison(
        trafilatura.core.compare_extraction, external.try_readability, external.prune_unwanted_nodes
    )


def length(text: str) -> int:
    return len(" ".join(text.split()))


def seen(tree: HtmlElement) -> int:
    """The text that is neither of scripts nor of styles, and what frames may add."""
    pieces = (str(text) for text in tree.xpath("descendant::text()[not(parent::script or parent::style)]"))
    return length("".join(pieces)) + len(" VIDEO") * len(tree.findall(".//iframe"))


@settings(max_examples=70, deadline=None)
@given(seeds, st.integers(0, 40), st.integers(0, 400))
def test_the_bound_is_none_too_low_and_hardly_too_high(seed: int, size: int, limit: int) -> None:
    tree = tree_of(seed, size)
    within = comparison().is_within(tree, limit)
    if within:
        assert seen(tree) <= limit
    if seen(tree) + 2 * len(list(tree.iter("script", "style"))) <= limit:
        assert within


@with_each((3, 0), (3000, 0), (3000, 50), (3, 3000))
def test_a_long_page_is_told_from_its_beginning_and_told_the_same(words: int, scripts: int) -> None:
    tree = lxml.html.fromstring(
        f"<html><body><p>{'a  ' * words}</p><script>{'s ' * scripts}</script><p>{'b ' * words}</p></body></html>"
    )
    exact = seen(tree)
    assert not comparison().is_within(tree, exact - 1)
    assert comparison().is_within(tree, exact + 2)


def test_a_page_of_blanks_is_not_taken_for_a_long_one() -> None:
    tree = lxml.html.fromstring(f"<html><body><p>{'a ' * 500}{' ' * 20_000}</p></body></html>")
    assert comparison().is_within(tree, seen(tree))
    assert not comparison().is_within(tree, seen(tree) - 1)


@settings(max_examples=70, deadline=None)
@given(seeds, st.integers(1, 60), st.integers(0, 300))
def test_a_summary_left_out_is_no_longer_than_the_limit(seed: int, size: int, limit: int) -> None:
    """What readability gives in full is no longer than the limit, wherever its last step is left out."""
    tree = tree_of(seed, size)
    full = trafilatura.external.try_readability(copy.deepcopy(tree))
    spared = comparison()
    left_out: list[bool] = []
    document = trafilatura.readability_lxml.Document
    stock = document.sanitize

    def watched(document: Any, node: HtmlElement, candidates: Any) -> str:
        told = spared.sanitizing(lambda *_: "<p>run</p>")(document, node, candidates)
        left_out.append("run" not in told)
        return told if left_out[-1] else stock(document, node, candidates)

    spared._state.limit = limit
    document.sanitize = watched
    try:
        given_ = trafilatura.external.try_readability(tree)
    finally:
        document.sanitize = stock
    if left_out[0]:
        assert length(full.text_content()) <= limit
        assert length(given_.text_content()) == 0
    else:
        assert lxml.html.tostring(given_) == lxml.html.tostring(full)


def test_outside_of_a_comparison_the_last_step_always_runs() -> None:
    node = lxml.html.fromstring("<div>short</div>")
    assert comparison().sanitizing(lambda *_: "ran")(None, node, {}) == "ran"
    limited = comparison()
    limited._state.limit = 100
    assert limited.sanitizing(lambda *_: "ran")(None, node, {}) != "ran"
    node.tail = "a tail is written with its element"
    assert limited.sanitizing(lambda *_: "ran")(None, node, {}) == "ran"


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 40))
def test_looks_at_an_element_are_those_of_readability(seed: int, size: int) -> None:
    tree = tree_of(seed, size)
    document = document_of(tree)
    scores = fast.Scores(lambda page: {element: scores.link_density(element) for element in page.doc.iter()})
    densities = scores.of(document)
    for element in tree.iter():
        assert scores.link_density(element) == densities[element] == document.get_link_density(element)
        assert fast.class_weight(document, element) == document.class_weight(element)
    left = copy.deepcopy(tree)
    fast.drop_unlikely(document_of(left))
    document.remove_unlikely_candidates()
    assert lxml.html.tostring(left) == lxml.html.tostring(tree)


@with_each(
    ("<p>x</p>", "x", "precision", True),
    ("<p>x</p>", "", "precision", False),
    ("<p>x</p>", "x", "recall", False),
    ("<p/><p><b>x</b></p>", "x", "balanced", True),  # text deeper in a paragraph is a paragraph's
    ("<p/><b>x</b>", "x", "balanced", False),
    ("<p>x</p><table/>", "x", "balanced", True),
    ("<p>x</p><table/><table/>", "x", "balanced", False),
    ("<p>x</p><div><p/></div><table/><table/>", "x", "balanced", True),
)
def test_what_is_sound_is_what_trafilatura_does_not_call_deficient(
    body: str, text: str, focus: str, sound: bool
) -> None:
    tree = lxml.etree.fromstring(f"<body>{body}</body>")
    assert fast._is_sound(tree, text, SimpleNamespace(focus=focus)) == sound
    if focus != "recall" and text:
        options = SimpleNamespace(focus=focus, min_extracted_size=250)
        # readability's text is longer than twice the least, and less than twice ours
        deficient = trafilatura.external._prefer_readability(tree, tree, "y" * 501, 400, 501, options)
        assert deficient == (not sound)
