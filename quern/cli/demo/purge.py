"""The last part of the demo: purges a domain, verifies the purge, and continues training without it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
from rich.console import Console

from quern import storage
from quern.cli.demo.train import metric_rows
from quern.cli.output import plain
from quern.data_pipeline.page.url import canonicalize
from quern.data_pipeline.page.url import host as host_of
from quern.errors import STOPPED, QuernError
from quern.lineage.exposure import exposures
from quern.lineage.purge.apply.transaction import Request, purge
from quern.lineage.purge.proof.verify import verify
from quern.lineage.purge.selection.deletion_set import find_deletion_set
from quern.lineage.purge.selection.select import select
from quern.lineage.store import IndexedRun
from quern.lineage.training import TrainingRun
from quern.safe_path import module
from quern.train.history.ledger import MOVES, read_ledger
from quern.words import counted

__all__ = ["purge_demo"]

_STEPS = 30
"""That the training goes on for."""


def purge_demo(data_run: str, train_run: str, console: Console | None) -> dict[str, Any]:
    """Purge the domain that ``train_run`` came to last, prove it, and go on from the last clean checkpoint in a copy of
    the run, so that the trained model stays; returns what was done, and prints it where there is a console.

    Raises:
        QuernError: something of the domain is left, or the training did not go on without it.
    """
    domain = _last_domain(data_run, train_run)
    given = {"domain": [domain]}
    asked = Request(
        data_run,
        "mask",
        lambda run: find_deletion_set(run, select(run, given)),
        given,
        reason="the demo purges a domain",
        train_runs=(train_run,),
    )
    report = purge(asked)
    proof = verify(data_run, deep=True)
    if not proof.holds:
        raise QuernError(f"{data_run}: something of {domain} is left: run quern lineage verify {data_run}")
    (row,) = [row for row in report["taint"]["train_runs"] if os.path.samefile(row["path"], train_run)]
    went_on = _go_on(row["resume"], train_run)
    if console is not None:
        _print(console, domain, report, len(proof.checks), row, went_on)
    last = row["last_clean"]
    return {
        "domain": domain, "documents": report["condemned"], "tokens": report["tokens_purged"],
        "version": report["version"]["after"], "holds": proof.holds, "checks": len(proof.checks),
        "tainted": [seen["step"] for seen in row["tainted"]], "last_clean": None if last is None else last["step"],
        "resume": row["resume"]["command"], "went_on": went_on,
    }  # fmt: skip


def _last_domain(data_run: str, train_run: str) -> str:
    """The host whose pages the run read latest for the first time."""
    lineage, run = IndexedRun(data_run), TrainingRun(train_run)
    found = exposures(run, [(lineage, np.arange(lineage.num_documents))])
    numbers, first = np.unique(found.numbers, return_index=True)  # by step: the first is the earliest
    steps: dict[str, int] = {}
    for url, step in zip(lineage.documents(numbers).urls, found.steps[first].tolist(), strict=True):
        canonical = None if url is None else canonicalize(url)
        if canonical is not None:
            host = host_of(canonical)
            steps[host] = min(step, steps.get(host, step))
    below = {host: min(own for name, own in steps.items() if f".{name}".endswith(f".{host}")) for host in steps}
    return max(below, key=lambda host: (below[host], host))


def _go_on(resume: dict[str, Any], train_run: str) -> dict[str, Any]:
    """Do what the report says, in a copy of the run, for some steps."""
    copy, step = f"{train_run}-purged", resume["step"]
    storage.remove_tree(copy)
    if step is not None:  # else no checkpoint is clean, and it begins anew
        _copy(train_run, copy, step)
    before = len(_moves(copy))
    command = module("quern.train", *resume["arguments"][2:], f"run_dir={json.dumps(copy)}")
    process = subprocess.Popen(command, stdout=sys.stderr.fileno(), env={"OMP_NUM_THREADS": "1", **os.environ})
    last = step or 0
    try:
        while process.poll() is None and last < (step or 0) + _STEPS:
            time.sleep(0.2)
            last = max((row["step"] for row in metric_rows(copy, "step") if row["attempt"] == before), default=last)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    moves = _moves(copy)
    if process.returncode not in (0, STOPPED) or len(moves) == before or moves[-1]["step"] != (step or 0):
        raise QuernError(f"{copy}: the training did not go on from step {step} (exit code {process.returncode})")
    return {"run": copy, "from_step": moves[-1]["step"], "to_step": last, "versions": moves[-1]["versions"]}


def _moves(train_run: str) -> list[dict[str, Any]]:
    path = os.path.join(train_run, "ledger.jsonl")
    return [entry for entry in read_ledger(path) if entry["kind"] in MOVES] if os.path.exists(path) else []


def _copy(train_run: str, copy: str, step: int) -> None:
    """The run with the one checkpoint that it goes back to."""

    def others(folder: str, names: list[str]) -> set[str]:
        kept = {f"step_{step:08d}"}
        return set(names) - kept if os.path.basename(folder) == "checkpoints" else {"tensorboard"} & set(names)

    shutil.copytree(train_run, copy, ignore=others)


def _print(
    console: Console, domain: str, report: dict[str, Any], checks: int, row: dict[str, Any], went_on: dict[str, Any]
) -> None:
    console.print(f"A domain has to go: quern lineage purge … --domain {domain} --mode mask")
    steps = [own["step"] for own in row["tainted"]]
    seen = f"{counted(len(steps), 'checkpoint')}, from step {steps[0]:,} on" if steps else "no checkpoint"
    clean = "none that is kept" if row["last_clean"] is None else f"step {row['last_clean']['step']:,}"
    for name, text in (
        (
            "gone",
            f"{counted(report['condemned'], 'page')}, "
            f"{report['tokens_purged']:,} tokens: version {report['version']['after']}",
        ),
        ("proved", f"by reading every token, text and table: {checks} checks hold (quern lineage verify)"),
        ("tainted", seen),
        ("last clean", clean),
        ("go on", row["resume"]["command"]),
        ("went on", f"from step {went_on['from_step']:,} to {went_on['to_step']:,} without it, in {went_on['run']}"),
    ):
        console.print(f"  {name:<11}{plain(text)}", markup=False)
    console.print()
