"""The search against a plain one: every combination as a training config, checked as a run is, without pruning."""

from __future__ import annotations

import itertools
from statistics import median
from typing import Any

import pytest
import yaml

from quern.errors import InputError
from quern.model.config import ModelConfig
from quern.parallel.planning import bubble
from quern.planner.answer import answer, ways_out
from quern.planner.candidates import Choice, Wish, candidates, step_of
from quern.planner.hardware import Hardware, load_hardware, names
from quern.planner.memory.peak import State
from quern.planner.search import AS_FAST, GIB, Found, Search, pareto, room
from quern.planner.time.estimate import AtLeast, estimate
from quern.train.config import TrainConfig
from quern.train.setup import check_settings
from quern.train.summary import step_of as configured_step

SIZES = {"num_layers": 4, "dim": 512, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 1536}
VOCAB = 4096


def wish_of(gpus: int = 4, batch: int = 8, seq_len: int = 8192, **more: Any) -> Wish:
    return Wish(ModelConfig(**SIZES, **more).shape(VOCAB), gpus, 8, seq_len, batch)


def small(memory_gib: float) -> Hardware:
    return load_hardware("h100").model_copy(update={"memory_gib": memory_gib, "reserved_gib": 0.1})


def seconds(found: Found) -> float:
    assert found.time is not None
    return found.time.seconds


def config_of(choice: Choice, wish: Wish) -> TrainConfig:
    more = {"run_dir": "x", "data": [{"path": "y", "weight": 1}], "steps": 5000, "device": "cuda", "model": SIZES}
    return TrainConfig.model_validate(more | choice.sections(wish))


def every(wish: Wish) -> list[Choice]:
    """Every combination of values that a training run takes."""
    found = []
    values: dict[str, tuple[Any, ...]] = {
        "tp": (1, 2, 4), "pp": (1, 2, 4), "cp": (1, 2), "dp_replicate": (1, 2, 4), "dp_shard": (1, 2, 4),
        "zero": (None, 1, 2), "schedule": (None, "1f1b", "interleaved_1f1b"), "stages_per_rank": (None, 2, 4),
        "micro_batch": (1, 2, 4, 8), "checkpointing": ("none", "selective", "full"),
    }  # fmt: skip
    for row in itertools.product(*values.values()):
        choice = Choice(**dict(zip(values, row, strict=True)))
        if choice.plan.world_size != wish.gpus or (choice.pp > 1) != (choice.schedule is not None):
            continue
        if choice.stages_per_rank is None and choice.schedule == "interleaved_1f1b":
            continue  # which is 2
        if choice.pp > 1 and choice.zero == 1:
            continue  # what a pipeline does anyway
        try:
            check_settings(config_of(choice, wish), wish.gpus, VOCAB)
        except (InputError, ValueError):
            continue
        found.append(choice)
    return found


@pytest.fixture(scope="module")
def legal() -> list[Choice]:
    return every(wish_of())


def test_all_layouts_that_a_run_takes_are_looked_at(legal: list[Choice]) -> None:
    assert len(legal) > 100
    assert sorted(map(str, candidates(wish_of()))) == sorted(map(str, legal))


@pytest.mark.parametrize("memory_gib", [80.0, 1.2, 0.9])
def test_none_is_faster_than_the_best(legal: list[Choice], memory_gib: float) -> None:
    wish, hardware, state = wish_of(), small(memory_gib), State(documents=True)
    times = {}
    for choice in legal:
        step = step_of(choice, wish)
        if not room(step, state, hardware).short:
            times[choice] = estimate(step, hardware).seconds
    assert 0 < len(times) < len(legal) or memory_gib == 80
    found = Search(wish, state, hardware)
    assert found.best is not None
    assert found.best.time is not None
    assert found.best.time.seconds <= (1 + AS_FAST) * min(times.values())
    ranked = sorted(times.values())
    assert [seconds(one) for one in found.fastest(3)] == ranked[:3]
    assert [seconds(one) for one in found.within(2 * ranked[0])] == [one for one in ranked if one <= 2 * ranked[0]]
    assert {one.choice for one in found.fastest()} == set(times)


