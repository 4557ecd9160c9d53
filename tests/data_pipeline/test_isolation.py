"""A page that hangs, crashes or eats memory costs itself; a kill costs nothing."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quern.data_pipeline import partition as partition_module
from quern.data_pipeline import run as pages
from quern.data_pipeline.execution.engine import Engine
from quern.data_pipeline.execution.isolation import InFlightMarker, Watchdog
from quern.data_pipeline.partition import PartitionTask, process_partition
from quern.errors import QuernError
from support.data_pipeline.isolation_case import run, settings, text, verdict_table, verdicts, write_source
from support.processes import environment


def trapped(task: PartitionTask) -> dict[str, Any]:
    """process_partition with a parser that does what the page's text says, as C code would: holding the lock."""
    partition_module.FLUSH_PAGES = 4
    chain = partition_module._chain.__wrapped__(task.chain.model_dump_json())

    class Trapped:
        measures = chain.measures

        def __init__(self) -> None:
            self.seconds = chain.seconds

        def __call__(self, page: Any) -> Any:
            if "TRAP-hang" in page.raw:
                re.match("(a+)+$", "a" * 64 + "b")
            if "TRAP-crash" in page.raw:
                os.kill(os.getpid(), signal.SIGSEGV)
            if "TRAP-error" in page.raw:
                raise RuntimeError("parser")
            if "TRAP-memory" in page.raw:
                return bytearray(1 << 40)
            if "TRAP-once" in page.raw:
                mark = Path(page.raw.split("TRAP-once-")[1].split(".")[0]) / "once"
                if not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            return chain(page)

    saved = partition_module._chain
    partition_module._chain = lambda *config: Trapped()  # type: ignore[assignment]
    try:
        return process_partition(task)
    finally:
        partition_module._chain = saved


