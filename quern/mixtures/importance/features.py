"""Hashed unigrams and bigrams of a text (Xie et al. 2023, 2302.03169, section 4).

Words are runs of word characters and runs of what is neither a word character nor white space, in the lower-case text:
``word_punct`` tokenisation. The bucket of an n-gram, whose words are joined by a space, is its SHA-256 as a big-endian
number modulo the number of buckets.

Words are numbered as they come, and a pair is one number of two. Its bucket is remembered in a table in which it has
one place: a pair that another one has displaced is hashed again. So memory is bounded and most pairs cost no hash.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from quern.data_pipeline.page.memo import Memo

__all__ = ["I64", "Features"]

I64 = NDArray[np.int64]

_WORD = re.compile(r"\w+|[^\w\s]+")
#: Characters of a text whose words are held all at once, and words that are looked up at once.
_WHOLE_CHARS, _PIECE_WORDS = 1 << 20, 1 << 17
#: Words that are remembered, their characters, and binary logarithm of the number of pairs (16 bytes each).
_WORDS, _CHARS, _PAIR_BITS = 1 << 19, 1 << 25, 22
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Features:
    """The features of texts in ``num_buckets`` buckets. Memory: about 200 MB, and some times the longest text."""

    def __init__(self, num_buckets: int) -> None:
        self.num_buckets = num_buckets
        self._pairs: I64 = np.empty(1 << _PAIR_BITS, np.int64)
        self._pair_buckets: I64 = np.zeros(1 << _PAIR_BITS, np.int64)
        self._forget()

    def _forget(self) -> None:
        self._pairs.fill(-1)
        self._words: list[bytes] = []
        self._buckets, self._chars = array("q"), 0
        self._ids: Memo[str, int] = Memo(self._add, sys.maxsize)  # forgets by itself, see _WORDS

    def _add(self, word: str) -> int:
        """The number of a new word."""
        self._words.append(encoded := word.encode("utf-8", "surrogatepass"))
        self._buckets.append(int.from_bytes(sha256(encoded).digest(), "big") % self.num_buckets)
        self._chars += len(word)
        return len(self._words) - 1

    def of(self, texts: Iterable[str]) -> Iterator[tuple[I64, I64, bool]]:
        """Piece by piece int64[m], buckets of words, and then those of the pairs among them; int64[m], the number of
        the text that each is of, from 0, ascending; and whether they are of words. Which pieces a text has depends on
        that text alone."""
        held: list[str] = []
        texts_of: list[int] = []
        carried = 0  # the last word of a piece begins the next one: its pair with the first may be of one text
        for number, text in enumerate(texts):
            for words in _words_of(text):
                held += words
                texts_of += [number] * len(words)
                if len(held) >= _PIECE_WORDS:
                    yield from self._piece(held, np.array(texts_of), carried)
                    held, texts_of, carried = held[-1:], texts_of[-1:], 1
        if len(held) > carried:
            yield from self._piece(held, np.array(texts_of), carried)

    def _piece(self, words: list[str], texts: I64, carried: int) -> Iterator[tuple[I64, I64, bool]]:
        if len(self._words) > _WORDS or self._chars > _CHARS:
            self._forget()
        ids = np.fromiter(map(self._ids.__getitem__, words), np.int64, len(words))
        yield np.frombuffer(self._buckets, np.int64)[ids[carried:]], texts[carried:], True
        in_one = texts[1:] == texts[:-1]
        yield self._buckets_of((ids[:-1] << 32 | ids[1:])[in_one]), texts[1:][in_one], False

    def _buckets_of(self, pairs: I64) -> I64:
        places = (pairs.view(np.uint64) * _GOLDEN) >> np.uint64(64 - _PAIR_BITS)
        missing = self._pairs[places] != pairs
        found = self._pair_buckets[places]
        new, first, which = np.unique(pairs[missing], return_index=True, return_inverse=True)
        words, halves = self._words, zip((new >> 32).tolist(), (new & 0xFFFFFFFF).tolist(), strict=True)
        digests = (sha256(b"%b %b" % (words[one], words[two])).digest() for one, two in halves)
        buckets = np.array([int.from_bytes(own, "big") % self.num_buckets for own in digests], np.int64)
        found[missing] = buckets[which]
        there = places[missing][first]
        self._pairs[there], self._pair_buckets[there] = new, buckets
        return found

    def count(self, texts: Iterable[str]) -> I64:
        """int64[num_buckets]: how often each feature occurs in all texts."""
        counts = np.zeros(self.num_buckets, np.int64)
        for buckets, _, _ in self.of(texts):
            counts += np.bincount(buckets, minlength=self.num_buckets)
        return counts

    def log_weights(self, texts: Sequence[str], log_ratio: NDArray[np.float64]) -> tuple[NDArray[np.float64], I64]:
        """float64[n]: the log importance weight of each text, the sum of ``log_ratio`` (float64[num_buckets]) over its
        features; int64[n]: its words. What a text is given depends on no other one."""
        weights, words = np.zeros(len(texts)), np.zeros(len(texts), np.int64)
        for buckets, texts_of, of_words in self.of(texts):
            first = np.flatnonzero(np.diff(texts_of, prepend=-1))
            if len(first):
                weights[texts_of[first]] += np.add.reduceat(log_ratio[buckets], first)
            if of_words:
                words += np.bincount(texts_of, minlength=len(texts))
        return weights, words


def _words_of(text: str) -> Iterator[list[str]]:
    """Its words; of a long text so many at a time."""
    lower = text.lower()
    if len(lower) <= _WHOLE_CHARS:
        yield _WORD.findall(lower)
        return
    words = (found.group() for found in _WORD.finditer(lower))
    while piece := list(islice(words, _PIECE_WORDS)):
        yield piece
