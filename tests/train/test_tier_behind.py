"""What a node asks its two movers for after a checkpoint, and that nothing they do can end or hold up the run."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quern.errors import QuernError
from quern.train.checkpoint.mirror.disk import Disk
from quern.train.checkpoint.tiers import replication as module
from quern.train.checkpoint.tiers.replication import ReplicationWorker
from quern.train.checkpoint.tiers.upload import Died, Event, Failed, Waiting
from support.train.tier_case import MINE, PATIENCE_S, SMALL, Mover, Server, check, checkpoint
from support.waits import until


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "_POLL_S", 0.005)
    monkeypatch.setattr(module, "_MANIFEST_PATIENCE_S", 0.0)


class Clock:
    """In place of the module's ``time``: seconds pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        threading.Event().wait(0.002)


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(module, "time", found)
    monkeypatch.setattr(module, "_MANIFEST_PATIENCE_S", -1.0)
    return found


def turns(mover: Mover, count: int = 3) -> None:
    """Wait until the node's thread has gone round so many times."""
    seen: list[None] = []
    mover.on_poll = lambda: seen.append(None)
    until(lambda: len(seen) > count)


@pytest.fixture
def start():
    """Makes nodes' work of node 0 or 1, and ends it."""
    started = []

    def make(*, first=True, disk=None, mirror=None, store=None, server=None, writes=MINE.__contains__):
        found = ReplicationWorker(lambda name: name in SMALL or writes(name), first, disk, mirror, store, server)
        started.append(found)
        return found

    yield make
    for found in started:
        found.close()


@pytest.fixture
def nvme(tmp_path):
    return tmp_path / "nvme"


@pytest.fixture
def mirrored(start, nvme):
    """The work of a node that has a disk, a mirror and a store, and the movers to both."""
    mirror, store = Mover(), Mover()
    return start(disk=Disk(str(nvme)), mirror=mirror, store=store), mirror, store


@pytest.fixture
def publish(tmp_path):
    """Checkpoints of these steps, whose tensors lie beside the manifest or in ``tensors``, are to be stored."""

    def call(behind: ReplicationWorker, *steps: int, tensors: Path | None = None) -> None:
        for step in steps:
            behind.published(step, checkpoint(tmp_path, step, tensors), store=True)

    return call


# --- what is asked for


NAMED = {"__3_1.distcp", "__0_0.distcp"}


@pytest.mark.parametrize(
    ("disk", "first", "writes", "names", "moved"),
    [
        pytest.param(None, True, MINE, None, MINE, id="the first node"),
        pytest.param(None, False, MINE, None, MINE, id="another node"),
        pytest.param(None, False, set(), None, set(), id="it wrote nothing"),
        pytest.param("in use", True, MINE, None, MINE, id="tensors on the node's disk"),
        pytest.param("new", True, MINE, None, MINE, id="the run had no disks when it was saved"),
        pytest.param("in use", False, MINE, NAMED, NAMED, id="the named files"),
        pytest.param("in use", True, MINE, [], set(), id="another has all, the first node"),
        pytest.param("in use", False, MINE, [], set(), id="another has all, another node"),
    ],
)
def test_a_node_moves_its_tensors_and_the_first_the_small_files_with_the_manifest(
    tmp_path, start, nvme, disk, first, writes, names, moved
):
    """Tensors come from the node's disk, and only those of it are mirrored; small files come from the run."""
    mirror, store = Mover(), Mover()
    path = checkpoint(tmp_path, 4, tensors=nvme if disk == "in use" else None)
    nvme.mkdir(exist_ok=True)
    behind = start(disk=disk and Disk(str(nvme)), mirror=mirror, store=store, first=first, writes=writes.__contains__)
    behind.published(4, path, store=True, names=names)
    until(lambda: "step 4" not in behind.unfinished())
    folder = str(nvme / "step_00000004") if disk == "in use" else path
    to_store = [(folder, moved, set())] if moved else []
    to_store += [(path, SMALL, {"manifest.json"})] if first else []
    to_mirror = [(folder, moved, set())] if moved and disk == "in use" else []
    for mover, expected in ((store, to_store), (mirror, to_mirror)):
        for asked, (where, files, last) in zip(mover.asked, expected, strict=True):
            check(asked, 4, where, files, last)
    places = ("step 4 to the next node's disk", "step 4 to the store")
    assert behind.unfinished() == [what for what, asked in zip(places, (to_mirror, to_store), strict=True) if asked]
    assert behind.wait(0.0) == (not to_store and not to_mirror)


