"""Leave-one-out errors of mixing laws on Olmix's swarm, beside linear regression and gradient-boosted trees.

    python benchmarks/mixing_laws.py FOLDER [--planted 100] [--json]

FOLDER has dclm_ratios.csv, dclm_metrics.csv and dclm_per_family.yaml of Olmix (2602.12237; allenai/olmix on Hugging
Face and GitHub): 127 runs of 30M-parameter models on mixtures of 24 domains, bits a byte. A family's loss is the mean
of its tasks, without those that Olmix drops. Every law predicts each run from all the others, but for the one run that
alone reads a domain. Trees need scikit-learn, which is no dependency of quern; without it they are left out, and that
is said. ``--planted``: of so many planted laws with noise, how many parameters, other mixtures and proposals are within
their 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.stats import spearmanr, t

from quern.mixtures.laws.fit import Floats, by_parameters, fit, losses
from quern.mixtures.laws.propose import Wish, propose
from quern.mixtures.laws.tables import read_runs


def read(folder: Path) -> tuple[list[str], Floats, dict[str, Floats], dict[str, Any]]:
    """Domains, mixtures [127, 24], the loss [127] of each family, and Olmix's config."""
    about = yaml.safe_load((folder / "dclm_per_family.yaml").read_text())
    names = list(about["priors"]["token_counts"])
    dropped = set(about["filtering"]["drop_metrics"])
    tasks = {name: [task for task in own if task not in dropped] for name, own in about["eval"]["tasks"].items()}
    runs = read_runs([str(folder / f"dclm_{kind}.csv") for kind in ("ratios", "metrics")], "run", names, tasks)
    return names, runs.mixtures, dict(runs.losses), about


def trees(mixtures: Floats, measured: Floats, rows: NDArray[np.intp]) -> Floats | None:
    """Leave-one-out errors of gradient-boosted trees; None without scikit-learn."""
    try:
        from sklearn.ensemble import GradientBoostingRegressor
    except ImportError:
        return None
    off = []
    for out in rows:
        keep = np.arange(len(measured)) != out
        model = GradientBoostingRegressor(n_estimators=300, learning_rate=0.05, max_depth=3, random_state=0)
        model.fit(mixtures[keep], measured[keep])
        off.append(measured[out] - model.predict(mixtures[[out]])[0])
    return np.array(off)


def figures(measured: Floats, off: Floats) -> dict[str, float]:
    spread = np.sum((measured - measured.mean()) ** 2)
    return {
        "error": float(np.sqrt(np.mean(off**2))),
        "explained": float(1 - np.sum(off**2) / spread),
        "rank": float(spearmanr(measured, measured - off).statistic),
    }


def compare(folder: Path) -> list[dict[str, Any]]:
    names, mixtures, families, _ = read(folder)
    found = []
    for family, measured in families.items():
        left = fit("linear", mixtures, measured, names).left
        sides: dict[str, Callable[[], Floats | None]] = {
            "linear": lambda y=measured: fit("linear", mixtures, y, names).left_out,
            "log-linear": lambda y=measured: fit("log-linear", mixtures, y, names).left_out,
            "trees": lambda y=measured, left=left: trees(mixtures, y, np.flatnonzero(left)),
        }
        for side, work in sides.items():
            begin = time.perf_counter()
            off = work()
            if off is None:
                found.append({"family": family, "law": side, "error": None})
                continue
            off = off if len(off) == left.sum() else off[left]
            row = {"family": family, "law": side, "runs": int(left.sum()), "seconds": time.perf_counter() - begin}
            found.append(row | figures(measured[left], off))
    return found


def planted(draws: int, sources: int = 4, runs: int = 32, noise: float = 0.01) -> dict[str, float]:
    """Shares of what is within its 95 % interval, over pairs of log-linear laws."""
    counts: dict[str, list[bool]] = {"parameters": [], "other mixtures": [], "proposals": []}
    names = [str(number) for number in range(sources)]
    for draw in range(draws):
        random = np.random.default_rng([13, draw])
        mixtures = random.dirichlet(np.ones(sources), runs)
        laws = {name: np.r_[random.uniform(0.5, 2.0), random.uniform(-2.0, 1.0, sources)] for name in "ab"}
        fits = {}
        for name, law in laws.items():
            measured = losses("log-linear", law, mixtures) + noise * random.normal(size=runs)
            one = fits[name] = fit("log-linear", mixtures, measured, names)
            reach = t.ppf(0.975, one.freedom)
            counts["parameters"] += list(abs(one.parameters - law) <= reach * np.sqrt(np.diag(one.covariance)))
            for other in random.dirichlet(np.ones(sources), 10):
                off = abs(float(losses("log-linear", one.parameters, other)) - float(losses("log-linear", law, other)))
                slopes = by_parameters("log-linear", one.parameters, other[None])[0]
                counts["other mixtures"].append(bool(off <= reach * np.sqrt(slopes @ one.covariance @ slopes)))
        best = propose(fits, mixtures, names, Wish({"a": 0.5, "b": 0.5}, np.full(sources, 0.6)))
        true = sum(0.5 * float(losses("log-linear", law, best.shares)) for law in laws.values())
        counts["proposals"].append(abs(best.loss[0] - true) <= best.loss[1])
    return {name: float(np.mean(own)) for name, own in counts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--planted", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = compare(given.folder)
    shares = planted(given.planted) if given.planted else {}
    if given.json:
        print(json.dumps({"olmix": rows, "planted": shares}, indent=2))
        return
    print(f"{'family':8} {'law':12} {'error':>8} {'explained':>10} {'rank':>7} {'seconds':>8}")
    for row in rows:
        if row["error"] is None:
            print(f"{row['family']:8} {row['law']:12} not measured: pip install scikit-learn")
        else:
            told = f"{row['error']:8.4f} {row['explained']:10.1%} {row['rank']:7.3f} {row['seconds']:8.2f}"
            print(f"{row['family']:8} {row['law']:12} {told}")
    for name, share in shares.items():
        print(f"{name}: {share:.1%} within their 95 % intervals, of {given.planted} planted pairs of laws")


if __name__ == "__main__":
    main()
