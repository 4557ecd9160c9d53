"""The training order: a pure, invertible function of a seed and a table of phases.

Position g of the order is the g-th sample a run trains on; it is window w of source s in epoch e, and both directions
are computed, not looked up:

    g ─ block shuffle ─▶ n ─ blended word ─▶ source s, rank j ─ carry, frontier ─▶ running index κ = e·N + i
      ─ the source's permutation of epoch e ─▶ window w

A *phase* opens where the recipe, the batch size or the sources change. Within it the word gives each source its share,
and a keyed permutation shuffles each block. It goes on where the phase before has left each source (frontier, carry),
so no window is given twice in an epoch, and none is left out.

A sample is a function of what opens at or before it: a phase that is added later changes nothing before its start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quern.config import digest
from quern.mixtures.permutation import CONSTANTS, base_key, permute, unpermute
from quern.mixtures.phases import (
    MAX_SAMPLES,
    NONE,
    Phase,
    PhaseState,
    PhaseTable,
    ResolvedPhase,
    checked_integer,
    subkeys,
)
from quern.mixtures.word import MAX_PERIOD, Weight

__all__ = ["MAX_SAMPLES", "Order", "Phase", "ResolvedPhase"]

U64 = NDArray[np.uint64]

CHUNK = 1 << 18
"""Positions computed at a time: bounds the memory beside the result."""
READ_AHEAD = 1 << 14
"""Samples computed at a time for steps that are read one after the other."""


class Order:
    """Which (source, epoch, window) each position of a run holds, and where each of them is given.

    ``weights``: one a source, of any sum (see :func:`~quern.mixtures.word.quantise`); 0 = not given in this phase.
    ``windows``: how many windows each source has. ``phases``: those after the first, which begins at step 0 with
    ``weights``. ``ids``: the identity of each source, which keys its permutations (default: its index in decimal);
    data whose number of windows changes is a new source. ``seq_len`` enters nothing but the hash.
    ``global_batch``: samples a step. ``block``: samples that are shuffled together, by default the global batch; a
    block that divides every global batch leaves no holes at a phase's end.

    Raises ``ValueError`` naming what is wrong.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        windows: Sequence[int],
        seed: int,
        phases: Sequence[Phase] | None = None,
        *,
        ids: Sequence[str] | None = None,
        seq_len: int | None = None,
        global_batch: int = 1024,
        block: int | None = None,
    ) -> None:
        self.seed = checked_integer(seed, "seed")
        self.seq_len = None if seq_len is None else checked_integer(seq_len, "seq_len", 1)
        self.windows = tuple(
            checked_integer(count, f"windows[{source}]", 0, MAX_SAMPLES) for source, count in enumerate(windows)
        )
        self.num_sources = len(self.windows)
        self.ids = _identities(ids, self.num_sources)
        self._source_keys = [base_key(self.seed, "src", ident) for ident in self.ids]
        self._table = PhaseTable(self.windows, self.seed)
        self._table.start(weights, global_batch, block)
        for phase in phases or ():
            self._table.open(phase)
        self.phases: tuple[ResolvedPhase, ...] = tuple(state.row for state in self._table.states)
        self._ahead = (0, (NONE, NONE, NONE))

    # ---- the order and its inverse

    def sample(self, g: int) -> tuple[int, int, int]:
        """(source, epoch, window) of position ``g``."""
        source, epoch, window = self._samples(np.array([checked_integer(g, "g", 0, MAX_SAMPLES)], np.uint64))
        return int(source[0]), int(epoch[0]), int(window[0])

    def samples(self, g: ArrayLike) -> tuple[U64, U64, U64]:
        """Sources, epochs and windows (uint64, of the shape of ``g``) of positions ``g`` ≥ 0, in any sequence.

        Memory beside the result does not grow with the number of positions.
        """
        positions = _integers(g, "g")
        if positions.size and int(positions.max()) >= MAX_SAMPLES:
            raise ValueError(f"g: expected positions below 2^62, got {positions.max()}")
        sources, epochs, windows = self._samples(positions.ravel())
        return sources.reshape(positions.shape), epochs.reshape(positions.shape), windows.reshape(positions.shape)

    def locate(self, source: int, epoch: int, window: int) -> int | None:
        """The position at which the window is given in the epoch; None if never (below position 2^62)."""
        epoch = min(checked_integer(epoch, "epoch", 0), 2 * MAX_SAMPLES)
        window = min(checked_integer(window, "window", 0), 2 * MAX_SAMPLES)
        positions, found = self.locate_many(source, np.array([epoch], np.uint64), np.array([window], np.uint64))
        return int(positions[0]) if found[0] else None

    def locate_many(self, source: int, epochs: ArrayLike, windows: ArrayLike) -> tuple[U64, NDArray[np.bool_]]:
        """Positions (uint64) of windows of a source and whether they are given; 0 where they are not.

        ``epochs`` and ``windows``: integers ≥ 0, broadcast against each other.
        """
        source = checked_integer(source, "source", 0, self.num_sources)
        epoch, window = np.broadcast_arrays(_integers(epochs, "epochs"), _integers(windows, "windows"))
        positions = np.zeros(epoch.size, np.uint64)
        found = np.zeros(epoch.size, np.bool_)
        if self.windows[source]:
            for start in range(0, epoch.size, CHUNK):
                part = slice(start, start + CHUNK)
                self._locate(source, epoch.ravel()[part], window.ravel()[part], positions[part], found[part])
        return positions.reshape(epoch.shape), found.reshape(epoch.shape)

    # ---- steps

    def first_sample(self, step: int) -> int:
        """The first position that ``step`` reads."""
        row = self._table.at_step(checked_integer(step, "step", 0)).row
        return row.first_sample + (int(step) - row.first_step) * row.global_batch

    def global_batch_at(self, step: int) -> int:
        """Samples in ``step``."""
        return self._table.at_step(checked_integer(step, "step", 0)).row.global_batch

    def batch(self, step: int) -> tuple[U64, U64, U64]:
        """Sources, epochs and windows of a step's samples, each uint64 [global batch].

        When steps are read in sequence, those of some steps are computed together.
        """
        first, size = self.first_sample(step), self.global_batch_at(step)
        begin, known = self._ahead
        end = begin + known[0].size
        if not (begin <= first and first + size <= end):
            if first + size > MAX_SAMPLES:
                raise ValueError(f"step: expected one whose samples lie below position 2^62, got {step}")
            count = min(max(size, READ_AHEAD), MAX_SAMPLES - first) if first == end else size
            begin, known = first, self._samples(np.arange(first, first + count, dtype=np.uint64))
            self._ahead = (begin, known)
        part = slice(first - begin, first - begin + size)
        return known[0][part].copy(), known[1][part].copy(), known[2][part].copy()

    def consumed(self, g: int) -> tuple[int, ...]:
        """How many of the first ``g`` samples are of each source."""
        state = self._table.at_sample(checked_integer(g, "g", 0, MAX_SAMPLES))
        return tuple(state.consumed(int(g) - state.row.first_sample))

    # ---- identity

    def agrees(self, other: Order, before_step: int) -> bool:
        """Whether both orders have the same samples of the same sources in all steps before ``before_step``."""
        return self._prefix(before_step) == other._prefix(before_step)

    def to_dict(self) -> dict[str, Any]:
        """The order as plain JSON: what :meth:`from_dict` needs and the hash covers."""
        return {
            "seed": self.seed,
            "seq_len": self.seq_len,
            "sources": [{"id": ident, "windows": count} for ident, count in zip(self.ids, self.windows, strict=True)],
            "phases": [{**vars(phase), "weights": list(phase.weights)} for phase in self.phases],
            "constants": {**CONSTANTS, "max_period": MAX_PERIOD},
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """The order that :meth:`to_dict` wrote down. Raises ``ValueError`` when it cannot be made again exactly."""
        try:
            rows = record["phases"]
            order = cls(
                rows[0]["weights"],
                [source["windows"] for source in record["sources"]],
                record["seed"],
                [
                    Phase(row["first_step"], tuple(row["weights"]), row["global_batch"], row["block"])
                    for row in rows[1:]
                ],
                ids=[source["id"] for source in record["sources"]],
                seq_len=record["seq_len"],
                global_batch=rows[0]["global_batch"],
                block=rows[0]["block"],
            )
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"order: expected the record of an order: {type(error).__name__} {error}") from error
        made = order.to_dict()
        for field, value in made.items():
            if value != record.get(field):
                raise ValueError(f"order: {field} would be {value!r}, but the record says {record.get(field)!r}")
        return order

    @cached_property
    def hash(self) -> str:
        """BLAKE2b-128 (hex) of the canonical JSON of :meth:`to_dict`."""
        return digest(self.to_dict())

    # ---- within

    def _samples(self, g: U64) -> tuple[U64, U64, U64]:
        out = np.empty_like(g), np.empty_like(g), np.empty_like(g)
        for start in range(0, g.size, CHUNK):
            part = g[start : start + CHUNK]
            sources, epochs, windows = (array[start : start + CHUNK] for array in out)
            first, last = self._table.at_sample(int(part.min())), self._table.at_sample(int(part.max()))
            if first is last:
                self._fill(first, part, sources, epochs, windows)
                continue
            numbers = np.searchsorted(np.array(self._table.first_samples, np.uint64), part, side="right") - 1
            for number in np.unique(numbers):
                chosen = np.flatnonzero(numbers == number)
                filled = np.empty((3, chosen.size), np.uint64)
                self._fill(self._table.states[number], part[chosen], *filled)
                sources[chosen], epochs[chosen], windows[chosen] = filled
        return out

    def _fill(self, state: PhaseState, g: U64, sources: U64, epochs: U64, windows: U64) -> None:
        """Writes the samples at ``g`` (uint64 [m], all in the phase) to the three arrays [m]."""
        for source, where, index in state.places(g - np.uint64(state.row.first_sample)):
            count = np.uint64(self.windows[source])
            epoch = index // count
            index -= epoch * count
            sources[where] = source
            epochs[where] = epoch
            windows[where] = permute(index, self.windows[source], subkeys(self._source_keys[source], epoch))

    def _locate(self, source: int, epoch: U64, window: U64, positions: U64, found: NDArray[np.bool_]) -> None:
        """Writes where windows (uint64 [m]) are given to ``positions`` and ``found`` [m], at first 0 and False."""
        count = self.windows[source]
        real = np.flatnonzero((window < np.uint64(count)) & (epoch < np.uint64(2 * MAX_SAMPLES // count)))
        epoch = epoch[real]
        index = unpermute(window[real], count, subkeys(self._source_keys[source], epoch)) + epoch * np.uint64(count)
        ends = [*self._table.first_samples[1:], MAX_SAMPLES]
        for state, end in zip(self._table.states, ends, strict=True):
            weight = state.row.weights[source]
            if not weight:
                continue
            frontier, carry = state.frontiers[source], state.carries.get(source, NONE)
            rank = index - np.uint64(frontier - carry.size)
            here = index >= np.uint64(frontier)
            if carry.size:
                place = np.searchsorted(carry, index).astype(np.uint64)
                carried = carry[np.minimum(place, np.uint64(carry.size - 1))] == index
                rank[carried] = place[carried]
                here |= carried
            rank += np.uint64(state.starts[source])
            # beyond the last position of the order, products in select could leave 64 bits
            last = (state.row.offset + MAX_SAMPLES + state.row.block) // state.word.period
            chosen = np.flatnonzero(here & (rank // np.uint64(weight) <= np.uint64(last)))
            n = state.word.select(source, rank[chosen]) - np.uint64(state.row.offset)
            block = np.uint64(state.row.block)
            number = n // block
            g = unpermute(n - number * block, state.row.block, subkeys(state.key, number))
            g += number * block
            g += np.uint64(state.row.first_sample)
            inside = g < np.uint64(end)
            chosen = real[chosen[inside]]
            positions[chosen] = g[inside]
            found[chosen] = True

    def _prefix(self, before_step: int) -> tuple[object, ...]:
        rows = [phase for phase in self.phases if phase.first_step < before_step]
        active = {source for phase in rows for source, weight in enumerate(phase.weights) if weight}
        return (
            (self.seed, self.seq_len) if rows else None,
            {source: (self.ids[source], self.windows[source]) for source in active},
            [
                {**vars(phase), "weights": {source: weight for source, weight in enumerate(phase.weights) if weight}}
                for phase in rows
            ],
        )


def _identities(ids: Sequence[str] | None, num_sources: int) -> tuple[str, ...]:
    if ids is None:
        return tuple(str(source) for source in range(num_sources))
    if len(ids) != num_sources:
        raise ValueError(f"ids: expected {num_sources}, one for each entry of windows, got {len(ids)}")
    for source, ident in enumerate(ids):
        if not isinstance(ident, str) or "\0" in ident:
            raise ValueError(f"ids[{source}]: expected text without NUL, got {ident!r}")
        if ident in ids[:source]:
            raise ValueError(f"ids[{source}]: {ident!r} is given twice; expected an identity for each source")
    return tuple(ids)


def _integers(values: ArrayLike, where: str) -> U64:
    array = np.asarray(values)
    if not array.size:
        return array.astype(np.uint64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{where}: expected integers from 0 to 2^64 - 1, got {array.dtype} {array.ravel()[0]!r}")
    if array.dtype.kind == "i" and int(array.min()) < 0:
        raise ValueError(f"{where}: expected integers ≥ 0, got {array.min()}")
    return array.astype(np.uint64, copy=False)
