"""Sections of the report page that show texts: duplicate pairs and sample pages."""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from quern.data_pipeline.report.funnel import url_similarities
from quern.data_pipeline.report.survey import Pair, Sample, Survey
from quern.html.pieces import Bar, Tick, bars, link, num, percent, plot, show, table
from quern.words import counted

__all__ = ["duplicates_section", "samples_section", "shown_documents"]

TEXT_CHARS = 1200
PAIR_CHARS = 900
#: Characters that are searched for the first difference, and words of each side that are compared from there; the
#: comparison is quadratic at worst.
COMPARED_CHARS = 200_000
PAIR_WORDS = 140

#: An element that holds text of pages, and whose: a page that was purged must not stay in a report.
_SHOWN = re.compile(r'<(?:div|p) class="text"([^>]*)>')
_WHOSE = re.compile(r' data-doc="([0-9a-f]{32}(?: [0-9a-f]{32})*)"')

_NO_MEASURES = frozenset({"fetched_at", "record_offset", "record_length", "language_score"})


def duplicates_section(stats: Mapping[str, Any], found: Survey, config: Mapping[str, Any]) -> str:
    """Kinds by source, sizes of clusters, the recall curve, the largest clusters, and pairs side by side."""
    report = stats["duplicates"]
    removed = stats["kept"] - stats["unique"]
    parts = [
        f'<p class="lead">{num(removed)} of {num(stats["kept"])} documents ({percent(removed, stats["kept"])}) were '
        "removed. Bands of hashes propose pairs; a pair counts only when its similarity is verified"
        f"{_proposed(report)}.</p>"
    ]
    parts += [f"<p>{show(note, 400)}</p>" for note in report.get("notes", ())]
    if (url := url_similarities(report)) is not None:
        parts.append(f"<p>Removed for an equal URL, by similarity with the document that stays: {show(url)}.</p>")
    left = _kinds(stats)
    if found.clusters.sizes:
        left += f"<h3>Sizes of {num(found.clusters.sizes.total())} clusters</h3>{_sizes(found.clusters.sizes)}"
    curve = _recall(report.get("recall") or (), config)
    parts.append(f'<div class="two"><div>{left}</div><div>{curve}</div></div>' if curve else left)
    if found.clusters.largest:
        parts.append("<h3>The largest clusters</h3>" + _largest(found))
    if found.pairs:
        pairs = "".join(_pair(pair) for pair in found.pairs)
        parts.append(f'<h3>Removed documents beside what was kept</h3><div class="samples">{pairs}</div>')
    return "".join(parts)


def shown_documents(page: str) -> set[bytes] | None:
    """The doc_ids of the documents whose texts a page shows; None where it does not say of every text whose it is."""
    found: set[bytes] = set()
    for attributes in _SHOWN.findall(page):
        whose = _WHOSE.search(attributes)
        if whose is None:
            return None
        found.update(map(bytes.fromhex, whose[1].split()))
    return found


def _proposed(report: Mapping[str, Any]) -> str:
    if not report.get("candidate_pairs"):
        return ""
    proposed, verified = report["candidate_pairs"], report["verified_pairs"]
    return f": {num(verified)} of {num(proposed)} proposed pairs were"


def _kinds(stats: Mapping[str, Any]) -> str:
    kinds = list(stats["duplicates"]["by_kind"])
    if not kinds:
        return ""
    rows = []
    for name, source in stats["sources"].items():
        counts = [source["duplicates"].get(kind, 0) for kind in kinds]
        rows.append([show(name), *map(num, counts), percent(sum(counts), source["kept"])])
    return table(["source", *map(show, kinds), "of passed"], rows)


