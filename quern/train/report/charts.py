"""Lays out the charts of a training run's page as plain JSON: their lines, and what is marked on them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quern.html.pieces import show
from quern.train.report.history import ABANDONED, Run
from quern.train.report.series import Axes, Series, axes_of, means, thin

__all__ = ["Chart", "by_source", "curves", "data_block", "extra", "figure", "held_out", "loss", "marks"]

#: Keys of a step in metrics.jsonl that have a place on the page, or say where a row belongs.
_KNOWN = {
    "data_step", "loss", "grad_norm", "lr", "tokens", "valid_tokens", "tokens_per_s", "step_time_s", "data_wait_s",
    "memory_gib", "mfu_full", "mfu_causal", "loss_spike", "grad_norm_spike", "non_finite", "skipped", "time",
}  # fmt: skip
#: Lines of one chart, and of marks of one kind, that are drawn at most.
_MAX_LINES, _MAX_MARKS = 24, 400

Chart = dict[str, Any]


def curves(key: str, title: str, runs: Sequence[Run], names: Mapping[str, str], **options: Any) -> Chart | None:
    """A chart of columns of the metrics: ``names`` gives each a label. None: no run has any. ``options``: ``log`` (the
    axis it begins with), ``marked``, ``percent``, and ``mean`` for means over what is faint."""
    lines: list[Series] = []
    for number, run in enumerate(runs):
        found = {label: run.kept(name) for name, label in names.items() if np.isfinite(run.kept(name)).any()}
        axes = axes_of(run, run.order)
        for place, (label, values) in enumerate(found.items()):
            colour = number + place * len(runs)
            lines += _drawn(_named(runs, run, label), axes, values, colour, bool(options.get("mean")))
            if place == 0 and options.get("branches"):
                lines += _branches(runs, run, next(iter(names)), colour)
    return _chart(key, title, lines, options)


def loss(runs: Sequence[Run]) -> Chart | None:
    """Training loss with its means, what was abandoned, and the held-out loss."""
    made = curves("loss-chart", "Loss", runs, {"loss": "training"}, log=True, marked=True, mean=True, branches=True)
    lines = [
        Series(_named(runs, run, "held out"), axes, values, "dots", number + 2)
        for number, run in enumerate(runs)
        for axes, values in [held_out(run)]
        if len(values)
    ]
    if made is None:
        return _chart("loss-chart", "Loss", lines, {"log": True})
    return made | {"series": made["series"] + [line.to_dict() for line in lines]}


def by_source(runs: Sequence[Run]) -> Chart | None:
    """Held-out loss by source, where there are several."""
    lines = []
    for number, run in enumerate(runs):
        names = dict.fromkeys(name for own in run.validations for name in own.sources)
        for place, name in enumerate(names if len(names) > 1 else ()):
            axes, values = held_out(run, name)
            lines.append(Series(_named(runs, run, name), axes, values, "dots", number + place * len(runs)))
    return _chart("held-out-chart", "Held-out loss by source", lines, {"log": True})


def held_out(run: Run, source: str | None = None) -> tuple[Axes, NDArray[np.float64]]:
    """Held-out loss of all sources together, or of one, of the present branch, by step."""
    own = run.validations
    values = np.array([one.loss if source is None else one.sources.get(source, np.nan) for one in own])
    began, steps = run.attempts[run.first].began, np.array([one.step for one in own], np.float64)
    hours = (np.array([one.time for one in own]) - began) / 3600
    return Axes(steps, _tokens_at(run, steps), hours), values


def extra(runs: Sequence[Run]) -> dict[str, list[Chart]]:
    """Charts of every other number in the metrics: ``sources`` (losses by source), ``ranks`` and ``other``.

    A mapping of numbers makes one chart with a line a name.
    """
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    for run in runs:
        for name in run.metrics.columns:
            if name not in _KNOWN:
                outer, _, inner = name.rpartition(".") if name.startswith("ranks.") else name.partition(".")
                groups[outer][name] = inner or outer
    found: dict[str, list[Chart]] = {"sources": [], "ranks": [], "other": []}
    for outer, names in groups.items():
        kind = "ranks" if "rank" in outer or "slowest" in outer else "other"
        if kind == "other" and len(names) > 1 and ("source" in outer or "loss" in outer):
            kind = "sources"
        few = dict(list(names.items())[:_MAX_LINES])
        key = f"extra-{sum(map(len, found.values()))}"
        made = curves(key, outer.replace("_", " ").replace(".", ": ").capitalize(), runs, few, mean=kind != "ranks")
        if made is not None:
            found[kind].append(made)
    return found


def marks(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What is marked: restarts, rollbacks, checkpoints, and steps that were not as they should be."""
    made: list[dict[str, Any]] = []
    for number, run in enumerate(runs):
        for own in run.attempts[run.first + 1 :]:
            kind = "rollback" if own.kind == "rollback" else "restart"
            made.append({"kind": kind, "step": own.step, "hours": own.began, "run": number})
        for saved in run.checkpoints:
            if saved.kept:
                kind = "failed" if saved.failed else "good" if saved.good else "saved"
                made.append({"kind": kind, "step": saved.step, "run": number})
        for row in run.order[np.flatnonzero(_odd(run)[run.order])]:
            told = {name for name in ("skipped", "non_finite") if run.metrics.column(name)[row] == 1}
            kind = "skipped" if "skipped" in told else "non_finite" if told else "spike"
            value = run.metrics.column("loss")[row]
            y = {"y": float(value)} if np.isfinite(value) else {}
            made.append({"kind": kind, "step": int(run.metrics.step[row]) + 1, "run": number, **y})
    return [_placed(runs[mark["run"]], mark) for mark in _few(made)]


