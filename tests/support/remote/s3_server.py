"""An S3 server on loopback (moto), and an HTTP proxy in front of it that breaks what tests want broken.

The code under test talks to the proxy; tests look at the server itself, with boto3.
"""

from __future__ import annotations

import functools
import http.client
import logging
import random
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock

import boto3
import botocore.session
from botocore.config import Config
from moto.server import ThreadedMotoServer
from werkzeug.serving import WSGIRequestHandler

ERROR = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{0}</Code><Message>{0} says the proxy</Message></Error>'
STATUS = {"SlowDown": 503, "InternalError": 500, "ExpiredToken": 403, "InvalidAccessKeyId": 403, "NoSuchUpload": 404}
WAIT_S = 30  # nothing here waits longer
#: Every session of botocore reads the model of S3, which takes a third of a second.
LOADER = cache(botocore.session.create_loader)


@dataclass
class Fault:
    """What happens to requests of ``method`` whose target holds ``text``, the next ``times`` times after ``skip``.

    ``what``: an error code of S3; ``cut answer`` and ``cut request`` end the connection in the middle of a body;
    ``lose answer`` carries the request out and says nothing; ``flip`` turns one bit of the answer's body over;
    ``stall`` stops in the middle of the answer, before one without a body; ``drip`` sends the answer byte by byte,
    ``slow`` at about 1.5 MB/s; ``cut anywhere`` ends the connection at a random byte of the answer's body.
    """

    what: str
    method: str
    text: str = ""
    times: int = 1
    skip: int = 0
    only_key: str = ""
    """Only requests signed with this access key."""


class Proxy(ThreadingHTTPServer):
    """Forwards to the server at ``port``; ``faults`` may be changed at any time."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behind = port
        self.faults: list[Fault] = []
        self.seen: list[tuple[str, str, str]] = []  # method, target, fault or ""
        self.ranges: list[tuple[str, str, str]] = []  # target, Range and If-Match of each GET
        self.draw = random.Random(5)
        self.storm: tuple[float, tuple[str, ...]] = (0.0, ())  # a share of all requests meets one of these
        self.under_way = self.most_under_way = 0
        self.ended = threading.Event()
        self.lock = threading.Lock()
        self.delay_s = 0.0  # before each PUT
        self.endured = 0  # stalls and drips that nobody had broken off after WAIT_S

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fault(self, method: str, target: str, signed: str) -> str:
        with self.lock:
            what = ""
            for fault in self.faults:
                if fault.method != method or fault.text not in target or fault.only_key not in signed:
                    continue
                if fault.skip:
                    fault.skip -= 1
                elif fault.times:
                    fault.times -= 1
                    what = fault.what
                    break
            if not what and self.draw.random() < self.storm[0]:
                what = self.draw.choice(self.storm[1])
            self.seen.append((method, target, what))
            return what

    def count(self, method: str, text: str = "") -> int:
        with self.lock:
            return sum(1 for seen in self.seen if seen[0] == method and text in seen[1])

    def struck(self, what: str) -> int:
        with self.lock:
            return sum(1 for seen in self.seen if seen[2] == what)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is what some tests want."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = WAIT_S
    disable_nagle_algorithm = True  # else each answer's body waits 40 ms for the client's delayed acknowledgement
    server: Proxy

    def forward(self) -> None:
        with self.server.lock:
            self.server.under_way += 1
            self.server.most_under_way = max(self.server.most_under_way, self.server.under_way)
        try:
            self.passed_on()
        finally:
            with self.server.lock:
                self.server.under_way -= 1

    def passed_on(self) -> None:
        what = self.server.fault(self.command, self.path, self.headers.get("Authorization", ""))
        if self.command == "GET":
            condition = (self.headers.get("Range", ""), self.headers.get("If-Match", ""))
            self.server.ranges.append((self.path, *condition))
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        if what == "cut request":
            self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
            self.close_connection = True
            return
        body = self.body()
        if self.command == "PUT" and self.server.delay_s:
            self.server.ended.wait(self.server.delay_s)
        if what in STATUS:
            self.answer(STATUS[what], {"Content-Type": "application/xml"}, ERROR.format(what).encode())
            return
        behind = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=WAIT_S)
        headers = {
            name: value for name, value in self.headers.items() if name.lower() not in ("transfer-encoding", "expect")
        }
        headers["Content-Length"] = str(len(body))
        behind.request(self.command, self.path, body, headers)
        answer = behind.getresponse()
        data = answer.read()
        behind.close()
        kept = {
            name: value
            for name, value in answer.getheaders()
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server")
        }
        if what == "lose answer":
            self.close_connection = True
            return
        if what == "flip":
            data = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.answer(answer.status, kept, data, what, length)

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def answer(
        self, status: int, headers: dict[str, str], data: bytes, what: str = "", length: str | None = None
    ) -> None:
        if what == "stall" and not data:  # whose head alone would be a whole answer
            self.server.endured += not self.server.ended.wait(WAIT_S)
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if what == "cut anywhere":
            self.wfile.write(data[: self.server.draw.randrange(len(data))] if data else b"")
            self.close_connection = True
        elif what == "slow":
            for start in range(0, len(data), 16 << 10):
                self.wfile.write(data[start : start + (16 << 10)])
                if self.server.ended.wait(0.01):
                    break
        elif what in ("cut answer", "stall"):
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            if what == "stall":
                self.server.endured += not self.server.ended.wait(WAIT_S)
            self.close_connection = True
        elif what == "drip":
            start = time.monotonic()
            for byte in data:
                self.wfile.write(bytes([byte]))
                if self.server.ended.wait(0.05):
                    break
                if time.monotonic() - start > WAIT_S:
                    self.server.endured += 1
                    break
            self.close_connection = True
        else:
            self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward


@dataclass
class Server:
    """A bucket of its own, the proxy before it, and boto3 beside the proxy."""

    proxy: Proxy
    boto: Any
    bucket: str

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/runs/one"

    def environment(self, **more: str) -> dict[str, str]:
        """What makes S3 clients talk to the proxy."""
        return {
            "AWS_ENDPOINT_URL": self.proxy.url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_CONFIG_FILE": "/nonexistent", "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **more,
        }  # fmt: skip

    def objects(self) -> dict[str, int]:
        """Sizes of all objects by name below the store's address."""
        found = {}
        for page in self.boto.get_paginator("list_objects_v2").paginate(Bucket=self.bucket):
            for entry in page.get("Contents", []):
                found[entry["Key"].removeprefix("runs/one/")] = entry["Size"]
        return found

    def read(self, name: str) -> bytes:
        return self.boto.get_object(Bucket=self.bucket, Key=f"runs/one/{name}")["Body"].read()

    def write(self, name: str, data: bytes, **metadata: str) -> None:
        self.boto.put_object(Bucket=self.bucket, Key=f"runs/one/{name}", Body=data, Metadata=metadata)

    def uploads(self) -> list[str]:
        """Names of multipart uploads that are neither completed nor aborted."""
        found = self.boto.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])
        return [upload["Key"].removeprefix("runs/one/") for upload in found]


