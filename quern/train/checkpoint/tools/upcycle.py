"""Writes a dense model's checkpoint as one of a model with experts, each a copy of its layer's feed-forward network.

Sparse upcycling (Komatsuzaki et al. 2022) of SwiGLUs. What is written equals the dense model before its first step, up
to rounding: a token's experts give what the dense network gives, and their weights sum to one. Whatever would not is
refused. Memory is that of :mod:`quern.train.checkpoint.tools.rewrite`: one piece of a tensor, and what it is made of.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace

import torch
from pydantic import ValidationError
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from quern.errors import InputError
from quern.model.config import ModelConfig, ModelShape
from quern.model.init import STD, draw
from quern.model.moe.config import MoEConfig, MoEShape
from quern.train.checkpoint.format.manifest import MANIFEST_FILE, METADATA_FILE
from quern.train.checkpoint.format.slices import StoredTensors
from quern.train.checkpoint.format.state import weight_sizes
from quern.train.checkpoint.tools.rewrite import Rewritten, open_source, write_anew
from quern.train.init_from import model_section

__all__ = ["ORIGIN_FILE", "upcycle"]

ORIGIN_FILE = "upcycled.json"
"""In the checkpoint that is written: of which one it was made, and the seed of its routers."""

_EXPERTS = re.compile(r"(model\.blocks\.\d+\.ffn)\.experts\.(w[123])")
_NEW = re.compile(r"(model\.blocks\.\d+\.ffn)\.(router\.weight|bias)")


def upcycle(
    source: str, out: str, moe: MoEConfig, *, seed: int = 0, files: int | None = None
) -> tuple[Rewritten, ModelShape]:
    """Write the weights at ``source`` to the folder ``out`` with experts as ``moe`` says, whole or not at all; returns
    the model's shape too. Routers are those of a fresh model of that shape and ``seed``, biases of experts are 0.

    Step, tokens, run, ledger and config stay those of ``source``, of which moments, ``extra`` tensors and scalars are
    left out. ``files`` as of :func:`quern.train.checkpoint.tools.rewrite.reshard`.

    Raises:
        InputError: as ``reshard``; ``source`` has experts already, or the model would not equal the dense one.
        QuernError: ``source`` is damaged, or a file could not be read or written.
    """
    dense, out = open_source(source, out)
    manifest = dense.manifest
    if manifest.model.moe is not None:
        got = f"one with {manifest.model.moe.num_experts} experts"
        raise InputError(f"{os.path.join(source, MANIFEST_FILE)}: expected the checkpoint of a dense model, got {got}")
    try:
        shape = ModelConfig(**model_section(manifest.model), moe=moe).shape(manifest.model.vocab_size)
    except ValidationError as error:
        raise InputError(str(error.errors()[0]["ctx"]["error"])) from None
    assert shape.moe is not None
    _check_equal(manifest.model.ffn_dim, shape.moe)
    origin = {
        "source": os.path.abspath(source), "checksum": manifest.to_dict()["checksum"], "run": manifest.run,
        "step": manifest.step, "seed": seed,
    }  # fmt: skip
    given = _Upcycled(dense, shape, seed)
    made = write_anew(
        dense, out, given.tensors, given.read, files, None, replace(manifest, model=shape), weights_only=True,
        documents={ORIGIN_FILE: (json.dumps(origin, indent=2) + "\n").encode()},
    )  # fmt: skip
    return made, shape


def _check_equal(ffn_dim: int, moe: MoEShape) -> None:
    """Raises InputError where the model would not equal the dense one."""
    whole = moe.normalize or (moe.score == "softmax" and moe.top_k == moe.num_experts)
    for name, fits, expected in (
        ("ffn_dim", moe.ffn_dim == ffn_dim, f"{ffn_dim}, the dense model's, of which each expert is a copy"),
        ("normalize", whole, "true, so that the weights of a token's experts sum to one"),
        ("scale", moe.scale == 1, "1, so that the weights of a token's experts sum to one"),
        ("shared_ffn_dim", not moe.shared_ffn_dim, "0, since shared experts add to what the copies give"),
        ("capacity", moe.limit is None or moe.limit[0] >= moe.limit[1],
         f"null, or {moe.num_experts / moe.top_k:g} and more, with which no token is dropped"),
    ):  # fmt: skip
        if not fits:
            got = json.dumps(getattr(moe, name))
            raise InputError(f"moe.{name}: expected {expected}, got {got}; the model would not equal the dense one")


class _Upcycled:
    """The tensors of the model with experts, each made as it is read."""

    def __init__(self, dense: StoredTensors, shape: ModelShape, seed: int) -> None:
        self._dense, self._seed = dense, seed
        self.tensors: dict[str, TensorStorageMetadata] = {}
        for name, size in weight_sizes(shape).items():
            stored = f"model.{name}"
            like = _NEW.sub(r"\1.w1.weight", _dense_name(stored))
            if like not in dense.tensors:
                raise InputError(f"{os.path.join(dense.path, METADATA_FILE)}: {like}: missing")
            dtype = dense.tensors[like].properties.dtype
            if _NEW.fullmatch(stored):
                dtype = torch.promote_types(dtype, torch.float32)
            self.tensors[stored] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), [])

    def read(self, name: str, box: ChunkStorageMetadata) -> torch.Tensor:
        """The elements of a tensor inside one of its boxes."""
        tensor = self.tensors[name]
        if new := _NEW.fullmatch(name):
            if new[2] == "bias":
                return torch.zeros(box.sizes, dtype=tensor.properties.dtype)
            (first, column), (rows, columns) = box.offsets, box.sizes
            drawn = draw(name.removeprefix("model."), tuple(tensor.size), self._seed, first, first + rows)
            return (drawn[:, column : column + columns] * STD).to(tensor.properties.dtype)
        if not _EXPERTS.fullmatch(name):
            return self._dense.read(name, box)
        of_one = ChunkStorageMetadata(torch.Size(box.offsets[1:]), torch.Size(box.sizes[1:]))
        return self._dense.read(_dense_name(name), of_one).expand(box.sizes).contiguous()


def _dense_name(name: str) -> str:
    """Of the tensor that one of experts is copied from; any other name is the same there."""
    return _EXPERTS.sub(r"\1.\2.weight", name)
