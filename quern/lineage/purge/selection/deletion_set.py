"""Closes a selection of documents: adds the same URLs, the same texts, and duplicates removed in their favour.

The deletion set is the least set that holds the selection and, with a document,

- every record of the same canonical URL, ``http`` and ``https`` alike;
- every document of the same text (``post_filter_hash``); one that a filter had dropped brings no URL of its own: a
  notice is shown at many addresses, whose other pages are not meant;
- every document that duplicate removal took out in its favour (not where those are decided anew: ``restore``).

Equal texts and equal URLs go together or not at all, and so does what hangs on a survivor. What is left is therefore
decided by duplicate removal as before: a run over the same inputs that leaves the deletion set out keeps what this run
keeps without them. (One reservation: where more documents share a band value than ``max_band_members``, each was
compared with the first of them only, and without the deletion set others are the first:
``restoration.affected.capped_bands``.)

The closure is found by streaming a few columns of all verdict tables, in turns, until nothing new is found. Keys that
a turn finds are looked up in the same turn from there on, so that the turns end where they began; memory is for the
deletion set and some hundred thousand rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quern import storage
from quern.data_pipeline.dedup.schemas import DECISIONS
from quern.data_pipeline.page.document import HASH
from quern.data_pipeline.page.url import canonicalize
from quern.errors import InputError
from quern.lineage.index.decided import redecided
from quern.lineage.index.hashes import halves
from quern.lineage.purge.selection.select import Wanted
from quern.lineage.purge.tables.row_groups import GONE
from quern.lineage.purge.tables.verdict_rows import VerdictRows, below, joined, read_verdicts, rows_of
from quern.lineage.purge.tables.whole import require_verdicts
from quern.storage.parquet import read_batches

__all__ = ["DELETION_SET_SCHEMA", "WHY", "find_deletion_set", "standing_decisions"]

#: Why a document is in the deletion set: it was asked for itself, or it has the canonical URL, or the text, of one that
#: is, or was removed as a duplicate of one that is.
WHY = ("selected", "url", "text", "duplicate")

#: One row a document to delete, sorted by ``doc_id``.
DELETION_SET_SCHEMA = pa.schema(
    [
        pa.field("doc_id", HASH, nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("partition", pa.string(), nullable=False),  # its verdicts file below the source, without .parquet
        pa.field("canonical_url", pa.string()),
        pa.field("post_filter_hash", HASH),
        pa.field("why", pa.string(), nullable=False),  # one of WHY
        pa.field("through", HASH),  # the document that drew it in; null where it was selected
        pa.field("stage", pa.string()),  # the stage that dropped it; null where none did
        pa.field("removed_as", pa.string()),  # the kind of the decision that removes it, if one does
    ]
)

#: Rows that are looked at together: every look builds a table of the keys that are sought.
_ROWS = 1 << 18
#: Things not found that an error or a note names.
_SHOWN = 5
_SCHEMES = ("http://", "https://")

Note = Callable[[str], None]


def find_deletion_set(
    run: str,
    wanted: Wanted,
    duplicates: Literal["purge", "restore"] = "purge",
    *,
    note: Note = lambda line: None,
    rows_at_once: int = _ROWS,
) -> pa.Table:
    """The closure of ``wanted``: :data:`DELETION_SET_SCHEMA`, sorted by ``doc_id``. ``run``: on any store.

    ``duplicates``: whether what was removed in favour of a document to delete is in the deletion set too.
    ``note`` takes lines for the person: what is wanted and not in the run, where that is no error.

    Raises:
        InputError: nothing of what is wanted is in the run, or a part of it is not and ``wanted.strict``; a table of
            the run is missing or damaged.
    """
    require_verdicts(run)
    closure = _Closure(run, wanted, rows_at_once)
    closure.sweep()
    _report_missing(run, wanted, closure, note)
    while True:
        if duplicates == "purge":
            closure.follow_decisions()
        if closure.settled:
            return closure.table()
        closure.sweep()


def standing_decisions(
    run: str, again: pa.Table, columns: Sequence[str], rows_at_once: int = _ROWS
) -> Iterator[pa.RecordBatch]:
    """The decisions in force: the run's own, overridden by those of later versions (``again``)."""
    for batch in read_batches(storage.join(run, DECISIONS), columns, rows_at_once, missing=GONE):
        stand = pc.invert(pc.is_in(batch["doc_id"], value_set=again["doc_id"].combine_chunks()))
        yield batch.filter(stand)
    yield from again.filter(pc.is_valid(again["kind"])).select(columns).combine_chunks().to_batches()


