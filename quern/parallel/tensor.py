"""Tensor and sequence parallelism."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from quern.model.transformer import Transformer

__all__ = ["split_tensors"]


def split_tensors(model: Transformer, mesh: DeviceMesh, *, async_tp: bool = False) -> None:
    raise NotImplementedError
