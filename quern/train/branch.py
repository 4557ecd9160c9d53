"""Which checkpoints are of the branch a run is on: a rollback leaves those behind it standing, and labelled.

Imports no torch: listing stays cheap.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from quern.train.checkpoint.manifest import Manifest
from quern.train.ledger import MOVES, read_ledger

__all__ = ["LEDGER_FILE", "abandoned", "abandoned_in"]

LEDGER_FILE = "ledger.jsonl"


def abandoned(manifest: Manifest, ledger_path: str, entries: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a checkpoint is not of the branch the run is on: a later line went back behind it; None if it is.

    ``entries``: the lines of the ledger at ``ledger_path``.

    Raises:
        QuernError: the ledger is shorter than when the checkpoint was saved.
    """
    lines = len(read_ledger(ledger_path, stop=manifest.ledger_offset))
    for entry in entries[lines:]:
        if entry["kind"] in MOVES and entry["step"] < manifest.step:
            return f"lies on a branch that was left: the run went back to step {entry['step']}"
    return None


def abandoned_in(run_dir: str, manifest: Manifest) -> str | None:
    """:func:`abandoned` for a checkpoint of the run in ``run_dir``; None where there is no ledger to tell."""
    path = os.path.join(run_dir, LEDGER_FILE)
    return abandoned(manifest, path, read_ledger(path)) if os.path.isfile(path) else None
