"""Converts millions of token ids to words at once, without decoding them one by one.

What a token of whole characters makes of a text is known beforehand: parts of words (*pieces*), and whether it
separates them from what stands before and behind. Other tokens hold parts of characters; the bytes of each run of them
are decoded together, and each character is looked up like a token. Both are rows of one table. (A token of whole
characters begins with no continuation byte, so nothing beside it changes how it or they decode.)

A word's hash is the polynomial Σ (byte + 1) · B^(bytes behind) mod 2^64 over its UTF-8 bytes, so the hash of a word
that several tokens make follows from its pieces'. It only proposes: :meth:`Pieces.spelled` compares the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quern.lineage.match.normalise import emitted, split_emitted
from quern.tokenize.encoding import Encoding

__all__ = ["Pieces", "Spellings", "Words", "flat_index", "powers", "token_bytes"]

_BASE = 0x9E3779B97F4A7C15
_HALF = 1 << 16

#: What a row is. HARD: a token of other than whole characters, or of nothing that counts, which is decoded first.
#: SKIPPED: a character that is left out. A row that is none of these separates words.
_TEXT, _LEADS, _TRAILS, _HARD, _MANY, _SKIPPED = (1 << bit for bit in range(6))
_BETWEEN = b"\n"
_MAX_CODE = 0x110000


def powers(base: int, count: int) -> np.ndarray:
    """uint64[count]: base^0 … base^(count − 1) mod 2^64."""
    table = np.full(count, base, np.uint64)
    table[:1] = 1
    np.multiply.accumulate(table, out=table)
    return table


class _Power:
    """base^e mod 2^64 for arrays of exponents below 2^32, from two small tables."""

    def __init__(self, base: int) -> None:
        self._low = powers(base, _HALF)
        self._high = powers(pow(base, _HALF, 1 << 64), _HALF)

    def __call__(self, exponents: np.ndarray) -> np.ndarray:
        return self._low[exponents & (_HALF - 1)] * self._high[exponents >> 16]


_POWER, _INVERSE_POWER = _Power(_BASE), _Power(pow(_BASE, -1, 1 << 64))


def flat_index(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64[sum of lengths]: the numbers [start, start + length) of each pair, one after the other."""
    if len(lengths) and int(lengths.min()) == 0:
        starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    ends = np.cumsum(lengths, dtype=np.int64)
    if len(ends) == 0:
        return ends
    steps = np.ones(int(ends[-1]), np.int64)
    steps[0] = starts[0]
    steps[ends[:-1]] = starts[1:] - starts[:-1] - lengths[:-1] + 1
    return np.cumsum(steps, out=steps)


def _groups(lengths: np.ndarray) -> np.ndarray:
    """int64[sum of lengths]: which group each is of; no length is 0. (``np.repeat`` takes ten times as long.)"""
    ends = np.cumsum(lengths, dtype=np.int64)
    steps = np.zeros(int(ends[-1]) if len(ends) else 0, np.int64)
    steps[ends[:-1]] = 1
    return np.cumsum(steps, out=steps)


def _sums(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    return np.add.reduceat(values, starts) if len(starts) else values[:0]


@dataclass(frozen=True)
class Spellings:
    """Byte strings as one array: ``flat`` uint8, ``starts`` int64[n], ``lengths`` int64[n]."""

    flat: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, strings: Sequence[bytes]) -> Spellings:
        """Of ``strings``, in their order."""
        lengths = np.fromiter(map(len, strings), np.int64, len(strings))
        return cls(np.frombuffer(b"".join(strings), np.uint8), np.cumsum(lengths) - lengths, lengths)

    def __add__(self, other: Spellings) -> Spellings:
        return Spellings(
            np.concatenate([self.flat, other.flat]),
            np.concatenate([self.starts, other.starts + len(self.flat)]),
            np.concatenate([self.lengths, other.lengths]),
        )

    def hashes(self) -> np.ndarray:
        """uint64[n]: the polynomial hash of each; none may be empty."""
        ends = np.arange(1, len(self.flat) + 1, dtype=np.int64)
        terms = (self.flat.astype(np.uint64) + np.uint64(1)) * _INVERSE_POWER(ends)
        return _sums(terms, self.starts) * _POWER(self.starts + self.lengths)


