"""``torchrun … -m quern.train.bench OPTIONS``, the same as ``quern bench``.

Exit codes: 0 every row has figures, 1 a row or the benchmark failed, 2 bad input.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from quern.errors import QuernError
from quern.train.__main__ import leave
from quern.train.bench.options import parse

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """What ``quern bench`` does with its arguments; returns the exit code."""
    options = parse(arguments)
    from quern.train.bench.run import bench  # torch takes seconds that a bad option need not wait for
    from quern.train.bench.table import table

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    document, first = bench(options, ["quern", "bench", *arguments], tell)
    if first:
        print(json.dumps(document, indent=2, ensure_ascii=False) if options.json else table(document))
    return 0 if all(row["ok"] for row in document["rows"]) else 1


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except QuernError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    leave(code)
