from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern.data_pipeline.dedup.facts import Ids, id_words
from quern.errors import QuernError

_IDS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), unique=True, max_size=20)


@given(_IDS, _IDS)
def test_ids_are_found_also_when_their_first_halves_repeat(known, wanted):
    rows = Ids(np.array(known, dtype=np.uint64).reshape(-1, 2)).rows(np.array(wanted, dtype=np.uint64).reshape(-1, 2))
    assert rows.tolist() == [known.index(each) if each in known else -1 for each in wanted]


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=10), st.integers(0, 3))
def test_halves_of_an_id_sort_like_its_bytes(ids, start):
    halves = id_words(pa.array(ids, pa.binary(16)).slice(start), "doc_id").tolist()
    assert [high.to_bytes(8, "big") + low.to_bytes(8, "big") for high, low in halves] == ids[start:]


def test_a_null_id_is_refused():
    with pytest.raises(QuernError, match="here: 1 values are null"):
        id_words(pa.array([b"0" * 16, None], pa.binary(16)), "here")
