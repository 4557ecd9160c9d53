"""Reads or writes a checkpoint in one process without a process group, for export, import and other tools."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from quern.errors import InputError, QuernError
from quern.model.config import ModelShape
from quern.remote.retry import StoreError
from quern.train.checkpoint.format.dcp import load_tensors, save_pieces
from quern.train.checkpoint.format.file_locations import Place, check_together, elsewhere, in_order, read_places
from quern.train.checkpoint.format.files import FILE_BYTES, filled
from quern.train.checkpoint.format.folder import check_free, new_folder
from quern.train.checkpoint.format.manifest import (
    ENCODING_FILE,
    METADATA_FILE,
    EncodingInfo,
    Manifest,
    Problem,
    check_file,
    check_files,
    read_manifest,
)
from quern.train.checkpoint.format.metadata import read_metadata
from quern.train.checkpoint.format.publish import complete_folder, read_ranks, written_by
from quern.train.checkpoint.format.slices import boxes
from quern.train.checkpoint.format.state import weight_sizes
from quern.train.checkpoint.store.store import Store
from quern.train.processes.agree import Agreement, describe

__all__ = [
    "Verified", "inspect", "inspect_stored", "iter_weights", "read_manifest", "verify", "weight_sizes", "write_weights",
]  # fmt: skip


def iter_weights(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors (global name, unpadded, CPU, stored type), one at a time, in the order of their names.

    Only one tensor is held; moments are not read. Checksums are :func:`verify`'s.

    Raises:
        InputError: the manifest or the metadata is missing, damaged or foreign, or files of tensors are elsewhere.
        QuernError: a file could not be read.
    """
    check_together(path)
    metadata = read_metadata(path, read_manifest(path).files)
    for name, stored in sorted(metadata.state_dict_metadata.items()):
        if name.startswith("model.") and isinstance(stored, TensorStorageMetadata):
            tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
            load_tensors(path, metadata, {name: tensor}, {}, Agreement(0, 1))
            yield name.removeprefix("model."), tensor


def write_weights(
    path: str,
    shape: ModelShape,
    weights: Mapping[str, torch.Tensor],
    *,
    encoding: EncodingInfo | None = None,
    ranks_path: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Manifest:
    """Publish a weights-only checkpoint of step 0 at ``path``, whole or not at all.

    ``weights`` maps every global parameter name to its unpadded tensor; it is stored as ``dtype``. The mapping may be
    lazy: each name is looked up once, when its turn to be written comes, and its tensor is then let go.

    Raises:
        InputError: ``path`` is taken, a name is missing or unknown, a size is not the shape's, or ``ranks_path`` is not
            the encoding's.
    """
    path = os.path.abspath(path)
    check_free(path)
    if (encoding is None) != (ranks_path is None):
        raise ValueError("encoding and ranks_path belong together")
    sizes, precision = weight_sizes(shape), str(dtype).removeprefix("torch.")
    for name in sizes.keys() - weights.keys():
        raise InputError(f"{path}: {name}: missing among the weights")
    for name in weights.keys() - sizes.keys():
        raise InputError(f"{path}: {name}: not a weight of this model")

    def fetch(stored_name: str, _: ChunkStorageMetadata) -> torch.Tensor:
        name = stored_name.removeprefix("model.")
        tensor = weights[name].detach()
        if tuple(tensor.shape) != sizes[name]:
            raise InputError(f"{path}: {name}: expected size {list(sizes[name])}, got {list(tensor.shape)}")
        return tensor.to(device="cpu", dtype=dtype).contiguous()

    documents = {}
    if encoding is not None and ranks_path is not None:
        documents[ENCODING_FILE] = read_ranks(ranks_path, encoding)
    with new_folder(path) as staged:
        pieces = [(f"model.{name}", next(boxes(size, math.prod(size)))) for name, size in sizes.items()]
        dealt = filled(pieces, FILE_BYTES, lambda piece: math.prod(piece[1].sizes) * dtype.itemsize)
        tensors = {
            f"model.{name}": TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), [])
            for name, size in sizes.items()
        }
        try:
            files = save_pieces(staged, dealt, tensors, fetch)
        except (OSError, RuntimeError) as error:
            raise QuernError(f"{staged}: not saved: {describe(error)}") from error
        manifest = Manifest(
            step=0,
            data_step=0,
            tokens=0,
            model=shape,
            layout={},
            precision=precision,
            order="",
            ledger_offset=0,
            corpus_versions={},
            corpus_fingerprint="",
            encoding=encoding,
            config_digest="",
            optimizer=False,
            scalars={},
            written_by=written_by(),
            files=files,
        )
        manifest = complete_folder(staged, manifest, documents)
    return manifest


