"""Where a value that is not finite came first is what was injected: module, phase, micro-batch, rows, positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quern.train.step.non_finite import _kind
from support.train import non_finite_case as CASE
from support.train.run_case import live, nan_at_5, settings, write_corpus

pytestmark = pytest.mark.slow

FLOAT8 = {"float8": {"recipe": "tensorwise", "delayed": True}, "precision": "bf16"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_corpus(tmp_path_factory.mktemp("data"), {"web": 60})


@pytest.mark.parametrize(
    ("phase", "module", "changes"),
    [
        ("forward", "blocks.1.attention.wv", {}),
        pytest.param("forward", "blocks.0.ffn", {"document_mask": False, "activation_checkpointing": "full"},
                     marks=pytest.mark.long),
        ("backward", "blocks.1.ffn.w2", {}),
        pytest.param("weight gradient", "blocks.0.ffn.w3", {}, marks=pytest.mark.long),
        pytest.param("backward", "blocks.0.attention.wq",
                     {"activation_checkpointing": "selective", "precision": "bf16"}, marks=pytest.mark.long),
        pytest.param("backward", "blocks.1.attention.wo", FLOAT8, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_the_first_module_is_the_one_that_was_spoiled(
    tmp_path: Path, paths: list[str], phase: str, module: str, changes: dict[str, Any]
) -> None:
    left = CASE.train(str(tmp_path), paths, changes, module, phase)
    found = CASE.records(tmp_path)
    assert found
    for record in found.values():
        CASE.check(record, [left["read"]], phase, module)
        kind = "nan" if phase == "forward" else "inf"
        last = record["steps"][-1]
        assert last["not_finite"]["loss"] == "nan" if phase == "forward" else "loss" not in last["not_finite"]
        assert last["sequences_not_finite"] == {
            str(place): kind for place in range(8) if not last["sequences"]["finite"][place]
        }
        assert set(record["not_finite"].values()) <= {"nan", "inf"}
        assert record["not_finite"].keys() == {n for n, v in record["parameters"].items() if v is None}


def test_a_weight_that_is_not_finite_is_named_and_the_step_not_computed_again(tmp_path: Path, paths: list[str]) -> None:
    name = "blocks.1.attention.wk.weight"
    CASE.train(str(tmp_path), paths, {}, name, "weights")
    ((step, record),) = CASE.records(tmp_path).items()
    first = record["first_non_finite"]
    assert step == 3
    assert (first["phase"], first["module"], first["value"], first["redone"]) == ("weights", name, "nan", False)


@pytest.mark.long
def test_a_compiled_step_is_not_computed_again(tmp_path: Path, paths: list[str]) -> None:
    compiled = {"compile": {"enabled": True, "backend": "eager"}}
    CASE.train(str(tmp_path), paths, compiled, "blocks.1.ffn.w1", "forward")
    first = next(iter(CASE.records(tmp_path).values()))["first_non_finite"]
    assert (first["phase"], first["redone"]) == ("none", False)


def test_a_step_that_is_finite_when_computed_again_says_so(tmp_path: Path, paths: list[str]) -> None:
    live(settings(tmp_path, paths, steps=7), factor=nan_at_5)
    (record,) = CASE.records(tmp_path).values()
    first = record["first_non_finite"]
    assert (first["phase"], first["rank"], first["redone"]) == ("none", None, True)
    last = record["steps"][-1]
    assert last["not_finite"] == dict.fromkeys(("grad_norm", *last["layers"]), "nan")


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, FLOAT8])
def test_the_search_changes_no_bit(tmp_path: Path, paths: list[str], changes: dict[str, Any]) -> None:
    on, off = (
        CASE.train(str(tmp_path / name), paths, {**changes, **own}, "blocks.1.ffn.w2", "backward")["state"]
        for name, own in {"on": {}, "off": {"forensics": {"window": 0}}}.items()
    )
    assert CASE.records(tmp_path / "on")
    assert on.keys() == off.keys()
    assert all(torch.equal(on[name], off[name]) for name in on)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_is_called_by_its_name(dtype: torch.dtype) -> None:
    for values, kind in [
        ([1.0, 60000.0, -60000.0], None), ([1.0, float("inf")], "inf"), ([float("-inf"), 2.0], "inf"), ([], None),
        ([float("nan"), 1.0], "nan"), ([float("inf"), float("nan"), float("-inf")], "nan"),
    ]:  # fmt: skip
        assert _kind(torch.tensor(values, dtype=dtype)) == kind
    assert _kind(torch.tensor([1, 2])) is None
