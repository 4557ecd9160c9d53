"""A micro-batch that is computed again on another rank: sums stay as they are, and who computed wrongly is named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from quern.config import dump_yaml
from quern.errors import InputError
from quern.parallel.planning.mesh import MeshPlan
from quern.train.setup import check_settings
from quern.train.supervision.recomputation import Recomputation, _sums, bound_of, check_recomputation, odd_pairs
from support.train import recomputation_case as CASE
from support.train import run_case
from support.train.recomputation_case import Fault

pytestmark = pytest.mark.slow

EVERY = {"replicas": {"recompute_interval": 1}}
W1, NORM, FFN = "blocks.0.ffn.w1", "blocks.0.ffn_norm", "blocks.0.ffn"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return run_case.write_corpus(tmp_path_factory.mktemp("data"))


QUIET: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one rank": ({}, {"precision": "bf16", "float8": {"recipe": "tensorwise", "delayed": True}}),
    "DDP": ({"dp_replicate": 2, "dp_shard": 1}, {"precision": "bf16"}),
    "FSDP": ({"dp_shard": 2}, {"micro_batch": 2}),
    "HSDP": ({"dp_replicate": 2, "dp_shard": 2}, {"micro_batch": 1, "precision": "bf16"}),
    "FSDP, scattered once": ({"dp_shard": 2, "zero": 1}, {"micro_batch": 2}),
    "TP": ({"dp_shard": 1, "tp": 2}, {"precision": "fp16"}),
    "CP": ({"dp_shard": 2, "cp": 2, "cp_method": "ring"}, {"micro_batch": 2}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", QUIET)
def test_a_run_without_a_fault_raises_no_alarm_and_keeps_every_bit(
    kept_ranks: Any, paths: list[str], tmp_path: Path, name: str
) -> None:
    parallel, changes = QUIET[name]
    world = math.prod(parallel.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "cp", "tp"))
    on, off = (
        kept_ranks(CASE.life, world, str(tmp_path / key), paths, {"parallel": parallel, **changes, **own})[0]
        for key, own in {"on": EVERY, "off": {}}.items()
    )
    assert (on["error"], on["found"], on["since"]) == ("", [], run_case.STEPS)
    assert on["state"]
    assert run_case.differences(on["state"], off["state"]) == []
    assert run_case.rows(tmp_path / "on") == run_case.rows(tmp_path / "off")


STEP = 3
FAULTS: dict[str, tuple[dict[str, Any], Fault, list[int], bool, list[list[int]]]] = {
    # layout, fault (of two micro-batches the second is the last: calls 0 and 1, then the second computation);
    # ranks that are named, whether for sure, pairs
    "one rank, gradient": ({}, Fault(0, W1, "gradient", 7, 20, STEP, 1), [0], True, [[0, 0]]),
    "one rank, activation": ({}, Fault(0, FFN, "activation", 9, 27, STEP, 1), [0], True, [[0, 0]]),
    "DDP, once": (
        {"dp_replicate": 2, "dp_shard": 1}, Fault(1, W1, "gradient", 5, 0, STEP, 1), [1], True, [[1, 0]],
    ),
    "DDP, persistent": (
        {"dp_replicate": 2, "dp_shard": 1}, Fault(1, FFN, "backward", 8, 31, STEP, None), [0, 1], False,
        [[0, 1], [1, 0]],
    ),
    "FSDP, first computation": ({"dp_shard": 3}, Fault(1, W1, "gradient", 5, 0, STEP, 1), [1], True, [[1, 2]]),
    "FSDP, second computation": ({"dp_shard": 3}, Fault(1, FFN, "activation", 1285, 27, STEP, 2), [1], True, [[0, 1]]),
    "FSDP, persistent": (
        {"dp_shard": 3}, Fault(2, W1, "gradient", 3, 12, STEP, None), [2], True, [[1, 2], [2, 0]],
    ),
    "FSDP scattered once, first computation": (
        {"dp_shard": 3, "zero": 1}, Fault(1, W1, "gradient", 5, 0, STEP, 1), [1], True, [[1, 2]],
    ),
    "HSDP, persistent": (
        {"dp_replicate": 2, "dp_shard": 2}, Fault(2, NORM, "gradient", 3, 31, STEP, None), [2], True, [[1, 2], [2, 3]],
    ),
    "TP": ({"dp_shard": 1, "tp": 2}, Fault(1, FFN, "activation", 3, 25, STEP, 1), [0, 1], False, [[0, 0], [1, 1]]),
    "FSDP + TP": ({"dp_shard": 2, "tp": 2}, Fault(3, NORM, "gradient", 3, 2, STEP, 1), [3], True, [[3, 1]]),
    "CP": (
        {"dp_shard": 1, "cp": 2, "cp_method": "ring"}, Fault(1, FFN, "activation", 3, 25, STEP, 1), [0, 1], False,
        [[0, 0], [1, 1]],
    ),
    "FSDP + CP": (
        {"dp_shard": 2, "cp": 2, "cp_method": "allgather"}, Fault(3, NORM, "gradient", 3, 31, STEP, 1), [3], True,
        [[3, 1]],
    ),
}  # fmt: skip
QUICK = ("FSDP, persistent", "FSDP + CP")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in FAULTS]
)
def test_a_flip_in_a_checked_step_is_found_and_its_rank_named(
    kept_ranks: Any, paths: list[str], tmp_path: Path, name: str
) -> None:
    parallel, fault, ranks, sure, pairs = FAULTS[name]
    world = math.prod(parallel.get(axis, 1) for axis in ("dp_replicate", "dp_shard", "cp", "tp"))
    dp_size = world // parallel.get("tp", 1) // parallel.get("cp", 1)
    changes = {"parallel": parallel, "global_batch": 4 * dp_size, "micro_batch": 2, **EVERY}
    told = kept_ranks(CASE.life, world, str(tmp_path / "run"), paths, changes, fault)
    assert [rank for rank, own in enumerate(told) if own["flipped"]] == [fault.rank]
    assert all(own["found"] == told[0]["found"] and own["error"] == told[0]["error"] != "" for own in told)
    (found,) = told[0]["found"]
    assert (found["step"], found["since"], found["group"]) == (STEP + 1, STEP, "recomputation")
    assert (list(found["ranks"]), found["certain"]) == (ranks, sure)
    assert [list(pair) for pair in found["pairs"]] == pairs
    assert len(found["hosts"]) == len(ranks)
    if fault.kind == "gradient":  # nothing else comes from it
        assert (found["tensors"], found["num_tensors"]) == ((f"{fault.module}.weight",), 1)
    elif fault.kind == "activation":
        assert found["tensors"][0] == "loss"
        assert found["num_tensors"] > 3
    else:
        assert "loss" not in found["tensors"]
        assert found["num_tensors"] > 3
    *_, corrupt, back = run_case.ledger(tmp_path / "run")
    assert (corrupt["kind"], corrupt["pairs"], corrupt["ranks"]) == ("corrupt", pairs, ranks)
    assert (back["kind"], back["step"], back["before"], back["good"]) == ("back", STEP, STEP, False)


def two_lives(run: str, paths: list[str], fault: Fault) -> list[tuple[int, dict[str, Any]]]:
    """The exit codes of the program, with the fault and without; and what the ledger says then."""
    from quern.train import __main__ as program
    from quern.train.trainer import Trainer

    file, config = f"{run}.{dist.get_rank()}.yaml", CASE.settings(run, paths, {**SMALL, "checkpoint": {"interval": 2}})
    Path(file).write_text(dump_yaml(config))
    lives, step = [], Trainer.train_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "CLOSING_S", 600.0)  # else the process, which is a test's, could end
        patch.setenv("RANK", str(dist.get_rank()))
        for own in (fault, None):
            injectors: dict[int, CASE.Injector] = {}

            def told(self: Trainer, number: int, own: Fault | None = own, injectors: Any = injectors) -> None:
                if own is not None and own.rank == self.ranks.rank:
                    module = self.model.get_submodule(own.module)
                    injectors.setdefault(0, CASE.Injector(module, own) if not injectors else injectors[0]).begin(number)
                step(self, number)

            patch.setattr(Trainer, "train_step", told)
            lives.append((program.main([file]), run_case.timeless(run)[-1]))
            dist.barrier()
    return lives


SMALL = {"parallel": {"dp_shard": 2}, "micro_batch": 2, "replicas": {"recompute_interval": 3}}


@pytest.mark.long
def test_the_same_command_goes_on_as_if_nothing_had_been(kept_ranks: Any, paths: list[str], tmp_path: Path) -> None:
    """Checked are steps 2, 5 and 8, and before saves 1, 3, 5 and 7: of a fault from step 4 on, step 5 is the first."""
    run, other = str(tmp_path / "run"), str(tmp_path / "undisturbed")
    told = kept_ranks(two_lives, 2, run, paths, Fault(1, W1, "gradient", 4, 22, 4, None))
    assert [[code for code, _ in lives] for lives in told] == [[4, 0]] * 2
    (_, back), (_, end) = told[0]
    assert (back["kind"], back["step"], back["before"], end["kind"]) == ("back", 5, 4, "end")
    (corrupt,) = (entry for entry in run_case.ledger(run) if entry["kind"] == "corrupt")
    assert (corrupt["step"], corrupt["since"], corrupt["ranks"]) == (6, 4, [0, 1])
    assert run_case.told(run, "rollback") == [4]
    kept_ranks(CASE.life, 2, other, paths, {**SMALL, "checkpoint": {"interval": 2}})
    assert weights(run) == weights(other)


def weights(run: str) -> dict[str, str]:
    """The hash of every file of tensors of the last checkpoint."""
    manifest = json.loads(Path(run, "checkpoints", f"step_{run_case.STEPS:08d}", "manifest.json").read_text())
    return {name: own["sha256"] for name, own in manifest["files"].items() if name.endswith(".distcp")}


@pytest.mark.long
def test_a_single_rank_that_is_always_wrong_finds_itself_right(
    kept_ranks: Any, paths: list[str], tmp_path: Path
) -> None:
    changes = {"parallel": {}, **EVERY, "steps": 5}
    (told,) = kept_ranks(CASE.life, 1, str(tmp_path), paths, changes, Fault(0, W1, "gradient", 7, 20, STEP, None))
    assert (told["flipped"], told["error"]) == (2 * 3, "")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_within_the_bound_are_equal(dtype: torch.dtype) -> None:
    """By float64: gradients that differ by the last bit of each element, and by one large element."""
    drawn = torch.Generator().manual_seed(2)
    plain = torch.randn(40, 50, generator=drawn, dtype=torch.float64).to(dtype)
    signs = torch.randn(40, 50, generator=drawn, dtype=torch.float64).sign()
    last = (plain.double() * (1 + torch.finfo(dtype).eps * signs)).to(dtype)
    large = plain.clone()
    large[3, 4] *= 2.0**14
    infinite, none = plain.clone(), torch.zeros_like(plain)
    infinite[0, 0] = torch.inf
    made = Recomputation.__new__(Recomputation)
    made._bound = bound_of(dtype)
    digest = {name: _sums(own)[None] for name, own in (
        ("plain", plain), ("last", last), ("large", large), ("inf", infinite), ("none", none),
    )}  # fmt: skip
    want = [plain.double().sum(), plain.double().abs().sum()]
    assert torch.allclose(digest["plain"][0].double(), torch.stack(want), rtol=1e-5, atol=1e-3)
    assert not torch.equal(plain, last)
    for one, two, unequal in (
        ("plain", "last", False), ("plain", "large", True), ("plain", "inf", True), ("inf", "inf", False),
        ("plain", "none", True), ("none", "none", False),
    ):  # fmt: skip
        assert made._unequal(digest[one], digest[two]).tolist() == [unequal], (one, two)
        assert made._unequal(digest[two], digest[one]).tolist() == [unequal], (two, one)


def test_pairs_are_judged_as_by_hand() -> None:
    """``(first, again, third is as the first, third is as the second)``."""
    for num, verdicts, odd, sure in (
        (1, [(0, 0, True, False)], {0}, True), (1, [(0, 0, False, False)], {0}, True),
        (2, [(1, 0, False, True)], {1}, True), (2, [(1, 0, True, False)], {0, 1}, False),
        (2, [(0, 1, True, False), (1, 0, True, False)], {0, 1}, False),
        (2, [(0, 1, True, False), (1, 0, False, True)], {1}, True),
        (3, [(2, 0, True, False)], {0}, True), (3, [(2, 0, False, True)], {2}, True),
        (3, [(2, 0, False, False)], {0, 2}, False), (4, [(0, 1, True, False), (1, 2, False, True)], {1}, True),
        (5, [(0, 1, False, True), (2, 3, True, False)], {0, 3}, True),
        (5, [(0, 1, False, True), (2, 3, False, False)], {0, 2, 3}, False),
    ):  # fmt: skip
        assert odd_pairs(verdicts, num) == (odd, sure), (num, verdicts)


def test_ranks_that_hold_other_experts_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"^replicas\.recompute_interval: expected 0 with parallel\.ep above 1, .* got 5$"
    ):
        check_recomputation(5, MeshPlan(dp_shard=2, ep=2))
    check_recomputation(0, MeshPlan(dp_shard=2, ep=2))


def test_a_pipeline_is_refused(tmp_path: Path) -> None:
    message = r"^replicas\.recompute_interval: expected 0 with parallel\.pp above 1, .* got 7$"
    plan = MeshPlan(pp=2, dp_shard=2)
    with pytest.raises(InputError, match=message):
        check_recomputation(7, plan)
    check_recomputation(0, plan)
    check_recomputation(7, MeshPlan())
    config = run_case.settings(
        tmp_path, ["web"], parallel={"pp": 2}, model={"num_layers": 2}, replicas={"recompute_interval": 7}
    )
    with pytest.raises(InputError, match=message):
        check_settings(config, 2, 300)
