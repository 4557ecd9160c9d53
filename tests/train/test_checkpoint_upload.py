"""The process that uploads behind the training: killed, refused, cut off, cancelled.

The store is an S3 server on loopback behind a proxy that breaks things; what is in it is looked at with boto3.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial

import psutil
import pytest

from quern.errors import InputError
from quern.train.checkpoint.format.manifest import FileRecord
from quern.train.checkpoint.tiers.upload import Cancelled, Died, Failed, Uploaded, Uploader, Waiting
from quern.train.processes.spawn import spawn
from support.programs import python
from support.remote.s3_server import Fault
from support.train.tier_case import record
from support.train.uploader_case import asked, heard, saved
from support.waits import has_ended, until

pytestmark = pytest.mark.slow

PART = 8 << 20
OFTEN = 10**6
LIMIT_S = 120  # a wait of a test
REAL = sys.executable


def records(files: dict[str, bytes], *, last: bool = False) -> dict[str, FileRecord]:
    return {name: record(data) for name, data in files.items() if (name == "manifest.json") == last}


@pytest.fixture
def start(server, uploaders):
    yield partial(uploaders, server.url, timeout_s=20.0)
    server.proxy.ended.set()


def test_a_checkpoint_is_uploaded_with_the_manifest_at_the_end(server, start, tmp_path):
    files = saved(tmp_path, 10, {".metadata": 100, "__0_0.distcp": 2 * PART + 1, "__1_0.distcp": 0})
    uploader = start()
    uploader.upload(10, str(tmp_path), records(files))
    assert uploader.unfinished == [(10, False)]
    (done,) = heard(uploader, Uploaded)
    total = sum(len(data) for name, data in files.items() if name != "manifest.json")
    assert (done.step, done.last, done.num_bytes) == (10, False, total)
    assert "step_00000010/manifest.json" not in server.objects()
    uploader.upload(10, str(tmp_path), {}, records(files, last=True))
    (done,) = heard(uploader, Uploaded)
    assert (done.step, done.last, done.num_bytes) == (10, True, len(files["manifest.json"]))
    assert {name: server.read(name) for name in server.objects()} == {
        f"step_00000010/{name}": data for name, data in files.items()
    }
    puts = [target.split("?")[0].rpartition("/")[2] for method, target, _ in server.proxy.seen if method == "PUT"]
    assert puts[-1] == "manifest.json"
    assert uploader.unfinished == []
    uploader.upload(10, str(tmp_path), records(files), records(files, last=True))  # all is there
    (done,) = heard(uploader, Uploaded)
    assert done.num_bytes == 0


def test_the_manifest_waits_for_files_of_other_nodes(server, start, tmp_path):
    """That is no failure; when it is looked at again is told below."""
    files = saved(tmp_path, 10, {".metadata": 100, "__0_0.distcp": 5, "__8_0.distcp": 7})
    mine = {name: data for name, data in files.items() if name != "__8_0.distcp"}
    uploader = start()
    uploader.upload(10, str(tmp_path), records(mine), records(mine, last=True))
    seen = heard(uploader, Waiting)
    assert not [event for event in seen if isinstance(event, Failed)]
    assert (seen[-1].step, seen[-1].last) == (10, True)
    assert "__8_0.distcp: is not there" in seen[-1].why
    assert uploader.unfinished == [(10, True)]
    assert set(server.objects()) == {"step_00000010/.metadata", "step_00000010/__0_0.distcp"}
    older = saved(tmp_path / "5", 5, {"a": 5})
    uploader.upload(5, str(tmp_path / "5"), records(older))
    assert heard(uploader, Uploaded)[-1].step == 5  # others go by
    data = files["__8_0.distcp"]
    server.write("step_00000010/__8_0.distcp", data, sha256=hashlib.sha256(data).hexdigest())
    assert heard(uploader, Uploaded)[-1].step == 10
    assert server.read("step_00000010/manifest.json") == files["manifest.json"]
    assert uploader.unfinished == []


def test_a_request_is_replaced_by_the_next_of_its_kind(server, start, tmp_path):
    """The files of a step that is written anew, while those of before are under way."""
    old = saved(tmp_path / "old", 10, {"a": 3 * PART})
    server.proxy.delay_s = 0.5
    uploader = start()
    uploader.upload(10, str(tmp_path / "old"), records(old))
    until(lambda: server.proxy.count("PUT") >= 1)
    new = saved(tmp_path / "new", 10, {"a": 5000, ".metadata": 7})
    uploader.upload(10, str(tmp_path / "new"), records(new))
    uploader.upload(10, str(tmp_path / "new"), {}, records(new, last=True))
    assert uploader.unfinished == [(10, False), (10, True)]
    seen = [event for event in heard(uploader, Uploaded, count=2) if not isinstance(event, Waiting)]
    assert [(event.last, event.num_bytes) for event in seen] == [(False, 5007), (True, len(new["manifest.json"]))]
    assert server.read("step_00000010/a") == new["a"]
    assert server.read("step_00000010/manifest.json") == new["manifest.json"]
    assert server.uploads() == []
    assert uploader.unfinished == []


def test_what_was_done_already_when_it_was_replaced_counts_for_nothing(server, start, tmp_path):
    old, new = (saved(tmp_path / name, 10, {"a": size}) for name, size in (("old", 5), ("new", 7000)))
    uploader = start()
    uploader.upload(10, str(tmp_path / "old"), records(old))
    until(lambda: not uploader._process._said.empty())  # it has said that it is done, and nobody has heard it
    server.proxy.faults = [Fault("ExpiredToken", "PUT", times=OFTEN)]
    uploader.upload(10, str(tmp_path / "new"), records(new))
    assert [type(event) for event in heard(uploader, Failed)] == [Failed]
    assert uploader.unfinished == [(10, False)]
    uploader.cancel(10)
    uploader.upload(10, str(tmp_path / "new"), records(new))
    server.proxy.faults = []
    assert heard(uploader, Uploaded)[-1].num_bytes == 7000
    assert server.read("step_00000010/a") == new["a"]


@pytest.mark.long
def test_killed_again_and_again(server, start, tmp_path):
    """At no instant stands a manifest without all its files; what was sent whole is not sent again."""
    steps = {10: tmp_path / "10", 20: tmp_path / "20"}
    sizes = {".metadata": 100, "a": 2 * PART, "b": 3000, "c": PART + 1, "d": 5, "e": 0, "f": 70000}
    files = {step: saved(folder, step, sizes) for step, folder in steps.items()}
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
            until(lambda kill=kill: seen.extend(uploader.poll()) or server.proxy.count("PUT") >= 2 * kill + 2)
            time.sleep(moments.uniform(0, 0.15))
            if uploader.pid is not None:
                os.kill(uploader.pid, signal.SIGKILL)
            heard(uploader, Died, count=kill + 1, seen=seen)
        assert len(server.objects()) < 16
        server.proxy.delay_s = 0.0
        heard(uploader, Uploaded, count=2, seen=seen)
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
    files = saved(tmp_path, 10, {".metadata": 100, "a": 2000, "b": 2 * PART})
    server.proxy.faults = [Fault("stall", "PUT", "partNumber=2", times=1)]
    uploader = start(timeout_s=60.0)
    uploader.upload(10, str(tmp_path), records(files))
    until(lambda: server.proxy.struck("stall"))
    assert set(server.objects()) == {"step_00000010/.metadata", "step_00000010/a"}
    first = uploader.pid
    os.kill(first, signal.SIGKILL)
    seen = heard(uploader, Uploaded)
    assert [type(event) for event in seen] == [Died, Uploaded]
    assert seen[-1].num_bytes == 2 * PART
    assert server.proxy.count("PUT", "/a") == 1
    assert server.read("step_00000010/b") == files["b"]
    assert server.uploads() == []
    assert uploader.pid != first


def test_an_overloaded_store_is_told_as_passing(server, start, tmp_path):
    server.proxy.faults = [Fault("SlowDown", "PUT", times=OFTEN)]
    files = saved(tmp_path, 10, {"a": 5000})
    uploader = start(budget_s=1.0)
    uploader.upload(10, str(tmp_path), records(files))
    (failed,) = heard(uploader, Failed)
    assert not failed.permanent
    assert "SlowDown" in failed.why
    server.proxy.faults = []
    heard(uploader, Uploaded)
    assert server.read("step_00000010/a") == files["a"]


def test_a_wait_between_tries_is_cancelled(server, start, tmp_path):
    """The delays of an overloaded store, and the long one after a refusal."""
    server.proxy.faults = [Fault("SlowDown", "PUT", times=OFTEN)]
    files = saved(tmp_path, 10, {"a": 1})
    uploader = start(retry_after_s=3600.0)
    uploader.upload(10, str(tmp_path), records(files))
    until(lambda: server.proxy.struck("SlowDown") >= 3)
    uploader.cancel(10)
    assert heard(uploader, Cancelled) == [Cancelled(10)]
    server.proxy.faults = [Fault("ExpiredToken", "PUT", times=OFTEN)]
    uploader.upload(10, str(tmp_path), records(files))
    heard(uploader, Failed)
    uploader.cancel(10)
    assert heard(uploader, Cancelled) == [Cancelled(10)]


def test_a_process_that_dies_is_started_so_often_a_minute(start, tmp_path, server):
    now = [1000.0]
    uploader = start(restarts_per_minute=2, clock=lambda: now[0])
    files = saved(tmp_path, 10, {"a": 5000})

    def kill() -> int:
        pid = uploader.pid
        os.kill(pid, signal.SIGKILL)
        heard(uploader, Died)
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
    heard(uploader, Uploaded)
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
    until(lambda: has_ended(pid))
    assert uploader.poll() == []  # and it is not started again
    assert uploader.pid is None


def test_it_ends_with_its_input_in_the_middle_of_a_transfer(server, start, tmp_path):
    server.proxy.delay_s = 2 * LIMIT_S  # a stall would stop in the answer's body, and that of a PUT is empty
    files = saved(tmp_path, 10, {"a": 5000})
    code = [python(), "-m", "quern.train.checkpoint.tiers.mover", server.url]
    process = subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdin.write(json.dumps({"upload": asked(1, 10, tmp_path, files)}) + "\n")
    process.stdin.flush()
    until(lambda: server.proxy.count("PUT"))
    out, _ = process.communicate(timeout=LIMIT_S)  # closes the input
    assert process.returncode == 0
    assert [line for line in out.splitlines() if "progress" not in line] == []


def test_a_signal_does_not_end_it_and_the_end_of_its_input_does(server, tmp_path):
    """What a scheduler sends to all processes of a job; the trainer saves once more then, and that is to be moved."""
    files = saved(tmp_path, 10, {"a": 5000})
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
        until(lambda: child.num_threads() >= 3)  # it has begun to watch
        parent.kill()
        parent.wait(LIMIT_S)
        until(lambda: has_ended(child.pid))
        assert holder.is_running()
    finally:
        holder.kill()
        parent.stdout.close()


def test_lines_that_are_no_requests_are_told_and_passed_over(server, tmp_path):
    files = saved(tmp_path, 10, {"a": 5})
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
