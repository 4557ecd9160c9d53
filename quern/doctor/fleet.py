"""Judges readings: each machine against the median of its fleet, and facts that are wrong on any machine.

A value is the median of its repeats, so that single bad readings accuse nobody. How far it may lie below the fleet's
median, and who is named for slow links, :mod:`quern.train.processes.links` says; :data:`SPREADS` is what machines in
order have at least.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from quern.doctor.readings import Disk, Finding, Link, Reading
from quern.train.processes.links import FEWEST, LINK_SPREAD, below, medians, nodes_of, slow_links
from quern.words import size

__all__ = ["SPREADS", "WHAT_TO_DO", "judge", "units"]


SPREADS = {"product": 0.02, "copy": 0.02, "transfer": 0.05, "memory": 0.05, "cpu": 0.05, "disk": 0.15,
           "link": LINK_SPREAD}  # fmt: skip
"""Relative standard deviation of machines in order, by the first word of a measurement's name."""

FREE_SHARE, FREE_BYTES, ENOUGH_BYTES = 0.05, 1 << 30, 100 << 30  # a disk is full below these

WHAT_TO_DO = {
    "silent": "look whether the machine answers; start again without it",
    "hung": "look at the step it hung in, at dmesg and at the driver; drain the node",
    "failed": "read the error; quern doctor on that machine alone repeats it",
    "version": "install the same version on every node (one image for all)",
    "slow-device": "look at clocks, power cap and temperature (nvidia-smi -q -d PERFORMANCE); drain the node",
    "slow-node": "look for other processes, power profile and memory errors of the machine; drain it if it stays",
    "slow-links": "look at the node's network adapters, cables and switch port (ibstat, ethtool); drain it if it stays",
    "slow-rank": "look at the adapter nearest to this rank's GPU, its cable and NVLink (nvidia-smi nvlink -s, ibstat)",
    "slow-pair": "look at the path between the two: cables, switch ports, NVLink",
    "broken-link": "look at firewall, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; docs/gpu.md says how to read a hang",
    "ecc": "reset the GPU or restart the machine; exchange the GPU if errors come back",
    "rows": "restart the machine so that rows are remapped; exchange the GPU where remapping has failed",
    "xid": "look the XID up in NVIDIA's list, and dmesg; restart the machine",
    "throttled": "look at cooling, power supply and power cap of the machine",
    "wrong-result": "take the machine out: it computes wrong numbers",
    "full-disk": "make room, or give another folder",
    "disk": "look at the mount and its permissions; give another folder",
    "store": "look at credentials, endpoint and network; docs/object-stores.md",
    "shm": "give the container more (docker --shm-size, an emptyDir of medium Memory)",
    "memlock": "raise it (ulimit -l unlimited, LimitMEMLOCK=infinity of the service)",
    "compiler": "install it (apt install g++; pip install triton), or set compile.enabled=false",
    "kernel": "choose another value of the key, or install what is missing",
    "driver": "install a driver that is as new as torch's CUDA, or a torch for this driver",
}
"""What to do, by a finding's code."""

_Found = tuple[str, Sequence[str], str, str]  # a finding's code, nodes, where and text


def judge(
    readings: Sequence[Reading], links: Iterable[Link] = (), silent: Mapping[int, str] | None = None
) -> list[Finding]:
    """What is wrong in a fleet. ``silent``: ranks that did not answer, with what is known of where they are."""
    found: list[_Found] = [
        ("silent", [where or f"rank {rank}"], f"rank {rank}", "did not answer in time")
        for rank, where in sorted((silent or {}).items())
    ]
    for reading in readings:
        found += _absolute(reading)
    found += _versions(readings)
    found += _slow(readings)
    found += _links(links, {reading.rank: reading.node for reading in readings})
    return [Finding(code, tuple(nodes), where, text, WHAT_TO_DO.get(code, "")) for code, nodes, where, text in found]


def units(readings: Iterable[Reading]) -> Iterator[tuple[str, str, str, str, list[float]]]:
    """Each measurement's node, device (empty: once a node), kind of device or processor, name and repeats."""
    for reading in readings:
        devices = [(device.name, device.kind, device.speeds) for device in reading.devices]
        for where, kind, speeds in (*devices, ("", reading.shown.get("processor", ""), reading.speeds)):
            for name, repeats in speeds.items():
                if repeats:
                    yield reading.node, where, kind, name, repeats


