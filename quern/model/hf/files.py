"""Reads and writes weights in the files of ``transformers``, with ``safetensors``, one shard at a time.

The vocabulary is unpadded. Nothing here reads a pickle.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from quern import storage
from quern.errors import InputError, QuernError
from quern.model.config import ModelShape
from quern.model.hf.names import expected_tensors, hf_names

__all__ = ["INDEX_FILE", "MAX_SHARD_BYTES", "HFWeights", "write_weights"]

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

#: What ``transformers`` writes by default.
MAX_SHARD_BYTES = 5 * 10**9

#: A buffer that old versions of ``transformers`` saved; it follows from the config.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_FLOATS = {"F64", "F32", "F16", "BF16"}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def write_weights(
    folder: str,
    shape: ModelShape,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> torch.dtype:
    """Write ``weights`` (our names, unpadded) as ``model.safetensors``, or in shards with an index.

    Returns the dtype they have there. Takes one tensor after the other, of experts all, and holds those of one shard,
    which has at most ``max_shard_bytes``, or one tensor. ``dtype`` None keeps the first tensor's.

    Raises:
        QuernError: the weights are not exactly those of a model of this ``shape``.
    """
    missing = expected_tensors(shape)
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    total = parameters = 0

    def flush() -> None:
        shards.append(list(held))
        path = os.path.join(folder, f".shard{len(shards)}")
        with open(path, "xb") as created:
            mode = stat.S_IMODE(os.fstat(created.fileno()).st_mode)
        save_file(held, path, metadata={"format": "pt"})
        os.chmod(path, mode)  # as any file that is made here: safetensors lets nobody else read it
        held.clear()

    for name, tensor in weights:
        size = missing.pop(name, None)
        if size != tuple(tensor.shape):
            raise QuernError(f"parameter {name}: expected {size or 'no such name'}, got size {tuple(tensor.shape)}")
        dtype = dtype or tensor.dtype
        stacked = len(size) == 3
        for key, part in zip(hf_names(name, shape), tensor if stacked else [tensor], strict=True):
            stored = part.to(dtype, copy=stacked).contiguous()  # a view would keep all experts
            if held and sum(t.nbytes for t in held.values()) + stored.nbytes > max_shard_bytes:
                flush()
            held[key] = stored
            total, parameters = total + stored.nbytes, parameters + stored.numel()
        del tensor, part, stored
    if missing:
        raise QuernError(f"parameter {next(iter(missing))}: missing, and {len(missing) - 1} more")
    flush()
    count = len(shards)
    files = [SINGLE_FILE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for number, file in enumerate(files, 1):
        os.rename(os.path.join(folder, f".shard{number}"), os.path.join(folder, file))
    if count > 1:
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {"metadata": {"total_size": total, "total_parameters": parameters}, "weight_map": places}
        with open(os.path.join(folder, INDEX_FILE), "w", encoding="utf-8") as file_:
            json.dump(index, file_, indent=2, sort_keys=True)
    assert dtype is not None
    return dtype


class HFWeights(Mapping[str, torch.Tensor]):
    """The tensors of a folder by our names, each read when it is looked up; names and sizes are checked on opening.

    Raises:
        InputError: pickled weights, a tensor that is missing, unknown, of another size or no float; a damaged file.
    """

    def __init__(self, folder: str, shape: ModelShape) -> None:
        self._open = ExitStack()
        try:
            self._find(folder, shape)
        except BaseException:
            self._open.close()
            raise

    def _find(self, folder: str, shape: ModelShape) -> None:
        self.dtypes: set[str] = set()
        """As ``safetensors`` calls them: ``F32``, ``BF16``, …"""
        self._places: dict[str, tuple[str, Any]] = {}
        files, promised = _weight_files(folder)
        sizes = expected_tensors(shape)
        self._keys = {name: hf_names(name, shape) for name in sizes}
        """Of each tensor of ours."""
        parts = {name: size[1:] if len(size) == 3 else size for name, size in sizes.items()}
        expected_of = {key: parts[name] for name, keys in self._keys.items() for key in keys}
        for file in files:
            path = os.path.join(folder, file)
            try:
                handle = self._open.enter_context(safe_open(path, framework="pt"))
                keys = list(handle.keys())
            except (SafetensorError, OSError) as error:
                raise InputError(f"{path}: cannot be read as safetensors ({error})") from None
            for key in keys:
                if _DERIVED.fullmatch(key):
                    continue
                if key not in expected_of:
                    why = " (the config ties it to the embedding)" if key == "lm_head.weight" else ""
                    raise InputError(f"{path}: {key}: expected no such tensor in this model{why}")
                part, expected = handle.get_slice(key), expected_of[key]
                if tuple(part.get_shape()) != expected:
                    raise InputError(f"{path}: {key}: expected size {list(expected)}, got {part.get_shape()}")
                if part.get_dtype() not in _FLOATS:
                    raise InputError(
                        f"{path}: {key}: expected one of {', '.join(sorted(_FLOATS))}, got {part.get_dtype()}"
                    )
                if key in self._places:
                    raise InputError(f"{path}: {key}: expected once, is also in {self._places[key][0]}")
                self._places[key] = (path, handle)
                self.dtypes.add(part.get_dtype())
        for key, size in expected_of.items():
            if key not in self._places:
                path = os.path.join(folder, promised.get(key, files[0] if len(files) == 1 else INDEX_FILE))
                raise InputError(f"{path}: {key}: missing; expected a tensor of size {list(size)}")

    def __getitem__(self, name: str) -> torch.Tensor:
        keys = self._keys[name]
        if ".experts." not in name:
            return self._places[keys[0]][1].get_tensor(keys[0])
        parts = (self._places[key][1].get_tensor(key) for key in keys)  # one at a time
        return _stacked(parts, len(keys))

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._keys))

    def __len__(self) -> int:
        return len(self._keys)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._open.close()


def _stacked(parts: Iterator[torch.Tensor], number: int) -> torch.Tensor:
    """All experts' tensors as one, in the widest of their dtypes."""
    first = next(parts)
    whole = first.new_empty(number, *first.shape)
    whole[0] = first
    for place, part in enumerate(parts, 1):
        whole = whole.to(torch.promote_types(whole.dtype, part.dtype))
        whole[place] = part
    return whole


def _weight_files(folder: str) -> tuple[list[str], dict[str, str]]:
    """The safetensors files of a folder, and the file of each tensor where an index says so."""
    index = os.path.join(folder, INDEX_FILE)
    if os.path.isfile(index):
        content = storage.read_json(index)
        places = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(places, dict) or not places:
            raise InputError(f"{index}: weight_map: expected an object of tensor names and files")
        for tensor, file in places.items():
            if not isinstance(file, str) or os.path.basename(file) != file or not file.endswith(".safetensors"):
                raise InputError(f"{index}: weight_map.{tensor}: expected a .safetensors file beside it, got {file!r}")
        return sorted(set(places.values())), places
    if os.path.isfile(os.path.join(folder, SINGLE_FILE)):
        return [SINGLE_FILE], {}
    pickles = sorted(name for name in os.listdir(folder) if name.endswith(_PICKLES))
    if pickles:
        raise InputError(
            f"{os.path.join(folder, pickles[0])}: a pickle, which runs code when it is read; "
            f"expected {SINGLE_FILE} or {INDEX_FILE}"
        )
    raise InputError(f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE} in it")
