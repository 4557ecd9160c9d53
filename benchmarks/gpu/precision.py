"""What FP8 gives on one GPU: products against ceilings and float64, the trainer by precision, parts of a step, peers.

    python benchmarks/gpu/precision.py [--out FILE] [--layers 8] [--micro-batch 2] [--accumulate 4] [--seq-len 4096]
                                       [--checkpointing none] [--steps 8] [--budget 520] [--only GROUP …]
    python benchmarks/gpu/precision.py --device cpu --tiny     # the same road on a machine without a GPU

**Unverified on a GPU**: so far only ``--device cpu --tiny`` has been run. The figures it prints there say nothing.
For a Hopper GPU (H100, H200) with torch ≥ 2.11 of CUDA ≥ 12.9, which has FP8 kernels for all three recipes. One call
takes at most ``--budget`` seconds. Each row is a process of its own with a limit of its own: what fails, hangs or does
not fit in memory costs its row.

- *products*: each recipe's three products by the kernel, beside the emulation in float32 and beside float64. Exit code
  1 where an error is above its bound, or a row failed.
- *ceilings*: a copy, and products of BF16 and FP8 alone, at the sizes of a block.
- *trainer*: ``quern bench`` at Llama-3-8B's widths with fewer layers, compiled: the trainer's own step, with loader,
  guard, clipping and fused AdamW over float32 masters. Causal attention without document masks, as the peers have it.
- *peers*: ``transformers``' Llama compiled, weights and moments in BF16; the same with torchao's FP8 where that is
  installed.
- *parts*: attention, loss, optimizer and casts alone; shares are of the best product measured, or of a copy.

MFU is of the BF16 peak, recomputation never counted, with the whole attention matrix and with its causal half, and both
without the FLOPs of the output projection, whose share is larger in a model with few layers than in the whole one.
The results are in ``--out``, else in ``$OUT/precision.json`` where there is $OUT, written after every row.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PRECISIONS = ("bf16", "fp8-tensorwise", "fp8-blockwise", "fp8-rowwise")
TORCHAO = ("tensorwise", "rowwise")
GROUPS = ("products", "ceilings", "trainer", "peers", "parts")
MODEL = {"preset": "llama3-8b"}
VOCAB_SIZE = 128_256
#: MFU of BF16 with the whole attention matrix, and what tensorwise has to give beside it.
BF16_MFU = 0.50
BF16_AIM = 0.578
TENSORWISE = 1.2
BUDGET_S = 520.0
#: Below this many seconds a row is not begun.
LEAST_S = 20.0


@dataclass(frozen=True)
class Row:
    """One process: what it is called, its command, and for how long it may run."""

    group: str
    name: str
    command: list[str]
    limit_s: float
    read: Callable[[str], dict[str, Any]]
    """Its figures, from what it has printed."""


def last_line(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


def bench_row(text: str) -> dict[str, Any]:
    """The only row of ``quern bench --json``; raises ValueError with its error."""
    (row,) = json.loads(text)["rows"]
    if not row["ok"]:
        raise ValueError(row["error"])
    return dict(row)


def spec_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the rows have in common."""
    if args.tiny:
        sizes = {"model": {"preset": "debug", "num_layers": 2}, "vocab_size": 512, "square": 256, "copy_bytes": 1 << 20,
                 "document": 48, "optimizer_layers": 1, "backend": "aot_eager"}  # fmt: skip
    else:
        sizes = {"model": {**MODEL, "num_layers": args.layers}, "vocab_size": VOCAB_SIZE, "square": 8192,
                 "copy_bytes": 1 << 30, "document": 600, "optimizer_layers": 4, "backend": "inductor"}  # fmt: skip
    return {
        **sizes, "device": args.device, "seq_len": args.seq_len, "tokens": args.seq_len * args.micro_batch,
        "micro_batch": args.micro_batch, "accumulate": args.accumulate, "checkpointing": args.checkpointing,
        "steps": args.steps, "warm_up": args.warm_up, "peak_tflops": args.peak_tflops, "recipe": None,
    }  # fmt: skip


def rows_of(spec: Mapping[str, Any]) -> list[Row]:
    """The most telling first: what comes last may find no time."""

    def child(script: str, *arguments: str) -> list[str]:
        return [sys.executable, str(HERE / script), *arguments]

    def peer(recipe: str | None) -> list[str]:
        return child("llama_peer.py", json.dumps({**spec, "recipe": recipe}))

    text = json.dumps(spec)
    found = [
        Row("products", "products", child("parts.py", "products", text), 90, last_line),
        Row("ceilings", "ceilings", child("parts.py", "ceilings", text), 90, last_line),
        *(Row("trainer", name, trainer(name, spec), 150, bench_row) for name in PRECISIONS[:2]),
        Row("peers", "transformers", peer(None), 150, last_line),
        *(Row("trainer", name, trainer(name, spec), 150, bench_row) for name in PRECISIONS[2:]),
        Row("parts", "parts", child("parts.py", "parts", text), 90, last_line),
    ]
    if importlib.util.find_spec("torchao") is not None:
        found += [Row("peers", f"transformers, torchao {name}", peer(name), 150, last_line) for name in TORCHAO]
    return found


