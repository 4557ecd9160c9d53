"""Runs the chain over all partitions, restarts those whose worker died, then finds the duplicates."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from quern import storage
from quern.config import digest
from quern.data_pipeline.config import PipelineConfig
from quern.data_pipeline.dedup.passes import run as dedup
from quern.data_pipeline.dedup.schemas import CLUSTERS, DECISIONS
from quern.data_pipeline.execution.commits import TABLES, find_commit, publish_commit, withdraw_commit
from quern.data_pipeline.execution.engine import Death, Engine
from quern.data_pipeline.execution.isolation import InFlightMarker, marker_folder, pages_in_work
from quern.data_pipeline.monitoring.progress import RunProgress
from quern.data_pipeline.partition import PartitionTask, committed, process_partition
from quern.data_pipeline.source_chains import PAGES_FORMAT, source_chains
from quern.data_pipeline.sources import Edges, FileRange, Partition, misread, plan
from quern.data_pipeline.sources.plan import InputFile
from quern.data_pipeline.stages.extra.rules import sources_of
from quern.errors import InputError, QuernError

__all__ = [
    "PagesResult",
    "check_unchanged",
    "inputs_digest",
    "inputs_identity",
    "plan_sources",
    "run",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PagesResult:
    """The results of the pages phase that the later phases need."""

    partitions: tuple[tuple[str, str], ...]
    """(source, partition) of every committed partition."""
    duplicates: dict[str, Any]
    """The report of :func:`quern.data_pipeline.dedup.passes.run.run` as plain data."""


def plan_sources(config: PipelineConfig) -> list[Partition]:
    """Plan every partition of every source.

    Raises:
        InputError: an entry matches nothing, or two files of a source have the same relative path.
    """
    return [partition for source in config.sources for partition in plan(source)]


def inputs_identity(partitions: Sequence[Partition]) -> str:
    """One digest over every input file's name and size: the same for the same crawl wherever it was copied to."""
    return digest(sorted({(p.source, f.relative_path, f.size) for p in partitions for f in p.files}))


def inputs_digest(partitions: Sequence[Partition]) -> str:
    """One digest over every input file's identity and fingerprint."""
    return digest(
        sorted({(p.source, p.undivided, f.relative_path, f.fingerprint) for p in partitions for f in p.files})
    )


def run(config: PipelineConfig, partitions: Sequence[Partition], engine: Engine, progress: RunProgress) -> PagesResult:
    """Run the phases pages and duplicates over ``partitions`` (from :func:`plan_sources`), except what is committed.

    Raises:
        QuernError: an input cannot be opened, or a worker dies again and again without a page to blame.
    """
    entries = _run_pages(config, partitions, engine, progress)
    names = tuple((p.source, p.name) for p in partitions)
    return PagesResult(names, _run_duplicates(config, names, entries, engine, progress))


