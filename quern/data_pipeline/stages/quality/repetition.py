"""Gopher's repetition rules (Rae et al. 2021, arXiv 2112.11446, table A1).

Paragraphs are parted by two or more newlines, lines by one or more. Two dialects:

``datatrove``
    A line or paragraph counts as a duplicate from its second occurrence on; every fraction of characters is of the
    whole text. The top n-gram is the most frequent (of several, the first in the text), its characters those of its
    words and the spaces between, times its occurrences, even if it occurs only once. Duplicate n-grams are found in one
    walk from the left: an n-gram whose letters, run together, were seen before counts and is stepped over whole, any
    other is remembered and the walk goes on by one word. The same decisions as datatrove 0.10.1's
    ``GopherRepetitionFilter``.
``paper``
    "Contained within": every occurrence of a line or paragraph that occurs more than once counts, and the fraction of
    characters is of those of all lines or paragraphs. The characters of the top n-gram and of the duplicate n-grams are
    those of all the words that such an n-gram covers, each once, over those of all words. An n-gram that occurs only
    once is no repetition; of several most frequent ones the longest counts. Blank lines and paragraphs are left out.

n-grams are compared by 64-bit hashes; a collision could only add to a page's own repetition.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from quern.config import Section
from quern.data_pipeline.dedup.rows import key_starts, repeats
from quern.data_pipeline.page.keys import contains
from quern.data_pipeline.stages.quality.gopher import Dialect, outside, words_of
from quern.data_pipeline.stages.quality.words import Reading

__all__ = ["MEASURES", "RepetitionConfig", "decide", "measure", "second_and_later"]

_TOP = (2, 3, 4)
_DUPLICATE = (5, 6, 7, 8, 9, 10)

MEASURES = (
    "repetition.empty",
    "repetition.dup_para_frac",
    "repetition.dup_para_char_frac",
    "repetition.dup_line_frac",
    "repetition.dup_line_char_frac",
    *(f"repetition.top_{n}gram_char_frac" for n in _TOP),
    *(f"repetition.dup_{n}gram_char_frac" for n in _DUPLICATE),
)

_BASE = 0x9E3779B97F4A7C15
_MIX = np.uint64(0xD6E8FEB86659FD93)
#: Characters summed at once, so that a huge text never becomes arrays of its length: their powers are kept.
_BLOCK = 1 << 16
#: Values sorted to find repeated ones; fewer are sifted by a table that takes 64 to 128 bytes a value.
_SORTED_FROM = 1 << 18
_FIRST_CHARS = 12

Hashes = NDArray[np.uint64]
Ints = NDArray[np.int64]


class RepetitionConfig(Section):
    """Thresholds of table A1: a greater measure fails. Null switches a rule off, 0 is a value."""

    dup_para_frac: float | None = Field(default=0.30, ge=0, le=1)
    """[share] Paragraphs that repeat an earlier one; a page with more fails, as for all keys here; null = no limit."""
    dup_para_char_frac: float | None = Field(default=0.20, ge=0, le=1)
    """[share] Characters in paragraphs that repeat an earlier one."""
    dup_line_frac: float | None = Field(default=0.30, ge=0, le=1)
    """[share] Lines that repeat an earlier one."""
    dup_line_char_frac: float | None = Field(default=0.20, ge=0, le=1)
    """[share] Characters in lines that repeat an earlier one."""
    top_2gram_char_frac: float | None = Field(default=0.20, ge=0, le=1)
    """[share] Characters in the most frequent 2-gram of words."""
    top_3gram_char_frac: float | None = Field(default=0.18, ge=0, le=1)
    """[share] Characters in the most frequent 3-gram of words."""
    top_4gram_char_frac: float | None = Field(default=0.16, ge=0, le=1)
    """[share] Characters in the most frequent 4-gram of words."""
    dup_5gram_char_frac: float | None = Field(default=0.15, ge=0, le=1)
    """[share] Characters in 5-grams of words that occur more than once."""
    dup_6gram_char_frac: float | None = Field(default=0.14, ge=0, le=1)
    """[share] Characters in 6-grams of words that occur more than once."""
    dup_7gram_char_frac: float | None = Field(default=0.13, ge=0, le=1)
    """[share] Characters in 7-grams of words that occur more than once."""
    dup_8gram_char_frac: float | None = Field(default=0.12, ge=0, le=1)
    """[share] Characters in 8-grams of words that occur more than once."""
    dup_9gram_char_frac: float | None = Field(default=0.11, ge=0, le=1)
    """[share] Characters in 9-grams of words that occur more than once."""
    dup_10gram_char_frac: float | None = Field(default=0.10, ge=0, le=1)
    """[share] Characters in 10-grams of words that occur more than once."""


def measure(reading: Reading, *, dialect: Dialect = "datatrove") -> dict[str, float | None]:
    """The family's measures of a text.

    ``repetition.empty`` is 1 for the empty text, whose other measures are None. The top n-gram of a text of fewer than
    n words is None, the share of duplicate n-grams there 0 (``paper``: None without any word).
    """
    text = reading.text
    if not text:
        return {name: 1.0 if name == "repetition.empty" else None for name in MEASURES}
    measures: dict[str, float | None] = {"repetition.empty": 0.0}
    stripped = text.strip()
    parts = {
        "para": re.split(r"\n{2,}", stripped) if "\n\n" in stripped else [stripped],
        "line": re.split(r"\n+", text) if "\n\n" in text else text.split("\n"),
    }
    for kind, segments in parts.items():
        if dialect == "paper":
            segments = [segment for segment in segments if segment.strip()]
            num_chars = sum(map(len, segments))
            number, repeated_chars = _within_repeated(segments)
        else:
            num_chars = len(text)
            number, repeated_chars = second_and_later(segments)
        measures[f"repetition.dup_{kind}_frac"] = number / len(segments) if segments else None
        measures[f"repetition.dup_{kind}_char_frac"] = repeated_chars / num_chars if num_chars else None
    grams = _Grams(words_of(reading, dialect))
    below = grams.num_chars if dialect == "paper" else len(text)
    for n in _TOP:
        top = grams.top_covered(n) if dialect == "paper" else grams.top_chars(n)
        measures[f"repetition.top_{n}gram_char_frac"] = top / below if top is not None and below else None
    for n in _DUPLICATE:
        chars = grams.duplicates_covered(n) if dialect == "paper" else grams.duplicates_walked(n)
        measures[f"repetition.dup_{n}gram_char_frac"] = chars / below if below else None
    return measures


def decide(measures: Mapping[str, float | None], config: RepetitionConfig) -> list[str]:
    """The failed rules in datatrove's order, from measures alone. A measure of None (or NaN) fails nothing."""
    limits = ((name, None, getattr(config, name.removeprefix("repetition."))) for name in MEASURES[1:])
    return outside(measures, [("repetition.empty", None, 0), *limits])


