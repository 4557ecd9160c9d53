"""The second part of the demo: trains on the tokens, kills and resumes the run, and compares with n-gram models."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.resources import as_file, files
from typing import Any

from rich.console import Console
from rich.table import Table

from quern import storage
from quern.cli.demo.baselines import NGram, read_stream
from quern.cli.output import plain
from quern.config import load_config
from quern.errors import QuernError
from quern.safe_path import module
from quern.storage.parquet import read_table
from quern.tokenize.shards import ShardReader
from quern.train.config import TrainConfig
from quern.train.history.ledger import MOVES, read_ledger, surviving

__all__ = ["metric_rows", "shared_clusters", "train_demo"]

PROMPT = "The"


def train_demo(folder: str, data_run: str, seed: int, console: Console | None) -> dict[str, Any]:
    """Train on the tokens of ``data_run``; returns the figures, and prints them where there is a console.

    Raises:
        QuernError: a training process failed, or the model did not beat the bigram model.
    """
    run_dir = storage.join(folder, "train")
    storage.remove_tree(run_dir)
    tokens = storage.join(data_run, "tokens", "sample")
    overrides = [f"run_dir={json.dumps(run_dir)}", f"data.0.path={json.dumps(tokens)}", f"seed={seed}"]
    with as_file(files("quern.demo").joinpath("train.yaml")) as path:
        config = load_config(path, TrainConfig, overrides)
        _say(console, f"Training {config.steps} steps of {config.global_batch} × {config.seq_len} tokens on this CPU")
        killed = _train_until_killed(str(path), overrides, run_dir, config, console)
        _run(str(path), overrides)
    moves = [entry for entry in read_ledger(storage.join(run_dir, "ledger.jsonl")) if entry["kind"] in MOVES]
    _say(
        console, f"Killed with SIGKILL after step {killed:,}; went on from the checkpoint of step {moves[-1]['step']:,}"
    )
    ranges = surviving(read_ledger(storage.join(run_dir, "ledger.jsonl")), config.steps)
    losses = _compare(tokens, run_dir, config)
    text = _sample(run_dir)
    shared = shared_clusters(data_run)
    if console is not None:
        _print(console, losses, text, shared)
    if losses["model"] >= losses["bigram"]:
        raise QuernError(f"held-out loss {losses['model']:.3f} does not beat the bigram's {losses['bigram']:.3f}")
    if shared:
        raise QuernError(f"{shared} held-out documents share a duplicate cluster with a training document")
    return {
        "run": run_dir,
        "losses": losses,
        "killed_after_step": killed,
        "resumed_from_step": moves[-1]["step"],
        "ranges": [vars(found) for found in ranges],
        "sample": text,
        "held_out_sharing_a_cluster": shared,
    }


def _say(console: Console | None, text: str) -> None:
    if console is not None:
        console.print(text, markup=False)


def _start(config: str, overrides: list[str]) -> subprocess.Popen[bytes]:
    # one thread: products this small gain little from two, and two that wait for each other lose a busy machine's time
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command = module("quern.train", config, *overrides)
    return subprocess.Popen(command, stdout=sys.stderr.fileno(), env=environment)


def _run(config: str, overrides: list[str]) -> None:
    code = _start(config, overrides).wait()
    if code:
        raise QuernError(f"training ended with exit code {code}; its messages are above")


def _train_until_killed(
    config: str, overrides: list[str], run_dir: str, resolved: TrainConfig, console: Console | None
) -> int:
    """Kill the run a few steps after a checkpoint in its second half, as a power cut would; returns the last step."""
    interval = resolved.checkpoint.interval
    assert isinstance(interval, int)
    wanted = resolved.steps // 2 // interval * interval + interval // 4
    process = _start(config, overrides)
    try:
        while process.poll() is None:
            last = max((row["step"] for row in metric_rows(run_dir, "step")), default=0)
            if last >= wanted:
                process.send_signal(signal.SIGKILL)
                process.wait()
                return int(max(row["step"] for row in metric_rows(run_dir, "step")))
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    raise QuernError(f"training ended with exit code {process.returncode} before it was killed")


def metric_rows(run_dir: str, kind: str) -> Iterator[dict[str, Any]]:
    """The lines of a kind that a training run has written to its metrics so far."""
    path = storage.join(run_dir, "metrics.jsonl")
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):  # the last one may be in the writing
                row = json.loads(line)
                if row["kind"] == kind:
                    yield row


def _compare(tokens: str, run_dir: str, config: TrainConfig) -> dict[str, float]:
    """Held-out nats a token: of the model, and of n-gram models counted on the same training tokens."""
    final = list(metric_rows(run_dir, "validation"))[-1]
    train, held_out = read_stream(tokens), read_stream(tokens + ".val")
    vocab_size = ShardReader(tokens).vocab_size
    losses = {}
    for order, name in ((1, "unigram"), (2, "bigram"), (3, "trigram")):
        total, count = NGram(order, vocab_size).fit([train]).loss([held_out], config.seq_len)
        if count != final["tokens"]:
            raise QuernError(f"the model was held against {final['tokens']} targets, the {name} against {count}")
        losses[name] = total / count
    return {**losses, "model": final["loss"], "targets": final["tokens"]}


def _sample(run_dir: str) -> str:
    from quern.train.checkpoint.tools.sample import continue_text  # torch

    return PROMPT + continue_text(run_dir, PROMPT, max_new_tokens=60, temperature=0.7, top_k=40, seed=0)


def shared_clusters(data_run: str) -> int:
    """Held-out documents that are in a duplicate cluster with a training document of the run."""
    clusters = read_table(storage.join(data_run, "duplicates", "clusters.parquet"))
    of = dict(zip(clusters["doc_id"].to_pylist(), clusters["cluster_id"].to_pylist(), strict=True))
    version = storage.read_json(storage.join(data_run, "tokens", "VERSION.json"))
    members: dict[bool, list[bytes]] = {True: [], False: []}
    for name in version["sources"]:
        reader = ShardReader(storage.join(data_run, "tokens", name))
        for shard in range(len(reader.shards)):
            members[name.endswith(".val")] += reader.spans(shard)["doc_id"].to_pylist()
    seen = {of[doc] for doc in members[False] if doc in of}
    return sum(of.get(doc) in seen for doc in members[True])


def _print(console: Console, losses: dict[str, float], text: str, shared: int) -> None:
    table = Table(title="Held-out loss, nats a token", title_justify="left", box=None)
    for name in ("", "loss", "perplexity"):
        table.add_column(name, justify="left" if not name else "right")
    for name in ("unigram", "bigram", "trigram", "model"):
        label = {"trigram": "interpolated 3-gram", "model": "this model"}.get(name, name)
        table.add_row(label, f"{losses[name]:.3f}", f"{math.exp(losses[name]):.1f}")
    console.print()
    console.print(table)
    targets, overlap = losses["targets"], f"{shared} of these documents share a duplicate cluster with training"
    console.print(f"on the same {targets:,} tokens of documents held out; {overlap}\n")
    console.print(f"It says: {plain(text)!r}\n", markup=False)
