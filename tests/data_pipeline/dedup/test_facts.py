from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern.data_pipeline.dedup.passes.facts import Ids, id_words, read_rows
from quern.errors import QuernError

_IDS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), unique=True, max_size=20)


@pytest.mark.slow
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


@pytest.mark.slow
def test_batches_of_large_documents_have_few_rows(tmp_path):
    """80 books of 100,000 shingles are 64 MB; of short pages as many come at once as are asked for."""
    path = str(tmp_path / "table.parquet")
    for values, least, most in ((100_000, 30, 45), (10, 80, 80)):
        flat = pa.array(np.random.default_rng(0).integers(0, 2**64, 80 * values, dtype=np.uint64))
        lists = pa.ListArray.from_arrays(pa.array(np.arange(81, dtype=np.int32) * values), flat)
        pq.write_table(pa.table({"shingles": lists}), path, row_group_size=80, compression="zstd")
        rows = [len(batch) for batch in read_rows(path, ["shingles"])]
        assert least <= max(rows) <= most
        assert sum(rows) == 80
