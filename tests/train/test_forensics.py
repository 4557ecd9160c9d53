"""What is written down of a step: held against the model run on each sequence alone, and gradients summed by hand."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.parallel.context.inputs import Inputs
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer
from quern.train.step.sequences import PIECES, cut, piece_tokens
from quern.train.trainer import Trainer
from support.train.run_case import ledger, live, settings, write_corpus

QUIET = {"guard": {"loss_z": 1e9, "grad_norm_z": 1e9}}
"""No step of so small a run is a spike by itself."""


@dataclass
class Known:
    """Of a step, by hand."""

    losses: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Place → nats and targets of the sequence alone."""
    nats: dict[int, list[float]] = field(default_factory=dict)
    """Place → nats at each position."""
    samples: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    squares: dict[str, float] = field(default_factory=dict)


def alone(model: Any, inputs: Inputs, row: int) -> list[float]:
    """Nats at each position of a row, its documents one by one, each as a sequence of its own."""
    tokens, targets = inputs.tokens_BL[row], inputs.targets_BL[row]
    ids = torch.zeros_like(tokens) if inputs.documents is None else inputs.documents.ids_BL[row]
    nats = torch.zeros(len(tokens), dtype=torch.float64)
    for document in ids.unique().tolist():
        where = (ids == document).nonzero()[:, 0]
        logits = model(tokens[where][None])[0].double()
        for place, own in zip(where.tolist(), logits.log_softmax(-1), strict=True):
            if targets[place] >= 0:
                nats[place] = -own[targets[place]]
    return nats.tolist()


def run(config: Any, spoil: Callable[[Trainer, int], None] | None = None) -> dict[int, Known]:
    """A whole run; every step by hand."""
    found: dict[int, Known] = {}
    taken: dict[int, Any] = {}

    def look(trainer: Trainer, step: int) -> None:
        if spoil is not None:
            spoil(trainer, step)
        own = found[step] = Known()
        batch = taken[trainer.data_step(step)]
        with torch.no_grad():
            for inputs, origin in zip(batch.micro_batches, batch.origins, strict=True):
                for row, place in enumerate(origin.places.tolist()):
                    nats = alone(trainer.model, inputs, row)
                    own.nats[place] = nats
                    own.losses[place] = sum(nats), int((inputs.targets_BL[row] >= 0).sum())
                    own.samples[place] = tuple(int(c[row]) for c in (origin.sources, origin.epochs, origin.windows))
        for name, parameter in trainer.model.named_parameters():
            assert parameter.grad is not None
            own.squares[name] = sum(value * value for value in parameter.grad.double().flatten().tolist())

    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        take = trainer.feed.take

        def remembered(data_step: int) -> Any:
            taken[data_step] = take(data_step)
            return taken[data_step]

        trainer.feed.take = remembered  # type: ignore[method-assign]
        trainer.on_gradients = look
        trainer.fit()
    return found


def fit(config: Any, on_gradients: Callable[[Trainer, int], None]) -> bool:
    """A whole run; whether it came to its end."""
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        trainer.on_gradients = on_gradients
        trainer.fit()
        return trainer.complete


def asking_in(step: int) -> Callable[[Trainer, int], None]:
    """Somebody sends the signal while the step is in work."""
    return lambda trainer, now: os.kill(os.getpid(), signal.SIGUSR1) if now == step else None


def files(run_dir: Path) -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in sorted((run_dir / "forensics").glob("*"))}


