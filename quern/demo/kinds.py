"""The kinds of pages of the sample site, how many there are of each, and their generators."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from quern.demo.forms import FORMS, form
from quern.demo.grammar import Voice, compose, keyed, load_stock
from quern.demo.layout import break_markup, page, paragraphs
from quern.demo.traps import TRAPS, contact, edited, with_control_token

__all__ = ["Draft", "counts", "drafts", "kinds"]

HOSTS = {
    "en": ("sample.example", "www.valley-gazette.test", "notes.sample.example"),
    "de": ("sample.example", "talbote.test"),
    "fr": ("sample.example", "carnet.test"),
    "es": ("sample.example", "cuaderno.test"),
    "ru": ("sample.example", "tetrad.test"),
    "nl": ("sample.example",),
}

CHARSETS = {"de": "windows-1252", "fr": "windows-1252", "ru": "windows-1251"}


@dataclass(frozen=True)
class Draft:
    """A page before it is packed: what the server would say."""

    kind: str
    language: str
    url: str
    html: str
    charset: str = "utf-8"
    status: str = "200 OK"
    content_type: str = "text/html; charset=utf-8"
    group: str | None = None
    """The same for the pages of one pair."""
    text: tuple[str, ...] = ()
    """The paragraphs of the article, where the page has one."""


@cache
def kinds() -> dict[str, dict[str, Any]]:
    """What there is of each kind, and the verdicts expected of it: ``kinds.json``, written by hand.

    By kind: ``what`` it is; its ``pages`` among 320 (articles take what is left over) and the ``languages`` that they
    take turns in; ``dropped``, the stages that may drop it, with the reason or rule behind a colon where that is
    certain; ``duplicate`` for pairs, as what one of two is removed; all others are kept, the ``hard`` ones though rules
    made for articles tend to drop them. ``at_least`` names measures; ``present`` and ``absent`` are strings that the
    final text must and must not hold.
    """
    found: dict[str, Any] = json.loads((Path(__file__).parent / "kinds.json").read_text(encoding="utf-8"))
    return found


def counts(pages: int) -> dict[str, int]:
    """Pages of each kind; they sum to ``pages``.

    Raises:
        ValueError: for fewer pages than there are kinds with their pairs, four times over.
    """
    paired = [kind for kind, entry in kinds().items() if "duplicate" in entry]
    least = 4 * (len(kinds()) + len(paired))
    if pages < least:
        raise ValueError(f"pages: expected at least {least}, so that every kind has its share, got {pages}")
    found = {}
    for kind, entry in kinds().items():
        # A form has only so many frames: more of its pages would be alike.
        share = entry["pages"] * (min(pages, 320) if kind in FORMS else pages) // 320
        found[kind] = max(2, share - share % 2) if kind in paired else max(1, share)
    found["article"] += pages - sum(found.values())
    return found


def _draft(
    kind: str,
    index: int,
    language: str,
    title: str,
    body: str | Sequence[str] = "",
    *,
    html: str = "",
    host: str = "",
    teasers: Sequence[str] = (),
    **more: Any,
) -> Draft:
    """``html`` where the whole page is given, else one around ``body``: HTML, or the paragraphs of an article."""
    text = () if isinstance(body, str) else tuple(body)
    inner = body if isinstance(body, str) else paragraphs(*body)
    host = host or HOSTS[language][index % len(HOSTS[language])]
    html = html or page(title, inner, language, host, teasers, more.get("charset", "utf-8"))
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode().lower()
    slug = "-".join(re.findall(r"[a-z0-9]+", plain)[:6]) or "story"
    return Draft(kind, language, f"https://{host}/{language}/{kind}/{slug}-{index:03d}", html, text=text, **more)


def _article(seed: int, kind: str, index: int, language: str, length: int | None = None) -> tuple[str, tuple[str, ...]]:
    """A title, and paragraphs of ``length`` sentences where there are so many."""
    stock, rng = load_stock(language), keyed(seed, kind, index)
    voice = Voice(stock, rng, topic=rng.choice(stock.topics))
    title = voice.say(rng.choice(stock.words[f"{voice.topic}.titles"]))
    # A headline's full name does not make the first mention in the text a second one.
    voice.named.clear()
    return title, tuple(compose(voice, length or rng.randint(13, 26 if language == "en" else 20)))


def _teasers(seed: int, kind: str, index: int, language: str) -> list[str]:
    stock, rng = load_stock(language), keyed(seed, kind, index, "teasers")
    topics = rng.sample(stock.topics, min(5, len(stock.topics)))
    return [Voice(stock, rng, topic).say(rng.choice(stock.words[f"{topic}.titles"])) for topic in topics]


def _written(seed: int, kind: str, index: int, language: str) -> Draft:
    """An article, with what its kind adds to it."""
    title, text = _article(seed, kind, index, language, 14 if kind == "personal_data" else None)
    if kind == "personal_data":
        text = (*text, contact(index, keyed(seed, kind, index, "contact")))
    elif kind == "control_token":
        text = with_control_token(text, index)
    charset = {"charset": CHARSETS[language], "content_type": "text/html"} if kind == "legacy_charset" else {}
    draft = _draft(kind, index, language, title, text, teasers=_teasers(seed, kind, index, language), **charset)
    if kind == "broken_html":
        return replace(draft, html=break_markup(draft.html, keyed(seed, kind, index, "markup")))
    return draft


def _pair(seed: int, kind: str, index: int, language: str) -> Draft:
    """Odd pages are the even ones before them: copied to another host, edited by another paper, or crawled again under
    an address with tracking parameters after two thirds were rewritten, so that only the address tells."""
    first, second = index - index % 2, index % 2 == 1
    title, text = _article(seed, kind, first, language, 22)
    if second and kind == "near_duplicate":
        text = edited(text)
    if second and kind == "tracking_url":
        text = (*text[: len(text) // 3], *_article(seed, kind, index, language, 14)[1])
    draft = _draft(kind, index if kind == "near_duplicate" else first, language, title, text)
    url = draft.url
    if kind == "tracking_url":
        url += f"?utm_source=newsletter&id={first}&gclid=Qx7_example#top" if second else f"?id={first}"
    elif second and kind == "exact_duplicate":
        url = url.replace("https://", "https://mirror.").replace(f"/{kind}/", f"/{kind}/copy/")
    return replace(draft, url=url, group=f"{kind}-{index // 2}")


def _formed(seed: int, kind: str, index: int, language: str) -> Draft:
    return _draft(kind, index, language, *form(kind, seed, index))


def _trap(seed: int, kind: str, index: int, language: str) -> Draft:
    return _draft(kind, index, language, **TRAPS[kind](keyed(seed, kind, index), index))


def _builder(kind: str) -> Callable[[int, str, int, str], Draft]:
    if "duplicate" in kinds()[kind]:
        return _pair
    return _formed if kind in FORMS else _trap if kind in TRAPS else _written


def drafts(seed: int, pages: int) -> Iterator[Draft]:
    """Every page of the site, kind by kind."""
    for kind, count in counts(pages).items():
        build, languages = _builder(kind), kinds()[kind]["languages"]
        for index in range(count):
            turn = index // 2 if build is _pair else index
            yield build(seed, kind, index, languages[turn % len(languages)])
