"""The blended word: an endless, periodic sequence of sources in exact proportion, invertible in closed form.

Two sources are blended as evenly as integers allow: among the first m letters of a node with weights a (left) and
A - a (right), ⌊(m·a + ⌊A/2⌋) / A⌋ are left. A Huffman tree of such nodes blends any number of sources. Every prefix
of n letters holds each source n·w times within 1.68 (half a letter a level, and weights along a path of a Huffman tree
grow at least like Fibonacci numbers), a stretch that begins elsewhere within 3.36, and a period holds it exactly.

Integers alone: the sum of the weights D is at most 2^32, so that every product fits 64 bits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from math import floor, gcd, lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_PERIOD", "Weight", "Word", "quantise", "rounded"]

U64 = NDArray[np.uint64]
Weight = int | float | str | Fraction | Decimal

MAX_PERIOD = 2**32


def quantise(weights: Sequence[Weight]) -> tuple[int, ...]:
    """The recipe as integers without a common factor whose sum is at most 2^32; zeros stay.

    A float is read as its shortest decimal (0.1 is 1/10). Weights whose exact integers have a larger sum are rounded
    to shares of 2^32 by largest remainder (ties: the earlier source). The integers are the recipe: given again, they
    give themselves.

    Raises ``ValueError`` for weights that are no numbers, negative, not finite or all 0, and for a positive weight too
    small for a share of 2^-32.
    """
    exact = [_fraction(weight, index) for index, weight in enumerate(weights)]
    if not any(exact):
        raise ValueError(f"weights: expected at least one weight above 0, got {list(weights)!r}")
    scale = lcm(*(fraction.denominator for fraction in exact))
    counts = _reduced([int(fraction * scale) for fraction in exact])
    total = sum(counts)
    if total > MAX_PERIOD:
        counts = rounded([Fraction(count * MAX_PERIOD, total) for count in counts], MAX_PERIOD)
        for index, count in enumerate(counts):
            if exact[index] and not count:
                raise ValueError(
                    f"weights[{index}]: {weights[index]!r} is less than 2^-32 of the sum and would never be given; "
                    "expected 0 or more than that"
                )
        counts = _reduced(counts)
    return tuple(counts)


def rounded(exact: Sequence[Fraction], total: int) -> list[int]:
    """Numbers that add up to ``total`` as whole ones that do, by largest remainder; of equals the first."""
    found = [floor(value) for value in exact]
    behind = sorted(range(len(exact)), key=lambda place: found[place] - exact[place])
    for place in behind[: total - sum(found)]:
        found[place] += 1
    return found


def _fraction(weight: Weight, index: int) -> Fraction:
    where = f"weights[{index}]: expected a number ≥ 0, got {weight!r}"
    if isinstance(weight, bool | np.bool_):
        raise ValueError(where)
    try:
        # the str of a float, numpy's too, is the shortest decimal of its own precision
        fraction = Fraction(str(weight) if isinstance(weight, float | np.number) else weight)
    except (ValueError, TypeError, OverflowError, ZeroDivisionError) as error:
        raise ValueError(where) from error
    if fraction < 0:
        raise ValueError(where)
    return fraction


def _reduced(counts: list[int]) -> list[int]:
    divisor = gcd(*counts)
    return [count // divisor for count in counts]


class _Node(NamedTuple):
    """A blend of two words."""

    left_weight: int
    weight: int
    left: int
    right: int


class Word:
    """The word of ``weights``, integers ≥ 0 with a sum of 1 to 2^32; a source is its index."""

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = tuple(weights)
        self.period = sum(self.weights)
        if not 1 <= self.period <= MAX_PERIOD or min(self.weights) < 0:
            raise ValueError(f"weights: expected integers ≥ 0 with a sum of 1 to 2^32, got {self.weights}")
        # Children are numbers: 0..leaves-1 are the sources of positive weight, in order; then the nodes as they arise.
        # The number breaks ties, so the tree is a function of the weights alone.
        self._leaves = [source for source, weight in enumerate(self.weights) if weight]
        self._nodes: list[_Node] = []
        heap = [(self.weights[source], number) for number, source in enumerate(self._leaves)]
        heapq.heapify(heap)
        parent: dict[int, int] = {}
        while len(heap) > 1:
            (left_weight, left), (right_weight, right) = heapq.heappop(heap), heapq.heappop(heap)
            number = len(self._leaves) + len(self._nodes)
            self._nodes.append(_Node(left_weight, left_weight + right_weight, left, right))
            parent[left] = parent[right] = number
            heapq.heappush(heap, (left_weight + right_weight, number))
        self._climbs = {source: self._climb(number, parent) for number, source in enumerate(self._leaves)}

    def letters(self, n: U64) -> Iterator[tuple[int, U64 | NDArray[np.intp] | slice, U64]]:
        """The letters at positions ``n`` (uint64 [m], below 2^63), by source.

        Yields (source, where in ``n``, its rank there: how many letters of this source stand before). Sources that do
        not occur are left out; a source that holds all of ``n`` comes with a slice.
        """
        period = np.uint64(self.period)
        turn = n // period
        stack: list[tuple[int, NDArray[np.intp] | slice, U64]] = [
            (len(self._leaves) + len(self._nodes) - 1, slice(None), n - turn * period)
        ]
        while stack:
            number, where, m = stack.pop()
            if number < len(self._leaves):
                source = self._leaves[number]
                yield source, where, m + turn[where] * np.uint64(self.weights[source])
                continue
            a, total, left, right = self._nodes[number - len(self._leaves)]
            scaled = m * np.uint64(a)
            scaled += np.uint64(total // 2)
            lefts = scaled // np.uint64(total)
            scaled -= lefts * np.uint64(total)
            is_left = scaled >= np.uint64(total - a)
            for child, ranks, mask in ((right, m - lefts, ~is_left), (left, lefts, is_left)):
                chosen = np.flatnonzero(mask)
                if chosen.size:
                    stack.append((child, chosen if isinstance(where, slice) else where[chosen], ranks[chosen]))

    def rank(self, n: int) -> list[int]:
        """How many of the first ``n`` letters are each source, one number a weight."""
        turn, m = divmod(n, self.period)
        counts = [turn * weight for weight in self.weights]
        stack = [(len(self._leaves) + len(self._nodes) - 1, m)]
        while stack:
            number, m = stack.pop()
            if number < len(self._leaves):
                counts[self._leaves[number]] += m
                continue
            node = self._nodes[number - len(self._leaves)]
            lefts = (m * node.left_weight + node.weight // 2) // node.weight
            stack += [(node.left, lefts), (node.right, m - lefts)]
        return counts

    def select(self, source: int, k: U64) -> U64:
        """The positions of letters number ``k`` (uint64 [m], from 0) of a source of positive weight.

        The inverse of :meth:`letters`; exact where the position is below 2^63.
        """
        weight = np.uint64(self.weights[source])
        turn = k // weight
        k = k - turn * weight
        for a, total, from_left in self._climbs[source]:
            if from_left:
                k = ((k + np.uint64(1)) * np.uint64(total) - np.uint64(total // 2 + 1)) // np.uint64(a)
            else:
                k = (k * np.uint64(total) + np.uint64(total // 2)) // np.uint64(total - a)
        return turn * np.uint64(self.period) + k

    def _climb(self, number: int, parent: dict[int, int]) -> list[tuple[int, int, bool]]:
        """(left weight, weight, whether from the left) of the nodes from a leaf up to the root."""
        path = []
        while number in parent:
            node = self._nodes[parent[number] - len(self._leaves)]
            path.append((node.left_weight, node.weight, node.left == number))
            number = parent[number]
        return path
