"""Tells a machine's versions, compilers, kernels, interfaces and limits, and whether they fit each other and a training
config."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections import Counter
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from quern import __version__
from quern.doctor.gpus import MISSING, Nvml
from quern.errors import InputError
from quern.words import size

__all__ = ["cpu_model", "interfaces", "kernels", "limits", "machine", "versions"]

_LEAST_SHM = 512 << 20


def cpu_model() -> str:
    """As the system names it."""
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def machine() -> dict[str, Any]:
    """``facts``: quern, Python and Ray; ``shown``: the processor, cores that this process may use, memory."""
    memory: dict[str, int] = {}
    with suppress(OSError, ValueError), open("/proc/meminfo") as file:
        memory = {line.partition(":")[0]: int(line.split()[1]) << 10 for line in file}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    facts = {"quern": __version__, "python": platform.python_version(), "ray": "not installed"}
    with suppress(PackageNotFoundError):
        facts["ray"] = version("ray")
    shown = {"processor": cpu_model(), "cores": f"{cores}"}
    if {"MemTotal", "MemAvailable"} <= memory.keys():
        shown["memory"] = f"{size(memory['MemAvailable'])} of {size(memory['MemTotal'])} available"
    return {"facts": facts, "shown": shown}


def limits(cuda: bool, root: str = "/") -> dict[str, Any]:
    """``shown`` and ``problems``: shared memory, and memory that may be locked, which InfiniBand needs unlimited."""
    problems, shown = [], {}
    shm = os.path.join(root, "dev/shm")
    if os.path.isdir(shm):
        usage = shutil.disk_usage(shm)
        shown["/dev/shm"] = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
        if cuda and usage.free < _LEAST_SHM:
            text = f"/dev/shm has {usage.free >> 20} MiB free, and NCCL and workers need {_LEAST_SHM >> 20} or more"
            problems.append({"code": "shm", "text": text})
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown["locked memory"] = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10:,} KiB"
    if cuda and soft != resource.RLIM_INFINITY and _listed(root, "sys/class/infiniband"):
        problems.append({"code": "memlock", "text": f"ulimit -l is {soft >> 10:,} KiB, and InfiniBand needs more"})
    return {"shown": shown, "problems": problems}


def interfaces(root: str = "/sys") -> dict[str, Any]:
    """``facts``: InfiniBand's ports, as ``8 × 4: ACTIVE 400 Gb/sec (4X NDR)``; ``shown``: interfaces that are up, with
    those that have hardware behind them as ``2 × 100000 Mb/s, MTU 9000``. A machine may have one more for its own
    management."""
    net, infiniband = os.path.join(root, "class/net"), os.path.join(root, "class/infiniband")
    up = [name for name in _listed(net) if _read(net, name, "operstate") == "up"]
    found = Counter[str]()
    for name in up:
        if os.path.exists(os.path.join(net, name, "device")):
            speed = _read(net, name, "speed")  # of virtual ones -1
            found[f"{f'{speed} Mb/s' if speed.isdecimal() else 'speed unknown'}, MTU {_read(net, name, 'mtu')}"] += 1
    ports = Counter(
        f"{_read(infiniband, name, 'ports', port, 'state')} {_read(infiniband, name, 'ports', port, 'rate')}"
        for name in _listed(infiniband)
        for port in _listed(infiniband, name, "ports")
    )
    facts = {"infiniband": _counted(ports)} if ports else {}
    return {"facts": facts, "shown": {"interfaces": f"{', '.join(up) or 'none up'} ({_counted(found)})"}}


def _listed(*parts: str) -> list[str]:
    folder = os.path.join(*parts)
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def _read(*parts: str) -> str:
    with suppress(OSError, ValueError), open(os.path.join(*parts)) as file:
        return file.read(200).strip()
    return ""


def _counted(found: Counter[str]) -> str:
    return "; ".join(f"{count} × {what}" for what, count in sorted(found.items())) or "none"


def versions(nvml: Nvml | None, compiler_for: str) -> dict[str, Any]:
    """``facts`` that must be the same on all nodes, ``shown``, and ``problems`` where they do not fit each other.
    ``compiler_for``: what of a config needs a compiler; or empty."""
    import torch

    cuda, triton = torch.cuda.is_available(), find_spec("triton") is not None
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "none")
    facts, problems = {"torch": str(torch.__version__), "compiler": compiler}, []
    if torch.version.cuda is not None:
        facts |= {"cuda": torch.version.cuda, "triton": "there" if triton else "none"}
    if cuda:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    system = {} if nvml is None else nvml.system()
    supported = system.pop("driver's cuda", "")
    facts |= system
    if supported and torch.version.cuda and _major(torch.version.cuda) > _major(supported):
        text = f"the driver {system['driver']} supports CUDA {supported}, and torch is built for {torch.version.cuda}"
        problems.append({"code": "driver", "text": text})
    elif system.get("gpus", "none") != "none" and not cuda:
        problems.append({"code": "driver", "text": f"the driver shows {system['gpus']}, and torch finds no GPU"})
    if compiler_for and compiler == "none":
        problems.append({"code": "compiler", "text": f"no C++ compiler is on PATH, and {compiler_for} needs one"})
    if compiler_for and cuda and not triton:
        problems.append({"code": "compiler", "text": f"triton is not installed, and {compiler_for} needs it"})
    return {"facts": facts, "shown": {"nvml": MISSING} if cuda and nvml is None else {}, "problems": problems}


def _major(text: str) -> int:
    return int(text.partition(".")[0])


def kernels(config: dict[str, Any] | None, device: Any) -> dict[str, Any]:
    """``problems``: what a training config asks for has no kernel on a device; tried as a run tries it."""
    if config is None:
        return {}
    from quern.train.config import TrainConfig
    from quern.train.flash import check_flash, use_flash
    from quern.train.setup import check_float8
    from quern.train.step.precision import precision_of

    asked = TrainConfig.model_validate(config)
    precision, shape = precision_of(asked.precision), asked.model.shape(1000)
    try:
        check_float8(asked, precision, device)
        check_flash(asked, shape, precision, device.type)
        use_flash(asked, shape, precision, "varlen", device)  # of documents; other attention has it checked before
    except InputError as error:
        return {"problems": [{"code": "kernel", "text": str(error)}]}
    return {}