def _run_pages(
    config: PipelineConfig, partitions: Sequence[Partition], engine: Engine, progress: RunProgress
) -> list[dict[str, Any]]:
    """Commit every partition; return the commit objects in the order of ``partitions``."""
    sources = {source.name: source for source in config.sources}
    scratch = storage.join(config.run_dir, ".work")
    markers = marker_folder(scratch)
    chains = source_chains(config)
    modules = {name: sources_of(own.config.extra) for name, own in chains.items()}
    tasks = [
        PartitionTask(
            run_dir=config.run_dir,
            scratch=storage.join(scratch, "pages", partition.source, partition.name),
            marker=storage.join(markers, partition.source, partition.name),
            source=sources[partition.source],
            partition=partition,
            chain=chains[partition.source].config,
            modules=modules[partition.source],
            measures=chains[partition.source].columns,
            config_hash=chains[partition.source].digest,
            page_timeout_s=config.isolation.page_timeout_s,
            worker_memory_mib=config.isolation.worker_memory_mib,
        )
        for partition in partitions
    ]
    there = _forget_others(config.run_dir, {(p.source, p.name) for p in partitions})
    entries = _standing(config.run_dir, tasks, there)
    sizes = [partition.size for partition in partitions]
    progress.start_phase("pages", len(tasks), sum(sizes), lambda: pages_in_work(markers), num_resumed=len(entries))
    for index, entry in entries.items():
        progress.partition_done(entry["counts"], sizes[index], resumed=True, source=entry["source"])
    todo = sorted((i for i in range(len(tasks)) if i not in entries), key=lambda i: (-sizes[i], i))

    def drive(todo: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        strikes = _Strikes(progress, storage.is_local(scratch))
        results = engine.map(process_partition, [(tasks[i],) for i in todo], label="pages", on_death=strikes)
        with ThreadPoolExecutor(8, "sweeper") as sweeper:  # on a store each folder takes a few round trips
            for position, entry in results:
                InFlightMarker.remove(tasks[todo[position]].marker)
                sweeper.submit(_sweep, tasks[todo[position]].scratch)
                yield todo[position], entry

    for index, entry in drive(todo):
        entries[index] = entry
        progress.partition_done(entry["counts"], sizes[index], source=entry["source"])
    while again := _misread(partitions, entries):
        for index, part in again.items():
            tasks[index] = replace(tasks[index], partition=replace(partitions[index], range=part))
            withdraw_commit(*tasks[index].piece)
        for index, entry in drive(sorted(again, key=lambda i: (-sizes[i], i))):
            progress.partition_put_right(entry["counts"], entries[index]["counts"], source=entry["source"])
            entries[index] = entry
    progress.end_phase()
    if storage.is_local(markers):
        storage.remove_tree(markers)
    return [entries[index] for index in range(len(tasks))]


def _misread(partitions: Sequence[Partition], entries: Mapping[int, Mapping[str, Any]]) -> dict[int, FileRange]:
    """Ranges of large files that did not meet their neighbours, and how each has to be read; by index."""
    files: dict[tuple[str, str], list[tuple[int, FileRange]]] = {}
    for index, partition in enumerate(partitions):
        if partition.range is not None:
            files.setdefault((partition.source, partition.undivided), []).append((index, partition.range))
    again = {}
    for members in files.values():
        members.sort(key=lambda member: member[1].start)
        seen = [Edges(**entries[index]["counts"]["range"]) for index, _ in members]
        for at, part in misread([part for _, part in members], seen).items():
            again[members[at][0]] = part
    return again


def _forget_others(run_dir: str, wanted: set[tuple[str, str]]) -> set[str]:
    """Remove what earlier attempts made, committed or not, of inputs that the run no longer has; commits go first.

    Returns the paths below the run of what is left, one listing a folder.
    """
    left = set()
    for folder, suffix in (("commits/tokens", ".json"), ("commits/pages", ".json"), *((t, ".parquet") for t in TABLES)):
        for path in storage.list_files(storage.join(run_dir, folder)):
            source, name = path.split("/")[-2:]
            if (source, name.removesuffix(suffix)) not in wanted:
                storage.remove(path)
            else:
                left.add(f"{folder}/{source}/{name}")
    return left


def _standing(run_dir: str, tasks: Sequence[PartitionTask], there: set[str]) -> dict[int, dict[str, Any]]:
    """Index → commit of the tasks that need not be done again. Commits that vouch for what is not so are withdrawn."""

    def find(index: int) -> dict[str, Any] | None:
        entry = committed(tasks[index])
        if entry is not None and there.issuperset(entry["outputs"]):
            return entry
        withdraw_commit(*tasks[index].piece)
        return None

    begun = [i for i, t in enumerate(tasks) if f"commits/pages/{t.source.name}/{t.partition.name}.json" in there]
    found = zip(begun, storage.each(find, begun, run_dir), strict=True)
    standing = {index: entry for index, entry in found if entry is not None}
    if again := len(begun) - len(standing):
        log.warning(
            "%s: %d finished partitions are done again: their input, a file that the config names, or quern's rules "
            "(pages format %d) have changed since", run_dir, again, PAGES_FORMAT,
        )  # fmt: skip
    return standing


def _sweep(folder: str) -> None:
    """Remove the scratch folder of a finished partition.

    What is left of one into which a worker that should be gone still writes goes with the whole scratch folder.
    """
    try:
        storage.remove_tree(folder)
    except OSError as error:
        log.info("%s: is removed at the end of the run (%s)", folder, error)


class _Strikes:
    """Decides what a worker's death means for the page that it was processing.

    A page on which a clock ran out (its process wrote that down) is quarantined at once. Any other death of the process
    (out of memory, a kill) may not be the page's fault: the page is tried once more, and quarantined when a worker dies
    on it again. A lost machine is no page's fault, however often it happens.
    """

    def __init__(self, progress: RunProgress, markers_are_shared: bool = True) -> None:
        self.progress = progress
        self.markers_are_shared = markers_are_shared
        """Whether this process sees the markers of workers on other machines."""
        self.deaths: dict[tuple[int, int], int] = {}

    def __call__(self, index: int, task: tuple[Any, ...], death: Death) -> tuple[Any, ...]:
        (work,) = task
        name = f"{work.source.name}/{work.partition.name}"
        if death.lost_machine:
            InFlightMarker.remove(work.marker)
            self.progress.error(f"{name}: its machine was lost, the partition goes on elsewhere")
            return task
        last = (
            InFlightMarker.take(work.marker) if self.markers_are_shared else death.ask(InFlightMarker.take, work.marker)
        )
        ordinal = last.ordinal if last is not None else -1
        self.deaths[index, ordinal] = deaths = self.deaths.get((index, ordinal), 0) + 1
        blamed = dict(work.quarantined)
        if last is None or ordinal in blamed:
            if deaths > 3:
                raise QuernError(f"{name}: the worker process died {deaths} times outside the pages; see Ray's logs")
            self.progress.error(f"{name}: worker died, the partition goes on")
            return task
        if last.stack is None and deaths == 1:
            self.progress.error(f"{name}: worker died at page {ordinal}, trying it once more")
            return task
        reason, where = "quarantine.crash", ""
        if last.stack is not None:
            reason, where = "quarantine.timeout", f", at {last.place}"
        self.progress.error(f"{name}: page {ordinal} is quarantined ({reason}{where})")
        return (replace(work, quarantined=(*work.quarantined, (ordinal, reason))),)


def _run_duplicates(
    config: PipelineConfig,
    names: tuple[tuple[str, str], ...],
    entries: Sequence[Mapping[str, Any]],
    engine: Engine,
    progress: RunProgress,
) -> dict[str, Any]:
    priorities = {source.name: source.priority for source in config.sources}
    inputs = {"pages": digest(sorted(pair for entry in entries for pair in entry["outputs"].items()))}
    settings = digest([dedup.FORMAT, config.duplicates.model_dump(mode="json"), sorted(priorities.items())])
    progress.start_phase("duplicates", 1, None)
    piece = (config.run_dir, "duplicates", "all", "decisions")
    entry = find_commit(*piece, inputs=inputs, config=settings)
    if entry is None or not all(storage.exists(storage.join(config.run_dir, name)) for name in entry["outputs"]):
        scratch = storage.join(config.run_dir, ".work", "duplicates")
        withdraw_commit(*piece)
        report = dedup.run(
            config.run_dir, names, priorities, config.duplicates, engine, scratch, inputs=digest([inputs, settings])
        )
        outputs = {name: storage.sha256(storage.join(config.run_dir, name)) for name in (DECISIONS, CLUSTERS)}
        entry = publish_commit(*piece, inputs=inputs, config=settings, outputs=outputs, counts=asdict(report))
        storage.remove_tree(scratch)
    progress.partition_done({}, 0)
    progress.end_phase()
    return dict(entry["counts"])


def check_unchanged(record: Mapping[str, Any], partitions: Sequence[Partition], run_dir: str) -> None:
    """Raise if the inputs of a complete run have changed.

    Raises:
        InputError: files were added, removed or changed since.
    """
    if record.get("inputs") != inputs_digest(partitions):
        raise InputError(
            f"{os.path.join(run_dir, 'run.json')}: this run is complete, and {_changes(partitions, run_dir)} "
            "give another run_dir"
        )


def _changes(partitions: Sequence[Partition], run_dir: str) -> str:
    """How many files differ from those that the commits name, if they name any, and how the first of them does."""
    before: dict[tuple[str, str], str] = {}
    paths = storage.list_files(storage.join(run_dir, "commits", "pages"))
    for entry in storage.each(storage.read_json, paths, run_dir):
        before |= {(entry["source"], name): fingerprint for name, fingerprint in entry["inputs"].items()}
    files = {(part.source, file.relative_path): file for part in partitions for file in part.files}
    now = {key: file.fingerprint for key, file in files.items()}
    changed = sorted(file for file in {*before, *now} if before.get(file) != now.get(file))
    if not before or not changed:
        return "its input files have changed since;"
    source, name = first = changed[0]
    how = "new" if first not in before else "missing" if first not in now else "changed"
    others = f", and {len(changed) - 1:,} more" if changed[1:] else ""
    if all(_only_touched(before.get(key), files.get(key)) for key in changed):
        back = f"touch -d @{before[first].partition(':')[2]} {shlex.quote(files[first].path)}"
        return (
            f"its input files have other modification times and the same sizes: {name} of source {source}{others}; "
            f"quern data report {shlex.quote(run_dir)} shows the run as it is; if the contents are the same, set the "
            f"times back ({back}), else"
        )
    return f"its input files have changed since: {name} of source {source} is {how}{others};"


def _only_touched(before: str | None, now: InputFile | None) -> bool:
    """Whether a local file has the size that it had, and another time."""
    if before is None or now is None:
        return False
    return storage.is_local(now.path) and before.startswith(f"{now.size}:")
