"""Builds a rank's micro-batches from order and shards, a pure function of (order, data step, rank), with prefetching.

A step is *planned* for the whole global batch, from boundaries alone (:mod:`.step_plan`): which documents touch each
window, how many targets there are, which rank computes what. Only a rank's own windows are then read.

Shape legend: B windows of a micro-batch, L tokens a window, N windows (of a step, or of some of its micro-batches),
M documents that touch them, S pieces: a document's part among a window's inputs.
"""

from __future__ import annotations

import resource
import threading
import time
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quern.errors import InputError
from quern.parallel.planning.segments import ranges
from quern.train.batches.assignment import check_divides
from quern.train.batches.boundaries import Boundaries, Documents, open_boundaries
from quern.train.batches.corpus import Corpus
from quern.train.batches.prefetch import Prefetch
from quern.train.batches.step_plan import StepPlan, assign, plan_step
from quern.train.config import TrainConfig

__all__ = ["IGNORE", "Loader", "MicroBatch", "Samples", "StepBatch", "open_loader"]

#: Stands where a position has no target.
IGNORE = -100

#: The order is asked for this many steps at once, and for more where steps are small.
_STEPS_AHEAD = 16
_SAMPLES_AHEAD = 1 << 14
#: Tokens of micro-batches that are made together: their arrays stay in the cache, and calls are few.
_TOKENS_TOGETHER = 1 << 17
#: Tokens and targets as int64, positions and documents as int32.
_BYTES_PER_TOKEN = 24
#: Files and sockets a process holds besides the shards.
_OTHER_FILES = 1024

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


class Samples(Protocol):
    """The interface of an order that the loader needs (:class:`quern.mixtures.order.Order` is one)."""

    @property
    def windows(self) -> Sequence[int]: ...
    @property
    def phases(self) -> Sequence[Any]: ...
    def first_sample(self, step: int) -> int: ...
    def global_batch_at(self, step: int) -> int: ...
    def samples(self, positions: Any) -> tuple[U64, U64, U64]: ...


@dataclass(frozen=True)
class MicroBatch:
    """Windows one rank computes at a time. The arrays are the reader's own: they may be written to."""

    tokens_BL: I64
    targets_BL: I64
    """The next token; :data:`IGNORE` where there is none to learn."""
    positions_BL: I32
    """With document masks they restart at every document's and window's start."""
    cu_seqlens: I32
    """[S + 1]: where each piece starts in the flattened B·L tokens, then B·L; without document masks, rows."""
    documents_BL: I32
    """Number of the document in its row, from 0; without document masks 0."""
    sources: U64
    """[B], numbers of the order; likewise ``epochs`` and ``windows``."""
    epochs: U64
    windows: U64
    indices: I64
    """[B], place in the global batch."""


@dataclass(frozen=True)
class StepBatch:
    """A rank's share of a step."""

    data_step: int
    micro_batches: tuple[MicroBatch, ...]
    valid_tokens: int
    """Targets of the whole global batch, over all ranks."""


