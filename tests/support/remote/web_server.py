"""Files over HTTP with ranges and ETags, on loopback, with faults: a server such as Common Crawl's on a bad day."""

from __future__ import annotations

import hashlib
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Fault:
    """What happens to requests of ``method`` for paths with ``text`` in them, the next ``times`` times.

    ``what``: a status (``503``, ``429``, ``403``…), with ``retry_after`` if that is set; ``cut`` ends the connection at
    a random byte of the body; ``slow`` sends about 1.5 MB/s; ``hang up`` answers nothing at all; ``hold`` answers when
    ``Web.let_go`` is set.
    """

    what: str
    method: str = "GET"
    text: str = ""
    times: int = 1
    retry_after: str = ""


class Web(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.seen: list[tuple[str, str, str, str]] = []  # method, path, Range, fault
        self.ranges = self.etags = self.lengths = True
        self.modified = ""
        self.lock = threading.Lock()
        self.let_go = threading.Event()
        self.under_way = self.most_under_way = 0
        self.draw = random.Random(3)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def count(self, method: str, text: str = "") -> int:
        with self.lock:
            return sum(1 for seen in self.seen if seen[0] == method and text in seen[1])

    def struck(self, what: str) -> int:
        with self.lock:
            return sum(1 for seen in self.seen if seen[3] == what)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nothing."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer's body waits 40 ms for the client's delayed acknowledgement
    server: Web

    def do_GET(self) -> None:
        server = self.server
        with server.lock:
            server.under_way += 1
            server.most_under_way = max(server.most_under_way, server.under_way)
            hit = next((f for f in server.faults if f.times and f.method == self.command and f.text in self.path), None)
            if hit is not None:
                hit.times -= 1
            server.seen.append((self.command, self.path, self.headers.get("Range", ""), hit.what if hit else ""))
        try:
            self.reply(hit)
        finally:
            with server.lock:
                server.under_way -= 1

    do_HEAD = do_GET

    def reply(self, hit: Fault | None) -> None:
        what = hit.what if hit else ""
        if what == "hang up":
            self.close_connection = True
            return
        if what == "hold":
            self.server.let_go.wait()
        if hit is not None and what.isdecimal():
            self.start(int(what), {"Retry-After": hit.retry_after} if hit.retry_after else {}, 0)
            return
        data = self.server.files.get(self.path.lstrip("/"))
        if data is None:
            self.start(404, {}, 0)
            return
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        headers = {"ETag": etag} if self.server.etags else {}
        if self.server.modified:
            headers["Last-Modified"] = self.server.modified
        if self.headers.get("If-Match", etag) != etag:
            self.start(412, headers, 0)
            return
        status, wanted = 200, re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and self.server.ranges:
            first, last = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
            if first >= len(data):
                self.start(416, headers, 0)
                return
            headers["Content-Range"], status = f"bytes {first}-{last}/{len(data)}", 206
            data = data[first : last + 1]
        self.start(status, headers, len(data) if self.command == "GET" or self.server.lengths else None)
        if self.command == "HEAD":
            return
        if what == "cut":
            self.wfile.write(data[: self.server.draw.randrange(len(data))])
            self.close_connection = True
        elif what == "slow":
            for start in range(0, len(data), 16 << 10):
                self.wfile.write(data[start : start + (16 << 10)])
                time.sleep(0.01)
        else:
            self.wfile.write(data)

    def start(self, status: int, headers: dict[str, str], length: int | None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def serve() -> Iterator[Web]:
    server = Web()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
