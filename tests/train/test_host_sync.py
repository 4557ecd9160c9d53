"""No host sync in the steady state: a training step is queued whole, the host never waits for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quern.parallel.local import RankError
from support.train import sync_case

FLOAT8 = {
    "precision": "bf16", "micro_batch": 4, "model": {"dim": 128, "ffn_dim": 128, "num_kv_heads": 4, "num_heads": 4},
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no document masks": {"document_mask": False},
    "spikes skipped": {"guard": {"spike": "skip"}, "z_loss": 0.1},
    "loss scale": {"precision": "fp16"},
    "selective recomputation": {"precision": "bf16", "activation_checkpointing": "selective"},
    "doremi": {"learns": True},
    "untied": {"model": {"tied_embeddings": False, "qk_norm": True}},
}
LATER = ("no document masks", "untied", "selective recomputation", "loss scale", "tensorwise", "rowwise", "blockwise")
CASES |= {scaling: {**FLOAT8, "float8": {"recipe": scaling}} for scaling in ("tensorwise", "rowwise", "blockwise")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long)
     if name in LATER else name for name in CASES],
)  # fmt: skip
def test_steady_state_does_not_wait(name: str, tmp_path: Path) -> None:
    done = sync_case.in_a_process(sync_case.steps, str(tmp_path), CASES[name])
    assert done == sync_case.FIRST + 1  # the last step's figures are read with the next one's


@pytest.mark.slow
def test_reading_a_value_is_found_in_every_part_of_a_step(tmp_path: Path) -> None:
    said = sync_case.in_a_process(sync_case.spoilt, str(tmp_path))
    assert set(said) == set(sync_case.PARTS)
    for part, text in said.items():
        assert "_local_scalar_dense" in text, part
        assert "trainer.py" in text, f"{part}: {text}"


@pytest.mark.slow
def test_reading_a_value_is_found_in_backward(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"HostWaitError: aten._local_scalar_dense.* at .*accumulation.py"):
        sync_case.in_a_process(sync_case.backward_reads, str(tmp_path))


def test_everything_that_waits_is_found_and_nothing_else() -> None:
    for name, text in sync_case.in_a_process(sync_case.waits).items():
        assert bool(text) != name.startswith("free"), f"{name}: {text!r}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_steady_state_does_not_synchronise_cuda(tmp_path: Path) -> None:
    """By CUDA's own count, which knows its kernels too."""
    sync_case.in_a_process(sync_case.on_cuda, str(tmp_path), {"precision": "bf16", "device": "cuda"})
