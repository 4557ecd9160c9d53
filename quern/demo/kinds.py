"""The kinds of pages of the sample site, how many there are of each, and their generators."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from quern.demo import traps
from quern.demo.forms import FORMS, form, puzzles
from quern.demo.grammar import Voice, compose, keyed, load_stock
from quern.demo.layout import break_markup, cluttered_page, page, paragraphs

__all__ = ["KINDS", "PAIRED", "Draft", "counts", "drafts", "expectations"]

HOSTS = {
    "en": ("sample.example", "www.valley-gazette.test", "notes.sample.example"),
    "de": ("sample.example", "talbote.test"),
    "fr": ("sample.example", "carnet.test"),
    "es": ("sample.example", "cuaderno.test"),
    "ru": ("sample.example", "tetrad.test"),
    "nl": ("sample.example",),
    "ja": ("sample.example",),
}

#: Pages of each kind among 320, and the languages they take turns in. Articles take what is left over.
KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "article": (0, ("en", "de", "en", "fr", "es", "en", "ru", "en", "de")),
    "cluttered": (16, ("en", "en", "de", "en", "en", "fr", "en", "es")),
    "thread_list": (4, ("en",)),
    "tutorial": (4, ("en",)),
    "poem": (4, ("en",)),
    "recipe": (5, ("en",)),
    "table": (4, ("en",)),
    "faq": (4, ("en",)),
    "glossary": (4, ("en",)),
    "dialogue": (3, ("en",)),
    "changelog": (4, ("en",)),
    "lyrics": (4, ("en",)),
    "personal_data": (8, ("en",)),
    "broken_html": (6, ("en", "de")),
    "legacy_charset": (6, ("de", "ru", "fr")),
    "gzip_encoded": (3, ("en", "es", "de")),
    "chunked": (3, ("en", "fr", "en")),
    "control_token": (3, ("en",)),
    "leaked_question": (4, ("en",)),
    "near_duplicate": (18, ("en",)),
    "exact_duplicate": (12, ("en", "de")),
    "tracking_url": (8, ("en",)),
    "foreign": (4, ("nl",)),
    "foreign_charset": (2, ("ja",)),
    "link_farm": (8, ("en",)),
    "navigation": (5, ("en", "fr")),
    "spam": (9, ("en",)),
    "placeholder": (5, ("en",)),
    "toxic": (5, ("en",)),
    "short": (6, ("en", "es")),
    "empty_body": (3, ("en",)),
    "empty_payload": (2, ("en",)),
    "not_found": (4, ("en",)),
    "json": (3, ("en",)),
}

#: Kinds whose pages come in pairs, of which one survives.
PAIRED = ("near_duplicate", "exact_duplicate", "tracking_url")

CHARSETS = {"de": "windows-1252", "fr": "windows-1252", "ru": "windows-1251", "ja": "shift_jis"}


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
    delivery: str = "plain"
    group: str | None = None
    """The same for the pages of one pair."""
    text: tuple[str, ...] = ()
    """The paragraphs of the article, where the page has one."""


@cache
def expectations() -> dict[str, Any]:
    """The expected verdicts of each kind: ``expected.json``, written by hand.

    By kind: ``what`` it is; ``verdict`` (``kept``, ``dropped``, or ``one_kept`` of each pair); ``hard`` for good pages
    that rules made for articles tend to drop; for dropped pages the ``stages`` that may do it, and for one dropped at
    the quality gate the ``families`` of rules that must be among the failed ones; for pairs the kinds of
    ``duplicates``; ``at_least`` and ``at_least_one_of`` name measures; ``present`` and ``absent`` are strings that the
    final text must and must not hold.
    """
    found: dict[str, Any] = json.loads((Path(__file__).parent / "expected.json").read_text(encoding="utf-8"))
    return found


def counts(pages: int) -> dict[str, int]:
    """Pages of each kind; they sum to ``pages``.

    Raises:
        ValueError: for fewer pages than there are kinds with their pairs, four times over.
    """
    least = 4 * (len(KINDS) + len(PAIRED))
    if pages < least:
        raise ValueError(f"pages: expected at least {least}, so that every kind has its share, got {pages}")
    found = {}
    for kind, (weight, _) in KINDS.items():
        share = min(weight, weight * pages // 320) if kind in FORMS else weight * pages // 320
        found[kind] = max(2, share - share % 2) if kind in PAIRED else max(1, share)
    found["article"] = pages - sum(count for kind, count in found.items() if kind != "article")
    return found


def slug(title: str) -> str:
    """The title as a piece of a path, ASCII; ``story`` when nothing of it is."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode().lower()
    return "-".join(re.findall(r"[a-z0-9]+", plain)[:6]) or "story"


