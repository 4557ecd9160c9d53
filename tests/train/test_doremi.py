"""DoReMi: weights and updates of the plain algorithm, the same bits after a resume, and what it finds where the answer
is known."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quern.errors import InputError
from quern.train.config import TrainConfig
from quern.train.processes.ranks import open_ranks
from quern.train.setup import check, open_trainer
from quern.train.summary import summarise
from support.oracles import plain_doremi, plain_loop
from support.train import run_case
from support.train.corpora import VOCAB_SIZE, Doc, write_run

SEQ_LEN = 32
KINDS = ("noise", "easy", "useful")
LEARNED = ("doremi_weight", "doremi_mean_weight", "excess_loss_by_source")
Kind = Callable[[random.Random, int], list[int]]


def noise(rng: random.Random, length: int) -> list[int]:
    """Nothing can be learned of it."""
    return [rng.randrange(64) for _ in range(length)]


def easy(rng: random.Random, length: int) -> list[int]:
    """All of it is learned at once."""
    return [77] * length


def useful(rng: random.Random, length: int) -> list[int]:
    """The next token follows from the one before, by a table that takes a while to learn."""
    tokens = [rng.randrange(64)]
    while len(tokens) < length:
        tokens.append((37 * tokens[-1] + 11) % 64 + 64)
        tokens.append((29 * (tokens[-1] - 64) + 5) % 64)
    return tokens[:length]


def corpus(folder: Path, seed: int, documents: int = 40) -> list[str]:
    rng = random.Random(seed)
    makers: dict[str, Kind] = {"noise": noise, "easy": easy, "useful": useful}
    shards = {}
    for name in KINDS:
        docs = [Doc((*makers[name](rng, rng.randint(20, 60)), VOCAB_SIZE - 1), purged=False) for _ in range(documents)]
        shards[name] = [docs]
    return write_run(folder, shards)


def settings(folder: Path, paths: list[str], name: str, **changes: Any) -> TrainConfig:
    data = [{"path": path, "weight": weight, "max_epochs": 1e6} for path, weight in zip(paths, (2, 1, 1), strict=True)]
    return run_case.settings(folder / name, [], **{"data": data, "steps": 12, "precision": "fp64", **changes})


def rows(run: Path) -> list[dict[str, Any]]:
    told = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in told if row["kind"] == "step"]


def values(run: Path, key: str) -> np.ndarray:
    """[steps, sources]"""
    return np.array([list(row[key].values()) for row in rows(run)])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A reference of 20 steps and what it was trained on."""
    folder = tmp_path_factory.mktemp("doremi")
    paths = corpus(folder / "data", 3)
    run_case.live(settings(folder, paths, "reference", steps=20, seed=9))
    return folder, paths


def test_weights_and_updates_are_those_of_the_plain_algorithm(site: tuple[Path, list[str]]) -> None:
    folder, paths = site
    doremi = {"reference": str(folder / "reference"), "step_size": 0.7, "smoothing": 0.05}
    config = settings(folder, paths, "proxy", doremi=doremi, global_batch=3, micro_batch=1)
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        first = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
        assert trainer.doremi is not None
        reference = dict(trainer.doremi._models[1].model.named_parameters())
        shape, batches = trainer.model.shape, []
        take = trainer.feed.take

        def taken(data_step: int) -> Any:
            batch = take(data_step)
            parts = [
                (own.tokens_BL, own.targets_BL, own.positions_BL, own.documents.ids_BL) for own in batch.micro_batches
            ]
            whole = [torch.cat(part).tolist() for part in zip(*parts, strict=True)]
            batches.append((plain_loop.Batch(*whole), batch.sources_S.tolist()))
            return batch

        trainer.feed.take = taken  # type: ignore[method-assign]
        trainer.fit()
        after = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trained = run_case.live(settings(folder, paths, "reference", steps=20, seed=9)).state
    for name, weight in reference.items():
        assert torch.equal(weight, trained[f"model.{name}"])
    assert any(len(set(sources)) < 3 for _, sources in batches)  # a step without a source, whose excess stays
    plain = plain_loop.Settings(steps=12, lr=0.01, clip=1.0, warmup=3)
    found = [*plain_doremi.train(first, reference, shape, batches, plain, 3, 0.7, 0.05)]
    run = folder / "proxy"
    np.testing.assert_allclose(values(run, "doremi_weight"), [own.weights for own in found], rtol=1e-9)
    np.testing.assert_allclose(values(run, "doremi_mean_weight"), [own.means for own in found], rtol=1e-9)
    np.testing.assert_allclose(values(run, "excess_loss_by_source"), [own.excess for own in found], rtol=1e-8)
    np.testing.assert_allclose([row["objective"] for row in rows(run)], [own.objective for own in found], rtol=1e-9)
    np.testing.assert_allclose([row["loss"] for row in rows(run)], [own.loss for own in found], rtol=1e-9)
    np.testing.assert_allclose([row["grad_norm"] for row in rows(run)], [own.grad_norm for own in found], rtol=1e-8)
    for name, weight in after.items():
        torch.testing.assert_close(weight, found[-1].model[name], rtol=1e-7, atol=1e-10)
    assert np.ptp(values(run, "doremi_weight")) > 0.1


