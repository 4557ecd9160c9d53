"""CPU, wall time and memory of a command with everything it starts, daemons included.

The measuring process makes itself the reaper of orphans (Linux), so every descendant is waited for here in the end and
its CPU time is counted by the kernel, not sampled. Memory is sampled: the sum over the tree of unshared and
proportionally shared pages (PSS).
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Usage:
    """What one command cost."""

    wall_s: float
    cpu_s: float
    peak_pss_mib: float
    """Highest sum over the tree, sampled every 0.5 s."""
    largest_rss_mib: float
    """Highest resident size of any one process."""


def measure(command: Sequence[str], *, env: dict[str, str] | None = None, log: str | None = None) -> Usage:
    """Run ``command`` to its end and account for its whole process tree.

    Raises:
        SystemExit: the command failed; its last output is shown.
    """
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise SystemExit("cannot become a subreaper: CPU of daemons would be lost")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    peaks = [0.0, 0.0]
    stop = threading.Event()
    sampler = threading.Thread(target=_sample, args=(peaks, stop), daemon=True)
    sampler.start()
    began = time.perf_counter()
    with open(log or os.devnull, "w+") as output:
        done = subprocess.run(command, env=env, stdout=output, stderr=subprocess.STDOUT, check=False)
        wall = time.perf_counter() - began
        stop.set()
        sampler.join()
        _reap()
        if done.returncode != 0:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{output.read()[-4000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Usage(wall, cpu, peaks[0], peaks[1])


def _sample(peaks: list[float], stop: threading.Event) -> None:
    me = psutil.Process()
    while not stop.wait(0.5):
        total = 0
        for process in me.children(recursive=True):
            try:
                info = process.memory_full_info()
            except psutil.Error:
                continue
            total += info.pss
            peaks[1] = max(peaks[1], info.rss / 2**20)
        peaks[0] = max(peaks[0], total / 2**20)


def _reap(timeout_s: float = 30.0) -> None:
    """Wait for every orphan the command left behind."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.05)
    left = [process.name() for process in psutil.Process().children(recursive=True)]
    print(f"still running after {timeout_s:.0f} s, not counted: {left}", file=sys.stderr)
