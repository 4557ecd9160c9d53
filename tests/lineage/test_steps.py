"""What a step read, beside the book of it; and who computed what, beside the loader that dealt it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quern.errors import InputError
from quern.lineage.forensics.file import losses_of
from quern.lineage.steps import read_step
from quern.lineage.training import TrainingRun
from quern.mixtures.order import Order
from quern.parallel.context.inputs import Sharing
from quern.parallel.planning.context import Context
from quern.train.batches.boundaries import open_boundaries
from quern.train.batches.corpus import Corpus
from quern.train.batches.feed import to_device
from quern.train.batches.loader import IGNORE, Loader
from quern.train.history.ledger import Ledger
from support.lineage import histories as H
from support.lineage import runs

pytestmark = pytest.mark.slow


def open_history(seed: int, folder: Path) -> tuple[Any, TrainingRun]:
    folder.mkdir()
    made = H.make_history(random.Random(seed), folder)
    return made, made.open()


def test_every_step_of_every_attempt_is_what_the_book_says(tmp_path: Path) -> None:
    steps = 0
    for seed in range(30):
        made, run = open_history(seed, tmp_path / str(seed))
        for (number, step), (data, applied) in made.facts.items():
            attempt = run.attempts[number]
            if step >= attempt.stop:
                continue
            read = read_step(run, step, number)
            assert (read.step, read.data_step, read.applied, read.proven) == (step, data, applied, True)
            assert read.surviving == (step < len(made.lineage) and made.lineage[step] == number)
            triples = list(zip(read.sources_G.tolist(), read.epochs_G.tolist(), read.windows_G.tolist(), strict=True))
            assert triples == made.samples[number, step]
            assert read.global_batch == len(triples)
            assert read.identities == made.identities[number]
            parts, found = read.documents, {}
            assert parts.sequences.tolist() == sorted(parts.sequences.tolist())
            for m in range(len(parts.numbers)):
                key = (number, step, int(parts.sequences[m]), int(parts.numbers[m]))
                found[key] = tuple(
                    list(range(int(getattr(parts, f"{kind}_starts")[m]), int(getattr(parts, f"{kind}_stops")[m])))
                    for kind in ("input", "target")
                )
                index, start, length, _ = made.kept.spans[int(parts.numbers[m])]
                assert (int(parts.starts[m]), int(parts.lengths[m])) == (start, length)
                stream = made.kept.streams[index]
                assert read.identities[int(parts.sources[m])] == stream.identity
            assert found == {key: value for key, value in made.book.items() if key[:2] == (number, step)}
            if read.surviving:
                assert read_step(run, step).attempt.number == number
            assert read.ranks_G is None  # this ledger does not tell
            steps += 1
    assert steps > 100


def test_steps_that_nobody_read(tmp_path: Path) -> None:
    for seed in range(15):
        _, run = open_history(seed, tmp_path / str(seed))
        with pytest.raises(InputError, match=f"step {run.reached} was not read: {run.reached} steps are complete"):
            read_step(run, run.reached)
        with pytest.raises(
            InputError, match=f"attempt: expected 0 to {len(run.attempts) - 1}, got {len(run.attempts)}"
        ):
            read_step(run, 0, len(run.attempts))
        for attempt in run.attempts:
            if attempt.step:
                with pytest.raises(InputError, match=f"did not read step {attempt.step - 1}: it began at"):
                    read_step(run, attempt.step - 1, attempt.number)
            if attempt.ended:
                with pytest.raises(InputError, match=f"ended before step {attempt.stop}"):
                    read_step(run, attempt.stop, attempt.number)
            else:
                assert not read_step(run, attempt.stop, attempt.number).proven


def test_a_source_that_is_gone_leaves_its_sequences(tmp_path: Path) -> None:
    checked = 0
    for seed in range(15):
        made, run = open_history(seed, tmp_path / str(seed))
        if not run.reached:
            continue
        whole = read_step(run, 0)
        gone = int(whole.sources_G[0])
        identity = whole.identities[gone]
        there = made.kept.stream
        made.kept.stream = lambda asked, gone=identity, there=there: None if asked == gone else there(asked)
        read = read_step(run, 0)
        assert read.unknown == {gone: f"{identity}: gone"}
        assert np.array_equal(read.windows_G, whole.windows_G)
        assert gone not in read.documents.sources.tolist()
        checked += 1
    assert checked > 5


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real data run."""
    return runs.write_run(tmp_path_factory.mktemp("data") / "run", documents=300, files=2)


