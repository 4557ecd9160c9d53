"""How a training run of four ranks fares among faults: ends, weights, detection, restarts, goodput.

    python benchmarks/chaos_training.py [--seeds 10] [--events 20] [--steps 120]

Each seed draws as many faults as said out of: a rank killed, stopped, failing; the whole process tree killed; a file of
the newest checkpoint damaged; a full disk; a bit flipped in one replica; a slow step; memory that runs out. Two batches
give gradients that are not finite. The run is HSDP 2 × 2 on this machine's CPU, and is compared, bit by bit, with one
that met nothing but these batches and skipped them. Prints a table; exit code 1 where a run did not end, or ended with
other weights.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from datetime import datetime
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.train import chaos
from support.train import run_case as case

KINDS = ("kill", "stop", "raise", "kill all", "damage", "full", "flip", "slow", "no memory")
GOODPUT = re.compile(r"goodput ([\d.]+)%")


def kinds(count: int) -> list[str]:
    """As many, each kind as often as any other; memory runs out once, for then all is recomputed."""
    often = [kind for kind in KINDS if kind != "no memory"]
    return ["no memory", *(often[number % len(often)] for number in range(count - 1))]


def restarts(run: Path) -> list[float]:
    """Seconds from each end of a start that the launcher saw to the first step's line of the next."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [datetime.fromisoformat(row["time"]) for row in rows if row["kind"] == "step"]
    ends = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    found = []
    for end in ends:
        at = datetime.fromisoformat(end["time"])
        after = [step for step in steps if step > at]
        if after and end["starts_again_in_s"] is not None:
            found.append((min(after) - at).total_seconds())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--steps", type=int, default=120)
    given = parser.parse_args()
    wrong, waits, told = 0, [], defaultdict(list)
    print("| seed | faults met | starts of the command | seconds | weights | goodput | restarts, median |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        paths = case.write_corpus(folder / "data", {"web": 400, "code": 150})
        for seed in range(given.seeds):
            spoilt = [given.steps // 3, given.steps // 2]
            one, two = folder / f"{seed}-plain", folder / f"{seed}-run"
            skips = {"guard": {"non_finite": "skip"}}
            plain = chaos.meet(one / "at", chaos.settings(one / "run", paths, given.steps, **skips), [], spoilt)
            events = chaos.drawn(seed, kinds(given.events), given.steps)
            met = chaos.meet(two / "at", chaos.settings(two / "run", paths, given.steps), events, spoilt)
            equal = False
            if plain.code == met.code == 0:
                first, second = chaos.weights(plain.run), chaos.weights(met.run)
                equal = all(torch.equal(value, second[key]) for key, value in first.items())
            wrong += not equal
            own = restarts(met.run)
            waits += own
            for kind, count in Counter(entry["kind"] for entry in case.ledger(met.run)).items():
                told[kind].append(count)
            share = GOODPUT.findall(met.said)
            marks = len(list((two / "at" / "marks").iterdir()))
            verdict = "bitwise equal" if equal else f"DIFFER (exit code {met.code})"
            last = f"{share[-1]} %" if share else "–"
            again = f"{len(own)}, {median(own):.1f} s"
            cells = [seed, f"{marks} of {len(events)}", met.starts, f"{met.seconds:.0f}", verdict, last, again]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    print(f"\n{len(waits)} restarts, from the end of all ranks to the next step's line:", end=" ")
    print(f"median {median(waits):.1f} s, longest {max(waits):.1f} s")
    lines = [f"{kind} {median(counts):.0f}" for kind, counts in sorted(told.items())]
    print(f"lines of the ledgers, median of the runs: {', '.join(lines)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
