"""Tells what belongs to a whole machine: versions that fit each other, limits, interfaces, disks, a store, memory. What
is written is small, and gone afterwards, also of a process that is killed (but for an object of a store)."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from quern import __version__, storage
from quern.errors import QuernError, one_line
from quern.train.processes.gpus import MISSING, open_nvml, system
from quern.words import shorten, size

__all__ = ["cpu_model", "measure"]

_LEAST_SHM, _WRITE_BYTES, _CHUNK, _STORE_BYTES = 512 << 20, 32 << 20, 4 << 20, 1 << 20


def measure(task: dict[str, Any]) -> Iterator[str | dict[str, Any]]:
    """Everything, as parts of a :class:`~quern.doctor.readings.Reading`."""
    yield "machine"
    yield _machine()
    yield _limits(task["device"] != "cpu")
    yield _interfaces()
    for path in task["disks"]:
        yield f"disk {path}"
        yield _measure_disk(path, task["repeats"])
    if task["store"]:
        yield f"store {task['store']}"
        yield _try_store(task["store"])
    yield "memory"
    yield _host_speeds(task["repeats"])
    if task["device"] != "none":
        yield "versions"
        with open_nvml() as nvml:
            yield _versions(nvml, task["compiler"])


def cpu_model() -> str:
    """As the system names it."""
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _machine() -> dict[str, Any]:
    """``facts``: quern, Python and Ray; ``shown``: the processor, cores that this process may use, memory."""
    facts = {"quern": __version__, "python": platform.python_version(), "ray": "not installed"}
    with suppress(PackageNotFoundError):
        facts["ray"] = version("ray")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    shown = {"processor": cpu_model(), "cores": f"{cores}"}
    with suppress(OSError, ValueError, KeyError), open("/proc/meminfo") as file:
        memory = {line.partition(":")[0]: int(line.split()[1]) << 10 for line in file}
        shown["memory"] = f"{size(memory['MemAvailable'])} of {size(memory['MemTotal'])} available"
    return {"facts": facts, "shown": shown}


def _limits(cuda: bool, root: str = "/") -> dict[str, Any]:
    """``shown`` and ``problems``: shared memory, and memory that may be locked, which InfiniBand needs unlimited."""
    problems, shared = [], Path(root, "dev/shm")
    shm = shutil.disk_usage(shared if shared.is_dir() else root)  # without it, what stands for it is the disk
    if cuda and shm.free < _LEAST_SHM:
        text = f"/dev/shm has {size(shm.free)} free, and NCCL and workers need {size(_LEAST_SHM)} or more"
        problems.append({"code": "shm", "text": text})
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10:,} KiB"
    if cuda and soft != resource.RLIM_INFINITY and any(Path(root).glob("sys/class/infiniband/*")):
        problems.append({"code": "memlock", "text": f"ulimit -l is {locked}, and InfiniBand needs more"})
    shown = {"/dev/shm": f"{size(shm.free)} of {size(shm.total)} free", "locked memory": locked}
    return {"shown": shown, "problems": problems}


def _interfaces(root: str = "/sys") -> dict[str, Any]:
    """``facts``: InfiniBand's ports, as ``8 × 4: ACTIVE 400 Gb/sec (4X NDR)``; ``shown``: interfaces that are up, with
    those that have hardware behind them as ``2 × 100000 Mb/s, MTU 9000``. A machine may have one more for its own
    management."""
    up = [path for path in sorted(Path(root).glob("class/net/*")) if _read(path / "operstate") == "up"]
    found = Counter(
        f"{f'{speed} Mb/s' if speed.isdecimal() else 'speed unknown'}, MTU {_read(path / 'mtu')}"  # of virtual ones -1
        for path, speed in ((path, _read(path / "speed")) for path in up if (path / "device").exists())
    )
    ports = Counter(f"{_read(p / 'state')} {_read(p / 'rate')}" for p in Path(root).glob("class/infiniband/*/ports/*"))
    names = ", ".join(path.name for path in up) or "none up"
    shown = {"interfaces": f"{shorten(names, 1000)} ({_counted(found) or 'none'})"}
    return {"facts": {"infiniband": _counted(ports)} if ports else {}, "shown": shown}


def _read(path: Path) -> str:
    with suppress(OSError, ValueError):
        return path.read_text().strip()
    return ""


def _counted(found: Counter[str]) -> str:
    return "; ".join(f"{count} × {what}" for what, count in sorted(found.items()))


def _versions(nvml: Any, compiler_for: str) -> dict[str, Any]:
    """``facts`` that must be the same on all nodes, ``shown``, and ``problems`` where they do not fit each other.
    ``compiler_for``: what of a config needs a compiler; or empty."""
    import torch

    cuda, built, triton = torch.cuda.is_available(), torch.version.cuda, find_spec("triton") is not None
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), "none")
    facts = {"torch": str(torch.__version__), "compiler": compiler} | ({} if nvml is None else system(nvml))
    if built is not None:
        facts |= {"cuda": built, "triton": "there" if triton else "none"}
    if cuda:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    supported, gpus, problems = facts.pop("driver's cuda", ""), facts.get("gpus", "none"), []
    if supported and built and int(built.partition(".")[0]) > int(supported.partition(".")[0]):
        text = f"the driver {facts['driver']} supports CUDA {supported}, and torch is built for {built}"
        problems.append({"code": "driver", "text": text})
    elif gpus != "none" and not cuda:
        problems.append({"code": "driver", "text": f"the driver shows {gpus}, and torch finds no GPU"})
    for missing, what in ((compiler == "none", "a C++ compiler on PATH"), (cuda and not triton, "triton")):
        if compiler_for and missing:
            problems.append({"code": "compiler", "text": f"{compiler_for} needs {what}, and there is none"})
    return {"facts": facts, "shown": {"nvml": MISSING} if cuda and nvml is None else {}, "problems": problems}


def _measure_disk(path: str, repeats: int) -> dict[str, Any]:
    """``speeds`` (bytes a second of a written and synced file; syncs of 4 KiB a second), ``disks`` (size and free),
    ``problems``. Files have no name, so that none can stay. A folder may not be there yet."""
    folder = next(above for above in (Path(path).absolute() / "_").parents if above.is_dir())
    try:
        usage = shutil.disk_usage(folder)
        disk = {"path": path, "total": usage.total, "free": usage.free}
        if usage.free < 4 * _WRITE_BYTES:
            return {"disks": [disk]}
        chunk, writes = os.urandom(_CHUNK), []  # a file system may compress
        for _ in range(min(3, repeats)):
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                writes.append(_WRITE_BYTES / _seconds(partial(_write, file.fileno(), chunk, _WRITE_BYTES // _CHUNK)))
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            syncs = [1 / _seconds(partial(_write, file.fileno(), chunk[:4096], 1)) for _ in range(repeats)]
    except OSError as error:
        return {"problems": [{"code": "disk", "text": f"{path}: {error.strerror or error}"}]}
    return {"disks": [disk], "speeds": {f"disk write {path}": writes, f"disk sync {path}": syncs}}


def _write(file: int, chunk: bytes, times: int) -> None:
    for _ in range(times):
        os.write(file, chunk)
    os.fsync(file)


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return max(time.perf_counter() - began, 1e-9)


def _try_store(folder: str) -> dict[str, Any]:
    """Write, read and remove one object of 1 MiB below ``folder``, a path or a store's URL: ``shown``, ``problems``."""
    path, data = storage.join(folder, f"quern-doctor-{uuid.uuid4().hex}"), os.urandom(_STORE_BYTES)
    read, took, step = list[bytes](), list[str](), ""
    steps = {"write": lambda: storage.publish_bytes(path, data), "read": lambda: read.append(storage.read_bytes(path)),
             "delete": lambda: storage.remove(path)}  # fmt: skip
    try:
        for step, call in steps.items():
            took.append(f"{step} {_seconds(call) * 1e3:.0f} ms")
        step = "compare"
        if read != [data] or storage.is_file(path):
            raise QuernError("read other bytes than were written" if read != [data] else "there after it was removed")
    except Exception as error:  # of any store's library
        with suppress(Exception):
            storage.remove(path)
        return {"problems": [{"code": "store", "text": f"{folder}: {step}: {one_line(error)}"}]}
    return {"shown": {f"store {folder}": ", ".join(took)}}


def _host_speeds(repeats: int) -> dict[str, Any]:
    """Copies inside the host's memory, bytes a second read and written; SHA-256 by one core, bytes a second."""
    source, text = np.ones(64 << 20, np.uint8), bytes(8 << 20)
    target = source.copy()
    copies = [2 * source.nbytes / _seconds(lambda: np.copyto(target, source)) for _ in range(repeats)]
    hashes = [len(text) / _seconds(lambda: hashlib.sha256(text).digest()) for _ in range(repeats)]
    return {"speeds": {"memory copy": copies, "cpu sha256": hashes}}
