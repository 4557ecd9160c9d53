"""``quern mix``: weighs sources, by size or by small runs, and documents; shows which tokens a training run reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quern.cli.config.keys import keys_command
from quern.cli.mix import documents, laws
from quern.cli.mix.doremi import doremi
from quern.cli.output import JSON, columns, json_stdout, out_console, plain, reports_errors
from quern.config import dump_yaml
from quern.mixtures.recipe import OrderPlan
from quern.mixtures.weighting import fresh_tokens, weigh
from quern.train.batches.mixture import budget, data_section, open_corpus, plan_mixture, sources_of, with_sources
from quern.train.init_from import load_train_config
from quern.train.swarm.config import SwarmConfig
from quern.words import counted, short

app = typer.Typer(
    help="Weigh sources, select documents, and show the mixture and order of training data.", no_args_is_help=True
)


@app.command()
@reports_errors
def show(
    config: Annotated[str, typer.Argument(help="A YAML file of a training run.", metavar="CONFIG")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, dotted: data.0.weight=2")] = None,
    json: bool = JSON,
) -> None:
    """Print the share and epochs of each source in a run of CONFIG, what is never read, and the hash of the order."""
    resolved = load_train_config(config, overrides or ())
    plan = plan_mixture(resolved, open_corpus(resolved, keep=False))
    with json_stdout(json) as emit:
        emit(plan.to_dict())
        if not json:
            _print(plan, out_console())


@app.command()
@reports_errors
def weights(
    config: Annotated[str, typer.Argument(help="A YAML file of a training run.", metavar="CONFIG")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, dotted: steps=5000")] = None,
    alpha: Annotated[
        float, typer.Option(help="Weights are tokens to this power: 1 = as they are, 0 = equal, 0.3 to 0.7 between.")
    ] = 1.0,
    max_epochs: Annotated[
        float | None, typer.Option(help="How often a source is read at most; else the config's max_epochs of each.")
    ] = None,
    json: bool = JSON,
) -> None:
    """Weigh the sources of CONFIG by their sizes for its budget, with a cap on repetition, and print a data: section.

    With --alpha 0 and --max-epochs this is UniMax: as even as the caps allow.
    """
    resolved = load_train_config(config, overrides or ())
    corpus = open_corpus(resolved, keep=False)
    if max_epochs is not None:
        resolved = with_sources(resolved, "max_epochs", [max_epochs] * len(resolved.data))
    found = weigh(sources_of(resolved, corpus), budget(resolved, corpus, config), alpha)
    weighed = with_sources(resolved, "weight", found)
    plan = plan_mixture(weighed, corpus)
    section = data_section(weighed)
    worth = [fresh_tokens(row.tokens, row.epochs) for row in plan.sources]
    with json_stdout(json) as emit:
        emit(plan.to_dict() | section | {"worth_tokens": worth})
        if not json:
            console = out_console()
            _print(plan, console)
            told = f"worth {short(round(sum(worth)))} tokens that are read once"
            console.print(Text(f"{told} (Muennighoff et al. 2023: a repetition is worth less and less)"))
            console.print()
            console.print(dump_yaml(section), markup=False, highlight=False, soft_wrap=True, end="")


app.command()(documents.select)
app.command()(laws.ablate)
app.command()(laws.fit)
app.command()(doremi)
app.command("keys")(keys_command(SwarmConfig))


def _print(plan: OrderPlan, console: Console) -> None:
    conditions = {row.name: row.name.partition(" where ")[2] for row in plan.sources if " where " in row.name}
    numbers = {name: f"{name.partition(' where ')[0]} [{number}]" for number, name in enumerate(conditions, 1)}
    table = _sources(plan, lambda name: numbers.get(name, name))
    if console.measure(table, options=console.options.update_width(4096)).maximum > console.width:
        table = _sources(plan, lambda name: numbers.get(name, name).replace("/", "/\n"))
    console.print(table)
    for number, condition in enumerate(conditions.values(), 1):
        console.print(Text(f"[{number}] where {plain(condition)}"))
    console.print()
    if len(plan.phases) > 1:
        _print_phases(plan, console)
    for line in (
        f"{counted(plan.steps, 'step')}: {counted(plan.samples, 'sample')} of {plan.seq_len:,} tokens, "
        f"{plan.planned_tokens:,} tokens",
        "left: windows that no step reads; tail: tokens after the last window, in no epoch's reach",
        f"order {plan.order.hash}  seed {plan.order.seed}",
    ):
        console.print(Text(line))


def _sources(plan: OrderPlan, shown: Callable[[str], str]) -> Table:
    """A row a source; ``shown`` breaks its name into lines."""
    weight = [">weight"] if len(plan.phases) == 1 else []  # else each phase has its own shares
    figures = ">tokens", *weight, ">share", ">samples", ">reads", ">epochs", ">at most", ">left", ">tail"
    table = columns("source", *figures, unbroken=figures)
    for row in plan.sources:
        cells = [
            shown(plain(row.name)), short(row.tokens), *(f"{row.weight:g}" for _ in weight), f"{row.share:.2%}",
            short(row.samples), short(row.planned_tokens), f"{row.epochs:.2f}", f"{row.max_epochs:g}",
            f"{row.windows_left / row.windows:.1%}" if row.windows else "–", short(row.tail_tokens),
        ]  # fmt: skip
        table.add_row(*map(Text, cells), style="" if row.samples else "dim")
    tokens = sum(row.tokens for row in plan.sources)
    totals = ["total", short(tokens), *("" for _ in weight), "", short(plan.samples), short(plan.planned_tokens)]
    table.add_row(*map(Text, totals), style="bold")
    return table


def _print_phases(plan: OrderPlan, console: Console) -> None:
    figures = ">from step", ">to step", ">batch", ">samples"
    table = columns("phase", *figures, "shares", unbroken=figures)
    names = [row.name for row in plan.sources]
    for number, row in enumerate(plan.phases):
        shares = ", ".join(f"{name} {share:.2%}" for name, share in zip(names, row.shares, strict=True) if share)
        reached = row.stop_step > row.first_step
        cells = [
            str(number), f"{row.first_step:,}", f"{row.stop_step:,}" if reached else "not reached",
            f"{row.global_batch:,}", short(sum(row.samples)), shares,
        ]  # fmt: skip
        table.add_row(*map(Text, cells), style="" if reached else "dim")
    console.print(table)
    console.print()
