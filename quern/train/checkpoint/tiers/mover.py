"""The process that copies checkpoint files in the background, to a store or another node's disk.

``python -m quern.train.checkpoint.tiers.mover URL`` reads one JSON document a line and answers with one a line::

    {"upload": {"number": 7, "step": 1000, "folder": "/nvme/…",
                "files": {name: {"sha256": …, "size": …}}, "last": null}}
    {"cancel": 1000}

    {"uploaded": 1000, "number": 7, "last": false, "bytes": 99, "seconds": 1.5}
    {"waiting": 1000, "number": 7, "last": true, "why": "…"}
    {"failed": 1000, "number": 7, "last": false, "why": "…", "permanent": true, "dropped": false}
    {"cancelled": 1000}

``number`` is the asker's and comes back in the answers. A request replaces an earlier one of the same step that has a
``last`` too, or has none too; nothing more is said of that one, but how it ended if it had ended already.

Every node moves the files it wrote. The node of rank 0 is asked once more, with the manifest as ``last``: it goes in
after everything else of its request, and once the files of all nodes are there; until then the request waits. One
request at a time is worked on, of those that are due the one of the highest step first. What failed is tried again
after ``retry_after_s`` with a new session, since credentials may have been renewed, for ever; only what can never
succeed, because the local bytes are gone, is dropped.

The process holds no state: it may be killed at any moment. Files that are there already, with the right SHA-256, are
not sent again. It ends at once when its input ends, or when its parent is gone. A token for other nodes' servers is
read from the environment variable QUERN_PEER_TOKEN.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quern.errors import InputError, QuernError
from quern.remote.retry import Backoff, StoreError
from quern.train.checkpoint.format.manifest import FileRecord
from quern.train.checkpoint.store.errors import IncompleteError, SourceError
from quern.train.checkpoint.store.owner import Owner, hold
from quern.train.checkpoint.store.rate import RateLimit
from quern.train.checkpoint.store.store import Store
from quern.train.checkpoint.tiers.target import TOKEN_VARIABLE, Target, open_target

__all__ = ["Mover", "main"]

_MAX_WHY = 2000  # characters of a message
_LOOK_AGAIN_S, _LOOK_AGAIN_MOST_S = 0.25, 2.0
"""Seconds until it is looked again whether the files a manifest waits for are there: at first, then twice as many each
time up to the second number."""


class _GivenUpError(QuernError):
    """The request under way was cancelled or replaced."""


@dataclass
class _Job:
    step: int
    folder: str
    files: Mapping[str, FileRecord]
    last: Mapping[str, FileRecord]
    number: int
    place: int
    """In the order of asking."""
    not_before: float = 0.0
    look_again_s: float = _LOOK_AGAIN_S
    cancelled: bool = False
    replaced: bool = False

    @classmethod
    def parse(cls, asked: Any, place: int) -> _Job:
        """The job that a decoded request asks for; raises InputError if ``asked`` is no request."""
        try:
            step, folder, number = asked["step"], asked["folder"], asked["number"]
            files, last = (
                {name: FileRecord(str(record["sha256"]), int(record["size"])) for name, record in named.items()}
                for named in (asked["files"], asked["last"] or {})
            )
            if not isinstance(step, int) or step < 0 or not isinstance(folder, str) or not isinstance(number, int):
                raise TypeError("step, folder or number")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"upload: expected number, step, folder, files and last, got {str(asked)[:200]} ({error})"
            ) from None
        return cls(step, folder, files, last, number, place)

    @property
    def key(self) -> tuple[int, bool]:
        """Of requests with the same key the last one counts."""
        return self.step, bool(self.last)

    @property
    def given_up(self) -> bool:
        return self.cancelled or self.replaced

    def answer(self, kind: str, **said: Any) -> dict[str, Any]:
        return {kind: self.step, "number": self.number, **said}


class Mover:
    """Works on requests, one at a time. :meth:`run` is one thread's; :meth:`tell` may be called from any.

    Args:
        connect: opens where the files go, given how to wait between tries: a wait ends early when its request is
            cancelled.
        limit: makes the limit of bytes per second, given how to wait.
        reply: takes an answer.
        retry_after_s: seconds until what failed is tried again.
        allow: called with where the files go before each try; an error it raises is the try's.
    """

    def __init__(
        self,
        connect: Callable[[Callable[[float], None]], Target],
        reply: Callable[[dict[str, Any]], None],
        *,
        limit: Callable[[Callable[[float], None]], RateLimit] | None = None,
        retry_after_s: float = 60.0,
        allow: Callable[[Target], object] = lambda target: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._allow = allow
        self._reply, self._retry_after_s, self._clock = reply, retry_after_s, clock
        self._told = threading.Condition()
        self._waiting: list[_Job] = []
        self._current: _Job | None = None
        self._asked = 0
        self._target = connect(self._pause)
        self._rate = None if limit is None else limit(self._pause)
        self._stale = False  # the session may hold credentials that are no longer valid

    def tell(self, message: Any) -> None:
        """Accept a request. Raises InputError if it is none."""
        if isinstance(message, dict) and isinstance(message.get("cancel"), int):
            self._cancel(message["cancel"])
        elif isinstance(message, dict) and "upload" in message:
            self._asked += 1
            job = _Job.parse(message["upload"], self._asked)
            with self._told:
                self._waiting = [other for other in self._waiting if other.key != job.key]
                if self._current is not None and self._current.key == job.key:
                    self._current.replaced = True
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
                return  # answered when the work on it has ended
        self._reply({"cancelled": step})

    def run(self) -> None:
        """Process requests for ever."""
        while True:
            self.work()

    def work(self) -> None:
        """Wait for a request that is due, and try it once."""
        job = self._next()
        try:
            if self._stale:
                self._target.renew()
                self._stale = False
            self._reply(self._move(job))
        except _GivenUpError:
            pass
        except IncompleteError as error:
            self._again(job, min(self._retry_after_s, job.look_again_s))
            job.look_again_s = min(2 * job.look_again_s, _LOOK_AGAIN_MOST_S)
            self._tell_of(job, job.answer("waiting", last=bool(job.last), why=str(error)[:_MAX_WHY]))
        except Exception as error:
            self._failed(job, error)
        finally:
            with self._told:
                self._current = None
        if job.cancelled:
            self._reply({"cancelled": job.step})

    def _next(self) -> _Job:
        with self._told:
            while True:
                now = self._clock()
                due = [job for job in self._waiting if job.not_before <= now]
                if due:
                    job = max(due, key=lambda job: (bool(job.last), job.step, -job.place))
                    self._waiting.remove(job)
                    self._current = job
                    return job
                soonest = min((job.not_before for job in self._waiting), default=now + 3600)
                self._told.wait(min(soonest - now, 3600))

    def _failed(self, job: _Job, error: Exception) -> None:
        dropped = isinstance(error, SourceError | InputError)
        permanent = dropped or not (isinstance(error, StoreError) and error.transient)
        why = str(error) if isinstance(error, QuernError) else f"{type(error).__name__}: {error}"
        self._stale = not dropped
        if not dropped:
            self._again(job, self._retry_after_s)
        last = bool(job.last)
        self._tell_of(job, job.answer("failed", last=last, why=why[:_MAX_WHY], permanent=permanent, dropped=dropped))

    def _again(self, job: _Job, after_s: float) -> None:
        with self._told:
            if not job.given_up:
                job.not_before = self._clock() + after_s
                self._waiting.append(job)

    def _tell_of(self, job: _Job, answer: dict[str, Any]) -> None:
        if not job.given_up:
            self._reply(answer)

    def _move(self, job: _Job) -> dict[str, Any]:
        """Moves what is not there; returns the answer."""
        if job.last and not self._target.takes_manifests:
            raise InputError(f"step {job.step}: another node's disk keeps no manifests")
        self._allow(self._target)
        start, sent = self._clock(), 0

        def progress(num_bytes: int) -> None:
            nonlocal sent
            self._check()
            sent += num_bytes

        for named in (job.files, job.last):
            for name, record in sorted(named.items()):
                self._check()
                if not self._target.has(job.step, name, record):
                    if not os.path.lexists(job.folder):
                        raise SourceError(f"{job.folder}: is no longer there; {name} was not moved and never will be")
                    self._target.put(job.step, name, os.path.join(job.folder, name), record, self._rate, progress)
        seconds = round(self._clock() - start, 3)
        return job.answer("uploaded", last=bool(job.last), bytes=sent, seconds=seconds)

    def _check(self) -> None:
        if self._current is not None and self._current.given_up:
            raise _GivenUpError("cancelled or replaced")

    def _pause(self, seconds: float) -> None:
        with self._told:
            self._told.wait_for(lambda: self._current is not None and self._current.given_up, seconds)
        self._check()


def _watch_parent(parent: int) -> None:
    """Exit when the parent has ended, even if another process holds our input open."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def main(arguments: list[str] | None = None) -> None:
    """Read requests until the input ends."""
    parser = argparse.ArgumentParser(
        prog="python -m quern.train.checkpoint.tiers.mover",
        description="Moves checkpoint files to a store or another node.",
    )
    parser.add_argument("url")
    parser.add_argument("--bytes-per-s", type=float)
    parser.add_argument("--retry-after-s", type=float, default=60.0)
    parser.add_argument("--timeout-s", type=float, default=120.0)
    parser.add_argument("--budget-s", type=float, default=300.0)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--owner", nargs=2, metavar=("RUN", "FOLDER"), help="Whose the store must be.")
    asked = parser.parse_args(arguments)
    token = os.environ.pop(TOKEN_VARIABLE, "")
    speaking = threading.Lock()

    def reply(message: dict[str, Any]) -> None:
        try:
            with speaking:
                sys.stdout.write(json.dumps(message) + "\n")
                sys.stdout.flush()
        except OSError:  # the reader has closed the pipe
            os._exit(0)

    def connect(pause: Callable[[float], None]) -> Target:
        backoff = Backoff(budget_s=asked.budget_s, sleep=pause)
        return open_target(asked.url, token=token, backoff=backoff, timeout_s=asked.timeout_s)

    def allow(target: Target) -> None:
        if asked.owner is not None and isinstance(target, Store):
            hold(target, Owner(asked.owner[0], asked.owner[1], socket.gethostname()))

    mover = Mover(
        connect,
        reply,
        allow=allow,
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
            print(f"quern.train.checkpoint.tiers.mover: {error}", file=sys.stderr, flush=True)
    os._exit(0)  # a transfer under way is not waited for


if __name__ == "__main__":
    main()