class _Blocks:
    """Memory for arrays, used again once nobody holds any of them: fresh pages cost more than what is written there."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._free: list[NDArray[np.uint8]] = []

    def take(self) -> NDArray[np.uint8]:
        """A buffer uint8 [size_bytes], not cleared, reused once the last array made of it is freed."""
        try:
            block = self._free.pop()  # not asked first: another thread may take the last one in between
        except IndexError:
            block = np.empty(self._size_bytes, np.uint8)
        lent = np.frombuffer(block.data, np.uint8)
        weakref.finalize(lent, self._free.append, block).atexit = False
        return lent


class Loader:
    """Reads the steps of ``order`` for one of ``world`` data-parallel ranks.

    ``boundaries``: one a source of the corpus. ``document_mask``: attention stays inside a document, and the first
    token of a document is no target; a purged span is no target in any case. ``source_map``: the corpus's number of
    each source of the order, None for one whose data is not given here (by default they are the same).

    Attributes: ``spent_s``, time in :meth:`take` so far; ``order_s``, the part of it spent in the order.

    Raises:
        InputError: ranks and micro-batches do not divide every global batch of the order, or the order was made for
            other windows than the corpus has.
    """

    def __init__(
        self,
        corpus: Corpus,
        order: Samples,
        *,
        rank: int,
        world: int,
        micro_batch: int,
        document_mask: bool,
        boundaries: Sequence[Boundaries],
        source_map: Sequence[int | None] | None = None,
    ) -> None:
        if not 0 <= rank < world:
            raise ValueError(f"rank: expected 0 to {world - 1}, got {rank}")
        for global_batch in dict.fromkeys(phase.global_batch for phase in order.phases):
            if problem := check_divides(global_batch, world, micro_batch):
                raise InputError(problem)
        self._order, self._rank, self._world, self._micro_batch = order, rank, world, micro_batch
        self._seq_len, self._document_mask = corpus.seq_len, document_mask
        self._corpus, self._boundaries = corpus, tuple(boundaries)
        self._source_map = tuple(range(len(corpus.readers)) if source_map is None else source_map)
        self._check_sources()
        _allow_open_files(sum(len(reader.shards) for reader in corpus.readers))
        self._shards = [
            [reader.tokens(int(a), int(b)) for a, b in zip(reader.offsets, reader.offsets[1:], strict=False)]
            for reader in corpus.readers
        ]
        self._offsets = [reader.offsets.tolist() for reader in corpus.readers]
        most = max(phase.global_batch for phase in order.phases)
        self._together = max(1, min(_TOKENS_TOGETHER // (micro_batch * corpus.seq_len), most // world // micro_batch))
        self._blocks = _Blocks(self._together * micro_batch * corpus.seq_len * _BYTES_PER_TOKEN)
        self._steps_ahead = max(_STEPS_AHEAD, _SAMPLES_AHEAD // most)
        self._ahead: OrderedDict[int, tuple[U64, U64, U64]] = OrderedDict()
        self._ahead_lock = threading.Lock()
        self._prefetches: weakref.WeakSet[Prefetch[StepBatch]] = weakref.WeakSet()
        self.spent_s = 0.0
        self.order_s = 0.0

    def _check_sources(self) -> None:
        windows, readers = self._order.windows, self._corpus.readers
        if len(self._source_map) != len(windows):
            raise InputError(f"order: has {len(windows)} sources, expected {len(self._source_map)} as the data has")
        if len(self._boundaries) != len(readers):
            raise ValueError(f"boundaries: expected {len(readers)}, one a source, got {len(self._boundaries)}")
        for source, own in enumerate(self._source_map):
            if own is not None and windows[source] != self._corpus.windows[own]:
                raise InputError(
                    f"{readers[own].path}: has {self._corpus.windows[own]} windows of seq_len {self._seq_len}, "
                    f"expected {windows[source]} as in the order (source {source})"
                )
        for reader, chosen, own_boundaries in zip(readers, self._corpus.chosen, self._boundaries, strict=True):
            documents = reader.num_documents if chosen is None else chosen.documents
            if len(own_boundaries) != documents:
                raise InputError(
                    f"{own_boundaries.path}: has {len(own_boundaries)} documents, expected {documents} as "
                    f"{reader.path} has"
                )

    def take(self, data_step: int) -> StepBatch:
        """The rank's share of a step; equal calls give equal arrays, on whatever thread and in whatever order."""
        began = time.perf_counter()
        plan, places_WMB = self.plan(data_step)
        places = places_WMB[self._rank]
        micro_batches: list[MicroBatch] = []
        for first in range(0, len(places), self._together):
            micro_batches += self._make(plan, places[first : first + self._together])
        self.spent_s += time.perf_counter() - began
        return StepBatch(data_step, tuple(micro_batches), int(plan.valid_R.sum()))

    def prefetch(self, first: int, stop: int | None, depth: int) -> Prefetch[StepBatch]:
        """Steps [first, stop) in order, up to ``depth`` of them made ahead by a thread; no end with ``stop`` None."""
        prefetch = Prefetch(self.take, first, stop, depth)
        self._prefetches.add(prefetch)
        return prefetch

    def close(self) -> None:
        """Stop the threads of every :meth:`prefetch`."""
        for prefetch in list(self._prefetches):
            prefetch.close()

    # ---- the plan

    def plan(self, data_step: int) -> tuple[StepPlan, I64]:
        """The plan of a step, and the places in its global batch that each rank computes: int64 [world, micro-batches,
        micro_batch]."""

        def documents_of(source: int, starts_N: I64) -> Documents:
            own = self._source_map[source]
            if own is None:
                raise InputError(f"data step {data_step}: reads source {source} of the order, whose data is not given")
            return self._boundaries[own].between(starts_N, self._seq_len)

        samples, mask = self._samples(data_step), self._document_mask
        plan = plan_step(samples, len(self._source_map), self._seq_len, mask, documents_of)
        return plan, assign(plan, self._world, self._micro_batch, mask)

    def _samples(self, data_step: int) -> tuple[U64, U64, U64]:
        """(sources, epochs, windows) of a step, each uint64 [global batch]."""
        number, within = divmod(data_step, self._steps_ahead)
        first_step = number * self._steps_ahead
        with self._ahead_lock:
            began = time.perf_counter()
            first = self._order.first_sample(first_step)
            if number not in self._ahead:
                stop = self._order.first_sample(first_step + self._steps_ahead)
                self._ahead[number] = self._order.samples(np.arange(first, stop, dtype=np.uint64))
                if len(self._ahead) > 2:
                    self._ahead.popitem(last=False)
            sources, epochs, windows = self._ahead[number]
            start = self._order.first_sample(first_step + within) - first
            part = slice(start, start + self._order.global_batch_at(data_step))
            self.order_s += time.perf_counter() - began
        return sources[part], epochs[part], windows[part]

    # ---- the arrays

    def _make(self, plan: StepPlan, places: I64) -> Iterator[MicroBatch]:
        """Micro-batches whose places in the global batch are the rows of ``places``."""
        size, length = places.shape[1], self._seq_len
        places_N = places.ravel()
        num = len(places_N)
        wide, narrow = np.split(self._blocks.take()[: num * length * _BYTES_PER_TOKEN], [num * length * 16])
        tokens_NL, targets_NL = wide.view(np.int64).reshape(2, num, length)
        positions_NL, documents_NL = narrow.view(np.int32).reshape(2, num, length)
        sources_N = plan.sources_N[places_N]
        self._read(sources_N, plan.starts_N[places_N], tokens_NL, targets_NL)
        rows_N = plan.rows_N[places_N]
        counts_N = plan.counts_R[rows_N]
        index_M = ranges(plan.before_R[rows_N], counts_N)
        starts_M, purged_M = plan.starts_M[index_M], plan.purged_M[index_M]
        flat_M = starts_M + np.repeat(np.arange(num) * length, counts_N)
        self._forget(targets_NL.reshape(-1), flat_M, starts_M, purged_M)
        if self._document_mask:
            cu_seqlens, rows = _pieces(flat_M, starts_M, counts_N, positions_NL, documents_NL)
        else:
            cu_seqlens = np.arange(0, (num + 1) * length, length, dtype=np.int32)
            rows = np.arange(num + 1)
            positions_NL[:] = np.arange(length, dtype=np.int32)
            documents_NL.fill(0)
        epochs_N, windows_N = plan.epochs_N[places_N], plan.windows_N[places_N]
        for first in range(0, num, size):
            part = slice(first, first + size)
            pieces = slice(int(rows[first]), int(rows[first + size]) + 1)
            yield MicroBatch(
                tokens_NL[part], targets_NL[part], positions_NL[part],
                cu_seqlens[pieces] - np.int32(first * length), documents_NL[part],
                sources_N[part], epochs_N[part], windows_N[part], places_N[part],
            )  # fmt: skip

    def _read(self, sources_N: U64, starts_N: I64, tokens_NL: I64, targets_NL: I64) -> None:
        """Write the inputs and the tokens after them, each [N, L]."""
        for row, (source, start) in enumerate(zip(sources_N.tolist(), starts_N.tolist(), strict=True)):
            own = self._source_map[source]
            assert own is not None  # the plan has refused it
            window = self._window(own, start)
            tokens_NL[row] = window[:-1]
            targets_NL[row] = window[1:]
        # what no verification has read may hold anything, and a GPU says only that something was out of range
        if max(targets_NL.max(), tokens_NL[:, 0].max()) >= self._corpus.vocab_size:
            largest_N = np.maximum(tokens_NL[:, 0], targets_NL.max(axis=1))
            row = int(largest_N.argmax())
            start, own = int(starts_N[row]), self._source_map[int(sources_N[row])]
            assert own is not None
            raise InputError(
                f"{self._corpus.readers[own].path}: expected ids below {self._corpus.vocab_size}, got {largest_N[row]} "
                f"in tokens {start} to {start + self._seq_len}; a shard is damaged, verify_shards=true says which"
            )

    def _window(self, own: int, start: int) -> NDArray[np.unsignedinteger]:
        stop, chosen = start + self._seq_len + 1, self._corpus.chosen[own]
        if chosen is None:
            return self._tokens(own, start, stop)
        first = int(chosen.starts.searchsorted(start, "right")) - 1
        last = int(chosen.starts.searchsorted(stop, "left"))
        edges = [start, *chosen.starts[first + 1 : last].tolist(), stop]
        parts = [
            self._tokens(own, begin + shift, end + shift)
            for begin, end, shift in zip(edges, edges[1:], chosen.shifts(first, last), strict=False)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _tokens(self, own: int, start: int, stop: int) -> NDArray[np.unsignedinteger]:
        """Tokens [start, stop) of the shards of a source."""
        offsets = self._offsets[own]
        shard = bisect_right(offsets, start) - 1
        if stop <= offsets[shard + 1]:
            origin = offsets[shard]
            return self._shards[own][shard][start - origin : stop - origin]
        parts = []
        while start < stop:
            origin, end = offsets[shard], min(stop, offsets[shard + 1])
            parts.append(self._shards[own][shard][start - origin : end - origin])
            start, shard = end, shard + 1
        return np.concatenate(parts)

    def _forget(self, targets: I64, flat_M: I64, starts_M: I64, purged_M: NDArray[np.bool_]) -> None:
        """Write :data:`IGNORE` where the next token is of a purged span or, with document masks, starts a document.

        ``targets``: int64 [N·L]; ``flat_M``: first input of each document in it.
        """
        if self._document_mask:
            targets[flat_M[starts_M > 0] - 1] = IGNORE
        where = np.flatnonzero(purged_M)
        if len(where):
            # The next document of the window starts where this one ends; the last one's end is the last target.
            last = np.append(starts_M[1:] <= 0, True)[where]
            row = flat_M[where] - starts_M[where]
            end = np.where(last, row + self._seq_len, np.append(flat_M[1:], 0)[where] - 1)
            first = row + np.maximum(starts_M[where], 1) - 1
            targets[ranges(first, end - first)] = IGNORE


def open_loader(
    config: TrainConfig, corpus: Corpus, order: Samples, cache: str, rank: int, world: int,
    source_map: Sequence[int | None] | None = None,
) -> Loader:  # fmt: skip
    """The loader of a config's run, by the boundaries that the folder ``cache`` holds, or gets."""
    return Loader(
        corpus, order, rank=rank, world=world, micro_batch=config.micro_batch, document_mask=config.document_mask,
        boundaries=open_boundaries(corpus.readers, cache, corpus.chosen), source_map=source_map,
    )  # fmt: skip


def _allow_open_files(count: int) -> None:
    """Room for ``count`` more open files: a memory map keeps its file's descriptor in Python, and the soft limit is
    often 1,024, the shards of 10^12 tokens. It is raised as far as the hard limit lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, raised), hard))


def _pieces(flat_M: I64, starts_M: I64, counts_N: I64, positions_NL: I32, documents_NL: I32) -> tuple[I32, I64]:
    """Write positions and documents; return cu_seqlens [S + 1] over N·L tokens and each row's first piece [N + 1]."""
    num, length = positions_NL.shape
    inside_M = starts_M < length  # a document that starts at the last target has no input in the window
    cu_seqlens = np.append(flat_M[inside_M], num * length).astype(np.int32)
    pieces_N = np.add.reduceat(inside_M, np.cumsum(counts_N) - counts_N, dtype=np.int64)
    rows = np.concatenate([[0], np.cumsum(pieces_N)])
    lengths_S = np.diff(cu_seqlens)
    number_S = (np.arange(len(lengths_S)) - np.repeat(rows[:-1], pieces_N)).astype(np.int32)
    positions = np.arange(num * length, dtype=np.int32)
    np.subtract(positions, np.repeat(cu_seqlens[:-1], lengths_S), out=positions_NL.reshape(-1))
    documents_NL.reshape(-1)[:] = np.repeat(number_S, lengths_S)
    return cu_seqlens, rows
