"""The benchmark's parts: what it is asked, what that makes of a config, arithmetic, data, and the table."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from quern.errors import InputError
from quern.model.config import ModelConfig
from quern.model.transformer import Transformer
from quern.tokenize.shards import ShardReader
from quern.train.bench import run as run_module
from quern.train.bench.corpus import write_random
from quern.train.bench.crew import Crew
from quern.train.bench.figures import figures, interval
from quern.train.bench.measure import draw_on_device
from quern.train.bench.options import Options, pairs, parse
from quern.train.bench.rows import Row, configure, rows, tokens_needed, vocab_size_of
from quern.train.bench.run import bench
from quern.train.bench.table import table
from quern.train.config import DoReMiConfig, TrainConfig


def config_of(row: Row, options: Options, world: int = 1, micro_batch: int | None = None, cuda: bool = False) -> Any:
    return configure(
        row, options, world=world, micro_batch=micro_batch, cuda=lambda: cuda, data="/d/tokens/s", run_dir="/d/run"
    )


def only(options: Options) -> Row:
    (row,) = rows(options)
    return row


@pytest.fixture
def own(tmp_path: Path) -> str:
    """A training config with its own model, layout, recipe and batch."""
    plain = {
        "run_dir": "runs/own", "data": [{"path": "runs/none/tokens/cc"}, {"path": "runs/none/tokens/books"}],
        "doremi": {"reference": "runs/reference"}, "model": {"preset": "125M", "qk_norm": True},
        "seq_len": 1024, "global_batch": 512, "micro_batch": 2, "steps": 1000, "phases": [{"first_step": 9,
        "global_batch": 64}], "precision": "bf16", "float8": {"recipe": "rowwise"}, "schedule": {"warmup": 100},
        "parallel": {"tp": 2, "reshard_after_forward": False}, "activation_checkpointing": "full",
        "checkpoint": {"interval": 50, "local": "/nvme"}, "compile": {"enabled": True, "backend": "aot_eager"},
    }  # fmt: skip
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(plain))
    return str(tmp_path / "own.yaml")


# ---- what is asked for


def test_lists_are_read_one_after_the_other(own: str) -> None:
    options = parse([
        own, "attention=sdpa", "--model", "1B", "llama3-8b", "--precision", "bf16", "fp8-tensorwise", "--layout", "",
        "dp_shard=4, tp=2", "--micro-batch", "8", "4", "--no-compile", "--steps", "5", "--json",
    ])  # fmt: skip
    assert options.configs == (own,)
    assert options.overrides == ("attention=sdpa",)
    assert options.model == ("1B", "llama3-8b")
    assert options.layout == ("", "dp_shard=4 tp=2")
    assert options.micro_batch == (8, 4)
    assert (options.compile, options.steps, options.warm_up, options.json) == (False, 5, 3, True)
    assert len(rows(options)) == 3 * 2 * 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "expected a CONFIG or --model: one of debug, 125M"),
        (
            "--model 8B",
            "--model: expected debug, 125M, 1B, llama3-8b, llama3-70b, llama3-405b, mixtral-8x7b, qwen3-30b-a3b, "
            "olmoe-1b-7b, got '8B'",
        ),
        ("none.yaml", "none.yaml: no such config file"),
        ("--model debug --precision fp8", "--precision: expected bf16, fp16, fp32, fp64, fp8-tensorwise,"),
        ("--model debug --layout ddp=2", "--layout: expected key=value of the section parallel (dp_replicate,"),
        ("--model debug --steps 0", "--steps: expected an integer ≥ 1, got '0'"),
        ("--model debug --warm-up -1", "--warm-up: expected an integer ≥ 0, got '-1'"),
        ("--model debug --peak-tflops nan", "--peak-tflops: expected a number ≥ 1e-06, got 'nan'"),
        ("--model debug --mean-document x", "--mean-document: expected a number ≥ 1, got 'x'"),
        ("--model debug --frobnicate", "unrecognized arguments: --frobnicate"),
        ("--model debug --checkpointing some", "--checkpointing: expected none, selective, full, got 'some'"),
    ],
)
def test_an_option_that_is_wrong_is_named(arguments: str, expected: str) -> None:
    with pytest.raises(InputError) as refused:
        parse(arguments.split())
    assert str(refused.value).startswith(expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("steps=4 --model debug", "override steps: is the benchmark's own"),
        ("checkpoint.interval=4 --model debug", "override checkpoint.interval: is the benchmark's own"),
        ("--model debug --variant data.0.path=x", "override data.0.path: is the benchmark's own"),
        ("--model debug --variant sdpa", "--variant: expected key=value, got 'sdpa'"),
        ("precision=fp32 --model debug --precision bf16", "override precision: is given as an option too"),
        ("parallel.tp=2 --model debug --layout pp=2", "override parallel.tp: is given as an option too"),
        ("model.num_layers=2 --model debug --layers 3", "override model.num_layers: is given as an option too"),
    ],
)
def test_a_key_that_means_nothing_here_is_refused(arguments: str, expected: str) -> None:
    with pytest.raises(InputError) as refused:
        rows(parse(arguments.split()))
    assert str(refused.value).startswith(expected)


# ---- what that makes of a config


def test_a_preset_is_trained_as_it_was_published() -> None:
    options = Options(model=("llama3-8b",), steps=5, warm_up=2)
    row = only(options)
    config: TrainConfig = config_of(row, options, world=8, micro_batch=2, cuda=True)
    assert vocab_size_of(row, options) == 128_256
    assert config.model.shape(128_256).num_parameters == 8_030_261_248  # as on the model's card
    assert (config.seq_len, config.precision, config.compile.enabled) == (4096, "bf16", True)
    assert (config.global_batch, config.micro_batch, config.steps) == (8 * 2, 2, 7)
    assert config.document_mask
    assert not config.metrics.live
    assert config.data[0].path == "/d/tokens/s"
    assert not config_of(row, options).compile.enabled  # no GPU
    one = Options(model=("1B",))
    assert config_of(only(one), one).model.shape(vocab_size_of(only(one), one)).num_parameters == 1_235_814_400


def test_a_config_keeps_what_a_step_is_and_nothing_else(own: str) -> None:
    options = Options(configs=(own,))
    config: TrainConfig = config_of(only(options), options, world=4)
    assert (config.model.preset, config.model.qk_norm, config.seq_len) == ("125M", True, 1024)
    assert (config.parallel.tp, config.parallel.reshard_after_forward) == (2, False)
    assert (config.float8.recipe, config.activation_checkpointing) == ("rowwise", "full")
    assert (config.compile.enabled, config.compile.backend) == (True, "aot_eager")
    assert config.global_batch == 2 * 2  # two data-parallel ranks, micro-batches of two
    assert config.phases == ()
    assert config.doremi == DoReMiConfig()
    assert config.checkpoint.local is None
    assert (config.run_dir, config.steps) == ("/d/run", 11)
    assert vocab_size_of(only(options), options) == 50_257  # its data is not here: GPT-2's, as the preset's


def test_options_replace_what_the_config_says(own: str) -> None:
    options = Options(
        configs=(own,), precision=("fp32",), layout=("pp=2 schedule=gpipe",), checkpointing=("none",), seq_len=64,
        layers=4, compile=False, vocab_size=1000, overrides=("float8.gradients=e5m2", "optimizer.clip=null"),
    )  # fmt: skip
    config: TrainConfig = config_of(only(options), options, world=4, micro_batch=3)
    assert (config.precision, config.float8.recipe, config.float8.gradients) == ("fp32", None, None)
    assert (config.parallel.pp, config.parallel.tp, config.parallel.reshard_after_forward) == (2, 1, None)
    assert (config.activation_checkpointing, config.seq_len, config.compile.enabled) == ("none", 64, False)
    assert config.model.num_layers == 4
    assert config.optimizer.clip is None
    assert config.global_batch == 3 * 2 * 8  # two data-parallel ranks; four micro-batches for each of two stages
    assert vocab_size_of(only(options), options) == 1000


def test_a_variant_of_fp8_is_no_row_of_other_precisions() -> None:
    options = Options(
        model=("debug",), precision=("bf16", "fp8-tensorwise"), variant=("", "float8.gradients=e5m2", "z_loss=1e-4")
    )
    found = [(row.precision, row.variant) for row in rows(options)]
    assert found == [
        ("bf16", ""), ("bf16", "z_loss=1e-4"), ("fp8-tensorwise", ""), ("fp8-tensorwise", "float8.gradients=e5m2"),
        ("fp8-tensorwise", "z_loss=1e-4"),
    ]  # fmt: skip
    configs = [config_of(row, options) for row in rows(options)]
    assert [c.float8.recipe for c in configs] == [None, None, *["tensorwise"] * 3]
    assert [c.float8.gradients for c in configs] == [None, None, None, "e5m2", None]
    assert [c.z_loss for c in configs] == [0, 1e-4, 0, 0, 1e-4]


def test_a_row_that_cannot_be_says_why() -> None:
    options = Options(model=("debug",), overrides=("modle.dim=3",))
    with pytest.raises(InputError, match=r"--model debug: modle: unknown key; did you mean 'model'\?"):
        config_of(only(options), options)
    options = Options(model=("debug",), layout=("tp=3",))
    with pytest.raises(InputError, match="tp 3 does not divide the 4 ranks"):
        config_of(only(options), options, world=4)


# ---- arithmetic


def test_figures_are_those_computed_by_hand() -> None:
    """Two layers, dim 8, 2 heads of 4, 1 key head, SwiGLU of 24, 100 ids, untied."""
    shape = ModelConfig(num_layers=2, dim=8, num_heads=2, num_kv_heads=1, ffn_dim=24).shape(100)
    block = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 24 + 2 * 8
    multiplied, head, attention = 2 * block, 100 * 8, 12 * 2 * 8 * 32
    found = figures(shape, [0.5, 0.25, 4.0], tokens=1024, seq_len=32, world=4, peak=1e6)
    assert found["step_time_s"] == 0.5
    assert (found["step_time_min_s"], found["step_time_max_s"]) == (0.25, 4.0)
    assert found["tokens_per_s"] == 2048
    assert found["tokens_per_s_per_device"] == 512
    for name, per_token in (
        ("full", 6 * (multiplied + head) + attention), ("causal", 6 * (multiplied + head) + attention / 2),
        ("full_without_head", 6 * multiplied + attention), ("causal_without_head", 6 * multiplied + attention / 2),
    ):  # fmt: skip
        assert found[f"tflops_{name}"] == pytest.approx(512 * per_token / 1e12, rel=1e-12)
        assert found[f"mfu_{name}"] == pytest.approx(512 * per_token / 1e6, rel=1e-12)
    without = figures(shape, [0.5], tokens=1024, seq_len=32, world=4, peak=None)
    assert without["mfu_full"] is without["peak_tflops"] is None
    assert without["tflops_full"] == found["tflops_full"]
    json.dumps(found, allow_nan=False)


def test_the_interval_is_that_of_all_resamples() -> None:
    """Five values have 3,125 samples with replacement; their medians' quantiles, exactly."""
    values = [1.0, 2.0, 4.0, 8.0, 16.0]
    medians = sorted(sorted(sample)[2] for sample in itertools.product(values, repeat=5))
    for share in (0.5, 0.95):
        ends = [medians[int((1 - share) / 2 * 3125)], medians[int((1 + share) / 2 * 3125)]]
        assert interval(values, share) == tuple(ends)
    assert interval([3.0]) == (3.0, 3.0)


