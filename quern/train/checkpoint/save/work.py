"""Background work of a save: writes a rank's files, publishes the folder, removes old checkpoints.

Plain arguments in, plain results out, no collective: it is done in place, by a thread, or by another process
(:mod:`.background`).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from quern import storage
from quern.errors import QuernError
from quern.train.checkpoint.format.file_locations import PLACES_FILE, elsewhere
from quern.train.checkpoint.format.files import TensorFile, Written, write_files
from quern.train.checkpoint.format.folder import publish_folder, write_file
from quern.train.checkpoint.format.manifest import CONFIG_FILE, ENCODING_FILE, HISTORY_FILE, METADATA_FILE, Manifest
from quern.train.checkpoint.format.metadata import read_metadata
from quern.train.checkpoint.format.publish import complete_folder, read_ranks
from quern.train.checkpoint.format.state import check_tensors
from quern.train.checkpoint.retention.prune import Keep, prune
from quern.train.checkpoint.save.snapshot import Memory

__all__ = ["Publication", "Work"]


@dataclass(frozen=True)
class Publication:
    """A folder with all tensor files, and what is needed to publish it as a checkpoint."""

    staged: str
    final: str
    token: str
    manifest: Manifest
    """Lists the tensor files and :attr:`metadata`."""
    config: str
    """The resolved config as YAML."""
    ranks_path: str
    """The encoding's ranks file, to copy."""
    metadata: bytes | None
    """DCP's; None: that of the last publication."""
    places: str | None
    """``places.json``, when the tensor files are on nodes' disks."""
    ledger: str
    """The run's ledger, of which the checkpoint keeps what was written before it."""
    keep: Keep | None
    """What is removed then; None: nothing."""


class Work:
    """The actions of a save, one after the other. ``memory``: where the snapshots are; None = there are none."""

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory = memory
        self._files: Sequence[TensorFile] = ()
        self._metadata: bytes | None = None

    def lay_out(self, files: Sequence[TensorFile]) -> None:
        """Set the files that :meth:`write` writes from now on."""
        self._files = files
        if self.memory is not None:
            end = max((tensor.end for file in files for tensor in file.tensors), default=0)
            self.memory.grow(end)
            self.memory.touch()

    def write(self, folder: str, fetch: Callable[[int], torch.Tensor] | None = None) -> dict[str, Written]:
        """Write, sync and hash this rank's files; ``fetch`` gives the pieces where there is no snapshot.

        Raises:
            OSError, QuernError: what could not be written.
        """
        if fetch is None:
            memory = self.memory
            assert memory is not None
            stored = [tensor for file in self._files for tensor in file.tensors]

            def fetch(number: int) -> torch.Tensor:
                return memory.tensor(stored[number])

        with _named(os.path.dirname(folder)):
            return write_files(folder, self._files, fetch)

    def publish(self, asked: Publication) -> list[str]:
        """Publish a staging folder as a checkpoint, and remove outdated ones. Returns the names of what went.

        Raises:
            OSError, QuernError: nothing is published, what stood before stands, and the staging folder is removed.
        """
        try:
            with _named(os.path.dirname(asked.final)):
                self._publish(asked)
        except BaseException:
            shutil.rmtree(asked.staged, ignore_errors=True)
            raise
        return [] if asked.keep is None else prune(asked.keep)

    def _publish(self, asked: Publication) -> None:
        self._metadata = self._metadata if asked.metadata is None else asked.metadata
        assert self._metadata is not None
        file = os.path.join(asked.staged, METADATA_FILE)
        write_file(file, self._metadata)
        manifest = asked.manifest
        check_tensors(file, read_metadata(asked.staged, manifest.files), manifest.model, ("model.", "optimizer."))
        if manifest.encoding is None:
            raise QuernError(f"{asked.final}: a run's checkpoint has an encoding")
        documents = {
            CONFIG_FILE: asked.config.encode(),
            ENCODING_FILE: read_ranks(asked.ranks_path, manifest.encoding),
        }
        if manifest.ledger_offset:
            documents[HISTORY_FILE] = _begin_of(asked.ledger, manifest.ledger_offset)
        if asked.places is not None:
            write_file(os.path.join(asked.staged, PLACES_FILE), asked.places.encode())
        complete_folder(asked.staged, manifest, documents, elsewhere(asked.staged))
        publish_folder(asked.staged, asked.final, asked.token, replace=True)


@contextmanager
def _named(folder: str) -> Iterator[None]:
    """What the system refuses in the block names a path, ``folder`` where it names none; a full disk its room too."""
    try:
        with storage.needs_room(folder):
            yield
    except OSError as error:
        error.filename = error.filename or folder
        raise


def _begin_of(path: str, size: int) -> bytes:
    with open(path, "rb") as file:
        data = file.read(size)
    if len(data) != size:
        raise QuernError(f"{path}: expected at least {size} bytes, has {len(data)}")
    return data
