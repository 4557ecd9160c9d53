"""Faults by the name of the function they are put into and by its text: no line number, no file.

A fault is one or more changes. A change says in which function or class it is made (``in``: its qualified name without
the module, ``Gradients.norm``; absent for text outside of all of them), which text it replaces, and by what. A function
may move to another file and lines may move within it; the text has to stand in exactly one place of the package.

Texts of several lines are indented from their first line on::

    in: slowest
    replace: |-
      if a < b:
          return a
    by: |-
      if a <= b:
          return a
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Change:
    replace: str
    by: str
    within: str | None = None

    @classmethod
    def of(cls, told: Mapping[str, str]) -> Change:
        assert told.keys() <= {"in", "replace", "by"}, f"a change has in, replace and by, and not {sorted(told)}"
        assert told["replace"] != told["by"], f"{told['replace']!r} is replaced by itself"
        return cls(told["replace"], told["by"], told.get("in"))


def applied(changes: Sequence[Change], package: Path) -> dict[Path, str]:
    """The files of ``package`` that the changes alter, with their new text. Nothing is written.

    Raises AssertionError where a text is not found, or found in more than one place.
    """
    made: dict[Path, str] = {}
    for change in changes:
        found = [
            (path, start, variant, _indented(change.by, indent))
            for path, first, last in _regions(package, change, made)
            for start, variant, indent in _occurrences(change.replace, _text(path, made), first, last)
        ]
        named = f"in {change.within}" if change.within else "outside of functions and classes"
        assert found, f"{change.replace!r} is not found {named} any more; write the fault anew"
        assert len(found) == 1, (
            f"{change.replace!r} is found {named} at {len(found)} places: {[str(f[0]) for f in found]}"
        )
        ((path, start, old, new),) = found
        text = _text(path, made)
        made[path] = text[:start] + new + text[start + len(old) :]
    return made


def _text(path: Path, made: Mapping[Path, str]) -> str:
    return made[path] if path in made else path.read_text()


def _regions(package: Path, change: Change, made: Mapping[Path, str]) -> Iterator[tuple[Path, int, int]]:
    """Where functions and classes of that qualified name stand, in files that may have the text: file, first character,
    the one behind the last."""
    within, head = change.within, change.replace.partition("\n")[0]
    for path in sorted(package.rglob("*.py")):
        text = _text(path, made)
        if within is None:
            yield path, 0, len(text)
        elif within.rpartition(".")[2] in text and head in text:
            for name, first, last in definitions(text):
                if name == within:
                    yield path, first, last


@cache
def definitions(text: str) -> list[tuple[str, int, int]]:
    """Qualified name, first character and the one behind the last of every function and class, outer ones first."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: list[tuple[str, int, int]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                line = min([child.lineno, *(one.lineno for one in child.decorator_list)])
                assert child.end_lineno is not None
                found.append((prefix + child.name, starts[line - 1], starts[child.end_lineno]))
                inner = f"{prefix}{child.name}."
            visit(child, inner)

    visit(ast.parse(text), "")
    return found


def _occurrences(snippet: str, text: str, first: int, last: int) -> Iterator[tuple[int, str, str]]:
    """Where a text stands: its first character, itself as it is indented there, and that indentation."""
    head = snippet.split("\n")[0]
    start = text.find(head, first, last)
    while start >= 0:
        line = text[text.rfind("\n", 0, start) + 1 :]
        indent = line[: len(line) - len(line.lstrip(" "))]
        variant = _indented(snippet, indent)
        if text.startswith(variant, start) and start + len(variant) <= last:
            yield start, variant, indent
        start = text.find(head, start + 1, last)


def _indented(snippet: str, indent: str) -> str:
    head, *rest = snippet.split("\n")
    return "\n".join([head, *(indent + line if line else line for line in rest)])
