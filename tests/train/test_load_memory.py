"""What a rank reads of a checkpoint, and what it holds meanwhile."""

from __future__ import annotations

import itertools
import math
import tracemalloc
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as torch_load
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from quern.errors import QuernError
from quern.parallel.local import LocalRanks
from quern.parallel.planning.mesh import MeshPlan, build_mesh
from quern.train.checkpoint.format import dcp
from quern.train.checkpoint.format.dcp import BUFFER_BYTES, load_tensors, needed_files
from quern.train.checkpoint.format.state import TrainState, view_tensors
from quern.train.config import CheckpointConfig
from quern.train.processes.agree import Agreement
from support.train import checkpoint_case as CASE
from support.train.pieces import cuts, write_pieces
from support.train.saves import CheckpointManager

pytestmark = pytest.mark.slow


# ---- which files


@pytest.fixture
def fake_world():
    """``start(rank, world)`` makes this process a rank of a group that sends nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def start(rank: int, world: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def stored(sizes: dict[str, tuple[int, ...]], random: np.random.Generator) -> tuple[Metadata, dict[str, np.ndarray]]:
    """Tensors in pieces, each in one of 30 files, and the file's number of every element."""
    tensors, places, owners = {}, {}, {}
    for name, size in sizes.items():
        owners[name], chunks = np.full(size, -1), []
        for box in itertools.product(*(cuts(length, random) for length in size)):
            chunk = ChunkStorageMetadata(
                torch.Size(start for start, _ in box), torch.Size(stop - start for start, stop in box)
            )
            chunks.append(chunk)
            file = int(random.integers(30))
            places[MetadataIndex(name, chunk.offsets)] = _StorageInfo(f"{file}.distcp", 0, 1)
            owners[name][tuple(slice(*stretch) for stretch in box)] = file
        tensors[name] = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(size), chunks)
    return Metadata(tensors, None, places), owners


def part(whole: np.ndarray, placements: tuple, at: list[int], shape: list[int]) -> np.ndarray:
    """What the rank at ``at`` of a mesh of ``shape`` holds; no axis of the tensor is split twice."""
    for place, mine, ranks in zip(placements, at, shape, strict=True):
        if isinstance(place, Shard):
            width = math.ceil(whole.shape[place.dim] / ranks)
            whole = whole.take(
                range(*slice(mine * width, (mine + 1) * width).indices(whole.shape[place.dim])), place.dim
            )
    return whole


def mesh_of(rank: int, shape: list[int]) -> Any:
    """Axes are named by rank: DTensor remembers results by mesh, and would take another rank's for an equal one."""
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(f"{axis}{rank}" for axis in "ab"[: len(shape)]))


MESHES = [
    ([3], (Shard(0),)),
    ([4], (Shard(1),)),
    ([4], (Replicate(),)),
    ([2, 3], (Replicate(), Shard(0))),
    ([2, 2], (Shard(1), Shard(0))),
]


@pytest.mark.parametrize(("mesh_shape", "placements"), MESHES)
@pytest.mark.parametrize("seed", range(3))
def test_the_files_that_a_rank_needs_are_those_of_its_elements(fake_world, mesh_shape, placements, seed):
    """The oracle looks at every element. ``head`` has 5 padded rows, of which some ranks hold nothing else."""
    metadata, owners = stored(
        {"embed": (13, 9), "head": (7, 6), "step": (), "other": (5, 5)}, np.random.default_rng(seed)
    )
    world, seen = math.prod(mesh_shape), set()
    for rank in range(world):
        fake_world(rank, world)
        mesh = mesh_of(rank, mesh_shape)
        at = [int(place) for place in np.unravel_index(rank, mesh_shape)]
        tensors, expected = {"step": torch.zeros(())}, set(owners["step"].ravel())
        for name, size in (("embed", (13, 9)), ("head", (12, 6))):
            padded = np.full(size, -1)
            padded[: len(owners[name])] = owners[name]
            mine = part(padded, placements, at, mesh_shape)
            tensors[name] = DTensor.from_local(
                torch.zeros(mine.shape), mesh, placements, run_check=False, shape=torch.Size(size), stride=(size[1], 1)
            )
            expected |= set(mine.ravel()) - {-1}
        found = needed_files(metadata, tensors, {"head": 7})
        assert found == {f"{file}.distcp" for file in expected}, rank
        seen.add(found)
    assert len(seen) > 1 or placements == (Replicate(),)


