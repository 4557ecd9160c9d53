"""Drops pages by URL: block lists of domains and URLs, and words in the URL."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Literal
from urllib.parse import unquote

import ada_url
import numpy as np
import tldextract
import xxhash
from pydantic import Field

from quern import storage
from quern.config import Section
from quern.data_pipeline.page.document import Page
from quern.data_pipeline.page.keys import contains
from quern.data_pipeline.page.url import MAX_CHARS, TRACKING_VERSION, canonicalize, host, surt
from quern.errors import InputError

__all__ = ["UrlConfig", "UrlFilter", "load_hashes", "url_keys"]

#: Part of a cached list's name: entries normalised by other rules hash differently.
_RULES = "quern block list 1"
_MAX_PARENT_PATHS = 32
_MAX_URL_WORDS = 2_000

_PLAIN_DOMAIN = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63}){0,31}")
_WORD = re.compile(r"[^\W_]+")


class UrlConfig(Section):
    """Block lists, each a list of files or globs; a file may be gzipped. None is shipped: bring your own (UT1, say)."""

    action: Literal["drop", "measure"] = "drop"
    """``measure`` fills the columns and lets every page pass."""
    domains: tuple[str, ...] = ()
    """Files of one domain per line; a domain includes all hosts below it. Example: [lists/domains.txt]"""
    urls: tuple[str, ...] = ()
    """Files of one URL per line, scheme optional; a path includes all paths below it. Example: [lists/urls.txt]"""
    words: tuple[str, ...] = ()
    """Files of one word or phrase per line, looked for among the URL's words. Example: [lists/words.txt]"""
    soft_words: tuple[str, ...] = ()
    """Files of words that count only together (``max_soft_words``). Example: [lists/soft_words.txt]"""
    max_words: Annotated[int, Field(ge=0)] = 0
    """[words] A URL with more hits of ``words`` fails."""
    max_soft_words: Annotated[int, Field(ge=0)] = 1
    """[words] A URL with more hits of ``soft_words`` fails (RefinedWeb, appendix G.1: two of them ban)."""
    cache: str | None = None
    """A folder on this machine for the lists' hash arrays; null = ``$XDG_CACHE_HOME/quern/blocklists``. Example:
    /tmp/blocklists"""


class UrlFilter:
    """Stage: fills ``canonical_url``, ``surt`` and ``host``, and looks the page up in the lists.

    Measures ``url.blocked_domain`` and ``url.blocked_url`` (0 or 1), ``url.banned_words`` and ``url.soft_words``
    (counts), each only where its list is given. A page without an http(s) URL has none of them. A URL longer than
    :data:`~quern.data_pipeline.page.url.MAX_CHARS` is cut there and fails ``url.too_long``, whatever ``action`` is.

    Raises:
        InputError: a list is missing, unreadable or has no usable line.
    """

    name = "url"

    def __init__(self, config: UrlConfig) -> None:
        self.config = config
        self._domains = load_hashes(config.domains, "domain", config.cache) if config.domains else None
        self._urls = load_hashes(config.urls, "url", config.cache) if config.urls else None
        self._words = _load_phrases(config.words)
        self._soft_words = _load_phrases(config.soft_words)
        given = (config.domains, config.urls, config.words, config.soft_words)
        names = ("url.blocked_domain", "url.blocked_url", "url.banned_words", "url.soft_words")
        self.measures = tuple(name for name, paths in zip(names, given, strict=True) if paths)
        self._suffixes = tldextract.TLDExtract(cache_dir=None, suffix_list_urls=()) if config.domains else None

    def __call__(self, page: Page) -> Page:
        if page.url is None:
            return page
        if len(page.url) > MAX_CHARS:
            page.url = page.url[:MAX_CHARS]
            page.fail("url", "url.too_long")
            return page
        if page.canonical_url is None:
            page.canonical_url = canonicalize(page.url)
        url = page.canonical_url
        if url is None:
            return page
        page.surt = surt(url)
        page.host = host(url)
        if self._domains is not None:
            self._note(page, "url.blocked_domain", _any_listed(self._domains, self._domains_of(page.host)), 0)
        if self._urls is not None:
            self._note(page, "url.blocked_url", _any_listed(self._urls, url_keys(url)), 0)
        if self.config.words or self.config.soft_words:
            words = _words(url)
            if self.config.words:
                self._note(page, "url.banned_words", _count_phrases(words, self._words), self.config.max_words)
            if self.config.soft_words:
                hits = _count_phrases(words, self._soft_words)
                self._note(page, "url.soft_words", hits, self.config.max_soft_words)
        return page

    def _note(self, page: Page, measure: str, value: int, most: int) -> None:
        page.measures[measure] = float(value)
        if value > most and self.config.action == "drop":
            page.fail("url", measure)

    def _domains_of(self, name: str) -> list[str]:
        """The host and its parents, down to the registered domain: a listed public suffix blocks nothing below it."""
        assert self._suffixes is not None
        parts = self._suffixes.extract_str(name) if name.isascii() and "[" not in name else None
        if parts is None or not parts.domain or not parts.suffix:
            return [name]
        below = parts.subdomain.split(".") if parts.subdomain else []
        registered = f"{parts.domain}.{parts.suffix}"
        return [".".join([*below[i:], registered]) for i in range(max(0, len(below) - 127), len(below) + 1)] or [name]


