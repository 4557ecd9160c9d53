"""Building blocks of a report page: escaped text, numbers, tables, bars and plots.

Page text is hostile. Every string from data goes through :func:`show`, which leaves no markup, no control character
and no character that reorders its neighbours. Drawings are HTML and inline SVG that stretch with the page; their labels
are HTML, so they keep their size.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quern.words import shorten

__all__ = ["Bar", "Tick", "bars", "link", "num", "percent", "plot", "short", "show", "steps", "table"]

#: Everything that is not shown as itself: C0 and C1 controls but tab and newline, soft hyphen, invisible and
#: directional formatting (Unicode 16, §23.2 and §23.3), line separators, surrogates, private use, non-characters, tags.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ud800-\uf8ff\ufdd0-\ufdef\ufeff\uffa0\ufff0-\uffff"
    "\U000e0000-\U000e0fff\U000f0000-\U0010ffff]"
)
#: Marks stacked on one letter beyond any writing system paint over the lines around them.
_MARK = "[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]"
_STACKED = re.compile(f"({_MARK}{{4}}){_MARK}+")
_LINK = re.compile(r"https?://[A-Za-z0-9\[\]._~:/?#@!$&()*+,;=%-]{1,2000}\Z")


def show(text: object, limit: int | None = None) -> str:
    """``text`` as HTML that only shows it, for element content and quoted attributes alike.

    Unseen characters stand as ``⟨U+202E⟩``. With ``limit`` the text is cut to that many characters, with an ellipsis.
    """
    plain = str(text) if limit is None else shorten(str(text), limit + 1)
    plain = _STACKED.sub(r"\1", plain.replace("\r\n", "\n"))
    return html.escape(_UNSEEN.sub(_name, plain), quote=True)


def _name(match: re.Match[str]) -> str:
    return f"⟨U+{ord(match.group()):04X}⟩"


def link(url: str | None, limit: int = 160) -> str:
    """A URL as a link if it is plain http or https, else as text only."""
    if url is None:
        return '<span class="muted">no URL</span>'
    if not _LINK.match(url):
        return f'<span class="url">{show(url, limit)}</span>'
    return f'<a class="url" href="{show(url)}" rel="noopener noreferrer nofollow">{show(url, limit)}</a>'


def num(value: float | None, digits: int = 0) -> str:
    """``1,234,567``; ``–`` for None."""
    return "–" if value is None else f"{value:,.{digits}f}"


def short(value: float) -> str:
    """Three digits at most and a unit: ``950``, ``12.3k``, ``4.56M``, ``1.2B``."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def percent(part: float, whole: float) -> str:
    """``12.3 %``; ``–`` when the whole is nothing, ``<0.1 %`` or ``>99.9 %`` for what would round to none or all."""
    if not whole:
        return "–"
    share = 100 * part / whole
    if share in (0, 100):
        return f"{share:.0f} %"
    if share < 0.05:
        return "<0.1 %"
    return ">99.9 %" if share > 99.95 else f"{share:.1f} %"


@dataclass(frozen=True)
class Bar:
    """One row of :func:`bars`. ``label`` and ``note`` are HTML; ``parts`` are (CSS class, value)."""

    label: str
    parts: tuple[tuple[str, float], ...]
    note: str


def bars(rows: Sequence[Bar], css: str = "") -> str:
    """Horizontal bars, all on the scale of the longest."""
    longest = max((sum(value for _, value in row.parts) for row in rows), default=0) or 1
    lines = []
    for row in rows:
        parts = "".join(
            f'<i class="{name}" style="width:{100 * value / longest:.3f}%"></i>' for name, value in row.parts if value
        )
        lines.append(
            f'<li><span class="label">{row.label}</span><span class="track">{parts}</span>'
            f'<span class="note">{row.note}</span></li>'
        )
    return f'<ul class="bars {css}">{"".join(lines)}</ul>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], css: str = "") -> str:
    """A table of HTML cells; all but the first column are numbers unless ``css`` says otherwise."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table class="{css}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


@dataclass(frozen=True)
class Tick:
    """A label at ``at`` (0 to 1 from the left or from the bottom) of a plot's axis."""

    at: float
    label: str


def plot(drawing: str, x: Sequence[Tick], y: Sequence[Tick], caption: str, name: str) -> str:
    """A figure around an SVG drawing in a box of 100 × 100 units, y downwards; ``name`` is its text for no eyes."""
    grid = "".join('<line class="grid" x1="0" x2="100" y1="{0:.2f}" y2="{0:.2f}"/>'.format(100 - 100 * t.at) for t in y)
    x_labels = "".join(f'<span style="left:{100 * t.at:.2f}%">{show(t.label)}</span>' for t in x)
    y_labels = "".join(f'<span style="bottom:{100 * t.at:.2f}%">{show(t.label)}</span>' for t in y)
    return (
        f'<figure class="plot"><div class="y">{y_labels}</div><svg viewBox="0 0 100 100" preserveAspectRatio="none" '
        f'role="img" aria-label="{show(name)}">{grid}{drawing}</svg><div class="x">{x_labels}</div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def steps(values: Sequence[float], top: float, css: str, names: Sequence[str], *, base: float, height: float) -> str:
    """Columns of a histogram; ``base`` and ``height`` are in units of the plot's box (a negative height hangs down)."""
    width = 100 / max(1, len(values))
    drawn = []
    for index, value in enumerate(values):
        if value:
            size = abs(height) * value / top
            y = base - size if height > 0 else base
            drawn.append(
                f'<rect class="{css}" x="{index * width + width * 0.04:.3f}" y="{y:.3f}" width="{width * 0.92:.3f}" '
                f'height="{size:.3f}"><title>{show(names[index])}: {num(value)}</title></rect>'
            )
    return "".join(drawn)
