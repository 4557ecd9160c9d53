"""The examples of docs/python.md and of its notebook run, one after the other, and say what the page says of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from quern.demo import write_site
from support.data_pipeline import in_process
from support.documents import ROOT, blocks

pytestmark = pytest.mark.slow

PAGE = [block.text for block in blocks(ROOT / "docs" / "python.md") if block.language == "python"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("crawl").symlink_to(Path(write_site("site", seed=1, pages=160).folder).absolute() / "warc")
    names: dict[str, Any] = {}
    with in_process.engine():
        for text in PAGE:
            exec(compile(text, "docs/python.md", "exec"), names)
    assert names["batches"].steps == 20
    assert names["exposure"]["documents"] == 1
    assert names["exposure"]["exposures"] == names["exposure"]["rows"].num_rows > 0
    told = capsys.readouterr().out
    assert re.search(r"^\d+ pages, \d+ documents$", told, re.MULTILINE)
    # the loop goes on where its checkpoint is: of 20 steps nothing is left
    loop = next(text for text in PAGE if "quern.batches(train" in text)
    exec(compile(loop, "docs/python.md", "exec"), names)
    kinds = [json.loads(line)["kind"] for line in Path("runs/mine/ledger.jsonl").read_text().splitlines()]
    assert kinds == ["order", "start", "complete", "end", "resume", "end"]


def test_the_notebook_says_what_it_shows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cell by cell, but for the losses, which are the machine's own."""
    notebook = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())
    names: dict[str, Any] = {}
    losses = re.compile(r"(?<=loss )[0-9.]+$", re.MULTILINE)
    with in_process.engine():
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                capsys.readouterr()
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
                shown = "".join(line for output in cell["outputs"] for line in output["text"])
                assert losses.sub("", capsys.readouterr().out) == losses.sub("", shown), cell["id"]
    assert {output["name"] for cell in notebook["cells"] for output in cell.get("outputs", ())} == {"stdout"}
