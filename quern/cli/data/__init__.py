"""``quern data``: crawl → documents → duplicates → tokens."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from quern import storage
from quern.cli.config.init import DATA_CASES, init_command
from quern.cli.config.keys import keys_command
from quern.cli.data import texts
from quern.cli.output import (
    JSON,
    ended_by_signals,
    err_console,
    json_stdout,
    out_console,
    plain_line,
    reports_errors,
    say,
)
from quern.config import dump_yaml, load_config
from quern.data_pipeline import report
from quern.data_pipeline import run as pages
from quern.data_pipeline.execution.run_directory import (
    check_writable,
    is_complete,
    look,
    read_record,
)
from quern.data_pipeline.monitoring import run_status
from quern.data_pipeline.source_chains import build_chains
from quern.data_run.config import DataRun
from quern.data_run.run import run_resolved
from quern.errors import InputError
from quern.tokenize.corpus_version import read_version
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
    """Run CONFIG, or resume it."""
    resolved = load_config(config, DataRun, overrides or ())
    with json_stdout(json) as emit:
        if dry_run:
            _print_plan(resolved, emit, json)
            return
        stats = run_resolved(resolved, _tell)
        emit(stats)
        if not json:
            _print_summary(resolved.run_dir, stats)
        report.check_sources(stats, resolved.sources)


def _tell(line: str) -> None:
    say(plain_line(line), err_console())


def _print_summary(run_dir: str, stats: dict[str, Any]) -> None:
    console = out_console()
    report.print_funnel(stats, console)
    say(f"run        {run_dir}")
    path = storage.join(run_dir, "report.html")
    gone = "" if storage.is_file(path) else " is missing; quern data run with the config of the run makes it anew"
    say(f"report     {path}{gone}")
    say(f"tokens     {storage.join(run_dir, 'tokens', 'VERSION.json')}")
    if (since := _purged_since(run_dir)) is not None:
        say(f"purged     {since}")


def _purged_since(run_dir: str) -> str | None:
    """What purges have taken out of a run, whose figures stay as they were; None where there was none."""
    if not storage.list_files(storage.join(run_dir, "audit")):
        return None
    from quern.lineage.purge.record.audit import numbers

    try:
        of = f", the tokens are those of corpus version {read_version(storage.join(run_dir, 'tokens'))['version']}"
    except (InputError, OSError):  # lineage verify tells of it
        of = ""
    purges = counted(len(numbers(run_dir)), "purge")
    return f"in {purges}: the figures above are of the run as it was{of}"


def _print_plan(config: DataRun, emit: Any, as_json: bool) -> None:
    partitions = pages.plan_sources(config)
    build_chains(config)
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
        say(f"{config.run_dir}: {_STATES[state]}", err_console())
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
        float | None,
        typer.Option("--watch", min=0.5, help="Print again every so many seconds until the run has ended."),
    ] = None,
    json: bool = JSON,
) -> None:
    """Print the progress of a run from its files: phase, partitions, pages, rate, problems, and whether its driver is
    alive."""
    found = run_status.read_status(run_dir)
    with json_stdout(json) as emit:
        while True:
            emit(found)
            if not json:
                for line in run_status.describe(run_dir, found):
                    print(plain_line(line))
            if watch is None or found["status"] != "running":
                return
            time.sleep(watch)
            found = run_status.read_status(run_dir)


@app.command("report")
@reports_errors
def report_command(run_dir: RunDir, json: bool = JSON) -> None:
    """Print the funnel of a finished run and the path of its HTML report."""
    path = storage.join(run_dir, "stats.json")
    if not storage.exists(path):
        raise InputError(f"{run_dir}: expected a complete data run: {_why_no_stats(run_dir)}")
    stats = storage.read_json(path)
    with json_stdout(json) as emit:
        emit(stats)
        if not json:
            _print_summary(run_dir, stats)


def _why_no_stats(run_dir: str) -> str:
    record = read_record(run_dir)
    if record is None:
        return "it has no run.json"
    if isinstance(config := record.get("config"), dict) and "import" in config:
        return "this one is of imported tokens, and of these there is no report"
    if is_complete(run_dir):
        return "its stats.json is missing; quern data run with the config of the run makes it anew"
    return (
        f"this one has not ended, and stats.json is written at the end; quern data status {run_dir} says how far it is"
    )


app.command("export")(texts.export)
app.command("keys")(keys_command(DataRun))
app.command("init")(init_command(DataRun, DATA_CASES, "quern data run"))
