"""Exchanges values between ranks through files of a shared folder, without a rendezvous.

A rank writes its file and waits until the files of all are there. Whoever has waited for its time-out writes the list
of those who answered; of several lists the first holds, and all go on by it. So a rank that hangs costs the others
their time-out once: later meetings are of those on the list.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quern import storage
from quern.errors import InputError, QuernError

__all__ = ["Meeting", "Wait"]

#: Seconds between two looks, which grow: a network file system is not asked more than it has to be.
_FIRST_LOOK_S, _LAST_LOOK_S = 0.02, 0.5
#: Seconds for which the files wait for those who still read them; over NFS a file may be seen half a minute late.
_LEAVE_S = 60.0


@dataclass(frozen=True)
class Wait:
    """How one meeting went, as a rank saw it: in ``--json``."""

    meeting: str
    waited_s: float
    deadline_s: float
    closed_by: int
    """The rank whose list holds."""
    missing: tuple[int, ...]


class Meeting:
    """The ranks of one start, in ``folder`` (a path or a store's URL), which all of them see and no other uses."""

    def __init__(
        self, folder: str, rank: int, world: int, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder, self.rank, self._timeout_s, self._clock = folder, rank, timeout_s, clock
        self.present: list[int] = [*range(world)]
        self.missing: list[int] = []
        self.waits: list[Wait] = []
        self.hellos: dict[int, Any] = {}
        """By rank, what was said by those who began; known after the first meeting."""

    def begin(self, hello: Any) -> None:
        """Say that this rank is there, so that it can be named by more than its number if it is not heard of again.

        Raises:
            InputError: the folder holds an earlier start.
        """
        try:
            storage.create_bytes(self._path("hello", self.rank), _bytes(hello))
        except FileExistsError:
            raise InputError(
                f"{self._folder}: holds a check of the same id that was not ended; remove it, or give another --id"
            ) from None

    def meet(self, name: str, value: Any, timeout_s: float | None = None) -> list[int]:
        """Leave ``value`` for the others, and wait for theirs; the ranks that answered, of which this one is one.

        Raises:
            QuernError: this rank came after the others had gone on without it.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        if not storage.is_file(self._path("hello", self.rank)):  # the folder goes with the last who leaves
            raise QuernError(f"rank {self.rank}: the others have ended the check without it, before its {name!r}")
        storage.publish_bytes(self._path(name, self.rank), _bytes(value))
        began, look, listed = self._clock(), _FIRST_LOOK_S, f"{self._folder}/{name}.list.json"
        while not storage.is_file(listed):
            late = self._clock() - began >= limit
            if late or self.rank == self.present[0]:  # not all: a file system would have to list the folder for each
                answered = self._answered(name)
                if late or len(answered) == len(self.present):
                    self._close(listed, answered)
                    break
            time.sleep(look)
            look = min(_LAST_LOOK_S, look * 1.5)
        present, by, hellos = _checked(storage.read_json(listed), listed)
        self.hellos = self.hellos or hellos
        waited = self._clock() - began
        missing = tuple(rank for rank in self.present if rank not in present)
        self.waits.append(Wait(name, round(waited, 3), limit, by, missing))
        self.missing += missing
        self.present = [rank for rank in self.present if rank in present]
        if self.rank not in present:
            raise QuernError(f"rank {self.rank}: the others waited {limit:g} s for {name!r} and went on without it")
        return self.present

    def step_out(self) -> None:
        """Say, before this rank's next meeting, that it measures nothing with others any more."""
        storage.publish_bytes(self._path("out", self.rank), b"null")

    def active(self) -> list[int]:
        """Those present that have not stepped out; after a meeting the same to all."""
        out = set(self._answered("out"))
        return [rank for rank in self.present if rank not in out]

    def values(self, name: str, ranks: Sequence[int]) -> list[tuple[str, Any]]:
        """File and value of those of ``ranks`` that answered in a meeting."""
        paths = [path for rank in ranks if storage.is_file(path := self._path(name, rank))]
        return [(path, storage.read_json(path)) for path in paths]

    def publish(self, name: str, value: Any) -> None:
        """Leave a value that one rank decides."""
        storage.publish_bytes(f"{self._folder}/{name}.json", _bytes(value))

    def await_published(self, name: str, by: int) -> Any:
        """Wait for it.

        Raises:
            QuernError: it has not come within the time-out.
        """
        path, end, look = f"{self._folder}/{name}.json", self._clock() + self._timeout_s, _FIRST_LOOK_S
        while not storage.is_file(path):
            if self._clock() >= end:
                raise QuernError(f"rank {by} has not told {name} within {self._timeout_s:g} s")
            time.sleep(look)
            look = min(_LAST_LOOK_S, look * 1.5)
        return storage.read_json(path)

    def leave(self, last: bool) -> None:
        """Say that this rank needs the files no more; the ``last`` waits a moment for the others and removes them."""
        storage.publish_bytes(self._path("left", self.rank), b"null")
        end = self._clock() + min(_LEAVE_S, self._timeout_s)
        while last and len(self._answered("left")) < len(self.present) and self._clock() < end:
            time.sleep(_LAST_LOOK_S)
        if last:
            with suppress(OSError):  # somebody reads in it still; what is told stays true
                storage.remove_tree(self._folder)

    def _answered(self, name: str) -> list[int]:
        there = set(storage.list_files(f"{self._folder}/{name}"))
        return [rank for rank in self.present if self._path(name, rank) in there]

    def _close(self, listed: str, answered: Iterable[int]) -> None:
        hellos = {}
        if not self.hellos:
            said = {rank: self._path("hello", rank) for rank in self.present}
            hellos = {rank: storage.read_json(path) for rank, path in said.items() if storage.is_file(path)}
        with suppress(FileExistsError):  # somebody else's holds
            storage.create_bytes(listed, _bytes({"present": [*answered], "by": self.rank, "hellos": hellos}))

    def _path(self, name: str, rank: int) -> str:
        return f"{self._folder}/{name}/{rank}.json"


def _bytes(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


def _checked(told: Any, path: str) -> tuple[list[int], int, dict[int, Any]]:
    match told:
        case {"present": [*present], "by": int(by), "hellos": dict(hellos)}:
            if all(isinstance(rank, int) for rank in present) and all(rank.isdecimal() for rank in hellos):
                return present, by, {int(rank): hello for rank, hello in hellos.items()}
    raise InputError(f"{path}: expected present, a list of ranks, by and hellos, got {told!r:.80}")
