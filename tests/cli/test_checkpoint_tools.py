"""``quern checkpoint diff``, ``reshard`` and ``prune``: what they print, what they refuse, how they exit."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from quern.config import dump_yaml
from quern.train.checkpoint.format.folder import FolderLock
from quern.train.checkpoint.format.manifest import read_manifest
from quern.train.checkpoint.tools.reader import iter_weights, verify, write_weights
from quern.train.config import CheckpointConfig, TrainConfig
from support.checkpoint_commands import invoke
from support.damage import flip
from support.programs import python
from support.train import checkpoint_case as CASE
from support.train.saves import CheckpointManager

REPOSITORY = Path(__file__).parents[2]


def weights(key: int) -> dict[str, torch.Tensor]:
    return {name: CASE.numbers("weight", name, size, key) for name, size in CASE.sizes(CASE.shape()).items()}


def write(path: Path, tensors: dict[str, torch.Tensor], **fields: Any) -> Path:
    """A weights-only checkpoint with the manifest's ``fields`` changed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    manifest = write_weights(str(path), CASE.shape(), tensors)
    (path / "manifest.json").write_bytes(replace(manifest, **fields).to_bytes())
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 10 to 50; the run went back from 50 to 30, which leaves 40 and 50."""
    folder = tmp_path / "run"
    for step in (10, 20, 30, 40, 50):
        write(folder / "checkpoints" / f"step_{step:08d}", weights(step), step=step)
    line = {"kind": "rollback", "step": 30, "data_step": 35, "order": "a"}
    (folder / "ledger.jsonl").write_text(json.dumps(line) + "\n")
    return folder


def configure(run: Path, **checkpoint: Any) -> None:
    config = {"run_dir": str(run), "data": [{"path": "x/tokens/web"}], "steps": 100, "checkpoint": checkpoint}
    (run / "config.yaml").write_text(dump_yaml(TrainConfig.model_validate_json(json.dumps(config))))


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*"))


# ---- diff


def test_equal_checkpoints_say_so_and_exit_with_0(tmp_path: Path, as_json: Callable[..., Any]) -> None:
    a = write(tmp_path / "a", weights(1))
    b = write(tmp_path / "b", weights(1), written_by={"quern": "[bold]other"}, layout={"tp": 2})
    count = len(weights(1))
    lines = invoke("diff", a, b).stdout.splitlines()
    assert lines[-2:] == [f"{count} of {count} tensors bitwise equal", "equal"]
    (written,) = [line for line in lines if line.startswith("written_by.quern")]
    assert "[bold]other" in written  # a manifest's text is no markup
    assert invoke("diff", a, b, "--no-moments").stdout.splitlines()[-2].endswith("; moments not compared")
    found = as_json("diff", a, b, "--moments")
    assert found["equal"]
    assert found["moments"]
    assert {fact["name"] for fact in found["facts"]} == {"layout.tp", "written_by.quern", "written_by.torch"} | (
        {"layout"} if "layout" in {fact["name"] for fact in found["facts"]} else set()
    )


def test_what_differs_is_shown_worst_first_and_exits_with_1(tmp_path: Path, as_json: Callable[..., Any]) -> None:
    ours, theirs = weights(1), weights(1)
    theirs["norm.weight"][2] = float("nan")
    theirs["embed.weight"][5, 1] += 1
    theirs["head.weight"][:2] *= 2
    a, b = write(tmp_path / "a", ours), write(tmp_path / "b", theirs, step=7)
    count = len(ours)
    result = invoke("diff", a, b, code=1)
    lines = result.stdout.splitlines()
    assert lines[-1] == "different"
    assert lines[-2].startswith(f"{count - 3} of {count} tensors bitwise equal")
    assert [line.split()[0] for line in lines if line.startswith("model.")] == [
        f"model.{name}" for name in sorted(
            ("norm.weight", "embed.weight", "head.weight"),
            key=lambda name: -float("inf") if name == "norm.weight" else -float(
                (ours[name] - theirs[name]).abs().max() / theirs[name].abs().max()
            ),
        )
    ]  # fmt: skip
    assert ["step", "0", "7"] in [line.split() for line in lines]
    found = as_json("diff", a, b, code=1)
    assert not found["equal"]
    first = found["tensors"][0]
    assert (first["name"], first["relative"], first["nans"]) == ("model.norm.weight", "inf", {"a": 0, "b": 1})
    by_name = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert by_name["model.head.weight"]["differing"] == 12
    assert len(found["tensors"]) == count
    assert found["facts"] == [{"name": "step", "state": True, "a": 0, "b": 7}]
    short = invoke("diff", a, b, "--top", 1, code=1).stdout
    assert "… and 2 more" in short
    assert "model.embed.weight" not in short


def test_weights_alone_are_compared_with_the_weights_of_a_trained_state(
    tmp_path: Path, as_json: Callable[..., Any]
) -> None:
    state = CASE.make(tmp_path)
    CASE.fill(state, 3, step=7)
    with CheckpointManager(str(tmp_path / "run"), CheckpointConfig()) as checkpoints:
        trained = checkpoints.save(7, state, CASE.position(7))
    same = write(tmp_path / "same", weights(3), encoding=read_manifest(trained.path).encoding)
    count = len(weights(3))
    lines = invoke("diff", same, trained.path).stdout.splitlines()
    assert lines[-2:] == [f"all {count} weights bitwise equal; optimizer state only in b", "equal"]
    assert not any(line.startswith(("optimizer.", "extra.")) for line in lines)
    found = as_json("diff", trained.path, same)
    assert (found["equal"], found["optimizer_only_in"], len(found["tensors"])) == (True, "a", count)
    assert not any(fact["state"] for fact in found["facts"])
    assert "step" in [fact["name"] for fact in found["facts"]]
    assert as_json("diff", same, same)["optimizer_only_in"] is None

    whole = invoke("diff", same, trained.path, "--moments", code=1).stdout.splitlines()
    assert whole[-2].startswith(f"{count} of ")
    assert whole[-1] == "different"
    assert any(line.startswith("optimizer.") for line in whole)

    other = write(tmp_path / "other", weights(3) | {"norm.weight": weights(4)["norm.weight"]})
    lines = invoke("diff", other, trained.path, code=1).stdout.splitlines()
    assert lines[-2:] == [f"{count - 1} of {count} weights bitwise equal; optimizer state only in b", "different"]
    another = write(tmp_path / "another", weights(3), encoding=None)
    assert as_json("diff", another, trained.path, code=1)["equal_tensors"] == count


def test_a_run_stands_for_its_newest_checkpoint(run: Path, as_json: Callable[..., Any]) -> None:
    found = as_json("diff", run, run / "checkpoints" / "step_00000030")
    assert found["a"] == found["b"]
    assert as_json("diff", run, run / "checkpoints" / "step_00000020", code=1)["equal_tensors"] == 0


def test_what_cannot_be_compared_exits_with_2(run: Path, tmp_path: Path) -> None:
    good, bad = run / "checkpoints" / "step_00000010", run / "checkpoints" / "step_00000020"
    assert "expected a checkpoint" in invoke("diff", good, tmp_path / "none", code=2).stderr
    os.truncate(bad / "__0_0.distcp", 100)
    assert "expected" in invoke("diff", good, bad, code=2).stderr
    (bad / "manifest.json").write_text("{}")
    result = invoke("diff", good, bad, "--json", code=2)
    assert result.stderr == f"error: {bad}/manifest.json: schema: missing\n"
    assert result.stdout == ""
    (run / "ledger.jsonl").write_text("no json\n{}\n")
    assert "line 1 is damaged" in invoke("diff", run, good, code=2).stderr


# ---- reshard


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "count"), [((), 1), (("--files", 5), 5), (("--file-size", "64KiB"), 1), (("--file-size", "1 GB"), 1)]
)
def test_reshard_writes_the_same_in_other_files(
    run: Path, tmp_path: Path, as_json: Callable[..., Any], options: tuple[Any, ...], count: int
) -> None:
    source = run / "checkpoints" / "step_00000030"
    assert f"files      {count}, of " in invoke("reshard", run, tmp_path / "out", *options).stdout
    made = as_json("reshard", source, tmp_path / "again", *options)
    assert made["source"] == str(source)
    assert made["step"] == 30
    assert not made["optimizer"]
    for out in ("out", "again"):
        files = {path.name: path.stat().st_size for path in (tmp_path / out).glob("*.distcp")}
        assert len(files) == count
        assert made["files"] == files
        assert verify(str(tmp_path / out)) == []
        found = dict(iter_weights(str(tmp_path / out)))
        assert all(torch.equal(found[name], tensor) for name, tensor in weights(30).items())
    assert as_json("diff", source, tmp_path / "out")["facts"] == []


def test_reshard_refuses_in_one_line_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ((run, run), "is already there"),
        ((run, tmp_path / "out", "--files", 2, "--file-size", "1GB"), "--files and --file-size: expected one of them"),
        ((run, tmp_path / "out", "--file-size", "many"), "--file-size: expected a size such as 1GiB"),
        ((run, tmp_path / "out", "--file-size", "-1GB"), "--file-size: expected a size such as 1GiB"),
        ((run, tmp_path / "out", "--file-size", "1KB"), "file size: expected at least 65536 bytes, got 1000"),
        ((tmp_path, tmp_path / "out"), "expected a checkpoint"),
    ):
        result = invoke("reshard", *arguments, code=2)
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
    file = run / "checkpoints" / "step_00000030" / "__0_0.distcp"
    flip(file, 900)
    assert "nothing was written" in invoke("reshard", run, tmp_path / "out", code=1).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# ---- upcycle


def test_upcycle_prints_the_model_that_a_run_is_given(run: Path, tmp_path: Path, as_json: Callable[..., Any]) -> None:
    keys = ("num_experts=4", "top_k=2", "normalize=true", "first_dense=1")
    first, comment, *lines = invoke("upcycle", run, tmp_path / "out", *keys).stdout.splitlines()
    made = as_json("upcycle", run / "checkpoints" / "step_00000030", tmp_path / "again", *keys, "--seed", 3)
    section = yaml.safe_load("\n".join(lines))
    assert made["training_config"] == {"init_from": str(tmp_path / "again"), **section}
    expected = {"num_experts": 4, "top_k": 2, "ffn_dim": 10, "normalize": True, "first_dense": 1, "score": "softmax"}
    assert expected.items() <= section["model"]["moe"].items()
    assert first.endswith("for a token, of step 30, weights only")
    assert f"init_from={tmp_path / 'out'} " in comment
    differing = as_json("diff", tmp_path / "out", tmp_path / "again", code=1)["tensors"]
    assert [tensor["name"] for tensor in differing if not tensor["equal"]] == ["model.blocks.1.ffn.router.weight"]
    assert (made["step"], made["optimizer"]) == (30, False)


def test_upcycle_refuses_in_one_line_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    for keys, message in (
        (("num_expert=4",), "moe: num_expert: unknown key; did you mean 'num_experts'?"),
        (("num_experts=four", "top_k=2"), "moe: num_experts: expected an integer, got"),
        (("4",), "override '4': expected key=value"),
        (("top_k=2",), "moe.num_experts: missing"),
        (("num_experts=4", "top_k=5", "normalize=true"), "moe.top_k: expected at most num_experts (4), got 5"),
        (("num_experts=4", "top_k=2"), "moe.normalize: expected true"),
    ):
        result = invoke("upcycle", run, tmp_path / "out", *keys, code=2)
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# ---- prune


def test_a_dry_run_says_what_would_go(run: Path, as_json: Callable[..., Any]) -> None:
    configure(run, keep_last=2)
    found = as_json("prune", run, "--dry-run")
    assert steps(run) == [10, 20, 30, 40, 50]
    rows = {row["step"]: row for row in found["checkpoints"]}
    assert [step for step, row in rows.items() if row["keep"]] == [20, 30]
    assert [step for step, row in rows.items() if row["abandoned"]] == [40, 50]
    assert [step for step, row in rows.items() if row["newest_whole"]] == [30]
    size = {step: sum(f.stat().st_size for f in Path(row["path"]).iterdir()) for step, row in rows.items()}
    assert {step: row["size"] for step, row in rows.items()} == size
    assert found["removable_bytes"] == size[10] + size[40] + size[50]
    assert (found["removed"], found["removed_bytes"], found["dry_run"]) == ([], 0, True)
    lines = invoke("prune", run, "--dry-run").stdout.splitlines()
    assert [" ".join(line.split()[3:]) for line in lines[1:6]] == [
        "goes", "stays", "stays, newest whole", "goes, abandoned", "goes, abandoned",
    ]  # fmt: skip
    assert lines[6].startswith("3 of 5 go, ")


@pytest.mark.parametrize(
    ("config", "options", "left"),
    [
        ({"keep_last": 1}, (), [30]),
        ({"keep_last": 1, "keep_every": 20}, (), [20, 30, 40]),
        ({"keep_last": 1, "keep_every": 20}, ("--keep-every", 0), [30]),
        ({"keep_last": 1}, ("--keep-last", 2, "--keep-every", 50), [20, 30, 50]),
        ({}, ("--keep-last", 9), [10, 20, 30]),
        (None, ("--keep-last", 1, "--keep-every", 10), [10, 20, 30, 40, 50]),
        (None, ("--keep-last", 1, "--keep-every", 0), [30]),
    ],
)
def test_prune_leaves_what_config_and_options_say(
    run: Path, as_json: Callable[..., Any], config: dict[str, Any] | None, options: tuple[Any, ...], left: list[int]
) -> None:
    if config is not None:
        configure(run, **config)
    found = as_json("prune", run, *options, "--yes")
    assert steps(run) == left
    assert [Path(path).name for path in found["removed"]] == [
        f"step_{step:08d}" for step in (10, 20, 30, 40, 50) if step not in left
    ]
    assert found["removed_bytes"] == found["removable_bytes"]
    assert not [name for name in os.listdir(run / "checkpoints") if name.endswith(".tmp")]
    assert all(verify(str(path)) == [] for path in (run / "checkpoints").glob("step_*"))
    assert as_json("prune", run, *options, "--yes")["removed"] == []


def test_the_newest_whole_checkpoint_stays(run: Path) -> None:
    for step in (30, 20):
        os.truncate(run / "checkpoints" / f"step_{step:08d}" / "__0_0.distcp", 10)
    result = invoke("prune", run, "--keep-last", 1, "--keep-every", 0, "--yes")
    assert steps(run) == [10, 30]
    assert "step_00000030/__0_0.distcp: expected" in result.stderr.replace("\n", "")
    os.truncate(run / "checkpoints" / "step_00000010" / "__0_0.distcp", 10)
    assert (
        "no checkpoint of the run's branch is whole"
        in invoke("prune", run, "--keep-last", 1, "--keep-every", 0, "--yes").stderr
    )
    assert steps(run) == [10, 30]


def test_prune_asks(run: Path, as_json: Callable[..., Any]) -> None:
    options = ("--keep-last", 1, "--keep-every", 0)
    assert "error: --yes: expected" in invoke("prune", run, *options, code=2).stderr  # no terminal
    invoke("prune", run, *options, "--json", code=2)
    assert steps(run) == [10, 20, 30, 40, 50]
    assert invoke("prune", run, "--keep-last", 9, "--keep-every", 10).exit_code == 0  # nothing goes: nobody is asked


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "code", "left"), [("n", 1, [10, 20, 30, 40, 50]), ("y", 0, [30])])
def test_prune_asks_at_a_terminal(run: Path, answer: str, code: int, left: list[int]) -> None:
    ours, theirs = pty.openpty()
    command = ["-m", "quern.cli.main", "checkpoint", "prune", str(run), "--keep-last", "1", "--keep-every", "0"]
    os.write(ours, f"{answer}\n".encode())
    try:
        done = subprocess.run(
            [python(), *command], stdin=theirs, capture_output=True, timeout=120, cwd=REPOSITORY, check=False
        )
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == code, done.stderr
    assert b"Remove 4 checkpoints?" in done.stderr
    assert steps(run) == left


HOLD = """
import sys, time
from quern.train.checkpoint.format.folder import FolderLock
lock = FolderLock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_run_that_a_trainer_has_open_is_left_alone(run: Path, as_json: Callable[..., Any]) -> None:
    options = ("--keep-last", 1, "--keep-every", 0)
    command = [sys.executable, "-c", HOLD, str(run / "checkpoints")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"held\n"
        result = invoke("prune", run, *options, "--yes", code=1)
        assert f"another trainer writes here (process {trainer.pid}" in result.stderr
        assert steps(run) == [10, 20, 30, 40, 50]
        assert as_json("prune", run, *options, "--dry-run")["removable_bytes"] > 0
        trainer.communicate(timeout=60)
    invoke("prune", run, *options, "--yes")
    assert steps(run) == [30]
    FolderLock(str(run / "checkpoints")).close()  # the command has let it go


def test_prune_names_what_it_cannot_read(run: Path, tmp_path: Path) -> None:
    assert "no such folder" in invoke("prune", tmp_path / "none", code=2).stderr
    assert not (tmp_path / "none").exists()
    result = invoke("prune", run, "--yes", code=2)
    assert result.stderr == (
        f"error: {run}/config.yaml: no such config file; give --keep-last and --keep-every to do without it\n"
    )
    (run / "ledger.jsonl").write_text("no json\n{}\n")
    assert "line 1 is damaged" in invoke("prune", run, "--keep-last", 1, "--keep-every", 0, "--yes", code=1).stderr
    assert steps(run) == [10, 20, 30, 40, 50]


def test_what_could_not_be_removed_is_said(
    run: Path, as_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quern.cli.checkpoint import tools as checkpoint_tools

    remove = checkpoint_tools.remove_folder

    def refuse_the_second(path: str, token: str) -> None:
        if path.endswith("20"):
            raise PermissionError(13, "Permission denied", path)
        remove(path, token)

    monkeypatch.setattr(checkpoint_tools, "remove_folder", refuse_the_second)
    found = as_json("prune", run, "--keep-last", 1, "--keep-every", 0, "--yes", code=1)
    assert steps(run) == [20, 30]
    assert found["problems"] == [f"{run}/checkpoints/step_00000020: Permission denied"]
    assert len(found["removed"]) == 3
    assert read_manifest(str(run / "checkpoints" / "step_00000020")).step == 20
