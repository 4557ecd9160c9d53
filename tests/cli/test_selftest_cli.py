"""``quern selftest``: what it prints, what it ends with, and that it sees a fault that is put into a copy of quern."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quern.cli.main import app
from quern.train.parity import check, compare
from quern.train.parity.layouts import LAYOUTS
from quern.train.parity.matrix import Case, quick
from quern.train.parity.published import PUBLISHED
from support.programs import python

ROOT = Path(__file__).resolve().parents[2]

#: After the last micro-batch, one norm's gradient is off by a millionth where tensors are split.
FAULT = """

_finish = Gradients.finish


def _falsely(self):
    _finish(self)
    if self.mesh.tp is not None:
        dict(self.model.named_parameters())["blocks.1.ffn_norm.weight"].grad.mul_(1 + 1e-6)


Gradients.finish = _falsely
"""
HANG = """

_train_case = train


def train(case, *others):
    if str(case) == "ddp2-none-x1-mask-untied-norm" and os.environ["RANK"] == "1":
        time.sleep(600)
    return _train_case(case, *others)
"""
DEATH = """

_train_case = train


def train(case, *others):
    if str(case) == "ddp2-none-x1-mask-untied-norm" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    if str(case) == "ddp2-none-x1-mask-untied-slim" and os.environ["RANK"] == "1":
        raise ValueError("no such bird")
    return _train_case(case, *others)
"""


def quern(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """With the quern that stands in ``folder``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [python(), "-m", "quern.cli.main", "selftest", "--device", "cpu", *arguments],
        cwd=folder, capture_output=True, text=True, check=False, env=environment, timeout=800,
    )  # fmt: skip


def chosen(*names: str) -> list[str]:
    return [part for name in names for part in ("--case", name)]


def entries(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    document = json.loads(done.stdout)
    assert list(document) == ["cases"]
    return {entry["case"]: entry for entry in document["cases"]}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "quern", tmp_path / "copy" / "quern", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "copy"


def test_where_torch_cannot_split_a_backward_its_cases_are_skipped_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "why_no_split_backward", lambda: "torch 2.11.0 cannot do")
    case = Case("pp2", schedule="zbv_zero_bubble")
    (result,) = check.check_cases([case])
    assert (result.case, result.skipped) == (case, "splits the backward pass, which torch 2.11.0 cannot do")
    assert result.passed is None


def test_an_unknown_case_is_refused() -> None:
    done = CliRunner().invoke(app, ["selftest", "--case", "fsdp2"])
    assert done.exit_code == 2
    assert "--case: expected the name of a case" in done.stderr


@pytest.mark.slow
def test_the_table_has_a_line_for_each_case() -> None:
    cases = chosen("alone-none-x3-mask-untied-six", "ddp2-none-x1-mask-untied-slim")
    done = CliRunner().invoke(app, ["selftest", "--device", "cpu", *cases])
    assert done.exit_code == 0, done.stderr
    title, *rows, summary = done.stdout.splitlines()
    assert title.split() == ["case", "ranks", "worst", "seconds"]
    assert [row.split()[0] for row in rows] == ["alone-none-x3-mask-untied-six", "ddp2-none-x1-mask-untied-slim"]
    assert all(row.split()[4] == "passed" and 0 <= float(row.split()[2]) < 1e-10 for row in rows)
    assert summary.startswith("2 of 2 cases passed on cpu in ")


@pytest.mark.long
def test_a_fault_is_seen_and_a_rank_that_dies_fails_its_case_alone(copy: Path) -> None:
    with (copy / "quern/parallel/gradients.py").open("a") as file:
        file.write(FAULT)
    with (copy / "quern/train/parity/run.py").open("a") as file:
        file.write("import os\n" + DEATH)
    names = ["tp2-none-x1-mask-untied-six"]
    names += [f"ddp2-none-x1-mask-untied-{sizes}" for sizes in ("six", "norm", "slim")]
    names += ["ddp2-full-x1-mask-untied-six"]
    done = quern(copy, "--json", *chosen(*names))
    assert done.returncode == 1, done.stderr
    found = entries(done)
    faulty, whole, killed, raised, after = (found[name] for name in names)
    assert whole["passed"]
    assert after["passed"]
    assert "exit code -9" in "\n".join(killed["problems"])
    assert "ValueError: no such bird" in "\n".join(raised["problems"])
    assert [case["worst_ratio"] for case in (killed, raised)] == [None, None]
    assert faulty["layout"] == "tp2"
    assert faulty["world_size"] == 2
    assert faulty["worst"]["first gradient"]["tensor"] == "blocks.1.ffn_norm.weight step 0"
    assert faulty["worst"]["first gradient"]["ratio"] == pytest.approx(1e-6, rel=1e-3)
    assert not any(case["passed"] for case in (killed, raised, faulty))
    said = done.stderr.splitlines()[-1]
    assert "3 of 5 cases differ" in said
    assert "blocks.1.ffn_norm.weight" in said  # the first case's


