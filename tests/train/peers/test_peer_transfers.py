"""Checkpoint files between nodes' disks: what arrives is right or does not arrive, whatever the network does."""

from __future__ import annotations

import itertools
import os

import pytest

from quern.errors import InputError
from quern.train.checkpoint.mirror import peer_files
from quern.train.checkpoint.mirror.peer_files import mirror_folder
from support.train.peer_case import FOLDER, MIB, NAME, PLACE, Fault, content, head, put, put_head, record_of, refused
from support.waits import until

pytestmark = pytest.mark.slow

# --- whole files


@pytest.mark.parametrize("size", [0, 1, 2, MIB - 1, MIB, MIB + 1, (8 << 20) + 12345])
def test_a_file_moves(there, way, size):
    data = content(size)
    there.move(way, data)
    assert there.arrived(way) == {PLACE: data}
    assert os.listdir(there.root) == [FOLDER]
    assert there.waits == []


def test_a_file_with_other_content_is_replaced(there, way):
    for seed, size in ((1, 2 * MIB), (2, 3 * MIB)):
        data = content(size, seed)
        there.move(way, data)
        assert there.arrived(way) == {PLACE: data}


def test_what_is_there_is_listed_and_nothing_else(there, tmp_path):
    sizes = {".metadata": 3, NAME: 10, "__12_3.distcp": 0, "a.B-c_9": 4, ".x": 1}
    for name, size in sizes.items():
        put(there.root, bytes(size), name)
    put(there.root, b"x", folder="step_123456789")
    for name in (f".{NAME}.{'0' * 32}.tmp", "..up", "a b", "ü", "x" * 129):
        put(there.root, b"no", name)
    for folder in ("step_7", f".{FOLDER}.mirror", "step_00001000x", "other"):
        put(there.root, b"no", folder=folder)
    secret = put(tmp_path / "away", b"secret")
    (there.root / FOLDER / "link").symlink_to(secret)
    (there.root / FOLDER / "folder").mkdir()
    (there.root / "step_00000009").symlink_to(secret.parent)
    (there.root / "step_00000010").write_bytes(b"a file")
    peer = there.peer()
    assert peer.files(FOLDER) == sizes
    assert peer.files("step_00000009") == peer.files("step_00000010") == peer.files("step_00000077") == {}


def test_a_range_is_a_slice(there):
    data = content(5000)
    put(there.root, data)

    def part(asked: str) -> bytes:
        return there.ask(head("GET", f"/{PLACE}", Range=asked))

    cases = {
        "bytes=0-": (0, 5000), "bytes=4999-": (4999, 5000), "bytes=10-19": (10, 20), "bytes=0-0": (0, 1),
        "bytes=4000-9999": (4000, 5000), "bytes=-7": (4993, 5000), "bytes=-9000": (0, 5000),
    }  # fmt: skip
    for asked, (start, stop) in cases.items():
        answer = part(asked)
        assert (answer.status, answer.body) == (206, data[start:stop])
        assert f"\r\nContent-Range: bytes {start}-{stop - 1}/5000\r\n".encode() in answer
    for asked in ("bytes=5000-", "bytes=9-8", "bytes=-0"):
        answer = part(asked)
        assert answer.status == 416
        assert b"Content-Range: bytes */5000" in answer
    for asked in ("lines=1-2", "bytes=1-2,4-5", "bytes=--1"):  # not understood: the whole file
        answer = part(asked)
        assert (answer.status, answer.body) == (200, data)


def test_a_head_tells_size_and_hash(there):
    data = content(MIB + 5)
    put(there.root, data)
    answer = there.ask(head("HEAD", f"/{PLACE}"))
    assert (answer.status, answer.body) == (200, b"")
    assert f"Content-Length: {len(data)}\r\n".encode() in answer
    assert f"X-SHA256: {record_of(data).sha256}\r\n".encode() in answer


# --- broken lines


@pytest.mark.parametrize("at", [2000, 3 * MIB, 5 * MIB + 7])
def test_a_transfer_goes_on_where_the_line_broke(there, line, way, at):
    data = content(6 * MIB)
    broken = line(there.port, Fault("cut", way, at))
    there.move(way, data, broken.port, **({"sleep": there.broken_off} if way == "send" else {}))
    assert there.arrived(way) == {PLACE: data}
    assert broken.connections == {"send": 4, "fetch": 2}[way]  # each attempt to send asks first what is there
    assert broken.moved[way] < len(data) + 1000 * broken.connections  # nothing came twice
    assert os.listdir(there.root) == [FOLDER]


def test_a_line_that_always_breaks_is_given_up(there, line):
    data = content(6 * MIB)
    broken = line(there.port, Fault("cut", "fetch", at=500, times=99))
    with refused(broken.port, "given up after 4 attempts"):
        there.move("fetch", data, broken.port, attempts=4)
    assert there.arrived("fetch") == {}
    assert broken.connections == 4
    assert [0.5 * 2**n * 0.5 <= wait <= 0.5 * 2**n for n, wait in enumerate(there.waits)] == [True] * 3
    # A broken send leaves what arrived for the next one.
    broken = line(there.port, Fault("cut", "send", at=MIB + 2000, times=99))
    with refused(broken.port, "given up after 2", f"step_00002000/{NAME}"):
        there.send(data, broken.port, folder="step_00002000", attempts=2, sleep=there.broken_off)
    assert not (there.root / "step_00002000").exists()
    (part,) = (there.root / ".step_00002000.mirror").iterdir()
    until(lambda: part.stat().st_size > 2 * MIB)  # of both attempts
    arrived = part.read_bytes()  # once: the node may still be writing the end of it
    assert 2 * MIB < len(arrived) < 2 * MIB + 4000
    assert arrived == data[: len(arrived)]
    assert mirror_folder(str(there.root), "step_00002000") == str(part.parent)


