"""DCP's files read with checked metadata, and written by one process, with errors people can read.

DCP's own on-disk format is kept, so torch's tools read these checkpoints too; what it trusts or leaves out is replaced:
every file's SHA-256 is taken from the bytes as they are written, files are synced after their last flush, and no pickle
is trusted (:mod:`.metadata`; tensors are read by DCP with ``torch.load(weights_only=True)``).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from quern.errors import QuernError
from quern.train.agree import Agreement, describe
from quern.train.checkpoint.files import write_files
from quern.train.checkpoint.folder import write_file
from quern.train.checkpoint.manifest import METADATA_FILE, FileRecord, sha256_of
from quern.train.checkpoint.plan import Planner
from quern.train.checkpoint.unpadded import UnpaddedLoadPlanner

__all__ = ["load_tensors", "save_tensors"]


def save_tensors(
    folder: str,
    tensors: Mapping[str, torch.Tensor],
    rows: Mapping[str, int],
    *,
    group: dist.ProcessGroup | None,
    alone: bool,
    fetch: Callable[[str], torch.Tensor] | None = None,
) -> dict[str, FileRecord]:
    """Write ``tensors`` below ``folder``, each rank its share; collective unless ``alone``.

    Returns this rank's files, synced, with checksums (rank 0's include ``.metadata``).

    Raises:
        QuernError: on every rank, when a rank could not write.
    """
    planner = Planner(Agreement(0, 1) if alone else Agreement(dist.get_rank(group), dist.get_world_size(group), group))
    with _plain_errors(f"{folder}: not saved"):
        plan = planner.plan(tensors, rows, fetch)
        written = planner.agreement.own(lambda: write_files(folder, plan.files, lambda n: planner.fetch(n).cpu()))
        files = {name: file.record for name, file in written.items()}
        reports = planner.agreement.collect(planner.report(written))
        if planner.agreement.rank == 0:
            metadata = planner.metadata(reports)
            assert metadata is not None
            write_file(os.path.join(folder, METADATA_FILE), metadata)
            files[METADATA_FILE] = FileRecord(sha256_of(metadata), len(metadata))
    return files


def load_tensors(
    folder: str,
    metadata: Metadata,
    tensors: Mapping[str, torch.Tensor],
    rows: Mapping[str, int],
    *,
    group: dist.ProcessGroup | None,
    alone: bool,
) -> None:
    """Read into ``tensors`` in place, each rank its part; collective unless ``alone``.

    Names, sizes and types must have been checked against ``metadata``.

    Raises:
        QuernError: on every rank, when a rank could not read.
    """
    with _plain_errors(f"{folder}: not loaded"), _quiet():
        torch_checkpoint.load(
            dict(tensors),
            storage_reader=_Reader(folder, metadata),
            planner=UnpaddedLoadPlanner(rows),
            process_group=group,
            no_dist=alone,
        )


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Without torch's remarks that a single process is taken for one, and that ranks have other tensors than others,
    as a pipeline's have: they are read each by itself."""
    with warnings.catch_warnings():
        for message in ("torch.distributed is disabled", "Detected mismatched keys"):
            warnings.filterwarnings("ignore", message=message, category=UserWarning)
        yield


@contextmanager
def _plain_errors(what: str) -> Generator[None, None, None]:
    """DCP's exception, which is a BaseException that nothing catches, as ours."""
    try:
        yield
    except CheckpointException as error:
        _raise_first(error, what)
    except (OSError, RuntimeError, ValueError, AssertionError) as error:
        raise QuernError(f"{what}: {describe(error)}") from error


def _raise_first(error: CheckpointException, what: str) -> NoReturn:
    rank, (first, _) = min(error.failures.items())
    if not isinstance(first, Exception):
        raise first from error  # Ctrl-C and exits stay what they are
    if isinstance(first, QuernError):
        raise type(first)(str(first)) from error
    raise QuernError(f"{what}: rank {rank}: {describe(first)}") from error


class _Reader(FileSystemReader):
    def __init__(self, folder: str, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        return self._metadata
