"""What a case must give: one process, float64, plain tensors, and data that no line of quern's loader or order made.

From quern come the documents and their shard files (through its writer), and the first weights (through
``initialise``); all have tests of their own. Order, windows, model, step and optimiser are the plain ones of
``order_reference`` and ``plain_loop``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quern.model.config import ModelConfig
from quern.model.init import initialise
from quern.model.transformer import Transformer
from quern.train.parity.corpus import LONG, SOURCES, Document, documents, held_out, write_corpus
from quern.train.parity.matrix import STEPS, VOCAB_SIZE, Computation
from quern.train.parity.run import LR, MAX_NORM, SEED, WARMUP, WEIGHT_DECAY, Outcome
from quern.train.parity.sizes import EXPERTS
from support.oracles import float8_products, order_reference, plain_loop, plain_moe


@dataclass(frozen=True)
class Source:
    stream: list[int]
    spans: list[tuple[int, int, bool]]
    """(start, length, purged) of every document."""


@dataclass(frozen=True)
class Data:
    path: str
    sources: dict[str, Source]
    held_out: Source
    long: Source
    """Of documents held out where sequences are long."""


def make_data(folder: Path) -> Data:
    write_corpus(str(folder / "data"))
    sources = {name: source_of([doc for shard in shards for doc in shard]) for name, shards in documents().items()}
    return Data(str(folder / "data"), sources, source_of(held_out()), source_of(held_out() * 4))


def source_of(docs: list[Document]) -> Source:
    stream: list[int] = []
    spans = []
    for doc in docs:
        spans.append((len(stream), len(doc.tokens), doc.purged))
        stream += doc.tokens
    return Source(stream, spans)


def batches(computation: Computation, data: Data) -> list[list[plain_loop.Batch]]:
    """The whole global batch of each step in the order of its places: one micro-batch, but where its size matters."""
    seq_len = computation.seq_len
    windows_of = {name: plain_loop.num_windows(source.stream, seq_len) for name, source in data.sources.items()}
    names = [name for name in SOURCES if windows_of[name]] or [LONG]
    sources, windows = [data.sources[name] for name in names], [windows_of[name] for name in names]
    weights, size = [SOURCES.get(name, 1.0) for name in names], computation.global_batch
    table = [(0, weights, size, size)]
    for phase in computation.phases():
        weights, size = phase.get("weights", weights), phase.get("global_batch", size)
        table.append((phase["first_step"], weights, size, size))
    order = order_reference.Reference(windows, SEED, table, [f"r1/{name}/1" for name in names])
    found, first = [], 0
    for step in range(STEPS):
        size = [row[2] for row in table if row[0] <= step][-1]
        rows = []
        for place in range(first, first + size):
            number, _, index = order.sample(place)
            source = sources[number]
            rows.append(plain_loop.window(source.stream, source.spans, index, seq_len, computation.mask))
        width = computation.micro_batch or size
        found.append([plain_loop.batch_of(rows[place : place + width]) for place in range(0, size, width)])
        first += size
    return found


def first_weights(computation: Computation) -> plain_loop.Weights:
    """Without padding, which the plain model does not have."""
    moe = EXPERTS[computation.experts][0] if computation.experts is not None else None
    model = Transformer(ModelConfig(**dict(computation.model), moe=moe).shape(VOCAB_SIZE)).to(torch.float64)
    initialise(model, SEED)
    return {
        name: value.detach()[:VOCAB_SIZE] if in_vocabulary(name) else value.detach()
        for name, value in model.named_parameters()
    }


def in_vocabulary(name: str) -> bool:
    return name in ("embed.weight", "head.weight")


def shape_of(computation: Computation) -> plain_loop.Shape:
    sizes = {name: value for name, value in computation.model if name != "vocab_multiple"}
    shape = plain_loop.Shape(**sizes, vocab_size=VOCAB_SIZE)
    if computation.float8 is not None:
        shape = replace(shape, product=float8_products.product(computation.float8))
    if computation.experts is not None:
        moe, by = EXPERTS[computation.experts]
        shape = replace(shape, experts=plain_moe.Experts(moe, by))
    return shape


def records(computation: Computation, data: Data) -> tuple[list[plain_loop.Record], plain_moe.Experts | None]:
    shape = shape_of(computation)
    settings = plain_loop.Settings(
        STEPS, lr=LR, weight_decay=WEIGHT_DECAY, clip=MAX_NORM, warmup=WARMUP, z_loss=computation.z_loss
    )
    skipped = () if computation.skip is None else (computation.skip,)
    weights, steps = first_weights(computation), batches(computation, data)
    found = list(plain_loop.train(weights, shape, steps, settings, skipped=skipped))
    assert all(record.grad_norm > MAX_NORM for record in found), "clipping is to be at work in every step"
    return found, shape.experts


def routers(experts: plain_moe.Experts) -> dict[str, torch.Tensor]:
    """Biases, and of the last step what was chosen."""
    found = {f"blocks.{layer}.ffn.bias": bias for layer, bias in experts.biases.items()}
    for layer, counts in experts.chosen.items():
        found[f"choices {layer}"] = torch.tensor([*counts, *experts.figures[layer]], dtype=torch.float64)
    return found


def validation(
    computation: Computation, data: Data, weights: plain_loop.Weights, experts: plain_moe.Experts | None = None
) -> dict[str, torch.Tensor]:
    """Over all windows, one at a time: the sum of all losses by the number of all targets."""
    held_out = data.held_out if any(data.sources[name].stream[computation.seq_len :] for name in SOURCES) else data.long
    stream, spans = held_out.stream, held_out.spans
    windows = [
        plain_loop.batch_of([plain_loop.window(stream, spans, index, computation.seq_len, computation.mask)])
        for index in range(plain_loop.num_windows(stream, computation.seq_len))
    ]
    shape = shape_of(computation)
    if experts is not None:  # with the biases of now, and nothing noted
        shape = replace(shape, experts=replace(experts, chosen={}, figures={}, terms=[]))
    loss = sum(plain_loop.token_losses(weights, shape, window).sum() for window in windows)
    tokens = torch.tensor(sum(int((window.targets != plain_loop.IGNORE).sum()) for window in windows)).double()
    return {"loss": loss / tokens, "tokens": tokens}


def stored(last: plain_loop.Record, experts: plain_moe.Experts | None) -> dict[str, torch.Tensor]:
    """By the names that a checkpoint has for weights and moments."""
    found = {f"model.{name}": value for name, value in last.weights.items()}
    found |= {f"optimizer.state.{name}.exp_avg": value for name, value in last.first_moments.items()}
    found |= {f"optimizer.state.{name}.exp_avg_sq": value for name, value in last.second_moments.items()}
    biases = {} if experts is None else {f"model.blocks.{n}.ffn.bias": bias for n, bias in experts.biases.items()}
    return found | biases | {"optimizer.step": torch.tensor(last.updates).double()}


def reference(computation: Computation, data: Data) -> Outcome:
    """As a run of one process would have to report it, with the padding of the vocabulary, which is zero."""
    multiple = dict(computation.model)["vocab_multiple"]
    padding = -VOCAB_SIZE % multiple

    def padded(weights: plain_loop.Weights) -> dict[str, torch.Tensor]:
        return {
            name: torch.cat([value, value.new_zeros(padding, value.shape[1])]) if in_vocabulary(name) else value
            for name, value in weights.items()
        }

    def row(record: plain_loop.Record) -> dict[str, Any]:
        poisoned = record.step == computation.skip
        found = {
            "step": record.step, "data_step": record.step, "valid_tokens": record.valid_tokens, "lr": record.lr,
            "skipped": not record.applied, "non_finite": poisoned, "loss": record.loss,
            "grad_norm": None if poisoned or math.isnan(record.grad_norm) else record.grad_norm,
        }  # fmt: skip
        return found | ({"z_loss": record.z_loss} if computation.z_loss else {})

    found, experts = records(computation, data)
    last = found[-1]
    skips = [] if computation.skip is None else ["skipped"]
    return Outcome(
        rows=[row(record) for record in found],
        kinds=("start", *skips, "checkpoint", "end"),
        gradients=[padded(record.grads) for record in found],
        weights=padded(last.weights),
        first_moments=padded(last.first_moments),
        second_moments=padded(last.second_moments),
        updates={name: torch.tensor(float(last.updates)) for name in last.weights},
        routers={} if experts is None else routers(experts),
        written={
            "held-out figure": validation(computation, data, last.weights, experts),
            "stored value": stored(last, experts),
        },
    )
