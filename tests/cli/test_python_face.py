"""``quern.Lineage``: what Python code is told is what the commands print, and what was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner

import quern
from quern.cli.lineage import app
from support.lineage import runs
from support.train import run_case as CASE

LENGTH = 32
ARGUMENTS: dict[str, Any] = {"documents": 120, "files": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data run, and a training run of another trainer: 6 steps, of which it repeated the last two."""
    folder = tmp_path_factory.mktemp("face")
    runs.write_run(folder / "data", **ARGUMENTS)
    paths = [str(folder / "data" / "tokens" / name) for name in ("web", "text")]
    for start, count in ((0, 6), (4, 2)):
        with quern.batches(CASE.settings(folder / "train", paths, steps=8), start=start) as batches:
            for _ in range(count):
                batches.complete(next(batches).step + 1)
    return folder


@pytest.fixture(scope="module")
def data(folder: Path) -> quern.Lineage:
    return quern.Lineage(folder / "data")


@pytest.fixture(scope="module")
def training(folder: Path) -> quern.Lineage:
    return quern.Lineage(str(folder / "train"))


@pytest.fixture
def printed(json_of: Callable[..., Any]) -> Callable[..., Any]:
    """What a command prints with ``--json``."""
    return partial(json_of, lambda *words: CliRunner().invoke(app, [*map(str, words)]))


def test_a_run_is_known_by_what_is_in_its_folder(folder: Path, data: quern.Lineage, training: quern.Lineage) -> None:
    assert (data.kind, training.kind) == ("data", "training")
    assert data.training_runs == [str(folder / "train")]
    assert training.data_runs == [str(folder / "data")]
    assert repr(data) == f"<quern.Lineage of the data run {folder / 'data'}>"
    with pytest.raises(quern.InputError, match=r"expected a data run or a training run: it has neither run\.json nor"):
        quern.Lineage(folder)


def test_questions_to_the_other_kind_of_run_are_refused(data: quern.Lineage, training: quern.Lineage) -> None:
    of_data = lambda: training.show(url="x"), lambda: training.match("x"), lambda: training.training_runs
    for question in of_data:
        with pytest.raises(quern.InputError, match="is a training run; expected a data run"):
            question()
    of_training = lambda: data.exposure(url="x"), lambda: data.step(0), lambda: data.data_runs
    for question in of_training:
        with pytest.raises(quern.InputError, match="is a data run; expected a training run"):
            question()


def test_show_says_what_the_command_prints(folder: Path, data: quern.Lineage, printed: Callable[..., Any]) -> None:
    found = runs.listing(**ARGUMENTS)
    span = next(span for span in found.spans["web"] if not span["purged"])
    doc = span["doc_id"].hex()
    shown = data.show(doc=doc)
    assert shown == printed("show", folder / "data", "--doc", doc)
    url = shown["document"]["url"]
    assert data.show(url=url) == printed("show", folder / "data", "--url", url)
    at = data.show(shard="web/shard_00000", token=span["start"] + 1)
    assert (at["document"]["doc_id"], at["position"]) == (doc, 1)
    for wrong in ({}, {"doc": doc, "url": url}, {"shard": "web/shard_00000"}, {"doc": doc, "token": 3}):
        with pytest.raises(quern.InputError, match="expected one of url, doc, and shard with token"):
            data.show(**wrong)


def test_sql_gives_an_arrow_table(data: quern.Lineage, training: quern.Lineage) -> None:
    found = runs.listing(**ARGUMENTS)
    table = data.sql("select doc_id, source, record_offset, fetched_at, kept from verdicts order by doc_id")
    assert isinstance(table, pa.Table)
    assert table["doc_id"].to_pylist() == sorted(row["doc_id"].hex() for row in found.rows)
    assert [str(table.schema.field(name).type) for name in ("doc_id", "record_offset", "kept")] == [
        "string", "int64", "bool",
    ]  # fmt: skip
    assert data.sql("select 1 as a, 2 as a").column_names == ["a", "a_1"]
    assert data.sql("describe verdicts").num_rows > 20
    assert data.sql("select * from verdicts where false").num_rows == 0
    steps = training.sql("select attempt, step, surviving from steps order by attempt, step").to_pylist()
    assert [tuple(row.values()) for row in steps] == [
        *((0, step, step < 4) for step in range(6)), (1, 4, True), (1, 5, True),
    ]  # fmt: skip
    for wrong in ("select 1; select 2", "select * from read_csv('/etc/passwd')", "selec 1"):
        with pytest.raises(quern.InputError, match="sql"):
            data.sql(wrong)


