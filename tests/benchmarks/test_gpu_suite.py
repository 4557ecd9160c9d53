"""The GPU suite's runner, with rows of a few lines: what is kept, what is run again, what a bad row costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import plan
import pytest
import runner
import suite
import wheels
from runner import Row

GPU = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
FAKE = """
import os, signal, subprocess, sys, time
from parts import SkipError

def counted(spec):
    with open(spec["count"], "a") as file:
        file.write("x")
    return [{"seconds": 3.0}]

def raises(spec):
    print("before")
    raise ValueError("why it failed")

def beyond(spec):
    return [{"what": "near", "error": 1e-9, "passes": True}, {"what": "far", "error": 0.5, "passes": False}]

def skips(spec):
    raise SkipError("needs a moon")

def killed(spec):
    os.kill(os.getpid(), signal.SIGKILL)

def leaves(spec):
    os._exit(0)

def hangs(spec):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(spec["pid"] + ".partial", "w") as file:
        file.write(str(child.pid))
    os.rename(spec["pid"] + ".partial", spec["pid"])
    time.sleep(600)

def describe(spec):
    return [{"device": spec["device"].upper() + " 1", "torch": "2.11.0+cu130"}]
"""
ABOUT = {"machine": {"device": "GPU 1", "torch": "2.11.0"}, "code": "abc", "small": True}


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "gpu_fake.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    return tmp_path


def row(function: str, limit_s: float = 30, **spec: Any) -> Row:
    return Row("products", function, f"gpu_fake:{function}", spec, limit_s)


def run(folder: Path, *rows: Row, seconds: float = 60, again: bool = False) -> runner.Left:
    return runner.run(rows, folder, ABOUT, seconds=seconds, again=again, tell=lambda text: None)


@pytest.mark.slow
def test_a_row_with_a_result_is_not_run_again(fake: Path) -> None:
    count = fake / "count"
    one = row("counted", count=str(count))
    assert run(fake / "out", one) == runner.Left([], [])
    place = fake / "out" / "products" / "counted.json"
    found = json.loads(place.read_text())
    assert (found["measures"], found["error"], found["code"]) == ([{"seconds": 3.0}], None, "abc")
    run(fake / "out", one)
    assert count.read_text() == "x"
    run(fake / "out", one, again=True)
    assert count.read_text() == "xx"
    place.rename(place.with_name("counted.json.7.partial"))  # as a power cut leaves it
    run(fake / "out", one)
    assert count.read_text() == "xxx"
    run(fake / "elsewhere", one)
    assert count.read_text() == "xxxx"
    assert sorted(path.name for path in place.parent.iterdir()) == [
        "counted.json", "counted.json.7.partial", "counted.log",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_bad_row_costs_its_row_and_says_why(fake: Path) -> None:
    count = fake / "count"
    rows = [row(name) for name in ("raises", "killed", "beyond", "leaves", "skips")]
    left = run(fake / "out", *rows, row("counted", count=str(count)))
    assert count.read_text() == "x"
    reasons = {found["row"]: found["error"] for found in left.failed}
    assert reasons == {
        "raises": "ValueError: why it failed",
        "killed": "was ended by SIGKILL",
        "beyond": "1 of 2 beyond the bound: what far, error 0.5",
        "leaves": "ended with code 0 and no result",
    }
    folder = fake / "out" / "products"
    assert json.loads((folder / "skips.json").read_text())["skipped"] == "needs a moon"
    assert (folder / "raises.log").read_text().startswith("before\nTraceback")
    assert len(json.loads((folder / "beyond.json").read_text())["measures"]) == 2
    assert [found["row"] for found in run(fake / "out", *rows).failed] == list(reasons)  # of the call before


@pytest.mark.long
def test_nothing_that_a_row_has_started_outlives_it(fake: Path) -> None:
    pid = fake / "pid"
    left = run(fake / "out", row("hangs", 2, pid=str(pid)))
    assert [found["error"] for found in left.failed] == ["took longer than 2 s"]
    state = Path("/proc", pid.read_text(), "stat")
    for _ in range(200):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the child still runs")


@pytest.mark.slow
def test_a_row_that_does_not_fit_is_not_begun(fake: Path) -> None:
    count = fake / "count"
    short, long = row("counted", 20, count=str(count)), row("skips", 90)
    left = run(fake / "out", long, short, seconds=30)
    assert (left.failed, left.waiting) == ([], [long])
    assert not (fake / "out" / "products" / "skips.json").exists()
    assert run(fake / "out", short, long, seconds=100) == runner.Left([], [])
    assert count.read_text() == "x"


@pytest.fixture
def main(fake: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The suite with rows that are given, on a machine that is made up; its exit code."""

    def call(rows: list[Row], *arguments: str) -> int:
        monkeypatch.setattr(plan, "rows", lambda device, small: rows)
        monkeypatch.setattr(runner, "ask", lambda device: ABOUT["machine"])
        return suite.main(["--out", str(fake / "out"), "--device", "cpu", "--small", *arguments])

    return call


