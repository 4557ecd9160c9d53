"""CPU of the whole data road per page record, beside datatrove on the same WARC files in one sitting.

    python benchmarks/chain.py --warc DIR --ranks gpt2.tiktoken --peer PEER_PYTHON PEER_SCRIPT \\
        --peer-trafilatura FOLDER --rounds 3 --results runs.jsonl

``PEER_PYTHON`` is an interpreter with datatrove; ``PEER_SCRIPT`` runs its FineWeb chain as
``SCRIPT --warc DIR --out OUT --tasks 2 --workers 2``; ``FOLDER`` holds the trafilatura that quern runs on. The sides:

- ``quern`` and ``quern-no-guess``: the recipe, and the same without the language guess before extraction;
- ``quern-1-worker``: the recipe on one worker;
- ``stock`` and ``same-trafilatura``: datatrove as it is, and on quern's trafilatura (``--same-options``);
- ``bound``: the recipe's work alone, in one process, every memo warm (``benchmarks/chain_bound.py``).

Rounds are interleaved. Each side runs on one copy and on three copies of the files: cold is the cost of one copy,
start-up included; marginal is what more data costs, (three copies - one) / 2; the difference is the fixed start-up.
Every run is a line of ``--results``; the same command goes on where it was left, tries what failed once more, and with
``--report`` only reads. A run above ``--limit-s`` is ended and counts as failed.
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
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))
from chain_report import report
from process_tree import measure

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("quern", "quern-no-guess", "quern-1-worker", "stock", "same-trafilatura", "bound")
EXTRA = {"quern-no-guess": ["language.pre_skip=false"], "quern-1-worker": ["workers=1"]}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warc", type=Path, required=True, help="a folder of *.warc.gz")
    parser.add_argument("--ranks", required=True, help="ranks of the GPT-2 encoding (tokenize.ranks)")
    parser.add_argument("--config", default=str(ROOT / "configs" / "fineweb-en.yaml"))
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of every quern side"
    )
    parser.add_argument("--peer", nargs=2, metavar=("PYTHON", "SCRIPT"))
    parser.add_argument("--peer-options", default="", help="options of both peer sides, as one text")
    parser.add_argument("--same-options", default="--traf-dedup 0 --skip-url", help="options of same-trafilatura alone")
    parser.add_argument("--peer-trafilatura", metavar="FOLDER", help="put on the PYTHONPATH of same-trafilatura")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"some of {','.join(SIDES)}")
    parser.add_argument("--copies", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--bound-pages", type=int, default=600, help="pages the bound is measured on, evenly spread")
    parser.add_argument("--limit-s", type=float, default=None, help="seconds a run may take")
    parser.add_argument("--results", type=Path, help="a file of finished runs, made or continued")
    parser.add_argument("--report", action="store_true", help="run nothing")
    args = parser.parse_args()
    args.sides = args.sides.split(",")
    for side in args.sides:
        if side not in SIDES:
            parser.error(f"--sides: expected some of {', '.join(SIDES)}, got {side!r}")
    if not sorted(args.warc.glob("*.warc.gz")):
        parser.error(f"--warc: {args.warc}: no *.warc.gz")
    if not args.report and not args.peer:
        args.sides = [side for side in args.sides if side not in ("stock", "same-trafilatura")]
    if not args.report and not args.peer_trafilatura:
        args.sides = [side for side in args.sides if side != "same-trafilatura"]
    return args


def copies(source: Path, target: Path, count: int) -> Path:
    """A folder with ``count`` names for every WARC file."""
    target.mkdir(parents=True)
    for number in range(count):
        for file in sorted(source.glob("*.warc.gz")):
            (target / f"{number}-{file.name}").symlink_to(file.resolve())
    return target


def run(side: str, args: argparse.Namespace, warcs: Path, out: Path) -> dict[str, Any]:
    """One run of one side: its cost, and what quern says of its stages."""
    env = dict(os.environ)
    settings = [f"tokenize.ranks={args.ranks}", *args.set]
    if side == "bound":
        script = str(Path(__file__).with_name("chain_bound.py"))
        command = [sys.executable, script, "--warc", str(warcs), "--config", args.config, "--out", str(out),
                   "--pages", str(args.bound_pages), *settings]  # fmt: skip
    elif side in ("stock", "same-trafilatura"):
        command = [*args.peer, "--warc", str(warcs), "--out", str(out), "--tasks", "2", "--workers", "2",
                   *shlex.split(args.peer_options)]  # fmt: skip
        if side == "same-trafilatura":
            env["PYTHONPATH"] = args.peer_trafilatura
            command += shlex.split(args.same_options)
    else:
        command = [sys.executable, "-m", "quern.cli.main", "data", "run", args.config, f"run_dir={out}",
                   f"sources.0.paths={warcs}/*.warc.gz", "workers=2", *settings, *EXTRA.get(side, [])]  # fmt: skip
    usage = measure(command, env=env, log=f"{out}.log", timeout_s=args.limit_s)
    row: dict[str, Any] = {**vars(usage)}
    if side == "bound":
        row["bound"] = json.loads((out / "bound.json").read_text())
    elif side.startswith("quern"):
        stats = json.loads((out / "stats.json").read_text())
        row |= {"pages": stats["pages"], "kept": stats["kept"], "timing": stats["timing"]}
        if usage.cpu_s < stats["timing"]["cpu_seconds"]:
            raise SystemExit(
                f"counted {usage.cpu_s:.1f} CPU-seconds, {stats['timing']['cpu_seconds']:.1f} say its workers"
            )
    return row


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        results = args.results or work / "results.jsonl"
        rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        done = {(row["side"], row["copies"], row["round"]) for row in rows if "failed" not in row}
        todo = [
            (side, count, number)
            for number in range(args.rounds)
            for count in args.copies
            for side in args.sides
            if (side, count, number) not in done and (side != "bound" or (count, number) == (args.copies[0], 0))
        ]
        inputs = {count: copies(args.warc, work / f"in{count}", count) for count in args.copies}
        for side, count, number in [] if args.report else todo:
            out = work / f"{side}-{count}-{number}"
            row: dict[str, Any] = {"side": side, "copies": count, "round": number}
            try:
                row |= run(side, args, inputs[count], out)
            except (TimeoutError, SystemExit) as error:  # of one run of many: the next may do better
                row["failed"] = str(error).strip().splitlines()[-1]
            rows.append(row)
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
            shutil.rmtree(out, ignore_errors=True)
            print(f"{side}, {count} copies, round {number}: {row.get('failed') or format(row['cpu_s'], '.1f') + ' s'}",
                  file=sys.stderr)  # fmt: skip
    report([row for row in rows if row["side"] in args.sides and row["copies"] in args.copies])
    print(f"repeat: {shlex.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
