"""Where a run goes on: rollbacks that stay done, branches that stay left, data that stays skipped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from quern.config import load_config
from quern.errors import InputError, QuernError
from quern.parallel.local import LocalRanks
from quern.train.config import TrainConfig
from quern.train.history.ledger import data_step, skips_before
from support.damage import flip
from support.processes import files_of
from support.train import run_case as case

pytestmark = pytest.mark.slow

STEPS = 8
#: No chance spike.
CALM = {"loss_z": 1e9, "grad_norm_z": 1e9}


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A run with a checkpoint a step, killed in its seventh: (its folder, the paths of its data)."""
    folder = tmp_path_factory.mktemp("old")
    paths = case.write_corpus(folder / "data")
    case.live(case.settings(folder / "run", paths, steps=STEPS, checkpoint={"interval": 1}), kill_at=6)
    assert case.steps_of(folder / "run") == [1, 2, 3, 4, 5, 6]
    return folder / "run", paths


@pytest.fixture
def run(tmp_path, old):
    shutil.copytree(old[0], tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def config(run, old):
    def make(**changes):
        changes.setdefault("checkpoint", {"interval": 5})
        return case.settings(run, old[1], steps=STEPS, **changes)

    return make


def damage(run: Path, step: int) -> None:
    folder = run / "checkpoints" / f"step_{step:08d}"
    largest = max(folder.iterdir(), key=lambda file: file.stat().st_size)
    flip(largest)


def where(left: case.Left) -> tuple[str, int, int]:
    return left.start.kind, left.start.step, left.start.data_step


def moves(run: Path) -> list[tuple[str, int, int]]:
    kinds = ("start", "resume", "rollback")
    return [(e["kind"], e["step"], e["data_step"]) for e in case.ledger(run) if e["kind"] in kinds]


def test_a_rollback_reads_other_data_and_says_so(config, run, tmp_path, old):
    left = case.live(config(resume={"step": 2}, data_skip=3))
    assert where(left) == ("rollback", 2, 5)
    assert sorted(left.samples) == [5, 6, 7, 8, 9, 10]
    assert moves(run) == [("start", 0, 0), ("rollback", 2, 5)]
    straight = case.live(case.settings(tmp_path / "longer", old[1], steps=STEPS + 3))
    assert left.samples == {step: straight.samples[step] for step in range(5, 11)}
    assert [data_step(case.ledger(run), step) for step in range(STEPS)] == [0, 1, 5, 6, 7, 8, 9, 10]


def test_the_new_branch_is_what_a_run_without_that_data_is(config, run, tmp_path, old):
    """From the weights of step 2 on, whatever the left branch did: two runs that differ only in it end the same."""
    left = case.live(config(resume={"step": 2}, data_skip=3))
    short = case.settings(tmp_path / "short", old[1], steps=STEPS, checkpoint={"interval": 2})
    case.live(short, kill_at=2)
    other = case.live(
        case.settings(tmp_path / "short", old[1], steps=STEPS, resume={"step": 2}, data_skip=3), kill_at=None
    )
    assert case.differences(left.state, other.state) == []
    assert {k: v for k, v in case.rows(run).items() if k >= 2} == {
        k: v for k, v in case.rows(tmp_path / "short").items() if k >= 2
    }


@pytest.mark.parametrize("plain_first", [True, False])
def test_killed_right_after_the_rollback(config, run, plain_first):
    """A plain start and the same command both go on with the new branch, and its skipped data stays skipped."""
    back = config(resume={"step": 2}, data_skip=3)
    case.live(back, kill_at=2)
    left = case.live(config() if plain_first else back, kill_at=4)
    assert where(left) == ("resume", 2, 5)
    assert sorted(left.samples) == [5, 6, 7]
    if not plain_first:  # a plain start would make the command a new rollback
        left = case.live(back)
        assert where(left) == ("resume", 2, 5)
        assert moves(run) == [("start", 0, 0), ("rollback", 2, 5), ("resume", 2, 5), ("resume", 2, 5)]
        left = case.live(back)
        assert where(left) == ("resume", STEPS, STEPS + 3)
        assert left.samples == {}


def test_a_rollback_that_is_asked_for_anew_is_done_anew(config, run):
    case.live(config(resume={"step": 2}, data_skip=3), kill_at=4)
    case.live(config(), kill_at=4)
    assert where(case.live(config(resume={"step": 2}, data_skip=3), kill_at=3)) == ("rollback", 2, 5)
    assert where(case.live(config(resume={"step": 2}, data_skip=4), kill_at=3)) == ("rollback", 2, 6)
    assert where(case.live(config(resume={"step": 1}, data_skip=4), kill_at=3)) == ("rollback", 1, 5)


def test_checkpoints_of_a_left_branch_are_never_taken(config, run):
    """3 and 4 go as the new branch passes them, 6 waits; 5 is written anew, and damaged."""
    case.live(config(resume={"step": 2}, data_skip=3), kill_at=6)
    assert case.steps_of(run) == [1, 2, 5, 6]
    damage(run, 5)
    left = case.live(config(), kill_at=4)
    assert where(left) == ("resume", 2, 5)
    with pytest.raises(InputError, match="step_00000006: lies on a branch that was left: the run went back to step 2"):
        case.live(config(resume={"step": 6}))


def test_data_that_was_skipped_is_not_read_for_want_of_a_checkpoint(config, run):
    case.live(config(resume={"step": 2}, data_skip=3), kill_at=6)
    before = moves(run)
    damage(run, 5)
    damage(run, 2)
    with pytest.raises(
        InputError, match=r"step_00000001: .* before step 2, where the run skipped data steps 2 to 4; "
    ) as error:
        case.live(config())
    assert "resume.step=1 with a data_skip: 4 goes beyond them" in str(error.value)
    assert moves(run) == before
    left = case.live(config(resume={"step": 1}, data_skip=4), kill_at=3)
    assert where(left) == ("rollback", 1, 5)


def test_pruning_counts_the_own_branch_only(config, run):
    """With two to keep, 4 of the left branch does not take the place of 2 beside the new 5."""
    keep = {"interval": 5, "keep_last": 2}
    guard = {"health_window": 1, **CALM}  # none is kept for want of healthy steps
    case.live(config(resume={"step": 2}, data_skip=3, checkpoint=keep, guard=guard), kill_at=6)
    assert case.steps_of(run) == [2, 5, 6]  # 6 waits until the run passes it
    left = case.live(config(checkpoint=keep, guard=guard))
    assert where(left) == ("resume", 5, 8)
    assert case.steps_of(run) == [5, STEPS]


def test_what_to_skip_counts_from_the_checkpoint_that_is_left(config, run):
    """Two rollbacks skip 1 to 3 and 6 to 7; with only checkpoint 1 left, both are in question."""
    every = {"interval": 1}
    case.live(config(resume={"step": 1}, data_skip=3, checkpoint=every), kill_at=4)
    case.live(config(resume={"step": 3}, data_skip=2, checkpoint=every), kill_at=5)
    assert moves(run) == [("start", 0, 0), ("rollback", 1, 4), ("rollback", 3, 8)]
    for step in case.steps_of(run):
        if step > 1:
            damage(run, step)
    with pytest.raises(InputError, match=r"skipped data steps 6 to 7; .*: 7 goes beyond them, 3 reads them"):
        case.live(config())
    left = case.live(config(resume={"step": 1}, data_skip=7), kill_at=3)
    assert where(left) == ("rollback", 1, 8)


def test_without_its_checkpoints_a_run_does_not_start_over(config, run):
    case.live(config(), kill_at=6)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(QuernError, match="went on from step 6 before, and no checkpoint of that branch is left"):
        case.live(config())


def test_what_is_refused_moves_nothing(config, run):
    """A rollback with another model would leave the branch for nothing."""
    before = (run / "ledger.jsonl").read_bytes()
    with pytest.raises(InputError, match=r"model\.dim: expected 64"):
        case.live(config(resume={"step": 2}, model={"dim": 64}))
    with pytest.raises(InputError, match="attention: flex runs on CUDA only"):
        case.live(config(resume={"step": 2}, attention="flex"))
    with pytest.raises(InputError, match=r"has no checkpoint of step 7 \(there are: 1, 2, 3, 4, 5, 6\)"):
        case.live(config(resume={"step": 7}))
    assert (run / "ledger.jsonl").read_bytes() == before


def test_a_precision_that_would_round_moves_nothing(tmp_path, old):
    """The branch would be left for nothing."""
    run = tmp_path / "double"
    both = {"steps": STEPS, "checkpoint": {"interval": 1}}
    case.live(case.settings(run, old[1], **both, precision="fp64"), kill_at=3)
    before = (run / "ledger.jsonl").read_bytes()
    with pytest.raises(InputError, match=r"step_00000002/manifest.json: precision: expected fp32, .* got fp64"):
        case.live(case.settings(run, old[1], **both, resume={"step": 2}))
    assert (run / "ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize("resume", [{}, {"step": 5}])
def test_a_shorter_budget_than_what_is_done_is_refused_and_changes_nothing(config, run, resume):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=rf"steps: expected at least {resume.get('step', 6)}, .*, got 4; give more"):
        case.live(config(resume=resume).model_copy(update={"steps": 4}))
    assert {path: path.read_bytes() for path in before} == before


def test_a_run_that_is_complete_stays_as_it_is_and_says_so(config, run, caplog):
    first = case.live(config())
    caplog.set_level("INFO", "quern")
    assert "nothing to do" not in caplog.text
    again = case.live(config())
    assert f"complete at step {STEPS}, nothing to do" in caplog.text
    assert again.complete
    assert again.samples == {}
    assert case.differences(first.state, again.state) == []
    assert [entry["kind"] for entry in case.ledger(run)][-2:] == ["resume", "end"]


def line(kind: str, step: int, own: int = 0) -> dict:
    return {"kind": kind, "step": step, "data_step": own or step, "order": "a"}


@pytest.mark.parametrize(
    ("entries", "step", "expected"),
    [
        ([line("start", 0), line("skipped", 3), line("skipped", 4)], 5, 2),
        ([line("start", 0), line("skipped", 3), line("skipped", 4)], 6, 0),
        ([line("start", 0), line("skipped", 2), line("skipped", 4)], 5, 1),
        ([line("start", 0), line("skipped", 0), line("skipped", 1)], 2, 2),
        # the branch in which 4 was skipped is left; in the new one 3 was not
        ([line("start", 0), line("skipped", 3), line("skipped", 4), line("resume", 4)], 5, 0),
        ([line("start", 0), line("skipped", 3), line("skipped", 4), line("resume", 4), line("skipped", 4)], 5, 2),
        ([line("start", 0), line("skipped", 3), line("resume", 3), line("skipped", 4)], 5, 1),
        ([line("start", 0), line("skipped", 1), line("rollback", 2, 7), line("skipped", 2, 7)], 3, 2),
    ],
)
def test_skips_before(entries, step, expected):
    assert skips_before(entries, step) == expected


# ---- resume.step=good

GOOD = {"health_window": 2, **CALM}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory, old):
    """A run to its end with a checkpoint after every second of nine steps; step 6 is skipped: 2 and 4 are good."""
    folder = tmp_path_factory.mktemp("healthy") / "run"
    config = case.settings(folder, old[1], guard=GOOD, checkpoint={"interval": 2, "mode": "sync"})
    case.live(config, factor=lambda data_step: float("nan") if data_step == 6 else 1.0)
    assert case.steps_of(folder) == [2, 4, 6, 8, 9]
    assert [entry["step"] for entry in case.ledger(folder) if entry["kind"] == "good"] == [2, 4]
    return folder


