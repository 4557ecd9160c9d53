"""Describes the machine that was measured: devices, software, place."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import quern
from quern.train.processes.agree import Agreement
from quern.train.processes.ranks import Ranks

__all__ = ["describe_machine", "software"]


def describe_machine(ranks: Ranks) -> dict[str, Any]:
    """Describe hosts, devices and their drivers, for all ranks. Collective."""
    device = ranks.device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    cpu, host = _cpu(), socket.gethostname()
    seen = Agreement(ranks.rank, ranks.world).gather((host, gpu, cpu, os.cpu_count()))
    cuda = device.type == "cuda"
    return {
        "world": ranks.world,
        "device": device.type,
        "hosts": sorted({host for host, *_ in seen}),
        "gpus": dict(Counter(gpu for _, gpu, *_ in seen if gpu is not None)),
        "gpu_memory_gib": torch.cuda.get_device_properties(device).total_memory / 2**30 if cuda else None,
        "driver": _said(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) if cuda else None,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "cpus": dict(Counter(f"{cpu}, {cores} cores" for _, cpu, cores in {(h, c, n) for h, _, c, n in seen})),
        "threads": torch.get_num_threads(),
    }


def software() -> dict[str, Any]:
    """Versions, and the commit this package stands at when it is in a git checkout."""
    return {
        "quern": quern.__version__,
        **_commit(Path(quern.__file__).parent),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "os": platform.platform(),
    }


def _commit(package: Path) -> dict[str, Any]:
    """``modified``: whether files that git knows differ from the commit."""
    git = ["git", "-C", str(package)]
    tracked = _said([*git, "ls-files", "--error-unmatch", "__init__.py"])
    if tracked is None:  # a site-packages folder may be in another project's checkout
        return {"commit": None, "modified": None}
    changes = _said([*git, "status", "--porcelain", "--untracked-files=no", "."])
    return {"commit": _said([*git, "rev-parse", "HEAD"]), "modified": bool(changes)}


def _said(command: Sequence[str]) -> str | None:
    """The first line of a command's output, or None where it fails or is not there."""
    try:
        done = subprocess.run([*command], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), "").strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
