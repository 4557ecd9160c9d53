"""Has a run that ran out of memory go on with settings that need less: the same samples, and the same sums but for
rounding. ``RUN/out_of_memory.jsonl`` has a line for each time, which every later start reads.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from typing import Any

from quern.errors import InputError, named_line
from quern.filesystem import open_own
from quern.train.config import TrainConfig

__all__ = ["FILE", "count", "less", "note", "settled"]

FILE = "out_of_memory.jsonl"


def settled(config: TrainConfig) -> TrainConfig:
    """``config`` with what the run has learned: each line about these settings asks for the next ones.

    Raises:
        InputError: a line is damaged; the file and the line are named.
    """
    for own in _lines(config.run_dir):
        if own["settings"] == _settings(config) and (after := less(config)) is not None:
            config = after
    return config


def note(config: TrainConfig, rank: int, step: int, error: BaseException) -> bool:
    """Write that ``rank`` has run out of memory with ``config``; whether the next start has other settings. Nothing is
    written where it has not."""
    if less(config) is None:
        return False
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"), "rank": rank, "step": step,
        "settings": _settings(config), "error": named_line(error)[:300],
    }  # fmt: skip
    with open(os.path.join(config.run_dir, FILE), "ab", opener=open_own) as file:
        file.write((json.dumps(line) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())
    return True


def count(run_dir: str) -> int:
    """How often the run has run out of memory, and has another setting to try."""
    return len(_lines(run_dir))


def _settings(config: TrainConfig) -> dict[str, Any]:
    return {"micro_batch": config.micro_batch, "activation_checkpointing": config.activation_checkpointing}


def less(config: TrainConfig) -> TrainConfig | None:
    """The next settings by ``out_of_memory``; None: there are none."""
    policy, half = config.out_of_memory, config.micro_batch // 2
    if policy == "full_checkpointing" and config.activation_checkpointing != "full":
        every = {"activation_checkpointing_layers": None, "activation_memory_budget": None}
        return config.model_copy(update={"activation_checkpointing": "full", **every})
    if policy == "halve_micro_batch" and half and config.micro_batch % 2 == 0:
        return config.model_copy(update={"micro_batch": half})
    return None


def _lines(run_dir: str) -> list[dict[str, Any]]:
    path = os.path.join(run_dir, FILE)
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")[:-1]  # what follows the last newline is torn, or empty
    except (FileNotFoundError, NotADirectoryError, ValueError):  # what cannot be a folder is refused elsewhere
        return []
    found = []
    for number, line in enumerate(lines, 1):
        try:
            own = json.loads(line)
            own["settings"]["micro_batch"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise InputError(f"{path}: line {number}: expected settings with micro_batch, got {line[:60]!r}") from None
        found.append(own)
    return found
