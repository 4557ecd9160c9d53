"""Number formats: the loss scale against torch's GradScaler, and whole runs in half precision beside float32."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quern.train.config import TrainConfig
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer
from quern.train.step.precision import LossScale, precision_of
from quern.train.trainer import Trainer
from support.train.corpora import make_shards, write_run

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "compute", "master", "scaled"),
    [
        ("bf16", torch.bfloat16, torch.float32, False),
        ("fp16", torch.float16, torch.float32, True),
        ("fp32", torch.float32, torch.float32, False),
        ("fp64", torch.float64, torch.float64, False),
    ],
)
def test_masters_are_at_least_float32_and_only_fp16_is_scaled(name, compute, master, scaled):
    precision = precision_of(name)
    assert (precision.compute, precision.master, precision.scaled) == (compute, master, scaled)


# --- the loss scale --------------------------------------------------------------------------------------------------


def series(script: str) -> list[bool]:
    """``.`` a good step, ``x`` one that overflows."""
    return [letter == "x" for letter in script]


SCRIPTS = {
    "growth": "." * 13,
    "overflow resets the count": "...x....x.....",
    "overflow on the step that would grow": "...x...x....x",
    "many overflows": "xxxxx....x....xx........",
    "random": "".join(random.Random(3).choices(".x", [5, 1], k=200)),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize("initial", [2.0**16, 2.0**125])
def test_scales_are_those_of_grad_scaler(script, initial):
    """Near float32's end too, where doubling once more would leave it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=initial, growth_interval=4)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    own = LossScale(CPU, enabled=True, initial=initial, interval=4)
    for number, overflows in enumerate(series(script)):
        assert own.scale.item() == scaler.get_scale(), f"before step {number}"
        scaler.scale(weight.sum() * 0).backward()
        weight.grad.fill_(math.inf if overflows else 0.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        own.update(torch.tensor(overflows))
    assert own.scale.item() == scaler.get_scale()


def test_gradients_lose_the_scale_again():
    weights = [nn.Parameter(torch.tensor([3.0, -2.0])), nn.Parameter(torch.tensor([[0.5]]))]
    scale = LossScale(CPU, enabled=True)
    loss = (weights[0] ** 2).sum() + weights[1].sum()
    scaled = scale.scaled(loss)
    assert scaled.item() == loss.item() * 65536
    scaled.backward()
    assert weights[0].grad.tolist() == [6.0 * 65536, -4.0 * 65536]
    scale.unscale_(weights)
    assert weights[0].grad.tolist() == [6.0, -4.0]
    assert weights[1].grad.tolist() == [[1.0]]


def test_without_scaling_nothing_is_touched():
    weight = nn.Parameter(torch.tensor([3.0]))
    scale = LossScale(CPU, enabled=False)
    loss = weight.sum()
    assert scale.scaled(loss) is loss
    loss.backward()
    scale.unscale_([weight])
    scale.update(torch.tensor(True))
    assert weight.grad.item() == 1.0
    assert scale.scale.item() == 1.0
    assert scale.state_dict() == {}


def test_the_scale_goes_on_after_a_restart():
    script = SCRIPTS["random"]
    whole, first = (LossScale(CPU, enabled=True, interval=4) for _ in range(2))
    for overflows in series(script[:77]):
        first.update(torch.tensor(overflows))
    second = LossScale(CPU, enabled=True, interval=4)
    second.load_state_dict({name: value.clone() for name, value in first.state_dict().items()})
    for overflows in series(script[77:]):
        second.update(torch.tensor(overflows))
    for overflows in series(script):
        whole.update(torch.tensor(overflows))
    assert second.state_dict() == whole.state_dict()
    assert whole.scale.item() != 65536.0  # the script moves it


# --- whole runs ------------------------------------------------------------------------------------------------------

STEPS = 40


def config_for(run: Path, paths: list[str], **changes: Any) -> TrainConfig:
    run.mkdir()
    plain = {
        "run_dir": str(run), "data": [{"path": paths[0], "max_epochs": 1000}], "seq_len": 16, "device": "cpu",
        "checkpoint": {"interval": 0}, "metrics": {"live": False, "tensorboard": False},
    }  # fmt: skip
    return TrainConfig.model_validate(plain | changes)


def step_rows(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "step"]


def run(folder: Path, paths: list[str], precision: str, **changes: Any) -> tuple[list[dict[str, Any]], Trainer, Any]:
    """The step rows of a run, its trainer, and the first step's gradients before clipping."""
    base = {
        "model": {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2}, "global_batch": 8, "micro_batch": 4,
        "steps": STEPS, "optimizer": {"lr": 1e-2}, "schedule": {"warmup": 5},
    }  # fmt: skip
    config = config_for(folder / precision, paths, precision=precision, **(base | changes))
    first: dict[str, torch.Tensor] = {}

    def keep(trainer: Trainer, step: int) -> None:
        if step == 0:
            first.update((name, weight.grad.clone()) for name, weight in trainer.model.named_parameters())

    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        trainer.on_gradients = keep
        trainer.fit()
    return step_rows(folder / precision), trainer, first


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Few tokens read often: a model learns them by heart, so its losses say something."""
    shards = make_shards(random.Random(1), [[20, 31, 9, 40, 28]])
    return write_run(tmp_path_factory.mktemp("data") / "run", {"web": shards})


@pytest.fixture(scope="module")
def float32(tmp_path_factory: pytest.TempPathFactory, paths: list[str]) -> Any:
    return run(tmp_path_factory.mktemp("fp32"), paths, "fp32")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_in_half_precision_stays_close_to_float32(tmp_path, paths, float32, precision):
    rows, trainer, gradients = run(tmp_path, paths, precision)
    exact, _, exact_gradients = float32
    losses, exact_losses = ([row["loss"] for row in found] for found in (rows, exact))
    assert exact_losses[-1] < 0.5 * exact_losses[0]
    assert losses != exact_losses
    np.testing.assert_allclose(losses, exact_losses, rtol=0.03)
    assert not any(row["skipped"] for row in rows)
    assert all(weight.dtype == torch.float32 for weight in trainer.model.parameters())
    assert all(slot["exp_avg_sq"].dtype == torch.float32 for slot in trainer.optimizer.state.values())
    # half of their bits are noise at bf16's 8 bits; a scale that is left in, or taken out twice, is off by 65536
    for name, gradient in gradients.items():
        apart = (gradient - exact_gradients[name]).norm() / exact_gradients[name].norm()
        assert apart < (0.05 if precision == "bf16" else 0.01), name


@pytest.mark.long
def test_a_run_with_moments_and_gradients_in_bf16_learns_as_in_float32(tmp_path, paths, float32, caplog):
    """Within 3 % at every step; and a run takes up either type's checkpoints."""
    kept = {"lr": 1e-2, "moments": "bf16", "gradients": "bf16"}
    rows, trainer, gradients = run(tmp_path, paths, "bf16", optimizer=kept)
    losses, exact_losses = ([row["loss"] for row in found] for found in (rows, float32[0]))
    assert losses != exact_losses
    np.testing.assert_allclose(losses, exact_losses, rtol=0.03)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.bfloat16}
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}
    slots = trainer.optimizer.state.values()
    assert {slot[name].dtype for slot in slots for name in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}
    described = json.loads((tmp_path / "bf16" / "run.json").read_text())
    assert described["optimizer"] == {"moments": "bf16", "gradients": "bf16"}
    for moments, change, steps in (("fp32", "bfloat16 → float32", 42), ("bf16", "float32 → bfloat16", 44)):
        update = {"steps": steps, "optimizer": trainer.config.optimizer.model_copy(update={"moments": moments})}
        config = trainer.config.model_copy(update=update)
        with caplog.at_level("INFO"), open_ranks("cpu") as ranks, open_trainer(config, ranks) as again:
            again.fit()
        assert change in caplog.text
    assert [row["loss"] < 2 * losses[-1] for row in step_rows(tmp_path / "bf16")[-4:]] == [True] * 4