def _absolute(reading: Reading) -> Iterator[_Found]:
    """What is wrong whatever the others say."""
    here = [reading.node]
    for problem in reading.problems:
        yield problem.code, here, "", problem.text
    for disk in reading.disks:
        if _is_full(disk):
            yield "full-disk", here, disk.path, f"{size(disk.free)} free of {size(disk.total)}"
    for device in reading.devices:
        if device.ecc_errors:
            yield "ecc", here, device.name, f"{device.ecc_errors:,} uncorrected memory errors"
        if device.remap_failed or device.remap_pending:
            text = "remapping of memory rows has failed" if device.remap_failed else "memory rows wait to be remapped"
            yield "rows", here, device.name, text
        if device.xids:
            yield "xid", here, device.name, f"XID {', '.join(map(str, device.xids))} under load"
        if device.throttled:
            yield "throttled", here, device.name, f"slowed down by {', '.join(dict.fromkeys(device.throttled))}"


def _is_full(disk: Disk) -> bool:
    return disk.free < min(FREE_BYTES, disk.total / 2) or disk.free < min(FREE_SHARE * disk.total, ENOUGH_BYTES)


def _versions(readings: Sequence[Reading]) -> Iterator[_Found]:
    """Facts in which a node differs from most; where no value has most nodes, all are told."""
    saying = [reading for reading in readings if reading.facts]
    for name in dict.fromkeys(name for reading in saying for name in reading.facts):
        by_value: dict[str, list[str]] = defaultdict(list)
        for reading in saying:
            by_value[reading.facts.get(name, "none")].append(reading.node)
        counts = {value: len(nodes) for value, nodes in by_value.items()}
        for value, nodes in by_value.items():
            if 2 * counts[value] <= len(saying):
                others = ", ".join(f"{other} on {count}" for other, count in counts.items() if other != value)
                yield "version", nodes, name, f"{value}, and {others} of {len(saying)} nodes"


def _slow(readings: Sequence[Reading]) -> Iterator[_Found]:
    """Devices below others of their kind, and nodes below others in what is measured once a node."""
    fleets: dict[tuple[str, str], list[tuple[str, str, list[float]]]] = defaultdict(list)
    for node, where, kind, name, repeats in units(readings):
        fleets[name, kind].append((node, where, repeats))
    slow: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (name, _), fleet in fleets.items():
        values = medians([repeats for *_, repeats in fleet])
        middle, low = below(values, SPREADS.get(name.split()[0], 0.15))  # 0.15: of another version
        for place in np.flatnonzero(low) if len(fleet) >= FEWEST else ():
            slow[fleet[place][:2]].append(f"{name} {values[place] / middle - 1:+.0%}")
    devices = Counter(node for node, where in slow if where)
    for (node, where), texts in slow.items():
        beside = f" (one of {devices[node]} there)" if devices[node] > 1 and where else ""
        code = "slow-device" if where else "slow-node"
        yield code, [node], where, f"{', '.join(texts)} against the median of its fleet{beside}"


def _links(links: Iterable[Link], places: Mapping[int, str]) -> Iterator[_Found]:
    """Who is to blame for slow and broken links. ``places``: the node of each rank. A link that could not be measured
    counts as one without speed."""
    by_kind: dict[str, dict[tuple[int, ...], Link]] = defaultdict(dict)
    for link in links:
        found, ranks = by_kind[link.kind], tuple(link.ranks)
        if places.keys() >= {*ranks} and (ranks not in found or link.problem):  # both ends tell; one may have failed
            found[ranks] = link
    for kind, found in by_kind.items():
        bad = {ranks: link.problem or "no answer" for ranks, link in found.items() if link.problem or not link.speeds}
        middles = medians([[0.0] if ranks in bad else link.speeds for ranks, link in found.items()])
        if len(bad) == len(found) and (len(found) > 1 or kind == "ring"):
            nodes = nodes_of((rank for ranks in found for rank in ranks), places)
            yield "broken-link", nodes, f"all {len(found)} links ({kind})", next(iter(bad.values()))
        elif kind != "ring":
            yield from slow_links(kind, dict(zip(found, middles.tolist(), strict=True)), bad, places)
