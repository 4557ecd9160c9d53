"""CPU, wall time and memory of a command with everything it starts, daemons included.

The measuring process makes itself the reaper of orphans (Linux), so a descendant is waited for by its parent or here,
and the kernel counts its CPU time. But where a parent ignores SIGCHLD the kernel throws the times of its children away
(getrusage(2)), and Ray's raylet, parent of all workers, does. Such children are sampled: what one used after the last
look, at most :data:`SAMPLE_S`, is missed. Memory is sampled: the sum over the tree of unshared and proportionally
shared pages (PSS).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

PR_SET_CHILD_SUBREAPER = 36

#: Seconds between two looks at the tree.
SAMPLE_S = 0.1
_LOOKS_PER_MEMORY_SAMPLE = 5


@dataclass(frozen=True)
class Usage:
    """What one command cost."""

    wall_s: float
    cpu_s: float
    peak_pss_mib: float
    """Highest sum over the tree, sampled every 0.5 s."""
    largest_rss_mib: float
    """Highest resident size of any one process."""


def measure(
    command: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    log: str | None = None,
    timeout_s: float | None = None,
) -> Usage:
    """Run ``command`` to its end and account for its whole process tree.

    Raises:
        SystemExit: the command failed; its last output is shown.
        TimeoutError: it took longer than ``timeout_s`` seconds; it and all it started are ended.
    """
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise SystemExit("cannot become a subreaper: CPU of daemons would be lost")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seen = _Seen()
    stop = threading.Event()
    sampler = threading.Thread(target=_sample, args=(seen, stop), daemon=True)
    sampler.start()
    began = time.perf_counter()
    with open(log or os.devnull, "w+") as output:
        try:
            done = subprocess.run(
                command, env=env, stdout=output, stderr=subprocess.STDOUT, check=False, timeout=timeout_s
            )
        except subprocess.TimeoutExpired:
            stop.set()
            sampler.join()
            _end_all()
            raise TimeoutError(f"ended after {timeout_s:.0f} s") from None
        wall = time.perf_counter() - began
        reaped = _reap()
        stop.set()
        sampler.join()
        if done.returncode != 0:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{output.read()[-4000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    counted = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    discarded = sum(cpu for (pid, _), cpu in seen.discarded.items() if pid not in reaped)
    return Usage(wall, counted + discarded, seen.peak_pss_mib, seen.largest_rss_mib)


def _end_all() -> None:
    """End what the command has left: its descendants, and orphans of theirs, which are ours now."""
    while left := psutil.Process().children(recursive=True):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _reap(1.0)


@dataclass
class _Seen:
    """What the looks at the tree have found so far."""

    discarded: dict[tuple[int, float], float] = field(default_factory=dict)
    """(pid, start) → CPU seconds of a process whose times the kernel throws away, unless it ends as an orphan."""
    peak_pss_mib: float = 0.0
    largest_rss_mib: float = 0.0


def _sample(seen: _Seen, stop: threading.Event) -> None:
    me = psutil.Process()
    look = 0
    while not stop.wait(SAMPLE_S):
        tree = me.children(recursive=True)
        ignoring: dict[int, bool] = {}
        for process in tree:
            try:
                parent = process.ppid()
                if parent not in ignoring:
                    ignoring[parent] = _ignores_children(parent)
                if ignoring[parent]:
                    times = process.cpu_times()
                    own, waited_for = times.user + times.system, times.children_user + times.children_system
                    seen.discarded[process.pid, process.create_time()] = own + waited_for
            except psutil.Error:
                continue
        if look % _LOOKS_PER_MEMORY_SAMPLE == 0:
            _sample_memory(tree, seen)
        look += 1


def _ignores_children(pid: int) -> bool:
    """Whether a process ignores SIGCHLD."""
    try:
        with open(f"/proc/{pid}/status") as lines:
            ignored = next((int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:")), 0)
    except OSError:
        return False
    return bool(ignored >> (signal.SIGCHLD - 1) & 1)


def _sample_memory(tree: Sequence[psutil.Process], seen: _Seen) -> None:
    total = 0
    for process in tree:
        try:
            info = process.memory_full_info()
        except psutil.Error:
            continue
        total += info.pss
        seen.largest_rss_mib = max(seen.largest_rss_mib, info.rss / 2**20)
    seen.peak_pss_mib = max(seen.peak_pss_mib, total / 2**20)


def _reap(timeout_s: float = 30.0) -> set[int]:
    """Wait for every orphan the command left behind; return their process ids."""
    end = time.monotonic() + timeout_s
    reaped: set[int] = set()
    while time.monotonic() < end:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return reaped
        if pid:
            reaped.add(pid)
        else:
            time.sleep(0.05)
    left = [process.name() for process in psutil.Process().children(recursive=True)]
    print(f"still running after {timeout_s:.0f} s, not counted: {left}", file=sys.stderr)
    return reaped
