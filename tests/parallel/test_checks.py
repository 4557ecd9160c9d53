"""What no layout can do is one line that names the key, the size, the axis and what would fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quern.errors import InputError
from quern.model.config import ModelConfig, ModelShape
from quern.model.float8.recipe import Recipe
from quern.parallel.planning import schedules
from quern.parallel.planning.checks import Task, check_layout
from quern.parallel.planning.mesh import plan_mesh
from quern.parallel.planning.schedules import SCHEDULES
from quern.train.config import ParallelConfig
from quern.train.summary import layout_of

TASK: dict[str, Any] = {"seq_len": 96, "micro_batch": 2, "batches": {"global_batch": 64}}
SIZES = {"num_layers": 8, "dim": 48, "num_heads": 12, "num_kv_heads": 4, "ffn_dim": 96, "vocab_multiple": 24}


@pytest.fixture(autouse=True)
def newer_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch 2.11 refuses besides has a test of its own."""
    monkeypatch.setattr(schedules, "version", {"torch": "2.13.0"}.__getitem__)


def check(world: int, keys: dict[str, Any], task: dict[str, Any] = TASK, vocab_size: int = 1000, **sizes: Any) -> None:
    shape: ModelShape = ModelConfig(**(SIZES | sizes)).shape(vocab_size)
    parallel, given = ParallelConfig(**keys), TASK | task
    about = Task(**{name: given.pop(name) for name in ("batches", "cuda", "local_ranks") if name in given})
    check_layout(shape, layout_of(parallel, plan_mesh(parallel, world), torch.float32, **given), about)


def test_every_key_of_the_section_reaches_the_layout_or_the_mesh() -> None:
    """A key that is taken and does nothing would be worse than none."""
    other = {"dp_shard": 4, "reshard_after_forward": 2, "schedule": "zbv_zero_bubble", "stages_per_rank": 3,
             "stage_layers": (1, 2), "nvlink_domain": 4, "cp_method": "ring"}  # fmt: skip
    for name, field in ParallelConfig.model_fields.items():
        if name == "ep":  # its one value
            continue
        usual = ParallelConfig(dp_shard=2)
        value = other.get(name, not field.default if isinstance(field.default, bool) else 2)
        changed = usual.model_copy(update={name: value})
        ranks = [own.dp_replicate * (own.dp_shard or 1) * own.tp * own.pp * own.cp for own in (usual, changed)]
        of = [layout_of(own, plan_mesh(own, number), torch.float32)
              for own, number in zip((usual, changed), ranks, strict=True)]  # fmt: skip
        assert of[0] != of[1], name


