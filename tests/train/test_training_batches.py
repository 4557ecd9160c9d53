"""``quern.batches``: what another trainer is given is what the order and the shards say, and what its ledger tells."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import quern
from quern.config import dump_yaml
from quern.errors import InputError, QuernError
from quern.lineage.training import TrainingRun
from quern.mixtures.order import Order
from quern.train.batches.tensors import StepTensors
from quern.train.config import TrainConfig
from quern.train.history.ledger import Ledger
from quern.train.training_batches import TrainingBatches
from support.damage import flip
from support.programs import python
from support.train import corpora as CORPORA
from support.train import run_case as CASE

SOURCES = {"web": 60, "code": 25}
LENGTH = 32


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    return CASE.write_corpus(tmp_path / "data", SOURCES)


def settings(tmp_path: Path, paths: list[str], **changes: Any) -> TrainConfig:
    return CASE.settings(tmp_path / "run", paths, **changes)


def take(batches: TrainingBatches, count: int | None = None) -> list[StepTensors]:
    """The next ``count`` steps, of which the last is not said to be complete; without ``count`` all."""
    return list(islice(batches, count))


def streams() -> list[CORPORA.Stream]:
    """The shards that ``write_corpus`` draws."""
    rng = random.Random(1)
    return [
        CORPORA.Stream(CORPORA.make_shards(rng, [[rng.randint(2, 60) for _ in range(size)] for _ in range(2)], 0.05))
        for size in SOURCES.values()
    ]


def kinds(tmp_path: Path) -> list[str]:
    return [entry["kind"] for entry in CASE.ledger(tmp_path / "run")]


# ---- what is given


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("world", [1, 2])
def test_every_sequence_is_the_orders_window_token_by_token(
    tmp_path: Path, paths: list[str], world: int, mask: bool
) -> None:
    config = settings(tmp_path, paths, document_mask=mask, micro_batch=2)
    own = streams()
    given: dict[tuple[int, int], Any] = {}
    valid: dict[int, int] = {}
    for rank in range(world):
        with quern.batches(config, rank, world) as batches:
            assert batches.accumulation == 8 // world // 2
            for batch in batches:
                assert len(batch.micro_batches) == batches.accumulation
                assert valid.setdefault(batch.step, batch.valid_tokens) == batch.valid_tokens
                for micro in batch.micro_batches:
                    edges = micro.cu_seqlens.tolist()
                    flat = [p == 0 for p in micro.positions.reshape(-1).tolist()]
                    assert edges == [*(place for place, begins in enumerate(flat) if begins), 2 * LENGTH]
                    for row, place in enumerate(micro.places.tolist()):
                        assert (batch.step, place) not in given
                        rows = micro.tokens, micro.targets, micro.positions, micro.documents
                        given[batch.step, place] = [tensor[row].tolist() for tensor in rows]
    entries = CASE.ledger(tmp_path / "run")
    order = Order.from_dict(next(entry["spec"] for entry in entries if entry["kind"] == "order"))
    assert len(given) == CASE.STEPS * 8
    counted = dict.fromkeys(range(CASE.STEPS), 0)
    for (step, place), found in given.items():
        source, _, window = order.sample(step * 8 + place)
        expected = own[source].window(window, LENGTH, mask)
        assert found == [expected.tokens, expected.targets, expected.positions, expected.documents]
        counted[step] += sum(target != -100 for target in expected.targets)
    assert counted == valid


def test_the_trainer_reads_the_same_samples(tmp_path: Path, paths: list[str]) -> None:
    """With phases that change the weights and the batch size."""
    phases = [{"first_step": 3, "weights": [1, 2]}, {"first_step": 6, "global_batch": 16}]
    config = settings(tmp_path, paths, phases=phases)
    given = {}
    with quern.batches(config) as batches:
        with pytest.raises(InputError, match="phases: the global batch changes"):
            _ = batches.accumulation
        for batch in batches:
            given[batch.data_step] = {
                place: row
                for micro in batch.micro_batches
                for place, row in zip(micro.places.tolist(), micro.tokens.tolist(), strict=True)
            }
        order = batches.order
    left = CASE.live(CASE.settings(tmp_path / "trained", paths, phases=phases))
    assert left.tokens == given
    assert order == left.start.mixture.order.hash == CASE.ledger(tmp_path / "run")[0]["hash"]


def test_a_resumed_loop_reads_what_an_uninterrupted_one_reads(tmp_path: Path, paths: list[str]) -> None:
    config = settings(tmp_path, paths)
    with quern.batches(config) as batches:
        whole = take(batches)
    again = CASE.settings(tmp_path / "again", paths)
    with quern.batches(again) as batches:
        first = take(batches, 4)
        batches.saved(4)
    # 4 of 8 sequences a step, from another world
    shares = []
    for rank in range(2):
        with quern.batches(again, rank, 2, start=4) as batches:
            assert (batches.step, batches.steps) == (4, CASE.STEPS)
            shares.append(take(batches))
    for step, batch in enumerate(whole):
        parts = [first[step]] if step < 4 else [share[step - 4] for share in shares]
        assert {(part.step, part.data_step, part.valid_tokens) for part in parts} == {(step, step, batch.valid_tokens)}
        rows = [
            sorted(
                (place, *row)
                for part in group
                for micro in part.micro_batches
                for place, row in zip(micro.places.tolist(), micro.targets.tolist(), strict=True)
            )
            for group in (parts, [batch])
        ]
        assert rows[0] == rows[1]


def test_ranks_agree_on_the_order_whoever_opens_first(tmp_path: Path, paths: list[str]) -> None:
    """Also where the resume itself opens a phase: the ledger before and after rank 0's line gives one order."""
    with quern.batches(settings(tmp_path, paths)) as batches:
        take(batches, 4)
    phases = [{"first_step": 3, "weights": [1, 3]}]
    changed = settings(tmp_path, paths, phases=phases)
    with pytest.raises(InputError, match="weights from data step 3"):
        quern.batches(changed, 1, 2, start=4)
    changed = settings(tmp_path, paths, phases=[{"first_step": 4, "weights": [1, 3]}])
    opened = [quern.batches(changed, rank, 2, start=4) for rank in (1, 0, 1)]
    assert len({(own.order, own.fingerprint) for own in opened}) == 1
    steps = [next(own) for own in opened]
    assert all(
        torch.equal(a.targets, b.targets) for a, b in zip(steps[0].micro_batches, steps[2].micro_batches, strict=True)
    )
    for own in opened:
        own.close()


