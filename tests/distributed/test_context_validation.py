"""Validation losses of ranks that share sequences are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.train import run_case as CASE

pytestmark = pytest.mark.long
"""That each target counts once is seen in `make test` by the parity of a ring, which validates too."""


def life(run: str, paths: list[str], parallel: dict[str, Any], mask: bool) -> None:
    config = CASE.settings(
        run, paths, precision="fp64", steps=3, micro_batch=2, parallel=parallel, document_mask=mask,
        validation={"interval": 1, "windows": 5},
    )  # fmt: skip
    CASE.live(config)


def validations(run: Path) -> list[dict[str, Any]]:
    return [row for step, row in sorted(CASE.rows(run).items()) if step < 0]


@pytest.mark.parametrize(("method", "mask"), [("ring", True), ("ulysses", False), ("allgather", False)])
def test_validation_counts_every_target_once(kept_ranks: Any, tmp_path: Path, method: str, mask: bool) -> None:
    paths = CASE.write_corpus(tmp_path / "data", {"web": 20, "web.val": 20})[:1]
    life(str(tmp_path / "one"), paths, {}, mask)
    kept_ranks(life, 2, str(tmp_path / "many"), paths, {"cp": 2, "cp_method": method, "dp_shard": 1}, mask)
    one, many = validations(tmp_path / "one"), validations(tmp_path / "many")
    assert len(one) == len(many) == 3
    for row, other in zip(one, many, strict=True):
        assert row["tokens"] == other["tokens"] > 0
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-11)
