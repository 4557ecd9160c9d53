"""Writes what happened to a run to ``RUN/events.jsonl``, and gives each event to a command of the user."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import threading
from datetime import UTC, datetime
from typing import Any

from quern.filesystem import open_own

__all__ = ["EVENTS_FILE", "LIMIT_S", "Events"]

log = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"

LIMIT_S = 60.0
"""What a command has not done by then is ended."""


class Events:
    """The events of a run.

    ``command``: is started once an event, in the working folder, by no shell; the event is one line of JSON on its
    standard input. What it says goes where the run's output goes. Neither its failure nor its time is the run's.
    """

    def __init__(self, run_dir: str, command: str | None) -> None:
        self._run_dir, self._command = run_dir, None if command is None else shlex.split(command)
        self._calls: list[threading.Thread] = []

    def tell(self, event: str, **facts: Any) -> None:
        """Append the event, and start the command."""
        row = {"event": event, "time": datetime.now(UTC).isoformat(timespec="milliseconds")}
        line = json.dumps({**row, "run_dir": os.path.abspath(self._run_dir), **facts}, allow_nan=False) + "\n"
        path = os.path.join(self._run_dir, EVENTS_FILE)
        try:
            os.makedirs(self._run_dir, exist_ok=True)
            with open(path, "ab", opener=open_own) as file:
                file.write(line.encode())
        except OSError as error:
            log.warning("%s: the event %s could not be written (%s)", path, event, error.strerror)
        if self._command:
            call = threading.Thread(target=self._call, args=(line,), daemon=True)
            call.start()
            self._calls.append(call)

    def close(self) -> None:
        """Wait for the commands that are under way, each at most :data:`LIMIT_S`."""
        for call in self._calls:
            call.join(LIMIT_S)

    def _call(self, line: str) -> None:
        command = self._command
        assert command is not None
        try:
            done = subprocess.run(command, input=line.encode(), timeout=LIMIT_S, check=False, start_new_session=True)
        except subprocess.TimeoutExpired:
            log.warning("on_event: %s was ended after %.0f s", command[0], LIMIT_S)
        except OSError as error:
            log.warning("on_event: %s cannot be started (%s)", command[0], error.strerror)
        else:
            if done.returncode:
                log.warning("on_event: %s ended with exit code %d", command[0], done.returncode)
