"""Model config: sizes, switches, presets, and figures derived from them. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from quern.config import Section

__all__ = ["PRESETS", "ModelConfig", "ModelShape", "RopeScaling"]

#: Far above any model, and low enough that products of two stay integers of 64 bits.
Size = Annotated[int, Field(ge=1, le=2**28)]
#: Bounded: names are made for every layer of a foreign file before anything of it is believed.
Layers = Annotated[int, Field(ge=1, le=10_000)]


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
    qk_norm: bool
    tied_embeddings: bool

    @property
    def padded_vocab_size(self) -> int:
        """``vocab_size`` rounded up to ``vocab_multiple``."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def num_parameters(self) -> int:
        """Parameters of the unpadded model; tied embeddings count once."""
        return self.num_block_parameters + self.dim + self.vocab_size * self.dim * (1 if self.tied_embeddings else 2)

    @property
    def num_block_parameters(self) -> int:
        """Parameters of all blocks, without embedding, head and final norm."""
        attention = self.dim * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        norms = 2 * self.dim + (2 * self.head_dim if self.qk_norm else 0)
        return self.num_layers * (attention + 3 * self.dim * self.ffn_dim + norms)

    def flops_per_token(self, seq_len: int, *, causal: bool, head: bool = True) -> float:
        """Training FLOPs a token, forward and backward, recomputation never counted.

        ``6 N + 12 · layers · heads · head_dim · seq_len`` with N the parameters of the blocks and of the output
        projection, as in PaLM (Chowdhery et al. 2022, appendix B); ``causal`` counts the half of the attention matrix
        that is used. ``head=False`` leaves out the output projection.
        """
        matmul = self.num_block_parameters + (self.vocab_size * self.dim if head else 0)
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
}  # fmt: skip

Preset = Literal["debug", "125M", "1B", "llama3-8b", "llama3-70b", "llama3-405b"]


class ModelConfig(Section):
    """A preset, its sizes overridden one by one, or all sizes without a preset. Null means the preset's value."""

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
    """Added to the mean square in RMSNorm."""
    qk_norm: bool = False
    """RMSNorm over each head's queries and keys (as in Qwen 3)."""
    tied_embeddings: bool | None = None
    """Whether the output projection is the embedding; null = as the preset, else false. Example: true"""

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
        return ModelShape(
            **sizes, vocab_size=vocab_size, vocab_multiple=self.vocab_multiple, rope_scaling=self.rope_scaling,
            norm_eps=self.norm_eps, qk_norm=self.qk_norm,
        )  # fmt: skip
