"""What a person meets: one-line errors with exit code 2, a plan before the work, JSON that is nothing else."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from quern import storage
from quern.cli.main import app
from quern.cli.output import plain
from quern.config import dump_yaml, load_config
from quern.data_pipeline import run as pages
from quern.data_pipeline.execution.run_directory import open_run
from quern.data_run.config import DataRun
from quern.demo import write_site
from quern.train.config import TrainConfig
from quern.train.step.schedule import check_schedule
from support.data_pipeline import in_process
from support.programs import python

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {path: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "configs").glob("*.yaml"))}
RECIPES = [path for path, config in CONFIGS.items() if "sources" in config]
TRAININGS = [path for path, config in CONFIGS.items() if "steps" in config]


def quern(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python(), "-m", "quern.cli.main", *arguments], capture_output=True, text=True, cwd=cwd, check=False
    )


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command that succeeds writes to stdout; JSON goes past Python's own streams."""

    def call(*arguments: str) -> str:
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        return capfd.readouterr().out + result.stdout

    return call


def refused(tmp_path: Path, text: str, *overrides: str) -> str:
    """The one line of a refused config, without the folder's name."""
    path = tmp_path / "c.yaml"
    path.write_text(text)
    result = CliRunner().invoke(app, ["data", "run", str(path), *overrides])
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0].replace(f"{tmp_path}/", "")


GOOD = "run_dir: {0}/run\nsources: [{{name: s, kind: jsonl, paths: '{0}/in.jsonl'}}]\n"


@pytest.fixture
def good(tmp_path: Path) -> str:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    return GOOD.format(tmp_path)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("langage: {}", "error: c.yaml: langage: unknown key; did you mean 'language'?"),
        ("language: {treshold: 1}", "error: c.yaml: language.treshold: unknown key; did you mean 'threshold'?"),
        ("workers: 0", "error: c.yaml: workers: expected a number ≥ 1, got 0"),
        ("workers: many", 'error: c.yaml: workers: expected an integer, got "many"'),
        ("seed: -1", "error: c.yaml: seed: expected a number ≥ 0, got -1"),
        ("duplicates: {bands: 20}", "error: c.yaml: duplicates: expected bands × rows ≤ num_perm (128), got 20"),
        ("tokenize: {validation: 1}", "error: c.yaml: tokenize.validation: expected a number < 1, got 1"),
        ("language: {pre_skip: true}", "error: c.yaml: language.pre_skip: expected a probability ≥ 0 and < 1, "),
        ("tokenize: {encoding: gpt9}", "error: c.yaml: tokenize: encoding: expected one of cl100k_base"),
    ],
)  # fmt: skip
def test_a_wrong_config_is_one_line(tmp_path: Path, good: str, extra: str, expected: str) -> None:
    assert refused(tmp_path, good + extra).startswith(expected)


def test_a_source_that_is_not_there_is_named(tmp_path: Path, good: str) -> None:
    message = refused(tmp_path, good, f"sources.0.paths={tmp_path}/nothing/*.gz")
    assert "nothing/*.gz" in message
    assert "sources" in message or "source s" in message


def test_a_missing_file_named_in_the_config_is_one_line(tmp_path: Path, good: str) -> None:
    missing = tmp_path / "list.txt"
    assert str(missing.name) in refused(tmp_path, good, f"urls.domains=[{missing}]", "tokenize.encoding=trained")


def test_an_error_writes_nothing(tmp_path: Path, good: str) -> None:
    refused(tmp_path, good + "workers: 0")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_valid_and_prints_back_to_itself(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "a.warc.gz").write_bytes(b"")
    (tmp_path / "a.jsonl.gz").write_bytes(b"")
    (tmp_path / "a.py").write_bytes(b"")
    kind = yaml.safe_load(recipe.read_text())["sources"][0]["kind"]
    pattern = {"warc": "*.warc.gz", "jsonl": "*.jsonl.gz", "code": "*.py"}[kind]
    arguments = ["data", "run", str(recipe), f"run_dir={tmp_path}/run", f"sources.0.paths={tmp_path}/{pattern}",
                 "--dry-run"]  # fmt: skip
    if recipe.stem == "demo":  # names a file of the sample site
        (tmp_path / "lexicon.txt").write_text("frump\n")
        arguments.append(f"toxicity.lexicons.en={tmp_path}/lexicon.txt")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "1 file in 1 partition, 0 B" in result.stderr
    printed = DataRun.model_validate(yaml.safe_load(result.stdout))
    assert printed.sources[0].kind == kind


@pytest.mark.parametrize("recipe", TRAININGS, ids=lambda path: path.stem)
def test_every_training_recipe_is_valid_and_prints_back_to_itself(recipe: Path) -> None:
    config = load_config(recipe, TrainConfig)
    check_schedule(config.steps, config.schedule)
    assert TrainConfig.model_validate(yaml.safe_load(dump_yaml(config))) == config
    assert len(TRAININGS) + len(RECIPES) == len(CONFIGS)


@pytest.mark.slow
def test_a_dry_run_as_json_is_the_config_and_the_plan(tmp_path: Path, good: str) -> None:
    (tmp_path / "c.yaml").write_text(good)
    done = quern("data", "run", str(tmp_path / "c.yaml"), "workers=3", "--dry-run", "--json")
    shown = json.loads(done.stdout)
    assert DataRun.model_validate(shown["config"]).workers == 3
    assert shown["plan"] == {"s": {"partitions": 1, "files": 1, "bytes": 14}}
    assert not (tmp_path / "run").exists()


