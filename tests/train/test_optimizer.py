"""AdamW against the algorithm of Loshchilov & Hutter (2019), written in NumPy float64; and the skip."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quern.parallel.clip import clip_divisor
from quern.train.config import OptimizerConfig
from quern.train.step.optimizer import build_optimizer, step

CONFIG = OptimizerConfig(lr=7.0, beta1=0.87, beta2=0.96, eps=1e-7, weight_decay=0.3)
LEARNING_RATES = (1e-2, 3e-2, 0.0, 2e-2, 1e-3)
SKIPPED = 2


class Network(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3, dtype=dtype)
        self.norm = nn.RMSNorm(3, dtype=dtype)
        self.head = nn.Linear(3, 5, dtype=dtype)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(2, 2, dtype=dtype), requires_grad=False)


def weights(dtype: torch.dtype = torch.float64) -> Network:
    torch.manual_seed(0)
    return Network(dtype)


def gradients(number: int, model: Network) -> dict[str, np.ndarray]:
    random = np.random.default_rng(number)
    return {name: random.normal(size=tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad}


def set_gradients(model: Network, values: dict[str, np.ndarray]) -> None:
    for name, parameter in model.named_parameters():
        if name in values:
            parameter.grad = torch.as_tensor(values[name], dtype=parameter.dtype)


class Reference:
    """Algorithm 2 of the paper: decay apart from the moments, both moments corrected for their start at zero."""

    def __init__(self, model: Network) -> None:
        self.weights = {name: p.detach().numpy().copy() for name, p in model.named_parameters() if p.requires_grad}
        self.first = {name: np.zeros_like(value) for name, value in self.weights.items()}
        self.second = {name: np.zeros_like(value) for name, value in self.weights.items()}
        self.steps = 0

    def step(self, gradients: dict[str, np.ndarray], lr: float) -> None:
        self.steps += 1
        for name, gradient in gradients.items():
            decay = CONFIG.weight_decay if name in ("embed.weight", "head.weight") else 0.0
            self.first[name] = CONFIG.beta1 * self.first[name] + (1 - CONFIG.beta1) * gradient
            self.second[name] = CONFIG.beta2 * self.second[name] + (1 - CONFIG.beta2) * gradient**2
            first = self.first[name] / (1 - CONFIG.beta1**self.steps)
            second = self.second[name] / (1 - CONFIG.beta2**self.steps)
            update = first / (np.sqrt(second) + CONFIG.eps) + decay * self.weights[name]
            self.weights[name] = self.weights[name] - lr * update


def state(model: Network, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights, moments and step counts by name."""
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{key}": value.clone() for key, value in optimizer.state.get(parameter, {}).items()}
    return found


def test_five_steps_and_a_skipped_one_are_the_papers() -> None:
    model = weights()
    reference, optimizer = Reference(model), build_optimizer(model, CONFIG)
    for number, lr in enumerate(LEARNING_RATES):
        if number == SKIPPED:
            before = state(model, optimizer)
            set_gradients(model, {name: np.full_like(g, np.nan) for name, g in gradients(0, model).items()})
            step(optimizer, 1.0, skip=torch.tensor(True))
            assert same_bits(before, state(model, optimizer))
        values = gradients(number, model)
        set_gradients(model, values)
        step(optimizer, lr, skip=torch.tensor(False) if number % 2 else None)
        reference.step(values, lr)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            close(parameter, reference.weights[name])
            close(optimizer.state[parameter]["exp_avg"], reference.first[name])
            close(optimizer.state[parameter]["exp_avg_sq"], reference.second[name])
            assert optimizer.state[parameter]["step"] == len(LEARNING_RATES)
    assert torch.equal(model.frozen, torch.ones(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("most", [0.5, 1e3], ids=["clipped", "small"])
def test_the_update_clips_as_it_reads(most: float) -> None:
    """As torch's own clipping before an update does, in float64."""
    model, other = weights().float(), weights()
    optimizer, reference = build_optimizer(model, CONFIG), Reference(other)
    for number, lr in enumerate(LEARNING_RATES):
        values = gradients(number, model)
        set_gradients(model, values)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        step(optimizer, lr, divisor=clip_divisor(most, norm))
        set_gradients(other, values)
        torch.nn.utils.clip_grad_norm_([p for p in other.parameters() if p.requires_grad], most)
        reference.step({name: p.grad.numpy().copy() for name, p in other.named_parameters() if p.grad is not None}, lr)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            np.testing.assert_allclose(parameter.detach().numpy(), reference.weights[name], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(optimizer.state[parameter]["exp_avg"], reference.first[name], rtol=1e-5)


def close(found: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-13, atol=1e-15)


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].numpy().tobytes() == b[name].numpy().tobytes() for name in a)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_the_first_step_can_be_skipped_too(bad: float) -> None:
    """Moments do not exist before it; afterwards they are zero, and the next step is the first."""
    skipped, plain = weights(torch.float32), weights(torch.float32)
    optimizers = [build_optimizer(model, CONFIG) for model in (skipped, plain)]
    set_gradients(skipped, {name: np.full_like(g, bad) for name, g in gradients(0, skipped).items()})
    step(optimizers[0], 1e-2, skip=torch.tensor(True))
    for model, optimizer in zip((skipped, plain), optimizers, strict=True):
        set_gradients(model, gradients(1, model))
        step(optimizer, 1e-2)
    assert same_bits(state(skipped, optimizers[0]), state(plain, optimizers[1]))


def test_only_matrices_decay() -> None:
    optimizer = build_optimizer(model := weights(), CONFIG)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: decay.get(id(parameter)) for name, parameter in model.named_parameters()}
    assert found == {
        "embed.weight": 0.3, "head.weight": 0.3, "norm.weight": 0.0, "head.bias": 0.0, "scale": 0.0, "frozen": None,
    }  # fmt: skip


def test_tied_weights_are_updated_once() -> None:
    model = weights()
    model.head.weight = model.embed.weight
    counts = [id(p) for group in build_optimizer(model, CONFIG).param_groups for p in group["params"]]
    assert len(counts) == len(set(counts)) == 4
