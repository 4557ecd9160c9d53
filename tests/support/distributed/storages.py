"""What stays alive of what operators make."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Storages that operators' outputs lie in, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        storages = [value.untyped_storage() for value in tree_leaves(out) if isinstance(value, Tensor)]
        self.seen += [(StorageWeakRef(storage), storage.nbytes()) for storage in storages]
        return out

    def bytes(self) -> int:
        return sum({reference.cdata: size for reference, size in self.seen if not reference.expired()}.values())
