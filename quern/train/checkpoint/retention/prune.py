"""Decides which checkpoints of a run to remove, and removes them."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass

from quern.errors import InputError, QuernError
from quern.train.checkpoint.format.file_locations import beside
from quern.train.checkpoint.format.folder import remove_folder
from quern.train.checkpoint.format.manifest import Checkpoint, check_files, list_checkpoints, read_manifest
from quern.train.checkpoint.retention.retention import kept
from quern.train.history.branch import abandoned_in
from quern.train.processes.agree import describe

__all__ = ["Keep", "prune"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Keep:
    """Which checkpoints a run keeps."""

    run_dir: str
    last: int
    """The newest so many of the branch."""
    every: int | None
    """Multiples of so many steps, for ever."""
    published: str | None = None
    """The checkpoint just published: newer ones belong to a branch the run has left, and wait until it passes them."""
    steps: tuple[int, ...] = ()
    """Also these."""


def prune(keep: Keep) -> list[str]:
    """Remove old checkpoints and return their names. The newest that is whole always stays; of one whose tensor files
    are on nodes' disks, what is here decides.

    Checkpoints of a branch that the run has left do not count as its newest. What cannot be removed is no reason to
    stop a run: it is logged.
    """
    newest_first = list_checkpoints(keep.run_dir)[::-1]
    if keep.published is not None:
        saved = next((found.step for found in newest_first if found.path == keep.published), 0)
        newest_first = [checkpoint for checkpoint in newest_first if checkpoint.step <= saved]
    rows, whole = [], False
    for checkpoint in newest_first:
        left = _left(keep.run_dir, checkpoint)
        sound = not whole and not left and _is_whole(checkpoint, keep.published)  # older ones need no check
        whole = whole or sound
        rows.append((checkpoint.step, left, sound))
    stay = kept(rows, keep.last, keep.every, keep.steps)
    removed = []
    for checkpoint in reversed(newest_first):
        if checkpoint.step in stay:
            continue
        try:
            remove_folder(checkpoint.path, uuid.uuid4().hex)
        except OSError as error:
            log.warning("%s: not removed (%s)", checkpoint.path, describe(error))
        else:
            removed.append(checkpoint.name)
    return removed


def _left(run_dir: str, checkpoint: Checkpoint) -> bool:
    try:
        return abandoned_in(run_dir, read_manifest(checkpoint.path)) is not None
    except QuernError as error:
        log.warning("%s: cannot be judged, and is kept as one of the run's branch (%s)", checkpoint.path, error)
        return False


def _is_whole(checkpoint: Checkpoint, published: str | None) -> bool:
    if checkpoint.path == published:
        return True  # its checksums were taken from the bytes as they were written
    try:
        manifest, mine = read_manifest(checkpoint.path), beside(checkpoint.path)
        return not check_files(checkpoint.path, manifest, hashes=True, mine=mine)
    except InputError:
        return False
