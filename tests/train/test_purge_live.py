"""A trainer that reads a corpus version does not notice that a purge makes another and removes files of its own."""

from __future__ import annotations

import json
from pathlib import Path

import purge_case as purged
import pytest
import run_case as case

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    data = purged.runs.write_run(tmp_path_factory.mktemp("data") / "run", documents=200, files=2)
    return purged.train(data, tmp_path_factory.mktemp("trained") / "run", {})


def files_of(data: Path) -> set[Path]:
    """What the corpus version that stands is made of."""
    root, record = data / "tokens", json.loads((data / "tokens" / "VERSION.json").read_text())
    names = [listed["manifest"] for listed in record["sources"].values()]
    names += [
        shard[kind] for listed in record["sources"].values() for shard in listed["shards"] for kind in ("bin", "spans")
    ]
    return {root / name for name in names}


@pytest.mark.parametrize("mode", ["mask", "rewrite"])
def test_a_purge_in_the_middle_of_a_run(trained, tmp_path, mode):
    """In step 4 another version is published and every file of the old one that it replaces is removed."""
    data, run = purged.purged_copy(trained.data, tmp_path / "data", []), tmp_path / "run"
    gone: set[Path] = set()

    def purge(data_step: int) -> float:
        if data_step == 4:
            old = files_of(data)
            {"mask": purged.versions.mask, "rewrite": purged.rewrite}[mode](data, trained.chosen)
            gone.update(old - files_of(data))
            for path in gone:
                path.unlink()
        return 1.0

    left = case.live(trained.config(run, data), factor=purge)
    assert len(gone) >= 3
    purged.same(run, left, trained.run, trained.left)
    (move,) = [entry for entry in case.ledger(run) if entry["kind"] == "start"]
    assert set(move["versions"].values()) == {2}
