"""Answers that are remembered from page to page, a bounded number of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["Memo"]

K = TypeVar("K")
V = TypeVar("V")


class Memo(dict[K, V]):
    """Key → ``answer(key)``, found out where it is looked up first.

    At ``max_entries`` it is emptied and begins anew, which costs time and changes nothing. Keys longer than
    ``max_length`` are not kept.
    """

    def __init__(self, answer: Callable[[K], V], max_entries: int, max_length: int | None = None) -> None:
        super().__init__()
        self.answer, self.max_entries, self.max_length = answer, max_entries, max_length

    def __missing__(self, key: K) -> V:
        value = self.answer(key)
        if self.max_length is None or len(key) <= self.max_length:  # type: ignore[arg-type]
            if len(self) >= self.max_entries:
                self.clear()
            self[key] = value
        return value
