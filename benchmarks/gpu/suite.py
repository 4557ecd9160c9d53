"""Everything that has to be measured on one GPU, part by part, from a bare checkout.

    python benchmarks/gpu/suite.py [--part NAME …] [--minutes 9]     # again until nothing remains
    python benchmarks/gpu/suite.py --device cpu --small              # the same road on a machine without a GPU

**Unverified on a GPU**: so far only ``--device cpu --small`` has been run. The figures it gives there say nothing.

For one H100 or H200 with torch ≥ 2.11 of CUDA ≥ 12.9; nothing has to be installed but torch and the wheels that a first
message names. Every row is a process of its own with a limit: what fails, hangs or does not fit in memory costs its
row. Its result is a file of its own under ``--out``, in a folder that is named by the device, torch and the commit (of
changed files, their digest); a row that has one there, failed ones too, is not run again without ``--again``. A row is
begun only if its limit ends within ``--minutes``. All that lies under ``--out`` is printed as a table at the end, and
written to ``table.md`` beside it; what a row has printed is in ``.log`` beside its result.

Exit codes: 0 all rows asked for have a result and none has failed, 1 a row has failed, 2 the suite cannot begin,
3 rows remain; call it again.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import plan
import runner
import tables
import wheels

OK, FAILED, CANNOT, REMAIN = 0, 1, 2, 3


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--part", nargs="+", choices=plan.PARTS, default=list(plan.PARTS), metavar="NAME", help=", ".join(plan.PARTS))
    add("--row", nargs="+", metavar="NAME", help="only rows of these names")
    add("--out", type=Path, default=runner.ROOT / "gpu-results", metavar="DIR", help="gpu-results in the checkout")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--small", "--dry-run", action="store_true", help="sizes of next to nothing, whose figures say nothing")
    add("--minutes", type=float, default=9.0, metavar="N", help="of this call; 9")
    add("--again", action="store_true", help="run rows that have a result too")
    add("--list", action="store_true", help="name the rows and their limits, and run nothing")
    args = parser.parse_args(arguments)
    if args.device == "cpu" and not args.small and not args.list:
        parser.error("--device cpu: expected --small beside it; the sizes of a GPU would take a CPU days")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    rows = [row for row in plan.rows(args.device, args.small) if row.part in args.part]
    if args.row is not None:
        unknown = sorted(set(args.row) - {row.name for row in rows})
        if unknown:
            return _cannot(f"--row: no row {', '.join(unknown)} in {', '.join(args.part)}; --list names them")
        rows = [row for row in rows if row.name in args.row]
    if args.list:
        for row in rows:
            print(f"{row.part} / {row.name}: {row.skip or f'at most {row.limit_s:.0f} s'}")
        return OK
    if lacking := wheels.missing(args.part):
        return _cannot(wheels.missing_text(lacking, args.part, runner.ROOT / "constraints.txt"))
    try:
        machine = runner.ask(args.device)
    except RuntimeError as error:
        return _cannot(f"--device {args.device}: {error}")
    about = {"machine": machine, "code": runner.source(), "small": args.small}
    folder = args.out / runner.key_of(machine, about["code"], args.small)
    left = runner.run(rows, folder, about, seconds=60 * args.minutes, again=args.again, tell=_tell)
    text = tables.text_of(runner.results(args.out))
    runner.write(args.out / "table.md", text)
    print(text)
    for found in left.failed:
        print(f"failed: {found['part']} / {found['row']}: {found['error']}")
    if left.waiting:
        _say_what_remains(left.waiting, args.minutes, arguments)
        return REMAIN
    return FAILED if left.failed else OK


def _say_what_remains(waiting: Sequence[runner.Row], minutes: float, arguments: Sequence[str] | None) -> None:
    names = ", ".join(f"{row.part} / {row.name}" for row in waiting)
    print(f"{len(waiting)} rows remain, which {minutes:g} minutes did not suffice for: {names}")
    given = [word for word in (sys.argv[1:] if arguments is None else arguments) if word != "--again"]
    longest = max(row.limit_s for row in waiting)
    if longest > 60 * minutes:
        print(f"the longest may take {longest:.0f} s: --minutes {longest / 60 + 0.5:.1f}")
    print(f"go on: {shlex.join(['python', 'benchmarks/gpu/suite.py', *given])}")


def _cannot(text: str) -> int:
    print(text, file=sys.stderr)
    return CANNOT


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
