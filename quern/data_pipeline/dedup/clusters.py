"""Connected components: which documents belong together, whoever of them is kept."""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

__all__ = ["components"]


def components(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``(nodes, labels)``: every node of the edges, ascending, and the smallest node that each is connected to.

    Edge i joins ``a[i]`` and ``b[i]`` (int64); so are nodes and labels. One process, about 100 bytes an edge.
    """
    nodes, ends = np.unique(np.concatenate((a, b)), return_inverse=True)
    if len(nodes) == 0:
        return nodes, nodes
    half = len(a)
    graph = coo_array((np.ones(half), (ends[:half], ends[half:])), shape=(len(nodes), len(nodes)))
    count, label = connected_components(graph, directed=False)
    smallest = np.full(count, np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(smallest, label, nodes)
    return nodes, smallest[label]
