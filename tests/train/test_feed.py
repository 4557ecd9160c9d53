"""From arrays to tensors: what the model is given, step after step, is what the loader made."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from quern.mixtures.order import Order
from quern.train.batches import feed as feed_module
from quern.train.batches.boundaries import open_boundaries
from quern.train.batches.corpus import Corpus
from quern.train.batches.feed import Feed, to_device
from quern.train.batches.loader import Loader, MicroBatch, StepBatch
from support.train.corpora import make_shards, write_run
from support.train.hand_clock import HandClock

CPU = torch.device("cpu")
SEQ_LEN = 24


def batch_of(lengths: list[list[int]]) -> MicroBatch:
    """Rows of documents of the given lengths, numbers that name their place."""
    rows, length = len(lengths), sum(lengths[0])
    tokens = np.arange(rows * length).reshape(rows, length)
    bounds = np.concatenate([[0], np.cumsum([n for row in lengths for n in row])]).astype(np.int32)
    documents = np.array([[d for d, n in enumerate(row) for _ in range(n)] for row in lengths], np.int32)
    positions = np.array([[p for n in row for p in range(n)] for row in lengths], np.int32)
    none = np.zeros(rows, np.uint64)
    return MicroBatch(tokens, tokens + 1, positions, bounds, documents, none, none, none, np.arange(rows))


@pytest.mark.parametrize("lengths", [[[6]], [[2, 4], [6]], [[1, 1, 1, 3], [3, 3]], [[1] * 6, [1] * 6]])
def test_documents_survive_the_padding_of_their_bounds(lengths):
    """Empty documents at the end make few sizes of many; the real ones stay as they are."""
    batch = batch_of(lengths)
    inputs = to_device(batch, CPU, document_mask=True)
    bounds = inputs.documents.cu_seqlens
    assert bounds.dtype == torch.int32
    assert bounds.tolist()[: len(batch.cu_seqlens)] == batch.cu_seqlens.tolist()
    assert set(bounds.tolist()[len(batch.cu_seqlens) :]) <= {batch.tokens_BL.size}
    assert len(bounds) & (len(bounds) - 1) == 0
    assert len(bounds) < 2 * len(batch.cu_seqlens)
    longest = int(bounds.diff().max())
    assert longest <= inputs.documents.max_seqlen <= batch.tokens_BL.shape[1]
    assert inputs.documents.max_seqlen < 2 * longest
    assert inputs.documents.ids_BL.tolist() == batch.documents_BL.tolist()
    assert inputs.positions_BL.tolist() == batch.positions_BL.tolist()


def test_few_sizes_for_many_batches():
    """Compiled blocks are made anew for a new size: over a thousand batches only a handful may come."""
    rng = random.Random(2)
    sizes = set()
    for _ in range(1000):
        row: list[int] = []
        while sum(row) < 512:
            row.append(min(rng.randint(1, 400), 512 - sum(row)))
        documents = to_device(batch_of([row]), CPU, document_mask=True).documents
        sizes.add((len(documents.cu_seqlens), documents.max_seqlen))
    assert len(sizes) <= 12


def test_without_masks_there_is_nothing_to_say_of_documents():
    inputs = to_device(batch_of([[2, 4], [6]]), CPU, document_mask=False)
    assert inputs.documents is None
    assert inputs.positions_BL is None
    assert inputs.tokens_BL.dtype == inputs.targets_BL.dtype == torch.int64
    assert inputs.targets_BL.tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]]


@pytest.fixture
def loader(tmp_path) -> Iterator[Loader]:
    paths = write_run(tmp_path / "run", {"web": make_shards(random.Random(4), [[40, 90, 7, 130, 33, 60]], 0.2)})
    corpus = Corpus(paths, SEQ_LEN)
    order = Order([1], corpus.windows, 3, ids=corpus.ids, seq_len=SEQ_LEN, global_batch=4)
    boundaries = open_boundaries(corpus.readers, str(tmp_path / "index"))
    loader = Loader(corpus, order, rank=0, world=1, micro_batch=2, document_mask=True, boundaries=boundaries)
    yield loader
    loader.close()


def test_steps_come_in_order_as_the_loader_makes_them(loader):
    feed = Feed(loader, CPU, document_mask=True, depth=2)
    feed.start(5, 12)
    held = []
    for data_step in range(5, 12):
        inputs = feed.take(data_step)
        assert inputs.data_step == data_step
        held.append((inputs, loader.take(data_step)))
    for inputs, expected in held:  # looked at late: no tensor shares memory with a later step's
        assert inputs.valid_tokens == expected.valid_tokens
        assert len(inputs.micro_batches) == len(expected.micro_batches) == 2
        for given, made in zip(inputs.micro_batches, expected.micro_batches, strict=True):
            np.testing.assert_array_equal(given.tokens_BL.numpy(), made.tokens_BL)
            np.testing.assert_array_equal(given.targets_BL.numpy(), made.targets_BL)
            np.testing.assert_array_equal(given.positions_BL.numpy(), made.positions_BL)
            np.testing.assert_array_equal(given.documents.ids_BL.numpy(), made.documents_BL)
    with pytest.raises(StopIteration):
        feed.take(12)
    feed.close()


def test_a_step_that_is_not_the_next_is_an_error(loader):
    feed = Feed(loader, CPU, document_mask=True)
    feed.start(5, 12)
    with pytest.raises(AssertionError, match="expected data step 6, the loader gave 5"):
        feed.take(6)
    feed.close()


def test_the_time_stood_still_is_measured(loader, monkeypatch):
    made, clock = loader.take, HandClock()

    def slow(data_step: int) -> StepBatch:
        if data_step == 3:
            clock.pass_once_read(5.0)
        return made(data_step)

    monkeypatch.setattr(feed_module, "time", clock)

    monkeypatch.setattr(loader, "take", slow)
    feed = Feed(loader, CPU, document_mask=True, depth=1)
    feed.start(3, 6)
    assert feed.take(3).wait_s == 5.0
    clock.now += 7.0
    assert feed.take(4).wait_s == 0.0
    feed.close()


def test_an_error_of_the_loader_reaches_the_loop(loader, monkeypatch):
    def broken(data_step: int) -> StepBatch:
        raise OSError("shard gone")

    monkeypatch.setattr(loader, "take", broken)
    feed = Feed(loader, CPU, document_mask=True)
    feed.start(0, 3)
    with pytest.raises(OSError, match="shard gone"):
        feed.take(0)
    feed.close()
