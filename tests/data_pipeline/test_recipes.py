"""Sources with recipes of their own: each is judged as in a run of its own, and nothing changes where there is none."""

from __future__ import annotations

import gzip
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from quern.cli.main import app
from quern.config import digest, load_config
from quern.data_pipeline.config import RECIPE_SECTIONS
from quern.data_run.config import DataRun
from quern.errors import InputError
from quern.train.config import TrainConfig
from support.data_pipeline.digests import pages_hash
from support.data_pipeline.in_process import run_config

CODE = Path(__file__).resolve().parents[2] / "configs" / "code.yaml"
GERMAN = "Der kleine Fluss trägt das Wasser von den Bergen in das Meer, und die Leute sehen den Schiffen zu. "
ENGLISH = "The small river carries the water from the mountains to the sea, and the people watch the ships go by. "
PROGRAM = "def f(x):\n    return x\n" * 3


def rows(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def config(base: Path, sources: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "run_dir": str(base / "run"), "sources": sources, "quality": {"order": []},
        "tokenize": {"encoding": "trained", "vocab_size": 400}, **more,
    }  # fmt: skip


def verdicts(run: Path, source: str) -> list[dict[str, Any]]:
    tables = [pq.read_table(path) for path in (run / "verdicts" / source).glob("*.parquet")]
    return sorted(pa.concat_tables(tables).to_pylist(), key=lambda row: row["doc_id"])


def check_each_alone(base: Path, mixed: dict[str, Any]) -> None:
    """The verdicts of each source against those of a run of its own whose config has the recipe's sections."""
    columns = {path: pq.read_schema(path).names for path in (base / "run" / "verdicts").rglob("*.parquet")}
    assert len({tuple(names) for names in columns.values()}) == 1
    for source in mixed["sources"]:
        recipe = source.get("recipe", {})
        sections = yaml.safe_load(Path(recipe).read_text()) if isinstance(recipe, str) else recipe
        own = {**mixed, **{name: sections[name] for name in sections if name in RECIPE_SECTIONS}}
        plain = {key: value for key, value in source.items() if key != "recipe"}
        run_config({**own, "run_dir": str(base / "alone" / source["name"]), "sources": [plain]})
        alone, together = (verdicts(base / name, source["name"]) for name in (f"alone/{source['name']}", "run"))
        assert [{name: row[name] for name in alone[0]} for row in together] == alone
        assert not any(row[name] is not None for row in together for name in row.keys() - alone[0].keys())


def test_each_source_is_judged_by_its_own_recipe(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts = [GERMAN * 3, ENGLISH * 3, PROGRAM]
    prose = rows(tmp_path / "prose.jsonl", texts)
    sources = [
        {"name": "plain", "kind": "jsonl", "paths": prose},
        {"name": "german", "kind": "jsonl", "paths": rows(tmp_path / "g.jsonl", [text + "Eins." for text in texts]),
         "recipe": {"language": {"keep": ["de"]}, "quality": {"order": ["gopher"]}}},
        {"name": "code", "kind": "jsonl", "paths": rows(tmp_path / "c.jsonl", [PROGRAM, PROGRAM + "\n", PROGRAM]),
         "recipe": str(CODE)},
    ]  # fmt: skip
    mixed = config(tmp_path, sources, language={"keep": ["en"]}, duplicates={"near": False})
    with caplog.at_level(logging.WARNING):
        stats = run_config(mixed)
    named = [record.getMessage() for record in caplog.records if "recipe" in record.getMessage()]
    assert named == [
        f"source code: recipe: {CODE}: duplicates, tokenize: not taken; "
        "what the run's own config says holds for all sources"
    ]
    assert {name: own["kept"] for name, own in stats["sources"].items()} == {"plain": 1, "german": 1, "code": 3}
    assert stats["sources"]["plain"]["by_reason"] == {"language:language.not_wanted": 2}
    assert stats["sources"]["code"]["unique"] == 2
    assert Counter(row["stage"] for row in verdicts(tmp_path / "run", "german")) == {"language": 2, None: 1}
    check_each_alone(tmp_path, mixed)
    shown = CliRunner().invoke(app, ["data", "report", str(tmp_path / "run")], env={"COLUMNS": "200"}).stdout
    lines = [line.split() for line in shown.splitlines()]
    assert ["plain", "3", "1", "1", "33.3%"] in [line[:5] for line in lines]
    assert "What each stage dropped" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.long
def test_a_crawl_books_and_code_in_one_run(tmp_path: Path, shared: Path) -> None:
    """All 1,583 files of code but exact copies are in the corpus, unchanged; the others' verdicts are their own."""
    with gzip.open(shared / "data" / "text" / "code.jsonl.gz", "rt") as file:
        files = {row["id"]: row["text"] for row in map(json.loads, file)}
    for name, text in files.items():
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_text(text, newline="")
    with gzip.open(shared / "data" / "text" / "books.jsonl.gz", "rt") as file:
        books = [json.loads(line)["text"][:40_000] for line in file]
    sources = [
        {"name": "web", "kind": "warc", "paths": str(shared / "data" / "warc" / "quern-real-public-00000.warc.gz"),
         "recipe": {"language": {"keep": ["en", "de"]}}},
        {"name": "wet", "kind": "wet", "paths": str(shared / "data" / "wet_derived" / "*.gz"),
         "recipe": {"quality": {"order": ["gopher", "c4"]}}},
        {"name": "books", "kind": "jsonl", "paths": rows(tmp_path / "books.jsonl", books),
         "recipe": str(CODE.parent / "books.yaml")},
        {"name": "code", "kind": "code", "paths": str(tmp_path / "code"), "groups": 3, "near_duplicates": False,
         "recipe": str(CODE)},
    ]  # fmt: skip
    mixed = config(tmp_path, sources)
    del mixed["quality"]
    stats = run_config(mixed)
    check_each_alone(tmp_path, mixed)
    found = [pq.read_table(path) for path in (tmp_path / "run" / "documents" / "code").glob("*.parquet")]
    texts = [row["text"] for table in found for row in table.to_pylist() if row["kept"]]
    assert Counter(texts) == Counter(files.values())
    assert stats["sources"]["code"]["unique"] == len(set(files.values())) == 1583


def test_the_record_holds_the_recipe_and_a_changed_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("language: {keep: [de]}\n")
    paths = rows(tmp_path / "a.jsonl", [GERMAN * 3])
    given = config(tmp_path, [{"name": "a", "kind": "jsonl", "paths": paths, "recipe": str(tmp_path / "own.yaml")}])
    run_config(given)
    record = json.loads((tmp_path / "run" / "run.json").read_text())["config"]["sources"][0]["recipe"]
    assert record.keys() == {"language"}
    assert (record["language"]["keep"], record["language"]["threshold"]) == (["de"], 0.65)
    run_config(given)
    (tmp_path / "own.yaml").write_text("language: {keep: [en]}\n")
    with pytest.raises(InputError, match=r"source a: recipe.language.keep is \[\"de\"\] there and \[\"en\"\] here"):
        run_config(given)


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ("missing.yaml", "sources.0.recipe: missing.yaml: no such config file"),
        ({"quality": {"gopher": {"min_wrds": 3}}}, "sources.0.recipe: quality.gopher.min_wrds: unknown key; did you"),
        ({"qualty": {}}, "sources.0.recipe: qualty: unknown key; did you mean 'quality'?"),
        ({"language": {"threshold": "high"}}, "sources.0.recipe: language.threshold: expected a number, got"),
    ],
)
def test_a_wrong_recipe_is_named(tmp_path: Path, recipe: Any, told: str) -> None:
    given = config(tmp_path, [{"name": "a", "kind": "jsonl", "paths": "a.jsonl", "recipe": recipe}])
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(given))
    with pytest.raises(InputError) as caught:
        load_config(tmp_path / "c.yaml", DataRun)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_url_threshold_needs_the_signatures_of_all_sources(tmp_path: Path) -> None:
    source = {"name": "a", "kind": "jsonl", "paths": "a.jsonl", "near_duplicates": False}
    with pytest.raises(ValueError, match=r"sources\.0\.near_duplicates: expected true with duplicates\.url_threshold"):
        DataRun.model_validate(config(tmp_path, [source], duplicates={"url_threshold": 0.5}))


