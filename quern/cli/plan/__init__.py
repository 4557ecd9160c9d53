"""``quern plan``: layouts of a model on a cluster that fit, ranked by speed; a config's memory and time."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any, get_args

import typer
import yaml
from rich.console import Console

from quern import storage
from quern.cli.default_command import with_default
from quern.cli.output import JSON, columns, err_console, json_stdout, out_console, reports_errors, say
from quern.cli.plan.calibrate import calibrate
from quern.errors import InputError
from quern.words import counted, size

__all__ = ["app", "plan_config", "print_planned"]

app = typer.Typer(
    cls=with_default("layouts"),
    no_args_is_help=True,
    subcommand_metavar="--model MODEL [OPTIONS] | COMMAND",
    help="Say whether a model fits on a cluster, how fast it trains there, and in which layout.",
)

Moments = StrEnum("Moments", ["fp32", "bf16"])

#: What a fixed value may be, of those that are not whole numbers above 0.
_VALUES: dict[str, tuple[Any, ...]] = {
    "zero": (None, 1, 2), "schedule": (None, "1f1b", "interleaved_1f1b", "zbv_zero_bubble"),
    "stages_per_rank": (None, 2, 4), "checkpointing": ("none", "selective", "full"), "host_state": (False, True),
}  # fmt: skip
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


@app.command()
@reports_errors
def layouts(
    model: Annotated[str, typer.Option(help="A preset of model.preset, as llama3-70b.")],
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the cluster.")] = 8,
    gpu: Annotated[str, typer.Option(help="A profile, as h100, or a YAML file of one.")] = "h100",
    seq_len: Annotated[int, typer.Option("--seq-len", min=1, help="Tokens of a sequence.")] = 8192,
    batch: Annotated[
        str | None,
        typer.Option("--batch", help="Tokens of a step, as 4M; by default 4M, and a sequence for 8 GPUs or more."),
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens of the whole run, as 15T: days, GPU-hours, cost.")] = None,
    vocab_size: Annotated[int, typer.Option(min=1, help="Ids of the encoding.")] = 128_256,
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
    from quern.planner.answer import answer, check_float8, row
    from quern.planner.explain import explain as explained
    from quern.planner.hardware import load_hardware
    from quern.planner.memory.peak import State
    from quern.planner.page import render
    from quern.planner.search import Search
    from quern.planner.search import pareto as undominated

    hardware = load_hardware(gpu)
    if price is not None:
        hardware = hardware.model_copy(update={"dollars_per_hour": price})
    wish = _wish(model, gpus, hardware.node, seq_len, batch, vocab_size, float8, not eager, fix or [])
    wish = replace(wish, moments_bf16=moments is Moments.bf16)
    check_float8(hardware, wish.float8)
    state = State(moment_bytes=2 if wish.moments_bf16 else 4, documents=True)
    whole = None if tokens is None else _number("--tokens", tokens)
    if emit is not None and os.path.exists(emit):
        raise InputError(f"{emit}: exists; expected a new file")
    with json_stdout(json) as out:
        found = Search(wish, state, hardware)
        told = answer(wish, state, hardware, found, whole, top)
        if told["best"] is None:
            raise InputError(
                f"no layout of {counted(gpus, 'GPU')} takes {wish.global_batch:,} sequences of {seq_len:,} tokens a "
                f"step with what is fixed; expected another --batch or fewer --fix"
            )
        if emit is not None:
            _write(emit, told["best"]["config"], model)
        best = found.best
        assert best is not None
        if told["run"] is not None:
            told["run"] |= _failures(told["run"]["days"], gpus)
        if explain:
            told["explained"] = explained(best.step, state, hardware, best.room, best.time)
        if pareto and told["fits"]:
            told["layouts"] = [row(one) for one in undominated(found.fastest())][:top]
        if html is not None:
            storage.publish_bytes(html, render(told, found, wish, state, hardware).encode())
        out(told)
        if not json:
            _print(told)
            for line in told.get("explained", ()):
                say(f"\n{line[2:]}" if line.startswith("# ") else line)
            if emit is not None:
                say(f"{emit}: written; add data, steps and run_dir", err_console())
    if not told["fits"]:
        raise typer.Exit(1)


def _wish(
    model: str, gpus: int, node: int, seq_len: int, batch: str | None, vocab_size: int, float8: str | None,
    compiled: bool, fix: list[str],
) -> Any:  # fmt: skip
    from quern.config import validate
    from quern.model.config import ModelConfig
    from quern.model.float8.recipe import Recipe, Scaling
    from quern.planner.candidates import Wish

    shape = validate({"preset": model}, ModelConfig, "--model").shape(vocab_size)
    if float8 is not None and float8 not in get_args(Scaling):
        raise InputError(f"--float8: expected one of {', '.join(get_args(Scaling))}, got {float8!r}")
    sequences = max(2**22 // seq_len, gpus // 8, 1)
    if sequences > gpus:
        sequences = -(-sequences // gpus) * gpus
    if batch is not None:
        sequences, rest = divmod(int(_number("--batch", batch, 2**20)), seq_len)
        if rest or not sequences:
            raise InputError(f"--batch: expected a multiple of --seq-len ({seq_len:,} tokens), got {batch}")
    recipe = None if float8 is None else Recipe(float8)  # type: ignore[arg-type]
    return Wish(shape, gpus, min(node, gpus), seq_len, sequences, recipe, compiled, fixed=_fixed(fix))


def _fixed(given: list[str]) -> dict[str, Any]:
    from dataclasses import fields

    from quern.planner.candidates import Choice

    known, found = {one.name for one in fields(Choice)}, {}
    for text in given:
        name, equals, value = text.partition("=")
        if name not in known or not equals:
            raise InputError(f"--fix: expected key=value with one of {', '.join(sorted(known))}, got {text!r}")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            found[name] = value
        allowed = _VALUES.get(name)
        number = type(found[name]) is int and found[name] >= 1
        fits = number if allowed is None else (type(found[name]), found[name]) in [(type(one), one) for one in allowed]
        if not fits:
            expected = "a whole number above 0" if allowed is None else ", ".join(map(_yaml, allowed))
            raise InputError(f"--fix: {name}: expected {expected}, got {value!r}")
    return found


def _yaml(value: Any) -> str:
    return str(yaml.safe_dump(value)).partition("\n")[0]


def _number(name: str, text: str, mega: float = 1e6) -> float:
    """``15T``, ``4M``, ``3e9``; a batch's M is 2²⁰."""
    units = _UNITS | {"M": mega}
    try:
        value = float(text[:-1]) * units[text[-1].upper()] if text[-1:].upper() in units else float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InputError(f"{name}: expected a number above 0, as 15T or 3e9, got {text!r}")
    return value


