"""Judges readings: each machine against the median of its fleet, and facts that are wrong on any machine.

A value is the median of its repeats, so that single bad readings accuse nobody. It is named when it lies below the
fleet's median by more than :data:`Z` standard deviations, of which two must agree: that of this fleet, estimated by the
median absolute deviation, and the one that machines in order have at least (:data:`SPREADS`), since the estimate from a
few machines may be far too small. For the normal distribution one value in 17 million lies so low.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from quern.doctor.blame import blame
from quern.doctor.readings import Device, Disk, Finding, Link, Reading
from quern.doctor.robust import FEWEST, below, medians
from quern.words import size

__all__ = ["SPREADS", "WHAT_TO_DO", "judge", "spread_of"]

SPREADS = {"product": 0.02, "copy": 0.02, "transfer": 0.05, "memory": 0.05, "cpu": 0.05, "disk": 0.15}
"""Relative standard deviation of machines in order, by the first word of a measurement's name."""

FREE_SHARE, FREE_BYTES, ENOUGH_BYTES = 0.05, 1 << 30, 100 << 30
"""A disk is full below these."""

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
    "ray": "start Ray of the same version there; look at address and firewall",
}
"""What to do, by a finding's code."""


def judge(
    readings: Sequence[Reading], links: Iterable[Link] = (), silent: Mapping[int, str] | None = None
) -> list[Finding]:
    """What is wrong in a fleet. ``silent``: ranks that did not answer, with what is known of where they are."""
    found = [_finding("silent", [where or f"rank {rank}"], f"rank {rank}", "did not answer in time")
             for rank, where in sorted((silent or {}).items())]  # fmt: skip
    for reading in readings:
        found += _absolute(reading)
    found += _versions(readings)
    found += _slow(readings)
    places = {reading.rank: reading.node for reading in readings}
    found += [_finding(*blamed) for blamed in blame(links, places)]
    return found


def spread_of(name: str) -> float:
    """The least relative standard deviation that a measurement's fleet is taken to have."""
    return SPREADS.get(name.partition(" ")[0], 0.15)  # of another version's measurement little is known


def _finding(code: str, nodes: Sequence[str], where: str, text: str) -> Finding:
    return Finding(code, tuple(nodes), where, text, WHAT_TO_DO.get(code, ""))


def _absolute(reading: Reading) -> Iterator[Finding]:
    """What is wrong whatever the others say."""
    here = [reading.node]
    for problem in reading.problems:
        yield _finding(problem.code, here, "", problem.text)
    for disk in reading.disks:
        if _is_full(disk):
            yield _finding("full-disk", here, disk.path, f"{size(disk.free)} free of {size(disk.total)}")
    for device in reading.devices:
        for code, text in _wrong(device):
            yield _finding(code, here, device.name, text)


def _is_full(disk: Disk) -> bool:
    return disk.free < min(FREE_BYTES, disk.total / 2) or disk.free < min(FREE_SHARE * disk.total, ENOUGH_BYTES)


def _wrong(device: Device) -> Iterator[tuple[str, str]]:
    if device.ecc_errors:
        yield "ecc", f"{device.ecc_errors:,} uncorrected memory errors"
    if device.remap_failed:
        yield "rows", "remapping of memory rows has failed"
    elif device.remap_pending:
        yield "rows", "memory rows wait to be remapped"
    if device.xids:
        yield "xid", f"XID {', '.join(map(str, device.xids))} under load"
    if device.throttled:
        yield "throttled", f"slowed down by {', '.join(dict.fromkeys(device.throttled))}"


def _versions(readings: Sequence[Reading]) -> Iterator[Finding]:
    """Facts in which a node differs from most; where no value has most nodes, all values are told."""
    saying = [reading for reading in readings if reading.facts]
    names = dict.fromkeys(name for reading in saying for name in reading.facts)
    for name in names:
        by_value: dict[str, list[str]] = defaultdict(list)
        for reading in saying:
            by_value[reading.facts.get(name, "none")].append(reading.node)
        if len(by_value) < 2:
            continue
        most, nodes = max(by_value.items(), key=lambda item: len(item[1]))
        if 2 * len(nodes) > len(saying):
            for value, others in by_value.items():
                if value != most:
                    yield _finding("version", others, name, f"{value}, and {most} on {len(nodes)} other nodes")
        else:
            told = "; ".join(f"{value} on {', '.join(nodes[:4])}" + " …" * (len(nodes) > 4)
                             for value, nodes in by_value.items())  # fmt: skip
            yield _finding("version", [reading.node for reading in saying], name, told)


def _slow(readings: Sequence[Reading]) -> Iterator[Finding]:
    """Devices below others of their kind, and nodes below others in what is measured once a node."""
    fleets: dict[tuple[str, str], list[tuple[str, str, list[float]]]] = defaultdict(list)
    for reading in readings:
        for name, repeats in reading.speeds.items():
            if repeats:
                fleets[name, reading.shown.get("processor", "")].append((reading.node, "", repeats))
        for device in reading.devices:
            for name, repeats in device.speeds.items():
                if repeats:
                    fleets[name, device.kind].append((reading.node, device.name, repeats))
    slow: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (name, _), units in fleets.items():
        if len(units) < FEWEST:
            continue
        values = medians([repeats for *_, repeats in units])
        middle, low = below(values, spread_of(name))
        for place in np.flatnonzero(low):
            node, device_name, _ = units[place]
            slow[node, device_name].append(f"{name} {values[place] / middle - 1:+.0%}")
    devices = Counter(node for node, where in slow if where)
    for (node, where), texts in slow.items():
        beside = f" (one of {devices[node]} there)" if devices[node] > 1 and where else ""
        code = "slow-device" if where else "slow-node"
        yield _finding(code, [node], where, f"{', '.join(texts)} against the median of its fleet{beside}")
