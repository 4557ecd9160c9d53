"""``transformers``' Llama under ``torch.compile``, as people train it on one GPU: the benchmarks' peer.

    python benchmarks/gpu/llama_peer.py SPEC      # JSON; prints one line of JSON

Weights and moments in BF16 (less memory and less work than float32 masters), the whole model compiled, SDPA, fused
AdamW, clipping, random tokens that lie on the device. ``recipe``: torchao's FP8 by that name in every linear layer but
the head.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from typing import Any

import torch

from quern.model.config import ModelConfig
from quern.train.bench.figures import figures
from quern.train.step.metrics import Mark, memory_gib, peak_flops


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Speed, MFU and memory of ``spec["steps"]`` steps after ``spec["warm_up"]``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = ModelConfig.model_validate(spec["model"]).shape(spec["vocab_size"])
    device = torch.device(spec["device"])
    config = LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.dim, intermediate_size=shape.ffn_dim,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads, head_dim=shape.head_dim,
        num_key_value_heads=shape.num_kv_heads, rms_norm_eps=shape.norm_eps, max_position_embeddings=spec["seq_len"],
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied_embeddings, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    found = sum(parameter.numel() for parameter in model.parameters())
    assert found == shape.num_parameters, f"transformers built {found} parameters, expected {shape.num_parameters}"
    if spec["recipe"] is not None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model,
            config=Float8LinearConfig.from_recipe_name(spec["recipe"]),
            module_filter_fn=lambda module, name: "lm_head" not in name,
        )
    if spec["checkpointing"] == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    times, loss = train(model.train(), spec, device)
    tokens = spec["accumulate"] * spec["micro_batch"] * spec["seq_len"]
    peak = peak_flops(device, "bf16", spec["peak_tflops"])
    return {
        **figures(shape, times[spec["warm_up"] :], tokens=tokens, seq_len=spec["seq_len"], world=1, peak=peak),
        "memory_gib": memory_gib(device), "first_step_s": times[0], "last_loss": loss,
    }  # fmt: skip


def train(model: torch.nn.Module, spec: dict[str, Any], device: torch.device) -> tuple[list[float], float]:
    """Seconds of every step, by the device's clock; the loss of the last micro-batch."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(model, backend=spec["backend"])
    size, marks = (spec["micro_batch"], spec["seq_len"]), [Mark(device)]
    for _ in range(spec["warm_up"] + spec["steps"]):
        for _ in range(spec["accumulate"]):
            tokens = torch.randint(spec["vocab_size"], size, device=device)
            loss = compiled(input_ids=tokens, labels=tokens).loss
            (loss / spec["accumulate"]).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        marks.append(Mark(device))
    marks[-1].wait()
    return [after.since(before) for before, after in pairwise(marks)], loss.item()


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
