"""Parses a subset of XPath 1.0: tags, and tests of attribute values.

The subset is what boilerplate-pruning expressions use: ``.//*[self::a or self::b][test or test …][condition …]``,
``(…)[1]``, and tests by ``re:test``, ``contains``, ``starts-with``, ``translate``, equality and presence.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from lxml.html import HtmlElement

__all__ = ["Condition", "Holds", "Parser", "Test", "XPathStep", "grouped"]

Condition = Callable[[HtmlElement], bool]
Holds = Callable[[str], bool]

_TOKEN = re.compile(
    r"""\s*(?: '[^']*' | "[^"]*" | [A-Za-z_][\w-]*(?:::?[A-Za-z_][\w-]*)? | \.// | 1(?!\d) | [][()@|=,*] )""",
    re.VERBOSE,
)
#: Of a regex: an escape, a character class, or one character.
_REGEX_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_LITERAL_START = re.compile(r"[A-Za-z_](?![*+?{])")
_NAME = re.compile(r"[A-Za-z_][\w-]*")


@dataclass(frozen=True)
class Test:
    """A test of one attribute, or of the first present of several; False where there is none."""

    names: tuple[str, ...]
    holds: Holds

    def __call__(self, element: HtmlElement) -> bool:
        return next((self.holds(value) for name, value in element.items() if name in self.names), False)


@dataclass(frozen=True)
class XPathStep:
    """Elements of some tags, of whose attribute tests one must hold, if there are any, and every further condition."""

    tags: tuple[str, ...]
    tests: tuple[Test, ...]
    conditions: tuple[Condition, ...]
    first: bool
    """Whether one match is enough."""

    def takes(self, element: HtmlElement, surely: bool) -> bool:
        """Whether an element of which a test may hold is looked for; ``surely``: one is known to hold."""
        if self.tags != ("*",) and element.tag not in self.tags:
            return False
        if not surely and not any(test(element) for test in self.tests if len(test.names) > 1):
            return False
        return all(condition(element) for condition in self.conditions)


