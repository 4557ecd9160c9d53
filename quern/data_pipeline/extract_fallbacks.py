"""The second opinions trafilatura asks for, sooner and with the same answer: readability's text, and justext's.

Readability is not run where its text could not win; justext's paragraphs and stop words are looked at once, not many
times. Nothing is copied: the libraries' own functions run, on less.
"""

from __future__ import annotations

import copy
import functools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import justext.core
import justext.paragraph
import lxml.etree
import lxml.html
import lxml.html.defs
import trafilatura.core
import trafilatura.htmlprocessing
import trafilatura.utils
from lxml.html import HtmlElement

__all__ = ["CleanedLater", "Cleaning", "Comparison", "Neighbours", "Paragraph", "Paragraphs", "StopWords"]

#: Text outside of what readability drops first. (What a ``fencedframe`` holds counts, though it is dropped too.)
_PARAGRAPH_TEXT = lxml.etree.XPath("boolean(.//p//text())")
_SEEN_TEXT = lxml.etree.XPath("descendant::text()[not(parent::script or parent::style)]", smart_strings=False)


def _grows(tag: str) -> bool:
    """Whether an element's text, or the text after it, gets longer by a way through XML and HTML."""
    for text in (None, "x", "&<b>&amp;"):
        tree = lxml.html.fromstring("<div></div>")
        element = lxml.etree.SubElement(tree, tag)
        element.text, element.tail = text, "y"
        again = trafilatura.utils.fromstring_bytes(lxml.etree.tostring(tree, encoding=str, method="xml"))
        if again is None or len(again.text_content()) > len(tree.text_content()):
            return True
    return False


class Comparison:
    """trafilatura's comparison with readability, less the readability runs that cannot change the answer.

    Outside of recall mode readability replaces a sound extraction only if its text is more than twice as long
    (``_prefer_readability``), and it only ever leaves text out: its collapsed text is no longer than that of the tree
    it is given. The exceptions are counted (a video frame becomes "VIDEO") or not skipped at all (``growing``: elements
    whose text grows when serialised as XML and read again as HTML, which readability does).

    The tree it is given is a pruned copy of the page. Where already the page's own text is too short, neither the copy
    is made nor the pruning done: that only takes text away as well.
    """

    def __init__(
        self,
        compare: Callable[..., Any],
        readability: Callable[[HtmlElement], HtmlElement],
        prune: Callable[..., HtmlElement],
    ) -> None:
        self._compare, self._readability, self._prune = compare, readability, prune
        self._state = threading.local()
        known = lxml.html.defs.tags | {"listing", "noembed", "plaintext", "xmp"}
        self._growing = tuple(sorted(tag for tag in known - {"iframe", "script", "style"} if _grows(tag)))

    def extract(self, cleaned: HtmlElement, backup: HtmlElement, tree: HtmlElement, options: Any) -> tuple[Any, str]:
        """The main extraction and, unless in fast mode, the comparison."""
        core = trafilatura.core
        body, text = core.extract_content(cleaned, options)
        if options.fast:
            return body, text
        limit = 2 * len(text)
        self._state.hopeless = hopeless = _is_sound(body, text, options) and self._is_within(tree, limit)
        try:
            return core.compare_extraction(backup, tree if hopeless else copy.copy(tree), body, text, options)
        finally:
            self._state.hopeless = False

    def compare(self, cleaned: HtmlElement, raw: HtmlElement, body: HtmlElement, text: str, options: Any) -> Any:
        hopeless = getattr(self._state, "hopeless", False)
        self._state.limit = 2 * len(text) if not hopeless and _is_sound(body, text, options) else -1
        try:
            return self._compare(cleaned, raw, body, text, options)
        finally:
            self._state.limit = -1

    def prune(self, tree: HtmlElement, *args: Any, **kwargs: Any) -> HtmlElement:
        return tree if getattr(self._state, "hopeless", False) else self._prune(tree, *args, **kwargs)

    def readability(self, tree: HtmlElement) -> HtmlElement:
        limit = getattr(self._state, "limit", -1)
        if getattr(self._state, "hopeless", False):
            return HtmlElement()
        if limit >= 0:
            for element in list(tree.iter("script", "style", "fencedframe")):  # as readability itself begins
                element.drop_tree()
            if self._longest(tree) <= limit:
                return HtmlElement()  # what trafilatura makes of a readability failure: no text, never preferred
        return self._readability(tree)

    def _is_within(self, tree: HtmlElement, limit: int) -> bool:
        """Whether :meth:`_longest_unpruned` is at most so much: where its scripts count too, it is told sooner."""
        return self._longest(tree) <= limit or self._longest_unpruned(tree) <= limit

    def _longest_unpruned(self, tree: HtmlElement) -> float:
        """As :meth:`_longest`, of a tree that still has its scripts, without touching it."""
        frames = self._frames(tree)
        return math.inf if frames is None else len(" ".join("".join(_SEEN_TEXT(tree)).split())) + frames

    def _longest(self, tree: HtmlElement) -> float:
        """A length that readability's text of ``tree`` cannot pass."""
        frames = self._frames(tree)
        return math.inf if frames is None else len(" ".join(tree.text_content().split())) + frames

    def _frames(self, tree: HtmlElement) -> int | None:
        """Characters that frames may add to the text; None where other elements may add any number."""
        frames = list(tree.iter("iframe"))
        if any(map(len, frames)) or (self._growing and next(tree.iter(*self._growing), None) is not None):
            return None
        return len("VIDEO") * len(frames)


