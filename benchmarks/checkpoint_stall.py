"""How long a save holds up training, and what training loses while it is written: by mode, beside torch's own.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint_stall.py [--gb 2] [--saves 5] [--ranks 1] [--folder F] [--json]

One rank with a model and AdamW's moments of ``--gb``, or two that share them (FSDP2); figures are rank 0's, and a GB is
one of its own part. A step is products of matrices on one thread, about 0.3 s, and then an update that writes to every
weight's first element. Every mode saves once to get warm and then ``--saves`` times to the same disk, synced. Medians
are printed:

- *stall*: time inside the save's own calls, until training may go on to change the weights; in s per GB (10⁹ bytes).
  ``unhidden``: the copy is waited for at once. ``overlapped``: only before the next update.
- *published*: from the begin until the checkpoint stands.
- *steps*: steps a second while the save is under way, over those when none is.

The peers are ``torch.distributed.checkpoint``'s ``save`` and ``async_save``, synced too.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

from quern.model.config import ModelShape
from quern.model.transformer import Transformer
from quern.parallel.apply import parallelize
from quern.parallel.local import LocalRanks
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan, build_mesh
from quern.train.checkpoint.format.manifest import EncodingInfo, Position, RunFacts, sha256_of
from quern.train.checkpoint.format.state import TrainState, view_tensors
from quern.train.checkpoint.save.async_save import Progress
from quern.train.checkpoint.save.manager import CheckpointManager
from quern.train.config import CheckpointConfig

DIM = 1024
RANKS = b"YQ== 0\n"
BYTES = 12
"""Of a parameter: weight and two moments in float32."""


def shape_of(size_gb: float) -> ModelShape:
    """As many blocks of 12.6 M parameters as fill ``size_gb`` with their moments."""
    block = 4 * DIM * DIM + 3 * DIM * 2816
    return ModelShape(
        num_layers=max(1, round(size_gb * 1e9 / BYTES / block)), dim=DIM, num_heads=8, num_kv_heads=8, head_dim=128,
        ffn_dim=2816, vocab_size=1000, vocab_multiple=8, rope_theta=1e4, rope_scaling=None, norm_eps=1e-5,
        qk_norm=False, tied_embeddings=False,
    )  # fmt: skip


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_of(size_gb: float, folder: str) -> TrainState:
    shape = shape_of(size_gb)
    model = Transformer(shape)
    if dist.is_initialized():
        mesh = build_mesh(MeshPlan(dp_shard=dist.get_world_size()), "cpu")
        model = parallelize(model, mesh, Layout(compute_dtype=torch.float32), torch.device("cpu")).model
    with torch.no_grad():
        for parameter in model.parameters():
            local(parameter).uniform_()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0), "exp_avg": torch.rand_like(parameter), "exp_avg_sq": torch.rand_like(parameter),
        }  # fmt: skip
    ranks = Path(folder, "encoding.tiktoken")
    ranks.write_bytes(RANKS)
    encoding = EncodingInfo("bytes", 1000, 999, sha256_of(RANKS))
    return TrainState(
        model, optimizer, RunFacts(shape, {}, "fp32", {}, "", encoding, str(ranks), {"benchmark": "checkpoint_stall"})
    )


class Training:
    """Steps that take a while and change every weight."""

    def __init__(self, state: TrainState, steps: int = 12) -> None:
        self.state = state
        self.left, self.right = torch.rand(768, 768), torch.rand(768, 768)
        self.products = 10
        began = time.perf_counter()
        self.compute()
        self.products = max(1, round(self.products * 0.3 / (time.perf_counter() - began)))
        self.steps = steps

    def compute(self) -> None:
        for _ in range(self.products):
            self.left @ self.right

    @torch.no_grad()
    def update(self) -> None:
        for parameter in self.state.model.parameters():
            local(parameter).view(-1)[0] += 1

    def run(self, steps: int) -> float:
        """Steps a second when nothing is saved."""
        began = time.perf_counter()
        for _ in range(steps):
            self.compute()
            self.update()
        return steps / (time.perf_counter() - began)


class Ours:
    """A save by the manager in one of its modes."""

    def __init__(self, run_dir: str, mode: str, state: TrainState) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if world > 1 else 0
        self.manager = CheckpointManager(run_dir, CheckpointConfig(mode=mode, verify=False), rank, world)
        self.state, self.world, self.step = state, world, 0
        self.manager.async_save.prepare(state)

    def begin(self) -> None:
        self.step += 1
        self.manager.async_save.begin(self.step, self.state, Position(0, 0, "", 0))

    def copied(self) -> None:
        self.manager.async_save.wait_staged()

    def ended(self) -> bool:
        progress = self.manager.async_save.progress()
        if self.world > 1:
            total = torch.tensor([progress.ended, progress.published])
            dist.all_reduce(total)
            progress = Progress(*total.tolist())
        outcome = self.manager.async_save.advance(progress)
        assert outcome is None or outcome.error is None, outcome
        return outcome is not None

    def finish(self) -> None:
        outcome = self.manager.async_save.finish()
        assert outcome is not None
        assert outcome.error is None, outcome.error
        shutil.rmtree(outcome.checkpoint.path) if self.manager.agreement.rank == 0 else None

    def close(self) -> None:
        self.manager.close()


class Torchs:
    """The same by torch: ``kind`` sync, thread or process."""

    def __init__(self, folder: str, kind: str, state: TrainState) -> None:
        self.folder, self.kind, self.state, self.future, self.step = folder, kind, state, None, 0

    def begin(self) -> None:
        self.step += 1
        self.path = f"{self.folder}/torch_{self.step}"
        tensors = dict(view_tensors(self.state).tensors)
        writer = dcp.FileSystemWriter(self.path, sync_files=True)
        alone = not dist.is_initialized()
        if self.kind == "sync":
            dcp.save(tensors, storage_writer=writer, no_dist=alone)
        else:
            kind = AsyncCheckpointerType.THREAD if self.kind == "thread" else AsyncCheckpointerType.PROCESS
            found = dcp.async_save(tensors, storage_writer=writer, async_checkpointer_type=kind, no_dist=alone)
            self.future = found

    def copied(self) -> None:
        """``async_save`` returns when it has copied."""

    def ended(self) -> bool:
        return self.future is None or self.future.done()

    def finish(self) -> None:
        if self.future is not None:
            self.future.result()
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(self.path)

    def close(self) -> None:
        pass


def measure(training: Training, saver: Any, saves: int, overlapped: bool) -> dict[str, float]:
    stalls, published, busy = [], [], []
    idle = [training.run(training.steps)]
    for number in range(saves + 1):
        began = time.perf_counter()
        saver.begin()
        if not overlapped:
            saver.copied()
        stall = time.perf_counter() - began
        steps, since = 0, time.perf_counter()
        ended = False
        while not ended:
            training.compute()
            mark = time.perf_counter()
            saver.copied()
            stall += time.perf_counter() - mark
            training.update()
            steps += 1
            mark = time.perf_counter()
            ended = saver.ended()
            stall += time.perf_counter() - mark
        took = time.perf_counter() - since
        saver_done = time.perf_counter() - began
        if getattr(saver, "future", None) is not None or not isinstance(saver, Ours):
            saver.finish()
        else:
            shutil.rmtree(Path(saver.manager.root, f"step_{saver.step:08d}"), ignore_errors=True)
        idle.append(training.run(training.steps))
        if number:
            stalls.append(stall)
            published.append(saver_done)
            busy.append(steps / took)
    return {"stall_s": median(stalls), "published_s": median(published), "steps": median(busy) / median(idle)}


@contextmanager
def _closing(saver: Any) -> Iterator[Any]:
    try:
        yield saver
    finally:
        saver.close()


def bench(size_gb: float, saves: int, folder: str) -> dict[str, dict[str, float]]:
    """On every rank; together they have ``size_gb``. The result's ``gb`` is this rank's part."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rank = dist.get_rank() if dist.is_initialized() else 0
    mine = str(Path(folder, f"own{rank}"))
    Path(mine).mkdir(parents=True)
    state = state_of(size_gb, mine)
    view = view_tensors(state)
    size = sum(local(tensor).nbytes for tensor in view.tensors.values()) / 1e9
    training = Training(state)
    rows: dict[str, dict[str, float]] = {}
    makers: dict[str, tuple[Callable[[], Any], bool]] = {
        "quern sync": (lambda: Ours(f"{folder}/sync", "sync", state), False),
        "quern thread, unhidden": (lambda: Ours(f"{folder}/thread", "thread", state), False),
        "quern thread, overlapped": (lambda: Ours(f"{folder}/thread", "thread", state), True),
        "quern process, unhidden": (lambda: Ours(f"{folder}/process", "process", state), False),
        "quern process, overlapped": (lambda: Ours(f"{folder}/process", "process", state), True),
        "torch save": (lambda: Torchs(f"{folder}/torch", "sync", state), False),
        "torch async_save, thread": (lambda: Torchs(f"{folder}/torch", "thread", state), False),
    }
    for name, (make, overlapped) in makers.items():
        with _closing(make()) as saver:
            rows[name] = measure(training, saver, saves, overlapped) | {"gb": size}
        if rank == 0:
            print(name, rows[name], file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2))
    parser.add_argument("--folder", help="where to write; default: the temporary folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.ranks == 1:
            rows = bench(options.gb, options.saves, folder)
        else:
            with LocalRanks(options.ranks, timeout_s=3600) as ranks:
                rows = ranks.call(bench, options.gb, options.saves, folder)[0]
    if options.json:
        print(json.dumps(rows))
        return
    print(
        f"{options.gb} GB on {options.ranks} rank(s), {options.saves} saves after a warm one, torch {torch.__version__}"
    )
    print(f"  {'':28s}{'stall s/GB':>11s}{'stall s':>9s}{'published s':>13s}{'steps':>8s}")
    for name, row in rows.items():
        print(
            f"  {name:28s}{row['stall_s'] / row['gb']:11.3f}{row['stall_s']:9.3f}{row['published_s']:13.1f}"
            f"{row['steps']:8.2f}"
        )
    print(f"repeat: OMP_NUM_THREADS=1 python {shlex.join(sys.argv)}")


if __name__ == "__main__":
    main()
