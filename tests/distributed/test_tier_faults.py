"""Damage to files of checkpoints that lie on two nodes' disks and in a store: what is found, said, loaded and harmed.

Two nodes of a rank each have saved steps 4 and 6. A row damages copies of one file of step 6 in a copy of all
folders, and starts the run there: the state that is loaded is compared bit for bit with what the step's numbers are by
name (``checkpoint_case.py``), and every file that was not damaged with its bytes before. ``-s`` prints the table.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from support.distributed.ranks import start_ranks
from support.train import checkpoint_case as CASE

pytestmark = pytest.mark.slow


WORLD = 2
STEPS = (4, 6)
NEWEST = "step_00000006"
#: Of rank 1, which is on node 1; the next node in the ring is node 0.
FILE = "__1_0.distcp"
JUNK_KEY = 77


class Idle:
    """In the place of what moves files behind the training: moves nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.unfinished: list[tuple[int, bool]] = []

    def upload(self, *arguments: Any) -> None:
        pass

    def cancel(self, step: int) -> None:
        pass

    def poll(self) -> list[Any]:
        return []

    def close(self) -> None:
        pass


# ---- in the ranks ----


def state_of(folder: str) -> Any:
    """The model cut over all ranks (FSDP2), full of numbers that belong to no checkpoint."""
    import torch

    from quern.parallel.planning.mesh import MeshPlan, build_mesh
    from quern.train.checkpoint.format.state import TrainState

    plan = MeshPlan(1, WORLD)
    of = CASE.shape()
    model = CASE.laid_out(of, build_mesh(plan, "cpu"))
    facts = CASE.facts(Path(folder), of, layout=plan.sizes())
    state = TrainState(model, CASE.groups(model), facts, {"losses": torch.arange(4.0)})
    CASE.fill(state, JUNK_KEY)
    return state


def open_manager(folder: str, store: bool) -> Any:
    from quern.train.config import CheckpointConfig
    from support.train.saves import CheckpointManager

    rank = int(os.environ["RANK"])
    os.environ["GROUP_RANK"] = str(rank)
    config = CheckpointConfig(
        mode="sync",
        keep_last=20,
        local=f"{folder}/nvme{{node}}",
        store=f"file://{folder}/store" if store else None,
        store_every=1 if store else None,
    )
    return CheckpointManager(f"{folder}/run", config, rank, WORLD)


def save_steps(folder: str) -> None:
    state = state_of(folder)
    with open_manager(folder, True) as checkpoints:
        for step in STEPS:
            CASE.fill(state, step)
            checkpoints.save(step, state, replace(CASE.position(step), ledger_offset=8 * step))
        checkpoints.tiers.finish()


def start(folder: str, store: bool) -> dict[str, Any]:
    """What a start on this rank finds, says and loads."""
    import quern.train.checkpoint.tiers.tiers as tiers

    tiers.Uploader = Idle  # type: ignore[misc,assignment]
    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("quern")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    state = state_of(folder)
    try:
        with open_manager(folder, store) as checkpoints:
            found = checkpoints.latest_valid()
            checkpoints.tiers.resume_pending(found)
            checkpoints.load(found.path, state)
            rejected = [str(problem) for problem in checkpoints.rejected]
    finally:
        log.removeHandler(handler)
    return {
        "step": found.step, "wrong": CASE.differences(state, found.step), "rejected": rejected, "said": said,
    }  # fmt: skip


# ---- rows ----


@dataclass(frozen=True)
class Row:
    """``damage``: how, and the files by pattern below the folder of all disks. ``says``: all in one line that is logged
    or a reason for a rejection; none: nothing at all is said."""

    name: str
    how: str
    where: tuple[str, ...]
    loads: int
    says: tuple[str, ...]
    store: bool = True
    healed: bool = False
    """Whether the damaged files must hold their bytes again."""

    def __str__(self) -> str:
        return f"{self.name}-{self.how}"


OWN, PARTNER, STORE = (f"{disk}/{NEWEST}/{FILE}" for disk in ("nvme1/*", "nvme0/*", "store"))
RUN = f"run/checkpoints/{NEWEST}"
HOW = {"truncated": "bytes, has", "flipped": "expected SHA-256", "missing": "missing"}


#: Places that are read by the same code as another one.
LIKE_OTHERS = {"own disk, no store", "ledger.jsonl of the run", "places.json of the run, no store"}


