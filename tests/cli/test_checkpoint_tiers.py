"""``quern checkpoint`` on a run whose tensor files are on its nodes and in its store: list, verify, prune, and what
refuses. Nodes and stores are folders whose files are moved and copied there by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quern.config import dump_yaml
from quern.errors import InputError
from quern.train.checkpoint.format.manifest import read_manifest
from quern.train.checkpoint.tools.reader import iter_weights, write_weights
from quern.train.config import TrainConfig
from support.checkpoint_commands import invoke, unreachable_store
from support.damage import flip
from support.train import checkpoint_case as CASE

STEPS = (10, 20, 30, 40)


def folder(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def checkpoint(run: Path, step: int) -> Path:
    return folder(run / "checkpoints", step)


def write(target: Path, *, seed: int, num_layers: int | None = None, **told: Any) -> None:
    """A whole checkpoint of which the manifest says what is ``told``."""
    shape = CASE.shape() if num_layers is None else CASE.shape(num_layers=num_layers)
    tensors = {name: CASE.numbers("weight", name, size, seed) for name, size in CASE.sizes(shape).items()}
    manifest = write_weights(str(target), shape, tensors)
    (target / "manifest.json").write_bytes(replace(manifest, **told).to_bytes())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 10 to 40, whole, with a store configured that is not there yet."""
    found = tmp_path / "run"
    (found / "checkpoints").mkdir(parents=True)
    for step in STEPS:
        write(checkpoint(found, step), seed=step, step=step, run="a" * 32)
    configure(found)
    return found


def configure(run: Path, **fields: Any) -> None:
    section = {"store": f"file://{run.parent}/store"} | fields
    config = {"run_dir": str(run), "data": [{"path": "x/tokens/web"}], "steps": 100, "checkpoint": section}
    (run / "config.yaml").write_text(dump_yaml(TrainConfig.model_validate_json(json.dumps(config))))


def upload(run: Path, *steps: int) -> Path:
    for step in steps:
        shutil.copytree(checkpoint(run, step), folder(run.parent / "store", step))
    return run.parent / "store"


def to_nodes(run: Path, step: int, *nodes: str) -> list[Path]:
    """Move the tensor file to the first node's disk, with a mirror on each further one."""
    file = checkpoint(run, step) / "__0_0.distcp"
    folders = [run.parent / node / f"step_{step:08d}" for node in nodes]
    for place in folders:
        place.mkdir(parents=True)
        shutil.copy(file, place)
    file.unlink()
    places = [
        {"host": f"host-{node}", "folder": str(place), "files": [file.name]}
        for node, place in zip(nodes, folders, strict=True)
    ]
    (checkpoint(run, step) / "places.json").write_text(json.dumps({"schema": 1, "nodes": places}))
    return [place / file.name for place in folders]


def steps(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in root.glob("step_*"))


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> str:
    return unreachable_store(monkeypatch)


# ---- list


def test_list_says_where_the_tensors_are(run: Path, as_json: Callable[..., Any]) -> None:
    to_nodes(run, 20, "n0", "n1")
    to_nodes(run, 30, "n0")
    shutil.rmtree(run.parent / "n0")  # another machine's
    (checkpoint(run, 30) / ".metadata").write_bytes(b"x")
    (checkpoint(run, 40) / "places.json").write_text("{}")
    rows = {row["step"]: row for row in as_json("list", run)["checkpoints"]}
    assert {step: (row["tensors"], row["valid"]) for step, row in rows.items()} == {
        10: ("run", True), 20: ("nodes", True), 30: ("nodes", False), 40: (None, False),
    }  # fmt: skip
    assert [problem.split(": expected")[0] for problem in rows[30]["problems"]] == [f"{checkpoint(run, 30)}/.metadata"]
    assert rows[40]["problems"] == [f"{checkpoint(run, 40)}/places.json: nodes: missing"]
    assert "stored" not in rows[10]
    lines = invoke("list", run).stdout.splitlines()
    assert [line.split()[-2:] for line in lines[1:4]] == [["run", "yes"], ["nodes", "yes"], ["nodes", "no"]]


