"""``quern plan --explain``: the sums that are told, done again from the numbers that are told."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import pytest

from quern.model.config import ModelConfig
from quern.model.float8.recipe import Recipe
from quern.planner.candidates import Choice, Wish, step_of
from quern.planner.explain import explain
from quern.planner.hardware import load_hardware
from quern.planner.memory.peak import State
from quern.planner.search import room
from quern.planner.time.estimate import estimate

NUMBER = r"(\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)"


def value(text: str) -> float:
    return float(text.replace(",", ""))


def lines_of(choice: Choice, gpus: int) -> dict[str, list[str]]:
    wish = Wish(ModelConfig(preset="llama3-8b").shape(128_256), gpus, 8, 8192, 512)
    step, hardware = step_of(choice, wish), load_hardware("h100")
    found: dict[str, list[str]] = {}
    for line in explain(step, State(), hardware, room(step, State(), hardware), estimate(step, hardware)):
        if line.startswith("# "):
            found[line[2:]] = lines = []
        else:
            lines.append(line)
    return found


@pytest.fixture(params=["fsdp", "pipeline", "tp"])
def told(request: Any) -> dict[str, list[str]]:
    of = {
        "fsdp": (Choice(dp_shard=8, checkpointing="selective"), 8),
        "pipeline": (Choice(pp=4, dp_shard=4, schedule="interleaved_1f1b", stages_per_rank=2), 16),
        "tp": (Choice(tp=2, dp_shard=4, zero=2, micro_batch=2), 8),
    }  # fmt: skip
    return lines_of(*of[request.param])


@pytest.mark.parametrize(
    ("sizes", "lines"),
    [({"preset": "llama3-8b"}, 1), ({"preset": "debug"}, 1), ({"preset": "mixtral-8x7b"}, 1),
     ({"preset": "qwen3-30b-a3b", "moe": {"num_experts": 128, "top_k": 8, "first_dense": 3}}, 2)],
)  # fmt: skip
def test_parameters_add_up(sizes: dict[str, Any], lines: int) -> None:
    shape = ModelConfig.model_validate(sizes).shape(128_256)
    step, hardware = step_of(Choice(), Wish(shape, 1, 1, 8192, 8)), load_hardware("h100")
    title, *told = explain(step, State(), hardware, room(step, State(), hardware), None)[: lines + 2]
    assert title == "# Parameters"
    *layers, ends = told
    number = sum(prod(map(value, re.findall(NUMBER, part))) for part in ends.partition(" = ")[0].split(" + "))
    for line in layers:
        count, sums, each = re.fullmatch(rf"(\d+) layers? with (.*) = {NUMBER} parameters each", line).groups()  # type: ignore[union-attr]
        found = sum(prod(map(value, re.findall(NUMBER, part))) for part in sums.split(" + "))
        assert found == value(each)
        number += int(count) * found
    assert number == shape.num_parameters == value(re.search(f" = {NUMBER}\\.", ends)[1])  # type: ignore[index]


def test_state_is_16_bytes_a_parameter(told: dict[str, list[str]]) -> None:
    bytes_, whole, share = told["Model state"]
    pattern = r"(\d+) bytes for its master, (\d+) for each .* and (\d+) for its gradient: (\d+)"
    master, moment, gradient, each = map(int, re.search(pattern, bytes_).groups())  # type: ignore[union-attr]
    assert master + 2 * moment + gradient == each == 16
    number, times, gigabytes = map(value, re.findall(NUMBER, whole)[:3])
    assert number * times / 1e9 == pytest.approx(gigabytes, abs=0.06)
    assert number == 8_030_261_248  # of Llama 3 8B
    own, times, gib = (value(text) for text in re.search(f"{NUMBER} × {NUMBER} = {NUMBER} GiB", share).groups())  # type: ignore[union-attr]
    assert own * times / 2**30 == pytest.approx(gib, abs=0.006)


def test_memory_adds_up(told: dict[str, list[str]]) -> None:
    _, *parts, total = told["The most that a rank holds"]
    sizes = [value(re.search(f"= {NUMBER} GiB$", line)[1]) for line in parts]  # type: ignore[index]
    needs, has, left = map(value, re.findall(NUMBER, total)[:3])
    assert sum(sizes) == pytest.approx(needs, abs=0.006 * len(sizes))
    assert abs(has - needs) == pytest.approx(left, abs=0.06)


def test_each_part_of_memory_is_a_sum_that_a_reader_can_do(told: dict[str, list[str]]) -> None:
    _, *parts, _ = told["The most that a rank holds"]
    done = 0
    for line in parts:
        name, _, rest = line.strip().partition(": ")
        if not rest or name in ("context and libraries", "logits and loss", "block in work"):
            continue  # which other lines tell, or words
        text, _, gib = rest.removesuffix(" GiB").rpartition(" = ")
        numbers = [value(number) for number in re.findall(NUMBER, text)]
        if name == "gathered weights":
            found = sum(prod(map(value, re.findall(NUMBER, part))) for part in text.split(" + "))
        elif name == "allocator":
            found = numbers[0] * 2**30 * numbers[1] / 100
        else:
            found = prod(numbers)
        assert found / 2**30 == pytest.approx(value(gib), abs=0.012), line
        done += 1
    assert done >= 4


def test_micro_batches_under_way_add_up() -> None:
    told = lines_of(Choice(pp=4, dp_shard=4, schedule="interleaved_1f1b", stages_per_rank=2), 16)
    line = told["Activations"][-1]
    *stages, messages, total = re.findall(rf"(?:(\d+) × )?{NUMBER} GiB", line)
    found = sum(int(number) * value(size) for number, size in stages) + value(messages[1])
    assert found == pytest.approx(value(total[1]), abs=0.03)
    memory = next(text for text in told["The most that a rank holds"] if text.startswith("  activations"))
    assert total[1] in memory
    # a rank with v chunks has (v - 1) · pp + 2 · (pp - place - 1) + 1 of them under way (Narayanan et al. 2021)
    place = int(re.search(r"place (\d+)", told["Activations"][-2])[1])  # type: ignore[index]
    assert sum(int(number) for number, _ in stages) == 4 + 2 * (4 - place - 1) + 1
    assert f"= {4 + 2 * (4 - place - 1) + 1} stages' parts" in told["Activations"][-2]


def test_activations_add_up(told: dict[str, list[str]]) -> None:
    _, *lines = told["Activations"]
    together = next(number for number, line in enumerate(lines) if line.startswith("Together"))
    tensors, together = lines[:together], lines[together]
    sizes = [value(re.search(f"{NUMBER} MiB", line)[1]) for line in tensors]  # type: ignore[index]
    total, blocks, gib = map(value, re.findall(NUMBER, together)[:3])
    assert sum(sizes) == pytest.approx(total, abs=0.06 * len(sizes))
    assert total * blocks / 1024 == pytest.approx(gib, abs=0.02)
    ends = [line for line in lines if line.startswith("With last norm")]
    assert len(ends) == ("under way" not in " ".join(lines))
    for line in ends:
        rest = sum(value(size) for size in re.findall(f"{NUMBER} MiB", line))
        whole = value(re.search(f": {NUMBER} GiB", line)[1])  # type: ignore[index]
        assert (total * blocks + rest) / 1024 == pytest.approx(whole, abs=0.02)


def test_messages_add_up(told: dict[str, list[str]]) -> None:
    _, *rows, together, speeds = told["What a rank sends in a step"]
    sent, within = [], value(re.search(f"over {NUMBER} GB/s within a node", speeds)[1])  # type: ignore[index]
    assert within == 0.8 * 450  # of NVLink 4
    for row in rows:
        share, payload, own, took = re.search(f": (.*?){NUMBER} GB = {NUMBER} GB in {NUMBER} s", row).groups()  # type: ignore[union-attr]
        factor = 1.0
        for text in filter(None, share.split(" · ")):
            over, _, under = text.partition("/")
            factor *= float(over) / float(under or 1)
        assert factor * value(payload) == pytest.approx(value(own), abs=0.002), row
        sent.append(value(own))
        assert value(took) > value(own) / within - 0.001, row
    assert sum(sent) == pytest.approx(value(re.findall(NUMBER, together)[0]), abs=0.001 * len(sent))


def test_time_adds_up(told: dict[str, list[str]]) -> None:
    token, least, large, half, planned, total = told["Time"]
    matmul, *factors = (value(text) for text in re.search(
        f"each of {NUMBER} .* layers {NUMBER} · heads {NUMBER} · {NUMBER} · tokens {NUMBER} = ", token).groups())  # type: ignore[union-attr]  # fmt: skip
    attention = 12.0
    for factor in factors:
        attention *= factor
    full = 6 * matmul + attention
    flops, tokens, gpus, peak, seconds = (value(text) for text in re.search(
        f"usually counts: {NUMBER} · {NUMBER} / {NUMBER} / {NUMBER} = {NUMBER} s", least).groups())  # type: ignore[union-attr]  # fmt: skip
    assert flops == pytest.approx(full, rel=1e-3)
    assert flops * tokens / gpus / peak == pytest.approx(seconds, rel=1e-3)
    *factors, reached = (value(text) for text in re.search(
        f"6 · {NUMBER} · {NUMBER} / {NUMBER} / {NUMBER} / {NUMBER} = {NUMBER} s", large).groups())  # type: ignore[union-attr]  # fmt: skip
    assert factors[:4] == [matmul, tokens, gpus, peak]
    assert 6 * matmul * tokens / gpus / peak / factors[4] == pytest.approx(reached, abs=0.001)
    *factors, reached = (value(text) for text in re.search(
        f"7 / 12 · {NUMBER} · {NUMBER} / {NUMBER} / {NUMBER} / {NUMBER} = {NUMBER} s", half).groups())  # type: ignore[union-attr]  # fmt: skip
    assert factors[:4] == [pytest.approx(attention, rel=1e-3), tokens, gpus, peak]
    assert 7 / 12 * attention * tokens / gpus / peak / factors[4] == pytest.approx(reached, abs=0.001)
    parts = [value(text.rsplit(" ", 1)[1]) for text in planned.removeprefix("Planned are ").split(" + ")]
    whole, again, same, mfu = (value(text) for text in re.search(
        f"= {NUMBER} s; MFU = {NUMBER} / {NUMBER} = {NUMBER}%, ", total).groups())  # type: ignore[union-attr]  # fmt: skip
    assert sum(parts) == pytest.approx(whole, abs=0.001 * len(parts))
    assert (again, same) == (seconds, whole)
    assert 100 * seconds / whole == pytest.approx(mfu, abs=0.06)


def test_what_holds_for_bf16_and_for_16_bytes_alone_is_told_of_these_alone() -> None:
    wish = Wish(ModelConfig(preset="llama3-8b").shape(128_256), 8, 8, 8192, 512, float8=Recipe("rowwise"))
    step, hardware, state = step_of(Choice(dp_shard=8, host_state=True), wish), load_hardware("h100"), State(2)
    text = "\n".join(explain(step, state, hardware, room(step, state, hardware), estimate(step, hardware)))
    assert "for its gradient: 12.\n" in text
    assert "in the host's memory" in text
    assert "if all were in BF16" in text
    plain = "\n".join(line for lines in lines_of(Choice(dp_shard=8), 8).values() for line in lines)
    assert "it is 16 too" in plain
    assert "in the host's memory" not in plain
    assert "if all were in BF16" not in plain


def test_the_bubble_is_told_for_pipelines() -> None:
    told = lines_of(Choice(pp=4, dp_shard=4, schedule="interleaved_1f1b", stages_per_rank=2), 16)
    simple, simulated = (value(re.search(f"{NUMBER}%", line)[1]) for line in told["Bubble"][:2])  # type: ignore[index]
    assert simple == pytest.approx(100 * 3 / (3 + 128), abs=0.006)
    assert simulated < simple
