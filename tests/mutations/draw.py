"""Draws small faults at random places of the package, and notes them by function and text.

    python tests/mutations/draw.py --seed 1 --count 60 > tests/mutations/drawn.yaml

The faults are Cosmic Ray's operators (https://cosmic-ray.readthedocs.io; ``pip install -e ".[mutation]"``): another
comparison or product, a number one off, ``and`` for ``or``, a condition turned round, a loop that does nothing, a
decorator left out. Each folder of the package gets a share by how many places it has, four faults at least; each
place of a folder has the same chance, whatever the number of faults it could have, and of these one is drawn. Left out
is what cannot change what a program does: annotations, texts, ``__all__``, protocols. ``seen.py`` says which of them
tests see.
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

import yaml
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))
from mutations.faults import Change, applied, definitions  # noqa: E402

WITH_ARGUMENTS = {"core/VariableReplacer", "core/VariableInserter"}
"""Operators that have to be told a variable."""
LEAST = 4


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


def shares(places: dict[str, list[Place]], count: int) -> dict[str, int]:
    """How many faults each folder gets, ``count`` in all: by its number of places, and not below ``LEAST``."""
    given = dict.fromkeys(places, LEAST)
    total = sum(map(len, places.values()))
    while sum(given.values()) < count:
        given[max(given, key=lambda folder: len(places[folder]) / total - given[folder] / count)] += 1
    return given


def drawn(places: Sequence[Place], rng: random.Random) -> Iterator[tuple[str, str, Change]]:
    """Path, operator and change, a fault a place, the places in random order; none for one that changes nothing."""
    for place in rng.sample(places, len(places)):
        operator, occurrence = rng.choice(place.faults)
        source = (ROOT / place.path).read_text()
        code = mutate_code(source, get_operator(operator)(), occurrence)
        if code is not None and program(code) not in (None, program(source)):
            yield place.path, operator, change_between(source, code)


def change_between(before: str, after: str) -> Change:
    """The least number of whole lines that name the place: more of them until they stand in one place alone."""
    old, new = before.split("\n"), after.split("\n")
    differing = [code for code in SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if code[0] != "equal"]
    first, last = differing[0][1], differing[-1][2]
    shift = len(new) - len(old)
    starts = [0]
    for line in old:
        starts.append(starts[-1] + len(line) + 1)
    while True:
        inside = [
            name for name, start, end in definitions(before) if start <= starts[first] and starts[last] <= end + 1
        ]
        change = _dedented(old[first:last], new[first : last + shift], inside[-1] if inside else None)
        try:
            if change is not None and list(applied([change], ROOT / "quern").values()) == [after]:
                return change
        except AssertionError:
            pass
        first, last = max(first - 1, 0), min(last + 1, len(old))


def _dedented(old: Sequence[str], new: Sequence[str], within: str | None) -> Change | None:
    if not old or not new or not old[0].strip() or not new[0].strip():
        return None
    base = len(old[0]) - len(old[0].lstrip(" "))
    if any(line.strip() and len(line) - len(line.lstrip(" ")) < base for line in [*old, *new]):
        return None
    return Change(*("\n".join(line[base:] for line in lines) for lines in (old, new)), within)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    given = parser.parse_args()
    places: dict[str, list[Place]] = {}
    for path in sorted((ROOT / "quern").rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        name = path.relative_to(ROOT).as_posix()
        places.setdefault(parts[1] if len(parts) > 2 else "", []).extend(places_of(name, path.read_text()))
    rng = random.Random(given.seed)
    number = 0
    for folder, count in shares(places, given.count).items():
        faults = drawn(places[folder], rng)
        for path, operator, change in (next(faults) for _ in range(count)):
            number += 1
            told = {"in": change.within} if change.within else {}
            entry = {
                "operator": operator.removeprefix("core/"),
                "changes": [{**told, "replace": change.replace, "by": change.by}],
            }
            print(
                yaml.safe_dump({f"{number:02d}_{Path(path).stem}": entry}, sort_keys=False, width=118),
                end="",
                flush=True,
            )
        print(f"{folder or 'quern'}: {count} of {len(places[folder])} places", file=sys.stderr)


if __name__ == "__main__":
    main()
