"""Expressions of which the first node alone is wanted, in one pass, against lxml's XPath one after the other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import html
from lxml.etree import SubElement, XPath

from quern.data_pipeline.extraction.xpath_walk import Firsts
from support.named_cases import with_each

RE = {"re": "http://exslt.org/regular-expressions"}
PATHS = (
    ".//*[self::div or self::section][@class='a' or re:test(@id, '^a|b$')][1]",
    "(.//article)[1]",
    "(.//*[self::div or self::article][re:test(@id|@class, 'c')][not(@role='a')])[1]",
    "(.//*[self::section or self::div][starts-with(@class, 'b') or starts-with(@role, 'b')])[1]|(.//main)[1]",
)
FIRSTS = Firsts(PATHS)
nodes = st.lists(
    st.tuples(
        st.sampled_from(("div", "div", "section", "article", "main", "p")),
        st.dictionaries(
            st.sampled_from(("id", "class", "role")), st.sampled_from(("a", "b", "xb", "c", "z")), max_size=2
        ),
        st.integers(0, 100),
    ),
    max_size=10,
)


def grown(shape: list[tuple[str, dict[str, str], int]]) -> Any:
    root = html.fromstring("<html><body></body></html>")
    placed = [root[0]]
    for tag, values, parent in shape:
        placed.append(SubElement(placed[parent % len(placed)], tag, values))
    return root


def asked(root: Any, expressions: list[Any]) -> list[str]:
    """The first answers of expressions asked in order; what one answers loses its children, and all its attributes."""
    answers = []
    for expression in expressions:
        found = next(iter(expression(root)), None)
        answers.append("" if found is None else root.getroottree().getpath(found))
        if found is not None:
            found.attrib.clear()
            del found[:]
    return [*answers, html.tostring(root, encoding="unicode")]


@settings(max_examples=40)
@given(nodes)
def test_answers_are_those_of_the_xpaths_asked_in_order(shape: list[tuple[str, dict[str, str], int]]) -> None:
    xpaths, members = [XPath(path, namespaces=RE) for path in PATHS], list(FIRSTS.members)
    for chosen in (slice(None), slice(1), slice(1, None), slice(None, None, 2), slice(None, None, -1)):
        assert asked(grown(shape), members[chosen]) == asked(grown(shape), xpaths[chosen])
    for xpath, member in zip(xpaths, members, strict=True):
        root = grown(shape)
        assert member(root) == member.with_others(root) == xpath(root)[:1]


def test_after_an_answer_the_tree_is_looked_at_anew() -> None:
    one, other = Firsts(["(.//article)[1]", "(.//*[self::div][@id='a'])[1]"]).members
    root = html.fromstring("<div><article><div id='a'></div></article></div>")
    assert one(root) == [root[0]]
    root.remove(root[0])
    assert other(root) == []
    root = html.fromstring("<div><div id='a'></div></div>")
    assert one(root) == []
    assert other(root) == [root[0]]
    root.remove(root[0])
    assert other(root) == [], "an answer is given once"


def test_another_tree_is_another_question_and_a_forgotten_one_too() -> None:
    firsts = Firsts(["(.//article)[1]", "(.//main)[1]"])
    one, other = firsts.members
    root = html.fromstring("<div><main></main></div>")
    assert one(root) == []
    assert other(html.fromstring("<div><p></p></div>")) == []
    assert one(root) == []
    firsts.forget()
    root.remove(root[0])
    assert other(root) == []


@with_each(".//article", ".//*[@id='a']", "(.//*)[1]", "(.//a)[1]/b", ".//a[1]|.//b[@id='a']")
def test_expressions_of_more_than_a_first_match_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Firsts([path])
