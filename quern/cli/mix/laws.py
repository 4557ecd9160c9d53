"""``quern mix ablate`` and ``quern mix fit``: mixing laws from a swarm of small runs, and the mixture they propose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from quern import storage
from quern.cli.output import (
    JSON,
    columns,
    ended_by_signals,
    err_console,
    json_stdout,
    out_console,
    plain,
    reports_errors,
    say,
)
from quern.config import dump_yaml, load_config, read_yaml
from quern.errors import InputError
from quern.train.swarm.config import SwarmConfig

if TYPE_CHECKING:
    from quern.mixtures.laws.fit import Fit
    from quern.mixtures.laws.propose import Proposal, Wish
    from quern.mixtures.laws.tables import Runs
    from quern.train.swarm.plan import Swarm

__all__ = ["ablate", "fit", "propose_mixture"]


@ended_by_signals()
@reports_errors
def ablate(
    spec: Annotated[str, typer.Argument(help="A YAML file of a swarm: quern mix keys.", metavar="SPEC")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, dotted: runs=64")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the mixtures; train nothing.")] = False,
    json: bool = JSON,
) -> None:
    """Train SPEC's small runs on mixtures that are drawn, fit a law to their held-out losses, and propose a mixture.

    The same command goes on with a swarm that was interrupted. In run_dir it leaves runs.csv, fit.json and
    proposal.yaml, the data: section of the large run.
    """
    from quern.train.swarm.plan import plan_swarm
    from quern.train.swarm.run import run_swarm

    config = load_config(spec, SwarmConfig, overrides or ())
    console = Console(quiet=True) if json else out_console()
    with json_stdout(json) as emit:
        swarm = plan_swarm(config)
        names = [source.name for source in swarm.sources]
        if unmeasured := [name for name in names if name not in swarm.weights]:
            told = f"warning: no loss is measured of {', '.join(unmeasured)}: no window of theirs is held out"
            err_console().print(Text(plain(told), style="yellow"))
        if dry_run:
            emit([{"run": own.name, "shares": dict(zip(names, own.shares, strict=True))} for own in swarm.members])
            table = columns("run", *(f">{name}" for name in names))
            for own in swarm.members:
                table.add_row(own.name, *(f"{share:.2%}" for share in own.shares))
            console.print(table)
            return
        run_swarm(swarm, lambda line: err_console().print(plain(line), markup=False))
        emit(propose_mixture(swarm, console))


def propose_mixture(swarm: Swarm, console: Console) -> dict[str, Any]:
    """Fit the laws of a swarm that is trained; write, print and return what they propose."""
    from quern.mixtures.laws.propose import Wish
    from quern.mixtures.laws.tables import read_runs
    from quern.train.swarm.page import write_page

    config, path = swarm.config, storage.join(swarm.config.run_dir, "runs.csv")
    runs = read_runs([path], "run")
    wish = Wish(swarm.weights, swarm.caps, swarm.prior, config.kl)
    told, proposal, fits = _propose(config.form, runs, wish, path)
    section = swarm.section(proposal.shares)
    storage.write_json(storage.join(config.run_dir, "fit.json"), told | section)
    storage.publish_bytes(storage.join(config.run_dir, "proposal.yaml"), dump_yaml(section).encode())
    page = write_page(config.run_dir, config.run_dir, runs, proposal, fits, wish)
    say(page, err_console())
    _print(console, runs, proposal, fits, wish, section)
    return told | section


@reports_errors
def fit(
    tables: Annotated[list[str], typer.Argument(help="CSV or Parquet: a swarm's runs.csv, or shares and then losses.")],
    form: Annotated[str, typer.Option(help="log-linear, c + exp(p · t), or linear, p · t.")] = "log-linear",
    key: Annotated[str, typer.Option(help="With two tables: the column of both that names a run.")] = "run",
    tokens: Annotated[
        str | None, typer.Option(help="YAML of the tokens of each source, FILE or FILE:KEY; names its columns too.")
    ] = None,
    families: Annotated[
        str | None, typer.Option(help="YAML of the columns of losses of each family, FILE or FILE:KEY.")
    ] = None,
    weight: Annotated[list[str] | None, typer.Option(help="How much a family's loss counts: math=7.")] = None,
    budget: Annotated[
        float | None, typer.Option(min=1, help="With --tokens: tokens of the run to come (6e12).")
    ] = None,
    max_epochs: Annotated[
        float, typer.Option(min=0.01, help="With --budget: how often a source is read at most.")
    ] = 4.0,
    kl: Annotated[float, typer.Option(min=0, help="Nats of loss that a nat of divergence from --tokens costs.")] = 0.0,
    json: bool = JSON,
) -> None:
    """Fit a law to the runs of TABLES, others' too, and print the shares of the mixture that it proposes."""
    import numpy as np

    from quern.mixtures.laws.propose import Wish, family_weights
    from quern.mixtures.laws.tables import read_runs

    if len(tables) > 2:
        raise InputError(f"tables: expected one, or one of shares and one of losses, got {len(tables)}")
    if budget is not None and tokens is None:
        raise InputError("--budget: expected together with --tokens")
    sizes, tasks = _mapping(tokens) or {}, _mapping(families)
    if wrong := [name for name, size in sizes.items() if not (isinstance(size, int | float) and 0 < size < 1e300)]:
        raise InputError(f"--tokens: {wrong[0]}: expected a number above 0, got {sizes[wrong[0]]!r}")
    for name, losses in (tasks or {}).items():
        if not isinstance(losses, list) or not losses:
            raise InputError(f"--families: {name}: expected a list of columns, got {losses!r}")
    runs = read_runs(tables, key, list(sizes), tasks)
    counts = np.array(list(sizes.values()), float)
    prior = counts / counts.sum() if sizes else None
    caps = np.ones(len(runs.sources)) if budget is None else np.minimum(max_epochs * counts / budget, 1.0)
    try:
        weights = {name: float(value) for name, _, value in (text.rpartition("=") for text in weight or ())}
    except ValueError as error:
        raise InputError(f"--weight: expected FAMILY=NUMBER ({error})") from None
    wish = Wish(family_weights(weights, runs.losses), caps, prior, kl)
    with json_stdout(json) as emit:
        told, proposal, fits = _propose(form, runs, wish, tables[-1])
        emit(told)
        if not json:
            shares = dict(zip(runs.sources, (round(share, 6) for share in proposal.shares.tolist()), strict=True))
            _print(out_console(), runs, proposal, fits, wish, {"shares": shares})


