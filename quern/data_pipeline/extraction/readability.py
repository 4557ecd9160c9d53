"""readability with the same result but faster, run only where its result could be preferred.

trafilatura compares its text with readability's. Where a bound says beforehand that readability's cannot be preferred
it is not run, or not to its end; where it is run, what it looks at for every element is looked at once.
"""

from __future__ import annotations

import copy
import math
import re
import threading
from collections.abc import Callable
from typing import Any

import lxml.etree
import lxml.html
import lxml.html.defs
import trafilatura.core
import trafilatura.readability_lxml
import trafilatura.utils
from lxml.html import HtmlElement

from quern.data_pipeline.extraction.density import TEXT, collapsed, length_of
from quern.data_pipeline.page.memo import Memo

__all__ = ["ReadabilityComparison", "Scores", "class_weight", "drop_unlikely"]

_PARAGRAPH_TEXT = lxml.etree.XPath("boolean(.//p//text())")
_MARKED = lxml.etree.XPath(".//*[@class or @id]")
_NO_NODE = "self::*[false()]"
#: Characters that a page can name (``&#1;``) and that lxml refuses in a text it is given: it raises where an element
#: before them is deleted, and trafilatura gives the page up.
_REFUSED = (*(chr(code) for code in range(32) if chr(code) not in "\t\n\r"), "\ufffe", "\uffff")
#: What readability writes into a video's frame, and the space that parts it from the words beside it.
_VIDEO = "VIDEO "
#: What readability writes where nothing is left of a page.
_NOTHING = "<div/>"


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


class ReadabilityComparison:
    """trafilatura's comparison with readability, without the runs that cannot change the result.

    Outside of recall mode readability replaces a sound extraction only if its text is more than twice as long
    (``_prefer_readability``), and it only ever leaves text out: its collapsed text is no longer than that of the tree
    it is given, or of the part that it chose. The exceptions are counted (a video frame becomes the word "VIDEO") or
    not skipped at all (``growing``: elements whose text grows when serialised as XML and read again as HTML, which
    readability does).

    The tree it is given is a pruned copy of the page. Where already the page's own text is too short, neither the copy
    is made nor the pruning done: that only takes text away as well, or raises.
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
        self._unclean = trafilatura.external.SANITIZED_XPATH
        if not re.fullmatch(r"\.//\w+(?:\|\.//\w+)*", self._unclean):
            raise ValueError(f"expected tags of unclean text, got {self._unclean!r}")
        self._unclean_tags = tuple(self._unclean.removeprefix(".//").split("|.//"))

    def extract(self, cleaned: HtmlElement, backup: HtmlElement, tree: HtmlElement, options: Any) -> tuple[Any, str]:
        """The main extraction and, unless in fast mode, the comparison."""
        core = trafilatura.core
        body, text = core.extract_content(cleaned, options)
        if options.fast:
            return body, text
        self._state.sound = sound = _is_sound(body, text, options)
        hopeless = sound and self.is_within(tree, 2 * len(text)) and not _has_refused(tree)
        self._state.hopeless = hopeless
        try:
            return core.compare_extraction(backup, tree if hopeless else copy.copy(tree), body, text, options)
        finally:
            self._state.hopeless, self._state.sound = False, None

    def compare(self, cleaned: HtmlElement, raw: HtmlElement, body: HtmlElement, text: str, options: Any) -> Any:
        sound = getattr(self._state, "sound", None)
        sound = _is_sound(body, text, options) if sound is None else sound
        self._state.limit = 2 * len(text) if sound else -1
        self._state.body = body
        try:
            return self._compare(cleaned, raw, body, text, options)
        finally:
            self._state.limit, self._state.body = -1, None
            trafilatura.external.SANITIZED_XPATH = self._unclean

    def prune(self, tree: HtmlElement, *args: Any, **kwargs: Any) -> HtmlElement:
        return tree if getattr(self._state, "hopeless", False) else self._prune(tree, *args, **kwargs)

    def readability(self, tree: HtmlElement) -> HtmlElement:
        limit = getattr(self._state, "limit", -1)
        if getattr(self._state, "hopeless", False) or (limit >= 0 and self.is_within(tree, limit)):
            self._keep_own()
            return HtmlElement()  # what trafilatura makes of a readability failure: no text, never preferred
        return self._readability(tree)

    def _keep_own(self) -> None:
        """Readability's text will not be preferred: of trafilatura's own it can be told now whether it is unclean."""
        body = getattr(self._state, "body", None)
        if body is not None and next(body.iterdescendants(*self._unclean_tags), None) is None:
            trafilatura.external.SANITIZED_XPATH = _NO_NODE

    def sanitizing(self, sanitize: Callable[..., str]) -> Callable[..., str]:
        """readability's last step, cleaning the chosen text, skipped where that is too short already."""

        def sanitized(document: Any, node: HtmlElement, candidates: Any) -> str:
            limit = getattr(self._state, "limit", -1)
            if limit >= 0 and not node.tail and self.is_within(node, limit):
                self._keep_own()
                return _NOTHING
            return sanitize(document, node, candidates)

        return sanitized

    def is_within(self, tree: HtmlElement, limit: int) -> bool:
        """Whether readability's text of ``tree`` cannot pass ``limit`` characters."""
        scripts, added = 0, 0.0
        for element in tree.iter("script", "style", "iframe", *self._growing):
            if element.tag in ("script", "style"):
                # dropped before all else, and with it its words and at least the spaces between
                scripts += len(collapsed(element.text)) if element.text else 0
            else:
                added += len(_VIDEO) if element.tag == "iframe" and not len(element) else math.inf
        most = limit + scripts - added
        if most < 0:
            return False
        text = TEXT(tree)
        if len(text) > 8 * most and len(collapsed(text[: 4 * int(most)])) > most:
            return False
        return len(collapsed(text)) <= most


