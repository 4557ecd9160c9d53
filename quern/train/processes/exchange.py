"""Measures the link between two ranks of a process group."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["exchange"]


def exchange(got: Tensor, sent: Tensor, other: int) -> float:
    """Bytes a second and direction between this rank and the rank ``other`` of the default group: both send at once,
    what the other has ``sent`` into ``got``."""
    began = time.perf_counter()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, got, other)]):
        work.wait()
    torch.get_device_module(got.device).synchronize()
    return got.nbytes / (time.perf_counter() - began)
