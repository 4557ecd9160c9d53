"""Checkpoints of any layout load into any other, bit for bit; ranks fail together."""

from __future__ import annotations

import errno
import math
import os
import pickle
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex

from quern.errors import InputError, QuernError
from quern.model.config import ModelShape
from quern.parallel.planning.mesh import Mesh, MeshPlan, build_mesh
from quern.train.checkpoint.format.manifest import checkpoint_name, list_checkpoints
from quern.train.checkpoint.format.state import TrainState
from quern.train.checkpoint.tools.reader import iter_weights, read_manifest, verify
from quern.train.config import CheckpointConfig
from support.damage import flip
from support.distributed.by_hand import Model, laid_out
from support.train import checkpoint_case as CASE
from support.train.saves import CheckpointManager

#: Of data parallelism: one rank, FSDP2 on 2, 3 and 4, DDP on 2 and 4, HSDP 2 × 2.
LAYOUTS = [MeshPlan(*sizes) for sizes in [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (4, 1), (2, 2)]]
MULTIPLES = [128, 256]


@dataclass(frozen=True)
class On:
    """A layout of a model that is deep enough for two stages a rank, and whose heads two ranks can share."""

    plan: MeshPlan
    schedule: str = "1f1b"
    by_hand: bool = False
    """Laid out by the test, not by the code that trains."""

    def __str__(self) -> str:
        return f"{self.plan} {self.schedule}{' by hand' if self.by_hand else ''}"

    @property
    def world(self) -> int:
        return self.plan.world_size


def make(folder: str, on: MeshPlan | On, multiple: int, tied: bool = False) -> TrainState:
    """The model on a layout, weights unset."""
    if isinstance(on, MeshPlan):
        plan, schedule, of = on, "1f1b", CASE.shape(multiple, tied=tied)
    else:
        plan, schedule, of = on.plan, on.schedule, CASE.shape(multiple, tied=tied, num_layers=4, num_heads=2)
    mesh = build_mesh(plan, "cpu")
    if isinstance(on, On) and on.by_hand:
        model: torch.nn.Module = laid_out_by_hand(of, mesh, schedule)
    else:
        model = CASE.laid_out(of, mesh, schedule)
    facts = CASE.facts(Path(folder), of, layout=plan.sizes())
    return TrainState(model, CASE.groups(model), facts, {"losses": torch.arange(4.0)})