def test_list_with_store_says_what_is_stored(run: Path, as_json: Callable[..., Any]) -> None:
    store = upload(run, *STEPS)
    shutil.rmtree(checkpoint(run, 20))
    (folder(store, 10) / "manifest.json").unlink()
    (folder(store, 40) / "manifest.json").write_text("{}")
    shutil.copytree(folder(store, 20), folder(store, 50))  # whose manifest is step 20's
    shutil.rmtree(folder(store, 30))
    write(folder(store, 30), seed=99, step=30)
    found = as_json("list", run, "--store")
    rows = {row["step"]: row for row in found["checkpoints"]}
    assert {step: (row["tensors"], row["stored"], row["valid"]) for step, row in rows.items()} == {
        10: ("run", "begun", True), 20: ("store", "yes", None), 30: ("run", "other", True),
        40: ("run", "damaged", True), 50: ("store", "damaged", False),
    }  # fmt: skip
    assert rows[20]["path"] == f"file://{store}/step_00000020"
    assert "step: expected 50" in rows[50]["problems"][0]
    assert (found["store"], found["store_error"]) == (f"file://{store}", None)
    result = invoke("list", run, "--store")
    table = [line.split() for line in result.stdout.splitlines()]
    assert table[0][-4:] == ["tensors", "stored", "valid", "notes"]
    assert [line[-1] for line in table[1:]] == ["yes", "yes", "yes", "yes", "no"]
    assert [line[-2:] for line in table[1:3]] == [["begun", "yes"], ["store", "yes"]]
    shutil.rmtree(store)
    assert {row["stored"] for row in as_json("list", run, "--store")["checkpoints"]} == {"no"}


def test_list_of_a_store(run: Path, as_json: Callable[..., Any], tmp_path: Path) -> None:
    store = upload(run, 10, 30)
    found = as_json("list", f"file://{store}")
    assert [(row["step"], row["stored"], row["abandoned"]) for row in found["checkpoints"]] == [
        (10, "yes", None), (30, "yes", None),
    ]  # fmt: skip
    assert found["run"] is None
    size = sum(path.stat().st_size for path in checkpoint(run, 10).iterdir() if path.name != "manifest.json")
    assert found["checkpoints"][0]["bytes"] == size
    assert "no checkpoints" in invoke("list", f"file://{tmp_path}/none").stderr
    back = {"kind": "rollback", "step": 10, "data_step": 10, "order": "a"}
    (run / "ledger.jsonl").write_text(json.dumps(back) + "\n")
    shutil.rmtree(checkpoint(run, 30))
    row = as_json("list", run, "--store")["checkpoints"][-2]
    assert (row["step"], row["tensors"]) == (30, "store")
    assert "went back to step 10" in row["abandoned"]


@pytest.mark.slow
def test_list_of_a_store_that_cannot_be_reached(run: Path, as_json: Callable[..., Any], unreachable: str) -> None:
    configure(run, store=unreachable)
    result = invoke("list", run, "--store", code=1)
    assert len(result.stdout.splitlines()) == 1 + len(STEPS)
    assert [line.split()[-2:] for line in result.stdout.splitlines()[1:]] == [["?", "yes"]] * len(STEPS)
    assert result.stderr.startswith("error: s3://bucket/run: ")
    assert "cannot be reached" in result.stderr
    assert result.stderr.count("\n") == 1
    found = as_json("list", run, "--store", code=1)
    assert [row["stored"] for row in found["checkpoints"]] == [None] * len(STEPS)
    assert "cannot be reached" in found["store_error"]
    assert "cannot be reached" in invoke("list", unreachable, code=1).stderr
    configure(run, store=None)
    assert "config.yaml: checkpoint.store: expected" in invoke("list", run, "--store", code=2).stderr


# ---- verify


