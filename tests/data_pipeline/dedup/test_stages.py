"""A phase that ends in the middle, and memory that does not grow with the run."""

from __future__ import annotations

import random
import subprocess
import time
import tracemalloc
from collections import Counter
from contextlib import suppress
from dataclasses import asdict

import dedup_corpus
import numpy as np
import pytest

from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.dedup.exchange import Slice
from quern.data_pipeline.dedup.passes.decide import find_survivors
from quern.data_pipeline.dedup.passes.run import run
from quern.data_pipeline.dedup.records import REMOVED
from quern.data_pipeline.dedup.verify import VERIFIED, survivors
from quern.data_pipeline.dedup.work import DedupInputs
from quern.data_pipeline.execution.engine import InProcess
from support.data_pipeline import random_runs as R
from support.programs import kill, python

CONFIG = DuplicatesConfig(num_perm=R.NUM_PERM, bands=R.BANDS, rows=R.ROWS, threshold=0.5, max_band_members=4)


class EndedError(Exception):
    pass


class Ending(InProcess):
    """An engine that ends after some tasks."""

    def __init__(self, tasks: int | None) -> None:
        self.left = tasks
        self.ran: Counter[str] = Counter()

    def map(self, function, tasks, *, label, on_death=None):
        for index, task in enumerate(tasks):
            if self.left == 0:
                raise EndedError
            if self.left is not None:
                self.left -= 1
            yield index, function(*task)
        self.ran[label] += 1


def prepared(folder, seed: int = 3, num_docs: int = 150):
    docs = R.corpus(random.Random(seed), num_docs)
    return R.write(folder, docs)


@pytest.mark.slow
def test_a_phase_that_ended_anywhere_goes_on_behind_its_last_whole_stage(tmp_path):
    partitions = prepared(tmp_path)
    arguments = (str(tmp_path), partitions, {}, CONFIG)
    whole = Ending(None)
    expected = run(*arguments, whole, str(tmp_path / "w0"), inputs="x", records_per_task=400)
    tables = R.tables(tmp_path)
    assert all(count == 1 for count in whole.ran.values())
    assert len(whole.ran) > 20
    # ended again and again, after a few tasks each
    ran: Counter[str] = Counter()
    attempts, report = 0, None
    while report is None:
        attempts += 1
        assert attempts < 100
        engine = Ending(20)
        with suppress(EndedError):
            report = run(*arguments, engine, str(tmp_path / "w1"), inputs="x", records_per_task=400)
        ran += engine.ran
    assert attempts > 2
    assert ran == whole.ran  # no stage was made twice
    assert asdict(report) == asdict(expected)
    assert R.tables(tmp_path) == tables


@pytest.mark.slow
def test_what_another_run_left_is_not_gone_on_with(tmp_path):
    partitions = prepared(tmp_path, num_docs=20)
    scratch = str(tmp_path / "work")

    def stages_made(config: DuplicatesConfig, inputs: str | None, tasks: int | None = None) -> int:
        engine = Ending(tasks)
        try:
            run(str(tmp_path), partitions, {}, config, engine, scratch, inputs=inputs)
        except EndedError:
            assert tasks is not None
        return sum(engine.ran.values())

    everything = stages_made(CONFIG, "x")
    assert stages_made(CONFIG, "x") == 0
    assert stages_made(CONFIG, "y") == everything
    assert stages_made(CONFIG.model_copy(update={"threshold": 0.4}), "y") == everything
    assert stages_made(CONFIG, None, tasks=20) > 5
    assert stages_made(CONFIG, None) == everything


class Weighed(InProcess):
    """An engine that notes the most memory a task takes, beside what the driver holds."""

    def __init__(self) -> None:
        self.most: dict[str, int] = {}
        self.driver = 0

    def map(self, function, tasks, *, label, on_death=None):
        for index, task in enumerate(tasks):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            self.driver = max(self.driver, before)
            result = function(*task)
            self.most[label] = max(self.most.get(label, 0), tracemalloc.get_traced_memory()[1] - before)
            yield index, result


