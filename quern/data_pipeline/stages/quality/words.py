"""Splits text into words and sentences for all rule families.

A text is split at whitespace into chunks, and each chunk into words: for a language that writes spaces, the words that
spaCy's blank tokenizer of that language gives the chunk standing alone (datatrove's words for English); for one that
does not, its characters. A chunk's words depend on nothing but the chunk, so they are remembered from page to page.
(spaCy itself lets a chunk's neighbour decide in one case: where the marks on both sides of the gap look like an
emoticon, an abbreviation behind it may split. Among 1,971 pages no word differs for it.)
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from itertools import chain
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import regex

__all__ = ["PUNCTUATION", "TERMINAL_PUNCTUATION", "UNSPACED_LANGUAGES", "Reading", "Splitter", "splitter"]


def _characters(ranges: str) -> frozenset[str]:
    pairs = (part.split("-") for part in ranges.split())
    return frozenset(chr(code) for pair in pairs for code in range(int(pair[0], 16), int(pair[-1], 16) + 1))


#: What ends a sentence in any script: datatrove 0.10.1's ``TERMINAL_PUNCTUATION``, nearly Unicode's Sentence_Terminal.
TERMINAL_PUNCTUATION = _characters(
    "21 2e 3f 589 61d-61f 6d4 700-702 7f9 837 839 83d-83e 964-965 104a-104b 1362 1367-1368 166e 1735-1736 17d4-17d6 "
    "17d9-17da 1803 1809 1944-1945 1aa8-1aab 1b5a-1b5b 1b5e-1b5f 1b7d-1b7e 1c3b-1c3c 1c7e-1c7f 203c-203d 2047-2049 "
    "2e2e 2e3c 2e53-2e54 3002 a4ff a60e-a60f a6f3 a6f7 a876-a877 a8ce-a8cf a92f a9c8-a9c9 aa5d-aa5f aaf0-aaf1 abeb "
    "fe52 fe56-fe57 ff01 ff0e ff1f ff61 10a56-10a57 10f55-10f59 10f86-10f89 11047-11048 110be-110c1 11141-11143 "
    "111c5-111c6 111cd 111de-111df 11238-11239 1123b-1123c 112a9 1144b-1144c 115c2-115c3 115c9-115d7 11641-11642 "
    "1173c-1173e 11944 11946 11a42-11a43 11a9b-11a9c 11c41-11c42 11ef7-11ef8 11f43-11f44 16a6e-16a6f 16af5 16b37-16b38 "
    "16b44 16e98 1bc9f 1da88"
)

#: A word made of these alone is a symbol: datatrove 0.10.1's ``PUNCTUATION_SET`` (CCNet's list, the C0 and C1 controls
#: without tab and newline, and the terminal marks).
PUNCTUATION = TERMINAL_PUNCTUATION | _characters(
    "0-8 b-1f 22-2d 2f 3a-3e 40 5b-60 7b-9f ab b4 bb 2013-2014 2019 201c-201e 2026 2236 2501 25ba 3001 3008-300d "
    "3010-3011 ff05 ff08-ff09 ff0c ff11 ff1a-ff1b ff5e"
)

#: Languages (ISO 639) whose writing puts no spaces between words; a word here is a character with its marks (in
#: Tibetan script, a syllable).
UNSPACED_LANGUAGES = frozenset({"bo", "dz", "ja", "km", "lo", "my", "th", "wuu", "yue", "zh"})

#: spaCy's tokenizers of these want packages of their own; their words are those of the language-neutral ``xx``.
_NEEDS_MORE_THAN_SPACY = frozenset({"ko", "vi"})
_SPACY_NAMES = {"no": "nb", "sh": "hr"}

_UNSPACED_SCRIPTS = r"[[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]&&\p{L}]"
_UNSPACED_WORD = regex.compile(
    rf"{_UNSPACED_SCRIPTS}[\p{{M}}ー]*+"
    rf"|[[\p{{L}}\p{{N}}]--{_UNSPACED_SCRIPTS}][[\p{{L}}\p{{N}}\p{{M}}]--{_UNSPACED_SCRIPTS}]*+"
    r"|[^\s\p{L}\p{N}\u0f0b]",
    regex.V1,
)
_PLAIN_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*|[^\w\s]+|_+")
_SIMPLE_ENGLISH = re.compile(
    r"""(["“(]?)([A-Z]?[a-z]{2,}(?:[-—][A-Z]?[a-z]{2,})*)([,.;:!?)"”]|[.,]["”]|["”)][.,]|['’]s|)""", re.ASCII
)
_HYPHEN = re.compile("([-—])")
_POSSESSIVE = ("'s", "’s")
_ONE_SPACE_AT_END = re.compile(r"(?<=\S) (?=\n|\Z)")
_SPACE_OR_CHUNK = re.compile(r"\s+|\S+")
_PUNCTUATION_ONLY = regex.compile(r"\p{P}*+")
# The word behind is taken, not looked for: a run of end marks at the end of a line would be tried from each of them.
_END_AND_WORD = re.compile(r"E[Ep]*+(w?)")

