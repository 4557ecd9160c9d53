"""CPU of the whole data road per page record, beside datatrove on the same WARC files in one sitting.

    python benchmarks/chain.py --warc DIR --peer PEER_PYTHON PEER_SCRIPT [--rounds N]

``PEER_PYTHON`` is an interpreter with datatrove; ``PEER_SCRIPT`` runs its FineWeb chain as
``SCRIPT --warc DIR --out OUT --tasks 2 --workers 2``. Both sides run on one copy and on three copies of the files:
cold is the cost of one copy, start-up included; marginal is (three copies - one) / 2, what more data costs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median

sys.path.insert(0, os.path.dirname(__file__))
from process_tree import Usage, measure

ROOT = Path(__file__).resolve().parents[1]


def copies(source: Path, target: Path, count: int) -> Path:
    """A folder with ``count`` copies of every WARC file."""
    target.mkdir(parents=True)
    for number in range(count):
        for file in sorted(source.glob("*.warc.gz")):
            shutil.copyfile(file, target / f"{number}-{file.name}")
    return target


def quern(warcs: Path, out: Path, config: str, extra: list[str]) -> tuple[Usage, dict]:
    command = [sys.executable, "-m", "quern.cli.main", "data", "run", config, f"run_dir={out}",
               f"sources.0.paths={warcs}/*.warc.gz", "workers=2", *extra]  # fmt: skip
    usage = measure(command, log=f"{out}.log")
    return usage, json.loads((out / "stats.json").read_text())


def peer(python: str, script: str, warcs: Path, out: Path, options: list[str], env: dict[str, str]) -> Usage:
    command = [python, script, "--warc", str(warcs), "--out", str(out), "--tasks", "2", "--workers", "2", *options]
    return measure(command, env=env, log=f"{out}.log")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warc", type=Path, required=True)
    parser.add_argument("--peer", nargs=2, metavar=("PYTHON", "SCRIPT"))
    parser.add_argument("--peer-path", help="folder put on the peer's PYTHONPATH (a newer trafilatura)")
    parser.add_argument("--peer-options", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--config", default=str(ROOT / "configs" / "fineweb-en.yaml"))
    parser.add_argument("overrides", nargs="*", help="key=value for quern")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        inputs = {count: copies(args.warc, work / f"in{count}", count) for count in (1, 3)}
        costs: dict[tuple[str, int], list[Usage]] = {}
        pages = 0
        for number in range(args.rounds):
            for count, warcs in inputs.items():
                out = work / f"quern-{number}-{count}"
                usage, stats = quern(warcs, out, args.config, args.overrides)
                costs.setdefault(("quern", count), []).append(usage)
                if count == 1:
                    pages = stats["pages"]
                    stages = stats["timing"]
                shutil.rmtree(out)
                if args.peer:
                    env = dict(os.environ)
                    if args.peer_path:
                        env["PYTHONPATH"] = args.peer_path
                    out = work / f"peer-{number}-{count}"
                    usage = peer(*args.peer, warcs, out, args.peer_options, env)
                    costs.setdefault(("datatrove", count), []).append(usage)
                    shutil.rmtree(out)
        report(costs, pages, stages)
    print(f"repeat: {shlex.join(['python', *sys.argv])}")


def report(costs: dict[tuple[str, int], list[Usage]], pages: int, stages: dict) -> None:
    """Print the table: ms of CPU per page record, cold and marginal, and the ratios.

    Raises:
        SystemExit: the tree cost less than its workers say they used: some of it was not counted.
    """
    counted = costs["quern", 1][-1].cpu_s
    if counted < stages["cpu_seconds"]:
        raise SystemExit(
            f"counted {counted:.1f} CPU-seconds of quern's processes, {stages['cpu_seconds']:.1f} say its workers"
        )
    print(f"{pages} page records; ms of CPU per page record, medians of {len(costs['quern', 1])} rounds")
    print(f"{'':<10}{'cold':>9}{'marginal':>10}{'wall s':>9}{'PSS MiB':>9}{'largest process MiB':>21}")
    figures = {}
    for name in ("quern", "datatrove"):
        if (name, 1) not in costs:
            continue
        one = median(u.cpu_s for u in costs[name, 1])
        three = median(u.cpu_s for u in costs[name, 3])
        figures[name] = cold, marginal = 1e3 * one / pages, 1e3 * (three - one) / 2 / pages
        wall = median(u.wall_s for u in costs[name, 1])
        pss = max(u.peak_pss_mib for u in costs[name, 3])
        largest = max(u.largest_rss_mib for u in costs[name, 3])
        print(f"{name:<10}{cold:>9.2f}{marginal:>10.2f}{wall:>9.1f}{pss:>9.0f}{largest:>21.0f}")
    if "datatrove" in figures:
        cold, marginal = (figures["datatrove"][i] / figures["quern"][i] for i in (0, 1))
        print(f"datatrove / quern: {cold:.2f} cold, {marginal:.2f} marginal")
    print("quern by stage, ms of CPU per page record:")
    for name, seconds in sorted(stages["stage_seconds"].items(), key=lambda item: -item[1]):
        print(f"  {name:<16}{1e3 * seconds / pages:>8.3f}")


if __name__ == "__main__":
    main()
