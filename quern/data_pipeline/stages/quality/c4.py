"""C4's line and page rules (Raffel et al. 2020, section 2.2), in the reading of datatrove's ``C4QualityFilter``.

Lines are looked at one by one, as ``str.splitlines`` parts them and without the whitespace around them. Some are left
out, of the rest citation marks are taken off, and the rest, joined by newlines, is the new text. A page fails if a line
that is still there holds "lorem ipsum" or a curly bracket, or if it has too few sentences.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import Field

from quern.config import Section
from quern.data_pipeline.stages.quality.gopher import outside
from quern.data_pipeline.stages.quality.words import Reading

__all__ = ["MEASURES", "C4Config", "decide", "measure"]

MEASURES = ("c4.lorem_ipsum", "c4.curly_bracket", "c4.num_sentences", "c4.num_lines", "c4.num_kept_lines")

_CITATION = re.compile(r"\[(?:\d*|edit|citation needed)\]")
_END_MARKS = (".", "?", "!", '"', "'")
_POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


class C4Config(Section):
    """``min_sentences``, ``lorem_ipsum`` and ``curly_bracket`` decide; the others say which lines stay.

    The lines that stay are measured and make the text, so a change there means reading the text again.
    """

    min_sentences: int | None = Field(default=5, ge=0)
    """[sentences] A page with fewer fails; null = no limit. Example: 3"""
    lorem_ipsum: bool = True
    """Fail a page with a line that has this phrase."""
    curly_bracket: bool = True
    """Fail a page with a line that has ``{``."""
    max_word_length: int | None = Field(default=1000, ge=0)
    """[characters] Remove a line with a longer word (between whitespace); not applied to languages without spaces; null
    = none."""
    citations: bool = True
    """Remove ``[1]``, ``[]``, ``[edit]`` and ``[citation needed]`` from every line."""
    terminal_punctuation: bool = False
    """Remove a line that does not end in ``. ? ! " '``, or that ends in ``...``. FineWeb does not."""
    min_words_per_line: int | None = Field(default=3, ge=0)
    """[words] Remove a line with fewer words (between whitespace; characters in languages without spaces); null =
    none."""
    javascript: bool = True
    """Remove a line that mentions JavaScript."""
    policy: bool = True
    """Remove a line about terms of use, cookies or a privacy policy."""
    rewrite: bool = True
    """Replace the page's text by the lines that stay. If false, later families and stages read the text as it was."""


def measure(reading: Reading, config: C4Config) -> tuple[dict[str, float | None], Reading]:
    """The family's measures of a text, and the text of the lines that stay (``reading`` itself if it is the same).

    ``c4.lorem_ipsum`` and ``c4.curly_bracket`` are the number, from 1, of the first line that the rule finds, 0 for
    none. All else is measured as if neither rule stood in the way, so that the text is that of a page that passed.
    """
    lines, measures = _keep(reading, config)
    joined = "\n".join(lines)
    left = reading if joined == reading.text else Reading(joined, reading.language)
    measures["c4.num_sentences"] = float(left.num_sentences if lines else 0)
    stripped = joined.strip()
    return measures, left if stripped == joined else Reading(stripped, reading.language)


def _keep(reading: Reading, config: C4Config) -> tuple[list[str], dict[str, float | None]]:
    """The lines that stay, and all measures but that of their sentences."""
    text = reading.text
    # A citation mark spans no line, so what the whole text does not hold no line needs to be searched for.
    whole = (_CITATION.sub("", text) if config.citations else text).lower()
    any_lorem = "lorem ipsum" in whole
    any_curly = "{" in whole
    any_javascript = config.javascript and "javascript" in whole
    policy = [phrase for phrase in _POLICY if phrase in whole] if config.policy else []
    any_citation = config.citations and "[" in text
    longest, least = config.max_word_length, config.min_words_per_line
    lorem_ipsum = curly_bracket = 0
    kept: list[str] = []
    lines = text.splitlines()
    for number, line in enumerate(map(str.strip, lines), 1):
        if longest is not None and len(line) > longest and reading.spaced and _longest_word(line) > longest:
            continue
        with_citations = line
        if any_citation:
            line = _CITATION.sub("", line)
        if config.terminal_punctuation and (not line.endswith(_END_MARKS) or line.endswith("...")):
            continue
        if least is not None and _num_words(with_citations, reading) < least:
            continue
        lower = line.lower() if any_lorem or any_javascript or policy else ""
        if any_lorem and not lorem_ipsum and "lorem ipsum" in lower:
            lorem_ipsum = number
        if any_javascript and "javascript" in lower:
            continue
        if any_curly and not curly_bracket and "{" in line:
            curly_bracket = number
        if any(phrase in lower for phrase in policy):
            continue
        kept.append(line)
    return kept, {
        "c4.lorem_ipsum": float(lorem_ipsum),
        "c4.curly_bracket": float(curly_bracket),
        "c4.num_lines": float(len(lines)),
        "c4.num_kept_lines": float(sum(map(bool, kept))),
    }


def _longest_word(line: str) -> int:
    return max(map(len, line.split()), default=0)


def _num_words(line: str, reading: Reading) -> int:
    return len(line.split()) if reading.spaced else Reading(line, reading.language).num_words


def decide(measures: Mapping[str, float | None], config: C4Config) -> list[str]:
    """The failed rules, from measures alone: of the two phrases the one that comes first in the text is first.

    On one line "lorem ipsum" is first, as for datatrove. A measure of None (or NaN) fails nothing.
    """
    wanted = (("c4.lorem_ipsum", config.lorem_ipsum), ("c4.curly_bracket", config.curly_bracket))
    found = {rule: line for rule, is_on in wanted if is_on and (line := measures.get(rule) or 0) > 0}
    return sorted(found, key=found.__getitem__) + outside(measures, [("c4.num_sentences", config.min_sentences, None)])