def test_a_result_that_is_too_large_is_refused(data: quern.Lineage) -> None:
    with pytest.raises(quern.InputError, match=r"rows are more than 256 MiB; ask for fewer of them"):
        data.sql("select repeat('x', 100000) || range as text from range(10000)")


def test_step_says_what_the_command_prints(folder: Path, training: quern.Lineage, printed: Callable[..., Any]) -> None:
    for step, attempt in ((3, None), (4, 0), (5, 1)):
        words = [] if attempt is None else ["--attempt", attempt]
        assert training.step(step, attempt=attempt) == printed("step", folder / "train", step, *words)
    assert training.step(4, rank=0)["sequences"] == training.step(4)["sequences"]


def test_exposure_says_what_the_command_prints(
    folder: Path, training: quern.Lineage, printed: Callable[..., Any]
) -> None:
    found = runs.listing(**ARGUMENTS)
    most = 0
    for span in [span for spans in found.spans.values() for span in spans][::7]:
        doc = span["doc_id"].hex()
        expected = printed("exposure", folder / "train", "--doc", doc, "--all", "--limit", 10**6)
        answer = training.exposure(doc=doc, abandoned=True)
        rows = answer.pop("rows")
        assert rows.to_pylist() == expected.pop("rows")
        assert answer.pop("limit") is None
        assert answer == {key: value for key, value in expected.items() if key != "limit"}
        assert answer["rows_left_out"] == 0
        assert {row["attempt"] for row in rows.to_pylist() if row["surviving"]} <= {0, 1}
        if rows.num_rows > most:
            most, busiest, whole = rows.num_rows, doc, rows
    kept = whole.filter(whole["surviving"])
    assert training.exposure(doc=busiest)["rows"].equals(kept)
    some = training.exposure(doc=busiest, limit=2)
    assert some["rows"].equals(kept.slice(0, 2))
    assert some["rows_left_out"] == kept.num_rows - 2
    assert training.exposure(doc=busiest, limit=0)["rows"].num_rows == 0
    for wrong in ({}, {"doc": busiest, "url": "x"}):
        with pytest.raises(quern.InputError, match="expected one of url, domain, doc and match, got"):
            training.exposure(**wrong)


def test_which_checkpoints_of_another_trainer_are_clean_is_told_by_their_steps(
    folder: Path, training: quern.Lineage, tmp_path: Path
) -> None:
    """A purge knows no checkpoint of theirs, and names no command that would begin a run of quern's own."""
    table = training.sql("select step from steps where surviving order by step")
    docs = {
        document["doc_id"]
        for step in table["step"].to_pylist()
        for row in training.step(step)["sequences"]
        for document in row["documents"]
        if document["targets"]
    }
    found = [training.exposure(doc=doc) for doc in sorted(docs)[:40]]
    late = max(found, key=lambda answer: answer["first_step"] or 0)
    first, doc = late["first_step"], late["asked"]["doc"]
    assert (late["trainer"], first > 0) == ("other", True)
    result = CliRunner().invoke(app, ["exposure", str(folder / "train"), "--doc", doc])
    assert f"checkpoints  the other trainer's own: those after at most {first} steps are clean" in result.output
    result = CliRunner().invoke(app, ["purge", str(folder / "data"), "--doc", doc, "--mode", "mask", "--dry-run"])
    assert f"it loads a checkpoint after at most {first} steps, and gives quern.batches that number" in result.output
    assert "quern train" not in result.output


def test_a_match_is_kept_for_exposure(
    folder: Path, tmp_path: Path, data: quern.Lineage, training: quern.Lineage, printed: Callable[..., Any]
) -> None:
    documents = data.sql("select doc_id, text from documents where kept and length(text) > 200 limit 3").to_pylist()
    benchmark = tmp_path / "leaked.jsonl"
    benchmark.write_text("".join(json.dumps({"question": row["text"][:300]}) + "\n" for row in documents))
    answer = data.match(benchmark, n=5, out=tmp_path / "leaked.parquet")
    assert answer == printed("match", folder / "data", benchmark, "-n", 5)
    assert answer["documents"]
    assert training.exposure(match=tmp_path / "leaked.parquet")["documents"] == len(answer["documents"])


def test_what_the_package_offers() -> None:
    assert sorted(quern.__all__) == quern.__all__ == dir(quern)
    assert all(getattr(quern, name) is not None for name in quern.__all__)
    with pytest.raises(AttributeError, match="module 'quern' has no attribute 'Linage'"):
        _ = quern.Linage