def _is_sound(body: HtmlElement, text: str, options: Any) -> bool:
    """Whether readability has to be twice as long to be preferred."""
    return bool(
        options.focus != "recall"
        and text
        and _PARAGRAPH_TEXT(body)
        and len(body.findall(".//table")) <= len(body.findall(".//p"))
    )


class Cleaning:
    """trafilatura's cleaning of a tree, that walks it once for each of fifty tags: here, for those that it has."""

    def __init__(self, clean: Callable[[HtmlElement, Any], HtmlElement]) -> None:
        self._clean = clean

    def __call__(self, tree: HtmlElement, options: Any) -> HtmlElement:
        settings = trafilatura.htmlprocessing
        listed = settings.MANUALLY_CLEANED
        # cleaning makes no element of these; forms are looked up by name, and an empty list would mean every tag
        found = {"form", "head"}.union(element.tag for element in tree.iter(*listed))
        settings.MANUALLY_CLEANED = [tag for tag in listed if tag in found]
        try:
            return self._clean(tree, options)
        finally:
            settings.MANUALLY_CLEANED = listed


@dataclass(frozen=True)
class CleanedLater:
    """The cleaned page that justext reads, and that on most pages nobody asks for: made when somebody does."""

    tree: HtmlElement
    options: Any

    @staticmethod
    def prepare(tree: HtmlElement, options: Any, url: str | None) -> tuple[HtmlElement, Any]:
        """The page cleaned and converted, and, unless comments are wanted, its cleaned copy for later."""
        core = trafilatura.core
        cleaned = core.tree_cleaning(copy.copy(tree), options)
        backup = copy.copy(cleaned) if options.comments else CleanedLater(tree, options)
        return core.convert_tags(cleaned, options, url), backup

    @staticmethod
    def resolving(clean: Callable[[HtmlElement], HtmlElement]) -> Callable[[Any], HtmlElement]:
        """A function of a tree as one that also takes a tree for later."""

        def cleaned(tree: Any) -> HtmlElement:
            if isinstance(tree, CleanedLater):
                tree = trafilatura.core.tree_cleaning(copy.copy(tree.tree), tree.options)
            return clean(tree)

        return cleaned


class Neighbours(threading.local):
    """justext's look for the nearest decided paragraph, in linear time over a page of many undecided ones.

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
    """justext's paragraph, which joins and collapses its text once and not at every look at it."""

    def __init__(self, path: Any) -> None:
        self.dom_path = path.dom
        self.xpath = ""  # nobody asks for it, and spelling it out takes longer than the text
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
    """justext's paragraphs of a tree by a plain walk, without the events of a parser for every element."""

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
    """justext's classification with those stop words alone that the page has: it makes a new set of all every time."""

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
