"""A run goes on after a rewrite: only when told, in a new phase, and what it read on either version stays known."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quern.cli.lineage import app
from quern.cli.lineage.training_impact import training_impact_lines
from quern.errors import InputError, QuernError
from quern.lineage.exposure import exposures
from quern.lineage.match import match
from quern.lineage.purge.apply import finish
from quern.lineage.purge.impact.resume import VersionChange
from quern.lineage.purge.impact.training_impact import training_impact
from quern.lineage.store import IndexedRun
from quern.lineage.training import TrainingRun
from support.lineage import runs
from support.train import purge_case as purged
from support.train import run_case as case

pytestmark = pytest.mark.slow


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
    lineages = [IndexedRun(str(trained.data)), IndexedRun(str(data))]
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
    row = purged.row_of(training_impact(str(data), everyone, [str(run)]), run)
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
    later = training_impact(str(data), trained.chosen)
    row = purged.row_of(later, run)
    assert set(row["unknown_sources"]) == {f"run00000/{name}/1" for name in streams & set(purged.STREAMS)}
    assert any("is not known" in text for text in row["warnings"])
    assert purged.follow(later, run).start.step == case.STEPS  # the version is accepted: nothing is asked again


@pytest.fixture
def read_and_rewritten(trained, tmp_path):
    """A data run whose tokens were rewritten without what a training run had read, which was not taken back."""
    data, run = purged.copy(trained.data, tmp_path / "data"), tmp_path / "run"
    case.live(trained.config(run, data))
    purged.purge(data, trained.chosen, "rewrite")
    return data, run


def other_document(trained: Any) -> bytes:
    first = purged.first_reads(trained.spans, purged.STREAMS, trained.left.samples, purged.LENGTH)
    return next(doc_id for doc_id in sorted(first) if doc_id not in trained.chosen)


def test_after_a_rewrite_the_audit_entry_tells_who_had_read_what_went(trained, read_and_rewritten):
    """The old source cannot be opened any more; the purge had looked before."""
    data, run = read_and_rewritten
    report = training_impact(str(data), trained.chosen)
    row = purged.row_of(report, run)
    assert row["unknown_sources"]
    assert ([seen["step"] for seen in row["tainted"]], row["unknown"]) == ([6, 8, 9], [])
    assert (row["last_clean"]["step"], row["resume"]["step"]) == (4, 4)
    (told,) = row["audit"]
    assert told.startswith(f"{data}/audit/00001.json: of 9 steps that were complete before this purge, step 5 was the ")
    lines = [line for line in training_impact_lines(report) if line.startswith("  ")]
    assert lines[:3] == [
        "  read       not known",
        "  tainted    3 of 5 checkpoints: step 6, 8, 9",
        f"  last clean step 4  {run}/checkpoints/step_00000004",
    ]
    assert f"  warning    {told}" in lines
    assert "resume.step=4" in lines[-1]
    left = purged.follow(
        training_impact(str(data), trained.chosen, change=VersionChange(2, "rewrite", frozenset(purged.STREAMS))), run
    )
    assert (left.start.kind, left.start.step) == ("rollback", 4)
    # what stands now began before any of it was read
    row = purged.row_of(training_impact(str(data), trained.chosen), run)
    assert [seen["step"] for seen in row["tainted"] if seen["abandoned"] is None] == []
    assert (row["last_clean"]["step"], row["resume"]["step"]) == (case.STEPS, None)


def test_of_one_of_the_documents_that_went_the_entry_tells_what_is_clean(trained, read_and_rewritten):
    data, run = read_and_rewritten
    row = purged.row_of(training_impact(str(data), trained.chosen[:1]), run)
    assert ([seen["step"] for seen in row["unknown"]], row["tainted"]) == ([6, 8, 9], [])
    assert (row["last_clean"]["step"], row["resume"]["step"]) == (4, 4)
    assert "or of 2 documents purged with them" in row["audit"][0]


def test_what_no_entry_tells_is_not_known_and_not_called_clean(trained, read_and_rewritten, tmp_path):
    """Other documents than those that went, and a copy of the run, of which the entry knows nothing."""
    data, run = read_and_rewritten
    shutil.copytree(run, tmp_path / "copy")
    other = other_document(trained)
    for folder, doc_ids in ((run, [other]), (run, [other, *trained.chosen]), (tmp_path / "copy", trained.chosen)):
        report = training_impact(str(data), doc_ids, [str(folder)])
        report["train_runs"] = [purged.row_of(report, folder)]
        row = report["train_runs"][0]
        assert len(row["unknown"]) + len(row["tainted"]) == 5
        assert (row["clean"], row["last_clean"], row["resume"]["command"], row["audit"]) == ([], None, None, [])
        lines = list(training_impact_lines(report))
        assert any(
            line.startswith("  not known  whether ") and "of 5 checkpoints took it in: step " in line for line in lines
        )
        assert "  last clean not known" in lines
        assert not any("0 of 5" in line or "read       none" in line for line in lines)
        assert any(
            "does not have it (any more)" in line and "what it read there is not known" in line for line in lines
        )
        assert "  go on      no command can be given: no checkpoint is known to be clean" in "\n".join(lines)


def exposed(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    capfd.readouterr()
    assert (app(["exposure", *arguments], standalone_mode=False) or 0) == 0
    return capfd.readouterr().out


def test_exposure_after_a_rewrite_says_what_is_not_known(trained, read_and_rewritten, tmp_path, capfd):
    _, run = read_and_rewritten
    other = str(shutil.copytree(run, tmp_path / "copy"))
    went = ("--doc", trained.chosen[0].hex())
    text = exposed(capfd, other, *went)
    assert "exposures    not known; in the sources that can be opened: 0" in text
    assert "checkpoints  of 5 of 5 it is not known whether they have seen them" in text
    assert "last clean   not known" in text
    told = json.loads(exposed(capfd, other, *went, "--json"))
    assert (told["known"], told["last_clean"], told["audit"]) == (False, None, [])
    assert [row["saw"] for row in told["checkpoints"]] == [None] * 5
    told = json.loads(exposed(capfd, str(run), *went, "--json"))
    assert [row["saw"] for row in told["checkpoints"]] == [False, False, None, None, None]
    assert (told["known"], told["last_clean"]["step"], len(told["audit"])) == (False, 4, 1)
    text = exposed(capfd, str(run), *went)
    assert "checkpoints  of 3 of 5 it is not known whether they have seen them" in text
    assert f"last clean   step 4  {run}/checkpoints/step_00000004" in text


def test_a_damaged_entry_is_named(trained, read_and_rewritten):
    data, _ = read_and_rewritten
    path = data / "audit" / "00001.json"
    record = json.loads(path.read_text())
    del record["taint"]["train_runs"][0]["first_step"]
    path.write_text(json.dumps(record))
    (row,) = training_impact(str(data), trained.chosen)["not_judged"]
    assert row["why"] == f"{path}: taint: expected what a purge finds out of training runs"


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


@pytest.fixture
def over_two(trained, tmp_path):
    """Two data runs, a training run that read both, and a document with a URL that only the second has."""
    data, other = purged.copy(trained.data, tmp_path / "data"), tmp_path / "other"
    runs.write_run(other, seed=5, documents=100, files=2, sources=("pages",))
    run = tmp_path / "run"
    paths = [f"{data}/tokens/web", f"{other}/tokens/pages"]
    left = case.live(case.settings(run, paths, checkpoint={"interval": 2}))
    spans = {"web": [], **purged.spans_of(other)}
    first = purged.first_reads(spans, ["web", "pages"], left.samples, purged.LENGTH)
    lineages = IndexedRun(str(data)), IndexedRun(str(other))
    alone = [doc_id for doc_id in first if first[doc_id] > 1 and purged.with_tokens(other, [doc_id]) == [doc_id]]
    for doc_id in alone:
        (url,) = lineages[1].documents(lineages[1].find(doc=doc_id)).urls
        if url is not None and len(lineages[1].find(url=url)) == 1 and not len(lineages[0].find(url=url)):
            return data, other, run, doc_id, url, first[doc_id]
    raise AssertionError("no document fits")


def test_what_only_a_rewritten_data_run_has_is_not_called_absent(over_two, tmp_path, capfd):
    _, other, run, doc_id, url, step = over_two
    kept = str(tmp_path / "kept.parquet")
    bench = tmp_path / "bench.jsonl"
    words = runs.listing(seed=5, documents=100, files=2, sources=("pages",)).texts[doc_id]
    bench.write_text(json.dumps({"text": words}) + "\n")
    found = match(IndexedRun(str(other)), str(bench))
    assert set(found.doc_ids) == {doc_id}
    found.save(kept)
    before = json.loads(exposed(capfd, str(run), "--url", url, "--json"))
    assert (before["known"], before["first_step"]) == (True, step)
    purged.purge(other, [doc_id], "rewrite")
    clean = max(row["step"] for row in before["checkpoints"] if row["step"] <= step)
    for asked in (("--url", url), ("--doc", doc_id.hex()), ("--match", kept)):
        told = json.loads(exposed(capfd, str(run), *asked, "--json"))
        assert (told["documents"], told["documents_without_tokens"], told["known"]) == (1, 1, False)
        assert "run00005/pages/1" in told["unknown_sources"]
        assert f"step {step} was the first that had read them" in told["audit"][0]
        # a kept result says nothing of the other data run
        assert told["last_clean"] == (None if asked[0] == "--match" else {**told["last_clean"], "step": clean})
    told = json.loads(exposed(capfd, str(run), "--match", str(bench), "--json"))
    assert (told["known"], told["last_clean"], told["audit"]) == (False, None, [])
    assert "documents    1, 1 of them without tokens: purged, dropped, or duplicates" in exposed(
        capfd, str(run), "--url", url
    )
    # the rows of both data runs are all there: what they do not have, nobody has read
    assert app(["exposure", str(run), "--url", f"{url}-"], standalone_mode=False) == 2
    assert f"{other}: has no document with url {url}-" in capfd.readouterr().err


@pytest.mark.parametrize("tells_paths", [True, False])
def test_a_purge_that_was_cut_off_is_finished_before_exposure_answers(over_two, monkeypatch, capfd, tells_paths):
    """Its audit entry, which is written last, says who had read what went. A ledger of an older version does not tell
    where the data is: the config does."""
    _, other, run, doc_id, url, step = over_two
    if not tells_paths:
        ledger = run / "ledger.jsonl"
        ledger.write_bytes(ledger.read_bytes().replace(b'"paths"', b'"plans"'))
    with monkeypatch.context() as patch:
        patch.setattr(finish, "clean", lambda *given: 1 / 0)
        with pytest.raises(QuernError, match="the purge is not at its end"):
            purged.purge(other, [doc_id], "rewrite")
    assert (other / ".purge/intent.json").exists()
    told = json.loads(exposed(capfd, str(run), "--url", url, "--json"))
    assert f"step {step} was the first that had read them" in told["audit"][0]
    assert not (other / ".purge/intent.json").exists()


def test_what_a_data_run_that_is_gone_may_have_is_not_known(over_two, capfd):
    data, other, run, doc_id, url, step = over_two
    shutil.move(other, other.with_name("elsewhere"))
    how = f"{other}: is not there (any more): put it back, or make a link at {other} to where it is now"
    for asked in (("--url", url), ("--doc", doc_id.hex()), ("--domain", "nowhere.example")):
        told = json.loads(exposed(capfd, str(run), *asked, "--json"))
        assert (told["documents"], told["known"], told["last_clean"]) == (0, False, None)
        ((identity, why),) = told["unknown_sources"].items()
        assert (identity, why) == ("run00005/pages/1", f"{run}: source run00005/pages/1: {how}")
    assert app(["step", str(run), "0"], standalone_mode=False) in (None, 0)
    assert how in capfd.readouterr().err
    shutil.move(data, data.with_name("elsewhere_too"))
    assert app(["exposure", str(run), "--url", url], standalone_mode=False) == 2
    assert f"make a link at {data} to where it is now" in capfd.readouterr().err
    other.symlink_to(other.with_name("elsewhere"))
    told = json.loads(exposed(capfd, str(run), "--url", url, "--json"))
    assert (told["documents"], told["first_step"]) == (1, step)
    assert list(told["unknown_sources"]) == ["run00000/web/1"]
