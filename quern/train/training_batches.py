"""Gives the training order to other trainers: the batches of a rank, as tensors, and a ledger of what was read.

A plain PyTorch loop, or transformers' ``Trainer``, reads exactly the samples that ``quern train`` would with the same
config, and ``quern lineage exposure`` and ``step`` answer for its run. Weights, optimizer and checkpoints are its own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch.utils.data import IterableDataset, get_worker_info

from quern import __version__, storage
from quern.closes import Closes
from quern.config import digest, dump_yaml, given_config
from quern.errors import InputError, QuernError
from quern.train.batches.corpus import Corpus
from quern.train.batches.loader import open_loader
from quern.train.batches.mixture import Mixture, carry_on, open_corpus
from quern.train.batches.tensors import StepTensors, tensors_of
from quern.train.checkpoint.format.folder import FolderLock
from quern.train.checkpoint.format.manifest import CONFIG_FILE, checkpoints_folder, list_checkpoints
from quern.train.config import MetricsConfig, TrainConfig
from quern.train.history.branch import LEDGER_FILE
from quern.train.history.consumers import announce
from quern.train.history.ledger import MOVES, Ledger, data_step, latest_order, reached, read_ledger
from quern.train.history.metrics_file import steps_of_metrics
from quern.train.init_from import load_run_config
from quern.train.run_record import RUN_FILE, check_run_dir
from quern.train.step.metrics import Metrics

__all__ = ["TrainingBatches", "batches"]

log = logging.getLogger(__name__)

#: Steps that a thread makes ahead of need.
_DEPTH = 4

Config = str | os.PathLike[str] | Mapping[str, Any] | TrainConfig


def batches(
    config: Config,
    rank: int = 0,
    world: int = 1,
    start: int | None = None,
    *,
    overrides: Sequence[str] = (),
    looks_ahead: bool = False,
) -> TrainingBatches:
    """The batches of data-parallel rank ``rank`` of ``world``, from optimizer step ``start`` to the config's ``steps``.

    ``config``: of a training run (a YAML file, a mapping or a :class:`TrainConfig`). What decides samples counts:
    ``run_dir``, ``data``, ``phases``, ``seed``, ``seq_len``, ``global_batch``, ``micro_batch``, ``steps``,
    ``document_mask``, ``verify_shards``; the rest is the trainer's own. ``start``: how many steps the
    weights have taken, as the checkpoint says that the loop goes on from; None: a new run. ``overrides``:
    ``["steps=100"]``, of a file. ``looks_ahead``: see :class:`TrainingBatches`.

    Raises:
        InputError: the config, the corpus, or what ``run_dir`` holds does not fit, ``start`` was not reached there, or
            is not given and there is a run.
        QuernError: another trainer is at work in ``run_dir``, or its ledger is damaged.
    """
    if isinstance(config, str | os.PathLike):
        found = load_run_config(os.fspath(config), overrides)
    else:
        found = given_config(config, TrainConfig, overrides)
    return TrainingBatches(found, rank, world, start, looks_ahead=looks_ahead)


class TrainingBatches(Closes):
    """An iterator over :class:`StepTensors`. Use as a context manager: leaving it ends its thread and closes files.

    All ranks open it with equal arguments but ``rank``; rank 0 writes ``run_dir``: ``ledger.jsonl``, ``config.yaml``,
    ``run.json``, ``metrics.jsonl``. Ranks do not talk to each other: the others need to see ``run_dir`` only to go on
    (with ``start``). The ledger gets no line before the first batch is asked for.

    **What counts as read.** To ask for the next batch says that the step before is complete; :meth:`complete` says it
    of the last one. With ``looks_ahead``, for loops that take batches before they have computed the one before, only
    :meth:`complete` says it. Steps of which nobody said it are listed as not proven by ``quern lineage exposure``.

    Attributes: ``step`` (of the batch that comes next), ``steps`` (where it ends), ``order`` (hash of the order) and
    ``fingerprint`` (digest over every token of the corpus), which are the same on every rank; ``accumulation`` (micro
    batches of a step).
    """

    def __init__(
        self, config: TrainConfig, rank: int, world: int, given: int | None, *, looks_ahead: bool = False
    ) -> None:
        start = given or 0
        _check(config, rank, world, start)
        self.config, self._looks_ahead = config, looks_ahead
        self.step, self.steps = start, config.steps
        self._first, self._done, self._handed = start, start, start
        self._begun = self._ended = self._closed = False
        self._valid: dict[int, int] = {}
        """Targets of steps that were handed out and are not complete yet."""
        self._parts = ExitStack()
        """What is closed in the reverse order; the run's lock last."""
        self._ledger: Ledger | None = None
        self._metrics: Metrics | None = None
        self._attempt = 0
        try:
            corpus = open_corpus(config, keep=True)
            cache = os.path.join(config.run_dir, "index")
            if config.verify_shards:
                corpus.verify(rank, world, os.path.join(cache, f"verified.{rank}.json"))
            if rank == 0:
                self._ledger = self._open_ledger()
            entries = self._entries()
            self._check_start(entries, given)
            self._data_step, mixture = _place(config, corpus, entries, start)
            self._loader = open_loader(config, corpus, mixture.order, cache, rank, world, mixture.source_map)
            self._parts.callback(self._loader.close)
            self.order, self.fingerprint = mixture.order.hash, corpus.fingerprint
            stop = self._data_step + config.steps - start
            self._batch_sizes = {
                mixture.order.global_batch_at(step) for step in _changes(mixture, self._data_step, stop)
            }
            self._per_rank = world * config.micro_batch
            self._record = partial(self._describe, corpus, mixture, world)
            self._batches = iter(self._loader.prefetch(self._data_step, stop, _DEPTH))
        except BaseException:
            self._parts.close()
            raise

    # ---- reading

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepTensors:
        if self._closed:
            raise ValueError("the batches are closed: read them inside of the with block")
        if self._ledger is not None and not self._begun:
            self._record(self._ledger)
            self._begun = True
        if not self._looks_ahead and self._handed > self._done:
            self.complete(self._handed)
        batch = next(self._batches)  # ends after the last step
        step, self.step, self._handed = self.step, self.step + 1, self.step + 1
        self._valid[step] = batch.valid_tokens
        return StepTensors(step, batch.data_step, batch.valid_tokens, tuple(map(tensors_of, batch.micro_batches)))

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step.

        Raises:
            InputError: phases to come change the global batch, and with it their number.
        """
        if len(self._batch_sizes) > 1:
            raise InputError("phases: the global batch changes, and with it the number of micro-batches of a step")
        return next(iter(self._batch_sizes)) // self._per_rank

    def dataset(self) -> IterableDataset[dict[str, Any]]:
        """The micro-batches one after the other, as transformers' models take them, for
        ``DataLoader(dataset, batch_size=None)``, without workers: a thread makes batches ahead already. A step is
        :attr:`accumulation` of them. The loader is not for ``accelerator.prepare``, which would deal the share of rank
        0 out to all ranks."""
        _ = self.accumulation
        return _Dataset(self)

    # ---- what was read

    def complete(self, step: int) -> None:
        """Say that ``step`` steps are complete: what they read is certain from here on.

        Raises:
            ValueError: it is less than was said before, or more than was handed out.
        """
        if not self._done <= step <= self._handed:
            raise ValueError(f"step: expected {self._done} to {self._handed}, the batches handed out, got {step}")
        for own in range(self._done, step):
            valid = self._valid.pop(own)
            if self._metrics is not None:
                row = {"step": own, "data_step": self._data_step_of(own), "attempt": self._attempt}
                self._metrics.report({**row, "valid_tokens": valid})
        self._done = step
        if step == self.steps:
            self._end()

    def saved(self, step: int) -> None:
        """Say that ``step`` steps are complete and that a checkpoint of their weights is durable: a line of the ledger,
        on disk when this returns. Later steps may be complete by then. Without it a run can go on all the same, unless
        its machine loses power.

        Raises:
            ValueError: it is more than was handed out, or less than the start.
        """
        if not self._first <= step <= self._handed:
            raise ValueError(f"step: expected {self._first} to {self._handed}, the batches handed out, got {step}")
        if step > self._done:
            self.complete(step)
        if self._ledger is not None and self._begun and not self._ended:
            self._ledger.append("complete", step=step)

    def skipped(self, step: int, reason: str = "skipped by the trainer") -> None:
        """Say that the batch of ``step`` was read and its update was not applied, after an overflow for example.

        Raises:
            ValueError: it is none of the steps handed out since the start.
        """
        if not self._first <= step < self._handed:
            raise ValueError(f"step: expected {self._first} to {self._handed - 1}, got {step}")
        if self._ledger is not None:
            self._ledger.append("skipped", step=step, data_step=self._data_step_of(step), reason=reason)

    def close(self) -> None:
        """Stop the reading thread, and record where the run ended if all that was handed out is complete."""
        try:
            if self._handed == self._done:
                self._end()
        finally:
            self._ledger, self._metrics, self._closed = None, None, True
            self._parts.close()

    def _end(self) -> None:
        """The ledger's last line, once."""
        if self._ledger is not None and self._begun and not self._ended:
            if self._done == self.steps:
                self._ledger.append("end", step=self._done)
            else:
                self._ledger.append("stopped", step=self._done, signal=None)
            self._ended = True

    # ---- the run's records

    def _data_step_of(self, step: int) -> int:
        return self._data_step + step - self._first

    def _open_ledger(self) -> Ledger:
        root = checkpoints_folder(self.config.run_dir)
        os.makedirs(root, exist_ok=True)
        held = _OPEN.get(os.path.realpath(root))
        if held is not None and not held._closed:  # a lock of this process's own would not keep it out
            raise QuernError(f"{self.config.run_dir}: this process reads batches of the run already; close those first")
        self._parts.enter_context(closing(FolderLock(root)))
        _OPEN[os.path.realpath(root)] = self
        return self._parts.enter_context(Ledger(os.path.join(self.config.run_dir, LEDGER_FILE)))

    def _entries(self) -> Sequence[Mapping[str, Any]]:
        if self._ledger is not None:
            return self._ledger.entries
        path = os.path.join(self.config.run_dir, LEDGER_FILE)
        return read_ledger(path) if self._first and os.path.isfile(path) else []

    def _check_start(self, entries: Sequence[Mapping[str, Any]], given: int | None) -> None:
        """Refuse a start that the run has not reached, and one that is not given where a run has got on."""
        moves = [place for place, entry in enumerate(entries) if entry["kind"] in MOVES]
        self._attempt = len(moves)
        if not moves:
            return
        last = entries[moves[-1] :]
        known = max(reached(last), steps_of_metrics(self.config.run_dir, self._attempt - 1))
        if given is None and known:
            raise InputError(
                f"start: the run in {self.config.run_dir} has completed {known} steps; give the number of optimizer "
                "steps that the checkpoint's weights have taken (0: from the beginning again), or another run_dir"
            )
        # A loop may have saved a step's weights and ended before it asked for the next batch.
        exact = any(entry["kind"] in ("end", "stopped") for entry in last) or last[0].get("looks_ahead")
        if self._first > known + (not exact):
            raise InputError(
                f"start: the run in {self.config.run_dir} has completed {known} steps since it was last opened, got "
                f"{self._first}; give the number of optimizer steps that the checkpoint's weights have taken"
            )
        if self._first < known and self._ledger is not None:
            log.warning("the run goes back from step %d to step %d", known, self._first)

    def _describe(self, corpus: Corpus, mixture: Mixture, world: int, ledger: Ledger) -> None:
        """The line that opens the attempt, and the files that describe the run; before a token is read."""
        config, start = self.config, self._first
        if self._attempt and start > reached(ledger.entries):
            ledger.append("complete", step=start)
        facts = corpus.facts
        ledger.move(
            "resume" if self._attempt else "start", start, self._data_step, mixture.order,
            document_mask=config.document_mask, **facts, dp=world, micro_batch=config.micro_batch,
            looks_ahead=self._looks_ahead,
        )  # fmt: skip
        announce(config.run_dir, mixture.order.hash, facts["paths"])
        storage.publish_bytes(os.path.join(config.run_dir, CONFIG_FILE), dump_yaml(config).encode())
        storage.write_json(
            os.path.join(config.run_dir, RUN_FILE),
            {
                "kind": "train", "trainer": "other", "config_digest": digest(config), "order": mixture.order.hash,
                "sources": facts["paths"], "versions": {"quern": __version__, "torch": torch.__version__},
            },
        )  # fmt: skip
        quiet = MetricsConfig(tensorboard=False, live=False)
        self._metrics = self._parts.enter_context(closing(Metrics(config.run_dir, quiet, config.steps)))
        log.info("step %d, data step %d, order %s", start, self._data_step, mixture.order.hash)


