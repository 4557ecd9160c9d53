"""Minimises a smooth convex function of shares: p ≥ 0, p ≤ caps, Σ p = 1, to more digits than general solvers give."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quern.errors import QuernError
from quern.mixtures.laws.fit import Floats

__all__ = ["hull_distance", "minimise"]

_FALL, _LAST = 0.2, 1e-14
"""By how much the weight of the barrier falls at a time, and where it ends, for slopes of at most about 1."""
_STEPS = 100
"""Newton steps for one weight of the barrier; some ten are usual."""


def minimise(slopes: Callable[[Floats], tuple[Floats, Floats]], caps: Floats) -> Floats:
    """The shares [sources] that minimise a convex function; ``slopes`` gives its gradient and Hessian at shares > 0.

    A barrier method (Boyd & Vandenberghe 2004, algorithm 11.1) with dense Newton steps, which only the bounds shorten:
    for tens or hundreds of sources. A share at a bound ends about 1e-14 / (the slope against it) from it. Where many
    mixtures are equally good it ends inside their set. ``caps``: above 0, and more than 1 in all.

    Raises:
        QuernError: it does not converge: the function is not convex or not finite.
    """
    count = len(caps)
    shares = caps / caps.sum()
    scale = max(float(np.abs(slopes(shares)[0]).max()), 1e-300)
    matrix = np.ones((count + 1, count + 1))
    matrix[count, count] = 0.0
    barrier = 1.0
    while barrier > _LAST:
        barrier *= _FALL
        for _ in range(_STEPS):
            room = caps - shares
            gradient, hessian = slopes(shares)
            slope = gradient / scale - barrier / shares + barrier / room
            matrix[:count, :count] = hessian / scale + np.diag(barrier / shares**2 + barrier / room**2)
            step = np.linalg.solve(matrix, np.append(-slope, 1 - shares.sum()))[:count]
            falls = float(-(slope @ step))
            if falls <= 1e-3 * barrier:  # half of it is what is left to gain
                break
            down, up = step < 0, step > 0
            reach = np.concatenate([-shares[down] / step[down], room[up] / step[up]])
            shares = shares + min(1.0, 0.99 * float(reach.min(initial=np.inf))) * step
        else:  # below it is rounding that keeps steps from becoming smaller
            if falls < 1e-12:
                continue
            raise QuernError(f"the best mixture was not found: {falls:.1e} left after {_STEPS} steps")
    return np.asarray(shares / shares.sum())


def hull_distance(mixture: Floats, tried: Floats) -> float:
    """The share of the mixture [sources] that must move to other sources for it to be an average of those that were
    tried [n, sources]: half of the L1 distance to their convex hull, by a linear program; 0 inside."""
    from scipy.optimize import linprog

    count, sources = tried.shape
    matrix = np.zeros((sources + 1, count + 2 * sources))
    matrix[:sources] = np.hstack([tried.T, np.eye(sources), -np.eye(sources)])
    matrix[sources, :count] = 1
    cost = np.r_[np.zeros(count), np.full(2 * sources, 0.5)]
    done = linprog(cost, A_eq=matrix, b_eq=np.append(mixture, 1.0))
    if done.status != 0:
        raise QuernError(f"the distance to the mixtures that were tried was not found: {done.message}")
    return float(done.fun)
