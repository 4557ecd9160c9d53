"""An S3 server (moto) of its own process, and the connection to it, which can be cut.

    with store() as made:
        environment |= made.environment           # quern and Ray reach the server through the connection only
        made.put("in/0.warc.gz", data); made.connection.cut(4.0); made.files("run/")

What is looked at here goes round the connection.
"""

from __future__ import annotations

import hashlib
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import boto3
from botocore.config import Config

BUCKET = "chaos"
PATIENCE_S = 60
#: SO_LINGER with no time: closing sends a reset, and what was under way is lost.
RESET = struct.pack("ii", 1, 0)


class Connection:
    """A relay of TCP to ``port`` on loopback."""

    def __init__(self, port: int) -> None:
        self.behind = port
        self.severed = self.refused = 0
        """Connections whose request was without an answer when they were cut, and those begun while there was no way
        through. An idle connection is reset too, but nobody need notice."""
        self._open: set[socket.socket] = set()
        self._asked: set[socket.socket] = set()
        """The server's ends of those whose client spoke last."""
        self._cuts = 0
        self._lock = threading.Lock()
        self._closed_until = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> int:
        """Reset every connection, and each that is begun within ``seconds``; how many requests were under way."""
        with self._lock:
            self._cuts += 1
            self._closed_until = time.monotonic() + seconds
            cut, severed = self._open, len(self._asked)
            self._open, self._asked = set(), set()
            self.severed += severed
        for end in cut:
            _reset(end)
        return severed

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # the thread that accepts wakes
        self._listener.close()
        self.cut(0)

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return  # closed
            with self._lock:
                refused, cuts = time.monotonic() < self._closed_until, self._cuts
            try:
                far = None if refused else socket.create_connection(("127.0.0.1", self.behind))
            except OSError:
                far = None
            if far is None:
                self.refused += 1
                _reset(near)
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                late = cuts != self._cuts  # cut while it was made
                if late:
                    self.refused += 1
                else:
                    self._open |= {near, far}
            if late:
                _reset(near)
                _reset(far)
                continue
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pass_on, args=(source, target, far), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    if source is far:
                        self._asked.discard(far)
                    elif far in self._open:
                        self._asked.add(far)
                target.sendall(data)
        with self._lock:
            ours = far in self._open
            self._open -= {source, target}
            self._asked.discard(far)
        if not ours:
            return  # the other direction ended both, or they are being reset
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # the thread of the other direction wakes
            end.close()


def _reset(end: socket.socket) -> None:
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        end.shutdown(socket.SHUT_RD)  # a thread that reads from it wakes; to write would be closed with an orderly end
    end.close()


class Store:
    """One bucket."""

    def __init__(self, port: int) -> None:
        self.connection = Connection(port)
        self.url = f"s3://{BUCKET}"
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.connection.port}", "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1", "AWS_CONFIG_FILE": "/nonexistent",
            "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent", "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
        }  # fmt: skip
        self._boto: Any = boto3.client(
            "s3", endpoint_url=f"http://127.0.0.1:{port}", aws_access_key_id="key", aws_secret_access_key="secret",
            region_name="us-east-1", config=Config(proxies={}, request_checksum_calculation="when_required"),
        )  # fmt: skip

    def await_server(self) -> None:
        ends = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._boto.create_bucket(Bucket=BUCKET)
                return
            except Exception:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.2)

    def put(self, name: str, data: bytes) -> None:
        self._boto.put_object(Bucket=BUCKET, Key=name, Body=data)

    def get(self, name: str) -> bytes | None:
        """The object's bytes, None where there is none."""
        with suppress(self._boto.exceptions.NoSuchKey):
            body: bytes = self._boto.get_object(Bucket=BUCKET, Key=name)["Body"].read()
            return body
        return None

    def names(self, below: str) -> list[str]:
        pages = self._boto.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=below)
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def files(self, below: str) -> dict[str, str]:
        """Name below ``below`` → SHA-256; SystemExit for an object that is not what it was put as."""
        found = {}
        for name in self.names(below):
            answer = self._boto.get_object(Bucket=BUCKET, Key=name)
            digest = hashlib.sha256(answer["Body"].read()).hexdigest()
            if answer["Metadata"].get("sha256") != digest:
                raise SystemExit(f"{name} is not whole")
            found[name.removeprefix(below)] = digest
        return found

    def uploads(self) -> list[str]:
        """Uploads by parts that were begun and neither ended nor given up."""
        return [upload["Key"] for upload in self._boto.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])]

    def remove(self, below: str) -> None:
        for name in self.names(below):
            self._boto.delete_object(Bucket=BUCKET, Key=name)


@contextmanager
def store() -> Iterator[Store]:
    """A server and its connection, which end with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        made = Store(port)
        try:
            made.await_server()
            yield made
        finally:
            made.connection.close()
    finally:
        server.kill()
        server.wait()
