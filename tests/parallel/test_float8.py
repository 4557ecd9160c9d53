"""Which layers compute in FP8, and what of it no layout or config can do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from quern.errors import InputError
from quern.model.config import ModelConfig, ModelShape
from quern.model.float8.recipe import Recipe
from quern.model.transformer import Linear, Transformer
from quern.parallel.planning.checks import Task, check_layout
from quern.parallel.planning.float8 import LAYERS, fitting, gathered, local_sizes, use_float8
from quern.parallel.planning.mesh import plan_mesh
from quern.train.config import Float8Config, ParallelConfig, TrainConfig
from quern.train.summary import layout_of

BLOCK, WHOLE = Recipe("blockwise"), Recipe("tensorwise")
THEIRS = {"implementation": "torchao"}


def shape(**sizes: Any) -> ModelShape:
    given = {"num_layers": 2, "dim": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "ffn_dim": 512}
    return ModelConfig(**(given | sizes)).shape(100)


def test_the_layers_are_all_matrices_of_a_block() -> None:
    with torch.device("meta"):
        block = Transformer(shape()).blocks["0"]
    assert {name for name, module in block.named_modules() if isinstance(module, Linear)} == set(LAYERS)
    assert {name: tuple(block.get_submodule(name).weight.shape) for name in LAYERS} == local_sizes(shape(), 1)


@pytest.mark.parametrize(
    ("recipe", "tp", "sizes", "left"),
    [
        (BLOCK, 1, {}, set()),
        (BLOCK, 2, {}, {"attention.wk", "attention.wv"}),  # 64 rows of a head a rank
        (WHOLE, 2, {}, set()),
        (BLOCK, 4, {"num_heads": 8, "num_kv_heads": 1, "head_dim": 128}, set()),  # the shared head is whole on each
        (WHOLE, 1, {"ffn_dim": 520}, {"ffn.w1", "ffn.w2", "ffn.w3"}),
        (BLOCK, 1, {"dim": 192}, set(LAYERS)),
    ],
)
def test_a_layer_whose_part_does_not_fit_stays(recipe: Recipe, tp: int, sizes: Any, left: set[str]) -> None:
    given = shape(**sizes)
    assert set(fitting(given, tp, recipe)) == set(LAYERS) - left
    with torch.device("meta"):
        model = Transformer(given)
    names = use_float8(model, recipe, tp)
    assert set(names) == {f"blocks.{number}.{name}" for number in "01" for name in left}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            assert module.recipe == (None if name in names or name == "head" else recipe)


def test_keys_that_ranks_share_are_gathered_as_they_are() -> None:
    shared = shape(num_heads=8, num_kv_heads=2, head_dim=128)
    assert set(gathered(shared, 2, BLOCK)) == set(LAYERS)
    assert set(gathered(shared, 4, BLOCK)) == set(LAYERS) - {"attention.wk", "attention.wv"}
    assert gathered(shared, 2, BLOCK)["ffn.w2"] == ((256, 256), (2, 2))
    assert gathered(shared, 2, WHOLE)["ffn.w2"] == ((256, 256), ())


TASK: dict[str, Any] = {"seq_len": 32, "micro_batch": 2, "float8": BLOCK}
REFUSED: list[tuple[int, dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    # ranks, parallel, model, task, what is said
    (1, {}, {"dim": 192}, {},
     "float8.recipe: blockwise takes matrices whose sizes are multiples of 128, and no layer has such on a rank "
     "(attention.wq 256×192, attention.wk 128×192, attention.wv 128×192, attention.wo 192×256, ffn.w1 512×192, "
     "ffn.w2 192×512, ffn.w3 512×192); expected other sizes of the model or tp, or null"),
    (1, {}, {}, {"seq_len": 36, "micro_batch": 2},
     "float8.recipe: expected a multiple of 16 tokens in a micro-batch, got seq_len 36 × micro_batch 2 = 72; "
     "micro_batch 4 would fit, or seq_len 48"),
    (2, {"dp_replicate": 2}, {}, {"float8_all_gather": True},
     "float8.all_gather: changes nothing where FSDP2 shards no weights; expected false, or parallel.dp_shard > 1"),
    (4, {"reshard_after_forward": 2}, {}, {"float8_all_gather": True},
     "parallel.reshard_after_forward: expected true or false with float8.all_gather, got 2; FSDP2 does not reshard to "
     "fewer ranks what it gathers in FP8"),
    (2, {"async_tp": True, "tp": 2}, {}, {"compile_backend": "inductor"},
     "parallel.async_tp: overlaps products that are not in FP8; expected false with float8.recipe, or null there; "
     "parallel.tp_pieces overlaps those in FP8 too"),
    (2, {"tp": 2}, {}, {"float8": Recipe("rowwise", **THEIRS)},
     "float8.implementation: torchao's layers are not split over ranks; expected quern with parallel.tp 2, or tp 1"),
    (2, {"pp": 2, "schedule": "zbv_zero_bubble"}, {}, {"float8": Recipe("rowwise", **THEIRS)},
     "float8.implementation: schedule zbv_zero_bubble computes gradients of inputs and of weights apart, and torchao "
     "both together, each time; expected quern, or schedule gpipe, 1f1b, interleaved_1f1b or looped_bfs"),
]  # fmt: skip


@pytest.mark.parametrize(("world", "parallel", "sizes", "task", "said"), REFUSED)
def test_refused_by_layout(world: int, parallel: Any, sizes: Any, task: Any, said: str) -> None:
    keys = ParallelConfig(**parallel)
    layout = layout_of(keys, plan_mesh(keys, world), torch.float32, **(TASK | task))
    with pytest.raises(InputError) as found:
        check_layout(shape(**sizes), layout, Task({"global_batch": 64}, cuda=keys.async_tp))
    assert str(found.value) == said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gradients": "e5m2"}, "gradients: changes nothing without recipe"),
        ({"delayed": True}, "delayed: changes nothing without recipe"),
        ({"all_gather": True}, "all_gather: changes nothing without recipe"),
        ({"recipe": "rowwise", "all_gather": True}, "all_gather: rowwise quantises a weight along its rows"),
        ({"recipe": "blockwise", "delayed": True}, "delayed: is of recipe tensorwise"),
        ({"recipe": "tensorwise", "delayed": True, "all_gather": True}, "all_gather: takes scales from the weights"),
        ({"recipe": "columnwise"}, "recipe"),
        ({"implementation": "torchao"}, "implementation: changes nothing without recipe"),
        ({"recipe": "blockwise", **THEIRS}, "implementation: torchao has tensorwise and rowwise"),
        ({"recipe": "rowwise", "gradients": "e5m2", **THEIRS}, "gradients: torchao's rowwise has e4m3"),
        ({"recipe": "tensorwise", "gradients": "e4m3", **THEIRS}, "gradients: torchao's tensorwise has e5m2"),
        ({"recipe": "tensorwise", "delayed": True, **THEIRS}, "delayed: is quern's own"),
        ({"recipe": "tensorwise", "all_gather": True, **THEIRS}, "all_gather: is quern's own"),
    ],
)
def test_refused_by_config(given: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Float8Config(**given)


def test_fp16_has_no_recipe() -> None:
    given = {"run_dir": "r", "data": [{"path": "p"}], "steps": 1, "float8": {"recipe": "tensorwise"}}
    with pytest.raises(ValidationError, match=r"float8\.recipe: expected null with precision fp16"):
        TrainConfig.model_validate(given | {"precision": "fp16"})
    assert TrainConfig.model_validate(given).float8.products == WHOLE


def test_torchao_computes_nothing_in_float64() -> None:
    given = {"run_dir": "r", "data": [{"path": "p"}], "steps": 1, "float8": {"recipe": "tensorwise", **THEIRS}}
    with pytest.raises(ValidationError, match=r"float8\.implementation: torchao sums in float32"):
        TrainConfig.model_validate(given | {"precision": "fp64"})
    assert TrainConfig.model_validate(given).float8.products == Recipe("tensorwise", "e5m2", **THEIRS)
