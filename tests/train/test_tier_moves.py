"""Which node moves which file and to which other, when a checkpoint goes into the store, what the end of a run waits
for, and from where a file is brought."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quern.errors import InputError, QuernError
from quern.train.checkpoint.format.manifest import Checkpoint, FileRecord, check_file, read_manifest
from quern.train.checkpoint.mirror import whole
from quern.train.checkpoint.mirror.nodes import Nodes
from quern.train.checkpoint.mirror.peers import PeerError
from quern.train.checkpoint.store.owner import read_owner
from quern.train.checkpoint.store.store import Store
from quern.train.checkpoint.tiers import tiers as module
from quern.train.checkpoint.tiers.tiers import Tiers
from quern.train.config import CheckpointConfig
from support.train.rank_threads import results, run_all
from support.train.tier_case import manifest


class Recorder:
    """In place of a node's ``ReplicationWorker``."""

    def __init__(self, writes, first, disk, mirror, store, server=None) -> None:
        self.writes, self.first, self.disk, self.store, self.mirror = writes, first, disk, store, mirror
        self.port = None if server is None else 7000
        self.events: list[tuple[Any, ...]] = []
        self.left: list[str] = []
        self.under_way: set[int] = set()
        self.on_wait = lambda: None
        self.closed = False

    def published(self, step, path, *, store, names=None, mirror=True) -> None:
        self.events.append(("published", step, store, mirror, None if names is None else sorted(names)))

    def remove(self, steps) -> None:
        if gone := sorted(steps):
            self.events.append(("remove", *gone))

    def wait(self, seconds) -> bool:
        self.on_wait()
        self.events.append(("wait", seconds))
        return not self.left

    def unfinished(self) -> list[str]:
        return self.left

    def storing(self) -> set[int]:
        return set(self.under_way)

    def close(self) -> None:
        self.closed = True


