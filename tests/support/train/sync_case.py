"""Training steps on :mod:`device_watch`'s device; what ranks run, so it imports no oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import quern.model.rope
from quern.parallel.local import LocalRanks
from quern.train.config import DoReMiConfig
from quern.train.doremi import DoReMi
from quern.train.processes.agree import Agreement
from quern.train.processes.ranks import Ranks, open_ranks
from quern.train.setup import open_trainer
from quern.train.step.forensics import Forensics
from quern.train.supervision.replicas import Replicas
from quern.train.trainer import Trainer
from support.processes import files_of
from support.train import device_watch
from support.train.run_case import settings, write_corpus

T = TypeVar("T")
_ATEN = torch.ops.aten
FIRST = 2
"""Steps that may wait: they fill caches, and FSDP2 and pipelines begin."""
SMALL = {"global_batch": 4, "micro_batch": 2, "steps": 9}


def in_a_process(function: Callable[..., T], *args: Any, timeout_s: float = 300) -> T:
    """``function(*args)`` in a process of its own, which may change its torch as it likes."""
    files = files_of(function)
    with LocalRanks(1, backend=None, timeout_s=timeout_s, files=files, preload=("pytest", "yaml")) as ranks:
        result: T = ranks.call(function, *args)[0]
    return result


@contextlib.contextmanager
def opened(folder: str, changes: dict[str, Any], world: int = 1, rank: int = 0) -> Iterator[Trainer]:
    """A trainer on rank ``rank`` of ``world``, the only one there is, after its first steps; from here on the host
    must not wait. ``learns`` among ``changes``: it learns weights of sources, with itself for a reference."""
    patch = pytest.MonkeyPatch()
    # to itself it is the first rank, so that it does what is done once: metrics, ledger
    alone = Ranks(0, world, device_watch.device())
    patch.setattr(Agreement, "broadcast_from_rank0", lambda self, action: action())
    patch.setattr(Agreement, "all_or_raise", lambda self, action: action())
    patch.setattr(Agreement, "gather", lambda self, value: [value] * world)
    # it keeps no table under a dispatch mode, whose tensors may be fake: here all are
    patch.setattr(quern.model.rope, "_get_current_dispatch_mode", lambda: None)
    patch.setattr(quern.model.rope, "_TABLES", {})
    # figures of a device without values are all 1, flags too: else every step would be a spike, and written down
    patch.setattr(Forensics, "_reasons", lambda self, step, found: [])
    patch.setattr(Replicas, "_named", lambda self, found, places: [])
    if world > 1:
        device_watch.join(world, rank)
    try:
        paths = write_corpus(Path(folder, "data"))
        learns = changes.pop("learns", False)
        config = settings(Path(folder, "run"), paths, **{**SMALL, **changes})
        with device_watch.Watch() as watch, open_trainer(config, alone) as trainer:
            if learns:
                both = trainer.parallel, trainer.parallel
                trainer.doremi = DoReMi(DoReMiConfig(), ["web", "code"], trainer.by_source, *both, alone)
            trainer.start_loop()
            for step in range(FIRST):
                trainer.train_step(step)
            watch.strict = True
            yield trainer
            watch.strict = False
    finally:
        patch.undo()
        if world > 1:
            dist.destroy_process_group()


def steps(folder: str, changes: dict[str, Any], world: int = 1, rank: int = 0) -> int:
    """Steps that were taken without the host's waiting."""
    with opened(folder, changes, world, rank) as trainer:
        for step in range(FIRST, FIRST + 2):
            trainer.train_step(step)
    return len(Path(folder, "run", "metrics.jsonl").read_text().splitlines())


def spoilt(folder: str) -> dict[str, str]:
    """By the part of a step that reads a value: what is said of it."""
    found = {}
    with opened(folder, {}) as trainer:
        for number, (name, (where, method)) in enumerate(PARTS.items()):
            with pytest.MonkeyPatch.context() as patch:
                owner = where(trainer)
                patch.setattr(owner, method, _reading(getattr(owner, method)))
                found[name] = _said(lambda at=FIRST + number: trainer.train_step(at))
    return found


PARTS: dict[str, tuple[Callable[[Trainer], Any], str]] = {
    "feed": (lambda trainer: trainer.feed, "_to_device"),
    "forward": (lambda trainer: trainer.model.blocks["0"], "forward"),
    "gradients": (lambda trainer: type(trainer.parallel.gradients), "norm"),
    "clip": (lambda trainer: type(trainer), "clip"),
    "guard": (lambda trainer: trainer.guard, "judge"),
    "optimizer": (lambda trainer: trainer.loss_scale, "update"),
    "report": (lambda trainer: type(trainer), "report"),
}


