"""Splits experts over ranks: whole ones over ``ep``, and each one's width over ``tp``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quern.model.moe.experts import Experts
from quern.model.moe.layer import MoE
from quern.model.transformer import Transformer
from quern.parallel.experts.deepep import Buffer, DeepEP
from quern.parallel.experts.exchange import Compute, Exchange, Places
from quern.parallel.planning.mesh import Mesh
from quern.parallel.tensors.weights import split, to_local

__all__ = ["exchange_tokens", "experts_of", "split_experts"]

_WIDTH = {"w1": 1, "w2": 2, "w3": 1}


def experts_of(part: Transformer) -> Iterator[Experts]:
    """Of each layer of a model, or of a part of one, that has them."""
    for module in part.blocks.modules():
        if isinstance(module, MoE):
            yield module.experts


def split_experts(part: Transformer, mesh: DeviceMesh) -> None:
    """Their weights become this rank's share, over a mesh of ``ep``, of ``tp``, or of both. In place; sends nothing."""
    assert mesh.mesh_dim_names is not None
    for experts in experts_of(part):
        for name, width in _WIDTH.items():
            dims = [0 if axis == "ep" else width for axis in mesh.mesh_dim_names]
            setattr(experts, name, split(getattr(experts, name), dims, mesh))


def exchange_tokens(part: Transformer, mesh: Mesh, *, float8: bool = False, buffer: Buffer | None = None) -> None:
    """Tokens travel to the ranks of ``ep`` that hold their experts, once their weights are split; in FP8 with
    ``float8``, by DeepEP through its ``buffer``. In place."""
    moe = part.shape.moe
    assert moe is not None
    stages, held = [], moe.num_experts // mesh.plan.ep
    for group in reversed(mesh.expert_groups):  # the innermost first
        stages.append((group.group_name, dist.get_world_size(group), held))
        held *= stages[-1][1]
    for experts in experts_of(part):
        experts.multiply = _Dealt(experts, stages, moe.limit, float8, buffer).multiply  # type: ignore[assignment, method-assign]


@dataclass(frozen=True, eq=False)
class _Dealt:
    """Of one layer."""

    experts: Experts
    stages: Sequence[tuple[str, int, int]]
    """Of each the group, its ranks, and experts of each, the innermost first."""
    limit: tuple[int, int] | None
    float8: bool
    buffer: Buffer | None

    def multiply(
        self, x_TD: Tensor, sent_TK: Tensor, weights_TK: Tensor, *weights: Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:  # fmt: skip
        """In place of :meth:`.Experts.multiply`, with the weights of this rank."""
        w1, w2, w3 = map(to_local, weights)

        def swiglu(x_AD: Tensor, ends_E: Tensor) -> Tensor:
            return self.experts.swiglu(x_AD, ends_E, w1, w2, w3)

        def here(x_MD: Tensor, sent_MK: Tensor, weights_MK: Tensor, assigned: int | None) -> Tensor:
            return Experts.multiply(self.experts, x_MD, sent_MK, weights_MK, w1, w2, w3, assigned=assigned)

        if self.limit is not None:
            ((group, ranks, held),) = self.stages
            places = Places(group, ranks, held, self.limit, swiglu, self.float8)
            return places(x_TD, sent_TK, weights_TK, meanwhile)
        if self.buffer is not None:
            ((_, ranks, held),) = self.stages
            return DeepEP(self.buffer, ranks, held, here)(x_TD, sent_TK, weights_TK, meanwhile=meanwhile)
        compute: Compute = here
        for group, ranks, held in self.stages[:-1]:
            compute = Exchange(group, ranks, held, compute, self.float8)
        return Exchange(*self.stages[-1], compute, self.float8)(x_TD, sent_TK, weights_TK, meanwhile=meanwhile)