def second_and_later(segments: Sequence[str]) -> tuple[int, int]:
    """How many segments repeat an earlier one, and their characters."""
    seen: set[str] = set()
    number = chars = 0
    for segment in segments:
        if segment in seen:
            number += 1
            chars += len(segment)
        else:
            seen.add(segment)
    return number, chars


def _within_repeated(segments: Sequence[str]) -> tuple[int, int]:
    """How many segments occur more than once, every occurrence counted, and their characters."""
    repeated = [(segment, count) for segment, count in Counter(segments).items() if count > 1]
    return sum(count for _, count in repeated), sum(len(segment) * count for segment, count in repeated)


class _Grams:
    """The n-grams of one text, as 64-bit hashes; an n-gram is named by the place of its first word."""

    def __init__(self, words: Sequence[str]) -> None:
        self.num_words = len(words)
        self.lengths: NDArray[np.int32] = np.fromiter(map(len, words), np.int32, len(words))
        bounds = np.zeros(self.num_words + 1, np.int64)
        np.cumsum(self.lengths, out=bounds[1:])
        self.starts, self.ends = bounds[:-1], bounds[1:]
        self.num_chars = int(bounds[-1])
        # over the characters up to each word's start and to the end, and up to a few characters behind each start
        self._sums, behind = _sums_at("".join(words), bounds, self._firsts(_FIRST_CHARS))
        self._inverses = _inverse_powers(self.starts)
        self._words = _mix((self._sums[1:] - self._sums[:-1]) * self._inverses + self.lengths.astype(np.uint64))
        self._sequences: tuple[int, Ints, Hashes] = (1, np.arange(self.num_words), self._words)
        self._may_be_spelled_twice = self._begins_twice(behind)

    def _firsts(self, num_chars: int) -> Ints:
        """The places so many characters behind the starts of words, as far as the text goes."""
        return self.starts[: np.searchsorted(self.starts, self.num_chars - num_chars, "right")] + num_chars

    def repeated_sequences(self, n: int) -> tuple[Ints, Hashes]:
        """Places and hashes of the n-grams that, as sequences of words, occur more than once; n grows by call."""
        known, places, hashes = self._sequences
        while known < n:
            # What is not repeated at one length is not at the next.
            within = places + known < self.num_words
            places = places[within]
            hashes = _mix(hashes[within] * _MIX + self._words[places + known])
            repeated = _repeated(hashes)
            places, hashes = places[repeated], hashes[repeated]
            known += 1
        self._sequences = (known, places, hashes)
        return places, hashes

    def top_chars(self, n: int) -> int | None:
        """datatrove's characters of the first of the most frequent n-grams; None if there is no n-gram."""
        if self.num_words < n:
            return None
        places, hashes = self.repeated_sequences(n)
        first, most = 0, 1
        if len(places):
            ordered = np.sort(hashes)
            ends = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))
            counts = np.diff(ends, prepend=-1)
            most = int(counts.max())
            first = int(places[np.argmax(contains(ordered[ends[counts == most]], hashes))])
        return (int(self.ends[first + n - 1] - self.starts[first]) + n - 1) * most

    def top_covered(self, n: int) -> int | None:
        """The characters under the longest of the most frequent n-grams, 0 if none occurs twice."""
        if self.num_words < n:
            return None
        places, hashes = self.repeated_sequences(n)
        if not len(places):
            return 0
        _, inverse, numbers = np.unique(hashes, return_inverse=True, return_counts=True)
        counts = numbers[inverse]
        lengths = self.ends[places + n - 1] - self.starts[places]
        longest = int(np.argmax(np.where(counts == counts.max(), lengths, -1)))
        return self._covered(places[hashes == hashes[longest]], n)

    def _begins_twice(self, sums_behind: Hashes) -> Ints:
        """Places outside of which no n-gram of five words or more is spelled as another.

        Unlike sequences, n-grams that are spelled the same may be parted into words differently ("can not be" and
        "cannot be"), so one length does not narrow the next; their first characters do.
        """
        if self.num_words < 5:
            return np.zeros(0, np.int64)
        known = len(sums_behind)
        marked = np.zeros(self.num_words, np.bool_)
        marked[_repeated((sums_behind - self._sums[:known]) * self._inverses[:known])] = True
        marked[:-4] |= self.ends[4:] - self.starts[:-4] < _FIRST_CHARS
        return np.flatnonzero(marked)

    def duplicates_walked(self, n: int) -> int:
        """datatrove's characters of duplicate n-grams: a greedy walk from the left. n is 5 or more."""
        places = self._may_be_spelled_twice
        places = places[places <= self.num_words - n]
        hashes = (self._sums[places + n] - self._sums[places]) * self._inverses[places]
        repeated = _repeated(hashes)
        places = places[repeated]
        chars = self.ends[places + n - 1] - self.starts[places]
        seen: set[int] = set()
        total = free = 0
        for begin in range(0, len(places), _BLOCK):  # as Python's own integers they take five times the memory
            block = slice(begin, begin + _BLOCK)
            for place, key, length in zip(
                places[block].tolist(), hashes[repeated[block]].tolist(), chars[block].tolist(), strict=True
            ):
                if place < free:
                    continue
                if key in seen:
                    total += length
                    free = place + n
                else:
                    seen.add(key)
        return total

    def duplicates_covered(self, n: int) -> int:
        """The characters under any n-gram that occurs more than once, each counted once."""
        return self._covered(self.repeated_sequences(n)[0], n)

    def _covered(self, places: Ints, n: int) -> int:
        change = np.zeros(self.num_words + 1, np.int64)
        np.add.at(change, places, 1)
        np.add.at(change, places + n, -1)
        return int(self.lengths[np.cumsum(change[:-1]) > 0].sum())