class Trained:
    """A ledger over a data run, with the loaders of its ranks."""

    def __init__(
        self, folder: Path, data: Path, world: int, micro_batch: int, mask: bool, context: Context | None = None
    ) -> None:
        folder.mkdir(exist_ok=True)
        names = [path.name for path in (data / "tokens").iterdir() if path.is_dir() and path.name[-4:] != ".val"]
        self.corpus = Corpus([str(data / "tokens" / name) for name in sorted(names)], 32)
        weights = [2, 1, 1][: len(self.corpus.ids)]
        self.order = Order(weights, self.corpus.windows, 3, ids=self.corpus.ids, seq_len=32, global_batch=24)
        self.world, self.mask = world, mask
        paths = dict(zip(self.corpus.ids, (reader.path for reader in self.corpus.readers), strict=True))
        (folder / "train").mkdir()
        with Ledger(folder / "train" / "ledger.jsonl") as ledger:
            ledger.move(
                "start", 0, 5, self.order, document_mask=mask, dp=world, micro_batch=micro_batch, paths=paths,
                versions=dict(zip(self.corpus.ids, self.corpus.versions, strict=True)),
                **({} if context is None else {"cp": context.to_dict()}),
            )  # fmt: skip
            ledger.append("end", step=12)
        boundaries = open_boundaries(self.corpus.readers, str(folder / "index"))
        self.loaders = [
            Loader(self.corpus, self.order, rank=rank, world=world, micro_batch=micro_batch, document_mask=mask,
                   boundaries=boundaries)
            for rank in range(world)
        ]  # fmt: skip
        self.run = TrainingRun(str(folder / "train"))


@pytest.mark.parametrize(("world", "micro_batch", "mask"), [(1, 3, True), (3, 2, True), (4, 3, False), (2, 12, True)])
def test_ranks_rows_and_targets_are_those_the_loader_dealt(
    tmp_path: Path, data: Path, world: int, micro_batch: int, mask: bool
) -> None:
    made = Trained(tmp_path, data, world, micro_batch, mask)
    for step in range(12):
        read = read_step(made.run, step)
        assert read.data_step == step + 5
        assert read.ranks_G is not None
        assert read.micro_batches_G is not None
        assert read.rows_G is not None
        for rank, loader in enumerate(made.loaders):
            dealt = loader.take(step + 5)
            mine = read.of_rank(rank)
            columns = (mine.places_G, mine.micro_batches_G, mine.rows_G)
            told = {
                place: (number, row)
                for place, number, row in zip(*(column.tolist() for column in columns), strict=True)  # type: ignore[union-attr]
            }
            expected = {
                int(place): (number, row)
                for number, batch in enumerate(dealt.micro_batches)
                for row, place in enumerate(batch.indices)
            }
            assert told == expected
            learned = 0
            for batch in dealt.micro_batches:
                for place, targets, inputs in zip(batch.indices, batch.targets_BL, batch.tokens_BL, strict=True):
                    learned += check_sequence(made, mine, int(place), inputs, targets)
            assert learned == sum(int((batch.targets_BL != IGNORE).sum()) for batch in dealt.micro_batches)
            assert set(mine.documents.sequences.tolist()) == set(expected)


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("context", [Context("ring", 4, 1), Context("usp", 4, 2), Context("ulysses", 2, 2)])
def test_positions_of_cp_are_those_that_each_rank_was_given(
    tmp_path: Path, data: Path, context: Context, mask: bool
) -> None:
    made = Trained(tmp_path, data, 2, 3, mask, context)
    read = read_step(made.run, 1)
    seen = 0
    for loader in made.loaders:
        for batch in loader.take(6).micro_batches:
            for rank in range(context.ranks):
                given = to_device(batch, torch.device("cpu"), document_mask=mask, sharing=Sharing(context, rank, 32))
                for row, place in enumerate(batch.indices.tolist()):
                    computed = read.computed(place)
                    assert computed is not None
                    told = [position for start, stop in computed[rank] for position in range(start, stop)]
                    assert given.tokens_BL[row].tolist() == batch.tokens_BL[row][told].tolist()
                    assert given.documents.positions_BR[row].tolist() == told  # type: ignore[union-attr]
                    seen += len(told)
    assert seen == 24 * 32
    assert read_step(Trained(tmp_path / "plain", data, 2, 3, mask).run, 1).computed(0) is None


def test_a_ledger_of_another_rule_tells_no_positions(tmp_path: Path) -> None:
    ring = Context("ring", 2, 1).to_dict()
    unlike = ({"rule": 99}, {"rule": True}, {"rule": 1.0}, {"heads": True}, {"ranks": 3, "heads": 2}, {"method": []})
    for told in (*(ring | own for own in unlike), {"ranks": 2}, "ring", {"ranks": 4, "heads": 3}):
        assert Context.from_dict(told) is None
    assert Context.from_dict(ring) == Context("ring", 2, 1)
    assert Context.from_dict(Context("usp", 8, 4).to_dict()) == Context("usp", 8, 4)


