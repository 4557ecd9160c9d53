"""What ``quern plan`` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from quern.cli.output import columns, out_console, say
from quern.planner.answer import MOMENTS
from quern.planner.search import AS_FAST
from quern.words import counted, size

__all__ = ["print_clusters", "print_plan", "print_planned"]


def print_plan(told: dict[str, Any]) -> None:
    """The layouts, the one to take, and why."""
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


def print_planned(told: dict[str, Any], pp: int, console: Console) -> None:
    """Memory by component, and a step's time by part."""
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


def print_clusters(rows: list[dict[str, Any]]) -> None:
    """A line for each cluster: the layout to take there, and what the run costs."""
    table = columns(">GPUs", "", "layout", ">memory", ">step", ">MFU", ">days", ">dollars")
    for one in rows:
        best, run = one["best"], one["run"]
        cells = [f"{one['gpus']:,}", one["gpu"]]
        if not one["fits"]:
            why = (
                "no layout takes such a step" if best is None else f"short by {best['memory']['lacks']}: {best['name']}"
            )
            table.add_row(*cells, why)
            continue
        time, memory = best["time"], size(best["memory"]["needs"])
        cells += [best["name"], memory, f"{time['seconds']:.2f} s", f"{time['mfu_full']:.1%}"]
        table.add_row(*cells, *([] if run is None else [f"{run['days_with_failures']:,.1f}", f"{run['dollars']:,.0f}"]))
    out_console().print(table)
    if any(one["run"] for one in rows):
        say("days: with failures, saves and restarts; dollars: of the GPU-hours without them")
