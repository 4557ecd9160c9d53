"""Sums the counts of a data run into ``stats.json``.

Counters come from the commits of finished partitions and from nowhere else, so they are the same after any number of
resumes. The HTML page stands in :mod:`quern.data_pipeline.report.page`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow.compute as pc

from quern import storage
from quern.data_pipeline.dedup.schemas import DECISIONS
from quern.data_pipeline.monitoring.damage import Damage
from quern.data_pipeline.report.funnel import PRE_SKIP, all_alarms
from quern.errors import QuernError
from quern.storage.parquet import read_batches

__all__ = [
    "FileCounts",
    "build_stats",
    "committed",
    "write_stats",
]

STATS_FORMAT = 1
MAX_DAMAGE = 1000

_SUMS = ("pages", "kept", "pre_skip", "text_chars", "text_bytes_kept", "unreadable_dates", "unreadable_urls")
_TABLES = ("by_stage", "by_reason", "by_language", "other_records")


@dataclass
class FileCounts:
    """Counts of one input file from its commits, all ranges together."""

    partitions: list[str] = field(default_factory=list)
    pages: int = 0
    by_reason: Counter[str] = field(default_factory=Counter)
    """``stage:reason`` → pages that were dropped so."""
    damage: str | None = None
    """Why its first damaged place could not be read."""


def committed(
    run_dir: str, partitions: Collection[tuple[str, str]] | None = None
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(source, partition, commit) of every committed partition of the pages phase, sorted.

    ``partitions`` limits them to those of the run; a folder can hold commits of inputs it no longer has.

    Raises:
        QuernError: a commit names another partition than its place does, or one of ``partitions`` has no commit.
    """
    folder = storage.join(run_dir, "commits", "pages")
    wanted = None if partitions is None else set(partitions)
    seen = set()
    for path in storage.list_files(folder):
        inside = path.split("/commits/pages/", 1)[-1]
        source, _, name = inside.removesuffix(".json").partition("/")
        ours = inside.endswith(".json") and not inside.rpartition("/")[2].startswith(".")
        if not ours or (wanted is not None and (source, name) not in wanted):
            continue
        entry = storage.read_json(path)
        if (entry.get("source"), entry.get("partition")) != (source, name):
            raise QuernError(f"{path}: this commit is of {entry.get('source')}/{entry.get('partition')}")
        seen.add((source, name))
        yield source, name, entry
    missing = sorted((wanted or set()) - seen)
    if missing:
        raise QuernError(f"{folder}: no commit of {'/'.join(missing[0])} ({len(missing)} missing)")


def build_stats(
    run_dir: str,
    duplicates: Mapping[str, Any],
    tokens: Mapping[str, Any] | None,
    partitions: Collection[tuple[str, str]] | None = None,
    files: dict[tuple[str, str], FileCounts] | None = None,
    rules: Sequence[str] = (),
) -> dict[str, Any]:
    """The counts of a run as plain data, summed from committed partitions; the same for the same bytes in the run.

    Only what stands under ``"timing"`` (seconds) may differ between two runs over the same input.

    Args:
        run_dir: the run.
        duplicates: the report of :func:`quern.data_pipeline.dedup.passes.run.run` as plain data; ``removed`` is source
            → kind → documents.
        tokens: the ``sources`` of the tokens report as plain data: source → ``{"train": {"documents", "tokens",
            "shards"}, "val": {…}}``; None before tokenization.
        partitions: (source, partition) of the run; None takes every commit.
        files: is filled, if given: (source, relative path) → counts, of the files that have partitions of their own.
        rules: names of the run's extra rules, each of which has a line in the funnel.

    Raises:
        QuernError: something does not add up; the message names what and where.
    """
    sources: dict[str, dict[str, Any]] = {}
    totals: dict[str, Any] = _blank()
    damage: list[dict[str, Any]] = []
    damaged = Damage()
    seconds: Counter[str] = Counter()
    cpu_seconds = 0.0
    for source, name, entry in committed(run_dir, partitions):
        counts = entry["counts"]
        _check_partition(f"{source}/{name}", counts)
        for table in (totals, sources.setdefault(source, _blank())):
            _add(table, counts)
        found = damaged.add(counts, source)
        damage.extend({"source": source, **dict(item)} for item in found[: MAX_DAMAGE - len(damage)])
        if files is not None and len(entry["inputs"]) == 1:
            _add_file(files.setdefault((source, *entry["inputs"]), FileCounts()), name, counts)
        seconds.update(counts.get("stage_seconds", {}))
        cpu_seconds += counts.get("cpu_seconds", 0.0)
    removed = _removed(duplicates, sources)
    kinds = sum(map(Counter, removed.values()), Counter[str]())
    _check_decisions(run_dir, kinds)
    for source, table in sources.items():
        table |= {"duplicates": removed.get(source, {}), "tokens": None}
        table["unique"] = table["kept"] - sum(table["duplicates"].values())
    token_counts = None if tokens is None else _count_tokens(tokens, sources)
    return {
        "format": STATS_FORMAT,
        **_sorted_tables(totals),
        "unique": totals["kept"] - kinds.total(),
        "sources": {name: _sorted_tables(sources[name]) for name in sorted(sources)},
        "alarms": all_alarms({"duplicates": duplicates}),
        "duplicates": {**duplicates, "alarms": [], "removed": removed, "by_kind": dict(sorted(kinds.items()))},
        "tokens": token_counts,
        "damage": {"count": damaged.num, "first": damage},
        **({"rules": list(rules)} if rules else {}),
        "timing": {
            "cpu_seconds": round(cpu_seconds, 3),
            "stage_seconds": {name: round(value, 3) for name, value in sorted(seconds.items())},
            "pages_per_cpu_second": round(totals["pages"] / cpu_seconds, 2) if cpu_seconds else None,
        },
    }


