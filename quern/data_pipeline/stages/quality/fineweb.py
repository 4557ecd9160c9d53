"""FineWeb's own rules (Penedo et al. 2024, arXiv 2406.17557), as in datatrove's ``FineWebQualityFilter``.

Lines are what stands between newlines and is not blank.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from quern.config import Section
from quern.data_pipeline.stages.quality.gopher import outside
from quern.data_pipeline.stages.quality.repetition import second_and_later
from quern.data_pipeline.stages.quality.words import TERMINAL_PUNCTUATION, Reading

__all__ = ["MEASURES", "FinewebConfig", "decide", "measure"]

MEASURES = (
    "fineweb.empty",
    "fineweb.line_punct_ratio",
    "fineweb.short_line_ratio",
    "fineweb.char_dup_ratio",
    "fineweb.list_ratio",
)


class FinewebConfig(Section):
    """Thresholds; null switches a rule off, 0 is a value."""

    line_punct_ratio: float | None = Field(default=0.12, ge=0, le=1)
    """[share] Fewest lines that end in a terminal mark of any script; null = no limit, as for the other ratios."""
    line_punct_exclude_zero: bool = False
    """Let a page pass in which no line ends in a terminal mark."""
    short_line_ratio: float | None = Field(default=0.67, ge=0, le=1)
    """[share] Most short lines."""
    short_line_length: int = Field(default=30, ge=0)
    """[characters] A line of at most this length is short. It is measured, so a change means reading the pages
    again."""
    char_dup_ratio: float | None = Field(default=0.01, ge=0, le=1)
    """[share] Most characters in lines that repeat an earlier one: 0.01 in FineWeb's code, 0.1 in its paper."""
    list_ratio: float | None = Field(default=0.3, ge=0, allow_inf_nan=False)
    """[per word] Most newlines."""


def measure(reading: Reading, *, short_line_length: int = 30) -> dict[str, float | None]:
    """The family's measures of a text.

    ``fineweb.empty`` is 1 for a text without a line, whose other measures are None.
    """
    text = reading.text
    lines = [line for line in text.split("\n") if line and not line.isspace()]
    if not lines:
        return {name: 1.0 if name == "fineweb.empty" else None for name in MEASURES}
    num_newlines = text.count("\n")
    repeated_chars = second_and_later(lines)[1] if len(set(lines)) < len(lines) else 0
    return {
        "fineweb.empty": 0.0,
        "fineweb.line_punct_ratio": sum(line[-1] in TERMINAL_PUNCTUATION for line in lines) / len(lines),
        "fineweb.short_line_ratio": sum(len(line) <= short_line_length for line in lines) / len(lines),
        "fineweb.char_dup_ratio": repeated_chars / (len(text) - num_newlines),
        "fineweb.list_ratio": num_newlines / reading.num_words if reading.num_words else None,
    }


def decide(measures: Mapping[str, float | None], config: FinewebConfig) -> list[str]:
    """The failed rules in datatrove's order, from measures alone. A measure of None (or NaN) fails nothing."""
    excused = measures.get("fineweb.line_punct_ratio") == 0 and config.line_punct_exclude_zero
    limits = (
        ("fineweb.empty", None, 0),
        ("fineweb.line_punct_ratio", None if excused else config.line_punct_ratio, None),
        ("fineweb.short_line_ratio", None, config.short_line_ratio),
        ("fineweb.char_dup_ratio", None, config.char_dup_ratio),
        ("fineweb.list_ratio", None, config.list_ratio),
    )
    return outside(measures, limits)
