"""Split tensors and sequences against one process of plain autograd in float64.

The oracle shares nothing with the layouts but the network and its first weights: the whole batch at once, all logits,
``F.cross_entropy``. Which part of a tensor a rank holds is written down here once more, by hand.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch._functorch.partitioners
import torch.nn.functional as F
from torch import Tensor

from quern.errors import InputError
from quern.model.loss import IGNORE
from quern.parallel.data import accumulation
from quern.parallel.planning.mesh import MeshPlan, build_mesh
from quern.parallel.tensors import collectives
from quern.parallel.tensors.split import split_tensors
from support.distributed.tensor_case import TOLERANCE, Case, batch_of, build, documents_of, local, ratio, whole_model
from support.distributed.watch import Floats

pytestmark = pytest.mark.slow


@dataclass
class Outcome:
    loss: Tensor
    nll_BL: Tensor
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    logits_BLV: Tensor | None = None


def oracle(case: Case) -> Outcome:
    model = whole_model(case)
    tokens_BL, targets_BL, ids_BL = batch_of(case)
    positions_BL, documents = documents_of(case, ids_BL)
    logits_BLV = model(tokens_BL, None, positions_BL, documents)
    counted_BL = targets_BL != IGNORE
    nll_BL = F.cross_entropy(logits_BLV.transpose(1, 2), targets_BL, ignore_index=IGNORE, reduction="none")
    loss = (nll_BL + case.z_loss * logits_BLV.logsumexp(-1).square()).where(counted_BL, 0).sum() / counted_BL.sum()
    loss.backward()
    named = dict(model.named_parameters())
    return Outcome(
        loss.detach(), nll_BL.detach(), {name: value.detach() for name, value in named.items()},
        {name: value.grad for name, value in named.items() if value.grad is not None}, logits_BLV.detach(),
    )  # fmt: skip


def part_of(case: Case, dp_rank: int) -> list[slice]:
    """The rows of a data-parallel rank's micro-batches."""
    first = dp_rank * case.rows * case.accumulate
    return [slice(first + n * case.rows, first + (n + 1) * case.rows) for n in range(case.accumulate)]


def train(case: Case, dtype: torch.dtype = torch.float64, logits: bool = True) -> Outcome:
    """One forward and backward of this rank; its parts of weights and gradients."""
    torch._dynamo.reset()
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(collectives, "JOINED", case.joined))
        if case.activation == "full":
            # With compile on a CPU, torch 2.13 lays the random state of a recomputed attention (which draws nothing)
            # among a block's saved tensors behind the device mesh of its weights, and then takes one for the other
            # (_functorch/partitioners.py: functionalize_rng_ops); on CUDA it saves none.
            none = mock.patch.object(torch._functorch.partitioners, "has_recomputable_rng_ops", return_value=False)
            patches.enter_context(none)
        return _train(case, dtype, logits)


def _train(case: Case, dtype: torch.dtype, logits: bool) -> Outcome:
    model, mesh = build(case, dtype)
    weights = {name: local(value) for name, value in model.named_parameters()}
    tokens_BL, targets_BL, ids_BL = batch_of(case)
    total = (targets_BL != IGNORE).sum()
    losses, nlls, found = [], [], []
    for number, rows in enumerate(part_of(case, mesh.dp_rank)):
        positions_BL, documents = documents_of(case, ids_BL[rows])
        with accumulation(model, number == case.accumulate - 1):
            loss_sum, nll_BL = model(tokens_BL[rows], targets_BL[rows], positions_BL, documents)
            (loss_sum / total).backward()
        losses.append(loss_sum.detach() / total)
        nlls.append(nll_BL)
    gradients = {name: local(value.grad) for name, value in model.named_parameters() if value.grad is not None}
    for rows in part_of(case, mesh.dp_rank) if logits else []:  # afterwards: FSDP2 then leaves weights gathered
        positions_BL, documents = documents_of(case, ids_BL[rows])
        with torch.no_grad():
            found.append(model(tokens_BL[rows], None, positions_BL, documents))
    return Outcome(
        torch.stack(losses).sum(), torch.cat(nlls), weights, gradients, torch.cat(found) if logits else None
    )  # fmt: skip


def split_dim(case: Case, name: str) -> int | None:
    """The dimension that tensor parallelism splits."""
    kind = name.split(".")[-2]
    if kind in ("wq", "w1", "w3", "embed", "head") or (kind in ("wk", "wv") and case.kv_heads >= case.tp):
        return 0
    return 1 if kind in ("wo", "w2") else None


