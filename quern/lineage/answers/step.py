"""Answers what a training step read, as plain data: ``quern lineage step --json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from quern.lineage.answers.exposure import positions
from quern.lineage.forensics.file import losses_of
from quern.lineage.steps import StepRead, read_step
from quern.lineage.training import TrainingRun

__all__ = ["step_answer"]

Row = dict[str, Any]


def step_answer(run: TrainingRun, step: int, *, rank: int | None = None, attempt: int | None = None) -> Row:
    """The documents of the batch that ``run`` read at ``step``: facts of the step, and ``sequences``, an iterator over
    one row a sequence, in the order of the global batch.

    ``rank``: only what this data-parallel rank computed. ``attempt``: what this start of the trainer read, by default
    the present branch.

    Raises:
        InputError: the step was not read, or the rank is not known.
    """
    read = read_step(run, step, attempt)
    losses = losses_of(run, read)
    read = read if rank is None else read.of_rank(rank)
    return _about(read, run) | {"sequences": _sequences(read, losses)}


def _about(read: StepRead, run: TrainingRun) -> Row:
    attempt = read.attempt
    return {
        "train_run": run.path, "trained_in": run.folder_of(attempt),
        "step": read.step, "data_step": read.data_step, "attempt": attempt.number,
        "kind": attempt.kind, "state": _state(read), "applied": read.applied, "order": attempt.order,
        "seq_len": read.seq_len, "document_mask": attempt.document_mask, "dp": attempt.dp,
        "micro_batch_size": attempt.micro_batch, "global_batch": read.global_batch,
        "unknown_sources": {read.identities[source]: why for source, why in read.unknown.items()},
    }  # fmt: skip


def _state(read: StepRead) -> str:
    if not read.proven:
        return "unproven"
    return "surviving" if read.surviving else "abandoned"


def _sequences(read: StepRead, losses: Mapping[int, float | None]) -> Iterator[Row]:
    """A row a sequence, its documents in it."""
    parts = read.documents
    doc_ids: list[bytes] = [b""] * len(parts.numbers)
    urls: list[str | None] = [None] * len(parts.numbers)
    names = list(urls)
    for source, (lineage, _) in read.streams.items():
        where = np.flatnonzero(parts.sources == source)
        unique, which = np.unique(parts.numbers[where], return_inverse=True)
        documents = lineage.documents(unique)
        called = lineage.names(documents)
        for row, index in zip(where.tolist(), which.tolist(), strict=True):
            doc_ids[row], urls[row], names[row] = documents.doc_ids[index], documents.urls[index], called[index]
    columns = {name: column.tolist() for name, column in vars(parts).items()}
    places = read.places_G.tolist()
    edges = np.searchsorted(parts.sequences, read.places_G), np.searchsorted(parts.sequences, read.places_G, "right")
    dealt = [(read.ranks_G, "rank"), (read.micro_batches_G, "micro_batch"), (read.rows_G, "row")]
    for index, (place, first, stop) in enumerate(zip(places, *(edge.tolist() for edge in edges), strict=True)):
        source = int(read.sources_G[index])
        known = read.streams.get(source)
        yield {
            "place": place,
            **{name: None if column is None else int(column[index]) for column, name in dealt},
            "source": read.identities[source], "epoch": int(read.epochs_G[index]),
            "window": int(read.windows_G[index]), "loss": losses.get(place), "computed": read.computed(place),
            "data_run": known[0].run if known else None,
            "documents": [
                {
                    "url": urls[row], "name": names[row], "doc_id": doc_ids[row].hex(),
                    "purged": columns["purged"][row],
                    "span": {"stream": known[1].name if known else None, "start": columns["starts"][row],
                             "length": columns["lengths"][row]},
                    "inputs": positions(columns, "input", row), "targets": positions(columns, "target", row),
                }
                for row in range(first, stop)
            ],
        }  # fmt: skip
