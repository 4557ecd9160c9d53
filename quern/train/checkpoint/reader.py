"""A checkpoint read or written by one process, without a process group: what exporters, importers and tools use."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from quern.errors import InputError
from quern.model.config import ModelShape
from quern.train.checkpoint.dcp import load_tensors, save_tensors
from quern.train.checkpoint.folder import publish_folder, staging_path
from quern.train.checkpoint.manifest import (
    ENCODING_FILE,
    METADATA_FILE,
    EncodingInfo,
    Manifest,
    Problem,
    check_files,
    read_manifest,
)
from quern.train.checkpoint.metadata import read_metadata
from quern.train.checkpoint.publish import complete_folder, read_ranks, written_by
from quern.train.checkpoint.state import weight_sizes

__all__ = ["iter_weights", "read_manifest", "verify", "weight_sizes", "write_weights"]


def iter_weights(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors (global name, unpadded, CPU, stored type), one at a time, in the order of their names.

    Only one tensor is held; moments are not read. Checksums are :func:`verify`'s.

    Raises:
        InputError: the manifest or the metadata is missing, damaged or foreign.
        QuernError: a file could not be read.
    """
    metadata = read_metadata(path, read_manifest(path).files)
    for name, stored in sorted(metadata.state_dict_metadata.items()):
        if name.startswith("model.") and isinstance(stored, TensorStorageMetadata):
            tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
            load_tensors(path, metadata, {name: tensor}, {}, group=None, alone=True)
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
    if os.path.lexists(path):
        raise InputError(f"{path}: is already there; expected a path that is free")
    if (encoding is None) != (ranks_path is None):
        raise ValueError("encoding and ranks_path belong together")
    sizes = weight_sizes(shape)
    for name in sizes.keys() - weights.keys():
        raise InputError(f"{path}: {name}: missing among the weights")
    for name in weights.keys() - sizes.keys():
        raise InputError(f"{path}: {name}: not a weight of this model")

    def fetch(stored_name: str) -> torch.Tensor:
        name = stored_name.removeprefix("model.")
        tensor = weights[name].detach()
        if tuple(tensor.shape) != sizes[name]:
            raise InputError(f"{path}: {name}: expected size {list(sizes[name])}, got {list(tensor.shape)}")
        return tensor.to(device="cpu", dtype=dtype).contiguous()

    token = uuid.uuid4().hex
    staged = staging_path(path, token)
    documents = {}
    if encoding is not None and ranks_path is not None:
        documents[ENCODING_FILE] = read_ranks(ranks_path, encoding)
    os.makedirs(staged)
    try:
        described = {f"model.{name}": torch.empty(size, dtype=dtype, device="meta") for name, size in sizes.items()}
        files = save_tensors(staged, described, {}, group=None, alone=True, fetch=fetch)
        manifest = Manifest(
            step=0,
            data_step=0,
            tokens=0,
            model=shape,
            layout={},
            precision=str(dtype).removeprefix("torch."),
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
        publish_folder(staged, path, token, replace=False)
    except BaseException:
        with suppress(OSError):
            shutil.rmtree(staged)
        raise
    return manifest


def verify(path: str) -> list[Problem]:
    """Everything wrong with the checkpoint at ``path``; empty when it can be relied on.

    Looked at are the manifest, presence, size and SHA-256 of every file, DCP's metadata, and whether the model's
    tensors are all there in the sizes of the manifest's shape.
    """
    try:
        manifest = read_manifest(path)
    except InputError as error:
        return [Problem(path, str(error))]
    problems = check_files(path, manifest, hashes=True)
    file = os.path.join(path, METADATA_FILE)
    try:
        stored = read_metadata(path, manifest.files).state_dict_metadata
    except InputError as error:
        return [*problems, Problem(file, str(error))]
    for name, size in weight_sizes(manifest.model).items():
        found = stored.get(f"model.{name}")
        if not isinstance(found, TensorStorageMetadata):
            problems.append(Problem(file, f"{name}: missing"))
        elif tuple(found.size) != size:
            problems.append(Problem(file, f"{name}: expected size {list(size)}, has {list(found.size)}"))
    return problems