def test_a_file_a_mapping_and_overrides(tmp_path: Path, paths: list[str]) -> None:
    config = settings(tmp_path, paths)
    file = tmp_path / "train.yaml"
    file.write_text(dump_yaml(config))
    found = []
    for given in (config, json.loads(config.model_dump_json()), file, str(file)):
        with quern.batches(given, rank=0, world=1) as batches:
            found.append((batches.order, batches.steps))
    assert len(set(found)) == 1
    with quern.batches(file, start=0, overrides=["steps=3"]) as batches:
        assert len(take(batches)) == 3
    with pytest.raises(InputError, match="overrides: expected only with a config file"):
        quern.batches(config, overrides=["steps=3"])
    with pytest.raises(InputError, match="config: global_bach: unknown key; did you mean 'global_batch'"):
        quern.batches(json.loads(config.model_dump_json()) | {"global_bach": 8})


# ---- what the ledger tells


def stops(tmp_path: Path) -> list[tuple[int, int, bool]]:
    """Of each attempt: the first step, where it is proven to end, and whether it said so."""
    return [(own.step, own.stop, own.ended) for own in TrainingRun(str(tmp_path / "run")).attempts]


def test_a_step_is_complete_when_the_next_one_is_asked_for(tmp_path: Path, paths: list[str]) -> None:
    batches = quern.batches(settings(tmp_path, paths))
    take(batches, 3)
    assert stops(tmp_path) == [(0, 2, False)]  # of step 2 nobody has said it
    batches.complete(3)
    assert stops(tmp_path) == [(0, 3, False)]
    batches.close()
    assert stops(tmp_path) == [(0, 3, True)]
    assert kinds(tmp_path) == ["order", "start", "stopped"]


