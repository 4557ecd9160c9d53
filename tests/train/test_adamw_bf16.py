"""AdamW with moments or gradients in BF16 against the paper's algorithm in NumPy, whose moments are rounded at each
step; the skip, the divisor, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quern.config import digest
from quern.errors import InputError
from quern.model.config import ModelConfig
from quern.parallel.clip import global_grad_norm
from quern.parallel.data import gradients_in
from quern.parallel.planning.checks import Task, check_layout
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan
from quern.train.config import OptimizerConfig, TrainConfig
from quern.train.step.adamw_bf16 import AdamWBF16
from quern.train.step.optimizer import build_optimizer, step
from support.oracles.bf16_adamw import Bf16AdamW, bf16

CONFIG = OptimizerConfig(lr=7.0, beta1=0.873, beta2=0.957, eps=1e-7, weight_decay=0.3, moments="bf16")
"""With rates of which no multiple of a BF16 lies halfway between two: float32 and float64 round such apart."""
LEARNING_RATES = (1e-2, 3e-2, 0.0, 2e-2, 1e-3)
DIVISOR = 1.75


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.RMSNorm(3)
        self.head = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def reference(model: nn.Module, **changes: Any) -> Bf16AdamW:
    weights = {name: p.detach().double().numpy().copy() for name, p in trained(model).items()}
    decay = {name: CONFIG.weight_decay * (name in ("embed.weight", "head.weight")) for name in weights}
    return Bf16AdamW(weights, decay, CONFIG.beta1, CONFIG.beta2, CONFIG.eps, **changes)


def give(model: nn.Module, number: int, dtype: torch.dtype, factor: float = 1.0) -> dict[str, Any]:
    """Sets gradients, and returns them as they are."""
    random = np.random.default_rng(number)
    for parameter in trained(model).values():
        parameter.grad_dtype = None
        parameter.grad = torch.as_tensor(factor * random.normal(size=tuple(parameter.shape))).to(dtype)
    return {name: p.grad.double().numpy() for name, p in trained(model).items() if p.grad is not None}


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        found |= {f"{name}/{key}": value.clone() for key, value in optimizer.state.get(parameter, {}).items()}
    return {name: value.reshape(-1).view(torch.uint8).numpy().tobytes() for name, value in found.items()}


@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("divides", [False, True])
def test_moments_are_the_papers_rounded_at_each_step(gradients: torch.dtype, divides: bool) -> None:
    model = Network()
    optimizer, expected = build_optimizer(model, CONFIG), reference(model)
    assert isinstance(optimizer, AdamWBF16)
    for number, lr in enumerate(LEARNING_RATES):
        values = give(model, number, gradients)
        step(optimizer, lr, torch.tensor(False) if number % 2 else None, torch.tensor(DIVISOR) if divides else None)
        expected.step({name: value / (DIVISOR if divides else 1) for name, value in values.items()}, lr)
    for name, parameter in trained(model).items():
        slots = optimizer.state[parameter]
        assert slots["exp_avg"].dtype == slots["exp_avg_sq"].dtype == torch.bfloat16
        assert np.array_equal(slots["exp_avg"].double().numpy(), expected.first[name]), name
        assert np.array_equal(slots["exp_avg_sq"].double().numpy(), expected.second[name]), name
        assert slots["step"] == len(LEARNING_RATES)
        np.testing.assert_allclose(parameter.detach().numpy(), expected.weights[name], rtol=1e-5, atol=1e-7)
        assert parameter.dtype == torch.float32
    assert torch.equal(model.frozen, torch.ones(2, 2))


def test_gradients_in_bf16_leave_moments_in_fp32() -> None:
    model, config = Network(), CONFIG.model_copy(update={"moments": "fp32", "gradients": "bf16"})
    optimizer, expected = build_optimizer(model, config), reference(model, rounds=False)
    for number, lr in enumerate(LEARNING_RATES):
        values = give(model, number, torch.bfloat16)
        step(optimizer, lr)
        expected.step(values, lr)
    for name, parameter in trained(model).items():
        assert optimizer.state[parameter]["exp_avg_sq"].dtype == torch.float32
        np.testing.assert_allclose(optimizer.state[parameter]["exp_avg"].numpy(), expected.first[name], rtol=1e-5)
        np.testing.assert_allclose(parameter.detach().numpy(), expected.weights[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("before", [0, 2])
def test_a_skip_leaves_every_bit(bad: float, before: int) -> None:
    """The first step can be skipped too, and a skipped one is not counted."""
    skipped, plain = Network(), Network()
    optimizers = [build_optimizer(model, CONFIG) for model in (skipped, plain)]
    for number in range(before):
        for model, optimizer in zip((skipped, plain), optimizers, strict=True):
            give(model, number, torch.float32)
            step(optimizer, 1e-2)
    give(skipped, 9, torch.float32, factor=bad)
    step(optimizers[0], 1.0, torch.tensor(True), torch.tensor(float("nan")))
    if before:
        assert state(skipped, optimizers[0]) == state(plain, optimizers[1])
    for model, optimizer in zip((skipped, plain), optimizers, strict=True):
        give(model, 10, torch.float32)
        step(optimizer, 1e-2)
    assert state(skipped, optimizers[0]) == state(plain, optimizers[1])


def test_a_state_dict_brings_moments_back_as_they_were() -> None:
    """torch makes a moment of the dtype of its parameter."""
    model, other = Network(), Network()
    optimizer, again = build_optimizer(model, CONFIG), build_optimizer(other, CONFIG)
    give(model, 0, torch.float32)
    step(optimizer, 1e-2)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(optimizer.state_dict())
    assert state(model, optimizer) == state(other, again)


@pytest.mark.long
def test_the_compiled_update_is_the_same() -> None:
    """But for fused multiply-adds, and for the order of none."""
    models = [Network(), Network()]
    optimizers = [build_optimizer(model, CONFIG) for model in models]
    optimizers[1]._compiled = True
    for number, lr in enumerate(LEARNING_RATES):
        for model, optimizer in zip(models, optimizers, strict=True):
            give(model, number, torch.float32)
            step(optimizer, lr, torch.tensor(number == 3), torch.tensor(DIVISOR))
    for a, b in zip(*(trained(model).values() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        first, second = (optimizer.state[p] for optimizer, p in zip(optimizers, (a, b), strict=True))
        assert first["step"] == second["step"] == len(LEARNING_RATES) - 1
        torch.testing.assert_close(first["exp_avg_sq"], second["exp_avg_sq"], rtol=2**-7, atol=0)


# --- the decay rates that rounding to nearest takes -------------------------------------------------------------------


def stuck(beta2: float) -> int:
    """How many of BF16's significands a second moment never leaves, with gradients of zero."""
    values = 1 + torch.arange(128) / 128
    weight = nn.Parameter(torch.zeros(128))
    optimizer = AdamWBF16([{"params": [weight]}], lr=0.0, betas=(0.9, beta2), eps=1e-8)
    weight.grad = torch.zeros(128)
    optimizer.step()
    optimizer.state[weight]["exp_avg_sq"].copy_(values)
    optimizer.step()
    return int((optimizer.state[weight]["exp_avg_sq"] == values).sum())


