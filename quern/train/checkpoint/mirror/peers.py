"""HTTP client for checkpoint files on other nodes' disks; :mod:`.peer_server` is the server.

A file is hashed while it moves, and only bytes with the SHA-256 of its record get its name, here and there. A transfer
that breaks goes on where it was, a transfer with wrong bytes begins anew, both a bounded number of times. Imports no
torch.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import queue
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

from quern import storage
from quern.closes import Closes
from quern.errors import InputError, QuernError
from quern.safe_path import module
from quern.train.checkpoint.format.manifest import FileRecord
from quern.train.checkpoint.mirror.peer_files import CHUNK, FOLDER, SHA256, is_file_name
from quern.train.checkpoint.store.rate import RateLimit
from quern.train.processes.spawn import Child

__all__ = ["Peer", "PeerError", "ServerProcess", "new_token"]

#: Bytes a second at which the other side at least hashes what it has, before it answers.
HASH_BYTES_PER_S = 100e6
READ = 256 << 10
MAX_LISTING = 16 << 20
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 15.0
#: Answers that another attempt may change: slow or broken body, another sender, wrong bytes, busy, a disk's error.
_PASSING = (400, 408, 409, 422, 500, 503)

T = TypeVar("T")


class PeerError(QuernError):
    """A peer does not have a file, or it could not be moved; the message names the peer and the file."""


class _AgainError(Exception):
    """This attempt failed; another may not."""


def new_token() -> str:
    """256 random bits as 64 hex digits: what a run's servers and clients share."""
    return secrets.token_hex(32)


