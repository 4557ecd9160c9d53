"""Uploads behind the training: a process that moves checkpoint files into a store, and the trainer's handle of it.

``python -m quern.train.checkpoint.tiers.upload URL`` reads one JSON document a line and answers with one a line::

    {"upload": {"step": 1000, "folder": "/nvme/…", "files": {name: {"sha256": …, "size": …}}, "last": null}}
    {"cancel": 1000}

    {"progress": 1000, "bytes": 8388608, "total": 99}      at most one a second
    {"uploaded": 1000, "last": false, "bytes": 99, "seconds": 1.5}
    {"failed": 1000, "last": false, "why": "…", "permanent": true, "dropped": false}
    {"cancelled": 1000}

Every node uploads the files it wrote. The node of rank 0 is asked once more when all nodes have reported, with the
manifest as ``last``: it goes in after everything else of its request. One request at a time is worked on, of those that
wait the one of the highest step first. What failed is tried again after ``retry_after_s`` with a new session, since
credentials may have been renewed, for ever; only what can never succeed, because the local bytes are gone, is dropped.

The process holds no state: it may be killed at any moment. Files that the store has already, with the right SHA-256,
are not sent again. It ends at once when its input ends, or when its parent is gone.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from quern.errors import InputError, QuernError
from quern.train.checkpoint.manifest import FileRecord
from quern.train.checkpoint.tiers.rate import RateLimit
from quern.train.checkpoint.tiers.store import Backoff, Rate, SourceError, Store, StoreError

__all__ = ["Cancelled", "Died", "Event", "Failed", "Mover", "Progress", "Uploaded", "Uploader", "main"]

log = logging.getLogger(__name__)

_MAX_WHY = 2000  # characters of a message


@dataclass(frozen=True)
class Uploaded:
    """A request is done: all its files are in the store."""

    step: int
    last: bool
    """Whether it was the request with the manifest."""
    num_bytes: int
    """Sent; what was there already does not count."""
    seconds: float


@dataclass(frozen=True)
class Failed:
    """A try failed. Unless ``dropped``, the request is tried again."""

    step: int
    last: bool
    why: str
    permanent: bool
    """Somebody has to act."""
    dropped: bool


@dataclass(frozen=True)
class Progress:
    """Bytes of a request's files that are in the store or sent, of all."""

    step: int
    num_bytes: int
    total: int


@dataclass(frozen=True)
class Cancelled:
    """What was asked for a step is forgotten; files of it that were in the store stay there. A request that was done
    before it heard of this is told as :class:`Uploaded` instead."""

    step: int


@dataclass(frozen=True)
class Died:
    """The process ended by itself or was killed; it is started again with what is not finished."""

    why: str


Event = Uploaded | Failed | Progress | Cancelled | Died


class _GivenUpError(QuernError):
    """The trainer cancelled the request under way."""


@dataclass
class _Job:
    step: int
    folder: str
    files: Mapping[str, FileRecord]
    last: Mapping[str, FileRecord]
    number: int
    not_before: float = 0.0
    cancelled: bool = False

    @classmethod
    def parse(cls, asked: Any, number: int) -> _Job:
        """Raises InputError if ``asked`` is no request."""
        try:
            step, folder = asked["step"], asked["folder"]
            files, last = (
                {name: FileRecord(str(record["sha256"]), int(record["size"])) for name, record in named.items()}
                for named in (asked["files"], asked["last"] or {})
            )
            if not isinstance(step, int) or step < 0 or not isinstance(folder, str):
                raise TypeError("step or folder")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"upload: expected step, folder, files and last, got {str(asked)[:200]} ({error})"
            ) from None
        return cls(step, folder, files, last, number)

    @property
    def total(self) -> int:
        return sum(record.size for named in (self.files, self.last) for record in named.values())


