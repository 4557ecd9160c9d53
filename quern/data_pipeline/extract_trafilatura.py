"""trafilatura, faster, with the same text: its pruning XPaths run as one Python walk each.

Most of trafilatura's time goes into XPath predicates with ``re:test``, which call back into Python for every element
and pattern. Here the very expressions trafilatura holds are parsed and become tests of single attribute values, whose
answers are remembered: a page repeats the same few hundred class names.

Nothing is copied from trafilatura, so a changed token list upstream needs no change here. Any other change is caught:
the walks serve only the versions named in :data:`VERIFIED_VERSIONS`, and only after a self-test against the XPaths and
against stock output; else stock trafilatura runs and a warning says so once. trafilatura's own lists hold the walks
only while :func:`extract_text` runs.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import justext.core
import lxml.etree
import lxml.html
import lxml.html.defs
import trafilatura
import trafilatura.core
import trafilatura.external
import trafilatura.utils
import trafilatura.xpaths
from lxml.html import HtmlElement

from quern.data_pipeline.xpath_walk import Walk

__all__ = ["VERIFIED_VERSIONS", "Favor", "backend", "extract_text", "stock_text"]

logger = logging.getLogger(__name__)

#: Distributions whose text was compared with stock output over a corpus of real pages.
VERIFIED_VERSIONS = ("2.3.1",)

#: The lists of :mod:`trafilatura.xpaths` that the extraction of a body walks through.
EXPRESSION_LISTS = (
    "RAW_TREE_PRUNE_XPATH",
    "REMOVE_COMMENTS_XPATH",
    "REMOVE_COMMENTS_AND_LISTS_XPATH",
    "OVERALL_DISCARD_XPATH",
    "TEASER_DISCARD_XPATH",
    "PRECISION_DISCARD_XPATH",
    "DISCARD_IMAGE_ELEMENTS",
    "BODY_XPATH",
)

Favor = Literal["precision", "balanced", "recall"]


def stock_text(html: str, favor: Favor = "precision", include_tables: bool = True) -> str | None:
    """The main text of a page by trafilatura as installed; None where it finds none."""
    text = trafilatura.extract(
        html,
        favor_precision=favor == "precision",
        favor_recall=favor == "recall",
        include_comments=False,
        include_tables=include_tables,
        deduplicate=False,
    )
    return text if text is None else str(text)


def extract_text(html: str, favor: Favor = "precision", include_tables: bool = True) -> str | None:
    """The same text as :func:`stock_text`, sooner."""
    replacements, _ = _prepare()
    with _in_place(replacements):
        return stock_text(html, favor, include_tables)


def backend() -> str:
    """``"walks"``, or ``"stock: <why>"`` where the speed-up does not apply."""
    return _prepare()[1]


@dataclass(frozen=True)
class _Replacement:
    """One point of trafilatura: an attribute of a module, or the content of a list."""

    owner: Any
    name: str
    stock: Any
    fast: Any

    def put(self, value: Any) -> None:
        if isinstance(value, tuple):
            getattr(self.owner, self.name)[:] = value
        else:
            setattr(self.owner, self.name, value)


@contextmanager
def _in_place(replacements: tuple[_Replacement, ...]) -> Iterator[None]:
    for replacement in replacements:
        replacement.put(replacement.fast)
    try:
        yield
    finally:
        for replacement in replacements:
            replacement.put(replacement.stock)


@functools.cache
def _prepare() -> tuple[tuple[_Replacement, ...], str]:
    """The replacements, and :func:`backend`'s answer; made and tested once a process."""
    version = importlib.metadata.version("trafilatura")
    try:
        if version not in VERIFIED_VERSIONS:
            raise ValueError(f"trafilatura {version} is not one of the verified {', '.join(VERIFIED_VERSIONS)}")
        replacements = _replacements()
        _self_test(replacements)
    except (AttributeError, TypeError, ValueError) as error:
        logger.warning("extraction runs on stock trafilatura, at about half the speed: %s", error)
        return (), f"stock: {error}"
    return replacements, "walks"


