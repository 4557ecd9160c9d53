"""Stands in for NVML."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Driver:
    """Stands in for the module pynvml: one GPU, with faults."""

    class NVMLError(Exception): ...

    def nvmlInit(self) -> None: ...  # noqa: N802

    def nvmlShutdown(self) -> None: ...  # noqa: N802

    def __init__(
        self, *, ecc: int | None = 0, rows: tuple[int, ...] | None = (0, 0, 0, 0), why: int = 0, xids: Any = ()
    ) -> None:
        self.ecc, self.rows, self.why, self.xids = ecc, rows, why, [*xids]
        self.cuda, self.events, self.clock = 12080, 0, 1755

    def nvmlSystemGetCudaDriverVersion(self) -> int:  # noqa: N802
        return self.cuda

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return "570.86.15"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByPciBusId(self, pci: str) -> str:  # noqa: N802
        assert pci == "0000:1b:00.0"
        return pci

    def nvmlDeviceGetName(self, handle: object) -> str:  # noqa: N802
        return "NVIDIA H100 80GB HBM3"

    def _known(self, value: Any) -> Any:
        if value is None:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: int, counter: int) -> Any:  # noqa: N802
        assert (kind, counter) == (1, 0)  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC
        return self._known(self.ecc)

    def nvmlDeviceGetRemappedRows(self, handle: Any) -> Any:  # noqa: N802
        return self._known(self.rows)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:  # noqa: N802
        return self.why

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int:  # noqa: N802
        return self._known(self.clock)

    nvmlDeviceGetMaxClockInfo = nvmlDeviceGetClockInfo

    def nvmlEventSetCreate(self) -> str:  # noqa: N802
        self.events += 1
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: Any, kinds: int, events: str) -> None:  # noqa: N802
        assert kinds == 0x8  # nvmlEventTypeXidCriticalError

    def nvmlEventSetWait_v2(self, events: str, timeout_ms: int) -> Any:  # noqa: N802
        if not self.xids:
            raise self.NVMLError("Timeout")
        return SimpleNamespace(eventData=self.xids.pop(0))

    def nvmlEventSetFree(self, events: str) -> None:  # noqa: N802
        self.events -= 1
