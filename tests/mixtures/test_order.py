"""The order: both directions undo each other, nothing is given twice or left out, and what follows changes nothing."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quern.mixtures import order as order_module
from quern.mixtures.order import MAX_SAMPLES, Order, Phase
from support.oracles import order_reference as reference

WINDOWS = [1, 1, 2, 3, 7, 30, 150, 1000]
WEIGHTS = [0, 0, 1, 1, 2, 5, 0.1, 0.25, "1/3"]


class Run:
    """A random order, beside its plain twin."""

    def __init__(self, seed, aligned=False):
        rng = self.rng = random.Random(seed)
        self.windows = [rng.choice(WINDOWS) for _ in range(rng.randint(1, 6))]
        self.seed = rng.randrange(10**6)
        self.ids = [f"run/{s}/1" for s in rng.sample(range(100), len(self.windows))]
        weights = self.recipe()
        size = rng.randint(1, 60)
        block = self.block(size, aligned)
        self.first = {"weights": weights, "global_batch": size, "block": block}
        self.phases, self.rows, step = [], [(0, weights, size, block or size)], 0
        for _ in range(rng.randint(0, 5)):
            step += rng.randint(1, 12)
            phase = Phase(step, rng.choice([None, self.recipe()]), rng.choice([None, rng.randint(1, 60)]))
            weights, size = phase.weights or weights, phase.global_batch or size
            block = self.block(size, aligned)
            self.phases.append(Phase(step, phase.weights, phase.global_batch, block))
            self.rows.append((step, weights, size, block or size))
        self.order = self.made(self.phases)
        self.size = self.order.phases[-1].first_sample + rng.randint(1, 400)
        self.sources, self.epochs, self.window = self.order.samples(np.arange(self.size))
        self.triples = list(zip(self.sources.tolist(), self.epochs.tolist(), self.window.tolist(), strict=True))

    def recipe(self):
        while not any(recipe := [self.rng.choice(WEIGHTS) for _ in self.windows]):
            pass
        return tuple(recipe)

    def block(self, size, aligned):
        if aligned:
            return self.rng.choice([None, *(b for b in range(1, size + 1) if size % b == 0)])
        return self.rng.choice([None, self.rng.randint(1, 200)])

    def made(self, phases):
        first = self.first
        return Order(
            first["weights"], self.windows, self.seed, phases, ids=self.ids,
            global_batch=first["global_batch"], block=first["block"],
        )  # fmt: skip

    def kappas(self, start, stop):
        """Source → running indices given at positions start … stop, in the order they are given."""
        given_ = {s: [] for s in range(len(self.windows))}
        for s, epoch, window in self.triples[start:stop]:
            key = reference.subkey(reference.base_key(self.seed, "src", self.ids[s]), epoch)
            given_[s].append(epoch * self.windows[s] + reference.unpermute(window, self.windows[s], key))
        return given_


def cut_short(row, after):
    return (after.first_sample - row.first_sample) % row.block > 0


@cache
def runs():
    return [Run(seed) for seed in range(30)]


@cache
def aligned_runs():
    return [Run(seed, aligned=True) for seed in range(1000, 1010)]


@pytest.mark.slow
def test_the_runs_cover_what_they_should():
    assert any(len(set(run.sources.tolist())) < len(run.windows) for run in runs())
    assert sum(any(cut_short(*pair) for pair in pairwise(run.order.phases)) for run in runs()) > 5
    assert sum(bool(run.epochs.any()) for run in runs()) > 15
    assert sum(any(0 in phase.weights for phase in run.order.phases) for run in runs()) > 15


@pytest.mark.slow
def test_equals_the_plain_order():
    for run in runs()[:20]:
        plain = reference.Reference(run.windows, run.seed, run.rows, run.ids)
        some = sorted(run.rng.sample(range(run.size), min(run.size, 60)))
        edges = [g for row in run.order.phases for g in (row.first_sample - 1, row.first_sample) if 0 <= g < run.size]
        for g in some + edges:
            assert run.triples[g] == plain.sample(g)
            step = plain.step_of(g)
            assert run.order.first_sample(step) <= g < run.order.first_sample(step + 1)
        assert [row.offset for row in run.order.phases] == [row["offset"] for row in plain.table]
        for g in some[:10]:
            assert run.order.locate(*run.triples[g]) == g == plain.locate(*run.triples[g])


@pytest.mark.slow
def test_no_triple_comes_twice_and_each_is_located_where_it_is():
    for run in runs() + aligned_runs():
        assert len(set(run.triples)) == run.size
        assert all(0 <= window < run.windows[s] for s, _, window in run.triples)
        for s in range(len(run.windows)):
            here = np.flatnonzero(run.sources == s)
            positions, found = run.order.locate_many(s, run.epochs[here], run.window[here])
            assert found.all()
            assert np.array_equal(positions, here)


@pytest.mark.slow
def test_what_is_located_beyond_is_given_there_and_what_is_never_given_is_not_located():
    for run in runs():
        last = run.order.phases[-1]
        for s, count in enumerate(run.windows):
            epochs = np.repeat(np.arange(4), min(count, 40))
            windows = np.tile(run.rng.sample(range(count), min(count, 40)), 4)
            positions, found = run.order.locate_many(s, epochs, windows)
            sources, at_epochs, at_windows = run.order.samples(positions)
            assert (sources[found] == s).all()
            assert np.array_equal(at_epochs[found], epochs[found])
            assert np.array_equal(at_windows[found], windows[found])
            if last.weights[s]:
                assert found.all()
            else:
                known = set(run.triples[: last.first_sample])
                for epoch, window, hit in zip(epochs.tolist(), windows.tolist(), found.tolist(), strict=True):
                    assert hit == ((s, epoch, window) in known)


@pytest.mark.slow
def test_samples_equal_sample_whatever_the_sequence():
    for run in runs()[:15]:
        positions = [run.rng.randrange(run.size) for _ in range(50)]
        got = [values.tolist() for values in run.order.samples(positions)]
        assert list(zip(*got, strict=True)) == [run.order.sample(g) for g in positions]
        assert list(zip(*got, strict=True)) == [run.triples[g] for g in positions]


@pytest.mark.slow
def test_many_positions_are_the_same_as_few(monkeypatch):
    for run in runs()[:12]:
        shuffled = np.random.default_rng(0).permutation(run.size)
        monkeypatch.setattr(order_module, "CHUNK", 301)
        sources, epochs, windows = run.order.samples(shuffled)
        located = run.order.locate_many(int(sources[0]), epochs, 0)
        monkeypatch.undo()
        for got, whole in zip((sources, epochs, windows), (run.sources, run.epochs, run.window), strict=True):
            assert np.array_equal(got, whole[shuffled])
        for got, whole in zip(located, run.order.locate_many(int(sources[0]), epochs, 0), strict=True):
            assert np.array_equal(got, whole)


@pytest.mark.slow
def test_a_later_phase_changes_nothing_before_it():
    for run in runs():
        for number, row in enumerate(run.order.phases[1:]):
            before = run.made(run.phases[:number])
            got = before.samples(np.arange(row.first_sample))
            for values, whole in zip(got, (run.sources, run.epochs, run.window), strict=True):
                assert np.array_equal(values, whole[: row.first_sample])
            assert before.phases == run.order.phases[: number + 1]


@pytest.mark.slow
def test_blocks_that_divide_the_cut_leave_no_holes():
    for run in aligned_runs():
        last = run.order.phases[-1]
        ends = [row.first_sample for row in run.order.phases]
        for end in [*ends, last.first_sample + (run.size - last.first_sample) // last.block * last.block]:
            for indices in run.kappas(0, end).values():
                assert sorted(indices) == list(range(len(indices)))


@pytest.mark.slow
def test_holes_are_fewer_than_a_block_a_cut_and_the_next_phase_gives_them_first():
    """A last phase with blocks of one sample shows the word's own sequence: holes ascending, then the frontier."""
    holed = 0
    for run in runs()[:20]:
        sizes = [row.block for row in run.order.phases]
        end = run.order.phases[-1].first_sample + run.rows[-1][2] * 3
        step = run.rows[-1][0] + 3
        run_on = run.made([*run.phases, Phase(step, tuple([1] * len(run.windows)), 5, 1)])
        got = run_on.samples(np.arange(end + 150 * len(run.windows)))
        triples = list(zip(*(values.tolist() for values in got), strict=True))
        whole = Run.__new__(Run)
        whole.windows, whole.seed, whole.ids, whole.triples = run.windows, run.seed, run.ids, triples
        before, after = whole.kappas(0, end), whole.kappas(end, len(triples))
        holes = {}
        for s, indices in before.items():
            holes[s] = sorted(set(range(max(indices, default=-1) + 1)) - set(indices))
            assert len(set(indices)) == len(indices)
            expected = holes[s] + list(range(max(indices, default=-1) + 1, 10**5))
            assert after[s] == expected[: len(after[s])]
        assert sum(map(len, holes.values())) <= sum(size - 1 for size in sizes)
        holed += any(holes.values())
    assert holed > 10


