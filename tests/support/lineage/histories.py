"""Training runs that never trained: random histories with a ledger, and what each attempt read, token by token.

Streams are lists of documents in memory; :class:`Kept` answers for them as an opened data run would. The book of what
was read is kept while the history is made, from ``Order.sample`` alone, one step, one sequence and one token after the
other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from quern.errors import InputError
from quern.lineage.training import TrainingRun
from quern.mixtures.order import Order, Phase
from quern.train.history.ledger import Ledger

LENGTH = 6


@dataclass(frozen=True)
class Stream:
    name: str
    identity: str
    held_out: bool
    lengths: tuple[int, ...]
    purged: tuple[int, ...]
    """The corpus version that purged each; 0: none has."""
    first: int
    """Number of its first document in the data run."""
    chosen: None = None

    @property
    def total_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def windows(self) -> int:
        return max(0, (self.total_tokens - 1) // LENGTH)

    def document(self, token: int) -> int:
        """Number of the document that a token is of."""
        number = self.first
        for length in self.lengths:
            if token < length:
                return number
            token -= length
            number += 1
        raise IndexError

    def is_head(self, token: int) -> bool:
        return token == 0 or self.document(token) != self.document(token - 1)


class Kept:
    """A data run in memory: what lineage asks of one, answered document by document."""

    def __init__(self, streams: Sequence[Stream], version: int = 3) -> None:
        self.streams, self.version, self.run = tuple(streams), version, "kept"
        self.spans: dict[int, tuple[int, int, int, int]] = {}
        for index, stream in enumerate(streams):
            start = 0
            for number, (length, purged) in enumerate(zip(stream.lengths, stream.purged, strict=True), stream.first):
                self.spans[number] = (index, start, length, purged)
                start += length

    def stream(self, identity: str) -> Stream | None:
        return next((stream for stream in self.streams if stream.identity == identity), None)

    def spans_of(self, numbers: Any) -> SimpleNamespace:
        return self._table([number for number in np.asarray(numbers).tolist() if number in self.spans])

    def spans_in(self, stream: Stream, starts: Any, stops: Any) -> tuple[SimpleNamespace, np.ndarray]:
        found, which = [], []
        for place, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            for number, (index, begin, length, _) in self.spans.items():
                if self.streams[index] is stream and begin < stop and begin + length > start:
                    found.append(number)
                    which.append(place)
        return self._table(found), np.array(which, np.int64)

    def _table(self, numbers: list[int]) -> SimpleNamespace:
        rows = [self.spans[number] for number in numbers]
        streams, starts, lengths, purged = (list(column) for column in zip(*rows, strict=True)) if rows else [[]] * 4
        return SimpleNamespace(
            numbers=np.array(numbers, np.int64), streams=np.array(streams, np.int64),
            starts=np.array(starts, np.int64), lengths=np.array(lengths, np.int64),
            purged_since=np.array(purged, np.uint32),
            purged_at=lambda version: np.array([0 < since <= version for since in purged], np.bool_),
        )  # fmt: skip

    def documents(self, numbers: Any) -> SimpleNamespace:
        numbers = np.asarray(numbers).tolist()
        return SimpleNamespace(
            doc_ids=[number.to_bytes(16, "big") for number in numbers],
            urls=[f"http://example.com/{number}" for number in numbers],
            sources=["web" for _ in numbers],
        )


def make_streams(draw: random.Random, identities: Sequence[str]) -> Kept:
    """A stream of one to twelve documents for each identity; the last one is held out."""
    streams, first = [], 0
    for number, identity in enumerate(identities):
        lengths = [draw.choice([1, 2, LENGTH, LENGTH + 1, draw.randint(1, 20)]) for _ in range(draw.randint(1, 12))]
        lengths[0] += max(0, LENGTH + 1 - sum(lengths))  # every one has a window
        purged = tuple(draw.choice([1, 2, 3]) if draw.random() < 0.18 else 0 for _ in lengths)
        held_out = number == len(identities) - 1
        streams.append(Stream(identity.split("/")[1], identity, held_out, tuple(lengths), purged, first))
        first += len(lengths) + 1  # a number without tokens in between
    return Kept(streams)


#: (attempt, model step, place, document number) → (input positions, target positions)
Book = dict[tuple[int, int, int, int], tuple[list[int], list[int]]]


@dataclass
class History:
    """A run, and the book of it."""

    folder: Path
    kept: Kept
    book: Book = field(default_factory=dict)
    """Of what is proven."""
    facts: dict[tuple[int, int], tuple[int, bool]] = field(default_factory=dict)
    """(attempt, step) → (data step, applied), of every step that was taken."""
    samples: dict[tuple[int, int], list[tuple[int, int, int]]] = field(default_factory=dict)
    identities: list[tuple[str, ...]] = field(default_factory=list)
    lineage: list[int] = field(default_factory=list)
    """The attempt whose step each surviving one is."""
    stops: list[int] = field(default_factory=list)
    """One beyond the last proven step of each attempt."""
    checkpoints: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(step, ledger offset, lineage then)."""

    def open(self) -> TrainingRun:
        """With the data run in memory."""
        run = TrainingRun(str(self.folder))
        run.find_stream = self._find  # type: ignore[method-assign,assignment]
        return run

    def _find(self, identity: str) -> tuple[Kept, Stream]:
        stream = self.kept.stream(identity)
        if stream is None:
            raise InputError(f"{identity}: gone")
        return self.kept, stream


