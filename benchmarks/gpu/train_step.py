"""Tokens a second, MFU and memory of the trainer on one GPU, beside transformers' Llama of the same shape.

    python benchmarks/gpu/train_step.py [--models 1B 8B-width] [--layers 8] [--seq-len 4096] [--checkpointing full …]
                                        [--micro-batches 16 8 4 2 1] [--accumulate 2] [--steps 8] [--json]
    python benchmarks/gpu/train_step.py --device cpu --tiny      # the same road end to end, on a machine without a GPU

**Unverified on a GPU**: so far only ``--device cpu --tiny`` has been run. The figures it prints there say nothing.

Each row is a process of its own. The trainer's rows are those of ``quern bench``: its own steps, with loader,
transfers, guard, clipping, fused AdamW and metrics in the time, which a loop around model and optimizer would leave
out. Blocks are compiled one by one; masters, gradients and moments are float32.

The peer is ``LlamaForCausalLM`` as people train it on one GPU: weights and moments in BF16 (less memory and less work
than float32 masters), the whole model compiled, SDPA, fused AdamW, clipping, random tokens that lie on the device, with
and without gradient checkpointing; the ratio is to the faster of the two. Both sides have plain causal attention; the
rows with document masks (mean length 600) stand apart, for they do less attention and their MFU does not show it.

A row's micro-batch is the first of ``--micro-batches`` that fits; a step has ``--accumulate`` of them. Speeds are of
the median step. MFU is tokens/s × FLOPs a token / peak, recomputation never counted, with the whole attention matrix
(PaLM, appendix B) and with its causal half, and both again without the FLOPs of the output projection, whose share is
larger in a model with few layers than in the one it stands for. Memory is the allocator's peak (on the CPU the
process's).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from typing import Any

from quern.train.bench.options import Options
from quern.train.bench.rows import VOCABULARIES

#: Sizes of Llama 3.2 1B, and of Llama 3.1 8B with fewer layers; and of next to nothing.
MODELS: dict[str, dict[str, Any]] = {
    "1B": {"preset": "1B"},
    "8B-width": {"preset": "llama3-8b"},
    "tiny": {"preset": "debug", "dim": 64, "ffn_dim": 128, "num_heads": 2, "num_kv_heads": 1},
}
WARM_UP = 3


def model_section(case: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """``model`` of a config, and the vocabulary's size."""
    section = dict(MODELS[case["model"]])
    if case["layers"]:
        section["num_layers"] = case["layers"]
    return section, VOCABULARIES[section["preset"]]


def run_trainer(case: dict[str, Any], micro_batches: list[int]) -> dict[str, Any]:
    """The row as ``quern bench`` measures it."""
    from quern.train.bench.run import bench

    section, _ = model_section(case)
    options = Options(
        model=(section.pop("preset"),),
        overrides=(
            *(f"model.{name}={size}" for name, size in section.items()), f"device={case['device']}",
            f"document_mask={str(case['document_mask']).lower()}", f"compile.backend={case['backend']}",
        ),
        precision=("bf16",), checkpointing=(case["checkpointing"],), compile=True, seq_len=case["seq_len"],
        micro_batch=tuple(micro_batches), accumulate=case["accumulate"], steps=case["steps"], warm_up=WARM_UP,
        peak_tflops=case["peak_tflops"],
    )  # fmt: skip
    document, _ = bench(options, sys.argv, lambda text: None)
    (found,) = document["rows"]
    row = {**case, **found, "model": case["model"], "fits": found["ok"]}
    if found["error_kind"] in ("failed", "refused"):
        print(found["error"], file=sys.stderr)
        row["failed"] = found["error"]
    return row


def run_peer(case: dict[str, Any]) -> dict[str, Any]:
    """The row's figures by transformers."""
    from llama_peer import run

    section, vocab_size = model_section(case)
    return run({**case, "model": section, "vocab_size": vocab_size, "warm_up": WARM_UP, "recipe": None})


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: one row of the peer, or ``{"fits": False}``."""
    import torch

    try:
        return {**case, **run_peer(case), "fits": True}
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
            return {**case, "fits": False}
        raise


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What to measure, micro-batch apart."""
    fixed = {"seq_len": args.seq_len, "steps": args.steps, "accumulate": args.accumulate, "device": args.device,
             "backend": args.backend, "layers": args.layers, "peak_tflops": args.peak_tflops}  # fmt: skip
    rows = []
    for model in args.models:
        same = {**fixed, "model": model}
        own = [
            {**same, "side": "quern", "checkpointing": mode, "document_mask": mask}
            for mask in (False, True) for mode in args.checkpointing
        ]  # fmt: skip
        peers = [
            {**same, "side": "transformers", "checkpointing": mode, "document_mask": False}
            for mode in args.checkpointing if mode != "selective"  # which transformers does not have
        ]  # fmt: skip
        rows += own + peers
    return rows


