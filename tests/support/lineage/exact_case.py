"""What a model was shown, as documents, beside what ``step`` and ``exposure`` say of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quern.lineage.exposure import Exposures, exposures
from quern.lineage.steps import StepRead
from quern.lineage.store import IndexedRun
from quern.lineage.training import Attempt, TrainingRun
from support.lineage import recorder as R
from support.lineage.scenario import DATA_SKIP, LENGTH, Moment

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
    names = {source: named(own[1].name, read.attempt, read.identities[source]) for source, own in read.streams.items()}
    return [(names[source], window * LENGTH) for source, window in pairs]


def named(stream: str, attempt: Attempt, identity: str) -> str:
    """What :func:`laid_out` calls the stream of a source."""
    return f"{stream} where {attempt.wheres[identity]}" if identity in attempt.wheres else stream


def laid_out(corpus: R.Corpus, chosen: Mapping[tuple[str, str], Callable[[Any, int], bool]]) -> None:
    """Put in place of the streams of a corpus those that documents of them make, laid end to end: of a name and a
    condition those whose verdict row and number of tokens fulfil it. Of a name held-out documents too."""
    for name, _ in chosen:
        for kind in (name, f"{name}.val"):
            whole = corpus.streams.get(kind)
            for (own, where), fulfils in chosen.items() if whole is not None else ():
                if own != name:
                    continue
                spans = zip(whole.doc_ids, whole.starts_D.tolist(), whole.stops_D.tolist(), whole.texts, strict=True)
                kept = [span for span in spans if fulfils(corpus.rows[span[0]], span[2] - span[1])]
                tokens = [whole.tokens_T[start:stop] for _, start, stop, _ in kept]
                stops = np.cumsum([len(part) for part in tokens])
                corpus.streams[f"{kind} where {where}"] = R.Copied(
                    f"{kind} where {where}", np.concatenate(tokens), np.append(0, stops[:-1]), stops,
                    tuple(span[0] for span in kept), tuple(span[3] for span in kept),
                )  # fmt: skip
    for name, _ in chosen:
        for kind in (name, f"{name}.val"):
            corpus.streams.pop(kind, None)


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


def everything(moment: Moment, case: Case) -> tuple[TrainingRun, IndexedRun, Exposures]:
    run, lineage = TrainingRun(str(moment.path)), IndexedRun(str(case.run_dir))
    return run, lineage, exposures(run, [(lineage, np.arange(lineage.num_documents))])


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
    def of(cls, found: Exposures, lineage: IndexedRun, run: TrainingRun) -> list[Rows]:
        identities = [run.order_of(attempt).ids for attempt in run.attempts]
        sources = [
            named(lineage.streams[stream].name, run.attempts[attempt], identities[attempt][source])
            for stream, attempt, source in zip(
                found.streams.tolist(), found.attempts.tolist(), found.sources.tolist(), strict=True
            )
        ]
        columns = (
            found.attempts, found.steps, found.data_steps, found.sequences, np.array(sources), found.windows,
            found.numbers, found.input_starts, found.input_stops, found.target_starts, found.target_stops,
            found.applied, found.surviving,
        )  # fmt: skip
        return [
            cls(attempt, step, data, sequence, (stream, window * LENGTH), number, (a, b, c, d), real, kept)
            for attempt, step, data, sequence, stream, window, number, a, b, c, d, real, kept in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ]
