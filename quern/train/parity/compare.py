"""Assembles whole tensors from the ranks' pieces, and measures their distance from one process's tensors.

Which rank holds what is stated here by name, not read off the tensors, so that the code under test cannot affect it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quern.train.parity.matrix import VOCAB_SIZE, Case
from quern.train.parity.run import Outcome, Table
from quern.train.parity.sizes import EXPERTS

__all__ = ["FIRST_GRADIENT", "TOLERANCE", "Comparison", "compare", "ratio_of", "whole"]

TOLERANCE = 1e-10
FIRST_GRADIENT = 1e-12
"""Before any update nothing but the order of sums can differ. Later gradients follow weights that AdamW's g/√v has
moved apart where g is tiny."""
_LIMITS = {"first gradient": FIRST_GRADIENT, "lr": 1e-15}

_BY_ROWS = re.compile(r"(embed|head|tied)\.weight|blocks\.\d+\.(attention\.wq|ffn\.(shared\.)?w[13])\.weight")
_BY_COLUMNS = re.compile(r"blocks\.\d+\.(attention\.wo|ffn\.(shared\.)?w2)\.weight")
_OF_EXPERTS = re.compile(r"blocks\.\d+\.ffn\.experts\.(w[123])")
_KEYS_VALUES = re.compile(r"blocks\.\d+\.attention\.w[kv]\.weight")
_PADDED = ("embed.weight", "head.weight")
_EXACT = ("step", "data_step", "valid_tokens", "skipped", "non_finite")
_CLOSE = {"loss": "loss", "grad_norm": "norm", "lr": "lr", "z_loss": "z-loss"}


@dataclass
class Comparison:
    """``worst``: of every kind of figure the greatest max|a − b| / max|b|, and where it is. ``problems``: what is
    more than it may be, and all else that differs."""

    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The worst ratio of all figures."""
        return max((ratio for ratio, _ in self.worst.values()), default=0.0)

    def equal(self, what: str, a: Any, b: Any) -> None:
        if a != b:
            self.problems.append(f"{what}: {a!r}, expected {b!r}")

    def close(self, kind: str, where: str, a: torch.Tensor, b: torch.Tensor) -> None:
        ratio, most = ratio_of(a, b), _LIMITS.get(kind, TOLERANCE)
        if ratio >= self.worst.get(kind, (-1.0, ""))[0]:
            self.worst[kind] = ratio, where
        if not ratio <= most:
            self.problems.append(f"{kind} of {where}: {ratio:.1e}, expected at most {most:.0e}")

    def __str__(self) -> str:
        return ", ".join(f"{kind} {ratio:.1e} ({where})" for kind, (ratio, where) in self.worst.items())