# spaCy strips a chunk's affixes one by one and searches what is left each time: quadratic in their number, and its
# test for a URL is quadratic in the marks a URL is made of. A page that wants more work than this (some 3 s) has its
# words split by _PLAIN_WORD instead. The neediest of 1,971 web pages wants a twentieth of it, a book of a million
# characters a quarter.
_MAX_WORK = 20_000_000
_AFFIXES_AT_END = re.compile(r"(?:[^\W_]{0,5}+[\W_])*+")
_AFFIXES_AT_START = re.compile(r"[\W_]*+")

_SURROGATE = re.compile("[\ud800-\udfff]")

_MAX_MEMO = 150_000
_MAX_MEMO_CHUNK = 64

Tokens = tuple[str, ...]
Value = TypeVar("Value")


def _work(chunk: str) -> int:
    """An upper estimate of what spaCy spends on a chunk, in units of about 0.15 µs."""
    affixes = _AFFIXES_AT_START.match(chunk).end() + _AFFIXES_AT_END.match(chunk[::-1]).end()  # type: ignore[union-attr]
    url_marks = chunk.count(".") + chunk.count("/") + chunk.count(":") + chunk.count("@")
    return 100 + len(chunk) * (8 + affixes + url_marks)


def _within_budget(chunks: list[str], num_chars: int) -> bool:
    longest = max(map(len, chunks), default=0)
    if num_chars * (108 + 3 * min(longest, 64)) > _MAX_WORK:
        return sum(map(_work, set(chunks))) <= _MAX_WORK
    if longest <= 64:
        return True
    short = num_chars * (108 + 3 * 64)
    return short + sum(map(_work, {chunk for chunk in chunks if len(chunk) > 64})) <= _MAX_WORK


class _Memo(Generic[Value]):
    """A function of a chunk and its late answers: two generations, the older forgotten when the newer is full."""

    def __init__(self, answer: Callable[[list[str]], Iterable[Value]]) -> None:
        self._answer = answer
        self._newer: dict[str, Value] = {}
        self._older: dict[str, Value] = {}

    def __call__(self, chunks: list[str]) -> list[Value]:
        newer, older = self._newer, self._older
        found = list(map(newer.get, chunks))
        if None in found:
            missing = set(chunks).difference(newer)
            known = missing & older.keys()
            newer.update((chunk, older[chunk]) for chunk in known)
            unknown = list(missing - known)
            newer.update(zip(unknown, self._answer(unknown), strict=True))
            found = list(map(newer.get, chunks))
            for chunk in unknown:
                if len(chunk) > _MAX_MEMO_CHUNK:
                    del newer[chunk]
        if len(newer) > _MAX_MEMO:
            # chunks of one huge text are not cached: other texts do not share them
            self._newer, self._older = {}, newer if len(newer) <= 2 * _MAX_MEMO else {}
        return found  # type: ignore[return-value]


