"""Computes a function of consecutive numbers ahead of need in a background thread."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from quern.closes import Closes

__all__ = ["Prefetch"]

T = TypeVar("T")


class _Shared(Generic[T]):
    """What the thread and its consumer share. The thread holds no more than this, so that a consumer who is simply
    forgotten is collected, and ends it."""

    def __init__(self, depth: int) -> None:
        self.ready: deque[T] = deque()
        self.depth = depth
        self.changed = threading.Condition()
        self.closed = False
        self.ended = False
        self.error: BaseException | None = None


def _work(shared: _Shared[T], make: Callable[[int], T], first: int, stop: int | None) -> None:
    number = first
    try:
        while stop is None or number < stop:
            with shared.changed:
                shared.changed.wait_for(lambda: shared.closed or len(shared.ready) < shared.depth)
                if shared.closed:
                    return
            value = make(number)
            with shared.changed:
                shared.ready.append(value)
                shared.changed.notify_all()
            del value  # not to be kept alive while this thread waits
            number += 1
    except BaseException as error:
        shared.error = error
    finally:
        with shared.changed:
            shared.ended = True
            shared.changed.notify_all()


def _end(shared: _Shared[T], thread: threading.Thread) -> None:
    with shared.changed:
        shared.closed = True
        shared.ready.clear()
        shared.changed.notify_all()
    if thread is not threading.current_thread():
        thread.join()


class Prefetch(Closes, Generic[T]):
    """Iterates ``make(first) … make(stop - 1)``; at most ``depth`` of them wait to be taken.

    An error in ``make`` is raised, itself, after the values made before it, and again whenever more is asked for. The
    thread ends with the last value, at :meth:`close`, when the iterator is collected, or with the interpreter.
    """

    def __init__(self, make: Callable[[int], T], first: int, stop: int | None, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth: expected an integer ≥ 1, got {depth}")
        self._shared: _Shared[T] = _Shared(depth)
        self._thread = threading.Thread(
            target=_work, args=(self._shared, make, first, stop), name="quern-prefetch", daemon=True
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, _end, self._shared, self._thread)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: shared.ready or shared.ended)
            if shared.ready:
                value = shared.ready.popleft()
                shared.changed.notify_all()
                return value
        if shared.error is not None:
            raise shared.error
        raise StopIteration

    def close(self) -> None:
        """Stop the thread after its current value; values made ahead are dropped. May be called again."""
        self._finalizer()