def test_a_loop_that_looks_ahead_says_what_is_complete(tmp_path: Path, paths: list[str]) -> None:
    batches = quern.batches(settings(tmp_path, paths), looks_ahead=True)
    take(batches, 4)
    assert stops(tmp_path) == [(0, 0, False)]
    batches.complete(2)
    for wrong in (1, 5):
        with pytest.raises(ValueError, match=f"step: expected 2 to 4, the batches handed out, got {wrong}"):
            batches.complete(wrong)
    batches.close()
    assert stops(tmp_path) == [(0, 2, False)]  # steps 2 and 3 may have been read


def test_the_end_is_recorded_once_all_steps_are_complete(tmp_path: Path, paths: list[str]) -> None:
    with quern.batches(settings(tmp_path, paths)) as batches:
        take(batches)
        with pytest.raises(StopIteration):
            next(batches)
    assert kinds(tmp_path) == ["order", "start", "end"]
    with quern.batches(settings(tmp_path, paths), start=CASE.STEPS) as batches:
        assert take(batches) == []
    assert stops(tmp_path) == [(0, CASE.STEPS, True), (CASE.STEPS, CASE.STEPS, True)]


def test_skipped_steps_are_told(tmp_path: Path, paths: list[str]) -> None:
    with quern.batches(settings(tmp_path, paths)) as batches:
        take(batches, 3)
        batches.skipped(1, "overflow")
        with pytest.raises(ValueError, match="step: expected 0 to 2, got 3"):
            batches.skipped(3)
    [told] = [entry for entry in CASE.ledger(tmp_path / "run") if entry["kind"] == "skipped"]
    assert (told["step"], told["data_step"], told["reason"]) == (1, 1, "overflow")
    assert TrainingRun(str(tmp_path / "run")).attempts[0].skipped.tolist() == [1]
    with quern.batches(settings(tmp_path, paths), start=2) as batches:
        take(batches, 4)
        batches.skipped(4)
    told = [entry for entry in CASE.ledger(tmp_path / "run") if entry["kind"] == "skipped"][-1]
    assert (told["step"], told["data_step"]) == (4, 4)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    told_steps = [(row["attempt"], row["step"], row["data_step"]) for row in rows]
    assert told_steps == [(0, 0, 0), (0, 1, 1), (1, 2, 2), (1, 3, 3), (1, 4, 4)]


def test_a_damaged_shard_is_refused_unless_it_is_not_to_be_read(tmp_path: Path, paths: list[str]) -> None:
    shard = Path(paths[0], "shard_00000.bin")
    flip(shard, 100)
    with pytest.raises(InputError, match=r"shard_00000\.bin: is damaged"):
        quern.batches(settings(tmp_path, paths))
    quern.batches(settings(tmp_path, paths, verify_shards=False)).close()


