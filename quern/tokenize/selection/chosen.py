"""The stream that chosen documents of a source make, laid end to end, and where its tokens are in the source's own.

A *stretch* is a run of neighbours of the source's stream that are all chosen. A file has them as int64 [2, K + 1],
little-endian: where each starts among the chosen tokens, and in the source; in the last column, how many tokens and how
many documents are chosen. It is written once, and its name and the identity of the stream hold a digest of it.

Shape legend: N positions or ranges, P pieces of them, K stretches.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from quern import storage
from quern.config import digest
from quern.errors import InputError

__all__ = ["CHOSEN", "I64", "Chosen", "Identity", "family_of", "find_chosen", "overlap", "write_chosen"]

I64 = NDArray[np.int64]

CHOSEN = "chosen"
"""The folder of a training run that holds what the conditions of its sources chose."""

_DIGITS = 16
_CHOSEN = re.compile(r"(.+)\[([0-9a-f]{16})\]/(\d+)-([0-9a-f]{16})")


class Identity:
    """The identity of a source of an order: ``<run id>/<source>/<version since which its tokens stand where they do>``,
    and for documents chosen from it ``<run id>/<source>[<digest of the condition>]/<version>-<digest of what it
    chose>``.

    Attributes: ``text``; ``stream``, the identity of the whole source.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._match = _CHOSEN.fullmatch(text)
        self.stream = text if self._match is None else f"{self._match[1]}/{self._match[3]}"

    @property
    def chosen(self) -> bool:
        """Whether it is of chosen documents."""
        return self._match is not None

    @property
    def file(self) -> str:
        """The name of the file that has the stretches, of chosen documents."""
        assert self._match is not None
        family, since, content = f"{self._match[1]}[{self._match[2]}]", self._match[3], self._match[4]
        return f"{digest([family])[:_DIGITS]}.{since}-{content}.chosen"


def family_of(stream: str, where: str | None) -> str:
    """The identity of a source, and of a condition on it, without its version. ``stream``: that of the whole source."""
    name = stream.rpartition("/")[0]
    return name if where is None else f"{name}[{digest(['where', where])[:_DIGITS]}]"


