"""Files in the working folder are data: no process that quern starts imports one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quern import safe_path
from quern.data_pipeline.execution import ray_life

#: What the processes of quern import: its libraries, and modules of Python's own that they need.
NAMES = (
    "torch", "yaml", "pydantic", "fsspec", "numpy", "pyarrow", "hmac", "json", "random", "tempfile", "logging",
    "socket", "subprocess", "threading", "ray", "regex", "tiktoken", "lxml", "trafilatura", "xxhash",
)  # fmt: skip


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with a module of each name, which leaves a mark when it is imported."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / name)!r}, 'w').close()\nraise SystemExit('{name}')\n")
    return folder


def imported(hostile: Path) -> list[str]:
    return [name for name in NAMES if (hostile.parent / name).exists()]


def run(folder: Path, *command: str) -> None:
    """With the real Python of the environment: how it starts is the subject."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


QUERN = str(Path(sys.executable).with_name("quern"))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.ray
def test_ranks_writers_and_workers_import_nothing_of_the_working_folder(hostile: Path) -> None:
    """A data run, and a training run of two ranks with processes that write, mirror and upload its checkpoints; then
    of one process as a launcher starts it."""
    lines = [json.dumps({"id": str(n), "text": f"The {n} of the {n * 7} is the {n * n}. " * 4}) for n in range(60)]
    (hostile / "a.jsonl").write_text("\n".join(lines))
    (hostile / "data.yaml").write_text(json.dumps({
        "run_dir": "data", "workers": 1,
        "sources": [{"name": "s", "kind": "jsonl", "paths": "a.jsonl"}],
        "language": {"keep": None, "threshold": 0, "pre_skip": False},
        "quality": {"order": []}, "duplicates": {"near": False},
        "tokenize": {"encoding": "trained", "vocab_size": 300, "validation": 0},
    }))  # fmt: skip
    run(hostile, QUERN, "data", "run", "data.yaml")
    assert imported(hostile) == []
    (hostile / "train.yaml").write_text(json.dumps({
        "run_dir": "train", "data": [{"path": "data/tokens/s"}], "seq_len": 16, "global_batch": 2, "micro_batch": 1,
        "model": {"dim": 16, "num_layers": 1, "num_heads": 2, "ffn_dim": 16},
        "steps": 2, "schedule": {"warmup": 1}, "precision": "fp32", "device": "cpu", "metrics": {"live": False},
        "checkpoint": {"interval": 1, "mode": "process", "local": str(hostile / "local"), "store": f"file://{hostile}/store"},
        "validation": {"interval": 0},
    }))  # fmt: skip
    run(hostile, QUERN, "train", "train.yaml", "--nproc", "2")
    run(hostile, sys.executable, "-m", "quern.train", "train.yaml", "run_dir=alone", "checkpoint={interval: 1}")
    assert imported(hostile) == []
    assert (hostile / "alone" / "checkpoints" / "step_00000002").is_dir()


def test_a_program_and_a_worker_of_ray_are_given_no_working_folder(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("raise SystemExit('mine')")
    done = subprocess.run(safe_path.module("yaml.tokens"), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    job = ray_life._job()
    job._py_driver_sys_path.extend(["/home/somebody"])  # what Ray does as it connects
    assert job._get_proto_job_config().py_driver_sys_path == []


def test_a_folder_that_the_environment_names_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    other = str(tmp_path.parent)
    for first, named, left in (
        ("", "", [other]),
        (str(tmp_path), "", [other]),
        (str(tmp_path), str(tmp_path), [str(tmp_path), other]),
        ("/bin", "", ["/bin", other]),
    ):
        monkeypatch.setenv("PYTHONPATH", named)
        monkeypatch.setattr(sys, "path", [first, other])
        safe_path.leave_working_folder()
        assert (sys.path, os.environ["PYTHONSAFEPATH"]) == (left, "1")


def test_an_empty_place_of_the_environment_is_the_working_folder_too(hostile: Path) -> None:
    program = (
        "from quern.safe_path import leave_working_folder; leave_working_folder(); import yaml, os, subprocess, sys"
    )
    inner = "; subprocess.run([sys.executable, '-P', '-c', 'import yaml'], check=True)"
    for given in (":/nowhere", "/nowhere:", "/nowhere::/elsewhere", ":"):
        path = given.replace("/nowhere", os.path.dirname(os.path.dirname(safe_path.__file__)))
        run(hostile, "env", f"PYTHONPATH={path}", sys.executable, "-P", "-c", program + inner)
    assert imported(hostile) == []


def test_a_working_folder_that_was_removed_is_no_error(tmp_path: Path) -> None:
    command = (
        'cd "$0" && rmdir "$0" && "$1" -c "from quern.safe_path import leave_working_folder as l; l(); import yaml"'
    )
    (tmp_path / "gone").mkdir()
    run(tmp_path, "sh", "-c", command, str(tmp_path / "gone"), sys.executable)
