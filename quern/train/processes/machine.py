"""What a rank asks of its process before it trains: CUDA's allocator, the cores near its GPU, how products are summed,
and when Python collects garbage. Allocator and cores are unverified on GPU."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import PurePath
from typing import Any

import torch

__all__ = ["available_memory", "bind_cores", "collecting", "pci_address", "set_allocator", "set_numerics"]

log = logging.getLogger(__name__)

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch's names of the setting; it complains of the second."""


def set_allocator(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let segments of the GPU's memory grow, so that tensors of changing sizes leave no holes in it; before CUDA's
    first use, and unless the user has given settings."""
    if not any(name in environment for name in _ALLOCATOR):
        environment[_ALLOCATOR[0]] = "expandable_segments:True"


def available_memory(root: str = "/") -> int | None:
    """Bytes that can be had without swapping, of the machine and within the limits of this process's control groups,
    which a container's or a job's limit is; None where the system does not say (Linux's proc says)."""
    try:
        with open(os.path.join(root, "proc/meminfo"), encoding="ascii") as lines:
            free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return max(0, min([free, *_left_in_groups(root)]))


def _left_in_groups(root: str) -> Iterator[int]:
    """Of each group of this process that has a limit: what is not used, and files in memory, which can be dropped."""
    names = {
        "": ("sys/fs/cgroup", "memory.max", "memory.current", ""),
        "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    }
    with suppress(OSError, ValueError):
        for line in _read(root, "proc/self/cgroup").splitlines():
            _, kinds, path = line.split(":", 2)
            for kind in names.keys() & kinds.split(","):
                base, *files = names[kind]
                yield from _left_around(os.path.join(root, base), path.strip("/"), *files)


def _left_around(base: str, path: str, most: str, used: str, prefix: str) -> Iterator[int]:
    """Of the group ``path`` below ``base`` and those that it is in. A container sees its own group as ``base``."""
    for group in (path, *map(str, PurePath(path).parents)):
        with suppress(OSError, ValueError):  # no such file; "max", which is no limit
            stat = dict(line.split() for line in _read(base, group, "memory.stat").splitlines())
            cache = int(stat.get(f"{prefix}inactive_file", 0)) + int(stat.get(f"{prefix}active_file", 0))
            yield int(_read(base, group, most)) - int(_read(base, group, used)) + cache


def pci_address(device: torch.device) -> str:
    """Of a CUDA device, as ``0000:1b:00.0``."""
    found: Any = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def bind_cores(device: torch.device, root: str = "/sys") -> set[int] | None:
    """Let this thread, and those it starts, run on the cores of the GPU's NUMA node alone. Returns these; None where
    nothing is changed: not on CUDA, on a system that does not say, or where the process is restricted already."""
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return None
    allowed = os.sched_getaffinity(0)
    if len(allowed) < (os.cpu_count() or 1):
        return None
    with suppress(OSError, ValueError, AttributeError):
        node = int(_read(root, "bus/pci/devices", pci_address(device), "numa_node"))
        if node < 0:  # a machine of one node
            return None
        cores = _cores(_read(root, "devices/system/node", f"node{node}", "cpulist")) & allowed
        if cores and cores != allowed:
            os.sched_setaffinity(0, cores)
            log.info("on the %d cores of NUMA node %d", len(cores), node)
            return cores
    return None


@contextmanager
def collecting(interval: int) -> Iterator[Callable[[int], None]]:
    """Yield what is called after each step, with its number: it collects garbage after the first that is taken and
    every ``interval`` steps, and nothing else does in the block. 0 = Python does when it likes.

    Ranks wait for each other in each step: if each collected in another one, all would wait for all of them.
    """
    if not interval:
        yield lambda step: None
        return

    first = True

    def collect(step: int) -> None:
        nonlocal first
        if first or (step + 1) % interval == 0:
            gc.collect()
        if first:  # what compiling has made stays to the end, and need not be looked at again
            gc.freeze()
        first = False

    automatic = gc.isenabled()
    gc.disable()
    try:
        yield collect
    finally:
        gc.unfreeze()
        if automatic:
            gc.enable()


def _read(*parts: str) -> str:
    with open(os.path.join(*parts), encoding="utf-8", errors="surrogateescape") as file:
        return file.read().strip()


def _cores(text: str) -> set[int]:
    """Of ``0-3,8,10-11``."""
    cores: set[int] = set()
    for part in text.split(","):
        low, _, high = part.partition("-")
        cores |= set(range(int(low), int(high or low) + 1))
    return cores


def set_numerics(deterministic: bool) -> None:
    """Set what torch decides for the whole process. Parts of a BF16 product are summed in FP32 and not in BF16: sums
    over the tokens of a step are long."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if deterministic:  # without a workspace of its own cuBLAS is not deterministic, and torch refuses every product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    # else every ``empty`` is filled, of which nothing is read before it is written
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