def laid_out_by_hand(of: ModelShape, mesh: Mesh, schedule: str) -> torch.nn.Module:
    """Stages of as many layers each; keys and values, of which there is one head, are not split over ``tp``."""
    stage, pp = mesh.rank("pp"), mesh.plan.pp
    held = {0, 3} if schedule == "zbv" and stage == 0 else {1, 2} if schedule == "zbv" else None
    held = set(range(stage * 4 // pp, (stage + 1) * 4 // pp)) if held is None else held
    parameters = {}
    for name, size in CASE.sizes(of).items():
        if name in ("embed.weight", "head.weight"):
            size = (of.padded_vocab_size, *size[1:])
        layer = {"embed": 0, "norm": 3, "head": 3}.get(name.split(".")[0])
        layer = int(name.split(".")[1]) if layer is None else layer
        dim = {"wo": 1, "w2": 1, "wk": None, "wv": None}.get(name.split(".")[-2], 0) if len(size) == 2 else None
        copies = [name] if layer in held else []
        if of.tied_embeddings and pp > 1 and name == "embed.weight" and 3 in held:
            copies.append("tied.weight" if 0 in held else name)
        for copy in copies:
            parameters[copy] = torch.nn.Parameter(laid_out(torch.full(size, 1.5), dim, mesh))
    return Model(parameters, of)


def manager(run: str, **config) -> CheckpointManager:
    return CheckpointManager(run, CheckpointConfig(**config), dist.get_rank(), dist.get_world_size())


def save_all(folder: str, on: MeshPlan | On, keys: dict[int, int], tied: bool = False) -> None:
    """A checkpoint a key and padding; the content is keyed by the step."""
    with manager(f"{folder}/run") as checkpoints:
        for key, multiple in keys.items():
            state = make(folder, on, multiple, tied)
            CASE.fill(state, key)
            checkpoints.save(key, state, CASE.position(key))


def load_all(
    folder: str, on: MeshPlan | On, keys: list[int], multiples: list[int], tied: bool = False
) -> tuple[dict[int, list[str]], set[str]]:
    """What differs on this rank, by checkpoint, when each is loaded under each padding; names of its parameters."""
    found: dict[int, list[str]] = {key: [] for key in keys}
    with manager(f"{folder}/run") as checkpoints:
        for multiple in multiples:
            state = make(folder, on, multiple, tied)
            for key in keys:
                CASE.fill(state, 10_000)
                loaded = checkpoints.load(f"{folder}/run/checkpoints/{checkpoint_name(key)}", state)
                assert loaded.extra["losses"].tolist() == [0, 1, 2, 3]
                found[key] += CASE.differences(state, key, stage=isinstance(on, On) and on.plan.pp > 1)
    return found, {name for name, _ in state.model.named_parameters()}


def check_pairs(
    kept_ranks,
    folder: str,
    layouts: list,
    multiples: list[int] | None = None,
    *,
    tied: bool = False,
    ring: bool = False,
) -> None:
    """All pairs, or each layout loads what the one before has saved. ``multiples``: each is saved and loaded under each
    of these paddings; None: under one that is not that of its neighbours."""
    keys: list[list[int]] = []
    for number, layout in enumerate(layouts):
        under = multiples or [MULTIPLES[number % 2]]
        mine = {10 * number + place: multiple for place, multiple in enumerate(under)}
        kept_ranks(save_all, world_of(layout), folder, layout, mine, tied)
        keys.append(list(mine))
    every = [key for mine in keys for key in mine]
    assert [checkpoint.step for checkpoint in list_checkpoints(f"{folder}/run")] == every
    for number, layout in enumerate(layouts):
        theirs = keys[number - 1] if ring else every
        under = multiples or [MULTIPLES[number % 2]]
        by_rank = kept_ranks(load_all, world_of(layout), folder, layout, theirs, under, tied)
        for rank, (found, _) in enumerate(by_rank):
            assert found == {key: [] for key in theirs}, (str(layout), rank)
        all_names = CASE.sizes(CASE.shape(tied=tied, num_layers=2 if isinstance(layout, MeshPlan) else 4))
        assert {CASE.plain_name(name) for _, names in by_rank for name in names} == set(all_names)


def world_of(layout: MeshPlan | On) -> int:
    return layout.world_size if isinstance(layout, MeshPlan) else layout.world


@pytest.mark.long
def test_layouts_load_into_each_other(kept_ranks, tmp_path):
    """One rank, FSDP2 on 3 with shards of padding alone, HSDP; saved under two paddings."""
    check_pairs(kept_ranks, str(tmp_path), [MeshPlan(), MeshPlan(dp_shard=3), MeshPlan(2, 2)], MULTIPLES)


@pytest.mark.long
def test_any_layout_loads_into_any_other(kept_ranks, tmp_path):
    """7 × 7 layouts, 2 × 2 paddings: weights, moments and counters, on every rank."""
    check_pairs(kept_ranks, str(tmp_path), LAYOUTS, MULTIPLES)


#: By hand: tensors that are split over one axis, stages, both, and vocabularies of which some shares are padding alone.
BY_HAND = [
    On(MeshPlan(tp=2), by_hand=True),
    On(MeshPlan(pp=2), "zbv", by_hand=True),
    On(MeshPlan(), by_hand=True),
    On(MeshPlan(pp=2), by_hand=True),
]
BY_HAND_LARGE = [
    On(MeshPlan(), by_hand=True),
    On(MeshPlan(dp_shard=2, tp=2), by_hand=True),
    On(MeshPlan(dp_shard=3, tp=2), by_hand=True),
    On(MeshPlan(dp_replicate=2, tp=2), by_hand=True),
    On(MeshPlan(pp=2, dp_shard=2), by_hand=True),
    On(MeshPlan(pp=2, tp=2), "zbv", by_hand=True),
    On(MeshPlan(pp=2, dp_shard=2, tp=2), by_hand=True),
]


@pytest.mark.long
def test_split_tensors_and_stages_load_into_each_other(kept_ranks, tmp_path):
    check_pairs(kept_ranks, str(tmp_path), BY_HAND, tied=True, ring=True)


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True])
def test_split_tensors_and_stages_of_many_ranks_load_into_each_other(kept_ranks, tmp_path, tied):
    check_pairs(kept_ranks, str(tmp_path), BY_HAND_LARGE, tied=tied)


