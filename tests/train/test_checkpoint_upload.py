"""The process that uploads behind the training: killed, refused, cut off, cancelled.

The store is an S3 server on loopback behind a proxy that breaks things; what is in it is looked at with boto3.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest

from quern.errors import InputError
from quern.remote.retry import Backoff, StoreError
from quern.train.checkpoint.format.manifest import FileRecord
from quern.train.checkpoint.store import pieces
from quern.train.checkpoint.store.errors import IncompleteError
from quern.train.checkpoint.store.store import Store
from quern.train.checkpoint.tiers import upload
from quern.train.checkpoint.tiers.mover import Mover
from quern.train.checkpoint.tiers.upload import Cancelled, Died, Failed, Progress, Uploaded, Uploader, Waiting
from quern.train.processes.spawn import spawn
from support.programs import python
from support.remote.s3_server import Fault
from support.train import tier_case
from support.train.tier_case import content, record

pytestmark = pytest.mark.slow

PART = 8 << 20
PIECE = 64 << 10  # of a file that is read in this process
OFTEN = 10**6
LIMIT_S = 120  # a wait of a test
REAL = sys.executable


def checkpoint(folder: Path, step: int, sizes: dict[str, int]) -> dict[str, bytes]:
    """Writes a checkpoint's files; the manifest is among them."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: content(size, step + place) for place, (name, size) in enumerate(sizes.items())}
    recorded = {name: record(data) for name, data in files.items()}
    files["manifest.json"] = tier_case.manifest(step, recorded).to_bytes()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return files


def records(files: dict[str, bytes], *, last: bool = False) -> dict[str, FileRecord]:
    return {name: record(data) for name, data in files.items() if (name == "manifest.json") == last}


def asked(number: int, step: int, folder: Path, files: dict[str, bytes]) -> dict[str, Any]:
    """What a mover is told to upload ``files``, without their manifest."""
    plain = {name: vars(found) for name, found in records(files).items()}
    return {"number": number, "step": step, "folder": str(folder), "files": plain, "last": None}


@pytest.fixture
def start(server, forked_children):
    """Starts uploaders, and ends them with the test."""
    started = []

    def start(**options: Any) -> Uploader:
        started.append(Uploader(server.url, **({"retry_after_s": 0.3, "timeout_s": 20.0} | options)))
        return started[-1]

    yield start
    server.proxy.ended.set()
    for uploader in started:
        uploader.close()


def until(uploader: Uploader, *kinds: type, count: int = 1, seen: list | None = None) -> list:
    """Events up to the ``count``-th of ``kinds``, without those of progress: how many there are is a matter of time."""
    seen = [] if seen is None else seen
    end = time.monotonic() + LIMIT_S
    while sum(isinstance(event, kinds) for event in seen) < count:
        assert time.monotonic() < end, seen
        seen += [event for event in uploader.poll() if not isinstance(event, Progress)]
        time.sleep(0.02)
    return seen


def wait_for(condition) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_checkpoint_is_uploaded_with_the_manifest_at_the_end(server, start, tmp_path):
    files = checkpoint(tmp_path, 10, {".metadata": 100, "__0_0.distcp": 2 * PART + 1, "__1_0.distcp": 0})
    uploader = start()
    uploader.upload(10, str(tmp_path), records(files))
    assert uploader.unfinished == [(10, False)]
    (done,) = until(uploader, Uploaded)
    total = sum(len(data) for name, data in files.items() if name != "manifest.json")
    assert (done.step, done.last, done.num_bytes) == (10, False, total)
    assert "step_00000010/manifest.json" not in server.objects()
    uploader.upload(10, str(tmp_path), {}, records(files, last=True))
    (done,) = until(uploader, Uploaded)
    assert (done.step, done.last, done.num_bytes) == (10, True, len(files["manifest.json"]))
    assert {name: server.read(name) for name in server.objects()} == {
        f"step_00000010/{name}": data for name, data in files.items()
    }
    puts = [target.split("?")[0].rpartition("/")[2] for method, target, _ in server.proxy.seen if method == "PUT"]
    assert puts[-1] == "manifest.json"
    assert uploader.unfinished == []
    uploader.upload(10, str(tmp_path), records(files), records(files, last=True))  # all is there
    (done,) = until(uploader, Uploaded)
    assert done.num_bytes == 0


