"""The network against transformers' Llama and Qwen 3 with the same weights, and its own contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from quern.model.attention import Documents
from quern.model.config import ModelConfig, ModelShape
from quern.model.init import initialise
from quern.model.loss import IGNORE
from quern.model.rope import rotation
from quern.model.transformer import Transformer

SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 32}
CASES: dict[str, dict[str, Any]] = {
    "multi-head": {"num_heads": 4},
    "grouped": {"num_heads": 4, "num_kv_heads": 2},
    "one kv head, tied": {"num_heads": 4, "num_kv_heads": 1, "tied_embeddings": True},
    "wide heads": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 24},
    "scaled": {"num_heads": 2, "num_kv_heads": 1, "rope_theta": 500_000.0, "rope_scaling": SCALING},
    "qk norm": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 12, "qk_norm": True, "norm_eps": 1e-6},
}


def shape_of(case: str) -> ModelShape:
    return ModelConfig(**{"num_layers": 2, "dim": 32, "ffn_dim": 44} | CASES[case]).shape(vocab_size=101)


def random_model(shape: ModelShape, dtype: torch.dtype = torch.float64, **options: Any) -> Transformer:
    """Norm weights away from 1 and matrices large enough for attention to be far from uniform."""
    model = Transformer(shape, **options).to(dtype)
    initialise(model, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
            else:
                parameter *= 10
    return model


def tokens_of(shape: ModelShape, batch: int = 2, length: int = 48) -> torch.Tensor:
    return torch.randint(shape.vocab_size, (batch, length), generator=torch.Generator().manual_seed(2))


def theirs(model: Transformer) -> PreTrainedModel:
    """transformers' model with the weights of ``model``."""
    shape = model.shape
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling is not None:
        rope |= {"rope_type": "llama3", "original_max_position_embeddings": shape.rope_scaling.original_max_position}
        rope |= {name: SCALING[name] for name in ("factor", "low_freq_factor", "high_freq_factor")}
    make_config, make_model = (Qwen3Config, Qwen3ForCausalLM) if shape.qk_norm else (LlamaConfig, LlamaForCausalLM)
    other = make_model(
        make_config(
            vocab_size=shape.vocab_size, hidden_size=shape.dim, intermediate_size=shape.ffn_dim,
            num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim, rms_norm_eps=shape.norm_eps,
            max_position_embeddings=256, rope_parameters=rope, tie_word_embeddings=shape.tied_embeddings,
        )
    ).double()  # fmt: skip
    names = {
        "embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm", "attention": "self_attn", "ffn": "mlp", "w1": "gate_proj",
        "w2": "down_proj", "w3": "up_proj", "blocks": "model.layers",
    } | {f"w{x}": f"{x}_proj" for x in "qkvo"}  # fmt: skip
    state = {}
    for name, parameter in model.named_parameters():
        rows = shape.vocab_size if name in ("embed.weight", "head.weight") else None
        state[".".join(names.get(part, part) for part in name.split("."))] = parameter.detach()[:rows]
    missing, unexpected = other.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if shape.tied_embeddings else set())
    return other


