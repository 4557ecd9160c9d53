"""Loads one device with matrix products and copies, and compares a product with what it must be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch

from quern.doctor.alone.gpus import Nvml
from quern.model.float8.product import available
from quern.model.float8.recipe import Recipe
from quern.train.profiling.ceilings import copy_ceiling, float8_ceiling, gemm_ceiling

__all__ = ["load"]

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_CHECKED = 512
"""Rows and columns of the product whose result is compared; it sums 4,096 terms."""


def load(
    device: torch.device, kind: str, repeats: int, nvml: Nvml | None, doing: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Yields parts of a :class:`~quern.doctor.readings.Device` as they are measured, in FLOP/s and bytes/s, and
    ``problems``."""
    cuda = device.type == "cuda"
    name = f"cuda:{device.index}" if cuda else "cpu"
    yield {"name": name, "kind": kind}
    if cuda:
        torch.cuda.set_device(device)  # events are of the current one
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    with ExitStack() as opened:
        state = None
        if nvml is not None and cuda:
            found: Any = torch.cuda.get_device_properties(device)
            pci = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
            state = opened.enter_context(nvml.watched(pci))
        sizes = {torch.bfloat16: 8192, torch.float16: 8192, torch.float32: 4096} if cuda else {torch.float32: 512}
        wrong = []
        for dtype, size in sizes.items():
            doing(f"product {_NAMES[dtype]} on {name}")
            speeds = [gemm_ceiling(size, size, size, dtype, device, seconds=0.02) for _ in range(repeats)]
            yield {"speeds": {f"product {_NAMES[dtype]}": speeds}}
            if not _is_right(dtype, device):
                wrong.append(_NAMES[dtype])
            if state is not None and size == 8192:
                yield state()  # right after the load
        recipe = Recipe("tensorwise")
        if cuda and available(recipe, device, torch.bfloat16):
            doing(f"product fp8 on {name}")
            found_fp8 = [float8_ceiling(8192, 8192, 8192, recipe, device, seconds=0.02) for _ in range(repeats)]
            yield {"speeds": {"product fp8": [speed for speed in found_fp8 if speed is not None]}}
        doing(f"copy on {name}")
        bytes_ = 2**28 if cuda else 2**24
        yield {"speeds": {"copy device" if cuda else "copy torch": [
            copy_ceiling(device, size=bytes_, seconds=0.02) for _ in range(repeats)]}}  # fmt: skip
        if cuda:
            doing(f"transfer of {name}")
            yield {"speeds": _transfers(device, repeats)}
        if state is not None:
            yield {"xids": state()["xids"]}
        if wrong:
            text = f"{name}: a product of integers in {', '.join(wrong)} differs from float64's"
            yield {"problems": [{"code": "wrong-result", "text": text}]}


def _is_right(dtype: torch.dtype, device: torch.device) -> bool:
    """A product of -1, 0 and 1 is exact in any order of summation, so rounding excuses nothing."""
    draw = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-1, 2, (_CHECKED, 4096), generator=draw).double() for _ in range(2))
    expected = (a @ b.T).to(dtype)
    found = a.to(device, dtype) @ b.to(device, dtype).T
    return torch.equal(found.cpu(), expected)


def _transfers(device: torch.device, repeats: int, size: int = 2**28) -> dict[str, list[float]]:
    """Bytes a second between pinned memory and the device."""
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)

    def timed(target: torch.Tensor, source: torch.Tensor) -> list[float]:
        target.copy_(source)
        found = []
        for _ in range(repeats):
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            found.append(size / (time.perf_counter() - began))
        return found

    return {"transfer to device": timed(there, host), "transfer from device": timed(host, there)}
