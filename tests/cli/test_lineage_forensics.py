"""``quern lineage forensics``: what the terminal is shown, JSON, where the page goes, wrong arguments in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from quern.cli.lineage.forensics import forensics
from support.lineage import poison_case, runs

pytestmark = pytest.mark.slow

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
STEP = 3

app = typer.Typer()
app.command("forensics")(forensics)
app.command("other")(lambda: None)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["forensics", *map(str, arguments)])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over texts and URLs that would harm a terminal."""
    folder = tmp_path_factory.mktemp("forensics")
    data = runs.write_run(folder / "data", documents=300)
    poison_case.train(str(folder / "run"), str(data), {"steps": 5, "schedule": {"warmup": 1},
                                                       "forensics": {"steps": [STEP]}})  # fmt: skip
    return folder / "run"


def test_the_terminal_is_told_the_essentials(trained: Path) -> None:
    result = call(trained, STEP)
    assert result.exit_code == 0, result.output
    for part in (
        f"step {STEP} (data step {STEP}, attempt 0): configured; continued", "gradient by layer: ", "blocks.0",
        "documents, by how far", "sequences, the furthest out first", "quern lineage step",
    ):  # fmt: skip
        assert part in result.stdout
    assert not CONTROL.search(result.stdout)
    page = trained / "forensics" / f"step_{STEP:08d}.html"
    assert f"page: {page}" in result.stderr.replace("\n", "")
    assert not CONTROL.search(page.read_text())


def test_json_is_one_document_and_says_the_same(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "pages" / "own.html"
    with pytest.raises(SystemExit) as ended:
        app(["forensics", str(trained), str(STEP), "--json", "--html", str(target)])
    assert ended.value.code == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert found["page"] == str(target)
    assert target.read_text().startswith("<!DOCTYPE html>")
    assert [step["step"] for step in found["steps"]] == [0, 1, 2, 3]
    assert len(found["sequences"]) == poison_case.BATCH
    assert {row["doc_id"] for row in found["documents"]}
    z = [row["z"] for row in found["documents"]]
    assert z == sorted(z, reverse=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((1,), "nothing is written down of step 1: it has steps 3"),
        ((STEP, "--attempt", 2), "has step 3 of attempt 0, expected one of attempt 2"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(trained: Path, arguments: tuple[Any, ...], said: str) -> None:
    result = call(trained, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_a_folder_without_a_ledger_is_no_training_run(tmp_path: Path) -> None:
    result = call(tmp_path, STEP)
    assert result.exit_code == 2
    assert "expected a training run" in result.stderr
