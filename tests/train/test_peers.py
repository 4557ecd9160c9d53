"""Checkpoint files between nodes' disks: what arrives is right or does not arrive, whatever the network does."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quern.errors import InputError, QuernError
from quern.train.checkpoint.format.manifest import FileRecord
from quern.train.checkpoint.mirror import peer_files, peer_server
from quern.train.checkpoint.mirror import peers as peers_module
from quern.train.checkpoint.mirror.peer_files import mirror_folder
from quern.train.checkpoint.mirror.peer_server import PeerServer
from quern.train.checkpoint.mirror.peers import Peer, PeerError, ServerProcess, new_token
from quern.train.checkpoint.store.rate import RateLimit
from quern.train.processes.spawn import spawn

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[2]
TOKEN = "5ec2e7" * 10 + "abcd"
FOLDER = "step_00001000"
NAME = "__0_0.distcp"
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


class Node:
    """A server over a folder, and clients of it that do not wait between attempts."""

    def __init__(self, root: Path, **settings) -> None:
        self.root = root
        self.server = PeerServer(str(root), "127.0.0.1", 0, TOKEN, **({"timeout_s": 600.0} | settings))
        self.port = self.server.port
        self.waits: list[float] = []
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def peer(self, port: int | None = None, **settings) -> Peer:
        fields = {"token": TOKEN, "sleep": self.waits.append, "timeout_s": 120.0} | settings
        return Peer("127.0.0.1", port or self.port, **fields)

    def broken_off(self, seconds: float = 0.0) -> None:
        """Wait until the server has begun to receive and noticed that the sender is gone."""
        until(lambda: any(self.root.glob(".*/*.part")) and not self.server.files._receiving)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def node(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(root: Path = tmp_path / "there", **settings) -> Node:
            made = Node(root, **settings)
            stack.callback(made.close)
            return made

        yield start


class Fault:
    """What a line does once with a byte: ``cut`` the connection before it, or ``flip`` a bit of it. ``up``: on the way
    to the server. Counted in bytes of one connection and direction; heads stay below 1000. ``times``: how often."""

    def __init__(self, kind: str, *, up: bool, at: int, times: int = 1) -> None:
        self.kind, self.up, self.at, self.times = kind, up, at, times


class Line:
    """A TCP line to a port that has faults. ``bytes_up`` and ``bytes_down`` count what it let through."""

    def __init__(self, port: int, *faults: Fault, each_read: Callable[[], None] = lambda: None) -> None:
        self.target, self.faults, self.each_read = port, list(faults), each_read
        self.bytes_up = self.bytes_down = self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.connections += 1
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except ConnectionError:
                    near.close()
                    continue
                for source, sink, up in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pump, args=(source, sink, up), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        moved = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(65536)):
                self.each_read()
                cut = False
                for fault in self.faults:
                    place = fault.at - moved
                    if fault.up == up and fault.times and 0 <= place < len(data):
                        fault.times -= 1
                        if fault.kind == "flip":
                            data[place] ^= 1
                        else:
                            data, cut = data[:place], True
                sink.sendall(data)
                moved += len(data)
                if up:
                    self.bytes_up += len(data)
                else:
                    self.bytes_down += len(data)
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


@pytest.fixture
def line():
    with contextlib.ExitStack() as stack:

        def start(port: int, *faults: Fault, **settings) -> Line:
            made = Line(port, *faults, **settings)
            stack.callback(made.close)
            return made

        yield start


def raw(port: int, data: bytes, *, end: bool = False, timeout: float = 120.0) -> bytes:
    """Everything the server answers to these bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as sock:
        sock.sendall(data)
        if end:
            sock.shutdown(socket.SHUT_WR)
        return rest(sock)


def rest(sock: socket.socket) -> bytes:
    answer = b""
    with contextlib.suppress(ConnectionError):
        while more := sock.recv(65536):
            answer += more
    return answer


def head(method: str, target: str, *, token: str = TOKEN, **headers) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: x", f"Authorization: Bearer {token}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def put_head(data: bytes, target: str = f"/{FOLDER}/{NAME}", **headers) -> bytes:
    fields = {"X_SHA256": record_of(data).sha256, "Content_Length": len(data)} | headers
    return head("PUT", target, **{key: value for key, value in fields.items() if value is not None})


