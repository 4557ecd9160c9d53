"""Runs pytest on a copy of quern, again and again as its sources change, each time in a fork of one process.

    python -P tests/mutations/forked.py torch numpy …       # modules to import first; the copy stands on PYTHONPATH
    {"arguments": ["tests/…"], "said": "said.txt", "limit_s": 200}      # a line to stdin: where it writes, how long
    {"code": 1}                                     # the answer on stdout: pytest's exit code, null = took too long

A start imports torch and pytest, and the server of ranks once more: ten times what most of these runs compute. Here it
is done once, and nothing of quern is imported before the fork. What a run leaves behind ends with it, and it ends with
this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path

SERVER = "from multiprocessing.forkserver import main"
NUMBERS = re.compile(r"main\((\d+), (\d+),")
_PR_SET_PDEATHSIG = 1


def end_with_the_parent() -> None:
    """On Linux: killed with the process that forked this one, also where that is killed itself."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def lend_a_server_of_ranks() -> None:
    """The server that multiprocessing starts next is a fork made here, before anything of quern is imported."""
    ours, theirs = socket.socketpair()
    server = os.fork()
    if not server:
        ours.close()
        become_the_server(theirs)
    theirs.close()
    start, lent = util.spawnv_passfds, [server]

    def spawnv_passfds(path: bytes, arguments: list[str], descriptors: Sequence[int]) -> int:
        found = NUMBERS.search(arguments[-1])
        named = [] if found is None else [int(number) for number in found.groups()]
        # a server that is handed more than it is told of here (as Python 3.14's may be) starts as it always does
        if not arguments[-1].startswith(SERVER) or not lent or sorted(named) != sorted(descriptors):
            return start(path, arguments, descriptors)
        told = {"code": arguments[-1], "environment": dict(os.environ)}
        socket.send_fds(ours, [json.dumps(told).encode()], named)
        ours.close()
        return lent.pop()

    util.spawnv_passfds = spawnv_passfds  # type: ignore[assignment]


def become_the_server(line: socket.socket) -> None:
    """Once it is told its program, whose first two arguments number the descriptors that come along; else it ends."""
    end_with_the_parent()
    try:
        told, descriptors, _, _ = socket.recv_fds(line, 1 << 20, 8)
        if told:
            line.close()
            found = json.loads(told)
            os.environ.clear()
            os.environ.update(found["environment"])
            exec(NUMBERS.sub("main({}, {},".format(*descriptors), found["code"], count=1))
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def run(arguments: list[str], said: str) -> int:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_the_parent()
    nothing, file = os.open(os.devnull, os.O_RDONLY), os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for descriptor, to in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(descriptor, to)
    lend_a_server_of_ranks()
    os.environ["TESTS_START_PYTHON"] = "1"  # see support.programs
    import pytest

    import quern

    assert Path(str(quern.__file__)).resolve().is_relative_to(Path.cwd().resolve()), quern.__file__
    return pytest.main(arguments)


def waited(process: int, limit_s: float) -> int | None:
    """Its exit code, a signal's number negative; nothing where it took longer. Its whole session is ended."""
    deadline = time.monotonic() + limit_s
    ended, status = 0, 0
    try:
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(process, os.WNOHANG)
            time.sleep(0 if ended else 0.01)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # where it has not begun a session of its own yet
            if not ended:
                os.kill(process, signal.SIGKILL)
        if not ended:
            os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


def main(modules: list[str]) -> None:
    for name in [*modules, *(plugin.module for plugin in importlib.metadata.entry_points(group="pytest11"))]:
        importlib.import_module(name)
    assert "quern" not in sys.modules
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # by way of what ends the run
    for line in sys.stdin:
        told = json.loads(line)
        sys.stdout.flush()
        process = os.fork()
        if not process:
            sys.exit(run(told["arguments"], told["said"]))
        print(json.dumps({"code": waited(process, told["limit_s"])}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
