"""A layer with experts on the CPU: grouped products beside a loop over experts, and what routing and sorting take.

    python benchmarks/expert_layer.py [--tokens 2048] [--dim 512] [--ffn-dim 256] [--experts 32] [--top-k 4]
                                      [--dtype float32] [--rounds 30]

Forward and backward of one layer in one thread. Each round calls every side once, so that sides are compared within a
round; ratios are medians over rounds, with a bootstrap's interval. The same pieces on a GPU, at the sizes of Qwen3
30B-A3B, are the part ``experts`` of benchmarks/gpu/suite.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "gpu"))
from parts.experts import calls

from quern.train.bench.figures import interval


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 2048), ("dim", 512), ("ffn-dim", 256), ("experts", 32), ("top-k", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    moe = {"num_experts": args.experts, "top_k": args.top_k, "ffn_dim": args.ffn_dim, "normalize": True}
    sides = calls({
        "device": "cpu", "dtype": args.dtype, "tokens": args.tokens, "vocab_size": 512,
        "model": {"preset": "debug", "dim": args.dim, "moe": moe},
    })  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(-2, args.rounds):  # the first two warm up
        for name, call in sides.items():
            began = time.perf_counter()
            call()
            if round_number >= 0:
                times[name].append(time.perf_counter() - began)
    layer = times["layer"]
    times["sort, permute, sum"] = [
        whole - router - products
        for whole, router, products in zip(layer, times["router"], times["products"], strict=True)
    ]
    print("| | ms | of the layer | 95 % |\n| --- | ---: | ---: | ---: |")
    for name, own in times.items():
        ratios = [mine / whole for mine, whole in zip(own, layer, strict=True)]
        low, high = interval(ratios)
        ms, share = 1e3 * statistics.median(own), statistics.median(ratios)
        print(f"| {name} | {ms:.2f} | {share:.3f} | {low:.3f} … {high:.3f} |")


if __name__ == "__main__":
    main()
