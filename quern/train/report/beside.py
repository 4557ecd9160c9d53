"""Compares two training runs: at equal steps, at equal tokens, and in their configs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quern.html.frame import lead
from quern.html.pieces import num, show, table
from quern.train.config.differences import differing
from quern.train.report.charts import held_out
from quern.train.report.history import Run

__all__ = ["beside_section"]

#: At which shares of what both have done they are compared, and of how many steps before it the loss is the mean.
_SHARES, _WINDOW = (0.25, 0.5, 0.75, 1.0), 50

F64 = NDArray[np.float64]


def beside_section(runs: Sequence[Run]) -> str:
    """HTML of two runs' differences; empty for one."""
    if len(runs) == 1:
        return ""
    one, two = runs
    names = f"<b>A</b> is {show(one.path, 200)}, <b>B</b> is {show(two.path, 200)}."
    found = list(differing(dict(one.config), dict(two.config)))
    rows = [[f"<code>{show(name)}</code>", show(had), show(has)] for name, had, has in found]
    config = (
        table(["key", "A", "B"], rows, "texts") if rows else "<p>The configs of their last starts are the same.</p>"
    )
    return (
        lead(f"{names} Loss is the mean of {_WINDOW} steps up to there; held-out loss the last one before, and after "
             "how many steps it was taken.")
        + "<h3>At equal steps</h3>" + _table(runs, "step", "steps")
        + "<h3>At equal tokens</h3>" + _table(runs, "tokens", "tokens")
        + "<h3>Differences of config</h3>" + config
    )  # fmt: skip


def _table(runs: Sequence[Run], axis: str, unit: str) -> str:
    known = [_axis(run, axis) for run in runs]
    if any(np.isnan(own).any() for own in known):
        return '<p class="muted">One of them does not tell.</p>'
    common = min(float(own[-1]) for own in known)
    rows = []
    for share in _SHARES:
        at = common * share
        means, held = zip(*(_at(run, own, at, axis) for run, own in zip(runs, known, strict=True)), strict=True)
        rows.append([num(round(at)), *(_shown(mean) for mean in means), _difference(*means), *held])
    return table([unit, "loss A", "loss B", "B − A", "held out A", "held out B"], rows)


def _axis(run: Run, axis: str) -> F64:
    return (run.steps + 1).astype(np.float64) if axis == "step" else run.kept("tokens")


def _at(run: Run, known: F64, at: float, axis: str) -> tuple[float, str]:
    """Mean loss, and held-out loss with its step, of a run when it has got to ``at``."""
    stop = int(np.searchsorted(known, at, "right"))
    loss = run.kept("loss")[max(0, stop - _WINDOW) : stop]
    axes, values = held_out(run)
    before = int(np.searchsorted(getattr(axes, axis), at, "right"))
    held = f"{num(float(values[before - 1]), 4)} <small>at {num(axes.step[before - 1])}</small>" if before else "–"
    return float(np.nanmean(loss)) if np.isfinite(loss).any() else np.nan, held


def _shown(mean: float) -> str:
    return "–" if np.isnan(mean) else num(mean, 4)


def _difference(one: float, two: float) -> str:
    return "–" if np.isnan(two - one) else f"{two - one:+.4f}".replace("-", "−")
