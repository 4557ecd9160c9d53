"""Tokens a second, MFU and memory of the trainer on one GPU, beside transformers' Llama of the same shape.

    python benchmarks/gpu/train_step.py [--models 1B 8B-width] [--layers 8] [--seq-len 4096] [--checkpointing full …]
                                        [--micro-batches 16 8 4 2 1] [--accumulate 2] [--steps 8] [--json]
    python benchmarks/gpu/train_step.py --device cpu --tiny      # the same road end to end, on a machine without a GPU

**Unverified on a GPU**: so far only ``--device cpu --tiny`` has been run. The figures it prints there say nothing.

Each row is a process of its own. The trainer's rows run ``Trainer.fit``, as a user's run does, over a token run made of
random tokens in a temporary folder: loader, transfers, guard, clipping, fused AdamW and metrics are all in the time,
which a loop around model and optimizer would leave out. Only the weights are drawn on the device instead of the CPU,
which takes a minute and no speed depends on, and the run is left before its last step would be saved. Blocks are
compiled one by one; masters, gradients and moments are float32.

The peer is ``LlamaForCausalLM`` as people train it on one GPU: weights and moments in BF16 (less memory and less work
than float32 masters), the whole model compiled, SDPA, fused AdamW, clipping, random tokens that lie on the device, with
and without gradient checkpointing; the ratio is to the faster of the two. Both sides have plain causal attention; the
rows with document masks (mean length 600) stand apart, for they do less attention and their MFU does not show it.

A row's micro-batch is the first of ``--micro-batches`` that fits; a step has ``--accumulate`` of them. MFU is
tokens/s × FLOPs a token / peak, recomputation never counted, with the whole attention matrix (PaLM, appendix B) and
with its causal half, and both again without the FLOPs of the output projection, whose share is larger in a model with
few layers than in the one it stands for. Memory is the allocator's peak (on the CPU the process's).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

#: Sizes of Llama 3.2 1B, and of Llama 3.1 8B with fewer layers; and of next to nothing.
MODELS: dict[str, dict[str, Any]] = {
    "1B": {"preset": "1B", "vocab_size": 128_256},
    "8B-width": {"preset": "llama3-8b", "vocab_size": 128_256},
    "tiny": {"preset": "debug", "dim": 64, "ffn_dim": 128, "num_heads": 2, "num_kv_heads": 1, "vocab_size": 512},
}
WARM_UP = 3
MEAN_DOCUMENT = 600.0


class Finished(Exception):  # noqa: N818
    """Leaves ``Trainer.fit`` before the last step would be saved."""


class Stopwatch:
    """Sits where the trainer's profiler does: starts after the warm-up, ends with the last step."""

    def __init__(self, steps: int, device: str) -> None:
        self.steps, self.device, self.seconds, self._began = steps, device, 0.0, 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def step(self, step: int) -> None:
        if step + 1 == WARM_UP:
            synchronise(self.device)
            self._began = time.perf_counter()
        if step + 1 == WARM_UP + self.steps:
            synchronise(self.device)
            self.seconds = time.perf_counter() - self._began
            raise Finished