@pytest.mark.parametrize(("to_store", "to_mirror"), [(False, True), (True, False), (False, False)])
def test_only_where_it_is_to_go(tmp_path, mirrored, nvme, to_store, to_mirror):
    behind, mirror, store = mirrored
    behind.published(4, checkpoint(tmp_path, 4, tensors=nvme), store=to_store, mirror=to_mirror)
    until(lambda: "step 4" not in behind.unfinished())
    assert (len(store.asked), len(mirror.asked)) == (2 * to_store, to_mirror)


def test_a_mirror_that_is_given_later(start, nvme, publish):
    mirror, behind = Mover(), start(disk=Disk(str(nvme)))
    behind.mirror = mirror
    publish(behind, 4, tensors=nvme)
    until(lambda: mirror.asked)


def test_a_store_that_is_given_later(start, publish):
    store, behind = Mover(), start()
    behind.store = store
    publish(behind, 4)
    until(lambda: len(store.asked) == 2)
    assert behind.storing() == {4}
    behind.close()
    assert store.closed == 1


def test_a_manifest_that_another_machine_shows_late(tmp_path, start, monkeypatch):
    monkeypatch.setattr(module, "_MANIFEST_PATIENCE_S", PATIENCE_S)
    store, path = Mover(), checkpoint(tmp_path, 4)
    late = Path(path, "manifest.json").rename(tmp_path / "late")
    looked = threading.Event()
    monkeypatch.setattr(module.time, "sleep", lambda seconds: looked.set() or threading.Event().wait(0.002))
    behind = start(store=store)
    behind.published(4, path, store=True)
    assert looked.wait(PATIENCE_S)
    assert behind.unfinished() == ["step 4"]
    late.rename(Path(path, "manifest.json"))
    until(lambda: len(store.asked) == 2)


# --- removed steps


def test_removed_steps_are_no_longer_moved_and_leave_the_disk(mirrored, nvme, publish, caplog):
    behind, mirror, store = mirrored
    publish(behind, 2, 4, 6, tensors=nvme)
    until(lambda: len(store.asked) == 6)
    mirror.done(2)
    store.done(4)
    store.done(4, last=True)
    until(lambda: len(mirror.unfinished) == 2 and len(store.unfinished) == 4)
    behind.remove(iter([2, 4]))
    until(lambda: os.listdir(nvme) == ["step_00000006"])
    assert (mirror.cancelled, store.cancelled) == ([4], [2])
    for step in (2, 4):
        text = f"the checkpoint after step {step} was removed before it was moved everywhere"
        assert caplog.messages.count(text) == 1
    until(lambda: behind.unfinished() == ["step 6 to the next node's disk", "step 6 to the store"])


def test_what_is_removed_before_its_turn_is_not_asked_for(start, publish):
    store, held, gate = Mover(), threading.Event(), threading.Event()
    store.on_upload = lambda: (held.set(), gate.wait(5))
    behind = start(store=store)
    publish(behind, 2)
    until(held.is_set)
    publish(behind, 4)
    behind.remove([4])
    assert behind.storing() == {2}
    gate.set()
    store.on_upload = lambda: None
    publish(behind, 6)
    until(lambda: {asked[0] for asked in store.asked} == {2, 6})
    until(lambda: not behind._queue)
    assert {asked[0] for asked in store.asked} == {2, 6}


def test_what_is_removed_after_it_was_asked_for_is_cancelled(start, publish):
    store = Mover()
    behind = start(store=store)
    publish(behind, 4)
    until(lambda: len(store.asked) == 2)
    behind.remove([4])
    until(lambda: store.cancelled == [4])
    assert behind.wait(PATIENCE_S)


# --- done, or not


