"""HTML page about a spike: one file that needs no network and escapes everything it shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quern.html import frame as html
from quern.html.pieces import Bar, Tick, bars, link, num, percent, plot, show, steps, table
from quern.lineage.forensics.cause import said_of

__all__ = ["render"]

_LAYERS = 200
"""Bars; a deeper model's smallest ratios are left out."""


def render(found: Mapping[str, Any], run: str) -> str:
    """The page as HTML; ``found`` is :func:`quern.lineage.forensics.explain.explain`'s. Runs no script."""
    sections = [
        ("what", "What happened", _what(found)),
        ("documents", "Documents", _documents(found)),
        ("layers", "Gradient by layer", _layers(found)),
        ("sequences", "Sequences", _sequences(found)),
        ("sources", "Sources", _sources(found)),
        ("next", "What to do", _commands(found)),
    ]
    name = run.rstrip("/").rpartition("/")[2]
    layout = _pairs({name: value for name, value in found["layout"].items() if value != 1})
    return html.frame(
        title=f"quern · {name} · step {found['step']}",
        kicker=f"quern · training run {show(name, 80)}",
        headline=_headline(found),
        tiles=_tiles(found),
        sections=sections,
        footer=f"<p>{show(found['file'])}</p><p>Layout {layout} · policy {_pairs(found['policy'])}</p>",
    )


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{show(name)} {show(value)}" for name, value in values.items())


def _number(value: float | None, digits: int = 4) -> str:
    return '<span class="muted">not finite</span>' if value is None else num(value, digits)


def _headline(found: Mapping[str, Any]) -> str:
    names = {
        "loss_spike": "the loss jumped", "grad_norm_spike": "the gradient jumped", "non_finite": "not finite",
        "requested": "asked for", "configured": "asked for in the config",
    }  # fmt: skip
    reasons = [show(names.get(reason, reason)) for reason in found["reasons"]]
    return f"Step {num(found['step'])}: {' and '.join(reasons)}"


def _tiles(found: Mapping[str, Any]) -> str:
    last = found["steps"][-1]
    tiles = [
        ("loss", _number(last["loss"], 3), f"z {_number(last['loss_z'], 1)}"),
        ("gradient norm", _number(last["grad_norm"], 3), f"z {_number(last['grad_norm_z'], 1)}"),
        ("sequences that stand out", num(last["out"]), f"of {num(last['sequences'])}"),
        ("update", show(found["decision"]), "by the guard’s policy"),
    ]
    return html.tiles(tiles)


def _what(found: Mapping[str, Any]) -> str:
    lines = "".join(f'<p class="alarm">{show(line)}</p>' for line in found["findings"])
    if not found["surviving"]:
        lines += "<p>The run has gone back behind this step: its weights do not hold it.</p>"
    rows = [
        [
            f"<b>{num(row['step'])}</b>" if row["step"] == found["step"] else num(row["step"]), num(row["data_step"]),
            _number(row["loss"]), _number(row["loss_z"], 1), _number(row["grad_norm"], 3),
            _number(row["grad_norm_z"], 1), f"{num(row['out'])} of {num(row['sequences'])}",
            "skipped" if row["skipped"] else "applied",
        ]
        for row in found["steps"]
    ]  # fmt: skip
    head = ["step", "data step", "loss", "z", "gradient norm", "z", "sequences that stand out", "update"]
    return lines + table(head, rows)


def _layers(found: Mapping[str, Any]) -> str:
    rows = found["layers"]
    top = max((row["ratio"] or 0 for row in rows), default=0)
    lead = (
        '<p class="lead">2-norm of each layer’s gradient before clipping, and how many times its median of the steps '
        "before that is. The layer that has grown most is marked.</p>"
    )
    drawn = [
        Bar(
            show(row["name"]),
            ((_colour(row, top), row["norm"] or 0.0),),
            f"{_number(row['norm'], 4)} <small>· {num(row['ratio'], 2)} ×</small>",
        )
        for row in rows[:_LAYERS]
    ]
    inside = [[show(name), _number(norm, 4)] for name, norm in found["parameters"].items()]
    return lead + bars(drawn) + "<h3>Parameters with the largest gradient</h3>" + table(["parameter", "norm"], inside)


def _colour(row: Mapping[str, Any], top: float) -> str:
    return "dropped" if row["norm"] is None or (row["ratio"] is not None and row["ratio"] == top) else "kept"


def _documents(found: Mapping[str, Any]) -> str:
    lead = (
        '<p class="lead">By how far the loss of a document’s own targets in this step is above what is usual for its '
        "source, in spreads of that (z), long documents before short ones with the same loss.</p>"
    )
    body = "".join(_document(number, row) for number, row in enumerate(found["documents"], 1))
    if found["documents_before"]:
        body += "<h3>Of the step before, whose update made these weights</h3>"
        body += "".join(_document(number, row) for number, row in enumerate(found["documents_before"], 1))
    for why in found["unknown"].values():
        body += f'<p class="alarm">Not resolved: {show(why)}</p>'
    return lead + f'<div class="samples">{body}</div>'


