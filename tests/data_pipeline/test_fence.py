"""A worker that should be gone writes nothing over its successor's work, and takes nothing from it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quern import storage
from quern.data_pipeline import partition as partition_module
from quern.data_pipeline import run as pages
from quern.data_pipeline.config import PipelineConfig
from quern.data_pipeline.execution.engine import Death, InProcess
from quern.data_pipeline.execution.fence import Fence, SupersededError
from quern.data_pipeline.execution.isolation import InFlightMarker
from quern.data_pipeline.execution.parts import write_part
from quern.data_pipeline.monitoring.progress import RunProgress
from quern.data_pipeline.partition import PartitionTask, process_partition
from quern.errors import QuernError

pytestmark = pytest.mark.slow

WORDS = ["river", "lantern", "harbour", "orchard", "mirror", "saddle", "copper", "window", "garden", "thunder"]


def settings(folder: Path, num: int = 12) -> PipelineConfig:
    source = folder / "in.jsonl"
    if not source.exists():
        texts = [" ".join(f"The {WORDS[(n * 7 + k * 3) % 10]} number {n} of line {k} stands." for k in range(9))
                 for n in range(num)]  # fmt: skip
        source.write_text("".join(json.dumps({"id": str(n), "text": text}) + "\n" for n, text in enumerate(texts)))
    return PipelineConfig.model_validate(
        {
            "run_dir": str(folder / "run"),
            "sources": [{"name": "s", "kind": "jsonl", "paths": str(source)}],
            "language": {"keep": None, "threshold": 0, "pre_skip": False},
            "quality": {"order": []},
        }
    )


def task_of(config: PipelineConfig, folder: Path) -> PartitionTask:
    (planned,) = pages.plan_sources(config)
    return PartitionTask(
        run_dir=config.run_dir, scratch=str(folder / "scratch"), marker=str(folder / "marker"),
        source=config.sources[0], partition=planned, config_hash="c", page_timeout_s=60,
        chain=config.chain_of(config.sources[0]),
        worker_memory_mib=None,
    )  # fmt: skip


def test_of_two_attempts_the_one_with_more_pages_goes_on(tmp_path: Path) -> None:
    """Not the one with more parts: these are set down by the clock too."""
    task = task_of(settings(tmp_path), tmp_path)
    made_from = partition_module._made_from(task)
    for attempt, pages_of in (("a", [1, 2, 3]), ("b", [4, 9]), ("c", [5])):
        for number, num in enumerate(pages_of):
            parts = [f"{attempt}/part-{n:05d}" for n in range(number + 1)]
            progress = vars(partition_module._Progress(pages=num, parts=parts))
            write_part(f"{task.scratch}/{parts[-1]}", {**made_from, "progress": progress}, {})
    found = partition_module._resume(task)
    assert (found.pages, found.parts) == (9, ["b/part-00000", "b/part-00001"])
    Path(task.scratch, "b", "part-00000").unlink()
    assert partition_module._resume(task).pages == 5


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*") if path.is_file()}  # fmt: skip


def test_no_file_gets_its_name_when_the_guard_refuses(tmp_path: Path) -> None:
    fence = Fence.claim(str(tmp_path / "fence.json"))
    with storage.guarded(fence.check):
        storage.publish_bytes(str(tmp_path / "mine"), b"1")
        Fence.claim(str(tmp_path / "fence.json"))
        with pytest.raises(SupersededError):
            storage.publish_bytes(str(tmp_path / "late"), b"1")
        with pytest.raises(SupersededError):
            storage.publish_bytes("memory:///fence-test/late", b"1")
    storage.publish_bytes(str(tmp_path / "free"), b"1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fence.json", "free", "mine"]
    assert not storage.exists("memory:///fence-test/late")


def test_a_fence_that_is_not_seen_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(QuernError, match="every machine of the cluster must see the run's folder"):
        Fence(str(tmp_path / "none.json"), "me").check()


@pytest.mark.parametrize("moment", ["set down", "tables", "commit"])
def test_the_earlier_of_two_attempts_is_shut_out_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The second runs to its end in the midst of the first, which then goes on: not one byte changes any more."""
    monkeypatch.setattr(partition_module, "FLUSH_PAGES", 4)
    config = settings(tmp_path)
    task = task_of(config, tmp_path)
    name = {"set down": "_set_down", "tables": "_publish", "commit": "publish_commit"}[moment]
    real = getattr(partition_module, name)
    seen: list[dict[str, str]] = []

    def overtaken(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(partition_module, name, real)
        with monkeypatch.context() as another_process:
            another_process.setattr(storage, "_guards", [])
            process_partition(task)
        seen.append(files(tmp_path))
        return real(*args, **options)

    monkeypatch.setattr(partition_module, name, overtaken)
    with pytest.raises(SupersededError):
        process_partition(task)
    assert files(tmp_path) == seen[0]


def test_a_later_attempt_goes_on_from_the_parts_of_an_earlier_one_and_takes_none_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_module, "FLUSH_PAGES", 3)
    monkeypatch.setattr(partition_module, "FLUSH_SECONDS", float("inf"))
    config = settings(tmp_path)
    task = task_of(config, tmp_path)
    judge, judged, stop = partition_module._judge, [], {""}

    def dying(chain: Any, page: Any, quarantine: Any) -> Any:
        judged.append(page.record_id)
        if page.record_id in stop:
            raise KeyboardInterrupt
        return judge(chain, page, quarantine)

    monkeypatch.setattr(partition_module, "_judge", dying)
    for page in ("7", "10"):
        stop.add(page)
        with pytest.raises(KeyboardInterrupt):
            process_partition(task)
        stop.clear()
    before = files(tmp_path / "scratch")
    entry = process_partition(task)
    assert judged == [*map(str, range(8)), *map(str, range(6, 11)), *map(str, range(9, 12))]
    after = files(tmp_path / "scratch")
    assert {name: after[name] for name in before if name != "attempt.json"} == {
        name: digest for name, digest in before.items() if name != "attempt.json"
    }
    storage.remove_tree(config.run_dir)
    storage.remove_tree(task.scratch)
    assert process_partition(task)["outputs"] == entry["outputs"], "the same bytes as in one go"


