"""The trainer's own speed, and transformers' Llama of the same shape beside it."""

from __future__ import annotations

import importlib.util
import json
from itertools import pairwise
from typing import Any

import torch

from parts import SkipError
from parts.common import gpu
from quern.model.config import ModelConfig
from quern.train.bench.figures import figures
from quern.train.bench.options import Options
from quern.train.bench.rows import VOCABULARIES
from quern.train.bench.run import bench
from quern.train.step.metrics import Mark, memory_gib, peak_flops

#: Sizes of Llama 3.2 1B, of Llama 3.1 8B and Qwen3 30B-A3B (of which a row has fewer layers), the latter also without
#: experts, with a SwiGLU of the width that a token uses; and of next to nothing.
MODELS: dict[str, dict[str, Any]] = {
    "1B": {"preset": "1B"},
    "8B-width": {"preset": "llama3-8b"},
    "30B-A3B-width": {"preset": "qwen3-30b-a3b"},
    "30B-A3B-width, dense": {"preset": "qwen3-30b-a3b", "moe": {"first_dense": 48}},
    "tiny, experts": {"preset": "debug", "dim": 64, "ffn_dim": 128, "num_heads": 2, "num_kv_heads": 1, "qk_norm": True,
                      "moe": {"num_experts": 4, "top_k": 2, "ffn_dim": 64, "normalize": True}},
    "tiny": {"preset": "debug", "dim": 64, "ffn_dim": 128, "num_heads": 2, "num_kv_heads": 1},
}  # fmt: skip


def section_of(spec: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """``model`` of a config, and the vocabulary's size."""
    section = dict(MODELS[spec["model"]])
    if spec["layers"]:
        section["num_layers"] = spec["layers"]
    return section, VOCABULARIES[section["preset"]]


def quern(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The row as ``quern bench`` measures it: loader, transfers, guard, clipping, fused AdamW over float32 masters and
    metrics are in the time. Blocks are compiled one by one. The first micro-batch that fits is taken."""
    section, _ = section_of(spec)
    options = Options(
        model=(section.pop("preset"),),
        overrides=(
            *(f"model.{name}={json.dumps(size)}" for name, size in section.items()), f"device={spec['device']}",
            f"document_mask={str(spec['documents']).lower()}", f"compile.backend={spec['backend']}",
            f"weights_cast={spec['weights_cast']}",
        ),
        precision=(spec["precision"],), checkpointing=(spec["checkpointing"],), compile=True, seq_len=spec["seq_len"],
        micro_batch=tuple(spec["micro_batches"]), accumulate=spec["accumulate"], steps=spec["steps"],
        warm_up=spec["warm_up"], peak_tflops=spec["peak_tflops"],
    )  # fmt: skip
    document, _ = bench(options, ["quern", "bench"], lambda text: print(text, flush=True))
    (found,) = document["rows"]
    if not found["ok"]:
        raise RuntimeError(found["error"])
    return [line(spec, "quern", found["micro_batch"], found)]


def transformers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """``LlamaForCausalLM``, or ``Qwen3MoeForCausalLM`` with grouped products, as people train it on one GPU: weights,
    and moments in BF16 (less memory and less work than float32 masters), the whole model compiled, SDPA, fused AdamW,
    clipping, random tokens that lie on the device. ``precision`` fp8-…: torchao's recipe of that name in every linear
    layer but the head."""
    for name in ("transformers", *(["torchao"] if spec["precision"] != "bf16" else [])):
        if importlib.util.find_spec(name) is None:
            raise SkipError(f"{name} is not installed")
    last = spec["micro_batches"][-1]
    for micro_batch in spec["micro_batches"]:
        try:
            return [line(spec, "transformers", micro_batch, peer(spec, micro_batch))]
        except RuntimeError as error:
            full = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
            if not full or micro_batch == last:
                raise
            print(f"micro-batch {micro_batch} does not fit", flush=True)
        torch.compiler.reset()
        torch.cuda.empty_cache()
    raise AssertionError("no micro-batch")


def peer(spec: dict[str, Any], micro_batch: int) -> dict[str, Any]:
    """Figures of ``spec["steps"]`` steps after ``spec["warm_up"]``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from quern.model.hf import hf_config  # needs safetensors, which transformers brings

    section, vocab_size = section_of(spec)
    shape = ModelConfig.model_validate(section).shape(vocab_size)
    device = gpu(spec)
    sizes = hf_config(shape, max_position=spec["seq_len"], eos_id=None, dtype=torch.bfloat16)
    config = AutoConfig.for_model(**sizes | {"use_cache": False})
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(torch.bfloat16)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert built == shape.num_parameters, f"transformers built {built} parameters, expected {shape.num_parameters}"
    if spec["precision"] != "bf16":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model,
            config=Float8LinearConfig.from_recipe_name(spec["precision"].removeprefix("fp8-")),
            module_filter_fn=lambda module, name: "lm_head" not in name,
        )
    if spec["checkpointing"] == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    times, loss = train(model.train(), spec, (micro_batch, spec["seq_len"]), vocab_size, device)
    tokens = spec["accumulate"] * micro_batch * spec["seq_len"]
    peak = peak_flops(device, "bf16", spec["peak_tflops"])
    return {
        **figures(shape, times[spec["warm_up"] :], tokens=tokens, seq_len=spec["seq_len"], world=1, peak=peak),
        "memory_gib": memory_gib(device), "first_step_s": times[0], "last_loss": loss,
    }  # fmt: skip


def train(
    model: torch.nn.Module, spec: dict[str, Any], size: tuple[int, int], vocab_size: int, device: torch.device
) -> tuple[list[float], float]:
    """Seconds of every step, by the device's clock; the loss of the last micro-batch."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(model, backend=spec["backend"])
    marks = [Mark(device)]
    for _ in range(spec["warm_up"] + spec["steps"]):
        for _ in range(spec["accumulate"]):
            tokens = torch.randint(vocab_size, size, device=device)
            loss = compiled(input_ids=tokens, labels=tokens).loss
            (loss / spec["accumulate"]).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks.append(Mark(device))
    marks[-1].wait()
    return [after.since(before) for before, after in pairwise(marks)], loss.item()


def line(spec: dict[str, Any], side: str, micro_batch: int, found: dict[str, Any]) -> dict[str, Any]:
    """MFU is of the BF16 peak, recomputation never counted, with the whole attention matrix and with its causal half,
    and both without the output projection's FLOPs, whose share is larger in a model with few layers."""
    shares = {"MFU %": "full", "causal %": "causal", "no head %": "full_without_head",
              "no head, causal %": "causal_without_head"}  # fmt: skip
    mfu = {name: found[f"mfu_{kind}"] for name, kind in shares.items()}
    return {
        "model": spec["model"], "layers": spec["layers"], "side": side, "precision": spec["precision"],
        "checkpointing": spec["checkpointing"], "documents": spec["documents"], "micro-batch": micro_batch,
        "tokens/s": found["tokens_per_s"],
        **{name: None if share is None else 100 * share for name, share in mfu.items()},
        "GiB": found["memory_gib"], "step s": found["step_time_s"], "first step s": found["first_step_s"],
        "last loss": found["last_loss"],
    }  # fmt: skip
