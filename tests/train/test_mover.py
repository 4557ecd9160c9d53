"""What a mover does with its requests: one at a time, manifests first, then the newest; in this process, in memory."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from pathlib import Path

import fsspec
import pytest

from quern.remote.retry import Backoff, StoreError
from quern.train.checkpoint.store import pieces
from quern.train.checkpoint.store.errors import IncompleteError
from quern.train.checkpoint.store.store import Store
from quern.train.checkpoint.tiers.mover import Mover
from support.train.tier_case import content, record
from support.train.uploader_case import asked, saved

pytestmark = pytest.mark.slow

PIECE = 64 << 10  # of a file that is read


class Bench:
    """A mover on a store in memory, worked by hand on a clock by hand."""

    def __init__(self, folder: Path, retry_after_s: float = 60.0) -> None:
        self.folder, self.now, self.said, self.taken, self.asked = folder, 0.0, [], [], 0
        self.on_take = lambda: None
        self.url = f"memory://{uuid.uuid4().hex}"
        self.store = Store(self.url, backoff=Backoff(budget_s=0.0))
        self.mover = Mover(
            lambda pause: self.store, self.said.append, limit=lambda pause: self, retry_after_s=retry_after_s,
            clock=lambda: self.now,
        )  # fmt: skip

    def take(self, n: int) -> None:
        self.taken.append(n)
        self.on_take()

    def ask(self, step: int, name: str = "a", size: int = 3, last: bool = False) -> None:
        (self.folder / f"{step}").mkdir(exist_ok=True)
        data = content(size, step)
        (self.folder / f"{step}" / name).write_bytes(data)
        found, folder = {name: vars(record(data))}, str(self.folder / f"{step}")
        self.asked += 1
        asked = {"number": self.asked, "step": step, "folder": folder, "files": {} if last else found}
        self.mover.tell({"upload": {**asked, "last": found if last else None}})

    def work(self, times: int = 1) -> None:
        for _ in range(times):
            self.mover.work()

    def objects(self) -> set[str]:
        root = self.url.removeprefix("memory:/") + "/"
        names = (name for name in fsspec.filesystem("memory").store if name.startswith(root))
        return {name.removeprefix(root) for name in names if not name.endswith(".sha256")}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "PART_BYTES", PIECE)
    return Bench(tmp_path)


def test_the_newest_goes_first(bench):
    for step in (20, 40, 10, 30):
        bench.ask(step)
    bench.ask(40, "b", last=True)
    bench.work(5)
    assert [said["uploaded"] for said in bench.said] == [40, 40, 30, 20, 10]
    names = {f"step_{step:08d}/a" for step in (10, 20, 30, 40)}
    assert bench.objects() == names | {"step_00000040/b"}


def test_a_manifest_that_is_due_goes_before_newer_files(bench):
    """Or it would never go where checkpoints come faster than they are moved."""
    bench.ask(10, "m", last=True)
    for step in (20, 30):
        bench.ask(step)
    bench.ask(20, "m", last=True)
    bench.work(4)
    assert [(said["uploaded"], said["last"]) for said in bench.said] == [
        (20, True), (10, True), (30, False), (20, False),
    ]  # fmt: skip


def test_a_manifest_that_is_not_due_keeps_nothing_waiting(bench, monkeypatch):
    put, refused = Store.put, []

    def refuse(store, step, name, *arguments):
        if name == "m" and not refused:
            refused.append(step)
            raise IncompleteError("not yet")
        put(store, step, name, *arguments)

    monkeypatch.setattr(Store, "put", refuse)
    bench.ask(10, "m", last=True)
    bench.ask(20)
    bench.work(2)
    assert bench.said[-1]["uploaded"] == 20
    bench.ask(30)
    bench.now = 5.0
    bench.work()
    assert bench.said[-1]["uploaded"] == 10


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_local_read_that_fails_is_tried_again_and_a_missing_file_is_not(bench, monkeypatch, number):
    def broken(path, mode):
        raise OSError(number, os.strerror(number), path)

    bench.ask(10)
    bench.ask(20)
    with monkeypatch.context() as patch:
        patch.setattr(pieces, "open", broken, raising=False)
        bench.work()
    why = f"{bench.folder}/20/a: cannot be read ({os.strerror(number)}); not uploaded"
    answer = {"failed": 20, "number": 2, "last": False, "why": why, "permanent": False, "dropped": False}
    assert bench.said == [answer]
    (bench.folder / "10" / "a").unlink()
    bench.work()
    assert (bench.said[1]["failed"], bench.said[1]["dropped"]) == (10, True)
    assert [job.step for job in bench.mover._waiting] == [20]
    bench.now = 60.0
    bench.work()
    assert bench.said[2]["uploaded"] == 20
    assert bench.objects() == {"step_00000020/a"}


def test_a_checkpoint_that_was_pruned_is_dropped(bench):
    files = saved(bench.folder / "10", 10, {"a": 5, "b": 5})
    bench.store.put(10, "a", str(bench.folder / "10" / "a"), record(files["a"]))
    shutil.rmtree(bench.folder / "10")
    bench.mover.tell({"upload": asked(1, 10, bench.folder / "10", files)})
    bench.work()
    why = f"{bench.folder}/10: is no longer there; b was not moved and never will be"
    answer = {"failed": 10, "number": 1, "last": False, "why": why, "permanent": True, "dropped": True}
    assert bench.said == [answer]
    assert bench.mover._waiting == []


def test_rotten_files_are_dropped_and_others_go_on(bench):
    bench.ask(10, size=5000)
    bench.ask(20, size=5000)
    rotten, data = bench.folder / "20" / "a", content(5000, 20)
    rotten.write_bytes(data[:-1] + bytes([data[-1] ^ 128]))
    bench.work(2)
    failed, done = bench.said
    assert (failed["failed"], failed["permanent"], failed["dropped"]) == (20, True, True)
    assert str(rotten) in failed["why"]
    assert record(data).sha256 in failed["why"]
    assert done["uploaded"] == 10
    assert bench.objects() == {"step_00000010/a"}
    assert bench.mover._waiting == []


def test_a_transfer_under_way_is_cancelled(bench):
    bench.on_take = lambda: len(bench.taken) == 2 and bench.mover.tell({"cancel": 10})
    bench.ask(10, size=9 * PIECE)
    bench.work()
    assert bench.said == [{"cancelled": 10}]
    assert bench.taken == [PIECE, PIECE]
    assert bench.objects() == set()
    bench.ask(20)
    bench.work()
    assert bench.said[-1]["uploaded"] == 20
    assert bench.mover._waiting == []


def test_what_waits_is_cancelled_and_never_begun(bench):
    for step in (10, 20):
        bench.ask(step)
    bench.mover.tell({"cancel": 20})
    bench.mover.tell({"cancel": 30})
    bench.work()
    assert bench.said[:2] == [{"cancelled": 20}, {"cancelled": 30}]
    assert bench.said[2]["uploaded"] == 10
    assert bench.objects() == {"step_00000010/a"}


def test_what_waits_is_replaced_and_never_begun(bench):
    bench.ask(10, "a")
    bench.ask(10, "b")
    bench.ask(10, "c", last=True)
    bench.work(2)
    assert [(said["uploaded"], said["number"], said["last"]) for said in bench.said] == [(10, 3, True), (10, 2, False)]
    assert bench.objects() == {"step_00000010/b", "step_00000010/c"}
    assert bench.mover._waiting == []


def test_what_is_under_way_is_replaced_without_a_word(bench):
    def ask_anew():
        if len(bench.taken) == 1:
            bench.ask(10, "b")
            bench.ask(10, "c", last=True)

    bench.on_take = ask_anew
    bench.ask(10, "a", size=2 * PIECE)
    bench.work(3)
    assert [said["number"] for said in bench.said] == [3, 2]
    assert bench.objects() == {"step_00000010/b", "step_00000010/c"}


@pytest.mark.parametrize("error", [None, StoreError("refused", transient=True), IncompleteError("not yet")], ids=str)
def test_a_cancel_at_the_last_moment_is_answered_and_heeded(bench, monkeypatch, error):
    def put(store, *arguments):
        bench.mover.tell({"cancel": 10})
        if error is not None:
            raise error

    monkeypatch.setattr(Store, "put", put)
    bench.ask(10)
    bench.work()
    assert [next(iter(said)) for said in bench.said] == (["uploaded"] if error is None else []) + ["cancelled"]
    assert bench.mover._waiting == []


@pytest.mark.parametrize(
    ("retry_after_s", "after_s"), [(60.0, (0.25, 0.5, 1.0, 2.0, 2.0)), (1.0, (0.25, 0.5, 1.0, 1.0))]
)
def test_a_manifest_that_waits_is_looked_at_again_soon(tmp_path, monkeypatch, retry_after_s, after_s):
    bench = Bench(tmp_path, retry_after_s)
    renewed = []
    monkeypatch.setattr(Store, "renew", lambda store: renewed.append(1))
    files = saved(tmp_path / "40", 40, {".metadata": 5, "b": 6})
    (tmp_path / "40" / "b").rename(tmp_path / "40" / "other")
    last = {"manifest.json": vars(record(files["manifest.json"]))}
    bench.mover.tell({"upload": asked(7, 40, tmp_path / "40", {".metadata": files[".metadata"]}) | {"last": last}})
    bench.work()
    why = f"{bench.url}/step_00000040: b: is not there; the manifest waits for it"
    waiting = {"waiting": 40, "number": 7, "last": True, "why": why}
    assert bench.said == [waiting]
    for number, seconds in enumerate(after_s):
        looked = bench.now
        bench.ask(number)
        bench.now = looked + 0.99 * seconds
        bench.work()
        assert bench.said[-1]["uploaded"] == number
        bench.now = looked + seconds
        bench.work()
        assert bench.said[-1] == waiting
    bench.store.put(40, "b", str(tmp_path / "40" / "other"), record(files["b"]))
    bench.now += after_s[-1]
    bench.work()
    assert bench.said[-1]["uploaded"] == 40
    assert bench.said[-1]["bytes"] == len(files["manifest.json"])
    assert len(bench.said) == 2 + 2 * len(after_s)
    assert renewed == []


def test_every_byte_is_asked_of_the_bandwidth(bench):
    bench.ask(10, size=2 * PIECE + 7)
    bench.work()
    assert sum(bench.taken) == 2 * PIECE + 7


@pytest.mark.parametrize("transient", [True, False])
def test_what_fails_waits_its_time_and_others_go_by(bench, monkeypatch, transient):
    renewed = []
    put = Store.put

    def fail(store, step, *arguments):
        if step == 40 and not renewed[1:]:
            raise StoreError("refused", transient=transient)
        put(store, step, *arguments)

    monkeypatch.setattr(Store, "put", fail)
    monkeypatch.setattr(Store, "renew", lambda store: renewed.append(bench.now))
    for step in (30, 40, 20):
        bench.ask(step)
    bench.work()
    answer = {"failed": 40, "number": 2, "last": False, "why": "refused", "permanent": not transient, "dropped": False}
    assert bench.said == [answer]
    bench.work(2)
    assert [said.get("uploaded") for said in bench.said[1:]] == [30, 20]
    assert renewed == [0.0]  # once, before the next request
    bench.now = 59.0
    bench.ask(10)
    bench.work()
    assert bench.said[-1]["uploaded"] == 10
    renewed.append(bench.now)
    bench.now = 60.0
    bench.work()
    assert bench.said[-1]["uploaded"] == 40


def test_an_error_nobody_thought_of_ends_nothing(bench, monkeypatch):
    put = Store.put
    calls = []

    def fail(store, *arguments):
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError("who knows")
        put(store, *arguments)

    monkeypatch.setattr(Store, "put", fail)
    bench.ask(10)
    bench.work()
    assert "ZeroDivisionError: who knows" in bench.said[0]["why"]
    assert bench.said[0]["permanent"]
    assert not bench.said[0]["dropped"]
    bench.now = 61.0
    bench.work()
    assert bench.said[1]["uploaded"] == 10
