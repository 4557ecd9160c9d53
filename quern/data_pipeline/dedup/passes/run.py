"""Finds the duplicates of a run over all committed partitions: exact, then URL, then near."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from quern.config import digest
from quern.data_pipeline.dedup.bands import MEMBER
from quern.data_pipeline.dedup.config import UNLIKE, DuplicatesConfig, recall_curve
from quern.data_pipeline.dedup.exchange import cuts
from quern.data_pipeline.dedup.passes.facts import read_facts
from quern.data_pipeline.dedup.passes.plan import (
    MOST_HOSTS,
    PassResults,
    UrlPairs,
    cluster,
    near,
    order_documents,
    remove_equal,
    write_rows,
)
from quern.data_pipeline.dedup.passes.stages import Stages
from quern.data_pipeline.dedup.records import KINDS
from quern.data_pipeline.dedup.work import RECORD_BYTES, DedupInputs, PartitionGroup, PartitionPlace
from quern.data_pipeline.execution.engine import Engine
from quern.errors import QuernError

__all__ = ["FORMAT", "RECORDS_PER_TASK", "DuplicatesReport", "run"]

#: Raised whenever the code would write other bytes from the same pages and config.
FORMAT = 2

#: 16 to 32 bytes each; a task then takes about 300 MB.
RECORDS_PER_TASK = 1 << 21

#: Documents of a host that were removed for the URL of a different text, from which on it is an alarm.
MANY_TEXTS = 10

#: Raised whenever scratch files or stages change, so that none of another version is taken up.
SCRATCH_FORMAT = 4


@dataclass(frozen=True)
class DuplicatesReport:
    """Counts of the duplicates found. Plain data: ``dataclasses.asdict`` of it is JSON."""

    documents: dict[str, int]
    """Source → documents that were kept so far."""
    removed: dict[str, dict[str, int]]
    """Source → kind (exact, url, near) → documents removed."""
    alarms: tuple[dict[str, Any], ...]
    """Sources that lose more than ``alarm_share``, hosts with different texts under one URL, each as
    :func:`quern.data_pipeline.report.find_losses` gives them; ``entered`` of a host is None, as it is not counted."""
    notes: tuple[str, ...]
    """What else a reader should know, one sentence each: bands over the cap."""
    urls: UrlPairs
    """Documents with the URL of another one, by how similar their texts are."""
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
    inputs: str | None = None,
    records_per_task: int = RECORDS_PER_TASK,
) -> DuplicatesReport:
    """Write ``duplicates/decisions.parquet`` and ``duplicates/clusters.parquet`` of the run, and count them.

    Reads the ``verdicts`` and ``signatures`` of ``partitions`` (source, partition). ``priorities`` says whose copy
    stays: greater first, 0 for a source that is not named. The tables are the same bytes for any order of the
    partitions, any number of workers and any ``records_per_task``. ``scratch`` is a folder of this call's own; the
    caller removes it. ``inputs`` is a digest of what the tables read hold: a call with the same arguments goes on
    where an earlier one in the same folder ended; without it everything is done anew.

    Raises:
        QuernError: a partition is given twice, two documents have the same id, a table lacks what is needed.
    """
    sources, places = _places(partitions)
    work = DedupInputs(
        run_dir, scratch, config, sources, tuple(priorities.get(name, 0) for name in sources), records_per_task
    )
    key = None
    if inputs is not None:
        settings = config.model_dump(mode="json")
        key = digest([SCRATCH_FORMAT, inputs, sorted(partitions), work.priorities, settings, records_per_task])
    stages = Stages(engine, scratch, key)
    counts = [count for (count,) in stages.run(read_facts, [(work, place) for place in places], "read").numbers]
    documents = sum(counts)
    found = PassResults()
    members = None
    if documents:
        band_rows = records_per_task * RECORD_BYTES // MEMBER.itemsize  # a file of them
        shards = _shards(places, counts, max(band_rows // config.bands, 1))
        work = order_documents(stages, work, shards, documents)
        for kind in ("exact", "url"):
            if getattr(config, kind):
                remove_equal(stages, work, shards, kind, found)
        if config.near:
            near(stages, work, shards, found)
        members = cluster(stages, work, found)
    removed, clusters, largest = write_rows(stages, work, members, found)
    per_source: Counter[str] = Counter()
    for place, count in zip(places, counts, strict=True):
        per_source[sources[place.source]] += count
    by_source = _removed_by_source(sources, removed)
    return DuplicatesReport(
        documents=dict(sorted(per_source.items())),
        removed=by_source,
        alarms=(
            *_alarms(per_source, by_source, _kept_in(sources, removed), config.alarm_share),
            *_url_alarms(found.urls.hosts),
        ),
        urls=found.urls,
        notes=tuple(_notes(found.bands.capped, config.max_band_members)),
        recall=recall_curve(config),
        candidate_pairs=found.candidate_pairs,
        verified_pairs=found.verified_pairs,
        shared_bands=found.bands.shared,
        capped_bands=found.bands.capped,
        largest_band=found.bands.largest,
        clusters=clusters,
        largest_cluster=largest,
    )


def _places(partitions: Sequence[tuple[str, str]]) -> tuple[tuple[str, ...], list[PartitionPlace]]:
    ordered = sorted(partitions)
    for first, second in pairwise(ordered):
        if first == second:
            raise QuernError(f"the partition {first[0]}/{first[1]} is given twice")
    sources = tuple(sorted({source for source, _ in ordered}))
    number = {source: i for i, source in enumerate(sources)}
    return sources, [PartitionPlace(index, number[source], name) for index, (source, name) in enumerate(ordered)]


def _shards(places: Sequence[PartitionPlace], counts: Sequence[int], most: int) -> list[PartitionGroup]:
    """Consecutive partitions with at most ``most`` documents together, or one."""
    ranges = enumerate(cuts(np.array(counts), most))
    return [PartitionGroup(n, tuple(places[first:last]), tuple(counts[first:last])) for n, (first, last) in ranges]


def _removed_by_source(sources: Sequence[str], removed: np.ndarray) -> dict[str, dict[str, int]]:
    counts = np.zeros((len(sources), len(KINDS)), dtype=np.int64)
    np.add.at(counts, (removed[:, 0], removed[:, 2]), removed[:, 3])
    found = {
        source: {kind: count for kind, count in zip(KINDS, row, strict=True) if count}
        for source, row in zip(sources, counts.tolist(), strict=True)
    }
    return {source: kinds for source, kinds in found.items() if kinds}


def _kept_in(sources: Sequence[str], removed: np.ndarray) -> dict[str, Counter[str]]:
    """Source → other source → documents that were removed for one of the other."""
    found: dict[str, Counter[str]] = {source: Counter() for source in sources}
    for source, other, _, count in removed.tolist():
        if source != other:
            found[sources[source]][sources[other]] += count
    return found


def _alarms(
    documents: Mapping[str, int],
    removed: Mapping[str, Mapping[str, int]],
    kept_in: Mapping[str, Counter[str]],
    alarm_share: float,
) -> Iterable[dict[str, Any]]:
    for source, kinds in sorted(removed.items()):
        lost = sum(kinds.values())
        if lost > alarm_share * documents[source]:
            details = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            text = (
                f"source {source} loses {lost} of {documents[source]} documents "
                f"({lost / documents[source]:.0%}) as duplicates: {details}{_elsewhere(kept_in[source])}"
            )
            yield _alarm("source", source, documents[source], lost, max(kinds, key=lambda kind: kinds[kind]), text)


def _alarm(what: str, name: str, entered: int | None, lost: int, reason: str, text: str) -> dict[str, Any]:
    return {"what": what, "name": name, "gate": "duplicates", "entered": entered, "lost": lost, "reason": reason,
            "text": text}  # fmt: skip


def _url_alarms(hosts: Mapping[str, int]) -> Iterable[dict[str, Any]]:
    """Hosts on which a URL serves different texts, the first in full, the others counted."""
    many = [(host, count) for host, count in hosts.items() if count >= MANY_TEXTS]
    if many:
        host, count = many[0]
        least = " at least" if len(many) == MOST_HOSTS else ""
        others = f"; so do{least} {len(many) - 1} more" if len(many) > 1 else ""
        text = (
            f"host {host} serves different texts under one URL: {count} of its documents were removed for the URL of "
            f"another one with which they have a similarity below {UNLIKE}{others}; "
            f"with duplicates.url_threshold={UNLIKE} none of them goes for its URL"
        )
        yield _alarm("host", host, None, count, "url", text)


def _elsewhere(kept_in: Counter[str]) -> str:
    most = sorted(kept_in.items(), key=lambda item: (-item[1], item[0]))[:3]
    return "; " + ", ".join(f"{count} of documents of source {other}" for other, count in most) if most else ""


def _notes(capped: int, max_members: int) -> Iterable[str]:
    if capped:
        yield (
            f"{capped} band values are shared by more than {max_members} documents "
            "(duplicates.max_band_members); there each document was compared with the first ones only"
        )
