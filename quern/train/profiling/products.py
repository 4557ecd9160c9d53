"""Counts and times matrix products by shape. Imports no torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quern.errors import InputError
from quern.train.profiling.classes import is_product
from quern.train.step.trace import Event

__all__ = ["Product", "Shape", "product_of", "shape_of"]

#: What a trace calls a dtype, and torch.
_DTYPES = {
    "c10::BFloat16": "bfloat16", "c10::Half": "float16", "float": "float32", "double": "float64",
    "c10::Float8_e4m3fn": "float8_e4m3fn", "c10::Float8_e5m2": "float8_e5m2", "signed char": "int8",
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Shape:
    """``[m, k] · [k, n]``, ``batch`` times over."""

    m: int
    n: int
    k: int
    batch: int
    dtype: str
    """Of the first factor, as torch names it."""
    scaling: str | None
    """In FP8: tensorwise, rowwise or blockwise."""

    @property
    def flops(self) -> int:
        """FLOPs: a multiplication and an addition for each term."""
        return 2 * self.batch * self.m * self.n * self.k

    def __str__(self) -> str:
        batch = f"{self.batch} × " if self.batch > 1 else ""
        return f"{batch}{self.m}×{self.n}×{self.k} {self.dtype}{f' {self.scaling}' if self.scaling else ''}"


@dataclass(frozen=True)
class Product:
    """All products of one shape in the traced steps. ``shape`` None: the trace does not say it."""

    shape: Shape | None
    count: int
    ns: int

    @property
    def flops(self) -> int:
        """FLOPs of all of them."""
        return self.count * self.shape.flops if self.shape else 0

    @staticmethod
    def gathered(called: Iterable[tuple[Event, int]]) -> tuple[Product, ...]:
        """By shape, longest first, of operators and their nanoseconds."""
        found: dict[Shape | None, list[int]] = defaultdict(list)
        for operator, ns in called:
            found[shape_of(operator)].append(ns)
        products = [Product(shape, len(times), sum(times)) for shape, times in found.items()]
        return tuple(sorted(products, key=lambda product: -product.ns))


def product_of(chain: Sequence[Event]) -> Event | None:
    """The operator that a piece of a product belongs to: the outermost, or of several of one name the innermost, since
    a DTensor's calls that of the part it holds."""
    products = [event for event in chain if is_product(event.name)]
    return next((event for event in products if event.name == products[-1].name), None)


def shape_of(operator: Event) -> Shape | None:
    """Raises :class:`InputError` where the trace says something that is no product's shape."""
    sizes, types = operator.listed("Input Dims"), operator.listed("Input type")
    name = operator.name.removeprefix("aten::")
    first = 1 if name in ("addmm", "baddbmm", "addmv") else 0
    if len(sizes) < first + 2 or len(types) <= first:
        return None
    a, b = _size(sizes[first], operator), _size(sizes[first + 1], operator)
    named = str(types[first])
    dtype = _DTYPES.get(named, named)
    scaling = _scaling(sizes, operator) if name.startswith("_scaled") else None
    if name == "mkldnn::_linear_pointwise":
        a, b = [math.prod(a[:-1]), *a[-1:]], b[::-1]
    if name in ("mv", "addmv"):
        b = [*b, 1]
    if name in ("bmm", "baddbmm") and len(a) == len(b) == 3 and a[0] == b[0] and a[2] == b[1]:
        return Shape(a[1], b[2], a[2], a[0], dtype, scaling)
    if "grouped" in name:
        return Shape(a[0], b[2], a[1], 1, dtype, scaling) if len(a) == 2 and len(b) == 3 else None
    if len(a) == len(b) == 2 and a[1] == b[0]:
        return Shape(a[0], b[1], a[1], 1, dtype, scaling)
    raise InputError(f"{operator.where}.args.Input Dims: expected those of {operator.name}, got {sizes!r:.80}")


def _size(value: Any, operator: Event) -> list[int]:
    if isinstance(value, list) and all(
        isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 1 << 63 for size in value
    ):
        return value
    raise InputError(f"{operator.where}.args.Input Dims: expected lists of integers, got {value!r:.80}")


def _scaling(sizes: Sequence[Any], operator: Event) -> str | None:
    """By the size of the first factor's scales; the newer operator has a list of them."""
    if len(sizes) < 3:
        return None
    scale = sizes[2]
    if operator.name.startswith("aten::_scaled_mm_v2"):
        scale = scale[0] if isinstance(scale, list) and scale else []
    scale = _size(scale, operator)
    if math.prod(scale) == 1:
        return "tensorwise"
    return "rowwise" if len(scale) == 1 or 1 in scale else "blockwise"
