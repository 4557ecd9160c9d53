"""What stands in for trafilatura's counting, cleaning and settings, against the functions it stands in for."""

from __future__ import annotations

import copy
import random
from typing import Any, get_args

import justext.core
import lxml.etree
import lxml.html
import pytest
import trafilatura.core
import trafilatura.external
import trafilatura.htmlprocessing
import trafilatura.main_extractor
import trafilatura.readability_lxml
import trafilatura.settings
import trafilatura.utils
from hypothesis import given, settings
from hypothesis import strategies as st

from quern.data_pipeline.extraction import trafilatura_fast as fast
from quern.data_pipeline.extraction.conversion import Cleaning
from quern.data_pipeline.extraction.density import LinkDensity, OwnText, length_of
from quern.data_pipeline.extraction.fallbacks import Paragraph, Paragraphs

CONVERTED = (
    "div",
    "div",
    "p",
    "p",
    "list",
    "item",
    "ref",
    "ref",
    "ref",
    "head",
    "quote",
    "table",
    "td",
    "graphic",
    "hi",
)
WORDS = (
    "",
    " ",
    "\n  ",
    "go",
    " to ",
    "the next\npage ",
    "a line of some length, and more of it \u00a0",
    "x" * 90,
    "ßé ",
)


def tree_of(seed: int, tags: tuple[str, ...], size: int) -> Any:
    """A random tree; elements hang below late ones more often than below early ones, so that they nest."""
    draw = random.Random(seed)
    root = lxml.html.document_fromstring("<html><body></body></html>")
    placed = [root[0]]
    for _ in range(size):
        parent = draw.choice(placed[-draw.randint(1, 12) :])
        if draw.random() < 0.04:
            node = draw.choice((lxml.etree.Comment, lxml.etree.ProcessingInstruction))("said")
            parent.append(node)
        else:
            node = lxml.etree.SubElement(parent, draw.choice(tags))
            node.text = "".join(draw.choices(WORDS, k=draw.randint(0, 4))) or None
            placed.append(node)
        node.tail = "".join(draw.choices(WORDS, k=draw.randint(0, 2))) or None
    return root


def markup(tree: Any) -> bytes:
    return bytes(lxml.etree.tostring(tree))


trees = st.tuples(st.integers(0, 1 << 32), st.integers(1, 90))


def ask(delete: Any, tree: Any, precision: bool) -> Any:
    """The questions trafilatura asks of a tree, in its order."""
    for _ in range(2):
        for tag in ("div", "list", "p"):
            delete(tree, tag, backtracking=tag == "div", favor_precision=precision)
    for tag in ("head", "quote"):
        delete(tree, tag, backtracking=False, favor_precision=True)
    return tree


LINK = f"<ref>{'link text ' * 6}</ref> "


@pytest.mark.parametrize(
    ("page", "num_left"),
    [
        # dense only once its paragraph is gone: by the second round
        (f"<div><ref>ab</ref> <ref>cd</ref><p><ref>{'x' * 400}</ref></p></div><p>end</p>", 0),
        # not dense: what made its link long is gone by the second round
        (f"<div><ref>ab<p><ref>{'x' * 400}</ref></p></ref>{'plain ' * 18}</div><p>end</p>", 1),
        # a farm, and what holds nothing else
        (f"<div><div>{LINK * 6}</div></div>", 0),
    ],
)
def test_what_was_deleted_changes_what_is_dense(page: str, num_left: int) -> None:
    tree = lxml.html.document_fromstring(f"<html><body>{page}</body></html>")
    expected = ask(trafilatura.htmlprocessing.delete_by_link_density, copy.deepcopy(tree), True)
    assert len(list(expected.iter("div"))) == num_left
    density = LinkDensity(lambda tree: ask(density.delete, tree, True))
    assert markup(density.prune_sections(tree)) == markup(expected)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(trees, st.booleans())