def until(true: Callable[[], bool], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# --- whole files, both ways


SIZES = [0, 1, 2, MIB - 1, MIB, MIB + 1, (8 << 20) + 12345]


@pytest.mark.parametrize("size", SIZES)
def test_a_file_is_fetched(node, tmp_path, size):
    data = content(size)
    there = node()
    put(there.root, data)
    there.peer().fetch(FOLDER, NAME, record_of(data), str(tmp_path / "here" / FOLDER))
    assert tree(tmp_path / "here") == {f"{FOLDER}/{NAME}": data}
    assert there.waits == []


@pytest.mark.parametrize("size", SIZES)
def test_a_file_is_sent(node, tmp_path, size):
    data = content(size)
    there = node()
    there.peer().send(FOLDER, NAME, str(put(tmp_path / "here", data)), record_of(data))
    assert tree(there.root) == {f"{FOLDER}/{NAME}": data}
    assert os.listdir(there.root) == [FOLDER]
    assert there.waits == []


def test_a_file_with_other_content_is_replaced(node, tmp_path):
    there = node()
    new, old = content(3 * MIB, 1), content(2 * MIB, 2)
    for target in (there.root, tmp_path / "here"):
        put(target, old)
    there.peer().send(FOLDER, NAME, str(put(tmp_path / "new", new)), record_of(new))
    there.peer().fetch(FOLDER, NAME, record_of(new), str(tmp_path / "here" / FOLDER))
    assert tree(there.root) == tree(tmp_path / "here") == {f"{FOLDER}/{NAME}": new}


def test_what_is_there_is_listed_and_nothing_else(node, tmp_path):
    there = node()
    sizes = {".metadata": 3, NAME: 10, "__12_3.distcp": 0, "a.B-c_9": 4, ".x": 1}
    for name, size in sizes.items():
        put(there.root, bytes(size), name)
    put(there.root, b"x", folder="step_123456789")
    for name in (f".{NAME}.{'0' * 32}.tmp", "..up", "a b", "ü", "x" * 129):
        put(there.root, b"no", name)
    for folder in ("step_7", f".{FOLDER}.mirror", "step_00001000x", "other"):
        put(there.root, b"no", folder=folder)
    put(tmp_path / "away", b"secret")
    (there.root / FOLDER / "link").symlink_to(tmp_path / "away" / FOLDER / NAME)
    (there.root / FOLDER / "folder").mkdir()
    (there.root / "step_00000009").symlink_to(tmp_path / "away" / FOLDER)
    (there.root / "step_00000010").write_bytes(b"a file")
    peer = there.peer()
    assert peer.folders() == [FOLDER, "step_123456789"]
    assert peer.files(FOLDER) == sizes
    assert peer.files("step_00000009") == peer.files("step_00000010") == peer.files("step_00000077") == {}


def test_a_range_is_a_slice(node):
    data = content(5000)
    there = node()
    put(there.root, data)
    cases = {
        "bytes=0-": (0, 5000), "bytes=4999-": (4999, 5000), "bytes=10-19": (10, 20), "bytes=0-0": (0, 1),
        "bytes=4000-9999": (4000, 5000), "bytes=-7": (4993, 5000), "bytes=-9000": (0, 5000),
    }  # fmt: skip
    for asked, (start, stop) in cases.items():
        answer = raw(there.port, head("GET", f"/{FOLDER}/{NAME}", Range=asked))
        top, body = answer.split(b"\r\n\r\n", 1)
        assert (status(answer), body) == (206, data[start:stop])
        assert f"Content-Range: bytes {start}-{stop - 1}/5000".encode() in top
    for asked in ("bytes=5000-", "bytes=9-8", "bytes=-0"):
        answer = raw(there.port, head("GET", f"/{FOLDER}/{NAME}", Range=asked))
        assert status(answer) == 416
        assert b"Content-Range: bytes */5000" in answer
    for asked in ("lines=1-2", "bytes=1-2,4-5", "bytes=--1"):  # not understood: the whole file
        answer = raw(there.port, head("GET", f"/{FOLDER}/{NAME}", Range=asked))
        assert (status(answer), answer.split(b"\r\n\r\n", 1)[1]) == (200, data)


def test_a_head_tells_size_and_hash(node):
    data = content(MIB + 5)
    there = node()
    put(there.root, data)
    answer = raw(there.port, head("HEAD", f"/{FOLDER}/{NAME}"))
    assert status(answer) == 200
    assert answer.endswith(b"\r\n\r\n")
    assert f"Content-Length: {len(data)}\r\n".encode() in answer
    assert f"X-SHA256: {hashlib.sha256(data).hexdigest()}\r\n".encode() in answer


# --- broken lines


@pytest.mark.parametrize("at", [1000, 3 * MIB, 5 * MIB + 7])
def test_a_fetch_goes_on_where_the_line_broke(node, line, tmp_path, at):
    data = content(6 * MIB)
    there = node()
    put(there.root, data)
    broken = line(there.port, Fault("cut", up=False, at=at))
    there.peer(broken.port).fetch(FOLDER, NAME, record_of(data), str(tmp_path / "here"))
    assert tree(tmp_path / "here") == {NAME: data}
    assert broken.connections == 2
    assert broken.bytes_down < len(data) + 2000  # nothing came twice
    assert len(there.waits) == 1


@pytest.mark.parametrize("at", [2000, 3 * MIB, 5 * MIB + 7])
def test_a_send_goes_on_where_the_line_broke(node, line, tmp_path, at):
    data = content(6 * MIB)
    there = node()
    broken = line(there.port, Fault("cut", up=True, at=at))
    there.peer(broken.port, sleep=there.broken_off).send(
        FOLDER, NAME, str(put(tmp_path / "here", data)), record_of(data)
    )
    assert tree(there.root) == {f"{FOLDER}/{NAME}": data}
    assert broken.connections == 4  # each attempt asks first what is there
    assert broken.bytes_up < len(data) + 4000
    assert os.listdir(there.root) == [FOLDER]


def test_a_line_that_always_breaks_is_given_up(node, line, tmp_path):
    data = content(6 * MIB)
    there = node()
    put(there.root, data)
    broken = line(there.port, Fault("cut", up=False, at=500, times=99))
    with pytest.raises(PeerError, match=rf"127\.0\.0\.1:{broken.port}: {FOLDER}/{NAME}: given up after 4 attempts"):
        there.peer(broken.port, attempts=4).fetch(FOLDER, NAME, record_of(data), str(tmp_path / "here"))
    assert tree(tmp_path / "here") == {}
    assert broken.connections == 4
    assert [0.5 * 2**n * 0.5 <= wait <= 0.5 * 2**n for n, wait in enumerate(there.waits)] == [True] * 3
    # A broken send leaves what arrived for the next one.
    broken = line(there.port, Fault("cut", up=True, at=MIB + 2000, times=99))
    with pytest.raises(PeerError, match=rf"127\.0\.0\.1:{broken.port}: step_00002000/{NAME}: given up after 2"):
        there.peer(broken.port, attempts=2, sleep=there.broken_off).send(
            "step_00002000", NAME, str(there.root / FOLDER / NAME), record_of(data)
        )
    assert not (there.root / "step_00002000").exists()
    (part,) = (there.root / ".step_00002000.mirror").iterdir()
    until(lambda: part.stat().st_size > 2 * MIB)  # of both attempts
    arrived = part.read_bytes()  # once: the node may still be writing the end of it
    assert 2 * MIB < len(arrived) < 2 * MIB + 4000
    assert arrived == data[: len(arrived)]
    assert mirror_folder(str(there.root), "step_00002000") == str(part.parent)


def test_nobody_listens(node, tmp_path):
    there = node()
    there.close()
    with pytest.raises(PeerError, match=rf"127\.0\.0\.1:{there.port}: {FOLDER}/{NAME}: given up after 3 .*refused"):
        there.peer(attempts=3).fetch(FOLDER, NAME, record_of(b"x"), str(tmp_path / "here"))
    assert len(there.waits) == 2


@pytest.mark.parametrize("at", [1000, 2 * MIB + 17, 3 * MIB])
def test_a_bit_that_flips_on_the_way_here_is_found(node, line, tmp_path, at):
    data = content(3 * MIB)
    there = node()
    put(there.root, data)
    flipping = line(there.port, Fault("flip", up=False, at=at))
    there.peer(flipping.port).fetch(FOLDER, NAME, record_of(data), str(tmp_path / "here"))
    assert tree(tmp_path / "here") == {NAME: data}
    assert flipping.bytes_down > 2 * len(data)  # all of it came again
    flipping = line(there.port, Fault("flip", up=False, at=at, times=99))
    with pytest.raises(PeerError, match=rf"127\.0\.0\.1:{flipping.port}: .*{NAME}: given up after 3.*expected SHA-256"):
        there.peer(flipping.port, attempts=3).fetch(FOLDER, NAME, record_of(data), str(tmp_path / "other"))
    assert tree(tmp_path / "other") == {}


@pytest.mark.parametrize("at", [1000, 2 * MIB + 17, 3 * MIB])
def test_a_bit_that_flips_on_the_way_there_is_found(node, line, tmp_path, at):
    data = content(3 * MIB)
    there = node()
    path = str(put(tmp_path / "here", data))
    flipping = line(there.port, Fault("flip", up=True, at=at, times=3))
    with pytest.raises(PeerError, match=rf"127\.0\.0\.1:{flipping.port}: .*{NAME}: given up after 3.*422.*SHA-256"):
        there.peer(flipping.port, attempts=3).send(FOLDER, NAME, path, record_of(data))
    assert tree(there.root) == {}
    there.peer(line(there.port, Fault("flip", up=True, at=at)).port).send(FOLDER, NAME, path, record_of(data))
    assert tree(there.root) == {f"{FOLDER}/{NAME}": data}


def test_a_bit_that_flips_before_the_line_breaks_is_found(node, line, tmp_path):
    """The hash is of the whole file, also of what an earlier attempt brought; both ways."""
    data = content(4 * MIB)
    there = node()
    put(there.root, data)
    faults = [Fault("flip", up=False, at=MIB), Fault("cut", up=False, at=3 * MIB)]
    bad = line(there.port, *faults)
    there.peer(bad.port).fetch(FOLDER, NAME, record_of(data), str(tmp_path / "here"))
    assert (tmp_path / "here" / NAME).read_bytes() == data
    assert [fault.times for fault in faults] == [0, 0]
    faults = [Fault("flip", up=True, at=MIB), Fault("cut", up=True, at=3 * MIB)]
    bad = line(there.port, *faults)
    there.peer(bad.port).send("step_00002000", NAME, str(tmp_path / "here" / NAME), record_of(data))
    assert (there.root / "step_00002000" / NAME).read_bytes() == data
    assert [fault.times for fault in faults] == [0, 0]


# --- wrong files


def test_a_damaged_file_of_a_peer_is_not_asked_for_again(node, line, tmp_path):
    data = content(2 * MIB)
    there = node()
    put(there.root, data[:-1] + bytes([data[-1] ^ 1]))
    through = line(there.port)
    with pytest.raises(PeerError, match=rf":{through.port}: {FOLDER}/{NAME}: expected SHA-256 .* the peer's file has"):
        there.peer(through.port).fetch(FOLDER, NAME, record_of(data), str(tmp_path / "here"))
    assert through.bytes_down < 1.5 * len(data)
    put(there.root, data[:-1])
    with pytest.raises(PeerError, match=f"{NAME}: expected {len(data)} bytes, the peer has {len(data) - 1}"):
        there.peer(through.port).fetch(FOLDER, NAME, record_of(data), str(tmp_path / "here"))
    with pytest.raises(PeerError, match=r"nope: answered 404"):
        there.peer(through.port).fetch(FOLDER, "nope", record_of(data), str(tmp_path / "here"))
    assert tree(tmp_path / "here") == {}
    assert there.waits == []


def test_a_damaged_file_here_is_not_sent_again(node, tmp_path):
    data = content(2 * MIB)
    there = node()
    path = put(tmp_path / "here", b"?" + data[1:])
    with pytest.raises(InputError, match=f"{path}: expected SHA-256 {record_of(data).sha256}, has another"):
        there.peer().send(FOLDER, NAME, str(path), record_of(data))
    path.write_bytes(data + b"?")
    with pytest.raises(InputError, match=f"{path}: expected {len(data)} bytes, has {len(data) + 1}"):
        there.peer().send(FOLDER, NAME, str(path), record_of(data))
    with pytest.raises(InputError, match=r"gone: cannot be read \(No such file"):
        there.peer().send(FOLDER, NAME, str(tmp_path / "gone"), record_of(data))
    assert tree(there.root) == {}
    assert there.waits == []


def test_a_body_that_is_not_as_announced(node):
    there = node()
    data = content(5000)
    target = there.root / FOLDER / NAME
    short = raw(there.port, put_head(data) + data[:-1], end=True)
    assert (status(short), target.exists()) == (400, False)
    assert b"expected 1 bytes more" in short
    there.broken_off()
    (part,) = (there.root / f".{FOLDER}.mirror").iterdir()
    assert part.read_bytes() == data[:-1]
    longer = raw(there.port, put_head(data, Content_Length=len(data) - 1) + data, end=True)
    assert (status(longer), target.exists()) == (422, False)
    assert tree(there.root) == {}
    refused = {
        411: [{"Content_Length": None}, {"Content_Length": "-5"}, {"Content_Length": "5_0"},
              {"Content_Length": "9" * 30}, {"Content_Length": "5\r\nContent-Length: 5"},
              {"Transfer_Encoding": "chunked"}],
        400: [{"X_SHA256": None}, {"X_SHA256": "ab"}, {"X_SHA256": "A" * 64}, {"X_SHA256": "../" * 21 + "a"},
              {"Content_Range": "bytes 0-9/10"}, {"Content_Range": "bytes 0-4998/5000"},
              {"Content_Range": "bytes 1-4999/5000"}, {"Content_Range": "all"}],
        507: [{"Content_Length": 1 << 55}],
        409: [{"Content_Length": 4999, "Content_Range": "bytes 1-4999/5000"}],
    }  # fmt: skip
    for code, cases in refused.items():
        for headers in cases:
            assert status(raw(there.port, put_head(data, **headers) + data, end=True)) == code, headers
    assert tree(there.root) == {}
    # Beyond the announced bytes nothing is read.
    assert status(raw(there.port, put_head(data) + data + b"GET / HTTP/1.1\r\n\r\n", end=True)) in (201, 200)
    assert target.read_bytes() == data


def test_a_file_that_stands_is_not_taken_again(node, line, tmp_path):
    data = content(8 * MIB)
    there = node()
    path = str(put(tmp_path / "here", data))
    there.peer().send(FOLDER, NAME, path, record_of(data))
    before = os.stat(there.root / FOLDER / NAME)
    through = line(there.port)
    there.peer(through.port).send(FOLDER, NAME, path, record_of(data))
    assert through.connections == 1
    assert through.bytes_up < 1000
    with socket.create_connection(("127.0.0.1", there.port), timeout=120) as sock:
        sock.sendall(put_head(data))  # and not one byte of it
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += sock.recv(1000)
        assert status(answer) == 200
    after = os.stat(there.root / FOLDER / NAME)
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_refusal_while_the_body_is_on_its_way_is_heard(node, tmp_path, monkeypatch):
    """The client stops sending and says why, without another attempt."""
    data = content(64 * MIB)
    there = node()
    path = str(put(tmp_path / "here", data))
    real = os.write

    def full(descriptor: int, chunk: bytes) -> int:
        if os.fstat(descriptor).st_size >= 2 * MIB and os.readlink(f"/proc/self/fd/{descriptor}").endswith(".part"):
            raise OSError(28, "No space left on device")
        return real(descriptor, chunk)

    monkeypatch.setattr(peer_files.os, "write", full)
    with pytest.raises(PeerError, match=rf"{there.port}: {FOLDER}/{NAME}: answered 507: .*No space left on device"):
        there.peer().send(FOLDER, NAME, path, record_of(data))
    assert there.waits == []
    assert tree(there.root) == {}


def test_an_answer_before_the_connection_is_reset_is_heard(tmp_path):
    """The peer answers and closes while the sender waits in the middle of a chunk, and has read almost nothing."""
    large = content(32 * MIB)
    waits: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for wanted, text in ((1, b'200 OK\r\nContent-Length: 29\r\n\r\n{"standing":false,"bytes":0} '),
                                 (100_000, b"507 x\r\nContent-Length: 4\r\n\r\nfull")):  # fmt: skip
                sock, _ = listener.accept()
                with sock:
                    while wanted > 0:
                        wanted -= len(sock.recv(wanted))
                    if text.startswith(b"507"):
                        time.sleep(0.5)
                    sock.sendall(b"HTTP/1.1 " + text)

        threading.Thread(target=answer, daemon=True).start()
        peer = Peer("127.0.0.1", listener.getsockname()[1], TOKEN, timeout_s=120, sleep=waits.append, attempts=2)
        with pytest.raises(PeerError, match=rf":{peer.port}: {FOLDER}/{NAME}: answered 507: full"):
            peer.send(FOLDER, NAME, str(put(tmp_path, large)), record_of(large))
    assert waits == []


# --- who may, and what


def test_without_the_token_nothing_is_served_or_taken(node, tmp_path):
    data = content(100)
    there = node()
    put(there.root, data)
    before = tree(there.root)
    requests = [("GET", "/"), ("GET", f"/{FOLDER}/"), ("GET", f"/{FOLDER}/{NAME}"), ("HEAD", f"/{FOLDER}/{NAME}"),
                ("PUT", f"/{FOLDER}/new"), ("DELETE", f"/{FOLDER}/{NAME}"), ("GET", "/../etc/passwd")]  # fmt: skip
    wrong = ["", TOKEN[:-1], TOKEN + "0", TOKEN.upper(), "0" * 64, "é" * 64]
    for method, target in requests:
        for token in wrong:
            answer = raw(there.port, head(method, target, token=token, Content_Length=5, X_SHA256="0" * 64))
            assert status(answer) == 401, (method, target, token)
            assert data[:20] not in answer
        for line in ("", f"Authorization: Basic {TOKEN}\r\n", f"Authorization: {TOKEN}\r\n",
                     f"Authorization: Bearer {TOKEN}\r\nAuthorization: Bearer {TOKEN}\r\n"):  # fmt: skip
            assert status(raw(there.port, f"{method} {target} HTTP/1.1\r\n{line}\r\n".encode())) == 401
    with pytest.raises(PeerError, match=rf"127\.0\.0\.1:{there.port}: {FOLDER}/{NAME}: answered 401"):
        there.peer(token="0" * 64).fetch(FOLDER, NAME, record_of(data), str(tmp_path / "here"))
    with pytest.raises(PeerError, match="answered 401"):
        there.peer(token="0" * 64).send(FOLDER, "new", str(there.root / FOLDER / NAME), record_of(data))
    assert there.waits == []
    assert tree(there.root) == before
    assert TOKEN not in repr(there.peer())
    for token in ("", "x" * 64, TOKEN[1:]):
        with pytest.raises(InputError, match="token: expected 64 hex digits"):
            PeerServer(str(there.root), "127.0.0.1", 0, token)
    with pytest.raises(InputError, match="timeout: expected seconds > 0, got 0"):
        PeerServer(str(there.root), "127.0.0.1", 0, TOKEN, timeout_s=0)
    assert len({new_token() for _ in range(100)}) == 100


OUTSIDE = [
    "/..", "/../", "/../secret", "/../../etc/passwd", "//etc/passwd", "/etc/passwd", "/secret", "/other/secret",
    f"/{FOLDER}/../secret", f"/{FOLDER}/../../secret", f"/{FOLDER}/..", f"/{FOLDER}/.", f"/{FOLDER}//{NAME}",
    f"/{FOLDER}/./{NAME}", f"//{FOLDER}/{NAME}", f"/./{FOLDER}/{NAME}", f"/{FOLDER}/sub/{NAME}", f"/{FOLDER}/{NAME}/",
    f"/{FOLDER}/%2e%2e/secret", f"/{FOLDER}/..%2fsecret", f"/{FOLDER}/%2e%2e%2fsecret", f"/%2e%2e/{FOLDER}/{NAME}",
    f"/{FOLDER}/%5f_0_0.distcp", f"/{FOLDER}/..\\secret", f"/{FOLDER}/x\0", f"/{FOLDER}/{NAME}\0",
    f"/\0{FOLDER}/{NAME}",
    f"/{FOLDER}/..secret", f"/{FOLDER}/" + "x" * 129, f"/{FOLDER}/" + "x" * 5000, "/" + "../" * 2000 + "etc/passwd",
    "/step_" + "1" * 21 + f"/{NAME}", f"/{FOLDER}", f"/.{FOLDER}.mirror/", f"/.{FOLDER}.mirror/{NAME}", "/step_1/x",
    f"/{FOLDER}/.{NAME}.{'0' * 32}.tmp", f"http://127.0.0.1/{FOLDER}/{NAME}", f"file:///{FOLDER}/{NAME}", "*", "",
    f"/{FOLDER}/{NAME}?", f"/{FOLDER}/{NAME}?partial=../../secret", f"/{FOLDER}/{NAME}#x", f"/{FOLDER}/?x",
    f"/{FOLDER}/\xfcber", f"/step_0000100\xb2/{NAME}",
]  # fmt: skip


def test_no_path_leads_elsewhere(node, tmp_path):
    there = node(tmp_path / "served")
    data = content(100)
    put(there.root, data)
    put(there.root, b"SECRET", f".{NAME}.{'0' * 32}.tmp")
    put(there.root, b"SECRET", "..secret")
    put(there.root, b"SECRET", "secret", folder="other")
    put(there.root, b"SECRET", folder=f".{FOLDER}.mirror")
    put(there.root, b"SECRET", folder="step_1")
    (tmp_path / "secret").write_bytes(b"SECRET")
    (there.root / "secret").write_bytes(b"SECRET")
    before = tree(tmp_path)
    for target in OUTSIDE:
        for method in ("GET", "HEAD", "PUT"):
            answer = raw(there.port, head(method, target, Content_Length=3, X_SHA256="0" * 64) + b"abc", end=True)
            assert status(answer) in (400, 404), (method, target)
            assert b"SECRET" not in answer
            assert data[:20] not in answer
    assert tree(tmp_path) == before
    for method, target, code in (("DELETE", f"/{FOLDER}/{NAME}", 405), ("POST", "/", 405), ("BREW", "/", 405),
                                 ("PUT", "/", 405), ("PUT", f"/{FOLDER}/", 405)):  # fmt: skip
        assert status(raw(there.port, head(method, target, Content_Length=0))) == code
    assert tree(tmp_path) == before


def test_links_are_not_followed(node, tmp_path):
    there = node()
    away = tmp_path / "away"
    data = content(1000)
    put(away, b"SECRET")
    put(there.root, data, "real")
    (there.root / FOLDER / "link").symlink_to(away / FOLDER / NAME)
    (there.root / FOLDER / "up").symlink_to("..")
    (there.root / "step_00000009").symlink_to(away / FOLDER)
    (there.root / ".step_00000008.mirror").symlink_to(away)
    os.mkfifo(there.root / FOLDER / "pipe")
    (there.root / FOLDER / "folder").mkdir()
    before = tree(away)
    for target in (f"/{FOLDER}/link", f"/{FOLDER}/up", f"/step_00000009/{NAME}", "/step_00000009/", f"/{FOLDER}/pipe",
                   f"/{FOLDER}/folder"):  # fmt: skip
        answer = raw(there.port, head("GET", target))
        assert (status(answer), b"SECRET" in answer) == (404, False), target
    for target in (f"/step_00000009/{NAME}", f"/step_00000008/{NAME}", f"/{FOLDER}/folder"):
        assert status(raw(there.port, put_head(data, target) + data)) == 500
    assert status(raw(there.port, put_head(data, f"/{FOLDER}/link") + data)) == 201  # the link itself is replaced
    assert tree(away) == before
    assert not (there.root / FOLDER / "link").is_symlink()
    assert (there.root / FOLDER / "link").read_bytes() == data


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a b", "a\r\nX: y", "x\0", "..x", "ü", "x" * 129, "a?b=c"]
)
def test_names_are_checked_before_anything_is_asked(node, tmp_path, name):
    there = node()
    there.close()
    peer = there.peer()
    path = str(put(tmp_path, b"x"))
    with pytest.raises(InputError, match="expected a plain file name"):
        peer.fetch(FOLDER, name, record_of(b"x"), str(tmp_path / "here"))
    with pytest.raises(InputError, match="expected a plain file name"):
        peer.send(FOLDER, name, path, record_of(b"x"))
    with pytest.raises(InputError, match="folder: expected a checkpoint's"):
        peer.fetch(name, "x", record_of(b"x"), str(tmp_path / "here"))
    with pytest.raises(InputError, match="folder: expected a checkpoint's"):
        peer.files(name)
    assert there.waits == []


