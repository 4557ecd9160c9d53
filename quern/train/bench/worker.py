"""One rank of one row: ``python -m quern.train.bench.worker ROW``, started by :mod:`.run`.

ROW is a folder with ``spec.json``; ``result.<rank>.json`` is what this rank has to say. The process ends with its
launcher: nothing of a benchmark outlives it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from quern import storage
from quern.errors import InputError
from quern.train.__main__ import leave
from quern.train.config import TrainConfig
from quern.train.processes import launch
from quern.train.processes.agree import describe

__all__ = ["main"]


def main(folder: str) -> int:
    """Run the row; return the exit code."""
    launch.end_with_launcher()
    result = _run(json.loads(Path(folder, "spec.json").read_text()))
    storage.write_json(os.path.join(folder, f"result.{os.environ.get('RANK', '0')}.json"), result)
    return 1 if "error" in result else 0


def _run(spec: dict[str, Any]) -> dict[str, Any]:
    try:
        from quern.train.bench.measure import measure

        return measure(TrainConfig.model_validate(spec["config"]), spec["warm_up"])
    except Exception as error:
        traceback.print_exc()
        text = describe(error)
        kind = "refused" if isinstance(error, InputError) else "failed"
        if "out of memory" in text.lower():
            kind = "out_of_memory"
        return {"error": text, "kind": kind, "time": time.time()}


if __name__ == "__main__":
    leave(main(sys.argv[1]))
