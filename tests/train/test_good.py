"""Good checkpoints: against the definition, over a record of every step's health that no ledger holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quern.train.checkpoint.format.manifest import checkpoint_name, list_checkpoints
from quern.train.history.health import Good, HealthTracker, good_steps, last_good, protected, why_none
from quern.train.history.ledger import Ledger, reached
from support.train import run_case as case


@dataclass
class Saved:
    """A checkpoint that was begun: after ``step`` steps."""

    step: int
    published: bool = False
    good: bool = False


@dataclass
class World:
    """What is true of the branch a run is on, kept step by step; its ledger is written beside it and never read."""

    window: int
    health: list[bool] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)
    known: int = 0
    """Steps that a line proves."""

    def move(self, kind: str, step: int) -> None:
        del self.health[step:]
        self.saved = [saved for saved in self.saved if saved.step <= step and saved.published]
        self.note(kind, step, order="a")
        self.known = step

    def note(self, kind: str, step: int, **fields: Any) -> None:
        self.entries.append({"kind": kind, "step": step, "data_step": step, **fields})

    def name(self, step: int) -> str:
        return checkpoint_name(step)

    def whole(self, window: int, end: int) -> list[Saved]:
        """By the definition: published, and ``window`` healthy steps behind it, of those before ``end``."""
        found = []
        for saved in self.saved:
            after = [self.health[t] for t in range(saved.step, saved.step + window) if t < end]
            if saved.published and len(after) == window and all(after):
                found.append(saved)
        return found

    def new(self, *, noted: bool = True) -> list[Good]:
        """Those that have become good and have no line; ``noted``: they get one."""
        new = [saved for saved in self.whole(self.window, len(self.health)) if not saved.good]
        for saved in new if noted else []:
            saved.good = True
            self.note("good", saved.step, name=self.name(saved.step))
        return [Good(saved.step, self.name(saved.step)) for saved in new]

    def pending(self) -> dict[int, int]:
        found = {}
        for saved in self.saved:
            after = self.health[saved.step : saved.step + self.window]
            if saved.published and not saved.good and all(after) and len(after) < self.window:
                found[saved.step] = len(after)
        return found

    def standing(self) -> list[int]:
        return [saved.step for saved in self.saved if saved.published]


def ordered(found: list[Good]) -> list[Good]:
    return sorted(found, key=lambda good: good.step)


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[int, list[tuple[str, int]]]]:
    """For each attempt its window and what happens in it: steps read, checkpoints begun, published or failed.

    Saves are published in the order they were begun, at any later time.
    """
    event = st.sampled_from(["step"] * 8 + ["save"] * 3 + ["publish"] * 3 + ["fail", "sick", "sick"])
    events = st.lists(st.tuples(event, st.integers(0, 3)), min_size=6, max_size=24)
    return draw(st.lists(st.tuples(st.sampled_from([2, 1, 3, 4, 5]), events), min_size=2, max_size=5))


SICK = (("skipped",), ("spike",), ("skipped", "spike"), ("non_finite",))


class Attempt:
    """Plays one attempt's events into the world, and into a watch as the trainer does."""

    def __init__(self, world: World, watch: HealthTracker) -> None:
        self.world, self.watch = world, watch
        self.begun: list[Saved] = []

    def play(self, event: str, choice: int) -> None:
        world, step = self.world, len(self.world.health)
        if event in ("step", "sick"):
            world.health.append(event == "step")
            for kind in SICK[choice] if event == "sick" else ():
                world.note(kind, step)
                world.known = step + 1
            self.watch.observe(step, event == "step")
        elif event == "save" and step and all(saved.step != step for saved in world.saved):
            world.note("checkpoint", step, name=world.name(step))
            world.known = step
            self.begun.append(Saved(step))
            world.saved.append(self.begun[-1])
        elif event == "publish" and self.begun:
            saved = self.begun.pop(0)
            saved.published = True
            self.watch.published(saved.step, world.name(saved.step))
        elif event == "fail" and self.begun:
            saved = self.begun.pop(0)
            world.saved.remove(saved)
            world.note("checkpoint_failed", saved.step, why="disk full")
            self.watch.failed(saved.step)


def taken_up(world: World, step: int) -> tuple[World, HealthTracker]:
    """The world as it would be if the run were taken up at ``step`` now, and the watch that its ledger gives."""
    saved = [replace(saved) for saved in world.saved]
    other = replace(world, health=list(world.health), saved=saved, entries=list(world.entries))  # no line ever changes
    other.move("resume", step)
    return other, HealthTracker.from_ledger(other.entries, world.window)


