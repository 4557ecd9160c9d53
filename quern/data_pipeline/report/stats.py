"""Sums the counts of a data run into ``stats.json``, and prints the funnel.

Counters come from the commits of finished partitions and from nowhere else, so they are the same after any number of
resumes. The HTML page stands in :mod:`quern.data_pipeline.report.page`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quern import storage
from quern.data_pipeline.dedup.config import URL_BINS
from quern.data_pipeline.dedup.schemas import DECISIONS
from quern.data_pipeline.monitoring.damage import Damage
from quern.data_pipeline.page.document import STAGES
from quern.errors import QuernError
from quern.storage.parquet import read_batches
from quern.words import counted

__all__ = [
    "FileCounts",
    "FunnelRow",
    "all_alarms",
    "build_stats",
    "committed",
    "funnel",
    "print_funnel",
    "url_similarities",
    "write_stats",
]

STATS_FORMAT = 1
MAX_DAMAGE = 1000
#: Alarms that the terminal shows.
MAX_SHOWN = 20
PRE_SKIP = "language:language.pre_skip"

_SUMS = ("pages", "kept", "pre_skip", "text_chars", "text_bytes_kept", "unreadable_dates", "unreadable_urls")
_TABLES = ("by_stage", "by_reason", "by_language", "other_records")

#: Rows of the funnel in the order of the road: (key, label). The language guess comes before extraction.
_ROAD = (
    ("read", "read"),
    ("quarantine", "quarantine"),
    ("purged", "purged before"),
    ("url", "url"),
    ("pre_skip", "language guess"),
    ("extract", "extract"),
    ("language", "language"),
    ("quality", "quality"),
    ("pii", "pii"),
    ("toxicity", "toxicity"),
    ("duplicates", "duplicates"),
)


@dataclass(frozen=True)
class FunnelRow:
    """One stage of the funnel. ``entered = dropped + left``, and ``left`` is what the next row's ``entered`` is."""

    stage: str
    label: str
    entered: int
    dropped: int
    left: int
    share: float
    """dropped ÷ entered; 0.0 when nothing entered."""
    reasons: tuple[tuple[str, int], ...]
    """The most frequent reasons with their counts, largest first."""


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
    _check_decisions(run_dir, removed)
    for source, table in sources.items():
        table |= {"duplicates": removed.get(source, {}), "tokens": None}
        table["unique"] = table["kept"] - sum(table["duplicates"].values())
    kinds = sum(map(Counter, removed.values()), Counter[str]())
    token_counts = None if tokens is None else _count_tokens(tokens, sources)
    return {
        "format": STATS_FORMAT,
        **{key: dict(sorted(value.items())) if key in _TABLES else value for key, value in totals.items()},
        "unique": totals["kept"] - kinds.total(),
        "sources": {name: _sorted_tables(sources[name]) for name in sorted(sources)},
        "alarms": all_alarms({"duplicates": duplicates}),
        "duplicates": {**duplicates, "alarms": [], "removed": removed, "by_kind": dict(sorted(kinds.items()))},
        "tokens": token_counts,
        "damage": {"count": damaged.num, "first": damage},
        "timing": {
            "cpu_seconds": round(cpu_seconds, 3),
            "stage_seconds": {name: round(value, 3) for name, value in sorted(seconds.items())},
            "pages_per_cpu_second": round(totals["pages"] / cpu_seconds, 2) if cpu_seconds else None,
        },
    }


