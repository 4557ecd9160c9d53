"""The server of a node's checkpoint files as a process: full disks, kills, whose end it follows, addresses."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from quern.errors import InputError, QuernError
from quern.train.checkpoint.mirror.peers import PeerError, ServerProcess, new_token
from quern.train.processes.spawn import spawn
from support.train.peer_case import FOLDER, MIB, NAME, PLACE, TOKEN, client, content, put, record_of, refused, tree
from support.waits import has_ended, until

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[3]


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest.fixture
def start(tmp_path, closing):
    """Starts servers over ``there`` that end with the test; returns each with its port."""

    def start(port: int = 0) -> tuple[subprocess.Popen, int]:
        command = [sys.executable, "-m", "quern.train.checkpoint.mirror.peer_server"]
        command += ["--root", str(tmp_path / "there"), "--host", "127.0.0.1", "--port", str(port)]
        process = spawn(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        closing.callback(end, process)
        process.stdin.write(f"{TOKEN}\n".encode())
        process.stdin.flush()
        return process, json.loads(process.stdout.readline())["port"]

    return start


def test_a_disk_that_is_full_is_said_and_harms_nothing_else(start, tmp_path):
    data, small = content(5 * MIB), content(MIB, 1)
    root = tmp_path / "there"
    put(root, small, "before")
    process, port = start()
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (3 * MIB, 3 * MIB))
    waits: list[float] = []
    peer = client(port, sleep=waits.append)
    with refused(port, "answered 507: .*File too large"):
        peer.send(FOLDER, NAME, str(put(tmp_path, data)), record_of(data))
    assert waits == []
    assert tree(root) == {f"{FOLDER}/before": small}
    assert os.listdir(root) == [FOLDER]
    peer.send(FOLDER, "after", str(put(tmp_path, small)), record_of(small))
    assert tree(root) == {f"{FOLDER}/before": small, f"{FOLDER}/after": small}


def test_a_disk_that_is_full_here_is_said_and_leaves_nothing(there):
    """The client runs in a process of its own, whose files may not grow beyond 3 MiB."""
    data = content(5 * MIB)
    put(there.root, data)
    code = f"""
import resource
from quern.errors import QuernError
from quern.train.checkpoint.format.manifest import FileRecord
from quern.train.checkpoint.mirror.peers import Peer, PeerError
resource.setrlimit(resource.RLIMIT_FSIZE, ({3 * MIB}, {3 * MIB}))
try:
    peer = Peer("127.0.0.1", {there.port}, "{TOKEN}")
    peer.fetch("{FOLDER}", "{NAME}", FileRecord("{record_of(data).sha256}", {len(data)}), "{there.here}")
except QuernError as error:
    assert not isinstance(error, PeerError)
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == f"{there.here}/{NAME}: cannot be written (File too large)\n"
    assert tree(there.here) == {}


def test_a_killed_server_goes_on_with_what_it_had(start, line, tmp_path):
    """kill -9 half way through a send, and again half way through a fetch; the same port serves again."""
    data = content(32 * MIB)
    root, path = tmp_path / "there", str(put(tmp_path / "here", data))
    moved_before: list[int] = []
    killed = threading.Event()
    process, port = start()
    running = [process]
    victim: dict[str, Callable[[], bool]] = {}

    def kill_when() -> None:
        if victim and victim["when"]():
            victim.clear()
            end(running[0])
            killed.set()

    through = line(port, each_read=kill_when)

    def restart(seconds: float) -> None:
        assert killed.wait(60)
        killed.clear()
        moved_before[:] = [through.moved["send"], sum(map(len, tree(root).values()))]
        running[0], _ = start(port)

    peer = client(through.port, sleep=restart)
    victim["when"] = lambda: through.moved["send"] > 16 * MIB
    peer.send(FOLDER, NAME, path, record_of(data))
    assert not victim
    assert tree(root) == {PLACE: data}
    up, written = moved_before
    assert 0 < written < len(data)
    assert through.moved["send"] - up < len(data) - written + 4000  # what had been written was not sent again
    victim["when"] = lambda: through.moved["fetch"] > 16 * MIB
    peer.fetch(FOLDER, NAME, record_of(data), str(tmp_path / "back"))
    assert not victim
    assert tree(tmp_path / "back") == {NAME: data}
    assert through.moved["fetch"] < len(data) + MIB


def test_the_process_ends_with_its_standard_input_and_not_by_the_trainers_signals(start):
    process, port = start()
    command = Path(f"/proc/{process.pid}/cmdline").read_bytes() + Path(f"/proc/{process.pid}/environ").read_bytes()
    assert TOKEN.encode() not in command
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert client(port).files(FOLDER) == {}
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(30) == 0


def test_the_process_dies_with_a_trainer_that_is_killed(tmp_path):
    """Also when a process that the trainer forked holds the pipe open."""
    code = f"""
import os, sys, time
from quern.train.checkpoint.mirror.peers import ServerProcess
server = ServerProcess({str(tmp_path / "there")!r}, "127.0.0.1", {TOKEN!r})
child = os.fork()
if child:
    print(server.port, server._process.pid, child, flush=True)
time.sleep(600)
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE)
    port, server, child = map(int, trainer.stdout.readline().split())
    try:
        assert client(port).files(FOLDER) == {}
        trainer.kill()
        trainer.wait()
        assert Path(f"/proc/{child}/cmdline").read_bytes()
        until(lambda: has_ended(server))
    finally:
        trainer.kill()
        trainer.stdout.close()
        os.kill(child, signal.SIGKILL)


def test_a_server_process_is_started_and_ended(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(REPOSITORY)
    token = new_token()
    root = str(tmp_path / "there")
    with ServerProcess(root, "127.0.0.1", token) as server:
        data = content(1000)
        peer = client(server.port, token=token)
        peer.send(FOLDER, NAME, str(put(tmp_path, data)), record_of(data))
        assert peer.files(FOLDER) == {NAME: 1000}
        assert server.alive()
        with pytest.raises(QuernError, match="did not start"):
            ServerProcess(root, "127.0.0.1", token, port=server.port)
        assert f"error: 127.0.0.1:{server.port}: cannot listen there" in capfd.readouterr().err
    assert not server.alive()
    with pytest.raises(QuernError, match="did not start"):
        ServerProcess(str(tmp_path / PLACE), "127.0.0.1", token)
    assert f"error: {tmp_path / PLACE}: cannot be served" in capfd.readouterr().err
    with pytest.raises(InputError, match="token"):
        ServerProcess(root, "127.0.0.1", "short")


def test_an_address_of_ip_version_6(node):
    there = node(host="::1")
    peer = client(there.port, host="::1")
    assert peer.files(FOLDER) == {}
    with pytest.raises(PeerError, match=rf"\[::1\]:{there.port}: {PLACE}: answered 404"):
        peer.fetch(FOLDER, NAME, record_of(b"x"), str(there.here))