class Made:
    """In place of an uploader or a server: how it was made."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments, self.options = arguments, options


@pytest.fixture(autouse=True)
def no_processes(monkeypatch):
    monkeypatch.setattr(module, "ReplicationWorker", Recorder)
    monkeypatch.setattr(module, "Uploader", Made)
    monkeypatch.setattr(module, "ServerProcess", Made)


def on_nodes(
    root: Path, node_of: list[int], config: CheckpointConfig, call, hosts: tuple[str, ...] | None = None
) -> list[Any]:
    """What ``call(tiers, its worker or None)`` returns on every rank, ranks being on the nodes that are named, each on
    a host of its own if nothing else is said. Node 3 has the address 10.0.0.3."""
    hosts = hosts or tuple(f"h{node}" for node in range(max(node_of) + 1))

    def rank(ranks):
        tiers = Tiers(str(root / "run"), config, ranks)
        try:
            return call(tiers, tiers._replication)
        finally:
            tiers.close()

    (root / "run" / "checkpoints").mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "find_nodes", lambda ranks: Nodes(ranks.rank, tuple(node_of), hosts))
        patch.setattr(module, "reachable_address", lambda ranks, nodes: f"10.0.0.{nodes.mine}")
        return results(run_all(len(node_of), rank))


def config_for(root: Path, **settings: Any) -> CheckpointConfig:
    return CheckpointConfig(**settings) if "local" in settings else CheckpointConfig(
        local=str(root / "nvme{node}"), **settings
    )  # fmt: skip


def write(root: Path, step: int, sizes: dict[str, int]) -> Checkpoint:
    """A published checkpoint of the run without its tensor files."""
    folder = root / "run" / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    files = {
        name: FileRecord(hashlib.sha256(bytes(size)).hexdigest(), size)
        for name, size in {".metadata": 3, **sizes}.items()
    }
    (folder / "manifest.json").write_bytes(manifest(step, files).to_bytes())
    (folder / ".metadata").write_bytes(bytes(3))
    return Checkpoint(step, str(folder))


# --- who moves what the last start left


NAMES = [f"__{rank}_{n}.distcp" for rank in (0, 1, 2, 3, 7) for n in (0, 1)]


@st.composite
def layouts(draw):
    nodes = draw(st.integers(1, 3))
    node_of = [*range(nodes), *draw(st.lists(st.integers(0, nodes - 1), max_size=2))]
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1, max_size=5))
    return node_of, {name: draw(st.sets(st.integers(0, nodes - 1))) for name in names}


@pytest.mark.slow
@settings(max_examples=25)
@given(layouts())
def test_one_node_that_has_a_file_moves_it_and_its_writer_s_if_it_can(layout):
    node_of, holders = layout
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        checkpoint = write(root, 4, dict.fromkeys(holders, 5))

        def call(tiers, behind):
            if behind is not None:
                Path(tiers.disk.folder(4)).mkdir()
                for file, nodes in holders.items():
                    if tiers.nodes.mine in nodes:
                        Path(tiers.disk.folder(4), file).write_bytes(bytes(5))
            tiers.agreement.gather(None)
            tiers.find(checkpoint.path, read_manifest(checkpoint.path), hashes=True)
            tiers.resume_pending(checkpoint)
            return tiers.nodes.mine, None if behind is None else behind.events

        outcomes = on_nodes(root, node_of, config_for(root), call)
        moved = {node: events for node, events in outcomes if events is not None}
        assert sum(events is not None for _, events in outcomes) == len(moved) == max(node_of) + 1
        asked = {}
        for node, events in moved.items():
            ((kind, step, store, mirror, names),) = events
            assert (kind, step, store, mirror) == ("published", 4, False, True)
            asked[node] = names
        assert Counter(file for names in asked.values() for file in names) == Counter(
            file for file, nodes in holders.items() if nodes
        )
        for node, names in asked.items():
            for file in names:
                writer = node_of[int(file[2]) % len(node_of)]
                assert node in holders[file]
                assert writer not in holders[file] or node == writer


@pytest.mark.parametrize("damaged", [b"ab", b"abcdX"])
def test_a_damaged_copy_is_not_the_one_that_is_moved(tmp_path, damaged):
    """The mover would find it wrong and drop it, and the manifest would wait for ever."""
    checkpoint = write(tmp_path, 4, {"__0_0.distcp": 5})

    def call(tiers, behind):
        Path(tiers.disk.folder(4)).mkdir()
        Path(tiers.disk.folder(4), "__0_0.distcp").write_bytes(bytes(5) if tiers.nodes.mine else damaged)
        tiers.agreement.gather(None)
        tiers.find(checkpoint.path, read_manifest(checkpoint.path), hashes=True)
        tiers.resume_pending(checkpoint)
        return [event[-1] for event in behind.events]

    assert on_nodes(tmp_path, [0, 1], config_for(tmp_path), call) == [[[]], [["__0_0.distcp"]]]


def test_a_start_removes_from_the_disks_what_no_checkpoint_names(tmp_path):
    for step in (4, 8):
        write(tmp_path, step, {"__0_0.distcp": 5})

    def call(tiers, behind):
        for step in (2, 4, 6, 8):
            Path(tiers.disk.folder(step)).mkdir()
        tiers.resume_pending(None)
        return behind.events, tiers.disk.steps()

    assert on_nodes(tmp_path, [0, 1], config_for(tmp_path), call) == [([], [4, 8])] * 2


def test_files_in_the_run_s_folder_are_moved_by_who_would_write_them(tmp_path):
    checkpoint = write(tmp_path, 4, {"__0_0.distcp": 5})

    def call(tiers, behind):
        tiers.resume_pending(checkpoint)
        return None if behind is None else [behind.events, [behind.writes(f"__{rank}_0.distcp") for rank in range(6)]]

    config = CheckpointConfig(store=f"file://{tmp_path}/store")
    first, second, third = on_nodes(tmp_path, [0, 1, 1], config, call)
    assert third is None  # not its node's first
    assert first[0] == second[0] == [("published", 4, True, True, None)]
    assert first[1] == [True, False, False, True, False, False]
    assert second[1] == [not wrote for wrote in first[1]]


def mirror_of(tiers, behind) -> tuple[bool, Any] | None:
    """Whether it is rank 0's node, and the URL to which it mirrors."""
    if behind is None:
        return None
    if behind.mirror is not None:
        assert sorted(behind.mirror.options["environment"]) == ["QUERN_PEER_TOKEN"]
    return behind.first, behind.mirror and behind.mirror.arguments


