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
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from quern.cli.main import app
from quern.errors import InputError
from quern.mixtures.order import Order
from quern.mixtures.phases import Phase
from quern.train.report import write_report
from quern.train.report.account import account
from quern.train.report.history import open_run
from quern.train.report.page import render
from quern.train.report.series import RANGES, thin
from quern.train.report.sources import tokens_by_source

STEPS, SEQ_LEN = 60, 16
ORDER = Order(
    [3, 1], [40, 9], 7, [Phase(30, (1, 2), 6, 6)], ids=["aa/web/1", "aa/books/1"], seq_len=SEQ_LEN, global_batch=4,
    block=4,
)  # fmt: skip
EVIL = '</script><script>alert(1)</script><img src=x onerror=alert(2)>" onload="x\u202e\x1b[31m'


class Made:
    """A run whose clock is ours. Attempt 0 is killed at 26 and goes on from 20, attempt 1 goes back from 45 to 40."""

    def __init__(self, path: Path, seed: int = 0, lr: float = 1e-3, source: str = "web") -> None:
        self.path, self.source, self.lr = path, source, lr
        self.random = np.random.default_rng(seed)
        self.now = datetime(2026, 11, 1, tzinfo=UTC)
        self.spent: Counter[str] = Counter()
        self.rows: list[dict[str, Any]] = []
        self.ledger: list[dict[str, Any]] = []
        path.mkdir()
        self.fact("order", hash=ORDER.hash, spec=ORDER.to_dict())
        self.attempt(0, "start", 0, 26, 0)
        self.wait(100, "between")
        self.attempt(1, "resume", 20, 45, 20)
        self.fact("stopped", step=45, signal="SIGTERM")
        self.wait(50, "between")
        self.attempt(2, "rollback", 40, STEPS, 47)
        self.fact("end", step=STEPS)
        config = f"steps: {STEPS}\noptimizer: {{lr: {lr}}}\nnote: {json.dumps(EVIL)}\n"
        (path / "config.yaml").write_text(config)
        (path / "run.json").write_text(json.dumps({"kind": "train", "layout": {"tp": 2}, "versions": {"quern": EVIL}}))
        self.write()

    def write(self) -> None:
        for name, rows in (("metrics", self.rows), ("ledger", self.ledger)):
            (self.path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def stamp(self) -> str:
        return self.now.isoformat(timespec="milliseconds")

    def wait(self, seconds: float, what: str) -> None:
        self.now += timedelta(seconds=seconds)
        self.spent[what] += seconds

    def fact(self, kind: str, **fields: Any) -> None:
        self.ledger.append({"time": self.stamp(), "kind": kind, **fields})

    def attempt(self, number: int, kind: str, first: int, stop: int, data: int) -> None:
        self.fact(kind, step=first, data_step=data, order=ORDER.hash)
        self.wait(8, "start")
        ends = {1: "again", 2: "abandoned"}.get(number + 1)
        lost = {0: 20, 1: 40}.get(number, STEPS)
        for step in range(first, stop):
            spike, bad = step in (12, 33), step == 50
            loss = 5 / (1 + step / 10) + float(self.random.normal(0, 0.1)) + 3 * spike + 0.001 * number
            seconds, waited = float(self.random.integers(500, 1500)) / 1000, 0.125
            self.wait(seconds - waited, "compute" if step < lost else str(ends))
            self.wait(waited, "data" if step < lost else str(ends))
            where = {"step": step, "data_step": data + step - first}
            self.rows.append({
                "kind": "step", **where, "attempt": number, "loss": None if bad else loss, "grad_norm": 1 + 2.0 * spike,
                "lr": self.lr * (1 + step), "tokens": 64 * (step + 1), "tokens_per_s": 64 / seconds,
                "step_time_s": seconds, "data_wait_s": waited, "memory_gib": 1.5, "mfu_full": None, "loss_spike": spike,
                "grad_norm_spike": False, "non_finite": bad, "skipped": step == 33, "slowest_rank": {"s": seconds},
                "source_loss": {self.source: loss + 1, "books": loss - 1}, "time": self.stamp(),
            })  # fmt: skip
            if spike:
                self.fact("spike", **where, loss=loss, grad_norm=3.0, loss_z=9.5, grad_norm_z=8.5)
            if step == 33:
                self.fact("skipped", **where, reason="spike")
            if bad:
                self.fact("non_finite", **where, loss=None, grad_norm=1.0)
            if (step + 1) % 15 == 0:
                self.wait(4, "validation")
                sources = {name: {"loss": loss + at, "tokens": 9} for at, name in enumerate((self.source, "books"))}
                self.rows.append({"kind": "validation", "step": step + 1, "loss": loss + 0.5 if not bad else None,
                                  "tokens": 18, "sources": sources, "time": self.stamp()})  # fmt: skip
            if (step + 1) % 10 == 0:
                name = f"step_{step + 1:08d}"
                self.fact("checkpoint", step=step + 1, data_step=data + step + 1 - first, name=name)
                self.wait(3, "saves")
                if step + 1 == 50:
                    self.fact("checkpoint_failed", step=50, why=EVIL)
                elif step + 1 < 30:
                    self.fact("good", step=step + 1, name=name)

    def present(self) -> dict[int, dict[str, Any]]:
        """By json alone, in the order of time: what each line of the ledger discards, what each attempt then writes."""
        rows = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
        moves = [entry for entry in self.ledger if entry["kind"] in ("start", "resume", "rollback")]
        found: dict[int, dict[str, Any]] = {}
        for number, move in enumerate(moves):
            found = {step: row for step, row in found.items() if step < move["step"]}
            found |= {row["step"]: row for row in rows if row["kind"] == "step" and row["attempt"] == number}
        return found


class Page(HTMLParser):
    """Tags, addresses, and the cells of tables by the section that they stand in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.policy = ""
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.rows: dict[str, list[list[str]]] = {}
        self._section, self._inside, self.text = "", "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags[tag] += 1
        self.addresses += [
            value for name, value in given.items() if name in ("src", "href", "action", "data", "srcset")
        ]
        self.handlers += [name for name in given if name.startswith("on")]
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        self._section = given["id"] if tag == "section" else self._section
        self._inside = tag if tag in ("script", "style", "td", "th") else self._inside
        if tag == "tr":
            self.rows.setdefault(self._section, []).append([])
        elif tag in ("td", "th"):
            self.rows[self._section][-1].append("")
        elif tag == "script":
            self.scripts.append("")
        elif tag == "style":
            self.styles.append("")

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside == "style":
            self.styles[-1] += data
        else:
            self.text += data
            rows = self.rows.get(self._section)
            if rows and rows[-1] and self._inside in ("td", "th"):
                rows[-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style", "td", "th"):
            self._inside = ""

    @property
    def curves(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.scripts[0])
        return found

    def line(self, label: str, chart: str = "loss-chart") -> dict[str, Any]:
        (found,) = (chart_ for chart_ in self.curves["charts"] if chart_["key"] == chart)
        (line,) = (line for line in found["series"] if line["label"] == label)
        return dict(line)


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
        told = dict(zip(head[:6], cells, strict=False))
        own = [present[step] for step in range(5 * place, 5 * place + 5)]
        losses = [row["loss"] for row in own if row["loss"] is not None]
        assert told["steps"] == f"{5 * place}–{5 * place + 4}"
        assert told["tokens"] == f"{own[-1]['tokens']:,}"
        assert told["loss, mean"] == f"{statistics.fmean(losses):.4f}"
        assert (told["least"], cells[4]) == (f"{min(losses):.4f}", f"{max(losses):.4f}")
        inside = [held[step]["loss"] for step in range(5 * place + 1, 5 * place + 6) if step in held]
        assert told["held out"] == (f"{inside[-1]:.4f}" if inside else "–")
        assert cells[6:8] == [f"{f([row['grad_norm'] for row in own]):.3f}" for f in (statistics.median, max)]
        assert cells[8] == f"{own[-1]['lr']:.3g}"
        assert cells[9] == f"{round(statistics.median(row['tokens_per_s'] for row in own)):,}"


def test_the_curve_is_the_present_branch_and_what_was_abandoned_a_line_of_its_own(made: Made, page: Page) -> None:
    present, line = made.present(), page.line("training")
    assert line["x"]["step"] == [step + 1 for step in range(STEPS)]
    for got, step in zip(line["y"], range(STEPS), strict=True):
        assert got == (present[step]["loss"] and pytest.approx(present[step]["loss"], rel=1e-5))
    left = page.line("abandoned, attempt 1")
    assert left["x"]["step"] == [41, 42, 43, 44, 45]
    wanted = [row["loss"] for row in made.rows if row.get("attempt") == 1 and row["step"] >= 40]
    assert left["y"] == pytest.approx(wanted, rel=1e-5)
    chart = next(chart for chart in page.curves["charts"] if chart["key"] == "loss-chart")
    assert [own["label"] for own in chart["series"]] == ["training", "abandoned, attempt 1", "held out"]
    held = {row["step"]: row["loss"] for row in made.rows if row["kind"] == "validation"}  # the later of two
    assert page.line("held out")["x"]["step"] == sorted(held) == [15, 30, 45, 60]
    assert page.line("held out")["y"] == pytest.approx([held[step] for step in sorted(held)], rel=1e-5)


def test_marks_stand_where_things_happened(page: Page) -> None:
    found: dict[str, list[int]] = {}
    for mark in page.curves["marks"]:
        found.setdefault(mark["kind"], []).append(mark["x"]["step"][0])
    assert {kind: sorted(steps) for kind, steps in found.items()} == {
        "restart": [20], "rollback": [40], "good": [10, 20], "saved": [30, 40, 60], "failed": [50], "spike": [13],
        "skipped": [34], "non_finite": [51],
    }  # fmt: skip
    assert [row[:4] for row in page.rows["attempts"][1:]] == [
        ["0", "start", "0", "26"], ["1", "resume", "20", "45"], ["2", "rollback", "40", "60"],
    ]  # fmt: skip
    assert [row[5:7] for row in page.rows["attempts"][1:]] == [["6", "0"], ["0", "5"], ["0", "0"]]
    assert [row[:2] for row in page.rows["steps"][1:]] == [
        ["12", "spike"],
        ["33", "spike, skipped"],
        ["50", "not finite"],
    ]
    assert "2 spikes; 1 step skipped; 1 step not finite; 6 steps done again" in page.text
    assert "5 steps abandoned" in page.text


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
    assert page.rows["checkpoints"][1:] == [
        ["10", "saved, removed since"], ["12", "on a branch that was left"], ["15", "on a branch that was left"]
    ]  # fmt: skip
    assert [mark["kind"] for mark in page.curves["marks"]] == ["restart", "rollback", "saved"]
    assert page.rows["steps"][1][-1] == "done again or abandoned"
    assert "12 steps, running, or ended without a record" in page.text


def test_the_time_is_where_it_was_spent(made: Made) -> None:
    spent = account(open_run(str(made.path)))
    assert spent is not None
    for name, seconds in spent.items():
        assert seconds == pytest.approx(made.spent[name], abs=0.01), name


def test_tokens_of_a_source_are_those_of_every_surviving_batch(made: Made) -> None:
    counted: Counter[int] = Counter()
    for row in made.present().values():
        counted.update(ORDER.batch(row["data_step"])[0].tolist())
    found = tokens_by_source(open_run(str(made.path)))
    assert [(own.name, own.tokens) for own in found] == [
        ("web", counted[0] * SEQ_LEN), ("books", counted[1] * SEQ_LEN)
    ]  # fmt: skip
    assert found[0].epochs == pytest.approx(counted[0] / 40)


def test_figures_that_this_version_does_not_know_are_drawn(made: Made, page: Page) -> None:
    titles = {chart["title"]: len(chart["series"]) for chart in page.curves["charts"]}
    assert titles == {
        "Loss": 3, "Held-out loss by source": 2, "Source loss": 2, "Learning rate": 1, "Gradient norm": 1,
        "Tokens a second": 1, "Seconds a step": 2, "Peak memory of rank 0, GiB": 1, "Slowest rank": 1,
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
        means = [row[1 + "AB".index(letter)] for row in page.rows["beside"] if row[0] in ("15", "60")]
        upto = [[value for value in wanted[max(0, stop - 50) : stop] if value is not None] for stop in (15, 60)]
        assert means == [f"{statistics.fmean(some):.4f}" for some in upto]
    assert ["optimizer.lr", "0.001", "0.002"] in page.rows["beside"]
    assert (
        "The configs of their last starts are the same"
        in Page(render([open_run(str(made.path)), open_run(str(made.path))])).text
    )
    tokens = [row[0] for row in page.rows["beside"] if row[0].replace(",", "").isdigit()]
    assert tokens == ["15", "30", "45", "60", "960", "1,920", "2,880", "3,840"]


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
    assert "time" not in page.rows


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
