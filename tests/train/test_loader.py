"""The loader beside a reading of the same streams token by token."""

from __future__ import annotations

import os
import random
import resource
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quern.errors import InputError
from quern.mixtures.order import Order, Phase
from quern.train.batches.boundaries import open_boundaries
from quern.train.batches.corpus import Corpus
from quern.train.batches.loader import IGNORE, Loader, MicroBatch, StepBatch
from support.train.corpora import Doc, Shards, Stream, make_doc, make_shards, write_run

LENGTHS = st.one_of(st.integers(1, 3), st.integers(1, 40))
SHARDS = st.lists(st.lists(LENGTHS, max_size=12), min_size=1, max_size=5)


class Setup:
    """A corpus on disk, its order, and the oracle of its streams."""

    def __init__(self, folder: Path, sources: dict[str, Shards], seq_len: int, **order: Any) -> None:
        paths = write_run(folder / "run", sources)
        self.seq_len = seq_len
        self.corpus = Corpus(paths, seq_len)
        self.boundaries = open_boundaries(self.corpus.readers, str(folder / "index"))
        self.streams = [Stream(shards) for shards in sources.values()]
        weights = order.pop("weights", [1] * len(paths))
        self.order = Order(weights, self.corpus.windows, 3, order.pop("phases", None), ids=self.corpus.ids, **order)

    def loader(self, rank: int = 0, world: int = 1, micro_batch: int = 1, mask: bool = True, **more: Any) -> Loader:
        return Loader(
            self.corpus, more.pop("order", self.order), rank=rank, world=world, micro_batch=micro_batch,
            document_mask=mask, boundaries=self.boundaries, **more,
        )  # fmt: skip

    def check(self, batch: MicroBatch, mask: bool) -> None:
        """Every field against the oracle."""
        num, length = batch.tokens_BL.shape
        cu_seqlens = []
        for row in range(num):
            window = self.streams[int(batch.sources[row])].window(int(batch.windows[row]), length, mask)
            assert batch.tokens_BL[row].tolist() == window.tokens
            assert batch.targets_BL[row].tolist() == window.targets
            assert batch.positions_BL[row].tolist() == window.positions
            assert batch.documents_BL[row].tolist() == window.documents
            cu_seqlens += [row * length + place for place, position in enumerate(window.positions) if position == 0]
        assert batch.cu_seqlens.tolist() == [*cu_seqlens, num * length]
        types = [batch.tokens_BL, batch.targets_BL, batch.positions_BL, batch.documents_BL, batch.cu_seqlens]
        assert [array.dtype.name for array in types] == ["int64", "int64", "int32", "int32", "int32"]
        assert all(array.flags.c_contiguous and array.flags.writeable for array in types)

    def step(self, data_step: int) -> list[tuple[int, int, int]]:
        """The samples of a step, asked one by one."""
        first, size = self.order.first_sample(data_step), self.order.global_batch_at(data_step)
        return [tuple(map(int, self.order.sample(g))) for g in range(first, first + size)]  # type: ignore[misc]

    def num_targets(self, data_step: int, mask: bool) -> int:
        windows = [self.streams[s].window(w, self.seq_len, mask) for s, _, w in self.step(data_step)]
        return sum(target != IGNORE for window in windows for target in window.targets)


@pytest.fixture
def mixed(tmp_path: Path) -> Setup:
    """Two sources of several shards, some of them empty, documents of 1 to 60 tokens, some purged; a growing batch."""
    rng = random.Random(4)
    sources = {
        "web": make_shards(rng, [[rng.choice((1, 2, 5, 16, 60)) for _ in range(9)] for _ in range(4)], 0.2),
        "books": make_shards(rng, [[], [200, 7], [], [1, 1, 90, 3], []], 0.2),
    }
    phases = [Phase(3, global_batch=24), Phase(5, (1, 3), global_batch=36)]
    return Setup(tmp_path, sources, 16, weights=[2, 1], global_batch=12, phases=phases)


def same(a: StepBatch, b: StepBatch) -> bool:
    plain, other = ((step.data_step, step.valid_tokens, len(step.micro_batches)) for step in (a, b))
    return plain == other and all(
        np.array_equal(getattr(x, field.name), getattr(y, field.name))
        for x, y in zip(a.micro_batches, b.micro_batches, strict=True)
        for field in fields(x)
    )