class Splitter:
    """Splits one language's chunks into words. Stateless but for what it remembers, which changes no answer.

    ``split_chunks`` gives the words of each of a batch of chunks.
    """

    def __init__(self, split_chunks: Callable[[list[str]], Iterable[Tokens]]) -> None:
        _import_spacy()
        from spacy.pipeline.sentencizer import Sentencizer

        self.tokens = _Memo(split_chunks)
        self.kinds = _Memo(self._kinds_of)
        self._ends = frozenset(Sentencizer.default_punct_chars)

    def _kinds_of(self, parts: list[str]) -> Iterable[str]:
        """A letter a word: E ends a sentence, p is other punctuation, w is none. An empty part is whitespace."""
        chunks = [part for part in parts if part and part != "\n"]
        kinds = {"": "w", "\n": "\n"}
        for chunk, tokens in zip(chunks, self.tokens(chunks), strict=True):
            kinds[chunk] = "".join(map(self._kind, tokens))
        return (kinds[part] for part in parts)

    def _kind(self, token: str) -> str:
        if token.isalnum():
            return "w"
        if token in self._ends:
            return "E"
        return "p" if _PUNCTUATION_ONLY.fullmatch(token) else "w"


class Reading:
    """A text in one language (ISO 639), and its words and sentences, found once."""

    def __init__(self, text: str, language: str) -> None:
        self.text = text
        self.language = language
        self.spaced = language not in UNSPACED_LANGUAGES

    @cached_property
    def chunks(self) -> list[str]:
        """The pieces between whitespace."""
        return self.text.split()

    @cached_property
    def words(self) -> list[str]:
        """The words, punctuation among them, in order."""
        return list(chain.from_iterable(self._splitter.tokens(self.chunks)))

    @cached_property
    def num_words(self) -> int:
        """``len(words)``, without a list of them."""
        return sum(map(len, self._splitter.tokens(self.chunks)))

    @cached_property
    def num_sentences(self) -> int:
        """The sentences of the lines, which newlines part, added up.

        The rule is that of spaCy's sentencizer over the words of each line: a sentence ends at a word that is one of
        its end marks and takes the punctuation that follows; a run of whitespace other than one space counts as a word.
        An empty line is one sentence, as it is for datatrove.
        """
        kinds = "".join(self._splitter.kinds(self._parts()))
        return self.text.count("\n") + 1 + _END_AND_WORD.findall(kinds).count("w")

    @cached_property
    def _splitter(self) -> Splitter:
        chosen = splitter(self.language)
        return chosen if not self.spaced or _within_budget(self.chunks, len(self.text)) else _by_pattern(_PLAIN_WORD)

    def _parts(self) -> list[str]:
        """Chunks, newlines, and empty strings for each whitespace that spaCy makes a token of."""
        text = self.text
        if " \n" in text or text.endswith(" "):
            # spaCy hangs the first space of a run on the word before it: at the end of a line, one space is no token.
            text = _ONE_SPACE_AT_END.sub("", text)
        parts = text.replace("\n", " \n ").split(" ")
        known = {"", "\n", *self.chunks}
        if known.issuperset(parts):
            return parts
        pieces: list[str] = []
        for part in parts:
            if part in known:
                pieces.append(part)
            else:
                pieces.extend("" if match[0].isspace() else match[0] for match in _SPACE_OR_CHUNK.finditer(part))
        return pieces


@cache
def splitter(language: str) -> Splitter:
    """The splitter of a language (ISO 639); one that spaCy has no rules for gets the language-neutral ``xx``.

    One object a language and process: the number of languages bounds them.
    """
    if language in UNSPACED_LANGUAGES:
        return _by_pattern(_UNSPACED_WORD)
    return _spaced(_spacy_name(language))


@cache
def _by_pattern(word: Any) -> Splitter:
    return Splitter(lambda chunks: (tuple(word.findall(chunk)) for chunk in chunks))


