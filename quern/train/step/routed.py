"""Tells which experts the documents of a step chose: a rank's counts of some sequences, and those of all ranks together
as plain data.

Shapes: N layers with experts, E experts, S documents of a micro-batch, P documents of a sequence; where documents are
not masked, a whole sequence counts as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quern.parallel.experts.loads import Routed
from quern.train.batches.feed import Origin

__all__ = ["as_plain", "counts_of"]

Counts = Mapping[int, tuple[list[int], NDArray[np.int32]]]
"""By place in the global batch: where the sequence's documents start, and counts [P, N, E]."""


def counts_of(
    routed: Sequence[Routed], origins: Sequence[Origin], places: Sequence[int], seq_len: int, most: int
) -> Counts:
    """What this rank's layers chose for its tokens of the first of the sequences at ``places``: of those that have
    ``most`` numbers together. Waits for the device."""
    held = {int(p): (own, row) for own, at in zip(routed, origins, strict=True) for row, p in enumerate(at.places)}
    found: dict[int, tuple[list[int], NDArray[np.int32]]] = {}
    for place in (place for place in places if place in held):
        own, row = held[place]
        edges = own.edges.cpu().numpy()
        documents = np.flatnonzero((edges[:-1] // seq_len == row) & (np.diff(edges) > 0))
        most -= len(documents) * own.counts_NSE[:, 0].numel()
        if most < 0:
            break
        counts_PNE = own.counts_NSE[:, documents].transpose(0, 1).cpu().numpy()
        found[place] = (edges[documents] - row * seq_len).tolist(), counts_PNE
    return found


def as_plain(
    shares: Sequence[Counts], places: Sequence[int], total_NE: Tensor, layers: Sequence[int], most: int
) -> dict[str, Any]:
    """The counts of all ranks, for the first of ``places`` that have ``most`` numbers together, and of the batch."""
    kept, counts = [], []
    for place in places:
        parts = [own[place] for own in shares if place in own]
        most -= parts[0][1].size if parts else most + 1
        if most < 0:
            break
        kept.append((place, parts[0][0]))
        counts.append(np.sum([part for _, part in parts], axis=0).tolist())
    return {
        "layers": list(layers), "total": total_NE.long().tolist(), "place": [place for place, _ in kept],
        "starts": [starts for _, starts in kept], "counts": counts,
    }  # fmt: skip
