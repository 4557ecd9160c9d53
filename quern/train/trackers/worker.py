"""Sends a run's metrics to one tracker, in a process of its own that follows ``metrics.jsonl`` and ``ledger.jsonl``.

``python -m quern.train.trackers.worker RUN TRACKER SECONDS``. The files are the queue: what cannot be sent yet stays in
them, and a later start sends it. What failed is tried again, at longer and longer intervals. The trainer writes how it
ends to standard input; where that ends without a word, the trainer was killed. What is left is then sent in SECONDS, or
SIGALRM ends this process, whatever the tracker's library does.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

from quern import storage
from quern.config import load_config
from quern.errors import InputError, QuernError, named_line
from quern.train.config import TrainConfig
from quern.train.history.ledger import MOVES, read_ledger
from quern.train.history.metrics_file import METRICS_FILE, when
from quern.train.trackers.backends import BACKENDS, Backend, Opening, Point
from quern.train.trackers.board import numbers_of
from quern.train.trackers.branches import FOLDER, Branch, Parent, State, branch_at, parent_of_fork, state_path

__all__ = ["Follower", "main"]

_FACTS = {
    "checkpoint": "checkpoint/begun", "checkpoint_failed": "checkpoint/failed", "good": "checkpoint/good",
    "rollback": "run/went_back_to", "resume": "run/resumed_at", "stopped": "run/stopped_at", "end": "run/ended_at",
}  # fmt: skip
"""Of the ledger's kinds, those that are sent: the name under which their step is. What is known of a step itself, as
that it was skipped, stands in its line of metrics."""
_CHUNK = 4 << 20
"""[bytes] Of metrics.jsonl, read at a time; no line is longer."""
_POLL_S, _LONGEST_PAUSE_S = 0.3, 60.0
_PROJECTS = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME", "trackio": "TRACKIO_PROJECT"}


class _Row(NamedTuple):
    """A line of metrics that ends at byte ``end``. ``attempt``: -1 of one that is no step's. ``place``: where it stands
    among all of them: a validation after N steps is between steps N - 1 and N."""

    end: int
    attempt: int = -1
    place: float = -1.0
    step: int = 0
    numbers: Mapping[str, float] = {}
    time_ms: int = 0


class Follower:
    """Sends what the files of the run in ``run_dir`` have and tracker ``name`` has not."""

    def __init__(self, run_dir: str, name: str) -> None:
        self._run_dir, self._name = run_dir, name
        self._config = load_config(os.path.join(run_dir, "config.yaml"), TrainConfig)
        self._described = storage.read_json(os.path.join(run_dir, "run.json"))
        self._path = state_path(run_dir, name)
        self._backend: Backend | None = None
        self._entries, self._attempts, self._read = list[dict[str, Any]](), list[int](), -1
        self.state = State.read(self._path)

    def advance(self) -> bool:
        """Send a part of what is new; whether there was any. Raises whatever the tracker's library does; the state is
        then what the tracker has."""
        rows, before, points = list(self._rows()), self.state, list[Point]()
        self._read_entries()  # after the rows, so that it has the starts that these are of
        state = before
        for row in rows:
            if row.attempt > state.attempt:
                self._send(points, self._facts(state, points, row.attempt - 1, math.inf))
                state, points = self._begin(row.attempt), []
            if state.branches and row.place > state.place:
                state = self._facts(state, points, state.attempt, row.step)
                points.append(Point(state.points, row.step, row.numbers, row.time_ms))
                state = state.but(place=row.place, points=state.points + 1)
            state = state.but(bytes=row.end)
        if not rows:  # a fact of a later step than the last line's may stand behind lines to come
            state = self._facts(state, points, state.attempt, math.inf)
        self._send(points, state)
        return self.state != before

    def close(self, how: str) -> None:
        """End the tracker's run; ``how``: see :class:`Backend`."""
        if self.state.branches and not self.state.ended:
            self._opened().close(how)
            self._save(self.state.but(ended=how))

    def _send(self, points: list[Point], state: State) -> None:
        if points:
            self._opened().log(points)
            state = state.but(ended="")
        if state != self.state:
            self._save(state)

    def _save(self, state: State) -> None:
        self.state = state
        storage.publish_bytes(self._path, state.model_dump_json().encode() + b"\n")

    def _begin(self, attempt: int) -> State:
        """The state with which start ``attempt`` goes on; opens its branch, if that is another one."""
        state, metrics = self.state, self._config.metrics
        found = branch_at(state, self._entries, attempt)
        if found is None:
            return state.but(attempt=attempt)
        if self._backend is not None:
            self._backend.close("left")
        self._backend, (step, parent), group = None, found, state.group
        name = metrics.run_name or os.path.basename(os.path.abspath(self._run_dir))
        if not state.branches:
            parent, trunks = parent_of_fork(self._name, self._entries)
            given = metrics.group or (os.environ.get("WANDB_RUN_GROUP") if self._name == "wandb" else "")
            group = given or trunks or f"{name}-{uuid.uuid4().hex[:8]}"
        if parent is not None:
            name += f" from step {parent.step}, start {attempt}"
        ident = self._opened(name, group, parent).id
        branches = (*state.branches, Branch(id=ident, step=step, attempt=attempt, parent=parent and parent.id))
        self._save(state.but(group=group, attempt=attempt, place=float(step), points=0, ended="", branches=branches))
        return self.state

    def _opened(self, name: str = "", group: str = "", parent: Parent | None = None) -> Backend:
        """The newest branch's run, or a new one if it has a name."""
        if self._backend is None:
            metrics, config = self._config.metrics, self._config.model_dump(mode="json", exclude={"on_event"})
            project = metrics.project or os.environ.get(_PROJECTS[self._name]) or "quern"
            ident, group = (None, group) if name else (self.state.branches[-1].id, self.state.group)
            given = (self._run_dir, ident, project, name, group, metrics.tags, config, self._described, parent)
            self._backend = BACKENDS[self._name](Opening(*given))
        return self._backend

    def _facts(self, state: State, points: list[Point], attempt: int, step: float) -> State:
        """Append what the ledger says next, up to ``step`` of start ``attempt``; returns the state behind it."""
        while state.branches and (done := state.entries) < len(self._entries):
            own, entry = self._attempts[done], self._entries[done]
            if own > attempt or (own == attempt and entry.get("step", 0) > step):
                break
            state = state.but(entries=done + 1)
            if entry["kind"] in _FACTS and own >= state.branches[-1].attempt:
                place, fact = max(math.ceil(state.place), entry["step"]), {_FACTS[entry["kind"]]: float(entry["step"])}
                points.append(Point(state.points, place, fact, int(when(entry) * 1000)))
                state = state.but(points=state.points + 1)
        return state

    def _read_entries(self) -> None:
        path = os.path.join(self._run_dir, "ledger.jsonl")
        if (size := os.path.getsize(path)) != self._read:
            self._entries, self._read = read_ledger(path), size
            self._attempts = [*accumulate((entry["kind"] in MOVES for entry in self._entries), initial=-1)][1:]

    def _rows(self) -> Iterator[_Row]:
        """The next whole lines of metrics.jsonl; of a damaged one no more than where it ends."""
        with open(os.path.join(self._run_dir, METRICS_FILE), "rb") as file:
            file.seek(self.state.bytes if self.state.bytes <= os.fstat(file.fileno()).st_size else 0)
            end = file.tell()
            for line in file.read(_CHUNK).split(b"\n")[:-1]:
                end += len(line) + 1
                try:
                    row = json.loads(line)
                    attempt, place = (int(row.get("attempt", 0)), 0.5) if row["kind"] == "step" else (-1, 0.0)
                    place += row["step"]
                    yield _Row(end, attempt, place, row["step"], numbers_of(row), int(when(row) * 1000))
                except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
                    yield _Row(end)