def write_stats(run_dir: str, stats: Mapping[str, Any]) -> str:
    """Write ``stats.json`` into the run, atomically; return its path."""
    path = storage.join(run_dir, "stats.json")
    storage.write_json(path, stats)
    return path


def _blank() -> dict[str, Any]:
    return {"partitions": 0, **dict.fromkeys(_SUMS, 0), **{name: Counter() for name in _TABLES}}


def _add(table: dict[str, Any], counts: Mapping[str, Any]) -> None:
    table["partitions"] += 1
    for name in _SUMS:
        table[name] += counts.get(name, 0)
    for name in _TABLES:
        table[name].update(counts.get(name, {}))


def _add_file(file: FileCounts, name: str, counts: Mapping[str, Any]) -> None:
    file.partitions.append(name)
    file.pages += counts["pages"]
    file.by_reason.update(counts.get("by_reason", {}))
    if file.damage is None and counts.get("damage"):
        file.damage = counts["damage"][0]["why"]


def _sorted_tables(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: dict(sorted(value.items())) if isinstance(value, dict) else value for key, value in table.items()}


def _check_partition(where: str, counts: Mapping[str, Any]) -> None:
    by_stage, by_reason = counts["by_stage"], counts.get("by_reason", {})
    dropped = sum(by_stage.values())
    if counts["pages"] != counts["kept"] + dropped:
        raise QuernError(
            f"{where}: {counts['pages']} pages were read, but {counts['kept']} kept + {dropped} dropped = "
            f"{counts['kept'] + dropped}"
        )
    reasons: Counter[str] = Counter()
    for reason, count in by_reason.items():
        reasons[reason.partition(":")[0]] += count
    for stage in sorted({*by_stage, *reasons}):
        if by_stage.get(stage, 0) != reasons[stage]:
            raise QuernError(
                f"{where}: stage {stage} dropped {by_stage.get(stage, 0)} pages, its reasons add up to {reasons[stage]}"
            )
    if counts.get("pre_skip", 0) != by_reason.get(PRE_SKIP, 0):
        raise QuernError(
            f"{where}: {counts.get('pre_skip', 0)} pages were skipped by the language guess, "
            f"the reason {PRE_SKIP} counts {by_reason.get(PRE_SKIP, 0)}"
        )


def _removed(duplicates: Mapping[str, Any], sources: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Source → kind → documents removed; refuses more removals than there were documents."""
    removed: dict[str, dict[str, int]] = {}
    for source, documents in sorted(duplicates.get("documents", {}).items()):
        kept = sources.get(source, {}).get("kept", 0)
        if documents != kept:
            raise QuernError(f"source {source}: {kept} documents were kept, the search for duplicates saw {documents}")
    for source, kinds in sorted(duplicates.get("removed", {}).items()):
        removed[source] = {kind: count for kind, count in sorted(kinds.items()) if count}
        num_removed, kept = sum(removed[source].values()), sources.get(source, {}).get("kept", 0)
        if num_removed > kept:
            raise QuernError(f"source {source}: {num_removed} duplicates were removed from {kept} kept documents")
    return {source: kinds for source, kinds in removed.items() if kinds}


def _check_decisions(run_dir: str, reported: Counter[str]) -> None:
    """The report of duplicates and the stored decisions count the same documents of every kind."""
    path = storage.join(run_dir, DECISIONS)
    stored: Counter[str] = Counter()
    if storage.exists(path):
        for batch in read_batches(path, ["kind"]):
            for item in pc.value_counts(batch.column(0)).to_pylist():
                stored[item["values"]] += item["counts"]
    for kind in sorted({*reported, *stored}):
        if reported[kind] != stored[kind]:
            raise QuernError(
                f"{path}: holds {stored[kind]} decisions of kind {kind}, the report of duplicates {reported[kind]}"
            )


def _count_tokens(tokens: Mapping[str, Any], sources: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Totals and per-source counts; every unique document of every source must have become tokens."""
    total = dict.fromkeys(("documents", "tokens", "shards"), 0)
    plain: dict[str, Any] = {}
    for source in sorted({*tokens, *sources}):
        splits = {split: dict(tokens.get(source, {}).get(split) or {}) for split in ("train", "val")}
        for counts in splits.values():
            for key in total:
                total[key] += counts.setdefault(key, 0)
        tokenized = sum(counts["documents"] for counts in splits.values())
        unique = sources[source]["unique"] if source in sources else 0
        if tokenized != unique:
            raise QuernError(
                f"source {source}: {unique} documents are left after duplicates, {tokenized} were tokenized "
                f"({splits['train']['documents']} train + {splits['val']['documents']} val)"
            )
        plain[source] = splits
        if source in sources:
            sources[source]["tokens"] = splits
    return {**total, "sources": plain}
