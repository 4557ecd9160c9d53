"""The experts that documents chose, by a step's record: against the model run again on each micro-batch, and on several
ranks against one."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from quern.cli.main import app
from quern.errors import InputError
from quern.lineage.forensics.experts import experts_of
from quern.lineage.steps import read_step
from quern.lineage.training import TrainingRun
from quern.model.moe.layer import MoE
from quern.parallel.experts.loads import Routed
from quern.parallel.local import LocalRanks
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer
from quern.train.step.routed import as_plain, counts_of
from support.distributed.ranks import start_ranks
from support.lineage import poison_case
from support.processes import files_of

MOE = {"num_experts": 5, "top_k": 2, "ffn_dim": 12, "first_dense": 1}
MODEL = {"num_layers": 3, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "tied_embeddings": False, "moe": MOE}
SPARSE: dict[str, Any] = {
    "model": MODEL, "precision": "fp64", "steps": 3, "schedule": {"warmup": 1}, "global_batch": 8,
    "forensics": {"steps": [2], "window": 2}, "guard": {"loss_z": 1e9, "grad_norm_z": 1e9},
}  # fmt: skip

Counts = dict[tuple[int, int, int, int], Counter[int]]
"""By step, place in the global batch, start of the document in its sequence, and layer."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("poison")
    poison_case.write_data(folder / "data")
    return folder / "data"


def by_hand(run: Path, data: Path, **changes: Any) -> Counts:
    """Train, and before each update run the model on each micro-batch once more, with hooks at its routers."""
    found: Counts = defaultdict(Counter)
    taken = {}

    def look(trainer: Any, step: int) -> None:
        layers = {int(n): block.ffn for n, block in trainer.model.blocks.items() if isinstance(block.ffn, MoE)}
        batch = taken[trainer.data_step(step)]
        for inputs, origin in zip(batch.micro_batches, batch.origins, strict=True):
            chosen: dict[int, torch.Tensor] = {}
            for layer, ffn in layers.items():
                ffn.on_routing = lambda own, layer=layer, chosen=chosen: chosen.update({layer: own.chosen_TK})
            with torch.no_grad():
                trainer.model(inputs.tokens_BL, inputs.targets_BL, inputs.positions_BL, documents=inputs.documents)
            for row, place in enumerate(origin.places.tolist()):
                ids = [0] * inputs.tokens_BL.shape[1]
                if inputs.documents is not None:
                    ids = inputs.documents.ids_BL[row].tolist()
                for layer, ffn in layers.items():
                    ffn.on_routing = None
                    own = chosen[layer].view(*inputs.tokens_BL.shape, -1)[row].tolist()
                    for at, experts in enumerate(own):
                        found[step, place, ids.index(ids[at]), layer].update(experts)

    config = poison_case.settings(run, data, **{**SPARSE, **changes})
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        take = trainer.feed.take
        trainer.feed.take = lambda n: taken.setdefault(n, take(n))  # type: ignore[method-assign]
        trainer.on_gradients = look
        trainer.fit()
    return found


def recorded(run: Path, name: str = "step_00000002.json") -> tuple[Counts, dict[int, list[list[int]]]]:
    """What the file has, and by step the batch's totals."""
    found: Counts = {}
    totals = {}
    for step in json.loads((run / "forensics" / name).read_text())["steps"]:
        told = step["experts"]
        totals[step["step"]] = told["total"]
        for place, starts, counts in zip(told["place"], told["starts"], told["counts"], strict=True):
            for start, by_layer in zip(starts, counts, strict=True):
                for layer, row in zip(told["layers"], by_layer, strict=True):
                    found[step["step"], place, start, layer] = Counter({e: n for e, n in enumerate(row) if n})
    return found, totals


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Counts]:
    run = tmp_path_factory.mktemp("trained") / "run"
    return run, by_hand(run, data)


