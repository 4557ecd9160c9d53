"""Decides whether documents or weights caused a spike, and states the findings in sentences.

The excess of a document is the loss of its own targets above what is usual for its source, in nats. Damaged weights
raise every document alike; a document raises itself. So documents are the cause where a few of them hold most of the
excess and lose, by target, several times as far above the usual as all the rest: however many sequences they fill.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BY_LOSS", "OUT", "Cause", "Part", "find_cause", "findings", "said_of"]

OUT = 3.0
"""A sequence or document stands out from this many spreads on."""

_FEW = 10
"""Documents that may be named together."""
_LEAST_SHARE = 0.1
"""Of the excess, that each of them has."""
_MOST = 0.5
"""Of the excess, that they have together."""
_FACTOR = 3.0
"""Times the rest's excess a target, that each of them has."""
_WHOLE = 0.95
"""Of a step's targets: who has them leaves nothing to compare with."""

BY_LOSS = {"loss_spike", "non_finite"}
"""Reasons to write a step down that the loss of its documents can explain."""

Key = tuple[str, int]
"""Data run and number of a document."""


@dataclass(frozen=True)
class Part:
    """A document's part in a step."""

    key: Key
    excess: float
    """Nats above the usual, of all its targets; infinite if its loss is not finite."""
    targets: int
    z: float


@dataclass(frozen=True)
class Cause:
    """``kind``: ``documents`` (those in ``keys``), ``unclear`` (the one in ``keys`` is the whole step), ``step``
    (everything is raised: the weights, or all of the data), or empty: nothing says."""

    kind: str
    total: float
    """Nats: the excess of all that is above the usual, what is below it not counted; 0 where it is infinite."""
    keys: tuple[Key, ...] = ()
    share: float | None = None
    """Of ``total``, what those in ``keys`` hold; None if it is infinite."""
    rest: float | None = None
    """Nats a target above the usual of all other documents, negative below it; None without others."""


def find_cause(parts: Sequence[Part], other_excess: float, other_targets: int, broad: bool) -> Cause:
    """Determine the cause of a step in which sequences stand out.

    ``other_excess``, ``other_targets``: of sequences whose documents cannot be known. ``broad``: half of the sequences
    or more stand out.
    """
    targets = sum(part.targets for part in parts) + other_targets
    broken = sorted((part for part in parts if not np.isfinite(part.excess)), key=lambda part: part.key)
    total = sum(max(part.excess, 0.0) for part in parts) + max(other_excess, 0.0)
    total = total if np.isfinite(total) else 0.0
    largest = max(parts, key=lambda part: part.targets, default=None)
    if largest is not None and largest.z > OUT and largest.targets >= _WHOLE * targets:
        return Cause("unclear", total, (largest.key,))
    otherwise = Cause("step" if broad else "", total)
    if broken:
        rest = targets - sum(part.targets for part in broken)
        few = len(broken) <= _FEW and rest > (1 - _WHOLE) * targets and np.isfinite(other_excess)
        return Cause("documents", total, tuple(part.key for part in broken)) if few else otherwise
    suspects = [part for part in parts if part.z > OUT and part.excess >= _LEAST_SHARE * total]
    suspects.sort(key=lambda part: (-part.excess / part.targets, part.key))
    net = sum(part.excess for part in parts) + other_excess
    for num in range(len(suspects), 0, -1):
        named = suspects[:num]
        held, rest = sum(part.excess for part in named), targets - sum(part.targets for part in named)
        if held < _MOST * total or rest == 0:
            continue
        others = (net - held) / rest
        if named[-1].excess / named[-1].targets >= _FACTOR * others:
            named.sort(key=lambda part: (-part.excess, part.key))
            return Cause("documents", total, tuple(part.key for part in named), held / total, others)
    return otherwise


