"""A swarm's runs: which mixtures, one process each, the same table after any interruption, and no failure unheard."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from quern.config import load_config
from quern.errors import InputError, QuernError
from quern.mixtures.weighting import draw
from quern.train.config import TrainConfig
from quern.train.swarm import run
from quern.train.swarm.config import SwarmConfig
from quern.train.swarm.plan import plan_swarm, write_configs
from support.programs import python
from support.train import corpora
from support.train import swarm_case as case


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the place of quern.train, a program that takes no time."""
    path = tmp_path / "trainer.py"
    path.write_text(case.TRAINER)
    monkeypatch.setattr(run, "module", lambda name, *arguments: [sys.executable, str(path), *arguments])
    return path


def planned(spec: Path, *overrides: str) -> Any:
    return plan_swarm(load_config(spec, SwarmConfig, overrides))


def said(spec: Path, *overrides: str) -> list[str]:
    lines: list[str] = []
    run.run_swarm(planned(spec, *overrides), lines.append)
    return lines


def rows(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "swarm" / "runs.csv").open()))


def test_mixtures_are_whole_samples_within_caps_and_of_their_own_numbers() -> None:
    sizes, limits = [1000, 500, 300, 200], [40, 300, 300, 300]
    drawn = [draw(sizes, limits, 100, number, 3, (1.0, 20.0), 0.1) for number in range(200)]
    assert drawn[0] == [40, 30, 18, 12]  # token shares, of which the first is capped
    for own in drawn[1:]:
        assert sum(own) == 100
        assert all(samples <= limit for samples, limit in zip(own, limits, strict=True))
    assert draw(sizes, limits, 100, 150, 3, (1.0, 20.0), 0.1) == drawn[150]
    assert len({tuple(own) for own in drawn}) > 100
    zero = np.mean([samples == 0 for own in drawn[1:] for samples in own])
    assert 0.1 < zero < 0.9
    assert all(samples == 0 or samples >= 10 for own in drawn[1:] for samples in own)
    with pytest.raises(InputError, match="draw: 1000 mixtures were drawn whose sources do not give 100 samples"):
        draw([1, 1], [40, 40], 100, 1, 0, (1.0, 1.0), 0.0)


@pytest.mark.slow
def test_strength_is_how_close_mixtures_are_to_token_shares() -> None:
    """Of Dirichlet (s · q) the variance of a share is q (1 - q) / (s + 1), and of strengths drawn, its mean."""
    sizes, total, shares = [600, 300, 100], 100_000, np.array([0.6, 0.3, 0.1])
    between = np.mean(1 / (1 + np.exp(np.linspace(np.log(2.0), np.log(50.0), 10_000))))
    for strength, expected in (((2.0, 2.0), 1 / 3), ((50.0, 50.0), 1 / 51), ((2.0, 50.0), between)):
        drawn = np.array([draw(sizes, [total] * 3, total, n, 1, strength, 0.0) for n in range(1, 1500)]) / total
        np.testing.assert_allclose(drawn.mean(axis=0), shares, atol=4 * np.sqrt(0.25 * expected / 1500))
        np.testing.assert_allclose(drawn.var(axis=0), shares * (1 - shares) * expected, rtol=0.15)


def test_a_run_is_the_base_with_its_mixture_and_what_makes_it_small(tmp_path: Path) -> None:
    swarm = planned(case.write(tmp_path, seed=4, max_epochs=2))
    assert [member.name for member in swarm.members] == [f"{number:04}" for number in range(8)]
    for member in swarm.members:
        assert (member.config.steps, member.config.seed, member.config.metrics.live) == (6, 4, False)
        assert member.config.run_dir == str(tmp_path / "swarm" / "runs" / member.name)
        weights = [own.weight for own in member.config.data]
        assert sum(weights) == 24
        assert member.shares == tuple(weight / 24 for weight in weights)
    more = planned(tmp_path / "spec.yaml", "runs=9")
    assert [member.config for member in more.members[:8]] == [member.config for member in swarm.members]
    (samples,) = {own.windows for own in swarm.sources}
    assert (2 * samples - 2) / 240 < 1
    np.testing.assert_allclose(swarm.caps, (2 * samples - 2) / 240)


