"""Shows what was read and found, on a screen whatever the number of machines, and as plain data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quern.doctor.readings import Finding, Reading, dumped
from quern.doctor.robust import medians
from quern.doctor.run import Result
from quern.words import counted, shorten, size

__all__ = ["as_data", "show"]

_MOST = 20
"""Findings that are shown; ``--json`` has all."""

Plain = Callable[[str], str]


def as_data(result: Result) -> dict[str, Any]:
    """Everything, for ``--json``."""
    return {
        "findings": [asdict(one) for one in result.findings],
        "readings": [dumped(one) for one in result.readings],
        "links": [dumped(one) for one in result.links],
        "waits": result.waits,
    }


def show(result: Result, console: Console, plain: Plain) -> None:
    """Measurements over the fleet, facts, findings. ``plain`` makes a text of outside safe for a terminal."""
    console.print(_speeds(result, plain))
    console.print()
    if (machines := _machines(result, plain)) is not None:
        console.print(machines)
        console.print()
    for name, value in _facts(result.readings):
        console.print(Text(f"{plain(name):<16} {plain(shorten(value, 200))}"), soft_wrap=True)
    console.print()
    nodes = len({reading.node for reading in result.readings})
    of = f"{counted(nodes, 'node')}, {counted(result.world, 'rank')}"
    if not result.findings:
        console.print(Text(f"no findings: {of}", "green"))
        return
    console.print(Text(f"{counted(len(result.findings), 'finding')}: {of}", "bold red"))
    for code, found in _grouped(result.findings[:_MOST]).items():
        for one in found:
            where = f", {one.where}" if one.where else ""
            places = ", ".join(one.nodes[:4]) + (f" and {len(one.nodes) - 4} more" if len(one.nodes) > 4 else "")
            console.print(Text(plain(shorten(f"{places}{where}: {one.text}", 400)), "red"), soft_wrap=True)
        if found[0].todo:
            console.print(Text(f"  → {found[0].todo}  [{code}]"), soft_wrap=True)
    if len(result.findings) > _MOST:
        console.print(f"… and {len(result.findings) - _MOST} more (--json)")


def _grouped(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    """By code: what to do is said once."""
    groups: dict[str, list[Finding]] = defaultdict(list)
    for one in findings:
        groups[one.code].append(one)
    return groups


def _speeds(result: Result, plain: Plain) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("measurement", overflow="fold")
    for name in ("of", "median", "spread", "lowest"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("where", overflow="fold")
    fleets: dict[str, list[tuple[str, list[float]]]] = defaultdict(list)
    for reading in result.readings:
        for device in reading.devices:
            for name, repeats in device.speeds.items():
                fleets[name].append((f"{reading.node} {device.name}", repeats))
        for name, repeats in reading.speeds.items():
            fleets[name].append((reading.node, repeats))
    for (kind, ranks), speeds in {(link.kind, tuple(link.ranks)): link.speeds for link in result.links}.items():
        where = " and ".join(map(str, ranks)) if len(ranks) == 2 else f"{ranks[0]} … {ranks[-1]}"
        fleets[f"link {kind}"].append((f"ranks {where}", speeds))
    for name, units in fleets.items():
        units = [unit for unit in units if unit[1]]
        if not units:
            continue
        values = medians([repeats for _, repeats in units])
        middle, low = float(np.median(values)), int(np.argmin(values))
        spread = f"{1.4826 * np.median(np.abs(values - middle)) / middle:.1%}" if len(units) > 2 and middle else "–"
        lowest = [_amount(name, values[low]), plain(units[low][0])] if len(units) > 1 else ["", plain(units[low][0])]
        table.add_row(*map(Text, [plain(name), str(len(units)), _amount(name, middle), spread, *lowest]))
    return table


def _amount(name: str, value: float) -> str:
    if name.startswith("product"):
        return f"{value / 1e12:.4g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP/s"
    if name.startswith("disk sync"):
        return f"{1e3 / value:.3g} ms" if value else "–"
    return f"{value / 1e9:.3g} GB/s"


def _machines(result: Result, plain: Plain) -> Table | None:
    """Machines of a data run, node by node."""
    if len(result.readings) < 2 or any(reading.devices for reading in result.readings):
        return None
    table = Table("node", "cores", "memory", "disks", box=None, pad_edge=False, header_style="bold")
    for reading in result.readings[:_MOST]:
        disks = ", ".join(f"{disk.path} {size(disk.free)} of {size(disk.total)} free" for disk in reading.disks)
        row = [reading.node, reading.shown.get("cores", "–"), reading.shown.get("memory", "–"), disks]
        table.add_row(*map(Text, map(plain, row)))
    return table


def _facts(readings: Sequence[Reading]) -> list[tuple[str, str]]:
    """Each fact once, with how many nodes say it where they differ; what need not be equal, of one node alone."""
    told = [reading for reading in readings if reading.facts]
    rows = []
    versions = {
        name: Counter(reading.facts.get(name, "none") for reading in told)
        for reading in told[:1]
        for name in reading.facts
    }
    same = [f"{name} {next(iter(values))}" for name, values in versions.items() if len(values) == 1]
    rows.append(("the same" if len(told) > 1 else "versions", ", ".join(same)))
    rows += [
        (f"differs: {name}", "; ".join(f"{value} on {count}" for value, count in values.most_common()))
        for name, values in versions.items()
        if len(values) > 1
    ]
    if len(told) == 1:
        for device in (device for reading in readings for device in reading.devices if device.name != "cpu"):
            clock = f", {device.sm_clock_mhz} of {device.max_sm_clock_mhz} MHz" if device.sm_clock_mhz else ""
            rows.append((device.name, device.kind + clock))
        rows += told[0].shown.items()
        rows += [(disk.path, f"{size(disk.free)} free of {size(disk.total)}") for disk in told[0].disks]
    return rows
