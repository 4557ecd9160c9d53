"""Finds the first module that gives a value which is not finite, by running a step's forward and backward again.

That is with the weights of now. Nothing of the run changes: gradients are spent by then and removed after it, as before
the next step, FP8 keeps none of the maxima, and a model draws no random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quern.parallel.apply import Parallel
from quern.parallel.clip import local_part
from quern.parallel.context.inputs import Shared
from quern.train.batches.feed import StepInputs
from quern.train.processes.agree import Agreement

__all__ = ["first_non_finite"]


def first_non_finite(
    parallel: Parallel, optimizer: torch.optim.Optimizer, scaled: Callable[[Tensor], Tensor], together: Agreement,
    eager: bool, batch: StepInputs,
) -> dict[str, Any]:  # fmt: skip
    """Find where a value that is not finite comes first in a step. Collective; waits for the device.

    ``rank``, None where it shows after the sum over ranks alone; ``phase``: ``weights`` (they or moments are not
    finite, in ``module``), ``forward`` or ``backward`` of ``module``, or ``none``; ``value``: nan or inf;
    ``micro_batch``; ``sequences`` of it, with ``row``, ``place`` in the global batch and the first such ``position``;
    ``redone``: False where the step is not computed again: in a pipeline, where weights are not finite, and unless
    ``eager``, since without compiled kernels it could need more memory than there is.
    """
    named = [*parallel.model.named_parameters()]
    held = [*parallel.weights.named_parameters()]
    slots = ((n, slot, v) for n, p in held for slot, v in {"": p, **optimizer.state.get(p, {})}.items())
    broken = (_found("weights", f"{n} {slot}".strip(), kind) for n, slot, value in slots if (kind := _kind(value)))
    found = together.gather(next(broken, None))
    redone = eager and not any(found) and parallel.gradients.mesh.pp is None
    if redone:
        optimizer.zero_grad(set_to_none=True)
        watch = _Watch(parallel.model, batch)
        try:
            with parallel.evaluating():
                parallel.run.forward_backward(batch.micro_batches, lambda loss: scaled(loss / batch.valid_tokens))
            summed = (_found("backward", n[: n.rfind(".")], kind) for n, p in named if (kind := _kind(p.grad)))
            own = watch.found or next(({**one, "rank": None} for one in summed), None)
        finally:
            for hook in watch.hooks:
                hook.remove()
            optimizer.zero_grad(set_to_none=True)
        found = together.gather(own)
    known = [{"rank": rank, **own, "redone": redone} for rank, own in enumerate(found) if own]
    # ranks compute side by side: the earlier micro-batch is first, and of one the earlier look, as ranks of cp hand
    # each other what is not finite
    known.sort(
        key=lambda own: (
            own["micro_batch"] is None, own["micro_batch"] or 0, own["phase"] == "backward", own.pop("look", 0)
        )
    )  # fmt: skip
    return known[0] if known else {"rank": None, **_found("none"), "redone": redone}


def _found(
    phase: str, module: str | None = None, value: str | None = None, number: int | None = None
) -> dict[str, Any]:
    return {"phase": phase, "module": module, "value": value, "micro_batch": number, "sequences": []}


class _Watch:
    """Hooks that look at what modules take and give, in the order of execution: inner ones before those around them.

    The first that gives what is not finite is named; or the one around it, where it is handed such and nobody gave it.
    In backward it is handed its output's gradient and gives its input's, here of a view: several may share an input.
    """

    def __init__(self, model: nn.Module, batch: StepInputs) -> None:
        self.found: dict[str, Any] | None = None
        self._batch, self._number, self._looks = batch, -1, 0
        self.hooks: list[Any] = []
        for name, module in model.named_modules():
            self.hooks.append(module.register_forward_pre_hook(partial(self._before, name)))
            self.hooks.append(module.register_forward_hook(partial(self._after, name)))
        for name, parameter in model.named_parameters():  # before the sum over ranks
            self.hooks.append(parameter.register_hook(partial(self._look, "backward", name.rpartition(".")[0])))

    def _before(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self._number += not name
        self._look("forward", name.rpartition(".")[0], args[0])
        if (x := args[0].view_as(args[0])).requires_grad:
            x.register_hook(partial(self._look, "backward", name))
        return x, *args[1:]

    def _after(self, name: str, module: nn.Module, args: tuple[Any, ...], given: Any) -> None:
        for value in reversed(given if isinstance(given, tuple) else (given,)):  # losses by token before their sum
            self._look("forward", name, value)
            if value.requires_grad:
                value.register_hook(partial(self._look, "backward", name.rpartition(".")[0]))

    def _look(self, phase: str, module: str, value: Tensor | None) -> None:
        self._looks += 1
        if self.found is not None or value is None or not (kind := _kind(value)):
            return
        self.found = _found(phase, module or "loss", kind, self._number)  # what the whole model computes itself
        self.found["look"] = self._looks
        batch, length = self._batch.micro_batches[self._number].tokens_BL.shape
        broken = ~local_part(value).isfinite()
        if broken.shape[:2] == (batch, length) or broken.shape[:1] == (batch * length,):  # goes by tokens
            broken_BL = broken.reshape(batch, length, -1).any(2)
            places = self._batch.origins[self._number].places
            firsts = broken_BL.int().argmax(1)
            documents = self._batch.micro_batches[self._number].documents
            if isinstance(documents, Shared):  # of a rank's own tokens
                firsts = documents.positions_BR.gather(1, firsts[:, None])[:, 0]
            self.found["sequences"] = [
                {"row": row, "place": int(places[row]), "position": int(firsts[row])}
                for row in broken_BL.any(1).nonzero()[:, 0].tolist()
            ]


def _kind(value: Tensor | None) -> str | None:
    """nan, inf, or None for a tensor that is finite or has no elements."""
    if value is None or not value.is_floating_point() or not (own := local_part(value)).numel():
        return None
    extremes = torch.stack(torch.aminmax(own))
    return "nan" if extremes.isnan().any() else "inf" if extremes.isinf().any() else None
