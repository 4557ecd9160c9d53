"""A task of duplicate removal whose worker was taken for lost runs twice at a time: neither disturbs the other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quern import storage
from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.dedup.exchange import Slice
from quern.data_pipeline.dedup.passes.decide import _survivors
from quern.data_pipeline.dedup.verify import VERIFIED
from quern.data_pipeline.dedup.work import DedupInputs


@pytest.mark.slow
def test_pieces_that_one_attempt_removes_are_not_those_of_another(tmp_path: Path) -> None:
    pairs = np.zeros(400, dtype=VERIFIED)
    pairs["high"] = np.arange(1, 401)  # each document is like the one before it
    pairs["low"] = pairs["high"] - 1
    pairs["similarity"] = 0.9
    work = DedupInputs(str(tmp_path), str(tmp_path), DuplicatesConfig(), ("a",), (0,), 64, (0, 401))
    writer = work.writer("components", 0, 1, VERIFIED)
    writer.add(pairs, 0)
    written = writer.close()
    part = Slice(work.folder("components"), (written.files,), 1, 0, 1, len(pairs))
    first = _survivors(work, 0, part)
    begun = [next(first)]
    for found in (list(_survivors(work, 0, part)), [*begun, *first]):
        assert len(found) > 2, "in pieces"
        removed = np.concatenate(found)
        assert removed["high"].tolist() == list(range(1, 401, 2)), "the even ones are kept"
        assert removed["low"].tolist() == list(range(0, 400, 2))
    assert storage.list_files(str(tmp_path)) == storage.list_files(work.folder("components"))
