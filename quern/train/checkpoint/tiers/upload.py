"""The trainer's handle of the process that copies its checkpoint files (:mod:`.mover`)."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quern.errors import InputError, QuernError
from quern.safe_path import module
from quern.train.checkpoint.format.manifest import FileRecord
from quern.train.checkpoint.store.owner import Owner
from quern.train.checkpoint.tiers.target import TOKEN_VARIABLE, open_target
from quern.train.processes.spawn import Child

__all__ = ["Cancelled", "Died", "Event", "Failed", "Uploaded", "Uploader", "Waiting"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Uploaded:
    """A request is done: all its files are in the target."""

    step: int
    last: bool
    """Whether it was the request with the manifest."""
    num_bytes: int
    """Sent; what was there already does not count."""
    seconds: float


@dataclass(frozen=True)
class Failed:
    """An attempt failed. Unless ``dropped``, the request is tried again."""

    step: int
    last: bool
    why: str
    permanent: bool
    """Somebody has to act."""
    dropped: bool


@dataclass(frozen=True)
class Waiting:
    """The manifest waits for files of other nodes, and is tried again soon: nothing is wrong with that."""

    step: int
    last: bool
    why: str


@dataclass(frozen=True)
class Cancelled:
    """A request to give up the uploads of ``step`` that were asked for before; files that were moved already stay."""

    step: int


@dataclass(frozen=True)
class Died:
    """The process ended by itself or was killed; it is restarted with the unfinished requests."""

    why: str


Event = Uploaded | Failed | Waiting | Cancelled | Died


@dataclass(frozen=True)
class _Request:
    """What was asked and is not finished."""

    number: int
    key: tuple[int, bool]
    message: str


class Uploader:
    """The trainer's handle of the mover process. No method waits for the store; one thread uses it.

    Args:
        url: the store, or another node's server as ``peer://HOST:PORT``; the token for that is QUERN_PEER_TOKEN of
            ``environment``.
        bytes_per_s: limit of the bandwidth; None for none.
        retry_after_s: seconds until what failed is tried again.
        timeout_s: limit of one request to the store.
        budget_s: seconds for which a request to the store is repeated before the try counts as failed.
        restarts_per_minute: how often a process that died is started again.
        environment: variables of the process besides the trainer's.
        owner: whose the store must be; an upload into another's fails.

    Raises:
        InputError: there is no such kind of store, or no node or token of this form.
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
        owner: Owner | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._environment = {**os.environ, **(environment or {})}
        target = open_target(url, token=self._environment.get(TOKEN_VARIABLE, ""))  # what is none is refused here
        self._url, self._takes_manifests = url, target.takes_manifests
        self._command = module("quern.train.checkpoint.tiers.mover", url)
        self._command += ["--retry-after-s", str(retry_after_s), "--timeout-s", str(timeout_s)]
        self._command += ["--budget-s", str(budget_s), "--parent", str(os.getpid())]
        if bytes_per_s is not None:
            self._command += ["--bytes-per-s", str(bytes_per_s)]
        if owner is not None:
            self._command += ["--owner", owner.run, owner.folder]
        self._restarts, self._clock = restarts_per_minute, clock
        self._starts: deque[float] = deque(maxlen=restarts_per_minute)
        self._unfinished: list[_Request] = []
        self._asked = 0
        self._closed = False
        self._process: Child | None = self._start()

    def _start(self) -> Child:
        try:
            return Child(self._command, env=self._environment)
        except OSError as error:
            raise QuernError(f"the uploader cannot be started ({error.strerror or error})") from None

    @property
    def pid(self) -> int | None:
        """The process id, if one is running."""
        return None if self._process is None else self._process.pid

    @property
    def unfinished(self) -> list[tuple[int, bool]]:
        """Step, and whether it is the request with the manifest, of what is neither done nor dropped, as asked. What
        :meth:`poll` has not told of is among it: when this is empty, all is done."""
        return [request.key for request in self._unfinished]

    def upload(
        self,
        step: int,
        folder: str,
        files: Mapping[str, FileRecord],
        last: Mapping[str, FileRecord] | None = None,
    ) -> None:
        """Ask for ``files`` of ``folder``, and then ``last``, to be moved; returns at once.

        The files stay as they are until this is done or cancelled. A request of the same step, with ``last`` as this
        one or without as this one, that is not finished is replaced: no event tells of it any more.

        Raises:
            InputError: ``last`` is asked of another node's disk.
        """
        if last and not self._takes_manifests:
            raise InputError(f"{self._url}: {', '.join(last)}: another node's disk keeps no manifests")
        self._asked += 1
        key = (step, bool(last))
        plain = [{name: dict(vars(record)) for name, record in named.items()} for named in (files, last or {})]
        asked = {"number": self._asked, "step": step, "folder": os.path.abspath(folder)}
        message = json.dumps({"upload": {**asked, "files": plain[0], "last": plain[1] or None}})
        self._unfinished = [request for request in self._unfinished if request.key != key]
        self._unfinished.append(_Request(self._asked, key, message))
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
                found = _event(line)
                if found is None:
                    log.warning("the uploader said %.200r", line)
                elif self._note(*found):
                    events.append(found[1])
            if ended is not None:
                self._process.end(0.0)
                self._process = None
                events.append(Died(_how(ended)))
        if self._process is None and not self._closed:
            self._restart()
        return events

    def _note(self, number: int | None, event: Event) -> bool:
        """Whether ``event`` is to be told: not of a request that was replaced or cancelled meanwhile."""
        if number is None:
            return True
        known = any(request.number == number for request in self._unfinished)
        if isinstance(event, Uploaded) or (isinstance(event, Failed) and event.dropped):
            self._unfinished = [request for request in self._unfinished if request.number != number]
        return known

    def _restart(self) -> None:
        now = self._clock()
        if len(self._starts) == self._restarts and now - self._starts[0] < 60:
            return
        self._starts.append(now)
        try:
            self._process = self._start()
        except QuernError as error:
            log.warning("%s", error)
            return
        for request in self._unfinished:
            self._process.send(request.message)

    def close(self, timeout_s: float = 10.0) -> None:
        """End the process; what is not finished stays so. Takes at most ``timeout_s`` seconds, and a moment."""
        if self._process is not None:
            self._process.end(timeout_s, killed_s=1.0)
            self._process = None
        self._closed = True


def _how(status: int) -> str:
    """How a process with that return code ended."""
    return f"the uploader was killed by signal {-status}" if status < 0 else f"the uploader ended with {status}"


def _event(line: str) -> tuple[int | None, Event] | None:
    """The number of the request, if it is of one, and what happened; None if ``line`` is no answer."""
    try:
        said = json.loads(line)
        if "cancelled" in said:
            return None, Cancelled(said["cancelled"])
        number = said["number"]
        if "uploaded" in said:
            return number, Uploaded(said["uploaded"], said["last"], said["bytes"], said["seconds"])
        if "failed" in said:
            return number, Failed(said["failed"], said["last"], said["why"], said["permanent"], said["dropped"])
        return number, Waiting(said["waiting"], said["last"], said["why"])
    except (ValueError, KeyError, TypeError):
        return None
