"""One file between nodes' disks, several at work on it: senders at once, parts of earlier ones, a hash remembered."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from quern.train.checkpoint.mirror import peer_files
from quern.train.checkpoint.store.rate import RateLimit
from support.train.peer_case import FOLDER, MIB, NAME, PLACE, content, head, put, put_head, record_of, rest, tree
from support.waits import until

pytestmark = pytest.mark.slow


def test_senders_of_the_same_file_do_not_disturb_one_another(there):
    """Eight at once, each slowed at its own pace, while one more holds its connection half way through."""
    data = content(6 * MIB)
    path = str(put(there.here, data))

    def send(seed: int) -> None:
        limit = RateLimit((seed + 2) * 8 * MIB)
        there.peer(limit=limit).send(FOLDER, NAME, path, record_of(data))

    with there.half_sent(data) as first:
        with ThreadPoolExecutor(8) as senders:
            list(senders.map(send, range(8), timeout=300))
        assert (there.root / PLACE).read_bytes() == data
        first.sendall(data[2 * MIB :])
        assert rest(first).status == 201
    assert tree(there.root) == {PLACE: data}
    assert os.listdir(there.root) == [FOLDER]


def test_a_second_sender_begins_at_its_own_byte_0(there):
    data = content(4 * MIB)
    start = 2 * MIB
    with there.half_sent(data) as first:
        assert there.part(data) == {"standing": False, "bytes": 0}
        half = put_head(data, Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}", Content_Length=start)
        assert there.ask(half + data[start:]).status == 409
        there.reset(put_head(data) + data[:MIB])  # a second one that breaks leaves nothing
        first.sendall(data[start:])
        assert rest(first).status == 201
    until(lambda: tree(there.root) == {PLACE: data})  # the node may read of the second one's end later


def test_a_sender_that_breaks_after_another_one_is_done_leaves_nothing(there):
    data = content(4 * MIB)
    with there.half_sent(data):
        there.send(data)
    until(lambda: os.listdir(there.root) == [FOLDER])
    assert tree(there.root) == {PLACE: data}


def test_a_restart_removes_parts_nobody_goes_on_with(node, tmp_path):
    root, data = tmp_path / "there", content(MIB)
    part, mirror = f"{NAME}.{record_of(data).sha256}", f".{FOLDER}.mirror"
    away = put(tmp_path / "away", b"keep", f"{part}.0123abcd.part")
    keep = put(root, b"abc", f"{part}.part", folder=mirror)
    gone = put(root, b"abc", f"{part}.0123abcd.part", folder=mirror)
    (root / ".step_00000001.mirror").symlink_to(away.parent)
    there = node(root)
    assert (keep.exists(), gone.exists(), away.exists()) == (True, False, True)
    assert there.part(data) == {"standing": False, "bytes": 3}


DATA = content(2 * MIB)


@pytest.mark.parametrize(
    ("part", "waits"),
    [
        pytest.param(bytes(MIB), 1, id="zeros that a crash left"),
        pytest.param(bytes(len(DATA)), 1, id="zeros as long as the file"),
        pytest.param(bytes(len(DATA) + 10), 1, id="longer zeros"),
        pytest.param(DATA, 0, id="all of it, killed before it got its name"),
        pytest.param(DATA + b"junk", 0, id="more than that"),
    ],
)
def test_a_part_that_holds_other_bytes_is_not_trusted(there, part, waits):
    put(there.root, part, f"{NAME}.{record_of(DATA).sha256}.part", folder=f".{FOLDER}.mirror")
    there.send(DATA)
    assert tree(there.root) == {PLACE: DATA}
    assert len(there.waits) == waits


def test_a_hash_is_computed_once_and_again_when_the_file_changes(there, monkeypatch):
    data = bytearray(content(3 * MIB))
    path = put(there.root, bytes(data))
    read = []
    real = peer_files._hash
    monkeypatch.setattr(peer_files, "_hash", lambda descriptor, size: read.append(size) or real(descriptor, size))
    hour = 3600 * 10**9

    def told_right() -> bool:
        answer = there.ask(head("HEAD", f"/{PLACE}"))
        return answer.split(b"X-SHA256: ")[1][:64].decode() == record_of(bytes(data)).sha256

    os.utime(path, ns=(hour, hour))
    assert all(told_right() for _ in range(3))
    assert len(read) == 1
    data[5] ^= 1  # in place: same size and inode, another time
    path.write_bytes(data)
    os.utime(path, ns=(2 * hour, 2 * hour))
    assert all(told_right() for _ in range(2))
    assert len(read) == 2
    data[6] ^= 1  # another file of the same size and time
    other = there.root / "other"
    other.write_bytes(data)
    os.utime(other, ns=(2 * hour, 2 * hour))
    other.replace(path)
    assert all(told_right() for _ in range(2))
    assert len(read) == 3
    data.append(0)
    path.write_bytes(data)
    os.utime(path, ns=(2 * hour, 2 * hour))
    assert all(told_right() for _ in range(2))
    assert len(read) == 4
    for _ in range(20):  # just written: the clock may not have ticked since
        data[7] = (data[7] + 1) % 256
        path.write_bytes(data)
        os.utime(path, ns=(time.time_ns() // 10**9 * 10**9,) * 2)
        assert told_right()
    path.unlink()
    assert there.ask(head("HEAD", f"/{PLACE}")).status == 404
