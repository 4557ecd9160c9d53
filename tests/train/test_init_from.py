"""``init_from``: the shape that a checkpoint brings, and what of a config does not fit it."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from quern.config import digest, load_config
from quern.errors import InputError
from quern.model import hf
from quern.model.config import ModelConfig
from quern.train.checkpoint.format.manifest import MANIFEST_FILE, EncodingInfo, read_manifest
from quern.train.checkpoint.tools.reader import write_weights
from quern.train.config import TrainConfig
from quern.train.init_from import check_given_weights, load_train_config, starting_checkpoint

SIZES: dict[str, Any] = {
    "num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_dim": 48,
    "vocab_multiple": 64, "rope_theta": 500.0, "norm_eps": 1e-6, "qk_norm": True, "tied_embeddings": True,
    "rope_scaling": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 64},
}  # fmt: skip
RANKS = b"AA== 0\n"
ENCODING = EncodingInfo("own", 300, 299, hashlib.sha256(RANKS).hexdigest())


def write_checkpoint(path: Path, step: int = 0, **sizes: Any) -> Path:
    shape = ModelConfig(**(SIZES | sizes)).shape(300)
    weights = {name: torch.zeros(size) for name, size in hf.expected_tensors(shape).items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    ranks = path.parent / "ranks"
    ranks.write_bytes(RANKS)
    manifest = write_weights(str(path), shape, weights, encoding=ENCODING, ranks_path=str(ranks))
    (path / MANIFEST_FILE).write_bytes(replace(manifest, step=step).to_bytes())
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source")


def write(folder: Path, **keys: Any) -> str:
    """A config of a fresh run in ``folder``."""
    base = {"run_dir": str(folder / "run"), "data": [{"path": "tokens/a"}], "steps": 3000}
    (folder / "c.yaml").write_text(yaml.safe_dump(base | keys))
    return str(folder / "c.yaml")


def sizes_of(config: TrainConfig) -> dict[str, Any]:
    return {name: value for name, value in config.model.model_dump(mode="json").items() if value is not None}


@pytest.mark.parametrize("section", [{}, {"model": {}}, {"model": {"dim": 32, "num_heads": None}}])
def test_keys_that_are_not_given_are_the_checkpoints(tmp_path: Path, source: Path, section: dict[str, Any]) -> None:
    assert sizes_of(load_train_config(write(tmp_path, init_from=str(source), **section))) == SIZES


def test_what_a_preset_does_not_say_is_the_checkpoints(tmp_path: Path) -> None:
    debug = {"num_layers": 4, "dim": 256, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 768, "tied_embeddings": True}
    source = write_checkpoint(tmp_path / "source", **debug, head_dim=64)
    config = load_train_config(write(tmp_path, init_from=str(source), model={"preset": "debug"}))
    left = {name: SIZES[name] for name in ("vocab_multiple", "rope_theta", "norm_eps", "qk_norm", "rope_scaling")}
    assert sizes_of(config) == {"preset": "debug", "head_dim": 64, **left}


def test_keys_of_experts_are_the_checkpoints_one_by_one(tmp_path: Path) -> None:
    moe = {"num_experts": 4, "top_k": 2, "ffn_dim": 24, "normalize": True, "first_dense": 1}
    source = str(write_checkpoint(tmp_path / "source", moe=moe))
    for given in ({}, {"moe": {"num_experts": 4}}, {"moe": {"top_k": 2, "scale": None}, "dim": 32}):
        config = load_train_config(write(tmp_path, init_from=source, model=given))
        assert config.model.shape(300) == ModelConfig(**SIZES, moe=moe).shape(300)
        check_given_weights(config, ENCODING)
    config = load_train_config(write(tmp_path, init_from=source, model={"moe": {"capacity": 1.5}}))
    with pytest.raises(InputError, match=r"model\.moe"):
        check_given_weights(config, ENCODING)


@pytest.mark.parametrize("section", [{"model": SIZES}, {"model": {**SIZES, "vocab_multiple": 128}}])
def test_a_whole_section_is_what_it_was(tmp_path: Path, source: Path, section: dict[str, Any]) -> None:
    file = write(tmp_path, init_from=str(source), **section)
    assert digest(load_train_config(file)) == digest(load_config(file, TrainConfig))


def test_the_default_model_is_what_it_was_where_the_checkpoint_has_it(tmp_path: Path) -> None:
    source = tmp_path / "debug"
    shape = ModelConfig(preset="debug", vocab_multiple=64).shape(300)
    write_weights(str(source), shape, {n: torch.zeros(s) for n, s in hf.expected_tensors(shape).items()})
    file = write(tmp_path, init_from=str(source))
    assert digest(load_train_config(file)) == digest(load_config(file, TrainConfig))


@pytest.mark.slow
def test_a_run_stands_for_its_newest_checkpoint_until_a_run_has_begun_with_it(tmp_path: Path) -> None:
    """The run's own config.yaml says which it was and what the model is, also when the source is gone."""
    other = tmp_path / "other"
    first = write_checkpoint(other / "checkpoints" / "step_00000020", 20)
    write_checkpoint(other / "checkpoints" / "step_00000009", 9)
    config = load_train_config(write(tmp_path, init_from=str(other)))
    assert starting_checkpoint(config) == str(first)
    begun = config.model_copy(update={"init_from": str(first)})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(begun.model_dump(mode="json")))
    newer = write_checkpoint(other / "checkpoints" / "step_00000025", 25)
    spelled = f"{tmp_path}/./other/"
    assert starting_checkpoint(config.model_copy(update={"init_from": spelled})) == str(first), (
        "begun, nothing saved yet"
    )
    shutil.rmtree(newer)
    write_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000003", 3)
    write_checkpoint(other / "checkpoints" / "step_00000030", 30, num_layers=1)
    for path in (other, tmp_path / "nowhere"):
        other.rename(path)
        other = path
        again = load_train_config(write(tmp_path, init_from=str(tmp_path / "other")))
        assert sizes_of(again) == SIZES
        assert starting_checkpoint(again) == str(first)
        check_given_weights(again, replace(ENCODING, eot_id=3))