@pytest.mark.slow
def test_a_table_of_all_runs_and_none_trained_twice(tmp_path: Path, trainer: Path) -> None:
    spec = case.write(tmp_path, gpus=["3", "5"], at_once=2)
    lines = said(spec)
    assert sorted(line.split(":")[0] for line in lines) == [f"run {number:04}" for number in range(8)]
    for row in rows(tmp_path):
        web = float(row["share:web"])
        assert float(row["loss:web"]) == pytest.approx(2 + np.exp(0.5 - 1.5 * web))  # of the last step
        assert float(row["loss:books"]) == pytest.approx(1.5 + np.exp(0.8 - 2.0 * (1 - web)))
        config = load_config(tmp_path / "swarm" / "configs" / f"{row['run']}.yaml", TrainConfig)
        assert config.data[0].weight / 24 == web
    seen = {path.read_text().split()[1] for path in (tmp_path / "swarm" / "logs").iterdir()}
    assert seen == {"3", "5"}
    assert len({row["config"] for row in rows(tmp_path)}) == len({row["share:web"] for row in rows(tmp_path)}) > 4
    before = (tmp_path / "swarm" / "runs.csv").read_bytes()
    trainer.write_text("raise SystemExit('trained again')")
    assert said(spec) == []
    assert (tmp_path / "swarm" / "runs.csv").read_bytes() == before


