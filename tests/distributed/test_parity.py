"""The whole trainer on every layout against one plain process in float64: losses, gradients, moments, weights.

``-s`` or ``-rP`` shows the worst ratio of each case.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity
import pytest
from parity import FACTORS, LAYOUTS, Case, Outcome
from parity_oracle import Data, differences, make_data, reference

import quern

AT_ONCE = 48
"""Cases a set of ranks computes before they end."""

PAIRS = parity.pairwise()
#: Named one by one: the mutations beside these tests say which of them must see each.
SPECIAL = [
    Case("alone"),
    Case("alone", accumulate=3),
    Case("alone", mask=False, tied=True),
    Case("alone", "full", sizes="norm"),
    Case("ddp2"),
    Case("ddp2", accumulate=3),
    Case("fsdp2"),
    Case("fsdp2keep", accumulate=3),
    Case("hsdp2x2", accumulate=3, mask=False),
    Case("alone", skip=1),
    Case("alone", accumulate=3, sizes="norm", skip=1),
    Case("ddp2", "selective", tied=True, skip=1),
    Case("fsdp2", "full", 3, skip=0),
    Case("fsdp4", mask=False, sizes="slim", skip=1),
    Case("hsdp2x2", accumulate=3, tied=True, sizes="norm", skip=1),
    Case("alone", ramp=True),
    Case("ddp2", accumulate=3, tied=True, ramp=True),
    Case("fsdp4keep", "selective", 3, sizes="norm", ramp=True),
    Case("hsdp2x2", mask=False, sizes="slim", ramp=True),
]
SHORT = list(dict.fromkeys([*PAIRS, *SPECIAL]))
LONG = [case for case in parity.everything() if case not in SHORT]


def test_the_short_cases_cover_every_pair_of_factors() -> None:
    rows = [tuple(getattr(case, name) for name in FACTORS) for case in PAIRS]
    factors = list(FACTORS.values())
    missing = [
        (a, b)
        for i in range(len(factors))
        for j in range(i)
        for a in factors[i]
        for b in factors[j]
        if not any(row[i] == a and row[j] == b for row in rows)
    ]
    assert not missing
    assert len(SHORT) >= 40
    assert {LAYOUTS[case.layout].world for case in PAIRS} == {1, 2, 3, 4}


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

    def find(case: Case) -> list[Outcome]:
        if case not in known:
            alike = [
                other
                for other in selected
                if other not in known and (other.on.world, other.on.grouped) == (case.on.world, case.on.grouped)
            ]
            folder = str(tmp_path_factory.mktemp("runs"))
            alike = [case, *(other for other in alike if other != case)][:AT_ONCE]
            if case.on.grouped:
                by_rank = run_ranks(parity.train_all, case.on.world, alike, data.path, folder, timeout_s=400)
            else:
                by_rank = [parity.train_all(alike, data.path, folder)]
            known.update(zip(alike, map(list, zip(*by_rank, strict=True)), strict=True))
        return known.pop(case)

    return find


@pytest.fixture(scope="module")
def records_of(data: Data) -> Callable[[Case], Any]:
    """The oracle's records; cases that differ in their layout alone share them."""
    known: dict[Case, Any] = {}

    def find(case: Case) -> Any:
        if case.computed not in known:
            known[case.computed] = reference(case.computed, data)
        return known[case.computed]

    return find


def _marked() -> list[Any]:
    """In `make test-fast` up to two ranks, in `make test` the short cases, in `make test-all` every one."""
    short = [pytest.param(case, marks=pytest.mark.slow) if case.on.world > 2 else case for case in SHORT]
    return [*short, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)]


@pytest.mark.parametrize("case", _marked(), ids=str)
def test_a_layout_trains_as_one_plain_process_does(
    case: Case, outcomes_of: Callable[[Case], list[Outcome]], records_of: Callable[[Case], Any]
) -> None:
    outcomes = outcomes_of(case)
    assert {Path(outcome.package) for outcome in outcomes} == {Path(str(quern.__file__))}
    wrong, worst = differences(case, records_of(case), outcomes)
    print(f"{case}: {worst}")
    assert not wrong, f"{case}: {len(wrong)} differ from the plain loop\n" + "\n".join(wrong[:12])


#: float32 by contract, scalars all of them: AdamW's count of updates (counted up, and down again by a skip), the flag
#: that makes its kernel skip (made of a bool), and the loss scale, which is 1 and is reported with the step's figures.
SCALARS = {"zeros", "_foreach_add_", "_foreach_sub_", "_fused_adamw_", "_to_copy from bool", "_to_copy from float32"}
SCALARS |= {"detach", "view"}  # of the count, which is saved in a checkpoint


def test_a_float64_run_holds_no_float32_tensor(run_ranks: Callable[..., list[Any]], data: Data, tmp_path: Path) -> None:
    cases = [
        Case("fsdp2", "selective", 3, sizes="norm"),
        Case("ddp2", "full", tied=True),
        Case("fsdp2keep", mask=False, tied=True, ramp=True),
    ]
    for by_case in run_ranks(parity.floats_of, 2, cases, data.path, str(tmp_path), timeout_s=300):
        for case, (seen, other) in zip(cases, by_case, strict=True):
            assert seen > 3000
            strange = sorted(other - {(name, "float32", ()) for name in SCALARS})
            assert strange == [], str(case)
