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
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern.data_pipeline import partition as partition_module
from quern.data_pipeline import run as pages
from quern.data_pipeline.config import PipelineConfig
from quern.data_pipeline.execution.engine import Death, Engine, InProcess, open_engine
from quern.data_pipeline.execution.isolation import InFlightMarker, Watchdog, marker_folder
from quern.data_pipeline.monitoring.progress import RunProgress
from quern.data_pipeline.partition import PartitionTask, process_partition
from quern.errors import QuernError
from support.processes import environment

WORDS = "the quick brown fox jumps over a lazy dog and that have with to of be while rivers run down into valleys"


def text(number: int) -> str:
    """A small page of its own words."""
    words = WORDS.split()
    lines = [
        " ".join(words[(number * 7 + line * 3 + i * (1 + line)) % len(words)] for i in range(12)) + f" {number} {line}."
        for line in range(9)
    ]
    return "\n".join(lines)


def write_source(folder: Path, num: int, special: dict[int, str]) -> str:
    path = folder / "in.jsonl"
    with path.open("w") as file:
        for number in range(num):
            body = text(number)
            if number in special:
                body += f"\nTRAP-{special[number]}-{folder}."
            file.write(json.dumps({"id": str(number), "text": body}) + "\n")
    return str(path)


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


@pytest.fixture(scope="module")
def pool() -> Iterator[Engine]:
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with open_engine(2) as engine:
        yield engine


def settings(folder: Path, source: str, **isolation: Any) -> PipelineConfig:
    return PipelineConfig.model_validate(
        {
            "run_dir": str(folder / "run"),
            "sources": [{"name": "s", "kind": "jsonl", "paths": source}],
            "language": {"keep": None, "threshold": 0, "pre_skip": False},
            "quality": {"order": []},
            "isolation": {"page_timeout_s": 1.5, **isolation},
        }
    )


def run(config: PipelineConfig, engine: Engine | None = None) -> tuple[pages.PagesResult, int]:
    """What came of it, and how many errors it told of."""
    with RunProgress(background=False) as progress:
        result = pages.run(config, pages.plan_sources(config), engine or InProcess(), progress)
        return result, progress.snapshot()["errors"]["num"]


def verdicts(folder: Path) -> dict[str, tuple[str | None, str | None]]:
    return {row["record_id"]: (row["stage"], row["reason"]) for row in verdict_table(folder).to_pylist()}


def verdict_table(folder: Path) -> pa.Table:
    (path,) = (folder / "run" / "verdicts").rglob("*.parquet")
    return pq.read_table(path)


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


