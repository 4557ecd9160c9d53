"""``quern data``: crawl → documents → duplicates → tokens."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from quern import storage
from quern.cli.output import JSON, err_console, json_stdout, out_console, reports_errors
from quern.config import dump_yaml, load_config
from quern.data_pipeline import report
from quern.data_pipeline import run as pages
from quern.data_pipeline.engine import open_engine
from quern.data_pipeline.progress import Progress
from quern.data_pipeline.run_directory import RunDirectory, is_complete, open_run
from quern.tokenize import run as tokenize
from quern.tokenize.config import DataRun, check

app = typer.Typer(help="Crawl → documents → duplicates → tokens.", no_args_is_help=True)

Config = Annotated[str, typer.Argument(help="A YAML file; configs/ has ready ones.", metavar="CONFIG")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, dotted: sources.0.paths=crawl/*.warc.gz")]
RunDir = Annotated[str, typer.Argument(help="A run directory.", metavar="RUN")]


@app.command()
@reports_errors
def run(
    config: Config,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and the plan; do nothing.")] = (
        False
    ),
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


def run_data(config: DataRun) -> dict[str, Any]:
    """The whole data road for a resolved config; returns what ``stats.json`` holds."""
    partitions = pages.plan_sources(config)
    pages.check(config)
    if not is_complete(config.run_dir):
        check(config)  # a missing encoding is an error now, not after hours of pages, and founds no run
    plain = config.model_dump(mode="json")
    with open_run(config.run_dir, plain, pages.inputs_identity(partitions)) as directory:
        if directory.complete:
            pages.check_unchanged(directory.record, partitions, config.run_dir)
            return dict(storage.read_json(storage.join(config.run_dir, "stats.json")))
        with Progress() as progress, open_engine(config.workers, config.ray.address) as engine:
            result = pages.run(config, partitions, engine, progress)
            progress.start_phase("tokens", len(result.partitions), None)
            tokens = tokenize.run(
                config.run_dir, result.partitions, config.tokenize, config.seed, engine,
                storage.join(directory.scratch, "tokens"),
            )  # fmt: skip
            progress.end_phase()
        return _finish(directory, result, tokens.to_dict()["sources"], pages.inputs_digest(partitions), config.seed)


def _finish(
    directory: RunDirectory, result: pages.PagesResult, tokens: dict[str, Any], inputs: str, seed: int
) -> dict[str, Any]:
    stats = report.build_stats(directory.path, result.duplicates, tokens, result.partitions)
    report.write_stats(directory.path, stats)
    report.write_report(directory.path, stats, seed=seed, partitions=result.partitions)
    directory.finish({key: stats[key] for key in ("pages", "kept", "unique")}, inputs)
    return stats


def _print_summary(run_dir: str, stats: dict[str, Any]) -> None:
    console = out_console()
    report.print_funnel(stats, console)
    console.print(f"run        {run_dir}", markup=False)
    console.print(f"report     {storage.join(run_dir, 'report.html')}", markup=False)
    console.print(f"tokens     {storage.join(run_dir, 'tokens', 'VERSION.json')}", markup=False)


def _print_plan(config: DataRun, emit: Any, as_json: bool) -> None:
    partitions = pages.plan_sources(config)
    pages.check(config)
    per_source = {
        source.name: {
            "partitions": sum(p.source == source.name for p in partitions),
            "files": len({f.path for p in partitions if p.source == source.name for f in p.files}),
            "bytes": sum(p.size for p in partitions if p.source == source.name),
        }
        for source in config.sources
    }
    emit({"config": config.model_dump(mode="json"), "plan": per_source})
    if not as_json:
        print(dump_yaml(config), end="")
        for name, row in per_source.items():
            err_console().print(
                f"{name}: {row['files']:,} files in {row['partitions']:,} partitions, {row['bytes'] / 1e6:,.1f} MB"
            )


@app.command()
@reports_errors
def status(run_dir: RunDir, json: bool = JSON) -> None:
    """How far a run is: committed partitions and documents by phase."""
    record = storage.read_json(storage.join(run_dir, "run.json"))
    phases: dict[str, dict[str, int]] = {}
    for path in storage.list_files(storage.join(run_dir, "commits")):
        entry = storage.read_json(path)
        row = phases.setdefault(entry["phase"], {"commits": 0, "pages": 0, "kept": 0})
        row["commits"] += 1
        row["pages"] += entry["counts"].get("pages", 0)
        row["kept"] += entry["counts"].get("kept", 0)
    with json_stdout(json) as emit:
        emit({"status": record["status"], "phases": phases, "counts": record["counts"]})
        if not json:
            print(f"{run_dir}: {record['status']}")
            for phase, row in phases.items():
                pages_text = f", {row['pages']:,} pages, {row['kept']:,} kept" if row["pages"] else ""
                print(f"  {phase:<11} {row['commits']:,} committed{pages_text}")


@app.command("report")
@reports_errors
def report_command(run_dir: RunDir, json: bool = JSON) -> None:
    """The funnel of a finished run, and where its HTML report is."""
    stats = storage.read_json(storage.join(run_dir, "stats.json"))
    with json_stdout(json) as emit:
        emit(stats)
        if not json:
            _print_summary(run_dir, stats)