@pytest.fixture
def copies(tmp_path, healthy, old):
    """Makes copies of that run: (its folder, what makes a config for it)."""

    def copied(name: str):
        run = shutil.copytree(healthy, tmp_path / name)

        def make(**changes):
            base = {"guard": GOOD, "checkpoint": {"interval": 2, "mode": "sync"}}
            return case.settings(run, old[1], **(base | changes))

        return run, make

    return copied


def without(entries: list[dict], *fields: str) -> list[dict]:
    return [{name: value for name, value in entry.items() if name not in fields} for entry in entries]


def test_good_goes_back_as_a_number_does(copies):
    """Same lines but for what was asked, same data, same bits."""
    skip = 3
    run, config = copies("good")
    left = case.live(config(resume={"step": "good"}, data_skip=skip))
    assert where(left) == ("rollback", 4, 4 + skip)
    other, config = copies("number")
    told = case.live(config(resume={"step": 4}, data_skip=skip))
    assert left.complete
    assert left.samples == told.samples
    assert case.differences(left.state, told.state) == []
    assert case.rows(run) == case.rows(other)
    assert without(case.ledger(run), "time", "asked") == without(case.ledger(other), "time", "asked")
    (line,) = [entry for entry in case.ledger(run) if entry["kind"] == "rollback"]
    assert line["asked"] == {"step": "good", "data_skip": skip}
    assert line["checkpoint"] == "step_00000004"
    assert [entry["step"] for entry in case.ledger(run) if entry["kind"] == "good"] == [2, 4, 6]


