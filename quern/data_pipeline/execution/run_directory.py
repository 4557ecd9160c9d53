"""A run directory: opened by one driver at a time, resumed only with the same config, finally marked complete."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from typing import Any

from quern import __version__, storage
from quern.config import digest, show
from quern.errors import InputError, QuernError

__all__ = ["NOT_DECIDING", "BusyError", "RunDirectory", "check_writable", "is_complete", "look", "open_run",
           "read_id", "read_record", "remove_torn", "sole_driver", "torn"]  # fmt: skip

#: Config keys that never change a byte of the tokens.
NOT_DECIDING = ("run_dir", "workers", "ray", "isolation")
#: Differing keys that an error names.
MAX_TOLD = 8
#: Keys of a source that say where its files are, how they are cut and whether it may be empty, and no more.
_WHERE = ("paths", "root", "crawl", "files", "base", "format", "split_bytes", "allow_empty")

_VERSIONED = ("trafilatura", "lxml", "warcio", "datasketch", "spacy", "tiktoken", "tokenizers", "pyarrow", "numpy",
              "ray")  # fmt: skip

#: Distributions whose module ``fasttext`` quern knows, the one it asks for first: models of some losses answer other
#: last bits by one than by another.
_FASTTEXT = ("fasttext-predict", "fasttext-turbo")


class BusyError(QuernError):
    """Another process of this machine is using the run."""


@dataclass
class RunDirectory:
    """An open run. ``record`` is what ``run.json`` holds."""

    path: str
    record: dict[str, Any]

    @property
    def complete(self) -> bool:
        """Whether the run has been completed."""
        return bool(self.record["status"] == "complete")

    @property
    def scratch(self) -> str:
        """A folder for intermediate files, removed when the run is complete."""
        return storage.join(self.path, ".work")

    def finish(self, counts: Mapping[str, Any], inputs: str) -> None:
        """Mark the run complete, with its counts and the digest of its inputs; remove half-written files."""
        remove_torn(self.path)
        self.record = {**self.record, "status": "complete", "counts": dict(counts), "inputs": inputs}
        storage.write_json(storage.join(self.path, "run.json"), self.record)
        storage.remove_tree(self.scratch)


def read_record(path: str) -> dict[str, Any] | None:
    """What ``run.json`` of the run at ``path`` holds; None where there is none, or none of a run."""
    file = storage.join(path, "run.json")
    record = storage.read_json(file) if storage.is_file(file) else None
    return record if isinstance(record, dict) else None


def is_complete(path: str) -> bool:
    """Whether ``path`` holds a completed run."""
    record = read_record(path)
    return record is not None and record.get("status") == "complete"


def read_id(path: str) -> str:
    """The identity of the data run at ``path``.

    Raises:
        InputError: ``run.json`` is not there, or has none.
    """
    file = storage.join(path, "run.json")
    record = storage.read_json(file)
    ident = record.get("id") if isinstance(record, dict) else None
    if not isinstance(ident, str) or not ident:
        raise InputError(f"{file}: id: expected the identity of a data run, got {ident!r:.60}")
    return ident


@contextmanager
def open_run(path: str, config: Mapping[str, Any], identity: str = "") -> Iterator[RunDirectory]:
    """Create or resume the run at ``path`` for a resolved ``config`` (plain data).

    The run's ``id`` is a digest of the config and ``identity``, which tells what its inputs are: two crawls under
    one config are two runs wherever their tokens meet.

    Raises:
        InputError: the folder holds another run (its config differs in keys that decide bytes; they are named), an
            unfinished one begun with other libraries, or something else.
        QuernError: another driver is at work there.
    """
    with sole_driver(path):
        record = look(path, config)
        if record is None:
            record = {
                "id": digest([_deciding(config), identity]),
                "config": dict(config),
                "config_hash": digest(_deciding(config)),
                "versions": _versions(),
                "counts": {},
                "status": "running",
            }
            storage.write_json(storage.join(path, "run.json"), record)
        remove_torn(path)
        run = RunDirectory(path, record)
        if run.complete:  # the last act of finish may have been cut off
            storage.remove_tree(run.scratch)
        yield run


def look(path: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """What ``run.json`` of the run at ``path`` holds, which may go on with ``config``; None where no run is.

    Raises:
        InputError: as of :func:`open_run`.
    """
    file = storage.join(path, "run.json")
    if not storage.exists(file):
        strangers = [name for name in storage.list_files(path) if not os.path.basename(name).startswith(".")]
        if strangers:
            raise InputError(f"{path}: is not empty and holds no run ({os.path.basename(strangers[0])}, …)")
        return None
    record = storage.read_json(file)
    if not isinstance(record, dict) or not {"config", "status"} <= record.keys():
        raise InputError(f"{file}: is not of a data run; give another run_dir")
    if told := list(_differences(record["config"], config)):
        named = ", ".join(told[:MAX_TOLD]) + f", and {len(told) - MAX_TOLD} more keys" * (len(told) > MAX_TOLD)
        raise InputError(f"{path}: holds a run with another config: {named}; give another run_dir")
    if record["status"] != "complete":
        _same_libraries(path, record.get("versions", {}))
    return record


def check_writable(path: str) -> None:
    """Check that a local run can be written at ``path``, by a temporary file without a name.

    Raises:
        InputError: it cannot be made.
    """
    place = os.path.abspath(storage.split(path)[1])
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    try:
        if storage.is_local(path):
            tempfile.TemporaryFile(prefix=".", dir=place).close()
    except OSError as error:
        raise InputError(f"run_dir: {path}: cannot be written ({error.strerror})") from None


def _versions() -> dict[str, str]:
    found = {name: version(name) for name in (*_VERSIONED, _fasttext())}
    return {"quern": __version__, "python": platform.python_version(), **found}


def _fasttext() -> str:
    """The distribution that the module ``fasttext`` is of."""
    spec = importlib.util.find_spec("fasttext")
    if spec is None or spec.origin is None:
        raise QuernError(f"no module fasttext is installed; install {_FASTTEXT[0]}")
    found = [name for name in _FASTTEXT if _gives(name, spec.origin)]
    if not found:
        raise QuernError(
            f"{spec.origin}: of no distribution that quern knows; uninstall it, and install {_FASTTEXT[0]}"
        )
    if len(found) > 1:
        raise QuernError(
            f"{' and '.join(found)} are both installed, and overwrite each other's files; uninstall both, then install "
            f"{found[0]}"
        )
    return found[0]


def _gives(name: str, file: str) -> bool:
    try:
        return os.path.realpath(str(distribution(name).locate_file("fasttext/__init__.py"))) == os.path.realpath(file)
    except PackageNotFoundError:
        return False


def _same_libraries(path: str, begun: Mapping[str, str]) -> None:
    """Half a run by one library and half by another would be neither's bytes."""
    for name, now in _versions().items():
        if name in ("python", "ray") or begun.get(name) == now:
            continue
        other = next((other for other in _FASTTEXT if other in begun), None)
        if name in _FASTTEXT and other not in (None, name):
            raise InputError(
                f"{path}: was begun with {other} {begun[other]} and would go on with {name} {now}, which have the same "
                f"files; pip uninstall {name}, then pip install {other}=={begun[other]}, or give another run_dir"
            )
        raise InputError(
            f"{path}: was begun with {name} {begun.get(name)} and would go on with {now}; install the former, or "
            "give another run_dir"
        )


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in config.items() if key not in NOT_DECIDING}
    if isinstance(found.get("sources"), list):
        found["sources"] = [
            {key: value for key, value in source.items() if key not in ("split_bytes", "allow_empty")}
            for source in found["sources"]
        ]
    return found


