"""Finders of personal data in a text, one for each type.

Every pattern looks at a bounded stretch from where it starts, so the time is linear in the text whatever the text is.
Letters of scripts written without spaces are boundaries: an address between Chinese words is found.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from functools import lru_cache

import phonenumbers
import tldextract
from stdnum import iban, luhn, numdb

__all__ = ["FINDERS"]

#: Numbers looked up in the numbering plans, a text and a stretch of it: 25 µs each, so the time stays linear.
_PHONE_CHECKS = 2_000
_CHARS_A_PHONE_CHECK = 32

# Letters of the alphabets that put spaces between words: Latin, Greek, Cyrillic.
_LETTERS = "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0370-\u052f"
_SPACED_LETTER = re.compile(f"[{_LETTERS}]")
_LOCAL_BACKWARD = re.compile(rf"[{_LETTERS}0-9._%+'~\-]{{1,65}}")
_DOMAIN = re.compile(rf"[{_LETTERS}0-9.\-]{{1,254}}")
_ADDRESS_LITERAL = re.compile(r"\[([0-9.]{7,15})\]")
#: So far before an ``@`` the beginning of a URL is looked for.
_AUTHORITY_CHARS = 256
_NOT_MAIL_DOMAINS = frozenset({"zip", "mov"})

_GAP = r"[ \-./()\u00a0\u2009\u2010-\u2013\u202f]"
_NUMBER_END = "(?![0-9A-Za-wyz_])"
_INTERNATIONAL = re.compile(rf"(?:\+|00){_GAP}{{0,3}}[1-9](?:{_GAP}{{0,3}}[0-9]){{6,14}}{_NUMBER_END}")
_NATIONAL = re.compile(rf"[(0-9](?<![0-9A-Za-z_+].)(?<![0-9][.\-/,].)(?:{_GAP}{{0,3}}[0-9]){{6,14}}{_NUMBER_END}")
_DECIMAL = re.compile(r"\+?[0-9]+\.[0-9]+")
_NORTH_AMERICAN = re.compile(
    r"(?:\([2-9][0-9]{2}\)[ -]?[2-9][0-9]{2}[-. ][0-9]{4}|[2-9][0-9]{2}([-.])[2-9][0-9]{2}\1[0-9]{4})"
    rf"{_NUMBER_END}"
    r"(?![-.,][0-9])"
)
_PHONE_WORD = re.compile(
    r"(?:(?<![^\W\d_])(?:tel|telefon[oea]?|telefoon|telephone|telefax|téléphone|tél|teléfono|phone|ph|fon|fax|call|cell|"
    r"mobile?|móvil|handy|rufnummer|gsm|whats ?app|тел|телефон|факс|τηλ)(?![^\W\d_])|"
    r"电话|電話|手机|手機|传真|傳真|전화)[^0-9]{0,16}\Z",
    re.IGNORECASE,
)
_DATE = re.compile(
    r"(?:(?:19|20)[0-9]{2}([-./])[01]?[0-9]\1[0-3]?[0-9]|[0-3]?[0-9]([-./])[01]?[0-9]\2(?:19|20)[0-9]{2})(?![0-9])"
)

_CARD = re.compile(
    r"[2-6](?<![0-9A-Za-z_+].)(?<![0-9][.\-/,].)"
    r"(?:[0-9]{13,18}|[0-9]{3}([ \-\u00a0])[0-9]{4}\1[0-9]{4}\1[0-9]{4}|[0-9]{3}([ \-\u00a0])[0-9]{6}\2[0-9]{4,5})"
    r"(?![0-9A-Za-z_])(?![-.,][0-9])"
)
_REFERENCE_WORD = re.compile(
    r"(?<![a-z])(?:isbn(?:[ -]?1[03])?|issn|doi|ean|gtin|upc|sku|order|tracking|invoice|serial|ticket|"
    r"ref(?:erence)?)[^0-9]{0,12}\Z",
    re.IGNORECASE,
)

_IBAN = re.compile(r"[A-Z](?<![0-9A-Za-z_].)[A-Z][0-9]{2}(?:[ \u00a0]?[0-9A-Z]){11,30}")
_BBAN_PART = re.compile(r"([0-9]+)!")

_IPV4 = re.compile(
    r"[0-9](?<![0-9A-Za-z_.].)(?<![A-Za-z][-/].)[0-9]{0,2}(?:\.[0-9]{1,3}){3}(?![0-9A-Za-z_])(?!\.[0-9a-z])"
    r"(?!-(?![0-9]{1,3}\.[0-9])[0-9A-Za-z])(?![+~][A-Za-z])"
)
_VERSION_WORD = re.compile(
    r"(?:(?<![a-z])(?:v|ver|versions?|releases?|builds?|firmware|driver|kernel|revisions?|rev|patch|oids?|"
    r"object identifiers?|ec|sections?|sec|chapters?|clauses?|tables?|figures?|fig|appendix|"
    r"(?:java|jdk|jre|openjdk|jvm)(?: [sem]e)?|rails|libreoffice|oracle|chrome|chromium|firefox|sdk|framework|"
    r"upgrad(?:e|ed|es|ing) to)[ .:#=(]{0,3}|§ ?|"
    r"[=<>~!^]= ?|~> ?)\Z",
    re.IGNORECASE,
)
# 2000::/3, the only block from which global unicast addresses are given out (IANA, IPv6 address space).
_IPV6 = re.compile(r"[23](?<![0-9A-Za-z_.:].)[0-9A-Fa-f]{3}:[0-9A-Fa-f:.]{1,41}(?![0-9A-Za-z_])")
# RFC 9637; the standard library of Python 3.11 does not know it yet.
_IPV6_DOCUMENTATION = ipaddress.IPv6Network("3fff::/20")


def _emails(text: str, regions: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Addresses within RFC 5321's lengths; the domain's last label is a known top-level domain."""
    at = text.find("@")
    while at != -1:
        start = _local_start(text, at)
        end = _domain_end(text, at + 1) if start is not None else None
        if start is not None and end is not None and not _is_of_url(text, start, at, end):
            yield start, end
        at = text.find("@", at + 1)