def test_a_launcher_that_asks_for_good_again_goes_on(copies):
    """Though a newer one has become good since: it is the same rollback, until another start comes between."""
    run, config = copies("again")
    back = config(resume={"step": "good"}, data_skip=3)
    assert where(case.live(back, kill_at=8)) == ("rollback", 4, 7)
    assert case.steps_of(run) == [2, 4, 6, 8, 9]  # 9 is of the branch that was left
    assert where(case.live(back, kill_at=8)) == ("resume", 8, 11)
    assert where(case.live(config(), kill_at=8)) == ("resume", 8, 11)
    assert where(case.live(back)) == ("rollback", 6, 12)
    assert moves(run)[1:] == [("rollback", 4, 7), ("resume", 8, 11), ("resume", 8, 11), ("rollback", 6, 12)]


def test_the_newest_checkpoint_may_be_the_good_one(copies):
    run, config = copies("newest")
    for step in (6, 8, 9):
        shutil.rmtree(run / "checkpoints" / f"step_{step:08d}")
    assert where(case.live(config(resume={"step": "good"}), kill_at=5)) == ("rollback", 4, 4)


def test_a_good_checkpoint_that_is_damaged_or_of_a_left_branch(copies, caplog):
    run, config = copies("damaged")
    damage(run, 4)
    assert where(case.live(config(resume={"step": "good"}), kill_at=3)) == ("rollback", 2, 2)
    assert "step_00000004" in caplog.text
    assert "an older good checkpoint is tried" in caplog.text
    before = moves(run)
    damage(run, 2)
    with pytest.raises(InputError, match=r"resume\.step: no good checkpoint is whole; .*step_00000002/"):
        case.live(config(resume={"step": "good"}, data_skip=1))  # 4 lies on the branch that was left
    assert moves(run) == before


