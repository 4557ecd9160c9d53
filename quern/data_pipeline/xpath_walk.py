"""A subset of XPath 1.0 as Python walks: tags, and tests of attribute values whose answers are remembered.

lxml evaluates ``re:test(@class, '…')`` by calling back into Python once for every element and pattern. A page repeats
the same few hundred attribute values, so a walk over the elements with a memo by value is several times faster.
The subset is what boilerplate-pruning expressions use: ``.//*[self::a or self::b][test or test …][condition …]``,
``(…)[1]``, and tests by ``re:test``, ``contains``, ``starts-with``, ``translate``, equality and presence.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from lxml.html import HtmlElement

__all__ = ["Walk"]

#: Answers kept for one attribute of one expression; past it the memo starts anew. Longer values are not kept.
MEMO_ENTRIES = 8192
MEMO_VALUE_CHARS = 256

Condition = Callable[[HtmlElement], bool]
Holds = Callable[[str], bool]

_TOKEN = re.compile(
    r"""\s*(?: '[^']*' | "[^"]*" | [A-Za-z_][\w-]*(?:::?[A-Za-z_][\w-]*)? | \.// | 1(?!\d) | [][()@|=,*] )""",
    re.VERBOSE,
)
_NAME = re.compile(r"[A-Za-z_][\w-]*")


@dataclass(frozen=True)
class _Test:
    """A test of one attribute, or of the first present of several; False where there is none."""

    names: tuple[str, ...]
    holds: Holds

    def __call__(self, element: HtmlElement) -> bool:
        return next((self.holds(value) for name, value in element.items() if name in self.names), False)


@dataclass
class _Parser:
    """Recursive descent over ``.//step[condition]…`` or ``(…)[1]``; raises ValueError outside that subset."""

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

    def parse(self) -> tuple[tuple[str, ...], list[_Test], list[Condition], bool]:
        """Tags, attribute tests of which one must hold, further conditions, and whether one match is enough."""
        grouped, first = self.accept("("), False
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
        if grouped:
            for token in (")", "[", "1", "]"):
                self.take(token)
            first = True
        if self.at != len(self.tokens):
            raise ValueError(f"expected the end, got {self.tokens[self.at]} in {self.path!r}")
        tests = [term for term in predicates[0] if isinstance(term, _Test)] if predicates else []
        if not tests or len(tests) != len(predicates[0]):
            raise ValueError(f"expected a first condition of attribute tests alone in {self.path!r}")
        return tags, tests, [_any_of(terms) for terms in predicates[1:]], first

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
                return _Test(names, lambda value: True)
            wanted = self.literal()
            return _Test(names, lambda value: value == wanted)
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

    def string_test(self, function: str) -> _Test:
        self.take("(")
        names, table = self.subject()
        self.take(",")
        argument = self.literal()
        flags = self.literal() if function == "re:test" and self.accept(",") else ""
        self.take(")")
        search = re.compile(argument if function == "re:test" else "", re.IGNORECASE if flags else 0).search
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
        return _Test(names, holds)

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


def _any_of(terms: list[Condition]) -> Condition:
    return terms[0] if len(terms) == 1 else lambda element: any(term(element) for term in terms)


class _Memo(dict[str, bool]):
    """Whether any test holds for a value: looked up, else found out. Bounded, so hostile pages cannot fill memory."""

    def __init__(self, tests: list[Holds]) -> None:
        super().__init__()
        self._tests = tests

    def __missing__(self, value: str) -> bool:
        verdict = any(test(value) for test in self._tests) if len(self._tests) > 1 else self._tests[0](value)
        if len(value) <= MEMO_VALUE_CHARS:
            if len(self) >= MEMO_ENTRIES:
                self.clear()
            self[value] = verdict
        return verdict


class Walk:
    """An XPath expression as one walk: called with an element it returns the list the XPath returns, in document order.

    Of an expression that asks for a first match (``[1]``) only the first node is returned.
    """

    def __init__(self, path: str) -> None:
        """Raises ValueError for an expression outside the subset."""
        self.path = path
        self._tags, tests, self._conditions, self.first = _Parser(path).parse()
        by_names: dict[tuple[str, ...], list[Holds]] = {}
        for test in tests:
            by_names.setdefault(test.names, []).append(test.holds)
        self._single = {names[0]: _Memo(holds) for names, holds in by_names.items() if len(names) == 1}
        self._union = tuple((names, _Memo(holds)) for names, holds in by_names.items() if len(names) > 1)

    def __call__(self, root: HtmlElement) -> list[HtmlElement]:
        found = []
        single, union, conditions = self._single, self._union, self._conditions
        for element in root.iterdescendants(*self._tags):
            attributes = element.items()
            for name, value in attributes:
                if name in single and single[name][value]:
                    break
            else:
                if not (union and attributes and self._union_holds(attributes)):
                    continue
            if conditions and not all(condition(element) for condition in conditions):
                continue
            found.append(element)
            if self.first:
                break
        return found

    def _union_holds(self, attributes: list[tuple[str, str]]) -> bool:
        for names, memo in self._union:
            for name, value in attributes:
                if name in names:
                    if memo[value]:
                        return True
                    break
        return False