def _is_of_url(text: str, start: int, at: int, end: int) -> bool:
    """Whether it is ``git@host:path``, as version control clients write it, or a password ends where the ``@`` stands:
    ``https://user:password@host`` (RFC 3986, 3.2.1)."""
    if text[start:at] in ("git", "hg", "svn") and text[end : end + 1] in (":", "/"):
        return True
    slashes = text.rfind("://", max(0, start - _AUTHORITY_CHARS), start)
    if slashes < 1 or not text[slashes - 1].isalnum():
        return False
    user, colon, password = text[slashes + 3 : start].partition(":")
    return bool(colon) and not any(c.isspace() or c in "/?#@<>\"'" for c in user + password)


def _local_start(text: str, at: int) -> int | None:
    match = _LOCAL_BACKWARD.match(text[max(0, at - 65) : at][::-1])
    if match is None or len(match[0]) > 64:
        return None
    start = at - len(match[0])
    if start and text[start - 1] == "@":
        return None
    local = match[0][::-1].rpartition("..")[2].lstrip(".'-~")
    if local.endswith(".") or not any(c.isalnum() for c in local):
        return None
    return at - len(local)


def _domain_end(text: str, start: int) -> int | None:
    match = _DOMAIN.match(text, start)
    if match is None:
        literal = _ADDRESS_LITERAL.match(text, start)
        return literal.end() if literal is not None and _ipv4_address(literal[1]) is not None else None
    end, position = None, start
    for index, label in enumerate(match[0].split(".")):
        name = label.rstrip("-")
        if not 1 <= len(name) <= 63 or name.startswith("-"):
            break
        if index and _is_top_level(name.lower()):
            end = position + len(name)
        if name != label:
            break
        position += len(label) + 1
    if end is None or text[end : end + 1] == "@" or (text[end : end + 1] == "." and text[end + 1 : end + 2].isdigit()):
        return None
    return end


@lru_cache(maxsize=1)
def _top_level_domains() -> frozenset[str]:
    extract = tldextract.TLDExtract(cache_dir=None, suffix_list_urls=())
    return frozenset(suffix.rpartition(".")[2] for suffix in extract.tlds) - _NOT_MAIL_DOMAINS


def _is_top_level(label: str) -> bool:
    return label.startswith("xn--") or label in _top_level_domains()


