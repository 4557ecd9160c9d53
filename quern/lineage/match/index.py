"""Reads the items of a benchmark file, and builds an index of their n-grams.

As GPT-3 (Brown et al. 2020, appendix C) and Llama 2 do: n-grams of normalised words, 13 of them by default. A text of
fewer than n words that still has :data:`MIN_WORDS` is one gram, whole; a shorter one is not looked for. No gram reaches
from one field of an item into the next.
"""

from __future__ import annotations

import functools
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quern import storage
from quern.errors import InputError, one_line
from quern.lineage.match.normalise import words
from quern.lineage.match.pieces import Spellings, flat_index, powers

__all__ = ["AUTO", "DEFAULT_N", "MIN_WORDS", "GramIndex", "Grams", "Item", "gram_keys", "read_benchmark"]

DEFAULT_N = 13
MIN_WORDS = 8
AUTO = "auto"
#: Of a benchmark, decompressed: its items take some thirteen times as much memory.
_MOST_BYTES = 256 << 20
_IDS = ("id", "task_id")
_MULTIPLIER = 0x9FB21C651E98DF25
_INVERSE = pow(_MULTIPLIER, -1, 1 << 64)
#: Slots of the bit table a gram, as a power of two, and the most that a table has.
_SPARSITY, _MAX_SLOTS = 6, 28


@dataclass(frozen=True)
class Item:
    """One line of the benchmark."""

    id: str
    """Its ``id`` or ``task_id``, else the line's number."""
    line: int
    texts: tuple[str, ...]


