"""Computes a micro-batch again on another rank before the update, and compares its loss and gradients with the first
ones.

In a checked step every data-parallel rank's last micro-batch is computed again by the next one, by the same weights: a
rank's ``tp`` neighbours go along, and a single data-parallel rank computes it again itself. What is compared are the
loss and each weight's gradient of that micro-batch before any sum over ranks: where kernels give the same bits, their
hashes (:class:`BitHash`), elsewhere two sums of each within a bound. Where they differ a third computation, on a third
data-parallel rank if there is one, tells which of the two was wrong.

Nothing of the run changes: gradients that are there are put aside, FP8 keeps none of the maxima, and a model draws no
random numbers. T tensors are compared: the loss, and the gradients as backward gives them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from quern.errors import InputError
from quern.parallel.apply import Parallel
from quern.parallel.clip import local_part
from quern.parallel.context.inputs import Inputs
from quern.parallel.planning.mesh import MeshPlan
from quern.torch_versions import fsdp_groups
from quern.train.batches.feed import StepInputs
from quern.train.config import TrainConfig
from quern.train.processes.agree import Agreement
from quern.train.processes.ranks import Ranks
from quern.train.step.precision import LossScale, precision_of
from quern.train.supervision.bit_hash import BitHash
from quern.train.supervision.replicas import Corruption

__all__ = ["Recomputation", "bound_of", "check_recomputation", "odd_pairs"]

_LOSS = "loss"
_NAMED = 8
_ROUNDINGS = 16


class Recomputation:
    """The checks of a run; the same calls on every rank.

    Attributes: ``since``, the steps that were complete when two computations were last equal; ``found``, what the last
    check has found.
    """

    def __init__(self, config: TrainConfig, parallel: Parallel, loss_scale: LossScale, ranks: Ranks, step: int) -> None:
        """``step``: after which there is nothing known against the weights."""
        self._interval, self._parallel = config.replicas.recompute_interval, parallel
        self._loss_scale, self._ranks = loss_scale, ranks
        self._together = Agreement(ranks.rank, ranks.world)
        self._dp_size = parallel.gradients.mesh.dp_size
        self.since, self.found, self._first = step, list[Corruption](), dict[str, Tensor]()
        if not self._interval:
            return
        exact = config.deterministic or ranks.device.type == "cpu"
        self._bound = 0.0 if exact else bound_of(precision_of(config.precision).compute)
        self._digest = BitHash(ranks.device) if exact else _sums
        self._hooks, self._before = ExitStack(), list[Tensor]()
        parameters = [(n, p) for n, p in parallel.model.named_parameters() if p.requires_grad]
        names = {id(parameter): name for name, parameter in parameters}
        self._names = [_LOSS, *reversed(names.values())]
        # FSDP2 has an unsharded parameter for each, whose gradient it takes when a unit's backward ends
        modules = [module for module in parallel.model.modules() if isinstance(module, FSDPModule)]
        groups = {id(group): group for module in modules for group in fsdp_groups(module)}  # modules may share one
        self._units = [
            (group, [(names.pop(id(own.sharded_param)), own) for own in group.fsdp_params])
            for group in groups.values()
        ]  # fmt: skip
        self._totals = [
            (names.pop(id(weight)), kept.total_OK)
            for own in parallel.kept for weight, kept in own.weights if kept.total_OK is not None
        ]  # fmt: skip
        self._plain = [(name, parameter) for name, parameter in parameters if id(parameter) in names]

    def watched(
        self, done: int, save: bool, batch: StepInputs, weigh: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        """``weigh`` of a step that :meth:`check` is to look at, as every ``interval`` steps and where a ``save``
        follows: from the last micro-batch's loss on it notes digests. ``done``: steps, once this one is complete."""
        if not self._interval or (done % self._interval and not save):
            return weigh
        left = len(batch.micro_batches)

        def watching(loss_sum: Tensor) -> Tensor:
            nonlocal left
            left -= 1
            if not left:
                self._first = {_LOSS: self._digest(loss_sum)}
                self._before = [total.clone() for _, total in self._totals]
                for own in (own for _, owned in self._units for _, own in owned):
                    if (whole := own._unsharded_param.grad) is not None:  # of micro-batches before: FSDP2 adds them up
                        own.unsharded_accumulated_grad, own._unsharded_param.grad = whole, None
                self._hooks.enter_context(self._gradients(self._first, keep=True))
            return weigh(loss_sum)

        return watching

    def check(self, done: int, batch: StepInputs, enter: Callable[[str], object]) -> None:
        """Compute the last micro-batch of a step that was watched again and compare. Collective; waits for the
        device. ``enter`` is told of the phase, and of the end of it."""
        if not self._first:
            return
        enter("recompute")
        self._hooks.close()
        first_T2 = self._stacked(self._first)
        mine = batch.micro_batches[-1]
        inputs, theirs_T2 = self._rotated(mine, first_T2, 1)
        again_T2 = self._computed(inputs, batch.valid_tokens)
        unequal = self._unequal(theirs_T2, again_T2).any().to(torch.int32)
        if self._ranks.world > 1:
            dist.all_reduce(unequal, dist.ReduceOp.MAX)  # all ranks decide alike
        if not unequal.item():
            self.since = done
        else:
            inputs, _ = self._rotated(mine, first_T2, 2)
            self.found = [self._named(done, first_T2, again_T2, self._computed(inputs, batch.valid_tokens))]
        self._first, self._before = {}, []
        enter("reduce")

    # ---- one computation

    @contextmanager
    def _gradients(self, found: dict[str, Tensor], *, keep: bool) -> Iterator[None]:
        """Puts the digest of every gradient of one backward into ``found``; unless ``keep``, the gradient goes."""

        def note(name: str, gradient: Tensor | None) -> None:
            if gradient is not None:
                found[name] = self._digest(gradient)

        def ended(owned: Sequence[tuple[str, Any]], goes_on: Callable[..., Any], *unused: Any) -> Any:
            for name, own in owned:
                note(name, own.unsharded_param.grad)
                if not keep:
                    own.unsharded_param.grad = None
            return goes_on(*unused)

        with ExitStack() as undo:
            for name, parameter in self._plain:
                undo.callback(parameter.register_hook(partial(note, name)).remove)
                if not keep:
                    undo.callback(parameter.register_post_accumulate_grad_hook(_drop).remove)
            for group, owned in self._units:
                undo.callback(setattr, group, "post_backward", group.post_backward)
                group.post_backward = partial(ended, owned, group.post_backward)
            yield
            for name, total in self._totals:
                note(name, total)

    def _computed(self, inputs: Inputs, valid_tokens: int) -> Tensor:
        """[T, 2] of a micro-batch."""
        self._exchange_totals()
        aside = [(parameter, parameter.grad) for _, parameter in self._plain]
        for parameter, _ in aside:
            parameter.grad = None
        found: dict[str, Tensor] = {}
        with self._parallel.evaluating(), self._gradients(found, keep=False):
            loss_sum, _ = self._parallel.model(inputs.tokens_BL, **inputs.behind)
            found[_LOSS] = self._digest(loss_sum)
            self._loss_scale.scaled(loss_sum / valid_tokens).backward()
        for parameter, gradient in aside:
            parameter.grad = gradient
        self._exchange_totals()
        return self._stacked(found)

    @torch.no_grad()
    def _exchange_totals(self) -> None:
        """Sums that gradients are added to in place with what they were before the micro-batch."""
        for (_, total), before in zip(self._totals, self._before, strict=True):
            now = total.clone()
            total.copy_(before)
            before.copy_(now)

    def _stacked(self, found: dict[str, Tensor]) -> Tensor:
        return torch.stack([found[name] for name in self._names])  # every weight has a part in every micro-batch

    def _rotated(self, inputs: Inputs, first_T2: Tensor, by: int) -> tuple[Inputs, Tensor]:
        """The micro-batch of the data-parallel rank ``by`` before this one, and its hashes."""
        documents, by = inputs.documents, by % self._dp_size
        if not by:
            return inputs, first_T2
        tensors = [] if documents is None else documents.tensors
        sizes = [torch.tensor([*map(len, tensors), 0 if documents is None else documents.max_seqlen])]
        if documents is not None:
            sizes = self._passed_on(sizes, sizes, by)
        *lengths, longest = sizes[0].tolist()
        named = {name: value for name, value in vars(inputs).items() if isinstance(value, Tensor)}
        plain = [*named.values(), first_T2]
        like = [own.new_empty(length, *own.shape[1:]) for own, length in zip(tensors, lengths, strict=True)]
        got = self._passed_on(plain + tensors, plain + like, by)
        documents = None if documents is None else documents.of_other(got[len(plain) :], longest)
        own = dict(zip(named, got[: len(named)], strict=True))
        return replace(inputs, **own, documents=documents), got[len(named)]

    def _passed_on(self, mine: Sequence[Tensor], like: Sequence[Tensor], by: int) -> list[Tensor]:
        """Sends ``mine`` to the data-parallel rank ``by`` further; what has come is of the sizes of ``like``."""
        dp_rank, seat = divmod(self._ranks.rank, stride := self._ranks.world // self._dp_size)
        there, here = ((dp_rank + way) % self._dp_size * stride + seat for way in (by, -by))
        device = self._ranks.device
        got = [torch.empty_like(own, device=device, memory_format=torch.contiguous_format) for own in like]
        calls = [dist.P2POp(dist.isend, _bytes(own.to(device).contiguous()), there) for own in mine if own.numel()]
        calls += [dist.P2POp(dist.irecv, _bytes(own), here) for own in got if own.numel()]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        return [own.to(as_mine.device) for own, as_mine in zip(got, like, strict=True)]

    # ---- the verdict

    def _unequal(self, one_T2: Tensor, other_T2: Tensor) -> Tensor:
        """[..., T], bool; of [..., T, 2]."""
        if not self._bound:
            return (one_T2 != other_T2).any(-1)
        most_T1 = one_T2[..., 1:].maximum(other_T2[..., 1:])
        far_T = ((one_T2 - other_T2).abs() > self._bound * most_T1).any(-1)
        finite_T, other_T = one_T2.isfinite().all(-1), other_T2.isfinite().all(-1)
        return torch.where(finite_T & other_T, far_T, finite_T != other_T)  # what overflows does so twice

    def _named(self, done: int, first_T2: Tensor, again_T2: Tensor, third_T2: Tensor) -> Corruption:
        """Who was wrong, from all ranks' digests. D data-parallel ranks, S ranks that share a micro-batch."""
        shares = self._together.gather((socket.gethostname(), torch.stack((first_T2, again_T2, third_T2)).cpu()))
        num = self._dp_size
        digests_3DST2 = torch.stack([own for _, own in shares]).unflatten(0, (num, -1)).permute(2, 0, 1, 3, 4)
        # by whose micro-batch it is
        first, again, third = (own.roll(-way, 0) for way, own in enumerate(digests_3DST2))
        unequal_DST = self._unequal(first, again)
        as_first_D, as_again_D = (~self._unequal(own, third).flatten(1).any(1) for own in (first, again))
        verdicts = [
            (one, (one + 1) % num, bool(as_first_D[one]), bool(as_again_D[one]))
            for one in unequal_DST.flatten(1).any(1).nonzero()[:, 0].tolist()
        ]
        odd, sure = odd_pairs(verdicts, num)
        seats, stride = unequal_DST.any(2).any(0).nonzero()[:, 0].tolist(), unequal_DST.shape[1]
        ranks = tuple(dp_rank * stride + seat for dp_rank in sorted(odd) for seat in seats)
        pairs = tuple(
            (one * stride + seat, two * stride + seat)
            for one, two, *_ in verdicts for seat in seats if unequal_DST[one, seat].any()
        )  # fmt: skip
        names = [self._names[t] for t in unequal_DST.flatten(0, 1).any(0).nonzero()[:, 0].tolist()]
        return Corruption(
            done, self.since, "recomputation", ranks, tuple(shares[rank][0] for rank in ranks),
            sure and len(seats) == 1, tuple(names[:_NAMED]), len(names), pairs,
        )  # fmt: skip


def odd_pairs(verdicts: Sequence[tuple[int, int, bool, bool]], num: int) -> tuple[set[int], bool]:
    """Which of ``num`` data-parallel ranks were wrong, and whether that is sure. ``verdicts``: of each pair that
    differs who computed first, who again, and whether a third computation was as the first, and as the second; with
    two ranks it was the first one's own."""
    odd: set[int] = set()
    for one, two, as_first, as_again in verdicts:
        if as_again or one == two:
            odd.add(one)
        elif as_first and num > 2:  # by itself, a rank that is always wrong agrees with itself
            odd.add(two)
    unsure = [(one, two) for one, two, *_ in verdicts if not odd & {one, two}]
    return odd | {rank for pair in unsure for rank in pair}, not unsure


def check_recomputation(interval: int, plan: MeshPlan) -> None:
    """Whether micro-batches can be computed again one by one.

    Raises:
        InputError: they cannot, on this layout.
    """
    if interval and plan.pp > 1:
        raise InputError(
            f"replicas.recompute_interval: expected 0 with parallel.pp above 1, where stages are at several "
            f"micro-batches at once, got {interval}"
        )
    if interval and plan.ep > 1:
        raise InputError(
            f"replicas.recompute_interval: expected 0 with parallel.ep above 1, where the rank that computes a "
            f"micro-batch again holds other experts, got {interval}"
        )


def bound_of(compute: torch.dtype) -> float:
    """On the difference of two sums relative to the sum of magnitudes, where activations have this dtype: 16 unit
    roundoffs, of float32 at least. Another order of additions changes a gradient's elements by a rounding or a few,
    up and down, so that of sums hardly anything is seen; a flip of an exponent's upper bits is far above it."""
    return _ROUNDINGS * max(torch.finfo(compute).eps, torch.finfo(torch.float32).eps) / 2


@torch.no_grad()
def _sums(gradient: Tensor) -> Tensor:
    """[2], float32: the sum, and the sum of magnitudes."""
    part = local_part(gradient)
    wide = torch.promote_types(part.dtype, torch.float32)
    return torch.stack((part.sum(dtype=wide), torch.linalg.vector_norm(part, 1, dtype=wide))).float()


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _bytes(tensor: Tensor) -> Tensor:
    """Its memory: not every backend sends every dtype."""
    return tensor.view(-1).view(torch.uint8)
