"""Which checkpoints stay: the rule against its words, and against the trainer's own pruning."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern.errors import QuernError
from quern.train.checkpoint.format.manifest import list_checkpoints, read_manifest
from quern.train.checkpoint.retention.prune import Keep, prune
from quern.train.checkpoint.retention.retention import kept, kept_in_store, survey
from quern.train.config import CheckpointConfig
from support.damage import flip
from support.train import checkpoint_case as CASE
from support.train.saves import CheckpointManager


def by_the_words(checkpoints, keep_last, keep_every, protected) -> set[int]:
    """Each checkpoint judged by itself."""
    ours = [(step, whole) for step, left, whole in checkpoints if not left]
    stay = set()
    for step, left, whole in checkpoints:
        newer = [other for other in ours if other[0] > step]
        if (
            not any(sound for _, sound in ours)
            or (not left and len(newer) < keep_last)
            or (not left and whole and not any(sound for _, sound in newer))
            or (keep_every is not None and step % keep_every == 0)
            or step in protected
        ):
            stay.add(step)
    return stay


@pytest.mark.parametrize("keep_last", [1, 2, 9])
@pytest.mark.parametrize("keep_every", [None, 1, 20])
@pytest.mark.parametrize("protected", [(), (10,), (30, 77)])
def test_all_runs_of_up_to_four_checkpoints(keep_last, keep_every, protected):
    kinds = list(product([False, True], repeat=2))
    for count in range(5):
        for found in product(kinds, repeat=count):
            checkpoints = [(10 * (number + 1), *kind) for number, kind in enumerate(found)]
            expected = by_the_words(checkpoints, keep_last, keep_every, protected)
            assert kept(checkpoints, keep_last, keep_every, protected) == expected
            assert kept(reversed(checkpoints), keep_last, keep_every, protected) == expected


@pytest.mark.slow
@given(
    st.dictionaries(st.integers(0, 60), st.tuples(st.booleans(), st.booleans())),
    st.integers(1, 12),
    st.none() | st.integers(1, 9),
    st.sets(st.integers(0, 60)),
)
def test_any_run(found, keep_last, keep_every, protected):
    checkpoints = [(step, *kind) for step, kind in found.items()]
    assert kept(checkpoints, keep_last, keep_every, protected) == by_the_words(
        checkpoints, keep_last, keep_every, protected
    )


def test_only_the_newest_whole_one_needs_to_be_known():
    """Of older ones it makes no difference whether they are whole."""
    for kinds in product([False, True], repeat=4):
        checkpoints = [(step, False, whole) for step, whole in enumerate(kinds)]
        newest = max((step for step, whole in enumerate(kinds) if whole), default=None)
        told = [(step, False, step == newest) for step in range(4)]
        assert kept(told, 1, None) == kept(checkpoints, 1, None)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Steps 1 to 6. The ledger says that the run went back from 6 to 4, which leaves 5 and 6."""
    folder = tmp_path_factory.mktemp("run")
    state = CASE.make(folder)
    with CheckpointManager(str(folder / "run"), CheckpointConfig(keep_last=99)) as checkpoints:
        for step in range(1, 7):
            CASE.fill(state, step)
            checkpoints.save(step, state, CASE.position(step))
    line = {"kind": "rollback", "step": 4, "data_step": 9, "order": "a"}
    (folder / "run" / "ledger.jsonl").write_text(json.dumps(line) + "\n")
    return folder / "run"


@pytest.fixture
def copy(run, tmp_path) -> Path:
    return shutil.copytree(run, tmp_path / "copy")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "keep_last", "keep_every"),
    [((), 1, None), ((), 2, None), ((4,), 1, None), ((4, 3), 1, 5), ((1, 2, 3, 4), 1, None), ((6, 5), 3, 3)],
)
def test_it_is_what_the_trainer_would_do(copy, broken, keep_last, keep_every):
    """The oracle is the trainer's pruning of a copy."""
    for step in broken:
        flip(copy / "checkpoints" / f"step_{step:08d}" / "__0_0.distcp", 500)
    found = survey(str(copy), keep_last, keep_every, 100)
    assert [candidate.checkpoint.step for candidate in found] == [1, 2, 3, 4, 5, 6]
    assert [candidate.abandoned is not None for candidate in found] == [False] * 4 + [True] * 2
    with CheckpointManager(str(copy), CheckpointConfig(keep_last=keep_last, keep_every=keep_every)) as checkpoints:
        checkpoints.prune()
    assert [checkpoint.step for checkpoint in list_checkpoints(str(copy))] == [
        candidate.checkpoint.step for candidate in found if candidate.keep
    ]
    whole = [candidate.checkpoint.step for candidate in found if candidate.newest_whole]
    assert whole == [max({1, 2, 3, 4} - set(broken), default=None)] or not whole
    assert bool(whole) == bool({1, 2, 3, 4} - set(broken))
    newest = max({1, 2, 3, 4} - set(broken), default=0)
    assert {c.checkpoint.step for c in found if c.problems} == {s for s in broken if newest < s <= 4}


