"""Decides which checkpoints of a run to remove, and removes them."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass

from quern.train.checkpoint.format.folder import remove_folder
from quern.train.checkpoint.format.manifest import list_checkpoints
from quern.train.checkpoint.retention.retention import damage, kept, look
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
        manifest, left, wrong = look(keep.run_dir, checkpoint)
        for why in wrong:
            log.warning("%s: cannot be judged, and is kept as one of the run's branch (%s)", checkpoint.path, why)
        sound = (
            not whole
            and left is None
            and manifest is not None
            and (  # older ones need no check
                checkpoint.path == keep.published  # its checksums were taken from the bytes as they were written
                or not damage(checkpoint.path, manifest)
            )
        )
        whole = whole or sound
        rows.append((checkpoint.step, left is not None, sound))
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
