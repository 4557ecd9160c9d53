"""The tensor files of checkpoints on a node's own disk: ``ROOT/step_00001000/<file>``.

A folder's name says nothing about being whole: a checkpoint exists once its manifest stands in the run's folder, and
every file is judged by the manifest's checksum.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Collection, Iterable
from contextlib import suppress

from quern import storage
from quern.train.checkpoint.format.folder import recover, remove_folder, staging_path
from quern.train.checkpoint.format.manifest import checkpoint_name
from quern.train.checkpoint.mirror.peer_files import FOLDER, mirror_folder

__all__ = ["Disk"]


class Disk:
    """One node's folder of one run. Several ranks use it at a time, each for its own files."""

    def __init__(self, root: str) -> None:
        self.root = root

    def open(self) -> None:
        """Make the folder, and tidy what a killed writer left. Once a node, before its ranks save."""
        os.makedirs(self.root, exist_ok=True)
        recover(self.root, uuid.uuid4().hex)

    def folder(self, step: int) -> str:
        """The folder with the files of a step."""
        return os.path.join(self.root, checkpoint_name(step))

    def staging(self, step: int, token: str) -> str:
        """The folder in which the files of a step are written."""
        return staging_path(self.folder(step), token)

    def stage(self, step: int, token: str) -> str:
        """Make the staging folder unless another rank has; return it."""
        staged = self.staging(step, token)
        os.makedirs(staged, exist_ok=True)
        return staged

    def settle(self, step: int, token: str, names: Iterable[str]) -> None:
        """Move one rank's written files to their final place durably, over files of the same name."""
        staged, final = self.staging(step, token), self.folder(step)
        os.makedirs(final, exist_ok=True)
        for name in names:
            os.replace(os.path.join(staged, name), os.path.join(final, name))
        storage.sync(final)
        storage.sync(self.root)
        with suppress(OSError):  # the last rank's call removes it
            os.rmdir(staged)

    def discard(self, step: int, token: str) -> None:
        """Remove what was written of a save that failed."""
        shutil.rmtree(self.staging(step, token), ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps of which there is a folder, or parts of another node's files, ascending."""
        names = {name.removeprefix(".").removesuffix(".mirror") for name in os.listdir(self.root)}
        return sorted(int(name.removeprefix("step_")) for name in names if FOLDER.fullmatch(name))

    def remove(self, steps: Collection[int]) -> None:
        """Remove the local files of these steps.

        Raises:
            OSError: a folder could not be removed; the others are.
        """
        failure = None
        for step in steps:
            shutil.rmtree(mirror_folder(self.root, checkpoint_name(step)), ignore_errors=True)
            try:
                remove_folder(self.folder(step), uuid.uuid4().hex)
            except FileNotFoundError:
                pass
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure
