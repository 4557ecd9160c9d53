"""Lists the tables that a run must have, from its commits, since a folder cannot tell what is missing in it.

A purge gives the commits the checksums of the tables that it writes anew, so they are those of the present version. An
imported run has no commits: its ``run.json`` lists the files that it was made from, each of which has verdicts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quern import storage
from quern.data_pipeline.dedup.schemas import CLUSTERS, DECISIONS
from quern.data_pipeline.execution.commits import TABLES, commit_path
from quern.data_pipeline.execution.run_directory import read_record
from quern.errors import InputError

__all__ = ["Committed", "missing_tables", "named", "read_committed"]


@dataclass(frozen=True)
class Committed:
    """What the commits of a run, or its ``run.json``, list."""

    tables: Mapping[str, str | None]
    """Path below the run → its SHA-256; None where only the name is known. Verdicts, documents, signatures and what
    was decided about duplicates."""
    fault: str | None
    """Why a commit must be missing; None where none is known to be."""


def read_committed(run: str) -> Committed:
    """Read every commit of pages and of duplicates.

    Raises:
        InputError: a commit cannot be read.
    """
    record = read_record(run) or {}
    tables: dict[str, str | None] = dict.fromkeys(_imported(record))
    paths = [commit_path(run, "pages", *piece) for piece in _pieces(run)]
    pages = 0
    for path, entry in zip(paths, storage.each(storage.read_json, paths, run), strict=True):
        tables |= _outputs(path, entry)
        pages += entry["counts"].get("pages", 0)
    if storage.is_file(path := commit_path(run, "duplicates", "all", "decisions")):
        tables |= _outputs(path, storage.read_json(path))
    counts = record.get("counts")
    told = counts.get("pages") if isinstance(counts, dict) else None
    fault = None
    if told is not None and told != pages:
        fault = f"its files count {pages:,} pages and run.json {told:,}: a commit is missing, or is another run's"
    return Committed(tables, fault)


def missing_tables(run: str, folders: Collection[str], source: str | None = None) -> list[str]:
    """The sorted paths below the run of committed tables of ``folders`` that are missing. ``source``: its own only."""
    own = [folder for folder in TABLES if folder in folders]
    wanted = {f"{folder}/{piece[0]}/{piece[1]}.parquet" for piece in _pieces(run) for folder in own}
    wanted |= {path for path in _imported(read_record(run) or {}) if path.split("/")[0] in folders}
    if "duplicates" in folders and storage.is_file(commit_path(run, "duplicates", "all", "decisions")):
        wanted |= {DECISIONS, CLUSTERS}
    there = set()
    for folder in folders:
        depth = 2 if folder == "duplicates" else 3
        there |= {"/".join(path.split("/")[-depth:]) for path in storage.list_files(storage.join(run, folder))}
    return sorted(path for path in wanted - there if source is None or path.split("/")[1] == source)


def named(missing: Sequence[str]) -> str:
    """The first of some paths, and the number of others."""
    return missing[0] + (f" (and {len(missing) - 1:,} more)" if len(missing) > 1 else "")


def _pieces(run: str) -> list[tuple[str, str]]:
    """Source and partition of every commit of pages, sorted."""
    names = (path.rsplit("/", 2)[-2:] for path in storage.list_files(storage.join(run, "commits", "pages")))
    return [(own, name.removesuffix(".json")) for own, name in names if name.endswith(".json") and name[0] != "."]


def _outputs(path: str, entry: Any) -> dict[str, str]:
    outputs = entry.get("outputs") if isinstance(entry, dict) else None
    if not isinstance(outputs, dict) or not isinstance(entry.get("counts"), dict):
        raise InputError(f"{path}: expected a commit, with outputs and counts")
    return outputs


def _imported(record: Mapping[str, Any]) -> list[str]:
    """The tables of verdicts of an imported run."""
    config = record.get("config")
    own = config.get("import") if isinstance(config, dict) else None
    if not isinstance(own, dict):
        return []
    from quern.data_pipeline.sources.plan import partition_name  # with readers of all kinds: it takes a moment

    return [
        f"verdicts/{own['source']}/{partition_name(file['relative_path'])}.parquet" for file in record.get("files", ())
    ]