@pytest.mark.slow
@settings(max_examples=40)
@given(
    lengths=st.lists(SHARDS, min_size=1, max_size=3),
    seq_len=st.integers(1, 20),
    purged=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**32),
    mask=st.booleans(),
    micro_batch=st.sampled_from([1, 2, 3]),
)
def test_every_window_is_what_reading_token_by_token_gives(
    lengths: list[list[list[int]]], seq_len: int, purged: float, seed: int, mask: bool, micro_batch: int
) -> None:
    rng = random.Random(seed)
    for shards in lengths:  # every source has a window
        shards[-1].append(max(1, seq_len + 1 - sum(map(sum, shards))))
    sources = {f"s{i}": make_shards(rng, shards, purged) for i, shards in enumerate(lengths)}
    with tempfile.TemporaryDirectory() as folder:
        setup = Setup(Path(folder), sources, seq_len, global_batch=12)
        loader = setup.loader(micro_batch=micro_batch, mask=mask)
        for data_step in (0, 1, 40):
            step = loader.take(data_step)
            assert step.valid_tokens == setup.num_targets(data_step, mask)
            for batch in step.micro_batches:
                setup.check(batch, mask)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [True, False])
def test_chosen_layouts_of_documents_and_shards(tmp_path: Path, mask: bool) -> None:
    rng = random.Random(1)
    doc: Callable[..., Doc] = lambda length, purged=False: make_doc(rng, length, purged)  # noqa: E731
    sources = {
        "at_start": [[doc(8), doc(8), doc(16), doc(1)]],  # documents start exactly at windows
        "long": [[doc(45)]],  # over several windows
        "ones": [[doc(1) for _ in range(25)]],
        "over_shards": [[doc(3)], [doc(2)], [], [doc(1)], [doc(30)]],  # a window in four shards
        "at_shards": [[doc(8)], [doc(8)], [doc(9)]],  # the last target is the next shard's first token
        "purged_first": [[doc(9, True), doc(9), doc(3, True), doc(3, True), doc(9)]],
        "purged_last": [[doc(7), doc(18, True)]],  # up to the very last target
        "one_window": [[doc(5), doc(4)]],
    }
    setup = Setup(tmp_path, sources, 8, global_batch=32)
    seen = Counter[tuple[int, int]]()
    for data_step in range(8):
        step = setup.loader(micro_batch=8, mask=mask).take(data_step)
        assert step.valid_tokens == setup.num_targets(data_step, mask)
        for batch in step.micro_batches:
            setup.check(batch, mask)
            seen.update(zip(batch.sources.tolist(), batch.windows.tolist(), strict=True))
    assert set(seen) == {(s, w) for s, windows in enumerate(setup.corpus.windows) for w in range(windows)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "micro_batch", "mask"),
    [(1, 1, True), (1, 12, False), (2, 3, True), (3, 2, False), (4, 1, True), (12, 1, False), (6, 2, True)],
)
def test_ranks_and_micro_batches_together_read_the_step_and_nothing_else(
    mixed: Setup, world: int, micro_batch: int, mask: bool
) -> None:
    loaders = [mixed.loader(rank, world, micro_batch, mask) for rank in range(world)]
    for data_step in (0, 2, 3, 4, 5, 21):
        samples = mixed.step(data_step)
        steps = [loader.take(data_step) for loader in loaders]
        batches = [batch for step in steps for batch in step.micro_batches]
        assert {len(batch.indices) for batch in batches} == {micro_batch}
        assert {len(step.micro_batches) for step in steps} == {len(samples) // world // micro_batch}
        read = {
            int(place): (int(s), int(e), int(w))
            for b in batches
            for place, s, e, w in zip(b.indices, b.sources, b.epochs, b.windows, strict=True)
        }
        assert sum(len(batch.indices) for batch in batches) == len(samples)
        assert read == dict(enumerate(samples))
        for batch in batches:
            mixed.check(batch, mask)
        targets = sum(int((batch.targets_BL != IGNORE).sum()) for batch in batches)
        assert {step.valid_tokens for step in steps} == {targets}


def test_the_valid_tokens_of_a_rank_are_counted_without_reading_a_token_of_another(
    mixed: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, other = mixed.loader(0, 12), mixed.loader(1, 12)
    read: list[tuple[int, int]] = []
    window = loader._window
    monkeypatch.setattr(loader, "_window", lambda own, start: (read.append((own, start)), window(own, start))[1])
    step = loader.take(0)
    assert len(read) == 1
    assert step.valid_tokens == mixed.num_targets(0, True) == other.take(0).valid_tokens


def test_an_epoch_has_every_token_as_target_at_most_once_and_as_many_as_the_spans_say(tmp_path: Path) -> None:
    rng = random.Random(8)
    shards = make_shards(rng, [[rng.randint(1, 30) for _ in range(20)] for _ in range(4)], 0.25)
    for mask in (True, False):
        setup = Setup(tmp_path / str(mask), {"web": shards}, 13, global_batch=1)
        loader, num = setup.loader(mask=mask), setup.corpus.windows[0]
        targets = Counter[int]()
        for data_step in range(num):
            (batch,) = loader.take(data_step).micro_batches
            assert batch.epochs.tolist() == [0]
            places = int(batch.windows[0]) * 13 + 1 + np.flatnonzero(batch.targets_BL[0] != IGNORE)
            targets.update(places.tolist())
        assert set(targets.values()) == {1}
        end, expected, start = num * 13 + 1, 0, 0
        for doc in (doc for shard in shards for doc in shard):
            a, b = start + mask, start + len(doc.tokens)
            expected += 0 if doc.purged else max(0, min(b, end) - max(a, 1))
            start = b
        assert len(targets) == expected


def test_a_step_is_the_same_whatever_was_read_before_and_on_whatever_thread(mixed: Setup) -> None:
    fresh = {step: mixed.loader(1, 3, 2).take(step) for step in (0, 1, 7, 400)}
    loader = mixed.loader(1, 3, 2)
    for data_step in (400, 7, 0, 400, 1, 0):
        assert same(loader.take(data_step), fresh[data_step])
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda s=step: results.append(same(loader.take(s), fresh[s])))
        for step in (0, 400, 1, 7) * 3
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 12


def test_a_batch_may_be_written_to_without_changing_what_is_read_next(mixed: Setup) -> None:
    for mask in (True, False):
        loader = mixed.loader(mask=mask)
        before = loader.take(2)
        for batch in loader.take(2).micro_batches:
            for field in fields(batch):
                getattr(batch, field.name).fill(7)
        assert same(loader.take(2), before)


def test_memory_is_used_again_only_when_nobody_holds_it(mixed: Setup) -> None:
    loader = mixed.loader(micro_batch=2)
    expected = {step: mixed.loader(micro_batch=2).take(step) for step in range(6)}
    held = [loader.take(step) for step in range(6)]
    rows = held[3].micro_batches[1].targets_BL[1:]  # a view of a view outlives its batch
    wanted = rows.tolist()
    held[3] = loader.take(3)
    assert all(same(step, expected[step.data_step]) for step in held)
    assert rows.tolist() == wanted
    held.clear()
    free = len(loader._blocks._free)
    assert free > 0  # what was held has come back, but for the block of ``rows``
    for data_step in range(50):
        loader.take(data_step % 3)
    assert rows.tolist() == wanted
    assert len(loader._blocks._free) == free


def test_more_shards_than_open_files_are_allowed(tmp_path: Path) -> None:
    setup = Setup(tmp_path, {"web": make_shards(random.Random(1), [[5]] * 80)}, 8, global_batch=4)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, limits[1]))
    try:
        assert setup.loader(micro_batch=2).take(0).valid_tokens
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
def test_costs_spread_evenly_over_ranks(mixed: Setup) -> None:
    """With document masks each rank's share costs about as much; round-robin without."""
    world = 4
    waits, evenly = [], []
    for data_step in range(5, 9):
        for masked, into in ((True, waits), (False, evenly)):
            costs = []
            for rank in range(world):
                step = mixed.loader(rank, world, 3, masked).take(data_step)
                costs.append([
                    sum(
                        mixed.streams[int(s)].window(int(w), 16, True).cost
                        for s, w in zip(batch.sources, batch.windows, strict=True)
                    )
                    for batch in step.micro_batches
                ])  # fmt: skip
            into.append(np.array(costs).max(0).sum() / (np.array(costs).sum() / world))
    assert max(waits) < 1.1
    assert np.mean(waits) - 1 < 0.5 * (np.mean(evenly) - 1)
    plain = mixed.loader(1, world, 3, False).take(5)
    assert [batch.indices.tolist() for batch in plain.micro_batches] == [[1, 5, 9], [13, 17, 21], [25, 29, 33]]