def _import_spacy() -> Any:
    """spaCy without what it imports and is never used here.

    That is the torch that its thinc imports where it can (1.3 s and 220 MB a process), and the command line (a third of
    the rest: HTTP and template libraries).
    """
    absent: dict[str, Any] = {"torch": None}  # an import of it fails, as where it is not installed
    command_line = ("spacy.cli", "spacy.cli.info")
    if "spacy" not in sys.modules:
        absent |= {name: ModuleType(name) for name in command_line}
        for module in (absent[name] for name in command_line):
            module.info = None  # the one name that spaCy itself takes from it
    absent = {name: module for name, module in absent.items() if name not in sys.modules}
    sys.modules.update(absent)
    try:
        spacy = importlib.import_module("spacy")
    finally:
        for name, module in absent.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
    if absent.keys() & set(command_line):
        vars(spacy).pop("cli", None)  # whoever wants it imports the real one
    return spacy


def _spacy_name(language: str) -> str:
    _import_spacy()  # find_spec imports the parent package
    name = _SPACY_NAMES.get(language, language)
    if name in _NEEDS_MORE_THAN_SPACY or not re.fullmatch("[a-z]{2,3}", name):
        return "xx"
    return name if importlib.util.find_spec(f"spacy.lang.{name}") is not None else "xx"


@cache
def _spaced(name: str) -> Splitter:
    tokenizer = _tokenizer(name)
    return Splitter(lambda chunks: _spacy_words(tokenizer, chunks, english=name == "en"))


def _tokenizer(name: str) -> Any:
    """The tokenizer of ``spacy.blank(name)``, without the pipeline around it."""
    _import_spacy()
    from spacy.language import create_tokenizer
    from spacy.util import get_lang_class
    from spacy.vocab import Vocab

    # Of a word new to it a vocabulary may compute some twenty attributes; the split looks at none of them.
    return create_tokenizer()(SimpleNamespace(vocab=Vocab(), Defaults=get_lang_class(name).Defaults))  # type: ignore[arg-type]


def _spacy_words(tokenizer: Any, chunks: list[str], *, english: bool) -> list[Tokens]:
    rules = tokenizer.rules
    words = [_without_spacy(chunk, rules, english) for chunk in chunks]
    hard = [place for place, tokens in enumerate(words) if tokens is None]
    if hard:
        # A newline is a token of its own and in no special case, so that no chunk's words depend on its neighbour.
        with tokenizer.vocab.memory_zone():
            tokens = [token.text for token in tokenizer("\n".join(chunks[place] for place in hard))]
        start = 0
        for place in hard[:-1]:
            end = tokens.index("\n", start)
            words[place] = tuple(tokens[start:end])
            start = end + 1
        words[hard[-1]] = tuple(tokens[start:])
    return words  # type: ignore[return-value]


def _without_spacy(chunk: str, rules: Any, english: bool) -> Tokens | None:
    if _SURROGATE.search(chunk):
        # spaCy hashes UTF-8, which has no lone surrogates.
        return tuple(_PLAIN_WORD.findall(chunk))
    return _simple_english(chunk, rules) if english else None


def _simple_english(chunk: str, rules: Any) -> Tokens | None:
    """What spaCy's English rules give the commonest shapes of chunk; None for a shape that takes spaCy to know."""
    if chunk in rules:
        return None
    if chunk.isascii() and chunk.isalnum() and (chunk.isalpha() or chunk.isdigit()):
        return (chunk,)
    match = _SIMPLE_ENGLISH.fullmatch(chunk)
    if match is None:
        return None
    before, core, behind = match.groups()
    parts = _HYPHEN.split(core)
    last = parts[-1]
    if any(part in rules for part in parts) or (behind and (last + behind in rules or last + behind[0] in rules)):
        return None
    marks = (behind,) if behind in _POSSESSIVE else tuple(behind)
    return (*before, *parts, *marks)
