"""The GPU benchmark's road, on the CPU: rows, arithmetic and table; the figures themselves need the device."""

from __future__ import annotations

import argparse
import json
import subprocess
from typing import Any

import pytest
import train_step as bench

ROW = {
    "model": "1B", "side": "quern", "checkpointing": "full", "document_mask": False, "micro_batch": 8, "fits": True,
    "tokens_per_s": 30_000.0, "mfu_full": 0.4, "mfu_causal": 0.35, "mfu_full_without_head": 0.3,
    "mfu_causal_without_head": 0.25, "memory_gib": 101.25,
}  # fmt: skip


def test_a_line_says_what_was_measured():
    text = " ".join(bench.line(ROW, 20_000.0).split())
    assert text == "1B quern full no 8 30,000 40.0 % 35.0 % 30.0 % 25.0 % 101.2 1.50"
    assert not bench.line({**ROW, "side": "transformers"}, 20_000.0).endswith("1.50")
    assert not bench.line({**ROW, "document_mask": True}, 20_000.0).endswith("1.50")  # less work: no fair ratio
    assert bench.line({**ROW, "fits": False}, None).endswith("does not fit")
    assert "failed" in bench.line({**ROW, "fits": False, "failed": 1}, None)
    assert "– " in bench.line({**ROW, "mfu_full": None}, None)


def test_the_first_micro_batch_that_fits_is_taken(monkeypatch):
    tried = []

    def child(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        case = json.loads(command[-1])
        tried.append(case["micro_batch"])
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps({**case, "fits": case["micro_batch"] <= 4}))

    monkeypatch.setattr(bench.subprocess, "run", child)
    peer = {"model": "1B", "side": "transformers"}
    assert bench.measure(peer, [16, 8, 4, 2])["micro_batch"] == 4
    assert tried == [16, 8, 4]
    assert not bench.measure(peer, [16, 8])["fits"]


def test_models_have_the_published_sizes():
    """Llama 3.2 1B (tied) and Llama 3.1 8B; the 8B-wide one differs from the latter by its layers alone."""
    from quern.model.config import ModelConfig

    def shape(model: str, layers: int) -> Any:
        section, vocab_size = bench.model_section({"model": model, "layers": layers})
        return ModelConfig.model_validate(section).shape(vocab_size)

    assert shape("1B", 16).num_parameters == 1_235_814_400
    assert shape("8B-width", 32).num_parameters == 8_030_261_248
    assert shape("8B-width", 8).num_layers == 8
    assert shape("8B-width", 8).dim == 4096


def test_every_model_meets_its_peer():
    args = argparse.Namespace(
        models=["1B", "8B-width"], layers=8, seq_len=4096, checkpointing=["none", "selective"], steps=2, accumulate=2,
        device="cpu", backend="eager", peak_tflops=None,
    )  # fmt: skip
    rows = bench.rows_of(args)
    seen = [(row["model"], row["side"], row["checkpointing"], row["document_mask"]) for row in rows]
    assert len(set(seen)) == len(seen) == 10
    assert [row for row in seen if row[1] == "transformers"] == [
        (model, "transformers", "none", False) for model in ("1B", "8B-width")
    ]


@pytest.mark.long
@pytest.mark.parametrize("side", ["quern", "transformers"])
def test_a_row_runs_end_to_end(side):
    case = {
        "model": "tiny", "side": side, "checkpointing": "full", "document_mask": side == "quern", "seq_len": 32,
        "steps": 2, "accumulate": 2, "device": "cpu", "backend": "eager", "layers": 1, "peak_tflops": 0.5,
        "micro_batch": 2,
    }  # fmt: skip
    row = bench.measure({**case}, [2])
    assert row["fits"], row
    assert row["last_loss"] == pytest.approx(8.32, abs=0.15)  # ln 4096: it trains the model it says, from noise
    assert len(row["step_times_s"]) == 2
    assert row["tokens_per_s"] == pytest.approx(2 * 2 * 32 / (sum(row["step_times_s"]) / 2))
    # by hand: q, o 64 × 64, k, v 64 × 32, three of 64 × 128, two norms, one layer; the tied head 64 × 4096
    block = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    bare = 6 * block + 12 * 2 * 32 * 32
    assert row["mfu_full_without_head"] == pytest.approx(row["tokens_per_s"] * bare / 0.5e12)
    assert row["mfu_full"] == pytest.approx(row["tokens_per_s"] * (bare + 6 * 64 * 4096) / 0.5e12)
    said = " ".join(bench.line(row, row["tokens_per_s"]).split())
    assert said.startswith(f"tiny {side} full {'yes' if side == 'quern' else 'no'} 2 ")
