"""Which checkpoints are of the branch a run is on: a rollback leaves those behind it standing, and labelled.

Imports no torch: listing stays cheap.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quern.train.checkpoint.manifest import Manifest
from quern.train.ledger import MOVES, read_ledger

__all__ = ["LEDGER_FILE", "abandoned", "abandoned_in", "left_behind"]

LEDGER_FILE = "ledger.jsonl"


def abandoned(manifest: Manifest, ledger_path: str, entries: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a checkpoint is not of the branch the run is on: a later line went back behind it; None if it is.

    ``entries``: the lines of the ledger at ``ledger_path``.

    Raises:
        QuernError: the ledger is shorter than when the checkpoint was saved.
    """
    lines = len(read_ledger(ledger_path, stop=manifest.ledger_offset))
    return left_behind(manifest.step, entries[lines:])


def left_behind(step: int, later: Iterable[Mapping[str, Any]]) -> str | None:
    """Why the checkpoint after ``step`` steps is not of the branch the run is on; ``later``: the lines after it."""
    for entry in later:
        if entry["kind"] in MOVES and entry["step"] < step:
            return f"lies on a branch that was left: the run went back to step {entry['step']}"
    return None


def abandoned_in(run_dir: str, manifest: Manifest) -> str | None:
    """:func:`abandoned` for a checkpoint of the run in ``run_dir``; None where there is no ledger to tell."""
    path = os.path.join(run_dir, LEDGER_FILE)
    return abandoned(manifest, path, read_ledger(path)) if os.path.isfile(path) else None
