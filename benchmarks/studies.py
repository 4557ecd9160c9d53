"""Runs of a study: variants of one config, each with several seeds, trained some at a time and taken up where they were
left."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from quern import storage
from quern.config import dump_yaml, load_config, parse_overrides
from quern.errors import InputError, QuernError
from quern.train.config import TrainConfig

__all__ = [
    "STOPPED",
    "Case",
    "Runs",
    "config_of",
    "figures",
    "last_tenth",
    "parser_of",
    "prepare",
    "publish",
    "row_of",
    "say",
    "steps_of",
]

STOPPED = 3


@dataclass(frozen=True)
class Case:
    """A run: a variant of the config and a seed."""

    variant: str
    seed: int
    out: Path

    @property
    def name(self) -> str:
        return f"{self.variant}-seed{self.seed}"

    @property
    def folder(self) -> Path:
        return self.out / self.name

    @property
    def config(self) -> Path:
        return self.out / f"{self.name}.yaml"

    @property
    def finished(self) -> bool:
        ledger = self.folder / "ledger.jsonl"
        lines = ledger.read_text().splitlines() if ledger.exists() else []
        return bool(lines) and '"end"' in lines[-1] and json.loads(lines[-1])["kind"] == "end"


def config_of(
    case: Case, base: Mapping[str, Any], change: Mapping[str, Any], data: Sequence[str], overrides: Iterable[str]
) -> dict[str, Any]:
    """What the run's YAML says: ``base``, in which a section of ``change`` takes the place of the same section."""
    config: dict[str, Any] = json.loads(json.dumps({**base, **change}))
    config |= {"run_dir": str(case.folder), "data": [{"path": path} for path in data], "seed": case.seed}
    for key, value in parse_overrides(overrides):
        *parents, last = key.split(".")
        node = config
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return config


def prepare(case: Case, config: Mapping[str, Any]) -> None:
    """Writes the run's config.

    Raises:
        InputError: the config is none, or the run was begun with another.
    """
    text = dump_yaml(config)
    if case.config.exists() and case.folder.exists() and case.config.read_text() != text:
        raise InputError(f"{case.config}: the run was begun with another config; expected it unchanged, or another out")
    storage.publish_bytes(str(case.config), text.encode())
    load_config(case.config, TrainConfig)


class Runs:
    """Trains cases, some at a time; a signal asks each for an end with a checkpoint, and starts no more."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.stopped = False
        self.failed: list[Case] = []
        self._work: dict[subprocess.Popen[bytes], Case] = {}

    def train(self, cases: Sequence[Case]) -> None:
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        left, began = list(cases), time.monotonic()
        try:
            while self._work or (left and not self.stopped):
                while left and len(self._work) < self.jobs and not self.stopped:
                    self._start(left.pop(0))
                time.sleep(0.1)
                ended = self._collect()
                if ended and left:
                    done = len(cases) - len(left) - len(self._work)
                    minutes = (time.monotonic() - began) / done * (len(left) + len(self._work) / 2) / 60
                    say(f"{done}/{len(cases)}, about {minutes:.0f} min to go")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for process in self._work:  # only after an error of ours
                process.kill()
                process.wait()

    def _start(self, case: Case) -> None:
        command = [sys.executable, "-m", "quern.train", str(case.config)]
        with (case.out / f"{case.name}.log").open("ab") as log:
            # a session of its own: Ctrl-C at the terminal reaches it once, through us
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True
            )
        self._work[process] = case

    def _collect(self) -> int:
        ended = [process for process in self._work if process.poll() is not None]
        for process in ended:
            case = self._work.pop(process)
            if process.returncode == 0:
                say(f"{case.name}: held-out loss {figures(case)['held_out']:.4f}")
            elif process.returncode != STOPPED:
                self.failed.append(case)
                say(f"{case.name}: failed with code {process.returncode}, see {case.out / case.name}.log")
        return len(ended)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        for process in self._work:
            process.terminate()


def steps_of(case: Case) -> tuple[list[dict[str, Any]], float | None]:
    """Of a finished run: what metrics tell of each step, of an interrupted one by the last attempt, and the last
    held-out loss."""
    rows = [json.loads(line) for line in (case.folder / "metrics.jsonl").read_text().splitlines()]
    steps = {row["step"]: row for row in rows if row["kind"] == "step"}
    held_out = [row["loss"] for row in rows if row["kind"] == "validation"]
    return [steps[step] for step in range(len(steps))], held_out[-1] if held_out else None


def last_tenth(steps: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return steps[len(steps) - max(1, len(steps) // 10) :]


def figures(case: Case) -> dict[str, Any]:
    """Of a finished run: both losses, tokens, the order, tokens a second (one thread)."""
    steps, held_out = steps_of(case)
    last = [row["loss"] for row in last_tenth(steps)]
    if None in [held_out, *last]:
        raise QuernError(f"{case.folder}: no finite held-out and training loss; expected held-out documents, and steps")
    facts = json.loads((case.folder / "run.json").read_text())
    return {
        "held_out": held_out,
        "training": statistics.fmean(last),
        "tokens": steps[-1]["tokens"],
        "order": facts["order"],
        "parameters": facts["parameters"],
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in steps),
    }


def row_of(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parser_of(description: str | None, seeds: int) -> argparse.ArgumentParser:
    """The arguments that all studies take; ``seeds`` by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--data", action="append", required=True, metavar="RUN/tokens/SOURCE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=_count, default=seeds)
    parser.add_argument("--jobs", type=_count, default=2)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of 1 or more, got {text}")
    return int(text)


def publish(out: Path, report: Mapping[str, Any], text: str) -> None:
    """Writes report.json and report.md, and prints the latter."""
    storage.write_json(str(out / "report.json"), report)
    storage.publish_bytes(str(out / "report.md"), text.encode())
    print(text, end="")