def _sizes(sizes: Counter[int]) -> str:
    """Number of clusters by size, in octaves beyond 4."""
    grouped: Counter[tuple[int, int]] = Counter()
    for size, count in sizes.items():
        top = 1 << (size - 1).bit_length()
        grouped[(size, size) if size <= 4 else (top // 2 + 1, top)] += count
    rows = []
    for (low, high), count in sorted(grouped.items()):
        label = num(low) if low == high else f"{num(low)}–{num(high)}"
        rows.append(Bar(f"{label} documents", (("duplicate", count),), num(count)))
    return bars(rows)


def _recall(curve: Any, config: Mapping[str, Any]) -> str:
    points = sorted((float(point[0]), float(point[1])) for point in curve)
    if len(points) < 2:
        return ""
    line = " ".join(f"{100 * s:.2f},{100 - 100 * p:.2f}" for s, p in points)
    drawing = f'<polyline class="curve" points="{line}"/>'
    caption = "How likely a pair is proposed, by its similarity"
    if config.get("bands") and config.get("rows"):
        caption += (
            f", with {show(config['bands'])} bands of {show(config['rows'])} rows: 1 − (1 − s<sup>r</sup>)<sup>b</sup>"
        )
    threshold = config.get("threshold")
    if threshold is not None:
        at = float(threshold)
        drawing += f'<line class="guide" x1="{100 * at:.2f}" x2="{100 * at:.2f}" y1="0" y2="100"/>'
        caption += (
            f". The dashed line is the threshold {at:g}; {_interpolate(points, at):.1%} of pairs there are proposed"
        )
    axis = [Tick(value / 5, f"{value / 5:g}") for value in range(6)]
    return "<h3>Recall of the proposal</h3>" + plot(drawing, axis, axis, caption + ".", "Recall curve")


def _interpolate(points: list[tuple[float, float]], at: float) -> float:
    for (s0, p0), (s1, p1) in itertools.pairwise(points):
        if s0 <= at <= s1:
            return p0 + (p1 - p0) * ((at - s0) / (s1 - s0) if s1 > s0 else 0)
    return points[0][1] if at < points[0][0] else points[-1][1]


def _largest(found: Survey) -> str:
    rows = []
    for cluster in found.clusters.largest:
        shown = []
        for member in cluster.members:
            known = member in found.members
            shown.append(_origin(found.members[member]) if known else f'<span class="mono">{member.hex()}</span>')
        more = cluster.size - len(shown)
        tail = f'<br><span class="muted">and {num(more)} more</span>' if more > 0 else ""
        name = f'<span class="id" title="{cluster.cluster_id.hex()}">{cluster.cluster_id.hex()[:8]}</span>'
        rows.append([num(cluster.size), name, "<br>".join(shown) + tail])
    return table(["documents", "cluster", "some of them"], rows, "texts")


def _origin(row: Mapping[str, Any]) -> str:
    """The URL of a page, or the record that it was read from where it has none."""
    if row["url"] is not None:
        return link(row["url"])
    place = [f"byte {row['record_offset']}"] if row["record_offset"] is not None else []
    place += [f"record {row['record_id']}"] if row["record_id"] is not None else []
    return f'<span class="url">{show(", ".join([row["source_file"][-160:], *place]), 300)}</span>'


def _pair(pair: Pair) -> str:
    decision = pair.decision
    similarity = decision.get("similarity")
    facts = [f"similarity {similarity:.3f}"] if similarity is not None else []
    facts += [f"band {decision['band']}"] if decision.get("band") is not None else []
    title = f"<h3>{show(decision['kind'])} duplicate <span>{' · '.join(facts)}</span></h3>"
    if pair.removed and pair.kept and pair.removed.text and pair.removed.text == pair.kept.text:
        urls = f"{_origin(pair.removed.row)} is the same text as {_origin(pair.kept.row)}"
        text = _text(pair.kept, show(pair.kept.text[:PAIR_CHARS]), PAIR_CHARS, pair.removed)
        body = f'<p class="where">{urls}</p>{text}'
        return f'<article class="sample" data-kind="duplicates">{title}{body}</article>'
    texts = [side.text or "" if side is not None else "" for side in (pair.removed, pair.kept)]
    marked = _differences(texts[0], texts[1]) if all(texts) else tuple(show(text, PAIR_CHARS) for text in texts)
    sides = ""
    for name, side, text, key in (
        ("removed", pair.removed, marked[0], "doc_id"),
        ("kept", pair.kept, marked[1], "duplicate_of"),
    ):
        if side is None:
            body = f'<p class="where mono">{decision[key].hex()} (in a partition that was not surveyed)</p>'
        elif side.text is None:
            body = f'<p class="where">{_origin(side.row)}</p><p class="muted">Its text was purged.</p>'
        else:
            body = f'<p class="where">{_origin(side.row)}</p>{_box(text, side)}'
        sides += f"<div><h3><span>{name}</span></h3>{body}</div>"
    return f'<article class="sample" data-kind="duplicates">{title}<div class="sides">{sides}</div></article>'


def _differences(left: str, right: str) -> tuple[str, str]:
    """Both texts as HTML around their first difference, with the words that the other does not have marked."""
    sides = [text[:COMPARED_CHARS].split() for text in (left, right)]
    same = 0
    while same < min(map(len, sides)) and sides[0][same] == sides[1][same]:
        same += 1
    start = max(0, same - PAIR_WORDS // 4)
    windows = [side[start : start + PAIR_WORDS] for side in sides]
    matcher = difflib.SequenceMatcher(None, windows[0], windows[1], autojunk=False)
    marked: list[list[str]] = [["… "] * (start > 0), ["… "] * (start > 0)]
    for kind, *spans in matcher.get_opcodes():
        for out, words, span in zip(marked, windows, (spans[:2], spans[2:]), strict=True):
            text = show(" ".join(words[slice(*span)]))
            out.append(f"{text} " if kind == "equal" or not text else f"<mark>{text}</mark> ")
    for out, words in zip(marked, sides, strict=True):
        out.append("…" * (len(words) > start + PAIR_WORDS))
    return "".join(marked[0]), "".join(marked[1])


def _box(shown: str, *samples: Sample) -> str:
    """Text, and whose it is."""
    whose = " ".join(sample.row["doc_id"].hex() for sample in samples)
    return f'<div class="text" data-doc="{whose}" dir="auto" tabindex="0">{shown}</div>'


def _text(sample: Sample, shown: str, limit: int, *others: Sample) -> str:
    """The text of a sample, and of ``others`` that have the same."""
    if sample.text is None:
        had = sample.row["stage"] is None or sample.row["post_filter_hash"] is not None
        why = "Its text was purged." if had else "No text is stored: it was dropped before the quality gate."
        return f'<p class="muted">{why}</p>'
    more = len(sample.text) - limit
    tail = f'<p class="more">… {num(more)} more characters</p>' if more > 0 else ""
    return f"{_box(shown, sample, *others)}{tail}"


def samples_section(found: Survey) -> str:
    """Kept and dropped pages with text, reason, failed rules and measurements, and a filter over them."""
    if not found.samples:
        return ""
    kinds = sorted({_kind(sample) for sample in found.samples}, key=lambda kind: (kind != "kept", kind))
    options = "".join(f'<option value="{show(kind)}">{show(kind)}</option>' for kind in kinds)
    return (
        '<p class="lead">A keyed choice: a third kept pages, the others as many different reasons as there are. '
        "Shares here mean nothing.</p>"
        '<form id="filter" hidden><label>Show <select name="kind"><option value="">everything</option>'
        f'{options}</select></label><label>with <input name="words" type="search" placeholder="words"></label>'
        '<span id="shown"></span></form>'
        f'<div class="samples">{"".join(_sample(sample) for sample in found.samples)}</div>'
    )


def _kind(sample: Sample) -> str:
    return "kept" if sample.outcome == "kept" else str(sample.row["stage"])


def _sample(sample: Sample) -> str:
    row = sample.row
    kind = _kind(sample)
    failed = list(row["failed_rules"] or ())
    title = "Kept" if kind == "kept" else f"Dropped: {show(row['reason'])}"
    facts = [show(row["source"])]
    if row["language"] is not None:
        score = f" {row['language_score']:.2f}" if row["language_score"] is not None else ""
        facts.append(f"{show(row['language'])}{score}")
    if sample.text is not None:
        facts.append(f"{num(len(sample.text))} characters")
    where = f"{row['source_file'].rpartition('/')[2]}"
    if row["record_offset"] is not None:
        where += f" at {row['record_offset']}"
    rules = f'<p class="rules"><b>failed</b> {", ".join(show(rule) for rule in failed)}</p>' if failed else ""
    text = _text(sample, show((sample.text or "")[:TEXT_CHARS]), TEXT_CHARS)
    return (
        f'<article class="sample" data-kind="{show(kind)}"><h3>{title} <span>{" · ".join(facts)}</span></h3>'
        f'<p class="where">{link(row["url"])} <span class="muted">· {show(where, 200)}</span></p>'
        f"{text}{rules}{_measures(row, set(failed))}</article>"
    )


def _measures(row: Mapping[str, Any], failed: set[str]) -> str:
    values = {name: value for name, value in row.items() if isinstance(value, float) and name not in _NO_MEASURES}
    if not values:
        return ""
    items = "".join(
        f"<li{' class=failed' if name in failed else ''}><span>{show(name)}</span><span>{value:.4g}</span></li>"
        for name, value in sorted(values.items(), key=lambda item: (item[0] not in failed, item[0]))
    )
    return (
        f'<details><summary>{counted(len(values), "measurement")}</summary><ul class="measures">{items}</ul></details>'
    )