def test_a_rank_needs_no_file_for_tensors_that_it_does_not_have():
    metadata, owners = stored({"a": (6, 4), "b": (3,)}, np.random.default_rng(0))
    assert needed_files(metadata, {}, {}) == frozenset()
    assert needed_files(metadata, {"b": torch.zeros(3)}, {}) == {f"{file}.distcp" for file in owners["b"]}


# ---- which bytes


BUFFERS = [(8, 0), (64, 0), (64, 48), (200, 48), (4096, 8), (1 << 20, 1 << 20)]
"""Bytes of a buffer and of a gap that is read over: each once with every mesh, in ``make test`` with two of them."""
CUTS = [
    pytest.param(*mesh, *size, (m + s) % 2 == 1, marks=() if (s - m) % len(BUFFERS) in (0, 3) else pytest.mark.long)
    for m, mesh in enumerate([([1], (Replicate(),)), *MESHES])
    for s, size in enumerate(BUFFERS)
]


@pytest.mark.parametrize(("mesh_shape", "placements", "buffer", "gap", "odd"), CUTS)
def test_every_part_is_what_numpy_cuts_out(fake_world, tmp_path, monkeypatch, mesh_shape, placements, buffer, gap, odd):
    """Buffers of a few elements and of whole tensors, gaps read and skipped, pieces in any order of their elements."""
    monkeypatch.setattr(dcp, "BUFFER_BYTES", buffer)
    monkeypatch.setattr(dcp, "GAP_BYTES", gap)
    sizes = {"step": (), "vector": (5,), "matrix": (9, 13), "cube": (4, 6, 7)}
    whole = {
        name: torch.arange(math.prod(size), dtype=torch.float64).reshape(size) + 1000 * place
        for place, (name, size) in enumerate(sizes.items())
    }
    whole["cube"] = whole["cube"].bfloat16()  # into float32
    metadata = write_pieces(tmp_path, whole, np.random.default_rng(len(placements) + gap), odd=odd)
    world = math.prod(mesh_shape)
    for rank in range(world):
        fake_world(rank, world)
        mesh = mesh_of(rank, mesh_shape)
        at = [int(place) for place in np.unravel_index(rank, mesh_shape)]
        tensors = {name: torch.full(whole[name].size(), -1.0, dtype=torch.float64) for name in ("step", "vector")}
        expected = {name: whole[name].numpy() for name in tensors}
        for name, dtype in (("matrix", torch.float64), ("cube", torch.float32)):
            expected[name] = part(whole[name].to(dtype).numpy(), placements, at, mesh_shape)
            mine = torch.full(expected[name].shape, -1.0, dtype=dtype)
            size = whole[name].size()
            stride = torch.empty(size, device="meta").stride()
            tensors[name] = DTensor.from_local(mine, mesh, placements, run_check=False, shape=size, stride=stride)
        load_tensors(str(tmp_path), metadata, tensors, {}, Agreement(0, 1))
        for name, numbers in expected.items():
            found = tensors[name].to_local() if isinstance(tensors[name], DTensor) else tensors[name]
            assert np.array_equal(found.numpy(), numbers), (rank, name)


def one_piece(file: Path, tensor: torch.Tensor) -> Metadata:
    """A tensor ``a`` that is stored as one piece."""
    with open(file, "wb") as stream:
        torch.save(tensor, stream)
        length = stream.tell()
    chunk = ChunkStorageMetadata(torch.Size(0 for _ in tensor.shape), tensor.size())
    described = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.size(), [chunk])
    return Metadata({"a": described}, None, {MetadataIndex("a", chunk.offsets): _StorageInfo(file.name, 0, length)})