def test_a_second_moment_falls_from_every_value_below_257_258() -> None:
    assert [stuck(beta2) for beta2 in (0.95, 0.99, 0.996, 0.99612)] == [0, 0, 0, 0]
    assert stuck(0.99613) == 1  # 1 + 2^-7
    assert stuck(0.999) == 128


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beta2": 0.999}, r"beta2: a moment in BF16 stops moving .* with moments bf16, or moments fp32, got 0.999"),
        ({"beta1": 0.998}, r"beta1: a moment in BF16 stops moving .* got 0.998"),
    ],
)
def test_decay_rates_that_stall_are_refused(given: dict[str, float], message: str) -> None:
    OptimizerConfig(**given)
    OptimizerConfig(beta2=0.996, moments="bf16")
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**given, moments="bf16")


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiles", [False, True])
def test_gradients_are_added_up_in_bf16(compiles: bool) -> None:
    """Each micro-batch is rounded, and the sum again; weights stay in float32, and the norm is summed in it."""
    torch.manual_seed(0)
    model = nn.Linear(40, 50, bias=False)
    gradients_in(model, torch.bfloat16)
    if compiles:
        model.compile(backend="aot_eager")
    expected = np.zeros((50, 40))
    for _ in range(3):
        x_BI, dy_BO = torch.randn(7, 40), torch.randn(7, 50)
        model(x_BI).backward(dy_BO)
        expected = bf16(expected + bf16(np.float32(dy_BO.numpy().T @ x_BI.numpy())))
    assert model.weight.dtype == torch.float32
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.bfloat16
    apart = np.abs(model.weight.grad.double().numpy() - expected)
    assert (apart > 0).mean() < 0.01  # where a product's last bit decides
    assert (apart <= 2**-7 * np.abs(expected)).all()
    norm = global_grad_norm(model.parameters())
    assert norm.dtype == torch.float32
    np.testing.assert_allclose(norm.item(), np.linalg.norm(model.weight.grad.double().numpy()), rtol=1e-5)


