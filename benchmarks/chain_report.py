"""Finished runs of ``benchmarks/chain.py`` as tables: costs, ratios, stages beside the bound, workers, memory."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

__all__ = ["interval", "report"]

Rows = Sequence[dict[str, Any]]
_RESAMPLES = 2000


def interval(rounds: Sequence[Any], figure: Callable[[Sequence[Any]], float]) -> tuple[float, float]:
    """The bootstrap interval (2.5 % to 97.5 %) of a figure of the rounds, drawn whole: their sides stay together."""
    draw = random.Random(0)
    found = sorted(figure(draw.choices(rounds, k=len(rounds))) for _ in range(_RESAMPLES))
    return found[_RESAMPLES // 40], found[-_RESAMPLES // 40 - 1]


class _Costs:
    """Figures of the sides over rounds; a round is (side, copies) → row."""

    def __init__(self, rows: Rows) -> None:
        rounds: dict[int, dict[tuple[str, int], dict[str, Any]]] = {}
        for row in rows:
            if "failed" not in row and row["side"] != "bound":
                rounds.setdefault(row["round"], {})[row["side"], row["copies"]] = row
        self.rounds = list(rounds.values())
        self.sides = sorted({side for found in self.rounds for side, _ in found}, key=_order)
        self.counts = sorted({count for found in self.rounds for _, count in found})
        self.pages = next(row["pages"] / row["copies"] for row in rows if "pages" in row)

    def cost(self, side: str, count: int, field: str = "cpu_s", rounds: Sequence[Any] | None = None) -> float:
        """The median over the rounds that have it; NaN where none has."""
        found = [r[side, count][field] for r in (rounds or self.rounds) if (side, count) in r]
        return median(found) if found else float("nan")

    def cold(self, side: str, field: str = "cpu_s", rounds: Sequence[Any] | None = None) -> float:
        """Milliseconds a page of the least number of copies."""
        count = self.counts[0]
        return 1e3 * self.cost(side, count, field, rounds) / (self.pages * count)

    def marginal(self, side: str, field: str = "cpu_s", rounds: Sequence[Any] | None = None) -> float:
        """Milliseconds a further page; NaN where there is one number of copies only."""
        first, last = self.counts[0], self.counts[-1]
        more = self.cost(side, last, field, rounds) - self.cost(side, first, field, rounds)
        return 1e3 * more / (self.pages * (last - first)) if last > first else float("nan")


def _order(side: str) -> int:
    return ["quern", "quern-no-guess", "quern-1-worker", "stock", "same-trafilatura"].index(side)


def report(rows: Rows) -> None:
    """Print all that the rows allow.

    Raises:
        SystemExit: no run of quern is among them, which counts the pages.
    """
    if not any("pages" in row for row in rows):
        raise SystemExit("no finished run of a quern side: nothing says how many pages there are")
    costs = _Costs(rows)
    print(f"{costs.pages:.0f} page records a copy, copies {costs.counts}, medians of {len(costs.rounds)} rounds")
    print(f"{'':<17}{'cold ms':>9}{'marginal':>10}{'start-up s':>12}{'wall s':>8}{'PSS MiB':>9}{'largest MiB':>13}")
    for side in costs.sides:
        cold, marginal = costs.cold(side), costs.marginal(side)
        start = (cold - marginal) * costs.pages * costs.counts[0] / 1e3
        most = [row for row in rows if row["side"] == side and "failed" not in row]
        pss, largest = (max(row[name] for row in most) for name in ("peak_pss_mib", "largest_rss_mib"))
        wall = costs.cost(side, costs.counts[0], "wall_s")
        print(f"{side:<17}{cold:>9.2f}{marginal:>10.2f}{start:>12.1f}{wall:>8.1f}{pss:>9.0f}{largest:>13.0f}")
    finished = {(row["side"], row["copies"], row["round"]) for row in rows if "failed" not in row}
    for row in rows:
        if "failed" in row and (row["side"], row["copies"], row["round"]) not in finished:
            print(f"failed: {row['side']}, {row['copies']} copies, round {row['round']}: {row['failed']}")
    _ratios(costs)
    _workers(costs)
    _stages(rows, costs)


def _ratios(costs: _Costs) -> None:
    for peer in ("stock", "same-trafilatura"):
        for side in ("quern", "quern-no-guess"):
            if peer not in costs.sides or side not in costs.sides:
                continue
            both = {(name, count) for name in (peer, side) for count in costs.counts}
            rounds = [found for found in costs.rounds if both <= found.keys()]
            parts = []
            for name, figure in (("cold", costs.cold), ("marginal", costs.marginal)) if rounds else ():
                ratio = functools.partial(_ratio, figure, peer, side)
                if name == "marginal" and len(costs.counts) == 1:
                    continue
                spread = " ({:.2f} to {:.2f})".format(*interval(rounds, ratio)) if len(rounds) > 1 else ""
                parts.append(f"{ratio(rounds):.2f} {name}{spread}")
            print(f"{peer} / {side}: {', '.join(parts)}")


def _ratio(figure: Callable[..., float], peer: str, side: str, rounds: Sequence[Any]) -> float:
    return figure(peer, rounds=rounds) / figure(side, rounds=rounds)


def _workers(costs: _Costs) -> None:
    if {"quern", "quern-1-worker"} <= set(costs.sides):
        for name, figure in (("cold", costs.cold), ("marginal", costs.marginal)):
            if name == "cold" or len(costs.counts) > 1:
                ratio = figure("quern-1-worker", "wall_s") / figure("quern", "wall_s")
                print(f"wall time of one worker / of two, {name}: {ratio:.2f}")


def _stages(rows: Rows, costs: _Costs) -> None:
    """Of the first run of quern: CPU of its stages beside the same work with memos warm and nothing around it."""
    bound = next((row["bound"] for row in rows if "bound" in row), {"stages": {}, "references": {}})
    for side in ("quern", "quern-no-guess"):
        row = next((r for r in rows if r["side"] == side and "timing" in r), None)
        if row is None:
            continue
        pages = row["pages"]
        seconds = dict(row["timing"]["stage_seconds"])
        seconds["read, rows, files"] = row["timing"]["cpu_seconds"] - sum(seconds.values())
        floor = dict(bound["stages"]) if side == "quern" else {}
        print(f"{side} by stage, ms of CPU a page record" + (", beside the bound" if floor else ""))
        for name, value in sorted(seconds.items(), key=lambda item: -item[1]):
            ms = 1e3 * value / pages
            least = floor.pop(name, None)
            print(f"  {name:<24}{ms:>8.3f}" + (f"{least:>9.3f}{ms - least:>9.3f}" if least is not None else ""))
        rest = 1e3 * (row["cpu_s"] - row["timing"]["cpu_seconds"]) / pages
        least = floor.pop("tokens", None)
        beside = f"{least:>9.3f}{rest - least:>9.3f}" if least is not None else ""
        print(f"  {'start-up, Ray, duplicates, tokens':<24}{rest:>8.3f}{beside}")
        if side == "quern" and bound["stages"]:
            total = sum(bound["stages"].values())
            more = f", {costs.marginal(side) / total:.2f}x marginal" if len(costs.counts) > 1 else ""
            print(f"  bound {total:.2f} ms a page; quern is at {costs.cold(side) / total:.2f}x of it cold{more}")
    for name, value in bound["references"].items():
        print(f"  for reference, {name}: {value:.2f} ms")
