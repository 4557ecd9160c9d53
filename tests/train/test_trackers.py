"""Trackers hold the numbers of metrics.jsonl, by their own libraries; none that fails or hangs holds up a run.

What a run leaves in the trackers is written by real trainers: one that is killed (SIGKILL), resumed, rolled back and
forked.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quern.errors import InputError
from quern.train.config import MetricsConfig
from quern.train.fork import fork
from quern.train.trackers.backends import BACKENDS, Opening
from quern.train.trackers.board import branch_folder, numbers_of
from quern.train.trackers.branches import Branch, Parent, State, branch_at, parent_of_fork, state_path
from quern.train.trackers.trackers import check_installed
from support.train import run_case as case
from support.train.tracker_case import idle, lines, state

Points = dict[int, dict[str, float]]


# --- what each has of a run ------------------------------------------------------------------------------------------


def mlflow_points(ident: str) -> tuple[Points, dict[str, str], dict[str, str]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    run = client.get_run(ident)
    found: Points = {}
    for name in run.data.metrics:
        history = client.get_metric_history(ident, name)
        steps = [metric.step for metric in history]
        assert steps == sorted(set(steps)), f"{name}: goes backwards"
        for metric in history:
            found.setdefault(metric.step, {})[name] = metric.value
    return found, run.data.tags, run.data.params


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline run: W&B's protocol buffers in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def wandb_points(run: Path, ident: str) -> tuple[Points, list[Any]]:
    found: Points = {}
    others = []
    last = step = -1
    for path in sorted(run.glob(f"trackers/wandb/offline-run-*-{ident}/*.wandb")):
        for record in wandb_records(path):
            if record.WhichOneof("record_type") != "history":
                others.append(record)
                continue
            row = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
            assert row["_step"] == last + 1, "a row is missing, or two have one number"
            assert row["step"] >= step, "goes backwards"
            last, step = int(row["_step"]), int(row["step"])
            numbers = {name: float(value) for name, value in row.items() if not name.startswith("_") and name != "step"}
            found.setdefault(step, {}).update(numbers)
    return found, others


def expected(run: Path, attempts: dict[int, range]) -> Points:
    """By hand from metrics.jsonl: of each start, the steps that it was the first to do on its branch."""
    found: Points = {}
    for row in lines(run):
        if row["kind"] != "step" or row["step"] not in attempts.get(row["attempt"], ()):
            continue
        own = found.setdefault(row["step"], {})
        for name in ("loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_time_s", "skipped", "loss_spike"):
            if row[name] is not None:
                own[f"train/{name}"] = float(row[name])
        for name, loss in row["losses_by_source"].items():
            own[f"losses_by_source/{name}"] = loss
    return found


PROGRAM = """
import json, os, signal, sys
from support.train import run_case as case
from support.train.tracker_case import idle, lines, state
run, paths, kill_at, changes = json.loads(sys.argv[1])
def factor(data_step):
    if kill_at is not None and data_step == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    return case.nan_at_5(data_step)