def _differences(old: Any, new: Any, key: str = "", passed_over: tuple[str, ...] = NOT_DECIDING) -> Iterator[str]:
    """What two configs say differently, a sentence a key (dotted), but for what decides nothing, and input paths.

    Which files a source has is compared by content when work is resumed, not by how their paths were written.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new} - {*passed_over}, key=str):
            inner = f"{key}.{name}" if key else str(name)
            if name in old and name in new:
                yield from _differences(old[name], new[name], inner, ())
            elif old.get(name) != new.get(name):  # one side has a key of a later version at its default, and lacks it
                there, here = (show(side[name]) if name in side else "not given" for side in (old, new))
                yield f"{inner} is {there} there and {here} here"
    elif key == "sources" and (before := _by_name(old)) is not None and (after := _by_name(new)) is not None:
        yield from _source_differences(before, after)
    elif _are_sections(old) and _are_sections(new) and len(old) == len(new):
        for number, (before, after) in enumerate(zip(old, new, strict=True)):
            of = f" ({after['rule']})" if "rule" in after and before.get("rule") == after["rule"] else ""
            yield from (told + of for told in _differences(before, after, f"{key}.{number}", ()))
    elif old != new:
        yield f"{key} is {show(old)} there and {show(new)} here"


def _are_sections(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)


def _source_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"source {name} is missing here" for name in old if name not in new)
    yield from (f"source {name} is missing there" for name in new if name not in old)
    common = [name for name in old if name in new]
    for name in common:
        yield from (f"source {name}: {told}" for told in _differences(old[name], new[name], passed_over=_WHERE))
    order = [name for name in new if name in old]
    if order != common:
        yield f"the order of sources is {show(common)} there and {show(order)} here"


def _by_name(sources: Any) -> dict[str, Any] | None:
    """Sources by their names; None where they are no list of sources that have names of their own."""
    if not isinstance(sources, list) or not all(isinstance(source, Mapping) for source in sources):
        return None
    named = {str(source.get("name"))[:100]: source for source in sources}
    return named if len(named) == len(sources) else None


@contextmanager
def sole_driver(path: str) -> Iterator[None]:
    """Hold the run's lock. It goes with the process, however that ends; on S3 it is a lease; other stores have none.

    Raises:
        BusyError: somebody else holds it, on this machine (of S3: a QuernError).
        InputError: the run cannot be written to.
    """
    if not storage.is_local(path):
        with storage.lease(storage.join(path, ".lease.json"), path):
            yield
        return
    inner = storage.split(path)[1]
    try:
        with storage.needs_room(path):
            os.makedirs(inner, exist_ok=True)
            lock = open(os.path.join(inner, ".lock"), "w", opener=storage.open_own)  # noqa: SIM115
    except OSError as error:
        raise InputError(f"run_dir: {error.filename or path}: cannot be written ({error.strerror})") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"{path}: another driver is at work in this run") from None
        yield


def remove_torn(path: str, besides: str | None = None) -> None:
    """Remove what killed drivers and workers left: temporary files, but for those in the folder ``besides`` below
    ``path``, and incomplete uploads."""
    if not storage.is_local(path):
        storage.give_up_uploads(path)
        return
    for file in torn(path, besides):
        with suppress(FileNotFoundError):  # its writer may still be there, and just be done
            os.unlink(file)


def torn(path: str, besides: str | None = None) -> Iterator[str]:
    """The temporary files below a local folder, but for those in its folder ``besides``."""
    root = storage.split(path)[1]
    for folder, below, names in os.walk(root):
        if folder == root:
            below[:] = [name for name in below if name != besides]
        yield from (os.path.join(folder, name) for name in names if storage.is_temporary(name))
