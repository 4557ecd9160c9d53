"""Tokens a second and core the loader makes from the page cache, beside a memory copy and a loader without documents.

    OMP_NUM_THREADS=1 python benchmarks/loader.py [--tokens 64] [--seq-len 2048] [--micro-batch 8] [--global-batch 512]
                                                  [--world 1] [--sources 4] [--mean-document 600] [--rounds 7] [--json]

A corpus of ``--tokens`` million tokens is written to a temporary folder; its documents' lengths are log-normal. quern
gives tokens, targets, positions, cu_seqlens and documents of a rank's micro-batches, from the order to the arrays. The
peer is the loop of small trainers: random slices of one mapped file, cast and stacked by torch, inputs and targets
only. The limit is one ``np.copyto`` of as many bytes as quern writes, between arrays that are there already. Median of
the rounds, CPU time of one thread; the sides take turns.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from quern.mixtures.order import Order
from quern.tokenize.selection.chosen import write_chosen
from quern.train.batches.boundaries import open_boundaries
from quern.train.batches.corpus import Corpus
from quern.train.batches.loader import Loader
from quern.train.bench.corpus import write_random

GOAL = 50e6
VOCAB_SIZE = 50_257


def sliced_loop(path: str, seq_len: int, micro_batch: int, windows: int) -> Callable[[], None]:
    """The loop of small trainers, over one file."""
    data = np.memmap(path, np.uint16, "r")

    def step() -> None:
        for _ in range(windows // micro_batch):
            places = torch.randint(len(data) - seq_len, (micro_batch,))
            torch.stack([torch.from_numpy(data[i : i + seq_len].astype(np.int64)) for i in places])
            torch.stack([torch.from_numpy(data[i + 1 : i + 1 + seq_len].astype(np.int64)) for i in places])

    return step


def read_half(corpus: Corpus, paths: Sequence[str], folder: Path) -> tuple[Corpus, list[int]]:
    """Every second document of each source, as a condition chooses them, and how many stretches they are in."""
    for reader, ident in zip(corpus.readers, corpus.ids, strict=True):
        spans = (
            (own["start"].to_numpy()[::2] + int(reader.offsets[shard]), own["length"].to_numpy()[::2])
            for shard in range(len(reader.shards))
            for own in reader.read_spans(shard, ["start", "length"], 1 << 16)
        )
        write_chosen(str(folder / "chosen"), ident, "every second", spans)
    halves = Corpus(paths, corpus.seq_len, ["every second"] * len(paths), [str(folder / "chosen")])
    return halves, [len(own) for own in halves.chosen if own is not None]


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Side → tokens a second; and what quern's time went to."""
    paths = write_random(folder, args.tokens * 1_000_000, args.mean_document, VOCAB_SIZE, args.sources)
    corpus = Corpus(paths, args.seq_len)
    began = time.perf_counter()
    boundaries = open_boundaries(corpus.readers, str(folder / "index"))
    build_s = time.perf_counter() - began
    weights = [1 + number for number in range(args.sources)]
    order = Order(weights, corpus.windows, 1, ids=corpus.ids, global_batch=args.global_batch)
    halves, chosen = read_half(corpus, paths, folder)
    windows = args.global_batch // args.world
    tokens = windows * args.seq_len
    half_order = Order(weights, halves.windows, 1, ids=halves.ids, global_batch=args.global_batch)
    loaders = {
        kind: Loader(own, its_order, rank=0, world=args.world, micro_batch=args.micro_batch,
                     document_mask=kind != "plain", boundaries=of)
        for kind, own, its_order, of in (
            ("mask", corpus, order, boundaries), ("plain", corpus, order, boundaries),
            ("chosen", halves, half_order, open_boundaries(halves.readers, str(folder / "index"), halves.chosen)),
        )
    }  # fmt: skip
    written = sum(
        getattr(batch, name).nbytes
        for batch in loaders["mask"].take(0).micro_batches
        for name in ("tokens_BL", "targets_BL", "positions_BL", "documents_BL", "cu_seqlens")
    )
    steps = [0]

    def read(kind: str) -> Callable[[], None]:
        def step() -> None:
            steps[0] += 1
            loaders[kind].take(steps[0])

        return step

    # The limit writes to arrays as large as those quern makes at a time: both stay in the cache alike.
    piece = min(written, 3 << 20)
    source, target = np.ones(piece, np.uint8), np.ones(piece, np.uint8)

    def copy() -> None:
        for _ in range(round(written / piece)):
            np.copyto(target, source)

    first = corpus.readers[0]
    sides = {
        "quern, document masks": read("mask"),
        "quern, no masks": read("plain"),
        "quern, document masks, every second document": read("chosen"),
        "sliced loop (inputs and targets only)": sliced_loop(
            str(Path(first.path) / first.shards[0].bin), args.seq_len, args.micro_batch, windows
        ),
        "np.copyto of the same bytes": copy,
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(args.rounds + 1):
        for name, step in sides.items():
            began = time.thread_time()
            for _ in range(args.steps):
                step()
            if round_:  # the first one warms the page cache
                times[name].append((time.thread_time() - began) / args.steps)
    rates = {name: tokens / median(values) for name, values in times.items()}
    masked = loaders["mask"]
    return {
        "tokens_per_s": rates,
        "us_per_window": {name: args.seq_len / rate * 1e6 for name, rate in rates.items()},
        "order_share": masked.order_s / masked.spent_s,
        "documents_per_window": sum(len(b) for b in boundaries) / sum(corpus.windows),
        "pieces_per_window": sum(chosen) / sum(halves.windows),
        "boundaries_s": build_s,
        "goal": GOAL,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=64, help="millions")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--global-batch", type=int, default=512)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--sources", type=int, default=4)
    parser.add_argument("--mean-document", type=float, default=600)
    parser.add_argument("--steps", type=int, default=16, help="a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder))
    rates = result["tokens_per_s"]
    own = rates["quern, document masks"]
    result["ratios"] = {f"quern, document masks, against {name}": own / rates[name] for name in list(rates)[3:]}
    if args.json:
        json.dump({"seq_len": args.seq_len, **result}, sys.stdout)
        print()
        return
    print(
        f"windows of {args.seq_len} tokens, {result['documents_per_window']:.1f} documents begun in each; "
        f"{result['pieces_per_window']:.1f} stretches where every second document is read"
    )
    for name, rate in rates.items():
        print(f"  {name:46} {rate / 1e6:8.1f} M tokens/s {result['us_per_window'][name]:7.1f} µs a window")
    for name, ratio in result["ratios"].items():
        print(f"  {name:72} {ratio:6.2f} ×")
    print(f"  goal {GOAL / 1e6:.0f} M tokens/s a core: {own / GOAL:.1f} ×")
    print(f"  share of the order in quern's time: {result['order_share']:.1%}; boundaries built in "
          f"{result['boundaries_s']:.2f} s")  # fmt: skip
    print(f"repeat: OMP_NUM_THREADS=1 {shlex.join(['python', *sys.argv])}")


if __name__ == "__main__":
    main()
