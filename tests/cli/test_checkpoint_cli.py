"""``quern checkpoint``: what it prints, what it refuses, how it exits."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml

from quern.cli.checkpoint import app
from quern.model.config import ModelConfig
from quern.model.init import initialise
from quern.model.transformer import Transformer
from quern.tokenize.encoding import Encoding, load_encoding
from quern.tokenize.writing.train_encoding import train_ranks
from quern.train.checkpoint.format.manifest import MANIFEST_FILE, EncodingInfo, read_manifest
from quern.train.checkpoint.tools.reader import iter_weights, write_weights
from support.checkpoint_commands import invoke
from support.damage import flip


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> Encoding:
    path = tmp_path_factory.mktemp("ranks") / "trained.tiktoken"
    path.write_bytes(train_ranks(["the mill grinds the grain; "] * 4, 300))
    return load_encoding("trained", str(path))


def says(model: Transformer, after: int, then: int) -> None:
    """Make token ``then`` the sure answer to token ``after``: the embedding is all the head looks at."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("blocks.") and name.endswith(("wo.weight", "w2.weight")):
                parameter.zero_()
        model.embed.weight[after] = 0
        model.embed.weight[after, after % 32] = 9
        model.head.weight[then, after % 32] = 99  # type: ignore[union-attr]


def write_checkpoint(path: Path, encoding: Encoding, step: int, *chain: int) -> Path:
    """A checkpoint after ``step`` steps whose model answers each token of ``chain`` with the next."""
    shape = ModelConfig(num_layers=1, dim=32, num_heads=2, ffn_dim=32).shape(encoding.vocab_size)
    model = Transformer(shape)
    initialise(model, step)
    for after, then in itertools.pairwise(chain):
        says(model, after, then)
    weights = {
        n: p[: shape.vocab_size] if n in ("embed.weight", "head.weight") else p for n, p in model.named_parameters()
    }
    info = EncodingInfo(encoding.name, encoding.vocab_size, encoding.eot_id, encoding.ranks_sha256)
    path.parent.mkdir(parents=True, exist_ok=True)
    manifest = write_weights(str(path), shape, weights, encoding=info, ranks_path=encoding.ranks_path)
    position = replace(manifest, step=step, data_step=step + 3, tokens=step * 4096)
    (path / MANIFEST_FILE).write_bytes(position.to_bytes())
    return path


@pytest.fixture
def run(tmp_path: Path, encoding: Encoding) -> Path:
    for step in (1000, 2000):
        write_checkpoint(tmp_path / "run" / "checkpoints" / f"step_{step:08d}", encoding, step)
    return tmp_path / "run"


def damage(checkpoint: Path, *, length: int | None = None) -> Path:
    """Flip a bit of the largest file, or cut it to ``length``."""
    file = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    flip(file)
    if length is not None:
        os.truncate(file, length)
    return file


def test_list_shows_what_is_there(run: Path) -> None:
    lines = invoke("list", run).stdout.splitlines()
    assert lines[0].split() == ["step", "data", "step", "tokens", "size", "tensors", "valid", "notes"]
    assert [line.split()[:3] for line in lines[1:]] == [
        ["1,000", "1,003", "4,096,000"],
        ["2,000", "2,003", "8,192,000"],
    ]
    assert all(line.split()[-1] == "yes" for line in lines[1:])


def test_list_as_json_counts_the_bytes_and_names_a_torn_file(run: Path, as_json: Callable[..., Any]) -> None:
    file = damage(run / "checkpoints" / "step_00002000", length=100)
    rows = as_json("list", run)["checkpoints"]
    assert [(row["step"], row["data_step"], row["tokens"], row["valid"]) for row in rows] == [
        (1000, 1003, 4_096_000, True), (2000, 2003, 8_192_000, False),
    ]  # fmt: skip
    held = sum(p.stat().st_size for p in Path(rows[0]["path"]).iterdir() if p.name != MANIFEST_FILE)
    assert rows[0]["bytes"] == held
    assert rows[1]["problems"][0].startswith(f"{file}: ")
    shown = invoke("list", run)
    assert shown.stdout.splitlines()[2].split()[-1] == "no"
    assert str(file) in shown.stderr


def test_list_shows_a_checkpoint_whose_manifest_is_gone(run: Path, as_json: Callable[..., Any]) -> None:
    (run / "checkpoints" / "step_00001000" / MANIFEST_FILE).unlink()
    rows = as_json("list", run)["checkpoints"]
    assert [(row["step"], row["tokens"], row["valid"]) for row in rows] == [
        (1000, None, False),
        (2000, 8_192_000, True),
    ]
    assert MANIFEST_FILE in rows[0]["problems"][0]
    assert invoke("list", run).stdout.splitlines()[1].split() == ["1,000", "no"]


def test_list_labels_what_a_rollback_has_left(run: Path, as_json: Callable[..., Any]) -> None:
    back = {"kind": "rollback", "step": 1000, "data_step": 1005, "order": "a"}
    (run / "ledger.jsonl").write_text(json.dumps(back) + "\n")
    rows = as_json("list", run)["checkpoints"]
    assert [(row["valid"], row["abandoned"]) for row in rows] == [
        (True, None), (True, "lies on a branch that was left: the run went back to step 1000"),
    ]  # fmt: skip
    assert [line.split()[-1] for line in invoke("list", run).stdout.splitlines()[1:]] == ["yes", "abandoned"]
    assert invoke("sample", run, "--prompt", "the").exit_code == 0


