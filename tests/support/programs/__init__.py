"""Python programs in processes of their own, without the 4 s of CPU that it takes to import torch.

They are forked from a server that has imported, once a test process, what programs import besides quern::

    subprocess.run([python(), "-m", "quern.cli.main", "train", …])     # in place of [sys.executable, "-m", …]

What stands there is a small program (``start.py``) that hands its arguments, environment, folder and standard streams
to the server, passes on the signals it gets, and ends as the forked process ends; killed, it takes that process with
it. In the forked process it is ``sys.executable`` too. With other options of Python's than ``-B``, ``-P`` and ``-u`` it
becomes Python itself. A program that watches its parent (``--parent NUMBER``) watches the process beside it, which
ends it soon after that parent.

It is not for tests of a process's memory, parent, group, children, hash seed or number, of what is imported or of the
interpreter's end: those start ``sys.executable``. The process to kill, stop or limit is :func:`forked`'s.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing import spawn
from pathlib import Path
from typing import Any

__all__ = ["forked", "kill", "python", "serve_multiprocessing"]

HERE = Path(__file__).parent
PYTHON = sys.executable
"""Python itself, whatever a test makes of ``sys.executable``."""
NEVER = "TESTS_START_PYTHON"
"""With this in the environment programs are not forked: in a process that does not live long enough."""


@functools.cache
def python() -> str:
    """The executable that stands for ``sys.executable``."""
    if sys.platform != "linux" or os.environ.get(NEVER):
        return PYTHON
    folder = tempfile.TemporaryDirectory(prefix="programs-")
    executable = Path(folder.name, "python")
    executable.write_text(f"#!{PYTHON} -IS\n" + (HERE / "start.py").read_text())
    executable.chmod(0o700)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    server = subprocess.Popen(
        [PYTHON, HERE / "server.py", executable], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=environment, start_new_session=True,
    )  # fmt: skip
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    atexit.register(_end, server, folder)
    return str(executable)


def serve_multiprocessing() -> None:
    """The servers that multiprocessing starts in this process, of ranks too, are forked from now on."""
    spawn.get_executable = lambda: os.fsencode(python())  # type: ignore[assignment]


def forked(process: subprocess.Popen[Any]) -> int:
    """The number of the process that a started program runs in. Raises ProcessLookupError where it has ended."""
    if python() == PYTHON:
        return process.pid
    told = Path(python()).with_name(str(process.pid))
    deadline = time.monotonic() + 120
    while process.poll() is None:
        assert time.monotonic() < deadline, f"{process.args} is not forked"
        with contextlib.suppress(OSError):
            return int(os.readlink(told))
        time.sleep(0.005)
    raise ProcessLookupError(f"{process.args} has ended with {process.returncode}")


def kill(process: subprocess.Popen[Any]) -> int:
    """Kill a started program; when this returns it is dead. Its exit code."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(forked(process), signal.SIGKILL)
    return process.wait()


def _end(server: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    assert server.stdin is not None
    server.stdin.close()  # it ends when nobody holds this
    server.wait()
    folder.cleanup()
