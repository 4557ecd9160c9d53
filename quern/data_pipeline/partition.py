"""One partition through the chain, on one worker: read → stages → rows → files → commit.

Runs in whatever process the engine gives it. Every :data:`FLUSH_PAGES` pages the finished rows are set down in the
scratch folder; after a crash the partition goes on behind the last of them.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quern import storage
from quern.config import canonical_json
from quern.data_pipeline.chain import QUALITY_GATE, Chain
from quern.data_pipeline.commits import publish_commit
from quern.data_pipeline.config import ChainConfig
from quern.data_pipeline.document import (
    DOCUMENT_SCHEMA,
    SIGNATURE_SCHEMA,
    Page,
    content_hash,
    verdict_schema,
)
from quern.data_pipeline.isolation import Marker, Watchdog, bounded_memory, give_back_memory
from quern.data_pipeline.sources import Partition, ReadLog, SourceConfig, read
from quern.errors import QuernError

__all__ = ["PartitionTask", "process_partition"]

log = logging.getLogger(__name__)

FLUSH_PAGES = 512
FLUSH_CHARS = 32 << 20
#: Characters of a page behind which the heap is swept: some milliseconds.
HUGE_CHARS = 1 << 20
TABLES = ("verdicts", "documents", "signatures")


@dataclass(frozen=True)
class PartitionTask:
    """Everything a worker needs to do one partition."""

    run_dir: str
    scratch: str
    """A folder of this partition alone, for rows already finished."""
    marker: str
    """Path of the marker file, on the machine that runs the task."""
    source: SourceConfig
    partition: Partition
    chain: ChainConfig
    config_hash: str
    page_timeout_s: float
    worker_memory_mib: int | None
    quarantined: tuple[tuple[int, str], ...] = ()
    """(ordinal, reason) of pages that ended a worker; they are not parsed again."""

    @property
    def inputs(self) -> dict[str, str]:
        """The input fingerprint that the commit records."""
        return {file.relative_path: file.fingerprint for file in self.partition.files}


@functools.lru_cache(maxsize=2)
def _chain(config_json: str) -> Chain:
    """One chain a process: its models and memos stay warm from partition to partition."""
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
    parts: int = 0

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
            "kept": self.counts["kept"],
            "text_chars": self.counts["text_chars"],
            "text_bytes_kept": self.counts["text_bytes_kept"],
            "pre_skip": self.counts["pre_skip"],
            "by_stage": dict(self.by_stage),
            "by_reason": dict(self.by_reason),
            "by_language": dict(self.by_language),
            "other_records": dict(read_log.other_records),
            "damage": list(read_log.damage),
            "damage_left_out": read_log.damage_left_out,
            "stage_seconds": {name: round(value, 6) for name, value in self.seconds.items() if name != "cpu"},
            "cpu_seconds": round(self.seconds["cpu"], 6),
        }


class _Rows:
    """Finished pages as columns, set down as one Arrow table of each kind."""

    def __init__(self, measures: tuple[str, ...]) -> None:
        self.schemas = {
            "verdicts": verdict_schema(measures),
            "documents": DOCUMENT_SCHEMA,
            "signatures": SIGNATURE_SCHEMA,
        }
        self.measures = measures
        self.clear()

    def clear(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
        self.chars = 0

    def __len__(self) -> int:
        return len(self.rows["verdicts"])

    def add(self, page: Page, reached: int) -> None:
        text = page.text if reached >= QUALITY_GATE else None
        names = (page.url, page.canonical_url, page.surt, page.record_id, page.payload_digest)
        self.chars += sum(map(len, filter(None, names)))
        self.rows["verdicts"].append(
            {
                "doc_id": page.doc_id,
                "source": page.source,
                "url": page.url,
                "canonical_url": page.canonical_url,
                "surt": page.surt,
                "host": page.host,
                "source_file": page.source_file,
                "record_offset": page.record_offset,
                "record_length": page.record_length,
                "record_id": page.record_id,
                "fetched_at": page.fetched_at,
                "payload_digest": page.payload_digest,
                "charset": page.charset,
                "language": page.language,
                "language_score": page.language_score,
                "pre_filter_hash": content_hash(page.extracted) if page.extracted is not None else None,
                "post_filter_hash": content_hash(text) if text is not None else None,
                "stage": page.stage,
                "reason": page.reason,
                "failed_rules": page.failed_rules,
                **{name: page.measures.get(name) for name in self.measures},
            }
        )
        if text is not None:
            extracted = page.extracted if page.extracted != text else None
            self.rows["documents"].append(
                {"doc_id": page.doc_id, "text": text, "extracted": extracted, "kept": page.stage is None}
            )
            self.chars += len(text) + len(extracted or "")
        if page.stage is None:
            self.rows["signatures"].append(
                {"doc_id": page.doc_id, "signature": page.signature, "shingles": page.shingles}
            )

    def tables(self) -> dict[str, pa.Table]:
        return {name: _table(rows, self.schemas[name]) for name, rows in self.rows.items()}


def _table(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    columns = [_column([row[field.name] for row in rows], field) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _column(values: list[Any], field: pa.Field) -> pa.Array:
    if not pa.types.is_list(field.type) or pa.types.is_string(field.type.value_type):
        return pa.array(values, field.type)
    sizes = [0 if value is None else len(value) for value in values]
    filled = [value for value in values if value is not None and len(value)]
    flat = np.concatenate(filled) if filled else np.empty(0, field.type.value_type.to_pandas_dtype())
    offsets = pa.array(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
    mask = pa.array(np.array([value is None for value in values], bool))
    return pa.ListArray.from_arrays(offsets, pa.array(flat, field.type.value_type), field.type, mask=mask)


def process_partition(task: PartitionTask) -> dict[str, Any]:
    """Read, judge and commit one partition; return its commit object.

    Files written: verdicts, documents and signatures of the partition under ``task.run_dir``, then the commit.

    Raises:
        QuernError: an input that cannot be opened, or two records with one identity.
    """
    chain = _chain(canonical_json(task.chain))
    chain.seconds = dict.fromkeys(chain.seconds, 0.0)
    rows = _Rows(chain.measures)
    progress = _resume(task)
    read_log = ReadLog()
    quarantined = dict(task.quarantined)
    cpu = time.process_time()
    seen: set[bytes] = set()
    marker = Marker(task.marker)
    try:
        with (
            Watchdog(task.page_timeout_s, Marker.stack_of(task.marker)) as watchdog,
            bounded_memory(task.worker_memory_mib),
        ):
            pages = _identified(task, read_log, seen)
            behind = progress.pages
            for ordinal in itertools.count():
                marker.set(ordinal)
                watchdog.page()
                page = next(pages, None)
                if page is None:
                    break
                if ordinal < behind:  # judged by an earlier attempt; each has its own time here too
                    continue
                watchdog.judge()
                is_huge = len(page.raw) > HUGE_CHARS
                page, reached = _judge(chain, page, quarantined.get(ordinal))
                rows.add(page, reached)
                progress.add(page)
                if is_huge:
                    page.raw = ""
                    give_back_memory()
                if len(rows) >= FLUSH_PAGES or rows.chars >= FLUSH_CHARS:
                    marker.set(-1)
                    watchdog.rest()  # a slow disk or store is no page's fault
                    cpu = _count_time(progress, chain, cpu)
                    _set_down(task, rows, progress)
        marker.set(-1)
        _count_time(progress, chain, cpu)
        outputs = _publish(task, rows, progress.parts)
        entry = publish_commit(
            task.run_dir,
            "pages",
            task.source.name,
            task.partition.name,
            inputs=task.inputs,
            config=task.config_hash,
            outputs=outputs,
            counts=progress.to_counts(read_log),
        )
    finally:
        marker.close()
    storage.remove_tree(task.scratch)
    return entry


def _identified(task: PartitionTask, read_log: ReadLog, seen: set[bytes]) -> Iterator[Page]:
    for page in read(task.source, task.partition, read_log):
        if page.doc_id in seen:
            raise QuernError(
                f"{page.source_file}: record at {page.position}: its identity was given before in {task.partition.name}"
            )
        seen.add(page.doc_id)
        yield page


def _judge(chain: Chain, page: Page, quarantine: str | None) -> tuple[Page, int]:
    if quarantine is None:
        try:
            return chain(page)
        except QuernError:  # a list, a model or a setting is wrong, not the page
            raise
        except Exception as error:  # one page's parser error must not cost the others
            log.warning("%s at %s: %s: %s", page.source_file, page.position, type(error).__name__, error)
            quarantine = f"quarantine.{type(error).__name__.lower()}"
    page.failures.clear()
    page.text = page.extracted = None
    page.fail("quarantine", quarantine)
    page.settle()
    return page, 0


def _count_time(progress: _Progress, chain: Chain, since: float) -> float:
    now = time.process_time()
    for name, value in {"cpu": now - since, **chain.seconds}.items():
        progress.seconds[name] = progress.seconds.get(name, 0.0) + value
    chain.seconds = dict.fromkeys(chain.seconds, 0.0)
    return now


def _part(task: PartitionTask, number: int, name: str) -> str:
    return storage.join(task.scratch, f"part-{number:05d}.{name}")


def _set_down(task: PartitionTask, rows: _Rows, progress: _Progress) -> None:
    """Flush finished rows to the scratch folder; the progress file is the commit of the part."""
    for name, table in rows.tables().items():
        path = _part(task, progress.parts, f"{name}.arrow")
        with storage.publish(path) as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    progress.parts += 1
    storage.write_json(
        _part(task, progress.parts - 1, "progress.json"),
        {"inputs": task.inputs, "config": task.config_hash, "progress": vars(progress)},
    )
    rows.clear()


def _resume(task: PartitionTask) -> _Progress:
    """Where an earlier attempt with the same inputs and config left off."""
    progress = _Progress()
    while True:
        path = _part(task, progress.parts, "progress.json")
        if not storage.exists(path):
            return progress
        stored = storage.read_json(path)
        if stored["inputs"] != task.inputs or stored["config"] != task.config_hash:
            if not progress.parts:  # else a part overwritten halfway could later pass for one of the old attempt
                storage.remove_tree(task.scratch)
            return progress
        kept = stored["progress"]
        tables = {name: Counter(kept[name]) for name in ("counts", "by_stage", "by_reason", "by_language")}
        progress = _Progress(pages=kept["pages"], parts=kept["parts"], seconds=kept["seconds"], **tables)


def _publish(task: PartitionTask, rows: _Rows, parts: int) -> dict[str, str]:
    """Write the partition's tables from its parts and the rows still in memory; return path → SHA-256."""
    outputs = {}
    rest = rows.tables()
    for name in TABLES:
        relative = f"{name}/{task.source.name}/{task.partition.name}.parquet"
        path = storage.join(task.run_dir, relative)
        with storage.publish(path) as file, pq.ParquetWriter(file, rows.schemas[name], compression="zstd") as writer:
            for number in range(parts):
                with storage.open_read(_part(task, number, f"{name}.arrow")) as part:
                    writer.write_table(pa.ipc.open_file(part).read_all())
            if rest[name].num_rows or not parts:
                writer.write_table(rest[name])
        outputs[relative] = storage.sha256(path)
    return outputs
