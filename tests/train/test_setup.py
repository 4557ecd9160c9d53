"""What a config asks for is done or refused, and a step's time is that of the step."""

from __future__ import annotations

import json
import os
import time
import types

import pytest
import torch

from quern.errors import InputError
from quern.train.processes.ranks import Ranks, open_ranks
from quern.train.setup import _model, check, open_trainer
from quern.train.step import metrics
from quern.train.step.precision import precision_of
from support.train import run_case as case

CUDA = Ranks(0, 1, torch.device("cuda"))


@pytest.fixture
def paths(tmp_path):
    return case.write_corpus(tmp_path / "data", {"web": 60, "code": 25, "web.val": 9})[:2]


@pytest.fixture
def not_deterministic():
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("given", [None, ":16:8"])
def test_deterministic_gives_cublas_the_workspace_that_torch_asks_for(
    tmp_path, paths, monkeypatch, not_deterministic, given
):
    """Without it the first matrix product on CUDA is an error. A value that was given stands."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given or "")
    if given is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    config = case.settings(tmp_path / "run", paths, deterministic=True, steps=1, schedule={"warmup": 1})
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (given or ":4096:8")
        trainer.fit()


def test_nothing_is_set_unless_asked_for(tmp_path, paths, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with open_ranks("cpu") as ranks, open_trainer(case.settings(tmp_path / "run", paths), ranks):
        assert not torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_fp16_needs_skipping(tmp_path, paths):
    """Its scale is found by overflowing: with ``continue`` the first overflow would be in the weights for ever."""
    with pytest.raises(ValueError, match=r"guard\.non_finite: expected skip with precision fp16"):
        case.settings(tmp_path / "run", paths, precision="fp16", guard={"non_finite": "continue"})
    case.settings(tmp_path / "run", paths, precision="bf16", guard={"non_finite": "continue"})


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_varlen_needs_half_precision(tmp_path, paths, precision):
    config = case.settings(tmp_path / "run", paths, precision=precision, attention="varlen")
    shape = config.model.shape(case.CORPORA.VOCAB_SIZE)
    with pytest.raises(InputError, match=f"attention: varlen computes in bf16 or fp16; .* in {precision}"):
        _model(config, shape, precision_of(precision), CUDA)


@pytest.mark.parametrize(
    ("precision", "document_mask", "backend"),
    [("bf16", True, "varlen"), ("fp16", True, "varlen"), ("fp32", True, "sdpa"), ("bf16", False, "sdpa")],
)
def test_auto_is_what_runs(tmp_path, paths, precision, document_mask, backend):
    config = case.settings(tmp_path / "run", paths, precision=precision, document_mask=document_mask)
    shape = config.model.shape(case.CORPORA.VOCAB_SIZE)
    assert _model(config, shape, precision_of(precision), CUDA).attention == backend


@pytest.mark.parametrize(
    ("seq_len", "document_mask", "precision", "refused"),
    [(64, True, "bf16", True), (192, True, "fp16", True), (128, True, "bf16", False), (64, False, "bf16", False),
     (64, True, "fp32", False), (96, True, "bf16", False)],
)  # fmt: skip
def test_sdpa_with_documents_is_refused_where_its_gradients_are_wrong(
    tmp_path, paths, seq_len, document_mask, precision, refused
):
    config = case.settings(
        tmp_path / "run", paths, seq_len=seq_len, document_mask=document_mask, precision=precision, attention="sdpa"
    )
    shape = config.model.shape(case.CORPORA.VOCAB_SIZE)
    if refused:
        with pytest.raises(InputError, match=f"attention: sdpa with document_mask .*, as of {seq_len}; expected auto,"):
            _model(config, shape, precision_of(precision), CUDA)
    else:
        assert _model(config, shape, precision_of(precision), CUDA).attention == "sdpa"
    assert _model(config, shape, precision_of(precision), Ranks(0, 1, torch.device("cpu"))).attention == "sdpa"


def test_products_in_bf16_are_summed_in_fp32(tmp_path, paths):
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    with open_ranks("cpu") as ranks, open_trainer(case.settings(tmp_path / "run", paths), ranks):
        assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is False


def test_a_compiler_that_torch_does_not_have(tmp_path, paths):
    config = case.settings(tmp_path / "run", paths, compile={"enabled": True, "backend": "inducter"})
    with pytest.raises(InputError, match=r"compile\.backend: .* got 'inducter'"):
        check(config, 1)
    check(case.settings(tmp_path / "run", paths, compile={"enabled": True, "backend": "aot_eager"}), 1)
    check(case.settings(tmp_path / "run", paths, compile={"enabled": False, "backend": "inducter"}), 1)


def test_casts_per_use_are_refused_where_they_change_nothing(tmp_path, paths):
    def settings(**changes):
        return case.settings(tmp_path / "run", paths, **{"weights_cast": "per_use", "precision": "bf16", **changes})

    check(settings(), 1)
    check(settings(parallel={"dp_replicate": 2}), 2)
    for changes, world, why in (
        ({"parallel": {"dp_shard": 2}}, 2, "FSDP2"), ({"parallel": {"tp": 2}}, 2, "tp"),
        ({"parallel": {"dp_replicate": 2, "pp": 2}}, 4, "FSDP2"), ({"precision": "fp32"}, 1, "precision fp32"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"^weights_cast: per_use changes nothing .*{why}"):
            check(settings(**changes), world)
    check(settings(parallel={"dp_shard": 2}, weights_cast="auto"), 2)


@pytest.mark.slow
def test_saving_and_measuring_are_no_steps_time(tmp_path, paths, monkeypatch):
    """By a clock that only stands still: a step takes 1 s, a save and a held-out loss 1000 s."""
    clock = types.SimpleNamespace(now=0.0, perf_counter=lambda: clock.now, monotonic=time.monotonic)
    monkeypatch.setattr(metrics, "time", clock)

    def lasts(seconds, action=lambda *args: None):
        def timed(*args):
            clock.now += seconds
            return action(*args)

        return timed

    config = case.settings(tmp_path / "run", paths, checkpoint={"interval": 2}, validation={"interval": 3}, steps=8)
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        assert trainer.validator is not None
        trainer.on_gradients = lasts(1)
        monkeypatch.setattr(trainer.validator, "run", lasts(1000, trainer.validator.run))
        save = trainer.checkpoints.async_save
        monkeypatch.setattr(save, "begin", lasts(1000, save.begin))
        trainer.fit()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert clock.now == 8 + 1000 * (4 + 3)  # saves after 2, 4, 6 and 8, held-out losses after 3, 6 and 8
    assert [line["step_time_s"] for line in steps] == [1.0] * 8
    assert [line["tokens_per_s"] for line in steps] == [8 * 32.0] * 8
