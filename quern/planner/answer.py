"""Tells what a search has found as plain data: the layouts, the best one's reasons, days, hours and dollars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from quern.errors import InputError
from quern.model.float8.recipe import Recipe
from quern.parallel.planning.step import Step
from quern.planner.candidates import Choice, Wish, legal
from quern.planner.hardware import Hardware, load_hardware, names
from quern.planner.memory.peak import State
from quern.planner.search import Found, Room, Search, room
from quern.planner.time.estimate import StepTime, estimate
from quern.words import size

__all__ = [
    "MOMENTS", "answer", "check_float8", "memory_of", "name_of", "planned", "reasons", "row", "run_of", "time_of",
    "variants", "ways_out",
]  # fmt: skip

MOMENTS = {
    "loss": "when logits are there", "first": "when a backward is in its last block",
    "last": "when a backward is in its first block", "update": "when gradients are whole",
}  # fmt: skip
#: Fields of a choice for which the answer says why, with the name in the config.
WHY = {
    "tp": "parallel.tp", "pp": "parallel.pp", "cp": "parallel.cp", "ep": "parallel.ep",
    "dp_shard": "parallel.dp_shard", "zero": "parallel.zero", "schedule": "parallel.schedule",
    "micro_batch": "micro_batch", "checkpointing": "activation_checkpointing",
}  # fmt: skip


def answer(
    wish: Wish, state: State, hardware: Hardware, found: Search, tokens: float | None, most: int = 8
) -> dict[str, Any]:
    """Of a search. ``tokens``: of the whole run; ``most``: layouts that are listed."""
    best, fits = found.best, found.best is not None and found.best.time is not None
    listed = found.fastest(most) if fits else found.nearest(most)
    return {
        "model": wish.shape.model_dump(mode="json") | {"parameters": wish.shape.num_parameters},
        "gpus": wish.gpus, "hardware": hardware.title, "seq_len": wish.seq_len, "global_batch": wish.global_batch,
        "fits": fits, "legal": len(found),
        "best": None if best is None else row(best) | {"config": best.choice.sections(wish)},
        "reasons": [] if best is None else reasons(found),
        "same": variants(best, wish, state, hardware) if best is not None and fits else [],
        "try": [] if fits else list(ways_out(wish, state, hardware)),
        "layouts": [row(one) for one in listed],
        "run": None if tokens is None or best is None or not fits else run_of(best, wish, hardware, tokens),
    }  # fmt: skip


def row(found: Found) -> dict[str, Any]:
    """One layout: what it is, what it needs where it needs most, how long a step takes."""
    return {
        "name": name_of(found.choice), "layout": asdict(found.choice), "micro_batches": found.step.num_micro_batches,
        "memory": memory_of(found.room), "time": None if found.time is None else time_of(found.time),
    }  # fmt: skip


def planned(step: Step, state: State, hardware: Hardware) -> dict[str, Any]:
    """What a step needs and takes, and whether it fits; InputError where it has products that the hardware has not."""
    check_float8(hardware, step.layout.float8)
    memory, time = room(step, state, hardware), estimate(step, hardware, state.moment_bytes)
    return {
        "hardware": hardware.title, "gpus": step.plan.world_size, "memory": memory_of(memory), "time": time_of(time),
        "fits": not memory.short,
    }  # fmt: skip


def check_float8(hardware: Hardware, recipe: Recipe | None) -> None:
    if recipe is not None and hardware.float8_flops is None:
        raise InputError(f"FP8: expected another precision, as {hardware.title} has no FP8 products")


def name_of(choice: Choice) -> str:
    """``tp 8 × pp 2 (1f1b) × dp_shard 16, micro_batch 1, checkpointing selective``."""
    axes = ("tp", "pp", "cp", "dp_shard", "dp_replicate")
    sizes = {axis: f"{axis} {getattr(choice, axis)}" for axis in axes if getattr(choice, axis) > 1}
    if choice.pp > 1:
        stages = f", {choice.stages_per_rank} stages a rank" if choice.stages_per_rank else ""
        sizes["pp"] += f" ({choice.schedule}{stages})"
    name = " × ".join(sizes.values()) or "one rank"
    name += f", of these ep {choice.ep}" if choice.ep > 1 else ""
    if choice.plan.shards > 1 and choice.pp == 1:
        name += f", zero {choice.zero or 3}"
    host = ", state on the host" if choice.host_state else ""
    return f"{name}, micro_batch {choice.micro_batch}, checkpointing {choice.checkpointing}{host}"


def memory_of(room: Room) -> dict[str, Any]:
    """The place and moment at which a rank needs the most, and bytes by component."""
    return asdict(room) | {"needs": room.needs, "short": room.short, "lacks": room.lacks}


def time_of(time: StepTime) -> dict[str, Any]:
    """Seconds of a step by part, and speed."""
    return asdict(time) | {"parts": dict(time.parts)}


def variants(best: Found, wish: Wish, state: State, hardware: Hardware) -> list[dict[str, str]]:
    """What a run may choose besides its layout, and what each would change in this one."""
    step, told = best.step, []
    layout, half = step.layout, replace(state, moment_bytes=2)
    float8 = layout.float8 or (None if hardware.float8_flops is None else Recipe("rowwise"))
    tried = {
        "float8.recipe rowwise": (replace(layout, float8=float8), state),
        "optimizer.moments bf16": (layout, half),
        "optimizer.state host": (replace(layout, host_state=True), state),
        "compile.enabled false": (replace(layout, compile_backend=None), state),
    }
    for what, (other, its) in tried.items():
        if (other, its) == (layout, state) or not legal(wish, other):
            continue
        changed = replace(step, layout=other)
        time = estimate(changed, hardware, its.moment_bytes)
        told.append({"why": f"{what}: {_worse(best, Found(best.choice, changed, room(changed, its, hardware), time))}"})
    return told


def ways_out(wish: Wish, state: State, hardware: Hardware) -> Iterator[dict[str, str]]:
    """Where nothing fits: what would, of settings, of more GPUs and of larger ones."""
    host, half = replace(wish, fixed=wish.fixed | {"host_state": True}), replace(state, moment_bytes=2)
    more = [replace(wish, gpus=wish.gpus << n, node=min(wish.gpus << n, hardware.node)) for n in range(1, 5)]
    larger = sorted((load_hardware(name) for name in names()), key=lambda one: one.memory_gib)
    for ways in (
        [("optimizer.state: host", host, state, hardware)],
        [("optimizer.moments: bf16", replace(wish, moments_bf16=True), half, hardware)],
        [(f"{one.gpus:,} GPUs", one, state, hardware) for one in more],
        [
            (one.title, replace(wish, node=min(wish.gpus, one.node)), state, one)
            for one in larger
            if one.memory_gib > hardware.memory_gib
        ],
    ):
        for what, its, kept, profile in ways:
            found = Search(its, kept, profile)
            if found.fastest(1):
                best = found.best
                assert best is not None
                assert best.time is not None
                yield {"what": what, "why": f"{what}: {name_of(best.choice)}, {best.time.seconds:,.2f} s a step"}
                break


def reasons(found: Search) -> list[dict[str, str]]:
    """For each field of the best choice: the best layout that has another value, and by how much it is worse."""
    best, told = found.best, []
    assert best is not None
    for name, key in WHY.items():
        other = found.without(name)
        if other is None:
            continue
        value, instead = getattr(best.choice, name), getattr(other.choice, name)
        told.append({"key": key, "value": str(value), "why": f"{key} {instead}: {_worse(best, other)}"})
    return told


def _worse(best: Found, other: Found) -> str:
    if other.room.short or other.time is None or best.time is None:
        return f"is short by {other.room.lacks} ({largest(other.room.components)})"
    slower = other.time.seconds / best.time.seconds - 1
    needs = other.room.needs - best.room.needs
    memory = f"{size(abs(needs))} {'more' if needs > 0 else 'less'} memory"
    if abs(slower) < 0.0005:
        return f"is as fast, with {memory}"
    return f"takes {abs(slower):.1%} {'longer' if slower > 0 else 'less time'}, with {memory}"


def largest(components: Mapping[str, int], most: int = 2) -> str:
    """The components that are the most of a rank's memory."""
    by_size = sorted(components.items(), key=lambda item: -item[1])
    return " and ".join(f"{name} {size(number)}" for name, number in by_size[:most])


def run_of(best: Found, wish: Wish, hardware: Hardware, tokens: float) -> dict[str, Any]:
    """Steps, days and cost of so many tokens in a layout that fits."""
    assert best.time is not None
    steps = -(-tokens // best.time.tokens)
    seconds = steps * best.time.seconds
    hours = seconds / 3600 * wish.gpus
    return {
        "tokens": tokens, "steps": int(steps), "days": seconds / 86_400, "gpu_hours": hours,
        "dollars": hours * hardware.dollars_per_hour, "dollars_per_hour": hardware.dollars_per_hour,
    }  # fmt: skip
