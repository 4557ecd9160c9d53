"""Processes one partition on one worker: read → stages → rows → files → commit.

Runs in whatever process the engine gives it. Every :data:`FLUSH_PAGES` pages, and after :data:`FLUSH_SECONDS` of slow
ones, the finished rows are set down in the scratch folder; after a crash the partition goes on behind the last of them.
Row groups of the tables end where pages and characters say, not where the clock did. Each attempt sets down in a folder
of its own and removes nothing, so that a worker that should be gone (its driver was killed, its machine was given up)
neither takes from its successor nor writes over it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from quern import storage
from quern.config import canonical_json
from quern.data_pipeline.chain import Chain
from quern.data_pipeline.config import ChainConfig
from quern.data_pipeline.execution.commits import TABLES, find_commit, publish_commit
from quern.data_pipeline.execution.fence import Fence
from quern.data_pipeline.execution.isolation import InFlightMarker, Watchdog, bounded_memory, give_back_memory
from quern.data_pipeline.execution.parts import read_head, read_tables, write_part
from quern.data_pipeline.page.document import OUT_OF_MEMORY, Page
from quern.data_pipeline.rows import PageRows
from quern.data_pipeline.sources import Partition, ReadLog, SourceConfig, read
from quern.data_pipeline.stages.extra.modules import Sources, load_module
from quern.data_pipeline.stages.extra.rules import RuleError
from quern.data_pipeline.stages.tombstones import fingerprints
from quern.errors import QuernError

__all__ = ["PartitionTask", "committed", "process_partition"]

log = logging.getLogger(__name__)

FLUSH_PAGES = 512
FLUSH_CHARS = 32 << 20
#: Of work that a crash may cost.
FLUSH_SECONDS = 10.0
#: Ends the name of a part whose rows are the beginning of a row group.
_OPEN = ".open"
#: Characters of a page behind which the heap is swept: some milliseconds.
HUGE_CHARS = 1 << 20


@dataclass(frozen=True)
class PartitionTask:
    """Everything a worker needs to do one partition."""

    run_dir: str
    scratch: str
    """A folder of this partition alone, for rows already finished; the driver removes it after the commit."""
    marker: str
    """Path of the marker file, on the machine that runs the task."""
    source: SourceConfig
    partition: Partition
    chain: ChainConfig
    config_hash: str
    page_timeout_s: float
    worker_memory_mib: int | None
    modules: tuple[Sources, ...] = ()
    """The modules of the chain's extra rules."""
    measures: tuple[str, ...] | None = None
    """The columns of verdicts, where other sources of the run measure other things; None: those of ``chain``."""
    quarantined: tuple[tuple[int, str], ...] = ()
    """(ordinal, reason) of pages that ended a worker; they are not parsed again."""

    @property
    def piece(self) -> tuple[str, str, str, str]:
        """What its commit is of: run, phase, source, partition."""
        return self.run_dir, "pages", self.source.name, self.partition.name

    @property
    def inputs(self) -> dict[str, str]:
        """The input fingerprint that the commit records."""
        return {file.relative_path: file.fingerprint for file in self.partition.files}


@functools.lru_cache(maxsize=8)
def _chain(config_json: str, purge_list: tuple[str, ...] = ()) -> Chain:
    """One chain a recipe and process: its models and memos stay warm from partition to partition. ``purge_list`` are
    the fingerprints of its files: it grows from run to run."""
    return Chain(ChainConfig.model_validate_json(config_json))


@dataclass
class _Progress:
    """What has been counted so far; stored beside every flushed part."""

    pages: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    by_stage: Counter[str] = field(default_factory=Counter)
    by_reason: Counter[str] = field(default_factory=Counter)
    by_language: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: {"cpu": 0.0})
    parts: list[str] = field(default_factory=list)
    """Names below the scratch folder of what has been set down, of this attempt and of those it goes on from."""
    open_pages: int = 0
    """Rows set down since the last full row group."""
    open_chars: int = 0
    """Their characters, as :class:`PageRows` counts them."""

    def add(self, page: Page) -> None:
        self.pages += 1
        if page.stage is None:
            self.counts["kept"] += 1
            text = page.text or ""
            self.counts["text_chars"] += len(text)
            self.counts["text_bytes_kept"] += len(text.encode())
        else:
            self.by_stage[page.stage] += 1
            self.by_reason[f"{page.stage}:{page.reason}"] += 1
            if page.reason == "language.pre_skip":
                self.counts["pre_skip"] += 1
        if page.language is not None:
            self.by_language[page.language] += 1

    def to_counts(self, read_log: ReadLog) -> dict[str, Any]:
        return {
            "pages": self.pages,
            **{name: self.counts[name] for name in ("kept", "text_chars", "text_bytes_kept", "pre_skip")},
            "by_stage": dict(self.by_stage),
            "by_reason": dict(self.by_reason),
            "by_language": dict(self.by_language),
            "other_records": dict(read_log.other_records),
            "damage": list(read_log.damage),
            "damage_left_out": read_log.damage_left_out,
            "unreadable_dates": read_log.unreadable_dates,
            "unreadable_urls": read_log.unreadable_urls,
            **({"range": asdict(read_log.edges)} if read_log.edges is not None else {}),
            "stage_seconds": {name: round(value, 6) for name, value in self.seconds.items() if name != "cpu"},
            "cpu_seconds": round(self.seconds["cpu"], 6),
        }


