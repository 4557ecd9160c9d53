"""The config's section ``parallel``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from quern.config import Section
from quern.parallel.planning.context import Context, Method
from quern.parallel.planning.schedules import Schedule
from quern.train.config.numbers import Count

__all__ = ["ParallelConfig"]


class ParallelConfig(Section):
    """Mesh sizes and how they are used. ``dp_shard`` > 1 is FSDP2, ``dp_replicate`` > 1 DDP, both HSDP."""

    later: ClassVar[Mapping[str, Any]] = {
        "tp_pieces": 1,
        "cp_method": "ulysses",
        "ulysses": None,
        "ep_node": None,
        "ep_float8": False,
        "ep_backend": "torch",
    }
    dp_replicate: Count = 1
    """[ranks] Copies of the model, kept equal by DDP, or by HSDP with ``dp_shard``."""
    dp_shard: Count | None = None
    """[ranks] Ranks over which FSDP2 shards weights, gradients and moments; null = all remaining ranks. Example: 8"""
    reshard_after_forward: bool | Count | None = None
    """FSDP2: true = gather again in backward (ZeRO-3), false = keep (ZeRO-2), a number = reshard to that many ranks
    (without tp and pp). Null = true, and false in a pipeline, which would gather for every micro-batch. Example:
    false"""
    tp: Count = 1
    """[ranks] Tensor parallelism: heads, feed-forward width and vocabulary are split over this many ranks, and between
    them the sequence (Megatron's sequence parallelism)."""
    async_tp: bool = False
    """CUDA with ``compile``: gathers and scatters of ``tp`` overlap with the products that need them."""
    tp_pieces: Count = 1
    """[pieces] Gathers and scatters of ``tp`` travel in so many; while one does, the one before it is multiplied, in
    FP8 and without ``compile`` too. A divisor of a rank's tokens, ``seq_len`` / ``tp``. Example: 2"""
    nvlink_domain: Count | None = None
    """[GPUs] GPUs that NVLink joins; null = those of a node, as the launcher says. Example: 8"""
    tp_across_domains: bool = False
    """Let ``tp`` reach beyond an NVLink domain."""
    pp: Count = 1
    """[ranks] Pipeline parallelism: layers are split over this many ranks."""
    schedule: Schedule | None = None
    """The order in which a rank of a pipeline works on micro-batches; null = 1f1b. Example: interleaved_1f1b"""
    stages_per_rank: Count | None = None
    """[stages] For interleaved_1f1b, looped_bfs and interleaved_zero_bubble, 2 or more; null = 2. The others fix it: 2
    for the V-shaped ones (zbv_zero_bubble, dualpipe_v), else 1. Example: 2"""
    stage_layers: tuple[Count, ...] | None = None
    """[layers] Layers of each stage in turn; null = by cost, embedding and head counted. Example: [9, 8, 8, 7]"""
    cp: Count = 1
    """[ranks] Context parallelism: the tokens of a sequence are dealt out over so many ranks, which hold shards of the
    same weights as those of ``dp_shard`` do."""
    cp_method: Method = "ulysses"
    """How attention sees the tokens of other ranks. ``ulysses``: tokens are exchanged for heads, which ``cp`` divides;
    ``allgather``: keys and values are gathered; ``usp``: both, heads among ``ulysses`` ranks; ``ring``: keys and values
    go from rank to rank."""
    ulysses: Count | None = None
    """[ranks] With ``usp``: ranks of ``cp`` that exchange heads. Example: 2"""
    ep: Count = 1
    """[ranks] Expert parallelism: each rank holds ``num_experts`` / ``ep`` experts, and tokens travel to those that are
    theirs. A divisor of ``dp_shard`` × ``cp``, whose ranks it is made of; FSDP2 deals out each rank's experts over
    those that are left. Example: 8"""
    ep_node: Count | None = None
    """[ranks] Of ``ep`` on one node: a token travels once to each node that has an expert of it, and from there to
    ranks of the node. Null = once to each rank. Example: 8"""
    ep_float8: bool = False
    """Tokens travel to experts in FP8 (E4M3 with a scale for each 128 values), half the bytes of bf16. What experts
    give, and gradients, travel in the dtype of activations."""
    ep_backend: Literal["torch", "deepep"] = "torch"
    """What carries tokens to experts: torch's all-to-all, or DeepEP's kernels, version 2, where they are installed
    (CUDA, BF16; without ``ep_node``, ``ep_float8`` and capacity)."""
    zero: Literal[1, 2, 3] | None = None
    """How FSDP2 shards, by ZeRO's stages, in place of ``reshard_after_forward``: 3 is true, 2 is false, and 1 is false
    with gradients that stay whole until a step's last micro-batch and are scattered once. In a pipeline, which keeps
    them whole anyway, 1 alone. Null = as ``reshard_after_forward`` says. Example: 1"""

    @model_validator(mode="after")
    def _available(self) -> Self:
        self._sharing()
        for name, given in (("ep_float8", self.ep_float8), ("ep_backend", self.ep_backend != "torch")):
            if given and self.ep == 1:
                raise ValueError(f"{name}: changes nothing where no token travels to experts; expected ep > 1 with it")
        within = [size for size in range(2, self.ep) if self.ep % size == 0]
        if self.ep_node is not None and self.ep_node not in within:
            sizes = ", ".join(map(str, within)) or "null, as there is none"
            raise ValueError(
                f"ep_node: expected a size between 1 and ep ({self.ep}) that divides it: {sizes}; got {self.ep_node}"
            )
        if self.zero is not None and self.reshard_after_forward is not None:
            raise ValueError(
                f"zero: give it or reshard_after_forward, which it implies (3: true, 2 and 1: false); expected "
                f"reshard_after_forward=null with zero {self.zero}"
            )
        if self.zero in (2, 3) and self.pp > 1:
            raise ValueError(
                f"zero: a pipeline keeps gradients whole until its last micro-batch, which is 1; expected 1 with pp "
                f"{self.pp}, or null, where reshard_after_forward says whether it keeps weights too, got {self.zero}"
            )
        return self

    def _sharing(self) -> None:
        cp, method, given = self.cp, self.cp_method, self.ulysses
        for name, usual in (("cp_method", method == "ulysses"), ("ulysses", given is None)):
            if cp == 1 and not usual:
                raise ValueError(f"{name}: changes nothing without context parallelism; expected cp > 1 too")
        within = [size for size in range(2, cp) if cp % size == 0]
        if method == "usp" and given not in within:
            sizes = ", ".join(map(str, within)) or "another cp_method, as there is none"
            raise ValueError(
                f"ulysses: expected a size between 1 and cp ({cp}) that divides it with cp_method usp: {sizes}; got "
                f"{'null' if given is None else given}"
            )
        if method != "usp" and given is not None:
            raise ValueError(f"ulysses: is of cp_method usp; expected null with {method}, got {given}")

    @property
    def context(self) -> Context:
        """How the ranks of ``cp`` share a sequence."""
        return Context(self.cp_method, self.cp, self.ulysses or (self.cp if self.cp_method == "ulysses" else 1))

    @property
    def resharding(self) -> bool | int:
        """``reshard_after_forward`` with null resolved, and ``zero``."""
        if self.zero is not None:
            return self.zero == 3
        return self.pp == 1 if self.reshard_after_forward is None else self.reshard_after_forward
