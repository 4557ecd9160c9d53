"""A forward and a backward in turns: while tokens of one travel, the other is computed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from quern.parallel.experts import all_to_all, turns
from quern.parallel.experts.turns import BACKWARD, FORWARD, in_turns, pass_on
from quern.parallel.planning.schedules import why_no_split_backward
from quern.train.parity.corpus import write_corpus
from quern.train.parity.matrix import Case
from quern.train.parity.run import train


def piece(own: int, name: str, told: list[str], times: int) -> Any:
    def work() -> None:
        for number in range(times):
            told.append(f"{name}{number}")
            pass_on(own)
        told.append(f"{name} ends")

    return work


@pytest.mark.parametrize(("forwards", "backwards"), [(2, 2), (0, 3), (3, 0), (4, 1), (1, 4)])
def test_each_goes_on_while_rows_of_the_other_travel(forwards: int, backwards: int) -> None:
    told: list[str] = []
    threads = threading.active_count()
    in_turns(piece(FORWARD, "f", told, forwards), piece(BACKWARD, "b", told, backwards))
    forward = [*(f"f{number}" for number in range(forwards)), "f ends"]
    backward = [*(f"b{number}" for number in range(backwards)), "b ends"]
    expected = []
    while forward or backward:
        expected += forward[:1] + backward[:1]
        forward, backward = forward[1:], backward[1:]
    assert told == expected
    assert threading.active_count() == threads
    pass_on(FORWARD)  # alone again: it waits for nobody


@pytest.mark.parametrize("who", [FORWARD, BACKWARD])
def test_an_error_comes_after_the_end_of_both(who: int) -> None:
    told: list[str] = []

    def fails() -> None:
        pass_on(who)
        raise ValueError("of one")

    pieces = [piece(FORWARD, "f", told, 3), piece(BACKWARD, "b", told, 3)]
    pieces[who] = fails
    with pytest.raises(ValueError, match="of one"):
        in_turns(*pieces)
    assert told[-1] == ("b ends" if who == FORWARD else "f ends")
    assert turns._turns is None


def turns_of(case: Case, data: str, folder: str) -> list[list[int]]:
    """Of each pair of a run, whose rows began to travel."""
    found: list[list[int]] = []

    def began(forward: Any, backward: Any) -> None:
        found.append([])
        in_turns(forward, backward)

    def told(own: int) -> None:
        if turns._turns is not None:
            found[-1].append(own)
        pass_on(own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quern.parallel.overlap.in_turns", began)
        patch.setattr(all_to_all, "pass_on", told)
        train(case, data, folder)
    return found


@pytest.mark.slow
@pytest.mark.skipif(why_no_split_backward() is not None, reason=f"{why_no_split_backward()}")
def test_pairs_of_a_schedule_travel_in_turns(run_ranks: Any, tmp_path: Path) -> None:
    """Two layers a stage, each of which sends four times forward (out and back, hidden states and choices) and back."""
    write_corpus(str(tmp_path))
    case = Case("ep2pp2", experts="eight", schedule="dualpipe_v", more=True)
    by_rank = run_ranks(turns_of, 4, case, str(tmp_path), str(tmp_path / "run"))
    assert all(by_rank)
    assert [len(found) for found in by_rank] == [len(by_rank[0])] * 4
    for found in by_rank:
        for pair in found:
            first = min(pair.count(FORWARD), pair.count(BACKWARD))
            assert first >= 2
            assert pair[: 2 * first] == [FORWARD, BACKWARD] * first
