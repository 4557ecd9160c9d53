"""Writes ``report.html``, one page that needs no network and escapes everything it shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from quern import storage
from quern.config import dump_yaml
from quern.data_pipeline.execution.run_directory import read_record
from quern.data_pipeline.report.counters import TokenLengths
from quern.data_pipeline.report.funnel import all_alarms, funnel, main_reasons
from quern.data_pipeline.report.languages import languages_section, seen
from quern.data_pipeline.report.stats import committed
from quern.data_pipeline.report.survey import (
    CHAR_EDGES,
    WORD_EDGES,
    Budget,
    Survey,
    survey,
)
from quern.data_pipeline.report.texts import duplicates_section, samples_section
from quern.html import frame as html
from quern.html.pieces import Bar, Tick, bars, num, percent, plot, short, show, steps, table
from quern.words import counted

__all__ = ["render", "survey_run", "write_report"]

NUM_REASONS = 30
NUM_DAMAGE = 100
NUM_ALARMS = 100
#: Bins of lengths that a histogram has at least (eight are a factor of ten): one alone has no scale.
LEAST_BINS = 10
#: Width of the first row of the funnel in a drawing 1,000 wide; the rest is for what flows out.
FLOW = 800.0


def write_report(
    run_dir: str,
    stats: Mapping[str, Any],
    *,
    seed: int = 0,
    partitions: Collection[tuple[str, str]] | None = None,
    found: Survey | None = None,
) -> str:
    """Write ``report.html`` into the run, atomically, and return its path; equal runs and stats give equal bytes.

    Args:
        run_dir: the run.
        stats: of :func:`quern.data_pipeline.report.build_stats`.
        seed: keys the choice of samples.
        partitions: (source, partition) of the run; None takes every commit.
        found: what :func:`survey_run` has read already; the arguments but ``run_dir`` and ``stats`` are its then.

    Raises:
        QuernError: a table is missing, or disagrees with its commit.
    """
    if found is None:
        found = survey_run(run_dir, seed=seed, partitions=partitions)
    out = storage.join(run_dir, "report.html")
    storage.publish_bytes(out, render(run_dir, stats, found, read_record(run_dir) or {}).encode())
    return out


def survey_run(
    run_dir: str,
    *,
    max_samples: int = 60,
    seed: int = 0,
    partitions: Collection[tuple[str, str]] | None = None,
    budget: Budget | None = None,
    lengths: TokenLengths | None = None,
) -> Survey:
    """The survey that :func:`write_report` shows; it has the same arguments, and raises the same errors.
    ``max_samples``: pages shown with their text, at most. ``budget``: how much of the tables may be read; beyond it the
    page says what share it has seen. ``lengths``: of the run's documents, to count tokens by language and host."""
    pages = {(source, name): entry["counts"]["pages"] for source, name, entry in committed(run_dir, partitions)}
    return survey(run_dir, pages, max_samples=max_samples, seed=seed, budget=budget, lengths=lengths)


def render(run_dir: str, stats: Mapping[str, Any], found: Survey, run: Mapping[str, Any]) -> str:
    """The page as HTML; ``run`` is the content of ``run.json``."""
    config = run.get("config", {})
    sections = [
        ("alarms", "Alarms", _alarms(stats)),
        ("funnel", "Funnel", _funnel(stats)),
        ("reasons", "Reasons", _reasons(stats)),
        ("sources", "Sources and tokens", _sources(stats, found)),
        ("languages", "Languages and hosts", languages_section(stats, found)),
        ("lengths", "Lengths", _lengths(found)),
        ("duplicates", "Duplicates", duplicates_section(stats, found, config.get("duplicates", {}))),
        ("samples", "Samples", samples_section(found)),
        ("time", "Time", _time(stats)),
        ("damage", "Damage", _damage(stats)),
        ("config", "Config", _config(config)),
    ]
    return html.frame(
        title=f"quern · {run_dir.rstrip('/').rpartition('/')[2]}",
        kicker="quern · data run",
        headline=f"{counted(stats['pages'], 'page')} became {counted(stats['unique'], 'document')}",
        tiles=_tiles(stats),
        sections=sections,
        footer=_footer(run_dir, run, found),
        css=html.resource("style.css", __package__),
        scripts=[html.resource("filter.js", __package__)],
    )


