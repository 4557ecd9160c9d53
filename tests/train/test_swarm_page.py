"""The page of a swarm, against laws that are planted and computed here once more."""

import math
import re

import numpy as np

from quern.mixtures.laws.fit import Fit, fit
from quern.mixtures.laws.propose import Proposal, Wish, propose
from quern.mixtures.laws.tables import Runs
from quern.train.swarm.page import render

HOSTILE = "<script>alert(1)</script>"


def page(sources: int = 3, families: int = 1, form: str = "linear") -> tuple[str, Runs, dict[str, Fit], Proposal]:
    rng = np.random.default_rng(5)
    mixtures = rng.dirichlet(np.ones(sources), sources + 9)
    slopes = rng.normal(size=(families, sources))
    found = {f"{HOSTILE}{k}": 2 + np.exp(mixtures @ slopes[k]) + rng.normal(size=len(mixtures)) * 0.01
             for k in range(families)}  # fmt: skip
    names = tuple(f"{HOSTILE}{place}" for place in range(sources))
    runs = Runs(names, mixtures, found)
    fits = {name: fit(form, mixtures, own, names) for name, own in found.items()}
    wish = Wish(dict.fromkeys(found, 1 / families), np.full(sources, 0.6))
    proposal = propose(fits, mixtures, names, wish)
    return render(HOSTILE, runs, proposal, fits, wish), runs, fits, proposal


def test_hostile_names_are_escaped_and_bytes_repeat() -> None:
    text = page()[0]
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert text == page()[0]


def test_dots_and_lines_stand_where_they_should() -> None:
    text, runs, fits, proposal = page()
    svg = re.findall(r"<svg.*?</svg>", text, re.S)[0]
    (loss, own), tried = next(iter(fits.items())), runs.mixtures[:, 0]
    shares = [float(share) for share in proposal.shares]
    top = max(*tried, shares[0])
    fitted = []
    for step in range(41):
        share = top * step / 40
        others = [other * (1 - share) / (1 - shares[0]) for other in shares[1:]]
        fitted.append(math.fsum(a * b for a, b in zip([share, *others], own.parameters, strict=True)))
    values = [*fitted, *runs.losses[loss]]
    room = 0.05 * (max(values) - min(values))
    low, high = min(values) - room, max(values) + room
    dots = [(float(x), float(y)) for x, y in re.findall(r'class="run" d="M(\S+) (\S+?)h0"', svg)]
    wanted = [(100 * x / top, 100 * (high - y) / (high - low)) for x, y in zip(tried, runs.losses[loss], strict=True)]
    assert np.allclose(dots, wanted, atol=0.006)
    line = re.search(r'class="law" d="M([^"]+)"', svg)[1].split("L")
    assert np.allclose([float(point.split()[1]) for point in line], [100 * (high - y) / (high - low) for y in fitted],
                       atol=0.006)  # fmt: skip


def test_what_is_left_out_is_said() -> None:
    text = page(10, 13)[0]
    assert "1 of 13 losses and 2 of 10 sources" in text
    assert text.count("<svg") == 12 * 8 + 12
    assert "Not drawn" not in page()[0]
