"""Copies a rank's tensors in memory, so that training continues while they are written.

The memory is kept from save to save: its pages are touched once, and copying runs at the speed of memory. For another
process to write from, it is an anonymous file that both map (``memfd``); nothing is left of it when both are gone.
CUDA tensors are copied on a stream of their own into pages that are registered with the driver (unverified on GPU).
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from quern.train.checkpoint.format.files import StoredTensor

__all__ = ["Memory", "Snapshot"]

_SHARED_FOLDER = "/dev/shm"


class Memory:
    """Memory for tensors, of this process alone, or mapped from a descriptor shared with another."""

    def __init__(self, descriptor: int | None = None, *, shared: bool = False) -> None:
        self.descriptor = _anonymous_file() if descriptor is None and shared else descriptor
        self._owned = descriptor is None and self.descriptor is not None
        self._map: mmap.mmap | None = None
        self._pinned: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """The number of mapped bytes."""
        return 0 if self._map is None else len(self._map)

    def grow(self, size: int, *, pin: bool = False) -> None:
        """Allocate at least ``size`` bytes, registered with CUDA for ``pin``; the previous content is lost.

        Raises:
            OSError: there is not so much memory, or CUDA does not take it.
        """
        if self.size >= size and (self._pinned is not None or not pin or not size):
            return
        self._drop()
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if self.descriptor is not None and os.fstat(self.descriptor).st_size < size:
            os.ftruncate(self.descriptor, size)
        self._map = mmap.mmap(-1 if self.descriptor is None else self.descriptor, size)
        if pin:
            whole = torch.frombuffer(self._map, dtype=torch.uint8)
            _check(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), size, 0))
            self._pinned = whole

    def touch(self) -> None:
        """Have the system give every page of shared memory now, and leave what is in them: the first copy is then as
        fast as any, and memory that is not there is an OSError, not a signal."""
        if self.size and self.descriptor is not None and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.descriptor, 0, self.size)

    def tensor(self, stored: StoredTensor) -> torch.Tensor:
        """The bytes of a piece as a tensor, alone in its storage."""
        if not stored.num_bytes:
            return torch.empty(stored.sizes, dtype=stored.torch_dtype)
        assert self._map is not None
        dtype = stored.torch_dtype
        count = stored.num_bytes // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=stored.offset).view(stored.sizes)

    def close(self) -> None:
        """Release the memory."""
        self._drop()
        if self._owned and self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _drop(self) -> None:
        if self._pinned is not None:  # after an error of the device it fails too, and hides that one if it is raised
            torch.cuda.cudart().cudaHostUnregister(self._pinned.data_ptr())
        self._map, self._pinned = None, None


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("quern-snapshot")
    folder = _SHARED_FOLDER if os.path.isdir(_SHARED_FOLDER) else None
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())


def _check(code: object) -> None:
    if int(code) != 0:  # type: ignore[call-overload]
        raise OSError(f"the snapshot's memory could not be registered with CUDA (error {code})")


class Snapshot:
    """Copies tensors into a :class:`Memory` beside the computation. What is copied must not change before
    :meth:`wait` has returned; whoever waits on the CPU helps."""

    def __init__(self, memory: Memory, device: torch.device) -> None:
        self._memory, self._device = memory, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._copies = _Copies([])
        self._thread: threading.Thread | None = None

    def prepare(self, places: Sequence[StoredTensor]) -> None:
        """Allocate the memory for ``places``, and on CUDA pin it, before the first copy."""
        self._memory.grow(max((place.end for place in places), default=0), pin=self._stream is not None)

    def start(self, tensors: Sequence[torch.Tensor], places: Sequence[StoredTensor], then: Callable[[], None]) -> None:
        """Begin to copy ``tensors`` to ``places``, in turn. ``then`` is called by another thread when all are copied,
        and not at all if that failed, which :meth:`wait` says."""
        assert self._thread is None, "one snapshot at a time"
        self.prepare(places)
        pairs = [(self._memory.tensor(place), tensor.detach()) for place, tensor in zip(places, tensors, strict=True)]
        copies = self._copies = _Copies(pairs)
        if self._stream is not None:
            self._copied = torch.cuda.Event()
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                copies.help()
                self._copied.record(self._stream)
        arguments = (copies, self._copied, then, self._device)
        self._thread = threading.Thread(target=_hand_on, args=arguments, name="snapshot", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the copied tensors may change; on CUDA the device waits.

        Raises:
            Exception: what went wrong in copying.
        """
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None
        else:
            self._copies.help()
            self._copies.finished.wait()
        if self._copies.error is not None:
            raise self._copies.error

    def join(self) -> None:
        """Wait until all is copied and handed on; raises as :meth:`wait` does."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._copies.error is not None:
            raise self._copies.error


class _Copies:
    """Copies to make, by as many threads as come: memory is faster than one of them."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._left = deque(pairs)
        self._open = len(pairs)
        self._lock = threading.Lock()
        self.error: Exception | None = None
        self.finished = threading.Event()
        """Set when none is left, or one has failed and none is being made."""
        if not pairs:
            self.finished.set()

    @torch.no_grad()
    def help(self) -> None:
        """Make copies until none is left to begin."""
        while True:
            try:
                target, source = self._left.popleft()
            except IndexError:
                return
            try:
                target.copy_(source, non_blocking=True)
            except Exception as error:
                self.error = error
                self._count(1 + self._drop())
            else:
                self._count(1)

    def _drop(self) -> int:
        dropped = 0
        with suppress(IndexError):  # another thread may take the last one
            while True:
                self._left.pop()
                dropped += 1
        return dropped

    def _count(self, copies: int) -> None:
        with self._lock:
            self._open -= copies
            if self._open == 0:
                self.finished.set()


def _hand_on(copies: _Copies, copied: torch.cuda.Event | None, then: Callable[[], None], device: torch.device) -> None:
    if copied is not None:  # a new thread is on the first GPU, and would open a context there
        torch.cuda.set_device(device)
    copies.help()
    copies.finished.wait()
    try:
        if copied is not None:
            copied.synchronize()
    except Exception as error:
        copies.error = copies.error or error
    if copies.error is None:
        then()