def one_at_a_time(server: Any) -> None:
    """moto computes an object's ETag from the file that another thread answers from: that answer may be empty."""
    app, lock = server.app, threading.Lock()

    def locked(environ: Any, start_response: Any) -> Any:
        with lock:
            return app(environ, start_response)

    server.app = locked


@contextmanager
def serve() -> Iterator[int]:
    """The port of an S3 server, which ends with the block.

    All sessions within it read botocore's models of the services once: that is most of what a new client takes.
    """
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    WSGIRequestHandler.disable_nagle_algorithm = True
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    one_at_a_time(server._server)
    loader = functools.cache(botocore.session.create_loader)
    try:
        with mock.patch.object(botocore.session, "create_loader", loader):
            yield server.get_host_and_port()[1]
    finally:
        server.stop()


@cache
def client(port: int) -> Any:
    """boto3 beside the proxies: one for all buckets of a server."""
    return boto3.client(
        "s3", endpoint_url=f"http://127.0.0.1:{port}", aws_access_key_id="test", aws_secret_access_key="test",
        region_name="us-east-1", config=Config(proxies={}, request_checksum_calculation="when_required"),
    )  # fmt: skip


@contextmanager
def bucket(port: int) -> Iterator[Server]:
    """A new bucket, with a proxy of its own."""
    with mock.patch.object(botocore.session, "create_loader", LOADER):
        yield from _bucket(port)


def _bucket(port: int) -> Iterator[Server]:
    boto = client(port)
    name = f"b-{uuid.uuid4().hex[:12]}"
    boto.create_bucket(Bucket=name)
    proxy = Proxy(port)
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield Server(proxy, boto, name)
    finally:
        proxy.ended.set()
        proxy.shutdown()
        proxy.server_close()
        thread.join(10)