def main(run_dir: str, name: str, timeout_s: float, answers: int) -> None:
    """Follow the run until standard input says how it ended. The file ``answers`` gets JSON lines: bytes that are sent,
    or what has failed."""

    def say(**line: Any) -> None:
        with suppress(BrokenPipeError):  # the trainer was killed
            os.write(answers, json.dumps(line).encode() + b"\n")

    word, ends, pause, follower = list[str](), threading.Event(), _POLL_S, None

    def listen() -> None:  # beside a call of the tracker's library, which may hang
        word.append(os.read(0, 100).decode().strip() or "killed")
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        ends.set()

    threading.Thread(target=listen, daemon=True).start()
    with open(os.path.join(run_dir, FOLDER, f"{name}.lock"), "ab", opener=storage.open_own) as lock:
        while True:
            how = word[0] if ends.is_set() else ""
            try:
                # the worker of a trainer that was killed may still be sending
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                follower = follower or Follower(run_dir, name)
                while follower.advance():
                    say(bytes=follower.state.bytes)
                say(bytes=follower.state.bytes)
                pause = _POLL_S
                if how:
                    follower.close(how)
                    return
            except BlockingIOError:
                if how:
                    return  # that one, or the worker of a later start, sends what is left
            except Exception as error:
                say(failed=str(error) if isinstance(error, QuernError) else named_line(error))
                if isinstance(error, InputError | ImportError):  # will not be otherwise
                    return
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            if how:
                time.sleep(min(pause, 1.0))
            else:
                ends.wait(pause)


if __name__ == "__main__":
    said = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), said)
