"""The mean time between failures, against ledgers counted by hand and other estimates."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from quern.errors import InputError
from quern.train.checkpoint.retention.save_interval import Mtbf, estimate_mtbf, observed_failures
from support.train import run_case as case


def lines(text: str) -> list[dict[str, Any]]:
    """A ledger: words ``kind@minutes`` after midnight."""
    found = []
    for word in text.split():
        kind, minute = word.split("@")
        stamp = (
            f"2026-01-{1 + int(minute) // 1440:02d}T{int(minute) // 60 % 24:02d}:{int(minute) % 60:02d}:00.500+00:00"
        )
        found.append({"time": stamp, "kind": kind, "step": 0, "data_step": 0, "order": "a"})
    return found


@pytest.mark.parametrize(
    ("text", "failures", "minutes"),
    [
        ("", 0, 0),
        ("order@0", 0, 0),
        ("order@0 start@1", 0, 0),
        ("order@0 start@1 checkpoint@31", 0, 30),
        ("start@0 checkpoint@10 end@20", 0, 20),
        ("start@0 checkpoint@10 stopped@20 resume@500 end@510", 0, 30),
        ("start@0 end@20 resume@500 end@510", 0, 30),
        # broken off after the checkpoint at 10; the outage until 60 is no running time
        ("start@0 checkpoint@10 resume@60 checkpoint@75", 1, 25),
        ("start@0 resume@1 resume@2 resume@3", 3, 0),
        ("start@0 checkpoint@10 skipped@12 spike@13 resume@60 skipped@61 resume@2000 checkpoint@2100 end@2101", 2, 115),
        # a person rolled back, once after a break; then it broke off and was resumed
        ("start@0 checkpoint@10 rollback@60 checkpoint@70 stopped@71 rollback@80 checkpoint@85 resume@90", 1, 26),
        # the new order of a resume is written before it, after the outage
        ("start@0 checkpoint@10 order@300 resume@301 checkpoint@311", 1, 20),
        # unknown lines prove nothing
        ("start@0 checkpoint@10 note@200 resume@301 checkpoint@311", 1, 20),
        # another machine's clock is behind
        ("start@100 checkpoint@40 resume@30 checkpoint@50", 1, 20),
    ],
)
def test_failures_of_ledgers_counted_by_hand(text, failures, minutes):
    assert observed_failures(lines(text)) == (failures, 60.0 * minutes)


def test_times_of_other_zones():
    entries = [
        {"kind": "start", "time": "2026-01-01T10:00:00+02:00"},
        {"kind": "checkpoint", "time": "2026-01-01T08:00:30"},
        {"kind": "end", "time": "2026-01-01T08:01:00Z"},
    ]
    assert observed_failures(entries) == (0, 60.0)
    assert observed_failures(entries[:2]) == (0, 30.0)


@pytest.mark.parametrize("value", ["yesterday", None, 5, ...])
def test_a_line_without_a_time_is_named(value):
    entries = lines("start@0 checkpoint@10")
    if value is ...:
        del entries[1]["time"]
    else:
        entries[1]["time"] = value
    with pytest.raises(InputError, match=r"^ledger: line 2: time: expected an ISO 8601 time, got "):
        observed_failures(entries)


@pytest.mark.slow
def test_failures_of_a_trainer(tmp_path):
    """Lines as the trainer writes them: a fresh run killed; rolled back; killed; resumed and stopped; resumed."""
    run = tmp_path / "run"
    paths = case.write_corpus(tmp_path / "data")

    def config(**changes):
        return case.settings(run, paths, checkpoint={"interval": 2}, **changes)

    back = config(resume={"step": 2})
    kinds = [
        case.live(config(), kill_at=5).start.kind, case.live(back, kill_at=5).start.kind,
        case.live(back, stop_at=5).start.kind, case.live(back).start.kind,
    ]  # fmt: skip
    assert kinds == ["start", "rollback", "resume", "resume"]
    entries = case.ledger(run)
    failures, running = observed_failures(entries)
    assert failures == 1
    assert 0 < running < 600
    found = estimate_mtbf(entries, 1, prior_s=1000.0)
    assert found == Mtbf((1000.0 + running) / 2, "observed", 1, running)


def test_the_mtbf_before_any_failure_is_that_of_llama_3():
    """419 interruptions in 54 days on 16,384 GPUs: every 3.09 h, and every 50,700 h a GPU."""
    at_scale = estimate_mtbf([], 16_384)
    assert at_scale.source == "assumed"
    assert at_scale.seconds == pytest.approx(54 * 24 * 3600 / 419)
    assert estimate_mtbf([], 1).seconds / 3600 == pytest.approx(50_700, rel=1e-3)


def test_what_is_configured_holds():
    entries = lines("start@0 resume@10 resume@20")
    assert estimate_mtbf(entries, 8, configured_s=500.0) == Mtbf(500.0, "configured")
    assert estimate_mtbf([], 8, configured_s=math.inf).seconds == math.inf
    for value in (0.0, -1.0, math.nan):
        with pytest.raises(InputError, match=r"^mtbf_s: "):
            estimate_mtbf([], 8, configured_s=value)
        with pytest.raises(InputError, match=r"^prior_s: "):
            estimate_mtbf([], 8, prior_s=value)
    for ranks in (0, -1, 1.5, True, None):
        with pytest.raises(InputError, match=r"^ranks: expected an integer ≥ 1"):
            estimate_mtbf([], ranks)


def test_failures_outweigh_the_prior_as_they_come():
    """Posterior of a rate with an exponential prior, integrated numerically; the MTBF is one over its mean."""
    prior, entries = 7200.0, lines("start@0 checkpoint@90 resume@100 checkpoint@110 resume@200 checkpoint@230")
    failures, running = 2, 60.0 * (90 + 10 + 30)
    rates = np.linspace(0, 60 / prior, 400_001)
    density = np.exp(-rates * prior) * rates**failures * np.exp(-rates * running)
    mean = (rates * density).sum() / density.sum()
    found = estimate_mtbf(entries, 8, prior_s=prior)
    assert found.seconds == pytest.approx(1 / mean, rel=1e-6)
    assert (found.source, found.failures, found.running_s) == ("observed", failures, running)


def test_one_failure_is_an_observation():
    found = estimate_mtbf(lines("start@0 resume@1"), 8, prior_s=7200.0)
    assert (found.seconds, found.source) == (3600.0, "observed")
    assert str(found) == "60 min (observed; 1 failure in 0 s)"


@pytest.mark.parametrize(("minutes", "source"), [(119, "assumed"), (120, "observed")])
def test_a_long_time_without_failure_is_an_observation(minutes, source):
    found = estimate_mtbf(lines(f"start@0 checkpoint@{minutes}"), 8, prior_s=7200.0)
    assert (found.seconds, found.source) == (7200.0 + 60 * minutes, source)


def test_the_estimate_finds_the_rate_of_a_poisson_process():
    """A ledger of 400 simulated failures with a save a minute: within 4 standard errors, and the share not seen."""
    rng, mtbf = np.random.Generator(np.random.PCG64(3)), 3600.0
    clock, entries = 0.0, []

    def note(kind: str, at: float) -> None:
        stamp = np.datetime64("2026-01-01T00:00:00.000") + np.timedelta64(round(at * 1000), "ms")
        entries.append({"kind": kind, "time": f"{stamp}+00:00"})

    for attempt in range(401):
        note("resume" if attempt else "start", clock)
        life = rng.exponential(mtbf)
        for minute in range(1, 1 + int(life // 60)):
            note("checkpoint", clock + 60 * minute)
        clock += life + rng.uniform(60, 6000)
    found = estimate_mtbf(entries, 16_384)
    assert found.failures == 400
    assert found.seconds == pytest.approx(mtbf, rel=4 / math.sqrt(400) + 60 / mtbf)
