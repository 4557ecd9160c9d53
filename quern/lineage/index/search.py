"""Finds documents by URL, SURT, host and domain within a segment."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quern.data_pipeline.page.url import canonicalize, surt
from quern.lineage.index.columns import I64
from quern.lineage.index.urls import Urls

__all__ = ["find_domain", "find_host", "find_surt", "find_url"]

#: Above every byte of UTF-8.
_END = b"\xff"


def find_url(urls: Urls, url: str) -> I64:
    """The documents whose URL has the same canonical form as ``url``; where it has none, those of the same spelling."""
    canonical = canonicalize(url)
    if canonical is None:
        return np.arange(*urls.without_surt(url.encode("utf-8", "surrogatepass")))
    key = surt(canonical).encode()
    bounds = urls.surts_between(key, key + b"\0")
    return _filter(urls, 1, bounds, lambda own: canonicalize(own.decode()) == canonical)


def find_surt(urls: Urls, prefix: str) -> I64:
    """The documents whose SURT begins with ``prefix``."""
    key = prefix.encode("utf-8", "surrogatepass")
    return np.arange(*urls.surts_between(key, key + _END))


def find_host(urls: Urls, host: str) -> I64:
    """The documents of a canonical host. A SURT leaves a leading ``www.`` out, so their hosts are looked at."""
    key = _authority(host)
    parts = [_filter(urls, 2, bounds, host.encode().__eq__) for bounds in _begin(urls, key, b")", b":")]
    return np.sort(np.concatenate(parts))


def find_domain(urls: Urls, domain: str) -> I64:
    """The documents of a canonical host and of all hosts below it."""
    if domain.startswith("["):  # an IPv6 address: nothing is below it
        return find_host(urls, domain)
    key, suffix = _authority(domain), f".{domain}".encode()
    below = ",".join(reversed(domain.split("."))).encode()
    # a leading "www." is in the SURTs of the hosts below it, but not in its own
    parts = [find_host(urls, domain)] if key != below else []
    for bounds in _begin(urls, below, b")", b",", b":"):
        if urls.plain_hosts:
            parts.append(np.arange(*bounds))
        else:
            parts.append(_filter(urls, 2, bounds, lambda own: own == suffix[1:] or own.endswith(suffix)))
    return np.unique(np.concatenate(parts))


def _authority(host: str) -> bytes:
    return surt(f"http://{host}/").removesuffix(")/").encode()


def _begin(urls: Urls, key: bytes, *ends: bytes) -> list[tuple[int, int]]:
    """For each of ``ends`` the documents whose SURT begins with the key and it."""
    return [urls.surts_between(key + end, key + end + _END) for end in ends]


def _filter(urls: Urls, which: int, bounds: tuple[int, int], fits: Callable[[bytes], bool]) -> I64:
    numbers = np.arange(*bounds)
    texts = urls.texts(numbers, which)
    return numbers[[text is not None and fits(text) for text in texts]] if len(numbers) else numbers
