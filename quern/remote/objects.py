"""Reads objects by ranges that resume after a cut, and writes objects atomically."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Any

import fsspec

from quern.errors import InputError
from quern.remote.concurrency import in_order
from quern.remote.connection import Connection
from quern.remote.http import Web
from quern.remote.other import Other
from quern.remote.retry import Backoff, ChangedError, StoreError
from quern.remote.s3 import S3
from quern.remote.sink import Info, Sink
from quern.remote.waits import waiting

__all__ = ["Info", "Objects", "objects"]

_PROGRESS_BYTES = 64 << 10
"""A try that brought so many bytes before it was cut begins the patience anew."""
_WIDTH = 16
_WEB_WIDTH = 4
"""Towards a web server that others use too."""


class Objects:
    """The objects of one store, by their URLs. Threads may share it.

    Each request ends within ``timeout_s``; what may pass is tried again as :class:`Backoff` says.

    Raises:
        InputError: there is no such kind of store.
    """

    def __init__(self, url: str, backoff: Backoff, timeout_s: float, width: int) -> None:
        link = Connection(url, backoff, timeout_s, width=width, renews=True)
        self.link = link
        self.backend: S3 | Web | Other = S3(link) if link.is_s3 else Web(link) if link.is_http else Other(link)
        self.width = width

    @property
    def lists(self) -> bool:
        """Whether it can say what is below a folder."""
        return not isinstance(self.backend, Web)

    def stat(self, url: str) -> Info | None:
        """What the store says of an object; None if there is none."""
        with waiting():
            try:
                return self.backend.stat(url)
            except FileNotFoundError:
                return None

    def stats(self, urls: Sequence[str]) -> list[Info | None]:
        """As :meth:`stat` for many, with a bounded number of requests under way."""
        with waiting():
            return list(in_order(lambda url, stopped: self.stat(url), urls, self.width))

    def fetch(self, sink: Sink) -> bytearray:
        """Read what is missing in ``sink``.

        Raises:
            FileNotFoundError: there is no such object.
            StoreError: the object changed meanwhile, the store refused, or could not be reached.
        """
        while not sink.whole:
            before = len(sink.data)

            def one(before: int = before) -> None:
                try:
                    self.backend.get(sink)
                except StoreError as error:
                    if not error.transient or len(sink.data) - before < _PROGRESS_BYTES:
                        raise
                    return
                if not sink.whole:
                    raise StoreError(f"{sink.url}: the answer ended before byte {sink.at}", transient=True)

            self.link.backoff.run(one)
        return sink.data

    def read(self, url: str) -> bytes:
        """Read a whole object; one that this package wrote is compared with its recorded SHA-256."""
        with waiting():
            for _ in range(2):
                sink = Sink(url, 0, None)
                data = bytes(self.fetch(sink))
                expected = sink.info.sha256 if sink.info else None
                if expected is None or hashlib.sha256(data).hexdigest() == expected:
                    return data
            raise StoreError(f"{url}: came twice with other bytes than it was put with", transient=False)

    def read_range(self, url: str, start: int, end: int) -> bytes:
        """The bytes from ``start`` up to and without ``end``, of one version of the object, and no others."""
        if end <= start:
            return b""
        with waiting():
            return bytes(self.fetch(Sink(url, start, end)))

    def listing(self, folder: str, *, recursive: bool = True) -> list[tuple[str, Info | None]]:
        """(URL, what is known) of everything below ``folder``, in no order; None stands for a folder."""
        with waiting():
            return list(self._writable(folder).listing(folder, recursive=recursive))

    def listed(self, folder: str, wanted: set[str]) -> dict[str, Info]:
        """What is known of those of ``wanted`` that stand right in ``folder``, by one request a thousand objects."""
        found: dict[str, Info] = {}
        with waiting():
            for url, info in self._writable(folder).listing(folder, recursive=False):
                if info is not None and url in wanted:
                    found[url] = info
                    if len(found) == len(wanted):
                        break
        return found

    def has_folder(self, folder: str) -> bool:
        """Whether anything is below ``folder``."""
        if isinstance(self.backend, Web):
            return False
        with waiting():
            return self.backend.has_folder(folder)

    def put(self, url: str, file: IO[bytes], size: int, sha256: str) -> None:
        """The bytes of ``file``, which can be read again from its beginning: the object is there with all of them, or
        as it was before."""
        with waiting():
            self._writable(url).put(url, file, size, sha256)

    def create(self, url: str, data: bytes) -> None:
        """Create a small object if none exists. A store that knows no conditions is asked first.

        Raises:
            FileExistsError: there is one, of other bytes.
        """
        with waiting():
            backend = self._writable(url)
            if isinstance(backend, S3):
                with suppress(ChangedError):
                    backend.put_if(url, data, None)
                    return
            elif self.stat(url) is None:
                backend.put(url, io.BytesIO(data), len(data), hashlib.sha256(data).hexdigest())
                return
            if self.read(url) != data:
                raise FileExistsError(errno.EEXIST, "is there already", url)

    def remove(self, urls: Sequence[str]) -> None:
        """Remove objects; one that is not there is removed."""
        if urls:
            with waiting():
                self._writable(urls[0]).remove(urls)

    def give_up_uploads(self, folder: str) -> None:
        """Abort uploads below a folder that killed processes left, as far as that is allowed."""
        if isinstance(self.backend, S3):
            with waiting(), suppress(StoreError, FileNotFoundError):  # a left-over upload only takes space
                self.backend.give_up_uploads(folder)

    def _writable(self, url: str) -> S3 | Other:
        if isinstance(self.backend, Web):
            raise InputError(f"{url}: a web server can only be read; give a folder or a store such as s3://bucket/run")
        return self.backend


_open: dict[str, tuple[Any, Objects]] = {}
_lock = threading.Lock()
_ENVIRONMENT = ("AWS_", "QUERN_STORE_")


def objects(url: str) -> Objects:
    """The store of ``url``, which this process keeps a connection to.

    ``QUERN_STORE_TIMEOUT_S`` (60) limits one request, ``QUERN_STORE_PATIENCE_S`` (300) all tries of one without
    progress, ``QUERN_STORE_CONNECTIONS`` (16; 4 to a web server) the requests under way in a process.

    Raises:
        InputError: there is no such kind of store, or one of these is no number above 0.
    """
    scheme = url.split("://", 1)[0]
    shared = scheme in ("s3", "s3a", "http", "https")
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith(_ENVIRONMENT))
    stamp = (os.getpid(), settings, repr(fsspec.config.conf))
    with _lock:
        key = scheme if shared else url.split("://", 1)[0] + "://" + url.split("://", 1)[-1].split("/", 1)[0]
        known = _open.get(key)
        if known is not None and known[0] == stamp:
            return known[1]
        timeout_s = _number("QUERN_STORE_TIMEOUT_S", 60.0)
        backoff = Backoff(budget_s=_number("QUERN_STORE_PATIENCE_S", 300.0))
        width = int(_number("QUERN_STORE_CONNECTIONS", _WEB_WIDTH if scheme.startswith("http") else _WIDTH))
        found = Objects(url, backoff, timeout_s, max(1, width))
        _open[key] = stamp, found
        return found


def _number(name: str, otherwise: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else otherwise
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise InputError(f"{name}: expected a number above 0, got {text!r}")
    return value
