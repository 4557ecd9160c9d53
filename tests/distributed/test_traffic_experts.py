"""What tokens send on their way to experts of other ranks, and FSDP2 for those, against what is counted over gloo.

Which rows travel is worked out here from what the routers chose, token by token; with these rows the plan's calls,
bytes and bytes to other ranks are exact. Without them it expects what the mean of many choices is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import combinations
from math import prod
from typing import Any

import pytest
import torch

from quern.model.moe.config import MoEShape
from quern.model.moe.experts import Experts
from quern.model.moe.layer import MoE
from quern.model.moe.routing import Routing
from quern.parallel.clip import local_part
from quern.parallel.planning.experts import Rows, expected_rows, kept_bytes, ranks_of_a_token
from quern.parallel.planning.mesh import MeshPlan
from quern.parallel.planning.traffic import traffic
from support.distributed.traffic_case import MICRO_BATCH, Case, Collectives, Sent, build, take

Choices = dict[int, list[list[list[int]]]]
"""By layer and micro-batch: of each token of a rank its experts."""


def watched(cases: list[Case]) -> list[tuple[Sent, Counter[Any], Choices]]:
    found = []
    for case in cases:
        parallel, choices = build(case), defaultdict(list)
        if case.plan.pp > 1:  # stages agree on something before their first step
            take(parallel, case)

        def note(layer: int, routed: Routing, choices: Choices = choices) -> None:
            if torch._C._current_graph_task_id() == -1:  # not where a backward computes it again
                choices[layer].append(routed.chosen_TK.tolist())

        for name, block in parallel.model.blocks.named_children():
            if isinstance(block.ffn, MoE):
                block.ffn.route = _noting(block.ffn.route, int(name), note)  # type: ignore[method-assign]
        with Collectives(parallel.gradients.mesh) as watch:
            take(parallel, case)
        found.append((watch.seen, watch.away, dict(choices)))
    return found


def _noting(route: Any, layer: int, note: Any) -> Any:
    def noted(x_TD: torch.Tensor) -> Routing:
        found: Routing = route(x_TD)
        note(layer, found)
        return found

    return noted


def rows_of(case: Case, rank: int, by_rank: list[Choices]) -> dict[int, list[Rows]]:
    """Counted one by one. In each stage a token is at a place of ``ep``, and goes to others."""
    tp, ep, own = case.plan.tp, case.plan.ep, case.shape.moe.num_experts // case.plan.ep
    node, me = case.node or ep, rank // case.plan.tp % case.plan.ep
    first = rank - rank % (tp * ep)  # of the ranks that exchange tokens, with those of tp
    found = {}
    for layer in by_rank[rank]:
        stages = [Counter[str]() for _ in range(1 + (case.node is not None))]
        for place in range(ep):
            for number in range(case.micro_batches):
                experts_of = [
                    chosen for rank in range(tp) for chosen in by_rank[first + place * tp + rank][layer][number]
                ]
                for experts in experts_of:
                    ends = {expert // own for expert in experts}
                    hops = [{(place, end) for end in ends}]
                    if case.node is not None:  # first to the rank with the sender's place on a node
                        over = {(end - end % node + place % node, end) for end in ends}
                        hops = [{(place, there) for there, _ in over}, over]
                    for stage, pairs in zip(stages, hops, strict=True):
                        for begin, end in pairs:
                            stage["leaving"] += begin == me
                            stage["arriving"] += end == me
                            stage["away"] += begin == me != end
                            stage["from_others"] += begin != me == end
        found[layer] = [Rows(**{name: stage[name] for name in Rows.__dataclass_fields__}) for stage in stages]
    return found


def judge(kept_ranks: Any, cases: list[Case]) -> list[list[tuple[Sent, Counter[Any], Choices]]]:
    by_rank = kept_ranks(watched, cases[0].plan.world_size, cases)
    for number, case in enumerate(cases):
        choices = [found[number][2] for found in by_rank]
        for rank, (seen, away, _) in enumerate(found[number] for found in by_rank):
            rows = None if dict(case.experts).get("capacity") else rows_of(case, rank, choices)
            calls, payload, sent = Counter[Any](), Counter[Any](), Counter[Any]()
            for row in traffic(case.step, rank, rows):
                key = row.axis, row.collective, row.ranks
                calls[key] += row.calls
                payload[key] += row.payload
                sent[key] += row.sent * row.axis.startswith("ep")
            assert {key: (calls[key], payload[key]) for key in calls} == seen, f"{case}: rank {rank}"
            assert +sent == away, f"{case}: rank {rank}"
    return by_rank


EIGHT = (("num_experts", 8), ("top_k", 3))
ALONE = (*EIGHT, ("shared_ffn_dim", 0))
EP = Case(MeshPlan(dp_shard=2, ep=2), moe=True, experts=EIGHT, micro_batches=2)
NODES = (("num_experts", 12), ("top_k", 4), ("groups", 3), ("top_groups", 2))


@pytest.mark.slow
def test_two_ranks_with_half_of_the_experts_each(kept_ranks: Any) -> None:
    judge(kept_ranks, [
        replace(EP, dtype=torch.bfloat16), replace(EP, activation="selective", recomputed=2),
        replace(EP, experts=(*EIGHT, ("capacity", 1.5)), activation="full"),
    ])  # fmt: skip


@pytest.mark.long
def test_two_ranks_in_more_ways(kept_ranks: Any) -> None:
    judge(kept_ranks, [
        replace(EP, activation="full", tokens_in_float8=True), replace(EP, reshard=False, zero=1),
        replace(EP, experts=(*EIGHT, ("capacity", 0.5)), tokens_in_float8=True, dtype=torch.bfloat16),
        replace(EP, plan=MeshPlan(cp=2, ep=2), kv_heads=2),
        replace(EP, experts=(*EIGHT, ("capacity", 0.5)), activation="selective"),
        replace(EP, experts=(*EIGHT, ("first_dense", 0), ("every", 2)), layers=4),
    ])  # fmt: skip


@pytest.mark.long
def test_experts_are_dealt_out_over_fewer_ranks_than_the_rest(kept_ranks: Any) -> None:
    plans = [MeshPlan(dp_shard=4, ep=2), MeshPlan(dp_shard=2, tp=2, ep=2), MeshPlan(2, 2, ep=2),
             MeshPlan(dp_shard=2, cp=2, ep=2), MeshPlan(dp_shard=2, pp=2, ep=2)]  # fmt: skip
    cases = [replace(EP, plan=plan, kv_heads=2, reshard=plan.pp == 1) for plan in plans]
    cases += [replace(case, activation=how) for case in cases[:2] for how in ("selective", "full")]
    cases += [replace(cases[4], layers=5, micro_batches=4, schedule="zbv_zero_bubble")]
    cases += [replace(EP, plan=MeshPlan(dp_shard=4, ep=4), node=2, activation=how) for how in ("none", "full")]
    judge(kept_ranks, cases)


@pytest.mark.long
def test_between_nodes_a_token_travels_to_no_more_nodes_than_it_may(kept_ranks: Any) -> None:
    case = replace(EP, plan=MeshPlan(dp_shard=6, ep=6), experts=NODES, node=2, dtype=torch.bfloat16)
    for rank, ((_, away, choices),) in enumerate(judge(kept_ranks, [case])):
        tokens = [{expert // 4 for expert in chosen} for layer in choices.values() for own in layer for chosen in own]
        assert max(map(len, tokens)) == 2  # top_groups
        others = sum(len(nodes - {rank // 2}) for nodes in tokens)
        assert 0 < others < 2 * len(tokens)
        # a row of hidden states in BF16 with 4 numbers and 4 weights in FP32, and the gradient of what comes back
        back = away["ep nodes", "all_to_all", 3] - others * (2 * 2 * 30 + 8 * 4) - 16 * 2 * 4
        assert back > 0
        assert back % (2 * 2 * 30 + 8 * 4) == 0  # the same of tokens of other nodes that have experts here


def kept(case: Case, even: bool) -> int:
    """Bytes of activations that the only layer with experts saves for backward."""
    parallel, saved = build(case), dict[int, int]()
    (experts,) = [module for module in parallel.model.modules() if isinstance(module, Experts)]
    for name, parameter in parallel.model.named_parameters():
        if "router" in name and not even:  # of equals the first are chosen, by all tokens
            torch.nn.init.zeros_(local_part(parameter))

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and tensor.ndim == 2 and tensor.shape[1] > 2 * 3:  # not weights of choices
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    forward = experts.forward

    def watched_forward(*args: Any) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            return forward(*args)

    experts.forward = watched_forward  # type: ignore[method-assign]
    take(parallel, case)
    return sum(saved.values())


@pytest.mark.slow
def test_what_a_layer_keeps_for_backward(kept_ranks: Any) -> None:
    """Half of all assignments a rank in the mean, and at worst all on one: of each its hidden states in and out, and
    four rows of an expert's width. No row that travels is kept beside."""
    case = replace(EP, layers=2, micro_batches=1, experts=ALONE)
    told = kept_bytes(case.step)
    tokens = MICRO_BATCH * case.seq_len
    assert told == {"expected": tokens * 3 * (2 * 30 + 4 * 14) * 8, "most": 2 * tokens * 3 * (2 * 30 + 4 * 14) * 8}
    assert kept_ranks(kept, 2, case, False) == [told["most"], 0]
    found = kept_ranks(kept, 2, case, True)
    assert sum(found) == 2 * told["expected"]
    assert 0 < min(found) < max(found)