@pytest.mark.parametrize(
    ("preset", "gpus", "fixed", "compiled"),
    [
        ("llama3-8b", 16, {}, True), ("llama3-8b", 64, {"tp": 2}, False),
        pytest.param("qwen3-30b-a3b", 16, {"micro_batch": 1, "zero": None}, True, marks=pytest.mark.long),
        pytest.param("llama3-70b", 64, {"schedule": "zbv_zero_bubble"}, False, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_no_step_is_faster_than_the_least_that_it_takes(
    preset: str, gpus: int, fixed: dict[str, Any], compiled: bool
) -> None:
    """Of dense models and of experts, with every axis, schedule and policy, compiled and not."""
    hardware = load_hardware("h100")
    shape, at_least = ModelConfig.model_validate({"preset": preset}).shape(128_256), AtLeast(hardware)
    wish = Wish(shape, gpus, 8, 8192, 128, compiled=compiled, fixed=fixed)
    steps = [step_of(choice, wish) for choice in candidates(wish)][::19]
    assert len(steps) > 10
    shares = []
    for step in steps:
        took = estimate(step, hardware).seconds
        assert at_least(step) <= took * (1 + 1e-9), step.layout
        shares.append(at_least(step) / took)
    assert median(shares) > 0.75


def test_of_layouts_that_do_not_fit_the_nearest_is_told() -> None:
    wish, state, hardware = wish_of(), State(documents=True), small(0.2)
    found = Search(wish, state, hardware)
    assert not found.fastest()
    assert found.best is not None
    short = [room(step_of(choice, wish), state, hardware).short for choice in candidates(wish)]
    assert found.best.room.short == min(short)
    told = answer(wish, state, hardware, found, 1e9)
    assert not told["fits"]
    assert told["run"] is None
    assert any("is short by" in reason["why"] for reason in told["reasons"])


def test_reasons_name_the_best_with_another_value() -> None:
    found = Search(wish_of(), State(documents=True), small(1.2))
    assert found.best is not None
    for name in ("tp", "micro_batch", "checkpointing"):
        other = found.without(name)
        assert other is not None
        assert getattr(other.choice, name) != getattr(found.best.choice, name)
        faster = [one for one in found.fastest() if seconds(one) < seconds(other)]
        assert all(getattr(one.choice, name) == getattr(found.best.choice, name) for one in faster)


def test_pareto_layouts_are_not_dominated() -> None:
    found = Search(wish_of(), State(documents=True), small(80))
    front = pareto(found.fastest())
    assert len(front) > 1
    for one in front:
        for other in found.fastest():
            assert not (seconds(other) < seconds(one) and other.room.needs <= one.room.needs)


def test_the_config_says_the_same_step_as_the_search() -> None:
    wish = wish_of()
    for choice in list(candidates(wish))[::37]:
        config = config_of(choice, wish)
        layout = check_settings(config, wish.gpus, VOCAB)
        planned, configured = step_of(choice, wish), configured_step(config, wish.shape, layout)
        for name in ("num_micro_batches", "compute_bytes", "reduce_bytes", "loss_chunk", "gradient_bytes", "plan"):
            assert getattr(planned, name) == getattr(configured, name), (name, choice)
        for name in ("reshard_after_forward", "zero", "activation_checkpointing", "schedule", "stages_per_rank",
                     "micro_batch", "seq_len", "context", "host_state", "compile_backend"):  # fmt: skip
            assert getattr(planned.layout, name) == getattr(layout, name), (name, choice)


@pytest.mark.parametrize(
    ("name", "value"),
    [("tp", 2), ("pp", 2), ("cp", 2), ("dp_replicate", 2), ("dp_shard", 2), ("zero", 2), ("schedule", "1f1b"),
     ("stages_per_rank", 2), ("micro_batch", 2), ("checkpointing", "full")],
)  # fmt: skip
def test_a_fixed_value_is_the_only_one(name: str, value: Any) -> None:
    wish = wish_of()
    fixed = Wish(wish.shape, 4, 8, wish.seq_len, 8, fixed={name: value})
    found = set(candidates(fixed))
    assert found == {one for one in candidates(wish) if getattr(one, name) == value}
    assert found


def test_a_fixed_number_of_ranks_of_experts_divides_the_shards() -> None:
    shape = ModelConfig(preset="qwen3-30b-a3b").shape(VOCAB)
    fixed = {"pp": 1, "cp": 1, "tp": 1, "ep": 8}
    found = list(candidates(Wish(shape, 16, 8, 8192, 512, fixed=fixed)))
    assert found
    assert all(one.ep == 8 and one.dp_shard % 8 == 0 for one in found)


def test_state_on_the_host_needs_room_there() -> None:
    wish, hardware = wish_of(), small(80)
    fixed = Wish(wish.shape, 4, 8, wish.seq_len, 8, fixed={"host_state": True, "tp": 1, "pp": 1})
    assert Search(fixed, State(), hardware).fastest()
    found = Search(fixed, State(), hardware.model_copy(update={"host_gib": 0.01}))
    assert not found.fastest()
    assert found.best is not None
    assert found.best.room.short == found.best.room.on_host - found.best.room.host_has > 0
    assert found.best.room.lacks.endswith(" of the host's memory for a GPU")


def test_one_large_micro_batch_may_fit_where_several_small_ones_do_not() -> None:
    """Of one alone no gradients are whole before its backward, and none of others are there."""
    shape, hardware, state = ModelConfig(preset="llama3-8b").shape(128_256), load_hardware("h100"), State()
    fixed = {"dp_replicate": 2, "dp_shard": 4, "zero": 1, "checkpointing": "full", "tp": 1, "pp": 1, "cp": 1}
    wish = Wish(shape, 8, 8, 8192, 32, fixed=fixed)
    tight = hardware.model_copy(update={"memory_gib": 70.0})
    by_hand = {one.micro_batch for one in candidates(wish) if not room(step_of(one, wish), state, tight).short}
    assert {one.choice.micro_batch for one in Search(wish, state, tight).fastest()} == by_hand == {4}


def test_a_large_micro_batch_may_need_less_where_messages_are_kept() -> None:
    """Interleaved, a rank keeps what it sent until the step ends, and larger micro-batches are fewer messages."""
    fixed = {
        "pp": 4, "tp": 1, "cp": 1, "dp_shard": 4, "schedule": "interleaved_1f1b", "stages_per_rank": 4,
        "checkpointing": "full",
    }  # fmt: skip
    wish = Wish(ModelConfig(preset="1B").shape(128_256), 16, 8, 4096, 64, fixed=fixed)
    state, tight = State(documents=True), load_hardware("h100").model_copy(update={"memory_gib": 14.0})
    by_hand = {one.micro_batch for one in candidates(wish) if not room(step_of(one, wish), state, tight).short}
    assert {one.choice.micro_batch for one in Search(wish, state, tight).fastest()} == by_hand
    assert by_hand
    assert 1 not in by_hand


def test_a_model_of_one_layer_is_planned() -> None:
    wish = Wish(ModelConfig(**SIZES | {"num_layers": 1}).shape(VOCAB), 2, 8, 8192, 8)
    assert Search(wish, State(), small(80)).best is not None


def test_what_would_fit_on_another_gpu_is_a_layout_of_its_nodes() -> None:
    """A node of an NVL72 takes 16 ranks of tp, and one of MI300X eight."""
    fixed = {"tp": 16, "pp": 1, "cp": 1, "dp_shard": 1, "checkpointing": "none", "micro_batch": 1}
    wish = Wish(ModelConfig(preset="llama3-70b").shape(128_256), 16, 16, 69_632, 64, fixed=fixed)
    whole, one = load_hardware("gb200-nvl72"), load_hardware("mi300x")
    assert whole.memory_gib < one.memory_gib
    assert Search(wish, State(), one).fastest()  # as if tp went over nodes
    assert one.title not in [way["what"] for way in ways_out(wish, State(), whole)]


@pytest.mark.parametrize("name", names())
def test_every_figure_of_a_profile_has_a_source(name: str) -> None:
    profile = load_hardware(name)
    figures = set(Hardware.model_fields) - {"title", "devices", "sources"}
    assert figures <= set(profile.sources), figures - set(profile.sources)


def test_a_profile_may_be_a_file(tmp_path: Any) -> None:
    path = tmp_path / "own.yaml"
    own = load_hardware("h100").model_dump(mode="json") | {"memory_gib": 12.5}
    path.write_text(yaml.safe_dump(own))
    assert load_hardware(str(path)).memory_gib == 12.5
    path.write_text(yaml.safe_dump(own | {"memory_gib": -1}))
    with pytest.raises(InputError, match=r"own\.yaml: memory_gib"):
        load_hardware(str(path))
    with pytest.raises(InputError, match=r"expected one of .*h100"):
        load_hardware("h101")


def test_interleaved_stages_run_in_torchs_order() -> None:
    """Of which the planner has its own, as it asks for thousands."""
    for pp, stages, batches in ((2, 2, 8), (4, 2, 8), (4, 3, 12), (8, 4, 24), (3, 2, 7), (2, 3, 1)):
        if bubble.check_micro_batches("interleaved_1f1b", pp, pp * stages, batches):
            continue
        of_torch = [
            [
                bubble._action(part)
                for action in actions
                if action is not None
                for part in action.sub_actions or (action,)
            ]
            for _, actions in sorted(bubble._torch_order("interleaved_1f1b", pp, stages, batches).items())
        ]
        assert bubble.order("interleaved_1f1b", pp, stages, batches) == of_torch


def published(found: Search, **wanted: Any) -> list[int]:
    """Places of layouts with these values among those that fit."""
    return [
        number for number, one in enumerate(found.fastest())
        if all(getattr(one.choice, name) == value for name, value in wanted.items())
    ]  # fmt: skip


def test_70b_does_not_fit_on_a_node() -> None:
    """16 bytes a parameter are 1.13 TB, and eight GPUs have 0.64 TB."""
    shape, hardware = ModelConfig(preset="llama3-70b").shape(128_256), load_hardware("h100")
    alone = Search(Wish(shape, 8, 8, 8192, 512), State(documents=True), hardware)
    assert not alone.fastest()
    assert alone.best is not None
    assert 16 * shape.num_parameters / 8 - hardware.memory_gib * GIB < alone.best.room.short


@pytest.mark.long
def test_of_70b_on_256_a_published_layout_fits() -> None:
    shape = ModelConfig(preset="llama3-70b").shape(128_256)
    found = Search(Wish(shape, 256, 8, 8192, 512, fixed={"pp": 1}), State(documents=True), load_hardware("h100"))
    assert published(found, tp=8, dp_shard=32)


@pytest.mark.long
def test_of_405b_on_16384_the_published_layout_is_among_the_best() -> None:
    """Grattafiori et al. 2024, table 4: TP 8, PP 16, DP 128."""
    shape = ModelConfig(preset="llama3-405b").shape(128_256)
    found = Search(Wish(shape, 16_384, 8, 8192, 2048), State(documents=True), load_hardware("h100"))
    assert published(found, tp=8, pp=16, cp=1)[0] < 5
