"""Keeps processes that have imported what a rank imports, and makes one of them a rank by handing it the environment.

Imports no torch.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from quern.closes import Closes
from quern.errors import named_line
from quern.train.processes import launch

__all__ = ["WaitingProcesses", "handed", "wait"]

handed: dict[str, str] = {}
"""In a rank that had opened its device before: what it was handed of which devices are seen, for processes that it
starts."""

_WAITS = "QUERN_WAITS"
"""In the environment of a process that waits: the descriptor of its end of a pair of sockets, and ``spare`` where it
opens its device. It says that it is ready by a byte, is handed an environment as a line of JSON, and ends where the
line ends before that."""

_KEPT = ("CUDA_VISIBLE_DEVICES", launch.GPU)
"""What says which device is open stays."""

_ASKED = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""torch then looks for GPUs without CUDA's driver, which would keep to what it is shown first."""

_NICE = 10


@dataclass(frozen=True)
class _Waiting:
    worker: launch.Worker
    line: socket.socket
    place: int | None
    """Whose device it has opened."""
    threads: str
    """``OMP_NUM_THREADS``, which counts when torch is imported."""

    @property
    def ready(self) -> bool:
        with suppress(OSError):
            return bool(self.line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)) and self.worker.poll() is None
        return False

    def end(self) -> None:
        self.line.close()
        launch.kill([self.worker])


class WaitingProcesses(Closes):
    """Processes of ``command``, whose program calls :func:`wait` first. They end with this one, however it ends."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._waiting: list[_Waiting] = []
        self._pipe = [*os.pipe()]  # of launch.end_with_launcher, once they are ranks

    def keep(self, ranks: Sequence[Mapping[str, str]], spares: Mapping[int, Mapping[str, str]]) -> None:
        """Start those that are missing: one for each rank's environment, without a device, and one for each spare place
        and its environment. End those that have another number of threads, or the device of a place that is none."""
        for own in self._waiting:
            strange = own.threads != ranks[0]["OMP_NUM_THREADS"] or (own.place is not None and own.place not in spares)
            if own.worker.poll() is not None or strange:
                own.end()
        self._waiting = [own for own in self._waiting if own.worker.returncode is None]
        there = [own.place for own in self._waiting]
        for environment in ranks[there.count(None) :]:
            self._waiting.append(self._start(None, environment))
        for place in spares.keys() - there:
            self._waiting.append(self._start(place, spares[place]))

    def _start(self, place: int | None, environment: Mapping[str, str]) -> _Waiting:
        ours, its = socket.socketpair()
        told = f"{its.fileno()} {'' if place is None else 'spare'}"
        own = {**environment, **_ASKED, _WAITS: told, launch.PIPE: str(self._pipe[0])}
        with its:
            fds = [its.fileno(), self._pipe[0]]
            worker = subprocess.Popen([*self._command], env=own, start_new_session=True, pass_fds=fds)
        return _Waiting(worker, ours, place, environment["OMP_NUM_THREADS"])

    def ready(self, place: int) -> bool:
        """Whether the process of a spare place waits."""
        return any(own.place == place and own.ready for own in self._waiting)

    def failed(self, place: int) -> bool:
        """Whether it has ended by itself, as it could not open the device."""
        return any(own.place == place and (own.worker.poll() or 0) > 0 for own in self._waiting)

    def take(self, place: int, environment: Mapping[str, str]) -> launch.Worker | None:
        """A process that is from now on the rank of ``environment``, on ``place``; None: none is ready."""
        fit = [own for own in self._waiting if own.place in (place, None) and own.ready]
        for own in sorted(fit, key=lambda own: own.place is None):
            if own.threads != environment["OMP_NUM_THREADS"]:
                continue
            told = {**environment, launch.PIPE: str(self._pipe[0])}
            self._waiting.remove(own)
            try:
                own.line.sendall(json.dumps(told).encode() + b"\n")
                own.line.close()
                return own.worker
            except OSError:  # it has just ended
                own.end()
        return None

    def close(self) -> None:
        """End those that wait."""
        while self._waiting:
            self._waiting.pop().end()
        while self._pipe:
            os.close(self._pipe.pop())


def wait(prepare: Callable[[], object], open_spare: Callable[[], object]) -> None:
    """In a process that :class:`WaitingProcesses` has started, call ``prepare`` at low priority, and on a spare place
    ``open_spare``, and return as the rank whose environment it is handed. In any other process return at once."""
    told = os.environ.pop(_WAITS, None)
    if told is None:
        return
    launch.end_with_launcher()
    descriptor, _, spare = told.partition(" ")
    import numpy as np  # noqa: F401  (its threads keep the priority of the one that starts them)

    failed: list[Exception] = []

    def run() -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # of this thread alone
        try:
            prepare()
        except Exception as error:
            failed.append(error)

    with socket.socket(fileno=int(descriptor)) as line, line.makefile("rb") as stream:
        thread = threading.Thread(target=run, name="prepare")
        thread.start()
        thread.join()
        try:
            if failed:
                raise failed[0]
            if spare:
                open_spare()
        except Exception as error:
            raise SystemExit(f"warning: a process cannot wait for its rank: {named_line(error)}") from None
        with suppress(OSError):
            line.sendall(b".")
        line_of_json = stream.readline()
    if not line_of_json.endswith(b"\n"):  # it is not needed any more
        os._exit(0)
    kept = {name: os.environ[name] for name in _KEPT} if spare else {}
    environment = json.loads(line_of_json)
    handed.update({name: environment[name] for name in kept if name in environment})
    os.environ.clear()
    os.environ.update(environment | kept)
