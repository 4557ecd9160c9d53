"""``quern mix doremi``: weights of sources from a proxy that learns them beside a reference."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from quern import storage
from quern.cli.open_run import note
from quern.cli.output import JSON, columns, json_stdout, out_console, plain, reports_errors
from quern.config import dump_yaml
from quern.train.config import DoReMiConfig
from quern.train.init_from import load_train_config

__all__ = ["doremi"]


@reports_errors
def doremi(
    config: Annotated[str, typer.Argument(help="A YAML file of the run that is to come.", metavar="CONFIG")],
    out: Annotated[str, typer.Option(help="The folder of both runs.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="What makes both runs small: model.preset=125M steps=20000")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="A checkpoint or run of the small model, in place of training one.")
    ] = None,
    step_size: Annotated[
        float, typer.Option(min=1e-9, help="In a step a weight grows by exp of this times its excess loss.")
    ] = 1.0,
    smoothing: Annotated[
        float, typer.Option(min=1e-9, max=0.999, help="The part of all weight that is the same for all sources.")
    ] = 1e-3,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks of each run, processes on this machine.")] = 1,
    json: bool = JSON,
) -> None:
    """Train a reference of CONFIG's sources and then a proxy that learns their weights against it (DoReMi, Xie et al.
    2023), and print the mean weights as the data: section of the run to come.

    The same command goes on with runs that were interrupted.
    """
    from quern.train.swarm.doremi import plan_doremi, propose, run_doremi

    base = load_train_config(config)
    learning = DoReMiConfig(reference=reference, step_size=step_size, smoothing=smoothing)
    runs = plan_doremi(base, load_train_config(config, overrides or ()), out, learning)
    with json_stdout(json) as emit:
        run_doremi(runs, out, nproc, note)
        found = propose(base, runs["proxy"])
        section = {"data": found["data"]}
        storage.publish_bytes(storage.join(out, "proposal.yaml"), dump_yaml(section).encode())
        emit(found)
        if json:
            return
        table = columns(
            "source", ">tokens", ">sampled", ">excess loss", ">weight", ">mean weight", ">at most", ">proposed"
        )
        for name, row in found["sources"].items():
            shares = (row[key] for key in ("last_weight", "weight", "most", "proposed"))
            cells = f"{row['token_share']:.2%}", f"{row['sampled']:.2%}", f"{row['excess_loss']:.4f}"
            table.add_row(Text(plain(name)), *cells, *(f"{share:.2%}" for share in shares))
        console = out_console()
        console.print(table)
        console.print(dump_yaml(section), markup=False, highlight=False, soft_wrap=True, end="")
