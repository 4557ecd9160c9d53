"""Cuts of a model into stages, against every cut there is, and where stages lie."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from quern.errors import InputError
from quern.model.config import ModelConfig, ModelShape
from quern.model.transformer import Transformer
from quern.parallel.pipeline import my_stages
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan
from quern.parallel.planning.schedules import SCHEDULES
from quern.parallel.planning.stages import cut, num_stages, stage_costs, stage_layers, stage_parameters, stages_of


def shape_of(layers: int = 6, *, tied: bool = False, vocab: int = 100, qk_norm: bool = False) -> ModelShape:
    return ModelConfig(
        num_layers=layers, dim=16, num_heads=4, num_kv_heads=2, ffn_dim=40, tied_embeddings=tied, vocab_multiple=16,
        qk_norm=qk_norm,
    ).shape(vocab)  # fmt: skip


def every_cut(layers: int, stages: int) -> list[tuple[int, ...]]:
    found = []
    for ends in itertools.combinations(range(1, layers), stages - 1):
        edges = (0, *ends, layers)
        found.append(tuple(b - a for a, b in itertools.pairwise(edges)))
    return found


def sums(values: list[int], counts: tuple[int, ...]) -> list[int]:
    left = iter(values)
    return [sum(itertools.islice(left, count)) for count in counts]


@pytest.mark.slow
@given(st.data())
@settings(max_examples=300, deadline=None)
def test_cut_is_the_best_of_all_cuts(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 9))
    numbers = st.lists(st.integers(1, data.draw(st.sampled_from([2, 9, 1000]))), min_size=layers, max_size=layers)
    costs, sizes, stages = data.draw(numbers), data.draw(numbers), data.draw(st.integers(1, layers))

    def worth(counts: tuple[int, ...]) -> tuple[int, int, int, tuple[int, ...]]:
        loads = sums(costs, counts)
        return max(loads), max(sums(sizes, counts)), sum(load**2 for load in loads), counts

    assert cut(costs, sizes, stages) == min(every_cut(layers, stages), key=worth)


def test_a_heavy_layer_at_the_end_does_not_hide_a_cut() -> None:
    assert cut([1, 1, 1, 50], [1, 1, 1, 1], 2) == (3, 1)
    assert cut([50, 1, 1, 1], [1, 1, 1, 1], 3) == (1, 1, 2)


@pytest.mark.parametrize("tied", [False, True])
def test_costs_are_those_of_the_model(tied: bool) -> None:
    """Against torch's own counter, which knows no causality: the attention matrix counts twice there."""
    shape, seq_len = shape_of(tied=tied, qk_norm=True), 24
    stretches = stage_layers(shape, 3, seq_len)
    with torch.device("meta"):
        model = Transformer(shape)
    attention = 2 * shape.num_heads * shape.head_dim * seq_len
    for stretch, cost, parameters in zip(
        stretches, stage_costs(shape, stretches, seq_len), stage_parameters(shape, stretches), strict=True
    ):
        part = model.slice_layers(stretch)
        tokens_BL = torch.zeros(1, seq_len, dtype=torch.long, device="meta")
        hidden_BLD = torch.zeros(1, seq_len, shape.dim, device="meta") if stretch.start else None
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            out = part(tokens_BL, hidden_BLD=hidden_BLD)
        flops = counter.get_total_flops()
        if part.norm is not None:  # logits leave the padding out
            flops += 2 * (shape.padded_vocab_size - shape.vocab_size) * shape.dim * seq_len
            assert out.shape[-1] == shape.vocab_size
        assert flops == (cost + len(stretch) * attention) * seq_len
        assert parameters == sum(value.numel() for value in part.parameters())


def test_a_large_vocabulary_takes_layers_from_the_last_stage() -> None:
    """A layer is 7,424 FLOPs a token, and so is the head for every 232 ids."""
    layers = stage_layers(shape_of(12, vocab=464), 4, 64)
    assert stage_costs(shape_of(12, vocab=464), layers, 64) == [2 * 7424, 4 * 7424, 4 * 7424, 4 * 7424]
    assert [len(stretch) for stretch in layers] == [2, 4, 4, 2]  # the embedding spares the first, which is as large
    assert [len(stretch) for stretch in stage_layers(shape_of(12, vocab=16), 4, 64)] == [3, 3, 3, 3]


def test_layers_are_all_there_in_order() -> None:
    for stages in range(1, 7):
        layers = stage_layers(shape_of(), stages, 64)
        assert [layer for stretch in layers for layer in stretch] == list(range(6))
        assert len(layers) == stages


def test_given_layers_are_taken() -> None:
    assert stage_layers(shape_of(), 3, 64, (1, 4, 1)) == (range(1), range(1, 5), range(5, 6))


@pytest.mark.parametrize("given", [(3, 3), (1, 4, 2), (0, 5, 1), (2, 2, 1, 1)])
def test_given_layers_that_do_not_fit_are_refused(given: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"stage_layers: expected 3 numbers ≥ 1 .* 6 layers.*by cost"):
        stage_layers(shape_of(), 3, 64, given)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(InputError, match="at most as many stages as layers"):
        stage_layers(shape_of(), 7, 64)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_every_stage_is_on_one_rank(schedule: str, pp: int) -> None:
    placed = [stages_of(rank, schedule, pp, 3) for rank in range(pp)]
    assert sorted(itertools.chain(*placed)) == list(range(num_stages(schedule, pp, 3)))
    assert all(list(stages) == sorted(stages) for stages in placed)


def test_where_stages_lie() -> None:
    assert [stages_of(rank, "1f1b", 4) for rank in range(4)] == [(0,), (1,), (2,), (3,)]
    assert [stages_of(rank, "interleaved_1f1b", 2, 3) for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]
    assert [stages_of(rank, "interleaved_1f1b", 2) for rank in range(2)] == [(0, 2), (1, 3)]
    assert [stages_of(rank, "zbv_zero_bubble", 3) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_a_layout_of_another_mesh_is_refused():
    mesh = SimpleNamespace(pp=object(), plan=MeshPlan(pp=2), rank=lambda axis: 0)
    shape = ModelConfig(preset="debug").shape(1000)
    with pytest.raises(ValueError, match="the layout has 1 pipeline ranks and the mesh 2"):
        my_stages(shape, mesh, Layout(torch.float32))
    assert [stage.layers for stage in my_stages(shape, mesh, Layout(torch.float32, MeshPlan(pp=2)))] == [range(2)]
