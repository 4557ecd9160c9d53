"""Canonical form of a URL, and the key (SURT) under which CommonCrawl's index lists it."""

from __future__ import annotations

import json
import re
from hashlib import blake2b
from importlib import resources
from urllib.parse import quote_from_bytes, unquote_to_bytes

import ada_url

__all__ = ["MAX_CHARS", "TRACKING_VERSION", "canonicalize", "host", "surt", "url_key"]

_LIST = json.loads(resources.files("quern.data_pipeline").joinpath("data/tracking_parameters.json").read_text("utf-8"))

#: The version of the list of tracking and session parameters; a canonical URL may change when it does.
TRACKING_VERSION: int = _LIST["version"]

_NAMES = frozenset(_LIST["names"])
_PREFIXES = tuple(_LIST["prefixes"])
_TOKEN_NAMES = frozenset(_LIST["token_names"])
_PATH_SESSION = re.compile(rf";(?:{'|'.join(map(re.escape, _LIST['path_names']))})=[^/;]*", re.IGNORECASE)
_ASPNET_SESSION = re.compile(r"/\((?:[a-z]\([0-9a-z]{24}\)){1,8}\)(?=/)", re.IGNORECASE)

_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPE = re.compile("%[0-9A-Fa-f]{2}")
_UNRESERVED = {f"%{ord(c):02X}": c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"}
_HEX = frozenset("0123456789ABCDEFabcdef")

_WWW = re.compile(r"\Awww\d*\.")
_SLASHES = re.compile("/{2,}")
#: What SURT leaves bare beside letters, digits and ``_.-~``: every visible ASCII character but ``#`` and ``%``.
_SURT_BARE = "".join(chr(c) for c in range(0x21, 0x7F) if chr(c) not in "#%")
_MAX_UNESCAPES = 8

#: A longer URL names no page: no server takes it, and its key would take seconds to make.
MAX_CHARS = 16_384


def canonicalize(url: str) -> str | None:
    """The canonical form of an http(s) URL; None when it is not one, or longer than :data:`MAX_CHARS`.

    Never raises; the form's own form is itself.

    The URL is parsed as browsers parse it (WHATWG URL standard): scheme and host in lower case, punycode, IPv4 numbers
    in dotted form, default port, dot segments, tabs and newlines gone. Then: user name, password and fragment go;
    escapes of unreserved characters are decoded and the rest written in upper case (RFC 3986, 6.2.2); tracking and
    session parameters go by a versioned list, and so does a query with nothing left in it. The path's case and the
    parameters' order stay: both may choose the content. Other schemes name no page that a second crawl could find
    again and have no canonical form.
    """
    if len(url) > MAX_CHARS:
        return None
    try:
        href = ada_url.URL(_SURROGATE.sub("\ufffd", url)).href
    except ValueError:
        return None
    scheme, _, rest = href.partition("://")
    if scheme not in ("http", "https"):
        return None
    authority, _, tail = rest.partition("#")[0].partition("/")
    path, _, query = tail.partition("?")
    path = _clean_path("/" + path)
    query = _clean_query(query)
    return f"{scheme}://{authority.rpartition('@')[2]}{path}{'?' if query else ''}{query}"


def _clean_path(path: str) -> str:
    path = _normalize_escapes(path)
    clean = _ASPNET_SESSION.sub("", _PATH_SESSION.sub("", path)) if "(" in path or ";" in path else path
    if clean != path and "/." in clean:
        # `/..;jsessionid=1/` has become a dot segment
        clean = ada_url.URL(f"http://h{clean}").pathname
    return clean


def _clean_query(query: str) -> str:
    if not query:
        return ""
    return "&".join(pair for pair in _normalize_escapes(query).split("&") if pair and not _marks_a_visit(pair))


def _marks_a_visit(pair: str) -> bool:
    name, _, value = pair.partition("=")
    name = name.lower()
    if name in _NAMES or name.startswith(_PREFIXES):
        return True
    return name in _TOKEN_NAMES and _looks_like_token(value)


def _looks_like_token(value: str) -> bool:
    """A random identifier: 24–128 ASCII letters and digits, some of each."""
    return (
        24 <= len(value) <= 128 and value.isascii() and value.isalnum() and not value.isalpha() and not value.isdigit()
    )


def _normalize_escapes(part: str) -> str:
    return _ESCAPE.sub(_normal_escape, part) if "%" in part else part


def _normal_escape(match: re.Match[str]) -> str:
    escape = match[0].upper()
    char = _UNRESERVED.get(escape)
    if char is None:
        return escape
    before = match.string[max(match.start() - 2, 0) : match.start()]
    if char in _HEX and (before.endswith("%") or (len(before) == 2 and before[0] == "%" and before[1] in _HEX)):
        # a stray "%" stands before it: decoding would make a new escape of the two
        return escape
    return char


def host(canonical: str) -> str:
    """The host name of a canonical URL: no port, no dot at its end; IPv6 addresses in brackets."""
    authority = canonical.partition("://")[2].partition("/")[0]
    name = authority[: authority.find("]") + 1] if authority.startswith("[") else authority.partition(":")[0]
    return name.rstrip(".") or name


def surt(canonical: str) -> str:
    """The sort-friendly key of a canonical URL, as CommonCrawl's index and pywb write it: ``com,example)/path?query``.

    The scheme, a leading ``www.`` (``www2.`` …) and a slash at the path's end are left out, labels are reversed (those
    of IPv4 addresses too), all is lower case, runs of slashes are one, parameters are sorted, and escapes are decoded
    as far as the key stays printable (source of the rules: Internet Archive's URL canonicalisation, package ``surt``).
    Several URLs share one key; tracking parameters are already gone from a canonical URL, while the index has them.
    """
    authority, _, tail = canonical.partition("://")[2].partition("/")
    name = host(canonical).strip("[]")
    port = authority.rpartition("]")[2].partition(":")[2]
    path, _, query = tail.partition("?")
    path = _SLASHES.sub("/", "/" + _minimal_escapes(path)).lower()
    if len(path) > 1:
        path = path.removesuffix("/")
    query = "&".join(
        "=".join(pair) for pair in sorted(p.split("=", 1) for p in _minimal_escapes(query).lower().split("&"))
    )
    labels = [name] if ":" in name else reversed(_WWW.sub("", name).split("."))
    return f"{','.join(labels)}{':' if port else ''}{port}){path}{'?' if query else ''}{query}"


def _minimal_escapes(part: str) -> str:
    raw = part.encode()
    for _ in range(_MAX_UNESCAPES):
        if b"%" not in raw:
            break
        before, raw = raw, unquote_to_bytes(raw)
        if raw == before:
            break
    return quote_from_bytes(raw, _SURT_BARE)


def url_key(canonical: str) -> bytes:
    """The key by which canonical URLs are compared, without the scheme."""
    return blake2b(canonical.partition("://")[2].encode() or canonical.encode(), digest_size=16).digest()
