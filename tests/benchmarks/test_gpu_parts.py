"""What the GPU suite measures, on the CPU: its oracles find faults, and FLOPs and bytes are what they are."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import runner
import suite
import torch
from parts import SkipError, attention, casts, float8, loss, optimizer, products, suspicions, syncs, train, weights
from parts.common import shape_of
from torch.utils.flop_counter import FlopCounterMode

from quern.model.float8.linear import Kept

BASE = {"model": {"preset": "debug", "num_layers": 1}, "vocab_size": 500, "device": "cpu", "backend": "eager"}
SHAPE = shape_of(BASE)  # dim 256, ffn 768, 4 heads of 64, 2 for keys; 512 rows of a vocabulary of 500


def test_dense_attention_is_attention_by_the_book() -> None:
    rows = [[1, 3], [2, 2]]
    allowed = attention.allowed_of(rows, torch.device("cpu"))
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 4, 3).double(), torch.randn(2, 4, 2, 3).double(), torch.randn(2, 4, 2, 3).double()
    out = attention.dense(q, k, v, allowed)
    for number, lengths in enumerate(rows):
        documents = [name for name, size in enumerate(lengths) for _ in range(size)]
        for head in range(4):
            for at in range(4):
                seen = [other for other in range(at + 1) if documents[other] == documents[at]]
                weights = [
                    math.exp(sum(q[number, at, head, i] * k[number, other, head // 2, i] for i in range(3)) / 3**0.5)
                    for other in seen
                ]
                for i in range(3):
                    expected = sum(
                        weight * v[number, other, head // 2, i] for weight, other in zip(weights, seen, strict=True)
                    ) / sum(weights)
                    assert out[number, at, head, i].item() == pytest.approx(float(expected), rel=1e-12)
    ids = attention.documents_of(rows, torch.device("cpu"))
    assert ids.ids_BL.tolist() == [[0, 1, 1, 1], [0, 0, 1, 1]]
    assert ids.cu_seqlens.tolist() == [0, 1, 4, 6, 8]
    assert ids.max_seqlen == 3


def test_attention_that_is_wrong_is_found() -> None:
    spec = {**BASE, "batch": 2, "length": 40, "backend": "sdpa", "dtype": "float64"}
    rows = attention.agreement(spec)
    assert [(row["documents"], row["of"]) for row in rows] == [
        (masked, name) for masked in (True, False) for name in attention.NAMES
    ]
    assert all(row["passes"] for row in rows)
    right = attention.attend
    with patch.object(attention, "attend", lambda q, k, v, mask: right(q, k, v, None)):
        rows = attention.agreement(spec)
    assert [row["passes"] for row in rows] == [False] * 4 + [True] * 4
    assert rows[0]["greatest difference"] > 0.1


@pytest.mark.parametrize(("name", "module"), [("FA3", "flash_attn_interface"), ("FA4", "flash_attn")])
def test_flash_attention_that_is_not_installed_is_no_failure(name: str, module: str) -> None:
    spec = {**BASE, "batch": 2, "length": 40, "backend": "sdpa", "dtype": "float64", "flash": name}
    with patch.dict(sys.modules, {module: None}), pytest.raises(SkipError, match=f"^not installed: .*{module}"):
        attention.agreement(spec)


def test_flash_attention_is_on_for_its_rows_alone() -> None:
    spec = {**BASE, "batch": 2, "length": 40, "backend": "sdpa", "dtype": "float64", "flash": "FA3"}
    calls: list[str | None] = []
    right = attention.attend

    def attend(*args: Any) -> torch.Tensor:
        calls.append("attend")
        return right(*args)

    with patch.object(attention, "set_flash_attention", calls.append), patch.object(attention, "attend", attend):
        rows = attention.agreement(spec)
    assert calls == ["FA3", "attend", "attend", None]
    assert {row["backend"] for row in rows} == {"FA3"}
    assert all(row["passes"] for row in rows)
    with patch.object(attention, "set_flash_attention", calls.append), pytest.raises(KeyError):
        attention.agreement({**BASE, "flash": "FA4"})
    assert calls[-2:] == ["FA4", None]


@pytest.mark.slow
def test_products_are_judged() -> None:
    for scaling in ("tensorwise", "rowwise", "blockwise"):
        spec = {**BASE, "scaling": scaling, "tokens": 128}
        rows = float8.products(spec)
        assert len(rows) == 2 * 2 * 3
        assert all(row["passes"] for row in rows)
        assert all(row["to emulation"] == 0 for row in rows if not row["kernel"])

    def wrong(a_MS: Any, b_NS: Any, dtype: torch.dtype, *, fast: bool = False) -> torch.Tensor:
        return float8.emulated(a_MS, b_NS, dtype) * 1.02

    with patch.object(float8.linear, "multiply", wrong):
        rows = float8.products(spec)
    assert not any(row["passes"] for row in rows)
    assert rows[0]["to emulation"] == pytest.approx(0.02, rel=0.1)


def test_a_loss_that_is_wrong_is_found() -> None:
    spec = {**BASE, "tokens": 96, "chunk": 40, "backend": None}
    rows = loss.right(spec)
    assert len(rows) == 6
    assert all(row["passes"] for row in rows)
    right = loss.chunked_cross_entropy
    with patch.object(loss, "IGNORE", 3):  # targets that count for one side alone
        assert not any(row["passes"] for row in loss.right(spec))
    with patch.object(loss, "chunked_cross_entropy", lambda *args, **how: (right(*args, **how)[0] * 1.05, None)):
        assert not any(row["passes"] for row in loss.right(spec))


def test_flops_and_bytes_of_the_loss() -> None:
    spec = {**BASE, "tokens": 96, "chunk": 48, "backend": None}
    with patch.object(loss, "seconds_of", lambda call, device: call() and 1.0):
        rows = loss.speed(spec)
    with FlopCounterMode(display=False) as counter:
        loss.both(SHAPE, 48, *loss.inputs(SHAPE, 96, torch.device("cpu")), None)
    assert [row["TFLOP/s"] * 1e12 for row in rows] == [pytest.approx(counter.get_total_flops())] * 2
    # by hand, two chunks: 96 × 512 logits six times, 512 × 256 weights and gradients, 96 × 256 hidden
    bytes_ = 96 * 512 * 12 + 512 * 256 * (4 + 2 + 2 * 2 + 2 * 2) + 512 * 256 * (4 + 16 + 8) + 96 * 256 * 10
    assert rows[0]["GB at least"] * 1e9 == pytest.approx(bytes_)
    assert rows[0]["GB/s"] * 1e9 == pytest.approx(bytes_)


def test_flops_of_attention() -> None:
    spec = {**BASE, "batch": 2, "length": 64, "document": 24}
    with patch.object(attention, "seconds_of", lambda call, device: call() and 1.0):
        rows = attention.speed(spec)
    # by hand: 2 sequences, 4 heads of 64; QKᵀ and PV of half of 64², and backward five such products
    whole = 7 * 2 * (2 * 4 * 64) * (64 * 64 / 2)
    assert rows[0]["TFLOP/s"] * 1e12 == pytest.approx(whole)
    assert rows[1]["TFLOP/s"] * 1e12 == pytest.approx(whole * (24**2 + 24**2 + 16**2) / 64**2)


@pytest.mark.parametrize("bf16", [False, True])
def test_an_update_that_is_wrong_is_found(bf16: bool) -> None:
    spec = {**BASE, "blocks": 1, "clip": 1.0, "bf16": bf16}
    rows = optimizer.right(spec)
    assert [row["passes"] for row in rows] == [True] * 4
    right = optimizer.step
    with patch.object(optimizer, "step", lambda adamw, lr, *rest: right(adamw, lr * 1.001, *rest)):
        assert [row["passes"] for row in optimizer.right(spec)] == [False, False, True, True]
    with patch.object(optimizer, "step", lambda adamw, lr, *rest: right(adamw, lr)):  # without the clipping
        assert [row["passes"] for row in optimizer.right(spec)] == [False, False, False, True]


def test_bytes_of_the_optimizer_and_of_casts() -> None:
    with patch.object(optimizer, "seconds_of", lambda call, device: (call() and None) or 1.0):
        rows = optimizer.adamw({**BASE, "blocks": 2})
    count = 2 * SHAPE.num_block_parameters
    # in float32: weight, gradient, two moments read, three of them written; clipped gradients are written too
    found = [round(row["GB/s"] * 1e9) for row in rows]
    assert found == [28 * count, 32 * count, 4 * count]
    with patch.object(optimizer, "seconds_of", lambda call, device: (call() and None) or 1.0):
        rows = optimizer.adamw({**BASE, "blocks": 2, "bf16": True})
    assert [round(row["GB/s"] * 1e9) for row in rows] == [
        18 * count,
        18 * count,
        2 * count,
    ]  # 8 of weights, 8 of moments
    assert rows[0]["what"] == "AdamW, BF16"
    with (
        patch.object(casts, "seconds_of", lambda call, device: call() and 1.0),
        patch.object(torch, "compile", lambda function, backend: function),
    ):
        rows = casts.casts({**BASE, "tokens": 128})
    assert [row["GB/s"] * 1e9 / (128 * 256) for row in rows] == [pytest.approx(x) for x in (5, 3, 3, 3)]
    assert all(row["differs"] == 0 for row in rows)


def test_products_of_a_block_are_all_there() -> None:
    sizes = products.sizes(shape_of({"model": {"preset": "llama3-8b"}, "vocab_size": 128_256}), 8192)
    assert sizes["wk, wv"] == (8192, 1024, 4096)
    assert sizes["w2"] == (8192, 4096, 14_336)
    assert sizes["dW of w1, w3"] == (14_336, 4096, 8192)
    weights = sum(len(name.split(", ")) * n * k for name, (_, n, k) in sizes.items() if name[0] == "w")
    assert weights == 218_103_808  # a layer of Llama 3.1 8B without its norms


@pytest.mark.long
def test_an_amax_that_differs_is_found() -> None:
    rows = suspicions.amaxes({**BASE, "length": 32})
    assert len(rows) == 7 * 3 + 1
    assert all(row["passes"] for row in rows[:-1])
    assert rows[-1]["relative"] == 0
    compiles = torch.compile

    def apart(block: Any, backend: str) -> Any:
        block.ffn.w1.weight.data.mul_(2)
        return compiles(block, backend=backend)

    with patch.object(torch, "compile", apart):
        rows = suspicions.amaxes({**BASE, "length": 32})
    wrong = {(row["layer"], row["what"]) for row in rows[:-1] if not row["passes"]}
    assert ("ffn.w1", "amax of weight") in wrong
    assert not any(layer.startswith("attention") and what != "amax of gradient" for layer, what in wrong)


def test_suspicions_of_products_and_of_nan() -> None:
    with patch.object(suspicions, "seconds_of", lambda call, device: 1.0):
        rows = suspicions.reduction({**BASE, "tokens": [256]})
    assert [row["sums in BF16"] for row in rows] == [False, True] * 2
    assert all(0 < row["to float64"] < suspicions.ROUNDED_ONCE for row in rows)
    assert [row["passes"] for row in rows] == [True, None] * 2
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    found = {row["kernel"]: row["finite"] for row in suspicions.cudnn({**BASE, "lengths": [40]})}
    assert found["MATH"] is found["its own choice"] is True
    right = suspicions.attend
    with patch.object(suspicions, "attend", lambda q, k, v, mask: right(q, k, v, mask) * q.new_tensor(math.nan)):
        assert not any(row["finite"] for row in suspicions.cudnn({**BASE, "lengths": [40]}))


def test_waits_are_counted_where_they_happen() -> None:
    said = "called a synchronizing CUDA operation"
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        with syncs.watched(cuda=False) as places:
            for _ in range(2):
                warnings.warn(said, UserWarning, stacklevel=1)
            # torch's own words when the mode is switched on
            warnings.warn("does not yet detect all synchronizing operations", UserWarning, stacklevel=1)
    assert places == {"outside of quern": 2}
    assert not others
    with patch.object(syncs, "ROOT", Path(__file__).resolve().parent / "elsewhere"):
        assert syncs.place() == "outside of quern"


def test_models_have_the_published_sizes() -> None:
    """Llama 3.2 1B (tied) and Llama 3.1 8B; the 8B-wide one differs from the latter by its layers alone."""
    from quern.model.config import ModelConfig

    def shape(model: str, layers: int | None) -> Any:
        section, vocab_size = train.section_of({"model": model, "layers": layers})
        return ModelConfig.model_validate(section).shape(vocab_size)

    assert shape("1B", None).num_parameters == 1_235_814_400
    assert shape("8B-width", 32).num_parameters == 8_030_261_248
    assert (shape("8B-width", 8).num_layers, shape("8B-width", 8).dim) == (8, 4096)


TINY = {
    "model": "tiny", "layers": 1, "checkpointing": "full", "precision": "bf16", "documents": False, "seq_len": 32,
    "micro_batches": [2], "accumulate": 2, "steps": 2, "warm_up": 3, "device": "cpu", "backend": "eager",
    "peak_tflops": 0.5, "weights_cast": "per_use",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("side", ["quern", "transformers"])
def test_a_row_of_training_is_what_it_says(side: str) -> None:
    (row,) = getattr(train, side)({**TINY, "documents": side == "quern"})
    assert row["last loss"] == pytest.approx(8.32, abs=0.15)  # ln 4096: it trains the model it says, from noise
    assert row["tokens/s"] == pytest.approx(2 * 2 * 32 / row["step s"])
    # by hand: q, o 64 × 64, k, v 64 × 32, three of 64 × 128, two norms, one layer; the tied head 64 × 4096
    bare = 6 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 12 * 2 * 32 * 32
    assert row["no head %"] == pytest.approx(100 * row["tokens/s"] * bare / 0.5e12)
    assert row["MFU %"] == pytest.approx(100 * row["tokens/s"] * (bare + 6 * 64 * 4096) / 0.5e12)
    assert (row["side"], row["micro-batch"], row["checkpointing"]) == (side, 2, "full")


def test_the_peers_first_micro_batch_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def peer(spec: dict[str, Any], micro_batch: int) -> dict[str, Any]:
        tried.append(micro_batch)
        if micro_batch > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {}

    monkeypatch.setattr(train, "peer", peer)
    monkeypatch.setattr(train, "line", lambda spec, side, micro_batch, found: {"micro-batch": micro_batch})
    assert train.transformers({**TINY, "micro_batches": [16, 8, 4, 2]}) == [{"micro-batch": 4}]
    assert tried == [16, 8, 4]
    with pytest.raises(torch.OutOfMemoryError):
        train.transformers({**TINY, "micro_batches": [16, 8]})
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find(name))
    with pytest.raises(SkipError, match="torchao is not installed"):
        train.transformers({**TINY, "precision": "fp8-rowwise"})


@pytest.mark.long
def test_a_part_runs_from_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(runner, "ask", lambda device: {"device": "CPU", "torch": torch.__version__})
    assert suite.main(["--device", "cpu", "--small", "--part", "optimizer", "--out", str(tmp_path)]) == 0
    (place,) = tmp_path.glob("*/optimizer/beside-float64.json")
    assert [row["passes"] for row in json.loads(place.read_text())["measures"]] == [True] * 4
    assert "### optimizer" in capsys.readouterr().out


@pytest.mark.parametrize("scaling", [pytest.param(None, marks=pytest.mark.long), "tensorwise"])
def test_kept_weights_and_added_gradients_are_looked_at(scaling: str | None) -> None:
    spec = {**BASE, "backend": None, "length": 48, "bound": 0.02, "scaling": scaling}
    with patch.object(weights, "seconds_of", lambda call, device: call() or 1.0):
        (kept,) = weights.refresh(spec)
        assert kept["passes"]
        assert kept["bytes a number"] == pytest.approx(2, rel=1e-3)  # BF16, or two factors in FP8; and scales
        assert [row["passes"] for row in weights.gradients(spec)] == [True, True]
        with patch.object(Kept, "add_grad_weight", lambda *_: None):
            assert [row["passes"] for row in weights.gradients(spec)] == [False, False]
