"""``quern checkpoint``: look at a run's checkpoints, prove them whole, take them elsewhere.

Comparing, rewriting and pruning stand in :mod:`quern.cli.checkpoint_tools`.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.table import Table

from quern.cli import checkpoint_tools
from quern.cli.output import JSON, err_console, json_stdout, out_console, plain, reports_errors
from quern.errors import InputError, QuernError
from quern.train.branch import LEDGER_FILE, abandoned_in
from quern.train.checkpoint.manifest import (
    MANIFEST_FILE,
    METADATA_FILE,
    Checkpoint,
    check_files,
    list_checkpoints,
    read_manifest,
)
from quern.train.ledger import read_ledger
from quern.train.resilience.good import good_steps

# torch is imported by the commands that need it: it takes seconds

app = typer.Typer(
    help="List, verify, compare, rewrite, prune, export, import and sample checkpoints.", no_args_is_help=True
)
app.command("diff")(checkpoint_tools.diff)
app.command("reshard")(checkpoint_tools.reshard)
app.command("prune")(checkpoint_tools.prune)

RunOrCheckpoint = Annotated[
    str,
    typer.Argument(help="A checkpoint, or a training run: its newest checkpoint.", metavar="TRAIN_RUN_OR_CHECKPOINT"),
]


class Dtype(StrEnum):
    """What weights may be rounded to."""

    bf16 = "bf16"
    fp32 = "fp32"


@app.command("list")
@reports_errors
def list_command(
    run: Annotated[str, typer.Argument(help="A training run.", metavar="TRAIN_RUN")], json: bool = JSON
) -> None:
    """The checkpoints of a run. Valid: manifest whole, all files there in their sizes; verify compares checksums.
    Good: enough healthy steps followed. Abandoned: the run went back behind it."""
    if not os.path.isdir(run):
        raise InputError(f"{run}: no such folder; expected a training run")
    good = set(_good_steps(run))
    rows = [_row(run, checkpoint) | {"good": checkpoint.step in good} for checkpoint in list_checkpoints(run)]
    with json_stdout(json) as emit:
        emit({"run": run, "checkpoints": rows})
        if not json:
            _print_rows(run, rows)


def _good_steps(run: str) -> list[int]:
    path = os.path.join(run, LEDGER_FILE)
    try:
        return good_steps(read_ledger(path)) if os.path.isfile(path) else []
    except QuernError:  # which each checkpoint's row says
        return []


def _row(run: str, checkpoint: Checkpoint) -> dict[str, Any]:
    row: dict[str, Any] = {"step": checkpoint.step, "path": checkpoint.path, "data_step": None, "tokens": None,
                           "bytes": None, "optimizer": None, "abandoned": None}  # fmt: skip
    try:
        manifest = read_manifest(checkpoint.path)
    except InputError as error:
        return row | {"valid": False, "problems": [str(error)]}
    problems = [str(problem) for problem in check_files(checkpoint.path, manifest, hashes=False)]
    try:
        left = abandoned_in(run, manifest)
    except QuernError as error:  # the ledger has lost lines
        left = None
        problems.append(str(error))
    return row | {
        "data_step": manifest.data_step,
        "tokens": manifest.tokens,
        "bytes": sum(record.size for record in manifest.files.values()),
        "optimizer": manifest.optimizer,
        "abandoned": left,
        "valid": not problems,
        "problems": problems,
    }


def _print_rows(run: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        err_console().print(f"{plain(run)}: no checkpoints", markup=False)
        return
    table = Table(box=None, pad_edge=False)
    for name in ("step", "data step", "tokens", "size"):
        table.add_column(name, justify="right")
    table.add_column("valid")
    for row in rows:
        numbers = [f"{row[key]:,}" if row[key] is not None else "" for key in ("step", "data_step", "tokens")]
        size = f"{row['bytes'] / 1e6:,.1f} MB" if row["bytes"] is not None else ""
        valid = "yes" if row["valid"] else "no"
        valid += ", abandoned" if row["abandoned"] else ", good" if row["good"] else ""
        table.add_row(*numbers, size, valid)
    out_console().print(table)
    for row in rows:
        for problem in row["problems"]:
            err_console().print(plain(problem), markup=False, soft_wrap=True)


@app.command()
@reports_errors
def verify(
    paths: Annotated[
        list[str],
        typer.Argument(help="Checkpoints, or training runs: all of theirs.", metavar="TRAIN_RUN_OR_CHECKPOINT…"),
    ],
    json: bool = JSON,
) -> None:
    """Compare every file's SHA-256 with the manifest; exit code 1 when one differs."""
    from quern.train.checkpoint import reader

    rows: list[dict[str, Any]] = []
    for path in [found for given in paths for found in _checkpoints(given)]:
        try:
            problems = [str(problem) for problem in reader.verify(path)]
        except QuernError as error:
            problems = [str(error)]
        rows.append({"path": path, "valid": not problems, "problems": problems})
    damaged = sum(not row["valid"] for row in rows)
    with json_stdout(json) as emit:
        emit({"checkpoints": rows, "valid": not damaged})
        for row in rows if not json else ():
            out_console().print(f"{plain(row['path'])}: {'valid' if row['valid'] else 'damaged'}", markup=False)
            for problem in row["problems"]:
                out_console().print(f"  {plain(problem)}", markup=False)
    if damaged:
        raise QuernError(f"{damaged} of {len(rows)} checkpoints damaged")