def _rest(url: str) -> str:
    """A URL without its scheme."""
    return url.partition("://")[2] if url.startswith(_SCHEMES) else url


def _report_missing(run: str, wanted: Wanted, closure: _Closure, note: Note) -> None:
    kinds = (
        ("URL", "URLs", [url for url in wanted.urls if _rest(url) not in closure.seen]),
        ("host", "hosts", [domain for domain in wanted.domains if domain not in closure.seen]),
        ("doc_id", "doc_ids", sorted(doc_id.hex() for doc_id in wanted.doc_ids if doc_id not in closure.seen)),
    )
    for one, many, missing in kinds:
        if not missing:
            continue
        bare = " (it is no http or https URL)"
        names = missing[:_SHOWN]
        whys = [bare if one == "URL" and canonicalize(name) is None else "" for name in names]
        shown = ", ".join(" ".join(name.split())[:200] + why for name, why in zip(names, whys, strict=True))
        more = f" and {len(missing) - _SHOWN:,} more" if len(missing) > _SHOWN else ""
        text = f"{run}: has no document of {one if len(missing) == 1 else f'{len(missing):,} {many}'}: {shown}{more}"
        if wanted.strict or not closure.seen:
            raise InputError(text)
        note(text)


# ---- the closure


@dataclass
class _Keys:
    """Keys in the order in which they came, none twice, and the document (``binary(16)``) that brought each."""

    type: pa.DataType
    keys: list[pa.Array] = field(default_factory=list)
    docs: list[pa.Array] = field(default_factory=list)
    count: int = 0

    def append(self, keys: pa.Array, docs: pa.Array) -> None:
        """Add what is known to be new."""
        self.keys.append(keys)
        self.docs.append(docs)
        self.count += len(keys)

    def add(self, keys: pa.Array, docs: pa.Array) -> None:
        """Add what is not null, nor there yet."""
        new = pc.and_(keys.is_valid(), pc.invert(pc.is_in(keys, value_set=self.since(0)[0])))
        keys, docs = keys.filter(new), docs.filter(new)
        first = np.unique(pc.index_in(keys, value_set=pc.unique(keys)).to_numpy(), return_index=True)[1]
        self.append(keys.take(pa.array(first)), docs.take(pa.array(first)))

    def since(self, place: int) -> tuple[pa.Array, pa.Array]:
        """The keys after the first ``place``, and the documents that added them."""
        columns = pa.chunked_array(self.keys, self.type), pa.chunked_array(self.docs, HASH)
        keys, docs = (column.slice(place).combine_chunks() for column in columns)
        return keys, docs