def _count(value: int) -> str:
    return num(value) if value < 1_000_000 else short(value)


def _tiles(stats: Mapping[str, Any]) -> str:
    removed = stats["kept"] - stats["unique"]
    tiles = [
        ("pages read", _count(stats["pages"]), counted(stats["partitions"], "partition")),
        ("passed all gates", _count(stats["kept"]), percent(stats["kept"], stats["pages"])),
        ("duplicates removed", _count(removed), f"{percent(removed, stats['kept'])} of those"),
        ("documents", _count(stats["unique"]), percent(stats["unique"], stats["pages"])),
    ]
    if stats["tokens"] is not None:
        tokens = stats["tokens"]
        tiles.append(("tokens", _count(tokens["tokens"]), counted(tokens["shards"], "shard")))
    return html.tiles(tiles)


def _alarms(stats: Mapping[str, Any]) -> str:
    alarms = all_alarms(stats)
    shown = "".join(f'<p class="alarm">{show(alarm["text"], 600)}</p>' for alarm in alarms[:NUM_ALARMS])
    more = len(alarms) - NUM_ALARMS
    return shown + (f'<p class="muted">and {num(more)} more, in stats.json</p>' if more > 0 else "")


def _funnel(stats: Mapping[str, Any]) -> str:
    pages = stats["pages"] or 1
    lines = []
    for row in funnel(stats, num_reasons=2):
        css = "" if row.dropped else ' class="idle"'
        kind = "duplicate" if row.stage == "duplicates" else ""
        reasons = ", ".join(f"{show(name)} {num(count)}" for name, count in row.reasons)
        out = f"−{num(row.dropped)} · {percent(row.dropped, row.entered)} of {num(row.entered)}" if row.dropped else "–"
        lines.append(
            f'<li{css}><span class="stage">{show(row.label)}</span>'
            f"{_flow(row.entered / pages * FLOW, row.left / pages * FLOW, kind)}"
            f'<span class="out">{out}<small>{reasons}</small></span></li>'
        )
    width = stats["unique"] / pages * FLOW
    lines.append(
        f'<li class="last"><span class="stage">documents</span>{_flow(width, width, "")}'
        f'<span class="out"><b>{num(stats["unique"])}</b> · {percent(stats["unique"], stats["pages"])} of all pages'
        "</span></li>"
    )
    other = ", ".join(f"{num(count)} {show(kind)}" for kind, count in stats["other_records"].items())
    note = f" The files also hold records that carry no page: {other}." if other else ""
    return (
        html.lead(f"Every page that was read, and where it left; the width is the number of pages.{note}")
        + f'<ol class="funnel">{"".join(lines)}</ol>'
    )


def _flow(entered: float, left: float, kind: str) -> str:
    """One stage: what goes on runs straight down, what is dropped peels off to the right."""
    drawn = f'<path class="flow" d="M0 0H{left:.2f}V101H0Z"/>' if left > 0 else ""
    lost = entered - left
    if lost > 0:
        thick = min(55.0, 4 + lost / FLOW * 130)
        end, turn = min(990.0, entered + 130), max(lost * 0.35, 8)
        drawn += (
            f'<path class="peel {kind}" d="M{left:.2f} 0H{entered:.2f}'
            f"C{entered:.2f} {92 - thick:.2f} {entered + turn:.2f} {94 - thick:.2f} {end:.2f} {94 - thick:.2f}"
            f"L{end + 8:.2f} {94 - thick / 2:.2f}L{end:.2f} 94"
            f'C{left + turn:.2f} 94 {left:.2f} {94 - thick / 3:.2f} {left:.2f} 0Z"/>'
        )
    return f'<svg viewBox="0 0 1000 100" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'


def _reasons(stats: Mapping[str, Any]) -> str:
    ranked = sorted(stats["by_reason"].items(), key=lambda item: (-item[1], item[0]))
    if not ranked:
        return ""
    dropped = sum(stats["by_reason"].values())
    rows = []
    for full, count in ranked[:NUM_REASONS]:
        stage, _, reason = full.partition(":")
        label = reason if reason.startswith(f"{stage}.") else f"{stage} · {reason}"
        note = f"{num(count)} <small>· {percent(count, dropped)}</small>"
        rows.append(Bar(f'<span title="{show(full)}">{show(label, 60)}</span>', (("dropped", count),), note))
    more = len(ranked) - NUM_REASONS
    tail = f'<p class="muted">and {num(more)} rarer reasons, in stats.json</p>' if more > 0 else ""
    lead = html.lead(
        f"The first failed rule of each of the {num(dropped)} dropped pages. Duplicates are not among them."
    )
    return lead + bars(rows, "reasons") + tail