@pytest.fixture
def float64_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers casts to float32 in norms and rotation by name; here that name is float64."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(case, float64_everywhere):
    shape = shape_of(case)
    model = random_model(shape)
    other = theirs(model)
    tokens = tokens_of(shape)
    expected = other(tokens).logits
    assert expected.dtype == torch.float64
    assert expected.std() > 0.1
    torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-10)

    targets = tokens.roll(-1, dims=1)
    targets[0, :5] = IGNORE
    loss_sum, nll = model(tokens, targets)
    loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
    torch.testing.assert_close(nll.flatten(), loss.detach(), rtol=0, atol=1e-10)
    loss_sum.backward()
    loss.sum().backward()
    pairs = [
        (model.embed.weight.grad[: shape.vocab_size], other.model.embed_tokens.weight.grad),
        (model.blocks["0"].attention.wk.weight.grad, other.model.layers[0].self_attn.k_proj.weight.grad),
        (model.blocks["1"].ffn.w1.weight.grad, other.model.layers[1].mlp.gate_proj.weight.grad),
        (model.blocks["0"].attention_norm.weight.grad, other.model.layers[0].input_layernorm.weight.grad),
    ]
    for ours, exact in pairs:
        torch.testing.assert_close(ours, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", ["grouped", "one kv head, tied"])
def test_padded_rows_get_a_gradient_of_exactly_zero(case):
    model = random_model(shape_of(case))
    tokens = tokens_of(model.shape)
    model(tokens, tokens)[0].backward()
    weights = [model.embed.weight] + ([] if model.head is None else [model.head.weight])
    for weight in weights:
        assert weight.shape[0] == 128
        assert torch.count_nonzero(weight.grad[101:]) == 0
        assert torch.count_nonzero(weight.grad[:101]) > 0
    assert model(tokens).shape == (2, 48, 101)


def test_parameter_names_are_the_contract():
    names = {name for name, _ in Transformer(shape_of("qk norm")).named_parameters()}
    block = ["attention_norm", "ffn_norm", *(f"attention.{x}" for x in ("wq", "wk", "wv", "wo", "q_norm", "k_norm"))]
    block += ["ffn.w1", "ffn.w2", "ffn.w3"]
    expected = {"embed.weight", "norm.weight", "head.weight"}
    assert names == expected | {f"blocks.{i}.{part}.weight" for i in (0, 1) for part in block}
    tied = Transformer(shape_of("one kv head, tied"))
    assert "head.weight" not in dict(tied.named_parameters())
    assert not list(tied.buffers())


@pytest.mark.parametrize("case", CASES)
def test_number_of_parameters_is_the_shape_s(case):
    shape = shape_of(case)
    counted = sum(p.numel() for p in Transformer(shape).parameters())
    padding = (shape.padded_vocab_size - shape.vocab_size) * shape.dim * (1 if shape.tied_embeddings else 2)
    assert counted - padding == shape.num_parameters


@pytest.mark.parametrize("case", ["multi-head", "grouped", "wide heads", "qk norm"])
def test_flops_are_those_counted(case):
    # the formula counts norms as parameters too, so they are taken off; the counter sees the padded vocabulary
    shape = ModelConfig(**{"num_layers": 2, "dim": 32, "ffn_dim": 44} | CASES[case]).shape(vocab_size=128)
    model, (batch, length) = random_model(shape), (2, 16)
    tokens = tokens_of(shape, batch, length)
    norms = sum(p.numel() for name, p in model.blocks.named_parameters() if name.endswith("norm.weight"))
    # a mask makes SDPA count the whole matrix, and the maths kernel counts what it multiplies
    everything = Documents(torch.zeros(batch, length, dtype=torch.int32), torch.tensor([0, 16, 32]), length)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(tokens, tokens, documents=everything)[0].backward()
    a_token = counter.get_total_flops() / (batch * length)
    assert a_token == shape.flops_per_token(length, causal=False) - 6 * norms
    causal = shape.flops_per_token(length, causal=False) - shape.flops_per_token(length, causal=True)
    assert causal == 6 * shape.num_layers * shape.num_heads * shape.head_dim * length
    head = shape.flops_per_token(length, causal=True) - shape.flops_per_token(length, causal=True, head=False)
    assert head == 6 * shape.dim * shape.vocab_size


class Dtypes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in [*args, *(out if isinstance(out, tuple | list) else [out])]:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self.seen.add(value.dtype)
        return out


def test_a_float64_step_holds_no_other_float():
    model = random_model(shape_of("qk norm"))
    tokens = tokens_of(model.shape)
    with Dtypes() as watched:
        model(tokens, tokens, torch.arange(48).expand(2, -1))[0].backward()
        model(tokens)
    assert watched.seen == {torch.float64}


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16])
def test_compute_dtype_is_that_of_activations_and_results_are_float32(weights, compute):
    model = random_model(shape_of("qk norm"), weights, compute_dtype=compute)
    exact = random_model(shape_of("qk norm"))
    exact.load_state_dict(model.state_dict())
    seen = []
    model.blocks["1"].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    tokens = tokens_of(model.shape)
    loss_sum, nll = model(tokens, tokens)
    loss_sum.backward()
    assert seen == [compute]
    assert loss_sum.dtype == nll.dtype == model(tokens).dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters()} == {weights}
    reference = exact(tokens, tokens)[1]
    assert (nll - reference).abs().mean() < 8 * torch.finfo(compute).eps * reference.abs().mean() + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("with_documents", "case"),
    [
        (True, "qk norm"),
        pytest.param(False, "grouped", marks=pytest.mark.long),
    ],
)
def test_a_block_compiles_without_a_graph_break(case, with_documents):
    torch._dynamo.reset()
    model = random_model(shape_of(case), torch.float32)
    tokens = tokens_of(model.shape)
    ids = torch.arange(48).expand(2, -1) // 16
    documents = Documents(ids, torch.arange(0, 97, 16, dtype=torch.int32), 16) if with_documents else None
    eager = model(tokens, tokens, ids % 16, documents)[0]
    for block in model.blocks.values():
        block.compile(fullgraph=True, backend="aot_eager")
    compiled = model(tokens, tokens, ids % 16, documents)[0]
    torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=0)
    compiled.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert list(dict(model.named_parameters())) == list(dict(Transformer(model.shape).named_parameters()))


def test_built_on_meta_then_filled_it_is_the_same_model():
    shape = shape_of("scaled")
    plain = Transformer(shape)
    initialise(plain, 5)
    with torch.device("meta"):
        lazy = Transformer(shape)
    lazy.to_empty(device="cpu")
    initialise(lazy, 5)
    tokens = tokens_of(shape)
    assert torch.equal(plain(tokens), lazy(tokens))


def test_building_a_model_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    initialise(Transformer(shape_of("grouped")), 1)
    assert torch.equal(before, torch.get_rng_state())


def test_positions_shift_nothing_but_relative_distance():
    model = random_model(shape_of("grouped"))
    tokens = tokens_of(model.shape, 1, 20)
    shifted = torch.arange(20)[None] // 2
    assert not torch.allclose(model(tokens), model(tokens, positions_BL=shifted))
    torch.testing.assert_close(model(tokens), model(tokens, positions_BL=torch.arange(20)[None]), rtol=0, atol=0)


def test_no_token_sees_a_later_one():
    model = random_model(shape_of("grouped"))
    tokens = tokens_of(model.shape)
    changed = tokens.clone()
    changed[:, 30] = (changed[:, 30] + 1) % 101
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :30], after[:, :30], rtol=0, atol=1e-14)
    assert (before[:, 30:] - after[:, 30:]).abs().amax(dim=2).min() > 1e-9


def test_mixed_precision_of_fsdp_does_not_reach_the_rotation():
    # FSDP2 casts floating-point tensors it finds by torch.utils._pytree among a block's arguments
    from torch.utils import _pytree as pytree

    turn = rotation(shape_of("grouped"), 4, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert pytree.tree_leaves((torch.zeros(1), turn))[1] is turn
