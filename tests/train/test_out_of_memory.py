"""A run that runs out of memory goes on with less, to the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.config import dump_yaml
from quern.errors import InputError
from quern.train.__main__ import train
from quern.train.checkpoint.format.manifest import list_checkpoints
from quern.train.checkpoint.tools.reader import iter_weights
from quern.train.config import TrainConfig
from quern.train.supervision import out_of_memory
from quern.train.trainer import Trainer
from support.train import run_case as case


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return case.write_corpus(tmp_path_factory.mktemp("data"))


def settings(run: Path, paths: list[str], **changes: Any) -> TrainConfig:
    return case.settings(run, paths, precision="fp64", checkpoint={"interval": 2}, **changes)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return dict(iter_weights(list_checkpoints(str(run))[-1].path))


@pytest.mark.parametrize(
    ("policy", "fits", "times"),
    [
        pytest.param(
            "full_checkpointing", lambda config: config.activation_checkpointing == "full", 1, marks=pytest.mark.long
        ),
        pytest.param("halve_micro_batch", lambda config: config.micro_batch == 1, 2, marks=pytest.mark.long),
    ],
)
def test_it_goes_on_to_the_same_weights(
    tmp_path: Path, paths: list[str], monkeypatch: pytest.MonkeyPatch, policy: str, fits: Any, times: int
) -> None:
    plain = Trainer.forward_backward

    def fails(self: Trainer, batch: Any) -> torch.Tensor:
        if batch.data_step >= 3 and self.config.out_of_memory == policy and not fits(self.config):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return plain(self, batch)

    monkeypatch.setattr(Trainer, "forward_backward", fails)
    assert train(settings(tmp_path / "one", paths)) == 0
    config = settings(tmp_path / "two", paths, out_of_memory=policy)
    assert train(config) == 0
    assert out_of_memory.count(config.run_dir) == times
    assert case.told(tmp_path / "two", "resume") == [2] * times
    expected, found = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert expected.keys() == found.keys()
    worst = max(float((found[name] - value).abs().max()) for name, value in expected.items())
    assert worst <= (1e-10 if policy == "halve_micro_batch" else 0)
    assert fits(out_of_memory.settled(config))


@pytest.mark.parametrize("policy", ["fail", "full_checkpointing", "halve_micro_batch"])
def test_what_cannot_be_less_fails(tmp_path: Path, policy: str) -> None:
    config = case.settings(tmp_path, ["data"], out_of_memory=policy, micro_batch=3, activation_checkpointing="full")
    assert not out_of_memory.note(config, 0, 4, MemoryError())
    assert out_of_memory.settled(config) == config
    assert not list(tmp_path.iterdir())


def test_ranks_that_fail_together_ask_for_less_once(tmp_path: Path) -> None:
    config = case.settings(tmp_path, ["data"], out_of_memory="halve_micro_batch", micro_batch=8)
    for rank in (1, 3):
        assert out_of_memory.note(config, rank, 4, MemoryError("no\nmore"))
    with open(tmp_path / out_of_memory.FILE, "ab") as file:
        file.write(b'{"torn": ')
    assert out_of_memory.settled(config).micro_batch == 4
    assert "micro_batch: 4" in dump_yaml(out_of_memory.settled(config))
    first = json.loads((tmp_path / out_of_memory.FILE).read_text().splitlines()[0])
    assert (first["rank"], first["step"], first["error"]) == (1, 4, "MemoryError: no")


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / out_of_memory.FILE).write_text("{}\n")
    with pytest.raises(InputError, match=r"out_of_memory\.jsonl: line 1: expected settings"):
        out_of_memory.settled(case.settings(tmp_path, ["data"], out_of_memory="halve_micro_batch"))
