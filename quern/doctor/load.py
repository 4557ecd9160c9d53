"""Loads one device with matrix products and copies, and compares a product with what it must be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from quern.doctor.gpus import Nvml
from quern.doctor.machine import cpu_model
from quern.model.float8.product import available
from quern.model.float8.recipe import Recipe
from quern.train.profiling.ceilings import copy_ceiling, float8_ceiling, gemm_ceiling

__all__ = ["load"]

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_CHECKED = 512
"""Rows and columns of the product whose result is compared; it sums 4,096 terms."""


def load(device: torch.device, name: str, repeats: int, nvml: Nvml | None) -> Iterator[str | dict[str, Any]]:
    """Yields what is done next, and as they are measured parts of the :class:`~quern.doctor.readings.Device`, by its
    ``name`` in ``devices``, in FLOP/s and bytes/s, and ``problems``."""
    cuda = device.type == "cuda"
    kind = torch.cuda.get_device_name(device) if cuda else cpu_model()
    yield {"devices": {name: {"kind": kind}}}

    def timed(what: str, measure: Callable[[], float | None]) -> Iterator[str | dict[str, Any]]:
        yield f"{what} on {name}"
        yield {"devices": {name: {"speeds": {what: [measure() for _ in range(repeats)]}}}}

    watch: Any = nullcontext(dict)
    if cuda:
        torch.cuda.set_device(device)  # events are of the current one
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        found: Any = torch.cuda.get_device_properties(device)
        if nvml is not None:
            watch = nvml.watched(f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")
    sizes = {torch.bfloat16: 8192, torch.float16: 8192, torch.float32: 4096} if cuda else {torch.float32: 512}
    with watch as state:
        for dtype, size in sizes.items():
            measure = partial(gemm_ceiling, size, size, size, dtype, device, seconds=0.02)
            yield from timed(f"product {_NAMES[dtype]}", measure)
            yield {"devices": {name: state()}}  # right after the load
            if not _is_right(dtype, device):
                text = f"{name}: a product of integers in {_NAMES[dtype]} differs from float64's"
                yield {"problems": [{"code": "wrong-result", "text": text}]}
        recipe = Recipe("tensorwise")
        if cuda and available(recipe, device, torch.bfloat16):
            yield from timed("product fp8", partial(float8_ceiling, 8192, 8192, 8192, recipe, device, seconds=0.02))
        copy = partial(copy_ceiling, device, size=2**28 if cuda else 2**24, seconds=0.02)
        yield from timed("copy device" if cuda else "copy torch", copy)
        if cuda:
            host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
            there = torch.empty(2**28, dtype=torch.uint8, device=device)
            yield from timed("transfer to device", partial(_transfer, there, host))
            yield from timed("transfer from device", partial(_transfer, host, there))
        yield {"devices": {name: {"xids": state().get("xids", [])}}}


def _is_right(dtype: torch.dtype, device: torch.device) -> bool:
    """A product of -1, 0 and 1 is exact in any order of summation, so rounding excuses nothing."""
    draw = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-1, 2, (_CHECKED, 4096), generator=draw).double() for _ in range(2))
    expected = (a @ b.T).to(dtype)
    found = a.to(device, dtype) @ b.to(device, dtype).T
    return torch.equal(found.cpu(), expected)


def _transfer(target: torch.Tensor, source: torch.Tensor) -> float:
    """Bytes a second between pinned memory and the device."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return source.numel() / (time.perf_counter() - began)
