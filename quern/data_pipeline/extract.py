"""Extraction: the main text of a page, within bounds that keep a hostile page from stopping the run.

HTML goes through trafilatura without comments (see :mod:`quern.data_pipeline.extract_trafilatura`) or, as the fast
option, through resiliparse. ``deduplicate`` stays off: it remembers earlier pages, so the text would depend on order.

lxml spends minutes in C on some shapes of page, where no signal arrives. So size, number of elements, elements in one
run of text, and table cells made by spans are bounded on the raw HTML, before any parser sees it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Literal, Self

from pydantic import Field, model_validator

from quern.config import Section
from quern.data_pipeline.document import Page

__all__ = ["Extract", "ExtractConfig", "inline_run", "num_elements", "table_cells"]

logger = logging.getLogger(__name__)

# trafilatura logs a line for every page without text; verdicts say that already
logging.getLogger("trafilatura").addHandler(logging.NullHandler())


class ExtractConfig(Section):
    """Engine, its balance, and what a page may cost. The defaults for bounds pass every page of a real-page corpus."""

    engine: Literal["trafilatura", "resiliparse"] = "trafilatura"
    favor: Literal["precision", "balanced", "recall"] = "precision"
    """Precision against recall; trafilatura only."""
    include_tables: bool = True
    """Text in tables; trafilatura only."""
    max_html_bytes: int = Field(default=4 << 20, ge=1)
    """UTF-8 bytes of the decoded page."""
    max_elements: int = Field(default=16_000, ge=1)
    """Opening tags, comments and declarations."""
    max_inline_elements: int = Field(default=5_000, ge=1)
    """Elements in one run without a block: trafilatura's time grows with its square."""
    max_table_cells: int = Field(default=50_000, ge=1)
    """Cells a page's tables take once ``colspan`` and ``rowspan`` are spelled out, counted only where they occur."""

    @model_validator(mode="after")
    def _engine_has_what_is_set(self) -> Self:
        if self.engine != "trafilatura":
            for field in ("favor", "include_tables"):
                if getattr(self, field) != type(self).model_fields[field].default:
                    raise ValueError(f"{field}: expected only with engine trafilatura, got engine {self.engine}")
        return self


_BLOCK_NAMES = (
    "address article aside blockquote body caption center dd details dialog dir div dl dt fieldset figcaption figure "
    "footer form frameset h1 h2 h3 h4 h5 h6 head header hr html legend li main menu nav noscript ol optgroup option p "
    "pre script section select style summary table tbody td template tfoot th thead title tr ul"
)
_BLOCK_TAGS = frozenset(_BLOCK_NAMES.split())
_OPENING = re.compile(r"<([a-zA-Z][^\s<>/]{0,20})")
_TABLE_PART = re.compile(r"<([tT](?:[rR]|[dD]|[hH]|[aA][bB][lL][eE]))(?![a-zA-Z0-9:-])([^<>]*)")
_SPAN = re.compile(r"\b(col|row)span\s*=\s*(?:[\"']\s*)?(\d{1,6})", re.IGNORECASE)
#: trafilatura reads no higher span, and pads rows to no more columns.
_MAX_SPAN = 100


def num_elements(html: str) -> int:
    """An upper bound on the elements of a page, from one pass over the text."""
    return html.count("<") - html.count("</")


def inline_run(html: str) -> int:
    """The most opening tags between two of blocks: the children a paragraph can have."""
    longest = run = 0
    for match in _OPENING.finditer(html):
        if match.group(1).lower() in _BLOCK_TAGS:
            run = 0
        else:
            run += 1
            longest = max(longest, run)
    return longest


def table_cells(html: str) -> int:
    """The cells that tables with ``colspan`` or ``rowspan`` unfold to, rows padded; 0 for a page without spans."""
    total = rows = widest = width = 0
    spans = False
    for match in _TABLE_PART.finditer(html):
        tag, attributes = match.group(1).lower(), match.group(2)
        if tag == "table":
            total += rows * min(widest, _MAX_SPAN)
            rows = widest = width = 0
        elif tag == "tr":
            rows += 1
            width = 0
        else:
            span = {"col": 1, "row": 1}
            for axis, digits in _SPAN.findall(attributes):
                span[axis.lower()] = min(int(digits), _MAX_SPAN)
                spans = True
            total += span["col"] * span["row"] - 1
            width += span["col"]
            widest = max(widest, width)
    return total + rows * min(widest, _MAX_SPAN) if spans else 0


def _resiliparse_text(html: str) -> str | None:
    from resiliparse.extract.html2text import extract_plain_text

    text = extract_plain_text(html, main_content=True, list_bullets=False, alt_texts=False, links=False, comments=False)
    return str(text)


def _trafilatura_engine(config: ExtractConfig) -> Callable[[str], str | None]:
    def text_of(html: str) -> str | None:
        # imported, and tested against stock, where pages are: a driver that only checks its settings has none
        from quern.data_pipeline import extract_trafilatura

        return extract_trafilatura.extract_text(html, config.favor, config.include_tables)

    return text_of


class Extract:
    """Sets ``text`` and ``extracted``; fails ``extract.too_large``, ``too_many_elements``, ``failed`` or ``empty``.

    A page of media ``text`` is its own text, with newlines normalised.
    """

    name = "extract"
    measures: tuple[str, ...] = ()

    def __init__(self, config: ExtractConfig) -> None:
        self.config = config
        self._engine = _resiliparse_text if config.engine == "resiliparse" else _trafilatura_engine(config)

    def __call__(self, page: Page) -> Page:
        if page.media == "text":
            return self._keep(page, page.raw.replace("\r\n", "\n").replace("\r", "\n"))
        refusal = self._refusal(page.raw)
        if refusal is not None:
            page.fail(self.name, refusal)
            return page
        try:
            text = self._engine(page.raw)
        except Exception as error:  # parsers raise what they like, and RecursionError; one page is one verdict
            logger.debug("extraction failed on %s: %r", page.url, error)
            page.fail(self.name, "extract.failed")
            return page
        return self._keep(page, text or "")

    def _keep(self, page: Page, text: str) -> Page:
        if text.strip():
            page.text = page.extracted = text
        else:
            page.fail(self.name, "extract.empty")
        return page

    def _refusal(self, html: str) -> str | None:
        """The bound a page breaks, if any; every check is linear in the text."""
        config = self.config
        # a code point is at most four bytes, so most pages need no encoding to be measured
        if len(html) * 4 > config.max_html_bytes and len(html.encode("utf-8", "replace")) > config.max_html_bytes:
            return "extract.too_large"
        # "<" alone bounds both counts of elements, and is the cheaper count
        if html.count("<") > min(config.max_elements, config.max_inline_elements) and (
            num_elements(html) > config.max_elements or inline_run(html) > config.max_inline_elements
        ):
            return "extract.too_many_elements"
        return "extract.too_many_elements" if table_cells(html) > config.max_table_cells else None
