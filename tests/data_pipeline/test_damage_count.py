"""Damage at the edge of two ranges is told by both, and counts once wherever it is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quern.data_pipeline.execution.commits import publish_commit
from quern.data_pipeline.monitoring.damage import Damage
from quern.data_pipeline.monitoring.progress import RunProgress
from quern.data_pipeline.monitoring.run_status import read_status
from quern.storage import write_json

EDGE = {"file": "a.warc.gz", "offset": 404, "why": "gzip member's header is damaged"}
OTHER = {**EDGE, "offset": 900}
FIRST: dict[str, Any] = {"pages": 1, "range": {}, "damage": [EDGE]}
SECOND: dict[str, Any] = {"pages": 1, "range": {}, "damage": [EDGE, OTHER], "damage_left_out": 2}
WHOLE: dict[str, Any] = {"pages": 1, "damage": [EDGE]}


def test_only_what_no_other_range_of_the_source_has_told_is_new() -> None:
    damage = Damage()
    found = [damage.add(FIRST, "cc"), damage.add(SECOND, "cc"), damage.add(FIRST, "books"), damage.add(WHOLE, "cc")]
    assert found == [[EDGE], [OTHER], [EDGE], [EDGE]]
    assert damage.num == 6


def test_what_is_taken_back_is_as_if_it_had_never_been_told() -> None:
    damage = Damage()
    for counts in (FIRST, SECOND, WHOLE):
        damage.add(counts, "cc")
    damage.take_back(SECOND, "cc")
    assert damage.num == 2
    damage.take_back(FIRST, "cc")
    assert damage.add(FIRST, "cc") == [EDGE]
    damage.take_back(WHOLE, "cc")
    damage.take_back(FIRST, "cc")
    assert damage.num == 0


def test_the_live_view_and_the_state_of_a_run_count_it_once(tmp_path: Path) -> None:
    progress = RunProgress(background=False)
    progress.start_phase("pages", 3)
    write_json(str(tmp_path / "run.json"), {"status": "running"})
    for number, (source, counts) in enumerate((("cc", FIRST), ("cc", SECOND), ("books", FIRST))):
        progress.partition_done(counts, 0, source=source)
        publish_commit(str(tmp_path), "pages", source, str(number), inputs={}, config="", outputs={}, counts=counts)
    assert progress.snapshot()["phase"]["damage"] == read_status(str(tmp_path))["damage"] == 5
    progress.partition_put_right(FIRST, SECOND, source="cc")
    assert progress.snapshot()["phase"]["damage"] == 2
    progress.end_phase()
