"""The tables of ``benchmarks/chain.py`` against figures worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from chain_report import interval, report

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def row(side: str, copies: int, number: int, cpu_s: float, **more: Any) -> dict[str, Any]:
    memory = {"peak_pss_mib": 500.0, "largest_rss_mib": 300.0}
    return {"side": side, "copies": copies, "round": number, "cpu_s": cpu_s, "wall_s": cpu_s / 2, **memory, **more}


def quern(side: str, copies: int, number: int, cpu_s: float) -> dict[str, Any]:
    timing = {"cpu_seconds": 0.8 * cpu_s, "stage_seconds": {"extract": 0.5 * cpu_s}}
    return row(side, copies, number, cpu_s, pages=100 * copies, timing=timing)


def test_cold_marginal_start_up_and_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [quern("quern", 1, n, 2.0 + n) for n in range(3)] + [quern("quern", 3, n, 5.0 + n) for n in range(3)]
    rows += [row("stock", 1, n, 9.0) for n in range(3)] + [row("stock", 3, n, 21.0) for n in range(3)]
    report(rows)
    out = capsys.readouterr().out
    # median of one copy 3 s, of three 6 s, over 100 pages: 30 ms cold, (6 - 3) / 2 / 100 = 15 ms more, 1.5 s fixed
    assert [*next(line for line in out.splitlines() if line.startswith("quern ")).split()][1:4] == [
        "30.00",
        "15.00",
        "1.5",
    ]
    # stock 90 and 60 ms
    assert "stock / quern: 3.00 cold (2.25 to 4.50), 4.00 marginal (" in out
    assert "extract" in out
    assert "10.000" in out  # 0.5 of 2 s over 100 pages, of the first run


def test_a_failed_run_and_a_side_without_a_peer_leave_the_rest_readable(capsys: pytest.CaptureFixture[str]) -> None:
    bound = {"stages": {"extract": 4.0, "tokens": 1.0}, "references": {"lxml's parse": 0.5}}
    report([
        quern("quern", 1, 0, 2.0),
        {"side": "stock", "copies": 1, "round": 0, "failed": "ended after 9 s"},
        {"side": "bound", "copies": 1, "round": 0, "cpu_s": 1.0, "bound": bound},
    ])  # fmt: skip
    out = capsys.readouterr().out
    assert "failed: stock, 1 copies, round 0: ended after 9 s" in out
    assert "bound 5.00 ms a page; quern is at 4.00x of it cold" in out
    assert "x marginal" not in out  # one number of copies


def test_interval_is_a_point_without_spread_and_spans_what_was_seen_with_it() -> None:
    assert interval([3.0] * 4, lambda drawn: sum(drawn) / len(drawn)) == (3.0, 3.0)
    low, high = interval([1.0, 2.0, 9.0], max)
    assert (low, high) == (1.0, 9.0)


@pytest.mark.slow
def test_a_run_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    sleeps = "import time; time.sleep(600)"
    program = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {sleeps!r}], start_new_session=True)\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\nchild.wait()"
    )
    code = (
        "import json, os, sys\nfrom process_tree import measure\n"
        f"try: measure([sys.executable, '-c', {program!r}], timeout_s=2)\n"
        "except TimeoutError as error:\n"
        f"    print(json.dumps([str(error), os.path.exists('/proc/' + open({str(pid)!r}).read())]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, check=True, timeout=60)
    assert json.loads(done.stdout) == ["ended after 2 s", False]
