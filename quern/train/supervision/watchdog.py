"""Notices that a rank hangs, names the one that the others wait for, and ends the run with exit code 5.

Each rank notes in which phase of which step it is. A thread beside it compares how long that takes with how long it
took before, and asks the store of the process group whether another rank has raised the alarm. On an alarm every rank
writes the stacks of its threads and its record of collectives, and says in the store where it is; the lowest rank that
does so names those that say nothing, or else those that are furthest behind.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from quern.errors import HUNG
from quern.train.config import TrainConfig
from quern.train.debug import recorder
from quern.train.processes import launch
from quern.train.processes.ranks import Ranks
from quern.train.supervision import tracebacks

__all__ = ["PHASES", "Limits", "Watchdog", "culprits"]

PHASES = ("data", "doremi", "forward", "backward", "reduce", "recompute", "optimizer", "metrics", "links",
          "validation", "save", "end")  # fmt: skip
"""In the order of a step. ``save`` and ``end`` wait for disks and stores, and may take as long as they like: ranks that
wait for each other there keep each other alive."""

_ALARM, _STORE_S = "quern/hang", 10.0
_FORGETS = 0.999
"""A phase's longest time counts for less with each that follows: after 700, half."""


@dataclass(frozen=True)
class _Place:
    step: int
    phase: str
    since: float


class Limits:
    """How long each phase may take, learned from how long it took. ``unknown_s``: before that. ``most_s``: which is not
    surpassed, unless twice the longest time is more."""

    def __init__(self, factor: float, least_s: float, unknown_s: float, most_s: float = math.inf) -> None:
        self._factor, self._least_s, self._unknown_s, self._most_s = factor, least_s, unknown_s, most_s
        self._longest: dict[str, float] = {}

    def learn(self, phase: str, seconds: float) -> None:
        """One has ended."""
        self._longest[phase] = max(seconds, _FORGETS * self._longest.get(phase, 0.0))

    def of(self, phase: str) -> float:
        """In seconds."""
        known = math.inf if phase in ("save", "end") else self._longest.get(phase)
        if known is None:
            return self._unknown_s
        return max(2 * known, min(self._most_s, max(self._least_s, self._factor * known)))