def _sources(stats: Mapping[str, Any], found: Survey) -> str:
    head = ["source", "pages", "passed", "duplicates", "documents"]
    with_tokens = stats["tokens"] is not None
    with_chars = found.complete and not found.purged
    if with_tokens:
        head += ["held out", "tokens", "shards", "tokens / document"]
        head += ["characters / token"] if with_chars else []
    rows = []
    for name, table_of in stats["sources"].items():
        removed = table_of["kept"] - table_of["unique"]
        counts = (num(table_of[key]) for key in ("pages", "kept"))
        row = [show(name), *counts, f"{num(removed)} ({percent(removed, table_of['kept'])})", num(table_of["unique"])]
        if with_tokens:
            splits = table_of["tokens"]
            tokens, shards = (sum(split[key] for split in splits.values()) for key in ("tokens", "shards"))
            row += [num(splits["val"]["documents"]), num(tokens), num(shards)]
            row.append(num(tokens / table_of["unique"], 1) if table_of["unique"] else "–")
            if with_chars:  # each document ends with one EOT, which stands for no character
                texts = tokens - table_of["unique"]
                row.append(num(found.unique_chars[name] / texts, 2) if texts else "–")
        rows.append(row)
    lead = html.lead("“Held out” documents are the validation set; they are counted in documents and tokens.")
    return (lead if with_tokens else "") + table(head, rows) + _losses_by_source(stats)


def _losses_by_source(stats: Mapping[str, Any]) -> str:
    """What each stage dropped of each source, where there are several."""
    sources = stats["sources"]
    if len(sources) < 2:
        return ""
    rows_of = {name: funnel({**own, "duplicates": {"by_kind": own["duplicates"]}}) for name, own in sources.items()}
    stages = [(row.stage, row.label) for row in funnel(stats) if row.dropped]
    rows = []
    for name, own in sources.items():
        dropped = {row.stage: row.dropped for row in rows_of[name]}
        cells = [f"{num(n)} ({percent(n, own['pages'])})" if (n := dropped.get(stage)) else "–" for stage, _ in stages]
        reasons = ", ".join(f"{show(reason, 60)} {num(count)}" for reason, count in main_reasons(own, 2))
        rows.append([show(name), num(own["pages"]), *cells, num(own["unique"]), reasons])
    head = ["source", "pages", *(show(label) for _, label in stages), "documents", "dropped mostly by"]
    return "<h3>What each stage dropped</h3>" + table(head, rows)


def _lengths(found: Survey) -> str:
    if not found.chars.sum():
        return ""
    lead = (
        f"{seen(found)} Documents whose text reached the quality gate: above the line those it passed, duplicates "
        "included; below it those it dropped. The scale of lengths is logarithmic."
        + (f" {num(found.purged)} of them were purged since, and are not counted here." if found.purged else "")
    )
    drawn = _histogram(found.words, WORD_EDGES, "words") + _histogram(found.chars, CHAR_EDGES, "characters")
    legend = '<p class="legend"><span><i class="kept"></i>passed</span><span><i class="dropped"></i>dropped</span></p>'
    return f'{html.lead(lead)}{legend}<div class="two">{drawn}</div>'


