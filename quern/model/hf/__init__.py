"""Converts weights and config to and from ``transformers``: Llama and Qwen3, with experts Mixtral, Qwen3-MoE, OLMoE."""

from quern.model.hf.config import CONFIG_FILE, hf_config, shape_from_config
from quern.model.hf.files import INDEX_FILE, MAX_SHARD_BYTES, HFWeights, write_weights
from quern.model.hf.names import expected_tensors, hf_names

__all__ = [
    "CONFIG_FILE", "INDEX_FILE", "MAX_SHARD_BYTES", "HFWeights", "expected_tensors", "hf_config", "hf_names",
    "shape_from_config", "write_weights",
]  # fmt: skip
