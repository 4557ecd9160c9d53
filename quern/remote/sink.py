"""Receives the bytes of an object over as many connections as needed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from quern.remote.retry import ChangedError, StoreError

__all__ = ["Info", "Sink"]

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


@dataclass(frozen=True)
class Info:
    """An object as the store describes it. ``etag`` is as it was sent, quotes included; empty where there is none."""

    size: int
    etag: str = ""
    sha256: str | None = None
    """What it was put with, by this package."""
    modified: str = ""

    @property
    def fingerprint(self) -> str:
        """Equal for answers of one version of an object, as far as the store tells."""
        return f"{self.size}:{self.etag or self.modified}"


@dataclass
class Sink:
    """The bytes from ``start`` up to ``end`` (None: all of the rest) of one version of an object.

    A try that is cut off leaves what it brought; the next one asks for what is missing of the very same object.
    """

    url: str
    start: int
    end: int | None
    info: Info | None = None
    data: bytearray = field(default_factory=bytearray)
    taker: Taker | None = field(default=None, repr=False)
    """Of the last try."""

    @property
    def at(self) -> int:
        """The offset of the next missing byte."""
        return self.start + len(self.data)

    @property
    def whole(self) -> bool:
        if self.info is None:
            return False
        last = self.info.size if self.end is None else min(self.end, self.info.size)
        return self.at >= last

    @property
    def range(self) -> str | None:
        """The ``Range`` to ask for; None for the whole object."""
        if self.at == 0 and self.end is None:
            return None
        return f"bytes={self.at}-{'' if self.end is None else self.end - 1}"

    @property
    def condition(self) -> str | None:
        """The strong ETag that the object must still have, once one is known (RFC 9110, section 13.1.1)."""
        etag = self.info.etag if self.info is not None else ""
        return etag if etag and not etag.startswith("W/") else None

    def begins(
        self, etag: str, length: int | None, content_range: str | None, sha256: str | None = None, modified: str = ""
    ) -> Taker:
        """Check that an answer is of the same object and of the requested bytes.

        Raises:
            ChangedError: it is another object by now.
            StoreError: the server did not answer what it was asked.
        """
        if self.taker is not None:  # of a try that is still on its way
            self.taker.ends()
        total = length
        if content_range is not None:
            match = _RANGE.fullmatch(content_range.strip())
            if match is None or int(match[1]) != self.at:
                raise StoreError(f"{self.url}: asked for byte {self.at}, got {content_range!r}", transient=False)
            total = int(match[3])
        elif self.at > 0:
            raise StoreError(f"{self.url}: the server sends no ranges; copy the file first", transient=False)
        if total is None:
            raise StoreError(
                f"{self.url}: the server does not say how long it is; copy the file first", transient=False
            )
        info = Info(total, etag, sha256, modified)
        if self.info is not None and info.fingerprint != self.info.fingerprint:
            was, now = (f"{one.size} bytes with ETag {one.etag or 'unknown'}" for one in (self.info, info))
            raise ChangedError(f"{self.url}: changed while it was read: {was}, now {now}; begin another run")
        self.info = self.info or info
        self.taker = Taker(self)
        return self.taker


class Taker:
    """Writes one answer's bytes into its sink until the attempt ends, so that late bytes cannot follow a newer
    attempt's."""

    def __init__(self, sink: Sink) -> None:
        self._sink: Sink | None = sink

    def take(self, data: bytes) -> bool:
        """Take bytes; return whether more are wanted."""
        sink = self._sink
        if sink is None:
            return False
        last = sink.info.size if sink.info else 0
        if sink.end is not None:
            last = min(last, sink.end)
        sink.data += data[: max(0, last - sink.at)]
        return sink.at < last

    def ends(self) -> None:
        self._sink = None
