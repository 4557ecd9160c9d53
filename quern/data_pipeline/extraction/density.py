"""trafilatura's link densities, computed once per element; the same elements are deleted.

A page is asked three times for dense divisions, lists and paragraphs, and then once more. Each question collects the
text of every element that asks, and of the links in it; here a link's length is kept until something is deleted, and a
question that nothing was deleted since is not asked again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import lxml.etree
import trafilatura.htmlprocessing
from lxml.html import HtmlElement
from trafilatura.utils import LINK_FARM_RATIO

__all__ = ["TEXT", "LinkDensity", "OwnText", "collapsed", "length_of"]

#: No rule calls an element dense whose links are a smaller part of it.
_FEW_LINKS = min(0.9, LINK_FARM_RATIO)
#: All text of an element.
TEXT = lxml.etree.XPath("string()", smart_strings=False)


def collapsed(text: str) -> str:
    """A text with runs of whitespace as one space and none at the ends."""
    return " ".join(text.split())


def length_of(element: HtmlElement) -> int:
    """Characters of an element's text, runs of whitespace as one space and none at the ends."""
    # without children, its own text is all there is
    text = TEXT(element) if len(element) else element.text
    return len(" ".join(text.split())) if text else 0


class OwnText:
    """Two of trafilatura's queries of an element's whole text, answered from the element's own text where possible."""

    def __init__(self, text: Callable[[Any], str], has_text: Callable[[Any], bool]) -> None:
        self._text, self._has_text = text, has_text

    def text(self, element: Any) -> str:
        """All text of an element, runs of whitespace as one space and none at the ends."""
        if len(element) or not isinstance(element.tag, str):
            return self._text(element)
        return " ".join(element.text.split()) if element.text else ""

    def has_text(self, element: Any) -> bool:
        """Whether there is an element, and more than whitespace in it."""
        if element is not None and isinstance(element.tag, str) and element.text and not element.text.isspace():
            return True
        return self._has_text(element)


class LinkDensity(threading.local):
    """Stands in for ``delete_by_link_density`` and the test of tables, while sections of one tree are pruned."""

    def __init__(self, prune: Callable[..., HtmlElement]) -> None:
        self._prune = prune
        self.forget()

    def forget(self) -> None:
        """Clear all cached trees."""
        self._tree: HtmlElement | None = None
        self._settled: set[tuple[str, bool, bool]] = set()
        self._lengths: dict[HtmlElement, int] = {}

    def prune_sections(self, tree: HtmlElement, *args: Any, **kwargs: Any) -> HtmlElement:
        """trafilatura's own function, that only deletes by density until its questions are through."""
        self.forget()
        self._tree = tree
        try:
            return self._prune(tree, *args, **kwargs)
        finally:
            self.forget()

    def delete(
        self, subtree: HtmlElement, tagname: str, backtracking: bool = False, favor_precision: bool = False
    ) -> HtmlElement:
        """Deletes the elements of a tag that are mostly links."""
        question = (tagname, backtracking, favor_precision)
        known = subtree is self._tree and tagname in ("div", "list", "p")
        if known and question in self._settled:
            return subtree
        lengths = self._lengths if known else {}
        if not lengths:
            lengths.update((link, length_of(link)) for link in subtree.iterdescendants("ref"))
        dense = self._dense(subtree, lengths, *question) if lengths else []
        for element in dense:
            trafilatura.htmlprocessing.delete_element(element)
        if known and dense:
            self._settled.clear()
            lengths.clear()
        elif known:
            self._settled.add(question)
        return subtree

    def _dense(
        self,
        subtree: HtmlElement,
        lengths: dict[HtmlElement, int],
        tagname: str,
        backtracking: bool,
        favor_precision: bool,
    ) -> list[HtmlElement]:
        most, fewest = (200, 1) if favor_precision else (100, 3)
        graphics = next(subtree.iterdescendants("graphic"), None) is not None
        found = []
        # what an element's text is at least as long as: the longest text looked at in it. So the innermost come first
        at_least: dict[HtmlElement, int] = {}
        for element in reversed(list(subtree.iter(tagname))):
            links = list(element.iterdescendants("ref"))
            if not links or (graphics and next(element.iterdescendants("graphic"), None) is not None):
                continue
            linked = [lengths[link] for link in links]
            total, limit = sum(linked), _short_below(element)
            length, whole = at_least.get(element, 0), False
            if length < limit or total > length * _FEW_LINKS:
                length, whole = _length_up_to(element, 2 * (limit + total))
                if not whole and (length < limit or total > length * _FEW_LINKS):
                    length, whole = length_of(element), True
                for above in element.iterancestors(tagname):
                    at_least[above] = max(length, at_least.get(above, 0))
            if not whole:
                continue  # long, and the links are a small part
            dense, short = _is_dense(length, limit, links, linked, favor_precision)
            if dense or (backtracking and short and len(element) >= fewest and length < most):
                parent = element.getparent()
                if tagname != "p" or parent is None or parent.tag not in ("item", "td", "th"):
                    found.append(element)
        return found[::-1]

    @staticmethod
    def is_dense_table(element: HtmlElement) -> bool:
        """Whether a table is mostly links."""
        links = list(element.iterdescendants("ref"))
        if not links:
            return False
        length = length_of(element)
        return length >= 200 and sum(map(length_of, links)) > (0.8 if length < 1000 else 0.5) * length


def _short_below(element: HtmlElement) -> int:
    """The length below which an element with links is short."""
    is_last = element.getnext() is None
    if element.tag == "p":
        return 60 if is_last else 30
    return 300 if is_last else 100


def _length_up_to(element: HtmlElement, enough: int) -> tuple[int, bool]:
    """As :func:`length_of`, or, of a longer text, a length that it is not below; and whether it is the former."""
    text = (TEXT(element) if len(element) else element.text) or ""
    part = text[: 2 * enough]
    return len(" ".join(part.split())), len(part) == len(text)


def _is_dense(
    length: int, limit: int, links: list[HtmlElement], lengths: list[int], favor_precision: bool
) -> tuple[bool, bool]:
    """Whether an element is mostly links, and whether it is short with links in it."""
    if len(links) == 1 and lengths[0] > (10 if favor_precision else 100) and lengths[0] > length * 0.9:
        return True, False
    linked, num_texts = sum(lengths), len(lengths) - lengths.count(0)
    if length < limit:
        num_short = sum(0 < one < 10 for one in lengths)
        few = linked > length * 0.8 or (num_texts > 1 and num_short / num_texts > 0.8)
        return (few, True) if num_texts else (True, False)
    is_farm = (
        len(links) > 4
        and linked > length * LINK_FARM_RATIO
        and linked < 100 * num_texts
        and not trafilatura.htmlprocessing.is_paragraph_listing(links)
    )
    return is_farm, False
