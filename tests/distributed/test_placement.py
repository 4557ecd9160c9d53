"""Experts that get other places: even loads of ranks, and a model that stays what it is."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor

from quern.errors import InputError
from quern.model.moe.config import MoEShape
from quern.parallel.planning.checks import Task, check_layout
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan
from quern.parallel.planning.placing import placing
from quern.train.config import TrainConfig
from quern.train.parity.corpus import write_corpus
from quern.train.parity.matrix import Case
from quern.train.parity.run import case_config
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer
from quern.train.trainer import Trainer

STEPS = 5


class KilledError(Exception):
    """In place of a signal."""


def greatest(order: list[int], counts: list[int], ep: int) -> int:
    each = len(counts) // ep
    return max(sum(counts[expert] for expert in order[rank * each :][:each]) for rank in range(ep))


def shape_of(experts: int, groups: int = 1) -> MoEShape:
    return MoEShape(num_experts=experts, top_k=1, ffn_dim=4, groups=groups)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_experts_are_dealt_out_evenly_and_stay_in_their_group(data: st.DataObject) -> None:
    ep, each = data.draw(st.sampled_from([(2, 1), (2, 3), (2, 4), (3, 2), (4, 2)]))
    number = ep * each
    groups = data.draw(st.sampled_from([size for size in range(1, number + 1) if number % size == 0]))
    counts = data.draw(st.lists(st.integers(0, 50), min_size=number, max_size=number))
    moe = shape_of(number, groups)
    order = placing(counts, moe, ep)
    assert sorted(order) == list(range(number))
    if groups > 1:
        assert [expert // moe.group_size for expert in order] == [place // moe.group_size for place in range(number)]
    before = greatest(list(range(number)), counts, ep)
    assert greatest(order, counts, ep) < before or order == list(range(number))
    if groups == 1 and number <= 6:  # Graham's bound for the greedy choice, by all that there are
        best = min(greatest(list(other), counts, ep) for other in itertools.permutations(range(number)))
        assert greatest(order, counts, ep) <= max(best * 4 / 3, best + max(counts) / 3)


def test_the_worst_rank_gets_what_an_even_one_has() -> None:
    assert placing([9, 8, 1, 2], shape_of(4), 2) == [0, 2, 1, 3]
    assert placing([5, 5, 5, 5], shape_of(4), 2) == [0, 1, 2, 3]


def trained(data: str, run_dir: str, case: Case, interval: int | None, kills: list[int]) -> dict[str, Any]:
    """A run in several lives, all but the last of which end in a step: whole tensors of the last, and of all its
    places."""
    config = case_config(case, data, run_dir).model_dump() | {"steps": STEPS}
    config["model"]["moe"] |= {"groups": 1, "top_groups": 1}
    config["experts"] |= {"place_interval": interval, "balance_over": "global"}
    config["checkpoint"] |= {"interval": 1}
    for at in [*kills, None]:

        def look(trainer: Trainer, step: int, at: int | None = at) -> None:
            if step == at:
                raise KilledError

        try:
            with open_ranks("cpu") as ranks, open_trainer(TrainConfig.model_validate(config), ranks) as trainer:
                trainer.on_gradients = look
                trainer.fit()
                found: dict[str, Any] = {}
                for name, value in trainer.parallel.model.named_parameters():
                    moments = {k: v for k, v in trainer.optimizer.state[value].items() if k != "step"}
                    found |= {name: whole(value)} | {f"{name} {kind}": whole(own) for kind, own in moments.items()}
                found |= {name: value.clone() for name, value in trainer.parallel.model.named_buffers()}
        except KilledError:
            continue
    rows = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}  # the last of each
    found["losses"] = torch.tensor([losses[step] for step in range(STEPS)])
    ledger = [json.loads(line) for line in Path(run_dir, "ledger.jsonl").read_text().splitlines()]
    ranks = [row["experts"]["max_over_mean_of_ranks"] for row in rows if row["kind"] == "step"]
    assert all(1 <= value <= case.on.ep for value in ranks)
    found["ledger"] = [(entry["step"], entry["layers"]) for entry in ledger if entry["kind"] == "placement"]
    return found


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def all_trained(data: str, folder: str, runs: list[tuple[str, Case, int | None, list[int]]]) -> list[dict[str, Any]]:
    return [trained(data, str(Path(folder, name)), case, interval, kills) for name, case, interval, kills in runs]


def check_places(plain: dict[str, Any], placed: dict[str, Any], layers: int) -> None:
    """The same model, but for the numbers of experts, which the ledger tells."""
    order = {str(layer): torch.arange(8) for layer in range(layers)}
    steps = [step for step, _ in placed["ledger"]]
    assert steps
    assert set(steps) <= {2, 4}
    for _, moved in placed["ledger"]:
        for layer, own in moved.items():
            order[layer] = order[layer][own]
    assert any(not torch.equal(own, torch.arange(8)) for own in order.values())
    torch.testing.assert_close(placed["losses"], plain["losses"], rtol=1e-12, atol=0)
    for name, tensor in plain.items():
        if name in ("losses", "ledger"):
            continue
        expected = tensor
        if ".ffn.experts." in name or ".ffn.router." in name or ".ffn.bias" in name:
            expected = tensor[order[name.split(".")[1]]]
        scale = expected.abs().max()
        assert (placed[name] - expected).abs().max() <= 1e-11 * scale, name


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("placement"))
    write_corpus(folder)
    return folder


def test_the_model_stays_what_it_is_and_resumes_to_the_same_bits(kept_ranks: Any, corpus: str, tmp_path: Path) -> None:
    case = Case("ep2", experts="eight", more=True)
    runs: list[Any] = [("plain", case, None, []), ("placed", case, 2, []), ("broken", case, 2, [1, 3])]
    for plain, placed, broken in kept_ranks(all_trained, 2, corpus, str(tmp_path), runs):
        check_places(plain, placed, 2)
        assert broken.keys() == placed.keys()
        for name, value in placed.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, broken[name]), name
        assert [entry for entry in broken["ledger"] if entry not in placed["ledger"]] == []


@pytest.mark.long
@pytest.mark.parametrize("layout", ["ep2fsdp2", "ep2tp2", "ep2pp2"])
def test_on_other_layouts(run_ranks: Any, corpus: str, tmp_path: Path, layout: str) -> None:
    case = Case(layout, experts="eight", schedule="1f1b" if "pp" in layout else None)
    runs: list[Any] = [("plain", case, None, []), ("placed", case, 2, [])]
    for plain, placed in run_ranks(all_trained, 4, corpus, str(tmp_path), runs):
        if "pp" in layout:  # a rank has its stage alone
            assert plain.keys() == placed.keys()
        check_places(plain, placed, 4)


@pytest.mark.parametrize(("plan", "host"), [(MeshPlan(dp_shard=2), False), (MeshPlan(dp_shard=2, ep=2), True)])
def test_places_that_nobody_can_take_are_refused(plan: MeshPlan, host: bool) -> None:
    config = case_config(Case("ep2", experts="eight"), "data", "run")
    layout = Layout(torch.float64, plan, host_state=host, balancing=config.experts.balancing, seq_len=17)
    shape = config.model.shape(127)
    check_layout(shape, layout, Task({}))
    layout = replace(layout, balancing=replace(layout.balancing, place_interval=3))
    with pytest.raises(InputError, match=r"experts\.place_interval: evens the loads of ranks"):
        check_layout(shape, layout, Task({}))
