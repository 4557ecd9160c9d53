"""What is left to do with gradients once every micro-batch is through: sums that no wrapper makes, the norm, clipping.

Data parallelism has summed over its ranks already. Two sums are left. A parameter that tensor parallelism does not
split (norms; key and value heads that several ranks share) has seen this rank's tokens or heads alone. And embeddings
that are tied across the ends of a pipeline exist twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from quern.parallel.clip import clip, global_grad_norm
from quern.parallel.mesh import Mesh

__all__ = ["Gradients"]


@dataclass(frozen=True)
class Gradients:
    """The gradients of this rank's parameters; ``model`` knows them by their global names."""

    model: nn.Module
    mesh: Mesh

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that have a gradient."""
        return [parameter for parameter in self.model.parameters() if parameter.grad is not None]

    def finish(self) -> None:
        """Make every gradient whole. After the last backward, before anything looks at one. Collective."""
        if self.mesh.tp is not None or self.mesh.pp is not None:
            raise NotImplementedError

    def norm(self) -> torch.Tensor:
        """The 2-norm of all gradients of all stages as one vector: 0-d, the same bits on every rank. Collective."""
        return global_grad_norm(self.parameters)

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scale all gradients by ``max_norm / norm`` where that is below 1, on device, in place."""
        clip(self.parameters, max_norm, norm)
