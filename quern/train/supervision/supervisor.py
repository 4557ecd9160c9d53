"""Starts the ranks of a run on this machine, and again after a failure: they go on from the newest whole checkpoint.

Imports no torch.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence

from quern.errors import HUNG, STOPPED, GoBackError, InputError
from quern.train.processes import launch
from quern.train.supervision import beats, out_of_memory, tracebacks
from quern.train.supervision.events import Events
from quern.train.supervision.restarts import Attempt, Restarts

__all__ = ["Supervisor"]


class Supervisor:
    """``nproc`` processes of ``command`` with torchrun's environment.

    One that fails ends the others. A signal to this process goes to all, and ends the restarts. ``tell`` prints a line.
    """

    def __init__(
        self, run_dir: str, command: Sequence[str], nproc: int, restarts: Restarts, events: Events,
        tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._run_dir, self._command, self._nproc = run_dir, command, nproc
        restarts.places = [*range(nproc)]
        self._restarts, self._events, self._tell = restarts, events, tell
        self._asked = False

    def run(self) -> Attempt:
        """Start the ranks until they end well, or are not started again; returns how they have ended last."""
        tracebacks.clear(self._run_dir)  # those of a failure stay while the ranks are started again
        while True:
            attempt = self._attempt()
            if attempt.said is not None:
                self._tell(f"error: {attempt.said}")
            wait_s = self._restarts.wait_s(attempt)
            if attempt.code not in (0, InputError.exit_code):
                event = {STOPPED: "stopped", GoBackError.exit_code: "goes_back"}.get(attempt.code, "failed")
                self._events.tell(
                    "stopped" if attempt.asked else event, code=attempt.code, rank=attempt.rank, step=attempt.step,
                    said=attempt.said, restarts=self._restarts.done,
                    starts_again_in_s=wait_s, why_not=self._restarts.why,
                )  # fmt: skip
            if wait_s is None:
                return attempt
            if attempt.code == GoBackError.exit_code or attempt.adapted:
                continue  # a rank says it
            where = "before its first step" if attempt.step is None else f"in step {attempt.step}"
            if (gone := self._restarts.left_out) is not None:
                self._tell(f"rank {gone} of {self._nproc} has failed twice in a row: it goes on without (--min-nproc)")
            times = f"{self._restarts.done} of {self._restarts.most}"
            self._tell(f"failed {where}: started again in {wait_s:.0f} s (restart {times})")
            if self._waited(wait_s):
                return attempt

    def _waited(self, wait_s: float) -> bool:
        """Whether a signal has asked for the end before ``wait_s`` were over."""
        end = time.monotonic() + wait_s
        with launch.listening(lambda number: self._on_signal((), number), lambda: None):
            while not self._asked and time.monotonic() < end:
                time.sleep(0.1)
        return self._asked

    def _attempt(self) -> Attempt:
        began, adapted = time.time(), out_of_memory.count(self._run_dir)
        with tempfile.NamedTemporaryFile(prefix="quern-ranks-") as file:
            environments = beats.environments_with(file.name, launch.environments(self._nproc, self._restarts.places))
            with launch.started(self._command, environments, self._on_signal) as workers:
                code = launch.wait(workers) or 0
                codes = [worker.poll() for worker in workers]
                code = HUNG if HUNG in codes else code  # the others may have failed of its end
                launch.abort(workers)
                failure = tracebacks.first_failure(self._run_dir, codes, began) if code else None
            steps = beats.read(file.fileno())
        rank = None if failure is None else failure.rank
        reached = [step for step in steps if step is not None]
        return Attempt(
            code if code >= 0 else 128 - code, self._asked, rank,
            steps[rank] if rank is not None else max(reached, default=None),
            out_of_memory.count(self._run_dir) > adapted,
            None if failure is None else failure.said,
        )  # fmt: skip

    def _on_signal(self, workers: Sequence[launch.Worker], number: int) -> None:
        self._asked = True
        launch.send(workers, number)