def test_the_keys_that_a_recipe_leaves_out_are_those_of_a_config() -> None:
    """So that none is refused as unknown, and none is taken by mistake."""
    from quern.data_pipeline.config import _OF_THE_RUN

    assert {*RECIPE_SECTIONS, *_OF_THE_RUN} == set(DataRun.model_fields)
    assert not {*RECIPE_SECTIONS} & {*_OF_THE_RUN}


def test_new_keys_at_their_defaults_leave_the_digests_of_configs_as_they_were() -> None:
    """The digests are those of versions without recipes: a key that came since belongs in ``later`` of its section."""
    data = DataRun.model_validate({"run_dir": "r", "sources": [{"name": "a", "kind": "warc", "paths": "x"}]})
    train = TrainConfig.model_validate(
        {"run_dir": "r", "data": [{"path": "a"}], "steps": 10, "model": {"preset": "debug"}}
    )
    assert digest(data.model_dump(mode="json")) == "ba83b297b3b5b96d8debaff98f9a40f7"
    assert digest(train.model_dump(mode="json")) == "b62ed5476435909c31adc2c2195bd433"
    assert pages_hash(data) == {"a": "68100e3a634ddf6b2ccdcffd5e3fce84"}


def test_a_recipe_elsewhere_changes_the_hash_of_a_source_only_by_its_columns(tmp_path: Path) -> None:
    source = {"name": "a", "kind": "jsonl", "paths": "a.jsonl"}

    def hashed(**recipe: Any) -> str:
        other = {"name": "b", "kind": "jsonl", "paths": "b.jsonl", **recipe}
        return pages_hash(DataRun.model_validate(config(tmp_path, [source, other])))["a"]

    assert hashed() == hashed(recipe={"language": {"keep": ["de"]}})
    own = DataRun.model_validate(config(tmp_path, [source], quality={"order": []}, language={"keep": ["de"]}))
    given = {**source, "recipe": {"language": {"keep": ["de"]}}}
    assert pages_hash(DataRun.model_validate(config(tmp_path, [given]))) == pages_hash(own)
    assert hashed() != hashed(recipe={"quality": {"order": ["c4"]}}), "its tables have more columns"
