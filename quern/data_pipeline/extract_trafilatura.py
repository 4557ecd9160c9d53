"""trafilatura, faster, with the same text: its pruning XPaths run as one Python walk each.

Most of trafilatura's time goes into XPath predicates with ``re:test``, which call back into Python once for every
element and pattern. Here the very expressions trafilatura holds are parsed and turned into predicates over an element's
attribute values, remembered by those values: a page repeats the same few hundred class names.

Nothing is copied from trafilatura, so an upstream change of a token list needs no change here. A change of anything
else is caught: the walks serve only the versions named in :data:`VERIFIED_VERSIONS`, only if every expression parses,
and only after a self-test against the XPaths and against stock output; else stock trafilatura runs and a warning says
so once. trafilatura's lists hold the walks only while :func:`extract_text` runs.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import trafilatura
import trafilatura.core
import trafilatura.external
import trafilatura.main_extractor
import trafilatura.utils
import trafilatura.xpaths
from lxml.etree import XPath
from lxml.html import HtmlElement

__all__ = ["VERIFIED_VERSIONS", "Walk", "backend", "compile_xpath", "extract_text"]

logger = logging.getLogger(__name__)

#: Distributions whose text was compared with stock output over a corpus of real pages.
VERIFIED_VERSIONS = ("2.3.1",)

_EXPRESSION_LISTS = (
    "RAW_TREE_PRUNE_XPATH",
    "REMOVE_COMMENTS_XPATH",
    "REMOVE_COMMENTS_AND_LISTS_XPATH",
    "OVERALL_DISCARD_XPATH",
    "TEASER_DISCARD_XPATH",
    "PRECISION_DISCARD_XPATH",
    "DISCARD_IMAGE_ELEMENTS",
    "BODY_XPATH",
)

#: Answers kept for each expression; past it the memo starts anew. Longer attribute values are not kept.
_MEMO_ENTRIES = 8192
_MEMO_KEY_CHARS = 256

Values = dict[str, str]
Condition = Callable[[HtmlElement, Values], bool]
Favor = Literal["precision", "balanced", "recall"]


# --- The subset of XPath 1.0 that trafilatura's pruning speaks --------------------------------------------------------

_TOKEN = re.compile(
    r"\s*(?:(?P<literal>'[^']*'|\"[^\"]*\")|(?P<name>[A-Za-z_][\w-]*(?:::?[A-Za-z_][\w-]*)?)|(?P<sign>\.//|[][()@|=,*]|1(?!\d)))"
)


@dataclass(frozen=True)
class _Alternative:
    """One ``.//…`` path: the tags it can match (None: any), its conditions, and whether only the first match counts."""

    tags: frozenset[str] | None
    pure: tuple[Condition, ...]
    """Conditions on attributes and tag alone, whose answer can be remembered."""
    impure: tuple[Condition, ...]
    """Conditions that look below the element."""
    first: bool