def test_each_node_mirrors_to_the_next(tmp_path):
    urls = [(f"peer://10.0.0.{node}:7000",) for node in range(3)]
    outcomes = on_nodes(tmp_path, [0, 0, 1, 2], config_for(tmp_path), mirror_of)
    assert outcomes == [(True, urls[1]), None, (False, urls[2]), (False, urls[0])]
    alone = on_nodes(
        tmp_path, [0, 0], config_for(tmp_path), lambda tiers, behind: behind and (behind.mirror, behind.port)
    )
    assert alone == [(None, None), None]
    without = on_nodes(tmp_path, [0, 1], config_for(tmp_path, partner=False), lambda tiers, behind: behind.mirror)
    assert without == [None, None]


@pytest.mark.parametrize(
    ("hosts", "partners"),
    [
        ("ab", [1, 0]), ("aabb", [2, 2, 0, 0]), ("aba", [1, 2, 1]), ("abca", [1, 2, 3, 1]), ("aaab", [3, 3, 3, 0]),
        ("aa", [1, 0]), ("aaa", [1, 2, 0]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("partner", [True, False])
def test_the_mirror_is_on_another_machine_where_there_is_one(tmp_path, caplog, hosts, partners, partner):
    """Two agents on one machine are two nodes; what is mirrored between them is lost with it."""
    config = config_for(tmp_path, partner=partner)
    outcomes = on_nodes(tmp_path, list(range(len(hosts))), config, mirror_of, hosts=tuple(hosts))
    assert [found for _, found in outcomes] == [
        (f"peer://10.0.0.{to}:7000",) if partner else None for to in partners
    ]  # fmt: skip
    warning = "checkpoint.local: all nodes are on a; losing it loses the mirrors too"
    assert caplog.messages == [warning] * (len(hosts) if partner and set(hosts) == {"a"} else 0)


def test_each_node_has_an_uploader_of_its_own(tmp_path):
    config = CheckpointConfig(store=f"file://{tmp_path}/store", store_bytes_per_s=5e6)
    made = on_nodes(tmp_path, [0, 1, 1], config, lambda tiers, behind: behind and behind.store)
    owners = [store.options.pop("owner") for store in made[:2]]
    assert [store and (store.arguments, store.options) for store in made] == [
        ((config.store,), {"bytes_per_s": 5e6}), ((config.store,), {"bytes_per_s": 5e6}), None,
    ]  # fmt: skip
    assert owners[0] == owners[1]  # one folder, whichever node uploads
    assert owners[0].is_same(read_owner(Store(config.store)))


def test_what_was_started_is_closed_when_the_store_is_refused(tmp_path, monkeypatch):
    made = []

    class Closed(Recorder):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            made.append(self)

    def refuse(*arguments, **options):
        raise InputError("checkpoint.store: no such kind")

    monkeypatch.setattr(module, "ReplicationWorker", Closed)
    monkeypatch.setattr(module, "Uploader", refuse)
    config = CheckpointConfig(store=f"file://{tmp_path}/store")
    with pytest.raises(InputError, match="no such kind"):
        on_nodes(tmp_path, [0], config, lambda tiers, behind: None)
    assert [behind.closed for behind in made] == [True]


# --- what goes into the store


def save(tiers, step: int, removed: tuple[str, ...] = (), last: bool = False) -> bool:
    """As the manager does when a save has ended; whether it is to be uploaded."""
    store = tiers.agreement.broadcast_from_rank0(lambda: tiers.stores(step, last))
    tiers.published(Checkpoint(step, f"{tiers.root}/step_{step:08d}"), removed, store)
    return store


@pytest.mark.parametrize("every", [None, 1, 4])
@pytest.mark.parametrize("last", [8, 10])
@pytest.mark.parametrize("local", [True, False])
def test_every_so_many_steps_and_the_last(tmp_path, every, last, local):
    """By the definition: a checkpoint is uploaded if its step is a multiple, or no other follows; once each."""
    steps = [2, 4, 6, 8, 10][: last // 2]

    def call(tiers, behind):
        for step in steps:
            save(tiers, step)
        before = list(behind.events)
        tiers.finish(hurry=False)
        tiers.finish(hurry=False)  # the second has nothing to ask for
        return before, behind.events[len(before) :]

    local = {"local": str(tmp_path / "nvme")} if local else {}
    config = CheckpointConfig(store=f"file://{tmp_path}/store", store_every=every, upload_wait_s=7.5, **local)
    ((before, after),) = on_nodes(tmp_path, [0], config, call)
    assert [event[1] for event in before] == steps
    assert all(mirror for *_, mirror, _ in before)
    at_once = [step for _, step, store, _, _ in before if store]
    assert at_once == [step for step in steps if step % (every or 1) == 0]
    late = [("published", step, True, False, None) for step in {last} - set(at_once)]
    assert after == [*late, ("wait", 7.5), ("wait", 7.5)]


@pytest.mark.parametrize("every", [1, 3])
def test_every_so_many_steps_whatever_is_under_way(tmp_path, caplog, every):
    def call(tiers, behind):
        behind.under_way = {2, 4}
        return [step for step in range(1, 12) if save(tiers, step)]

    config = CheckpointConfig(store=f"file://{tmp_path}/store", store_every=every)
    assert on_nodes(tmp_path, [0], config, call) == [[step for step in range(1, 12) if step % every == 0]]
    assert caplog.messages == []


def test_one_upload_is_under_way_at_a_time(tmp_path, caplog):
    """Rank 0 decides, and all nodes do the same; when the store has it all, the next checkpoint is taken."""

    def call(tiers, behind):
        found = {}
        for step, under_way in [(2, set()), (4, {2}), (6, {2, 0}), (8, set()), (10, {8}), (12, {8})]:
            if behind is not None:  # what another node has left to do is not asked for
                behind.under_way = under_way if tiers.nodes.mine == 0 else {2}
            found[step] = save(tiers, step, last=step == 12)
        tiers.finish(hurry=False)
        return found, None if behind is None else behind.events

    config = CheckpointConfig(store=f"file://{tmp_path}/store", upload_wait_s=5)
    uploaded = {2: True, 4: False, 6: False, 8: True, 10: False, 12: False}
    asked = [("published", step, store, True, None) for step, store in uploaded.items()]
    events = [*asked, ("published", 12, True, False, None), ("wait", 5.0)]
    assert on_nodes(tmp_path, [0, 1, 1], config, call) == [(uploaded, events), (uploaded, events), (uploaded, None)]
    assert caplog.messages == [
        "checkpoint after step 4 is not uploaded: that of 2 is still under way",
        "checkpoint after step 6 is not uploaded: that of 0, 2 is still under way",
        "checkpoint after step 10 is not uploaded: that of 8 is still under way",
    ]  # nor is it said of the last, which is uploaded at the end


@pytest.mark.parametrize(
    ("free", "last", "uploaded"), [((1, 40, 190), 280, [1, 40, 90, 140, 190, 240]), ((), 50, [50])]
)
def test_one_in_fifty_is_uploaded_beside_what_hangs(tmp_path, caplog, free, last, uploaded):
    """Counted anew from each time that nothing is under way; nor is it said to be left out."""

    def call(tiers, behind):
        found = []
        for step in range(1, last + 1):
            behind.under_way = set() if step in free else {0}
            if save(tiers, step):
                found.append(step)
        return found

    config = CheckpointConfig(store=f"file://{tmp_path}/store")
    assert on_nodes(tmp_path, [0], config, call) == [uploaded]
    left_out = {int(re.match(r"checkpoint after step (\d+) is not uploaded", text)[1]) for text in caplog.messages}
    assert left_out.isdisjoint(uploaded)


@pytest.mark.parametrize(
    ("limit", "hurry", "expected"), [(600, False, 600), (600, True, 10), (3, True, 3), (0, True, 0)]
)
def test_who_asks_a_run_to_stop_does_not_wait_for_long(tmp_path, limit, hurry, expected):
    """What the run ends with is asked for all the same."""

    def call(tiers, behind):
        behind.under_way = {2}
        save(tiers, 4)
        tiers.finish(hurry)
        return behind.events[1:]

    config = CheckpointConfig(store=f"file://{tmp_path}/store", upload_wait_s=limit)
    assert on_nodes(tmp_path, [0], config, call) == [
        [("published", 4, True, False, None), ("wait", float(expected))]
    ]  # fmt: skip


def test_steps_to_be_stored_are_those_of_the_node(tmp_path):
    def call(tiers, behind):
        if behind is not None:
            behind.under_way = {2, 4} if behind.first else {6}
        return tiers.storing()

    config = CheckpointConfig(store=f"file://{tmp_path}/store")
    assert on_nodes(tmp_path, [0, 1, 1], config, call) == [{2, 4}, {6}, set()]


def test_what_is_removed_leaves_after_what_was_published(tmp_path):
    def call(tiers, behind):
        save(tiers, 6, ("step_00000002", "step_00000004"))
        return behind.events

    assert on_nodes(tmp_path, [0], config_for(tmp_path), call) == [
        [("published", 6, False, True, None), ("remove", 2, 4)]
    ]


def test_the_end_waits_on_all_ranks_for_the_nodes_that_move(tmp_path, caplog):
    """No rank leaves before the last node's files are where they go, or its time is up."""
    gate, left = threading.Event(), []

    def call(tiers, behind):
        if behind is not None and tiers.nodes.mine == 1:
            behind.on_wait = lambda: gate.wait(30)
            behind.left = ["step 6 to the store"]
        elif tiers.nodes.rank == 2:
            threading.Timer(0.1, lambda: (left.append(gate.is_set()), gate.set())).start()
        tiers.finish(hurry=False)
        return gate.is_set()

    config = CheckpointConfig(store=f"file://{tmp_path}/store")
    assert on_nodes(tmp_path, [0, 1, 1], config, call) == [True] * 3
    assert left == [False]
    assert caplog.messages == [
        "not moved yet: step 6 to the store; the next start moves the checkpoint it goes on from"
    ]


def test_a_run_without_tiers_moves_nothing(tmp_path):
    def call(tiers, behind):
        assert behind is None
        stored = save(tiers, 4, ("step_00000002",))
        tiers.resume_pending(Checkpoint(4, f"{tiers.root}/step_00000004"))
        tiers.finish(hurry=True)
        return stored, tiers.place(4, ["__0_0.distcp"]), tiers.steps(), tiers.storing()

    assert on_nodes(tmp_path, [0, 1], CheckpointConfig(), call) == [(False, None, set(), set())] * 2
    assert os.listdir(tmp_path / "run" / "checkpoints") == []


def test_a_place_is_the_node_s_own_folder(tmp_path):
    outcomes = on_nodes(
        tmp_path, [0, 1], config_for(tmp_path), lambda tiers, _: (tiers.run, tiers.place(4, ["a", "b"]))
    )
    for node, (run, place) in enumerate(outcomes):
        assert place.folder == f"{tmp_path}/nvme{node}/{run}/step_00000004"
        assert place.files == ("a", "b")


# --- from where a file is brought


class Nearby:
    """In place of the client of another node's server: it sees that node's disk, and remembers what it is asked."""

    root: Path
    asked: list[tuple[str, int, str]]
    """By which thread, of which node, and a file's name, "" for the list of a folder."""

    gone: frozenset[tuple[int, str]] = frozenset()
    """Nodes, and files that they show nobody any more."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self.node = int(host.rpartition(".")[2])

    def __str__(self) -> str:
        return f"node {self.node}"

    def folder(self, name: str) -> Path:
        (run,) = (self.root / f"nvme{self.node}").iterdir()
        return run / name

    def files(self, folder: str) -> dict[str, int]:
        self.asked.append((threading.current_thread().name, self.node, ""))
        found = self.folder(folder).glob("*")
        return {path.name: path.stat().st_size for path in found if (self.node, path.name) not in self.gone}

    def fetch(self, folder: str, name: str, record: FileRecord, into: str) -> None:
        self.asked.append((threading.current_thread().name, self.node, name))
        problem = check_file(str(self.folder(folder)), name, record, hashes=True)
        if problem is not None:
            raise PeerError(f"{self}: {name}: {problem.what}")
        shutil.copy(self.folder(folder) / name, into)


@pytest.fixture
def nearby(tmp_path, monkeypatch):
    """The list of what nodes ask each other; ``rank N`` is who asks."""
    asked: list[tuple[str, int, str]] = []
    monkeypatch.setattr(Nearby, "root", tmp_path, raising=False)
    monkeypatch.setattr(Nearby, "asked", asked, raising=False)
    monkeypatch.setattr(module, "Peer", Nearby)
    return asked


def bring(root: Path, node_of: list[int], copies: dict[str, dict[int, str]], lost=(), **options: Any) -> list[Any]:
    """Find, then bring all of ``copies`` to every node: by file and node ``whole`` or ``damaged``. ``lost``: files and
    nodes that have it no more after it was found. The holders, and what is on the disk then or the error, by rank."""
    checkpoint = write(root, 4, dict.fromkeys(copies, 5))
    found = read_manifest(checkpoint.path)

    def call(tiers, behind):
        folder = Path(tiers.disk.folder(4))
        if tiers.nodes.leads:
            folder.mkdir()
            for name, at in copies.items():
                if tiers.nodes.mine in at:
                    (folder / name).write_bytes(bytes(5) if at[tiers.nodes.mine] == "whole" else b"abcde")
        tiers.agreement.gather(None)
        problems = tiers.find(checkpoint.path, found, hashes=tiers.config.verify)
        holders = dict(tiers._holders or {})
        for name, node in lost:
            if node == tiers.nodes.mine and tiers.nodes.leads:
                (folder / name).unlink()
        tiers.agreement.gather(None)
        try:
            into = tiers.bring(checkpoint.path, found, copies)
        except QuernError as error:
            return problems, holders, str(error)
        assert into == str(folder)
        return problems, holders, {path.name: path.read_bytes() for path in folder.iterdir()}

    return on_nodes(root, node_of, config_for(root, **options), call)


def test_who_is_known_to_have_a_file_is_asked_first(tmp_path, nearby):
    """Nobody asks the node whose copy is damaged, nor the file's writer, whose copy is gone."""
    outcomes = bring(tmp_path, [0, 1, 2, 3], {"__0_0.distcp": {1: "damaged", 3: "whole"}})
    assert outcomes == [([], {"__0_0.distcp": 3}, {"__0_0.distcp": bytes(5)})] * 4
    assert sorted(nearby) == [
        asked for rank in (0, 1, 2) for asked in [(f"rank {rank}", 3, ""), (f"rank {rank}", 3, "__0_0.distcp")]
    ]  # fmt: skip


def test_others_are_asked_when_it_has_it_no_more(tmp_path, nearby, monkeypatch):
    monkeypatch.setattr(Nearby, "gone", {(2, "__2_0.distcp")})
    copies = {"__2_0.distcp": {1: "whole", 2: "whole"}}
    outcomes = bring(tmp_path, [0, 1, 2], copies)
    assert outcomes == [([], {"__2_0.distcp": 2}, {"__2_0.distcp": bytes(5)})] * 3
    assert [(node, name) for rank, node, name in nearby if rank == "rank 0"] == [
        (2, ""), (1, ""), (1, "__2_0.distcp"),
    ]  # fmt: skip


def test_a_file_that_all_have_lost_names_every_place(tmp_path, nearby):
    copies = {"__2_0.distcp": {1: "damaged", 2: "whole"}}
    outcomes = bring(tmp_path, [0, 1, 2], copies, lost=[("__2_0.distcp", 2)])
    (error,) = {error for _, _, error in outcomes}
    assert error.startswith("rank 0: ")
    assert error.endswith(
        "/step_00000004/__2_0.distcp: missing; h2 does not have it; h1: node 1: __2_0.distcp: expected SHA-256 "
        f"{hashlib.sha256(bytes(5)).hexdigest()}, has {hashlib.sha256(b'abcde').hexdigest()}"
    )


@pytest.mark.parametrize("verify", [True, False])
def test_a_copy_is_hashed_once(tmp_path, nearby, monkeypatch, verify):
    """Of the copies that are not looked at to find one, each is hashed before it is read, if it is to be verified."""
    hashed: list[tuple[int, str]] = []

    def compare(folder, name, record, *, hashes):
        if hashes and name in copies and os.path.exists(os.path.join(folder, name)):
            hashed.append((int(Path(folder).parent.parent.name.removeprefix("nvme")), name))
        return check_file(folder, name, record, hashes=hashes)

    for place in (module, whole):
        monkeypatch.setattr(place, "check_file", compare)
    copies = {
        "__0_0.distcp": {0: "whole", 1: "whole"}, "__1_0.distcp": {0: "whole", 1: "whole"},
        "__2_0.distcp": {2: "whole"}, "__2_1.distcp": {0: "whole", 1: "damaged", 2: "whole"},
    }  # fmt: skip
    outcomes = bring(tmp_path, [0, 1, 2], copies, verify=verify)
    holders = {"__0_0.distcp": 0, "__1_0.distcp": 1, "__2_0.distcp": 2, "__2_1.distcp": 2}
    assert [found for _, found, _ in outcomes] == [holders] * 3
    there = [(node, name) for name, at in copies.items() for node in at]
    assert Counter(hashed) == (dict.fromkeys(there, 1) if verify else {})
    damaged = bytes(5) if verify else b"abcde"
    assert [files["__2_1.distcp"] for _, _, files in outcomes] == [bytes(5), damaged, bytes(5)]


def test_the_nodes_begin_at_different_files(tmp_path, nearby):
    """One node has all that eight ranks on the other four need, and is not asked for the same file by all at once."""
    names = [f"__0_{number}.distcp" for number in range(8)]
    bring(tmp_path, [0, 1, 1, 2, 2, 3, 3, 4, 4], {name: {0: "whole"} for name in names})
    firsts = []
    for ranks in ((1, 2), (3, 4), (5, 6), (7, 8)):
        orders = [[name for who, _, name in nearby if who == f"rank {rank}" and name] for rank in ranks]
        assert sorted(orders[0] + orders[1]) == names
        for order, share in zip(orders, (names[::2], names[1::2]), strict=True):
            turn = share.index(order[0])
            assert order == share[turn:] + share[:turn]
        firsts.append(orders[0][0])
    assert len(set(firsts)) >= 3


# --- whose it is


@pytest.mark.parametrize(
    "run", ["../../elsewhere", "/etc", "0" * 31, "0" * 33, "G" * 32, "A" * 32, "0" * 32 + "\n", "."]
)
def test_a_run_in_a_manifest_is_an_id(tmp_path, run):
    """A folder on the nodes' disks is named by it, and a store's is foreign."""
    folder = tmp_path / "store" / "step_00000004"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(manifest(4, {".metadata": FileRecord("0" * 64, 3)}, run=run).to_bytes())
    with pytest.raises(InputError, match="run: expected 32 hex digits, got"):
        read_manifest(str(folder))


@pytest.mark.parametrize("run", ["", "0123456789abcdef" * 2])
def test_a_manifest_may_name_no_run(tmp_path, run):
    (tmp_path / "manifest.json").write_bytes(manifest(4, {".metadata": FileRecord("0" * 64, 3)}, run=run).to_bytes())
    assert read_manifest(str(tmp_path)).run == run
