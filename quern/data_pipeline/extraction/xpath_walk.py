"""Evaluates a subset of XPath 1.0 by Python walks over a tree, and caches the tests of attribute values.

lxml evaluates ``re:test(@class, '…')`` by calling back into Python once for every element and pattern. A page repeats
the same few hundred attribute values, so a walk over the elements with a memo by value is several times faster.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

from lxml.html import HtmlElement

from quern.data_pipeline.extraction.xpath_parse import Holds, Parser, XPathStep
from quern.data_pipeline.page.memo import Memo

__all__ = ["Firsts", "Member", "Walk", "Walks"]

#: Answers kept for one attribute of one expression, and characters of values they are kept of: hostile pages cannot
#: fill memory.
MEMO_ENTRIES = 8192
MEMO_VALUE_CHARS = 256


def _bits_of(tests: Sequence[tuple[int, Holds]], value: str) -> int:
    """What a value of one attribute says to some walks: the bit of each of which a test holds, and, behind those, of
    each of which one would where this attribute is the one that counts."""
    bits = 0
    for bit, holds in tests:
        if not bits & bit and holds(value):
            bits |= bit
    return bits


class Walk:
    """An XPath expression as one walk: called with an element it returns the list the XPath returns, in document order.

    Of an expression that asks for a first match (``[1]``) only the first node is returned.
    """

    def __init__(self, path: str) -> None:
        """Raises ValueError for an expression outside the subset."""
        self.path = path
        self.step, *more = Parser(path).steps()
        if more or not self.step.tests:
            raise ValueError(f"expected one expression, with a test of an attribute, got {path!r}")
        self.tags, self.tests, self.first = self.step.tags, self.step.tests, self.step.first
        self._memos = _memos_of([self.step])

    def __call__(self, root: HtmlElement) -> list[HtmlElement]:
        found = []
        memos, step = self._memos, self.step
        for element in root.iterdescendants(*self.tags):
            bits = 0
            for name, value in element.items():
                if name in memos:
                    bits |= memos[name][value]
            if bits and step.takes(element, bool(bits & 1)):
                found.append(element)
                if self.first:
                    break
        return found


class Walks:
    """Evaluates several walks that prune one tree in sequence, in one pass over it.

    ``members`` stand in for the walks, in their order. The first one asked about a tree answers for all; a later one
    that is asked about the same tree next gives what was found for it then and is still there, once. Asked about any
    other tree a member is the plain walk.
    """

    def __init__(self, walks: Sequence[Walk]) -> None:
        """Raises ValueError for a walk that asks for a first match, or whose answer another's deletions may change."""
        for place, walk in enumerate(walks):
            if walk.first or (place and ".//" in walk.path[walk.path.index("[") :]):
                raise ValueError(f"expected an expression that walks with others, got {walk.path!r}")
        self._walks = tuple(walks)
        named = {tag for walk in walks for tag in walk.tags}
        self._memos = _memos_of([walk.step for walk in walks])
        self._tags = ("*",) if "*" in named else tuple(sorted(named))
        self._last = threading.local()
        self.members = tuple(Member(self, place, walk.path) for place, walk in enumerate(walks))

    def find(self, root: HtmlElement, place: int) -> list[HtmlElement]:
        """What the walk at ``place`` finds below ``root``."""
        last = self._last
        if place == 0:
            last.root, last.found = root, [*self.find_all(root)]
        elif getattr(last, "root", None) is not root or last.found[place] is None:
            return self._walks[place](root)
        found: list[HtmlElement] = last.found[place]
        last.found[place] = None
        # to delete a part of what is deleted may raise, where its tail has a character that lxml refuses
        return [element for element in found if place == 0 or _is_below(element, root)]

    def forget(self) -> None:
        """Release the last tree."""
        self._last.root = self._last.found = None

    def find_all(self, root: HtmlElement) -> list[list[HtmlElement]]:
        """What each walk finds below ``root``."""
        memos, steps, behind = self._memos, [walk.step for walk in self._walks], len(self._walks)
        found: list[list[HtmlElement]] = [[] for _ in steps]
        for element in root.iterdescendants(*self._tags):
            bits = 0
            for name, value in element.items():
                if name in memos:
                    bits |= memos[name][value]
            if bits:
                for place, step in enumerate(steps):
                    surely = bits >> place & 1
                    if (surely or bits >> place + behind & 1) and step.takes(element, bool(surely)):
                        found[place].append(element)
        return found