def test_what_another_attempt_has_committed_is_not_done_again(tmp_path: Path) -> None:
    task = task_of(settings(tmp_path), tmp_path)
    entry = process_partition(task)
    storage.remove_tree(task.scratch)
    before = files(tmp_path)
    assert process_partition(task) == entry
    assert files(tmp_path) == before, "not even a claim"


def test_what_is_committed_while_a_successor_claims_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tables would change below a commit that stands: this page's time is up in the second attempt only."""
    task = task_of(settings(tmp_path), tmp_path)
    late = replace(task, quarantined=((3, "quarantine.timeout"),))
    claim = Fence.claim
    committed: list[dict[str, Any]] = []

    def overtaken(path: str) -> Fence:
        monkeypatch.setattr(Fence, "claim", claim)
        committed.append(process_partition(task))
        return claim(path)

    monkeypatch.setattr(Fence, "claim", overtaken)
    entry = process_partition(late)
    assert entry == committed[0]
    for name, digest in committed[0]["outputs"].items():
        assert storage.sha256(storage.join(task.run_dir, name)) == digest


def test_parts_whose_removal_was_cut_off_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver died while it swept up behind a commit that was withdrawn later."""
    monkeypatch.setattr(partition_module, "FLUSH_PAGES", 3)
    monkeypatch.setattr(partition_module, "FLUSH_SECONDS", float("inf"))
    task = task_of(settings(tmp_path), tmp_path)
    entry = process_partition(task)
    first, *others = sorted((tmp_path / "scratch").rglob("part-*"))
    assert others
    first.unlink()
    storage.remove_tree(task.run_dir)
    assert process_partition(task)["outputs"] == entry["outputs"]


def test_a_lost_machine_is_no_page_s_fault(tmp_path: Path) -> None:
    task = task_of(settings(tmp_path), tmp_path)
    with RunProgress(background=False) as progress:
        strikes = pages._Strikes(progress)
        for _ in range(9):
            marker = InFlightMarker(task.marker)
            marker.set(5)
            marker.close()
            assert strikes(0, (task,), Death(lost_machine=True)) == (task,)
        assert InFlightMarker.read(task.marker) is None
        assert "its machine was lost" in progress.snapshot()["errors"]["last"][-1]


def test_where_markers_are_the_workers_own_it_is_their_machine_that_is_asked(tmp_path: Path) -> None:
    task = task_of(settings(tmp_path), tmp_path)
    asked = []

    def call_there(function: Any, args: Any) -> Any:
        asked.append(args)
        last = function(*args)
        return last

    with RunProgress(background=False) as progress:
        strikes = pages._Strikes(progress, markers_are_shared=False)
        marker = InFlightMarker(task.marker)
        marker.set(5)
        marker.close()
        (same,) = strikes(0, (task,), Death(call_there=call_there))
        assert same == task
        marker = InFlightMarker(task.marker)
        marker.set(7)
        marker.close()
        Path(InFlightMarker.stack_of(task.marker)).write_text('  File "there.py", line 3 in parse')
        (hung,) = strikes(0, (task,), Death(call_there=call_there))
    assert hung.quarantined == ((7, "quarantine.timeout"),)
    assert asked == [(task.marker,)] * 2


def test_a_finished_partition_leaves_no_marker_and_the_driver_no_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_module, "FLUSH_PAGES", 4)
    config, written = settings(tmp_path), []
    write_part = partition_module.write_part

    def watched(path: str, *given: Any) -> None:
        written.append(path)
        write_part(path, *given)

    monkeypatch.setattr(partition_module, "write_part", watched)
    with RunProgress(background=False) as progress:
        pages.run(config, pages.plan_sources(config), InProcess(), progress)
    assert len(written) == 3
    assert not any(map(storage.exists, written))
    left = [path for path in (tmp_path / "run" / ".work").rglob("*") if path.is_file()]
    assert left == [], "no part, no claim, no marker"
