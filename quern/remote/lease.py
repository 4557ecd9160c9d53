"""A lease in a store: an object with a heartbeat, taken by conditional writes, held by one process at a time.

A store has no locks that end with a process. So the holder rewrites the object every few seconds, but only if it is
still the one it wrote before (``If-Match``). Another process takes it over only after ``stale_s`` seconds without a
change, by the store's clock or by watching it, or if its process, on the same machine, has ended.
"""

from __future__ import annotations

import _thread
import json
import os
import platform
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from quern.errors import QuernError
from quern.remote.objects import Objects, objects
from quern.remote.retry import Backoff, ChangedError, StoreError
from quern.remote.s3 import S3

__all__ = ["Lease", "began", "boot", "hold", "takes_leases"]

PERIOD_S = 5.0
STALE_S = 30.0

#: Interrupts the main thread of who lost the lease. Not SIGINT, which what a shell starts in the background ignores.
_LOST = signal.SIGURG


def takes_leases(url: str) -> bool:
    """Whether the store of ``url`` can hold a lease: it needs conditional writes."""
    return isinstance(objects(url).backend, S3)


@contextmanager
def hold(url: str, what: str, *, period_s: float = PERIOD_S, stale_s: float = STALE_S) -> Iterator[Lease]:
    """Hold the lease at ``url`` inside the block. Called in the main thread, which is interrupted if it is lost.

    Args:
        what: what is being worked on, for messages.

    Raises:
        QuernError: somebody else holds it; or took it over, because this process had not been heard of for long.
        StoreError: the store refuses, or cannot be reached.
    """
    lease = Lease(url, what, period_s, stale_s)
    lease.take()
    beating = threading.Thread(target=lease.keep, name="lease", daemon=True)
    with _interruptible(lease):
        beating.start()
        try:
            yield lease
            lease.end()
            lease.check()
        except KeyboardInterrupt:
            lease.check()
            raise
        finally:
            lease.let_go()
            beating.join(period_s)


