"""A checkpoint goes to transformers and comes back: the same logits, the same ids, the same bits."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from quern.errors import InputError, QuernError
from quern.model import hf
from quern.model.config import ModelConfig, ModelShape
from quern.model.transformer import Transformer
from quern.tokenize.encoding import ENDOFTEXT, Encoding, load_encoding
from quern.tokenize.writing.train_encoding import train_ranks
from quern.train.checkpoint.format.manifest import ENCODING_FILE, MANIFEST_FILE, EncodingInfo, read_manifest
from quern.train.checkpoint.tools import export
from quern.train.checkpoint.tools.reader import iter_weights, verify, write_weights
from quern.train.checkpoint.tools.sample import continue_text
from quern.train.history.branch import find_checkpoint
from support.damage import flip

TEXT = "The miller's stone turns; 1234 sacks of grain, für alle Müller.\n\n    flour = grind(grain)\n"
SIZES: dict[str, Any] = {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48}


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> Encoding:
    path = tmp_path_factory.mktemp("ranks") / "trained.tiktoken"
    path.write_bytes(train_ranks([TEXT * 3] * 3, 330))
    return load_encoding("trained", str(path))


def random_weights(shape: ModelShape, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(size, generator=generator) * (1.5 * size[-1] ** -0.5 if len(size) == 2 else 0.3)
        + (len(size) == 1)
        for name, size in hf.expected_tensors(shape).items()
    }


def write_checkpoint(path: Path, encoding: Encoding | None, seed: int = 0, step: int = 0, **sizes: Any) -> str:
    """As a trainer leaves it, as far as an export looks: weights, encoding, a step."""
    vocab_size = encoding.vocab_size if encoding else 300
    shape = ModelConfig(**SIZES | sizes).shape(vocab_size)
    weights = random_weights(shape, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    if encoding:
        info = EncodingInfo(encoding.name, encoding.vocab_size, encoding.eot_id, encoding.ranks_sha256)
        manifest = write_weights(str(path), shape, weights, encoding=info, ranks_path=encoding.ranks_path)
    else:
        manifest = write_weights(str(path), shape, weights)
    (path / MANIFEST_FILE).write_bytes(replace(manifest, step=step).to_bytes())
    return str(path)


@pytest.fixture
def checkpoint(tmp_path: Path, encoding: Encoding) -> str:
    return write_checkpoint(tmp_path / "checkpoint", encoding)


def everything_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("sizes", [{}, {"qk_norm": True, "tied_embeddings": True}], ids=["llama", "qwen3"])
def test_transformers_loads_an_export_and_it_comes_back(
    tmp_path: Path, encoding: Encoding, sizes: dict[str, Any]
) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", encoding, **sizes)
    out = tmp_path / "hf"
    made = export.export_hf(source, str(out), max_shard_bytes=30_000)
    assert set(made.files) == everything_below(out)
    assert made.tokenizer

    theirs = AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    assert (theirs.dtype, theirs.config.vocab_size, len(tokenizer)) == (
        torch.float32,
        encoding.vocab_size,
        encoding.vocab_size,
    )
    assert sum(p.numel() for p in theirs.parameters()) == made.parameters == read_manifest(source).model.num_parameters
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert ids[0].tolist() == encoding.core.encode_ordinary(TEXT)  # neither BOS nor EOS is put on
    assert tokenizer.decode(ids[0]) == TEXT
    eot = encoding.eot_id
    assert [tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.bos_token_id] == [ENDOFTEXT, eot, None]
    assert [theirs.generation_config.eos_token_id, theirs.generation_config.bos_token_id] == [eot, None]
    assert [theirs.config.eos_token_id, theirs.config.bos_token_id] == [eot, None]
    said = f"a {ENDOFTEXT} b"
    assert eot in tokenizer(said).input_ids  # transformers reads it as the control token, unless told otherwise
    assert tokenizer(said, split_special_tokens=True).input_ids == encoding.core.encode_ordinary(said)

    model, _ = export.load_model(source)
    with torch.no_grad():
        expected, found = model(ids), theirs(ids).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    greedy = theirs.generate(ids[:, :5], max_new_tokens=6, do_sample=False, pad_token_id=eot)
    with torch.no_grad():
        assert model(greedy[:, :-1])[0, 4:].argmax(1)[: greedy.shape[1] - 5].tolist() == greedy[0, 5:].tolist()

    back = tmp_path / "back"
    manifest = export.import_hf(str(out), str(back))
    assert verify(str(back)) == []
    assert (manifest.model, manifest.encoding) == (read_manifest(source).model, read_manifest(source).encoding)
    assert (back / ENCODING_FILE).read_bytes() == (Path(source) / ENCODING_FILE).read_bytes()
    original, returned = dict(iter_weights(source)), dict(iter_weights(str(back)))
    assert original.keys() == returned.keys()
    assert all(torch.equal(tensor, returned[name]) for name, tensor in original.items())


def test_a_run_exports_its_newest_checkpoint(tmp_path: Path, encoding: Encoding) -> None:
    for step in (20, 9, 100):
        write_checkpoint(tmp_path / "run" / "checkpoints" / f"step_{step:08d}", encoding, seed=step, step=step)
    made = export.export_hf(str(tmp_path / "run"), str(tmp_path / "hf"))
    assert (made.step, Path(made.checkpoint).name) == (100, "step_00000100")
    weights = random_weights(read_manifest(made.checkpoint).model, seed=100)
    assert torch.equal(_tensor(tmp_path / "hf", "norm.weight"), weights["norm.weight"])


def test_a_checkpoint_of_a_branch_that_was_left_is_not_the_runs_newest(tmp_path: Path, encoding: Encoding) -> None:
    """The run went back from 100 to 20, and has not got beyond it yet."""
    run = tmp_path / "run"
    start = {"kind": "start", "step": 0, "data_step": 0, "order": "a"}
    back = {"kind": "rollback", "step": 20, "data_step": 25, "order": "a"}
    lines = [json.dumps(line) + "\n" for line in (start, back)]
    for step in (20, 100):
        path = Path(write_checkpoint(run / "checkpoints" / f"step_{step:08d}", encoding, seed=step, step=step))
        manifest = replace(read_manifest(str(path)), ledger_offset=len(lines[0]))
        (path / MANIFEST_FILE).write_bytes(manifest.to_bytes())
    (run / "ledger.jsonl").write_text(lines[0])
    assert find_checkpoint(str(run)).endswith("step_00000100")
    (run / "ledger.jsonl").write_text("".join(lines))
    assert find_checkpoint(str(run)).endswith("step_00000020")
    assert find_checkpoint(str(run / "checkpoints" / "step_00000100")).endswith("step_00000100")
    shutil.rmtree(run / "checkpoints" / "step_00000020")
    with pytest.raises(InputError, match=r"step_00000100: lies on a branch that was left: .* to step 20, as all"):
        find_checkpoint(str(run))


def _tensor(folder: Path, name: str) -> torch.Tensor:
    config = json.loads((folder / "config.json").read_text())
    with hf.HFWeights(str(folder), hf.shape_from_config(config, "config.json")) as weights:
        return weights[name]


def test_positions_are_those_of_the_run(tmp_path: Path, checkpoint: str) -> None:
    """seq_len of the run's config is what a model has seen; without a config nothing is claimed of the tokenizer."""
    export.export_hf(checkpoint, str(tmp_path / "unknown"))
    assert "model_max_length" not in json.loads((tmp_path / "unknown" / "tokenizer_config.json").read_text())
    (Path(checkpoint) / "config.yaml").write_text("seq_len: 77\n")
    export.export_hf(checkpoint, str(tmp_path / "hf"))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["max_position_embeddings"] == 77
    assert json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())["model_max_length"] == 77


