"""The matrix and what judges it: every case can be run, and no kind of difference goes unseen."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quern.parallel.planning.mesh import MeshPlan
from quern.parallel.planning.schedules import SCHEDULES, check_micro_batches
from quern.tokenize.shards import ShardReader
from quern.train.parity.compare import Comparison, compare, ratio_of, whole
from quern.train.parity.corpus import LONG, SOURCES, documents, write_corpus
from quern.train.parity.layouts import CONTEXT, DEALT, LAYOUTS
from quern.train.parity.matrix import (
    FACTORS,
    STEPS,
    VOCAB_SIZE,
    Case,
    context,
    covering,
    everything,
    legal,
    quick,
    sparse,
)
from quern.train.parity.published import PUBLISHED
from quern.train.parity.run import Outcome, case_config
from quern.train.parity.sizes import EXPERTS
from quern.train.setup import check
from support.distributed import parity_oracle
from support.oracles.plain_loop import IGNORE, Weights


def test_the_quick_set_has_every_layout_schedule_and_world() -> None:
    cases = quick()
    assert len(cases) >= 30
    assert len(set(map(str, cases))) == len(cases)
    assert {case.layout for case in cases if case.on.cp == 1} == set(LAYOUTS)
    assert {case.on.method for case in cases if case.on.cp > 1} == {"ulysses", "allgather", "ring"}
    assert {case.on.world for case in cases} == set(range(1, 9))
    for pp in (2, 4):
        assert {case.schedule for case in cases if case.layout == f"pp{pp}"} == set(SCHEDULES)
    pipelines = {(case.schedule, case.more) for case in cases if case.schedule is not None}
    assert pipelines == set(itertools.product(SCHEDULES, (False, True)))
    factors = ("activation", "more", "mask", "tied", "sizes", "z_loss")
    for one, other in itertools.combinations(factors, 2):
        pairs = set(itertools.product(FACTORS[one], FACTORS[other]))
        plain = [case for case in cases if case.float8 is None]
        assert {(getattr(case, one), getattr(case, other)) for case in plain} == pairs
    assert sum(case.float8 is not None for case in cases) >= 2


def test_everything_is_each_legal_case_once() -> None:
    cases = everything()
    names = Counter(map(str, cases))
    assert max(names.values()) == 1
    assert all(map(legal, cases))
    on = [
        case for case in cases
        if (case.skip, case.float8, case.experts) == (None,) * 3 and not case.ramp and case.pieces == case.on.cp == 1
    ]  # fmt: skip
    without_pipelines = sum(layout.pp == 1 for layout in LAYOUTS.values())
    splitting = sum(kind.splits_backward for kind in SCHEDULES.values())
    rows = without_pipelines * 3 + (len(LAYOUTS) - without_pipelines) * (3 * (len(SCHEDULES) - splitting) + splitting)
    assert len(on) == rows * 2 * 2 * 2


def test_what_is_not_legal() -> None:
    assert not legal(Case("fsdp2", schedule="1f1b"))
    assert not legal(Case("pp2"))
    assert not legal(Case("pp2", "full", schedule="zbv_zero_bubble"))
    assert legal(Case("pp2", "full", schedule="gpipe"))


@pytest.mark.slow
def test_every_case_passes_the_trainers_own_checks(tmp_path: Path) -> None:
    write_corpus(str(tmp_path / "data"))
    for case in covering(everything(), lambda case: [(case.layout, case.schedule, case.more, case.sizes, case.ramp)]):
        config = case_config(case, str(tmp_path / "data"), str(tmp_path / "run"))
        check(config, case.on.world)
        assert case.micro_batch * case.accumulate * case.on.dp == case.computation.global_batch
        if case.schedule is not None:
            assert check_micro_batches(case.schedule, case.on.pp, case.num_stages, case.accumulate) is None
            assert case.accumulate >= case.num_stages


def test_a_layout_is_what_its_name_says() -> None:
    for name, layout in LAYOUTS.items():
        keep = name.endswith("keep")
        used, _, zero = name.partition("zero")
        sizes, used = {"ddp": 1, "fsdp": 1, "tp": 1, "pp": 1}, used.removesuffix("keep").removesuffix("by2")
        for axes in re.findall(r"[a-z]+[\dx]+", used):
            axis, size = re.fullmatch(r"([a-z]+)([\dx]+)", axes).groups()  # type: ignore[union-attr]
            if axis == "hsdp":
                sizes["ddp"], sizes["fsdp"] = map(int, size.split("x"))
            else:
                sizes[axis] = int(size)
        assert (layout.replicate, layout.shard, layout.tp, layout.pp) == tuple(sizes.values()), name
        assert layout.reshard is (False if keep else None) or name == "fsdp4by2", name
        assert layout.zero == (int(zero) if zero else None), name
        assert layout.grouped == (name != "alone")


def test_coordinates_are_the_meshs() -> None:
    for layout in [*LAYOUTS.values(), *CONTEXT.values(), *DEALT.values()]:
        sizes = {"dp_replicate": layout.replicate, "dp_shard": layout.shard, "tp": layout.tp, "pp": layout.pp}
        plan = MeshPlan(**sizes, cp=layout.cp, ep=layout.ep)
        assert plan.world_size == layout.world
        for rank in range(layout.world):
            place = plan.coordinates(rank)
            shard = place["dp_shard"] * layout.cp + place["cp"]
            assert layout.coordinates(rank) == (place["pp"], place["dp_replicate"], shard, place["tp"])
            inner = plan.expert_ranks(rank, layout.ep)[1]  # neighbours among the shards, the first of them a multiple
            assert [layout.coordinates(other)[2] % layout.ep for other in inner] == list(range(layout.ep))
            alike = {layout.coordinates(other)[2] // layout.ep for other in inner}
            assert alike == {shard // layout.ep}


def test_the_cases_that_deal_tokens_out_have_each_way_with_each_axis_and_kind_of_step() -> None:
    cases = context()
    for method in ("ulysses", "allgather", "ring", "usp"):
        own = [case for case in cases if case.on.method == method]
        for axis in ("replicate", "tp", "pp"):
            assert any(getattr(case.on, axis) > 1 for case in own), (method, axis)
        assert {case.mask for case in own} == {True, False}
        assert {case.activation for case in own} == {"none", "full", "selective"}
        assert any(case.more for case in own)
    assert len({case.schedule for case in cases if case.schedule}) >= 4
    assert any(case.skip is not None for case in cases)
    assert any(case.ramp for case in cases)


def test_the_cases_that_deal_experts_out_have_each_axis_and_kind_of_step() -> None:
    cases = [case for case in sparse() if case.on.ep > 1]
    assert {case.layout for case in cases} == set(DEALT)
    assert len(cases) == len(set(map(str, cases))) == 27
    assert {case.on.ep for case in cases} == {2, 4, 8}
    for axis in ("replicate", "tp", "pp", "cp"):
        assert any(getattr(case.on, axis) > 1 for case in cases), axis
    left = {case.on.shards // case.on.ep for case in cases}
    assert left == {1, 2, 3}
    assert any(case.on.node not in (None, case.on.ep) for case in cases)
    assert {case.experts for case in cases} == {"eight", "empty", "places", "bias", "broad"}
    assert {case.activation for case in cases} == {"none", "full", "selective"}
    assert len({case.schedule for case in cases if case.schedule}) >= 5
    for kind in ("more", "ramp", "tied", "float8"):
        assert any(getattr(case, kind) for case in cases), kind
    assert any(case.skip is not None for case in cases)
    ways = set()
    for case in cases:
        held, left = EXPERTS[str(case.experts)][0]["num_experts"] // case.on.ep, case.on.shards // case.on.ep
        ways.add((held % left == 0, dict(case.computation.model)["dim"] % left == 0))
    assert ways >= {(True, True), (False, True), (False, False)}  # along experts, along the width, and unevenly


def test_cases_of_published_faults_have_what_would_show_them(tmp_path: Path) -> None:
    chosen = {str(case): case for case in quick() if str(case) in PUBLISHED}
    assert chosen.keys() == PUBLISHED.keys() <= set(map(str, everything()))
    faults = [fault for own in PUBLISHED.values() for fault in own.values()]
    assert len(set(faults)) == len(faults)
    case_of = {source: chosen[name] for name, own in PUBLISHED.items() for source in own}
    numbered = {int(source.split()[-1]): case for source, case in case_of.items() if "finding" in source}
    assert set(numbered) == {3, 7, 8, 9, 10, 11, 12}
    data = parity_oracle.make_data(tmp_path)
    for number, axis in ((3, "dp"), (9, "cp")):
        case = numbered[number]
        assert getattr(case.on, axis) == case.on.world == 2
        assert case.mask
        targets = [
            sum(int((batch.targets != IGNORE).sum()) for batch in step)
            for step in parity_oracle.batches(case.computation, data)
        ]
        assert targets[0] % 2 == 1  # two ranks cannot have equally many
        weights: Weights = parity_oracle.first_weights(case.computation)
        assert parity_oracle.validation(case.computation, data, weights)["tokens"] % 2 == 1
    heads = numbered[11]
    model = dict(heads.computation.model)
    assert numbered[8].on == heads.on
    assert heads == case_of["TransformerEngine (ROCm) #715"]
    assert model["qk_norm"]
    assert model["num_heads"] > heads.on.tp == heads.on.world == 2
    assert numbered[7].on.tp == 2 < numbered[7].on.world
    assert numbered[10].on.tp == 2
    assert EXPERTS[str(numbered[10].experts)][1].get("balance_over", "sequence") == "sequence"
    stages = numbered[12]
    assert stages == case_of["Megatron-LM #844"]
    assert stages.tied
    assert (stages.on.pp, stages.on.shards) == (2, 2)
    assert case_of["Megatron-LM #906"].on.cp == 2


def test_the_corpus_is_ragged_and_read_as_written(tmp_path: Path) -> None:
    paths = write_corpus(str(tmp_path / "data"))
    for (name, shards), path in zip(documents().items(), paths, strict=True):
        assert Path(path).name == name
        tokens = [token for shard in shards for document in shard for token in document.tokens]
        reader = ShardReader(path)
        assert len(reader.shards) == len(shards)
        assert sum(shard.tokens for shard in reader.shards) == len(tokens)
        data = b"".join(Path(path, shard.bin).read_bytes() for shard in reader.shards)
        assert data == b"".join(token.to_bytes(2, "little") for token in tokens)
    all_documents = [document for shards in documents().values() for shard in shards for document in shard]
    assert 0 < sum(document.purged for document in all_documents) < len(all_documents) / 3
    assert len({len(document.tokens) for document in all_documents}) > 10
    assert any(not shard for shards in documents().values() for shard in shards)
    assert set(documents()) == {*SOURCES, LONG}


# ---- the judge ----

CASE = Case("pp2fsdp2tp2", tied=True, sizes="six", schedule="1f1b")
NAMES = {
    0: ("embed.weight", "blocks.0.attention.wq.weight", "blocks.0.attention.wo.weight", "blocks.0.ffn_norm.weight"),
    1: ("embed.weight", "blocks.1.attention.wk.weight", "blocks.1.ffn.w2.weight", "norm.weight"),
}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {
        name: torch.randn((6 + number,) if "norm" in name else (10, 6), generator=generator, dtype=torch.float64)
        for number, name in enumerate(sorted({name for names in NAMES.values() for name in names}))
    }
    vocabulary = torch.randn(130, 5, generator=generator, dtype=torch.float64)
    vocabulary[VOCAB_SIZE:] = 0
    return found | {"embed.weight": vocabulary}


def expected() -> Outcome:
    row = {"data_step": 0, "valid_tokens": 9, "skipped": False, "non_finite": False, "loss": 2.5, "grad_norm": 1.5}
    gradients = [tensors(seed) for seed in range(STEPS)]
    updates = {name: torch.tensor(3.0) for name in tensors(0)}
    rows = [{**row, "step": step, "lr": 1e-3} for step in range(STEPS)]
    held_out = {"loss": torch.tensor(3.5, dtype=torch.float64), "tokens": torch.tensor(9.0, dtype=torch.float64)}
    written = {"held-out figure": held_out, "stored value": tensors(10)}
    kinds = ("start", "checkpoint", "end")
    return Outcome("", rows, kinds, gradients, tensors(7), tensors(8), tensors(9), updates, written)


def pieces(result: Outcome) -> list[Outcome]:
    """What the eight ranks of pp 2 × dp_shard 2 × tp 2 hold, by hand: this rank of tp's half, and of that its half."""

    def part(name: str, tensor: torch.Tensor, shard: int, tp: int) -> torch.Tensor:
        if tensor.ndim == 0:
            return tensor.clone()
        if "norm" not in name:
            dim = 1 if name.endswith(("wo.weight", "w2.weight")) else 0
            half = tensor.shape[dim] // 2
            tensor = tensor.narrow(dim, tp * half, half)
        half = (len(tensor) + 1) // 2
        return tensor[half * shard : half * (shard + 1)].clone()

    ranks = []
    for rank in range(8):
        pp, shard, tp = rank // 4, rank // 2 % 2, rank % 2
        tables = [{name: part(name, table[name], shard, tp) for name in NAMES[pp]} for table in result.tables.values()]
        written = {} if rank else {what: dict(table) for what, table in result.written.items()}
        ranks.append(Outcome("", result.rows, result.kinds, tables[:STEPS], *tables[STEPS:], written))
    return ranks


