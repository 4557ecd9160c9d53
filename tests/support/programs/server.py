"""Imports what programs import, then forks one process a program (see the package)."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IMPORTED = (
    "_pytest.config", "aiobotocore.session", "fsspec", "httpx", "hypothesis", "multiprocessing.forkserver", "numpy",
    "pyarrow.compute", "pyarrow.dataset", "pyarrow.parquet", "pydantic.main", "pytest", "rich.console",
    "rich.progress", "rich.table", "s3fs", "tiktoken", "torch", "torch._dynamo", "torch.distributed.checkpoint",
    "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor", "torch.nn.attention.varlen",
    "torch.nn.parallel", "torch.utils.checkpoint", "typer", "yaml",
)  # fmt: skip


PYTHON = sys.executable


def serve(executable: str) -> None:
    del sys.path[0]  # this folder
    for name in IMPORTED:
        importlib.import_module(name)
    assert "quern" not in sys.modules
    gc.collect()
    gc.freeze()
    sys.executable = executable
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(Path(executable).with_name("socket")))
    listener.listen(64)
    os.write(1, b"ready\n")
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        ready, _, _ = select.select([listener.fileno(), 0], [], [])
        if 0 in ready:
            return
        line, _ = listener.accept()
        if not os.fork():
            listener.close()
            _accompany(line)
        line.close()


def _accompany(line: socket.socket) -> None:
    """The process beside a program: starts it, says how it ended, and kills it where nobody listens any more, or where
    the server has ended: no program outlives the tests."""
    server = os.pidfd_open(os.getppid())
    head, descriptors, _, _ = socket.recv_fds(line, 8, 200)
    if not head:  # the starter was killed before it said anything
        os._exit(1)
    told = b""
    while len(told) < int.from_bytes(head, "big"):
        told += (more := line.recv(1 << 20))
        if not more:
            os._exit(1)
    program = json.loads(told)
    process = os.fork()
    if not process:
        line.close()
        _become(**program | {"descriptors": dict(zip(program["descriptors"], descriptors, strict=True))})
    for descriptor in (*descriptors, 0, 1):
        os.close(descriptor)
    starter, _, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    number = Path(sys.executable).with_name(str(starter))
    number.unlink(missing_ok=True)
    number.symlink_to(str(process))
    try:
        line.sendall(b"%d\n" % process)
        ended = os.pidfd_open(process)
        if ended not in select.select([line.fileno(), server, ended], [], [])[0]:
            os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        number.unlink()
        line.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    except (BrokenPipeError, ConnectionResetError):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    os._exit(0)


def _become(
    arguments: list[str],
    folder: str,
    environment: Mapping[str, str],
    descriptors: Mapping[int, int],
    blocked: Sequence[int],
    leads: bool,
) -> None:
    """This process is the program. ``descriptors``: those it shall have, by what they are called there; ``blocked``:
    signals; ``leads``: whether a session of its own."""
    if leads:
        os.setsid()
    if "--parent" in arguments[:-1]:
        arguments[arguments.index("--parent") + 1] = str(os.getppid())
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    first = 1 + max(*descriptors, *descriptors.values())
    apart = {number: fcntl.fcntl(descriptor, fcntl.F_DUPFD, first) for number, descriptor in descriptors.items()}
    os.closerange(0, first)
    for number, descriptor in apart.items():
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    written = bool(environment.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = out = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = errors = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    out.reconfigure(line_buffering=out.isatty() or written, write_through=written)
    errors.reconfigure(line_buffering=True, write_through=written)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    found = [os.path.abspath(entry) for entry in filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    what = arguments[0]
    if what == "-c" and arguments[1].startswith("from multiprocessing."):
        sys.executable = PYTHON  # a server's processes, as ranks are, are no forked programs
    own = folder if what == "-m" else "" if what == "-c" else os.path.dirname(os.path.abspath(what))
    sys.path[:0] = found if environment.get("PYTHONSAFEPATH") else [own, *found]
    importlib.invalidate_caches()
    code = 1
    try:
        _run(*arguments)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    # The interpreter's own end would take most of a second to take apart what the server has imported.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _run(what: str, *rest: str) -> None:
    if what == "-m":
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        sys.argv = ["-c", *rest[1:]]
        main: Any = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [what, *rest]
        runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