#: Those that are open in this process on rank 0, by their folder.
_OPEN: WeakValueDictionary[str, TrainingBatches] = WeakValueDictionary()


class _Dataset(IterableDataset[dict[str, Any]]):
    def __init__(self, own: TrainingBatches) -> None:
        self._own = own

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if get_worker_info() is not None:
            raise InputError("num_workers: expected 0; a thread makes batches ahead already")
        for batch in self._own:
            for micro_batch in batch.micro_batches:
                yield micro_batch.for_transformers()


def _check(config: TrainConfig, rank: int, world: int, start: int) -> None:
    if not 0 <= rank < world:
        raise InputError(f"rank: expected 0 to {world - 1} of a world of {world}, got {rank}")
    if not 0 <= start <= config.steps:
        raise InputError(f"start: expected 0 to {config.steps} (steps), got {start}")
    if config.resume.step is not None:
        raise InputError("resume.step: expected null; start says from which step on batches are read")
    check_run_dir(config.run_dir, "other")
    if list_checkpoints(config.run_dir):
        raise InputError(f"run_dir: {config.run_dir!r} holds checkpoints of quern train; give a folder of its own")


def _place(
    config: TrainConfig, corpus: Corpus, entries: Sequence[Mapping[str, Any]], start: int
) -> tuple[int, Mixture]:
    """The data step that step ``start`` reads, and the order: the same by the ledger before its new line and after."""
    previous = latest_order(entries)
    if previous is None and start:
        raise InputError(f"start: no run has begun in {config.run_dir}: expected 0, got {start}")
    at = 0 if previous is None else data_step(entries, start)
    return at, carry_on(config, corpus, previous, at)


def _changes(mixture: Mixture, first: int, stop: int) -> list[int]:
    """The data steps from ``first`` to ``stop`` at which a phase holds that did not before, ``first`` among them."""
    return [first, *(phase.first_step for phase in mixture.order.phases if first < phase.first_step < stop)]
