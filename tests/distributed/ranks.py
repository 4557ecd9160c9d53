"""Runs a function on every rank of a process group: fresh processes, gloo, about 0.1 s to start.

The ranks are forked from a server that has imported torch once (``multiprocessing``'s forkserver), because importing
torch anew in every rank is all that a torchrun test costs. They meet through a file, not a port, so that test
processes beside each other never collide. Whatever happens, no process is left over.

Tests reach it through the fixtures of ``conftest.py``::

    def work(factor):                       # at a test module's top level: the ranks load the file by its path
        value = torch.tensor([float(dist.get_rank() * factor)])
        dist.all_reduce(value)
        return value.item()

    def test_sum(run_ranks):
        assert run_ranks(work, 4, 10) == [60.0] * 4
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import importlib.util
import math
import multiprocessing
import os
import pickle
import runpy
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

__all__ = ["RankError", "run_ranks"]

PRELOAD = (
    "hypothesis", "numpy", "pydantic", "pytest", "torch", "torch._dynamo", "torch.distributed",
    "torch.distributed.algorithms", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "torch.distributed.tensor", "torch.nn.parallel", "torch.utils.checkpoint", "yaml",
)  # fmt: skip
OWN = (
    "quern.config",
    "quern.errors",
    "quern.mixtures",
    "quern.model",
    "quern.parallel",
    "quern.storage",
    "quern.train",
)
SERVER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
GRACE_S = 3.0
"""How long the other ranks may go on after one has failed, so that their tracebacks are in the report too."""


class RankError(Exception):
    """At least one rank failed, died or did not finish; the message holds what each of them said last.

    ``failed``: what went wrong, by rank, the first to fail first. ``results``: what the other ranks returned.
    """

    def __init__(self, failed: dict[int, str], results: dict[int, Any], world: int) -> None:
        first = next(iter(failed))
        report = "\n".join(f"----- rank {rank} of {world}:\n{text.rstrip()}" for rank, text in failed.items())
        super().__init__(f"rank {first} failed first; failed: {sorted(failed)} of {world} ranks\n{report}")
        self.failed, self.results = failed, results


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """``function(*args)`` on each of ``world`` ranks of a gloo group; what they return, by rank.

    ``function`` stands at the top level of its file; ``args`` and results are picklable, results without DTensors.
    Collectives time out after three quarters of ``timeout_s``; at ``timeout_s`` every rank writes where it stands and
    is killed. Raises :class:`RankError`.
    """
    context = multiprocessing.get_context("forkserver")
    _start_server(context)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks, readers = [], []
        try:
            for rank in range(world):
                reader, writer = context.Pipe()
                job = {
                    "function": _address(function), "args": pickle.dumps(args), "rank": rank, "world": world,
                    "folder": folder, "timeout_s": timeout_s, "environment": dict(os.environ), "channel": writer,
                }  # fmt: skip
                # the standard library's function is the only one that the child can surely import by name
                process = context.Process(target=runpy.run_path, args=(__file__, {"JOB": job}, RUN_NAME))
                readers.append(reader)
                process.start()
                writer.close()
                ranks.append(process)
            results, failed = _collect(ranks, readers, folder, timeout_s)
            # only now that all have reported: nobody is torn out of a collective because a peer has left
            for reader in readers:
                with contextlib.suppress(OSError):
                    reader.send_bytes(b"leave")
            for rank in results:
                ranks[rank].join(GRACE_S)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()
                process.close()
            for reader in readers:
                reader.close()
        for rank in range(world):
            printed = _printed(folder, rank)
            if rank in failed and printed:
                failed[rank] += f"\n----- rank {rank} printed:\n{printed}"
            elif printed:
                print(f"[rank {rank}] {printed.rstrip()}")
    if failed:
        raise RankError(failed, results, world)
    return [results[rank] for rank in range(world)]


def _start_server(context: Any) -> None:
    """The forkserver, once a test process; with the parts of quern that this process has imported without a fault."""
    imported = [name for name in sys.modules if any(name == own or name.startswith(own + ".") for own in OWN)]
    context.set_forkserver_preload([*PRELOAD, *sorted(imported)])
    before = {name: os.environ.get(name) for name in SERVER_ENVIRONMENT}
    os.environ.update(SERVER_ENVIRONMENT)  # read when torch and gloo are imported, which is in the server
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _address(function: Callable[..., Any]) -> tuple[str, str, str]:
    """(file, module, name) by which a rank finds the function; test files are on no import path."""
    if "<" in function.__qualname__ or getattr(function, "__closure__", None):
        raise TypeError(f"{function.__qualname__}: expected a function at the top level of its file")
    return function.__code__.co_filename, function.__module__, function.__qualname__


def _collect(
    processes: list[Any], channels: list[Any], folder: str, timeout_s: float
) -> tuple[dict[int, Any], dict[int, str]]:
    """What every rank returned, and how the others ended, in the order in which they failed."""
    results: dict[int, Any] = {}
    failed: dict[int, str] = {}
    waiting = {channel: rank for rank, channel in enumerate(channels)}
    deadline = time.monotonic() + timeout_s + 1  # a second for the ranks to write where they stand
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for channel in ready:
            rank = waiting.pop(channel)
            try:
                succeeded, payload = pickle.loads(channel.recv_bytes())
                if succeeded:
                    results[rank] = pickle.loads(payload)
                else:
                    failed[rank] = payload
            except (EOFError, ConnectionError):
                processes[rank].join(GRACE_S)
                failed[rank] = f"died without a word; exit code {processes[rank].exitcode} (negative: the signal)"
            if rank in failed:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    for rank in waiting.values():
        stands = _read(Path(folder, f"stack-{rank}.txt"))
        failed[rank] = f"did not finish within {timeout_s:g} s\n{stands}" if stands else "killed after another failed"
    return results, failed


def _printed(folder: str, rank: int) -> str:
    return _read(Path(folder, f"output-{rank}.txt"))


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


# ---- in the rank ----


def _serve(job: dict[str, Any]) -> None:
    """One rank's life: join the group, call, report, wait until all have reported."""
    rank, channel, timeout_s = job["rank"], job["channel"], job["timeout_s"]
    signal.alarm(math.ceil(timeout_s + 4 * GRACE_S))  # whatever becomes of the parent, this process ends
    with _output_to(Path(job["folder"], f"output-{rank}.txt")), _stack_at(job, timeout_s):
        try:
            payload: tuple[bool, Any] = (True, pickle.dumps(_call(job)))
        except BaseException:
            payload = (False, traceback.format_exc())
    with contextlib.suppress(OSError):
        channel.send_bytes(pickle.dumps(payload))
        if not payload[0]:
            return  # the sockets close: peers in a collective fail at once, with their own tracebacks
        channel.poll(timeout_s)
    import torch.distributed as dist

    dist.destroy_process_group()


