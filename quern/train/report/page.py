"""Writes the page of a training run, or of two side by side: one file that needs no network."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from quern import storage
from quern.config import dump_yaml
from quern.errors import InputError
from quern.html import frame as html
from quern.html.pieces import Bar, bars, num, percent, show, table
from quern.train.config.differences import differing
from quern.train.history.ledger import MOVES, UNHEALTHY
from quern.train.report import charts
from quern.train.report.account import PARTS, account, tokens_by_source
from quern.train.report.charts import RANGES, over
from quern.train.report.experts import experts
from quern.train.report.history import ABANDONED, AGAIN, Run, open_run
from quern.words import counted

__all__ = ["REPORT_FILE", "render", "write_report"]

REPORT_FILE = "report.html"

#: Rows of the table of the run's course, and of that of what happened.
_COURSE, _ROWS = 12, 200
#: Kinds of the ledger's lines that tell what happened.
_TOLD = {
    *MOVES,
    *UNHEALTHY,
    "stopped",
    "end",
    "checkpoint_failed",
    "back",
    "corrupt",
    "straggler",
    "slow_links",
    "placement",
}
#: The table of the course: of a stretch's values of a column what is told, to how many digits; -3: significant ones.
_COLUMNS: Mapping[str, tuple[str, Callable[[np.ndarray], Any], int]] = {
    "tokens": ("tokens", itemgetter(-1), 0), "loss, mean": ("loss", np.nanmean, 4), "least": ("loss", np.nanmin, 4),
    "greatest": ("loss", np.nanmax, 4), "norm, median": ("grad_norm", np.nanmedian, 3),
    "norm, greatest": ("grad_norm", np.nanmax, 3), "learning rate": ("lr", itemgetter(-1), -3),
    "tokens/s": ("tokens_per_s", np.nanmedian, 0),
}  # fmt: skip


#: What the planner says of a run's steps of so many tokens: :func:`quern.train.summary.plan_of`.
Plan = Callable[[Run, int], Mapping[str, Any] | None]


def write_report(path: str, out: str | None = None, beside: str | None = None, plan: Plan = lambda *_: None) -> str:
    """Write the page of the training run in the folder ``path`` to ``out`` (default: ``report.html`` in it), whole or
    not at all, and return where it is. ``beside``: another run, drawn on the same axes. Equal files give equal bytes.
    ``plan``: what stands beside the measured figures.

    Raises:
        InputError: one of them is no training run, or has not completed a step; or ``out`` is a folder.
        QuernError: a ledger is damaged, or the page cannot be written.
    """
    runs = [open_run(path)] + ([] if beside is None else [open_run(beside)])
    target = os.path.join(path, REPORT_FILE) if out is None else out
    if os.path.isdir(target):
        raise InputError(f"{target}: expected the name of a file, got a folder")
    storage.publish_bytes(target, render(runs, plan).encode())
    return target


def render(runs: Sequence[Run], plan: Plan = lambda *_: None) -> str:
    """The page as HTML, of one run or of two."""
    curves = partial(charts.curves, runs=runs)
    mfu = {"mfu_full": "MFU, all of the attention matrix", "mfu_causal": "MFU, its causal half"}
    times = {"step_time_s": "step", "data_wait_s": "of it, waiting for data"}
    drawn = {
        "loss": [charts.loss(runs), charts.by_source(runs)],
        "optimiser": [
            curves("Learning rate", names={"lr": "learning rate"}),
            curves("Gradient norm", names={"grad_norm": "norm"}, log=True, mean=True),
        ],
        "speed": [
            curves("Tokens a second", names={"tokens_per_s": "tokens/s"}, mean=True),
            curves("Model FLOPs utilisation", names=mfu, percent=True),
            curves("Seconds a step", names=times, log=True),
            curves("Peak memory of rank 0, GiB", names={"memory_gib": "GiB"}),
        ],
        "other": charts.others(runs),
    }
    drawn = {key: [chart for chart in own if chart["series"]] for key, own in drawn.items()}
    figures = {key: "".join(map(charts.figure, own)) for key, own in drawn.items()}
    grid = {key: f'<div class="two">{own}</div>' if own else "" for key, own in figures.items()}

    def each(section: Callable[[Run], str]) -> str:
        bodies = [(letter, run, section(run)) for letter, run in zip("AB", runs, strict=False)]
        name = "<h3>{}: {}</h3>" if len(runs) > 1 else ""
        return "".join(name.format(letter, show(run.name, 80)) + body for letter, run, body in bodies if body)

    loads = each(experts)
    scripts = ["uplot/uPlot.iife.min.js", "report.js", *(["heat.js"] if loads else [])]
    sections = [
        ("loss", "Loss", _controls() + figures["loss"] + _course(runs)),
        ("optimiser", "Optimiser", grid["optimiser"]),
        ("sources", "Sources", each(_sources)),
        ("experts", "Experts", loads),
        ("speed", "Speed and memory", grid["speed"]),
        ("planned", "Planned and measured", each(lambda run: _planned(run, plan))),
        ("time", "Where the time went", each(_time)),
        ("events", "What happened", each(_events)),
        ("other", "Other figures", grid["other"]),
        ("config", "Config", _config(runs)),
    ]
    return html.frame(
        title=f"quern · {' and '.join(own.name for own in runs)}",
        kicker=f"quern · training run {' beside '.join(show(own.name, 60) for own in runs)}",
        headline="; ".join(map(_headline, runs)),
        tiles=(_tiles(runs[0]) if len(runs) == 1 else "") + each(_notes),
        sections=sections,
        footer=each(_footer) + charts.data_block(runs, [chart for own in drawn.values() for chart in own]),
        css=html.resource("uplot/uPlot.min.css", __package__) + html.resource("style.css", __package__),
        scripts=[html.resource(name, __package__) for name in scripts],
    )


def _headline(run: Run) -> str:
    of = run.config.get("steps")
    all_steps = f" of {num(of)}" if isinstance(of, int) and of != run.reached else ""
    return f"{num(run.reached)}{all_steps} steps, {show(run.ended)}"


def _tiles(run: Run) -> str:
    column, held, spent = run.kept, np.array([own.loss for own in run.validations]), account(run)
    tail, attempts = max(1, len(run.order) // 100), counted(len(run.attempts) - run.first, "attempt")
    cells = [
        ("training loss", over(np.nanmean, column("loss")[-tail:]), 4, f"mean of the last {counted(tail, 'step')}"),
        ("held-out loss", over(itemgetter(-1), held), 4, f"least {_figure(over(np.nanmin, held), 4)}"),
        ("tokens", over(np.nanmax, column("tokens")), 0, counted(run.reached, "step")),
        ("tokens a second", over(np.nanmedian, column("tokens_per_s")), 0, "median step"),
        ("MFU, %", 100 * over(np.nanmedian, column("mfu_full")), -3, "median; all of the attention matrix"),
    ]
    shown = [(name, _figure(value, digits), note) for name, value, digits, note in cells if not math.isnan(value)]
    return html.tiles(shown + ([] if spent is None else [("time", _duration(sum(spent.values())), attempts)]))


def _notes(run: Run) -> str:
    """What the reader should know before looking at curves."""
    spikes, norms, skipped, wrong = (
        run.kept(name) == 1 for name in ("loss_spike", "grad_norm_spike", "skipped", "non_finite")
    )
    told = {
        "spikes": spikes | norms, "steps skipped": skipped, "steps not finite": wrong,
        "steps done again after an attempt that ended": run.fate == AGAIN,
        "steps abandoned by a rollback": run.fate == ABANDONED,
    }  # fmt: skip
    found = "; ".join(f"{what}: {num(int(rows.sum()))}" for what, rows in told.items() if rows.any())
    lines = [f"{found}."] if found else []
    if run.first and (fork := next((e for e in reversed(run.entries) if e["kind"] == "fork"), None)):
        lines.append(f"A fork: the steps before {num(fork['step'])} are those of {show(fork['path'], 200)}.")
    if damaged := run.metrics.damaged:
        lines.append(f"{counted(len(damaged), 'line')} of metrics.jsonl cannot be read, the first is line "
                     f"{num(damaged[0])}; their figures are missing here.")  # fmt: skip
    return "".join(f'<p class="alarm">{line}</p>' for line in lines)


def _controls() -> str:
    legend = "".join(
        f'<span><b style="color:var({colour})">{sign}</b> {name}</span>' for sign, colour, name in charts.MARKS.values()
    )
    axes = "".join(
        f'<label><input type="radio" name="axis" value="{axis}"{" checked" if axis == "step" else ""}> {name}</label>'
        for axis, name in charts.UNITS.items()
    )
    return (
        f'<form id="axes" hidden>x axis: {axes}<span class="muted">Drag over a chart to zoom, all charts follow; a '
        f'double click shows the whole run.</span></form><p class="legend">{legend}</p>'
        '<noscript><p class="alarm">Curves are drawn by a script of this page, which this browser does not run. The '
        "tables have the figures.</p></noscript>"
    )


def _course(runs: Sequence[Run]) -> str:
    """The run in a dozen stretches, exact; of two runs their losses at equal steps."""
    names = ["tokens", "loss, mean"] if len(runs) > 1 else [*_COLUMNS]
    known = [{name: run.kept(name) for name, _, _ in _COLUMNS.values()} for run in runs]
    stop = min(run.reached for run in runs)
    start = min(max(int(run.steps[0]) for run in runs), stop)
    rows = []
    for first, end in pairwise(np.unique(np.linspace(start, stop, _COURSE + 1).astype(int)).tolist()):
        cells, means = [f"{num(first)}–{num(end - 1)}" if end - 1 > first else num(first)], []
        for run, columns in zip(runs, known, strict=True):
            own = slice(*np.searchsorted(run.steps, (first, end)))
            for name in names:
                column, function, digits = _COLUMNS[name]
                cells.append(_figure(over(function, columns[column][own]), digits))
            inside = [one.loss for one in run.validations if first < one.step <= end]
            cells.append(_figure(inside[-1] if inside else math.nan, 4))
            means.append(over(np.nanmean, columns["loss"][own]))
        rows.append(cells + [_figure(two - one, 4) for one, two in pairwise(means)])
    letters = ["A ", "B "] if len(runs) > 1 else [""]
    head = ["steps", *(letter + name for letter in letters for name in [*names, "held out"])]
    head += ["B − A, loss"] if len(runs) > 1 else []
    note = (
        f"Loss in nats a target. A long curve is drawn from {RANGES} ranges, of each its first step and those of its "
        "least and greatest value, so that no spike is lost; means are of 200 ranges. The table is of all steps."
    )
    return f'<h3>The course of the run</h3>{table(head, rows)}<p class="muted">{note}</p>'


def _sources(run: Run) -> str:
    found = tokens_by_source(run)
    total = sum(read for _, read, _ in found)
    rows = [
        [show(name, 80), num(read), percent(read, total), num(epoch), num(read / (epoch or 1), 2)]
        for name, read, epoch in found
    ]
    lead = html.lead("What the present weights have read, by the ledger: abandoned steps are not counted.")
    return lead + table(["source", "tokens read", "share", "tokens of an epoch", "epochs"], rows) if found else ""


def _time(run: Run) -> str:
    spent = account(run) or {}
    total = sum(spent.values())
    looks = {"compute": "kept", "again": "dropped", "abandoned": "dropped", "between": "dropped"}
    rows = [
        Bar(PARTS[name], ((looks.get(name, "duplicate"), value),), f"{_duration(value)} · {percent(value, total)}")
        for name, value in spent.items()
        if value > 0
    ]
    good = percent(spent.get("compute", 0.0), total)
    lead = (
        f"Goodput {good} of the {_duration(total)} from the first line to the last: steps that the present weights are "
        f"made of, without waits. A save that overlaps with steps is in their time."
    )
    return html.lead(lead) + bars(rows, "reasons") if rows else ""


def _planned(run: Run, plan: Plan) -> str:
    """What the planner says beside what the last attempt measured; nothing where it measured none of it."""
    last, device = next(own for own in reversed(run.attempts) if len(own.rows)), run.record.get("device")
    rows = last.rows[min(5, len(last.rows) // 2) :]  # the first steps compile and warm up
    tokens = run.metrics.column("tokens_per_s")[rows] * run.metrics.column("step_time_s")[rows]
    rows, told = rows[np.abs(tokens - tokens[-1]) < 0.5], plan(run, round(np.nan_to_num(tokens[-1])))  # of its phase
    if told is None or not (told["time"] or told["cuda"]):
        return ""

    def measured(name: str, function: Callable[[np.ndarray], Any] = np.nanmedian) -> float:
        return over(function, run.metrics.column(name)[rows])

    most = [measured(name, np.nanmax) for name in ("ranks.memory_gib.max", "memory_gib") if told["cuda"]]
    cells = [("memory of tensors, GiB", told["tensors"] / 2**30, over(np.nanmax, np.array(most)), 2)]
    if (time := told["time"]) is not None:
        parts, ranks = dict(time["parts"]), measured("ranks.comm_wait_s.median")
        waits = parts.pop("dp messages", 0.0) if told["waits"] else math.nan
        cells = [
            ("seconds a step", time["seconds"], measured("step_time_s"), -3),
            ("of it waits for data", math.nan, measured("data_wait_s"), -3),
            ("of it waits for other ranks; dp messages", waits, ranks, -3),
            *((f"of it {show(name)}", value, math.nan, -3) for name, value in parts.items() if value >= 5e-7),
            ("tokens a second and GPU", time["tokens_per_gpu_s"], measured("tokens_per_s") / told["gpus"], 0),
            ("MFU, %, all of the attention matrix", 100 * time["mfu_full"], 100 * measured("mfu_full"), 2),
            ("MFU, %, its causal half", 100 * time["mfu_causal"], 100 * measured("mfu_causal"), 2), *cells,
            ("with what the device takes besides, GiB", told["memory"]["needs"] / 2**30, math.nan, 2),
        ]  # fmt: skip
    shown = [
        [name, _figure(plan, digits), _figure(found, digits), _figure(found / (plan or math.nan), 2)]
        for name, plan, found, digits in cells if not (math.isnan(plan) and math.isnan(found))
    ]  # fmt: skip
    text = (
        f"Planned: the config of the last start on {counted(told['gpus'], 'rank')}, "
        f"{show(told['hardware'] or 'of a GPU without a profile', 200)}; the run’s record names "
        f"{show(device, 80) if device else 'no device'}. Measured: medians of {counted(len(rows), 'step')} of attempt "
        f"{last.number}, the last with steps, without its first ones and those of another batch; of memory the most "
        "that was allocated on a rank."
        + " Config and layout of other attempts, which are not in it, may differ." * (len(run.attempts) > 1)
        + " The last start has completed no step, and may differ too." * (last is not run.attempts[-1])
    )
    return html.lead(text) + table(["", "planned", "measured", "measured / planned"], shown)


def _events(run: Run) -> str:
    """Starts, ends, failed saves and unhealthy steps, as the ledger has them."""
    rows = []
    for own in run.attempts[run.first :]:
        for fact in own.facts:
            if fact["kind"] in _TOLD:
                left_out = ("time", "kind", "step", "data_step", "order", "name")
                told = [f"{key} {_short(value)}" for key, value in fact.items() if key not in left_out]
                if fact["kind"] in MOVES:
                    told = [f"{counted(len(own.rows), 'step')} in {_duration(own.last - own.began)}"]
                elif fact["step"] + (fact["kind"] in UNHEALTHY) > own.stop:
                    told.append("left behind since")
                cells = num(fact["step"]), num(own.number), show(fact["kind"].replace("_", " "))
                rows.append([*cells, show(", ".join(told), 200)])
    states = [*run.checkpoints.values()]
    failed, more = states.count("failed"), f", and {num(len(rows) - _ROWS)} lines earlier" if len(rows) > _ROWS else ""
    lead = html.lead(
        f"Of the present branch {counted(len(states) - failed, 'checkpoint')}, {states.count('good')} of them good "
        f"(healthy steps followed), and {counted(failed, 'failed save')}{more}."
    )
    return lead + table(["step", "attempt", "what", ""], rows[-_ROWS:], "texts")


def _config(runs: Sequence[Run]) -> str:
    """The config, or in which keys those of two runs differ."""
    if len(runs) == 1:
        return f'<pre class="config">{show(dump_yaml(runs[0].config))}</pre>'
    found = differing(dict(runs[0].config), dict(runs[1].config))
    rows = [[f"<code>{show(key)}</code>", show(had), show(has)] for key, had, has in found]
    return table(["key", "A", "B"], rows, "texts") if rows else "<p>The configs of their last starts are the same.</p>"


def _footer(run: Run) -> str:
    told = [run.record.get(key) for key in ("layout", "versions")]
    facts = [f"{show(key)} {show(value, 40)}" for own in told if isinstance(own, dict) for key, value in own.items()]
    ends = "curves are drawn by uPlot (MIT licence), which stands in this file"
    return f"<p>{' · '.join([f'Run {show(run.path, 300)}', *facts, ends])}</p>"


def _figure(value: float, digits: int) -> str:
    shown = f"{value:.3g}" if digits < 0 else num(value, digits).replace("-", "−")
    return "–" if math.isnan(value) else shown


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    return str(timedelta(seconds=round(seconds))) if seconds >= 99.5 else f"{_figure(seconds, 1)} s"
