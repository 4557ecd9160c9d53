"""The section of the report page about languages and hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quern.data_pipeline.report.survey import NO_HOST, OUTCOMES, Survey
from quern.html.pieces import Bar, bars, num, percent, show, table
from quern.words import counted

__all__ = ["languages_section", "seen"]

NUM_LANGUAGES = 20
NUM_HOSTS = 20

_LEGEND = (
    '<p class="legend"><span><i class="kept"></i>in the corpus</span><span><i class="duplicate"></i>duplicate</span>'
    '<span><i class="dropped"></i>dropped</span></p>'
)


def _stacked(label: str, counts: Sequence[int]) -> Bar:
    note = f"{num(sum(counts))} <small>· {percent(counts[0], sum(counts))} in</small>"
    return Bar(label, tuple(zip(OUTCOMES, counts, strict=True)), note)


def languages_section(stats: Mapping[str, Any], found: Survey) -> str:
    """Pages by outcome, and tokens, of the most frequent languages and hosts."""
    if not found.languages:
        return ""
    ranked = sorted(found.languages.items(), key=lambda item: (-sum(item[1]), item[0]))
    languages = [_stacked(show(name, 24), counts) for name, counts in ranked[:NUM_LANGUAGES]]
    if len(ranked) > NUM_LANGUAGES:
        rest = [sum(counts[i] for _, counts in ranked[NUM_LANGUAGES:]) for i in range(len(OUTCOMES))]
        languages.append(_stacked(f"{num(len(ranked) - NUM_LANGUAGES)} others", rest))
    hosts = [
        _stacked(f'<span title="{show(name)}">{show(name, 60)}</span>', n) for name, n in found.hosts.top(NUM_HOSTS)
    ]
    known = counted(len(found.hosts.counts.keys() - {NO_HOST}), "host")
    if found.hosts.lost:
        known = f"more than {known}; a host's counts may be short by up to {num(found.hosts.lost)}"
    return (
        f'<p class="lead">{seen(found)} Languages as they were identified; {known}.</p>'
        + _LEGEND
        + f'<div class="two"><div><h3>Languages</h3>{bars(languages, "narrow")}</div>'
        + f"<div><h3>Hosts with the most pages</h3>{bars(hosts)}</div></div>"
        + _tokens_by(stats)
    )


def _tokens_by(stats: Mapping[str, Any]) -> str:
    """Tokens of the most frequent languages and hosts, where the run has counted them."""
    parts = []
    for what, own in sorted(stats.get("tokens_by", {}).items(), reverse=True):
        rows = [
            [show(name, 60), num(tokens), percent(tokens, own["tokens"]), num(documents)]
            for name, tokens, documents in own["most"][:NUM_HOSTS]
        ]
        parts.append(f"<div>{table([what, 'tokens', 'of all', 'documents'], rows)}</div>")
    return f'<h3>Tokens</h3><div class="two">{"".join(parts)}</div>' if parts else ""


def seen(found: Survey) -> str:
    """What part of the run a survey has read, in words; nothing of all of it."""
    if found.complete:
        return ""
    return (
        f"From {num(found.rows_read)} of {num(found.rows)} pages "
        f"({num(found.partitions_read)} of {num(found.partitions)} partitions, chosen by key)."
    )
