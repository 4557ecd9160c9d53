"""HTTP/1.1 server through which other nodes read and write the checkpoint files on a node's disk.

One process a node: ``python -m quern.train.checkpoint.mirror.peer_server --root ROOT --host H --port P``. It reads the
token, 64 hex digits, as the first line of its standard input, where no other user sees it, prints ``{"port": n}``, and
ends when its standard input closes: with its trainer. The token keeps strangers out; it travels in clear, so the
network between the nodes is trusted not to listen. What the bytes are is never taken on trust: every file in is
compared with its SHA-256 before it gets its name, and the receiver of a file does the same.

============================================ =========================================================================
``GET /step_00001000/``                      JSON object, size by file
``GET /step_00001000/NAME``                  the file; ``Range: bytes=a-b`` for a part
``HEAD /step_00001000/NAME``                 its size, and ``X-SHA256``, for which the file is read once
``GET /step_00001000/NAME?partial=SHA256``   JSON: ``standing``, whether this very file is here; ``bytes`` of it here
``PUT /step_00001000/NAME``                  takes a file with ``X-SHA256``; ``Content-Range: bytes a-b/size`` goes on
============================================ =========================================================================

A file that comes in is handled as :mod:`.peer_files` says. Every connection serves one request.
It is given up when its head takes longer than 10 s or any MiB of a body longer than the timeout.
"""

from __future__ import annotations

import argparse
import hmac
import io
import json
import os
import re
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from quern.errors import InputError, QuernError
from quern.train.checkpoint.mirror.peer_files import CHUNK, FOLDER, SHA256, RefusedError, Root, is_file_name

__all__ = ["PeerServer", "main"]

#: Bytes of a request line with its headers.
MAX_HEAD = 16 << 10
HEAD_TIMEOUT_S = 10.0
#: Connections without a token so far; each takes a thread and a descriptor for at most :data:`HEAD_TIMEOUT_S`.
MOST_UNKNOWN = 256
#: How long what a refused sender has under way is read and dropped, so that it sees why it was refused.
LINGER_S = 2.0

_TARGET = re.compile(r"/(?P<folder>[^/?]+)/(?:(?P<name>[^/?]+)(?:\?partial=(?P<partial>[^/?]+))?)?")
_RANGE = re.compile(r"bytes=(?:(?P<start>[0-9]{1,18})-(?P<last>[0-9]{1,18})?|-(?P<suffix>[0-9]{1,18}))")
_CONTENT_RANGE = re.compile(r"bytes (?P<start>[0-9]{1,18})-(?P<last>[0-9]{1,18})/(?P<size>[0-9]{1,18})")
_LENGTH = re.compile(r"[0-9]{1,18}")