def _call(job: dict[str, Any]) -> Any:
    rank, world = job["rank"], job["world"]
    os.environ.clear()  # the server's environment is that of its start; a test may have changed its own since
    os.environ.update(job["environment"])
    os.environ.update(
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    )
    os.environ.update(SERVER_ENVIRONMENT)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    function = _find(*job["function"])
    args = pickle.loads(job["args"])  # only now: they may hold values of the file that _find has loaded
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(Path(job["folder"], "store")), world), rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=0.75 * job["timeout_s"]),
    )  # fmt: skip
    return function(*args)


def _find(file: str, module_name: str, name: str) -> Callable[..., Any]:
    """The function of that name; its file is loaded under the parent's name for it, so that pickles agree."""
    module = sys.modules.get(module_name)
    if module is None and module_name.startswith("quern."):
        module = importlib.import_module(module_name)
    if module is None:
        for end, letter in enumerate(module_name):  # pickle imports the packages above, which no path may lead to
            if letter == ".":
                sys.modules.setdefault(module_name[:end], types.ModuleType(module_name[:end]))
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Both outputs into a file, the libraries' too: an abort in C++ says why only there."""
    with path.open("wb", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        yield
        sys.stdout.flush()
        sys.stderr.flush()


@contextlib.contextmanager
def _stack_at(job: dict[str, Any], timeout_s: float) -> Iterator[None]:
    with Path(job["folder"], f"stack-{job['rank']}.txt").open("w") as file:
        faulthandler.dump_traceback_later(timeout_s, file=file)
        yield
        faulthandler.cancel_dump_traceback_later()


RUN_NAME = "__rank__"
if __name__ == RUN_NAME:
    _serve(globals()["JOB"])
