"""Pipeline parallelism: which layers a rank has, and one step's micro-batches through all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quern.model.config import ModelShape
from quern.model.transformer import Transformer
from quern.parallel.accumulation import Inputs
from quern.parallel.mesh import Mesh

if TYPE_CHECKING:
    from quern.parallel.apply import Layout

__all__ = ["Pipeline", "Stage", "local_view", "my_stages"]


@dataclass(frozen=True)
class Stage:
    """A stretch of layers that one rank computes at a time."""

    index: int
    """Among all stages of the pipeline."""
    layers: range


def my_stages(shape: ModelShape, mesh: Mesh, layout: Layout) -> list[Stage] | None:
    """This rank's, in the order of the model; None without a pipeline."""
    if mesh.pp is None:
        return None
    raise NotImplementedError


def local_view(model: Transformer, parts: Sequence[Transformer]) -> Transformer:
    raise NotImplementedError


class Pipeline:
    def __init__(
        self, parts: Sequence[nn.Module], stages: Sequence[Stage], mesh: Mesh, layout: Layout, device: torch.device
    ) -> None:
        raise NotImplementedError

    def forward_backward(self, inputs: Sequence[Inputs], weigh: Callable[[Tensor], Tensor]) -> Tensor:
        raise NotImplementedError

    def forward(self, inputs: Sequence[Inputs]) -> Tensor:
        raise NotImplementedError

    @property
    def counts(self) -> bool:
        raise NotImplementedError
