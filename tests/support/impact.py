"""Which tests can be broken by what changed: those whose files reach a changed file by imports.

A file reaches what it imports, anywhere in it, and what it names in a text that is no docstring: modules that it
starts as programs (``-m quern.train``, and its ``__main__``), scripts beside it and of ``benchmarks``, files of other
kinds, and what programs in a text, on a page of ``docs`` or in ``examples`` import. A name that a package imports when
it is asked for (a table beside ``__getattr__``) is reached where it is used. A test reaches the ``conftest.py`` files
above it as well, but not this file through them: it chooses tests and is a part of none. A file whose readers cannot be
told makes every test affected.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

_DOTTED = re.compile(r"\b(?:quern|support)(?:\.\w+)+\b\.?")
_ENTRY = re.compile(r"""["'](\w+)["']:\s*["']([\w.]+)["']""")
_FROM = re.compile(r"\bfrom\s+((?:quern|support)[\w.]*)\s+import\b *(\([^)]*|[\w ,*]*)")
_ANY = re.compile(r"\*|_(?!_(version|file|path|name|doc)__$).*")  # a name that may give any other
#: What every test depends on.
_EVERYWHERE = {"pyproject.toml", "constraints.txt", "Makefile", ".ci/run"}
_CHOOSES = "tests/support/impact.py"
#: What no test reads, unless it names it.
_UNREAD = re.compile(
    r".*\.md|\.github/.*|LICENSE|CITATION\.cff|\.gitignore|\.pre-commit-config\.yaml|\.importlinter|"
    r"\.ci/long-green|tests/durations\.json"
)


