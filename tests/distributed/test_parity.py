"""The whole trainer on every layout against one plain process in float64: losses, gradients, moments, weights.

The cases are those of ``quern selftest``, which compares them with a run of one process; here they are compared with
an oracle that shares no line with the trainer. ``-s`` or ``-rP`` shows the worst ratio of each case.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

import pytest

import quern
from quern.parallel.planning.schedules import SCHEDULES, why_no_split_backward
from quern.train.parity import matrix
from quern.train.parity.compare import compare
from quern.train.parity.layouts import LAYOUTS
from quern.train.parity.matrix import FACTORS, Case
from quern.train.parity.run import Outcome
from support.distributed import parity
from support.distributed.parity_oracle import Data, make_data, reference

AT_ONCE = 24
"""Cases a set of ranks computes before they end."""

SPLIT = [name for name, layout in LAYOUTS.items() if layout.tp > 1 and layout.pp == 1]
PIPELINES = [name for name, layout in LAYOUTS.items() if layout.pp > 1]


def every_pair(case: Case) -> Iterable[Hashable]:
    return matrix.pairs(case, FACTORS)


#: Named one by one: the mutations beside these tests say which of them must see each.
SPECIAL = [
    Case("alone"),
    Case("alone", more=True),
    Case("alone", mask=False, tied=True),
    Case("alone", "full", sizes="norm"),
    Case("ddp2"),
    Case("ddp2", more=True),
    Case("fsdp2"),
    Case("fsdp2keep", more=True),
    Case("hsdp2x2", more=True, mask=False),
    Case("alone", skip=1),
    Case("alone", more=True, sizes="norm", skip=1),
    Case("ddp2", "selective", tied=True, skip=1),
    Case("fsdp2", "full", True, skip=0),
    Case("fsdp4", mask=False, sizes="slim", skip=1),
    Case("hsdp2x2", more=True, tied=True, sizes="norm", skip=1),
    Case("alone", ramp=True),
    Case("ddp2", more=True, tied=True, ramp=True),
    Case("fsdp4keep", "selective", True, sizes="norm", ramp=True),
    Case("hsdp2x2", mask=False, sizes="slim", ramp=True),
]
#: Of those that split tensors and layers, and of many ranks.
COMPOSED = [
    *(case for case in matrix.special() if case.layout in [*SPLIT, *PIPELINES] and case.on.world <= 4),
    Case("tp2"),
    Case("tp2", "selective", True, mask=False, tied=True, sizes="norm", z_loss=True),
    Case("pp2", schedule="1f1b"),
    Case("pp2", more=True, tied=True, sizes="norm", schedule="zbv_zero_bubble"),
    Case("fsdp5", "selective", more=True, tied=True),
    Case("hsdp3x2", "full", mask=False, sizes="norm"),
    Case("fsdp7", tied=True, sizes="slim", z_loss=True),
]
NAMED = list(dict.fromkeys([*SPECIAL, *COMPOSED, *matrix.float8(), *matrix.sparse()]))
#: What is in `make test` though it has more ranks than others there: a case, and of a layout what the quick set has.
ON_FOUR_RANKS = Case("hsdp2x2", more=True, tied=True, sizes="norm", skip=1)
MANY_RANKS = ("pp2fsdp2tp2",)
#: Of those that deal tokens out, in `make test`: the first also in `make test-fast`.
DEALT = [Case("ring2", more=True, sizes="norm"), Case("ulysses2keep", "full", mask=False, sizes="norm")]
#: Of those that deal tokens out in FP8, what is in `make test-long`; the others in `make test-exhaustive`.
FLOAT8_DEALT = ("ulysses2", "ring2", "gather2fsdp2")
#: The same of experts in FP8.
FLOAT8_SPARSE = ("fsdp2", "tp2", "ep2")
#: Of those that deal experts out, in `make test`: on ranks of ``ep`` alone, and beside ``tp``.
EXPERTS_DEALT = [Case("ep2", experts="eight", more=True), Case("ep2tp2", "full", experts="eight", more=True)]
#: Every pair of factors on every layout, only in `make test-exhaustive`.
COVERING = [*matrix.covering(matrix.product(), every_pair), *matrix.special()]
#: All of data and tensor parallelism on up to 4 ranks: hours on two cores, only in `make test-exhaustive`.
EXHAUSTIVE = [case for case in matrix.everything() if case.on.pp == 1 and case.on.world <= 4]


def marked() -> dict[Case, Any]:
    """Where each case runs.

    - `make test-fast`: a case of each layout of up to 2 ranks but for ZeRO's names, and one whose tokens are dealt out;
    - `make test`: the quick set of `quern selftest` on up to 2 ranks, and a few of its cases on more. Left out are FP8
      but for FSDP2's gather, all but two that deal tokens out, schedules that test_pipeline.py has too, and for all but
      one schedule skipped updates and ramps of the batch; of those that deal experts out it has two, and of ZeRO's
      names the one case that computes what no other layout does (test_zero.py has the others' bits);
    - `make test-long`: the rest of the quick set, and what is named;
    - `make test-exhaustive`: every pair of factors on every layout, and the whole product.
    """
    cases: dict[Case, Any] = {case: pytest.param(case, marks=pytest.mark.exhaustive) for case in EXHAUSTIVE}
    cases |= {case: pytest.param(case, marks=pytest.mark.exhaustive) for case in COVERING}
    rare = {case for case in matrix.float8() if case.on.cp > 1 and case.layout not in FLOAT8_DEALT}
    rare |= {case for case in matrix.sparse() if case.float8 is not None and case.layout not in FLOAT8_SPARSE}
    cases |= {
        case: pytest.param(case, marks=pytest.mark.exhaustive if case in rare else pytest.mark.long)
        for case in [*matrix.quick(), *matrix.special(), *matrix.in_pieces(), *matrix.context(), *NAMED]
    }
    often = [case for case in matrix.quick() if case.on.world <= 2 or case.layout in MANY_RANKS]
    often = [case for case in often if (case.float8 is None or case.gather) and (case.on.cp == 1 or case in DEALT)]
    often = [case for case in often if case.on.zero is None or (case.on.zero == 1 and case.more)]
    schedules = {False: ("1f1b", "zbv_zero_bubble"), True: ("1f1b",)}
    often = [
        case for case in often if case.on.pp == 1 or case.schedule in schedules[case.ramp or case.skip is not None]
    ]
    often += [ON_FOUR_RANKS, *EXPERTS_DEALT]
    cases |= {case: pytest.param(case, marks=pytest.mark.slow) for case in often}
    fast = {
        case.layout: case
        for case in reversed(matrix.quick())
        if case.on.world <= 2 and case.on.cp == 1 and case.on.zero is None
    }
    fast[DEALT[0].layout] = DEALT[0]
    return cases | {case: pytest.param(case) for case in fast.values()}


CASES = marked()
if why_no_split_backward():
    CASES = {case: marks for case, marks in CASES.items() if not case.splits_backward}


def test_every_pair_of_factors_is_covered() -> None:
    missing = {pair for case in matrix.product() for pair in every_pair(case)}
    missing -= {pair for case in COVERING for pair in every_pair(case)}
    assert not missing
    assert {case.layout for case in COVERING} == set(LAYOUTS)


def test_the_short_cases_have_every_layout_and_schedule_and_every_pair_of_the_other_factors() -> None:
    short = set(matrix.quick()) & set(matrix.product())
    assert {case.layout for case in short} == set(LAYOUTS)
    assert {case.on.world for case in short} == set(range(1, 9))
    assert {(case.layout, case.schedule) for case in short} >= {(p, s) for p in ("pp2", "pp4") for s in SCHEDULES}
    others = [name for name in FACTORS if name not in ("layout", "schedule")]
    missing = {pair for case in matrix.product() for pair in matrix.pairs(case, others)}
    assert not missing - {pair for case in short for pair in matrix.pairs(case, others)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def outcomes_of(
    request: pytest.FixtureRequest, run_ranks: Callable[..., list[Any]], data: Data, tmp_path_factory: Any
) -> Callable[[Case], list[Outcome]]:
    """Each rank's outcome. The first case asked for brings the other selected ones of as many ranks with it."""
    selected = [
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module and "case" in item.fixturenames
    ]
    known: dict[Case, list[Outcome]] = {}
    begun: set[Case] = set()  # known goes without those that were asked for

    def find(case: Case) -> list[Outcome]:
        if case not in known:
            alike = [
                other
                for other in selected
                if other not in begun and (other.on.world, other.on.grouped) == (case.on.world, case.on.grouped)
            ]
            folder = str(tmp_path_factory.mktemp("runs"))
            alike = [case, *(other for other in alike if other != case)][:AT_ONCE]
            begun.update(alike)
            if case.on.grouped:
                by_rank = run_ranks(parity.train_all, case.on.world, alike, data.path, folder, timeout_s=400)
            else:
                by_rank = [parity.train_all(alike, data.path, folder)]
            known.update(zip(alike, map(list, zip(*by_rank, strict=True)), strict=True))
        return known.pop(case)

    return find


@pytest.fixture(scope="module")
def reference_of(data: Data) -> Callable[[Case], Outcome]:
    """The oracle's; cases that differ in their layout alone share it."""
    known: dict[Any, Outcome] = {}

    def find(case: Case) -> Outcome:
        if case.computation not in known:
            known[case.computation] = reference(case.computation, data)
        return known[case.computation]

    return find


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_a_layout_trains_as_one_plain_process_does(
    case: Case, outcomes_of: Callable[[Case], list[Outcome]], reference_of: Callable[[Case], Outcome]
) -> None:
    outcomes = outcomes_of(case)
    assert {Path(outcome.package) for outcome in outcomes} == {Path(str(quern.__file__))}
    found = compare(case, outcomes, reference_of(case))
    print(f"{case}: {found}")
    wrong = found.problems
    assert not wrong, f"{case}: {len(wrong)} differ from the plain loop\n" + "\n".join(wrong[:12])


#: float32 by contract, scalars all of them: AdamW's count of updates (counted up, and down again by a skip), the flag
#: that makes its kernel skip (made of a bool), and the loss scale, which is 1 and is reported with the step's figures.
SCALARS = {"zeros", "_foreach_add_", "_foreach_sub_", "_fused_adamw_", "_to_copy from bool", "_to_copy from float32"}
SCALARS |= {"detach", "view"}  # of the count, which is saved in a checkpoint


@pytest.mark.slow
def test_a_float64_run_holds_no_float32_tensor(run_ranks: Callable[..., list[Any]], data: Data, tmp_path: Path) -> None:
    cases = [
        Case("fsdp2", "selective", True, sizes="norm"),
        Case("ddp2", "full", tied=True),
    ]
    for by_case in run_ranks(parity.floats_of, 2, cases, data.path, str(tmp_path), timeout_s=300):
        for case, (seen, other) in zip(cases, by_case, strict=True):
            assert seen > 3000
            strange = sorted(other - {(name, "float32", ()) for name in SCALARS})
            assert strange == [], str(case)
