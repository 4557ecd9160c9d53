"""Connected components of similar documents, including those that are kept.

Edges that fit one task go through a library. More go through rounds of two steps, each an exchange of bounded tasks:
Kiveris et al., *Connected Components in MapReduce and Beyond*, SoCC 2014, sections 3 and 4. *Large star* joins every
larger neighbour of a node to the smallest of its neighbours and itself, *small star* every smaller one and the node;
neither changes what is connected, and when neither changes an edge, every component is a star around its smallest node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from quern.data_pipeline.dedup.exchange import Slice, bucket_of_rank
from quern.data_pipeline.dedup.rows import key_starts, made_of
from quern.data_pipeline.dedup.work import DedupInputs, Done

__all__ = ["EDGE", "both_ways", "components", "join_at_once", "star", "star_edges"]

#: One direction of an edge between two ranks.
EDGE = np.dtype([("node", "<i8"), ("other", "<i8")])


def components(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``(nodes, labels)``: every node of the edges, ascending, and the smallest node that each is connected to.

    Edge i joins ``a[i]`` and ``b[i]`` (int64); so are nodes and labels. About 100 bytes an edge.
    """
    from scipy.sparse import coo_array  # here: it takes its time to import, and most workers never come by
    from scipy.sparse.csgraph import connected_components

    nodes, ends = np.unique(np.concatenate((a, b)), return_inverse=True)
    if len(nodes) == 0:
        return nodes, nodes
    half = len(a)
    graph = coo_array((np.ones(half), (ends[:half], ends[half:])), shape=(len(nodes), len(nodes)))
    count, label = connected_components(graph, directed=False)
    smallest = np.full(count, np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(smallest, label, nodes)
    return nodes, smallest[label]


def both_ways(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """:data:`EDGE` rows: the edges between ``a[i]`` and ``b[i]`` in both directions."""
    return made_of(EDGE, node=np.concatenate((a, b)), other=np.concatenate((b, a)))


def star_edges(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """:data:`EDGE` rows, both directions: each component as a star around its smallest node."""
    nodes, labels = components(a, b)
    leaf = nodes != labels
    return both_ways(nodes[leaf], labels[leaf])


def join_at_once(work: DedupInputs, parts: Sequence[Slice]) -> Done:
    """Task: all edges → stars. For as many edges as a task can hold."""
    edges = np.concatenate([part.read(EDGE) for part in parts])
    forward = edges[edges["node"] < edges["other"]]
    stars = star_edges(forward["node"], forward["other"])
    buckets = parts[0].buckets
    writer = work.writer("stars", 0, buckets, EDGE)
    writer.add(stars, bucket_of_rank(stars["node"], buckets))
    return Done((0,), {"stars": writer.close()})


def star(work: DedupInputs, index: int, into: str, parts: Sequence[Slice], larger: bool) -> Done:
    """Task: large star, of the edges of one range of nodes in both directions → one direction, from the larger end; or
    small star, of those from the larger end → both directions. Gives back how many edges changed.

    Of a range with more edges than a task can hold, the smallest neighbours are found in a first reading. Memory is for
    the different nodes of the range and one block.
    """

    def blocks() -> Iterable[np.ndarray]:
        for part in parts:
            for block in part.blocks(EDGE, work.max_records):
                yield _distinct(block)

    nodes, least = _least_neighbours(blocks)
    buckets = parts[0].buckets
    writer = work.writer(into, index, buckets, EDGE)
    changed = 0
    for block in blocks():
        node, other = block["node"], block["other"]
        smallest = least[np.searchsorted(nodes, node)]
        if larger:
            smallest = np.minimum(smallest, node)
            out = other > node
            changed += int((out & (smallest != node)).sum())
            edges = made_of(EDGE, node=other[out], other=smallest[out])
        else:
            out = other != smallest
            changed += int(out.sum())
            edges = both_ways(other[out], smallest[out])
        writer.add(edges, bucket_of_rank(edges["node"], buckets))
    if not larger:
        kept = both_ways(nodes, least)
        writer.add(kept, bucket_of_rank(kept["node"], buckets))
    return Done((changed,), {into: writer.close()})


def _distinct(edges: np.ndarray) -> np.ndarray:
    edges = edges[np.lexsort((edges["other"], edges["node"]))]
    return edges[key_starts(edges["node"], edges["other"])]


def _least_neighbours(blocks: Callable[[], Iterable[np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """``(nodes, least)``: the nodes, ascending, and the smallest neighbour of each."""
    table = np.empty(0, dtype=EDGE)
    for block in blocks():
        table = np.concatenate((table, block))
        table = table[np.lexsort((table["other"], table["node"]))]
        table = table[key_starts(table["node"])]
    return table["node"].copy(), table["other"].copy()
