"""Quality rules, decided from stored measures alone, so that a threshold can change without the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from pydantic import Field, field_validator

from quern.config import Section
from quern.data_pipeline.page.document import Page
from quern.data_pipeline.stages.quality import c4, fineweb, gopher, repetition
from quern.data_pipeline.stages.quality.c4 import C4Config
from quern.data_pipeline.stages.quality.fineweb import FinewebConfig
from quern.data_pipeline.stages.quality.gopher import Dialect, GopherConfig
from quern.data_pipeline.stages.quality.repetition import RepetitionConfig
from quern.data_pipeline.stages.quality.words import Reading

__all__ = [
    "EMPTIED",
    "C4Config",
    "FinewebConfig",
    "GopherConfig",
    "Quality",
    "QualityConfig",
    "RepetitionConfig",
    "decide",
    "measure",
]

Family = Literal["repetition", "gopher", "c4", "fineweb"]


class _Rules(Protocol):
    """A module of one family's."""

    @property
    def MEASURES(self) -> Sequence[str]:  # noqa: N802, a constant of a module
        """What they measure."""

    def decide(self, measures: Mapping[str, float | None], config: Any) -> list[str]:
        """The rules that fail, from measures alone."""


_FAMILIES: dict[str, _Rules] = {"repetition": repetition, "gopher": gopher, "c4": c4, "fineweb": fineweb}
#: The rule that a text fails of which C4's rules for lines leave nothing, where it fails no other.
EMPTIED = "c4.no_line_left"


class QualityConfig(Section):
    """Which rule families, in which order, by which definitions and thresholds. The defaults are FineWeb's."""

    dialect: Dialect = "datatrove"
    """Definitions of the two Gopher families: datatrove's or those of the paper. C4 and FineWeb have one each."""
    order: tuple[Family, ...] = ("repetition", "gopher", "c4", "fineweb")
    """The families that are measured, in the order in which they give the reason and in which they read the text that
    C4 leaves."""
    action: Literal["drop", "measure"] = "drop"
    """``measure`` fills the columns and ``failed_rules`` as ``drop`` would; no page fails and no text changes."""
    default_language: str = Field(default="en", pattern="^[a-z]{2,3}$")
    """The language of a page of unknown language: decides how words are split and which stop words count."""
    repetition: RepetitionConfig = RepetitionConfig()
    gopher: GopherConfig = GopherConfig()
    c4: C4Config = C4Config()
    fineweb: FinewebConfig = FinewebConfig()

    @field_validator("order")
    @classmethod
    def _once_each(cls, order: tuple[Family, ...]) -> tuple[Family, ...]:
        if len(set(order)) < len(order):
            raise ValueError(f"expected each family once, got {', '.join(order)}")
        return order


def measure(text: str, config: QualityConfig, language: str | None = None) -> tuple[dict[str, float | None], str]:
    """All measures of a text in ``language`` (ISO 639; None is the config's default), and the text C4 leaves of it.

    Each family reads the text it would see had every earlier one passed. The measures hold every name of every family
    in ``config.order``; None is what cannot be measured. Pure: the same answer in any process, after any other page.
    """
    reading = Reading(text, language or config.default_language)
    measures: dict[str, float | None] = {}
    for family in config.order:
        if family == "repetition":
            measures |= repetition.measure(reading, dialect=config.dialect)
        elif family == "gopher":
            stop_words = config.gopher.stop_words.get(reading.language)
            measures |= gopher.measure(reading, stop_words, dialect=config.dialect)
        elif family == "c4":
            found, left = c4.measure(reading, config.c4)
            measures |= found
            reading = left if config.c4.rewrite else reading
        else:
            measures |= fineweb.measure(reading, short_line_length=config.fineweb.short_line_length)
    return measures, reading.text


def decide(measures: Mapping[str, float | None], config: QualityConfig) -> list[str]:
    """Every failed rule, in the recipe's order and within a family in datatrove's, from stored measures alone.

    The first is the reason. A measure that is missing, None or NaN fails nothing; an empty text fails by rules of its
    own (``repetition.empty``, ``fineweb.empty``), and one of which C4 leaves no line by :data:`EMPTIED` where no other
    rule fails. ``config.action`` is not looked at.
    """
    rules = [rule for family in config.order for rule in _FAMILIES[family].decide(measures, getattr(config, family))]
    emptied = "c4" in config.order and config.c4.rewrite and measures.get("c4.num_kept_lines") == 0
    return rules or [EMPTIED] * emptied


class Quality:
    """The stage: fills the measures, records the failed rules, and keeps only C4's lines if it may drop."""

    name = "quality"

    def __init__(self, config: QualityConfig) -> None:
        self.config = config
        self.measures: tuple[str, ...] = tuple(name for family in config.order for name in _FAMILIES[family].MEASURES)

    def __call__(self, page: Page) -> Page:
        measures, text = measure(page.text or "", self.config, page.language)
        page.measures |= {name: value for name, value in measures.items() if value is not None}
        for rule in decide(measures, self.config):
            if self.config.action == "drop":
                page.fail("quality", rule)
            else:
                page.note(rule)
        if self.config.action == "drop" and page.text is not None:
            page.text = text
        return page