def test_killed_in_any_step_and_resumed_to_the_same_bits(site: tuple[Path, list[str]]) -> None:
    """Also where a step's gradients are not finite, and after the reference has trained on."""
    folder, paths = site
    doremi, every = {"reference": str(folder / "trains-on")}, {"checkpoint": {"interval": 2}, "precision": "fp32"}

    def spoilt(data_step: int) -> float:
        return float("nan") if data_step == 4 else 1.0

    begun = settings(folder, paths, "trains-on", steps=6, seed=9, precision="fp32", schedule={"kind": "constant"})
    run_case.live(begun)
    straight = run_case.live(settings(folder, paths, "whole", doremi=doremi, **every), factor=spoilt)
    config = settings(folder, paths, "broken", doremi=doremi, **every)
    assert not run_case.live(config, kill_at=3, factor=spoilt).complete
    run_case.live(begun.model_copy(update={"steps": 8}))
    assert not run_case.live(config, kill_at=7, factor=spoilt).complete
    last = run_case.live(config, factor=spoilt)
    assert run_case.differences(last.state, straight.state) == []
    assert run_case.rows(folder / "broken") == run_case.rows(folder / "whole")
    learned = [
        {row["step"]: [row[key] for key in LEARNED] for row in rows(folder / name)} for name in ("broken", "whole")
    ]  # of a step that was taken twice, as the last life took it
    assert learned[0] == learned[1]
    assert len({tuple(row) for row in values(folder / "whole", "doremi_weight")}) == 12


def test_a_step_that_is_left_out_teaches_nothing(site: tuple[Path, list[str]]) -> None:
    """Nor do losses that are not finite, after which weights go on from what they were."""
    folder, paths = site
    config = settings(folder, paths, "left-out", doremi={"reference": str(folder / "reference")})
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        doremi = trainer.doremi
        assert doremi is not None
        trainer.start_loop()
        batches = [trainer.feed.take(step) for step in range(3)]
        first = doremi.state_dict()
        left_out = doremi.weighed(batches[0], learn=False)
        assert all(torch.equal(value, first[name]) for name, value in doremi.state_dict().items())
        assert all(own.weights_B is not None for own in left_out.micro_batches)
        doremi.weighed(batches[1])
        before = doremi.state_dict()
        assert not torch.equal(before["weights"], first["weights"])
        with torch.no_grad():
            next(iter(trainer.model.parameters())).fill_(torch.nan)
        doremi.weighed(batches[2])
        after = doremi.state_dict()
        assert torch.equal(after["excess"], before["excess"])
        raised = before["weights"] * before["excess"].exp()
        expected = 0.999 * raised / raised.sum() + 0.001 / 3
        torch.testing.assert_close(after["weights"], expected, rtol=1e-12, atol=0)
        with pytest.raises(InputError, match="doremi: the checkpoint has weights of 4 sources, and the run reads 3"):
            doremi.load_state_dict({name: torch.ones(4) for name in after})


