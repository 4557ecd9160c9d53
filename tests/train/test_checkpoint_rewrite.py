"""Checkpoints written anew in other files. The oracles are torch's own readers and numbers known by name."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from quern.errors import InputError, QuernError
from quern.train.checkpoint.format.manifest import list_checkpoints, read_manifest
from quern.train.checkpoint.tools import rewrite
from quern.train.checkpoint.tools.reader import iter_weights, verify, write_weights
from quern.train.checkpoint.tools.rewrite import MIN_FILE_BYTES, reshard
from quern.train.config import CheckpointConfig
from support.damage import flip
from support.processes import environment
from support.train import checkpoint_case as CASE
from support.train import run_case
from support.train.saves import CheckpointManager

pytestmark = pytest.mark.slow

STEP = 5
SCALARS = {"scale": 0.5, "worst": float("inf"), "none": None}


def save(folder: Path, *, dim: int = 6) -> str:
    folder.mkdir(exist_ok=True)
    state = replace(CASE.make(folder, multiple=256, dim=dim), extra={"losses": torch.tensor([1.0, float("nan"), -0.0])})
    CASE.fill(state, STEP)
    with CheckpointManager(str(folder / "run"), CheckpointConfig()) as checkpoints:
        return checkpoints.save(STEP, state, CASE.position(STEP, **SCALARS)).path


def expected(*, dim: int = 6, weights_only: bool = False) -> dict[str, torch.Tensor]:
    sizes = CASE.sizes(CASE.shape(dim=dim))
    held = {f"model.{name}": tensor for name, tensor in CASE.weights(STEP, dim=dim).items()}
    if weights_only:
        return held
    for moment in ("exp_avg", "exp_avg_sq"):
        held |= {f"optimizer.state.{n}.{moment}": CASE.numbers(moment, n, size, STEP) for n, size in sizes.items()}
    extra = torch.tensor([1.0, float("nan"), -0.0])
    return held | {"optimizer.step": torch.tensor(float(STEP), dtype=torch.float64), "extra.losses": extra}


def by_torch(path: str, folder: Path) -> dict[str, torch.Tensor]:
    """Everything in a checkpoint, as torch's own converter reads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(path, folder / "torch.pt")
    return torch.load(folder / "torch.pt", weights_only=True)


def same_bits(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    assert found.keys() == wanted.keys()
    return all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and found[name].contiguous().numpy().tobytes() == tensor.contiguous().numpy().tobytes()
        for name, tensor in wanted.items()
    )


def tensor_files(path: str) -> dict[str, int]:
    return {name: os.path.getsize(os.path.join(path, name)) for name in os.listdir(path) if name.endswith(".distcp")}


CASES = [
    ({}, False), ({"files": 2}, True), ({"files": 7}, False), ({"files": 200}, False),
    ({"file_size": MIN_FILE_BYTES}, False), ({"file_size": MIN_FILE_BYTES}, True), ({"file_size": 1 << 40}, True),
]  # fmt: skip


@pytest.mark.parametrize(("options", "weights_only"), CASES)
def test_torch_reads_every_tensor_bit_for_bit(tmp_path, options, weights_only):
    source, out = save(tmp_path), str(tmp_path / "out")
    made = reshard(source, out, **options, weights_only=weights_only)
    assert same_bits(by_torch(out, tmp_path), expected(weights_only=weights_only))
    files = tensor_files(out)
    assert made.files == files
    assert sorted(files) == sorted(f"__0_{number}.distcp" for number in range(len(files)))
    if "file_size" in options:
        assert max(files.values()) <= options["file_size"]
        assert len(files) == (1 if options["file_size"] > 1 << 20 else 1 if weights_only else 3)
    else:
        assert len(files) == options.get("files", 1)
    assert verify(out) == []
    assert sorted(os.listdir(tmp_path)) == ["out", "ranks.tiktoken", "run", "torch.pt"]
    assert made.optimizer == (not weights_only)


def test_everything_else_stays(tmp_path):
    source, out = save(tmp_path), str(tmp_path / "out")
    file = Path(source, "manifest.json")
    before = replace(read_manifest(source), written_by={"quern": "0.0"}, layout={"dp_shard": 8})
    file.write_bytes(before.to_bytes())
    made = reshard(source, out, files=3)
    after = read_manifest(out)
    assert vars(after) == vars(before) | {"files": after.files, "written_by": after.written_by}
    assert set(after.written_by) == {"quern", "torch"}
    assert after.written_by["torch"] == torch.__version__
    for name in ("config.yaml", "encoding.tiktoken"):
        assert Path(out, name).read_bytes() == Path(source, name).read_bytes()
    assert made.to_dict()["files"] == tensor_files(out)
    assert (made.source, made.folder, made.step) == (source, out, STEP)
    weights = reshard(source, str(tmp_path / "weights"), weights_only=True)
    expected_fields = {"optimizer": False, "scalars": {}, "precision": "float32"}
    found = read_manifest(weights.folder)
    assert vars(found) == vars(before) | expected_fields | {"files": found.files, "written_by": found.written_by}


