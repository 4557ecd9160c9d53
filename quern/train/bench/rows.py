"""Expands options into rows, and a row into the training config that it measures. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from quern.errors import InputError
from quern.parallel.planning.mesh import plan_mesh
from quern.tokenize.shards import ShardReader
from quern.train.bench.options import PRECISIONS, Options, pairs
from quern.train.config import TrainConfig
from quern.train.init_from import load_train_config

__all__ = ["MOST_TOKENS", "VOCABULARIES", "Row", "configure", "rows", "tokens_needed", "vocab_size_of"]

#: Ids of the encodings that the presets' models were published with; some for the small one.
VOCABULARIES = {
    "debug": 4096, "125M": 50_257, "1B": 128_256, "llama3-8b": 128_256, "llama3-70b": 128_256, "llama3-405b": 128_256,
    "mixtral-8x7b": 32_000, "qwen3-30b-a3b": 151_936, "olmoe-1b-7b": 50_304,
}  # fmt: skip
MOST_TOKENS = 1 << 26
"""Of the random data; longer rows read it again."""
SEQ_LEN = 4096
"""Of a preset."""
MICRO_BATCHES = 4
"""For each rank of a pipeline: what a step has when nothing is said."""

#: What has no say in a step's time, or is the benchmark's to decide.
FIXED = frozenset((
    "run_dir", "data", "phases", "global_batch", "steps", "init_from", "schedule", "checkpoint", "resume", "data_skip",
    "doremi", "validation", "metrics", "profile", "verify_shards", "preflight", "preflight_timeout_s",
))  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One combination. ``layout``, ``precision`` and ``checkpointing`` are None where they are the config's own."""

    model: str
    """A preset, or the path of a training config."""
    layout: str | None
    precision: str | None
    checkpointing: str | None
    variant: str

    def __str__(self) -> str:
        parts = (self.model, self.layout, self.precision, self.checkpointing, self.variant)
        return ", ".join(part for part in parts if part)


def rows(options: Options) -> list[Row]:
    """Every combination, in the order given. A variant of FP8 is none of the other precisions.

    Raises:
        InputError: a key is the benchmark's own, or is given as an option too.
    """
    for text in (*options.overrides, *(pair for variant in options.variant for pair in pairs(variant))):
        _check_key(text, options)
    axes = (
        (*options.model, *options.configs), options.layout or (None,), options.precision or (None,),
        options.checkpointing or (None,), options.variant or ("",),
    )  # fmt: skip
    found = [Row(*values) for values in product(*axes)]
    found = [row for row in found if not ("float8" in row.variant and _not_float8(row.precision))]
    if not found:
        raise InputError(
            "--variant: a key of float8 is of FP8 rows alone; expected one of fp8-… in --precision, or none"
        )
    return found


def configure(
    row: Row,
    options: Options,
    *,
    world: int,
    micro_batch: int | None,
    cuda: Callable[[], bool],
    data: str,
    run_dir: str,
) -> TrainConfig:
    """The training config of a row: ``options.warm_up + options.steps`` steps over ``data``.

    ``micro_batch``: None = the config's. ``cuda``: whether there is a GPU; asked only where nothing else decides.

    Raises:
        InputError: the config or one of its values does not fit, or its layout does not fit ``world`` ranks.
    """
    settings = [*_settings(row, options, micro_batch, cuda), *_fixed(options, data, run_dir)]
    first = _load(row, settings)
    plan = plan_mesh(first.parallel, world)
    accumulate = options.accumulate or (MICRO_BATCHES * plan.pp if plan.pp > 1 else 1)
    return _load(row, [*settings, f"global_batch={first.micro_batch * plan.dp_size * accumulate}"])


