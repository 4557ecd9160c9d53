"""Checkpoints of any layout load into any other, bit for bit; ranks fail together."""

from __future__ import annotations

import errno
import os
import runpy
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from quern.errors import InputError, QuernError
from quern.model.transformer import Transformer
from quern.parallel.apply import Layout, parallelize
from quern.parallel.mesh import MeshPlan, build_mesh
from quern.train.checkpoint.manager import CheckpointManager
from quern.train.checkpoint.manifest import checkpoint_name, list_checkpoints
from quern.train.checkpoint.state import TrainState
from quern.train.config import CheckpointConfig

pytestmark = pytest.mark.slow

CASE = types.SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "train" / "checkpoint_case.py")))

#: (dp_replicate, dp_shard): one rank, FSDP2 on 2, 3 and 4, DDP on 2 and 4, HSDP 2 × 2.
LAYOUTS = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (4, 1), (2, 2)]
MULTIPLES = [128, 256]


def make(folder: str, layout: tuple[int, int], multiple: int) -> TrainState:
    """The model on a layout, weights unset."""
    of = CASE.shape(multiple)
    replicate, shard = layout
    with torch.device("meta"):
        model = Transformer(of)
    mesh = build_mesh(MeshPlan(dp_replicate=replicate, dp_shard=shard), "cpu")
    wrapped = parallelize(model, mesh, Layout(compute_dtype=torch.float32), torch.device("cpu"))
    facts = CASE.facts(Path(folder), of, layout={"dp_replicate": replicate, "dp_shard": shard})
    return TrainState(wrapped, CASE.groups(wrapped), facts, {"losses": torch.arange(4.0)})


def manager(run: str, **config) -> CheckpointManager:
    return CheckpointManager(run, CheckpointConfig(**config), dist.get_rank(), dist.get_world_size())


def save_all(folder: str, layout: tuple[int, int], keys: dict[int, int]) -> None:
    """A checkpoint a key and padding; the content is keyed by the step."""
    with manager(f"{folder}/run") as checkpoints:
        for key, multiple in keys.items():
            state = make(folder, layout, multiple)
            CASE.fill(state, key)
            checkpoints.save(key, state, CASE.position(key))


def load_all(folder: str, layout: tuple[int, int], keys: list[int], multiples: list[int]) -> dict[int, list[str]]:
    """What differs on this rank, by checkpoint, when each is loaded under each padding."""
    found: dict[int, list[str]] = {key: [] for key in keys}
    with manager(f"{folder}/run") as checkpoints:
        for multiple in multiples:
            state = make(folder, layout, multiple)
            for key in keys:
                CASE.fill(state, 10_000)
                loaded = checkpoints.load(f"{folder}/run/checkpoints/{checkpoint_name(key)}", state)
                assert loaded.extra["losses"].tolist() == [0, 1, 2, 3]
                found[key] += CASE.differences(state, key)
    return found


def check_all_pairs(run_ranks, folder: str, layouts: list[tuple[int, int]], multiples: list[int]) -> None:
    keys = []
    for number, layout in enumerate(layouts):
        mine = {10 * number + place: multiple for place, multiple in enumerate(MULTIPLES)}
        run_ranks(save_all, layout[0] * layout[1], folder, layout, mine)
        keys += mine
    assert [checkpoint.step for checkpoint in list_checkpoints(f"{folder}/run")] == keys
    for layout in layouts:
        for rank, found in enumerate(
            run_ranks(load_all, layout[0] * layout[1], folder, layout, keys, multiples, timeout_s=400)
        ):
            assert found == {key: [] for key in keys}, (layout, rank)


def test_layouts_load_into_each_other(run_ranks, tmp_path):
    """One rank, FSDP2 on 3 with shards of padding alone, HSDP; saved under two paddings."""
    check_all_pairs(run_ranks, str(tmp_path), [(1, 1), (1, 3), (2, 2)], [256])


@pytest.mark.slow
def test_any_layout_loads_into_any_other(run_ranks, tmp_path):
    """7 × 7 layouts, 2 × 2 paddings: weights, moments and counters, on every rank."""
    check_all_pairs(run_ranks, str(tmp_path), LAYOUTS, MULTIPLES)


def stored_sizes(folder: str, layout: tuple[int, int]) -> None:
    state = make(folder, layout, 256)
    CASE.fill(state, 1)
    with manager(f"{folder}/run") as checkpoints:
        checkpoints.save(1, state, CASE.position(1))


@pytest.mark.parametrize("layout", [(1, 3), (1, 4), (4, 1), (2, 2)])
def test_every_element_is_stored_once_and_padding_never(run_ranks, tmp_path, layout):
    """Of 256 padded rows the last ranks hold padding alone; replicas write nothing twice. Torch reads the metadata."""
    import math
    import pickle

    run_ranks(stored_sizes, layout[0] * layout[1], str(tmp_path), layout)
    path = tmp_path / "run" / "checkpoints" / "step_00000001"
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for name, size in CASE.sizes(CASE.shape()).items():
        stored = metadata.state_dict_metadata[f"model.{name}"]
        assert tuple(stored.size) == size
        assert sum(math.prod(chunk.sizes) for chunk in stored.chunks) == math.prod(size)
    spread = {info.relative_path for info in metadata.storage_data.values()}
    assert not any(CASE.junk_row() in (path / name).read_bytes() for name in os.listdir(path))
    assert len(spread) == layout[0] * layout[1]  # every rank has a share to write