class Chosen:
    """The stretches of chosen documents, read from ``folder``. ``identity``: of the stream that they make.

    Attributes: ``path``; ``identity``; ``tokens``, ``documents``: how many are chosen.

    Raises:
        InputError: the file is missing or damaged.
    """

    def __init__(self, folder: str, identity: str) -> None:
        self.identity = identity
        self.path = path = os.path.join(folder, Identity(identity).file)
        if not os.path.exists(path):
            raise InputError(f"{path}: is missing")
        size = os.path.getsize(path)
        if not size or size % 16:
            raise InputError(f"{path}: is damaged: expected the stretches of chosen documents")
        columns = np.memmap(path, "<i8", "r", shape=(2, size // 16)).view(np.ndarray)
        self.starts, self._origins = columns[:, :-1]
        self.tokens, self.documents = (int(value) for value in columns[:, -1])
        self._lengths = np.diff(np.append(self.starts, self.tokens))
        after = self._origins[:-1] + self._lengths[:-1] < self._origins[1:]
        if (self._lengths < 1).any() or not after.all() or (len(self.starts) and self.starts[0]):
            raise InputError(f"{path}: is damaged: its stretches are not in the order of the source")
        if not identity.endswith(f"-{storage.sha256(path)[:_DIGITS]}"):
            raise InputError(f"{path}: is damaged: its SHA-256 is not that of its name")

    def __len__(self) -> int:
        return len(self.starts)

    def pieces(self, starts_N: I64, stops_N: I64) -> tuple[I64, I64, I64]:
        """Where the chosen tokens [start, stop) are in the source: starts and stops of their pieces there, range by
        range, and the range that each is of; each int64 [P]."""
        first_N = np.searchsorted(self.starts, starts_N, "right") - 1
        end_N = np.searchsorted(self.starts, stops_N, "left")
        counts_N = np.where(stops_N > starts_N, end_N - first_N, 0)
        which_P = np.repeat(np.arange(len(starts_N)), counts_N)
        stretch_P = np.arange(len(which_P)) + np.repeat(first_N - np.cumsum(counts_N) + counts_N, counts_N)
        begin_P = np.maximum(self.starts[stretch_P], starts_N[which_P])
        end_P = np.minimum(self.starts[stretch_P] + self._lengths[stretch_P], stops_N[which_P])
        shift_P = self._origins[stretch_P] - self.starts[stretch_P]
        return begin_P + shift_P, end_P + shift_P, which_P

    def place(self, positions_N: I64) -> I64:
        """int64 [N]: where tokens of the source are among the chosen; −1 for those that are not."""
        if not len(self):
            return np.full(len(positions_N), -1, np.int64)
        stretch_N = np.searchsorted(self._origins, positions_N, "right") - 1
        inside_N = positions_N - self._origins[stretch_N]
        chosen_N = (stretch_N >= 0) & (inside_N < self._lengths[stretch_N])
        return np.where(chosen_N, self.starts[stretch_N] + inside_N, -1)

    def shifts(self, first: int, last: int) -> list[int]:
        """What to add to a place in each of the stretches [first, last) to have it in the source."""
        return list((self._origins[first:last] - self.starts[first:last]).tolist())


def overlap(one: Chosen, other: Chosen) -> int | None:
    """A token of the source that both have chosen; None if none is."""
    if not len(one) or not len(other):
        return None
    before = np.searchsorted(other._origins, one._origins + one._lengths, "left") - 1  # the last that begins in time
    ends = np.where(before >= 0, other._origins[before] + other._lengths[before], 0)
    both = np.flatnonzero(ends > one._origins)
    return int(max(one._origins[both[0]], other._origins[before[both[0]]])) if len(both) else None


def find_chosen(folders: Iterable[str], stream: str, where: str) -> Chosen | None:
    """What the condition ``where`` has chosen from the source of identity ``stream`` when it was asked first, of the
    first folder that has it; None if none has."""
    family, since = family_of(stream, where), stream.rpartition("/")[2]
    for folder in folders:
        pattern = os.path.join(glob.escape(folder), f"{digest([family])[:_DIGITS]}.{since}-*.chosen")
        for path in sorted(glob.glob(pattern)):
            content = path.removesuffix(".chosen").rpartition("-")[2]
            return Chosen(folder, f"{family}/{since}-{content}")
    return None


def write_chosen(folder: str, stream: str, where: str, spans: Iterable[tuple[I64, I64]]) -> Chosen:
    """Write what ``where`` chooses from a source: ``spans``, starts and lengths of documents in the source's order,
    some at a time. Equal spans are equal bytes.

    Raises:
        InputError: a document stands in the source twice.
    """
    firsts, lengths, end, tokens, documents = [np.empty(0, np.int64)], [np.empty(0, np.int64)], -1, 0, 0
    for starts_M, lengths_M in spans:
        if not len(starts_M):
            continue
        ends_M = starts_M + lengths_M
        before_M = np.append(end, ends_M[:-1])
        if (starts_M < before_M).any():
            raise InputError(f"{stream}: a document has two verdicts or two spans; expected one")
        opens_M = starts_M > before_M
        if tokens and not opens_M[0]:  # it goes on with the last stretch
            tail = int(np.flatnonzero(np.append(opens_M, True))[0])
            lengths[-1][-1] += int(lengths_M[:tail].sum())
        begins = np.flatnonzero(opens_M)
        if len(begins):
            firsts.append(starts_M[begins])
            lengths.append(np.add.reduceat(lengths_M, begins).astype(np.int64))
        end, tokens, documents = int(ends_M[-1]), tokens + int(lengths_M.sum()), documents + len(starts_M)
    origins, sizes = np.concatenate(firsts), np.concatenate(lengths)
    columns = np.empty((2, len(sizes) + 1), "<i8")
    columns[:, :-1], columns[:, -1] = (np.cumsum(sizes) - sizes, origins), (tokens, documents)
    data = columns.tobytes()
    identity = f"{family_of(stream, where)}/{stream.rpartition('/')[2]}-{hashlib.sha256(data).hexdigest()[:_DIGITS]}"
    os.makedirs(folder, exist_ok=True)
    storage.publish_bytes(os.path.join(folder, Identity(identity).file), data)
    return Chosen(folder, identity)