def check_sequence(made: Trained, read: Any, place: int, inputs: np.ndarray, targets: np.ndarray) -> int:
    """Tokens of the documents at the positions they are said to be at; returns how many targets that explains."""
    parts, covered, learned = read.documents, 0, 0
    for m in np.flatnonzero(parts.sequences == place).tolist():
        reader = made.corpus.readers[int(parts.sources[m])]
        start, length = int(parts.starts[m]), int(parts.lengths[m])
        tokens = reader.tokens(start, start + length)
        row = int(np.flatnonzero(read.places_G == place)[0])
        origin = int(read.windows_G[row]) * 32 - start
        a, b = int(parts.input_starts[m]), int(parts.input_stops[m])
        assert np.array_equal(inputs[a:b], tokens[origin + a : origin + b])
        covered += b - a
        a, b = int(parts.target_starts[m]), int(parts.target_stops[m])
        assert np.array_equal(targets[a:b], tokens[origin + a + 1 : origin + b + 1])
        learned += b - a
    assert covered == 32
    return learned


def test_a_rank_that_is_not_there(tmp_path: Path, data: Path) -> None:
    made = Trained(tmp_path, data, 3, 2, True)
    read = read_step(made.run, 0)
    with pytest.raises(InputError, match="rank: expected 0 to 2, got 3"):
        read.of_rank(3)
    made, run = open_history(1, tmp_path / "old")
    if run.reached:
        with pytest.raises(
            InputError, match="which rank computed what is not known: the ledger is of an older version"
        ):
            read_step(run, 0).of_rank(0)


def test_losses_come_from_the_files_that_have_the_step(tmp_path: Path, data: Path) -> None:
    made = Trained(tmp_path, data, 1, 2, True)
    read = read_step(made.run, 3)
    folder = tmp_path / "train" / "forensics"
    assert losses_of(made.run, read) == {}
    folder.mkdir()
    (folder / "step_00000003.json").write_text("{")
    (folder / "step_00000002.json").write_text(whole(0, read, row_of(read, 9.0)))
    (folder / "step_00000009.json").write_text(whole(1, read, row_of(read, 8.0)))
    (folder / "notes.json").write_text(whole(0, read, row_of(read, 7.0)))
    assert losses_of(made.run, read) == {}
    other = SimpleNamespace(**vars(read) | {"windows_G": read.windows_G + 1})
    (folder / "step_00000004.json").write_text(whole(0, read, row_of(other, 6.0)))
    assert losses_of(made.run, read) == {}  # of other data than the order gives
    row = row_of(read, 1.5)
    row["sequences"]["loss"][4] = None
    (folder / "step_00000005.attempt_2.json").write_text(whole(0, read, {"step": 2}, row))
    assert losses_of(made.run, read) == {}  # a damaged one is none
    (folder / "step_00000006.json").write_text(whole(0, read, row_of(read, 1, 2), row))
    assert losses_of(made.run, read) == {place: None if place == 4 else 1.5 + place for place in range(24)}


def whole(attempt: int, read: Any, *steps: dict[str, Any]) -> str:
    """What the trainer writes down of a step, and of those before it."""
    record = {
        "kind": "forensics", "format": 1, "step": read.step, "attempt": attempt, "reasons": [], "decision": "continued",
        "policy": {}, "layout": {"seq_len": read.seq_len}, "sources": list(read.identities), "parameters": {},
        "steps": steps,
    }  # fmt: skip
    return json.dumps(record)


def row_of(read: Any, loss: float, step: int | None = None) -> dict[str, Any]:
    some = [1] * len(read.places_G)
    return {
        "step": read.step if step is None else step, "data_step": read.data_step, "layers": {},
        "within": {"tokens": 1, "place": [], "loss": [], "targets": []},
        **dict.fromkeys(("loss", "loss_z", "grad_norm", "grad_norm_z")),
        **dict.fromkeys(("skipped", "non_finite", "loss_spike", "grad_norm_spike"), False),
        "sequences": {
            "place": read.places_G.tolist(), "source": read.sources_G.tolist(), "epoch": read.epochs_G.tolist(),
            "window": read.windows_G.tolist(), "loss": [loss + place for place in read.places_G.tolist()],
            **dict.fromkeys(("dp_rank", "micro_batch", "row", "targets"), some), "finite": [True] * len(some),
        },
    }  # fmt: skip