def damaged(folder: str) -> tuple[int | None, list[str]]:
    with manager(f"{folder}/run") as checkpoints:
        found = checkpoints.latest_valid()
        return found and found.step, [str(problem) for problem in checkpoints.rejected]


def save_some(folder: str) -> None:
    state = make(folder, (1, 2), 128)
    with manager(f"{folder}/run", keep_last=2) as checkpoints:
        for step in (1, 2, 3, 4):
            CASE.fill(state, step)
            checkpoints.save(step, state, CASE.position(step))
            checkpoints.prune()


def test_all_ranks_agree_on_the_newest_valid_one(run_ranks, tmp_path):
    run_ranks(save_some, 2, str(tmp_path))
    root = tmp_path / "run" / "checkpoints"
    assert sorted(os.listdir(root)) == [".lock", "step_00000003", "step_00000004"]
    file = root / "step_00000004" / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[-1] ^= 128
    file.write_bytes(data)
    for step, problems in run_ranks(damaged, 3, str(tmp_path)):
        assert step == 3
        assert [str(file) in problem for problem in problems] == [True]


def open_apart(folder: str) -> str:
    try:
        manager(f"{folder}/{dist.get_rank()}").close()
    except InputError as error:
        return str(error)
    return "opened"


def test_a_run_directory_of_each_machine_is_refused_at_the_start(run_ranks, tmp_path):
    """What the ranks of two machines see when run_dir is on a disk of each."""
    for said in run_ranks(open_apart, 2, str(tmp_path)):
        assert "(rank 1) is not rank 0's; expected a folder on a file system that all machines share" in said
    assert run_ranks(open_apart, 1, str(tmp_path)) == ["opened"]  # the lock was let go, and nothing is left
    assert os.listdir(tmp_path / "0" / "checkpoints") == [".lock"]


def fail_on_one_rank(folder: str, failing: int) -> tuple[str, list[int], list[str]]:
    state = make(folder, (1, 3), 128)
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if dist.get_rank() == failing and os.readlink(f"/proc/self/fd/{descriptor}").endswith(".distcp"):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with manager(f"{folder}/run") as checkpoints:
        CASE.fill(state, 1)
        checkpoints.save(1, state, CASE.position(1))
        CASE.fill(state, 2)
        os.fsync = fsync
        try:
            checkpoints.save(2, state, CASE.position(2))
            message = "saved"
        except QuernError as error:
            message = str(error)
        os.fsync = sync
        dist.barrier()
        names = sorted(os.listdir(f"{folder}/run/checkpoints"))
        dist.barrier()
        CASE.fill(state, 3)
        checkpoints.save(3, state, CASE.position(3))  # the group is still in step
        fresh = make(folder, (1, 3), 128)
        checkpoints.load(checkpoints.latest_valid().path, fresh)
        return message, names, CASE.differences(fresh, 3)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_rank_that_cannot_write_stops_all_and_publishes_nothing(run_ranks, tmp_path, failing):
    for message, names, wrong in run_ranks(fail_on_one_rank, 3, str(tmp_path), failing):
        assert f"rank {failing}: " in message
        assert "No space left" in message
        assert names == [".lock", "step_00000001"]
        assert wrong == []


def unshared(folder: str) -> str:
    """A rank whose files rank 0 does not see: it writes to a folder of its own."""
    from quern.train.checkpoint import manager as module

    state = make(folder, (1, 2), 128)
    CASE.fill(state, 1)
    if dist.get_rank() == 1:
        real = module.save_tensors

        def elsewhere(staged, *arguments, **options):
            other = f"{folder}/node1"
            os.makedirs(other, exist_ok=True)
            return real(other, *arguments, **options)

        module.save_tensors = elsewhere
    with manager(f"{folder}/run") as checkpoints:
        try:
            checkpoints.save(1, state, CASE.position(1))
        except QuernError as error:
            return str(error)
    return "saved"


def test_a_run_directory_that_is_not_shared_is_found_out(run_ranks, tmp_path):
    for message in run_ranks(unshared, 2, str(tmp_path)):
        assert "__1_0.distcp" in message
        assert "share" in message
    assert list_checkpoints(str(tmp_path / "run")) == []


def refused(folder: str) -> str:
    """Rank 1's model is another: it alone finds out, and all raise."""
    state = make(folder, (1, 2), 128)
    with manager(f"{folder}/run") as checkpoints:
        CASE.fill(state, 1)
        path = checkpoints.save(1, state, CASE.position(1)).path
        if dist.get_rank() == 1:
            state = TrainState(
                state.model, state.optimizer, CASE.facts(Path(folder), CASE.shape(dim=8)), state.extra
            )  # fmt: skip
        try:
            checkpoints.load(path, state)
        except InputError as error:
            return str(error)
    return "loaded"


def test_a_refusal_on_one_rank_is_everybodys(run_ranks, tmp_path):
    messages = run_ranks(refused, 2, str(tmp_path))
    assert messages[0] == messages[1]
    assert "model.dim: expected 8, as in the config, got 6" in messages[0]


def open_late(folder: str) -> str:
    with manager(f"{folder}/run"):
        try:
            other = os.fork()
            if other == 0:  # another process of this machine, on rank 0 only
                from quern.train.checkpoint.folder import FolderLock

                try:
                    FolderLock(f"{folder}/run/checkpoints")
                    os._exit(1)
                except QuernError:
                    os._exit(0)
            return str(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
        finally:
            dist.barrier()


def test_a_forked_child_neither_holds_nor_gets_the_lock(run_ranks, tmp_path):
    assert run_ranks(open_late, 2, str(tmp_path)) == ["0", "0"]