def test_what_is_dense_is_what_trafilatura_deletes(drawn: tuple[int, int], precision: bool) -> None:
    seed, size = drawn
    tree = tree_of(seed, CONVERTED, size)
    stock = trafilatura.htmlprocessing.delete_by_link_density

    expected = markup(ask(stock, copy.deepcopy(tree), precision))
    density = LinkDensity(lambda tree: ask(density.delete, tree, precision))
    assert markup(density.prune_sections(copy.deepcopy(tree))) == expected
    assert markup(ask(density.delete, copy.deepcopy(tree), precision)) == expected, "and where nothing is remembered"
    for table in tree.iter("table"):
        assert LinkDensity.is_dense_table(table) == trafilatura.htmlprocessing.link_density_test_tables(table)
    extractor = trafilatura.main_extractor
    own = OwnText(extractor._elem_text, extractor.is_text_element)
    assert own.has_text(None) is extractor.is_text_element(None) is False
    for element in tree.iter():
        if isinstance(element.tag, str):
            assert own.text(element) == extractor._elem_text(element)
            assert own.has_text(element) is extractor.is_text_element(element)
            assert length_of(element) == trafilatura.readability_lxml.text_length(element)


def test_random_trees_have_what_is_deleted_and_what_is_kept() -> None:
    deleted = kept = 0
    for seed in range(60):
        tree = tree_of(seed, CONVERTED, 60)
        before = len(list(tree.iter("div", "list", "p")))
        for tag in ("div", "list", "p"):
            trafilatura.htmlprocessing.delete_by_link_density(tree, tag, True, True)
        left = len(list(tree.iter("div", "list", "p")))
        deleted, kept = deleted + before - left, kept + left
    assert min(deleted, kept) > 40


@settings(max_examples=40, deadline=None)
@given(trees)
def test_paragraphs_are_those_of_justext(drawn: tuple[int, int]) -> None:
    seed, size = drawn
    tree = tree_of(seed, ("div", "p", "li", "br", "br", "a", "span", "h2", "td", "{urn:x}a", "select"), size)
    stock = justext.core.ParagraphMaker.make_paragraphs

    def told(paragraphs: list[Any]) -> list[tuple[Any, ...]]:
        return [(p.text, p.text_nodes, p.dom_path, p.tags_count, p.chars_count_in_links) for p in paragraphs]

    def never(root: Any) -> Any:
        raise AssertionError("not to be called")

    found = Paragraphs(never)(tree)
    assert all(type(paragraph) is Paragraph for paragraph in found)
    assert told(found) == told(stock(tree))


def test_paragraphs_beside_instructions_and_of_unknown_nodes_are_left_to_justext() -> None:
    asked = []
    paragraphs = Paragraphs(lambda root: asked.append(root) or [])
    beside = lxml.html.document_fromstring("<html><body><p>text</p></body></html>")
    beside.addprevious(lxml.etree.ProcessingInstruction("said"))
    with_entity = lxml.html.document_fromstring("<html><body><p>text</p></body></html>")
    with_entity[0].append(lxml.etree.Entity("thing"))
    assert paragraphs(beside) == paragraphs(with_entity) == []
    assert asked == [beside, with_entity]


@settings(max_examples=40, deadline=None)
@given(trees, st.sampled_from(get_args(fast.Favor)), st.booleans())
def test_cleaning_leaves_what_trafilatura_leaves(drawn: tuple[int, int], favor: str, tables: bool) -> None:
    seed, size = drawn
    tags = (*trafilatura.settings.MANUALLY_CLEANED, *trafilatura.settings.MANUALLY_STRIPPED, "table", "math", "form")
    some = tuple(random.Random(seed).sample(tags, 5))
    tree = tree_of(seed, (*some, "div", "p", "p", "ul", "li", "a"), size)
    options = trafilatura.settings.Extractor(precision=favor == "precision", recall=favor == "recall", tables=tables)
    listed = list(trafilatura.htmlprocessing.MANUALLY_CLEANED)
    expected = trafilatura.htmlprocessing.tree_cleaning(copy.deepcopy(tree), options)
    cleaned = Cleaning(trafilatura.htmlprocessing.tree_cleaning)(copy.deepcopy(tree), options)
    assert markup(cleaned) == markup(expected)
    assert listed == trafilatura.htmlprocessing.MANUALLY_CLEANED


@pytest.mark.parametrize("favor", get_args(fast.Favor))
@pytest.mark.parametrize("tables", [True, False])
def test_settings_are_those_that_trafilatura_makes_of_the_arguments(
    favor: Any, tables: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(trafilatura.core, "bare_extraction", lambda page, options, **rest: seen.append(options))
    fast.stock_text("<p>page</p>", favor, tables)
    fast._text("<p>page</p>", favor, tables)
    expected, used = ({name: getattr(one, name) for name in one.__slots__} for one in seen)
    assert used == expected
    assert (used["focus"], used["tables"], used["comments"]) == (favor, tables, False)
