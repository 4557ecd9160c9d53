"""Options of ``quern bench``. Imports no torch."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, get_args

from quern.errors import InputError
from quern.model.config import PRESETS
from quern.model.float8.recipe import Scaling
from quern.train.config import ParallelConfig

__all__ = ["CHECKPOINTING", "PRECISIONS", "Options", "pairs", "parse"]

#: What each name says of a config: its ``precision``, and its ``float8.recipe``.
PRECISIONS: dict[str, tuple[str, str | None]] = {
    **{name: (name, None) for name in ("bf16", "fp16", "fp32", "fp64")},
    **{f"fp8-{scaling}": ("bf16", scaling) for scaling in get_args(Scaling)},
}
CHECKPOINTING = ("none", "selective", "full")

DESCRIPTION = """\
Tokens a second, MFU, step time and memory of the trainer itself, over random tokens: one row for each combination of
model, layout, precision, checkpointing and variant. Options that take several values take them one after the other;
CONFIG and key=value stand before them.

  quern bench --model 1B llama3-8b --precision bf16 fp8-tensorwise        one device
  quern bench --model llama3-8b --nproc 8 --layout "" "tp=2" "pp=2"       the 8 of this machine
  torchrun … -m quern.train.bench --model llama3-70b --layout tp=8 --scratch /shared/bench     any number
  quern bench configs/llama3-8b.yaml micro_batch=2 --layers 4             what a training config would do
"""


@dataclass(frozen=True)
class Options:
    """The options as given; None or empty means the config's own."""

    configs: tuple[str, ...] = ()
    """Training configs."""
    overrides: tuple[str, ...] = ()
    """``key=value`` for every row."""
    model: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()
    precision: tuple[str, ...] = ()
    checkpointing: tuple[str, ...] = ()
    variant: tuple[str, ...] = ()
    seq_len: int | None = None
    micro_batch: tuple[int, ...] = ()
    accumulate: int | None = None
    layers: int | None = None
    compile: bool | None = None
    vocab_size: int | None = None
    steps: int = 8
    warm_up: int = 3
    mean_document: float = 600.0
    peak_tflops: float | None = None
    nproc: int = 1
    scratch: str | None = None
    out: str | None = None
    json: bool = False


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message.removeprefix("argument "))


def parse(arguments: Sequence[str]) -> Options:
    """The options of a command line; ``--help`` prints and leaves.

    Raises:
        InputError: naming the option, the value and what would fit.
    """
    given: dict[str, Any] = vars(_parser().parse_intermixed_args([*arguments]))
    positional = given.pop("configs")
    configs = tuple(text for text in positional if "=" not in text or os.path.exists(text))
    for path in configs:
        if not os.path.isfile(path):
            raise InputError(f"{path}: no such config file; a model's sizes alone are --model {path}")
    several: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }
    overrides = tuple(text for text in positional if text not in configs)
    options = Options(configs=configs, overrides=overrides, **several)
    if not options.configs and not options.model:
        raise InputError(f"expected a CONFIG or --model: one of {', '.join(PRESETS)}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="quern bench", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("configs", nargs="*", metavar="CONFIG | key=value", help="training configs, and overrides for every row; "
        "their data is not read")  # fmt: skip
    add("--model", nargs="+", default=[], type=_one_of(PRESETS), metavar="PRESET",
        help=f"with its published vocabulary: {', '.join(PRESETS)}")  # fmt: skip
    add("--layout", nargs="+", default=[], type=_layout, metavar="KEYS",
        help='keys of the section parallel, as "dp_shard=4 tp=2"; "" shards over all ranks')  # fmt: skip
    add("--precision", nargs="+", default=[], type=_one_of(PRECISIONS), metavar="NAME",
        help=", ".join(PRECISIONS))  # fmt: skip
    add("--checkpointing", nargs="+", default=[], type=_one_of(CHECKPOINTING), metavar="MODE",
        help=f"of activations: {', '.join(CHECKPOINTING)}")  # fmt: skip
    add("--variant", nargs="+", default=[], metavar="KEYS",
        help='overrides of a row, as "float8.gradients=e5m2 attention=sdpa"; "" is a row without')  # fmt: skip
    add("--seq-len", type=_count, metavar="N", help="tokens a sequence; a preset's is 4096")
    add("--micro-batch", nargs="+", default=[], type=_count, metavar="N",
        help="sequences a forward pass; of several the first that fits in memory")  # fmt: skip
    add("--accumulate", type=_count, metavar="N",
        help="micro-batches a step and rank; 1, and in a pipeline 4 for each of its ranks")  # fmt: skip
    add("--layers", type=_count, metavar="N", help="in place of the model's own number")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile; a preset's rows: on CUDA")
    add("--vocab-size", type=_count, metavar="N")
    add("--steps", type=_count, default=8, metavar="N", help="measured, 8")
    add("--warm-up", type=_number(int, 0), default=3, metavar="N", help="steps before them, 3")
    add("--mean-document", type=_number(float, 1), default=600.0, metavar="TOKENS", help="600")
    add("--peak-tflops", type=_number(float, 1e-6), metavar="X",
        help="dense peak of a device in BF16, for the MFU; by default known by the device's name")  # fmt: skip
    add("--nproc", type=_count, default=1, metavar="N", help="ranks on this machine")
    add("--scratch", metavar="DIR", help="for data and logs, seen by all ranks; a temporary folder of this machine")
    add("--out", metavar="FILE", help="the JSON document, written after every row")
    add("--json", action="store_true", help="print the JSON document and no table")
    return parser


def _number(kind: Callable[[str], float], least: float) -> Callable[[str], float]:
    what = "an integer" if kind is int else "a number"

    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = least - 1
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"expected {what} ≥ {least:g}, got {text!r}")
        return value

    return read


_count = _number(int, 1)


def _one_of(known: Collection[str]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in known:
            place = "; CONFIG and key=value stand before the options" if "=" in text or os.path.isfile(text) else ""
            raise argparse.ArgumentTypeError(f"expected {', '.join(known)}, got {text!r}{place}")
        return text

    return read


def _layout(text: str) -> str:
    """``key=value`` pairs, one space between them."""
    given = pairs(text)
    for pair in given:
        key, sign, _ = pair.partition("=")
        if not sign or key not in ParallelConfig.model_fields:
            known = ", ".join(ParallelConfig.model_fields)
            raise argparse.ArgumentTypeError(f"expected key=value of the section parallel ({known}), got {pair!r}")
    return " ".join(given)


def pairs(text: str) -> list[str]:
    """The ``key=value`` of a layout or a variant; a value may be a list: ``pp=2 stage_layers=[1, 2]``."""
    return re.split(r"[\s,]+(?=[a-z_][a-z0-9_.]*=)", text.strip()) if text.strip() else []