def _write(path: str, config: dict[str, Any], model: str) -> None:
    text = yaml.safe_dump({"model": {"preset": model}} | config, sort_keys=False)
    storage.publish_bytes(path, f"# Planned by quern plan; add run_dir, data and steps.\n{text}".encode())


def _print(told: dict[str, Any]) -> None:
    from quern.planner.search import AS_FAST

    console, best = out_console(), told["best"]
    say(
        f"{told['model']['parameters'] / 1e9:.1f} B parameters on {told['gpus']:,} × {told['hardware']}, "
        f"{told['global_batch']:,} sequences of {told['seq_len']:,} tokens a step"
    )
    table = columns("layout", ">memory", ">step", ">tok/s/GPU", ">MFU", ">bubble")
    for one in told["layouts"]:
        table.add_row(*_cells(one))
    console.print(table)
    memory = best["memory"]
    if told["fits"]:
        legal = f"{counted(told['legal'], 'layout')} {'is' if told['legal'] == 1 else 'are'} legal"
        as_fast = f": the plainest of those within {AS_FAST:.0%} of the fastest" * (
            best["name"] != told["layouts"][0]["name"]
        )
        say(f"\n{legal}. Take {best['name']}{as_fast}")
    else:
        say(f"\ndoes not fit: {best['name']} comes closest, and is short by {memory['lacks']}")
        for one in told["try"]:
            say(f"  fits: {one['why']}")
    print_planned(best, best["layout"]["pp"], console)
    say("\nwhy this layout: the best one with another value of")
    for reason in told["reasons"]:
        say(f"  {reason['why']}")
    if told["same"]:
        say("\nthe same layout with")
    for one in told["same"]:
        say(f"  {one['why']}")
    if (run := told["run"]) is not None:
        say(
            f"\n{run['tokens']:,.0f} tokens: {run['steps']:,} steps, {run['days']:,.1f} days, "
            f"{run['gpu_hours']:,.0f} GPU-hours, ${run['dollars']:,.0f} at ${run['dollars_per_hour']:.2f} an hour"
        )
        say(
            f"failures: {run['failures']:,.1f} expected, one in {run['mtbf_hours']:,.1f} hours; with a save every "
            f"{run['save_interval_s'] / 60:,.1f} minutes saves, restarts and work done again take "
            f"{run['waste']:.1%}: {run['days_with_failures']:,.1f} days"
        )


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