#: As trained.
TRAINED = [
    On(MeshPlan()),
    On(MeshPlan(dp_shard=4)),
    On(MeshPlan(dp_shard=2, tp=2)),
    On(MeshPlan(pp=2, dp_shard=2)),
    On(MeshPlan(pp=2, tp=2), "zbv_zero_bubble"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "tied", [pytest.param(False, marks=pytest.mark.exhaustive), pytest.param(True, marks=pytest.mark.long)]
)
def test_what_is_trained_on_loads_into_each_other(kept_ranks, tmp_path, tied):
    check_pairs(kept_ranks, str(tmp_path), TRAINED, tied=tied)


def stored_sizes(folder: str, layout: MeshPlan | On, tied: bool = False) -> None:
    state = make(folder, layout, 256, tied)
    CASE.fill(state, 1)
    with manager(f"{folder}/run") as checkpoints:
        checkpoints.save(1, state, CASE.position(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        *(MeshPlan(*sizes) for sizes in [(1, 3), (2, 2)]),
        *(pytest.param(MeshPlan(*sizes), marks=pytest.mark.long) for sizes in [(1, 4), (4, 1)]),
        On(MeshPlan(dp_shard=2, tp=2), by_hand=True),
        pytest.param(On(MeshPlan(dp_replicate=2, tp=2), by_hand=True), marks=pytest.mark.long),
        On(MeshPlan(pp=2, dp_shard=2), by_hand=True),
        On(MeshPlan(pp=2, tp=2), "zbv", by_hand=True),
    ],
    ids=str,
)
def test_every_element_is_stored_once_and_padding_never(kept_ranks, tmp_path, layout):
    """Of 256 padded rows the last ranks hold padding alone; replicas and tied copies write nothing twice, and
    replicas take turns. Torch reads the metadata."""
    kept_ranks(stored_sizes, world_of(layout), str(tmp_path), layout, isinstance(layout, On))
    path = tmp_path / "run" / "checkpoints" / "step_00000001"
    metadata = pickle.loads((path / ".metadata").read_bytes())
    of = CASE.shape() if isinstance(layout, MeshPlan) else CASE.shape(tied=True, num_layers=4, num_heads=2)
    sizes = {f"model.{name}": size for name, size in CASE.sizes(of).items()}
    for name, size in CASE.sizes(of).items():
        sizes |= {f"optimizer.state.{name}.{moment}": size for moment in ("exp_avg", "exp_avg_sq")}
    sizes |= {"optimizer.step": (), "extra.losses": (4,)}
    assert metadata.state_dict_metadata.keys() == sizes.keys()
    written = dict.fromkeys(range(world_of(layout)), 0)
    for name, size in sizes.items():
        stored = metadata.state_dict_metadata[name]
        assert tuple(stored.size) == size
        rows = np.zeros(size, int)
        for chunk in stored.chunks:
            rows[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
            place = metadata.storage_data[MetadataIndex(name, chunk.offsets)].relative_path
            written[int(place.split("_")[2])] += 4 * math.prod(chunk.sizes)
        assert (rows == 1).all(), name
    assert not any(CASE.junk_row() in (path / name).read_bytes() for name in os.listdir(path))
    assert min(written.values()) > 0  # every rank has a share to write
    plan = layout if isinstance(layout, MeshPlan) else layout.plan
    if plan.dp_replicate > 1:  # replicas have a choice
        assert max(written.values()) < 2 * sum(written.values()) / len(written), written


def alone(folder: str, layouts: list, tied: bool) -> None:
    for number, layout in enumerate(layouts):
        stored_sizes(f"{folder}/{number}", layout, tied)


@pytest.mark.slow
def test_one_process_reads_what_stages_and_split_tensors_wrote(kept_ranks, tmp_path):
    """As exporters do: names, sizes and values of whole tensors; checksums and sizes hold."""
    layouts = [layout for layout in BY_HAND if layout.world == 2]
    for number in range(len(layouts)):
        (tmp_path / str(number)).mkdir()
    kept_ranks(alone, 2, str(tmp_path), layouts, True)
    sizes = CASE.sizes(CASE.shape(tied=True, num_layers=4, num_heads=2))
    for number, layout in enumerate(layouts):
        path = str(tmp_path / str(number) / "run" / "checkpoints" / "step_00000001")
        assert verify(path) == [], str(layout)
        assert read_manifest(path).layout == layout.plan.sizes()
        weights = dict(iter_weights(path))
        assert weights.keys() == sizes.keys()
        for name, size in sizes.items():
            assert torch.equal(weights[name], CASE.numbers("weight", name, size, 1)), name


def refused_of_stages(folder: str) -> list[str]:
    """What this rank says of stages that have made other numbers of updates, and of a layer that nobody has."""
    said = []
    with manager(f"{folder}/run") as checkpoints:
        for spoil in ("updates", "layer", "shape"):
            state = make(folder, On(MeshPlan(pp=2), by_hand=True), 128, tied=True)
            if dist.get_rank() == 1 and spoil == "layer":
                del state.model.blocks._modules["2"]
                state = replace(state, optimizer=CASE.groups(state.model))
            CASE.fill(state, 1)
            if dist.get_rank() == 1 and spoil == "updates":
                for slots in state.optimizer.state.values():
                    slots["step"].fill_(2)
            try:
                if spoil == "shape":
                    state = replace(state, facts=replace(state.facts, shape=CASE.shape(tied=True, num_heads=2)))
                checkpoints.save(1, state, CASE.position(1))
                said.append("saved")
            except QuernError as error:
                said.append(str(error))
    return said


@pytest.mark.slow
def test_stages_that_do_not_make_a_model_are_not_saved(kept_ranks, tmp_path):
    for updates, layer, shape in kept_ranks(refused_of_stages, 2, str(tmp_path)):
        assert updates == "optimizer: rank 1 has made 2 updates, rank 0 1"
        assert "model.blocks.2.attention_norm.weight: missing in the checkpoint" in layer
        assert "model.blocks.2.attention_norm.weight: the checkpoint has it; the config's model does not" in shape
    assert list_checkpoints(str(tmp_path / "run")) == []


def damaged(folder: str) -> tuple[int | None, list[str]]:
    with manager(f"{folder}/run") as checkpoints:
        found = checkpoints.latest_valid()
        return found and found.step, [str(problem) for problem in checkpoints.rejected]


def save_some(folder: str) -> None:
    state = make(folder, MeshPlan(*(1, 2)), 128)
    with manager(f"{folder}/run", keep_last=2) as checkpoints:
        for step in (1, 2, 3, 4):
            CASE.fill(state, step)
            checkpoints.save(step, state, CASE.position(step))
            checkpoints.prune()


@pytest.mark.slow
def test_all_ranks_agree_on_the_newest_valid_one(kept_ranks, tmp_path):
    kept_ranks(save_some, 2, str(tmp_path))
    root = tmp_path / "run" / "checkpoints"
    assert sorted(os.listdir(root)) == [".lock", "step_00000003", "step_00000004"]
    file = root / "step_00000004" / "__1_0.distcp"
    flip(file, -1, 128)
    for step, problems in kept_ranks(damaged, 3, str(tmp_path)):
        assert step == 3
        assert [str(file) in problem for problem in problems] == [True]


def open_apart(folder: str) -> str:
    try:
        manager(f"{folder}/{dist.get_rank()}").close()
    except InputError as error:
        return str(error)
    return "opened"


@pytest.mark.slow
def test_a_run_directory_of_each_machine_is_refused_at_the_start(kept_ranks, tmp_path):
    """What the ranks of two machines see when run_dir is on a disk of each."""
    for said in kept_ranks(open_apart, 2, str(tmp_path)):
        assert "(rank 1) is not rank 0's; expected a folder on a file system that all machines share" in said
    assert kept_ranks(open_apart, 1, str(tmp_path)) == ["opened"]  # the lock was let go, and nothing is left
    assert os.listdir(tmp_path / "0" / "checkpoints") == [".lock"]


def fail_on_one_rank(folder: str, failing: int) -> tuple[str, list[int], list[str]]:
    state = make(folder, MeshPlan(*(1, 3)), 128)
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
        fresh = make(folder, MeshPlan(*(1, 3)), 128)
        checkpoints.load(checkpoints.latest_valid().path, fresh)
        return message, names, CASE.differences(fresh, 3)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.long), 2])