def _histogram(counts: np.ndarray, edges: np.ndarray, unit: str) -> str:
    passed, dropped = counts[0] + counts[1], counts[2]
    used = np.flatnonzero(passed + dropped)
    around = max(LEAST_BINS - int(np.ptp(used)), 0) // 2
    first, last = max(int(used[0]) - around, 0), min(int(used[-1]) + 1 + around, len(passed))
    top = int(max(passed.max(), dropped.max()))
    up, down = (int(side.max()) / top * 100 for side in (passed, dropped))
    base = 100 * up / (up + down)
    bounds = ["0", *(num(int(np.ceil(edge))) for edge in edges[1:]), "∞"]
    names = [f"{bounds[i]} to {bounds[i + 1]} {unit}" for i in range(first, last)]
    height = 100 * 100 / (up + down)
    drawing = steps(passed[first:last].tolist(), top, "kept", names, base=base, height=height)
    drawing += steps(dropped[first:last].tolist(), top, "dropped", names, base=base, height=-height)
    x = _decades(edges, first, last)
    ends = ((1.0, passed), (0.0, dropped))
    y = [Tick(1 - base / 100, "0"), *(Tick(at, short(int(side.max()))) for at, side in ends if side.max())]
    caption = (
        f"{unit.capitalize()} a document. Median passed: {_median(passed, edges)}; dropped: {_median(dropped, edges)}."
    )
    return plot(drawing, x, y, caption, f"Histogram of {unit} a document, passed and dropped")


def _decades(edges: np.ndarray, first: int, last: int) -> list[Tick]:
    """Ticks at round lengths between the edges of the bins ``first`` to ``last``, which are even in the logarithm."""
    bins = (len(edges) - 1) / np.log10(edges[-1] / edges[0])
    digits = (1, 2, 5) if last - first < 2.5 * bins else (1, 3) if last - first < 4 * bins else (1,)
    ticks = []
    for value in (digit * 10**power for power in range(1, 8) for digit in digits):
        at = (np.log10(value / edges[0]) * bins - first) / (last - first)
        if 0 <= at <= 1:
            ticks.append(Tick(float(at), short(value)))
    return ticks


def _median(counts: np.ndarray, edges: np.ndarray) -> str:
    total = int(counts.sum())
    if not total:
        return "none"
    at = int(np.searchsorted(np.cumsum(counts), (total + 1) // 2))
    low, high = (short(float(np.ceil(edge))) for edge in (edges[at], edges[min(at + 1, len(edges) - 1)]))
    if at == 0:
        return f"under {high}"
    return f"{low} to {high}" if at + 1 < len(edges) else f"over {low}"


def _time(stats: Mapping[str, Any]) -> str:
    timing = stats["timing"]
    seconds = Counter(timing["stage_seconds"])
    if not seconds:
        return ""
    rest = timing["cpu_seconds"] - seconds.total()
    ranked = sorted(seconds.items(), key=lambda item: (-item[1], item[0]))
    if rest > 0:
        ranked.append(("reading, writing, rest", rest))
    pages = stats["pages"] or 1
    rows = []
    for name, value in ranked:
        note = f"{num(value, 1)} s <small>· {num(1e3 * value / pages, 2)} ms a page</small>"
        rows.append(Bar(show(name), (("kept", value),), note))
    speed = timing["pages_per_cpu_second"]
    lead = f"CPU seconds of the pages phase: {num(timing['cpu_seconds'], 1)} in all"
    return html.lead(lead + (f", {num(speed, 1)} pages a CPU-second." if speed else ".")) + bars(rows)


def _damage(stats: Mapping[str, Any]) -> str:
    damage = stats["damage"]
    if not damage["count"]:
        return ""
    rows = [
        [show(item.get("file", ""), 200), show(item.get("offset", "–")), show(item.get("why", ""), 300)]
        for item in damage["first"][:NUM_DAMAGE]
    ]
    more = damage["count"] - len(rows)
    tail = f'<p class="muted">and {num(more)} more</p>' if more > 0 else ""
    lead = html.lead(
        f"{counted(damage['count'], 'place')} where an input file is damaged; reading went on behind each."
    )
    return lead + table(["file", "offset", "what was wrong"], rows, "texts") + tail


def _config(config: Mapping[str, Any]) -> str:
    return f'<pre class="config">{show(dump_yaml(config))}</pre>' if config else ""


def _footer(run_dir: str, run: Mapping[str, Any], found: Survey) -> str:
    facts = [f"Run {show(run_dir)}"]
    facts += [f"{show(key.replace('_', ' '))} {show(run[key])}" for key in ("id", "config_hash") if run.get(key)]
    versions = ", ".join(f"{show(name)} {show(version)}" for name, version in run.get("versions", {}).items())
    part = "" if found.complete else f"<p>{seen(found)}</p>"
    return f"<p>{' · '.join(facts)}</p><p>{versions}</p>{part}"
