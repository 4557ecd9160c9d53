"""``quern demo``: the whole pipeline, from crawl to trained model, on a generated sample site."""

from __future__ import annotations

import time
from importlib.resources import as_file, files
from json import dumps
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from quern import storage
from quern.cli.demo.check import KindResult, PageOutcome, compare, read_outcomes
from quern.cli.demo.lineage import walk_lineage
from quern.cli.demo.purge import purge_demo
from quern.cli.demo.train import train_demo
from quern.cli.output import JSON, json_stdout, out_console, reports_errors
from quern.config import load_config
from quern.data_pipeline import report
from quern.data_run.config import DataRun
from quern.data_run.run import run_resolved
from quern.demo import Site, write_site
from quern.errors import QuernError

__all__ = ["demo"]


@reports_errors
def demo(
    folder: Annotated[str, typer.Option(help="Where the sample site and the run go.")] = "demo-run",
    seed: Annotated[int, typer.Option(min=0, help="Another seed is another site.")] = 0,
    json: bool = JSON,
) -> None:
    """Write a sample site of 320 pages, process it into tokens, compare every verdict with what a person expects,
    and train a small model on them that is killed, resumes, and is compared with n-gram models; then trace a page from
    its URL to the steps that read it, and back; and purge a domain, verify the purge, and resume without it.
    """
    began = time.monotonic()
    with json_stdout(json) as emit:
        console = out_console()
        site = write_site(storage.join(folder, "site"), seed)
        run_dir = storage.join(folder, "run")
        storage.remove_tree(run_dir)
        if not json:
            console.print(f"{len(site.pages)} pages of a sample site, as a crawler left them: {site.folder}/warc\n")
        stats = run_resolved(_config(site, run_dir, seed))
        outcomes = read_outcomes(run_dir)
        results = compare(site.pages, outcomes)
        if not json:
            report.print_funnel(stats, console)
            _print_kinds(results, console)
        trained = train_demo(folder, run_dir, seed, None if json else console)
        walked = walk_lineage(run_dir, trained["run"], _pages_to_walk(site, outcomes), None if json else console)
        purged = purge_demo(run_dir, trained["run"], None if json else console)
        kinds = [vars(result) for result in results]
        emit({"kinds": kinds, "stats": stats, "training": trained, "lineage": walked, "purge": purged})
        if not json:
            _print_next(folder, run_dir, time.monotonic() - began, console)
    wrong = [complaint for result in results for complaint in result.wrong]
    if wrong:
        raise QuernError(f"{len(wrong)} pages were not judged as expected; the first: {wrong[0]}")


def _config(site: Site, run_dir: str, seed: int) -> DataRun:
    with as_file(files("quern.demo").joinpath("demo.yaml")) as path:
        return load_config(
            path,
            DataRun,
            [
                f"run_dir={dumps(run_dir, ensure_ascii=False)}",
                f"seed={seed}",
                f"sources.0.paths={dumps(f'{site.folder}/warc/*.warc.gz', ensure_ascii=False)}",
                f"toxicity.lexicons.en={dumps(site.lexicon, ensure_ascii=False)}",
            ],
        )


def _print_kinds(results: list[KindResult], console: Console) -> None:
    table = Table(title="What a careful person expects, and what happened", title_justify="left", box=None)
    for name in ("kind", "pages", "expected", "happened", ""):
        table.add_column(name, justify="right" if name == "pages" else "left")
    for result in results:
        happened = sorted(result.actual.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{count} {name}" for name, count in happened[:2])
        shown += f", {len(happened) - 2} more" if len(happened) > 2 else ""
        mark = "[green]as expected[/]" if not result.wrong else f"[red]{len(result.wrong)} differ[/]"
        table.add_row(result.kind + (" *" if result.hard else ""), str(result.pages), result.expected, shown, mark)
    console.print()
    console.print(table)
    pages = sum(result.pages for result in results)
    hard = sum(result.pages for result in results if result.hard)
    wrong = sum(len(result.wrong) for result in results)
    console.print(f"{pages - wrong} of {pages} as expected; * hard cases that must be kept: {hard}\n")


def _pages_to_walk(site: Site, outcomes: dict[str, PageOutcome]) -> list[str]:
    return [page.url for page in site.pages if page.kind == "control_token" and outcomes[page.record_id].kept]


def _print_next(folder: str, run_dir: str, seconds: float, console: Console) -> None:
    console.print(f"Done in {seconds:.0f} s. Look at")
    console.print(f"  {run_dir}/report.html            the funnel, why pages were dropped, samples of both")
    console.print(f"  quern lineage show {run_dir} --shard sample/shard_00000 --token 5000")
    console.print(f"  quern lineage exposure {folder}/train --domain sample.example")
    console.print(f"  quern lineage step {folder}/train 100")
    console.print(f"  quern lineage verify {run_dir} --deep")
    console.print(f"  quern data report {run_dir} --json")
    console.print(f"  quern checkpoint list {folder}/train")
    console.print(f"  quern checkpoint sample {folder}/train --prompt 'The river'")
    console.print(f"  tensorboard --logdir {folder}/train/tensorboard")
    console.print(f"  {folder}/site/pages.jsonl         every page with what was expected of it")
