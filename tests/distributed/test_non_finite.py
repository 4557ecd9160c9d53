"""The rank whose sequences are not finite first is named, where gradients are summed over ranks and split over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.train import non_finite_case as CASE
from support.train.run_case import write_corpus

pytestmark = pytest.mark.slow

DDP = {"dp_replicate": 2, "dp_shard": 1}
CP = {"cp": 2, "cp_method": "ring", "dp_shard": 1}
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "DDP, forward": (DDP, "forward", "blocks.1.ffn.w2"),
    "DDP, weight gradient": (DDP, "weight gradient", "blocks.0.ffn.w3"),
    "CP, forward": (CP, "forward", "blocks.1.ffn.w2"),
}
LATER = {
    "FSDP2, backward": ({"dp_shard": 2}, "backward", "blocks.0.attention.wo"),
    "CP, backward": (CP, "backward", "blocks.1.ffn.w1"),
    "DDP, backward": (DDP, "backward", "blocks.1.ffn.w1"),
    "FSDP2, forward": ({"dp_shard": 2}, "forward", "blocks.1.attention_norm"),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_corpus(tmp_path_factory.mktemp("data"), {"web": 60})


def life(
    run: str, paths: list[str], parallel: dict[str, int], name: str | None, phase: str, more: dict[str, Any]
) -> dict[str, Any]:
    return CASE.train(run, paths, {"parallel": parallel, "micro_batch": 1, **more}, name, phase)


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.long) for name in LATER)])
def test_the_first_rank_and_module_are_those_that_were_spoiled(
    kept_ranks: Any, paths: list[str], tmp_path: Path, name: str
) -> None:
    parallel, phase, module = (CASES | LATER)[name]
    more = {"micro_batch": 4} if parallel is CP else {}  # two of them a step, of several rows each
    left = kept_ranks(life, 2, str(tmp_path), paths, parallel, module, phase, more)
    found = CASE.records(tmp_path)
    assert found
    for record in found.values():
        CASE.check(record, [own["read"] for own in left], phase, module)


def test_the_search_changes_no_bit(kept_ranks: Any, paths: list[str], tmp_path: Path) -> None:
    on, off = (
        kept_ranks(life, 2, str(tmp_path / name), paths, DDP, "blocks.1.ffn.w2", "backward", changes)
        for name, changes in {"on": {}, "off": {"forensics": {"window": 0}}}.items()
    )
    assert CASE.records(tmp_path / "on")
    for with_it, without in zip(on, off, strict=True):
        assert all(torch.equal(with_it["state"][name], without["state"][name]) for name in without["state"])


@pytest.mark.parametrize(
    ("parallel", "phase"),
    [(DDP, "weights"), *(pytest.param(own, "weights", marks=pytest.mark.long) for own in ({"tp": 2}, {"pp": 2}))],
    ids=["DDP", "TP", "PP"],
)
def test_a_weight_that_is_not_finite_is_named(
    kept_ranks: Any, paths: list[str], tmp_path: Path, parallel: dict[str, int], phase: str
) -> None:
    name = "blocks.0.ffn_norm.weight"
    kept_ranks(life, 2, str(tmp_path), paths, {"dp_shard": 1, **parallel}, name, phase, {})
    first = CASE.records(tmp_path)[3]["first_non_finite"]
    assert (first["phase"], first["module"], first["value"], first["rank"]) == ("weights", name, "nan", 0)


@pytest.mark.long
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_where_tensors_are_split_the_module_is_named(
    kept_ranks: Any, paths: list[str], tmp_path: Path, phase: str
) -> None:
    left = kept_ranks(life, 2, str(tmp_path), paths, {"tp": 2, "dp_shard": 1}, "blocks.1.ffn", phase, {})
    for step, record in CASE.records(tmp_path).items():
        first, expected = record["first_non_finite"], CASE.truth([left[0]["read"]], step)
        assert (first["phase"], first["module"]) == (phase, "blocks.1.ffn")
        assert first["micro_batch"] == expected["micro_batch"]
        assert first["sequences"] == []  # a rank has a part of the sequence


@pytest.mark.long
def test_in_a_pipeline_nothing_is_computed_again(kept_ranks: Any, paths: list[str], tmp_path: Path) -> None:
    kept_ranks(life, 2, str(tmp_path), paths, {"pp": 2, "dp_shard": 1}, None, "gradients", {})
    first = CASE.records(tmp_path)[2]["first_non_finite"]
    assert (first["phase"], first["redone"]) == ("none", False)
