"""trafilatura with the same text but faster: its pruning XPaths run as one Python walk each.

Most of trafilatura's time goes into XPath predicates with ``re:test``, which call back into Python for every element
and pattern. Here the very expressions trafilatura holds are parsed and become tests of single attribute values, whose
answers are remembered: a page repeats the same few hundred class names.

Nothing is copied from trafilatura, so a changed token list upstream needs no change here. Any other change is caught:
the walks serve only the versions named in :data:`VERIFIED_VERSIONS` and :data:`VERIFIED_JUSTEXT`, and only after a
self-test against the XPaths and against stock output; else stock trafilatura runs and a warning says so once.
trafilatura's own lists hold the walks only while :func:`extract_text` runs.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import justext.core
import lxml.etree
import lxml.html
import trafilatura
import trafilatura.core
import trafilatura.external
import trafilatura.htmlprocessing
import trafilatura.main_extractor
import trafilatura.readability_lxml
import trafilatura.settings
import trafilatura.utils
import trafilatura.xpaths
from lxml.html import HtmlElement

from quern.data_pipeline.extraction.content import ENOUGH_CHARS, Backup, PageElement
from quern.data_pipeline.extraction.conversion import CleanedLater, Cleaning, conversions, converting
from quern.data_pipeline.extraction.density import LinkDensity, OwnText, length_of
from quern.data_pipeline.extraction.fallbacks import Neighbours, Paragraph, Paragraphs, StopWords
from quern.data_pipeline.extraction.readability import ReadabilityComparison, Scores, class_weight, drop_unlikely
from quern.data_pipeline.extraction.xpath_walk import Firsts, Member, Walk, Walks

__all__ = ["VERIFIED_VERSIONS", "Favor", "backend", "extract_text", "stock_text"]

logger = logging.getLogger(__name__)

#: Distributions whose text was compared with stock output over a corpus of real pages.
VERIFIED_VERSIONS = ("2.3.1",)
#: Of justext, whose classes and functions some of the replacements stand in for: the self-test sees little of it.
VERIFIED_JUSTEXT = ("3.0.2",)

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

#: Lists that prune one tree one after the other, nothing but deletions between them.
TOGETHER = (
    ("RAW_TREE_PRUNE_XPATH", "REMOVE_COMMENTS_AND_LISTS_XPATH"),
    ("OVERALL_DISCARD_XPATH", "DISCARD_IMAGE_ELEMENTS", "TEASER_DISCARD_XPATH", "PRECISION_DISCARD_XPATH"),
)

Favor = Literal["precision", "balanced", "recall"]

#: The replacements are put in place for the process, not for a thread.
_ONE_AT_A_TIME = threading.RLock()


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
    """The same text as :func:`stock_text`, computed faster. Threads wait for each other."""
    with _ONE_AT_A_TIME:
        replacements, _, groups = _prepare(favor)
        if not replacements:
            return stock_text(html, favor, include_tables)
        with _in_place(replacements):
            try:
                return _text(html, favor, include_tables)
            finally:
                for group in groups:
                    group.forget()


def _text(html: str, favor: Favor, include_tables: bool) -> str | None:
    text = trafilatura.extract(html, options=_options(favor, include_tables))
    return text if text is None else str(text)


@functools.cache
def _options(favor: Favor, include_tables: bool) -> Any:
    """The settings of :func:`stock_text`, that trafilatura reads from its configuration for every page."""
    return trafilatura.settings.Extractor(
        precision=favor == "precision", recall=favor == "recall", comments=False, tables=include_tables, dedup=False
    )


def backend(favor: Favor = "precision") -> str:
    """``"walks"``, or ``"stock: <why>"`` where the speed-up does not apply."""
    with _ONE_AT_A_TIME:
        return _prepare(favor)[1]


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


def _replaced(owner: Any, name: str, fast: Any) -> _Replacement:
    return _Replacement(owner, name, inspect.getattr_static(owner, name), fast)


@contextmanager
def _in_place(replacements: tuple[_Replacement, ...]) -> Iterator[None]:
    for each in replacements:
        each.put(each.fast)
    try:
        yield
    finally:
        for each in replacements:
            each.put(each.stock)


@functools.cache
def _prepare(favor: Favor) -> tuple[tuple[_Replacement, ...], str, tuple[Walks | Firsts, ...]]:
    """The replacements, :func:`backend`'s answer, and walks that remember a tree; made and tested once a process."""
    try:
        for name, verified in (("trafilatura", VERIFIED_VERSIONS), ("justext", VERIFIED_JUSTEXT)):
            version = importlib.metadata.version(name)
            if version not in verified:
                raise ValueError(f"{name} {version} is not one of the verified {', '.join(verified)}")
        if 3 * _options(favor, True).min_extracted_size > ENOUGH_CHARS:
            raise ValueError(f"trafilatura's MIN_EXTRACTED_SIZE: expected at most {ENOUGH_CHARS // 3}")
        replacements, groups = _replacements()
        _self_test(replacements, favor)
    except (AttributeError, TypeError, ValueError) as error:
        logger.warning("extraction runs on stock trafilatura, at about half the speed: %s", error)
        return (), f"stock: {error}", ()
    return replacements, "walks", groups


