"""DoReMi (Xie et al. 2023, 2305.10429, algorithm 1): learns the weights of sources while a proxy is trained.

A step computes the losses of its batch with the weights it begins with, and those of a reference, without gradients;
raises the weight of each source by what the proxy has to learn there, its excess loss; and trains with the new weights.
The mean of the weights over the steps is the mixture that a larger model is then trained with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quern.errors import InputError
from quern.model.transformer import Transformer
from quern.parallel.apply import Parallel, parallelize
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import Mesh
from quern.train.batches.feed import StepInputs
from quern.train.checkpoint.format.manifest import Checkpoint, RunFacts
from quern.train.checkpoint.format.state import TrainState
from quern.train.checkpoint.save.manager import CheckpointManager
from quern.train.config.mixture import DoReMiConfig
from quern.train.processes.ranks import Ranks
from quern.train.step.by_source import SourceLosses

__all__ = ["DoReMi", "load_reference"]

_STATE = ("weights", "summed", "steps", "excess")


class DoReMi:
    """The weights of K sources, on the device in float64, the same on every rank.

    ``names``: of the sources, by their number in the order. ``proxy`` and ``reference``: two models in one layout.
    """

    def __init__(
        self, config: DoReMiConfig, names: Sequence[str], by_source: SourceLosses, proxy: Parallel,
        reference: Parallel, ranks: Ranks,
    ) -> None:  # fmt: skip
        self._config, self._names, self._by_source, self._ranks = config, names, by_source, ranks
        self._models = proxy, reference
        zeros = partial(torch.zeros, dtype=torch.float64, device=ranks.device)
        self.weights_K = zeros(len(names)) + 1 / len(names)
        self.summed_K = zeros(len(names))
        """The weights of all steps, added up."""
        self.steps = zeros(())
        self.excess_K = zeros(len(names))
        """Mean over a source's targets of max(proxy's loss - reference's, 0), in the last step that had any of them."""

    def weighed(self, batch: StepInputs, *, learn: bool = True) -> StepInputs:
        """The batch with a weight for each sequence, so that its objective is the mean over each source's targets,
        weighed by source; sources without a target are left out of it. ``learn``: update the weights first.
        Collective."""
        both: list[dict[int, Tensor] | None] = [{} if model.run.counts else None for model in self._models]
        for model, losses in zip(self._models, both, strict=True):
            with model.evaluating():
                model.run.forward(batch.micro_batches, losses)
        ours, theirs = both
        found = None if ours is None or theirs is None else {n: (ours[n] - theirs[n]).clamp(min=0) for n in ours}
        nats_K, targets_K = self._ranks.sum(self._by_source.of_this_rank(batch, found, self.weights_K)).chunk(2)
        if learn:
            self._learn(nats_K / targets_K)
        present_K = self.weights_K.where(targets_K > 0, 0)
        factor_K = present_K / present_K.sum() / targets_K.where(targets_K > 0, 1)
        rows = factor_K[batch.sources_S].split([len(own.tokens_BL) for own in batch.micro_batches])
        pairs = zip(batch.micro_batches, rows, strict=True)
        return replace(batch, micro_batches=tuple(replace(own, weights_B=weights_B) for own, weights_B in pairs))

    def _learn(self, found_K: Tensor) -> None:
        """One step of the exponentiated gradient; a source without a target, or without a finite loss, keeps the excess
        that it had."""
        self.excess_K = found_K.where(found_K.isfinite(), self.excess_K)
        raised_K = (self.weights_K.log() + self._config.step_size * self.excess_K).softmax(0)
        part = self._config.smoothing
        self.weights_K = (1 - part) * raised_K + part / len(raised_K)
        self.summed_K = self.summed_K + self.weights_K
        self.steps = self.steps + 1

    def sent(self) -> Tensor:
        """[3, K]: what :meth:`read` tells, on its way to the host."""
        rows = self.weights_K, self.summed_K / self.steps.clamp(min=1), self.excess_K
        return torch.stack(rows).to("cpu", non_blocking=True)

    def read(self, sent_3K: Tensor) -> dict[str, dict[str, float]]:
        """By source: the weight of a step, the mean of the weights up to it, and the excess loss."""
        keys = "doremi_weight", "doremi_mean_weight", "excess_loss_by_source"
        return {key: dict(zip(self._names, row, strict=True)) for key, row in zip(keys, sent_3K.tolist(), strict=True)}

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it, by plain name."""
        return dict(zip(_STATE, (self.weights_K, self.summed_K, self.steps, self.excess_K), strict=True))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where another has stopped.

        Raises:
            InputError: ``state`` is empty, or of another number of sources.
        """
        if not state:
            told = (
                "the checkpoint was trained without a reference, and their mean would be of the steps behind it alone"
            )
            raise InputError(f"doremi: {told}; expected another run_dir")
        if (then := len(state["weights"])) != len(self._names):
            told = f"the checkpoint has weights of {then} sources, and the run reads {len(self._names)}"
            raise InputError(f"doremi: {told}; expected the same, or another run_dir")
        self.weights_K, self.summed_K, self.steps, self.excess_K = (state[name] for name in _STATE)


def load_reference(
    path: str, model: Transformer, mesh: Mesh, layout: Layout, checkpoints: CheckpointManager, facts: RunFacts,
    device: torch.device,
) -> Parallel:  # fmt: skip
    """The model of the checkpoint ``path`` in the layout of the proxy, as far as it is of a forward: without FP8, and
    with weights that are cast where they are used. ``model``: on ``meta``. Collective.

    Raises:
        InputError: the checkpoint is damaged or another model's.
    """
    forward = replace(
        layout, float8=None, float8_all_gather=False, ep_float8=False, activation_checkpointing="none",
        activation_checkpointing_layers=None, weights_cast="per_use", bf16_gradients=False, host_state=False,
    )  # fmt: skip
    model.requires_grad_(False)
    reference = parallelize(model, mesh, forward, device)
    if problems := checkpoints.problems(Checkpoint(0, path)):
        raise InputError(f"doremi.reference: {problems[0]}")
    checkpoints.load(path, TrainState(reference.weights, None, facts))
    return reference
