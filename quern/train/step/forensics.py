"""Records a spike or another chosen step for analysis: ``RUN/forensics/step_00000123.json``.

Of the last steps a rank keeps, on its device, the cross-entropy of every sequence that it computed, cut into
:data:`.sequences.PIECES` along the sequence, and the norms of its parts of all gradients, which the global norm is made
of anyway. Beside them, on the host, where the sequences are from. Nothing of it is read while training goes well, and
nothing is sent.

Whether a step is written down is decided from its reduced figures, one step later, when they have reached the host: the
same bits on every rank, so every rank decides alike. Then, and only then, the ranks send what they kept to rank 0, and
look for where a step that was not finite became so, by its batch, which is kept until the step is settled.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from quern import storage
from quern.model.loss import IGNORE
from quern.parallel.clip import Norms
from quern.parallel.context.inputs import Shared
from quern.parallel.experts.loads import Routed
from quern.train.batches.feed import Origin, StepInputs
from quern.train.config import ForensicsConfig
from quern.train.history.ledger import nulled
from quern.train.processes.agree import Agreement
from quern.train.step.figures import Figures, Pending
from quern.train.step.routed import as_plain, counts_of
from quern.train.step.sequences import Sequences, cut, highest, joined, medians, piece_tokens

__all__ = ["FOLDER", "FORMAT", "Facts", "Forensics"]

FOLDER = "forensics"
"""Of a run's directory."""
FORMAT = 1

STANDING_OUT = 128
"""Sequences of the step whose pieces are in the file …"""
STANDING_OUT_BEFORE = 16
"""… and of each step before it."""
MOST_COUNTS = 1 << 20
"""Numbers of tokens that chose an expert, of the step's documents; of an earlier step's an eighth."""

_NAME = re.compile(r"step_\d{8,}(\.attempt_\d+)?\.json")
_plain = partial(nulled, digits=8)
"""float32 has no more."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Facts:
    """Facts common to all steps of an attempt."""

    attempt: int
    order: str
    """The hash."""
    sources: Sequence[str]
    """Identities, by their numbers in the order."""
    policy: Mapping[str, Any]
    """The guard's."""
    layout: Mapping[str, Any]
    dp_rank: int
    cp_groups: Sequence[dist.ProcessGroup] = ()
    """Of ranks that compute tokens of the same sequences: summed over one after the other, all of them."""
    cp_rank: int = 0
    expert_layers: Sequence[int] = ()
    """Numbers of the layers with experts."""
    loss_scaled: bool = False
    """With a loss scale gradients overflow now and then, by which it finds its size: no reason to look."""


@dataclass
class _Kept:
    """A step, on the device. M micro-batches, B sequences of each, P pieces of a sequence."""

    data_step: int
    origins: tuple[Origin, ...]
    nats_MBP: Tensor | None
    """None where another rank has them, as ``targets_MBP``."""
    targets_MBP: Tensor | None
    norms: list[Norms]
    routed: Sequence[Routed]
    """Of each micro-batch; empty without experts."""
    batch: StepInputs | None
    """None once the step is settled."""
    seen: tuple[Pending, Figures] | None = None
    """Once its figures are on the host; the same on every rank."""


