from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import html
from lxml.etree import SubElement, XPath

from quern.data_pipeline.extraction import xpath_walk
from quern.data_pipeline.extraction.xpath_parse import grouped
from quern.data_pipeline.extraction.xpath_walk import Walk, Walks
from support.named_cases import with_each

RE = {"re": "http://exslt.org/regular-expressions"}
EXPRESSIONS = (
    ".//*[self::div or self::p][@class='a' or re:test(@id, '^a|b$')]",
    ".//*[@hidden or starts-with(@id|@class, 'a') or contains(translate(@role, 'AB', 'ab'), 'ab')]",
    ".//*[self::div or self::li][re:test(@class, 'A', 'i') or re:test(@id|@class, 'b')][not(self::li) or @id='b']",
    ".//section[contains(@class, 'a')][not(.//b) or re:test(@id, 'x')]",
    "(.//*[self::p or self::div][re:test(@class, 'a b|c')])[1]",
    ".//*[re:test(@class, 'a|b')][@id][self::p or not(@role='a')]",
    ".//*[self::p or self::div][re:test(@class, 'b')][1]",
)
NAMES = ("id", "class", "role", "hidden")
attributes = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(("", "a", "b", "A", "ab", "a b", "xb", "c"))),
    max_size=3,
    unique_by=lambda pair: pair[0],
)
nodes = st.lists(
    st.tuples(st.sampled_from(("div", "p", "li", "section", "b")), attributes, st.integers(0, 100)), max_size=12
)


def grown(shape: list[tuple[str, list[tuple[str, str]], int]]) -> html.HtmlElement:
    root = html.fromstring("<html><body></body></html>")
    placed = [root[0]]
    for tag, pairs, parent in shape:
        element = SubElement(placed[parent % len(placed)], tag)
        for name, value in pairs:
            element.set(name, value)
        placed.append(element)
    return root


@settings(max_examples=50)
@given(nodes)
def test_walk_returns_what_lxml_returns(shape: list[tuple[str, list[tuple[str, str]], int]]) -> None:
    root = grown(shape)
    for path in EXPRESSIONS:
        walk, expected = Walk(path), XPath(path, namespaces=RE)(root)
        assert walk(root) == (expected[:1] if walk.first else expected), path


def test_union_reads_the_attribute_that_comes_first_in_the_source() -> None:
    root = html.fromstring("<div><p id='b' class='a'></p><p class='a' id='b'></p></div>")
    assert Walk(".//*[re:test(@id|@class, 'a')]")(root) == [root[1]]


def test_root_itself_never_matches() -> None:
    root = html.fromstring("<div class='a'><p class='a'></p></div>")
    assert Walk(".//*[@class='a']")(root) == [root[0]]


def test_answer_does_not_depend_on_what_was_walked_before() -> None:
    walk = Walk(".//*[@class='a' or re:test(@id|@class, 'z')]")
    for _ in range(2):
        assert len(walk(html.fromstring("<div><p id='z' class='b'></p></div>"))) == 1
        assert len(walk(html.fromstring("<div><p class='b' id='z'></p></div>"))) == 0


def test_memory_stays_bounded_under_endless_new_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xpath_walk, "MEMO_ENTRIES", 16)
    walk = Walk(".//*[contains(@id, 'a')]")
    for start in range(0, 1000, 50):
        body = "".join(f"<p id='{'a' if n % 2 else 'b'}{n}'></p>" for n in range(start, start + 50))
        assert len(walk(html.fromstring(f"<div>{body}</div>"))) == 25
        assert len(walk._memos["id"]) <= 16
    walk(html.fromstring(f"<div><p id='{'b' * 1000}'></p></div>"))
    assert all(len(value) <= xpath_walk.MEMO_VALUE_CHARS for value in walk._memos["id"])


@with_each(
    "//div[@class='a']",  # an absolute path
    ".//div",  # no attribute test: an XPath is as fast
    ".//div[@class='a']/p",
    ".//div[@class='a'][1]|.//p[@class='b'][1]",
    ".//div[string-length(@id) > 3]",
    ".//div[re:test(@id, '')]",  # true of an absent attribute
    ".//div[contains(@id, 'a')][2]",
    ".//div[re:test(@id, 'a', 'm')]",
    ".//div[contains(translate(@id, 'AB', 'a'), 'a')]",
    ".//div[@class='a' or self::p]",
    "(.//div[@class='a'])",
)
def test_expressions_outside_the_subset_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Walk(path)


PRUNING = tuple(path for path in EXPRESSIONS if not path.startswith("(") and not path.endswith("[1]"))


def pruned(root: html.HtmlElement, expressions: list[Any]) -> str:
    for expression in expressions:
        for element in expression(root):
            if element.getparent() is not None:
                element.getparent().remove(element)
    return html.tostring(root, encoding="unicode")


@pytest.mark.slow
@settings(max_examples=80)
@given(nodes)
def test_walks_together_leave_the_tree_that_xpaths_leave_one_after_the_other(
    shape: list[tuple[str, list[tuple[str, str]], int]],
) -> None:
    paths = sorted(PRUNING, key=lambda path: ".//b" not in path)  # only the first may look at what is below
    members = list(TOGETHER.members)
    assert [member.path for member in members] == paths
    for asked in (members, members[:1], members[1:], members[::2]):  # not every list is asked about every tree
        expected = pruned(grown(shape), [XPath(paths[members.index(m)], namespaces=RE) for m in asked])
        assert pruned(grown(shape), asked) == expected


TOGETHER = Walks([Walk(path) for path in sorted(PRUNING, key=lambda path: ".//b" not in path)])


def test_walks_together_answer_once_for_one_tree() -> None:
    walks = Walks([Walk(".//p[@class='a']"), Walk(".//*[@id='b']")])
    one, other = walks.members
    root = html.fromstring("<div><p class='a'></p><p id='b'></p></div>")
    one(root)
    assert other(root) == [root[1]]
    root.remove(root[1])
    assert other(root) == [], "asked again it looks again"
    one(root)
    assert other(html.fromstring("<div><i id='b'></i></div>"))[0].tag == "i", "another tree"
    walks.forget()
    assert other(root) == []


@pytest.mark.parametrize("path", ["(.//*[self::p][@id='a'])[1]", ".//*[@id='a'][not(.//b)]"])
def test_expressions_whose_answer_deletions_change_do_not_walk_together(path: str) -> None:
    with pytest.raises(ValueError, match="expected an expression that walks with others"):
        Walks([Walk(".//*[@id='x']"), Walk(path)])


@pytest.mark.parametrize(
    "pattern",
    ["a|b|ab", "^a|b|a$", "a?b|ac", "a[|b]c|ad", r"a\|b|ac", "(?:a|^b)c|a|bc", "[]|a]b|cab?", " a|a b|aa|ba*|c"],
)
@given(text=st.text(alphabet="abc|] ", max_size=8))
def test_grouped_alternatives_match_what_they_matched(pattern: str, text: str) -> None:
    assert bool(re.search(grouped(pattern), text)) == bool(re.search(pattern, text))
