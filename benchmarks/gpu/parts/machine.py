"""What machine this is; asked in a process of its own."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch


def describe(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Raises RuntimeError where CUDA does not answer."""
    versions = {"torch": torch.__version__, "Python": platform.python_version()}
    for name in ("transformers", "torchao", "triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if spec["device"] == "cpu":
        return [{"device": f"CPU {platform.machine()}", "cores": os.cpu_count(), **versions}]
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} of CUDA {torch.version.cuda} finds no GPU")
    gpu = torch.cuda.get_device_properties(0)
    return [{
        "device": gpu.name, "GiB": round(gpu.total_memory / 2**30), "SMs": gpu.multi_processor_count,
        "compute": f"{gpu.major}.{gpu.minor}", "CUDA": torch.version.cuda, "cores": os.cpu_count(), **versions,
    }]  # fmt: skip
