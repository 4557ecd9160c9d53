"""stats.json and the funnel: every page is counted once, and what does not add up is refused."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from quern.data_pipeline.report import stats as report
from quern.data_pipeline.report.funnel import funnel, print_funnel
from quern.data_pipeline.report.stats import committed
from quern.errors import QuernError


def edit_commit(made: Any, **changes: Any) -> None:
    path = made.path / "commits/pages/crawl/part-0.json"
    entry = json.loads(path.read_text())
    entry["counts"].update(changes)
    path.write_text(json.dumps(entry))


def test_stats_are_the_sums_of_all_rows(made: Any) -> None:
    stats = made.stats()
    kept = [row for row in made.rows if row["stage"] is None]
    assert (stats["partitions"], stats["pages"], stats["kept"]) == (4, len(made.rows), len(kept))
    assert stats["by_stage"] == Counter(row["stage"] for row in made.rows if row["stage"])
    assert stats["by_language"] == Counter(row["language"] for row in made.rows if row["language"])
    assert stats["text_chars"] == sum(len(row["text"]) for row in kept)
    assert stats["sources"]["wet"]["pages"] == 120
    assert stats["unique"] == len(kept) - len(pq.read_table(made.path / "duplicates/decisions.parquet"))
    assert stats["damage"]["count"] == len(stats["damage"]["first"]) == 4
    assert stats["timing"]["stage_seconds"] == {"extract": 2.0, "quality": 1.0}
    assert stats["tokens"]["documents"] == stats["unique"]


def test_stats_json_is_the_same_bytes_again_but_for_timing(made: Any) -> None:
    path = Path(report.write_stats(str(made.path), made.stats()))
    first = path.read_bytes()
    edit_commit(made, cpu_seconds=99.0, stage_seconds={"extract": 7})
    report.write_stats(str(made.path), made.stats())
    again = json.loads(path.read_bytes())
    assert path.read_bytes() != first
    assert again.pop("timing") != json.loads(first)["timing"]
    assert again == {key: value for key, value in json.loads(first).items() if key != "timing"}


def test_only_committed_partitions_count(made: Any) -> None:
    (made.path / "commits/pages/wet/part-1.json").unlink()
    (made.path / "duplicates/decisions.parquet").unlink()
    stats = report.build_stats(str(made.path), {}, None, [("crawl", "part-0")])
    assert (stats["partitions"], stats["pages"], stats["unique"]) == (1, 60, stats["kept"])


def test_funnel_rows_hang_together_and_follow_the_road(made: Any) -> None:
    stats = made.stats()
    rows = funnel(stats)
    assert [row.entered for row in rows] == [stats["pages"], *(row.left for row in rows[:-1])]
    assert all(row.entered == row.dropped + row.left for row in rows)
    assert rows[-1].left == stats["unique"]
    order = [row.stage for row in rows]
    assert order.index("url") < order.index("pre_skip") < order.index("extract") < order.index("language")
    quality = next(row for row in rows if row.stage == "quality")
    names = Counter(row["reason"] for row in made.rows if row["stage"] == "quality")
    assert dict(quality.reasons) == names
    language = next(row for row in rows if row.stage == "language")
    assert language.dropped == sum(row["reason"] == "language.not_wanted" for row in made.rows)


def test_a_stage_the_funnel_does_not_know_is_still_counted(made: Any) -> None:
    stats = made.stats()
    stats["by_stage"]["novel"] = 0
    assert "novel" in [row.stage for row in funnel(stats)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pages": 61}, r"crawl/part-0: 61 pages were read, but \d+ kept \+ \d+ dropped = 60"),
        ({"by_reason": {}}, r"crawl/part-0: stage \w+ dropped \d+ pages, its reasons add up to 0"),
        ({"pre_skip": 0}, r"crawl/part-0: 0 pages were skipped by the language guess"),
    ],
)
def test_counts_that_do_not_add_up_are_refused_by_name(made: Any, changes: dict[str, Any], message: str) -> None:
    edit_commit(made, **changes)
    with pytest.raises(QuernError, match=message):
        made.stats()


def test_duplicates_and_tokens_must_agree_with_the_pages(made: Any) -> None:
    made.tokens["wet"]["val"]["documents"] += 1
    with pytest.raises(QuernError, match=r"source wet: (\d+) documents are left after duplicates"):
        made.stats()
    made.tokens["wet"]["val"]["documents"] -= 1
    made.duplicates["documents"]["crawl"] += 1
    with pytest.raises(QuernError, match=r"source crawl: .* the search for duplicates saw"):
        made.stats()
    made.duplicates["documents"]["crawl"] -= 1
    made.duplicates["removed"]["crawl"]["near"] += 1
    with pytest.raises(QuernError, match=r"decisions\.parquet: holds \d+ decisions of kind near"):
        made.stats()


def test_a_partition_without_commit_and_a_commit_in_the_wrong_place_are_refused(made: Any) -> None:
    with pytest.raises(QuernError, match="no commit of crawl/part-9"):
        report.build_stats(str(made.path), {}, None, [("crawl", "part-9")])
    pages = made.path / "commits/pages"
    copy = pages / "backup/crawl/part-0.json"
    copy.parent.mkdir(parents=True)
    copy.write_bytes((pages / "crawl/part-0.json").read_bytes())
    found = [*committed(str(made.path), [("crawl", "part-0")])]
    assert [(source, name) for source, name, _ in found] == [("crawl", "part-0")]  # and not twice
    with pytest.raises(QuernError, match=r"backup/crawl/part-0\.json: this commit is of crawl/part-0"):
        made.stats()
    copy.unlink()
    (pages / "crawl/part-0.json").rename(pages / "crawl/part-7.json")
    with pytest.raises(QuernError, match="this commit is of crawl/part-0"):
        made.stats()


def test_printed_funnel_shows_every_stage_and_no_markup(made: Any) -> None:
    stats = made.stats()
    stats["by_reason"] = {f"{key}[red]" if "short_doc" in key else key: n for key, n in stats["by_reason"].items()}
    console = Console(file=io.StringIO(), width=160, record=True)
    print_funnel(stats, console)
    shown = console.export_text()
    assert "gopher.short_doc[red]" in shown
    (guess,) = (line for line in shown.splitlines() if line.startswith("language guess"))
    assert guess.rstrip().endswith(f"language.pre_skip {stats['pre_skip']}"), guess
    assert all(row.label in shown and f"{row.left:,}" in shown for row in funnel(stats))
    assert f"240 pages → {stats['unique']} documents" in shown
    assert "alarm: source wet lost 61 %" in shown
    assert "read around in the input: 4 damaged places" in shown
    assert "could not be read" not in shown


def test_dates_and_urls_that_could_not_be_read_are_counted_and_told(made: Any) -> None:
    edit_commit(made, unreadable_dates=3, unreadable_urls=1)
    stats = made.stats()
    assert (stats["unreadable_dates"], stats["sources"]["crawl"]["unreadable_dates"]) == (3, 3)
    console = Console(file=io.StringIO(), width=160, record=True)
    print_funnel(stats, console)
    shown = console.export_text()
    assert "note: source crawl: 3 dates could not be read, and fetched_at is null there" in shown
    assert "note: source crawl: 1 URL could not be read, and url is null there" in shown
    assert "source wet: 0" not in shown
