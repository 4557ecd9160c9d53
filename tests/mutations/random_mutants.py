"""How many small faults in what parallelises a model do the tests see? Draws some at random and counts.

    python tests/mutations/random_mutants.py --seed 1 --count 50

The faults are Cosmic Ray's operators (https://cosmic-ray.readthedocs.io; ``pip install -e ".[mutation]"``): another
comparison or product, a number one off, ``and`` for ``or``, a condition turned round, a loop that does nothing, a
decorator left out. Every place in the sources has the same chance, whatever the number of faults it could have, and of
these one is drawn. Left out is what cannot change what a program does: annotations, texts, ``__all__``, protocols.

Each fault is put into a copy of the package. Its module's own tests run first, then whole trainers on two ranks, then
the slow tests of the module; the first failure ends it. A fault that none of them sees survives: it is either
equivalent to what was there, or a hole.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from test_mutations import ROOT, copied, environment

#: Runs pytest on the copy it stands in, and on no other quern that is installed.
START = """
import pathlib, sys
import pytest, quern
assert pathlib.Path(quern.__file__).resolve().is_relative_to(pathlib.Path.cwd().resolve()), quern.__file__
sys.exit(pytest.main(sys.argv[1:]))
"""

TARGETS = [
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "quern" / "parallel").glob("*.py"))),
    "quern/model/loss.py",
]
#: Those of a module, and of what it is the heart of.
OWN = {
    "accumulation": ["distributed/test_data_parallel.py", "distributed/test_tensor_parallel.py"],
    "activation": ["distributed/test_activation.py"],
    "apply": [f"distributed/test_{name}.py" for name in ("data_parallel", "tensor_parallel", "pipeline")],
    "bubble": ["parallel/test_schedules.py", "parallel/test_traffic.py"],
    "checks": ["parallel/test_checks.py"],
    "clip": ["distributed/test_clip.py", "distributed/test_gradients.py"],
    "collectives": ["distributed/test_collectives.py", "distributed/test_tensor_parallel.py"],
    "data": ["distributed/test_data_parallel.py"],
    "gradients": ["distributed/test_gradients.py"],
    "local": ["distributed/test_ranks.py"],
    "loss": ["model/test_loss.py"],
    "mesh": ["parallel/test_mesh.py", "parallel/test_checks.py", "distributed/test_gradients.py"],
    "pipeline": ["distributed/test_pipeline.py", "distributed/test_pipeline_messages.py"],
    "schedules": ["parallel/test_schedules.py", "parallel/test_checks.py"],
    "stages": ["parallel/test_stages.py", "parallel/test_checks.py"],
    "tensor": ["distributed/test_tensor_parallel.py"],
    "traffic": ["parallel/test_traffic.py", "distributed/test_traffic.py"],
    "weights": ["parallel/test_traffic.py", "distributed/test_traffic.py"],
}
#: No trainer computes anything else for a fault in these.
TABLES = {"bubble", "checks", "traffic", "weights"}
WITH_ARGUMENTS = {"core/VariableReplacer", "core/VariableInserter"}
"""Operators that have to be told a variable."""
LIMIT_S = 120
"""Of one set of tests at least; else four times what they take without a fault."""


@dataclass(frozen=True)
class Mutant:
    path: str
    operator: str
    occurrence: int
    line: int
    before: str
    after: str
    code: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.operator.removeprefix('core/')}\n    - {self.before}\n    + {self.after}"


@dataclass(frozen=True)
class Fate:
    outcome: str
    """``killed``, ``timeout`` or ``survived``."""
    seconds: float
    by: str = ""
    """The first test that failed."""


@dataclass(frozen=True)
class Place:
    """Where a kind of fault can be put; (operator, occurrence) of each."""

    path: str
    where: tuple[int, int]
    faults: tuple[tuple[str, int], ...]


def places_of(path: str, source: str) -> list[Place]:
    """In the order of the file."""
    nodes = list(ast_nodes(get_ast(source)))
    found: dict[tuple[tuple[int, int], str], list[tuple[str, int]]] = {}
    for name in sorted(set(operator_names()) - WITH_ARGUMENTS):
        kind, occurrence = name.split("_")[0], 0
        for node in nodes:
            for start, _ in get_operator(name)().mutation_positions(node):
                found.setdefault((start, kind), []).append((name, occurrence))
                occurrence += 1
    return [Place(path, where, tuple(faults)) for (where, _), faults in sorted(found.items())]


def program(source: str) -> str | None:
    """A source without what its run does not depend on; None where it is no Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "cast":
            node.args = node.args[1:]
        elif isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in node.bases):
            node.body = []
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.test, node.body = ast.Constant(None), []
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [one for one in body if not _is_silent(one)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_silent(node: ast.stmt) -> bool:
    """A text that stands alone, or the list of public names."""
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) == "__all__"
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def drawn(places: Sequence[Place], seed: int) -> Iterator[Mutant | None]:
    """One mutant of each place, the places in random order; None for one that changes nothing."""
    rng = random.Random(seed)
    for place in rng.sample(places, len(places)):
        operator, occurrence = rng.choice(place.faults)
        source = (ROOT / place.path).read_text()
        code = mutate_code(source, get_operator(operator)(), occurrence)
        if code is None or program(code) in (None, program(source)):
            yield None
            continue
        old, new = source.splitlines(), code.splitlines()
        changes = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        _, first, last, start, stop = next(change for change in changes if change[0] != "equal")
        before, after = (" ".join(map(str.strip, lines)) for lines in (old[first:last], new[start:stop]))
        yield Mutant(place.path, operator, occurrence, first + 1, before, after, code)