def process_partition(task: PartitionTask) -> dict[str, Any]:
    """Read, judge and commit one partition; return its commit object.

    Files written: verdicts, documents and signatures of the partition under ``task.run_dir``, then the commit. What
    another attempt has committed in the meantime is not done again.

    Raises:
        QuernError: an input that cannot be opened, two records with one identity, or too little memory for what is not
            a page's own.
        SupersededError: another attempt at this partition has begun.
    """
    if (entry := committed(task)) is not None:
        return entry
    with storage.guarded(Fence.claim(storage.join(task.scratch, "attempt.json")).check):
        # Until the claim another attempt could commit; its tables must not be written again under its commit.
        if (entry := committed(task)) is not None:
            return entry
        with suppress(MemoryError):
            return _process(task)
        # Outside of pages memory is short when those before left much in the heap: once more, with none of it.
        give_back_memory()
        try:
            return _process(task)
        except MemoryError:
            limit = f"{task.worker_memory_mib} MiB" if task.worker_memory_mib else "this machine has"
            raise QuernError(
                f"{task.source.name}/{task.partition.name}: out of memory twice between its pages; "
                f"isolation.worker_memory_mib: expected more than {limit}"
            ) from None


def committed(task: PartitionTask) -> dict[str, Any] | None:
    """The commit of this very task, if it is there."""
    return find_commit(*task.piece, inputs=task.inputs, config=task.config_hash)


def _process(task: PartitionTask) -> dict[str, Any]:
    for sources in task.modules:
        load_module(sources.name, sources)
    chain = _chain(canonical_json(task.chain), fingerprints(task.chain.purge_list))
    chain.seconds = dict.fromkeys(chain.seconds, 0.0)
    rows = PageRows(task.measures or chain.measures)
    attempt = uuid.uuid4().hex[:12]
    progress = _resume(task)
    read_log = ReadLog()
    quarantined = dict(task.quarantined)
    cpu = time.process_time()
    seen: set[bytes] = set()
    marker = InFlightMarker(task.marker)
    ordinal, flushing = -1, False

    def rest() -> None:  # a slow disk or store is no page's fault
        marker.set(-1)
        watchdog.rest()

    def go_on() -> None:
        if flushing:
            return
        marker.set(ordinal)
        if ordinal in quarantined:  # it had its time, and is read once more to come by it
            watchdog.rest()
        else:
            watchdog.page()

    try:
        with (
            Watchdog(task.page_timeout_s, InFlightMarker.stack_of(task.marker)) as watchdog,
            bounded_memory(task.worker_memory_mib),
            storage.around_waits(rest, go_on),
        ):
            pages = _identified(task, read_log, seen)
            behind, since = progress.pages, time.monotonic()
            read_log.tick = go_on  # passing over damage is slow for no page's fault
            for ordinal in itertools.count():
                go_on()
                page = next(pages, None)
                if page is None:
                    break
                if ordinal < behind:  # judged by an earlier attempt; each has its own time here too
                    continue
                watchdog.judge()
                is_huge = len(page.raw) > HUGE_CHARS or page.fault == OUT_OF_MEMORY
                page, reached = _judge(chain, page, quarantined.get(ordinal))
                rows.add(page, reached)
                progress.add(page)
                if is_huge:
                    page.raw = ""
                    give_back_memory()
                if (is_full := _is_full(progress, rows)) or time.monotonic() - since >= FLUSH_SECONDS:
                    flushing = True
                    rest()
                    cpu = _count_time(progress, chain, cpu)
                    _set_down(task, attempt, rows, progress, is_full)
                    flushing, since = False, time.monotonic()
        marker.set(-1)
        _count_time(progress, chain, cpu)
        outputs = _publish(task, rows, progress.parts)
        counts = progress.to_counts(read_log)
        return publish_commit(*task.piece, inputs=task.inputs, config=task.config_hash, outputs=outputs, counts=counts)
    finally:
        marker.close()
        InFlightMarker.remove(task.marker)  # nobody else can on a remote machine; a killed worker skips this


def _identified(task: PartitionTask, read_log: ReadLog, seen: set[bytes]) -> Iterator[Page]:
    for page in read(task.source, task.partition, read_log):
        if page.doc_id in seen:
            raise QuernError(
                f"{page.source_file}: record at {page.position}: its identity was given before in {task.partition.name}"
            )
        seen.add(page.doc_id)
        yield page


