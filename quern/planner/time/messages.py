"""How long a collective takes, by where its ranks lie. Imports no torch.

Ranks are numbered with the innermost axis of the mesh first: tp, cp, dp_shard, dp_replicate, pp. A group of N ranks
with stride s has g = min(N, node / s) of them on a node, at least one, and lies on n = N / g nodes. A gather or a
scatter of M bytes goes round two rings, over the nodes and in each of them, at the same time:

    max((N - 1)/N · M / B_inside, (n - 1)/n · M/g / B_outside) + (g - 1) · L_inside + (n - 1) · L_outside

for each GPU has its share of the node's network, and brings the 1/g that its peers on other nodes have. With one node
that is the ring's (N - 1)/N · M / B_inside, with one rank a node (N - 1)/N · M / B_outside. An all-reduce is a scatter
and a gather. An all-to-all sends each part straight to where it goes, in one hop. B is a link's bandwidth times the
share of it that collectives reach, L a hop's latency.
"""

from __future__ import annotations

from quern.errors import InputError
from quern.parallel.planning.mesh import MeshPlan
from quern.parallel.planning.step import Step, Transfer
from quern.planner.hardware import Hardware

__all__ = ["OF_WEIGHTS", "collective", "hop", "seconds", "solve", "stride"]

OF_WEIGHTS = ("gather weights", "sum gradients", "scales of weights")
"""What data parallelism sends, of which FSDP2's goes along ``cp`` where that is all it deals weights over."""


def stride(step: Step, row: Transfer) -> int:
    """Between neighbours of the group that a row's ranks form."""
    plan: MeshPlan = step.plan
    if row.axis == "pp":
        return plan.world_size // plan.pp
    if row.axis == "dp_replicate":
        return plan.tp * plan.cp * plan.dp_shard
    if row.axis == "expert_shard":
        return plan.tp * plan.ep
    if row.axis == "ep nodes":
        return plan.tp * (step.layout.ep_node or 1)
    if row.axis == "cp" and row.what not in ("tokens for heads", *OF_WEIGHTS):
        return plan.tp * step.layout.context.heads
    return 1 if row.axis == "tp" else plan.tp


def collective(
    hardware: Hardware, kind: str, size: float, ranks: int, apart: int, calls: int = 1, away: float | None = None
) -> float:
    """Seconds of ``calls`` collectives of ``size`` bytes together, over ranks that are ``apart``; ``away``: of an
    all-to-all, the bytes that go to other ranks, None = of equal parts."""
    near = max(1, min(ranks, hardware.node // apart))
    nodes = -(-ranks // near)
    inside, outside = (link.bytes_per_s * hardware.efficiency.links for link in (hardware.inside, hardware.outside))
    if kind == "send":
        link = hardware.inside if apart < hardware.node else hardware.outside
        return size / (link.bytes_per_s * hardware.efficiency.links) + calls * link.latency_s
    if kind == "all_to_all":
        sent = size * (ranks - 1) / ranks if away is None else away
        far = sent * (ranks - near) / (ranks - 1)
        hops = (near > 1) * hardware.inside.latency_s + (nodes > 1) * hardware.outside.latency_s
        return max((sent - far) / inside, far / outside) + calls * hops
    times = 2 if kind == "all_reduce" else 1
    hops = (near - 1) * hardware.inside.latency_s + (nodes - 1) * hardware.outside.latency_s
    within = (ranks - 1) / ranks * size / inside if near > 1 else 0.0
    return times * (max(within, (nodes - 1) / nodes * size / near / outside) + calls * hops)


def solve(kind: str, ranks: int, small: tuple[float, float], large: tuple[float, float]) -> tuple[float, float]:
    """(bytes a second, seconds of a hop) of the one link between ``ranks`` with which :func:`collective` gives what was
    measured of a small and a large message: (bytes, seconds) of each.

    Raises:
        InputError: the large one took no longer.
    """
    if not large[1] > small[1]:
        raise InputError(
            f"{kind} of {ranks} ranks: {large[0]:,} bytes took no longer than {small[0]:,}; expected a machine on "
            "which nothing else runs"
        )
    hops = (ranks - 1) * (2 if kind == "all_reduce" else 1)
    rate = hops / ranks * (large[0] - small[0]) / (large[1] - small[1])
    return rate, max(0.0, small[1] / hops - small[0] / ranks / rate)


def seconds(step: Step, hardware: Hardware, row: Transfer) -> float:
    """Of all calls of a row, one after the other."""
    return collective(hardware, row.collective, row.payload, row.ranks, stride(step, row), row.calls, row.away)


def hop(step: Step, hardware: Hardware) -> float:
    """Seconds until what a stage gives is at the next."""
    plan = step.plan
    size = step.tokens // plan.tp * step.shape.dim * step.compute_bytes
    return collective(hardware, "send", size, 2, plan.world_size // plan.pp)
