"""Reads GPUs' clocks and counters of errors through NVML (nvidia-ml-py, the extra ``gpu``). **Unverified on GPU.**"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

__all__ = ["MISSING", "Nvml", "open_nvml"]

MISSING = "nvidia-ml-py is not installed: ECC, remapped rows, XID and throttling are not read"

#: Reasons of ``nvmlClocksEventReasons`` that a machine in order does not have; a power cap is none of them.
_SLOWED = {
    0x08: "hardware", 0x20: "temperature (driver)", 0x40: "temperature (hardware)", 0x80: "power brake",
}  # fmt: skip
_UNCORRECTED, _SINCE_LOADED, _SM_CLOCK, _XID = 1, 0, 1, 0x8


class Nvml:
    """NVML's functions over ``api``, the module ``pynvml`` or what stands in for it; what a GPU does not support is
    None."""

    def __init__(self, api: Any) -> None:
        self._api = api

    def system(self) -> dict[str, str]:
        """Driver, the CUDA it supports (``12.8``), and how many GPUs of which model."""
        api = self._api
        cuda = int(self._asked(api.nvmlSystemGetCudaDriverVersion) or 0)
        handles = [
            self._asked(api.nvmlDeviceGetHandleByIndex, n) for n in range(self._asked(api.nvmlDeviceGetCount) or 0)
        ]
        names = ["lost" if one is None else _text(self._asked(api.nvmlDeviceGetName, one) or "lost") for one in handles]
        counts = {name: names.count(name) for name in dict.fromkeys(names)}
        return {
            "driver": _text(self._asked(api.nvmlSystemGetDriverVersion) or "unknown"),
            "driver's cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
            "gpus": ", ".join(f"{count} × {name}" for name, count in counts.items()) or "none",
        }

    @contextmanager
    def watched(self, pci: str) -> Iterator[Callable[[], dict[str, Any]]]:
        """The GPU at a PCI address (``0000:1b:00.0``), watched inside the block; yields what reads its state, XIDs
        since the beginning included. Read it while the GPU is under load: clocks rest with it."""
        api = self._api
        handle = self._asked(api.nvmlDeviceGetHandleByPciBusId, pci.encode())
        if handle is None:  # another name of the device, as in some containers: it is measured all the same
            yield lambda: {}
            return
        events = None
        with suppress(api.NVMLError):  # not in every container
            events = api.nvmlEventSetCreate()
            api.nvmlDeviceRegisterEvents(handle, _XID, events)
        try:
            yield lambda: self._state(handle, events)
        finally:
            if events is not None:
                with suppress(api.NVMLError):
                    api.nvmlEventSetFree(events)

    def _state(self, handle: Any, events: Any) -> dict[str, Any]:
        api = self._api
        rows = self._asked(api.nvmlDeviceGetRemappedRows, handle) or (None,) * 4
        why = getattr(api, "nvmlDeviceGetCurrentClocksEventReasons", None)  # the older name below
        reasons = self._asked(why or api.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        return {
            "ecc_errors": self._asked(api.nvmlDeviceGetTotalEccErrors, handle, _UNCORRECTED, _SINCE_LOADED),
            "remapped_rows": None if rows[0] is None else rows[0] + rows[1],
            "remap_pending": None if rows[2] is None else bool(rows[2]),
            "remap_failed": None if rows[3] is None else bool(rows[3]),
            "throttled": [name for bit, name in _SLOWED.items() if reasons & bit],
            "sm_clock_mhz": self._asked(api.nvmlDeviceGetClockInfo, handle, _SM_CLOCK),
            "max_sm_clock_mhz": self._asked(api.nvmlDeviceGetMaxClockInfo, handle, _SM_CLOCK),
            "xids": self._xids(events),
        }

    def _xids(self, events: Any) -> list[int]:
        found: list[int] = []
        with suppress(self._api.NVMLError):  # a time-out: there are no more
            while events is not None and len(found) < 16:
                found.append(int(self._api.nvmlEventSetWait_v2(events, 0).eventData))
        return found

    def _asked(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with suppress(self._api.NVMLError):
            return function(*arguments)
        return None


@contextmanager
def open_nvml() -> Iterator[Nvml | None]:
    """NVML for the block; None where the package or the driver is missing."""
    try:
        api = import_module("pynvml")
        api.nvmlInit()
    except Exception:  # its error class comes with the package
        yield None
        return
    try:
        yield Nvml(api)
    finally:
        api.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