def _phones(text: str, regions: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """International numbers, North American ones in their usual spelling, national ones after a word for phone.

    A number is one that exists by the numbering plans (package ``phonenumbers``). After 2,000 such checks in one text,
    and one more for every 32 characters, the form alone decides: that bounds the time, and errs on the side of the
    person, save for what is written as a decimal number.
    """
    checks = iter(range(_PHONE_CHECKS + len(text) // _CHARS_A_PHONE_CHECK))
    position = 0
    while (match := _INTERNATIONAL.search(text, position)) is not None:
        start, end = match.span()
        clear = text[start - 1 : start] not in _BEFORE_PREFIX[text[start]] and not _is_word(text, start - 1)
        spaced = text[start] == "+" or not text[start:end].isdigit()
        found = _number_end(text, start, end, ("",), checks) if clear and spaced else None
        if found is not None:
            yield start, found
        position = start + 1 if found is None else found
    for match in _NORTH_AMERICAN.finditer(text):
        start, end = match.span()
        if text[start - 2 : start] in ("1-", "1.", "1 ") and start >= 2:
            start -= 2
        separated = text[start - 1 : start] in ("-", ".", "/", ",") and text[max(start - 2, 0) : start - 1].isdigit()
        clear = not separated and text[start - 1 : start] != "+" and not _is_word(text, start - 1)
        if not clear or _REFERENCE_WORD.search(text, max(0, start - 24), start):
            continue
        if _number_end(text, match.start(), end, ("US",), checks) == end:
            yield start, end
    for match in _NATIONAL.finditer(text) if regions else ():
        start, end = match.span()
        if _PHONE_WORD.search(text, max(0, start - 32), start) and not _DATE.match(text, start):
            found = _number_end(text, start, end, regions, checks)
            if found is not None:
                yield start + (text[start] == "(" and ")" not in text[start:found]), found


_BEFORE_PREFIX: dict[str, tuple[str, ...]] = {"+": ("+",), "0": ("+", "-", ".", ",")}


def _is_word(text: str, index: int) -> bool:
    """Whether a letter of a spaced script, a digit or an underscore stands at ``index``; False outside the text."""
    return 0 <= index < len(text) and (
        text[index].isdigit() or text[index] == "_" or _SPACED_LETTER.match(text, index) is not None
    )


def _number_end(text: str, start: int, end: int, regions: tuple[str, ...], checks: Iterator[int]) -> int | None:
    """Where the number that begins at ``start`` ends: at ``end``, or one or two groups of digits before it."""
    for _ in range(3):
        digits = "".join(c for c in text[start:end] if c.isdigit())
        if len(digits) < 7:
            return None
        if next(checks, None) is None:
            return None if _DECIMAL.fullmatch(text, start, end) else end
        if any(_exists(digits, region) for region in regions):
            return end
        end -= len(text[start:end]) - len(text[start:end].rstrip("0123456789"))
        while end > start and not text[end - 1].isdigit():
            end -= 1
    return None


@lru_cache(maxsize=8192)
def _exists(digits: str, region: str) -> bool:
    number = digits if region else "+" + digits.removeprefix("00")
    try:
        return phonenumbers.is_valid_number(phonenumbers.parse(number, region or None))
    except phonenumbers.NumberParseException:
        return False


def _cards(text: str, regions: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Payment card numbers: an issuer's range and length, and the Luhn digit (ISO/IEC 7812-1, annex B)."""
    for match in _CARD.finditer(text):
        digits = "".join(c for c in match[0] if c.isdigit())
        if not _has_issuer(digits) or not luhn.is_valid(digits):
            continue
        plain = len(digits) == len(match[0])
        if not (plain and _REFERENCE_WORD.search(text, max(0, match.start() - 24), match.start())):
            yield match.span()


def _has_issuer(digits: str) -> bool:
    """The ranges in use: Visa, Mastercard, American Express, Diners Club, Discover, JCB, UnionPay, Maestro."""
    length, two, three, four = len(digits), int(digits[:2]), int(digits[:3]), int(digits[:4])
    if digits[0] == "4":
        return length in (16, 19)
    if 51 <= two <= 55 or 2221 <= four <= 2720:
        return length == 16
    if two in (34, 37):
        return length == 15
    if two in (36, 38, 39) or 300 <= three <= 305 or four == 3095:
        return length == 14
    if 3528 <= four <= 3589 or two in (62, 65) or 644 <= three <= 649 or four == 6011:
        return 16 <= length <= 19
    return four in (5018, 5020, 5038, 5893, 6304, 6759, 6761, 6762, 6763)


def _ibans(text: str, regions: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """IBANs with their country's length, structure and check digits (ISO 13616, ISO 7064 mod 97-10)."""
    position = 0
    while (match := _IBAN.search(text, position)) is not None:
        start, end, position = match.start(), match.start(), match.start() + 1
        compact, length = "", _iban_length(text[start : start + 2])
        while end < match.end() and len(compact) < length:
            compact += text[end] if text[end] not in " \u00a0" else ""
            end += 1
        whole = len(compact) == length and not _is_word(text, end)
        if whole and iban.is_valid(compact, check_country=False):
            yield start, end
            position = end


@lru_cache(maxsize=1024)
def _iban_length(country: str) -> int:
    """Characters of a country's IBANs; 0 where there are none."""
    structure = numdb.get("iban").info(country + "00")[0][1].get("bban", "")
    return 4 + sum(map(int, _BBAN_PART.findall(structure))) if structure else 0


def _ipv4_address(text: str) -> ipaddress.IPv4Address | None:
    try:
        return ipaddress.IPv4Address(text)
    except ValueError:
        return None


def _ipv4(text: str, regions: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Global unicast addresses; not the parts of longer dotted numbers, nor versions and section numbers."""
    for match in _IPV4.finditer(text):
        address = _ipv4_address(match[0])
        if address is None or not address.is_global or address.is_multicast:
            continue
        if not _VERSION_WORD.search(text, max(0, match.start() - 24), match.start()):
            yield match.span()


def _ipv6(text: str, regions: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    """Global unicast addresses in any of RFC 4291's spellings."""
    for match in _IPV6.finditer(text):
        written = match[0].rstrip(".")
        if written.endswith(":") and not written.endswith("::"):
            written = written[:-1]
        try:
            address = ipaddress.IPv6Address(written)
        except ValueError:
            continue
        if address.is_global and address not in _IPV6_DOCUMENTATION:
            yield match.start(), match.start() + len(written)


#: By type: text and countries to the (start, end) of what was found, in order, none overlapping another of its type.
FINDERS: dict[str, Callable[[str, tuple[str, ...]], Iterator[tuple[int, int]]]] = {
    "email": _emails,
    "phone": _phones,
    "credit_card": _cards,
    "iban": _ibans,
    "ipv4": _ipv4,
    "ipv6": _ipv6,
}
