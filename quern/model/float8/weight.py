"""An FP8 weight as a layer's parameter: what FSDP2 creates from a weight that it gathers in FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from quern.model.float8.quantise import Quantised

__all__ = ["Float8Weight", "factor"]

aten = torch.ops.aten


class Float8Weight(Tensor):
    """[O, K] in FP8 with its scale, seen as a tensor of ``dtype``, which is that of its gradient.

    Products in FP8 take its factor as it is. It can be viewed as itself, detached, and made zeros or empty of its
    kind; any other operation gets its values in ``dtype``, and none may change it.
    """

    data_OK: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, data_OK: Tensor, scale: Tensor, dtype: torch.dtype) -> Float8Weight:
        made: Float8Weight = Tensor._make_wrapper_subclass(
            cls, data_OK.shape, dtype=dtype, device=data_OK.device, requires_grad=False
        )
        made.data_OK, made.scale = data_OK, scale
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Float8Weight({list(self.shape)}, {self.dtype}, scale {list(self.scale.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["data_OK", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> Float8Weight:
        return Float8Weight(inner["data_OK"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.alias.default) or (
            func in (aten.view.default, aten.as_strided.default) and list(args[1]) == list(args[0].shape)
        ):
            weight = args[0]
            return Float8Weight(weight.data_OK.detach(), weight.scale.detach(), weight.dtype)
        if func in (aten.zeros_like.default, aten.empty_like.default, aten.new_zeros.default, aten.new_empty.default):
            size = args[1] if func in (aten.new_zeros.default, aten.new_empty.default) else args[0].shape
            return torch.zeros(size, dtype=kwargs.get("dtype") or args[0].dtype, device=args[0].device)
        if func._schema.is_mutable:
            raise TypeError(f"{func}: a weight gathered in FP8 is not changed; its master is")
        args, kwargs = tree_map_only(
            Float8Weight, lambda weight: factor(weight).dequantised(weight.dtype), (args, kwargs)
        )
        return func(*args, **kwargs)


def factor(weight_OK: Float8Weight) -> Quantised:
    """The weight as a product's factor, sharing memory. No property: torch.compile looks through plain attributes
    only."""
    return Quantised(weight_OK.data_OK, weight_OK.scale)
