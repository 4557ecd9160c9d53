"""Stage that extracts the main text of a page, within limits that keep a hostile page from stopping the run.

HTML goes through trafilatura without comments (see :mod:`quern.data_pipeline.extraction.trafilatura_fast`) or, as the
fast option, through resiliparse. ``deduplicate`` stays off: it remembers earlier pages, so the text would depend on
order.

lxml spends minutes in C on some shapes of page, where no signal arrives. So size, number of elements, elements in one
run of text, attributes, and table cells made by spans are bounded on the raw HTML, before any parser sees it (see
:mod:`quern.data_pipeline.extraction.page_bounds`). Nesting needs no bound of ours: libxml2 reads no deeper than 256
elements.
"""

from __future__ import annotations

import logging
from typing import Literal, Self

from pydantic import Field, model_validator

from quern.config import Section
from quern.data_pipeline.extraction.page_bounds import has_attributes_over, inline_run, num_elements, table_cells
from quern.data_pipeline.page.document import Page

__all__ = ["Extract", "ExtractConfig"]

logger = logging.getLogger(__name__)

# trafilatura logs a line for every page without text; verdicts say that already
logging.getLogger("trafilatura").addHandler(logging.NullHandler())


class ExtractConfig(Section):
    """Engine, its balance, and what a page may cost. The defaults for bounds pass every page of a real-page corpus."""

    engine: Literal["trafilatura", "resiliparse"] = "trafilatura"
    """The library that extracts a page's main text."""
    favor: Literal["precision", "balanced", "recall"] = "precision"
    """Trafilatura only: prefer precision or recall."""
    include_tables: bool = True
    """Trafilatura only: keep the text of tables."""
    max_html_bytes: int = Field(default=4 << 20, ge=1)
    """[bytes] UTF-8 bytes of the decoded page; a larger page fails."""
    max_elements: int = Field(default=16_000, ge=1)
    """[elements] Opening tags, comments and declarations of a page; a page with more fails."""
    max_inline_elements: int = Field(default=5_000, ge=1)
    """[elements] Elements in a run without a block element; trafilatura's time grows with the square of this number."""
    max_table_cells: int = Field(default=50_000, ge=1)
    """[cells] Cells of a page's tables once ``colspan`` and ``rowspan`` are expanded; counted only where they occur."""
    max_attributes: int = Field(default=50_000, ge=1)
    """[attributes] Attributes of all elements of a page."""
    max_element_attributes: int = Field(default=1_000, ge=1)
    """[attributes] Attributes of one element; lxml's time grows with the square of this number."""
    max_text_bytes: int = Field(default=4 << 20, ge=1)
    """[bytes] UTF-8 bytes of a page's text, HTML or not; measuring a text takes up to a hundred times as much
    memory."""

    @model_validator(mode="after")
    def _engine_has_what_is_set(self) -> Self:
        if self.engine != "trafilatura":
            for field in ("favor", "include_tables"):
                if getattr(self, field) != type(self).model_fields[field].default:
                    raise ValueError(f"{field}: expected only with engine trafilatura, got engine {self.engine}")
        return self


def _resiliparse_text(html: str, config: ExtractConfig) -> str | None:
    from resiliparse.extract.html2text import extract_plain_text

    text = extract_plain_text(html, main_content=True, list_bullets=False, alt_texts=False, links=False, comments=False)
    return str(text)


def _trafilatura_text(html: str, config: ExtractConfig) -> str | None:
    # imported, and tested against stock, where pages are: a driver that only checks its settings has none
    from quern.data_pipeline.extraction import trafilatura_fast as extract_trafilatura

    return extract_trafilatura.extract_text(html, config.favor, config.include_tables)


class Extract:
    """Sets ``text`` and ``extracted``, or fails: ``extract.too_large``, ``extract.too_many_elements``,
    ``extract.too_many_attributes``, ``extract.failed``, ``extract.empty`` or ``extract.text_too_large``.

    A page of media ``text`` is its own text, with newlines normalised.
    """

    name = "extract"
    measures: tuple[str, ...] = ()

    def __init__(self, config: ExtractConfig) -> None:
        self.config = config
        self._engine = _resiliparse_text if config.engine == "resiliparse" else _trafilatura_text

    def __call__(self, page: Page) -> Page:
        if page.media == "text":
            return self._keep(page, page.raw.replace("\r\n", "\n").replace("\r", "\n"))
        refusal = self._refusal(page.raw)
        if refusal is not None:
            page.fail(self.name, refusal)
            return page
        try:
            text = self._engine(page.raw, self.config)
        except Exception as error:  # parsers raise what they like, and RecursionError; one page is one verdict
            logger.debug("extraction failed on %s: %r", page.url, error)
            page.fail(self.name, "extract.failed")
            return page
        return self._keep(page, text or "")

    def _keep(self, page: Page, text: str) -> Page:
        if not text.strip():
            page.fail(self.name, "extract.empty")
        elif _is_larger(text, self.config.max_text_bytes):
            page.fail(self.name, "extract.text_too_large")
        else:
            page.text = page.extracted = text
        return page

    def _refusal(self, html: str) -> str | None:
        """The bound a page breaks, if any; every check is linear in the text."""
        config = self.config
        if _is_larger(html, config.max_html_bytes):
            return "extract.too_large"
        # "<" alone bounds both counts of elements, and is the cheaper count
        if html.count("<") > min(config.max_elements, config.max_inline_elements) and (
            num_elements(html) > config.max_elements or inline_run(html) > config.max_inline_elements
        ):
            return "extract.too_many_elements"
        if table_cells(html) > config.max_table_cells:
            return "extract.too_many_elements"
        if has_attributes_over(html, config.max_attributes, config.max_element_attributes):
            return "extract.too_many_attributes"
        return None


def _is_larger(text: str, max_bytes: int) -> bool:
    """Whether ``text`` is longer than so many bytes of UTF-8."""
    # a code point is at most four bytes, so most texts need no encoding to be measured
    return len(text) * 4 > max_bytes and len(text.encode("utf-8", "replace")) > max_bytes