@dataclass(frozen=True)
class _Article:
    title: str
    text: tuple[str, ...]


def _article(seed: int, kind: str, index: int, language: str, length: int | None = None) -> _Article:
    stock, rng = load_stock(language), keyed(seed, kind, index)
    voice = Voice(stock, rng, topic=stock.topics[rng.randrange(len(stock.topics))])
    title = voice.say(rng.choice(stock.words[f"{voice.topic}.titles"]))
    longest = len(stock.sections["generic"]) + len(stock.sections[f"topic {voice.topic}"])
    wanted = length or (rng.randint(13, 26) if language == "en" else rng.randint(13, 20))
    # A headline's full name does not make the first mention in the text a second one.
    voice.named.clear()
    return _Article(title, tuple(compose(voice, min(wanted, longest))))


def _draft(seed: int, kind: str, index: int, language: str, article: _Article, body: str | None = None) -> Draft:
    hosts = HOSTS[language]
    host = hosts[index % len(hosts)]
    html = page(article.title, body or paragraphs(list(article.text)), language, host, index)
    url = f"https://{host}/{language}/{kind}/{slug(article.title)}-{index:03d}"
    return Draft(kind, language, url, html, text=article.text)


def _plain(seed: int, kind: str, index: int, language: str) -> Draft:
    return _draft(seed, kind, index, language, _article(seed, kind, index, language))


def _cluttered(seed: int, kind: str, index: int, language: str) -> Draft:
    article, rng = _article(seed, kind, index, language), keyed(seed, kind, index, "teasers")
    stock = load_stock(language)
    titles = [
        Voice(stock, rng, topic).say(rng.choice(stock.words[f"{topic}.titles"]))
        for topic in rng.sample(stock.topics, 5)
    ]
    draft = _draft(seed, kind, index, language, article)
    html = cluttered_page(article.title, paragraphs(list(article.text)), language, draft.url.split("/")[2], titles, rng)
    return replace(draft, html=html)


def _form(seed: int, kind: str, index: int, language: str) -> Draft:
    title, body = form(kind, seed, index)
    return _draft(seed, kind, index, language, _Article(title, ()), body)


def _personal_data(seed: int, kind: str, index: int, language: str) -> Draft:
    article, rng = _article(seed, kind, index, language, 14), keyed(seed, kind, index, "contact")
    return _draft(seed, kind, index, language, replace(article, text=(*article.text, traps.contact(index, rng))))


def _broken(seed: int, kind: str, index: int, language: str) -> Draft:
    draft = _plain(seed, kind, index, language)
    return replace(draft, html=break_markup(draft.html, keyed(seed, kind, index, "markup")))


def _legacy(seed: int, kind: str, index: int, language: str) -> Draft:
    draft, charset = _plain(seed, kind, index, language), CHARSETS[language]
    return replace(
        draft,
        html=draft.html.replace('charset="utf-8"', f'charset="{charset}"'),
        charset=charset,
        content_type="text/html",
    )


def _gzip(seed: int, kind: str, index: int, language: str) -> Draft:
    return replace(_plain(seed, kind, index, language), delivery="gzip")


def _chunked(seed: int, kind: str, index: int, language: str) -> Draft:
    return replace(_plain(seed, kind, index, language), delivery="chunked")


