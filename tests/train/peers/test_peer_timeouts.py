"""Between nodes' disks: who is slow, dead or says nonsense, client or server, holds nobody up beyond the timeout."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
import types
from collections.abc import Iterator

import pytest

from quern.train.checkpoint.mirror import peer_server
from quern.train.checkpoint.mirror import peers as peers_module
from quern.train.checkpoint.mirror.peers import PeerError
from support.train.peer_case import (
    FOLDER,
    HOST,
    MIB,
    NAME,
    PLACE,
    Node,
    client,
    content,
    head,
    put,
    put_head,
    record_of,
    refused,
    rest,
    tree,
)
from support.waits import until

pytestmark = pytest.mark.slow


# --- clients


@contextlib.contextmanager
def sends(sock: socket.socket, data: bytes, *, then_trickles: bool) -> Iterator[None]:
    """Send data, and then no more, or a byte now and then."""
    stop = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not stop.wait(0.02):
                sock.send(b"x")

    sock.sendall(data)
    if then_trickles:
        threading.Thread(target=trickle, daemon=True).start()
    try:
        yield
    finally:
        stop.set()


class Slots(threading.BoundedSemaphore):
    """Places that count how often one was taken."""

    taken = 0

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        got = super().acquire(blocking, timeout)
        self.taken += got
        return got


def with_one_place(there: Node) -> Node:
    there.server._slots = Slots(1)
    return there


@pytest.mark.parametrize("what", ["no reading", "trickled body", pytest.param("half a body", marks=pytest.mark.long)])
def test_a_slow_client_holds_its_place_no_longer_than_the_timeout(node, what):
    """The only place is taken by a client that stops, or trickles for ever; others are served when it was given up."""
    data = content((32 if what == "no reading" else 4) * MIB)  # more than the sockets' buffers hold
    there = with_one_place(node(timeout_s=0.3, connections=1))
    put(there.root, data)
    request = {
        "no reading": head("GET", f"/{PLACE}"),
        "trickled body": put_head(data, f"/{FOLDER}/new"),
        "half a body": put_head(data, f"/{FOLDER}/new") + data[: MIB + 100],
    }[what]
    with there.connect() as sock, sends(sock, request, then_trickles=what == "trickled body"):
        until(lambda: there.server._slots.taken > 0)
        until(there.serves)
    there.reset(request)
    until(there.serves)
    assert not (there.root / FOLDER / "new").exists()


@pytest.mark.parametrize(
    ("what", "trickles"),
    [(b"GET / HTTP/1.1\r\nX: ", True), *(pytest.param(w, False, marks=pytest.mark.long) for w in (b"", b"GET / HT"))],
)
def test_a_head_that_does_not_come_is_not_waited_for_beyond_the_timeout(node, what, trickles):
    there = node(timeout_s=0.3)
    with there.connect() as sock, sends(sock, what, then_trickles=trickles):
        assert rest(sock) == b""
    until(lambda: not there.server._unknown)


@pytest.mark.parametrize("said", [b"", b"GET / HT"])
def test_who_has_no_token_keeps_nobody_out(node, monkeypatch, said):
    """More connections than are heard at once, idle or amid a head: the oldest of them are closed."""
    monkeypatch.setattr(peer_server, "MOST_UNKNOWN", 8)
    there = node(connections=2)
    with contextlib.ExitStack() as opened:
        idle = [opened.enter_context(there.connect()) for _ in range(20)]
        for sock in idle:
            sock.sendall(said)
        for _ in range(3):
            assert there.serves()
        for sock in idle[:12]:
            assert rest(sock) == b""
        assert len(there.server._unknown) <= 8
    until(lambda: not there.server._unknown)


def test_one_more_than_are_served_at_once_is_told(node):
    there = with_one_place(node(connections=1))
    with there.connect() as sock:
        sock.sendall(put_head(content(MIB), f"/{FOLDER}/new"))
        until(lambda: there.server._slots.taken > 0)
        for _ in range(3):
            assert there.ask(head("GET", f"/{FOLDER}/")).status == 503
        assert there.server._slots.taken == 1
    until(there.serves)


def test_a_head_has_a_size(there):
    (there.root / FOLDER).mkdir()
    fits = head("GET", f"/{FOLDER}/", X="y" * 10_000)
    assert there.ask(fits).status == 200
    assert there.ask(head("GET", "/", X="y" * 17_000)[: 16 << 10]).status == 431
    for request in (head("GET", "/", X="y" * 17_000), b"GET /" + b"x" * 17_000, b"x" * 100_000):
        answer = there.ask(request)
        assert answer == b"" or answer.status == 431  # the rest of it resets the connection
    assert there.ask(fits).status == 200


def test_the_body_is_asked_for_when_the_client_waits_for_it(there):
    data = content(3000)
    with there.connect() as sock:
        sock.sendall(put_head(data, Expect="100-continue"))
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(data)
        assert rest(sock).status == 201
    assert (there.root / PLACE).read_bytes() == data
    assert there.ask(put_head(data, Expect="100-continue")).status == 200  # it stands: not asked for


# --- servers


class Answers:
    """A peer that answers ``first`` connections with the given bytes, with a pause after each, and then holds the
    line; it never answers later ones."""

    def __init__(self, *pieces: bytes, pause_s: float = 0.0, hold: bool = True, first: int = 99) -> None:
        self.connections, self._first = 0, first
        self._pieces, self._pause_s, self._hold = pieces, pause_s, hold
        self._listener = socket.create_server((HOST, 0))
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


@pytest.fixture
def answers(closing):
    return lambda *pieces, **settings: closing.enter_context(contextlib.closing(Answers(*pieces, **settings)))


def answer_head(size: int) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("pieces", "timeout_s", "message"),
    [
        pytest.param([], 0.3, "timed out", id="nothing"),
        pytest.param([answer_head(4 * MIB), bytes(1000)], 0.3, "timed out", id="no more"),
        pytest.param([answer_head(4 * MIB), *[b"x"] * 2000], 60.0, "less than a MiB in 60 s", id="drops"),
    ],
)
def test_a_peer_that_does_not_go_on_sending_is_given_up(tmp_path, monkeypatch, answers, pieces, timeout_s, message):
    peer = answers(*pieces, pause_s=0.02)
    if timeout_s == 60.0:
        seconds = itertools.count(step=10.0)  # a look at the clock takes so long: no wait on a line has to
        monkeypatch.setattr(peers_module, "time", types.SimpleNamespace(monotonic=lambda: next(seconds)))
    with refused(peer.port, f"given up after 2 .*{message}"):
        fetcher = client(peer.port, timeout_s=timeout_s, attempts=2)
        fetcher.fetch(FOLDER, NAME, record_of(content(4 * MIB)), str(tmp_path / "here"))
    until(lambda: peer.connections == 2)
    assert tree(tmp_path / "here") == {}


def test_a_peer_that_does_not_go_on_receiving_is_given_up(tmp_path, answers):
    peer = answers(answer_head(30), b'{"standing":false,"bytes":0}  ', first=1)
    large = content(32 * MIB)  # more than the sockets' buffers hold
    with refused(peer.port, "given up after 2 "):
        sender = client(peer.port, timeout_s=0.3, attempts=2)
        sender.send(FOLDER, NAME, str(put(tmp_path, large)), record_of(large))


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b'["step_1"]', b'["../x"]', b"[1]", b"\xff",
                                  b'{"../x": 1}', b'{"x": -1}', b'{"x": "1"}'])  # fmt: skip
def test_a_list_that_makes_no_sense_is_refused(answers, body):
    peer = answers(answer_head(len(body)) + body)
    asker = client(peer.port, attempts=2)
    with pytest.raises(PeerError, match=f"{HOST}:{peer.port}: {FOLDER}: "):
        asker.files(FOLDER)


@pytest.mark.parametrize(
    "answer",
    [b"", b"\r\n\r\n", b"SSH-2.0-x\r\n", b"HTTP/1.1 999999 x\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000,
     b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n"],
)  # fmt: skip
def test_another_service_at_the_port_is_named(tmp_path, answers, answer):
    peer = answers(answer, hold=False)
    with refused(peer.port, "given up after 2"):
        client(peer.port, attempts=2).fetch(FOLDER, NAME, record_of(b"abc"), str(tmp_path / "here"))
    assert tree(tmp_path / "here") == {}


def test_an_answer_before_the_connection_is_reset_is_heard(tmp_path):
    """The peer answers and closes while the sender waits in the middle of a chunk, and has read almost nothing."""
    large = content(32 * MIB)
    waits: list[float] = []
    with socket.create_server((HOST, 0)) as listener:

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
        peer = client(listener.getsockname()[1], sleep=waits.append, attempts=2)
        with refused(peer.port, "answered 507: full"):
            peer.send(FOLDER, NAME, str(put(tmp_path, large)), record_of(large))
    assert waits == []
