"""Access to other fsspec stores, with only the calls that all of them support."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import IO, Any

from quern.remote.connection import Connection
from quern.remote.retry import StoreError
from quern.remote.sink import Info, Sink

__all__ = ["Other"]

_STAMPS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "modified", "created")


class Other:
    """Files of an fsspec store, by their URL."""

    def __init__(self, link: Connection) -> None:
        self.link = link

    def _path(self, url: str) -> str:
        return str(self.link.fs._strip_protocol(url))

    def stat(self, url: str) -> Info:
        """What the store says of a file."""
        info = self.link.ask(url, "info", self._path(url))
        if info.get("type") == "directory":
            raise FileNotFoundError(url)
        return _info(info)

    def get(self, sink: Sink) -> None:
        """Make one attempt to read what is missing in ``sink``; these stores take no condition."""
        info = self.stat(sink.url)
        if sink.info is not None and sink.info != info:
            sink.begins(info.etag, info.size, f"bytes {sink.at}-{sink.at}/{info.size}")  # says what is wrong
        sink.info = info
        end = info.size if sink.end is None else min(sink.end, info.size)
        if end <= sink.at:
            return
        data = bytes(self.link.once(sink.url, "cat_file", self._path(sink.url), start=sink.at, end=end))
        if len(data) != end - sink.at:
            raise StoreError(f"{sink.url}: got {len(data)} bytes of {end - sink.at} at byte {sink.at}", transient=True)
        sink.data += data

    def listing(self, folder: str, *, recursive: bool) -> Iterator[tuple[str, Info | None]]:
        """(URL, what is known) of everything below a folder; None stands for a folder."""
        fs, path = self.link.fs, self._path(folder)
        try:
            if recursive:
                found = self.link.ask(folder, "find", path, detail=True).values()
            else:
                found = self.link.ask(folder, "ls", path, detail=True)
        except FileNotFoundError:
            return
        for entry in found:
            url = str(fs.unstrip_protocol(entry["name"]))
            is_folder = entry.get("type") == "directory"
            yield url, None if is_folder else _info(entry)

    def has_folder(self, folder: str) -> bool:
        """Whether there is such a folder."""
        return bool(self.link.ask(folder, "isdir", self._path(folder)))

    def put(self, url: str, file: IO[bytes], size: int, sha256: str) -> None:
        """The bytes of ``file`` under a name: all of them or none."""
        self.link.backoff.run(lambda: self._put(url, file))

    def _put(self, url: str, file: IO[bytes]) -> None:
        file.seek(0)
        try:
            upload = self.link.fs.open(self._path(url), "wb")
            try:
                shutil.copyfileobj(file, upload, 8 << 20)
            except BaseException:
                _discard(upload)
                raise
            upload.close()
        except Exception as error:
            raise self.link.translated(error, url) from error

    def remove(self, urls: Iterable[str]) -> None:
        """Remove files; one that is not there is removed."""
        for url in urls:
            with suppress(FileNotFoundError):
                self.link.ask(url, "rm", self._path(url), recursive=True)


def _info(entry: dict[str, Any]) -> Info:
    """Size, and what changes with the content: stores name it differently."""
    stamp = next((entry[name] for name in _STAMPS if entry.get(name)), "")
    return Info(int(entry.get("size") or 0), str(stamp))


def _discard(upload: Any) -> None:
    """Give an upload up. Closing it, and so leaving a ``with`` or being collected, would publish what it has so far."""
    if hasattr(upload, "discard"):
        upload.discard()
    with suppress(AttributeError):  # a store that has nothing to upload
        upload.closed = True
