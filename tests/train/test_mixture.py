"""Recipes, batch sizes and corpus versions that change on the way: only ahead, and only when said."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from quern.errors import InputError
from quern.train.batches.corpus import Corpus
from quern.train.batches.mixture import plan_mixture, source_names
from quern.train.config import TrainConfig
from support.train import run_case as case

pytestmark = pytest.mark.slow

PHASES = [{"first_step": 5, "weights": [1, 3]}, {"first_step": 7, "global_batch": 16}]


@pytest.fixture
def paths(tmp_path):
    return case.write_corpus(tmp_path / "data")


def counts(left: case.Left) -> dict[int, Counter]:
    """By data step, how many samples of each source."""
    return {step: Counter(source for _, source, _, _ in found) for step, found in left.samples.items()}


def test_phases_given_from_the_beginning_or_later_are_one_order(tmp_path, paths):
    straight = case.live(case.settings(tmp_path / "whole", paths, phases=PHASES))
    assert [len(straight.samples[step]) for step in range(case.STEPS)] == [8] * 7 + [16] * 2
    shares = {step: found[1] / sum(found.values()) for step, found in counts(straight).items()}
    assert [round(shares[step], 2) for step in range(case.STEPS)] == [0.25] * 5 + [0.75] * 4

    lives = [case.live(case.settings(tmp_path / "later", paths, checkpoint={"interval": 2}), kill_at=5)]  # stands at 4
    first = case.settings(tmp_path / "later", paths, checkpoint={"interval": 2}, phases=PHASES[:1])
    lives.append(case.live(first, kill_at=7))  # stands at 6
    both = case.settings(tmp_path / "later", paths, checkpoint={"interval": 2}, phases=PHASES)
    lives.append(case.live(both, kill_at=8))  # stands at 8, between
    lives.append(case.live(both))
    assert [life.start.step for life in lives] == [0, 4, 6, 8]
    assert case.taken_by(lives) == straight.samples
    assert case.rows(tmp_path / "later") == case.rows(tmp_path / "whole")
    assert case.differences(lives[-1].state, straight.state) == []
    assert straight.start.mixture.order.hash == lives[-1].start.mixture.order.hash


def test_a_phase_that_changes_nothing_has_its_blocks_all_the_same(tmp_path, paths):
    """Also for a run that is taken up right at it."""
    phases = [{"first_step": 4}, {"first_step": 6, "weights": [3, 1]}]
    config = case.settings(tmp_path / "whole", paths, phases=phases, steps=8)
    straight = case.live(config)
    config = case.settings(tmp_path / "broken", paths, phases=phases, steps=8, checkpoint={"interval": 1})
    lives = [case.live(config, kill_at=4), case.live(config, kill_at=6)]
    lives.append(second := case.live(config))
    assert [life.start.step for life in lives] == [0, 4, 6]
    assert case.taken_by(lives) == straight.samples
    without = case.settings(tmp_path / "without", paths, steps=8)
    order = plan_mixture(without, Corpus(paths, 32)).order
    assert [tuple(map(list, order.batch(5)))] != [tuple(map(list, second.start.mixture.order.batch(5)))]


PAST = [
        ({"phases": [{"first_step": 3, "weights": [1, 3]}]},
         r"weights from data step 3 were 0\.75, 0\.25, the config says 0\.25, 0\.75; .* first_step 4 or later"),
        ({"phases": [{"first_step": 3, "global_batch": 16}]},
         r"global_batch: the run read 8 sequences a step from data step 3, the config says 16; .* first_step 4 or"),
        ({"phases": [{"first_step": 1, "weights": [1, 3]}, {"first_step": 2, "weights": [3, 1]}]}, "from data step 1"),
        ({"global_batch": 16}, r"global_batch: the run read 8 sequences a step from data step 0, the config says 16"),
        ({"data": "weights"}, r"weights from data step 0 were 0\.75, 0\.25, the config says 0\.5, 0\.5"),
        ({"seed": 6}, r"seed: the run in .*run began with 5, got 6; give another run_dir"),
        ({"seq_len": 16}, r"seq_len: the run in .*run began with 32, got 16; give another run_dir"),
        ({"data": "one"}, r"source r1/code/1, which is not given any more; keep its entry"),
]  # fmt: skip


def test_the_past_cannot_be_told_otherwise(tmp_path, paths):
    run = tmp_path / "run"
    case.live(case.settings(run, paths, checkpoint={"interval": 2}), kill_at=5)
    before = (run / "ledger.jsonl").read_bytes()
    data = {
        "weights": [{"path": path, "max_epochs": 100} for path in paths],
        "one": [{"path": paths[0], "max_epochs": 100}],
    }
    for changes, message in PAST:
        if "data" in changes:
            changes = {"data": data[changes["data"]]}
        with pytest.raises(InputError, match=message):
            case.live(case.settings(run, paths, **changes))
        assert (run / "ledger.jsonl").read_bytes() == before
    assert case.live(case.settings(run, paths, checkpoint={"interval": 2})).start.step == 4


def test_a_recipe_in_other_numbers_is_the_same_recipe(tmp_path, paths):
    run = tmp_path / "run"
    case.live(case.settings(run, paths, checkpoint={"interval": 2}), kill_at=5)
    data = [
        {"path": path, "weight": weight, "max_epochs": 100} for path, weight in zip(paths, (0.75, 0.25), strict=True)
    ]
    assert case.live(case.settings(run, paths, data=data)).complete


def data_of(paths: list[str], weights: list[float], **extra) -> list[dict]:
    return [{"path": p, "weight": w, "max_epochs": 100, **extra} for p, w in zip(paths, weights, strict=True)]


def test_a_source_is_added_and_switched_on(tmp_path, paths):
    """With weight 0 until its phase; at the front of the list, where it shifts the others."""
    (news,) = case.write_corpus(tmp_path / "more", {"news": 40}, seed=9, run_id="r2")
    run = tmp_path / "run"
    first = case.live(case.settings(run, paths, checkpoint={"interval": 2}), kill_at=5)
    phases = [{"first_step": 6, "weights": [2, 1, 1]}]
    grown = data_of([news, *paths], [0, 3, 1])
    second = case.live(case.settings(run, paths, data=grown, phases=phases, checkpoint={"interval": 2}), kill_at=7)
    third = case.live(case.settings(run, paths, data=grown, phases=phases))
    assert (second.start.step, third.start.step) == (4, 6)
    taken = first.samples | second.samples | third.samples
    found = {step: Counter(source for _, source, _, _ in samples) for step, samples in taken.items()}
    assert all(found[step] == {0: 6, 1: 2} for step in range(6))
    assert all(found[step] == {2: 4, 0: 2, 1: 2} for step in range(6, case.STEPS))
    assert third.start.mixture.order.ids == ("r1/web/1", "r1/code/1", "r2/news/1")
    triples = Counter(tuple(sample[1:]) for samples in taken.values() for sample in samples)
    assert set(triples.values()) == {1}

    with pytest.raises(
        InputError, match=r"weights from data step 0 were 0, 0\.75, 0\.25, the config says 0\.25, 0\.5, 0\.25"
    ):
        case.live(case.settings(run, paths, data=data_of([news, *paths], [1, 2, 1])))


# ---- corpus versions


def new_version(folder: Path, change, **options) -> dict[str, list]:
    """Publish version 2 of both sources at the same paths; ``change`` maps (source, shards) to new shards."""
    rng = random.Random(1)
    made = {
        name: case.CORPORA.make_shards(rng, [[rng.randint(2, 60) for _ in range(size)] for _ in range(2)], purged=0.05)
        for name, size in {"web": 60, "code": 25}.items()
    }  # as case.write_corpus makes them
    changed = {name: change(name, shards) for name, shards in made.items()}
    fresh = folder.with_name("fresh")
    case.CORPORA.write_run(fresh, changed, version=2, **options)
    shutil.rmtree(folder)
    fresh.rename(folder)
    return changed


def other_web(name: str, shards: list) -> list:
    if name != "web":
        return shards
    rng = random.Random(77)
    return case.CORPORA.make_shards(rng, [[rng.randint(2, 60) for _ in range(45)] for _ in range(2)])


def test_other_tokens_are_read_from_a_new_phase_once_accepted(tmp_path, paths):
    run = tmp_path / "run"
    first = case.live(case.settings(run, paths, checkpoint={"interval": 2}), kill_at=5)
    changed = new_version(tmp_path / "data", other_web, since={"web": 2})
    before = (run / "ledger.jsonl").read_bytes()
    with pytest.raises(
        InputError, match=r"tokens/web: the corpus is at version 2 now, .* \(r1/web/1\); give accept_version=2"
    ):
        case.live(case.settings(run, paths))
    with pytest.raises(InputError, match="accept_version=2"):
        case.live(case.settings(run, paths, data=data_of(paths, [3, 1], accept_version=3)))
    assert (run / "ledger.jsonl").read_bytes() == before

    accepted = data_of(paths, [3, 1])
    accepted[0]["accept_version"] = 2
    second = case.live(case.settings(run, paths, data=accepted, checkpoint={"interval": 2}), kill_at=7)
    third = case.live(case.settings(run, paths))  # said once is said
    assert (second.start.step, third.start.step) == (4, 6)
    taken = first.samples | second.samples | third.samples
    tokens = first.tokens | second.tokens | third.tokens
    assert third.start.mixture.order.ids == ("r1/web/1", "r1/code/1", "r1/web/2")
    assert [phase.first_step for phase in third.start.mixture.order.phases] == [0, 4]
    streams = {2: case.CORPORA.Stream(changed["web"]).tokens, 1: case.CORPORA.Stream(changed["code"]).tokens}
    for step in range(4, case.STEPS):
        assert Counter(sample[1] for sample in taken[step]) == {2: 6, 1: 2}
        for place, source, _, window in taken[step]:
            assert tokens[step][place] == streams[source][window * 32 : window * 32 + 32]
    own = Counter(tuple(sample[1:]) for samples in taken.values() for sample in samples if sample[1] == 1)
    assert set(own.values()) == {1}  # the other source goes on where it was
    assert [entry["versions"] for entry in case.ledger(run) if entry["kind"] == "resume"] == [
        {"r1/web/2": 2, "r1/code/1": 2}
    ] * 2


def test_a_run_that_has_kept_nothing_may_change_its_sources(tmp_path, paths):
    """Killed before its first checkpoint: no step of it is in any weights."""
    run = tmp_path / "run"
    case.live(case.settings(run, paths), kill_at=3)
    one = data_of(paths[1:], [1])
    left = case.live(case.settings(run, paths, data=one))
    straight = case.live(case.settings(tmp_path / "whole", paths, data=one))
    assert left.start.mixture.order.ids == ("r1/code/1",)
    assert left.samples == straight.samples
    assert case.differences(left.state, straight.state) == []


def test_a_masked_version_goes_on_in_silence(tmp_path, paths):
    """Purged documents keep their place: the same windows, the same order, other tokens."""
    straight = case.live(case.settings(tmp_path / "whole", paths))
    run = tmp_path / "run"
    first = case.live(case.settings(run, paths, checkpoint={"interval": 2}), kill_at=5)

    def purge(name: str, shards: list) -> list:
        eot = case.CORPORA.EOT
        return [
            [replace(doc, tokens=(eot,) * len(doc.tokens), purged=True) if number % 3 == 0 else doc
             for number, doc in enumerate(shard)]
            for shard in shards
        ]  # fmt: skip

    changed = new_version(tmp_path / "data", purge)
    second = case.live(case.settings(run, paths))
    assert second.start.step == 4
    assert {step: first.samples[step] for step in range(4)} | second.samples == straight.samples
    assert second.start.mixture.order.hash == straight.start.mixture.order.hash
    assert [entry["kind"] for entry in case.ledger(run)].count("order") == 1
    names = ("web", "code")
    streams = [case.CORPORA.Stream(changed[name]).tokens for name in names]
    for step in range(4, case.STEPS):
        for place, source, _, window in straight.samples[step]:
            assert second.tokens[step][place] == streams[source][window * 32 : window * 32 + 32]
    assert second.tokens[4] != straight.tokens[4]
    valid = {step: row["valid_tokens"] for step, row in case.rows(run).items()}
    assert all(valid[step] < row["valid_tokens"] for step, row in case.rows(tmp_path / "whole").items() if step >= 4)


def test_a_plan_beyond_max_epochs_is_refused_on_a_resume_too(tmp_path, paths):
    run = tmp_path / "run"
    case.live(case.settings(run, paths, checkpoint={"interval": 2}), kill_at=3)
    with pytest.raises(InputError, match="max_epochs 100"):
        case.live(case.settings(run, paths, steps=100_000))
    assert json.loads((run / "ledger.jsonl").read_text().splitlines()[-1])["kind"] == "checkpoint"


@pytest.mark.parametrize("seed", range(20))
def test_a_phase_by_tokens_begins_at_the_first_step_before_which_so_many_are_read(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    length, batch = draw.randint(1, 9), draw.randint(1, 6)
    given, wanted, step, tokens, own = [], [], 0, 0, batch
    for _ in range(draw.randint(1, 4)):
        goal = tokens + draw.randint(own * length + 1, 200)
        while tokens < goal:  # a step at a time
            tokens, step = tokens + own * length, step + 1
        own = draw.choice([own, draw.randint(1, 9)])
        given.append({"first_tokens": float(goal), "global_batch": own})
        wanted.append(step)
    plain = {"run_dir": str(tmp_path), "data": [{"path": "a"}], "model": {"preset": "debug"}, "seq_len": length,
             "global_batch": batch, "steps": 500, "phases": given}  # fmt: skip
    config = TrainConfig.model_validate(plain)
    assert [phase.start for phase in config.phases] == wanted
    assert TrainConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_config_with_a_phase_by_tokens_can_be_given_another_batch(tmp_path: Path) -> None:
    plain = {"run_dir": str(tmp_path), "data": [{"path": "a"}], "model": {"preset": "debug"}, "seq_len": 10,
             "global_batch": 4, "steps": 500, "phases": [{"first_tokens": 200}, {"first_step": 9}]}  # fmt: skip
    dumped = TrainConfig.model_validate(plain).model_dump(mode="json")
    assert [sorted(own) for own in dumped["phases"]] == [
        ["first_tokens", "global_batch", "weights"], ["first_step", "global_batch", "weights"],
    ]  # fmt: skip
    config = TrainConfig.model_validate(dumped | {"global_batch": 5})
    assert [phase.start for phase in config.phases] == [4, 9]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ([("r/a", None), ("r/b", "x")], ["a", "b"]),
        ([("r/a", None), ("s/a", None)], ["r/a", "s/a"]),
        ([("r/a", "x"), ("r/a/", "y"), ("r/b", None)], ["a where x", "a where y", "b"]),
        ([("r/a", "x"), ("r/a", "y"), ("s/a", "x"), ("s/a", "y")],
         ["r/a where x", "r/a where y", "s/a where x", "s/a where y"]),
    ],
)  # fmt: skip
def test_every_entry_has_a_name_of_its_own(
    given: list[tuple[str, str | None]], names: list[str], tmp_path: Path
) -> None:
    plain = {"run_dir": str(tmp_path), "data": [{"path": path, "where": where} for path, where in given],
             "model": {"preset": "debug"}, "steps": 5}  # fmt: skip
    assert source_names(TrainConfig.model_validate(plain)) == names


def test_a_phase_is_given_by_steps_or_by_tokens(tmp_path: Path) -> None:
    plain = {"run_dir": str(tmp_path), "data": [{"path": "a"}], "model": {"preset": "debug"}, "seq_len": 10,
             "global_batch": 4, "steps": 500}  # fmt: skip
    for phase, told in (
        ({"global_batch": 8}, "phases.0: expected first_step or first_tokens, got neither"),
        ({"first_step": 4, "first_tokens": 200}, "phases.0: first_tokens 200 is data step 5, and first_step 4"),
    ):
        with pytest.raises(ValueError, match=told):
            TrainConfig.model_validate(plain | {"phases": [phase]})
    later = TrainConfig.model_validate(plain | {"phases": [{"first_step": 5}]})
    assert "first_tokens" not in later.model_dump(mode="json")["phases"][0]