def _replacements() -> tuple[tuple[_Replacement, ...], tuple[Walks | Firsts, ...]]:
    xpaths, utils, core, external = trafilatura.xpaths, trafilatura.utils, trafilatura.core, trafilatura.external
    stock = {name: tuple(getattr(xpaths, name)) for name in EXPRESSION_LISTS}
    alone = {name: tuple(map(_walk_or_xpath, listed)) for name, listed in stock.items()}
    fast: dict[str, tuple[Any, ...]] = dict(alone)
    groups: list[Walks | Firsts] = []
    for names in TOGETHER:
        groups.append(Walks([walk for name in names for walk in alone[name] if isinstance(walk, Walk)]))
        members = iter(groups[-1].members)
        for name in names:
            fast[name] = tuple(next(members) if isinstance(walk, Walk) else walk for walk in alone[name])
    bodies = Firsts([xpath.path for xpath in stock["BODY_XPATH"]])
    groups.append(bodies)
    fast["BODY_XPATH"] = bodies.members
    # readability's copy of the page is pruned by the one list alone
    overall = alone["OVERALL_DISCARD_XPATH"]
    if all(isinstance(walk, Walk) for walk in overall):
        groups.append(Walks(overall))
        overall = groups[-1].members
    found = [_Replacement(xpaths, name, stock[name], fast[name]) for name in EXPRESSION_LISTS]
    # lxml.html asks a Python method for the class of every element; only form controls get another than HtmlElement
    parser = utils.HTML_PARSER.copy()
    parser.set_element_class_lookup(
        lxml.etree.ElementDefaultClassLookup(
            element=PageElement,
            comment=lxml.html.HtmlComment,
            pi=lxml.html.HtmlProcessingInstruction,
            entity=lxml.html.HtmlEntity,
        )
    )
    prune, pair = external.prune_unwanted_nodes, list(overall)
    comparison = ReadabilityComparison(
        core.compare_extraction, external.try_readability, lambda tree, *_: prune(tree, pair)
    )
    extractor, readability, maker = (
        trafilatura.main_extractor,
        trafilatura.readability_lxml,
        justext.core.ParagraphMaker,
    )
    document, html = readability.Document, trafilatura.htmlprocessing
    scores = Scores(document.score_paragraphs)
    backup = Backup(bodies, core.extract_content, extractor.deepcopy)
    density = LinkDensity(extractor.prune_unwanted_sections)
    own = OwnText(extractor._elem_text, extractor.is_text_element)
    replacements = (
        *found,
        _replaced(extractor, "prune_unwanted_sections", density.prune_sections),
        _replaced(extractor, "delete_by_link_density", density.delete),
        _replaced(extractor, "link_density_test_tables", density.is_dense_table),
        _replaced(extractor, "_elem_text", own.text),
        _replaced(extractor, "is_text_element", own.has_text),
        _replaced(core, "extract_content", backup.extract),
        _replaced(extractor, "deepcopy", backup.copy),
        _replaced(core, "tree_cleaning", Cleaning(core.tree_cleaning)),
        _replaced(external, "tree_cleaning", Cleaning(external.tree_cleaning)),
        _replaced(core, "convert_tags", converting(core.convert_tags)),
        _replaced(html, "CONVERSIONS", conversions(html.CONVERSIONS)),
        _replaced(readability, "text_length", length_of),
        _replaced(document, "get_link_density", lambda _, element: scores.link_density(element)),
        _replaced(document, "score_paragraphs", lambda page: scores.of(page)),
        _replaced(document, "class_weight", class_weight),
        _replaced(document, "remove_unlikely_candidates", drop_unlikely),
        _replaced(document, "sanitize", comparison.sanitizing(document.sanitize)),
        _replaced(maker, "make_paragraphs", staticmethod(Paragraphs(maker.make_paragraphs))),
        _replaced(utils, "HTML_PARSER", parser),
        _replaced(utils, "INVALID_XML_CHARS", _InvalidCharacters(utils.INVALID_XML_CHARS)),
        _replaced(core, "_prepare_tree", CleanedLater.prepare),
        _replaced(external, "basic_cleaning", CleanedLater.resolving(external.basic_cleaning)),
        _replaced(core, "_extract_and_compare", comparison.extract),
        _replaced(core, "compare_extraction", comparison.compare),
        _replaced(external, "try_readability", comparison.readability),
        _replaced(external, "prune_unwanted_nodes", comparison.prune),
        _replaced(external, "classify_paragraphs", StopWords(external.classify_paragraphs)),
        _replaced(justext.core, "Paragraph", Paragraph),
        _replaced(justext.core, "_get_neighbour", Neighbours().find),
    )
    return replacements, tuple(groups)


def _walk_or_xpath(expression: lxml.etree.XPath) -> Walk | lxml.etree.XPath:
    """Expressions without a regex are fast as they are, so one outside the subset may stay."""
    try:
        return Walk(expression.path)
    except ValueError:
        if "re:test" in expression.path:
            raise
        return expression


def _self_test(replacements: tuple[_Replacement, ...], favor: Favor) -> None:
    """Raises ValueError where a walk and its XPath, or fast and stock text, differ."""
    for replacement in replacements:
        if not isinstance(replacement.stock, tuple):
            continue
        for xpath, walk in zip(replacement.stock, replacement.fast, strict=True):
            tree = probe_tree(xpath.path)
            expected, got = xpath(tree), walk(tree)
            together = walk.with_others(tree) if isinstance(walk, Member) else got
            if got != together or (expected[:1] != got if getattr(walk, "first", False) else expected != got):
                raise ValueError(f"the self-test of {replacement.name} found another answer than its XPath's")
    # a few stop words are as good for this as all of justext's, which take a while to load
    external: Any = trafilatura.external
    all_of_them, external.JT_STOPLIST = external.JT_STOPLIST, tuple(_SENTENCE.lower().split())
    try:
        for page in _PAGES:
            expected_text = stock_text(page, favor)
            with _in_place(replacements):
                text = _text(page, favor, True)
            if text != expected_text:
                raise ValueError(f"the self-test found another text than stock trafilatura's ({favor})")
    finally:
        external.JT_STOPLIST = all_of_them


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