def test_all_that_differs_is_told_at_once(tmp_path: Path, source: Path) -> None:
    model = {"num_layers": 3, "dim": 32, "qk_norm": False, "rope_scaling": None, "vocab_multiple": 128}
    config = load_train_config(write(tmp_path, init_from=str(source), model=model, precision="fp32"))
    ids = EncodingInfo("mine", 301, 300, "a" * 64)
    with pytest.raises(InputError) as refused:
        check_given_weights(config, ids)
    scaling = json.loads(json.dumps(SIZES["rope_scaling"]))
    assert str(refused.value) == (
        f"init_from: {source}/manifest.json: the checkpoint does not fit: "
        "model.num_layers is 3 in the config and 2 in the checkpoint; "
        "model.vocab_size is 301 in the data and 300 in the checkpoint; "
        f"model.rope_scaling is None in the config and {scaling} in the checkpoint; "
        "model.qk_norm is False in the config and True in the checkpoint; "
        f"encoding.ranks_sha256 is {'a' * 64} (mine) in the data and {ENCODING.ranks_sha256} (own) in the checkpoint; "
        "encoding.eot_id is 300 (mine) in the data and 299 (own) in the checkpoint. "
        "A key of model that is not given is taken from the checkpoint"
    )
    fits = load_train_config(write(tmp_path, init_from=str(source)))
    check_given_weights(fits, ENCODING)


def test_float64_weights_are_not_rounded(tmp_path: Path, source: Path) -> None:
    manifest = source / MANIFEST_FILE
    manifest.write_bytes(replace(read_manifest(str(source)), precision="float64").to_bytes())
    check_given_weights(load_train_config(write(tmp_path, init_from=str(source), precision="fp64")), ENCODING)
    with pytest.raises(InputError, match=r"fit: precision is fp32 in the config and fp64 in the checkpoint\. A key"):
        check_given_weights(load_train_config(write(tmp_path, init_from=str(source), precision="fp32")), ENCODING)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"num_heads": 3, "dim": 64}, "model.dim is 64 in the config and 32 in the checkpoint; model.num_heads is 3"),
        ({"dims": 3}, "model.dims: unknown key; did you mean 'dim'?"),
        ({"dim": "wide"}, 'model.dim: expected an integer, got "wide"'),
        ([4], "model: expected a mapping of keys, got [4]"),
    ],
)
def test_keys_that_make_no_model(tmp_path: Path, source: Path, keys: Any, expected: str) -> None:
    with pytest.raises(InputError) as refused:
        load_train_config(write(tmp_path, init_from=str(source), model=keys))
    assert str(refused.value).startswith(str(tmp_path / "c.yaml"))
    assert expected in str(refused.value)


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    """A whole model needs none until the run begins: ``mix show`` and ``bench`` read such a config."""
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(InputError, match=f"c.yaml: init_from: {nowhere}: expected a checkpoint"):
        load_train_config(write(tmp_path, init_from=nowhere))
    config = load_train_config(write(tmp_path, init_from=nowhere, model=SIZES))
    with pytest.raises(InputError, match=f"^init_from: {nowhere}: expected a checkpoint"):
        check_given_weights(config, ENCODING)
    store = {"resume": {"from_store": True}, "checkpoint": {"store": "file:///store"}}
    check_given_weights(load_train_config(write(tmp_path, init_from=nowhere, model=SIZES, **store)), ENCODING)
