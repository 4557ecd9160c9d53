"""``init_from``: starts a fresh run with a checkpoint's weights and model shape.

Imports no torch: a config is loaded before torch is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from quern.config import load_config, parse_overrides
from quern.errors import InputError
from quern.model.config import PRESETS, ModelConfig, ModelShape
from quern.train.checkpoint.format.manifest import (
    CONFIG_FILE,
    MANIFEST_FILE,
    EncodingInfo,
    list_checkpoints,
    read_manifest,
)
from quern.train.config import TrainConfig
from quern.train.history.branch import LEDGER_FILE, find_checkpoint

__all__ = [
    "check_given_weights", "load_run_config", "load_train_config", "model_section", "reference_checkpoint",
    "starting_checkpoint",
]  # fmt: skip

T = TypeVar("T")
Row = tuple[str, str, Any, Any]
"""A key, where it stands, its value there and its value in the checkpoint."""
_REFERENCE = "doremi.reference"
_TAKEN = ". A key of model that is not given is taken from the checkpoint"


def load_train_config(path: str | os.PathLike[str] | None, overrides: Iterable[str] = ()) -> TrainConfig:
    """As :func:`load_config`. With ``init_from``, every key of ``model`` that is not given is the checkpoint's; those
    of a run that has a checkpoint of its own are the run's.

    Raises:
        InputError: as :func:`load_config`, or the checkpoint that is to give the shape cannot be read.
    """
    return load_config(path, TrainConfig, overrides, complete=_complete)


def load_run_config(path: str, overrides: Sequence[str] = ()) -> TrainConfig:
    """As :func:`load_train_config`, of a run that is to be trained.

    Raises:
        InputError: so too; or ``path`` is the ``config.yaml`` of a run that was moved or copied, and ``run_dir`` in it
            leads elsewhere.
    """
    config = load_train_config(path, overrides)
    folder, name = os.path.split(os.path.abspath(path))
    of_run = name == CONFIG_FILE and os.path.isfile(os.path.join(folder, LEDGER_FILE))
    given = os.path.lexists(os.path.join(folder, MANIFEST_FILE)) or "run_dir" in dict(parse_overrides(overrides))
    if of_run and not given and os.path.realpath(config.run_dir) != os.path.realpath(folder):
        raise InputError(
            f"{path}: lies in the training run {folder}, and its run_dir, {config.run_dir}, is another folder; give "
            f"run_dir={folder} to go on with that run, or run_dir=PATH for another one"
        )
    return config


def model_section(shape: ModelShape) -> dict[str, Any]:
    """The section ``model`` of a training config whose model has this shape with an encoding of as many ids."""
    sizes = shape.model_dump(mode="json", exclude={"vocab_size"})
    return {name: value for name, value in sizes.items() if value is not None}


def starting_checkpoint(config: TrainConfig) -> str | None:
    """The checkpoint that ``init_from`` names; of a run, its newest. A run that has begun keeps to the one its folder
    records, although the source may have newer ones since.

    Raises:
        InputError: a fresh run is to begin with what is no checkpoint.
    """
    given = config.init_from
    if given is None:
        return None
    fresh, before = _fresh(config), _recorded(config.run_dir)
    recorded = None if before is None else before.init_from
    if _is_of(recorded, given) and (not fresh or _is_whole(recorded)):
        return recorded
    return _told(find_checkpoint, given) if fresh else given


def reference_checkpoint(config: TrainConfig) -> str | None:
    """The checkpoint that ``doremi.reference`` names, as :func:`starting_checkpoint` tells it of ``init_from``.

    Raises:
        InputError: it is none, or a run that has begun would go on with another one.
    """
    given = config.doremi.reference
    if given is None:
        return None
    before = _recorded(config.run_dir)
    recorded = None if before is None else before.doremi.reference
    if _is_of(recorded, given) and _is_whole(recorded):
        return recorded
    if _is_of(recorded, given) and not _fresh(config):
        told = f"{recorded}, with which this run began, is gone; expected it there, or the path of a copy of it"
        raise InputError(f"{_REFERENCE}: {told}")
    return _told(find_checkpoint, given, _REFERENCE)


def _is_of(recorded: str | None, given: str) -> bool:
    """Whether it is a checkpoint of the run ``given``."""
    run = None if recorded is None else os.path.dirname(os.path.dirname(os.path.abspath(recorded)))
    return run == os.path.abspath(given)


def _is_whole(recorded: str | None) -> bool:
    return recorded is not None and os.path.isfile(os.path.join(recorded, MANIFEST_FILE))


def check_given_weights(config: TrainConfig, encoding: EncodingInfo) -> None:
    """Check that model and ids are those of the checkpoint that a fresh run starts with, and of DoReMi's reference.

    Raises:
        InputError: a key names no checkpoint, or one that does not fit: with every key that differs.
    """
    if config.init_from is not None and _fresh(config):
        _check_fits(config, encoding, "init_from", _told(find_checkpoint, config.init_from), _TAKEN)
    if (reference := reference_checkpoint(config)) is not None:
        _check_fits(config, encoding, _REFERENCE, reference, "")


def _check_fits(config: TrainConfig, encoding: EncodingInfo, key: str, path: str, more: str) -> None:
    manifest = _told(read_manifest, path, key)
    rows = _differences(config.model.shape(encoding.vocab_size), manifest.model)
    theirs = manifest.encoding
    if theirs is not None:
        mine, their = f" ({encoding.name})", f" ({theirs.name})"
        rows += [
            (f"encoding.{name}", "data", f"{getattr(encoding, name)}{mine}", f"{getattr(theirs, name)}{their}")
            for name in ("ranks_sha256", "eot_id")
            if getattr(encoding, name) != getattr(theirs, name)
        ]
    if manifest.precision in ("fp64", "float64") and config.precision != "fp64":  # nothing rounds them
        rows.append(("precision", "config", config.precision, "fp64"))
    if rows:
        raise _mismatch(key, path, rows, more)


def _complete(raw: dict[str, Any]) -> None:
    """Put the keys of ``model`` that are missing into a config that is not validated yet. Nothing is put where they
    are the checkpoint's as they stand, so that such a config is what it would be without a checkpoint."""
    given, section = raw.get("init_from"), raw.get("model")
    if not isinstance(given, str) or not isinstance(section, dict | None):
        return  # validation says what is wrong
    begun = isinstance(raw.get("run_dir"), str) and list_checkpoints(raw["run_dir"])
    before = _recorded(raw["run_dir"]) if begun else None
    try:
        path = raw["run_dir"] if before is not None else _told(find_checkpoint, given)
        shape = before.model.shape(1) if before is not None else _told(read_manifest, path).model
    except InputError as error:
        resume = raw.get("resume")
        if _shape(section) is None and isinstance(resume, dict) and resume.get("from_store"):
            raise InputError(
                f"{error}; a run that comes back from its store needs the section model, as it was"
            ) from None
        if _shape(section) is None:
            raise
        return  # the model is whole without it; a run that needs its weights is refused by check_init_from
    whole = _shape(section if section else TrainConfig.model_fields["model"].default.model_dump())
    if whole is not None and not _differences(whole, shape, ids=False):
        return
    section = section or {}
    preset = section.get("preset")
    of_preset = dict(PRESETS.get(preset, {})) if isinstance(preset, str) else {}
    # null is the preset's value, but of rope_scaling, which no preset has
    own = of_preset | {name: value for name, value in section.items() if value is not None or name == "rope_scaling"}
    theirs = model_section(shape)
    full = {**section, **{name: value for name, value in theirs.items() if name not in own}}
    if isinstance(moe := section.get("moe"), dict) and "moe" in theirs:
        full["moe"] = theirs["moe"] | of_preset.get("moe", {}) | {k: v for k, v in moe.items() if v is not None}
    if _shape(full) is None and (rows := _given_otherwise(full, own, shape)):
        raise _mismatch("init_from", path, rows, _TAKEN)
    raw["model"] = full


