"""Masters on the host: no bit is another than with masters on the device, whenever copies are made, and a forward waits
for its own part of an update alone."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from quern.errors import InputError
from quern.model.config import ModelConfig
from quern.model.init import initialise
from quern.model.transformer import Transformer
from quern.parallel.apply import Parallel, parallelize
from quern.parallel.context.inputs import Inputs
from quern.parallel.host_masters import _master
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import build_mesh
from quern.train import setup, summary
from quern.train.checkpoint.format.manifest import list_checkpoints, read_manifest
from quern.train.config import OptimizerConfig
from quern.train.processes import machine
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer
from quern.train.step import host_optimizer
from quern.train.step.optimizer import build_optimizer, follow_updates, step
from support.train import run_case as CASE
from support.waits import until

STEPS, LAYERS, VOCABULARY = 4, 3, 100
BF16 = {"precision": "bf16", "micro_batch": 2, "optimizer": {"clip": 0.5}, "steps": 6, "validation": {"interval": 3}}


# --- whole runs -------------------------------------------------------------------------------------------------------


def nan_at_3(data_step: int) -> float:
    return float("nan") if data_step == 3 else 1.0


def on(state: str, **changes: Any) -> dict[str, Any]:
    return CASE._merge(CASE._merge(BF16, changes), {"optimizer": {"state": state}})


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"tied_embeddings": False, "num_layers": 2}}, {}, {"precision": "fp32"}, {"precision": "fp16"},
        {"precision": "fp64"}, {"weights_cast": "per_use"}, {"optimizer": {"moments": "bf16", "gradients": "bf16"}},
        {"activation_checkpointing": "full"}, {"float8": {"recipe": "tensorwise"}},
        {"float8": {"recipe": "tensorwise", "delayed": True}}, {"compile": {"enabled": True, "backend": "aot_eager"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_run_is_the_same_bits(changes: dict[str, Any], paths: list[str], tmp_path: Path) -> None:
    """Two micro-batches a step, clipped, one skipped, validations between: weights, moments, the guard's history."""
    before = {*threading.enumerate()}
    device, host = (
        CASE.live(CASE.settings(tmp_path / state, paths, **on(state, **changes)), factor=nan_at_3).state
        for state in ("device", "host")
    )
    assert CASE.differences(device, host) == []
    assert new_threads(before) == []
    assert all(device[name].dtype != torch.bfloat16 for name in device if name.startswith("model."))
    assert CASE.told(tmp_path / "host", "skipped") == [3]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["thread", "sync"])
