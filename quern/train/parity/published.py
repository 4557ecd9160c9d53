"""Published faults of parallel training, and the cases of the matrix in which quern's counterpart would be seen."""

from __future__ import annotations

__all__ = ["PUBLISHED"]

#: Of each such case the faults that it excludes, by where they were published: project, issue or pull request, and the
#: number of the finding in it. Those whose construct quern does not have are in docs/parallelism.md.
PUBLISHED: dict[str, dict[str, str]] = {
    "ddp2-none-x1-mask-untied-six-z-ramp": {
        "Megatron-LM #7452, finding 3": "each data-parallel rank divides a loss by its own number of targets",
        "Megatron-LM #7207": "a held-out loss is the mean of the means of data-parallel ranks",
    },
    "ring2-none-x3-mask-untied-norm": {
        "Megatron-LM #7452, finding 9": "each rank of cp divides the loss by its own number of targets",
        "Megatron-LM #7207": "a held-out loss is the mean of the means of ranks of cp",
        "Megatron-LM #906": "gradients are multiplied by the number of ranks of cp",
    },
    "tp2-none-x3-mask-tied-norm-skip1": {
        "Megatron-LM #7452, finding 11": "gradients of norms of heads, which each rank has whole, are not summed",
        "TransformerEngine (ROCm) #715": "weights that each rank has whole enter the norm once a rank",
    },
    "tp2-none-x1-mask-untied-six-z-ramp": {
        "Megatron-LM #7452, finding 8": "of a weight split by heads one rank's part alone enters the norm",
    },
    "tp2-none-x3-mask-untied-six-loss": {
        "Megatron-LM #7452, finding 10": "a router's own counts are overwritten by their sum over ranks",
    },
    "fsdp2tp2-none-x3-mask-tied-norm-skip1": {
        "Megatron-LM #7452, finding 7": "embeddings are scattered over other ranks than those of tp",
    },
    "pp2fsdp2-gpipe-none-x4-mask-tied-norm-skip1": {
        "Megatron-LM #7452, finding 12": "a checkpoint numbers layers from the first of their stage",
        "Megatron-LM #844": "shards of the tied embedding at both ends of a pipeline are not of the same rows",
    },
}
