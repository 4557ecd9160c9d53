"""S3 requests."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from email.utils import parsedate_to_datetime
from typing import IO, Any

from quern.remote.concurrency import PART_BYTES
from quern.remote.connection import Connection
from quern.remote.retry import StoreError
from quern.remote.sink import Info, Sink
from quern.remote.upload import give_up_uploads, put_object, upload_parts

__all__ = ["S3"]

_READ_BYTES = 256 << 10
_MAX_PARTS = 10_000
_UPLOAD_WIDTH = 4
_DELETED_AT_ONCE = 1000


class S3:
    """Objects of S3, by their URL."""

    def __init__(self, link: Connection) -> None:
        self.link = link

    def _where(self, url: str) -> dict[str, str]:
        return self.link.locate(url.split("://", 1)[1])

    def stat(self, url: str) -> Info:
        """The result of a HEAD request."""
        where = self._where(url)
        if not where["Key"]:
            raise FileNotFoundError(url)
        head = self.link.ask(url, "call_s3", "head_object", **where)
        return Info(
            head["ContentLength"], head["ETag"], head.get("Metadata", {}).get("sha256"), str(head.get("LastModified"))
        )

    def age_s(self, url: str) -> float | None:
        """Seconds since the object was written, by the store's own clock; None where it tells none."""
        head = self.link.ask(url, "call_s3", "head_object", **self._where(url))
        date = head["ResponseMetadata"].get("HTTPHeaders", {}).get("date")
        if not date:
            return None
        return (parsedate_to_datetime(date) - head["LastModified"]).total_seconds()

    def get(self, sink: Sink) -> None:
        """Make one attempt to read what is missing in ``sink``."""
        options = self._where(sink.url)
        if sink.range is not None:
            options["Range"] = sink.range
        if sink.condition is not None:
            options["IfMatch"] = sink.condition
        self.link.once(sink.url, _get, sink, options)

    def listing(self, folder: str, *, recursive: bool) -> Iterator[tuple[str, Info | None]]:
        """(URL, what is known) of everything below a folder, page by page; None stands for a folder."""
        where, scheme = self._where(folder), folder.split("://", 1)[0]
        key = where["Key"].rstrip("/")
        options: dict[str, Any] = {"Bucket": where["Bucket"], "Prefix": f"{key}/" if key else ""}
        if not recursive:
            options["Delimiter"] = "/"
        while True:
            page = self.link.ask(folder, "call_s3", "list_objects_v2", **options)
            base = f"{scheme}://{where['Bucket']}/"
            for entry in page.get("CommonPrefixes", []):
                yield base + entry["Prefix"].rstrip("/"), None
            for entry in page.get("Contents", []):
                if not entry["Key"].endswith("/"):  # what a console sets for an empty folder
                    yield base + entry["Key"], Info(entry["Size"], entry["ETag"], None, str(entry.get("LastModified")))
            if not page.get("IsTruncated"):
                return
            options["ContinuationToken"] = page["NextContinuationToken"]

    def has_folder(self, folder: str) -> bool:
        """Whether anything is below a folder."""
        where = self._where(folder)
        key = where["Key"].rstrip("/")
        options = {"Bucket": where["Bucket"], "Prefix": f"{key}/" if key else "", "MaxKeys": 1}
        return bool(self.link.ask(folder, "call_s3", "list_objects_v2", **options).get("Contents"))

    def put(self, url: str, file: IO[bytes], size: int, sha256: str) -> None:
        """The bytes of ``file``, from its beginning, under a name: all of them or none."""
        path, metadata = url.split("://", 1)[1], {"sha256": sha256}
        file.seek(0)
        if size <= PART_BYTES:
            put_object(self.link, url, path, file.read(), Metadata=metadata)
            return

        def stands() -> bool:
            try:
                return self.stat(url).sha256 == sha256
            except FileNotFoundError:
                return False

        length = max(PART_BYTES, -(-size // _MAX_PARTS))
        pieces = iter(lambda: file.read(length), b"")
        upload_parts(self.link, url, path, pieces, metadata, width=_UPLOAD_WIDTH, stands=stands)

    def put_if(self, url: str, data: bytes, etag: str | None) -> str:
        """Create the object (``etag`` None) or replace the one with this ETag; returns the new one's.

        Raises:
            ChangedError: there is an object already, or another one.
        """
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        metadata = {"sha256": hashlib.sha256(data).hexdigest()}
        answer = put_object(self.link, url, url.split("://", 1)[1], data, Metadata=metadata, **condition)
        return str(answer["ETag"])

    def remove(self, urls: Iterable[str]) -> None:
        """Remove objects; one that is not there is removed."""
        keys: list[dict[str, str]] = []
        first = ""
        for url in urls:
            keys.append({"Key": self._where(url)["Key"]})
            first = first or url
            if len(keys) == _DELETED_AT_ONCE:
                self._remove(first, keys)
                keys = []
        if keys:
            self._remove(first, keys)

    def _remove(self, url: str, keys: list[dict[str, str]]) -> None:
        where = self._where(url)
        if len(keys) == 1:
            self.link.ask(url, "call_s3", "delete_object", Bucket=where["Bucket"], Key=keys[0]["Key"])
            return

        def delete() -> None:
            wanted = {"Objects": keys, "Quiet": True}
            answer = self.link.once(url, "call_s3", "delete_objects", Bucket=where["Bucket"], Delete=wanted)
            for error in answer.get("Errors", []):
                passing = error.get("Code") in ("InternalError", "SlowDown", "ServiceUnavailable")
                what = f"s3://{where['Bucket']}/{error.get('Key')}: {error.get('Code')}: {error.get('Message')}"
                raise StoreError(f"{what}; cannot be removed, allow deleting below this address", transient=passing)

        self.link.backoff.run(delete)

    def give_up_uploads(self, folder: str) -> None:
        """Abort uploads below a folder that killed processes left; what cannot be seen or aborted stays."""
        give_up_uploads(self.link, folder, folder.split("://", 1)[1], below=True)


async def _get(fs: Any, sink: Sink, options: dict[str, str]) -> None:
    answer = await fs._call_s3("get_object", **options)
    body = answer["Body"]
    taker = sink.begins(
        answer["ETag"],
        answer.get("ContentLength"),
        answer.get("ContentRange"),
        answer.get("Metadata", {}).get("sha256"),
    )
    try:
        while chunk := await body.read(_READ_BYTES):
            if not taker.take(chunk):
                break
    finally:
        taker.ends()
        body.close()
