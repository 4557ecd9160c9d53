"""Formats a profile as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quern.words import aligned, counted

__all__ = ["report"]

_NAMES = {
    "gemm": "GEMM",
    "attention": "attention",
    "loss": "loss",
    "optimizer": "optimizer, clip, guard",
    "elementwise": "element-wise, norms, copies",
    "communication": "communication, exposed",
    "data": "data wait",
    "host": "host",
    "idle": "idle",
}
_PRODUCTS = 12
_OPERATIONS = 8


def report(result: Mapping[str, Any]) -> str:
    """The tables of ``profile.json``, and the three largest losses of rank 0."""
    ranks = result["ranks"]
    parts = [_head(result), _classes(ranks), _collectives(ranks), _products(ranks[-1], result), _operations(ranks[-1])]
    parts.append(_losses(ranks[-1]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(result: Mapping[str, Any]) -> str:
    first = result["ranks"][0]
    lines = [f"{counted(len(first['steps_s']), 'step')} traced: {', '.join(map(_seconds, first['steps_s']))}"]
    if "world" in result:
        where = [
            result["machine"],
            counted(result["world"], "rank"),
            counted(result["threads"], "thread"),
            result["precision"],
        ]
        lines.insert(0, ", ".join(where))
        lines.append(f"{result['tokens_per_s']:,.0f} tokens/s{_untraced(result)}")
    if result["best_tflops"] is not None:
        speed, share = _tflops(result["model_tflops_per_rank"]), f"{result['of_best']:.1%}"
        lines.append(f"best product {_tflops(result['best_tflops'])}, copy {result['copy_gb_per_s']:,.1f} GB/s")
        lines.append(f"the model's own FLOPs: {speed} a rank, {share} of the best product")
    if len(own := result["own_s"].values()) > 1:
        span = f"{_seconds(min(own))} to {_seconds(max(own))}"
        lines.append(f"a rank's own work: {span} a step; slowest is rank {result['slowest']}")
    return "\n".join(lines)


def _untraced(result: Mapping[str, Any]) -> str:
    untraced = result["untraced_step_s"]
    if untraced is None:
        return ""
    more = f"{result['step_s'] / untraced - 1:+.0%}"
    return f" at {_seconds(untraced)} a step without the profiler; with it {more}"


def _classes(ranks: Sequence[Mapping[str, Any]]) -> str:
    rows = [["a step's time", *(text for rank in ranks for text in (f"rank {rank['rank']}", ""))]]
    for kind, name in _NAMES.items():
        rows.append([name, *(text for rank in ranks for text in _timed(rank["classes"][kind]))])
    whole = [{"s": sum(part["s"] for part in rank["classes"].values()),
              "share": sum(part["share"] for part in rank["classes"].values())} for rank in ranks]  # fmt: skip
    rows.append(["sum", *(text for each in whole for text in _timed(each))])
    hidden = [rank["communication"]["total"] for rank in ranks]
    rows.append(["communication, hidden or not", *(text for each in hidden for text in _timed(each))])
    return "\n".join(aligned(rows))


def _collectives(ranks: Sequence[Mapping[str, Any]]) -> str:
    rows = [["collectives", "rank", "a step", "total", "exposed", ""]]
    for rank in ranks:
        for each in rank["communication"]["collectives"]:
            rows.append([each["kind"], str(rank["rank"]), f"{each['count']:.0f}", _seconds(each["total"]["s"]),
                         *_timed(each["exposed"])])  # fmt: skip
    return "\n".join(aligned(rows)) if len(rows) > 1 else ""


def _products(rank: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    rows = [["m × n × k", "a step", "time", "", "speed", "alone", "of alone", "of best"]]
    for each in rank["products"][:_PRODUCTS]:
        known = each["shape"] is not None
        rows.append([
            each["shape"] if known else "shape not in the trace", f"{each['count']:.0f}", *_timed(each),
            _tflops(each["tflops"] if known else None), _tflops(each["ceiling_tflops"] if known else None),
            _share(each["of_ceiling"] if known else None), _share(each["of_best"] if known else None),
        ])  # fmt: skip
    title = f"products of rank {rank['rank']}"
    if result["best_tflops"] is None:
        title += " (ceilings are known of the machine that runs quern train profile CONFIG, not of a trace)"
    if rest := rank["products"][_PRODUCTS:]:
        whole = {name: sum(each[name] for each in rest) for name in ("count", "s", "share")}
        rows.append([f"{len(rest)} more shapes", f"{whole['count']:.0f}", *_timed(whole), "", "", "", ""])
    return "\n".join([title, *aligned(rows)]) if rank["products"] else ""


def _operations(rank: Mapping[str, Any]) -> str:
    rows = [["other operations", "class", "a step", "time", ""]]
    for each in rank["operations"][:_OPERATIONS]:
        name = each["name"] if len(each["name"]) <= 60 else each["name"][:57] + "…"
        rows.append([name, each["class"], f"{each['count']:.0f}", *_timed(each)])
    return "\n".join(aligned(rows))


def _losses(rank: Mapping[str, Any]) -> str:
    lines = [f"the three largest losses of rank {rank['rank']}, beside a step that only multiplies at the best speed"]
    for number, loss in enumerate(rank["losses"], start=1):
        lines.append(f"{number}. {loss['what']}: {_seconds(loss['s'])} a step, {loss['share']:.1%}")
        lines.append(f"   {loss['remedy']}")
    return "\n".join(lines)


def _timed(part: Mapping[str, float]) -> list[str]:
    return [_seconds(part["s"]), f"{part['share']:.1%}"]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _tflops(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f} TFLOP/s" if value >= 1 else f"{value * 1e3:.1f} GFLOP/s"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
