"""A page that hangs, crashes or eats memory costs itself; a kill costs nothing."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from quern.data_pipeline import partition as partition_module
from quern.data_pipeline import run as pages
from quern.data_pipeline.config import PipelineConfig
from quern.data_pipeline.engine import Engine, InProcess, open_engine
from quern.data_pipeline.isolation import Marker
from quern.data_pipeline.partition import PartitionTask, process_partition
from quern.data_pipeline.progress import Progress

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
    plain = partition_module._chain.__wrapped__ if hasattr(partition_module._chain, "__wrapped__") else None
    assert plain is not None
    chain = plain(task.chain.model_dump_json())

    class Trapped:
        measures = chain.measures

        def __init__(self) -> None:
            self.seconds = chain.seconds

        def __call__(self, page: Any) -> Any:
            if "TRAP-hang" in page.raw:
                ctypes.PyDLL(None).sleep(1000)
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
    partition_module._chain = lambda config: Trapped()  # type: ignore[assignment]
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


def settings(folder: Path, source: str) -> PipelineConfig:
    return PipelineConfig.model_validate(
        {
            "run_dir": str(folder / "run"),
            "sources": [{"name": "s", "kind": "jsonl", "paths": source}],
            "language": {"keep": None, "threshold": 0, "pre_skip": False},
            "quality": {"order": []},
            "isolation": {
                "page_timeout_s": 10
            },  # a crash writes its stack down first, which takes seconds on a busy machine,
        }
    )


def verdicts(folder: Path) -> dict[str, tuple[str | None, str | None]]:
    table = pq.read_table(next((folder / "run" / "verdicts").rglob("*.parquet")))
    return {row["record_id"]: (row["stage"], row["reason"]) for row in table.to_pylist()}


@pytest.mark.slow
def test_bad_pages_cost_themselves_and_a_kill_costs_nothing(
    pool: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    special = {2: "crash", 5: "error", 7: "once", 9: "hang", 13: "memory"}
    config = settings(tmp_path, write_source(tmp_path, 20, special))
    monkeypatch.setattr(pages, "process_partition", trapped)
    with Progress(background=False) as progress:
        result = pages.run(config, pages.plan_sources(config), pool, progress)
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


def test_a_partition_goes_on_behind_its_last_finished_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after 13 of 20 pages with parts of 4: 12 are not judged again, and the files are those of one go."""
    source = write_source(tmp_path, 20, {})
    monkeypatch.setattr(partition_module, "FLUSH_PAGES", 4)

    def once(folder: Path) -> dict[str, str]:
        config = settings(folder, source)
        with Progress(background=False) as progress:
            pages.run(config, pages.plan_sources(config), InProcess(), progress)
        commit = json.loads(next((folder / "run" / "commits" / "pages").rglob("*.json")).read_text())
        counts = {k: v for k, v in commit["counts"].items() if k not in ("stage_seconds", "cpu_seconds")}
        return {"counts": counts, "outputs": commit["outputs"]}

    whole = once(tmp_path / "whole")

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
    assert [number for number in range(20) if seen[str(number)] > 1] == [12, 13]


def test_the_marker_names_the_page_in_work_and_outlives_its_writer(tmp_path: Path) -> None:
    path = str(tmp_path / "m" / "marker")
    assert Marker.read(path) is None
    marker = Marker(path)
    assert Marker.read(path) is None, "no page was begun"
    marker.set(41)
    marker.set(42)
    last = Marker.read(path)
    assert last is not None
    assert last.ordinal == 42
    marker.set(-1)
    assert Marker.read(path) is None
    marker.close()
    Path(path).write_bytes(b"torn")
    assert Marker.read(path) is None


SLOW = """
import sys, time
from pathlib import Path
from quern.data_pipeline import partition, run as pages
from quern.data_pipeline.config import PipelineConfig
from quern.data_pipeline.engine import InProcess
from quern.data_pipeline.progress import Progress

folder, what = Path(sys.argv[1]), sys.argv[2]
partition.FLUSH_PAGES = 6
read, set_down, judge = partition.read, partition._set_down, partition._judge

def slow_read(*args):
    for page in read(*args):
        time.sleep(0.4)
        yield page

def slow_set_down(*args):
    time.sleep(3)
    set_down(*args)

def dying(chain, page, quarantine):
    if page.record_id == "13":
        raise KeyboardInterrupt
    return judge(chain, page, quarantine)

if what == "read":
    partition.read = slow_read
if what == "flush":
    partition._set_down = slow_set_down
if what == "die":
    partition._judge = dying
settings = {
    "run_dir": str(folder / "run"),
    "sources": [{"name": "s", "kind": "jsonl", "paths": str(folder / "in.jsonl")}],
    "language": {"keep": None, "threshold": 0, "pre_skip": False},
    "quality": {"order": []},
    "isolation": {"page_timeout_s": 2.5},
}
config = PipelineConfig.model_validate(settings)
with Progress(background=False) as progress:
    pages.run(config, pages.plan_sources(config), InProcess(), progress)
"""


@pytest.mark.slow
def test_the_clock_of_a_page_counts_neither_pages_done_before_nor_flushes(tmp_path: Path) -> None:
    """Twelve pages are read again after a kill, at 0.4 s each; a flush takes 3 s; the limit for one page is 2.5 s."""
    write_source(tmp_path, 16, {})

    def run(what: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", SLOW, str(tmp_path), what]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)

    assert "KeyboardInterrupt" in run("die").stderr
    assert len(list((tmp_path / "run" / ".work").rglob("part-*"))) == 2
    done = run("read")
    assert done.returncode == 0, done.stderr[-2000:]
    shutil.rmtree(tmp_path / "run")
    done = run("flush")
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(verdicts(tmp_path).values()) == {(None, None)}


def test_a_worker_that_dies_before_its_first_page_blames_no_page(tmp_path: Path) -> None:
    """Killed at page 5, and its successor before it had come to any page: page 5 has one strike, not two."""
    config = settings(tmp_path, write_source(tmp_path, 2, {}))
    (planned,) = pages.plan_sources(config)
    marker = Marker(str(tmp_path / "marker"))
    task = PartitionTask(
        run_dir=config.run_dir, scratch="", marker=str(tmp_path / "marker"), source=config.sources[0],
        partition=planned, chain=config.chain, config_hash="", page_timeout_s=60, worker_memory_mib=None,
    )  # fmt: skip
    marker.set(5)
    marker.close()
    with Progress(background=False) as progress:
        strikes = pages._Strikes(60, progress)
        assert strikes(0, (task,)) == (task,)
        assert strikes(0, (task,)) == (task,)
        marker = Marker(str(tmp_path / "marker"))
        marker.set(5)
        marker.close()
        ((blamed,),) = [strikes(0, (task,))]
    assert blamed.quarantined == ((5, "quarantine.crash"),)


def test_rows_of_a_config_that_came_and_went_are_not_mixed_with_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Config A left parts, B was killed while it wrote its first one, then A goes on."""
    monkeypatch.setattr(partition_module, "FLUSH_PAGES", 4)
    source = write_source(tmp_path, 10, {})
    plain = settings(tmp_path, source)
    masked = plain.model_copy(update={"pii": type(plain.pii)(action="measure")})

    def run(config: PipelineConfig) -> None:
        with Progress(background=False) as progress:
            pages.run(config, pages.plan_sources(config), InProcess(), progress)

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
    left = [path.name for path in (tmp_path / "run" / ".work").rglob("part-*")]
    assert left == [], "the parts of A ended where B began to write over them"
    run(plain)
    assert len(verdicts(tmp_path)) == 10
