"""Tells versions, compilers and kernels, and whether they fit each other and a training config."""

from __future__ import annotations

import os
import platform
import shutil
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from quern import __version__
from quern.doctor.alone.gpus import MISSING, Nvml
from quern.words import size

__all__ = ["Needs", "cpu_model", "kernels", "machine", "versions"]

Needs = dict[str, Any]
"""Of a training config: ``compile`` (why a compiler is needed, or empty), ``float8``, ``precision``, ``flash``."""

_FLASH = {"fa3": "flash_attn_interface", "fa4": "flash_attn"}


def cpu_model() -> str:
    """As the system names it."""
    with suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def machine() -> dict[str, Any]:
    """``facts``: quern and Python; ``shown``: the processor, cores that this process may use, memory."""
    memory: dict[str, int] = {}
    with suppress(OSError, ValueError), open("/proc/meminfo") as file:
        memory = {line.partition(":")[0]: int(line.split()[1]) << 10 for line in file}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    shown = {"processor": cpu_model(), "cores": f"{cores}"}
    if {"MemTotal", "MemAvailable"} <= memory.keys():
        shown["memory"] = f"{size(memory['MemAvailable'])} of {size(memory['MemTotal'])} available"
    return {"facts": {"quern": __version__, "python": platform.python_version()}, "shown": shown}


def versions(nvml: Nvml | None, needs: Needs) -> dict[str, Any]:
    """``facts`` that must be the same on all nodes, ``shown``, and ``problems`` where they do not fit each other."""
    import torch

    cuda = torch.cuda.is_available()
    facts: dict[str, str] = {"torch": str(torch.__version__)}
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    facts["compiler"] = compiler or "none"
    triton = find_spec("triton") is not None
    if torch.version.cuda is not None:
        facts |= {"cuda": torch.version.cuda, "triton": "there" if triton else "none"}
    if cuda:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    shown, problems = {}, []
    system = {} if nvml is None else nvml.system()
    facts |= {name: value for name, value in system.items() if name != "driver's cuda"}
    if nvml is None and cuda:
        shown["nvml"] = MISSING
    supported = system.get("driver's cuda")
    if supported and torch.version.cuda and _major(torch.version.cuda) > _major(supported):
        text = f"the driver {system['driver']} supports CUDA {supported}, and torch is built for {torch.version.cuda}"
        problems.append({"code": "driver", "text": text})
    elif system.get("gpus", "none") != "none" and not cuda:
        problems.append({"code": "driver", "text": f"the driver shows {system['gpus']}, and torch finds no GPU"})
    if (why := needs.get("compile")) and compiler is None:
        problems.append({"code": "compiler", "text": f"no C++ compiler is on PATH, and {why} needs one"})
    if why and cuda and not triton:
        problems.append({"code": "compiler", "text": f"triton is not installed, and {why} needs it"})
    return {"facts": facts, "shown": shown, "problems": problems}


def kernels(needs: Needs, device: Any) -> dict[str, Any]:
    """``shown``: FP8 recipes that have a kernel on a device; ``problems``: what the config asks for has none."""
    import torch

    from quern.model.float8.product import available
    from quern.model.float8.recipe import Recipe

    dtype = {"fp32": torch.float32, "fp64": torch.float64, "fp16": torch.float16}.get(
        needs.get("precision", "bf16"), torch.bfloat16
    )
    recipes = [Recipe("tensorwise"), Recipe("rowwise"), Recipe("blockwise")]
    there = [recipe.scaling for recipe in recipes if available(recipe, device, dtype)]
    problems = []
    wanted = needs.get("float8")
    if wanted and device.type == "cuda" and wanted not in there:
        text = f"float8.recipe: {wanted} has no kernel here ({torch.cuda.get_device_name(device)})"
        problems.append({"code": "kernel", "text": f"{text}; there are {', '.join(there) or 'none'}"})
    flash = _FLASH.get(needs.get("flash", "default"))
    if flash is not None and find_spec(flash) is None:
        problems.append(
            {"code": "kernel", "text": f"flash_attention: {needs['flash']} needs {flash}, which is missing"}
        )
    return {"shown": {"fp8 kernels": ", ".join(there) or "none"}, "problems": problems}


def _major(text: str) -> int:
    return int(text.partition(".")[0])
