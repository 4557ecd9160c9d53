"""Vectors of the order, made by the plain reference: whoever changes one changes every recorded run."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from quern.mixtures.order import Order, Phase
from support.named_cases import each
from support.oracles import order_reference as reference

# name → windows, seed, ids, rows (first step, weights, global batch, block), and what follows from them:
#   table: (first sample, offset, integer weights) of each row
#   ends: R_s(offset + length) - R_s(offset) of each row but the last
#   kept: (frontiers, carries) at the start of each row
#   samples: (position, source, epoch, window)
#   hash: BLAKE2b-128 of the record as canonical JSON
# fmt: off
CASES = {
    "one phase": {
        "windows": [1000, 7, 1],
        "seed": 0,
        "ids": None,
        "rows": [(0, [0.7, 0.2, 0.1], 1024, 1024)],
        "table": [(0, 0, [7, 2, 1])],
        "ends": [],
        "kept": [([0, 0, 0], [[], [], []])],
        "samples": [
            (0, 2, 54, 0), (197, 0, 0, 54), (237, 0, 0, 979), (296, 1, 23, 1),
            (385, 2, 22, 0), (617, 0, 0, 626), (1326, 2, 145, 0), (1497, 0, 0, 826),
            (1617, 2, 138, 0), (2194, 0, 1, 241), (2387, 0, 1, 159), (2666, 2, 241, 0),
            (1953893, 1, 55842, 4), (1544854973, 0, 1081398, 232),
            (1039576827340, 1, 29702195069, 0), (8409529154839386, 0, 5886670408387, 220),
        ],
        "hash": "900bcc1fd03ba5f91ee16dba420d349b",
    },
    "recipes, a pause and a ramp": {
        "windows": [1000003, 129, 8, 4096],
        "seed": 1234567,
        "ids": ["r/web/1", "r/code/1", "r/books/2", "r/maths/1"],
        "rows": [
            (0, ["0.5", "0.25", "0.25", "0"], 8, 8),
            (10, ["0.5", "0.25", "0.25", "0"], 16, 16),
            (25, ["0.6", "0", "0.3", "0.1"], 32, 32),
            (40, ["0.1", "0.2", "0.3", "0.4"], 48, 24),
        ],
        "table": [(0, 0, [2, 1, 1, 0]), (80, 80, [2, 1, 1, 0]), (320, 9, [6, 0, 3, 1]), (800, 6, [1, 2, 3, 4])],
        "ends": [[40, 20, 20, 0], [120, 60, 60, 0], [288, 0, 144, 48]],
        "kept": [
            ([0, 0, 0, 0], [[], [], [], []]),
            ([40, 20, 20, 0], [[], [], [], []]),
            ([160, 80, 80, 0], [[], [], [], []]),
            ([448, 80, 224, 48], [[], [], [], []]),
        ],
        "samples": [
            (0, 0, 0, 186339), (71, 0, 0, 859190), (79, 1, 0, 6), (80, 0, 0, 896076),
            (92, 2, 2, 5), (246, 2, 7, 3), (319, 2, 9, 1), (320, 0, 0, 565387),
            (428, 0, 0, 946800), (564, 3, 0, 2725), (799, 0, 0, 222544), (800, 3, 0, 1378),
            (1445140, 3, 141, 289), (1063469421, 2, 39880101, 7),
            (1622026593455, 3, 158401034, 1257), (5060806984928681, 2, 189780261934823, 3),
        ],
        "hash": "740ae805ea950dc8811bc0c751c12308",
    },
    "blocks that do not divide the cut": {
        "windows": [1000000000007, 33, 5],
        "seed": 9223372036854775808,
        "ids": ["a", "b", "c"],
        "rows": [(0, [3, 2, 1], 10, 64), (13, [1, 0, 1], 7, 50), (31, [1e-06, 1, 0.5], 9, 37)],
        "table": [(0, 0, [3, 2, 1]), (130, 1, [1, 0, 1]), (256, 306026, [1, 1000000, 500000])],
        "ends": [[65, 43, 22], [63, 0, 63]],
        "kept": [
            ([0, 0, 0], [[], [], []]),
            (
                [85, 59, 21],
                [
                    [64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 77, 78, 79, 80, 81, 82, 83],
                    [43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57],
                    [],
                ],
            ),
            (
                [138, 59, 95],
                [
                    [115, 118, 119, 121, 122, 123, 128, 129, 130, 132],
                    [43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57],
                    [72, 77, 78, 79, 80, 81, 82, 84, 88, 92, 93],
                ],
            ),
        ],
        "samples": [
            (0, 0, 0, 787542628755), (23, 1, 0, 4), (25, 2, 0, 0), (113, 1, 1, 13),
            (129, 0, 0, 668546947083), (130, 0, 0, 772032817186), (203, 0, 0, 634012778696), (255, 0, 0, 622254863116),
            (256, 1, 1, 10), (285, 2, 18, 4), (295, 1, 2, 0), (299, 1, 2, 19),
            (1900169, 1, 38383, 8), (1142995371, 1, 23090795, 24),
            (1460805363094, 1, 29511199778, 16), (5431841620497803, 2, 362122533284831, 1),
        ],
        "hash": "3efd1541f5597dc4b25c333440058c91",
    },
    "rounded weights": {
        "windows": [1099511627777, 1000000000],
        "seed": 42,
        "ids": None,
        "rows": [(0, ["0.123456789012345", "0.876543210987655"], 1024, 1024)],
        "table": [(0, 0, [530242871, 3764724425])],
        "ends": [],
        "kept": [([0, 0], [[], []])],
        "samples": [
            (0, 1, 0, 874347860), (244, 1, 0, 99117539), (257, 1, 0, 797150701), (399, 1, 0, 482801307),
            (769, 1, 0, 571965344), (1525, 1, 0, 874491014), (2243, 1, 0, 10956651), (2311, 0, 0, 895399291172),
            (2339, 1, 0, 69498577), (2382, 0, 0, 168413330157), (2616, 1, 0, 753413543), (2916, 1, 0, 799404033),
            (1649078, 1, 0, 772055202), (1221146487, 1, 1, 73903955),
            (1749456393508, 1, 1533, 868670668), (8355010754564450, 1, 7323527, 544961728),
        ],
        "hash": "e4ff368a71910b9fca48b7cb8141a117",
    },
}
# fmt: on


def made(case):
    (_, weights, global_batch, block), *later = case["rows"]
    return Order(
        weights,
        case["windows"],
        case["seed"],
        [Phase(step, tuple(recipe), size, shuffled) for step, recipe, size, shuffled in later],
        ids=case["ids"],
        global_batch=global_batch,
        block=block,
    )


def test_the_order_gives_the_vectors():
    def check(name):
        case = CASES[name]
        order = made(case)
        assert [(row.first_sample, row.offset, list(row.weights)) for row in order.phases] == case["table"]
        samples = np.array(case["samples"], dtype=np.uint64).T
        for got, expected in zip(order.samples(samples[0]), samples[1:], strict=True):
            assert np.array_equal(got, expected)
        for g, *triple in case["samples"]:
            assert list(order.sample(g)) == triple
            assert order.locate(*triple) == g
        assert order.hash == case["hash"]

    each(CASES, check)


def test_the_order_keeps_its_place_at_the_ends_of_phases():
    def check(name):
        case = CASES[name]
        order = made(case)
        states = order._table.states
        kept = [
            (
                state.frontiers,
                [state.carries[s].tolist() if s in state.carries else [] for s in range(len(case["windows"]))],
            )
            for state in states
        ]
        assert kept == case["kept"]
        lengths = [after.row.first_sample - state.row.first_sample for state, after in pairwise(states)]
        assert [state.counts(length) for state, length in zip(states, lengths, strict=False)] == case["ends"]

    each(CASES, check)


def test_the_reference_gives_the_vectors():
    def check(name):
        case = CASES[name]
        plain = reference.Reference(case["windows"], case["seed"], case["rows"], case["ids"])
        assert [(row["g0"], row["offset"], row["word"].weights) for row in plain.table] == case["table"]
        assert [(row["frontier"], row["carries"]) for row in plain.table] == case["kept"]
        assert plain.ranks_at_ends() == case["ends"]
        for g, *triple in case["samples"]:
            assert list(plain.sample(g)) == triple
            assert plain.locate(*triple) == g

    each(CASES, check)


def test_the_default_order_is_one_phase_from_the_start():
    case = CASES["one phase"]
    bare = Order(["0.7", "0.2", "0.1"], case["windows"], case["seed"])
    assert bare.hash == case["hash"]
    assert [(row.first_step, row.global_batch, row.block, row.offset) for row in bare.phases] == [(0, 1024, 1024, 0)]
    assert bare.ids == ("0", "1", "2")
