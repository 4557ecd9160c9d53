"""A node's own disk, which its ranks share, and which ranks make a node."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern import storage
from quern.train.checkpoint.mirror import disk as disk_module
from quern.train.checkpoint.mirror.disk import Disk
from quern.train.checkpoint.mirror.nodes import Nodes, find_nodes, reachable_address
from quern.train.checkpoint.mirror.peer_files import mirror_folder
from quern.train.processes.address import own_address

TOKEN, OTHER = "a" * 32, "b" * 32


@pytest.fixture
def disk(tmp_path):
    found = Disk(str(tmp_path / "nvme" / "run"))
    found.open()
    return found


def tree(disk: Disk) -> dict[str, bytes]:
    root = Path(disk.root)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.glob("**/*") if path.is_file()}


def folders(disk: Disk) -> set[str]:
    return set(os.listdir(disk.root))


def write(disk: Disk, step: int, files: dict[str, bytes], token: str = TOKEN) -> None:
    for name, data in files.items():
        Path(disk.stage(step, token), name).write_bytes(data)


def test_ranks_of_a_node_settle_their_own_files(disk):
    """At the same time, each at its own pace; the last one leaves no staging folder."""
    for turn in range(20):
        step, barrier = 1 + turn, threading.Barrier(4, timeout=30)

        def rank(number: int, step: int = step, barrier: threading.Barrier = barrier) -> None:
            write(disk, step, {f"__{number}_{n}.distcp": b"%d %d" % (number, n) for n in range(number)})
            barrier.wait()  # all have written before one settles
            disk.settle(step, TOKEN, [f"__{number}_{n}.distcp" for n in range(number)])

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert tree(disk) == {
        f"step_{step:08d}/__{number}_{n}.distcp": b"%d %d" % (number, n)
        for step in range(1, 21) for number in range(4) for n in range(number)
    }  # fmt: skip
    assert folders(disk) == {f"step_{step:08d}" for step in range(1, 21)}
    assert disk.steps() == list(range(1, 21))


def test_a_rank_settles_over_files_of_a_branch_that_was_left(disk):
    write(disk, 4, {"__0_0.distcp": b"old", "__1_0.distcp": b"other"})
    disk.settle(4, TOKEN, ["__0_0.distcp", "__1_0.distcp"])
    write(disk, 4, {"__0_0.distcp": b"new"}, OTHER)
    assert tree(disk)["step_00000004/__0_0.distcp"] == b"old"
    disk.settle(4, OTHER, ["__0_0.distcp"])
    assert tree(disk) == {"step_00000004/__0_0.distcp": b"new", "step_00000004/__1_0.distcp": b"other"}


def test_files_and_their_names_are_on_the_disk_before_a_rank_says_so(disk, monkeypatch):
    write(disk, 4, {"a": b"1", "b": b"2"})
    events = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: events.append("rename") or replace(*paths))
    monkeypatch.setattr(storage, "sync", lambda path: events.append(path))
    disk.settle(4, TOKEN, ["a", "b"])
    assert events[:2] == ["rename", "rename"]
    assert set(events[2:]) == {disk.root, disk.folder(4)}


@pytest.mark.parametrize("moved", [0, 1, 2])
@pytest.mark.parametrize("killed", [True, False])
def test_an_end_between_two_renames(disk, monkeypatch, moved, killed):
    """What the save wrote is of no use: it goes, at once or at the next start, and the same step can be saved again."""
    names = ["__0_0.distcp", "__0_1.distcp", "__0_2.distcp"]
    write(disk, 4, dict.fromkeys(names, b"first"))
    done = []

    def replace(source: str, target: str) -> None:
        if len(done) == moved:
            raise OSError(5, "Input/output error", source)
        done.append(target)
        os.rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(OSError, match="Input/output error"):
            disk.settle(4, TOKEN, names)
    if killed:
        assert len(tree(disk)) == 3
        Disk(disk.root).open()
    else:
        disk.discard(4, TOKEN)
    assert folders(disk) == {"step_00000004"}
    assert len(tree(disk)) == moved  # under their names: no manifest has their checksums
    write(disk, 4, dict.fromkeys(names, b"second"), OTHER)
    disk.settle(4, OTHER, names)
    assert tree(disk) == {f"step_00000004/{name}": b"second" for name in names}


def test_a_failed_save_leaves_what_others_write(disk):
    write(disk, 4, {"a": b"1"})
    write(disk, 4, {"a": b"2"}, OTHER)
    write(disk, 6, {"a": b"3"})
    disk.discard(4, TOKEN)
    disk.discard(4, TOKEN)  # nothing there
    assert sorted(tree(disk).values()) == [b"2", b"3"]


def test_a_start_tidies_what_was_being_written_or_removed_and_nothing_else(disk):
    root = Path(disk.root)
    for name in (
        "step_00000002", ".step_00000002.mirror", f".step_00000004.{TOKEN}.tmp", f".step_00000006.{TOKEN}.replaced",
        f".step_00000002.{OTHER}.replaced", "notes",
    ):  # fmt: skip
        (root / name).mkdir()
        (root / name / "x").write_bytes(name.encode())
    disk.open()
    assert folders(disk) == {"step_00000002", ".step_00000002.mirror", "step_00000006", "notes"}
    assert (root / "step_00000002" / "x").read_bytes() == b"step_00000002"  # a folder put aside is put back only
    assert (root / "step_00000006" / "x").read_bytes() == b".step_00000006.%b.replaced" % TOKEN.encode()  # if none is
    assert disk.steps() == [2, 6]


def test_a_folder_that_is_there_is_opened_again(disk):
    write(disk, 4, {"a": b"1"})
    disk.settle(4, TOKEN, ["a"])
    disk.open()
    assert tree(disk) == {"step_00000004/a": b"1"}


def test_removed_steps_take_their_mirrored_parts_along(disk):
    for step in (2, 4, 6):
        write(disk, step, {"a": b"1"})
        disk.settle(step, TOKEN, ["a"])
        parts = Path(mirror_folder(disk.root, f"step_{step:08d}"))
        parts.mkdir()
        (parts / "b.part").write_bytes(b"2")
    disk.remove([2, 6, 8])  # 8: a node that has none of it
    assert folders(disk) == {"step_00000004", ".step_00000004.mirror"}
    disk.remove([])
    assert disk.steps() == [4]


def test_parts_of_a_step_whose_folder_is_gone_are_found(disk):
    """A node was still sending to this one when the step was removed here; the next start removes what came."""
    Path(mirror_folder(disk.root, "step_00000004")).mkdir()
    assert disk.steps() == [4]
    disk.remove(disk.steps())
    assert folders(disk) == set()


def test_one_folder_that_cannot_be_removed_keeps_no_other(disk, monkeypatch):
    for step in (2, 4, 6):
        os.mkdir(disk.folder(step))
    remove = disk_module.remove_folder

    def refuse(path: str, token: str) -> None:
        if path.endswith("4"):
            raise OSError(16, "Device or resource busy", path)
        remove(path, token)

    monkeypatch.setattr(disk_module, "remove_folder", refuse)
    with pytest.raises(OSError, match="busy"):
        disk.remove([2, 4, 6])
    assert folders(disk) == {"step_00000004"}


# --- nodes


class Told:
    """An agreement whose ranks are where the test says; this one is rank ``rank``."""

    def __init__(self, rank: int, keys: list[tuple[str, str]]) -> None:
        self.rank, self.keys = rank, keys

    def gather(self, mine: tuple[str, str]) -> list[tuple[str, str]]:
        assert mine == self.keys[self.rank]
        return self.keys


def nodes_of(rank: int, keys: list[tuple[str, str]]) -> Nodes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: keys[rank][0])
        patch.setenv("GROUP_RANK", keys[rank][1])
        return find_nodes(Told(rank, keys))


@given(
    st.lists(st.tuples(st.sampled_from(["h0", "h1", "h10"]), st.sampled_from(["", "0", "1"])), min_size=1, max_size=9)
)
def test_ranks_of_one_host_and_group_are_a_node(keys):
    views = [nodes_of(rank, keys) for rank in range(len(keys))]
    first = views[0]
    assert {(view.of_rank, view.hosts) for view in views} == {(first.of_rank, first.hosts)}
    for a, key_a in enumerate(keys):
        assert first.hosts[first.of_rank[a]] == key_a[0]
        for b, key_b in enumerate(keys):
            assert (first.of_rank[a] == first.of_rank[b]) == (key_a == key_b)
    numbers = range(len(first.hosts))
    assert sorted(rank for node in numbers for rank in first.ranks(node)) == list(range(len(keys)))
    lowest = [min(first.ranks(node)) for node in numbers]
    assert lowest == sorted(lowest)
    for rank, view in enumerate(views):
        assert view.mine == first.of_rank[rank]
        assert rank in view.ranks(view.mine)
        assert view.leads == (rank in lowest)


def test_no_launcher(monkeypatch):
    monkeypatch.delenv("GROUP_RANK", raising=False)
    nodes = find_nodes(Told(0, [(socket.gethostname(), "")]))
    assert (nodes.mine, nodes.leads, nodes.ranks(0), nodes.hosts) == (0, True, (0,), (socket.gethostname(),))


NAMES = {
    "head": (socket.AF_INET, ("10.0.0.1", 1)), "localhost": (socket.AF_INET, ("127.0.0.1", 1)),
    "six": (socket.AF_INET6, ("fd00::1", 1, 0, 0)), "far": (socket.AF_INET, ("192.0.2.7", 1)),
    "127.0.0.1": (socket.AF_INET, ("127.0.0.1", 1)), "10.0.0.1": (socket.AF_INET, ("10.0.0.1", 1)),
    "fd00::1": (socket.AF_INET6, ("fd00::1", 1, 0, 0)),
}  # fmt: skip
ROUTES = {"10.0.0.1": "10.0.0.42", "127.0.0.1": "127.0.0.1", "fd00::1": "fd00::42"}


class Routes:
    """A machine with two interfaces and a loopback: from which address it reaches another."""

    def getaddrinfo(self, host: str, port: int, type: int):
        if host not in NAMES:
            raise socket.gaierror(-2, "Name or service not known")
        family, target = NAMES[host]
        return [(family, type, 17, "", (target[0], port, *target[2:]))]

    def socket(self, family: int, kind: int, protocol: int):
        assert kind == socket.SOCK_DGRAM  # no packet is sent
        return Probe(family)


class Probe:
    def __init__(self, family: int) -> None:
        self.family = family

    def __enter__(self):
        return self

    def __exit__(self, *args):
        pass

    def connect(self, target) -> None:
        assert len(target) == (4 if self.family == socket.AF_INET6 else 2)
        if target[0] not in ROUTES:
            raise OSError(101, "Network is unreachable")
        self.source = ROUTES[target[0]]

    def getsockname(self):
        return (self.source, 5, 0, 0) if self.family == socket.AF_INET6 else (self.source, 5)


@pytest.mark.parametrize(
    ("master", "expected"),
    [
        (None, "127.0.0.1"), ("", "127.0.0.1"), ("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"),
        ("head", "10.0.0.42"), ("six", "fd00::42"), ("nobody.invalid", "127.0.0.1"), ("far", "127.0.0.1"),
    ],
)  # fmt: skip
def test_own_address_is_that_on_the_way_to_the_master(monkeypatch, master, expected):
    assert address_of(monkeypatch, master, ("here",), []) == expected


@pytest.mark.parametrize(
    ("hosts", "others", "expected"),
    [
        (("here", "there"), ["10.0.0.1"], "10.0.0.42"),  # this machine calls itself 127.0.0.1, the other one does not
        (("here", "there"), ["fd00::1"], "fd00::42"),
        (("here", "there"), ["127.0.0.1"], "127.0.0.1"),  # nobody knows better
        (("here", "here"), ["10.0.0.1"], "127.0.0.1"),  # two agents on one machine
    ],
)
def test_a_machine_that_the_master_s_name_leads_back_to(monkeypatch, hosts, others, expected):
    assert address_of(monkeypatch, "localhost", hosts, others) == expected


def address_of(monkeypatch, master: str | None, hosts: tuple[str, ...], others: list[str]) -> str:
    routes = Routes()
    monkeypatch.setattr(socket, "getaddrinfo", routes.getaddrinfo)
    monkeypatch.setattr(socket, "socket", routes.socket)
    if master is None:
        monkeypatch.delenv("MASTER_ADDR", raising=False)
    else:
        monkeypatch.setenv("MASTER_ADDR", master)

    class Others:
        def gather(self, mine: str) -> list[str]:
            return [mine, *others]

    return reachable_address(Others(), Nodes(0, tuple(range(len(hosts))), hosts))  # type: ignore[arg-type]


@pytest.mark.parametrize("master", ["127.0.0.1", "localhost", "a" * 64, "a..b"])  # no name to ask a server for
def test_own_address_by_the_system_s_resolver(master):
    assert own_address(master) in ("127.0.0.1", "::1")


def test_own_address_of_this_machine_by_ipv6():
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.connect(("::1", 1))
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert own_address("::1") == "::1"