def findings(found: Mapping[str, Any], z_S: NDArray[np.float64], excess_S: NDArray[np.float64]) -> Iterator[str]:
    """What stands out, in sentences. ``found``: what :func:`quern.lineage.forensics.explain.explain` has put
    together."""
    out = int((z_S > OUT).sum())
    broken = int(np.isinf(z_S).sum())
    cause = found["cause"]
    named = sorted((row for row in found["documents"] if row["cause"]), key=lambda row: -(row["share"] or 0.0))
    raised = f"{out} of {len(z_S)} sequences {'is' if out == 1 else 'are'} {OUT:g} spreads or more above what is usual"
    if found.get("first_non_finite") is not None:
        yield _began(found["first_non_finite"])
    if broken:
        yield f"{broken} of {len(z_S)} sequences have a loss that is not finite."
    if cause["kind"] == "step":
        yield (
            f"{raised}, and no document, nor a few together, account for it: that is the weights, or all of the data "
            "at once. Look at what the steps before read."
        )
    elif out:
        positive = np.where(np.isfinite(excess_S), np.maximum(excess_S, 0), 0)
        share = positive[z_S > OUT].sum() / positive.sum() if positive.sum() > 0 else 1.0
        yield f"{raised}, with {share:.0%} of the loss above it."
    else:
        yield "No sequence's loss stands out; what the step has is in its gradients, or in the steps before."
    first = found["documents"][0] if found["documents"] else None
    if cause["kind"] == "documents" and named:
        yield _accused(cause, named, len(z_S), found["reasons"])
    elif cause["kind"] == "unclear" and named:
        yield (
            f"{_name(named[0])} has {named[0]['targets_share']:.0%} of the step's targets: from this step it cannot be "
            "told whether this document or the weights raised the loss. If the steps after it that do not read it, or "
            "the same checkpoint without it, are as usual, it was the document."
        )
    elif first is not None and cause["kind"] != "step" and (first["z"] is None or first["z"] > OUT):
        of = f", {first['share']:.0%} of the loss above the usual" if first["share"] is not None else ""
        yield f"The document that stands out most: {_name(first)} ({_loss(first)}{of})."
    ratios = [row for row in found["layers"] if row["ratio"] is not None]
    if ratios:
        top = max(ratios, key=lambda row: row["ratio"])
        if top["ratio"] > 1:
            grown = f"has grown most in {top['name']}: {top['ratio']:.1f}"
        else:
            grown = f"has grown in no layer: the largest, of {top['name']}, is {top['ratio']:.2g}"
        yield f"The gradient {grown} times its median of the steps before."
    if found["decision"] == "skipped":
        yield "The update was skipped: weights, moments and AdamW's step count are those of before."
    for row in found["documents"][:3]:
        for repeat in row["repeats"][:3]:
            yield f"{_name(row)}: step {repeat['step']} had read {said_of(repeat)} already."
        if any(row["epochs"]):
            yield f"{_name(row)}: was read in epoch {max(row['epochs'])}, so not for the first time."


def _began(first: Mapping[str, Any]) -> str:
    if first["phase"] == "none":
        again = "was finite when it was computed again" if first["redone"] else "is not computed again in a pipeline"
        return f"Where it began is not known: weights and moments are finite, and the step {again}."
    where = "" if first["rank"] is None else f" on rank {first['rank']}"
    if first["phase"] == "weights":
        return f"Not finite first: {first['value']} in the weights or moments, {first['module']}{where}."
    where += "" if first["micro_batch"] is None else f", micro-batch {first['micro_batch']}"
    where += "".join(f", row {row['row']} from position {row['position']} on" for row in first["sequences"][:3])
    names = ", ".join([*dict.fromkeys(_name(row) for row in first["documents"])][:3])
    where += f": {names}" if names else ""
    return f"Not finite first: {first['value']} in the {first['phase']} of {first['module']}{where}."


def _accused(
    cause: Mapping[str, Any], named: Sequence[Mapping[str, Any]], num_sequences: int, reasons: Sequence[str]
) -> str:
    one, num = len(named) == 1, len({place for row in named for place in row["places"]})
    who = "One document holds" if one else f"{len(named)} documents hold"
    what = "every loss that is not finite" if cause["share"] is None else f"{cause['share']:.0%} of the excess loss"
    rows = "; ".join(
        f"{_name(row)} ({_loss(row)}"
        + ("" if one or row["share"] is None else f", {row['share']:.0%}")
        + ("" if row["by"] == "its own targets" else "; by its sequences' loss")
        + ")"
        for row in named
    )
    rest = cause["rest"]
    others = (
        "" if rest is None else f" All others are {abs(rest):.3f} nats a target {'above' if rest > 0 else 'below'} "
    )
    ending = "" if rest is None else "the usual: it is the data, not the weights."
    if rest is not None and not BY_LOSS & set(reasons):
        ending += " That follows from the loss alone, which was no spike: gradients are not known by document."
        if "grad_norm_spike" in reasons:
            ending += (
                " So the gradient may come from another document, and no purge is proposed. To find out, train the "
                "step again from the checkpoint before, each time over a copy of the data with one document purged."
            )
    return f"{who} {what}, in {num} of {num_sequences} sequences: {rows}.{others}{ending}"


def said_of(repeat: Mapping[str, Any]) -> str:
    """What an earlier step had read of a document, as a note beside its name."""
    return "this document" if repeat["what"] == "itself" else str(repeat["what"])


def _name(row: Mapping[str, Any]) -> str:
    return str(row["name"] or row["doc_id"])


def _loss(row: Mapping[str, Any]) -> str:
    loss = "not finite" if row["loss"] is None else f"{row['loss']:.3f} nats a target"
    return loss if row["usual"] is None else f"{loss}, usual {row['usual']:.3f}"
