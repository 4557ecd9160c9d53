"""The global gradient norm and clipping, against NumPy on whole gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from quern.parallel.clip import clip, global_grad_norm
from quern.parallel.planning.mesh import Mesh, MeshPlan
from quern.train.config import OptimizerConfig
from quern.train.step.optimizer import build_optimizer, step

SHAPES = ((7, 5), (13,), (3, 2), (1, 4))


def whole_gradients(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def plain_parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for parameter, gradient in zip(parameters, whole_gradients(dtype), strict=True):
        parameter.grad = gradient.clone()
    return parameters


def numpy_norm() -> float:
    return float(np.sqrt(sum((gradient.numpy() ** 2).sum() for gradient in whole_gradients())))


def clipped(max_norm: float) -> list[np.ndarray]:
    factor = min(1.0, max_norm / (numpy_norm() + 1e-6))
    return [gradient.numpy() * factor for gradient in whole_gradients()]


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_plain_gradients(max_norm: float) -> None:
    parameters = plain_parameters()
    norm = global_grad_norm(iter(parameters))
    assert norm.dtype == torch.float64
    assert norm.shape == ()
    np.testing.assert_allclose(norm.item(), numpy_norm(), rtol=1e-14)
    clip(iter(parameters), max_norm, norm)
    for parameter, expected in zip(parameters, clipped(max_norm), strict=True):
        np.testing.assert_allclose(parameter.grad.numpy(), expected, rtol=1e-14)


def test_parameters_without_a_gradient_do_not_count() -> None:
    parameters = plain_parameters()
    parameters.insert(1, nn.Parameter(torch.ones(9)))
    norm = global_grad_norm(parameters)
    np.testing.assert_allclose(norm.item(), numpy_norm(), rtol=1e-14)
    clip(parameters, 0.5, norm)
    assert parameters[1].grad is None
    with pytest.raises(ValueError, match="no parameter has a gradient"):
        global_grad_norm(parameters[1:2])


def test_a_norm_that_is_not_finite_stays_so() -> None:
    for bad in (float("nan"), float("inf")):
        parameters = plain_parameters(torch.float32)
        parameters[2].grad[1, 1] = bad
        assert not torch.isfinite(global_grad_norm(parameters))


def test_the_host_never_waits_for_the_device() -> None:
    """Fake tensors hold no values: whatever the host reads of one (item, bool, a branch) is an error."""
    with FakeTensorMode():
        model = nn.Linear(3, 4)
        optimizer = build_optimizer(model, OptimizerConfig())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        norm = global_grad_norm(model.parameters())
        clip(model.parameters(), 1.0, norm)
        step(optimizer, 1e-3, skip=~torch.isfinite(norm))
        with pytest.raises(Exception, match="_local_scalar_dense"):
            bool(norm > 1)


def mixed_meshes(max_norm: float) -> dict[str, Any]:
    """A plain gradient, one on a 1-D mesh, one on HSDP's 2-D mesh, one replicated: what later layouts put together."""
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    layouts = [(flat, [Shard(0)]), (square, [Replicate(), Shard(0)]), None, (flat, [Replicate()])]
    parameters = []
    for gradient, layout in zip(whole_gradients(), layouts, strict=True):
        if layout is not None:
            gradient = distribute_tensor(gradient, layout[0], layout[1])
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        parameters.append(parameter)
    norm = global_grad_norm(parameters)
    plain = type(norm) is torch.Tensor
    clip(parameters, max_norm, norm)
    gradients = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
    return {"norm": norm, "plain": plain, "gradients": gradients}


@pytest.mark.slow
@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_gradients_on_several_meshes(kept_ranks: Any, max_norm: float) -> None:
    results = kept_ranks(mixed_meshes, 4, max_norm)
    for result in results:
        assert result["plain"]
        assert torch.equal(result["norm"], results[0]["norm"])
        np.testing.assert_allclose(result["norm"].item(), numpy_norm(), rtol=1e-14)
        for found, expected in zip(result["gradients"], clipped(max_norm), strict=True):
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-14)


def skip_on_all_ranks(culprit: int) -> tuple[bool, bool, list[float]]:
    """One value of one rank's shard is NaN: (the norm says so, nothing has changed, steps counted)."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("dp_shard",))
    model = nn.Linear(5, 7, bias=True, dtype=torch.float64)
    for name in ("weight", "bias"):
        value = distribute_tensor(
            torch.linspace(-1, 1, getattr(model, name).numel(), dtype=torch.float64).view_as(getattr(model, name)),
            mesh,
            [Shard(0)],
        )
        setattr(model, name, nn.Parameter(value))
    optimizer = build_optimizer(model, OptimizerConfig())
    for bad in (False, True):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter.detach())
        if bad and dist.get_rank() == culprit:
            model.weight.grad.to_local()[0, 0] = float("nan")
        before = [value.to_local().clone() for value in everything(model, optimizer)]
        norm = global_grad_norm(model.parameters())
        clip(model.parameters(), 1.0, norm)
        step(optimizer, 1e-2, skip=~torch.isfinite(norm))
    after = [value.to_local() for value in everything(model, optimizer)]
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return bool(norm.isnan()), same, [float(optimizer.state[p]["step"]) for p in model.parameters()]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    states = [optimizer.state[p].get(key) for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
    return [*(p.detach() for p in model.parameters()), *(state for state in states if state is not None)]


@pytest.mark.slow
def test_a_nan_on_one_rank_skips_the_step_on_all(kept_ranks: Any) -> None:
    for nan, same, steps in kept_ranks(skip_on_all_ranks, 3, 1):
        assert nan
        assert same
        assert steps == [1.0, 1.0]


def norm_with_an_earlier_mesh_in_its_place() -> float:
    """DTensor's caches may put an equal mesh that the process made before on a gradient, on one rank and not the other.

    ``DTensor.from_local`` does so here by hand.
    """
    names, placements = ("dp_replicate", "dp_shard"), (Replicate(), Shard(0))
    meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=names) for _ in range(2)]
    parameters = plain_parameters()
    for number, parameter in enumerate(parameters):
        assert parameter.grad is not None
        mesh, whole = meshes[0 if number == 0 and dist.get_rank() > 1 else 1], parameter.grad
        mine = [*whole.chunk(2), whole[:0]][dist.get_rank() % 2]
        split = DTensor.from_local(
            mine, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )  # fmt: skip
        parameters[number] = nn.Parameter(torch.zeros_like(split))
        parameters[number].grad = split
    return global_grad_norm(parameters, mesh=Mesh(MeshPlan(2, 2), "cpu", meshes[1])).item()


@pytest.mark.slow
def test_gradients_on_equal_meshes_are_one_group(kept_ranks: Any) -> None:
    """By each gradient's own mesh the replicas would add up in different groups, and their weights part."""
    found = kept_ranks(norm_with_an_earlier_mesh_in_its_place, 4)
    assert len(set(found)) == 1
    np.testing.assert_allclose(found[0], numpy_norm(), rtol=1e-14)
