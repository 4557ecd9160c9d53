"""Starts the ranks of a run on this machine, and again after a failure: they go on from the newest whole checkpoint.

Imports no torch.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from quern.errors import FAILING, HUNG, STOPPED, GoBackError, InputError, named_line
from quern.train.processes import launch
from quern.train.processes.waiting import WaitingProcesses
from quern.train.supervision import beats, out_of_memory, tracebacks
from quern.train.supervision.events import Events
from quern.train.supervision.named_ranks import named_ranks
from quern.train.supervision.restarts import Attempt, Restarts
from quern.words import counted

__all__ = ["Supervisor"]


class Supervisor:
    """``nproc`` processes of ``command`` with torchrun's environment.

    One that fails ends the others. A signal to this process goes to all, and ends the restarts. ``tell`` prints a line.
    With ``spares``, so many places beside those of the ranks, processes wait to be the next start's ranks; ``command``
    then calls :func:`quern.train.processes.waiting.wait` first.
    ``replace_slow``: a restart gives ranks that were named as slow to spare places too.
    """

    def __init__(
        self, run_dir: str, command: Sequence[str], nproc: int, restarts: Restarts, events: Events,
        tell: Callable[[str], None], spares: int = 0, *, replace_slow: bool = False,
    ) -> None:  # fmt: skip
        self._run_dir, self._command, self._nproc = run_dir, command, nproc
        self._waiting = WaitingProcesses(command) if spares else None
        self._num_places = nproc + spares
        restarts.places = [*range(nproc)]
        restarts.spares = [*range(nproc, nproc + spares)]
        self._restarts, self._events, self._tell = restarts, events, tell
        self._replace_slow = replace_slow
        self._used = restarts.places
        """By rank, the places of the newest start."""
        self._asked = False

    def run(self) -> Attempt:
        """Start the ranks until they end well, or are not started again; returns how they have ended last."""
        tracebacks.clear(self._run_dir)  # those of a failure stay while the ranks are started again
        with self._waiting or nullcontext():
            return self._run()

    def _run(self) -> Attempt:
        while True:
            attempt = self._attempt()
            if attempt.said is not None:
                self._tell(f"error: {attempt.said}")
            if self._waiting is not None:
                sound = [place for place in self._restarts.spares if not self._waiting.failed(place)]
                self._restarts.spares = sorted(sound, key=self._waiting.ready, reverse=True)
            wait_s = self._restarts.wait_s(attempt)
            if attempt.code not in (0, InputError.exit_code):
                event = {STOPPED: "stopped", GoBackError.exit_code: "goes_back"}.get(attempt.code, "failed")
                self._events.tell(
                    "stopped" if attempt.asked else event, code=attempt.code, rank=attempt.rank, step=attempt.step,
                    said=attempt.said, restarts=self._restarts.done,
                    starts_again_in_s=wait_s, why_not=self._restarts.why, **self._change(),
                )  # fmt: skip
            if wait_s is None:
                return attempt
            if attempt.code == GoBackError.exit_code or attempt.adapted:
                continue  # a rank says it
            where = "before its first step" if attempt.step is None else f"in step {attempt.step}"
            left = len(self._restarts.spares) + sum(taken is not None for _, taken in self._restarts.moves)
            for gone, taken in self._restarts.moves:
                left -= taken is not None
                self._tell(self._moved(attempt, gone, taken, counted(left, "spare")))
            times = f"{self._restarts.done} of {self._restarts.most}"
            when = f"in {wait_s:.0f} s" if wait_s else "at once"
            self._tell(f"failed {where}: started again {when} (restart {times})")
            if self._waited(wait_s):
                return attempt

    def _moved(self, attempt: Attempt, gone: int, taken: int | None, left: str) -> str:
        """What is said of a place that is left; then so many spare ones are ``left``."""
        rank = self._used.index(gone)
        why = "is slow" if rank in attempt.slow and not (attempt.own and rank == attempt.rank) else "has failed"
        why = "has a GPU that fails" if rank in attempt.failing else why
        if taken is not None:
            return f"place {gone} {why}: place {taken} takes over rank {rank}, {left} left"
        why = why if rank in attempt.failing else "has failed twice in a row"
        who = f"rank {gone} of {self._nproc}" if self._num_places == self._nproc else f"place {gone}"
        return f"{who} {why}: it goes on without (--min-nproc)"

    def _change(self) -> dict[str, Any]:
        """Of an event, the places that are left and those that take over, and how many spare ones there are still."""
        if self._waiting is None:
            return {}
        return {"moves": [[*move] for move in self._restarts.moves], "spares": len(self._restarts.spares)}

    def _waited(self, wait_s: float) -> bool:
        """Whether a signal has asked for the end before ``wait_s`` were over."""
        end = time.monotonic() + wait_s
        with launch.listening(lambda number: self._on_signal((), number), lambda: None):
            while not self._asked and time.monotonic() < end:
                time.sleep(0.1)
        return self._asked

    def _attempt(self) -> Attempt:
        began, adapted = time.time(), out_of_memory.count(self._run_dir)
        self._used = places = [*self._restarts.places]
        spares = None if self._waiting is None else [*self._restarts.spares]
        made = launch.environments(self._num_places, places, spares)
        with tempfile.NamedTemporaryFile(prefix="quern-ranks-") as file:
            environments = beats.environments_with(file.name, made[: len(places)])
            beside = dict(zip(spares or (), made[len(places) :], strict=True))
            started = False

            def take(rank: int, environment: Mapping[str, str]) -> launch.Worker | None:
                return None if self._waiting is None else self._waiting.take(places[rank], environment)

            def look(failed: bool) -> bool:
                nonlocal started
                if self._waiting is not None and not (started or failed) and beats.first_ended(file.fileno()):
                    started = True
                    try:
                        self._waiting.keep(environments, beside)
                    except OSError as error:  # the run itself goes on
                        self._tell(f"warning: no processes wait for a restart: {named_line(error)}")
                return failed

            with launch.started(self._command, environments, self._on_signal, waiting=take) as workers:
                code = launch.wait(workers, look) or 0
                codes = [worker.poll() for worker in workers]
                code = next((own for own in (HUNG, FAILING) if own in codes), code)  # the others fail of its end
                launch.end(workers, signal.SIGABRT, 2.0)  # they write their stacks, where they can
                failure = tracebacks.first_failure(self._run_dir, codes, began) if code else None
            steps = beats.read(file.fileno())
        named = named_ranks(self._run_dir, began)
        failing = (named.failing or (codes.index(FAILING),)) if code == FAILING else ()
        rank = failing[0] if code == FAILING else None if failure is None else failure.rank
        reached = [step for step in steps if step is not None]
        return Attempt(
            code if code >= 0 else 128 - code, self._asked, rank,
            steps[rank] if rank is not None else max(reached, default=None),
            out_of_memory.count(self._run_dir) > adapted,
            code == FAILING or (failure is not None and failure.own), failing,
            named.slow if self._replace_slow else (),
            None if failure is None else failure.said,
        )  # fmt: skip

    def _on_signal(self, workers: Sequence[launch.Worker], number: int) -> None:
        self._asked = True
        launch.send(workers, number)