class Sources:
    """The files of a checkout, and which of them each Python file reaches.

    Paths are relative to the checkout, with ``/`` between folders.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._python = sorted(
            path.relative_to(root).as_posix()
            for folder in ("quern", "tests", "benchmarks", "examples")
            for path in (root / folder).rglob("*.py")
        )
        self._modules = {_module(path): path for path in self._python}
        # pytest finds the scripts of `benchmarks` by their own names (pyproject.toml, pythonpath)
        self._modules |= {Path(path).stem: path for path in self._python if path.startswith("benchmarks/")}
        self._texts = {path: (root / path).read_text() for path in self._python}
        self._asked = {  # name → module, of packages that import it when it is asked for
            _module(path): {name: module for name, module in _ENTRY.findall(text) if module in self._modules}
            for path, text in self._texts.items()
            if path.endswith("/__init__.py") and "def __getattr__(" in text
        }
        self._pages = {path.name: set(self._used(path.read_text())) for path in root.glob("docs/*.*")}

    @property
    def tests(self) -> list[str]:
        return [path for path in self._python if re.fullmatch(r"tests/(.*/)?test_\w+\.py", path)]

    @cached_property
    def direct(self) -> Mapping[str, frozenset[str]]:
        """What each Python file imports or names itself."""
        return {
            path: frozenset(self._named(path)) - {path, *([_CHOOSES] if path == "tests/conftest.py" else [])}
            for path in self._python
        }

    def reached(self, start: str) -> dict[str, int]:
        """Every Python file that ``start`` reaches, by the least number of steps to it; ``start`` itself by 0."""
        found, edge, steps = {start: 0}, {start}, 0
        while edge:
            steps += 1
            edge = {path for one in edge for path in self.direct.get(one, ())} - found.keys()
            found |= dict.fromkeys(edge, steps)
        return found

    @cached_property
    def _reached(self) -> Mapping[str, Iterable[str]]:
        return {test: self.reached(test).keys() for test in self.tests}

    def affected(self, changed: Iterable[str]) -> set[str] | None:
        """Test files that a changed file can break; None where it may be any of them."""
        found: set[str] = set()
        for path in changed:
            readers = self._readers(path, self._reached)
            if readers is None:
                return None
            found |= readers
        return found

    def _readers(self, changed: str, reached: Mapping[str, Iterable[str]]) -> set[str] | None:
        if changed in _EVERYWHERE:
            return None
        if changed in self._texts:
            return {test for test, paths in reached.items() if changed in paths}
        if changed.endswith(".py"):  # elsewhere; or it is gone, and of a test's helper so are the imports
            return set() if changed.startswith("tests/") and Path(changed).name != "conftest.py" else None
        if changed.startswith("quern/"):  # data of the package it lies in, or below
            folder = Path(changed).parent
            while not (self.root / folder / "__init__.py").exists() and folder.name:
                folder = folder.parent
            beside = {path for path in self._python if Path(path).parent == folder}
            return {test for test, paths in reached.items() if beside & set(paths)}
        top, *_, name = Path(changed).parts[0], Path(changed).name
        names = {name} if top in (name, "tests", "docs") else {name, top}
        tests = [path for path in self._python if path.startswith("tests/") and path != "tests/conftest.py"]
        naming = {path for path in tests if any(name in self._texts[path] for name in names)}
        if not naming and not _UNREAD.fullmatch(changed):
            return None
        return {test for test, paths in reached.items() if naming & set(paths)}

    def _named(self, path: str) -> Iterator[str]:
        tree = ast.parse(self._texts[path])
        package = _module(path).split(".") if path.endswith("__init__.py") else _module(path).split(".")[:-1]
        own = set(self._asked.get(_module(path), {}).values())
        yield from self._used(self._texts[path])
        described = set()
        for node in ast.walk(tree):  # what holds a docstring comes before it
            described.add(id(_docstring(node)))
            if id(node) in described or getattr(node, "value", None) in own:
                continue
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._files(alias.name)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield from self._files(f"{base}.{alias.name}")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                for dotted in _DOTTED.findall(node.value):
                    if dotted.endswith("."):  # the beginning of a name that is put together
                        beginning = self._modules.get(dotted[:-1], "")
                        folder = beginning.removesuffix("/__init__.py") + "/"
                        yield from (one for one in self._python if beginning and one.startswith(folder))
                    yield from self._files(dotted.rstrip("."), asked=dotted == node.value)
                    yield from self._files(f"{dotted.rstrip('.')}.__main__", asked=False)
                for name in node.value.split("/"):
                    yield from self._pages.get(name, ())
                    yield from (one for one in self._python if name == "examples" and one.startswith("examples/"))
                if (beside := f"{path.rpartition('/')[0]}/{node.value}") in self._texts:
                    yield beside
        if path.startswith("tests/"):
            folders = [parent.as_posix() for parent in Path(path).parents]
            yield from (one for folder in folders if (one := f"{folder}/conftest.py") in self._texts)
            if "benchmarks" in (words := set(re.findall(r"\w+", self._texts[path]))):  # a path to a script
                yield from (one for one in self._python if one.startswith("benchmarks/") and Path(one).stem in words)

    def _used(self, text: str) -> Iterator[str]:
        """What programs that are, or are in, a text have of packages; of names that are asked for any, if unsure."""
        text = text.replace("\\n", "\n")
        found = [(base, re.findall(r"\w+", names)) for base, names in _FROM.findall(text)]
        for package in self._asked:
            if re.search(rf"(?:^|[;:>\n\"']) *import (?:[\w., ]+, *)?{package}(?= as | *[;,\n\"'#])", text):
                used = re.findall(rf"\b{package}\.(\w+)|import {package} as|[(=,[] *{package} *[,)\]\n]", text)
                found.append((package, used if all(used) else []))
        yield from (file for base, names in found for name in names or "*" for file in self._files(f"{base}.{name}"))

    def _files(self, dotted: str, *, asked: bool = True) -> Iterator[str]:
        """The file of a module, or of what holds the name, and the ``__init__.py`` of every package above it."""
        parts = dotted.split(".")
        for length in range(1, len(parts) + 1):
            package, name = ".".join(parts[:length]), [*parts, "*" if length > 1 else ""][length]
            if found := self._modules.get(package):
                yield found
            table = self._asked.get(package, {}) if asked else {}
            for module in table.values() if _ANY.fullmatch(name) else filter(None, [table.get(name)]):
                yield from self._files(module, asked=False)


def _docstring(node: ast.AST) -> ast.expr | None:
    """The text in front of a module's, class's or function's body."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            return first.value
    return None


def _module(path: str) -> str:
    """The name by which a file is imported; those of tests are found in ``tests`` itself."""
    parts = Path(path).with_suffix("").parts
    if parts[0] in ("tests", "benchmarks"):
        parts = parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def changed_since(commit: str, root: Path) -> set[str] | None:
    """Files that are not as they were in ``commit``, untracked ones too; None where there is no such commit."""
    found: set[str] = set()
    for command in (["diff", "--name-only", "-z", commit, "--"], ["ls-files", "--others", "--exclude-standard", "-z"]):
        done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True)
        if done.returncode:
            return None
        found |= set(filter(None, done.stdout.split("\0")))
    return found
