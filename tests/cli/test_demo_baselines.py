"""n-gram baselines against counting in dictionaries, closed forms and sums of probabilities."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quern import storage
from quern.cli.demo.baselines import TokenStream, loss, nll, read_stream
from quern.tokenize.shard_format import MANIFEST, VERSION_FILE, ShardWriter, version_entry


def stream_of(documents: list[list[int]], purged: list[bool] | None = None, dtype: type = np.uint16) -> TokenStream:
    gone = purged or [False] * len(documents)
    ages = [0 if out else age for document, out in zip(documents, gone, strict=True) for age in range(len(document))]
    tokens = np.array([token for document in documents for token in document], dtype)
    return TokenStream(tokens, np.array(ages, np.int64))


def random_documents(rng: np.random.Generator, count: int, vocab_size: int, longest: int = 30) -> list[list[int]]:
    """Documents with something to learn: a token is often one more than the sum of the two before it."""
    documents = []
    for _ in range(count):
        document = rng.integers(0, vocab_size, 2).tolist()
        for _ in range(int(rng.integers(0, longest))):
            guess = (document[-1] + document[-2] + 1) % vocab_size
            document.append(guess if rng.random() < 0.7 else int(rng.integers(0, vocab_size)))
        documents.append(document[: int(rng.integers(1, len(document) + 1))])
    return documents


class Dictionaries:
    """The same counts and the same interpolation, one token at a time."""

    def __init__(self, documents: list[list[int]], order: int, vocab_size: int) -> None:
        self.order, self.vocab_size = order, vocab_size
        self.seen: list[dict[tuple[int, ...], Counter[int]]] = [defaultdict(Counter) for _ in range(order)]
        for document in documents:
            for at in range(1, len(document)):
                for length in range(min(order, at + 1)):
                    self.seen[length][tuple(document[at - length : at])][document[at]] += 1

    def chance(self, before: list[int], token: int) -> float:
        chance = 1 / self.vocab_size
        for length in range(min(self.order, len(before) + 1)):
            counter = self.seen[length].get(tuple(before[len(before) - length :]))
            if counter:
                chance = (counter[token] + len(counter) * chance) / (sum(counter.values()) + len(counter))
        return chance


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_losses_are_those_of_dictionaries(order: int) -> None:
    rng = np.random.default_rng(order)
    vocab_size = 11
    train = [random_documents(rng, 60, vocab_size), random_documents(rng, 20, vocab_size)]
    counted = [stream_of(part) for part in train]
    dictionaries = Dictionaries([document for part in train for document in part], order, vocab_size)
    held_out = random_documents(rng, 25, vocab_size)
    losses = iter(nll(counted, stream_of(held_out), order, vocab_size).tolist())
    for document in held_out:
        assert math.isnan(next(losses))
        for at in range(1, len(document)):
            expected = -math.log(dictionaries.chance(document[:at], document[at]))
            assert next(losses) == pytest.approx(expected, rel=1e-12)
    assert next(losses, None) is None


@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_sum_to_one(order: int) -> None:
    rng = np.random.default_rng(5)
    vocab_size = 13
    train = [stream_of(random_documents(rng, 40, vocab_size - 1))]  # one id never occurs
    for before in ([3], [12], [1, 2], [12, 4], [4, 12], [0, 0, 7]):
        losses = nll(train, stream_of([[*before, token] for token in range(vocab_size)]), order, vocab_size)
        assert np.exp(-losses[len(before) :: len(before) + 1]).sum() == pytest.approx(1.0, rel=1e-12)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1))
def test_no_token_is_impossible(seed: int) -> None:
    rng = np.random.default_rng(seed)
    train = [stream_of(random_documents(rng, 30, 4))]
    losses = nll(train, stream_of([rng.integers(0, 9, 50).tolist()]), 3, 9)
    assert np.isfinite(losses[1:]).all()
    assert (losses[1:] > 0).all()


@pytest.mark.slow
def test_higher_orders_learn_what_lower_ones_cannot() -> None:
    """A source of known entropy: 9 tokens, each the sum of the two before it with chance 0.7 + 0.3/9."""
    rng = np.random.default_rng(4)
    vocab_size = 9

    def sample(length: int) -> list[int]:
        tokens = [1, 2]
        while len(tokens) < length:
            surprise = rng.random() < 0.3
            tokens.append(int(rng.integers(0, vocab_size)) if surprise else (tokens[-1] + tokens[-2] + 1) % vocab_size)
        return tokens

    train, held_out = [[sample(200) for _ in range(count)] for count in (300, 100)]
    hit, miss = 0.7 + 0.3 / vocab_size, 0.3 / vocab_size
    entropy = -(hit * math.log(hit) + (vocab_size - 1) * miss * math.log(miss))
    losses = {}
    for order in (1, 2, 3):
        total, count = loss(nll([stream_of(train)], stream_of(held_out), order, vocab_size), 100)
        losses[order] = total / count
    assert losses[1] == pytest.approx(math.log(vocab_size), abs=0.01)  # sums of a uniform token are uniform
    assert losses[2] == pytest.approx(math.log(vocab_size), abs=0.01)
    assert losses[3] == pytest.approx(entropy, abs=0.03)


def test_purged_documents_count_for_nothing() -> None:
    rng = np.random.default_rng(2)
    documents = random_documents(rng, 40, 8)
    purged = [index % 5 == 0 for index in range(40)]
    kept = [document for document, gone in zip(documents, purged, strict=True) if not gone]
    held_out = stream_of(random_documents(rng, 10, 8))
    expected = nll([stream_of(kept)], held_out, 3, 8)
    np.testing.assert_array_equal(nll([stream_of(documents, purged)], held_out, 3, 8), expected)
    losses = nll([stream_of(kept)], stream_of(documents, purged), 3, 8)
    mask = np.repeat(purged, [len(document) for document in documents])
    assert np.isnan(losses[mask]).all()
    np.testing.assert_array_equal(losses[~mask], nll([stream_of(kept)], stream_of(kept), 3, 8))


def test_loss_is_over_the_targets_of_whole_windows() -> None:
    held_out = stream_of([[1, 2, 3, 4], [5, 6, 7, 8, 9, 1, 2], [3], [4, 5]])  # 14 tokens
    losses = nll([stream_of(random_documents(np.random.default_rng(0), 50, 10))], held_out, 2, 10)
    # L = 4: three windows with targets 1..12, less the first tokens at 4 and 11 and 12
    total, count = loss(losses, 4)
    assert (total, count) == (pytest.approx(losses[[1, 2, 3, 5, 6, 7, 8, 9, 10]].sum()), 9)
    total, count = loss(losses, 4, windows=2)
    assert (total, count) == (pytest.approx(losses[[1, 2, 3, 5, 6, 7, 8]].sum()), 7)
    assert loss(losses, 14) == (0.0, 0)


def test_large_ids_do_not_collide() -> None:
    vocab_size = 65_536
    high = vocab_size - 1
    documents = [[high, high, high - 1], [high, high - 1, high], [0, high, 1]] * 20
    losses = nll([stream_of(documents)], stream_of([[high, high, high - 1], [0, high, high]]), 3, vocab_size)
    assert losses[2] < 0.5 < 3 < losses[5]


def test_stream_of_a_run_is_read_over_all_shards(tmp_path: Path) -> None:
    folder = tmp_path / "tokens" / "web"
    shards, documents = [], [[[1, 2, 9], [3, 9]], [[4, 5, 6, 9]]]
    for number, part in enumerate(documents):
        with ShardWriter(str(folder), number, "uint16") as writer:
            ids = bytes(range(16)) * len(part)
            tokens = np.array([token for document in part for token in document], np.uint16)
            writer.add(
                ids, np.array([len(document) for document in part]), tokens, np.array([True, False][: len(part)])
            )
            shards.append(writer.finish(first_key=0, last_key=0))
    encoding = {"encoding": "test", "vocab_size": 10, "dtype": "uint16", "eot_id": 9, "seed": 0}
    storage.write_json(str(folder / MANIFEST), {**encoding, "shards": [asdict(shard) for shard in shards]})
    entry = version_entry("web", f"web/{MANIFEST}", storage.sha256(str(folder / MANIFEST)), shards)
    version = {
        "version": 1,
        "encoding": {"ranks": "r.tiktoken"},
        "sources": {"web": {**entry, "manifest": f"web/{MANIFEST}"}},
    }
    storage.write_json(str(tmp_path / "tokens" / VERSION_FILE), version)
    stream = read_stream(str(folder))
    assert stream.tokens.tolist() == [1, 2, 9, 3, 9, 4, 5, 6, 9]
    assert stream.ages.tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]  # the first and the last document are purged


def test_an_order_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        nll([], stream_of([[1]]), 4, 65_536)


def test_without_a_target_every_token_is_equally_likely() -> None:
    losses = nll([stream_of([[1]])], stream_of([[1, 2, 4]]), 2, 5)
    assert losses[1:].tolist() == pytest.approx([math.log(5)] * 2)
