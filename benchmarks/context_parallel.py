"""Context parallelism: how evenly attention falls on the ranks over real documents, and a long sequence in one layer.

    python benchmarks/context_parallel.py balance DATA_RUN/tokens/SOURCE … [--seq-len 8192] [--layouts 10000]
    python benchmarks/context_parallel.py long [--tokens 131072] [--method allgather] [--ranks 4]

``balance`` reads the lengths of the sources' documents, packs them into windows in a random order, again and again
until there are enough, and counts for each method and number of ranks the pairs of queries and keys of the busiest rank
relative to the mean: its mean and 99th percentile over the windows. ``long`` computes attention of one layer over a
sequence of documents of at most 16,384 tokens in float32, forward and backward, on the ranks and in one process, and
prints the greatest difference relative to the largest value, the peak of each process's memory, and the seconds.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from typing import Any

import numpy as np
import torch

from quern.model.attention import Documents
from quern.model.config import ModelConfig
from quern.model.transformer import Transformer
from quern.parallel.context import kernels
from quern.parallel.context.attention import share_sequence
from quern.parallel.context.inputs import Sharing
from quern.parallel.context.kernels import Stretches
from quern.parallel.local import LocalRanks
from quern.parallel.planning.context import Context
from quern.parallel.planning.mesh import MeshPlan, build_mesh
from quern.train.batches.boundaries import open_boundaries
from quern.train.batches.corpus import Corpus
from quern.train.batches.sharing import imbalance

HEADS, KEYS, HEAD_DIM = 8, 2, 32
LONGEST = 16384


def layouts(paths: list[str], seq_len: int, most: int) -> list[np.ndarray]:
    """Where documents start in each window, then its tokens."""
    readers = Corpus(paths, seq_len).readers
    with tempfile.TemporaryDirectory() as folder:
        starts = [
            np.append(own.between(np.zeros(1, np.int64), reader.total_tokens).starts_M, reader.total_tokens)
            for own, reader in zip(open_boundaries(readers, folder), readers, strict=True)
        ]
    lengths = np.concatenate([np.diff(np.unique(own)) for own in starts])
    rng, times = np.random.default_rng(0), -(-(most + 1) * seq_len // int(lengths.sum()))
    ends = np.cumsum(np.concatenate([rng.permutation(lengths) for _ in range(times)]))
    found = []
    for first in range(0, most * seq_len, seq_len):
        inside = ends[np.searchsorted(ends, first, "right") : np.searchsorted(ends, first + seq_len)] - first
        found.append(np.array([0, *inside, seq_len]))
    return found


def balance(paths: list[str], seq_len: int, most: int) -> None:
    rows = layouts(paths, seq_len, most)
    lengths = np.concatenate([np.diff(own) for own in rows])
    print(f"{len(rows):,} windows of {seq_len:,} tokens; documents: {len(lengths) / len(rows):.1f} a window, "
          f"median {np.median(lengths):.0f}, mean {lengths.mean():.0f} tokens")  # fmt: skip
    for ranks in (2, 4, 8):
        for name, context in (
            ("ulysses", Context("ulysses", ranks, ranks)), ("allgather, ring", Context("ring", ranks, 1)),
            *([("usp, ulysses 2", Context("usp", ranks, 2))] if ranks > 2 else []),
        ):  # fmt: skip
            found = np.array([imbalance(own, seq_len, context)[0] if context.shards > 1 else 1.0 for own in rows])
            plain = np.array([head_tail(own, seq_len, context.shards) for own in rows])
            print(f"cp {ranks}  {name:<16} mean {found.mean():.3f}  p99 {np.percentile(found, 99):.3f}"
                  f"   head-tail alone: mean {plain.mean():.3f}  p99 {np.percentile(plain, 99):.3f}")  # fmt: skip


def head_tail(cu_seqlens: np.ndarray, seq_len: int, shards: int) -> float:
    """The same if shards were cut without a look at documents."""
    work = np.arange(seq_len) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens)) + 1
    chunks = work.reshape(2 * shards, -1).sum(1)
    pairs = chunks[:shards] + chunks[::-1][:shards]
    return float(pairs.max() / pairs.mean())


def documents(tokens: int) -> np.ndarray:
    rng, starts = np.random.default_rng(1), [0]
    while starts[-1] < tokens:
        starts.append(starts[-1] + int(min(LONGEST, rng.lognormal(8.0, 1.2) + 1)))
    return np.array([*starts[:-1], tokens], np.int32)


def values(tokens: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(1, tokens, heads, HEAD_DIM, generator=made) for heads in (HEADS, KEYS, KEYS, HEADS)]


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def one_process(tokens: int) -> tuple[list[torch.Tensor], float, float]:
    """out, dq, dk, dv of attention in blocks without context parallelism; seconds; MiB."""
    cu_seqlens, (q, k, v, dout) = torch.from_numpy(documents(tokens)), (own[0] for own in values(tokens))
    by = Stretches(cu_seqlens, cu_seqlens, (LONGEST, LONGEST), True)
    began = time.perf_counter()
    out, lse = kernels.forward(q, k, v, by)
    found = [out, *kernels.backward(dout, q, k, v, out, lse, by)]
    return found, time.perf_counter() - began, peak_mib()


def shared(tokens: int, context: Context) -> tuple[list[torch.Tensor], float, float]:
    """This rank's positions, then the same of its tokens."""
    mesh = build_mesh(MeshPlan(cp=context.ranks), "cpu", context.heads)
    sizes = {"num_heads": HEADS, "num_kv_heads": KEYS, "head_dim": HEAD_DIM, "dim": 8, "ffn_dim": 8}
    with torch.device("meta"):
        model = Transformer(ModelConfig(num_layers=1, **sizes).shape(8))
    share_sequence(model, tokens, mesh.context("heads"), mesh.context("shards"), context.ring)
    cu_seqlens = documents(tokens)
    whole = Documents(torch.zeros(1, tokens, dtype=torch.int32), torch.from_numpy(cu_seqlens), LONGEST)
    given = Sharing(context, mesh.rank("cp"), tokens).of(cu_seqlens, whole, torch.device("cpu"))
    q, k, v, dout = (own[:, given.positions_BR[0]] for own in values(tokens))
    q, k, v = (own.requires_grad_() for own in (q, k, v))
    attend: Any = model.blocks["0"].attention.attend  # type: ignore[union-attr]
    began = time.perf_counter()
    out = attend(q, k, v, given.told)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    return [given.positions_BR, out.detach(), *gradients], time.perf_counter() - began, peak_mib()


