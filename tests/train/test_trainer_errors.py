"""What a person can mend is one line that names it, and exit code 2; never a traceback."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from quern.config import dump_yaml, load_config
from quern.model.config import ModelConfig
from quern.train.__main__ import main
from quern.train.config import TrainConfig
from support.damage import flip
from support.named_cases import each
from support.train import run_case as case

pytestmark = pytest.mark.slow


@pytest.fixture
def paths(tmp_path):
    return case.write_corpus(tmp_path / "data", {"web": 60, "code": 25})


@pytest.fixture
def weights(file, tmp_path) -> Path:
    """The last checkpoint of that run, to begin another with."""
    assert main([str(file)]) == 0
    return tmp_path / "run" / "checkpoints" / "step_00000009"


@pytest.fixture
def file(tmp_path, paths):
    """The config of a small run."""
    path = tmp_path / "run.yaml"
    config = case.settings(tmp_path / "run", paths, micro_batch=2, checkpoint={"interval": 4})
    path.write_text(dump_yaml(config))
    return path


def refused(capsys, file: Path, *overrides: str, code: int = 2) -> str:
    """The one line that ``python -m quern.train`` says."""
    capsys.readouterr()
    assert main([str(file), *overrides]) == code
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert len(lines) == 1, said.err
    assert lines[0].startswith("error: ")
    return lines[0]


def rewrite_manifest(folder: Path, **changes) -> None:
    """Another manifest of a source, and a version that lists it with its own checksum."""
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changes))
    version = folder.parent / "VERSION.json"
    body = json.loads(version.read_text())
    body["sources"][folder.name]["sha256"] = hashlib.sha256(manifest.read_bytes()).hexdigest()
    body["encoding"] |= {name: value for name, value in changes.items() if name in body["encoding"]}
    version.write_text(json.dumps(body))


def test_ids_beyond_the_files_integers(capsys, file, paths):
    for path in paths:
        rewrite_manifest(Path(path), vocab_size=70_000)
    assert "manifest.json: vocab_size: expected 1 to 65536, which uint16 holds, got 70000" in refused(capsys, file)


def test_a_missing_shard(capsys, file, paths):
    Path(paths[1], "shard_00001.bin").unlink()
    assert re.search(r"code/shard_00001\.bin: .*missing", refused(capsys, file))


def test_an_altered_shard_of_the_same_size(capsys, file, paths):
    shard = Path(paths[0], "shard_00000.bin")
    flip(shard, 100)
    line = refused(capsys, file)
    assert "web/shard_00000.bin: is damaged: its SHA-256 is not the expected" in line


#: Overrides that are refused, and how; what a dry run refuses too is among the tests of ``quern train``.
WRONG = [
    (["phases=[{first_step: 4, global_batch: 3}]"],
     "phases.0.global_batch: expected a multiple of 2 (1 data-parallel rank × micro_batch 2), got 3; 2 or 4 would fit"),
    (["sed=4"], "sed"),
    (["model.dims=4"], "model.dims"),
    (["steps=0"], "steps"),
    (["data.0.path=/nowhere/tokens/web"], "/nowhere/tokens/VERSION.json"),
    (["init_from=/nowhere/step_00000004"], "init_from: /nowhere/step_00000004"),
    (["model.num_kv_heads=3"], "num_kv_heads"),
    (["phases=[{first_step: 4, weights: [0, 0]}]"], "weights"),
    (["phases=[{first_step: 4, weights: [1]}]"], "phases.0.weights: expected 2 weights, one a source, got 1"),
    (["guard.window=8", "guard.min_history=9"], "min_history"),
    (["parallel.stage_layers=[2]"], "parallel.stage_layers: changes nothing without a pipeline"),
    (["parallel.schedule=2f2b"], "parallel.schedule"),
    (["run_dir=s3://bucket/run"], "run_dir: expected a folder on a file system, got 's3://bucket/run'"),
    (["run_dir=''"], "run_dir: expected the path of a folder"),
    (['run_dir="a\\0b"'], "run_dir: expected the path of a folder"),
    ([f"steps={10**24}", "data.0.max_epochs=1e300", "data.1.max_epochs=1e300"],
     "steps: expected fewer than 2^62 samples in all"),
]  # fmt: skip


def test_a_config_that_cannot_be(capsys, file, tmp_path):
    def check(overrides: list[str], expected: str) -> None:
        assert expected in refused(capsys, file, *overrides)

    each(WRONG, check)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_dir_that_is_a_file(capsys, file, tmp_path):
    (tmp_path / "run").write_text("")
    assert f"run_dir: expected a folder, got '{tmp_path}/run'" in refused(capsys, file)
    assert f"run_dir: expected a folder, got '{tmp_path}/run/x'" in refused(capsys, file, f"run_dir={tmp_path}/run/x")


def test_a_run_dir_that_is_a_data_run(capsys, file, paths):
    """Its run.json is the identity of every source in it."""
    described = Path(paths[0]).parents[1] / "run.json"
    before = described.read_bytes()
    assert "holds another run" in refused(capsys, file, f"run_dir={described.parent}")
    assert described.read_bytes() == before
    assert not (described.parent / "ledger.jsonl").exists()


def test_an_altered_held_out_shard(capsys, tmp_path):
    (path, _) = case.write_corpus(tmp_path / "held", {"web": 60, "web.val": 20})
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(case.settings(tmp_path / "run", [path])))
    shard = next(Path(path + ".val").glob("*.bin"))
    flip(shard, 100)
    assert f"{shard}: is damaged: its SHA-256 is not the expected" in refused(capsys, file)


def test_ids_that_nobody_verified(capsys, file, paths):
    for path in paths:
        for shard in Path(path).glob("*.bin"):
            shard.write_bytes(b"\xff" * shard.stat().st_size)
    line = refused(capsys, file, "verify_shards=false")
    assert "expected ids below" in line
    assert "got 65535 in tokens" in line


def test_cuda_where_there_is_none(capsys, file):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert "device: expected a machine with CUDA, and torch finds none; give device=cpu" in refused(
        capsys, file, "device=cuda"
    )


ANOTHER_PAST = [
    ("model.dim=64", "step_00000004/manifest.json: model.dim: expected 64, as in the config, got 32"),
    ("seed=6", "seed: the run in"),
    ("seq_len=16", "seq_len: the run in"),
    ("global_batch=4", "global_batch: the run read 8 sequences a step from data step 0"),
    ("data.1.weight=2", "data: the run's weights from data step 0 were 0.75, 0.25"),
    ("phases=[{first_step: 3, global_batch: 16}]", "a change needs phases with first_step 4 or later"),
    ("resume.step=3", "has no checkpoint of step 3 (there are: 4)"),
]


def test_another_past_on_a_resume(capsys, file):
    """A refusal changes nothing: the run goes on."""

    def check(override: str, expected: str) -> None:
        assert expected in refused(capsys, file, override)

    assert main([str(file), "steps=4"]) == 0
    each(ANOTHER_PAST, check)
    assert main([str(file)]) == 0


def test_another_corpus_version_on_a_resume(capsys, file, paths):
    assert main([str(file), "steps=4"]) == 0
    version = Path(paths[0]).parent / "VERSION.json"
    body = json.loads(version.read_text())
    body["version"] = 2
    body["sources"]["web"]["since"] = 2
    version.write_text(json.dumps(body))
    line = refused(capsys, file)
    assert "tokens/web: the corpus is at version 2 now" in line
    assert "give accept_version=2 for this source" in line


def test_weights_of_another_shape_to_begin_with(capsys, file, tmp_path, weights, caplog):
    caplog.clear()
    line = refused(
        capsys, file, f"init_from={weights}", f"run_dir={tmp_path / 'other'}", "model={num_layers: 3, dim: 64}"
    )
    assert "step_00000009/manifest.json: the checkpoint does not fit: model.num_layers is 3 in the config and 1" in line
    assert "; model.dim is 64 in the config and 32 in the checkpoint" in line
    assert caplog.messages == []
    assert not (tmp_path / "other").exists()


def test_a_run_that_begins_with_another_runs_newest_weights(capsys, file, tmp_path, weights, caplog):
    """Without a section model; and it goes on without the source."""
    plain = yaml.safe_load(file.read_text())
    plain |= {"run_dir": str(tmp_path / "other"), "init_from": str(tmp_path / "run"), "steps": 4}
    model = plain.pop("model")
    file.write_text(yaml.safe_dump(plain))
    assert main([str(file)]) == 0
    assert f"the weights are those of {weights}" in caplog.messages
    recorded = load_config(tmp_path / "other" / "config.yaml", TrainConfig)
    assert recorded.model.shape(300) == ModelConfig(**model).shape(300)
    assert recorded.init_from == str(weights)
    (tmp_path / "run").rename(tmp_path / "away")
    caplog.clear()
    assert main([str(file), "steps=6"]) == 0
    assert "config: steps: 4 → 6" in caplog.messages
    assert not any("init_from" in message for message in caplog.messages)
    assert load_config(tmp_path / "other" / "config.yaml", TrainConfig).init_from == str(weights)


def test_damaged_weights_to_begin_with(capsys, file, tmp_path, weights):
    (shard,) = weights.glob("*.distcp")
    flip(shard)
    line = refused(capsys, file, f"init_from={weights}", f"run_dir={tmp_path / 'other'}")
    assert "init_from: " in line
    assert shard.name in line


def test_a_second_trainer_in_a_run(capsys, file, tmp_path):
    """Exit code 1: what is wrong is not the config, and a launcher may try again once the first has gone."""
    code = (
        "import sys; from quern.train.checkpoint.format.folder import FolderLock; import os\n"
        "os.makedirs(sys.argv[1]); lock = FolderLock(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run" / "checkpoints")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        line = refused(capsys, file, code=1)
        assert f"run/checkpoints/.lock: another trainer writes here (process {holder.pid} on " in line
    finally:
        holder.communicate("")
    assert main([str(file)]) == 0


def test_a_ledger_that_is_damaged(capsys, file, tmp_path):
    assert main([str(file), "steps=4"]) == 0
    ledger = tmp_path / "run" / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join([lines[0], b"nonsense\n", *lines[2:]]))
    assert "ledger.jsonl: line 2 is damaged" in refused(capsys, file, code=1)


def test_a_ledger_that_is_lost(capsys, file, tmp_path):
    assert main([str(file), "steps=4"]) == 0
    (tmp_path / "run" / "ledger.jsonl").unlink()
    assert "ledger.jsonl: has 0 bytes, expected at least" in refused(capsys, file, code=1)


def test_no_checkpoint_is_whole(capsys, file, tmp_path):
    assert main([str(file), "steps=4"]) == 0
    (shard,) = (tmp_path / "run" / "checkpoints" / "step_00000004").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "no checkpoint is whole" in refused(capsys, file, code=1)


def test_no_config_at_all(capsys, tmp_path):
    assert "no such config file" in refused(capsys, tmp_path / "nothing.yaml")
    assert main([]) == 2
