"""Sizes of the mesh: resolved or refused before anything starts."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern.errors import InputError
from quern.parallel.planning.mesh import AXES, MeshPlan, build_mesh, plan_mesh
from quern.train.config import ParallelConfig


class Sizes:
    """Any sizes, those that the config does not offer yet among them."""

    def __init__(self, **sizes: Any) -> None:
        self.dp_replicate = sizes.pop("dp_replicate", 1)
        self.dp_shard = sizes.pop("dp_shard", None)
        self.resharding = sizes.pop("reshard_after_forward", True)
        self.tp, self.pp, self.cp, self.ep = (sizes.pop(axis, 1) for axis in ("tp", "pp", "cp", "ep"))
        assert not sizes


@pytest.mark.parametrize(
    ("given_sizes", "world_size", "expected"),
    [
        ({}, 1, MeshPlan()),
        ({}, 6, MeshPlan(dp_shard=6)),
        ({"dp_replicate": 2}, 8, MeshPlan(dp_replicate=2, dp_shard=4)),
        ({"dp_replicate": 4, "dp_shard": 1}, 4, MeshPlan(dp_replicate=4)),
        ({"dp_replicate": 2, "dp_shard": 3}, 6, MeshPlan(dp_replicate=2, dp_shard=3)),
        ({"dp_shard": 4, "reshard_after_forward": 2}, 4, MeshPlan(dp_shard=4)),
        ({"reshard_after_forward": 8}, 1, MeshPlan()),
        ({"tp": 2, "reshard_after_forward": 4}, 8, MeshPlan(dp_shard=4, tp=2)),
        ({"tp": 2, "pp": 2}, 4, MeshPlan(tp=2, pp=2)),
        ({"tp": 4, "pp": 2, "dp_replicate": 2}, 64, MeshPlan(tp=4, pp=2, dp_replicate=2, dp_shard=4)),
    ],
)
def test_sizes_resolve(given_sizes: dict[str, Any], world_size: int, expected: MeshPlan) -> None:
    plan = plan_mesh(ParallelConfig(**given_sizes), world_size)
    assert plan == expected
    assert plan.world_size == world_size
    assert plan.dp_size == expected.dp_replicate * expected.dp_shard


@pytest.mark.parametrize(
    ("sizes", "world_size", "message"),
    [
        (
            {"dp_replicate": 3}, 4,
            "parallel: dp_replicate 3 does not divide the 4 ranks started; expected 1, 2 or 4 for that product, "
            "or a multiple of 3 ranks",
        ),
        (
            {"dp_replicate": 2, "dp_shard": 3}, 4,
            "parallel: dp_replicate 2 × dp_shard 3 makes 6 ranks, but 4 were started; expected dp_shard 2 (or null), "
            "or 6 ranks",
        ),
        (
            {"dp_replicate": 3, "dp_shard": 2}, 4,
            "parallel: dp_replicate 3 × dp_shard 2 makes 6 ranks, but 4 were started; expected 6 ranks",
        ),
        (
            {"dp_shard": 2}, 1,
            "parallel: dp_replicate 1 × dp_shard 2 makes 2 ranks, but 1 was started; expected dp_shard 1 (or null), "
            "or 2 ranks",
        ),
        (
            {"reshard_after_forward": 3}, 8,
            "parallel.reshard_after_forward: expected true, false or a group size that divides dp_shard (8): "
            "2, 4 or 8, got 3",
        ),
        (
            {"tp": 2, "reshard_after_forward": 2}, 8,
            "parallel.reshard_after_forward: expected true, false or a group size that divides dp_shard (4) beside "
            "tp 2: 4, got 2",
        ),
        (
            {"pp": 2, "reshard_after_forward": 2}, 16,
            "parallel.reshard_after_forward: expected true, false or a group size that divides dp_shard (8) beside "
            "pp 2: 8, got 2",
        ),
        (
            {"tp": 2, "dp_replicate": 2, "dp_shard": 1, "reshard_after_forward": 2}, 4,
            "parallel.reshard_after_forward: expected true or false beside dp_replicate 2 × tp 2, got 2",
        ),
        (
            {"tp": 8, "pp": 2}, 24,
            "parallel: pp 2 × tp 8 does not divide the 24 ranks started; expected 1, 2, 3, 4, 6, 8, 12 or 24 for that "
            "product, or a multiple of 16 ranks",
        ),
        (
            {"dp_replicate": 7}, 1024,
            "parallel: dp_replicate 7 does not divide the 1024 ranks started; expected 1, 2, 4, 8, 16, 32, 64 or … 1024"
            " for that product, or a multiple of 7 ranks",
        ),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, Any], world_size: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        plan_mesh(Sizes(**sizes), world_size)
    assert str(caught.value) == message


def test_reshard_to_one_rank_is_refused() -> None:
    """FSDP2 would take 1 for ``false``, with a warning; true is no group size, though True == 1 in Python."""
    with pytest.raises(InputError, match=re.escape("reshard_after_forward: expected true, false or")):
        plan_mesh(ParallelConfig(reshard_after_forward=1), 4)
    assert plan_mesh(ParallelConfig(reshard_after_forward=True), 4).dp_shard == 4


sizes = st.integers(1, 6)


@given(replicate=sizes, shard=st.none() | sizes, tp=sizes, pp=sizes, cp=sizes, world=st.integers(1, 200))
def test_a_plan_has_as_many_ranks_as_were_started(
    replicate: int, shard: int | None, tp: int, pp: int, cp: int, world: int
) -> None:
    rest = replicate * tp * pp * cp
    fits = world % rest == 0 if shard is None else rest * shard == world
    parallel = Sizes(dp_replicate=replicate, dp_shard=shard, tp=tp, pp=pp, cp=cp)
    if not fits:
        with pytest.raises(InputError):
            plan_mesh(parallel, world)
        return
    plan = plan_mesh(parallel, world)
    assert (plan.dp_replicate, plan.tp, plan.pp, plan.cp) == (replicate, tp, pp, cp)
    assert plan.dp_shard == world // rest


@pytest.mark.slow
@given(sizes, sizes, sizes, sizes, sizes)
def test_coordinates_count_the_ranks(pp: int, replicate: int, shard: int, cp: int, tp: int) -> None:
    """The last axis fastest, so that ranks beside each other share tensors."""
    plan = MeshPlan(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp)
    places = itertools.product(*(range(getattr(plan, axis)) for axis in AXES))
    assert [tuple(plan.coordinates(rank).values()) for rank in range(plan.world_size)] == list(places)


def test_who_owns_the_parameters() -> None:
    """DDP takes neither split tensors nor stages; then FSDP2 replicates, over shards of one rank."""
    assert not any(MeshPlan(**sizes).by_fsdp for sizes in ({}, {"dp_replicate": 4}, {"tp": 2}, {"pp": 2, "tp": 2}))
    for sizes in ({"dp_shard": 2}, {"dp_replicate": 2, "tp": 2}, {"dp_replicate": 2, "pp": 2}):
        assert MeshPlan(**sizes).by_fsdp


def test_a_process_without_a_group_has_a_mesh_of_one() -> None:
    mesh = build_mesh(MeshPlan(), "cpu")
    assert (mesh.dp_rank, mesh.dp_size, mesh.world_size) == (0, 1, 1)
    assert mesh.fsdp is mesh.ddp is mesh.tp is mesh.pp is None
    assert {mesh.rank(axis) for axis in AXES} == {0}
    with pytest.raises(ValueError, match="expected an initialised process group of 2 ranks"):
        build_mesh(MeshPlan(dp_shard=2), "cpu")
