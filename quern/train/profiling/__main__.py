"""``torchrun … -m quern.train.profiling CONFIG [key=value …] --out DIR``; without torchrun one process.

Exit codes: 0 the profile is in DIR, 1 it failed, 2 bad input.
"""

from __future__ import annotations

from quern.safe_path import leave_working_folder

if __name__ == "__main__":
    leave_working_folder()  # before anything else is imported

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from quern.errors import QuernError
from quern.train.__main__ import leave
from quern.train.init_from import load_train_config
from quern.train.processes import launch

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Trace the config that ``arguments`` name; rank 0 prints the profile. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m quern.train.profiling", description="What a step's time goes into, by a short traced run."
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML file of quern train")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted: model.preset=125M")
    parser.add_argument("--out", required=True, metavar="DIR", help="a folder that all ranks share")
    parser.add_argument("--steps", type=_count, default=3, help="traced steps (3)")
    parser.add_argument("--warm-up", type=_count, default=3, help="steps before them (3)")
    parser.add_argument("--quiet", action="store_true", help="print nothing")
    given = parser.parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        config = load_train_config(given.config, given.overrides)
        from quern.train.profiling.report import report
        from quern.train.profiling.run import profile  # torch takes seconds that a bad config need not wait for

        result = profile(config, given.out, steps=given.steps, warm_up=given.warm_up)
    except QuernError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if not given.quiet and os.environ.get("RANK", "0") == "0":
        print(report(result), end="")
    return 0


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected an integer ≥ 1, got {text}")
    return number


if __name__ == "__main__":
    launch.end_with_launcher()
    leave(main(sys.argv[1:]))
