"""Checkpoints in a store behind the run's own disks: list, read a manifest, fetch a file, put a file, remove.

The store is any fsspec URL. A checkpoint is ``URL/step_00001000/<file>`` and exists only if its ``manifest.json`` does:
that object is put last, and goes first when a checkpoint is removed or its step is written anew. A file appears under
its name whole or not at all, and only if the bytes read from the local disk still have the SHA-256 they were saved
with. That SHA-256 stays beside the object, as metadata on S3, elsewhere in a small file ``.<name>.sha256``, so that
what is there is told from what is missing without reading it.

Every request has a time limit. What may pass by itself (5xx, ``SlowDown``, timeouts, broken connections) is tried again
with exponential delays and full jitter (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import random
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.implementations.local import LocalFileSystem

from quern import storage
from quern.errors import InputError, QuernError
from quern.train.checkpoint.manifest import MANIFEST_FILE, FileRecord, Manifest, checkpoint_name

__all__ = ["Backoff", "Rate", "SourceError", "Store", "StoreError", "prune_store"]

log = logging.getLogger(__name__)

T = TypeVar("T")
S = TypeVar("S")

_NAME = re.compile(r"step_(\d{8,})")
#: Bytes a request carries. S3 takes parts of 5 MiB to 5 GiB, and at most 10,000 of them.
_PART_BYTES = 8 << 20
_MAX_PARTS = 10_000
_MAX_MANIFEST_BYTES = 256 << 20

#: S3 error codes (Amazon S3 API reference, "Error responses"), and statuses where an answer has no body.
_PASSING = {
    "SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "Throttling", "ThrottlingException",
    "RequestLimitExceeded", "BandwidthLimitExceeded", "TooManyRequests", "OperationAborted", "IncompleteBody",
    "BadDigest", "XAmzContentSHA256Mismatch", "InvalidDigest",
}  # fmt: skip
_CREDENTIALS = {
    "ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken", "TokenRefreshRequired",
    "SignatureDoesNotMatch", "AccessDenied", "AllAccessDisabled", "AccountProblem", "RequestTimeTooSkewed",
    "InvalidClientTokenId",
}  # fmt: skip
_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_WRONG = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP}
_RENEW = "renew the credentials, or allow reading, listing and writing below this address"


class StoreError(QuernError):
    """The store did not do what it was asked.

    ``transient``: it may pass by itself. Otherwise somebody has to act, as the message says.
    """

    def __init__(self, message: str, *, transient: bool) -> None:
        super().__init__(message)
        self.transient = transient


class SourceError(QuernError):
    """A local file that was to be put is missing, or no longer holds the bytes that were saved."""


class Rate(Protocol):
    """A limit on bytes per second."""

    def take(self, n: int, /) -> object:
        """Wait until ``n`` more bytes may go."""


@dataclass(frozen=True)
class Backoff:
    """When to try again: after ``random() · min(cap_s, base_s · 2ⁿ)`` seconds, ``budget_s`` in all for one request."""

    base_s: float = 0.5
    cap_s: float = 30.0
    budget_s: float = 300.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    random: Callable[[], float] = field(default_factory=lambda: random.Random().random)
    """Uniform in [0, 1); by default seeded by the system, so that machines differ."""

    def run(self, action: Callable[[], T], stopped: Callable[[], bool] = lambda: False) -> T:
        """What ``action`` returns, at its first success.

        Raises:
            StoreError: a permanent one at once; a transient one when the next try would exceed the budget, or once
                ``stopped`` says so.
        """
        start, tries = self.clock(), 0
        while True:
            try:
                return action()
            except StoreError as error:
                tries += 1
                if not error.transient or stopped():
                    raise
                delay = self.random() * min(self.cap_s, self.base_s * 2.0 ** min(tries - 1, 60))
                spent = self.clock() - start
                if spent + delay > self.budget_s:
                    message = f"{error}; given up after {tries} tries in {spent:.0f} s"
                    raise StoreError(message, transient=True) from error
            self.sleep(delay)


class Store:
    """The checkpoints below ``url``. Threads may share one.

    Args:
        url: an fsspec URL with a folder or bucket; options such as an endpoint come from fsspec's configuration and
            the store's own environment variables.
        backoff: how a request is tried again.
        timeout_s: limit of one request, of at most 8 MiB unless a file has more than 80 GB.
        width: requests under way at a time in a transfer; memory is bounded by about ``width + 2`` requests.

    Raises:
        InputError: there is no such kind of store.
    """

    def __init__(self, url: str, *, backoff: Backoff | None = None, timeout_s: float = 120.0, width: int = 3) -> None:
        self.url = url.rstrip("/")
        if self.url.endswith(":") or not self.url:
            raise InputError(f"{url}: expected a store with a bucket or folder, such as s3://bucket/run")
        self.backoff = backoff or Backoff()
        self.timeout_s = timeout_s
        self.width = width
        self._connect()

    def _connect(self) -> None:
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        is_s3 = self.url.split("://")[0] in ("s3", "s3a")
        if is_s3:  # each request is tried once: how often and when it is tried again is decided here alone
            given = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
            limits = {"connect_timeout": min(self.timeout_s, 20.0), "read_timeout": self.timeout_s}
            options["config_kwargs"] = limits | given | {"retries": {"total_max_attempts": 1}}
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **options)
        except (ValueError, ImportError) as error:
            raise InputError(f"{self.url}: no such store ({error})") from None
        self._s3 = is_s3
        self._local = isinstance(self._fs, LocalFileSystem)
        if is_s3:
            self._fs.retries = 1

    def renew(self) -> None:
        """Connect anew; credentials are read again from where they come from."""
        type(self._fs).clear_instance_cache()
        self._connect()

    def checkpoints(self) -> list[int]:
        """Steps of the checkpoints that are there, ascending; nothing of them is verified."""
        return [step for step in self.begun() if self._stat(step, MANIFEST_FILE) is not None]

    def begun(self) -> list[int]:
        """Steps of which anything is there, with a manifest or without, ascending."""
        names = (entry["name"].rstrip("/").rpartition("/")[2] for entry in self._list(self._root, self.url))
        steps = {int(match[1]) for name in names if (match := _NAME.fullmatch(name))}
        return sorted(steps)

    def manifest(self, step: int) -> Manifest:
        """The manifest of the checkpoint of ``step``.

        Raises:
            InputError: there is no such checkpoint, or its manifest is damaged, or another step's.
            StoreError: it could not be read.
        """
        url = self.address(step, MANIFEST_FILE)
        try:
            try:
                return self._read_manifest(step, url)
            except InputError:  # damaged on the way, perhaps
                return self._read_manifest(step, url)
        except FileNotFoundError:
            raise InputError(f"{url}: not there; {self.url} has no checkpoint of step {step}") from None

    def _read_manifest(self, step: int, url: str) -> Manifest:
        return _parse_manifest(self._ask(url, "cat_file", self._path(step, MANIFEST_FILE)), step, url)

    def has(self, step: int, name: str, record: FileRecord) -> bool:
        """Whether the file is there with the size and SHA-256 of ``record``; the bytes are not read."""
        found = self._stat(step, name)
        if found is None or found[0] != record.size:
            return False
        if self._s3:
            return found[1] == record.sha256
        url = self.address(step, name)
        try:
            said = json.loads(self._ask(url, "cat_file", self._path(step, _sidecar(name))))
        except (FileNotFoundError, ValueError):
            return False
        return bool(said == {"sha256": record.sha256, "size": record.size})

    def put(
        self,
        step: int,
        name: str,
        path: str,
        record: FileRecord,
        rate: Rate | None = None,
        progress: Callable[[int], object] = lambda n: None,
    ) -> None:
        """Put the local file ``path`` under ``name``, replacing what is there; it appears whole or not at all.

        The manifest goes in only if every file it names is there with its size. Putting any other file first takes
        away a manifest that does not name it with this ``record``: the step is being written anew.

        Args:
            progress: called with the size of each piece before it is sent; an error it raises ends the transfer.

        Raises:
            SourceError: the local file is missing or its bytes are not those of ``record``; the name holds nothing new.
            StoreError: the store refused, could not be reached, or misses a file that the manifest names.
        """
        pieces = _Pieces(path, record, rate, progress)
        if name == MANIFEST_FILE:
            self._check_whole(step, b"".join(_Pieces(path, record, None, lambda n: None)), path)
        else:
            self._retract(step, name, record)
        url, target = self.address(step, name), self._path(step, name)
        self._sweep(step, name)
        if self._s3:
            self._put_s3(step, name, pieces, record)
            return
        sidecar = _sidecar(name)
        self._remove(step, sidecar)
        if self._local or record.size > _PART_BYTES:
            self.backoff.run(lambda: self._write(url, pieces))
        else:
            data = b"".join(pieces)
            self._ask(url, "pipe_file", target, data)
        proof = json.dumps({"sha256": record.sha256, "size": record.size}).encode()
        self.backoff.run(lambda: self._write(self.address(step, sidecar), [proof]))

    def fetch(self, step: int, name: str, record: FileRecord, into: str, rate: Rate | None = None) -> str:
        """Read the file into the local folder ``into``; returns its path there.

        It gets its name once it is whole, synced and has the SHA-256 of ``record``. A broken connection costs one
        request; bytes that came wrong are fetched a second time.

        Raises:
            StoreError: it is not there, cannot be read, or is not what ``record`` says.
            QuernError: the local folder cannot be written.
        """
        self._path(step, name)  # refuses what is no plain name, before it becomes a local path
        url, target = self.address(step, name), os.path.join(into, name)
        found = ""
        for _ in range(2):
            temporary = os.path.join(into, f".{name}.{uuid.uuid4().hex}.tmp")
            try:
                found = self._download(step, name, record, temporary, rate)
                if found == record.sha256:
                    os.replace(temporary, target)
                    storage.sync(into)
                    return target
            except OSError as error:
                raise QuernError(f"{target}: cannot be written ({error.strerror or error})") from None
            finally:
                with suppress(OSError):
                    os.unlink(temporary)
            log.warning("%s: came with SHA-256 %s, expected %s", url, found, record.sha256)
        message = f"{url}: expected SHA-256 {record.sha256}, got {found}, twice; the stored file is damaged"
        raise StoreError(f"{message}: use an older checkpoint", transient=False)

    def _download(self, step: int, name: str, record: FileRecord, to: str, rate: Rate | None) -> str:
        url, path, found = self.address(step, name), self._path(step, name), self._stat(step, name)
        if found is None:
            raise StoreError(f"{url}: no such file", transient=False)
        size = found[0]
        if size != record.size:
            raise StoreError(f"{url}: expected {record.size} bytes, has {size}", transient=False)

        def read(start: int, stopped: Callable[[], bool]) -> bytes:
            end = min(start + _PART_BYTES, size)
            return self.backoff.run(lambda: self._read(url, path, start, end), stopped)

        state = hashlib.sha256()
        with open(to, "xb") as file:
            for data in _in_order(read, range(0, size, _PART_BYTES), self.width):
                if rate is not None:
                    rate.take(len(data))
                state.update(data)
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return state.hexdigest()

    def _read(self, url: str, path: str, start: int, end: int) -> bytes:
        try:
            data = bytes(self._once(url, "cat_file", path, start=start, end=end))
        except FileNotFoundError:
            raise StoreError(f"{url}: was removed while it was read", transient=False) from None
        if len(data) != end - start:
            raise StoreError(f"{url}: got {len(data)} bytes of {end - start} at byte {start}", transient=True)
        return data

    def remove(self, step: int) -> None:
        """Remove what there is of a checkpoint, the manifest first: what is half removed does not exist."""
        self._remove(step, MANIFEST_FILE)
        folder, url = self._path(step), self.address(step)
        for entry in self._list(folder, url):
            if entry["type"] == "file":
                with suppress(FileNotFoundError):
                    self._ask(url, "rm_file", entry["name"])
        if self._s3:
            self._sweep(step)
        else:
            with suppress(FileNotFoundError, StoreError, NotImplementedError):  # a store may have no folders
                self._once(url, "rmdir", folder)

    def address(self, step: int, *name: str) -> str:
        """The URL of a checkpoint, or of a file of it."""
        return "/".join((self.url, checkpoint_name(step), *name))

    def _path(self, step: int, *name: str) -> str:
        for part in name:
            if part in ("", ".", "..") or "/" in part or "\\" in part or "\0" in part:
                raise InputError(f"{self.address(step)}: {part!r}: expected the plain name of a file")
        return "/".join((self._root.rstrip("/"), checkpoint_name(step), *name))

    def _object(self, path: str) -> dict[str, str]:
        bucket, key, _ = self._fs.split_path(path)
        return {"Bucket": bucket, "Key": key}

    def _once(self, url: str, method: str, *arguments: Any, **options: Any) -> Any:
        """One request; FileNotFoundError if what it asks for is not there, else a StoreError."""
        try:
            if isinstance(self._fs, AsyncFileSystem):
                call = getattr(self._fs, f"_{method}")
                return sync(self._fs.loop, call, *arguments, timeout=self.timeout_s, **options)
            return getattr(self._fs, method)(*arguments, **options)
        except Exception as error:
            raise _translated(error, url) from error

    def _ask(self, url: str, method: str, *arguments: Any, **options: Any) -> Any:
        return self.backoff.run(lambda: self._once(url, method, *arguments, **options))

    def _list(self, path: str, url: str) -> list[dict[str, Any]]:
        try:
            return list(self._ask(url, "ls", path, detail=True))
        except FileNotFoundError:
            return []

    def _stat(self, step: int, name: str) -> tuple[int, str | None] | None:
        """Size of a file, and on S3 the SHA-256 it was put with; None if it is not there."""
        url, path = self.address(step, name), self._path(step, name)
        try:
            if self._s3:
                head = self._ask(url, "call_s3", "head_object", **self._object(path))
                return head["ContentLength"], head.get("Metadata", {}).get("sha256")
            info = self._ask(url, "info", path)
            return (info["size"], None) if info["type"] == "file" else None
        except FileNotFoundError:
            return None

    def _remove(self, step: int, name: str) -> None:
        with suppress(FileNotFoundError):
            self._ask(self.address(step, name), "rm_file", self._path(step, name))

    def _retract(self, step: int, name: str, record: FileRecord) -> None:
        if self._stat(step, MANIFEST_FILE) is None:
            return
        try:
            named = self.manifest(step).files.get(name)
        except InputError:
            named = None
        if named != record:
            log.warning("%s: was another checkpoint of this step; it is written anew", self.address(step))
            self._remove(step, MANIFEST_FILE)

    def _check_whole(self, step: int, data: bytes, path: str) -> None:
        manifest = _parse_manifest(data, step, path)
        url = self.address(step)
        found = {entry["name"].rpartition("/")[2]: entry["size"] for entry in self._list(self._path(step), url)}
        for name, record in manifest.files.items():
            if found.get(name) != record.size:
                what = "is not there" if name not in found else f"has {found[name]} bytes, not {record.size}"
                raise StoreError(f"{url}: {name}: {what}; the manifest waits until it is", transient=False)

    def _sweep(self, step: int, *name: str) -> None:
        """Give up what a killed process left of a transfer to the file ``name``, or to any of the step."""
        url, path = self.address(step, *name), self._path(step, *name)
        with suppress(StoreError, FileNotFoundError):  # nothing of it can be read under a file's name
            if self._s3:
                where = self._object(path)
                prefix = where["Key"] if name else where["Key"] + "/"
                found = self._once(url, "call_s3", "list_multipart_uploads", Bucket=where["Bucket"], Prefix=prefix)
                for upload in found.get("Uploads", []):
                    if not name or upload["Key"] == where["Key"]:
                        left = {"Bucket": where["Bucket"], "Key": upload["Key"], "UploadId": upload["UploadId"]}
                        self._once(url, "call_s3", "abort_multipart_upload", **left)
            elif self._local and name:
                for entry in self._list(self._path(step), url):
                    beside = entry["name"].rpartition("/")[2]
                    if storage.is_temporary(beside) and beside.startswith(f".{name[0]}."):
                        self._once(url, "rm_file", entry["name"])

    def _write(self, url: str, pieces: Iterable[bytes]) -> None:
        try:
            with storage.publish(url) as file:
                for data in pieces:
                    file.write(data)
        except QuernError:  # of the pieces
            raise
        except Exception as error:
            raise _translated(error, url) from error

    def _put_s3(self, step: int, name: str, pieces: _Pieces, record: FileRecord) -> None:
        url, where = self.address(step, name), self._object(self._path(step, name))
        metadata = {"sha256": record.sha256}
        if record.size <= _PART_BYTES:
            data = b"".join(pieces)
            self._ask(url, "call_s3", "put_object", **where, Body=data, Metadata=metadata)
            return
        begun = self._ask(url, "call_s3", "create_multipart_upload", **where, Metadata=metadata)
        where["UploadId"] = begun["UploadId"]

        def send(part: tuple[int, bytes], stopped: Callable[[], bool]) -> dict[str, Any]:
            number, data = part
            options = {**where, "PartNumber": number, "Body": data}
            sent = self.backoff.run(lambda: self._once(url, "call_s3", "upload_part", **options), stopped)
            return {"PartNumber": number, "ETag": sent["ETag"]}

        try:
            parts = list(_in_order(send, enumerate(pieces, 1), self.width))
            try:
                self._ask(url, "call_s3", "complete_multipart_upload", **where, MultipartUpload={"Parts": parts})
            except FileNotFoundError:  # no such upload: completed by a try whose answer was lost, or aborted
                if not self.has(step, name, record):
                    raise
        except BaseException as error:
            try:
                self._once(url, "call_s3", "abort_multipart_upload", **where)
            except (StoreError, FileNotFoundError) as failure:
                log.warning("%s: what was sent stays until the next try (%s)", url, failure)
            if isinstance(error, FileNotFoundError):
                raise StoreError(f"{url}: the upload was aborted by somebody else", transient=True) from error
            raise


class _Pieces:
    """A local file in pieces of bounded size. After the last one the iteration fails if the bytes are not those of
    ``record``, so a consumer that commits after the end commits nothing wrong."""

    def __init__(self, path: str, record: FileRecord, rate: Rate | None, progress: Callable[[int], object]) -> None:
        self.path, self.record, self.rate, self.progress = path, record, rate, progress

    def __iter__(self) -> Iterator[bytes]:
        length = max(_PART_BYTES, -(-self.record.size // _MAX_PARTS))
        state, size = hashlib.sha256(), 0
        try:
            with open(self.path, "rb") as file:
                while data := file.read(length):
                    size += len(data)
                    if size > self.record.size:
                        break
                    state.update(data)
                    self.progress(len(data))
                    if self.rate is not None:
                        self.rate.take(len(data))
                    yield data
        except OSError as error:
            raise SourceError(f"{self.path}: cannot be read ({error.strerror or error}); not uploaded") from None
        if size != self.record.size:
            more = "more" if size > self.record.size else f"{size}"
            raise SourceError(f"{self.path}: expected {self.record.size} bytes, as saved, has {more}; not uploaded")
        if state.hexdigest() != self.record.sha256:
            raise SourceError(
                f"{self.path}: expected SHA-256 {self.record.sha256}, as saved, has {state.hexdigest()}; not uploaded"
            )


def _in_order(action: Callable[[S, Callable[[], bool]], T], items: Iterable[S], width: int) -> Iterator[T]:
    """Results of ``action`` for each item in turn, with up to ``width`` under way; after a failure none goes on."""
    stop = threading.Event()
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(width, thread_name_prefix="store") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(action, item, stop.is_set))
                del item  # its bytes live no longer than its request
                if len(waiting) == width:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            stop.set()
            for future in waiting:
                future.cancel()


def _sidecar(name: str) -> str:
    return f".{name}.sha256"


def _parse_manifest(data: bytes, step: int, name: str) -> Manifest:
    if len(data) > _MAX_MANIFEST_BYTES:
        raise InputError(f"{name}: expected at most {_MAX_MANIFEST_BYTES} bytes, has {len(data)}")
    try:
        manifest = Manifest.from_dict(json.loads(data), name=name)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not valid JSON ({error})") from None
    if manifest.step != step:
        raise InputError(f"{name}: step: expected {step}, as the folder's name says, got {manifest.step}")
    return manifest


def _translated(error: Exception, url: str) -> StoreError | FileNotFoundError:
    """What a store's error means, told from the answer's code, else from its type."""
    code, status = "", 0
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        response = getattr(link, "response", None)
        if isinstance(response, dict) and not code:
            code = str(response.get("Error", {}).get("Code", ""))
            status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    if not code:  # another store's, or none that answered
        said = [getattr(error, name, None) for name in ("status", "code", "status_code")]
        status = next((number for number in said if isinstance(number, int)), 0)
    text = " ".join(str(error).split())[:300] or type(error).__name__
    what = f"{url}: {f'{code}: ' if code else ''}{text}"
    number = error.errno if isinstance(error, OSError) else None
    names = {cls.__name__ for cls in type(error).__mro__}
    if code == "NoSuchBucket":
        return StoreError(f"{what}; create the bucket or correct checkpoint.store", transient=False)
    if code in _PASSING or status in (408, 425, 429) or status >= 500:
        return StoreError(f"{what}; the store is overloaded or failing", transient=True)
    if code in _CREDENTIALS or status in (401, 403) or isinstance(error, PermissionError) or number in _REFUSED:
        return StoreError(f"{what}; {_RENEW}", transient=False)
    if names & {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"}:
        return StoreError(f"{what}; {_RENEW}", transient=False)
    if isinstance(error, FileNotFoundError):
        return error
    if names & _NETWORK:
        return StoreError(f"{what}; the store cannot be reached", transient=True)
    if 400 <= status < 500:  # S3 answers an expired token with 400, to HEAD without saying so
        return StoreError(f"{what}; {_RENEW}, or correct checkpoint.store", transient=False)
    if number in _WRONG or isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError):
        return StoreError(f"{what}; correct checkpoint.store", transient=False)
    if number in _FULL:
        return StoreError(f"{what}; make room there", transient=False)
    if isinstance(error, OSError):
        return StoreError(f"{what}; the store cannot be reached", transient=True)
    return StoreError(f"{type(error).__name__}: {what}; correct checkpoint.store or its options", transient=False)


#: Errors of aiohttp, botocore and fsspec that are no OSError and mean that an answer did not come, or not whole.
_NETWORK = {
    "ClientConnectionError", "ClientPayloadError", "ServerDisconnectedError", "HTTPClientError",
    "ConnectionError", "IncompleteReadError", "IncompleteRead", "ReadTimeoutError", "ResponseStreamingError",
    "ResponseParserError", "TimeoutError", "FSTimeoutError", "HTTPException", "ContentLengthError",
    "TransferEncodingError", "FlexibleChecksumError",
}  # fmt: skip


def prune_store(store: Store, keep: Collection[int]) -> list[int]:
    """Remove checkpoints whose steps are not in ``keep``; returns the steps of what was removed, ascending.

    The newest checkpoint stays in any case. What has no manifest is removed only if it is older than that one: it is
    left of an upload that was dropped or of a removal that was cut. ``keep`` must name the steps that are being
    uploaded.
    """
    whole = set(store.checkpoints())
    if not whole:
        return []
    newest = max(whole)
    removed = []
    for step in store.begun():
        if step not in keep and step < newest:
            store.remove(step)
            removed.append(step)
    return removed