def test_a_start_that_was_not_reached_is_refused(tmp_path: Path, paths: list[str]) -> None:
    config = settings(tmp_path, paths)
    with pytest.raises(InputError, match=r"start: no run has begun in .*: expected 0, got 2"):
        quern.batches(config, start=2)
    batches = quern.batches(config)
    take(batches, 4)
    batches.close()  # as a kill leaves it: of step 3 nobody said that it is complete
    before = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    with pytest.raises(
        InputError, match="has completed 3 steps since it was last opened, got 5; give the number of optimizer steps"
    ):
        quern.batches(config, start=5)
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == before
    quern.batches(config, start=4).close()  # nothing was read: the ledger gets no line
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == before
    with quern.batches(config, start=4) as batches:  # the loop may have saved before it asked for another batch
        batches.complete(next(batches).step + 1)
    assert stops(tmp_path) == [(0, 4, False), (4, 5, True)]
    with pytest.raises(InputError, match="has completed 5 steps since it was last opened, got 6"):
        quern.batches(config, start=6)  # it said where it ended
    with quern.batches(config, start=2) as batches:
        batches.complete(next(batches).step + 1)
    told = [(entry["kind"], entry["step"]) for entry in CASE.ledger(tmp_path / "run")[1:]]
    assert told == [
        ("start", 0), ("complete", 4), ("resume", 4), ("stopped", 5), ("resume", 2), ("stopped", 3),
    ]  # fmt: skip


def test_what_was_saved_survives_the_loss_of_the_metrics(tmp_path: Path, paths: list[str]) -> None:
    with quern.batches(settings(tmp_path, paths)) as batches:
        take(batches, 5)
        batches.saved(5)
        take(batches, 2)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with quern.batches(settings(tmp_path, paths), start=5) as batches:
        batches.complete(next(batches).step + 1)
    assert stops(tmp_path)[-1] == (5, 6, True)


