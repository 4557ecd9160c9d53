"""What a case must give: one process, float64, plain tensors, and data that no line of quern's loader or order made.

From quern come the shard files (through its writer) and the first weights (through ``initialise``); both have tests of
their own. Order, windows, model, step and optimiser are the plain ones of ``order_reference`` and ``plain_loop``.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import order_reference
import plain_loop
import torch
from corpora import Doc, make_shards, write_run
from parity import (
    LR,
    MAX_NORM,
    SEED,
    SEQ_LEN,
    SIZES,
    SOURCES,
    STEPS,
    VOCAB_SIZE,
    WARMUP,
    WEIGHT_DECAY,
    Case,
    Outcome,
    assembled,
)

from quern.model.config import ModelConfig
from quern.model.init import initialise
from quern.model.transformer import Transformer

TOLERANCE = 1e-10
FIRST_GRADIENT = 1e-12
"""Before any update nothing but the order of sums can differ. Later gradients follow weights that AdamW's g/√v has
moved apart where g is tiny."""


@dataclass(frozen=True)
class Source:
    stream: list[int]
    spans: list[tuple[int, int, bool]]
    """(start, length, purged) of every document."""


@dataclass(frozen=True)
class Data:
    path: str
    sources: dict[str, Source]


def make_data(folder: Path) -> Data:
    """Three sources: documents from a token to twice a window, purged ones, several shards, an empty one; the least
    source is read more than once."""
    rng = random.Random(5)
    lengths = {
        "a": [[rng.choice((1, 2, 3, 9, 17, 18, 40)) for _ in range(count)] for count in (9, 0, 14)],
        "b": [[rng.randint(1, 40) for _ in range(12)], [rng.randint(1, 6) for _ in range(20)]],
        "c": [[30, 1, 5, 17, 2, 24]],
    }
    shards = {name: make_shards(rng, lengths[name], purged=0.15, vocab_size=VOCAB_SIZE) for name in SOURCES}
    write_run(folder / "data", shards, vocab_size=VOCAB_SIZE)
    return Data(
        str(folder / "data"), {name: source_of([doc for shard in s for doc in shard]) for name, s in shards.items()}
    )


def source_of(docs: list[Doc]) -> Source:
    stream: list[int] = []
    spans = []
    for doc in docs:
        spans.append((len(stream), len(doc.tokens), doc.purged))
        stream += doc.tokens
    return Source(stream, spans)


def batches(case: Case, data: Data) -> list[list[plain_loop.Batch]]:
    """The whole global batch of each step, as one micro-batch in the order of its places."""
    sources = list(data.sources.values())
    windows = [plain_loop.num_windows(source.stream, SEQ_LEN) for source in sources]
    weights, size = list(SOURCES.values()), case.global_batch
    table = [(0, weights, size, size)]
    for phase in case.phases():
        weights, size = phase.get("weights", weights), phase.get("global_batch", size)
        table.append((phase["first_step"], weights, size, size))
    order = order_reference.Reference(windows, SEED, table, [f"r1/{name}/1" for name in data.sources])
    found, first = [], 0
    for step in range(STEPS):
        size = [row[2] for row in table if row[0] <= step][-1]
        rows = []
        for place in range(first, first + size):
            number, _, index = order.sample(place)
            source = sources[number]
            rows.append(plain_loop.window(source.stream, source.spans, index, SEQ_LEN, case.mask))
        found.append([plain_loop.batch_of(rows)])
        first += size
    return found


def first_weights(case: Case) -> plain_loop.Weights:
    """Without padding, which the plain model does not have."""
    config = ModelConfig(**SIZES[case.sizes], tied_embeddings=case.tied, vocab_multiple=8)
    model = Transformer(config.shape(VOCAB_SIZE)).to(torch.float64)
    initialise(model, SEED)
    return {name: unpadded(name, value.detach()) for name, value in model.named_parameters()}


def unpadded(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:VOCAB_SIZE] if name in ("embed.weight", "head.weight") else tensor


def reference(case: Case, data: Data) -> list[plain_loop.Record]:
    shape = plain_loop.Shape(**SIZES[case.sizes], vocab_size=VOCAB_SIZE, tied_embeddings=case.tied)
    settings = plain_loop.Settings(STEPS, lr=LR, weight_decay=WEIGHT_DECAY, clip=MAX_NORM, warmup=WARMUP)
    skipped = () if case.skip is None else (case.skip,)
    records = list(plain_loop.train(first_weights(case), shape, batches(case, data), settings, skipped=skipped))
    assert all(record.grad_norm > MAX_NORM for record in records), "clipping is to be at work in every step"
    return records


def differences(case: Case, records: list[plain_loop.Record], outcomes: list[Outcome]) -> tuple[list[str], str]:
    """What is wrong, and the worst ratio max|a − b| / max|b| of every kind with where it stands."""
    found = assembled(case, outcomes)
    wrong: list[str] = []
    worst: dict[str, tuple[float, str]] = {}

    def expect(what: str, a: Any, b: Any) -> None:
        if a != b:
            wrong.append(f"{what}: {a!r}, expected {b!r}")

    def close(kind: str, what: str, a: torch.Tensor, b: torch.Tensor, most: float = TOLERANCE) -> None:
        ratio = ratio_of(a, b)
        if ratio >= worst.get(kind, (-1.0, ""))[0]:
            worst[kind] = ratio, what
        if not ratio <= most:
            wrong.append(f"{kind} of {what}: {ratio:.1e}, expected at most {most:.0e}")

    def tables(kind: str, where: str, a: plain_loop.Weights, b: plain_loop.Weights, most: float = TOLERANCE) -> None:
        expect(f"{kind} {where} names", sorted(a), sorted(b))
        for name in (name for name in b if name in a):
            if a[name][len(b[name]) :].count_nonzero():
                wrong.append(f"{kind} {where} {name}: padding is not zero")
            close(kind, f"{where} {name}".strip(), unpadded(name, a[name]), b[name], most)

    for rank, outcome in enumerate(outcomes):
        if outcome.digest != outcomes[rank % case.on.shard].digest:
            wrong.append(f"rank {rank} holds other bits than the first replica")
    expect("steps", [row["step"] for row in found.rows], [record.step for record in records])
    expect("gradients seen", len(found.gradients), len(records))
    for row, record, gradients in zip(found.rows, records, found.gradients, strict=False):
        where = f"step {record.step}"
        expect(f"{where} valid tokens", row["valid_tokens"], record.valid_tokens)
        expect(f"{where} data step", row["data_step"], record.step)
        expect(f"{where} skipped", row["skipped"], not record.applied)
        close("lr", where, torch.tensor(row["lr"]), torch.tensor(record.lr), 1e-15)
        close("loss", where, scalar(row["loss"]), scalar(record.loss))
        if record.step == case.skip:
            expect(f"{where} norm", row["grad_norm"], None)  # JSON has no NaN
        else:
            close("norm", where, scalar(row["grad_norm"]), scalar(record.grad_norm))
        first = record.step == 0
        kind, most = ("first gradient", FIRST_GRADIENT) if first else ("gradient", TOLERANCE)
        tables(kind, where, gradients, record.grads, most)
    last = records[-1]
    tables("weight", "", found.weights, last.weights)
    tables("first moment", "", found.first_moments, last.first_moments)
    tables("second moment", "", found.second_moments, last.second_moments)
    expect("updates", {float(count) for count in found.updates.values()}, {float(last.updates)})
    skips = [] if case.skip is None else ["skipped"]
    expect("ledger", [kind for kind in found.kinds if kind != "order"], ["start", *skips, "checkpoint", "end"])
    return wrong, ", ".join(f"{kind} {ratio:.1e} ({what})" for kind, (ratio, what) in worst.items())


def scalar(value: float | None) -> torch.Tensor:
    return torch.tensor(math.nan if value is None else value, dtype=torch.float64)


def ratio_of(a: torch.Tensor, b: torch.Tensor) -> float:
    """Infinite where sizes or dtypes differ, where something is not a number, and where zero is not exactly zero."""
    if a.shape != b.shape or a.dtype != b.dtype or not a.isfinite().all():
        return math.inf
    off = (a - b).abs().max().item()
    scale = b.abs().max().item()
    return 0.0 if off == 0 else off / scale if scale else math.inf