def test_the_order_is_asked_for_many_steps_at_once(mixed: Setup) -> None:
    calls: list[int] = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(mixed.order, name)

        def samples(self, g: Sequence[int]) -> Any:
            calls.append(len(g))
            return mixed.order.samples(g)

    loader = mixed.loader(order=Counted())
    for data_step in range(40):
        loader.take(data_step)
    assert len(calls) <= 4
    for data_step in range(0, 10_000, 2_000):
        loader.take(data_step)
    assert len(loader._ahead) <= 2  # what was read is not kept
    assert loader.order_s > 0
    assert loader.spent_s > loader.order_s


def test_sources_of_the_order_are_read_where_the_map_says(mixed: Setup) -> None:
    windows = mixed.corpus.windows
    order = Order([1, 0, 2], [windows[1], 77, windows[0]], 3, [Phase(4, (1, 1, 1))], global_batch=12)
    setup_loader = mixed.loader(order=order, source_map=[1, None, 0])
    (batch, *_) = setup_loader.take(0).micro_batches
    for step in range(4):
        for batch in setup_loader.take(step).micro_batches:
            own = [1, None, 0][int(batch.sources[0])]
            assert own is not None
            window = mixed.streams[own].window(int(batch.windows[0]), 16, True)
            assert batch.tokens_BL[0].tolist() == window.tokens
            assert batch.targets_BL[0].tolist() == window.targets
    with pytest.raises(InputError, match=r"data step 4: reads source 1 of the order"):
        setup_loader.take(4)