def test_an_inactive_source_keeps_its_place():
    """Source 1 pauses for a phase in the middle of a block and goes on where it was."""
    kappas = Run.__new__(Run)
    kappas.windows, kappas.seed, kappas.ids = [50, 40], 4, ["0", "1"]
    order = Order((1, 1), kappas.windows, 4, [Phase(3, (1, 0)), Phase(9, (1, 1), None, 1)], global_batch=5, block=64)
    triples = zip(*(values.tolist() for values in order.samples(np.arange(400))), strict=True)
    kappas.triples = list(triples)
    before, pause, after = kappas.kappas(0, 15)[1], kappas.kappas(15, 45)[1], kappas.kappas(45, 400)[1]
    assert pause == []
    holes = sorted(set(range(max(before) + 1)) - set(before))
    assert holes
    assert after[: len(holes) + 3] == [*holes, *range(max(before) + 1, max(before) + 4)]
    carried = [divmod(kappa, 40) for kappa in holes]
    key = reference.base_key(4, "src", "1")
    for epoch, i in carried:
        window = reference.permute(i, 40, reference.subkey(key, epoch))
        position = order.locate(1, epoch, window)
        assert position is not None
        assert position >= 45


def test_consumed_counts_what_was_given():
    for run in runs() + aligned_runs():
        ends = [0, run.size, *(run.rng.randrange(run.size + 1) for _ in range(6))]
        for end in ends + [row.first_sample for row in run.order.phases]:
            counts = Counter(run.sources[:end].tolist())
            assert run.order.consumed(end) == tuple(counts[s] for s in range(len(run.windows)))