def test_an_fp16_run_reports_its_scale_and_goes_on_with_it(tmp_path, paths):
    rows, trainer, _ = run(tmp_path, paths, "fp16", steps=3, schedule={"warmup": 1})
    assert [row["loss_scale"] for row in rows] == [65536.0] * 3
    config = trainer.config.model_copy(update={"steps": 6})
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as again:
        assert (again.start.step, again.loss_scale.good.item(), again.loss_scale.scale.item()) == (3, 3.0, 65536.0)
        again.fit()
        assert again.loss_scale.good.item() == 6


def test_an_overflow_skips_the_step_and_halves_the_scale(tmp_path, paths):
    """A scale that no FP16 gradient survives comes down by itself, and no weight moves before it has."""
    config = config_for(
        tmp_path / "run", paths, model={"num_layers": 1, "dim": 16, "num_heads": 2}, global_batch=4, steps=30,
        precision="fp16", schedule={"warmup": 0},
    )  # fmt: skip
    moved = []
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        trainer.loss_scale.scale.fill_(2.0**32)
        first = trainer.model.embed.weight.detach().clone()
        trainer.on_gradients = lambda trainer, step: moved.append(not torch.equal(trainer.model.embed.weight, first))
        trainer.fit()
    rows = step_rows(tmp_path / "run")
    skipped = [row["skipped"] for row in rows]
    first_update = skipped.index(False)
    assert 5 <= first_update < 15
    assert not any(skipped[15:])
    assert all(row["non_finite"] and row["grad_norm"] is None for row in rows if row["skipped"])
    assert moved == [step > first_update for step in range(30)]
    # reported after the step's own change
    assert [row["loss_scale"] for row in rows] == [2.0 ** (32 - sum(skipped[: step + 1])) for step in range(30)]
