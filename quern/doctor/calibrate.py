"""Measures the figures of a planner's profile (:mod:`quern.planner.hardware`) on all ranks of a launcher at the same
time, as a run has them. **CUDA and NCCL: unverified on GPU.**"""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch.autograd import grad

from quern import storage
from quern.config import validate
from quern.doctor.load import transfer
from quern.doctor.machine import cpu_model
from quern.errors import InputError
from quern.model.attention import Documents, attend, attention_mask
from quern.model.config import ModelShape
from quern.model.float8.recipe import Recipe
from quern.parallel.planning.float8 import local_sizes
from quern.planner.hardware import Hardware, load_hardware, names, profile_of
from quern.planner.time.messages import solve
from quern.train.flash import HALF
from quern.train.processes.agree import Agreement
from quern.train.processes.machine import set_numerics
from quern.train.processes.ranks import Ranks
from quern.train.profiling.ceilings import copy_ceiling, float8_ceiling, gemm_ceiling, median_s

__all__ = ["Reading", "calibrate", "links", "profile"]

#: Shares of ``efficiency`` by the peak that they are of.
_SHARES = {"flops": ("products", "attention"), "float8_flops": ("float8",), "memory_bytes_per_s": ("memory",)}
_COLLECTIVES, _READINGS = ("all_gather", "reduce_scatter", "all_reduce"), 5


class Reading(NamedTuple):
    """A figure, or the speed that a share is of; the shapes and sizes; the highest speed of one of them."""

    value: Any
    what: str
    best: float = 0.0


def calibrate(out: str, like: str | None, shape: ModelShape, tokens: int, dtype: torch.dtype, ranks: Ranks) -> Any:
    """Measure on all ranks, and write the first one's profile to ``out``; returns it. Collective.

    Raises:
        InputError: there is no profile to take from what is not measured, or nodes have unlike numbers of ranks.
    """
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else cpu_model()
    own = profile_of(device)
    base = like or own or ""
    if base not in names() and not base.endswith((".yaml", ".yml")):
        raise InputError(f"--like: expected one of {', '.join(names())}, or a YAML file, for {device}; got {base!r}")
    hardware, known = load_hardware(base), base == own and dtype in HALF
    set_numerics(deterministic=False)
    hosts = Agreement(ranks.rank, ranks.world).gather(socket.gethostname())
    measured = links(ranks.device, hosts, hardware.efficiency.links) if ranks.world > 1 else {}
    measured |= _speeds(ranks.device, dtype, shape, tokens)
    measured |= _device(ranks.device, hosts.count(hosts[ranks.rank]))  # with workspaces and communicators in place
    origin = f"measured by quern plan calibrate on {datetime.now(UTC):%Y-%m-%d}, {device}, torch {torch.__version__}"
    told = {"title": f"{device}, measured", "devices": [device]} | profile(
        hardware, base, measured, origin, known=known
    )
    validate(told, Hardware, out)
    if ranks.first:
        storage.create_bytes(out, yaml.safe_dump(told, sort_keys=False, allow_unicode=True, width=120).encode())
    return told


def profile(base: Hardware, like: str, measured: Mapping[str, Reading], origin: str, *, known: bool) -> dict[str, Any]:
    """The measured figures, and for others those of ``base``, which ``like`` names. ``known``: its peaks are the
    device's; else, and where more was reached, a peak is the highest speed that was measured."""
    told = base.model_dump(mode="json", exclude={"sources", "title", "devices"})
    sources = {field: f"of {like}, not measured ({base.sources.get(field)})" for field in told}
    found, shares = {field: one for field, one in measured.items() if field in told}, told["efficiency"]
    for peak, parts in _SHARES.items():
        speeds = [measured[part] for part in parts if part in measured]
        best = max((one.best for one in speeds), default=None)
        if not known or best is None or best > (told[peak] or 0):
            what = f"the highest speed of {'; '.join(one.what for one in speeds)}" if speeds else "there is no kernel"
            told[peak], found[peak] = best, Reading(best, what)
        shares |= {part: min(1.0, measured[part].value / told[peak]) for part in parts if part in measured}
    texts = [f"{part}: {origin}: {measured[part].what}" for part in shares if part in measured]
    rest = ", ".join(part for part in shares if part not in measured)
    sources["efficiency"] = "; ".join([*texts, f"{rest}: {sources['efficiency']}"])
    sources |= {field: f"{origin}: {one.what}" for field, one in found.items()}
    return told | {field: one.value for field, one in found.items()} | {"sources": sources}