def test_without_names_it_is_the_quick_set_and_what_differs_stands_in_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Case] = []

    def differ(cases: Sequence[Case], **options: Any) -> Iterator[check.Result]:
        asked.extend(cases)
        for case, problems in zip(cases, (["lr of step 1: 2.0e-01, expected at most 1e-15"], []), strict=False):
            yield check.Result(case, 1.0, compare.Comparison({"lr": (0.2, "step 1")}, problems))

    monkeypatch.setattr(check, "check_cases", differ)
    done = CliRunner().invoke(app, ["selftest", "--device", "cpu"])
    assert done.exit_code == 1
    assert asked == quick()
    _, failed, why, passed, summary = done.stdout.splitlines()
    assert failed.endswith("FAILED")
    assert why == "lr of step 1: 2.0e-01, expected at most 1e-15"
    assert passed.endswith("passed")
    assert summary.startswith("1 of 2 cases passed on cpu in ")
    assert f"1 of 2 cases differ from one process; the first: {asked[0]}: {why}" in done.stderr


@pytest.mark.parametrize("fails", [False, True])
def test_a_passed_case_says_which_published_faults_it_excludes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fails: bool
) -> None:
    def judge(cases: Sequence[Case], **options: Any) -> Iterator[check.Result]:
        for case in cases:
            bad = fails and case.layout == "ring2"
            yield check.Result(case, 1.0, compare.Comparison({"loss": (0.2, "step 1")}, ["loss of step 1"] * bad))

    monkeypatch.setattr(check, "check_cases", judge)
    asked = ["selftest", "--device", "cpu", "--layouts", "published"]
    said = CliRunner().invoke(app, asked).stdout.splitlines()
    CliRunner().invoke(app, [*asked, "--json"])
    told = {entry["case"]: entry for entry in json.loads(capfd.readouterr().out)["cases"]}
    assert told.keys() == PUBLISHED.keys()
    assert {name: entry["published"] for name, entry in told.items()} == PUBLISHED
    passed = [name for name in told if not (fails and "ring2" in name)]
    below = [
        line for name in passed for line in (name, *(f"  excludes {at}: {it}" for at, it in PUBLISHED[name].items()))
    ]
    shown = [line for line in said if line.startswith("  excludes ") or line.endswith("  passed")]
    assert [line if line.startswith(" ") else line.split()[0] for line in shown] == below


@pytest.mark.long
def test_a_rank_that_hangs_fails_its_case_alone(copy: Path) -> None:
    check = copy / "quern/train/parity/check.py"
    text = check.read_text()
    assert text.count("TIMEOUT_S = 180.0") == 1
    check.write_text(text.replace("TIMEOUT_S = 180.0", "TIMEOUT_S = 40.0"))
    with (copy / "quern/train/parity/run.py").open("a") as file:
        file.write("import os, time\n" + HANG)
    names = [f"ddp2-none-x1-mask-untied-{sizes}" for sizes in ("norm", "six")]
    done = quern(copy, "--json", *chosen(*names))
    assert done.returncode == 1, done.stderr
    hung, after = (entries(done)[name] for name in names)
    assert hung["passed"] is False
    assert "30000ms" in "\n".join(hung["problems"])  # its peer, in three quarters of the time
    assert after["passed"] is True


@pytest.mark.exhaustive
def test_the_quick_set_passes() -> None:
    done = quern(ROOT, "--json")
    assert done.returncode == 0, done.stderr
    found = entries(done)
    assert set(found) == {str(case) for case in quick()}
    assert {entry["world_size"] for entry in found.values()} == set(range(1, 9))
    assert {entry["layout"].partition("-")[0] for entry in found.values()} == set(LAYOUTS)
    assert all(entry["passed"] is True and entry["worst_ratio"] <= 1e-10 for entry in found.values())
