"""Judges readings: each machine against the median of its fleet, and facts that are wrong on any machine.

A value is the median of its repeats, so that single bad readings accuse nobody. It is named when it lies below the
fleet's median by more than :data:`Z` standard deviations, of which two must agree: that of this fleet, estimated by the
median absolute deviation, and the one that machines in order have at least (:data:`SPREADS`), since the estimate from a
few machines may be far too small. For the normal distribution one value in 17 million lies so low.

Of slow links a node is named where the median of the links of each of its ranks is too low, then a rank of those that
are left, then single pairs between ends that nobody has named: one bad cable accuses one pair, a bad adapter not each
of its partners.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quern.doctor.readings import Disk, Finding, Link, Reading
from quern.words import counted, size

__all__ = ["SPREADS", "WHAT_TO_DO", "judge", "units"]

Z = 5.3  # standard deviations below the median; of the normal distribution 6e-8 lies lower
FEWEST = 4  # below so many values there is no fleet: of two that differ, neither is the slow one

SPREADS = {"product": 0.02, "copy": 0.02, "transfer": 0.05, "memory": 0.05, "cpu": 0.05, "disk": 0.15, "link": 0.05}
"""Relative standard deviation of machines in order, by the first word of a measurement's name."""

FREE_SHARE, FREE_BYTES, ENOUGH_BYTES = 0.05, 1 << 30, 100 << 30  # a disk is full below these
NORMAL = 1.4826  # standard deviation of the normal distribution over its median absolute deviation
_MEDIAN_OF_MANY = 1.2533  # standard deviation of a median over that of a mean
_LEAST = 0.08 / Z  # however many links a node has, one less than 8 % below the others is not named
_FEWEST_LINKS = 3  # with fewer links of an end, an end and a link cannot be told apart

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


def _medians(rows: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Of each row; they may differ in length, and none is empty."""
    return np.array([statistics.median(row) for row in rows])


def _below(values: NDArray[np.float64], spread: float | NDArray[np.float64]) -> tuple[float, NDArray[np.bool_]]:
    """The median of values [N], and which lie too low; ``spread``, of each value or of all, is relative to it."""
    middle = float(np.median(values))
    own = NORMAL * float(np.median(np.abs(values - middle)))
    return middle, values < middle - Z * np.maximum(own, np.asarray(spread) * middle)


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
        values = _medians([repeats for *_, repeats in fleet])
        middle, low = _below(values, SPREADS.get(name.split()[0], 0.15))  # 0.15: of another version
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
        middles = _medians([[0.0] if ranks in bad else link.speeds for ranks, link in found.items()])
        if len(bad) == len(found) and (len(found) > 1 or kind == "ring"):
            nodes = _nodes((rank for ranks in found for rank in ranks), places)
            yield "broken-link", nodes, f"all {len(found)} links ({kind})", next(iter(bad.values()))
        elif kind != "ring":
            yield from _pairs(kind, dict(zip(found, middles.tolist(), strict=True)), bad, places)


def _nodes(ranks: Iterable[int], places: Mapping[int, str]) -> list[str]:
    return list(dict.fromkeys(places[rank] for rank in ranks))


def _pairs(
    kind: str, speeds: dict[tuple[int, ...], float], broken: Mapping[tuple[int, ...], str], places: Mapping[int, str]
) -> Iterator[_Found]:
    """First nodes, then ranks, then pairs, each without the links of those that were named before."""
    of_node: dict[str, list[int]] = defaultdict(list)
    for rank in sorted({rank for ranks in speeds for rank in ranks}):
        of_node[places[rank]].append(rank)
    for code in ("slow-links", "slow-rank", "slow-pair"):
        if code == "slow-rank" and max(map(len, of_node.values())) == 1:  # a node is a rank
            continue
        best = {ranks: (speed, 1) for ranks, speed in speeds.items() if code == "slow-pair"}
        own: dict[int, list[float]] = defaultdict(list)
        for rank, speed in ((rank, speed) for ranks, speed in speeds.items() for rank in ranks if code != "slow-pair"):
            own[rank].append(speed)
        own = {rank: rows for rank, rows in own.items() if len(rows) >= _FEWEST_LINKS}
        for rank, middle in zip(own, _medians([*own.values()]), strict=True):
            end = tuple(of_node[places[rank]]) if code == "slow-links" else (rank,)
            best[end] = max(best.get(end, (0.0, 0)), (middle, len(own[rank])))  # a node is as good as its best rank
        if not best:
            continue
        values, counts = np.array([*best.values()]).T
        spread = SPREADS["link"] * np.where(counts > 1, _MEDIAN_OF_MANY / np.sqrt(counts), 1)
        middle, low = _below(values, np.maximum(spread, _LEAST))
        named: set[int] = set()
        for (end, (speed, count)), is_low in zip(best.items(), low, strict=True):
            where = "" if code == "slow-links" else f"rank{'s' * (len(end) > 1)} {' and '.join(map(str, end))}"
            if code == "slow-pair" and end in broken:
                yield "broken-link", _nodes(end, places), where, broken[end]
            elif is_low and len(best) >= FEWEST:
                named |= set(end)
                text = f"{speed / middle - 1:+.0%} against the fleet's median ({counted(count, kind + ' link')})"
                yield code, _nodes(end, places), where, text
        speeds = {ranks: speed for ranks, speed in speeds.items() if not named & set(ranks)}
