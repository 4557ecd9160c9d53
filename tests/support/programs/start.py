"""Starts a program in a fork of the server whose socket lies beside this file, and ends as the program ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys

PASSED_ON = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}

OPTIONS = {"-B": "PYTHONDONTWRITEBYTECODE", "-P": "PYTHONSAFEPATH", "-u": "PYTHONUNBUFFERED"}


def main(arguments: list[str]) -> None:
    environment, given = dict(os.environ), arguments
    while given and given[0] in OPTIONS:
        environment[OPTIONS[given[0]]], given = "1", given[1:]
    if not given or (given[0] not in ("-m", "-c") and given[0].startswith("-")):
        os.execv(sys.executable, [sys.executable, *arguments])
    # Those that come before the program has begun wait for it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    descriptors = [
        number for number in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{number}")
    ]
    program = {
        "arguments": given, "folder": os.getcwd(), "environment": environment, "descriptors": descriptors,
        "blocked": [*before], "leads": os.getsid(0) == os.getpid(),
    }  # fmt: skip
    told = json.dumps(program).encode()
    line = socket.socket(socket.AF_UNIX)
    line.connect(os.path.join(os.path.dirname(__file__), "socket"))
    socket.send_fds(line, [len(told).to_bytes(8, "big")], descriptors)
    line.sendall(told)
    with line.makefile("r") as said:
        process = int(said.readline())
        # A handler alone could miss its signal: Python runs none that comes just before a system call that waits.
        heard, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        for passed_on in PASSED_ON:
            signal.signal(passed_on, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Its program watches the process beside it, and this one the parent whose number was given.
        parent = int(given[given.index("--parent") + 1]) if "--parent" in given[:-1] else None
        while line not in (ready := select.select([line, heard], [], [], None if parent is None else 0.5)[0]):
            for number in os.read(heard, 1000) if heard in ready else ():
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(process, number)
            if parent is not None and os.getppid() != parent:
                os._exit(0)
        code = int(said.readline())
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
