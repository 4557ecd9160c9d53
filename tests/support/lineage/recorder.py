"""What a model was shown, written down at its input; and what that was, found again by the bytes alone.

Nothing here reads spans, orders, ledgers or what the loader says of a batch. :func:`record` writes the raw inputs and
targets of every forward pass; :class:`Corpus` finds such a sequence in copies of the shards by its tokens, cuts the
streams into documents at the end-of-text ids, and names a document by the hash of the text its tokens decode to.

Shape legend: L tokens a sequence, S sequences, T tokens of a stream, D documents of a stream.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

IGNORE = -100
HEAD = 4
"""int64 numbers before a call's tokens: step (-1: not a step of training), call, rows, tokens a row."""


class KilledError(Exception):
    """What ends a run as a power cut would: nothing of the trainer's own ending takes place."""


# ---- at the model's input


def live(config: str, folder: str, life: int, kill_at: int | None, skip: Sequence[int]) -> tuple[str, int, int]:
    """One life of this rank, recorded: to the end of ``config`` (JSON), or killed when step ``kill_at`` has its
    gradients. Those of the steps in ``skip`` are NaN. Returns how it began, at which step, and at which data step.
    """
    from quern.train.config import TrainConfig
    from quern.train.processes.ranks import open_ranks
    from quern.train.setup import open_trainer

    settings = TrainConfig.model_validate_json(config)
    with open_ranks(settings.device) as ranks, open_trainer(settings, ranks) as trainer:
        record(trainer, Path(folder, f"life{life}.rank{ranks.rank}"))

        def spoil(trainer: Any, step: int) -> None:
            if step == kill_at:
                raise KilledError
            for parameter in trainer.model.parameters() if step in skip else ():
                parameter.grad.mul_(float("nan"))

        trainer.on_gradients = spoil
        with suppress(KilledError):
            trainer.fit()
        start = trainer.start
    return start.kind, start.step, start.data_step


def record(trainer: Any, path: Path) -> None:
    """Write every forward pass of this rank's model to ``path``, the moment it begins."""
    file = path.open("wb", buffering=0)
    train_step, now, calls = trainer.train_step, [-1], [0]

    def stepped(step: int) -> None:
        now[0] = step
        calls[0] = 0
        train_step(step)
        now[0] = -1

    def seen(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = arguments[0], named["targets_BL"]
        tokens_BL, targets_BL = (tensor.detach().cpu().numpy().astype("<i8") for tensor in given)
        file.write(np.array([now[0], calls[0], *tokens_BL.shape], "<i8").tobytes())
        file.write(tokens_BL.tobytes())
        file.write(targets_BL.tobytes())
        calls[0] += 1

    trainer.train_step = stepped
    trainer.model.register_forward_pre_hook(seen, prepend=True, with_kwargs=True)


@dataclass(frozen=True)
class Recorded:
    """S sequences in the order of their files, ranks and calls."""

    lives: np.ndarray
    ranks: np.ndarray
    steps: np.ndarray
    calls: np.ndarray
    """Of the step, counted by each rank: its micro-batches."""
    rows: np.ndarray
    """Of the call."""
    tokens_SL: np.ndarray
    targets_SL: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)


def read_records(folder: Path) -> tuple[Recorded, Recorded]:
    """What was recorded in training, and outside of it."""
    columns: dict[bool, list[tuple[Any, ...]]] = {True: [], False: []}
    for path in sorted(folder.glob("life*.rank*")):
        life, rank = map(int, re.findall(r"\d+", path.name))
        data, place = np.frombuffer(path.read_bytes(), "<i8"), 0
        while place < len(data):
            step, call, rows, length = data[place : place + HEAD].tolist()
            both = data[place + HEAD : place + HEAD + 2 * rows * length].reshape(2, rows, length)
            columns[step >= 0] += [(life, rank, step, call, row, both[0, row], both[1, row]) for row in range(rows)]
            place += HEAD + 2 * rows * length
    none = ((),) * len(fields(Recorded))
    return tuple(Recorded(*map(np.array, [*zip(*columns[kind], strict=True)] or none)) for kind in (True, False))  # type: ignore[return-value]


# ---- what it was


@dataclass(frozen=True)
class Copied:
    """A stream of the copied shards, cut into documents by nothing but its end-of-text ids."""

    name: str
    tokens_T: np.ndarray
    starts_D: np.ndarray
    stops_D: np.ndarray
    """The end-of-text id is a document's last token."""
    doc_ids: tuple[bytes, ...]
    texts: tuple[str, ...]


