"""CPU of the planner's search, beside counting the memory and time of every legal layout.

    python benchmarks/planner_search.py --rounds 3

Both sides answer for the same model and cluster, in turn, in processes of their own, so that neither has what the other
remembers; the fastest layout must be the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from statistics import median
from typing import Any

from quern.model.config import ModelConfig
from quern.planner.answer import answer, name_of
from quern.planner.candidates import Wish, candidates, step_of
from quern.planner.hardware import load_hardware
from quern.planner.memory.peak import State
from quern.planner.search import Search, room
from quern.planner.time.estimate import estimate

CASES = {"llama3-70b": (256, 512), "llama3-405b": (16_384, 2048)}
"""GPUs, and sequences of 8,192 tokens a step."""


def of(preset: str, side: str) -> dict[str, Any]:
    gpus, batch = CASES[preset]
    hardware, state = load_hardware("h100"), State(documents=True)
    wish = Wish(ModelConfig.model_validate({"preset": preset}).shape(128_256), gpus, hardware.node, 8192, batch)
    began = time.process_time()
    if side == "search":
        told = answer(wish, state, hardware, Search(wish, state, hardware), 15e12)
        fastest, number = told["layouts"][0]["name"], told["legal"]
    else:
        times = {}
        for choice in (every := list(candidates(wish))):
            step = step_of(choice, wish)
            if not room(step, state, hardware).short:
                times[choice] = estimate(step, hardware, state.moment_bytes).seconds
        fastest, number = name_of(min(times, key=lambda choice: times[choice])), len(every)
    return {"seconds": time.process_time() - began, "fastest": fastest, "layouts": number}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("PRESET", "SIDE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(of(*args.one)))
        return
    for preset, (gpus, _) in CASES.items():
        found: dict[str, list[dict[str, Any]]] = {"search": [], "every layout": []}
        for _ in range(args.rounds):
            for side, runs in found.items():
                command = [sys.executable, __file__, "--one", preset, side]
                runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        (fastest,) = {run["fastest"] for runs in found.values() for run in runs}
        search, every = (median(run["seconds"] for run in runs) for runs in found.values())
        layouts = f"{found['search'][0]['layouts']:,} layouts"
        print(f"{preset} on {gpus:,}: {layouts}, {search:.1f} s, every one {every:.1f} s, {every / search:.1f} times")
        print(f"  the fastest of both: {fastest}")


if __name__ == "__main__":
    main()
