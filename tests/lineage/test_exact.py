"""What ``step`` and ``exposure`` say is what the model was shown: every document, every step, every attempt."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quern.lineage.exposure import Exposures, clean, exposures
from quern.lineage.steps import StepRead, read_step
from quern.lineage.store import Lineage
from quern.lineage.training import TrainingRun
from support.data_pipeline.in_process import run_config
from support.lineage import recorder as R
from support.lineage.scenario import BATCH, DATA_SKIP, LENGTH, Moment, real, sample, train
from support.programs import python

#: (stream, first token of the window in it)
Place = tuple[str, int]


@dataclass(frozen=True)
class Case:
    run_dir: Path
    corpus: Any
    recorded: Any
    places: list[list[Place]]
    """Of each recorded sequence, all that read like it."""
    moments: tuple[Moment, ...]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("sample", marks=pytest.mark.slow),
        pytest.param("real", marks=[pytest.mark.long, pytest.mark.shared]),
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "real":
        shared = request.getfixturevalue("shared")
        config, sources, u = real(folder, shared, encoding="trained", vocab_size=4096)
    else:
        config, sources, u = sample(folder)
    run_config(config)
    run_dir = folder / "run"
    shutil.copytree(run_dir / "tokens", folder / "copy")
    moments = train(folder, run_dir, sources, u)
    corpus = R.Corpus(run_dir, folder / "copy")
    recorded, validation = R.read_records(folder / "records")
    places = corpus.find(recorded)
    assert all(places)
    assert {stream for found in places for stream, _ in found} >= set(sources)
    sure = sum(len(found) == 1 for found in places)
    assert sure > 0.9 * len(places)  # the rest reads the same in several places: what is told is one of them
    assert all(any(stream.endswith(".val") for stream, _ in found) for found in corpus.find(validation))
    return Case(run_dir, corpus, recorded, places, moments)


# ---- what was recorded, as documents


def resolve(case: Case, told: dict[tuple[int, int], Iterable[Place]]) -> dict[int, Place]:
    """Recorded sequence → where it stands, for the steps (life, step) in ``told``.

    ``told``: the windows that a step is said to have read. They must be those recorded, sequence by sequence; where
    the same tokens stand in several places, one of them.
    """
    mine: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, key in enumerate(zip(case.recorded.lives.tolist(), case.recorded.steps.tolist(), strict=True)):
        if key in told:
            mine[key].append(number)
    assert mine.keys() == told.keys()
    found: dict[int, Place] = {}
    for key, numbers in mine.items():
        left = Counter(told[key])
        for number in sorted(numbers, key=lambda number: len(case.places[number])):
            place = next((place for place in case.places[number] if left[place]), None)
            assert place is not None, f"(life, step) {key}: nothing told reads as {case.places[number][:3]} does"
            left[place] -= 1
            found[number] = place
        assert not +left, f"(life, step) {key}: told and not recorded: {+left}"
    return found


#: doc_id, positions [start, stop) of the sequence at which it is input, and target
Part = tuple[bytes, int, int, int, int]


def parts(case: Case, number: int, place: Place) -> list[Part]:
    """The documents of a recorded sequence: its inputs by where it stands, its targets by those recorded."""
    stream, start = case.corpus.streams[place[0]], place[1]
    learned = np.flatnonzero(case.recorded.targets_SL[number] != R.IGNORE)
    found = []
    first = int(np.searchsorted(stream.stops_D, start, "right"))
    for document in range(first, int(np.searchsorted(stream.starts_D, start + LENGTH, "right"))):
        begin, end = int(stream.starts_D[document]) - start, int(stream.stops_D[document]) - start
        inputs = (max(begin, 0), min(end, LENGTH))
        own = learned[(learned + 1 >= begin) & (learned + 1 < end)]
        targets = (int(own[0]), int(own[-1]) + 1) if len(own) else (0, 0)
        assert len(own) == targets[1] - targets[0]
        if inputs[0] >= inputs[1]:
            inputs = (0, 0)
        if inputs != (0, 0) or targets != (0, 0):
            found.append((stream.doc_ids[document], *inputs, *targets))
    return found


def proven(run: TrainingRun, moment: Moment) -> list[int]:
    """The steps below which the ledger can tell of each life: those before its last checkpoint at least."""
    stops = [attempt.stop for attempt in run.attempts]
    assert len(stops) == len(moment.lives)
    for number, (stop, life, after) in enumerate(zip(stops, moment.lives, [*moment.lives[1:], None], strict=True)):
        assert stop <= life.stop, number
        if after is None:
            assert stop >= life.stop - 1  # the newest figures are on their way when a run is killed
        else:
            assert stop >= min(max(after.start, life.start), life.stop), number
    return stops


def data_step(life: int, step: int) -> int:
    return step + (DATA_SKIP if life >= 2 else 0)


def applied(moment: Moment, life: int, step: int) -> bool:
    return step not in moment.lives[life].skip


def same(told: Counter[Any], recorded: Counter[Any]) -> None:
    ghosts, missed = told - recorded, recorded - told
    assert not ghosts, f"{ghosts.total()} told and not recorded: {list(ghosts)[:3]}; missed: {list(missed)[:3]}"
    assert not missed, f"{missed.total()} recorded and not told: {list(missed)[:3]}"


# ---- step


@pytest.mark.slow
def test_every_step_of_every_attempt_is_what_was_recorded(case: Case) -> None:
    """Sequence by sequence: rank, micro-batch, row, documents, parts; those too that nothing proves to be taken."""
    for moment in case.moments:
        run = TrainingRun(str(moment.path))
        stops, branch = proven(run, moment), set(moment.book.branch)
        keys = sorted(set(zip(case.recorded.lives.tolist(), case.recorded.steps.tolist(), strict=True)))
        keys = [(life, step) for life, step in keys if life < len(moment.lives)]
        reads = {key: read_step(run, key[1], key[0]) for key in keys}
        for (life, step), read in reads.items():
            facts = (read.attempt.number, read.step, read.data_step, read.proven)
            assert facts == (life, step, data_step(life, step), step < stops[life])
            if read.proven:
                assert (read.applied, read.surviving) == (applied(moment, life, step), (life, step) in branch)
                newest = (life, step) in branch
                assert not newest or read_step(run, step).attempt.number == life
            assert read.unknown == {}
        check_sequences(case, reads)


def check_sequences(case: Case, reads: dict[tuple[int, int], StepRead]) -> None:
    where = resolve(case, {key: windows(read) for key, read in reads.items()})
    recorded: Counter[Any] = Counter()
    documents: Counter[Any] = Counter()
    for number, place in where.items():
        r = case.recorded
        key = tuple(int(column[number]) for column in (r.lives, r.steps, r.ranks, r.calls, r.rows))
        recorded[*key, place] += 1
        documents.update((*key, place, *part) for part in parts(case, number, place))
    told: Counter[Any] = Counter()
    told_documents: Counter[Any] = Counter()
    for (life, step), read in reads.items():
        assert read.ranks_G is not None
        assert read.micro_batches_G is not None
        assert read.rows_G is not None
        computed = zip(read.ranks_G.tolist(), read.micro_batches_G.tolist(), read.rows_G.tolist(), strict=True)
        sequences = [(life, step, *by, place) for by, place in zip(computed, windows(read), strict=True)]
        told.update(sequences)
        assert read.places_G.tolist() == list(range(len(sequences)))
        told_documents.update((*sequences[sequence], *part) for sequence, part in documents_of(read))
    same(told, recorded)
    same(told_documents, documents)


def windows(read: StepRead) -> list[Place]:
    pairs = zip(read.sources_G.tolist(), read.windows_G.tolist(), strict=True)
    return [(read.streams[source][1].name, window * LENGTH) for source, window in pairs]


def documents_of(read: StepRead) -> list[tuple[int, Part]]:
    d = read.documents
    names = [""] * len(d.numbers)
    for source, (lineage, _) in read.streams.items():
        own = np.flatnonzero(d.sources == source)
        for row, name in zip(own.tolist(), lineage.documents(d.numbers[own]).doc_ids, strict=True):
            names[row] = name
    columns = (d.sequences, d.input_starts, d.input_stops, d.target_starts, d.target_stops)
    return [
        (sequence, (name, *part))
        for name, sequence, *part in zip(names, *(column.tolist() for column in columns), strict=True)
    ]


def test_the_share_of_each_rank_is_what_it_recorded(case: Case) -> None:
    moment = case.moments[-1]
    run = TrainingRun(str(moment.path))
    r = case.recorded
    for life, of in enumerate(moment.lives):
        for step in (of.start, of.stop - 1):
            for rank in range(of.world):
                share = read_step(run, step, life).of_rank(rank)
                numbers = np.flatnonzero((r.lives == life) & (r.steps == step) & (r.ranks == rank))
                assert len(share.places_G) == len(numbers)
                left = Counter(windows(share))
                for number in numbers.tolist():
                    place = next((place for place in case.places[number] if left[place]), None)
                    assert place is not None
                    left[place] -= 1
                assert set(share.documents.sequences.tolist()) == set(share.places_G.tolist())


# ---- exposure


def everything(moment: Moment, case: Case) -> tuple[TrainingRun, Lineage, Exposures]:
    run, lineage = TrainingRun(str(moment.path)), Lineage(str(case.run_dir))
    return run, lineage, exposures(run, [(lineage, np.arange(lineage.num_documents))])


def test_exposure_of_every_document_is_what_was_recorded(case: Case) -> None:
    """All at once: no miss, no ghost, parts of inputs and targets, skipped steps, abandoned attempts."""
    for moment in case.moments:
        run, lineage, found = everything(moment, case)
        names = lineage.documents(np.arange(lineage.num_documents)).doc_ids
        assert set(names) == case.corpus.rows.keys()
        rows = Rows.of(found, lineage)
        assert all(row.data_step == data_step(row.attempt, row.step) for row in rows)
        told = told_windows(rows)
        stops = proven(run, moment)
        assert told.keys() == {
            (life, step) for life, stop in enumerate(stops) for step in range(moment.lives[life].start, stop)
        }
        for key in told:  # one window a place of the global batch
            sequences = {row.sequence for row in rows if (row.attempt, row.step) == key}
            assert sequences == set(range(len(told[key]))), key
        same(
            Counter(
                (row.attempt, row.step, row.place, names[row.number], *row.part, row.applied, row.surviving)
                for row in rows
            ),
            shown(case, moment, told),
        )  # fmt: skip
        assert not found.purged.any()
    assert found.epochs.max() > 1
    assert {len(windows) for windows in told.values()} == {BATCH, 2 * BATCH}


def shown(case: Case, moment: Moment, told: dict[tuple[int, int], list[Place]]) -> Counter[Any]:
    """Every part of every document that was recorded at the steps of ``told``: applied or not, surviving or not."""
    branch = set(moment.book.branch)
    recorded: Counter[Any] = Counter()
    for number, place in resolve(case, told).items():
        life, step = int(case.recorded.lives[number]), int(case.recorded.steps[number])
        facts = (applied(moment, life, step), (life, step) in branch)
        recorded.update((life, step, place, *part, *facts) for part in parts(case, number, place))
    return recorded


def told_windows(rows: Iterable[Rows]) -> dict[tuple[int, int], list[Place]]:
    """(life, step) → what it read, once for each place of the global batch and window that is told."""
    told: dict[tuple[int, int], set[tuple[int, Place]]] = defaultdict(set)
    for row in rows:
        told[row.attempt, row.step].add((row.sequence, row.place))
    return {key: [place for _, place in pairs] for key, pairs in told.items()}


@dataclass(frozen=True)
class Rows:
    """A row of :class:`Exposures`."""

    attempt: int
    step: int
    data_step: int
    sequence: int
    place: Place
    number: int
    part: tuple[int, int, int, int]
    applied: bool
    surviving: bool

    @classmethod
    def of(cls, found: Exposures, lineage: Lineage) -> list[Rows]:
        streams = [stream.name for stream in lineage.streams]
        columns = (
            found.attempts, found.steps, found.data_steps, found.sequences, found.streams, found.windows,
            found.numbers, found.input_starts, found.input_stops, found.target_starts, found.target_stops,
            found.applied, found.surviving,
        )  # fmt: skip
        return [
            cls(attempt, step, data, sequence, (streams[stream], window * LENGTH), number, (a, b, c, d), real, kept)
            for attempt, step, data, sequence, stream, window, number, a, b, c, d, real, kept in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ]


@pytest.mark.slow
def test_one_document_at_a_time_is_the_same(case: Case) -> None:
    run, lineage, found = everything(case.moments[-1], case)
    for number in range(lineage.num_documents):
        own = exposures(run, [(lineage, [number])])
        together = found.take(found.numbers == number)
        assert Counter(Rows.of(own, lineage)) == Counter(Rows.of(together, lineage)), number


def test_the_last_clean_checkpoint_of_every_document(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what each standing checkpoint's weights have been through, one document after the other."""
    for moment in case.moments:
        run, lineage, found = everything(moment, case)
        checkpoints = run.checkpoints()
        monkeypatch.setattr(run, "checkpoints", lambda store=False, all=checkpoints: all)
        book = moment.book
        assert {seen.step for seen in checkpoints} == book.standing
        assert {seen.step for seen in checkpoints if seen.abandoned} == {s for s in book.standing if book.left(s)}
        told = told_windows(Rows.of(found, lineage))
        steps_of: dict[bytes, set[tuple[int, int]]] = defaultdict(set)
        for life, step, _, name, *_, updated, _ in shown(case, moment, told):
            if updated:
                steps_of[name].add((life, step))
        names = lineage.documents(np.arange(lineage.num_documents)).doc_ids
        for number, name in enumerate(names):
            got = clean(run, found.take(found.numbers == number))
            hit = {
                step: min(t for life, t in book.history[step] if (life, t) in steps_of[name])
                for step in book.standing
                if steps_of[name].intersection(book.history[step])
            }
            assert {seen.step: first for seen, first in got.seen} == hit
            assert {seen.step for seen in got.unseen} == book.standing - hit.keys()
            spared = [step for step in book.standing - hit.keys() if not book.left(step)]
            assert (None if got.last is None else got.last.step) == (max(spared) if spared else None)


