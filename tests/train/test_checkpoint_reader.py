"""Weights read and written by one process, and what ``verify`` finds."""

from __future__ import annotations

import gc
import hashlib
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from quern.errors import InputError
from quern.train.checkpoint.format.manifest import EncodingInfo, read_manifest
from quern.train.checkpoint.tools.reader import iter_weights, verify, weight_sizes, write_weights
from quern.train.config import CheckpointConfig
from support.damage import flip
from support.train import checkpoint_case as CASE
from support.train.saves import CheckpointManager

ENCODING = EncodingInfo("tiny", CASE.VOCAB, 0, hashlib.sha256(CASE.RANKS).hexdigest())


def save(folder: Path, step: int, multiple: int = 256) -> str:
    state = CASE.make(folder, multiple=multiple)
    CASE.fill(state, step)
    with CheckpointManager(str(folder / "run"), CheckpointConfig()) as checkpoints:
        return checkpoints.save(step, state, CASE.position(step)).path


class Lazy(Mapping):
    """Weights that exist only when asked for; counts how often, and how many live at a time."""

    def __init__(self, key: int) -> None:
        self.sizes, self.key = CASE.sizes(CASE.shape()), key
        self.asked: list[str] = []
        self.alive: list[weakref.ref] = []
        self.most = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        gc.collect()
        tensor = CASE.numbers("weight", name, self.sizes[name], self.key)
        self.asked.append(name)
        self.alive.append(weakref.ref(tensor))
        self.most = max(self.most, sum(ref() is not None for ref in self.alive))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)


@pytest.mark.parametrize("tied", [False, True])
def test_sizes_are_the_models_without_padding(tied):
    assert weight_sizes(CASE.shape(256, tied=tied)) == CASE.sizes(CASE.shape(tied=tied))


def test_weights_are_read_by_name_unpadded(tmp_path):
    found = dict(iter_weights(save(tmp_path, 3)))
    expected = CASE.weights(3)
    assert list(found) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == torch.float32


def test_weights_written_are_weights_read(tmp_path):
    path = str(tmp_path / "imported")
    (tmp_path / "ranks").write_bytes(CASE.RANKS)
    written = write_weights(path, CASE.shape(), CASE.weights(4), encoding=ENCODING, ranks_path=str(tmp_path / "ranks"))
    manifest = read_manifest(path)
    assert manifest == written
    assert not manifest.optimizer
    assert manifest.encoding == ENCODING
    assert (tmp_path / "imported" / "encoding.tiktoken").read_bytes() == CASE.RANKS
    found = dict(iter_weights(path))
    assert all(torch.equal(found[name], tensor) for name, tensor in CASE.weights(4).items())
    assert verify(path) == []
    assert os.listdir(tmp_path).count("imported") == 1
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_training_starts_from_imported_weights_with_fresh_moments(tmp_path):
    path = str(tmp_path / "imported")
    write_weights(path, CASE.shape(1), CASE.weights(4))
    state = CASE.make(tmp_path, multiple=256)
    with CheckpointManager(str(tmp_path / "run"), CheckpointConfig()) as checkpoints:
        found = checkpoints.load(path, state)
    assert not found.manifest.optimizer
    assert found.extra == {}
    for slots in state.optimizer.state.values():
        assert float(slots["step"]) == 0
        assert not slots["exp_avg"].any()
    wrong = CASE.differences(state, 4)
    assert wrong
    assert not [name for name in wrong if name.startswith("weight/")]


@pytest.mark.long
def test_lazy_weights_are_asked_for_once_and_let_go(tmp_path):
    lazy = Lazy(5)
    write_weights(str(tmp_path / "imported"), CASE.shape(), lazy)
    assert sorted(lazy.asked) == sorted(lazy)
    assert lazy.most <= 2  # the one being written and the one being made
    assert all(torch.equal(tensor, CASE.weights(5)[name]) for name, tensor in iter_weights(str(tmp_path / "imported")))


def test_the_stored_type_is_the_one_asked_for(tmp_path):
    path = str(tmp_path / "imported")
    write_weights(path, CASE.shape(), CASE.weights(4), dtype=torch.bfloat16)
    assert read_manifest(path).precision == "bfloat16"
    for name, tensor in iter_weights(path):
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, CASE.weights(4)[name].bfloat16())
    state = CASE.make(tmp_path)  # a wider type holds every number of a narrower one
    with CheckpointManager(str(tmp_path / "run"), CheckpointConfig()) as checkpoints:
        checkpoints.load(path, state)
    assert torch.equal(state.model.norm.weight, CASE.weights(4)["norm.weight"].bfloat16().float())


def test_wrong_weights_are_refused_and_nothing_is_left(tmp_path):
    path = str(tmp_path / "imported")
    missing, unknown, size = CASE.weights(1), CASE.weights(1), CASE.weights(1)
    del missing["norm.weight"]
    unknown["lm_head.weight"] = torch.zeros(1)
    size["embed.weight"] = torch.zeros(128, 6)
    cases = [
        (missing, "norm.weight: missing"), (unknown, "lm_head.weight: not a weight"),
        (size, r"embed.weight: expected size \[127, 6\], got \[128, 6\]"),
    ]  # fmt: skip
    for given, message in cases:
        with pytest.raises(InputError, match=rf"imported: {message}"):
            write_weights(path, CASE.shape(), given)
    (tmp_path / "ranks").write_bytes(b"other")
    with pytest.raises(InputError, match="ranks: expected SHA-256"):
        write_weights(path, CASE.shape(), CASE.weights(1), encoding=ENCODING, ranks_path=str(tmp_path / "ranks"))
    with pytest.raises(InputError, match="ranks2: no such file"):
        write_weights(path, CASE.shape(), CASE.weights(1), encoding=ENCODING, ranks_path=str(tmp_path / "ranks2"))
    assert os.listdir(tmp_path) == ["ranks"]
    os.mkdir(path)
    with pytest.raises(InputError, match="imported: is already there"):
        write_weights(path, CASE.shape(), CASE.weights(1))
    assert sorted(os.listdir(tmp_path)) == ["imported", "ranks"]


def test_verify_names_every_file_that_is_wrong(tmp_path):
    path = Path(save(tmp_path, 3))
    assert verify(str(path)) == []
    flip(path / "__0_0.distcp", 1000, 16)
    (path / "config.yaml").unlink()
    assert {os.path.basename(problem.file) for problem in verify(str(path))} == {"__0_0.distcp", "config.yaml"}
    (path / ".metadata").write_bytes(b"no pickle")
    problems = verify(str(path))
    assert [os.path.basename(problem.file) for problem in problems].count(".metadata") == 2  # hash, and unreadable
    (path / "manifest.json").write_text("{}")
    assert [str(problem) for problem in verify(str(path))] == [f"{path}: {path}/manifest.json: schema: missing"]


def test_verify_looks_for_every_weight_of_the_shape(tmp_path):
    """A manifest of a larger model over the files of a smaller one, every checksum right."""
    path = Path(save(tmp_path, 3))
    manifest = read_manifest(str(path))
    larger = CASE.shape(dim=8)
    (path / "manifest.json").write_bytes(type(manifest)(**(vars(manifest) | {"model": larger})).to_bytes())
    problems = [str(problem) for problem in verify(str(path))]
    assert len(problems) == len([size for name, size in CASE.sizes(larger).items() if 8 in size])
    assert any("embed.weight: expected size [127, 8], has [127, 6]" in problem for problem in problems)