def assembled(case: Case, name: str, by_rank: list[Tensor], summed: bool) -> Tensor:
    """A whole tensor. Ranks differ fastest in tp, then in dp_shard, which splits rows of what tp has left."""
    size = case.shard * case.tp
    for rank, part in enumerate(by_rank):
        assert torch.equal(part, by_rank[rank % size]), f"{case}: {name} differs between replicas"
    parts = [torch.cat(by_rank[t : size : case.tp]) for t in range(case.tp)]
    dim = split_dim(case, name)
    if dim is not None:
        return torch.cat(parts, dim)
    if summed:
        return torch.stack(parts).sum(0)
    assert all(torch.equal(part, parts[0]) for part in parts), f"{case}: {name} differs over tp"
    return parts[0]


def check(case: Case, expected: Outcome, by_rank: list[Outcome]) -> float:
    """The worst ratio of a gradient; losses, logits and every token's are checked here, first weights to the bit."""
    for rank, outcome in enumerate(by_rank):
        twin = by_rank[rank - rank % case.tp]
        assert torch.equal(outcome.loss, twin.loss), f"{case}: the loss differs over tp"
        assert torch.equal(outcome.nll_BL, twin.nll_BL), f"{case}: a token's loss differs over tp"
    heads = by_rank[:: case.tp]
    ratios = {
        "loss": ratio(expected.loss, torch.stack([outcome.loss for outcome in heads]).sum(), "loss"),
        "nll": ratio(expected.nll_BL, torch.cat([outcome.nll_BL for outcome in heads]), "nll"),
    }
    for outcome in by_rank[: case.tp] if expected.logits_BLV is not None and by_rank[0].logits_BLV is not None else []:
        ratios["logits"] = ratio(expected.logits_BLV[: case.batch // case.dp], outcome.logits_BLV, "logits")
    assert all(outcome.gradients.keys() == expected.gradients.keys() for outcome in by_rank)
    for name, whole in expected.weights.items():
        found = assembled(case, name, [outcome.weights[name] for outcome in by_rank], summed=False)
        assert torch.equal(whole, found), f"{case}: first weights of {name}"
        found = assembled(case, name, [outcome.gradients[name] for outcome in by_rank], summed=True)
        ratios[name] = ratio(expected.gradients[name], found, name)
    worst = max(ratios, key=lambda name: ratios[name])
    print(f"{ratios[worst]:.1e} {worst}: {case}")
    assert ratios[worst] <= TOLERANCE, f"{case}: {ratios}"
    return ratios[worst]


def train_all(cases: list[Case]) -> list[Outcome]:
    return [train(case) for case in cases]


def compare(kept_ranks: Any, cases: list[Case]) -> None:
    (world,) = {case.world for case in cases}
    by_rank = kept_ranks(train_all, world, cases)
    for case, outcomes in zip(cases, zip(*by_rank, strict=True), strict=True):
        check(case, oracle(case), list(outcomes))


def cases_of(tp: int, **fixed: Any) -> list[Case]:
    """Every value of every switch, and every pair of the ones that meet in a block."""
    kv_heads = (4, 1, 8) if tp == 2 else (4, 2, 1)
    cases = []
    for n, (kv, (tied, chunk, z_loss), activation) in enumerate(
        itertools.product(kv_heads, ((False, 4096, 0.0), (True, 5, 1e-2)), ("none", "full", "selective"))
    ):
        cases.append(
            Case(
                tp=tp,
                kv_heads=kv,
                tied=tied,
                chunk=chunk,
                z_loss=z_loss,
                activation=activation,
                qk_norm=n % 2 == 0,
                mask=n % 4 < 2,
                rows=1 if n % 3 == 0 else 2,
                meta=n % 5 != 0,
                joined=n % 7 == 0,
                **fixed,
            )
        )
    return cases


def test_two_ranks_compute_what_one_process_does(kept_ranks: Any) -> None:
    compare(
        kept_ranks,
        [
            Case(qk_norm=True, mask=True),
            Case(kv_heads=1, tied=True, chunk=5, z_loss=1e-2, activation="selective", rows=1),
            Case(kv_heads=1, tied=True, qk_norm=True, activation="full", joined=True, accumulate=2, meta=False),
            Case(pieces=3, qk_norm=True, mask=True, activation="selective"),
            Case(pieces=2, kv_heads=1, activation="full", joined=True, rows=1),
        ],
    )


@pytest.mark.long
def test_four_ranks_in_pieces(kept_ranks: Any) -> None:
    compare(kept_ranks, [Case(tp=4, kv_heads=2, pieces=3, qk_norm=True, activation="selective")])


@pytest.mark.slow
def test_two_ranks_in_all_ways(kept_ranks: Any) -> None:
    compare(kept_ranks, cases_of(2))


@pytest.mark.long
def test_four_ranks_in_all_ways(kept_ranks: Any) -> None:
    compare(kept_ranks, cases_of(4))


@pytest.mark.long
def test_shards_of_split_tensors(kept_ranks: Any) -> None:
    """136 / 2 rows of the vocabulary are 68, but 44 / 2 of the feed-forward's, 22, leave shares of 8, 8 and 6."""
    compare(kept_ranks, cases_of(2, shard=2, accumulate=2))
    compare(kept_ranks, [Case(shard=3, rows=1, kv_heads=1, qk_norm=True, accumulate=2)])


@pytest.mark.long
def test_replicas_of_split_tensors(kept_ranks: Any) -> None:
    compare(kept_ranks, [Case(replicate=2, tied=True), Case(replicate=2, kv_heads=1, activation="selective")])
    compare(kept_ranks, [Case(replicate=2, shard=2, kv_heads=kv, qk_norm=True, accumulate=2) for kv in (4, 1)])


@pytest.mark.long
def test_compiled_blocks(kept_ranks: Any) -> None:
    cases = [
        Case(compile="aot_eager", kv_heads=1, qk_norm=True, rows=1, joined=True),
        Case(compile="aot_eager", activation="full", accumulate=2),
        Case(compile="aot_eager", activation="selective", mask=True, qk_norm=True, rows=1),
        Case(compile="aot_eager", pieces=3, activation="selective", joined=True),
        Case(compile="inductor", pieces=2, kv_heads=1),
    ]
    compare(kept_ranks, cases)
    compare(kept_ranks, [Case(compile="aot_eager", shard=2, activation="selective", mask=True)])


# ---- precision ----


def floats_of(case: Case) -> tuple[int, set[str]]:
    model, _ = build(case)
    tokens_BL, targets_BL, ids_BL = batch_of(case)
    positions_BL, documents = documents_of(case, ids_BL)
    with Floats() as watch:
        model(tokens_BL, targets_BL, positions_BL, documents)[0].backward()
    return watch.seen, watch.other


def test_a_float64_step_holds_no_float32_tensor(kept_ranks: Any) -> None:
    case = Case(kv_heads=1, qk_norm=True, mask=True, z_loss=1e-2, activation="selective")
    for seen, other in kept_ranks(floats_of, 2, case):
        assert seen > 500
        assert not other


def in_bfloat16(case: Case) -> tuple[Outcome, set[torch.dtype]]:
    outcome = train(case, torch.bfloat16, logits=False)
    return outcome, {gradient.dtype for gradient in outcome.gradients.values()}


def test_bfloat16_keeps_gradients_in_the_dtype_of_weights(kept_ranks: Any) -> None:
    case = Case(kv_heads=1, qk_norm=True)
    by_rank, expected = kept_ranks(in_bfloat16, 2, case), oracle(case)
    outcomes = [outcome for outcome, _ in by_rank]
    assert all(dtypes == {torch.float32} for _, dtypes in by_rank)
    torch.testing.assert_close(outcomes[0].loss.double(), expected.loss, rtol=2e-3, atol=0)
    for name, gradient in expected.gradients.items():
        found = assembled(case, name, [outcome.gradients[name] for outcome in outcomes], summed=True).double()
        assert (found - gradient).norm() < 0.05 * gradient.norm(), name


def refused_overlap() -> str:
    mesh = build_mesh(MeshPlan(tp=2), "cpu")
    assert mesh.tp is not None
    with pytest.raises(InputError) as caught:
        split_tensors(whole_model(Case()), mesh.tp, async_tp=True)
    return str(caught.value)


def test_overlap_is_for_cuda(kept_ranks: Any) -> None:
    said = "parallel.async_tp: expected false on cpu, got true; it needs CUDA"
    assert kept_ranks(refused_overlap, 2) == [said] * 2