@contextmanager
def _interruptible(lease: Lease) -> Iterator[None]:
    """``_LOST`` raises KeyboardInterrupt in the main thread if ``lease`` is lost, or one around it; else nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if lease.lost:
            raise KeyboardInterrupt
        if callable(before):
            before(number, frame)

    before = signal.getsignal(_LOST)
    signal.signal(_LOST, interrupt)
    try:
        yield
    finally:
        signal.signal(_LOST, signal.SIG_DFL if before is None else before)  # None: it was not set by Python


class Lease:
    """One process's claim. ``lost``: somebody else has it now."""

    def __init__(self, url: str, what: str, period_s: float, stale_s: float) -> None:
        self._url, self._what, self._period_s, self._stale_s = url, what, period_s, stale_s
        self._owner = uuid.uuid4().hex
        self._etag: str | None = None
        self._beat = 0
        self._heard_s = _now_s()
        self._ended = threading.Event()
        self._changing = threading.Lock()
        self.lost = False
        self._store = objects(url)

    def _s3(self) -> S3:
        backend = self._store.backend
        if not isinstance(backend, S3):
            raise QuernError(f"{self._url}: expected a store that takes conditional writes")
        return backend

    def _content(self) -> bytes:
        said = {"owner": self._owner, "beat": self._beat, **_process()}
        return (json.dumps(said, sort_keys=True) + "\n").encode()

    def _put(self, etag: str | None) -> None:
        """Write the lease if it stands as ``etag`` says, or is this one's own: an answer may have been lost."""
        data, now_s = self._content(), _now_s()
        try:
            self._etag = self._s3().put_if(self._url, data, etag)
        except ChangedError:
            said = self._read()
            if said is None or said.get("owner") != self._owner:
                raise
            self._etag = self._s3().stat(self._url).etag
            if said != json.loads(data):
                self._etag = self._s3().put_if(self._url, data, self._etag)
        self._heard_s = now_s

    def _read(self) -> dict[str, Any] | None:
        try:
            said = json.loads(self._store.read(self._url))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError):
            return {}
        return said if isinstance(said, dict) else {}

    def take(self) -> None:
        """Take the lease, waiting at most ``stale_s`` to learn whether its holder is alive.

        Raises:
            QuernError: it does.
        """
        first: tuple[str, float] | None = None
        while True:
            info = self._store.stat(self._url)
            held = self._read() if info is not None else None
            etag = info.etag if info is not None and held is not None else None
            if held is not None and etag is not None:
                if first is None:
                    first = etag, time.monotonic()
                elif first[0] != etag:
                    raise QuernError(f"{self._what}: another driver is at work in this run ({_named(held)})")
                waited_s = time.monotonic() - first[1]
                if not (_is_gone(held) or self._age_s() > self._stale_s or waited_s > self._stale_s):
                    time.sleep(self._period_s / 4)
                    continue
            with suppress(ChangedError):  # another process was faster
                self._put(etag)
                self._look_again()
                return

    def _age_s(self) -> float:
        try:
            age = self._s3().age_s(self._url)
        except FileNotFoundError:
            return 0.0
        return 0.0 if age is None else age

    def _look_again(self) -> None:
        """A store that knows no conditions lets two create; the later one has it, and each finds out here."""
        said = self._read()
        if said is None or said.get("owner") != self._owner:
            who = _named(said or {})
            raise QuernError(f"{self._what}: another driver is at work in this run ({who})")

    def keep(self) -> None:
        """Renew the lease every ``period_s`` until :meth:`let_go`. A store that is away for a while is waited for."""
        with self._changing:  # from now on patience is short: the next heartbeat is another try
            self._store = Objects(self._url, Backoff(budget_s=self._period_s), min(10.0, self._stale_s), 1)
        while not self._ended.wait(self._period_s):
            with self._changing:
                if self._ended.is_set():
                    return
                self._beat += 1
                try:
                    self._put(self._etag)
                except ChangedError:
                    self.lost = True
                except FileNotFoundError:  # removed by a process that considers the run abandoned
                    self.lost = True
                except StoreError:
                    continue
                if self.lost:  # while this is held the block cannot end: nothing else is interrupted
                    _thread.interrupt_main(_LOST)
                    return

    def check(self) -> None:
        """Raises QuernError once the lease is lost. After a time in which others may have taken it (this machine slept,
        say) the store is asked first."""
        if not self.lost and _now_s() - self._heard_s > self._stale_s:
            with self._changing:
                try:
                    self._put(self._etag)
                except (ChangedError, FileNotFoundError):
                    self.lost = True
                except StoreError:  # unreachable, also for other processes that want the lease
                    pass
        if self.lost:
            raise QuernError(
                f"{self._what}: another driver has taken this run over, since this one was not heard of for "
                f"{self._stale_s:.0f} s; it goes on there"
            )

    def end(self) -> None:
        """The block is over: the main thread is not interrupted any more, and that it just was is no news."""
        while not self._ended.is_set():
            try:
                with self._changing:
                    self._ended.set()
            except KeyboardInterrupt:
                if not self.lost:
                    raise

    def let_go(self) -> None:
        """Stop the heartbeat and remove the lease if this process still holds it."""
        self.end()
        with self._changing:
            if not self.lost and self._etag is not None:
                with suppress(StoreError, FileNotFoundError):
                    said = self._read()
                    if said is not None and said.get("owner") == self._owner:
                        self._store.remove([self._url])


def _now_s() -> float:
    """Also goes on while the machine sleeps, where that can be told."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _process() -> dict[str, Any]:
    return {"host": platform.node(), "boot": boot(), "pid": os.getpid(), "began": began(os.getpid())}


def boot() -> str:
    """Since when this machine is up, and in which world of process numbers this process lives."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def began(pid: int) -> str:
    """When a process of this machine was started, in ticks since boot; empty if it is gone or cannot be told."""
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        words = file.read().rpartition(")")[2].split()
        return "" if words[0] in "ZX" else words[19]
    return ""


def _is_gone(held: dict[str, Any]) -> bool:
    """Whether the holder was a process of this machine, and is no more."""
    mine = _process()
    if not mine["boot"] or (held.get("host"), held.get("boot")) != (mine["host"], mine["boot"]):
        return False
    pid = held.get("pid")
    return isinstance(pid, int) and began(pid) != held.get("began")


def _named(held: dict[str, Any]) -> str:
    return f"process {held.get('pid', '?')} on {held.get('host', '?')}"