def test_markers_of_a_run_on_a_store_are_no_other_user_s_business(tmp_path: Path) -> None:
    folders = {marker_folder("memory:///run/.work") for _ in range(2)}
    assert len(folders) == 2
    for folder in folders:
        assert os.path.dirname(folder) == tempfile.gettempdir(), "a folder between could be another user's"
        assert not os.path.exists(folder)
    assert os.path.dirname(marker_folder(str(tmp_path))) == str(tmp_path)


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_on_a_store_leaves_no_markers_on_the_machines_of_its_workers(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    config = settings(tmp_path, write_source(tmp_path, 3, {}))
    config = config.model_copy(update={"run_dir": f"memory:///markers-{fails}-{os.getpid()}/run"})
    seen: list[list[Path]] = []
    judge = partition_module._judge

    def looking(chain: Any, page: Any, quarantine: Any) -> Any:
        seen.append(list((tmp_path / "tmp").glob("quern-markers-*/s/*")))
        if fails:
            raise QuernError("a list is missing")
        return judge(chain, page, quarantine)

    monkeypatch.setattr(partition_module, "_judge", looking)
    with pytest.raises(QuernError, match="a list is missing") if fails else nullcontext():
        run(config)
    assert seen[0]
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("gone", ["markers", "markers/s"])
def test_a_marker_begins_while_another_takes_the_folders_of_its_last_away(
    gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two folders the outer may go before the inner is made, and both before the marker is."""
    markers = marker_folder(str(tmp_path))
    first, second = (f"{markers}/s/{name}" for name in "ab")
    InFlightMarker(first).close()
    real, times = os.mkdir if gone == "markers" else open, []

    def meanwhile(path: Any, *args: Any, **kwargs: Any) -> Any:
        if path == (f"{markers}/s" if gone == "markers" else second) and not times:
            times.append(path)
            InFlightMarker.remove(first)
            if gone == "markers":
                os.rmdir(markers)
        return real(path, *args, **kwargs)

    if gone == "markers":
        os.unlink(first)
        os.rmdir(f"{markers}/s")
        monkeypatch.setattr(os, "mkdir", meanwhile)
    else:
        monkeypatch.setattr("builtins.open", meanwhile)
    InFlightMarker(second).close()
    monkeypatch.undo()
    assert times
    assert os.listdir(f"{markers}/s") == ["b"]


@pytest.mark.parametrize(("seconds", "judged_again"), [(float("inf"), [12, 13]), (0.0, [13])])
def test_a_partition_goes_on_behind_its_last_finished_rows(
    seconds: float, judged_again: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after 13 of 20 pages with parts of 4: 12 are not judged again, and the files are those of one go; where
    rows are set down after every page none is, and the files are the same."""
    source = write_source(tmp_path, 20, {})
    monkeypatch.setattr(partition_module, "FLUSH_PAGES", 4)
    monkeypatch.setattr(partition_module, "FLUSH_SECONDS", float("inf"))

    def once(folder: Path) -> dict[str, str]:
        run(settings(folder, source))
        commit = json.loads(next((folder / "run" / "commits" / "pages").rglob("*.json")).read_text())
        counts = {k: v for k, v in commit["counts"].items() if k not in ("stage_seconds", "cpu_seconds")}
        return {"counts": counts, "outputs": commit["outputs"]}

    whole = once(tmp_path / "whole")
    (table,) = (tmp_path / "whole" / "run").rglob("verdicts/**/*.parquet")
    assert pq.read_metadata(table).num_row_groups == 5
    monkeypatch.setattr(partition_module, "FLUSH_SECONDS", seconds)

    class KilledError(BaseException):
        pass

    seen: Counter[str] = Counter()
    judge = partition_module._judge

    def dying(chain: Any, page: Any, quarantine: Any) -> Any:
        seen[page.record_id] += 1
        if page.record_id == "13" and seen["13"] == 1:
            raise KilledError
        return judge(chain, page, quarantine)

    monkeypatch.setattr(partition_module, "_judge", dying)
    with pytest.raises(KilledError):
        once(tmp_path / "killed")
    assert not list((tmp_path / "killed" / "run").rglob("verdicts/**/*.parquet")), "nothing half done is published"
    again = once(tmp_path / "killed")
    assert again == whole
    assert [number for number in range(20) if seen[str(number)] > 1] == judged_again


def test_the_marker_names_the_page_in_work_and_outlives_its_writer(tmp_path: Path) -> None:
    path = str(tmp_path / "m" / "marker")
    assert InFlightMarker.read(path) is None
    marker = InFlightMarker(path)
    assert InFlightMarker.read(path) is None, "no page was begun"
    marker.set(41)
    marker.set(42)
    last = InFlightMarker.read(path)
    assert last is not None
    assert last.ordinal == 42
    marker.set(-1)
    assert InFlightMarker.read(path) is None
    marker.close()
    Path(path).write_bytes(b"torn")
    assert InFlightMarker.read(path) is None


SLOW = """
import ctypes, sys, time
from pathlib import Path
from data_pipeline import test_isolation
from quern.data_pipeline import partition
from quern.data_pipeline.execution import isolation

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
config = test_isolation.settings(folder, str(folder / "in.jsonl"))
own = config.chain_of(config.sources[0])
partition._chain(partition.canonical_json(own))(partition.Page("s", "f", "f", 0, media="text", raw="Warm up."))
test_isolation.run(config)
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


def test_a_worker_that_dies_before_its_first_page_blames_no_page(tmp_path: Path) -> None:
    """Killed at page 5, and its successor before it had come to any page: page 5 has one strike, not two."""
    config = settings(tmp_path, write_source(tmp_path, 2, {}))
    (planned,) = pages.plan_sources(config)
    marker = InFlightMarker(str(tmp_path / "marker"))
    task = PartitionTask(
        run_dir=config.run_dir, scratch="", marker=str(tmp_path / "marker"), source=config.sources[0],
        partition=planned, chain=config.chain_of(config.sources[0]), config_hash="", page_timeout_s=60,
        worker_memory_mib=None,
    )  # fmt: skip
    marker.set(5)
    marker.close()
    with RunProgress(background=False) as progress:
        strikes = pages._Strikes(progress)
        assert strikes(0, (task,), Death()) == (task,)
        assert strikes(0, (task,), Death()) == (task,)
        marker = InFlightMarker(str(tmp_path / "marker"))
        marker.set(5)
        marker.close()
        ((blamed,),) = [strikes(0, (task,), Death())]
    assert blamed.quarantined == ((5, "quarantine.crash"),)


@pytest.mark.slow
def test_rows_of_a_config_that_came_and_went_are_not_mixed_with_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Config A left parts, B was killed while it wrote its first one, then A goes on."""
    monkeypatch.setattr(partition_module, "FLUSH_PAGES", 4)
    source = write_source(tmp_path, 10, {})
    plain = settings(tmp_path, source)
    masked = plain.model_copy(update={"pii": type(plain.pii)(action="measure")})

    judge = partition_module._judge

    def dying(chain: Any, page: Any, quarantine: Any) -> Any:
        if page.record_id == "9":
            raise KeyboardInterrupt
        return judge(chain, page, quarantine)

    def cut_off(path: str, head: Any, tables: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(partition_module, "_judge", dying)
        with pytest.raises(KeyboardInterrupt):
            run(plain)
    with monkeypatch.context() as patch:
        patch.setattr(partition_module, "write_part", cut_off)
        with pytest.raises(KeyboardInterrupt):
            run(masked)
    left = {path.parent.name for path in (tmp_path / "run" / ".work").rglob("part-*")}
    assert len(left) == 1, "the parts of A stand, B wrote beside them"
    run(plain)
    table = verdict_table(tmp_path)
    shutil.rmtree(tmp_path / "run")
    run(plain)
    assert table.num_rows == 10
    assert table.equals(verdict_table(tmp_path))
