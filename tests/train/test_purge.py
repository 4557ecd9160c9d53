"""A run goes on after a purge: masked, bit for bit as if the loader had taken the documents out; rewritten, in a new
phase."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import purge_case as purged
import pytest
import run_case as case

from quern.lineage.purge.taint import Change, taint
from quern.train.boundaries import open_boundaries
from quern.train.corpus import Corpus
from quern.train.loader import Loader

pytestmark = pytest.mark.slow

KINDS = {"document masks": {}, "no document masks": {"document_mask": False, "micro_batch": 8}}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return purged.runs.write_run(tmp_path_factory.mktemp("data") / "run", documents=200, files=2)


@pytest.fixture(scope="module", params=KINDS)
def trained(request, data, tmp_path_factory):
    return purged.train(data, tmp_path_factory.mktemp("trained") / "run", KINDS[request.param])


@pytest.mark.parametrize("tainted", [False, True])
def test_going_on_over_a_masked_version_is_going_on_with_an_oracle_over_the_old_one(tmp_path, trained, tainted, caplog):
    """From the last clean checkpoint, and from one that has seen some of it already."""
    step = trained.last_clean + 2 * tainted
    masked = purged.purged_copy(trained.data, tmp_path / "data", trained.chosen)
    with caplog.at_level(logging.INFO):
        left = purged.go_on(trained, tmp_path / "masked", masked, step)
    assert left.start.kind == "rollback"
    assert ("document_mask is off" in caplog.text) == bool(trained.changes)
    with purged.oracle(trained.spans, trained.chosen, purged.EOT):
        right = purged.go_on(trained, tmp_path / "oracle", trained.data, step)
    purged.same(tmp_path / "masked", left, tmp_path / "oracle", right)
    assert left.samples == {s: trained.left.samples[s] for s in left.samples}
    assert case.differences(left.state, trained.left.state) != []


def test_from_the_last_clean_checkpoint_the_weights_are_those_of_a_run_that_never_saw_it(tmp_path, trained):
    masked = purged.purged_copy(trained.data, tmp_path / "data", trained.chosen)
    left = purged.go_on(trained, tmp_path / "masked", masked, trained.last_clean)
    never = purged.go_on(trained, tmp_path / "never", masked, None)
    assert never.start.step == 0
    assert case.rows(tmp_path / "masked") == case.rows(tmp_path / "never")
    assert case.differences(left.state, never.state) == []
    with purged.oracle(trained.spans, trained.chosen, purged.EOT):
        by_oracle = purged.go_on(trained, tmp_path / "by oracle", trained.data, None)
    assert case.differences(by_oracle.state, never.state) == []


def arrays_of(data: Path, order: Any, folder: Path, document_mask: bool, steps: int) -> dict[Any, Any]:
    """Everything the loader gives, by (data step, place in the global batch)."""
    corpus = Corpus([str(data / "tokens" / name) for name in purged.STREAMS], purged.LENGTH)
    loader = Loader(
        corpus, order, rank=0, world=1, micro_batch=2, document_mask=document_mask,
        boundaries=open_boundaries(corpus.readers, str(folder)),
    )  # fmt: skip
    found = {}
    for step in range(steps):
        for micro in loader.take(step).micro_batches:
            for row, place in enumerate(micro.indices.tolist()):
                found[step, place] = (
                    int(micro.sources[row]), int(micro.windows[row]), micro.tokens_BL[row].copy(),
                    micro.targets_BL[row].copy(), micro.positions_BL[row].copy(), micro.documents_BL[row].copy(),
                )  # fmt: skip
    return found


def test_windows_without_a_purged_token_are_the_same_bytes_and_the_others_lose_nothing_else(tmp_path, trained):
    masked = purged.purged_copy(trained.data, tmp_path / "data", trained.chosen)
    order, steps = trained.left.start.mixture.order, 16
    mask = not trained.changes
    old = arrays_of(trained.data, order, tmp_path / "old", mask, steps)
    new = arrays_of(masked, order, tmp_path / "new", mask, steps)
    assert old.keys() == new.keys()
    touched = 0
    for key, (source, window, *before) in old.items():
        after = new[key][2:]
        assert new[key][:2] == (source, window)
        gone = [
            (start - window * purged.LENGTH, stop - window * purged.LENGTH)
            for doc_id, start, stop in trained.spans[purged.STREAMS[source]]
            if doc_id in trained.chosen and start <= (window + 1) * purged.LENGTH and stop > window * purged.LENGTH
        ]
        places = np.zeros(purged.LENGTH + 1, bool)
        for start, stop in gone:
            places[max(0, start) : stop] = True
        touched += bool(gone)
        for place in range(purged.LENGTH):
            assert after[0][place] == (purged.EOT if places[place] else before[0][place])
            assert after[1][place] == (-100 if places[place + 1] else before[1][place])
        if not gone:
            assert all(one.tobytes() == other.tobytes() for one, other in zip(before, after, strict=True))
        assert [array.tolist() for array in before[2:]] == [array.tolist() for array in after[2:]]
    assert touched > 3


# ---- the report, and the command it gives


def test_the_report_s_command_goes_back_to_the_last_clean_checkpoint(tmp_path, trained):
    """Before and after a mask the report is the same, and after following it, nothing is tainted any more."""
    masked = purged.purged_copy(trained.data, tmp_path / "data", [])  # version 2, nothing gone yet
    run = tmp_path / "run"
    case.live(trained.config(run, masked))
    change = Change(3, "mask", frozenset(purged.STREAMS))
    before = taint(str(masked), trained.chosen, change=change)
    purged.versions.mask(masked, trained.chosen)
    after = taint(str(masked), trained.chosen, change=change)
    assert before == after
    row = purged.row_of(after, run)
    assert (row["registered"], row["given"]) == (True, False)
    assert row["last_clean"]["step"] == trained.last_clean == row["resume"]["step"]
    standing = [step for step in (2, 4, 6, 8, 9)]
    assert [seen["step"] for seen in row["tainted"]] == [step for step in standing if step > trained.last_clean]
    assert [seen["step"] for seen in row["clean"]] == [step for step in standing if step <= trained.last_clean]
    assert any("document_mask is off" in text for text in row["warnings"]) == bool(trained.changes)
    left = purged.follow(after, run)
    assert (left.start.kind, left.start.step) == ("rollback", trained.last_clean)
    never = purged.go_on(trained, tmp_path / "never", masked, None)
    assert case.differences(left.state, never.state) == []
    told = case.ledger(run)
    moves = [entry for entry in told if entry["kind"] in ("start", "rollback")]
    assert [set(entry["versions"].values()) for entry in moves] == [{2}, {3}]
    again = taint(str(masked), trained.chosen, change=change)
    row = purged.row_of(again, run)
    assert (row["exposures"] > 0, row["applied"]) == (True, 0)
    assert all(seen["abandoned"] for seen in row["tainted"])
    assert row["resume"]["step"] is None
    assert purged.follow(again, run).start.step == case.STEPS


def test_a_second_purge_asks_for_the_same_checkpoint_anew(tmp_path, trained):
    """The command of the first purge, given again, goes on behind what it did; that of the second does not."""
    copy, run = purged.purged_copy(trained.data, tmp_path / "data", []), tmp_path / "run"
    case.live(trained.config(run, copy))
    for version, doc_id in enumerate(trained.chosen[:2], 3):
        purged.versions.mask(copy, [doc_id])
        report = taint(str(copy), [doc_id], change=Change(version, "mask", frozenset(purged.STREAMS)))
        row = purged.row_of(report, run)
        assert row["resume"]["step"] == row["last_clean"]["step"]
        left = purged.follow(report, run)
        assert (left.start.kind, left.start.step) == ("rollback", row["last_clean"]["step"])
        assert purged.follow(report, run).start.step == case.STEPS
