"""The GPU benchmark of precisions, on the CPU: rows and their limits, arithmetic, bars, table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import parts
import precision
import pytest
import tables
import torch
from torch.utils.flop_counter import FlopCounterMode

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
CPU = torch.device("cpu")
SPEC = {
    "model": {"preset": "debug", "num_layers": 1}, "vocab_size": 512, "device": "cpu", "seq_len": 64, "tokens": 128,
    "micro_batch": 2, "accumulate": 2, "checkpointing": "none", "steps": 2, "warm_up": 1, "peak_tflops": None,
    "recipe": None, "square": 64, "copy_bytes": 1 << 16, "document": 48, "optimizer_layers": 1, "backend": "eager",
}  # fmt: skip


def row_of(code: str, limit_s: float = 60) -> Any:
    return precision.Row("parts", "a row", [sys.executable, "-c", code], limit_s, precision.last_line)


@pytest.mark.slow
def test_a_row_that_fails_costs_its_row() -> None:
    def entry(code: str, limit_s: float = 60) -> dict[str, Any]:
        found: dict[str, Any] = precision.measure(row_of(code), limit_s)
        return found

    assert entry("print('a word')\nprint('{\"seconds\": 3}')")["seconds"] == 3
    assert entry("raise RuntimeError('out of memory')")["error"] == "RuntimeError: out of memory"
    assert entry("import os; os._exit(7)")["error"] == "ended with code 7"
    assert entry("import time; time.sleep(60)", 0.5)["error"] == "took longer than 0 s"


@pytest.mark.long
def test_nothing_that_a_row_has_started_outlives_it(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(place)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)"
    )
    precision.measure(row_of(code), 5)
    state = Path("/proc", place.read_text(), "stat")
    for _ in range(100):
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the child still runs")


def test_rows_of_the_trainer_are_quern_benchs() -> None:
    rows = precision.rows_of(SPEC)
    assert [row.name for row in rows if row.group == "trainer"] == list(precision.PRECISIONS)
    from quern.train.bench.options import parse

    for row in rows:
        if row.group == "trainer":
            options = parse(row.command[3:])
            assert (options.model, options.precision) == (("debug",), (row.name,))
            assert options.compile
    ok = {"ok": True, "tokens_per_s": 5.0, "error": None}
    assert precision.bench_row(json.dumps({"rows": [ok]}, indent=2))["tokens_per_s"] == 5.0
    with pytest.raises(ValueError, match="does not fit"):
        precision.bench_row(json.dumps({"rows": [{"ok": False, "error": "does not fit"}]}))


def test_bars() -> None:
    product = {"to_emulation": 2e-3, "to_float64": 0.06, "bounds": [5e-3, 5e-2]}
    rows = {
        "products": {"rows": [product]},
        "bf16": {"mfu_full": 0.49, "tokens_per_s": 10_000.0},
        "fp8-tensorwise": {"tokens_per_s": 12_100.0},
    }
    found = [(bar["value"], bar["passes"]) for bar in precision.verdicts(rows, "cuda")]
    assert found == [
        (pytest.approx(0.4), True),
        (pytest.approx(1.2), False),
        (0.49, False),
        (pytest.approx(1.21), True),
    ]
    assert len(precision.verdicts(rows, "cpu")) == 2
    assert precision.verdicts({"bf16": {"error": "failed"}}, "cuda") == []


@pytest.mark.slow
def test_products_are_judged() -> None:
    rows = parts.products(SPEC, CPU)["rows"]
    assert len(rows) == 3 * 2 * 2 * 3
    assert all(row["passes"] for row in rows)
    assert all(row["to_emulation"] == 0 for row in rows)

    def wrong(a_MS: Any, b_NS: Any, dtype: torch.dtype, *, fast: bool = False) -> torch.Tensor:
        return parts.emulated(a_MS, b_NS, dtype) * 1.02

    with patch.object(parts.linear, "multiply", wrong):
        rows = parts.products(SPEC, CPU)["rows"]
    assert not any(row["passes"] for row in rows)
    assert rows[0]["to_emulation"] == pytest.approx(0.02, rel=0.1)


def test_flops_of_parts() -> None:
    shape = parts.shape_of(SPEC)
    with patch.object(parts, "seconds_of", lambda call, device: call() and None):
        with FlopCounterMode(display=False) as counter:
            row = parts.loss(shape, SPEC, CPU)
        assert row["flops"] == counter.get_total_flops()
        (row,) = parts.attention(shape, SPEC, CPU)
        # by hand: 2 sequences, 4 heads of 64; QKᵀ and PV of half of 64², and backward five such products
        assert row["flops"] == 7 * 2 * (2 * 4 * 64) * (64 * 64 / 2)
        row = parts.optimizer(shape, SPEC, CPU)
        assert row["bytes"] == 28 * shape.num_block_parameters


def test_the_table_says_what_there_is() -> None:
    speed = {"tokens_per_s": 11_000.0, "mfu_full": 0.55, "mfu_causal": 0.5, "mfu_full_without_head": 0.45,
             "mfu_causal_without_head": None, "memory_gib": 61.25, "error": None, "group": "trainer"}  # fmt: skip
    rows = {
        "bf16": {**speed, "name": "bf16"},
        "fp8-tensorwise": {**speed, "name": "fp8-tensorwise", "tokens_per_s": 13_750.0},
        "parts": {"error": None, "group": "parts", "name": "parts",
                  "rows": [{"part": "loss", "seconds": 0.002, "flops": 1e12}]},
        "ceilings": {"group": "ceilings", "name": "ceilings", "error": "took longer than 90 s"},
    }  # fmt: skip
    bar = {"bar": "tensorwise / BF16 ≥ 1.2", "value": 1.25, "passes": True}
    document = {"rows": rows, "spec": SPEC, "machine": "a machine", "verdicts": [bar]}
    text = tables.text_of(document)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "fp8-tensorwise 13,750 55.0 % 50.0 % 45.0 % – 61.2 1.25" in lines
    assert "loss 2.000 500 TFLOP/s –" in lines
    assert "passes tensorwise / BF16 ≥ 1.2: 1.250" in lines
    assert "failed: ceilings: took longer than 90 s" in lines


@pytest.mark.long
def test_the_road_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "precision.py"), "--device", "cpu", "--tiny", "--only", "products", "peers"]
    done = subprocess.run(
        command, env={**os.environ, "OUT": str(tmp_path)}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "say nothing" in done.stdout
    document = json.loads((tmp_path / "precision.json").read_text())
    assert list(document["rows"])[:2] == ["products", "transformers"]
    assert document["rows"]["transformers"]["tokens_per_s"] > 0
