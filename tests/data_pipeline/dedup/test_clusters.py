from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.dedup.exchange import Exchange, bucket_of_rank
from quern.data_pipeline.dedup.passes.clusters import EDGE, both_ways, components
from quern.data_pipeline.dedup.passes.plan import join_edges
from quern.data_pipeline.dedup.passes.stages import Stages
from quern.data_pipeline.dedup.work import DedupInputs
from quern.data_pipeline.execution.engine import InProcess


@pytest.mark.slow
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


def joined(folder: str, edges: list[tuple[int, int]], nodes: int, max_records: int) -> tuple[dict[int, int], int]:
    """Node → the smallest it is connected to, by stages of tasks of at most ``max_records``; and the stages."""
    work = DedupInputs(folder, folder, DuplicatesConfig(), ("a",), (0,), max_records, (0, nodes))
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2)
    rows = both_ways(ends[:, 0], ends[:, 1])
    buckets = 8
    writer = work.writer("given", 0, buckets, EDGE)
    writer.add(rows, bucket_of_rank(rows["node"], buckets))
    left = writer.close()
    stages = Stages(InProcess(), f"{folder}/stages", None)
    stars = join_edges(
        stages, replace(work, scratch=f"{folder}/stages"), [Exchange(work.folder("given"), (left.files,), left.counts)]
    )
    assert stars is not None
    found = stars.slice(0, buckets).read(EDGE)
    down = found[found["other"] < found["node"]]
    assert len(np.unique(down["node"])) == len(down)
    assert sorted(found[["other", "node"]].tolist()) == sorted(found.tolist())
    labels = dict(down.tolist()) | {int(root): int(root) for root in down["other"]}
    return labels, stages.number


_SHAPES = {
    "a chain in order": [(i, i + 1) for i in range(400)],
    "a chain in no order": [(i * 167 % 401, (i + 1) * 167 % 401) for i in range(400)],
    "a star around its last": [(i, 500) for i in range(500)],
    "a ring of stars": [(i, i // 10) for i in range(1, 600)] + [(0, 300)],
    "pairs": [(2 * i, 2 * i + 1) for i in range(300)],
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", _SHAPES)
@pytest.mark.parametrize("max_records", [120, 10**6])
def test_edges_in_many_tasks_are_joined_as_in_one(tmp_path, shape, max_records):
    edges = _SHAPES[shape]
    random = np.random.default_rng(1).permutation(1000)
    for number, name in enumerate((np.arange(1000), random)):  # the smallest node at an end, and anywhere
        named = [(int(name[a]), int(name[b])) for a, b in edges]
        labels, stages = joined(f"{tmp_path}/{number}", named, 1000, max_records)
        nodes, expected = components(*np.array(named).T)
        assert labels == dict(zip(nodes.tolist(), expected.tolist(), strict=True))
        assert stages == 1 if max_records > 1000 else 2 <= stages <= 24