@dataclass(frozen=True)
class Peer:
    """The server of one node. Every method raises :class:`PeerError` after the last attempt, or at once when another
    attempt would change nothing; the longest wait of an attempt is ``timeout_s`` a MiB, besides that for a hash.

    ``limit`` holds for the bytes of files and may be shared; a peer gives up on a client that moves less than a MiB
    in its own timeout.
    """

    host: str
    port: int
    token: str = field(repr=False)
    timeout_s: float = 60.0
    connect_timeout_s: float = 5.0
    attempts: int = 5
    limit: RateLimit = field(default_factory=lambda: RateLimit(None))
    sleep: Callable[[float], object] = time.sleep

    def files(self, folder: str) -> dict[str, int]:
        """Size in bytes by name of the files in a folder there; empty when there is no such folder."""

        def attempt() -> Any:
            with self._request("GET", f"/{folder}/") as response:
                return {} if response.status == 404 else self._read_json(response)

        _check(folder)
        found = self._retry(folder, attempt)
        if not isinstance(found, dict) or not all(
            is_file_name(name) and isinstance(size, int) and size >= 0 for name, size in found.items()
        ):
            raise PeerError(f"{self}: {folder}: expected sizes of files by name")
        return found

    def fetch(self, folder: str, name: str, record: FileRecord, into: str) -> None:
        """Copy a file into the local folder ``into``, where it appears whole, synced and with the record's SHA-256, or
        not at all.

        Raises:
            PeerError: it is not there, is another file, or the attempts ran out.
            QuernError: it cannot be written here.
        """
        _check(folder, name)
        path = os.path.join(into, name)
        try:
            with storage.publish(path) as file:
                download = _Download(self, folder, name, record, path, file)
                self._retry(f"{folder}/{name}", download.attempt)
        except OSError as error:
            raise QuernError(f"{path}: cannot be written ({error.strerror or error})") from None

    def send(self, folder: str, name: str, path: str, record: FileRecord) -> None:
        """Copy the local file ``path`` there; nothing is sent when the peer has it already.

        Raises:
            InputError: the file here is not the record's.
            PeerError: the peer cannot take it, or the attempts ran out.
        """
        _check(folder, name)
        with storage.reading(path), open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.size:
                raise InputError(f"{path}: expected {record.size} bytes, has {size}")
            self._retry(f"{folder}/{name}", lambda: self._upload(folder, name, path, file, record))

    def _upload(self, folder: str, name: str, path: str, file: IO[bytes], record: FileRecord) -> None:
        patience_s = self.timeout_s + record.size / HASH_BYTES_PER_S
        query = f"/{folder}/{name}?partial={record.sha256}"
        with self._request("GET", query, patience_s=patience_s) as response:
            state = self._read_json(response)
        if not isinstance(state, dict) or not isinstance(state.get("bytes"), int) or state["bytes"] < 0:
            raise _AgainError("expected how much of the file is there")
        if state.get("standing") is True:
            return
        start = min(state["bytes"], max(0, record.size - 1))  # a range of no bytes cannot be written down
        headers = {"X-SHA256": record.sha256, "Content-Length": str(record.size - start)}
        if start:
            headers["Content-Range"] = f"bytes {start}-{record.size - 1}/{record.size}"
        with storage.reading(path):
            file.seek(start)

        def body(connection: http.client.HTTPConnection) -> None:
            left = record.size - start
            while left and not _readable(connection.sock):  # it answers early when it has the file or no room
                with storage.reading(path):  # a failure of the disk here is not taken for one of the network
                    chunk = file.read(min(CHUNK, left))
                if not chunk:
                    raise InputError(f"{path}: became shorter while it was sent")
                self.limit.take(len(chunk))
                connection.send(chunk)
                left -= len(chunk)

        with self._request("PUT", f"/{folder}/{name}", headers, body, patience_s=patience_s) as response:
            if response.status == 422:
                with storage.reading(path):
                    same = storage.sha256(path) == record.sha256
                if not same:
                    raise InputError(f"{path}: expected SHA-256 {record.sha256}, has another")
            self._expect(response, 200, 201)

    def _read_json(self, response: http.client.HTTPResponse) -> Any:
        self._expect(response, 200)
        data = response.read(MAX_LISTING + 1)
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise _AgainError(f"answered {len(data)} bytes that are no JSON, or too long a list") from None

    def _expect(self, response: http.client.HTTPResponse, *statuses: int) -> None:
        """Raises when the answer has another status: :class:`_AgainError` for one that may pass."""
        if response.status in statuses:
            return
        text = response.read(1000).decode("utf-8", "replace") if response.status >= 400 else ""
        reason = "".join(filter(str.isprintable, text)).strip() or response.reason
        if response.status in _PASSING:
            raise _AgainError(f"answered {response.status}: {reason}")
        raise PeerError(f"answered {response.status}: {reason}")

    @contextmanager
    def _request(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str] | None = None,
        body: Callable[[http.client.HTTPConnection], None] | None = None,
        patience_s: float | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.connect_timeout_s)
        try:
            connection.connect()
            connection.sock.settimeout(patience_s or self.timeout_s)
            connection.putrequest(method, target, skip_accept_encoding=True)
            for key, value in {"Authorization": f"Bearer {self.token}", **(headers or {})}.items():
                connection.putheader(key, value)
            connection.endheaders()
            if body is not None:
                with suppress(ConnectionError):  # its answer, when there is one, says why it stopped reading
                    body(connection)
            with connection.getresponse() as response:
                yield response
        finally:
            connection.close()

    def _retry(self, what: str, attempt: Callable[[], T]) -> T:
        """The result of the first attempt that succeeds. Between attempts it waits: 0.5 s, doubled each time, up to
        15 s, and of that a random part from a half up, so that the ranks of a node do not come back together."""
        last = ""
        for number in range(self.attempts):
            if number:
                wait_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** (number - 1))
                self.sleep(wait_s * (0.5 + secrets.randbelow(1 << 20) / (1 << 21)))
            try:
                return attempt()
            except PeerError as error:
                raise PeerError(f"{self}: {what}: {error}") from None
            except (_AgainError, OSError, http.client.HTTPException) as error:
                last = str(error) or type(error).__name__
        raise PeerError(f"{self}: {what}: given up after {self.attempts} attempts; the last one: {last}")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _check(folder: str, name: str | None = None) -> None:
    if not FOLDER.fullmatch(folder):
        raise InputError(f"folder: expected a checkpoint's, as step_00001000, got {folder!r}")
    if name is not None and not is_file_name(name):
        raise InputError(f"{folder}: {name!r}: expected a plain file name of letters, digits, '.', '_' and '-'")


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


