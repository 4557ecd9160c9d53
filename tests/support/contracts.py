"""What ``lint-imports`` holds besides its own contracts (``.importlinter``)."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output

_SHOWN = 5


class NoCircles(Contract):
    """No module imports itself through others, and no two packages do: a package is its own modules, without those of
    the packages in it. So a parent and its child do not import each other either."""

    type_name = "no_circles"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        roots = self.session_options["root_packages"]
        own = {name for name in graph.modules if name.split(".")[0] in roots}
        imports = {name: graph.find_modules_directly_imported_by(name) & own for name in own}

        def package(name: str) -> str:
            return name if os.path.isdir(name.replace(".", os.sep)) else name.rpartition(".")[0]

        between: dict[str, set[str]] = {package(name): set() for name in own}
        for name, imported in imports.items():
            between[package(name)] |= {package(other) for other in imported} - {package(name)}
        circles = [*in_circles(imports), *in_circles(between)]
        return ContractCheck(kept=not circles, metadata={"circles": circles})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for circle in sorted(check.metadata["circles"], key=len)[:_SHOWN]:
            output.print_error(" → ".join([*circle, circle[0]]))


def in_circles(imports: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The shortest circle through each name that is in one, each circle once."""
    found: dict[frozenset[str], list[str]] = {}
    for start in sorted(imports):
        circle = _way_back(imports, start)
        if circle is not None:
            found.setdefault(frozenset(circle), circle)
    return list(found.values())


def _way_back(imports: Mapping[str, Iterable[str]], start: str) -> list[str] | None:
    """The fewest names from ``start`` to itself, breadth first; None where there is no way."""
    before: dict[str, str] = {}
    queue = deque([start])
    while queue:
        name = queue.popleft()
        for other in sorted(imports.get(name, ())):
            if other == start:
                way = [name]
                while way[-1] != start:
                    way.append(before[way[-1]])
                return way[::-1]
            if other not in before:
                before[other] = name
                queue.append(other)
    return None