def _control_token(seed: int, kind: str, index: int, language: str) -> Draft:
    article = _article(seed, kind, index, language)
    middle = len(article.text) // 2
    text = (*article.text[:middle], traps.CONTROL_TOKEN_SENTENCES[index % 3], *article.text[middle:])
    return _draft(seed, kind, index, language, replace(article, text=text))


def _leaked(seed: int, kind: str, index: int, language: str) -> Draft:
    article = _article(seed, kind, index, language, 12)
    puzzle = puzzles(seed, index + 1)[index]
    text = (
        *article.text[:2],
        "Our reader's puzzle this week comes from the school. " + puzzle.question,
        f"The solution, for those who have given up, is {puzzle.answer}; the first correct letter wins a jar of honey.",
        *article.text[2:],
    )
    return _draft(seed, kind, index, language, replace(article, text=text))


def _near_duplicate(seed: int, kind: str, index: int, language: str) -> Draft:
    """Odd pages are the even ones before them, edited by another paper."""
    article = _article(seed, kind, index - index % 2, language, 22)
    if index % 2:
        article = replace(article, text=tuple(traps.edited(list(article.text))))
    draft = _draft(seed, kind, index, language, article)
    return replace(draft, group=f"{kind}-{index // 2}")


def _exact_duplicate(seed: int, kind: str, index: int, language: str) -> Draft:
    article = _article(seed, kind, index - index % 2, language)
    draft = _draft(seed, kind, index - index % 2, language, article)
    if index % 2:
        draft = replace(
            draft, url=draft.url.replace("https://", "https://mirror.").replace(f"/{kind}/", f"/{kind}/copy/")
        )
    return replace(draft, group=f"{kind}-{index // 2}")


def _tracking_url(seed: int, kind: str, index: int, language: str) -> Draft:
    """The same address twice; half of the text was rewritten in between, so that only the address tells."""
    first = _article(seed, kind, index - index % 2, language, 20)
    draft = _draft(seed, kind, index - index % 2, language, first)
    url = f"{draft.url}?id={1000 + index // 2}"
    if index % 2:
        later = _article(seed, kind, index, language, 14)
        text = (*first.text[: len(first.text) // 3], *later.text)
        body = paragraphs(list(text))
        html = page(first.title, body, language, draft.url.split("/")[2], index - 1)
        url = url.replace("?", "?utm_source=newsletter&") + "&utm_campaign=spring&gclid=Qx7_example#top"
        draft = replace(draft, html=html, text=text)
    return replace(draft, url=url, group=f"{kind}-{index // 2}")


def _trap(seed: int, kind: str, index: int, language: str) -> Draft:
    trap = traps.TRAPS[kind](keyed(seed, kind, index), index, language)
    host = trap.host or HOSTS[language][index % len(HOSTS[language])]
    url = f"https://{host}/{language}/{kind}/{slug(trap.title)}-{index:03d}"
    return Draft(kind, language, url, trap.html, status=trap.status, content_type=trap.content_type)


BUILDERS: dict[str, Callable[[int, str, int, str], Draft]] = {
    "article": _plain,
    "foreign": _plain,
    "cluttered": _cluttered,
    "personal_data": _personal_data,
    "broken_html": _broken,
    "legacy_charset": _legacy,
    "foreign_charset": _legacy,
    "gzip_encoded": _gzip,
    "chunked": _chunked,
    "control_token": _control_token,
    "leaked_question": _leaked,
    "near_duplicate": _near_duplicate,
    "exact_duplicate": _exact_duplicate,
    "tracking_url": _tracking_url,
    **dict.fromkeys(FORMS, _form),
    **dict.fromkeys(traps.TRAPS, _trap),
}


def drafts(seed: int, pages: int) -> Iterator[Draft]:
    """Every page of the site, kind by kind."""
    for kind, count in counts(pages).items():
        languages = KINDS[kind][1]
        for index in range(count):
            turn = index // 2 if kind in PAIRED else index
            yield BUILDERS[kind](seed, kind, index, languages[turn % len(languages)])