# --- slow and dead


def reset(port: int, data: bytes) -> None:
    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(data)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def trickle(sock: socket.socket, stop: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while not stop.wait(0.02):
            sock.send(b"x")


class Slots(threading.BoundedSemaphore):
    """Places that count how often one was taken."""

    taken = 0

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        got = super().acquire(blocking, timeout)
        self.taken += got
        return got


@pytest.mark.parametrize(
    "what",
    ["no reading", "trickled body", pytest.param("half a body", marks=pytest.mark.long)],
)  # fmt: skip
def test_a_slow_client_holds_its_place_no_longer_than_the_timeout(node, what):
    """The only place is taken by a client that stops, or trickles for ever; others are served when it was given up."""
    data = content((32 if what == "no reading" else 4) * MIB)  # more than the sockets' buffers hold
    there = node(timeout_s=0.3, connections=1)
    there.server._slots = Slots(1)
    put(there.root, data)
    parts = {
        "half a body": put_head(data, f"/{FOLDER}/new") + data[:MIB + 100],
        "no reading": head("GET", f"/{FOLDER}/{NAME}"),         "trickled body": put_head(data, f"/{FOLDER}/new"),
    }  # fmt: skip
    stop = threading.Event()
    with socket.create_connection(("127.0.0.1", there.port), timeout=120) as sock:
        sock.sendall(parts[what])

        if what.startswith("trickled"):
            threading.Thread(target=trickle, args=(sock, stop), daemon=True).start()
        try:
            until(lambda: there.server._slots.taken > 0)
            until(lambda: raw(there.port, head("GET", "/")).startswith(b"HTTP/1.1 200"))
        finally:
            stop.set()
    reset(there.port, parts[what])
    until(lambda: raw(there.port, head("GET", "/")).startswith(b"HTTP/1.1 200"))
    assert not (there.root / FOLDER / "new").exists()


@pytest.mark.parametrize(
    "what", ["trickled head", *(pytest.param(w, marks=pytest.mark.long) for w in ("", "GET / HT"))]
)
def test_a_head_that_does_not_come_is_not_waited_for_beyond_the_timeout(node, what):
    there = node(timeout_s=0.3)
    stop = threading.Event()
    with socket.create_connection(("127.0.0.1", there.port), timeout=120) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nX: " if what == "trickled head" else what.encode())

        if what == "trickled head":
            threading.Thread(target=trickle, args=(sock, stop), daemon=True).start()
        try:
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        finally:
            stop.set()
    until(lambda: not there.server._unknown)


@pytest.mark.parametrize("said", [b"", b"GET / HT"])
def test_who_has_no_token_keeps_nobody_out(node, monkeypatch, said):
    """More connections than are heard at once, idle or amid a head: the oldest of them are closed."""
    monkeypatch.setattr(peer_server, "MOST_UNKNOWN", 8)
    there = node(connections=2)
    with contextlib.ExitStack() as opened:
        idle = [
            opened.enter_context(socket.create_connection(("127.0.0.1", there.port), timeout=120)) for _ in range(20)
        ]
        for sock in idle:
            sock.sendall(said)
        for _ in range(3):
            assert status(raw(there.port, head("GET", "/"))) == 200
        for sock in idle[:12]:
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        assert len(there.server._unknown) <= 8
    until(lambda: not there.server._unknown)


def test_one_more_than_are_served_at_once_is_told(node):
    there = node(connections=1)
    there.server._slots = Slots(1)
    data = content(MIB)
    with socket.create_connection(("127.0.0.1", there.port), timeout=120) as sock:
        sock.sendall(put_head(data, f"/{FOLDER}/new"))
        until(lambda: there.server._slots.taken > 0)
        for _ in range(3):
            assert status(raw(there.port, head("GET", "/"))) == 503
        assert there.server._slots.taken == 1
    until(lambda: raw(there.port, head("GET", "/")).startswith(b"HTTP/1.1 200"))


class Answers:
    """A peer that answers ``first`` connections with the given bytes, with a pause after each, and then holds the
    line; it never answers later ones."""

    def __init__(self, *pieces: bytes, pause_s: float = 0.0, hold: bool = True, first: int = 99) -> None:
        self.connections, self._first = 0, first
        self._pieces, self._pause_s, self._hold = pieces, pause_s, hold
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.connections += 1
                self._open.append(sock)
                threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.recv(65536)
            for piece in self._pieces if self.connections <= self._first else ():
                sock.sendall(piece)
                time.sleep(self._pause_s)
            if not self._hold:
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in (self._listener, *self._open):
            sock.close()


def answer_head(size: int, extra: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n{extra}\r\n".encode()


@pytest.mark.slow
def test_a_peer_that_does_not_go_on_is_given_up(tmp_path, monkeypatch):
    data = content(4 * MIB)
    cases = [
        (Answers(), 0.3, "timed out"),
        (Answers(answer_head(len(data)), data[:1000]), 0.3, "timed out"),
        (Answers(answer_head(len(data)), *([b"x"] * 2000), pause_s=0.02), 60.0, "less than a MiB in 60 s"),
    ]
    seconds = itertools.count(step=10.0)  # a look at the clock takes so long: no wait on a line has to
    for peer, timeout_s, message in cases:
        with contextlib.closing(peer), monkeypatch.context() as patch:
            if timeout_s == 60.0:
                patch.setattr(peers_module, "time", types.SimpleNamespace(monotonic=lambda: next(seconds)))
            fetcher = Peer("127.0.0.1", peer.port, TOKEN, timeout_s=timeout_s, attempts=2, sleep=lambda seconds: None)
            with pytest.raises(PeerError, match=rf":{peer.port}: {FOLDER}/{NAME}: given up after 2 .*{message}"):
                fetcher.fetch(FOLDER, NAME, record_of(data), str(tmp_path / "here"))
            until(lambda peer=peer: peer.connections == 2)
    with contextlib.closing(
        Answers(b'HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n{"standing":false,"bytes":0}  ', first=1)
    ) as peer:
        large = content(32 * MIB)  # more than the sockets' buffers hold
        path = str(put(tmp_path, large))
        sender = Peer("127.0.0.1", peer.port, TOKEN, timeout_s=0.3, attempts=2, sleep=lambda seconds: None)
        with pytest.raises(PeerError, match=rf":{peer.port}: {FOLDER}/{NAME}: given up after 2 "):
            sender.send(FOLDER, NAME, path, record_of(large))
    assert tree(tmp_path / "here") == {}


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b'["step_1"]', b'["../x"]', b"[1]", b"{}", b"\xff",
                                  b'{"../x": 1}', b'{"x": -1}', b'{"x": "1"}'])  # fmt: skip
