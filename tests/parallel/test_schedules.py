"""What schedules ask for, against torch's own refusals, and how long ranks wait, against published formulas."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
from pipeline_bubble import closed_form
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from quern.parallel.planning import bubble as module
from quern.parallel.planning.bubble import Action, bubble, makespan, order
from quern.parallel.planning.schedules import SCHEDULES, check_micro_batches
from quern.parallel.planning.stages import stages_of

#: Ranks, and stages of a rank.
SIZES = {
    schedule: [(pp, kind.stages_per_rank) for pp in (2, 3, 4)]
    if kind.stages_per_rank
    else [(2, 1), (2, 3), (3, 2), (4, 1), (4, 2)]
    for schedule, kind in SCHEDULES.items()
}
NUMBERS = range(1, 18)


def torch_takes(schedule: str, pp: int, v: int, num_micro_batches: int) -> bool:
    stages = [
        SimpleNamespace(
            num_stages=pp * v, group_size=pp, group_rank=0, stage_index=index, is_last=False, submod=None
        )
        for index in stages_of(0, schedule, pp, v)
    ]  # fmt: skip
    kind = get_schedule_class(SCHEDULES[schedule].torch_name)
    try:
        kind(stages[0] if issubclass(kind, PipelineScheduleSingle) else stages, num_micro_batches)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_numbers_are_refused_as_torch_refuses_them(schedule: str) -> None:
    for (pp, v), number in itertools.product(SIZES[schedule], NUMBERS):
        complaint = check_micro_batches(schedule, pp, pp * v, number)
        assert (complaint is None) == torch_takes(schedule, pp, v, number)
        if complaint is not None:
            assert f"got {number};" in complaint
            fits = complaint.split("; ")[1].removesuffix(" would fit").split(" or ")
            assert all(torch_takes(schedule, pp, v, int(fit)) for fit in fits)


def test_what_a_refusal_says() -> None:
    assert check_micro_batches("1f1b", 4, 4, 3) == (
        "schedule 1f1b with pp 4: expected 4 micro-batches or more, one for every stage, got 3; 4 would fit"
    )
    assert check_micro_batches("interleaved_1f1b", 4, 8, 11) == (
        "schedule interleaved_1f1b with pp 4: expected a number that falls into rounds of equal size (⌊micro-batches / "
        "pp⌋ = 2 rounds here), got 11; 10 or 12 would fit"
    )
    assert all(check_micro_batches(schedule, 2, 4, 0) for schedule in SCHEDULES)
    with pytest.raises(ValueError, match="8 would fit"):
        order("dualpipe_v", 4, 2, 7)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_does_all_its_work_once(schedule: str) -> None:
    for (pp, v), number in itertools.product(SIZES[schedule], NUMBERS):
        if check_micro_batches(schedule, pp, pp * v, number):
            continue
        ranks = order(schedule, pp, v, number)
        for rank, actions in enumerate(ranks):
            assert len(set(actions)) == len(actions)
            for stage, micro_batch in itertools.product(stages_of(rank, schedule, pp, v), range(number)):
                kinds = [kind for kind in "FBIW" if Action(stage, kind, micro_batch) in actions]
                assert kinds in (["F", "B"], ["F", "I", "W"])
        assert {action.stage for actions in ranks for action in actions} == set(range(pp * v))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_simulation_is_the_formula(schedule: str) -> None:
    compared = dict.fromkeys(SIZES[schedule], 0)
    for (pp, v), number in itertools.product(SIZES[schedule], NUMBERS):
        if check_micro_batches(schedule, pp, pp * v, number):
            continue
        formula = closed_form(schedule, pp, v, number)
        found = bubble(schedule, pp, v, number)
        assert 0 < found < 1
        if formula is not None:
            compared[pp, v] += 1
            assert abs(found - formula) < 1e-12
    assert all(compared.values()) or schedule == "dualpipe_v"


def test_figures_of_the_handbook() -> None:
    assert bubble("1f1b", 4, 1, 12) == pytest.approx(3 / 15)
    assert bubble("gpipe", 16, 1, 48) == pytest.approx(15 / 63)
    assert bubble("1f1b", 4, 1, 60) < 0.05 < bubble("1f1b", 4, 1, 50)  # under 5 % needs about 20 (S - 1)
    assert bubble("interleaved_1f1b", 4, 2, 12) == pytest.approx(3 / 27)


def test_uneven_stages_wait_for_the_slowest() -> None:
    """GPipe by hand, a second stage of 3: its forwards from 1 to 7, its backwards to 19, the first's last one to 21."""
    assert bubble("gpipe", 2, 1, 2, [1, 3]) == pytest.approx(1 - (2 * 3 * 4) / (2 * 21))
    assert bubble("gpipe", 2, 1, 2, [10, 30]) == pytest.approx(bubble("gpipe", 2, 1, 2, [1, 3]))
    for schedule, kind in SCHEDULES.items():
        v = kind.stages_per_rank or 2
        assert bubble(schedule, 4, v, 8, [5] * 4 * v) == pytest.approx(bubble(schedule, 4, v, 8))
        assert bubble(schedule, 4, v, 8, [1] * (4 * v - 1) + [2]) > bubble(schedule, 4, v, 8)


def test_split_backwards_wait_least() -> None:
    shares = {schedule: bubble(schedule, 4, kind.stages_per_rank or 2, 16) for schedule, kind in SCHEDULES.items()}
    assert shares["1f1b"] == shares["gpipe"]
    assert shares["looped_bfs"] == shares["interleaved_1f1b"] < shares["1f1b"]
    for schedule in ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"):
        assert shares[schedule] == min(shares.values()) < shares["interleaved_1f1b"]


def test_makespan_of_two_ranks_by_hand() -> None:
    """F0 F1 | F0 B0 on the second from 1 on; the first waits for B0 from 2 to 4."""
    ranks = order("1f1b", 2, 1, 2)
    assert ranks[0] == [Action(0, "F", 0), Action(0, "F", 1), Action(0, "B", 0), Action(0, "B", 1)]
    assert ranks[1] == [Action(1, "F", 0), Action(1, "B", 0), Action(1, "F", 1), Action(1, "B", 1)]
    assert makespan("1f1b", 2, 1, 2, [(1, 2, 1, 1)] * 2, 0) == 9
    assert makespan("1f1b", 2, 1, 2, [(1, 1, 1, 1)] * 2, 0) == 6
    assert makespan("1f1b", 2, 1, 2, [(1, 2, 1, 1)] * 2, 0.5) == 10  # F0 gets there later, and B0 gets back later


def test_an_order_that_waits_for_itself_is_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "order", lambda *_: [[Action(0, "F", 0), Action(0, "F", 1)], [Action(1, "F", 2)]])
    with pytest.raises(AssertionError, match="waits for itself"):
        makespan("1f1b", 2, 1, 7, [(1, 2, 1, 1)] * 2, 0)