def test_bf16_rounds_to_nearest(tmp_path: Path, checkpoint: str) -> None:
    made = export.export_hf(checkpoint, str(tmp_path / "hf"), dtype=torch.bfloat16)
    assert made.dtype == json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    expected = dict(iter_weights(checkpoint))["embed.weight"].bfloat16()
    assert torch.equal(_tensor(tmp_path / "hf", "embed.weight"), expected)


def test_without_an_encoding_there_is_no_tokenizer(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "bare", None)
    made = export.export_hf(source, str(tmp_path / "hf"))
    assert not made.tokenizer
    assert everything_below(tmp_path / "hf") == {"config.json", "generation_config.json", "model.safetensors"}
    with pytest.raises(InputError, match=r"hf: expected tokenizer.json in it, or the encoding and its ranks file"):
        export.import_hf(str(tmp_path / "hf"), str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, checkpoint: str) -> None:
    file = max(Path(checkpoint).glob("*.distcp"), key=lambda path: path.stat().st_size)
    flip(file)
    before = everything_below(tmp_path)
    with pytest.raises(QuernError, match=f"{file}: .*damaged, nothing was exported"):
        export.export_hf(checkpoint, str(tmp_path / "hf"))
    assert everything_below(tmp_path) == before
    with pytest.raises(QuernError, match=f"{file}: .*the checkpoint is damaged"):
        continue_text(checkpoint, "the", max_new_tokens=1, temperature=0)


def test_a_folder_that_is_there_is_never_written_to(tmp_path: Path, checkpoint: str) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    export.export_hf(checkpoint, str(tmp_path / "hf"))
    before = everything_below(tmp_path)
    for write in (
        lambda: export.export_hf(checkpoint, str(taken)),
        lambda: export.import_hf(str(tmp_path / "hf"), str(taken)),
    ):
        with pytest.raises(InputError, match=f"{taken}: is already there"):
            write()
    with pytest.raises(InputError, match=r"memory://x: expected a local folder"):
        export.export_hf(checkpoint, "memory://x")
    assert everything_below(tmp_path) == before