def judged(change: Callable[[list[Outcome]], None]) -> Comparison:
    ranks = pieces(expected())
    change(ranks)
    return compare(CASE, ranks, expected())


def test_pieces_are_put_together() -> None:
    found = Comparison()
    for table, other in zip(
        whole(CASE, pieces(expected()), found).tables.values(), expected().tables.values(), strict=True
    ):
        assert table.keys() == other.keys()
        assert all(torch.equal(table[name], other[name]) for name in other)
    assert found.problems == []
    assert judged(lambda ranks: None).problems == []
    assert judged(lambda ranks: None).ratio == 0


def spoil(table: str, name: str, rank: int, off: float) -> Callable[[list[Outcome]], None]:
    def change(ranks: list[Outcome]) -> None:
        ranks[rank].tables[table][name].view(-1)[0].add_(off)

    return change


@pytest.mark.parametrize(
    ("table", "name", "rank", "off", "said"),
    [
        ("gradient step 0", "blocks.0.attention.wq.weight", 3, 1e-10, "first gradient of blocks.0.attention.wq.weight"),
        ("gradient step 1", "blocks.0.attention.wo.weight", 1, 1e-8, "gradient of blocks.0.attention.wo.weight step 1"),
        ("weight", "blocks.1.attention.wk.weight", 4, 1e-8, "weight of blocks.1.attention.wk.weight"),
        ("first moment", "blocks.1.ffn.w2.weight", 7, 1e-8, "first moment of blocks.1.ffn.w2.weight"),
        ("second moment", "blocks.1.ffn.w2.weight", 6, math.nan, "second moment of blocks.1.ffn.w2.weight: inf"),
        ("weight", "norm.weight", 5, 1e-15, "weight of norm.weight: tp ranks hold other bits"),
        ("weight", "embed.weight", 4, 1e-15, "weight of embed.weight: tied embeddings are not the same bits"),
        ("updates", "norm.weight", 6, 1.0, "updates of norm.weight on (1, 0): 4.0, expected 3.0"),
    ],
)
def test_one_element_on_one_rank_is_seen(table: str, name: str, rank: int, off: float, said: str) -> None:
    problems = judged(spoil(table, name, rank, off)).problems
    assert any(problem.startswith(said) for problem in problems), problems