class Forensics:
    """Keeps the last ``config.window`` steps, and writes them when one of them is to be recorded.

    ``squares`` reads norms: :meth:`quern.parallel.gradients.Gradients.squares`; ``search`` is
    :func:`quern.train.step.non_finite.first_non_finite`. Collective.
    """

    def __init__(
        self,
        config: ForensicsConfig,
        run_dir: str,
        facts: Facts,
        squares: Callable[[Sequence[Norms]], dict[str, float]],
        search: Callable[[StepInputs], dict[str, Any]],
        together: Agreement,
    ) -> None:
        self._config, self._facts, self._squares, self._search = config, facts, squares, search
        self._together = together
        self._folder = os.path.join(run_dir, FOLDER)
        self._kept: deque[_Kept] = deque(maxlen=config.window + 1)  # one is in work when the one before is read
        self._num_files = together.broadcast_from_rank0(self._count) if config.window else 0
        self._full = False
        self._requested = False
        self._wrong: int | None = None
        """The last step that was not as it should be."""

    # ---- in every step

    def keep(self, batch: StepInputs, losses: Mapping[int, Tensor] | None, routed: Sequence[Routed]) -> None:
        """Remember a step's losses, on the device, in pieces; None: another rank counts them. ``routed``: of each
        micro-batch which experts its documents chose."""
        if not self._config.window:
            return
        nats_MBP = targets_MBP = None
        if losses is not None:
            given = [losses[number] for number in range(len(batch.micro_batches))]
            targets = [inputs.targets_BL != IGNORE for inputs in batch.micro_batches]
            nats_MBP, targets_MBP = (cut(torch.stack(self._rows(batch, own))) for own in (given, targets))
        self._kept.append(_Kept(batch.data_step, batch.origins, nats_MBP, targets_MBP, [], routed, batch))

    def _rows(self, batch: StepInputs, values: Sequence[Tensor]) -> list[Tensor]:
        """[B, L] of each micro-batch, 0 for tokens of other ranks of ``cp``."""
        length = self._facts.layout["seq_len"]
        return [
            own.new_zeros(own.shape[0], length).scatter_(1, inputs.documents.positions_BR, own)
            if isinstance(inputs.documents, Shared) else own
            for own, inputs in zip(values, batch.micro_batches, strict=True)
        ]  # fmt: skip

    @property
    def norms(self) -> list[Norms] | None:
        """The buffers for the gradient norms of the step that was kept last."""
        return self._kept[-1].norms if self._kept else None

    def request(self) -> None:
        """Request that the next step known to all ranks is recorded."""
        self._requested = True

    def take_request(self) -> bool:
        """Whether recording was requested since the last call; sent with the step's loss."""
        requested, self._requested = self._requested, False
        return requested

    def settle(self, step: Pending, found: Figures) -> None:
        """Process the step's figures once they are on the host. Collective where the step is written down."""
        kept = next((kept for kept in self._kept if kept.data_step == step.data_step), None)
        if kept is None:
            return
        kept.seen, batch, kept.batch = (step, found), kept.batch, None
        reasons = self._reasons(step.step, found)
        if not reasons:
            return
        streak = self._wrong is not None and step.step == self._wrong + 1
        asked = {"requested", "configured"} & {*reasons}
        self._wrong = step.step if {*reasons} - asked else self._wrong
        if (streak and not asked) or self._is_full():  # of a streak, the first step says where it came from
            return
        self._num_files += 1
        first = self._search(batch) if "non_finite" in reasons and batch is not None else None
        steps = [kept for kept in self._kept if kept.seen is not None][-self._config.window :]
        shares = self._together.gather_on_rank0([self._share(kept, kept is steps[-1]) for kept in steps])
        content: dict[str, Any] = {"steps": []}
        if self._together.rank == 0:
            told = [(kept.seen, own) for kept, *own in zip(steps, *shares, strict=True) if kept.seen]
            content = self._content(told, reasons, first)
        if self._facts.expert_layers:
            self._add_experts(steps, content["steps"])
        if self._together.rank == 0:
            self._write(content, step.step, found)

    def _reasons(self, step: int, found: Figures) -> list[str]:
        routine = self._facts.loss_scaled and np.isfinite(found.loss)
        given = {
            "loss_spike": found.loss_spike,
            "grad_norm_spike": found.norm_spike,
            "non_finite": found.non_finite and not routine,
            "requested": found.asked,
            "configured": step in self._config.steps,
        }
        return [reason for reason, holds in given.items() if holds]

    # ---- what the ranks send

    def _share(self, kept: _Kept, is_last: bool) -> tuple[dict[str, float], Sequences | None]:
        """This rank's of a step: squared norms by parameter, and its sequences. Waits for the device."""
        squares = self._squares(kept.norms)
        if kept.nats_MBP is None or kept.targets_MBP is None:
            return squares, None
        nats, targets = kept.nats_MBP.double().clone(), kept.targets_MBP.long().clone()  # what is kept stays a rank's
        for group in self._facts.cp_groups:
            dist.all_reduce(nats, group=group)
            dist.all_reduce(targets, group=group)
        if self._facts.cp_rank:
            return squares, None
        nats_SP, targets_SP = (own.flatten(0, 1).cpu().numpy() for own in (nats, targets))
        columns = {
            name: np.concatenate([getattr(origin, f"{name}s") for origin in kept.origins]).astype(np.int64)
            for name in ("place", "source", "epoch", "window")
        }
        num, rows = kept.nats_MBP.shape[:2]
        columns["micro_batch"], columns["row"] = (own.ravel() for own in np.indices((num, rows)))
        columns["dp_rank"] = np.full(num * rows, self._facts.dp_rank)
        own = Sequences(columns, nats_SP.sum(1), targets_SP.sum(1), {})
        most = STANDING_OUT if is_last else STANDING_OUT_BEFORE
        for s in highest(own.means, own.targets_S, most):
            own.pieces[int(columns["place"][s])] = nats_SP[s], targets_SP[s]
        return squares, own

    def _add_experts(self, steps: Sequence[_Kept], plain: Sequence[dict[str, Any]]) -> None:
        """Put into the steps of the file, ``plain`` on rank 0, which experts the sequences that stand out chose."""
        asked = self._together.broadcast_from_rank0(lambda: [own["within"]["place"] for own in plain])
        length = self._facts.layout["seq_len"]
        most = [MOST_COUNTS if kept is steps[-1] else MOST_COUNTS // 8 for kept in steps]
        shares = self._together.gather_on_rank0([
            counts_of(kept.routed, kept.origins, own, length, bound)
            for kept, own, bound in zip(steps, asked, most, strict=True)
        ])  # fmt: skip
        for step, kept, bound, places, *own in zip(plain, steps, most, asked, *shares, strict=False):
            assert kept.seen is not None
            assert kept.seen[0].loads is not None
            total_NE = kept.seen[0].loads[:, : kept.routed[0].counts_NSE.shape[-1]]
            step["experts"] = as_plain(own, places, total_NE, self._facts.expert_layers, bound)

    # ---- what rank 0 writes

    def _content(
        self,
        steps: Sequence[tuple[tuple[Pending, Figures], Sequence[Any]]],
        reasons: Sequence[str],
        first: dict[str, Any] | None,
    ) -> dict[str, Any]:
        (last, figures), _ = steps[-1]
        facts = self._facts
        squares = [_added([share[0] for share in shares]) for _, shares in steps]
        sequences = [joined([share[1] for share in shares if share[1] is not None]) for _, shares in steps]
        usual, norms = medians(sequences), _norms(squares[-1], str)
        return {
            "format": FORMAT, "kind": "forensics", "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "step": last.step, "data_step": last.data_step, "attempt": facts.attempt, "order": facts.order,
            "sources": list(facts.sources), "reasons": list(reasons),
            "decision": "skipped" if figures.skipped else "continued", "policy": dict(facts.policy),
            "layout": dict(facts.layout), "window": self._config.window,
            "first_non_finite": first,
            "steps": [
                self._step(*seen, _norms(own, _layer), found, usual, STANDING_OUT if seen[0] is last else None)
                for (seen, _), own, found in zip(steps, squares, sequences, strict=True)
            ],
            "parameters": _plain(norms), "not_finite": _kinds(norms),
        }  # fmt: skip

    def _write(self, content: Mapping[str, Any], step: int, found: Figures) -> None:
        path = self._path(step)
        try:
            storage.publish_bytes(path, (json.dumps(content, allow_nan=False) + "\n").encode())
        except OSError as error:
            log.warning("%s: cannot be written (%s); training goes on", path, error.strerror or error)
        else:
            done = "its update was skipped" if found.skipped else "its update was applied and training goes on"
            log.info("step %d (%s): %s; what it read is in %s", step, ", ".join(content["reasons"]), done, path)

    def _step(
        self,
        step: Pending,
        figures: Figures,
        layers: dict[str, float],
        found: Sequences,
        usual: Mapping[int, float],
        most: int | None,
    ) -> dict[str, Any]:
        means = found.means
        excess_S = means - np.array([usual.get(int(source), 0.0) for source in found.columns["source"]])
        known = np.isin(found.columns["place"], list(found.pieces))
        places = found.columns["place"][known]
        chosen = [
            int(places[s])
            for s in highest(excess_S[known], found.targets_S[known], STANDING_OUT_BEFORE if most is None else most)
        ]
        return {
            "step": step.step, "data_step": step.data_step, "loss": _plain(figures.loss),
            "grad_norm": _plain(figures.norm), "loss_z": _plain(figures.loss_z), "grad_norm_z": _plain(figures.norm_z),
            **figures.flags,
            "layers": _plain(layers),
            "not_finite": _kinds({"loss": figures.loss, "grad_norm": figures.norm, **layers}),
            "sequences": {
                **{name: column.tolist() for name, column in found.columns.items()},
                "loss": _plain(means.tolist()),
                "targets": found.targets_S.tolist(),
                "finite": np.isfinite(found.nats_S).tolist(),
            },
            "sequences_not_finite": _kinds(
                {str(place): float(nats) for place, nats in zip(found.columns["place"], found.nats_S, strict=True)}
            ),
            "within": {
                "tokens": piece_tokens(int(self._facts.layout["seq_len"])),
                "place": chosen,
                "loss": [_plain(found.pieces[place][0].tolist()) for place in chosen],
                "targets": [found.pieces[place][1].tolist() for place in chosen],
            },
        }  # fmt: skip

    def _path(self, step: int) -> str:
        """A file of its own: a step that was run again does not take the name of the one before."""
        path = os.path.join(self._folder, f"step_{step:08d}.json")
        return f"{path[:-5]}.attempt_{self._facts.attempt}.json" if os.path.exists(path) else path

    def _count(self) -> int:
        try:
            return sum(_NAME.fullmatch(name) is not None for name in os.listdir(self._folder))
        except OSError:
            return 0

    def _is_full(self) -> bool:
        full = self._num_files >= self._config.max_files
        if full and not self._full and self._together.rank == 0:
            log.warning("%s: has %d files, no more are written (forensics.max_files)", self._folder, self._num_files)
        self._full = full
        return full


def _added(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """All ranks' squares by parameter, in the order of the ranks."""
    total: dict[str, float] = {}
    for share in shares:
        for name, square in share.items():
            total[name] = total.get(name, 0.0) + square
    return total


def _norms(squares: Mapping[str, float], group: Callable[[str], str]) -> dict[str, float]:
    return {name: square**0.5 for name, square in _added([{group(n): s} for n, s in squares.items()]).items()}


def _kinds(values: Mapping[str, float]) -> dict[str, str]:
    """nan, inf or -inf of each that is not finite."""
    return {name: str(value) for name, value in values.items() if not np.isfinite(value)}


def _layer(parameter: str) -> str:
    """``blocks.3`` of ``blocks.3.ffn.w1.weight``; ``embed``, ``norm`` or ``head`` of what is in no block."""
    names = parameter.split(".")
    return ".".join(names[:2]) if names[0] == "blocks" else names[0]
