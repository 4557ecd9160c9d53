"""Exports a checkpoint as a folder that ``transformers`` loads, and imports such a folder."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from typing import Any

import torch

from quern import storage
from quern.errors import InputError, QuernError
from quern.model import hf
from quern.model.transformer import Transformer
from quern.tokenize import hf_tokenizer
from quern.tokenize.encoding import OPTIONS, Encoding, load_encoding
from quern.train.checkpoint.format.file_locations import check_together
from quern.train.checkpoint.format.folder import check_free, new_folder, write_file
from quern.train.checkpoint.format.manifest import (
    ENCODING_FILE,
    EncodingInfo,
    Manifest,
    read_manifest,
)
from quern.train.checkpoint.store.stored import saved_config
from quern.train.checkpoint.tools.reader import iter_weights, verify, write_weights
from quern.train.history.branch import find_checkpoint

__all__ = ["Exported", "export_hf", "import_hf", "load_model", "read_encoding"]


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    folder: str
    checkpoint: str
    step: int
    dtype: str
    parameters: int
    files: tuple[str, ...]
    tokenizer: bool
    """False: the checkpoint does not know its encoding."""


def export_hf(
    source: str, out: str, *, dtype: torch.dtype | None = None, max_shard_bytes: int = hf.MAX_SHARD_BYTES
) -> Exported:
    """Write the weights, sizes and encoding of a checkpoint to the new folder ``out``, whole or not at all.

    ``source`` is a checkpoint or a training run, whose newest is taken; its files' checksums are compared first.
    ``dtype`` of the weights, None = as stored. Memory: one shard of at most ``max_shard_bytes``.

    Raises:
        InputError: ``source`` is no checkpoint or its files of tensors are elsewhere, ``out`` is there, or the model
            has no counterpart in transformers.
        QuernError: the checkpoint is damaged.
    """
    path = find_checkpoint(source)
    _check_free(out)
    check_together(path)
    manifest = read_manifest(path)
    problems = verify(path)
    if problems:
        raise QuernError(f"{problems[0]}; the checkpoint is damaged, nothing was exported")
    encoding = read_encoding(path, manifest)
    eos_id = encoding.eot_id if encoding else None
    length = _trained_length(path)
    hf.hf_config(manifest.model, max_position=length, eos_id=eos_id, dtype=torch.float32)  # refuses before the work
    with new_folder(os.path.abspath(out)) as staged:
        written = hf.write_weights(
            staged, manifest.model, iter_weights(path), dtype=dtype, max_shard_bytes=max_shard_bytes
        )
        config = hf.hf_config(manifest.model, max_position=length, eos_id=eos_id, dtype=written)
        contents = {
            hf.CONFIG_FILE: _json(config),
            "generation_config.json": _json({"bos_token_id": None, "eos_token_id": eos_id, "pad_token_id": None}),
        }
        if encoding:
            contents |= hf_tokenizer.tokenizer_files(encoding, max_length=length)
        for name, content in contents.items():
            write_file(os.path.join(staged, name), content)
        files = sorted(os.listdir(staged))
        for name in files:
            storage.sync(os.path.join(staged, name))
    return Exported(
        out, path, manifest.step, config["torch_dtype"], manifest.model.num_parameters, tuple(files), bool(encoding)
    )


def import_hf(folder: str, out: str, *, encoding: str | None = None, ranks: str | None = None) -> Manifest:
    """Write the weights of a folder in the layout of ``transformers`` to the new weights-only checkpoint ``out``.

    Weights are stored as float32 (float64 where the folder has float64), so that none is rounded. The encoding is read
    from tokenizer.json, or is the one given as ``encoding`` and ``ranks`` (as in ``tokenize.encoding`` and
    ``tokenize.ranks``). Memory: one tensor.

    Raises:
        InputError: another architecture, tensors or vocabulary than expected, pickled weights, or ``out`` is there.
    """
    config_file = os.path.join(folder, hf.CONFIG_FILE)
    config = storage.read_json(config_file)
    shape = hf.shape_from_config(config, config_file)
    _check_free(out)
    with hf.HFWeights(folder, shape) as weights, tempfile.TemporaryDirectory() as scratch:
        if encoding or ranks:
            found = load_encoding(encoding or "imported", ranks, OPTIONS)
        elif os.path.isfile(os.path.join(folder, hf_tokenizer.TOKENIZER)):
            found = hf_tokenizer.read_encoding(folder, scratch)
        else:
            raise InputError(f"{folder}: expected {hf_tokenizer.TOKENIZER} in it, or the encoding and its ranks file")
        if found.vocab_size != shape.vocab_size:
            raise InputError(
                f"{config_file}: vocab_size: expected {found.vocab_size}, the ids of encoding {found.name!r}, "
                f"got {shape.vocab_size}"
            )
        ranks_path = os.path.join(scratch, ENCODING_FILE)
        storage.publish_bytes(ranks_path, found.ranks_file)
        info = EncodingInfo(found.name, found.vocab_size, found.eot_id, found.ranks_sha256)
        dtype = torch.float64 if "F64" in weights.dtypes else torch.float32
        return write_weights(out, shape, weights, encoding=info, ranks_path=ranks_path, dtype=dtype)


def read_encoding(path: str, manifest: Manifest) -> Encoding | None:
    """The encoding of the checkpoint at ``path``; None when it records none.

    Raises:
        InputError: the ranks file beside the weights is not the one the manifest names.
    """
    recorded = manifest.encoding
    if recorded is None:
        return None
    file = os.path.join(path, ENCODING_FILE)
    if not os.path.isfile(file):
        raise InputError(f"{file}: expected a file with the ranks of {recorded.name}")
    sha256 = storage.sha256(file)  # before it is read as ranks: an error about these quotes them
    if sha256 != recorded.ranks_sha256:
        raise InputError(f"{file}: ranks_sha256: expected {recorded.ranks_sha256}, as the manifest says, got {sha256}")
    encoding = load_encoding(recorded.name, file)
    found = EncodingInfo(encoding.name, encoding.vocab_size, encoding.eot_id, encoding.ranks_sha256)
    for key, expected in vars(recorded).items():
        if getattr(found, key) != expected:
            raise InputError(f"{file}: {key}: expected {expected}, as the manifest says, got {getattr(found, key)}")
    if found.vocab_size != manifest.model.vocab_size:
        raise InputError(f"{file}: vocab_size: expected {manifest.model.vocab_size}, got {found.vocab_size}")
    return encoding


def load_model(path: str, *, compute_dtype: torch.dtype | None = None) -> tuple[Transformer, Manifest]:
    """The model of the checkpoint at ``path`` with its weights, on the CPU; memory: the model and one tensor.

    Raises:
        InputError: ``path`` is no checkpoint.
        QuernError: its tensors are not those of the model.
    """
    manifest = read_manifest(path)
    model = Transformer(manifest.model, compute_dtype=compute_dtype)
    parameters = model.state_dict(keep_vars=True)
    sizes = hf.expected_tensors(manifest.model)
    with torch.no_grad():
        for name, tensor in iter_weights(path):
            if sizes.pop(name, None) != tuple(tensor.shape):
                raise QuernError(f"{path}: {name}: no such parameter of this size in the model the manifest states")
            parameter = parameters[name]
            if parameter.dtype != tensor.dtype:
                parameter.data = torch.empty_like(parameter, dtype=tensor.dtype)
            parameter[: tensor.shape[0]].copy_(tensor)
            parameter[tensor.shape[0] :].zero_()  # the vocabulary's padding
    if sizes:
        raise QuernError(f"{path}: {next(iter(sizes))}: missing")
    return model.eval(), manifest


def _check_free(out: str) -> None:
    if not storage.is_local(out):
        raise InputError(f"{out}: expected a local folder")
    check_free(out)


def _trained_length(path: str) -> int | None:
    """``seq_len`` of the run's resolved config, which lies in its checkpoints; None for weights from elsewhere."""
    length = saved_config(path).get("seq_len")
    return length if isinstance(length, int) and length > 0 else None


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
