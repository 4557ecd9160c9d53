"""Turns text into shingles: normalised words, and the 64-bit hashes of their n-grams.

A text is lower-cased; a number (digits, also with ``.`` or ``,`` between them) becomes ``0``; every character is
decomposed (NFD) and loses its nonspacing marks (Mn); letters, numbers and other marks make words, everything else
separates them. In scripts that are written without spaces every character is a word.

A shingle is ``ngram`` consecutive words. Written down it is their UTF-8 bytes with one space between; its 64-bit hash
is computed from the words' hashes, so that no such string is ever built:
``fmix64(Σ xxh3_64(word_i) · M^(n−1−i) mod 2^64)`` with ``M = 0x9E3779B97F4A7C15`` and MurmurHash3's ``fmix64``.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
import xxhash

from quern.data_pipeline.page.memo import Memo

__all__ = ["hash_words", "normalise", "shingle_hashes"]

_MULTIPLIER = 0x9E3779B97F4A7C15
_FMIX = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_SPACE = re.compile(r"\s")

#: Blocks whose text has no spaces between words: line break classes SA, ID and CJ of Unicode Standard Annex #14.
#: (first, last) code points, ascending.
_SPACELESS = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x1950, 0x19DF),  # Tai Le, New Tai Lue
    (0x1A20, 0x1AAF),  # Tai Tham
    (0x3005, 0x3007),  # iteration mark, closing mark, ideographic zero
    (0x3041, 0x312F),  # Hiragana, Katakana, Bopomofo
    (0x31A0, 0x31FF),  # Bopomofo and Katakana extensions
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),
    (0xA000, 0xA4CF),  # Yi
    (0xA9E0, 0xA9FF),  # Myanmar
    (0xAA60, 0xAADF),  # Myanmar, Tai Viet
    (0xF900, 0xFAFF),  # Han
    (0xFF66, 0xFF9F),  # half-width Katakana
    (0x1B000, 0x1B16F),  # Kana supplements
    (0x20000, 0x3FFFF),  # Han
)
_SPACELESS_FIRST = [first for first, _ in _SPACELESS]

_MAX_CACHED_LENGTH = 40
#: Characters looked at at once, so that a huge text never becomes one list of words.
_BLOCK = 1 << 20


def _separated(code: int) -> str:
    """What a code point becomes, of itself: NFD of a whole hostile text sorts its runs of marks, in quadratic time."""
    out = []
    for character in unicodedata.normalize("NFD", chr(code)):
        category = unicodedata.category(character)
        if category == "Mn":
            continue
        if category[0] not in "LNM":
            out.append(" ")
        elif _is_spaceless(ord(character)):
            out.append(f" {character} ")
        else:
            out.append(character)
    return "".join(out)


def _hash(word: str) -> bytes:
    """8 bytes, little-endian, of a normalised word."""
    return xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass")).to_bytes(8, "little")


def _hashes(chunk: str) -> bytes:
    """Those of the words in a chunk between two spaces. Nothing in the normalisation looks across white space, so a
    chunk can be done once for all texts it occurs in."""
    return b"".join(map(_WORDS.__getitem__, normalise(chunk)))


_CHARACTERS: Memo[int, str] = Memo(_separated, 1 << 16)
"""The table of ``str.translate``."""
_WORDS: Memo[str, bytes] = Memo(_hash, 1 << 17, _MAX_CACHED_LENGTH)
_CHUNKS: Memo[str, bytes] = Memo(_hashes, 1 << 18, _MAX_CACHED_LENGTH)


def _is_spaceless(code: int) -> bool:
    index = bisect_right(_SPACELESS_FIRST, code) - 1
    return index >= 0 and code <= _SPACELESS[index][1]


def normalise(text: str) -> list[str]:
    """The normalised words of a text (see the head of this module), in linear time."""
    return _NUMBER.sub("0", text.lower()).translate(_CHARACTERS).split()


def hash_words(text: str, *, block: int = _BLOCK) -> np.ndarray:
    """uint64[words]: ``xxh3_64`` of every normalised word of ``text``, in order.

    The text is taken in blocks that end at white space; a run of ``block`` characters without any is cut.
    """
    return np.frombuffer(b"".join(_hash_blocks(text, block)), dtype="<u8")


def _hash_blocks(text: str, block: int) -> Iterator[bytes]:
    start = 0
    while start < len(text):
        end = start + block
        if end < len(text):
            space = _SPACE.search(text, end, end + block)
            end = space.start() if space else end + block
        yield b"".join(map(_CHUNKS.__getitem__, text[start:end].split()))
        start = end


def shingle_hashes(words: np.ndarray, ngram: int) -> np.ndarray:
    """Sorted unique uint64 hashes of all ``ngram``-word shingles of ``words`` (uint64); empty for a shorter text."""
    count = len(words) - ngram + 1
    if count < 1:
        return np.empty(0, dtype=np.uint64)
    mixed = words[:count].astype(np.uint64)
    for offset in range(1, ngram):
        mixed *= np.uint64(_MULTIPLIER)
        mixed += words[offset : offset + count]
    mixed = _fmix64(mixed)
    mixed.sort()  # by hand: np.unique hashes first, and takes five times as long
    first = np.empty(count, dtype=bool)
    first[0] = True
    np.not_equal(mixed[1:], mixed[:-1], out=first[1:])
    return mixed[first]


def _fmix64(values: np.ndarray) -> np.ndarray:
    values ^= values >> np.uint64(33)
    values *= np.uint64(_FMIX[0])
    values ^= values >> np.uint64(33)
    values *= np.uint64(_FMIX[1])
    values ^= values >> np.uint64(33)
    return values