def token_bytes(encoding: Encoding) -> list[bytes]:
    """The bytes of each id from 0 to ``vocab_size - 1``; empty for control tokens and ids that no token has."""
    core = encoding.core
    controls = {encoding.eot_id, *(core.encode_single_token(text) for text in core.special_tokens_set)}
    return [b"" if number in controls else own or b"" for number, own in enumerate(encoding.token_bytes())]


def _token_row(token: bytes) -> tuple[str, int]:
    """Emitted text, and whether the token is hard."""
    if not token:
        return " ", 0
    try:
        text = "".join(map(emitted, map(ord, token.decode())))
    except UnicodeDecodeError:
        return "", _HARD
    return text, 0 if text else _HARD


@dataclass(frozen=True)
class Words:
    """The words of a range of tokens, in order.

    ``hashes`` uint64[w]; ``firsts`` int64[w + 1]: where the pieces of each word begin in ``pieces`` (int64[p], rows of
    the piece table); ``starts`` and ``stops`` int64[w]: the fewest tokens that hold it, counted from the range's start.
    """

    hashes: np.ndarray
    firsts: np.ndarray
    pieces: np.ndarray
    starts: np.ndarray
    stops: np.ndarray

    def __len__(self) -> int:
        return len(self.hashes)

    def between(self, first: int, last: int) -> Words:
        """Words [first, last)."""
        own = slice(first, last)
        return Words(self.hashes[own], self.firsts[first : last + 1], self.pieces, self.starts[own], self.stops[own])


