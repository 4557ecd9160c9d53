"""Plans the runs of a swarm: a mixture and a training config each; and turns shares into weights of the large run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from quern import storage
from quern.config import digest, dump_yaml
from quern.errors import InputError
from quern.mixtures.laws.fit import Floats, check_runs
from quern.mixtures.laws.propose import family_weights
from quern.mixtures.recipe import MixtureSource
from quern.mixtures.weighting import draw, even_weights, most_samples
from quern.train.batches.assignment import check_divides
from quern.train.batches.held_out import open_held_out
from quern.train.batches.mixture import budget, data_section, open_corpus, sources_of, with_sources
from quern.train.config import TrainConfig
from quern.train.init_from import load_train_config
from quern.train.step.schedule import check_schedule
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
    weights: Mapping[str, float]
    """By source or set whose losses are measured, how much they count; 1 in all."""
    data: str
    """Digest of the tokens that the runs read and are measured with."""

    @property
    def prior(self) -> Floats:
        """[sources] Shares of tokens."""
        tokens = np.array([source.tokens for source in self.sources], float)
        return np.asarray(tokens / tokens.sum())

    @property
    def caps(self) -> Floats:
        """[sources] The greatest share of each in the large run, by ``max_epochs``."""
        return np.minimum(np.array(most_samples(self.sources)) / self.samples, 1.0)

    def config_path(self, member: Member) -> str:
        return storage.join(self.config.run_dir, "configs", f"{member.name}.yaml")

    def section(self, shares: Floats) -> dict[str, Any]:
        """The ``data`` of the large run, with whole samples as weights, and none above its ``max_epochs``."""
        weights = even_weights(shares.tolist(), most_samples(self.sources), self.samples)
        return data_section(with_sources(self.base, "weight", weights))


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
    check_schedule(small.steps, small.schedule)
    for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"):
        if (size := getattr(small.parallel, axis)) not in (1, None):
            raise InputError(f"parallel.{axis}: expected 1, for each run is one process, got {size}")
    for batch in (small.global_batch, *(phase.global_batch for phase in small.phases)):
        if batch is not None and (problem := check_divides(batch, 1, small.micro_batch)):
            raise InputError(problem)
    held_out = open_held_out(small)
    measured = [own.name for own in held_out]
    if not measured:
        raise InputError(f"{config.base}: no source has held-out documents, nor are there validation.sets")
    weights = family_weights(config.weights or {}, measured)
    corpora = [open_corpus(own, keep=False) for own in (base, small)]
    large, own = (sources_of(one, corpus) for one, corpus in zip((base, small), corpora, strict=True))
    samples, total = (budget(one, corpus, config.base) for one, corpus in zip((base, small), corpora, strict=True))
    if (most := sum(most_samples(large))) < samples:
        raise InputError(f"{config.base}: max_epochs: {samples:,} samples are planned, and the sources give {most:,}")
    limits, sizes = most_samples(own), [source.tokens for source in own]
    members, width = [], max(4, len(str(config.runs - 1)))
    for number in range(config.runs):
        drawn = draw(sizes, limits, total, number, config.seed, config.draw.strength, config.draw.min_share)
        name = f"{number:0{width}}"
        changes = {
            "seed": config.seed, "run_dir": storage.join(config.run_dir, "runs", name),
            "metrics": small.metrics.model_copy(update={"live": False}),
        }  # fmt: skip
        weighed = with_sources(small, "weight", [float(part) for part in drawn]).model_copy(update=changes)
        members.append(Member(name, weighed, tuple(part / total for part in drawn)))
    tried = np.array([member.shares for member in members])
    check_runs(config.form, tried, [source.name for source in own], "runs")
    data = [corpora[1].fingerprint, *(own.corpus.fingerprint for own in held_out)]
    return Swarm(config, base, tuple(large), samples, tuple(members), weights, digest(data))


def write_configs(swarm: Swarm) -> None:
    """Write the config of every run, below a line with the digest of its data.

    Raises:
        InputError: a run has begun, and its config is there and says something else.
    """
    for member in swarm.members:
        path = swarm.config_path(member)
        text = f"# data {swarm.data}\n{dump_yaml(member.config)}".encode()
        if os.path.exists(member.config.run_dir) and os.path.exists(path) and storage.read_bytes(path) != text:
            told = "this run was begun with another config or other data; expected the same, or another run_dir"
            raise InputError(f"{path}: {told}")
        storage.publish_bytes(path, text)
