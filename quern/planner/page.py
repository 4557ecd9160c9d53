"""Writes a plan as a page: memory by rank and component, the schedule in time, and the layouts beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quern.html import frame as html
from quern.html.pieces import Bar, Tick, bars, num, plot, show, table
from quern.parallel.planning.bubble import timeline
from quern.planner.answer import MOMENTS, name_of
from quern.planner.candidates import Wish
from quern.planner.hardware import Hardware
from quern.planner.memory.peak import State
from quern.planner.search import GIB, Found, Search, pareto, room
from quern.planner.time.messages import hop
from quern.words import size

__all__ = ["render"]

#: Pieces of work, and places of a pipeline, that are drawn.
_WORK, _PLACES = 800, 32
_PARTS = {
    "state": ("weights", "moments", "gradients", "cast weights", "reference"),
    "whole": ("gathered weights", "whole gradients"),
    "acts": ("activations", "block in work", "logits and loss", "pipeline buffers"),
    "rest": ("allocator", "context and libraries"),
}
_NAMES = {"state": "weights, moments, gradients", "whole": "gathered weights, whole gradients",
          "acts": "activations and work", "rest": "what no tensor can have"}  # fmt: skip
_CSS = """
i.state { background: var(--kept) } i.whole { background: var(--duplicate) } i.acts { background: var(--dropped) }
i.rest { background: var(--soft) } i.free { background: var(--tint) }
.schedule rect { stroke: var(--paper); stroke-width: .5px; vector-effect: non-scaling-stroke }
.schedule rect.F { fill: var(--kept) } .schedule rect.B { fill: var(--duplicate) }
.schedule rect.I { fill: var(--duplicate) } .schedule rect.W { fill: var(--dropped) }
.schedule rect.odd { opacity: .6 }
.spread path { stroke: var(--kept); stroke-width: 6px; stroke-linecap: round; opacity: .35 }
.spread path { vector-effect: non-scaling-stroke }
.spread path.best { stroke: var(--dropped); opacity: 1; stroke-width: 9px }
.spread path.front { opacity: 1 }
"""


def render(told: Mapping[str, Any], found: Search, wish: Wish, state: State, hardware: Hardware) -> str:
    """The page as HTML; ``told``: of :func:`quern.planner.answer.answer`, of the same search."""
    best = found.best
    assert best is not None
    run, time = told["run"], best.time
    verdict = name_of(best.choice) if told["fits"] else f"Short by {best.room.lacks} in {name_of(best.choice)}"
    cells = [
        ("memory", size(best.room.needs), f"of {size(best.room.has)}"),
        ("legal layouts", num(told["legal"]), ""),
    ]
    if time is not None:
        cells += [
            ("a step", f"{time.seconds:.2f} s", f"{time.tokens:,} tokens"),
            ("tokens a second and GPU", num(time.tokens_per_gpu_s), ""),
            ("MFU", f"{time.mfu_full:.1%}", f"{time.mfu_causal:.1%} with attention's causal half"),
        ]
    if run is not None:
        cells += [("days", f"{run['days']:,.1f}", f"{run['gpu_hours']:,.0f} GPU-hours, ${run['dollars']:,.0f}")]
    why = "".join(f"<tr><td>{show(reason['why'], 200)}</td></tr>" for reason in told["reasons"])
    return html.frame(
        title="quern · plan",
        kicker=f"quern · {wish.shape.num_parameters / 1e9:.1f} B parameters on {wish.gpus:,} × {show(hardware.title)}",
        headline=show(verdict, 200),
        tiles=html.tiles(cells),
        sections=[
            ("memory", "Memory", _memory(best, state, hardware)),
            ("time", "Time", "" if time is None else _time(best)),
            ("schedule", "Schedule", _schedule(best, hardware)),
            ("layouts", "Layouts", _layouts(found, best)),
            ("why", "Why this layout", why and f'<table class="texts"><tbody>{why}</tbody></table>'),
        ],
        footer=f"<p>{wish.global_batch:,} sequences of {wish.seq_len:,} tokens a step.</p>",
        css=_CSS,
    )


def _memory(best: Found, state: State, hardware: Hardware) -> str:
    pp = best.choice.pp
    places = range(pp) if pp <= _PLACES else sorted({*range(_PLACES - 1), pp - 1})
    rows = []
    for place in places:
        own = room(best.step, state, hardware, [place])
        parts = [(css, sum(own.components.get(name, 0) for name in names) / GIB) for css, names in _PARTS.items()]
        free = max(0, own.has - own.needs) / GIB
        label = "every rank" if pp == 1 else f"place {place} of the pipeline"
        rows.append(Bar(label, (*parts, ("free", free)), f"{size(own.needs)}, {MOMENTS[own.moment]}"))
    legend = "".join(f'<span><i class="{css}"></i>{name}</span>' for css, name in _NAMES.items())
    cells = [(show(name), size(own)) for name, own in sorted(best.room.components.items(), key=lambda one: -one[1])]
    return (
        html.lead("The most that a rank holds in a step. Ranks at the same place of the pipeline hold as much.")
        + f'<p class="legend">{legend}<span><i class="free"></i>left</span></p>' + bars(rows)
        + "<h3>By component, of the rank that holds the most</h3>" + table(("component", "bytes"), cells)
    )  # fmt: skip


def _time(best: Found) -> str:
    time = best.time
    assert time is not None
    cells = [
        (show(name), f"{value:.3f} s", f"{value / time.seconds:.1%}")
        for name, value in sorted(time.parts.items(), key=lambda one: -one[1]) if value >= 0.0005
    ]  # fmt: skip
    return html.lead("Of the slowest rank; the parts add up to the step.") + table(("part", "seconds", "share"), cells)


def _schedule(best: Found, hardware: Hardware) -> str:
    """Who works when, from the begin of a step; nothing without a pipeline."""
    time, plan, layout = best.time, best.step.plan, best.step.layout
    if time is None or plan.pp == 1 or plan.pp > _PLACES:
        return ""
    per_rank, number = layout.num_stages // plan.pp, best.step.num_micro_batches
    while number > plan.pp and number * layout.num_stages * 2 > _WORK:
        number = max(plan.pp, number // 2 // plan.pp * plan.pp)
    work = timeline(layout.scheduling, plan.pp, per_rank, number, time.stages, hop(best.step, hardware))
    end, height = max(item.end for item in work), 100 / plan.pp
    drawn = "".join(
        f'<rect class="{item.kind}{" odd" * (item.stage // plan.pp % 2)}" x="{100 * item.start / end:.3f}" '
        f'y="{item.rank * height + height * 0.08:.3f}" width="{100 * (item.end - item.start) / end:.3f}" '
        f'height="{height * 0.84:.3f}"><title>stage {item.stage} {item.kind}: {item.start:.3f} to {item.end:.3f} s'
        "</title></rect>"
        for item in work
    )
    x = [Tick(part / 4, f"{end * part / 4:.2f} s") for part in range(5)]
    y = [Tick(1 - (rank + 0.5) / plan.pp, f"{rank}") for rank in range(plan.pp)]
    left = "" if number == best.step.num_micro_batches else f" Drawn are {number} of {best.step.num_micro_batches}."
    caption = f"{show(layout.scheduling)}, {best.step.num_micro_batches} micro-batches.{left}"
    legend = (
        '<p class="legend"><span><i class="kept"></i>forward</span><span><i class="duplicate"></i>backward, or for '
        'inputs</span><span><i class="dropped"></i>for weights</span></p>'
    )
    lead = html.lead(
        "Each row is a place of the pipeline. What is empty is the bubble. A rank’s second stages are paler."
    )
    return lead + legend + f'<div class="schedule">{plot(drawn, x, y, caption, "The schedule")}</div>'


def _layouts(found: Search, best: Found) -> str:
    """Memory against time of those that fit, and a table of the fastest."""
    if best.time is None:
        rows = [_row(one) for one in found.nearest(20)]
        return html.lead("None fits; the least short first.") + table(("layout", "memory", "short by"), rows)
    head = ("layout", "memory", "step", "tokens/s/GPU", "MFU")
    shown = found.within(3 * best.time.seconds)
    rows = [_row(one) for one in shown[:20]]
    front = {id(one) for one in pareto(shown)}
    times = [one.time.seconds for one in shown if one.time is not None]
    low, high = times[0], times[-1]
    points = []
    for one, seconds in zip(shown, times, strict=True):
        x = 100 * (seconds - low) / ((high - low) or 1)
        y = 100 - 100 * one.room.needs / one.room.has
        css = "best" if one is best else "front" if id(one) in front else ""
        path = f'<path class="{css}" d="M{x:.2f} {y:.2f}h0"><title>{show(name_of(one.choice))}</title></path>'
        points.append((one is best, path))
    drawing = "".join(path for _, path in sorted(points, key=lambda point: point[0]))
    ticks = [Tick(part / 4, f"{low + (high - low) * part / 4:.2f} s") for part in range(5)]
    sizes = [Tick(part / 4, f"{best.room.has * part / 4 / GIB:.0f}") for part in range(5)]
    caption = (
        "GiB of a rank against seconds of a step. Each dot is a layout that fits, and takes at most three times as "
        "long. Of dark ones no other is both faster and smaller; the one to take has another colour."
    )
    picture = plot(drawing, ticks, sizes, caption, "Memory against the time of a step")
    return f'<div class="spread">{picture}</div><h3>The fastest</h3>' + table(head, rows)


def _row(one: Found) -> tuple[str, ...]:
    time, own = one.time, (show(name_of(one.choice), 200), size(one.room.needs))
    if time is None:
        return *own, show(one.room.lacks)
    return *own, f"{time.seconds:.2f} s", num(time.tokens_per_gpu_s), f"{time.mfu_full:.1%}"