class _Parser:
    """Recursive descent over the tokens of one expression; raises ValueError outside the subset."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tokens = self._split(path)
        self.at = 0
        self.attributes: dict[str, None] = {}
        self.unions: dict[tuple[str, str], None] = {}
        self.looks_below = False

    def _split(self, path: str) -> list[str]:
        tokens, at, end = [], 0, len(path.rstrip())
        while at < end:
            match = _TOKEN.match(path, at)
            if match is None:
                raise ValueError(f"expected a known XPath token, got {path[at : at + 20]!r}")
            tokens.append(match.group().strip())
            at = match.end()
        return tokens

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        token = self.peek()
        if not token or (expected and token not in expected):
            raise ValueError(f"expected {' or '.join(expected) or 'more'}, got {token!r} in {self.path!r}")
        self.at += 1
        return token

    def accept(self, token: str) -> bool:
        if self.peek() == token:
            self.at += 1
            return True
        return False

    def alternatives(self) -> tuple[_Alternative, ...]:
        """``path | path …`` to the end of the text."""
        found = [self.alternative()]
        while self.accept("|"):
            found.append(self.alternative())
        if self.peek():
            raise ValueError(f"expected the end, got {self.peek()!r} in {self.path!r}")
        return tuple(found)

    def alternative(self) -> _Alternative:
        """``.//step[…]…`` or ``(.//step[…]…)[1]``."""
        grouped = self.accept("(")
        self.take(".//")
        name = self.take()
        tags = None if name == "*" else frozenset([self.plain_name(name)])
        pure: list[Condition] = []
        impure: list[Condition] = []
        first = False
        while self.accept("["):
            if first:
                raise ValueError(f"expected no condition after a position in {self.path!r}")
            if self.accept("1"):
                first = True
            elif tags is None and not pure and not impure and (only := self.tag_test()) is not None:
                tags = only
            else:
                self.looks_below = False
                condition = self.disjunction()
                (impure if self.looks_below else pure).append(condition)
            self.take("]")
        if grouped:
            if first:
                raise ValueError(f"expected no position inside parentheses in {self.path!r}")
            self.take(")")
            self.take("[")
            self.take("1")
            self.take("]")
            first = True
        return _Alternative(tags, tuple(pure), tuple(impure), first)

    def tag_test(self) -> frozenset[str] | None:
        """``self::a or self::b …`` when that is all there is up to the bracket; else None, and nothing is consumed."""
        start, tags = self.at, []
        while self.peek().startswith("self::"):
            tags.append(self.take().removeprefix("self::"))
            if not self.accept("or"):
                break
        if tags and self.peek() == "]":
            return frozenset(tags)
        self.at = start
        return None

    def disjunction(self) -> Condition:
        terms = [self.conjunction()]
        while self.accept("or"):
            terms.append(self.conjunction())
        return terms[0] if len(terms) == 1 else lambda element, values: any(term(element, values) for term in terms)

    def conjunction(self) -> Condition:
        terms = [self.condition()]
        while self.accept("and"):
            terms.append(self.condition())
        return terms[0] if len(terms) == 1 else lambda element, values: all(term(element, values) for term in terms)

    def condition(self) -> Condition:
        token = self.peek()
        if token.startswith("self::"):
            tag = self.take().removeprefix("self::")
            return lambda element, values: element.tag == tag
        if self.accept(".//"):
            below = self.plain_name(self.take())
            self.looks_below = True
            return lambda element, values: next(element.iterdescendants(below), None) is not None
        if self.accept("("):
            inner = self.disjunction()
            self.take(")")
            return inner
        if token == "@":
            name = self.attribute()
            if not self.accept("="):
                return lambda element, values: name in values
            wanted = self.literal()
            return lambda element, values: values.get(name) == wanted
        function = self.take("not", "contains", "starts-with", "re:test")
        self.take("(")
        if function == "not":
            inner = self.disjunction()
            self.take(")")
            return lambda element, values: not inner(element, values)
        subject = self.string()
        self.take(",")
        argument = self.literal()
        flags = self.literal() if function == "re:test" and self.accept(",") else ""
        self.take(")")
        if function == "contains":
            return lambda element, values: argument in subject(values)
        if function == "starts-with":
            return lambda element, values: subject(values).startswith(argument)
        if flags not in ("", "i"):
            raise ValueError(f"expected no flag or 'i', got {flags!r} in {self.path!r}")
        pattern = re.compile(argument, re.IGNORECASE if flags else 0)
        return lambda element, values: pattern.search(subject(values)) is not None

    def string(self) -> Callable[[Values], str]:
        """A string of the element: one attribute, the first present of several, or a translation of it."""
        if self.accept("translate"):
            self.take("(")
            inner = self.string()
            self.take(",")
            source = self.literal()
            self.take(",")
            target = self.literal()
            self.take(")")
            if len(source) != len(target) or len(set(source)) != len(source):
                raise ValueError(f"expected a one-to-one translation, got {source!r} to {target!r} in {self.path!r}")
            table = str.maketrans(source, target)
            return lambda values: inner(values).translate(table)
        name = self.attribute()
        if not self.accept("|"):
            return lambda values: values.get(name, "")
        union = (name, self.attribute())
        self.unions[union] = None
        # the string of a node set is that of its first node in document order; values keep the source's order
        return lambda values: next((value for name, value in values.items() if name in union), "")

    def attribute(self) -> str:
        self.take("@")
        name = self.plain_name(self.take())
        self.attributes[name] = None
        return name

    def plain_name(self, token: str) -> str:
        if not re.fullmatch(r"[A-Za-z_][\w-]*", token):
            raise ValueError(f"expected a plain name, got {token!r} in {self.path!r}")
        return token

    def literal(self) -> str:
        token = self.take()
        if token[0] not in "'\"":
            raise ValueError(f"expected a literal, got {token!r} in {self.path!r}")
        return token[1:-1]


