"""What tests of transfers between nodes' disks share: servers on loopback, clients of them, lines that have faults."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quern.train.checkpoint.format.manifest import FileRecord
from quern.train.checkpoint.mirror.peer_server import PeerServer
from quern.train.checkpoint.mirror.peers import Peer, PeerError
from support.waits import until

HOST = "127.0.0.1"
TOKEN = "5ec2e7" * 10 + "abcd"
FOLDER = "step_00001000"
NAME = "__0_0.distcp"
PLACE = f"{FOLDER}/{NAME}"
MIB = 1 << 20


def content(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng([seed, size]).bytes(size)


def record_of(data: bytes) -> FileRecord:
    return FileRecord(hashlib.sha256(data).hexdigest(), len(data))


def put(root: Path, data: bytes, name: str = NAME, folder: str = FOLDER) -> Path:
    path = root / folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def tree(root: Path) -> dict[str, bytes]:
    """Every file below ``root``, hidden ones too."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def client(port: int, **settings: Any) -> Peer:
    """One that does not wait between its attempts."""
    fields = {"host": HOST, "token": TOKEN, "sleep": lambda seconds: None, "timeout_s": 120.0}
    return Peer(port=port, **(fields | settings))


class Answer(bytes):
    """All that a server has sent."""

    @property
    def status(self) -> int:
        return int(self.split(b" ", 2)[1])

    @property
    def body(self) -> bytes:
        return self.split(b"\r\n\r\n", 1)[1]


def refused(port: int, why: str, file: str = PLACE) -> Any:
    """An error is raised that names the peer and the file."""
    return pytest.raises(PeerError, match=rf"127\.0\.0\.1:{port}: {file}: {why}")


class Node:
    """A server over the folder ``root``, and clients that have the folder ``here`` beside it."""

    def __init__(self, root: Path, host: str = HOST, port: int = 0, **settings: Any) -> None:
        self.root, self.here, self.mirror = root, root.parent / "here", root / f".{FOLDER}.mirror"
        self.server = PeerServer(str(root), host, port, TOKEN, **({"timeout_s": 600.0} | settings))
        self.port = self.server.port
        self.url = f"peer://[{host}]:{self.port}" if ":" in host else f"peer://{host}:{self.port}"
        self.waits: list[float] = []
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def peer(self, port: int | None = None, **settings: Any) -> Peer:
        return client(port or self.port, **({"sleep": self.waits.append} | settings))

    def send(self, data: bytes, port: int | None = None, folder: str = FOLDER, **settings: Any) -> None:
        path = put(self.here, data, folder=folder)
        self.peer(port, **settings).send(folder, NAME, str(path), record_of(data))

    def fetch(self, data: bytes, port: int | None = None, name: str = NAME, **settings: Any) -> None:
        """Fetch what should be ``data``."""
        self.peer(port, **settings).fetch(FOLDER, name, record_of(data), str(self.here / FOLDER))

    def move(self, way: str, data: bytes, port: int | None = None, **settings: Any) -> None:
        if way == "fetch":
            put(self.root, data)
        getattr(self, way)(data, port, **settings)

    def arrived(self, way: str) -> dict[str, bytes]:
        """All that is on the disk to which files move."""
        return tree(self.root if way == "send" else self.here)

    def connect(self) -> socket.socket:
        return socket.create_connection((HOST, self.port), timeout=120)

    def ask(self, request: bytes, *, end: bool = False) -> Answer:
        with self.connect() as sock:
            sock.sendall(request)
            if end:
                sock.shutdown(socket.SHUT_WR)
            return rest(sock)

    def serves(self) -> bool:
        return self.ask(head("GET", f"/{FOLDER}/")).startswith((b"HTTP/1.1 200", b"HTTP/1.1 404"))

    def part(self, data: bytes) -> Any:
        """What the server says of a file of which not all has arrived."""
        return json.loads(self.ask(head("GET", f"/{PLACE}?partial={record_of(data).sha256}")).body)

    def broken_off(self, seconds: float = 0.0) -> None:
        """Wait until the server has begun to receive and noticed that the sender is gone."""
        until(lambda: any(self.root.glob(".*/*.part")) and not self.server.files._receiving)

    def reset(self, request: bytes) -> None:
        """Send these bytes and break the connection."""
        with contextlib.suppress(ConnectionError), self.connect() as sock:
            sock.sendall(request)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    @contextlib.contextmanager
    def half_sent(self, data: bytes) -> Iterator[socket.socket]:
        """A connection over which 2 MiB of a file have arrived."""
        with self.connect() as sock:
            sock.sendall(put_head(data) + data[: 2 * MIB])
            until(lambda: any(part.stat().st_size == 2 * MIB for part in self.mirror.glob("*.part")))
            yield sock

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@dataclass
class Fault:
    """What a line does with a byte on the way of a ``send`` or ``fetch``: ``cut`` the connection before it, or ``flip``
    a bit of it. Counted in bytes of one connection; heads stay below 1000. ``times``: how often."""

    kind: str
    way: str
    at: int
    times: int = 1


class Line:
    """A TCP line to a port that has faults. ``moved`` counts the bytes that it let through, by their way."""

    def __init__(self, port: int, *faults: Fault, each_read: Callable[[], None] = lambda: None) -> None:
        self.target, self.faults, self.each_read = port, faults, each_read
        self.moved, self.connections = {"send": 0, "fetch": 0}, 0
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                try:
                    far = socket.create_connection((HOST, self.target))
                except ConnectionError:
                    near.close()
                    continue
                for source, sink, way in ((near, far, "send"), (far, near, "fetch")):
                    threading.Thread(target=self._pump, args=(source, sink, way), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        moved = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                self.each_read()
                cut = False
                for fault in self.faults:
                    place = fault.at - moved
                    if fault.way == way and fault.times and 0 <= place < len(data):
                        fault.times -= 1
                        if fault.kind == "flip":
                            data[place] ^= 1
                        else:
                            data, cut = data[:place], True
                sink.sendall(data)
                moved += len(data)
                self.moved[way] += len(data)
                if cut:
                    break
            else:
                sink.shutdown(socket.SHUT_WR)
                return
        with contextlib.suppress(OSError):  # what was let through arrives; the sender's next byte resets
            sink.shutdown(socket.SHUT_RDWR)
            source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            source.shutdown(socket.SHUT_RDWR)
        source.close()

    def close(self) -> None:
        self._listener.close()


def rest(sock: socket.socket) -> Answer:
    answer = b""
    with contextlib.suppress(ConnectionError):
        while more := sock.recv(65536):
            answer += more
    return Answer(answer)


def head(method: str, target: str, *, token: str = TOKEN, **headers: Any) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: x", f"Authorization: Bearer {token}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def put_head(data: bytes, target: str = f"/{PLACE}", **headers: Any) -> bytes:
    fields = {"X_SHA256": record_of(data).sha256, "Content_Length": len(data)} | headers
    return head("PUT", target, **{key: value for key, value in fields.items() if value is not None})