def rows(step: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """By place."""
    columns = step["sequences"]
    return {
        place: {name: column[i] for name, column in columns.items()} for i, place in enumerate(columns["place"])
    }  # fmt: skip


def check(step: dict[str, Any], own: Known, seq_len: int, whole: bool) -> None:
    """One step of a file."""
    found = rows(step)
    assert list(found) == sorted(own.losses) == list(range(len(found)))
    for place, row in found.items():
        nats, targets = own.losses[place]
        assert (row["source"], row["epoch"], row["window"]) == own.samples[place]
        assert row["targets"] == targets
        if targets:
            assert row["loss"] == pytest.approx(nats / targets, rel=1e-7)
        assert row["finite"]
    layers: dict[str, float] = {}
    for name, square in own.squares.items():
        layer = ".".join(name.split(".")[:2]) if name.startswith("blocks") else name.split(".")[0]
        layers[layer] = layers.get(layer, 0.0) + square
    assert step["layers"] == {name: pytest.approx(math.sqrt(square), rel=1e-7) for name, square in layers.items()}
    assert step["grad_norm"] == pytest.approx(math.sqrt(sum(own.squares.values())), rel=1e-7)
    within, size = step["within"], piece_tokens(seq_len)
    assert within["tokens"] == size
    if whole:
        assert sorted(within["place"]) == [place for place in found if found[place]["targets"]]
    for place, nats_P in zip(within["place"], within["loss"], strict=True):
        expected = [sum(own.nats[place][at : at + size]) for at in range(0, seq_len, size)]
        assert nats_P == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_corpus(tmp_path_factory.mktemp("data"), {"web": 90, "code": 40})


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"document_mask": False, "seq_len": 100, "micro_batch": 4, "model": {"tied_embeddings": False},
         "validation": {"interval": 1, "windows": 3}},
        {"seq_len": 130, "micro_batch": 8, "activation_checkpointing": "full", "z_loss": 0.1},
        pytest.param({"compile": {"enabled": True, "backend": "eager"}}, marks=pytest.mark.long),
        # scales of a row's own, so that a document alone has the same
        pytest.param({"float8": {"recipe": "rowwise"}}, marks=pytest.mark.long),
    ],
    ids=["no documents, validation", "long", "compile", "float8"],
)  # fmt: skip
def test_losses_and_norms_are_those_of_the_sequences_alone_and_of_the_gradients(
    tmp_path: Path, paths: list[str], changes: dict[str, Any]
) -> None:
    config = settings(
        tmp_path / "run", paths, **QUIET, precision="fp64", steps=4, forensics={"steps": [1, 3], "window": 2}, **changes
    )
    by_hand = run(config)
    written = files(tmp_path / "run")
    assert list(written) == ["step_00000001.json", "step_00000003.json"]
    for number, file in zip((1, 3), written.values(), strict=True):
        assert file["reasons"] == ["configured"]
        assert file["decision"] == "continued"
        assert (file["step"], file["data_step"], file["attempt"]) == (number, number, 0)
        assert [step["step"] for step in file["steps"]] == [number - 1, number]
        for step in file["steps"]:
            check(step, by_hand[step["step"]], config.seq_len, whole=True)
        last = by_hand[number].squares
        assert file["parameters"] == {n: pytest.approx(math.sqrt(s), rel=1e-7) for n, s in last.items()}
        assert file["layout"]["seq_len"] == config.seq_len


@pytest.mark.slow
def test_a_step_that_is_not_finite_and_one_that_spikes_are_written_down(tmp_path: Path, paths: list[str]) -> None:

    def factor(data_step: int) -> float:
        return {6: float("nan"), 8: 1e4}.get(data_step, 1.0)

    config = settings(tmp_path / "run", paths, steps=10, guard={"min_history": 4, "loss_z": 1e9, "grad_norm_z": 100})
    live(config, factor=factor)
    written = files(tmp_path / "run")
    assert list(written) == ["step_00000006.json", "step_00000008.json"]
    broken, spike = written.values()
    assert (broken["reasons"], broken["decision"]) == (["non_finite"], "skipped")
    last = broken["steps"][-1]
    assert (last["grad_norm"], last["non_finite"], last["skipped"]) == (None, True, True)
    assert set(last["layers"].values()) == {None}
    assert last["loss"] is not None
    assert all(rows(last)[place]["loss"] is not None for place in rows(last))
    assert (spike["reasons"], spike["decision"]) == (["grad_norm_spike"], "continued")
    assert [step["step"] for step in spike["steps"]] == list(range(1, 9))
    assert [step["skipped"] for step in spike["steps"]] == [step == 6 for step in range(1, 9)]
    lines = [line for line in ledger(tmp_path / "run") if line["kind"] in ("spike", "skipped")]
    assert [line["step"] for line in lines] == [6, 8]


@pytest.mark.slow
def test_it_changes_no_bit_and_off_it_writes_nothing(tmp_path: Path, paths: list[str]) -> None:
    on, off = (
        live(settings(tmp_path / name, paths, **QUIET, forensics=changes)).state
        for name, changes in {"on": {"steps": [3]}, "off": {"window": 0}}.items()
    )
    assert all(torch.equal(on[name], off[name]) for name in on)
    assert not (tmp_path / "off" / "forensics").exists()


@pytest.mark.slow
def test_a_step_that_is_run_again_has_a_file_of_its_own(tmp_path: Path, paths: list[str]) -> None:
    changes: dict[str, Any] = {**QUIET, "forensics": {"steps": [5]}, "checkpoint": {"interval": 4}}
    live(settings(tmp_path / "run", paths, **changes))
    live(settings(tmp_path / "run", paths, **changes, resume={"step": 4}, data_skip=2))
    written = files(tmp_path / "run")
    assert list(written) == ["step_00000005.attempt_1.json", "step_00000005.json"]
    again, first = written.values()
    assert (first["attempt"], first["data_step"], len(first["steps"])) == (0, 5, 6)
    assert (again["attempt"], again["data_step"], len(again["steps"])) == (1, 7, 2)