@pytest.mark.parametrize(("gap", "share"), [(1024, 1.0), (3072, 1.0), (3073, 4.0)])
def test_unwanted_bytes_are_skipped_unless_they_are_few(fake_world, tmp_path, monkeypatch, gap, share):
    """Of rows of 4096 bytes a rank wants 1024: it reads those alone, or the rows when what lies between is short."""
    monkeypatch.setattr(dcp, "GAP_BYTES", gap)
    whole = torch.arange(256.0 * 1024).reshape(256, 1024)
    metadata = one_piece(tmp_path / "a", whole)
    fake_world(2, 4)
    mine = torch.zeros(256, 256)
    tensor = DTensor.from_local(
        mine, mesh_of(2, [4]), (Shard(1),), run_check=False, shape=whole.size(), stride=whole.stride()
    )
    before = number_of("io", "rchar")
    load_tensors(str(tmp_path), metadata, {"a": tensor}, {}, Agreement(0, 1))
    read = number_of("io", "rchar") - before
    assert torch.equal(mine, whole[:, 512:768])
    assert mine.nbytes * share <= read < mine.nbytes * share + 16_384  # the record's own, and /proc


def test_a_file_that_is_not_what_the_metadata_says_is_named(tmp_path, monkeypatch):
    file = tmp_path / "0.distcp"
    metadata = one_piece(file, torch.zeros(3))
    (index,), good = metadata.storage_data or {}, file.read_bytes()
    others = [one_piece(file, tensor) and file.read_bytes() for tensor in (torch.zeros(77), torch.zeros(3).double())]

    def load(data: bytes) -> None:
        file.write_bytes(data)
        told = replace(metadata, storage_data={index: _StorageInfo(file.name, 0, len(data))})
        load_tensors(str(tmp_path), told, {"a": torch.zeros(3)}, {}, Agreement(0, 1))

    load(good)
    for data in (*others, good[:-40], b"x" * len(good), b""):
        with pytest.raises(QuernError, match=rf"{file}: a: not loaded: not a tensor of size \[3\] .*float32 at byte 0"):
            load(data)
    file.write_bytes(good)
    with zipfile.ZipFile(file) as packed:
        parts = {part: packed.read(part) for part in packed.namelist()}
    parts[f"{next(iter(parts)).partition('/')[0]}/data/byteorder"] = b"little"
    for name in parts:
        if name.endswith(("/byteorder", "/data.pkl")):  # 64 MiB of nothing, in a few bytes
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
                for part, data in parts.items():
                    packed.writestr(part, bytes(64 << 20) if part == name else data)
            bomb = file.read_bytes()
            tracemalloc.start()
            with pytest.raises(QuernError, match=rf"{file}: a: not loaded: .*has 67,108,864 bytes"):
                load(bomb)
            assert tracemalloc.get_traced_memory()[1] < 32 << 20  # a file is read by 8 MiB
            tracemalloc.stop()
    with monkeypatch.context() as patch:
        patch.setattr(dcp, "locate", lambda *_: len(good) - 3)
        with pytest.raises(QuernError, match=rf"{file}: not loaded: cannot be read \(the file ends early\)"):
            load(good)
    file.unlink()
    with pytest.raises(QuernError, match=rf"{file}: not loaded: cannot be read \(No such file or directory\)"):
        load_tensors(str(tmp_path), metadata, {"a": torch.zeros(3)}, {}, Agreement(0, 1))


# ---- how much memory

LARGE = CASE.shape(vocab=20_480, dim=512, num_heads=2)
"""Embedding and head of 42 MB each, and their moments: 252 MB; without padding, which torch's reader does not know."""
SLACK = 6 << 20
"""The plan, the metadata, code that is used for the first time."""


