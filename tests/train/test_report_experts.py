"""The maps of experts on a training run's page, against counts that are put into its metrics, by json alone."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quern.train.report import write_report
from quern.train.report.history import open_run
from support.train.report_case import STEPS, Made, Page

LAYERS, EXPERTS = (1, 3, 10), 6


def counts_at(step: int, attempt: int) -> list[list[int]]:
    """Of layer 3 expert 2 is dead from step 30 on, of layer 10 expert 5 has nearly everything at the end."""
    found = np.random.default_rng(1000 * attempt + step).integers(20, 60, (len(LAYERS), EXPERTS))
    if step >= 30:
        found[1, 2] = 0
    found[2, 5] += 40 * step
    return [list(map(int, row)) for row in found]


def sparse(path: Path) -> Made:
    made = Made(path)
    for row in made.rows:
        if row["kind"] == "step":
            counts = counts_at(row["step"], row["attempt"])
            greatest = {str(n): max(own) / (sum(own) / EXPERTS) for n, own in zip(LAYERS, counts, strict=True)}
            row["experts"] = {"unused": sum(own.count(0) for own in counts), "max_over_mean_of_layer": greatest}
            if row["step"] % 2 or row["step"] == STEPS - 1:
                row["experts"]["counts"] = counts
    made.write()
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return sparse(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def page(made: Made) -> Page:
    return Page(Path(write_report(str(made.path))).read_text())


def maps(page: Page) -> dict[str, Any]:
    """By what the maps are of: ``last``, ``greatest`` and ``experts`` (a list by layer)."""
    (found,) = (json.loads(script) for script in page.scripts if script.startswith('{"levels"'))
    last, greatest, *experts = found["maps"]
    return {"levels": found["levels"], "last": last, "greatest": greatest, "experts": experts}


def spans(own: dict[str, Any]) -> list[tuple[int, int]]:
    """First and last step of each column."""
    return [*zip(own["x"], [*(first - 1 for first in own["x"][1:]), STEPS - 1], strict=True)]


def said(letter: str, levels: str) -> float:
    return {"0": 0.0, "-": math.nan}[letter] if letter in "0-" else 2 ** ((levels.index(letter) - 18) / 6)


def near(letters: str, levels: str, values: list[float]) -> None:
    """A letter is a twelfth of a power of two away at most, between 1/8 and 8."""
    assert len(letters) == len(values)
    for letter, value in zip(letters, values, strict=True):
        shown = said(letter, levels)
        assert shown == value == 0 or abs(math.log2(shown / min(max(value, 1 / 8), 8))) <= 1 / 12 + 1e-9


def over_mean(row: list[int]) -> list[float]:
    return [value / (sum(row) / EXPERTS) for value in row]


def test_the_maps_are_those_of_the_counts_of_the_present_branch(made: Made, page: Page) -> None:
    found, present = maps(page), made.present()
    assert found["last"]["y"] == found["greatest"]["y"] == list(LAYERS)
    assert [own["title"] for own in found["experts"]] == [f"experts of layer {n} over the run" for n in LAYERS]
    for letters, row in zip(found["last"]["rows"], present[STEPS - 1]["experts"]["counts"], strict=True):
        near(letters, found["levels"], over_mean(row))
    for n, layer in enumerate(LAYERS):
        values = [present[step]["experts"]["max_over_mean_of_layer"][str(layer)] for step in range(STEPS)]
        near(found["greatest"]["rows"][n], found["levels"], values)
    assert found["greatest"]["x"] == list(range(STEPS))
    counted = [step for step in range(STEPS) if "counts" in present[step]["experts"]]
    assert all(own["x"] == counted for own in found["experts"])
    assert counted != list(range(STEPS))
    for n in range(len(LAYERS)):
        for expert in range(EXPERTS):
            values = [over_mean(present[step]["experts"]["counts"][n])[expert] for step in counted]
            near(found["experts"][n]["rows"][expert], found["levels"], values)
    assert set(found["experts"][1]["rows"][2]) > {"0"}  # dead in the second half alone


def test_the_table_names_dead_and_overloaded_experts(page: Page) -> None:
    _, *rows = page.rows["experts"]
    assert [row[0] for row in rows] == ["3", "10", "1"]
    assert rows[0][1:3] == ["1", "2"]
    last = counts_at(STEPS - 1, 2)[2]
    assert rows[1][1:] == ["0", "–", f"{max(over_mean(last)):.2f}", "5", f"{min(over_mean(last)):.2f}"]
    assert f"At step {STEPS - 1}, 1 of {len(LAYERS) * EXPERTS} experts had no token." in page.text


def test_figures_of_layers_are_in_the_map_and_in_no_chart(page: Page) -> None:
    (chart,) = (chart for chart in page.curves["charts"] if chart["title"] == "Experts")
    assert [line["label"] for line in chart["series"]] == ["unused"]


def test_a_map_of_a_long_run_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of a column's steps are added up; of the greatest loads none is lost."""
    from quern.train.report import experts

    made = sparse(tmp_path / "run")
    monkeypatch.setattr(experts, "_COLUMNS", 7)
    monkeypatch.setattr(experts, "_CELLS", 5 * len(LAYERS) * EXPERTS)
    found, present = maps(Page(Path(write_report(str(made.path))).read_text())), made.present()
    greatest, experts_of = found["greatest"], found["experts"]
    assert [len(own) for own in (greatest["x"], greatest["rows"][0], experts_of[0]["x"])] == [7, 7, 5]
    for n, layer in enumerate(LAYERS):
        own = [present[step]["experts"]["max_over_mean_of_layer"][str(layer)] for step in range(STEPS)]
        near(found["greatest"]["rows"][n], found["levels"], [max(own[a : b + 1]) for a, b in spans(greatest)])
        for column, (first, last) in enumerate(spans(experts_of[n])):
            inside = [row["experts"]["counts"][n] for step, row in present.items()
                      if first <= step <= last and "counts" in row["experts"]]  # fmt: skip
            together = over_mean(list(map(sum, zip(*inside, strict=True))))
            near("".join(own[column] for own in experts_of[n]["rows"]), found["levels"], together)


@pytest.mark.parametrize("counts", ["x", [[1, 2], [3]], [[-1, 2]], [1, 2], [[1.5, 2]], [[10**30, 1]], []])
def test_counts_that_are_none_are_left_out(made: Made, tmp_path: Path, counts: Any) -> None:
    folder = tmp_path / "run"
    shutil.copytree(made.path, folder)
    row = {**made.rows[-1], "step": STEPS, "kind": "step", "attempt": 2, "experts": {"counts": counts}}
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    without, found = (maps(Page(Path(write_report(str(own))).read_text())) for own in (made.path, folder))
    assert found["last"] == without["last"]
    assert open_run(str(folder)).metrics.damaged == ()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_draws_both_maps(made: Made, page: Page) -> None:
    """The colours of dead and even experts are in the picture's pixels only where the script has drawn them."""
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,9000",
         "--virtual-time-budget=5000", "--enable-logging=stderr", "--dump-dom", (made.path / "report.html").as_uri()],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    sizes = re.findall(r'<canvas [^>]*height="(\d+)"[^>]*Loads|<canvas [^>]*Loads[^>]*height="(\d+)"', done.stdout)
    assert ["".join(own) for own in sizes] == [str(18 * len(LAYERS) + 40)] * 2
