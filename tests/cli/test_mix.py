"""``quern mix``: the plan of a config over real shards, as a table and as JSON; weights of sources, and selections of
documents; what is wrong in one line."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from quern.cli.lineage import app as lineage
from quern.cli.mix import app
from quern.mixtures.order import Order, Phase
from quern.words import short
from support.lineage.selections import rows_of, write_topics
from support.train import corpora
from support.train.chosen_site import write_site
from support.train.corpora import make_shards


def write_run(run_dir: Path, ident: str, sources: dict[str, list[int]]) -> None:
    """A data run with one document a shard: sources of (tokens of each shard)."""
    shards = {
        name: make_shards(random.Random(1), [[length] for length in lengths]) for name, lengths in sources.items()
    }
    corpora.write_run(run_dir, shards, run_id=ident)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """web: 1,007 tokens, 100 windows of 10; books: 2,000 tokens, 199 windows; 20 steps of 8 samples."""
    write_run(tmp_path / "crawl", "crawl-1", {"web": [500, 507], "books": [2000]})
    path = tmp_path / "train.yaml"
    path.write_text(
        f"run_dir: {tmp_path}/run\n"
        f"data:\n- {{path: {tmp_path}/crawl/tokens/web, weight: 3}}\n- {{path: {tmp_path}/crawl/tokens/books}}\n"
        "seq_len: 10\nglobal_batch: 8\nsteps: 20\nseed: 7\n"
    )
    return path


def show(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["show", str(config), *arguments])


Shown = Callable[..., dict[str, Any]]


@pytest.fixture
def shown(config: Path, json_of: Callable[..., Any]) -> Shown:
    return partial(json_of, show, config)


def test_the_plan_as_json(shown: Shown, tmp_path: Path) -> None:
    found = shown()
    order = Order((3, 1), (100, 199), 7, ids=["crawl-1/web/1", "crawl-1/books/1"], seq_len=10, global_batch=8)
    assert found["order"] == order.hash
    assert (found["steps"], found["samples"], found["planned_tokens"]) == (20, 160, 1600)
    web, books = found["sources"]
    assert (web["name"], web["path"]) == ("web", f"{tmp_path}/crawl/tokens/web")
    names = ("tokens", "windows", "samples", "planned_tokens", "share", "epochs", "windows_left", "tail_tokens")
    assert [web[name] for name in names] == [1007, 100, 120, 1200, 0.75, 1.2, 0, 6]
    assert [books[name] for name in names] == [2000, 199, 40, 400, 0.25, 40 / 199, 159, 9]


def test_overrides_and_phases(config: Path, shown: Shown) -> None:
    arguments = ["phases=[{first_step: 5, weights: [0, 1]}, {first_step: 15, global_batch: 2}]", "data.1.weight=1"]
    found = shown(*arguments)
    order = Order(
        (3, 1), (100, 199), 7, [Phase(5, (0, 1)), Phase(15, None, 2)],
        ids=["crawl-1/web/1", "crawl-1/books/1"], seq_len=10, global_batch=8,
    )  # fmt: skip
    assert found["order"] == order.hash
    rows = [(row["first_step"], row["stop_step"], row["global_batch"], row["samples"]) for row in found["phases"]]
    assert rows == [(0, 5, 8, [30, 10]), (5, 15, 8, [0, 80]), (15, 20, 2, [0, 10])]
    printed = show(config, *arguments).stdout
    lines = [re.sub(r"\s+", " ", line).strip() for line in printed.splitlines()]
    assert lines[0] == "source tokens share samples reads epochs at most left tail"  # a weight is one phase's
    assert "web 1,007 23.08% 30 300 0.30 4 70.0% 6" in lines  # 30 of 5·8 + 10·8 + 5·2 samples
    assert "0 0 5 8 40 web 75.00%, books 25.00%" in lines
    assert "1 5 15 8 80 books 100.00%" in lines
    assert "2 15 20 2 10 books 100.00%" in lines
    late = show(config, "phases=[{first_step: 20, weights: [0, 1]}]").stdout
    assert re.search(r"1 +20 +not reached +8 +0 +books 100.00%", late)


def test_the_plan_as_a_table(config: Path, shown: Shown) -> None:
    result = show(config)
    assert result.exit_code == 0, result.output
    lines = [re.sub(r"\s+", " ", line).strip() for line in result.stdout.splitlines()]
    assert lines[0] == "source tokens weight share samples reads epochs at most left tail"
    assert "web 1,007 3 75.00% 120 1,200 1.20 4 0.0% 6" in lines
    assert "books 2,000 1 25.00% 40 400 0.20 4 79.9% 9" in lines
    assert "total 3,007 160 1,600" in lines
    assert f"order {shown()['order']} seed 7" in lines
    assert "phase" not in result.stdout


def test_sources_of_one_name_are_told_apart(shown: Shown, tmp_path: Path) -> None:
    write_run(tmp_path / "other", "crawl-2", {"web": [400]})
    found = shown(f"data.2.path={tmp_path}/other/tokens/web")
    assert [row["name"] for row in found["sources"]] == [
        f"{tmp_path}/crawl/tokens/web", "books", f"{tmp_path}/other/tokens/web"
    ]  # fmt: skip
    assert [row["ident"] for row in found["sources"]] == ["crawl-1/web/1", "crawl-1/books/1", "crawl-2/web/1"]


@pytest.mark.parametrize("columns", [80, 200])
def test_paths_break_at_their_slashes_where_there_is_no_room(
    config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, columns: int
) -> None:
    write_run(tmp_path / "other", "crawl-2", {"web": [400]})
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(tmp_path)
    sources = "data=[{path: crawl/tokens/web, weight: 3}, {path: other/tokens/web}]"
    lines = [line.split() for line in show(config, sources, "steps=1").stdout.splitlines()]
    firsts = [line[0] for line in lines[1:] if line and line[0] != "total"][: 6 if columns == 80 else 2]
    broken = ["crawl/", "tokens/", "web", "other/", "tokens/", "web"]
    assert firsts == (broken if columns == 80 else ["crawl/tokens/web", "other/tokens/web"])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["steps=80"], "tokens/web: 80 steps read source web 4.8 times (480 samples of 100 windows), beyond max_epochs "
         "4; what fits: steps=66, weight 1.66 or a larger max_epochs"),
        (["seq_len=1500"], "has 1007 tokens; seq_len 1500 needs 1501 or more"),
        (["data.1.path={0}/crawl/tokens/none"], "the corpus version has no source 'none'"),
        (["data.1.wieght=1"], "wieght: unknown key; did you mean 'weight'?"),
        (["phases=[{first_step: 5, weights: [1]}]"], "phases.0.weights: expected 2 weights"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_is_one_line(
    config: Path, tmp_path: Path, overrides: list[str], expected: str
) -> None:  # fmt: skip
    result = show(config, *(text.replace("{0}", str(tmp_path)) for text in overrides))
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert result.stderr.startswith("error: ")
    assert expected in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (9_999, "9,999"), (10_000, "10.0k"), (999_499, "999k"), (999_600, "1.00M"), (1_234_567, "1.23M"),
     (9_996_000, "10.0M"), (99_960_000, "100M"), (15_000_000_000_000, "15.0T"), (12_345_000_000_000_000, "12,345T")],
)  # fmt: skip
def test_numbers_are_short_enough_to_read(number: int, text: str) -> None:
    assert short(number) == text


@pytest.mark.slow
def test_with_json_stdout_is_one_document_and_no_torch_is_loaded(config: Path) -> None:
    code = "import sys; from quern.cli.mix import app; app(standalone_mode=False); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, "show", str(config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["samples"] == 160


def weights(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["weights", str(config), *arguments])


def test_weights_are_a_section_that_a_run_takes(config: Path, json_of: Callable[..., Any]) -> None:
    """100 windows of web and 199 of books, of which 160 are to be read: half of each, or what two readings allow."""
    found = json_of(weights, config, "--alpha", "0")
    assert [row["weight"] for row in found["data"]] == [80, 80]
    assert [row["samples"] for row in found["sources"]] == [80, 80]
    found = json_of(weights, config, "steps=50", "--alpha", "0", "--max-epochs", "1.5")
    assert [row["weight"] for row in found["data"]] == [148, 252]  # 100 windows 1.5 times, but for two
    assert found["worth_tokens"][0] < 1.5 * 1007
    said = weights(config, "steps=50", "--alpha", "0", "--max-epochs", "1.5").output
    section = yaml.safe_load(said[said.index("data:") :])
    given = yaml.safe_load(config.read_text()) | section | {"steps": 50}
    config.write_text(yaml.safe_dump(given))
    planned = json_of(show, config)
    assert [row["samples"] for row in planned["sources"]] == [148, 252]


def test_weights_of_phases_are_not_made(config: Path) -> None:
    done = weights(config, "phases=[{first_step: 5, weights: [1, 2]}]")
    assert done.exit_code == 2
    assert "phases: expected none with weights of their own" in done.output


def select(folder: Path, *arguments: str) -> Result:
    given = ["--name", "mill", "--target", f"{folder}/target.jsonl", "--min-words", "1", "--workers", "1"]
    return CliRunner().invoke(app, ["select", f"{folder}/run", *given, *arguments])


@pytest.mark.slow
def test_a_selection_is_told_and_shown_by_lineage(tmp_path: Path, json_of: Callable[..., Any]) -> None:
    write_topics(tmp_path)
    done = select(tmp_path, "--keep-documents", "9")
    assert done.exit_code == 0, done.output
    rows = rows_of(tmp_path / "run", "mill")
    assert re.match(rf".*/run/measures/mill: 9 of {len(rows)} documents, \d+ of [\d,]+ tokens\n", done.stdout)
    assert re.search(r"\nfewer than 1 words: 0 documents; features of the target: 920, of the run: \d+\n", done.stdout)
    assert re.search(r"\neffective sample size of the weights: [\d.]+ documents\n$", done.stdout)
    assert "weights: 2 of 2 tasks left" in done.stderr
    again = json_of(select, tmp_path, "--keep-documents", "9")
    assert (again["chosen"], again["documents"], again["seed"]) == (9, len(rows), 0)
    assert json_of(select, tmp_path, "--keep-tokens", "90", "--name", "few", "--seed", "2")["seed"] == 2

    run = str(tmp_path / "run")
    first = next(row for row in rows if row["rank"] == 0)
    last = next(row for row in rows if not row["chosen"])
    (tmp_path / "run" / "measures" / "half").mkdir()  # has no manifest
    (tmp_path / "run" / "measures" / "half" / "part-00000.parquet").write_text("torn")
    for row, told in ((first, ", rank 0"), (last, "")):
        shown = CliRunner().invoke(lineage, ["show", run, "--doc", row["doc_id"].hex()])
        line = f"mill: {'chosen' if row['chosen'] else 'not chosen'}, log weight {row['log_weight']:.6g}{told}"
        assert re.search(rf"^selection +{re.escape(line)}$", shown.stdout, re.MULTILINE), shown.output
        assert len(re.findall("^selection ", shown.stdout, re.MULTILINE)) == 2
    found = json_of(sql, run, "SELECT * FROM measures WHERE name = 'mill'")
    assert [column["name"] for column in found["columns"]] == ["name", "doc_id", "log_weight", "rank", "chosen"]
    expected = [{"name": "mill", **row, "doc_id": row["doc_id"].hex()} for row in rows]
    assert {row["doc_id"]: row for row in found["rows"]} == {row["doc_id"]: row for row in expected}
    counts = json_of(sql, run, "SELECT name, count(*) n FROM measures GROUP BY 1")["rows"]
    assert {row["name"]: row["n"] for row in counts} == {"mill": len(rows), "few": len(rows)}


def sql(run: str, query: str, *arguments: str) -> Result:
    return CliRunner().invoke(lineage, ["sql", run, query, "--limit", "0", *arguments])


def test_a_run_without_selections_has_an_empty_view(tmp_path: Path, json_of: Callable[..., Any]) -> None:
    write_topics(tmp_path)
    assert json_of(sql, str(tmp_path / "run"), "SELECT count(*) n FROM measures")["rows"] == [{"n": 0}]


def test_a_selection_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    write_topics(tmp_path)
    done = select(tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "error: expected --target, and one of --keep-documents and --keep-tokens\n"


def test_conditions_are_told_below_the_table_and_kept_in_the_section(
    tmp_path: Path, json_of: Callable[..., Any]
) -> None:
    site = write_site(tmp_path)
    config = tmp_path / "train.yaml"
    wheres = ["tokens <= 4", "tokens > 4"]
    config.write_text(json.dumps({
        "run_dir": str(tmp_path / "train"), "model": {"preset": "debug"}, "steps": 2, "seq_len": 8, "global_batch": 4,
        "data": [{"path": site.path, "where": where, "max_epochs": 50} for where in wheres],
    }))  # fmt: skip
    told = CliRunner().invoke(app, ["show", str(config)])
    assert told.exit_code == 0, told.output
    assert "web [1]" in told.output
    assert "[2] where tokens > 4" in told.output
    found = json_of(lambda *given: CliRunner().invoke(app, ["weights", str(config), *given]))
    assert [own["where"] for own in found["data"]] == wheres
    tokens = [sum(row["tokens"] for row in site.rows if (row["tokens"] <= 4) == own) for own in (True, False)]
    assert [own["tokens"] for own in found["sources"]] == tokens
    assert not (tmp_path / "train").exists()
