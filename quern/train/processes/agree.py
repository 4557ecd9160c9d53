"""Collective steps with agreed errors: a failure on one rank raises the same error on all, and no rank hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from quern.errors import InputError, QuernError, named_line

__all__ = ["Agreement", "describe"]

T = TypeVar("T")

#: Seconds after which a rank that is still at work says so: a process group gives up on one that is silent.
_SIGN_OF_LIFE_S = 30.0


def describe(error: BaseException) -> str:
    """An error as one line; an operating system's names its file."""
    if isinstance(error, QuernError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return named_line(error)


class Agreement:
    """Runs an action on one or all ranks of the default process group, or in a world of one without any, and shares the
    outcome. Every method is collective."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        if world > 1 and not dist.is_initialized():
            raise ValueError(f"a world of {world} ranks needs an initialised process group")

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, on all ranks (all-gather)."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def gather_on_rank0(self, value: T) -> list[T]:
        """Every rank's ``value``, on rank 0 (gather); elsewhere nothing."""
        if self.world == 1:
            return [value]
        found: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(value, found)
        return found or []

    def scatter(self, action: Callable[[], list[T]]) -> T:
        """Scatter the results of ``action``, one per rank, which only rank 0 runs; if it fails, all raise."""
        values, error = _attempt(action) if self.rank == 0 else (None, None)
        shares: list[Any] = []
        if self.rank == 0:
            shares = [(None, _portable(error))] * self.world if values is None else [(value, None) for value in values]
        box = shares[:1] or [None]
        if self.world > 1:
            dist.scatter_object_list(box, shares)
        return self._taken(box, error)

    def all_or_raise(self, action: Callable[[], T]) -> T:
        """Run ``action`` on every rank and return this rank's result; if it fails on one, all raise."""
        value, error = _attempt(action)
        for rank, failure in enumerate(self.gather(_portable(error))):
            if failure is not None:
                self._fail(rank, failure, error)
        return value  # type: ignore[return-value]

    def all_or_raise_with_keepalive(self, action: Callable[[], T]) -> T:
        """Like :meth:`all_or_raise`, for actions longer than the group's time-out; ``action`` runs in a thread."""
        outcome: list[tuple[T | None, Exception | None]] = []
        thread = threading.Thread(target=lambda: outcome.append(_attempt(action)), daemon=True)
        thread.start()
        working = True
        while working:
            thread.join(_SIGN_OF_LIFE_S)
            working = any(self.gather(thread.is_alive()))
        value, error = outcome[0] if outcome else (None, QuernError("was ended"))

        def result() -> T:
            if error is not None:
                raise error
            return value  # type: ignore[return-value]

        return self.all_or_raise(result)

    def gather_results(self, action: Callable[[], T]) -> list[T]:
        """Run ``action`` on every rank and all-gather the results; if it fails on one, all raise."""
        return self.gather(self.all_or_raise(action))

    def broadcast_from_rank0(self, action: Callable[[], T]) -> T:
        """Broadcast rank 0's result of ``action``, which only rank 0 runs."""
        value, error = _attempt(action) if self.rank == 0 else (None, None)
        box: list[Any] = [(value, _portable(error))]
        if self.world > 1:
            dist.broadcast_object_list(box)
        return self._taken(box, error)

    def _taken(self, box: list[Any], error: Exception | None) -> Any:
        """What rank 0 has sent; where its action has failed, all raise."""
        value, failure = box[0]
        if failure is not None:
            self._fail(0, failure, error)
        return value

    def _fail(self, rank: int, failure: tuple[type[QuernError], str], own: Exception | None) -> None:
        kind, text = failure
        where = f"rank {rank}: " if self.world > 1 and kind is not InputError else ""
        raise kind(where + text) from (own if rank == self.rank else None)


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        return None, error


def _portable(error: Exception | None) -> tuple[type[QuernError], str] | None:
    if error is None:
        return None
    return (InputError if isinstance(error, InputError) else QuernError), describe(error)
