"""Reading stored tensors in slices, and comparing two checkpoints. The oracle is NumPy on numbers written here."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    MetadataIndex,
)

from quern.errors import InputError, QuernError
from quern.train.checkpoint.format import slices
from quern.train.checkpoint.format.manifest import read_manifest
from quern.train.checkpoint.format.slices import StoredTensors, boxes
from quern.train.checkpoint.tools import compare as comparison
from quern.train.checkpoint.tools.compare import compare
from quern.train.checkpoint.tools.reader import verify, write_weights
from quern.train.config import CheckpointConfig
from support.train import checkpoint_case as CASE
from support.train.pieces import write_pieces
from support.train.saves import CheckpointManager
from support.train.tier_case import record

pytestmark = pytest.mark.slow

W2 = "blocks.1.ffn.w2.weight"  # 6 rows of 10


def write(path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> str:
    write_weights(str(path), CASE.shape(), tensors, dtype=dtype)
    return str(path)


def save(folder: Path, step: int, *, key: int | None = None, layout: dict[str, int] | None = None, **scalars) -> str:
    """A whole checkpoint of the trainer's own, with moments and an extra tensor."""
    folder.mkdir(exist_ok=True)
    state = CASE.make(folder)
    if layout:
        state = replace(state, facts=CASE.facts(folder, CASE.shape(), layout=layout))
    CASE.fill(state, step if key is None else key, step=step)
    with CheckpointManager(str(folder / "run"), CheckpointConfig()) as checkpoints:
        return checkpoints.save(step, state, CASE.position(step, **scalars)).path


def sign(path: str | Path, changes: dict[str, Any] | None = None, **files: bytes) -> None:
    """Replace files (``_`` for ``.``) and fields, and make the manifest agree."""
    records = dict(read_manifest(str(path)).files)
    for name, data in files.items():
        name = name.replace("dot_", ".").replace("_yaml", ".yaml")
        Path(path, name).write_bytes(data)
        records[name] = record(data)
    manifest = replace(read_manifest(str(path)), files=records, **(changes or {}))
    Path(path, "manifest.json").write_bytes(manifest.to_bytes())


def cut(path: str | Path, tensors: dict[str, torch.Tensor], rng: np.random.Generator, *, odd: bool = False) -> None:
    """Write the tensors of a checkpoint anew in random pieces. ``odd``: they lie transposed in their storage."""
    for file in Path(path).glob("*.distcp"):
        file.unlink()
    metadata = write_pieces(Path(path), tensors, rng, odd=odd)
    Path(path, ".metadata").write_bytes(pickle.dumps(metadata))
    files = {file.name: record(file.read_bytes()) for file in Path(path).iterdir() if file.name != "manifest.json"}
    Path(path, "manifest.json").write_bytes(replace(read_manifest(str(path)), files=files).to_bytes())


def bits(array: np.ndarray) -> np.ndarray:
    return array.view({2: np.uint16, 4: np.uint32, 8: np.uint64}[array.itemsize])


# ---- boxes and slices