def _checkpoints(path: str) -> list[str]:
    if not os.path.isdir(path):
        raise InputError(f"{path}: no such folder; expected a checkpoint or a training run")
    if found := [checkpoint.path for checkpoint in list_checkpoints(path)]:
        return found
    if not any(os.path.exists(os.path.join(path, name)) for name in (MANIFEST_FILE, METADATA_FILE)):
        raise InputError(f"{path}: expected a checkpoint, or a training run that has one")
    return [path]  # one without a manifest is a damaged one


@app.command("export-hf")
@reports_errors
def export_hf(
    source: RunOrCheckpoint,
    out: Annotated[str, typer.Argument(help="A folder that is not there yet.", metavar="OUT")],
    dtype: Annotated[Dtype | None, typer.Option(help="Of the weights; without, as stored.")] = None,
    max_shard_gb: Annotated[float, typer.Option(min=1e-6, help="Largest weights file, in GB (1e9 bytes).")] = 5.0,
    json: bool = JSON,
) -> None:
    """Write a folder that transformers loads: weights, config and tokenizer."""
    import torch

    from quern.train import export

    target = {None: None, Dtype.bf16: torch.bfloat16, Dtype.fp32: torch.float32}[dtype]
    with json_stdout(json) as emit:
        made = export.export_hf(source, out, dtype=target, max_shard_bytes=int(max_shard_gb * 1e9))
        emit(made.to_dict())
        if not json:
            print(f"{plain(made.checkpoint)} → {plain(made.folder)}: {made.parameters:,} parameters as {made.dtype}")
            print(f"files      {', '.join(made.files)}")
            if not made.tokenizer:
                err_console().print("the checkpoint records no encoding: no tokenizer was written")


@app.command("import-hf")
@reports_errors
def import_hf(
    folder: Annotated[str, typer.Argument(help="A folder with config.json and safetensors.", metavar="HF_DIR")],
    out: Annotated[str, typer.Argument(help="The checkpoint, a folder that is not there yet.", metavar="OUT")],
    encoding: Annotated[str | None, typer.Option(help="Name of its encoding; without, from tokenizer.json.")] = None,
    ranks: Annotated[str | None, typer.Option(help="The encoding's tiktoken ranks file.")] = None,
    json: bool = JSON,
) -> None:
    """Write a weights-only checkpoint from a folder in the layout of transformers."""
    from quern.train import export

    with json_stdout(json) as emit:
        manifest = export.import_hf(folder, out, encoding=encoding, ranks=ranks)
        name = manifest.encoding.name if manifest.encoding else None
        emit({"checkpoint": out, "model": manifest.model.model_dump(mode="json"), "encoding": name})
        if not json:
            parameters = manifest.model.num_parameters
            print(f"{plain(folder)} → {plain(out)}: {parameters:,} parameters, encoding {plain(str(name))}")


@app.command()
@reports_errors
def sample(
    checkpoint: RunOrCheckpoint,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens at most; EOT ends earlier.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 = the likeliest token each time.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw from the k likeliest only.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same text.")] = 0,
) -> None:
    """Print what the model says after a prompt. Runs on the CPU, in the weights' precision."""
    from quern.train.sample import continue_text

    text = continue_text(
        checkpoint, prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed
    )
    print(plain(text))