def _judge(chain: Chain, page: Page, quarantine: str | None) -> tuple[Page, int]:
    if quarantine is None and page.fault == OUT_OF_MEMORY:
        quarantine = page.fault
    if quarantine is None:
        try:
            return chain(page)
        except QuernError:  # a list, a model or a setting is wrong, not the page
            raise
        except Exception as error:  # one page's parser error must not cost the others
            log.warning("%s at %s: %s: %s", page.source_file, page.position, type(error).__name__, error)
            name = error.reason if isinstance(error, RuleError) else type(error).__name__.lower()
            quarantine = f"quarantine.{name}"
    page.failures.clear()
    page.text = page.extracted = None
    page.fail("quarantine", quarantine)
    page.decide()
    return page, 0


def _count_time(progress: _Progress, chain: Chain, since: float) -> float:
    now = time.process_time()
    for name, value in {"cpu": now - since, **chain.seconds}.items():
        progress.seconds[name] = progress.seconds.get(name, 0.0) + value
    chain.seconds = dict.fromkeys(chain.seconds, 0.0)
    return now


def _is_full(progress: _Progress, rows: PageRows) -> bool:
    """Whether a row group ends here."""
    return progress.open_pages + len(rows) >= FLUSH_PAGES or progress.open_chars + rows.chars >= FLUSH_CHARS


def _set_down(task: PartitionTask, attempt: str, rows: PageRows, progress: _Progress, is_full: bool) -> None:
    """Flush finished rows to the scratch folder. ``is_full``: a row group ends with them."""
    part = f"{attempt}/part-{len(progress.parts):05d}{'' if is_full else _OPEN}"
    progress.parts.append(part)
    progress.open_pages = 0 if is_full else progress.open_pages + len(rows)
    progress.open_chars = 0 if is_full else progress.open_chars + rows.chars
    write_part(storage.join(task.scratch, part), {**_made_from(task), "progress": vars(progress)}, rows.tables())
    rows.clear()


def _made_from(task: PartitionTask) -> dict[str, Any]:
    """What must be the same for rows of one attempt to be rows of another."""
    part, made_from = task.partition.range, {"inputs": task.inputs, "config": task.config_hash}
    return made_from if part is None else {**made_from, "range": [part.start, part.end, part.first, part.kind]}


def _resume(task: PartitionTask) -> _Progress:
    """Where earlier attempts with the same inputs and config left off: the furthest of them, and no mixture of two."""
    found = ("/".join(path.split("/")[-2:]) for path in storage.list_files(task.scratch))
    written = {part for part in found if part.rsplit("/", 1)[-1].startswith("part-")}
    furthest = _Progress()
    ended = set()
    for part in sorted(written, reverse=True):  # of each attempt the last part that counts
        attempt = part.split("/")[0]
        stored = read_head(storage.join(task.scratch, part)) if attempt not in ended else None
        if stored is not None and {key: stored[key] for key in stored if key != "progress"} == _made_from(task):
            kept = stored["progress"]
            if not written.issuperset(kept["parts"]):  # a removal of the folder was cut off
                continue
            ended.add(attempt)
            if kept["pages"] > furthest.pages:
                tables = {name: Counter(kept[name]) for name in ("counts", "by_stage", "by_reason", "by_language")}
                furthest = _Progress(**{**kept, **tables})
    return furthest


def _publish(task: PartitionTask, rows: PageRows, parts: Sequence[str]) -> dict[str, str]:
    """Write the partition's tables from its parts and the rows still in memory; return path → SHA-256."""
    paths = {name: f"{name}/{task.source.name}/{task.partition.name}.parquet" for name in TABLES}
    with ExitStack() as stack:
        writers = {}
        for name, path in paths.items():
            file = stack.enter_context(storage.publish(storage.join(task.run_dir, path)))
            writer = pq.ParquetWriter(file, rows.schemas[name], compression="zstd")
            writers[name] = stack.enter_context(writer)
        begun: list[dict[str, pa.Table]] = []
        ended = 0
        for part in parts:
            begun.append(read_tables(storage.join(task.scratch, part)))
            if not part.endswith(_OPEN):
                for name in TABLES:
                    writers[name].write_table(_one_table(begun, name))
                begun, ended = [], ended + 1
        begun.append(rows.tables())
        for name in TABLES:
            table = _one_table(begun, name)
            if table.num_rows or not ended:
                writers[name].write_table(table)
    return {path: storage.sha256(storage.join(task.run_dir, path)) for path in paths.values()}


def _one_table(parts: Sequence[Mapping[str, pa.Table]], name: str) -> pa.Table:
    """The rows of one row group in one piece: where they were cut would show in its bytes."""
    return parts[0][name] if len(parts) == 1 else pa.concat_tables(part[name] for part in parts).combine_chunks()
