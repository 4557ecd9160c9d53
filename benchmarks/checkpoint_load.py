"""Loading a checkpoint on another layout: seconds, bytes read and memory, a rank; beside torch's own reader.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint_load.py [--gb 1] [--layouts one fsdp2 …] [--no-torch] [--json]

A model with AdamW's moments, ``--gb`` of float32 in all, is saved on each layout and loaded on each, every load in
fresh processes, one a rank. Weights and moments are in memory, every page of them, when a load begins. Of the worst
rank:

- *shard*: bytes of the rank's part of the state.
- *read*: bytes that it read from files (``rchar`` of ``/proc/self/io``).
- *added*: its peak resident memory during the load above what was resident before (``VmHWM``, which the kernel keeps;
  reset by ``/proc/self/clear_refs``). Page cache is not resident memory of a process.
- *peak*: shard + added, by shard.

Rank 0's added is shown by itself. Seconds are those of the slowest rank, files in page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shlex
import shutil
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from quern.model.config import ModelShape
from quern.model.transformer import Transformer
from quern.parallel.apply import parallelize
from quern.parallel.local import LocalRanks
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan, build_mesh
from quern.train.checkpoint.format.manifest import EncodingInfo, Position, RunFacts, sha256_of
from quern.train.checkpoint.format.state import TrainState, view_tensors
from quern.train.checkpoint.save.manager import CheckpointManager
from quern.train.config import CheckpointConfig

DIM, VOCAB = 1024, 16384
RANKS = b"YQ== 0\n"
BYTES = 12
"""Of a parameter: weight and two moments in float32."""
LAYOUTS = {
    "one": MeshPlan(),
    "fsdp2": MeshPlan(dp_shard=2),
    "fsdp4": MeshPlan(dp_shard=4),
    "tp2": MeshPlan(tp=2),
    "pp2": MeshPlan(pp=2),
    "tp2×fsdp2": MeshPlan(dp_shard=2, tp=2),
}


@dataclass(frozen=True)
class Row:
    """One load; bytes of the rank that has most, but for :attr:`rank0`."""

    saved: str
    loaded: str
    reader: str
    seconds: float
    shard: int
    read: int
    added: int
    rank0: int
    """Added on rank 0."""
    peak: float
    """The largest (shard + added) / shard of a rank."""


def shape_of(size_gb: float) -> ModelShape:
    """Two embeddings of 67 MB, and as many blocks of 12.6 M parameters as fill ``size_gb``, an even number."""
    block = 4 * DIM * DIM + 3 * DIM * 2816
    pairs = max(1, round((size_gb * 1e9 / BYTES - 2 * VOCAB * DIM) / block / 2))
    return ModelShape(
        num_layers=2 * pairs, dim=DIM, num_heads=8, num_kv_heads=8, head_dim=128, ffn_dim=2816, vocab_size=VOCAB,
        vocab_multiple=128, rope_theta=1e4, rope_scaling=None, norm_eps=1e-5, qk_norm=False, tied_embeddings=False,
    )  # fmt: skip


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_on(layout: str, size_gb: float, folder: str) -> TrainState:
    """This rank's part of the model; every page of it is written to."""
    shape, plan = shape_of(size_gb), LAYOUTS[layout]
    with torch.device("meta"):
        model = Transformer(shape)
    laid = Layout(compute_dtype=torch.float32, micro_batch=1, seq_len=8)
    model = parallelize(model, build_mesh(plan, "cpu"), laid, torch.device("cpu")).model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with torch.no_grad():
        for parameter in model.parameters():
            slots = {"exp_avg": torch.empty_like(parameter), "exp_avg_sq": torch.empty_like(parameter)}
            for tensor in (parameter, *slots.values()):
                local(tensor).uniform_()
            optimizer.state[parameter] = {"step": torch.tensor(1.0), **slots}
    encoding = EncodingInfo("bytes", VOCAB, VOCAB - 1, sha256_of(RANKS))
    facts = RunFacts(
        shape, plan.sizes(), "fp32", {}, "", encoding, f"{folder}/encoding.tiktoken", {"benchmark": "load"}
    )
    return TrainState(model, optimizer, facts)


def manager(folder: str) -> CheckpointManager:
    config = CheckpointConfig(mode="sync", verify=False)
    return CheckpointManager(f"{folder}/run", config, dist.get_rank(), dist.get_world_size())


