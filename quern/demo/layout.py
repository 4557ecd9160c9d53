"""A page's layout around its text: banner, menus, teasers and footer; and careless markup."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from html import escape

from quern.demo.grammar import load_stock

__all__ = ["break_markup", "elements", "lines", "page", "paragraphs"]


def elements(tag: str, texts: Sequence[str]) -> str:
    """Each text as an element, escaped, one a line."""
    return "\n".join(f"<{tag}>{escape(text, quote=False)}</{tag}>" for text in texts)


def paragraphs(*texts: str) -> str:
    """Each text as a ``<p>``, escaped."""
    return elements("p", texts)


def lines(texts: Sequence[str]) -> str:
    """One ``<p>`` whose lines are parted by ``<br>`` and begin with a capital: a stanza."""
    return "<p>" + "<br>\n".join(escape(text[:1].upper() + text[1:], quote=False) for text in texts) + "</p>"


def page(title: str, body: str, language: str, host: str, teasers: Sequence[str] = (), charset: str = "utf-8") -> str:
    """The body amid a script, a cookie banner, two menus, share buttons, teasers, a form and a footer."""
    menu, (cookies,), (imprint,) = (load_stock(language).words[name] for name in ("menu", "cookies", "imprint"))
    items = "".join(f'<li><a href="/{language}/m{n}">{item}</a></li>' for n, item in enumerate(menu))
    boxes = "".join(f'<li><a href="/{language}/t{n}">{escape(item)}</a></li>' for n, item in enumerate(teasers))
    share = "".join(f'<a class="share-button" href="#{name}">{name}</a> ' for name in ("Mail", "Print", "Link"))
    return (
        f'<!DOCTYPE html>\n<html lang="{language}">\n<head>\n<meta charset="{charset}">\n'
        f"<title>{escape(title)}</title>\n<script>window.dataLayer = window.dataLayer || [];</script>\n"
        f'</head>\n<body>\n<div class="cookie-banner" role="dialog"><p>{cookies}</p><button>OK</button></div>\n'
        f'<header class="site-header"><a href="/">{host}</a><nav class="menu"><ul>{items}</ul></nav></header>\n'
        f'<main><article>\n<h1>{escape(title, quote=False)}</h1>\n<div class="social share">{share}</div>\n{body}\n'
        f'</article></main>\n<aside class="sidebar related"><ul class="related-links">{boxes}</ul></aside>\n'
        '<form class="newsletter" action="/subscribe"><label>E-Mail <input name="mail"></label></form>\n'
        f'<footer class="footer"><ul>{items}</ul><p>© {host}. {imprint}</p></footer>\n</body>\n</html>\n'
    )


def break_markup(html: str, rng: random.Random) -> str:
    """The page with careless markup: unclosed, misnested, unquoted, with invalid entities."""
    html = html.replace("<!DOCTYPE html>\n", "").replace("<body>\n", "<body bgcolor=white text=#222>\n<center></div>\n")
    html = re.sub(r"</p>", lambda match: "" if rng.random() < 0.6 else match[0], html)
    html = re.sub(r"</body>\s*</html>\s*", "", html)
    # One misnested pair around the first words of every paragraph; the words themselves stay.
    html = re.sub(r"<p>(\w+) (\w+)", r"<p><b>\1 <i>\2</b></i>", html)
    return html.replace(" and ", " & ", 2).replace(". ", ".&nbps; ", 1).replace(". ", ".&#x; ", 1) + "</td></font>"