# --- The walk ---------------------------------------------------------------------------------------------------------


class Walk:
    """One compiled expression. Called with an element it returns what the XPath returns, in document order.

    Of an expression that asks for a first match (``[1]``) only the first node is returned: the caller reads no other.
    """

    def __init__(self, path: str) -> None:
        """Raises ValueError for an expression outside the subset."""
        parser = _Parser(path)
        self.path = path
        self._alternatives = parser.alternatives()
        self._names = tuple(parser.attributes)
        self._pairs = tuple((self._names.index(one), self._names.index(other)) for one, other in parser.unions)
        self._first = self._alternatives[0].first
        if any(alternative.first != self._first for alternative in self._alternatives):
            raise ValueError(f"expected a position on every path or on none in {path!r}")
        tags = [alternative.tags for alternative in self._alternatives]
        # a tag belongs to the key where two paths, or a condition, tell tags apart
        self._tag_matters = len(tags) > 1 or "self::" in path.split("]", 1)[-1]
        self._tags = ("*",) if None in tags else tuple(sorted(set().union(*(names for names in tags if names))))
        self._impure = any(alternative.impure for alternative in self._alternatives)
        self._memo: dict[tuple[str | None, ...], tuple[_Alternative, ...]] = {}

    def __call__(self, root: HtmlElement) -> list[HtmlElement]:
        found = []
        names, pairs, tag_matters, impure = self._names, self._pairs, self._tag_matters, self._impure
        for element in root.iterdescendants(*self._tags):
            key: tuple[str | None, ...] = tuple(map(element.get, names))
            for one, other in pairs:
                if key[one] is not None and key[other] is not None:
                    key = (*key, *element.keys())
            if tag_matters:
                key = (*key, element.tag)
            matching = self._memo.get(key)
            if matching is None:
                matching = self._match(element, key)
            if matching and (not impure or self._holds_below(element, matching)):
                found.append(element)
                if self._first:
                    break
        return found

    def _holds_below(self, element: HtmlElement, matching: tuple[_Alternative, ...]) -> bool:
        values = self._values(element)
        return any(all(condition(element, values) for condition in path.impure) for path in matching)

    def _values(self, element: HtmlElement) -> Values:
        """The attributes the expression names, in the order of the source."""
        return {name: value for name, value in element.items() if name in self._names}

    def _match(self, element: HtmlElement, key: tuple[str | None, ...]) -> tuple[_Alternative, ...]:
        """The paths whose tag and pure conditions hold; remembered under ``key``, on which alone they depend."""
        values = self._values(element)
        matching = tuple(
            path
            for path in self._alternatives
            if (path.tags is None or element.tag in path.tags)
            and all(condition(element, values) for condition in path.pure)
        )
        if sum(len(part) for part in key if part is not None) <= _MEMO_KEY_CHARS:
            if len(self._memo) >= _MEMO_ENTRIES:
                self._memo.clear()
            self._memo[key] = matching
        return matching


def compile_xpath(path: str) -> Walk:
    """The walk of an XPath expression of the pruning subset; raises ValueError outside it."""
    return Walk(path)