def test_the_manifest_waits_for_files_of_other_nodes(server, start, tmp_path):
    """That is no failure; when it is looked at again is told below."""
    files = checkpoint(tmp_path, 10, {".metadata": 100, "__0_0.distcp": 5, "__8_0.distcp": 7})
    mine = {name: data for name, data in files.items() if name != "__8_0.distcp"}
    uploader = start()
    uploader.upload(10, str(tmp_path), records(mine), records(mine, last=True))
    seen = until(uploader, Waiting)
    assert not [event for event in seen if isinstance(event, Failed)]
    assert (seen[-1].step, seen[-1].last) == (10, True)
    assert "__8_0.distcp: is not there" in seen[-1].why
    assert uploader.unfinished == [(10, True)]
    assert set(server.objects()) == {"step_00000010/.metadata", "step_00000010/__0_0.distcp"}
    older = checkpoint(tmp_path / "5", 5, {"a": 5})
    uploader.upload(5, str(tmp_path / "5"), records(older))
    assert until(uploader, Uploaded)[-1].step == 5  # others go by
    data = files["__8_0.distcp"]
    server.write("step_00000010/__8_0.distcp", data, sha256=hashlib.sha256(data).hexdigest())
    assert until(uploader, Uploaded)[-1].step == 10
    assert server.read("step_00000010/manifest.json") == files["manifest.json"]
    assert uploader.unfinished == []


def test_a_request_is_replaced_by_the_next_of_its_kind(server, start, tmp_path):
    """The files of a step that is written anew, while those of before are under way."""
    old = checkpoint(tmp_path / "old", 10, {"a": 3 * PART})
    server.proxy.delay_s = 0.5
    uploader = start()
    uploader.upload(10, str(tmp_path / "old"), records(old))
    wait_for(lambda: server.proxy.count("PUT") >= 1)
    new = checkpoint(tmp_path / "new", 10, {"a": 5000, ".metadata": 7})
    uploader.upload(10, str(tmp_path / "new"), records(new))
    uploader.upload(10, str(tmp_path / "new"), {}, records(new, last=True))
    assert uploader.unfinished == [(10, False), (10, True)]
    seen = [event for event in until(uploader, Uploaded, count=2) if not isinstance(event, Waiting)]
    assert [(event.last, event.num_bytes) for event in seen] == [(False, 5007), (True, len(new["manifest.json"]))]
    assert server.read("step_00000010/a") == new["a"]
    assert server.read("step_00000010/manifest.json") == new["manifest.json"]
    assert server.uploads() == []
    assert uploader.unfinished == []


def test_what_was_done_already_when_it_was_replaced_counts_for_nothing(server, start, tmp_path):
    old, new = (checkpoint(tmp_path / name, 10, {"a": size}) for name, size in (("old", 5), ("new", 7000)))
    uploader = start()
    uploader.upload(10, str(tmp_path / "old"), records(old))
    wait_for(lambda: not uploader._process._said.empty())  # it has said that it is done, and nobody has heard it
    server.proxy.faults = [Fault("ExpiredToken", "PUT", times=OFTEN)]
    uploader.upload(10, str(tmp_path / "new"), records(new))
    assert [type(event) for event in until(uploader, Failed)] == [Failed]
    assert uploader.unfinished == [(10, False)]
    uploader.cancel(10)
    uploader.upload(10, str(tmp_path / "new"), records(new))
    server.proxy.faults = []
    assert until(uploader, Uploaded)[-1].num_bytes == 7000
    assert server.read("step_00000010/a") == new["a"]