def test_a_list_that_makes_no_sense_is_refused(body):
    with contextlib.closing(Answers(answer_head(len(body)) + body)) as peer:
        asker = Peer("127.0.0.1", peer.port, TOKEN, timeout_s=120, attempts=2, sleep=lambda seconds: None)
        with pytest.raises(PeerError, match=f"127.0.0.1:{peer.port}: folders: "):
            asker.folders()
        if body != b"{}":
            with pytest.raises(PeerError, match=f"127.0.0.1:{peer.port}: {FOLDER}: "):
                asker.files(FOLDER)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\r\n\r\n",
        b"SSH-2.0-x\r\n",
        b"HTTP/1.1 999999 x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
    ],
)
def test_another_service_at_the_port_is_named(tmp_path, answer):
    with contextlib.closing(Answers(answer, hold=False)) as peer:
        asker = Peer("127.0.0.1", peer.port, TOKEN, timeout_s=120, attempts=2, sleep=lambda seconds: None)
        with pytest.raises(PeerError, match=rf"127\.0\.0\.1:{peer.port}: {FOLDER}/{NAME}: given up after 2"):
            asker.fetch(FOLDER, NAME, record_of(b"abc"), str(tmp_path / "here"))
    assert tree(tmp_path / "here") == {}


def test_a_head_has_a_size(node):
    there = node()
    fits = head("GET", "/", X="y" * 10_000)
    assert status(raw(there.port, fits)) == 200
    assert status(raw(there.port, head("GET", "/", X="y" * 17_000)[: 16 << 10])) == 431
    for request in (head("GET", "/", X="y" * 17_000), b"GET /" + b"x" * 17_000, b"x" * 100_000):
        answer = raw(there.port, request)
        assert answer == b"" or status(answer) == 431  # the rest of it resets the connection
    assert status(raw(there.port, fits)) == 200


