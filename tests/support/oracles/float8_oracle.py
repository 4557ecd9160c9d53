"""FP8 by hand: the numbers of a format from its definition, and rounding by searching them. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Format:
    """Sign, exponent and mantissa, by "FP8 Formats for Deep Learning" (Micikevicius et al. 2022), table 1."""

    mantissa_bits: int
    bias: int
    largest: float

    @cached_property
    def numbers(self) -> Array:
        """All that are not negative and finite, ascending: the place of each is its code."""
        values = []
        for code in range(128):
            exponent, mantissa = divmod(code, 2**self.mantissa_bits)
            fraction = mantissa / 2**self.mantissa_bits
            if exponent == 0:
                values.append(fraction * 2.0 ** (1 - self.bias))
            else:
                values.append((1 + fraction) * 2.0 ** (exponent - self.bias))
        return np.array([value for value in values if value <= self.largest])

    def round(self, x: Array) -> Array:
        """The nearest numbers, of two the one with an even code; the largest for all beyond it."""
        distance = np.abs(self.numbers - np.abs(x).astype(np.float64)[..., None])
        code = distance.argmin(-1)
        above = np.minimum(code + 1, len(self.numbers) - 1)
        nearest, other = (np.take_along_axis(distance, place[..., None], -1)[..., 0] for place in (code, above))
        code = np.where((nearest == other) & (code % 2 == 1), above, code)
        return np.copysign(self.numbers[code], x)

    def ulp(self, x: Array) -> Array:
        """Distance of neighbouring numbers around each value."""
        exponent = np.frexp(np.maximum(np.abs(x), 2.0 ** (1 - self.bias)))[1] - 1
        return 2.0 ** (exponent - self.mantissa_bits)


E4M3 = Format(mantissa_bits=3, bias=7, largest=448.0)
E5M2 = Format(mantissa_bits=2, bias=15, largest=57344.0)


def quantised(x_RS: Array, rows: int, columns: int, fp8: Format) -> Array:
    """The values after quantisation with a scale for each block of ``rows`` × ``columns``; divided in the dtype of
    ``x_RS``."""
    found = np.empty_like(x_RS)
    largest = x_RS.dtype.type(fp8.largest)
    for top in range(0, x_RS.shape[0], rows):
        for left in range(0, x_RS.shape[1], columns):
            block = x_RS[top : top + rows, left : left + columns]
            scale = max(np.abs(block).max(), x_RS.dtype.type(1e-30)) / largest
            values = fp8.round(block / scale).astype(x_RS.dtype)
            found[top : top + rows, left : left + columns] = values * scale
    return found


def noise(x_RS: Array, rows: int, columns: int, fp8: Format) -> Array:
    """Variance of each value's rounding error: uniform over one ulp, it is ulp²/12; the largest of a block has none."""
    found = np.empty_like(x_RS)
    for top in range(0, x_RS.shape[0], rows):
        for left in range(0, x_RS.shape[1], columns):
            block = x_RS[top : top + rows, left : left + columns]
            most = np.abs(block).max()
            ulp = fp8.ulp(block / most * fp8.largest) * most / fp8.largest
            found[top : top + rows, left : left + columns] = np.where(np.abs(block) == most, 0.0, ulp**2 / 12)
    return found
