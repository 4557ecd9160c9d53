"""What a run that trackers follow leaves in its folder."""

from __future__ import annotations

import fcntl
import json
import time
from pathlib import Path
from typing import Any

from quern.train.trackers.branches import state_path


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def state(run: Path, name: str) -> dict[str, Any]:
    return json.loads((run / "trackers" / f"{name}.json").read_text())


def idle(run: Path, name: str, place: float) -> None:
    """Wait until the worker of a trainer that was killed has sent all up to ``place``, and has ended."""
    until = time.monotonic() + 120
    while not Path(state_path(str(run), name)).exists() or state(run, name)["place"] != place:
        assert time.monotonic() < until, f"{name}: has not sent what there is"
        time.sleep(0.05)
    with open(run / "trackers" / f"{name}.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
