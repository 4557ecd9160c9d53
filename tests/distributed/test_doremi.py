"""DoReMi on any layout learns the weights that one process learns."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quern.train.config import TrainConfig
from support.train import run_case
from support.train.corpora import VOCAB_SIZE, Doc, write_run

pytestmark = pytest.mark.slow

MOE = {"num_experts": 4, "top_k": 2, "ffn_dim": 16, "score": "softmax", "normalize": True}
#: What beside a layout changes the numbers: a run of one process is made for each.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "z_loss": {"z_loss": 1e-3}, "experts": {"model": {"num_layers": 2, "moe": MOE}},
}  # fmt: skip
#: Ranks, the kind, and the layout and what goes with it.
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "dp_shard": (2, "plain", {"parallel": {"dp_shard": 2}}),
    "pp": (2, "plain", {"parallel": {"pp": 2}}),
    "dp_replicate": (2, "plain", {"parallel": {"dp_replicate": 2}}),
    "tp": (2, "z_loss", {"parallel": {"tp": 2}}),
    "cp": (2, "plain", {"parallel": {"cp": 2}}),
    "pp interleaved": (2, "plain", {"parallel": {"pp": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2}}),
    "dp_shard × tp": (4, "plain", {"parallel": {"dp_shard": 2, "tp": 2}}),
    "ep": (2, "experts", {"parallel": {"dp_shard": 2, "ep": 2}}),
    "masters on the host": (1, "plain", {"optimizer": {"state": "host"}}),
    "compiled": (1, "z_loss", {"compile": {"enabled": True, "backend": "aot_eager"}}),
    "recomputed, twice": (2, "plain", {
        "parallel": {"dp_replicate": 2}, "activation_checkpointing": "full", "replicas": {"recompute_interval": 1},
    }),
}  # fmt: skip
FAST = ("dp_shard", "pp")


def settings(folder: Path, name: str, **changes: Any) -> TrainConfig:
    data = [{"path": str(folder / "data" / "tokens" / own), "max_epochs": 1e6} for own in ("web", "code", "books")]
    model = {"num_layers": 4, "tied_embeddings": False} | changes.pop("model", {})
    fixed = {"data": data, "steps": 6, "precision": "fp64", "model": model, "global_batch": 8, "micro_batch": 2}
    return run_case.settings(folder / name, [], **{**fixed, **changes})


def rows(run: Path) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if row["kind"] == "step"]


def live(config: TrainConfig) -> None:
    run_case.live(config)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the data is, and where :func:`alone` puts its runs."""
    folder, rng = tmp_path_factory.mktemp("doremi"), random.Random(1)
    tops = {"web": 120, "code": 40, "books": 7}
    write_run(folder / "data", {
        name: [[Doc((*(rng.randrange(top) for _ in range(rng.randint(9, 50))), VOCAB_SIZE - 1)) for _ in range(60)]]
        for name, top in tops.items()
    })  # fmt: skip
    return folder


def alone(folder: Path, kind: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The section ``doremi`` with a reference of this kind, and what a proxy of one process learns against it."""
    learned = {"reference": str(folder / f"reference {kind}")}
    if not (folder / f"alone {kind}").exists():
        live(settings(folder, f"reference {kind}", seed=8, **KINDS[kind]))
        live(settings(folder, f"alone {kind}", doremi=learned, **KINDS[kind]))
    return learned, rows(folder / f"alone {kind}")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_weights_are_those_of_one_process(site: Path, kept_ranks: Callable[..., Any], name: str) -> None:
    world, kind, changes = LAYOUTS[name]
    learned, expectations = alone(site, kind)
    config = settings(site, name, doremi=learned, **{**KINDS[kind], **changes})
    kept_ranks(live, world, config)
    assert len(expectations) == 6
    for row, expected in zip(rows(site / name), expectations, strict=True):
        for key in ("doremi_weight", "doremi_mean_weight", "excess_loss_by_source"):
            np.testing.assert_allclose([*row[key].values()], [*expected[key].values()], rtol=1e-9, err_msg=key)
        for key in ("objective", "loss", "grad_norm"):
            assert row[key] == pytest.approx(expected[key], rel=1e-9)
    assert np.ptp([*expectations[-1]["doremi_weight"].values()]) > 0.01
