"""``quern mix fit`` and ``quern mix ablate``: tables become shares, a swarm a data: section that a run takes."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy.optimize import minimize_scalar
from typer.testing import CliRunner, Result

from quern.cli.mix import app
from quern.train.swarm import run
from support.laws import loss
from support.train import swarm_case as case

Told = Callable[..., dict[str, Any]]
LAWS = {"math": [0.8, -3.0, 0.4, 0.2], "chat": [1.1, 0.3, -1.2, 0.1]}


def mix(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture
def swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shares and losses of 20 runs of others, without noise; two columns a family."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(1)
    mixtures = random.dirichlet(np.ones(3), 20)
    with open("shares.csv", "w") as file:
        csv.writer(file).writerows([["id", "code", "web", "wiki"], *([n, *row] for n, row in enumerate(mixtures))])
    columns = {f"{name}{end}": loss("log-linear", np.array(law), mixtures) + end
               for name, law in LAWS.items() for end in (-0.5, 0.5)}  # fmt: skip
    with open("losses.csv", "w") as file:
        csv.writer(file).writerows(
            [["id", *columns], *([n, *row] for n, row in enumerate(zip(*columns.values(), strict=True)))]
        )
    families = {name: [f"{name}-0.5", f"{name}0.5"] for name in LAWS}
    sources = {"tokens": {"code": 100, "web": 600, "wiki": 300}}
    Path("about.yaml").write_text(
        yaml.safe_dump({"eval": {"tasks": families}, "sources": sources, "odd": {"code": math.nan}})
    )
    return tmp_path


FIT = ("fit", "shares.csv", "losses.csv", "--key", "id", "--families", "about.yaml:eval.tasks")
SIZED = ("--tokens", "about.yaml:sources.tokens", "--budget", "1000", "--max-epochs", "4")


@pytest.mark.usefixtures("swarm")
def test_tables_of_others_become_shares(json_of: Told) -> None:
    found = json_of(mix, *FIT, *SIZED, "--weight", "math=3", "--weight", "chat=1")
    for name, law in LAWS.items():
        one = found["families"][name]
        np.testing.assert_allclose(one["parameters"], law, atol=1e-5)
        assert one["rank_correlation"] == pytest.approx(1.0)
    best = minimize_scalar(
        lambda code: sum(w * float(loss("log-linear", np.array(LAWS[n]), [[code, 1 - code, 0.0]])[0]) for n, w in
                         (("math", 0.75), ("chat", 0.25))), bounds=(0, 0.4), method="bounded", options={"xatol": 1e-9},
    )  # fmt: skip
    np.testing.assert_allclose(found["shares"], [best.x, 1 - best.x, 0.0], atol=1e-5)
    assert found["loss"][0] == pytest.approx(best.fun, abs=1e-6)
    printed = mix(*FIT, *SIZED).output
    section = yaml.safe_load(printed[printed.index("shares:") :])["shares"]
    assert list(section) == ["code", "web", "wiki"]
    assert sum(section.values()) == pytest.approx(1.0, abs=2e-6)
    assert "code" in printed
    assert "40.00%" in printed  # of code: 4 · 100 of 1,000 tokens at most
    assert "warning: wiki: a share of 0.00% lies outside" in " ".join(printed.split())
    linear = json_of(mix, *FIT, "--form", "linear")
    assert len(linear["families"]["math"]["parameters"]) == 3
    assert linear["families"]["math"]["left_out_error"] > 0.01


@pytest.mark.usefixtures("swarm")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([*FIT, "losses.csv"], "tables: expected one, or one of shares and one of losses, got 3"),
        ([*FIT, "--form", "cubic"], "form: expected log-linear or linear, got 'cubic'"),
        ([*FIT, "--budget", "10"], "--budget: expected together with --tokens"),
        ([*FIT, "--kl", "0.1"], "kl: expected the tokens of the sources with it"),
        ([*FIT, *SIZED, "--budget", "1e9"], "max_epochs: the caps on repetition leave 0.0% of the budget"),
        ([*FIT, "--weight", "code=1"], "weights: 'code': expected one of chat, math"),
        ([*FIT, "--weight", "math=x"], "--weight: expected FAMILY=NUMBER"),
        ([*FIT, "--weight", "math=-1"], "weights: expected numbers ≥ 0, of which one is above 0"),
        (
            [*FIT, "--tokens", "about.yaml:sources.sizes"],
            "about.yaml:sources.sizes: expected a mapping there, got None",
        ),
        ([*FIT, "--tokens", "about.yaml:sources"], "--tokens: tokens: expected a number above 0"),
        ([*FIT, "--tokens", "about.yaml:odd"], "--tokens: code: expected a number above 0, got nan"),
        ([*FIT[:-1], "about.yaml:sources.tokens"], "--families: code: expected a list of columns, got 100"),
    ],
)
def test_what_does_not_fit_is_one_line(arguments: list[str], expected: str) -> None:
    done = mix(*arguments)
    assert done.exit_code == 2
    (line,) = done.stderr.strip().splitlines()
    assert expected in line


@pytest.mark.slow
def test_a_swarm_proposes_the_best_mixture_of_the_law_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, json_of: Told
) -> None:
    """The program in the trainer's place has losses of web and of books; where their mean is least is known."""
    (tmp_path / "trainer.py").write_text(case.TRAINER)
    command = [sys.executable, str(tmp_path / "trainer.py")]
    monkeypatch.setattr(run, "module", lambda name, *arguments: [*command, *arguments])
    spec = case.write(tmp_path)
    drawn = json_of(mix, "ablate", spec, "--dry-run")
    assert not (tmp_path / "swarm").exists()
    assert [row["run"] for row in drawn] == [f"{number:04}" for number in range(8)]
    assert drawn[0]["shares"] == {"web": 0.5, "books": 0.5}
    found = json_of(mix, "ablate", spec, "weights={web: 1, books: 3}")
    best = minimize_scalar(
        lambda web: 0.25 * (2 + np.exp(0.5 - 1.5 * web)) + 0.75 * (1.5 + np.exp(0.8 - 2.0 * (1 - web))),
        bounds=(0, 1), method="bounded", options={"xatol": 1e-9},
    )  # fmt: skip
    assert found["shares"][0] == pytest.approx(best.x, abs=1e-4)
    proposal = yaml.safe_load((tmp_path / "swarm" / "proposal.yaml").read_text())
    assert proposal == {"data": found["data"]}
    assert json.loads((tmp_path / "swarm" / "fit.json").read_text()) == found
    assert [row["weight"] for row in proposal["data"]] == [round(240 * best.x), 240 - round(240 * best.x)]
    large = yaml.safe_load((tmp_path / "large.yaml").read_text())
    (tmp_path / "large.yaml").write_text(yaml.safe_dump(large | proposal))
    plan = json_of(mix, "show", tmp_path / "large.yaml")
    assert [row["samples"] for row in plan["sources"]] == [row["weight"] for row in proposal["data"]]
    again = json_of(mix, "fit", tmp_path / "swarm" / "runs.csv", "--weight", "web=1", "--weight", "books=3")
    assert again["shares"] == pytest.approx(found["shares"], abs=1e-6)
    printed = mix("ablate", spec).output
    assert "below token shares" in " ".join(printed.split())
    assert yaml.safe_load(printed[printed.index("data:") :])["data"][0]["path"].endswith("tokens/web")


def test_a_weight_of_what_is_not_held_out_is_refused(tmp_path: Path) -> None:
    done = mix("ablate", case.write(tmp_path, runs=5), "weights={wab: 1}")
    assert done.exit_code == 2
    assert "weights: 'wab': expected one of web, books" in done.stderr
    assert not (tmp_path / "swarm").exists()
