"""Runs of other trainers on two ranks, killed and resumed: they read what ``quern train`` reads, sample by sample, and
``step`` and ``exposure`` say of them what their models were shown."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quern.lineage.steps import read_step
from quern.lineage.training import TrainingRun
from quern.parallel.local import LocalRanks
from support.data_pipeline.in_process import run_config
from support.lineage import recorder as R
from support.lineage.exact_case import Case, Rows, check_sequences, everything, proven, same, shown, told_windows
from support.lineage.scenario import BATCH, LENGTH, MICRO_BATCH, Book, Life, Moment, sample

REPOSITORY = Path(__file__).parents[2]
RECORD = REPOSITORY / "tests" / "support" / "lineage" / "record_example.py"
STEPS, WORLD = 12, 2
#: Both examples save every five steps: the second life begins at step 5.
LIVES = (Life(0, 8, WORLD), Life(5, STEPS, WORLD))

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Site:
    """A data run, and what quern's own trainer was shown of it."""

    folder: Path
    config: dict[str, Any]
    corpus: R.Corpus
    trained: R.Recorded


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("site")
    config, sources, _ = sample(folder)
    run_config(config)
    shutil.copytree(folder / "run" / "tokens", folder / "copy")
    train = {
        "data": [
            {"path": str(folder / "run" / "tokens" / name), "weight": weight, "max_epochs": 1000}
            for name, weight in zip(sources, (5, 2, 3), strict=True)
        ],
        "phases": [{"first_step": 7, "weights": [1, 1, 3]}],
        "seq_len": LENGTH, "global_batch": BATCH, "micro_batch": MICRO_BATCH, "steps": STEPS, "seed": 5,
    }  # fmt: skip
    (folder / "records").mkdir()
    own = {
        "run_dir": str(folder / "trained"), "device": "cpu", "precision": "fp32", "parallel": {"dp_shard": WORLD},
        "model": {"num_layers": 1, "dim": 16, "num_heads": 2, "num_kv_heads": 1},
        "metrics": {"tensorboard": False, "live": False}, "checkpoint": {"interval": 0}, "schedule": {"warmup": 3},
    }  # fmt: skip
    with LocalRanks(WORLD, timeout_s=400) as ranks:
        ranks.call(R.live, json.dumps(train | own), str(folder / "records"), 0, None, [])
    trained, _ = R.read_records(folder / "records")
    return Site(folder, train, R.Corpus(folder / "run", folder / "copy"), trained)


@pytest.fixture(scope="module", params=["plain_loop.py", "transformers_trainer.py"])
def case(request: pytest.FixtureRequest, site: Site, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param.removesuffix(".py"))
    (folder / "records").mkdir()
    config = folder / "train.yaml"
    config.write_text(json.dumps(site.config | {"run_dir": str(folder / "train")}))
    for number, life in enumerate(LIVES):
        done = launch(folder, number, life, REPOSITORY / "examples" / request.param, config, folder / "checkpoints")
        assert (done.returncode == 0) is (life.stop == STEPS), done.stderr[-4000:]
    recorded, outside = R.read_records(folder / "records")
    assert len(outside.steps) == 0
    book = Book(branch=[(0, step) for step in range(5)] + [(1, step) for step in range(5, STEPS)])
    moments = (Moment(folder / "train", LIVES, book),)
    return Case(site.folder / "run", site.corpus, recorded, site.corpus.find(recorded), moments)


def launch(folder: Path, number: int, life: Life, *arguments: Path) -> subprocess.CompletedProcess[str]:
    from support.programs import python

    stop = life.stop if life.stop < STEPS else -1
    return subprocess.run(
        [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD), RECORD,
         folder / "records", str(number), str(stop), *arguments],
        capture_output=True, text=True, timeout=500, cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])},
    )  # fmt: skip


def by_place(recorded: R.Recorded, life: int) -> dict[tuple[int, ...], bytes]:
    """(step, rank, micro-batch, row) → inputs and targets."""
    mine = np.flatnonzero(recorded.lives == life)
    columns = recorded.steps, recorded.ranks, recorded.calls, recorded.rows
    return {
        tuple(int(column[n]) for column in columns): recorded.tokens_SL[n].tobytes() + recorded.targets_SL[n].tobytes()
        for n in mine.tolist()
    }


def test_every_rank_reads_what_quern_train_reads(site: Site, case: Case) -> None:
    trained = by_place(site.trained, 0)
    assert len(trained) == STEPS * BATCH
    for number, life in enumerate(LIVES):
        expected = {key: read for key, read in trained.items() if life.start <= key[0] < life.stop}
        assert by_place(case.recorded, number) == expected


def test_step_says_what_the_model_was_shown(case: Case) -> None:
    [moment] = case.moments
    run = TrainingRun(str(moment.path))
    stops, branch = proven(run, moment), set(moment.book.branch)
    assert stops == [5, STEPS]
    reads = {}
    for number, life in enumerate(LIVES):
        for step in range(life.start, life.stop):
            read = read_step(run, step, number)
            assert (read.proven, read.applied) == (step < stops[number], True)
            assert not read.proven or read.surviving == ((number, step) in branch)
            reads[number, step] = read
    check_sequences(case, reads)


def test_exposure_of_every_document_is_what_the_model_was_shown(case: Case) -> None:
    [moment] = case.moments
    _, lineage, found = everything(moment, case)
    names = lineage.documents(np.arange(lineage.num_documents)).doc_ids
    rows = Rows.of(found, lineage)
    told = told_windows(rows)
    assert told.keys() == set(moment.book.branch)
    assert {len(windows) for windows in told.values()} == {BATCH}
    same(
        Counter(
            (row.attempt, row.step, row.place, names[row.number], *row.part, row.applied, row.surviving) for row in rows
        ),
        shown(case, moment, told),
    )
