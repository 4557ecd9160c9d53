"""Which of the faults in drawn.yaml do the tests see? Runs the tests that a fault can break until one fails.

    python tests/mutations/seen.py                      # all of them: an hour or two; a line each
    python tests/mutations/seen.py --sets 1             # only with the nearest tests: half an hour
    python tests/mutations/seen.py --only 07 --from 1   # one; begin with the second set of tests

``draw.py`` drew them. Each is put into a copy of the package. Tests of ``make test`` that reach a changed file by
imports run in sets, from those that are nearest to it; the first failure ends it. A fault that none of them sees
survives: it is equivalent to what was there (``survives`` in drawn.yaml says why), or a hole. A test that fails without
the fault too ends the program. Exit status 1 where the fate is not the one that drawn.yaml notes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))
from mutations.faults import Change, applied  # noqa: E402
from mutations.test_mutations import environment, written  # noqa: E402
from support.impact import Sources  # noqa: E402

#: Runs pytest on the copy it stands in, and on no other quern that is installed.
START = """
import pathlib, sys
import pytest, quern
assert pathlib.Path(quern.__file__).resolve().is_relative_to(pathlib.Path.cwd().resolve()), quern.__file__
sys.exit(pytest.main(sys.argv[1:]))
"""
LIMIT_S = 1200
"""Of one set of tests."""
FILES = 12
"""Of a set beyond the nearest tests."""


@dataclass(frozen=True)
class Fate:
    outcome: str
    """``seen``, ``timeout`` or ``survived``."""
    seconds: float
    by: str = ""
    """The first test that failed."""


def sets_of(sources: Sources, changed: Sequence[str]) -> Iterator[list[str]]:
    """Test files that reach a changed one: those called after it, its own folder's by distance, then all others."""
    stems = {Path(path).stem for path in changed}
    folders = {part for path in changed for part in Path(path).parts[1:-1]}
    places = []
    for test in sources.tests:
        steps = [sources.reached(test)[path] for path in changed if path in sources.reached(test)]
        if steps:
            named = any(stem in Path(test).stem for stem in stems)
            places.append((not named or min(steps) > 2, not folders & set(Path(test).parts), min(steps), test))
    places.sort()
    first = [place[-1] for place in places if not place[0]]
    others = [place[-1] for place in places if place[0]]
    yield from ([first] if first else [])
    for start in range(0, len(others), FILES):
        yield others[start : start + FILES]


def run(arguments: Sequence[str], folder: Path) -> Fate:
    """pytest on the copy of everything in ``folder``."""
    began = time.monotonic()
    options = ["-q", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-m", "not long and not exhaustive"]
    process = subprocess.Popen(
        ["nice", "-n", "5", sys.executable, "-c", START, *options, *arguments],
        cwd=folder, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return Fate("timeout", time.monotonic() - began)
    finally:
        _end(process)
    seconds = time.monotonic() - began
    if process.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return Fate("survived", seconds)
    failed = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if not failed and process.returncode == pytest.ExitCode.USAGE_ERROR:
        raise SystemExit(f"pytest {' '.join(arguments)}\n{said}")
    last = said.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
    return Fate("seen", seconds, (failed or last)[0].partition(" - ")[0])


def _end(process: subprocess.Popen[str]) -> None:
    """The ranks too, which are of its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.communicate()


def fate_of(entry: Mapping[str, Any], folder: Path, sources: Sources, chosen: slice) -> Fate:
    texts = applied([Change.of(change) for change in entry["changes"]], folder / "quern")
    seconds = 0.0
    with written(texts):
        for tests in list(sets_of(sources, [path.relative_to(folder).as_posix() for path in texts]))[chosen]:
            fate = run(tests, folder)
            seconds += fate.seconds
            if fate.outcome != "survived":
                break
        else:
            return Fate("survived", seconds)
    if "::" in fate.by and run([fate.by.partition(" ")[2]], folder).outcome != "survived":
        raise SystemExit(f"{fate.by.partition(' ')[2]} fails without the fault")
    return Fate(fate.outcome, seconds, fate.by)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="faults whose names begin so")
    parser.add_argument("--from", dest="begin", type=int, default=0, help="leave out so many sets of tests")
    parser.add_argument("--sets", type=int, help="run so many sets at most: what they do not see is said to survive")
    parser.add_argument("--faults", type=Path, default=ROOT / "tests" / "mutations" / "drawn.yaml")
    given = parser.parse_args()
    faults: dict[str, dict[str, Any]] = yaml.safe_load(given.faults.read_text())
    chosen = {name: one for name, one in faults.items() if not given.only or name.startswith(tuple(given.only))}
    sources, other = Sources(ROOT), 0
    sets = slice(given.begin, None if given.sets is None else given.begin + given.sets)
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        folder = Path(temporary) / "copy"
        for name in subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")[:-1]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        for name, entry in chosen.items():
            fate = fate_of(entry, folder, sources, sets)
            other += (fate.outcome == "survived") != ("survives" in entry)
            print(f"{name} {fate.outcome} {fate.seconds:.0f} s {fate.by}", flush=True)
    sys.exit(other > 0)


if __name__ == "__main__":
    main()