def all_alarms(stats: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The alarms of a run. Those about duplicates stand with the others, in an earlier version as sentences there."""
    alarms = [*stats.get("alarms", ()), *stats["duplicates"].get("alarms", ())]
    return [alarm if isinstance(alarm, dict) else _from_sentence(alarm) for alarm in alarms]


def _from_sentence(text: str) -> dict[str, Any]:
    what, name, *_ = *text.split(" ", 2), ""
    return {"what": what, "name": name, "gate": "duplicates", "entered": None, "lost": 0, "reason": "", "text": text}


def url_similarities(duplicates: Mapping[str, Any]) -> str | None:
    """How similar the documents removed for their URL were to the one that stays, in words; None without any."""
    urls = duplicates.get("urls")
    if not urls or not urls["compared"]:
        return None
    limits = [0, *URL_BINS, 1]
    parts = [
        f"{count:,} from {low:g} to {high:g}"
        for (low, high), count in zip(pairwise(limits), urls["similar"], strict=True)
        if count
    ]
    parts += [f"{urls['unknown']:,} too short to compare"] if urls["unknown"] else []
    if stay := urls["compared"] - sum(urls["similar"]) - urls["unknown"]:
        apart = f"{stay:,} compared and not removed for it (duplicates.url_threshold)"
        return "; ".join([", ".join(parts) or "none", apart])
    return ", ".join(parts)


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


def _check_decisions(run_dir: str, removed: Mapping[str, Mapping[str, int]]) -> None:
    """The report of duplicates and the stored decisions count the same documents of every kind."""
    path = storage.join(run_dir, DECISIONS)
    reported = sum(map(Counter, removed.values()), Counter[str]())
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


def funnel(stats: Mapping[str, Any], num_reasons: int = 3) -> tuple[FunnelRow, ...]:
    """The rows of the funnel in the order of the chain, duplicates last; the last ``left`` is ``stats["unique"]``."""
    dropped = Counter(stats["by_stage"])
    dropped["pre_skip"] = stats["pre_skip"]
    dropped["language"] -= stats["pre_skip"]
    dropped["duplicates"] = stats["kept"] - stats["unique"]
    reasons: dict[str, Counter[str]] = {stage: Counter() for stage in (*STAGES, *dropped)}
    for full, count in stats["by_reason"].items():
        stage, _, reason = full.partition(":")
        reasons["pre_skip" if full == PRE_SKIP else stage][reason] += count
    reasons["duplicates"].update(stats["duplicates"]["by_kind"])
    strange = [(stage, stage) for stage in sorted(set(dropped) - {key for key, _ in _ROAD})]
    rows = []
    entered = stats["pages"]
    for stage, label in (*_ROAD[:-1], *strange, _ROAD[-1]):
        top = sorted(reasons[stage].items(), key=lambda item: (-item[1], item[0]))[:num_reasons]
        share = dropped[stage] / entered if entered else 0.0
        rows.append(FunnelRow(stage, label, entered, dropped[stage], entered - dropped[stage], share, tuple(top)))
        entered -= dropped[stage]
    return tuple(rows)


def print_funnel(stats: Mapping[str, Any], console: Console) -> None:
    """Print the funnel as a table, with tokens, alarms and damage in the lines below it."""
    table = Table(box=None, pad_edge=False, header_style="bold", caption_justify="left")
    table.add_column("stage", no_wrap=True)
    for name in ("in", "dropped", "of in", "left", "of all"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("mostly", overflow="fold", ratio=1)
    for row in funnel(stats):
        cells = [
            row.label,
            f"{row.entered:,}",
            f"{row.dropped:,}" if row.dropped else "–",
            f"{row.share:.1%}" if row.dropped else "",
            f"{row.left:,}",
            f"{row.left / stats['pages']:.1%}" if stats["pages"] else "",
            ", ".join(f"{reason} {count:,}" for reason, count in row.reasons if row.stage != "pre_skip"),
        ]
        table.add_row(*(Text(cell) for cell in cells), style="" if row.dropped else "dim")
    console.print(table)
    for line in _summary(stats):
        console.print(Text(line))


def _summary(stats: Mapping[str, Any]) -> Iterator[str]:
    share = f" ({stats['unique'] / stats['pages']:.1%})" if stats["pages"] else ""
    yield f"{counted(stats['pages'], 'page')} → {counted(stats['unique'], 'document')}{share}"
    if stats["tokens"] is not None:
        held_out = sum(splits["val"]["documents"] for splits in stats["tokens"]["sources"].values())
        yield (
            f"{counted(stats['tokens']['tokens'], 'token')} in {counted(stats['tokens']['shards'], 'shard')} "
            f"({counted(held_out, 'document')} held out for validation)"
        )
    if stats["duplicates"].get("recall"):
        shown = [(j, share) for j, share in stats["duplicates"]["recall"] if round(20 * j) in (12, 14, 16, 18)]
        chances = ", ".join(f"{share:.1%} at similarity {j:.1f}" for j, share in shown)
        yield f"chance that the bands find a pair of near duplicates, by formula: {chances}"
    if (url := url_similarities(stats["duplicates"])) is not None:
        yield f"removed for an equal URL, by similarity with the document that stays: {url}"
    alarms = all_alarms(stats)
    for alarm in alarms[:MAX_SHOWN]:
        yield f"alarm: {alarm['text']}"
    if len(alarms) > MAX_SHOWN:
        yield f"alarm: and {len(alarms) - MAX_SHOWN:,} more, in stats.json and in the report"
    for sentence in stats["duplicates"].get("notes", ()):
        yield f"note: {sentence}"
    for name, table in stats["sources"].items():
        for what, column in (("date", "fetched_at"), ("URL", "url")):
            if num := table.get(f"unreadable_{what.lower()}s"):
                yield f"note: source {name}: {counted(num, what)} could not be read, and {column} is null there"
    if stats["damage"]["count"]:
        yield f"read around in the input: {counted(stats['damage']['count'], 'damaged place')}"
    if stats["timing"]["pages_per_cpu_second"] is not None:
        yield (
            f"{stats['timing']['cpu_seconds']:,.0f} CPU-seconds in the pages phase, "
            f"{stats['timing']['pages_per_cpu_second']:,.1f} pages a CPU-second"
        )