@pytest.mark.slow
def test_verify_tells_what_is_elsewhere_from_damage(run: Path, as_json: Callable[..., Any]) -> None:
    source = checkpoint(run, 20)
    first, mirror = to_nodes(run, 20, "n0", "n1")
    assert invoke("verify", source).stdout.endswith(": valid\n")
    flip(first)
    out = invoke("verify", source).stdout.replace("\n", "")
    assert f"{source}: valid" in out
    assert f"{first}: expected SHA-256" in out
    assert out.endswith("(another copy is whole)")
    assert len(as_json("verify", source)["checkpoints"][0]["spoilt_copies"]) == 1
    shutil.rmtree(first.parent)
    assert invoke("verify", source).stdout.endswith(": valid\n")
    flip(mirror)
    result = invoke("verify", source, code=1)
    assert f"{mirror}: expected SHA-256" in result.stdout.replace("\n", "")
    assert result.stderr == "error: 1 of 1 checkpoints damaged\n"
    shutil.rmtree(mirror.parent)
    result = invoke("verify", source, code=1)
    lines = result.stdout.splitlines()
    assert lines == [
        f"{source}: not all on this machine",
        f"  {source}/__0_0.distcp: on no disk that this machine has"
        f" (node host-n0, {first.parent}, node host-n1, {mirror.parent})",
    ]
    assert result.stderr.startswith("error: 1 of 1 checkpoints not all on this machine (quern checkpoint fetch ")
    assert "damaged" not in result.output
    flip(checkpoint(run, 30) / "__0_0.distcp")
    found = as_json("verify", run, code=1)
    assert [(row["status"], row["valid"]) for row in found["checkpoints"]] == [
        ("valid", True), ("not all on this machine", False), ("damaged", False), ("valid", True),
    ]  # fmt: skip
    assert [len(row["elsewhere"]) for row in found["checkpoints"]] == [0, 1, 0, 0]
    flip(source / ".metadata")
    assert as_json("verify", source, code=1)["checkpoints"][0]["status"] == "damaged"


def test_verify_of_a_damaged_places_file(run: Path) -> None:
    to_nodes(run, 20, "n0")
    (checkpoint(run, 20) / "places.json").write_text('{"schema": 1, "nodes": 3}')
    out = invoke("verify", checkpoint(run, 20), code=1).stdout.replace("\n", "")
    assert "places.json: nodes: expected a list" in out
    assert "__0_0.distcp: missing" in out


@pytest.mark.slow
def test_verify_reads_a_store(run: Path, as_json: Callable[..., Any]) -> None:
    store = upload(run, *STEPS)
    url = f"file://{store}"
    found = as_json("verify", url)
    assert [row["path"] for row in found["checkpoints"]] == [f"{url}/step_{step:08d}" for step in STEPS]
    assert found["valid"]
    flip(folder(store, 20) / "__0_0.distcp")
    (folder(store, 30) / "__0_0.distcp").unlink()
    (folder(store, 40) / "manifest.json").write_text("{}")
    found = as_json("verify", url, code=1)
    assert [row["status"] for row in found["checkpoints"]] == ["valid", "damaged", "damaged", "damaged"]
    problems = [row["problems"] for row in found["checkpoints"]]
    assert [len(found) for found in problems] == [0, 1, 1, 1]
    assert problems[1][0].startswith(f"{url}/step_00000020/__0_0.distcp: expected SHA-256")
    assert problems[2] == [f"{url}/step_00000030/__0_0.distcp: no such file"]
    assert "schema: missing" in problems[3][0]
    invoke("verify", f"{url}/step_00000010")
    invoke("verify", f"{url}/step_00000020", code=1)
    assert "expected a store that has a checkpoint" in invoke("verify", f"{url}/none", code=2).stderr


def test_verify_of_a_store_looks_into_the_metadata(run: Path) -> None:
    """Every checksum is right, and the tensors are another model's."""
    (run.parent / "store").mkdir()
    write(folder(run.parent / "store", 7), seed=1, num_layers=1, step=7, model=CASE.shape())
    out = invoke("verify", f"file://{run.parent}/store", code=1).stdout.replace("\n", "")
    assert "step_00000007/.metadata: blocks.1." in out


@pytest.mark.slow
def test_verify_of_a_store_that_cannot_be_reached(unreachable: str) -> None:
    assert "cannot be reached" in invoke("verify", unreachable, code=1).stderr
    result = invoke("verify", f"{unreachable}/step_00000010", code=1)
    assert "1 of 1 checkpoints could not be read" in result.stderr
    assert "damaged" not in result.output


# ---- what needs all files in one folder


@pytest.mark.slow
def test_what_needs_the_tensors_says_where_they_are(run: Path, tmp_path: Path) -> None:
    to_nodes(run, 40, "n0")
    source, other = checkpoint(run, 40), checkpoint(run, 30)
    for arguments in (
        ("diff", source, other), ("diff", other, source), ("reshard", source, tmp_path / "out"),
        ("reshard", run, tmp_path / "out"), ("export-hf", run, tmp_path / "out"),
    ):  # fmt: skip
        result = invoke(*arguments, code=2)
        assert result.stderr.startswith(f"error: {source}: 1 file of tensors are on the run's nodes (host-n0:")
        assert "quern checkpoint fetch" in result.stderr
        assert result.stderr.count("\n") == 1
    with pytest.raises(InputError, match="quern checkpoint fetch"):  # sample's way
        next(iter_weights(str(source)))
    invoke("fetch", source, tmp_path / "together")
    assert "equal" in invoke("diff", tmp_path / "together", tmp_path / "together").stdout
    assert not (tmp_path / "out").exists()


