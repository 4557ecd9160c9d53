"""Finds the checkpoints of a run's present branch; a rollback abandons later ones but keeps their files.

Imports no torch: listing stays cheap.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from quern.errors import InputError, QuernError
from quern.train.checkpoint.format.manifest import MANIFEST_FILE, Manifest, list_checkpoints, read_manifest
from quern.train.history.ledger import MOVES, read_ledger

__all__ = ["LEDGER_FILE", "abandoned", "abandoned_in", "find_checkpoint", "left_behind", "newest_until"]

LEDGER_FILE = "ledger.jsonl"


def abandoned(manifest: Manifest, ledger_path: str, entries: Sequence[Mapping[str, Any]]) -> str | None:
    """Why a checkpoint is not of the present branch (a later line went back before it); None if it is.

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


def newest_until(run_dir: str, step: int) -> int | None:
    """The newest checkpoint after at most ``step`` steps, of the branch that the run in ``run_dir`` is on; its files
    are not looked at. None: there is none."""
    for checkpoint in reversed(list_checkpoints(run_dir)):
        with suppress(QuernError):  # a damaged one is none
            if checkpoint.step <= step and abandoned_in(run_dir, read_manifest(checkpoint.path)) is None:
                return checkpoint.step
    return None


def find_checkpoint(path: str) -> str:
    """``path`` where it is a checkpoint; where it is a training run, the newest checkpoint of the branch the run is on.

    Raises:
        InputError: it is neither, or a run without such a checkpoint.
    """
    if os.path.isfile(os.path.join(path, MANIFEST_FILE)):
        return path
    checkpoints = list_checkpoints(path)
    if not checkpoints:
        raise InputError(f"{path}: expected a checkpoint ({MANIFEST_FILE} in it) or a training run that has one")
    for checkpoint in reversed(checkpoints):
        left = abandoned_in(path, read_manifest(checkpoint.path))
        if left is None:
            return checkpoint.path
    raise InputError(f"{checkpoint.path}: {left}, as all of the run's; give the checkpoint itself to take it")
