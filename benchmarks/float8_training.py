"""Whether FP8 costs loss: a small model trained in BF16 and in FP8 by every recipe, with the same weights and data.

    python benchmarks/float8_training.py [key=value …] --data RUN/tokens/SOURCE [--data …] --out DIR [--seeds 5]
                                         [--jobs 2] [--precisions fp8-tensorwise fp8-blockwise …]

Each run is ``python -m quern.train`` on a config of its own, DIR/NAME.yaml, in DIR/NAME; a seed decides the first
weights and the order of the data, and is the same in every precision, so that differences are taken in pairs. key=value
changes the config of all runs: steps=1000, model.num_layers=6, device=cuda. The same command goes on where it was left:
a run that is finished is not run again, one that was interrupted resumes from its last checkpoint. ``--jobs`` runs are
trained at a time, of one thread each. DIR/report.json and DIR/report.md are of the seeds that have all precisions.

The default is 1.35 M tokens a run: a decoder of 3 layers with matrices whose sizes are multiples of 128, so that every
recipe takes each of them. Embedding and head are not tied: where they are, so small a model stays for a while at the
frequencies of single tokens, and any rounding decides when it leaves; pairs then differ by two percent. The held-out
loss is over all held-out documents of the sources, in the precision of the run; the training loss is the mean of the
last tenth of the steps. On a CPU the FP8 products are emulated: the same roundings to FP8 as a GPU makes, sums in
float32.

A precision passes if its mean loss is at most 0.5 % above BF16's, or at most one standard error of BF16's mean over
seeds; both losses have to. Exit code 1 if a run failed, 3 if a signal ended it, 4 if a precision did not pass.
"""

from __future__ import annotations

import math
import os
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from studies import STOPPED, Case, Runs, config_of, figures, parser_of, prepare, publish, row_of, say

from quern import __version__
from quern.config import load_config
from quern.errors import QuernError
from quern.train.config import TrainConfig

BASE = "bf16"
#: What each precision changes in the config.
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    BASE: {},
    "fp8-tensorwise": {"float8": {"recipe": "tensorwise"}},
    "fp8-delayed": {"float8": {"recipe": "tensorwise", "delayed": True}},
    "fp8-rowwise": {"float8": {"recipe": "rowwise"}},
    "fp8-blockwise": {"float8": {"recipe": "blockwise"}},
}
DEFAULT = ["fp8-tensorwise", "fp8-blockwise"]
CONFIG: dict[str, Any] = {
    "model": {"num_layers": 3, "dim": 128, "num_heads": 2, "num_kv_heads": 2, "head_dim": 64, "ffn_dim": 256,
              "tied_embeddings": False},
    "seq_len": 256,
    "global_batch": 16,
    "micro_batch": 4,
    "steps": 330,
    "precision": "bf16",
    "device": "cpu",
    "optimizer": {"lr": 0.002},
    "schedule": {"warmup": 33},
    "checkpoint": {"interval": 110, "keep_last": 1, "mode": "sync"},
    "validation": {"interval": 0, "windows": None},
    "metrics": {"live": False, "tensorboard": False},
}  # fmt: skip
GAP = 0.005
ERRORS = 1.0
LOSSES = {"held_out": "held-out loss", "training": "training loss, last tenth"}
NOT_PASSED = 4