class _Handler(BaseHTTPRequestHandler):
    """One request of one connection."""

    server: PeerServer
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"
    error_message_format = "%(message)s\n"
    error_content_type = "text/plain; charset=utf-8"

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.timeout_s)

    def handle(self) -> None:
        with suppress(TimeoutError, ConnectionError):
            head, self.beyond = self._read_head()
            self.rfile.close()
            self.rfile = io.BytesIO(head)
            self.raw_requestline = self.rfile.readline()
            self.close_connection = True
            if self.raw_requestline and self.parse_request():
                try:
                    self._check_token()
                    with self.server.served(self.connection):
                        self._answer()
                except RefusedError as refusal:
                    self._reply(refusal.status, refusal.text.encode() + b"\n", refusal.headers)
                    if self.command == "PUT" and refusal.status != 401:
                        self._linger()

    def _read_head(self) -> tuple[bytes, bytes]:
        """The request line and headers, and what came with them of the body; empty when the client went away."""
        deadline = time.monotonic() + min(HEAD_TIMEOUT_S, self.server.timeout_s)
        data = b""
        while b"\r\n\r\n" not in data:
            if len(data) >= MAX_HEAD:
                self.command, self.requestline, self.request_version = "GET", "", "HTTP/1.1"
                self._reply(431, b"request line and headers: expected at most 16 KiB\n")
                return b"", b""
            self._wait_until(deadline)
            more = self.connection.recv(MAX_HEAD - len(data))
            if not more:
                return b"", b""
            data += more
        end = data.index(b"\r\n\r\n") + 4
        return data[:end], data[end:]

    def _wait_until(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.connection.settimeout(left)

    def _check_token(self) -> None:
        given = self.headers.get_all("Authorization", [])
        expected = f"Bearer {self.server.token}".encode()
        if len(given) != 1 or not hmac.compare_digest(given[0].encode("latin-1", "replace"), expected):
            raise RefusedError(401, "expected this run's token", {"WWW-Authenticate": "Bearer"})

    def _answer(self) -> None:
        if self.command not in ("GET", "HEAD", "PUT"):
            raise RefusedError(405, "expected GET, HEAD or PUT", {"Allow": "GET, HEAD, PUT"})
        # ``path`` is not used: the standard library makes one slash of several at its beginning.
        match = _TARGET.fullmatch(self.requestline.split()[1])
        folder, name, partial = match.group("folder", "name", "partial") if match else ("", None, None)
        if (
            not FOLDER.fullmatch(folder)
            or (name is not None and not is_file_name(name))
            or (partial is not None and not SHA256.fullmatch(partial))
        ):
            raise RefusedError(404, "expected /step_00001000/ or /step_00001000/file")
        root = self.server.files
        if self.command == "PUT":
            if name is None or partial is not None:
                raise RefusedError(405, "expected a file's path", {"Allow": "GET, HEAD"})
            self._put(folder, name)
        elif name is None:
            self._reply_json(root.files(folder))
        elif partial is not None:
            size = root.standing(folder, name, partial)
            here = root.received(folder, name, partial) if size is None else size
            self._reply_json({"standing": size is not None, "bytes": here})
        elif self.command == "HEAD":
            size, sha256 = root.sha256(folder, name)
            self._reply(200, b"", {"Content-Length": str(size), "X-SHA256": sha256, "Accept-Ranges": "bytes"})
        else:
            self._get(folder, name)

    def _get(self, folder: str, name: str) -> None:
        with self.server.files.open(folder, name) as descriptor:
            size = os.fstat(descriptor).st_size
            asked = _RANGE.fullmatch(self.headers.get("Range", ""))
            start, stop = 0, size
            headers = {"Accept-Ranges": "bytes"}
            if asked:
                if asked["suffix"] is not None:
                    start = max(0, size - int(asked["suffix"]))
                else:
                    start, stop = int(asked["start"]), min(size, int(asked["last"] or size) + 1)
                if start >= stop:
                    raise RefusedError(416, f"{folder}/{name}: has {size} bytes", {"Content-Range": f"bytes */{size}"})
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            self._reply(206 if asked else 200, b"", headers | {"Content-Length": str(stop - start)})
            while start < stop and (chunk := os.pread(descriptor, min(CHUNK, stop - start), start)):
                self.connection.settimeout(self.server.timeout_s)  # of the whole call, not of each piece sent
                self.connection.sendall(chunk)
                start += len(chunk)

    def _put(self, folder: str, name: str) -> None:
        sha256, lengths = self.headers.get("X-SHA256", ""), self.headers.get_all("Content-Length", [])
        if "Transfer-Encoding" in self.headers or len(lengths) != 1 or not _LENGTH.fullmatch(lengths[0]):
            raise RefusedError(411, "expected one Content-Length and no Transfer-Encoding")
        if not SHA256.fullmatch(sha256):
            raise RefusedError(400, "X-SHA256: expected 64 hex digits")
        length = int(lengths[0])
        start, size = 0, length
        if "Content-Range" in self.headers:
            part = _CONTENT_RANGE.fullmatch(self.headers["Content-Range"])
            if (
                not part
                or int(part["last"]) + 1 != int(part["size"])
                or int(part["last"]) + 1 - int(part["start"]) != length
            ):
                raise RefusedError(400, "Content-Range: expected bytes from any to the last, as many as Content-Length")
            start, size = int(part["start"]), int(part["size"])
        if self.server.files.standing(folder, name, sha256) is not None:
            self._reply(200, b"")
            self._linger()
            return
        self.server.files.receive(folder, name, sha256, size=size, start=start, body=lambda: self._body(length))
        self._reply(201, b"")

    def _body(self, length: int) -> Iterator[memoryview]:
        """The body in chunks; what stops it early can be resumed."""
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        buffer = memoryview(bytearray(min(CHUNK, max(1, length))))
        left = length
        beyond, self.beyond = self.beyond[:length], b""
        while left:
            wanted = min(len(buffer), left)
            filled = min(wanted, len(beyond))
            buffer[:filled], beyond = beyond[:filled], beyond[filled:]
            deadline = time.monotonic() + self.server.timeout_s
            broken: RefusedError | None = None
            try:
                while filled < wanted:
                    self._wait_until(deadline)
                    got = self.connection.recv_into(buffer[filled:wanted])
                    if not got:
                        broken = RefusedError(400, f"body: expected {left - filled} bytes more", resumable=True)
                        break
                    filled += got
            except TimeoutError:
                broken = RefusedError(408, f"body: expected a MiB in {self.server.timeout_s:g} s", resumable=True)
            except ConnectionError:
                broken = RefusedError(400, "body: the connection broke", resumable=True)
            yield buffer[:filled]
            left -= filled
            if broken is not None:
                raise broken

    def handle_expect_100(self) -> bool:
        """Nothing yet: whether the body is wanted is known when the request has been looked at."""
        return True

    def _reply(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.connection.settimeout(self.server.timeout_s)
        self.send_response_only(status)
        for key, value in ({"Content-Length": str(len(body))} | dict(headers or {}) | {"Connection": "close"}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reply_json(self, value: Any) -> None:
        self._reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _linger(self) -> None:
        """Closing over unread bytes resets the connection, and the answer may be lost with it."""
        deadline = time.monotonic() + LINGER_S
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self._wait_until(deadline)
            while self.connection.recv(CHUNK):
                self._wait_until(deadline)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what went wrong is the answer, and the other side reports it."""


class PeerServer(ThreadingHTTPServer):
    """The server over ``root``, bound when made; ``serve_forever`` serves.

    Args:
        root: the folder served, made when missing.
        host, port: where it listens; port 0 for any that is free, see ``port``.
        token: 64 hex digits that every request must carry.
        timeout_s: seconds in which every MiB must move.
        connections: how many that have shown the token are served at once; more are answered 503. Beside them up to
            :data:`MOST_UNKNOWN` are heard that have not, so that these keep nobody out.

    Raises:
        InputError: a token of another form, or a timeout that is not above 0.
        QuernError: the address cannot be bound, or the folder not be made.
    """

    request_queue_size = 128

    def __init__(
        self, root: str, host: str, port: int, token: str, *, timeout_s: float = 60.0, connections: int = 64
    ) -> None:
        if not SHA256.fullmatch(token):
            raise InputError("token: expected 64 hex digits")
        if not timeout_s > 0:
            raise InputError(f"timeout: expected seconds > 0, got {timeout_s:g}")
        self.token, self.timeout_s = token, timeout_s
        self._slots = threading.BoundedSemaphore(connections)
        self._unknown: dict[socket.socket, str] = {}
        """Connections that have not shown the token, oldest first, with their address."""
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self.files = Root(root)
        except OSError as error:
            raise QuernError(f"{root}: cannot be served ({error.strerror or error})") from None
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise QuernError(f"{host}:{port}: cannot listen there ({error})") from None
        self.port = int(self.server_address[1])

    def server_bind(self) -> None:
        """Without the look-up of the host's name, which may take long and is not used."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hear a connection in a thread of its own. Of too many that have not shown the token, the oldest one of the
        address that has most of them is closed."""
        with self._lock:
            if len(self._unknown) >= MOST_UNKNOWN:
                most = Counter(self._unknown.values()).most_common(1)[0][0]
                oldest = next(other for other, address in self._unknown.items() if address == most)
                del self._unknown[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads an end
            self._unknown[request] = str(client_address[0])
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._forget(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """What the thread does."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, request: socket.socket) -> None:
        with self._lock:
            self._unknown.pop(request, None)

    @contextmanager
    def served(self, request: socket.socket) -> Iterator[None]:
        """A place among those that are served, for one that has shown the token.

        Raises:
            RefusedError: there is none.
        """
        if not self._slots.acquire(blocking=False):
            raise RefusedError(503, "busy")
        self._forget(request)
        try:
            yield
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One line; the server goes on."""
        print(f"peer server: {client_address[0]}: {sys.exc_info()[1]!r}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """What ``python -m quern.train.checkpoint.mirror.peer_server`` does; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m quern.train.checkpoint.mirror.peer_server")
    parser.add_argument("--root", required=True, help="the folder that holds step_00001000/ and so on")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds in which every MiB must move")
    options = parser.parse_args(arguments)
    parent = os.getppid()
    try:
        token = sys.stdin.buffer.readline(256).decode("ascii", "replace").strip()
        server = PeerServer(options.root, options.host, options.port, token, timeout_s=options.timeout)
    except QuernError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps({"port": server.port}), flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    # A process that the trainer forked may hold the other end of the pipe; the parent's number tells too.
    while os.getppid() == parent:
        if select.select([0], [], [], 1.0)[0] and not os.read(0, 4096):
            break
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
