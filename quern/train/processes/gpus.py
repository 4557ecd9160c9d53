"""Reads GPUs' clocks and counters of errors through NVML (nvidia-ml-py, the extra ``gpu``). **Unverified on GPU.**

``api`` is the module ``pynvml``, or what stands in for it; what a GPU does not support is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

__all__ = ["MISSING", "open_nvml", "system", "watched"]

MISSING = "nvidia-ml-py is not installed: ECC, remapped rows, XID and throttling are not read"

#: Reasons of ``nvmlClocksEventReasons`` that a machine in order does not have; a power cap is none of them.
_SLOWED = {0x08: "hardware", 0x20: "temperature (driver)", 0x40: "temperature (hardware)", 0x80: "power brake"}
_UNCORRECTED, _SINCE_LOADED, _SM_CLOCK, _XID = 1, 0, 1, 0x8


@contextmanager
def open_nvml() -> Iterator[Any]:
    """The api for the block; None where the package or the driver is missing."""
    try:
        api = import_module("pynvml")
        api.nvmlInit()
    except Exception:  # its error class comes with the package
        yield None
        return
    try:
        yield api
    finally:
        api.nvmlShutdown()


def system(api: Any) -> dict[str, str]:
    """Driver, the CUDA it supports (``12.8``), and how many GPUs of which model."""
    cuda = int(_asked(api, "nvmlSystemGetCudaDriverVersion") or 0)
    handles = [_asked(api, "nvmlDeviceGetHandleByIndex", n) for n in range(_asked(api, "nvmlDeviceGetCount") or 0)]
    names = Counter("lost" if one is None else _asked(api, "nvmlDeviceGetName", one) or "lost" for one in handles)
    return {
        "driver": _asked(api, "nvmlSystemGetDriverVersion") or "unknown",
        "driver's cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "gpus": ", ".join(f"{count} × {name}" for name, count in names.items()) or "none",
    }


@contextmanager
def watched(api: Any, pci: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """The GPU at a PCI address (``0000:1b:00.0``), watched inside the block; yields what reads its state, XIDs since
    the last time included. Read it while the GPU is under load: clocks rest with it."""
    handle = _asked(api, "nvmlDeviceGetHandleByPciBusId", pci)
    if handle is None:  # another name of the device, as in some containers: it is measured all the same
        yield dict
        return
    events = _asked(api, "nvmlEventSetCreate")  # not in every container
    _asked(api, "nvmlDeviceRegisterEvents", handle, _XID, events)
    try:
        yield lambda: _state(api, handle, events)
    finally:
        _asked(api, "nvmlEventSetFree", events)


def _state(api: Any, handle: Any, events: Any) -> dict[str, Any]:
    rows = _asked(api, "nvmlDeviceGetRemappedRows", handle) or (None,) * 4
    newer, older = "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
    reasons = _asked(api, newer if hasattr(api, newer) else older, handle) or 0
    xids: list[int] = []
    while (event := _asked(api, "nvmlEventSetWait_v2", events, 0)) is not None and len(xids) < 16:
        xids.append(int(event.eventData))
    return {
        "ecc_errors": _asked(api, "nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_LOADED),
        "remapped_rows": None if rows[0] is None else rows[0] + rows[1],
        "remap_pending": None if rows[2] is None else bool(rows[2]),
        "remap_failed": None if rows[3] is None else bool(rows[3]),
        "throttled": [name for bit, name in _SLOWED.items() if reasons & bit],
        "sm_clock_mhz": _asked(api, "nvmlDeviceGetClockInfo", handle, _SM_CLOCK),
        "max_sm_clock_mhz": _asked(api, "nvmlDeviceGetMaxClockInfo", handle, _SM_CLOCK),
        "xids": xids,
    }


def _asked(api: Any, function: str, *arguments: Any) -> Any:
    if None not in arguments:
        with suppress(api.NVMLError):
            return getattr(api, function)(*arguments)
    return None
