"""Formats counts, file names and long texts for messages."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["aligned", "counted", "is_plain_name", "short", "shorten", "size"]

#: Characters by which a text is cut sooner so that it ends with a whole word.
_BACK = 40


def counted(number: int, noun: str) -> str:
    """``"1 file"``, ``"2,345 files"``: a number with its noun, given in the singular; its plural must be regular."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(num_bytes: int) -> str:
    """``"512 B"``, ``"1.5 KiB"``, ``"9.0 MiB"``: a number of bytes in the largest unit of which there is one."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:,.0f} {units[0]}" if units[0] == "B" else f"{value:,.1f} {units[0]}"


def short(number: int) -> str:
    """Exact below 10,000, else three digits: 12.3M."""
    if number < 10_000:
        return f"{number:,}"
    value = float(number)
    for unit in ("k", "M", "B", "T"):
        value /= 1000
        if value < 999.5 or unit == "T":
            break
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f}{unit}"


def shorten(text: str, limit: int) -> str:
    """``text`` of at most ``limit`` characters: a longer one is cut behind a word, where one ends near, with ``…``."""
    if len(text) <= limit:
        return text
    cut = text[: limit - 1]
    word = cut.rfind(" ", max(len(cut) - _BACK, 1))
    return (cut[:word] if word > 0 and not text[limit - 1].isspace() else cut).rstrip() + "…"


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A line for each row of a table: the first ``left`` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        [
            f"{cell:{'<' if place < left else '>'}{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    )
    return ["  ".join(row).rstrip() for row in padded]


def is_plain_name(text: object) -> bool:
    """Whether a text can be a file name in a folder and be displayed: no path separators, no control characters."""
    return isinstance(text, str) and text not in ("", ".", "..") and text.isprintable() and not set("/\\") & set(text)
