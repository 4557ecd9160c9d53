"""The second part of the demo: trains on the tokens, kills and resumes the run, and compares with n-gram models."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from importlib.resources import as_file, files
from typing import Any

from rich.console import Console

from quern import storage
from quern.cli.demo.baselines import loss, nll, read_stream
from quern.cli.output import columns, plain
from quern.config import load_config
from quern.errors import QuernError
from quern.safe_path import module
from quern.tokenize.shards import ShardReader
from quern.train.config import TrainConfig
from quern.train.history.ledger import MOVES, read_ledger
from quern.train.history.metrics_file import METRICS_FILE, read_metrics

__all__ = ["moves", "run_training", "train_demo"]

PROMPT = "The"
MODELS = ("unigram", "bigram", "interpolated 3-gram", "this model")


def train_demo(folder: str, data_run: str, seed: int, console: Console) -> dict[str, Any]:
    """Train on the tokens of ``data_run``; prints and returns the figures.

    Raises:
        QuernError: a training process failed, or the model did not beat the bigram model.
    """
    run_dir = storage.join(folder, "train")
    storage.remove_tree(run_dir)
    tokens = storage.join(data_run, "tokens", "sample")
    overrides = [f"run_dir={json.dumps(run_dir)}", f"data.0.path={json.dumps(tokens)}", f"seed={seed}"]
    with as_file(files("quern.demo").joinpath("train.yaml")) as path:
        config = load_config(path, TrainConfig, overrides)
        length = f"{config.steps} steps of {config.global_batch} × {config.seq_len} tokens"
        console.print(f"Training {length} on this CPU", markup=False)
        interval = config.checkpoint.interval
        assert isinstance(interval, int)
        stop = config.steps // 2 // interval * interval + interval // 4  # behind a checkpoint, as a power cut may come
        killed = _train([str(path), *overrides], run_dir, stop)
        _train([str(path), *overrides], run_dir, None)
    resumed = moves(run_dir)[-1]["step"]
    console.print(f"Killed with SIGKILL after step {killed:,}; went on from the checkpoint of step {resumed:,}")
    losses, targets = _compare(tokens, run_dir, config)
    text = _sample(run_dir)
    _print(console, losses, targets, text)
    if losses["this model"] >= losses["bigram"]:
        raise QuernError(f"held-out loss {losses['this model']:.3f} does not beat the bigram's {losses['bigram']:.3f}")
    return {
        "run": run_dir, "losses": losses, "targets": targets, "killed_after_step": killed, "resumed_from_step": resumed,
        "sample": text,
    }  # fmt: skip


def _train(arguments: list[str], run_dir: str, until: int | None) -> int:
    code, last = run_training(arguments, run_dir, until, signal.SIGKILL)
    if code != (0 if until is None else -signal.SIGKILL):
        raise QuernError(f"training ended with exit code {code}; its messages are above")
    return last


def run_training(arguments: list[str], run_dir: str, until: int | None, how: signal.Signals) -> tuple[int, int]:
    """Train in a process of its own, which gets the signal ``how`` when it is at step ``until``; returns its exit code
    and the last step that it made."""
    # one thread: products this small gain little from two, and two that wait for each other lose a busy machine's time
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    before = len(read_metrics(run_dir).step)

    def last() -> int:
        return int(max(read_metrics(run_dir).step[before:], default=0))

    process = subprocess.Popen(module("quern.train", *arguments), stdout=sys.stderr.fileno(), env=environment)
    try:
        while until is not None and process.poll() is None and last() < until:
            time.sleep(0.05)
        if until is not None:
            process.send_signal(how)
        return process.wait(), last()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def moves(run_dir: str) -> list[dict[str, Any]]:
    """The ledger's lines of a run's starts and resumptions; none before the first."""
    path = storage.join(run_dir, "ledger.jsonl")
    return [entry for entry in read_ledger(path) if entry["kind"] in MOVES] if os.path.exists(path) else []


def _compare(tokens: str, run_dir: str, config: TrainConfig) -> tuple[dict[str, float], int]:
    """Held-out nats a token, of n-gram models counted on the same training tokens and of the model; and of how many."""
    with open(storage.join(run_dir, METRICS_FILE), encoding="utf-8") as file:
        final = [row for row in map(json.loads, file) if row["kind"] == "validation"][-1]
    train, held_out, losses = read_stream(tokens), read_stream(tokens + ".val"), {}
    for order, name in enumerate(MODELS[:3], start=1):
        total, count = loss(nll([train], held_out, order, ShardReader(tokens).vocab_size), config.seq_len)
        if count != final["tokens"]:
            raise QuernError(f"the model was held against {final['tokens']} targets, the {name} against {count}")
        losses[name] = total / count
    return {**losses, MODELS[3]: final["loss"]}, final["tokens"]


def _sample(run_dir: str) -> str:
    from quern.train.checkpoint.tools.sample import continue_text  # torch

    return PROMPT + continue_text(run_dir, PROMPT, max_new_tokens=60, temperature=0.7, top_k=40, seed=0)


def _print(console: Console, losses: dict[str, float], targets: int, text: str) -> None:
    table = columns("", ">loss", ">perplexity", title="Held-out loss, nats a token")
    for name, value in losses.items():
        table.add_row(name, f"{value:.3f}", f"{math.exp(value):.1f}")
    console.print()
    console.print(table)
    console.print(f"on the same {targets:,} tokens of documents held out\n")
    console.print(f"It says: {plain(text)!r}\n", markup=False)
