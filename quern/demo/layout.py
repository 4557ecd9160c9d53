"""Page layouts around a text: menus, banners, teasers and footers."""

from __future__ import annotations

import random
import re
from html import escape

__all__ = [
    "BOILERPLATE",
    "break_markup",
    "cluttered_page",
    "lines",
    "link_farm",
    "listing",
    "navigation_page",
    "page",
    "paragraphs",
    "preformatted",
]

#: Furniture by language: menu items, the cookie notice, the footer.
BOILERPLATE: dict[str, tuple[tuple[str, ...], str, str]] = {
    "en": (
        ("Home", "News", "Archive", "About us", "Contact"),
        "We use cookies to give you the best experience. Accept all cookies or manage your preferences.",
        "All rights reserved. Imprint. Terms of use.",
    ),
    "de": (
        ("Startseite", "Aktuelles", "Archiv", "Über uns", "Kontakt"),
        "Wir verwenden Cookies. Alle akzeptieren oder Einstellungen verwalten.",
        "Alle Rechte vorbehalten. Impressum. Datenschutz.",
    ),
    "fr": (
        ("Accueil", "Actualités", "Archives", "À propos", "Contact"),
        "Nous utilisons des cookies. Tout accepter ou gérer vos préférences.",
        "Tous droits réservés. Mentions légales.",
    ),
    "es": (
        ("Inicio", "Noticias", "Archivo", "Quiénes somos", "Contacto"),
        "Utilizamos cookies. Aceptar todas o gestionar las preferencias.",
        "Todos los derechos reservados. Aviso legal.",
    ),
    "ru": (
        ("Главная", "Новости", "Архив", "О нас", "Контакты"),
        "Мы используем файлы cookie. Принять все или изменить настройки.",
        "Все права защищены. Правовая информация.",
    ),
    "nl": (
        ("Home", "Nieuws", "Archief", "Over ons", "Contact"),
        "Wij gebruiken cookies. Alles accepteren of voorkeuren beheren.",
        "Alle rechten voorbehouden. Colofon.",
    ),
    "ja": (
        ("ホーム", "お知らせ", "記録", "私たちについて", "連絡先"),
        "このサイトはクッキーを使用します。",
        "無断転載を禁じます。",
    ),
}


def paragraphs(texts: list[str]) -> str:
    """Each text as a ``<p>``, escaped."""
    return "\n".join(f"<p>{escape(text, quote=False)}</p>" for text in texts)


def lines(texts: list[str]) -> str:
    """One ``<p>`` whose lines are parted by ``<br>``: a stanza."""
    return "<p>" + "<br>\n".join(escape(text, quote=False) for text in texts) + "</p>"


def listing(items: list[str]) -> str:
    """An unordered list."""
    return "<ul>\n" + "\n".join(f"<li>{escape(item, quote=False)}</li>" for item in items) + "\n</ul>"


def preformatted(code: str) -> str:
    """A block of code."""
    return f"<pre><code>{escape(code, quote=False)}</code></pre>"


def _menu(language: str, tag: str = "nav") -> str:
    items = "".join(
        f'<li><a href="/{language}/m{n}">{item}</a></li>' for n, item in enumerate(BOILERPLATE[language][0])
    )
    return f'<{tag} class="menu"><ul>{items}</ul></{tag}>'


def _head(title: str, language: str, charset: str, extra: str = "") -> str:
    return (
        f'<!DOCTYPE html>\n<html lang="{language}">\n<head>\n<meta charset="{charset}">\n'
        f"<title>{escape(title)}</title>\n{extra}</head>\n"
    )


