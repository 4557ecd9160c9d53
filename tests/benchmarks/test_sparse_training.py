"""The comparison of a dense model with sparse ones: equal parameters a token, its arithmetic, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sparse_training as bench

from quern.errors import QuernError
from quern.model.config import ModelConfig
from quern.train.config import TrainConfig


@pytest.mark.parametrize("variant", list(bench.VARIANTS))
def test_a_token_uses_as_many_parameters_but_for_the_routers(variant: str, tmp_path: Path) -> None:
    config = bench.config_of(bench.Case(variant, 0, tmp_path), bench.CONFIG, bench.VARIANTS[variant], ["/data"], [])
    TrainConfig.model_validate(config)
    shape = ModelConfig.model_validate(config["model"]).shape(1024)
    dense = ModelConfig.model_validate(bench.MODEL).shape(1024)
    routers = 0 if variant == bench.BASE else shape.num_layers * shape.dim * bench.EXPERTS["num_experts"]
    assert shape.num_active_parameters == dense.num_parameters + routers


def test_loads_are_those_of_the_last_tenth_and_of_the_second_half(tmp_path: Path) -> None:
    case = bench.Case("bias", 0, tmp_path)
    case.folder.mkdir()
    greatest = [9.0] * 10 + [2.0] + [1.5] * 7 + [1.2, 1.3]
    rows = [{"kind": "step", "step": step, "experts": {"max_over_mean": load, "unused": float(step == 19)}}
            for step, load in enumerate(greatest)]  # fmt: skip
    (case.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert bench.loads(case) == {"load": pytest.approx(1.25), "largest": 2.0, "unused": 1.0}


def run_of(held_out: float, order: str, **loads: float) -> dict[str, Any]:
    return {"held_out": held_out, "training": 1.0, "order": order, "tokens": 1, "parameters": 7, **loads}


def test_a_report_is_of_seeds_that_every_variant_has() -> None:
    done = {("dense", seed): run_of(4.0 + seed, str(seed)) for seed in range(3)}
    done |= {("bias", seed): run_of(3.9 + seed, str(seed), load=1.4, largest=1.6, unused=0) for seed in range(2)}
    report = bench.report_of(done, ["dense", "bias"], range(3))
    assert report["seeds"] == [0, 1]
    assert report["even"]
    text = bench.markdown(report | {"machine": "a machine", "command": "a command"})
    assert "| dense | 7 | 4.0000 | 5.0000 | 4.5000 | 0.7071 |  |  |  |  |" in text
    assert "| bias | 7 | 3.9000 | 4.9000 | 4.4000 | 0.7071 | -0.1000 | 1.40 | 1.60 | 0 |" in text
    done["bias", 1]["load"] = 1.5
    assert not bench.report_of(done, ["dense", "bias"], range(3))["even"]
    done["bias", 1]["order"] = "another"
    with pytest.raises(QuernError, match="seed 1"):
        bench.report_of(done, ["dense", "bias"], range(3))
