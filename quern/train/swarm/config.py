"""The config of a swarm."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from quern.config import Section
from quern.train.config.numbers import Count, NonNegative, Weight

__all__ = ["DrawConfig", "SwarmConfig"]


class DrawConfig(Section):
    """How mixtures are drawn: Dirichlet (strength · token shares); the first run has the token shares themselves."""

    strength: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (1.0, 20.0)
    """Least and greatest strength, drawn evenly in its logarithm; the larger, the closer to the token shares."""
    min_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """[share] Smaller shares become 0, so that mixtures are sparse."""

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.strength[0] > self.strength[1]:
            raise ValueError("strength: expected the least first, and then the greatest")
        return self


class SwarmConfig(Section):
    """A swarm of small runs, and the mixture that they propose for a large one."""

    run_dir: str
    """The folder of the swarm. Example: runs/swarm"""
    base: str
    """The config of the run that a mixture is wanted for: its sources, ``max_epochs`` and budget. Example:
    configs/train-125m.yaml"""
    overrides: tuple[str, ...] = ()
    """What makes the runs of the swarm small, as on the command line. Example: [model.preset=debug, steps=2000]"""
    runs: Count
    """[runs] How many; more of them may be asked for later. Example: 64"""
    at_once: Count = 1
    """[runs] How many are trained at a time, each in a process of its own."""
    gpus: tuple[str, ...] = ()
    """GPUs that runs are dealt out to, as ``CUDA_VISIBLE_DEVICES`` names them; none = each run sees what the swarm
    does. Example: ["0", "1"]"""
    seed: NonNegative = 0
    """Seed of the mixtures, and of the weights and the order of every run."""
    draw: DrawConfig = DrawConfig()
    form: Literal["log-linear", "linear"] = "log-linear"
    """The law: c + exp(p · t), or p · t."""
    weights: dict[str, Weight] | None = None
    """[relative] By source or held-out set, how much its loss counts; null = all the same. Example: {web: 1}"""
    kl: Annotated[float, Field(ge=0)] = 0.0
    """[nats] Loss that a nat of divergence from the token shares has to be worth."""
