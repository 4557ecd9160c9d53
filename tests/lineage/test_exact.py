"""What ``step`` and ``exposure`` say is what the model was shown: every document, every step, every attempt."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quern.lineage.exposure import Tally, clean, exposures, walk
from quern.lineage.selection import select
from quern.lineage.steps import read_step
from quern.lineage.store import IndexedRun
from quern.lineage.training import TrainingRun
from quern.tokenize.selection.chosen import Identity
from support.data_pipeline.in_process import run_config
from support.lineage import recorder as R
from support.lineage.exact_case import (
    Case,
    Rows,
    applied,
    check_sequences,
    data_step,
    everything,
    laid_out,
    named,
    parts,
    proven,
    same,
    shown,
    told_windows,
    windows,
)
from support.lineage.scenario import BATCH, LENGTH, real, sample, train
from support.programs import python


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("sample", marks=pytest.mark.slow),
        pytest.param("chosen", marks=pytest.mark.slow),
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
    given = list(CHOSEN) if request.param == "chosen" else [(name, None) for name in sources]
    moments = train(folder, run_dir, given, u)
    corpus = R.Corpus(run_dir, folder / "copy")
    if request.param == "chosen":
        laid_out(corpus, CHOSEN)
    recorded, validation = R.read_records(folder / "records")
    places = corpus.find(recorded)
    assert all(places)
    names = {name if where is None else f"{name} where {where}" for name, where in given}
    assert {stream for found in places for stream, _ in found} >= names
    sure = sum(len(found) == 1 for found in places)
    assert sure > 0.9 * len(places)  # the rest reads the same in several places: what is told is one of them
    assert all(any(stream.split()[0].endswith(".val") for stream, _ in found) for found in corpus.find(validation))
    return Case(run_dir, corpus, recorded, places, moments)


# Two parts of one source, neither of which is all of it, and a part of another.
CHOSEN = {
    ("crawl", "doc_id < '8'"): lambda row, tokens: row["doc_id"].hex() < "8",
    ("crawl", "doc_id >= '8' and tokens % 3 <> 0"): lambda row, tokens: row["doc_id"].hex() >= "8" and tokens % 3,
    ("notes", "record_offset % 2 = 0 and host is null and tokens < 90"): lambda row, tokens: (
        row["record_offset"] % 2 == 0 and row["host"] is None and tokens < 90
    ),
}

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


def test_exposure_of_every_document_is_what_was_recorded(case: Case) -> None:
    """All at once: no miss, no ghost, parts of inputs and targets, skipped steps, abandoned attempts."""
    for moment in case.moments:
        run, lineage, found = everything(moment, case)
        names = lineage.documents(np.arange(lineage.num_documents)).doc_ids
        assert set(names) == case.corpus.rows.keys()
        rows = Rows.of(found, lineage, run)
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


@pytest.mark.slow
def test_one_document_at_a_time_is_the_same(case: Case) -> None:
    run, lineage, found = everything(case.moments[-1], case)
    for number in range(lineage.num_documents):
        own = exposures(run, [(lineage, [number])])
        together = found.take(found.numbers == number)
        assert Counter(Rows.of(own, lineage, run)) == Counter(Rows.of(together, lineage, run)), number


def test_the_last_clean_checkpoint_of_every_document(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what each standing checkpoint's weights have been through, one document after the other."""
    for moment in case.moments:
        run, lineage, found = everything(moment, case)
        checkpoints = run.checkpoints()
        monkeypatch.setattr(run, "checkpoints", lambda store=False, all=checkpoints: all)
        book = moment.book
        assert {seen.step for seen in checkpoints} == book.standing
        assert {seen.step for seen in checkpoints if seen.abandoned} == {s for s in book.standing if book.left(s)}
        told = told_windows(Rows.of(found, lineage, run))
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
    run, lineage, found = everything(moment, case)
    rows = Rows.of(found, lineage, run)
    recorded = shown(case, moment, told_windows(rows))
    newest = run.attempts[-1]
    streams = {
        identity: named(stream.name, newest, identity)
        for stream in lineage.streams
        for identity in run.identities_of(stream.identity)
    }

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


def test_a_choice_that_cannot_be_read_leaves_its_source_unknown(case: Case, tmp_path: Path) -> None:
    kept = case.moments[-1].path / "chosen"
    if not kept.is_dir():
        pytest.skip("this run reads whole sources")
    shutil.copytree(case.moments[-1].path, tmp_path / "train")
    lineage, whole = IndexedRun(str(case.run_dir)), TrainingRun(str(case.moments[-1].path))
    numbers = np.arange(lineage.num_documents)
    before = exposures(whole, [(lineage, numbers)])
    lost = whole.order.ids[0]
    (tmp_path / "train" / "chosen" / Identity(lost).file).write_bytes(b"damaged")
    run = TrainingRun(str(tmp_path / "train"))
    assert list(run.unknown()) == [lost]
    after = exposures(run, [(lineage, numbers)])
    ids = [whole.order_of(attempt).ids for attempt in whole.attempts]
    read = [ids[a][s] != lost for a, s in zip(before.attempts.tolist(), before.sources.tolist(), strict=True)]
    assert 0 < sum(read) == len(after) < len(before)
    assert Counter(Rows.of(after, lineage, run)) == Counter(Rows.of(before.take(np.array(read)), lineage, whole))


def test_documents_are_told_where_they_stand_in_their_source(case: Case) -> None:
    run, lineage, _ = everything(case.moments[-1], case)
    read = read_step(run, run.reached - 1)
    spans = lineage.spans_of(read.documents.numbers)
    assert spans.numbers.tolist() == read.documents.numbers.tolist()
    assert spans.starts.tolist() == read.documents.starts.tolist()
    assert spans.lengths.tolist() == read.documents.lengths.tolist()


def test_documents_that_no_condition_chooses_are_counted(case: Case) -> None:
    run, lineage, _ = everything(case.moments[-1], case)
    chosen = any(" where " in name for name in case.corpus.streams)
    tally = Tally(run)
    for _ in walk(run, [select(lineage, np.arange(lineage.num_documents))], tally):
        pass
    whole = [own for own in lineage.streams if own.name in ("crawl", "notes")] if chosen else []
    read = [name for name in case.corpus.streams if " where " in name and not name.split()[0].endswith(".val")]
    kept = sum(len(case.corpus.streams[name].doc_ids) for name in read)
    assert tally.not_chosen == sum(own.num_spans for own in whole) - kept
    assert (tally.not_chosen > 0) == chosen
