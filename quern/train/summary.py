"""What a run will be, before it is one: parameters, memory of its state, tokens, and the hash of its order."""

from __future__ import annotations

from typing import Any

from quern.mixtures.recipe import Plan
from quern.model.config import ModelShape
from quern.parallel.mesh import MeshPlan
from quern.train.config import TrainConfig
from quern.train.corpus import Corpus
from quern.train.mixture import plan_mixture

__all__ = ["state_memory", "summarise"]

#: Bytes a parameter, by compute precision: weights and gradients at use, then FP32 master and two moments. Adam in
#: mixed precision makes 16 (Rajbhandari et al. 2020, section 3.1); FP32 has no second copy of the weights.
_COMPUTE_COPY = {"bf16": 2, "fp16": 2, "fp32": 0, "fp64": 0}
_MASTER = {"bf16": 4, "fp16": 4, "fp32": 4, "fp64": 8}


def state_memory(shape: ModelShape, plan: MeshPlan, precision: str) -> dict[str, float]:
    """GiB of model state: of the whole model by the usual 16-byte count, and what one rank holds between steps.

    ``rank`` counts masters, both moments and the gradients as they are kept between backward and update (in the
    master's type), sharded over ``dp_shard``; the padded vocabulary counts. Gathered weights of the block in work and
    activations come on top.
    """
    parameters = shape.num_parameters
    master, copy = _MASTER[precision], _COMPUTE_COPY[precision]
    padding = (shape.padded_vocab_size - shape.vocab_size) * shape.dim * (1 if shape.tied_embeddings else 2)
    gib = 2**30
    return {
        "sixteen_bytes": 16 * parameters / gib,
        "sixteen_bytes_per_rank": 16 * parameters / plan.dp_shard / gib,
        "masters": master * parameters / gib,
        "moments": 2 * master * parameters / gib,
        "gradients": master * parameters / gib,
        "compute_copy": copy * parameters / gib,
        "rank": 4 * master * (parameters + padding) / plan.dp_shard / gib,
    }


def summarise(config: TrainConfig, corpus: Corpus, plan: MeshPlan) -> dict[str, Any]:
    """Plain data for ``--dry-run``."""
    shape = config.model.shape(corpus.vocab_size)
    mixture: Plan = plan_mixture(config, corpus)
    return {
        "config": config.model_dump(mode="json"),
        "model": shape.model_dump(mode="json") | {"padded_vocab_size": shape.padded_vocab_size},
        "parameters": {
            "total": shape.num_parameters,
            "blocks": shape.num_block_parameters,
            "embedding": shape.vocab_size * shape.dim,
        },
        "layout": {"ranks": plan.world_size, "dp_replicate": plan.dp_replicate, "dp_shard": plan.dp_shard},
        "state_memory_gib": state_memory(shape, plan, config.precision),
        "flops_per_token": {
            "full": shape.flops_per_token(config.seq_len, causal=False),
            "causal": shape.flops_per_token(config.seq_len, causal=True),
        },
        "order": mixture.to_dict(),
        "corpus": {"versions": dict(zip(corpus.ids, corpus.versions, strict=True)), "fingerprint": corpus.fingerprint},
    }
