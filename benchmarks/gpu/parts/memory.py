"""What the planner says that one GPU holds in a step of the trainer, beside what torch's allocator counts."""

from __future__ import annotations

import tempfile
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parts.common import gpu, shape_of
from parts.training import trainer_of
from quern.planner.hardware import load_hardware
from quern.planner.search import room
from quern.train.config import TrainConfig
from quern.train.setup import check_settings
from quern.train.summary import peak_memory, run_state, step_of

#: Steps that are not counted: they fill caches, compile, and make moments.
FREE = 3
GIB = 2**30


def peaks(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The most that tensors take in the steps after the first, planned and measured; on a GPU besides what the
    allocator reserves, planned without the device's context. On a CPU the tensors that operators give are counted.
    ``passes``: tensors are planned at most ``bound`` below what they take."""
    counter: Alive | Allocated = Allocated() if gpu(spec).type == "cuda" else Alive()
    with tempfile.TemporaryDirectory() as folder, counter, trainer_of(spec, folder) as trainer:
        for step in range(spec["steps"]):
            if step == FREE:
                counter.begin()
            trainer.train_step(step)
        config = trainer.config
    planned, seen = told(config, spec), counter.seen()
    tensors = {"at": planned["at"], "planned GiB": planned["tensors"] / GIB, "GiB": seen["tensors"] / GIB,
               "planned / seen": planned["tensors"] / seen["tensors"]}  # fmt: skip
    reserved = {} if "reserved" not in seen else {
        "reserved, planned GiB": planned["reserved"] / GIB, "reserved GiB": seen["reserved"] / GIB,
        "reserved, planned / seen": planned["reserved"] / seen["reserved"],
    }  # fmt: skip
    return [{**tensors, **reserved, "passes": tensors["planned / seen"] >= 1 - spec["bound"]}]


def told(config: TrainConfig, spec: dict[str, Any]) -> dict[str, Any]:
    """Bytes of tensors, at which moment, and with what the allocator takes besides."""
    layout = check_settings(config, 1, spec["vocab_size"])
    step = step_of(config, shape_of(spec), layout)
    peak = peak_memory(step, config)
    needs = room(step, run_state(config), load_hardware("h200"))
    return {
        "at": peak["moment"], "tensors": sum(peak["components"].values()),
        "reserved": needs.needs - needs.components["context and libraries"],
    }  # fmt: skip


class Allocated:
    """As torch's allocator of CUDA counts."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def seen(self) -> dict[str, int]:
        torch.cuda.synchronize()
        return {"tensors": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


class Alive(TorchDispatchMode):
    """Bytes of the storages that operators have given and that are alive, and the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self._there: dict[int, weakref.ref[Any]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and not value.is_meta:
                storage = value.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self._there:
                    self._there[key] = weakref.ref(storage, partial(self._gone, key, size))
                    self.now += size
        self.peak = max(self.peak, self.now)
        return out

    def _gone(self, key: int, size: int, _: object) -> None:
        del self._there[key]
        self.now -= size

    def begin(self) -> None:
        self.peak = self.now

    def seen(self) -> dict[str, int]:
        return {"tensors": self.peak}
