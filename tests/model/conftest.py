"""Fixtures of tests that compare the network with transformers'."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral
from transformers.models.olmoe import modeling_olmoe
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe


@pytest.fixture
def transformers_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers norms, rotates and routes in float32 whatever the model is; here all are written out in float64."""

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float64
        return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + self.variance_epsilon) * self.weight

    def angles(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rope = self.config.rope_parameters
        head_dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        frequencies = rope["rope_theta"] ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if rope["rope_type"] == "llama3":  # Llama 3.1, case by case
            original, factor = rope["original_max_position_embeddings"], rope["factor"]
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            for i, frequency in enumerate(frequencies):
                wavelength = 2 * np.pi / frequency
                if wavelength > original / low:
                    frequencies[i] = frequency / factor
                elif wavelength > original / high:
                    smooth = (original / wavelength - low) / (high - low)
                    frequencies[i] = (1 - smooth) * frequency / factor + smooth * frequency
        angle = position_ids[..., None].double() * torch.from_numpy(np.concatenate([frequencies, frequencies]))
        return angle.cos(), angle.sin()

    def route(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert x.dtype == torch.float64
        logits = x.reshape(-1, self.hidden_dim) @ self.weight.T
        powers = (logits - logits.max(dim=1, keepdim=True).values.detach()).exp()
        weights, chosen = (powers / powers.sum(dim=1, keepdim=True)).topk(self.top_k, dim=1)
        if getattr(self, "norm_topk_prob", True):  # Mixtral always does
            weights = weights / weights.sum(dim=1, keepdim=True)
        return logits, weights, chosen

    for module, prefix in (
        (modeling_llama, "Llama"), (modeling_qwen3, "Qwen3"), (modeling_mixtral, "Mixtral"),
        (modeling_qwen3_moe, "Qwen3Moe"), (modeling_olmoe, "Olmoe"),
    ):  # fmt: skip
        if hasattr(module, f"{prefix}TopKRouter"):
            monkeypatch.setattr(getattr(module, f"{prefix}TopKRouter"), "forward", route)
        monkeypatch.setattr(getattr(module, f"{prefix}RMSNorm"), "forward", norm)
        monkeypatch.setattr(getattr(module, f"{prefix}RotaryEmbedding"), "forward", angles)
