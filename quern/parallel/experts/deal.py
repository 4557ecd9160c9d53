"""Splits experts over ranks: whole ones over ``ep``, and each one's width over ``tp``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quern.model.moe.experts import Experts
from quern.model.moe.layer import MoE
from quern.model.transformer import Transformer
from quern.parallel.experts.exchange import Compute, Exchange, Places, Swiglu
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


def exchange_tokens(part: Transformer, mesh: Mesh) -> None:
    """Tokens travel to the ranks of ``ep`` that hold their experts, once their weights are split. In place."""
    moe = part.shape.moe
    assert moe is not None
    groups, held = [], moe.num_experts // mesh.plan.ep
    for group in reversed(mesh.expert_groups):  # the innermost first
        groups.append((group.group_name, dist.get_world_size(group), held))
        held *= groups[-1][1]
    for experts in experts_of(part):
        if moe.limit is None:
            experts.multiply = partial(_multiply, experts, groups)  # type: ignore[method-assign]
        else:
            ((name, ranks, own),) = groups
            experts.multiply = partial(_in_places, experts, name, ranks, own, moe.limit)  # type: ignore[method-assign]


def _multiply(
    experts: Experts, groups: Sequence[tuple[str, int, int]], x_TD: Tensor, sent_TK: Tensor, weights_TK: Tensor,
    *weights: Tensor,
) -> Tensor:  # fmt: skip
    w1, w2, w3 = map(to_local, weights)
    compute: Compute = lambda x, sent, by, assigned: Experts.multiply(experts, x, sent, by, w1, w2, w3, assigned)  # noqa: E731
    for name, ranks, held in groups:
        compute = Exchange(name, ranks, held, compute)
    return compute(x_TD, sent_TK, weights_TK, None)


def _in_places(
    experts: Experts, group: str, ranks: int, held: int, limit: tuple[int, int], x_TD: Tensor, sent_TK: Tensor,
    weights_TK: Tensor, *weights: Tensor,
) -> Tensor:  # fmt: skip
    w1, w2, w3 = map(to_local, weights)
    swiglu: Swiglu = lambda x, ends: experts.swiglu(x, ends, w1, w2, w3)  # noqa: E731
    return Places(group, ranks, held, limit, swiglu)(x_TD, sent_TK, weights_TK)