def vocab_size_of(row: Row, options: Options) -> int:
    """The vocabulary size: as given, else of the config's data if present on this machine, else of the preset.

    Raises:
        InputError: none of them says.
    """
    if options.vocab_size is not None:
        return options.vocab_size
    if row.model in VOCABULARIES:
        return VOCABULARIES[row.model]
    config = load_train_config(row.model, options.overrides)
    if os.path.isdir(config.data[0].path):
        return ShardReader(config.data[0].path).vocab_size
    if config.model.preset is None:
        raise InputError(f"{row.model}: its data is not on this machine, nor is its model a preset; give --vocab-size")
    return VOCABULARIES[config.model.preset]


def tokens_needed(config: TrainConfig) -> int:
    """The number of tokens a row needs, so that every step reads new ones, up to :data:`MOST_TOKENS`."""
    return min(MOST_TOKENS, config.steps * config.global_batch * config.seq_len) + config.seq_len + 1


def _load(row: Row, settings: list[str]) -> TrainConfig:
    preset = row.model in VOCABULARIES
    try:
        config = load_train_config(None if preset else row.model, settings)
        return config.model_copy(update={"init_from": None})  # it gives the shape, and the weights are drawn
    except InputError as error:
        raise InputError(str(error).replace("(no file) (override)", f"--model {row.model}")) from None


def _settings(row: Row, options: Options, micro_batch: int | None, cuda: Callable[[], bool]) -> Iterator[str]:
    preset, compiled = row.model in VOCABULARIES, options.compile
    if preset:
        yield from (f"model.preset={row.model}", f"seq_len={SEQ_LEN}")
        compiled = cuda() if compiled is None else compiled
    if row.layout is not None:
        yield from ("parallel={}", *(f"parallel.{pair}" for pair in pairs(row.layout)))
    if row.precision is not None:
        compute, recipe = PRECISIONS[row.precision]
        yield from (f"precision={compute}", "float8={}" if recipe is None else f"float8.recipe={recipe}")
    for pair in (*options.overrides, *pairs(row.variant)):
        if not (pair.startswith("float8") and _not_float8(row.precision)):
            yield pair
    given = {
        "activation_checkpointing": row.checkpointing, "seq_len": options.seq_len, "micro_batch": micro_batch,
        "model.num_layers": options.layers, "compile.enabled": compiled,
    }  # fmt: skip
    yield from (f"{key}={str(value).lower()}" for key, value in given.items() if value is not None)


def _fixed(options: Options, data: str, run_dir: str) -> Iterator[str]:
    peak = "" if options.peak_tflops is None else f", peak_tflops: {options.peak_tflops!r}"
    steps = options.warm_up + options.steps
    yield from (
        f"run_dir={json.dumps(run_dir)}", f"data=[{{path: {json.dumps(data)}, max_epochs: 1.0e+9}}]",
        "phases=[]", f"steps={steps}", f"schedule={{kind: constant, warmup: {steps}}}", 
        "checkpoint={interval: 0}", "resume={}",
        "data_skip=0", "doremi={}", "validation={interval: 0}", "profile={}", "verify_shards=false",
        f"metrics={{live: false, tensorboard: false{peak}}}", "global_batch=1",
    )  # fmt: skip


def _not_float8(precision: str | None) -> bool:
    return precision is not None and PRECISIONS[precision][1] is None


def _check_key(text: str, options: Options) -> None:
    key, sign, _ = text.partition("=")
    if not sign:
        raise InputError(f"--variant: expected key=value, got {text!r}")
    if key.partition(".")[0] in FIXED:
        raise InputError(f"override {key}: is the benchmark's own; expected a key of the model or of how it is trained")
    given = {
        "model.preset": options.model, "model.num_layers": options.layers, "parallel": options.layout,
        "precision": options.precision, "float8.recipe": options.precision, "seq_len": options.seq_len,
        "activation_checkpointing": options.checkpointing, "micro_batch": options.micro_batch,
        "compile.enabled": options.compile,
    }  # fmt: skip
    for own, value in given.items():
        if value not in (None, ()) and (key == own or own.startswith(key + ".") or key.startswith(own + ".")):
            raise InputError(f"override {key}: is given as an option too; expected one of both")
