"""The page of a training run, against readings of its files by json alone, injected truths and a hostile run."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
from collections import Counter
from datetime import datetime
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from quern.cli.main import app
from quern.errors import InputError
from quern.train.report import write_report
from quern.train.report.account import account, tokens_by_source
from quern.train.report.charts import RANGES, thin
from quern.train.report.history import open_run
from quern.train.report.page import render
from support.train.report_case import EVIL, ORDER, SEQ_LEN, STEPS, Made, Page


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("report") / "run", source=EVIL)


@pytest.fixture(scope="module")
def page(made: Made) -> Page:
    return Page(Path(write_report(str(made.path))).read_text())


def test_the_table_of_the_course_is_that_of_the_rows_read_by_hand(made: Made, page: Page) -> None:
    present, held = made.present(), {}
    assert sorted(present) == list(range(STEPS))
    for row in made.rows:
        if row["kind"] == "validation":
            held[row["step"]] = row
    head, *rows = page.rows["loss"]
    assert len(rows) == 12
    for place, cells in enumerate(rows):
        told = dict(zip(head, cells, strict=True))
        own = [present[step] for step in range(5 * place, 5 * place + 5)]
        losses = [row["loss"] for row in own if row["loss"] is not None]
        assert told["steps"] == f"{5 * place}–{5 * place + 4}"
        assert told["tokens"] == f"{own[-1]['tokens']:,}"
        assert told["loss, mean"] == f"{statistics.fmean(losses):.4f}"
        assert (told["least"], told["greatest"]) == (f"{min(losses):.4f}", f"{max(losses):.4f}")
        inside = [held[step]["loss"] for step in range(5 * place + 1, 5 * place + 6) if step in held]
        assert told["held out"] == (f"{inside[-1]:.4f}" if inside else "–")
        norms = [told[name] for name in ("norm, median", "norm, greatest")]
        assert norms == [f"{f([row['grad_norm'] for row in own]):.3f}" for f in (statistics.median, max)]
        assert told["learning rate"] == f"{own[-1]['lr']:.3g}"
        assert told["tokens/s"] == f"{round(statistics.median(row['tokens_per_s'] for row in own)):,}"


def test_the_curve_is_the_present_branch_and_what_was_abandoned_a_line_of_its_own(made: Made, page: Page) -> None:
    present, line = made.present(), page.line("training")
    assert line["x"]["step"] == [step + 1 for step in range(STEPS)]
    for got, step in zip(line["y"], range(STEPS), strict=True):
        assert got == (present[step]["loss"] and pytest.approx(present[step]["loss"], rel=1e-5))
    left = page.line("abandoned, attempt 1")
    assert left["x"]["step"] == [41, 42, 43, 44, 45]
    wanted = [row["loss"] for row in made.rows if row.get("attempt") == 1 and row["step"] >= 40]
    assert left["y"] == pytest.approx(wanted, rel=1e-5)
    chart = next(chart for chart in page.curves["charts"] if chart["title"] == "Loss")
    assert [own["label"] for own in chart["series"]] == ["training", "abandoned, attempt 1", "held out"]
    held = {row["step"]: row["loss"] for row in made.rows if row["kind"] == "validation"}  # the later of two
    assert page.line("held out")["x"]["step"] == sorted(held) == [15, 30, 45, 60]
    assert page.line("held out")["y"] == pytest.approx([held[step] for step in sorted(held)], rel=1e-5)


def test_marks_stand_where_things_happened(made: Made, page: Page) -> None:
    assert page.marks() == {
        "restart": [20], "rollback": [40], "good": [10, 20], "saved": [30, 40, 60], "failed": [50], "spike": [13],
        "skipped": [34], "non_finite": [51],
    }  # fmt: skip
    (spike,) = (mark for mark in page.curves["marks"] if mark["label"] == "spike")
    assert spike["y"] == [pytest.approx(made.present()[12]["loss"], rel=1e-5)]
    (rollback,) = (mark for mark in page.curves["marks"] if mark["label"] == "rollback")
    first = next(row for row in made.rows if row.get("attempt") == 2)
    began = datetime.fromisoformat(made.ledger[1]["time"])
    hours = (datetime.fromisoformat(first["time"]) - began).total_seconds() / 3600
    assert rollback["x"]["hours"] == [pytest.approx(hours, abs=1e-6)]


def test_what_happened_is_told_in_the_order_of_the_ledger(page: Page) -> None:
    told = page.rows["events"][1:]
    assert [row[:3] for row in told] == [
        ["0", "0", "start"], ["12", "0", "spike"], ["20", "1", "resume"], ["33", "1", "spike"],
        ["33", "1", "skipped"], ["45", "1", "stopped"], ["40", "2", "rollback"], ["50", "2", "checkpoint failed"],
        ["50", "2", "non finite"], ["60", "2", "end"],
    ]  # fmt: skip
    assert [told[place][3].split(" in ")[0] for place in (0, 2, 6)] == ["26 steps", "25 steps", "20 steps"]
    assert "loss_z 9.5" in told[1][3]
    assert [row[3] for row in told if row[2] == "stopped"] == ["signal SIGTERM, left behind since"]
    assert (
        "Of the present branch 5 checkpoints, 2 of them good (healthy steps followed), and 1 failed save" in page.text
    )
    assert (
        "spikes: 2; steps skipped: 1; steps not finite: 1; steps done again after an attempt that ended: 6;"
        in page.text
    )
    assert "steps abandoned by a rollback: 5." in page.text


def test_what_lies_on_a_branch_that_was_left_is_said_to(tmp_path: Path) -> None:
    """A rollback behind a resume, and the same checkpoint saved anew: nothing of before stands for what is now."""
    rows: list[dict[str, Any]] = []
    ledger: list[dict[str, Any]] = [{"kind": "order", "hash": ORDER.hash, "spec": ORDER.to_dict()}]
    for number, (kind, first, stop) in enumerate([("start", 0, 20), ("resume", 10, 16), ("rollback", 5, 12)]):
        ledger.append({"kind": kind, "step": first, "data_step": first + 20 * number, "order": ORDER.hash})
        for step in range(first, stop):
            rows.append({"kind": "step", "step": step, "attempt": number, "loss": number + 1.0})
            if number == 0 and step in (7, 15):
                rows.append({"kind": "validation", "step": step + 1, "loss": 9.0, "tokens": 1, "sources": {}})
        ledger += [{"kind": "spike", "step": 7, "data_step": 7}] if number == 0 else []
        for step in ((10, 15), (12,), (10,))[number]:
            ledger.append({"kind": "checkpoint", "step": step, "data_step": step, "name": f"step_{step:08d}"})
            ledger += [{"kind": "good", "step": step, "name": f"step_{step:08d}"}] if number < 2 else []
    for name, lines in (("metrics", rows), ("ledger", ledger)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Page(Path(write_report(str(tmp_path))).read_text())
    assert page.line("training")["y"] == [1.0] * 5 + [3.0] * 7
    assert [line["label"] for line in page.curves["charts"][0]["series"]] == [
        "training", "abandoned, attempt 0", "abandoned, attempt 1"
    ]  # fmt: skip
    assert page.line("abandoned, attempt 0")["x"]["step"] == [6, 7, 8, 9, 10]  # from 10 on they were done again
    assert page.marks() == {"restart": [10], "rollback": [5], "saved": [10]}
    assert page.rows["events"][2] == ["7", "0", "spike", "left behind since"]
    assert "12 steps, running, or ended without a record" in page.text


def test_the_time_is_where_it_was_spent(made: Made) -> None:
    spent = account(open_run(str(made.path)))
    assert spent is not None
    for name, seconds in spent.items():
        assert seconds == pytest.approx(made.spent[name], abs=0.01), name


def test_tokens_of_a_source_are_those_of_every_surviving_batch(made: Made, page: Page) -> None:
    counted: Counter[int] = Counter()
    for row in made.present().values():
        counted.update(ORDER.batch(row["data_step"])[0].tolist())
    found = tokens_by_source(open_run(str(made.path)))
    assert [own[:2] for own in found] == [
        ("web", counted[0] * SEQ_LEN), ("books", counted[1] * SEQ_LEN)
    ]  # fmt: skip
    read = [f"{counted[source] * SEQ_LEN:,}" for source in (0, 1)]
    epochs = [f"{counted[0] / 40:.2f}", f"{counted[1] / 9:.2f}"]
    assert [[row[1], row[4]] for row in page.rows["sources"][1:]] == [
        list(pair) for pair in zip(read, epochs, strict=True)
    ]


def test_figures_that_this_version_does_not_know_are_drawn(made: Made, page: Page) -> None:
    titles = {chart["title"]: len(chart["series"]) for chart in page.curves["charts"]}
    assert titles == {
        "Loss": 3, "Held-out loss by source": 2, "Source loss": 2, "Learning rate": 1, "Gradient norm": 1,
        "Tokens a second": 1, "Seconds a step": 2, "Peak memory of rank 0, GiB": 1, "Slowest rank": 1,
        "Ranks: comm wait s": 1,
    }  # fmt: skip


@pytest.mark.parametrize("size", [4 * RANGES + 1, 7777])
def test_no_extremum_is_lost(size: int) -> None:
    random = np.random.default_rng(size)
    values = random.normal(size=size)
    values[random.integers(size, size=size // 20)] = math.nan
    values[50:120] = math.nan
    values[random.integers(200, size)] = 1e9
    drawn = set(thin(values).tolist())
    assert {0, size - 1} <= drawn
    assert len(drawn) <= 3 * RANGES + 1
    edges = [size * place // RANGES for place in range(RANGES + 1)]
    for first, stop in pairwise(edges):
        known = [value for value in values[first:stop].tolist() if not math.isnan(value)]
        shown = [float(values[place]) for place in sorted(drawn) if first <= place < stop]
        shown = [value for value in shown if not math.isnan(value)]
        assert (min(shown, default=0), max(shown, default=0)) == (min(known, default=0), max(known, default=0))


def test_nothing_of_a_run_can_act_in_its_page_and_nothing_is_asked_of_a_network(page: Page) -> None:
    assert page.tags["img"] == page.tags["link"] == page.tags["iframe"] == 0
    assert (page.tags["script"], page.tags["style"], page.handlers) == (3, 1, [])
    assert [address for address in page.addresses if not address.startswith("#")] == []
    assert not re.search(r"url\(|@import", page.styles[0])
    data, *run = page.scripts
    assert "<" not in data
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'" for code in run]
    assert page.policy.startswith("default-src 'none';")
    assert f"script-src {' '.join(hashes)};" in page.policy
    for code in run:
        assert not re.search(r"\bfetch\(|XMLHttpRequest|WebSocket|sendBeacon|\bimport\(|\beval\(|innerHTML", code)
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", page.text)
    assert "⟨U+202E⟩" in page.text


def test_the_library_that_draws_is_the_published_one() -> None:
    """SHA-256 of dist/ in the npm package uplot 1.6.32."""
    folder = files("quern.train.report").joinpath("uplot")
    found = {
        name: hashlib.sha256(folder.joinpath(name).read_bytes()).hexdigest()[:16]
        for name in ("uPlot.iife.min.js", "uPlot.min.css")
    }
    assert found == {"uPlot.iife.min.js": "19c8d4c6ad88929a", "uPlot.min.css": "df630c6a8d6f8eea"}
    assert "MIT License" in folder.joinpath("LICENSE").read_text()


def test_a_line_that_is_not_whole_yet_is_left_out_and_damaged_ones_are_counted(
    made: Made, page: Page, tmp_path: Path
) -> None:
    shutil.copytree(made.path, tmp_path / "run")
    file = tmp_path / "run/metrics.jsonl"
    file.write_bytes(file.read_bytes() + b'{"kind": "step", "step": 60, "att')
    torn = Page(Path(write_report(str(tmp_path / "run"))).read_text())
    assert (torn.curves, torn.rows["loss"]) == (page.curves, page.rows["loss"])
    assert "cannot be read" not in torn.text
    lines = file.read_bytes().split(b"\n")
    whole = b"\n".join([*lines[:3], b'{"kind": "st' + lines[3], b'{"kind": "step", "step": "x"}', *lines[4:]])
    file.write_bytes(whole)
    damaged = Page(Path(write_report(str(tmp_path / "run"))).read_text())
    assert "2 lines of metrics.jsonl cannot be read, the first is line 4" in damaged.text
    assert damaged.line("training")["x"]["step"] == [step + 1 for step in range(STEPS) if step != 3]


@pytest.mark.parametrize("rows", [None, "", '{"kind": "step", "st', '{"kind": "validation", "step": 1, "loss": 2}\n'])
def test_a_run_without_a_step_is_one_line(made: Made, tmp_path: Path, rows: str | None) -> None:
    (tmp_path / "ledger.jsonl").write_bytes((made.path / "ledger.jsonl").read_bytes())
    if rows is not None:
        (tmp_path / "metrics.jsonl").write_text(rows)
    result = CliRunner().invoke(app, ["train", "report", str(tmp_path)])
    assert result.exit_code == 2
    assert (
        result.stderr == f"error: {tmp_path}/metrics.jsonl: expected at least one step, got none; nothing to show yet\n"
    )
    assert not (tmp_path / "report.html").exists()


def test_what_is_no_training_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected the folder of a training run: it has no ledger\.jsonl"):
        write_report(str(tmp_path))


def test_a_folder_is_no_place_for_a_page(made: Made, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected the name of a file, got a folder"):
        write_report(str(made.path), str(tmp_path))
    assert list(tmp_path.parent.glob(f".{tmp_path.name}*")) == []


def test_two_runs_stand_on_the_same_axes(made: Made, tmp_path: Path) -> None:
    other = Made(tmp_path / "other", seed=1, lr=2e-3)
    out = tmp_path / "two.html"
    result = CliRunner().invoke(
        app, ["train", "report", str(made.path), "--beside", str(other.path), "--out", str(out)]
    )
    assert (result.exit_code, result.stdout) == (0, f"{out}\n")
    page = Page(out.read_text())
    for letter, run in (("A", made), ("B", other)):
        present = run.present()
        wanted = [present[step]["loss"] for step in range(STEPS)]
        got = page.line(f"{letter} training")["y"]
        assert [value is None for value in got] == [value is None for value in wanted]
        told = [dict(zip(page.rows["loss"][0], row, strict=True)) for row in page.rows["loss"][1:]]
        assert [row["steps"] for row in told] == [f"{5 * place}–{5 * place + 4}" for place in range(12)]
        means = [statistics.fmean(loss for loss in wanted[5 * n : 5 * n + 5] if loss is not None) for n in range(12)]
        assert [row[f"{letter} loss, mean"] for row in told] == [f"{mean:.4f}" for mean in means]
        assert told[-1][f"{letter} held out"] == f"{run.rows[-1]['loss']:.4f}"
    for row in told:
        difference = float(row["B loss, mean"]) - float(row["A loss, mean"])
        assert float(row["B − A, loss"].replace("−", "-")) == pytest.approx(difference, abs=1.5e-4)
    assert page.rows["config"][1:] == [["optimizer.lr", "0.001", "0.002"]]
    assert (
        "The configs of their last starts are the same"
        in Page(render([open_run(str(made.path)), open_run(str(made.path))])).text
    )


def test_equal_files_give_equal_bytes(made: Made, tmp_path: Path) -> None:
    one, two = (Path(write_report(str(made.path), str(tmp_path / name))).read_bytes() for name in ("a", "b"))
    assert one == two


def test_a_run_of_an_earlier_version_is_shown(tmp_path: Path) -> None:
    with tarfile.open(Path(__file__).parents[1] / "data" / "old_runs.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    page = Page(Path(write_report(str(tmp_path / "train"))).read_text())
    rows = [json.loads(line) for line in (tmp_path / "train/metrics.jsonl").read_text().splitlines()]
    wanted = {row["step"] + 1: row["loss"] for row in rows if row["kind"] == "step"}
    line = page.line("training")
    assert line["x"]["step"] == sorted(wanted)
    assert line["y"] == pytest.approx([wanted[step] for step in sorted(wanted)], rel=1e-5)


def test_rows_without_attempts_and_times_are_shown(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.path, tmp_path / "run")
    rows = [{key: value for key, value in row.items() if key not in ("attempt", "time", "tokens")} for row in made.rows]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(Path(write_report(str(tmp_path / "run"))).read_text())
    assert page.line("training")["y"] == Page((made.path / "report.html").read_text()).line("training")["y"]
    assert "Where the time went" not in page.text


@pytest.mark.slow
def test_the_command_imports_no_torch(made: Made, tmp_path: Path) -> None:
    program = (
        "import sys; from quern.cli.main import main; sys.argv = ['quern', 'train', 'report', sys.argv[1], '--out', "
        "sys.argv[2], '--json']\ntry: main()\nexcept SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    out = tmp_path / "page.html"
    done = subprocess.run(
        [sys.executable, "-c", program, str(made.path), str(out)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, json.loads(done.stdout)) == (0, {"page": str(out)}), done.stderr


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_draws_every_chart(made: Made, page: Page) -> None:
    """In a window that all of them stand in; the policy is the page's own."""
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,9000",
         "--virtual-time-budget=5000", "--enable-logging=stderr", "--dump-dom", (made.path / "report.html").as_uri()],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    assert len(re.findall(r"<canvas", done.stdout)) == len(page.curves["charts"])
