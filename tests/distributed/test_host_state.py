"""Masters on the host on layouts of several ranks: no bit is another than with masters on the device, checkpoints go
from one to the other, and ranks hold and move the bytes that a dry run says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from quern.errors import InputError
from quern.parallel.clip import local_part
from quern.train.processes.ranks import open_ranks
from quern.train.setup import check_settings, open_trainer
from quern.train.step.host_optimizer import HostOptimizer
from quern.train.summary import host_state, state_memory, step_of
from support.train import run_case as CASE

pytestmark = pytest.mark.slow
LONG = pytest.mark.long
BASE = {
    "precision": "bf16", "micro_batch": 2, "steps": 4, "optimizer": {"clip": 0.5}, "validation": {"interval": 2},
    "model": {"num_layers": 2, "tied_embeddings": False},
}  # fmt: skip
SHARDS = {"parallel": {"dp_shard": 2}}
FOUR_LAYERS = {"model": {"num_layers": 4}, "micro_batch": 1}
SPARSE: dict[str, Any] = {
    "model": {"num_layers": 2, "moe": {"num_experts": 5, "top_k": 2, "ffn_dim": 24, "bias": True,
                                       "shared_ffn_dim": 16, "shared_gate": True}},
    "experts": {"bias_rate": 0.05, "balance_loss": 0.1, "balance_over": "global"},
}  # fmt: skip
EP = {"model": {**SPARSE["model"], "moe": {**SPARSE["model"]["moe"], "num_experts": 6}}, "experts": SPARSE["experts"]}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, SHARDS),
    "fsdp2 kept, tied": (2, {"parallel": {"dp_shard": 2, "reshard_after_forward": False},
                             "model": {"tied_embeddings": True}}),
    "fsdp2 in bf16": (2, SHARDS | {"optimizer": {"gradients": "bf16", "moments": "bf16"}}),
    "fsdp2 fp8": (2, SHARDS | {"float8": {"recipe": "tensorwise"}}),
    "fsdp2 zero 1": (2, {"parallel": {"dp_shard": 2, "zero": 1}}),
    "cp2": (2, {"parallel": {"cp": 2}}),
    "cp2fsdp2 zero 1": (4, {"parallel": {"cp": 2, "cp_method": "allgather", "dp_shard": 2, "zero": 1},
                            "micro_batch": 1}),
    "fsdp2 experts": (2, SHARDS | SPARSE),
    "ep2 experts": (2, {"parallel": {"dp_shard": 2, "ep": 2}} | EP),
    "ep2fsdp2 zbv experts": (8, EP | FOUR_LAYERS | {
        "parallel": {"pp": 2, "dp_shard": 4, "ep": 2, "schedule": "zbv_zero_bubble"},
        "model": {"num_layers": 4, "moe": EP["model"]["moe"]}}),
    "tp2 experts": (2, {"parallel": {"tp": 2}} | SPARSE),
    "pp2 experts": (2, {"parallel": {"pp": 2}} | SPARSE),
    "hsdp2x2": (4, {"parallel": {"dp_replicate": 2, "dp_shard": 2}, "replicas": {"interval": 2}}),
    "tp2": (2, {"parallel": {"tp": 2, "tp_pieces": 2}}),
    "tp2fsdp2": (4, {"parallel": {"dp_shard": 2, "tp": 2}}),
    "ddp2 in fp32": (2, {"parallel": {"dp_replicate": 2, "dp_shard": 1}, "precision": "fp32"}),
    "pp2": (2, {"parallel": {"pp": 2}}),
    "pp2 tied": (2, {"parallel": {"pp": 2}, "model": {"tied_embeddings": True}}),
    "pp2 zbv": (2, FOUR_LAYERS | {"parallel": {"pp": 2, "schedule": "zbv_zero_bubble"}}),
    "pp2fsdp2 zbv": (4, FOUR_LAYERS | {"parallel": {"pp": 2, "dp_shard": 2, "schedule": "zbv_zero_bubble"}}),
}  # fmt: skip


def merged(*changes: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for own in (BASE, *changes):
        found = CASE._merge(found, own)
    return found


def on(state: str) -> dict[str, Any]:
    return {"optimizer": {"state": state}}


def nan_at_2(data_step: int) -> float:
    return float("nan") if data_step == 2 else 1.0


def life(run: str, paths: Sequence[str], changes: Mapping[str, Any], kill_at: int | None = None) -> Any:
    left = CASE.live(CASE.settings(run, [*paths], **changes), factor=nan_at_2, kill_at=kill_at)
    return left.state, left.start.step


@pytest.mark.parametrize("layout", [pytest.param(name, marks=() if name == "fsdp2" else LONG) for name in LAYOUTS])
def test_a_run_is_the_same_bits(layout: str, kept_ranks: Any, paths: list[str], tmp_path: Path) -> None:
    """Several micro-batches a step, clipped, one step skipped, validations between."""
    world, changes = LAYOUTS[layout]
    found = [
        kept_ranks(life, world, str(tmp_path / state), paths, merged(changes, on(state)))
        for state in ("device", "host")
    ]
    for (device, _), (host, _) in zip(*found, strict=True):
        assert CASE.differences(device, host) == []
    assert CASE.told(tmp_path / "host", "skipped") == [2]


@LONG
def test_checkpoints_move_between_places_and_layouts(kept_ranks: Any, paths: list[str], tmp_path: Path) -> None:
    """Saved by FSDP2's ranks from the host, then by one process on the device, then by a pipeline from the host: as the
    same road with all on the device."""
    ends = []
    for states in (("device", "device", "device"), ("host", "device", "host")):
        run = str(tmp_path / "-".join(states))
        for (world, parallel), state, kill_at in zip(
            ((2, {"dp_shard": 2}), (1, {"dp_shard": 1}), (2, {"pp": 2})), states, (2, 3, None), strict=True
        ):
            changes = merged({"parallel": parallel, "checkpoint": {"interval": 1}}, on(state))
            last = kept_ranks(life, world, run, paths, changes, kill_at)
        ends.append(last)
    for (device, first), (host, other) in zip(*ends, strict=True):
        assert first == other == 3
        assert CASE.differences(device, host) == []


# --- bytes ------------------------------------------------------------------------------------------------------------


def alive(run: str, paths: Sequence[str], changes: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by component of a rank after a step's gradients are there, and what it copied in that step."""
    config = CASE.settings(run, [*paths], **changes)
    found: dict[str, int] = {}

    def look(trainer: Any, step: int) -> None:
        optimizer, model = trainer.optimizer, trainer.parallel.model
        weights = list(model.parameters())
        kept = sum(own.bytes for own in trainer.parallel.kept)
        found["device"] = kept + size(weights) + size([weight.grad for weight in weights])
        masters = {local_part(own).data_ptr() for own in trainer.parallel.weights.parameters()}
        assert masters.isdisjoint(part.data_ptr() for weight in weights if (part := local_part(weight)).numel())
        moments = [slots[name] for slots in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        found["host"] = size(trainer.parallel.weights.parameters()) + size(moments)
        buffers = [*optimizer._gradients, *optimizer._weights]  # torch pins powers of two
        found["staging"] = sum(2 ** math.ceil(math.log2(buffer.nbytes)) for buffer in buffers)
        moved.clear()

    moved: dict[str, int] = {}
    fetch, send = HostOptimizer._fetch, HostOptimizer._send

    def fetched(optimizer: Any, number: int, gradients: Any) -> Any:
        places, event = fetch(optimizer, number, gradients)
        moved["down"] = moved.get("down", 0) + size(places.values())
        return places, event

    def sent(optimizer: Any, number: int) -> Any:
        moved["up"] = moved.get("up", 0) + size([weight for weight, _ in optimizer._units[number].pairs])
        return send(optimizer, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostOptimizer, "_fetch", fetched)
        patch.setattr(HostOptimizer, "_send", sent)
        with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
            trainer.on_gradients = look
            trainer.fit()
            trainer.optimizer.wait()
            layout = check_settings(config, ranks.world, trainer.state.facts.shape.vocab_size)
            planned = step_of(config, trainer.state.facts.shape, layout)
            told = host_state(planned, config)
            assert told is not None
            assert state_memory(planned, config)["rank"] * 2**30 == told["device"]
    return found | moved, told


def size(tensors: Any) -> int:
    return sum(local_part(tensor).nbytes for tensor in tensors if isinstance(tensor, Tensor))


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        pytest.param(2, {"parallel": {"cp": 2}}, marks=LONG),
        (1, {"parallel": {"dp_shard": 1}}),
        pytest.param(1, {"parallel": {"dp_shard": 1}, "model": {"tied_embeddings": True}}, marks=LONG),
        pytest.param(1, {"parallel": {"dp_shard": 1}, "precision": "fp32"}, marks=LONG),
        pytest.param(2, SHARDS, marks=LONG),
        pytest.param(1, {"parallel": {"dp_shard": 1}} | SPARSE, marks=LONG),
        pytest.param(2, SHARDS | {"optimizer": {"gradients": "bf16", "moments": "bf16"}}, marks=LONG),
        pytest.param(4, {"parallel": {"dp_shard": 2, "tp": 2}}, marks=LONG),
        pytest.param(4, {"parallel": {"dp_shard": 4, "ep": 2}, "micro_batch": 1} | EP, marks=LONG),
        pytest.param(2, {"parallel": {"pp": 2}}, marks=LONG),
    ],
    ids=str,
)
def test_a_dry_run_says_what_is_held_and_moved(
    world: int, changes: dict[str, Any], kept_ranks: Any, paths: list[str], tmp_path: Path
) -> None:
    """Of tensors that are there, and of copies that were made; of the rank whose device holds the most."""
    both = (
        str(tmp_path / "run"),
        paths,
        merged({"steps": 2, "schedule": {"warmup": 1}, "validation": {"interval": 0}}, changes, on("host")),
    )
    ranks = [alive(*both)] if world == 1 else kept_ranks(alive, world, *both)
    held, told = max(ranks, key=lambda own: own[0]["device"])
    assert held == told


@pytest.mark.parametrize(
    ("changes", "world", "said"),
    [
        ({"parallel": {"dp_replicate": 2, "dp_shard": 1}}, 2,
         "parallel.dp_replicate: does not go with optimizer.state host, .*DDP .*; dp_shard above 1"),
        (SHARDS | {"float8": {"recipe": "tensorwise", "all_gather": True}}, 2, "float8.all_gather: does not go with"),
    ],
)  # fmt: skip
def test_what_goes_by_masters_is_refused(changes: dict[str, Any], world: int, said: str, tmp_path: Path) -> None:
    config = CASE.settings(tmp_path / "run", ["nowhere"], **merged(changes, on("host")))
    with pytest.raises(InputError, match=said):
        check_settings(config, world, 256)
    check_settings(
        config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"state": "device"})}), world, 256
    )


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return CASE.write_corpus(tmp_path_factory.mktemp("data"))
