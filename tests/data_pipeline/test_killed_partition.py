"""What a dead worker leaves of a partition: the marker of its page, and the rows that it had set down."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from quern.data_pipeline import partition as partition_module
from quern.data_pipeline import run as pages
from quern.data_pipeline.execution.engine import Death
from quern.data_pipeline.execution.isolation import InFlightMarker, marker_folder
from quern.data_pipeline.monitoring.progress import RunProgress
from quern.data_pipeline.partition import PartitionTask
from quern.errors import QuernError
from support.data_pipeline.isolation_case import run, settings, verdict_table, write_source


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
