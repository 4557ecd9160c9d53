"""The phase table of an order: its rows, and what each phase needs to know of those before it.

A phase continues each source where the phase before has left it: first with its *carry*, the running indices below the
frontier that were not given yet, then at its *frontier*, the first index that was never given. The carry comes from the
part of the last block after the cut; it is empty if the block divides the cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quern.mixtures.permutation import base_key, permute, subkey
from quern.mixtures.word import MAX_PERIOD, Weight, Word, quantise

__all__ = ["MAX_SAMPLES", "NONE", "Phase", "PhaseState", "PhaseTable", "ResolvedPhase", "checked_integer", "subkeys"]

U64 = NDArray[np.uint64]

MAX_SAMPLES = 2**62
"""An order is defined below this position; beyond it, sums could leave 64 bits."""
NONE = np.empty(0, np.uint64)


def checked_integer(value: int, where: str, least: int | None = None, below: int | None = None) -> int:
    """``value`` as an int, if it is one and in range; else a ``ValueError`` that begins with ``where``."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise ValueError(f"{where}: expected an integer, got {value!r}")
    if (least is not None and value < least) or (below is not None and value >= below):
        wanted = f"≥ {least}" + (f" and < {below}" if below is not None else "")
        raise ValueError(f"{where}: expected an integer {wanted}, got {value}")
    return int(value)


def subkeys(base: int, numbers: U64) -> int | U64:
    """Subkeys ``numbers`` (uint64 [m]) of ``base``: a single key if the numbers are all the same."""
    if numbers.size and (numbers == numbers[0]).all():
        return subkey(base, int(numbers[0]))
    return subkey(base, numbers)


@dataclass(frozen=True)
class Phase:
    """A change of the order from ``first_step`` on."""

    first_step: int
    weights: tuple[Weight, ...] | None = None
    """None: the recipe goes on."""
    global_batch: int | None = None
    """Samples a step; None: unchanged."""
    block: int | None = None
    """Samples that are shuffled together; None: the phase's global batch."""


@dataclass(frozen=True)
class ResolvedPhase:
    """A row of the phase table, as it is recorded."""

    first_step: int
    first_sample: int
    weights: tuple[int, ...]
    global_batch: int
    block: int
    offset: int
    """Where in the word the phase begins."""


