"""All ranks know the same of data that are left out, also where the order changes as the run goes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quern.train.history.ledger import Ledger
from support.train import run_case as case


def known(run: str, paths: list[str], changes: dict[str, Any]) -> tuple[str, int, list[int], list[int]]:
    from quern.train.processes.ranks import open_ranks
    from quern.train.setup import open_trainer

    with open_ranks("cpu") as ranks, open_trainer(case.settings(run, paths, **changes), ranks) as trainer:
        start = trainer.start
        return start.kind, start.step, sorted(start.left_out), [*start.spikes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phases", "left_out"),
    [([], [5, 7]), pytest.param([{"first_step": 6, "weights": [1, 1]}], [5], marks=pytest.mark.long)],
)
def test_all_ranks_leave_out_the_same(
    kept_ranks: Any, tmp_path: Path, phases: list[dict[str, Any]], left_out: list[int]
) -> None:
    """From data step 6 on the second order has other samples, so that its step 7 is another one."""
    paths = case.write_corpus(tmp_path / "data")
    changes = {"checkpoint": {"interval": 2, "keep_last": 20, "mode": "sync"}, "micro_batch": 1}
    case.live(case.settings(tmp_path / "run", paths, **changes))
    with Ledger(tmp_path / "run" / "ledger.jsonl") as ledger:
        order = next(entry["order"] for entry in ledger.entries if entry["kind"] == "start")
        for step in (3, 8):
            ledger.append("spike", step=step, data_step=step)
        ledger.append("back", step=8, reason="spike", before=7, leave_out=[5, 7], good=False, order=order)
    found = kept_ranks(known, 2, str(tmp_path / "run"), paths, {**changes, "phases": phases})
    assert found == [("rollback", 6, left_out, [3])] * 2