def test_an_export_that_fails_half_way_leaves_nothing(
    tmp_path: Path, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(path: str) -> Iterator[tuple[str, torch.Tensor]]:
        weights = iter_weights(path)
        for _ in range(6):
            yield next(weights)
        assert [path.name for path in tmp_path.glob(".hf.*/.shard*")]
        raise OSError("the disk is gone")

    monkeypatch.setattr(export, "iter_weights", torn)
    before = everything_below(tmp_path)
    with pytest.raises(OSError, match="the disk is gone"):
        export.export_hf(checkpoint, str(tmp_path / "hf"), max_shard_bytes=1)
    assert everything_below(tmp_path) == before


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nothing"):
        with pytest.raises(
            InputError, match=rf"{path}: expected a checkpoint \(manifest.json in it\) or a training run"
        ):
            export.export_hf(str(path), str(tmp_path / "hf"))


def test_ranks_that_are_not_the_manifests_are_refused(tmp_path: Path, checkpoint: str, encoding: Encoding) -> None:
    manifest = read_manifest(checkpoint)
    lines = encoding.ranks_file.splitlines(keepends=True)
    first, second = (lines[i].split() for i in (5, 6))
    lines[5:7] = [b"%s %s\n" % (second[0], first[1]), b"%s %s\n" % (first[0], second[1])]
    (Path(checkpoint) / ENCODING_FILE).write_bytes(b"".join(lines))
    with pytest.raises(InputError, match=f"{ENCODING_FILE}: ranks_sha256: expected {encoding.ranks_sha256}"):
        export.read_encoding(checkpoint, manifest)
    secret = tmp_path / "secret"
    secret.write_text("SECRET of another file\n")
    (Path(checkpoint) / ENCODING_FILE).unlink()
    (Path(checkpoint) / ENCODING_FILE).symlink_to(secret)
    with pytest.raises(InputError, match="ranks_sha256: expected") as caught:
        export.read_encoding(checkpoint, manifest)
    assert "SECRET" not in str(caught.value)
    secret.unlink()
    os.mkfifo(secret)
    with pytest.raises(InputError, match=f"{ENCODING_FILE}: expected a file with the ranks"):
        export.read_encoding(checkpoint, manifest)


def test_import_takes_the_encoding_it_is_given(tmp_path: Path, checkpoint: str, encoding: Encoding) -> None:
    export.export_hf(checkpoint, str(tmp_path / "hf"))
    (tmp_path / "hf" / "tokenizer.json").unlink()
    manifest = export.import_hf(str(tmp_path / "hf"), str(tmp_path / "back"), encoding="own", ranks=encoding.ranks_path)
    assert manifest.encoding == EncodingInfo("own", encoding.vocab_size, encoding.eot_id, encoding.ranks_sha256)
    short = tmp_path / "short.tiktoken"
    short.write_bytes(b"".join(encoding.ranks_file.splitlines(keepends=True)[:-1]))
    with pytest.raises(InputError, match=rf"config.json: vocab_size: expected {encoding.vocab_size - 1}, the ids of"):
        export.import_hf(str(tmp_path / "hf"), str(tmp_path / "more"), encoding="own", ranks=str(short))
    assert not (tmp_path / "more").exists()


def test_a_rounded_export_imports_as_float32(tmp_path: Path, checkpoint: str) -> None:
    export.export_hf(checkpoint, str(tmp_path / "hf"), dtype=torch.bfloat16)
    export.import_hf(str(tmp_path / "hf"), str(tmp_path / "back"))
    for name, tensor in iter_weights(str(tmp_path / "back")):
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor.bfloat16(), _tensor(tmp_path / "hf", name))


def test_float64_weights_stay_float64(tmp_path: Path, checkpoint: str) -> None:
    export.export_hf(checkpoint, str(tmp_path / "hf"), dtype=torch.float64)
    file = tmp_path / "hf" / "model.safetensors"
    fine = {name: tensor + 2.0**-40 for name, tensor in load_file(file).items()}  # no float32
    save_file(fine, file)
    export.import_hf(str(tmp_path / "hf"), str(tmp_path / "back"))
    for name, tensor in iter_weights(str(tmp_path / "back")):
        assert torch.equal(tensor, fine[hf.hf_names(name, read_manifest(checkpoint).model)[0]])


def test_a_loaded_models_padding_is_zero(checkpoint: str) -> None:
    model, manifest = export.load_model(checkpoint)
    assert isinstance(model, Transformer)
    assert not model.training
    rows = manifest.model.vocab_size
    assert len(model.embed.weight) > rows
    assert not model.embed.weight[rows:].any()
    for name, tensor in iter_weights(checkpoint):
        assert torch.equal(model.get_parameter(name)[: len(tensor)], tensor)


def test_loading_names_what_is_missing(tmp_path: Path, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = dict(iter_weights(checkpoint))
    del weights["blocks.1.ffn.w2.weight"]
    monkeypatch.setattr(export, "iter_weights", lambda path: iter(weights.items()))
    with pytest.raises(QuernError, match=r"blocks.1.ffn.w2.weight: missing"):
        export.load_model(checkpoint)
    shutil.rmtree(checkpoint)
    with pytest.raises(InputError, match=MANIFEST_FILE):
        export.load_model(checkpoint)
