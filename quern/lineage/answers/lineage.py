"""Lineage for Python code: what the ``quern lineage`` commands answer, as plain data and Arrow tables."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa

from quern.data_pipeline.execution.run_directory import is_complete
from quern.errors import InputError
from quern.lineage.answers.exposure import exposure_answer
from quern.lineage.answers.matches import match_answer
from quern.lineage.answers.opened import open_data_run, open_training_run
from quern.lineage.answers.show import show_answer
from quern.lineage.answers.step import step_answer
from quern.lineage.match import AUTO, DEFAULT_N, match
from quern.lineage.sql.query import UNFINISHED, classify, query_table
from quern.lineage.store import IndexedRun
from quern.lineage.training import TrainingRun
from quern.train.history.consumers import read_consumers

__all__ = ["Lineage"]

log = logging.getLogger(__name__)

_TEXT, _INT, _BOOL, _RANGE = pa.string(), pa.int64(), pa.bool_(), pa.list_(pa.int64())
_EXPOSURES = pa.schema(
    {
        "step": _INT, "data_step": _INT, "attempt": _INT, "sequence": _INT, "source": _TEXT, "epoch": _INT,
        "window": _INT, "doc_id": _TEXT, "url": _TEXT, "kind": _TEXT, "inputs": _RANGE, "targets": _RANGE,
        "applied": _BOOL, "purged": _BOOL, "surviving": _BOOL,
    }
)  # fmt: skip


class Lineage:
    """A data run or a training run, opened for questions. :meth:`sql` reads what is there now; the others answer as of
    the first question of this object: open the run again after it has grown.

    :meth:`show` and :meth:`match` are of a data run, :meth:`exposure` and :meth:`step` of a training run, :meth:`sql`
    of both. Answers have the keys that the command of the same name prints with ``--json``. The first question that
    needs the index of a data run builds it.

    Attributes: ``path`` (absolute), ``kind`` (``data`` or ``training``).

    Raises:
        InputError: there is no run. Every method: the question does not fit the run, or what it names is not there.
    """

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self.path, training = classify(os.fspath(run))
        self.kind = "training" if training else "data"
        if self.kind == "data" and not is_complete(self.path):
            log.warning("%s: %s", self.path, UNFINISHED)

    def __repr__(self) -> str:
        return f"<quern.Lineage of the {self.kind} run {self.path}>"

    @cached_property
    def _data(self) -> IndexedRun:
        if self.kind != "data":
            raise InputError(f"{self.path}: is a training run; expected a data run, as those of data_runs are")
        return open_data_run(self.path)

    @cached_property
    def _training(self) -> TrainingRun:
        if self.kind != "training":
            raise InputError(f"{self.path}: is a data run; expected a training run, as those of training_runs are")
        return open_training_run(self.path)

    @property
    def training_runs(self) -> list[str]:
        """Folders of the training runs that have read the data run, in the order of their first start."""
        return list(dict.fromkeys(started.train_run for started in read_consumers(self._data.run)))

    @property
    def data_runs(self) -> list[str]:
        """Folders of the data runs that the training run has read and that are there."""
        return [own.run for own in self._training.lineages()]

    def show(
        self,
        *,
        url: str | None = None,
        doc: str | None = None,
        shard: str | None = None,
        token: int | None = None,
        source: str | None = None,
        text_chars: int | None = None,
    ) -> dict[str, Any]:
        """Everything known of a document: of a ``url`` in any spelling, of a doc_id ``doc``, or of token ``token`` of a
        ``shard`` (``<source>/shard_00000``). ``document`` is None where ``documents`` lists several of one URL.
        ``text_chars``: characters of the text (None: all)."""
        return show_answer(self._data, url=url, doc=doc, shard=shard, token=token, source=source, text_chars=text_chars)

    def match(
        self,
        benchmark: str | os.PathLike[str],
        *,
        fields: Sequence[str] = (AUTO,),
        n: int = DEFAULT_N,
        min_coverage: float = 0.0,
        workers: int = 1,
        out: str | os.PathLike[str] | None = None,
    ) -> dict[str, Any]:
        """The documents and token spans that hold text of ``benchmark``, a file of JSON lines: ``n`` words in a row.

        ``min_coverage``: least share of an item's n-grams. ``workers``: processes. ``out``: a Parquet file that keeps
        the result, for ``exposure(match=out)``."""
        found = match(
            self._data, os.fspath(benchmark), fields=tuple(fields), n=n, min_coverage=min_coverage, workers=workers
        )
        if out is not None:
            found.save(os.fspath(out))
        return match_answer(found)

    def sql(self, statement: str, *, memory_bytes: int | None = None, threads: int | None = None) -> pa.Table:
        """All rows of one query over the views documents, verdicts, duplicates, spans, measures and steps.

        ``memory_bytes`` and ``threads`` are DuckDB's (None: 4 GiB, at most half of the machine's; every core)."""
        return query_table(self.path, statement, memory_bytes=memory_bytes, threads=threads, note=log.warning)

    def exposure(
        self,
        *,
        url: str | None = None,
        domain: str | None = None,
        doc: str | None = None,
        match: str | os.PathLike[str] | None = None,
        limit: int | None = None,
        abandoned: bool = False,
        store: bool = False,
    ) -> dict[str, Any]:
        """Every step whose batch held a token of the documents, the checkpoints that have seen them, and the last clean
        one. ``rows`` is an Arrow table, a row for each part of a sequence.

        ``limit``: at most so many rows (None: all). ``abandoned``: also rows of branches that the run has left.
        ``store``: also checkpoints that only the run's store has."""
        asked = {"url": url, "domain": domain, "doc": doc, "match": None if match is None else os.fspath(match)}
        answer = exposure_answer(self._training, asked, limit=limit, abandoned=abandoned, store=store)
        return answer | {"rows": pa.Table.from_pylist(answer["rows"], schema=_EXPOSURES)}

    def step(self, step: int, *, rank: int | None = None, attempt: int | None = None) -> dict[str, Any]:
        """The documents of the batch of a step, sequence by sequence; of one data-parallel ``rank``, or as an earlier
        ``attempt`` read it."""
        answer = step_answer(self._training, step, rank=rank, attempt=attempt)
        return answer | {"sequences": list(answer["sequences"])}