def trainer(precision: str, spec: Mapping[str, Any]) -> list[str]:
    """``quern bench`` for one precision."""
    peak = [] if spec["peak_tflops"] is None else ["--peak-tflops", str(spec["peak_tflops"])]
    settings = ("document_mask=false", f"device={spec['device']}", f"compile.backend={spec['backend']}")
    options = {
        "model": spec["model"]["preset"], "layers": spec["model"]["num_layers"], "vocab-size": spec["vocab_size"],
        "seq-len": spec["seq_len"], "micro-batch": spec["micro_batch"], "accumulate": spec["accumulate"],
        "precision": precision, "checkpointing": spec["checkpointing"], "steps": spec["steps"],
        "warm-up": spec["warm_up"],
    }  # fmt: skip
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "quern.train.bench", *settings, *given, "--compile", "--json", *peak]


def measure(row: Row, limit_s: float) -> dict[str, Any]:
    """Runs the row: its figures, or ``error``. What it has started ends with it."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
        process = subprocess.Popen(row.command, stdout=said, stderr=complained, start_new_session=True)
        try:
            code: int | None = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
        wall_s = time.monotonic() - began
        said.seek(0)
        complained.seek(0)
        text, trace = said.read(), complained.read()
    base = {"group": row.group, "name": row.name, "wall_s": wall_s}
    if code is None:
        return {**base, "error": f"took longer than {limit_s:.0f} s"}
    try:
        return {**base, **row.read(text), "error": None}
    except (ValueError, IndexError, KeyError) as error:
        lines = [line for line in trace.splitlines() if line.strip()]
        why = str(error) if row.group == "trainer" and text.strip() else "; ".join(lines[-1:])
        return {**base, "error": why or f"ended with code {code}"}


def end(process: subprocess.Popen[bytes]) -> None:
    """The whole session of a row, compilers and ranks too."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def verdicts(rows: Mapping[str, Mapping[str, Any]], device: str) -> list[dict[str, Any]]:
    """The bars, as far as there are figures for them; those of speed are a GPU's."""
    found = []
    products = rows.get("products", {})
    if products.get("rows"):
        worst = max(row["to_emulation"] / row["bounds"][0] for row in products["rows"])
        exact = max(row["to_float64"] / row["bounds"][1] for row in products["rows"])
        found += [
            {"bar": "products against emulation, worst error / bound", "value": worst, "passes": worst <= 1},
            {"bar": "products against float64, worst error / bound", "value": exact, "passes": exact <= 1},
        ]
    if device != "cuda":
        return found
    bf16, tensorwise = (rows.get(name, {}) for name in PRECISIONS[:2])
    if bf16.get("mfu_full") is not None:
        found.append({"bar": f"BF16 MFU ≥ {BF16_MFU:.1%} (aim {BF16_AIM:.1%})", "value": bf16["mfu_full"],
                      "passes": bf16["mfu_full"] >= BF16_MFU})  # fmt: skip
    if bf16.get("tokens_per_s") and tensorwise.get("tokens_per_s"):
        ratio = tensorwise["tokens_per_s"] / bf16["tokens_per_s"]
        found.append({"bar": f"tensorwise / BF16 ≥ {TENSORWISE}", "value": ratio, "passes": ratio >= TENSORWISE})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of next to nothing")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches a step")
    parser.add_argument("--checkpointing", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--steps", type=int, default=8, help="measured, after the warm-up")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--peak-tflops", type=float, help="dense BF16 peak; by default the device's name says")
    parser.add_argument("--budget", type=float, help="seconds of all rows; 520, and ten times as many on a CPU")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if args.tiny:
        args.seq_len, args.steps, args.warm_up, args.accumulate, args.layers = 128, 2, 1, 2, 2
    patience = 1.0 if args.device == "cuda" else 10.0
    budget_s = args.budget or patience * BUDGET_S
    out = args.out or (Path(os.environ["OUT"], "precision.json") if "OUT" in os.environ else None)
    spec, began = spec_of(args), time.monotonic()
    document: dict[str, Any] = {
        "command": ["python", *sys.argv] if arguments is None else ["precision.py", *arguments], "spec": spec,
        "machine": machine(args.device), "rows": {}, "verdicts": [],
    }  # fmt: skip
    for row in rows_of(spec):
        if row.group not in args.only:
            continue
        left = budget_s - (time.monotonic() - began)
        if left >= LEAST_S:
            entry = measure(row, min(patience * row.limit_s, left))
        else:
            entry = {"group": row.group, "name": row.name, "error": f"no time left of {budget_s:.0f} s"}
        document["rows"][row.name] = entry
        document["verdicts"] = verdicts(document["rows"], args.device)
        took = f"{entry.get('wall_s', 0):.0f} s"
        print(f"{row.name}: {entry['error'] or took}", file=sys.stderr, flush=True)
        if out is not None:
            out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    from tables import text_of

    print(text_of(document))
    print(f"{time.monotonic() - began:.0f} s; repeat: {shlex.join(document['command'])}")
    bad = [row for row in document["rows"].values() if row["error"]]
    wrong = [row for row in document["rows"].get("products", {}).get("rows", []) if not row["passes"]]
    return 1 if bad or wrong else 0


def machine(device: str) -> str:
    """What the figures are of."""
    import torch

    if device != "cuda":
        return f"CPU, {os.cpu_count()} cores, torch {torch.__version__}: the road alone, its figures say nothing"
    properties = torch.cuda.get_device_properties(0)
    return (
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} SMs, "
        f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    )


if __name__ == "__main__":
    sys.exit(main())
