"""The steps that SQL sees, beside the history that was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quern.errors import InputError
from quern.lineage.sql.query import query
from quern.mixtures.order import Order, Phase
from quern.train.history.ledger import Ledger
from support.lineage.runs import Listing, write_listing

ARGUMENTS: dict[str, Any] = {"seed": 3, "documents": 400, "files": 3}


def consumer(folder: Path | str) -> str:
    """The line that a start of the training run in ``folder`` leaves with its data run."""
    return json.dumps({"time": "2024-01-01", "train_run": str(folder), "order": "0", "identities": []}) + "\n"


def train(folder: Path, order: Order, run: Path) -> None:
    """A run of 30 steps, in three attempts: a rollback left ten steps behind, a resume three."""
    folder.mkdir()
    with Ledger(folder / "ledger.jsonl") as ledger:
        ledger.move("start", 0, 0, order, document_mask=True)
        ledger.append("skipped", step=4, data_step=4, reason="non-finite")
        ledger.append("skipped", step=18, data_step=18, reason="non-finite")
        ledger.append("checkpoint", step=20, data_step=20, name="step_00000020")
        ledger.move("rollback", 10, 20, order, document_mask=True)
        ledger.append("skipped", step=18, data_step=28, reason="spike")
        ledger.append("checkpoint", step=25, data_step=35, name="step_00000025")
        ledger.move("resume", 22, 32, order, document_mask=True)
        ledger.append("end", step=30, data_step=40)
    with open(run / "consumers.jsonl", "a") as file:
        file.write(consumer(folder))


EXPECTED_ATTEMPTS = ((0, 20, 0, 10), (10, 25, 20, 22), (22, 30, 32, 30))
"""(first step, stop, first data step, steps below this survive) of :func:`train`."""
SKIPPED = ({4, 18}, {18}, set[int]())


def expected_steps(folder: Path, order: Order) -> set[tuple[Any, ...]]:
    return {
        (
            str(folder), attempt, step, data_step, order.first_sample(data_step), order.global_batch_at(data_step),
            step not in SKIPPED[attempt], step < survives,
        )
        for attempt, (first, stop, data, survives) in enumerate(EXPECTED_ATTEMPTS)
        for step in range(first, stop)
        for data_step in [data + step - first]
    }  # fmt: skip


@pytest.fixture
def order() -> Order:
    phases = [Phase(7, global_batch=8), Phase(33, weights=(0, 1), global_batch=16)]
    return Order([1, 2], [1000, 3000], 5, phases, ids=["r/web/1", "r/text/1"], seq_len=16, global_batch=4, block=4)


COLUMNS = "train_run, attempt, step, data_step, first_sample, global_batch, applied, surviving"


def test_steps_are_those_of_every_registered_run(tmp_path: Path, found: Listing, order: Order) -> None:
    write_listing(tmp_path / "run", found, identity="x")
    for name in ("one", "two"):
        train(tmp_path / name, order, tmp_path / "run")
    with open(tmp_path / "run" / "consumers.jsonl", "a") as file:
        file.write(consumer(tmp_path / "one"))  # started again
        file.write(consumer(tmp_path / "gone"))
        file.write('{"train_run": "/to')
    notes: list[str] = []
    result = query(str(tmp_path / "run"), f"SELECT {COLUMNS} FROM steps", note=notes.append)
    expected = expected_steps(tmp_path / "one", order) | expected_steps(tmp_path / "two", order)
    assert set(result.rows) == expected
    assert len(result.rows) == len(expected) == 2 * (20 + 15 + 8)
    assert [str(tmp_path / "gone") in note for note in notes] == [True]


def test_a_training_run_has_its_own_steps_and_nothing_else(tmp_path: Path, order: Order) -> None:
    train(tmp_path / "train", order, tmp_path)
    run = str(tmp_path / "train")
    assert set(query(run, f"SELECT {COLUMNS} FROM steps").rows) == expected_steps(tmp_path / "train", order)
    (total,) = query(run, "SELECT sum(global_batch) FROM steps WHERE surviving AND applied").rows[0]
    assert total == sum(row[5] for row in expected_steps(tmp_path / "train", order) if row[6] and row[7])
    with pytest.raises(InputError, match="there is no view 'verdicts'; expected steps"):
        query(run, "FROM verdicts")


def test_ledgers_are_read_only_when_the_query_asks_for_steps(tmp_path: Path, found: Listing) -> None:
    write_listing(tmp_path, found, identity="x")
    (tmp_path / "consumers.jsonl").write_text(consumer("/gone"))
    notes: list[str] = []
    query(str(tmp_path), "FROM spans", note=notes.append)
    assert notes == []
    assert query(str(tmp_path), "WITH s AS (FROM Steps) SELECT * FROM s", note=notes.append).rows == []
    assert len(notes) == 1