def test_the_body_is_asked_for_when_the_client_waits_for_it(node):
    there = node()
    data = content(3000)
    with socket.create_connection(("127.0.0.1", there.port), timeout=120) as sock:
        sock.sendall(put_head(data, Expect="100-continue"))
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(data)
        assert status(rest(sock)) == 201
    assert (there.root / FOLDER / NAME).read_bytes() == data
    assert status(raw(there.port, put_head(data, Expect="100-continue"))) == 200  # it stands: not asked for


# --- concurrency and memory of hashes


def test_senders_of_the_same_file_do_not_disturb_one_another(node, tmp_path):
    """Eight at once, each slowed at its own pace, while one more holds its connection half way through."""
    data = content(6 * MIB)
    there = node()
    path = str(put(tmp_path / "here", data))
    errors: list[BaseException] = []

    def send(seed: int) -> None:
        try:
            limit = RateLimit((seed + 2) * 8 * MIB)
            there.peer(limit=limit).send(FOLDER, NAME, path, record_of(data))
        except BaseException as error:
            errors.append(error)

    with socket.create_connection(("127.0.0.1", there.port), timeout=120) as first:
        first.sendall(put_head(data) + data[: 2 * MIB])
        until(lambda: any((there.root / f".{FOLDER}.mirror").glob("*.part")))
        threads = [threading.Thread(target=send, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert errors == []
        assert (there.root / FOLDER / NAME).read_bytes() == data
        first.sendall(data[2 * MIB :])
        assert status(rest(first)) == 201
    assert tree(there.root) == {f"{FOLDER}/{NAME}": data}
    assert os.listdir(there.root) == [FOLDER]


def test_a_second_sender_begins_at_its_own_byte_0(node):
    data = content(4 * MIB)
    there = node()
    mirror = there.root / f".{FOLDER}.mirror"
    with socket.create_connection(("127.0.0.1", there.port), timeout=120) as first:
        first.sendall(put_head(data) + data[: 2 * MIB])
        until(lambda: any(part.stat().st_size == 2 * MIB for part in mirror.glob("*.part")))
        asked = raw(there.port, head("GET", f"/{FOLDER}/{NAME}?partial={record_of(data).sha256}"))
        assert json.loads(asked.split(b"\r\n\r\n", 1)[1]) == {"standing": False, "bytes": 0}
        start = 2 * MIB
        half = put_head(data, Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}", Content_Length=start)
        assert status(raw(there.port, half + data[start:])) == 409
        reset(there.port, put_head(data) + data[:MIB])  # a second one that breaks leaves nothing
        until(lambda: len(list(mirror.glob("*.part"))) == 1)
        first.sendall(data[2 * MIB :])
        assert status(rest(first)) == 201
    assert tree(there.root) == {f"{FOLDER}/{NAME}": data}


def test_a_sender_that_breaks_after_another_one_is_done_leaves_nothing(node, tmp_path):
    data = content(4 * MIB)
    there = node()
    with socket.create_connection(("127.0.0.1", there.port), timeout=120) as first:
        first.sendall(put_head(data) + data[: 2 * MIB])
        until(lambda: any((there.root / f".{FOLDER}.mirror").glob("*.part")))
        there.peer().send(FOLDER, NAME, str(put(tmp_path / "here", data)), record_of(data))
    until(lambda: os.listdir(there.root) == [FOLDER])
    assert tree(there.root) == {f"{FOLDER}/{NAME}": data}


def test_a_hash_is_computed_once_and_again_when_the_file_changes(node, monkeypatch):
    there = node()
    data = bytearray(content(3 * MIB))
    path = put(there.root, bytes(data))
    read = []
    real = peer_files._hash
    monkeypatch.setattr(peer_files, "_hash", lambda descriptor, size: read.append(size) or real(descriptor, size))

    def asked() -> str:
        answer = raw(there.port, head("HEAD", f"/{FOLDER}/{NAME}"))
        return answer.split(b"X-SHA256: ")[1][:64].decode()

    def expected() -> str:
        return hashlib.sha256(data).hexdigest()

    hour = 3600 * 10**9
    os.utime(path, ns=(hour, hour))
    assert [asked() for _ in range(3)] == [expected()] * 3
    assert len(read) == 1
    data[5] ^= 1  # in place: same size and inode, another time
    path.write_bytes(data)
    os.utime(path, ns=(2 * hour, 2 * hour))
    assert [asked(), asked()] == [expected()] * 2
    assert len(read) == 2
    data[6] ^= 1  # another file of the same size and time
    (there.root / "other").write_bytes(data)
    os.utime(there.root / "other", ns=(2 * hour, 2 * hour))
    os.replace(there.root / "other", path)
    assert [asked(), asked()] == [expected()] * 2
    assert len(read) == 3
    data.append(0)
    path.write_bytes(data)
    os.utime(path, ns=(2 * hour, 2 * hour))
    assert [asked(), asked()] == [expected()] * 2
    assert len(read) == 4
    for _ in range(20):  # just written: the clock may not have ticked since
        data[7] = (data[7] + 1) % 256
        path.write_bytes(data)
        os.utime(path, ns=(time.time_ns() // 10**9 * 10**9,) * 2)
        assert asked() == expected()
    path.unlink()
    assert status(raw(there.port, head("HEAD", f"/{FOLDER}/{NAME}"))) == 404


# --- the process


def start_process(root: Path, port: int = 0, **settings) -> tuple[subprocess.Popen, int]:
    command = [sys.executable, "-m", "quern.train.checkpoint.mirror.peer_server"]
    command += ["--root", str(root), "--host", "127.0.0.1", "--port", str(port)]
    process = spawn(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **settings)
    process.stdin.write(f"{TOKEN}\n".encode())
    process.stdin.flush()
    return process, json.loads(process.stdout.readline())["port"]


def end_process(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_disk_that_is_full_is_said_and_harms_nothing_else(tmp_path):
    data, small = content(5 * MIB), content(MIB, 1)
    root = tmp_path / "there"
    put(root, small, "before")
    process, port = start_process(root)
    try:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (3 * MIB, 3 * MIB))
        waits: list[float] = []
        peer = Peer("127.0.0.1", port, TOKEN, sleep=waits.append)
        with pytest.raises(PeerError, match=rf"127\.0\.0\.1:{port}: {FOLDER}/{NAME}: answered 507: .*File too large"):
            peer.send(FOLDER, NAME, str(put(tmp_path, data)), record_of(data))
        assert waits == []
        assert tree(root) == {f"{FOLDER}/before": small}
        assert os.listdir(root) == [FOLDER]
        peer.send(FOLDER, "after", str(put(tmp_path, small)), record_of(small))
        assert tree(root) == {f"{FOLDER}/before": small, f"{FOLDER}/after": small}
    finally:
        end_process(process)


def test_a_disk_that_is_full_here_is_said_and_leaves_nothing(node, tmp_path):
    """The client runs in a process of its own, whose files may not grow beyond 3 MiB."""
    data = content(5 * MIB)
    there = node()
    put(there.root, data)
    code = f"""
import resource
from quern.errors import QuernError
from quern.train.checkpoint.format.manifest import FileRecord
from quern.train.checkpoint.mirror.peers import Peer, PeerError
resource.setrlimit(resource.RLIMIT_FSIZE, ({3 * MIB}, {3 * MIB}))
try:
    peer = Peer("127.0.0.1", {there.port}, "{TOKEN}")
    peer.fetch("{FOLDER}", "{NAME}", FileRecord("{record_of(data).sha256}", {len(data)}), "{tmp_path}/here")
except QuernError as error:
    assert not isinstance(error, PeerError)
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == f"{tmp_path}/here/{NAME}: cannot be written (File too large)\n"
    assert tree(tmp_path / "here") == {}


@pytest.mark.slow
def test_a_killed_server_goes_on_with_what_it_had(line, tmp_path):
    """kill -9 half way through a send, and again half way through a fetch; the same port serves again."""
    data = content(32 * MIB)
    root, path = tmp_path / "there", str(put(tmp_path / "here", data))
    moved_before: list[int] = []
    killed = threading.Event()
    running = [start_process(root)]
    port = running[0][1]
    victim: dict[str, Callable[[], bool]] = {}

    def kill_when() -> None:
        if victim and victim["when"]():
            victim.clear()
            end_process(running[0][0])
            killed.set()

    through = line(port, each_read=kill_when)

    def restart(seconds: float) -> None:
        assert killed.wait(60)
        killed.clear()
        moved_before[:] = [through.bytes_up, sum(map(len, tree(root).values()))]
        running[0] = start_process(root, port)

    try:
        peer = Peer("127.0.0.1", through.port, TOKEN, timeout_s=120, sleep=restart)
        victim["when"] = lambda: through.bytes_up > 16 * MIB
        peer.send(FOLDER, NAME, path, record_of(data))
        assert not victim
        assert tree(root) == {f"{FOLDER}/{NAME}": data}
        up, written = moved_before
        assert 0 < written < len(data)
        assert through.bytes_up - up < len(data) - written + 4000  # what had been written was not sent again
        victim["when"] = lambda: through.bytes_down > 16 * MIB
        peer.fetch(FOLDER, NAME, record_of(data), str(tmp_path / "back"))
        assert not victim
        assert tree(tmp_path / "back") == {NAME: data}
        assert through.bytes_down < len(data) + MIB
    finally:
        end_process(running[0][0])


def test_a_restart_removes_parts_nobody_goes_on_with(node, tmp_path):
    root, sha = tmp_path / "there", "0" * 64
    away = put(tmp_path / "away", b"keep", f"{NAME}.{sha}.0123abcd.part")
    keep = put(root, b"abc", f"{NAME}.{sha}.part", folder=f".{FOLDER}.mirror")
    gone = put(root, b"abc", f"{NAME}.{sha}.0123abcd.part", folder=f".{FOLDER}.mirror")
    (root / ".step_00000001.mirror").symlink_to(away.parent)
    there = node(root)
    assert (keep.exists(), gone.exists(), away.exists()) == (True, False, True)
    asked = raw(there.port, head("GET", f"/{FOLDER}/{NAME}?partial={sha}"))
    assert json.loads(asked.split(b"\r\n\r\n", 1)[1]) == {"standing": False, "bytes": 3}


def test_a_part_that_holds_other_bytes_is_not_trusted(node, tmp_path):
    """Zeros that a crash left, and a part that is longer than the file."""
    data = content(2 * MIB)
    there = node()
    path = str(put(tmp_path / "here", data))
    for size in (MIB, len(data), len(data) + 10):
        put(there.root, bytes(size), f"{NAME}.{record_of(data).sha256}.part", folder=f".{FOLDER}.mirror")
        there.peer().send(FOLDER, NAME, path, record_of(data))
        assert tree(there.root) == {f"{FOLDER}/{NAME}": data}
        (there.root / FOLDER / NAME).unlink()
    for extra in (b"", b"junk"):  # all there, killed before it got its name; and more than that
        (there.root / FOLDER / NAME).unlink(missing_ok=True)
        put(there.root, data + extra, f"{NAME}.{record_of(data).sha256}.part", folder=f".{FOLDER}.mirror")
        there.waits.clear()
        there.peer().send(FOLDER, NAME, path, record_of(data))
        assert tree(there.root) == {f"{FOLDER}/{NAME}": data}
        assert there.waits == []


def test_the_process_ends_with_its_standard_input_and_not_by_the_trainers_signals(tmp_path):
    process, port = start_process(tmp_path / "there")
    try:
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes() + Path(f"/proc/{process.pid}/environ").read_bytes()
        assert TOKEN.encode() not in command
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        assert Peer("127.0.0.1", port, TOKEN).folders() == []
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(30) == 0
    finally:
        end_process(process)


def test_the_process_dies_with_a_trainer_that_is_killed(tmp_path):
    """Also when a process that the trainer forked holds the pipe open."""
    code = f"""
import os, sys, time
from quern.train.checkpoint.mirror.peers import ServerProcess
server = ServerProcess({str(tmp_path / "there")!r}, "127.0.0.1", {TOKEN!r})
child = os.fork()
if child:
    print(server.port, server._process.pid, child, flush=True)
time.sleep(600)
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE)
    port, server, child = map(int, trainer.stdout.readline().split())
    try:
        assert Peer("127.0.0.1", port, TOKEN).folders() == []
        trainer.kill()
        trainer.wait()
        assert Path(f"/proc/{child}/cmdline").read_bytes()
        until(lambda: not Path(f"/proc/{server}/cmdline").exists() or not Path(f"/proc/{server}/cmdline").read_bytes())
    finally:
        trainer.kill()
        trainer.stdout.close()
        os.kill(child, signal.SIGKILL)


def test_a_server_process_is_started_and_ended(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(REPOSITORY)
    token = new_token()
    with ServerProcess(str(tmp_path / "there"), "127.0.0.1", token) as server:
        data = content(1000)
        peer = Peer("127.0.0.1", server.port, token)
        peer.send(FOLDER, NAME, str(put(tmp_path, data)), record_of(data))
        assert peer.files(FOLDER) == {NAME: 1000}
        assert server.alive()
        with pytest.raises(QuernError, match="did not start"):
            ServerProcess(str(tmp_path / "there"), "127.0.0.1", token, port=server.port)
        assert f"error: 127.0.0.1:{server.port}: cannot listen there" in capfd.readouterr().err
    assert not server.alive()
    with pytest.raises(QuernError, match="did not start"):
        ServerProcess(str(tmp_path / FOLDER / NAME), "127.0.0.1", token)
    assert f"error: {tmp_path / FOLDER / NAME}: cannot be served" in capfd.readouterr().err
    with pytest.raises(InputError, match="token"):
        ServerProcess(str(tmp_path / "there"), "127.0.0.1", "short")


def test_an_address_of_ip_version_6(tmp_path):
    server = PeerServer(str(tmp_path), "::1", 0, TOKEN)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        assert Peer("::1", server.port, TOKEN).folders() == []
        with pytest.raises(PeerError, match=rf"\[::1\]:{server.port}: {FOLDER}/{NAME}: answered 404"):
            Peer("::1", server.port, TOKEN).fetch(FOLDER, NAME, record_of(b"x"), str(tmp_path / "here"))
    finally:
        server.shutdown()
        server.server_close()


# --- rates


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def test_a_rate_is_kept_over_every_interval_and_reached():
    random = np.random.default_rng(7)
    for rate in (10.0, 1000.0, 1e9):
        clock = Clock()
        limit = RateLimit(rate, clock, clock.sleep)
        taken = []
        for _ in range(300):
            clock.now += float(random.choice([0.0, 0.0, 0.01, 3.0]))
            n = int(random.integers(0, int(3 * rate)))
            limit.take(n)
            taken.append((clock.now, n))
        for first in range(0, 300, 7):
            for last in range(first, 300, 5):
                seconds = taken[last][0] - taken[first][0]
                moved = sum(n for _, n in taken[first + 1 : last + 1])
                assert moved <= rate * (seconds + 1) * (1 + 1e-9) + 1
    clock = Clock()
    limit = RateLimit(1000.0, clock, clock.sleep)
    for _ in range(100):
        limit.take(500)
    assert clock.now - 100.0 == pytest.approx((100 * 500 - 1000) / 1000.0)  # all but the bucket is waited for
    clock.now += 1000
    before = clock.now
    limit.take(1000)  # the bucket is full again, and holds no more than a second
    assert clock.now == before
    limit.take(1000)
    assert clock.now - before == pytest.approx(1.0)


def test_threads_share_a_rate():
    waits: list[float] = []
    limit = RateLimit(1000.0, clock=lambda: 0.0, sleep=waits.append)  # time stands still: the debt only grows
    threads = [threading.Thread(target=lambda: [limit.take(10) for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(waits) == pytest.approx([place * 10 / 1000.0 for place in range(1, 301)])


def test_a_rate_that_is_none_and_rates_that_are_wrong():
    def never(seconds: float) -> None:
        raise AssertionError

    RateLimit(None, sleep=never).take(1 << 60)
    for value in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InputError, match="bytes_per_s: expected a finite number > 0"):
            RateLimit(value)


def test_files_move_at_the_limit(node, tmp_path):
    data = content(8 * MIB)
    there = node()
    path = str(put(there.root, data))
    for move in ("fetch", "send"):
        clock = Clock()
        peer = there.peer(limit=RateLimit(MIB, clock, clock.sleep))
        if move == "fetch":
            peer.fetch(FOLDER, NAME, record_of(data), str(tmp_path / "here"))
        else:
            peer.send("step_00002000", NAME, path, record_of(data))
        assert clock.now - 100.0 == pytest.approx(7.0)  # the first MiB is in the bucket
