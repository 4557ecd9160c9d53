"""One row of the suite in a process of its own: ``python row.py MODULE:FUNCTION SPEC RESULT``; JSON in and out."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
for place in (HERE.parent, HERE.parents[1]):  # beside this file's own folder, which Python puts first
    sys.path.insert(1, str(place))

from parts import SkipError  # noqa: E402


def main(function: str, spec: str, result: str) -> None:
    module, _, name = function.partition(":")
    try:
        found = {"measures": getattr(importlib.import_module(module), name)(json.loads(spec))}
    except SkipError as error:
        found = {"measures": [], "skipped": str(error)}
    Path(result).write_text(json.dumps(found, ensure_ascii=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