class _Closure:
    """What is known so far.

    A *unit* is a number of consecutive rows of all verdict tables. ``checked`` are for each unit the numbers of keys
    that it was looked through for.
    """

    def __init__(self, run: str, wanted: Wanted, rows_at_once: int) -> None:
        self.run, self.wanted, self.rows_at_once = run, wanted, rows_at_once
        folder = storage.join(run, "verdicts")
        self.names = [
            tuple(path.removesuffix(".parquet").split("/")[-2:])
            for path in storage.list_files(folder)
            if path.endswith(".parquet")
        ]
        if not self.names:
            raise InputError(f"{run}: expected a data run: it has no verdicts/<source>/<partition>.parquet")
        self.urls, self.texts = _Keys(pa.string()), _Keys(HASH)
        self.drawn, self.members, self.found = _Keys(HASH), _Keys(HASH), _Keys(HASH)
        """Drawn in by decisions; all of them; those whose rows were found. What brought it stands beside each."""
        self.checked: list[tuple[int, int, int]] = []
        self.followed = 0
        """Members whose removed duplicates are known."""
        self.parts: list[pa.Table] = []
        self.redecided = redecided(run)
        self.rests = {_rest(url) for url in wanted.urls if canonicalize(url)}
        """Of the URLs that are wanted, what stands behind the scheme; those without a canonical form are not in it."""
        self.spelled = {url for url in wanted.urls if not canonicalize(url)}
        self.seen: set[str | bytes] = set()
        """Of what is wanted, what the run has; URLs without their scheme."""

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.urls.count, self.texts.count, self.drawn.count

    @property
    def settled(self) -> bool:
        """Whether every unit was searched for every key."""
        return all(checked == self.counts for checked in self.checked)

    # ---- verdicts

    def sweep(self) -> None:
        """Search the units in turn, until one comes that has been searched for all keys."""
        first = not self.checked
        for unit, rows in enumerate(self._units()):
            if first:
                self.checked.append((0, 0, 0))
                self._add(rows, self._selected(rows), "selected", None)
            elif self.checked[unit] == self.counts:  # and so are those behind it
                break
            self._close(rows, unit)
        there = pc.is_in(self.drawn.since(0)[0], value_set=self.found.since(0)[0])
        missing = self.drawn.count - int(pc.sum(there).as_py() or 0)
        if missing:
            raise InputError(f"{self.run}: {DECISIONS} names {missing:,} documents that no verdict table has")

    def _close(self, rows: VerdictRows, unit: int) -> None:
        """Add what the keys draw in, and what the keys of that draw in."""
        while (checked := self.checked[unit]) != self.counts:
            self.checked[unit] = self.counts
            rests, docs = self.urls.since(checked[0])
            spellings = pa.concat_arrays([pc.binary_join_element_wise(scheme, rests, "") for scheme in _SCHEMES])
            self._draw(rows, rows.urls, spellings, pa.concat_arrays([docs] * len(_SCHEMES)), "url")
            self._draw(rows, rows.texts, *self.texts.since(checked[1]), "text")
            self._draw(rows, rows.doc_ids, *self.drawn.since(checked[2]), "duplicate")

    def _draw(self, rows: VerdictRows, column: pa.Array, keys: pa.Array, docs: pa.Array, why: str) -> None:
        if len(keys):
            place = pc.index_in(column, value_set=keys)
            hit = np.flatnonzero(place.is_valid().to_numpy(zero_copy_only=False))
            self._add(rows, hit, why, docs.take(place.take(pa.array(hit))))

    def _add(self, rows: VerdictRows, hit: np.ndarray, why: str, through: pa.Array | None) -> None:
        """Add rows to the deletion set, but those that are."""
        if not len(hit):
            return
        doc_ids = rows.doc_ids.take(pa.array(hit))
        new = pc.invert(pc.is_in(doc_ids, value_set=self.found.since(0)[0]))
        hit, doc_ids = hit[new.to_numpy(zero_copy_only=False)], doc_ids.filter(new)
        if not len(hit):
            return
        through = pa.nulls(len(hit), HASH) if through is None else through.filter(new)
        at = pa.array(hit)
        urls, texts, stages = rows.urls.take(at), rows.texts.take(at), rows.stages.take(at)
        if why == "text":  # a page that was dropped has shown a text, and no more: notices are shown at many addresses
            urls = pc.if_else(stages.is_valid(), pa.scalar(None, pa.string()), urls)
        columns = {
            "doc_id": doc_ids, "canonical_url": urls, "post_filter_hash": texts, "through": through,
            "stage": stages, "why": pa.array([why] * len(hit)), "file": pa.array(rows.files[hit]),
        }  # fmt: skip
        self.parts.append(pa.table(columns))
        self.found.append(doc_ids, doc_ids)
        self.members.add(doc_ids, doc_ids)
        self.urls.add(pc.replace_substring_regex(urls, "^https?://", ""), doc_ids)
        self.texts.add(texts, doc_ids)

    def _selected(self, rows: VerdictRows) -> np.ndarray:
        """The rows that are wanted themselves."""
        hit = np.zeros(len(rows.doc_ids), np.bool_)
        if self.wanted.doc_ids:
            own = pc.is_in(rows.doc_ids, value_set=pa.array(sorted(self.wanted.doc_ids), HASH))
            self.seen.update(rows.doc_ids.filter(own).to_pylist())
            hit |= own.to_numpy(zero_copy_only=False)
        if self.rests:
            spellings = pa.array([scheme + rest for scheme in _SCHEMES for rest in sorted(self.rests)], pa.string())
            own = pc.is_in(rows.urls, value_set=spellings)
            self.seen.update(url.partition("://")[2] for url in pc.unique(rows.urls.filter(own)).to_pylist())
            hit |= own.to_numpy(zero_copy_only=False)
        for row, url in rows.spelled:
            if url in self.spelled:
                self.seen.add(_rest(url))
                hit[row] = True
        for domain in self.wanted.domains:
            own = below(rows.urls, domain)
            if own.any():
                self.seen.add(domain)
                hit |= own
        return np.flatnonzero(hit)

    def _units(self) -> Iterator[VerdictRows]:
        held: list[VerdictRows] = []
        rows = 0
        for place, table in self._tables():
            held.append(rows_of(table, place))
            rows += table.num_rows
            if rows >= self.rows_at_once:
                unit, held, rows = joined(held), [], 0  # nothing of it is held here while it is looked through
                yield unit
                del unit
                pa.default_memory_pool().release_unused()
        if held:
            yield joined(held)

    def _tables(self) -> Iterator[tuple[int, pa.Table]]:
        """Some rows of a verdict table at a time, with the place of its name; on a store whole tables, the next ones
        being on their way meanwhile."""
        paths = [storage.join(self.run, "verdicts", source, f"{name}.parquet") for source, name in self.names]
        if storage.is_local(self.run):
            yield from ((place, table) for place, path in enumerate(paths) for table in read_verdicts(path))
            return
        whole = storage.each(
            lambda path: pa.concat_tables(read_verdicts(path), promote_options="default"), paths, self.run
        )
        yield from enumerate(whole)

    # ---- decisions

    def follow_decisions(self) -> None:
        """Add documents that were removed in favour of members, transitively."""
        while self.followed < (count := self.members.count):
            for batch in self._decisions(["doc_id", "duplicate_of"]):
                keys, _ = self.members.since(self.followed)
                hit = batch.filter(pc.is_in(batch["duplicate_of"], value_set=keys))
                doc_ids, of = hit["doc_id"], hit["duplicate_of"]
                new = pc.invert(pc.is_in(doc_ids, value_set=self.members.since(0)[0]))
                self.drawn.add(doc_ids.filter(new), of.filter(new))
                self.members.add(doc_ids.filter(new), of.filter(new))
            self.followed = count

    def _decisions(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        return standing_decisions(self.run, self.redecided, columns, self.rows_at_once)

    # ---- the end

    def table(self) -> pa.Table:
        """The deletion set, as :data:`DELETION_SET_SCHEMA` has them."""
        if not self.parts:
            return DELETION_SET_SCHEMA.empty_table()
        found = pa.concat_tables(self.parts)
        order = np.lexsort(halves(b"".join(found["doc_id"].to_pylist()))[::-1])
        found = found.take(pa.array(order)).combine_chunks()
        kinds = pa.nulls(len(found), pa.string())
        for batch in self._decisions(["doc_id", "kind"]):
            place = pc.index_in(found["doc_id"].combine_chunks(), value_set=batch["doc_id"])
            kinds = pc.coalesce(kinds, batch["kind"].cast(pa.string()).take(place))
        sources, names = (pa.array(column) for column in zip(*self.names, strict=True))
        columns: dict[str, Any] = {name: found[name] for name in found.column_names} | {
            "source": sources.take(found["file"].combine_chunks()),
            "partition": names.take(found["file"].combine_chunks()),
            "removed_as": kinds,
        }
        return pa.table([columns[name] for name in DELETION_SET_SCHEMA.names], schema=DELETION_SET_SCHEMA)