@pytest.mark.slow
def test_steps_and_batches_follow_the_ramp():
    for run in runs():
        order, g, step = run.order, 0, 0
        sizes = {first: size for first, _, size, _ in run.rows}
        size = sizes[0]
        while g < run.size:
            size = sizes.get(step, size)
            assert order.first_sample(step) == g
            assert order.global_batch_at(step) == size
            for got, whole in zip(order.batch(step), (run.sources, run.epochs, run.window), strict=True):
                assert got.shape == (size,)
                assert got.dtype == np.uint64
                assert np.array_equal(got[: run.size - g], whole[g : g + size])
            g += size
            step += 1


def test_batches_are_the_same_in_any_sequence():
    order = Order([3, 1], [100, 7], 1, [Phase(40, None, 6), Phase(90, (1, 2), 9, 4)], global_batch=4)
    rng = random.Random(0)
    steps = [*range(5), 3, 4, 5, 38, 39, 40, 41, 42, 5000, 5001, *(rng.randrange(6000) for _ in range(60)), 0, 1]
    for step in steps:
        first = order.first_sample(step)
        batch = order.batch(step)
        expected = order.samples(range(first, first + order.global_batch_at(step)))
        for got, values in zip(batch, expected, strict=True):
            assert np.array_equal(got, values)
            got[:] = 0  # the caller's own


def test_a_change_of_the_batch_alone_goes_on_with_the_word():
    phases = [Phase(i, None, 100 + i % 2) for i in range(1, 400)]
    order = Order([999, 1], [10**6, 10**6], 0, phases, global_batch=100)
    end = order.phases[-1].first_sample
    assert abs(order.consumed(end)[1] - end / 1000) <= 2
    equal = Order([999, 1], [10**6, 10**6], 0, [Phase(7, ("99.9", "0.1"))])
    assert equal.phases[1].offset == 7 * 1024


def test_short_phases_do_not_starve_a_small_source():
    """A thousand changes of the recipe after 100 samples each; the source's share is a thousandth."""
    phases = [Phase(i, (999, 1) if i % 2 else (998, 1)) for i in range(1, 1000)]
    order = Order([998, 1], [10**6, 10**6], 5, phases, global_batch=100)
    assert 85 <= order.consumed(100_000)[1] <= 118
    offsets = [row.offset for row in order.phases[1:]]
    assert len(set(offsets)) > 600
    assert all(0 <= row.offset < sum(row.weights) for row in order.phases)


