"""Gopher's document quality rules (Rae et al. 2021, arXiv 2112.11446, appendix A.1.1).

Two dialects, because the implementations of one paragraph of that paper do not agree:

``datatrove``
    Words are those of :mod:`~quern.data_pipeline.stages.quality.words`, punctuation among them. Words made of
    punctuation alone do not count towards the number and mean length of words, but do in every other denominator. Lines
    are those of ``str.splitlines``, empty ones too. Bullets are ``•`` and ``-``. Stop words are case-sensitive. The
    same decisions as datatrove 0.10.1's ``GopherQualityFilter``.
``paper``
    Words are what stands between whitespace (in a language without spaces, characters), all of them counted
    everywhere. Lines are those that are not blank. Bullets are ``• ‣ ● ◦ * -``. Stop words are found in any case, with
    the punctuation around them taken off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pydantic import Field, model_validator

from quern.config import Section
from quern.data_pipeline.stages.quality.words import PUNCTUATION, Reading

__all__ = ["MEASURES", "Dialect", "GopherConfig", "decide", "measure", "outside", "words_of"]

Dialect = Literal["datatrove", "paper"]

MEASURES = (
    "gopher.num_words",
    "gopher.mean_word_length",
    "gopher.hash_ratio",
    "gopher.ellipsis_ratio",
    "gopher.bullet_line_frac",
    "gopher.ellipsis_line_frac",
    "gopher.alpha_word_frac",
    "gopher.num_stop_words",
)

_ELLIPSES = ("...", "…")
_BULLETS: dict[str, tuple[str, ...]] = {"datatrove": ("•", "-"), "paper": ("•", "‣", "●", "◦", "*", "-")}
_PUNCTUATION = "".join(sorted(PUNCTUATION))


_STOP_WORDS: dict[str, tuple[str, ...]] = {"en": ("the", "be", "to", "of", "and", "that", "have", "with")}


class GopherConfig(Section):
    """Thresholds of the quality rules; null switches a rule off, 0 is a value."""

    min_words: int | None = Field(default=50, ge=0)
    """[words] A page with fewer words fails; null = no limit, as for all keys here."""
    max_words: int | None = Field(default=100_000, ge=0)
    """[words] A page with more words fails."""
    min_mean_word_length: float | None = Field(default=3.0, ge=0, allow_inf_nan=False)
    """[characters] Least mean length of a word; not applied, like the maximum, to languages without spaces."""
    max_mean_word_length: float | None = Field(default=10.0, ge=0, allow_inf_nan=False)
    """[characters] Greatest mean length of a word."""
    max_hash_ratio: float | None = Field(default=0.1, ge=0, allow_inf_nan=False)
    """[per word] Most number signs (#)."""
    max_ellipsis_ratio: float | None = Field(default=0.1, ge=0, allow_inf_nan=False)
    """[per word] Most occurrences of ``...`` and ``…``."""
    max_bullet_line_frac: float | None = Field(default=0.9, ge=0, le=1)
    """[share] Most lines that begin with a bullet."""
    max_ellipsis_line_frac: float | None = Field(default=0.3, ge=0, le=1)
    """[share] Most lines that end in an ellipsis."""
    min_alpha_word_frac: float | None = Field(default=0.8, ge=0, le=1)
    """[share] Fewest words that have a letter."""
    min_stop_words: int | None = Field(default=2, ge=0)
    """[words] Fewest distinct stop words of the page's language; not applied to a language without a list in
    ``stop_words``."""
    stop_words: dict[str, tuple[str, ...]] = Field(default_factory=lambda: dict(_STOP_WORDS))
    """A list of stop words per language. They are measured, so a change means reading the pages again. Example: {de:
    [der, die, und]}"""

    @model_validator(mode="after")
    def _ordered(self) -> GopherConfig:
        for low, high in (("min_words", "max_words"), ("min_mean_word_length", "max_mean_word_length")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                raise ValueError(f"expected {low} ≤ {high}, got {least} > {most}")
        return self


def words_of(reading: Reading, dialect: Dialect) -> list[str]:
    """A text's words in the sense of a dialect."""
    return reading.chunks if dialect == "paper" and reading.spaced else reading.words


def measure(
    reading: Reading, stop_words: Sequence[str] | None, *, dialect: Dialect = "datatrove"
) -> dict[str, float | None]:
    """The family's measures of a text; None where a ratio has nothing below the line.

    ``stop_words`` are those of its language, None for no list (then the measure is None). Where words are characters
    their mean length says nothing (None).
    """
    text, words = reading.text, words_of(reading, dialect)
    counts = Counter(words)
    num_words = len(words)
    num_counted = num_chars = num_alpha = 0
    every_word = dialect == "paper"
    for word, count in counts.items():
        if word.isalpha():
            num_alpha += count
        else:
            if any(map(str.isalpha, word)):
                num_alpha += count
            elif not every_word and not word.strip(_PUNCTUATION):
                continue
        num_counted += count
        num_chars += len(word) * count
    lines = text.splitlines()
    if dialect == "paper":
        lines = [line for line in lines if line.strip()]
    bullets = _BULLETS[dialect]
    num_bullets = sum(line.lstrip().startswith(bullets) for line in lines)
    num_ellipses = sum(line.rstrip().endswith(_ELLIPSES) for line in lines)
    return {
        "gopher.num_words": float(num_counted),
        "gopher.mean_word_length": num_chars / num_counted if reading.spaced and num_counted else None,
        "gopher.hash_ratio": text.count("#") / num_words if num_words else None,
        "gopher.ellipsis_ratio": (text.count("...") + text.count("…")) / num_words if num_words else None,
        "gopher.bullet_line_frac": num_bullets / len(lines) if lines else None,
        "gopher.ellipsis_line_frac": num_ellipses / len(lines) if lines else None,
        "gopher.alpha_word_frac": num_alpha / num_words if num_words else None,
        "gopher.num_stop_words": None if stop_words is None else float(_num_stop_words(counts, stop_words, dialect)),
    }


def _num_stop_words(counts: Mapping[str, int], stop_words: Sequence[str], dialect: Dialect) -> int:
    if dialect == "datatrove":
        return sum(word in counts for word in set(stop_words))
    present = {word.strip(_PUNCTUATION).lower() for word in counts}
    return sum(word in present for word in {word.lower() for word in stop_words})


def decide(measures: Mapping[str, float | None], config: GopherConfig) -> list[str]:
    """The failed rules in datatrove's order, from measures alone. A measure of None (or NaN) fails nothing.

    A text without words still fails ``gopher.num_words`` while ``min_words`` is at least 1.
    """
    limits = (
        ("gopher.num_words", config.min_words, config.max_words),
        ("gopher.mean_word_length", config.min_mean_word_length, config.max_mean_word_length),
        ("gopher.hash_ratio", None, config.max_hash_ratio),
        ("gopher.ellipsis_ratio", None, config.max_ellipsis_ratio),
        ("gopher.bullet_line_frac", None, config.max_bullet_line_frac),
        ("gopher.ellipsis_line_frac", None, config.max_ellipsis_line_frac),
        ("gopher.alpha_word_frac", config.min_alpha_word_frac, None),
        ("gopher.num_stop_words", config.min_stop_words, None),
    )
    return outside(measures, limits)


def outside(
    measures: Mapping[str, float | None], limits: Iterable[tuple[str, float | None, float | None]]
) -> list[str]:
    """The names of ``limits`` (name, least, most) whose measure lies outside of them; None (or NaN) never does."""
    found = ((name, measures.get(name), low, high) for name, low, high in limits)
    return [
        name
        for name, value, low, high in found
        if value is not None and ((low is not None and value < low) or (high is not None and value > high))
    ]
