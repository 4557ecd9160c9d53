"""Runs an optimizer on the CPU, over masters in host memory, beside the next forward (ZeRO-Offload, Ren et al. 2021).

One thread updates unit after unit in the order in which a forward uses them. While it computes one, the gradients of
the next are on their way to the host, and the weights of the one before on their way to the device, each through one of
two buffers. A forward waits for a unit where it first uses it. Where there is no device the copies are plain ones, and
no bit is another. Pinned memory and streams are unverified on GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, get_device_module, nn
from torch.distributed.tensor import DTensor

from quern.closes import Closes
from quern.parallel.clip import local_part
from quern.parallel.host_masters import HostMasters, Unit

__all__ = ["HostOptimizer"]

_ALIGNED = 64
"""Bytes, at whose multiples tensors begin in a buffer."""


class HostOptimizer(torch.optim.Optimizer, Closes):
    """An ``inner`` optimizer over a model's masters, whose gradients and weights are on a device.

    :meth:`step` returns before the update is done. ``state`` and :meth:`wait` wait for its end, and so must whoever
    reads masters. ``grad_scale`` and ``found_inf``, set before a step, go to the inner one with the gradients: its
    thread reads them; the next forward waits where it first uses a weight. Whoever waits for an update that fails gets
    the error.
    """

    def __init__(self, inner: torch.optim.Optimizer, masters: HostMasters) -> None:
        self._inner, self._units, self._totals = inner, masters.units, masters.totals
        super().__init__([dict(group) for group in inner.param_groups], inner.defaults)
        self.moments: torch.dtype | None = getattr(inner, "moments", None)
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        device = self._units[0].pairs[0][0].device
        self._on: Any = get_device_module(device)  # torch.cpu has streams and events that do nothing
        self._down, self._up = self._on.Stream(), self._on.Stream()
        pin = device.type != "cpu"
        self._scalars = torch.empty(2, pin_memory=pin)
        largest = [max(_size(pair[of] for pair in unit.pairs) for unit in self._units) for of in (0, 1)]
        self._weights, self._gradients = (
            [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for _ in range(2)] for size in largest
        )  # gradients have the masters' dtype, or a smaller one
        self._sent: list[Any] = [self._on.Event(), self._on.Event()]
        """By buffer, after which it is free."""
        self._thread, self._device = ThreadPoolExecutor(1, "host-optimizer"), device
        self._updates: Sequence[Future[Any]] = ()
        """By unit, of the last step: the event after which the device has its weights."""
        self._spent = False
        for number, unit in enumerate(self._units):
            unit.wait = partial(self.wait, number)

    @property
    def state(self) -> Any:
        """The inner optimizer's, after the last update."""
        self.wait()
        return self._inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self._inner.state = value

    def wait(self, unit: int = -1) -> None:
        """Until masters, moments and the weights on the device are those of the last step, up to a unit's."""
        if self._updates:
            self._updates[unit].result().synchronize()  # by the host: FSDP2 gathers on streams of its own

    def close(self) -> None:
        """Wait for the last update's end, without its error, and end the thread; a later step fails."""
        self._thread.shutdown()
        for unit in self._units:
            unit.wait = Unit.wait

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: a checkpoint is loaded into ``state`` and the masters in place, and then published."""
        raise NotImplementedError("HostOptimizer.load_state_dict: fill its state in place, then call publish()")

    @torch.no_grad()
    def publish(self) -> None:
        """Send all masters to the device, after they were filled by other means than a step."""
        for number in range(len(self._units)):
            self._send(number).synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients on the device; those that a step took from memory of their own are zeroed there."""
        for weight, _ in (pair for unit in self._units for pair in unit.pairs):
            if not (self._spent and weight in self._totals):
                weight.grad = None
        self._spent = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Begin one update; ``closure`` is not for this optimizer."""
        assert closure is None
        self.wait()
        for own, theirs in zip(self.param_groups, self._inner.param_groups, strict=True):
            theirs["lr"] = own["lr"]
        for stream in (self._down, self._up):
            stream.wait_stream(self._on.current_stream())
        gradients = [{weight: weight.grad for weight, _ in unit.pairs} for unit in self._units]
        given = {"grad_scale": self.grad_scale, "found_inf": self.found_inf}
        with self._on.stream(self._down):
            for (name, value), place in zip(given.items(), self._scalars.unbind(), strict=True):
                given[name] = None if value is None else place.copy_(value, non_blocking=True)
        updates: Sequence[Future[Any]] = [Future() for _ in self._units]
        self._thread.submit(self._update, gradients, given, updates)  # fails after close: nobody would end these
        self._updates, self._spent = updates, True

    @torch.no_grad()
    def _update(
        self, gradients: Sequence[Mapping[nn.Parameter, Tensor | None]], given: Mapping[str, Tensor | None],
        updates: Sequence[Future[Any]],
    ) -> None:  # fmt: skip
        try:
            self._on.set_device(self._device)  # else this thread would open a context on the first GPU
            coming = self._fetch(0, gradients[0])
            for number, (unit, done) in enumerate(zip(self._units, updates, strict=True)):
                here, arrived = coming
                if number + 1 < len(self._units):
                    coming = self._fetch(number + 1, gradients[number + 1])
                arrived.synchronize()
                vars(self._inner).update(given)
                for weight, master in unit.pairs:
                    master.grad = _like(master, here[weight]) if weight in here else None
                self._inner.step()
                for _, master in unit.pairs:
                    master.grad = None
                done.set_result(self._send(number))
        except BaseException as error:
            for done in updates:
                if not done.done():
                    done.set_exception(error)

    def _fetch(self, number: int, gradients: Mapping[nn.Parameter, Tensor | None]) -> tuple[dict[Any, Tensor], Any]:
        """Begin to copy a unit's gradients, of which those in memory of their own are zeroed: the places and the event
        after which they are there, until the next but one is fetched."""
        found = {weight: local_part(own) for weight, own in gradients.items() if own is not None}
        places = dict(zip(found, _views(self._gradients[number % 2], found.values()), strict=True))
        arrived = self._on.Event()
        with self._on.stream(self._down):
            for weight, own in found.items():
                places[weight].copy_(own, non_blocking=True)
                if weight in self._totals:
                    own.zero_()
            arrived.record(self._down)
        return places, arrived

    def _send(self, number: int) -> Any:
        """Begin to copy a unit's masters into its weights, rounded on the host; returns the event of its end."""
        pairs = [(local_part(weight), local_part(master)) for weight, master in self._units[number].pairs]
        self._sent[number % 2].synchronize()
        places = _views(self._weights[number % 2], [weight for weight, _ in pairs])
        for (_, master), place in zip(pairs, places, strict=True):
            place.copy_(master)
        self._sent[number % 2] = sent = self._on.Event()
        with self._on.stream(self._up):
            for (weight, _), place in zip(pairs, places, strict=True):
                weight.copy_(place, non_blocking=True)
            sent.record(self._up)
        return sent


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(-(-local_part(tensor).nbytes // _ALIGNED) * _ALIGNED for tensor in tensors)


def _views(buffer: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Places in a buffer for tensors of these sizes and dtypes."""
    views, first = [], 0
    for tensor in tensors:
        views.append(buffer[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        first += _size([tensor])
    return views


def _like(master: nn.Parameter, part: Tensor) -> Tensor:
    """A gradient of a master, of which this rank has ``part``."""
    return DTensor(part, master._spec, requires_grad=False) if isinstance(master, DTensor) else part
