"""Tells from ``metrics.jsonl`` how far the newest attempt of a training run has got beyond what its ledger proves."""

from __future__ import annotations

import json
import os

__all__ = ["steps_of_metrics"]

#: The end of the file in which the last step is looked for.
_TAIL_BYTES = 1 << 16


def steps_of_metrics(run_dir: str, attempt: int) -> int:
    """How many steps were complete when the newest line of metrics.jsonl that is ``attempt``'s was written; 0 where no
    line says it."""
    try:
        with open(os.path.join(run_dir, "metrics.jsonl"), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # torn, or the rest of a line that began before the tail
            continue
        if isinstance(row, dict) and row.get("kind") == "step" and type(row.get("step")) is int:
            return row["step"] + 1 if row.get("attempt") == attempt else 0
    return 0