@pytest.mark.parametrize("multiple", [1, 128, 256])
def test_a_trainer_loads_it_under_any_padding(tmp_path, multiple):
    out = reshard(save(tmp_path), str(tmp_path / "out"), files=9).folder
    state = CASE.make(tmp_path, multiple=multiple)
    with CheckpointManager(str(tmp_path / "other"), CheckpointConfig()) as checkpoints:
        found = checkpoints.load(out, state)
    assert CASE.differences(state, STEP) == []
    assert same_bits(dict(found.extra), {"losses": expected()["extra.losses"]})
    assert found.manifest.scalars == SCALARS


def test_what_was_cut_is_put_together_again(tmp_path):
    """Many files and back to one: the same bytes as at once."""
    source = save(tmp_path)
    many = reshard(source, str(tmp_path / "many"), files=60)
    pieces = FileSystemReader(many.folder).read_metadata().state_dict_metadata
    assert len(pieces["model.embed.weight"].chunks) > 2
    back, direct = reshard(many.folder, str(tmp_path / "back")), reshard(source, str(tmp_path / "direct"))
    for name in ("__0_0.distcp", ".metadata", "manifest.json"):
        assert Path(back.folder, name).read_bytes() == Path(direct.folder, name).read_bytes()


def test_a_16_bit_checkpoint_stays_one(tmp_path):
    weights = CASE.weights(1)
    write_weights(str(tmp_path / "in"), CASE.shape(), weights, dtype=torch.bfloat16)
    out = reshard(str(tmp_path / "in"), str(tmp_path / "out"), files=5, weights_only=True).folder
    assert read_manifest(out).precision == "bfloat16"
    for name, tensor in iter_weights(out):
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, weights[name].bfloat16())


def test_files_are_of_about_equal_size(tmp_path):
    """One large tensor among small ones; each file within 1.25 of the average and what torch.save adds."""
    source = save(tmp_path, dim=48)
    total = sum(tensor.nbytes for tensor in expected(dim=48).values())
    for count in (2, 9):
        out = str(tmp_path / f"out{count}")
        sizes = reshard(source, out, files=count).files.values()
        chunks = FileSystemReader(out).read_metadata().storage_data
        added = {name: 2048 * sum(info.relative_path == name for info in chunks.values()) for name in tensor_files(out)}
        assert len(sizes) == count
        assert all(size - added[name] <= 1.25 * total / count for name, size in tensor_files(out).items())
        assert min(sizes) > 0.5 * max(sizes)
    limit = 90_000
    sizes = list(reshard(source, str(tmp_path / "bounded"), file_size=limit).files.values())
    assert max(sizes) <= limit
    assert min(sizes[:-1]) >= 0.7 * limit
    assert same_bits(by_torch(str(tmp_path / "bounded"), tmp_path), expected(dim=48))


def test_no_more_than_a_piece_is_held(tmp_path, monkeypatch):
    source = save(tmp_path)
    largest = []
    read = rewrite.StoredTensors.read

    def watched(self, name, box):
        tensor = read(self, name, box)
        largest.append(tensor.untyped_storage().nbytes())
        return tensor

    monkeypatch.setattr(rewrite.StoredTensors, "read", watched)
    monkeypatch.setattr(rewrite, "PIECE_BYTES", 500)
    out = reshard(source, str(tmp_path / "out")).folder
    assert max(largest) <= 500
    assert sum(largest) == sum(tensor.nbytes for tensor in expected().values())
    assert same_bits(by_torch(out, tmp_path), expected())


# ---- refusals leave nothing