def _reading(whole: Callable[..., Any]) -> Callable[..., Any]:
    """``whole``, which then reads a value of the first tensor that it has been given or gives."""

    def reading(*args: Any, **kwargs: Any) -> Any:
        out = whole(*args, **kwargs)
        given = (out, *args, *getattr(out, "__dict__", {}).values())
        next(value for value in given if isinstance(value, torch.Tensor)).flatten()[0].item()
        return out

    return reading


def backward_reads(folder: str) -> None:
    """Ends the process: an exception in a backward does not pass torch's Python device."""
    with opened(folder, {}) as trainer:
        trainer.model.blocks["0"].ffn.w2.weight.register_hook(lambda gradient: gradient * gradient.sum().item())
        trainer.train_step(FIRST)


def waits() -> dict[str, str]:
    """By the call: what is said of it, "" where the host goes on."""
    with device_watch.Watch() as watch:
        x = torch.ones(4, device=watch.device)
        many = torch.ones(4, dtype=torch.int64, device=watch.device)
        host = torch.ones(4)
        number = "a number assigned by a boolean index"
        calls = {
            **_blocking(x, many, host), **_free(x, many, host),
            f"free: {number}" if _is_a_fill() else number: lambda: x.__setitem__(x > 0, 0.0),
        }  # fmt: skip
        watch.strict = True
        return {name: _said(call) for name, call in calls.items()}


def _blocking(x: torch.Tensor, many: torch.Tensor, host: torch.Tensor) -> dict[str, Callable[[], Any]]:
    stream = torch.get_device_module(x.device)
    return {
        "item": lambda: x[0].item(), "float": lambda: float(x[0]), "int": lambda: int(x[0]),
        "bool": lambda: bool(x[0] > 0), "tolist": lambda: x.tolist(), "equal": lambda: torch.equal(x, x),
        "allclose": lambda: torch.allclose(x, x), "nonzero": lambda: x.nonzero(), "where": lambda: torch.where(x > 0),
        "boolean index": lambda: x[x > 0], "assignment by a boolean index": lambda: x.__setitem__(x > 0, x),
        "masked_select": lambda: x.masked_select(x > 0), "unique": lambda: x.unique(),
        "unique_consecutive": lambda: x.unique_consecutive(), "repeat_interleave": lambda: x.repeat_interleave(many),
        "cpu": lambda: x.cpu(), "to the host": lambda: x.to("cpu"),
        "to the device": lambda: host.to(x.device), "copy to the device": lambda: x.copy_(host),
        "copy to the host": lambda: host.copy_(x), "an index of the host": lambda: x[torch.tensor([0])],
        "torch.tensor": lambda: torch.tensor(1.0, device=x.device), "synchronize": lambda: stream.synchronize(),
        "stream": lambda: stream.current_stream().synchronize(), "event": lambda: stream.Event().synchronize(),
    }  # fmt: skip


def _free(x: torch.Tensor, many: torch.Tensor, host: torch.Tensor) -> dict[str, Callable[[], Any]]:
    return {
        "free: non_blocking to the host": lambda: x.to("cpu", non_blocking=True).tolist(),
        "free: non_blocking to the device": lambda: host.pin_memory().to(x.device, non_blocking=True),
        "free: a value of the host": lambda: host[0].item(),
        "free: filled in": lambda: x.__setitem__(0, 2.0), "free: full": lambda: torch.full((), 2.0, device=x.device),
        "free: where with a number": lambda: torch.where(x > 0, x, 0.0),
        "free: repetition by a number": lambda: x.repeat_interleave(2),
        "free: an index of the device": lambda: x[many % 2],
    }  # fmt: skip


def _is_a_fill() -> bool:
    """Whether ``x[mask] = 0.0`` is a fill, which goes on, as in torch 2.15. Up to 2.13 it is an assignment to as
    many places as the mask has, which have to be counted."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func)
            return func(*args, **(kwargs or {}))

    called: list[Any] = []
    x = torch.ones(4)
    mask = x > 0
    with Watch():
        x[mask] = 0.0
    fills, puts = (operator in called for operator in (_ATEN.masked_fill_.Scalar, _ATEN.index_put_.default))
    assert fills != puts, called
    return fills


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except device_watch.HostWaitError as error:
        return str(error)
    return ""


def on_cuda(folder: str, changes: dict[str, Any]) -> None:
    """The same steps on a GPU; torch raises where the host waits."""
    config = settings(Path(folder, "run"), write_corpus(Path(folder, "data")), **{**SMALL, **changes})
    with open_ranks("cuda") as ranks, open_trainer(config, ranks) as trainer:
        trainer.start_loop()
        for step in range(FIRST + 2):
            torch.cuda.set_sync_debug_mode("error" if step >= FIRST else "default")
            trainer.train_step(step)
        torch.cuda.set_sync_debug_mode("default")
