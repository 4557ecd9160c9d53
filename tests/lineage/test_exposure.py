"""Exposures beside a book that was kept token by token, and both directions beside each other."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from quern.lineage import exposure as module
from quern.lineage.exposure import Exposures, Tally, clean, exposures, walk
from quern.lineage.selection import select, select_parts
from quern.lineage.steps import read_step
from quern.lineage.training import TrainingRun
from support.lineage import histories as H

pytestmark = pytest.mark.slow

LENGTH = H.LENGTH
SEEDS = 40


@pytest.fixture(scope="module")
def histories(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("histories")
    made = []
    for seed in range(SEEDS):
        (folder / str(seed)).mkdir()
        made.append(H.make_history(random.Random(seed), folder / str(seed)))
    return made


def everything(made: Any, run: TrainingRun) -> Exposures:
    return exposures(run, [(made.kept, list(range(max(made.kept.spans) + 2)))])


def as_book(rows: Exposures) -> Any:
    """The rows as the book has them."""
    found = {}
    for row in range(len(rows)):
        key = tuple(int(getattr(rows, name)[row]) for name in ("attempts", "steps", "sequences", "numbers"))
        assert key not in found
        ranges = (
            list(range(int(getattr(rows, f"{kind}_starts")[row]), int(getattr(rows, f"{kind}_stops")[row])))
            for kind in ("input", "target")
        )
        found[key] = tuple(ranges)
    return found


def test_every_exposure_of_every_attempt_is_what_reading_token_by_token_gives(histories: list[Any]) -> None:
    seen: Counter[str] = Counter()
    for made in histories:
        run = made.open()
        assert [attempt.stop for attempt in run.attempts] == made.stops
        rows = everything(made, run)
        assert as_book(rows) == made.book
        for row in range(len(rows)):
            attempt, step = int(rows.attempts[row]), int(rows.steps[row])
            data, applied = made.facts[attempt, step]
            assert (int(rows.data_steps[row]), bool(rows.applied[row])) == (data, applied)
            survives = step < len(made.lineage) and made.lineage[step] == attempt
            assert bool(rows.surviving[row]) == survives
            place = int(rows.sequences[row])
            source, epoch, window = made.samples[attempt, step][place]
            assert (int(rows.epochs[row]), int(rows.windows[row])) == (epoch, window)
            stream = made.kept.streams[int(rows.streams[row])]
            assert made.identities[attempt][source] == stream.identity
            seen["abandoned"] += not survives
            seen["skipped"] += not applied
            seen["epochs"] += epoch > 0
            seen["versions"] += stream.identity.endswith("/a/2")
            seen["purged"] += bool(rows.purged[row])
            seen["only input"] += bool(rows.target_stops[row] == 0)
            seen["only target"] += bool(rows.input_stops[row] == 0)
    assert min(seen.values()) > 20, seen


def test_both_directions_say_the_same(histories: list[Any]) -> None:
    columns = ("input_starts", "input_stops", "target_starts", "target_stops", "purged")
    for made in histories[:60]:
        run = made.open()
        rows = everything(made, run)
        forward = {
            tuple(int(getattr(rows, name)[row]) for name in ("attempts", "steps", "sequences", "numbers", *columns))
            for row in range(len(rows))
        }
        back = set()
        for attempt in run.attempts:
            for step in range(attempt.step, attempt.stop):
                read = read_step(run, step, attempt.number)
                parts = read.documents
                back |= {
                    (attempt.number, step, *(int(getattr(parts, n)[m]) for n in ("sequences", "numbers", *columns)))
                    for m in range(len(parts.numbers))
                }
        assert forward == back


def test_blocks_of_any_size_give_the_same_and_the_same_tally(
    histories: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for made in histories[:8]:
        run = made.open()
        chosen = [select(made.kept, list(range(max(made.kept.spans) + 2)))]
        results = []
        for size in (2, 9, 1 << 17):
            monkeypatch.setattr(module, "_PAIRS", size)
            tally = Tally(run)
            rows = Exposures.join(list(walk(run, chosen, tally)))
            results.append((as_book(rows), {k: v for k, v in vars(tally).items() if k != "run"}))
        for book, tally_ in results[1:]:
            assert book == results[0][0]
            for name, value in tally_.items():
                assert np.array_equal(value, results[0][1][name]), name  # type: ignore[arg-type]


def test_the_tally_counts_what_is_there_and_what_never_was(histories: list[Any]) -> None:
    seen: Counter[str] = Counter()
    for made in histories:
        run = made.open()
        tally = Tally(run)
        numbers = list(range(max(made.kept.spans) + 2))
        rows = Exposures.join(list(walk(run, [select(made.kept, numbers)], tally)))
        kept = [key for key in made.book if key[1] < len(made.lineage) and made.lineage[key[1]] == key[0]]
        assert tally.surviving == len(kept) == int(rows.surviving.sum())
        assert tally.abandoned == len(made.book) - len(kept)
        assert tally.steps == {
            step: [sum(k[1] == step for k in kept),
                   int((rows.surviving & (rows.steps == step) & rows.applied & ~rows.purged).sum())]
            for step in {key[1] for key in kept}
        }  # fmt: skip
        assert tally.documents == len(numbers)
        assert tally.without_tokens == len(numbers) - len(made.kept.spans)
        known = {ident for attempt, ids in enumerate(made.identities) for ident in ids}
        streams = made.kept.streams
        assert tally.held_out == len(streams[-1].lengths)
        assert tally.foreign == sum(len(s.lengths) for s in streams[:-1] if s.identity not in known)
        tail = 0
        for stream in streams:
            tail += stream.total_tokens - (stream.windows * LENGTH + 1) if stream.identity in known else 0
        assert tally.tail_tokens == tail
        assert tally.first_tokens == sum(s.identity in known for s in streams)
        seen["tail"] += tail
        seen["foreign"] += tally.foreign
        seen["left out"] += tally.left_out
        seen["unreached"] += tally.unreached
        visited = set()
        for row in np.flatnonzero(rows.surviving).tolist():
            visited.add((int(rows.numbers[row]), int(rows.windows[row])))
        mask, pairs = run.attempts[-1].document_mask, set()
        for stream in streams:
            for window in range(stream.windows if stream.identity in known else 0):
                for token in range(window * LENGTH, (window + 1) * LENGTH + 1):
                    last = token == (window + 1) * LENGTH
                    if not (last and mask and stream.is_head(token)):
                        pairs.add((stream.document(token), window))
        assert tally.windows == len(pairs)
        assert tally.unreached == len(pairs - visited)
        for attempt in run.attempts:
            real = rows.applied & ~rows.purged & (rows.attempts == attempt.number)
            first = int(tally.first_applied[attempt.number])
            assert first == (rows.steps[real].min() if real.any() else np.iinfo(np.int64).max)
    assert min(seen.values()) > 20, seen


def test_left_out_is_what_rollbacks_went_over(histories: list[Any]) -> None:
    """Counted in the newest order, place by place."""
    found = 0
    for made in histories:
        run = made.open()
        tally = Tally(run)
        list(walk(run, [select(made.kept, list(range(max(made.kept.spans) + 2)))], tally))
        read = {made.facts[made.lineage[t], t][0] for t in range(len(made.lineage)) if t < run.reached}
        mask, expected = run.attempts[-1].document_mask, 0
        for data in range(max(read, default=-1)):
            if data in read:
                continue
            first, size = run.order.first_sample(data), run.order.global_batch_at(data)
            for g in range(first, first + size):
                source, _, window = run.order.sample(g)
                stream = made.kept.stream(run.order.ids[source])
                tokens = range(window * LENGTH, (window + 1) * LENGTH + 1)
                documents = {stream.document(t) for t in tokens[:-1]}
                documents |= set() if mask and stream.is_head(tokens[-1]) else {stream.document(tokens[-1])}
                expected += len(documents)
        assert tally.left_out == expected
        found += expected
    assert found > 50


def test_checkpoints_are_clean_until_their_own_branch_took_something_in(histories: list[Any]) -> None:
    seen: Counter[str] = Counter()
    for number, made in enumerate(histories):
        run = made.open()
        published = {step: (offset, lineage) for step, offset, lineage in made.checkpoints}  # the newest of each step
        for step, (offset, _) in published.items():
            H.publish(run, step, offset)
        draw = random.Random(number)
        numbers = draw.sample(sorted(made.kept.spans), min(2, len(made.kept.spans)))
        rows = exposures(run, [(made.kept, numbers)])
        result = clean(run, rows)
        last = None
        for checkpoint in run.checkpoints():
            offset, lineage = published[checkpoint.step]
            guilty = [
                step
                for attempt, step, _, document in made.book
                if document in numbers
                and step < checkpoint.step
                and lineage[step] == attempt
                and made.facts[attempt, step][1]
                and not is_purged(made, run, attempt, document)
            ]
            given = {seen.step: first for seen, first in result.seen}
            assert given.get(checkpoint.step) == min(guilty, default=None)
            assert (checkpoint.step in {seen.step for seen in result.unseen}) == (not guilty)
            present = lineage == made.lineage[: checkpoint.step]
            assert (checkpoint.abandoned is None) or not present
            last = checkpoint.step if not guilty and checkpoint.abandoned is None else last
            seen["guilty"] += bool(guilty)
            seen["clean"] += not guilty
            seen["abandoned"] += checkpoint.abandoned is not None
        assert (result.last.step if result.last else None) == last
        seen["none"] += last is None
    assert min(seen.values()) > 4, seen


def is_purged(made: Any, run: TrainingRun, attempt: int, document: int) -> bool:
    index, _, _, since = made.kept.spans[document]
    identity = made.kept.streams[index].identity
    return 0 < since <= run.attempts[attempt].versions[identity]


def test_a_document_that_was_purged_after_it_was_read_was_read(histories: list[Any]) -> None:
    """Of a document that version 2 purged, those who read version 1 saw all, those who read version 2 or 3 nothing."""
    seen: Counter[tuple[int, bool]] = Counter()
    for made in histories:
        run = made.open()
        rows = everything(made, run)
        for row in range(len(rows)):
            identity = made.kept.streams[int(rows.streams[row])].identity
            if made.kept.spans[int(rows.numbers[row])][3] == 2:
                version = run.attempts[int(rows.attempts[row])].versions[identity]
                assert bool(rows.purged[row]) == (version >= 2)
                assert version < 2 or rows.target_stops[row] == 0
                seen[version, bool(rows.target_stops[row] > 0)] += 1
    assert min(seen[1, True], seen[2, False], seen[3, False]) > 4, seen


def test_parts_of_documents(histories: list[Any]) -> None:
    """A part is where the whole is, cut to it; its head is masked only where it is the document's."""
    draw, checked = random.Random(1), 0
    for made in histories[:60]:
        run = made.open()
        chosen = []
        for number, (stream, start, length, _) in made.kept.spans.items():
            a = start + draw.randrange(length)
            chosen.append((number, stream, a, draw.randint(a + 1, start + length)))
        rows = exposures(run, [select_parts(made.kept, *map(list, zip(*chosen, strict=True)))])
        found = as_book(rows)
        own = {number: (a, b) for number, _, a, b in chosen}
        expected = {}
        for (attempt, step, place, number), (inputs, targets) in made.book.items():
            origin = made.samples[attempt, step][place][2] * LENGTH
            a, b = own[number]
            inputs = [p for p in inputs if a <= origin + p < b]
            targets = [p for p in targets if a <= origin + p + 1 < b]
            if inputs or targets:
                expected[attempt, step, place, number] = (inputs, targets)
        assert found == expected
        checked += len(found)
    assert checked > 400


def test_a_part_of_a_document_without_tokens_is_refused(histories: list[Any]) -> None:
    made = histories[0]
    with pytest.raises(ValueError, match="parts of documents that have tokens"):
        select_parts(made.kept, [10_000], [0], [0], [1])


def test_nothing_asked_nothing_found(histories: list[Any]) -> None:
    made = histories[0]
    run = made.open()
    rows = exposures(run, [(made.kept, [])])
    assert len(rows) == 0
    result = clean(run, rows)
    assert result.seen == ()


def test_where_an_attempt_died_what_it_would_have_read_next_is_named(histories: list[Any]) -> None:
    """Within the epochs that were begun."""
    named = 0
    for made in histories:
        run = made.open()
        tally = Tally(run)
        list(walk(run, [select(made.kept, list(made.kept.spans))], tally))
        for attempt in run.attempts:
            told = int(tally.next_unproven[attempt.number])
            if attempt.ended:
                assert told == np.iinfo(np.int64).max
            elif told != np.iinfo(np.int64).max:
                assert told >= attempt.stop
                read = read_step(run, told, attempt.number)
                assert not read.proven
                named += 1
    assert named > 8