def _mix(values: Hashes) -> Hashes:
    values = (values ^ (values >> np.uint64(32))) * _MIX
    return np.asarray(values ^ (values >> np.uint64(29)), np.uint64)


def _sums_at(text: str, *places: Ints) -> list[Hashes]:
    """Σ codeⱼ·baseʲ modulo 2⁶⁴ over the characters of ``text`` before each of some places, which ascend."""
    sums = [np.empty(len(some), np.uint64) for some in places]
    done = [0] * len(places)
    powers, _ = _powers(_BLOCK)
    before = np.uint64(0)
    for begin in range(0, max(len(text), 1), _BLOCK):
        codes = np.frombuffer(text[begin : begin + _BLOCK].encode("utf-32-le", "surrogatepass"), np.uint32)
        block = np.zeros(len(codes) + 1, np.uint64)
        np.cumsum((codes + np.uint64(1)) * _MIX * powers[: len(codes)], out=block[1:])
        if begin:
            block *= np.uint64(pow(_BASE, begin, 1 << 64))
            block += before
        end = begin + len(codes)
        for number, some in enumerate(places):
            upto = len(some) if end == len(text) else int(np.searchsorted(some, end))
            sums[number][done[number] : upto] = block[some[done[number] : upto] - begin]
            done[number] = upto
        before = block[-1]
    return sums


