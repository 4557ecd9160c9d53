"""The rule by which checkpoints of a run and of its store are kept.

Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quern.errors import InputError, QuernError
from quern.train.checkpoint.format.file_locations import beside
from quern.train.checkpoint.format.manifest import Checkpoint, Manifest, check_files, list_checkpoints, read_manifest
from quern.train.history.branch import LEDGER_FILE, abandoned_in
from quern.train.history.health import protected as protected_steps
from quern.train.history.ledger import read_ledger

__all__ = ["Candidate", "kept", "kept_in_store", "survey"]


def kept(
    checkpoints: Iterable[tuple[int, bool, bool]],
    keep_last: int,
    keep_every: int | None,
    protected: Collection[int] = (),
) -> set[int]:
    """The steps whose checkpoints are kept.

    ``checkpoints``: step, whether it lies on a branch that was left, and whether it is whole. Those of the branch the
    run is on *count*. What stays: the newest ``keep_last`` that count, the newest that counts and is whole, multiples
    of ``keep_every`` on any branch, and ``protected``. If none that counts is whole, all stay. So of those older than
    the newest whole one, nobody needs to know whether they are.
    """
    newest_first = sorted(checkpoints, reverse=True)
    steps = {step for step, _, _ in newest_first}
    counted = [(step, is_whole) for step, is_abandoned, is_whole in newest_first if not is_abandoned]
    whole = next((step for step, is_whole in counted if is_whole), None)
    if whole is None:
        return steps
    every = {step for step in steps if keep_every is not None and step % keep_every == 0}
    return {whole} | {step for step, _ in counted[:keep_last]} | every | (steps & set(protected))


@dataclass(frozen=True)
class Candidate:
    """A checkpoint, and whether it is kept."""

    checkpoint: Checkpoint
    size: int
    """Bytes of its files, as they lie there."""
    abandoned: str | None
    """Why it is not of the branch the run is on."""
    problems: tuple[str, ...]
    """What is wrong with it, as far as was looked."""
    newest_whole: bool
    """Whether it is the newest that counts and is whole."""
    protected: bool
    """Whether it has proved good, or may yet (:mod:`quern.train.history.health`)."""
    keep: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        fields = {name: value for name, value in vars(self).items() if name != "checkpoint"}
        problems = list(self.problems)
        return {"step": self.checkpoint.step, "path": self.checkpoint.path, **fields, "problems": problems}


def survey(run_dir: str, keep_last: int, keep_every: int | None, health_window: int) -> list[Candidate]:
    """The checkpoints of a run by ascending step, and which of them stay by :func:`kept`.

    Checksums are compared from the newest on, until one is whole. A checkpoint whose manifest or whose branch cannot be
    told counts as one of the run's. Files that are on nodes' disks are not looked at: what is here decides.
    ``health_window``: steps after which a checkpoint is good.

    Raises:
        QuernError: the ledger is damaged.
    """
    found = list_checkpoints(run_dir)
    left: dict[int, str | None] = {}
    problems: dict[int, list[str]] = {}
    whole = None
    for checkpoint in reversed(found):
        manifest, left[checkpoint.step], wrong = look(run_dir, checkpoint)
        if manifest is not None and whole is None and left[checkpoint.step] is None:
            damaged = damage(checkpoint.path, manifest)
            whole = None if damaged else checkpoint.step
            wrong += damaged
        problems[checkpoint.step] = wrong
    steps = [checkpoint.step for checkpoint in found]
    ledger = os.path.join(run_dir, LEDGER_FILE)
    good = protected_steps(read_ledger(ledger), steps, health_window) if os.path.isfile(ledger) else set()
    stay = kept(((step, left[step] is not None, step == whole) for step in steps), keep_last, keep_every, good)
    return [
        Candidate(
            checkpoint,
            _size(checkpoint.path),
            left[checkpoint.step],
            tuple(problems[checkpoint.step]),
            checkpoint.step == whole,
            checkpoint.step in good,
            checkpoint.step in stay,
        )
        for checkpoint in found
    ]


def kept_in_store(found: Sequence[Candidate], stored: Iterable[int], keep_every: int | None) -> set[int]:
    """Which of the steps that a run's store has stay: those that stay in the run, ``found``; what is newer than the
    run's newest, which its folder has lost; multiples of ``keep_every``. If none of the run's is whole, all stay."""
    if not any(candidate.newest_whole for candidate in found):
        return set(stored)
    stay = {candidate.checkpoint.step for candidate in found if candidate.keep}
    newest = max(candidate.checkpoint.step for candidate in found)
    return {
        step for step in stored if step in stay or step > newest or (keep_every is not None and step % keep_every == 0)
    }


def look(run_dir: str, checkpoint: Checkpoint) -> tuple[Manifest | None, str | None, list[str]]:
    """Manifest, why the checkpoint is not of the run's branch, and what keeps either from being known."""
    manifest = None
    try:
        manifest = read_manifest(checkpoint.path)
        return manifest, abandoned_in(run_dir, manifest), []
    except QuernError as error:
        return manifest, None, [str(error)]


def damage(folder: str, manifest: Manifest) -> list[str]:
    """What is wrong with the files of a checkpoint that stand beside its manifest, by their checksums."""
    try:
        problems = check_files(folder, manifest, hashes=True, mine=beside(folder))
    except InputError as error:
        return [str(error)]
    return [str(problem) for problem in problems]


def _size(folder: str) -> int:
    return sum(os.lstat(os.path.join(place, name)).st_size for place, _, names in os.walk(folder) for name in names)
