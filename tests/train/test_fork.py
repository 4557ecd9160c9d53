"""A fork is the straight run, bit for bit, and a run of its own; a copy of a run is neither."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quern.cli.main import app
from quern.config import load_config
from quern.errors import InputError, QuernError
from quern.lineage.training import TrainingRun
from quern.remote.retry import Backoff, StoreError
from quern.train.checkpoint.format.manifest import FileRecord, read_manifest, sha256_of
from quern.train.checkpoint.store.owner import Owner, hold, read_owner
from quern.train.checkpoint.store.store import Store
from quern.train.checkpoint.tiers.upload import Failed, Uploader
from quern.train.config import DataConfig, TrainConfig
from quern.train.fork import fork
from quern.train.history.consumers import read_consumers
from support.train import run_case as case
from support.train.chosen_site import write_site

pytestmark = pytest.mark.slow
NAME = "step_{:08d}".format


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return folder, case.write_corpus(folder)


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    """The run that nobody forked, saved after steps 3 and 6, with what it left."""
    run = tmp_path_factory.mktemp("straight") / "run"
    return run, case.live(case.settings(run, data[1], checkpoint={"interval": 3}))


def go_on(folder: Path, *overrides: str, **options: Any) -> case.Left:
    return case.live(load_config(folder / "config.yaml", TrainConfig, overrides), **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_fork_is_the_straight_run(data, straight, tmp_path):
    run, whole = straight
    before = contents(run)
    made = fork(str(run), 3, str(tmp_path / "new"))
    assert contents(run) == before
    ident = (tmp_path / "new" / "run_id").read_text().strip()
    assert (made.run, made.trunk, made.trunk_run) == (ident, str(run), (run / "run_id").read_text().strip())
    assert made.run != made.trunk_run
    assert read_manifest(str(tmp_path / "new/checkpoints" / NAME(3))).run == ident

    left = go_on(tmp_path / "new")
    assert (left.start.kind, left.start.step, left.start.data_step) == ("resume", 3, 3)
    assert left.complete
    assert case.differences(left.state, whole.state) == []
    assert left.samples == {step: whole.samples[step] for step in range(3, case.STEPS)}
    rows = case.rows(run)
    assert case.rows(tmp_path / "new") == {step: rows[step] for step in rows if step >= 3}
    assert read_manifest(str(tmp_path / "new/checkpoints" / NAME(6))).run == ident


def test_lineage_of_a_fork_goes_on_to_the_trunk(data, straight, tmp_path):
    """Steps before the fork are the trunk's, also where it has not trained yet; the trunk's later ones are not."""
    run, _ = straight
    fork(str(run), 6, str(tmp_path / "new"), ["steps=8"])
    (line,) = (entry for entry in case.ledger(tmp_path / "new") if entry["kind"] == "fork")
    told = {name: line[name] for name in ("step", "data_step", "run", "path")}
    assert told == {"step": 6, "data_step": 6, "run": (run / "run_id").read_text().strip(), "path": str(run)}
    trunk = [entry for entry in case.ledger(run) if entry["kind"] == "start"]
    forked = TrainingRun(str(tmp_path / "new"))
    assert [(part.step, part.stop, part.attempt.kind) for part in forked.branch()] == [(0, 6, "start")]
    assert forked.attempts[0].paths == trunk[0]["paths"]
    assert str(tmp_path / "new") in {found.train_run for found in read_consumers(str(data[0]))}

    assert go_on(tmp_path / "new", "optimizer.lr=0.02").complete
    forked = TrainingRun(str(tmp_path / "new"))
    assert [(part.step, part.stop, part.attempt.kind) for part in forked.branch()] == [
        (0, 6, "start"),
        (6, 8, "resume"),
    ]
    assert [forked.folder_of(attempt) for attempt in forked.attempts] == [str(run), str(tmp_path / "new")]
    assert TrainingRun(str(run)).reached == case.STEPS
    found = CliRunner().invoke(app, ["lineage", "step", str(tmp_path / "new"), "2"])
    assert f"trained in {run}, from which this run was forked later" in found.output.splitlines()
    assert "trained in" not in CliRunner().invoke(app, ["lineage", "step", str(tmp_path / "new"), "6"]).output


def test_the_command(straight, tmp_path):
    run, new = straight[0], tmp_path / "a new one"
    arguments = ["train", "fork", str(run), "--at", "3", "--to", str(new), "optimizer.lr=0.02"]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output
    first, change, command = found.output.splitlines()
    assert change == "config: optimizer.lr: 0.01 → 0.02"
    ident = (new / "run_id").read_text().strip()
    assert first == f"{new}: a run of its own, {ident}, from step 3 of {run}"
    assert command == f"quern train '{new}/config.yaml'"
    assert load_config(new / "config.yaml", TrainConfig).optimizer.lr == 0.02
    again = CliRunner().invoke(app, arguments)
    assert (again.exit_code, "is already there" in again.output) == (2, True)


def test_what_is_refused_leaves_nothing(straight, tmp_path):
    run, _ = straight
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    copy = shutil.copytree(run, tmp_path / "damaged")
    file = copy / "checkpoints" / NAME(3) / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    for source, step, to, overrides, said in (
        (run, 4, "new", [], r"no checkpoint after step 4; those that are there: 3, 6, 9"),
        (tmp_path, 3, "new", [], r"expected a training run: it has no ledger\.jsonl"),
        (run, 3, "taken", [], r"taken: is already there; expected a path that is free"),
        (run, 3, "new", ["run_dir=/elsewhere"], r"run_dir: is given by --to"),
        (run, 3, "new", ["steps=2"], r"steps: expected at least 3"),
        (run, 3, "new", ["model.dim=64"], r"dim"),
        (run, 3, "new", ["model.size=64"], r"model\.size"),
        (run, 3, "new", ["seed=4"], rf"seed: .*/run began with 5, .* got 4; .*init_from=.*/{NAME(3)}$"),
        (run, 3, "new", ["seq_len=16"], r"seq_len: .*/run began with 32, .* got 16"),
        (run, 3, "new", ["resume.step=2"], r"resume\.step: a fork has one checkpoint, that of step 3, and got 2"),
        (run, 3, "new", ["resume.step=good"], r"that of step 3, and got good"),
        (run, 3, "new", ["phases=[{first_step: 2, weights: [1, 1]}]"], r"a change needs phases with first_step 3 or"),
        (run, 3, "new", ["global_batch=4"], r"the run read 8 sequences a step from data step 0, the config says 4"),
        (run, 3, "new", ["micro_batch=3"], r"global_batch: expected a multiple of 3 .* got 8"),
        (run, 3, "new", ["schedule.warmup=10"], r"schedule\.warmup: expected at most steps"),
        (run, 3, "new", ["data.0.max_epochs=0.01"], r"max_epochs"),
        (run, 3, "new", ["data.0.path=/nowhere"], r"/nowhere"),
        (copy, 3, "new", [], r"1 of 5 files are nowhere whole.*__0_0\.distcp: expected SHA-256 "),
    ):
        with pytest.raises(QuernError, match=said):
            fork(str(source), step, str(tmp_path / to), overrides)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "taken"], (said, overrides)


def test_a_fork_has_the_config_under_which_its_checkpoint_was_saved(straight, tmp_path):
    """Whatever the run was asked for since: the fork takes the steps that the run took from the checkpoint on."""
    run, new = shutil.copytree(straight[0], tmp_path / "run"), tmp_path / "new"
    later = ["optimizer.lr=0.05", "steps=11", "document_mask=false", "resume.step=6", "data_skip=2"]
    config = load_config(run / "config.yaml", TrainConfig, [f"run_dir={run}", *later])
    assert case.live(config).start.data_step == 8
    assert fork(str(run), 3, str(new)).config == (
        "config: document_mask: false → true",
        "config: steps: 11 → 9",
        "config: optimizer.lr: 0.05 → 0.01",
    )
    assert case.differences(go_on(new).state, straight[1].state) == []


def test_a_fork_may_leave_data_out_from_its_first_step_on(straight, tmp_path):
    fork(str(straight[0]), 3, str(tmp_path / "new"), ["resume.step=3", "data_skip=2", "steps=4"])
    start = go_on(tmp_path / "new").start
    assert (start.kind, start.step, start.data_step) == ("rollback", 3, 5)


def test_of_two_forks_that_are_given_one_store_the_second_is_refused(data, tmp_path):
    url, other = f"file://{tmp_path}/trunk", f"file://{tmp_path}/forks"
    case.live(case.settings(tmp_path / "run", data[1], steps=4, checkpoint={"interval": 2, "store": url}))
    with pytest.raises(InputError, match=r"checkpoint\.store: file://.*trunk belongs to .*run, and a store belongs to"):
        fork(str(tmp_path / "run"), 2, str(tmp_path / "a"))
    for name in ("a", "b"):
        fork(str(tmp_path / "run"), 2, str(tmp_path / name), [f"checkpoint.store={other}"])
    trunk = contents(tmp_path / "trunk")
    assert go_on(tmp_path / "a").complete
    forks = contents(tmp_path / "forks")
    assert {name.partition("/")[0] for name in forks} == {"owner.json", NAME(2), NAME(4)}
    with pytest.raises(InputError, match=r"another run") as error:
        go_on(tmp_path / "b")
    for ident in ("a", "b"):
        assert (tmp_path / ident / "run_id").read_text().strip() in str(error.value)
    with pytest.raises(InputError, match=r"holds checkpoints of another run"):  # the trunk's, by hand
        go_on(tmp_path / "b", f"checkpoint.store={url}")
    assert contents(tmp_path / "forks") == forks
    assert contents(tmp_path / "trunk") == trunk
    assert {e["kind"] for e in case.ledger(tmp_path / "b")[-1:]} == {"fork"}  # not a step, not even begun


def test_a_checkpoint_on_nodes_or_in_the_store_alone_is_forked_too(data, tmp_path):
    run, url, local = tmp_path / "run", f"file://{tmp_path}/store", str(tmp_path / "node")
    whole = case.live(case.settings(run, data[1], checkpoint={"interval": 3, "local": local, "store": url}))
    assert not list((run / "checkpoints" / NAME(6)).glob("*.distcp"))
    for folder in (run / "checkpoints" / NAME(3), *Path(local).rglob(NAME(3))):
        shutil.rmtree(folder)
    alone = ["checkpoint.store=null", "checkpoint.local=null"]
    with pytest.raises(InputError, match="has no checkpoint after step 3; those that are there: 6, 9; if the") as error:
        fork(str(run), 3, str(tmp_path / "from 3"), alone)
    command = str(error.value).partition("quern ")[2].removesuffix(" brings it").split()
    assert CliRunner().invoke(app, command).exit_code == 0
    for step in (3, 6):
        new = tmp_path / f"from {step}"
        fork(str(run), step, str(new), alone)
        assert list((new / "checkpoints" / NAME(step)).glob("*.distcp"))
        assert case.differences(go_on(new).state, whole.state) == []


def test_what_is_whole_here_is_forked_where_the_store_is_of_no_kind_that_is_known(straight, tmp_path):
    run = shutil.copytree(straight[0], tmp_path / "run")
    for file in (run / "config.yaml", run / "checkpoints" / NAME(3) / "config.yaml"):
        assert "store: null" in file.read_text()
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("store: null", "store: nosuch://bucket/run"))
    fork(str(run), 3, str(tmp_path / "new"))
    assert case.differences(go_on(tmp_path / "new").state, straight[1].state) == []


def test_a_copy_of_a_run_is_refused_its_store_and_a_moved_run_goes_on(data, tmp_path):
    url = f"file://{tmp_path}/store"
    settings = {"steps": 6, "checkpoint": {"interval": 2, "store": url}}
    case.live(case.settings(tmp_path / "run", data[1], **settings), stop_at=2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    before = contents(tmp_path / "store")
    with pytest.raises(InputError, match=r"store belongs to the run \w+ in .*/run, and .*/copy is a copy of it"):
        case.live(case.settings(tmp_path / "copy", data[1], **settings))
    assert contents(tmp_path / "store") == before

    ident = (tmp_path / "run" / "run_id").read_text().strip()
    shutil.rmtree(tmp_path / "run")
    assert case.live(case.settings(tmp_path / "copy", data[1], **settings)).complete
    store = Store(url, backoff=Backoff(budget_s=0.0))
    found = read_owner(store)
    assert found is not None
    assert found.is_same(Owner.of(ident, str(tmp_path / "copy")))
    shutil.copytree(tmp_path / "store", tmp_path / "copied")  # with the run's folder, onto another disk, perhaps
    assert read_owner(Store(f"file://{tmp_path}/copied")) is None
    hold(store, Owner.of(ident, str(tmp_path / "copy")))
    with pytest.raises(StoreError, match=r"in .*/copy now, not to \w+ in .*/run; nothing is uploaded"):
        hold(store, Owner.of(ident, str(tmp_path / "run")))
    uploader = Uploader(url, owner=Owner.of(ident, str(tmp_path / "run")), retry_after_s=60.0)
    try:
        (tmp_path / "file").write_bytes(b"late")
        uploader.upload(6, str(tmp_path), {"file": FileRecord(sha256_of(b"late"), 4)})
        while not (events := uploader.poll()):
            time.sleep(0.01)
    finally:
        uploader.close()
    assert [(event.permanent, event.dropped) for event in events if isinstance(event, Failed)] == [(True, False)]
    assert not (tmp_path / "store" / NAME(6) / "file").exists()
    (tmp_path / "store" / "owner.json").write_text('{"run": 1}')
    with pytest.raises(InputError, match=r"owner\.json: expected run, folder, host and store"):
        case.live(case.settings(tmp_path / "copy", data[1], **{**settings, "steps": 8}))


def test_a_store_of_a_version_without_owners_is_taken(data, tmp_path):
    settings = {"steps": 4, "checkpoint": {"interval": 2, "store": f"file://{tmp_path}/store"}}
    case.live(case.settings(tmp_path / "run", data[1], **settings), stop_at=2)
    (tmp_path / "store" / "owner.json").unlink()
    assert case.live(case.settings(tmp_path / "run", data[1], **settings)).complete
    said = json.loads((tmp_path / "store" / "owner.json").read_text())
    assert said["folder"] == str(tmp_path / "run")


def test_a_fork_reads_what_the_conditions_of_its_trunk_chose(tmp_path):
    """Also where the run's tables say otherwise by now."""
    site = write_site(tmp_path)
    source = DataConfig(path=site.path, where="cluster_size = 1", max_epochs=1000)
    settings = case.settings(tmp_path / "trunk", [site.path], checkpoint={"interval": 3})
    case.live(settings.model_copy(update={"data": (source,), "phases": ()}))
    (site.run / "duplicates" / "clusters.parquet").unlink()
    fork(str(tmp_path / "trunk"), 3, str(tmp_path / "new"))
    assert {path.name for path in (tmp_path / "new" / "chosen").glob("*.chosen")} == {
        path.name for path in (tmp_path / "trunk" / "chosen").glob("*.chosen")
    }
    go_on(tmp_path / "new")
    assert TrainingRun(str(tmp_path / "new")).order.ids == TrainingRun(str(tmp_path / "trunk")).order.ids
