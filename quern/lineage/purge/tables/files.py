"""Records which files a purge changed, with their SHA-256 before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quern import storage
from quern.tokenize.corpus_version import listed_files

__all__ = ["PURGE_FOLDER", "FileChange", "changes_since", "checksum", "note_before", "version_changes"]

#: Of a run directory: what an unfinished purge has to know.
PURGE_FOLDER = ".purge"


@dataclass(frozen=True, order=True)
class FileChange:
    """A file that was rewritten, created or removed."""

    path: str
    """Below the run; of a training run's file, where it stands."""
    before: str | None
    """Hex SHA-256; None where there was no such file."""
    after: str | None
    """None where there is none any more."""


def note_before(run: str, purge: str, name: str, paths: Callable[[], Iterable[str]]) -> dict[str, str]:
    """SHA-256 of files as they were before the purge ``purge`` touched the first of them: path → checksum.

    Noted in ``RUN/.purge/<name>.json`` before anything is changed, so that a purge that goes on after a kill still
    knows. ``paths``: the files, below the run or with a path of their own; those that are not there are left out.
    """
    note = storage.join(run, PURGE_FOLDER, f"{name}.json")
    if storage.exists(note):
        noted = storage.read_json(note)
        if isinstance(noted, dict) and noted.get("purge") == purge:
            return dict(noted["files"])
    wanted = sorted(paths())
    found = zip(wanted, storage.each(lambda path: checksum(run, path), wanted, run), strict=True)
    files = {path: sha256 for path, sha256 in found if sha256 is not None}
    storage.write_json(note, {"purge": purge, "files": files}, indent=None)
    return files


def checksum(run: str, path: str) -> str | None:
    """Hex SHA-256 of a file below the run, or with a path of its own; None where there is none."""
    where = path if "://" in path else storage.join(run, path)
    return storage.sha256(where) if storage.is_file(where) else None


def changes_since(run: str, before: Mapping[str, str]) -> Iterator[FileChange]:
    """The changes of those files, by path; unchanged ones are left out."""
    paths = sorted(before)
    now = storage.each(lambda path: checksum(run, path), paths, run)
    for path, after in zip(paths, now, strict=True):
        if after != before[path]:
            yield FileChange(path, before[path], after)


def version_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[FileChange]:
    """What a new corpus version put in the place of what: the files that two ``VERSION.json`` list, as plain data.

    ``VERSION.json`` itself is not among them.
    """
    old, new = listed_files(before), listed_files(after)
    return sorted(
        FileChange(path, old.get(path), new.get(path)) for path in {*old, *new} if old.get(path) != new.get(path)
    )