class _Download:
    """One file on its way here: what has arrived and been hashed, through all attempts."""

    def __init__(self, peer: Peer, folder: str, name: str, record: FileRecord, path: str, file: IO[bytes]) -> None:
        self.peer, self.target, self.record, self.path, self.file = peer, f"/{folder}/{name}", record, path, file
        self.state, self.has = hashlib.sha256(), 0

    def attempt(self) -> None:
        """Resume reading where the last attempt broke."""
        headers = {"Range": f"bytes={self.has}-"} if self.has else {}
        with self.peer._request("GET", self.target, headers) as response:
            self.peer._expect(response, 200, 206)
            if response.status == 200 and self.has:  # all of it, whatever was asked for
                self._rewind()
            offered = self.has + (response.length or 0)
            if offered != self.record.size:
                raise PeerError(f"expected {self.record.size} bytes, the peer has {offered}")
            self._receive(response)
        if self.state.hexdigest() == self.record.sha256:
            return
        arrived = self.state.hexdigest()
        self._rewind()
        with self.peer._request(
            "HEAD", self.target, patience_s=self.peer.timeout_s + self.record.size / HASH_BYTES_PER_S
        ) as response:
            if response.status == 200 and response.getheader("X-SHA256") != self.record.sha256:
                raise PeerError(f"expected SHA-256 {self.record.sha256}, the peer's file has another")
        raise _AgainError(f"expected SHA-256 {self.record.sha256}, what arrived has {arrived}")

    def _receive(self, response: http.client.HTTPResponse) -> None:
        waited_s, moved = 0.0, 0
        while self.has < self.record.size:
            began = time.monotonic()
            data = response.read1(min(READ, self.record.size - self.has))
            if not data:
                raise _AgainError(f"the connection ended after {self.has} of {self.record.size} bytes")
            waited_s, moved = waited_s + time.monotonic() - began, moved + len(data)
            self.state.update(data)
            try:
                self.file.write(data)
            except OSError as error:
                raise QuernError(f"{self.path}: cannot be written ({error.strerror or error})") from None
            self.has += len(data)
            if moved >= CHUNK:
                waited_s, moved = 0.0, 0
            elif waited_s > self.peer.timeout_s:
                raise _AgainError(f"less than a MiB in {self.peer.timeout_s:g} s")
            self.peer.limit.take(len(data))

    def _rewind(self) -> None:
        self.state, self.has = hashlib.sha256(), 0
        try:
            self.file.seek(0)
            self.file.truncate()
        except OSError as error:
            raise QuernError(f"{self.path}: cannot be written ({error.strerror or error})") from None


class ServerProcess(Closes):
    """A :mod:`~quern.train.checkpoint.mirror.peer_server` over ``root``, in a process that ends with this one.

    Attributes:
        port: where it listens.

    Raises:
        QuernError: it did not start; it has said why on standard error.
    """

    def __init__(self, root: str, host: str, token: str, *, port: int = 0, start_timeout_s: float = 60.0) -> None:
        if not SHA256.fullmatch(token):
            raise InputError("token: expected 64 hex digits")
        command = module("quern.train.checkpoint.mirror.peer_server")
        command += ["--root", root, "--host", host, "--port", str(port)]
        self._process = Child(command)
        self._process.send(token)
        try:
            self.port = int(json.loads(self._process.receive(start_timeout_s) or "")["port"])
        except (queue.Empty, ValueError):
            self.close()
            raise QuernError(f"{root}: the server of this node's checkpoint files did not start") from None

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.status() is None

    def close(self) -> None:
        """End it."""
        self._process.end(5.0)