def page(title: str, body: str, language: str, host: str, layout: int = 0, charset: str = "utf-8") -> str:
    """A page in ordinary layout; ``layout`` picks one of three ways to nest it."""
    head = _head(title, language, charset, '<link rel="stylesheet" href="/style.css">\n')
    heading = f"<h1>{escape(title, quote=False)}</h1>"
    footer = f'<footer class="footer"><p>© {host}. {BOILERPLATE[language][2]}</p></footer>'
    menu = _menu(language)
    if layout % 3 == 0:
        inner = f"<header>{menu}</header>\n<main><article>\n{heading}\n{body}\n</article></main>\n{footer}"
    elif layout % 3 == 1:
        inner = (
            f'<div id="page">{menu}\n<div id="content" class="entry-content">\n{heading}\n{body}\n</div>\n'
            f'<div id="sidebar" class="sidebar">{_menu(language, "div")}</div>\n{footer}</div>'
        )
    else:
        inner = f'{menu}\n<article class="post"><header>{heading}</header>\n{body}\n</article>\n{footer}'
    return f"{head}<body>\n{inner}\n</body>\n</html>\n"


def cluttered_page(title: str, body: str, language: str, host: str, teasers: list[str], rng: random.Random) -> str:
    """The article in the midst of a banner, two menus, a teaser column, share buttons, a newsletter form, a script."""
    _, cookies, imprint = BOILERPLATE[language]
    script = "<script>window.dataLayer = window.dataLayer || []; function track(e) { dataLayer.push(e); }</script>\n"
    boxes = "".join(f'<li><a href="/{language}/t{rng.randint(100, 999)}">{escape(t)}</a></li>' for t in teasers)
    share = "".join(f'<a class="share-button" href="#{name}">{name}</a> ' for name in ("Mail", "Print", "Link"))
    return (
        _head(title, language, "utf-8", script) + f"<body>\n"
        f'<div class="cookie-banner" role="dialog"><p>{cookies}</p><button>OK</button></div>\n'
        f'<header class="site-header"><a href="/">{host}</a>{_menu(language)}</header>\n'
        f'<div class="breadcrumbs"><a href="/">{host}</a> › <a href="/{language}/">{language}</a></div>\n'
        f'<main><article>\n<h1>{escape(title, quote=False)}</h1>\n<div class="social share">{share}</div>\n{body}\n'
        f"</article></main>\n"
        f'<aside class="sidebar related"><h3>{BOILERPLATE[language][0][1]}</h3><ul class="related-links">{boxes}</ul>'
        f"</aside>\n"
        f'<form class="newsletter" action="/subscribe"><label>E-Mail <input name="mail"></label></form>\n'
        f'<footer class="footer"><ul>{boxes}</ul><p>© {host}. {imprint}</p></footer>\n</body>\n</html>\n'
    )


def link_farm(title: str, anchors: list[str], rng: random.Random) -> str:
    """Hundreds of links and hardly a sentence."""
    rows = "\n".join(
        f'<div><a href="https://shop{rng.randint(10, 99)}.invalid/{rng.randint(1000, 9999)}">{escape(text)}</a></div>'
        for text in anchors
    )
    return f"{_head(title, 'en', 'utf-8')}<body>\n<h1>{escape(title)}</h1>\n{rows}\n</body>\n</html>\n"


def navigation_page(title: str, items: list[str], language: str, host: str) -> str:
    """An index page: menus and titles only."""
    links = "".join(f'<li><a href="/{language}/i{n}">{escape(item)}</a></li>' for n, item in enumerate(items))
    return (
        f"{_head(title, language, 'utf-8')}<body>\n{_menu(language)}\n<nav><ul>{links}</ul></nav>\n{_menu(language)}\n"
        f"<footer><p>© {host}. {BOILERPLATE[language][2]}</p></footer>\n</body>\n</html>\n"
    )


def break_markup(html: str, rng: random.Random) -> str:
    """The page with careless markup: unclosed, misnested, unquoted, with invalid entities."""
    html = html.replace("<!DOCTYPE html>\n", "").replace("<body>\n", "<body bgcolor=white text=#222>\n<center></div>\n")
    html = re.sub(r"</p>", lambda match: "" if rng.random() < 0.6 else match[0], html)
    html = re.sub(r"</body>\s*</html>\s*", "", html)
    # One misnested pair around the first words of every paragraph; the words themselves stay.
    html = re.sub(r"<p>(\w+) (\w+)", r"<p><b>\1 <i>\2</b></i>", html)
    return html.replace(" and ", " & ", 2).replace(". ", ".&nbps; ", 1).replace(". ", ".&#x; ", 1) + "</td></font>"