def synchronise(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def model_section(case: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """``model`` of a config, and the vocabulary's size."""
    section = dict(MODELS[case["model"]])
    vocab_size = section.pop("vocab_size")
    if case["layers"]:
        section["num_layers"] = case["layers"]
    return section, vocab_size


def run_trainer(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Seconds of the measured steps, by ``Trainer.fit``."""
    import torch
    from loader import write_corpus

    import quern.train.setup as setup
    from quern.train.config import TrainConfig
    from quern.train.metrics import memory_gib
    from quern.train.ranks import open_ranks

    @torch.no_grad()
    def drawn_on_the_device(model: torch.nn.Module, seed: int) -> None:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.normal_(0, 0.02) if parameter.ndim > 1 else parameter.fill_(1.0)

    setup.initialise = drawn_on_the_device  # type: ignore[assignment]
    section, vocab_size = model_section(case)
    batch = case["micro_batch"] * case["accumulate"]
    (folder / "data").mkdir()
    (folder / "run").mkdir()
    tokens = max(200_000, (WARM_UP + case["steps"] + 8) * batch * case["seq_len"])
    paths = write_corpus(folder / "data", 1, tokens, MEAN_DOCUMENT, vocab_size)
    config = TrainConfig.model_validate(
        {
            "run_dir": str(folder / "run"),
            "data": [{"path": paths[0]}],
            "document_mask": case["document_mask"],
            "model": section,
            "seq_len": case["seq_len"],
            "global_batch": batch,
            "micro_batch": case["micro_batch"],
            "steps": WARM_UP + case["steps"] + 1,
            "precision": "bf16",
            "device": case["device"],
            "activation_checkpointing": case["checkpointing"],
            "compile": {"enabled": True, "backend": case["backend"]},
            "schedule": {"warmup": 1},
            "metrics": {"live": False, "tensorboard": False},
        }
    )
    watch = Stopwatch(case["steps"], case["device"])
    with open_ranks(case["device"]) as ranks, setup.open_trainer(config, ranks) as trainer:
        trainer.profiler = watch  # type: ignore[assignment]
        try:
            trainer.fit()
        except Finished:
            trainer.settle()
        memory = memory_gib(ranks.device)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {"seconds": watch.seconds, "memory_gib": memory, "losses": [row["loss"] for row in rows]}


def run_peer(case: dict[str, Any]) -> dict[str, Any]:
    """Seconds of the measured steps, by transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from quern.model.config import ModelConfig
    from quern.train.metrics import memory_gib

    section, vocab_size = model_section(case)
    shape = ModelConfig.model_validate(section).shape(vocab_size)
    device = torch.device(case["device"])
    config = LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.dim, intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads, head_dim=shape.head_dim,
        num_key_value_heads=shape.num_kv_heads, rms_norm_eps=shape.norm_eps, max_position_embeddings=case["seq_len"],
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied_embeddings, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == shape.num_parameters, f"transformers built {found} parameters, expected {shape.num_parameters}"
    if case["checkpointing"] == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(model, backend=case["backend"])
    losses, watch = [], Stopwatch(case["steps"], case["device"])
    size = (case["micro_batch"], case["seq_len"])
    try:
        for step in range(WARM_UP + case["steps"]):
            total = torch.zeros((), device=device)
            for _ in range(case["accumulate"]):
                tokens = torch.randint(vocab_size, size, device=device)
                loss = compiled(input_ids=tokens, labels=tokens).loss / case["accumulate"]
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(total)
            watch.step(step)
    except Finished:
        pass
    return {"seconds": watch.seconds, "memory_gib": memory_gib(device), "losses": [loss.item() for loss in losses]}


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: one row, or ``{"fits": False}``."""
    import torch

    from quern.model.config import ModelConfig
    from quern.train.metrics import Utilisation, peak_flops

    section, vocab_size = model_section(case)
    shape = ModelConfig.model_validate(section).shape(vocab_size)
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = run_trainer(case, Path(folder)) if case["side"] == "quern" else run_peer(case)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
            return {**case, "fits": False}
        raise
    seq_len = case["seq_len"]
    speed = case["steps"] * case["accumulate"] * case["micro_batch"] * seq_len / found["seconds"]
    peak = peak_flops(torch.device(case["device"]), "bf16", case["peak_tflops"])
    bare = {
        name: None if peak is None else speed * shape.flops_per_token(seq_len, causal=causal, head=False) / peak
        for name, causal in (("mfu_full_without_head", False), ("mfu_causal_without_head", True))
    }
    return {**case, **found, "fits": True, "layers": shape.num_layers, "parameters": shape.num_parameters,
            "tokens_per_s": speed, **Utilisation(shape, seq_len, 1, peak).of(speed), **bare}  # fmt: skip


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