def make_history(draw: random.Random, folder: Path) -> History:
    """One to six attempts over two or three sources: recipes, ramps, blocks that divide nothing, versions, skips."""
    identities = ["r1/a/1", "r1/b/1", "r1/a/2", "r1/a.val/1"]
    kept = make_streams(draw, identities)
    made = History(folder, kept)
    known = draw.randint(1, 3)  # sources that the order has from the beginning; r1/a/2 may come later
    weights = [draw.randint(0, 4) for _ in range(known)]
    weights[draw.randrange(known)] = draw.randint(1, 4)
    batch, seed = draw.choice([1, 2, 3, 4]), draw.randrange(1000)
    block = draw.choice([None, None, 1, 3, 5])
    phases: list[Phase] = []
    proven = 0

    def build() -> Order:
        ids = identities[:known]
        windows = [kept.streams[index].windows for index in range(known)]
        first = (*weights, *[0] * (known - len(weights)))
        padded = [
            Phase(p.first_step, None if p.weights is None else (*p.weights, *[0] * (known - len(p.weights))),
                  p.global_batch, p.block)
            for p in phases
        ]  # fmt: skip
        return Order(first, windows, seed, padded, ids=ids, seq_len=LENGTH, global_batch=batch, block=block)

    mask = draw.random() < 0.6
    with Ledger(folder / "ledger.jsonl") as ledger:
        for attempt in range(draw.randint(1, 6)):
            step = draw.choice([proven, draw.randint(0, proven)])
            end = made.facts[made.lineage[step - 1], step - 1][0] + 1 if step else 0
            data = end + draw.choice([0, 0, 0, draw.randint(1, 3)])
            if attempt and data and draw.random() < 0.6:
                known = min(3, known + draw.choice([0, 1]))
                new = [draw.randint(0, 4) for _ in range(known)]
                new[draw.randrange(known)] = draw.randint(1, 4)
                phases = [phase for phase in phases if phase.first_step < data]
                phases.append(Phase(data, draw.choice([tuple(new), tuple(new), None]), draw.choice([None, 1, 2, 5]),
                                    draw.choice([None, None, 2, 7])))  # fmt: skip
            order = build()
            mask = mask if draw.random() < 0.9 else not mask
            versions = {identity: draw.choice([1, 2, 3]) for identity in identities[:known]}
            ledger.move(
                draw.choice(["resume", "rollback"]) if attempt else "start", step, data, order,
                document_mask=mask, versions=versions,
            )  # fmt: skip
            made.identities.append(order.ids)
            del made.lineage[step:]
            proven = _train(draw, made, ledger, attempt, step, data, order)
            made.stops.append(proven)
            for t in range(step, proven):
                _note(made, attempt, t, mask, versions)
    return made


def _train(draw: random.Random, made: History, ledger: Ledger, attempt: int, step: int, data: int, order: Order) -> int:
    """Take some steps; how many the ledger proves."""
    proven = step
    for t in range(step, step + draw.choice([0, 1, draw.randint(0, 8)])):
        applied = draw.random() > 0.15
        made.facts[attempt, t] = (data, applied)
        first, size = order.first_sample(data), order.global_batch_at(data)
        made.samples[attempt, t] = [order.sample(g) for g in range(first, first + size)]
        made.lineage.append(attempt)
        if not applied:
            ledger.append("skipped", step=t, data_step=data, reason="non_finite")
            proven = t + 1
        elif draw.random() < 0.1:
            ledger.append("spike", step=t, data_step=data)
            proven = t + 1
        data += 1
        if draw.random() < 0.3:
            ledger.append("checkpoint", step=t + 1, data_step=data, name=f"step_{t + 1:08d}")
            made.checkpoints.append((t + 1, ledger.offset, list(made.lineage)))
            proven = t + 1
    if draw.random() < 0.5:
        proven = len(made.lineage)
        ledger.append("stopped", step=proven, signal="SIGTERM")
    return proven


def _note(made: History, attempt: int, step: int, mask: bool, versions: dict[str, int]) -> None:
    """What a step read: every token of every sequence."""
    for place, (source, _, window) in enumerate(made.samples[attempt, step]):
        identity = made.identities[attempt][source]
        stream = made.kept.stream(identity)
        assert stream is not None
        for position in range(LENGTH):
            token = window * LENGTH + position
            number = stream.document(token)
            made.book.setdefault((attempt, step, place, number), ([], []))[0].append(position)
            target = stream.document(token + 1)
            purged = 0 < stream.purged[target - stream.first] <= versions[identity]
            if not purged and not (mask and stream.is_head(token + 1)):
                made.book.setdefault((attempt, step, place, target), ([], []))[1].append(position)


def publish(run: TrainingRun, step: int, offset: int) -> None:
    """A manifest of a checkpoint, with what lineage reads of one."""
    from quern.model.config import ModelConfig
    from quern.train.checkpoint.format.manifest import FileRecord, Manifest

    folder = Path(run.path, "checkpoints", f"step_{step:08d}")
    folder.mkdir(parents=True, exist_ok=True)
    shape = ModelConfig.model_validate(
        {"num_layers": 1, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "vocab_multiple": 64}
    ).shape(100)
    manifest = Manifest(
        step=step, data_step=0, tokens=0, model=shape, layout={}, precision="fp32", order="", ledger_offset=offset,
        corpus_versions={}, corpus_fingerprint="", encoding=None, config_digest="", optimizer=True, scalars={},
        written_by={}, files={".metadata": FileRecord("0" * 64, 0)},
    )  # fmt: skip
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
