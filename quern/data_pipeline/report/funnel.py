"""The funnel of a run: its rows for the terminal and the page, and the table that the terminal shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from quern.data_pipeline.dedup.config import URL_BINS
from quern.data_pipeline.page.document import STAGES
from quern.words import counted

__all__ = ["PRE_SKIP", "FunnelRow", "all_alarms", "funnel", "main_reasons", "print_funnel", "url_similarities"]

#: The reason of pages that the language guess dropped before extraction, as commits count it.
PRE_SKIP = "language:language.pre_skip"
#: Alarms that the terminal shows.
MAX_SHOWN = 20

#: Rows of the funnel in the order of the stages: (key, label). The language guess comes before extraction.
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


def funnel(stats: Mapping[str, Any], num_reasons: int = 3) -> tuple[FunnelRow, ...]:
    """The rows of the funnel in the order of the chain, duplicates last; the last ``left`` is ``stats["unique"]``."""
    dropped = Counter(stats["by_stage"])
    dropped["pre_skip"] = stats["pre_skip"]
    dropped["language"] -= stats["pre_skip"]
    dropped["duplicates"] = stats["kept"] - stats["unique"]
    reasons: dict[str, Counter[str]] = {stage: Counter() for stage in (*STAGES, *dropped, *stats.get("rules", ()))}
    for full, count in stats["by_reason"].items():
        stage, _, reason = full.partition(":")
        reasons["pre_skip" if full == PRE_SKIP else stage][reason] += count
    reasons["duplicates"].update(stats["duplicates"]["by_kind"])
    dropped.update(dict.fromkeys(stats.get("rules", ()), 0))
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
    table = _table("stage", ("in", "dropped", "of in", "left", "of all"), "mostly")
    for row in funnel(stats):
        cells = [
            row.label,
            f"{row.entered:,}",
            f"{row.dropped:,}" if row.dropped else "–",
            f"{row.share:.1%}" if row.dropped else "",
            f"{row.left:,}",
            f"{row.left / stats['pages']:.1%}" if stats["pages"] else "",
            ", ".join(f"{reason} {count:,}" for reason, count in row.reasons),
        ]
        table.add_row(*(Text(cell) for cell in cells), style="" if row.dropped else "dim")
    console.print(table)
    if len(stats["sources"]) > 1:
        console.print(_by_source(stats))
    for line in _summary(stats):
        console.print(Text(line))


def _table(first: str, numbers: Sequence[str], last: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(last, overflow="fold", ratio=1)
    return table


def _by_source(stats: Mapping[str, Any]) -> Table:
    """Pages, documents and tokens of each source, and its most frequent reasons."""
    table = _table("source", ("pages", "passed", "documents", "of pages", "tokens"), "dropped mostly")
    for name, own in stats["sources"].items():
        tokens = None if own["tokens"] is None else sum(split["tokens"] for split in own["tokens"].values())
        cells = [
            name,
            *(f"{own[key]:,}" for key in ("pages", "kept", "unique")),
            f"{own['unique'] / own['pages']:.1%}" if own["pages"] else "",
            "" if tokens is None else f"{tokens:,}",
            ", ".join(f"{reason} {count:,}" for reason, count in main_reasons(own)),
        ]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def main_reasons(table: Mapping[str, Any], num: int = 3) -> list[tuple[str, int]]:
    """The most frequent reasons of a source's counts, without their stages, largest first."""
    ranked = sorted(table["by_reason"].items(), key=lambda item: (-item[1], item[0]))
    return [(reason.partition(":")[2], count) for reason, count in ranked[:num]]


def _summary(stats: Mapping[str, Any]) -> Iterator[str]:
    share = f" ({stats['unique'] / stats['pages']:.1%})" if stats["pages"] else ""
    yield f"{counted(stats['pages'], 'page')} → {counted(stats['unique'], 'document')}{share}"
    if stats["tokens"] is not None:
        held_out = sum(splits["val"]["documents"] for splits in stats["tokens"]["sources"].values())
        yield (
            f"{counted(stats['tokens']['tokens'], 'token')} in {counted(stats['tokens']['shards'], 'shard')} "
            f"({counted(held_out, 'document')} held out for validation)"
        )
    for what, own in sorted(stats.get("tokens_by", {}).items(), reverse=True):
        most = [f"{name} {tokens:,} ({tokens / own['tokens']:.1%})" for name, tokens, _ in own["most"][:5]]
        more = f" and {own['names'] - 5:,} more" if own["names"] > 5 else ""
        yield f"tokens by {what}: {', '.join(most)}{more}"
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


def all_alarms(stats: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The alarms of a run. Those about duplicates stand with the others, in an earlier version as sentences there."""
    alarms = [*stats.get("alarms", ()), *stats["duplicates"].get("alarms", ())]
    return [alarm if isinstance(alarm, dict) else _from_sentence(alarm) for alarm in alarms]


def _from_sentence(text: str) -> dict[str, Any]:
    what, name, *_ = *text.split(" ", 2), ""
    return {"what": what, "name": name, "gate": "duplicates", "entered": None, "lost": 0, "reason": "", "text": text}
