"""The table of the GPU suite: a state of the sources a section, ratios to peers and limits, what failed."""

from __future__ import annotations

from typing import Any

import tables


def result(part: str, row: str, *measures: dict[str, Any], code: str = "abc", **more: Any) -> dict[str, Any]:
    machine = {"device": "NVIDIA H100", "torch": "2.11.0+cu130", "SMs": 132}
    return {"part": part, "row": row, "measures": list(measures), "error": None, "skipped": None, "machine": machine,
            "code": code, "small": False, **more}  # fmt: skip


def trained(row: str, side: str, speed: float, **more: Any) -> dict[str, Any]:
    base = {"model": "8B-width", "side": side, "precision": "bf16", "checkpointing": "none", "documents": False,
            "tokens/s": speed, "MFU %": 0.002 * speed}  # fmt: skip
    return result("train", row, {**base, **more})


def lines_of(text: str) -> list[str]:
    return text.splitlines()


def test_numbers_have_three_digits() -> None:
    values = (12_345.6, 99.44, 0.01234, 0.0001234, 0.0, -250.4, 1.0)
    assert [tables.digits(value) for value in values] == ["12,346", "99.4", "0.0123", "1.2e-04", "0", "-250", "1"]


def test_a_part_is_a_table_with_shares_of_the_limits() -> None:
    text = tables.text_of([
        result("products", "copy", {"what": "bytes", "GB/s": 2000.0}),
        result("products", "alone", {"what": "w1", "BF16 TFLOP/s": 600.0}, {"what": "w2", "BF16 TFLOP/s": 800.0}),
        result("loss", "alone", {"what": "eager", "ms": 2.0, "TFLOP/s": 400.0, "GB/s": 500.0}),
        result("float8", "rowwise", {"kernel": True, "error": 0.5, "passes": False}, error="1 of 1 | beyond"),
    ])  # fmt: skip
    lines = lines_of(text)
    assert lines[0] == "## NVIDIA H100, abc"
    assert "torch 2.11.0+cu130, SMs 132" in lines
    assert "| row | what | ms | TFLOP/s | GB/s | % of the best product | % of a copy |" in lines
    assert "|---|---|---:|---:|---:|---:|---:|" in lines
    assert "| alone | eager | 2 | 400 | 500 | 50 | 25 |" in lines
    assert "| alone | w2 | – | 800 |" in lines or "| alone | w2 | 800 |" in " ".join(lines)
    assert "| rowwise | yes | 0.5 | no |" in lines
    assert "| float8 | rowwise | failed | 1 of 1 \\| beyond |" in lines
    assert not any("of the best product" in line for line in lines if "BF16 TFLOP/s" in line)


def test_the_trainer_stands_beside_its_peers() -> None:
    text = tables.text_of([
        trained("bf16", "quern", 26_000.0),
        trained("fp8-tensorwise", "quern", 30_000.0, precision="fp8-tensorwise"),
        trained("bf16, documents", "quern", 29_000.0, documents=True),
        trained("transformers", "transformers", 20_000.0),
        trained("transformers, full", "transformers", 10_000.0, checkpointing="full"),
        trained("transformers, torchao rowwise", "transformers", 25_000.0, precision="fp8-rowwise"),
        trained("1B, bf16", "quern", 90_000.0, model="1B"),
    ])  # fmt: skip
    ends = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[-2:] for line in lines_of(text) if "| " in line}
    assert ends["bf16"] == ["1", "1.3 |"]
    assert ends["fp8-tensorwise"] == ["1.15", "1.5 |"]
    assert ends["bf16, documents"] == ["–", "– |"]  # less work: no fair ratio
    assert ends["transformers"] == ["–", "– |"]
    assert ends["1B, bf16"] == ["1", "– |"]
    assert "BF16 MFU ≥ 50 % (aim 57.8 %): 52.0 %, reached" in lines_of(text)
    assert "tensorwise / BF16 ≥ 1.2: 1.15, MISSED" in lines_of(text)


def test_planned_memory_is_judged_over_all_configs() -> None:
    ratios = {"plain": 1.04, "full": 0.96, "eager": 1.2}
    text = tables.text_of(result("memory", name, {"planned / seen": ratio}) for name, ratio in ratios.items())
    assert "planned memory, median error ≤ 5 %: 4.0 %, reached" in lines_of(text)
    assert "planned memory, most optimistic ≤ 3 %: 4.0 %, MISSED" in lines_of(text)


def test_states_of_the_sources_do_not_mix() -> None:
    text = tables.text_of([
        trained("bf16", "quern", 26_000.0), trained("transformers", "transformers", 20_000.0),
        result("train", "bf16", code="def", error="torch.OutOfMemoryError: CUDA out of memory"),
        result("attention", "flex", code="def", skipped="needs CUDA"),
    ])  # fmt: skip
    first, second = text.split("## NVIDIA H100, def")
    assert "OutOfMemory" not in first
    assert "26,000" not in second
    assert "| train | bf16 | failed | torch.OutOfMemoryError: CUDA out of memory |" in second
    assert "| attention | flex | skipped | needs CUDA |" in second
    assert tables.text_of([]).strip() == ""