case.live(case.settings(run, paths, **changes), factor=factor)
"""


def train(run: Path, paths: list[str], kill_at: int | None = None, **changes: Any) -> int:
    """A trainer in a process of its own; SIGKILL in step ``kill_at``. Step 5 is skipped: its gradient is NaN."""
    given = json.dumps([str(run), paths, kill_at, changes])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run([sys.executable, "-c", PROGRAM, given], env=environment, check=False).returncode


@pytest.mark.long
@pytest.mark.parametrize("name", ["mlflow", "wandb", "trackio"])
def test_a_tracker_has_the_metrics_of_every_branch(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    for variable, value in {
        "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": f"{tmp_path}/trackio", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(variable, value)
    pytest.importorskip(name)
    paths = case.write_corpus(tmp_path / "data", {"web": 60, "code": 25, "web.val": 20, "code.val": 10})[:2]
    run = tmp_path / "run"
    metrics = {"trackers": [name], "project": "p", "tags": ["a b"], "trackers_timeout_s": 60}
    settings = {"metrics": metrics, "checkpoint": {"interval": 3}, "validation": {"interval": 4}}
    assert train(run, paths, kill_at=8, **settings) == -signal.SIGKILL
    idle(run, name, 8.0)  # what it had been given, up to the validation after 8 steps; step 8 was never reported
    assert train(run, paths, **settings) == 0  # from 6 on; 6 and 7 are done again
    assert train(run, paths, **settings, resume={"step": 6}, data_skip=2) == 0
    other = tmp_path / "fork"
    fork(str(run), 3, str(other), ["steps=5"])
    assert train(other, paths, **settings, steps=5) == 0

    first, second = state(run, name)["branches"]
    (third,) = state(other, name)["branches"]
    assert (second["parent"], second["step"]) == (first["id"], 6)
    assert (third["parent"], third["step"]) == (first["id"], 3)
    assert state(run, name)["group"] == state(other, name)["group"]
    wanted = [
        (run, first["id"], expected(run, {0: range(8), 1: range(8, 9)})),
        (run, second["id"], expected(run, {2: range(6, 9)})),
        (other, third["id"], expected(other, {1: range(3, 5)})),
    ]
    assert [sorted(points) for _, _, points in wanted] == [[*range(9)], [6, 7, 8], [3, 4]]
    validations = {
        row["step"]: row for row in reversed(lines(run)) if row["kind"] == "validation"
    }  # of the first start
    for folder, ident, points in wanted:
        if name == "mlflow":
            found, tags, params = mlflow_points(ident)
            assert tags["quern.group"] == state(run, name)["group"]
            assert tags["quern.tag.a b"] == "true"
            assert tags["quern.layout.pp"] == "1"
            assert params["seq_len"] == "32"
            if ident != first["id"]:
                assert (tags["mlflow.parentRunId"], tags["quern.parent_step"]) == (first["id"], str(min(points)))
            assert not [tag for tag in tags if tag.startswith("mlflow.source") or "git" in tag]
        elif name == "wandb":
            found, others = wandb_points(folder, ident)
            started = [record.run for record in others if record.WhichOneof("record_type") == "run"]
            assert {(own.project, own.run_group, tuple(own.tags), own.host) for own in started} == {
                ("p", state(run, name)["group"], ("a b",), "")
            }
            kinds = {record.WhichOneof("record_type") for record in others}
            assert not kinds & {"stats", "output", "output_raw", "artifact", "environment"}
            sent = [file.path for record in others for file in record.files.files]
            assert not [path for path in sent if "requirements" in path or "metadata" in path or path.endswith(".py")]
        else:
            found = trackio_points("p", ident)
        for step, numbers in points.items():
            same = {key: found[step].get(key) for key in numbers}
            assert same == numbers, (ident, step)
        assert {key for own in found.values() for key in own if key.startswith("checkpoint/")} >= {"checkpoint/begun"}
        if ident == first["id"]:
            assert found[5]["train/skipped"] == 1.0
            assert found[8]["validation/loss"] == validations[8]["loss"]
            assert found[8]["validation/web"] == validations[8]["sources"]["web"]["loss"]


def trackio_points(project: str, ident: str) -> Points:
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs(project, run=ident)
    steps = [row["step"] for row in rows]
    assert steps == sorted(steps), "goes backwards"
    found: Points = {}
    for row in rows:
        found.setdefault(int(row["step"]), {}).update({k: v for k, v in row.items() if isinstance(v, int | float)})
    return found


# --- branches, by hand -----------------------------------------------------------------------------------------------

MOVES = [
    {"kind": "start", "step": 0}, {"kind": "resume", "step": 6}, {"kind": "rollback", "step": 6},
    {"kind": "resume", "step": 8}, {"kind": "rollback", "step": 4},
]  # fmt: skip


def branch(ident: str, step: int, attempt: int, parent: str | None) -> Branch:
    return Branch(id=ident, step=step, attempt=attempt, parent=parent)


def after(attempt: int, *branches: Branch) -> State:
    return State(group="g", attempt=attempt, place=7.5, branches=branches)


FIRST, SECOND = branch("a", 0, 0, None), branch("b", 6, 2, "a")


@pytest.mark.parametrize(
    ("known", "attempt", "parent"),
    [
        (after(0, FIRST), 1, None),
        (after(1, FIRST), 2, Parent("a", 6)),
        (after(2, FIRST, SECOND), 3, None),
        (after(3, FIRST, SECOND), 4, Parent("a", 4)),
        (after(1, FIRST), 4, Parent("a", 4)),
        (after(3, FIRST, SECOND), 9, Parent("a", 4)),
        (after(4, FIRST, SECOND), 9, None),
    ],
)
def test_a_branch_leaves_the_run_that_did_the_step_before(known: State, attempt: int, parent: Parent | None) -> None:
    found = branch_at(known, MOVES, attempt)
    assert found == (None if parent is None else (parent.step, parent))


def test_the_first_branch_begins_where_the_start_did() -> None:
    assert branch_at(State(), MOVES, 0) == (0, None)
    assert branch_at(State(), MOVES, 3) == (8, None)


def test_a_fork_leaves_the_branch_that_its_checkpoint_is_of(tmp_path: Path) -> None:
    line = {"kind": "fork", "step": 7, "run": "trunk", "path": str(tmp_path)}
    assert parent_of_fork("wandb", MOVES) == (None, "")
    assert parent_of_fork("wandb", [*MOVES[:3], line]) == (Parent("trunk", 7), "")
    (tmp_path / "trackers").mkdir()
    later = branch("c", 4, 4, "a")
    Path(state_path(str(tmp_path), "wandb")).write_text(after(4, FIRST, SECOND, later).model_dump_json())
    assert parent_of_fork("wandb", [*MOVES[:3], line]) == (Parent("b", 7), "g")
    assert parent_of_fork("wandb", [*MOVES[:3], line | {"step": 6}]) == (Parent("a", 6), "g")
    assert parent_of_fork("wandb", [*MOVES[:2], line]) == (Parent("a", 7), "g")
    assert parent_of_fork("mlflow", [*MOVES[:2], line]) == (Parent("trunk", 7), "")


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"branches": [1]}', '{"group": 1}', '{"bytes": -5}', '{"place": true}', '{"recipe": "r"}',
     '{"branches": [{"id": "a", "step": 0, "attempt": 0}]}'],
)  # fmt: skip
def test_a_state_that_is_none_is_refused_by_its_path(text: str, tmp_path: Path) -> None:
    path = tmp_path / "wandb.json"
    path.write_text(text)
    with pytest.raises(InputError, match=rf"^{path}: ") as caught:
        State.read(str(path))
    assert "\n" not in str(caught.value)
    assert parent_of_fork("wandb", [*MOVES[:1], {"kind": "fork", "step": 0, "run": "t", "path": str(tmp_path)}])


def test_a_rollback_has_a_board_of_its_own_and_its_resumes_the_same() -> None:
    assert branch_folder("r", MOVES[:2]) == "r/tensorboard"
    assert branch_folder("r", MOVES[:3]) == branch_folder("r", MOVES[:4]) == "r/tensorboard/from_step_6.attempt_2"
    assert branch_folder("r", MOVES) == "r/tensorboard/from_step_4.attempt_4"


def test_a_resumed_board_shows_each_step_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from quern.train.trackers.board import Board

    for first, last, loss in ((0, 6, 1.0), (3, 8, 2.0)):
        with Board(str(tmp_path), first) as board:
            for step in range(first, last):
                board.draw({"kind": "step", "step": step, "loss": loss})
        time.sleep(1.1)  # names of event files have seconds, and are read in order of their names
    found = accumulator.EventAccumulator(str(tmp_path))
    found.Reload()
    shown = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert shown == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0), (6, 2.0), (7, 2.0)]


# --- numbers and keys ------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_line() -> None:
    row = {
        "kind": "step", "step": 3, "loss": None, "lr": 0.5, "skipped": True, "time": "t", "note": "text",
        "losses_by_source": {"web": 2.0, "x": None}, "ranks": {"work_s": {"min": 1.0}}, "slowest_rank": 1,
        "experts": {"unused": 2.0, "max_over_mean_of_layer": {"3": 1.5}, "counts": [[1, 2]]},
    }  # fmt: skip
    assert numbers_of(row) == {
        "train/lr": 0.5, "train/skipped": 1.0, "losses_by_source/web": 2.0, "ranks/work_s.min": 1.0,
        "train/slowest_rank": 1.0, "experts/unused": 2.0, "experts/max_over_mean_of_layer.3": 1.5,
    }  # fmt: skip
    held_out = {"kind": "validation", "step": 4, "loss": 3.0, "tokens": 5, "sources": {"web": {"loss": 3.0}}}
    assert numbers_of({**held_out, "sets": {"loss": {"loss": 1.0}}}) == {
        "validation/loss of all sources": 3.0, "validation/web": 3.0, "validation/loss": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"trackers": ["tensorboard"], "tensorboard": False}, "trackers: names tensorboard, and tensorboard is false"),
        ({"trackers": ["wandb", "wandb"]}, "trackers: expected each once, got wandb, wandb"),
        ({"project": "p"}, "project: expected only with trackers wandb, mlflow or trackio"),
        ({"trackers": ["tensorboard"], "tags": ["a"]}, "tags: expected only with trackers"),
        ({"trackers": ["wandb"], "run_name": "a\x1b[31m"}, "run_name"),
        ({"trackers": ["comet"]}, "trackers"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        MetricsConfig(**keys)


def test_a_config_of_before_has_the_digest_it_had() -> None:
    assert MetricsConfig().model_dump() == {"tensorboard": True, "live": True, "peak_tflops": None}
    assert MetricsConfig(trackers=("tensorboard",)).sent_to == ()


class Mlflow:
    """Stands in for MLflow: a client whose ``log_batch`` raises ``error`` while it has one."""

    def __init__(self, error: BaseException) -> None:
        self.error: BaseException | None = error
        self.runs: dict[str, list[Any]] = {}
        self.made = 0

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7")

    def create_run(self, place: str, run_name: str, tags: dict[str, str]) -> Any:
        self.made += 1
        self.runs[f"run{self.made}"] = []
        return SimpleNamespace(info=SimpleNamespace(run_id=f"run{self.made}"))

    def log_batch(self, ident: str, params: list[Any]) -> None:
        if self.error is not None:
            raise self.error
        self.runs[ident] += params

    def delete_run(self, ident: str) -> None:
        del self.runs[ident]


@pytest.mark.parametrize("error", [RuntimeError("503"), KeyboardInterrupt()], ids=["refused", "interrupted"])
def test_a_run_of_mlflow_whose_config_was_not_sent_is_removed(error: BaseException, monkeypatch: Any) -> None:
    client = Mlflow(error)
    names = {name: lambda *given: given for name in ("Param", "Metric", "RunTag")}
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(entities=SimpleNamespace(**names)))
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=lambda: client))
    opening = Opening("run", None, "p", "a", "g", (), {"lr": 0.5, "name": "x"}, {"layout": {"pp": 1}}, None)
    with pytest.raises(type(error)):
        BACKENDS["mlflow"](opening)
    assert (client.made, client.runs) == (1, {}), "no run without a config stays"
    client.error = None
    assert BACKENDS["mlflow"](opening).id == "run2"
    assert client.runs == {"run2": [("lr", "0.5"), ("name", "x")]}


def test_a_library_that_is_not_there_is_refused_with_the_command(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if not (Path(p) / "wandb").exists())])
    (tmp_path / "wandb").mkdir()  # W&B's folder of offline runs is no library
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(InputError, match=r"metrics.trackers: wandb is not installed; .*pip install 'quern\[wandb\]'$"):
        check_installed(["wandb"])
