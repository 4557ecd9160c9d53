"""Finds and replaces personal data: e-mail addresses, phone numbers, payment cards, IBANs, public IP addresses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import phonenumbers
from pydantic import Field, field_validator

from quern.config import Section
from quern.data_pipeline.page.document import Page
from quern.data_pipeline.stages.pii_finders import FINDERS

__all__ = ["PiiConfig", "PiiTags", "PiiType", "ScrubPii", "TextSpan", "find", "scrub"]

PiiType = Literal["email", "phone", "credit_card", "iban", "ipv4", "ipv6"]

#: Where two spans begin together and end together, the first type named here wins.
TYPES: tuple[PiiType, ...] = get_args(PiiType)

_MEASURES: dict[str, str] = {kind: f"pii.{kind}" + ("" if kind.startswith("ip") else "s") for kind in TYPES}
_MAX_PASSES = 8

_CONTROL_TOKEN = re.compile(r"<.*>|\[/?(?:INST|CLS|SEP|PAD|MASK|UNK|BOS|EOS|SYS|TOOL_\w+)\]", re.DOTALL | re.IGNORECASE)

#: Where a national number may come from, by the page's language; the first that knows it decides.
_REGIONS = {
    "ar": ("SA", "AE", "EG"), "cs": ("CZ",), "da": ("DK",), "de": ("DE", "AT", "CH"), "el": ("GR",),
    "en": ("US", "GB", "IE", "AU", "NZ", "IN", "ZA"), "es": ("ES", "MX", "AR", "CO", "CL", "PE"), "fi": ("FI",),
    "fr": ("FR", "BE", "CH", "CA"), "he": ("IL",), "hu": ("HU",), "id": ("ID",), "it": ("IT", "CH"), "ja": ("JP",),
    "ko": ("KR",), "nl": ("NL", "BE"), "no": ("NO",), "pl": ("PL",), "pt": ("PT", "BR"), "ro": ("RO",), "ru": ("RU",),
    "sv": ("SE",), "th": ("TH",), "tr": ("TR",), "uk": ("UA",), "vi": ("VN",), "zh": ("CN", "TW", "HK"),
}  # fmt: skip


class PiiTags(Section):
    """The replacements of personal data. A tag is plain text, never a tokenizer's control token."""

    email: str = "|||EMAIL_ADDRESS|||"
    """What replaces an e-mail address."""
    phone: str = "|||PHONE_NUMBER|||"
    """What replaces a phone number."""
    credit_card: str = "|||CREDIT_CARD|||"
    """What replaces a card number."""
    iban: str = "|||IBAN|||"
    """What replaces an IBAN."""
    ipv4: str = "|||IP_ADDRESS|||"
    """What replaces an IPv4 address."""
    ipv6: str = "|||IP_ADDRESS|||"
    """What replaces an IPv6 address."""

    @field_validator("*")
    @classmethod
    def _plain(cls, tag: str) -> str:
        if len(tag) > 64 or not tag.isprintable() or any(c.isdigit() or c in "@+" for c in tag):
            raise ValueError(f"expected at most 64 printable characters without digits, '@' and '+', got {tag!r}")
        if _CONTROL_TOKEN.search(tag):
            raise ValueError(f"expected a tag that no tokenizer takes for a control token, got {tag!r}")
        return tag


class PiiConfig(Section):
    """Config of personal data: which types are searched for, and what is done with them."""

    types: tuple[PiiType, ...] = TYPES
    """The kinds of personal data that are looked for."""
    action: Literal["mask", "measure"] = "mask"
    """``mask`` replaces what is found by the tag of its kind; ``measure`` only counts it."""
    tags: PiiTags = PiiTags()
    phone_regions: tuple[str, ...] = ()
    """Countries (ISO 3166, two letters) whose national phone numbers are looked for besides those of the page's
    language. Example: [DE, AT]"""
    max_spans: Annotated[int, Field(ge=0)] | None = None
    """[finds] A page with more finds, over all types, fails ``pii.too_many``; null, or ``action: measure``, never
    fails. Example: 100"""

    @field_validator("phone_regions")
    @classmethod
    def _known(cls, regions: tuple[str, ...]) -> tuple[str, ...]:
        for region in regions:
            if region not in phonenumbers.SUPPORTED_REGIONS:
                raise ValueError(f"expected two-letter country codes such as DE, got {region!r}")
        return regions


@dataclass(frozen=True, slots=True)
class TextSpan:
    """``text[start:end]`` is personal data of one type."""

    start: int
    end: int
    type: PiiType


class ScrubPii:
    """Stage: counts personal data by type, and replaces it by tags unless ``action`` is ``measure``."""

    name = "pii"

    def __init__(self, config: PiiConfig) -> None:
        self.config = config
        self.measures = tuple(_MEASURES[kind] for kind in TYPES if kind in config.types)

    def __call__(self, page: Page) -> Page:
        if page.text is None:
            return page
        config = self.config
        regions = config.phone_regions + _REGIONS.get((page.language or "").split("-")[0], ())
        text, counts = scrub(page.text, config.types, config.tags, regions)
        for kind in TYPES:
            if kind in config.types:
                page.measures[_MEASURES[kind]] = float(counts[kind])
        if config.action == "mask":
            if not text.strip() and page.text.strip():
                page.fail("pii", "pii.nothing_left")
            page.text = text
            if config.max_spans is not None and sum(counts.values()) > config.max_spans:
                page.fail("pii", "pii.too_many")
        return page


def scrub(
    text: str, types: tuple[PiiType, ...] = TYPES, tags: PiiTags | None = None, regions: tuple[str, ...] = ()
) -> tuple[str, dict[PiiType, int]]:
    """The text with every span replaced by its type's tag, and the number of spans a type.

    A find may have kept its neighbour from being one (an unclear boundary), so the result is read again until nothing
    is left, at most eight times.
    """
    tags = tags or PiiTags()
    counts: dict[PiiType, int] = dict.fromkeys(TYPES, 0)
    for _ in range(_MAX_PASSES):
        spans = find(text, types, regions)
        if not spans:
            break
        pieces: list[str] = []
        done = 0
        for span in spans:
            counts[span.type] += 1
            pieces += (text[done : span.start], getattr(tags, span.type))
            done = span.end
        text = "".join([*pieces, text[done:]])
    return text, counts


def find(text: str, types: tuple[PiiType, ...] = TYPES, regions: tuple[str, ...] = ()) -> list[TextSpan]:
    """Spans in order of place, none overlapping another.

    Of spans that overlap, the earliest start, then the longest, then the order of types decides the type; the span kept
    covers all of them, so that no half of a number stays behind.

    Args:
        text: any text.
        types: the types to look for.
        regions: countries whose national phone numbers are recognised after a word such as "Tel.".
    """
    found = [
        TextSpan(start, end, kind) for kind in TYPES if kind in types for start, end in FINDERS[kind](text, regions)
    ]
    found.sort(key=lambda span: (span.start, -span.end, TYPES.index(span.type)))
    merged: list[TextSpan] = []
    for span in found:
        if merged and span.start < merged[-1].end:
            if span.end > merged[-1].end:
                merged[-1] = TextSpan(merged[-1].start, span.end, merged[-1].type)
        else:
            merged.append(span)
    return merged
