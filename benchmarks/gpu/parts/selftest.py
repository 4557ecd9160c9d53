"""The cases of ``quern selftest`` that one rank can run: the trainer on this device beside itself, in float64."""

from __future__ import annotations

from typing import Any

from parts.common import gpu
from quern.train.parity.check import check_cases
from quern.train.parity.matrix import everything


def cases(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Every ``every``-th of the one-rank cases, from ``first`` on; what is computed first is the reference of the
    rest."""
    alone = [case for case in everything() if case.on.world == 1]
    found = []
    for result in check_cases(alone[spec["first"] :: spec["every"]], device=gpu(spec).type):
        worst = result.comparison.ratio if result.comparison.worst else None
        found.append({
            "case": str(result.case), "worst ratio": worst, "passes": result.passed is not False,
            "problems": "; ".join(problem.splitlines()[-1] for problem in result.comparison.problems[:3]) or None,
        })  # fmt: skip
    return found
