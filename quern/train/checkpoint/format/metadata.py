"""Reads DCP's ``.metadata`` without unpickling anything but plain records.

The file is a pickle, and a pickle may name any function to call. Here every record class it names becomes an inert
holder of its state, made for this one read; only element types (``torch.float32`` …) are looked up in torch. What the
holders contain is then checked and rebuilt as DCP's own classes, so that nothing but numbers and texts passes. A name
outside the lists below is refused before anything is called.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from quern import storage
from quern.errors import InputError
from quern.train.checkpoint.format.manifest import METADATA_FILE, FileRecord

__all__ = ["read_metadata"]

_METADATA = "torch.distributed.checkpoint.metadata"
#: Records of the format, by module and name.
_RECORDS = {
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
#: Constructors of the format: their arguments are kept, they are never called.
_CALLS = {
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.bfloat16, torch.float16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


def read_metadata(path: str, files: Mapping[str, FileRecord]) -> Metadata:
    """The tensors of the checkpoint at ``path`` and where they lie; ``files`` is the manifest's list.

    Raises:
        InputError: the file names a class that no checkpoint needs, holds anything but tensors, or does not fit itself
            or ``files``.
    """
    file = os.path.join(path, METADATA_FILE)
    with storage.reading(file), open(file, "rb") as stream:
        data = stream.read()
    try:
        root = _Inert(io.BytesIO(data), file).load()
        return _rebuild(root, files, file)
    except InputError:
        raise
    except Exception as error:  # a damaged pickle fails in a dozen ways, none of which means anything to the reader
        raise InputError(f"{file}: not a checkpoint's metadata ({type(error).__name__}: {error})") from None


class _Record:
    """Holds what a pickled object held."""

    kind = ""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, kind: str, name: str) -> Any:
        if self.kind != kind:
            raise ValueError(f"expected a {kind}, got a {self.kind}")
        return self.state.get(name)


class _Inert(pickle.Unpickler):
    """Knows the format's names, and makes every class anew: even a pickle that alters them alters nothing else."""

    def __init__(self, stream: io.BytesIO, file: str) -> None:
        super().__init__(stream)
        self._file = file
        self._known: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if key in _RECORDS:
            return self._known.setdefault(key, type(name, (_Record,), {"kind": name}))
        if key in _CALLS:
            return self._known.setdefault(key, _keeper(name))
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        raise InputError(f"{self._file}: names {module}.{name}, which no checkpoint needs; it is not read")

    def persistent_load(self, pid: Any) -> Any:
        raise ValueError("a persistent id")


def _keeper(name: str) -> Callable[..., tuple[str, tuple[Any, ...]]]:
    def keep(*arguments: Any) -> tuple[str, tuple[Any, ...]]:
        return name, arguments

    return keep


def _size(value: Any) -> torch.Size:
    name, (numbers,) = value
    if name != "Size" or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"expected a size, got {value!r}")
    return torch.Size(numbers)


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected an integer ≥ 0, got {value!r}")
    return value


def _rebuild(root: Any, files: Mapping[str, FileRecord], file: str) -> Metadata:
    slices: dict[MetadataIndex, _StorageInfo] = {}
    for index, info in root.field("Metadata", "storage_data").items():
        if info.state.get("transform_descriptors"):
            raise ValueError("transformed streams are not read")
        name = info.field("_StorageInfo", "relative_path")
        place = _StorageInfo(name, _natural(info.field("_StorageInfo", "offset")), _natural(info.state["length"]))
        if name not in files:
            raise InputError(f"{file}: refers to {name!r}, which the manifest does not list")
        if place.offset + place.length > files[name].size:
            raise InputError(f"{file}: refers to bytes after the end of {name}")
        offset = index.field("MetadataIndex", "offset")
        slices[MetadataIndex(index.state["fqn"], None if offset is None else _size(offset))] = place
    tensors: dict[str, Any] = {}
    for name, record in root.field("Metadata", "state_dict_metadata").items():
        if record.kind != "TensorStorageMetadata":
            raise InputError(f"{file}: {name} is not a tensor; only tensors are read from a checkpoint")
        tensors[name] = _tensor(name, record, slices, file)
    return Metadata(tensors, None, slices, StorageMeta())


def _tensor(
    name: str, record: _Record, slices: Mapping[MetadataIndex, _StorageInfo], file: str
) -> TensorStorageMetadata:
    size = _size(record.field("TensorStorageMetadata", "size"))
    dtype = record.field("TensorStorageMetadata", "properties").state[0]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name}: expected an element type, got {dtype!r}")
    chunks = []
    for chunk in record.field("TensorStorageMetadata", "chunks"):
        offsets = _size(chunk.field("ChunkStorageMetadata", "offsets"))
        sizes = _size(chunk.field("ChunkStorageMetadata", "sizes"))
        inside = len(offsets) == len(sizes) == len(size) and all(
            offset + length <= whole for offset, length, whole in zip(offsets, sizes, size, strict=True)
        )
        if not inside or MetadataIndex(name, offsets) not in slices:
            raise InputError(f"{file}: {name}: a chunk lies outside the tensor or in no file")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise InputError(f"{file}: {name}: its chunks do not cover it")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
