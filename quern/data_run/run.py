"""Runs a data run from its config to its report, and resumes an interrupted one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from quern import storage
from quern.config import given_config
from quern.data_pipeline import report
from quern.data_pipeline import run as pages
from quern.data_pipeline.execution.commits import commit_path
from quern.data_pipeline.execution.engine import open_engine
from quern.data_pipeline.execution.fence import Fence
from quern.data_pipeline.execution.run_directory import is_complete, open_run, remove_torn
from quern.data_pipeline.monitoring.heartbeat import Heartbeat
from quern.data_pipeline.monitoring.progress import RunProgress
from quern.data_pipeline.source_chains import build_chains
from quern.data_run.config import DataRun
from quern.errors import QuernError
from quern.storage.parquet import read_table
from quern.tokenize.corpus_version import read_version
from quern.tokenize.encoding import load_encoding
from quern.tokenize.writing import run as tokenize

__all__ = ["run_data", "run_resolved"]

#: Languages, and hosts, whose tokens stats.json gives.
_MOST_NAMES = 100


def run_data(
    config: str | os.PathLike[str] | Mapping[str, Any] | DataRun, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Run a data run, or resume it; returns what ``stats.json`` holds, of a complete run too.

    ``config``: a YAML file, with ``overrides`` such as ``["workers=4"]``, a mapping, or a :class:`DataRun`.

    Raises:
        InputError: the config, an input or the run directory cannot be what the run needs.
        QuernError: another process is at work in the run directory, or the run failed; it can go on. Or it is complete,
            and a source gave no record and may not be empty.
    """
    resolved = given_config(config, DataRun, overrides)
    stats = run_resolved(resolved)
    report.check_sources(stats, resolved.sources)
    return stats


def run_resolved(
    config: DataRun, tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr)
) -> dict[str, Any]:
    """Run every stage of a resolved config, from the beginning or from where it was left; returns what
    ``stats.json`` holds. ``tell`` takes lines for the person beside the progress.

    Raises:
        InputError: the config, an input or the run directory cannot be what the run needs.
        QuernError: another process is at work in the run directory, or the run failed; it can go on.
    """
    partitions = pages.plan_sources(config)
    build_chains(config)
    if not is_complete(config.run_dir) and not config.tokenize.trains:
        # a missing encoding is an error now, not after hours of pages, and leaves no run directory
        load_encoding(config.tokenize.encoding, config.tokenize.ranks)
    plain = config.model_dump(mode="json")
    with open_run(config.run_dir, plain, pages.inputs_identity(partitions)) as directory:
        if directory.complete:
            _take_up_purge(config.run_dir, tell)
            pages.check_unchanged(directory.record, partitions, config.run_dir)
            names = tuple((partition.source, partition.name) for partition in partitions)
            return _made_anew(config, names, tell)
        with RunProgress() as progress:
            workers: list[Callable[[], dict[str, int]]] = []
            with Heartbeat(config.run_dir, lambda: _told(progress, workers)), ExitStack() as stack:
                stack.push(lambda kind, error, trace: _give_room_back(config.run_dir, error))
                fence = Fence.claim(storage.join(directory.scratch, "driver.json"))
                with open_engine(config.workers, config.ray.address, fence) as engine:
                    workers.append(engine.counts)
                    result = pages.run(config, partitions, engine, progress)
                    progress.start_phase("tokens", len(result.partitions), None)
                    tokens = tokenize.run(
                        config.run_dir, result.partitions, config.tokenize, config.seed, engine,
                        storage.join(directory.scratch, "tokens"),
                    )  # fmt: skip
                    progress.end_phase()
                inputs = pages.inputs_digest(partitions)
                stats = _write_stats_and_report(config, result, asdict(tokens)["sources"])
                directory.finish({key: stats[key] for key in ("pages", "kept", "unique")}, inputs)
                return stats


def _give_room_back(run_dir: str, error: BaseException | None) -> None:
    if isinstance(error, storage.FullError):
        remove_torn(run_dir)  # by workers that ended with the one that had no room


def _take_up_purge(run: str, tell: Callable[[str], None]) -> None:
    """Finish or undo a purge of a complete run that was cut off."""
    from quern.lineage.purge.apply.transaction import recover_held

    told = recover_held(run)
    if told is not None:
        tell(told)


def _told(progress: RunProgress, workers: Sequence[Callable[[], dict[str, int]]]) -> dict[str, Any]:
    """What the heartbeat says: the phases, and the workers once there is an engine."""
    return {**progress.snapshot(), "workers": workers[0]() if workers else None}


def _write_stats_and_report(config: DataRun, result: pages.PagesResult, tokens: dict[str, Any]) -> dict[str, Any]:
    run = config.run_dir
    files: dict[tuple[str, str], report.FileCounts] = {}
    stats = report.build_stats(run, result.duplicates, tokens, result.partitions, files, config.rule_names)
    found = report.survey_run(
        run, seed=config.seed, partitions=result.partitions, lengths=_token_lengths(run, stats["unique"])
    )
    stats |= _tokens_by(found)
    stats["alarms"] = report.find_losses(stats, files, found)
    report.write_stats(run, stats)
    report.write_report(run, stats, found=found)
    return stats


def _token_lengths(run: str, documents: int) -> report.TokenLengths | None:
    """Of each document of a corpus that no purge has changed; None for one larger than what the survey reads."""
    tokens = storage.join(run, "tokens")
    version = read_version(tokens)
    if version["version"] != 1 or documents > report.Budget().rows:
        return None
    schema = pa.schema([("doc_id", pa.binary(16)), ("length", pa.int64())])
    tables = [
        read_table(storage.join(tokens, shard["spans"]), schema.names).cast(schema)
        for entry in version["sources"].values()
        for shard in entry["shards"]
    ]
    spans = pa.concat_tables([schema.empty_table(), *tables])
    return report.TokenLengths.of(spans["doc_id"], spans["length"].to_numpy())


def _tokens_by(found: report.Survey) -> dict[str, Any]:
    """``tokens_by``: the languages and hosts with the most tokens, as [name, tokens, documents]; nothing where not all
    pages were read or a counter was full."""
    if not found.complete or any(counter.lost for counter in found.tokens.values()):
        return {}
    counted = {}
    for what, counter in found.tokens.items():
        ranked = sorted(counter.counts.items(), key=lambda item: (-item[1][0], item[0]))
        most = [[name, tokens, documents] for name, (tokens, documents) in ranked[:_MOST_NAMES]]
        counted[what] = {"names": len(ranked), "tokens": sum(own[0] for _, own in ranked), "most": most}
    return {"tokens_by": counted} if any(own["tokens"] for own in counted.values()) else {}


def _made_anew(config: DataRun, names: tuple[tuple[str, str], ...], tell: Callable[[str], None]) -> dict[str, Any]:
    """What ``stats.json`` of a complete run holds; that file and the report are made anew from commits and tables where
    they are gone."""
    run = config.run_dir
    path = storage.join(run, "stats.json")
    if not storage.is_file(path):
        duplicates, tokens = (
            storage.read_json(commit_path(run, phase, "all", piece))["counts"]
            for phase, piece in (("duplicates", "decisions"), ("shards", "version"))
        )
        return _write_stats_and_report(config, pages.PagesResult(names, duplicates), tokens["sources"])
    stats = dict(storage.read_json(path))
    if not storage.is_file(storage.join(run, "report.html")):
        try:
            report.write_report(run, stats, seed=config.seed, partitions=names)
        except (QuernError, OSError, KeyError, TypeError, ValueError) as error:
            tell(f"{run}/report.html: is missing and cannot be made anew: {error}")
    return stats
