"""The comparison of precisions in training: its arithmetic, what it refuses, and a run of it on next to nothing."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import float8_training as bench
import numpy as np
import pytest
from scipy import stats

from quern.errors import InputError, QuernError
from quern.model.config import ModelConfig
from quern.model.float8.recipe import Recipe
from quern.parallel.planning.float8 import LAYERS, fitting
from quern.train.bench.corpus import Shard, write_data_run


def test_every_recipe_takes_every_matrix() -> None:
    shape = ModelConfig.model_validate(bench.CONFIG["model"]).shape(vocab_size=1024)
    for scaling in ("tensorwise", "rowwise", "blockwise"):
        assert fitting(shape, 1, Recipe(scaling)) == LAYERS


def test_a_gap_is_of_pairs_and_its_interval_students() -> None:
    base, own = [3.01, 3.05, 2.98, 3.10], [3.02, 3.05, 3.00, 3.13]
    found = bench.compare(own, base)
    paired = stats.ttest_rel(own, base).confidence_interval(0.95)
    assert found["gap"] == pytest.approx(0.015 / 3.035)
    assert found["gap_interval"] == pytest.approx([paired.low / 3.035, paired.high / 3.035])
    assert found["standard_errors"] == pytest.approx(0.015 / stats.sem(base))


@pytest.mark.parametrize(
    ("own", "base", "passes"),
    [
        ([2.0099, 2.0101], [2.0, 2.0002], True),  # 0.4975 %, a hundred standard errors
        ([2.0102, 2.0104], [2.0, 2.0002], False),  # 0.51 %
        ([2.03, 2.23], [2.0, 2.2], True),  # 1.4 %, 0.3 standard errors (of 0.1)
        ([2.11, 2.31], [2.0, 2.2], False),  # 5.2 %, 1.1 standard errors
        ([1.9, 1.9], [2.0, 2.0], True),  # lower is no harm
        ([2.1, 2.1], [2.0, 2.0], False),  # no scatter: no standard error
    ],
)
def test_a_precision_passes_by_its_gap_or_by_the_scatter_of_seeds(
    own: list[float], base: list[float], passes: bool
) -> None:
    assert bench.compare(own, base)["passes"] is passes


def run_of(held_out: float, training: float, order: str) -> dict[str, Any]:
    return {"held_out": held_out, "training": training, "order": order, "tokens": 100, "parameters": 7,
            "tokens_per_s": 1.0}  # fmt: skip


def test_a_report_is_of_seeds_that_every_precision_has() -> None:
    done = {("bf16", seed): run_of(2.0 + seed / 100, 3.0, str(seed)) for seed in range(3)}
    done |= {("fp8-rowwise", seed): run_of(2.001 + seed / 100, 3.5, str(seed)) for seed in range(2)}
    report = bench.report_of(done, ["bf16", "fp8-rowwise"], range(3))
    assert report["seeds"] == [0, 1]
    assert report["tokens"] == 500
    row = report["precisions"]["fp8-rowwise"]
    assert row["held_out_to_base"]["passes"]
    assert not row["training_to_base"]["passes"]  # half a nat, and BF16's seeds do not scatter
    assert not row["passes"]
    assert not report["passes"]
    text = bench.markdown(report | {"machine": "a machine", "command": "a command"})
    assert "| fp8-rowwise | 2.0010 | 2.0110 | 2.0060 | +0.050 % |" in text
    assert "**no**" in text
    assert not bench.report_of({}, ["bf16", "fp8-rowwise"], range(3))["passes"]


def test_precisions_that_read_in_another_order_are_not_compared() -> None:
    done = {("bf16", 0): run_of(2.0, 3.0, "one"), ("fp8-rowwise", 0): run_of(2.0, 3.0, "another")}
    with pytest.raises(QuernError, match="seed 0"):
        bench.report_of(done, ["bf16", "fp8-rowwise"], [0])


def prepare(case: bench.Case, change: str) -> None:
    change_of = bench.PRECISIONS[case.variant]
    bench.prepare(case, bench.config_of(case, bench.CONFIG, change_of, ["/data"], [change, "model.dim=256"]))


def test_a_run_goes_on_with_its_own_config_only(tmp_path: Path) -> None:
    case = bench.Case("fp8-blockwise", 3, tmp_path)
    prepare(case, "steps=50")
    assert "recipe: blockwise" in case.config.read_text()
    prepare(case, "steps=60")  # not begun yet
    case.folder.mkdir()
    prepare(case, "steps=60")
    with pytest.raises(InputError, match="begun with another config"):
        prepare(case, "steps=50")
    with pytest.raises(InputError, match="stepz"):
        prepare(bench.Case("bf16", 0, tmp_path), "stepz=50")


def test_the_losses_are_those_of_the_attempt_that_counts(tmp_path: Path) -> None:
    case = bench.Case("bf16", 0, tmp_path)
    case.folder.mkdir()
    rows = [{"kind": "step", "step": step, "loss": 9.0, "tokens": 0, "tokens_per_s": 1.0} for step in range(15)]
    rows += [
        {"kind": "step", "step": step, "loss": 4 - step / 10, "tokens": 8 * (step + 1), "tokens_per_s": 2.0}
        for step in range(10, 30)  # taken up again from step 10
    ]
    rows += [{"kind": "validation", "step": 30, "loss": 2.5}]
    (case.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (case.folder / "run.json").write_text('{"order": "o", "parameters": 7}')
    found = bench.figures(case)
    assert found["training"] == pytest.approx(fmean([4 - 2.7, 4 - 2.8, 4 - 2.9]))
    assert (found["held_out"], found["tokens"]) == (2.5, 240)


@pytest.mark.long
def test_precisions_are_trained_and_not_trained_again(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)

    def shard(documents: int) -> Shard:
        tokens = generator.integers(0, 255, documents * 40, "uint16")
        tokens[39::40] = 255
        return Shard(np.full(documents, 40, np.int64), tokens)

    train, _ = write_data_run(
        tmp_path / "data", {"made": [shard(60)], "made.val": [shard(20)]}, vocab_size=256, run_id="made"
    )
    small = ["steps=3", "model.num_layers=1", "seq_len=32", "global_batch=4", "schedule.warmup=1"]
    arguments = [
        *small,
        "--data",
        train,
        "--out",
        str(tmp_path / "out"),
        "--seeds",
        "2",
        "--precisions",
        "fp8-blockwise",
    ]
    assert bench.main(arguments) in (0, bench.NOT_PASSED)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert list(report["precisions"]) == ["bf16", "fp8-blockwise"]
    assert report["seeds"] == [0, 1]
    assert report["tokens"] == 4 * 3 * 4 * 32
    for row in report["precisions"].values():
        assert row["held_out"] == pytest.approx([np.log(256)] * 2, abs=0.2)  # random tokens
    assert report["precisions"]["bf16"]["held_out"] != report["precisions"]["fp8-blockwise"]["held_out"]
    before = (tmp_path / "out" / "bf16-seed0" / "metrics.jsonl").read_bytes()
    ledger = tmp_path / "out" / "fp8-blockwise-seed1" / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))  # as if it had been ended there
    bench.main(arguments)
    assert (tmp_path / "out" / "bf16-seed0" / "metrics.jsonl").read_bytes() == before
    assert '"end"' in ledger.read_text().splitlines()[-1]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["precisions"] == report["precisions"]