def test_padding_counts() -> None:
    def change(ranks: list[Outcome]) -> None:
        for rank in (3, 7):  # the last rows, at both ends
            ranks[rank].weights["embed.weight"][-1, 0] = 1e-13

    assert judged(change).problems == ["weight of embed.weight: padding is not zero"]


def test_a_tensor_too_few_or_too_many_is_seen() -> None:
    def less(ranks: list[Outcome]) -> None:
        for rank in ranks:
            rank.weights.pop("norm.weight", None)

    def more(ranks: list[Outcome]) -> None:
        for rank in ranks:
            rank.weights.setdefault("norm.weight", torch.zeros(1))

    assert judged(less).problems[0].startswith("names of weight")
    assert "weight of norm.weight: on several stages" in judged(more).problems


@pytest.mark.parametrize(("name", "value"), [("loss", 2.5 + 1e-9), ("grad_norm", None), ("valid_tokens", 8)])
def test_figures_of_a_step_count(name: str, value: float | None) -> None:
    def change(ranks: list[Outcome]) -> None:
        ranks[0].rows = [{**row, name: value} if row["step"] == 1 else row for row in ranks[0].rows]

    (problem,) = judged(change).problems
    assert "step 1" in problem


@pytest.mark.parametrize(
    ("what", "name", "off"),
    [
        ("held-out figure", "loss", 1e-9),
        ("held-out figure", "tokens", 1),
        ("stored value", "blocks.1.ffn.w2.weight", 1e-9),
    ],
)
def test_what_a_run_writes_counts(what: str, name: str, off: float) -> None:
    def change(ranks: list[Outcome]) -> None:
        ranks[0].written[what][name] = ranks[0].written[what][name] + off

    def lose(ranks: list[Outcome]) -> None:
        del ranks[0].written[what][name]

    (problem,) = judged(change).problems
    assert problem.startswith(f"{what} of {name}: ")
    assert judged(lose).problems[0].startswith(f"names of {what}: ")


def test_a_run_that_ends_otherwise_is_seen() -> None:
    def change(ranks: list[Outcome]) -> None:
        ranks[0].kinds = ("start", "skipped", "checkpoint", "end")
        ranks[0].gradients.pop()
        for rank in ranks[1:]:
            rank.gradients.pop()

    said = "\n".join(judged(change).problems)
    assert "ledger" in said
    assert "tables" in said


def test_a_replica_with_other_bits_is_seen() -> None:
    case = dataclasses.replace(CASE, layout="ddp2", schedule=None)
    outcome = dataclasses.replace(expected(), digest="a")
    assert compare(case, [outcome, Outcome(digest="a")], expected()).problems == []
    assert "replica 1" in compare(case, [outcome, Outcome(digest="b")], expected()).problems[0]


def test_ratios() -> None:
    one, zero = torch.tensor([2.0, -4.0], dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    assert ratio_of(one + 1, one) == 0.25
    assert ratio_of(zero, zero) == 0
    assert ratio_of(one * 1e-300, zero) == math.inf
    assert ratio_of(one.float(), one) == math.inf
    assert ratio_of(one[:1], one) == math.inf
    assert ratio_of(torch.empty(0), torch.empty(0)) == 0
