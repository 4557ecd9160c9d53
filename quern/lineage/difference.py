"""Word diff of two texts, in bounded time and memory for texts of any length.

The middle between what both texts begin and end with is compared by Myers' greedy algorithm (E. W. Myers 1986, *An
O(ND) difference algorithm and its variations*), up to :data:`MAX_EDITS` edits and :data:`MAX_WORDS` words. A
comparison that ends before the texts do says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["MAX_CHARS", "MAX_EDITS", "MAX_WORDS", "DiffPiece", "Difference", "difference"]

MAX_CHARS = 1_000_000
"""Of each text that are looked at."""
MAX_WORDS = 10_000
"""Of each text between what both begin and end with."""
MAX_EDITS = 400
"""Words that either text lacks. Where there are more, the rest of both counts as different."""
MAX_PIECES = 80
CONTEXT = 5
"""Words shown of what is the same, on each side of a change."""
PIECE_WORDS = 60
PIECE_CHARS = 600

Kind = Literal["same", "removed", "kept"]
Run = tuple[int, int, int]
"""``left[x : x + length] == right[y : y + length]``, as (x, y, length)."""


@dataclass(frozen=True)
class DiffPiece:
    """Consecutive words: in both texts, only in the ``removed`` one, or only in the ``kept`` one."""

    kind: Kind
    words: int
    text: str
    """They, one space between them; an ellipsis stands for those that are left out."""


@dataclass(frozen=True)
class Difference:
    """A removed text beside the one that was kept in its place."""

    equal: bool
    """The texts are the same, white space too."""
    removed_words: int
    """Words of the removed text that are looked at; likewise ``kept_words``."""
    kept_words: int
    only_removed: int
    """Those of them that the other text does not have there."""
    only_kept: int
    complete: bool
    """Every word of both was compared. If not, the counts are of what was, or at most (:data:`MAX_EDITS`)."""
    pieces: tuple[DiffPiece, ...]
    """The first :data:`MAX_PIECES`; none if every word is the same."""


def difference(removed: str, kept: str) -> Difference:
    """The word diff from ``removed`` to ``kept``."""
    cut = max(len(removed), len(kept)) > MAX_CHARS
    left, right = removed[:MAX_CHARS].split(), kept[:MAX_CHARS].split()
    runs, stops, complete = _common(left, right)
    spans = list(_spans(runs, *stops))
    only = {kind: sum(stop - start for name, start, stop in spans if name == kind) for kind in ("removed", "kept")}
    changed = any(only.values())
    return Difference(
        equal=removed == kept,
        removed_words=len(left),
        kept_words=len(right),
        only_removed=only["removed"],
        only_kept=only["kept"],
        complete=complete and not cut,
        pieces=tuple(_pieces(spans, left, right)) if changed else (),
    )


def _common(left: Sequence[str], right: Sequence[str]) -> tuple[list[Run], tuple[int, int], bool]:
    """Equal runs, ascending; how many words of each side they and the gaps between them take; whether all were
    compared."""
    shorter = min(len(left), len(right))
    head = 0
    while head < shorter and left[head] == right[head]:
        head += 1
    tail = 0
    while tail < shorter - head and left[-1 - tail] == right[-1 - tail]:
        tail += 1
    middles = [list(side[head : len(side) - tail]) for side in (left, right)]
    uncut = max(map(len, middles)) <= MAX_WORDS
    numbers: dict[str, int] = {}
    a, b = ([numbers.setdefault(word, len(numbers)) for word in middle[:MAX_WORDS]] for middle in middles)
    runs, found = _myers(a, b)
    runs = [(0, 0, head), *((x + head, y + head, length) for x, y, length in runs)]
    if not uncut:  # what follows is not known to be another text
        return _joined(runs), (head + len(a), head + len(b)), False
    runs.append((len(left) - tail, len(right) - tail, tail))
    return _joined(runs), (len(left), len(right)), found


def _myers(a: Sequence[int], b: Sequence[int]) -> tuple[list[Run], bool]:
    """The equal runs of a shortest edit script; if it has more than :data:`MAX_EDITS` edits, those of the path that
    gets farthest with so many, and False."""
    n, m = len(a), len(b)
    reach = {1: 0}
    trace: list[dict[int, int]] = []
    for edits in range(MAX_EDITS + 1):
        trace.append(reach)
        reach = {}
        before = trace[-1]
        for k in range(-edits, edits + 1, 2):
            x, _ = _step(before, k, n, m)
            if x < 0:
                continue
            while x < n and x - k < m and a[x] == b[x - k]:
                x += 1
            reach[k] = x
            if x == n and x - k == m:
                return _walk_back(trace, n, m, x, k), True
    k = max(reach, key=lambda k: 2 * reach[k] - k, default=0)
    return _walk_back(trace, n, m, reach.get(k, 0), k), False


def _step(before: dict[int, int], k: int, n: int, m: int) -> tuple[int, int]:
    """The farthest x on diagonal ``k`` one edit from ``before``, and the diagonal it comes from; x is -1 for none."""
    down, across = before.get(k + 1, -1), before.get(k - 1, n)
    if across < n and across >= down:
        return across + 1, k - 1  # a word of a
    return (down, k + 1) if 0 <= down <= m + k else (-1, k)  # a word of b


def _walk_back(trace: Sequence[dict[int, int]], n: int, m: int, x: int, k: int) -> list[Run]:
    """The equal runs of the path that ends at (x, x − k) after ``len(trace) - 1`` edits."""
    runs = []
    for before in reversed(trace):
        start, came_from = _step(before, k, n, m)
        runs.append((start, start - k, x - start))
        x, k = before[came_from], came_from
    return runs[::-1]


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Without empty runs; those that go on where one ends are one with it."""
    found: list[Run] = []
    for x, y, length in runs:
        if found and found[-1][0] + found[-1][2] == x and found[-1][1] + found[-1][2] == y:
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + length)
        elif length:
            found.append((x, y, length))
    return found


def _spans(runs: Sequence[Run], left_stop: int, right_stop: int) -> Iterator[tuple[Kind, int, int]]:
    """(kind, start, stop) in the text that has the words; ``same`` in the removed one."""
    x = y = 0
    for run_x, run_y, length in [*runs, (left_stop, right_stop, 0)]:
        if run_x > x:
            yield "removed", x, run_x
        if run_y > y:
            yield "kept", y, run_y
        if length:
            yield "same", run_x, run_x + length
        x, y = run_x + length, run_y + length


def _pieces(spans: Sequence[tuple[Kind, int, int]], left: Sequence[str], right: Sequence[str]) -> Iterator[DiffPiece]:
    for number, (kind, start, stop) in enumerate(spans[:MAX_PIECES]):
        side = right if kind == "kept" else left
        first, last = (0 if number == 0 else CONTEXT), (0 if number == len(spans) - 1 else CONTEXT)
        if kind != "same":
            first, last = PIECE_WORDS - CONTEXT, CONTEXT
        if stop - start <= first + last + 1:
            words = list(side[start:stop])
        else:
            words = [*side[start : start + first], "…", *side[stop - last : stop]]
        text = " ".join(word if len(word) <= PIECE_CHARS else f"{word[:PIECE_CHARS]}…" for word in words)
        yield DiffPiece(kind, stop - start, text if len(text) <= PIECE_CHARS else f"{text[:PIECE_CHARS]}…")
