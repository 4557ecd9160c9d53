"""Finds the source of a user's module, and has every process of a run import that very source."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from quern.config import digest
from quern.errors import InputError, one_line

__all__ = ["Sources", "find_sources", "known_sources", "load_module"]

_MAX_FILES, _MAX_CHARS = 1_000, 8 << 20


@dataclass(frozen=True)
class Sources:
    """The Python files of a top-level module or package."""

    name: str
    files: Mapping[str, tuple[bool, str]]
    """Full module name → (whether it is a package, its source)."""
    is_installed: bool
    """Whether it belongs to this Python's packages: workers then import their own, which must be the same."""

    @cached_property
    def digest(self) -> str:
        """blake2b-128 (hex) of names and sources."""
        return digest(sorted((name, *file) for name, file in self.files.items()))


def find_sources(name: str) -> Sources:
    """The sources of the top-level module ``name``: in the working folder, else where Python would look.

    Raises:
        InputError: there is none, it is not written in Python, or it is too large to be sent to workers.
    """
    if name == "quern" or name in sys.stdlib_module_names:
        raise InputError(f"{name}: is the name of a module that quern needs itself; give yours another")
    spec = PathFinder.find_spec(name, [os.getcwd(), *sys.path]) or importlib.util.find_spec(name)
    if spec is None:
        raise InputError(f"{name}: no such module in {os.getcwd()} or on PYTHONPATH")
    if spec.origin is None or not spec.origin.endswith(".py"):
        raise InputError(f"{name}: expected a module {name}.py or a package with __init__.py")
    files: dict[str, tuple[bool, str]] = {}
    chars = 0
    for full, path in _python_files(name, spec.origin, is_package=spec.submodule_search_locations is not None):
        files[full] = (path.endswith("__init__.py"), source := _read(path))
        chars += len(source)
        if len(files) > _MAX_FILES or chars > _MAX_CHARS:
            raise InputError(f"{name}: expected at most {_MAX_FILES:,} files and {_MAX_CHARS:,} characters, has more")
    places = [os.path.realpath(sysconfig.get_path(key)) for key in ("purelib", "platlib")]
    is_installed = any(os.path.realpath(spec.origin).startswith(place + os.sep) for place in places)
    if not is_installed and PathFinder.find_spec(name, places) is not None:
        raise InputError(f"{spec.origin}: has the name of an installed package; give it another")
    return Sources(name, files, is_installed)


def _python_files(name: str, origin: str, is_package: bool) -> list[tuple[str, str]]:
    """(Full module name, path) of a module and of those below it."""
    if not is_package:
        return [(name, origin)]
    root, found = os.path.dirname(origin), []
    for folder, below, files in os.walk(root):
        below[:] = sorted(one for one in below if one.isidentifier() and one != "__pycache__")
        inner = [name, *os.path.relpath(folder, root).split(os.sep)] if folder != root else [name]
        for file in sorted(files):
            stem = file.removesuffix(".py")
            if file.endswith(".py") and stem.isidentifier():
                found.append((".".join(inner if stem == "__init__" else [*inner, stem]), os.path.join(folder, file)))
    return found


def _read(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return importlib.util.decode_source(file.read())
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({one_line(error)})") from None


class _Served(MetaPathFinder, ExecutionLoader):
    """Imports modules from sources in memory."""

    def __init__(self) -> None:
        self.sources: dict[str, Sources] = {}

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        own = self.sources.get(fullname.partition(".")[0])
        if own is None or own.is_installed or fullname not in own.files:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=self.get_filename(fullname))

    def is_package(self, fullname: str) -> bool:
        return self.sources[fullname.partition(".")[0]].files[fullname][0]

    def get_source(self, fullname: str) -> str:
        return self.sources[fullname.partition(".")[0]].files[fullname][1]

    def get_filename(self, fullname: str) -> str:
        inside = fullname.replace(".", "/") + ("/__init__.py" if self.is_package(fullname) else ".py")
        return f"<{self.sources[fullname.partition('.')[0]].digest[:8]}>/{inside}"


_served = _Served()


def known_sources(name: str) -> Sources | None:
    """The sources from which this process imports the top-level module ``name``; None where it has been given none."""
    return _served.sources.get(name)


def load_module(full: str, sources: Sources) -> ModuleType:
    """Import the module ``full`` from ``sources``; what this process had imported from others is imported anew.

    Raises:
        InputError: it is not among them, its own code raises, or an installed package differs from ``sources``.
    """
    if (before := _served.sources.get(sources.name)) is None or before.digest != sources.digest:
        if sources.is_installed and find_sources(sources.name).digest != sources.digest:
            raise InputError(f"{sources.name}: is installed here in another version than where the run was started")
        _served.sources[sources.name] = sources
        if not sources.is_installed:
            for name in [name for name in sys.modules if name.partition(".")[0] == sources.name]:
                del sys.modules[name]
    if _served not in sys.meta_path:
        sys.meta_path.insert(0, _served)
    try:
        return importlib.import_module(full)
    except Exception as error:
        raise InputError(f"{full}: cannot be imported ({type(error).__name__}: {one_line(error)})") from None