@pytest.mark.slow
def test_an_interrupted_swarm_gives_the_same_table(tmp_path: Path, trainer: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    spec = case.write(whole)
    said(spec)
    plain = yaml.safe_load(spec.read_text()) | {"run_dir": str(parts / "swarm")}
    spec.write_text(yaml.safe_dump(plain))
    heard: list[str] = []

    def stop(line: str) -> None:
        heard.append(line)
        raise KeyboardInterrupt

    stops = 0
    while not (parts / "swarm" / "runs.csv").exists():
        try:
            run.run_swarm(planned(spec), stop)
        except KeyboardInterrupt:
            stops += 1
    assert stops > 1
    assert len(set(heard)) == len(heard) == stops
    assert (parts / "swarm" / "runs.csv").read_bytes() == (whole / "swarm" / "runs.csv").read_bytes()


@pytest.mark.slow
def test_a_run_that_fails_is_told_with_its_last_lines_and_the_others_go_on(tmp_path: Path, trainer: Path) -> None:
    spec = case.write(tmp_path)
    swarm = tmp_path / "swarm"
    swarm.mkdir()
    (swarm / "fail-0002").touch()
    with pytest.raises(QuernError) as caught:
        said(spec)
    told = str(caught.value)
    assert told.startswith("1 of 8 runs failed; the others are kept, and the same command tries these again")
    assert f"run 0002 ended with code 1 ({swarm}/logs/0002.log)" in told
    assert told.splitlines()[-5:] == [f"  line {line} of 0002" for line in range(4, 9)]
    assert not (swarm / "runs.csv").exists()
    assert len(list((swarm / "runs").iterdir())) == 7
    (swarm / "fail-0002").unlink()
    assert said(spec) == ["run 0002: 8 of 8 measured"]
    assert len(rows(tmp_path)) == 8


@pytest.mark.slow
def test_a_run_that_was_killed_after_a_validation_is_not_measured(tmp_path: Path, trainer: Path) -> None:
    spec = case.write(tmp_path)
    member = planned(spec).members[3]
    folder = Path(member.config.run_dir)
    folder.mkdir(parents=True)
    told = {"kind": "validation", "step": 3, "loss": 1.0, "sources": {"web": {"loss": 9.0}, "books": {"loss": 9.0}}}
    (folder / "metrics.jsonl").write_text(json.dumps(told) + "\n")
    assert run.losses(member) is None
    assert len(said(spec)) == 8
    assert float(rows(tmp_path)[3]["loss:web"]) < 9.0


@pytest.mark.slow
def test_a_run_without_a_finite_loss_is_no_row(tmp_path: Path, trainer: Path) -> None:
    spec = case.write(tmp_path)
    (tmp_path / "swarm").mkdir()
    (tmp_path / "swarm" / "nan-0003").touch()
    for _ in range(2):
        with pytest.raises(QuernError, match=r"run 0003 has no finite held-out loss of web .*swarm/runs/0003"):
            said(spec)
    (tmp_path / "swarm" / "nan-0003").unlink()
    shutil.rmtree(tmp_path / "swarm" / "runs" / "0003")
    assert said(spec) == ["run 0003: 8 of 8 measured"]
    trainer.write_text("pass")
    with pytest.raises(QuernError, match=r"run 0000 has no held-out loss after step 7"):
        said(spec, "overrides=[steps=7]", f"run_dir={tmp_path}/other")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"runs": 4},
            "runs: log-linear has 3 parameters for 2 sources; expected runs of at least 5 different mixtures, got 2",
        ),
        ({"overrides": ["run_dir=x"]}, "overrides: expected none of data and run_dir, which the swarm sets"),
        ({"overrides": ["data.0.weight=2"]}, "overrides: expected none of data and run_dir"),
        ({"overrides": ["checkpoint.store=s3://b/x"]}, "overrides: expected checkpoint.store=null"),
        ({"overrides": ["phases=[{first_step: 2, weights: [1, 2]}]"]}, "phases: expected none with weights"),
        ({"overrides": ["steps=6", "parallel.tp=2"]}, "parallel.tp: expected 1, for each run is one process, got 2"),
        ({"overrides": ["steps=1"]}, "schedule.warmup: expected at most steps (1), got 2"),
        ({"overrides": ["steps=6", "seq_len=256"]}, "no source has held-out documents"),
        ({"steps": 600}, "large.yaml: max_epochs: 2,400 samples are planned, and the sources give"),
    ],
)
def test_a_swarm_that_cannot_be_is_refused_before_a_run(tmp_path: Path, changes: Any, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        planned(case.write(tmp_path, **changes))
    assert expected in str(caught.value)
    assert not (tmp_path / "swarm").exists()


@pytest.mark.slow
def test_other_data_in_the_same_place_is_refused_once_a_run_has_begun(tmp_path: Path, trainer: Path) -> None:
    spec = case.write(tmp_path)
    write_configs(planned(spec, "overrides=[steps=8]"))
    said(spec)  # no run had begun with another config
    config = tmp_path / "swarm" / "configs" / "0002.yaml"
    shutil.rmtree(tmp_path / "data")
    rng = random.Random(6)
    files = {name: corpora.make_shards(rng, [[40, 90, 7] * 12, [200] * 4]) for name in ("web", "books")}
    held = {f"{name}.val": corpora.make_shards(rng, [[50] * 4]) for name in files}
    corpora.write_run(tmp_path / "data", {**files, **held})
    before = config.read_bytes()
    with pytest.raises(InputError, match="with another config or other data"):
        said(spec, "runs=9")
    assert config.read_bytes() == before


@pytest.mark.slow
def test_another_swarm_in_the_same_folder_is_refused(tmp_path: Path, trainer: Path) -> None:
    spec = case.write(tmp_path)
    said(spec)
    with pytest.raises(InputError, match=r"configs/0000.yaml: this run was begun with another config"):
        said(spec, "seed=1")
    hold = "import fcntl, sys; lock = open(sys.argv[1], 'a'); fcntl.lockf(lock, fcntl.LOCK_EX); print(); input()"
    command = [sys.executable, "-c", hold, str(tmp_path / "swarm" / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "\n"
        with pytest.raises(QuernError, match=r"swarm/\.lock: another trainer writes here"):
            said(spec)
        other.communicate("\n")
    assert said(spec, "runs=9") == ["run 0008: 9 of 9 measured"]


def test_a_launcher_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = case.write(tmp_path)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match="expected without a launcher"):
        said(spec)


def start(spec: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [python(), "-m", "quern.cli.main", "mix", "ablate", str(spec)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def written(swarm: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in swarm.glob("runs/*/metrics.jsonl"))


@pytest.mark.long
def test_a_swarm_that_is_killed_at_random_moments_gives_the_same_table(tmp_path: Path) -> None:
    """Real runs; SIGKILL and SIGTERM in turns. What a kill leaves running ends by itself."""
    whole = case.write(tmp_path, at_once=2, overrides=["steps=30"])
    done = start(whole)
    assert done.wait(300) == 0, done.communicate()
    files = ("runs.csv", "fit.json", "proposal.yaml")
    before = {name: (tmp_path / "swarm" / name).read_bytes() for name in files}
    plain = yaml.safe_load(whole.read_text()) | {"run_dir": str(tmp_path / "again")}
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(plain))
    kills = sorted(random.Random(6).sample(range(60), 4))  # by how many lines of metrics all runs have together
    for number, lines in enumerate(kills):
        process = start(tmp_path / "again.yaml")
        while process.poll() is None and written(tmp_path / "again") < lines:
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL if number % 2 else signal.SIGTERM)
        assert process.wait(60) == (-signal.SIGKILL if number % 2 else 3)
        _, alive = psutil.wait_procs(children, 20)
        assert not alive
    done = start(tmp_path / "again.yaml")
    assert done.wait(300) == 0, done.communicate()
    assert {name: (tmp_path / "again" / name).read_bytes() for name in files} == before
