"""A trainer that reads a corpus version does not notice that a purge makes another and removes files of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quern.lineage.purge.apply import finish
from support.train import purge_case as purged
from support.train import run_case as case

pytestmark = pytest.mark.slow


def files_of(data: Path) -> set[Path]:
    """What the corpus version that stands is made of."""
    root, record = data / "tokens", json.loads((data / "tokens" / "VERSION.json").read_text())
    names = [listed["manifest"] for listed in record["sources"].values()]
    names += [
        shard[kind] for listed in record["sources"].values() for shard in listed["shards"] for kind in ("bin", "spans")
    ]
    return {root / name for name in names}


@pytest.mark.parametrize("mode", ["mask", pytest.param("rewrite", marks=pytest.mark.long)])
def test_a_purge_in_the_middle_of_a_run(trained, tmp_path, mode):
    """In step 4 another version is published and every file of the old one that it replaces is removed."""
    data, run = purged.copy(trained.data, tmp_path / "data"), tmp_path / "run"
    gone: set[Path] = set()

    def purge(data_step: int) -> float:
        if data_step == 4:
            old = files_of(data)
            purged.purge(data, trained.chosen, mode)
            gone.update(old - files_of(data))
            for path in gone:
                path.unlink()
        return 1.0

    left = case.live(trained.config(run, data), factor=purge)
    assert len(gone) >= 3
    purged.same(run, left, trained.run, trained.left)
    (move,) = [entry for entry in case.ledger(run) if entry["kind"] == "start"]
    assert set(move["versions"].values()) == {1}


@pytest.mark.parametrize("mode", ["mask", "rewrite"])
def test_shards_that_are_opened_only_after_the_purge(trained, tmp_path, mode):
    """Who has opened a version finds its files; when it has gone, they go with the next purge."""
    data = purged.copy(trained.data, tmp_path / "data")
    corpus, old = purged.corpus_of(data), files_of(data)
    report = purged.purge(data, trained.chosen, mode)
    assert report["superseded"]["held"].keys() == set(report["touched"]) & set(purged.STREAMS)
    order = trained.left.start.mixture.order
    read = purged.arrays_of(corpus, order, tmp_path / "boundaries", True, 9)
    expected = purged.arrays_of(purged.corpus_of(trained.data), order, tmp_path / "expected", True, 9)
    assert read.keys() == expected.keys()
    for key, (source, window, *arrays) in read.items():
        assert (source, window) == expected[key][:2]
        assert all((one == other).all() for one, other in zip(arrays, expected[key][2:], strict=True))
    gone = old - files_of(data)
    read = {path for path in gone if path.parent.name in report["superseded"]["held"]}
    assert read
    assert {path for path in gone if path.exists()} == read
    for reader in corpus.readers:
        reader.close()
    finish.clear(str(data))
    assert not any(path.exists() for path in gone)