def test_a_dry_run_refuses_what_the_run_refuses_and_says_what_is_there(tmp_path: Path, good: str) -> None:
    recipe, run_dir = tmp_path / "c.yaml", tmp_path / "run"
    recipe.write_text(good)

    def dry(*overrides: str, code: int = 2) -> str:
        result = CliRunner().invoke(app, ["data", "run", str(recipe), *overrides, "--dry-run"])
        assert result.exit_code == code, result.output
        assert bool(result.stdout) == (code == 0)
        return result.stderr.replace("\n", " ")

    assert "no run is there yet" in dry(code=0)
    config = load_config(str(recipe), DataRun)
    with open_run(str(run_dir), config.model_dump(mode="json")) as run:
        assert "an unfinished run, which goes on" in dry(code=0)
        run.finish({}, pages.inputs_digest(pages.plan_sources(config)))
    before = sorted(run_dir.rglob("*"))
    assert "a complete run, which is left as it is" in dry(code=0)
    assert "holds a run with another config: seed is 0 there and 5 here" in dry("seed=5")
    (tmp_path / "in.jsonl").write_text('{"text": "a longer one"}\n')
    assert "this run is complete, and its input files have changed since" in dry()
    assert "run_dir: /proc/x: cannot be written" in dry("run_dir=/proc/x")
    (tmp_path / "file").touch()
    assert f"run_dir: {tmp_path}/file/x: cannot be written (Not a directory)" in dry(f"run_dir={tmp_path}/file/x")
    assert sorted(run_dir.rglob("*")) == before


def test_fineweb_en_is_what_others_rely_on() -> None:
    config = yaml.safe_load((ROOT / "configs" / "fineweb-en.yaml").read_text())
    assert [source["kind"] for source in config["sources"]] == ["warc"]
    assert config["quality"]["order"] == ["repetition", "gopher", "c4", "fineweb"]
    assert config["toxicity"]["action"] == config["urls"]["action"] == "measure"


def test_the_command_is_there_with_a_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("quern ")
    assert CliRunner().invoke(app, ["data", "frobnicate"]).exit_code == 2


@pytest.mark.slow
def test_a_run_its_status_report_and_tokens_as_json(
    tmp_path: Path, said: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    site = write_site(str(tmp_path / "site"), seed=1, pages=160)
    run_dir = str(tmp_path / "run")
    arguments = [
        "data", "run", "configs/demo.yaml", f"run_dir={run_dir}", f"sources.0.paths={site.folder}/warc/*.warc.gz",
        f"toxicity.lexicons.en={site.lexicon}", "language.keep=[en,de,es,ru]", "--json",
    ]  # fmt: skip
    with in_process.engine():
        result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    stats = json.loads(capfd.readouterr().out + result.stdout)
    assert stats["pages"] == 160
    assert "pages: done" in result.stderr

    status = json.loads(said("data", "status", run_dir, "--json"))
    assert status["status"] == "complete"
    assert status["phases"]["pages"] == {"commits": 4, "pages": 160, "kept": stats["kept"]}
    assert json.loads(said("data", "report", run_dir, "--json")) == stats
    assert "160 pages" in said("data", "report", run_dir)

    shard = f"{run_dir}/tokens/sample/shard_00000.bin"
    found = json.loads(said("tokens", "inspect", shard, "--at", "100", "--json"))
    manifest = {row["url"]: row for row in map(json.loads, Path(site.manifest).read_text().splitlines())}
    assert found["page"]["url"] in manifest
    assert os.path.basename(found["page"]["source_file"]) == manifest[found["page"]["url"]]["file"]
    shown = said("tokens", "inspect", shard, "--at", "100")
    assert found["page"]["url"] in shown
    assert found["doc_id"] in shown

    beyond = quern("tokens", "inspect", shard, "--at", "999999999")
    assert beyond.returncode == 2
    assert beyond.stderr.startswith("error: ")
    assert beyond.stderr.count("\n") == 1
    gone = CliRunner().invoke(app, ["data", "status", str(tmp_path / "nowhere")])
    assert gone.exit_code == 2
    assert "nowhere: expected a data run: it has no run.json" in gone.stderr


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (None, "expected a complete data run: it has no run.json"),
        ({"config": {"import": {}}, "status": "complete"}, "this one is of imported tokens"),
        (
            {"config": {}, "status": "running"},
            "this one has not ended, and stats.json is written at the end; quern data",
        ),
    ],
)
def test_a_run_without_a_report_says_why(tmp_path: Path, record: object, told: str) -> None:
    if record is not None:
        (tmp_path / "run.json").write_text(json.dumps(record))
    done = CliRunner().invoke(app, ["data", "report", str(tmp_path)])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {tmp_path}: expected a complete data run: ")
    assert told in done.stderr


def test_a_missing_encoding_founds_no_run(tmp_path: Path, good: str) -> None:
    """Else the mended config would be refused: the run there has another."""
    message = refused(tmp_path, good, "tokenize.encoding=gpt2", f"tokenize.ranks={tmp_path}/none.tiktoken")
    assert "none.tiktoken" in message
    assert not (tmp_path / "run").exists()


def test_status_of_a_run_at_work_reads_over_files_in_writing(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"status": "running", "counts": {}}')
    with storage.publish(str(tmp_path / "commits" / "pages" / "s" / "p.json")) as file:
        file.write(b'{"phase": ')
        file.flush()
        result = CliRunner().invoke(app, ["data", "status", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output


def test_text_of_a_page_cannot_act_on_the_terminal() -> None:
    assert plain("a\x1b[2Jb\r\u202ec\td\n é ḍ") == "a\\x1b[2Jb\\r\\u202ec\td\n é ḍ"
