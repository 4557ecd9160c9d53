"""The best mixtures of planted laws by cvxpy, which knows nothing of :mod:`quern.mixtures.laws`.

    python tests/support/oracles/mixing_proposals.py        (where cvxpy is installed; it is no dependency)

writes tests/data/mixing_proposals.json: problems as plain numbers, with the shares that cvxpy finds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).parents[2] / "data" / "mixing_proposals.json"


def problems() -> list[dict[str, Any]]:
    """Laws of k families (constants, slopes [k, m]), weights, caps on shares, a prior, and the weight of the KL term.

    With as many families as sources, or a KL term, there is one best mixture.
    """
    found = []
    for seed in range(24):
        random = np.random.default_rng([2602, seed])
        m = int(random.integers(2, 13))
        kl = [0.0, 0.05][seed % 2]
        k = int(random.integers(1, 4)) if kl else m + int(random.integers(0, 3))
        caps = np.minimum(random.uniform(0.05, 1.0, m), 1.0)
        if caps.sum() < 1.05:
            caps *= 1.3 / caps.sum()
        found.append(
            {
                "constants": random.uniform(0.5, 2.0, k).round(6).tolist(),
                "slopes": random.normal(-0.5, 1.5, (k, m)).round(6).tolist(),
                "weights": (np.ones(k) / k if seed % 3 else random.dirichlet(np.ones(k))).tolist(),
                "caps": np.minimum(caps, 1.0).round(6).tolist(),
                "prior": random.dirichlet(np.full(m, 2.0)).tolist(),
                "kl": kl,
            }
        )
    return found


def solve(problem: dict[str, Any]) -> list[float] | None:
    """The shares, by Clarabel to 12 digits of the aim; None where it says that it did not reach them."""
    import cvxpy as cp

    slopes, weights = np.array(problem["slopes"]), np.array(problem["weights"])
    shares = cp.Variable(slopes.shape[1])
    aim = cp.sum(cp.multiply(weights, cp.exp(slopes @ shares))) + weights @ np.array(problem["constants"])
    if problem["kl"]:
        aim += problem["kl"] * cp.sum(cp.kl_div(shares, np.array(problem["prior"])))
    bounds = [cp.sum(shares) == 1, shares >= 0, shares <= np.array(problem["caps"])]
    task = cp.Problem(cp.Minimize(aim), bounds)
    task.solve(solver=cp.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
    return [float(share) for share in shares.value] if task.status == "optimal" else None


if __name__ == "__main__":
    rows = [{**problem, "shares": shares} for problem in problems() if (shares := solve(problem)) is not None]
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
