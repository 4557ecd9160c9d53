"""The layouts of the parity matrix, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from quern.parallel.planning.context import Method

__all__ = ["CONTEXT", "DEALT", "LAYOUTS", "Layout"]


@dataclass(frozen=True)
class Layout:
    """How ranks share the work."""

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    pp: int = 1
    reshard: bool | int | None = None
    """Null: true, and false in a pipeline."""
    zero: int | None = None
    """In place of it."""
    grouped: bool = True
    """Whether there is a process group."""
    cp: int = 1
    method: Method = "ulysses"
    heads: int | None = None
    """Of ``usp``, the ranks that exchange heads."""
    ep: int = 1
    """Of the shards, those that hold other experts each."""
    node: int | None = None
    """Of ``ep``, those to which a token travels once."""

    @property
    def world(self) -> int:
        return self.replicate * self.shards * self.tp * self.pp

    @property
    def shards(self) -> int:
        """Ranks over which FSDP2 deals weights out."""
        return self.shard * self.cp

    @property
    def splits_heads(self) -> int:
        """Ranks over which heads are split."""
        return self.tp * (self.heads or (self.cp if self.method == "ulysses" else 1))

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """(pp, replicate, shard, tp) of a rank: the last differs fastest. ``cp`` is a part of the shard."""
        rest, tp = divmod(rank, self.tp)
        rest, shard = divmod(rest, self.shards)
        pp, replicate = divmod(rest, self.replicate)
        return pp, replicate, shard, tp


LAYOUTS = {
    "alone": Layout(grouped=False),
    "one": Layout(),
    "ddp2": Layout(replicate=2),
    "ddp3": Layout(replicate=3),
    "ddp4": Layout(replicate=4),
    "fsdp2": Layout(shard=2),
    "fsdp2keep": Layout(shard=2, reshard=False),
    "fsdp2zero1": Layout(shard=2, zero=1),
    "fsdp2zero2": Layout(shard=2, zero=2),
    "fsdp2zero3": Layout(shard=2, zero=3),
    "fsdp3": Layout(shard=3),
    "fsdp4": Layout(shard=4),
    "fsdp4keep": Layout(shard=4, reshard=False),
    "fsdp4by2": Layout(shard=4, reshard=2),
    "fsdp5": Layout(shard=5),
    "fsdp7": Layout(shard=7),
    "hsdp2x2": Layout(2, 2),
    "hsdp2x2keep": Layout(2, 2, reshard=False),
    "hsdp2x2zero1": Layout(2, 2, zero=1),
    "hsdp3x2": Layout(3, 2),
    "tp2": Layout(tp=2),
    "tp4": Layout(tp=4),
    "fsdp2tp2": Layout(shard=2, tp=2),
    "fsdp2tp2keep": Layout(shard=2, tp=2, reshard=False),
    "fsdp2tp2zero1": Layout(shard=2, tp=2, zero=1),
    "fsdp3tp2": Layout(shard=3, tp=2),
    "ddp2tp2": Layout(replicate=2, tp=2),
    "hsdp2x2tp2": Layout(2, 2, tp=2),
    "pp2": Layout(pp=2),
    "pp4": Layout(pp=4),
    "pp2fsdp2": Layout(shard=2, pp=2),
    "pp4fsdp2": Layout(shard=2, pp=4),
    "pp2tp2": Layout(tp=2, pp=2),
    "pp4tp2": Layout(tp=2, pp=4),
    "pp2ddp2": Layout(replicate=2, pp=2),
    "pp2fsdp2tp2": Layout(shard=2, tp=2, pp=2),
}

_BESIDE: dict[str, dict[str, Any]] = {
    "": {}, "keep": {"reshard": False}, "fsdp2": {"shard": 2}, "hsdp2": {"replicate": 2}, "tp2": {"tp": 2},
    "pp2": {"pp": 2}, "pp2tp2": {"pp": 2, "tp": 2},
}  # fmt: skip
#: Layouts that deal tokens out, on which :func:`quern.train.parity.matrix.context` runs a few cases of its own.
CONTEXT: dict[str, Layout] = {
    f"{name}{beside}": replace(ways, **sizes)
    for name, ways in {
        "ulysses2": Layout(cp=2), "gather2": Layout(cp=2, method="allgather"), "ring2": Layout(cp=2, method="ring"),
        "ring3": Layout(cp=3, method="ring"), "gather4": Layout(cp=4, method="allgather"),
        "usp2x2": Layout(cp=4, method="usp", heads=2),
    }.items()
    for beside, sizes in _BESIDE.items()
}  # fmt: skip

#: Layouts that deal experts out, for :func:`quern.train.parity.matrix.sparse`.
DEALT: dict[str, Layout] = {
    "ep2": Layout(shard=2, ep=2), "ep2keep": Layout(shard=2, ep=2, reshard=False), "ep4": Layout(shard=4, ep=4),
    "ep8": Layout(shard=8, ep=8), "ep4node2": Layout(shard=4, ep=4, node=2),
    "ep8node4": Layout(shard=8, ep=8, node=4), "ep2fsdp2": Layout(shard=4, ep=2),
    "ep2fsdp2zero1": Layout(shard=4, ep=2, zero=1), "ep2fsdp3": Layout(shard=6, ep=2),
    "ep2hsdp2": Layout(2, 2, ep=2), "ep2hsdp2x2": Layout(2, 4, ep=2), "ep2tp2": Layout(shard=2, tp=2, ep=2),
    "ep2fsdp2tp2": Layout(shard=4, tp=2, ep=2), "ep2pp2": Layout(shard=2, pp=2, ep=2),
    "ep2pp2tp2": Layout(shard=2, pp=2, tp=2, ep=2), "ep2ulysses2": Layout(cp=2, ep=2),
    "ep4ring2": Layout(shard=2, cp=2, method="ring", ep=4),
    "ep2gather2fsdp2": Layout(shard=2, cp=2, method="allgather", ep=2),
}  # fmt: skip