REFUSED: list[tuple[int, dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    # ranks, parallel, model, task, what is said
    (8, {"cp": 8}, {}, {},
     "parallel.cp: 8 ranks exchange heads; expected a divisor of the 12 query heads that is a divisor or a multiple of "
     "the 4 key heads: 1, 2, 4 or 12; or cp_method allgather or ring"),
    (8, {"cp": 4, "tp": 2}, {}, {},
     "parallel.cp: 4 ranks exchange heads; expected a divisor of the 6 query heads of a rank of tp 2 that is a divisor "
     "or a multiple of the 2 key heads: 1, 2 or 6; or cp_method allgather or ring"),
    (4, {"cp": 4, "cp_method": "allgather"}, {}, {"seq_len": 20},
     "seq_len: expected a multiple of 8 for cp 4 with allgather, got 20; 16 or 24 would fit"),
    (4, {"cp": 2, "tp": 2}, {}, {"seq_len": 2},
     "seq_len: expected a multiple of 4 for cp 2 with ulysses beside tp 2, got 2; 4 would fit"),
    (2, {"cp": 2}, {}, {"seq_len": 24, "micro_batch": 1, "float8": Recipe("tensorwise")},
     "float8.recipe: expected a multiple of 16 tokens in a micro-batch, got seq_len / cp 12 × micro_batch 1 = 12; "
     "micro_batch 4 would fit, or seq_len 32"),
    (5, {"tp": 5}, {}, {},
     "parallel.tp: expected a divisor of model.num_heads (12), got 5; tp 1, 2, 4 or 12 would fit"),
    (6, {"tp": 6}, {}, {},
     "parallel.tp: expected a divisor or a multiple of model.num_kv_heads (4), got 6; tp 1, 2, 4 or 12 would fit"),
    (4, {"tp": 4}, {"ffn_dim": 94}, {},
     "parallel.tp: expected a divisor of model.ffn_dim (94), got 4; tp 1 or 2 would fit, or model.ffn_dim 92 or 96"),
    (4, {"tp": 4}, {"vocab_multiple": 6}, {},
     "parallel.tp: expected a divisor of the padded vocabulary (1002: 1000 ids, model.vocab_multiple 6), got 4; "
     "tp 1 or 2 would fit, or model.vocab_multiple 12"),
    (4, {"tp": 4}, {}, {"seq_len": 98},
     "parallel.tp: expected a divisor of seq_len (98), got 4; tp 1 or 2 would fit, or seq_len 96 or 100"),
    (4, {"tp": 4}, {}, {"seq_len": 3},
     "parallel.tp: expected a divisor of seq_len (3), got 4; tp 1 would fit, or seq_len 4"),
    (4, {"tp": 4, "nvlink_domain": 2}, {}, {},
     "parallel.tp: a group of 4 ranks reaches beyond the NVLink domains (parallel.nvlink_domain 2); expected tp 1 or "
     "2, or tp_across_domains=true"),
    (12, {"tp": 4, "nvlink_domain": 6}, {}, {},
     "parallel.tp: a group of 4 ranks would lie across two of the NVLink domains (parallel.nvlink_domain 6); expected "
     "tp 1, 2, 3 or 6, or tp_across_domains=true"),
    (8, {"tp": 4}, {}, {"cuda": True, "local_ranks": 2},
     "parallel.tp: a group of 4 ranks reaches beyond the NVLink domains (2 ranks a node); expected tp 1 or 2, "
     "or tp_across_domains=true"),
    (2, {"nvlink_domain": 8}, {}, {},
     "parallel.nvlink_domain: changes nothing without tensor parallelism; expected tp > 1 with it"),
    (2, {"tp_across_domains": True}, {}, {},
     "parallel.tp_across_domains: changes nothing without tensor parallelism; expected tp > 1 with it"),
    (2, {"async_tp": True}, {}, {"compile_backend": "inductor", "cuda": True},
     "parallel.async_tp: changes nothing without tensor parallelism; expected tp > 1 with it"),
    (2, {"async_tp": True, "tp": 2}, {}, {"cuda": True},
     "parallel.async_tp: is a pass of torch.compile; expected compile.enabled=true with it"),
    (2, {"async_tp": True, "tp": 2}, {}, {"compile_backend": "inductor"},
     "parallel.async_tp: runs on CUDA only; expected false here (or device=cuda, to plan elsewhere)"),
    (2, {"tp_pieces": 2}, {}, {},
     "parallel.tp_pieces: changes nothing without tensor parallelism; expected tp > 1 with it"),
    (2, {"tp": 2, "tp_pieces": 4, "async_tp": True}, {}, {"compile_backend": "inductor", "cuda": True},
     "parallel.tp_pieces: expected 1 with async_tp, got 4; either overlaps the same collectives"),
    (4, {"tp": 4, "tp_pieces": 4}, {}, {"seq_len": 72},
     "parallel.tp_pieces: expected a divisor of a rank's tokens (seq_len 72 / tp 4 = 18), got 4; 1, 2, 3, 6, 9 or 18 "
     "would fit"),
    (2, {"tp": 2}, {}, {"compile_backend": "inductor", "activation_checkpointing": "full"},
     "activation_checkpointing: full in compiled blocks with tp > 1 makes torch's compiler fail on the CPU; expected "
     "none or selective, or compile.enabled=false"),
    (2, {"dp_replicate": 2, "zero": 1}, {}, {},
     "parallel.zero: changes nothing where FSDP2 shards no weights; expected dp_shard or cp > 1 with it, or null"),
    (4, {"dp_replicate": 2, "tp": 2, "zero": 3}, {}, {},
     "parallel.zero: changes nothing where FSDP2 shards no weights; expected dp_shard or cp > 1 with it, or null"),
    (2, {"schedule": "1f1b"}, {}, {},
     "parallel.schedule: changes nothing without a pipeline; expected pp > 1 with it, or null"),
    (2, {"stages_per_rank": 2}, {}, {},
     "parallel.stages_per_rank: changes nothing without a pipeline; expected pp > 1 with it, or null"),
    (2, {"stage_layers": (4, 4)}, {}, {},
     "parallel.stage_layers: changes nothing without a pipeline; expected pp > 1 with it, or null"),
    (2, {"pp": 2, "stages_per_rank": 2}, {}, {},
     "parallel.stages_per_rank: schedule 1f1b has 1 a rank; expected null, or one of the schedules that take it: "
     "interleaved_1f1b, looped_bfs, interleaved_zero_bubble"),
    (2, {"pp": 2, "schedule": "zbv_zero_bubble", "stages_per_rank": 2}, {}, {},
     "parallel.stages_per_rank: schedule zbv_zero_bubble has 2 a rank; expected null, or one of the schedules that "
     "take it: interleaved_1f1b, looped_bfs, interleaved_zero_bubble"),
    (2, {"pp": 2, "schedule": "looped_bfs", "stages_per_rank": 1}, {}, {},
     "parallel.stages_per_rank: schedule looped_bfs takes 2 or more, got 1; expected that, or 1f1b"),
    (16, {"pp": 16}, {}, {},
     "parallel.pp: 16 ranks × 1 stages a rank (1f1b) need 16 layers or more, model.num_layers is 8; "
     "pp up to 8 would fit"),
    (4, {"pp": 4, "schedule": "interleaved_1f1b", "stages_per_rank": 3}, {}, {},
     "parallel.pp: 4 ranks × 3 stages a rank (interleaved_1f1b) need 12 layers or more, model.num_layers is 8; "
     "pp up to 2 or stages_per_rank up to 2 or schedule 1f1b would fit"),
    (2, {"pp": 2, "stage_layers": (3, 3, 2)}, {}, {},
     "parallel.stage_layers: expected 2 numbers ≥ 1 (one a stage) that add up to 8 layers, got 3 that add up to 8; "),
    (2, {"pp": 2, "stage_layers": (4, 5)}, {}, {},
     "parallel.stage_layers: expected 2 numbers ≥ 1 (one a stage) that add up to 8 layers, got 2 that add up to 9; "),
    (2, {"pp": 2}, {}, {"batches": {"global_batch": 1}, "micro_batch": 1},
     "global_batch: 1 sequence is 1 micro-batch a rank (1 data-parallel × micro_batch 1); schedule 1f1b with pp 2: "
     "expected 2 micro-batches or more, one for every stage, got 1; global_batch 2 would fit"),
    (4, {"pp": 4}, {}, {"batches": {"global_batch": 4}},
     "global_batch: 4 sequences are 2 micro-batches a rank (1 data-parallel × micro_batch 2); schedule 1f1b with pp 4: "
     "expected 4 micro-batches or more, one for every stage, got 2; global_batch 8 or micro_batch 1 would fit"),
    (4, {"pp": 4}, {}, {"batches": {"global_batch": 3}, "micro_batch": 1},
     "global_batch: 3 sequences are 3 micro-batches a rank (1 data-parallel × micro_batch 1); schedule 1f1b with pp 4: "
     "expected 4 micro-batches or more, one for every stage, got 3; global_batch 4 would fit"),
    (4, {"pp": 2, "schedule": "interleaved_1f1b"}, {},
     {"batches": {"global_batch": 64, "phases.0.global_batch": 20}},
     "phases.0.global_batch: 20 sequences are 5 micro-batches a rank (2 data-parallel × micro_batch 2); schedule "
     "interleaved_1f1b with pp 2: expected a number that falls into rounds of equal size (⌊micro-batches / pp⌋ = 2 "
     "rounds here), got 5; phases.0.global_batch 16 or 24 or micro_batch 1, 5 or 10 would fit"),
    (2, {"pp": 2, "schedule": "dualpipe_v"}, {}, {"activation_checkpointing": "selective"},
     "activation_checkpointing: schedule dualpipe_v computes gradients of inputs and of weights apart, and with "
     "selective torch would compute every block three times; expected none, or schedule gpipe, 1f1b, interleaved_1f1b "
     "or looped_bfs"),
    (2, {"pp": 2, "schedule": "interleaved_zero_bubble"}, {}, {"compile_backend": "inductor"},
     "compile.enabled: schedule interleaved_zero_bubble computes gradients of inputs and of weights apart, and a "
     "compiled block's backward is one piece, which torch refuses to run in two; expected false, or schedule gpipe, "
     "1f1b, interleaved_1f1b or looped_bfs"),
    *((4, {"pp": 2, "schedule": "zbv_zero_bubble", **keys}, {}, {},
       "parallel.reshard_after_forward: schedule zbv_zero_bubble computes gradients of inputs and of weights apart, "
       "and FSDP2 loses gradients of weights that are dropped in between; expected false or null, or schedule gpipe, "
       "1f1b, interleaved_1f1b or looped_bfs")
      for keys in ({"reshard_after_forward": True}, {"reshard_after_forward": 2},
                   {"reshard_after_forward": True, "dp_replicate": 2})),
]  # fmt: skip


@pytest.mark.parametrize(("world", "keys", "sizes", "task", "message"), REFUSED, ids=[row[-1][:60] for row in REFUSED])
def test_refused(world: int, keys: dict[str, Any], sizes: dict[str, Any], task: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        check(world, keys, task, **sizes)
    said = str(caught.value)
    assert said == message or (message.endswith("; ") and said.startswith(message))
    assert "\n" not in said
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("world", "keys", "task"),
    [
        (1, {}, {}),
        (12, {"tp": 12}, {}),  # three ranks a key head
        (8, {"tp": 4, "nvlink_domain": 2, "tp_across_domains": True}, {}),
        (4, {"tp": 4, "nvlink_domain": 6}, {}),  # the only group, though the next would not fit
        (8, {"tp": 4}, {"cuda": True, "local_ranks": 8}),
        (8, {"tp": 4}, {"local_ranks": 2}),  # without CUDA there is no NVLink to speak of
        (4, {"tp": 2, "async_tp": True}, {"compile_backend": "inductor", "cuda": True}),
        (4, {"tp": 4, "tp_pieces": 6}, {"seq_len": 72}),
        (4, {"tp": 2, "tp_pieces": 2}, {"compile_backend": "inductor", "activation_checkpointing": "selective"}),
        (8, {"tp": 2, "pp": 2}, {"activation_checkpointing": "selective", "compile_backend": "inductor"}),
        *((2, {"pp": 2, "schedule": name}, {}) for name in SCHEDULES),
        (2, {"pp": 2, "schedule": "looped_bfs", "stages_per_rank": 4}, {}),
        (2, {"pp": 2, "stage_layers": (7, 1)}, {}),
        (2, {"pp": 2, "schedule": "gpipe"}, {"batches": {"global_batch": 2}}),
    ],
)
def test_taken(world: int, keys: dict[str, Any], task: dict[str, Any]) -> None:
    check(world, keys, task)


def test_what_is_said_to_fit_does() -> None:
    """Whatever tp is asked for, the sizes that the refusal offers are taken, and no other divisor of the heads is."""
    for sizes in (
        {},
        {"num_kv_heads": 3},
        {"num_kv_heads": 12, "ffn_dim": 90},
        {"num_kv_heads": 1, "vocab_multiple": 1},
    ):
        taken = []
        for tp in range(1, 25):
            try:
                check(tp, {"tp": tp}, **sizes)
                taken.append(tp)
            except InputError as error:
                refusal = str(error)
        offered = refusal.split("; tp ")[1].split(" would fit")[0].replace(" or ", ", ").split(", ")
        assert [int(size) for size in offered] == taken


def test_a_split_backward_is_refused_on_torch_2_11(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "version", {"torch": "2.11.0+cpu"}.__getitem__)
    check(4, {"pp": 2, "schedule": "interleaved_1f1b"})
    with pytest.raises(InputError, match=r"^parallel\.schedule: zbv_zero_bubble .*which torch 2\.11\.0\+cpu cannot do"):
        check(4, {"pp": 2, "schedule": "zbv_zero_bubble"})
