"""Publishes a staging folder as a checkpoint: writes the small files beside the tensors, and the manifest last."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from quern import __version__, storage
from quern.errors import InputError, QuernError
from quern.train.checkpoint.format.folder import write_file
from quern.train.checkpoint.format.manifest import MANIFEST_FILE, EncodingInfo, Manifest, sha256_of

__all__ = ["complete_folder", "read_ranks", "written_by"]


def read_ranks(path: str, encoding: EncodingInfo) -> bytes:
    """The bytes of a ranks file; another file than the encoding's is an :class:`InputError`."""
    with storage.reading(path):
        data = storage.read_bytes(path)
    if sha256_of(data) != encoding.ranks_sha256:
        raise InputError(f"{path}: expected SHA-256 {encoding.ranks_sha256}, of encoding {encoding.name}, has another")
    return data


def complete_folder(
    staged: str, manifest: Manifest, documents: Mapping[str, bytes], away: Collection[str] = ()
) -> Manifest:
    """Write the small files and, last, the manifest into a staging folder whose tensors are written, but for those
    ``away`` on other disks."""
    for name, record in manifest.files.items():
        if name in away:
            continue
        try:
            size = os.stat(os.path.join(staged, name)).st_size
        except OSError:
            raise QuernError(
                f"{os.path.join(staged, name)}: a rank wrote it and rank 0 does not see it; "
                f"expected a run directory on a file system that all machines share"
            ) from None
        if size != record.size:
            raise QuernError(f"{os.path.join(staged, name)}: expected {record.size} bytes, has {size}")
    records = {name: write_file(os.path.join(staged, name), data) for name, data in documents.items()}
    manifest = replace(manifest, files={**manifest.files, **records})
    Manifest.from_dict(manifest.to_dict(), name=os.path.join(staged, MANIFEST_FILE))  # what is published can be read
    write_file(os.path.join(staged, MANIFEST_FILE), manifest.to_bytes())
    return manifest


def written_by() -> dict[str, str]:
    """Versions of the software that writes."""
    return {"quern": __version__, "torch": torch.__version__}
