"""A run whose checkpoints are on its nodes' disks and in a store loses disks, and goes on from what is left.

Nodes are groups of ranks with a folder each: torchrun's GROUP_RANK says which, as for two agents on one machine.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from quern.train.checkpoint.tiers import tiers as wiring
from support.train import run_case as CASE

pytestmark = pytest.mark.slow


STEPS = 9
#: The worst that counts as equal: max |a - b| / max |b| of a tensor.
EQUAL = 1e-10
BEFORE: dict[str, Any] = {"tp": 2, "dp_shard": 2}
#: Where no store answers: a port on which nothing can listen.
NOBODY = "http://127.0.0.1:1"
AFTER = {
    "stages": {"pp": 2, "dp_shard": 2},
    "shards": {"dp_shard": 4},
}


def config_for(run: Path | str, paths: list[str], parallel: dict[str, Any], **checkpoint: Any) -> Any:
    from_store = checkpoint.pop("from_store", False)
    return CASE.settings(
        run, paths, precision="fp64", steps=STEPS, parallel=parallel, resume={"from_store": from_store},
        checkpoint={"interval": 2, "mode": "thread"} | checkpoint, model={"num_layers": 2}, micro_batch=2,
    )  # fmt: skip


def live(
    run: str, paths: list[str], parallel: dict[str, Any], checkpoint: dict[str, Any], stop_at: int | None, nodes: int
) -> dict[str, Any]:
    """One life of this rank, on the node that the number of nodes says."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    os.environ.update(AWS_ENDPOINT_URL=NOBODY, AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_REGION="us-east-1")
    os.environ["GROUP_RANK"] = str(rank * nodes // world)
    wiring._START_BUDGET_S = 3  # how long a store that does not answer is waited for
    left = CASE.live(config_for(run, paths, parallel, **checkpoint), stop_at=stop_at if rank == 0 else None)
    return {"start": left.start.step, "state": left.state, "complete": left.complete}


def whole_state(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        name.replace("tied.weight", "embed.weight"): tensor for rank in ranks for name, tensor in rank["state"].items()
    }


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return CASE.write_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def straight(tmp_path_factory, paths):
    """The run of one process that nothing befell."""
    run = tmp_path_factory.mktemp("straight") / "run"
    config = config_for(run, paths, {}, mode="sync")
    return CASE.live(config), CASE.rows(run)


@pytest.fixture(scope="module")
def begun(tmp_path_factory, paths, kept_ranks):
    """A run on two nodes of two ranks, stopped after step 6 with all of its files where they go."""
    folder = tmp_path_factory.mktemp("begun")
    tiers = {"local": str(folder / "nvme{node}"), "store": f"file://{folder}/store", "store_every": 1}
    lives = kept_ranks(live, 4, str(folder / "run"), paths, BEFORE, tiers, 4, 2)
    assert not any(life["complete"] for life in lives)
    return folder


def copy_of(begun: Path, folder: Path) -> Path:
    """The same run, elsewhere."""
    shutil.copytree(begun, folder / "copy")
    return folder / "copy"


def tensor_files(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("**/step_00000006/*.distcp")}


@pytest.mark.slow
def test_files_are_where_they_go(begun):
    (first, second) = (tensor_files(begun / f"nvme{node}") for node in (0, 1))
    every = {f"__{rank}_0.distcp" for rank in range(4)}
    assert first == second == every  # its own, and its partner's
    assert tensor_files(begun / "store") == every
    assert tensor_files(begun / "run") == set()
    assert {path.name for path in (begun / "store").glob("step_*")} == {
        "step_00000002",
        "step_00000004",
        "step_00000006",
    }


@pytest.mark.long
@pytest.mark.parametrize(("after", "lost"), [("stages", 1), ("shards", 0), ("stages", 0), ("shards", 1)])
def test_a_lost_disk(begun, tmp_path, paths, kept_ranks, straight, after, lost):
    folder = copy_of(begun, tmp_path)
    shutil.rmtree(folder / f"nvme{lost}")
    go_on(folder, paths, kept_ranks, straight, AFTER[after], 2, store=f"file://{folder}/store")


@pytest.mark.long
def test_a_lost_disk_and_no_store(begun, tmp_path, paths, kept_ranks, straight):
    folder = copy_of(begun, tmp_path)
    shutil.rmtree(folder / "nvme0")
    go_on(folder, paths, kept_ranks, straight, AFTER["shards"], 2, store="s3://bucket/run", upload_wait_s=0)


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_only_the_store_is_left(begun, tmp_path, paths, kept_ranks, straight, nodes):
    folder = copy_of(begun, tmp_path)
    for name in ("nvme0", "nvme1", "run"):
        shutil.rmtree(folder / name)
    go_on(folder, paths, kept_ranks, straight, AFTER["stages"], nodes, store=f"file://{folder}/store", from_store=True)


def go_on(folder, paths, kept_ranks, straight, parallel, nodes, **checkpoint):
    tiers = {"local": str(folder / "nvme{node}")} | checkpoint
    lives = kept_ranks(live, 4, str(folder / "run"), paths, parallel, tiers, None, nodes)
    assert {life["start"] for life in lives} == {6}
    assert all(life["complete"] for life in lives)
    worst = CASE.worst_ratio(whole_state(lives), straight[0].state)
    print(f"weights and moments {worst:.1e}")
    assert worst < EQUAL
