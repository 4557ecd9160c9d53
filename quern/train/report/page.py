"""Writes the page of a training run, or of two side by side: one file that needs no network."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from quern import storage
from quern.config import dump_yaml
from quern.errors import InputError
from quern.html import frame as html
from quern.html.pieces import Bar, bars, num, percent, short, show, table
from quern.train.report import charts
from quern.train.report.account import PARTS, account
from quern.train.report.beside import beside_section
from quern.train.report.history import ABANDONED, AGAIN, Run, open_run
from quern.train.report.series import RANGES
from quern.train.report.sources import tokens_by_source
from quern.words import counted

__all__ = ["REPORT_FILE", "render", "write_report"]

REPORT_FILE = "report.html"

#: Rows of the table of the run's course, and of the tables of attempts, checkpoints and odd steps.
_COURSE, _ROWS = 12, 100


def write_report(path: str, out: str | None = None, beside: str | None = None) -> str:
    """Write the page of the training run in the folder ``path`` to ``out`` (default: ``report.html`` in it), whole or
    not at all, and return where it is. ``beside``: another run, drawn on the same axes. Equal files give equal bytes.

    Raises:
        InputError: one of them is no training run, or has not completed a step; or ``out`` is a folder.
        QuernError: a ledger is damaged, or the page cannot be written.
    """
    runs = [open_run(path)] + ([] if beside is None else [open_run(beside)])
    target = os.path.join(path, REPORT_FILE) if out is None else out
    if os.path.isdir(target):
        raise InputError(f"{target}: expected the name of a file, got a folder")
    storage.publish_bytes(target, render(runs).encode())
    return target


def render(runs: Sequence[Run]) -> str:
    """The page as HTML, of one run or of two."""
    run, extra = runs[0], charts.extra(runs)
    drawn: dict[str, list[charts.Chart | None]] = {
        "loss": [charts.loss(runs), charts.by_source(runs), *extra["sources"]],
        "optimiser": [
            charts.curves("lr-chart", "Learning rate", runs, {"lr": "learning rate"}),
            charts.curves("norm-chart", "Gradient norm", runs, {"grad_norm": "norm"}, log=True, mean=True),
        ],
        "speed": [
            charts.curves("speed-chart", "Tokens a second", runs, {"tokens_per_s": "tokens/s"}, mean=True),
            charts.curves("mfu-chart", "Model FLOPs utilisation", runs,
                          {"mfu_full": "MFU, all of the attention matrix", "mfu_causal": "MFU, its causal half"},
                          percent=True),
            charts.curves("step-chart", "Seconds a step", runs,
                          {"step_time_s": "step", "data_wait_s": "of it, waiting for data"}, log=True),
            charts.curves("memory-chart", "Peak memory of rank 0, GiB", runs, {"memory_gib": "GiB"}),
        ],
        "ranks": [*extra["ranks"]], "other": [*extra["other"]],
    }  # fmt: skip
    figures = {key: "".join(map(charts.figure, own)) for key, own in drawn.items()}
    grid = {key: f'<div class="two">{own}</div>' if own else "" for key, own in figures.items()}
    data = charts.data_block([chart for own in drawn.values() for chart in own], charts.marks(runs))
    sections = [
        ("beside", "Two runs", beside_section(runs)),
        ("loss", "Loss", _controls() + figures["loss"] + _courses(runs)),
        ("optimiser", "Optimiser", grid["optimiser"]),
        ("sources", "Sources", "".join(_sources(own, runs) for own in runs)),
        ("speed", "Speed and memory", grid["speed"]),
        ("ranks", "Ranks", grid["ranks"]),
        ("other", "Other figures", grid["other"]),
        ("time", "Where the time went", "".join(_time(own, runs) for own in runs)),
        ("attempts", "Attempts", "".join(_attempts(own, runs) for own in runs)),
        ("checkpoints", "Checkpoints", "".join(_checkpoints(own, runs) for own in runs)),
        ("steps", "Unhealthy steps", "".join(_odd(own, runs) for own in runs)),
        ("config", "Config", _config(run)),
    ]
    return html.frame(
        title=f"quern · {' and '.join(own.name for own in runs)}",
        kicker=f"quern · training run {' beside '.join(show(own.name, 60) for own in runs)}",
        headline="; ".join(map(_headline, runs)),
        tiles=(_tiles(run) if len(runs) == 1 else "") + _notes(runs),
        sections=sections,
        footer=_footer(runs) + data,
        css=_resource("uplot/uPlot.min.css") + _resource("style.css"),
        scripts=[_resource("uplot/uPlot.iife.min.js"), _resource("report.js")],
    )


def _resource(name: str) -> str:
    return files("quern.train.report").joinpath(name).read_text(encoding="utf-8")


def _headline(run: Run) -> str:
    of = run.config.get("steps")
    all_steps = f" of {num(of)}" if isinstance(of, int) and of != run.reached else ""
    return f"{num(run.reached)}{all_steps} steps, {show(run.attempts[-1].ended)}"


def _tiles(run: Run) -> str:
    loss, tokens = run.kept("loss"), run.kept("tokens")
    tail = loss[-max(1, len(loss) // 100) :]
    held = run.validations
    cells = [("training loss", _figure(_mean(tail), 4), f"mean of the last {counted(len(tail), 'step')}")]
    if held:
        last, best = held[-1], min(held, key=lambda own: _least(own.loss))
        cells.append(("held-out loss", _figure(last.loss, 4), f"least {_figure(best.loss, 4)} at {num(best.step)}"))
    if np.isfinite(tokens).any():
        cells.append(("tokens", short(float(np.nanmax(tokens))), counted(run.reached, "step")))
    if np.isfinite(run.kept("tokens_per_s")).any():
        cells.append(("tokens a second", short(_median(run.kept("tokens_per_s"))), "median step"))
    if np.isfinite(run.kept("mfu_full")).any():
        cells.append(("MFU", f"{100 * _median(run.kept('mfu_full')):.1f} %", "median; all of the attention matrix"))
    if (spent := account(run)) is not None:
        cells.append(("time", _duration(sum(spent.values())), counted(len(run.attempts) - run.first, "attempt")))
    return html.tiles(cells)


def _notes(runs: Sequence[Run]) -> str:
    """What the reader should know before looking at curves."""
    lines = []
    for run in runs:
        of = f"{show(run.name)}: " if len(runs) > 1 else ""
        kept = [odd for odd in run.odd if odd.kept]
        spikes, skipped, wrong = (sum(what in odd.what for odd in kept) for what in ("spike", "skipped", "not finite"))
        told = [counted(spikes, "spike")] if spikes else []
        told += [f"{counted(skipped, 'step')} skipped"] if skipped else []
        told += [f"{counted(wrong, 'step')} not finite"] if wrong else []
        again, left = (int((run.fate == fate).sum()) for fate in (AGAIN, ABANDONED))
        told += [f"{counted(again, 'step')} done again after an attempt that ended"] if again else []
        told += [f"{counted(left, 'step')} abandoned by a rollback"] if left else []
        lines += [f'<p class="alarm">{of}{"; ".join(told)}.</p>'] if told else []
        if run.first and (fork := next((e for e in reversed(run.entries) if e["kind"] == "fork"), None)):
            lines.append(f'<p class="alarm">{of}A fork: the steps before {num(fork["step"])} are those of '
                         f"{show(fork['path'], 200)}.</p>")  # fmt: skip
        if damaged := run.metrics.damaged:
            lines.append(f'<p class="alarm">{of}{counted(len(damaged), "line")} of metrics.jsonl cannot be read, the '
                         f"first is line {num(damaged[0])}; their figures are missing here.</p>")  # fmt: skip
    return f'<div class="notes">{"".join(lines)}</div>' if lines else ""


def _controls() -> str:
    legend = "".join(
        f'<span><b class="glyph {css}">{glyph}</b>{name}</span>'
        for css, glyph, name in (
            ("spike", "○", "spike"), ("skipped", "×", "skipped"), ("non_finite", "!", "not finite"),
            ("good", "▲", "good checkpoint"), ("saved", "△", "checkpoint"), ("failed", "▽", "failed save"),
            ("restart", "┊", "restart"), ("rollback", "│", "rollback"),
        )
    )  # fmt: skip
    return (
        '<form id="axes" hidden><fieldset><legend>x axis</legend></fieldset>'
        '<button type="button">whole run</button>'
        '<span class="muted">drag over a chart to zoom; all charts follow</span></form>'
        f'<p class="legend marks">{legend}</p>'
        '<noscript><p class="alarm">Curves are drawn by a script of this page, which this browser does not run. The '
        "tables have the figures.</p></noscript>"
    )


def _courses(runs: Sequence[Run]) -> str:
    note = (
        f"Tables are of all steps. A curve of many steps is drawn from {RANGES} ranges, of each its first step and "
        "those with its least and greatest value, so that no spike is lost; means are of 200 ranges. Of one "
        "kind of mark 400 are drawn, of more the ones with the greatest loss of their range. Loss in nats a target."
    )
    shown = "".join(_of(run, runs) + _course(run) for run in runs)
    return f'<h3>The course of the run</h3>{shown}<p class="muted">{note}</p>'


def _course(run: Run) -> str:
    """The run in a dozen stretches, exact."""
    stretches = [own for own in np.array_split(np.arange(len(run.order)), _COURSE) if len(own)]
    held = run.validations
    loss, norm, lr, tokens, speed = map(run.kept, ("loss", "grad_norm", "lr", "tokens", "tokens_per_s"))
    rows = []
    for own in stretches:
        first, last = int(run.steps[own[0]]), int(run.steps[own[-1]])
        inside = [one for one in held if first < one.step <= last + 1]
        rows.append([
            f"{num(first)}–{num(last)}" if last > first else num(first), _tokens(tokens[own[-1]]),
            _figure(_mean(loss[own]), 4), _figure(_extreme(np.nanmin, loss[own]), 4),
            _figure(_extreme(np.nanmax, loss[own]), 4), _figure(inside[-1].loss, 4) if inside else "–",
            _figure(_median(norm[own]), 3), _figure(_extreme(np.nanmax, norm[own]), 3),
            "–" if np.isnan(lr[own[-1]]) else f"{lr[own[-1]]:.3g}", _tokens(_median(speed[own])),
        ])  # fmt: skip
    head = ["steps", "tokens", "loss, mean", "least", "greatest", "held out", "norm, median", "greatest",
            "learning rate", "tokens/s"]  # fmt: skip
    return table(head, rows)


def _sources(run: Run, runs: Sequence[Run]) -> str:
    found = tokens_by_source(run)
    if not found:
        return ""
    total = sum(own.tokens for own in found) or 1
    held = run.validations[-1:]
    rows = [
        [show(own.name, 80), num(own.tokens), percent(own.tokens, total), num(own.available), num(own.epochs, 2),
         *(_figure(one.sources.get(own.name, math.nan), 4) for one in held)]
        for own in found
    ]  # fmt: skip
    lead = html.lead("What the present weights have read, by the ledger: abandoned steps are not counted.")
    shares = [
        Bar(show(own.name, 60), (("kept", own.epochs),), f"{num(own.epochs, 2)} <small>epochs</small>") for own in found
    ]
    head = ["source", "tokens read", "share", "tokens of an epoch", "epochs", *("held-out loss" for _ in held)]
    return _of(run, runs) + lead + table(head, rows) + (bars(shares) if len(found) > 1 else "")


def _time(run: Run, runs: Sequence[Run]) -> str:
    spent = account(run)
    if spent is None:
        return ""
    total = sum(spent.values())
    looks = {"compute": "kept", "again": "dropped", "abandoned": "dropped", "between": "dropped"}
    rows = [
        Bar(PARTS[name], ((looks.get(name, "duplicate"), value),),
            f"{_duration(value)} <small>· {percent(value, total)}</small>")
        for name, value in spent.items() if value > 0
    ]  # fmt: skip
    lead = html.lead(
        f"{_duration(total)} from the first line to the last. A save that overlaps with steps costs inside them, which "
        "their time has."
    )
    return _of(run, runs) + lead + bars(rows, "reasons")


def _attempts(run: Run, runs: Sequence[Run]) -> str:
    rows = []
    own = run.attempts[run.first :]
    for attempt in own[-_ROWS:]:
        fates = run.fate[attempt.rows]
        rows.append([
            num(attempt.number), show(attempt.kind), num(attempt.step),
            num(int(run.metrics.step[attempt.rows].max()) + 1) if len(attempt.rows) else "–", num(len(attempt.rows)),
            num(int((fates == AGAIN).sum())), num(int((fates == ABANDONED).sum())),
            _duration(attempt.last - attempt.began), show(attempt.ended, 80),
        ])  # fmt: skip
    head = ["attempt", "kind", "from step", "until", "steps", "done again", "abandoned", "time", "ended"]
    return _of(run, runs) + table(head, rows) + _more(len(own) - len(rows), "earlier")


def _checkpoints(run: Run, runs: Sequence[Run]) -> str:
    rows = [[num(own.step), show(own.state, 200)] for own in run.checkpoints[-_ROWS:]]
    if not rows:
        return ""
    good = sum(own.good and own.kept for own in run.checkpoints)
    lead = html.lead(f"{counted(len(run.checkpoints), 'save')}; {num(good)} known to be good: healthy steps followed.")
    more = _more(len(run.checkpoints) - len(rows), "earlier")
    return _of(run, runs) + lead + table(["after step", "state"], rows, "texts") + more


def _odd(run: Run, runs: Sequence[Run]) -> str:
    rows = [
        [num(own.step), show(", ".join(own.what)), num(own.attempt), _figure(own.loss, 4), _figure(own.loss_z, 1),
         _figure(own.norm, 3), _figure(own.norm_z, 1), "present branch" if own.kept else "done again or abandoned"]
        for own in run.odd[:_ROWS]
    ]  # fmt: skip
    if not rows:
        return ""
    head = ["step", "what", "attempt", "loss", "z", "gradient norm", "z", "is of"]
    return _of(run, runs) + table(head, rows) + _more(len(run.odd) - len(rows), "later")


def _config(run: Run) -> str:
    return f'<pre class="config">{show(dump_yaml(run.config))}</pre>' if run.config else ""


def _footer(runs: Sequence[Run]) -> str:
    lines = []
    for run in runs:
        layout, versions = (run.record.get(key) for key in ("layout", "versions"))
        facts = [f"Run {show(run.path, 300)}"]
        if isinstance(layout, Mapping):
            facts.append("layout " + ", ".join(f"{show(k)} {show(v, 20)}" for k, v in layout.items() if v != 1))
        if isinstance(versions, Mapping):
            facts += [f"{show(name)} {show(version, 40)}" for name, version in versions.items()]
        lines.append(f"<p>{' · '.join(fact for fact in facts if fact.strip() != 'layout')}</p>")
    return "".join(lines) + "<p>Curves are drawn by uPlot (MIT licence), which stands in this file.</p>"


def _of(run: Run, runs: Sequence[Run]) -> str:
    return f"<h3>{'AB'[list(runs).index(run)]}: {show(run.name, 80)}</h3>" if len(runs) > 1 else ""


def _more(number: int, which: str) -> str:
    return f'<p class="muted">and {num(number)} {which}</p>' if number > 0 else ""


def _figure(value: float, digits: int) -> str:
    return num(None if math.isnan(value) else value, digits)


def _tokens(value: float) -> str:
    return "–" if np.isnan(value) else num(round(float(value)))


def _least(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _mean(values: np.ndarray) -> float:
    return _extreme(np.nanmean, values)


def _median(values: np.ndarray) -> float:
    return _extreme(np.nanmedian, values)


def _extreme(function: Any, values: np.ndarray) -> float:
    return float(function(values)) if np.isfinite(values).any() else math.nan


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    if seconds < 99.5:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    days, hours = minutes // 1440, minutes // 60 % 24
    return f"{days} d {hours} h" if days else f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"
