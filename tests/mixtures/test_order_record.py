"""What an order is: its record, its hash, when two of them agree, and what is refused."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from quern.mixtures.order import Order, Phase
from support.named_cases import each

BASE = {
    "weights": [3, 1, 0], "windows": [100, 50, 20], "seed": 1, "phases": [Phase(4, (1, 1, 0), 8), Phase(9, (1, 1, 2))],
    "ids": ["a", "b", "c"], "seq_len": 64, "global_batch": 4,
}  # fmt: skip


def test_recorded_and_made_again():
    for change in ({}, {"block": 7}, {"seq_len": None}, {"phases": None}, {"weights": ["1/3", 0.1, 0], "seed": -5}):
        order = Order(**{**BASE, **change})
        again = Order.from_dict(json.loads(json.dumps(order.to_dict())))
        assert again.phases == order.phases
        assert again.hash == order.hash
        for values, others in zip(again.samples(range(300)), order.samples(range(300)), strict=True):
            assert np.array_equal(values, others)


def test_weights_that_were_rounded_are_recorded_as_what_they_became():
    order = Order([3**0.5, 2**0.5, 0.123456789012], [10, 10, 10], 0, [Phase(3, (0.1234567890123, 5**0.5, 3**0.5))])
    again = Order.from_dict(order.to_dict())
    assert again.phases == order.phases
    assert order.hash == Order.from_dict(again.to_dict()).hash


def test_a_record_that_is_not_this_order_is_refused():
    def check(damage):
        record = json.loads(json.dumps(Order(**BASE).to_dict()))
        damage(record)
        with pytest.raises(ValueError, match=r"order|seed"):
            Order.from_dict(record)

    each(
        [
            lambda record: record["phases"][1].update(offset=record["phases"][1]["offset"] + 1),
            lambda record: record["phases"][1].update(first_sample=17),
            lambda record: record["phases"][0].update(weights=[6, 2, 0]),
            lambda record: record["phases"][0].update(first_step=1),
            lambda record: record["constants"].update(c1=3),
            lambda record: record.pop("constants"),
            lambda record: record.pop("phases"),
            lambda record: record.update(phases=[]),
            lambda record: record["sources"][0].pop("windows"),
            lambda record: record.update(seed="1"),
        ],
        check,
    )


def test_an_order_travels_between_processes():
    order = Order(**BASE)
    order.batch(3)
    again = pickle.loads(pickle.dumps(order))
    assert again.hash == order.hash
    assert again.sample(77) == order.sample(77)


@pytest.mark.slow
def test_orders_agree_before_the_first_step_that_differs():
    """And their hashes do only where nothing differs."""
    assert Order(**BASE).hash == Order(**{**BASE, "weights": [6.0, "2", 0]}).hash

    def check(change, agree_before):
        order, other = Order(**BASE), Order(**{**BASE, **change})
        assert (order.hash == other.hash) == (not change)
        for step in range(15):
            assert order.agrees(other, step) == other.agrees(order, step) == (step <= agree_before)
            if order.agrees(other, step):
                end = order.first_sample(step)
                assert other.first_sample(step) == end
                for values, others in zip(order.samples(range(end)), other.samples(range(end)), strict=True):
                    assert np.array_equal(values, others)

    each(
        [
            ({}, 99),
            ({"phases": BASE["phases"][:1]}, 9),
            ({"phases": [*BASE["phases"], Phase(12)]}, 12),
            ({"phases": None}, 4),
            ({"phases": [Phase(4, (1, 1, 0), 8), Phase(9, (1, 2, 2))]}, 9),
            ({"phases": [Phase(4, (1, 1, 0), 8), Phase(10, (1, 1, 2))]}, 9),
            ({"phases": [Phase(4, (1, 1, 0), 8, 4), Phase(9, (1, 1, 2))]}, 4),
            ({"phases": [Phase(5, (1, 1, 0), 8), Phase(9, (1, 1, 2))]}, 4),
            ({"windows": [100, 50, 21]}, 9),
            ({"ids": ["a", "b", "d"]}, 9),
            ({"ids": ["a", "c", "b"]}, 0),
            ({"windows": [100, 51, 20]}, 0),
            ({"seed": 2}, 0),
            ({"seq_len": 65}, 0),
            ({"global_batch": 2}, 0),
            ({"block": 2}, 0),
            ({"weights": [3, 2, 0]}, 0),
        ],
        check,
    )


def test_a_new_version_of_a_source_agrees_before_it_comes_in():
    order = Order([1, 1], [100, 50], 0, ids=["a", "b"], global_batch=8)
    other = Order([1, 1, 0], [100, 50, 60], 0, [Phase(5, (1, 0, 1))], ids=["a", "b", "b2"], global_batch=8)
    assert order.agrees(other, 5)
    assert not order.agrees(other, 6)


# ---- what is refused


def test_what_is_no_order_is_refused_by_name():
    def check(change, message):
        with pytest.raises(ValueError, match=message):
            Order(**{**BASE, **change})

    each(
        [
            ({"weights": [1, 1]}, "weights: expected 3, one a source, got 2"),
            ({"windows": [1, 2]}, "weights: expected 2, one a source, got 3|ids: expected 2"),
            ({"ids": ["a", "b"]}, "ids: expected 3, one for each entry of windows, got 2"),
            ({"ids": ["a", "b", "a"]}, r"ids\[2\]: 'a' is given twice"),
            ({"ids": ["a", "b", 3]}, r"ids\[2\]: expected text"),
            ({"ids": ["a", "b", "c\0"]}, r"ids\[2\]: expected text without NUL"),
            ({"windows": [100, 0, 20]}, r"windows\[1\]: expected at least 1, got 0: weights\[1\] is 1"),
            ({"windows": [100, 50, 0]}, r"windows\[2\].*phases\[1\]\.weights\[2\] is 2"),
            ({"windows": [100, -1, 20]}, r"windows\[1\]: expected an integer ≥ 0.*-1"),
            ({"windows": [100, 50.0, 20]}, r"windows\[1\]: expected an integer, got 50\.0"),
            ({"windows": [100, True, 20]}, r"windows\[1\]: expected an integer, got True"),
            ({"weights": [1, -1, 0]}, r"weights\[1\].*-1"),
            ({"weights": [1, float("nan"), 0]}, r"weights\[1\].*nan"),
            ({"weights": [1, float("inf"), 0]}, r"weights\[1\].*inf"),
            ({"weights": [1, True, 0]}, r"weights\[1\].*True"),
            ({"weights": [1, 1e-12, 0]}, r"weights\[1\]: 1e-12 is less than 2\^-32"),
            ({"weights": [0, 0, 0]}, "at least one weight above 0"),
            ({"seed": 1.0}, "seed: expected an integer"),
            ({"seed": True}, "seed: expected an integer"),
            ({"seq_len": 0}, "seq_len: expected an integer ≥ 1"),
            ({"global_batch": 0}, "global_batch: expected an integer ≥ 1"),
            ({"block": 0}, "block: expected an integer ≥ 1"),
            ({"phases": [Phase(0)]}, r"phases\[0\]\.first_step: expected an integer ≥ 1, got 0"),
            ({"phases": [Phase(3), Phase(3)]}, r"phases\[1\]\.first_step: expected an integer ≥ 4, got 3"),
            ({"phases": [Phase(3), Phase(2)]}, r"phases\[1\]\.first_step: expected an integer ≥ 4, got 2"),
            ({"phases": [Phase(3, (1, 1))]}, r"phases\[0\]\.weights: expected 3, one a source, got 2"),
            ({"phases": [Phase(3, (1, -2, 1))]}, r"phases\[0\]\.weights\[1\].*-2"),
            ({"phases": [Phase(3, None, 0)]}, r"phases\[0\]\.global_batch: expected an integer ≥ 1"),
            ({"phases": [Phase(3, None, None, 0)]}, r"phases\[0\]\.block: expected an integer ≥ 1"),
            ({"phases": [Phase(2**62)]}, r"phases\[0\]\.first_step: .*2\^62"),
            ({"phases": [(3, None)]}, r"phases\[0\]: expected a Phase"),
        ],
        check,
    )


def test_what_is_no_position_is_refused_by_name():
    def check(call, message):
        with pytest.raises(ValueError, match=message):
            call(Order(**BASE))

    each(
        [
            (lambda order: order.sample(-1), "g: expected an integer ≥ 0.*-1"),
            (lambda order: order.sample(1.5), r"g: expected an integer, got 1\.5"),
            (lambda order: order.sample(True), "g: expected an integer, got True"),
            (lambda order: order.samples([3, -1]), "g: expected integers ≥ 0, got -1"),
            (lambda order: order.samples([0.5]), "g: expected integers.*float64"),
            (lambda order: order.samples([True]), "g: expected integers.*bool"),
            (lambda order: order.samples([2**70]), "g: expected integers"),
            (lambda order: order.samples(np.array([2**62], np.uint64)), "g: expected positions below"),
            (lambda order: order.locate(3, 0, 0), "source: expected an integer ≥ 0 and < 3, got 3"),
            (lambda order: order.locate(-1, 0, 0), "source: .*-1"),
            (lambda order: order.locate(0, -1, 0), "epoch: expected an integer ≥ 0"),
            (lambda order: order.locate(0, 0, -1), "window: expected an integer ≥ 0"),
            (lambda order: order.locate(0, 0, 0.0), "window: expected an integer"),
            (lambda order: order.locate_many(0, [0], [-1]), "windows: expected integers ≥ 0"),
            (lambda order: order.first_sample(-1), "step: expected an integer ≥ 0"),
            (lambda order: order.batch(-1), "step: expected an integer ≥ 0"),
            (lambda order: order.global_batch_at(1.0), "step: expected an integer"),
            (lambda order: order.consumed(-1), "g: expected an integer ≥ 0"),
        ],
        check,
    )
