"""Executes a save's work in this thread, another thread or another process, one request at a time.

The process is started with the run, so that it is warm at the first save: it imports torch, maps the snapshots' memory
and touches its pages. It joins no collective and holds no GPU. It ends when its trainer does, since that closes its
standard input; what it has not published by then does not exist. When it dies, the save in work fails and the next one
starts another.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from quern.errors import QuernError
from quern.safe_path import module
from quern.train.checkpoint.format.files import TensorFile, Written
from quern.train.checkpoint.save.messages import publication_to_json
from quern.train.checkpoint.save.snapshot import Memory
from quern.train.checkpoint.save.work import Publication, Work
from quern.train.processes.agree import describe
from quern.train.processes.spawn import Child

__all__ = ["BACKGROUNDS", "Background", "Inline", "Process", "Thread"]

Fetch = Callable[[int], torch.Tensor]

_COMMAND = module("quern.train.checkpoint.save.writer")
_GRACE_S = 5.0


class Background(Protocol):
    """Executes one action at a time; the :meth:`result` of each is requested before the next one begins."""

    memory: Memory | None
    """For snapshots; None: there are none, pieces are fetched from where they are."""

    def lay_out(self, files: Sequence[TensorFile]) -> None:
        """Set the files to be written from now on."""

    def write(self, folder: str, fetch: Fetch) -> None:
        """Start :meth:`Work.write`."""

    def publish(self, asked: Publication) -> None:
        """Start :meth:`Work.publish`."""

    @property
    def idle(self) -> bool:
        """Whether :meth:`result` would return at once."""

    def result(self) -> Any:
        """The result of the last action, once it is done. Raises what went wrong, as QuernError."""

    def close(self) -> None:
        """Stop, and return when nothing is written any more."""


class Inline:
    """Executes everything synchronously in the caller's thread."""

    memory: Memory | None = None
    idle = True

    def __init__(self) -> None:
        self._work = Work()
        self._outcome: Any = None

    def lay_out(self, files: Sequence[TensorFile]) -> None:
        self._work.lay_out(files)

    def write(self, folder: str, fetch: Fetch) -> None:
        self._outcome = _outcome(lambda: self._work.write(folder, fetch))

    def publish(self, asked: Publication) -> None:
        self._outcome = _outcome(lambda: self._work.publish(asked))

    def result(self) -> Any:
        return _value(self._outcome)

    def close(self) -> None:
        """Do nothing: there is no background work."""


class Thread:
    """Executes everything in a thread of this process."""

    def __init__(self) -> None:
        self.memory: Memory | None = Memory()
        self._work = Work(self.memory)
        self._asked: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpoint writer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (action := self._asked.get()) is not None:
            self._answers.put(_outcome(action))

    def lay_out(self, files: Sequence[TensorFile]) -> None:
        self._work.lay_out(files)  # nothing is in work

    def write(self, folder: str, fetch: Fetch) -> None:
        self._asked.put(lambda: self._work.write(folder))

    def publish(self, asked: Publication) -> None:
        self._asked.put(lambda: self._work.publish(asked))

    @property
    def idle(self) -> bool:
        return not self._answers.empty()

    def result(self) -> Any:
        return _value(self._answers.get())

    def close(self) -> None:
        """Wait for the current work: a thread cannot be killed, and its files must not be cleaned up meanwhile."""
        self._asked.put(None)
        self._thread.join()


class Process:
    """Does everything in a process of its own (``python -m quern.train.checkpoint.save.writer``), asked in JSON
    lines."""

    def __init__(self, command: Sequence[str] = ()) -> None:
        self.memory: Memory | None = Memory(shared=True)
        self._command = list(command or _COMMAND)
        self._files: list[Any] = []
        self._metadata: bytes | None = None
        self._informed = False
        """Whether this process knows the metadata."""
        self._decode: Callable[[Any], Any] = lambda value: value
        self._child = self._start()

    def _start(self) -> Child:
        memory = self.memory
        assert memory is not None
        assert memory.descriptor is not None
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [*self._command, str(memory.descriptor)]
        return Child(command, pass_fds=[memory.descriptor], env=environment)

    def _ask(self, request: Mapping[str, Any], decode: Callable[[Any], Any] | None) -> None:
        self._child.send(json.dumps(request))
        if decode is not None:
            self._decode = decode

    def _revive(self) -> None:
        """Another process, which knows what the dead one knew."""
        if self._child.status() is not None:
            self._child.end(0.0)
            self._child, self._informed = self._start(), False
            self._ask({"lay_out": self._files}, None)

    def lay_out(self, files: Sequence[TensorFile]) -> None:
        self._revive()
        self._files = [file.to_json() for file in files]
        self._ask({"lay_out": self._files}, None)

    def write(self, folder: str, fetch: Fetch) -> None:
        self._revive()
        self._ask(
            {"write": folder}, lambda files: {name: Written.from_json(written) for name, written in files.items()}
        )

    def publish(self, asked: Publication) -> None:
        self._revive()
        if asked.metadata is not None:
            self._metadata, self._informed = asked.metadata, False
        asked = replace(asked, metadata=None if self._informed else self._metadata)
        self._informed = True
        self._ask({"publish": publication_to_json(asked)}, list)

    @property
    def idle(self) -> bool:
        return not self._child.idle

    def result(self) -> Any:
        line = self._child.receive()
        if line is None:
            code = self._child.status()
            raise QuernError(f"the checkpoint writer (process {self._child.pid}) ended with code {code}")
        try:
            answer = json.loads(line)
        except ValueError:
            raise QuernError(f"the checkpoint writer said {line[:200]!r}; expected a line of JSON") from None
        if "failed" in answer:
            raise QuernError(answer["failed"])
        return self._decode(answer["done"])

    def close(self) -> None:
        self._child.end(_GRACE_S)
        if self.memory is not None:
            self.memory.close()


BACKGROUNDS: Mapping[str, Callable[[], Background]] = {"sync": Inline, "thread": Thread, "process": Process}
"""By ``checkpoint.mode``."""


def _outcome(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        return _Failure(error)


class _Failure:
    def __init__(self, error: Exception) -> None:
        self.error = error


def _value(outcome: Any) -> Any:
    if not isinstance(outcome, _Failure):
        return outcome
    if isinstance(outcome.error, QuernError):
        raise outcome.error
    raise QuernError(describe(outcome.error)) from outcome.error
