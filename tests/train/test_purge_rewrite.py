"""A run goes on after a rewrite: only when told, in a new phase, and what it read on either version stays known."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quern.errors import InputError
from quern.lineage.exposure import exposures
from quern.lineage.purge.taint import taint
from quern.lineage.store import Lineage
from quern.lineage.training import TrainingRun
from support.lineage import runs
from support.train import purge_case as purged
from support.train import run_case as case

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    data = runs.write_run(tmp_path_factory.mktemp("data") / "run", documents=200, files=2)
    return purged.train(data, tmp_path_factory.mktemp("trained") / "run", {})


@pytest.fixture
def rewritten(trained, tmp_path):
    """The data run rewritten, the names of the streams that are others now, and a copy of the training run."""
    data = purged.purged_copy(trained.data, tmp_path / "data", trained.chosen, "rewrite")
    streams = frozenset(
        stream for stream, rows in trained.spans.items() if any(row[0] in trained.chosen for row in rows)
    )
    shutil.copytree(trained.run, tmp_path / "run")
    return data, streams, tmp_path / "run"


def accepting(trained: Any, run: Path, data: Path, streams: frozenset[str], version: int, step: int) -> Any:
    config = trained.config(run, data, resume={"step": step})
    entries = [
        entry.model_copy(update={"accept_version": version}) if Path(entry.path).name in streams else entry
        for entry in config.data
    ]
    return config.model_copy(update={"data": tuple(entries)})


def test_a_rewritten_source_is_refused_until_its_version_is_accepted(trained, rewritten):
    data, streams, run = rewritten
    with pytest.raises(InputError, match=r"the corpus is at version 2 now, .* give accept_version=2") as refusal:
        case.live(trained.config(run, data, resume={"step": 4}))
    assert str(data / "tokens" / sorted(streams, key=purged.STREAMS.index)[0]) in str(refusal.value)
    with pytest.raises(InputError, match="give accept_version=2"):
        case.live(accepting(trained, run, data, streams, 3, 4))
    assert case.ledger(run) == case.ledger(trained.run)  # a refusal leaves no line


def test_the_phase_opens_at_the_checkpoint_s_data_step_and_reads_the_new_stream(trained, rewritten):
    data, streams, run = rewritten
    left = case.live(accepting(trained, run, data, streams, 2, 4))
    assert (left.start.kind, left.start.step, left.start.data_step) == ("rollback", 4, 4)
    order = left.start.mixture.order
    assert [phase.first_step for phase in order.phases] == [0, 4]
    old = [f"run00000/{name}/1" for name in purged.STREAMS]
    new = [f"run00000/{name}/2" if name in streams else f"run00000/{name}/1" for name in purged.STREAMS]
    assert list(order.ids) == [*old, *(ident for ident in new if ident not in old)]
    assert sorted(left.samples) == [4, 5, 6, 7, 8]
    streams_of = {name: tokens_of(data, name) for name in purged.STREAMS}
    for data_step, rows in left.samples.items():
        assert Counter(source for _, source, _, _ in rows) == Counter(
            {order.ids.index(new[0]): 6, order.ids.index(new[1]): 2}
        )
        for place, source, epoch, window in rows:
            first = window * purged.LENGTH
            name = order.ids[source].split("/")[1]
            assert left.tokens[data_step][place] == streams_of[name][first : first + purged.LENGTH]
            assert (source, epoch, window) == order.sample(order.first_sample(data_step) + place)
    # what was read before is told by the new order as it was by the old one
    for data_step in range(4):
        first = order.first_sample(data_step)
        assert [(place, *order.sample(first + place)) for place in range(8)] == trained.left.samples[data_step]


def tokens_of(data: Path, stream: str) -> list[int]:
    """All tokens of a stream, without the reader."""
    import json

    import numpy as np

    version = json.loads((data / "tokens" / "VERSION.json").read_text())
    dtype = version["encoding"]["dtype"]
    shards = [np.fromfile(data / "tokens" / shard["bin"], dtype) for shard in version["sources"][stream]["shards"]]
    return np.concatenate(shards).tolist()


def test_what_was_read_on_either_version_is_known(trained, rewritten, tmp_path):
    """Every document's reads before and after, beside windows and spans taken one by one. The old version stands where
    it stood; the run goes on over the new one beside it."""
    data, streams, run = rewritten
    left = case.live(accepting(trained, run, data, streams, 2, 4))
    told = TrainingRun(str(run))
    assert told.unknown() == {}
    expected = set()
    for attempt, version, samples in ((0, trained.data, trained.left.samples), (1, data, left.samples)):
        spans = purged.spans_of(version)
        order = told.order_of(told.attempts[attempt])
        for step, rows in samples.items():
            for place, source, epoch, window in rows:
                first, last = window * purged.LENGTH, (window + 1) * purged.LENGTH
                for doc_id, start, stop in spans[order.ids[source].split("/")[1]]:
                    # with document masks a first token is no target
                    if stop > first and (start < last):
                        expected.add((attempt, step, place, epoch, window, doc_id))
    assert expected
    lineages = [Lineage(str(trained.data)), Lineage(str(data))]
    found = set()
    opened = {lineage.run: lineage for lineage in told.lineages()}
    assert opened.keys() == {lineage.run for lineage in lineages}
    for lineage in opened.values():
        rows = exposures(told, [(lineage, range(lineage.num_documents))])
        ids = lineage.documents(rows.numbers).doc_ids
        columns = (rows.attempts, rows.steps, rows.sequences, rows.epochs, rows.windows)
        found |= set(zip(*(column.tolist() for column in columns), ids, strict=True))
    assert found == expected
    assert not {doc_id for attempt, *_, doc_id in found if attempt == 1} & set(trained.chosen)
    # the report counts each once, though streams that were not written again stand in both folders
    assert set(purged.STREAMS) - streams
    listed = runs.listing(documents=200, files=2).spans.values()
    marked = {row["doc_id"] for rows in listed for row in rows if row["purged"]}
    everyone = sorted({doc_id for *_, doc_id in expected})
    row = purged.row_of(taint(str(data), everyone, [str(run)]), run)
    surviving = [(step, doc_id) for attempt, step, *_, doc_id in expected if (attempt == 1) == (step >= 4)]
    assert (row["exposures"], row["abandoned"]) == (len(surviving), len(expected) - len(surviving))
    assert row["documents_read"] == len({doc_id for _, doc_id in surviving} - marked)


def test_the_report_before_a_rewrite_gives_the_command_that_accepts_it(trained, tmp_path):
    """The purge asks before it writes; the command works once it has."""
    data, run = purged.copy(trained.data, tmp_path / "data"), tmp_path / "run"
    case.live(trained.config(run, data))
    done = purged.purge(data, trained.chosen, "rewrite")
    report, streams = done["taint"], set(done["touched"])
    row = purged.row_of(report, run)
    command = row["resume"]["command"]
    accepted = {int(index) for index in re.findall(r" data\.(\d)\.accept_version=2", command)}
    assert {purged.STREAMS[index] for index in accepted} == streams & set(purged.STREAMS)
    assert f"resume.step={trained.last_clean}" in command
    left = purged.follow(report, run)
    assert (left.start.kind, left.start.step) == ("rollback", trained.last_clean)
    assert left.complete
    later = taint(str(data), trained.chosen)
    row = purged.row_of(later, run)
    assert set(row["unknown_sources"]) == {f"run00000/{name}/1" for name in streams & set(purged.STREAMS)}
    assert any("is not judged" in text for text in row["warnings"])
    assert purged.follow(later, run).start.step == case.STEPS  # the version is accepted: nothing is asked again


@pytest.mark.parametrize("end", ["stop_at", "kill_at"])
def test_who_read_nothing_of_it_only_accepts(trained, tmp_path, end):
    """One that was killed may have read on, and must not go on from a checkpoint that it saves meanwhile."""
    data, run = purged.copy(trained.data, tmp_path / "data"), tmp_path / "run"
    case.live(trained.config(run, data), **{end: 3})
    first = purged.first_reads(purged.spans_of(data), purged.STREAMS, trained.left.samples, purged.LENGTH)
    never = next(
        doc_id
        for doc_id, *_ in purged.spans_of(data)["web"]
        if doc_id not in first and purged.with_tokens(data, [doc_id]) == [doc_id]
    )
    report = purged.purge(data, [never], "rewrite")["taint"]
    row = purged.row_of(report, run)
    assert (row["registered"], row["exposures"], row["tainted"]) == (True, 0, [])
    killed = end == "kill_at"
    assert row["resume"]["arguments"][3:] == ["resume.step=2"] * killed + ["data.0.accept_version=2"]
    assert any("if it still runs" in text for text in row["warnings"]) == killed
    left = purged.follow(report, run)
    assert (left.start.kind, left.start.step) == (("rollback", 2) if killed else ("resume", 6))
