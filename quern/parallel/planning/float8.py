"""Determines which layers compute in FP8 on a layout. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from quern.model.config import ModelShape
from quern.model.float8.recipe import BLOCK, Recipe

if TYPE_CHECKING:
    from quern.model.float8.delayed import Amaxes
    from quern.model.transformer import Linear, Transformer

__all__ = ["LAYERS", "fitting", "gathered", "layers_in_float8", "local_sizes", "use_float8"]

LAYERS = ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "ffn.w1", "ffn.w2", "ffn.w3")
"""Of a block: all of its matrices. Embedding, head and norms stay in the dtype of activations."""


def local_sizes(shape: ModelShape, tp: int) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the product that one of ``tp`` ranks makes with each of a block's matrices."""
    query, ffn = shape.num_heads // tp * shape.head_dim, shape.ffn_dim // tp
    key = max(shape.num_kv_heads // tp, 1) * shape.head_dim  # a head that several ranks share is whole on each
    rows = {"attention.wq": query, "attention.wk": key, "attention.wv": key, "ffn.w1": ffn, "ffn.w3": ffn}
    columns = {"attention.wo": query, "ffn.w2": ffn}
    return {name: (rows[name], shape.dim) if name in rows else (shape.dim, columns[name]) for name in LAYERS}


def fitting(shape: ModelShape, tp: int, recipe: Recipe) -> tuple[str, ...]:
    """The matrices of a block whose both sizes on a rank are multiples of what the recipe takes."""
    sizes = local_sizes(shape, tp)
    return tuple(name for name in LAYERS if not any(size % recipe.multiple for size in sizes[name]))


def gathered(shape: ModelShape, tp: int, recipe: Recipe) -> dict[str, tuple[tuple[int, int], tuple[int, ...]]]:
    """The matrices of a block that FSDP2 can gather in FP8: size of the weight on a rank of ``tp``, and of its scale.

    Keys and values whose heads several ranks share are none: each rank multiplies another part of what is gathered.
    """
    sizes, shared = local_sizes(shape, tp), shape.num_kv_heads % tp
    found: dict[str, tuple[tuple[int, int], tuple[int, ...]]] = {}
    for name in fitting(shape, tp, recipe):
        rows, columns = sizes[name]
        if not (shared and name in ("attention.wk", "attention.wv")):
            blocks = (rows // BLOCK, columns // BLOCK) if recipe.scaling == "blockwise" else ()
            found[name] = (rows, columns), blocks
    return found


def layers_in_float8(shape: ModelShape, tp: int, recipe: Recipe) -> list[str]:
    """The layers of the whole model that compute in FP8."""
    fits = fitting(shape, tp, recipe)
    return [f"blocks.{number}.{name}" for number in range(shape.num_layers) for name in fits]


def use_float8(model: Transformer, recipe: Recipe, tp: int = 1, amaxes: Amaxes | None = None) -> list[str]:
    """Set the recipe of every layer of a model or stage that it fits. In place.

    ``amaxes``: where the layers' histories are, with delayed scaling. Returns the names of the blocks' layers that
    stay in the dtype of activations.
    """
    fits = fitting(model.shape, tp, recipe)
    for number, block in model.blocks.items():
        for name in fits:
            own = recipe if amaxes is None else amaxes.of(f"blocks.{number}.{name}", recipe)
            cast("Linear", block.get_submodule(name)).recipe = own
    return [f"blocks.{number}.{name}" for number in model.blocks for name in LAYERS if name not in fits]
