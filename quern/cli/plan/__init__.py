"""``quern plan``: layouts of a model on a cluster that fit, ranked by speed; a config's memory and time."""

from __future__ import annotations

import os
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import typer
import yaml

from quern import storage
from quern.cli.default_command import with_default
from quern.cli.output import JSON, err_console, json_stdout, out_console, reports_errors, say
from quern.cli.plan.asked import VOCABULARY, model_of, number, recipe_of, wish_of
from quern.cli.plan.calibrate import calibrate
from quern.cli.plan.shown import print_clusters, print_plan, print_planned
from quern.errors import InputError
from quern.planner.answer import answer, check_float8, planned, row, run_of
from quern.planner.candidates import Wish
from quern.planner.explain import explain as explained
from quern.planner.hardware import Hardware, load_hardware
from quern.planner.memory.peak import State
from quern.planner.page import render
from quern.planner.search import Search
from quern.planner.search import pareto as undominated
from quern.words import counted

__all__ = ["app", "plan_config"]

app = typer.Typer(
    cls=with_default("layouts"),
    no_args_is_help=True,
    subcommand_metavar="--model MODEL [OPTIONS] | COMMAND",
    help="Say whether a model fits on a cluster, how fast it trains there, and in which layout.",
)

Moments = StrEnum("Moments", ["fp32", "bf16"])


@app.command()
@reports_errors
def layouts(
    model: Annotated[
        str,
        typer.Option(help="A preset, as llama3-70b; a training config (YAML); a config.json of transformers."),
    ],
    gpus: Annotated[
        list[int] | None,
        typer.Option(min=1, help="GPUs of the cluster; by default 8. Several times: clusters to compare."),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(help="A profile, as h100, the default, or a YAML file of one. Several times: to compare."),
    ] = None,
    seq_len: Annotated[int, typer.Option("--seq-len", min=1, help="Tokens of a sequence.")] = 8192,
    batch: Annotated[
        str | None,
        typer.Option("--batch", help="Tokens of a step, as 4M; by default 4M, and a sequence for 8 GPUs or more."),
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens of the whole run, as 15T: days, GPU-hours, cost.")] = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Ids of the encoding, 128256; of a config.json its own.")
    ] = None,
    float8: Annotated[str | None, typer.Option(help="Products in FP8: tensorwise, rowwise or blockwise.")] = None,
    moments: Annotated[Moments, typer.Option(help="Of Adam, as optimizer.moments.")] = Moments.fp32,
    eager: Annotated[bool, typer.Option("--eager", help="Without torch.compile.")] = False,
    fix: Annotated[
        list[str] | None,
        typer.Option("--fix", help="key=value: look at this value alone, as tp=8; may be given several times."),
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Dollars of a GPU-hour; by default the profile's.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Layouts that are listed.")] = 8,
    explain: Annotated[bool, typer.Option("--explain", help="Walk through the arithmetic of the best layout.")] = False,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Of those that fit, list those of which none is both faster and smaller.")
    ] = False,
    html: Annotated[str | None, typer.Option(help="Write the plan as a page to this file.")] = None,
    emit: Annotated[str | None, typer.Option(help="Write the best layout's keys to this file, as a config.")] = None,
    json: bool = JSON,
) -> None:
    """Look at every layout of a model on a cluster: whether it fits, and how long a step takes."""
    state = State(moment_bytes=2 if moments is Moments.bf16 else 4, documents=True)
    shape, section = model_of(model, vocab_size)
    recipe, half = recipe_of(float8), moments is Moments.bf16
    whole = None if tokens is None else number("--tokens", tokens)
    clusters: list[tuple[str, Wish, Hardware]] = []
    for name in gpu or ["h100"]:
        hardware = load_hardware(name)
        check_float8(hardware, recipe)
        hardware = hardware if price is None else hardware.model_copy(update={"dollars_per_hour": price})
        for count in gpus or [8]:
            wish = wish_of(shape, count, hardware.node, seq_len, batch, fix or [])
            wish = replace(wish, float8=recipe, compiled=not eager, moments_bf16=half)
            clusters.append((name, wish, hardware))
    if len(clusters) > 1:
        if explain or pareto or html is not None or emit is not None:
            raise InputError(f"--explain, --pareto, --html and --emit: expected one cluster, got {len(clusters)}")
        with json_stdout(json) as out:
            rows = [{"gpu": name} | _of_cluster(wish, state, own, whole) for name, wish, own in clusters]
            out({"model": shape.model_dump(mode="json"), "clusters": rows})
            if not json:
                print_clusters(rows)
        if not any(row["fits"] for row in rows):
            raise typer.Exit(1)
        return
    ((_, wish, hardware),) = clusters
    if emit is not None and os.path.exists(emit):
        raise InputError(f"{emit}: exists; expected a new file")
    with json_stdout(json) as out:
        found = Search(wish, state, hardware)
        told, best = answer(wish, state, hardware, found, whole, top), found.best
        if best is None:
            raise InputError(
                f"no layout of {counted(wish.gpus, 'GPU')} takes {wish.global_batch:,} sequences of {seq_len:,} tokens "
                f"a step with what is fixed; expected another --batch or fewer --fix"
            )
        if emit is not None:
            _write(emit, {"model": section} | told["best"]["config"])
        if told["run"] is not None:
            told["run"] |= _failures(told["run"]["days"], wish.gpus)
        if explain:
            told["explained"] = explained(best.step, state, hardware, best.room, best.time)
        if pareto and told["fits"]:
            told["layouts"] = [row(one) for one in undominated(found.fastest())][:top]
        if html is not None:
            storage.publish_bytes(html, render(told, found, wish, state, hardware).encode())
        out(told)
        if not json:
            print_plan(told)
            for line in told.get("explained", ()):
                say(f"\n{line[2:]}" if line.startswith("# ") else line)
            if emit is not None:
                say(f"{emit}: written; add data, steps and run_dir", err_console())
    if not told["fits"]:
        raise typer.Exit(1)


