"""AdamW (Loshchilov & Hutter 2019, algorithm 2) in NumPy, with moments rounded to BF16 at each step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def bf16(values: Array) -> Array:
    """The nearest BF16, ties to even, by arithmetic: 8 bits of significand."""
    values = np.asarray(values, np.float64)
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(np.abs(values), where=values != 0, out=np.zeros_like(values)))
    step = 2.0 ** (exponent - 7)
    return np.rint(values / step) * step  # rint: ties to even


@dataclass
class Bf16AdamW:
    """Weights by name, in float64; those in ``decay`` decay. The update takes moments as they are before rounding."""

    weights: dict[str, Array]
    decay: dict[str, float]
    beta1: float
    beta2: float
    eps: float
    rounds: bool = True
    steps: int = 0
    first: dict[str, Array] = field(default_factory=dict)
    second: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.first = {name: np.zeros_like(value) for name, value in self.weights.items()}
        self.second = {name: np.zeros_like(value) for name, value in self.weights.items()}

    def step(self, gradients: dict[str, Array], lr: float) -> None:
        self.steps += 1
        stored = bf16 if self.rounds else np.asarray
        for name, gradient in gradients.items():
            first = self.beta1 * self.first[name] + (1 - self.beta1) * gradient
            second = self.beta2 * self.second[name] + (1 - self.beta2) * gradient**2
            direction = first / (1 - self.beta1**self.steps)
            direction = direction / (np.sqrt(second / (1 - self.beta2**self.steps)) + self.eps)
            self.weights[name] = self.weights[name] - lr * (direction + self.decay[name] * self.weights[name])
            self.first[name], self.second[name] = stored(first), stored(second)
