"""A bit that flips on one rank is found by comparison with the ranks that hold the same, and its rank is named."""

from __future__ import annotations

import json
import math
import random
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from quern.config import dump_yaml
from quern.errors import InputError
from quern.parallel.clip import local_part
from quern.parallel.gradients import Gradients
from quern.parallel.planning.mesh import MeshPlan, build_mesh
from quern.train.processes.ranks import Ranks
from quern.train.setup import check_settings
from quern.train.supervision.replicas import Replicas, check_replicas, odd_ranks
from support.train import run_case as case


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flip a bit of an element of this rank's part, 0 the lowest of its mantissa; in place."""
    part = local_part(tensor)
    raw = part.view(-1).view(torch.uint8).numpy()
    raw[element * part.element_size() + bit // 8] ^= np.uint8(1 << bit % 8)


class Model(nn.Module):
    """Parameters of three dtypes, of sizes that fill no word, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(3)
        for name, dtype, size in (
            ("a", torch.float32, (5, 7)), ("b", torch.bfloat16, (3, 3)), ("c", torch.float64, (4,)),
            ("d", torch.bfloat16, (1,)),
        ):  # fmt: skip
            values = torch.randn(size, generator=drawn, dtype=torch.float64).to(dtype)
            self.register_parameter(name, nn.Parameter(values, requires_grad=name != "d"))


def bits_to_flip(rng: random.Random, tensor: torch.Tensor) -> int:
    """The lowest of the mantissa, the exponent's ends, the sign, or any."""
    size = 8 * tensor.element_size()
    mantissa = {torch.float32: 23, torch.bfloat16: 7, torch.float64: 52}[tensor.dtype]
    return rng.choice([0, mantissa - 1, mantissa, size - 2, size - 1, rng.randrange(size)])


def flips(replicas_of_all: int, trials: int) -> list[tuple[int, str, Any]]:
    """By trial the rank and the tensor of the flip, -1 for none, and what was found."""
    world, rank, rng = dist.get_world_size(), dist.get_rank(), random.Random(replicas_of_all)
    model, device = Model(), torch.device("cpu")
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    scalars = {"guard.losses": torch.arange(8.0)}
    tensors = {**dict(model.named_parameters()), **scalars}
    for name, parameter in model.named_parameters():
        tensors |= {f"{name} ({slot})": value for slot, value in optimizer.state.get(parameter, {}).items()}
    plan = MeshPlan(dp_replicate=replicas_of_all, dp_shard=world // replicas_of_all)
    mesh = build_mesh(plan, "cpu")
    replicas = Replicas(1, Gradients(model, mesh), optimizer, Ranks(rank, world, device), 0)  # type: ignore[arg-type]
    outcomes = []
    for trial in range(1, trials + 1):
        name = rng.choice(sorted(tensors))
        tensor = tensors[name]
        odd = rng.randrange(world) if trial % 6 else -1
        element, bit = rng.randrange(tensor.numel()), bits_to_flip(rng, tensor)
        if odd == rank:
            flip(tensor, element, bit)
        replicas.compare(trial, scalars)
        found = replicas.settle(trial)
        if odd == rank:
            flip(tensor, element, bit)
        outcomes.append((odd, name, [vars(own) for own in found]))
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize(("copies", "world"), [(3, 3), *(pytest.param(n, 4, marks=pytest.mark.long) for n in (2, 4))])
def test_every_flip_is_found_and_equal_copies_raise_no_alarm(kept_ranks: Any, copies: int, world: int) -> None:
    """200 flips in the three; of two copies there are two pairs, and the other has none."""
    ranks = kept_ranks(flips, world, copies, 81)
    clean = 0
    for trial, told in enumerate(zip(*ranks, strict=True), 1):
        odd, name, found = told[0]
        assert all(other == told[0] for other in told)
        if odd < 0:
            assert found == []
            clean = trial
            continue
        (own,) = found
        assert own["ranks"] == ((odd,) if copies > 2 else (odd % 2, odd % 2 + 2)), name
        assert own["certain"] == (copies > 2)
        assert (own["group"], own["tensors"], own["num_tensors"]) == ("dp_replicate", (name,), 1)
        assert (own["step"], own["since"]) == (trial, clean)
        assert len(own["hosts"]) == len(own["ranks"])


def test_a_majority_is_more_than_half() -> None:
    """By hand: the copies of each of two tensors as letters."""
    for copies, odd, sure in (
        ("aab", {2}, True), ("abb", {0}, True), ("abc", {0, 1, 2}, False), ("aabb", {0, 1, 2, 3}, False),
        ("aaab", {3}, True), ("aabc", {0, 1, 2, 3}, False), ("aaabc", {3, 4}, True), ("ab", {0, 1}, False),
    ):  # fmt: skip
        held = {rank: {"w": (ord(copy), 0), "v": (1, 1)} for rank, copy in enumerate(copies)}
        ranks, majority = odd_ranks(held)
        assert (set(ranks), majority) == (odd, sure), copies


@pytest.mark.parametrize("plan", [MeshPlan(), MeshPlan(dp_shard=4), MeshPlan(pp=2, dp_shard=2)])
def test_a_layout_without_copies_is_refused(plan: MeshPlan, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^replicas\.interval: expected 0, .* got 7$"):
        check_replicas(7, plan)
    check_replicas(0, plan)
    parallel = {"dp_shard": plan.dp_shard, "pp": plan.pp}
    config = case.settings(tmp_path, ["web"], parallel=parallel, replicas={"interval": 7}, model={"num_layers": 2})
    with pytest.raises(InputError, match=r"^replicas\.interval: "):
        check_settings(config, plan.world_size, 300)


# ---- runs

FLIPPED = 4
"""In this step's update, counted from 0."""


def life(file: str, rank: int | None, tensor: str, bit: int) -> int:
    """The exit code of the run; on ``rank`` a bit flips after the update."""
    from quern.train import __main__ as program
    from quern.train.trainer import Trainer

    plain = Trainer.update

    def update(self: Trainer, step: int, health: Any) -> None:
        plain(self, step, health)
        if step == FLIPPED and self.ranks.rank == rank:
            parameter = dict(self.model.named_parameters())[tensor.split(" ")[0]]
            state = {f"{tensor.split(' ')[0]} ({slot})": own for slot, own in self.optimizer.state[parameter].items()}
            flip({tensor: parameter, **state}[tensor], 3, bit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "update", update)
        patch.setattr(program, "CLOSING_S", 600.0)  # else the process, which is a test's, could end
        patch.setenv("RANK", str(dist.get_rank()))
        return program.main([file])


def write(folder: Path, name: str, paths: list[str], **changes: Any) -> tuple[str, Path]:
    run = folder / name
    config = case.settings(
        run, paths,
        global_batch=12, micro_batch=1, metrics={"tensorboard": False, "live": False},
        checkpoint={"interval": 3}, guard={"loss_z": 1e9, "grad_norm_z": 1e9}, **changes,
    )  # fmt: skip
    file = folder / f"{name}.yaml"
    file.write_text(dump_yaml(config))
    return str(file), run


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, str]:
    """The hash of every file of tensors of the last checkpoint."""
    manifest = json.loads((run / "checkpoints" / f"step_{case.STEPS:08d}" / "manifest.json").read_text())
    return {name: own["sha256"] for name, own in manifest["files"].items() if name.endswith(".distcp")}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return case.write_corpus(tmp_path_factory.mktemp("data"))


CASES: dict[str, tuple[dict[str, int], int, str, int, int, list[tuple[str, list[int], bool]]]] = {
    # layout, rank, tensor, bit, interval; group, ranks that are named, whether for sure
    "DDP": (
        {"dp_replicate": 3, "dp_shard": 1}, 1, "blocks.0.ffn.w1.weight", 0, 5, [("dp_replicate", [1], True)],
    ),
    "HSDP": (
        {"dp_replicate": 2, "dp_shard": 2}, 2, "blocks.0.attention.wq.weight (exp_avg_sq)", 1, 100,
        [("dp_replicate", [0, 2], False)],
    ),
    "TP": ({"dp_shard": 1, "tp": 2}, 1, "blocks.0.ffn_norm.weight", 31, 1, [("tp", [0, 1], False)]),
    "DDP + TP": (
        {"dp_replicate": 2, "dp_shard": 1, "tp": 2}, 3, "norm.weight", 12, 2,
        [("dp_replicate", [3], True), ("tp", [3], True)],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "DDP" else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_all_ranks_leave_the_weights_and_the_run_goes_on_as_if_nothing_had_been(
    kept_ranks: Any, paths: list[str], tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    parallel, rank, tensor, bit, interval, expected = CASES[name]
    world = math.prod(parallel.values())
    file, run = write(tmp_path, "corrupt", paths, parallel=parallel, replicas={"interval": interval})
    assert kept_ranks(life, world, file, rank, tensor, bit) == [4] * world
    where = "one of rank 0 (HOST), rank 2 (HOST)" if name == "HSDP" else f"rank {rank} (HOST)"
    told = {"DDP": f"wrong: {where}; all", "HSDP": f"wrong is {where}; all", "DDP + TP": f"wrong: {where}; all"}
    assert told.get(name, "").replace("HOST", socket.gethostname()) in capfd.readouterr().out
    corrupt = [entry for entry in lines(run) if entry["kind"] == "corrupt"]
    assert [entry["step"] for entry in lines(run) if entry["kind"] == "checkpoint"] == [3]
    assert [(own["group"], own["ranks"], own["certain"]) for own in corrupt] == expected
    *_, back = lines(run)
    assert lines(run)[-len(corrupt) - 1 : -1] == corrupt
    assert (back["kind"], back["before"], back["leave_out"], back["good"]) == ("back", corrupt[0]["since"], [], False)
    for own in corrupt:  # found in the next comparison, or with the next save; a later step spreads it
        after = min(-(-(FLIPPED + 1) // interval) * interval, 6)
        assert own["step"] == after
        assert own["since"] == max(3, (after - 1) // interval * interval)
        assert own["tensors"][0].startswith(tensor.split(" ")[0])
    if name == "DDP + TP":
        return
    assert kept_ranks(life, world, file, None, tensor, bit) == [0] * world
    assert [entry["step"] for entry in lines(run) if entry["kind"] in ("rollback", "end")] == [3, case.STEPS]
    if name != "TP":
        other, undisturbed = write(tmp_path, "undisturbed", paths, parallel=parallel)
        assert kept_ranks(life, world, other, None, tensor, bit) == [0] * world
        assert weights(run) == weights(undisturbed)


def undisturbed(run: str, paths: list[str], parallel: dict[str, Any], changes: dict[str, Any]) -> tuple[bool, int]:
    """Whether the run was complete, and after how many steps all copies were last known to be equal."""
    from quern.train.processes.ranks import open_ranks
    from quern.train.setup import open_trainer

    config = case.settings(
        run, paths,
        micro_batch=1, steps=4, parallel=parallel, replicas={"interval": 1},
        guard={"loss_z": 1e9, "grad_norm_z": 1e9}, **changes,
    )  # fmt: skip
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        trainer.fit()
        return trainer.complete, trainer.replicas.since


@pytest.mark.long
@pytest.mark.parametrize(
    ("parallel", "changes"),
    [
        ({"dp_shard": 1, "tp": 4}, {"precision": "fp16"}),  # key heads are shared
        (
            {"dp_replicate": 2, "dp_shard": 1, "pp": 2},
            {"model": {"num_layers": 4}, "precision": "bf16", "optimizer": {"moments": "bf16"}},
        ),
    ],
)
def test_copies_of_other_layouts_stay_equal(
    kept_ranks: Any, paths: list[str], tmp_path: Path, parallel: dict[str, Any], changes: dict[str, Any]
) -> None:
    assert kept_ranks(undisturbed, 4, str(tmp_path / "run"), paths, parallel, changes) == [(True, 4)] * 4
