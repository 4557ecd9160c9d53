"""trafilatura's search for the body of a page, without copies and texts that are never read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from lxml.html import HtmlElement

from quern.data_pipeline.extraction.xpath_walk import Firsts

__all__ = ["ENOUGH_CHARS", "Backup", "PageElement"]

#: What trafilatura looks for where it found too little.
_WILD = ".//code|.//p|.//quote|.//table|.//div[contains(@class, 'w3-code')]"
#: Characters of paragraphs that are more than trafilatura ever asks for.
ENOUGH_CHARS = 10_000


class Backup(threading.local):
    """The page copy that trafilatura makes before it searches for the body, and reads if it found too little.

    Where no expression names a body the look changes nothing, so that the page is as good as its copy.
    """

    def __init__(self, bodies: Firsts, extract: Callable[..., Any], copy: Callable[[Any], Any]) -> None:
        self._bodies, self._extract, self._copy = bodies, extract, copy
        self._page: HtmlElement | None = None

    def extract(self, page: HtmlElement, options: Any) -> Any:
        """trafilatura's own function; it copies the page first of all."""
        self._page = page
        try:
            return self._extract(page, options)
        finally:
            self._page = None

    def copy(self, element: Any) -> Any:
        """A copy of an element, or the page itself."""
        if element is self._page:
            self._page = None
            if not self._bodies.foresee(element):
                return element
        return self._copy(element)


class PageElement(HtmlElement):
    """An element of a page that answers two of trafilatura's expressions faster."""

    def xpath(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """As lxml's, but of the texts in all paragraphs only the first where they are long: trafilatura asks whether
        they have some hundred characters."""
        if not args and not kwargs:
            if path == "//p//text()":
                return _paragraph_texts(self.getroottree().getroot())
            if path == _WILD:
                found = self.iterdescendants("code", "p", "quote", "table", "div")
                return [each for each in found if each.tag != "div" or "w3-code" in each.get("class", "")]
        return super().xpath(path, *args, **kwargs)


def _paragraph_texts(root: HtmlElement) -> list[str]:
    """The texts in paragraphs, in order; the first of them where they are long."""
    found, length = [], 0
    for paragraph in root.iter("p"):
        if next(paragraph.iterancestors("p"), None) is None:
            for text in paragraph.itertext():
                found.append(text)
                length += len(text)
            if length > ENOUGH_CHARS:
                break
    return found