def test_a_trainer_learns_nothing_of_data_steps_that_are_left_out(site: tuple[Path, list[str]]) -> None:
    folder, paths = site
    config = settings(folder, paths, "skips", steps=4, doremi={"reference": str(folder / "reference")})
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        trainer.start = dataclasses.replace(trainer.start, left_out=frozenset({1, 2}))
        trainer.fit()
    found = values(folder / "skips", "doremi_weight")
    assert [bool((row == found[0]).all()) for row in found] == [True, True, True, False]


def test_a_run_learns_from_its_first_step_on_and_from_one_reference(site: tuple[Path, list[str]]) -> None:
    folder, paths = site
    run_case.live(settings(folder, paths, "later", steps=3))
    learned = settings(folder, paths, "later", steps=5, doremi={"reference": str(folder / "reference")})
    with pytest.raises(InputError, match="doremi: the checkpoint was trained without a reference"):
        run_case.live(learned)
    shutil.copytree(folder / "reference", folder / "moved")
    config = settings(folder, paths, "alone", steps=3, doremi={"reference": str(folder / "moved")})
    run_case.live(config)
    os.rename(folder / "moved" / "checkpoints" / "step_00000020", folder / "moved" / "checkpoints" / "step_00000030")
    with pytest.raises(InputError, match=r"doremi.reference: .*step_00000020, with which this run began, is gone"):
        run_case.live(config.model_copy(update={"steps": 5}))


def test_its_memory_is_told_before_it_starts(site: tuple[Path, list[str]]) -> None:
    """Masters of the reference beside masters, two moments and gradients, of 8 bytes each in float64."""
    folder, paths = site
    rank = []
    for reference in (None, str(folder / "reference")):
        config = settings(folder, paths, "planned", doremi={"reference": reference})
        checked = check(config, 1)
        rank.append(summarise(config, checked.corpus, checked.layout)["state_memory_gib"]["rank"])
    assert rank[1] / rank[0] == pytest.approx(5 / 4)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 5))])
def test_what_cannot_be_learned_and_what_is_learned_at_once_lose_weight(tmp_path: Path, seed: int) -> None:
    paths = corpus(tmp_path / "data", seed, 100)
    common: dict[str, Any] = {
        "steps": 100, "precision": "fp32", "seed": seed, "schedule": {"kind": "constant"}, "global_batch": 12,
        "micro_batch": 12,
    }  # fmt: skip
    run_case.live(settings(tmp_path, paths, "reference", **common))
    doremi = {"reference": str(tmp_path / "reference"), "step_size": 0.1}
    run_case.live(settings(tmp_path, paths, "proxy", doremi=doremi, **common))
    noisy, easily, usefully = rows(tmp_path / "proxy")[-1]["doremi_mean_weight"].values()
    assert max(noisy, easily) < 0.325  # of 1/3 at the start
    assert usefully > 0.5


def test_refused_before_the_first_step(site: tuple[Path, list[str]]) -> None:
    folder, paths = site
    reference = str(folder / "reference")
    for changes, told in (
        ({"doremi": {"reference": str(folder / "none")}}, "doremi.reference: .*none"),
        ({"doremi": {"reference": reference}, "model": {"dim": 64}}, "doremi.reference: .*model.dim is 64 in the conf"),
        ({"doremi": {"reference": reference}, "precision": "fp32"}, "doremi.reference: .*precision is fp32 in the con"),
    ):
        with pytest.raises(InputError, match=told):
            check(settings(folder, paths, "refused", **changes), 1)
    for data in ([{"path": paths[0]}], [{"path": paths[0]}, {"path": paths[1], "weight": 0}]):
        with pytest.raises(ValueError, match="doremi: expected two sources or more, and of each a weight above 0"):
            run_case.settings(folder / "refused", [], data=data, doremi={"reference": reference})
    assert not (folder / "refused").exists()