def sets_of(module: str) -> list[list[str]]:
    """Arguments of pytest for a module's sets of tests, in turn."""
    own = [f"tests/{name}" for name in OWN[module]]
    parity = "tests/distributed/test_parity.py"
    fast, slow = "not slow and not long and not exhaustive", "slow and not long and not exhaustive"
    if module in TABLES:
        return [["-m", fast, *own], ["-m", slow, *own]]
    two_ranks = ["-m", fast, "-k", "tp2 or pp2 or ddp2 or fsdp2", parity]
    if module in ("local", "loss"):
        return [["-m", fast, *own], two_ranks]
    plain = "not compile and not inductor"  # minutes, for what nothing else would show
    four = ["-m", slow, "-k", "fsdp2tp2 or pp2tp2 or pp2fsdp2-1f1b or skip1 and pp2", parity]
    return [["-m", fast, *own], two_ranks, ["-m", slow, "-k", plain, *own], four]


def run(arguments: Sequence[str], folder: Path, limit_s: float) -> Fate:
    """pytest on the copy of everything in ``folder``."""
    began = time.monotonic()
    options = ["-q", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-p", "no:randomly"]
    process = subprocess.Popen(
        ["nice", "-n", "5", sys.executable, "-c", START, *options, *arguments],
        cwd=folder, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=limit_s)
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
    return Fate("killed", seconds, (failed or last)[0].partition(" - ")[0])


def _end(process: subprocess.Popen[str]) -> None:
    """The ranks too, which are of its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.communicate()


def fate_of(mutant: Mutant, folder: Path, passing: dict[tuple[str, ...], float]) -> Fate:
    """``passing``: how long sets of tests take that pass as it is; nothing could be said of a fault by others."""
    path, seconds = folder / mutant.path, 0.0
    source = path.read_text()
    for arguments in sets_of(path.stem):
        if tuple(arguments) not in passing:
            without = run(arguments, folder, 10 * LIMIT_S)
            print(f"    {without.seconds:.0f} s without a fault: {' '.join(arguments)}", flush=True)
            if without.outcome != "survived":
                raise SystemExit(f"fails without a fault: {without}")
            passing[tuple(arguments)] = without.seconds
        path.write_text(mutant.code)
        try:
            fate = run(arguments, folder, max(LIMIT_S, 4 * passing[tuple(arguments)]))
        finally:
            path.write_text(source)
        seconds += fate.seconds
        if fate.outcome != "survived":
            return Fate(fate.outcome, seconds, fate.by)
    return Fate("survived", seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--workers", type=int, choices=(1, 2), default=1)
    parser.add_argument("--only", help="one target, by the end of its path")
    parser.add_argument("--list", action="store_true", help="say what is drawn, and run nothing")
    parser.add_argument("--from", dest="skip", type=int, default=0, help="leave out the first so many drawn")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    paths = [path for path in TARGETS if path.endswith(given.only or "")]
    places = [place for path in paths for place in places_of(path, (ROOT / path).read_text())]
    mutants: list[Mutant] = []
    silent = 0
    for mutant in drawn(places, given.seed):
        if mutant is None:
            silent += 1
        else:
            mutants.append(mutant)
        if len(mutants) == given.count:
            break
    total = sum(len(place.faults) for place in places)
    print(f"{len(paths)} modules, {len(places)} places for {total} faults; {len(mutants)} drawn, {silent} on the way "
          f"change nothing", flush=True)  # fmt: skip
    mutants = mutants[given.skip :]
    if given.list:
        print(*mutants, sep="\n")
        return
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        report = tested(mutants, Path(temporary), given.workers)
    counts = Counter(fate.outcome for _, fate in report)
    print(f"{1 - counts['survived'] / len(report):.0%} seen: {dict(counts)}")
    if given.json:
        rows = [{**asdict(mutant), **asdict(fate)} for mutant, fate in report]
        print(json.dumps([{name: row[name] for name in row if name != "code"} for row in rows], indent=1))


def tested(mutants: Sequence[Mutant], folder: Path, workers: int) -> list[tuple[Mutant, Fate]]:
    copies: SimpleQueue[Path] = SimpleQueue()
    passing: dict[tuple[str, ...], float] = {}
    for number in range(workers):
        copies.put(copied(folder / f"copy{number}", "quern", "tests"))

    def work(numbered: tuple[int, Mutant]) -> tuple[Mutant, Fate]:
        number, mutant = numbered
        copy = copies.get()
        try:
            fate = fate_of(mutant, copy, passing)
        finally:
            copies.put(copy)
        said: Any = f"{number:3d} {fate.outcome} {fate.seconds:.0f} s  {mutant}\n    {fate.by}"
        print(said.rstrip(), flush=True)
        return mutant, fate

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, enumerate(mutants, 1)))


if __name__ == "__main__":
    main()
