"""What runs under a call, operator by operator."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Collectives(TorchDispatchMode):
    """How often each collective of a process group is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func.overloadpacket.__name__.strip("_").removesuffix("_base")] += 1
        return func(*args, **(kwargs or {}))


class Floats(TorchDispatchMode):
    """Counts floating tensors, and describes those that are not float64."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.other = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, out)):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self.seen += 1
                if value.dtype != torch.float64:
                    self.other.add(f"{func}: {value.dtype} {tuple(value.shape)}")
        return out
