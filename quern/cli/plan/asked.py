"""What is asked of ``quern plan``: a model, a batch, values that are fixed."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, get_args

import yaml

from quern import storage
from quern.config import read_yaml, validate
from quern.errors import InputError
from quern.model.config import PRESETS, ModelConfig, ModelShape
from quern.model.float8.recipe import Recipe, Scaling
from quern.planner.candidates import Choice, Wish

__all__ = ["VOCABULARY", "model_of", "number", "recipe_of", "wish_of"]

VOCABULARY = 128_256
"""Ids of Llama 3's encoding."""
#: What a fixed value may be, of those that are not whole numbers above 0.
_VALUES: dict[str, tuple[Any, ...]] = {
    "zero": (None, 1, 2), "schedule": (None, "1f1b", "interleaved_1f1b", "zbv_zero_bubble"),
    "stages_per_rank": (None, 2, 4), "checkpointing": ("none", "selective", "full"), "host_state": (False, True),
}  # fmt: skip
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def model_of(name: str, vocab_size: int | None) -> tuple[ModelShape, dict[str, Any]]:
    """Of a preset, of the section ``model`` of a training config, or of the ``config.json`` of transformers, which has
    a vocabulary of its own: the sizes, and a section ``model`` that has them."""
    from quern.train.init_from import model_section

    if name not in PRESETS and (name.endswith(".json") or os.path.isdir(name)):
        from quern.model.hf.config import CONFIG_FILE, shape_from_config  # which imports torch

        path = os.path.join(name, CONFIG_FILE) if os.path.isdir(name) else name
        shape = shape_from_config(storage.read_json(path), path)
        shape = shape if vocab_size is None else shape.model_copy(update={"vocab_size": vocab_size})
        return shape, model_section(shape)
    section: Any = {"preset": name}
    of_file = name.endswith((".yaml", ".yml"))
    if of_file:
        section = read_yaml(name).get("model")
    model = validate(section, ModelConfig, f"{name}: model" if of_file else "--model")
    return model.shape(vocab_size or VOCABULARY), section


def wish_of(shape: ModelShape, gpus: int, node: int, seq_len: int, batch: str | None, fix: Sequence[str]) -> Wish:
    """With the batch that is asked for, or 4M tokens and a sequence for 8 GPUs or more."""
    sequences = max(2**22 // seq_len, gpus // 8, 1)
    if sequences > gpus:
        sequences = -(-sequences // gpus) * gpus
    if batch is not None:
        sequences, rest = divmod(int(number("--batch", batch, 2**20)), seq_len)
        if rest or not sequences:
            raise InputError(f"--batch: expected a multiple of --seq-len ({seq_len:,} tokens), got {batch}")
    return Wish(shape, gpus, min(node, gpus), seq_len, sequences, fixed=_fixed(fix))


def recipe_of(scaling: str | None) -> Recipe | None:
    """Of ``--float8``."""
    if scaling is not None and scaling not in get_args(Scaling):
        raise InputError(f"--float8: expected one of {', '.join(get_args(Scaling))}, got {scaling!r}")
    return None if scaling is None else Recipe(scaling)  # type: ignore[arg-type]


def _fixed(given: Sequence[str]) -> dict[str, Any]:
    known, found = {one.name for one in fields(Choice)}, {}
    for text in given:
        name, equals, value = text.partition("=")
        if name not in known or not equals:
            raise InputError(f"--fix: expected key=value with one of {', '.join(sorted(known))}, got {text!r}")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            found[name] = value
        allowed = _VALUES.get(name)
        whole = type(found[name]) is int and found[name] >= 1
        fits = whole if allowed is None else (type(found[name]), found[name]) in [(type(one), one) for one in allowed]
        if not fits:
            expected = "a whole number above 0" if allowed is None else ", ".join(map(_yaml, allowed))
            raise InputError(f"--fix: {name}: expected {expected}, got {value!r}")
    return found


def _yaml(value: Any) -> str:
    return str(yaml.safe_dump(value)).partition("\n")[0]


def number(name: str, text: str, mega: float = 1e6) -> float:
    """``15T``, ``4M``, ``3e9``; a batch's M is 2²⁰."""
    units = _UNITS | {"M": mega}
    try:
        value = float(text[:-1]) * units[text[-1].upper()] if text[-1:].upper() in units else float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InputError(f"{name}: expected a number above 0, as 15T or 3e9, got {text!r}")
    return value
