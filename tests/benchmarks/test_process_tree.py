"""The CPU of a command is that of everything it starts, whoever waits for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BURN_S = 0.8
BURN = f"import time\nwhile time.process_time() < {BURN_S}: pass"
STARTS = f"import signal, subprocess, sys\nchild = [sys.executable, '-IS', '-c', {BURN!r}]\n"


def cpu_of(program: str) -> float:
    """What ``measure`` says of a Python program; in a process of its own, since it waits for every child it has."""
    measured = f"measure([sys.executable, '-IS', '-c', {program!r}]).cpu_s"
    code = f"import sys; from process_tree import measure; print({measured})"
    return float(subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "program",
    [
        "subprocess.run(child)",
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN); subprocess.Popen(child).wait()",  # as Ray's raylet
        "subprocess.Popen(child)",
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN); subprocess.Popen(child)",
    ],
    ids=["waited for", "times discarded", "orphan", "orphan of one who would discard"],
)
def test_cpu_of_a_child_is_counted_once(program: str) -> None:
    lost_s = 0.4  # of times that are discarded: what was burnt since the last look at them
    assert BURN_S - lost_s < cpu_of(STARTS + program) < 1.6 * BURN_S