# ---- data and weights


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (128_256, "uint32")])
def test_random_data_is_a_data_run(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    (path,) = write_random(tmp_path / "a", 200_000, 100.0, vocab_size)
    reader = ShardReader(path, verify=True)
    assert (reader.vocab_size, reader.eot_id, reader.dtype) == (vocab_size, vocab_size - 1, np.dtype(dtype))
    assert 200_000 <= reader.total_tokens < 220_000
    assert reader.total_tokens / reader.num_documents == pytest.approx(100, rel=0.1)
    tokens = np.concatenate([np.fromfile(file, dtype) for file in sorted(Path(path).glob("*.bin"))])
    assert tokens.max() == vocab_size - 1
    assert tokens[tokens < vocab_size - 1].mean() == pytest.approx(vocab_size / 2, rel=0.01)
    assert np.count_nonzero(tokens == vocab_size - 1) == pytest.approx(reader.num_documents, rel=0.01)
    write_random(tmp_path / "b", 200_000, 100.0, vocab_size)
    for file in (tmp_path / "a" / "tokens").rglob("*.*"):
        assert file.read_bytes() == (tmp_path / "b" / file.relative_to(tmp_path / "a")).read_bytes()


def test_more_data_than_is_worth_writing_is_read_again() -> None:
    options = Options(model=("llama3-8b",), steps=100)
    config = config_of(only(options), options, world=1000, micro_batch=8)
    assert config.steps * config.global_batch * config.seq_len > 1 << 31
    assert tokens_needed(config) < 1 << 27
    small = Options(model=("debug",), steps=1, warm_up=0, seq_len=64)
    assert tokens_needed(config_of(only(small), small)) >= 2 * 64 + 1


def test_drawn_weights_are_as_large_as_a_models() -> None:
    models = []
    for _ in range(2):
        model = Transformer(ModelConfig(preset="debug", num_layers=2).shape(512))
        draw_on_device(model, 3)
        models.append(dict(model.named_parameters()))
    for name, value in models[0].items():
        assert torch.equal(value, models[1][name]), name
        if value.ndim > 1:
            assert value.std().item() == pytest.approx(0.02, rel=0.05), name
            assert abs(value.mean().item()) < 1e-3, name
        else:
            assert torch.equal(value, torch.ones_like(value)), name
    assert not torch.equal(models[0]["blocks.0.attention.wq.weight"], models[0]["blocks.1.attention.wq.weight"])


# ---- rows


FIGURES = {
    "layout_text": "dp_shard 2", "accumulate": 1, "memory_gib": 1.5, "data_wait_share": 0.001, "not_finite": 0,
    "machine": {"device": "cpu", "cpus": {"EPYC, 2 cores": 1}, "gpus": {}, "hosts": ["a"]},
    **figures(ModelConfig(preset="debug").shape(512), [0.5, 0.6], tokens=1000, seq_len=64, world=2, peak=None),
}  # fmt: skip


def failed(text: str, kind: str = "failed", time: float = 0.0) -> dict[str, Any]:
    return {"error": text, "kind": kind, "time": time}


def benched(monkeypatch: pytest.MonkeyPatch, options: Options, results: Any) -> tuple[dict[str, Any], list[str]]:
    """The document where ranks are not started: ``results`` says what those of a config end with."""

    def ranks(self: Crew, folder: str, port: int) -> list[dict[str, Any]]:
        spec = json.loads(Path(folder, "spec.json").read_text())
        assert Path(spec["config"]["data"][0]["path"], "manifest.json").exists()
        found: list[dict[str, Any]] = results(TrainConfig.model_validate(spec["config"]))
        return found

    monkeypatch.setattr(Crew, "run", ranks)
    monkeypatch.setattr(run_module, "_has_cuda", lambda: False)
    said: list[str] = []
    document, first = bench(options, ["quern", "bench"], said.append)
    assert first
    return document, said


def test_a_row_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def results(config: TrainConfig) -> list[dict[str, Any]]:
        if config.precision == "fp32":  # the first to fail is the cause
            return [failed("Connection closed by peer", time=9.0), failed("CUDA error", time=7.0)]
        return [dict(FIGURES), {}]

    options = Options(
        model=("debug",), precision=("fp32", "bf16"), layout=("", "tp=3"), nproc=2, seq_len=32, steps=1,
        out=str(tmp_path / "o.json"), scratch=str(tmp_path / "s"),
    )  # fmt: skip
    document, said = benched(monkeypatch, options, results)
    assert [(row["ok"], row["error_kind"]) for row in document["rows"]] == [
        (False, "failed"), (True, None), (False, "refused"), (False, "refused"),
    ]  # fmt: skip
    assert document["rows"][0]["error"] == "rank 1: CUDA error"
    assert document["rows"][2]["error"].startswith("parallel: tp 3 does not divide the 2 ranks")
    assert document["machine"]["cpus"] == {"EPYC, 2 cores": 1}
    assert json.loads((tmp_path / "o.json").read_text()) == json.loads(json.dumps(document))
    assert len([line for line in said if line.startswith("    ")]) == 4
    (kept,) = (tmp_path / "s").iterdir()
    assert [path.name for path in kept.iterdir()] == ["row-000"]  # logs of what failed; no data


def test_what_cannot_be_written_is_known_before_the_first_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def results(config: TrainConfig) -> list[dict[str, Any]]:
        raise AssertionError("a row was run")

    options = Options(model=("debug",), seq_len=32, steps=1, out=str(tmp_path), scratch=str(tmp_path / "s"))
    with pytest.raises(InputError, match=r"--out: .* is a folder"):
        benched(monkeypatch, options, results)
    assert list((tmp_path / "s").iterdir()) == []


def test_a_variant_of_float8_needs_a_row_in_float8() -> None:
    with pytest.raises(InputError, match="--variant: a key of float8 is of FP8 rows alone"):
        rows(Options(model=("debug",), precision=("bf16",), variant=("float8.gradients=e5m2",)))


def test_a_value_of_a_layout_may_be_a_list() -> None:
    assert pairs("pp=2 stage_layers=[1, 2], tp=1") == ["pp=2", "stage_layers=[1, 2]", "tp=1"]
    assert pairs(" ") == []
    (row,) = rows(Options(model=("debug",), layout=("pp=2 stage_layers=[1, 2]",), layers=3))
    assert config_of(row, Options(model=("debug",), layers=3), world=2).parallel.stage_layers == (1, 2)


def test_the_precision_says_who_multiplies() -> None:
    own = TrainConfig.model_validate({"run_dir": "r", "data": [{"path": "p"}], "model": {"preset": "debug"}, "steps": 1,
                                      "seq_len": 8, "global_batch": 1, "schedule": {"warmup": 0},
                                      "float8": {"recipe": "tensorwise", "implementation": "torchao"}})  # fmt: skip
    assert run_module._known(own)["precision"] == "fp8-tensorwise (torchao)"


def test_the_table_names_rows_with_other_flash_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused on this machine; the ranks' figures are made up."""
    options = Options(model=("debug",), variant=("", "flash_attention=fa4"), overrides=("precision=bf16",), seq_len=32)
    document, _ = benched(monkeypatch, options, lambda config: [dict(FIGURES), {}])
    assert [row["flash_attention"] for row in document["rows"]] == ["default", "fa4"]
    (line,) = [line for line in table(document).splitlines() if line.endswith("flash_attention fa4")]
    assert "default" not in line


def test_of_several_micro_batches_the_first_that_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried = []

    def results(config: TrainConfig) -> list[dict[str, Any]]:
        tried.append(config.micro_batch)
        return [failed("CUDA out of memory", "out_of_memory") if config.micro_batch > 4 else dict(FIGURES)]

    options = Options(model=("debug",), micro_batch=(16, 8, 4, 2), seq_len=32, steps=1, scratch=str(tmp_path))
    document, _ = benched(monkeypatch, options, results)
    assert tried == [16, 8, 4]
    assert [(row["ok"], row["micro_batch"]) for row in document["rows"]] == [(True, 4)]
    assert list(tmp_path.iterdir()) == []
    document, _ = benched(monkeypatch, Options(model=("debug",), micro_batch=(16, 8), seq_len=32), results)
    assert [(row["ok"], row["error_kind"]) for row in document["rows"]] == [(False, "out_of_memory")]


def test_the_table_says_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(model=("debug",), layout=("", "tp=3"), nproc=2, seq_len=32, steps=1)
    document, _ = benched(monkeypatch, options, lambda config: [dict(FIGURES), {}])
    document["software"] |= {"commit": "0123456789abc", "modified": False}
    text = table(document)
    assert "1 × EPYC, 2 cores; quern" in text
    assert "(012345678), torch" in text
    (line,) = [line for line in text.splitlines() if line.startswith("debug ")]
    # 1,000 tokens in the median of 0.5 and 0.6 s, on two devices
    cells = re.split(r"\s{2,}", line)
    assert cells[:7] == ["debug", "dp_shard 2", "bf16", "none", "1×1", "1,818", "909"]
    assert cells[8:] == ["–", "–", "0.550", "0.500–0.600", "1.5", "0.1 %"]
    assert "failed: debug tp=3: parallel: tp 3 does not divide" in text
    assert "--peak-tflops" in text
    peak = FIGURES | {"mfu_full": 0.512, "mfu_causal": 0.48, "peak_tflops": 1.0}
    document, _ = benched(monkeypatch, options, lambda config: [dict(peak), {}])
    assert "51.2 %  48.0 %" in table(document)
    assert "--peak-tflops" not in table(document)
