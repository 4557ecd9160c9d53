"""Samples text from a checkpoint."""

from __future__ import annotations

import torch

from quern.errors import InputError, QuernError
from quern.model.generate import generate
from quern.train.checkpoint.format.manifest import read_manifest
from quern.train.checkpoint.tools.export import load_model, read_encoding
from quern.train.checkpoint.tools.reader import verify
from quern.train.history.branch import find_checkpoint

__all__ = ["continue_text"]


def continue_text(
    path: str, prompt: str, *, max_new_tokens: int, temperature: float, top_k: int | None = None, seed: int = 0
) -> str:
    """The continuation of ``prompt`` by the checkpoint at ``path`` (of a run: its newest), on the CPU, in the weights'
    precision. The same seed gives the same text.

    Raises:
        InputError: no checkpoint, none with an encoding, or an empty prompt.
        QuernError: the checkpoint is damaged: its files' checksums are compared first.
    """
    path = find_checkpoint(path)
    encoding = read_encoding(path, read_manifest(path))
    if encoding is None:
        raise InputError(f"{path}: records no encoding; a prompt cannot be turned into tokens")
    tokens = encoding.encode(prompt).astype("int64")
    if not len(tokens):
        raise InputError("--prompt: expected at least one character, got an empty text")
    problems = verify(path)
    if problems:
        raise QuernError(f"{problems[0]}; the checkpoint is damaged")
    model, _ = load_model(path)
    continued = generate(
        model, torch.from_numpy(tokens)[None], max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k,
        seed=seed, eot_id=encoding.eot_id,
    )  # fmt: skip
    new = continued[0, len(tokens) :].numpy()
    return encoding.decode(new[new != encoding.eot_id])