@pytest.mark.long
def test_killed_again_and_again(server, start, tmp_path):
    """At no instant stands a manifest without all its files; what was sent whole is not sent again."""
    steps = {10: tmp_path / "10", 20: tmp_path / "20"}
    sizes = {".metadata": 100, "a": 2 * PART, "b": 3000, "c": PART + 1, "d": 5, "e": 0, "f": 70000}
    files = {step: checkpoint(folder, step, sizes) for step, folder in steps.items()}
    wrong, looks, ended = [], [0, 0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            there = server.objects()
            looks[0] += 1
            for step in steps:
                name = f"step_{step:08d}/"
                if name + "manifest.json" in there:
                    looks[1] += 1
                    wrong.extend(n for n, data in files[step].items() if there.get(name + n) != len(data))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        server.proxy.delay_s = 0.1
        uploader = start(restarts_per_minute=1000)
        for step, folder in steps.items():
            uploader.upload(step, str(folder), records(files[step]), records(files[step], last=True))
        seen: list = []
        moments = random.Random(5)
        for kill in range(6):
            # after some objects are there, somewhere in the transfer of the next
            wait_for(lambda kill=kill: seen.extend(uploader.poll()) or server.proxy.count("PUT") >= 2 * kill + 2)
            time.sleep(moments.uniform(0, 0.15))
            if uploader.pid is not None:
                os.kill(uploader.pid, signal.SIGKILL)
            until(uploader, Died, count=kill + 1, seen=seen)
        assert len(server.objects()) < 16
        server.proxy.delay_s = 0.0
        until(uploader, Uploaded, count=2, seen=seen)
    finally:
        ended.set()
        watcher.join(30)
    assert [event.why for event in seen if isinstance(event, Died)] == ["the uploader was killed by signal 9"] * 6
    assert wrong == []
    assert looks[0] > 20
    assert looks[1] > 0
    assert {name: server.read(name) for name in server.objects()} == {
        f"step_{step:08d}/{name}": data for step in steps for name, data in files[step].items()
    }
    assert server.uploads() == []
    assert uploader.unfinished == []


def test_files_that_are_there_are_not_sent_again_after_a_death(server, start, tmp_path):
    files = checkpoint(tmp_path, 10, {".metadata": 100, "a": 2000, "b": 2 * PART})
    server.proxy.faults = [Fault("stall", "PUT", "partNumber=2", times=1)]
    uploader = start(timeout_s=60.0)
    uploader.upload(10, str(tmp_path), records(files))
    wait_for(lambda: server.proxy.struck("stall"))
    assert set(server.objects()) == {"step_00000010/.metadata", "step_00000010/a"}
    first = uploader.pid
    os.kill(first, signal.SIGKILL)
    seen = until(uploader, Uploaded)
    assert [type(event) for event in seen] == [Died, Uploaded]
    assert seen[-1].num_bytes == 2 * PART
    assert server.proxy.count("PUT", "/a") == 1
    assert server.read("step_00000010/b") == files["b"]
    assert server.uploads() == []
    assert uploader.pid != first


def test_an_overloaded_store_is_told_as_passing(server, start, tmp_path):
    server.proxy.faults = [Fault("SlowDown", "PUT", times=OFTEN)]
    files = checkpoint(tmp_path, 10, {"a": 5000})
    uploader = start(budget_s=1.0)
    uploader.upload(10, str(tmp_path), records(files))
    (failed,) = until(uploader, Failed)
    assert not failed.permanent
    assert "SlowDown" in failed.why
    server.proxy.faults = []
    until(uploader, Uploaded)
    assert server.read("step_00000010/a") == files["a"]


def test_a_wait_between_tries_is_cancelled(server, start, tmp_path):
    """The delays of an overloaded store, and the long one after a refusal."""
    server.proxy.faults = [Fault("SlowDown", "PUT", times=OFTEN)]
    files = checkpoint(tmp_path, 10, {"a": 1})
    uploader = start(retry_after_s=3600.0)
    uploader.upload(10, str(tmp_path), records(files))
    wait_for(lambda: server.proxy.struck("SlowDown") >= 3)
    uploader.cancel(10)
    assert until(uploader, Cancelled) == [Cancelled(10)]
    server.proxy.faults = [Fault("ExpiredToken", "PUT", times=OFTEN)]
    uploader.upload(10, str(tmp_path), records(files))
    until(uploader, Failed)
    uploader.cancel(10)
    assert until(uploader, Cancelled) == [Cancelled(10)]


def test_a_process_that_dies_is_started_so_often_a_minute(start, tmp_path, server):
    now = [1000.0]
    uploader = start(restarts_per_minute=2, clock=lambda: now[0])
    files = checkpoint(tmp_path, 10, {"a": 5000})

    def kill() -> int:
        pid = uploader.pid
        os.kill(pid, signal.SIGKILL)
        until(uploader, Died)
        return pid

    pids = [kill(), kill(), kill()]
    assert len(set(pids)) == 3
    for _ in range(5):
        assert uploader.pid is None
        assert uploader.poll() == []
    uploader.upload(10, str(tmp_path), records(files))
    now[0] += 59.9
    uploader.poll()
    assert uploader.pid is None
    now[0] += 0.2
    uploader.poll()
    assert uploader.pid is not None
    until(uploader, Uploaded)
    assert server.read("step_00000010/a") == files["a"]


def test_a_process_that_stands_still_keeps_nobody_waiting(start, monkeypatch, tmp_path):
    """Requests larger than any pipe's buffer, to a process that reads nothing."""
    monkeypatch.setattr(sys, "executable", REAL)
    uploader = start()
    os.kill(uploader.pid, signal.SIGSTOP)
    many = {f"__{rank}_0.distcp": FileRecord("0" * 64, 1) for rank in range(20_000)}

    def use() -> None:
        for step in range(3):
            uploader.upload(step, str(tmp_path), many)
            uploader.cancel(step)
            uploader.poll()
        uploader.close(timeout_s=1.0)

    pid = uploader.pid
    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert uploader.poll() == []  # and it is not started again
    assert uploader.pid is None


def test_it_ends_with_its_input_in_the_middle_of_a_transfer(server, start, tmp_path):
    server.proxy.delay_s = 2 * LIMIT_S  # a stall would stop in the answer's body, and that of a PUT is empty
    files = checkpoint(tmp_path, 10, {"a": 5000})
    code = [python(), "-m", "quern.train.checkpoint.tiers.mover", server.url]
    process = subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdin.write(json.dumps({"upload": asked(1, 10, tmp_path, files)}) + "\n")
    process.stdin.flush()
    wait_for(lambda: server.proxy.count("PUT"))
    out, _ = process.communicate(timeout=LIMIT_S)  # closes the input
    assert process.returncode == 0
    assert [line for line in out.splitlines() if "progress" not in line] == []


def test_a_signal_does_not_end_it_and_the_end_of_its_input_does(server, tmp_path):
    """What a scheduler sends to all processes of a job; the trainer saves once more then, and that is to be moved."""
    files = checkpoint(tmp_path, 10, {"a": 5000})
    code = [sys.executable, "-m", "quern.train.checkpoint.tiers.mover", server.url]
    process = spawn(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.send_signal(signal.SIGTERM)  # before it is more than an interpreter
    answers = (json.loads(line) for line in process.stdout)
    for number, step in enumerate((10, 20, 30)):
        process.stdin.write(json.dumps({"upload": asked(number, step, tmp_path, files)}) + "\n")
        process.stdin.flush()
        assert next(answer for answer in answers if "progress" not in answer).get("uploaded") == step
        process.send_signal((signal.SIGTERM, signal.SIGINT)[number % 2])
    process.communicate(timeout=LIMIT_S)  # closes the input
    assert process.returncode == 0


def test_it_ends_with_its_parent(server, tmp_path):
    code = textwrap.dedent("""
        import os, sys, time
        from quern.train.checkpoint.tiers.upload import Uploader
        uploader = Uploader(sys.argv[1])
        os.set_inheritable(uploader._process._popen.stdin.fileno(), True)  # what a forked worker would hold open
        print(uploader.pid, os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600"), flush=True)
        time.sleep(600)
    """)
    parent = subprocess.Popen([sys.executable, "-c", code, server.url], stdout=subprocess.PIPE, text=True)
    child, holder = (psutil.Process(int(word)) for word in parent.stdout.readline().split())
    try:
        wait_for(lambda: child.num_threads() >= 3)  # it has begun to watch
        parent.kill()
        parent.wait(LIMIT_S)
        wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        assert holder.is_running()
    finally:
        holder.kill()
        parent.stdout.close()


def test_lines_that_are_no_requests_are_told_and_passed_over(server, tmp_path):
    files = checkpoint(tmp_path, 10, {"a": 5})
    good = asked(1, 10, tmp_path, files)
    bad = [
        "", "{", "[]", "3", '{"upload": 3}', '{"cancel": "all"}', '{"other": 1}', "null",
        *(json.dumps({"upload": good | change}) for change in (
            {"number": None}, {"step": -1}, {"step": "1"}, {"folder": 3}, {"files": 3}, {"files": {"a": 1}},
            {"files": {"a": {}}}, {"files": {"a": {"sha256": "x", "size": "y"}}}, {"last": [1]},
        )),
    ]  # fmt: skip
    code = [python(), "-m", "quern.train.checkpoint.tiers.mover", server.url]
    pipe = subprocess.PIPE
    process = subprocess.Popen(code, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    process.stdin.write("\n".join([*bad, json.dumps({"upload": good})]) + "\n")
    process.stdin.flush()
    answers = (json.loads(line) for line in process.stdout)
    assert next(answer for answer in answers if "progress" not in answer)["uploaded"] == 10
    _, errors = process.communicate(timeout=LIMIT_S)
    assert errors.count("quern.train.checkpoint.tiers.mover: ") == len(bad)
    assert "Traceback" not in errors


def test_a_url_that_is_no_store_is_refused_at_the_start():
    with pytest.raises(InputError, match="no such store"):
        Uploader("nostore://x")


# -- One request at a time, manifests first, then the newest; in this process, in memory.


class Bench:
    """A mover on a store in memory, worked by hand on a clock by hand."""

    def __init__(self, folder: Path, retry_after_s: float = 60.0) -> None:
        self.folder, self.now, self.said, self.taken, self.asked = folder, 0.0, [], [], 0
        self.url = f"memory://{uuid.uuid4().hex}"
        self.store = Store(self.url, backoff=Backoff(budget_s=0.0))
        self.mover = Mover(
            lambda pause: self.store, self.said.append, limit=lambda pause: self, retry_after_s=retry_after_s,
            clock=lambda: self.now,
        )  # fmt: skip

    def take(self, n: int) -> None:
        self.taken.append(n)

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
    files = checkpoint(bench.folder / "10", 10, {"a": 5, "b": 5})
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


def test_a_transfer_under_way_is_cancelled(bench, monkeypatch):
    take = bench.take

    def cancel(n):
        take(n)
        if len(bench.taken) == 2:
            bench.mover.tell({"cancel": 10})

    monkeypatch.setattr(bench, "take", cancel)
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


def test_what_is_under_way_is_replaced_without_a_word(bench, monkeypatch):
    take = bench.take

    def ask_anew(n):
        take(n)
        if len(bench.taken) == 1:
            bench.ask(10, "b")
            bench.ask(10, "c", last=True)

    monkeypatch.setattr(bench, "take", ask_anew)
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
    files = checkpoint(tmp_path / "40", 40, {".metadata": 5, "b": 6})
    (tmp_path / "40" / "b").rename(tmp_path / "40" / "other")
    plain = [{name: vars(record(files[name]))} for name in (".metadata", "manifest.json")]
    asked = {"number": 7, "step": 40, "folder": str(tmp_path / "40"), "files": plain[0], "last": plain[1]}
    bench.mover.tell({"upload": asked})
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


def test_progress_is_told_once_a_second(bench, monkeypatch):
    take = bench.take

    def slow(n):
        take(n)
        bench.now += 0.4

    monkeypatch.setattr(bench, "take", slow)
    bench.ask(10, size=10 * PIECE)
    bench.work()
    told = [said for said in bench.said if "progress" in said]
    assert [said["bytes"] for said in told] == [4 * PIECE, 7 * PIECE, 10 * PIECE]  # at 1.2 s, 2.4 s and 3.6 s
    assert {said["total"] for said in told} == {10 * PIECE}
    assert upload._event(json.dumps(told[0])) == (1, Progress(10, 4 * PIECE, 10 * PIECE))
