"""Numbers of things and long texts, as messages for people show them."""

from __future__ import annotations

__all__ = ["counted", "shorten"]

#: Characters by which a text is cut sooner so that it ends with a whole word.
_BACK = 40


def counted(number: int, noun: str) -> str:
    """``"1 file"``, ``"2,345 files"``: a number with its noun, given in the singular; its plural must be regular."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shorten(text: str, limit: int) -> str:
    """``text`` of at most ``limit`` characters: a longer one is cut behind a word, where one ends near, with ``…``."""
    if len(text) <= limit:
        return text
    cut = text[: limit - 1]
    word = cut.rfind(" ", max(len(cut) - _BACK, 1))
    return (cut[:word] if word > 0 and not text[limit - 1].isspace() else cut).rstrip() + "…"
