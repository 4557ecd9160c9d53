"""The memory of snapshots: when it is there, what is registered with CUDA, and errors that show late.

There is no GPU here: CUDA's calls are replaced by ones that write down what they are asked, and streams that wait for
nobody. Content is compared with the tensors that were copied.
"""

from __future__ import annotations

import mmap
import os
import threading
import types
from collections.abc import Callable
from contextlib import nullcontext

import psutil
import pytest
import torch

from quern.train.checkpoint.format.files import FILE_BYTES, StoredTensor, deal_files
from quern.train.checkpoint.save.background import Process
from quern.train.checkpoint.save.manager import CheckpointManager
from quern.train.checkpoint.save.snapshot import Memory, Snapshot
from quern.train.checkpoint.save.work import Work
from quern.train.config import CheckpointConfig
from quern.train.processes import machine
from support.train import checkpoint_case as case

PAGE = mmap.PAGESIZE


def places_of(tensors: list[torch.Tensor]) -> list[StoredTensor]:
    kinds = [(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors]
    return [stored for file in deal_files(0, kinds, FILE_BYTES) for stored in file.tensors]


def some() -> list[torch.Tensor]:
    return [torch.arange(3000, dtype=torch.float32), torch.full((7,), 2.5, dtype=torch.float64)]


# ---- a rank without any piece


@pytest.mark.parametrize("shared", [False, True])
def test_no_bytes_are_touched_grown_and_let_go(shared):
    memory = Memory(shared=shared)
    for _ in range(2):
        memory.touch()
        memory.grow(0)
        assert memory.size == 0
    memory.close()


def test_work_without_a_piece_writes_no_file(tmp_path):
    work = Work(Memory(shared=True))
    work.lay_out([])
    assert work.write(str(tmp_path)) == {}
    assert os.listdir(tmp_path) == []


@pytest.mark.long
def test_a_process_without_a_piece_writes_no_file_and_later_some(tmp_path):
    """A rank more than there are tensors; then the plan changes, and it has one."""
    background = Process()
    try:
        background.lay_out([])
        background.write(str(tmp_path), lambda number: torch.empty(0))
        assert background.result() == {}
        assert os.listdir(tmp_path) == []
        (file,) = deal_files(0, [("float32", (3000,))], FILE_BYTES)
        background.lay_out([file])
        assert background.memory is not None
        background.memory.grow(file.tensors[0].end)
        background.memory.tensor(file.tensors[0]).copy_(some()[0])
        background.write(str(tmp_path), lambda number: torch.empty(0))
        assert list(background.result()) == os.listdir(tmp_path) == [file.name]
        assert some()[0].numpy().tobytes() in (tmp_path / file.name).read_bytes()
    finally:
        background.close()


# ---- before the first copy


def test_what_is_prepared_is_not_had_anew_by_the_first_copy(monkeypatch):
    memory, tensors = Memory(shared=True), some()
    snapshot, places = Snapshot(memory, torch.device("cpu")), places_of(tensors)
    snapshot.prepare(places)
    assert memory.size >= sum(tensor.nbytes for tensor in tensors)
    mapped = memory._map
    snapshot.start(tensors, places, lambda: None)
    snapshot.wait()
    snapshot.join()
    assert memory._map is mapped
    for place, tensor in zip(places, tensors, strict=True):
        assert memory.tensor(place).equal(tensor)
    snapshot.prepare([])  # a rank that has lost its pieces
    assert memory._map is mapped


@pytest.mark.slow
def test_a_trainer_has_its_memory_before_the_first_save(tmp_path):
    state = case.make(tmp_path)
    with CheckpointManager(str(tmp_path / "run"), CheckpointConfig(mode="process")) as checkpoints:
        memory = checkpoints.async_save._background.memory
        assert memory is not None
        assert memory.size == 0
        checkpoints.async_save.prepare(state)
        size = sum(parameter.nbytes for parameter in state.model.parameters())
        assert memory.size >= 3 * size  # weights and two moments


# ---- CUDA


class Cuda:
    """Writes down what is registered; ``codes``: what the next calls return, else 0 (cudaSuccess)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.codes: list[int] = []
        self.devices: list[tuple[str, torch.device]] = []
        self.synchronize: Callable[[], None] = lambda: None
        stream = types.SimpleNamespace(wait_stream=lambda other: None, wait_event=lambda event: None)
        event = types.SimpleNamespace(record=lambda stream: None, synchronize=lambda: self.synchronize())
        for name, fake in {
            "cudart": lambda: self, "Stream": lambda device: stream, "Event": lambda: event,
            "current_stream": lambda device: stream, "stream": lambda stream: nullcontext(),
            "set_device": lambda device: self.devices.append((threading.current_thread().name, device)),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, fake)

    def _code(self) -> int:
        return self.codes.pop(0) if self.codes else 0

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802
        self.calls.append(("register", pointer, size))
        return self._code()

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        self.calls.append(("unregister", pointer, 0))
        return self._code()


@pytest.fixture
def cuda(monkeypatch):
    return Cuda(monkeypatch)


def address(memory: Memory) -> int:
    (stored,) = places_of([torch.zeros(1, dtype=torch.uint8)])
    return memory.tensor(stored).data_ptr()


@pytest.mark.parametrize("shared", [False, True])
def test_memory_that_was_had_without_is_registered_once(cuda, shared):
    """The writer's thread lays out first, and knows of no GPU."""
    memory = Memory(shared=shared)
    memory.grow(PAGE + 1)
    assert cuda.calls == []
    for size in (PAGE + 1, 5, 2 * PAGE, 0):
        memory.grow(size, pin=True)
        memory.grow(size)
        assert cuda.calls == [("register", address(memory), 2 * PAGE)]
    old = address(memory)
    memory.grow(2 * PAGE + 1, pin=True)
    assert cuda.calls[1:] == [("unregister", old, 0), ("register", address(memory), 3 * PAGE)]
    new = address(memory)
    memory.close()
    memory.close()
    assert cuda.calls[3:] == [("unregister", new, 0)]


def test_no_bytes_are_not_registered(cuda):
    memory = Memory()
    memory.grow(0, pin=True)
    memory.close()
    assert cuda.calls == []


def test_memory_that_cuda_does_not_take_is_asked_again_the_next_time(cuda):
    memory = Memory()
    cuda.codes = [2]
    with pytest.raises(OSError, match=r"could not be registered with CUDA \(error 2\)"):
        memory.grow(100, pin=True)
    memory.grow(100, pin=True)
    assert [name for name, _, _ in cuda.calls] == ["register", "register"]
    cuda.codes = [700]  # after an error of the device nothing else succeeds
    memory.close()
    assert memory.size == 0


def test_prepared_memory_is_registered_before_the_first_copy(cuda):
    memory, tensors = Memory(), some()
    memory.grow(1 << 20)
    snapshot, places = Snapshot(memory, torch.device("cuda")), places_of(tensors)
    snapshot.prepare(places)
    assert [name for name, _, _ in cuda.calls] == ["register"]
    for fill in (1.0, 2.0):
        snapshot.start([tensor * fill for tensor in tensors], places, lambda: None)
        snapshot.wait()
        snapshot.join()
        assert [memory.tensor(place).equal(tensor * fill) for place, tensor in zip(places, tensors, strict=True)] == [
            True, True,
        ]  # fmt: skip
    assert len(cuda.calls) == 1


def test_the_thread_is_on_the_ranks_own_gpu_before_it_asks_for_anything(cuda):
    """A new thread is on the first one."""
    memory, tensors, device = Memory(), some(), torch.device("cuda", 3)
    snapshot, seen = Snapshot(memory, device), []
    cuda.synchronize = lambda: seen.extend(cuda.devices)
    snapshot.start(tensors, places_of(tensors), lambda: None)
    snapshot.join()
    assert seen == [("snapshot", device)]


def test_the_memory_that_is_available_is_what_psutil_says(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").symlink_to("/proc/meminfo")  # without control groups
    told = machine.available_memory(str(tmp_path))
    assert told == pytest.approx(psutil.virtual_memory().available, rel=0.5)


def test_an_error_of_the_device_is_the_snapshots(cuda):
    """Copies on a GPU fail after they have been asked for. Nothing is written then; the next one is a sound one."""
    handed_on: list[int] = []
    memory, tensors = Memory(), some()
    snapshot, places = Snapshot(memory, torch.device("cuda")), places_of(tensors)

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    cuda.synchronize = fail
    snapshot.start(tensors, places, lambda: handed_on.append(1))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        snapshot.join()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        snapshot.wait()
    assert handed_on == []
    cuda.synchronize = lambda: None
    snapshot.start(tensors, places, lambda: handed_on.append(2))
    snapshot.wait()
    snapshot.join()
    assert handed_on == [2]