@given(st.lists(st.integers(0, 7), max_size=4), st.integers(1, 60))
def test_boxes_follow_the_elements_in_their_order(size, limit):
    whole = np.arange(math.prod(size)).reshape(size)
    parts = []
    for box in boxes(size, limit):
        part = whole[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        assert part.shape == tuple(box.sizes)
        assert part.size <= limit
        parts.append(part.reshape(-1))
    assert np.array_equal(np.concatenate(parts), np.arange(math.prod(size)))


@pytest.mark.parametrize("odd", [False, True])
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.integers(1, 900))
def test_every_slice_is_the_tensors_however_it_was_cut(tmp_path_factory, odd, seed, limit):
    """Random grids of chunks in any order, over both dimensions; small slices and large ones."""
    path = write(tmp_path_factory.mktemp("cut") / "c", CASE.weights(1))
    held = {f"model.{name}": tensor for name, tensor in CASE.weights(1).items()}
    cut(path, held, np.random.default_rng(seed), odd=odd)
    assert verify(path) == []
    stored = StoredTensors(path)
    assert list(stored.tensors) == sorted(held)
    for name in ("model.embed.weight", f"model.{W2}", "model.norm.weight"):
        for box in boxes(held[name].shape, limit):
            expected = held[name].numpy()[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
            assert np.array_equal(stored.read(name, box).numpy(), expected)


def test_no_more_than_a_slice_is_read_at_a_time(tmp_path, monkeypatch):
    """One chunk of 3 kB, 6 rows of 24 bytes to a slice: it is never loaded whole, and no byte is read twice."""
    a, b = (write(tmp_path / name, CASE.weights(1)) for name in "ab")
    held = []
    fill, load = slices.fill, slices.load_record
    monkeypatch.setattr(slices, "fill", lambda stream, buffer: (held.append(len(buffer)), fill(stream, buffer))[1])
    monkeypatch.setattr(
        slices, "load_record", lambda *given: load(*given) if given[2] == "meta" else pytest.fail("loaded whole")
    )
    monkeypatch.setattr(comparison, "SLICE_BYTES", 150)
    assert compare(a, b).equal
    assert max(held) == 150 // 24 * 24
    assert sum(held) == 2 * sum(tensor.nbytes for tensor in CASE.weights(1).values())


# ---- tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("slice_bytes", [100, 1 << 25])
def test_differences_are_numpys(tmp_path, monkeypatch, dtype, slice_bytes):
    monkeypatch.setattr(comparison, "SLICE_BYTES", slice_bytes)
    monkeypatch.setattr(comparison, "_BLOCK", 7)
    ours = {name: tensor.to(dtype) for name, tensor in CASE.weights(1).items()}
    theirs = {name: tensor.clone() for name, tensor in ours.items()}
    rng = np.random.default_rng(3)
    for name in ("embed.weight", W2, "norm.weight"):
        flat = theirs[name].view(-1)
        for place in rng.permutation(len(flat))[: len(flat) // 3].tolist():
            flat[place] += rng.choice([-3.0, 0.5, 0.0, 100.0])
    found = compare(write(tmp_path / "a", ours, dtype), write(tmp_path / "b", theirs, dtype))
    assert {tensor.name for tensor in found.tensors if not tensor.equal} == {
        f"model.{name}" for name in ("embed.weight", W2, "norm.weight")
    }
    assert found.equal_tensors == len(ours) - 3
    assert not found.equal
    for tensor in found.tensors:
        name = tensor.name.removeprefix("model.")
        x, y = ours[name].double().numpy(), theirs[name].double().numpy()
        assert tensor.differing == np.count_nonzero(x != y)
        assert tensor.max_abs == np.abs(x - y).max()
        assert tensor.relative == np.abs(x - y).max() / np.abs(y).max()
        assert tensor.dtypes == dict.fromkeys("ab", str(dtype).removeprefix("torch."))
        assert tensor.sizes == dict.fromkeys("ab", tuple(x.shape))
    assert [tensor.name for tensor in found.tensors] == [
        tensor.name for tensor in sorted(found.tensors, key=lambda tensor: (-tensor.relative, tensor.name))
    ]


def test_numbers_that_are_none(tmp_path):
    """By hand: NaNs by their bits, infinities, signed zeros."""
    inf, nan = math.inf, math.nan
    quiet, other = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    values = {  # ours, theirs → differing, max |a−b|, relative, NaN in a alone, in b alone
        "norm.weight": ([1, nan, 3, 4, 5, inf], [1, nan, 3, 4, 5, inf], (0, 0, 0, 0, 0)),
        "blocks.0.ffn_norm.weight": ([1, nan, 3, 4, 5, 6], [1, 2, 3, nan, nan, 7], (4, 1, inf, 1, 2)),
        "blocks.1.ffn_norm.weight": ([0, 1, 1, 1, 1, 1], [-0.0, 1, 1, 1, 1, 1], (1, 0, 0, 0, 0)),
        "blocks.0.attention_norm.weight": ([inf, 1, 2, 3, 4, 5], [-inf, 1, 2, 3, 4, 8], (2, inf, inf, 0, 0)),
        "blocks.1.attention_norm.weight": ([0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0], (1, 1, inf, 0, 0)),
        "blocks.0.attention.q_norm.weight": ([quiet, 8], [other, 4], (2, 4, 1, 0, 0)),
    }
    assert bits(np.array([quiet]))[0] != bits(np.array([other]))[0]
    ours, theirs = CASE.weights(1), CASE.weights(1)
    for name, (x, y, _) in values.items():
        ours[name] = torch.from_numpy(np.array(x, np.float32))
        theirs[name] = torch.from_numpy(np.array(y, np.float32))
    found = {t.name: t for t in compare(write(tmp_path / "a", ours), write(tmp_path / "b", theirs)).tensors}
    for name, (_, _, expected) in values.items():
        t = found[f"model.{name}"]
        assert (t.differing, t.max_abs, t.relative, t.nans["a"], t.nans["b"]) == expected, name
        assert t.equal == (expected[0] == 0)
    assert all(t.equal for name, t in found.items() if name.removeprefix("model.") not in values)
    text = json.dumps(found["model.blocks.0.ffn_norm.weight"].to_dict(), allow_nan=False)
    assert json.loads(text)["relative"] == "inf"


def test_other_types_are_compared_by_value_and_are_not_equal(tmp_path):
    ours = {name: tensor.bfloat16().float() for name, tensor in CASE.weights(1).items()}
    ours[W2] = CASE.weights(1)[W2]
    ours["norm.weight"] = torch.full((6,), math.nan)
    theirs = CASE.weights(1) | {"norm.weight": torch.full((6,), math.nan)}
    found = compare(write(tmp_path / "a", ours), write(tmp_path / "b", theirs, torch.bfloat16))
    assert found.equal_tensors == 0
    for tensor in found.tensors:
        assert tensor.dtypes == {"a": "float32", "b": "bfloat16"}
        x = ours[tensor.name.removeprefix("model.")].double().numpy()
        y = theirs[tensor.name.removeprefix("model.")].bfloat16().double().numpy()
        assert tensor.differing == np.count_nonzero((x != y) & ~np.isnan(x))
        assert (tensor.differing > 0) == (tensor.name == f"model.{W2}")


def test_how_tensors_were_cut_does_not_matter(tmp_path):
    a, b = write(tmp_path / "a", CASE.weights(1)), write(tmp_path / "b", CASE.weights(1))
    held = {f"model.{name}": tensor for name, tensor in CASE.weights(1).items()}
    cut(b, held, np.random.default_rng(5))
    assert len(os.listdir(b)) > len(os.listdir(a))
    assert compare(a, b).equal
    held["model.embed.weight"][126, 5] += 1
    cut(b, held, np.random.default_rng(6))
    (different,) = [tensor for tensor in compare(a, b).tensors if not tensor.equal]
    assert (different.name, different.differing) == ("model.embed.weight", 1)


def test_moments_are_compared_unless_one_side_alone_has_any(tmp_path):
    a, b = save(tmp_path / "x", 3), save(tmp_path / "y", 3)
    assert compare(a, b, moments=True).equal
    c = save(tmp_path / "z", 3, key=4)
    count = len(CASE.sizes(CASE.shape()))
    without, with_moments = compare(a, c, moments=False), compare(a, c)
    assert {t.name for t in without.tensors if t.equal} == {"optimizer.step", "extra.losses"}
    assert len(without.tensors) == count + 2
    assert len(with_moments.tensors) == 3 * count + 2
    (moment,) = [t for t in with_moments.tensors if t.name == f"optimizer.state.{W2}.exp_avg_sq"]
    x, y = (CASE.numbers("exp_avg_sq", W2, (6, 10), key).numpy().astype(np.float64) for key in (3, 4))
    assert moment.max_abs == np.abs(x - y).max()
    assert with_moments == compare(a, c, moments=True)
    write_weights(str(tmp_path / "w"), CASE.shape(), CASE.weights(1))
    alone = compare(a, str(tmp_path / "w"))
    assert not alone.moments
    assert not [t for t in alone.tensors if t.name.startswith("optimizer.state.")]


def test_tensors_without_a_counterpart_come_first(tmp_path):
    a = save(tmp_path / "x", 3)
    other = CASE.weights(3, dim=8)
    write_weights(str(tmp_path / "b"), CASE.shape(dim=8), other)
    found = compare(a, str(tmp_path / "b"), moments=True)
    first = [t for t in found.tensors if t.differing is None]
    assert list(found.tensors[: len(first)]) == first
    resized = {n: s for n, s in CASE.sizes(CASE.shape()).items() if s != tuple(other[n].shape)}
    assert {t.name for t in first if len(t.sizes) == 2} == {f"model.{name}" for name in resized}
    assert {t.name for t in first if set(t.sizes) == {"a"}} == {
        "optimizer.step", "extra.losses",
        *(f"optimizer.state.{n}.{m}" for n in CASE.sizes(CASE.shape()) for m in ("exp_avg", "exp_avg_sq")),
    }  # fmt: skip
    assert found.to_dict()["tensors"][0]["differing"] is None


# ---- facts


def test_facts_are_those_that_differ_and_only_the_states_decide(tmp_path):
    a, b = save(tmp_path / "x", 3, scale=1.0), save(tmp_path / "y", 3, scale=1.0, layout={"dp_shard": 4})
    sign(b, {"written_by": {"quern": "9"}, "precision": "bf16", "ledger_offset": 5})
    found = compare(a, b)
    assert found.equal
    before, after = (json.loads(Path(path, "manifest.json").read_text()) for path in (a, b))
    expected = {
        "layout.dp_replicate": {"a": 1}, "layout.dp_shard": {"a": 1, "b": 4}, "ledger_offset": {"a": 0, "b": 5},
        "precision": {"a": "fp32", "b": "bf16"}, "written_by.quern": {"a": before["written_by"]["quern"], "b": "9"},
        "written_by.torch": {"a": before["written_by"]["torch"]}, "run": {"a": before["run"], "b": after["run"]},
    }  # fmt: skip
    assert {fact.name: fact.values for fact in found.facts} == expected
    assert not any(fact.state for fact in found.facts)
    for field, value, name in (
        ("data_step", 9, "data_step"), ("tokens", 9, "tokens"), ("order", "cd" * 16, "order"),
        ("corpus_versions", {"run-1/web/1": 3}, "corpus.versions.run-1/web/1"),
        ("scalars", {"scale": 2.0}, "scalars.scale"),
        ("corpus_fingerprint", "0", "corpus.fingerprint"),
    ):  # fmt: skip
        c = save(tmp_path / field, 3, scale=1.0)
        sign(c, {field: value, "run": before["run"]})
        found = compare(a, c)
        assert [(fact.name, fact.state) for fact in found.facts] == [(name, True)]
        assert not found.equal
    assert compare(a, save(tmp_path / "w", 3)).facts[1].to_dict() == {"name": "scalars.scale", "state": True, "a": 1.0}


def test_config_keys_that_differ_are_listed_with_both_values(tmp_path):
    a, b = save(tmp_path / "x", 3), save(tmp_path / "y", 3)
    before = {"run_dir": "x", "steps": 10, "lr": 1e-3, "data": [{"path": "p"}], "empty": {}, "same": {"k": [1, 2]}}
    after = {
        "run_dir": "y", "steps": "10", "data": [{"path": "p"}, {"path": "q"}], "empty": {"k": None},
        "same": {"k": [1, 2]},
    }  # fmt: skip
    for path, config in ((a, before), (b, after)):
        sign(path, config_yaml=json.dumps(config).encode())
    found = compare(a, b)
    assert found.equal
    assert {fact.name: fact.values for fact in found.config} == {
        "run_dir": {"a": "x", "b": "y"}, "steps": {"a": 10, "b": "10"}, "lr": {"a": 1e-3}, "data.1.path": {"b": "q"},
        "empty.k": {"b": None},
    }  # fmt: skip


# ---- what is wrong is named


def test_a_damaged_or_foreign_checkpoint_is_named(tmp_path):
    a = save(tmp_path / "x", 3)
    b = Path(save(tmp_path / "y", 3))
    tensor_file = b / "__0_0.distcp"
    whole = tensor_file.read_bytes()
    sign(b, dot_metadata=pickle.dumps(CASE.Bomb(tmp_path / "marker")))
    with pytest.raises(InputError, match=r"y/.*\.metadata: names (posix|os)\.system"):
        compare(a, str(b))
    assert not (tmp_path / "marker").exists()
    tensor_file.write_bytes(whole[:-1])
    with pytest.raises(InputError, match=rf"distcp: expected {len(whole)} bytes, has {len(whole) - 1}"):
        compare(a, str(b))
    tensor_file.unlink()
    with pytest.raises(InputError, match=r"y/.*distcp: missing"):
        compare(a, str(b))
    (b / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match=r"y/.*manifest\.json: schema: missing"):
        compare(a, str(b))
    with pytest.raises(InputError, match=r"none/manifest\.json: no such file"):
        compare(a, str(tmp_path / "none"))


@pytest.mark.parametrize(
    "value",
    [{"a": 1}, torch.zeros(5), torch.zeros(2, 3), torch.zeros(6, dtype=torch.float64), CASE.Bomb, None],
)
def test_a_record_that_is_not_the_tensor_described_is_named(tmp_path, value):
    path = Path(write(tmp_path / "a", CASE.weights(1)))
    file = path / "__0_0.distcp"
    data = file.read_bytes()
    index = MetadataIndex("model.norm.weight", torch.Size([0]))
    stream = io.BytesIO()
    torch.save(CASE.Bomb(tmp_path / "marker") if value is CASE.Bomb else value, stream)
    forged = b"no zip" if value is None else stream.getvalue()
    # the record is put at the end of the file, and the metadata led to it
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.storage_data[index] = _StorageInfo(file.name, len(data), len(forged))
    sign(path, dot_metadata=pickle.dumps(metadata))
    records = dict(read_manifest(str(path)).files)
    file.write_bytes(data + forged)
    records[file.name] = record(data + forged)
    (path / "manifest.json").write_bytes(replace(read_manifest(str(path)), files=records).to_bytes())
    assert verify(str(path)) == []
    with pytest.raises(
        InputError, match=r"distcp: model\.norm\.weight: not a tensor of size \[6\] and type torch.float32"
    ):
        compare(str(path), str(path))
    assert not (tmp_path / "marker").exists()


def test_chunks_that_leave_a_hole_are_named(tmp_path):
    """The first half is there, and once more where the second should be: as many elements as there are."""
    path = Path(write(tmp_path / "a", CASE.weights(1)))
    cut(
        path,
        {f"model.{n}": t[:3] if n == "norm.weight" else t for n, t in CASE.weights(1).items()},
        np.random.default_rng(0),
    )
    metadata = pickle.loads((path / ".metadata").read_bytes())
    norm = metadata.state_dict_metadata["model.norm.weight"]
    norm.size, norm.chunks = torch.Size([6]), norm.chunks * 2
    sign(path, dot_metadata=pickle.dumps(metadata))
    stored = StoredTensors(str(path))
    for limit in (6, 2):
        box = list(boxes([6], limit))[-1]
        with pytest.raises(InputError, match=r"\.metadata: model\.norm\.weight: its chunks do not cover it, each"):
            stored.read("model.norm.weight", box)


def test_a_file_that_shrinks_meanwhile_is_an_error(tmp_path):
    path = write(tmp_path / "a", CASE.weights(1))
    stored = StoredTensors(path)
    (box,) = boxes([127, 6], 1000)
    stored.read("model.embed.weight", box)
    os.truncate(Path(path, "__0_0.distcp"), 10)
    with pytest.raises(QuernError, match=r"distcp: cannot be read \(the file ends early\)"):
        stored.read("model.embed.weight", box)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff\xfe\x00", "not valid YAML"), (b"[" * 500, "not valid YAML"),
        (b"a: &a [*a]", "at most 100000 keys and 64 levels"),
        (b"a: &a [x, x, x, x, x, x, x, x, x, x]\n" + b"".join(
            b"%c: &%c [%s]\n" % (98 + i, 98 + i, b", ".join([b"*%c" % (97 + i)] * 10)) for i in range(9)
        ), "at most 100000 keys"),
        (b"#" * (5 << 20), "a config of at most 4194304 bytes"),
        (b"!!python/object/apply:os.system [ls]", "not valid YAML"),
    ],
)  # fmt: skip
def test_a_hostile_config_is_named(tmp_path, text, message):
    a, b = save(tmp_path / "x", 3), save(tmp_path / "y", 3)
    sign(b, config_yaml=text)
    with pytest.raises(InputError, match=rf"y/.*config\.yaml: .*{message}"):
        compare(a, b)
