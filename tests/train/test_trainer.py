"""The loop's own promises: what the guard ends and notes, the held-out loss, what is written of each step."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from quern.errors import InputError, QuernError
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer
from support.oracles import plain_loop as plain
from support.train import corpora
from support.train import run_case as case

pytestmark = pytest.mark.slow


@pytest.fixture
def paths(tmp_path):
    return case.write_corpus(tmp_path / "data")


def nan_from(first: int):
    return lambda data_step: float("nan") if data_step >= first else 1.0


def test_a_run_that_only_skips_is_ended(tmp_path, paths):
    config = case.settings(tmp_path / "run", paths, guard={"max_skips": 2}, checkpoint={"interval": 1})
    message = r"step 5: 3 steps in a row were skipped \(guard\.max_skips 2\); the weights are those after 3 steps\."
    with pytest.raises(QuernError, match=message) as error:
        case.live(config, factor=nan_from(3))
    assert not isinstance(error.value, InputError)
    assert error.value.exit_code == 1
    assert "then go on with resume.step=3, the newest checkpoint from before, and data_skip or" in str(error.value)
    skipped = [entry for entry in case.ledger(tmp_path / "run") if entry["kind"] == "skipped"]
    assert [(entry["step"], entry["data_step"], entry["reason"]) for entry in skipped] == [
        (step, step, "non_finite") for step in (3, 4, 5)
    ]
    # a launcher that starts it again does not give it as many anew
    with pytest.raises(QuernError, match="step 5: 3 steps in a row were skipped"):
        case.live(config, factor=nan_from(3))
    assert case.live(config).complete  # the cause is gone


def test_a_run_that_only_skips_names_no_checkpoint_that_it_has_left_or_has_not(tmp_path, paths):
    config = case.settings(tmp_path / "run", paths, guard={"max_skips": 1}, checkpoint={"interval": 2}, steps=4)
    assert case.live(config).complete
    again = case.settings(tmp_path / "run", paths, guard={"max_skips": 1}, resume={"step": 2}, steps=9)
    with pytest.raises(QuernError, match=r"those after 5 steps\. .* resume\.step=2, the newest checkpoint from before"):
        case.live(again, factor=nan_from(5))
    fresh = case.settings(tmp_path / "fresh", paths, guard={"max_skips": 1})
    with pytest.raises(QuernError, match="give another run_dir to start over: here is no checkpoint from before"):
        case.live(fresh, factor=nan_from(1))


def test_a_batch_without_a_target_is_said_to_have_none(tmp_path, caplog, capfd):
    empty = corpora.make_shards(random.Random(1), [[1] * 400])  # EOTs, each the first token of its document
    paths = corpora.write_run(tmp_path / "data", {"eots": empty})
    assert case.live(
        case.settings(tmp_path / "run", paths, steps=2, schedule={"warmup": 1}, metrics={"live": True})
    ).complete
    assert "step 1 skipped (non_finite: no position of its batch is a target), 2 in a row of 100" in caplog.messages
    assert "step 2/2  loss none (no target)  norm not finite" in capfd.readouterr().err
    row = case.rows(tmp_path / "run")[1]
    assert (row["loss"], row["valid_tokens"], row["non_finite"]) == (None, 0, True)


def test_the_end_says_that_the_last_steps_were_skipped_and_that_the_loss_is_not_finite(tmp_path, caplog):
    paths = case.write_corpus(tmp_path / "data", {"web": 40, "web.val": 20})[:1]

    def warnings(run, **changes):
        caplog.clear()
        assert case.live(case.settings(tmp_path / run, paths, **changes), factor=nan_from(7)).complete
        names = ("were skipped:", "was skipped:", "held-out")
        return [text for text in caplog.messages if any(name in text for name in names)]

    assert warnings("skips") == ["the last 2 steps were skipped: the weights are those after step 7"]
    assert warnings("one", steps=8) == ["the last step was skipped: the weights are those after step 7"]
    assert warnings("none", steps=7) == []
    assert warnings("spoilt", guard={"non_finite": "continue"}) == [
        "the held-out loss is not finite: the weights are of no use"
    ]


def test_skips_that_do_not_follow_each_other_end_nothing(tmp_path, paths):
    config = case.settings(tmp_path / "run", paths, guard={"max_skips": 1})
    left = case.live(config, factor=lambda data_step: float("nan") if data_step % 2 else 1.0)
    assert left.complete
    assert sum(bool(row.get("skipped")) for row in case.rows(tmp_path / "run").values()) == 4


@pytest.mark.parametrize("action", ["continue", "skip"])
def test_a_spike_is_noted_and_skipped_if_asked(tmp_path, paths, action):
    config = case.settings(tmp_path / "run", paths, guard={"spike": action})
    left = case.live(config, factor=lambda data_step: 1e4 if data_step == 6 else 1.0)
    (spike,) = [entry for entry in case.ledger(tmp_path / "run") if entry["kind"] == "spike"]
    row = case.rows(tmp_path / "run")[6]
    assert (spike["step"], spike["data_step"]) == (6, 6)
    assert (spike["loss"], spike["grad_norm"]) == (row["loss"], row["grad_norm"])
    assert spike["grad_norm_z"] > 10 > spike["loss_z"]
    skipped = [entry for entry in case.ledger(tmp_path / "run") if entry["kind"] == "skipped"]
    assert [(entry["step"], entry["reason"]) for entry in skipped] == ([(6, "spike")] if action == "skip" else [])
    assert row["skipped"] is (action == "skip")
    assert left.state["guard.entered"] == case.STEPS - (action == "skip")


def held_out_loss(shards, weights, shape, seq_len: int, count: int, document_mask: bool) -> tuple[float, int]:
    """(summed loss, targets) of the first ``count`` windows, one at a time."""
    stream = [token for shard in shards for doc in shard for token in doc.tokens]
    spans, start = [], 0
    for doc in (doc for shard in shards for doc in shard):
        spans.append((start, len(doc.tokens), doc.purged))
        start += len(doc.tokens)
    total, targets = 0.0, 0
    for index in range(min(count, plain.num_windows(stream, seq_len))):
        window = plain.window(stream, spans, index, seq_len, document_mask)
        batch = plain.Batch([window.tokens], [window.targets], [window.positions], [window.documents])
        total += plain.token_losses(weights, shape, batch).sum().item()
        targets += sum(target != plain.IGNORE for target in window.targets)
    return total, targets


@pytest.mark.parametrize(("document_mask", "windows"), [(True, None), (False, 5), (True, 5)])
def test_the_held_out_loss(tmp_path, document_mask, windows):
    """In float64, against one window at a time; the last micro-batch is filled up with windows that do not count."""
    import random

    rng = random.Random(4)
    made = {
        name: case.CORPORA.make_shards(rng, [[rng.randint(2, 60) for _ in range(size)] for _ in range(2)], purged=0.1)
        for name, size in {"web": 60, "web.val": 9, "code": 25, "code.val": 4}.items()
    }
    paths = case.CORPORA.write_run(tmp_path / "data", made)
    config = case.settings(
        tmp_path / "run", [paths[0], paths[2]], precision="fp64", document_mask=document_mask, steps=3, micro_batch=4,
        validation={"windows": windows, "interval": 1},
    )  # fmt: skip
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        trainer.fit()
        weights = {name: value.detach() for name, value in trainer.model.named_parameters()}
    shape = config.model.shape(case.CORPORA.VOCAB_SIZE)
    found = case.rows(tmp_path / "run")
    assert {-1, -2} <= found.keys()
    last, totals = found[-3], [0.0, 0]
    for name in ("web", "code"):
        loss, targets = held_out_loss(
            made[f"{name}.val"], weights, shape, 32, windows or 1000, document_mask=document_mask
        )
        assert last["sources"][name]["tokens"] == targets > 0
        assert math.isclose(last["sources"][name]["loss"], loss / targets, rel_tol=1e-10)
        totals = [totals[0] + loss, totals[1] + targets]
    assert last["tokens"] == totals[1]
    assert math.isclose(last["loss"], totals[0] / totals[1], rel_tol=1e-10)


def test_held_out_windows_move_nothing(tmp_path, paths):
    """Two runs, one of which measures after every step: the same bits."""
    more = case.write_corpus(tmp_path / "more", {"web": 60, "code": 25, "web.val": 9})
    often = case.live(case.settings(tmp_path / "often", more[:2], validation={"interval": 1}))
    never = case.live(case.settings(tmp_path / "never", paths, validation={"interval": 0}))
    assert case.differences(often.state, never.state) == []
    assert sorted(step for step in case.rows(tmp_path / "often") if step < 0) == list(range(-case.STEPS, 0))


def test_a_run_begins_with_given_weights_and_nothing_else_of_them(tmp_path, paths):
    given = case.live(case.settings(tmp_path / "given", paths))
    folder = tmp_path / "given" / "checkpoints" / f"step_{case.STEPS:08d}"
    config = case.settings(
        tmp_path / "run", paths, init_from=str(folder), optimizer={"lr": 1e-30}, steps=1, schedule={"warmup": 1}
    )
    left = case.live(config)
    assert left.start.step == 0
    for name, value in given.state.items():
        if name.startswith("model."):
            assert torch.allclose(value, left.state[name], rtol=0, atol=1e-20)
        if name.startswith("step."):
            assert left.state[name] == 1
    # a resumed run is its own, whatever init_from says
    again = case.live(case.settings(tmp_path / "run", paths, init_from="/nowhere", steps=3))
    assert again.start.step == 1


def test_every_step_has_a_line(tmp_path, paths):
    case.live(case.settings(tmp_path / "run", paths, model={"num_layers": 2}))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(case.STEPS))
    assert [line["tokens"] for line in steps] == [8 * 32 * (step + 1) for step in range(case.STEPS)]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert abs(steps[0]["loss"] - math.log(case.CORPORA.VOCAB_SIZE)) < 0.1