def test_it_is_not_finished_before_it_is_done(tmp_path, mirrored, nvme):
    """Looked at within every call to a mover, and all the time from another thread."""
    behind, mirror, store = mirrored
    path = checkpoint(tmp_path, 4, tensors=nvme)
    seen: list[list[str]] = []
    stop = threading.Event()

    def look() -> None:
        seen.append(behind.unfinished())

    def watch() -> None:
        while not stop.wait(0.0002):
            look()

    for mover in (mirror, store):
        mover.on_upload = mover.on_poll = look
    behind.published(4, path, store=True)
    look()
    watcher = threading.Thread(target=watch)
    watcher.start()
    until(lambda: len(store.asked) == 2 and "step 4" not in behind.unfinished())
    assert set(behind.unfinished()) == {"step 4 to the next node's disk", "step 4 to the store"}
    mirror.done(4)
    until(lambda: behind.unfinished() == ["step 4 to the store"])
    store.done(4)
    until(lambda: len(store.unfinished) == 1)
    turns = len(seen)
    until(lambda: len(seen) > turns + 50)
    assert not behind.wait(0.0)
    assert not behind.wait(0.02)
    stop.set()
    watcher.join()
    assert all(seen)
    store.done(4, last=True)
    assert behind.wait(PATIENCE_S)


def test_it_is_not_finished_when_only_a_part_could_be_asked_for(mirrored, nvme, publish):
    """The mirror was asked, the store's mover failed: the mirror's files are still on their way."""
    behind, mirror, store = mirrored
    seen: list[list[str]] = []
    store.on_upload = lambda: 1 // 0

    def look() -> None:
        if mirror.asked:
            seen.append(behind.unfinished())

    mirror.on_poll = look
    publish(behind, 4, tensors=nvme)
    until(lambda: len(seen) > 3)
    assert all("step 4 to the next node's disk" in left for left in seen)


def test_several_at_once(start, publish):
    store = Mover()
    behind = start(store=store)
    publish(behind, 2, 4, 6)
    assert behind.unfinished() != []
    until(lambda: behind.unfinished() == [f"step {step} to the store" for step in (2, 4, 6)])
    for step in (2, 4, 6):
        for last in (False, True):
            assert not behind.wait(0.0)
            store.done(step, last)
    assert behind.wait(PATIENCE_S)


def test_what_is_dropped_is_no_longer_waited_for(start, publish):
    store = Mover()
    behind = start(store=store, first=False)
    publish(behind, 4)
    until(lambda: store.asked)
    store.say(Failed(4, False, "x: is no longer there", permanent=True, dropped=True))
    assert behind.wait(PATIENCE_S)


def test_steps_that_are_to_be_stored_are_told_until_they_are(tmp_path, mirrored, nvme, publish):
    """From the call on, and at every moment until the store has all: their files are to stay. A mirror's are not
    waited for."""
    behind, mirror, store = mirrored
    gate, seen = threading.Event(), []

    def hold() -> None:
        seen.append(behind.storing())
        gate.wait(PATIENCE_S)

    store.on_upload = hold
    publish(behind, 2, tensors=nvme)
    until(lambda: seen)
    publish(behind, 4, tensors=nvme)
    behind.published(6, checkpoint(tmp_path, 6, tensors=nvme), store=False)
    assert behind.storing() == {2, 4}
    assert behind.unfinished() == ["step 2", "step 4", "step 6"]
    gate.set()
    until(lambda: len(store.asked) == 4 and behind.unfinished()[-1:] == ["step 4 to the store"])
    assert [2 in steps for steps in seen] == [True] * 4
    assert [4 in steps for steps in seen[2:]] == [True] * 2
    assert behind.storing() == {2, 4}
    store.say(Waiting(4, True, "the manifest waits"))
    store.done(4)
    until(lambda: (4, False) not in store.unfinished)
    assert behind.storing() == {2, 4}
    store.done(4, last=True)
    until(lambda: behind.storing() == {2})
    store.say(*(Failed(2, last, "x: is no longer there", permanent=True, dropped=True) for last in (False, True)))
    until(lambda: behind.storing() == set())
    assert len(mirror.unfinished) == 3


def test_without_a_store_nothing_is_to_be_stored(tmp_path, start, nvme):
    behind = start(disk=Disk(str(nvme)), mirror=Mover())
    behind.published(4, checkpoint(tmp_path, 4, tensors=nvme), store=False)
    assert behind.storing() == set()
    until(lambda: behind.unfinished() == ["step 4 to the next node's disk"])
    assert behind.storing() == set()


# --- what could not be asked for