def measure(row: dict[str, Any], micro_batches: list[int]) -> dict[str, Any]:
    """The row with the first micro-batch that fits."""
    if row["side"] == "quern":
        return run_trainer(row, micro_batches)
    for micro_batch in micro_batches:
        case = {**row, "micro_batch": micro_batch}
        done = subprocess.run(
            [sys.executable, __file__, "--case", json.dumps(case)], stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            return {**case, "fits": False, "failed": done.returncode}
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if found["fits"]:
            return found
    return {**row, "micro_batch": micro_batches[-1], "fits": False}


def machine(device: str) -> str:
    """What the figures are of."""
    import torch
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    if device != "cuda":
        return f"CPU, {os.cpu_count()} cores, {versions}"
    properties = torch.cuda.get_device_properties(0)
    return (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} SMs, "
        f"CUDA {torch.version.cuda}, {versions}"
    )


HEADER = (
    f"{'model':<10}{'side':<14}{'checkpoint':<11}{'masks':<7}{'micro':>6}{'tokens/s':>11}{'MFU full':>10}{'causal':>8}"
    f"{'no head':>9}{'causal':>8}{'GiB':>7}{'/ peer':>8}"
)


def line(row: dict[str, Any], peer: float | None) -> str:
    """A row of the table."""

    def percent(name: str, width: int) -> str:
        return f"{'–' if row[name] is None else f'{100 * row[name]:.1f} %':>{width}}"

    masks = "yes" if row["document_mask"] else "no"
    begin = f"{row['model']:<10}{row['side']:<14}{row['checkpointing']:<11}{masks:<7}"
    if not row["fits"]:
        return begin + f"{row['micro_batch']:>6}  " + ("failed: see above" if "failed" in row else "does not fit")
    ratio = (
        "" if peer is None or row["side"] != "quern" or row["document_mask"] else f"{row['tokens_per_s'] / peer:.2f}"
    )
    return (
        begin + f"{row['micro_batch']:>6}{row['tokens_per_s']:>11,.0f}{percent('mfu_full', 10)}"
        f"{percent('mfu_causal', 8)}{percent('mfu_full_without_head', 9)}{percent('mfu_causal_without_head', 8)}"
        f"{row['memory_gib']:>7.1f}{ratio:>8}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["1B", "8B-width"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--checkpointing", nargs="+", default=["none", "selective", "full"])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[16, 8, 4, 2, 1])
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches a step")
    parser.add_argument("--steps", type=int, default=8, help="measured, after the warm-up")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--peak-tflops", type=float, help="dense BF16 peak; by default the device's name says")
    parser.add_argument("--tiny", action="store_true", help="a model and sequences of next to nothing")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each row")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(run_case(json.loads(args.case))))
        return
    if args.tiny:
        args.models, args.layers, args.seq_len, args.micro_batches, args.steps = ["tiny"], 2, 64, [2], 2
        args.backend = "aot_eager"
    rows = []
    for row in rows_of(args):
        rows.append(measure(row, args.micro_batches))
        print(json.dumps(rows[-1]) if args.json else f"{row['model']} {row['side']} done", flush=True,
              file=sys.stdout if args.json else sys.stderr)  # fmt: skip
    if not args.json:
        print(f"{machine(args.device)}; BF16, seq {args.seq_len}, {args.layers} layers, "
              f"{args.accumulate} micro-batches a step, {args.steps} steps after {WARM_UP}")  # fmt: skip
        print(HEADER)
        peers: dict[str, float] = {}
        for row in rows:
            if row["side"] == "transformers" and row["fits"]:
                peers[row["model"]] = max(row["tokens_per_s"], peers.get(row["model"], 0.0))
        for row in rows:
            print(line(row, peers.get(row["model"])))
        print(f"repeat: {shlex.join(['python', *sys.argv])}")
    if any("failed" in row for row in rows):
        raise SystemExit("a row failed")


if __name__ == "__main__":
    main()
