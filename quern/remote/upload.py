"""Uploads an S3 object atomically, by one request or by parts, and removes the parts of failed uploads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from quern.remote.concurrency import in_order
from quern.remote.connection import Connection
from quern.remote.retry import StoreError

__all__ = ["give_up_uploads", "put_object", "upload_parts"]

log = logging.getLogger(__name__)


def put_object(link: Connection, url: str, path: str, data: bytes, **options: Any) -> dict[str, Any]:
    """The answer to one PUT. Tried again after an answer that was lost it replaces the object by itself."""
    answer: dict[str, Any] = link.ask(url, "call_s3", "put_object", **link.locate(path), Body=data, **options)
    return answer


def upload_parts(
    link: Connection,
    url: str,
    path: str,
    pieces: Iterable[bytes],
    metadata: dict[str, str],
    *,
    width: int,
    stands: Callable[[], bool],
) -> None:
    """Send ``pieces`` (at least 5 MiB each but the last), ``width`` at a time; the object appears after the last.

    Args:
        stands: whether the object is there as it should be, asked when a try whose answer was lost may have ended it.

    Raises:
        StoreError: the store refused, or could not be reached; what was sent is given up.
    """
    where = link.locate(path)
    begun = link.ask(url, "call_s3", "create_multipart_upload", **where, Metadata=metadata)
    where["UploadId"] = begun["UploadId"]

    def send(part: tuple[int, bytes], stopped: Callable[[], bool]) -> dict[str, Any]:
        number, data = part
        options = {**where, "PartNumber": number, "Body": data}
        sent = link.backoff.run(lambda: link.once(url, "call_s3", "upload_part", **options), stopped)
        return {"PartNumber": number, "ETag": sent["ETag"]}

    try:
        parts = list(in_order(send, enumerate(pieces, 1), width))
        try:
            link.ask(url, "call_s3", "complete_multipart_upload", **where, MultipartUpload={"Parts": parts})
        except FileNotFoundError:  # no such upload: completed by a try whose answer was lost, or aborted
            if not stands():
                raise
    except BaseException as error:
        try:
            link.once(url, "call_s3", "abort_multipart_upload", **where)
        except (StoreError, FileNotFoundError) as failure:
            log.warning("%s: what was sent stays until the next try (%s)", url, failure)
        if isinstance(error, FileNotFoundError):
            raise StoreError(f"{url}: the upload was aborted by somebody else", transient=True) from error
        raise


def give_up_uploads(link: Connection, url: str, path: str, *, below: bool) -> None:
    """Abort uploads to ``path``, or ``below`` it, that killed processes left.

    Raises:
        StoreError, FileNotFoundError: the store refused, or could not be reached.
    """
    where = link.locate(path)
    key = where["Key"].rstrip("/") + "/" if below else where["Key"]
    more: dict[str, str] = {}
    while True:
        asked = {"Bucket": where["Bucket"], "Prefix": key, **more}
        found = link.once(url, "call_s3", "list_multipart_uploads", **asked)
        for upload in found.get("Uploads", []):
            if upload["Key"].startswith(key) if below else upload["Key"] == key:
                left = {"Bucket": where["Bucket"], "Key": upload["Key"], "UploadId": upload["UploadId"]}
                link.once(url, "call_s3", "abort_multipart_upload", **left)
        if not found.get("IsTruncated"):
            return
        more = {"KeyMarker": found["NextKeyMarker"], "UploadIdMarker": found.get("NextUploadIdMarker", "")}