def test_what_cannot_be_done_is_refused_and_nothing_is_left(tmp_path):
    source = save(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    before = sorted(os.listdir(tmp_path)), sorted(os.listdir(source))
    for out, options, message in (
        ("there", {}, "there: is already there"),
        ("link", {}, "link: is already there"),
        ("run/checkpoints/step_00000005/out", {}, "lies in the checkpoint that is read"),
        ("step_00000006", {}, "is the name of another step; expected step_00000005"),
        ("out", {"files": 0}, "files: expected at least 1, got 0"),
        ("out", {"files": 10**6}, r"files: expected at most \d+, as there are numbers to deal out, got 1000000"),
        ("out", {"file_size": MIN_FILE_BYTES - 1}, "file size: expected at least 65536 bytes, got 65535"),
        ("out", {"files": 2, "file_size": 1 << 20}, "expected one of them"),
    ):
        with pytest.raises(InputError, match=message):
            reshard(source, str(tmp_path / out), **options)
    with pytest.raises(InputError, match="expected a folder on a file system"):
        reshard(source, "memory://bucket/out")
    with pytest.raises(InputError, match=r"none/manifest\.json: no such file"):
        reshard(str(tmp_path / "none"), str(tmp_path / "out"))
    assert (sorted(os.listdir(tmp_path)), sorted(os.listdir(source))) == before
    assert reshard(source, str(tmp_path / "step_00000005")).step == STEP


def test_as_many_files_as_numbers_and_no_more(tmp_path):
    tensors = rewrite.StoredTensors(save(tmp_path)).tensors
    count = sum(tensor.numel() for tensor in expected().values())
    plan = rewrite._plan(tensors, count, None)
    assert sorted(piece.size for (piece,) in plan) == [4] * (count - 1) + [8]
    with pytest.raises(InputError, match=f"expected at most {count}, "):
        rewrite._plan(tensors, count + 1, None)


def test_no_file_is_planned_beyond_its_bound(tmp_path):
    """2048 bytes are more than torch.save adds to a tensor."""
    tensors = rewrite.StoredTensors(save(tmp_path, dim=48)).tensors
    for limit in range(MIN_FILE_BYTES, 4 * MIN_FILE_BYTES, 9973):
        plan = rewrite._plan(tensors, None, limit)
        assert len(plan) > 1
        assert all(sum(piece.size + 2048 for piece in pieces) <= limit for pieces in plan)


@pytest.mark.parametrize("name", ["__0_0.distcp", "config.yaml", ".metadata"])
def test_a_damaged_checkpoint_is_not_copied(tmp_path, name):
    source = save(tmp_path)
    flip(Path(source, name))
    with pytest.raises(QuernError, match=rf"{name.replace('.', '[.]')}"):
        reshard(source, str(tmp_path / "out"))
    assert sorted(os.listdir(tmp_path)) == ["ranks.tiktoken", "run"]


@pytest.mark.parametrize("limit", [0, 10_000, 100_000])
def test_a_file_that_cannot_be_written_is_one_line_and_nothing_is_left(tmp_path, limit):
    """The system refuses to let a file grow beyond a limit, as a full disk would; Python ignores its signal."""
    source, out = save(tmp_path), str(tmp_path / "out")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(QuernError) as caught:
            reshard(source, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{out}: not written: ")
    assert "File too large" in line
    assert sorted(os.listdir(tmp_path)) == ["ranks.tiktoken", "run"]


# ---- a run goes on from it


def test_a_run_goes_on_from_it_bit_for_bit(tmp_path):
    """Killed twice alike; the one goes on from its own checkpoint, the other from the same written anew."""
    paths = run_case.write_corpus(tmp_path / "data")
    lives = {}
    for name in ("own", "anew"):
        config = run_case.settings(tmp_path / name, paths, checkpoint={"interval": 4})
        run_case.live(config, kill_at=6)
        (checkpoint,) = list_checkpoints(str(tmp_path / name))
        if name == "anew":
            aside = str(tmp_path / "aside")
            shutil.move(checkpoint.path, aside)
            reshard(aside, checkpoint.path, files=11)
        lives[name] = run_case.live(config)
    assert lives["anew"].start.step == 4
    assert lives["anew"].complete
    assert run_case.differences(lives["own"].state, lives["anew"].state) == []
    assert lives["own"].samples == lives["anew"].samples
    assert run_case.rows(tmp_path / "own") == run_case.rows(tmp_path / "anew")


LOAD = """
import json, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from support.train import checkpoint_case as CASE
from quern.train.checkpoint.save.manager import CheckpointManager
from quern.train.config import CheckpointConfig
dist.init_process_group("gloo", init_method="file://" + sys.argv[1] + "/meet", rank=int(sys.argv[3]), world_size=2)
state = CASE.make(Path(sys.argv[1]), multiple=128)
mesh = init_device_mesh("cpu", (2,))
for block in state.model.blocks.values() if hasattr(state.model.blocks, "values") else state.model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(state.model, mesh=mesh)
state = type(state)(state.model, CASE.groups(state.model), state.facts, state.extra)
with CheckpointManager(sys.argv[1] + "/other", CheckpointConfig(), dist.get_rank(), 2) as checkpoints:
    checkpoints.load(sys.argv[2], state)
print(json.dumps(CASE.differences(state, 5)))
"""


@pytest.mark.long
def test_two_ranks_of_fsdp_load_it(tmp_path):
    out = reshard(save(tmp_path), str(tmp_path / "out"), files=9).folder
    command = [sys.executable, "-c", LOAD, str(tmp_path), out]
    ranks = [
        subprocess.Popen(
            [*command, str(rank)], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            stdout, stderr = process.communicate(timeout=120)
            assert process.returncode == 0, stderr
            assert json.loads(stdout.splitlines()[-1]) == []
    finally:
        for process in ranks:
            process.kill()