@pytest.mark.long
def test_what_a_layer_with_tp_or_a_capacity_keeps(kept_ranks: Any) -> None:
    case = replace(EP, layers=2, micro_batches=1, experts=(*ALONE, ("capacity", 1.1)))
    assert kept_ranks(kept, 2, case, True) == [kept_bytes(case.step)["most"]] * 2
    case = replace(EP, layers=2, micro_batches=1, plan=MeshPlan(dp_shard=2, tp=2, ep=2), kv_heads=2, experts=ALONE)
    assert kept_ranks(kept, 4, case, False) == [kept_bytes(case.step)["most"]] * 2 + [0] * 2


@pytest.mark.parametrize(
    ("experts", "ranks"),
    [(dict(num_experts=8, top_k=3), 4), (dict(num_experts=8, top_k=3), 1), (dict(num_experts=6, top_k=5), 6),
     (dict(num_experts=12, top_k=4, groups=3, top_groups=2), 3),
     (dict(num_experts=12, top_k=2, groups=4, top_groups=2), 6),
     (dict(num_experts=12, top_k=3, groups=4, top_groups=2), 2)],
)  # fmt: skip
def test_expected_is_the_mean_over_all_choices(experts: dict[str, int], ranks: int) -> None:
    moe = MoEShape(ffn_dim=1, **experts)
    held, numbers = moe.num_experts // ranks, []
    for groups in combinations(range(moe.groups), moe.top_groups):
        inside = [expert for expert in range(moe.num_experts) if expert // moe.group_size in groups]
        numbers += [len({expert // held for expert in chosen}) for chosen in combinations(inside, moe.top_k)]
    assert ranks_of_a_token(moe, ranks) * len(numbers) == sum(numbers)


def test_expected_rows_of_a_large_model() -> None:
    """DeepSeek-V3: 256 experts, 8 of a token, on 8 nodes of 8 ranks. Without a limit 5.3 nodes of 8 have one."""
    moe = (("num_experts", 256), ("top_k", 8))
    case = replace(EP, plan=MeshPlan(dp_shard=64, ep=64), experts=moe, node=8)
    tokens = MICRO_BATCH * 8 * 2
    nodes, within = expected_rows(case.step)
    assert nodes.leaving == round(tokens * 8 * (1 - prod((224 - n) / (256 - n) for n in range(8))))
    assert within.leaving == round(tokens * 64 * (1 - prod((252 - n) / (256 - n) for n in range(8))))
    assert nodes.away == round(nodes.leaving * 7 / 8)
    limited, _ = expected_rows(replace(case, experts=(*moe, ("groups", 8), ("top_groups", 4))).step)
    assert tokens * 3.5 < limited.leaving <= tokens * 4