def read_benchmark(path: str, fields: Sequence[str] = (AUTO,)) -> list[Item]:
    """The items of a JSON-lines file (plain or gzip), one an object a line; blank lines are none.

    ``fields``: the fields that hold text, each a string or a list of strings; ``auto`` in it: all such fields but the
    id.

    Raises:
        InputError: the file cannot be read or has no item, or a line is no object or lacks a field; the line and field
            are named.
    """
    try:
        content = _read(path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    found = []
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            value = _object(f"{path}: line {number}", line)
            found.append(Item(_id(value, number), number, tuple(_texts(f"{path}: line {number}", value, fields))))
    if not found:
        got = f"{len(content.splitlines()):,} blank lines" if content else "an empty file"
        raise InputError(f"{path}: holds no item: expected an object a line, got {got}")
    return found


def _read(path: str) -> bytes:
    """The bytes of a file, decompressed where they are gzip's.

    Raises:
        InputError: there are too many of them.
    """
    with storage.open_read(path) as file:
        start = file.read(2)
        file.seek(0)
        opened: Any = gzip.GzipFile(fileobj=file) if start == b"\x1f\x8b" else file
        content: bytes = opened.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise InputError(f"{path}: expected at most {_MOST_BYTES >> 20} MiB of text, got more; divide it")
    return content


def _object(where: str, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 (byte {error.start} of the line)") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON ({one_line(error, 120)})") from None
    if not isinstance(value, dict):
        raise InputError(f"{where}: expected an object, got {line[:40].decode(errors='replace')!r}")
    return value


def _id(value: Mapping[str, Any], number: int) -> str:
    for name in _IDS:
        if isinstance(value.get(name), str | int):
            return str(value[name]).encode("utf-8", "replace").decode()
    return str(number)


def _texts(where: str, value: Mapping[str, Any], fields: Sequence[str]) -> Iterator[str]:
    auto = AUTO in fields
    for name in value if auto else fields:
        if name not in value:
            known = ", ".join(value) or "none"
            raise InputError(f"{where}: {name}: no such field (it has {known:.200})")
        texts = value[name] if isinstance(value[name], list) else [value[name]]
        if all(isinstance(text, str) for text in texts):
            if not (auto and name in _IDS):
                yield from texts
        elif not auto:
            raise InputError(f"{where}: {name}: expected text or a list of texts, got {value[name]!r:.60}")


def _mixed(hashes: np.ndarray) -> np.ndarray:
    return (hashes ^ (hashes >> np.uint64(29))) * np.uint64(_MULTIPLIER)


@functools.lru_cache(maxsize=8)
def _powers(base: int, bits: int) -> np.ndarray:
    return powers(base, 1 << bits)


def gram_keys(hashes: np.ndarray, widths: Sequence[int]) -> list[np.ndarray]:
    """For each width w, uint64[words − w + 1]: a key of every w consecutive words, given the words' hashes.

    Σ mixed(hash_i) · M^(−i) over the w words, i from 0: differences of one prefix sum, moved to the same place.
    """
    size = len(hashes)
    sums = np.zeros(size + 1, np.uint64)
    np.cumsum(_mixed(hashes) * _powers(_INVERSE, size.bit_length())[:size], out=sums[1:])
    forward = _powers(_MULTIPLIER, size.bit_length())[: size + 1]
    return [(sums[w:] - sums[: size + 1 - w]) * forward[: size + 1 - w] if w <= size else sums[:0] for w in widths]


@dataclass(frozen=True)
class Grams:
    """The grams of one kind, all different: by the key of their first ``anchor`` words.

    ``keys`` uint64[g], ascending; ``spelled`` int32[g, width]: their words' numbers in the vocabulary, −1 behind the
    last; ``lengths`` int64[g]; ``first``: the number of gram 0 among all grams.
    """

    anchor: int
    keys: np.ndarray
    spelled: np.ndarray
    lengths: np.ndarray
    first: int
    shift: np.uint64
    bits: np.ndarray

    def proposed(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(place in ``keys``, gram) of every equal key."""
        slots = keys >> self.shift
        maybe = self.bits[(slots >> np.uint64(3)).astype(np.intp)] >> (slots & np.uint64(7)).astype(np.uint8) & 1
        places = np.flatnonzero(maybe != 0)
        left = np.searchsorted(self.keys, keys[places], "left")
        counts = np.searchsorted(self.keys, keys[places], "right") - left
        return np.repeat(places, counts), flat_index(left, counts)


def _grams(anchor: int, spelled: np.ndarray, keys: np.ndarray, first: int) -> tuple[Grams, np.ndarray]:
    """The kind, and the order in which it has the rows of ``spelled``."""
    slots = min(_MAX_SLOTS, max(10, len(keys).bit_length() + _SPARSITY))
    shift = np.uint64(64 - slots)
    bits = np.zeros(1 << (slots - 3), np.uint8)
    places = keys >> shift
    np.bitwise_or.at(
        bits, (places >> np.uint64(3)).astype(np.intp), np.uint8(1) << (places & np.uint64(7)).astype(np.uint8)
    )
    order = np.argsort(keys, kind="stable")
    spelled = spelled[order]
    return Grams(anchor, keys[order], spelled, (spelled >= 0).sum(1, dtype=np.int64), first, shift, bits), order


class GramIndex:
    """The n-grams of a benchmark's items.

    Attributes: ``n``; ``grams``: the kinds; ``vocabulary``: the words, by ascending hash (``hashes``);
    ``item_starts`` int64[g + 1] and ``item_of`` int64: the items of each gram; ``num_grams`` int64[items]: different
    grams of each item, 0 where it is not looked for.
    """

    def __init__(self, items: Iterable[Item], n: int = DEFAULT_N) -> None:
        if n < 1:
            raise ValueError(f"n: expected a number of words ≥ 1, got {n}")
        self.n = n
        numbers: dict[str, int] = {}
        runs: list[np.ndarray] = []
        owners: list[int] = []
        self.num_items = 0
        for number, item in enumerate(items):
            self.num_items += 1
            for text in item.texts:
                run = [numbers.setdefault(word, len(numbers)) for word in words(text)]
                if len(run) >= min(n, MIN_WORDS):
                    runs.append(np.array(run, np.int32))
                    owners.append(number)
        vocabulary = [word.encode() for word in numbers]
        hashes = Spellings.of(vocabulary).hashes()
        order = np.argsort(hashes, kind="stable")
        self.hashes = hashes[order]
        self.vocabulary = Spellings.of([vocabulary[i] for i in order])
        rank = np.empty(len(order), np.int32)
        rank[order] = np.arange(len(order))
        self._add_grams([rank[run] for run in runs], np.array(owners, np.int64))

    def _add_grams(self, runs: Sequence[np.ndarray], owners: np.ndarray) -> None:
        sizes = np.array([len(run) for run in runs], np.int64)
        whole = sizes < self.n
        kinds, pairs, first = [], [], 0
        for short in (False, True):
            mine = np.flatnonzero(whole == short).tolist()
            width = self.n - 1 if short else self.n
            rows = [self._rows(runs[i], width, short) for i in mine]
            if not rows:
                continue
            of = np.repeat(owners[mine], [len(row) for row in rows])
            spelled, inverse = _unique_rows(np.concatenate(rows))
            anchor = MIN_WORDS if short else self.n
            keys = np.zeros(len(spelled), np.uint64)
            multiplier = powers(_INVERSE, anchor)
            for place in range(anchor):
                keys += _mixed(self.hashes[spelled[:, place]]) * multiplier[place]
            kind, order = _grams(anchor, spelled, keys, first)
            number = np.empty(len(order), np.int64)
            number[order] = np.arange(first, first + len(order))
            pairs.append(number[inverse] * self.num_items + of)
            kinds.append(kind)
            first += len(order)
        self.grams = tuple(kinds)
        gram, self.item_of = np.divmod(np.unique(np.concatenate(pairs or [owners])), max(1, self.num_items))
        self.item_starts = np.searchsorted(gram, np.arange(first + 1))
        self.num_grams = np.bincount(self.item_of, minlength=self.num_items)

    @staticmethod
    def _rows(run: np.ndarray, width: int, short: bool) -> np.ndarray:
        if not short:
            return np.lib.stride_tricks.sliding_window_view(run, width)
        return np.concatenate([run, np.full(width - len(run), -1, np.int32)])[None]


def _unique_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different rows, and which of them each row is."""
    rows = np.ascontiguousarray(rows)
    _, first, inverse = np.unique(
        rows.view(np.dtype((np.void, rows.shape[1] * rows.itemsize))).ravel(), return_index=True, return_inverse=True
    )
    return rows[first], inverse.ravel()