@pytest.mark.slow
def test_bad_pages_cost_themselves_and_a_kill_costs_nothing(
    pool: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    special = {2: "crash", 5: "error", 7: "once", 9: "hang", 13: "memory"}
    config = settings(tmp_path, write_source(tmp_path, 20, special))
    monkeypatch.setattr(pages, "process_partition", trapped)
    result, _ = run(config, pool)
    found = verdicts(tmp_path)
    assert len(found) == 20
    assert (tmp_path / "once").exists(), "the kill happened"
    dropped = {number: found.pop(str(number)) for number in (2, 5, 9, 13)}
    assert dropped == {
        2: ("quarantine", "quarantine.crash"),
        5: ("quarantine", "quarantine.runtimeerror"),
        9: ("quarantine", "quarantine.timeout"),
        13: ("quarantine", "quarantine.memoryerror"),
    }
    assert set(found.values()) == {(None, None)}, "every other page, the once killed one too, is kept"
    commit = json.loads(next((tmp_path / "run" / "commits" / "pages").rglob("*.json")).read_text())
    assert commit["counts"]["pages"] == 20
    assert commit["counts"]["kept"] == 16
    assert commit["counts"]["by_stage"] == {"quarantine": 4}
    assert result.duplicates["documents"] == {"s": 16}


def slow_to_read(task: PartitionTask) -> dict[str, Any]:
    """process_partition with a reader that needs twice a page's time for one page, whoever reads it."""
    read = partition_module.read

    def slow(*args: Any) -> Iterator[Any]:
        for number, page in enumerate(read(*args)):
            until = time.process_time() + 2 * task.page_timeout_s
            while number == 3 and time.process_time() < until:
                pass
            yield page

    partition_module.read = slow
    try:
        return process_partition(task)
    finally:
        partition_module.read = read


@pytest.mark.slow
def test_a_page_that_is_slow_to_read_costs_itself_and_not_the_run(
    pool: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "process_partition", slow_to_read)
    _, num_errors = run(settings(tmp_path, write_source(tmp_path, 6, {}), page_timeout_s=1.0), pool)
    assert num_errors == 1
    found = verdicts(tmp_path)
    assert found.pop("3") == ("quarantine", "quarantine.timeout")
    assert len(found) == 5
    assert set(found.values()) == {(None, None)}


def private_mib(_: int) -> int:
    """What counts against a worker's limit; its threads' stacks are much of it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:")]
    return int(line.split()[1]) >> 10


@pytest.mark.slow
def test_a_page_that_takes_too_much_memory_to_read_costs_itself(pool: Engine, tmp_path: Path) -> None:
    """160 MiB that become four times as much, since one character of them has no place in a smaller array."""
    lines = [json.dumps({"id": str(number), "text": text(number)}).encode() for number in range(6)]
    lines[3] = b'{"id": "3", "text": "' + "\U0001f600".encode() + b"a" * (160 << 20) + b'"}'
    path = tmp_path / "in.jsonl.gz"
    path.write_bytes(b"".join(gzip.compress(line + b"\n", 1) for line in lines))
    limit = 480 + max(mib for _, mib in pool.map(private_mib, [(0,), (1,)], label="memory"))
    config = settings(tmp_path, str(path), worker_memory_mib=limit, page_timeout_s=60.0)
    (source,) = config.sources
    config = config.model_copy(update={"sources": (source.model_copy(update={"max_bytes": 200 << 20}),)})
    _, num_errors = run(config, pool)
    assert num_errors == 0
    table = verdict_table(tmp_path)
    assert table["reason"].to_pylist() == [None, None, None, "quarantine.memoryerror", None, None]
    assert table["stage"].to_pylist() == [None, None, None, "quarantine", None, None]


@pytest.mark.parametrize("times", [1, 2])
def test_memory_that_is_short_between_pages_is_given_back_once(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(tmp_path, write_source(tmp_path, 10, {}))
    monkeypatch.setattr(partition_module, "FLUSH_PAGES", 4)
    read, left = partition_module.read, [times]

    def short(*args: Any) -> Iterator[Any]:
        for number, page in enumerate(read(*args)):
            if number == 6 and left[0]:
                left[0] -= 1
                raise MemoryError
            yield page

    monkeypatch.setattr(partition_module, "read", short)
    if times == 1:
        run(config)
        assert verdicts(tmp_path) == dict.fromkeys(map(str, range(10)), (None, None))
    else:
        with pytest.raises(QuernError, match=r"s/in\.jsonl.*: out of memory twice .* expected more than 6144 MiB"):
            run(config)


SLOW = """
import ctypes, sys, time
from pathlib import Path
from quern.data_pipeline import partition
from quern.data_pipeline.execution import isolation
from support.data_pipeline.isolation_case import run, settings

folder, what = Path(sys.argv[1]), sys.argv[2]
partition.FLUSH_PAGES = 6
isolation.WALL_FACTOR = 20 if what == "burn" else 2  # on a busy machine too it burns before the wall clock rings
read, set_down, judge = partition.read, partition._set_down, partition._judge

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def slow_read(*args):
    for number, page in enumerate(read(*args)):
        burn(0.3)
        if number == 12:
            time.sleep(4)  # a store that lets wait
        yield page

def slow_set_down(*args):
    burn(2)
    set_down(*args)

def other_judge(chain, page, quarantine):
    if page.record_id == "13" and what == "die":
        raise KeyboardInterrupt
    if page.record_id == "13" and what == "others":
        time.sleep(2)  # another program has the machine
    if page.record_id == "13" and what == "hang":
        ctypes.PyDLL(None).sleep(1000)
    if page.record_id == "13" and what == "burn":
        burn(1000)
    return judge(chain, page, quarantine)

if what == "others":
    partition.read, partition._set_down = slow_read, slow_set_down
partition._judge = other_judge
config = settings(folder, str(folder / "in.jsonl"))
own = config.chain_of(config.sources[0])
partition._chain(partition.canonical_json(own))(partition.Page("s", "f", "f", 0, media="text", raw="Warm up."))
run(config)
"""


@pytest.mark.long
def test_the_clock_of_a_page_counts_its_own_work_and_nothing_else(tmp_path: Path) -> None:
    """The limit is 1.5 CPU seconds. Twelve pages are read again after a kill, at 0.3 CPU seconds each, then the store
    lets wait longer than the wall clock's 3; a flush takes 2 CPU seconds; a page sleeps for 2; one burns, one hangs.
    """
    write_source(tmp_path, 16, {})

    def program(what: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", SLOW, str(tmp_path), what]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environment())

    assert "KeyboardInterrupt" in program("die").stderr
    assert len(list((tmp_path / "run" / ".work").rglob("part-*"))) == 2
    done = program("others")
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(verdicts(tmp_path).values()) == {(None, None)}
    shutil.rmtree(tmp_path / "run")
    for what, number, place in (("burn", signal.SIGPROF, "in burn"), ("hang", signal.SIGALRM, "in other_judge")):
        assert program(what).returncode == -number
        (stack,) = (tmp_path / "run" / ".work").rglob("*.stack")
        last = InFlightMarker.take(str(stack).removesuffix(".stack"))
        assert last is not None
        assert last.ordinal == 13
        assert last.place.endswith(place), last.stack
        assert not stack.exists(), "what was taken is not said again"


def test_clocks_that_others_set_are_theirs_again(tmp_path: Path) -> None:
    rung: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGPROF, signal.SIGALRM)}
    timers = {timer: signal.setitimer(timer, 0) for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL)}
    try:
        signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
        signal.setitimer(signal.ITIMER_REAL, 500)
        with Watchdog(100, str(tmp_path / "stack")) as watchdog:
            watchdog.page()
            assert signal.getitimer(signal.ITIMER_PROF)[0] > 90
            assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
            watchdog.judge()
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 990
            watchdog.rest()
            assert signal.getitimer(signal.ITIMER_PROF)[0] == 0 == signal.getitimer(signal.ITIMER_REAL)[0]
            watchdog.page()
        assert signal.getitimer(signal.ITIMER_PROF)[0] == 0
        assert 400 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500
        os.kill(os.getpid(), signal.SIGALRM)
        assert rung == [signal.SIGALRM]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for timer, setting in timers.items():
            signal.setitimer(timer, *setting)
