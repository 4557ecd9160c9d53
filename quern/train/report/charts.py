"""Lays out the charts of a training run's page as plain JSON: their lines, thinned so that every extremum stays, and
what is marked on them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quern.html.pieces import show
from quern.train.history.ledger import nulled
from quern.train.report.history import ABANDONED, Run

__all__ = [
    "BY_LAYER", "MARKS", "RANGES", "UNITS", "Chart", "by_source", "curves", "data_block", "figure", "loss", "others",
    "over", "thin",
]  # fmt: skip

F64 = NDArray[np.float64]
#: Where steps stand on each axis that the reader can choose, float64 [steps] each: ``step``, how many are complete;
#: ``tokens``; ``hours`` since the start. NaN where the run does not tell.
Axes = Mapping[str, F64]
Chart = dict[str, Any]
Lines = list[dict[str, Any]]

#: What is marked: its sign, the variable of the page's colours that it has, and what it is called.
MARKS = {
    "spike": ("○", "--duplicate", "spike"), "skipped": ("×", "--dropped", "skipped"),
    "non_finite": ("!", "--dropped", "not finite"), "good": ("▲", "--kept", "good checkpoint"),
    "saved": ("△", "--soft", "checkpoint"), "failed": ("▽", "--dropped", "failed save"),
    "restart": ("┊", "--soft", "restart"), "rollback": ("│", "--dropped", "rollback"),
}  # fmt: skip
#: The axes that the reader can choose, in words.
UNITS = {"step": "steps", "tokens": "tokens", "hours": "hours since the start"}
#: Keys of a step in metrics.jsonl that have a place on the page, or say where a row belongs.
_KNOWN = {
    "data_step", "loss", "grad_norm", "lr", "tokens", "valid_tokens", "tokens_per_s", "step_time_s", "data_wait_s",
    "memory_gib", "mfu_full", "mfu_causal", "loss_spike", "grad_norm_spike", "non_finite", "skipped", "time",
}  # fmt: skip
#: Columns of the map of experts: one for each layer.
BY_LAYER = "experts.max_over_mean_of_layer."
#: Ranges of equally many steps in which each line keeps its first step, and those with its least and greatest value.
RANGES = 800
#: Points of a line of means.
_MEANS = 200
#: Lines of one chart that are drawn at most.
_MAX_LINES = 24


def curves(title: str, runs: Sequence[Run], names: Mapping[str, str], *, mean: bool = False, **options: bool) -> Chart:
    """A chart of columns of the metrics: ``names`` gives each a label. ``mean``: means over what is faint. ``options``:
    ``log`` (the scale that it begins with), ``percent`` and ``marked``."""
    lines: Lines = []
    for run in runs:
        axes, known = _axes_of(run, run.order), [name for name in names if np.isfinite(run.kept(name)).any()]
        for place, name in enumerate(known):
            lines += _lines(runs, run, names[name], axes, run.kept(name), place, mean=mean)
    return {"title": title, "series": lines, **options}


def loss(runs: Sequence[Run]) -> Chart:
    """Training loss with its means, what was abandoned, and the held-out loss."""
    made = curves("Loss", runs, {"loss": "training"}, mean=True, log=True, marked=True)
    for run in runs:
        for attempt in run.attempts:
            rows = attempt.rows[run.fate[attempt.rows] == ABANDONED]
            values, label = run.metrics.column("loss")[rows], f"abandoned, attempt {attempt.number}"
            made["series"] += _lines(runs, run, label, _axes_of(run, rows), values, look="branch")
        made["series"] += _lines(runs, run, "held out", *_held_out(run), 2, look="dots")
    return made


def by_source(runs: Sequence[Run]) -> Chart:
    """Held-out loss by source, where there are several."""
    lines: Lines = []
    for run in runs:
        names = dict.fromkeys(name for own in run.validations for name in own.sources)
        for place, name in enumerate(names if len(names) > 1 else ()):
            lines += _lines(runs, run, name, *_held_out(run, name), place, look="dots")
    return {"title": "Held-out loss by source", "series": lines, "log": True}


def _held_out(run: Run, source: str | None = None) -> tuple[Axes, F64]:
    """Held-out loss of all sources together, or of one, of the present branch, by step."""
    own = run.validations
    values = [one.loss if source is None else one.sources.get(source, np.nan) for one in own]
    return _axes_at(run, np.array([one.step for one in own], np.float64)), np.array(values, np.float64)


def others(runs: Sequence[Run]) -> list[Chart]:
    """Charts of every other number in the metrics. A mapping of numbers makes one chart with a line a name."""
    groups: dict[str, dict[str, str]] = defaultdict(dict)
    drawn = {name for run in runs for name in run.metrics.columns if name.startswith(BY_LAYER)}
    for name in dict.fromkeys(name for run in runs for name in run.metrics.columns if name not in _KNOWN | drawn):
        outer, _, inner = name.rpartition(".") if name.startswith("ranks.") else name.partition(".")
        if len(groups[outer]) < _MAX_LINES:
            groups[outer][name] = inner or outer
    titles = {outer: outer.replace("_", " ").replace(".", ": ").capitalize() for outer in groups}
    return [curves(titles[outer], runs, names, mean="rank" not in outer) for outer, names in groups.items()]


def figure(chart: Chart) -> str:
    """The place of a chart on the page, and what it says to those who do not see it."""
    names = ", ".join(dict.fromkeys(line["label"] for line in chart["series"]))
    return (
        f'<figure class="curve"><h3>{show(chart["title"], 80)}</h3><div class="chart" role="img" '
        f'aria-label="{show(chart["title"], 80)}: {show(names, 300)}. The tables have the figures."></div></figure>'
    )


def data_block(runs: Sequence[Run], charts: Sequence[Chart]) -> str:
    """What the script draws, in a block that no browser runs. ``charts``: in the order of the page."""
    every = [(axis, own) for chart in charts for one in chart["series"] for axis, own in one["x"].items()]
    known = {name: [x for axis, own in every if axis == name for x in own if x is not None] for name in UNITS}
    ranges = {name: [min(own), max(own)] for name, own in known.items() if own}
    data = {"charts": charts, "ranges": ranges, "units": UNITS, "signs": MARKS, "marks": _marks(runs)}
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="curves">{text}</script>'


def _marks(runs: Sequence[Run]) -> Lines:
    """A line of marks for each kind of a run, without a value where they do not belong to one."""
    made: Lines = []
    for run in runs:
        starts: dict[str, list[int]] = defaultdict(list)
        for own in run.attempts[run.first + 1 :]:
            starts["rollback" if own.kind == "rollback" else "restart"].append(own.step)
        for kind, steps in starts.items():
            at = np.array(steps, np.float64)
            made.append(_line(kind, {**_axes_at(run, at + 1), "step": at}, at * np.nan, "", 0))
        for kind in ("good", "saved", "failed"):
            at = np.array([step for step, own in run.checkpoints.items() if own == kind], np.float64)
            made.append(_line(kind, _axes_at(run, at), at * np.nan, "", 0))
        odd = {name: run.kept(name) == 1 for name in ("skipped", "non_finite", "loss_spike", "grad_norm_spike")}
        spikes = odd["loss_spike"] | odd["grad_norm_spike"]
        for kind, rows in (
            ("skipped", odd["skipped"]), ("non_finite", odd["non_finite"] & ~odd["skipped"]),
            ("spike", spikes & ~odd["skipped"] & ~odd["non_finite"]),
        ):  # fmt: skip
            made.append(_line(kind, _axes_of(run, run.order[rows]), run.kept("loss")[rows], "", 0))
    return [own for own in made if own["y"]]


def _lines(
    runs: Sequence[Run], run: Run, label: str, axes: Axes, values: F64, place: int = 0, *, look: str = "line",
    mean: bool = False,
) -> Lines:  # fmt: skip
    """What is drawn of the line number ``place`` of a run: nothing where no value is finite."""
    if not np.isfinite(values).any():
        return []
    number = list(runs).index(run)
    name, colour = f"{'AB'[number]} {label}" if len(runs) > 1 else label, number + place * len(runs)
    if not mean or len(values) < 2 * _MEANS:
        return [_line(name, axes, values, look, colour)]
    ranges = np.array_split(np.arange(len(values)), _MEANS)  # their means stand at the last step of each
    smooth = np.array([over(np.nanmean, values[own]) for own in ranges])
    ends = {axis: own[[at[-1] for at in ranges]] for axis, own in axes.items()}
    return [_line(name, axes, values, "faint", colour), _line(f"{name}, mean", ends, smooth, "line", colour)]


def _axes_of(run: Run, rows: NDArray[np.int64]) -> Axes:
    """Of rows of the run's metrics; with step 0 one step is complete."""
    column, began = run.metrics.column, run.attempts[run.first].began
    steps = run.metrics.step[rows].astype(np.float64) + 1
    return {"step": steps, "tokens": column("tokens")[rows], "hours": (column("time")[rows] - began) / 3600}


