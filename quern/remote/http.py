"""Reads files of a web server by ranges."""

from __future__ import annotations

from typing import Any

from quern.remote.connection import Connection
from quern.remote.sink import Info, Sink

__all__ = ["Web"]

_READ_BYTES = 256 << 10
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "quern (a crawl reader; one file a worker at a time)"}


class Web:
    """Files of a web server, by their URL."""

    def __init__(self, link: Connection) -> None:
        self.link = link

    def stat(self, url: str) -> Info:
        """What a HEAD says; of a server that sends no length, what the first byte's range says."""
        info: Info = self.link.ask(url, _head, url)
        if info.size >= 0:
            return info
        sink = Sink(url, 0, 1)
        self.link.backoff.run(lambda: self.get(sink))
        assert sink.info is not None
        return sink.info

    def get(self, sink: Sink) -> None:
        """Make one attempt to read what is missing in ``sink``."""
        headers = dict(_HEADERS)
        if sink.range is not None:
            headers["Range"] = sink.range
        if sink.condition is not None:
            headers["If-Match"] = sink.condition
        self.link.once(sink.url, _get, sink, headers)


def _address(fs: Any, url: str) -> Any:
    return fs.encode_url(url)


async def _head(fs: Any, url: str) -> Info:
    session = await fs.set_session()
    async with session.head(_address(fs, url), headers=_HEADERS, allow_redirects=True) as answer:
        if answer.status == 404:
            raise FileNotFoundError(url)
        answer.raise_for_status()
        length = answer.headers.get("Content-Length")
        return Info(
            int(length) if length else -1,
            answer.headers.get("ETag", ""),
            modified=answer.headers.get("Last-Modified", ""),
        )


async def _get(fs: Any, sink: Sink, headers: dict[str, str]) -> None:
    session = await fs.set_session()
    async with session.get(_address(fs, sink.url), headers=headers) as answer:
        if answer.status == 404:
            raise FileNotFoundError(sink.url)
        answer.raise_for_status()
        length = answer.headers.get("Content-Length")
        ranged = answer.headers.get("Content-Range") if answer.status == 206 else None
        taker = sink.begins(
            answer.headers.get("ETag", ""),
            int(length) if length else None,
            ranged,
            modified=answer.headers.get("Last-Modified", ""),
        )
        try:
            async for chunk in answer.content.iter_chunked(_READ_BYTES):
                if not taker.take(chunk):
                    break
        finally:
            taker.ends()