def _given_otherwise(full: Mapping[str, Any], own: Mapping[str, Any], shape: ModelShape) -> list[Row]:
    """In what a model whose keys do not go together is not the checkpoint's; none if a key by itself is wrong."""
    names = ModelShape.model_fields.keys()
    values = shape.model_dump() | {name: value for name, value in (*full.items(), *own.items()) if name in names}
    try:
        return _differences(ModelShape.model_validate_json(json.dumps(values), strict=True), shape, ids=False)
    except ValidationError:
        return []


def _shape(section: Mapping[str, Any] | None) -> ModelShape | None:
    """The shape of a section by itself; None where it is not valid."""
    try:
        return ModelConfig.model_validate_json(json.dumps(section, default=str), strict=True).shape(1)
    except ValidationError:
        return None


def _differences(ours: ModelShape, theirs: ModelShape, *, ids: bool = True) -> list[Row]:
    """``vocab_multiple`` may differ: no checkpoint holds the padding."""
    mine, others = ({"moe": None} | shape.model_dump(mode="json") for shape in (ours, theirs))
    names = [name for name in mine if name != "vocab_multiple" and (ids or name != "vocab_size")]
    return [
        (f"model.{name}", "data" if name == "vocab_size" else "config", mine[name], others[name])
        for name in names
        if mine[name] != others[name]
    ]


def _mismatch(key: str, path: str, rows: Iterable[Row], more: str) -> InputError:
    told = "; ".join(
        f"{name} is {ours} in the {where} and {theirs} in the checkpoint" for name, where, ours, theirs in rows
    )
    return InputError(f"{key}: {os.path.join(path, MANIFEST_FILE)}: the checkpoint does not fit: {told}{more}")


def _fresh(config: TrainConfig) -> bool:
    """Whether the run begins with the weights of ``init_from``: it has no checkpoint, and takes none of a store."""
    return not config.resume.from_store and not list_checkpoints(config.run_dir)


def _recorded(run_dir: str) -> TrainConfig | None:
    try:
        return load_config(os.path.join(run_dir, CONFIG_FILE), TrainConfig)
    except InputError:  # none, or of a version with other keys
        return None


def _told(read: Callable[[str], T], path: str, key: str = "init_from") -> T:
    try:
        return read(path)
    except InputError as error:
        raise InputError(f"{key}: {error}") from None
