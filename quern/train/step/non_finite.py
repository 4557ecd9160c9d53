"""Finds the first module that gives a value which is not finite, by running a step's forward and backward again.

What is found is with the weights of now, which are two updates later at most. Nothing of the run changes: gradients are
spent by then, and removed after it as before the next step; FP8 keeps none of the maxima; and a model draws no random
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quern.parallel.accumulation import Inputs
from quern.parallel.apply import Parallel
from quern.parallel.clip import local_part
from quern.train.batches.feed import StepInputs
from quern.train.processes.agree import Agreement

__all__ = ["first_non_finite"]

LOSS = "loss"
"""In place of a name, for what the whole model computes itself."""


def first_non_finite(
    parallel: Parallel,
    optimizer: torch.optim.Optimizer,
    scaled: Callable[[Tensor], Tensor],
    together: Agreement,
    batch: StepInputs,
) -> dict[str, Any]:
    """Find where a value that is not finite comes first in a step. Collective; waits for the device.

    ``rank``; ``phase``: ``weights`` (they or the moments are not finite, in ``module``), ``forward`` or ``backward`` of
    ``module``, or ``none``; ``value``: nan or inf; ``micro_batch``; ``rows`` of it, their ``places`` in the global
    batch and in each the first of ``positions``; ``redone``: False where the step is not computed again, in a pipeline
    and where weights are not finite. None or empty is what is not known.
    """
    mesh = parallel.gradients.mesh
    found = together.gather(next(_in_weights(parallel.model, optimizer), None))
    redone = not any(found) and mesh.pp is None
    if redone:
        found = together.gather(_in_step(parallel, optimizer, scaled, batch))
    ranks = [rank for rank, own in enumerate(found) if own is not None]
    base = dict.fromkeys(("rank", "module", "value", "micro_batch")) | {"rows": [], "places": [], "positions": []}
    if not ranks:
        return {**base, "phase": "none", "redone": redone}
    first = min(ranks, key=lambda rank: _order(found[rank]))
    own = found[first] or {}
    summed = own["micro_batch"] is None and own["phase"] == "backward" and together.world > 1
    return {**base, **own, "rank": None if summed else first, "redone": redone}


def _order(found: dict[str, Any] | None) -> tuple[float, bool]:
    """Ranks compute side by side: the earlier micro-batch is first. What shows after the sum over ranks alone, last."""
    assert found is not None
    number = found["micro_batch"]
    return (float("inf") if number is None else number), found["phase"] == "backward"


def _in_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    for name, parameter in model.named_parameters():
        for slot, value in {"": parameter, **optimizer.state.get(parameter, {})}.items():
            if isinstance(value, Tensor) and (kind := _kind(value)):
                of = f"{name} ({slot})" if slot else name
                yield {"phase": "weights", "module": of, "value": kind, "micro_batch": None}


def _in_step(
    parallel: Parallel, optimizer: torch.optim.Optimizer, scaled: Callable[[Tensor], Tensor], batch: StepInputs
) -> dict[str, Any] | None:
    watch = _Watch(batch.micro_batches)
    optimizer.zero_grad(set_to_none=True)
    try:
        watch.begin(parallel.model)
        # hooks are no part of compiled graphs
        with parallel.evaluating(), torch.compiler.set_stance("force_eager"):
            parallel.run.forward_backward(batch.micro_batches, lambda loss: scaled(loss / batch.valid_tokens))
        for name, parameter in parallel.model.named_parameters():
            if watch.found is None and parameter.grad is not None:
                watch.look("backward", _owner(name), parameter.grad, None)
    finally:
        watch.end()
        optimizer.zero_grad(set_to_none=True)
    if watch.found is not None and watch.found["rows"]:
        places = batch.origins[watch.found["micro_batch"]].places
        watch.found["places"] = [int(places[row]) for row in watch.found["rows"]]
    return watch.found


class _Watch:
    """Hooks that look at what modules take and give, in the order of execution.

    Inner modules give before those around them. Where a module gives what is not finite, it is the module. Where it is
    handed such, and nobody gave it, the operations of the module around it are. In backward each is handed the gradient
    of its output and gives that of its input, of which a view of its own is put between: several modules may share it.
    """

    def __init__(self, micro_batches: Sequence[Inputs]) -> None:
        self.found: dict[str, Any] | None = None
        self._micro_batches, self._number = micro_batches, -1
        self._hooks: list[Any] = []

    def begin(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(partial(self._before, name)))
            self._hooks.append(module.register_forward_hook(partial(self._after, name)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:  # before the sum over ranks
                self._hooks.append(parameter.register_hook(self._gradient(_owner(name))))

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def look(self, phase: str, module: str, value: Any, micro_batch: int | None) -> None:
        if self.found is None and isinstance(value, Tensor) and (kind := _kind(value)):
            tokens_BL = None if micro_batch is None else self._micro_batches[micro_batch].tokens_BL
            rows, positions = _rows(value.detach(), tokens_BL)
            self.found = {
                "phase": phase, "module": module or LOSS, "value": kind, "micro_batch": micro_batch, "rows": rows,
                "positions": positions,
            }  # fmt: skip

    def _before(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not name:
            self._number += 1
            return None
        self.look("forward", _owner(name), args[0], self._number)
        if not (isinstance(args[0], Tensor) and args[0].requires_grad):
            return None
        x = args[0].view_as(args[0])
        x.register_hook(self._gradient(name))
        return x, *args[1:]

    def _after(self, name: str, module: nn.Module, args: tuple[Any, ...], given: Any) -> None:
        for value in reversed(given if isinstance(given, tuple) else (given,)):  # losses by token before their sum
            self.look("forward", name, value, self._number)
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(self._gradient(_owner(name)))

    def _gradient(self, module: str) -> Callable[[Any], None]:
        return lambda value: self.look("backward", module, value, self._number)


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _kind(value: Tensor) -> str | None:
    """nan, inf, or None for a tensor that is finite or has no elements."""
    own = local_part(value)
    if not own.is_floating_point() or not own.numel():
        return None
    extremes = [abs(extreme) for extreme in torch.stack(torch.aminmax(own)).tolist()]
    return next((kind for kind in ("nan", "inf") if kind in map(str, extremes)), None)


def _rows(value: Tensor, tokens_BL: Tensor | None) -> tuple[list[int], list[int]]:
    """Rows that are not finite, and the first such position of each; none where the tensor does not go by tokens."""
    if tokens_BL is None:
        return [], []
    batch, length = tokens_BL.shape
    broken = ~local_part(value).isfinite()
    if (broken.dim() >= 2 and broken.shape[:2] == (batch, length)) or (
        broken.dim() and broken.shape[0] == batch * length
    ):
        broken = broken.reshape(batch, length, -1)
    else:
        return [], []
    broken_BL = broken.any(2)
    rows = broken_BL.any(1).nonzero()[:, 0]
    return rows.tolist(), broken_BL[rows].int().argmax(1).tolist()