@pytest.mark.long
def test_a_task_takes_memory_for_its_records_whatever_is_shared(tmp_path, monkeypatch):
    """A key that 800 documents share, a cluster of 400, a chain of 80; tasks of 1,500 records."""
    monkeypatch.setattr(dedup_corpus, "PARTITION_DOCUMENTS", 500)
    corpus = dedup_corpus.Corpus(8000)
    for index in range(corpus.partitions):
        corpus.write(str(tmp_path), index)
    names = [("crawl", corpus.name(index)) for index in range(corpus.partitions)]
    engine, records = Weighed(), 1500
    tracemalloc.start()
    try:
        report = run(
            str(tmp_path), names, {}, DuplicatesConfig(), engine, str(tmp_path / "w"), records_per_task=records
        )
    finally:
        tracemalloc.stop()
    assert report.largest_band == 800
    assert report.largest_cluster == 400
    # the run's bands alone are 2.2 MB, its documents 0.6 MB, its pairs more
    for label, most in engine.most.items():
        assert most < 300 * records + (1 << 19), label


@pytest.mark.slow
def test_a_cluster_of_any_size_is_decided_in_the_memory_of_a_task(tmp_path):
    """10 MB of pairs of one cluster, in tasks of 20,000 records of 25 bytes."""
    rng, num_docs = np.random.default_rng(4), 40_000
    pairs = np.zeros(400_000, dtype=VERIFIED)
    pairs["high"] = rng.integers(1, num_docs, len(pairs))
    pairs["low"] = rng.integers(0, pairs["high"])
    pairs["similarity"] = rng.choice([0.8, 0.9, 1.0], len(pairs))
    pairs = pairs[np.unique(pairs[["low", "high"]], return_index=True)[1]]
    rng.shuffle(pairs)
    work = DedupInputs(str(tmp_path), str(tmp_path / "w"), CONFIG, ("crawl",), (0,), 20_000, (0, num_docs))
    writer = work.writer("components", 0, 1, VERIFIED)
    for start in range(0, len(pairs), 5000):
        writer.add(pairs[start : start + 5000], np.zeros(len(pairs[start : start + 5000]), dtype=np.int64))
    written = writer.close()
    part = Slice(work.folder("components"), (written.files,), 1, 0, 1, len(pairs))
    tracemalloc.start()
    try:
        done = find_survivors(work, 0, part)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < pairs.nbytes / 2, most
    kept = done.written["near-removed"]
    found = Slice(work.folder("near-removed"), (kept.files,), 1, 0, 1, int(kept.counts[0])).read(REMOVED)
    expected = survivors(pairs)
    order = np.argsort(found["rank"])
    assert found["rank"][order].tolist() == expected["high"].tolist()
    assert found["by"][order].tolist() == expected["low"].tolist()


_PROGRAM = """
import sys
from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.dedup.passes.run import run
from quern.data_pipeline.execution.engine import InProcess

folder, config = sys.argv[1], DuplicatesConfig.model_validate_json(sys.argv[2])
partitions = [tuple(name.split("/")) for name in sys.argv[3:]]
run(folder, partitions, {}, config, InProcess(), f"{folder}/work", inputs="x", records_per_task=100)
"""


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_nothing_half_done(tmp_path):
    partitions = prepared(tmp_path, num_docs=400)
    run(str(tmp_path), partitions, {}, CONFIG, InProcess(), str(tmp_path / "w0"))
    expected = R.tables(tmp_path)
    for table in (tmp_path / "duplicates").iterdir():
        table.unlink()
    command = [python(), "-c", _PROGRAM, str(tmp_path), CONFIG.model_dump_json()]
    command += ["/".join(partition) for partition in partitions]
    commits, kills = tmp_path / "work" / "stages", 0
    for stages in (2, 9, 16):
        process = subprocess.Popen(command)
        while process.poll() is None and (not commits.exists() or len(list(commits.iterdir())) <= stages):
            time.sleep(0.001)
        kills += process.poll() is None
        kill(process)
    assert kills > 0
    subprocess.run(command, check=True)
    assert R.tables(tmp_path) == expected