def test_nobody_listens(there):
    there.close()
    with refused(there.port, "given up after 3 .*refused"):
        there.fetch(b"x", attempts=3)
    assert len(there.waits) == 2


@pytest.mark.parametrize("at", [1000, 2 * MIB + 17, 3 * MIB])
def test_a_bit_that_flips_is_found(there, line, way, at):
    data = content(3 * MIB)
    flipping = line(there.port, Fault("flip", way, at, times=3))
    with refused(flipping.port, "given up after 3.*" + {"send": "422.*SHA-256", "fetch": "expected SHA-256"}[way]):
        there.move(way, data, flipping.port, attempts=3)
    assert there.arrived(way) == {}
    flipping = line(there.port, Fault("flip", way, at))
    there.move(way, data, flipping.port)
    assert there.arrived(way) == {PLACE: data}
    assert flipping.moved[way] > 2 * len(data)  # all of it came again


def test_a_bit_that_flips_before_the_line_breaks_is_found(there, line, way):
    """The hash is of the whole file, also of what an earlier attempt brought."""
    data = content(4 * MIB)
    faults = [Fault("flip", way, at=MIB), Fault("cut", way, at=3 * MIB)]
    waits = iter([there.broken_off])  # after the cut; the next attempt is refused, and nothing of it is left

    def sleep(seconds: float) -> None:
        for wait in itertools.islice(waits, 1):
            wait(seconds)

    there.move(way, data, line(there.port, *faults).port, **({"sleep": sleep} if way == "send" else {}))
    assert there.arrived(way) == {PLACE: data}
    assert [fault.times for fault in faults] == [0, 0]


# --- wrong files


def test_a_damaged_file_of_a_peer_is_not_asked_for_again(there, line):
    data = content(2 * MIB)
    put(there.root, data[:-1] + bytes([data[-1] ^ 1]))
    through = line(there.port)
    with refused(through.port, "expected SHA-256 .* the peer's file has"):
        there.fetch(data, through.port)
    assert through.moved["fetch"] < 1.5 * len(data)
    put(there.root, data[:-1])
    with refused(there.port, f"expected {len(data)} bytes, the peer has {len(data) - 1}"):
        there.fetch(data)
    with refused(there.port, "answered 404", f"{FOLDER}/nope"):
        there.fetch(data, name="nope")
    assert there.arrived("fetch") == {}
    assert there.waits == []


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda data: b"?" + data[1:], "expected SHA-256 {sha256}, has another"),
     (lambda data: data + b"?", "expected 2097152 bytes, has 2097153"),
     (None, "no such file")],
    ids=["another byte", "longer", "gone"],
)  # fmt: skip
def test_a_damaged_file_here_is_not_sent(there, change, message):
    data = content(2 * MIB)
    path = there.here / "a" if change is None else put(there.here, change(data))
    with pytest.raises(InputError, match=f"{path}: " + message.format(sha256=record_of(data).sha256)):
        there.peer().send(FOLDER, NAME, str(path), record_of(data))
    assert there.arrived("send") == {}
    assert there.waits == []


def test_a_body_that_is_not_as_announced(there):
    data = content(5000)
    target = there.root / PLACE
    short = there.ask(put_head(data) + data[:-1], end=True)
    assert (short.status, target.exists()) == (400, False)
    assert b"expected 1 bytes more" in short
    there.broken_off()
    (part,) = there.mirror.iterdir()
    assert part.read_bytes() == data[:-1]
    longer = there.ask(put_head(data, Content_Length=len(data) - 1) + data, end=True)
    assert (longer.status, target.exists()) == (422, False)
    assert there.arrived("send") == {}
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
            assert there.ask(put_head(data, **headers) + data, end=True).status == code, headers
    assert there.arrived("send") == {}
    # Beyond the announced bytes nothing is read.
    assert there.ask(put_head(data) + data + b"GET / HTTP/1.1\r\n\r\n", end=True).status in (201, 200)
    assert target.read_bytes() == data


def test_a_file_that_stands_is_not_taken_again(there, line):
    data = content(8 * MIB)
    there.send(data)
    before = os.stat(there.root / PLACE)
    through = line(there.port)
    there.send(data, through.port)
    assert through.connections == 1
    assert through.moved["send"] < 1000
    with there.connect() as sock:
        sock.sendall(put_head(data))  # and not one byte of it
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")
    after = os.stat(there.root / PLACE)
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_refusal_while_the_body_is_on_its_way_is_heard(there, monkeypatch):
    """The client stops sending and says why, without another attempt."""
    real = os.write

    def full(descriptor: int, chunk: bytes) -> int:
        if os.fstat(descriptor).st_size >= 2 * MIB and os.readlink(f"/proc/self/fd/{descriptor}").endswith(".part"):
            raise OSError(28, "No space left on device")
        return real(descriptor, chunk)

    monkeypatch.setattr(peer_files.os, "write", full)
    with refused(there.port, "answered 507: .*No space left on device"):
        there.send(content(64 * MIB))
    assert there.waits == []
    assert there.arrived("send") == {}
