"""Simulated fleets: what is put into one is named, and nothing else is, in thousands of draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest

from quern.doctor.fleet import judge
from quern.doctor.readings import Device, Disk, Finding, Link, Reading

NODES, GPUS, REPEATS = 64, 8, 9
TESTS = {"product bf16": 700e12, "product fp32": 50e12, "copy device": 2.6e12}
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
        self._noise = [self._draw((NODES, GPUS, len(TESTS))), self._draw((len(PAIRS),))]

    def _draw(self, shape: tuple[int, ...]) -> np.ndarray:
        """Repeats [..., REPEATS]: half a percent of noise, and one reading in a hundred 10 % low."""
        noise = 1 + 0.005 * self.rng.standard_normal((*shape, REPEATS), dtype=np.float32)
        low = self.rng.integers(0, noise.size, self.rng.binomial(noise.size, 0.01))
        noise.reshape(-1)[low] *= 0.9
        return noise

    def judge(self) -> list[Finding]:
        values = (self.gpus[..., None, None] * self._noise[0] * np.array([*TESTS.values()])[:, None]).tolist()
        readings = [
            Reading(
                rank=node, node=f"node-{node}",
                facts={"driver": self.drivers.get(node, "570.86.15"), "torch": "2.13.0"},
                disks=[Disk(path="/scratch", total=1 << 40, free=self.free.get(node, 500 << 30))],
                devices=[
                    Device(
                        name=f"cuda:{gpu}", kind="H100", speeds=dict(zip(TESTS, values[node][gpu], strict=True)),
                        ecc_errors=self.ecc.get((node, gpu), 0),
                    )
                    for gpu in range(GPUS)
                ],
            )
            for node in range(NODES)
        ]  # fmt: skip
        speeds = (self.links[:, None] * self._noise[1] * LINK).tolist()
        links = [Link(kind="pair", ranks=[*pair], speeds=row) for pair, row in zip(PAIRS, speeds, strict=True)]
        return judge(readings, links)


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
    "draws", [pytest.param(range(60), marks=pytest.mark.slow), pytest.param(range(60, 2000), marks=pytest.mark.long)],
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