def on_nodes(path: Path) -> None:
    """As if the tensor files were on other machines."""
    files = sorted(path.glob("*.distcp"))
    nodes = [{"host": "h0", "folder": "/nowhere/x", "files": [file.name for file in files]}]
    (path / "places.json").write_text(json.dumps({"schema": 1, "nodes": nodes}))
    for file in files:
        file.unlink()


@pytest.mark.parametrize(
    ("broken", "newest"), [((), 4), ((".metadata",), 3), (("config.yaml",), 3), (("places.json",), 3)]
)
def test_what_is_here_decides_when_the_tensors_are_on_nodes(copy, broken, newest):
    """The trainer's pruning says the same."""
    for step in (2, 3, 4):
        on_nodes(copy / "checkpoints" / f"step_{step:08d}")
    for name in broken:
        (copy / "checkpoints" / "step_00000004" / name).write_text("{}")
    found = survey(str(copy), 1, None, 100)
    assert {c.checkpoint.step for c in found if c.newest_whole} == {newest}
    assert {c.checkpoint.step for c in found if c.keep} == {newest, 4}
    assert {c.checkpoint.step for c in found if c.problems} == ({4} if broken else set())
    prune(Keep(str(copy), 1, None))
    assert [checkpoint.step for checkpoint in list_checkpoints(str(copy))] == sorted({newest, 4})


@pytest.mark.parametrize("keep_last", [1, 2, 9])
@pytest.mark.parametrize("keep_every", [None, 5])
@pytest.mark.parametrize("broken", [(), (4,), (1, 2, 3, 4)])
def test_the_store_keeps_what_the_run_keeps_and_what_it_alone_must(copy, keep_last, keep_every, broken):
    """The oracle are the words of the rule, step by step; the run has 1 to 6, of which it left 5 and 6."""
    for step in broken:
        flip(copy / "checkpoints" / f"step_{step:08d}" / "__0_0.distcp", 500)
    found = survey(str(copy), keep_last, keep_every, 100)
    stored = [0, 1, 3, 4, 6, 7, 10]
    stays = {
        step
        for step in stored
        if broken == (1, 2, 3, 4)
        or step > 6
        or any(c.checkpoint.step == step and c.keep for c in found)
        or (keep_every == 5 and step in (0, 5, 10))
    }
    assert kept_in_store(found, stored, keep_every) == stays
    assert kept_in_store([], stored, keep_every) == set(stored)


def test_sizes_are_of_what_lies_there(copy):
    (copy / "checkpoints" / "step_00000002" / "more").write_bytes(b"x" * 1000)
    sizes = {c.checkpoint.step: c.size for c in survey(str(copy), 1, None, 100)}
    for step, size in sizes.items():
        assert size == sum(p.stat().st_size for p in (copy / "checkpoints" / f"step_{step:08d}").iterdir())
    assert sizes[2] > 1000


def test_what_cannot_be_told_counts_as_the_runs(copy):
    (copy / "checkpoints" / "step_00000006" / "manifest.json").write_text("{}")
    found = {candidate.checkpoint.step: candidate for candidate in survey(str(copy), 1, None, 100)}
    assert {step for step, candidate in found.items() if candidate.keep} == {4, 6}
    assert found[6].abandoned is None
    assert "manifest.json: schema: missing" in found[6].problems[0]


def test_a_good_checkpoint_stays(copy):
    """Six steps without an unhealthy one: four follow 2, which makes it good; 3 lacks one, and may become so."""
    lines = [{"kind": "start", "step": 0, "data_step": 0, "order": "a"}]
    lines += [{"kind": "checkpoint", "step": s, "data_step": s, "name": f"step_{s:08d}"} for s in range(1, 7)]
    ledger = "".join(json.dumps(line) + "\n" for line in lines)
    (copy / "ledger.jsonl").write_text(ledger)
    for path in (copy / "checkpoints").glob("step_*"):
        manifest = replace(read_manifest(str(path)), ledger_offset=len(ledger))
        (path / "manifest.json").write_bytes(manifest.to_bytes())
    found = survey(str(copy), 1, None, 4)
    assert {c.checkpoint.step for c in found if c.protected} == {2, 3}
    assert {c.checkpoint.step for c in found if c.keep} == {2, 3, 6}


def test_a_damaged_ledger_is_an_error(copy):
    (copy / "ledger.jsonl").write_text("no json\n{}\n")
    with pytest.raises(QuernError, match=r"ledger\.jsonl: line 1 is damaged"):
        survey(str(copy), 1, None, 100)