# ---- the commands


def command(*arguments: object) -> Any:
    done = subprocess.run(
        [python(), "-m", "quern.cli.main", "lineage", *map(str, arguments), "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_the_commands_say_the_same(case: Case) -> None:
    moment = case.moments[-1]
    _, lineage, found = everything(moment, case)
    rows = Rows.of(found, lineage)
    recorded = shown(case, moment, told_windows(rows))
    streams = {stream.identity: stream.name for stream in lineage.streams}

    most = Counter(name for _, _, _, name, *_ in recorded).most_common(1)[0][0]
    answer = command("exposure", moment.path, "--doc", most.hex(), "--all", "--limit", 10**6)
    told = Counter(
        (
            row["attempt"], row["step"], (streams[row["source"]], row["window"] * LENGTH), bytes.fromhex(row["doc_id"]),
            *(row["inputs"] or (0, 0)), *(row["targets"] or (0, 0)), row["applied"], row["surviving"],
        )
        for row in answer["rows"]
    )  # fmt: skip
    same(told, Counter({key: count for key, count in recorded.items() if key[3] == most}))
    real = [key for key in recorded.elements() if key[3] == most and key[-2:] == (True, True)]
    assert answer["applied"] == len(real)
    assert answer["first_step"] == min(key[1] for key in real)

    life, of = 4, moment.lives[4]
    answer = command("step", moment.path, of.stop - 2, "--rank", 1, "--attempt", life)
    numbers = np.flatnonzero(
        (case.recorded.lives == life) & (case.recorded.steps == of.stop - 2) & (case.recorded.ranks == 1)
    )
    assert len(answer["sequences"]) == len(numbers)
    by_place = {(int(case.recorded.calls[n]), int(case.recorded.rows[n])): n for n in numbers.tolist()}
    for row in answer["sequences"]:
        assert row["rank"] == 1
        number = by_place.pop((row["micro_batch"], row["row"]))
        place = (streams[row["source"]], row["window"] * LENGTH)
        assert place in case.places[number]
        assert [
            (bytes.fromhex(d["doc_id"]), *(d["inputs"] or (0, 0)), *(d["targets"] or (0, 0))) for d in row["documents"]
        ] == parts(case, number, place)
        for d in row["documents"]:
            assert d["url"] == case.corpus.rows[bytes.fromhex(d["doc_id"])]["url"]