def ratio_of(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a − b| / max|b|. Infinite where sizes or dtypes differ, where something is not a number, and where zero is
    not exactly zero."""
    if a.shape != b.shape or a.dtype != b.dtype or not a.isfinite().all():
        return math.inf
    if not a.numel():
        return 0.0
    off, scale = (a - b).abs().max().item(), b.abs().max().item()
    return 0.0 if off == 0 else off / scale if scale else math.inf


def compare(case: Case, by_rank: Sequence[Outcome], expected: Outcome) -> Comparison:
    """The outcomes of a case's ranks, in their order, against the whole outcome of one process."""
    found = Comparison()
    outcome = whole(case, by_rank, found)
    found.equal("ledger", _steady(outcome.kinds), _steady(expected.kinds))
    found.equal("steps", len(outcome.rows), len(expected.rows))
    for row, other in zip(outcome.rows, expected.rows, strict=False):
        where = f"step {other['step']}"
        for name in _EXACT:
            found.equal(f"{where} {name}", row[name], other[name])
        for name, kind in _CLOSE.items():
            if row.get(name) is None or other.get(name) is None:  # JSON has no NaN
                found.equal(f"{where} {name}", row.get(name), other.get(name))
            else:
                found.close(kind, where, _scalar(row[name]), _scalar(other[name]))
    found.equal("routers", sorted(outcome.routers), sorted(expected.routers))
    for name in expected.routers.keys() & outcome.routers.keys():
        found.close("router", name, outcome.routers[name], expected.routers[name])
    tables, others = outcome.tables, expected.tables
    found.equal("tables", list(tables), list(others))
    for what in (name for name in others if name in tables):
        _compare_tables(found, what, tables[what], others[what])
    for what, table in expected.written.items():
        _compare_tables(found, what, outcome.written.get(what, {}), table)
    return found


def _compare_tables(found: Comparison, what: str, table: Table, other: Table) -> None:
    found.equal(f"names of {what}", sorted(table), sorted(other))
    kind, _, step = what.partition(" step ")
    kind = "first gradient" if step == "0" else kind
    for name in (name for name in other if name in table):
        where = f"{name} step {step}" if step else name
        found.close(kind, where, table[name], other[name])
        if kind != "updates" and name in _PADDED and table[name][VOCAB_SIZE:].count_nonzero():
            found.problems.append(f"{kind} of {where}: padding is not zero")


def _steady(kinds: Sequence[str]) -> list[str]:
    return [kind for kind in kinds if kind != "order"]


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def whole(case: Case, by_rank: Sequence[Outcome], found: Comparison) -> Outcome:
    """Rank 0's outcome with whole tensors. What ranks should hold alike and do not goes to ``found.problems``."""
    layout = case.on
    places = {layout.coordinates(rank): outcome for rank, outcome in enumerate(by_rank)}
    for (pp, replicate, shard, tp), outcome in places.items():
        if outcome.digest != places[pp, 0, shard, tp].digest:
            found.problems.append(f"replica {replicate} of stage {pp}, shard {shard}, tp {tp} holds other bits")
    first = by_rank[0]
    routers: Table = {}
    for outcome in by_rank:
        for name, tensor in outcome.routers.items():
            if not torch.equal(routers.setdefault(name, tensor), tensor):
                found.problems.append(f"{name} of a router: ranks hold other bits")
    joined: dict[str, Table] = {}
    for what in first.tables:
        table: Table = {}
        for pp in range(layout.pp):
            pieces = {
                (shard, tp): places[pp, 0, shard, tp].tables[what]
                for shard in range(layout.shards)
                for tp in range(layout.tp)
            }
            for name in pieces[0, 0]:
                tensor = _joined(case, name, {place: own[name] for place, own in pieces.items()}, found, what)
                name = "embed.weight" if name == "tied.weight" else name
                if name not in table:
                    table[name] = tensor
                elif not (name == "embed.weight" and case.tied and pp in (0, layout.pp - 1)):
                    found.problems.append(f"{what} of {name}: on several stages")
                elif not torch.equal(table[name], tensor):
                    found.problems.append(f"{what} of {name}: tied embeddings are not the same bits at both ends")
        joined[what] = table
    gradients = [table for what, table in joined.items() if what.startswith("gradient")]
    return Outcome(
        first.package, first.rows, first.kinds, gradients, joined["weight"], joined["first moment"],
        joined["second moment"], joined["updates"], first.written, routers,
    )  # fmt: skip


def _joined(
    case: Case, name: str, pieces: Mapping[tuple[int, int], torch.Tensor], found: Comparison, what: str
) -> torch.Tensor:
    """One tensor: rows over tp first and over shards within; columns over tp; or all of it on every tp rank."""
    layout = case.on
    if pieces[0, 0].ndim == 0:
        for place, piece in pieces.items():
            found.equal(f"{what} of {name} on {place}", piece.item(), pieces[0, 0].item())
        return pieces[0, 0]
    model = dict(case.computation.model)
    if of_experts := _OF_EXPERTS.fullmatch(name):
        return _experts(case, of_experts[1] == "w2", pieces, model["dim"])
    columns = [torch.cat([pieces[shard, tp] for shard in range(layout.shards)]) for tp in range(layout.tp)]
    kv_heads = model["num_kv_heads"]
    if _BY_COLUMNS.fullmatch(name):
        return torch.cat(columns, dim=1)
    if _BY_ROWS.fullmatch(name) or (_KEYS_VALUES.fullmatch(name) and kv_heads >= layout.tp):
        return torch.cat(columns)
    if any(not torch.equal(column, columns[0]) for column in columns):
        found.problems.append(f"{what} of {name}: tp ranks hold other bits")
    return columns[0]


def _experts(case: Case, back: bool, pieces: Mapping[tuple[int, int], torch.Tensor], dim: int) -> torch.Tensor:
    """One weight [experts, rows, columns]: whole experts over ``ep``, of its rows or columns those of their width over
    tp, and over the shards that are left experts, or where they do not divide these the model's width. ``back``: the
    one that leads there."""
    layout, left = case.on, case.on.shards // case.on.ep
    number = EXPERTS[str(case.experts)][0]["num_experts"] // layout.ep
    along = 0 if number % left == 0 or dim % left else 1 if back else 2
    ways = []
    for tp in range(layout.tp):
        own = [[pieces[shard * layout.ep + ep, tp] for shard in range(left)] for ep in range(layout.ep)]
        ways.append(torch.cat([torch.cat(shards, dim=along) for shards in own]))
    return torch.cat(ways, dim=2 if back else 1)