@pytest.mark.parametrize("weights", [[1, 1e-6], [0.7, 0.3 - 1e-6, 1e-6], [5, 3, 2, 1, 0.5]])
def test_every_prefix_holds_each_source_to_two_samples(weights):
    order = Order(weights, [10**12] * len(weights), 3)
    total = sum(order.phases[0].weights)
    for g in [*range(0, 1024 * 40, 1024), 10**6 // 1024 * 1024, 10**12 // 1024 * 1024]:
        counts = order.consumed(g)
        assert sum(counts) == g
        for count, weight in zip(counts, order.phases[0].weights, strict=True):
            assert abs(count * total - g * weight) <= 1.68 * total
    later = Order(weights, [10**12] * len(weights), 3, [Phase(5, tuple(weights[::-1]))])
    weights_later = later.phases[1].weights
    start = later.consumed(5 * 1024)
    for step in range(6, 60):
        counts = later.consumed(step * 1024)
        for count, before, weight in zip(counts, start, weights_later, strict=True):
            assert abs((count - before) * total - (step - 5) * 1024 * weight) <= 3.36 * total


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(1e-6, 1), st.integers(1, 10**12)), min_size=1, max_size=20),
    st.integers(0, 2**63),
    st.lists(st.integers(0, 10**12), min_size=1, max_size=20),
)
def test_any_order_is_inverted(sources, seed, positions):
    order = Order([weight for weight, _ in sources], [count for _, count in sources], seed)
    for g, s, epoch, window in zip(positions, *(values.tolist() for values in order.samples(positions)), strict=True):
        assert window < sources[s][1]
        assert order.locate(s, epoch, window) == g


def test_what_lies_beyond_the_last_position_is_not_found_before_it():
    """Sample r of the rare source stands near r · 2^32: from r = 2^30 on nowhere, whatever that is modulo 2^64."""
    order = Order([1, 2**32 - 1], [1, 5], 3)
    assert order.locate(0, 2**29, 0) is not None
    for epoch in (2**30 + 1, 2**31, 2**32, 2**32 + 7, 2**34, 2**40 + 1, 2**50, 2**61):
        assert order.locate(0, epoch, 0) is None
    positions, found = order.locate_many(0, np.arange(2**32 - 50, 2**32 + 50), 0)
    assert not found.any()
    assert not positions.any()


def test_the_order_is_defined_up_to_its_last_position():
    windows = [10**12 + 7, 3, 1, 2**40 + 1]
    rows = [(0, [0.5, 0.25, 1e-6, 0.3], 1024, 1024), (2**51, [1, 2, 3, 1e-3], 7, 13)]
    order = Order(rows[0][1], windows, 9, [Phase(2**51, rows[1][1], 7, 13)])
    plain = reference.Reference(windows, 9, rows)
    for g in [2**61 - 1, 2**61, 2**61 + 1, 2**62 - 1025, 2**62 - 2, 2**62 - 1]:
        assert order.sample(g) == plain.sample(g)
        assert order.locate(*plain.sample(g)) == g
    assert order.locate(2, 2**62 - 1, 0) is None
    assert order.locate(2, 2**90, 0) is None
    for call in (order.sample, order.samples):
        with pytest.raises(ValueError, match=r"2\^62|4611686018427387904"):
            call(MAX_SAMPLES)
    alone = Order([1], [1], 0)
    epochs = alone.samples(np.arange(2**62 - 1024, 2**62))[1]
    assert sorted(epochs.tolist()) == list(range(2**62 - 1024, 2**62))
    assert alone.locate_many(0, epochs, 0)[0].tolist() == list(range(2**62 - 1024, 2**62))
    with pytest.raises(ValueError, match="2\\^62"):
        alone.batch(2**52)
    assert len(alone.batch(2**52 - 1)[0]) == 1024


def test_shapes_and_kinds_of_positions():
    order = Order([1, 2], [10, 20], 0)
    square = order.samples(np.arange(6, dtype=np.int32).reshape(2, 3))
    assert [values.shape for values in square] == [(2, 3)] * 3
    assert [values.dtype for values in square] == [np.uint64] * 3
    assert [values.shape for values in order.samples([])] == [(0,)] * 3
    assert tuple(int(values) for values in order.samples(np.uint8(5))) == order.sample(5) == order.sample(np.int64(5))
    assert all(type(value) is int for value in order.sample(5))
    positions, found = order.locate_many(1, [[0], [1]], np.arange(20))
    assert positions.shape == found.shape == (2, 20)
    assert found.all()
    assert positions.dtype == np.uint64


def test_what_does_not_exist_is_never_given():
    order = Order([1, 0], [10, 0], 0)
    assert order.locate(0, 0, 10) is None
    assert order.locate(0, 0, 2**80) is None
    assert order.locate(1, 0, 0) is None
    assert not order.locate_many(0, 0, np.array([10, 11, 2**64 - 1], np.uint64))[1].any()


@pytest.mark.slow
def test_memory_beside_the_result_does_not_grow():
    order = Order([3, 2, 1], [10**4, 10**6, 10**9], 0, [Phase(100, (1, 1, 1))])

    def beside(size):
        positions = np.random.default_rng(0).integers(0, 10**6, size, dtype=np.uint64)
        tracemalloc.start()
        result = order.samples(positions)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak - sum(values.nbytes for values in result)

    small, large = beside(600_000), beside(1_800_000)
    assert large < small * 1.1 + 10**6
