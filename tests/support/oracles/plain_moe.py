"""Layers with experts by hand, for the plain loop: choices token by token, and the losses as they are written.

Choice and shared experts as in DeepSeek-V3 (sections 2.1.2 and 4.2), balance loss of Fedus et al. 2021 (equations 4 to
6) by sequence, micro-batch or the last step's counts, z-loss of Zoph et al. 2022 (equation 5), biases of Wang et al.
2024 (algorithm 1). Imports nothing from the package under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


@dataclass
class Experts:
    """Settings, and what changes by the step; ``of`` has the keys of ``model.moe``, ``by`` those of ``experts``."""

    of: dict[str, Any]
    by: dict[str, Any]
    sequences: int = 1
    """Of the step."""
    biases: dict[int, Tensor] = field(default_factory=dict)
    last: dict[int, list[int]] = field(default_factory=dict)
    chosen: dict[int, list[int]] = field(default_factory=dict)
    figures: dict[int, list[float]] = field(default_factory=dict)
    """Of this step: choices of each expert; dropped, entropy and squared logits."""
    terms: list[Tensor] = field(default_factory=list)
    """Losses of the micro-batch, weighted."""

    def is_sparse(self, layer: int) -> bool:
        return layer >= int(self.of.get("first_dense", 0))

    def begin(self, sequences: int) -> None:
        self.sequences, self.chosen, self.figures = sequences, {}, {}

    def take(self) -> Tensor | float:
        """The losses since the last call."""
        terms, self.terms = self.terms, []
        return sum(terms, torch.zeros((), dtype=torch.float64))

    def end(self, applied: bool) -> None:
        if not applied:
            return
        self.last = {layer: list(counts) for layer, counts in self.chosen.items()}
        rate = self.by.get("bias_rate", 0.0)
        if not rate:
            return
        for layer, counts in self.chosen.items():
            mean = sum(counts) / len(counts)
            moved = [float(b) + rate * ((n < mean) - (n > mean)) for b, n in zip(self.bias(layer), counts, strict=True)]
            if self.by.get("center_bias"):
                middle = sum(moved) / len(moved)
                moved = [value - middle for value in moved]
            self.biases[layer] = torch.tensor(moved, dtype=torch.float64)

    def bias(self, layer: int) -> Tensor:
        return self.biases.get(layer, torch.zeros(self.of["num_experts"], dtype=torch.float64))

    def feed_forward(
        self, w: Weights, layer: int, x_BLD: Tensor, product: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """What the layer adds to the residual stream."""
        prefix = f"blocks.{layer}.ffn"
        logits_BLE = x_BLD @ w[f"{prefix}.router.weight"].T
        sigmoid = self.of.get("score") == "sigmoid"
        scores_BLE = torch.sigmoid(logits_BLE) if sigmoid else torch.softmax(logits_BLE, -1)
        rows, length = x_BLD.shape[:2]
        merit = (scores_BLE.detach() + self.bias(layer)).tolist()
        choices = [[self._choice(merit[b][t]) for t in range(length)] for b in range(rows)]
        chosen_BLK = torch.tensor(choices)
        weights_BLK = scores_BLE.gather(-1, chosen_BLK)
        if self.of.get("normalize"):
            weights_BLK = weights_BLK / weights_BLK.sum(-1, keepdim=True)
        dropped = self._dropped(choices)
        kept_BLK = torch.ones_like(weights_BLK)
        for place in dropped:
            kept_BLK[place] = 0
        weights_BLK = weights_BLK * self.of.get("scale", 1.0) * kept_BLK
        y_BLD = torch.zeros_like(x_BLD)
        for expert in range(self.of["num_experts"]):
            w1, w2, w3 = (w[f"{prefix}.experts.w{number}"][expert] for number in (1, 2, 3))
            own_BL = ((chosen_BLK == expert) & (kept_BLK > 0)).any(-1)
            if not own_BL.any():
                continue
            x_1SD = x_BLD[own_BL][None]  # in the order of tokens, which is what a product in FP8 goes by
            gate = product(x_1SD, w1)
            theirs = product(gate * torch.sigmoid(gate) * product(x_1SD, w3), w2)[0]
            weights = (weights_BLK * (chosen_BLK == expert)).sum(-1, keepdim=True)[own_BL]
            y_BLD = y_BLD.index_put((own_BL,), y_BLD[own_BL] + weights * theirs)
        if self.of.get("shared_ffn_dim"):
            names = (f"{prefix}.shared.w{number}.weight" for number in (1, 3, 2))
            gate, up, down = (w[name] for name in names)
            hidden = product(x_BLD, gate)
            shared = product(hidden * torch.sigmoid(hidden) * product(x_BLD, up), down)
            if self.of.get("shared_gate"):
                shared = shared * torch.sigmoid(x_BLD @ w[f"{prefix}.shared_gate.weight"].T)
            y_BLD = y_BLD + shared
        self._note(layer, choices, scores_BLE.detach(), logits_BLE.detach(), len(dropped))
        shares_BLE = scores_BLE / scores_BLE.sum(-1, keepdim=True)
        self.terms += self._losses(layer, choices, shares_BLE, logits_BLE)
        return y_BLD

    def _choice(self, merit: list[float]) -> list[int]:
        open_experts = range(len(merit))
        groups = self.of.get("groups", 1)
        if groups > 1:
            size = len(merit) // groups
            best = {g: sum(sorted(merit[g * size : (g + 1) * size])[-2:]) for g in range(groups)}
            kept = sorted(range(groups), key=lambda g: (-best[g], g))[: self.of["top_groups"]]
            open_experts = [e for e in range(len(merit)) if e // size in kept]
        return sorted(open_experts, key=lambda e: (-merit[e], e))[: self.of["top_k"]]

    def _dropped(self, choices: list[list[list[int]]]) -> list[tuple[int, int, int]]:
        """Row, token and number of the choice, by position."""
        factor = self.of.get("capacity")
        if factor is None:
            return []
        places = [(b, t, k) for b, row in enumerate(choices) for t, token in enumerate(row) for k in range(len(token))]
        most = math.ceil(round(factor * len(places) / self.of["num_experts"], 9))
        taken, dropped = dict.fromkeys(range(self.of["num_experts"]), 0), []
        for b, t, k in places:
            expert = choices[b][t][k]
            taken[expert] += 1
            if taken[expert] > most:
                dropped.append((b, t, k))
        return dropped

    def _note(
        self, layer: int, choices: list[list[list[int]]], scores_BLE: Tensor, logits_BLE: Tensor, dropped: int
    ) -> None:
        counts = self.chosen.setdefault(layer, [0] * self.of["num_experts"])
        for row in choices:
            for token in row:
                for expert in token:
                    counts[expert] += 1
        shares = scores_BLE / scores_BLE.sum(-1, keepdim=True)
        found = self.figures.setdefault(layer, [0.0, 0.0, 0.0])
        for number, value in enumerate((dropped, -(shares * shares.log()).sum().item(), (logits_BLE**2).sum().item())):
            found[number] += value

    def _losses(
        self, layer: int, choices: list[list[list[int]]], shares_BLE: Tensor, logits_BLE: Tensor
    ) -> list[Tensor]:
        """Of each row, divided by the sequences of the step: their sum over a step is a mean over sequences."""
        count, found = self.of["num_experts"], []
        everyone = [expert for row in choices for token in row for expert in token]
        for b, row in enumerate(choices):
            over = self.by.get("balance_over", "sequence")
            if over == "sequence":
                given = [expert for token in row for expert in token]
                f = [given.count(e) / len(given) for e in range(count)]
            elif over == "micro_batch":
                f = [everyone.count(e) / len(everyone) for e in range(count)]
            else:
                last = self.last.get(layer)
                f = [1 / count] * count if last is None else [n / sum(last) for n in last]
            means = shares_BLE[b].mean(0)
            balance = count * sum((means[e] * f[e] for e in range(count)), torch.zeros((), dtype=torch.float64))
            z = (torch.log(torch.exp(logits_BLE[b]).sum(-1)) ** 2).mean()
            loss = self.by.get("balance_loss", 0.0) * balance + self.by.get("z_loss", 0.0) * z
            found.append(loss / self.sequences)
        return found
