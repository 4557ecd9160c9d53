"""Whether experts pay: a small model trained dense, and with experts of which a token uses as many parameters.

    python benchmarks/sparse_training.py [key=value …] --data RUN/tokens/SOURCE [--data …] --out DIR [--seeds 3]
                                         [--jobs 2] [--variants dense bias loss none]

Each run is ``python -m quern.train`` on a config of its own, DIR/NAME.yaml, in DIR/NAME; a seed decides the first
weights and the order of the data, which is the same in every variant. key=value changes the config of all runs. The
same command goes on where it was left, as benchmarks/float8_training.py does. DIR/report.json and DIR/report.md are of
the seeds that have all variants.

A dense SwiGLU is 512 wide; with experts a token has two of 256, chosen from eight by sigmoid scores that are divided by
half their sum: what the two add is then as large at the start as what the dense one adds. Their loads are kept even by
biases that follow the counts of the global batch (``bias``), by the balance loss over the global batch (``loss``), or
not at all (``none``).

What is told of loads is the greatest of an expert over the mean of its layer's, in the layer where that is worst: the
mean of the last tenth of the steps, and the largest in the second half. Exit code 1 if a run failed, 3 if a signal
ended it, 4 if with biases that mean is not below 1.5 for each seed.
"""

from __future__ import annotations

import os
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from studies import (
    STOPPED,
    Case,
    Runs,
    config_of,
    figures,
    last_tenth,
    parser_of,
    prepare,
    publish,
    row_of,
    say,
    steps_of,
)

from quern import __version__
from quern.config import load_config
from quern.errors import QuernError
from quern.train.config import TrainConfig

BASE, BALANCED = "dense", "bias"
MODEL: dict[str, Any] = {"num_layers": 2, "dim": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32,
                         "ffn_dim": 512, "tied_embeddings": False}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "top_k": 2,
    "ffn_dim": 256,
    "score": "sigmoid",
    "normalize": True,
    "scale": 2.0,
}
#: What each variant changes in the config.
VARIANTS: dict[str, dict[str, Any]] = {
    BASE: {},
    BALANCED: {"model": {**MODEL, "moe": {**EXPERTS, "bias": True}}, "experts": {"bias_rate": 0.02}},
    "loss": {"model": {**MODEL, "moe": EXPERTS}, "experts": {"balance_loss": 0.01, "balance_over": "global"}},
    "none": {"model": {**MODEL, "moe": EXPERTS}},
}
CONFIG: dict[str, Any] = {
    "model": MODEL,
    "seq_len": 128,
    "global_batch": 32,
    "micro_batch": 8,
    "steps": 300,
    "precision": "fp32",
    "device": "cpu",
    "optimizer": {"lr": 0.004},
    "schedule": {"warmup": 30},
    "checkpoint": {"interval": 150, "keep_last": 1, "mode": "sync"},
    "validation": {"interval": 0, "windows": 400},
    "metrics": {"live": False, "tensorboard": False},
}
LOAD = 1.5
NOT_EVEN = 4


def loads(case: Case) -> dict[str, float]:
    """Of a finished run with experts."""
    steps, _ = steps_of(case)
    last = [row["experts"] for row in last_tenth(steps)]
    return {
        "load": statistics.fmean(row["max_over_mean"] for row in last),
        "largest": max(row["experts"]["max_over_mean"] for row in steps[len(steps) // 2 :]),
        "unused": max(row["unused"] for row in last),
    }


def report_of(
    done: Mapping[tuple[str, int], Mapping[str, Any]], variants: Sequence[str], seeds: Sequence[int]
) -> dict[str, Any]:
    """Of the seeds that every variant has finished."""
    whole = [seed for seed in seeds if all((variant, seed) in done for variant in variants)]
    for seed in whole:
        if len({done[variant, seed]["order"] for variant in variants}) > 1:
            raise QuernError(f"seed {seed}: the variants did not read the data in the same order")
    rows = {
        variant: {name: [done[variant, seed].get(name) for seed in whole] for name in done[variant, whole[0]]}
        for variant in (variants if whole else ())
    }
    balanced = rows.get(BALANCED, {}).get("load", [])
    return {"seeds": whole, "variants": rows, "even": all(load < LOAD for load in balanced)}


def markdown(report: Mapping[str, Any]) -> str:
    """The report for people."""
    seeds, rows = report["seeds"], report["variants"]
    if not seeds:
        return "No seed has all variants yet.\n"
    lines = [
        f"{report['machine']}.", "", f"`{report['command']}`", "",
        row_of("", "parameters", *(f"held-out, seed {seed}" for seed in seeds), "mean", "standard deviation",
               "to dense", "load, last tenth", "largest", "unused"),
        row_of("---", *["---:"] * (len(seeds) + 7)),
    ]  # fmt: skip
    for variant, row in rows.items():
        losses = row["held_out"]
        mean = statistics.fmean(losses)
        cells = [variant, f"{row['parameters'][0]:,}", *(f"{loss:.4f}" for loss in losses), f"{mean:.4f}"]
        cells.append(f"{statistics.stdev(losses):.4f}" if len(losses) > 1 else "–")
        gaps = [own - base for own, base in zip(losses, rows[BASE]["held_out"], strict=True)] if BASE in rows else []
        cells.append(f"{statistics.fmean(gaps):+.4f}" if variant != BASE and gaps else "")
        if "load" in row:
            cells += [f"{max(row['load']):.2f}", f"{max(row['largest']):.2f}", f"{max(row['unused']):.0f}"]
        else:
            cells += [""] * 3
        lines.append(row_of(*cells))
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, 3)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    args = parser.parse_args(arguments)
    variants = [name for name in VARIANTS if name in args.variants]
    cases = [Case(variant, seed, args.out.resolve()) for seed in range(args.seeds) for variant in variants]
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        data = [os.path.abspath(path) for path in args.data]
        for case in cases:
            prepare(case, config_of(case, CONFIG, VARIANTS[case.variant], data, args.overrides))
        device = load_config(cases[0].config, TrainConfig).device
        runs = Runs(args.jobs)
        runs.train([case for case in cases if not case.finished])
        done = {
            (case.variant, case.seed): figures(case) | (loads(case) if case.variant != BASE else {})
            for case in cases
            if case.finished
        }
        report = report_of(done, variants, range(args.seeds))
    except QuernError as error:
        say(f"error: {error}")
        return error.exit_code
    command = shlex.join(["python", *sys.argv] if arguments is None else ["sparse_training.py", *arguments])
    report |= {"command": command, "machine": f"{device}, {os.cpu_count()} cores, quern {__version__}"}
    publish(args.out, report, markdown(report))
    if runs.failed:
        return 1
    if runs.stopped or len(done) < len(cases):
        return STOPPED
    return 0 if report["even"] else NOT_EVEN


if __name__ == "__main__":
    sys.exit(main())
