"""Client for checkpoints in a store: lists, reads manifests, fetches, uploads and removes files.

The store is any fsspec URL. A checkpoint is ``URL/step_00001000/<file>`` and exists only if its ``manifest.json`` does:
that object is put last, and goes first when a checkpoint is removed or its step is written anew. A file appears under
its name whole or not at all, and only if the bytes read from the local disk still have the SHA-256 they were saved
with. That SHA-256 stays beside the object, as metadata on S3, elsewhere in a small file ``.<name>.sha256``, so that
what is there is told from what is missing without reading it.

Every request has a time limit, and is tried again as :mod:`quern.remote.retry` says.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress

from quern import storage
from quern.errors import InputError, QuernError
from quern.remote.concurrency import PART_BYTES, in_order
from quern.remote.connection import Connection
from quern.remote.retry import Backoff, StoreError
from quern.remote.upload import give_up_uploads, put_object, upload_parts
from quern.train.checkpoint.format.folder import HashedFile
from quern.train.checkpoint.format.manifest import MANIFEST_FILE, FileRecord, Manifest, checkpoint_name, step_of
from quern.train.checkpoint.store.errors import IncompleteError
from quern.train.checkpoint.store.pieces import FilePieces
from quern.train.checkpoint.store.rate import RateLimit
from quern.words import is_plain_name

__all__ = ["Store", "prune_store"]

log = logging.getLogger(__name__)

_MAX_MANIFEST_BYTES = 256 << 20


class Store:
    """The checkpoints below ``url``. Threads may share one.

    Attributes:
        takes_manifests: yes.

    Args:
        url: an fsspec URL with a folder or bucket; options such as an endpoint come from fsspec's configuration and
            the store's own environment variables.
        backoff: how a request is tried again.
        timeout_s: limit of one request, of at most 8 MiB unless a file has more than 80 GB.
        width: requests under way at a time in a transfer; memory is bounded by about ``width + 2`` requests.

    Raises:
        InputError: there is no such kind of store.
    """

    takes_manifests = True

    def __init__(self, url: str, *, backoff: Backoff | None = None, timeout_s: float = 120.0, width: int = 3) -> None:
        self._link = Connection(url, backoff or Backoff(), timeout_s, "correct checkpoint.store")
        self.url, self.backoff, self.width = self._link.url, self._link.backoff, width

    def renew(self) -> None:
        """Reconnect; credentials are read again from their source."""
        self._link.renew()

    def checkpoints(self) -> list[int]:
        """Steps of the checkpoints that are there, ascending; nothing of them is verified."""
        return [step for step in self.begun() if self._stat(step, MANIFEST_FILE) is not None]

    def begun(self) -> list[int]:
        """Steps of which any file exists, with or without a manifest, ascending."""
        names = (
            entry["name"].rstrip("/").rpartition("/")[2] for entry in self._link.entries(self._link.root, self.url)
        )
        return sorted({step for step in map(step_of, names) if step is not None})

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
        return _parse_manifest(self._link.ask(url, "cat_file", self._path(step, MANIFEST_FILE)), step, url)

    def note(self, name: str) -> bytes | None:
        """The small file ``name`` beside the checkpoints; None if it is not there."""
        try:
            return bytes(self._link.ask(f"{self.url}/{name}", "cat_file", self._beside(name)))
        except FileNotFoundError:
            return None

    def put_note(self, name: str, data: bytes) -> None:
        """Write, or replace, the small file ``name`` beside the checkpoints."""
        url = f"{self.url}/{name}"
        if self._link.is_s3:
            put_object(self._link, url, self._beside(name), data)
        else:
            self.backoff.run(lambda: self._write(url, [data]))

    def _beside(self, name: str) -> str:
        return f"{self._link.root.rstrip('/')}/{name}"

    def has(self, step: int, name: str, record: FileRecord) -> bool:
        """Whether the file is there with the size and SHA-256 of ``record``; the bytes are not read."""
        found = self._stat(step, name)
        if found is None or found[0] != record.size:
            return False
        if self._link.is_s3:
            return found[1] == record.sha256
        url = self.address(step, name)
        try:
            said = json.loads(self._link.ask(url, "cat_file", self._path(step, _sidecar(name))))
        except (FileNotFoundError, ValueError, RecursionError):
            return False
        return bool(said == {"sha256": record.sha256, "size": record.size})

    def put(
        self,
        step: int,
        name: str,
        path: str,
        record: FileRecord,
        rate: RateLimit | None = None,
        progress: Callable[[int], object] = lambda n: None,
    ) -> None:
        """Put the local file ``path`` under ``name``, replacing what is there; it appears whole or not at all.

        The manifest goes in only if every file it names is there with its size and SHA-256. Putting any other file
        first takes away a manifest that does not name it with this ``record``: the step is being written anew. For the
        rest see :class:`~quern.train.checkpoint.tiers.target.Target`.
        """
        pieces = FilePieces(path, record, rate, progress)
        if name == MANIFEST_FILE:
            self._check_whole(step, b"".join(FilePieces(path, record, None, lambda n: None)), path)
        else:
            self._retract(step, name, record)
        url, target = self.address(step, name), self._path(step, name)
        self._sweep(step, name)
        if self._link.is_s3:
            self._put_s3(step, name, pieces, record)
            return
        sidecar = _sidecar(name)
        self._remove(step, sidecar)
        if self._link.is_local or record.size > PART_BYTES:
            self.backoff.run(lambda: self._write(url, pieces))
        else:
            data = b"".join(pieces)
            self._link.ask(url, "pipe_file", target, data)
        proof = json.dumps({"sha256": record.sha256, "size": record.size}).encode()
        self.backoff.run(lambda: self._write(self.address(step, sidecar), [proof]))

    def fetch(self, step: int, name: str, record: FileRecord, into: str, rate: RateLimit | None = None) -> str:
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

    def _download(self, step: int, name: str, record: FileRecord, to: str, rate: RateLimit | None) -> str:
        url, path, found = self.address(step, name), self._path(step, name), self._stat(step, name)
        if found is None:
            raise StoreError(f"{url}: no such file", transient=False)
        size = found[0]
        if size != record.size:
            raise StoreError(f"{url}: expected {record.size} bytes, has {size}", transient=False)

        def read(start: int, stopped: Callable[[], bool]) -> bytes:
            end = min(start + PART_BYTES, size)
            return self.backoff.run(lambda: self._read(url, path, start, end), stopped)

        with HashedFile(to, buffer_bytes=1 << 13) as file:
            for data in in_order(read, range(0, size, PART_BYTES), self.width):
                if rate is not None:
                    rate.take(len(data))
                file.write(data)
            return file.finish().sha256

    def _read(self, url: str, path: str, start: int, end: int) -> bytes:
        try:
            data = bytes(self._link.once(url, "cat_file", path, start=start, end=end))
        except FileNotFoundError:
            raise StoreError(f"{url}: was removed while it was read", transient=False) from None
        if len(data) != end - start:
            raise StoreError(f"{url}: got {len(data)} bytes of {end - start} at byte {start}", transient=True)
        return data

    def remove(self, step: int) -> None:
        """Remove what there is of a checkpoint, the manifest first: what is half removed does not exist."""
        self._remove(step, MANIFEST_FILE)
        folder, url = self._path(step), self.address(step)
        for entry in self._link.entries(folder, url):
            if entry["type"] == "file":
                with suppress(FileNotFoundError):
                    self._link.ask(url, "rm_file", entry["name"])
        if self._link.is_s3:
            self._sweep(step)
        else:
            with suppress(FileNotFoundError, StoreError, NotImplementedError):  # a store may have no folders
                self._link.once(url, "rmdir", folder)

    def address(self, step: int, *name: str) -> str:
        """The URL of a checkpoint, or of a file of it."""
        return "/".join((self.url, checkpoint_name(step), *name))

    def _path(self, step: int, *name: str) -> str:
        for part in name:
            if not is_plain_name(part):
                raise InputError(f"{self.address(step)}: {part!r}: expected the plain name of a file")
        return "/".join((self._link.root.rstrip("/"), checkpoint_name(step), *name))

    def _stat(self, step: int, name: str) -> tuple[int, str | None] | None:
        """Size of a file, and on S3 the SHA-256 it was put with; None if it is not there."""
        url, path = self.address(step, name), self._path(step, name)
        try:
            if self._link.is_s3:
                head = self._link.ask(url, "call_s3", "head_object", **self._link.locate(path))
                return head["ContentLength"], head.get("Metadata", {}).get("sha256")
            info = self._link.ask(url, "info", path)
            return (info["size"], None) if info["type"] == "file" else None
        except FileNotFoundError:
            return None

    def _remove(self, step: int, name: str) -> None:
        with suppress(FileNotFoundError):
            self._link.ask(self.address(step, name), "rm_file", self._path(step, name))

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
        found = {entry["name"].rpartition("/")[2]: entry["size"] for entry in self._link.entries(self._path(step), url)}
        for name, record in manifest.files.items():
            if found.get(name) != record.size:
                what = "is not there" if name not in found else f"has {found[name]} bytes, not {record.size}"
                raise IncompleteError(f"{url}: {name}: {what}; the manifest waits for it")

        def has(item: tuple[str, FileRecord], stopped: Callable[[], bool]) -> tuple[str, bool]:
            return item[0], self.has(step, *item)

        for name, right in in_order(has, manifest.files.items(), self.width):
            if not right:
                raise IncompleteError(f"{url}: {name}: is another checkpoint's; the manifest waits for its own")

    def _sweep(self, step: int, *name: str) -> None:
        """Give up what a killed process left of a transfer to the file ``name``, or to any of the step."""
        url, path = self.address(step, *name), self._path(step, *name)
        with suppress(StoreError, FileNotFoundError):  # nothing of it can be read under a file's name
            if self._link.is_s3:
                give_up_uploads(self._link, url, path, below=not name)
            elif self._link.is_local and name:
                for entry in self._link.entries(self._path(step), url):
                    beside = entry["name"].rpartition("/")[2]
                    if storage.is_temporary(beside) and beside.startswith((f".{name[0]}.", f".{_sidecar(name[0])}.")):
                        self._link.once(url, "rm_file", entry["name"])

    def _put_s3(self, step: int, name: str, pieces: FilePieces, record: FileRecord) -> None:
        url, path, metadata = self.address(step, name), self._path(step, name), {"sha256": record.sha256}
        if record.size <= PART_BYTES:
            put_object(self._link, url, path, b"".join(pieces), Metadata=metadata)
            return

        def stands() -> bool:
            return self.has(step, name, record)

        upload_parts(self._link, url, path, pieces, metadata, width=self.width, stands=stands)

    def _write(self, url: str, pieces: Iterable[bytes]) -> None:
        """Write a file once; it appears when all ``pieces`` have been taken, or not at all. Not for S3."""
        try:
            with storage.publish(url) as file:
                for data in pieces:
                    file.write(data)
        except QuernError:  # of the pieces
            raise
        except Exception as error:
            raise self._link.translated(error, url) from error


def _sidecar(name: str) -> str:
    return f".{name}.sha256"


def _parse_manifest(data: bytes, step: int, name: str) -> Manifest:
    if len(data) > _MAX_MANIFEST_BYTES:
        raise InputError(f"{name}: expected at most {_MAX_MANIFEST_BYTES} bytes, has {len(data)}")
    try:
        manifest = Manifest.from_dict(json.loads(data), name=name)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not valid JSON ({error})") from None
    manifest.check_step(step, name)
    return manifest


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
