"""Results of the suite as Markdown: a table a part, ratios to the peer and to the machine's limits, what failed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["text_of"]

Result = Mapping[str, Any]
BASE, TENSORWISE, PEER = "bf16", "fp8-tensorwise", "transformers"
#: MFU of BF16 with the whole attention matrix, and what tensorwise has to give beside it.
BF16_MFU, BF16_AIM, TENSORWISE_BAR = 50.0, 57.8, 1.2
#: [%] Of the planner's peaks of memory the median distance from those measured; of each, how far it may be below.
MEMORY_MEDIAN, MEMORY_LESS = 5.0, 3.0


def text_of(results: Iterable[Result]) -> str:
    """All results, those of one state of the sources on one machine together."""
    together: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        machine = result["machine"]
        together.setdefault((machine["device"], machine["torch"], result["code"], result["small"]), []).append(result)
    return "\n\n".join(block for same in together.values() for block in _blocks(same)) + "\n"


def _blocks(results: Sequence[Result]) -> list[str]:
    first = results[0]
    said = ", ".join(f"{name} {value}" for name, value in first["machine"].items() if name != "device")
    blocks = [f"## {first['machine']['device']}, {first['code']}", said]
    if first["small"]:
        blocks.append("Small sizes: the road alone, its figures say nothing.")
    parts: dict[str, list[Result]] = {}
    for result in results:
        parts.setdefault(result["part"], []).append(result)
    limits = _limits(parts.get("products", []))
    for part, found in parts.items():
        lines = [{"row": result["row"], **measure} for result in found for measure in result["measures"]]
        if part == "train":
            lines = _beside_peers(lines)
        lines = [_of_limits(line, limits) if part != "products" else line for line in lines]
        if lines:
            blocks += [f"### {part}", _table(lines)]
    blocks += [*_bars(parts.get("train", [])), *_planned(parts.get("memory", []))]
    wrong = [{"part": result["part"], "row": result["row"], "": "failed" if result["error"] else "skipped",
              "reason": result["error"] or result["skipped"]}
             for result in results if result["error"] or result["skipped"]]  # fmt: skip
    if wrong:
        blocks += ["### Failed and skipped", _table(sorted(wrong, key=lambda line: line[""]))]
    return blocks


def _limits(products: Sequence[Result]) -> dict[str, float]:
    """The best BF16 product and the copy, as measured."""
    found: dict[str, float] = {}
    for measure in (measure for result in products for measure in result["measures"]):
        for unit, name in (("TFLOP/s", "BF16 TFLOP/s"), ("GB/s", "GB/s")):
            if measure.get(name):
                found[unit] = max(found.get(unit, 0.0), measure[name])
    return found


def _of_limits(line: Result, limits: Mapping[str, float]) -> Result:
    shares = {
        f"% of {what}": 100 * line[unit] / limits[unit]
        for unit, what in (("TFLOP/s", "the best product"), ("GB/s", "a copy"))
        if line.get(unit) and unit in limits
    }
    return {**line, **shares}


def _beside_peers(lines: Sequence[Result]) -> list[Result]:
    """With ratios: to BF16 of the same model, and to the faster of transformers' rows of it."""
    peers: dict[str, float] = {}
    bases: dict[str, float] = {}
    for line in lines:
        if line["side"] == PEER and line["precision"] == BASE:
            peers[line["model"]] = max(line["tokens/s"], peers.get(line["model"], 0.0))
        if line["side"] != PEER and _plain(line) and line["precision"] == BASE:
            bases[line["model"]] = line["tokens/s"]
    found = []
    for line in lines:
        base, peer = bases.get(line["model"]), peers.get(line["model"])
        own = line["side"] != PEER and not line["documents"]  # masks are less work: no fair ratio
        found.append({
            **line, f"/ {BASE}": line["tokens/s"] / base if base and own else None,
            f"/ {PEER}": line["tokens/s"] / peer if peer and own else None,
        })  # fmt: skip
    return found


def _plain(line: Result) -> bool:
    return line["checkpointing"] == "none" and not line["documents"]


def _bars(train: Sequence[Result]) -> list[str]:
    """What the trainer's speed at 8B's width has to reach on a GPU, as far as there are figures."""
    lines = {
        line["precision"]: line for result in train for line in result["measures"]
        if line["side"] != PEER and line["model"] == "8B-width" and _plain(line)
    }  # fmt: skip
    found = []
    bf16, tensorwise = lines.get(BASE), lines.get(TENSORWISE)
    if bf16 and bf16["MFU %"] is not None:
        verdict = _verdict(bf16["MFU %"] >= BF16_MFU)
        found.append(f"BF16 MFU ≥ {BF16_MFU:g} % (aim {BF16_AIM:g} %): {bf16['MFU %']:.1f} %, {verdict}")
    if bf16 and tensorwise:
        ratio = tensorwise["tokens/s"] / bf16["tokens/s"]
        verdict = _verdict(ratio >= TENSORWISE_BAR)
        found.append(f"tensorwise / BF16 ≥ {TENSORWISE_BAR:g}: {ratio:.2f}, {verdict}")
    return found


def _planned(memory: Sequence[Result]) -> list[str]:
    """How far the planner's peaks of tensors are from those measured, all configs together."""
    ratios = [measure["planned / seen"] for result in memory for measure in result["measures"]]
    if not ratios:
        return []
    median, least = 100 * statistics.median(abs(ratio - 1) for ratio in ratios), 100 * (1 - min(ratios))
    return [
        f"planned memory, median error ≤ {MEMORY_MEDIAN:g} %: {median:.1f} %, {_verdict(median <= MEMORY_MEDIAN)}",
        f"planned memory, most optimistic ≤ {MEMORY_LESS:g} %: {least:.1f} %, {_verdict(least <= MEMORY_LESS)}",
    ]


def _verdict(reached: bool) -> str:
    return "reached" if reached else "MISSED"


def _table(lines: Sequence[Result]) -> str:
    names = list(dict.fromkeys(name for line in lines for name in line))
    numbers = {name for line in lines for name, value in line.items() if isinstance(value, int | float)}
    head = [f"| {' | '.join(names)} |", f"|{'|'.join('---:' if name in numbers else '---' for name in names)}|"]
    return "\n".join([*head, *(f"| {' | '.join(_cell(line.get(name)) for name in names)} |" for line in lines)])


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return digits(value)
    return str(value).replace("|", "\\|").replace("\n", " ")


def digits(value: float) -> str:
    """Three digits, all of them before the point."""
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 99.5 else f"{value:.3g}"
