"""``quern checkpoint fetch``: a checkpoint whose files are on nodes' disks and in a store, brought together.

Runs, nodes and stores are folders made by hand; what must arrive is compared byte by byte.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quern.train.checkpoint.format.manifest import FileRecord, Manifest
from support import checkpoint_commands
from support.checkpoint_commands import unreachable_store
from support.damage import flip
from support.train import checkpoint_case as CASE

REPOSITORY = Path(__file__).parents[2]
NAMES = (".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "config.yaml", "ledger.jsonl")
TENSORS = NAMES[1:4]


def contents(step: int) -> dict[str, bytes]:
    """Bytes by name; nothing of them is a tensor, which fetch does not know either."""
    stream = random.Random(step)
    sizes = {".metadata": 300, "__0_0.distcp": 3_000_000, "__1_0.distcp": 1, "__2_0.distcp": 0}
    return {name: stream.randbytes(sizes.get(name, 50)) for name in NAMES}


def manifest(step: int, files: dict[str, bytes], offset: int = 0) -> bytes:
    records = {name: FileRecord(hashlib.sha256(data).hexdigest(), len(data)) for name, data in files.items()}
    return Manifest(
        step=step, data_step=step, tokens=step, model=CASE.shape(), layout={}, precision="bf16", order="ab",
        ledger_offset=offset, corpus_versions={}, corpus_fingerprint="f", encoding=None, config_digest="c",
        optimizer=True, scalars={"scale": float("inf")}, written_by={}, files=records, run="a" * 32,
    ).to_bytes()  # fmt: skip


@dataclass
class Place:
    """A run on three nodes, of which this machine has the disks of two, and the run's store."""

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def store(self) -> Path:
        return self.root / "store"

    def checkpoint(self, step: int) -> Path:
        return self.run / "checkpoints" / f"step_{step:08d}"

    def node(self, number: int, step: int) -> Path:
        return self.root / f"nvme{number}" / "id" / f"step_{step:08d}"

    def save(self, step: int, *, offset: int = 0) -> dict[str, bytes]:
        """The small files in the run, file n of tensors on node n and on the next of the ring; node 2 is elsewhere."""
        files = contents(step)
        self.checkpoint(step).mkdir(parents=True)
        held: dict[int, list[str]] = {0: [TENSORS[0], TENSORS[2]], 1: [TENSORS[1], TENSORS[0]], 2: [TENSORS[2]]}
        for name in set(NAMES) - set(TENSORS):
            (self.checkpoint(step) / name).write_bytes(files[name])
        (self.checkpoint(step) / "manifest.json").write_bytes(manifest(step, files, offset))
        nodes = []
        for number, names in held.items():
            nodes.append({"host": f"h{number}", "folder": str(self.node(number, step)), "files": names})
            if number < 2:
                self.node(number, step).mkdir(parents=True)
                for name in names:
                    (self.node(number, step) / name).write_bytes(files[name])
        (self.checkpoint(step) / "places.json").write_text(json.dumps({"schema": 1, "nodes": nodes}))
        return files

    def upload(self, step: int, *, offset: int = 0) -> dict[str, bytes]:
        """Files of a store, as any tool would copy them there."""
        files = contents(step)
        folder = self.store / f"step_{step:08d}"
        folder.mkdir(parents=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        (folder / "manifest.json").write_bytes(manifest(step, files, offset))
        return files

    def configure(self, url: str | None = None) -> None:
        self.run.mkdir(exist_ok=True)
        url = url or f"file://{self.store}"
        (self.run / "config.yaml").write_text(f"steps: 10\ncheckpoint:\n  local: /nvme\n  store: {url}\n")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


invoke = partial(checkpoint_commands.invoke, "fetch")


@pytest.fixture
def as_json(as_json: Callable[..., Any]) -> Callable[..., Any]:
    return partial(as_json, "fetch")


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def whole(step: int, offset: int = 0) -> dict[str, bytes]:
    """What a checkpoint in one folder holds."""
    return {**contents(step), "manifest.json": manifest(step, contents(step), offset)}


def leftovers(place: Place) -> list[str]:
    return [path.name for path in place.root.iterdir() if path.name not in ("run", "store", "nvme0", "nvme1")]


def test_each_file_comes_from_the_first_that_has_it(place: Place, as_json: Callable[..., Any]) -> None:
    place.save(3)
    (place.node(0, 3) / TENSORS[2]).unlink()
    place.upload(3)
    place.configure()
    source = place.checkpoint(3)
    made = as_json(source, place.root / "out")
    assert held(place.root / "out") == whole(3)
    small = {name: ("checkpoint", None, str(source / name)) for name in set(NAMES) - set(TENSORS)}
    assert {row["name"]: (row["tier"], row["host"], row["path"]) for row in made["files"]} == small | {
        TENSORS[0]: ("node", "h0", str(place.node(0, 3) / TENSORS[0])),
        TENSORS[1]: ("node", "h1", str(place.node(1, 3) / TENSORS[1])),
        TENSORS[2]: ("store", None, f"file://{place.store}/step_00000003/{TENSORS[2]}"),
    }
    assert (made["step"], made["notes"], made["bytes"]) == (3, [], sum(map(len, contents(3).values())))
    lines = invoke(place.run, place.root / "again").stdout.splitlines()
    assert lines[0].split() == ["file", "size", "from", "where"]
    assert [line.split()[0] for line in lines[1:-1]] == sorted(NAMES)
    assert "node h1" in next(line for line in lines if TENSORS[1] in line)
    assert held(place.root / "again") == whole(3)


def test_a_copy_that_is_damaged_never_counts(place: Place, as_json: Callable[..., Any]) -> None:
    place.save(3)
    first = flip(place.node(0, 3) / TENSORS[0])
    made = as_json(place.run, place.root / "mirror")
    assert held(place.root / "mirror") == whole(3)
    (row,) = [row for row in made["files"] if row["name"] == TENSORS[0]]
    assert row["host"] == "h1"
    assert [note.split(": ")[0] for note in made["notes"]] == [first]
    flip(place.node(1, 3) / TENSORS[0])
    error = invoke(place.run, place.root / "none", code=1).stderr
    assert "nowhere whole" in error
    assert f"{first}: expected SHA-256" in error.replace("\n", "")
    assert leftovers(place) == ["mirror"]
    place.configure()
    place.upload(3)
    made = as_json(place.run, place.root / "stored")
    assert held(place.root / "stored") == whole(3)
    assert [row["tier"] for row in made["files"] if row["name"] == TENSORS[0]] == ["store"]
    assert len(made["notes"]) == 2
    flip(place.store / "step_00000003" / TENSORS[0])
    assert "the stored file is damaged" in invoke(place.run, place.root / "none", code=1).stderr
    assert sorted(leftovers(place)) == ["mirror", "stored"]


def test_a_small_file_that_is_torn_comes_from_the_store(place: Place, as_json: Callable[..., Any]) -> None:
    place.save(3)
    place.upload(3)
    place.configure()
    (place.checkpoint(3) / ".metadata").write_bytes(b"x")
    (place.checkpoint(3) / "config.yaml").unlink()
    made = as_json(place.run, place.root / "out")
    assert {row["name"] for row in made["files"] if row["tier"] == "store"} == {".metadata", "config.yaml"}
    assert held(place.root / "out") == whole(3)


def test_what_is_nowhere_is_named_with_what_each_place_says(place: Place) -> None:
    place.save(3)
    place.configure()
    (place.node(0, 3) / TENSORS[2]).write_bytes(b"longer")
    (place.node(0, 3) / TENSORS[0]).unlink()
    (place.node(1, 3) / TENSORS[0]).unlink()
    result = invoke(place.run, place.root / "out", code=1)
    lines = result.stderr.splitlines()
    assert lines[0] == TENSORS[0]
    at = lines.index(TENSORS[2])
    assert lines[at + 1 : at + 5] == [
        f"  {place.checkpoint(3)}/{TENSORS[2]}: missing",
        f"  {place.node(0, 3)}/{TENSORS[2]}: expected 0 bytes, has 6",
        f"  not on this machine (node h2, {place.node(2, 3)})",
        f"  file://{place.store}/step_00000003/{TENSORS[2]}: not there",
    ]
    assert lines[1] == f"  {place.checkpoint(3)}/{TENSORS[0]}: missing"
    assert lines[-1].startswith(f"error: {place.checkpoint(3)}: 2 of 6 files are nowhere whole, nothing was written; ")
    assert leftovers(place) == []
    (place.run / "config.yaml").unlink()
    assert (
        "  the run has no store that can be asked" in invoke(place.run, place.root / "out", code=1).stderr.splitlines()
    )


def test_of_a_run_the_newest_that_is_whole_is_taken(place: Place, as_json: Callable[..., Any]) -> None:
    for step in (3, 5, 7, 9):
        place.save(step)
    for number in (0, 1):
        (place.node(number, 7) / TENSORS[0]).unlink()
    shutil.copy(place.node(0, 3) / TENSORS[0], place.node(0, 5) / TENSORS[0])  # another's, of the same size
    shutil.copy(place.node(0, 3) / TENSORS[0], place.node(1, 5) / TENSORS[0])
    (place.run / "ledger.jsonl").write_text(
        json.dumps({"kind": "rollback", "step": 7, "data_step": 8, "order": "a"}) + "\n"
    )
    made = as_json(place.run, place.root / "out")
    assert held(place.root / "out") == whole(3)
    assert made["step"] == 3
    assert [note.split(": ")[1].rpartition("/")[2] for note in made["notes"]] == [
        "step_00000009", "step_00000007", "step_00000005",
    ]  # fmt: skip
    assert "the run went back to step 7" in made["notes"][0]
    assert as_json(place.run, place.root / "nine", "--step", 9)["step"] == 9
    assert held(place.root / "nine") == whole(9)
    assert "7: 1 of 6 files are nowhere whole" in invoke(place.run, place.root / "x", "--step", 7, code=1).stderr
    invoke(place.run, place.root / "x", "--step", 4, code=2)
    assert sorted(leftovers(place)) == ["nine", "out"]


def test_a_run_that_has_lost_checkpoints_takes_them_from_its_store(place: Place, as_json: Callable[..., Any]) -> None:
    place.save(3)
    place.upload(5)
    place.upload(7)
    place.configure()
    (place.store / "step_00000007" / "manifest.json").unlink()  # not uploaded to its end
    made = as_json(place.run, place.root / "out")
    assert held(place.root / "out") == whole(5)
    assert {row["tier"] for row in made["files"]} == {"store"}
    (place.checkpoint(3) / "manifest.json").write_text("{}")
    place.upload(3)
    assert as_json(place.run, place.root / "step_00000003", "--step", 3)["step"] == 3
    assert held(place.root / "step_00000003") == whole(3)
    shutil.rmtree(place.run / "checkpoints")
    assert as_json(place.run, place.root / "again", "--step", 5)["step"] == 5


@pytest.mark.slow
def test_a_store_by_its_address(place: Place, as_json: Callable[..., Any]) -> None:
    """Step 5 was saved, then the run went back behind it and saved 4, which is the newest."""
    url = f"file://{place.store}"
    place.upload(3, offset=100)
    place.upload(5, offset=200)
    place.upload(4, offset=300)
    assert as_json(url, place.root / "a")["step"] == 4
    assert held(place.root / "a") == whole(4, offset=300)
    assert as_json(url, place.root / "b", "--step", 5)["step"] == 5
    assert as_json(f"{url}/step_00000003", place.root / "c")["step"] == 3
    assert held(place.root / "c") == whole(3, offset=100)
    (place.store / "step_00000004" / TENSORS[0]).unlink()
    made = as_json(url, place.root / "d")
    assert made["step"] == 3
    assert any("step_00000004" in note and "no such file" in note for note in made["notes"])
    for arguments, message in (
        ((f"{url}/none", place.root / "x"), "store that has one"),
        ((url, place.root / "x", "--step", 9), "no checkpoint of step 9"),
        ((f"{url}/step_00000003", place.root / "x", "--step", 4), "--step: expected 3"),
        (("nothing://x/y", place.root / "x"), "no such store"),
    ):
        assert message in invoke(*arguments, code=2).stderr
    assert sorted(leftovers(place)) == ["a", "b", "c", "d"]


def test_a_damaged_places_file_leaves_the_other_places(place: Place, as_json: Callable[..., Any]) -> None:
    place.save(3)
    (place.checkpoint(3) / "places.json").write_text('{"schema": 1}')
    error = invoke(place.run, place.root / "out", code=1).stderr
    assert "3 of 6 files are nowhere whole" in error
    place.upload(3)
    place.configure()
    made = as_json(place.run, place.root / "out")
    assert made["notes"] == [f"{place.checkpoint(3)}/places.json: nodes: missing"]
    assert held(place.root / "out") == whole(3)


@pytest.mark.slow
def test_a_store_that_cannot_be_reached_is_asked_once(
    place: Place, as_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens there. What is here is enough for step 3; of step 5 it cannot be told."""
    url = unreachable_store(monkeypatch)
    place.save(3)
    place.configure(url)
    made = as_json(place.run, place.root / "out")
    assert held(place.root / "out") == whole(3)
    (note,) = made["notes"]
    assert "the store cannot be reached" in note
    place.save(5)
    for number in (0, 1):
        (place.node(number, 5) / TENSORS[0]).unlink()
    error = invoke(place.run, place.root / "x", code=1).stderr
    assert "step_00000005: 1 of 6 files" in error  # an older one is not taken in its place
    assert "the store cannot be reached" in error
    assert "the store cannot be reached" in invoke(url, place.root / "x", code=1).stderr
    assert leftovers(place) == ["out"]


def test_bad_input_is_one_line_and_leaves_nothing(place: Place) -> None:
    place.save(3)
    (place.root / "run" / "other").mkdir()
    for arguments, message in (
        ((place.run, place.run), "is already there"),
        ((place.checkpoint(3), place.checkpoint(3) / "x"), "lies in the checkpoint that is read"),
        ((place.run, place.root / "step_00000004"), "is the name of another step"),
        ((place.run, "s3://bucket/out"), "expected a folder on a file system"),
        ((place.root / "none", place.root / "x"), "no such folder"),
        ((place.run / "other", place.root / "x"), "expected a checkpoint, or a training run"),
        ((place.checkpoint(3), place.root / "x", "--step", 4), "--step: is the checkpoint of step 3, not of 4"),
    ):
        result = invoke(*arguments, code=2)
        assert message in result.stderr
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
    for text, message in (("checkpoint: {store: 7}", "checkpoint.store: expected"), ("a: [", "not valid YAML")):
        (place.run / "config.yaml").write_text(text)
        assert message in invoke(place.run, place.root / "x", code=2).stderr
    assert leftovers(place) == []


def test_what_is_fetched_has_no_places_and_can_be_fetched_from(place: Place, as_json: Callable[..., Any]) -> None:
    place.save(3)
    invoke(place.run, place.root / "out")
    shutil.rmtree(place.root / "nvme0")
    shutil.rmtree(place.run)
    made = as_json(place.root / "out", place.root / "more")
    assert {row["tier"] for row in made["files"]} == {"checkpoint"}
    assert held(place.root / "more") == whole(3)


@pytest.mark.slow
def test_neither_fetch_nor_list_loads_torch(place: Place) -> None:
    place.save(3)
    place.upload(3)
    place.configure()
    code = "import sys; from quern.cli.checkpoint import app; app(standalone_mode=False)"
    code += "; sys.exit('torch' in sys.modules)"
    for command in (["fetch", str(place.run), str(place.root / "out")], ["list", str(place.run), "--store"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *command, "--json"], capture_output=True, text=True, cwd=REPOSITORY, check=True
        )
        assert json.loads(done.stdout)
