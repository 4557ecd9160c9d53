"""The command that a taint report gives, for runs with a past: followed, it does what the report says."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from quern import storage
from quern.cli.lineage.training_impact import training_impact_lines
from quern.lineage.purge.impact.resume import VersionChange
from quern.lineage.purge.impact.training_impact import OTHERS, training_impact
from support.lineage import runs
from support.train import purge_case as purged
from support.train import run_case as case

pytestmark = pytest.mark.slow

MASK = VersionChange(2, "mask", frozenset(purged.STREAMS))


def report_on(data, run, doc_ids, change=MASK):
    return purged.row_of(training_impact(str(data), doc_ids, [str(run)], change=change), run)


def read_at(trained, left, wanted):
    """Documents that a life read first at one of these data steps."""
    first = purged.first_reads(trained.spans, purged.STREAMS, left.samples, purged.LENGTH)
    return [doc_id for doc_id, step in sorted(first.items()) if step in wanted]


def test_without_a_clean_checkpoint_the_run_begins_anew_elsewhere(trained, tmp_path):
    run = shutil.copytree(trained.run, tmp_path / "run of mine: it's #1")
    chosen = read_at(trained, trained.left, {0})[:1]
    row = report_on(trained.data, run, chosen)
    assert (row["last_clean"], row["resume"]["step"]) == (None, None)
    assert len(row["tainted"]) == 5
    assert row["resume"]["run_dir"] == f"{run}-v2"
    left = purged.obey(row)
    assert (tmp_path / f"{run.name}-v2" / "ledger.jsonl").exists()
    assert (left.start.kind, left.start.step) == ("start", 0)
    assert left.samples == trained.left.samples


def test_what_the_run_skipped_at_the_checkpoint_stays_skipped(trained, tmp_path):
    """It went back to step 4 beyond three data steps; going back there again must not read them."""
    data, run = trained.data, shutil.copytree(trained.run, tmp_path / "run")
    config = trained.config(run, data, resume={"step": 4}, data_skip=3, checkpoint={"interval": 1})
    left = case.live(config)
    assert sorted(left.samples) == [7, 8, 9, 10, 11]
    row = report_on(data, run, read_at(trained, left, {7})[:1])
    assert row["resume"]["step"] == 4
    assert row["resume"]["arguments"][3:] == ["resume.step=4", "resume.again=2"]  # the config still has data_skip=3
    again = purged.obey(row)
    assert (again.start.kind, again.start.step, again.start.data_step) == ("rollback", 4, 7)
    assert again.samples == left.samples


def test_what_it_skipped_later_is_read_again_and_that_is_said(trained, tmp_path):
    data, run = trained.data, shutil.copytree(trained.run, tmp_path / "run")
    left = case.live(trained.config(run, data, resume={"step": 6}, data_skip=2))
    assert sorted(left.samples) == [8, 9, 10]
    row = report_on(data, run, trained.chosen)
    assert row["resume"]["arguments"][3:] == ["resume.step=4", "data_skip=0"]
    assert row["resume"]["notes"] == ["data steps 6 to 7, which the run skipped later, are read again"]
    again = purged.obey(row)
    assert (again.start.kind, again.start.data_step, sorted(again.samples)) == ("rollback", 4, [4, 5, 6, 7, 8])


def test_a_rollback_in_the_config_is_not_asked_for_again_by_who_only_goes_on(trained, tmp_path):
    data, run = trained.data, shutil.copytree(trained.run, tmp_path / "run")
    left = case.live(trained.config(run, data, resume={"step": 4}, data_skip=3), stop_at=5)
    assert (left.stopped_by, sorted(left.samples)) == ("SIGTERM", [7, 8, 9, 10])
    row = report_on(data, run, [b"x" * 16], VersionChange(2, "rewrite", frozenset()))
    assert row["resume"]["arguments"][3:] == ["resume.step=null", "data_skip=0"]
    again = purged.obey(row)
    assert (again.start.kind, again.start.step, again.start.data_step) == ("resume", 8, 11)


def test_a_run_that_was_moved_goes_on_where_it_is(trained, tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    data = os.path.relpath(trained.data)
    left = case.live(trained.config("run", type(trained.data)(data)))
    assert left.complete
    row = report_on(trained.data, tmp_path / "a" / "run", trained.chosen)
    assert row["resume"]["run_in"] == str(tmp_path / "a")
    assert row["resume"]["arguments"][3:] == ["resume.step=4"]
    (tmp_path / "b").mkdir()
    shutil.move(tmp_path / "a" / "run", tmp_path / "b" / "run")
    row = report_on(trained.data, tmp_path / "b" / "run", trained.chosen)
    assert row["resume"]["arguments"][3:] == [f"run_dir={tmp_path}/b/run", "resume.step=4"]
    (tmp_path / "c" / "d" / "e" / "f").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "c" / "d" / "e" / "f")
    row = report_on(trained.data, tmp_path / "b" / "run", trained.chosen)
    paths = [f"data.{n}.path={trained.data}/tokens/{name}" for n, name in enumerate(purged.STREAMS)]
    assert row["resume"]["arguments"][3:] == [f"run_dir={tmp_path}/b/run", "resume.step=4", *paths]
    assert row["resume"]["run_in"] is None
    left = purged.obey(row)
    assert (left.start.kind, left.start.step, left.complete) == ("rollback", 4, True)


def test_who_read_a_data_run_before_it_was_moved_is_judged(trained, tmp_path):
    data, run, moved = purged.copy(trained.data, tmp_path / "data"), tmp_path / "run", tmp_path / "moved"
    case.live(trained.config(run, data))
    shutil.move(data, moved)
    row = report_on(moved, run, trained.chosen)
    here = report_on(trained.data, trained.run, trained.chosen)
    same = ("sources", "unknown_sources", "documents_read", "exposures", "first_step", "last_step")
    assert [row[name] for name in same] == [here[name] for name in same]
    assert [seen["step"] for seen in row["tainted"]] == [6, 8, 9]
    assert row["last_clean"]["step"] == 4
    purged.purge(moved, trained.chosen, "rewrite")
    report = training_impact(str(moved), trained.chosen)
    row = purged.row_of(report, run)
    assert ([seen["step"] for seen in row["tainted"]], len(row["audit"])) == ([6, 8, 9], 1)
    assert f"data.0.path={moved}/tokens/web" in row["resume"]["arguments"]
    left = purged.follow(report, run)
    assert (left.start.kind, left.start.step, left.complete) == ("rollback", 4, True)


def test_what_cannot_be_judged_is_named(trained, tmp_path):
    data = shutil.copytree(trained.data, tmp_path / "data")
    lines = [
        {"time": "2026-01-01T00:00:00Z", "train_run": path, "order": "x", "identities": ["run00000/web/1"]}
        for path in (str(tmp_path / "gone"), str(tmp_path / "broken"), str(tmp_path / "other"), str(trained.run))
    ]
    (data / "consumers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "ledger.jsonl").write_text("no ledger\n" * 3)
    (tmp_path / "empty").mkdir()
    elsewhere = runs.write_run(tmp_path / "elsewhere", seed=5, documents=60, files=2)
    case.live(trained.config(tmp_path / "other", elsewhere, steps=4))
    report = training_impact(str(data), trained.chosen, [str(tmp_path / "empty"), str(trained.run) + "/"], change=MASK)
    rows = {row["path"]: row for row in report["train_runs"]}
    assert rows.keys() == {str(trained.run), str(tmp_path / "other")}
    assert rows[str(trained.run)]["last_clean"]["step"] == 4
    assert (rows[str(trained.run)]["given"], rows[str(trained.run)]["registered"]) == (True, True)
    assert (rows[str(tmp_path / "other")]["sources"], rows[str(tmp_path / "other")]["tainted"]) == ([], [])
    whys = {row["path"]: row["why"] for row in report["not_judged"]}
    assert whys.keys() == {str(tmp_path / name) for name in ("gone", "broken", "empty")}
    assert whys[str(tmp_path / "gone")] == "is not there (any more), or stands on another machine"
    assert "line 1" in whys[str(tmp_path / "broken")]
    assert "it has no ledger.jsonl" in whys[str(tmp_path / "empty")]
    assert (report["registered"], report["unregistered"]) == (4, None)
    json.dumps(report)
    lines = list(training_impact_lines(report))
    assert lines[-1] == f"not known   {OTHERS}"
    assert f"training    {tmp_path}/gone: not judged: is not there (any more), or stands on another machine" in lines
    other = lines.index(f"training    {tmp_path}/other: 4 steps complete")
    assert lines[other + 1] == "  read       nothing of this data run"
    own = lines[lines.index(f"training    {trained.run}: 9 steps complete") + 1 :][:3]
    assert own[0].startswith(f"  read       {len(trained.chosen)} documents in ")
    assert own[1] == "  tainted    3 of 5 checkpoints: step 6, 8, 9"
    assert own[2] == f"  last clean step 4  {trained.run}/checkpoints/step_00000004"
    go_on = [line for line in lines if line.startswith(f"  go on      quern train {trained.run}/")]
    assert go_on == [f"  go on      quern train {trained.run}/config.yaml resume.step=4"]


def test_a_data_run_on_a_store_is_judged_by_who_read_a_copy(trained):
    url = "memory://purged/run"
    storage.write_json(f"{url}/run.json", storage.read_json(str(trained.data / "run.json")))
    report = training_impact(url, trained.chosen, [str(trained.run)], change=MASK)
    assert (report["registered"], report["not_judged"]) == (None, [])
    assert report["unregistered"].startswith(f"{url}/consumers.jsonl: trainers read local copies")
    (row,) = report["train_runs"]
    local = report_on(trained.data, trained.run, trained.chosen)
    notes = row["resume"].pop("notes")
    assert local["resume"].pop("notes") == []
    assert row == local | {"registered": False}
    assert all(note.endswith("and has the documents: bring the new version there first") for note in notes)
    assert f"it reads {trained.data}/tokens/web, which is still version 1" in notes[0]
    assert training_impact(url, trained.chosen)["train_runs"] == []


def test_who_reads_an_unpurged_copy_is_told_so_beside_the_command(trained, tmp_path):
    """A copy of a data run knows the readers of the original, which still has the documents."""
    copy = shutil.copytree(trained.data, tmp_path / "copy")
    report = purged.purge(copy, trained.chosen)["taint"]
    row = purged.row_of(report, trained.run)
    assert row["resume"]["arguments"][3:] == ["resume.step=4"]
    streams = {name for name, rows in trained.spans.items() if any(row[0] in trained.chosen for row in rows)}
    assert row["resume"]["notes"] == [
        f"it reads {trained.data}/tokens/{name}, which is still version 1 and has the documents: bring the new version "
        f"there first, or give data.{index}.path={copy}/tokens/{name}"
        for index, name in enumerate(purged.STREAMS)
        if name in streams
    ]
    lines = list(training_impact_lines(report))
    assert f"  note       {row['resume']['notes'][0]}" in lines
    run = tmp_path / "run"
    case.live(trained.config(run, copy, steps=4))  # who reads the copy itself is told nothing of the kind
    assert report_on(copy, run, trained.chosen)["resume"]["notes"] == []
    purged.purge(elsewhere := purged.copy(trained.data, tmp_path / "elsewhere"), trained.chosen)
    case.live(trained.config(tmp_path / "other", elsewhere, steps=4))  # its copy has the documents no more
    assert report_on(copy, tmp_path / "other", trained.chosen)["resume"]["notes"] == []


def test_a_skipped_step_taints_nothing_and_a_left_branch_only_its_own_checkpoints(trained, tmp_path):
    data, run = trained.data, tmp_path / "run"
    after = {step: rows for step, rows in trained.left.samples.items() if step > 6}
    often = purged.first_reads(trained.spans, purged.STREAMS, after, purged.LENGTH)
    chosen = [doc_id for doc_id in read_at(trained, trained.left, {6}) if doc_id not in often][:1]
    skip = lambda data_step: float("nan") if data_step == 6 else 1.0  # noqa: E731
    assert case.live(trained.config(run, data), factor=skip).samples == trained.left.samples
    row = report_on(data, run, chosen)
    assert (row["exposures"] > 0, row["applied"], row["skipped"], row["tainted"]) == (True, 0, row["exposures"], [])
    assert (row["last_clean"]["step"], row["resume"]["step"]) == (9, None)
    copy = shutil.copytree(trained.run, tmp_path / "left")
    case.live(trained.config(copy, data, resume={"step": 6}, data_skip=1), stop_at=6)
    row = report_on(data, copy, chosen)
    assert [(seen["step"], bool(seen["abandoned"])) for seen in row["tainted"]] == [(9, True)]  # 8 was written anew
    assert (row["exposures"], row["abandoned"] > 0, row["last_clean"]["step"]) == (0, True, 8)
