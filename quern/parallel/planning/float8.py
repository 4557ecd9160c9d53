"""Determines which layers compute in FP8 on a layout. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from quern.model.config import ModelShape
from quern.model.float8.recipe import BLOCK, Recipe

if TYPE_CHECKING:
    from quern.model.float8.delayed import Amaxes
    from quern.model.moe.experts import Experts
    from quern.model.transformer import Linear, Transformer

__all__ = ["LAYERS", "fitting", "gathered", "layers_in_float8", "local_sizes", "use_float8"]

LAYERS = ("attention.wq", "attention.wk", "attention.wv", "attention.wo", "ffn.w1", "ffn.w2", "ffn.w3")
"""Of a block without experts: all of its matrices. Embedding, head, routers and norms are not in FP8."""


def local_sizes(shape: ModelShape, tp: int, layer: int = 0) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the product that one of ``tp`` ranks makes with each of a block's matrices; an expert's
    three are one entry, ``ffn.experts``, as they have the same sizes or those turned."""
    query, dim, moe = shape.num_heads // tp * shape.head_dim, shape.dim, shape.moe
    key = max(shape.num_kv_heads // tp, 1) * shape.head_dim  # a head that several ranks share is whole on each
    attention = {"wq": (query, dim), "wk": (key, dim), "wv": (key, dim), "wo": (dim, query)}
    found = {f"attention.{name}": size for name, size in attention.items()}
    name, width = "ffn", shape.ffn_dim // tp
    if moe is not None and moe.is_sparse(layer):
        found["ffn.experts"] = moe.ffn_dim // tp, dim
        name, width = "ffn.shared", moe.shared_ffn_dim // tp
    swiglu = {f"{name}.w1": (width, dim), f"{name}.w2": (dim, width), f"{name}.w3": (width, dim)}
    return found | (swiglu if width else {})


def fitting(shape: ModelShape, tp: int, recipe: Recipe, layer: int = 0) -> tuple[str, ...]:
    """The matrices of a block whose both sizes on a rank are multiples of what the recipe takes."""
    sizes = local_sizes(shape, tp, layer)
    return tuple(name for name, own in sizes.items() if not any(size % recipe.multiple for size in own))


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
    layers = range(shape.num_layers)
    return [f"blocks.{number}.{name}" for number in layers for name in fitting(shape, tp, recipe, number)]


def use_float8(model: Transformer, recipe: Recipe, tp: int = 1, amaxes: Amaxes | None = None) -> list[str]:
    """Set the recipe of every layer of a model or stage that it fits. In place.

    ``amaxes``: where the layers' histories are, with delayed scaling. Returns the names of the blocks' layers that
    stay in the dtype of activations.
    """
    left = []
    for number, block in model.blocks.items():
        fits = fitting(model.shape, tp, recipe, int(number))
        for name in fits:
            own = recipe if amaxes is None else amaxes.of(f"blocks.{number}.{name}", recipe)
            cast("Linear | Experts", block.get_submodule(name)).recipe = own
        names = local_sizes(model.shape, tp, int(number))
        left += [f"blocks.{number}.{name}" for name in names if name not in fits]
    return left
