"""Lays out maps of the loads of experts: by layer and expert at the last step that tells them, and over the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

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
    columns, numbers = max(1, min(_COLUMNS, _CELLS // last_NE.size)), range(last_NE.shape[1])
    greatest_RN = np.stack([run.kept(f"{BY_LAYER}{layer}") for layer in layers], axis=1)
    greatest_CN = np.stack([[over(np.nanmax, some) for some in own.T] for own in _split(greatest_RN, _COLUMNS)])
    loads_CNE = np.stack([_over_mean(own.sum(axis=0)) for own in _split(np.stack([own for own, _ in told]), columns)])
    counted_C = _firsts([at for _, at in told], columns)
    maps = [
        _map(f"every expert at step {num(step)}", "layer", layers, "expert", numbers, _over_mean(last_NE)),
        _map("most loaded expert of each layer over the run", "layer", layers, "from step",
             _firsts(run.steps, _COLUMNS), greatest_CN.T),
        *(_map(f"experts of layer {layer} over the run", "expert", numbers, "from step", counted_C, loads_CNE[:, n].T)
          for n, layer in enumerate(layers)),
    ]  # fmt: skip
    text = lead(
        "A cell’s colour is the number of tokens that chose an expert, over the mean of all experts of its layer: blue "
        "is less than the mean, orange more. An expert that no token chose is drawn in the colour of “none”."
    )
    drawn = "".join(
        "<h3><select>" + "".join(f"<option{' selected' * (n == first)}>{own['title']}" for n, own in enumerate(maps))
        + '</select></h3><canvas role="img" aria-label="Loads of experts; the table has figures."></canvas>'
        '<p class="muted">&nbsp;</p>' for first in (0, 1)
    )  # fmt: skip
    data = json.dumps({"levels": _LEVELS, "maps": maps})
    return (
        f'{text}<p class="legend heat-legend">⅛ of the mean or less <span class="ramp"></span> 8 times the mean or more'
        f'<span><b class="none"></b> none</span></p><figure class="curve heat">{drawn}'
        f'<script type="application/json">{data}</script></figure>{_table(layers, last_NE, step)}'
    )


def _map(title: str, down: str, y: Sequence[int], across: str, x: Sequence[int], ratios: F64) -> dict[str, Any]:
    """``ratios`` [y, x] as a string for each row; what a row and a column are, and their numbers."""
    known = np.isfinite(ratios) & (ratios > 0)
    level = np.rint(6 * np.log2(np.where(known, ratios, 1.0))).clip(-18, 18).astype(int) + 18
    letters = np.where(known, np.array(list(_LEVELS))[level], np.where(ratios == 0, "0", "-"))
    rows = ["".join(row) for row in letters.tolist()]
    return {"title": title, "down": down, "y": list(y), "across": across, "x": list(x), "rows": rows}


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
    total = f"{num(int(unused_N.sum()))} of {counted(counts_NE.size, 'expert')} had no token"
    shown = "" if len(layers) <= _ROWS else f" The {_ROWS} of {len(layers)} layers that are most uneven:"
    return f"<p>At step {num(step)}, {total}.{shown}</p>{table(head, rows)}"


def _over_mean(counts: NDArray[np.number]) -> F64:
    """Over the mean of the last axis; NaN where that is 0."""
    mean: F64 = counts.astype(np.float64).mean(axis=-1, keepdims=True)
    return counts.astype(np.float64) / np.where(mean > 0, mean, np.nan)


def _split(values: NDArray[Any], most: int) -> list[NDArray[Any]]:
    """Along the first axis, into ``most`` parts of one value or more."""
    return np.array_split(values, min(most, len(values)))


def _firsts(steps: Sequence[int] | NDArray[np.int64], most: int) -> list[int]:
    return [int(own[0]) for own in _split(np.asarray(steps), most)]