def number_of(file: str, name: str) -> int:
    """From /proc/self; kB are given in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self", file).read_text().splitlines())
    value = fields[name].split()
    return int(value[0]) * (1024 if value[1:] == ["kB"] else 1)


def large_state(folder: str, plan: MeshPlan) -> TrainState:
    """Every page is in memory."""
    model = CASE.laid_out(LARGE, build_mesh(plan, "cpu"))
    state = TrainState(model, CASE.groups(model), CASE.facts(Path(folder), LARGE))
    with torch.no_grad():
        for parameter in model.parameters():
            slots = {kind: torch.empty_like(parameter) for kind in ("exp_avg", "exp_avg_sq")}
            state.optimizer.state[parameter] = {"step": torch.tensor(1.0), **slots}
            for tensor in (parameter, *slots.values()):
                CASE.local(tensor).fill_(-1)
    return state


def numbers(name: str, size: torch.Size) -> torch.Tensor:
    """What a tensor holds: a number for each row."""
    rows = torch.arange(float(size[0])) + 0.25 * ("exp_avg" in name) + 0.5 * ("sq" in name)
    return rows.view(-1, *(1 for _ in size[1:])).expand(size)


def save_large(folder: str) -> str:
    state = large_state(folder, MeshPlan())
    for name, tensor in view_tensors(state).tensors.items():
        if tensor.dim():
            tensor.detach().copy_(numbers(name, tensor.size()))
    with CheckpointManager(f"{folder}/run", CheckpointConfig(mode="sync")) as checkpoints:
        return checkpoints.save(1, state, CASE.position(1)).path


def added_by(action: Any) -> tuple[int, int]:
    """By how many bytes resident memory exceeds what it was before, at most, and bytes read from files."""
    read = number_of("io", "rchar")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    resident = number_of("status", "VmRSS")
    action()
    return number_of("status", "VmHWM") - resident, number_of("io", "rchar") - read


def load_large(folder: str, path: str, plan: MeshPlan, reader: str) -> tuple[int, int, int, list[str]]:
    """Bytes added, read and held, and names of tensors that are not what was saved."""
    state = large_state(folder, plan)
    tensors = dict(view_tensors(state).tensors)
    with CheckpointManager(f"{folder}/run", CheckpointConfig(), dist.get_rank(), dist.get_world_size()) as checkpoints:
        dist.barrier()
        if reader == "quern":
            added, read = added_by(lambda: checkpoints.load(path, state))
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                added, read = added_by(lambda: torch_load(tensors, storage_reader=FileSystemReader(path)))
    wrong = []
    for name, tensor in tensors.items():
        if tensor.dim() and not torch.equal(CASE.local(tensor), CASE.share(numbers(name, tensor.size()), tensor)):
            wrong.append(name)
    return added, read, sum(CASE.local(tensor).nbytes for tensor in tensors.values()), wrong


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux keeps the peak of a process's memory")
def test_a_load_adds_a_buffer_to_the_shard_and_reads_no_more_than_it(tmp_path):
    """One process wrote; two read a half each. That the measure sees what is held is shown on torch's reader, which
    holds a stored embedding, of 42 MB."""
    path = save_large(str(tmp_path))
    files = {__name__: __file__}
    found: dict[str, list[tuple[int, int, int, list[str]]]] = {}
    for case, plan, reader in [
        ("fsdp", MeshPlan(dp_shard=2), "quern"),
        ("tp", MeshPlan(tp=2), "quern"),
        ("torch", MeshPlan(dp_shard=2), "torch"),
    ]:
        with LocalRanks(2, timeout_s=120, files=files, preload=("pytest", "pydantic", "yaml")) as ranks:
            found[case] = ranks.call(load_large, str(tmp_path), path, plan, reader)
    for case in ("fsdp", "tp"):
        for added, read, held, wrong in found[case]:
            assert wrong == []
            assert 125e6 < held < 130e6
            assert added <= BUFFER_BYTES + SLACK, (case, added)
            assert read <= held + (2 << 20), (case, read)
    assert min(added for added, *_ in found["torch"]) > 40e6
