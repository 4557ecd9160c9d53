"""A profile as plain data, the content of ``profile.json``. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quern.errors import InputError
from quern.train.profiling.account import Account
from quern.train.profiling.classes import CLASSES, COMMUNICATION
from quern.train.profiling.losses import Limits, Setting, losses
from quern.train.profiling.products import Product

__all__ = ["describe_rank", "describe_ranks", "of_traces", "slowest"]

#: How many of the longest are listed.
_LISTED = 20


def slowest(accounts: Sequence[Account]) -> Account:
    """The rank that was busy itself the longest: the one that the others wait for."""
    return max(accounts, key=lambda account: account.own_ns / len(account.steps))


def of_traces(accounts: Sequence[Account]) -> dict[str, Any]:
    """Of traces from elsewhere, one a rank: without ceilings, which are another machine's.

    Raises:
        InputError: two are of one rank.
    """
    ranks = [account.rank for account in accounts]
    if twice := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        raise InputError(f"--trace: expected one trace a rank, got {ranks.count(twice[0])} of rank {twice[0]}")
    return describe_ranks(sorted(accounts, key=lambda account: account.rank), Limits(), Setting())


def describe_ranks(accounts: Sequence[Account], limits: Limits, setting: Setting) -> dict[str, Any]:
    """Of rank 0 and the slowest in full, of all what they had to do themselves."""
    shown = {account.rank: account for account in (accounts[0], slowest(accounts))}
    return {
        "slowest": slowest(accounts).rank,
        "own_s": {str(account.rank): account.own_ns / len(account.steps) / 1e9 for account in accounts},
        "ranks": [describe_rank(account, limits, setting) for account in shown.values()],
        "best_tflops": _tera(limits.best),
        "copy_gb_per_s": None if limits.copy is None else limits.copy / 1e9,
    }


def describe_rank(account: Account, limits: Limits, setting: Setting) -> dict[str, Any]:
    """Seconds are those of a step, the mean of those traced; shares are of the step."""
    steps, total = len(account.steps), account.total_ns

    def timed(ns: float) -> dict[str, float]:
        return {"s": ns / steps / 1e9, "share": ns / total if total else 0.0}

    return {
        "rank": account.rank,
        "device": account.device,
        "steps_s": [step / 1e9 for step in account.steps],
        "step_s": total / steps / 1e9,
        "classes": {kind: timed(account.classes[kind]) for kind in CLASSES},
        "communication": {
            "total": timed(account.communication_ns),
            "exposed": timed(account.classes[COMMUNICATION]),
            "collectives": [
                {"kind": each.kind, "count": each.count / steps, "total": timed(each.total_ns),
                 "exposed": timed(each.exposed_ns)}
                for each in account.collectives
            ],
        },
        "products": [
            timed(product.ns) | {"count": product.count / steps} | _speed(product, limits)
            for product in account.products
        ],
        "operations": [
            timed(each.ns) | {"name": each.name, "class": each.kind, "count": each.count / steps}
            for each in account.operations[:_LISTED]
        ],
        "losses": [
            {"what": each.what, "s": each.seconds, "share": each.share, "remedy": each.remedy}
            for each in losses(account, limits, setting)[:3]
        ],
    }  # fmt: skip


def _speed(product: Product, limits: Limits) -> dict[str, Any]:
    shape = product.shape
    if shape is None:
        return {"shape": None}
    speed, ceiling = product.flops / product.ns * 1e9 if product.ns else None, limits.shapes.get(shape)
    return {
        "shape": str(shape), "m": shape.m, "n": shape.n, "k": shape.k, "batch": shape.batch, "dtype": shape.dtype,
        "scaling": shape.scaling, "tflops": _tera(speed), "ceiling_tflops": _tera(ceiling),
        "of_ceiling": speed / ceiling if speed and ceiling else None,
        "of_best": speed / limits.best if speed and limits.best else None,
    }  # fmt: skip


def _tera(speed: float | None) -> float | None:
    return None if speed is None else speed / 1e12
