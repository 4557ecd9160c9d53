"""Runs a query in a child process with limited memory.

DuckDB's own limit is of its buffers: a list or a text that one function makes is beyond it.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from quern.data_pipeline.execution.isolation import bounded_memory
from quern.errors import InputError, QuernError

__all__ = ["in_child"]

R = TypeVar("R")

#: Beside DuckDB's memory, and as much again for what functions make: Python's, and a result with its copy.
_OVERHEAD_MIB = 768
_STACK_MIB = 16
_PR_SET_PDEATHSIG = 1


def in_child(call: Callable[[], R], memory_bytes: int, threads: int) -> R:
    """``call()`` in a fork of this process, which may take ``2 · memory_bytes`` and 768 MiB more than this one has, and
    16 MiB for each of ``threads``. Its temporary files are gone afterwards, unless a signal ends this process.

    For commands, on Linux. Elsewhere, and in a process with other threads, whose locks a fork would never get, the call
    is made here, with DuckDB's own bound.

    Raises:
        QuernError: of ``call``, or it took more memory, or its process died.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        return call()
    limit_mib = _data_mib() + 2 * (memory_bytes >> 20) + _OVERHEAD_MIB + _STACK_MIB * threads
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="quern-sql-") as scratch, open(reader, "rb") as answers:
        child = os.fork()
        if not child:
            _answer(call, writer, scratch, limit_mib)
        os.close(writer)
        try:
            data = answers.read()
            _, status = os.waitpid(child, 0)
        except BaseException:
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            raise
    if not data:
        died = f" (signal {os.WTERMSIG(status)})" if os.WIFSIGNALED(status) else ""
        raise QuernError(
            f"sql: the query's process took more than {limit_mib:,} MiB of memory, or died otherwise{died}; ask for "
            "smaller lists and texts, or give --memory-gb"
        )
    kind, value = pickle.loads(data)  # our own fork's
    if kind is not None:
        raise kind(value)
    result: R = value
    return result


def _answer(call: Callable[[], Any], writer: int, scratch: str, limit_mib: int) -> None:
    """What the fork does; it never returns."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        tempfile.tempdir = scratch
        with bounded_memory(limit_mib):
            try:
                said: tuple[type[BaseException] | None, Any] = (None, call())
            except QuernError as error:
                said = (InputError if isinstance(error, InputError) else QuernError, str(error))
            except KeyboardInterrupt:
                said = (KeyboardInterrupt, "")
            except MemoryError:
                raise
            except Exception as error:
                said = (QuernError, f"sql: {type(error).__name__}: {error}")
            data = pickle.dumps(said)
        with open(writer, "wb") as out:
            out.write(data)
        code = 0
    except MemoryError:
        pass
    finally:
        os._exit(code)


def _data_mib() -> int:
    """Private memory that this process has by now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[5]) * resource.getpagesize() >> 20