class Mover:
    """Works on requests, one at a time. :meth:`run` is one thread's; :meth:`tell` may be called from any.

    Args:
        connect: makes the store, given how to wait between tries: a wait ends early when its request is cancelled.
        limit: makes the limit of bytes per second, given how to wait.
        reply: takes an answer.
        retry_after_s: seconds until what failed is tried again.
    """

    def __init__(
        self,
        connect: Callable[[Callable[[float], None]], Store],
        reply: Callable[[dict[str, Any]], None],
        *,
        limit: Callable[[Callable[[float], None]], Rate] | None = None,
        retry_after_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reply, self._retry_after_s, self._clock = reply, retry_after_s, clock
        self._told = threading.Condition()
        self._waiting: list[_Job] = []
        self._current: _Job | None = None
        self._asked = 0
        self._store = connect(self._pause)
        self._rate = None if limit is None else limit(self._pause)
        self._stale = False  # the session may hold credentials that are no longer valid

    def tell(self, message: Any) -> None:
        """Take a request. Raises InputError if it is none."""
        if isinstance(message, dict) and isinstance(message.get("cancel"), int):
            self._cancel(message["cancel"])
        elif isinstance(message, dict) and "upload" in message:
            self._asked += 1
            job = _Job.parse(message["upload"], self._asked)
            with self._told:
                self._waiting.append(job)
                self._told.notify_all()
        else:
            raise InputError(f"upload: expected 'upload' or 'cancel', got {str(message)[:200]}")

    def _cancel(self, step: int) -> None:
        with self._told:
            self._waiting = [job for job in self._waiting if job.step != step]
            if self._current is not None and self._current.step == step:
                self._current.cancelled = True
                self._told.notify_all()
                return  # answered when the transfer has ended
        self._reply({"cancelled": step})

    def run(self) -> None:
        """Work for ever."""
        while True:
            self.work()

    def work(self) -> None:
        """Wait for a request that is due, and try it once."""
        job = self._next()
        try:
            if self._stale:
                self._store.renew()
                self._stale = False
            self._move(job)
        except _GivenUpError:
            self._reply({"cancelled": job.step})
        except Exception as error:
            self._failed(job, error)
        finally:
            with self._told:
                self._current = None

    def _next(self) -> _Job:
        with self._told:
            while True:
                now = self._clock()
                due = [job for job in self._waiting if job.not_before <= now]
                if due:
                    job = max(due, key=lambda job: (job.step, -job.number))
                    self._waiting.remove(job)
                    self._current = job
                    return job
                soonest = min((job.not_before for job in self._waiting), default=now + 3600)
                self._told.wait(min(soonest - now, 3600))

    def _failed(self, job: _Job, error: Exception) -> None:
        dropped = isinstance(error, SourceError | InputError)
        permanent = dropped or not (isinstance(error, StoreError) and error.transient)
        why = str(error) if isinstance(error, QuernError) else f"{type(error).__name__}: {error}"
        with self._told:
            cancelled = job.cancelled
            if not cancelled and not dropped:
                job.not_before = self._clock() + self._retry_after_s
                self._waiting.append(job)
        self._stale = not dropped
        if cancelled:
            self._reply({"cancelled": job.step})
        else:
            answer = {"failed": job.step, "last": bool(job.last), "why": why[:_MAX_WHY], "permanent": permanent}
            self._reply(answer | {"dropped": dropped})

    def _move(self, job: _Job) -> None:
        start = self._clock()
        sent = done = 0
        said = start

        def progress(num_bytes: int) -> None:
            nonlocal sent, said
            self._check()
            sent += num_bytes
            if self._clock() - said >= 1.0:
                said = self._clock()
                self._reply({"progress": job.step, "bytes": min(done + sent, job.total), "total": job.total})

        for named in (job.files, job.last):
            for name, record in sorted(named.items()):
                self._check()
                if self._store.has(job.step, name, record):
                    done += record.size
                    continue
                path = os.path.join(job.folder, name)
                self._store.put(job.step, name, path, record, self._rate, progress)
        seconds = round(self._clock() - start, 3)
        self._reply({"uploaded": job.step, "last": bool(job.last), "bytes": sent, "seconds": seconds})

    def _check(self) -> None:
        if self._current is not None and self._current.cancelled:
            raise _GivenUpError("cancelled")

    def _pause(self, seconds: float) -> None:
        with self._told:
            self._told.wait_for(lambda: self._current is not None and self._current.cancelled, seconds)
        self._check()


@dataclass
class _Request:
    """What was asked and is not finished."""

    message: str
    key: tuple[int, bool] = field(compare=False)


class Uploader:
    """The trainer's handle of the process. No method waits for the store; one thread uses it.

    Args:
        url: the store.
        bytes_per_s: limit of the bandwidth; None for none.
        retry_after_s: seconds until what failed is tried again.
        timeout_s: limit of one request to the store.
        budget_s: seconds for which a request to the store is repeated before the try counts as failed.
        restarts_per_minute: how often a process that died is started again.
        environment: variables of the process besides the trainer's.

    Raises:
        InputError: there is no such kind of store.
        QuernError: no process could be started.
    """

    def __init__(
        self,
        url: str,
        *,
        bytes_per_s: float | None = None,
        retry_after_s: float = 60.0,
        timeout_s: float = 120.0,
        budget_s: float = 300.0,
        restarts_per_minute: int = 3,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        Store(url)  # a url that is none is refused here
        self._command = [sys.executable, "-m", "quern.train.checkpoint.tiers.upload", url]
        self._command += ["--retry-after-s", str(retry_after_s), "--timeout-s", str(timeout_s)]
        self._command += ["--budget-s", str(budget_s), "--parent", str(os.getpid())]
        if bytes_per_s is not None:
            self._command += ["--bytes-per-s", str(bytes_per_s)]
        self._environment = {**os.environ, **(environment or {})}
        self._restarts, self._clock = restarts_per_minute, clock
        self._starts: deque[float] = deque(maxlen=restarts_per_minute)
        self._unfinished: list[_Request] = []
        self._closed = False
        self._process: _Process | None = _Process(self._command, self._environment)

    @property
    def pid(self) -> int | None:
        """The process, if one lives."""
        return None if self._process is None else self._process.pid

    @property
    def unfinished(self) -> list[tuple[int, bool]]:
        """Step, and whether it is the request with the manifest, of what is neither done nor dropped, as asked."""
        return [request.key for request in self._unfinished]

    def upload(
        self,
        step: int,
        folder: str,
        files: Mapping[str, FileRecord],
        last: Mapping[str, FileRecord] | None = None,
    ) -> None:
        """Ask for ``files`` of ``folder``, and then ``last``, to be in the store; returns at once.

        The files stay as they are until this is done or cancelled. Cancel a step before it is asked for anew.
        """
        plain = [{name: dict(vars(record)) for name, record in named.items()} for named in (files, last or {})]
        asked = {"step": step, "folder": os.path.abspath(folder), "files": plain[0], "last": plain[1] or None}
        self._unfinished.append(_Request(json.dumps({"upload": asked}), (step, bool(last))))
        if self._process is not None:
            self._process.send(self._unfinished[-1].message)

    def cancel(self, step: int) -> None:
        """Forget what was asked for ``step``."""
        self._unfinished = [request for request in self._unfinished if request.key[0] != step]
        if self._process is not None:
            self._process.send(json.dumps({"cancel": step}))

    def poll(self) -> list[Event]:
        """What happened since the last call. Starts a process that died again, with what is not finished."""
        events: list[Event] = []
        if self._process is not None:
            ended = self._process.ended()  # before its last words are read
            for line in self._process.lines():
                event = _event(line)
                if event is None:
                    log.warning("the uploader said %.200r", line)
                    continue
                self._note(event)
                events.append(event)
            if ended is not None:
                self._process.close()
                self._process = None
                events.append(Died(ended))
        if self._process is None and not self._closed:
            self._restart()
        return events

    def _note(self, event: Event) -> None:
        if isinstance(event, Uploaded) or (isinstance(event, Failed) and event.dropped):
            key = (event.step, event.last)
            place = next((i for i, request in enumerate(self._unfinished) if request.key == key), None)
            if place is not None:
                del self._unfinished[place]

    def _restart(self) -> None:
        now = self._clock()
        if len(self._starts) == self._restarts and now - self._starts[0] < 60:
            return
        self._starts.append(now)
        try:
            self._process = _Process(self._command, self._environment)
        except QuernError as error:
            log.warning("%s", error)
            return
        for request in self._unfinished:
            self._process.send(request.message)

    def close(self, timeout_s: float = 10.0) -> None:
        """End the process; what is not finished stays so. Takes at most ``timeout_s`` seconds, and a moment."""
        if self._process is not None:
            self._process.end(timeout_s)
            self._process = None
        self._closed = True


class _Process:
    """A process that reads and writes lines; two threads keep the caller from waiting for it."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                env=dict(environment),
                start_new_session=True,  # an interrupt from the terminal is the trainer's to handle
            )
        except OSError as error:
            raise QuernError(f"the uploader cannot be started ({error.strerror or error})") from None
        self.pid = self._popen.pid
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._to_say: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._listener = threading.Thread(target=self._listen, args=(self._popen.stdout,), daemon=True)
        self._speaker = threading.Thread(target=self._speak, args=(self._popen.stdin,), daemon=True)
        self._listener.start()
        self._speaker.start()

    def _listen(self, stream: IO[str]) -> None:
        with suppress(OSError, ValueError), stream:
            for line in stream:
                self._said.put(line)

    def _speak(self, stream: IO[str]) -> None:
        with suppress(OSError, ValueError), stream:
            while (line := self._to_say.get()) is not None:
                stream.write(line + "\n")
                stream.flush()

    def send(self, line: str) -> None:
        self._to_say.put(line)

    def lines(self) -> list[str]:
        found = []
        with suppress(queue.Empty):
            while True:
                found.append(self._said.get_nowait())
        return found

    def ended(self) -> str | None:
        """How it ended, once it has and all it said has been taken in; else None."""
        status = self._popen.poll()
        if status is None or self._listener.is_alive():
            return None
        return f"the uploader was killed by signal {-status}" if status < 0 else f"the uploader ended with {status}"

    def close(self) -> None:
        self._to_say.put(None)

    def end(self, timeout_s: float) -> None:
        self._to_say.put(None)
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            with suppress(subprocess.TimeoutExpired):  # in a system call that cannot be interrupted
                self._popen.wait(1.0)
        self._listener.join(1.0)
        self._speaker.join(1.0)


def _event(line: str) -> Event | None:
    try:
        said = json.loads(line)
        if "uploaded" in said:
            return Uploaded(said["uploaded"], said["last"], said["bytes"], said["seconds"])
        if "failed" in said:
            return Failed(said["failed"], said["last"], said["why"], said["permanent"], said["dropped"])
        if "progress" in said:
            return Progress(said["progress"], said["bytes"], said["total"])
        return Cancelled(said["cancelled"])
    except (ValueError, KeyError, TypeError):
        return None


def _watch_parent(parent: int) -> None:
    """End when the parent is gone, though somebody else may hold our input open."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def main(arguments: list[str] | None = None) -> None:
    """Read requests until the input ends."""
    parser = argparse.ArgumentParser(
        prog="python -m quern.train.checkpoint.tiers.upload", description="Uploads checkpoints."
    )
    parser.add_argument("url")
    parser.add_argument("--bytes-per-s", type=float)
    parser.add_argument("--retry-after-s", type=float, default=60.0)
    parser.add_argument("--timeout-s", type=float, default=120.0)
    parser.add_argument("--budget-s", type=float, default=300.0)
    parser.add_argument("--parent", type=int)
    asked = parser.parse_args(arguments)
    speaking = threading.Lock()

    def reply(message: dict[str, Any]) -> None:
        try:
            with speaking:
                sys.stdout.write(json.dumps(message) + "\n")
                sys.stdout.flush()
        except OSError:  # nobody listens any more
            os._exit(0)

    def connect(pause: Callable[[float], None]) -> Store:
        return Store(asked.url, backoff=Backoff(budget_s=asked.budget_s, sleep=pause), timeout_s=asked.timeout_s)

    mover = Mover(
        connect,
        reply,
        limit=lambda pause: RateLimit(asked.bytes_per_s, sleep=pause),
        retry_after_s=asked.retry_after_s,
    )
    if asked.parent is not None:
        threading.Thread(target=_watch_parent, args=(asked.parent,), daemon=True).start()
    threading.Thread(target=mover.run, daemon=True).start()
    for line in sys.stdin:
        try:
            mover.tell(json.loads(line))
        except (ValueError, InputError) as error:
            print(f"quern.train.checkpoint.tiers.upload: {error}", file=sys.stderr, flush=True)
    os._exit(0)  # a transfer under way is not waited for


if __name__ == "__main__":
    main()