def test_a_run_without_checkpoints_lists_none(tmp_path: Path, as_json: Callable[..., Any]) -> None:
    (tmp_path / "ledger.jsonl").touch()
    assert as_json("list", tmp_path)["checkpoints"] == []
    assert "no checkpoints" in invoke("list", tmp_path).stderr
    assert f"{tmp_path}/none: no such folder" in invoke("list", f"{tmp_path}/none", code=2).stderr


def test_verify_names_the_damaged_file_and_exits_with_1(run: Path, as_json: Callable[..., Any]) -> None:
    assert invoke("verify", run).stdout.count(": valid") == 2
    file = damage(run / "checkpoints" / "step_00002000")  # its size stays: list cannot see it
    assert all(row["valid"] for row in as_json("list", run)["checkpoints"])
    result = invoke("verify", run, code=1)
    assert f"{file}: expected SHA-256" in result.stdout.replace("\n", "")
    assert result.stderr == "error: 1 of 2 checkpoints damaged\n"
    found = as_json("verify", run, code=1)
    assert [row["valid"] for row in found["checkpoints"]] == [True, False]
    assert not found["valid"]
    assert found["checkpoints"][1]["problems"][0].startswith(f"{file}: ")
    invoke("verify", run / "checkpoints" / "step_00001000")
    invoke("verify", run / "checkpoints" / "step_00001000", run / "checkpoints" / "step_00002000", code=1)


def test_verify_of_a_folder_without_a_manifest_fails(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints" / "step_00001000"
    (checkpoint / MANIFEST_FILE).unlink()
    assert MANIFEST_FILE in invoke("verify", checkpoint, code=1).stdout
    assert "no such folder" in invoke("verify", tmp_path / "none", code=2).stderr
    (tmp_path / "other").mkdir()
    expected = f"error: {tmp_path}/other: expected a checkpoint, or a training run that has one\n"
    assert invoke("verify", tmp_path / "other", code=2).stderr == expected


def test_a_place_that_cannot_be_written_to_is_one_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (line,) = invoke("export-hf", run, tmp_path / "file" / "out", code=1).stderr.splitlines()
    assert line.startswith(f"error: {tmp_path}/file/")
    assert line.endswith(": Not a directory")


def test_export_and_import_give_the_same_weights(
    run: Path, tmp_path: Path, as_json: Callable[..., Any], encoding: Encoding
) -> None:
    out, back = tmp_path / "hf", tmp_path / "back"
    made = as_json("export-hf", run, out, "--max-shard-gb", 2e-5)
    assert made["step"] == 2000
    assert made["dtype"] == "float32"
    assert sorted(path.name for path in out.iterdir()) == made["files"]
    assert sum(name.endswith(".safetensors") for name in made["files"]) > 1
    said = invoke("import-hf", out, back).stdout
    assert "encoding trained" in said
    assert f"# init_from={back} takes this model by itself" in said
    section = yaml.safe_load(said.partition("\n")[2])
    assert ModelConfig(**section["model"]).shape(encoding.vocab_size) == read_manifest(str(back)).model
    made = as_json("import-hf", out, tmp_path / "again")
    assert made["training_config"] == {"init_from": str(tmp_path / "again"), **section}
    original = dict(iter_weights(str(run / "checkpoints" / "step_00002000")))
    for name, tensor in iter_weights(str(back)):
        assert torch.equal(tensor, original.pop(name))
    assert not original


@pytest.mark.parametrize(("dtype", "stated"), [("bf16", "bfloat16"), ("fp32", "float32")])
def test_export_rounds_when_asked(run: Path, tmp_path: Path, dtype: str, stated: str) -> None:
    checkpoint = run / "checkpoints" / "step_00001000"
    assert f"parameters as {stated}" in invoke("export-hf", checkpoint, tmp_path / "hf", "--dtype", dtype).stdout
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == stated


def test_bad_input_is_one_line(run: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("export-hf", tmp_path, tmp_path / "hf"), "expected a checkpoint"),
        (("export-hf", run, run), "is already there"),
        (("import-hf", tmp_path, tmp_path / "back"), "config.json: no such file"),
        (("sample", run, "--prompt", ""), "--prompt: expected at least one character"),
        (("sample", tmp_path, "--prompt", "a"), "expected a checkpoint"),
    ):
        result = invoke(*arguments, code=2)
        assert message in result.stderr
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


def test_sample_prints_the_continuation_with_controls_shown(tmp_path: Path, encoding: Encoding) -> None:
    """The model is made to say "[", escape, "2", "J" after "z", which would clear a terminal, and then to end."""
    tokens = [int(token) for text in "z\n\x1b2J" for token in encoding.encode(text)]
    assert len(tokens) == 5
    path = write_checkpoint(tmp_path / "c", encoding, 0, *tokens, encoding.eot_id)
    for temperature in ("0", "0.5"):
        result = invoke("sample", path, "--prompt", "the z", "--temperature", temperature)
        assert result.stdout == "\n\\x1b2J\n"
    assert invoke("sample", path, "--prompt", "z", "--max-new-tokens", 2).stdout == "\n\\x1b\n"


@pytest.mark.slow
def test_a_seed_says_the_same_twice_and_another_something_else(run: Path) -> None:
    hot = ("sample", run, "--prompt", "the", "--temperature", 5, "--max-new-tokens", 12, "--seed")
    assert invoke(*hot, 1).stdout == invoke(*hot, 1).stdout
    assert invoke(*hot, 1).stdout != invoke(*hot, 2).stdout
    assert invoke(*hot, 1, "--top-k", 1).stdout == invoke(*hot, 2, "--top-k", 1).stdout


def test_help_names_every_command() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    looks, changes = {"list", "verify", "sample", "diff", "fetch"}, {"reshard", "upcycle", "prune"}
    assert set(commands) == looks | changes | {"export-hf", "import-hf"}
    assert all(command.help for command in commands.values())
