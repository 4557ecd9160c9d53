"""Tells when FSDP2 makes a rank's computation wait for the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from quern.torch_versions import fsdp_groups

__all__ = ["tell_waits"]

_CALLS = ("unshard", "wait_for_unshard", "post_backward")
"""Of torch's groups of parameters: on the CPU the first and the last wait themselves, on CUDA the stream of the
computation waits in the second, and in the third for an earlier sum."""


def tell_waits(model: nn.Module, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call ``before`` and ``after`` around everything in which a unit of FSDP2 waits. Nothing for other layouts."""
    for module in model.modules():
        for group in fsdp_groups(module) if isinstance(module, FSDPModule) else ():
            for name in _CALLS:
                setattr(group, name, _told(getattr(group, name), before, after))


def _told(call: Callable[..., Any], before: Callable[[], None], after: Callable[[], None]) -> Callable[..., Any]:
    def told(*arguments: Any, **named: Any) -> Any:
        before()
        try:
            return call(*arguments, **named)
        finally:
            after()

    return told
