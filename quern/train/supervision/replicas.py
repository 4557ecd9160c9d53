"""Compares what several ranks hold in copies, bit by bit, and names the rank whose copy is another.

Ranks along ``dp_replicate`` hold the same part of everything, and ranks along ``tp`` the same of what is not split over
them (norms, key heads that they share, the guard's history). All of them take the same updates by the same bits, so
copies that differ are corrupt: a bit of memory has flipped, or a product was wrong on one rank.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from quern.errors import InputError
from quern.parallel.clip import local_part
from quern.parallel.gradients import Gradients
from quern.parallel.planning.mesh import MeshPlan
from quern.train.processes.agree import Agreement
from quern.train.processes.ranks import Ranks
from quern.train.step.metrics import Mark
from quern.train.supervision.bit_hash import BitHash
from quern.words import counted

__all__ = ["Corruption", "Replicas", "check_replicas", "odd_ranks"]

_AXES = {"dp_replicate": "replicas differ", "tp": "drift across tensor parallel ranks"}
_FOUND = {**_AXES, "recomputation": "two computations of a micro-batch differ"}
_NAMED = 8
"""Tensors that a line of the ledger names, and ranks that a message does, at most."""

Hashes = tuple[int, int]


@dataclass(frozen=True)
class Corruption:
    """Copies that were not equal: the fields of the ledger's line ``corrupt``."""

    step: int
    """Steps that were complete then."""
    since: int
    """Steps that were complete when they were last equal: checkpoints after it are not to be trusted."""
    group: str
    """The axis along which the copies lie: ``dp_replicate`` or ``tp``; or ``recomputation``, of a micro-batch."""
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    """Of these ranks."""
    certain: bool
    """Whether the ranks are those whose copy is another than most, or than both their replicas' and their neighbours'
    in ``tp``; else they are all that hold a copy."""
    tensors: tuple[str, ...]
    """The first that differ."""
    num_tensors: int
    pairs: tuple[tuple[int, int], ...] = ()
    """With ``recomputation``: the ranks whose results differ, who computed first and who again."""

    def __str__(self) -> str:
        seats = [f"rank {rank} ({host})" for rank, host in zip(self.ranks, self.hosts, strict=True)]
        others = f" and {len(seats) - _NAMED} more" if len(seats) > _NAMED else ""
        who = ", ".join(seats[:_NAMED]) + others
        verdict = f"wrong: {who}" if self.certain else f"wrong is one of {who}"
        more = f" and {self.num_tensors - 1} more" if self.num_tensors > 1 else ""
        twice = [f"rank {one}, then by {'the same' if one == two else f'rank {two}'}" for one, two in self.pairs]
        by = f" (computed by {'; '.join(twice[:_NAMED])})" if twice else ""
        return (
            f"{_FOUND[self.group]} after {counted(self.step, 'step')} in {self.tensors[0]}{more}{by}; {verdict}; "
            f"all were equal after {counted(self.since, 'step')}"
        )


@dataclass(frozen=True)
class _Comparison:
    """One that is still on the device. T tensors, A axes."""

    done: int
    names: Sequence[str]
    hashes_T2: Tensor
    unequal: Sequence[Tensor]
    """By axis, of which of the first tensors this rank's copies differ."""
    verdict_A: Tensor
    """On its way to the host: along which axes copies of any rank differ."""
    ended: Mark


