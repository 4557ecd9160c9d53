"""FP8 on split tensors: layers that fit beside some that do not, scales of each rank's part, a history that is resumed.

That layouts train as one process does is in ``test_parity.py``.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quern.model.config import ModelConfig
from quern.model.float8.linear import products
from quern.model.float8.recipe import Recipe
from quern.model.init import initialise
from quern.model.transformer import Transformer
from quern.parallel.apply import parallelize
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan, build_mesh
from quern.parallel.tensors import collectives
from quern.parallel.tensors.collectives import Ranks, gather_multiply
from quern.train.parity.corpus import write_corpus
from quern.train.parity.matrix import Case
from quern.train.parity.run import case_config
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer

BLOCK = Recipe("blockwise")


def mixed(joined: bool) -> list[float]:
    """Largest differences of outputs and gradients of two weights in FP8 around one that is not."""
    with mock.patch.object(collectives, "JOINED", joined):
        return _mixed()


def _mixed() -> list[float]:
    mesh = build_mesh(MeshPlan(tp=2), "cpu")
    assert mesh.tp is not None
    ranks, generator = Ranks.of(mesh.tp), torch.Generator().manual_seed(5)
    x_BLD = torch.randn(2, 64, 128, dtype=torch.float64, generator=generator)
    weights = [torch.randn(size, 128, dtype=torch.float64, generator=generator) for size in (256, 64, 128)]
    dy = [torch.randn(2, 64, len(weight), dtype=torch.float64, generator=generator) for weight in weights]
    part_BlD = x_BLD.chunk(2, 1)[ranks.rank].clone().requires_grad_()
    leaves = [weight.clone().requires_grad_() for weight in weights]
    recipes = (BLOCK, None, BLOCK)
    out = gather_multiply(part_BlD, leaves, ranks, recipes)
    torch.autograd.backward(out, dy)
    x_TD, dx_TD, worst = x_BLD.flatten(0, 1), torch.zeros(128, 128, dtype=torch.float64), []
    for weight, leaf, y, d_BLO, recipe in zip(weights, leaves, out, dy, recipes, strict=True):
        by, dy_TO = products(recipe), d_BLO.flatten(0, 1)
        worst.append(off(y.flatten(0, 1), by.forward(x_TD, weight)))
        worst.append(off(leaf.grad, by.grad_weight(dy_TO, x_TD)))
        dx_TD += by.grad_input(dy_TO, weight)
    worst.append(off(part_BlD.grad, 2 * dx_TD.unflatten(0, (2, 64)).chunk(2, 1)[ranks.rank]))  # of two equal ranks
    return worst


def off(found: Tensor | None, expected: Tensor) -> float:
    assert found is not None
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("joined", [False, True])
def test_each_weight_is_multiplied_by_its_own_recipe(kept_ranks: Any, joined: bool) -> None:
    for worst in kept_ranks(mixed, 2, joined):
        assert max(worst) < 1e-13


def first_gradients(case: Case, data: str, run_dir: str, keys: dict[str, Any]) -> dict[str, Tensor]:
    """Whole."""
    given = case_config(case, data, run_dir)
    found: dict[str, Tensor] = {}

    def look(trainer: Any, step: int) -> None:
        for name, value in trainer.model.named_parameters():
            found[name] = value.grad.full_tensor() if isinstance(value.grad, DTensor) else value.grad.clone()

    config = given.model_validate(given.model_dump() | keys)
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        trainer.start_loop()
        trainer.on_gradients = look
        trainer.train_step(0)
    return found


@pytest.mark.long
def test_scales_of_each_ranks_part_are_as_good_as_those_of_the_whole(kept_ranks: Any, tmp_path: Path) -> None:
    """Each rank of tp quantises its own part of a matrix: another rounding than of the whole, by scales that are at
    most as large. Two roundings with errors of one size and nothing in common differ by √2 of that size; what they
    have in common makes it less. With half as much again for chance."""
    write_corpus(str(tmp_path / "data"))
    data, case = str(tmp_path / "data"), Case("alone", sizes="blocks", float8="tensorwise")
    true = first_gradients(case, data, str(tmp_path / "true"), {"float8": {}})
    for recipe in ("tensorwise", "rowwise"):
        keys = {"float8": {"recipe": recipe}}
        whole = first_gradients(case, data, str(tmp_path / f"{recipe}1"), keys)
        split = replace(case, layout="tp2")
        for parts in kept_ranks(first_gradients, 2, split, data, str(tmp_path / f"{recipe}2"), keys):
            for name, gradient in true.items():
                error = (whole[name] - gradient).norm()
                assert 0 < (parts[name] - whole[name]).norm() < 1.5 * math.sqrt(2) * error, name
                assert error < 0.5 * gradient.norm(), name


def resumed(case: Case, data: str, folder: str, keys: dict[str, Any]) -> list[list[float]]:
    """Losses of four steps at once, and of two and then two more; rank 0's."""
    found = []
    for stops in ((4,), (2, 4)):
        run_dir = str(Path(folder, str(len(stops))))
        for stop in stops:
            given = case_config(case, data, run_dir).model_dump()
            given |= {"steps": 4, "schedule": {"kind": "constant", "warmup": 0}, **keys}
            config = case_config(case, data, run_dir).model_validate(given | {"steps": stop})
            with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
                trainer.fit()
        lines = map(json.loads, Path(run_dir, "metrics.jsonl").read_text().splitlines())
        found.append([row["loss"] for row in lines if row["kind"] == "step"])
    return found


KEYS = {"precision": "bf16", "float8": {"recipe": "tensorwise", "gradients": "e5m2", "delayed": True}}


@pytest.mark.long
def test_a_resumed_run_goes_on_with_the_history(kept_ranks: Any, tmp_path: Path) -> None:
    write_corpus(str(tmp_path / "data"))
    case = Case("fsdp2", sizes="blocks", float8="tensorwise")
    for at_once, in_two in kept_ranks(resumed, 2, case, str(tmp_path / "data"), str(tmp_path / "run"), KEYS):
        assert at_once == in_two
        assert len(at_once) == 4
        assert all(map(math.isfinite, at_once))
        assert at_once[-1] < at_once[0]


def test_what_is_only_looked_at_leaves_no_trace_in_the_history() -> None:
    shape = ModelConfig(num_layers=1, dim=32, num_heads=2, num_kv_heads=2, head_dim=16, ffn_dim=64).shape(50)
    with torch.device("meta"):
        model = Transformer(shape, compute_dtype=torch.bfloat16)
    layout = Layout(compute_dtype=torch.bfloat16, float8=Recipe("tensorwise", delayed=True))
    parallel = parallelize(model, build_mesh(MeshPlan(), "cpu"), layout)
    initialise(parallel.model, 1)
    tokens_BL = torch.zeros(1, 16, dtype=torch.int64)
    assert parallel.amaxes is not None
    with torch.no_grad():
        with parallel.evaluating():
            parallel.model(tokens_BL)
        assert not parallel.amaxes.current.any()
        parallel.model(tokens_BL)
    assert (parallel.amaxes.current[:, :2] > 0).all()
