"""Delayed scaling: one scale per matrix, from the maxima of the 16 steps before (Micikevicius et al. 2022, 3.3).

Every rank then multiplies with the same scales, however a layer's tokens and weights are split; with dynamic
``tensorwise`` scaling each takes its own part's. What is larger than all of the history is clamped for a step. Where
there is no history, or all of it is zero, the scale is dynamic. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quern.model.float8.quantise import E4M3, Quantised, cast, largest, scale_of
from quern.model.float8.recipe import Recipe

__all__ = ["HISTORY", "Amaxes", "Delayed"]

HISTORY = 16
"""Steps."""

INPUT, WEIGHT, GRADIENT = range(3)
"""Of a layer: what it multiplies."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Delayed(Recipe):
    """The recipe of one layer with its recorded magnitudes; equal to itself alone."""

    known_3: Tensor
    """Largest magnitudes of the history; 0 = not known."""
    seen_3: Tensor
    """And of this step so far. A maximum in place: what is computed again changes nothing."""

    __eq__, __hash__ = object.__eq__, object.__hash__

    def quantise(self, x_RS: Tensor, which: int, dtype: torch.dtype = E4M3) -> Quantised:
        """By the known magnitude, or its own where none is. NaN where its own is not finite: no clamp hides that."""
        own = largest(x_RS, (0, 1)).squeeze()
        self.see(own, which)
        known = self.known_3[which].to(own.dtype)
        amax = torch.where(known > 0, known, own)
        scale = scale_of(torch.where(own.isfinite(), amax, own), dtype)
        return Quantised(cast(x_RS, scale, dtype).contiguous(), scale)

    def see(self, amax: Tensor, which: int) -> None:
        """Count a largest magnitude among this step's."""
        seen = self.seen_3[which]
        seen.copy_(torch.maximum(seen, amax.to(seen.dtype)))


class Amaxes:
    """The history of all layers of a model, the same on every rank, also of layers that this rank does not hold.

    ``names``: of the whole model's layers that compute in FP8, in the same order on all ranks. A ``history``
    [layers, 3, :data:`HISTORY`] in float32: of input, weight and gradient of the output.
    """

    def __init__(self, names: Sequence[str], device: torch.device | None = None) -> None:
        self.names = tuple(names)
        self.history = torch.zeros(len(self.names), 3, HISTORY, device=device)
        self._known = torch.zeros(len(self.names), 3, device=device)
        self._seen = [torch.zeros(3, device=device) for _ in self.names]  # apart: a graph changes no view of another's

    def of(self, name: str, recipe: Recipe) -> Delayed:
        """The recipe of a layer, on tensors of this object."""
        number = self.names.index(name)
        known_3, seen_3 = self._known[number], self._seen[number]
        return Delayed(recipe.scaling, recipe.gradients, delayed=True, known_3=known_3, seen_3=seen_3)

    @property
    def current(self) -> Tensor:
        """[layers, 3]: what this rank has seen since the last :meth:`roll`."""
        return torch.stack(self._seen) if self._seen else self._known.clone()

    def roll(self, reduce: Callable[[Tensor], object] | None = None, skip: Tensor | None = None) -> None:
        """Push the maxima of the step into the history; call it once after each step on every rank.

        ``reduce``: makes of [layers, 3], in place, the maximum over all ranks. What was not finite is left out.
        ``skip``: 0-d, not zero where the step was skipped; what it has seen then stays out of the history.
        """
        seen = self.current
        seen = torch.where(seen.isfinite(), seen, torch.zeros_like(seen))
        if reduce is not None:
            reduce(seen)
        rolled = torch.cat([self.history[:, :, 1:], seen[:, :, None]], 2)
        self._set(rolled if skip is None else torch.where(skip > 0, self.history, rolled))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context for forwards outside of a step, whose maxima are discarded."""
        before = self.current
        try:
            yield
        finally:
            for seen, then in zip(self._seen, before, strict=True):
                seen.copy_(then)

    def state_dict(self) -> dict[str, Any]:
        """Between two steps; the same on every rank."""
        return {"names": list(self.names), "history": self.history.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of a model with the same layers, on any layout.

        Raises:
            ValueError: other layers.
        """
        if list(state["names"]) != list(self.names) or state["history"].shape != self.history.shape:
            raise ValueError(f"amaxes of {len(state['names'])} layers, expected those of {len(self.names)} by name")
        self._set(state["history"].to(self.history.device))

    def _set(self, history: Tensor) -> None:
        self.history.copy_(history)
        self._known.copy_(history.amax(2))
        if self._seen:
            torch._foreach_zero_(self._seen)
