"""A dense model's checkpoint as one of a model with experts. The oracles are the plain model of the dense weights, a
fresh model's routers, and runs of the dense model."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.errors import InputError, QuernError
from quern.model.init import initialise
from quern.model.moe.config import MoEConfig
from quern.model.transformer import Transformer
from quern.train.checkpoint.format.manifest import read_manifest
from quern.train.checkpoint.tools import rewrite
from quern.train.checkpoint.tools.export import load_model
from quern.train.checkpoint.tools.reader import iter_weights, verify, write_weights
from quern.train.checkpoint.tools.upcycle import ORIGIN_FILE, upcycle
from quern.train.setup import check
from support.damage import flip
from support.distributed.ranks import run_ranks
from support.distributed.storages import LiveStorages
from support.oracles import plain_loop
from support.train import checkpoint_case as CASE
from support.train import run_case

pytestmark = pytest.mark.slow

MOE: dict[str, Any] = {"num_experts": 4, "top_k": 2, "normalize": True}
SHAPE = CASE.shape(num_layers=3)
TOKENS = (torch.arange(24).view(2, 12) * 7) % SHAPE.vocab_size


def weights() -> dict[str, torch.Tensor]:
    """Large enough for every layer to show in the logits."""
    generator = torch.Generator().manual_seed(3)
    sizes = CASE.sizes(SHAPE)
    return {name: torch.randn(size, generator=generator).double() * 0.7 for name, size in sizes.items()}


def save(folder: Path, dtype: torch.dtype = torch.float64) -> str:
    path = str(folder / "dense")
    write_weights(path, SHAPE, weights(), dtype=dtype)
    return path


@pytest.mark.parametrize(
    "moe",
    [
        MOE,
        {**MOE, "score": "sigmoid", "bias": True, "first_dense": 1},
        {**MOE, "num_experts": 6, "top_k": 3, "groups": 3, "top_groups": 2, "every": 2},
        {"num_experts": 3, "top_k": 3, "ffn_dim": 10},
        {**MOE, "top_k": 1, "capacity": 4.0},
    ],
    ids=["softmax", "sigmoid", "groups", "all-experts", "capacity"],
)
def test_logits_are_those_of_the_dense_model(tmp_path: Path, moe: dict[str, Any]) -> None:
    made, shape = upcycle(save(tmp_path), str(tmp_path / "out"), MoEConfig(**moe), seed=3)
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    expected = plain_loop.forward(weights(), SHAPE, TOKENS, positions, torch.zeros_like(TOKENS))
    with torch.no_grad():
        found = load_model(made.folder, compute_dtype=torch.float64)[0](TOKENS)
    assert (found - expected).abs().max() <= 1e-12 * expected.abs().max()
    held = dict(iter_weights(made.folder))
    assert shape.num_parameters == sum(t.numel() for name, t in held.items() if not name.endswith("ffn.bias"))
    assert verify(made.folder) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_copies_and_routers_a_fresh_models(tmp_path: Path, dtype: torch.dtype) -> None:
    given = {**MOE, "score": "sigmoid", "bias": True, "first_dense": 1}
    made, shape = upcycle(save(tmp_path, dtype), str(tmp_path / "out"), MoEConfig(**given), seed=8, files=3)
    other, _ = upcycle(save(tmp_path / "again", dtype), str(tmp_path / "other"), MoEConfig(**given), seed=9)
    fresh = Transformer(shape)
    initialise(fresh, 8)
    routers = {name: tensor for name, tensor in fresh.state_dict().items() if "router" in name}
    assert sorted(routers) == ["blocks.1.ffn.router.weight", "blocks.2.ffn.router.weight"]
    dense, left, others = weights(), dict(CASE.sizes(SHAPE)), dict(iter_weights(other.folder))
    for name, tensor in iter_weights(made.folder):
        if name in routers:
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, routers[name])
            assert not torch.equal(tensor, others[name])
            continue
        assert torch.equal(tensor, others[name])
        if name.endswith("ffn.bias"):
            assert torch.equal(tensor, torch.zeros(4))
            continue
        source = name.replace("experts.w", "w") + (".weight" if "experts" in name else "")
        assert tensor.dtype == dtype
        for own in tensor if "experts" in name else [tensor]:
            assert torch.equal(own, dense[source].to(dtype))
        del left[source]
    assert left == {}
    assert read_manifest(made.folder).precision == ("float32" if dtype is torch.float32 else "bfloat16+float32")
    assert len(made.files) == 3


@pytest.mark.parametrize(
    "piece", [400, pytest.param(1500, marks=pytest.mark.long)], ids=["of-an-expert", "of-some-experts"]
)
def test_no_more_than_a_piece_and_its_source_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """Counted in the storages that every operator leaves. A matrix of all experts of a layer has 7,680 bytes here."""
    source = save(tmp_path)
    monkeypatch.setattr(rewrite, "PIECE_BYTES", piece)
    most = []

    class Counted(LiveStorages):
        def __torch_dispatch__(self, *given: Any) -> Any:
            self.seen = [(storage, size) for storage, size in self.seen if not storage.expired()]
            before = len(self.seen)
            out = super().__torch_dispatch__(*given)
            if isinstance(out, torch.Tensor) and out.is_meta:
                del self.seen[before:]
            most.append(self.bytes())
            return out

    with Counted():
        made, _ = upcycle(source, str(tmp_path / "out"), MoEConfig(**{**MOE, "num_experts": 16}))
    # the last piece, this one and what it is made of; of a router the 16 rows whose random numbers come at once
    assert max(most) <= 3 * piece + 4 * 16 * SHAPE.dim * 4
    assert sum(made.files.values()) > 3 * 3 * 7680
    dense = weights()
    for name, tensor in iter_weights(made.folder):
        if "experts" in name:
            whole = dense[f"{name.replace('experts.', '')}.weight"]
            assert torch.equal(tensor, whole.expand_as(tensor))


def test_the_rest_stays_and_says_where_it_came_from(tmp_path: Path) -> None:
    source, run = save(tmp_path), "ab" * 16
    file = Path(source, "manifest.json")
    before = rewrite.replace(read_manifest(source), run=run, step=7, tokens=900, scalars={"x": 1.0})
    file.write_bytes(before.to_bytes())
    made, shape = upcycle(source, str(tmp_path / "out"), MoEConfig(**MOE), seed=4)
    after = read_manifest(made.folder)
    changed = {"model": shape, "scalars": {}, "files": after.files, "written_by": after.written_by}
    assert vars(after) == vars(before) | changed
    origin = json.loads(Path(made.folder, ORIGIN_FILE).read_text())
    checksum = json.loads(file.read_text())["checksum"]
    assert origin == {"source": source, "checksum": checksum, "run": run, "step": 7, "seed": 4}
    again = rewrite.reshard(made.folder, str(tmp_path / "again")).folder
    assert Path(again, ORIGIN_FILE).read_bytes() == Path(made.folder, ORIGIN_FILE).read_bytes()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"normalize": False},
            "moe.normalize: expected true, so that the weights .* sum to one, got false",
        ),
        ({"normalize": False, "score": "sigmoid", "top_k": 4}, "moe.normalize: expected true"),
        ({"scale": 2.5}, "moe.scale: expected 1, so that .*, got 2.5"),
        ({"ffn_dim": 5}, "moe.ffn_dim: expected 10, the dense model's, .*, got 5"),
        ({"shared_ffn_dim": 10}, "moe.shared_ffn_dim: expected 0, .*, got 10"),
        ({"capacity": 1.9}, "moe.capacity: expected null, or 2 and more, .*, got 1.9"),
        ({"first_dense": 3}, "moe.first_dense: 3 with every 1 leave no layer of num_layers"),
        ({"num_experts": None}, "moe.num_experts: missing"),
    ],
    ids=["normalize", "sigmoid", "scale", "ffn_dim", "shared_ffn_dim", "capacity", "first_dense", "num_experts"],
)
def test_what_would_not_equal_the_dense_model_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    source = save(tmp_path)
    with pytest.raises(InputError, match=said):
        upcycle(source, str(tmp_path / "out"), MoEConfig(**{**MOE, **changes}))
    assert os.listdir(tmp_path) == ["dense"]


def test_sources_that_cannot_be_taken(tmp_path: Path) -> None:
    source, moe = save(tmp_path), MoEConfig(**MOE)
    sparse = upcycle(source, str(tmp_path / "sparse"), moe)[0].folder
    lacking = rewrite.open_source(source, str(tmp_path / "lacking"))[0]
    del lacking.tensors["model.blocks.1.ffn.w3.weight"]
    write = partial(rewrite.write_anew, lacking, str(tmp_path / "lacking"), lacking.tensors, lacking.read)
    write(None, None, lacking.manifest, weights_only=True)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(InputError, match=r"sparse/manifest\.json: expected the checkpoint of a dense model, got"):
        upcycle(sparse, str(tmp_path / "out"), moe)
    with pytest.raises(InputError, match=r"\.metadata: model\.blocks\.1\.ffn\.w3\.weight: missing"):
        upcycle(str(tmp_path / "lacking"), str(tmp_path / "out"), moe)
    with pytest.raises(InputError, match="sparse: is already there"):
        upcycle(source, sparse, moe)
    flip(Path(source, "__0_0.distcp"))
    with pytest.raises(QuernError, match="the checkpoint is damaged, nothing was written"):
        upcycle(source, str(tmp_path / "out"), moe)
    assert sorted(os.listdir(tmp_path)) == before


# ---- a run begins with it


def _begun(folder: str, paths: list[str], name: str, **changes: Any) -> dict[int, dict[str, Any]]:
    """What a run of one step says, whose weights stay: its loss and the held-out loss are of those it began with."""
    base = {
        "precision": "fp64", "steps": 1, "validation": {"interval": 1},
        "optimizer": {"lr": 1e-30, "weight_decay": 0.0}, "schedule": {"warmup": 0},
    }  # fmt: skip
    run_case.live(run_case.settings(f"{folder}/{name}", paths, **run_case._merge(base, changes)))
    return run_case.rows(f"{folder}/{name}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str]:
    """A dense run of 3 steps, and the same weights with experts."""
    folder = tmp_path_factory.mktemp("runs")
    paths = run_case.write_corpus(folder / "data", {"web": 40, "code": 20, "web.val": 8, "code.val": 6})[:2]
    config = run_case.settings(folder / "dense", paths, precision="fp64", steps=3, model={"num_layers": 2})
    run_case.live(config)
    made, _ = upcycle(f"{folder}/dense/checkpoints/step_00000003", str(folder / "sparse"), MoEConfig(**MOE), seed=5)
    return folder, paths, made.folder


def _compared(found: dict[int, dict[str, Any]], expected: dict[int, dict[str, Any]]) -> None:
    assert found[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-12)
    assert found[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=1e-12)
    assert found[-1]["tokens"] == expected[-1]["tokens"] > 0


SPARSE = {"model": {"num_layers": 2, "moe": MOE}}


def test_a_run_begins_where_the_dense_one_ended(trained: tuple[Path, list[str], str]) -> None:
    folder, paths, sparse = trained
    expected = _begun(str(folder), paths, "on", model={"num_layers": 2}, init_from=str(folder / "dense"))
    found = _begun(str(folder), paths, "off", **SPARSE, init_from=sparse)
    _compared(found, expected)
    assert found[0]["experts"]["unused"] < 8


@pytest.mark.long
def test_under_fsdp_too(trained: tuple[Path, list[str], str]) -> None:
    folder, paths, sparse = trained
    expected = _begun(str(folder), paths, "alone", model={"num_layers": 2}, init_from=str(folder / "dense"))
    changes = {**SPARSE, "init_from": sparse, "parallel": {"dp_shard": 2}, "micro_batch": 2}
    first, _ = run_ranks(_called, 2, str(folder), paths, changes)
    _compared(first, expected)


def _called(folder: str, paths: list[str], changes: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return _begun(folder, paths, "sharded", **changes)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"dim": 64}, "model.dim is 64 in the config and 32 in the checkpoint"),
        ({"num_layers": 1}, "model.num_layers is 1 in the config and 2 in the checkpoint"),
        ({"num_heads": 2, "head_dim": 8}, "model.num_heads is 2 in the config and 4 in the checkpoint"),
        ({"moe": {**MOE, "num_experts": 8}}, "model.moe is {'num_experts': 8.* and {'num_experts': 4"),
        ({"moe": None}, "model.moe is None in the config and {'num_experts': 4"),
    ],
)
def test_a_run_of_another_model_is_refused(
    trained: tuple[Path, list[str], str], tmp_path: Path, model: dict[str, Any], said: str
) -> None:
    _, paths, sparse = trained
    changes = run_case._merge({**SPARSE, "precision": "fp64", "init_from": sparse}, {"model": model})
    with pytest.raises(InputError, match=said):
        check(run_case.settings(tmp_path / "run", paths, **changes), 1)