def test_a_run_that_the_machine_has_no_memory_for_is_refused(
    mode: str, paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a rank allocates. Against the bytes of the tensors of a run, and of what its checkpoints are copied to."""
    checkpoint = {"mode": mode, "interval": 1}
    config = CASE.settings(tmp_path / "run", paths, **on("host", checkpoint=checkpoint, steps=3))
    held: list[int] = []

    def look(trainer: Any, step: int) -> None:
        optimizer, weights = trainer.optimizer, [*trainer.model.parameters()]
        moments = [slots[name] for slots in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        tensors = [*weights, *(own.grad for own in weights), *trainer.parallel.weights.parameters(), *moments]
        buffers = [2 ** math.ceil(math.log2(own.nbytes)) for own in (*optimizer._gradients, *optimizer._weights)]
        kept, copied = trainer.parallel.kept, trainer.checkpoints.async_save._snapshot
        held[:] = [
            sum(own.nbytes for own in tensors) + sum(buffers) + sum(own.bytes for own in kept),
            0 if copied is None else copied._memory.size,
        ]

    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        trainer.on_gradients = look
        trainer.fit()
    assert (held[1] > 0) == (mode == "thread")
    copies = " of it to copy checkpoints, and .* available; give checkpoint.mode=sync" if held[1] else " 0 B of it .*"
    monkeypatch.setattr(setup, "parallelize", allocated)
    for state, share, fits in (("host", 1.02, True), ("host", 0.98, False), ("device", 0.01, True)):
        monkeypatch.setattr(machine, "available_memory", lambda share=share: int(share * sum(held)))
        config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"state": state})})
        told = f"^optimizer.state: host needs .* for 1 rank of this machine,.*{copies}"
        expected = pytest.raises(AllocatedError) if fits else pytest.raises(InputError, match=told)
        with open_ranks("cpu") as ranks, expected, open_trainer(config, ranks):
            pass


def needed(patch: pytest.MonkeyPatch, config: Any, here: list[int], device: str) -> int:
    """The bytes from which on a run of three ranks is not refused."""
    layout = setup.check_settings(config, 3, VOCABULARY)
    planned = summary.step_of(config, config.model.shape(VOCABULARY), layout)

    def fits(free: int) -> bool:
        patch.setattr(machine, "available_memory", lambda: free)
        with suppress(InputError):
            summary.check_host_memory(config, planned, here, device)
            return True
        return False

    return bisect_left(range(1 << 30), True, key=fits)


def test_all_ranks_of_a_machine_count_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a pipeline, whose stages are of several sizes; where there is a GPU weights and gradients are on it."""
    asked = {"checkpoint": {"mode": "sync"}, "parallel": {"pp": 3}, "micro_batch": 1, "model": {"num_layers": 3}}
    config = CASE.settings(tmp_path / "run", ["nowhere"], **on("host", **asked))
    of = partial(needed, monkeypatch, config)
    alone = [of([rank], "cuda") for rank in range(3)]
    assert len(set(alone)) > 1
    assert of([0, 1, 2], "cuda") == sum(alone)
    assert of([1, 2], "cuda") == alone[1] + alone[2]
    shape = config.model.shape(VOCABULARY)
    norms = 2 * shape.dim
    matrices = shape.num_block_parameters // 3 - norms
    assert of([1], "cpu") - alone[1] == (4 + 4) * norms + (4 + 2) * matrices  # of one block


@pytest.mark.parametrize("mode", ["thread", "process", "sync"])
def test_pinned_copies_of_checkpoints_count_wherever_the_state_is(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of masters and two moments for each of three ranks; on a CPU nothing is pinned."""
    asked = {"checkpoint": {"mode": mode}, "parallel": {"dp_shard": 3}, "global_batch": 12, "micro_batch": 2}
    config = CASE.settings(tmp_path / "run", ["nowhere"], **on("device", **asked))
    copied = 0 if mode == "sync" else 12 * config.model.shape(VOCABULARY).num_parameters
    assert needed(monkeypatch, config, [0, 1, 2], "cuda") == pytest.approx(copied, abs=3)
    assert needed(monkeypatch, config, [1], "cuda") == pytest.approx(copied / 3, abs=1)
    assert needed(monkeypatch, config, [0, 1, 2], "cpu") == 0
    layout = setup.check_settings(config, 3, VOCABULARY)
    planned = summary.step_of(config, config.model.shape(VOCABULARY), layout)
    monkeypatch.setattr(machine, "available_memory", lambda: copied // 2)
    told = r"^checkpoint\.mode: thread and process need .* for 2 ranks of this machine, .*; give checkpoint.mode=sync"
    with pytest.raises(InputError, match=told) if copied else nullcontext():
        summary.check_host_memory(config, planned, [0, 1], "cuda")


class AllocatedError(Exception):
    """A rank came to where it allocates."""


def allocated(*_: Any) -> None:
    raise AllocatedError


@pytest.mark.slow
def test_a_checkpoint_goes_to_the_other_kind_and_back(paths: list[str], tmp_path: Path) -> None:
    """Resumed twice, each time where the state is elsewhere. And a run that saves in a thread, while its loop goes on,
    saves what one did that waited."""
    asked: dict[str, Any] = {"checkpoint": {"interval": 2}}
    straight = CASE.live(CASE.settings(tmp_path / "straight", paths, **on("device", **asked))).state
    for state, kill_at in (("host", 3), ("device", 5), ("host", None)):
        left = CASE.live(CASE.settings(tmp_path / "moved", paths, **on(state, **asked)), kill_at=kill_at)
    assert left.start.step == 4
    assert CASE.differences(straight, left.state) == []
    asked["checkpoint"] |= {"mode": "thread"}
    CASE.live(CASE.settings(tmp_path / "threaded", paths, **on("host", **asked)))
    saved, others = (files_of(tmp_path / run) for run in ("straight", "threaded"))
    assert len(saved) == 3
    assert all(saved.values())
    assert saved == others


def files_of(run: Path) -> dict[str, dict[str, str]]:
    """SHA-256 of every checkpoint's tensors."""
    return {
        Path(own.path).name: {n: f.sha256 for n, f in read_manifest(own.path).files.items() if n.endswith(".distcp")}
        for own in list_checkpoints(str(run))
    }


# --- a model by itself ------------------------------------------------------------------------------------------------


def built(state: str, **settings: Any) -> tuple[Parallel, Any]:
    config = ModelConfig(num_layers=LAYERS, dim=32, num_heads=4, num_kv_heads=2, ffn_dim=48, tied_embeddings=False)
    with torch.device("meta"):
        model = Transformer(config.shape(vocab_size=VOCABULARY), compute_dtype=torch.bfloat16, loss_chunk=16)
    layout = Layout(torch.bfloat16, host_state=state == "host", **settings)
    parallel = parallelize(model, build_mesh(layout.plan, "cpu"), layout, torch.device("cpu"))
    initialise(parallel.weights, seed=2)
    optimizer = build_optimizer(parallel.weights, OptimizerConfig(), parallel.masters)
    follow_updates(parallel, optimizer)
    return parallel, optimizer


def inputs_of(number: int) -> Inputs:
    tokens_BL = torch.randint(VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(number))
    return Inputs(tokens_BL[:, :-1], tokens_BL[:, 1:], None, None)


def gradients(parallel: Parallel, optimizer: Any, number: int) -> None:
    optimizer.zero_grad(set_to_none=True)
    parallel.run.forward_backward([inputs_of(number), inputs_of(-number)], lambda loss: loss / 64)


def trained(state: str) -> dict[str, torch.Tensor]:
    parallel, optimizer = built(state)
    for number in range(STEPS):
        gradients(parallel, optimizer, number)
        step(optimizer, 0.01, torch.tensor(number == 1), torch.tensor(1.5))
    if state == "host":  # a search computes the gradients of a step again
        gradients(parallel, optimizer, 7)
        gradients(parallel, optimizer, STEPS)
    else:
        gradients(parallel, optimizer, STEPS)
    step(optimizer, 0.01, torch.tensor(False))
    found = {name: slots for name, slots in optimizer.state.items()}
    named = dict(parallel.weights.named_parameters())
    return {name: weight.detach() for name, weight in named.items()} | {
        f"{slot}.{name}": found[weight][slot] for name, weight in named.items() for slot in found[weight]
    }


class Late:
    """A stand-in for ``torch.cuda`` whose streams make copies as late as they may: when an event is waited for."""

    def __init__(self) -> None:
        self.streams: list[LateStream] = []
        self.late = 0

    def Stream(self) -> LateStream:  # noqa: N802
        self.streams.append(LateStream())
        return self.streams[-1]

    def Event(self) -> LateEvent:  # noqa: N802
        return LateEvent()

    def current_stream(self) -> LateStream:
        return LateStream()

    def set_device(self, device: torch.device) -> None:
        pass

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        on = self

        class Later(TorchFunctionMode):
            def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if function is torch.Tensor.zero_ or (kwargs or {}).get("non_blocking"):
                    on.late += 1
                    stream.left.append(lambda: function(*args, **(kwargs or {})))
                    stream.asked += 1
                    return args[0]
                return function(*args, **(kwargs or {}))

        with Later():
            yield


class LateStream:
    def __init__(self) -> None:
        self.left: deque[Callable[[], Any]] = deque()
        self.asked = self.made = 0
        self.lock = threading.Lock()

    def wait_stream(self, other: LateStream) -> None:
        pass

    @torch.no_grad()
    def make(self, most: int) -> None:
        with self.lock:
            while self.made < most:
                self.left.popleft()()
                self.made += 1


class LateEvent:
    """One that was never recorded is over."""

    def __init__(self) -> None:
        self.stream, self.asked = LateStream(), 0

    def record(self, stream: LateStream) -> None:
        self.stream, self.asked = stream, stream.asked

    def synchronize(self) -> None:
        self.stream.make(self.asked)


@pytest.mark.parametrize("late", [False, True])
def test_no_bit_differs_whenever_copies_are_made(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divided and skipped steps; at once, as on a CPU, and as late as an event allows."""
    stand_in = Late()
    if late:
        monkeypatch.setattr(host_optimizer, "get_device_module", lambda device: stand_in)
    expected, found = trained("device"), trained("host")
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert len(expected) > 4 * LAYERS
    assert bool(stand_in.late) == late


def test_weights_on_the_device_are_the_masters_rounded_once() -> None:
    parallel, optimizer = built("host")
    gradients(parallel, optimizer, 0)
    step(optimizer, 0.01)
    optimizer.wait()
    masters = dict(parallel.weights.named_parameters())
    kinds = {name: weight.dtype for name, weight in parallel.model.named_parameters()}
    assert {name for name, kind in kinds.items() if kind == torch.float32} == {
        name for name in kinds if "norm" in name or "embed" in name
    }
    for name, weight in parallel.model.named_parameters():
        assert masters[name].dtype == torch.float32
        assert torch.equal(weight, masters[name].to(kinds[name])), name


def test_a_forward_waits_for_its_own_part_of_an_update() -> None:
    """The inner optimizer takes a step a unit, in the order of a forward, each when the test lets it."""
    parallel, optimizer = built("host")
    gate, made, entered = threading.Semaphore(0), [], {}
    take_step = optimizer._inner.step

    def gated() -> None:
        gate.acquire()
        take_step()
        made.append(None)

    optimizer._inner.step = gated
    for name, block in parallel.model.blocks.items():
        block.register_forward_pre_hook(lambda *_, name=name: entered.update({name: len(made)}))
    gradients(parallel, optimizer, 0)
    entered.clear()
    step(optimizer, 0.01)  # returns before a unit is updated
    assert made == []
    thread = threading.Thread(target=parallel.run.forward, args=([inputs_of(1)],))
    thread.start()
    for number in range(LAYERS):
        assert list(entered.values()) == list(range(2, number + 2))
        gate.release(2 if number == 0 else 1)  # with the first block's, the embedding's
        until(lambda number=number: len(entered) > number)
    assert len(made) == LAYERS + 1  # the norm and the head are still to come, and the forward goes on without them
    gate.release()
    thread.join()
    assert optimizer.state
    assert len(made) == LAYERS + 2


def test_state_is_that_after_the_update() -> None:
    parallel, optimizer = built("host")
    gate = threading.Event()
    take_step = optimizer._inner.step
    optimizer._inner.step = lambda: gate.wait() and take_step()
    gradients(parallel, optimizer, 0)
    step(optimizer, 0.01)
    threading.Timer(0.05, gate.set).start()
    assert {float(slots["step"]) for slots in optimizer.state.values()} == {1.0}
    assert len(optimizer.state) == len(list(parallel.weights.parameters()))


def test_an_error_of_an_update_reaches_whoever_waits() -> None:
    parallel, optimizer = built("host")
    gradients(parallel, optimizer, 0)
    take_step, calls = optimizer._inner.step, []

    def failing() -> None:
        calls.append(None)
        if len(calls) == 2:
            raise MemoryError("no memory for moments")
        take_step()

    optimizer._inner.step = failing
    step(optimizer, 0.01)
    with pytest.raises(MemoryError, match="no memory for moments"):
        parallel.run.forward([inputs_of(1)])
    with pytest.raises(MemoryError):
        optimizer.wait()
    assert len(calls) == 2


def test_closing_waits_for_the_update_and_leaves_no_thread_and_no_cycle() -> None:
    """A second time it does nothing."""
    before = {*threading.enumerate()}
    parallel, optimizer = built("host")
    gradients(parallel, optimizer, 0)
    optimizer._inner.register_step_pre_hook(lambda *_: time.sleep(0.01))
    step(optimizer, 0.01)
    assert new_threads(before) == ["host-optimizer_0"]
    optimizer.close()
    optimizer.close()
    assert all(update.done() for update in optimizer._updates)
    assert new_threads(before) == []
    parallel.run.forward([inputs_of(1)])
    with pytest.raises(RuntimeError, match="shutdown"):
        step(optimizer, 0.01)
    assert {float(slots["step"]) for slots in optimizer.state.values()} == {1.0}  # waits for no update
    gc.disable()
    try:
        alive = weakref.ref(optimizer)
        del optimizer
        assert alive() is None
    finally:
        gc.enable()


def new_threads(before: set[threading.Thread]) -> list[str]:
    """Of an update, which began since and are there."""
    return [own.name for own in {*threading.enumerate()} - before if own.name.startswith("host-optimizer")]


def test_masters_of_split_weights_lie_on_the_host() -> None:
    """On the mesh of their weights, whose device may be another: here one that holds no numbers."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        part = torch.empty(4, 3, device="meta", dtype=torch.bfloat16)
        weight = torch.nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False))
        master = _master(weight, torch.float32)
        assert isinstance(master, DTensor)
        assert (master.device_mesh, master.placements, master.dtype) == (mesh, weight.placements, torch.float32)
        assert master.to_local().device.type == "cpu"
        master.grad = host_optimizer._like(master, torch.ones(4, 3, dtype=torch.bfloat16))
        assert isinstance(master.grad, DTensor)
    finally:
        torch.distributed.destroy_process_group()