def _axes_at(run: Run, steps: F64) -> Axes:
    """Of the moments at which the present branch had completed so many steps."""
    places = np.searchsorted(run.steps + 1, steps, "right") - 1
    return {**_axes_of(run, run.order[np.maximum(places, 0)]), "step": steps}


def _line(label: str, axes: Axes, values: F64, look: str, colour: int) -> dict[str, Any]:
    """A line of a chart as plain JSON. ``look``: ``faint``, ``line``, ``dots`` or ``branch``; ``colour``: a number of
    the palette."""
    places = thin(values)
    x = {name: nulled(own[places].tolist(), 12) for name, own in axes.items()}
    return {"label": label, "x": x, "y": nulled(values[places].tolist(), 6), "look": look, "colour": colour}


def thin(values: F64) -> NDArray[np.int64]:
    """The places to draw, ascending: all of few; of more, in each of :data:`RANGES` ranges, the first and those of the
    least and the greatest value; and the last of all. A gap is drawn only where a whole range has no finite value."""
    size = len(values)
    if size <= 4 * RANGES:
        return np.arange(size)
    places = [size - 1]
    for first, stop in pairwise(place * size // RANGES for place in range(RANGES + 1)):
        places.append(first)
        if np.isfinite(values[first:stop]).any():
            places += [first + int(best(values[first:stop])) for best in (np.nanargmin, np.nanargmax)]
    return np.unique(places)


def over(function: Callable[[F64], Any], values: F64) -> float:
    """``np.nanmean`` and its like, NaN where no value is finite."""
    return float(function(values)) if np.isfinite(values).any() else np.nan