def print_planned(told: dict[str, Any], pp: int, console: Console) -> None:
    """Memory by component, and a step's time by part."""
    from quern.planner.answer import MOMENTS

    memory, time = told["memory"], told["time"]
    where = "" if pp == 1 else f" of place {memory['place']} of the pipeline"
    moment = MOMENTS[memory["moment"]]
    say(f"\nthe most that a rank{where} holds, {moment}:", console)
    parts = columns("component", ">bytes")
    for name, number in sorted(memory["components"].items(), key=lambda item: -item[1]):
        parts.add_row(name, size(number))
    parts.add_row("all", f"{size(memory['needs'])} of {size(memory['has'])}")
    console.print(parts)
    if memory["short"]:
        say(f"does not fit: short by {memory['lacks']}", console)
    if time is None:
        return
    speed = f"{time['seconds']:.3f} s, {time['tokens_per_gpu_s']:,.0f} tokens a second and GPU"
    mfu = f"MFU {time['mfu_full']:.1%} with all of attention, {time['mfu_causal']:.1%} with its causal half"
    say(f"\na step takes {speed}, {mfu}; on the slowest rank:", console)
    parts = columns("part", ">seconds", ">share")
    for name, seconds in sorted(time["parts"].items(), key=lambda item: -item[1]):
        parts.add_row(name, f"{seconds:.3f}", f"{seconds / time['seconds']:.1%}")
    console.print(parts)


def _cells(one: dict[str, Any]) -> list[str]:
    memory, time = one["memory"], one["time"]
    found = [one["name"], size(memory["needs"])]
    if time is None:
        return [*found, "", "", "", ""]
    bubble = time["parts"].get("bubble", 0.0) / time["seconds"]
    return [*found, f"{time['seconds']:.2f} s", f"{time['tokens_per_gpu_s']:,.0f}", f"{time['mfu_full']:.1%}",
            f"{bubble:.1%}"]  # fmt: skip


@app.command()
@reports_errors
def check(
    config: Annotated[str, typer.Argument(help="A training config.", metavar="CONFIG")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, dotted: model.preset=125M")] = None,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Ranks: GPUs of the cluster.")] = 8,
    gpu: Annotated[str, typer.Option(help="A profile, as h100, or a YAML file of one.")] = "h100",
    vocab_size: Annotated[int, typer.Option(min=1, help="Ids of the encoding.")] = 128_256,
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
    from quern.planner.answer import planned
    from quern.planner.hardware import load_hardware
    from quern.train.setup import check_settings
    from quern.train.summary import run_state, step_of

    hardware, config = load_hardware(gpu), config.model_copy(update={"device": "cuda"})
    layout = check_settings(config, nproc, vocab_size)
    return planned(step_of(config, config.model.shape(vocab_size), layout), run_state(config), hardware)


app.command()(calibrate)