def long(tokens: int, context: Context) -> None:
    cu_seqlens = documents(tokens)
    print(f"{tokens:,} tokens in {len(cu_seqlens) - 1} documents of at most {np.diff(cu_seqlens).max():,}")
    print(f"{HEADS} heads, {KEYS} of keys, of {HEAD_DIM}; blocks of {kernels.BLOCK}")
    print(f"a mask of the whole sequence would be {tokens**2 / 2**30:.1f} GiB")
    with LocalRanks(1, backend=None, timeout_s=3600) as alone:
        ((expected, seconds, mib),) = alone.call(one_process, tokens)
    print(f"one process           {seconds:6.1f} s, peak {mib:,.0f} MiB")
    with LocalRanks(context.ranks, timeout_s=3600) as ranks:
        parts = ranks.call(shared, tokens, context)
    print(f"{context.method} over {context.ranks} ranks  {max(own[1] for own in parts):6.1f} s, "
          f"peak {max(own[2] for own in parts):,.0f} MiB a rank")  # fmt: skip
    for number, (name, whole) in enumerate(zip(("out", "dq", "dk", "dv"), expected, strict=True)):
        found = torch.full_like(whole, float("nan"))
        for (positions_BR, *own), *_ in parts:
            found[positions_BR[0]] = own[number][0]
        print(f"{name:<4} {float((found - whole).abs().max() / whole.abs().max()):.1e} of the largest value")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    one = modes.add_parser("balance")
    one.add_argument("paths", nargs="+", metavar="SOURCE")
    one.add_argument("--seq-len", type=int, default=8192)
    one.add_argument("--layouts", type=int, default=10_000)
    two = modes.add_parser("long")
    two.add_argument("--tokens", type=int, default=131_072)
    two.add_argument("--method", choices=("allgather", "ring", "usp"), default="allgather")
    two.add_argument("--ranks", type=int, default=4)
    given = parser.parse_args()
    if given.mode == "balance":
        balance(given.paths, given.seq_len, given.layouts)
    else:
        long(given.tokens, Context(given.method, given.ranks, 2 if given.method == "usp" else 1))


if __name__ == "__main__":
    main()