def _has_refused(tree: HtmlElement) -> bool:
    """Whether pruning may raise: what is pruned leaves its tail, which is written anew."""
    text = TEXT(tree)
    return any(character in text for character in _REFUSED)


def _is_sound(body: HtmlElement, text: str, options: Any) -> bool:
    """Whether readability has to be twice as long to be preferred."""
    if options.focus == "recall" or not text:
        return False
    paragraphs = list(body.iterdescendants("p"))
    if not paragraphs or (all(each.text is None for each in paragraphs) and not _PARAGRAPH_TEXT(body)):
        return False
    return sum(1 for _ in body.iterdescendants("table")) <= len(paragraphs)


class Scores(threading.local):
    """readability's scores of elements, for which links are measured once."""

    def __init__(self, score: Callable[[Any], Any]) -> None:
        self._score = score
        self._lengths: dict[HtmlElement, int] | None = None

    def of(self, document: Any) -> Any:
        """readability's own scores; nothing is changed in the meantime."""
        self._lengths = {link: length_of(link) for link in document.doc.iter("a")}
        try:
            return self._score(document)
        finally:
            self._lengths = None

    def link_density(self, element: HtmlElement) -> float:
        """The part of an element's text that is in links."""
        length = length_of if self._lengths is None else self._lengths.__getitem__
        linked = sum(map(length, element.iterdescendants("a")))
        return linked / (length_of(element) or 1) if linked else 0.0


def class_weight(document: Any, element: HtmlElement) -> float:
    """The weight of an element's class and id, for or against it being content."""
    return sum(_WEIGHTS[value] for value in (element.get("class"), element.get("id")) if value)


def drop_unlikely(document: Any) -> None:
    """Remove the elements whose class and id suggest that they are not content."""
    frames = trafilatura.readability_lxml.FRAME_TAGS
    for element in _MARKED(document.doc):
        value = " ".join(filter(None, (element.get("class"), element.get("id"))))
        if len(value) >= 2 and element.tag not in frames and _UNLIKELY[value]:
            element.drop_tree()


def _weight(value: str) -> int:
    patterns = trafilatura.readability_lxml.REGEXES
    return 25 * bool(patterns["positiveRe"].search(value)) - 25 * bool(patterns["negativeRe"].search(value))


def _is_unlikely(value: str) -> bool:
    patterns, value = trafilatura.readability_lxml.REGEXES, value.lower()
    return bool(patterns["unlikelyCandidatesRe"].search(value)) and not patterns["okMaybeItsACandidateRe"].search(value)


#: By values of attributes, which hostile pages cannot fill memory with.
_WEIGHTS: Memo[str, int] = Memo(_weight, 8192, 256)
_UNLIKELY: Memo[str, bool] = Memo(_is_unlikely, 8192, 256)
