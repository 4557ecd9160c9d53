"""``quern data init`` and ``quern train init``: a starting config for a common case, with every key explained."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer
import yaml
from pydantic import BaseModel

from quern import storage
from quern.cli.output import reports_errors
from quern.errors import InputError
from quern.keys import list_keys

__all__ = ["DATA_CASES", "TRAIN_CASES", "init_command"]

_WEB = {
    "language": {"keep": ["en"]},
    "quality": {"order": ["repetition", "gopher", "c4", "fineweb"]},
    "toxicity": {"action": "measure"},
    "tokenize": {"encoding": "gpt2"},
}
_BOOKS = {"kind": "jsonl", "paths": "books/*.jsonl.gz", "text_field": "text", "id_field": "id"}
_ANY_LANGUAGE = {"keep": None, "threshold": 0.0, "pre_skip": False}

#: What each case is, and the keys it sets.
DATA_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "warc": (
        "WARC files of a crawl, English, FineWeb's rules",
        {"run_dir": "runs/web", "sources": [{"name": "web", "kind": "warc", "paths": "crawl/*.warc.gz"}], **_WEB},
    ),
    "commoncrawl": (
        "a hundred files of a Common Crawl, fetched while they are read",
        {"run_dir": "runs/cc",
         "sources": [{"name": "cc", "kind": "commoncrawl", "crawl": "CC-MAIN-2026-30", "files": "0-99"}], **_WEB},
    ),
    "jsonl": (
        "texts in JSON lines, such as books: only repetition and copies are removed",
        {"run_dir": "runs/books", "sources": [{"name": "books", **_BOOKS}], "language": _ANY_LANGUAGE,
         "quality": {"dialect": "paper", "order": ["repetition"]}, "pii": {"action": "measure"},
         "toxicity": {"action": "measure"}, "tokenize": {"encoding": "gpt2"}},
    ),
    "code": (
        "trees of source code: nothing is changed, only copies are removed",
        {"run_dir": "runs/code", "sources": [{"name": "code", "kind": "code", "paths": "code/"}],
         "language": _ANY_LANGUAGE, "quality": {"order": []}, "pii": {"action": "measure"},
         "toxicity": {"action": "measure"}, "tokenize": {"encoding": "gpt2"}},
    ),
}  # fmt: skip
_DATA = {"data": [{"path": "runs/web/tokens/web", "weight": 1.0}]}
TRAIN_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "laptop": (
        "a few million parameters on a CPU, minutes",
        {"run_dir": "runs/small", **_DATA, "model": {"preset": "debug"}, "seq_len": 256, "global_batch": 16,
         "micro_batch": 16, "steps": 500, "precision": "fp32", "schedule": {"kind": "cosine", "warmup": 50},
         "checkpoint": {"interval": 100}},
    ),
    "gpu": (
        "125 M parameters on one GPU or a small node",
        {"run_dir": "runs/125m", **_DATA, "model": {"preset": "125M"}, "seq_len": 2048, "global_batch": 256,
         "micro_batch": 16, "steps": 5000, "precision": "bf16", "compile": {"enabled": True},
         "optimizer": {"lr": 6e-4}, "schedule": {"kind": "wsd", "warmup": 500, "decay": 0.2},
         "checkpoint": {"interval": 500, "keep_last": 2}},
    ),
    "cluster": (
        "Llama 3 8B on nodes of 8 GPUs: FSDP2 over all ranks, checkpoints by a process beside each rank",
        {"run_dir": "/shared/runs/8b", **_DATA, "model": {"preset": "llama3-8b"}, "seq_len": 8192,
         "global_batch": 512, "micro_batch": 1, "steps": 100000, "precision": "bf16", "compile": {"enabled": True},
         "activation_checkpointing": "selective", "optimizer": {"lr": 3e-4},
         "schedule": {"kind": "cosine", "warmup": 2000}, "parallel": {"dp_shard": None, "tp": 1, "pp": 1},
         "checkpoint": {"interval": "auto", "mode": "process", "keep_every": 10000}},
    ),
    "continue": (
        "going on from other weights: a checkpoint of quern checkpoint import-hf, or another run's newest",
        {"run_dir": "runs/continued", **_DATA, "init_from": "checkpoints/llama", "seq_len": 4096, "global_batch": 256,
         "steps": 2000, "precision": "bf16", "optimizer": {"lr": 5e-5}, "schedule": {"kind": "cosine", "warmup": 100},
         "checkpoint": {"interval": 500}},
    ),
}  # fmt: skip


def init_command(
    model: type[BaseModel], cases: Mapping[str, tuple[str, dict[str, Any]]], run: str
) -> Callable[..., None]:
    """A command that writes the config of one of ``cases``; ``run`` is the command that takes it."""
    told = "; ".join(f"{name}: {what}" for name, (what, _) in cases.items()) + "."

    @reports_errors
    def init(
        out: Annotated[str, typer.Argument(help="The YAML file to write; it must not exist.", metavar="OUT")],
        case: str = typer.Option(next(iter(cases)), metavar=f"[{'|'.join(cases)}]", help=told),
    ) -> None:
        """Write a commented starting config for a common case."""
        if case not in cases:
            raise InputError(f"--case: expected one of {', '.join(cases)}, got {case!r}")
        if os.path.exists(out):
            raise InputError(f"{out}: is there already; expected the name of a new file")
        what, values = cases[case]
        lines = [
            f"# {what[0].upper()}{what[1:]}.",
            f"#   {run} {out}",
            "# Keys that are not given have their defaults:",
        ]
        lines[2] += f" {run.removesuffix(' run')} keys, or docs/config.md."
        meanings = {key.name: key.meaning for key in list_keys(model)}
        text = "\n".join([*lines, *_lines(values, "", 0, meanings)]) + "\n"
        storage.publish_bytes(out, text.encode())
        print(f"{out}: change paths and run_dir, then {run} {out} --dry-run")

    return init


def _lines(values: Mapping[str, Any], prefix: str, indent: int, meanings: Mapping[str, str]) -> Iterator[str]:
    space = " " * indent
    for name, value in values.items():
        key = prefix + name
        yield from ["", *_comment(meanings[key], space)] if not indent else _comment(meanings[key], space)
        if isinstance(value, Mapping):
            yield f"{space}{name}:"
            yield from _lines(value, key + ".", indent + 2, meanings)
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield f"{space}{name}:"
            for entry in value:
                inner = list(_lines(entry, key + ".N.", indent + 4, meanings))
                first = next(at for at, line in enumerate(inner) if not line.lstrip().startswith("#"))
                inner[first] = f"{space}  - {inner[first].lstrip()}"
                yield from inner
        else:
            yield f"{space}{name}: {yaml.safe_dump(value, default_flow_style=True).split(chr(10))[0]}"


def _comment(text: str, space: str) -> list[str]:
    return textwrap.wrap(
        text.replace("``", ""), 110, initial_indent=f"{space}# ", subsequent_indent=f"{space}# ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
