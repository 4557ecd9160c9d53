"""A subset of XPath 1.0 as Python walks: tags, and tests of attribute values whose answers are remembered.

lxml evaluates ``re:test(@class, '…')`` by calling back into Python once for every element and pattern. A page repeats
the same few hundred attribute values, so a walk over the elements with a memo by value is several times faster.
The subset is what boilerplate-pruning expressions use: ``.//*[self::a or self::b][test or test …][condition …]``,
``(…)[1]``, and tests by ``re:test``, ``contains``, ``starts-with``, ``translate``, equality and presence.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lxml.html import HtmlElement

__all__ = ["Member", "Walk", "Walks"]

#: Answers kept for one attribute of one expression; past it the memo starts anew. Longer values are not kept.
MEMO_ENTRIES = 8192
MEMO_VALUE_CHARS = 256

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
        search = re.compile(_grouped(argument) if function == "re:test" else "", re.IGNORECASE if flags else 0).search
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


def _grouped(pattern: str) -> str:
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


class _Memo(dict[str, int]):
    """What a value of one attribute says: 1, a test holds; 2, it would where this attribute is the one that counts.

    Looked up, else found out. Bounded, so hostile pages cannot fill memory.
    """

    def __init__(self, name: str, tests: Sequence[_Test]) -> None:
        super().__init__()
        self._alone = [test.holds for test in tests if test.names == (name,)]
        self._union = [test.holds for test in tests if name in test.names and len(test.names) > 1]

    def __missing__(self, value: str) -> int:
        verdict = 1 if any(holds(value) for holds in self._alone) else 0
        if not verdict and any(holds(value) for holds in self._union):
            verdict = 2
        return _keep(self, value, verdict)


class _Bits(dict[str, int]):
    """As :class:`_Memo`, of many walks: the bit of each whose test holds, and, behind those, of each whose might."""

    def __init__(self, tests: Sequence[tuple[int, Holds]]) -> None:
        super().__init__()
        self._tests = tests

    def __missing__(self, value: str) -> int:
        bits = 0
        for bit, holds in self._tests:
            if not bits & bit and holds(value):
                bits |= bit
        return _keep(self, value, bits)


def _keep(memo: dict[str, int], value: str, answer: int) -> int:
    if len(value) <= MEMO_VALUE_CHARS:
        if len(memo) >= MEMO_ENTRIES:
            memo.clear()
        memo[value] = answer
    return answer


class Walk:
    """An XPath expression as one walk: called with an element it returns the list the XPath returns, in document order.

    Of an expression that asks for a first match (``[1]``) only the first node is returned.
    """

    def __init__(self, path: str) -> None:
        """Raises ValueError for an expression outside the subset."""
        self.path = path
        self.tags, self.tests, self._conditions, self.first = _Parser(path).parse()
        self._memos = {name: _Memo(name, self.tests) for test in self.tests for name in test.names}
        self._union = [test for test in self.tests if len(test.names) > 1]

    def __call__(self, root: HtmlElement) -> list[HtmlElement]:
        found = []
        memos, conditions = self._memos, self._conditions
        for element in root.iterdescendants(*self.tags):
            verdict = 0
            for name, value in element.items():
                if name in memos:
                    verdict |= memos[name][value]
            if not verdict or (verdict == 2 and not any(test(element) for test in self._union)):
                continue
            if conditions and not all(condition(element) for condition in conditions):
                continue
            found.append(element)
            if self.first:
                break
        return found

    def takes(self, element: HtmlElement, surely: bool) -> bool:
        """Whether one element is what the walk looks for; ``surely``: a test is known to hold."""
        if self.tags != ("*",) and element.tag not in self.tags:
            return False
        if not surely and not any(test(element) for test in self._union):
            return False
        return all(condition(element) for condition in self._conditions)


class Walks:
    """Several walks that prune one tree one after the other, in one pass over it.

    ``members`` stand in for the walks, in their order. The first one asked about a tree answers for all; a later one
    that is asked about the same tree next gives what was found for it then, once. What was deleted since is among it,
    and to delete a part of what is deleted changes nothing that stays. Asked about any other tree a member is the plain
    walk.
    """

    def __init__(self, walks: Sequence[Walk]) -> None:
        """Raises ValueError for a walk that asks for a first match, or whose answer another's deletions may change."""
        for place, walk in enumerate(walks):
            if walk.first or (place and ".//" in walk.path[walk.path.index("[") :]):
                raise ValueError(f"expected an expression that walks with others, got {walk.path!r}")
        self._walks = tuple(walks)
        self._named = {tag for walk in walks for tag in walk.tags} - {"*"}
        anywhere = ["*" in walk.tags for walk in walks]
        self._memos = self._memos_of([True] * len(walks))
        self._memos_elsewhere = self._memos_of(anywhere)
        self._tags = ("*",) if any(anywhere) else tuple(sorted(self._named))
        self._last = threading.local()
        self.members = tuple(Member(self, place, walk) for place, walk in enumerate(walks))

    def find(self, root: HtmlElement, place: int) -> list[HtmlElement]:
        """What the walk at ``place`` finds below ``root``."""
        last = self._last
        if place == 0:
            last.root, last.found = root, [*self.find_all(root)]
        elif getattr(last, "root", None) is not root or last.found[place] is None:
            return self._walks[place](root)
        found: list[HtmlElement] = last.found[place]
        last.found[place] = None
        return found

    def forget(self) -> None:
        """Let go of the last tree."""
        self._last.root = self._last.found = None

    def _memos_of(self, wanted: Sequence[bool]) -> dict[str, _Bits]:
        """Attribute → the bits of the wanted walks by its value."""
        tests: dict[str, list[tuple[int, Holds]]] = {}
        for place, walk in enumerate(self._walks):
            for test in walk.tests if wanted[place] else ():
                bit = 1 << place if len(test.names) == 1 else 1 << place + len(self._walks)
                for name in test.names:
                    tests.setdefault(name, []).append((bit, test.holds))
        return {name: _Bits(listed) for name, listed in tests.items()}

    def find_all(self, root: HtmlElement) -> list[list[HtmlElement]]:
        """What each walk finds below ``root``."""
        named, behind = self._named, len(self._walks)
        found: list[list[HtmlElement]] = [[] for _ in self._walks]
        for element in root.iterdescendants(*self._tags):
            memos = self._memos if element.tag in named else self._memos_elsewhere
            bits = 0
            for name, value in element.items():
                if name in memos:
                    bits |= memos[name][value]
            if bits:
                for place, walk in enumerate(self._walks):
                    surely = bits >> place & 1
                    if (surely or bits >> place + behind & 1) and walk.takes(element, bool(surely)):
                        found[place].append(element)
        return found


class Member:
    """One of several walks; in place of the walk alone."""

    first = False

    def __init__(self, walks: Walks, place: int, walk: Walk) -> None:
        self.path = walk.path
        self._walks, self._place = walks, place

    def __call__(self, root: HtmlElement) -> list[HtmlElement]:
        return self._walks.find(root, self._place)

    def with_others(self, root: HtmlElement) -> list[HtmlElement]:
        """Its answer from a pass of all."""
        return self._walks.find_all(root)[self._place]