def check(run: Path, counted: Counts) -> None:
    found, totals = recorded(run)
    assert found == {key: own for key, own in counted.items() if key[0] in (1, 2)}
    for step, total in totals.items():
        assert len(total) == 2
        for layer, row in zip((1, 2), total, strict=True):
            every: Counter[int] = sum((own for key, own in counted.items() if key[::3] == (step, layer)), Counter())
            assert row == [every[e] for e in range(5)]


def test_counts_of_documents_are_those_of_the_model_run_again(trained: tuple[Path, Counts]) -> None:
    check(*trained)
    assert len({key[2] for key in trained[1]}) > 8


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_checkpointing": "full", "micro_batch": 4},
        pytest.param({"document_mask": False, "validation": {"interval": 1, "windows": 2}}, marks=pytest.mark.long),
    ],
    ids=["computed again", "rows"],
)
def test_they_are_so_too(data: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Where blocks are computed again, where documents are not told apart, and beside a validation."""
    counted = by_hand(tmp_path / "run", data, **changes)
    check(tmp_path / "run", counted)
    assert ({key[2] for key in counted} == {0}) == ("document_mask" in changes)


LAYOUTS: list[dict[str, Any]] = [
    {"dp_shard": 2}, {"pp": 2}, {"tp": 2}, {"cp": 2, "cp_method": "ring"},
]  # fmt: skip


@pytest.mark.long
def test_ranks_together_count_what_one_process_does(trained: tuple[Path, Counts], data: Path, tmp_path: Path) -> None:
    with LocalRanks(2, timeout_s=600, files=files_of(poison_case.train), preload=("pytest", "yaml")) as ranks:
        for number, layout in enumerate(LAYOUTS):
            run = tmp_path / str(number)
            ranks.call(poison_case.train, str(run), str(data), {**SPARSE, "parallel": layout})
            assert recorded(run) == recorded(trained[0]), layout


EVEN = {"num_experts": 6, "top_k": 2, "ffn_dim": 12, "first_dense": 1}
DEALT: list[dict[str, Any]] = [{"dp_shard": 2, "tp": 2, "ep": 2}, {"dp_shard": 4, "ep": 2}]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [pytest.param(own, marks=pytest.mark.long) for own in DEALT],
    ids=["ep2tp2", "ep2fsdp2"],
)
def test_ranks_that_hold_other_experts_count_what_one_process_does(
    data: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """And so the command says the same of both. Shares of each gradient's norm add up, of experts too."""
    changes = {**SPARSE, "model": {**MODEL, "moe": EVEN}, "micro_batch": 1}
    poison_case.train(str(tmp_path / "one"), str(data), changes)
    with start_ranks(4, poison_case.train, timeout_s=600) as ranks:
        ranks.call(poison_case.train, str(tmp_path / "many"), str(data), {**changes, "parallel": layout})
    assert recorded(tmp_path / "many") == recorded(tmp_path / "one")
    shown = [CliRunner().invoke(app, ["lineage", "experts", str(tmp_path / run), "2"]) for run in ("one", "many")]
    assert [own.exit_code for own in shown] == [0, 0]
    assert shown[0].stdout.replace("/one", "/many") == shown[1].stdout
    assert "layer 1: " in shown[0].stdout
    one, many = (
        json.loads((tmp_path / run / "forensics" / "step_00000002.json").read_text()) for run in ("one", "many")
    )
    assert any(".experts.w2" in name for name in one["parameters"])
    assert many["parameters"].keys() == one["parameters"].keys()
    for name, norm in one["parameters"].items():
        assert many["parameters"][name] == pytest.approx(norm, rel=1e-6), name
    for step, other in zip(many["steps"], one["steps"], strict=True):
        assert step["layers"] == pytest.approx(other["layers"], rel=1e-6)
        assert step["grad_norm"] == pytest.approx(math.hypot(*step["layers"].values()), rel=1e-6)
        assert step["sequences"]["place"] == other["sequences"]["place"]
        assert step["sequences"]["loss"] == pytest.approx(other["sequences"]["loss"], rel=1e-6)


def test_the_command_tells_a_document_s_experts_beside_the_batch_s(trained: tuple[Path, Counts]) -> None:
    run, counted = trained
    totals, told = recorded(run)[1], experts_of(TrainingRun(str(run)), 2)
    first = told["documents"][0]
    for own in first["layers"]:
        counts = counted[2, first["place"], first["start"], own["layer"]]
        best = sorted(range(5), key=lambda e: (-counts[e], e))[:4]
        batch = [totals[2][own["layer"] - 1][e] / (8 * poison_case.SEQ_LEN) for e in best]
        assert [row["expert"] for row in own["experts"]] == best
        assert [row["share"] for row in own["experts"]] == pytest.approx([counts[e] / first["tokens"] for e in best])
        assert [row["batch"] for row in own["experts"]] == pytest.approx(batch)
    by_step = read_step(TrainingRun(str(run)), 2).documents
    (m,) = (
        m for m in range(len(by_step.sequences))
        if (by_step.sequences[m], by_step.input_starts[m]) == (first["place"], first["start"])
    )  # fmt: skip
    assert by_step.input_stops[m] - by_step.input_starts[m] == first["tokens"]
    shown = CliRunner().invoke(app, ["lineage", "experts", str(run), "2", "--doc", first["doc_id"]])
    assert shown.exit_code == 0, shown.output
    assert first["doc_id"] in shown.stdout
    share = first["layers"][0]["experts"][0]
    assert f"layer 1: {share['expert']} {share['share']:.0%} ({share['batch']:.0%})" in shown.stdout
    assert all(row["alone"] for row in told["documents"])


def test_what_the_record_does_not_have_is_one_line(trained: tuple[Path, Counts], tmp_path: Path) -> None:
    run = TrainingRun(str(trained[0]))
    with pytest.raises(InputError, match=f"no counts of document {'0' * 32}: 16 sequences of steps 1 to 2, "):
        experts_of(run, 2, doc="0" * 32)
    with pytest.raises(InputError, match=r'^--doc: expected a doc_id of 32 hex digits, got "00"$'):
        experts_of(run, 2, doc="00")
    path = trained[0] / "forensics" / "step_00000002.json"
    text = path.read_text()
    try:
        for change, said in [
            (lambda own: own.pop("experts"), "has no counts of experts"),
            (lambda own: own["experts"]["counts"].pop(), "is damaged"),
            (lambda own: own["experts"]["counts"][0].pop(), "expected counts"),
            (lambda own: own["experts"].update(layers=["x", "\x1b[31m"]), "expected integers"),
            (lambda own: own["experts"]["starts"][0].reverse(), "expected 0 and then ascending"),
        ]:
            raw = json.loads(text)
            for own in raw["steps"]:
                change(own)
            path.write_text(json.dumps(raw))
            with pytest.raises(InputError, match=said):
                experts_of(run, 2)
    finally:
        path.write_text(text)


def test_records_have_as_many_counts_as_fit() -> None:
    """Of the sequences that are asked for, in that order; each rank has those that it read."""
    edges, documents = torch.tensor([0, 3, 8, 16, 24]), [2, 1, 1]
    counts = torch.arange(2 * 4 * 5, dtype=torch.int32).reshape(2, 4, 5)
    routed, places = Routed(edges, torch.zeros(0), counts), np.array([4, 0, 7])
    origin = SimpleNamespace(places=places)
    for most, expected in ((9, []), (10, [7]), (30, [7, 4]), (39, [7, 4]), (40, [7, 4, 0])):
        found = counts_of([routed], [origin], [7, 9, 4, 0], 8, most)
        assert list(found) == expected
        assert [len(starts) for starts, _ in found.values()] == [documents[[4, 0, 7].index(own)] for own in expected]
    other = {9: ([0], np.ones((1, 2, 5), np.int32))}
    plain = as_plain([found, found, other], [7, 9, 4, 0], torch.zeros(2, 5), [1, 2], 39)
    assert plain["place"] == [7, 9]
    assert plain["counts"][0] == (2 * counts[:, 3:]).transpose(0, 1).tolist()
    assert as_plain([found], [9, 7], torch.zeros(2, 5), [1, 2], 39)["place"] == []