@dataclass
class Parser:
    """Recursive descent over ``.//step[condition]…`` or ``(…)[1]``, and several of them parted by ``|``.

    Raises ValueError outside that subset.
    """

    path: str
    tokens: list[str] = field(default_factory=list)
    at: int = 0

    def __post_init__(self) -> None:
        position, end = 0, len(self.path.rstrip())
        while position < end:
            match = _TOKEN.match(self.path, position)
            if match is None:
                raise ValueError(f"expected a known XPath token, got {self.path[position : position + 20]!r}")
            self.tokens.append(match.group().strip())
            position = match.end()

    def take(self, *expected: str) -> str:
        token = self.tokens[self.at] if self.at < len(self.tokens) else "the end"
        if expected and token not in expected:
            raise ValueError(f"expected {' or '.join(expected)}, got {token} in {self.path!r}")
        self.at += 1
        return token

    def accept(self, token: str) -> bool:
        if self.at < len(self.tokens) and self.tokens[self.at] == token:
            self.at += 1
            return True
        return False

    def steps(self) -> list[XPathStep]:
        """The expression's alternatives, which ``|`` parts."""
        steps = [self.step()]
        while self.accept("|"):
            steps.append(self.step())
        if self.at != len(self.tokens):
            raise ValueError(f"expected the end, got {self.tokens[self.at]} in {self.path!r}")
        return steps

    def step(self) -> XPathStep:
        is_grouped, first = self.accept("("), False
        self.take(".//")
        tags: tuple[str, ...] = ("*",) if self.accept("*") else (self.name(),)
        predicates: list[list[Condition]] = []
        while self.accept("["):
            if first:
                raise ValueError(f"expected no condition after a position in {self.path!r}")
            if self.accept("1"):
                first = True
            elif tags == ("*",) and not predicates and (listed := self.tags_only()):
                tags = listed
            else:
                predicates.append(self.terms())
            self.take("]")
        if is_grouped:
            for token in (")", "[", "1", "]"):
                self.take(token)
            first = True
        tests = [term for term in predicates[0] if isinstance(term, Test)] if predicates else []
        if predicates and len(tests) != len(predicates[0]):
            raise ValueError(f"expected a first condition of attribute tests alone in {self.path!r}")
        return XPathStep(tags, tuple(tests), tuple(_any_of(terms) for terms in predicates[1:]), first)

    def tags_only(self) -> tuple[str, ...]:
        """``self::a or self::b …`` up to the bracket; else nothing, and nothing is consumed."""
        end = self.tokens.index("]", self.at)
        listed = self.tokens[self.at : end]
        if not all(token.startswith("self::") if i % 2 == 0 else token == "or" for i, token in enumerate(listed)):
            return ()
        self.at = end
        return tuple(token.removeprefix("self::") for token in listed[::2])

    def terms(self) -> list[Condition]:
        """Conditions joined by ``or``."""
        terms = [self.condition()]
        while self.accept("or"):
            terms.append(self.condition())
        return terms

    def condition(self) -> Condition:
        if self.accept("not"):
            inner = self.group()
            return lambda element: not inner(element)
        if self.accept(".//"):
            below = self.name()
            return lambda element: next(element.iterdescendants(below), None) is not None
        if self.accept("@"):
            self.at -= 1
            names, _ = self.subject()
            if not self.accept("="):
                return Test(names, lambda value: True)
            wanted = self.literal()
            return Test(names, lambda value: value == wanted)
        token = self.take()
        if token.startswith("self::"):
            tag = token.removeprefix("self::")
            return lambda element: element.tag == tag
        return self.string_test(token)

    def group(self) -> Condition:
        self.take("(")
        inner = _any_of(self.terms())
        self.take(")")
        return inner

    def string_test(self, function: str) -> Test:
        self.take("(")
        names, table = self.subject()
        self.take(",")
        argument = self.literal()
        flags = self.literal() if function == "re:test" and self.accept(",") else ""
        self.take(")")
        search = re.compile(grouped(argument) if function == "re:test" else "", re.IGNORECASE if flags else 0).search
        tests: dict[str, Holds] = {
            "contains": lambda value: argument in value,
            "starts-with": lambda value: value.startswith(argument),
            "re:test": lambda value: search(value) is not None,
        }
        if function not in tests or flags not in ("", "i"):
            raise ValueError(f"expected a known function, got {function} with flags {flags!r} in {self.path!r}")
        plain = tests[function]
        holds: Holds = (lambda value: plain(value.translate(table))) if table else plain
        if holds(""):
            raise ValueError(f"expected a test that an absent attribute fails, got {argument!r} in {self.path!r}")
        return Test(names, holds)

    def subject(self) -> tuple[tuple[str, ...], dict[int, str]]:
        """Attribute names, of which the first present in the source counts, and the translation of its value."""
        if self.accept("translate"):
            self.take("(")
            names, table = self.subject()
            self.take(",")
            source = self.literal()
            self.take(",")
            target = self.literal()
            self.take(")")
            if table or len(source) != len(target) or len(set(source)) != len(source):
                raise ValueError(f"expected a one-to-one translation, got {source!r} to {target!r} in {self.path!r}")
            return names, {ord(one): other for one, other in zip(source, target, strict=True)}
        found: list[str] = []
        while not found or self.accept("|"):
            self.take("@")
            found.append(self.name())
        return tuple(found), {}

    def name(self) -> str:
        token = self.take()
        if not _NAME.fullmatch(token):
            raise ValueError(f"expected a plain name, got {token} in {self.path!r}")
        return token

    def literal(self) -> str:
        token = self.take()
        if token[0] not in "'\"":
            raise ValueError(f"expected a literal, got {token} in {self.path!r}")
        return token[1:-1]


def grouped(pattern: str) -> str:
    """The same alternatives, those that begin with one letter together: the engine tries one after the other."""
    alternatives, start, depth = [], 0, 0
    for match in _REGEX_PART.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if match[0] == "|" and depth == 0:
            alternatives.append(pattern[start : match.start()])
            start = match.end()
    alternatives.append(pattern[start:])
    by_letter: dict[str, list[str]] = {}
    for alternative in alternatives:
        begins = _LITERAL_START.match(alternative)
        by_letter.setdefault(begins[0] if begins else "", []).append(alternative)
    rest = by_letter.pop("", [])
    return "|".join(
        [*(f"{letter}(?:{'|'.join(a[1:] for a in listed)})" for letter, listed in by_letter.items()), *rest]
    )


def _any_of(terms: list[Condition]) -> Condition:
    return terms[0] if len(terms) == 1 else lambda element: any(term(element) for term in terms)
