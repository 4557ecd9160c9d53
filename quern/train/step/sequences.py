"""The losses of a step's sequences, cut into pieces along the sequence, of one rank or of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["PIECES", "Sequences", "cut", "highest", "joined", "medians", "piece_tokens"]

PIECES = 64
"""Into which a sequence is cut, at most: of a sequence that stands out, the file says where."""


@dataclass(frozen=True)
class Sequences:
    """Of one step, of one rank or of all; S sequences."""

    columns: dict[str, NDArray[np.int64]]
    """By name, each [S]."""
    nats_S: NDArray[np.float64]
    targets_S: NDArray[np.int64]
    pieces: dict[int, tuple[NDArray[np.float64], NDArray[np.int64]]]
    """By place, nats and targets [P] of those that stand out."""

    @property
    def means(self) -> NDArray[np.float64]:
        """Nats a target; NaN where there is none."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.nats_S / self.targets_S


def piece_tokens(seq_len: int) -> int:
    """Tokens of a piece; the last one of a sequence may have fewer."""
    return -(-seq_len // PIECES)


def cut(values_MBL: Tensor) -> Tensor:
    """Sums of pieces [M, B, P]."""
    length = values_MBL.shape[-1]
    size = piece_tokens(length)
    if size == 1:
        return values_MBL
    if short := -length % size:
        values_MBL = pad(values_MBL, (0, short))
    return values_MBL.unflatten(-1, (-1, size)).sum(-1)


def highest(values_S: NDArray[np.float64], targets_S: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Where the highest values are, what is not finite first; sequences without a target are not among them."""
    with_targets = np.flatnonzero(targets_S)
    ranked = np.where(np.isfinite(values_S), values_S, np.inf)[with_targets]
    return with_targets[np.argsort(-ranked, kind="stable")[:most]]


def joined(shares: Sequence[Sequences]) -> Sequences:
    """All ranks' sequences of a step, by place."""
    columns = {name: np.concatenate([share.columns[name] for share in shares]) for name in shares[0].columns}
    order = np.argsort(columns["place"], kind="stable")
    pieces = {place: own for share in shares for place, own in share.pieces.items()}
    return Sequences(
        {name: column[order] for name, column in columns.items()},
        np.concatenate([share.nats_S for share in shares])[order],
        np.concatenate([share.targets_S for share in shares])[order],
        pieces,
    )


def medians(steps: Sequence[Sequences]) -> dict[int, float]:
    """The median loss of the sequences of each source, over all steps."""
    sources = np.concatenate([step.columns["source"] for step in steps])
    means = np.concatenate([step.means for step in steps])
    finite = np.isfinite(means)
    return {int(source): float(np.median(means[finite & (sources == source)])) for source in np.unique(sources[finite])}
