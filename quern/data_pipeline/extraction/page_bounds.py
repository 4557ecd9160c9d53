"""Estimates what a page would cost its parser, by counting on the raw HTML in linear time.

Every count is an upper bound on what the parser builds, or refines one that was passed; none parses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["has_attributes_over", "inline_run", "num_elements", "table_cells"]

_BLOCK_NAMES = (
    "address article aside blockquote body caption center dd details dialog dir div dl dt fieldset figcaption figure "
    "footer form frameset h1 h2 h3 h4 h5 h6 head header hr html legend li main menu nav noscript ol optgroup option p "
    "pre script section select style summary table tbody td template tfoot th thead title tr ul"
)
_BLOCK_TAGS = frozenset(_BLOCK_NAMES.split())
_OPENING = re.compile(r"<([a-zA-Z][^\s<>/]{0,20})")
_TABLE_PART = re.compile(r"<([tT](?:[rR]|[dD]|[hH]|[aA][bB][lL][eE]))(?![a-zA-Z0-9:-])([^<>]*)")
_P_TAG = re.compile(r"<(/?p)(?=[\s/>])", re.IGNORECASE)
_BR_CLOSING = re.compile(r"</br(?=[\s/>])", re.IGNORECASE)
_SPAN = re.compile(r"\b(col|row)span\s*=\s*(?:[\"']\s*)?(\d{1,6})", re.IGNORECASE)
#: trafilatura reads no higher span, and pads rows to no more columns.
_MAX_SPAN = 100


def num_elements(html: str) -> int:
    """An upper bound on the elements of a page, from a few passes over the text.

    Of closing tags ``</br>`` makes an element, and ``</p>`` where none is open (HTML standard, 13.2.6.4.7). Where
    blocks close paragraphs before their own tags do, there may be half as many more.
    """
    alone = sum(1 if tag[0] == "/" else -1 for tag in _P_TAG.findall(html))
    return html.count("<") - html.count("</") + max(0, alone) + len(_BR_CLOSING.findall(html))


def inline_run(html: str) -> int:
    """The largest number of opening tags between two block tags, a bound on the children of a paragraph."""
    longest = run = 0
    for match in _OPENING.finditer(html):
        if match.group(1).lower() in _BLOCK_TAGS:
            run = 0
        else:
            run += 1
            longest = max(longest, run)
    return longest


def table_cells(html: str) -> int:
    """The cells that tables with ``colspan`` or ``rowspan`` unfold to, rows padded; 0 for a page without spans."""
    total = rows = widest = width = 0
    spans = False
    for match in _TABLE_PART.finditer(html):
        tag, attributes = match.group(1).lower(), match.group(2)
        if tag == "table":
            total += rows * min(widest, _MAX_SPAN)
            rows = widest = width = 0
        elif tag == "tr":
            rows += 1
            width = 0
        else:
            span = {"col": 1, "row": 1}
            for axis, digits in _SPAN.findall(attributes):
                span[axis.lower()] = min(int(digits), _MAX_SPAN)
                spans = True
            total += span["col"] * span["row"] - 1
            width += span["col"]
            widest = max(widest, width)
    return total + rows * min(widest, _MAX_SPAN) if spans else 0


_TAG_START = re.compile(r"<(?:(!--)|([a-zA-Z][^\s/>]*))")
_GAP = re.compile(r"[\s/]*+")
_END_OF_COMMENT = re.compile("--!?>")
#: What every parser takes as characters up to its own closing tag.
_RAW_TEXT = {name: re.compile(f"</{name}", re.IGNORECASE) for name in ("script", "style")}
_ATTRIBUTE = re.compile(
    r"""[\s/]*+[^\s/>][^\s/>=]*+(?:\s*+=\s*+(?:"[^"]*+(?:"|\Z)|'[^']*+(?:'|\Z)|[^\s>"'][^\s>]*+)?+)?+"""
)


def has_attributes_over(html: str, most: int, most_of_one: int) -> bool:
    """Whether a page has more than ``most`` attributes, or one element more than ``most_of_one``.

    Attributes are counted only where a page gives cause: it holds more equals signs than ten elements may have
    attributes, or a long stretch between two ``>`` with many words. What neither shows (attributes without values
    between others whose values hold ``>``) is left to the page's clock.
    """
    # an attribute is a letter and what parts it from the next; with a value it is four characters
    signs = min(most, 10 * most_of_one)
    many = len(html) > 4 * signs and html.count("=") > signs
    if not many and (len(html) < 2 * most_of_one or not _has_long_tag(html, most_of_one)):
        return False
    total = 0
    for of_one in _attribute_counts(html, most_of_one):
        total += of_one
        if total > most or of_one > most_of_one:
            return True
    return False


def _has_long_tag(html: str, most: int) -> bool:
    """Whether some stretch without ``>`` begins a tag and is parted more than ``most`` times behind it."""
    # Names that differ, and what parts them, take three characters an attribute: few tags of so many go between two
    # places looked at, and none of a tenth more.
    at = 0
    while at < len(html):
        end = html.find(">", at, at + most)
        if end < 0:
            begin = html.rfind(">", 0, at) + 1
            end = html.find(">", at)
            end = len(html) if end < 0 else end
            # an attribute and what parts it from the next are two characters at least
            last = max(begin, end - 2 * most)
            while (begin := html.find("<", begin, last)) >= 0 and not html[begin + 1].isalpha():
                begin += 1
            if begin >= 0:
                stretch = html[begin:end]
                if len(stretch.split(None, most)) + stretch.count("/") > most:
                    return True
            at = end
        at += 2 * most
    return False


def _attribute_counts(html: str, most: int) -> Iterator[int]:
    """The attributes of each tag that has some, repeated ones too; of a tag with more than ``most``, one more."""
    at = 0
    while (tag := _TAG_START.search(html, at)) is not None:
        at = tag.end()
        if tag[1]:
            at = _behind(_END_OF_COMMENT, html, at - len("--"))  # "<!-->" is a comment
            continue
        count = 0
        while count <= most and (attribute := _ATTRIBUTE.match(html, at)) is not None:
            count += 1
            at = attribute.end()
        if count:
            yield count
        closing = _RAW_TEXT.get(tag[2].lower())
        if closing is not None and count <= most and "/" not in _GAP.match(html, at)[0]:  # type: ignore[index]
            at = _behind(closing, html, at)


def _behind(closing: re.Pattern[str], html: str, at: int) -> int:
    """The place behind the next ``closing``, or the end: what is not closed goes on to there."""
    found = closing.search(html, at)
    return len(html) if found is None else found.end()