def _document(number: int, row: Mapping[str, Any]) -> str:
    share = "" if row["share"] is None else f" · {percent(row['share'], 1)} of the loss above the usual"
    z = "" if row["z"] is None else f" · z {num(row['z'], 1)}"
    by = "" if row["by"] == "its own targets" else " (by its sequences’ loss: where in them is not known)"
    repeats = "".join(
        f'<p class="rules">Step {num(own["step"])} had read <b>{show(said_of(own))}</b> already '
        f'(<span class="id">{show(own["doc_id"])}</span>).</p>'
        for own in row["repeats"]
    )
    if any(row["epochs"]):
        repeats += f'<p class="rules">Read in epoch <b>{max(row["epochs"])}</b>: not for the first time.</p>'
    if row["text"] is None:
        text = '<p class="muted">Its tokens cannot be shown as text.</p>'
    else:
        cut = "" if row["text_is_whole"] else f'<p class="more">the first {len(row["text"])} characters</p>'
        text = f'<p class="text" data-doc="{show(row["doc_id"])}">{show(row["text"])}</p>{cut}'
    where = ", ".join(num(place) for place in row["places"][:20])
    return (
        f'<div class="sample" data-kind="{"dropped" if number == 1 else ""}"><h3>{number}. {link(row["name"])}</h3>'
        f'<p class="where"><span class="id">{show(row["doc_id"])}</span> · {show(row["stream"])} of {show(row["run"])}'
        f" · {num(row['tokens'])} tokens from {num(row['start'])} on · place {where}</p>"
        f"<p>Loss {_number(row['loss'], 3)}, usual {_number(row['usual'], 3)}{z}{share}; "
        f"{num(row['targets'])} targets{by}.</p>{repeats}{text}</div>"
    )


def _sequences(found: Mapping[str, Any]) -> str:
    rows = []
    for row in found["sequences"]:
        urls = "<br>".join(link(own["name"], 80) for own in row["documents"])
        more = row["num_documents"] - len(row["documents"])
        urls += f'<br><span class="muted">and {num(more)} more</span>' if more > 0 else ""
        rows.append(
            [
                num(row["place"]), _number(row["loss"]), _number(row["z"], 1), num(row["targets"]),
                f"{num(row['dp_rank'])} · {num(row['micro_batch'])} · {num(row['row'])}",
                f"{show(row['source'])}<br>epoch {num(row['epoch'])}, window {num(row['window'])}", urls,
            ]
        )  # fmt: skip
    head = ["place", "loss", "z", "targets", "rank · micro-batch · row", "source", "documents"]
    lead = (
        f'<p class="lead">The {num(len(rows))} sequences of this step whose loss is furthest above what is usual for '
        f"their source; place is that in the global batch.</p>{_along(found)}"
    )
    return lead + table(head, rows, "texts")


def _along(found: Mapping[str, Any]) -> str:
    """The loss along the first sequence."""
    first = found["sequences"][0] if found["sequences"] else None
    if first is None or not first["along"]:
        return ""
    values = [value or 0.0 for value in first["along"]]
    top = max(values) or 1.0
    size = -(-int(found["layout"]["seq_len"]) // len(values))
    names = [f"positions {i * size} to {(i + 1) * size - 1}, nats a target" for i in range(len(values))]
    drawing = steps(values, top, "dropped", names, base=100, height=100)
    ticks = [Tick(0, "0"), Tick(1, num(found["layout"]["seq_len"]))]
    caption = f"Loss along the sequence at place {num(first['place'])}, nats a target"
    return plot(drawing, ticks, [Tick(0, "0"), Tick(1, f"{top:.1f}")], caption, caption)


def _sources(found: Mapping[str, Any]) -> str:
    rows = [
        [
            show(row["source"]), f"{num(row['sequences'])} ({percent(row['share'], 1)})", _number(row["loss"]),
            f"{num(row['usual'], 4)} ± {num(row['spread'], 4)}",
            "–" if row["excess_share"] is None else percent(row["excess_share"], 1), show(row["known_by"]),
        ]
        for row in found["sources"]
    ]  # fmt: skip
    head = ["source", "sequences", "median loss", "usual", "of the loss above the usual", "usual by"]
    return table(head, rows)


def _commands(found: Mapping[str, Any]) -> str:
    return "".join(
        f'<h3>{show(own["what"])}</h3><pre class="config">{show(own["command"])}</pre>' for own in found["commands"]
    )
