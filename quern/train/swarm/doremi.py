"""Runs DoReMi (Xie et al. 2023): trains a reference and a proxy, a command each, and reads what the proxy has learned.
Imports no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quern import storage
from quern.config import dump_yaml, load_config
from quern.errors import STOPPED, InputError, QuernError
from quern.mixtures.weighting import even_weights, most_samples
from quern.safe_path import module
from quern.train.batches.mixture import budget, data_section, open_corpus, source_names, sources_of, with_sources
from quern.train.config import DoReMiConfig, TrainConfig
from quern.train.config.differences import differing
from quern.train.history.metrics_file import MetricsTable, read_metrics
from quern.train.processes import launch

__all__ = ["plan_doremi", "propose", "run_doremi"]


def plan_doremi(base: TrainConfig, small: TrainConfig, folder: str, learning: DoReMiConfig) -> dict[str, TrainConfig]:
    """The configs of both runs by name, in the order in which they are trained; of the proxy alone, where ``learning``
    names a reference. ``base``: of the run that weights are wanted for.

    Raises:
        InputError: ``small`` has other sources, or not two with weight; two runs would share a store; the sources do
            not give what ``base`` reads; or a run that has begun in ``folder`` would go on with another config.
    """
    if small.data != base.data or small.run_dir != base.run_dir or small.doremi != DoReMiConfig():
        raise InputError("overrides: expected none of data, run_dir and doremi, which are set here")
    if len(base.data) < 2 or not all(own.weight > 0 for own in base.data):
        raise InputError("data: expected two sources or more, and of each a weight above 0: all are read")
    if small.checkpoint.store is not None or small.checkpoint.local is not None:
        raise InputError("overrides: expected checkpoint.store=null and checkpoint.local=null: runs would share them")
    folders = {name: storage.join(folder, name) for name in ("reference", "proxy")}
    learned = learning.model_copy(update={"reference": learning.reference or folders["reference"]})
    runs = {} if learning.reference else {"reference": small.model_dump()}
    runs["proxy"] = small.model_dump() | {"doremi": learned.model_dump()}
    corpus = open_corpus(base, keep=False)
    even_weights([1.0] * len(base.data), most_samples(sources_of(base, corpus)), budget(base, corpus, "CONFIG"))
    found = {name: TrainConfig.model_validate(own | {"run_dir": folders[name]}) for name, own in runs.items()}
    for name, config in found.items():
        path = storage.join(folder, f"{name}.yaml")
        before = load_config(path, TrainConfig) if os.path.isdir(config.run_dir) and os.path.exists(path) else config
        for key, then, now in differing(before.model_dump(mode="json"), config.model_dump(mode="json")):
            raise InputError(
                f"{path}: {key}: this run began with {then}, got {now}; expected the same, or another --out"
            )
    return found


def run_doremi(runs: Mapping[str, TrainConfig], folder: str, nproc: int, say: Callable[[str], None]) -> None:
    """Train both runs, one after the other, on ``nproc`` ranks of this machine; one that is complete is not trained
    again, and one that was interrupted goes on. Their configs are ``folder/NAME.yaml``, for other launchers.

    Raises:
        InputError: a launcher has started this process.
        QuernError: a run has failed, or was stopped.
    """
    if "RANK" in os.environ:
        raise InputError("quern mix doremi: expected without a launcher: it starts the processes of two runs")
    for name, config in runs.items():
        path = storage.join(folder, f"{name}.yaml")
        storage.publish_bytes(path, dump_yaml(config).encode())
        command = module("quern.cli.main", "train", "run", path, "--nproc", str(nproc))
        say(f"the {name}: {config.run_dir}")
        signals: list[int] = []

        def pass_on(workers: Sequence[launch.Worker], number: int, heard: list[int] = signals) -> None:
            heard.append(number)
            launch.send(workers, number)

        with launch.started(command, [os.environ], pass_on) as workers:
            code = launch.wait(workers)
        if code and (code == STOPPED or signals):
            raise QuernError(f"{config.run_dir}: was stopped; the same command goes on with it")
        if code:
            raise QuernError(f"{config.run_dir}: ended with code {code}; its log is above")


def propose(base: TrainConfig, proxy: TrainConfig) -> dict[str, Any]:
    """What a proxy that is complete has learned, by source in ``sources``; and ``data`` of the run ``base``: the mean
    weights in whole samples, and of no source more than its ``max_epochs``.

    Raises:
        QuernError: the proxy is not complete.
        InputError: the sources do not give what ``base`` reads.
    """
    told = read_metrics(proxy.run_dir)
    last = [row for row, step in enumerate(told.step) if step == proxy.steps - 1]
    if not last or not math.isfinite(_value(told, f"doremi_mean_weight.{source_names(proxy)[0]}", last[-1])):
        raise QuernError(f"{proxy.run_dir}: has learned no weights by its last step, {proxy.steps - 1:,}")
    corpus = open_corpus(base, keep=False)
    sources, samples = sources_of(base, corpus), budget(base, corpus, "CONFIG")
    tokens = sum(source.tokens for source in sources)
    rows = {
        source.name: {
            "token_share": source.tokens / tokens,
            "sampled": own.weight / sum(each.weight for each in proxy.data),
            "weight": _value(told, f"doremi_mean_weight.{name}", last[-1]),
            "last_weight": _value(told, f"doremi_weight.{name}", last[-1]),
            "excess_loss": _value(told, f"excess_loss_by_source.{name}", last[-1]),
            "most": min(limit / samples, 1.0),
        }
        for source, own, name, limit in zip(
            sources, proxy.data, source_names(proxy), most_samples(sources), strict=True
        )
    }
    weights = even_weights([row["weight"] for row in rows.values()], most_samples(sources), samples)
    for row, weight in zip(rows.values(), weights, strict=True):
        row["proposed"] = weight / samples
    data = data_section(with_sources(base, "weight", weights))
    return {"steps": proxy.steps, "samples": samples, "sources": rows, **data}


def _value(told: MetricsTable, column: str, row: int) -> float:
    return float(told.column(column)[row])