def test_a_start_that_was_forgotten_is_refused(
    tmp_path: Path, paths: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(tmp_path, paths)
    with quern.batches(config) as batches:
        take(batches, 4)
    with pytest.raises(InputError, match=r"start: the run in .* has completed 3 steps; give the number of optimizer"):
        quern.batches(config)
    with quern.batches(config, start=0) as batches:
        assert next(batches).step == 0
    assert "the run goes back from step 3 to step 0" in caplog.text


def test_a_checkpoint_may_become_durable_some_steps_later(tmp_path: Path, paths: list[str]) -> None:
    with quern.batches(settings(tmp_path, paths)) as batches:
        take(batches, 4)
        batches.saved(2)
        batches.saved(4)
        with pytest.raises(ValueError, match="step: expected 0 to 4, the batches handed out, got 5"):
            batches.saved(5)
    told = [(entry["kind"], entry.get("step")) for entry in CASE.ledger(tmp_path / "run")[2:]]
    assert told == [("complete", 2), ("complete", 4), ("stopped", 4)]


def test_one_process_does_not_open_a_run_twice(tmp_path: Path, paths: list[str]) -> None:
    """A lock of the process's own would not keep it out; what is closed, or forgotten, is no longer open."""
    config = settings(tmp_path, paths)
    batches = quern.batches(config)
    next(batches)
    with pytest.raises(QuernError, match="this process reads batches of the run already; close those first"):
        quern.batches(config, start=0)
    batches.close()
    with pytest.raises(ValueError, match="the batches are closed"):
        next(batches)
    batches = quern.batches(config, start=0)
    del batches
    gc.collect()
    quern.batches(config, start=0).close()


def test_what_is_open_is_closed_if_the_ledger_takes_no_line(
    tmp_path: Path, paths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = quern.batches(settings(tmp_path, paths))
    batches.complete(next(batches).step + 1)
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "append", lambda *given, **told: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batches.close()
    batches.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "quern-prefetch" and thread.is_alive()]
    quern.batches(settings(tmp_path, paths), start=1).close()


def test_batch_sizes_of_the_past_do_not_count(tmp_path: Path, paths: list[str]) -> None:
    config = settings(tmp_path, paths, phases=[{"first_step": 3, "global_batch": 16}])
    with quern.batches(config) as batches:
        take(batches, 5)
        batches.saved(5)
    with quern.batches(config, start=5) as batches:
        assert batches.accumulation == 4
    with quern.batches(config, start=2) as batches, pytest.raises(InputError, match="phases: the global batch changes"):
        _ = batches.accumulation


def test_a_model_of_transformers_attends_inside_documents_alone(tmp_path: Path, paths: list[str]) -> None:
    """Other tokens in all documents of a row but its last change nothing of the last one's logits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=384, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(shape)
    with quern.batches(settings(tmp_path, paths)) as batches:
        micro = next(batches).micro_batches[0]
    changed = 0
    for row in range(len(micro.tokens)):
        own = micro.documents[row] == micro.documents[row].max()
        inputs = {
            name: value[row : row + 1] if isinstance(value, torch.Tensor) else value
            for name, value in micro.for_transformers().items()
        }
        other = torch.where(own, inputs["input_ids"], 1 + inputs["input_ids"] % 200)
        logits = [model(**(inputs | {"input_ids": ids})).logits[0] for ids in (inputs["input_ids"], other)]
        assert torch.equal(logits[0][own], logits[1][own])
        changed += int((~own).any()) and int(not torch.equal(logits[0][~own], logits[1][~own]))
    assert changed > 0


def test_runs_of_two_trainers_do_not_share_a_folder(tmp_path: Path, paths: list[str]) -> None:
    config = settings(tmp_path, paths)
    with quern.batches(config) as batches:
        next(batches)
    with pytest.raises(InputError, match=r"run_dir: .* holds a run of a trainer that reads by quern\.batches"):
        CASE.live(config)
    CASE.live(CASE.settings(tmp_path / "trained", paths, steps=4))
    with pytest.raises(InputError, match=r"run_dir: .* holds a run of quern train"):
        quern.batches(CASE.settings(tmp_path / "trained", paths))


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        ((2, 2), {}, "rank: expected 0 to 1 of a world of 2, got 2"),
        ((0, 3), {}, "global_batch: expected a multiple of 12"),
        ((0, 1, 99), {}, "start: expected 0 to 9"),
        ((0, 1), {"resume": {"step": 3}}, "resume.step: expected null"),
        ((0, 1), {"seq_len": 1 << 20}, "seq_len"),
    ],
)
def test_wrong_arguments_are_refused_before_a_run_begins(
    tmp_path: Path, paths: list[str], arguments: tuple[int, ...], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        quern.batches(settings(tmp_path, paths, **changes), *arguments)
    assert not (tmp_path / "run" / "ledger.jsonl").exists() or kinds(tmp_path) == []


def test_a_data_run_knows_who_read_it(tmp_path: Path, paths: list[str]) -> None:
    with quern.batches(settings(tmp_path, paths)) as batches:
        next(batches)
    [line] = (tmp_path / "data" / "consumers.jsonl").read_text().splitlines()
    assert json.loads(line)["train_run"] == str(tmp_path / "run")


def test_the_dataset_gives_micro_batches_one_by_one(tmp_path: Path, paths: list[str]) -> None:
    with quern.batches(settings(tmp_path, paths)) as batches:
        whole = [micro.for_transformers() for batch in batches for micro in batch.micro_batches]
    with quern.batches(settings(tmp_path, paths), start=0) as batches:
        loader = torch.utils.data.DataLoader(batches.dataset(), batch_size=None)
        for found, expected in zip(loader, whole, strict=True):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected if name != "use_cache")
    with quern.batches(settings(tmp_path, paths), start=0) as batches:
        workers = torch.utils.data.DataLoader(batches.dataset(), batch_size=None, num_workers=1)
        with pytest.raises(InputError, match="num_workers: expected 0"):
            next(iter(workers))


def test_two_trainers_at_once_are_refused(tmp_path: Path, paths: list[str]) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(dump_yaml(settings(tmp_path, paths)))
    with quern.batches(file):
        other = [python(), "-c", f"import quern; quern.batches({str(file)!r})"]
        found = subprocess.run(other, capture_output=True, text=True, timeout=300)
    assert found.returncode == 1
    assert "another trainer writes here" in found.stderr
    quern.batches(file).close()