def compare(own: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Losses of a precision beside BF16's of the same seeds."""
    from scipy.stats import t

    differences = [mine - its for mine, its in zip(own, base, strict=True)]
    mean, count = statistics.fmean(differences), len(differences)
    gap = mean / statistics.fmean(base)
    found: dict[str, Any] = {"mean": statistics.fmean(own), "differences": differences, "gap": gap}
    if count < 2:
        return {**found, "gap_interval": None, "standard_errors": None, "passes": gap <= GAP}
    error = statistics.stdev(base) / math.sqrt(count)
    half = float(t.ppf(0.975, count - 1)) * statistics.stdev(differences) / math.sqrt(count) / statistics.fmean(base)
    errors = mean / error if error else math.copysign(math.inf, mean) if mean else 0.0
    return {**found, "gap_interval": [gap - half, gap + half], "standard_errors": errors,
            "passes": gap <= GAP or errors <= ERRORS}  # fmt: skip


def report_of(
    done: Mapping[tuple[str, int], Mapping[str, Any]], precisions: Sequence[str], seeds: Sequence[int]
) -> dict[str, Any]:
    """Of the seeds that every precision has finished."""
    whole = [seed for seed in seeds if all((precision, seed) in done for precision in precisions)]
    for seed in whole:
        if len({done[precision, seed]["order"] for precision in precisions}) > 1:
            raise QuernError(f"seed {seed}: the precisions did not read the data in the same order")
    rows = {}
    for precision in precisions if whole else ():
        own = [done[precision, seed] for seed in whole]
        row: dict[str, Any] = {name: [run[name] for run in own] for name in ("held_out", "training", "tokens_per_s")}
        for loss in LOSSES if precision != BASE else ():
            row[f"{loss}_to_base"] = compare(row[loss], [done[BASE, seed][loss] for seed in whole])
        if precision != BASE:
            row["passes"] = all(row[f"{loss}_to_base"]["passes"] for loss in LOSSES)
        rows[precision] = row
    return {
        "seeds": whole,
        "tokens": sum(run["tokens"] for run in done.values()),
        "parameters": next((run["parameters"] for run in done.values()), None),
        "limits": {"gap": GAP, "standard_errors": ERRORS},
        "precisions": rows,
        "passes": bool(whole) and all(row["passes"] for name, row in rows.items() if name != BASE),
    }


def markdown(report: Mapping[str, Any]) -> str:
    """The report for people."""
    seeds = report["seeds"]
    head = f"{len(seeds)} seed{'s' * (len(seeds) != 1)}, {report['tokens']:,} tokens in all"
    if not seeds:
        return f"{head}: no seed has all precisions yet.\n"
    lines = [f"{head}, {report['parameters']:,} parameters. {report['machine']}.", "", f"`{report['command']}`", ""]
    for loss, title in LOSSES.items():
        names = [f"seed {seed}" for seed in seeds]
        lines += [
            row_of(title, *names, "mean", "gap", "95 %", "standard errors", "passes"),
            row_of("---", *["---:"] * (len(seeds) + 4), "---"),
        ]
        for precision, row in report["precisions"].items():
            cells = [precision, *(f"{value:.4f}" for value in row[loss]), f"{statistics.fmean(row[loss]):.4f}"]
            to_base = row.get(f"{loss}_to_base")
            lines.append(row_of(*cells, *(shown(to_base) if to_base else [""] * 4)))
        lines.append("")
    lines.append(
        f"A precision passes with a gap of at most {100 * GAP:.1f} % or of at most {ERRORS:g} standard error of BF16's "
        "mean; the interval is of the paired differences (Student's t)."
    )
    return "\n".join(lines) + "\n"


def shown(found: Mapping[str, Any]) -> list[str]:
    interval, errors = found["gap_interval"], found["standard_errors"]
    between = "–" if interval is None else f"{100 * interval[0]:+.3f} … {100 * interval[1]:+.3f} %"
    return [f"{100 * found['gap']:+.3f} %", between, "–" if errors is None else f"{errors:+.2f}",
            "yes" if found["passes"] else "**no**"]  # fmt: skip


def machine(device: str) -> str:
    import torch

    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    name = torch.cuda.get_device_name() if cuda else f"CPU, {os.cpu_count()} cores, FP8 emulated"
    return f"{name}, torch {torch.__version__}, quern {__version__}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, 5)
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=DEFAULT)
    args = parser.parse_args(arguments)
    precisions = [BASE, *(name for name in PRECISIONS if name in args.precisions and name != BASE)]
    seeds = range(args.seeds)
    cases = [Case(precision, seed, args.out.resolve()) for seed in seeds for precision in precisions]
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        data = [os.path.abspath(path) for path in args.data]
        for case in cases:
            prepare(case, config_of(case, CONFIG, PRECISIONS[case.variant], data, args.overrides))
        device = load_config(cases[0].config, TrainConfig).device
        runs = Runs(args.jobs)
        runs.train([case for case in cases if not case.finished])
        done = {(case.variant, case.seed): figures(case) for case in cases if case.finished}
        report = report_of(done, precisions, seeds)
    except QuernError as error:
        say(f"error: {error}")
        return error.exit_code
    command = shlex.join(["python", *sys.argv] if arguments is None else ["float8_training.py", *arguments])
    report |= {"command": command, "machine": machine(device)}
    publish(args.out, report, markdown(report))
    if runs.failed:
        return 1
    if runs.stopped or len(done) < len(cases):
        return STOPPED
    return 0 if report["passes"] else NOT_PASSED


if __name__ == "__main__":
    sys.exit(main())
