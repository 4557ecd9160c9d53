"""What the ranks of the parity tests run; imports no oracle. The cases are the package's (``quern.train.parity``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quern.train.parity.matrix import Case
from quern.train.parity.run import Outcome, case_config, train
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer


def train_all(cases: list[Case], data: str, folder: str) -> list[Outcome]:
    """Every case from the config to the last checkpoint; collective."""
    return [train(case, data, str(Path(folder, str(case)))) for case in cases]


class FloatsOf(TorchDispatchMode):
    """Counts float64 tensors, and names every operator that sees or makes a floating tensor of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.float64, self.other = 0, set[tuple[str, str, tuple[int, ...]]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, out)):
            if not isinstance(value, torch.Tensor) or value.is_meta:  # a checkpoint's sizes are told by such a model
                continue
            if value.is_floating_point() or value.is_complex():
                if value.dtype == torch.float64:
                    self.float64 += 1
                else:
                    name = func.overloadpacket.__name__
                    if name == "_to_copy":
                        name += f" from {str(args[0].dtype).removeprefix('torch.')}"
                    self.other.add((name, str(value.dtype).removeprefix("torch."), tuple(value.shape)))
        return out


def floats_of(cases: list[Case], data: str, folder: str) -> list[tuple[int, set[tuple[str, str, tuple[int, ...]]]]]:
    """Of every case's :meth:`Trainer.fit`; collective."""
    found = []
    for case in cases:
        config = case_config(case, data, str(Path(folder, str(case))))
        with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer, FloatsOf() as watch:
            trainer.fit()
        found.append((watch.float64, watch.other))
    return found