# ---- prune


def test_prune_of_what_is_on_nodes(run: Path) -> None:
    for step in STEPS:
        to_nodes(run, step, "n0")
    shutil.rmtree(run.parent / "n0")
    flip(checkpoint(run, 40) / ".metadata")
    result = invoke("prune", run, "--keep-last", 1, "--keep-every", 0, "--yes")
    assert steps(run / "checkpoints") == [30, 40]
    assert "step_00000040/.metadata: expected SHA-256" in result.stderr.replace("\n", "")


@pytest.mark.slow
def test_prune_of_the_store(run: Path, as_json: Callable[..., Any]) -> None:
    store = upload(run, *STEPS)
    for step in (5, 6, 15, 50):
        shutil.copytree(folder(store, 10), folder(store, step))
        manifest = replace(read_manifest(str(checkpoint(run, 10))), step=step)
        (folder(store, step) / "manifest.json").write_bytes(manifest.to_bytes())
    (folder(store, 6) / "manifest.json").unlink()  # cut off
    configure(run, keep_last=2)
    found = as_json("prune", run, "--store", "--dry-run", "--keep-every", 15)
    assert {row["step"]: row["keep"] for row in found["store"]["checkpoints"]} == {
        5: False, 6: False, 10: False, 15: True, 20: False, 30: True, 40: True, 50: True,
    }  # fmt: skip
    assert found["store"]["removed"] == []
    assert steps(store) == [5, 6, 10, 15, 20, 30, 40, 50]
    shown = invoke("prune", run, "--store", "--dry-run", "--keep-every", 15).stdout
    assert "4 of 8 go from file://" in shown
    assert "6 goes, incomplete" in " ".join(shown.split())
    assert "--yes" in invoke("prune", run, "--store", "--keep-every", 15, code=2).stderr
    assert "; 4 from the store" in invoke("prune", run, "--store", "--keep-every", 15, "--yes").stdout
    assert steps(store) == [15, 30, 40, 50]
    assert steps(run / "checkpoints") == [30, 40]
    assert as_json("prune", run, "--store", "--yes", "--keep-every", 0)["store"]["removed"] == [15]


def test_prune_without_store_leaves_the_store(run: Path) -> None:
    store = upload(run, *STEPS)
    invoke("prune", run, "--keep-last", 1, "--keep-every", 0, "--yes")
    assert steps(run / "checkpoints") == [40]
    assert steps(store) == list(STEPS)


@pytest.mark.slow
def test_a_store_is_not_pruned_by_a_run_that_is_not_whole_or_not_its_own(run: Path, unreachable: str) -> None:
    store = upload(run, *STEPS)
    options = ("prune", run, "--store", "--keep-last", 1, "--keep-every", 0, "--yes")
    theirs = (folder(store, 40) / "manifest.json").read_bytes()
    for step in STEPS:
        flip(checkpoint(run, step) / "__0_0.distcp")
    assert "0 of 4 go from" in invoke(*options).stdout
    for step in STEPS:
        flip(checkpoint(run, step) / "__0_0.distcp")
    other = replace(read_manifest(str(checkpoint(run, 40))), run="b" * 32)
    (folder(store, 40) / "manifest.json").write_bytes(other.to_bytes())
    result = invoke(*options, code=2)
    assert f"holds the checkpoints of run {'b' * 32}, not those of run {'a' * 32}" in result.stderr
    configure(run, store=unreachable)
    assert "cannot be reached" in invoke(*options, code=1).stderr
    assert steps(run / "checkpoints") == list(STEPS)
    assert steps(store) == list(STEPS)
    configure(run)
    (folder(store, 40) / "manifest.json").write_bytes(theirs)
    invoke(*options)
    assert steps(store) == [40]


def test_list_of_a_folder_that_is_no_run(tmp_path: Path) -> None:
    assert "expected a training run: it has neither checkpoints/ nor" in invoke("list", tmp_path, code=2).stderr
    (tmp_path / "checkpoints").mkdir()
    assert "no checkpoints" in invoke("list", tmp_path).stderr