@pytest.mark.slow
def test_exit_codes_say_whether_to_go_on(main: Any, fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, long = row("counted", count=str(fake / "count")), row("raises"), row("skips", 900)
    assert main([good]) == 0
    assert main([good, bad, long]) == 3  # of what remains and what has failed, what remains
    said = capsys.readouterr().out
    assert "1 rows remain, which 9 minutes did not suffice for: products / skips" in said
    assert f"go on: python benchmarks/gpu/suite.py --out {fake / 'out'} --device cpu --small" in said
    assert "--minutes 15.5" in said
    assert main([good, bad]) == 1
    assert "failed: products / raises: ValueError: why it failed" in capsys.readouterr().out
    assert main([good, bad], "--row", "counted") == 0
    assert (fake / "count").read_text() == "x"
    assert main([good], "--row", "nothing") == 2
    (found,) = [path for path in (fake / "out").iterdir() if path.is_dir()]
    assert found.name == f"gpu-1_torch-2.11.0_{runner.source()}_small"
    assert "counted" in (fake / "out" / "table.md").read_text()


def test_what_is_missing_is_named_before_anything_runs(main: Any, fake: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(wheels, "missing", lambda parts: {"pydantic": list(parts), "pyarrow": ["train", "syncs"]})
    assert main([row("counted", count=str(fake / "count"))]) == 2
    said = capsys.readouterr().err
    assert "pydantic==" in said
    assert "pyarrow==" in said
    assert not (fake / "count").exists()
    assert not (fake / "out").exists()


def test_a_machine_that_does_not_answer_begins_nothing(fake: Path, monkeypatch: Any, capsys: Any) -> None:
    measure = runner._measure

    def raising(row: Row, log: Any) -> dict[str, Any]:
        assert row.function == "parts.machine:describe"
        return measure(Row(row.part, row.name, "gpu_fake:raises", row.spec, 30), log)

    monkeypatch.setattr(runner, "_measure", raising)
    assert suite.main(["--out", str(fake / "out"), "--part", "products"]) == 2
    assert "--device cuda: ValueError: why it failed" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_parent_imports_no_torch(device: str) -> None:
    code = "import sys, suite; suite.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code, "--list", "--device", device], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(GPU)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    listed = done.stdout.splitlines()
    assert any(line.startswith("train / bf16: at most") for line in listed)
    assert ("attention / varlen, bfloat16: needs CUDA" in listed) == (device == "cpu")


def test_every_row_has_a_place_of_its_own_and_ends_within_a_call() -> None:
    for device, small in (("cuda", False), ("cuda", True), ("cpu", True)):
        rows = plan.rows(device, small)
        assert len({runner.place_of(row, Path()) for row in rows}) == len(rows)
        assert all(row.limit_s <= 540 for row in rows)
        assert {row.part for row in rows} == set(plan.PARTS) == set(wheels.NEEDS)
        assert all((GPU / f"{row.function.partition(':')[0].replace('.', '/')}.py").is_file() for row in rows)
        json.dumps([dict(row.spec) for row in rows])


def test_the_source_is_the_commit_or_what_the_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "checkout"
    for folder in runner.SOURCES:
        (root / folder).mkdir(parents=True)
    file = root / "quern" / "a.py"
    file.write_text("1\n")
    monkeypatch.setattr(runner, "ROOT", root)
    bare = runner.source()
    assert bare.startswith("files-")

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", str(root), *who, *arguments], capture_output=True, text=True, check=True
        ).stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    assert runner.source() == git("rev-parse", "HEAD")[:12]
    file.write_text("2\n")
    assert runner.source().startswith("files-")
    assert runner.source() != bare
    file.write_text("1\n")
    assert runner.source() == git("rev-parse", "HEAD")[:12]
    (root / "notes.txt").write_text("no source\n")
    assert runner.source() == git("rev-parse", "HEAD")[:12]