def _is_below(element: HtmlElement, root: HtmlElement) -> bool:
    return any(above is root for above in element.iterancestors())


class Firsts:
    """Evaluates several expressions in one pass, for the first node of each.

    ``members`` stand in for the expressions. The first one asked about a tree looks for the earliest expression with an
    answer; until that is given, the tree is taken to stay as it is. After that, and of any other tree, a member looks
    for itself.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        """Raises ValueError for an expression outside the subset, or one that asks for more than a first match."""
        self._steps = [(place, step) for place, path in enumerate(paths) for step in Parser(path).steps()]
        for place, step in self._steps:
            if not step.first or not (step.tests or step.tags != ("*",)):
                raise ValueError(f"expected expressions of first matches, got {paths[place]!r}")
        self._memos = _memos_of([step for _, step in self._steps])
        self._bare = {tag: place for place, step in reversed(self._steps) if not step.tests for tag in step.tags}
        self._tags = tuple(sorted({tag for _, step in self._steps for tag in step.tags}))
        self._last = threading.local()
        self._end = len(paths)
        self.members = tuple(Member(self, place, path, first=True) for place, path in enumerate(paths))

    def find(self, root: HtmlElement, place: int) -> list[HtmlElement]:
        """The first node below ``root`` that the expression at ``place`` names, if any."""
        last = self._last
        if place == 0:
            if getattr(last, "root", None) is not root or not last.foreseen:
                self.foresee(root)
            last.foreseen = False
        elif getattr(last, "root", None) is not root:
            return self._earliest(root, place, place + 1)[1]
        at, found = last.found
        if at > place:
            return []
        self.forget()
        return found if at == place else self._earliest(root, place, place + 1)[1]

    def foresee(self, root: HtmlElement) -> bool:
        """Whether an expression finds something below ``root``, which is not to change before they are asked."""
        last = self._last
        last.root, last.found, last.foreseen = root, self._earliest(root, 0, self._end), True
        return bool(last.found[1])

    def find_all(self, root: HtmlElement) -> list[list[HtmlElement]]:
        """What each expression finds below ``root``."""
        return [self._earliest(root, place, place + 1)[1] for place in range(self._end)]

    def forget(self) -> None:
        """Release the last tree."""
        self._last.root = self._last.found = None

    def _earliest(self, root: HtmlElement, begin: int, end: int) -> tuple[int, list[HtmlElement]]:
        """The earliest of some expressions that finds something, and what; the place behind them where none does."""
        memos, bare, behind = self._memos, self._bare, len(self._steps)
        found: list[HtmlElement] = []
        for element in root.iterdescendants(*self._tags):
            place = bare.get(element.tag, end)
            if begin <= place < end:
                end, found = place, [element]
            bits = 0
            for name, value in element.items():
                if name in memos:
                    bits |= memos[name][value]
            if bits:
                for number, (place, step) in enumerate(self._steps):
                    surely = bits >> number & 1
                    if (
                        begin <= place < end
                        and (surely or bits >> number + behind & 1)
                        and step.takes(element, bool(surely))
                    ):
                        end, found = place, [element]
            if end == begin:
                break
        return end, found


def _memos_of(steps: Sequence[XPathStep]) -> dict[str, Memo[str, int]]:
    """Attribute → the bits of the steps by its value."""
    tests: dict[str, list[tuple[int, Holds]]] = {}
    for place, step in enumerate(steps):
        for test in step.tests:
            bit = 1 << place if len(test.names) == 1 else 1 << place + len(steps)
            for name in test.names:
                tests.setdefault(name, []).append((bit, test.holds))
    return {name: Memo(partial(_bits_of, own), MEMO_ENTRIES, MEMO_VALUE_CHARS) for name, own in tests.items()}


class Member:
    """One of several expressions that share a pass; in place of the expression alone."""

    def __init__(self, walks: Walks | Firsts, place: int, path: str, first: bool = False) -> None:
        self.path, self.first = path, first
        self._walks, self._place = walks, place

    def __call__(self, root: HtmlElement) -> list[HtmlElement]:
        return self._walks.find(root, self._place)

    def with_others(self, root: HtmlElement) -> list[HtmlElement]:
        """Its answer from a pass of all."""
        return self._walks.find_all(root)[self._place]
