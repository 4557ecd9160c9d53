"""Finds the duplicates of a run: exact, then URL, then near, over all its committed partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from quern import storage
from quern.data_pipeline.dedup.bands import BandStats
from quern.data_pipeline.dedup.config import DuplicatesConfig, recall_curve
from quern.data_pipeline.dedup.decide import CLUSTER_SCHEMA, DECISION_SCHEMA, KINDS, Outcome, decide, write_tables
from quern.data_pipeline.dedup.equal import find_removals, mark_gone, write_keys
from quern.data_pipeline.dedup.exchange import num_parts
from quern.data_pipeline.dedup.facts import Place, Work, rank_documents, read_facts
from quern.data_pipeline.dedup.near import (
    Plan,
    plan_verification,
    propose_pairs,
    verify_group,
    write_bands,
    write_shingles,
)
from quern.data_pipeline.engine import Engine
from quern.errors import QuernError

__all__ = ["FORMAT", "RECORDS_PER_TASK", "DuplicatesReport", "run"]

#: Raised whenever the code would write other bytes from the same pages and config.
FORMAT = 1

#: 17 bytes each when bands are sorted; a task then takes a few hundred MB.
RECORDS_PER_TASK = 1 << 22

R = TypeVar("R")


@dataclass(frozen=True)
class DuplicatesReport:
    """What was found, counted. Plain data: ``dataclasses.asdict`` of it is JSON."""

    documents: dict[str, int]
    """Source → documents that were kept so far."""
    removed: dict[str, dict[str, int]]
    """Source → kind (exact, url, near) → documents removed."""
    alarms: tuple[str, ...]
    """Sources that lose more than ``alarm_share``, one sentence each."""
    notes: tuple[str, ...]
    """What else a reader should know, one sentence each: bands over the cap."""
    recall: tuple[tuple[float, float], ...]
    """(Jaccard similarity, the share of such pairs that the bands propose)."""
    candidate_pairs: int
    """Different pairs that the bands proposed."""
    verified_pairs: int
    """Of these, those with a similarity ≥ threshold."""
    shared_bands: int
    """Band values that at least two documents share."""
    capped_bands: int
    """Band values shared by more than ``max_band_members`` documents."""
    largest_band: int
    """Documents that share the most frequent band value; 0 if none is shared."""
    clusters: int
    """Components of at least two documents."""
    largest_cluster: int


def run(
    run_dir: str,
    partitions: Sequence[tuple[str, str]],
    priorities: Mapping[str, int],
    config: DuplicatesConfig,
    engine: Engine,
    scratch: str,
    *,
    records_per_task: int = RECORDS_PER_TASK,
) -> DuplicatesReport:
    """Write ``duplicates/decisions.parquet`` and ``duplicates/clusters.parquet`` of the run, and count them.

    Reads the ``verdicts`` and ``signatures`` of ``partitions`` (source, partition). ``priorities`` says whose copy
    stays: greater first, 0 for a source that is not named. The tables are the same bytes for any order of the
    partitions, any number of workers and any ``records_per_task``. ``scratch`` is a folder of this call's own, best
    empty; the caller removes it.

    Raises:
        QuernError: a partition is given twice, two documents have the same id, a table lacks what is needed.
    """
    places = _places(partitions)
    work = Work(run_dir, scratch, config, len(places), records_per_task)
    each = partial(_each, engine)
    counts = each(read_facts, [(work, place) for place in places], "duplicates: read")
    documents = sum(counts)
    outcome, plan, bands = Outcome({}, 0, 0, 0), Plan(0, 0), [BandStats(0, 0, 0)]
    if documents:
        outcome, plan, bands = _search(work, places, priorities, documents, each)
    else:
        write_tables(run_dir, _no_rows(DECISION_SCHEMA), _no_rows(CLUSTER_SCHEMA))
    per_source: Counter[str] = Counter()
    for place, count in zip(places, counts, strict=True):
        per_source[place.source] += count
    removed = _removed_by_source(places, outcome)
    capped = sum(stats.capped for stats in bands)
    return DuplicatesReport(
        documents=dict(sorted(per_source.items())),
        removed=removed,
        alarms=tuple(_alarms(per_source, removed, config.alarm_share)),
        notes=tuple(_notes(capped, config.max_band_members)),
        recall=recall_curve(config),
        candidate_pairs=plan.candidate_pairs,
        verified_pairs=outcome.verified_pairs,
        shared_bands=sum(stats.shared for stats in bands),
        capped_bands=capped,
        largest_band=max(stats.largest for stats in bands),
        clusters=outcome.clusters,
        largest_cluster=outcome.largest_cluster,
    )


def _search(
    work: Work, places: Sequence[Place], priorities: Mapping[str, int], documents: int, each: Callable[..., list[Any]]
) -> tuple[Outcome, Plan, list[BandStats]]:
    """Everything between the facts and the tables."""
    kinds = [kind for kind in KINDS if getattr(work.config, kind)]
    each(rank_documents, [(work, tuple(priorities.get(place.source, 0) for place in places))], "duplicates: order")
    gone: str | None = None
    for kind in kinds:
        if kind == "near":
            continue
        parts = num_parts(documents, work.records_per_task)
        each(write_keys, [(work, place, kind, gone, parts) for place in places], f"duplicates: {kind} keys")
        each(find_removals, [(work, kind, part, parts) for part in range(parts)], f"duplicates: {kind}")
        gone, before = storage.join(work.scratch, f"gone-{kind}"), gone
        each(mark_gone, [(work, kind, before, gone, documents)], f"duplicates: {kind} removed")
    plan, bands = Plan(0, 0), [BandStats(0, 0, 0)]
    if "near" in kinds:
        parts = num_parts(documents * work.config.bands, work.records_per_task)
        each(write_bands, [(work, place, gone, parts) for place in places], "duplicates: bands")
        bands = each(propose_pairs, [(work, part, parts) for part in range(parts)], "duplicates: candidates")
        (plan,) = each(plan_verification, [(work, parts)], "duplicates: plan")
        if plan.groups:
            each(write_shingles, [(work, place, plan.groups) for place in places], "duplicates: shingles")
            each(verify_group, [(work, group, plan.groups) for group in range(plan.groups)], "duplicates: verify")
    (outcome,) = each(decide, [(work, kinds, plan.groups, documents)], "duplicates: decide")
    return outcome, plan, bands


def _each(engine: Engine, function: Callable[..., R], tasks: Sequence[tuple[Any, ...]], label: str) -> list[R]:
    """The results of all tasks, in the order of the tasks."""
    results = dict(engine.map(function, tasks, label=label))
    return [results[index] for index in range(len(tasks))]


def _places(partitions: Sequence[tuple[str, str]]) -> list[Place]:
    ordered = sorted(partitions)
    for first, second in pairwise(ordered):
        if first == second:
            raise QuernError(f"the partition {first[0]}/{first[1]} is given twice")
    return [Place(index, source, name) for index, (source, name) in enumerate(ordered)]


def _no_rows(schema: Any) -> list[Any]:
    return [column.combine_chunks() for column in schema.empty_table().columns]


def _removed_by_source(places: Sequence[Place], outcome: Outcome) -> dict[str, dict[str, int]]:
    removed: dict[str, dict[str, int]] = {}
    for index, kinds in sorted(outcome.removed.items()):
        here = removed.setdefault(places[index].source, {})
        for kind, count in kinds.items():
            here[kind] = here.get(kind, 0) + count
    return {source: {kind: kinds[kind] for kind in KINDS if kind in kinds} for source, kinds in removed.items()}


def _alarms(
    documents: Mapping[str, int], removed: Mapping[str, Mapping[str, int]], alarm_share: float
) -> Iterable[str]:
    for source, kinds in sorted(removed.items()):
        lost = sum(kinds.values())
        if lost > alarm_share * documents[source]:
            details = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            yield (
                f"source {source} loses {lost} of {documents[source]} documents "
                f"({lost / documents[source]:.0%}) as duplicates: {details}"
            )


def _notes(capped: int, max_members: int) -> Iterable[str]:
    if capped:
        yield (
            f"{capped} band values are shared by more than {max_members} documents "
            "(duplicates.max_band_members); there each document was compared with the first ones only"
        )
