"""Tells which experts a document chose, by the trainer's counts of a step and of those before it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from quern.config import show
from quern.errors import InputError
from quern.lineage.forensics.explain import read_of
from quern.lineage.forensics.file import ForensicsRecord, StepRecord, read_record
from quern.lineage.steps import inputs_of
from quern.lineage.training import TrainingRun

__all__ = ["experts_of"]

_DOCUMENTS, _EXPERTS = 5, 4
"""Documents that are told where none is chosen, and a layer's most chosen experts."""


def experts_of(run: TrainingRun, step: int, doc: str | None = None, attempt: int | None = None) -> dict[str, Any]:
    """The experts that documents of a recorded step chose, as plain data: of ``doc`` (a doc_id) in each step that the
    record has, else of the step's first documents. Shares are of a document's tokens, and beside it of the batch's.

    Raises:
        InputError: the step is not recorded, without these counts, or without those of the document.
    """
    if doc is not None and not re.fullmatch(r"[0-9a-f]{32}", doc):
        raise InputError(f"--doc: expected a doc_id of 32 hex digits, got {show(doc)}")
    record = read_record(run.path, step, attempt)
    steps = record.steps if doc else record.steps[-1:]
    if not any(own.chosen for own in steps):
        raise InputError(f"{record.path}: has no counts of experts: the model has none, or it is of an older version")
    rows = [row for own in steps for row in _documents(run, record, own, doc)]
    if not rows:
        kept = sum(len(own.chosen.sequences) for own in steps if own.chosen)
        between = f"of steps {steps[0].step:,} to {step:,}, those of the highest losses,"
        raise InputError(f"{record.path}: no counts of document {doc}: {kept} sequences {between} have them")
    shown = rows if doc else rows[:_DOCUMENTS]
    return {"file": record.path, "step": step, "attempt": record.attempt, "documents": shown}


def _documents(run: TrainingRun, record: ForensicsRecord, own: StepRecord, doc: str | None) -> Iterator[dict[str, Any]]:
    told, length = own.chosen, int(record.layout["seq_len"])
    if told is None:
        return
    read = read_of(run, own, record.attempt, record.path)
    parts, batch_NE = read.documents, told.total_NE / (len(own.column("place")) * length)
    for place, starts, counts_PNE in told.sequences:
        for start, stop, counts_NE in zip(starts, [*starts[1:], length], counts_PNE, strict=True):
            for m, who in inputs_of(read, place, start, stop):
                if doc not in (None, who["doc_id"]):
                    continue
                share_NE = counts_NE / (stop - start)
                yield {
                    "step": own.step, "place": place, "start": start, "tokens": stop - start,
                    **who, "alone": (parts.input_starts[m], parts.input_stops[m]) == (start, stop),
                    "layers": [
                        {
                            "layer": layer,
                            "experts": [
                                {"expert": e, "share": float(share_E[e]), "batch": float(batch_E[e])}
                                for e in np.argsort(-share_E, kind="stable")[:_EXPERTS].tolist()
                            ],
                        }
                        for layer, share_E, batch_E in zip(told.layers, share_NE, batch_NE, strict=True)
                    ],
                }  # fmt: skip