@dataclass(frozen=True)
class Verified:
    """The result of :func:`inspect`."""

    problems: tuple[Problem, ...]
    """What is damaged, or missing where it should be."""
    absent: tuple[Problem, ...] = ()
    """Files that are on the disks of nodes, and on none that this machine has: nothing is known of them."""
    spoilt: tuple[Problem, ...] = ()
    """Damaged copies of files that are whole on another disk, from which they are read."""


def inspect(path: str) -> Verified:
    """Check the checkpoint at ``path``.

    Looked at are the manifest, presence, size and SHA-256 of every file, DCP's metadata, and whether the model's
    tensors are all there in the sizes of the manifest's shape. Of files that are on nodes' disks every copy is looked
    at that this machine has.
    """
    try:
        manifest = read_manifest(path)
    except InputError as error:
        return Verified((Problem(path, str(error)),))
    try:
        places = read_places(path) or ()
    except InputError as error:
        return Verified((Problem(path, str(error)), *check_files(path, manifest, hashes=True)))
    away = elsewhere(path)
    problems = check_files(path, manifest, hashes=True, mine=lambda name: name not in away)
    absent: list[Problem] = []
    spoilt: list[Problem] = []
    for name, record in manifest.files.items():
        if name in away:
            copies = _copies(path, name, places)
            looks = [check_file(folder, name, record, hashes=True) for folder in copies]
            whole = None in looks
            (spoilt if whole else problems).extend(problem for problem in looks if problem is not None)
            if not copies:
                nodes = ", ".join(f"node {place.host}, {place.folder}" for place in places if name in place.files)
                absent.append(Problem(os.path.join(path, name), f"on no disk that this machine has ({nodes})"))
    return Verified((*problems, *_check_metadata(path, manifest)), tuple(absent), tuple(spoilt))


def _copies(path: str, name: str, places: Sequence[Place]) -> list[str]:
    """The folders on this machine that have a file."""
    folders = [path, *(place.folder for place in in_order(places, name))]
    return [folder for folder in dict.fromkeys(folders) if os.path.lexists(os.path.join(folder, name))]


def inspect_stored(store: Store, step: int) -> Verified:
    """:func:`inspect` for a checkpoint in a store: every file is fetched to a temporary folder, one at a time.

    Raises:
        StoreError: the store cannot be reached.
        QuernError: the temporary folder cannot be written.
    """
    try:
        manifest = store.manifest(step)
    except InputError as error:
        return Verified((Problem(store.address(step), str(error)),))
    problems = []
    with tempfile.TemporaryDirectory(prefix="quern-verify-") as folder:
        for name, record in manifest.files.items():
            try:
                path = store.fetch(step, name, record, folder)
            except StoreError as error:
                if error.transient:
                    raise
                address = store.address(step, name)
                problems.append(Problem(address, str(error).removeprefix(f"{address}: ")))
                continue
            if name != METADATA_FILE:
                os.unlink(path)
        if os.path.exists(os.path.join(folder, METADATA_FILE)):
            problems += [
                Problem(store.address(step, METADATA_FILE), problem.what)
                for problem in _check_metadata(folder, manifest)
            ]
    return Verified(tuple(problems))


def verify(path: str) -> list[Problem]:
    """All problems that :func:`inspect` finds; empty if the checkpoint is reliable."""
    found = inspect(path)
    return [*found.problems, *found.absent]


def _check_metadata(path: str, manifest: Manifest) -> list[Problem]:
    file = os.path.join(path, METADATA_FILE)
    try:
        stored = read_metadata(path, manifest.files).state_dict_metadata
    except InputError as error:
        return [Problem(file, str(error))]
    problems = []
    for name, size in weight_sizes(manifest.model).items():
        found = stored.get(f"model.{name}")
        if not isinstance(found, TensorStorageMetadata):
            problems.append(Problem(file, f"{name}: missing"))
        elif tuple(found.size) != size:
            problems.append(Problem(file, f"{name}: expected size {list(size)}, has {list(found.size)}"))
    return problems
