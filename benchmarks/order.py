"""Nanoseconds to find what a position of the training order holds, and back, beside the tables it does without.

    python benchmarks/order.py [--positions 1000000] [--rounds 5] [--json]

Twenty sources with weights over three decades and 10^3 to 10^9 windows; positions drawn evenly from 10^12. The peers
are what a loader with an index pays for as many values: ``argsort`` of random keys (how an epoch's table is made), a
random read of such a table (which must then be stored), and the bare copy of three results. Steps are of 1,024 samples:
``alone`` in no sequence, ``in sequence`` as a run reads them. One thread; the least of the rounds, for noise only adds.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable

import numpy as np

from quern.mixtures.order import Order

SPAN = 10**12
STEPS = 256


def least(work: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest of the rounds, after one to warm up."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def make(num_sources: int) -> Order:
    rng = np.random.default_rng(0)
    weights = [f"{weight:.9f}" for weight in 10 ** rng.uniform(-3, 0, num_sources)]
    return Order(weights, [int(count) for count in 10 ** rng.uniform(3, 9, num_sources)], 0)


def measure(num_positions: int, rounds: int) -> dict[str, float]:
    """What → nanoseconds a sample."""
    rng = np.random.default_rng(1)
    order = make(20)
    positions = rng.integers(0, SPAN, num_positions, dtype=np.uint64)
    sources, epochs, windows = order.samples(positions)
    by_source = [(s, np.flatnonzero(sources == s)) for s in range(20)]

    def locate() -> np.ndarray:
        found = np.empty_like(positions)
        for s, here in by_source:
            found[here] = order.locate_many(s, epochs[here], windows[here])[0]
        return found

    if not np.array_equal(locate(), positions):
        raise SystemExit("locate does not undo samples; nothing was measured")
    in_a_row = np.arange(10**9, 10**9 + num_positions, dtype=np.uint64)
    keys, table = rng.random(num_positions), rng.permutation(num_positions).astype(np.uint64)
    reads = rng.integers(0, num_positions, num_positions)
    copies = [np.empty_like(positions) for _ in range(3)]

    def copy() -> None:
        for target, values in zip(copies, (sources, epochs, windows), strict=True):
            np.copyto(target, values)

    result = {
        "samples, random positions": least(lambda: order.samples(positions), rounds),
        "samples, positions in a row": least(lambda: order.samples(in_a_row), rounds),
        "locate, random samples": least(locate, rounds),
        "peer: argsort of random keys": least(lambda: np.argsort(keys), rounds),
        "peer: random reads of a table": least(lambda: table[reads], rounds),
        "peer: copy of the result": least(copy, rounds),
    }
    result = {name: seconds / num_positions * 1e9 for name, seconds in result.items()}
    for num_sources in (1, 3, 20):
        order = make(num_sources)
        alone = iter(rng.integers(0, SPAN // 1024, STEPS * (rounds + 1)).tolist())
        running = iter(range(STEPS * (rounds + 1)))
        for how, steps in (("alone", alone), ("in sequence", running)):
            seconds = least(lambda order=order, steps=steps: [order.batch(next(steps)) for _ in range(STEPS)], rounds)
            result[f"step of 1,024 {how}, {num_sources} sources"] = seconds / STEPS / 1024 * 1e9
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.positions, args.rounds)
    own = result["samples, random positions"]
    ratios = {
        f"samples, random positions, against {name.removeprefix('peer: ')}": own / value
        for name, value in result.items()
        if name.startswith("peer")
    }
    if args.json:
        json.dump({"positions": args.positions, "nanoseconds": result, "ratios": ratios}, sys.stdout)
        print()
        return
    print(f"{args.positions:,} positions below 10^12; NumPy {np.__version__}")
    for name, value in result.items():
        step = f"  {value * 1024 / 1e6:6.3f} ms a step" if name.startswith("step") else ""
        print(f"  {name:42} {value:7.0f} ns a sample{step}")
    for name, value in ratios.items():
        print(f"  {name:66} {value:6.2f} ×")
    print(f"repeat: {shlex.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