@pytest.mark.slow
def test_no_more_files_than_asked_for_and_it_is_said_once(
    tmp_path: Path, paths: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    wanted = {"steps": [1, 3, 4, 5], "max_files": 2}
    with caplog.at_level(logging.WARNING):
        live(settings(tmp_path / "run", paths, **QUIET, forensics=wanted))
    assert list(files(tmp_path / "run")) == ["step_00000001.json", "step_00000003.json"]
    assert len([r for r in caplog.records if "forensics.max_files" in r.message]) == 1
    live(
        settings(tmp_path / "run", paths, **QUIET, forensics={**wanted, "steps": [10]}, steps=12)
    )  # files of before count
    assert len(files(tmp_path / "run")) == 2


@pytest.mark.slow
def test_a_streak_is_written_down_once_and_a_step_that_is_asked_for_all_the_same(
    tmp_path: Path, paths: list[str]
) -> None:
    """One bad stretch must not use up the files of a whole run."""

    def spoil(trainer: Trainer, step: int) -> None:
        if step in (2, 3, 4, 7):
            next(iter(trainer.model.parameters())).grad.fill_(math.nan)

    fit(settings(tmp_path / "run", paths, **QUIET, forensics={"steps": [4]}, steps=10), spoil)
    reasons = {file["step"]: file["reasons"] for file in files(tmp_path / "run").values()}
    assert reasons == {2: ["non_finite"], 4: ["non_finite", "configured"], 7: ["non_finite"]}


@pytest.mark.slow
def test_a_signal_in_the_last_step_is_not_lost_without_a_word(tmp_path: Path, paths: list[str], caplog: Any) -> None:
    fit(settings(tmp_path / "run", paths, **QUIET, steps=3), asking_in(2))
    assert files(tmp_path / "run") == {}
    assert any("SIGUSR1" in record.message for record in caplog.records)


@pytest.mark.slow
def test_a_disk_that_refuses_is_a_warning(tmp_path: Path, paths: list[str], caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "forensics").write_text("a file where the folder should be")
    left = live(settings(tmp_path / "run", paths, forensics={"steps": [2]}))
    assert left.complete
    assert any("cannot be written" in record.message for record in caplog.records)


@pytest.mark.slow
def test_a_signal_asks_for_the_step_in_work(tmp_path: Path, paths: list[str]) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    assert fit(settings(tmp_path / "run", paths, **QUIET), asking_in(4))
    assert signal.getsignal(signal.SIGUSR1) == before
    (file,) = files(tmp_path / "run").values()
    assert file["reasons"] == ["requested"]
    assert file["step"] == 5  # the first whose loss was reduced after it


@pytest.mark.slow
def test_somebody_elses_listener_stays(tmp_path: Path, paths: list[str]) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        fit(settings(tmp_path / "run", paths, **QUIET, steps=3), asking_in(0))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]
    assert not files(tmp_path / "run")


@pytest.mark.slow
def test_overflows_by_which_a_loss_scale_finds_its_size_are_no_reason(tmp_path: Path, paths: list[str]) -> None:
    config = settings(tmp_path / "run", paths, precision="fp16")
    live(config, factor=lambda data_step: float("inf") if data_step == 5 else 1.0)
    assert any(line["kind"] == "skipped" for line in ledger(tmp_path / "run"))
    assert not any(file["reasons"] == ["non_finite"] for file in files(tmp_path / "run").values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"forensics": {"window": 0, "steps": [1]}}, "window of 1 or more"),
        ({"forensics": {"steps": [99]}}, "forensics.steps: expected steps below 9"),
        ({"forensics": {"max_files": 0}}, "max_files"),
        ({"forensics": {"window": -1}}, "window"),
    ],
)
def test_what_a_config_may_not_say(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings("run", ["RUN/tokens/web"], **changes)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 129, 1000, 2048])
def test_pieces_hold_every_position_once(length: int) -> None:
    values = torch.arange(3 * 2 * length, dtype=torch.float64).view(3, 2, length)
    size = piece_tokens(length)
    pieces = cut(values)
    assert pieces.shape[-1] <= PIECES
    for piece in range(pieces.shape[-1]):
        assert torch.equal(pieces[..., piece], values[..., piece * size : (piece + 1) * size].sum(-1))
    assert -(-length // size) == pieces.shape[-1]
