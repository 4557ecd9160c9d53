"""Plans the runs of a swarm: a mixture and a training config each; and turns shares into weights of the large run."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np

from quern import storage
from quern.config import dump_yaml
from quern.errors import InputError
from quern.mixtures.laws.draw import draw
from quern.mixtures.laws.fit import check_runs
from quern.mixtures.laws.forms import Floats
from quern.mixtures.recipe import MixtureSource
from quern.mixtures.weighting import even_weights, most_samples
from quern.train.batches.mixture import open_corpus, plan_mixture, source_names, sources_of
from quern.train.config import TrainConfig
from quern.train.init_from import load_train_config
from quern.train.swarm.config import SwarmConfig

__all__ = ["Member", "Swarm", "plan_swarm", "write_configs"]


@dataclass(frozen=True)
class Member:
    """A run of the swarm."""

    name: str
    """Its number in four digits or more."""
    config: TrainConfig
    shares: tuple[float, ...]
    """By source, of the samples that it reads."""


@dataclass(frozen=True)
class Swarm:
    """All runs, and the large run that a mixture is wanted for."""

    config: SwarmConfig
    base: TrainConfig
    sources: tuple[MixtureSource, ...]
    """With the windows of the large run."""
    samples: int
    """Of the large run."""
    members: tuple[Member, ...]

    @property
    def prior(self) -> Floats:
        """[sources] Shares of tokens."""
        tokens = np.array([source.tokens for source in self.sources], float)
        return np.asarray(tokens / tokens.sum())

    @property
    def caps(self) -> Floats:
        """[sources] The greatest share of each in the large run, by ``max_epochs``."""
        return np.minimum(np.array(most_samples(self.sources)) / self.samples, 1.0)

    def section(self, shares: Floats) -> dict[str, list[dict[str, object]]]:
        """The ``data`` of the large run, with whole samples as weights, and none above its ``max_epochs``."""
        weights = even_weights(shares.tolist(), most_samples(self.sources), self.samples)
        pairs = zip(self.base.data, weights, strict=True)
        return {"data": [{**own.model_dump(mode="json", exclude_none=True), "weight": weight} for own, weight in pairs]}


def plan_swarm(config: SwarmConfig) -> Swarm:
    """Draw the mixtures, and make a config for each.

    Raises:
        InputError: a config is wrong; sources do not give the budgets; the mixtures do not suffice for the law; or
            nothing is held out.
    """
    base, small = load_train_config(config.base), load_train_config(config.base, config.overrides)
    if small.data != base.data or small.run_dir != base.run_dir:
        raise InputError("overrides: expected none of data and run_dir, which the swarm sets")
    if small.checkpoint.store is not None or small.checkpoint.local is not None:
        raise InputError("overrides: expected checkpoint.store=null and checkpoint.local=null: runs would share them")
    if any(phase.weights is not None for phase in (*base.phases, *small.phases)):
        raise InputError(f"{config.base}: phases: expected none with weights of their own")
    pairs = zip(source_names(small), small.data, strict=True)
    measured = [name for name, own in pairs if os.path.isdir(own.path.rstrip("/") + ".val")]
    measured += [own.name for own in small.validation.sets]
    if not measured:
        raise InputError(f"{config.base}: no source has held-out documents, nor are there validation.sets")
    if wrong := [name for name in config.weights or () if name not in measured]:
        raise InputError(f"weights: {wrong[0]!r}: expected one of {', '.join(measured)}")
    large, samples = _budget(base)
    if (most := sum(most_samples(large))) < samples:
        raise InputError(f"{config.base}: max_epochs: {samples:,} samples are planned, and the sources give {most:,}")
    own, total = _budget(small)
    limits, sizes = most_samples(own), [source.tokens for source in own]
    members, width = [], max(4, len(str(config.runs - 1)))
    for number in range(config.runs):
        drawn = draw(sizes, limits, total, number, config.seed, config.draw.strength, config.draw.min_share)
        data = [one.model_copy(update={"weight": float(own)}) for one, own in zip(small.data, drawn, strict=True)]
        name = f"{number:0{width}}"
        changes = {
            "data": tuple(data), "seed": config.seed, "run_dir": storage.join(config.run_dir, "runs", name),
            "metrics": small.metrics.model_copy(update={"live": False}),
        }  # fmt: skip
        members.append(Member(name, small.model_copy(update=changes), tuple(own / total for own in drawn)))
    tried = np.array([member.shares for member in members])
    check_runs(config.form, tried, [source.name for source in own], "runs")
    return Swarm(config, base, tuple(large), samples, tuple(members))


def _budget(config: TrainConfig) -> tuple[list[MixtureSource], int]:
    """The sources, and how many samples a config reads."""
    corpus = open_corpus(config, keep=False)
    free = tuple(own.model_copy(update={"max_epochs": math.inf, "weight": 1.0}) for own in config.data)
    return sources_of(config, corpus), plan_mixture(config.model_copy(update={"data": free}), corpus).samples


def write_configs(swarm: Swarm) -> list[str]:
    """Write the config of every run; return their paths.

    Raises:
        InputError: one is there and says something else.
    """
    paths = []
    for member in swarm.members:
        path, text = storage.join(swarm.config.run_dir, "configs", f"{member.name}.yaml"), dump_yaml(member.config)
        if not os.path.exists(path):
            storage.publish_bytes(path, text.encode())
        elif storage.read_bytes(path) != text.encode():
            raise InputError(f"{path}: this run was begun with another config; expected the same, or another run_dir")
        paths.append(path)
    return paths
