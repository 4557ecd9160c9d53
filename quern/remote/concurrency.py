"""Runs a bounded number of requests concurrently, and returns results in the order of the requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["PART_BYTES", "in_order"]

T = TypeVar("T")
S = TypeVar("S")

PART_BYTES = 8 << 20
"""Bytes a request carries. S3 takes parts of 5 MiB to 5 GiB, and at most 10,000 of them."""


def in_order(action: Callable[[S, Callable[[], bool]], T], items: Iterable[S], width: int) -> Iterator[T]:
    """Results of ``action`` for each item in turn, with up to ``width`` under way; after a failure none goes on."""
    stop = threading.Event()
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(width, thread_name_prefix="store") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(action, item, stop.is_set))
                del item  # free its bytes with its request
                if len(waiting) == width:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            stop.set()
            for future in waiting:
                future.cancel()
