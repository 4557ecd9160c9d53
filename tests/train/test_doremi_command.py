"""``quern mix doremi``: which runs it trains, what it makes of the weights, and that it goes on after a stop."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from quern.cli.main import app
from quern.config import dump_yaml
from quern.errors import InputError, QuernError
from quern.train.batches.mixture import open_corpus, plan_mixture
from quern.train.config import DoReMiConfig
from quern.train.init_from import load_train_config
from quern.train.swarm.doremi import plan_doremi, propose
from support.programs import python
from support.train import swarm_case


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """240 samples of two sources of 76 windows each."""
    swarm_case.write(tmp_path, max_epochs=2.0)
    return tmp_path / "large.yaml"


def planned(large: Path, *overrides: str, **learning: Any) -> Any:
    small = load_train_config(large, overrides)
    return plan_doremi(load_train_config(large), small, str(large.parent / "out"), DoReMiConfig(**learning))


def test_both_runs_are_the_small_ones_and_the_proxy_has_the_reference(large: Path) -> None:
    out = large.parent / "out"
    runs = planned(large, "steps=6", step_size=0.5)
    assert list(runs) == ["reference", "proxy"]
    assert {name: (own.run_dir, own.steps) for name, own in runs.items()} == {
        name: (str(out / name), 6) for name in runs
    }
    assert runs["reference"].doremi.reference is None
    assert runs["proxy"].doremi.model_dump() == {
        "reference": str(out / "reference"), "step_size": 0.5, "smoothing": 1e-3,
    }  # fmt: skip
    alone = planned(large, "steps=6", reference="/elsewhere")
    assert (list(alone), alone["proxy"].doremi.reference) == (["proxy"], "/elsewhere")


def test_what_does_not_fit_is_refused(large: Path) -> None:
    with pytest.raises(InputError, match="overrides: expected none of data, run_dir and doremi"):
        planned(large, "data.0.weight=2")
    with pytest.raises(InputError, match="overrides: expected none of data, run_dir and doremi"):
        planned(large, "doremi.reference=/elsewhere")
    with pytest.raises(InputError, match=r"expected checkpoint.store=null and checkpoint.local=null"):
        planned(large, "checkpoint.store=file:///store")
    with pytest.raises(QuernError, match="has learned no weights by its last step, 5"):
        propose(load_train_config(large), planned(large, "steps=6")["proxy"])


def test_one_source_has_nothing_to_weigh(large: Path) -> None:
    base = load_train_config(large)
    base = base.model_copy(update={"data": base.data[:1]})
    with pytest.raises(InputError, match="data: expected two sources or more, and of each a weight above 0"):
        plan_doremi(base, base, "/none", DoReMiConfig())


def test_the_command_prints_a_section_that_a_run_takes(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, asked = large.parent / "out", []

    def trained(runs: Any, folder: str, nproc: int, say: Any) -> None:
        asked.append((list(runs), folder, nproc))
        (out / "proxy").mkdir(parents=True)
        row = {"kind": "step", "step": 5} | {
            key: {"web": 0.4, "books": 0.6} for key in ("doremi_weight", "doremi_mean_weight", "excess_loss_by_source")
        }
        (out / "proxy" / "metrics.jsonl").write_text(json.dumps(row) + "\n")

    monkeypatch.setattr("quern.train.swarm.doremi.run_doremi", trained)
    given = ["mix", "doremi", str(large), "steps=6", "--out", str(out), "--nproc", "3", "--step-size", "0.5"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    told = result.stdout
    assert asked == [(["reference", "proxy"], str(out), 3)]
    assert "40.00%" in told
    section = yaml.safe_load(told[told.index("data:") :])
    assert section == yaml.safe_load((out / "proposal.yaml").read_text())
    assert [own["weight"] for own in section["data"]] == [96, 144]


def test_a_run_that_has_begun_keeps_its_settings(large: Path) -> None:
    """Else a complete one would be taken for what was asked."""
    out = large.parent / "out"
    for name, config in planned(large, "steps=6").items():
        (out / name).mkdir(parents=True)
        (out / f"{name}.yaml").write_text(dump_yaml(config))
    assert list(planned(large, "steps=6")) == ["reference", "proxy"]
    with pytest.raises(InputError, match=r"proxy.yaml: doremi.step_size: this run began with 1.0, got 0.5; expected"):
        planned(large, "steps=6", step_size=0.5)
    with pytest.raises(InputError, match=r"reference.yaml: steps: this run began with 6, got 8"):
        planned(large, "steps=8")


def test_too_large_a_run_is_refused_before_anything_is_trained(large: Path) -> None:
    with pytest.raises(InputError, match="max_epochs: 400 samples are planned, and the sources give 300 at most"):
        plan_doremi(load_train_config(large, ["steps=100"]), load_train_config(large), "/none", DoReMiConfig())


def test_mean_weights_are_whole_samples_of_the_run_to_come_below_its_caps(large: Path) -> None:
    """0.9 of 240 samples are 216, and two epochs of 76 windows, but two, are 150."""
    proxy, base = planned(large, "steps=6")["proxy"], load_train_config(large)
    for means, samples in (((0.9, 0.1), (150, 90)), ((0.55, 0.45), (132, 108))):
        rows = [
            {"kind": "step", "step": step, "doremi_weight": {"web": 0.2, "books": 0.8},
             "doremi_mean_weight": dict(zip(("web", "books"), means if step == 5 else (0.5, 0.5), strict=True)),
             "excess_loss_by_source": {"web": 0.25, "books": 0.0}}
            for step in range(6)
        ]  # fmt: skip
        Path(proxy.run_dir).mkdir(parents=True, exist_ok=True)
        Path(proxy.run_dir, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = propose(base, proxy)
        assert [own["weight"] for own in found["data"]] == [*samples]
        assert [row["proposed"] for row in found["sources"].values()] == [own / 240 for own in samples]
        assert [row["weight"] for row in found["sources"].values()] == [*means]
        assert {name: row["excess_loss"] for name, row in found["sources"].items()} == {"web": 0.25, "books": 0.0}
        merged = {**base.model_dump(mode="json"), "data": found["data"]}
        (large.parent / "next.yaml").write_text(yaml.safe_dump(merged))
        following = load_train_config(large.parent / "next.yaml")
        plan = plan_mixture(following, open_corpus(following, keep=False))
        assert [row.samples for row in plan.sources] == [*samples]


@pytest.mark.long
def test_stopped_at_any_time_it_goes_on_to_the_same_weights(large: Path) -> None:
    found = []
    for name in ("straight", "stopped"):
        out = large.parent / name
        command = [
            python(), "-m", "quern.cli.main", "mix", "doremi", str(large), "steps=40", "--out", str(out), "--nproc",
            "2", "--json",
        ]  # fmt: skip
        if name == "stopped":
            for run in ("reference", "proxy"):
                first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                while first.poll() is None and not (out / run / "metrics.jsonl").exists():
                    time.sleep(0.05)
                first.send_signal(signal.SIGTERM)
                _, told = first.communicate()
                assert first.returncode == 0 or f"{out / run}: was stopped; the same command goes on with it" in told
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
        assert yaml.safe_load((out / "proposal.yaml").read_text())["data"] == found[-1]["data"]
    assert found[0] == found[1]
    weights = [row["weight"] for row in found[0]["sources"].values()]
    np.testing.assert_allclose(sum(weights), 1, rtol=1e-12)
