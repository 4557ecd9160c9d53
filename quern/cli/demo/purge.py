"""The last part of the demo: purges a domain, verifies the purge, and continues training without it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from rich.console import Console

from quern import storage
from quern.cli.demo.lineage import print_rows
from quern.cli.demo.train import moves, run_training
from quern.errors import STOPPED, QuernError
from quern.lineage.exposure import exposures
from quern.lineage.purge.apply.transaction import Request, purge
from quern.lineage.purge.proof.verify import verify
from quern.lineage.purge.selection.deletion_set import find_deletion_set
from quern.lineage.purge.selection.select import select
from quern.lineage.store import IndexedRun
from quern.lineage.training import TrainingRun
from quern.words import counted

__all__ = ["purge_demo"]

_STEPS = 30
"""That the training goes on for."""


def purge_demo(data_run: str, train_run: str, console: Console) -> dict[str, Any]:
    """Purge the domain that ``train_run`` came to last, prove it, and go on from the last clean checkpoint in a copy of
    the run, so that the trained model stays; prints and returns what was done.

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
    last, tainted = row["last_clean"], [own["step"] for own in row["tainted"]]
    console.print(f"A domain has to go: quern lineage purge … --domain {domain} --mode mask")
    seen = f"{counted(len(tainted), 'checkpoint')}, from step {tainted[0]:,} on" if tainted else "no checkpoint"
    gone = f"{counted(report['condemned'], 'page')}, {report['tokens_purged']:,} tokens"
    rows = {
        "gone": f"{gone}: version {report['version']['after']}",
        "proved": f"by reading every token, text and table: {len(proof.checks)} checks hold (quern lineage verify)",
        "tainted": seen,
        "last clean": "none that is kept" if last is None else f"step {last['step']:,}",
        "go on": row["resume"]["command"],
        "went on": "from step {from_step:,} to {to_step:,} without it, in {run}".format(**went_on),
    }
    print_rows(console, rows)
    console.print()
    return {
        "domain": domain, "documents": report["condemned"], "tokens": report["tokens_purged"],
        "version": report["version"]["after"], "holds": proof.holds, "checks": len(proof.checks), "tainted": tainted,
        "last_clean": None if last is None else last["step"], "resume": row["resume"]["command"], "went_on": went_on,
    }  # fmt: skip


def _last_domain(data_run: str, train_run: str) -> str:
    """The host whose pages the run read latest for the first time."""
    lineage, run = IndexedRun(data_run), TrainingRun(train_run)
    found = exposures(run, [(lineage, np.arange(lineage.num_documents))])
    numbers, first = np.unique(found.numbers, return_index=True)  # by step: the first is the earliest
    steps: dict[str, int] = {}
    for url, step in zip(lineage.documents(numbers).urls, found.steps[first].tolist(), strict=True):
        host = urlsplit(url or "").hostname or ""
        steps[host] = min(step, steps.get(host, step))
    return max(steps, key=lambda host: (steps[host], host))


def _go_on(resume: dict[str, Any], train_run: str) -> dict[str, Any]:
    """Do what the report says, in a copy of the run with the one checkpoint that it goes back to, for some steps."""
    copy, step = f"{train_run}-purged", resume["step"]
    storage.remove_tree(copy)

    def others(folder: str, names: list[str]) -> set[str]:
        kept = {f"step_{step:08d}"}
        return set(names) - kept if os.path.basename(folder) == "checkpoints" else {"tensorboard"} & set(names)

    if step is not None:  # else no checkpoint is clean, and it begins anew
        shutil.copytree(train_run, copy, ignore=others)
    before, step = len(moves(copy)), step or 0
    arguments = [*resume["arguments"][2:], f"run_dir={json.dumps(copy)}"]
    code, last = run_training(arguments, copy, step + _STEPS, signal.SIGTERM)
    made = moves(copy)
    if code not in (0, STOPPED) or len(made) == before or made[-1]["step"] != step:
        raise QuernError(f"{copy}: the training did not go on from step {step} (exit code {code})")
    return {"run": copy, "from_step": step, "to_step": last, "versions": made[-1]["versions"]}
