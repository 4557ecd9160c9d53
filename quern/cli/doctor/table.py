"""Shows what was read and found, on a screen whatever the number of machines, and as plain data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quern.cli.output import columns, plain_line
from quern.doctor.fleet import units
from quern.doctor.readings import Reading
from quern.doctor.run import Result
from quern.train.processes.links import NORMAL
from quern.words import counted, shorten, size

__all__ = ["as_data", "show"]

_MOST = 20  # findings that are shown; --json has all


def as_data(result: Result) -> dict[str, Any]:
    """Everything, for ``--json``."""
    told = {name: [one.model_dump() for one in getattr(result, name)] for name in ("readings", "links")}
    return {"findings": [one._asdict() for one in result.findings], **told}


def show(result: Result, console: Console) -> None:
    """Measurements over the fleet, facts, findings."""

    def line(text: str, style: str = "") -> None:
        console.print(Text(plain_line(text), style), soft_wrap=True)

    console.print(_speeds(result))
    line("")
    for name, value in _facts(result.readings):
        line(f"{name:<16} {shorten(value, 200)}")
    line("")
    found, nodes = result.findings, len({reading.node for reading in result.readings})
    of = f"{counted(nodes, 'node')}, {counted(result.world, 'rank')}"
    line(f"{counted(len(found), 'finding') if found else 'no findings'}: {of}", "bold red" if found else "green")
    for code, todo in dict.fromkeys((one.code, one.todo) for one in found[:_MOST]):  # what to do is said once
        for one in (one for one in found[:_MOST] if one.code == code):
            where = f", {one.where}" if one.where else ""
            places = ", ".join(one.nodes[:4]) + (f" and {len(one.nodes) - 4} more" if len(one.nodes) > 4 else "")
            line(shorten(f"{places}{where}: {one.text}", 400), "red")
        line(f"  → {todo}  [{code}]")
    if len(found) > _MOST:
        line(f"… and {len(found) - _MOST} more (--json)")


def _speeds(result: Result) -> Table:
    figures = ">of", ">median", ">spread", ">lowest"
    table = columns("measurement", *figures, "where", unbroken=figures)
    fleets: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for node, where, _, name, repeats in units(result.readings):
        fleets[name][f"{node} {where}".rstrip()] = repeats
    for link in result.links:  # both ends tell
        if link.speeds and not link.problem:
            ends = " and ".join(map(str, link.ranks)) if len(link.ranks) == 2 else f"{link.ranks[0]} … {link.ranks[-1]}"
            fleets[f"link {link.kind}"][f"ranks {ends}"] = link.speeds
    for name, fleet in fleets.items():
        values = np.array([np.median(repeats) for repeats in fleet.values()])
        middle, low = float(np.median(values)), int(np.argmin(values))
        spread = f"{NORMAL * np.median(np.abs(values - middle)) / middle:.1%}" if len(fleet) > 2 and middle else "–"
        lowest = _amount(name, values[low]) if len(fleet) > 1 else ""
        row = [name, str(len(fleet)), _amount(name, middle), spread, lowest, [*fleet][low]]
        table.add_row(*map(Text, map(plain_line, row)))
    return table


def _amount(name: str, value: float) -> str:
    if name.startswith("product"):
        return f"{value / 1e12:.4g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP/s"
    if name.startswith("disk sync"):
        return f"{1e3 / value:.3g} ms" if value else "–"
    return f"{value / 1e9:.3g} GB/s"


def _facts(readings: Sequence[Reading]) -> Iterator[tuple[str, str]]:
    """Each fact once, with how many nodes say it where they differ; what need not be equal, of one node alone."""
    told = [reading for reading in readings if reading.facts]
    values = {
        name: Counter(reading.facts.get(name, "none") for reading in told)
        for name in dict.fromkeys(name for reading in told for name in reading.facts)
    }
    same = ", ".join(f"{name} {next(iter(counts))}" for name, counts in values.items() if len(counts) == 1)
    yield "the same" if len(told) > 1 else "versions", same
    for name, counts in values.items():
        if len(counts) > 1:
            yield f"differs: {name}", "; ".join(f"{value} on {count}" for value, count in counts.most_common())
    if len(told) == 1:
        for device in (device for reading in readings for device in reading.devices if device.name != "cpu"):
            clock = f", {device.sm_clock_mhz} of {device.max_sm_clock_mhz} MHz" if device.sm_clock_mhz else ""
            yield device.name, device.kind + clock
        yield from told[0].shown.items()
        yield from ((disk.path, f"{size(disk.free)} of {size(disk.total)} free") for disk in told[0].disks)
    elif not any(reading.devices for reading in readings):  # of data runs
        for reading in told[:_MOST]:
            disks = [f"{disk.path} {size(disk.free)} of {size(disk.total)} free" for disk in reading.disks]
            shown = [f"{reading.shown.get('cores', '?')} cores", reading.shown.get("memory", "memory unknown")]
            yield reading.node, ", ".join([*shown, *disks])
