"""``quern demo``: the whole pipeline, from crawl to trained model, on a generated sample site."""

from __future__ import annotations

import time
from importlib.resources import as_file, files
from json import dumps
from typing import Annotated

import typer
from rich.console import Console

from quern import storage
from quern.cli.demo.check import KindResult, compare, read_outcomes
from quern.cli.demo.lineage import walk_lineage
from quern.cli.demo.mixture import mix_demo
from quern.cli.demo.purge import purge_demo
from quern.cli.demo.train import train_demo
from quern.cli.output import JSON, columns, json_stdout, out_console, reports_errors
from quern.config import load_config
from quern.data_pipeline import report
from quern.data_run.config import DataRun
from quern.data_run.run import run_resolved
from quern.demo import Site, write_site
from quern.errors import QuernError

__all__ = ["demo"]

_NEXT = """Look at
  {0}/run/report.html            the funnel, why pages were dropped, samples of both
  quern lineage show {0}/run --shard sample/shard_00000 --token 5000
  quern lineage exposure {0}/train --domain sample.example
  quern lineage step {0}/train 100
  quern mix fit {0}/swarm/runs.csv --form linear
  quern lineage verify {0}/run --deep
  quern data report {0}/run --json
  quern checkpoint list {0}/train
  quern checkpoint sample {0}/train --prompt 'The river'
  tensorboard --logdir {0}/train/tensorboard
  {0}/site/pages.jsonl         every page with what was expected of it"""


@reports_errors
def demo(
    folder: Annotated[str, typer.Option(help="Where the sample site and the run go.")] = "demo-run",
    seed: Annotated[int, typer.Option(min=0, help="Another seed is another site.")] = 0,
    json: bool = JSON,
) -> None:
    """Write a sample site of 320 pages, process it into tokens, compare every verdict with what a person expects,
    and train a small model on them that is killed, resumes, and is compared with n-gram models; then trace a page from
    its URL to the steps that read it, and back; train a swarm of tiny runs on two kinds of page, whose losses propose
    weights for them; and purge a domain, verify the purge, and resume without it.
    """
    began = time.monotonic()
    with json_stdout(json) as emit:
        console = Console(quiet=True) if json else out_console()
        site = write_site(storage.join(folder, "site"), seed)
        run_dir = storage.join(folder, "run")
        storage.remove_tree(run_dir)
        console.print(f"{len(site.pages)} pages of a sample site, as a crawler left them: {site.folder}/warc\n")
        stats = run_resolved(_config(site, run_dir, seed))
        outcomes = read_outcomes(run_dir)
        results = compare(site.pages, outcomes)
        report.print_funnel(stats, console)
        _print_kinds(results, console)
        trained = train_demo(folder, run_dir, seed, console)
        marked = [page for page in site.pages if page.kind == "control_token"]
        kept = [page.url for page in marked if str(outcomes[page.record_id]) == "kept"]
        walked = walk_lineage(run_dir, trained["run"], kept, console)
        mixed = mix_demo(folder, run_dir, seed, console)
        purged = purge_demo(run_dir, trained["run"], console)
        kinds = [vars(result) for result in results]
        emit(
            {"kinds": kinds, "stats": stats, "training": trained, "lineage": walked, "mixture": mixed, "purge": purged}
        )
        console.print(f"Done in {time.monotonic() - began:.0f} s. {_NEXT.format(folder)}", markup=False)
    wrong = [complaint for result in results for complaint in result.wrong]
    if wrong:
        raise QuernError(f"{len(wrong)} pages were not judged as expected; the first: {wrong[0]}")


def _config(site: Site, run_dir: str, seed: int) -> DataRun:
    paths = {
        "run_dir": run_dir,
        "sources.0.paths": f"{site.folder}/warc/*.warc.gz",
        "toxicity.lexicons.en": site.lexicon,
    }
    overrides = [f"{key}={dumps(path, ensure_ascii=False)}" for key, path in paths.items()]
    with as_file(files("quern.demo").joinpath("demo.yaml")) as path:
        return load_config(path, DataRun, [*overrides, f"seed={seed}"])


def _print_kinds(results: list[KindResult], console: Console) -> None:
    title = "What a careful person expects, and what happened"
    table = columns("kind", ">pages", "expected", "happened", "", title=title)
    for result in results:
        happened = result.actual.most_common()
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
