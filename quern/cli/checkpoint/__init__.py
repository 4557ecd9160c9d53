"""``quern checkpoint``: lists, verifies, compares, copies, exports and removes a run's checkpoints.

Listing, verifying and fetching stand in :mod:`quern.cli.checkpoint.look`, comparing, rewriting and pruning in
:mod:`quern.cli.checkpoint.tools`.
"""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from quern.cli.checkpoint import look, tools
from quern.cli.output import JSON, err_console, json_stdout, plain, reports_errors
from quern.config import dump_yaml
from quern.train.init_from import model_section

# torch is imported by the commands that need it: it takes seconds

app = typer.Typer(
    help="List, verify, fetch, compare, rewrite, upcycle, prune, export, import and sample checkpoints.",
    no_args_is_help=True,
)
app.command("list")(look.list_command)
app.command("verify")(look.verify)
app.command("fetch")(look.fetch)
app.command("diff")(tools.diff)
app.command("reshard")(tools.reshard)
app.command("upcycle")(tools.upcycle)
app.command("prune")(tools.prune)

RunOrCheckpoint = Annotated[
    str,
    typer.Argument(help="A checkpoint, or a training run: its newest checkpoint.", metavar="TRAIN_RUN_OR_CHECKPOINT"),
]


class Dtype(StrEnum):
    """What weights may be rounded to."""

    bf16 = "bf16"
    fp32 = "fp32"


@app.command("export-hf")
@reports_errors
def export_hf(
    source: RunOrCheckpoint,
    out: Annotated[str, typer.Argument(help="The folder to write; it must not exist.", metavar="OUT")],
    dtype: Annotated[Dtype | None, typer.Option(help="Data type of the weights; default: as stored.")] = None,
    max_shard_gb: Annotated[float, typer.Option(min=1e-6, help="Largest weights file, in GB (1e9 bytes).")] = 5.0,
    json: bool = JSON,
) -> None:
    """Write a folder that transformers loads: weights, config and tokenizer."""
    import torch

    from quern.train.checkpoint.tools import export

    target = {None: None, Dtype.bf16: torch.bfloat16, Dtype.fp32: torch.float32}[dtype]
    with json_stdout(json) as emit:
        made = export.export_hf(source, out, dtype=target, max_shard_bytes=int(max_shard_gb * 1e9))
        emit(asdict(made))
        if not json:
            print(f"{plain(made.checkpoint)} → {plain(made.folder)}: {made.parameters:,} parameters as {made.dtype}")
            print(f"files      {', '.join(made.files)}")
            if not made.tokenizer:
                err_console().print("the checkpoint records no encoding: no tokenizer was written")


@app.command("import-hf")
@reports_errors
def import_hf(
    folder: Annotated[str, typer.Argument(help="A folder with config.json and safetensors.", metavar="HF_DIR")],
    out: Annotated[str, typer.Argument(help="The checkpoint to write; it must not exist.", metavar="OUT")],
    encoding: Annotated[str | None, typer.Option(help="Name of its encoding; without, from tokenizer.json.")] = None,
    ranks: Annotated[str | None, typer.Option(help="The encoding's tiktoken ranks file.")] = None,
    json: bool = JSON,
) -> None:
    """Write a weights-only checkpoint from a folder in the layout of transformers."""
    from quern.train.checkpoint.tools import export

    with json_stdout(json) as emit:
        manifest = export.import_hf(folder, out, encoding=encoding, ranks=ranks)
        name = manifest.encoding.name if manifest.encoding else None
        config = {"model": model_section(manifest.model)}
        emit({
            "checkpoint": out, "model": manifest.model.model_dump(mode="json"), "encoding": name,
            "training_config": {"init_from": out, **config},
        })  # fmt: skip
        if not json:
            parameters = manifest.model.num_parameters
            print(f"{plain(folder)} → {plain(out)}: {parameters:,} parameters, encoding {plain(str(name))}")
            print(f"# init_from={plain(out)} takes this model by itself; in a training config it is written as")
            print(dump_yaml(config), end="")


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
    """Print the model's continuation of a prompt. Runs on the CPU, in the weights' precision."""
    from quern.train.checkpoint.tools.sample import continue_text

    text = continue_text(
        checkpoint, prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed
    )
    print(plain(text))
