"""How a training run of four ranks fares among faults: ends, weights, detection, restarts, goodput.

    python benchmarks/chaos_training.py [--seeds 10] [--first 0] [--events 20] [--steps 200]

Each seed draws as many faults as said out of: a rank killed, stopped, failing; the whole process tree killed, once also
with the loss of the disk and of a file in the store; a file of the newest checkpoint damaged; a full disk; a bit
flipped in one replica; a rank twice as slow; memory that runs out; three uploads cut off. Two batches give gradients
that are not finite. The run is HSDP 2 × 2 on this machine's CPU with an S3 server on loopback, and is compared, bit by
bit, with one that met nothing but these batches and skipped them. Prints tables; exit code 1 where a run did not end,
ended with other weights, or told of a window or of its time what was not so.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.remote import s3_server
from support.train import chaos
from support.train import run_case as case

KINDS = ("kill", "stop", "raise", "kill all", "lose", "damage", "full", "flip", "slow", "no memory")
GOODPUT = re.compile(r"goodput ([\d.]+)%")


def kinds(count: int) -> list[str]:
    """As many, each kind as often as any other; but memory runs out once, for then all is recomputed, and the disk is
    lost once."""
    once = ["no memory", "lose"]
    often = [kind for kind in KINDS if kind not in once]
    return [*once, *(often[number % len(often)] for number in range(count - len(once)))]


def moment(row: dict[str, Any]) -> float:
    """Seconds since 1970."""
    return datetime.fromisoformat(row["time"]).timestamp()


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def restarts(run: Path) -> list[float]:
    """Seconds from each end of a start that the launcher saw to the first step's line of the next."""
    steps = [moment(row) for row in rows(run / "metrics.jsonl") if row["kind"] == "step"]
    found = []
    for end in rows(run / "events.jsonl"):
        after = [step for step in steps if step > moment(end)]
        if after and end["starts_again_in_s"] is not None:
            found.append(min(after) - moment(end))
    return found


def noticed(met: chaos.Chaos, events: list[dict[str, Any]]) -> Iterator[tuple[str, float, bool, str]]:
    """Of each fault that must be told, after how many seconds it was, whether its rank was named, and what was said;
    infinite: never.
    Another fault may end the run before one is told: then it has gone with that start, and is left out."""
    ends, entries = rows(met.run / "events.jsonl"), rows(met.run / "ledger.jsonl")
    for mark in sorted((met.folder / "marks").iterdir(), key=lambda file: file.stat().st_mtime):
        event, at = events[int(mark.name)], mark.stat().st_mtime
        after = [end for end in ends if moment(end) >= at - 0.01]
        if event["kind"] in ("kill", "damage", "raise", "stop", "no memory"):
            end = after[0] if after else None
            seconds, named = moment(end) - at if end else math.inf, bool(end and end["rank"] == event["rank"])
            yield event["kind"], seconds, named, f"{event}: {end and end['said']}"
        elif event["kind"] in ("flip", "full"):
            kind = {"flip": "corrupt", "full": "checkpoint_failed"}[event["kind"]]
            told = [row for row in entries if row["kind"] == kind and moment(row) >= at - 0.01]
            if told and not (after and moment(after[0]) < moment(told[0]) - 1):
                yield event["kind"], moment(told[0]) - at, (
                    kind != "corrupt" or event["rank"] in told[0]["ranks"]
                ), f"{event}: {told[0]}"  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    wrong, waits, told, seen = 0, [], defaultdict(list), defaultdict(list)
    print("| seed | faults met | starts of the command | seconds | weights | windows told wrong | account's gap "
          "| goodput | restarts, median |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, s3_server.serve() as port:
        folder = Path(name)
        paths = case.write_corpus(folder / "data", {"web": 700, "code": 250})
        for seed in range(given.first, given.first + given.seeds):
            spoilt = [given.steps // 3, given.steps // 2]
            one, two = folder / f"{seed}-plain", folder / f"{seed}-run"
            skips = {"guard": {"non_finite": "skip"}}
            plain = chaos.meet(one / "at", chaos.settings(one / "run", paths, given.steps, **skips), [], spoilt)
            events = chaos.drawn(seed, kinds(given.events), given.steps)
            with s3_server.bucket(port) as server:
                config = chaos.settings(two / "run", paths, given.steps, server.url)
                chaos.cut_uploads(seed, 3, server)
                met = chaos.meet(two / "at", config, events, spoilt, server)
            if plain.code or met.code:
                print(f"| {seed} | exit codes {plain.code}, {met.code} | {met.said.splitlines()[-1:]} |", flush=True)
                wrong += 1
                continue
            first, second = chaos.weights(plain.run), chaos.weights(met.run)
            equal = all(torch.equal(value, second[key]) for key, value in first.items())
            windows = chaos.wrong_exposures(met, config, given.steps, spoilt)
            gap = chaos.account_gap(met.run)
            wrong += not equal or bool(windows) or gap >= 0.01
            own = restarts(met.run)
            waits += own
            for kind, count in Counter(entry["kind"] for entry in case.ledger(met.run)).items():
                told[kind].append(count)
            for kind, seconds, named, said in noticed(met, events):
                seen[kind].append((seconds, named))
                if not named:
                    print(f"another rank was named: {kind}, {said}", flush=True)
            share = GOODPUT.findall(met.said)
            marks = len(list((two / "at" / "marks").iterdir()))
            cells = [
                seed, f"{marks} of {len(events)}", met.starts, f"{met.seconds:.0f}",
                "bitwise equal" if equal else "DIFFER", len(windows), f"{gap:.2%}",
                f"{share[-1]} %" if share else "–", f"{len(own)}, {median(own):.1f} s",
            ]  # fmt: skip
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    print("\n| fault | times | seconds until it was told, median | longest | its rank was named |")
    print("|---|---|---|---|---|")
    for kind, found in sorted(seen.items()):
        times = [seconds for seconds, _ in found]
        right = sum(named for _, named in found)
        print(f"| {kind} | {len(found)} | {median(times):.1f} | {max(times):.1f} | {right} |")
    print(f"\n{len(waits)} restarts, from the end of all ranks to the next step's line:", end=" ")
    print(f"median {median(waits):.1f} s, longest {max(waits):.1f} s")
    lines = [f"{kind} {median(counts):.0f}" for kind, counts in sorted(told.items())]
    print(f"lines of the ledgers, median of the runs: {', '.join(lines)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
