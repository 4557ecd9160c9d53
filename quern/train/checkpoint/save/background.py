"""Executes a save's work in this thread, another thread or another process, one request at a time.

The process is started with the run, so that it is warm at the first save: it imports torch, maps the snapshots' memory
and touches its pages. It joins no collective and holds no GPU. It ends when its trainer does, since that closes its
standard input; what it has not published by then does not exist. When it dies, the save in work fails and the next one
starts another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from quern.errors import QuernError
from quern.safe_path import module
from quern.train.checkpoint.format.files import TensorFile
from quern.train.checkpoint.save.messages import from_line, to_line
from quern.train.checkpoint.save.snapshot import Memory
from quern.train.checkpoint.save.work import Publication, Work
from quern.train.processes.agree import describe
from quern.train.processes.spawn import Child

__all__ = ["BACKGROUNDS", "Background", "Process", "Thread"]

Fetch = Callable[[int], torch.Tensor]

_COMMAND = module("quern.train.checkpoint.save.writer")
_GRACE_S = 5.0


class Background:
    """Executes one action at a time, here in the caller's thread; the :meth:`result` of each is requested before the
    next one begins."""

    def __init__(self, memory: Memory | None = None) -> None:
        self.memory = memory
        """For snapshots; None: there are none, pieces are fetched from where they are."""
        self._work = Work(memory)
        self._done: Future[Any] = Future()

    def lay_out(self, files: Sequence[TensorFile]) -> None:
        """Set the files to be written from now on; nothing is in work."""
        self._work.lay_out(files)

    def write(self, folder: str, fetch: Fetch) -> None:
        """Start :meth:`Work.write`."""
        self._start(lambda: self._work.write(folder, fetch if self.memory is None else None))

    def publish(self, asked: Publication) -> None:
        """Start :meth:`Work.publish`."""
        self._start(lambda: self._work.publish(asked))

    def _start(self, action: Callable[[], Any]) -> None:
        self._done = Future()
        try:
            self._done.set_result(action())
        except Exception as error:
            self._done.set_exception(error)

    @property
    def idle(self) -> bool:
        """Whether :meth:`result` would return at once."""
        return self._done.done()

    def result(self) -> Any:
        """The result of the last action, once it is done. Raises what went wrong, as QuernError."""
        try:
            return self._done.result()
        except QuernError:
            raise
        except Exception as error:
            raise QuernError(describe(error)) from error

    def close(self) -> None:
        """Stop, and return when nothing is written any more."""


class Thread(Background):
    """Executes everything in a thread of this process."""

    def __init__(self) -> None:
        super().__init__(Memory())
        self._thread = ThreadPoolExecutor(1, "checkpoint writer")

    def _start(self, action: Callable[[], Any]) -> None:
        self._done = self._thread.submit(action)

    def close(self) -> None:
        """Wait for the current work: a thread cannot be killed, and its files must not be cleaned up meanwhile."""
        self._thread.shutdown()


class Process(Background):
    """Does everything in a process of its own (``python -m quern.train.checkpoint.save.writer``), asked in lines
    (:mod:`.messages`)."""

    def __init__(self) -> None:
        self.memory: Memory | None = Memory(shared=True)
        self._files: Sequence[TensorFile] = ()
        self._metadata: bytes | None = None
        self._informed = False
        """Whether this process knows the metadata."""
        self._child = self._spawn()

    def _spawn(self) -> Child:
        memory = self.memory
        assert memory is not None
        assert memory.descriptor is not None
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return Child([*_COMMAND, str(memory.descriptor)], pass_fds=[memory.descriptor], env=environment)

    def _revive(self) -> None:
        """Another process, which knows what the dead one knew."""
        if self._child.status() is not None:
            self._child.end(0.0)
            self._child, self._informed = self._spawn(), False
            self._child.send(to_line("lay_out", self._files))

    def lay_out(self, files: Sequence[TensorFile]) -> None:
        self._revive()
        self._files = files
        self._child.send(to_line("lay_out", self._files))

    def write(self, folder: str, fetch: Fetch) -> None:
        self._revive()
        self._child.send(to_line("write", folder))

    def publish(self, asked: Publication) -> None:
        self._revive()
        if asked.metadata is not None:
            self._metadata, self._informed = asked.metadata, False
        asked = replace(asked, metadata=None if self._informed else self._metadata)
        self._informed = True
        self._child.send(to_line("publish", asked))

    @property
    def idle(self) -> bool:
        return not self._child.idle

    def result(self) -> Any:
        line = self._child.receive()
        if line is None:
            code = self._child.status()
            raise QuernError(f"the checkpoint writer (process {self._child.pid}) ended with code {code}")
        try:
            kind, found = from_line(line)
        except ValueError:
            raise QuernError(f"the checkpoint writer said {line[:200]!r}; expected a message") from None
        if kind == "failed":
            raise QuernError(found)
        return found

    def close(self) -> None:
        self._child.end(_GRACE_S)
        if self.memory is not None:
            self.memory.close()


BACKGROUNDS: Mapping[str, Callable[[], Background]] = {"sync": Background, "thread": Thread, "process": Process}
"""By ``checkpoint.mode``."""