def _of_cluster(wish: Wish, state: State, hardware: Hardware, tokens: float | None) -> dict[str, Any]:
    """What is told of one of several: the layout to take, or the one that is least short."""
    best = Search(wish, state, hardware).best
    run = None if tokens is None or best is None or best.time is None else run_of(best, wish, hardware, tokens)
    return {
        "gpus": wish.gpus, "hardware": hardware.title, "global_batch": wish.global_batch,
        "fits": best is not None and best.time is not None, "best": None if best is None else row(best),
        "run": None if run is None else run | _failures(run["days"], wish.gpus),
    }  # fmt: skip


def _write(path: str, config: dict[str, Any]) -> None:
    text = yaml.safe_dump(config, sort_keys=False)
    storage.publish_bytes(path, f"# Planned by quern plan; add run_dir, data and steps.\n{text}".encode())


def _failures(days: float, gpus: int) -> dict[str, float]:
    """What failures cost, by the formulas that a run chooses its saves by, with what it assumes before it has seen
    any."""
    from quern.train.checkpoint.retention import save_interval as saves

    mtbf = saves.GPU_MTBF_S / gpus
    interval = saves.best_interval(saves.ASSUMED_COST_S, mtbf)
    waste = saves.expected_waste(interval, saves.ASSUMED_COST_S, mtbf, restart_s=saves.ASSUMED_RESTART_S)
    whole = days / (1 - waste)
    return {
        "failures": whole * 86_400 / mtbf, "mtbf_hours": mtbf / 3600, "save_interval_s": interval, "waste": waste,
        "days_with_failures": whole,
    }  # fmt: skip


@app.command()
@reports_errors
def check(
    config: Annotated[str, typer.Argument(help="A training config.", metavar="CONFIG")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, dotted: model.preset=125M")] = None,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Ranks: GPUs of the cluster.")] = 8,
    gpu: Annotated[str, typer.Option(help="A profile, as h100, or a YAML file of one.")] = "h100",
    vocab_size: Annotated[int, typer.Option(min=1, help="Ids of the encoding.")] = VOCABULARY,
    json: bool = JSON,
) -> None:
    """Say what a step of CONFIG needs and takes on a cluster; the data is not looked at. Exit code 1: it does not
    fit."""
    from quern.train.init_from import load_run_config

    given = load_run_config(config, [*(overrides or ()), "device=cuda"])
    with json_stdout(json) as out:
        told = plan_config(given, nproc, vocab_size, gpu)
        out(told)
        if not json:
            print_planned(told, given.parallel.pp, out_console())
    if not told["fits"]:
        raise typer.Exit(1)


def plan_config(config: Any, nproc: int, vocab_size: int, gpu: str) -> dict[str, Any]:
    """As :func:`quern.planner.answer.planned`, of a training config on GPUs, whatever device it names."""
    from quern.train.setup import check_settings
    from quern.train.summary import run_state, step_of

    hardware, config = load_hardware(gpu), config.model_copy(update={"device": "cuda"})
    layout = check_settings(config, nproc, vocab_size)
    return planned(step_of(config, config.model.shape(vocab_size), layout), run_state(config), hardware)


app.command()(calibrate)
