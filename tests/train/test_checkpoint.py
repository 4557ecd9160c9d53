"""Saving, finding, loading and pruning checkpoints in one process."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from quern import storage
from quern.config import digest
from quern.errors import InputError, QuernError
from quern.train.checkpoint.format import folder as folders
from quern.train.checkpoint.format.manifest import list_checkpoints, read_manifest
from quern.train.checkpoint.retention import prune as pruning
from quern.train.config import CheckpointConfig
from support.damage import flip
from support.train import checkpoint_case as CASE
from support.train.saves import CheckpointManager

pytestmark = pytest.mark.slow


def manager(run: Path, **config) -> CheckpointManager:
    return CheckpointManager(str(run), CheckpointConfig(**config))


def save(run: Path, *steps: int, **options) -> list[str]:
    """Checkpoints whose content is keyed by their step; their paths."""
    state = CASE.make(run.parent, **options)
    paths = []
    with manager(run) as checkpoints:
        for step in steps:
            CASE.fill(state, step)
            paths.append(checkpoints.save(step, state, CASE.position(step)).path)
    return paths


def loaded(run: Path, path: str, **options):
    state = CASE.make(run.parent, **options)
    with manager(run) as checkpoints:
        return state, checkpoints.load(path, state)


def rewrite(path: str, name: str, data: bytes) -> None:
    """Replace a file and make the manifest agree, as someone would who means harm."""
    Path(path, name).write_bytes(data)
    file = Path(path, "manifest.json")
    manifest = json.loads(file.read_text())
    manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    del manifest["checksum"]
    manifest["checksum"] = digest(manifest)
    file.write_text(json.dumps(manifest))


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


# ---- what is saved is what is loaded


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("before", "after"), [(128, 128), (128, 256), (256, 1), (1, 64), (127, 128)])
def test_every_tensor_comes_back_bit_for_bit_under_any_padding(run, before, after, tied):
    (path,) = save(run, 5, multiple=before, tied=tied)
    state, _ = loaded(run, path, multiple=after, tied=tied)
    assert CASE.differences(state, 5) == []


def test_torch_reads_the_files_and_finds_no_padding(run):
    """The oracle is torch's own reader, with torch's own planner."""
    (path,) = save(run, 5, multiple=256)
    sizes = CASE.sizes(CASE.shape())
    wanted = {f"model.{name}": torch.full(size, -1.0) for name, size in sizes.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        wanted |= {f"optimizer.state.{name}.{moment}": torch.full(size, -1.0) for name, size in sizes.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(wanted, checkpoint_id=path, no_dist=True)
    assert CASE.junk_row() not in Path(path, "__0_0.distcp").read_bytes()
    for name, size in sizes.items():
        assert torch.equal(wanted[f"model.{name}"], CASE.numbers("weight", name, size, 5))
        assert torch.equal(wanted[f"optimizer.state.{name}.exp_avg"], CASE.numbers("exp_avg", name, size, 5))
        assert torch.equal(wanted[f"optimizer.state.{name}.exp_avg_sq"], CASE.numbers("exp_avg_sq", name, size, 5))


def test_only_tensors_are_written_and_hyperparameters_are_not_among_them(run):
    (path,) = save(run, 5)
    metadata = pickle.loads(Path(path, ".metadata").read_bytes())
    assert {type(value).__name__ for value in metadata.state_dict_metadata.values()} == {"TensorStorageMetadata"}
    names = set(metadata.state_dict_metadata)
    weights = set(CASE.sizes(CASE.shape()))
    assert names == (
        {f"model.{name}" for name in weights}
        | {f"optimizer.state.{name}.{moment}" for name in weights for moment in ("exp_avg", "exp_avg_sq")}
        | {"optimizer.step", "extra.losses"}
    )
    assert b"param_groups" not in Path(path, ".metadata").read_bytes()
    assert b"step_0" not in Path(path, ".metadata").read_bytes()  # nor the folder it was written in


def test_hyperparameters_are_the_configs(run):
    (path,) = save(run, 5, lr=1e-3)
    state, _ = loaded(run, path, lr=0.5)
    assert [group["lr"] for group in state.optimizer.param_groups] == [0.5, 0.5]
    assert [group["weight_decay"] for group in state.optimizer.param_groups] == [0.1, 0.0]


def test_resumed_training_is_bitwise_the_uninterrupted_one(tmp_path, run):
    def step(state, number):
        tokens = torch.randint(0, 127, (2, 8), generator=torch.Generator().manual_seed(number))
        loss, _ = state.model(tokens[:, :-1], tokens[:, 1:])
        (loss / 14).backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        return loss.item()

    state = CASE.filled(tmp_path, 1, pad=0.0)
    state.optimizer.state.clear()
    losses = [step(state, number) for number in range(2)]
    with manager(run) as checkpoints:
        path = checkpoints.save(2, state, CASE.position(2)).path
    losses += [step(state, number) for number in range(2, 5)]
    assert losses[0] != losses[1]

    other = CASE.make(tmp_path)
    with manager(run) as checkpoints:
        checkpoints.load(path, other)
    assert [step(other, number) for number in range(2, 5)] == losses[2:]
    for (name, mine), (_, theirs) in zip(state.model.named_parameters(), other.model.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        for slot, value in state.optimizer.state[mine].items():
            assert torch.equal(value, other.optimizer.state[theirs][slot]), (name, slot)


def test_a_save_before_the_first_step_changes_nothing(tmp_path, run):
    state = CASE.make(tmp_path)
    gradients = {}
    for name, parameter in state.model.named_parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
        gradients[name] = parameter.grad
    before = {name: parameter.detach().clone() for name, parameter in state.model.named_parameters()}
    with manager(run) as checkpoints:
        path = checkpoints.save(0, state, CASE.position(0)).path
    for name, parameter in state.model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is gradients[name]
        assert bool((parameter.grad == 2.0).all())
        assert float(state.optimizer.state[parameter]["step"]) == 0
    other, _ = loaded(run, path)
    assert {float(slots["step"]) for slots in other.optimizer.state.values()} == {0.0}
    assert all(not slots["exp_avg"].any() for slots in other.optimizer.state.values())


def test_extra_tensors_and_scalars_come_back_whatever_their_size(tmp_path, run):
    state = CASE.filled(tmp_path, 3)
    history = torch.tensor([1.0, float("nan"), float("inf"), -0.0])
    state.extra.update(losses=history, entered=torch.tensor(7, dtype=torch.int64))
    with manager(run) as checkpoints:
        path = checkpoints.save(3, state, CASE.position(3, best=float("inf"), scale=0.1, skips=2, none=None)).path
    fresh = CASE.make(tmp_path)  # its own "losses" has another meaning by now: another window, say
    fresh.extra["losses"] = torch.zeros(9)
    with manager(run) as checkpoints:
        found = checkpoints.load(path, fresh)
    assert set(found.extra) == {"losses", "entered"}
    assert found.extra["losses"].numpy().tobytes() == history.numpy().tobytes()
    assert found.extra["entered"].dtype == torch.int64
    assert found.extra["entered"].item() == 7
    assert dict(found.manifest.scalars) == {"best": float("inf"), "scale": 0.1, "skips": 2, "none": None}


def test_folder_holds_config_ranks_and_manifest(run):
    (path,) = save(run, 5)
    assert os.path.basename(path) == "step_00000005"
    assert yaml.safe_load(Path(path, "config.yaml").read_text()) == {
        "run_dir": "x", "steps": 10, "model": {"dim": 6}
    }  # fmt: skip
    assert Path(path, "encoding.tiktoken").read_bytes() == CASE.RANKS
    manifest = read_manifest(path)
    assert set(manifest.files) == set(os.listdir(path)) - {"manifest.json"}
    assert (manifest.step, manifest.data_step, manifest.tokens, manifest.ledger_offset) == (5, 8, 500, 0)
    assert manifest.optimizer
    assert manifest.model == CASE.shape()


def test_a_checkpoint_brings_the_ledger_as_it_was_before(tmp_path, run):
    state = CASE.filled(tmp_path, 3)
    position = replace(CASE.position(3), ledger_offset=35)
    with manager(run) as checkpoints:
        (run / "ledger.jsonl").write_bytes(bytes(34))
        with pytest.raises(QuernError, match=r"ledger\.jsonl: expected at least 35 bytes, has 34"):
            checkpoints.save(3, state, position)
        (run / "ledger.jsonl").write_bytes(bytes(range(60)))
        path = checkpoints.save(3, state, position).path
    assert Path(path, "ledger.jsonl").read_bytes() == bytes(range(35))
    assert read_manifest(path).files["ledger.jsonl"].sha256 == hashlib.sha256(bytes(range(35))).hexdigest()


def test_optimizer_state_that_is_not_one_steps_is_refused(tmp_path, run):
    state = CASE.filled(tmp_path, 3)
    state.optimizer.state[state.model.norm.weight]["step"].fill_(2)
    with manager(run) as checkpoints, pytest.raises(QuernError, match=r"norm\.weight.*every parameter"):
        checkpoints.save(3, state, CASE.position(3))
    assert list_checkpoints(str(run)) == []


# ---- another model


@pytest.mark.parametrize(
    ("options", "field"),
    [({"vocab": 126}, "vocab_size"), ({"dim": 8}, "dim"), ({"tied": True}, "tied_embeddings")],
)
def test_another_models_checkpoint_is_refused_by_field(run, options, field):
    (path,) = save(run, 5)
    with pytest.raises(InputError, match=rf"manifest\.json: model\.{field}: expected"):
        loaded(run, path, **options)


def test_numbers_are_never_rounded_on_load(tmp_path, run):
    state = CASE.make(tmp_path)
    state.model.double()
    with manager(run) as checkpoints:
        path = checkpoints.save(1, state, CASE.position(1)).path
    with pytest.raises(InputError, match=r"\.metadata: model\.\S+: expected torch.float32 or a type it contains"):
        loaded(run, path)


def test_weights_of_another_encoding_of_the_same_size_are_refused(tmp_path, run):
    state = CASE.filled(tmp_path, 1)
    with manager(run) as checkpoints:
        path = checkpoints.save(1, state, CASE.position(1)).path
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "ranks.tiktoken").write_bytes(b"Yg== 0\nYQ== 1\n")
        own = state.facts.encoding
        other = dataclasses.replace(own, ranks_sha256=storage.sha256(str(tmp_path / "other" / "ranks.tiktoken")))
        for encoding, field in ((other, "ranks_sha256"), (dataclasses.replace(own, eot_id=7), "eot_id")):
            strange = dataclasses.replace(state, facts=dataclasses.replace(state.facts, encoding=encoding))
            with pytest.raises(InputError, match=rf"manifest.json: encoding.{field}: expected .*trained on other ids"):
                checkpoints.load(path, strange)
        checkpoints.load(path, state)


# ---- which checkpoint is taken


def change(name: str, changed: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """What does this to a file of a checkpoint."""
    return lambda path: (path / name).write_bytes(changed((path / name).read_bytes()))


def remove(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).unlink()


def flip_tensors(path: Path) -> str:
    return flip(path / "__0_0.distcp")


HARMS = {  # and what is named
    "truncated": (change("__0_0.distcp", lambda data: data[:-1]), "__0_0.distcp"),
    "flipped": (flip_tensors, "__0_0.distcp"),
    "deleted": (remove("__0_0.distcp"), "__0_0.distcp"),
    "metadata": (lambda path: flip(path / ".metadata", 100, 4), ".metadata"),
    "config": (remove("config.yaml"), "config.yaml"),
    "manifest": (
        change("manifest.json", lambda data: data.replace(b'"tokens": 300', b'"tokens": 301')), "manifest.json",
    ),
    "no manifest": (remove("manifest.json"), "manifest.json"),
    "renamed": (lambda path: path.rename(path.with_name("step_00000009")), "manifest.json: step: expected 9"),
}  # fmt: skip


@pytest.mark.parametrize(("harm", "named"), HARMS.values(), ids=HARMS)
def test_a_damaged_checkpoint_is_reported_and_the_next_older_taken(tmp_path, run, harm, named, caplog):
    paths = save(run, 1, 2, 3)
    harm(Path(paths[2]))
    state = CASE.make(tmp_path)
    with manager(run) as checkpoints:
        found = checkpoints.latest_valid()
        assert found is not None
        assert found.step == 2
        assert named in str(checkpoints.rejected[0])
        assert named in caplog.text
        checkpoints.load(found.path, state)
    assert CASE.differences(state, 2) == []


def test_all_damaged_is_an_error_and_none_at_all_is_a_fresh_start(run):
    with manager(run) as checkpoints:
        assert checkpoints.latest_valid() is None
    for path in save(run, 1, 2):
        flip_tensors(Path(path))
    with manager(run) as checkpoints, pytest.raises(QuernError, match=r"no checkpoint is whole.*step_00000002"):
        checkpoints.latest_valid()
    with manager(run, verify=False) as checkpoints:  # sizes alone, as asked
        assert checkpoints.latest_valid().step == 2


def test_refused_checkpoints_are_passed_over_and_no_file_of_theirs_is_hashed(run, monkeypatch):
    """A branch that was left may hold terabytes."""
    save(run, 1, 2, 3)
    hashed = []
    real = storage.sha256
    monkeypatch.setattr(storage, "sha256", lambda path: hashed.append(path) or real(path))
    with manager(run) as checkpoints:
        found = checkpoints.latest_valid(lambda manifest: "abandoned" if manifest.step > 1 else None)
        assert found.step == 1
        assert {Path(path).parent.name for path in hashed} == {"step_00000001"}
        assert [problem.what for problem in checkpoints.rejected] == ["abandoned", "abandoned"]
        assert checkpoints.latest_valid(lambda manifest: "abandoned") is None


# ---- files made to harm


@pytest.mark.parametrize("wrap", [lambda bomb: bomb, lambda bomb: {"state_dict_metadata": bomb}, lambda bomb: [bomb]])
def test_a_foreign_pickle_as_metadata_is_refused_and_does_not_run(tmp_path, run, wrap):
    (path,) = save(run, 5)
    marker = tmp_path / "marker"
    payload = pickle.dumps(wrap(CASE.Bomb(marker)))
    rewrite(path, ".metadata", payload)
    with manager(run) as checkpoints:
        assert checkpoints.latest_valid() is not None  # its checksums are right: only the reader stands in the way
    with pytest.raises(InputError, match=r"\.metadata: names (posix|os)\.system"):
        loaded(run, path)
    assert not marker.exists()
    pickle.loads(payload)
    assert marker.exists()  # the payload was a live one


def pickled_name(module: str, name: str) -> bytes:
    """The beginning of a pickle that puts this object on the stack."""
    words = (b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    return b"\x80\x04" + b"".join(words) + b"\x93"


@pytest.mark.parametrize(
    "named",
    [
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch", "Size.mro"),
        ("torch.serialization", "load"),
        ("torch.distributed.checkpoint.metadata", "field"),
    ],
)
def test_names_beyond_the_format_are_refused(run, named):
    (path,) = save(run, 5)
    rewrite(path, ".metadata", pickled_name(*named) + b".")
    with pytest.raises(InputError, match=rf"\.metadata: names {named[0]}\.{named[1]}"):
        loaded(run, path)


def test_a_pickle_that_alters_the_formats_classes_alters_nothing(run):
    """BUILD with a slot state sets attributes on whatever stands on the stack: here, on a class."""
    (path,) = save(run, 5)
    metadata = pickled_name("torch.distributed.checkpoint.metadata", "Metadata")
    rewrite(path, ".metadata", metadata + b"N}\x8c\x05owned\x88s\x86b.")
    with pytest.raises(InputError, match=r"\.metadata"):
        loaded(run, path)
    assert not hasattr(Metadata, "owned")


def altered_metadata(path: str, change) -> None:
    metadata = pickle.loads(Path(path, ".metadata").read_bytes())
    change(metadata)
    rewrite(path, ".metadata", pickle.dumps(metadata))


def test_metadata_that_points_elsewhere_or_holds_objects_is_refused(tmp_path):
    (tmp_path / "outside").write_bytes(b"x" * 10_000)

    def elsewhere(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = "../../../outside"

    def objects(metadata):
        metadata.state_dict_metadata["model.norm.weight"] = BytesStorageMetadata()

    def beyond(metadata):
        next(iter(metadata.storage_data.values())).length = 1 << 40

    def hole(metadata):
        chunk = metadata.state_dict_metadata["model.embed.weight"].chunks[0]
        chunk.sizes = torch.Size((100, 6))

    def negative(metadata):
        next(iter(metadata.storage_data.values())).offset = -1

    expectations = {
        elsewhere: "which the manifest does not list", objects: "only tensors are read", beyond: "after the end of",
        hole: "do not cover", negative: "integer",
    }  # fmt: skip
    for number, (change, message) in enumerate(expectations.items()):
        (path,) = save(tmp_path / f"run{number}", 5)
        altered_metadata(path, change)
        with pytest.raises(InputError, match=rf"\.metadata: .*{message}"):
            loaded(tmp_path / f"run{number}", path)


def test_objects_in_a_tensor_file_are_refused_and_do_not_run(tmp_path, run):
    (path,) = save(run, 5)
    marker = tmp_path / "marker"
    payload = io.BytesIO()
    torch.save(CASE.Bomb(marker), payload)
    data = payload.getvalue()

    def point(metadata):
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, len(data)

    rewrite(path, "__0_0.distcp", data)
    altered_metadata(path, point)
    with pytest.raises(QuernError, match="not loaded"):
        loaded(run, path)
    assert not marker.exists()


def test_a_ranks_file_of_another_encoding_is_refused(tmp_path, run):
    state = CASE.filled(tmp_path, 1)
    (tmp_path / "ranks.tiktoken").write_bytes(b"other")
    with manager(run) as checkpoints, pytest.raises(InputError, match=r"ranks\.tiktoken: expected SHA-256"):
        checkpoints.save(1, state, CASE.position(1))
    assert os.listdir(run / "checkpoints") == [".lock"]


# ---- published whole or not at all


def test_every_failing_write_leaves_the_older_checkpoint_and_nothing_else(tmp_path, run, monkeypatch):
    """The disk fails at each sync in turn."""
    save(run, 1)
    state = CASE.filled(tmp_path, 2)
    sync, count = os.fsync, 0
    messages: list[str] = []
    with manager(run) as checkpoints:
        for failing in range(1, 50):
            count = 0

            def fsync(descriptor, failing=failing):
                nonlocal count
                count += 1
                if count == failing:
                    raise OSError(28, "No space left on device")
                sync(descriptor)

            monkeypatch.setattr(os, "fsync", fsync)
            try:
                checkpoints.save(2, state, CASE.position(2))
            except QuernError as error:
                messages.append(str(error))
            else:
                break
            if [checkpoint.step for checkpoint in list_checkpoints(str(run))] == [1, 2]:
                break  # the sync after the rename: published
            assert sorted(os.listdir(run / "checkpoints")) == [".lock", "step_00000001"]
    assert len(messages) > 5
    assert all("No space left" in message for message in messages)
    monkeypatch.setattr(os, "fsync", sync)
    fresh = CASE.make(tmp_path)
    with manager(run) as checkpoints:
        checkpoints.load(checkpoints.latest_valid().path, fresh)
    assert CASE.differences(fresh, 2) == []


def test_every_file_and_folder_is_synced_before_the_rename(tmp_path, run, monkeypatch):
    state = CASE.filled(tmp_path, 1)
    events: list[tuple[str, str]] = []
    sizes: dict[str, int] = {}
    sync, rename = os.fsync, os.rename

    def fsync(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        sizes[os.path.basename(path)] = os.fstat(descriptor).st_size
        events.append(("sync", os.path.basename(path)))
        sync(descriptor)

    def renames(source, target, **options):
        events.append(("rename", os.path.basename(target)))
        rename(source, target, **options)

    with manager(run) as checkpoints:
        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "rename", renames)
        path = checkpoints.save(1, state, CASE.position(1)).path
    published = events.index(("rename", "step_00000001"))
    synced = [name for kind, name in events[:published] if kind == "sync"]
    for name in os.listdir(path):
        assert name in synced, name
        assert sizes[name] == os.path.getsize(os.path.join(path, name)), name  # nothing was still in a buffer
    assert synced[-1].startswith(".step_00000001")  # the staging folder's own names, after the last file
    assert synced[-2] == "manifest.json"
    assert events[published + 1] == ("sync", "checkpoints")


def test_saving_a_standing_step_replaces_it(tmp_path, run):
    (path,) = save(run, 4)
    state = CASE.filled(tmp_path, 77, step=77)
    with manager(run) as checkpoints:
        assert checkpoints.save(4, state, CASE.position(4)).path == path
    fresh, _ = loaded(run, path)
    assert CASE.differences(fresh, 77) == []
    assert sorted(os.listdir(run / "checkpoints")) == [".lock", "step_00000004"]


def test_opening_tidies_what_a_killed_writer_left(run):
    first, second = save(run, 1, 2)
    root, token = run / "checkpoints", "0" * 32
    os.rename(second, root / f".step_00000002.{token}.replaced")  # killed between the two renames of a replacement
    os.mkdir(root / f".step_00000002.{token}.tmp")
    (root / f".step_00000002.{token}.tmp" / "__0_0.distcp").write_bytes(b"half")
    os.mkdir(root / f".step_00000001.{token}.replaced")  # killed after them
    (root / "notes").mkdir()  # somebody's own
    with manager(run) as checkpoints:
        assert sorted(os.listdir(root)) == [".lock", "notes", "step_00000001", "step_00000002"]
        assert checkpoints.latest_valid().path == second
    assert os.path.exists(first)


def test_a_second_trainer_is_refused_and_a_dead_ones_lock_is_free(run):
    script = (
        "import sys; from quern.train.checkpoint.format.folder import FolderLock; "
        "lock = FolderLock(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    )
    os.makedirs(run / "checkpoints" / f".step_00000001.{'0' * 32}.tmp")
    command = [sys.executable, "-c", script, str(run / "checkpoints")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(QuernError, match=rf"another trainer writes here \(process {other.pid} on "):
            manager(run)
        assert any(name.endswith(".tmp") for name in os.listdir(run / "checkpoints"))  # the live writer's
        other.kill()
    with manager(run):
        assert os.listdir(run / "checkpoints") == [".lock"]


# ---- pruning


def prune(run: Path, **config) -> list[int]:
    with manager(run, **config) as checkpoints:
        checkpoints.prune()
    return [checkpoint.step for checkpoint in list_checkpoints(str(run))]


def test_pruning_keeps_the_last_and_every_nth(run):
    save(run, 2, 4, 5, 6, 8)
    assert prune(run, keep_last=2, keep_every=5) == [5, 6, 8]
    assert prune(run, keep_last=1) == [8]
    assert prune(run, keep_last=1) == [8]


def test_pruning_never_removes_the_newest_whole_checkpoint(run):
    paths = save(run, 1, 2, 3, 4)
    flip_tensors(Path(paths[3]))
    remove("manifest.json")(Path(paths[2]))
    assert prune(run, keep_last=1) == [2, 4]
    flip_tensors(Path(paths[1]))
    assert prune(run, keep_last=1) == [2, 4]  # nothing is whole: nothing goes


def test_pruning_leaves_a_branch_that_was_left_until_the_run_passes_it(tmp_path, run):
    save(run, 1, 2, 3, 8)
    state = CASE.filled(tmp_path, 4)
    with manager(run, keep_last=1) as checkpoints:
        checkpoints.save(4, state, CASE.position(4))
        assert checkpoints.prune() == ["step_00000001", "step_00000002", "step_00000003"]
        assert [checkpoint.step for checkpoint in list_checkpoints(str(run))] == [4, 8]
        checkpoints.save(9, state, CASE.position(9))
        assert checkpoints.prune() == ["step_00000004", "step_00000008"]


def test_a_checkpoint_that_cannot_be_removed_is_logged_and_the_others_go(run, monkeypatch, caplog):
    remove = pruning.remove_folder

    def refuses(path, token):
        if path.endswith("2"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        remove(path, token)

    save(run, 1, 2, 3, 4)
    monkeypatch.setattr(pruning, "remove_folder", refuses)
    assert prune(run, keep_last=1) == [2, 4]
    assert "step_00000002: not removed (Permission denied)" in caplog.text


def test_pruning_goes_by_steps_not_by_names(tmp_path, run):
    """The ninth digit sorts before the eighth's last."""
    save(run, 99_999_998, 99_999_999)
    state = CASE.filled(tmp_path, 4)
    with manager(run, keep_last=1) as checkpoints:
        checkpoints.save(100_000_000, state, CASE.position(4))
        assert checkpoints.prune() == ["step_99999998", "step_99999999"]


def test_a_ledger_that_cannot_tell_does_not_end_the_rank_that_prunes(run, caplog):
    save(run, 1, 2)
    (run / "ledger.jsonl").write_bytes(b"{}\n")
    with manager(run, keep_last=1) as checkpoints:
        assert checkpoints.prune() == ["step_00000001"]
    assert "ledger.jsonl: " in caplog.text


def test_a_removed_checkpoint_loses_its_name_first(run, monkeypatch):
    save(run, 1, 2)

    def refuse(path, *arguments, **options):
        assert os.path.basename(path).startswith(".step_00000001.")
        raise KeyboardInterrupt

    monkeypatch.setattr(folders.shutil, "rmtree", refuse)
    with manager(run, keep_last=1) as checkpoints, pytest.raises(KeyboardInterrupt):
        checkpoints.prune()
    assert [checkpoint.step for checkpoint in list_checkpoints(str(run))] == [2]
    monkeypatch.undo()
    with manager(run):
        assert sorted(os.listdir(run / "checkpoints")) == [".lock", "step_00000002"]
