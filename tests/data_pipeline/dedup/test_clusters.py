from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quern.data_pipeline.dedup.clusters import components


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60))
def test_components_are_what_a_walk_reaches(edges):
    neighbours: dict[int, set[int]] = {}
    for a, b in edges:
        neighbours.setdefault(a, set()).add(b)
        neighbours.setdefault(b, set()).add(a)
    expected = {}
    for node in neighbours:
        reached, todo = {node}, [node]
        while todo:
            for other in neighbours[todo.pop()] - reached:
                reached.add(other)
                todo.append(other)
        expected[node] = min(reached)
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2) * 10**12  # ranks need not be small
    nodes, labels = components(ends[:, 0], ends[:, 1])
    assert nodes.tolist() == sorted(node * 10**12 for node in expected)
    assert dict(zip(nodes.tolist(), labels.tolist(), strict=True)) == {
        node * 10**12: label * 10**12 for node, label in expected.items()
    }


def test_an_edge_given_256_times_still_joins():
    nodes, labels = components(np.full(256, 4), np.full(256, 9))
    assert (nodes.tolist(), labels.tolist()) == ([4, 9], [4, 4])
