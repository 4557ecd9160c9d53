"""A training run read back: its attempts, its branches, where its tokens are, and its checkpoints."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quern.errors import InputError, QuernError
from quern.lineage.training import TrainingRun
from quern.mixtures.order import Order
from quern.train.history.ledger import Ledger, surviving
from support.lineage import histories as H
from support.lineage import runs

ORDER = Order([2, 1], [40, 30], 1, ids=["r1/web/1", "r1/code/1"], seq_len=8, global_batch=4)


def ledger(folder: Path, *lines: tuple[str, dict[str, Any]]) -> Path:
    """Lines of :data:`ORDER`; a move is given as (kind, its step, data_step and facts)."""
    folder.mkdir(exist_ok=True)
    with Ledger(folder / "ledger.jsonl") as written:
        for kind, fields in lines:
            if kind in ("start", "resume", "rollback"):
                facts = {"document_mask": True} | fields
                written.move(kind, facts.pop("step"), facts.pop("data_step"), ORDER, **facts)
            else:
                written.append(kind, **fields)
    return folder


def at(step: int, data_step: int | None = None, **facts: Any) -> dict[str, Any]:
    return {"step": step, "data_step": step if data_step is None else data_step, **facts}


def saved(step: int, data_step: int | None = None) -> tuple[str, dict[str, Any]]:
    return "checkpoint", {**at(step, data_step), "name": f"step_{step:08d}"}


def metrics(folder: Path, *rows: dict[str, Any], torn: str = "") -> None:
    text = "".join(json.dumps({"kind": "step", "loss": 1.0} | row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + torn)


def test_attempts_say_what_the_ledger_proves(tmp_path: Path) -> None:
    facts = {"paths": {"r1/web/1": "/d/tokens/web"}, "versions": {"r1/web/1": 3}, "dp": 2, "micro_batch": 1}
    folder = ledger(
        tmp_path, ("start", at(0, **facts)), saved(4), ("skipped", {**at(6), "reason": "spike"}),
        ("skipped", {**at(5), "reason": "spike"}), ("resume", at(4)), ("stopped", {"step": 9, "signal": "SIGTERM"}),
        ("rollback", at(4, 7, document_mask=False)), saved(5, 8), ("good", {"step": 5, "name": "step_00000005"}),
        ("checkpoint_failed", {"step": 5, "why": "full"}),
    )  # fmt: skip
    first, second, third = TrainingRun(str(folder)).attempts
    assert (first.number, first.kind, first.step, first.data_step, first.stop, first.ended) == (
        0,
        "start",
        0,
        0,
        7,
        False,
    )
    assert first.skipped.tolist() == [5, 6]
    assert (first.paths, first.versions, first.dp, first.micro_batch) == tuple(facts.values())
    assert first.order == ORDER.hash
    assert (second.kind, second.step, second.stop, second.ended, second.document_mask) == ("resume", 4, 9, True, True)
    assert (second.paths, second.versions, second.dp, second.micro_batch) == ({}, {}, None, None)
    assert (third.step, third.data_step, third.stop, third.data_stop, third.document_mask) == (4, 7, 5, 8, False)


def test_the_newest_attempt_has_come_as_far_as_its_metrics_say(tmp_path: Path) -> None:
    folder = ledger(tmp_path, ("start", at(0)), saved(4), ("resume", at(4)))
    assert TrainingRun(str(folder)).reached == 4
    metrics(folder, {"step": 5, "attempt": 0})
    assert TrainingRun(str(folder)).reached == 4
    metrics(folder, {"step": 5, "attempt": 0}, {"step": 4, "attempt": 1}, {"step": 5, "attempt": 1},
            {"kind": "validation", "step": 90}, torn='{"kind": "step", "step": 700, "attempt": 1')  # fmt: skip
    run = TrainingRun(str(folder))
    assert run.reached == 6
    assert [attempt.stop for attempt in run.attempts] == [4, 6]  # of attempt 0 the ledger alone tells
    metrics(folder, *({"step": n, "attempt": 1, "pad": "x" * 300} for n in range(4, 1000)))
    assert TrainingRun(str(folder)).reached == 1000


def test_an_attempt_that_said_where_it_ended_is_believed(tmp_path: Path) -> None:
    folder = ledger(tmp_path, ("start", at(0)), ("end", {"step": 3}))
    metrics(folder, {"step": 8, "attempt": 0})
    assert TrainingRun(str(folder)).reached == 3


@pytest.mark.slow
def test_branches_are_the_ranges_of_the_ledger(tmp_path: Path) -> None:
    for seed in range(25):
        (tmp_path / str(seed)).mkdir()
        made = H.make_history(random.Random(seed), tmp_path / str(seed))
        run = made.open()
        for stop in range(run.reached + 1):
            own = [(s.step, s.stop, s.data_step, s.attempt.order) for s in run.branch(stop)]
            assert own == [(r.step, r.stop, r.data_step, r.order) for r in surviving(run.entries, stop)]
        assert [s.attempt.number for s in run.branch() for _ in range(s.step, s.stop)] == made.lineage[: run.reached]
        assert all(s.data_stop - s.data_step == s.stop - s.step for s in run.branch())
        kept = run.kept()
        for (attempt, step), (data, _) in made.facts.items():
            assert (
                run.order_of(run.attempts[attempt]).sample(run.order_of(run.attempts[attempt]).first_sample(data))
                == made.samples[attempt, step][0]
            )
            if step < run.reached:
                assert (step < kept[attempt]) == (made.lineage[step] == attempt)


@pytest.mark.slow
def test_checkpoints_stand_on_the_branch_they_were_saved_on(tmp_path: Path) -> None:
    seen = 0
    for seed in range(40):
        (tmp_path / str(seed)).mkdir()
        made = H.make_history(random.Random(seed), tmp_path / str(seed))
        run = made.open()
        published = {step: (offset, lineage) for step, offset, lineage in made.checkpoints}
        for step, (offset, _) in published.items():
            H.publish(run, step, offset)
        checkpoints = run.checkpoints()
        assert [checkpoint.step for checkpoint in checkpoints] == sorted(published)
        for checkpoint in checkpoints:
            offset, lineage = published[checkpoint.step]
            assert (checkpoint.offset, checkpoint.name) == (offset, f"step_{checkpoint.step:08d}")
            assert checkpoint.path == str(tmp_path / str(seed) / "checkpoints" / checkpoint.name)
            assert [s.attempt.number for s in run.branch_of(checkpoint) for _ in range(s.step, s.stop)] == lineage
            seen += checkpoint.abandoned is not None
    assert seen > 10


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    made = H.make_history(random.Random(0), tmp_path)
    run = made.open()
    H.publish(run, 3, 10)
    manifest = tmp_path / "checkpoints" / "step_00000003" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 3', '"step": 4'))
    assert run.checkpoints() == []
    assert list(run.damaged) == [str(manifest.parent)]


def test_a_ledger_that_has_lost_lines_and_one_that_has_grown(tmp_path: Path) -> None:
    made = H.make_history(random.Random(0), tmp_path)
    run = made.open()
    size = (tmp_path / "ledger.jsonl").stat().st_size
    H.publish(run, 3, size + 50)
    with pytest.raises(QuernError, match=f"has {size} bytes, .*step_00000003 names {size + 50}; lines are lost"):
        run.checkpoints()
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "good", "step": 3, "name": "x" * 80}) + "\n")
    assert run.checkpoints() == []  # saved since the run was opened


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "expected a training run: it has no ledger.jsonl"),
        ("", "has no line that begins a run"),
        ('{"kind": "order", "hash": "ab", "spec": {}}\n', "has no line that begins a run"),
    ],
)
def test_what_is_no_training_run(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "ledger.jsonl").write_text(content)
    with pytest.raises(InputError, match=message):
        TrainingRun(str(tmp_path))
    with pytest.raises(InputError, match=r"expected a training run"):
        TrainingRun(str(tmp_path / "nowhere"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "run"
    runs.write_run(folder, documents=60)
    return folder


def run_over(folder: Path, data: Path, *, told: bool, where: Path | None = None) -> tuple[Path, list[str]]:
    """A run of one step over the streams of ``data``; whether the ledger says where they are."""
    from quern.lineage.store import IndexedRun

    streams = [stream for stream in IndexedRun(str(data)).streams if not stream.held_out]
    ids = [stream.identity for stream in streams]
    order = Order([1] * len(ids), [1] * len(ids), 1, ids=ids, seq_len=8, global_batch=1)
    folder.mkdir()
    paths = {s.identity: str((where or data) / "tokens" / s.name) for s in streams}
    facts: dict[str, Any] = {"paths": paths} if told else {}
    with Ledger(folder / "ledger.jsonl") as written:
        written.move("start", 0, 0, order, document_mask=True, **facts)
        written.append("stopped", step=2, signal="SIGTERM")
    return folder, ids


def test_sources_are_found_where_the_ledger_says(tmp_path: Path, data: Path) -> None:
    folder, ids = run_over(tmp_path / "train", data, told=True)
    run = TrainingRun(str(folder))
    for identity in ids:
        lineage, stream = run.find_stream(identity)
        assert stream.identity == identity
        assert lineage.run == str(data)
    assert len(run.lineages()) == 1
    assert run.unknown() == {}


def test_an_older_run_says_it_in_its_own_files(tmp_path: Path, data: Path) -> None:
    folder, ids = run_over(tmp_path / "train", data, told=False)
    with pytest.raises(InputError, match="neither the ledger nor the config says where it is"):
        TrainingRun(str(folder)).find_stream(ids[0])
    names = [identity.split("/")[1] for identity in ids]
    record = {"kind": "train", "sources": {i: str(data / "tokens" / n) for i, n in zip(ids, names, strict=True)}}
    (folder / "run.json").write_text(json.dumps(record))
    assert TrainingRun(str(folder)).find_stream(ids[0])[1].identity == ids[0]
    (folder / "run.json").unlink()
    sources = "".join(f"  - path: {data}/tokens/{name}\n" for name in names)
    (folder / "config.yaml").write_text(f"run_dir: x\nsteps: 3\ndata:\n{sources}")
    assert TrainingRun(str(folder)).find_stream(ids[1])[1].identity == ids[1]


def test_sources_that_are_gone_are_named(tmp_path: Path, data: Path) -> None:
    copy = shutil.copytree(data, tmp_path / "copy")
    folder, ids = run_over(tmp_path / "train", data, told=True, where=copy)
    run = TrainingRun(str(folder))
    assert run.unknown() == {}
    record = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps(record | {"id": "another"}))
    run = TrainingRun(str(folder))
    assert set(run.unknown()) == set(ids)
    with pytest.raises(InputError, match=f"source {ids[0]}: .*copy does not have it"):
        run.find_stream(ids[0])
    shutil.rmtree(copy)
    run = TrainingRun(str(folder))
    assert run.lineages() == []
    assert "copy" in run.unknown()[ids[1]]


def test_a_data_run_that_has_moved_is_found_where_the_config_says(tmp_path: Path, data: Path) -> None:
    moved = shutil.copytree(data, tmp_path / "moved")
    folder, ids = run_over(tmp_path / "train", data, told=True, where=tmp_path / "no longer here")
    names = [identity.split("/")[1] for identity in ids]
    assert set(TrainingRun(str(folder)).unknown()) == set(ids)
    sources = "".join(f"  - path: {moved}/tokens/{name}\n" for name in names)
    (folder / "config.yaml").write_text(f"run_dir: x\nsteps: 3\ndata:\n{sources}")
    run = TrainingRun(str(folder))
    assert run.unknown() == {}
    assert run.find_stream(ids[0])[0].run == str(moved)


def test_the_line_ends_are_counted_in_bytes(tmp_path: Path) -> None:
    made = H.make_history(random.Random(3), tmp_path)
    run = made.open()
    data = (tmp_path / "ledger.jsonl").read_bytes()
    ends = [place + 1 for place, byte in enumerate(data) if byte == 10]
    assert np.array_equal(run._line_ends, ends)
