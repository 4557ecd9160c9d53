"""Writes the page of a swarm: what its laws propose, how far they can be trusted, and the fitted losses as drawings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from quern import storage
from quern.html import frame as html
from quern.html.pieces import Tick, plot, show, table
from quern.mixtures.laws.fit import Fit, Floats, losses
from quern.mixtures.laws.propose import Proposal, Wish
from quern.mixtures.laws.tables import Runs

__all__ = ["REPORT_FILE", "interval", "render", "write_page"]

REPORT_FILE = "report.html"

#: Losses and sources that are drawn, points of a line.
_LOSSES, _SOURCES, _POINTS = 12, 8, 41
_CSS = """
.laws { display: grid; grid-template-columns: repeat(auto-fill, minmax(18rem, 1fr)); gap: 2rem 3.5rem }
.laws { margin: 0 2rem 2rem 0 }
.laws path, .laws line.mark { fill: none; stroke: currentColor; vector-effect: non-scaling-stroke }
.laws path.law { stroke-width: 2 } .laws path.run { stroke-width: 6; stroke-linecap: round; opacity: .45 }
.laws line.mark { stroke-dasharray: 4 3; opacity: .7 }
"""


def write_page(path: str, name: str, runs: Runs, proposal: Proposal, fits: Mapping[str, Fit], wish: Wish) -> str:
    """Write the page into the folder ``path``, whole or not at all, and return where it is."""
    target = storage.join(path, REPORT_FILE)
    storage.publish_bytes(target, render(name, runs, proposal, fits, wish).encode())
    return target


def render(name: str, runs: Runs, proposal: Proposal, fits: Mapping[str, Fit], wish: Wish) -> str:
    """The page as HTML; equal arguments give equal bytes."""
    drawn, places = list(fits)[:_LOSSES], range(min(len(runs.sources), _SOURCES))
    left = [
        f"{total - most} of {total} {what}"
        for total, most, what in ((len(fits), _LOSSES, "losses"), (len(runs.sources), _SOURCES, "sources"))
        if total > most
    ]
    note = f'<p class="alarm">Not drawn: {" and ".join(left)}; the tables have all.</p>' if left else ""
    surface = "".join(
        f"<h3>{show(own, 80)}</h3>"
        f'<div class="laws">{"".join(_law(own, fits[own], place, runs, proposal) for place in places)}</div>'
        for own in drawn
    )
    told = html.lead(
        "The line is the fitted loss where the share of one source changes and the others keep their proportions of "
        "the proposal. Dots are measured runs, whose other shares differ, so that they need not lie on the line. "
        "The dashed line is the proposed share."
    )
    apart = html.lead("Each run is predicted by the law that was fitted without it.")
    checks = "".join(_check(own, fits[own]) for own in drawn)
    warned = "".join(f'<p class="alarm">{show(line, 400)}</p>' for line in proposal.warnings)
    return html.frame(
        title=f"quern · {name}",
        kicker=f"quern · swarm {show(name, 80)}",
        headline=f"{len(runs.mixtures)} runs, {len(runs.sources)} sources: predicted loss {interval(proposal.loss)}",
        tiles=warned,
        sections=[
            ("proposal", "Proposal", _shares(runs, proposal, wish)),
            ("laws", "Laws", _laws(proposal, fits, wish)),
            ("surface", "Fitted losses", told + note + surface),
            ("left-out", "Runs that were left out", apart + note + f'<div class="laws">{checks}</div>'),
        ],
        footer="<p>Losses in nats a target; intervals of 95 %.</p>",
        css=_CSS,
    )


def _shares(runs: Runs, proposal: Proposal, wish: Wish) -> str:
    rows = []
    for place, name in enumerate(runs.sources):
        tried = runs.mixtures[:, place]
        tokens = "–" if wish.prior is None else f"{wish.prior[place]:.2%}"
        reach = f"{tried.min():.2%} to {tried.max():.2%}"
        rows.append([show(name, 80), tokens, reach, f"{wish.caps[place]:.2%}", f"{proposal.shares[place]:.2%}"])
    return table(["source", "tokens", "tried", "at most", "proposed"], rows)


def _laws(proposal: Proposal, fits: Mapping[str, Fit], wish: Wish) -> str:
    head = ["loss", "weight", "left-out error", "explained", "rank", "predicted, 95 %"]
    rows = [
        [show(name, 80), f"{wish.weights[name]:.3g}", f"{own.error:.4f}", _or_dash(own.explained, ".1%"),
         _or_dash(own.rank_correlation, ".3f"), interval(proposal.families[name])]
        for name, own in fits.items()
    ]  # fmt: skip
    return table(head, [*rows, ["all", "1", "", "", "", interval(proposal.loss)]])


def _law(loss: str, own: Fit, place: int, runs: Runs, proposal: Proposal) -> str:
    tried, share, measured = runs.mixtures[:, place], float(proposal.shares[place]), runs.losses[loss]
    top = max(float(tried.max()), share, 0.01)
    at = np.linspace(0, top, _POINTS)
    rest = proposal.shares.copy()
    rest[place] = 0.0
    if rest.sum() < 1e-9:  # the proposal is this source alone: the others go equally
        rest = (np.arange(len(rest)) != place).astype(float)
    mixtures = (1 - at)[:, None] * rest / max(float(rest.sum()), 1e-300)
    mixtures[:, place] = at
    fitted = losses(own.form, own.parameters, mixtures)
    low, high = _reach(fitted, measured)
    mark = f'<line class="mark" x1="{100 * share / top:.2f}" x2="{100 * share / top:.2f}" y1="0" y2="100"/>'
    drawing = mark + _dots(tried / top, (measured - low) / (high - low))
    drawing += _line("law", at / top, (fitted - low) / (high - low))
    x = [Tick(part, f"{top * part:.1%}") for part in (0, 0.5, 1)]
    name = show(runs.sources[place], 40)
    caption = f"{name}: share of tokens; loss in nats; proposed {share:.2%}"
    return plot(drawing, x, _ticks(low, high), caption, f"{loss} by the share of {runs.sources[place]}")


def _check(loss: str, own: Fit) -> str:
    measured = own.measured[own.left]
    predicted = measured - own.left_out[own.left]
    low, high = _reach(measured, predicted)
    drawing = '<line class="mark" x1="0" x2="100" y1="100" y2="0"/>'
    drawing += _dots((measured - low) / (high - low), (predicted - low) / (high - low))
    caption = f"{show(loss, 40)}: measured (across) and predicted without the run (up), nats"
    return plot(drawing, _ticks(low, high), _ticks(low, high), caption, f"{loss}: predicted against measured")


def _reach(*values: Floats) -> tuple[float, float]:
    low, high = min(float(own.min()) for own in values), max(float(own.max()) for own in values)
    room = 0.05 * (high - low) or 0.01
    return low - room, high + room


def _ticks(low: float, high: float) -> Sequence[Tick]:
    return [Tick(part, f"{low + part * (high - low):.3f}") for part in (0, 0.5, 1)]


def _dots(x: Floats, y: Floats) -> str:
    return "".join(f'<path class="run" d="M{100 * a:.2f} {100 - 100 * b:.2f}h0"/>' for a, b in zip(x, y, strict=True))


def _line(css: str, x: Floats, y: Floats) -> str:
    points = "L".join(f"{100 * a:.2f} {100 - 100 * b:.2f}" for a, b in zip(x, y, strict=True))
    return f'<path class="{css}" d="M{points}"/>'


def interval(value: tuple[float, float]) -> str:
    """A loss and the half of its interval, in nats."""
    return f"{value[0]:.4f} ± {value[1]:.4f}"


def _or_dash(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)