class Corpus:
    """The copies of a data run's shards, and what its Parquet rows say of every text.

    ``copy``: a copy of ``RUN/tokens``. ``rows``: doc_id → verdict row, of every page. ``tokenized``: those that are
    kept and no duplicate.
    """

    def __init__(self, run_dir: Path, copy: Path) -> None:
        self.rows = {row["doc_id"]: row for row in _rows(run_dir / "verdicts")}
        self.texts = {row["doc_id"]: row["text"] for row in _rows(run_dir / "documents", ["doc_id", "text"])}
        removed = {row["doc_id"] for row in _rows(run_dir / "duplicates" / "decisions.parquet", ["doc_id"])}
        self.tokenized = {name for name, row in self.rows.items() if row["stage"] is None and name not in removed}
        by_hash: dict[tuple[str, bytes], list[bytes]] = defaultdict(list)
        for name in self.tokenized:
            by_hash[self.rows[name]["source"], self.rows[name]["post_filter_hash"]].append(name)
        self._table = _decoder((copy / "encoding.tiktoken").read_bytes())
        self.eot = len(self._table)
        self.streams = {folder.name: self._cut(folder, by_hash) for folder in sorted(copy.iterdir()) if folder.is_dir()}

    def _cut(self, folder: Path, by_hash: Mapping[tuple[str, bytes], list[bytes]]) -> Copied:
        dtype = "<u2" if self.eot < 1 << 16 else "<u4"
        shards = [np.frombuffer(path.read_bytes(), dtype) for path in sorted(folder.glob("shard_*.bin"))]
        tokens_T = np.concatenate([np.empty(0, dtype), *shards]).astype(np.int64)
        stops_D = np.flatnonzero(tokens_T == self.eot) + 1
        assert not len(tokens_T) or stops_D[-1] == len(tokens_T)
        starts_D = np.concatenate([np.zeros(min(1, len(stops_D)), np.int64), stops_D[:-1]])
        texts = tuple(self.decode(tokens_T[a : b - 1]) for a, b in zip(starts_D, stops_D, strict=True))
        source = folder.name.removesuffix(".val")
        names = []
        for text in texts:
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            (name,) = by_hash[source, digest]  # a text that two kept documents share would be an exact duplicate
            names.append(name)
        return Copied(folder.name, tokens_T, starts_D, stops_D, tuple(names), texts)

    def decode(self, tokens: Iterable[int]) -> str:
        return b"".join(self._table[token] for token in tokens).decode()

    def find(self, recorded: Recorded) -> list[list[tuple[str, int]]]:
        """Every place of every stream, at any alignment, that reads as the sequence does: its inputs, and the token
        after each wherever the recorded target is one.
        """
        length = recorded.tokens_SL.shape[1]
        wanted_S = _hashes(recorded.tokens_SL)[:, 0]
        found: list[list[tuple[str, int]]] = [[] for _ in wanted_S]
        for stream in self.streams.values():
            if len(stream.tokens_T) <= length:
                continue
            hashes = _hashes(np.lib.stride_tricks.sliding_window_view(stream.tokens_T, length))[:, 0]
            order = np.argsort(hashes, kind="stable")
            first_S, stop_S = (np.searchsorted(hashes[order], wanted_S, side) for side in ("left", "right"))
            for number in np.flatnonzero(first_S < stop_S).tolist():
                for start in sorted(order[first_S[number] : stop_S[number]].tolist()):
                    if _reads(stream.tokens_T, start, recorded.tokens_SL[number], recorded.targets_SL[number]):
                        found[number].append((stream.name, start))
        return found


def _reads(tokens_T: np.ndarray, start: int, tokens_L: np.ndarray, targets_L: np.ndarray) -> bool:
    after = tokens_T[start + 1 : start + len(tokens_L) + 1]
    learned = np.flatnonzero(targets_L != IGNORE)
    if len(after) < len(tokens_L) or (tokens_T[start : start + len(tokens_L)] != tokens_L).any():
        return False
    return bool((after[learned] == targets_L[learned]).all())


def _hashes(tokens_NL: np.ndarray) -> np.ndarray:
    """uint64 [N, 1], equal for equal rows; what is found by it is compared token by token."""
    value = np.zeros((len(tokens_NL), 1), np.uint64)
    with np.errstate(over="ignore"):
        for column in range(tokens_NL.shape[1]):
            value = value * np.uint64(0x9E3779B97F4A7C15) + tokens_NL[:, column, None].astype(np.uint64)
            value ^= value >> np.uint64(29)
    return value


def _decoder(ranks: bytes) -> list[bytes]:
    """The bytes of each id. End-of-text is the first id after these."""
    pairs = sorted((int(rank), base64.b64decode(token)) for token, rank in map(bytes.split, ranks.splitlines()))
    assert [rank for rank, _ in pairs] == list(range(len(pairs)))
    return [token for _, token in pairs]


def _rows(path: Path, columns: list[str] | None = None) -> Iterator[dict[str, Any]]:
    for file in sorted(path.rglob("*.parquet")) if path.is_dir() else [path]:
        table: pa.Table = pq.ParquetFile(file).read(columns)
        yield from table.to_pylist()