def unreadable(tmp_path: Path, step: int) -> tuple[str, Path, bytes]:
    """A checkpoint whose manifest is damaged, the manifest, and what it should be."""
    path = checkpoint(tmp_path, step)
    file = Path(path, "manifest.json")
    good = file.read_bytes()
    file.write_bytes(b"{")
    return path, file, good


@pytest.fixture
def two_unreadable(tmp_path, start):
    """Work of which steps 2 and 4 could not be asked for, its mover, and what makes their manifests whole."""
    store = Mover()
    behind = start(store=store)
    ways = {step: unreadable(tmp_path, step) for step in (2, 4)}
    for step, (path, _, _) in ways.items():
        behind.published(step, path, store=True)
    until(lambda: len(behind._again) == 2)
    return behind, store, lambda: [file.write_bytes(good) for _, file, good in ways.values()]


def test_what_could_not_be_asked_for_is_tried_again_after_a_minute(tmp_path, start, caplog, clock):
    store = Mover()
    path, file, good = unreadable(tmp_path, 4)
    behind = start(store=store)
    behind.published(4, path, store=True)
    for minute in range(3):
        clock.now = 1000.0 + 60 * minute
        until(lambda: [again for again, _ in behind._again] == [clock.now + 60.0])
        turns(store)
        assert behind.unfinished() == ["step 4"]
        assert behind.storing() == {4}
        assert not behind.wait(0.0)
    file.write_bytes(good)
    clock.now += 59.0
    turns(store)
    assert store.asked == []
    clock.now += 1.0
    until(lambda: behind.unfinished() == ["step 4 to the store"])
    assert [asked[0] for asked in store.asked] == [4, 4]
    assert sum("manifest.json" in message for message in caplog.messages) == 1
    clock.now += 3600.0
    turns(store)
    assert len(store.asked) == 2


def test_what_could_not_be_asked_for_and_is_removed_is_forgotten(clock, two_unreadable):
    behind, store, repair = two_unreadable
    behind.remove([2])
    until(lambda: behind.unfinished() == ["step 4"])
    assert behind.storing() == {4}
    repair()
    clock.now += 60.0
    until(lambda: len(store.asked) == 2)
    turns(store)
    assert [asked[0] for asked in store.asked] == [4, 4]


def test_two_that_are_due_together_are_both_tried_again(clock, two_unreadable):
    behind, store, repair = two_unreadable
    clock.now += 60.0
    # both: one that is being tried stands in no list, and may fail after the clock has gone on
    until(lambda: sum(again > clock.now for again, _ in list(behind._again)) == 2)
    repair()
    clock.now += 60.0
    until(lambda: {asked[0] for asked in store.asked} == {2, 4})


# --- what goes wrong


@pytest.mark.parametrize("what", ["upload", "poll", "writes", "manifest", "disk"])
def test_no_error_ends_the_thread(tmp_path, start, nvme, caplog, monkeypatch, what):
    """What it met is done in the end."""
    monkeypatch.setattr(module, "_AGAIN_S", 0.05)
    store = Mover()
    broken, whole = (checkpoint(tmp_path, step, tensors=nvme) for step in (2, 4))
    wrong = threading.Event()
    wrong.set()

    def fail(*args: Any) -> Any:
        if wrong.is_set():
            raise ZeroDivisionError("quite unexpected")

    disk = Disk(str(nvme))
    file = Path(broken, "manifest.json")
    good = file.read_bytes()
    if what == "manifest":
        file.write_bytes(b"{")
    elif what == "disk":
        monkeypatch.setattr(disk, "remove", fail)
    elif what != "writes":
        setattr(store, f"on_{what}", fail)
    behind = start(disk=disk, store=store, writes=(lambda name: fail() or name in MINE) if what == "writes" else
                   MINE.__contains__)  # fmt: skip
    behind.published(2, broken, store=True)
    behind.remove([0])
    until(lambda: any("moving checkpoints: " in message for message in caplog.messages))
    told = next(message for message in caplog.messages if "moving checkpoints: " in message)
    assert ("manifest.json" in told) if what == "manifest" else ("quite unexpected" in told)
    wrong.clear()
    file.write_bytes(good)
    behind.published(4, whole, store=True)
    until(lambda: Counter(asked[0] for asked in store.asked) == {2: 2, 4: 2})
    for step, last in list(store.unfinished):
        store.done(step, last)
    assert behind.wait(PATIENCE_S)


