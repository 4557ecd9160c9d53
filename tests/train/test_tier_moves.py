"""Which node moves which file, when a checkpoint goes into the store, and what the end of a run waits for."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_threads import results, run_all
from tier_case import manifest

from quern.train.checkpoint.manifest import Checkpoint, FileRecord, read_manifest
from quern.train.checkpoint.tiers import tiers as module
from quern.train.checkpoint.tiers.nodes import Nodes
from quern.train.checkpoint.tiers.tiers import Tiers
from quern.train.config import CheckpointConfig


class Recorder:
    """In place of a node's ``Behind``."""

    def __init__(self, writes, first, disk, mirror, store, server=None) -> None:
        self.writes, self.first, self.disk, self.store, self.mirror = writes, first, disk, store, mirror
        self.port = None if server is None else 7000
        self.events: list[tuple[Any, ...]] = []
        self.left: list[str] = []
        self.on_wait = lambda: None

    def mirror_to(self, mirror) -> None:
        self.mirror = mirror

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

    def moving(self) -> set[int]:
        return set()

    def close(self) -> None:
        self.closed = True


class Made:
    """In place of an uploader or a server: how it was made."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.arguments, self.options = arguments, options


@pytest.fixture(autouse=True)
def no_processes(monkeypatch):
    monkeypatch.setattr(module, "Behind", Recorder)
    monkeypatch.setattr(module, "Uploader", Made)
    monkeypatch.setattr(module, "ServerProcess", Made)


def on_nodes(root: Path, node_of: list[int], config: CheckpointConfig, call) -> list[Any]:
    """What ``call(tiers, its Behind or None)`` returns on every rank, ranks being on the nodes that are named."""
    hosts = tuple(f"h{node}" for node in range(max(node_of) + 1))

    def rank(ranks):
        tiers = Tiers(str(root / "run"), config, ranks)
        try:
            return call(tiers, tiers._behind)
        finally:
            tiers.close()

    (root / "run" / "checkpoints").mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "find_nodes", lambda ranks: Nodes(ranks.rank, tuple(node_of), hosts))
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
            tiers.take_up(checkpoint)
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
        tiers.take_up(checkpoint)
        return [event[-1] for event in behind.events]

    assert on_nodes(tmp_path, [0, 1], config_for(tmp_path), call) == [[[]], [["__0_0.distcp"]]]


def test_a_start_removes_from_the_disks_what_no_checkpoint_names(tmp_path):
    for step in (4, 8):
        write(tmp_path, step, {"__0_0.distcp": 5})

    def call(tiers, behind):
        for step in (2, 4, 6, 8):
            Path(tiers.disk.folder(step)).mkdir()
        tiers.take_up(None)
        return behind.events, tiers.disk.steps()

    assert on_nodes(tmp_path, [0, 1], config_for(tmp_path), call) == [([], [4, 8])] * 2


def test_files_in_the_run_s_folder_are_moved_by_who_would_write_them(tmp_path):
    checkpoint = write(tmp_path, 4, {"__0_0.distcp": 5})

    def call(tiers, behind):
        tiers.take_up(checkpoint)
        return None if behind is None else [behind.events, [behind.writes(f"__{rank}_0.distcp") for rank in range(6)]]

    config = CheckpointConfig(store=f"file://{tmp_path}/store")
    first, second, third = on_nodes(tmp_path, [0, 1, 1], config, call)
    assert third is None  # not its node's first
    assert first[0] == second[0] == [("published", 4, True, True, None)]
    assert first[1] == [True, False, False, True, False, False]
    assert second[1] == [not wrote for wrote in first[1]]


def test_each_node_mirrors_to_the_next(tmp_path):
    def call(tiers, behind):
        return behind and (behind.first, behind.mirror.arguments, sorted(behind.mirror.options["environment"]))

    outcomes = on_nodes(tmp_path, [0, 0, 1, 2], config_for(tmp_path), call)
    url, variables = ("peer://127.0.0.1:7000",), ["QUERN_PEER_TOKEN"]
    assert outcomes == [(True, url, variables), None, (False, url, variables), (False, url, variables)]
    alone = on_nodes(
        tmp_path, [0, 0], config_for(tmp_path), lambda tiers, behind: behind and (behind.mirror, behind.port)
    )
    assert alone == [(None, None), None]
    without = on_nodes(tmp_path, [0, 1], config_for(tmp_path, partner=False), lambda tiers, behind: behind.mirror)
    assert without == [None, None]


# --- what goes into the store


def save(tiers, step: int, removed: tuple[str, ...] = ()) -> None:
    tiers.published(Checkpoint(step, f"{tiers.root}/step_{step:08d}"), removed)


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
        tiers.finish()
        tiers.finish()  # the second has nothing to ask for
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
        tiers.finish()
        return gate.is_set()

    config = CheckpointConfig(store=f"file://{tmp_path}/store")
    assert on_nodes(tmp_path, [0, 1, 1], config, call) == [True] * 3
    assert left == [False]
    assert caplog.messages == ["not moved yet: step 6 to the store; the next start goes on with it"]


def test_a_run_without_tiers_moves_nothing(tmp_path):
    def call(tiers, behind):
        assert behind is None
        save(tiers, 4, ("step_00000002",))
        tiers.take_up(Checkpoint(4, f"{tiers.root}/step_00000004"))
        tiers.finish()
        return tiers.place(4, ["__0_0.distcp"]), tiers.steps(), tiers.moving()

    assert on_nodes(tmp_path, [0, 1], CheckpointConfig(), call) == [(None, set(), set())] * 2
    assert os.listdir(tmp_path / "run" / "checkpoints") == []


def test_a_place_is_the_node_s_own_folder(tmp_path):
    outcomes = on_nodes(
        tmp_path, [0, 1], config_for(tmp_path), lambda tiers, _: (tiers.run, tiers.place(4, ["a", "b"]))
    )
    for node, (run, place) in enumerate(outcomes):
        assert place.folder == f"{tmp_path}/nvme{node}/{run}/step_00000004"
        assert place.files == ("a", "b")