class Watchdog:
    """Watches within its block, where there are several ranks: one alone waits for nobody. ``first_step``: of this
    start; nothing is learned from it, as it compiles."""

    def __init__(self, config: TrainConfig, ranks: Ranks, first_step: int) -> None:
        own = config.watchdog
        self._run_dir, self._ranks, self._first_step = config.run_dir, ranks, first_step
        # before a collective's own time-out, which names a connection
        most_s = 0.8 * config.comm.timeout_s
        self._limits = Limits(own.factor, own.least_s, config.comm.first_timeout_s, most_s)
        # one store serves all ranks: it is asked 2,000 times a second at most
        self._poll_s = max(min(1.0, own.least_s / 4), ranks.world / 2000)
        self._place: _Place | None = None
        self._ends = threading.Event()
        watches = own.enabled and ranks.world > 1
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True) if watches else None
        self._store: Any = None
        self._asking: threading.Thread | None = None

    def enter(self, phase: str, step: int | None = None) -> None:
        """This rank begins a phase, of ``step`` or of the step it is in."""
        now, before = time.monotonic(), self._place
        if before is None:
            self._place = _Place(0 if step is None else step, phase, now)
            return
        if before.step > self._first_step:
            self._limits.learn(before.phase, now - before.since)
        self._place = _Place(before.step if step is None else step, phase, now)

    def __enter__(self) -> Watchdog:
        if self._thread is not None:
            # a connection of its own: the main thread may hang in a call of the other
            shared: Any = dist.distributed_c10d._get_default_store()
            self._store = shared.clone()
            self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._place = None
        self._ends.set()

    def _watch(self) -> None:
        stopped = time.monotonic()
        while True:
            before = time.monotonic()
            if self._ends.wait(self._poll_s):
                return
            now, place = time.monotonic(), self._place
            if now - before > self._poll_s + 5:
                stopped = now  # this process was stopped itself, as by SIGSTOP, and has not seen that time pass
            if place is None:
                continue
            late = now - max(place.since, stopped) > self._limits.of(place.phase)
            try:
                asked = late or self._said(_ALARM)
                if late:
                    self._ask("set", _ALARM, b"1")
            except Exception as error:  # of the store, as its process hangs or is gone
                if late and not self._ends.is_set():
                    self._write_what_it_does(place)
                    holds = "it holds" if launch.launched() else "it or the launcher holds"
                    self._leave(f"hangs: {holds} the store, which does not answer ({error})".split("\n")[0][:300], 0)
                continue
            if asked:
                self._follow_alarm(place)

    def _follow_alarm(self, place: _Place) -> None:
        """Say where this rank is, and end; the lowest rank that says so tells who is waited for."""
        seconds = time.monotonic() - place.since
        said = {"step": place.step, "phase": place.phase, "seconds": round(seconds, 1), "host": socket.gethostname()}
        try:
            self._ask("set", f"{_ALARM}/{self._ranks.rank}", json.dumps(said).encode())
            self._write_what_it_does(place)
            time.sleep(3 * self._poll_s + 1)  # the others see the alarm
            first = next(rank for rank in range(self._ranks.world) if self._said(f"{_ALARM}/{rank}"))
            if first == self._ranks.rank:
                guilty, what = culprits(self._answers(), self._ranks.world)
                self._leave(what, guilty[0], then=lambda: self._ask("set", f"{_ALARM}/told", b"1"))
            end = time.monotonic() + 2 * _STORE_S
            while not self._said(f"{_ALARM}/told") and time.monotonic() < end:
                time.sleep(0.1)
        finally:  # the store may be gone with the rank that has told
            os._exit(HUNG)

    def _answers(self) -> dict[int, Any]:
        """What ranks say of where they are, once no more than one is silent; else after :data:`_STORE_S`, as a rank on
        a busy machine is late to look."""
        known, end = dict[int, Any](), time.monotonic() + _STORE_S
        while True:
            for rank in range(self._ranks.world):
                if rank not in known and self._said(key := f"{_ALARM}/{rank}"):
                    known[rank] = json.loads(self._ask("get", key))
            if len(known) >= self._ranks.world - 1 or time.monotonic() > end:
                return known
            time.sleep(0.2)

    def _said(self, key: str) -> bool:
        return bool(self._ask("check", [key]))

    def _ask(self, call: str, *arguments: Any) -> Any:
        """Call the store, which has no time-out of its own where the process that holds it is stopped.

        Raises:
            TimeoutError: it has not answered for :data:`_STORE_S`, nor has a call before.
        """
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append((getattr(self._store, call)(*arguments), None))
            except Exception as error:  # told to the thread that asks
                answers.append((None, error))

        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=ask, name="watchdog's store", daemon=True)
            self._asking.start()
        self._asking.join(_STORE_S)
        if not answers:
            raise TimeoutError(f"for {_STORE_S:.0f} s")
        answer, error = answers[0]
        if error is not None:
            raise error
        return answer

    def _leave(self, what: str, guilty: int, then: Any = None) -> None:
        file = tracebacks.file_of(self._run_dir, guilty)
        try:
            with tracebacks.opened(file) as stream:
                stream.write(f"{time.time():.6f} {what}\n")
        except OSError:
            file = ""
        if not launch.launched() or not file:  # else the launcher reads it
            print(f"error: rank {guilty}: {what}", file=sys.stderr, flush=True)
        if then is not None:
            then()
            time.sleep(1.0)  # the others hear it, and of a store that is gone with this rank they would hear nothing
        os._exit(HUNG)

    def _write_what_it_does(self, place: _Place) -> None:
        waits = TimeoutError(f"timed out: another rank is waited for in {place.phase}")
        recorder.keep(self._run_dir, self._ranks.rank, waits)
        head = f"rank {self._ranks.rank}: in {place.phase} of step {place.step}"
        file = tracebacks.stacks_of(self._run_dir, self._ranks.rank)
        try:
            with tracebacks.opened(file) as stream:
                print(head, file=stream, flush=True)
                faulthandler.dump_traceback(stream)
        except OSError:
            pass


def culprits(places: Mapping[int, Mapping[str, Any]], world: int) -> tuple[list[int], str]:
    """The ranks that the others wait for, and what they are at in words. ``places``: what each rank that answered says,
    its ``step``, ``phase``, ``seconds`` in it and ``host``."""
    silent = [rank for rank in range(world) if rank not in places]
    if silent:
        where = [f"{own['phase']} of step {own['step']}" for own in places.values()]
        most = max(set(where), key=where.count)
        return silent, f"hangs: {_named(silent)} not answer, and the others wait in {most}"
    # of a pipeline the last stage alone knows when backward begins
    order = ["forward" if phase == "backward" else phase for phase in PHASES]
    by_progress = {rank: (own["step"], order.index(order[PHASES.index(own["phase"])])) for rank, own in places.items()}
    least = min(by_progress.values())
    behind = [rank for rank, progress in by_progress.items() if progress == least]
    own = places[behind[0]]
    at = f"{own['phase']} of step {own['step']} on {own['host']}, for {own['seconds']:.0f} s"
    if len(behind) == world:
        return behind, f"hangs: all ranks are in {at}; quern train debug says in which collective each is"
    return behind, f"hangs: {_named(behind)} not get further than {at}"


def _named(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} does"
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more} do"