def figure(chart: Chart | None) -> str:
    """The place of a chart on the page, and what it says to those who do not see it."""
    if chart is None:
        return ""
    names = ", ".join(dict.fromkeys(line["label"] for line in chart["series"]))
    return (
        f'<figure class="curve"><h3>{show(chart["title"], 80)}</h3><div class="chart" id="{chart["key"]}" role="img" '
        f'aria-label="{show(chart["title"], 80)}: {show(names, 300)}. The tables have the figures."></div></figure>'
    )


def data_block(charts: Iterable[Chart | None], marked: Sequence[Mapping[str, Any]]) -> str:
    """What the script draws, in a block that no browser runs."""
    data = {"charts": [chart for chart in charts if chart is not None], "marks": marked}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="curves">{text}</script>'


def _chart(key: str, title: str, lines: Sequence[Series], options: Mapping[str, Any]) -> Chart | None:
    if not lines:
        return None
    series = [line.to_dict() for line in lines]
    told = {name: bool(options.get(name)) for name in ("log", "marked", "percent")}
    return {"key": key, "title": title, "series": series, **told}


def _named(runs: Sequence[Run], run: Run, label: str) -> str:
    return f"{'AB'[list(runs).index(run)]} {label}" if len(runs) > 1 else label


def _drawn(label: str, axes: Axes, values: NDArray[np.float64], colour: int, mean: bool) -> list[Series]:
    places = thin(values)
    smooth = means(axes, values) if mean else None
    drawn = Series(label, axes.at(places), values[places], "line" if smooth is None else "faint", colour)
    return [drawn] if smooth is None else [drawn, Series(f"{label}, mean", *smooth, "line", colour)]


def _branches(runs: Sequence[Run], run: Run, name: str, colour: int) -> list[Series]:
    """What rollbacks have abandoned, a line an attempt."""
    found = []
    for attempt in run.attempts:
        rows = attempt.rows[run.fate[attempt.rows] == ABANDONED]
        if len(rows):
            values = run.metrics.column(name)[rows]
            places = thin(values)
            label = _named(runs, run, f"abandoned, attempt {attempt.number}")
            found.append(Series(label, axes_of(run, rows[places]), values[places], "branch", colour))
    return found[:_MAX_LINES]


def _odd(run: Run) -> NDArray[np.bool_]:
    names = ("loss_spike", "grad_norm_spike", "non_finite", "skipped")
    return np.logical_or.reduce([run.metrics.column(name) == 1 for name in names])


def _few(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most so many of a kind: of those that stand together the one with the greatest loss."""
    kinds: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for mark in made:
        kinds[mark["kind"], mark["run"]].append(mark)
    kept: list[dict[str, Any]] = []
    for own in kinds.values():
        last = max(mark["step"] for mark in own) + 1
        best: dict[int, dict[str, Any]] = {}
        for place, mark in enumerate(own):
            slot = mark["step"] * _MAX_MARKS // last if len(own) > _MAX_MARKS else place
            if slot not in best or mark.get("y", 0.0) > best[slot].get("y", 0.0):
                best[slot] = mark
        kept += best.values()
    return kept


def _placed(run: Run, mark: dict[str, Any]) -> dict[str, Any]:
    """With where it stands on each axis."""
    step = float(mark["step"])
    row = run.order[max(0, int(np.searchsorted(run.steps + 1, step, "right")) - 1)]
    at = axes_of(run, np.array([row])).to_dict()
    hours = (mark["hours"] - run.attempts[run.first].began) / 3600 if "hours" in mark else None
    own = {"step": [step], "hours": at["hours"] if hours is None or np.isnan(hours) else [round(hours, 6)]}
    return {name: value for name, value in mark.items() if name != "hours"} | {"x": at | own}


def _tokens_at(run: Run, steps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Tokens read after so many completed steps, as the surviving rows tell."""
    known, tokens = run.steps + 1, run.kept("tokens")
    places = np.minimum(np.searchsorted(known, steps), len(known) - 1)
    return tokens[places]