SEEN: Counter[str] = Counter()


@settings(max_examples=320, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(life=lives(), data=st.data())
def check_lives(life: list[tuple[int, list[tuple[str, int]]]], data: st.DataObject) -> None:
    world = World(1)
    for number, (window, events) in enumerate(life):
        world.window = window
        choices = sorted({0, *world.standing()})
        step = data.draw(st.sampled_from([choices[-1], *choices]))
        world.move("start" if number == 0 else data.draw(st.sampled_from(["resume", "rollback"])), step)
        watch = HealthTracker.from_ledger(world.entries, window)
        overdue = world.new()
        assert watch.take() == ordered(overdue)
        SEEN["overdue"] += bool(overdue)
        SEEN["goes on with good ones"] += bool(number and good_steps(world.entries))
        attempt = Attempt(world, watch)
        for place, (event, choice) in enumerate(events):
            attempt.play(event, choice)
            killed = place == len(events) - 1 and number % 2 == 0  # before the line of what became good
            found = world.new(noted=not killed)
            assert ordered(watch.take()) == found
            SEEN[f"{event} makes good"] += bool(found)
            SEEN["killed before the line"] += bool(found and killed)
            SEEN["sick"] += event == "sick"
            assert good_steps(world.entries) == [saved.step for saved in world.saved if saved.good]
            if not killed:
                assert watch.pending == world.pending()
            for again in {0, *world.standing()}:
                if all(saved.published for saved in world.saved if saved.step < again):
                    other, rebuilt = taken_up(world, again)
                    assert rebuilt.take() == ordered(other.new())
                    assert rebuilt.pending == other.pending()
                    SEEN["rebuilt with some in question"] += bool(rebuilt.pending)
            steps = {step for step in world.standing() if (step + choice) % 3}  # some are pruned
            asked = data.draw(st.integers(1, 5))
            good = {saved.step for saved in world.saved if saved.good} | {
                saved.step for saved in world.whole(asked, world.known)
            }
            assert last_good(world.entries, steps, asked) == max(good & steps, default=None)
            SEEN["good by a shorter window"] += len(good & steps) > sum(s.good for s in world.saved if s.step in steps)
            if not killed:
                good = {saved.step for saved in world.saved if saved.good}
                kept = {*sorted(good & steps)[-1:], *sorted(world.pending().keys() & steps)[:1]}
                assert protected(world.entries, steps, window) == kept
                SEEN["two to keep"] += len(kept) == 2


@pytest.mark.slow
def test_every_life_gives_what_the_definition_says() -> None:
    SEEN.clear()
    check_lives()
    expected = (
        "overdue", "goes on with good ones", "step makes good", "publish makes good", "killed before the line",
        "rebuilt with some in question", "good by a shorter window", "two to keep", "sick",
    )  # fmt: skip
    assert all(SEEN[name] >= 5 for name in expected), SEEN


# ---- by hand


SICK_AT = [(1, True), (2, True), (3, False), (5, False), (6, False), (7, True)]


@pytest.mark.parametrize(("sick", "good"), SICK_AT)
@pytest.mark.parametrize("late", [False, True])
def test_the_window_is_the_steps_right_after_the_checkpoint(sick: int, good: bool, late: bool) -> None:
    """Checkpoint 3 and a window of 4: steps 3 to 6, also when it is published after them."""
    watch = HealthTracker(4)
    said = []
    for step in range(9):
        if step == 3 and not late:
            watch.published(3, "step_00000003")
        watch.observe(step, step != sick)
        said += [(step, found) for found in watch.take()]
    if late:
        watch.published(3, "step_00000003")
        said += [(6, found) for found in watch.take()]
    assert said == ([(6, Good(3, "step_00000003"))] if good else [])
    assert watch.pending == {}


def test_a_failed_save_is_never_good() -> None:
    watch = HealthTracker(2)
    for step in range(2):
        watch.observe(step, True)
    watch.published(1, "a")
    watch.published(2, "b")
    assert watch.pending == {1: 1, 2: 0}
    watch.failed(1)
    watch.failed(7)  # nothing is known of it
    watch.observe(2, True)
    watch.observe(3, True)
    assert watch.take() == [Good(2, "b")]
    watch.failed(2)
    assert watch.take() == []


@pytest.mark.parametrize("step", [4, 6])
def test_a_step_that_is_left_out_or_told_twice(step: int) -> None:
    watch = HealthTracker(3, reached=5)
    with pytest.raises(ValueError, match=f"step: expected 5, the next one, got {step}"):
        watch.observe(step, True)
    with pytest.raises(ValueError, match="window: expected at least 1, got 0"):
        HealthTracker(0)


def line(kind: str, step: int) -> dict[str, Any]:
    return {"kind": kind, "step": step, "data_step": step, "order": "a", "name": checkpoint_name(step)}


def lines(text: str) -> list[dict[str, Any]]:
    """``"start 0, checkpoint 2"``: a line each."""
    return [line(kind, int(step)) for kind, step in (item.split() for item in text.split(", "))]


TOLD = {
    "none saved": ("start 0, skipped 3", [], "the run has no checkpoint"),
    "nothing proved": (
        "start 0, checkpoint 4", [4],
        "the newest, step_00000004, has 0 of the 5 healthy steps it needs after it",
    ),
    "some": (
        "start 0, checkpoint 4, checkpoint 7", [4],
        "the newest, step_00000004, has 3 of the 5 healthy steps it needs after it",
    ),
    "a sick one": (
        "start 0, checkpoint 4, spike 6, skipped 7, end 9", [4],
        "the newest, step_00000004, has 2 of the 5 healthy steps it needs after it: step 6 was none",
    ),
    "of a left branch": (
        "start 0, checkpoint 2, checkpoint 4, non_finite 2, rollback 2, end 3", [2, 4],
        "the newest, step_00000002, has 1 of the 5 healthy steps it needs after it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_what_is_lacking_is_told(name: str) -> None:
    text, steps, expected = TOLD[name]
    assert last_good(lines(text), steps, 5) is None
    assert why_none(lines(text), steps, 5) == expected


def test_only_what_stands_is_gone_back_to_and_two_are_kept() -> None:
    text = "start 0, checkpoint 2, checkpoint 4, checkpoint 6, checkpoint 8, good 2, good 4, checkpoint 9"
    entries = lines(text)
    assert good_steps(entries) == [2, 4]
    assert last_good(entries, {2, 4, 6}, 5) == 4
    assert last_good(entries, {2, 6}, 5) == 2
    assert last_good(entries, {6, 8}, 5) is None
    assert last_good(entries, {6, 8}, 3) == 6  # by a shorter window: steps 6, 7 and 8 are proved
    assert protected(entries, {2, 4, 6, 8, 9}, 5) == {4, 6}
    assert protected(entries, {2, 8, 9}, 5) == {2, 8}
    assert protected(entries + lines("spike 9"), {2, 4, 6, 8, 9}, 5) == {4}
    assert protected(entries + lines("rollback 3"), {2, 4, 6}, 5) == {2}
    assert protected(entries[:1], set(), 5) == set()


def test_lines_of_health_are_checked_and_prove_progress(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        for kind, fields in (
            ("good", {"step": 3}), ("good", {"step": -1, "name": "x"}), ("checkpoint", {"step": 3, "data_step": 3}),
            ("checkpoint_failed", {"why": "full"}), ("non_finite", {"step": 3}), ("non_finite", {"data_step": 3}),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=rf"^{kind}\.\w+: expected "):
                ledger.append(kind, **fields)
        assert ledger.entries == []
    assert [reached(lines(f"start 2, {kind} 5")) for kind in ("skipped", "spike", "non_finite", "checkpoint")] == [
        6, 6, 6, 5
    ]  # fmt: skip
    assert reached(lines("start 2, good 5")) == 2  # the checkpoint's own line has said so


# ---- with the trainer


def told(run: Path) -> list[tuple[str, int]]:
    """Lines of the ledger that are about health and checkpoints."""
    kinds = ("start", "resume", "rollback", "checkpoint", "skipped", "spike", "non_finite", "good", "end")
    return [(entry["kind"], entry["step"]) for entry in case.ledger(run) if entry["kind"] in kinds]


def told_as(text: str) -> list[tuple[str, int]]:
    return [(kind, int(step)) for kind, step in (item.split() for item in text.split(", "))]


def settings_of(run: Path, paths: list[str], window: int, **changes: Any) -> Any:
    """Saves end where they begin, so that every line has one place."""
    guard = {"health_window": window, **changes.pop("guard", {})}
    checkpoint = {"interval": 2, "keep_last": 20, "mode": "sync", **changes.pop("checkpoint", {})}
    return case.settings(run, paths, guard=guard, checkpoint=checkpoint, **changes)


CALM = {"loss_z": 1e9, "grad_norm_z": 1e9}


def at(step: int, factor: float) -> Any:
    return lambda data_step: factor if data_step == step else 1.0


# By the definition, window 2, checkpoints 2, 4, 6, 8 and 9, the last of nine steps being 8.
RUNS = {
    "skipped": (
        CALM, at(4, float("nan")),
        "start 0, checkpoint 2, good 2, checkpoint 4, skipped 4, checkpoint 6, good 6, checkpoint 8, checkpoint 9, "
        "end 9",
    ),
    "not skipped": (
        {"non_finite": "continue"}, at(5, float("nan")),
        "start 0, checkpoint 2, good 2, checkpoint 4, non_finite 5, checkpoint 6, non_finite 6, non_finite 7, "
        "checkpoint 8, non_finite 8, checkpoint 9, end 9",
    ),
    "spike": (
        {"spike": "continue"}, at(6, 1e4),
        "start 0, checkpoint 2, good 2, checkpoint 4, good 4, checkpoint 6, spike 6, checkpoint 8, checkpoint 9, end 9",
    ),
    "spike, skipped": (
        {"spike": "skip"}, at(6, 1e4),
        "start 0, checkpoint 2, good 2, checkpoint 4, good 4, checkpoint 6, skipped 6, spike 6, checkpoint 8, "
        "checkpoint 9, end 9",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_says_which_of_its_checkpoints_are_good(tmp_path: Path, paths: list[str], name: str) -> None:
    guard, factor, expected = RUNS[name]
    case.live(settings_of(tmp_path / "run", paths, 2, guard=guard), factor=factor)
    assert told(tmp_path / "run") == told_as(expected)
    for entry in case.ledger(tmp_path / "run"):
        if entry["kind"] == "good":
            assert entry["name"] == f"step_{entry['step']:08d}"
            assert entry.keys() == {"time", "kind", "step", "name"}
        if entry["kind"] == "non_finite":
            assert (entry["data_step"], entry["grad_norm"]) == (entry["step"], None)


@pytest.mark.slow
def test_a_run_that_is_taken_up_goes_on_counting(tmp_path: Path, paths: list[str]) -> None:
    """Window 4. The first life reads steps up to 4, the second goes on from 4: checkpoint 2 needs both."""
    config = settings_of(tmp_path / "run", paths, 4, guard=CALM)
    case.live(config, kill_at=5)
    case.live(config, factor=at(7, float("nan")))
    assert told(tmp_path / "run") == told_as(
        "start 0, checkpoint 2, checkpoint 4, resume 4, good 2, checkpoint 6, skipped 7, checkpoint 8, checkpoint 9, "
        "end 9"
    )
    longer = config.model_copy(update={"steps": 13})
    case.live(longer)  # the last one, 9, and 8 have the steps they lacked
    assert told(tmp_path / "run")[10:] == told_as(
        "resume 9, checkpoint 10, good 8, checkpoint 12, good 9, checkpoint 13, end 13"
    )


@pytest.mark.slow
def test_a_checkpoint_that_is_published_late_is_good_all_the_same(tmp_path: Path, paths: list[str]) -> None:
    """Saves in the background: the same ones become good, none before it stands."""
    config = settings_of(tmp_path / "run", paths, 1, guard=CALM, steps=30, checkpoint={"interval": 6, "mode": "thread"})
    case.live(config, factor=at(18, float("nan")))
    said = [step for kind, step in told(tmp_path / "run") if kind == "good"]
    assert said == [6, 12, 24]
    manifests = {c.step: Path(c.path, "manifest.json") for c in list_checkpoints(str(tmp_path / "run"))}
    for entry in case.ledger(tmp_path / "run"):
        if entry["kind"] == "good":
            written = manifests[entry["step"]].stat().st_mtime
            assert datetime.fromisoformat(entry["time"]).timestamp() >= written - 0.05  # clocks of files are coarser


@pytest.mark.slow
def test_more_checkpoints_than_are_kept_within_a_window(tmp_path: Path, paths: list[str]) -> None:
    """One a step and two to keep: the first waits until its window of five is whole, then one behind it."""
    config = settings_of(tmp_path / "run", paths, 5, guard=CALM, checkpoint={"interval": 1, "keep_last": 2})
    case.live(config, kill_at=5)
    assert {found.step for found in list_checkpoints(config.run_dir)} == {1, 4, 5}
    case.live(config, kill_at=8)
    assert good_steps(case.ledger(tmp_path / "run")) == [1, 2, 3]
    assert {found.step for found in list_checkpoints(config.run_dir)} == {1, 4, 7, 8}
