"""What the demo prints of a document's life."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from quern.cli.demo.lineage import _print_exposure


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([3, 1200], "read at    3, 1,200 of 2,000 steps"),
        ([1, 2, 3, 4, 5, 6], "read at    1, 2, 3, 4, 5, 6 of 2,000 steps"),
        ([*range(1, 9)], "read at    1, 2, 3, 4, 5, 6 and 2 more of 2,000 steps"),
    ],
)
def test_steps_that_read_a_document_are_told_up_to_six(steps: list[int], expected: str) -> None:
    out = io.StringIO()
    verdict = SimpleNamespace(seen=[(SimpleNamespace(step=1300), None)], last=SimpleNamespace(step=900))
    _print_exposure(Console(file=out, width=200), steps, verdict, 2000)
    assert [line.strip() for line in out.getvalue().splitlines() if line] == [
        expected, "seen by    the checkpoints of steps 1,300", "last clean step 900",
    ]  # fmt: skip
