"""Writes the frame of a report page: one self-contained HTML file, under a policy that loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from string import Template

from quern.html.pieces import show

__all__ = ["Section", "frame", "lead", "resource", "tiles"]

#: Anchor, title and content of a section; the last two are HTML. One without content is left out.
Section = tuple[str, str, str]


def frame(
    *,
    title: str,
    kicker: str,
    headline: str,
    tiles: str,
    sections: Iterable[Section],
    footer: str,
    css: str = "",
    scripts: Sequence[str] = (),
) -> str:
    """The page as HTML. Every argument but ``title`` is HTML, ``css`` or JavaScript already.

    ``title``: a plain text. ``css``: rules beside those of every page. ``scripts``: run in turn at the end; the policy
    allows them by their hashes, and no other.
    """
    present = [section for section in sections if section[2]]
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    return Template(resource("frame.html")).substitute(
        title=show(title, 100),
        kicker=kicker,
        headline=headline,
        tiles=tiles,
        nav="".join(f'<a href="#{key}">{name}</a>' for key, name, _ in present),
        sections="\n".join(f'<section id="{key}"><h2>{name}</h2>{body}</section>' for key, name, body in present),
        footer=footer,
        css=resource("style.css") + css,
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
        allowed=" ".join(f"'sha256-{code}'" for code in hashes) or "'none'",
    )


def lead(text: str) -> str:
    """The first paragraph of a section; ``text`` is HTML."""
    return f'<p class="lead">{text}</p>'


def tiles(cells: Iterable[tuple[str, str, str]]) -> str:
    """The figures at the head of a page: name, value and note of each, as HTML."""
    shown = (f"<div><dt>{name}</dt><dd>{value}<small>{note}</small></dd></div>" for name, value, note in cells)
    return f'<dl class="tiles">{"".join(shown)}</dl>'


def resource(name: str, package: str = "quern.html") -> str:
    """The text of a file that lies in a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")
