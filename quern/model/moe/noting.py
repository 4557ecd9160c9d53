"""Notes what experts are given: once for every token, also where a block is computed again for its backward pass.

It is an operation of its own, so that a compiled block calls it each time and nothing in a graph depends on what it
finds out: that a backward pass is under way, or that nothing is to be noted now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["FIGURES", "listen", "note_routing", "noting_nothing"]

FIGURES = ("dropped", "entropy", "logits")
"""Behind the counts, sums over tokens: of assignments that capacity has dropped, of the entropy of a token's scores in
nats, and of squared logits."""

_paused = 0
_listener: Callable[[int, Tensor], None] | None = None


@torch.library.custom_op("quern::note_routing", mutates_args=("noted",))
def note_routing(chosen_TK: Tensor, figures: Tensor, noted: Tensor, layer: Tensor) -> None:
    """Add to ``noted``, float64 [E + 3]: the tokens that chose each expert, and the :data:`FIGURES`. ``layer``, 0-d on
    the host: for who listens."""
    if _paused or torch._C._current_graph_task_id() != -1:
        return
    experts = len(noted) - len(FIGURES)
    chosen_S = chosen_TK.flatten()
    noted[:experts].scatter_add_(0, chosen_S, torch.ones_like(chosen_S, dtype=noted.dtype))
    noted[experts:] += figures.to(noted.dtype)
    if _listener is not None:
        _listener(int(layer), chosen_TK)


def listen(listener: Callable[[int, Tensor], None] | None) -> None:
    """From here on ``listener`` is called with what is noted, ``layer`` and ``chosen_TK``; None: nobody is."""
    global _listener
    _listener = listener


@contextmanager
def noting_nothing() -> Iterator[None]:
    """For forward passes that are not a step's: of validation, or repeated ones."""
    global _paused
    _paused += 1
    try:
        yield
    finally:
        _paused -= 1
