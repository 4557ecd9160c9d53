"""Structured arrays: made from columns, and where keys begin in sorted ones."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["key_starts", "made_of", "repeats"]


def made_of(dtype: np.dtype, like: np.ndarray | None = None, **columns: Any) -> np.ndarray:
    """Rows of ``dtype``: the fields that ``like`` has too, and ``columns``, which go before; others are 0.

    There are as many as in ``like``; without it, as in the first column.
    """
    rows = np.zeros(len(next(iter(columns.values())) if like is None else like), dtype)
    if like is not None:
        columns = {name: like[name] for name in dtype.names or () if name in (like.dtype.names or ())} | columns
    for name, values in columns.items():
        rows[name] = values
    return rows


def key_starts(*keys: np.ndarray) -> np.ndarray:
    """bool[n]: where another key begins in sorted rows, of which ``keys`` are the columns of the key."""
    starts = np.ones(len(keys[0]), dtype=bool)
    starts[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return starts


def repeats(starts: np.ndarray) -> np.ndarray:
    """bool[n]: which sorted rows share their key with another one; ``starts``: where keys begin."""
    return ~(starts & np.append(starts[1:], True))