def rows() -> Iterator[Row]:
    for how, what in HOW.items():
        yield Row("own disk", how, (OWN,), 6, ("nvme1/", FILE, what, "put back from 127.0.0.1:"), healed=True)
        yield Row(
            "own disk, no store",
            how,
            (OWN,),
            6,
            ("nvme1/", FILE, what, "put back from 127.0.0.1:"),
            store=False,
            healed=True,
        )
        # the rank of node 0 reads some tensors from this file too
        yield Row("partner", how, (PARTNER,), 6, ("nvme0/", FILE, what, "put back from 127.0.0.1:"), healed=True)
        one = f"1 of {WORLD} files came from the store"
        lost = (one,) if how == "missing" else (FILE, what, "put back from the store")
        yield Row("own disk and partner", how, (OWN, PARTNER), 6, lost)
        yield Row("own disk and partner, no store", how, (OWN, PARTNER), 4, (FILE, what, "older"), store=False)
        at_store = "no such file" if how == "missing" else "store/"
        yield Row("own disk, partner and store", how, (OWN, PARTNER, STORE), 4, (FILE, at_store, "older"))
        yield Row("store", how, (STORE,), 6, ())
        for small in (".metadata", "ledger.jsonl", "encoding.tiktoken"):
            back = ("of 4 files came from the store",) if how == "missing" else (small, what, "put back from the store")
            yield Row(f"{small} of the run", how, (f"{RUN}/{small}",), 6, back, healed=True)
        yield Row(".metadata of the run, no store", how, (f"{RUN}/.metadata",), 4, (".metadata", what), store=False)
        yield Row("manifest of the run", how, (f"{RUN}/manifest.json",), 4, ("manifest.json", "older"))
        yield Row("places.json of the run", how, (f"{RUN}/places.json",), 6, ())
        yield Row("places.json of the run, no store", how, (f"{RUN}/places.json",), 6, (), store=False)


def strike(path: Path, how: str) -> None:
    data = path.read_bytes()
    middle = len(data) // 2
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[:middle])
    else:
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :])


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but those that a start writes anew, by path."""
    skipped = ("run/run_id", "run/checkpoints/.lock", "store/owner.json")
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name not in skipped}


@pytest.fixture(scope="module")
def begun(tmp_path_factory, nodes):
    folder = tmp_path_factory.mktemp("begun")
    (folder / "run").mkdir()
    (folder / "run" / "ledger.jsonl").write_text('{"a":1}\n' * 6)  # eight bytes a line, and a line a step
    nodes.call(save_steps, str(folder))
    files = contents(folder)
    for disk in ("nvme0/*", "nvme1/*", "store"):
        assert len(list(folder.glob(f"{disk}/step_*/*.distcp"))) == len(STEPS) * WORLD
    assert sum(name.endswith("manifest.json") for name in files) == 2 * len(STEPS)
    return folder


@pytest.fixture(scope="module")
def nodes():
    with start_ranks(WORLD, start, 120) as ranks:
        yield ranks


def marked() -> Iterator[Any]:
    """Every place is damaged in `make test`, in each way by turns, but for what is read as another there is; in every
    way in `make test-long`."""
    places: dict[str, list[Row]] = {}
    for row in rows():
        places.setdefault(row.name, []).append(row)
    assert places.keys() > LIKE_OTHERS
    for number, ways in enumerate(places.values()):
        often = ways[0].name not in LIKE_OTHERS
        for way, row in enumerate(ways):
            yield pytest.param(row, id=str(row), marks=() if often and way == number % len(ways) else pytest.mark.long)


@pytest.mark.parametrize("row", list(marked()))
def test_damage(begun, tmp_path, nodes, row):
    before = contents(begun)
    folder = tmp_path / "all"
    shutil.copytree(begun, folder)
    struck = [path for pattern in row.where for path in folder.glob(pattern)]
    assert len(struck) == len(row.where)
    for path in struck:
        strike(path, row.how)
    damaged = {str(path.relative_to(folder)) for path in struck}
    lives = nodes.call(start, str(folder), row.store)
    assert {life["step"] for life in lives} == {row.loads}
    assert [life["wrong"] for life in lives] == [[]] * WORLD
    said = sorted({line for life in lives for line in life["said"] if "all nodes are on" not in line})  # one machine
    if row.says:
        assert [line for line in said if all(part in line for part in row.says)], said
    else:
        assert said == []
    assert bool(lives[0]["rejected"]) == (row.loads != 6)
    after = contents(folder)
    for name, data in before.items():
        if name not in damaged:
            assert after.get(name) == data, name
        elif row.healed:
            assert after[name] == data, name
    new = after.keys() - before.keys()
    assert new <= {f"{RUN}/{path.name}" for path in struck}, new
    print(f"| {row.name} | {row.how} | step {row.loads} | {plain(said, folder, row.says)} |")


def plain(said: Sequence[str], folder: Path, parts: Sequence[str]) -> str:
    """The line that counts, without what differs from run to run."""
    line = next((line for line in said if parts and all(part in line for part in parts)), "nothing")
    line = line.replace(f"{folder}/", "").replace("file://", "")
    return re.sub(r"[0-9a-f]{64}", "…", re.sub(r"/[0-9a-f]{32}/", "/ID/", line))