def test_batches_that_cannot_be_divided_are_refused_with_what_would_fit(mixed: Setup) -> None:
    with pytest.raises(InputError, match=r"global_batch: expected a multiple of 8 .*got 12; 8 or 16 would fit, or a "
                       r"micro_batch of 1, 2, 3, 6"):  # fmt: skip
        mixed.loader(world=2, micro_batch=4)
    with pytest.raises(InputError, match=r"multiple of 24 .*got 36; 24 or 48"):  # only the last phase is at fault
        mixed.loader(order=Order([1, 1], mixed.corpus.windows, 3, [Phase(9, global_batch=36)], global_batch=24),
                     world=8, micro_batch=3)  # fmt: skip


def test_an_order_of_other_data_is_refused(mixed: Setup) -> None:
    windows = mixed.corpus.windows
    with pytest.raises(InputError, match=rf"books: has {windows[1]} windows of seq_len 16, expected {windows[1] + 1}"):
        mixed.loader(order=Order([1, 1], [windows[0], windows[1] + 1], 3, global_batch=12))
    with pytest.raises(InputError, match="has 1 sources, expected 2"):
        mixed.loader(order=Order([1], windows[:1], 3, global_batch=12))
    with pytest.raises(InputError, match=r"has 36 documents, expected 6"):
        Loader(mixed.corpus, mixed.order, rank=0, world=1, micro_batch=1, document_mask=True,
               boundaries=[mixed.boundaries[0], mixed.boundaries[0]])  # fmt: skip


def test_wide_tokens_are_read_whole(tmp_path: Path) -> None:
    rng = random.Random(2)
    shards = make_shards(rng, [[20, 30]], vocab_size=200_000)
    paths = write_run(tmp_path / "run", {"web": shards}, dtype="uint32", vocab_size=200_000)
    corpus = Corpus(paths, 7)
    loader = Loader(corpus, Order([1], corpus.windows, 1, global_batch=7), rank=0, world=1, micro_batch=7,
                    document_mask=True, boundaries=open_boundaries(corpus.readers, str(tmp_path)))  # fmt: skip
    (batch,) = loader.take(0).micro_batches
    stream = Stream(shards)
    assert max(stream.tokens) > 1 << 16
    assert batch.tokens_BL.tolist() == [stream.window(int(w), 7, True).tokens for w in batch.windows]


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_the_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "quern-prefetch"}


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = threads()
    yield
    assert threads() == before


def test_prefetched_steps_are_those_that_take_gives(mixed: Setup) -> None:
    loader = mixed.loader(0, 2, 3)
    steps = list(loader.prefetch(2, 9, 3))
    assert [step.data_step for step in steps] == list(range(2, 9))
    assert all(same(step, mixed.loader(0, 2, 3).take(step.data_step)) for step in steps)
    assert list(loader.prefetch(5, 5, 1)) == []
    loader.close()


def test_closing_the_loader_ends_what_it_prefetches(mixed: Setup) -> None:
    loader = mixed.loader()
    batches = loader.prefetch(0, None, 2)
    assert [next(batches).data_step for _ in range(3)] == [0, 1, 2]
    assert len(threads()) == 1
    loader.close()
    assert not threads()
    loader.close()
