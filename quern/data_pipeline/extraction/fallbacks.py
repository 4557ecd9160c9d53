"""justext with the same result but faster: paragraphs and stop words are processed once.

Nothing is copied: the library's own functions run, on less.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import justext.core
import justext.paragraph
import lxml.etree
from lxml.html import HtmlElement

__all__ = ["Neighbours", "Paragraph", "Paragraphs", "StopWords"]


class Neighbours(threading.local):
    """justext's search for the nearest classified paragraph, in linear time on pages with many unclassified ones.

    A scan stops early where the one before it passed: undecided paragraphs stay undecided until the questions, which
    come in ascending order, have passed them. A question at a lower index is the start of a new round.
    """

    def __init__(self) -> None:
        self._paragraphs: Any = None
        self._last = -1
        self._scans: dict[tuple[bool, int], tuple[int, int, str]] = {}

    def find(self, i: int, paragraphs: Any, ignore_neargood: bool, inc: int, boundary: int) -> str:
        if paragraphs is not self._paragraphs or i < self._last:
            self._paragraphs, self._scans = paragraphs, {}
        self._last = i
        start, stop, answer = self._scans.get((ignore_neargood, inc), (-1, -1, ""))
        at, found = i + inc, "bad"
        while at != boundary:
            # forward: inside the last scan; backward: back at its start, itself still undecided
            known = start <= at < stop if inc > 0 else at == start
            kind = paragraphs[at].class_type
            if kind in ("good", "bad") or (kind == "neargood" and not ignore_neargood):
                found = kind
                break
            if known:
                at, found = stop, answer
                break
            at += inc
        self._scans[ignore_neargood, inc] = (i, at, found)
        return found


class Paragraph(justext.paragraph.Paragraph):
    """justext's paragraph with its joined text cached."""

    def __init__(self, path: Any) -> None:
        self.dom_path = path.dom
        self.xpath = ""  # never read, and slower to build than the text
        self.text_nodes: list[str] = []
        self.chars_count_in_links = self.tags_count = 0
        self.class_type = ""

    def append_text(self, text: str) -> str:
        self.__dict__.pop("text", None)
        return str(super().append_text(text))

    @functools.cached_property
    def text(self) -> str:
        return str(super().text)


class _Place(NamedTuple):
    """Where a paragraph begins: the names of the elements around it, parted by dots."""

    dom: str


class Paragraphs:
    """justext's paragraphs of a tree, by a plain walk instead of parser events."""

    def __init__(self, make: Callable[[HtmlElement], list[Any]]) -> None:
        self._make = make

    def __call__(self, root: HtmlElement) -> list[Any]:
        instruction = lxml.etree.ProcessingInstruction
        for sibling in (root.getprevious(), root.getnext()):
            if sibling is not None and sibling.tag is instruction:
                return self._make(root)
        walk = _Walk()
        try:
            walk.visit(root, "")
        except _UnknownNodeError:
            return self._make(root)
        walk.begin("")
        return walk.found


class _UnknownNodeError(Exception):
    """A node that is no element, comment or instruction."""


class _Walk:
    """The paragraphs so far, the one being written, and whether a link is open and a line break just passed."""

    def __init__(self) -> None:
        self.found: list[Any] = []
        self.paragraph = Paragraph(_Place(""))
        self.link = self.broken = False

    def begin(self, place: str) -> None:
        """End the paragraph, and begin another."""
        if self.paragraph.text_nodes and self.paragraph.text:
            self.found.append(self.paragraph)
        self.paragraph = Paragraph(_Place(place))

    def write(self, text: str) -> None:
        if not text.isspace():
            written = self.paragraph.append_text(text)
            if self.link:
                self.paragraph.chars_count_in_links += len(written)
            self.broken = False

    def visit(self, element: HtmlElement, above: str) -> None:
        """An element, and the text after it."""
        tag = element.tag
        if isinstance(tag, str):
            name = tag[tag.index("}") + 1 :] if tag[0] == "{" else tag
            place = f"{above}.{name}" if above else name
            parts = name in justext.core.PARAGRAPH_TAGS
            if parts or (name == "br" and self.broken):
                if not parts:
                    self.paragraph.tags_count -= 1
                self.begin(place)
            else:
                self.broken = name == "br"
                if self.broken:
                    self.paragraph.append_text(" ")
                elif name == "a":
                    self.link = True
                self.paragraph.tags_count += 1
            if element.text:
                self.write(element.text)
            for child in element:
                self.visit(child, place)
            if parts:
                self.begin(above)
            if name == "a":
                self.link = False
        elif tag is not lxml.etree.Comment and tag is not lxml.etree.ProcessingInstruction:
            raise _UnknownNodeError
        if element.tail:
            self.write(element.tail)


class StopWords:
    """justext's classification with only those stop words that the page contains."""

    def __init__(self, classify: Callable[..., None]) -> None:
        self._classify = classify
        self._of: Any = None
        self._lowered: frozenset[str] = frozenset()

    def __call__(self, paragraphs: Sequence[Any], stoplist: Sequence[str], *args: Any) -> None:
        if stoplist is not self._of:
            lowered = frozenset(word.lower() for word in stoplist)
            self._of, self._lowered = stoplist, lowered
        words = {word.lower() for paragraph in paragraphs for word in paragraph.text.split()}
        self._classify(paragraphs, tuple(words & self._lowered), *args)