def test_one_rank_that_cannot_write_stops_all_and_publishes_nothing(kept_ranks, tmp_path, failing):
    for message, names, wrong in kept_ranks(fail_on_one_rank, 3, str(tmp_path), failing):
        assert f"rank {failing}: " in message
        assert "No space left" in message
        assert names == [".lock", "step_00000001"]
        assert wrong == []


def unshared(folder: str) -> str:
    """A rank whose files rank 0 does not see: it writes to a folder of its own."""
    from quern.train.checkpoint.save import work as module

    state = make(folder, MeshPlan(*(1, 2)), 128)
    CASE.fill(state, 1)
    real = module.write_files
    if dist.get_rank() == 1:

        def elsewhere(staged, *arguments, **options):
            other = f"{folder}/node1"
            os.makedirs(other, exist_ok=True)
            return real(other, *arguments, **options)

        module.write_files = elsewhere
    with manager(f"{folder}/run") as checkpoints:
        try:
            checkpoints.save(1, state, CASE.position(1))
        except QuernError as error:
            return str(error)
        finally:
            module.write_files = real
    return "saved"


@pytest.mark.slow
def test_a_run_directory_that_is_not_shared_is_found_out(kept_ranks, tmp_path):
    for message in kept_ranks(unshared, 2, str(tmp_path)):
        assert "__1_0.distcp" in message
        assert "share" in message
    assert list_checkpoints(str(tmp_path / "run")) == []


def refused(folder: str) -> str:
    """Rank 1's model is another: it alone finds out, and all raise."""
    state = make(folder, MeshPlan(*(1, 2)), 128)
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


@pytest.mark.slow
def test_a_refusal_on_one_rank_is_everybodys(kept_ranks, tmp_path):
    messages = kept_ranks(refused, 2, str(tmp_path))
    assert messages[0] == messages[1]
    assert "model.dim: expected 8, as in the config, got 6" in messages[0]


def open_late(folder: str) -> str:
    with manager(f"{folder}/run"):
        try:
            other = os.fork()
            if other == 0:  # another process of this machine, on rank 0 only
                from quern.train.checkpoint.format.folder import FolderLock

                try:
                    FolderLock(f"{folder}/run/checkpoints")
                    os._exit(1)
                except QuernError:
                    os._exit(0)
            return str(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
        finally:
            dist.barrier()


@pytest.mark.slow
def test_a_forked_child_neither_holds_nor_gets_the_lock(kept_ranks, tmp_path):
    assert kept_ranks(open_late, 2, str(tmp_path)) == ["0", "0"]
