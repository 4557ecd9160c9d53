"""Sends a run's metrics to one tracker, in a process of its own that follows ``metrics.jsonl`` and ``ledger.jsonl``.

``python -m quern.train.trackers.worker RUN TRACKER ATTEMPT SECONDS``. The files are the queue: what cannot be sent yet
stays in them, and a later start sends it. A failure is said once and tried again, at longer and longer intervals. The
trainer writes how it ends to standard input; where that ends without a word, the trainer was killed. What is left is
then sent in SECONDS, or SIGALRM ends this process, whatever the tracker's library does.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import select
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import IO, Any

from quern import storage
from quern.config import load_config
from quern.errors import InputError, QuernError, named_line
from quern.train.config import TrainConfig
from quern.train.history.ledger import MOVES, read_ledger
from quern.train.trackers.backend import Backend, Opening, Point
from quern.train.trackers.branches import (
    FOLDER,
    Branch,
    Parent,
    State,
    branch_at,
    parent_of_fork,
    recipe_of,
    state_path,
)
from quern.train.trackers.numbers import FACTS, numbers_of, place_of

__all__ = ["Follower", "main"]

_CHUNK = 4 << 20
"""[bytes] Of metrics.jsonl, read at a time; no line is longer."""
_POLL_S, _LONGEST_PAUSE_S = 0.3, 60.0
_GROUPS = {"wandb": "WANDB_RUN_GROUP"}
_PROJECTS = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME", "trackio": "TRACKIO_PROJECT"}


class Follower:
    """Sends what a run's files have and the tracker has not. ``attempt``: the start of the trainer that is at work."""

    def __init__(self, run_dir: str, name: str, attempt: int) -> None:
        self._run_dir, self._name, self._attempt = run_dir, name, attempt
        self._config = load_config(os.path.join(run_dir, "config.yaml"), TrainConfig)
        self._described = storage.read_json(os.path.join(run_dir, "run.json"))
        self._path = state_path(run_dir, name)
        self._run_name = self._config.metrics.run_name or os.path.basename(os.path.abspath(run_dir))
        self._open = _opener(name)
        self._backend: Backend | None = None
        self._entries: list[dict[str, Any]] = []
        self._read = -1
        found = State.read(self._path)
        self.state = found or State(group="")

    def advance(self) -> bool:
        """Send a part of what is new; whether there was any. After an error the state is what the tracker has.

        Raises:
            Exception: whatever the tracker's library raises.
        """
        self._read_entries()
        before = state = self.state
        points: list[Point] = []
        for end, row in self._lines(state.bytes):
            attempt = row.get("attempt", state.attempt)
            if row["kind"] == "step" and (attempt > state.attempt or not state.branches):
                state = self._facts(state, points, attempt, math.inf)
                self._send(points, state)
                state, points = self._begin(state, attempt, row), []
            if (place := place_of(row)) > state.place:
                state = self._facts(state, points, state.attempt + 1, row["step"])
                points.append(Point(state.points, row["step"], numbers_of(row), _ms(row["time"])))
                state = replace(state, place=place, points=state.points + 1)
            state = replace(state, bytes=end)
        if state.bytes == before.bytes:  # a fact of a later step than the last line's may stand behind lines to come
            state = self._facts(state, points, state.attempt + 1, math.inf)
        self._send(points, state)
        return self.state != before

    def close(self, how: str) -> None:
        """End the tracker's run; ``how``: see :class:`Backend`."""
        if self.state.branches and not self.state.ended:
            self._opened(None).close(how)
            self._save(replace(self.state, ended=how))

    def _send(self, points: list[Point], state: State) -> None:
        if points:
            self._opened(None).log(points)
            state = replace(state, ended="")
        if state != self.state:
            self._save(state)

    def _save(self, state: State) -> None:
        self.state = state
        state.write(self._path)

    def _begin(self, state: State, attempt: int, row: Mapping[str, Any]) -> State:
        """Open the branch in which ``attempt`` is, if it is another one."""
        recipe = recipe_of(self._config) if attempt == self._attempt else None
        again = place_of(row) <= state.place
        found = branch_at(state, self._entries, attempt, recipe=recipe, again=again)
        if found is None:
            return replace(state, attempt=attempt, recipe=recipe or state.recipe)
        if self._backend is not None:
            self._backend.close("left")
            self._backend = None
        opened, parent = found
        if not state.branches:
            opened, parent = self._first(opened, parent)
        backend = self._opened(parent, opened)
        branch = Branch(backend.id, int(max(0, opened.place)), attempt, parent.id if parent else None)
        self._save(replace(opened, ended="", branches=(*opened.branches, branch)))
        return self.state

    def _first(self, state: State, parent: Parent | None) -> tuple[State, Parent | None]:
        fork = parent_of_fork(self._name, self._entries)
        group = self._config.metrics.group or os.environ.get(_GROUPS.get(self._name, ""), "")
        if fork is not None:
            parent, group = fork[0], group or fork[1] or ""
            history = max(place for place, entry in enumerate(self._entries) if entry["kind"] == "fork") + 1
            state = replace(state, entries=max(state.entries, history))
        return replace(state, group=group or f"{self._run_name}-{uuid.uuid4().hex[:8]}"), parent

    def _opened(self, parent: Parent | None, new: State | None = None) -> Backend:
        if self._backend is None:
            metrics, state = self._config.metrics, new or self.state
            project = metrics.project or os.environ.get(_PROJECTS[self._name]) or "quern"
            name = self._run_name
            if parent is not None:
                name += f" from step {parent.step}, start {state.attempt}"
            self._backend = self._open(
                Opening(
                    self._run_dir, state.branches[-1].id if new is None else None, project, name, state.group,
                    metrics.tags, self._config.model_dump(mode="json", exclude={"on_event"}), self._described, parent,
                )
            )  # fmt: skip
            if new is None and state.ended:
                self._save(replace(self.state, ended=""))
        return self._backend

    def _facts(self, state: State, points: list[Point], stop: int, most: float) -> State:
        """Append what the ledger says next of the starts before ``stop`` that are of the present branch, up to step
        ``most``; returns the state behind it."""
        done, number = state.entries, state.points
        if done == len(self._entries) or self._entries[done].get("step", 0) > most:
            return state  # asked for every row
        attempt = sum(entry["kind"] in MOVES for entry in self._entries[:done]) - 1
        for entry in self._entries[done:]:
            attempt += entry["kind"] in MOVES
            if not state.branches or attempt >= stop or entry.get("step", 0) > most:
                break
            done += 1
            if entry["kind"] in FACTS and attempt >= state.branches[-1].attempt:
                step = max(math.ceil(max(0.0, state.place)), entry["step"])
                fact = {FACTS[entry["kind"]]: float(entry["step"])}
                points.append(Point(number, step, fact, _ms(entry["time"])))
                number += 1
        return replace(state, entries=done, points=number)

    def _read_entries(self) -> None:
        path = os.path.join(self._run_dir, "ledger.jsonl")
        if os.path.exists(path) and (size := os.path.getsize(path)) != self._read:
            self._entries, self._read = read_ledger(path), size

    def _lines(self, start: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """The whole lines from byte ``start`` on of metrics.jsonl, each with where it ends; damaged ones say so."""
        path = os.path.join(self._run_dir, "metrics.jsonl")
        with open(path, "rb") as file:
            file.seek(start if start <= os.fstat(file.fileno()).st_size else 0)
            end = file.tell()
            for line in file.read(_CHUNK).split(b"\n")[:-1]:
                end += len(line) + 1
                try:
                    row = json.loads(line)
                    _ms(row["time"]), place_of(row), numbers_of(row), int(row.get("attempt", 0))
                except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
                    row = {"kind": "damaged", "step": -2}
                yield end, row


def _opener(name: str) -> Callable[[Opening], Backend]:
    """What opens a run of tracker ``name``; imports its library.

    Raises:
        Exception: whatever the import raises.
    """
    if name == "mlflow":
        from quern.train.trackers.mlflow_run import MlflowRun

        return MlflowRun
    if name == "wandb":
        from quern.train.trackers.wandb_run import WandbRun

        return WandbRun
    from quern.train.trackers.trackio_run import TrackioRun

    return TrackioRun


def _ms(time: str) -> int:
    return int(datetime.fromisoformat(time).timestamp() * 1000)


def main(run_dir: str, name: str, attempt: int, timeout_s: float, answers: IO[str]) -> None:
    """Follow the run until standard input ends. ``answers`` gets a JSON line each time that something is new."""

    def say(**line: Any) -> None:
        print(json.dumps(line), file=answers, flush=True)

    word, ended, pause, told, follower = b"", False, _POLL_S, False, None
    os.makedirs(os.path.join(run_dir, FOLDER), exist_ok=True)
    with open(os.path.join(run_dir, FOLDER, f"{name}.lock"), "ab", opener=storage.open_own) as lock:
        while True:
            try:
                # the worker of a trainer that was killed may still be sending
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if follower is None:
                    follower = Follower(run_dir, name, attempt)
                    say(bytes=follower.state.bytes)
                while follower.advance():
                    say(bytes=follower.state.bytes)
                say(bytes=follower.state.bytes)
                pause, told = _POLL_S, False
                if ended:
                    follower.close(word.decode() or "killed")
                    return
            except BlockingIOError:
                if ended:
                    return  # that one, or the worker of a later start, sends what is left
            except Exception as error:
                if not told:
                    say(failed=str(error) if isinstance(error, QuernError) else named_line(error))
                    told = True
                if isinstance(error, InputError | ImportError):  # will not be otherwise
                    return
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            until = time.monotonic() + (min(pause, 1.0) if ended else pause)
            while (left := until - time.monotonic()) > 0:
                if ended or not select.select([0], [], [], left)[0]:
                    time.sleep(left if ended else 0)
                    continue
                if not (found := os.read(0, 100)):
                    signal.setitimer(signal.ITIMER_REAL, timeout_s)
                    ended = True
                    break
                word = (word + found).strip()


if __name__ == "__main__":
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), said)
