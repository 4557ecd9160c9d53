"""Reads a training run for lineage: its attempts, their orders and sources, and its checkpoints.

An *attempt* is what one line of the ledger opened: steps [``step``, ``stop``) of it are proven, by the lines that
follow it and, of the newest, by the last line of ``metrics.jsonl``. The present weights are made of the attempts'
*surviving* steps: those that no later attempt went back behind.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from quern import storage
from quern.config import load_config
from quern.errors import InputError, QuernError
from quern.lineage.attempts import Attempt, SeenCheckpoint, Stretch
from quern.lineage.index.columns import I64
from quern.mixtures.order import Order
from quern.parallel.planning.context import Context
from quern.tokenize.selection.chosen import CHOSEN, Chosen, Identity
from quern.tokenize.selection.where import open_chosen
from quern.train.checkpoint.format.manifest import (
    CONFIG_FILE,
    Manifest,
    checkpoint_name,
    list_checkpoints,
    read_manifest,
)
from quern.train.history.branch import LEDGER_FILE, left_behind
from quern.train.history.ledger import MOVES, latest_order, reached, read_ledger
from quern.train.history.metrics_file import steps_of_metrics

if TYPE_CHECKING:
    from quern.lineage.store import IndexedRun, Stream
    from quern.train.config import TrainConfig

__all__ = ["Attempt", "SeenCheckpoint", "Stretch", "TrainingRun"]

T = TypeVar("T")


class TrainingRun:
    """The training run in the folder ``path``. ``known``: identities of data runs, and folders that they are in now.

    Attributes: ``path`` (absolute); ``entries``, the ledger's lines; ``order``, the newest; ``attempts``, oldest first;
    ``damaged``, checkpoints that :meth:`checkpoints` could not read, and why.

    Raises:
        InputError: there is no ledger, or it names no order.
        QuernError: the ledger is damaged.
    """

    def __init__(self, path: str, known: Mapping[str, str] | None = None) -> None:
        self._known = known or {}
        self.path = os.path.abspath(path)
        file = os.path.join(self.path, LEDGER_FILE)
        if not os.path.isfile(file):
            raise InputError(f"{path}: expected a training run: it has no {LEDGER_FILE}")
        self.entries = read_ledger(file)
        self._file = file
        newest = latest_order(self.entries)
        if newest is None:
            raise InputError(f"{file}: has no line that begins a run; nothing was read yet")
        self.order: Order = newest
        if self.order.seq_len is None:
            raise InputError(f"{file}: order {newest.hash} does not say how long a window is")
        self.seq_len: int = self.order.seq_len
        self._orders: dict[str, Order] = {newest.hash: newest}
        self.attempts = tuple(self._attempts())
        self.damaged: dict[str, str] = {}
        self._lineages: dict[str, IndexedRun | str] = {}
        self._chosen: dict[str, Chosen] = {}

    @cached_property
    def config(self) -> TrainConfig:
        """The config of the newest attempt.

        Raises:
            InputError: it is missing or damaged.
        """
        from quern.train.config import TrainConfig

        return load_config(os.path.join(self.path, CONFIG_FILE), TrainConfig)

    def of_config(self, read: Callable[[TrainConfig], T], otherwise: T) -> T:
        """What the config says; ``otherwise`` where it is missing or damaged."""
        try:
            return read(self.config)
        except InputError:
            return otherwise

    @property
    def of_other_trainer(self) -> bool:
        """Whether another trainer has the weights, and the checkpoints, and reads by ``quern.batches``."""
        return bool(self._record.get("trainer") == "other")

    @property
    def _record(self) -> dict[str, Any]:
        """What ``run.json`` says; nothing where it is missing or damaged."""
        try:
            record = storage.read_json(os.path.join(self.path, "run.json"))
        except InputError:
            return {}
        return record if isinstance(record, dict) else {}

    # ---- steps

    @property
    def reached(self) -> int:
        """How many steps the present branch has certainly completed."""
        return self.attempts[-1].stop

    def branch(self, steps: int | None = None, lines: int | None = None) -> tuple[Stretch, ...]:
        """The stretches that made the weights after ``steps`` steps (default: all of the present branch), ascending.

        ``lines``: as the first so many lines of the ledger tell it: those before a checkpoint of an abandoned branch.
        """
        stop = self.reached if steps is None else steps
        found: list[Stretch] = []
        for attempt in reversed(self.attempts):
            if (lines is None or attempt.line < lines) and attempt.step < stop:
                found.append(Stretch(attempt, attempt.step, stop))
                stop = attempt.step
        return tuple(found[::-1])

    def kept(self) -> I64:
        """int64 [attempts]: the steps of each below it survive (those from its own ``step`` on)."""
        stops = np.array([attempt.step for attempt in self.attempts], np.int64)
        for stretch in self.branch():
            stops[stretch.attempt.number] = stretch.stop
        return stops

    def folder_of(self, attempt: Attempt) -> str:
        """The folder of the run that made the attempt: a fork's ledger begins with the attempts of its trunk."""
        forks = (entry["path"] for entry in self.entries[attempt.line :] if entry["kind"] == "fork")
        return next(forks, self.path)

    def order_of(self, attempt: Attempt) -> Order:
        """The order an attempt read from.

        Raises:
            QuernError: the ledger does not have it.
        """
        if attempt.order not in self._orders:
            found = latest_order(self.entries[: attempt.line + 1])
            assert found is not None
            self._orders[found.hash] = found
        return self._orders[attempt.order]

    def source_names(self, attempt: Attempt) -> dict[str, str]:
        """What the sources of an attempt's order are called, by identity: the name of the source, and the folder of its
        tokens where several have that name."""
        ids = self.order_of(attempt).ids
        parts = {ident: Identity(ident).stream.rsplit("/", 2) for ident in ids}  # data run, name and version
        named = Counter(name for _, name in {tuple(own[:2]) for own in parts.values() if len(own) == 3})
        return {
            ident: (own[1] if len(own) == 3 and named[own[1]] == 1 else attempt.paths.get(ident, ident))
            + (f" where {attempt.wheres[ident]}" if ident in attempt.wheres else "")
            for ident, own in parts.items()
        }

    def _attempts(self) -> Iterator[Attempt]:
        lines = [line for line, entry in enumerate(self.entries) if entry["kind"] in MOVES]
        for number, (line, end) in enumerate(zip(lines, [*lines[1:], len(self.entries)], strict=True)):
            entry, facts = self.entries[line], self.entries[line + 1 : end]
            ended = any(fact["kind"] in ("end", "stopped", "fork") for fact in facts)
            stop = reached(self.entries[line:end])
            if end == len(self.entries) and not ended:
                stop = max(stop, steps_of_metrics(self.path, number))
            skipped = sorted({fact["step"] for fact in facts if fact["kind"] == "skipped"})
            yield Attempt(
                number=number, kind=entry["kind"], step=entry["step"], data_step=entry["data_step"],
                order=entry["order"], stop=stop, ended=ended, line=line, skipped=np.array(skipped, np.int64),
                paths=_those(str, entry.get("paths")), versions=_those(int, entry.get("versions")),
                dp=_positive(entry.get("dp")), micro_batch=_positive(entry.get("micro_batch")),
                document_mask=self._document_mask(entry), wheres=_those(str, entry.get("wheres")),
                context=Context.from_dict(entry.get("cp")),
            )  # fmt: skip

    def _document_mask(self, entry: Mapping[str, Any]) -> bool:
        told = entry.get("document_mask")
        return told if isinstance(told, bool) else self.config.document_mask

    # ---- data

    def find_stream(self, identity: str) -> tuple[IndexedRun, Stream]:
        """The data run and the stream that a source of any attempt's order reads.

        Raises:
            InputError: neither the ledger nor the config says where it is, or it is not there any more.
        """
        reasons = []
        for lineage in self._opened(identity):
            if isinstance(lineage, str):
                reasons.append(lineage)
                continue
            stream = lineage.stream(Identity(identity).stream)
            if stream is not None:
                return lineage, self._of_chosen(identity, stream)
            reasons.append(f"{lineage.run} does not have it (any more): its corpus is at version {lineage.version}")
        why = "; ".join(dict.fromkeys(reasons)) or "neither the ledger nor the config says where it is"
        raise InputError(f"{self.path}: source {identity}: {why}")

    def _of_chosen(self, identity: str, stream: Stream) -> Stream:
        """The stream of a source's identity, of the whole of which ``stream`` is: what its condition chose stands in
        the run's folder; where it does not any more, the condition is asked again."""
        if not Identity(identity).chosen:
            return stream
        if identity not in self._chosen:
            own = [attempt for attempt in self.attempts if identity in self.order_of(attempt).ids]
            folders = [os.path.join(self.folder_of(attempt), CHOSEN) for attempt in reversed(own)]
            folders = [*dict.fromkeys(folders), os.path.join(self.path, CHOSEN)]
            where = next((attempt.wheres[identity] for attempt in own if identity in attempt.wheres), None)
            self._chosen[identity] = open_chosen(folders, identity, stream.reader, where)
        chosen = self._chosen[identity]
        return replace(stream, identity=identity, total_tokens=chosen.tokens, chosen=chosen)

    @cached_property
    def identities(self) -> list[str]:
        """The sources of any attempt's order, each once."""
        return list(dict.fromkeys(ident for attempt in self.attempts for ident in self.order_of(attempt).ids))

    def identities_of(self, stream: str) -> list[str]:
        """The sources of any attempt's order that read from the stream of this identity: all of it, or documents that a
        condition has chosen."""
        return [ident for ident in self.identities if Identity(ident).stream == stream]

    def lineages(self) -> list[IndexedRun]:
        """The data runs that the sources of any attempt's order are in, each once; those that cannot be opened are left
        out (:meth:`unknown` names them). One whose sources were all rewritten is among them: it knows its documents."""
        found: dict[int, IndexedRun] = {}
        gone: list[str] = []
        for identity in self.identities:
            try:
                lineage, _ = self.find_stream(identity)
            except InputError:
                gone.append(identity)
                continue
            found[id(lineage)] = lineage
        for identity in gone:
            run_id = identity.split("/")[0]
            if run_id not in {lineage.run_id for lineage in found.values()}:
                opened = (own for own in self._opened(identity) if not isinstance(own, str) and own.run_id == run_id)
                found |= {id(lineage): lineage for lineage in list(opened)[:1]}
        return list(found.values())

    def unknown(self) -> dict[str, str]:
        """Sources that any step may have read and whose documents cannot be known, and why: identity → reason."""
        reasons: dict[str, str] = {}
        for attempt in self.attempts:
            order = self.order_of(attempt)
            for source, identity in enumerate(order.ids):
                given = any(row.weights[source] for row in order.phases if row.first_step < attempt.data_stop)
                if given and identity not in reasons:
                    try:
                        self.find_stream(identity)
                    except InputError as error:
                        reasons[identity] = str(error)
        return reasons

    def data_folders(self) -> list[str]:
        """Where the data runs of any attempt's sources may be, the likeliest first of each source."""
        paths = (path for identity in self.identities for path in self._candidates(identity))
        return list(dict.fromkeys(os.path.dirname(os.path.dirname(path)) for path in paths))

    def _opened(self, identity: str) -> Iterator[IndexedRun | str]:
        """The data runs in which a source may be, the likeliest first, or why one cannot be opened."""
        return (self._open(os.path.dirname(os.path.dirname(path))) for path in self._candidates(identity))

    def _candidates(self, identity: str) -> list[str]:
        """Folders in which the tokens of a source may be, the likeliest first."""
        told = [attempt.paths[identity] for attempt in reversed(self.attempts) if identity in attempt.paths]
        told += [os.path.abspath(path) for path in self._configured(identity)]  # the data run may have moved since
        run_id, name, *_ = *Identity(identity).stream.split("/"), ""
        told += [os.path.join(self._known[run_id], "tokens", name)] if run_id in self._known else []
        return list(dict.fromkeys(told))

    def _configured(self, identity: str) -> list[str]:
        """What an older run says of its sources: by identity in run.json, without in the config."""
        sources = self._record.get("sources")
        path = sources.get(identity) if isinstance(sources, dict) else None
        given = [path] if isinstance(path, str) else []
        name = Identity(identity).stream.split("/")[-2] if identity.count("/") > 1 else ""
        paths = self.of_config(lambda config: [source.path for source in config.data], list[str]())
        return given + [path for path in paths if os.path.basename(os.path.normpath(path)) == name]

    def _open(self, run: str) -> IndexedRun | str:
        """The data run in the folder ``run``, or why it cannot be opened."""
        from quern.lineage.store import IndexedRun

        key = os.path.realpath(run)
        if key not in self._lineages:
            try:
                self._lineages[key] = IndexedRun(run)
            except InputError as error:
                gone = f"{run}: is not there (any more): put it back, or make a link at {run} to where it is now"
                self._lineages[key] = str(error) if os.path.isdir(run) else gone
        return self._lineages[key]

    # ---- checkpoints

    def checkpoints(self, store: bool = False) -> list[SeenCheckpoint]:
        """The checkpoints of the run by ascending step, abandoned ones too. One whose manifest is damaged says nothing
        of itself: it is left out here and named in :attr:`damaged`.

        ``store``: also those that only the run's checkpoint.store has.

        Raises:
            QuernError: the store cannot be read, or the ledger is shorter than a checkpoint says.
        """
        found: dict[int, SeenCheckpoint] = {}
        for checkpoint in list_checkpoints(self.path):
            self._add(found, checkpoint.path, partial(read_manifest, checkpoint.path))
        if store:
            from quern.train.checkpoint.store.stored import store_of

            behind = store_of(self.path)
            for step in behind.checkpoints():
                if step not in found:
                    self._add(found, behind.address(step), partial(behind.manifest, step))
        return [found[step] for step in sorted(found)]

    def branch_of(self, seen: SeenCheckpoint) -> tuple[Stretch, ...]:
        """The stretches that made the weights of a checkpoint."""
        return self.branch(seen.step, self._lines(seen.offset))

    def _add(self, found: dict[int, SeenCheckpoint], path: str, read: Callable[[], Manifest]) -> None:
        try:
            manifest = read()
        except InputError as error:
            self.damaged[path] = str(error)
            return
        step, offset = manifest.step, manifest.ledger_offset
        size = os.path.getsize(self._file)
        if offset > size:
            raise QuernError(f"{self._file}: has {size} bytes, {path} names {offset}; lines are lost")
        if offset <= (int(self._line_ends[-1]) if len(self._line_ends) else 0):  # else saved since the run was opened
            why = left_behind(step, self.entries[self._lines(offset) :])
            found[step] = SeenCheckpoint(step, checkpoint_name(step), path, why, offset)

    def _lines(self, offset: int) -> int:
        """How many lines the ledger's first ``offset`` bytes hold."""
        return int(np.searchsorted(self._line_ends, offset, "right"))

    @cached_property
    def _line_ends(self) -> I64:
        """int64 [lines]: where each line of the ledger ends, in bytes."""
        with open(self._file, "rb") as file:
            data = np.frombuffer(file.read(), np.uint8)
        return np.flatnonzero(data == ord("\n"))[: len(self.entries)].astype(np.int64) + 1


def _those(kind: type[T], value: object) -> dict[str, T]:
    """Those of a kind in a mapping; a ledger of another version may hold anything."""
    return {k: v for k, v in value.items() if type(v) is kind} if isinstance(value, dict) else {}


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
