"""Runs all rows one after the other, and writes the document of results."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from typing import Any

from quern import storage
from quern.errors import InputError
from quern.train.bench.corpus import write_random
from quern.train.bench.crew import Crew, open_crew
from quern.train.bench.machine import software
from quern.train.bench.options import Options
from quern.train.bench.rows import Row, configure, rows, tokens_needed, vocab_size_of
from quern.train.config import TrainConfig
from quern.train.processes import launch

__all__ = ["FORMAT", "bench"]

FORMAT = 1
"""Of the document; grows when a key changes its meaning or goes."""


def bench(options: Options, command: Sequence[str], tell: Callable[[str], None]) -> tuple[dict[str, Any], bool]:
    """Measure every row; the document, and whether this process is the one to print it. Collective.

    ``command``: how to repeat it. ``tell``: hears a line of each row.

    Raises:
        InputError: options that fit no row; what does not fit a row is that row's error.
    """
    wanted = rows(options)
    with launch.leaving(), open_crew(options.nproc) as crew, _scratch(options, crew) as scratch:
        first = crew.together.rank == 0
        document: dict[str, Any] = {
            "kind": "quern bench", "format": FORMAT, "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": [*command], "world": crew.world, "steps": options.steps, "warm_up": options.warm_up,
            "mean_document": options.mean_document, "software": software() if first else None, "machine": None,
            "rows": [],
        }  # fmt: skip
        crew.together.broadcast_from_rank0(lambda: _check_out(options.out, document))
        data = _Data(scratch, options.mean_document)
        for number, row in enumerate(wanted):
            if first:
                tell(f"{number + 1} of {len(wanted)}: {row}")
            entry = _measure(row, options, crew, data, os.path.join(scratch, f"row-{number:03}"))
            machine = entry.pop("machine", None)
            document["machine"] = document["machine"] or machine
            document["rows"].append(entry)
            if first:
                tell(f"    {_outcome(entry)}")
                if options.out is not None:
                    storage.write_json(options.out, document)
    return document, first


def _check_out(path: str | None, document: Mapping[str, Any]) -> None:
    """A place that cannot be written to is known before the first row."""
    if path is not None and os.path.isdir(path):
        raise InputError(f"--out: {path}: is a folder; expected a file")
    if path is not None and not os.path.isfile(path):
        storage.write_json(path, document)


@contextmanager
def _scratch(options: Options, crew: Crew) -> Iterator[str]:
    """A new folder that all ranks see. What lies in a temporary one goes; in one that was given, logs of failed rows
    stay."""
    if options.scratch is None and crew.hosts > 1:
        raise InputError(f"--scratch: expected a folder that all {crew.hosts} machines see, got none")

    def make() -> str:
        if options.scratch is not None:
            os.makedirs(options.scratch, exist_ok=True)
        return tempfile.mkdtemp(prefix="quern-bench-", dir=options.scratch)

    folder = crew.together.broadcast_from_rank0(make)
    try:
        crew.together.all_or_raise(lambda: os.listdir(folder))
        yield folder
    finally:
        if crew.together.rank == 0:
            for name in os.listdir(folder):
                if options.scratch is None or name.startswith("data-"):
                    shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
            with suppress(OSError):  # logs of failed rows
                os.rmdir(folder)


class _Data:
    """Random data of each vocabulary, written when a row first needs as much."""

    def __init__(self, scratch: str, mean_document: float) -> None:
        self._scratch, self._mean = scratch, mean_document
        self._written: dict[int, int] = {}

    def folder(self, vocab_size: int) -> str:
        return os.path.join(self._scratch, f"data-{vocab_size}")

    def source(self, vocab_size: int) -> str:
        return os.path.join(self.folder(vocab_size), "tokens", "source0")

    def write(self, vocab_size: int, tokens: int) -> None:
        if self._written.get(vocab_size, 0) >= tokens:
            return
        shutil.rmtree(self.folder(vocab_size), ignore_errors=True)
        write_random(self.folder(vocab_size), tokens, self._mean, vocab_size)
        self._written[vocab_size] = tokens


def _measure(row: Row, options: Options, crew: Crew, data: _Data, folder: str) -> dict[str, Any]:
    """A row with the first micro-batch that fits. Collective; the same on every rank."""
    entry: dict[str, Any] = {}
    for micro_batch in options.micro_batch or (None,):
        entry = _attempt(row, options, crew, data, folder, micro_batch)
        if entry.get("error_kind") != "out_of_memory":
            break
    return entry


def _attempt(
    row: Row, options: Options, crew: Crew, data: _Data, folder: str, micro_batch: int | None
) -> dict[str, Any]:
    said = {
        "model": row.model, "precision": row.precision, "checkpointing": row.checkpointing, "variant": row.variant,
        "layout_asked": row.layout, "micro_batch": micro_batch,
    }  # fmt: skip

    def prepare() -> tuple[dict[str, Any], int, str | None]:
        """What is known of the row before it runs, a port, and what is wrong with it."""
        try:
            vocab_size = vocab_size_of(row, options)
            config = configure(
                row, options, world=crew.world, micro_batch=micro_batch, cuda=_has_cuda,
                data=data.source(vocab_size), run_dir=os.path.join(folder, "run"),
            )  # fmt: skip
        except InputError as error:
            return said, 0, str(error)
        data.write(vocab_size, tokens_needed(config))
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(os.path.join(folder, "run"))
        spec = {"config": config.model_dump(mode="json"), "warm_up": options.warm_up}
        storage.write_json(os.path.join(folder, "spec.json"), spec)
        return said | _known(config), launch.free_port(), None

    said, port, refused = crew.together.broadcast_from_rank0(prepare)
    if refused is not None:
        return {**said, "ok": False, "error": refused, "error_kind": "refused"}
    results = crew.run(folder, port)
    failed = [(result["time"], rank) for rank, result in enumerate(results) if "error" in result]
    if crew.together.rank == 0:
        keeps_logs = failed and options.scratch is not None
        shutil.rmtree(os.path.join(folder, "run") if keeps_logs else folder, ignore_errors=True)
    if not failed:
        return {**said, "ok": True, "error": None, "error_kind": None, **results[0]}
    worst = results[min(failed)[1]]
    where = f"rank {min(failed)[1]}: " if crew.world > 1 and worst["kind"] != "refused" else ""
    return {**said, "ok": False, "error": where + worst["error"], "error_kind": worst["kind"]}


def _known(config: TrainConfig) -> dict[str, Any]:
    precision: str = config.precision
    if config.float8.recipe is not None:
        precision = f"fp8-{config.float8.recipe}" + ("" if precision == "bf16" else f" in {precision}")
        precision += " (torchao)" if config.float8.implementation == "torchao" else ""
    return {
        "precision": precision,
        "moments": config.optimizer.moments,
        "gradients": config.optimizer.gradients,
        "checkpointing": config.activation_checkpointing,
        "checkpointing_layers": config.activation_checkpointing_layers,
        "memory_budget": config.activation_memory_budget,
        "compile": config.compile.enabled,
        "weights_cast": config.weights_cast,
        "flash_attention": config.flash_attention,
        "document_mask": config.document_mask,
        "seq_len": config.seq_len,
        "micro_batch": config.micro_batch,
        "global_batch": config.global_batch,
    }


def _outcome(entry: Mapping[str, Any]) -> str:
    if not entry["ok"]:
        return f"failed: {entry['error']}"
    return f"{entry['tokens_per_s']:,.0f} tokens/s, {entry['step_time_s']:.3f} s a step"


@cache
def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
