"""Model config: sizes, switches, presets, and figures derived from them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from quern.config import Section
from quern.model.moe.config import MoEConfig, MoEShape

__all__ = ["PRESETS", "ModelConfig", "ModelShape", "RopeScaling"]

#: Far above any model, and low enough that products of two stay integers of 64 bits.
Size = Annotated[int, Field(ge=1, le=2**28)]
#: Bounded: names are made for every layer of a foreign file before anything of it is believed.
Layers = Annotated[int, Field(ge=1, le=10_000)]
QKNorm = bool | Literal["whole"]


class RopeScaling(Section):
    """Llama-3 frequency scaling (Llama 3.1; ``rope_type: llama3`` in transformers)."""

    factor: Annotated[float, Field(ge=1)] = 8.0
    """Factor by which low frequencies are divided."""
    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    """Wavelengths above ``original_max_position`` / this are scaled fully."""
    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    """Wavelengths below ``original_max_position`` / this are not scaled."""
    original_max_position: Size = 8192
    """[tokens] Context length before the scaling."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor: expected a number > low_freq_factor ({self.low_freq_factor:g}), "
                f"got {self.high_freq_factor:g}"
            )
        return self


class ModelShape(Section):
    """Every size of a model, resolved: what the network is built from and what a checkpoint records."""

    later: ClassVar[Mapping[str, Any]] = {"moe": None}

    num_layers: Layers
    dim: Size
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    ffn_dim: Size
    vocab_size: Size
    """Ids of the encoding; ids from here to :attr:`padded_vocab_size` exist for the matrix units only."""
    vocab_multiple: Size
    rope_theta: Annotated[float, Field(gt=0)]
    rope_scaling: RopeScaling | None
    norm_eps: Annotated[float, Field(gt=0)]
    qk_norm: QKNorm
    tied_embeddings: bool
    moe: MoEShape | None = None

    @property
    def padded_vocab_size(self) -> int:
        """``vocab_size`` rounded up to ``vocab_multiple``."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def qk_norm_widths(self) -> tuple[int, int]:
        """Of the norms of queries and keys: of a head, or of all side by side, as in OLMoE; 0 = there are none."""
        if not self.qk_norm:
            return 0, 0
        whole = self.qk_norm == "whole"
        return tuple(self.head_dim * (heads if whole else 1) for heads in (self.num_heads, self.num_kv_heads))  # type: ignore[return-value]

    def is_sparse(self, layer: int) -> bool:
        """Whether that layer, counted from 0, has experts."""
        return self.moe is not None and self.moe.is_sparse(layer)

    @property
    def num_parameters(self) -> int:
        """Parameters of the unpadded model; tied embeddings count once."""
        return self.num_block_parameters + self.dim + self.vocab_size * self.dim * (1 if self.tied_embeddings else 2)

    @property
    def num_active_parameters(self) -> int:
        """The same without the experts that a token is not given to."""
        idle = sum(self.layer_parameters(n) - self.layer_parameters(n, active=True) for n in range(self.num_layers))
        return self.num_parameters - idle

    @property
    def num_block_parameters(self) -> int:
        """Parameters of all blocks, without embedding, head and final norm."""
        return sum(map(self.layer_parameters, range(self.num_layers)))

    def layer_parameters(self, layer: int, *, active: bool = False) -> int:
        """Parameters of a block; ``active``: without the experts that a token is not given to."""
        attention = self.dim * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        ffn = 3 * self.dim * self.ffn_dim
        if self.moe is not None and self.moe.is_sparse(layer):
            ffn = self.moe.num_parameters(self.dim, active=active)
        return attention + ffn + 2 * self.dim + sum(self.qk_norm_widths)

    def flops_per_token(self, seq_len: int, *, causal: bool, head: bool = True) -> float:
        """Training FLOPs a token, forward and backward, recomputation never counted.

        ``6 N + 12 · layers · heads · head_dim · seq_len`` with N the active parameters of the blocks and those of the
        output projection, as in PaLM (Chowdhery et al. 2022, appendix B); ``causal`` counts the half of the attention
        matrix that is used. ``head=False`` leaves out the output projection.
        """
        blocks = sum(self.layer_parameters(layer, active=True) for layer in range(self.num_layers))
        matmul = blocks + (self.vocab_size * self.dim if head else 0)
        attention = 12 * self.num_layers * self.num_heads * self.head_dim * seq_len
        return 6 * matmul + (attention / 2 if causal else attention)


PRESETS: dict[str, dict[str, Any]] = {
    # a few million parameters: a laptop trains it in minutes
    "debug": {"num_layers": 4, "dim": 256, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 768, "tied_embeddings": True},
    # GPT-2 small's widths with this architecture
    "125M": {"num_layers": 12, "dim": 768, "num_heads": 12, "num_kv_heads": 12, "ffn_dim": 2048,
             "tied_embeddings": True},
    # Llama 3.2 1B
    "1B": {"num_layers": 16, "dim": 2048, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 8192,
           "rope_theta": 500_000.0, "tied_embeddings": True},
    # Grattafiori et al. 2024 (The Llama 3 Herd of Models), table 3
    "llama3-8b": {"num_layers": 32, "dim": 4096, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 14_336,
                  "rope_theta": 500_000.0},
    "llama3-70b": {"num_layers": 80, "dim": 8192, "num_heads": 64, "num_kv_heads": 8, "ffn_dim": 28_672,
                   "rope_theta": 500_000.0},
    "llama3-405b": {"num_layers": 126, "dim": 16_384, "num_heads": 128, "num_kv_heads": 8, "ffn_dim": 53_248,
                    "rope_theta": 500_000.0},
    # Jiang et al. 2024 (Mixtral of Experts), table 1
    "mixtral-8x7b": {"num_layers": 32, "dim": 4096, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 14_336,
                     "rope_theta": 1e6, "moe": {"num_experts": 8, "top_k": 2, "normalize": True}},
    # Yang et al. 2025 (Qwen3 Technical Report), table 2
    "qwen3-30b-a3b": {"num_layers": 48, "dim": 2048, "num_heads": 32, "num_kv_heads": 4, "head_dim": 128,
                      "ffn_dim": 6144, "rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True,
                      "moe": {"num_experts": 128, "top_k": 8, "ffn_dim": 768, "normalize": True}},
    # Muennighoff et al. 2024 (OLMoE), table 1
    "olmoe-1b-7b": {"num_layers": 16, "dim": 2048, "num_heads": 16, "num_kv_heads": 16, "ffn_dim": 1024,
                    "qk_norm": "whole", "moe": {"num_experts": 64, "top_k": 8}},
}  # fmt: skip

Preset = Literal[
    "debug", "125M", "1B", "llama3-8b", "llama3-70b", "llama3-405b", "mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b"
]


class ModelConfig(Section):
    """A preset, its sizes overridden one by one, or all sizes without a preset. Null means the preset's value."""

    later: ClassVar[Mapping[str, Any]] = {"moe": None}

    preset: Preset | None = None
    """A named set of sizes. Example: llama3-8b"""
    num_layers: Layers | None = None
    """[layers] Transformer blocks. Example: 32"""
    dim: Size | None = None
    """[values] Width of the hidden states. Example: 4096"""
    num_heads: Size | None = None
    """[heads] Query heads. Example: 32"""
    num_kv_heads: Size | None = None
    """[heads] Key/value heads (grouped-query attention); null without a preset = ``num_heads``. Example: 8"""
    head_dim: Size | None = None
    """[values] Width of a head; null = ``dim / num_heads``. Example: 128"""
    ffn_dim: Size | None = None
    """[values] Width of the SwiGLU; null without a preset = 8/3 · dim rounded up to a multiple of 64. Example: 14336"""
    vocab_multiple: Size = 128
    """[ids] The embedding's rows are padded to a multiple of this, the same in every layout; never in a checkpoint."""
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    """Base of the rotary frequencies; null without a preset = 10,000. Example: 500000"""
    rope_scaling: RopeScaling | None = None
    """Llama-3 frequency scaling (Llama 3.1; ``rope_type: llama3`` in transformers); null = none. Example: {factor:
    8}"""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the mean square in RMSNorm; not given, it is the preset's."""
    qk_norm: QKNorm = False
    """RMSNorm over each head's queries and keys (as in Qwen 3), or over those of all heads together (``whole``, as in
    OLMoE); not given, it is the preset's."""
    tied_embeddings: bool | None = None
    """Whether the output projection is the embedding; null = as the preset, else false. Example: true"""

    moe: MoEConfig | None = None
    """Experts in place of the SwiGLU; null = the preset's, else none. Example: {num_experts: 8, top_k: 2}"""

    @model_validator(mode="before")
    @classmethod
    def _of_preset(cls, given: Any) -> Any:
        """These two were never null, so that null cannot mean the preset's value."""
        name = given.get("preset") if isinstance(given, dict) else None
        preset = PRESETS.get(name, {}) if isinstance(name, str) else {}
        own = {key: preset[key] for key in ("norm_eps", "qk_norm") if key in preset}
        return own | given if own else given

    @model_validator(mode="after")
    def _whole(self) -> Self:
        self.shape(vocab_size=1)
        return self

    def shape(self, vocab_size: int) -> ModelShape:
        """The resolved sizes for an encoding of ``vocab_size`` ids."""
        sizes: dict[str, Any] = {"rope_theta": 10_000.0, "tied_embeddings": False}
        sizes |= PRESETS[self.preset] if self.preset else {}
        names = ("num_layers", "dim", "num_heads", "num_kv_heads", "head_dim", "ffn_dim", "rope_theta")
        sizes |= {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.tied_embeddings is not None:
            sizes["tied_embeddings"] = self.tied_embeddings
        missing = [name for name in ("num_layers", "dim", "num_heads") if name not in sizes]
        if missing:
            raise ValueError(f"{missing[0]}: missing; expected it, or preset: one of {', '.join(PRESETS)}")
        dim, heads = sizes["dim"], sizes["num_heads"]
        kv_heads = sizes.setdefault("num_kv_heads", heads)
        sizes.setdefault("ffn_dim", -(-(8 * dim) // (3 * 64)) * 64)
        if "head_dim" not in sizes:
            if dim % heads:
                raise ValueError(f"num_heads: expected a divisor of dim ({dim}), or head_dim, got {heads}")
            sizes["head_dim"] = dim // heads
        if heads % kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads ({heads}), got {kv_heads}")
        if sizes["head_dim"] % 2:
            raise ValueError(f"head_dim: expected an even number (rotary pairs), got {sizes['head_dim']}")
        sizes |= {name: getattr(self, name) for name in ("vocab_multiple", "rope_scaling", "norm_eps", "qk_norm")}
        own, preset = self.moe or MoEConfig(), sizes.pop("moe", {})
        moe = own.shape({"ffn_dim": sizes["ffn_dim"]} | preset) if preset or self.moe is not None else None
        if moe is not None and not any(map(moe.is_sparse, range(sizes["num_layers"]))):
            raise ValueError(
                f"moe.first_dense: {moe.first_dense} with every {moe.every} leave no layer of num_layers "
                f"({sizes['num_layers']}) with experts; expected less, or moe: null"
            )
        return ModelShape(**sizes, vocab_size=vocab_size, moe=moe)
