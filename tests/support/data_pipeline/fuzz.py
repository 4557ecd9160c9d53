"""Fuzzing of what meets hostile bytes: ``make fuzz FUZZ_ARGS="--minutes 5 [--only reader] [--seed 7]"``.

Cases run in a process of their own under a limit of CPU time and memory, which the kernel holds them to: also one that
hangs in C ends, and is a finding. A finding prints its seed; ``--case reader:7:123`` runs that one here, unprotected.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import resource
import signal
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence

from support.data_pipeline.fuzz_cases import TARGETS

__all__ = ["run_case", "run_for"]

_LAYOUT = struct.Struct("<QQd")


def run_case(target: str, seed: int, number: int) -> None:
    """One case; the same seed and number are the same case."""
    TARGETS[target](random.Random(f"{target}:{seed}:{number}"))


def _cases(target: str, seed: int, begin: int, until: float, cpu_s: float, memory: int, shared: mmap.mmap) -> None:
    """Run cases from ``begin`` until the clock says so; ``shared``: the one in work, findings, seconds of loading."""
    loaded = -time.time()
    run_case(target, seed, -1)  # models, lists and corpora are loaded outside the limits
    loaded += time.time()
    until += loaded
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + memory, resource.RLIM_INFINITY))
    number, findings = begin, 0
    while time.time() < until:
        _LAYOUT.pack_into(shared, 0, number, findings, loaded)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # not handled: the process ends
        try:
            run_case(target, seed, number)
        except Exception:
            findings += 1
            print(f"--- {target}:{seed}:{number}", flush=True)
            traceback.print_exc(file=sys.stdout, limit=-4)
            sys.stdout.flush()
        number += 1
    signal.setitimer(signal.ITIMER_PROF, 0)
    _LAYOUT.pack_into(shared, 0, number, findings, loaded)


def run_for(target: str, seed: int, seconds: float, cpu_s: float, memory: int) -> tuple[int, int]:
    """(cases, findings) of a target in so many seconds."""
    until, begin, findings = time.time() + seconds, 0, 0
    shared = mmap.mmap(-1, _LAYOUT.size)
    while time.time() < until:
        child = os.fork()
        if child == 0:
            try:
                _cases(target, seed, begin, until, cpu_s, memory, shared)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        number, own, loaded = _LAYOUT.unpack_from(shared)
        findings += own
        until += loaded
        begin = number
        if status != 0:
            ended = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "an error of its own"
            print(f"--- {target}:{seed}:{number}: ended by {ended} (limits: {cpu_s} s, {memory >> 20} MiB)", flush=True)
            findings += 1
            begin = number + 1
    return begin, findings


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 where there was a finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=list(TARGETS), action="append")
    parser.add_argument("--cpu-s", type=float, default=20.0, help="of one case")
    parser.add_argument("--memory-mib", type=int, default=1024, help="of one case, beyond what is loaded")
    parser.add_argument("--case", help="target:seed:number of a finding")
    given = parser.parse_args(arguments)
    if given.case:
        target, seed, number = given.case.split(":")
        run_case(target, int(seed), int(number))
        return 0
    targets = given.only or list(TARGETS)
    totals: Counter[str] = Counter()
    for target in targets:
        seconds = given.minutes * 60 / len(targets)
        cases, findings = run_for(target, given.seed, seconds, given.cpu_s, given.memory_mib << 20)
        print(f"{target}: {cases:,} cases, {cases / seconds:,.0f}/s, {findings} findings", flush=True)
        totals["findings"] += findings
    return 1 if totals["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())
