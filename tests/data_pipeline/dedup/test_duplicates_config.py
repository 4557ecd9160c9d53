from __future__ import annotations

from itertools import pairwise

import pytest

from quern.config import load_config
from quern.data_pipeline.dedup.config import DuplicatesConfig, recall, recall_curve
from quern.errors import InputError
from support.named_cases import with_each


def test_the_default_bands_find_what_the_design_promises():
    config = DuplicatesConfig()
    assert (config.bands, config.rows, config.ngram, config.threshold, config.scope) == (16, 8, 5, 0.8, "run")
    assert round(recall(0.8, config.bands, config.rows), 3) == 0.947


@with_each((0.5, 14, 8, 0.053), (0.75, 14, 8, 0.772), (0.8, 14, 8, 0.924), (0.8, 9, 13, 0.399), (0.8, 25, 10, 0.942))
def test_recall_agrees_with_published_tables(similarity, bands, rows, expected) -> None:
    assert round(recall(similarity, bands, rows), 3) == expected


def test_the_curve_rises_from_half_to_certainty():
    curve = recall_curve(DuplicatesConfig())
    assert [similarity for similarity, _ in curve] == pytest.approx([0.5 + 0.05 * i for i in range(11)])
    assert all(a < b for (_, a), (_, b) in pairwise(curve))
    assert curve[-1] == (1.0, 1.0)


@with_each(
    (["bands=17"], "expected bands × rows ≤ num_perm (128), got 17 × 8 = 136"),
    (["bands=0"], "bands: expected a number ≥ 1, got 0"),
    (["rows=0"], "rows: expected a number ≥ 1, got 0"),
    (["ngram=0"], "ngram: expected a number ≥ 1, got 0"),
    (["threshold=0"], "threshold: expected a number > 0"),
    (["threshold=1.01"], "threshold: expected a number ≤ 1"),
    (["scope=world"], "scope: expected one of 'run' or 'source', got \"world\""),
    (["url_keep=first"], "url_keep: expected one of 'best' or 'latest'"),
    (["max_band_members=0"], "max_band_members: expected a number ≥ 1"),
    (["seed=-1"], "seed: expected a number ≥ 0"),
    (["row=8"], "row: unknown key; did you mean 'rows'?"),
)
def test_impossible_values_are_refused(overrides, message) -> None:
    with pytest.raises(InputError) as error:
        load_config(None, DuplicatesConfig, overrides)
    assert message in str(error.value)