def save(layout: str, size_gb: float, folder: str) -> str:
    """On every rank: write the checkpoint; its path."""
    state = state_on(layout, size_gb, folder)
    with manager(folder) as checkpoints:
        checkpoints.async_save.begin(1, state, Position(0, 0, "", 0))
        checkpoints.async_save.wait_staged()
        outcome = checkpoints.async_save.finish()
    assert outcome is not None, "the save that was begun has ended"
    if outcome.error is not None:
        raise outcome.error
    return outcome.checkpoint.path


def field(file: str, name: str) -> int:
    """A number of a file of /proc/self; kB are given in bytes."""
    for line in Path("/proc/self", file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * (1024 if value.endswith("kB") else 1)
    raise KeyError(name)


def load(layout: str, size_gb: float, folder: str, path: str, reader: str) -> tuple[float, int, int, int]:
    """On every rank: seconds, and bytes of the shard, read, and added."""
    state = state_on(layout, size_gb, folder)
    view = view_tensors(state)
    shard = sum(local(tensor).nbytes for tensor in view.tensors.values())
    with manager(folder) as checkpoints:
        dist.barrier()
        before = field("io", "rchar")
        Path("/proc/self/clear_refs").write_text("5")
        resident, began = field("status", "VmRSS"), time.perf_counter()
        if reader == "quern":
            checkpoints.load(path, state)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.load(dict(view.tensors), storage_reader=dcp.FileSystemReader(path))
        seconds = time.perf_counter() - began
        return seconds, shard, field("io", "rchar") - before, field("status", "VmHWM") - resident


def measure(saved: str, loaded: str, reader: str, size_gb: float, folder: str, path: str) -> Row:
    with LocalRanks(LAYOUTS[loaded].world_size, timeout_s=600) as ranks:
        found = ranks.call(load, loaded, size_gb, folder, path, reader)
    seconds, shards, read, added = zip(*found, strict=True)
    peak = max((shard + more) / shard for shard, more in zip(shards, added, strict=True))
    return Row(saved, loaded, reader, max(seconds), max(shards), max(read), max(added), added[0], peak)


def pieces_of(path: str) -> tuple[int, int]:
    """How many pieces of tensors a checkpoint of our own has, and bytes of the largest."""
    places = pickle.loads(Path(path, ".metadata").read_bytes()).storage_data
    return len(places), max(place.length for place in places.values())


def line(row: Row) -> str:
    megabytes = "".join(f"{number / 1e6:10.1f}" for number in (row.shard, row.read, row.added, row.rank0))
    return f"  {row.saved:11s}{row.loaded:11s}{row.reader:7s}{row.seconds:7.2f}{megabytes}{row.peak:8.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS), help="to save on")
    parser.add_argument("--onto", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS), help="to load on")
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="without torch's own reader")
    parser.add_argument("--folder", help="where to write; default: the temporary folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    if not options.json:
        print(f"{options.gb} GB of state, float32, torch {torch.__version__}; MB of the worst rank")
        print(f"  {'saved on':11s}{'loaded on':11s}{'reader':7s}{'s':>7s}{'shard':>10s}{'read':>10s}{'added':>10s}"
              f"{'rank 0':>10s}{'peak':>8s}")  # fmt: skip
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        Path(folder, "encoding.tiktoken").write_bytes(RANKS)
        for saved in options.layouts:
            with LocalRanks(LAYOUTS[saved].world_size, timeout_s=600) as ranks:
                path = ranks.call(save, saved, options.gb, folder)[0]
            count, largest = pieces_of(path)
            if not options.json:
                print(f"  {saved}: {count} pieces, the largest {largest / 1e6:.1f} MB")
            for loaded in options.onto:
                for reader in ("quern", "torch") if options.torch else ("quern",):
                    rows.append(measure(saved, loaded, reader, options.gb, folder, path))
                    if not options.json:
                        print(line(rows[-1]), flush=True)
            shutil.rmtree(os.path.join(folder, "run"))
    if options.json:
        print(json.dumps([vars(row) for row in rows]))
        return
    print(f"repeat: OMP_NUM_THREADS=1 python {shlex.join(sys.argv)}")


if __name__ == "__main__":
    main()
