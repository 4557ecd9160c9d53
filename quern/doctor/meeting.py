"""Exchanges values between ranks through files of a shared folder, without a rendezvous.

A rank writes its file and waits until the files of all are there. The first rank, or whoever has waited for its
time-out, writes a list of what all have to know of them; of several lists the first holds, and all go on by it. So a
rank that hangs costs the others their time-out once: later meetings are without it. Only who judges reads all values.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache
from itertools import count
from typing import Any

from pydantic import BaseModel

from quern import storage
from quern.config import validate
from quern.errors import InputError, QuernError

__all__ = ["Meeting", "UncheckedError"]

_LOOK_S = 0.25  # between two looks
_LEAVE_S = 60.0  # for which files wait for those who read them; over NFS a file may be seen half a minute late


class UncheckedError(QuernError):
    """The machines could not be checked. Exit code 2; 1 is that something was found."""

    exit_code = 2


class _List(BaseModel):
    """How a meeting ended: what all know of those who answered, and what the others said when they began, by rank."""

    answers: dict[int, dict[str, Any]]
    missing: dict[int, str]


class Meeting:
    """The ranks of one start, in a folder (a path or a store's URL) whose name begins with ``base``, and which all of
    them see."""

    def __init__(
        self, base: str, rank: int, world: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder, self.rank, self._base, self._timeout_s, self._clock = "", rank, base, timeout_s, clock
        self._before, self._kept = "", b""
        self.present: list[int] = [*range(world)]
        self.missing: dict[int, str] = {}
        """What those said when they began that have been given up since."""
        self._met: list[list[int]] = []
        self._file = cache(storage.read_json)

    def begin(self, hello: str) -> None:
        """Say that this rank is there, so that it can be named by more than its number if it is not heard of again. A
        folder is passed over where this rank has been before, or whose ranks have met: it is of an earlier start."""
        numbers = count()
        while not self.folder or any(map(storage.is_file, (self._list("0"), self._path("hello", self.rank)))):
            self._before, self.folder = self.folder, f"{self._base}.{next(numbers)}"
        storage.publish_bytes(self._path("hello", self.rank), json.dumps(hello).encode())

    def meet(self, value: Any, brief: Collection[str] = ()) -> dict[int, dict[str, Any]]:
        """Leave ``value`` for who judges, and wait for the others; all learn keys ``brief`` of values that have some.

        Raises:
            UncheckedError: this rank came after the others had gone on or ended without it.
        """
        if not storage.is_file(self._path("hello", self.rank)):  # the folder goes with the last who leaves
            raise UncheckedError(f"rank {self.rank}: the others have ended the check without it")
        name, began = str(len(self._met)), self._clock()
        storage.publish_bytes(self._path(name, self.rank), json.dumps(value, allow_nan=False).encode())
        while not storage.is_file(self._list(name)):
            late = self._clock() - began >= self._timeout_s
            if late or self.rank == self.present[0]:  # not all: a file system would have to list the folder for each
                answered = self._answered(name)
                if late or len(answered) == len(self.present):
                    self._close(name, answered, brief)
                    break
            time.sleep(_LOOK_S)
        told = validate(storage.read_json(self._list(name)), _List, self._list(name))
        if self.rank in told.missing:
            raise UncheckedError(f"rank {self.rank}: the others waited {self._timeout_s:g} s and went on without it")
        self.present = [rank for rank in self.present if rank not in told.missing]
        if told.missing and not self._met:
            if self._missed_before() >= {*self.present}:
                self.leave()
                raise UncheckedError(f"rank {self.rank}: came late, the others have met without it ({self._before})")
            self._kept = _List(answers={}, missing=told.missing).model_dump_json().encode()
        self.missing |= told.missing
        self._met.append(self.present)
        return told.answers

    def values(self) -> list[dict[int, Any]]:
        """All values of each meeting until now, by rank; what this rank has read before, it does not read again."""
        return [self._read(str(number), ranks) for number, ranks in enumerate(self._met)]

    def leave(self) -> None:
        """Say that this rank needs the files no more; the first one waits a moment for the others and removes them. Who
        was missing at first stays there for those that come yet."""
        if not storage.is_file(self._path("hello", self.rank)):
            return  # the first has removed all, and a file would bring the folder back
        storage.publish_bytes(self._path("left", self.rank), b"null")
        if self.rank != self.present[0]:
            return
        end = self._clock() + min(_LEAVE_S, self._timeout_s)
        while len(self._answered("left")) < len(self.present) and self._clock() < end:
            time.sleep(_LOOK_S)
        with suppress(OSError):  # somebody reads in it still; what is told stays true
            storage.remove_tree(self.folder)
        if self._kept:
            storage.publish_bytes(self._list("0"), self._kept)

    def _missed_before(self) -> set[int]:
        """Who was missed in the folder that this rank passed over last, if it was one that tells."""
        with suppress(InputError):
            return {*validate(storage.read_json(path := f"{self._before}/0.json"), _List, path).missing}
        return set()

    def _answered(self, name: str) -> list[int]:
        there = set(storage.list_files(f"{self.folder}/{name}"))
        return [rank for rank in self.present if self._path(name, rank) in there]

    def _close(self, name: str, answered: list[int], brief: Collection[str]) -> None:
        lost = dict.fromkeys((rank for rank in self.present if rank not in answered), "")
        lost |= self._read("hello", [rank for rank in self._answered("hello") if rank in lost])
        values = {rank: value for rank, value in self._read(name, answered).items() if isinstance(value, dict)}
        known = {rank: {key: value[key] for key in brief if key in value} for rank, value in values.items()}
        told = {"answers": {rank: some for rank, some in known.items() if some}, "missing": lost}
        with suppress(FileExistsError):  # somebody else's holds
            storage.create_bytes(self._list(name), json.dumps(told).encode())

    def _read(self, name: str, ranks: list[int]) -> dict[int, Any]:
        paths = [self._path(name, rank) for rank in ranks]
        return dict(zip(ranks, storage.each(self._file, paths, self.folder), strict=True))

    def _path(self, name: str, rank: int) -> str:
        return f"{self.folder}/{name}/{rank}.json"

    def _list(self, name: str) -> str:
        return f"{self.folder}/{name}.json"
