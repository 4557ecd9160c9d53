"""``quern data``: crawl → documents → duplicates → tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from quern import storage
from quern.cli.output import (
    JSON,
    ended_by_signals,
    err_console,
    json_stdout,
    one_line,
    out_console,
    plain,
    reports_errors,
)
from quern.config import dump_yaml, load_config
from quern.data_pipeline import report, run_status
from quern.data_pipeline import run as pages
from quern.data_pipeline.commits import commit_path
from quern.data_pipeline.engine import open_engine
from quern.data_pipeline.fence import Fence
from quern.data_pipeline.heartbeat import Heartbeat
from quern.data_pipeline.progress import Progress
from quern.data_pipeline.run_directory import RunDirectory, check_writable, is_complete, look, open_run, remove_torn
from quern.errors import InputError, QuernError
from quern.tokenize import run as tokenize
from quern.tokenize.config import DataRun, check
from quern.words import counted, size

app = typer.Typer(help="Crawl → documents → duplicates → tokens.", no_args_is_help=True)

Config = Annotated[str, typer.Argument(help="A YAML file; configs/ has ready ones.", metavar="CONFIG")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, dotted: sources.0.paths=crawl/*.warc.gz")]
#: What a command that starts here does, by what is there.
_STATES = {"new": "no run is there yet", "unfinished": "an unfinished run, which goes on",
           "complete": "a complete run, which is left as it is"}  # fmt: skip

RunDir = Annotated[str, typer.Argument(help="A run directory.", metavar="RUN")]


@app.command()
@ended_by_signals()
@reports_errors
def run(
    config: Config,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config and the plan; write nothing.")
    ] = False,
    json: bool = JSON,
) -> None:
    """Run CONFIG, or go on with it where it was left."""
    resolved = load_config(config, DataRun, overrides or ())
    with json_stdout(json) as emit:
        if dry_run:
            _print_plan(resolved, emit, json)
            return
        stats = run_data(resolved)
        emit(stats)
        if not json:
            _print_summary(resolved.run_dir, stats)
        report.check_sources(stats, resolved.sources)


def run_data(config: DataRun) -> dict[str, Any]:
    """The whole data road for a resolved config; returns what ``stats.json`` holds."""
    partitions = pages.plan_sources(config)
    pages.check(config)
    if not is_complete(config.run_dir):
        check(config)  # a missing encoding is an error now, not after hours of pages, and founds no run
    plain = config.model_dump(mode="json")
    with open_run(config.run_dir, plain, pages.inputs_identity(partitions)) as directory:
        if directory.complete:
            _take_up_purge(config.run_dir)
            pages.check_unchanged(directory.record, partitions, config.run_dir)
            names = tuple((partition.source, partition.name) for partition in partitions)
            return _made_anew(config, names)
        with Progress() as progress:
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
                return _finish(directory, result, tokens.to_dict()["sources"], inputs, config.seed)


def _give_room_back(run_dir: str, error: BaseException | None) -> None:
    if isinstance(error, storage.FullError):
        remove_torn(run_dir)  # by workers that ended with the one that had no room


def _take_up_purge(run: str) -> None:
    """Finish or undo a purge of a complete run that was cut off."""
    from quern.lineage.purge.transaction import recover_held

    told = recover_held(run)
    if told is not None:
        err_console().print(told, markup=False, soft_wrap=True)


def _told(progress: Progress, workers: Sequence[Callable[[], dict[str, int]]]) -> dict[str, Any]:
    """What the heartbeat says: the phases, and the workers once there is an engine."""
    return {**progress.snapshot(), "workers": workers[0]() if workers else None}


def _finish(
    directory: RunDirectory, result: pages.PagesResult, tokens: dict[str, Any], inputs: str, seed: int
) -> dict[str, Any]:
    stats = _write_stats_and_report(directory.path, result, tokens, seed)
    directory.finish({key: stats[key] for key in ("pages", "kept", "unique")}, inputs)
    return stats


def _write_stats_and_report(run: str, result: pages.PagesResult, tokens: dict[str, Any], seed: int) -> dict[str, Any]:
    files: dict[tuple[str, str], report.FileCounts] = {}
    stats = report.build_stats(run, result.duplicates, tokens, result.partitions, files)
    found = report.survey_run(run, seed=seed, partitions=result.partitions)
    stats["alarms"] = report.find_losses(stats, files, found)
    report.write_stats(run, stats)
    report.write_report(run, stats, found=found)
    return stats


def _made_anew(config: DataRun, names: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """What ``stats.json`` of a complete run holds; that file and the report are made anew from commits and tables where
    they are gone."""
    run = config.run_dir
    path = storage.join(run, "stats.json")
    if not storage.is_file(path):
        duplicates, tokens = (
            storage.read_json(commit_path(run, phase, "all", piece))["counts"]
            for phase, piece in (("duplicates", "decisions"), ("shards", "version"))
        )
        return _write_stats_and_report(run, pages.PagesResult(names, duplicates), tokens["sources"], config.seed)
    stats = dict(storage.read_json(path))
    if not storage.is_file(storage.join(run, "report.html")):
        try:
            report.write_report(run, stats, seed=config.seed, partitions=names)
        except (QuernError, OSError, KeyError, TypeError, ValueError) as error:
            told = one_line(f"{run}/report.html: is missing and cannot be made anew: {error}")
            err_console().print(told, markup=False, soft_wrap=True)
    return stats


def _print_summary(run_dir: str, stats: dict[str, Any]) -> None:
    console = out_console()
    report.print_funnel(stats, console)
    console.print(f"run        {plain(run_dir)}", markup=False)
    path = storage.join(run_dir, "report.html")
    gone = "" if storage.is_file(path) else " is missing; quern data run with the config of the run makes it anew"
    console.print(f"report     {plain(path)}{gone}", markup=False)
    console.print(f"tokens     {plain(storage.join(run_dir, 'tokens', 'VERSION.json'))}", markup=False)


def _print_plan(config: DataRun, emit: Any, as_json: bool) -> None:
    partitions = pages.plan_sources(config)
    pages.check(config)
    record = look(config.run_dir, config.model_dump(mode="json"))
    check_writable(config.run_dir)
    state = "new" if record is None else "complete" if record["status"] == "complete" else "unfinished"
    if record is not None and state == "complete":
        pages.check_unchanged(record, partitions, config.run_dir)
    per_source = {}
    for source in config.sources:
        own = [partition for partition in partitions if partition.source == source.name]
        files = {file.path for partition in own for file in partition.files}
        per_source[source.name] = {"partitions": len(own), "files": len(files), "bytes": sum(p.size for p in own)}
    emit({"config": config.model_dump(mode="json"), "plan": per_source, "run": state})
    if not as_json:
        print(dump_yaml(config), end="")
        err_console().print(f"{plain(config.run_dir)}: {_STATES[state]}", markup=False)
        for name, row in per_source.items():
            err_console().print(
                f"{name}: {counted(row['files'], 'file')} in {counted(row['partitions'], 'partition')}, "
                f"{size(row['bytes'])}"
            )


@app.command()
@reports_errors
def status(
    run_dir: RunDir,
    watch: Annotated[
        float | None, typer.Option("--watch", min=0.5, help="Look again every so many seconds, until it has ended.")
    ] = None,
    json: bool = JSON,
) -> None:
    """How far a run is, from its files: phase, partitions, pages, pace, trouble, and whether its driver lives."""
    found = run_status.read_status(run_dir)
    with json_stdout(json) as emit:
        while True:
            emit(found)
            if not json:
                for line in run_status.describe(run_dir, found):
                    print(one_line(line))
            if watch is None or found["status"] != "running":
                return
            time.sleep(watch)
            found = run_status.read_status(run_dir)


@app.command("report")
@reports_errors
def report_command(run_dir: RunDir, json: bool = JSON) -> None:
    """The funnel of a finished run, and where its HTML report is."""
    path = storage.join(run_dir, "stats.json")
    if not storage.exists(path):
        raise InputError(f"{run_dir}: expected a complete data run: {_why_no_stats(run_dir)}")
    stats = storage.read_json(path)
    with json_stdout(json) as emit:
        emit(stats)
        if not json:
            _print_summary(run_dir, stats)


def _why_no_stats(run_dir: str) -> str:
    path = storage.join(run_dir, "run.json")
    record = storage.read_json(path) if storage.exists(path) else None
    if not isinstance(record, dict):
        return "it has no run.json"
    if isinstance(config := record.get("config"), dict) and "import" in config:
        return "this one is of imported tokens, and of these there is no report"
    if is_complete(run_dir):
        return "its stats.json is missing; quern data run with the config of the run makes it anew"
    return (
        f"this one has not ended, and stats.json is written at the end; quern data status {run_dir} says how far it is"
    )
