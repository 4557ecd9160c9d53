"""Delayed scaling on layouts: every rank's history holds the largest values of the whole batch and the whole weight."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quern.train.parity.corpus import write_corpus
from quern.train.parity.matrix import Case
from quern.train.parity.run import case_config
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer

STEPS = 3
DELAYED = {
    "float8": {"recipe": "tensorwise", "gradients": "e5m2", "delayed": True},
    "model": {
        "num_layers": 4, "dim": 32, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "ffn_dim": 64,
        "vocab_multiple": 10,
    },
    "seq_len": 32,
}  # fmt: skip


def train(case: Case, data: str, run_dir: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The history after each step, and this rank's weights in the end, whole."""
    config = case_config(case, data, run_dir)
    config = config.model_validate(config.model_dump() | DELAYED)
    histories = []
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        trainer.start_loop()
        for step in range(STEPS):
            trainer.train_step(step)
            assert trainer.parallel.amaxes is not None
            histories.append(trainer.parallel.amaxes.history.clone())
        trainer.drain_metrics()
        weights = {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in trainer.model.named_parameters()
        }
    return histories, weights


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tensor], dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("delayed")
    write_corpus(str(folder / "data"))
    case = Case("alone", sizes="blocks", float8="tensorwise")
    histories, weights = train(case, str(folder / "data"), str(folder / "alone"))
    return folder, histories, weights


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("ddp2", "full"), marks=pytest.mark.long),
        Case("fsdp2", "selective"),
        pytest.param(Case("tp2", "selective"), marks=pytest.mark.long),
        pytest.param(Case("pp2", "selective", schedule="1f1b"), marks=pytest.mark.long),
        Case("pp2", schedule="zbv_zero_bubble"),
    ],
    ids=str,
)
def test_histories_and_weights_are_those_of_one_process(kept_ranks: Any, alone: Any, case: Case) -> None:
    folder, histories, weights = alone
    case = replace(case, sizes="blocks", float8="tensorwise")
    by_rank = kept_ranks(train, case.on.world, case, str(folder / "data"), str(folder / str(case)))
    assert float(histories[-1][..., -1].min()) > 0  # the newest
    for found, own in by_rank:
        for here, first, expected in zip(found, by_rank[0][0], histories, strict=True):
            assert torch.equal(here, first)
            if case.on.tp == 1:
                torch.testing.assert_close(here, expected, rtol=1e-12, atol=0)
        # split tensors have no history yet in the first step, and so scales of their own parts; weights are the same
        assert torch.equal(found[0][:, 1], histories[0][:, 1])
        torch.testing.assert_close(found[0], histories[0], rtol=0.5, atol=0)
        for name, value in own.items():
            if case.on.tp == 1 and value.shape == weights[name].shape:
                assert (value - weights[name]).abs().max() <= 1e-10 * weights[name].abs().max(), name