def _speeds(device: torch.device, dtype: torch.dtype, shape: ModelShape, tokens: int) -> dict[str, Reading]:
    """Of the kernels of a block over one document, work over the time of all sizes, one after the other."""
    works = defaultdict[str, dict[str, tuple[float, float]]](dict)
    phases = [{(tokens, n, k), (tokens, k, n), (n, k, tokens)} for n, k in local_sizes(shape, 1).values()]
    for m, n, k in sorted(set().union(*phases)):
        flops = 2 * m * n * k
        works["products"][f"{m}×{n}×{k}"] = flops, flops / gemm_ceiling(m, n, k, dtype, device)
        if (speed := float8_ceiling(m, n, k, Recipe("tensorwise"), device)) is not None:
            works["float8"][f"{m}×{n}×{k}"] = flops, flops / speed
    heads = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads
    qkv = [torch.randn(1, tokens, of, shape.head_dim, dtype=dtype, device=device, requires_grad=True) for of in heads]
    backend = "varlen" if device.type == "cuda" and dtype in HALF else "sdpa"  # as attention: auto takes it
    starts, ids = (torch.tensor(one, dtype=torch.int32, device=device) for one in ([0, tokens], [[0] * tokens]))
    mask = attention_mask(backend, Documents(ids, starts, tokens), device, dtype)
    took = median_s(lambda: grad(attend(qkv[0], qkv[1], qkv[2], mask), qkv, torch.ones_like(qkv[0])), device, 0.2)
    what = f"{backend}, {tokens} tokens, {heads[0]} heads of {shape.head_dim}, {heads[1]} of keys"
    flops = 7 * tokens**2 * heads[0] * shape.head_dim  # two products forward, five backward of what causality leaves
    works["attention"][what] = flops, took
    a, b = (torch.randn(tokens, shape.ffn_dim, dtype=dtype, device=device) for _ in range(2))
    works["memory"] = {
        f"{tokens}×{shape.ffn_dim}: copy": (2 * a.nbytes, 2 * a.nbytes / copy_ceiling(device, size=a.nbytes)),
        "sum": (3 * a.nbytes, median_s(lambda: a + b, device, 0.2)),
        "SwiGLU in two kernels": (5 * a.nbytes, median_s(lambda: F.silu(a) * b, device, 0.2)),
    }
    told = {}
    for name, rows in works.items():
        work, seconds = map(sum, zip(*rows.values(), strict=True))
        best = max(one / took for one, took in rows.values())
        kind = "FP8 tensorwise" if name == "float8" else str(dtype).removeprefix("torch.")
        told[name] = Reading(work / seconds, f"{kind} {', '.join(rows)}", best)
    return told


def _device(device: torch.device, local: int) -> dict[str, Reading]:
    """Memory, kernels and transfers, with ``local`` ranks on the machine."""
    cuda, one = device.type == "cuda", torch.zeros(1, device=device)
    count = max(local, torch.cuda.device_count()) if cuda else local
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30 / count
    told = dict.fromkeys(("memory_gib", "host_gib"), Reading(memory, f"the machine's memory over {count}"))
    told["kernel_s"] = Reading(_seconds(partial(one.add_, 1), device, 1000), "1,000 additions to one element")
    if cuda:
        free, whole = torch.cuda.mem_get_info(device)
        told["memory_gib"] = Reading(whole / 2**30, "what CUDA reports")
        taken = whole - free - torch.cuda.memory_reserved(device)
        told["reserved_gib"] = Reading(taken / 2**30, "what is taken beside the allocator's memory")
        host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(2**28, dtype=torch.uint8, device=device)
        ways = [[transfer(*way) for _ in range(_READINGS)] for way in ((there, host), (host, there))]
        told["host_bytes_per_s"] = Reading(min(map(median, ways)), "256 MiB of pinned memory, the slower way")
    return told


def links(device: torch.device, hosts: Sequence[str], share: float) -> dict[str, Reading]:
    """``inside`` of each machine, and ``outside`` between ranks of the same number on each, all at the same time.
    ``hosts``: by rank; ``share``: of ``bytes_per_s`` that collectives reach. Collective."""
    machines = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
    if len({len(one) for one in machines}) > 1:
        raise InputError(f"expected as many ranks on each machine, got {', '.join(str(len(one)) for one in machines)}")
    told, large = {"node": Reading(len(machines[0]), "ranks of a machine")}, 2**28 if device.type == "cuda" else 2**24
    for name, groups in (("inside", machines), ("outside", [list(one) for one in zip(*machines, strict=True)])):
        if (count := len(groups[0])) > 1:
            group, _ = dist.new_subgroups_by_enumeration(groups)
            timed = partial(_collective, group.group_name, count, device)
            solved = [solve(kind, count, timed(kind, 1024, 20), timed(kind, large, 2)) for kind in _COLLECTIVES]
            rate, hop = map(median, zip(*solved, strict=True))
            what = f"{', '.join(_COLLECTIVES)} of 1 KiB and {large >> 20} MiB over {count} ranks"
            value = {"bytes_per_s": rate / share, "latency_s": hop}
            told[name] = Reading(value, f"{what}: {rate:.4g} B/s, which is bytes_per_s times efficiency.links")
    return told


def _collective(group: str, count: int, device: torch.device, kind: str, size: int, times: int) -> tuple[int, float]:
    """Bytes and seconds of one of so many."""
    part, by = torch.zeros(size // 4 // count, device=device), torch.ops._c10d_functional
    whole = part.repeat(count)
    start: Callable[[], torch.Tensor] = {
        "all_gather": partial(by.all_gather_into_tensor, part, count, group),
        "reduce_scatter": partial(by.reduce_scatter_tensor, whole, "sum", count, group),
        "all_reduce": partial(by.all_reduce_, whole, "sum", group),
    }[kind]
    return whole.nbytes, _seconds(lambda: by.wait_tensor(start()), device, times)


def _seconds(call: Callable[[], object], device: torch.device, times: int) -> float:
    """Of one of so many calls: the median of readings after one that makes connections."""
    wait, found = torch.get_device_module(device).synchronize, list[float]()
    for _ in range(1 + _READINGS):
        wait()
        began = time.perf_counter()
        for _ in range(times):
            call()
        wait()
        found.append((time.perf_counter() - began) / times)
    return median(found[1:])
