"""The device mesh: which ranks form which group.

Sizes are resolved before anything starts; torch is imported only where groups are built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from quern.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AXES", "Mesh", "MeshPlan", "Sizes", "build_mesh", "choices", "divisors", "plan_mesh"]

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost first: ranks beside each other, on one node, differ in the axis that talks most. ``ep`` lies inside
``dp_shard`` and ``cp``."""


class Sizes(Protocol):
    """The part of a training config that says how ranks are arranged (its section ``parallel``)."""

    @property
    def dp_replicate(self) -> int: ...
    @property
    def dp_shard(self) -> int | None: ...
    @property
    def resharding(self) -> bool | int: ...
    @property
    def tp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def ep(self) -> int: ...


@dataclass(frozen=True)
class MeshPlan:
    """Sizes of all axes; their product, without ``ep``, is the number of ranks."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    """Of those over which FSDP2 deals weights out, neighbours that hold other experts each."""

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def dp_size(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Ranks over which FSDP2 deals weights out. Those of ``cp`` are among them: they compute other tokens with the
        same weights, as ranks that read other samples do."""
        return self.dp_shard * self.cp

    @property
    def expert_shards(self) -> int:
        """Ranks over which FSDP2 deals out the experts of one rank of ``ep``."""
        return self.shards // self.ep

    def shard_of(self, places: Mapping[str, int]) -> int:
        """A rank's place among them, from :meth:`coordinates`."""
        return places["dp_shard"] * self.cp + places["cp"]

    @property
    def shard_axes(self) -> str:
        """The axes along which they lie."""
        return "+".join(axis for axis in ("dp_shard", "cp") if getattr(self, axis) > 1) or "dp_shard"

    @property
    def by_fsdp(self) -> bool:
        """Whether FSDP2 owns the parameters. Whole copies alone are DDP's, which takes neither tensors split over
        ``tp`` nor the stages of a pipeline: there FSDP2 replicates too, over shards of one rank."""
        return self.shards > 1 or (self.dp_replicate > 1 and (self.tp > 1 or self.pp > 1))

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's coordinate on every axis."""
        places = {}
        for axis in reversed(AXES):
            rank, places[axis] = divmod(rank, getattr(self, axis))
        return {axis: places[axis] for axis in AXES}

    def context_ranks(self, rank: int, head_ranks: int) -> dict[str, list[int]]:
        """The ranks of ``cp`` that hold other ``shards`` of a row than ``rank`` with the same place in the exchange of
        heads, and those ``head_ranks`` that share its own."""
        first = rank - rank // self.tp % self.cp * self.tp  # of cp
        shard, place = divmod(self.coordinates(rank)["cp"], head_ranks)
        return {
            "shards": [first + (own * head_ranks + place) * self.tp for own in range(self.cp // head_ranks)],
            "heads": [first + (shard * head_ranks + own) * self.tp for own in range(head_ranks)],
        }

    def expert_ranks(self, rank: int, node: int) -> list[list[int]]:
        """The ranks of ``ep`` between which tokens of ``rank`` travel: those with its place on the other nodes, of so
        many ranks of ``ep`` each, then those of its node."""
        place = rank // self.tp % self.ep
        first = rank - place * self.tp
        ranks = [first + own * self.tp for own in range(self.ep)]
        start = place - place % node
        return [ranks[place % node :: node], ranks[start : start + node]]

    def sizes(self) -> dict[str, int]:
        """Every axis's size, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    def __str__(self) -> str:
        sizes = " × ".join(f"{axis} {size}" for axis, size in self.sizes().items() if size > 1) or "one rank"
        return sizes + (f", of these ep {self.ep}" if self.ep > 1 else "")


@dataclass(frozen=True)
class Mesh:
    """The ranks' groups, and this rank's coordinates. ``device_mesh`` is None in a process without a process group; its
    axis ``dp_shard`` has the ranks of ``cp`` within."""

    plan: MeshPlan
    device_type: str
    device_mesh: DeviceMesh | None = None
    context_groups: Mapping[str, ProcessGroup] = field(default_factory=dict)
    """Of the ranks of ``cp`` those that hold other ``shards`` of a row, and those that share the ``heads`` of one; not
    where it is this rank alone. See :class:`quern.parallel.planning.context.Context`."""
    expert_mesh: DeviceMesh | None = None
    """Where ``ep`` is above 1: the same ranks with the axes ``expert_shard`` and ``ep`` in place of ``dp_shard``."""
    expert_groups: Sequence[ProcessGroup] = ()
    """Between which tokens travel to experts, the outermost first."""

    @property
    def world_size(self) -> int:
        return self.plan.world_size

    @property
    def dp_size(self) -> int:
        """Ranks that read different samples."""
        return self.plan.dp_size

    @property
    def dp_rank(self) -> int:
        """This rank's place among them, in [0, dp_size): which slice of a global batch it reads."""
        return self.rank("dp_replicate") * self.plan.dp_shard + self.rank("dp_shard")

    @property
    def fsdp(self) -> DeviceMesh | None:
        """For ``fully_shard``: (dp_shard), or (dp_replicate, dp_shard) for HSDP; None where FSDP2 has no part."""
        if self.device_mesh is None or not self.plan.by_fsdp:
            return None
        if self.plan.dp_replicate == 1:
            return self.device_mesh["dp_shard"]
        return self.device_mesh["dp_replicate", "dp_shard"]

    @property
    def expert_fsdp(self) -> DeviceMesh | None:
        """The same for experts, where they have a mesh of their own."""
        if self.expert_mesh is None:
            return None
        return self.expert_mesh["expert_shard" if self.plan.dp_replicate == 1 else ("dp_replicate", "expert_shard")]

    @property
    def experts(self) -> DeviceMesh | None:
        """Over which the experts' weights are split: ``ep``, ``tp``, or both; None where each is whole."""
        if self.expert_mesh is None:
            return self.tp
        return self.expert_mesh["ep" if self.plan.tp == 1 else ("ep", "tp")]

    def group(self, axis: str) -> ProcessGroup:
        """Of the axis of either mesh."""
        mesh = self.device_mesh
        if mesh is None or axis not in (mesh.mesh_dim_names or ()):
            mesh = self.expert_mesh
        assert mesh is not None
        return mesh.get_group(axis)

    @property
    def ddp(self) -> ProcessGroup | None:
        """The group of whole copies; None where FSDP2 owns the parameters, or one copy is all there is."""
        if self.device_mesh is None or self.plan.by_fsdp or self.plan.dp_replicate == 1:
            return None
        return self.device_mesh.get_group("dp_replicate")

    @property
    def tp(self) -> DeviceMesh | None:
        """1-D; None where tensors are whole."""
        return None if self.device_mesh is None or self.plan.tp == 1 else self.device_mesh["tp"]

    @property
    def pp(self) -> ProcessGroup | None:
        """The ranks of this rank's pipeline; None where there is none."""
        return None if self.device_mesh is None or self.plan.pp == 1 else self.device_mesh.get_group("pp")

    @property
    def shard(self) -> int:
        """This rank's place in [0, plan.shards)."""
        return self.rank("dp_shard") * self.plan.cp + self.rank("cp")

    def rank(self, axis: str) -> int:
        """This rank's place on an axis."""
        if self.device_mesh is None or getattr(self.plan, axis) == 1:
            return 0
        if axis in ("dp_shard", "cp"):
            dp_shard, cp = divmod(self.device_mesh.get_local_rank("dp_shard"), self.plan.cp)
            return cp if axis == "cp" else dp_shard
        return self.device_mesh.get_local_rank(axis)

    @property
    def shares_rows(self) -> tuple[str, ...]:
        """The names of the groups that together join the ranks which compute other tokens of this rank's rows."""
        tp = [] if self.tp is None else [self.tp.get_group()]
        return tuple(group.group_name for group in [*self.context_groups.values(), *tp])

    def context(self, axis: str) -> str | None:
        """The name of one of ``context_groups``; None if there is no such."""
        return None if axis not in self.context_groups else self.context_groups[axis].group_name


def plan_mesh(parallel: Sizes, world_size: int) -> MeshPlan:
    """Every size resolved for ``world_size`` ranks. Raises :class:`InputError` with the sizes that would fit."""
    given = {axis: getattr(parallel, axis) for axis in AXES if axis != "dp_shard"}
    rest = math.prod(given.values())
    named = " × ".join(f"{axis} {size}" for axis, size in given.items() if size > 1) or "dp_replicate 1"
    if parallel.dp_shard is None:
        if world_size % rest:
            raise InputError(
                f"parallel: {named} does not divide the {_ranks(world_size)} started; expected "
                f"{choices(divisors(world_size))} for that product, or a multiple of {rest} ranks"
            )
        plan = MeshPlan(dp_shard=world_size // rest, **given)
    else:
        plan = MeshPlan(dp_shard=parallel.dp_shard, **given)
        if plan.world_size != world_size:
            fits = f"dp_shard {world_size // rest} (or null), or " if world_size % rest == 0 else ""
            raise InputError(
                f"parallel: {named} × dp_shard {parallel.dp_shard} makes {_ranks(plan.world_size)}, but "
                f"{world_size} {'was' if world_size == 1 else 'were'} started; expected {fits}{_ranks(plan.world_size)}"
            )
    plan = replace(plan, ep=parallel.ep)
    if plan.shards % plan.ep:
        raise InputError(
            f"parallel.ep: expected a divisor of the ranks of dp_shard × cp ({plan.shards}), of which it is made, "
            f"got {plan.ep}; {choices(divisors(plan.shards))} would fit"
        )
    group = parallel.resharding
    if plan.by_fsdp and not isinstance(group, bool):
        # FSDP2 makes these groups out of its own mesh, but makes them with all ranks: beside tp or pp there are several
        # such meshes, whose ranks would wait for each other for ever
        alone = plan.tp == plan.pp == 1
        fitting = [size for size in divisors(plan.shards) if size > 1 and (alone or size == plan.shards)]
        if group not in fitting:
            over = f"dp_shard ({plan.dp_shard})" if plan.cp == 1 else f"dp_shard × cp ({plan.shards})"
            size = f"a group size that divides {over}" + ("" if alone else f" beside {named}")
            expected = f"true, false or {size}: {choices(fitting)}" if fitting else f"true or false beside {named}"
            raise InputError(f"parallel.reshard_after_forward: expected {expected}, got {group}")
    return plan


def build_mesh(plan: MeshPlan, device_type: str, head_ranks: int = 1, ep_node: int | None = None) -> Mesh:
    """The groups of an initialised process group of ``plan.world_size`` ranks; none for a process without one.
    ``head_ranks``: ranks of ``cp`` that exchange heads; ``ep_node``: ranks of ``ep`` on a node, to which tokens travel
    once.

    Collective: every rank calls it. Raises ValueError if the process group has another size.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if not (dist.is_available() and dist.is_initialized()):
        if plan.world_size > 1:
            raise ValueError(f"{plan}: expected an initialised process group of {plan.world_size} ranks, found none")
        return Mesh(plan, device_type)
    if dist.get_world_size() != plan.world_size:
        raise ValueError(f"{plan}: expected {plan.world_size} ranks, the process group has {dist.get_world_size()}")
    sizes = {axis: getattr(plan, axis) for axis in AXES if axis != "cp"} | {"dp_shard": plan.shards}

    def made(sizes: Mapping[str, int]) -> DeviceMesh:
        # an axis of one rank takes part where FSDP2 asks for it by name
        axes = {axis: size for axis, size in sizes.items() if axis.startswith(("dp_", "expert_")) or size > 1}
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    expert_mesh, expert_groups = None, []
    device_mesh = made(sizes)
    if plan.ep > 1:
        of_experts = {"expert_shard": plan.expert_shards, "ep": plan.ep}
        expert_mesh = made({"pp": plan.pp, "dp_replicate": plan.dp_replicate, **of_experts, "tp": plan.tp})
        expert_groups = [
            dist.new_group(ranks, use_local_synchronization=True)
            for ranks in plan.expert_ranks(dist.get_rank(), ep_node or plan.ep) if len(ranks) > 1
        ]  # fmt: skip
    groups = {
        # of their own, even where another axis has the same ranks: what attention waits for is in no queue behind FSDP2
        axis: dist.new_group(ranks, use_local_synchronization=True)
        for axis, ranks in plan.context_ranks(dist.get_rank(), head_ranks).items() if len(ranks) > 1
    }  # fmt: skip
    return Mesh(plan, device_type, device_mesh, groups, expert_mesh, expert_groups)


def divisors(number: int) -> list[int]:
    """The divisors in ascending order."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def choices(sizes: list[int]) -> str:
    """``1, 2, 4 or 8``; at most eight of them, since a cluster's size may have many divisors."""
    listed = sizes if len(sizes) <= 8 else [*sizes[:7], sizes[-1]]
    gap = "" if listed == sizes else "… "
    return ", ".join(map(str, listed[:-1])) + (f" or {gap}{listed[-1]}" if len(listed) > 1 else str(listed[-1]))


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