@dataclass(frozen=True)
class PhaseState:
    """A row of the table and the state that follows from the rows before."""

    row: ResolvedPhase
    word: Word
    key: int
    """Of the block shuffle."""
    starts: list[int]
    """Rank of each source at the offset."""
    frontiers: list[int]
    carries: dict[int, U64]
    """Source → running indices, ascending. A source without a carry is not in it."""
    given: list[int]
    """Samples of each source before the phase."""

    def places(self, x: U64) -> Iterator[tuple[int, Any, U64]]:
        """(source, where in ``x``, running indices) of the samples at ``x`` (uint64 [m]) of the phase, by source."""
        block = np.uint64(self.row.block)
        number = x // block
        n = permute(x - number * block, self.row.block, subkeys(self.key, number))
        n += number * block
        n += np.uint64(self.row.offset)
        for source, where, rank in self.word.letters(n):
            rank -= np.uint64(self.starts[source])
            carry = self.carries.get(source, NONE)
            index = rank + np.uint64(self.frontiers[source] - carry.size)
            if carry.size:
                first = np.flatnonzero(rank < np.uint64(carry.size))
                index[first] = carry[rank[first]]
            yield source, where, index

    def counts(self, x: int) -> list[int]:
        """Letters of each source among the first ``x`` of the phase, before the shuffle."""
        ends = self.word.rank(self.row.offset + x)
        return [end - start for end, start in zip(ends, self.starts, strict=True)]

    def consumed(self, x: int) -> list[int]:
        """Samples of each source before the phase and among its first ``x``."""
        whole = x - x % self.row.block
        counts = [before + count for before, count in zip(self.given, self.counts(whole), strict=True)]
        for source, _, index in self.places(np.arange(whole, x, dtype=np.uint64)):
            counts[source] += index.size
        return counts

    def cut(self, x: int) -> tuple[list[int], dict[int, U64]]:
        """Frontiers and carries once the first ``x`` samples of the phase have been given."""
        full = -(-x // self.row.block) * self.row.block
        holes = {source: index for source, _, index in self.places(np.arange(x, full, dtype=np.uint64))}
        frontiers, carries = list(self.frontiers), {}
        for source, count in enumerate(self.counts(full)):
            carry = self.carries.get(source, NONE)
            frontier = frontiers[source] + max(0, count - carry.size)
            left = np.sort(np.concatenate([holes.get(source, NONE), carry[count:]]))
            # what lies right below the frontier is no hole: the frontier is lower
            tail = int(np.count_nonzero(left == np.arange(frontier - left.size, frontier, dtype=np.uint64)))
            frontiers[source] = frontier - tail
            if left.size > tail:
                carries[source] = left[: left.size - tail]
        return frontiers, carries


class PhaseTable:
    """The phases of an order, in sequence."""

    def __init__(self, windows: Sequence[int], seed: int) -> None:
        self.windows = windows
        self.seed = seed
        self.states: list[PhaseState] = []
        self.first_samples: list[int] = []
        self.first_steps: list[int] = []

    def at_sample(self, g: int) -> PhaseState:
        return self.states[bisect_right(self.first_samples, g) - 1]

    def at_step(self, step: int) -> PhaseState:
        return self.states[bisect_right(self.first_steps, step) - 1]

    def start(self, weights: Sequence[Weight], global_batch: int, block: int | None) -> None:
        """Opens the first phase, at step 0. Raises ``ValueError`` naming what is wrong."""
        recipe = self._recipe(weights, "")
        global_batch = checked_integer(global_batch, "global_batch", 1, MAX_PERIOD)
        block = global_batch if block is None else checked_integer(block, "block", 1, MAX_PERIOD)
        nothing = [0] * len(self.windows)
        self._add(ResolvedPhase(0, 0, recipe, global_batch, block, 0), Word(recipe), nothing, {}, nothing)

    def open(self, phase: Phase) -> None:
        """Opens the next phase. Raises ``ValueError`` naming what is wrong."""
        number, last = len(self.states), self.states[-1]
        where = f"phases[{number - 1}]"
        if not isinstance(phase, Phase):
            raise ValueError(f"{where}: expected a Phase, got {phase!r}")
        first_step = checked_integer(phase.first_step, f"{where}.first_step", last.row.first_step + 1)
        global_batch, block, recipe, word = last.row.global_batch, phase.block, last.row.weights, last.word
        if phase.global_batch is not None:
            global_batch = checked_integer(phase.global_batch, f"{where}.global_batch", 1, MAX_PERIOD)
        block = global_batch if block is None else checked_integer(block, f"{where}.block", 1, MAX_PERIOD)
        if phase.weights is not None:
            recipe = self._recipe(phase.weights, f"{where}.")
        length = (first_step - last.row.first_step) * last.row.global_batch
        first_sample = last.row.first_sample + length
        if first_sample >= MAX_SAMPLES:
            raise ValueError(f"{where}.first_step: expected one below position 2^62, got position {first_sample}")
        if recipe == last.row.weights:
            # a word begun anew in every short phase would starve small sources
            offset = last.row.offset + length
        else:
            word = Word(recipe)
            offset = base_key(self.seed, "off", str(number)) % word.period
        row = ResolvedPhase(first_step, first_sample, recipe, global_batch, block, offset)
        self._add(row, word, *last.cut(length), last.consumed(length))

    def _add(
        self, row: ResolvedPhase, word: Word, frontiers: list[int], carries: dict[int, U64], given: list[int]
    ) -> None:
        key = base_key(self.seed, "block", str(len(self.states)))
        self.states.append(PhaseState(row, word, key, word.rank(row.offset), frontiers, carries, given))
        self.first_samples.append(row.first_sample)
        self.first_steps.append(row.first_step)

    def _recipe(self, weights: Sequence[Weight], within: str) -> tuple[int, ...]:
        if len(weights) != len(self.windows):
            raise ValueError(f"{within}weights: expected {len(self.windows)}, one a source, got {len(weights)}")
        try:
            recipe = quantise(weights)
        except ValueError as error:
            raise ValueError(f"{within}{error}") from error
        for source, weight in enumerate(recipe):
            if weight and not self.windows[source]:
                raise ValueError(
                    f"windows[{source}]: expected at least 1, got 0: {within}weights[{source}] is {weights[source]!r}"
                )
        return recipe