def test_where_none_is_good_the_newest_is_named(config, run):
    before = (run / "ledger.jsonl").read_bytes()
    message = (
        r"resume\.step: no checkpoint is good yet; the newest, step_00000006, has 0 of the 100 healthy steps it needs "
        r"after it \(guard\.health_window\)\. Give a number"
    )
    with pytest.raises(InputError, match=message):
        case.live(config(resume={"step": "good"}))
    assert (run / "ledger.jsonl").read_bytes() == before
    # a shorter window needs no new steps: the ledger proves six
    left = case.live(config(resume={"step": "good"}, guard=GOOD), kill_at=5)
    assert where(left) == ("rollback", 4, 4)


def test_good_in_a_run_that_has_nothing(tmp_path, old):
    with pytest.raises(InputError, match=r"resume\.step: no checkpoint is good yet; the run has no checkpoint"):
        case.live(case.settings(tmp_path / "fresh", old[1], resume={"step": "good"}))


@pytest.mark.parametrize("value", ["bad", -1, 1.5, True])
def test_what_resume_step_may_be(value):
    with pytest.raises(InputError, match=r"resume\.step: expected an integer ≥ 0, good or null, got"):
        load_config(None, TrainConfig, ["run_dir=x", "data.0.path=y", "steps=3", f"resume.step={value}"])


def on_a_rank(config, kill_at):
    try:
        left = case.live(config, kill_at=kill_at)
    except InputError as error:
        return str(error)
    return where(left)


def test_all_ranks_go_back_to_the_same_checkpoint(copies):
    """Only the first has the ledger."""
    run, config = copies("ranks")
    damage(run, 4)
    files = files_of(on_a_rank)
    two = {"parallel": {"dp_shard": 2}, "micro_batch": 1, "resume": {"step": "good"}}
    with LocalRanks(2, files=files, preload=("hypothesis", "pydantic", "pytest", "yaml")) as ranks:
        assert ranks.call(on_a_rank, config(**two), 4) == [("rollback", 2, 2)] * 2
        damage(run, 2)
        refused = ranks.call(on_a_rank, config(**two, data_skip=1), 4)
    assert "no good checkpoint is whole" in refused[0]
    assert refused[0] == refused[1]
