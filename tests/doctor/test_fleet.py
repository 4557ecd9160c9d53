"""Simulated fleets: what is put into one is named, and nothing else is, in thousands of draws."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quern.config import validate
from quern.doctor.fleet import judge
from quern.doctor.readings import Device, Disk, Finding, Link, Problem, Reading
from quern.errors import InputError
from quern.train.processes.links import planned_rounds

NODES, GPUS, REPEATS = 64, 8, 9
TESTS = {"product bf16": 700e12, "copy device": 2.6e12}
RATES = np.array([*TESTS.values()])[:, None]
LINK = 40e9
PAIRS = [(node, (node + step) % NODES) for step in range(1, 5) for node in range(NODES)]
"""Eight links of each node."""


@dataclass
class Fleet:
    """The truth, relative speeds of GPUs [node, GPU] and links [pair], and what is read of it. A GPU's clock decides
    all of its tests, so that no test is a second opinion."""

    rng: np.random.Generator
    gpus: np.ndarray = field(init=False)
    links: np.ndarray = field(init=False)
    drivers: dict[int, str] = field(default_factory=dict)
    free: dict[int, int] = field(default_factory=dict)
    ecc: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gpus = self.rng.normal(1, 0.02, (NODES, GPUS))
        self.links = self.rng.normal(1, 0.05, len(PAIRS))
        self._read = [np.zeros_like(self.gpus), np.zeros_like(self.links)]
        self._noise = [self._draw((NODES, GPUS, len(TESTS))), self._draw((len(PAIRS),))]

    def _draw(self, shape: tuple[int, ...]) -> np.ndarray:
        """Repeats [..., REPEATS]: half a percent of noise, and one reading in a hundred 10 % low."""
        noise = 1 + 0.005 * self.rng.standard_normal((*shape, REPEATS), dtype=np.float32)
        low = self.rng.integers(0, noise.size, self.rng.binomial(noise.size, 0.01))
        noise.reshape(-1)[low] *= 0.9
        return noise

    def judge(self) -> list[Finding]:
        """Speeds are put into :data:`MACHINES` and :data:`LINKS`, since making them takes long, where they are others
        than before; what seldom differs is put into copies."""
        nodes, pairs = (self.gpus != self._read[0]).any(1).nonzero()[0], (self.links != self._read[1]).nonzero()[0]
        gpus = (self.gpus[nodes, :, None, None] * self._noise[0][nodes] * RATES).tolist()
        for node, speeds in zip(nodes.tolist(), gpus, strict=True):
            for device, rows in zip(MACHINES[node].devices, speeds, strict=True):
                device.speeds.update(zip(TESTS, rows, strict=True))
        for pair, row in zip(
            pairs.tolist(), (self.links[pairs, None] * self._noise[1][pairs] * LINK).tolist(), strict=True
        ):
            LINKS[pair].speeds[:] = row
        self._read = [self.gpus.copy(), self.links.copy()]
        for machine in MACHINES:
            machine.facts["driver"] = self.drivers.get(machine.rank, "570.86.15")
        machines = [*MACHINES]
        for node, free in self.free.items():
            disk = machines[node].disks[0].model_copy(update={"free": free})
            machines[node] = machines[node].model_copy(update={"disks": [disk]})
        for (node, gpu), errors in self.ecc.items():
            devices = [*machines[node].devices]
            devices[gpu] = devices[gpu].model_copy(update={"ecc_errors": errors})
            machines[node] = machines[node].model_copy(update={"devices": devices})
        return judge(machines, LINKS)


MACHINES = [
    Reading(
        rank=node, node=f"node-{node}", facts={"driver": "", "torch": "2.13.0"},
        disks=[Disk(path="/scratch", total=1 << 40, free=500 << 30)],
        devices=[Device(name=f"cuda:{gpu}", kind="H100", speeds={}) for gpu in range(GPUS)],
    )
    for node in range(NODES)
]  # fmt: skip
LINKS = [Link(kind="pair", ranks=[*pair], speeds=[]) for pair in PAIRS]


Fault = Callable[[Fleet], tuple[str, tuple[str, ...], str]]
"""Puts one fault into a fleet; what has to be named: code, nodes, where."""


def slow_gpu(fleet: Fleet) -> tuple[str, tuple[str, ...], str]:
    """15 % below the fleet."""
    fleet.gpus[1, 3] = 0.85
    return "slow-device", ("node-1",), "cuda:3"


def slow_pair(fleet: Fleet) -> tuple[str, tuple[str, ...], str]:
    """A link that has lost 45 % of what it had."""
    fleet.links[PAIRS.index((10, 11))] *= 0.55
    return "slow-pair", ("node-10", "node-11"), "ranks 10 and 11"


def slow_links(fleet: Fleet) -> tuple[str, tuple[str, ...], str]:
    """A node of which every link has lost 20 %."""
    fleet.links[[20 in pair for pair in PAIRS]] *= 0.8
    return "slow-links", ("node-20",), ""


def wrong_driver(fleet: Fleet) -> tuple[str, tuple[str, ...], str]:
    fleet.drivers[30] = "535.54.03"
    return "version", ("node-30",), "driver"


def full_disk(fleet: Fleet) -> tuple[str, tuple[str, ...], str]:
    fleet.free[40] = 10 << 30
    return "full-disk", ("node-40",), "/scratch"


def memory_errors(fleet: Fleet) -> tuple[str, tuple[str, ...], str]:
    fleet.ecc[50, 7] = 2
    return "ecc", ("node-50",), "cuda:7"


FAULTS: list[Fault] = [slow_gpu, slow_pair, slow_links, wrong_driver, full_disk, memory_errors]


def named(found: Iterable[Finding]) -> set[tuple[str, tuple[str, ...], str]]:
    return {(finding.code, finding.nodes, finding.where) for finding in found}


@pytest.mark.parametrize(
    "draws", [pytest.param(range(14), marks=pytest.mark.slow), pytest.param(range(14, 2000), marks=pytest.mark.long)],
    ids=["some", "2,000"],
)  # fmt: skip
def test_what_is_wrong_is_named_and_nothing_else(draws: range) -> None:
    """Every fleet is judged in order first, then with faults: one of them alone, or all."""
    for draw in draws:
        fleet = Fleet(np.random.default_rng([20261127, draw]))
        assert fleet.judge() == [], draw
        put = [FAULTS[draw % 7]] if draw % 7 < len(FAULTS) else FAULTS
        truth = {fault(fleet) for fault in put}
        assert named(fleet.judge()) == truth, draw


def test_a_gpu_that_lost_fifteen_percent_of_a_fast_one_is_near_the_threshold() -> None:
    """What can be known: a clock 2 sd above the median less 15 % is 12 % below it, and named; one 3 sd above is not."""
    fleet = Fleet(np.random.default_rng(1))
    fleet.gpus[1, 3] = 1.03 * 0.85
    assert named(fleet.judge()) == {("slow-device", ("node-1",), "cuda:3")}
    fleet.gpus[1, 3] = 1.06 * 0.85
    assert fleet.judge() == []


def readings(*speeds: float, name: str = "product bf16") -> list[Reading]:
    return [Reading(rank=n, node=f"node-{n}", speeds={name: [speed] * 3}) for n, speed in enumerate(speeds)]


def test_three_are_no_fleet() -> None:
    assert judge(readings(1, 1, 0.5)) == []
    assert [one.nodes for one in judge(readings(1, 1, 0.5, 1))] == [("node-2",)]


def test_a_fleet_that_spreads_more_than_expected_is_judged_by_its_own_spread() -> None:
    values = np.random.default_rng(2).normal(1, 0.2, 64)
    assert judge(readings(*values)) == []
    assert [one.nodes for one in judge(readings(*values, 0.001 * values[0]))] in ([("node-64",)], [])
    assert judge(readings(*np.random.default_rng(2).normal(1, 0.01, 64), 0.8))[0].nodes == ("node-64",)


def test_one_bad_reading_of_a_machine_accuses_nobody() -> None:
    fleet = readings(*[1.0] * 8)
    fleet[3].speeds["product bf16"][0] = 0.01
    assert judge(fleet) == []


def test_devices_of_another_model_are_another_fleet() -> None:
    fleet = [
        Reading(rank=n, node=f"node-{n}", devices=[Device(name="cuda:0", kind=kind, speeds={"product bf16": [speed]})])
        for n, (kind, speed) in enumerate([("H100", 700.0)] * 12 + [("A100", 300.0)] * 4)
    ]
    assert judge(fleet) == []
    processors = ["new"] * 12 + ["old"] * 4
    speeds = [{"cpu sha256": [1.0 if kind == "new" else 0.5]} for kind in processors]
    assert (
        judge(
            [
                Reading(rank=n, node=f"n{n}", shown={"processor": kind}, speeds=speeds[n])
                for n, kind in enumerate(processors)
            ]
        )
        == []
    )
    assert len(judge([Reading(rank=n, node=f"n{n}", speeds=speeds[n]) for n in range(16)])) == 4


def test_without_a_majority_every_version_is_told() -> None:
    two = [Reading(rank=n, node=f"node-{n}", facts={"driver": version}) for n, version in enumerate("ab")]
    found = [(one.nodes, one.text) for one in judge(two)]
    assert found == [(("node-0",), "a, and b on 1 of 2 nodes"), (("node-1",), "b, and a on 1 of 2 nodes")]
    (one,) = judge([*two, Reading(rank=2, node="node-2", facts={"driver": "a"})])
    assert (one.nodes, one.text) == (("node-1",), "b, and a on 2 of 3 nodes")
    same = Reading(rank=1, node="node-1", facts={"driver": "a"})
    found = [(one.nodes, one.where) for one in judge([two[0], same, Reading(rank=2, node="node-2", facts={"os": "x"})])]
    assert found == [(("node-2",), "driver"), (("node-2",), "os")]


def links(*groups: tuple[int, ...], slow: Mapping[tuple[int, ...], float], kind: Any = "pair") -> list[Link]:
    return [
        Link(
            kind=kind,
            ranks=[*pair],
            speeds=[slow.get(pair, 1.0)] if slow.get(pair, 1.0) else [],
            problem="" if slow.get(pair, 1.0) else "no answer",
        )
        for pair in groups
    ]


EIGHT = [Reading(rank=n, node=f"node-{n // 2}", local_rank=n % 2) for n in range(16)]
ALL = [pair for pair in combinations(range(16), 2) if pair[0] // 2 != pair[1] // 2]


@pytest.mark.parametrize(
    ("slow", "truth"),
    [
        ({(0, 7): 0.5}, [("slow-pair", ("node-0", "node-3"), "ranks 0 and 7")]),
        ({pair: 0.5 for pair in ALL if 5 in pair}, [("slow-rank", ("node-2",), "rank 5")]),
        ({pair: 0.7 for pair in ALL if {4, 5} & {*pair}}, [("slow-links", ("node-2",), "")]),
        ({(0, 7): 0.0}, [("broken-link", ("node-0", "node-3"), "ranks 0 and 7")]),
        ({pair: 0.0 for pair in ALL if {4, 5} & {*pair}}, [("slow-links", ("node-2",), "")]),
        (
            {pair: 0.6 for pair in ALL if 4 in pair} | {(6, 15): 0.4},
            [("slow-rank", ("node-2",), "rank 4"), ("slow-pair", ("node-3", "node-7"), "ranks 6 and 15")],
        ),
        (dict.fromkeys(ALL, 0.0), [("broken-link", tuple(f"node-{n}" for n in range(8)), "all 112 links (pair)")]),
    ],
    ids=["pair", "rank", "node", "broken pair", "broken node", "rank and another pair", "all broken"],
)  # fmt: skip
def test_a_link_is_blamed_on_node_rank_or_pair(
    slow: dict[tuple[int, ...], float], truth: list[tuple[str, tuple[str, ...], str]]
) -> None:
    found = judge(EIGHT, links(*ALL, slow=slow))
    assert named(found) == set(truth)
    assert len(found) == len(truth)


def test_a_ring_that_does_not_close_is_told() -> None:
    found = judge(EIGHT, links(tuple(range(16)), slow={tuple(range(16)): 0.0}, kind="ring"))
    assert [(one.code, one.text) for one in found] == [("broken-link", "no answer")]


def test_what_both_ends_tell_counts_once_and_a_failure_of_either_counts() -> None:
    both = [
        Link(kind="pair", ranks=[0, 2], speeds=[1.0]), Link(kind="pair", ranks=[0, 2], problem="timed out"),
        Link(kind="pair", ranks=[0, 99], problem="gone"),
    ]  # fmt: skip
    (found,) = judge(EIGHT, both)
    assert (found.code, found.nodes, found.text) == ("broken-link", ("node-0", "node-1"), "timed out")


@pytest.mark.parametrize(
    ("device", "code"),
    [({"ecc_errors": 1}, "ecc"), ({"remap_pending": True}, "rows"), ({"remap_failed": True}, "rows"),
     ({"xids": [79]}, "xid"), ({"throttled": ["power brake"]}, "throttled"), ({"remapped_rows": 3}, None),
     ({"ecc_errors": None}, None)],
)  # fmt: skip
def test_what_is_wrong_on_one_machine_needs_no_fleet(device: dict[str, Any], code: str | None) -> None:
    found = judge([Reading(rank=0, node="n", devices=[Device(name="cuda:0", kind="H100", **device)])])
    assert [one.code for one in found] == ([code] if code else [])
    assert all(one.todo for one in found)


def test_silent_ranks_and_what_a_rank_found_by_itself_are_told() -> None:
    found = judge(
        [Reading(rank=0, node="a", problems=[Problem(code="store", text="s3://x: write: denied")])], silent={3: "d"}
    )
    assert [(one.code, one.nodes) for one in found] == [("silent", ("d",)), ("store", ("a",))]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"rank": -1, "node": "a"}, "f.json: rank: expected a number ≥ 0, got -1"),
        (
            {"rank": 1, "node": "a", "speeds": {"x": [float("nan")]}},
            "f.json: speeds.x.0: expected a finite number",
        ),
        ({"rank": 1, "node": "a", "evil": 1}, "f.json: evil: unknown key; known keys: address, devices"),
        ([1], "f.json: (top level): expected a mapping of keys, got [1]"),
        ({"rank": 1, "node": "a" * 3000}, "f.json: node: string should have at most 2000 characters"),
    ],
)
def test_another_rank_s_file_is_checked(value: Any, said: str) -> None:
    with pytest.raises(InputError) as caught:
        validate(value, Reading, "f.json")
    assert str(caught.value).startswith(said)
    assert len(str(caught.value)) < 300


def test_a_reading_survives_its_file() -> None:
    device = Device(name="cpu", kind="x", speeds={"product fp32": [1.5]})
    one = Reading(rank=1, node="a", devices=[device], disks=[Disk(path="/", total=10, free=5)])
    assert validate(json.loads(json.dumps(one.model_dump())), Reading, "f") == one


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 9))
def test_rounds_let_everybody_meet_and_nobody_twice_at_a_time(nodes: int, local: int, most: int) -> None:
    places = {rank: (f"n{rank // local}", rank % local) for rank in range(nodes * local)}
    rounds = list(planned_rounds(places, most))
    for _, groups in rounds:
        ranks = [rank for group in groups for rank in group]
        assert len(set(ranks)) == len(ranks)
    pairs = [group for kind, groups in rounds if kind == "pair" for group in groups]
    assert len({*pairs}) == len(pairs)
    if most >= nodes + nodes % 2 - 1:  # then all rails of all pairs of nodes
        expected = {
            (a, b) for a, b in combinations(places, 2) if places[a][0] != places[b][0] and a % local == b % local
        }
        assert {*pairs} == expected
    assert [groups for kind, groups in rounds if kind == "ring"] == ([[tuple(places)]] if len(places) > 2 else [])
