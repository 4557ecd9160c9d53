"""FlashAttention 3 and 4: refused where torch could not run them, else torch's own registry has them; by a stand-in for
their package."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import current_flash_attention_impl

from quern.errors import InputError
from quern.model.config import ModelConfig
from quern.torch_versions import set_flash_attention
from quern.train import flash
from quern.train.processes.ranks import Ranks, open_ranks
from quern.train.setup import _model, check_settings, open_trainer
from quern.train.step.precision import precision_of
from support.train import run_case as case

CPU, CUDA = torch.device("cpu"), Ranks(0, 1, torch.device("cuda"))


@pytest.fixture
def paths(tmp_path):
    return case.write_corpus(tmp_path / "data", {"web": 60, "code": 25, "web.val": 9})[:2]


@pytest.fixture
def package(monkeypatch, request) -> Iterator[None]:
    """What torch looks for of FlashAttention 3, on a GPU of Hopper."""
    hopper(monkeypatch)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", types.ModuleType("flash_attn_interface"))
    operators = torch.library.Library("flash_attn_3", "FRAGMENT")
    for name in getattr(request, "param", ("fwd", "bwd")):
        operators.define(f"{name}(Tensor q) -> Tensor")
    yield
    set_flash_attention(None)
    operators._destroy()


def hopper(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def shape_of(head_dim: int = 64) -> Any:
    return ModelConfig(num_layers=1, dim=4 * head_dim, num_heads=4, num_kv_heads=2).shape(50)


def backends() -> list[bool]:
    """Of SDPA: cuDNN's, flash, memory-efficient, by products."""
    own = torch.backends.cuda
    return [
        own.cudnn_sdp_enabled(), own.flash_sdp_enabled(), own.mem_efficient_sdp_enabled(), own.math_sdp_enabled(),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "head_dim", "expected"),
    [
        ({"device": "cpu"}, 64, "flash_attention: fa3 runs on CUDA only; expected default on cpu"),
        ({"precision": "fp32"}, 64, "flash_attention: fa3 computes in bf16 or fp16; expected default in fp32"),
        ({"attention": "flex"}, 64, "attention: flex has kernels of its own; expected auto or varlen with"),
        ({"attention": "flex", "document_mask": False}, 64, "attention: flex has kernels of its own"),
        ({"attention": "sdpa"}, 64, "attention: sdpa masks documents, and flash kernels no mask; expected auto or"),
        ({}, 68, "flash_attention: fa3 expects a head_dim of 8, 16, … 256, got 68"),
        ({}, 264, "flash_attention: fa3 expects a head_dim of 8, 16, … 256, got 264"),
        ({"deterministic": True}, 200, "deterministic: fa3 has no such backward for a head_dim above 192, got 200"),
        ({"deterministic": True}, 192, None),
        ({"deterministic": True, "flash_attention": "fa4"}, 256, None),
        ({"precision": "fp16"}, 256, None),
        ({"attention": "sdpa", "document_mask": False}, 64, None),
        ({"attention": "varlen", "flash_attention": "fa4"}, 64, None),
        ({"flash_attention": "default", "precision": "fp32", "device": "cpu"}, 64, None),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_before_a_gpu_is_there(tmp_path, paths, given, head_dim, expected):
    sizes = {"num_layers": 1, "dim": 4 * head_dim, "num_heads": 4, "num_kv_heads": 2}
    config = case.settings(
        tmp_path / "run", paths, **{"flash_attention": "fa3", "device": "cuda", "precision": "bf16", **given},
        model=sizes,
    )  # fmt: skip
    if expected is None:
        check_settings(config, 1, 50)
    else:
        with pytest.raises(InputError, match=f"^{re.escape(expected)}"):
            check_settings(config, 1, 50)


def test_a_device_that_is_found_to_be_a_cpu_is_refused(tmp_path, paths):
    config = case.settings(tmp_path / "run", paths, flash_attention="fa4", device="auto", precision="bf16")
    check_settings(config, 1, 50)
    with pytest.raises(InputError, match="flash_attention: fa4 runs on CUDA only; expected default on cpu"):
        _model(config, shape_of(), precision_of("bf16"), Ranks(0, 1, CPU))
    assert _model(config, shape_of(), precision_of("bf16"), CUDA).attention == "varlen"


@pytest.mark.parametrize(
    ("which", "capability", "fits"), [("fa3", (8, 9), "9"), ("fa3", (10, 0), "9"), ("fa4", (12, 0), "9 and 10")]
)
def test_a_gpu_that_does_not_fit_is_refused(tmp_path, paths, package, monkeypatch, which, capability, fits):
    hopper(monkeypatch, capability)
    refused(
        tmp_path, paths, which,
        rf"^flash_attention: {which} is for GPUs of NVIDIA's compute capability {fits}, got {capability[0]}\."
        rf"{capability[1]} \(a card\); expected default$",
    )  # fmt: skip
    hopper(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm calls its devices cuda too, and some of them 9.x
    refused(tmp_path, paths, which, f"flash_attention: {which} is for GPUs of NVIDIA's compute capability {fits}, ")


@pytest.mark.parametrize(
    ("which", "module", "install"),
    [("fa3", "flash_attn_interface", r"python setup\.py install in hopper/"),
     ("fa4", "flash_attn", "pip install flash-attn-4")],
)  # fmt: skip
def test_a_package_that_is_missing_is_named(tmp_path, paths, monkeypatch, which, module, install):
    hopper(monkeypatch)
    monkeypatch.setitem(sys.modules, module, None)  # importing it fails, whether it is there or not
    refused(
        tmp_path, paths, which, rf"^flash_attention: {which} needs the package {module}.* \({install}.*\), and here"
    )


@pytest.mark.parametrize("package", [("fwd",)], indirect=True)
def test_a_package_without_a_backward_pass_is_refused(tmp_path, paths, package):
    refused(tmp_path, paths, "fa3", "does not expose FA3 backward kernels")


def refused(tmp_path, paths, which: str, expected: str) -> None:
    config = case.settings(tmp_path / "run", paths, flash_attention=which, precision="bf16", document_mask=False)
    with pytest.raises(InputError, match=expected):
        flash.use_flash(config, shape_of(), precision_of("bf16"), "sdpa", CPU)
    assert current_flash_attention_impl() is None
    assert backends() == [True] * 4


def test_it_is_torchs_own_from_then_on_and_cudnns_is_off(tmp_path, paths, package, monkeypatch):
    """The trial's own call sees the flash backend alone. Another run in the process, without it, sets all back."""
    seen: list[Any] = []
    attend = flash.attend

    def spied(q, k, v, mask):
        seen.append((current_flash_attention_impl(), backends(), tuple(q.shape[2:]), k.shape[2], q.dtype, mask))
        return attend(q, k, v, mask)

    monkeypatch.setattr(flash, "attend", spied)
    config = case.settings(tmp_path / "run", paths, flash_attention="fa3", precision="bf16", document_mask=False)
    flash.use_flash(config, shape_of(), precision_of("bf16"), "varlen", CPU)  # without documents it is sdpa
    assert seen == [("FA3", [False, True, False, False], (4, 64), 2, torch.bfloat16, None)]
    assert current_flash_attention_impl() == "FA3"
    assert backends() == [False, True, True, True]
    plain = case.settings(tmp_path / "run", paths, steps=1, schedule={"warmup": 1})
    with open_ranks("cpu") as ranks, open_trainer(plain, ranks):
        assert current_flash_attention_impl() is None
        assert backends() == [True] * 4
    assert json.loads((tmp_path / "run" / "run.json").read_text())["flash_attention"] == "default"


def test_what_the_user_has_switched_off_stays_off_by_default():
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        set_flash_attention(None)
        assert backends() == [False, True, True, True]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("fails", ["raises", "nan"])
def test_a_trial_that_fails_is_refused_and_leaves_torchs_own(tmp_path, paths, package, monkeypatch, fails):
    def attend(q, k, v, mask):
        if fails == "raises":
            raise ValueError("too many values to unpack")
        return q * k.repeat_interleave(2, 2) * v.repeat_interleave(2, 2) * torch.nan

    monkeypatch.setattr(flash, "attend", attend)
    why = {"raises": "ValueError: too many values to unpack", "nan": "RuntimeError: numbers that are not finite"}
    refused(
        tmp_path, paths, "fa3",
        rf"^flash_attention: fa3 fails with 4 heads of 64 and 2 of keys in bf16: {why[fails]}; expected default, or",
    )  # fmt: skip


def test_the_trial_of_documents_is_varlens(tmp_path, paths, package, monkeypatch):
    """The kernel is CUDA's: what it would be given."""
    given: list[Any] = []

    def attend(q, k, v, mask):
        given.append(mask)
        return q * 1.0 + (k + v).sum()

    monkeypatch.setattr(flash, "attend", attend)
    monkeypatch.setattr(flash, "attention_mask", lambda backend, documents, device: (backend, documents))
    config = case.settings(tmp_path / "run", paths, flash_attention="fa3", precision="bf16")
    flash.use_flash(config, shape_of(), precision_of("bf16"), "varlen", CPU)
    [(backend, documents)] = given
    assert backend == "varlen"
    assert documents.cu_seqlens.tolist() == [0, 100, 256]
    assert documents.max_seqlen == max(100, 256 - 100)


@pytest.mark.parametrize("method", ["allgather", "ring"])
@pytest.mark.parametrize("fails", [None, "forward", "backward"])
def test_the_trial_of_shared_keys_has_more_keys_than_queries(tmp_path, paths, package, monkeypatch, method, fails):
    """The kernel is CUDA's: what it would be given. A package may lack what cp needs and have all else."""
    given: list[Any] = []
    forward, backward = flash.kernels.forward, flash.kernels.backward

    def spied(q, k, v, by):
        stretches = [torch.diff(own).tolist() for own in (by.cu_queries, by.cu_keys)]
        given.append((tuple(q.shape), tuple(k.shape), q.dtype, by.causal, *stretches, by.longest))
        if fails == "forward":
            raise RuntimeError("cu_seqlens_q and cu_seqlens_k differ")
        return forward(q, k, v, by)

    def nan(*of):
        return [own * torch.nan if fails == "backward" else own for own in backward(*of)]

    monkeypatch.setattr(flash.kernels, "forward", spied)
    monkeypatch.setattr(flash.kernels, "backward", nan)
    monkeypatch.setattr(flash, "attend", None)
    cp = {"cp": 2, "cp_method": method}
    config = case.settings(tmp_path / "run", paths, flash_attention="fa3", precision="bf16", parallel=cp)
    if fails is None:
        flash.use_flash(config, shape_of(), precision_of("bf16"), "varlen", CPU)
    else:
        with pytest.raises(
            InputError, match=r"^flash_attention: fa3 fails with 4 heads of 64 and 2 of keys in bf16: R.*"
        ):
            flash.use_flash(config, shape_of(), precision_of("bf16"), "varlen", CPU)
        assert current_flash_attention_impl() is None
    queries, keys = (128, 4, 64), (256, 2, 64)
    rest = [50, 78], [100, 156], (78, 156)
    expected = [(queries, keys, torch.bfloat16, causal, *rest) for causal in (True, False)]
    assert given == expected[: 1 if fails == "forward" else 2]