class Pieces:
    """The table of one encoding: its tokens, and the characters seen in texts so far."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        """``tokens``: the bytes of each id; an empty one separates words."""
        self._bytes = Spellings.of(tokens)
        self._num_tokens = len(tokens)
        self._row_of = np.full(_MAX_CODE, -1, np.int32)
        self._flags = np.empty(0, np.uint8)
        self._first = np.empty(0, np.int64)
        self._count = np.empty(0, np.int64)
        self._spelled = Spellings.of([])
        self._hashes = np.empty(0, np.uint64)
        self._add(list(map(_token_row, tokens)))

    def _add(self, rows: Sequence[tuple[str, int]]) -> None:
        """Rows of (emitted text, :data:`_HARD` or 0)."""
        flags, counts, spellings = [], [], []
        for text, flag in rows:
            leads, pieces, trails = split_emitted(text)
            if pieces:
                flag |= _TEXT | leads * _LEADS | trails * _TRAILS | (len(pieces) > 1) * _MANY
            elif not text and not flag:
                flag = _SKIPPED
            flags.append(flag)
            counts.append(len(pieces))
            spellings += [piece.encode() for piece in pieces]
        new = Spellings.of(spellings)
        count = np.array(counts, np.int64)
        self._flags = np.concatenate([self._flags, np.array(flags, np.uint8)])
        self._first = np.concatenate([self._first, len(self._hashes) + np.cumsum(count) - count])
        self._count = np.concatenate([self._count, count])
        self._spelled += new
        self._hashes = np.concatenate([self._hashes, new.hashes()])

    def read(self, ids: np.ndarray) -> Words:
        """The words of token ids.

        Raises:
            ValueError: an id the encoding does not have.
        """
        rows = ids.astype(np.intp)
        if len(rows) and int(rows.max()) >= self._num_tokens:
            raise ValueError(f"token {int(rows.max())} is outside the encoding's {self._num_tokens} ids")
        flags = self._flags[rows]
        hard = np.flatnonzero(flags & _HARD != 0)
        begins: np.ndarray | None = None
        ends: np.ndarray | None = None
        if len(hard):
            rows, begins, ends = self._with_characters(rows, hard)
            flags = self._flags[rows]
        units = np.flatnonzero(flags & _TEXT != 0)
        shown = flags[units]
        glued = np.zeros(len(units), bool)  # to the piece before
        glued[1:] = (units[1:] - units[:-1] == 1) & ((shown[1:] & _LEADS) | (shown[:-1] & _TRAILS) == 0)
        pieces = self._first[rows[units]]
        if (shown & _MANY).any():
            counts = self._count[rows[units]]
            pieces = flat_index(pieces, counts)
            spread = np.zeros(len(pieces), bool)
            spread[np.cumsum(counts) - counts] = glued
            glued, units = spread, units[_groups(counts)]
        starts = np.flatnonzero(~glued)
        firsts = np.append(starts, len(pieces))
        last = firsts[1:] - 1
        begin, end = units[starts], units[last]
        if begins is not None and ends is not None:
            begin, end = begins[begin], ends[end]
        return Words(self._word_hashes(pieces, firsts, glued), firsts, pieces, begin, end + 1)

    def _word_hashes(self, pieces: np.ndarray, firsts: np.ndarray, glued: np.ndarray) -> np.ndarray:
        hashes = self._hashes[pieces]
        found = hashes[firsts[:-1]]
        several = np.flatnonzero(firsts[1:] - firsts[:-1] > 1)
        if len(several):
            glued[firsts[several]] = True
            members = np.flatnonzero(glued)
            counts = firsts[several + 1] - firsts[several]
            heads = np.cumsum(counts) - counts
            ends = np.cumsum(self._spelled.lengths[pieces[members]])
            terms = hashes[members] * _INVERSE_POWER(ends)
            found[several] = _sums(terms, heads) * _POWER(ends[heads + counts - 1])
        return found

    def _with_characters(self, ids: np.ndarray, hard: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows with each run of ``hard`` tokens replaced by its characters' rows, and each row's first and last
        token. A byte that is part of no character separates words.
        """
        last_of_run = np.append(np.diff(hard) != 1, True)
        lengths = self._bytes.lengths[ids[hard]] + last_of_run
        flat = flat_index(self._bytes.starts[ids[hard]], lengths)
        data = self._bytes.flat[np.minimum(flat, len(self._bytes.flat) - 1)]
        between = np.zeros(len(data), bool)
        between[np.cumsum(lengths)[last_of_run] - 1] = True
        data[between] = _BETWEEN[0]
        owners = hard[_groups(lengths)]
        text = data.tobytes().decode("utf-8", "surrogateescape")
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.intp)
        sizes = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
        sizes[(codes >= 0xDC80) & (codes < 0xDD00)] = 1  # a lone byte
        stops = np.cumsum(sizes)
        starts = stops - sizes
        rows = self._rows_of(codes)
        kept = np.flatnonzero(~between[starts] & (self._flags[rows] & _SKIPPED == 0))
        rows, begins, ends = rows[kept], owners[starts[kept]], owners[stops[kept] - 1]
        counts = np.ones(len(ids), np.int64)
        counts[hard] = 0
        easy = np.flatnonzero(counts != 0)
        own = np.bincount(begins, minlength=len(ids))[hard]
        counts[hard] = own
        firsts = np.cumsum(counts) - counts
        places = flat_index(firsts[hard], own)
        units = np.empty(int(counts.sum()), np.int64)  # the token of each
        units[firsts[easy]] = easy
        units[places] = begins
        merged, last = ids[units], units.copy()
        merged[places] = rows
        last[places] = ends
        return merged, units, last

    def _rows_of(self, codes: np.ndarray) -> np.ndarray:
        rows = self._row_of[codes]
        if (rows < 0).any():
            new = np.unique(codes[rows < 0]).tolist()
            self._row_of[new] = np.arange(len(self._flags), len(self._flags) + len(new))
            self._add([(emitted(code), 0) for code in new])
            rows = self._row_of[codes]
        return rows

    def spelled(self, words: Words, which: np.ndarray, spellings: Spellings, expected: np.ndarray) -> np.ndarray:
        """bool[m]: whether word ``which[i]`` has exactly the bytes of spelling ``expected[i]``."""
        counts = words.firsts[which + 1] - words.firsts[which]
        pieces = words.pieces[flat_index(words.firsts[which], counts)]
        sizes = _sums(self._spelled.lengths[pieces], np.cumsum(counts) - counts)
        equal = sizes == spellings.lengths[expected]
        kept = np.flatnonzero(equal[_groups(counts)])
        own = self._spelled.flat[flat_index(self._spelled.starts[pieces[kept]], self._spelled.lengths[pieces[kept]])]
        sizes = sizes[equal]
        theirs = spellings.flat[flat_index(spellings.starts[expected[equal]], sizes)]
        wrong = _sums((own != theirs).astype(np.int64), np.cumsum(sizes) - sizes)
        equal[equal] = wrong == 0
        return equal
