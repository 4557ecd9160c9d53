"""Completes gradients after the last micro-batch: the sums that no wrapper makes, the norm, and clipping.

Data parallelism has summed over its ranks already. Two sums are left. A parameter that tensor parallelism does not
split (norms; key and value heads that several ranks share) has seen this rank's tokens or heads alone. And embeddings
that are tied across the ends of a pipeline exist twice: under one name on its first and its last rank, or, where these
are the same rank, with a copy called ``tied.weight``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from quern.model.transformer import Transformer
from quern.parallel.clip import Norms, clip, global_grad_norm, local_part
from quern.parallel.planning.mesh import Mesh

__all__ = ["EMBEDDING", "TIED", "Gradients"]

EMBEDDING, TIED = "embed.weight", "tied.weight"
"""The second is the first's copy at the end of a pipeline that begins and ends on one rank."""


@dataclass(frozen=True)
class Gradients:
    """The gradients of this rank's parameters; ``model`` provides their global names."""

    model: Transformer
    mesh: Mesh

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that have a gradient, copies too."""
        return [parameter for parameter in self._all if parameter.grad is not None]

    @cached_property
    def _all(self) -> list[nn.Parameter]:
        """They stay the same objects, as the optimizer has them too; finding them in a deep model takes a while."""
        return list(self.model.parameters())

    @torch.no_grad()
    def finish(self) -> None:
        """Add the missing sums to every gradient. After the last backward, before anything looks at one. Collective."""
        if self.mesh.tp is not None:
            _sum_together(
                [local_part(p.grad) for p in self.parameters if p.grad is not None and not _is_split(p.grad, "tp")],
                self.mesh.tp.get_group(),
            )
        copies = self._copies()
        if copies is None:
            return
        embedding, tied = copies
        total = local_part(_grad(embedding))
        if tied is not None:
            total += local_part(_grad(tied))
            local_part(_grad(tied)).copy_(total)
        elif total.numel():
            total += self._other_end(total)

    def _other_end(self, mine: torch.Tensor) -> torch.Tensor:
        """What the pipeline's last rank has where the first has ``mine``, and the other way round. The two add up the
        same two numbers, so they get the same bits."""
        assert self.mesh.pp is not None
        theirs, other = torch.empty_like(mine), self.mesh.plan.pp - 1 - self.mesh.rank("pp")
        both = [
            dist.P2POp(call, tensor, group=self.mesh.pp, group_peer=other)
            for call, tensor in ((dist.isend, mine), (dist.irecv, theirs))
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        return theirs

    @torch.no_grad()
    def norm(self, parts: list[Norms] | None = None) -> torch.Tensor:
        """The 2-norm of all gradients of all stages as one vector: 0-d, the same bits on every rank. Collective.

        ``parts`` is given the norms of this rank's parts of them, for :meth:`squares`."""
        copies = self._copies()
        if copies is None or (copies[1] is None and self.mesh.rank("pp") == 0):
            counted = self._all
        else:
            copy = copies[0] if copies[1] is None else copies[1]
            counted = [parameter for parameter in self._all if parameter is not copy]
        return global_grad_norm(counted, self.mesh.pp, self.mesh, parts)

    def squares(self, parts: Iterable[Norms]) -> dict[str, float]:
        """This rank's share of each gradient's squared 2-norm, by the parameter's name: shares of all ranks add up to
        it, for of copies one rank counts. Waits for the device."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        found: dict[str, float] = {}
        for part in parts:
            if self._counts(part.groups):
                norms = part.norms_P.tolist()
                found |= {names[p]: norm * norm for p, norm in zip(part.parameters, norms, strict=True)}
        return found

    def _counts(self, cut_over: Sequence[dist.ProcessGroup]) -> bool:
        """Whether this rank stands for those that hold the same part of what is dealt out over these groups."""
        device_mesh = self.mesh.device_mesh
        if device_mesh is None:
            return True
        cut = {group.group_name for group in cut_over}
        experts = self.mesh.expert_mesh
        if experts is not None and experts.get_group("ep").group_name in cut:
            device_mesh = experts
        return all(
            axis == "pp" or device_mesh.get_local_rank(axis) == 0 or self.mesh.group(axis).group_name in cut
            for axis in device_mesh.mesh_dim_names or ()
        )

    def clip(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scale all gradients by ``max_norm / norm`` where that is below 1, on device, in place."""
        clip(self.parameters, max_norm, norm)

    def _copies(self) -> tuple[nn.Parameter, nn.Parameter | None] | None:
        """The tied embedding that exists twice, and its copy, which is None where it is another rank's; None where
        this rank has neither."""
        if self.mesh.pp is None or not self.model.shape.tied_embeddings:
            return None
        named = dict(self.model.named_parameters())
        return (named[EMBEDDING], named.get(TIED)) if EMBEDDING in named else None


def _grad(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None, "both ends of a pipeline use the embedding in every micro-batch"
    return parameter.grad


def _is_split(gradient: torch.Tensor, axis: str) -> bool:
    return isinstance(gradient, DTensor) and axis in (gradient.device_mesh.mesh_dim_names or ())


def _sum_together(gradients: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Sum over the group's ranks in place, one message a dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for alike in by_dtype.values():
        if len(alike) == 1 and alike[0].is_contiguous():
            dist.all_reduce(alike[0], group=group)
            continue
        flat = torch.cat([gradient.flatten() for gradient in alike])
        dist.all_reduce(flat, group=group)
        parts = flat.split([gradient.numel() for gradient in alike])
        torch._foreach_copy_(alike, [part.view(own.shape) for part, own in zip(parts, alike, strict=True)])