class Replicas:
    """The comparisons of a run; the same calls on every rank.

    Attributes: ``since``, the steps that were complete when all copies were last known to be equal.
    """

    def __init__(
        self, interval: int, gradients: Gradients, optimizer: torch.optim.Optimizer, ranks: Ranks, step: int
    ) -> None:
        """``step``: after which all copies are equal, since a start gives them the same bits."""
        self._model, self._mesh, self._optimizer, self._ranks = gradients.model, gradients.mesh, optimizer, ranks
        self._together, self._interval = Agreement(ranks.rank, ranks.world), interval
        self._axes = [axis for axis in _AXES if interval and getattr(self._mesh.plan, axis) > 1]
        self._hash = BitHash(ranks.device) if self._axes else None
        self._pending: list[_Comparison] = []
        self._compared = self.since = step

    def due(self, done: int) -> bool:
        """Whether copies are compared after ``done`` steps even if there is no save."""
        return bool(self._axes) and done % self._interval == 0

    @torch.no_grad()
    def compare(self, done: int, scalars: Mapping[str, Tensor]) -> None:
        """Compare the weights and moments after ``done`` steps, and ``scalars``, which are the same on every rank; for
        :meth:`settle`. Nothing where there are no copies, or these have been compared. Collective; no host sync, but
        that an update of ``optimizer.state: host`` is waited for."""
        if self._hash is None or done == self._compared:
            return
        self._compared = done
        whole, split = self._tensors()
        whole |= scalars
        device = self._ranks.device  # masters and moments may be on the host
        hashes_T2 = torch.stack([self._hash(local_part(own).to(device)) for own in (*whole.values(), *split.values())])
        unequal = []
        for axis in self._axes:
            own = hashes_T2 if axis == "dp_replicate" else hashes_T2[: len(whole)]
            both = torch.cat((own, ~own))  # the greatest of ~h belongs to the least h
            assert self._mesh.device_mesh is not None
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._mesh.device_mesh.get_group(axis))
            greatest, least = both.chunk(2)
            unequal.append((greatest != ~least).any(1))
        verdict_A = torch.stack([own.any() for own in unequal]).to(torch.int32)
        dist.all_reduce(verdict_A, dist.ReduceOp.MAX)  # all ranks decide alike
        self._pending.append(
            _Comparison(
                done, (*whole, *split), hashes_T2, unequal, verdict_A.to("cpu", non_blocking=True),
                Mark(self._ranks.device),
            )
        )  # fmt: skip

    def settle(self, done: int) -> list[Corruption]:
        """Read the comparisons of up to ``done`` steps: what the first that found something has found, by axis.
        Collective where it did."""
        while self._pending and self._pending[0].done <= done:
            found = self._pending.pop(0)
            found.ended.wait()
            differs = found.verdict_A.tolist()
            if any(differs):
                return self._named(found, [place for place, own in enumerate(differs) if own])
            self.since = found.done
        return []

    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Weights and moments by name: those that every rank of ``tp`` has whole, and the others."""
        whole: dict[str, Tensor] = {}
        split: dict[str, Tensor] = {}
        for name, parameter in self._model.named_parameters():
            is_split = isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())
            of_its_kind = split if is_split else whole
            of_its_kind[name] = parameter
            state = self._optimizer.state.get(parameter, {})
            of_its_kind |= {f"{name} ({slot})": value for slot, value in state.items()}
        return whole, split

    def _named(self, found: _Comparison, places: Sequence[int]) -> list[Corruption]:
        """Which ranks differ along the axes at these places, from all ranks' hashes of what differs."""
        hashes = found.hashes_T2.tolist()
        mine: dict[int, dict[str, Hashes]] = {
            place: {found.names[t]: (hashes[t][0], hashes[t][1]) for t in found.unequal[place].nonzero()[:, 0].tolist()}
            for place in places
        }
        shares = self._together.gather((socket.gethostname(), mine))
        named: list[tuple[str, set[int], bool, list[str]]] = []
        for place in places:
            axis, cells = self._axes[place], dict[tuple[int, ...], dict[int, dict[str, Hashes]]]()
            for rank, (_, theirs) in enumerate(shares):
                seat = self._mesh.plan.coordinates(rank)
                if theirs[place]:
                    cells.setdefault(tuple(seat[other] for other in seat if other != axis), {})[rank] = theirs[place]
            judged = [odd_ranks(cell) for cell in cells.values()]
            tensors = dict.fromkeys(name for cell in cells.values() for own in cell.values() for name in own)
            odd = {rank for ranks, _ in judged for rank in ranks}
            named.append((axis, odd, all(sure for _, sure in judged), list(tensors)))
        common = set.intersection(*(odd for _, odd, _, _ in named))
        crossed = len(named) > 1 and len(common) == 1  # it differs from its replicas and from its neighbours in tp
        result = []
        for axis, odd, sure, names in named:
            ranks = tuple(sorted(common if crossed else odd))
            hosts = tuple(shares[rank][0] for rank in ranks)
            result.append(
                Corruption(
                    found.done, self.since, axis, ranks, hosts, sure or crossed, tuple(names[:_NAMED]), len(names)
                )
            )
        return result


def odd_ranks(held: Mapping[int, Mapping[str, Hashes]]) -> tuple[Collection[int], bool]:
    """Which ranks hold another copy than most, by rank its hashes of each tensor; where of a tensor no more than half
    of the copies are equal, all ranks, and False."""
    odd: set[int] = set()
    for name in next(iter(held.values())):
        counts = Counter(own[name] for own in held.values())
        (usual, count), *_ = counts.most_common(1)
        if 2 * count <= len(held):
            return list(held), False
        odd |= {rank for rank, own in held.items() if own[name] != usual}
    return odd, True


def check_replicas(interval: int, plan: MeshPlan) -> None:
    """Whether there is something to compare.

    Raises:
        InputError: there is not, on this layout.
    """
    if interval and all(getattr(plan, axis) == 1 for axis in _AXES):
        raise InputError(
            f"replicas.interval: expected 0, as no rank holds a copy of what another has with {plan}; or "
            f"parallel.dp_replicate or tp above 1 with it, got {interval}"
        )
