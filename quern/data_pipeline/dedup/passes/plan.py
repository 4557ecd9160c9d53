"""The stages of each pass, the data between them, and how many tasks each stage has.

How work is cut follows from counts of records alone, never from the workers; results never depend on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from quern import storage
from quern.data_pipeline.dedup.bands import BandStats
from quern.data_pipeline.dedup.exchange import Exchange, Slice, cuts, num_buckets
from quern.data_pipeline.dedup.passes.clusters import join_at_once, star
from quern.data_pipeline.dedup.passes.decide import (
    find_survivors,
    identify_members,
    identify_originals,
    label_pairs,
    name_clusters,
    verify_group,
)
from quern.data_pipeline.dedup.passes.equal import (
    HOSTS,
    count_hosts,
    find_removals,
    find_url_pairs,
    measure_urls,
    write_keys,
)
from quern.data_pipeline.dedup.passes.near import (
    locate_documents,
    plan_verification,
    propose_pairs,
    select_candidates,
    write_bands,
    write_shingles,
)
from quern.data_pipeline.dedup.passes.order import (
    check_ids,
    choose_cuts,
    num_ranges,
    number_documents,
    sample_order,
    sort_range,
    split_documents,
)
from quern.data_pipeline.dedup.passes.stages import DedupStage, Stages
from quern.data_pipeline.dedup.passes.tables import sort_rows, write_tables
from quern.data_pipeline.dedup.work import DedupInputs, PartitionGroup

__all__ = [
    "MOST_HOSTS",
    "PassResults",
    "UrlPairs",
    "cluster",
    "join_edges",
    "near",
    "order_documents",
    "remove_equal",
    "write_rows",
]


#: Hosts that a report names.
MOST_HOSTS = 100


@dataclass(frozen=True)
class UrlPairs:
    """Documents that share a URL with an earlier one, each compared with that one."""

    compared: int = 0
    similar: tuple[int, ...] = ()
    """Of these removed, by the bins of their similarity (:data:`URL_BINS`)."""
    unknown: int = 0
    """Removed, where neither text has a shingle."""
    hosts: dict[str, int] = field(default_factory=dict)
    """Host → removed with a similarity below :data:`UNLIKE`."""


@dataclass
class PassResults:
    """The results of the passes so far."""

    gone: list[Exchange] = field(default_factory=list)
    """Ranks of removed documents, by range."""
    removed: list[Exchange] = field(default_factory=list)
    """Removals, by the range of those that stay."""
    edges: list[Exchange] = field(default_factory=list)
    """What belongs together, by node."""
    verified: Exchange | None = None
    """Verified pairs, by the later node."""
    bands: BandStats = field(default_factory=lambda: BandStats(0, 0, 0))
    urls: UrlPairs = field(default_factory=UrlPairs)
    candidate_pairs: int = 0
    verified_pairs: int = 0


def order_documents(stages: Stages, work: DedupInputs, shards: Sequence[PartitionGroup], documents: int) -> DedupInputs:
    """Sort all documents in survivor order, in ranges; return the work with these ranges."""
    ranges, num_cuts = num_ranges(documents, work.max_records), 0
    if ranges > 1:
        samples = stages.run(sample_order, [(work, shard, documents, ranges) for shard in shards], "sample")
        sizes = [size for (size,) in samples.numbers]
        ((num_cuts,),) = stages.run(choose_cuts, [(work, sizes, ranges)], "cuts").numbers
    buckets = num_buckets(documents, work.max_records)
    split = stages.run(split_documents, [(work, shard, num_cuts, buckets) for shard in shards], "split")
    stages.run(check_ids, [(work, part) for part in split["ids"].slices(work.max_records)], "ids", split["ids"])
    ordered = split["ordered"]
    parts = [(work, index, ordered.slice(index, index + 1)) for index in range(num_cuts + 1)]
    sizes = [size for (size,) in stages.run(sort_range, parts, "order", ordered).numbers]
    return replace(work, first_ranks=(0, *np.cumsum(sizes).tolist()))


def remove_equal(
    stages: Stages, work: DedupInputs, shards: Sequence[PartitionGroup], kind: str, found: PassResults
) -> None:
    """Run the exact or the URL pass."""
    documents = work.first_ranks[-1]
    keys, nodes = f"{kind}-keys", _nodes(work)
    buckets = num_buckets(2 * documents, work.max_records)
    tasks = [(work, index, kind, _at(found.gone, index), buckets) for index in range(work.ranges)]
    written = stages.run(write_keys, tasks, f"{kind} keys")[keys]
    parts = written.slices(work.max_records // 2 + 1)
    stage: DedupStage | None
    if kind == "url" and work.config.near:
        pair_tasks = [(work, i, part, buckets) for i, part in enumerate(parts)]
        pairs = stages.run(find_url_pairs, pair_tasks, "url pairs", written)
        stage = _verify(stages, work, shards, "url", pairs["url-pairs"]) if parts else None
        if stage is not None:
            *bins, unknown, compared = np.sum(stage.numbers, axis=0).tolist()
            found.urls = UrlPairs(compared, tuple(bins), unknown, _count_hosts(stages, work, shards, stage))
    else:
        equal_tasks = [(work, i, kind, part, nodes) for i, part in enumerate(parts)]
        stage = stages.run(find_removals, equal_tasks, kind, written) if parts else None
    if stage is not None:
        found.gone.append(stage[f"{kind}-gone"])
        found.removed.append(stage[f"{kind}-removed"])
        found.edges.append(stage[f"{kind}-edges"])


def _count_hosts(
    stages: Stages, work: DedupInputs, shards: Sequence[PartitionGroup], measured: DedupStage
) -> dict[str, int]:
    """Host → documents that were removed for a URL which serves different texts; those with most of them."""
    needs = measured["host-needs"]
    if not needs.records:
        return {}
    tasks = [(work, i, "host", needs.slice(i, i + 1), [0], len(shards)) for i in range(work.ranges)]
    needed = stages.run(locate_documents, tasks, "locate hosts", needs)["host-needed"]
    shard_tasks = [(work, shard, needed.slice(shard.index, shard.index + 1)) for shard in shards]
    stages.run(count_hosts, shard_tasks, "hosts", needed)
    hosts: Counter[str] = Counter()
    for shard in shards:
        hosts.update(storage.read_json(work.file(HOSTS, shard.index)))
    return dict(sorted(hosts.items(), key=lambda item: (-item[1], item[0]))[:MOST_HOSTS])


def near(stages: Stages, work: DedupInputs, shards: Sequence[PartitionGroup], found: PassResults) -> None:
    """Run the near pass, up to its verified pairs."""
    documents, most = work.first_ranks[-1], work.max_records
    tasks = [(work, index, _at(found.gone, index), len(shards)) for index in range(work.ranges)]
    numbered = stages.run(number_documents, tasks, "number")["numbered"]
    buckets = num_buckets(documents * work.config.bands, most)
    shard_tasks = [(work, shard, numbered.slice(shard.index, shard.index + 1), buckets) for shard in shards]
    bands = stages.run(write_bands, shard_tasks, "bands", numbered)["bands"]
    parts = bands.slices(most)
    if not parts:
        return
    stage = stages.run(propose_pairs, [(work, i, part, buckets) for i, part in enumerate(parts)], "candidates", bands)
    shared, capped, largest = zip(*stage.numbers, strict=True)
    found.bands = BandStats(sum(shared), sum(capped), max(largest))
    pairs = stage["pairs"]
    parts = pairs.slices(most)
    if not parts:
        return
    stage = stages.run(
        select_candidates, [(work, i, part, buckets) for i, part in enumerate(parts)], "different pairs", pairs
    )
    found.candidate_pairs = sum(different for (different,) in stage.numbers)
    stage_or_none = _verify(stages, work, shards, "near", stage["candidates"])
    if stage_or_none is not None:
        found.verified_pairs = sum(count for (count,) in stage_or_none.numbers)
        found.verified = stage_or_none["verified"]
        found.edges.append(stage_or_none["near-edges"])


def _verify(
    stages: Stages, work: DedupInputs, shards: Sequence[PartitionGroup], kind: str, candidates: Exchange
) -> DedupStage | None:
    """The candidates of a pass, compared; None without any."""
    parts = candidates.slices(max(work.max_records // 3, 1))
    if not parts:
        return None
    suffix = "" if kind == "near" else f" {kind}"
    tasks = [(work, i, kind, part) for i, part in enumerate(parts)]
    stage = stages.run(plan_verification, tasks, f"plan{suffix}", candidates)
    first_groups = np.cumsum([0, *(len(sizes) for sizes in stage.numbers)]).tolist()
    groups = first_groups.pop()
    needs = stage[f"{kind}-needs"]
    places = [(work, i, kind, needs.slice(i, i + 1), first_groups, len(shards)) for i in range(work.ranges)]
    needed = stages.run(locate_documents, places, f"locate{suffix}", needs)[f"{kind}-needed"]
    shard_tasks = [(work, shard, kind, needed.slice(shard.index, shard.index + 1), groups) for shard in shards]
    texts = stages.run(write_shingles, shard_tasks, f"shingles{suffix}", needed)
    lengths, shingles = texts[f"{kind}-lengths"], texts[f"{kind}-shingles"]
    group_tasks: list[tuple[Any, ...]] = []
    for plan, sizes in enumerate(stage.numbers):
        ends = np.cumsum([0, *sizes]).tolist()
        for first, last in pairwise(ends):
            group = len(group_tasks)
            own = (lengths.slice(group, group + 1), shingles.slice(group, group + 1))
            group_tasks.append((work, group, plan, first, last, own, _nodes(work)))
    task = verify_group if kind == "near" else measure_urls
    return stages.run(task, group_tasks, f"verify{suffix}", lengths, shingles)


def cluster(stages: Stages, work: DedupInputs, found: PassResults) -> Exchange | None:
    """Find clusters and their survivors; return the members of clusters by range of ranks."""
    stars = join_edges(stages, work, found.edges)
    if stars is None:
        return None
    most, nodes = work.max_records, _nodes(work)
    weights = stars.counts + (found.verified.counts if found.verified else 0)
    tasks = [
        (work, i, stars.slice(*ends), found.verified.slice(*ends) if found.verified else None, nodes)
        for i, ends in enumerate(cuts(weights, most))
    ]
    used = [stars, *([found.verified] if found.verified else [])]
    labelled = stages.run(label_pairs, tasks, "label", *used)
    components = labelled["components"]
    parts = components.slices(max(most // 2, 1))
    if parts:
        stage = stages.run(find_survivors, [(work, i, part) for i, part in enumerate(parts)], "survivors", components)
        found.removed.append(stage["near-removed"])
    return labelled["members"]


def join_edges(stages: Stages, work: DedupInputs, edges: Sequence[Exchange]) -> Exchange | None:
    """Edges in both directions, by node → stars around the smallest node of each component; None without edges."""
    records = sum(exchange.records for exchange in edges)
    if not records:
        return None
    if records <= work.max_records:
        whole = [exchange.slice(0, len(exchange.counts)) for exchange in edges]
        return stages.run(join_at_once, [(work, whole)], "join", *edges)["stars"]
    turn = 0
    while True:
        turn += 1
        changed = 0
        for name, larger in (("large", True), ("small", False)):
            into, counts = f"{name}-{turn}", np.sum([exchange.counts for exchange in edges], axis=0)
            ranges = enumerate(cuts(counts, work.max_records))
            tasks = [(work, i, into, [exchange.slice(*ends) for exchange in edges], larger) for i, ends in ranges]
            stage = stages.run(star, tasks, f"{name} star {turn}", *edges)
            changed += sum(number for (number,) in stage.numbers)
            edges = [stage[into]]
        if not changed:
            return edges[0]


def write_rows(
    stages: Stages, work: DedupInputs, members: Exchange | None, found: PassResults
) -> tuple[np.ndarray, int, int]:
    """Write both tables; return the numbers of removed documents, of clusters, and of documents in the largest.

    Of the removed int64[combinations, 4]: source, source of the document that is kept, kind, number.
    """
    removed = np.empty((0, 4), dtype=np.int64)
    if members is None:
        stages.run(write_tables, [(work, [])], "tables")
        return removed, 0, 0
    nodes = _nodes(work)
    tasks = [(work, index, _at(found.removed, index)) for index in range(work.ranges)]
    halves = stages.run(identify_originals, tasks, "originals", *found.removed)["halves"]
    buckets = num_buckets(2 * members.records, work.max_records)
    stage = stages.run(
        identify_members,
        [(work, i, halves.slice(i, i + 1), members.slice(i, i + 1), nodes, buckets) for i in range(work.ranges)],
        "members",
        halves,
        members,
    )
    removed = np.concatenate([removed, *(np.array(own, np.int64).reshape(-1, 4) for own in stage.numbers)])
    decisions, named = stage["decisions"], stage["named"]
    parts = named.slices(max(work.max_records // 3, 1))
    names = stages.run(name_clusters, [(work, i, part, buckets) for i, part in enumerate(parts)], "names", named)
    clusters = names["clusters"]
    ranges = cuts(decisions.counts + clusters.counts, max(work.max_records // 2, 1))
    rows = stages.run(
        sort_rows,
        [(work, i, decisions.slice(*ends), clusters.slice(*ends)) for i, ends in enumerate(ranges)],
        "rows",
        decisions,
        clusters,
    )
    stages.run(write_tables, [(work, rows.numbers)], "tables")
    counts = np.array(names.numbers)
    return removed, int(counts[:, 0].sum()), int(counts[:, 1].max())


def _nodes(work: DedupInputs) -> int:
    """Buckets of exchanges by node or by cluster."""
    return num_buckets(2 * work.first_ranks[-1], work.max_records)


def _at(exchanges: Sequence[Exchange], index: int) -> list[Slice]:
    return [exchange.slice(index, index + 1) for exchange in exchanges]