def _inverse_powers(places: Ints) -> Hashes:
    """base⁻ᵖ modulo 2⁶⁴ of each place p; places ascend."""
    _, inverses = _powers(_BLOCK)
    last = int(places[-1]) if len(places) else 0
    if last < _BLOCK:
        return inverses[places]
    of_blocks = np.full(last // _BLOCK + 1, pow(_BASE, -_BLOCK, 1 << 64), np.uint64)
    of_blocks[0] = 1
    powers = inverses[places % _BLOCK]
    powers *= np.multiply.accumulate(of_blocks)[places // _BLOCK]
    return powers


def _repeated(values: Hashes) -> Ints:
    """The places, ascending, of values that occur more than once."""
    if len(values) < _SORTED_FROM:
        # Values that share their leading bits with no other need no sorting: of eight times as many slots as values,
        # few hold two.
        bits = (8 * len(values)).bit_length()
        slots = (values >> np.uint64(64 - bits)).astype(np.int64)
        places = np.flatnonzero(np.bincount(slots)[slots] > 1)
        candidates = values[places]
        ordered = np.sort(candidates)
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        return places[contains(repeated, candidates)]
    order = np.argsort(values, kind="stable").astype(np.int32)
    places = order[repeats(key_starts(values[order]))].astype(np.int64)
    places.sort()
    return places


@cache
def _powers(count: int) -> tuple[Hashes, Hashes]:
    """Powers 0 … count − 1 of the base and of its inverse, modulo 2⁶⁴."""
    tables = []
    for base in (_BASE, pow(_BASE, -1, 1 << 64)):
        factors = np.full(count, base, np.uint64)
        factors[0] = 1
        tables.append(np.multiply.accumulate(factors))
    return tables[0], tables[1]