def _replacements() -> tuple[_Replacement, ...]:
    xpaths, utils, core, external = trafilatura.xpaths, trafilatura.utils, trafilatura.core, trafilatura.external
    found = []
    for name in EXPRESSION_LISTS:
        stock = tuple(getattr(xpaths, name))
        found.append(_Replacement(xpaths, name, stock, tuple(map(_walk_or_xpath, stock))))
    # lxml.html asks a Python method for the class of every element; only form controls get another than HtmlElement
    parser = utils.HTML_PARSER.copy()
    parser.set_element_class_lookup(
        lxml.etree.ElementDefaultClassLookup(
            element=HtmlElement,
            comment=lxml.html.HtmlComment,
            pi=lxml.html.HtmlProcessingInstruction,
            entity=lxml.html.HtmlEntity,
        )
    )
    comparison = _Comparison(core.compare_extraction, external.try_readability)
    return (
        *found,
        _Replacement(utils, "HTML_PARSER", utils.HTML_PARSER, parser),
        _Replacement(utils, "INVALID_XML_CHARS", utils.INVALID_XML_CHARS, _InvalidCharacters(utils.INVALID_XML_CHARS)),
        _Replacement(core, "compare_extraction", core.compare_extraction, comparison.compare),
        _Replacement(external, "try_readability", external.try_readability, comparison.readability),
        _Replacement(justext.core, "_get_neighbour", justext.core._get_neighbour, _Neighbours().find),
    )


def _walk_or_xpath(expression: lxml.etree.XPath) -> Walk | lxml.etree.XPath:
    """Expressions without a regex are fast as they are, so one outside the subset may stay."""
    try:
        return Walk(expression.path)
    except ValueError:
        if "re:test" in expression.path:
            raise
        return expression


def _self_test(replacements: tuple[_Replacement, ...]) -> None:
    """Raises ValueError where a walk and its XPath, or fast and stock text, differ."""
    for replacement in replacements:
        if not isinstance(replacement.stock, tuple):
            continue
        for xpath, walk in zip(replacement.stock, replacement.fast, strict=True):
            tree = probe_tree(xpath.path)
            expected, got = xpath(tree), walk(tree)
            if expected[:1] != got if getattr(walk, "first", False) else expected != got:
                raise ValueError(f"the self-test of {replacement.name} found another answer than its XPath's")
    for page in _PAGES:
        for favor in get_args(Favor):
            expected_text = stock_text(page, favor)
            with _in_place(replacements):
                text = stock_text(page, favor)
            if text != expected_text:
                raise ValueError(f"the self-test found another text than stock trafilatura's ({favor})")


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


def probe_tree(path: str) -> HtmlElement:
    """A tree with a value for every alternative of an expression's patterns, on every attribute the expression names.

    Each value stands alone and inside other text; attributes tested as a union come in both orders.
    """
    words = {"x"}.union(*(_samples(literal) for literal in re.findall(r"'([^']*)'", path)))
    attributes = sorted(set(re.findall(r"@([\w-]+)", path))) or ["id"]
    unions = re.findall(r"@([\w-]+)\|@([\w-]+)", path)
    tags = re.findall(r"(?:self::|\.//)(\w+)", path) or ["p"]
    root = lxml.html.fromstring("<html><body></body></html>")
    for number, word in enumerate(sorted(words)):
        values = [{name: value} for name in attributes for value in (word, f"a{word}b", f"a {word} b")]
        for one, other in unions:
            values += [
                {one: word, other: "b"},
                {other: word, one: "b"},
                {one: "b", other: word},
                {other: "b", one: word},
            ]
        parent = lxml.etree.SubElement(root[0], "div")
        for offset, attrib in enumerate(values):
            lxml.etree.SubElement(parent, tags[(number + offset) % len(tags)], attrib)
    return root


def _samples(pattern: str) -> set[str]:
    """The literal, and a text for each alternative of it as a regex: first choice of a group, optional parts there."""
    plain = re.sub(r"\(\?![^()]*\)", "", pattern)
    plain = re.sub(r"\((?:\?:)?([^()|]*)[^()]*\)", r"\1", plain)
    plain = re.sub(r"\[(.)[^]]*\]", r"\1", plain)
    return {pattern, *re.sub(r"[?^$]", "", plain.replace("\\s", " ")).split("|")}


