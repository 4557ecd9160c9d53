"""Formats the document of results as text."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from quern.words import aligned, counted

__all__ = ["table"]

COLUMNS = (
    "model", "layout", "precision", "recompute", "micro", "tokens/s", "a device", "TFLOP/s", "MFU", "causal", "step",
    "95 %", "memory", "data",
)  # fmt: skip
_LEFT = 4
"""Columns of names."""


def table(document: Mapping[str, Any]) -> str:
    """The table of rows, with machine, explanation of columns, and the command to repeat it."""
    rows = document["rows"]
    cells = [COLUMNS, *(_cells(row, document["world"]) for row in rows if row["ok"])]
    lines = [_machine(document), _what(document), ""]
    if len(cells) > 1:
        lines += aligned(cells, _LEFT)
    for row in rows:
        if not row["ok"]:
            lines.append(f"failed: {_name(row)}: {row['error']}")
    lines += ["", *_legend(rows), f"repeat: {shlex.join(document['command'])}"]
    return "\n".join(lines)


def _cells(row: Mapping[str, Any], world: int) -> tuple[str, ...]:
    return (
        _name(row, "model", "variant"), row["layout_text"], row["precision"], row["checkpointing"],
        f"{row['micro_batch']}×{row['accumulate']}", f"{row['tokens_per_s']:,.0f}",
        f"{row['tokens_per_s_per_device']:,.0f}", _digits(row["tflops_full"]), _percent(row["mfu_full"]),
        _percent(row["mfu_causal"]), _seconds(row["step_time_s"]),
        f"{_seconds(row['step_time_low_s'])}–{_seconds(row['step_time_high_s'])}", f"{row['memory_gib']:.1f}",
        _percent(row["data_wait_share"]),
    )  # fmt: skip


def _name(row: Mapping[str, Any], *keys: str) -> str:
    keys = keys or ("model", "layout_asked", "precision", "checkpointing", "variant")
    return " ".join(str(row[key]) for key in keys if row[key])


def _machine(document: Mapping[str, Any]) -> str:
    software, machine = document["software"], document["machine"]
    commit = f" ({software['commit'][:9]}{', modified' if software['modified'] else ''})" if software["commit"] else ""
    versions = f"quern {software['quern']}{commit}, torch {software['torch']}"
    if machine is None:
        return f"{document['date']}; {versions}"
    devices = machine["gpus"] if machine["device"] == "cuda" else machine["cpus"]
    named = ", ".join(f"{count} × {name}" for name, count in devices.items())
    if machine["device"] == "cuda":
        versions += f", CUDA {machine['cuda']}, driver {machine['driver']}"
    hosts = "" if len(machine["hosts"]) == 1 else f" on {len(machine['hosts'])} hosts"
    return f"{document['date']}; {named}{hosts}; {versions}"


def _what(document: Mapping[str, Any]) -> str:
    return (
        f"{counted(document['world'], 'rank')}; median of {document['steps']} steps after {document['warm_up']}; "
        f"random tokens in documents of {document['mean_document']:g} in the mean"
    )


def _legend(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not any(row["ok"] for row in rows):
        return []
    legend = [
        "micro: sequences of a micro-batch × micro-batches a step and rank; TFLOP/s of a device and MFU: 6 N + "
        "12·layers·heads·head_dim·seq_len FLOPs a token, causal: half of the second term",
        "step: seconds, with the interval of its median by bootstrap; memory: the largest peak of a rank, GiB; data: "
        "the longest wait for data of a rank, of a step",
    ]
    if any(row["ok"] and row["peak_tflops"] is None for row in rows):
        legend.append("MFU –: the peak of this device is not known; --peak-tflops gives it")
    elif any(str(row["precision"]).startswith("fp8") for row in rows):
        legend.append("MFU of FP8 is of the peak in BF16 too: it may be above 100 %, and compares with the BF16 rows")
    if flash := [row for row in rows if row["ok"] and row["flash_attention"] != "default"]:
        legend.append("; ".join(f"{_name(row)}: flash_attention {row['flash_attention']}" for row in flash))
    if any(row["ok"] and row["not_finite"] for row in rows):
        names = "; ".join(_name(row) for row in rows if row["ok"] and row["not_finite"])
        legend.append(f"steps that were not finite: {names}")
    return legend


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}"


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