def _mapping(given: str | None) -> dict[str, Any] | None:
    """What stands in a YAML file, or below a dotted key of it."""
    if given is None:
        return None
    file, _, key = given.rpartition(":") if ":" in given else (given, "", "")
    found: Any = read_yaml(file)
    for part in key.split(".") if key else ():
        found = found.get(part) if isinstance(found, dict) else None
    if not isinstance(found, dict) or not found:
        raise InputError(f"{given}: expected a mapping there, got {type(found).__name__}")
    return found


def _propose(form: str, runs: Runs, wish: Wish, what: str) -> tuple[dict[str, Any], Proposal, dict[str, Fit]]:
    from quern.mixtures.laws.fit import fit
    from quern.mixtures.laws.propose import propose, to_dict

    fits = {name: fit(form, runs.mixtures, own, runs.sources, f"{what}: {name}") for name, own in runs.losses.items()}
    proposal = propose(fits, runs.mixtures, runs.sources, wish)
    return to_dict(proposal, fits), proposal, fits


def _print(
    console: Console, runs: Runs, proposal: Proposal, fits: Mapping[str, Fit], wish: Wish, section: Mapping[str, Any]
) -> None:
    from quern.train.swarm.page import interval

    laws = columns("loss", ">weight", ">left-out error", ">explained", ">rank", ">predicted, 95 %")
    for name, own in fits.items():
        figures = f"{own.error:.4f}", f"{own.explained:.1%}", f"{own.rank_correlation:.3f}"
        weight = f"{wish.weights[name]:.3g}"
        laws.add_row(Text(plain(name)), weight, *figures, interval(proposal.families[name]))
    laws.add_row("all", "1", "", "", "", interval(proposal.loss), style="bold")
    if proposal.gain is not None:
        laws.add_row("below token shares", "", "", "", "", interval(proposal.gain))
    console.print(laws)
    console.print()
    shares = columns("source", ">tried", ">at most", ">proposed", *([">tokens"] if wish.prior is not None else []))
    for place, name in enumerate(runs.sources):
        tried = runs.mixtures[:, place]
        cells = [f"{tried.min():.2%} to {tried.max():.2%}", f"{wish.caps[place]:.2%}", f"{proposal.shares[place]:.2%}"]
        shares.add_row(Text(plain(name)), *cells, *([f"{wish.prior[place]:.2%}"] if wish.prior is not None else []))
    console.print(shares)
    console.print()
    for line in proposal.warnings:
        console.print(Text(f"warning: {plain(line)}", style="yellow"))
    console.print(dump_yaml(section), markup=False, highlight=False, soft_wrap=True, end="")