def config(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate({"run_dir": "x", "data": [{"path": "y"}], "steps": 5, **sections})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"precision": "fp64", "optimizer": {"moments": "bf16"}},
            r"optimizer.moments: .* expected fp32 with",
        ),
        ({"precision": "fp16", "optimizer": {"gradients": "bf16"}}, r"optimizer.gradients: .* precision fp16"),
        ({"precision": "fp32", "optimizer": {"gradients": "bf16"}}, r"optimizer.gradients: .* precision fp32"),
    ],
)
def test_other_precisions_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**sections)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (MeshPlan(dp_replicate=2), r"optimizer.gradients: .* DDP .* expected fp32, or parallel.dp_shard > 1"),
        (MeshPlan(pp=2), r"optimizer.gradients: .* pipeline .* expected fp32, or parallel.pp 1"),
        (MeshPlan(pp=2, dp_shard=2), r"optimizer.gradients: .* pipeline"),
    ],
)
def test_layouts_that_sum_in_the_weights_type_are_refused(plan: MeshPlan, message: str) -> None:
    shape = ModelConfig(num_layers=2, dim=32, num_heads=4).shape(100)
    task = Task({"global_batch": 8})
    layout = Layout(torch.bfloat16, plan, bf16_gradients=True, seq_len=16)
    with pytest.raises(InputError, match=message):
        check_layout(shape, layout, task)
    for other in (MeshPlan(), MeshPlan(dp_shard=2), MeshPlan(dp_replicate=2, dp_shard=2), MeshPlan(tp=2)):
        check_layout(shape, Layout(torch.bfloat16, other, bf16_gradients=True, seq_len=16), task)


def test_the_defaults_are_torchs_optimizer_and_leave_a_config_as_it_was() -> None:
    assert type(build_optimizer(Network(), OptimizerConfig())) is torch.optim.AdamW
    plain, said = config(), config(optimizer={"moments": "fp32", "gradients": "fp32"})
    assert {*plain.model_dump(mode="json")["optimizer"]} == {
        "lr", "beta1", "beta2", "eps", "weight_decay", "clip",
    }  # fmt: skip
    assert digest(plain) == digest(said) == DIGEST
    assert digest(config(optimizer={"moments": "bf16"})) != DIGEST


DIGEST = "a506037b52040e989e9145fcccfed2f7"
"""As it was before there were these keys."""
