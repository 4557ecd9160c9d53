"""Lays out maps of the loads of experts: by layer and expert at the last step that tells them, and over the run."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from quern.html.frame import lead
from quern.html.pieces import num, table
from quern.train.report.charts import BY_LAYER, over
from quern.train.report.history import Run
from quern.words import counted

__all__ = ["experts"]

F64 = NDArray[np.float64]

_LEVELS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJK"
"""A letter for each sixth of a power of two, from 1/8 of the mean to 8 times it; ``0`` is nothing, ``-`` not known."""
_COLUMNS, _CELLS, _ROWS = 200, 400_000, 12
"""Of a map over the run, of all such maps of experts, and of the table, at most."""


def experts(run: Run) -> str:
    """The section of the loads of experts; empty where the metrics do not tell them."""
    layers = sorted(int(n) for name in run.metrics.columns if (n := name.removeprefix(BY_LAYER)).isdecimal())
    told = _told(run)
    if not layers or not told or len(told[-1][0]) != len(layers):
        return ""
    last_NE, step = told[-1]
    greatest_NR = np.stack([run.kept(f"{BY_LAYER}{layer}") for layer in layers])
    columns = max(1, min(_COLUMNS, _CELLS // last_NE.size))
    over_steps = list(_binned(np.stack([own for own, _ in told]).astype(np.float64), columns))
    data = {
        "layers": layers, "levels": _LEVELS, "last": _letters(_over_mean(last_NE)),
        "greatest": _letters(np.stack([_greatest(own) for own in _split(greatest_NR.T, _COLUMNS)], axis=1)),
        "steps": [[int(own[0]), int(own[-1])] for own in _split(run.steps, _COLUMNS)],
        "experts": [_letters(np.stack([own[n] for own in over_steps], axis=1)) for n in range(len(layers))],
        "counted": [[int(own[0]), int(own[-1])] for own in _split(np.array([at for _, at in told]), columns)],
    }  # fmt: skip
    text = lead(
        "A cell’s colour is the number of tokens that chose an expert, over the mean of all experts of its layer: blue "
        "is less than the mean, orange more. An expert that no token chose is drawn in the colour of “none”."
    )
    choice = "".join(f'<option value="{n}">layer {layer}: each expert</option>' for n, layer in enumerate(layers))
    ramp = '<span class="ramp"></span>'
    return (
        f'{text}<p class="legend heat-legend">⅛ of the mean or less {ramp} 8 times the mean or more'
        '<span><b class="none"></b> none</span></p>'
        f'<figure class="curve heat"><h3>Every expert at step {num(step)}</h3><canvas data-map="last" role="img" '
        'aria-label="Loads by layer and expert; the table has the figures."></canvas><p class="muted">&nbsp;</p>'
        '<h3>Over the run: <select><option value="greatest">all layers: the most loaded expert of each</option>'
        f'{choice}</select></h3><canvas data-map="run" role="img" aria-label="Loads by step; the table has the last '
        f'figures."></canvas><p class="muted">&nbsp;</p><script type="application/json">{json.dumps(data)}</script>'
        f"</figure>{_table(layers, last_NE, step)}"
    )


def _told(run: Run) -> list[tuple[NDArray[np.int64], int]]:
    """Counts and step of the surviving rows that have as many counts as the last one."""
    told = [(run.metrics.loads[row], int(run.metrics.step[row])) for row in run.order if row in run.metrics.loads]
    return [own for own in told if own[0].shape == told[-1][0].shape and own[0].size]


def _table(layers: list[int], counts_NE: NDArray[np.int64], step: int) -> str:
    """The layers with the most experts that no token chose, then those with the greatest load."""
    ratio_NE, unused_N = _over_mean(counts_NE), (counts_NE == 0).sum(axis=1)
    order = np.lexsort((-np.nan_to_num(ratio_NE).max(axis=1), -unused_N))[:_ROWS]
    rows = [
        [
            num(layers[n]), num(int(unused_N[n])), ", ".join(map(str, np.flatnonzero(counts_NE[n] == 0)[:8])) or "–",
            num(over(np.nanmax, ratio_NE[n]), 2), num(int(counts_NE[n].argmax())), num(over(np.nanmin, ratio_NE[n]), 2),
        ]
        for n in order.tolist()
    ]  # fmt: skip
    head = ["layer", "experts without a token", "the first of them", "greatest load / mean", "of expert", "least"]
    total = f"{num(int(unused_N.sum()))} of {counted(counts_NE.size, 'expert')}"
    shown = "" if len(layers) <= _ROWS else f" The {_ROWS} of {len(layers)} layers that are most uneven:"
    return f"<p>At step {num(step)} no token chose {total}.{shown}</p>{table(head, rows)}"


def _over_mean(counts: NDArray[np.number]) -> F64:
    """Over the mean of the last axis; NaN where that is 0."""
    mean: F64 = counts.astype(np.float64).mean(axis=-1, keepdims=True)
    return counts.astype(np.float64) / np.where(mean > 0, mean, np.nan)


def _split(values: NDArray[np.number], most: int) -> list[NDArray[np.number]]:
    """Along the first axis, into ``most`` parts of one value or more."""
    return np.array_split(values, min(most, len(values)))


def _binned(counts_RNE: F64, columns: int) -> Iterator[F64]:
    """Of each column the loads of its steps together, [N, E]."""
    for own in _split(counts_RNE, columns):
        yield _over_mean(own.sum(axis=0))


def _greatest(values_RN: NDArray[np.number]) -> F64:
    return np.array([over(np.nanmax, own) for own in values_RN.T.astype(np.float64)])


def _letters(ratios: F64) -> list[str]:
    """A string for each row."""
    known = np.isfinite(ratios) & (ratios > 0)
    level = np.rint(6 * np.log2(np.where(known, ratios, 1.0))).clip(-18, 18).astype(int) + 18
    letters = np.where(known, np.array(list(_LEVELS))[level], np.where(ratios == 0, "0", "-"))
    return ["".join(row) for row in letters.tolist()]
