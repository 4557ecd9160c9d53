"""What stands in for trafilatura's conversion of tags and its look for the body, against trafilatura's own."""

from __future__ import annotations

import copy
import random
from itertools import product
from types import SimpleNamespace
from typing import Any

import lxml.etree
import lxml.html
import pytest
import trafilatura.core
import trafilatura.external
import trafilatura.htmlprocessing
import trafilatura.main_extractor
import trafilatura.settings
import trafilatura.utils
import trafilatura.xpaths
from hypothesis import given, settings
from hypothesis import strategies as st

from quern.data_pipeline.extraction import content as extract_content
from quern.data_pipeline.extraction import conversion as fast
from quern.data_pipeline.extraction.content import ENOUGH_CHARS, Backup, PageElement
from quern.data_pipeline.extraction.readability import ReadabilityComparison
from quern.data_pipeline.extraction.xpath_walk import Firsts
from support.named_cases import with_each

TAGS = (
    "div",
    "p",
    "a",
    "a",
    "ul",
    "li",
    "table",
    "td",
    "span",
    "pre",
    "b",
    "sup",
    "strong",
    "blockquote",
    "q",
    "br",
    "code",
    "div",
)
WORDS = ("water", " ", "{", "\n    ", "('", "the mill ", "")
seeds = st.integers(0, 1 << 32)


def tree_of(seed: int, size: int, root: str = "html") -> Any:
    draw = random.Random(seed)
    tree = lxml.html.Element(root)
    placed = [lxml.etree.SubElement(tree, "body") if root == "html" else tree]
    for _ in range(size):
        element = lxml.etree.SubElement(draw.choice(placed[-5:]), draw.choice(TAGS))
        element.text, element.tail = (" ".join(draw.choices(WORDS, k=draw.randint(0, 3))) or None for _ in range(2))
        if draw.random() < 0.2:
            element.set("class", draw.choice(("hljs-x", "schema-faq-question", "a-w3-code b", "x")))
        placed.append(element)
    return tree


@settings(max_examples=70, deadline=None)
@given(seeds, st.integers(0, 40), st.sampled_from(("html", "div", "li")), st.booleans(), st.booleans())
def test_tags_are_converted_as_by_trafilatura(seed: int, size: int, root: str, tables: bool, links: bool) -> None:
    settings_ = trafilatura.htmlprocessing
    options = trafilatura.settings.Extractor(tables=tables, links=links)
    expected = settings_.convert_tags(tree_of(seed, size, root), options)
    stock = settings_.CONVERSIONS
    settings_.CONVERSIONS = fast.conversions(stock)
    try:
        converted = fast.converting(settings_.convert_tags)(tree_of(seed, size, root), options)
    finally:
        settings_.CONVERSIONS = stock
    assert lxml.html.tostring(converted) == lxml.html.tostring(expected)


def bodies() -> Firsts:
    return Firsts([xpath.path for xpath in trafilatura.xpaths.BODY_XPATH])


PARAGRAPH = "<p>" + "The miller sets the stone, pours the grain, and waits until noon. " * 3 + "</p>"


@pytest.mark.parametrize("focus", ["precision", "balanced", "recall"])
@pytest.mark.parametrize(
    ("page", "copies"),
    [
        (f"<div>{PARAGRAPH}<ul><li>wheat</li></ul></div>", 0),
        (f"<article>{PARAGRAPH}</article><div>{PARAGRAPH}<done>said</done></div>", 1),
        ("<article><br></article>", 1),
        ("<div><done>x</done></div>", 0),
    ],
)
def test_a_page_without_a_body_is_its_own_backup(
    page: str, copies: int, focus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extractor, core = trafilatura.main_extractor, trafilatura.core
    options = trafilatura.settings.Extractor(precision=focus == "precision", recall=focus == "recall")
    tree = trafilatura.utils.load_html(f"<html><body>{page}</body></html>")
    cleaned, _ = core._prepare_tree(tree, options, None)
    expected, text = extractor.extract_content(copy.deepcopy(cleaned), options)
    made: list[Any] = []

    def counting(element: Any) -> Any:
        if element is cleaned:
            made.append(element)
        return copy.deepcopy(element)

    found = bodies()
    backup = Backup(found, extractor.extract_content, counting)
    monkeypatch.setattr(extractor, "deepcopy", backup.copy)
    monkeypatch.setattr(extractor, "BODY_XPATH", list(found.members))
    body, again = backup.extract(cleaned, options)
    assert (lxml.etree.tostring(body), again) == (lxml.etree.tostring(expected), text)
    assert len(made) == copies
    assert backup.copy(cleaned) is not cleaned, "once the extraction is over a copy is a copy"


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(0, 40))
def test_texts_in_paragraphs_are_those_of_the_expression(seed: int, size: int) -> None:
    parser = lxml.html.HTMLParser()
    parser.set_element_class_lookup(lxml.etree.ElementDefaultClassLookup(element=PageElement))
    tree = lxml.html.fromstring(lxml.html.tostring(tree_of(seed, size)), parser=parser)
    assert type(tree) is PageElement
    for element in tree.iter("*"):
        assert element.xpath("//p//text()") == lxml.etree.XPath("//p//text()")(tree)
        wild = ".//code|.//p|.//quote|.//table|.//div[contains(@class, 'w3-code')]"
        assert element.xpath(wild) == lxml.etree.XPath(wild)(element)
        assert element.xpath(".//p") == element.findall(".//p")
        assert element.xpath("count($n)", n=[element]) == 1


def test_the_expressions_answered_sooner_are_those_that_trafilatura_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Asked(PageElement):
        def xpath(self, path: Any, *args: Any, **kwargs: Any) -> Any:
            asked.append(path)
            return super().xpath(path, *args, **kwargs)

    parser = lxml.html.HTMLParser()
    parser.set_element_class_lookup(lxml.etree.ElementDefaultClassLookup(element=Asked))
    for page in (f"<article>{PARAGRAPH * 5}</article>", "<div>x</div>"):
        tree = lxml.html.document_fromstring(page, parser=parser)
        trafilatura.main_extractor.extract_content(tree, trafilatura.settings.Extractor(precision=True))
    assert {"//p//text()", extract_content._WILD} <= set(asked)


def test_of_long_texts_in_paragraphs_there_are_enough() -> None:
    tree = PageElement()
    for _ in range(100):
        lxml.etree.SubElement(tree, "p").text = "x" * 1000
    assert ENOUGH_CHARS <= len("".join(tree.xpath("//p//text()"))) < 2 * ENOUGH_CHARS


@with_each(*product(["<p>x</p>", "<p>x</p><div><time>y</time></div>", "<figure/>"], [True, False]))
def test_unclean_text_is_told_as_by_trafilatura(inside: str, hopeless: bool) -> None:
    external = trafilatura.external
    stock = external.SANITIZED_XPATH
    body = lxml.etree.fromstring(f"<body>{inside}</body>")
    other = lxml.html.fromstring("<html><body><nav>x</nav></body></html>")
    told: list[bool] = []

    def compare(cleaned: Any, raw: Any, body: Any, *rest: Any) -> None:
        body = other if len(comparison.readability(raw)) else body
        told.append(bool(body.xpath(external.SANITIZED_XPATH)))

    comparison = ReadabilityComparison(compare, lambda tree: other, external.prune_unwanted_nodes)
    comparison._state.hopeless = hopeless
    comparison.compare(other, other, body, "", SimpleNamespace(focus="precision"))
    assert told == [bool(body.xpath(stock)) if hopeless else True]
    assert stock == external.SANITIZED_XPATH