class _InvalidCharacters:
    """Stands in for a character-class regex: looks for each character first, since nearly every page has none."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._characters = pattern.findall("".join(map(chr, range(0x10000))))

    def sub(self, replacement: str, text: str) -> str:
        if any(character in text for character in self._characters):
            return self._pattern.sub(replacement, text)
        return text


class _Comparison:
    """trafilatura's comparison with readability, less the readability runs that cannot change the answer.

    Outside of recall mode readability replaces a sound extraction only if its text is more than twice as long
    (``_prefer_readability``), and it only ever leaves text out: its collapsed text is no longer than that of the tree
    it is given. The exceptions are counted (a video frame becomes "VIDEO") or not skipped at all (``growing``: elements
    whose text grows when serialised as XML and read again as HTML, which readability does).
    """

    def __init__(self, compare: Callable[..., Any], readability: Callable[[HtmlElement], HtmlElement]) -> None:
        self._compare, self._readability = compare, readability
        self._state = threading.local()
        known = lxml.html.defs.tags | {"listing", "noembed", "plaintext", "xmp"}
        self._growing = tuple(sorted(tag for tag in known - {"iframe", "script", "style"} if _grows(tag)))

    def compare(self, cleaned: HtmlElement, raw: HtmlElement, body: HtmlElement, text: str, options: Any) -> Any:
        sound = (
            options.focus != "recall"
            and text
            and body.xpath(".//p//text()")
            and len(body.findall(".//table")) <= len(body.findall(".//p"))
        )
        self._state.limit = 2 * len(text) if sound else -1
        try:
            return self._compare(cleaned, raw, body, text, options)
        finally:
            self._state.limit = -1

    def readability(self, tree: HtmlElement) -> HtmlElement:
        limit = getattr(self._state, "limit", -1)
        if limit >= 0:
            for element in list(tree.iter("script", "style", "fencedframe")):  # as readability itself begins
                element.drop_tree()
            if self._longest(tree) <= limit:
                return HtmlElement()  # what trafilatura makes of a readability failure: no text, never preferred
        return self._readability(tree)

    def _longest(self, tree: HtmlElement) -> float:
        """A length that readability's text of ``tree`` cannot pass."""
        frames = list(tree.iter("iframe"))
        if any(map(len, frames)) or (self._growing and next(tree.iter(*self._growing), None) is not None):
            return math.inf
        return len(" ".join(tree.text_content().split())) + len("VIDEO") * len(frames)


class _Neighbours(threading.local):
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


_SENTENCE = (
    "The miller sets the stone, pours the grain, and waits; by noon, {}, the sacks are full and the wheel rests. "
)
_BLOCK = "".join(
    f"<p>{_SENTENCE.format(word) * 3}</p>" for word in ("on most days", "says Anna", "if it rains", "at last")
)
_PAGES = (
    f"""<!DOCTYPE html><html><head><title>Mill</title><script>var a = "<p>";</script></head><body>
    <div class="navbar"><a href="/">Home</a></div><div class="cookie-banner">We use cookies</div>
    <article class="post"><header>By the editor</header><h1>The mill</h1>{_BLOCK}
    <p class="teaser">Read this next</p><div id="social" class="x">Share it</div><p style="display:none">Not seen</p>
    <ul><li>wheat</li><li>rye</li></ul><table><tr><th>Day</th><td>Sacks</td></tr><tr><td>1</td><td>12</td></tr></table>
    <p class="link">Only a link</p><blockquote>{_SENTENCE}</blockquote></article>
    <iframe src="https://www.youtube.com/embed/x"></iframe>
    <div id="comments-list" class="a"><p>{_SENTENCE}</p></div><ol class="comments"><li>First!</li></ol>
    <aside class="infinite-scroll"><h1>Another</h1>{_BLOCK}</aside><div class="footer">Contact</div></body></html>""",
    f"""<html><body><div><div>{_SENTENCE * 2}<br>Second line<br/>{_SENTENCE}</div><span class="author">Anna</span>
    <div>Short</div></div><div hidden aria-hidden="true">{_SENTENCE}</div></body></html>""",
    f"<html><body>\x0b<table><tr><td>{_SENTENCE * 4}</td><td><a href='x'>{_SENTENCE}</a></td></table></body></html>",
    "<html><body><p>Too little.</p></body></html>",
)
