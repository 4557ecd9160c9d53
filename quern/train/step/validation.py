"""Loss on the held-out documents, over the same windows every time, split over the ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch

from quern import storage
from quern.errors import InputError
from quern.parallel.accumulation import Runner
from quern.parallel.context.inputs import Sharing
from quern.tokenize.shard_format import VERSION_FILE
from quern.tokenize.shards import ShardReader
from quern.train.batches.boundaries import open_boundaries
from quern.train.batches.corpus import Corpus, NoWindowError, check_apart
from quern.train.batches.feed import to_device
from quern.train.batches.loader import IGNORE, Loader, StepBatch
from quern.train.batches.mixture import open_streams, source_names
from quern.train.config import TrainConfig
from quern.train.processes.ranks import Ranks

__all__ = ["TOGETHER", "Validator", "open_held_out"]

TOGETHER = 8
"""Micro-batches that a runner gets at a time, so that a pipeline's ranks work side by side, and gather their weights
once for all of them; a stage holds the hidden states of so many."""


_HELD_OUT = ".val"
"""How the folder of a source's held-out documents ends, beside the source's own."""


def open_held_out(config: TrainConfig, *, keep: bool = False, known: str | None = None) -> tuple[Corpus, ...]:
    """Those of ``path + '.val'`` that the corpus version lists and that hold at least one window, of documents that
    fulfil the source's ``where``, and the sets of ``validation.sets``. ``keep``, ``known``: see :func:`open_corpus`.

    Raises:
        InputError: a file of theirs is missing or is not what the corpus version says; a set is of another encoding
            than the sources, is one of them, or has the name of one.
    """
    found = []
    for source in config.data:
        folder = source.path.rstrip("/") + _HELD_OUT
        root, name = os.path.split(os.path.abspath(folder))
        listed = storage.read_json(os.path.join(root, VERSION_FILE))["sources"]
        if name in listed and ShardReader(folder).num_windows(config.seq_len):
            with suppress(NoWindowError):
                found.append(open_streams(config, [(folder, source.where)], keep=keep, known=known))
    for one, other in combinations(found, 2):
        if one.readers[0].path == other.readers[0].path and one.chosen[0] and other.chosen[0]:
            check_apart(one.readers[0].path, (one.wheres[0], one.chosen[0]), (other.wheres[0], other.chosen[0]))
    sources = [(source.path, source.where) for source in config.data]
    for number, given in enumerate(config.validation.sets):
        where = f"validation.sets.{number}"
        if given.name in source_names(config):
            raise InputError(f"{where}.name: expected another than those of the sources of data, got {given.name!r}")
        try:
            open_streams(config, [*sources, (given.path, None)], keep=keep, known=known)
            found.append(Corpus([given.path], config.seq_len))
        except InputError as error:
            raise InputError(f"{where}.path: {error}") from None
    opened = [corpus.readers[0].path for corpus in found]
    sets = len(config.validation.sets)
    for twice in (path for place, path in enumerate(opened) if place >= len(opened) - sets and path in opened[:place]):
        raise InputError(f"validation.sets: {twice} is given twice, or is held out of a source; expected each set once")
    return tuple(found)


@dataclass(frozen=True)
class _Phase:
    global_batch: int


class _FromTheStart:
    """The first ``count`` windows of one source, a batch at a time; what fills up the last batch has epoch 1."""

    def __init__(self, windows: int, count: int, batch: int) -> None:
        self.windows = (windows,)
        self.phases = (_Phase(batch),)
        self.steps = -(-count // batch)
        self._count, self._batch = count, batch

    def first_sample(self, step: int) -> int:
        return step * self._batch

    def global_batch_at(self, step: int) -> int:
        return self._batch

    def samples(self, positions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        epochs, windows = np.divmod(np.asarray(positions, np.uint64), np.uint64(self._count))
        return np.zeros_like(windows), epochs, windows


@dataclass(frozen=True)
class _Source:
    name: str
    is_set: bool
    loader: Loader
    steps: int


class Validator:
    """Mean loss a target, over the held-out windows of each source and each set, and over all of the sources."""

    def __init__(
        self, config: TrainConfig, held_out: Sequence[Corpus], ranks: Ranks, dp_rank: int, dp_size: int, cache: str,
        sharing: Sharing | None = None,
    ) -> None:  # fmt: skip
        self._ranks = ranks
        self._inputs = partial(to_device, device=ranks.device, document_mask=config.document_mask, sharing=sharing)
        folders = [(os.path.abspath(given.path) + _HELD_OUT, given.where) for given in config.data]
        names = dict(zip(folders, source_names(config), strict=True))
        sets = {os.path.abspath(given.path): given.name for given in config.validation.sets}
        self._sources = []
        for corpus in held_out:
            (windows,) = corpus.windows
            wanted = min(windows, config.validation.windows or windows)
            order = _FromTheStart(windows, wanted, config.micro_batch * dp_size)
            loader = Loader(
                corpus, order, rank=dp_rank, world=dp_size, micro_batch=config.micro_batch,
                document_mask=config.document_mask, boundaries=open_boundaries(corpus.readers, cache, corpus.chosen),
            )  # fmt: skip
            path = os.path.abspath(corpus.readers[0].path)
            name = sets.get(path) or names[path, corpus.wheres[0]]
            self._sources.append(_Source(name, path in sets, loader, order.steps))

    def run(self, model: Runner) -> dict[str, Any]:
        """``loss`` (nats a target), ``tokens`` (targets) and the same by source (:func:`source_names`), and of the
        ``sets`` that are given. The first two are over the sources, over the sets where no source has held-out
        documents. Collective."""
        rows = [(source, self._mean(model, source)) for source in self._sources]
        sources = {source.name: row for source, row in rows if not source.is_set}
        sets = {source.name: row for source, row in rows if source.is_set}
        counted = (sources or sets).values()
        tokens = sum(row["tokens"] for row in counted)
        loss = sum(row["loss"] * row["tokens"] for row in counted) / max(tokens, 1)
        return {"loss": loss, "tokens": tokens, "sources": sources, **({"sets": sets} if sets else {})}

    def _mean(self, model: Runner, source: _Source) -> dict[str, Any]:
        summed = torch.zeros(2, dtype=torch.float64, device=self._ranks.device)
        for first in range(0, source.steps, TOGETHER):
            steps = map(source.loader.take, range(first, min(first + TOGETHER, source.steps)))
            inputs = [self._inputs(batch) for step in steps for batch in _without_filling(step)]
            summed[0] += model.forward(inputs)[1]
            if model.counts:
                for batch in inputs:
                    summed[1] += (batch.targets_BL != IGNORE).sum()
        loss, tokens = self._ranks.sum(summed).tolist()
        return {"loss": loss / max(tokens, 1), "tokens": int(tokens)}


def _without_filling(step: StepBatch) -> Sequence[Any]:
    """Rows beyond the last window are forwarded, since every rank must take every forward, and count for nothing."""
    for batch in step.micro_batches:
        batch.targets_BL[batch.epochs > 0] = IGNORE
    return step.micro_batches
