"""Normalises text to words for matching: ignores case, marks, punctuation and line breaks.

Each character stands alone (linear time for any text, and every word knows its bytes): compatibility decomposition
(NFKD), full case folding, NFKD again. Of what that gives, letters, numbers (Unicode categories L and N) and spacing
marks (Mc) make words; accents (Mn, Me) and format characters (Cf: soft hyphen, joiners, direction) are left out, so
that a composed and a decomposed é are the same; everything else separates words. In scripts that are written without
spaces every letter is a word. A word reaches from its first letter or number to its last.
"""

from __future__ import annotations

import sys
import unicodedata

import regex

from quern.data_pipeline.page.memo import Memo

__all__ = ["emitted", "split_emitted", "words"]

_SPACELESS = regex.compile(
    r"[[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Yi}]&&\p{L}]", regex.V1
)


def _emit(code: int) -> str:
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", chr(code)).casefold())
    return "".join(map(_part, folded))


def _part(character: str) -> str:
    category = unicodedata.category(character)
    if category in ("Mn", "Me", "Cf"):
        return ""
    if category[0] not in "LN" and category != "Mc":
        return " "
    return f" {character} " if _SPACELESS.match(character) else character


_EMITTED: Memo[int, str] = Memo(_emit, sys.maxunicode + 1)
"""Code point → what it becomes, a space for a separator; the table of ``str.translate``."""


def emitted(code: int) -> str:
    """The normalised form of a code point: word characters, with a space where it separates words; may be empty."""
    return _EMITTED[code]


def split_emitted(text: str) -> tuple[bool, list[str], bool]:
    """Whether emitted text begins with a separator, the parts of words in it, and whether it ends with one."""
    return text.startswith(" "), text.split(), text.endswith(" ")


def words(text: str) -> list[str]:
    """The words of a text (see the head of this module)."""
    return text.translate(_EMITTED).split()
