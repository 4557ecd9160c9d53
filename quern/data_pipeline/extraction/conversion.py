"""trafilatura's cleaning of a page and conversion of its tags, limited to the tags that the page has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import trafilatura.core
import trafilatura.htmlprocessing
from lxml.html import HtmlElement

__all__ = ["CleanedLater", "Cleaning", "conversions", "converting"]


class Cleaning:
    """trafilatura's cleaning of a tree, limited to the tags that the tree has."""

    def __init__(self, clean: Callable[[HtmlElement, Any], HtmlElement]) -> None:
        self._clean = clean

    def __call__(self, tree: HtmlElement, options: Any) -> HtmlElement:
        settings = trafilatura.htmlprocessing
        listed = settings.MANUALLY_CLEANED
        # cleaning makes no element of these; forms are looked up by name, and an empty list would mean every tag
        found = {"form", "head"}.union(element.tag for element in tree.iter(*listed))
        settings.MANUALLY_CLEANED = [tag for tag in listed if tag in found]
        try:
            return self._clean(tree, options)
        finally:
            settings.MANUALLY_CLEANED = listed


@dataclass(frozen=True)
class CleanedLater:
    """A lazily cleaned page, which only justext reads, on few pages."""

    tree: HtmlElement
    options: Any

    @staticmethod
    def prepare(tree: HtmlElement, options: Any, url: str | None) -> tuple[HtmlElement, Any]:
        """The page cleaned and converted, and, unless comments are wanted, its cleaned copy for later."""
        core = trafilatura.core
        cleaned = core.tree_cleaning(copy.copy(tree), options)
        backup = copy.copy(cleaned) if options.comments else CleanedLater(tree, options)
        return core.convert_tags(cleaned, options, url), backup

    @staticmethod
    def resolving(clean: Callable[[HtmlElement], HtmlElement]) -> Callable[[Any], HtmlElement]:
        """Wrap a function of a tree so that it also accepts a lazy tree."""

        def cleaned(tree: Any) -> HtmlElement:
            if isinstance(tree, CleanedLater):
                # in precision mode the page is not used after justext
                page = tree.tree if tree.options.focus == "precision" else copy.copy(tree.tree)
                tree = trafilatura.core.tree_cleaning(page, tree.options)
            return clean(tree)

        return cleaned


def converting(convert: Callable[..., HtmlElement]) -> Callable[..., HtmlElement]:
    """trafilatura's conversion of tags, with links converted here."""

    def converted(tree: HtmlElement, options: Any, url: str | None = None) -> HtmlElement:
        if not options.links:
            _convert_links(tree, ("div", "li", "p", "table") if options.tables else ("div", "li", "p"))
        return convert(tree, options, url)

    return converted


def _convert_links(tree: HtmlElement, containers: tuple[str, ...]) -> None:
    """Links below a container become references, unless the innermost one is the tree itself; the others stay."""
    for link in tree.iter("a"):
        above = link.getparent()
        while above is not None and above.tag not in containers:
            above = above.getparent()
        if above is not None and above is not tree:
            link.tag = "ref"


def conversions(listed: Mapping[str, Callable[[Any], None]]) -> dict[str, Callable[[Any], None]]:
    """trafilatura's conversions by tag, with a quicker look at ``pre``."""
    convert, settings = listed["pre"], trafilatura.htmlprocessing

    def convert_preformatted(element: HtmlElement) -> None:
        if next(element.iterdescendants("span"), None) is not None:
            convert(element)
            return
        text = element.text or ""
        element.tag = "code" if any(sign in text for sign in settings.CODE_INDICATORS) else "quote"

    return {**listed, "pre": convert_preformatted}