def url_keys(canonical: str) -> list[str]:
    """What a URL is looked up by: itself without scheme, ``www.``, port and case; without its query; its parent paths.

    The front page is no parent: a listed ``example.com/`` blocks that page only, a listed domain belongs in a list
    of domains. At most 32 parents are named.
    """
    path, _, query = canonical.partition("://")[2].partition("/")[2].lower().partition("?")
    name = host(canonical).removeprefix("www.")
    path = path.rstrip("/")
    keys = [f"{name}/{path}?{query}"] if query else []
    if not query or path:
        keys.append(f"{name}/{path}")
    for _ in range(_MAX_PARENT_PATHS):
        path = path.rpartition("/")[0]
        if not path:
            break
        keys.append(f"{name}/{path}")
    return keys


def load_hashes(paths: Iterable[str], kind: Literal["domain", "url"], cache: str | None = None) -> np.ndarray:
    """Sorted unique uint64[n] xxh64 hashes of the lists' entries, memory-mapped from a file named by their content.

    The first process to need a list writes the file; where the cache cannot be written the array stays in memory.

    Raises:
        InputError: a list is missing, unreadable or has no usable line.
    """
    files = _files(paths)
    state = hashlib.blake2b(f"{_RULES}, tracking {TRACKING_VERSION}, {kind}".encode(), digest_size=16)
    for file in files:
        for chunk in _chunks(file):
            state.update(chunk)
        state.update(b"\0next file\0")
    folder = cache or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "quern/blocklists"
    )
    place = os.path.join(folder, f"{kind}s-{state.hexdigest()}.npy")
    mapped = _map(place)
    if mapped is not None:
        return mapped
    normalize = _domain_entry if kind == "domain" else _url_entry
    parts = [_hash_file(file, kind, normalize) for file in files]
    hashes = np.unique(np.concatenate(parts))
    try:
        with storage.publish(place) as stream:
            np.save(stream, hashes, allow_pickle=False)
    except OSError:
        return hashes
    mapped = _map(place)
    return hashes if mapped is None else mapped


def _map(place: str) -> np.ndarray | None:
    try:
        array = np.load(place, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return array if isinstance(array, np.ndarray) and array.dtype == np.uint64 and array.ndim == 1 else None


def _hash_file(file: str, kind: str, normalize: Callable[[str], str | None]) -> np.ndarray:
    hashes = np.fromiter(
        (xxhash.xxh64_intdigest(entry.encode()) for line in _lines(file) if (entry := normalize(line)) is not None),
        np.uint64,
    )
    if not len(hashes):
        raise InputError(f"{file}: expected one {kind} a line, found none")
    return hashes


def _domain_entry(line: str) -> str | None:
    fields = line.lower().split()
    # a hosts file names an address first
    name = fields[1] if len(fields) == 2 and fields[0] in ("0.0.0.0", "127.0.0.1") else fields[0]
    name = name.removeprefix("*.").strip(".")
    if _PLAIN_DOMAIN.fullmatch(name):
        return name
    canonical = canonicalize(f"http://{name}/")
    return host(canonical) if canonical is not None and canonical.count("/") == 3 else None


def _url_entry(line: str) -> str | None:
    canonical = canonicalize(line if "://" in line else f"http://{line}")
    return url_keys(canonical)[0] if canonical is not None else None


def _any_listed(hashes: np.ndarray, keys: list[str]) -> int:
    wanted = np.array([xxhash.xxh64_intdigest(key.encode()) for key in keys], np.uint64)
    return int(contains(hashes, wanted).any())


Phrases = tuple[frozenset[str], int]
"""Phrases as words joined by one space, and the most words one of them has."""


def _load_phrases(paths: Iterable[str]) -> Phrases:
    phrases = set()
    for file in _files(paths):
        found = {" ".join(words) for line in _lines(file) if (words := _WORD.findall(line.casefold()))}
        if not found:
            raise InputError(f"{file}: expected one word a line, found none")
        phrases |= found
    return frozenset(phrases), max((phrase.count(" ") + 1 for phrase in phrases), default=0)


def _words(canonical: str) -> list[str]:
    """The URL's words, as a reader sees them: escapes and punycode undone, no case. The first 2,000 of them."""
    authority, slash, tail = canonical.partition("://")[2].partition("/")
    if "xn--" in authority:
        authority = ada_url.idna_to_unicode(authority.encode())
    return _WORD.findall(unquote(f"{authority}{slash}{tail}").casefold())[:_MAX_URL_WORDS]


def _count_phrases(words: list[str], phrases: Phrases) -> int:
    known, longest = phrases
    return sum(" ".join(words[i : i + n]) in known for n in range(1, longest + 1) for i in range(len(words) - n + 1))


def _files(paths: Iterable[str]) -> list[str]:
    files: list[str] = []
    for path in paths:
        if any(c in path for c in "*?["):
            found = storage.glob(path)
            if not found:
                raise InputError(f"{path}: no file matches")
            files += found
        else:
            files.append(path)
    return files


def _chunks(file: str) -> Iterator[bytes]:
    try:
        with storage.open_read(file) as stream:
            while chunk := stream.read(1 << 20):
                yield chunk
    except FileNotFoundError:
        raise InputError(f"{file}: no such list") from None
    except OSError as error:
        raise InputError(f"{file}: the list cannot be read ({error.strerror or error})") from None


def _lines(file: str) -> Iterator[str]:
    """Lines that are neither blank nor comments, without surrounding space; gzip is seen by its first bytes."""
    try:
        with storage.open_read(file) as stream:
            zipped = stream.read(2) == b"\x1f\x8b"
            stream.seek(0)
            for raw in gzip.GzipFile(fileobj=stream) if zipped else stream:
                line = raw.decode("utf-8", "replace").strip()
                if line and not line.startswith("#"):
                    yield line
    except FileNotFoundError:
        raise InputError(f"{file}: no such list") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{file}: the list cannot be read ({error})") from None