def test_a_warning_comes_once_until_something_goes_well(start, publish, caplog):
    caplog.set_level(logging.INFO)
    store, polls = Mover(), []
    store.on_poll = lambda: polls.append(None)
    behind = start(store=store)
    publish(behind, 2, 4)
    until(lambda: len(store.asked) == 4)
    failed = Failed(2, False, "bucket/x: AccessDenied", permanent=True, dropped=False)
    text = "checkpoint after step 2: bucket/x: AccessDenied; tried again later"

    def say(*events: Event) -> None:
        store.say(*events)
        seen = len(polls)
        until(lambda: len(polls) > seen + 1)  # it has been listened to

    say(failed, failed)
    say(failed)
    assert caplog.messages.count(text) == 1
    say(Failed(4, False, "bucket/x: AccessDenied", permanent=True, dropped=True))
    assert caplog.messages.count("checkpoint after step 4: bucket/x: AccessDenied; it is not moved") == 1
    say(Died("the uploader was killed by signal 9"))
    say(Died("the uploader was killed by signal 9"))
    assert caplog.messages.count("the uploader was killed by signal 9; it is started again") == 1
    say(Waiting(2, True, "the manifest waits"))
    say(failed)
    assert caplog.messages.count(text) == 1
    store.done(2)
    say()
    say(failed)
    assert caplog.messages.count(text) == 2
    store.done(2, last=True)
    say()
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.INFO] == [
        "checkpoint after step 2 is whole in the store"
    ]


# --- the server of the node's files


def test_a_server_that_died_is_started_again(start, caplog):
    servers = [Server(7001), Server(7002)]
    left = iter(servers)
    behind = start(server=lambda: next(left))
    assert behind.port == 7001
    servers[0].dead = True
    until(lambda: behind.port == 7002)
    assert "the server of this node's checkpoint files has died; it is started again" in caplog.text
    behind.close()
    assert servers[1].closed == 1


def test_a_server_that_does_not_start_again_holds_up_nothing(start, publish, caplog, clock):
    """It is tried again, at most once a minute."""
    store, first, last, tries = Mover(), Server(7001), Server(7003), []

    def server() -> Server:
        tries.append(clock.now)
        if len(tries) == 1:
            return first
        if len(tries) < 4:
            raise QuernError("the server of this node's checkpoint files did not start")
        return last

    behind = start(store=store, server=server, first=False)
    first.dead = True
    until(lambda: len(tries) == 2)
    assert first.closed
    publish(behind, 4)
    until(lambda: behind.unfinished() == ["step 4 to the store"])
    assert caplog.text.count("did not start") == 1
    for passed in (59.0, 1.0, 59.0, 1.0):
        turns(store)
        clock.now += passed
    until(lambda: behind.port == 7003)
    last.dead = True
    turns(store)
    assert last.closed
    assert tries == [1000.0, 1000.0, 1060.0, 1120.0]
    store.done(4)
    assert behind.wait(PATIENCE_S)


def test_close_ends_the_movers_and_the_server_and_leaves_what_is_unfinished(start, publish):
    mirror, store, server = Mover(), Mover(), Server(7001)
    behind = start(mirror=mirror, store=store, server=lambda: server)
    publish(behind, 4)
    until(lambda: len(store.asked) == 2)
    behind.close()
    assert (mirror.closed, store.closed, server.closed) == (1, 1, 1)
    assert store.cancelled == []
    assert not any(thread.name == "checkpoint mover" and thread.is_alive() for thread in threading.enumerate())


def test_a_step_that_is_saved_again_right_after_it_was_removed_stays_in_the_queue(start, nvme, publish, monkeypatch):
    store, held, gate, seen = Mover(), threading.Event(), threading.Event(), []
    disk = Disk(str(nvme))
    disk.open()
    behind = start(store=store, disk=disk)
    monkeypatch.setattr(disk, "remove", lambda steps: seen.append((behind.unfinished(), behind.storing())))
    store.on_upload = lambda: (held.set(), gate.wait(5))
    publish(behind, 2)
    until(held.is_set)
    behind.remove([4])
    publish(behind, 4)
    gate.set()
    until(lambda: seen)
    assert seen == [(["step 2 to the store", "step 4"], {2, 4})]
