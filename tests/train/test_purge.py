"""A run goes on after a purge: masked, bit for bit as if the loader had taken the documents out; rewritten, in a new
phase."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from quern.lineage.purge.impact.resume import VersionChange
from quern.lineage.purge.impact.training_impact import training_impact
from support.lineage import runs
from support.train import purge_case as purged
from support.train import run_case as case

pytestmark = pytest.mark.slow

KINDS = {"document masks": {}, "no document masks": {"document_mask": False, "micro_batch": 8}}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return runs.write_run(tmp_path_factory.mktemp("data") / "run", documents=200, files=2)


#: What the loader makes of either is proved for both in ``test_windows_…``; what a run does is the same.
MASKS_FIRST = pytest.mark.parametrize(
    "trained", ["document masks", pytest.param("no document masks", marks=pytest.mark.long)], indirect=True
)


@pytest.fixture(scope="module", params=KINDS)
def trained(request, data, tmp_path_factory):
    return purged.train(data, tmp_path_factory.mktemp("trained") / "run", KINDS[request.param])


@pytest.fixture(scope="module")
def masked(trained, tmp_path_factory):
    """The corpus version that a purge leaves, whose readers are told nowhere."""
    return purged.purged_copy(trained.data, tmp_path_factory.mktemp("masked") / "data", trained.chosen)


@MASKS_FIRST
@pytest.mark.parametrize("tainted", [False, True])
def test_going_on_over_a_masked_version_is_going_on_with_an_oracle_over_the_old_one(
    tmp_path, trained, masked, tainted, caplog
):
    """From the last clean checkpoint, and from one that has seen some of it already."""
    step = trained.last_clean + 2 * tainted
    with caplog.at_level(logging.INFO):
        left = purged.go_on(trained, tmp_path / "masked", masked, step)
    assert left.start.kind == "rollback"
    assert ("document_mask is off" in caplog.text) == bool(trained.changes)
    with purged.oracle(trained.spans, trained.chosen, purged.EOT):
        right = purged.go_on(trained, tmp_path / "oracle", trained.data, step)
    purged.same(tmp_path / "masked", left, tmp_path / "oracle", right)
    assert left.samples == {s: trained.left.samples[s] for s in left.samples}
    assert case.differences(left.state, trained.left.state) != []


@MASKS_FIRST
def test_from_the_last_clean_checkpoint_the_weights_are_those_of_a_run_that_never_saw_it(tmp_path, trained, masked):
    left = purged.go_on(trained, tmp_path / "masked", masked, trained.last_clean)
    never = purged.go_on(trained, tmp_path / "never", masked, None)
    assert never.start.step == 0
    assert case.rows(tmp_path / "masked") == case.rows(tmp_path / "never")
    assert case.differences(left.state, never.state) == []
    with purged.oracle(trained.spans, trained.chosen, purged.EOT):
        by_oracle = purged.go_on(trained, tmp_path / "by oracle", trained.data, None)
    assert case.differences(by_oracle.state, never.state) == []


def test_windows_without_a_purged_token_are_the_same_bytes_and_the_others_lose_nothing_else(tmp_path, trained, masked):
    order, steps = trained.left.start.mixture.order, 16
    mask = not trained.changes
    old = purged.arrays_of(purged.corpus_of(trained.data), order, tmp_path / "old", mask, steps)
    new = purged.arrays_of(purged.corpus_of(masked), order, tmp_path / "new", mask, steps)
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


@MASKS_FIRST
def test_the_report_s_command_goes_back_to_the_last_clean_checkpoint(tmp_path, trained):
    """Before and after a mask the report is the same, and after following it, nothing is tainted any more."""
    data, run = purged.copy(trained.data, tmp_path / "data"), tmp_path / "run"
    case.live(trained.config(run, data))
    report = purged.purge(data, trained.chosen)["taint"]
    row = purged.row_of(report, run)
    assert (row["registered"], row["given"]) == (True, False)
    assert row["last_clean"]["step"] == trained.last_clean == row["resume"]["step"]
    standing = [2, 4, 6, 8, 9]
    assert [seen["step"] for seen in row["tainted"]] == [step for step in standing if step > trained.last_clean]
    assert [seen["step"] for seen in row["clean"]] == [step for step in standing if step <= trained.last_clean]
    assert any("document_mask is off" in text for text in row["warnings"]) == bool(trained.changes)
    after = training_impact(
        str(data), trained.chosen, change=VersionChange(2, "mask", frozenset(report["change"]["streams"]))
    )
    assert purged.row_of(after, run) == row
    if trained.changes:
        return  # what the command does depends on no mask; going on without one is told above
    left = purged.follow(report, run)
    assert (left.start.kind, left.start.step) == ("rollback", trained.last_clean)
    never = purged.go_on(trained, tmp_path / "never", data, None)
    assert case.differences(left.state, never.state) == []
    moves = [entry for entry in case.ledger(run) if entry["kind"] in ("start", "rollback")]
    assert [set(entry["versions"].values()) for entry in moves] == [{1}, {2}]
    row = purged.row_of(training_impact(str(data), trained.chosen), run)
    assert (row["exposures"], row["purged"] > 0, row["applied"]) == (row["purged"], True, 0)
    assert row["tainted"] == [] or all(seen["abandoned"] for seen in row["tainted"])
    assert row["resume"]["step"] is None
    second_purge(trained, data, run)


def second_purge(trained, data, run):
    """It asks for the same checkpoint anew; its command, given again, goes on behind what it did."""
    first = purged.first_reads(trained.spans, purged.STREAMS, trained.left.samples, purged.LENGTH)
    late = [doc_id for doc_id in sorted(first) if first[doc_id] == 5 and doc_id not in trained.chosen]
    families = (purged.with_tokens(data, [doc_id]) for doc_id in late)
    chosen = next(own for own in families if own and all(first.get(doc_id, 5) >= 5 for doc_id in own))
    report = purged.purge(data, chosen)["taint"]
    row = purged.row_of(report, run)
    assert row["resume"]["arguments"][3:] == ["resume.step=4", "resume.again=3"]
    left = purged.follow(report, run)
    assert (left.start.kind, left.start.step) == ("rollback", 4)
    assert purged.follow(report, run).start.step == case.STEPS
